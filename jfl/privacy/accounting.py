"""Guarantees of a plan, and the noise that reaches one: what the ledger lists, through the bounds of `bounds`.

Everything here runs on the host, on concrete numbers.
"""
import math

import numpy as np

from .. import check
from ..core import Guarantee, Plan
from . import ledger
from .bounds import EXACT, SAMPLED, bounds, check_delta, smallest
from .bounds import curve as curve
from .bounds import epsilon as epsilon
from .bounds import solve_noise as solve_noise

BARE = "no mechanism adds noise"


def guarantees(plan: Plan, rounds: int, delta: float = 1e-5) -> tuple[Guarantee, ...]:
    """Every guarantee that the noise of a plan proves for `rounds` rounds; () if none.

    Errors   ValueError unless rounds is whole and delta in (0, 1).
    """
    found = []
    for entry in _entries(plan, rounds, delta):
        try:
            found.append(_guarantee(entry, rounds, delta))
        except ValueError:                                # guarantee(unit, view) says why
            pass
    return tuple(found)


def guarantee(plan: Plan, rounds: int, delta: float = 1e-5, unit: str | None = None, view: str = "server",
              adjacency: str | None = None) -> Guarantee:
    """What `rounds` rounds of a plan prove for one unit and view, for the client that is worst off.

    Units    unit "example" | "client"; view "server" (sees every upload) | "third_party" (sees models);
             adjacency "add_remove" | "replace_one", only needed where both are proved.
    Privacy  of the planned rounds, whatever the data.  A plan without noise has epsilon = inf and says so.
    Errors   ValueError, with the choices there are, unless exactly one guarantee fits; and with the reason and a
             remedy where this accountant cannot analyse the plan.
    """
    entries = _entries(plan, rounds, delta)
    _choices(unit, view, adjacency)
    if not entries:
        return Guarantee(math.inf, float(delta), unit or "example", adjacency or "replace_one", view, "none",
                         caveats=(BARE,))
    return _guarantee(_choose("jfl.guarantee", plan, entries, unit, view, adjacency), rounds, delta)


def epsilons(plan: Plan, rounds, delta: float = 1e-5, unit: str | None = None, view: str = "server",
             adjacency: str | None = None) -> np.ndarray:
    """`guarantee(...).epsilon` after each of many numbers of rounds, at the cost of about one.

    Shapes   rounds Int[m] >= 0 -> Float64[m], which does not fall as rounds grow.
    Errors   ValueError as `guarantee`.
    """
    times = np.asarray(rounds)
    if times.ndim != 1 or times.dtype.kind not in "iu" or (times < 0).any():
        check.fail("jfl.epsilons", "rounds: whole numbers >= 0, Int[m]", f"{rounds!r}")
    entries = _entries(plan, 1, delta)
    _choices(unit, view, adjacency)
    if not entries or not times.size:
        return np.where(times > 0, math.inf, 0.0)
    return _overflowing(_choose("jfl.epsilons", plan, entries, unit, view, adjacency), times, delta)[0]


def calibrate(plan: Plan, *, epsilon: float, delta: float = 1e-5, rounds: int, unit: str | None = None,
              view: str = "server", adjacency: str | None = None) -> float:
    """The noise multiplier with which a plan's `guarantee` is at most `epsilon`.

    The plan gives everything but the multiplier: put any in its chain, and the result in its place.  Where an
    algorithm releases several times, all releases get it.

    Units    the result is std / sensitivity, a float32, rounded to the safe side.
    Errors   ValueError as `guarantee`; if the plan has no noise stage; if epsilon is out of reach.
    """
    entries = _entries(plan, rounds, delta)
    _choices(unit, view, adjacency)
    if not entries:
        check.fail("jfl.calibrate", "a chain with a noise stage", "a plan without noise",
                   "Put gaussian(1.0) into it: the multiplier is ignored and found.")
    entry = _choose("jfl.calibrate", plan, entries, unit, view, adjacency)

    def reached(z):
        try:
            return _overflowing(entry._replace(z=z), np.array([rounds]), delta)[0][0]
        except _Overflow:                                 # so little noise that no delta is left for the overflow
            return math.inf

    return smallest("jfl.calibrate", reached, epsilon)


# --- choice -------------------------------------------------------------------------------------------------------

def _entries(plan, rounds, delta):
    check.whole("jfl.guarantee", rounds=rounds)
    check_delta(delta)
    return ledger.entries(plan)


def _choices(unit, view, adjacency):
    check.choice("jfl.guarantee", (None, "example", "client"), unit=unit)
    check.choice("jfl.guarantee", ledger.VIEWS, view=view)
    check.choice("jfl.guarantee", (None, "add_remove", "replace_one"), adjacency=adjacency)


def _choose(where, plan, entries, unit, view, adjacency):
    fit = [e for e in entries if e.view == view and unit in (None, e.unit) and adjacency in (None, e.adjacency)]
    if len(fit) > 1:
        fit = [e for e in fit if not e.implied] or fit
    if len(fit) == 1:
        if fit[0].refusal:
            raise ValueError(fit[0].refusal)
        return fit[0]
    names = ", ".join(f"unit={u!r}" for u in (unit,) if u) + (", " if unit else "") + f"view={view!r}"
    options = "; ".join(f"unit={e.unit!r}, view={e.view!r}, adjacency={e.adjacency!r}" for e in entries
                        if not (e.refusal or e.implied))
    because = ""
    if not fit and view == "server" and ledger.only_the_release(plan):
        because = "The server sees every upload before the noise of the release is added. "
    check.fail(where, "one guarantee that this plan's noise can prove",
               f"{names}, which fits {len(fit)} of them", f"{because}Choices: {options or 'none'}.")


# --- numbers ------------------------------------------------------------------------------------------------------

class _Overflow(ValueError):
    pass


def _guarantee(entry, rounds, delta):
    if entry.refusal:
        raise ValueError(entry.refusal)
    values, exact = _overflowing(entry, np.array([rounds]), delta)
    method = EXACT if exact[0] else SAMPLED + (", participation mixture" if entry.mixture else "")
    return Guarantee(float(values[0]), float(delta), entry.unit, entry.adjacency, entry.view, method,
                     caveats=tuple(dict.fromkeys(entry.caveats)))


def _overflowing(entry, times, delta):
    """Bounds with what a draw without a slot costs: beta (1 + e^epsilon) of delta, beta its probability in the run.

    epsilon grows as delta shrinks and the cost grows with epsilon, so the iteration climbs to the smallest solution.
    """
    found, beta = entry.events(entry.z), entry.overflow * times
    values, exact = bounds(found, times, np.full(times.shape, float(delta)))
    for _ in range(100):
        if not beta.any():
            return values, exact
        left = delta - beta * (1 + np.exp(np.minimum(values, 700)))
        if not np.all(left > 0):
            raise _Overflow(f"jfl.guarantee: need room in delta for an overflow; got delta={delta:g} and an overflow "
                            f"probability of {beta.max():.3g} in the run, which costs that times 1 + e^epsilon. "
                            "Raise the capacity of the sampler or of the batches, or delta, or the noise.")
        # a hair below what is left, so that the last step settles on the safe side
        again, exact = bounds(found, times, left * (1 - 1e-9))
        if np.all(again <= values * (1 + 1e-12)):
            return np.maximum(again, values), exact
        values = again
    raise _Overflow("jfl.guarantee: need an epsilon that settles; got an overflow that takes most of delta. "
                    "Raise the capacity of the sampler or of the batches.")
