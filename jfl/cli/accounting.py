"""`jfl epsilon` and `jfl calibrate`, for numbers on the command line or for a config.

Numbers become the event of a round, and a config becomes a plan.  Both are accounted for by the
rules of `jfl.epsilon` and `jfl.guarantee`.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core import checks
from ..core.options import field
from ..core.records import Guarantee, Plan
from ..privacy import plain_numbers
from ..privacy.accountants import events, tightest
from ..privacy.calibration import calibrate as calibrate_plan
from ..privacy.ledger.entries import EVERY_ROUND, HONEST, PUBLIC, SIMULATION, STOPS
from ..runs import config as configs
from ..runs import guarantee_rows
from ..runs.build import build
from ..runs.config import Config

NUM_CURVE_POINTS = 12
DEFAULT_ROUNDS = 100
# Below this epsilon, it takes more than a thousand rows to change a result noticeably.
SMALL_EPSILON = 1e-3
FOUND_FIELDS = ("rounds", "rate", "batch", "cohort")
UNKNOWNS = ("noise_multiplier", "rounds", "rate")


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers that determine the epsilon of a run."""

    rounds: int | None = field(None, f"communication rounds; default {DEFAULT_ROUNDS}")
    steps: int = field(
        1,
        "local steps per round, each a noisy release of a client (unit example); a client-level "
        "release happens once per round",
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
        "with clients: for unit client, instead of rate; for unit example, the observer is a third "
        "party that sees only models",
    )
    clients: int | None = field(None, "number of clients")
    unit: str = field("example", "example | client")
    adjacency: str | None = field(
        None,
        "add_remove | replace_one; default add_remove for poisson, replace_one otherwise. The "
        "noise multiplier z is σ/C under add_remove and σ/(2C) under replace_one, for noise of "
        "standard deviation σ and clip norm C",
    )
    delta: float = field(1e-5, "delta of the guarantee")
    plot: Path | None = field(None, "plot of epsilon against rounds: FILE.png, .svg or .pdf")

    @property
    def size_fields(self) -> tuple[str, str]:
        """The names of the two fields whose ratio is the sampling rate."""
        return ("batch", "rows") if self.unit == "example" else ("cohort", "clients")


@dataclasses.dataclass(frozen=True)
class Epsilon(Numbers):
    """Compute epsilon from numbers.  With --config FILE.toml: for the run that the file describes.

    example: jfl epsilon --noise-multiplier 1.1 --rounds 200 --steps 5 --batch 16 --rows 600 --plot
    epsilon.png
    """

    noise_multiplier: float = field(1.0, "standard deviation of the noise over the sensitivity")


@dataclasses.dataclass(frozen=True)
class Calibrate(Numbers):
    """Find the noise multiplier, the rounds or the sampling rate for an epsilon.  With --config
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
    """Compute epsilon of the run that a config describes.

    example: jfl epsilon --config run.toml --rounds 200
    """

    plot: Path | None = field(None, "plot of epsilon against rounds: FILE.png, .svg or .pdf")


@dataclasses.dataclass(frozen=True)
class ConfigCalibrate(ConfigEpsilon):
    """Find the noise multiplier, or the rounds, with which the run of a config reaches an epsilon.

    example: jfl calibrate --config run.toml --epsilon 4
    """

    over: str = field("noise_multiplier", "what to find: noise_multiplier | rounds")


class Curve(NamedTuple):
    """Epsilon against rounds."""

    rounds: np.ndarray  # Int[n], ascending
    epsilons: np.ndarray  # Float64[n]
    guarantee: Guarantee  # after the last of the rounds


# --- numbers


def guarantee_of_numbers(numbers: Numbers, noise_multiplier: float) -> Guarantee:
    """Return the guarantee that the numbers prove."""
    value, method = tightest.epsilon(_event(numbers, noise_multiplier), numbers.delta)
    third_party = numbers.unit == "client" or numbers.cohort is not None
    sampled = numbers.sampler != "full" if numbers.unit == "client" else numbers.cohort is not None
    assumed = () if third_party else (EVERY_ROUND,)
    return Guarantee(
        value,
        numbers.delta,
        numbers.unit,
        plain_numbers.adjacency_of("jfl", numbers.sampler, numbers.adjacency),
        "third_party" if third_party else "server",
        method,
        caveats=((HONEST,) if sampled and third_party else assumed)
        + (SIMULATION, STOPS)
        + ((PUBLIC,) if numbers.sampler == "poisson" else ()),
    )


def curve_of_numbers(numbers: Numbers, noise_multiplier: float, guarantee: Guarantee) -> Curve:
    """Return epsilon after several numbers of rounds, up to those of the numbers."""
    one = _round_event(numbers, noise_multiplier)
    proved = lambda rounds: tightest.epsilon(events.repeat(one, rounds), numbers.delta)[0]
    rounds = _curve_rounds(numbers.rounds or DEFAULT_ROUNDS)
    epsilons = np.array([*map(proved, rounds[:-1].tolist()), guarantee.epsilon])
    return Curve(rounds, np.minimum.accumulate(epsilons[::-1])[::-1], guarantee)


def solve(numbers: Calibrate) -> tuple[Numbers, float]:
    """Find what `--over` names.

    Returns:
        The numbers with the answer filled in, so that they prove at most their epsilon; and the
        noise multiplier.
    """
    where = "jfl calibrate"
    checks.require_one_of(where, UNKNOWNS, over=numbers.over)
    if (numbers.noise_multiplier is None) != (numbers.over == "noise_multiplier"):
        checks.fail(
            where,
            "noise_multiplier for --over rounds and --over rate, and for nothing else",
            f"noise_multiplier={numbers.noise_multiplier}, over={numbers.over!r}",
        )
    checks.require_positive(where, epsilon=numbers.epsilon)
    z: Any = numbers.noise_multiplier
    target, delta = numbers.epsilon, numbers.delta
    if numbers.over == "noise_multiplier":
        return numbers, tightest.solve_noise(lambda z: _event(numbers, z), target, delta)
    if numbers.over == "rounds":
        if numbers.rounds is not None:
            checks.fail(where, "no rounds for --over rounds", f"rounds={numbers.rounds}")
        rounds = tightest.solve_rounds(_round_event(numbers, z), target, delta)
        return dataclasses.replace(numbers, rounds=_at_least_one(rounds, numbers)), z
    part, whole = numbers.size_fields
    if numbers.sampler == "full" or numbers.rate is not None or getattr(numbers, part) is not None:
        checks.fail(
            where,
            f"a sampler other than 'full', no rate and no {part} for --over rate",
            f"sampler={numbers.sampler!r}, rate={numbers.rate}, {part}={getattr(numbers, part)}",
        )
    population = getattr(numbers, whole)
    if numbers.sampler != "poisson" and population is None:
        checks.fail(
            where,
            f"{whole} for --over rate with sampler={numbers.sampler!r}",
            "none",
            f"The answer is an integer {part}.",
        )
    rate = tightest.solve_rate(lambda q: _event(numbers, z, q), target, delta)
    if numbers.sampler == "poisson":
        return dataclasses.replace(numbers, rate=rate), z
    checks.require_integer(where, **{whole: population})
    size = _at_least_one(int(rate * population), numbers)
    return dataclasses.replace(numbers, **{part: size}), z


def noise_warning(guarantee: Guarantee, noise_multiplier: float) -> str:
    """Return a warning for an epsilon so small that a model of usual data would be noise, or so
    large that it protects almost nothing; "" for others.

    By group privacy, n rows (or clients) change the odds of a result by a factor of at most
    e^(n epsilon), except with a probability of at most n e^(n epsilon) delta.  So up to
    1 / epsilon and 0.1 / delta of them have almost no effect.
    """
    if guarantee.epsilon >= SMALL_EPSILON:
        return guarantee_rows.weak_guarantee(guarantee.epsilon, guarantee.delta)
    units = "rows" if guarantee.unit == "example" else "clients"
    hidden = min(1 / max(guarantee.epsilon, 1e-300), 0.1 / guarantee.delta)
    return (
        f"epsilon {guarantee.epsilon:.3g} at delta {guarantee.delta:.3g} (noise multiplier "
        f"{noise_multiplier:.3g}) hides even {hidden:.2g} {units} together almost completely: a "
        f"model that is trained on fewer is noise."
    )


def describe_numbers(numbers: Numbers, noise_multiplier: float) -> str:
    """Describe the setting in one line, for the title of a plot."""
    sizes = {k: getattr(numbers, k) for k in ("rate", "batch", "rows", "cohort", "clients")}
    parts = [
        f"noise multiplier {noise_multiplier:.4g}",
        f"{numbers.sampler.replace('_', ' ')} sampling",
        *(f"{name} {value:.4g}" for name, value in sizes.items() if value is not None),
    ]
    if numbers.unit == "example":
        parts.append(f"{numbers.steps} steps per round")
    return ", ".join(parts)


def _event(numbers: Numbers, noise_multiplier, rate: float | None = None):
    """Return the event of all rounds."""
    rounds = DEFAULT_ROUNDS if numbers.rounds is None else numbers.rounds
    checks.require_integer("jfl", max_value=plain_numbers.MAX_ROUNDS, rounds=rounds)
    return events.repeat(_round_event(numbers, noise_multiplier, rate), rounds)


def _round_event(numbers: Numbers, noise_multiplier, rate: float | None = None):
    """Return the event of one round; `rate` replaces the sampling rate of the numbers."""
    checks.require_one_of("jfl", ("example", "client"), unit=numbers.unit)
    checks.require_one_of("jfl", plain_numbers.SAMPLERS, sampler=numbers.sampler)
    adjacency = plain_numbers.adjacency_of("jfl", numbers.sampler, numbers.adjacency)
    checks.require_integer("jfl", steps=numbers.steps)
    names = ("batch", "rows", "cohort", "clients")
    sizes: dict[str, Any] = {
        name: getattr(numbers, name) for name in names if getattr(numbers, name) is not None
    }
    checks.require_integer("jfl", **sizes)
    sample, population = _sample(numbers, sizes) if rate is None else (rate, 1.0)
    release = events.gaussian(noise_multiplier)
    sampled = plain_numbers.sampled(numbers.sampler, adjacency, sample, population, release)
    if numbers.unit == "client":
        return sampled
    steps = events.repeat(sampled, numbers.steps)
    if numbers.cohort is None:
        return steps
    if numbers.clients is None:
        checks.fail("jfl", "clients when cohort is given", "only cohort")
    return events.participation(numbers.cohort / numbers.clients, steps)


def _sample(numbers: Numbers, sizes: dict):
    """Return the size of a sample and that of its population, or a rate and 1."""
    part, whole = numbers.size_fields
    if numbers.rate is not None and (part in sizes or numbers.sampler == "full"):
        allowed = (
            "no rate for sampler='full'"
            if numbers.sampler == "full"
            else f"either rate or {part} and {whole}"
        )
        checks.fail(
            "jfl",
            allowed,
            ", ".join([f"rate={numbers.rate}", *(f"{k}={v}" for k, v in sizes.items())]),
        )
    if numbers.sampler == "full":
        return 1.0, 1.0
    if numbers.sampler == "poisson" and numbers.rate is not None:
        return numbers.rate, 1.0
    if part not in sizes or whole not in sizes:
        checks.fail(
            "jfl",
            ("rate, or " if numbers.sampler == "poisson" else "")
            + f"{part} and {whole} for sampler={numbers.sampler!r}",
            f"{sizes or 'neither'}",
            "Use --sampler full to count no amplification by sampling.",
        )
    return sizes[part], sizes[whole]


def _at_least_one(number: int, numbers: Calibrate) -> int:
    if number < 1:
        checks.fail(
            "jfl calibrate",
            f"an epsilon that {numbers.over} of at least one can reach",
            f"epsilon={numbers.epsilon:g}",
            "Raise epsilon, delta or the noise.",
        )
    return number


# --- configs


def guarantees_of_plan(
    plan: Plan, rounds: int, delta: float, claims: tuple = ()
) -> tuple[list[dict], Curve | None]:
    """Return all guarantees and claims of a plan, and the curve of the guarantee that represents
    them; None without a guarantee."""
    found = guarantee_rows.all_rows(plan, rounds, delta, claims)
    best = guarantee_rows.best(found)
    if best["epsilon"] is None:
        return found, None
    whose = [best[name] for name in ("unit", "view", "adjacency")]
    points = _curve_rounds(rounds)
    epsilons = guarantee_rows.epsilons(plan, points, delta, *whose, last=best["epsilon"])
    fields: dict[str, Any] = {name: best[name] for name in Guarantee._fields}
    fields["caveats"] = tuple(best["caveats"])
    return found, Curve(points, epsilons, Guarantee(**fields))


def solve_config(config: Config, over: str, target: float | None) -> tuple[Config, Plan]:
    """Return the config that reaches `target`, and its plan; over "noise_multiplier" or
    "rounds"."""
    where = "jfl calibrate"
    checks.require_one_of(where, UNKNOWNS, over=over)
    if target is None:
        checks.fail(where, "epsilon in the config or --epsilon", "neither")
    if over == "rate":
        checks.fail(
            where,
            "noise_multiplier or rounds for --over with --config",
            "rate",
            "To find a sampling rate, give numbers instead of a config.",
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
            "an epsilon that one round can reach",
            f"epsilon={target:g}",
            "Raise epsilon or the noise.",
        )
    return dataclasses.replace(config, rounds=most), plan


def _curve_rounds(rounds: int) -> np.ndarray:
    """Return the numbers of rounds of a curve: the milestones of a table, and points between."""
    points = np.append(np.geomspace(1, rounds, NUM_CURVE_POINTS), milestones(rounds))
    return np.unique(points.round().astype(np.int64))


def milestones(rounds: int) -> np.ndarray:
    """Return the numbers of rounds that a table of epsilons shows."""
    return np.unique(
        np.maximum(np.array([1, rounds // 100, rounds // 10, rounds // 4, rounds // 2, rounds]), 1)
    )
