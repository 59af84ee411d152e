"""The commands `jfl epsilon` and `jfl calibrate`: what numbers, or a config, are worth."""
import dataclasses

from . import check, report, terminal
from .assemble import build
from .config import Config
from .privacy import accounting, events
from .terminal import PRIVACY, privacy, table


@dataclasses.dataclass(frozen=True)
class _Numbers:
    rounds: int = 100
    """communication rounds"""
    steps: int = 1
    """noisy releases of a client in a round"""
    sampler: str = "poisson"
    """of examples (unit example) or clients (unit client): full | without_replacement | poisson"""
    rate: float | None = None
    """sampling rate: of examples in a step, or of clients in a round"""
    batch: int | None = None
    """with rows, instead of rate: batch / rows"""
    rows: int | None = None
    """rows of a client"""
    cohort: int | None = None
    """with clients: unit client instead of rate; unit example for a third party, which sees models only"""
    clients: int | None = None
    """number of clients"""
    unit: str = "example"
    """example | client"""
    delta: float = 1e-5
    """of the guarantee"""


def _event(c: _Numbers, z):
    """The event that numbers on the command line describe, and its adjacency and view."""
    check.choice("jfl", ("example", "client"), unit=c.unit)
    check.choice("jfl", ("full", "without_replacement", "poisson"), sampler=c.sampler)
    check.whole("jfl", rounds=c.rounds, steps=c.steps)
    taken, whole = (c.batch, c.rows) if c.unit == "example" else (c.cohort, c.clients)
    names = "batch and rows" if c.unit == "example" else "cohort and clients"
    event = events.gaussian(z)
    if c.sampler == "without_replacement":
        if taken is None or whole is None:
            check.fail("jfl", f"{names} for sampler without_replacement", "one or none of them")
        event = events.without_replacement(taken, whole, event)
    elif c.sampler == "poisson":
        rate = c.rate
        if rate is None:
            if taken is None or whole is None:
                check.fail("jfl", f"rate, or {names}", "neither", "Or --sampler full.")
            check.whole("jfl", **dict(zip(names.split(" and "), (taken, whole))))
            rate = taken / whole
        event = events.poisson(rate, event)
    event = events.repeat(event, c.steps)
    view = "server" if c.unit == "example" else "third_party"
    if c.unit == "example" and c.cohort is not None:
        check.whole("jfl", cohort=c.cohort, clients=c.clients or 0)
        event, view = events.participation(c.cohort / c.clients, event), "third_party"
    return events.repeat(event, c.rounds), "add_remove" if c.sampler == "poisson" else "replace_one", view


def _show(c, epsilon, method, adjacency, view, z):
    row = dict(epsilon=epsilon, delta=c.delta, unit=c.unit, adjacency=adjacency, view=view, method=method)
    table(None, [("noise multiplier", True), *PRIVACY], [(f"{z:.6g}", *privacy(row))],
          "Noise multiplier is standard deviation over sensitivity: the clip norm under add_remove, twice it under "
          "replace_one.")


def _configured(args, name) -> Config | None:
    """The config that --config and flags describe; None without --config."""
    if not any(a.split("=")[0] == "--config" for a in args):
        return None

    @dataclasses.dataclass(frozen=True)
    class Configured(Config):
        """What the run that a config describes is worth.

        example: jfl epsilon --config run.toml --rounds 200
        """

    found, axes = terminal.command(Configured, args, name)
    if axes:
        raise ValueError(f"jfl {name}: need a config without [sweep]; got one.")
    return terminal.config(found)


def epsilon(args):
    """`jfl epsilon`: of numbers on the command line, or of the plan that a config describes."""
    config = _configured(args, "epsilon")
    if config is not None:
        plan, config = build(config)
        guarantees = report.privacy(plan, config.rounds, config.delta)
        table(f"{config.rounds} rounds", PRIVACY, [privacy(g) for g in guarantees], terminal.caveats(guarantees))
        return

    @dataclasses.dataclass(frozen=True)
    class Epsilon(_Numbers):
        """What noise is worth.  With --config FILE.toml: of the run that the file describes.

        example: jfl epsilon --noise-multiplier 1.1 --rounds 200 --steps 5 --batch 16 --rows 600
        """
        noise_multiplier: float = 1.0
        """standard deviation of the noise over the sensitivity"""

    c = terminal.parse(Epsilon, args, "epsilon")
    event, adjacency, view = _event(c, c.noise_multiplier)
    value, method = accounting.epsilon(event, c.delta)
    _show(c, value, method, adjacency, view, c.noise_multiplier)


def calibrate(args):
    """`jfl calibrate`: the noise multiplier for an epsilon."""
    config = _configured(args, "calibrate")
    if config is not None:
        if config.epsilon is None:
            raise ValueError("jfl calibrate: need epsilon in the config or --epsilon; got neither.")
        print(f"noise_multiplier = {build(config)[1].noise_multiplier:.6g}")
        return

    @dataclasses.dataclass(frozen=True)
    class Calibrate(_Numbers):
        """The noise multiplier for an epsilon.  With --config FILE.toml: for the run that the file describes.

        example: jfl calibrate --epsilon 4 --rounds 200 --steps 5 --batch 16 --rows 600
        """
        epsilon: float = 1.0
        """to reach"""

    c = terminal.parse(Calibrate, args, "calibrate")
    z = accounting.solve_noise(lambda z: _event(c, z)[0], c.epsilon, c.delta)
    event, adjacency, view = _event(c, z)
    _show(c, *accounting.epsilon(event, c.delta), adjacency, view, z)
