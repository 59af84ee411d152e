"""The commands `jfl epsilon` and `jfl calibrate`, for numbers in flags or for a config.

Numbers are accounted for as by `jfl.epsilon`.  A config becomes a plan, and is accounted for as by
`jfl.guarantee`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks
from ..core.options import field
from ..core.records import Guarantee, Plan
from ..privacy import plain_numbers
from ..privacy.accountants import events, rdp_events, tightest
from ..privacy.calibration import calibrate as calibrate_plan
from ..privacy.ledger.caveats import EVERY_ROUND, HONEST, PUBLIC, SIMULATION, STOPS
from ..runs import config as configs
from ..runs import guarantee_rows, pictures, train
from ..runs.build import build
from ..runs.config import Config
from . import console
from .exits import Failed
from .options import config_of, has_config, parse, parse_with_config, split_config_files

NUM_CURVE_POINTS = 12
DEFAULT_ROUNDS = 100
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
        "add_remove | replace_one | zero_out; default add_remove for poisson, replace_one "
        "otherwise. The noise multiplier z is σ/(2C) under replace_one and σ/C under the others, "
        "for noise of standard deviation σ and clip norm C",
    )
    delta: float = field(1e-5, "delta of the guarantee")
    plot: Path | None = field(None, "plot of epsilon against rounds: FILE.png, .svg or .pdf")

    @property
    def size_fields(self) -> tuple[str, str]:
        """The names of the two fields whose ratio is the sampling rate."""
        return ("batch", "rows") if self.unit == "example" else ("cohort", "clients")


@dataclasses.dataclass(frozen=True)
class Epsilon(Numbers):
    """Compute epsilon from numbers.  With --config FILE.toml, compute it for the run that the file
    describes.

    example: jfl epsilon --noise-multiplier 1.1 --rounds 200 --steps 5 --batch 16 --rows 600 --plot
    epsilon.png

    example: jfl epsilon --noise-std 0.5 --clip-norm 1 --sampler full --rounds 10 --claimed 8
    """

    noise_multiplier: float | None = field(
        None, "standard deviation of the noise over the sensitivity; default 1"
    )
    noise_std: float | None = field(
        None, "with clip_norm, instead of noise_multiplier: standard deviation of the noise"
    )
    clip_norm: float | None = field(
        None,
        "with noise_std: bound on the L2 norm of a contribution, from which the sensitivity "
        "follows",
    )
    mean_of: int | None = field(
        None,
        "with noise_std: the noise is on the mean of this many contributions, a constant; "
        "default: on their sum",
    )
    claimed: float | None = field(
        None,
        "epsilon that a paper or a tool claims for these numbers, to compare with; exit code 1 if "
        "jfl does not prove it",
    )


@dataclasses.dataclass(frozen=True)
class Calibrate(Numbers):
    """Find the noise multiplier, the rounds or the sampling rate for an epsilon.  With --config
    FILE.toml, find it for the run that the file describes.

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


def epsilon(arguments: list[str]) -> None:
    """Run `jfl epsilon`.

    Raises:
        Failed: If the proved epsilon is above the claimed one; everything is printed nevertheless.
    """
    command = _parsed(Epsilon, ConfigEpsilon, arguments, "jfl epsilon")
    if isinstance(command, Config):
        _show_plan("epsilon", *build(config_of(command)), command.plot)
    else:
        where, c = "jfl epsilon", command
        adjacency = plain_numbers.adjacency_of(where, c.sampler, c.adjacency)
        given = c.noise_multiplier, c.noise_std, c.clip_norm, c.mean_of
        if c.claimed is not None:
            checks.require_positive(where, claimed=c.claimed)
            if c.rounds is None or set(given) == {None}:
                checks.fail(where, "rounds and noise for --claimed", "only defaults")
        z = 1.0 if set(given) == {None} else plain_numbers.multiplier(where, *given, adjacency)
        guarantee = _show_numbers("epsilon", command, z)
        if command.claimed is not None:
            _show_claim(command, command.claimed, guarantee, z)


def calibrate(arguments: list[str]) -> None:
    """Run `jfl calibrate`."""
    command = _parsed(Calibrate, ConfigCalibrate, arguments, "jfl calibrate")
    if not isinstance(command, Config):
        solved, noise_multiplier = solve(command)
        for name in FOUND_FIELDS:
            if getattr(solved, name) != getattr(command, name):
                print(f"{name} = {getattr(solved, name):.9g}")
        _show_numbers("calibrate", solved, noise_multiplier, command.epsilon)
        return
    config = config_of(command)
    if command.over == "rounds" and config.noise_multiplier is None:  # --epsilon replaced it
        in_files = split_config_files(arguments)[0].get("noise_multiplier")
        config = dataclasses.replace(config, noise_multiplier=in_files)
    solved, plan = _solve_config(config, command.over)
    value = getattr(solved, command.over)
    if value is not None:
        print(f"{command.over} = {value:.6g}")
    elif noise := guarantee_rows.noise_levels(plan, solved.rounds):  # differs by client or round
        print(f"noise_multiplier = {noise[0][0]:.6g} to {noise[0][1]:.6g}")
    else:
        print("noise_multiplier without a known guarantee")
    _show_plan("calibrate", plan, solved, command.plot, config.epsilon)


def _parsed(of_numbers, of_config, arguments: list[str], program: str) -> Any:
    """Parse a command of numbers, or of a config if the arguments name one."""
    if has_config(arguments):
        command, _ = parse_with_config(of_config, arguments, program)
    else:
        command = parse(of_numbers, arguments, program)
    if command.plot is not None:
        pictures.require_picture_path(command.plot)
    return command


# --- numbers


def guarantee_of_numbers(numbers: Numbers, noise_multiplier: float) -> Guarantee:
    """Return the guarantee of a run with these numbers and this noise multiplier."""
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


def solve(numbers: Calibrate) -> tuple[Numbers, float]:
    """Find the value of the field that `--over` names, for the target epsilon.

    Returns:
        The numbers with the answer filled in, so that they prove at most their epsilon; and the
        noise multiplier.
    """
    where, over, sampler = "jfl calibrate", numbers.over, numbers.sampler
    z: Any = numbers.noise_multiplier
    target, delta = numbers.epsilon, numbers.delta
    checks.require_one_of(where, UNKNOWNS, over=over)
    checks.require_positive(where, epsilon=target)
    if (z is None) != (over == "noise_multiplier"):
        checks.fail(
            where,
            "noise_multiplier for --over rounds and --over rate, and for nothing else",
            f"noise_multiplier={z}, over={over!r}",
        )
    if over == "noise_multiplier":
        return numbers, tightest.solve_noise(lambda z: _event(numbers, z), target, delta)
    if over == "rounds":
        if numbers.rounds is not None:
            checks.fail(where, "no rounds for --over rounds", f"rounds={numbers.rounds}")
        name, found = over, tightest.solve_rounds(_round_event(numbers, z), target, delta)
    else:
        name, whole = numbers.size_fields
        population = getattr(numbers, whole)
        if sampler == "full" or numbers.rate is not None or getattr(numbers, name) is not None:
            checks.fail(
                where,
                f"a sampler other than 'full', no rate and no {name} for --over rate",
                f"sampler={sampler!r}, rate={numbers.rate}, {name}={getattr(numbers, name)}",
            )
        if sampler != "poisson":
            checks.require_integer(
                where, f"The answer is an integer {name}.", **{whole: population}
            )
        rate = tightest.solve_rate(lambda q: _event(numbers, z, q), target, delta)
        if sampler == "poisson":
            return dataclasses.replace(numbers, rate=rate), z
        found = int(rate * population)
    if found < 1:
        checks.fail(
            where,
            f"an epsilon that {over} of at least one can reach",
            f"epsilon={target:g}",
            "Raise epsilon, delta or the noise.",
        )
    return dataclasses.replace(numbers, **{name: found}), z


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
    sample, population = _sample(numbers) if rate is None else (rate, 1.0)
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


def _sample(numbers: Numbers):
    """Return the size of a sample and that of its population, or a rate and 1."""
    part, whole = numbers.size_fields
    sizes = {name: getattr(numbers, name) for name in ("batch", "rows", "cohort", "clients")}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    checks.require_integer("jfl", **sizes)
    rate, sampler = numbers.rate, numbers.sampler
    if rate is None and sampler == "full":
        return 1.0, 1.0
    if rate is None and part in sizes and whole in sizes:
        return sizes[part], sizes[whole]
    if rate is not None and sampler == "poisson" and part not in sizes:
        return rate, 1.0
    expected = dict(
        full="no rate",
        poisson=f"either rate or {part} and {whole}",
        without_replacement=f"{part} and {whole}, and no rate,",
    )
    checks.fail(
        "jfl",
        f"{expected[sampler]} for sampler={sampler!r}",
        ", ".join([f"rate={rate}", *(f"{name}={size}" for name, size in sizes.items())]),
        "Use --sampler full to count no amplification by sampling.",
    )


def _show_claim(numbers: Numbers, claimed: float, proved: Guarantee, noise_multiplier: float):
    """Print a claimed epsilon, the proved one, and what the claim needs.

    Raises:
        Failed: If the claim is not proved.
    """
    text = "The claim holds for these numbers."
    if proved.epsilon > claimed:
        needed = tightest.solve_noise(lambda z: _event(numbers, z), claimed, numbers.delta)
        level = f"{needed:.4g}, {needed / noise_multiplier:.4g} times that of the numbers."
        everyone = numbers.unit == "client" or numbers.cohort in (None, numbers.clients)
        if numbers.sampler == "full" and everyone and proved.method == rdp_events.EXACT:
            text = (
                f"These numbers do not prove the claim. It needs a noise multiplier of {level}\n"
                "Without sampling, the proved ε is exact for an observer of every release: no "
                "accountant can prove less."
            )
        else:
            text = (
                "jfl does not prove the claim. Its bound for samples may not be the smallest, so "
                f"the claim can still hold.\njfl proves it for a noise multiplier of {level}"
            )
    console.table(
        None,
        [("ε claimed", True), ("ε proved", True), ("proved / claimed", True)],
        [tuple(f"{v:.4g}" for v in (claimed, proved.epsilon, proved.epsilon / claimed))],
        text,
    )
    if proved.epsilon > claimed:
        raise Failed(f"expected a proved ε of at most {claimed:.9g}, but got {proved.epsilon:.9g}.")


def _show_numbers(
    name: str, numbers: Numbers, noise_multiplier: float, target: float | None = None
) -> Guarantee:
    guarantee = guarantee_of_numbers(numbers, noise_multiplier)
    epsilon_at = lambda delta: guarantee.epsilon_at(delta).item()
    if text := guarantee_rows.noise_warning(epsilon_at, numbers.delta, numbers.unit):
        console.warn(name, text)
    row = guarantee_rows.as_row(guarantee)
    meaning = plain_numbers.MEANINGS[guarantee.adjacency]
    if numbers.unit == "example" and numbers.rate is not None:
        meaning += "\nThe rate is that of a client's rows. For that of clients, pass --unit client."
    console.table(
        None,
        [("noise multiplier", True), *console.PRIVACY],
        [(f"{noise_multiplier:.6g}", *console.privacy(row))],
        f"{meaning}\n{console.caveats([row])}",
    )
    one = _round_event(numbers, noise_multiplier)
    proved = lambda rounds: tightest.epsilon(events.repeat(one, rounds), numbers.delta)[0]
    rounds = _curve_rounds(numbers.rounds or DEFAULT_ROUNDS)
    values = np.array([*map(proved, rounds[:-1].tolist()), guarantee.epsilon])
    sizes = {k: getattr(numbers, k) for k in ("rate", "batch", "rows", "cohort", "clients")}
    setting = [
        f"noise multiplier {noise_multiplier:.4g}",
        f"{numbers.sampler.replace('_', ' ')} sampling",
        *(f"{name} {value:.4g}" for name, value in sizes.items() if value is not None),
        *([f"{numbers.steps} steps per round"] if numbers.unit == "example" else []),
    ]
    curve = rounds, np.minimum.accumulate(values[::-1])[::-1], row
    _show_curve(*curve, numbers.plot, ", ".join(setting), target)
    return guarantee


# --- configs


def _solve_config(config: Config, over: str) -> tuple[Config, Plan]:
    """Return the config that reaches its epsilon, and its plan; over "noise_multiplier" or
    "rounds"."""
    where, target = "jfl calibrate", config.epsilon
    checks.require_one_of(where, ("noise_multiplier", "rounds"), over=over)
    if target is None:
        checks.fail(where, "epsilon in the config or --epsilon", "neither")
    if over == "noise_multiplier":
        plan, found = build(dataclasses.replace(config, noise_multiplier=None))
        return found, plan
    if config.noise_multiplier is None:
        checks.fail(where, "noise_multiplier for --over rounds", "none")
    config = dataclasses.replace(config, epsilon=None)
    plan, _ = build(config)
    rounds = calibrate_plan(
        plan,
        epsilon=target,
        delta=config.delta,
        unit=configs.the_unit(config),
        view=configs.the_view(config),
        adjacency=config.adjacency,
        over="rounds",
    )
    if rounds < 1:
        checks.fail(
            where,
            "an epsilon that one round can reach",
            f"epsilon={target:g}",
            "Raise epsilon or the noise.",
        )
    return dataclasses.replace(config, rounds=rounds), plan


def _show_plan(name: str, plan: Plan, config: Config, plot: Path | None, target=None):
    if text := train.noise_warning(plan, config):
        console.warn(name, text)
    guarantees = train.privacy(plan, config, config.rounds)
    console.table(
        f"{config.rounds} rounds",
        console.PRIVACY,
        [console.privacy(g) for g in guarantees],
        console.caveats(guarantees),
    )
    best = guarantee_rows.best(guarantees, config.view)
    if best["epsilon"] is None:
        if plot is not None:
            checks.fail("--plot", "a guarantee to draw", "none")
        return
    whose, rounds = [best[k] for k in ("unit", "view", "adjacency")], _curve_rounds(config.rounds)
    values = guarantee_rows.epsilons(plan, rounds, config.delta, *whose, last=best["epsilon"])
    noise = guarantee_rows.noise_levels(plan, config.rounds)
    shown = " to ".join(dict.fromkeys(f"{z:.4g}" for z in noise[0])) if noise else "none"
    setting = (
        f"{config.algorithm} on {config.dataset}, noise multiplier {shown}, {config.rounds} rounds"
    )
    _show_curve(rounds, values, best, plot, setting, target)


# --- curves


def _show_curve(rounds, epsilons, guarantee: dict, plot: Path | None, setting: str, target):
    """Print a table of epsilon against rounds, and draw it if `plot` is a path."""
    shown = _milestones(int(rounds[-1]))
    g = guarantee
    print(f"ε against rounds ({g['unit']}, {g['adjacency']}, {g['view']}, δ = {g['delta']:g})")
    rows = [(n, f"{value:.4g}") for n, value in zip(rounds, epsilons) if n in shown]
    console.table(None, [("rounds", True), ("ε", True)], rows)
    if plot is not None:
        pictures.draw_epsilon_curve(plot, rounds, epsilons, guarantee, setting, target)
        print(f"Picture: {plot}")


def _curve_rounds(rounds: int) -> np.ndarray:
    """Return the numbers of rounds of a curve: the milestones of a table, and points between."""
    points = np.append(np.geomspace(1, rounds, NUM_CURVE_POINTS), _milestones(rounds))
    return np.unique(points.round().astype(np.int64))


def _milestones(rounds: int) -> np.ndarray:
    """Return the numbers of rounds that a table of epsilons shows."""
    parts = np.array([1, rounds // 100, rounds // 10, rounds // 4, rounds // 2, rounds])
    return np.unique(np.maximum(parts, 1))
