"""`jfl epsilon` and `jfl calibrate`: what numbers on the command line or a config are worth, and
how that grows.

Numbers become one round's event; a config becomes a plan, which the ledger reads.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.options import field
from ..core.records import Guarantee, Plan
from ..privacy import plain_numbers
from ..privacy.accountants import events, pld, rdp, rdp_events, tightest, truncation
from ..privacy.calibration import calibrate as calibrate_plan
from ..privacy.entry_guarantees import overflowing
from ..privacy.ledger import entries
from ..privacy.ledger.entries import EVERY_ROUND, HONEST, PUBLIC, SIMULATION, STOPS
from ..privacy.ledger.entry import events_of, shifts_of
from ..runs import config as configs
from ..runs import record
from ..runs.build import build
from ..runs.config import Config

POINTS = 24  # numbers of rounds of a curve
ORDERS = 1 + np.geomspace(1e-5, 1e7, 1024)
ROUNDS = 100  # if none are given
SMALL = 1e-3  # epsilon below which it takes over a thousand rows to show
CALIBRATED = ("rounds", "rate", "batch", "cohort")
SOLVED = ("noise_multiplier", "rounds", "rate")


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What an accountant has to know about a run."""

    rounds: int | None = field(None, "communication rounds; default 100")
    steps: int = field(
        1,
        "local steps of a round: noisy releases of a client (unit example; unit client has one a "
        "round)",
    )
    sampler: str = field(
        "poisson",
        "of examples (unit example) or clients (unit client): full | without_replacement | poisson",
    )
    rate: float | None = field(
        None, "sampling rate: of examples in a step, or of clients in a round"
    )
    batch: int | None = field(None, "with rows, instead of rate: batch / rows")
    rows: int | None = field(None, "rows of a client")
    cohort: int | None = field(
        None,
        "with clients: unit client instead of rate; unit example for a third party, which sees "
        "models only",
    )
    clients: int | None = field(None, "number of clients")
    unit: str = field("example", "example | client")
    adjacency: str | None = field(
        None,
        "add_remove | replace_one; default add_remove for poisson, replace_one otherwise. It says "
        "what the noise multiplier z is: σ/C under add_remove, σ/(2C) under replace_one, for noise "
        "of standard deviation σ and clip norm C",
    )
    delta: float = field(1e-5, "delta of the guarantee")
    plot: Path | None = field(None, "picture of epsilon against rounds: FILE.png, .svg or .pdf")


@dataclasses.dataclass(frozen=True)
class Epsilon(Numbers):
    """What noise is worth.  With --config FILE.toml: of the run that the file describes.

    example: jfl epsilon --noise-multiplier 1.1 --rounds 200 --steps 5 --batch 16 --rows 600 --plot
    epsilon.png
    """

    noise_multiplier: float = field(1.0, "standard deviation of the noise over the sensitivity")


@dataclasses.dataclass(frozen=True)
class Calibrate(Numbers):
    """The noise multiplier for an epsilon; or the rounds, or the sampling rate.  With --config
    FILE.toml: for the run that the file describes.

    example: jfl calibrate --epsilon 4 --rounds 200 --steps 5 --batch 16 --rows 600

    example: jfl calibrate --epsilon 4 --over rounds --noise-multiplier 1.1 --rate 0.01
    """

    epsilon: float = field(1.0, "epsilon to reach")
    over: str = field("noise_multiplier", "what to find: noise_multiplier | rounds | rate")
    noise_multiplier: float | None = field(
        None, "with over rounds or rate: standard deviation of the noise over the sensitivity"
    )


@dataclasses.dataclass(frozen=True)
class ConfigEpsilon(Config):
    """What the run that a config describes is worth.

    example: jfl epsilon --config run.toml --rounds 200
    """

    plot: Path | None = field(None, "picture of epsilon against rounds: FILE.png, .svg or .pdf")


@dataclasses.dataclass(frozen=True)
class ConfigCalibrate(ConfigEpsilon):
    """The noise multiplier, or the rounds, with which the run of a config reaches an epsilon.

    example: jfl calibrate --config run.toml --epsilon 4
    """

    over: str = field("noise_multiplier", "what to find: noise_multiplier | rounds")


class Curve(NamedTuple):
    """Epsilon against rounds, for each method that applies."""

    rounds: np.ndarray  # [n], ascending
    lines: dict  # method -> Float64[n]
    guarantee: Guarantee  # after the last of them


# --- numbers


def one_round(numbers: Numbers, noise_multiplier: float, rate: float | None = None):
    """The event of one round: releases, sampled and repeated as the numbers say; `rate` instead of
    theirs."""
    checks.require_one_of("jfl", ("example", "client"), unit=numbers.unit)
    checks.require_one_of("jfl", plain_numbers.SAMPLERS, sampler=numbers.sampler)
    adjacency = plain_numbers.adjacency_of("jfl", numbers.sampler, numbers.adjacency)
    checks.require_integer("jfl", steps=numbers.steps)
    given: dict[str, Any] = {
        k: v
        for k, v in dict(
            batch=numbers.batch, rows=numbers.rows, cohort=numbers.cohort, clients=numbers.clients
        ).items()
        if v is not None
    }
    checks.require_integer("jfl", **given)
    taken, whole = _counts(numbers)
    if numbers.rate is not None and taken in given:
        checks.fail("jfl", f"either rate or {taken} and {whole}", f"rate={numbers.rate}, {given}")
    release = events.gaussian(noise_multiplier)
    if rate is not None:
        sampled = plain_numbers.sampled(numbers.sampler, adjacency, rate, 1.0, release)
    else:
        size, population = _sizes(numbers, given)
        sampled = plain_numbers.sampled(numbers.sampler, adjacency, size, population, release)
    if numbers.unit == "client":
        return sampled
    steps = events.repeat(sampled, numbers.steps)
    if numbers.cohort is None:
        return steps
    if numbers.clients is None:
        checks.fail("jfl", "clients beside cohort", "cohort alone")
    return events.participation(numbers.cohort / numbers.clients, steps)


def _sizes(numbers, given):
    """Return how many a sample takes, and of how many, as the numbers say."""
    taken, whole = _counts(numbers)
    if numbers.sampler == "full":
        if numbers.rate is not None:
            checks.fail("jfl", "no rate for sampler='full'", f"rate={numbers.rate}")
        return 1.0, 1.0
    if numbers.sampler == "poisson" and numbers.rate is not None:
        return numbers.rate, 1.0
    if taken not in given or whole not in given:
        checks.fail(
            "jfl",
            ("rate, or " if numbers.sampler == "poisson" else "")
            + f"{taken} and {whole} for sampler={numbers.sampler!r}",
            f"{given or 'neither'}",
            "Or --sampler full, without a gain from sampling.",
        )
    return given[taken], given[whole]


def event(numbers: Numbers, noise_multiplier, rate=None):
    """The event of all rounds."""
    rounds = ROUNDS if numbers.rounds is None else numbers.rounds
    checks.require_integer("jfl", max_value=10**12, rounds=rounds)
    return events.repeat(one_round(numbers, noise_multiplier, rate), rounds)


def guarantee_of_numbers(numbers: Numbers, noise_multiplier: float) -> Guarantee:
    """What the numbers prove."""
    value, method = tightest.epsilon(event(numbers, noise_multiplier), numbers.delta)
    hidden = numbers.unit == "client" or numbers.cohort is not None
    kind = plain_numbers.adjacency_of("jfl", numbers.sampler, numbers.adjacency)
    sampled = numbers.sampler != "full" if numbers.unit == "client" else numbers.cohort is not None
    caveats = ((HONEST,) if sampled and hidden else () if hidden else (EVERY_ROUND,)) + (
        SIMULATION,
        STOPS,
    )
    return Guarantee(
        value,
        numbers.delta,
        numbers.unit,
        kind,
        "third_party" if hidden else "server",
        method,
        caveats=caveats + ((PUBLIC,) if numbers.sampler == "poisson" else ()),
    )


def noise_warning(guarantee: Guarantee, noise_multiplier: float) -> str:
    """A sentence for an epsilon so small that a model of usual size of data would be noise, or so
    large that it protects almost nothing; "" for others.

    By group privacy n rows (clients) change the odds of a result by a factor of at most e^(n
    epsilon), apart from a probability of at most n e^(n epsilon) delta: up to 1 / epsilon and 0.1 /
    delta of them show almost nothing.
    """
    if guarantee.epsilon >= SMALL:
        return record.weak_guarantee(guarantee.epsilon, guarantee.delta)
    unit, hidden = (
        "rows" if guarantee.unit == "example" else "clients",
        min(1 / max(guarantee.epsilon, 1e-300), 0.1 / guarantee.delta),
    )
    return (
        f"epsilon {guarantee.epsilon:.3g} at delta {guarantee.delta:.3g} (noise multiplier "
        f"{noise_multiplier:.3g}) hides even "
        f"{hidden:.2g} {unit} together almost wholly: trained on no more than so many, a model is "
        f"noise."
    )


def words(numbers: Numbers, noise_multiplier) -> str:
    """The setting in a line, for a picture."""
    parts = [
        f"noise multiplier {noise_multiplier:.4g}",
        f"{numbers.sampler.replace('_', ' ')} sampling",
    ]
    parts += [
        f"{k} {getattr(numbers, k):.4g}"
        for k in ("rate", "batch", "rows", "cohort", "clients")
        if getattr(numbers, k) is not None
    ]
    return ", ".join(
        parts + ([f"{numbers.steps} steps a round"] if numbers.unit == "example" else [])
    )


def noise_for(numbers: Numbers, target: float) -> float:
    """The smallest noise multiplier that reaches `target`."""
    return tightest.solve_noise(lambda z: event(numbers, z), target, numbers.delta)


def solve(numbers: Calibrate) -> tuple[Numbers, float]:
    """Find what `--over` names.

    Returns:
        The numbers with it filled in, so that they prove at most their epsilon; and the noise
        multiplier.
    """
    where = "jfl calibrate"
    checks.require_one_of(where, SOLVED, over=numbers.over)
    if (numbers.noise_multiplier is None) != (numbers.over == "noise_multiplier"):
        checks.fail(
            where,
            "noise_multiplier for --over rounds and --over rate, and for nothing else",
            f"noise_multiplier={numbers.noise_multiplier}, over={numbers.over!r}",
        )
    checks.require_positive(where, epsilon=numbers.epsilon)
    z: Any = numbers.noise_multiplier
    if numbers.over == "noise_multiplier":
        return numbers, noise_for(numbers, numbers.epsilon)
    if numbers.over == "rounds":
        if numbers.rounds is not None:
            checks.fail(
                where, "no rounds for --over rounds, which finds them", f"rounds={numbers.rounds}"
            )
        return dataclasses.replace(
            numbers,
            rounds=_at_least_one(
                tightest.solve_rounds(one_round(numbers, z), numbers.epsilon, numbers.delta),
                numbers,
            ),
        ), z
    taken, whole = _counts(numbers)
    if numbers.sampler == "full" or numbers.rate is not None or getattr(numbers, taken) is not None:
        checks.fail(
            where,
            (
                f"a sampler other than 'full', no rate and no {taken} for --over rate, which finds "
                f"them"
            ),
            f"sampler={numbers.sampler!r}, rate={numbers.rate}, {taken}={getattr(numbers, taken)}",
        )
    if numbers.sampler != "poisson" and getattr(numbers, whole) is None:
        checks.fail(
            where,
            f"{whole} for --over rate with sampler={numbers.sampler!r}",
            "none",
            f"The answer is an integer {taken}.",
        )
    rate = tightest.solve_rate(lambda q: event(numbers, z, q), numbers.epsilon, numbers.delta)
    if numbers.sampler == "poisson":
        return dataclasses.replace(numbers, rate=rate), z
    checks.require_integer(where, **{whole: getattr(numbers, whole)})
    return dataclasses.replace(
        numbers, **{taken: _at_least_one(int(rate * getattr(numbers, whole)), numbers)}
    ), z


def _counts(numbers) -> tuple[str, str]:
    """The names of how many a sample takes, and of how many."""
    return ("batch", "rows") if numbers.unit == "example" else ("cohort", "clients")


def _at_least_one(number, numbers):
    if number < 1:
        checks.fail(
            "jfl calibrate",
            f"an epsilon that one of {numbers.over} stays below",
            f"epsilon={numbers.epsilon:g}",
            "Raise epsilon, delta or the noise.",
        )
    return number


# --- configs


def guarantees_of_plan(
    plan, rounds: int, delta: float, claims: tuple = ()
) -> tuple[list[dict], Curve | None]:
    """All guarantees of a plan, claims, and the curve of the guarantee to show; none without a
    guarantee."""
    found = record.privacy(plan, rounds, delta, claims)
    best = record.best(found)
    if best["epsilon"] is None:
        return found, None
    alike = lambda e: (
        (e.unit, e.adjacency, e.view) == (best["unit"], best["adjacency"], best["view"])
        and e.implied == best["implied"]
    )
    fit = [e for e in entries.entries(plan, rounds) if alike(e) and not (e.refusal or e.changes)]
    if not fit:
        return found, None
    # noise on uploads and on the release: the better one counts
    first, entry = min(
        ((overflowing(e, np.array([rounds]), delta)[0][0], e) for e in fit),
        key=lambda pair: pair[0],
    )
    # of the whole run, so of fewer rounds too
    left = truncation.left_of(delta, shifts_of(entry, rounds))
    left -= entry.overflow * rounds * (1 + np.exp(first))
    worst = max(
        events_of(entry),
        key=lambda e: rdp_events.bounds((e,), np.array([rounds]), np.array([left]))[0][0],
    )
    fields: dict[str, Any] = {k: best[k] for k in Guarantee._fields}
    fields["caveats"] = tuple(best["caveats"])
    shown = Guarantee(**fields)
    return found, curve(worst, rounds, left, shown)


def solve_config(config: Config, over: str, target: float | None) -> tuple[Config, Plan]:
    """The config that reaches `target`, and its plan; over "noise_multiplier" or "rounds"."""
    where = "jfl calibrate"
    checks.require_one_of(where, SOLVED, over=over)
    if target is None:
        checks.fail(where, "epsilon in the config or --epsilon", "neither")
    if over == "rate":
        checks.fail(
            where,
            "noise_multiplier or rounds for --over beside --config",
            "rate",
            "For a sampling rate give bare numbers instead of a config.",
        )
    if over == "noise_multiplier":
        plan, found = build(dataclasses.replace(config, epsilon=target, noise_multiplier=None))
        return found, plan
    if config.noise_multiplier is None:
        checks.fail(where, "noise_multiplier for --over rounds", "none")
    config = dataclasses.replace(config, epsilon=None)
    plan, _ = build(config)
    most = calibrate_plan(
        plan,
        epsilon=target,
        delta=config.delta,
        unit=configs.the_unit(config),
        view=configs.the_view(config),
        adjacency=config.adjacency,
        over="rounds",
    )
    if most < 1:
        checks.fail(
            where,
            "an epsilon that one round stays below",
            f"epsilon={target:g}",
            "Raise epsilon or the noise.",
        )
    return dataclasses.replace(config, rounds=most), plan


# --- curves


def curve(one, rounds: int, delta: float, guarantee: Guarantee) -> Curve:
    """Epsilon after 1, ... `rounds` rounds of the event `one`, by every method that applies.

    The last point of the guarantee's own method is the guarantee's epsilon; other points are on a
    coarser grid.
    """
    points = np.unique(
        np.append(np.geomspace(1, rounds, POINTS), record.milestones(rounds))
        .round()
        .astype(np.int64)
    )
    values, exact = rdp_events.bounds((one,), points, np.full(len(points), float(delta)))
    lines = {
        rdp_events.EXACT if exact.all() else f"{rdp_events.SAMPLED} or {rdp_events.EXACT}": values
    }
    if tightest.takes(one, rounds):
        # draws that repeat more often than is counted are paid for, as in `rdp_events.bounds`
        counted, rare = rdp_events.with_multiplicities(one, delta / rounds / 100)
        left = delta - rare * points
        renyi = points[:, None] * np.asarray(rdp_events.curve(counted, ORDERS))
        lines = {
            rdp_events.SAMPLED: np.asarray(rdp.epsilon(ORDERS, renyi, left[:, None])),
            rdp_events.EXACT: np.asarray(
                rdp.gaussian_epsilon(np.sqrt(points * float(events.precision(counted))), left)
            ),
        }
        try:
            lines = (
                {tightest.LOSS_DISTRIBUTION: pld.epsilon(one, delta, points, tightest.COARSE)[0]}
                if delta >= tightest.MIN_PLD_DELTA
                else {}
            ) | lines
        except NotAnalysable:  # numbers outside its range
            pass
    mine = guarantee.method.split(",")[0]
    if mine in lines:
        lines[mine] = np.append(np.minimum(lines[mine][:-1], guarantee.epsilon), guarantee.epsilon)
    return Curve(points, lines, guarantee)
