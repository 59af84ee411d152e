"""`jfl epsilon` and `jfl calibrate` on bare numbers: the event that they describe, and what it is worth."""
import dataclasses

from . import check
from .core import Guarantee
from .privacy import events
from .privacy.bounds import epsilon, solve_noise
from .privacy.ledger import EVERY_ROUND, HONEST, PUBLIC, SIMULATION


@dataclasses.dataclass(frozen=True)
class Numbers:
    """What an accountant has to know about a run."""

    rounds: int = 100
    """communication rounds"""
    steps: int = 1
    """local steps of a round: noisy releases of a client (unit example; unit client has one a round)"""
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


def event(c: Numbers, noise_multiplier):
    """One release, sampled and repeated as the numbers say."""
    check.choice("jfl", ("example", "client"), unit=c.unit)
    check.choice("jfl", ("full", "without_replacement", "poisson"), sampler=c.sampler)
    check.whole("jfl", rounds=c.rounds, steps=c.steps)
    given = {k: v for k, v in dict(batch=c.batch, rows=c.rows, cohort=c.cohort, clients=c.clients).items() if v is not None}
    check.whole("jfl", **given)
    names = ("batch", "rows") if c.unit == "example" else ("cohort", "clients")
    found = events.gaussian(noise_multiplier)
    if c.rate is not None and names[0] in given and not (c.unit == "example" and names[0] == "cohort"):
        check.fail("jfl", f"either rate or {' and '.join(names)}", f"rate={c.rate}, {given}")
    if c.sampler == "full":
        if c.rate is not None:
            check.fail("jfl", "no rate for sampler='full'", f"rate={c.rate}")
    elif c.sampler == "poisson" and c.rate is not None:
        found = events.poisson(c.rate, found)
    elif not all(n in given for n in names):
        check.fail("jfl", ("rate, or " if c.sampler == "poisson" else "") + f"{' and '.join(names)} for "
                   f"sampler={c.sampler!r}", f"{given or 'neither'}", "Or --sampler full, without a gain from sampling.")
    else:
        taken, whole = (given[n] for n in names)
        found = events.poisson(taken / whole, found) if c.sampler == "poisson" else \
            events.without_replacement(taken, whole, found)
    if c.unit == "client":
        return events.repeat(found, c.rounds)
    found = events.repeat(found, c.steps)
    if c.cohort is not None:
        if c.clients is None:
            check.fail("jfl", "clients beside cohort", "cohort alone")
        found = events.participation(c.cohort / c.clients, found)
    return events.repeat(found, c.rounds)


def worth(c: Numbers, noise_multiplier: float) -> Guarantee:
    """What the numbers prove."""
    value, method = epsilon(event(c, noise_multiplier), c.delta)
    hidden = c.unit == "client" or c.cohort is not None
    kind = "add_remove" if c.sampler == "poisson" else "replace_one"
    sampled = c.sampler != "full" if c.unit == "client" else c.cohort is not None
    caveats = ((HONEST,) if sampled and hidden else () if hidden else (EVERY_ROUND,)) + (SIMULATION,)
    return Guarantee(value, c.delta, c.unit, kind, "third_party" if hidden else "server", method,
                     caveats=caveats + ((PUBLIC,) if kind == "add_remove" else ()))


def noise_for(c: Numbers, target: float) -> float:
    """The smallest noise multiplier that reaches `target`."""
    return solve_noise(lambda z: event(c, z), target, c.delta)
