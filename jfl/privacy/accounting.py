"""Guarantees of a plan, and the noise that reaches one: what the ledger lists, through the bounds of `bounds`.

Everything here runs on the host, on concrete numbers.
"""
import math

import numpy as np

from .. import check
from ..core import Guarantee, Plan
from . import events, ledger
from .bounds import EXACT, SAMPLED, bounds, check_delta, largest, smallest
from .bounds import curve as curve
from .bounds import delta as delta
from .bounds import epsilon as epsilon
from .bounds import solve_noise as solve_noise
from .bounds import solve_rate as solve_rate
from .bounds import solve_rounds as solve_rounds
from .participation import counts, frontier, share_of, some_rounds

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


def guarantee(plan, rounds: int | None = None, delta: float = 1e-5, unit: str | None = None, view: str = "server",
              adjacency: str | None = None, *, cap: int | None = None, quantile: float | None = None,
              realised=None) -> Guarantee:
    """What `rounds` rounds of a plan prove for one unit and view, for the client that is worst off.

    Args     plan: a Plan; or a list of (plan, rounds) that follow each other on the same clients, without `rounds`.
             The server sees who takes part, so by default every client counts as taking part in every round; instead
             one may give `cap`, the most participations of a client (asserted: nothing enforces it), `quantile`, a
             probability with which a client may exceed the number that counts (paid from delta), or `realised`
             Int[C], the participations of a run (descriptive, not a guarantee).
    Units    unit "example" | "client"; view "server" (sees every upload) | "third_party" (sees models);
             adjacency "add_remove" | "replace_one", only needed where both are proved.
    Privacy  of the planned rounds, whatever the data.  A plan without noise has epsilon = inf and says so.
    Errors   ValueError, with the choices there are, unless exactly one guarantee fits; and with the reason and a
             remedy where this accountant cannot analyse the plan.
    """
    options = dict(cap=cap, quantile=quantile, realised=realised)
    told = any(v is not None for v in options.values())
    if not isinstance(plan, Plan):
        return _segments(plan, rounds, delta, unit, view, adjacency, told)
    entries = _entries(plan, rounds, delta)
    _choices(unit, view, adjacency)
    if not entries:
        return _bare(delta, unit, adjacency, view)
    entry = _choose("jfl.guarantee", plan, entries, unit, view, adjacency)
    if not told:
        return _guarantee(entry, rounds, delta)
    how_often, beta, status, caveats = _participations(plan, rounds, delta, view, options)
    entry = _counted(entry, plan, rounds, how_often)
    entry = entry._replace(caveats=tuple(c for c in entry.caveats if c != ledger.EVERY_ROUND) + caveats)
    return _guarantee(entry, 1, delta - beta)._replace(delta=float(delta), status=status)


def epsilons_per_client(plan: Plan, rounds: int, delta: float = 1e-5, view: str = "server", *, cap: int | None = None,
                        quantile: float | None = None, realised=None) -> np.ndarray:
    """The epsilon of the examples of each client, which its rows and its participation decide.

    Shapes   -> Float64[C]; 0 for a client without rows or rounds, inf without noise.
    Privacy  unit "example", for the adjacency of the plan; sizes and rates are public.  The largest is `guarantee`'s,
             or a little below it.
    Args, Errors   as `guarantee`.
    """
    sizes = np.asarray(plan.fed.size).reshape(-1)
    if not _entries(plan, rounds, delta):
        return np.where(sizes > 0, math.inf, 0.0)
    _choices(None, view, None)
    options = dict(cap=cap, quantile=quantile, realised=realised)
    entry = _choose("jfl.epsilons_per_client", plan, ledger.entries(plan), "example", view, None)
    if view == "server":
        often, beta, _, _ = _participations(plan, rounds, delta, view, options)
        cost = lambda rows, count: _counted(entry, plan, rounds, np.array([count]), np.array([rows]))
        kinds = np.stack([sizes, often])
        once, left = 1, delta - beta
    else:
        if any(v is not None for v in options.values()):
            _participations(plan, rounds, delta, view, options)
        cost = lambda rows, share: entry._replace(
            events=lambda z: (some_rounds(plan.sampler, share, entry.one(z, rows)),),
            overflow=_slip(entry, rows) * (plan.sampler.capacity if plan.sampler.independent else 1))
        kinds = np.stack([sizes, np.broadcast_to(share_of(plan.sampler), sizes.shape)])
        once, left = rounds, delta
    if entry.one is None:                                 # the noise of the release protects all alike
        return np.where(sizes > 0, _guarantee(entry, rounds, delta).epsilon, 0.0)
    alike, which = np.unique(kinds, axis=1, return_inverse=True)
    each = [0.0 if rows == 0 or extent == 0 else _guarantee(cost(int(rows), extent), once, left).epsilon
            for rows, extent in alike.T]
    return np.array(each)[which.reshape(-1)]


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


def calibrate(plan: Plan, *, epsilon, delta: float = 1e-5, rounds: int | None = None, unit: str | None = None,
              view: str = "server", adjacency: str | None = None, over: str = "noise_multiplier"):
    """The noise multiplier, or the number of rounds, with which a plan's `guarantee` is at most `epsilon`.

    over="noise_multiplier": the plan gives everything but the multiplier: put any in its chain, and the result in its
    place.  Where an algorithm releases several times, all releases get it.
    over="rounds": the largest number of rounds of the plan as it is; 0 where even one is too many.

    Shapes   epsilon [...] -> [...]; a Python number for one.
    Units    a multiplier is std / sensitivity, a float32, rounded to the safe side.
    Errors   ValueError as `guarantee`; if the plan has no noise stage; if epsilon is out of reach of a multiplier.
    """
    check.choice("jfl.calibrate", ("noise_multiplier", "rounds"), over=over)
    if (rounds is None) != (over == "rounds"):
        check.fail("jfl.calibrate", "rounds, unless over='rounds' finds them", f"rounds={rounds!r}, over={over!r}")
    entries = _entries(plan, 1 if rounds is None else rounds, delta)
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

    def after(times):
        try:
            return _overflowing(entry, times, delta)[0]
        except _Overflow:                                 # of all of them, the latest fails first
            return np.array([math.inf]) if len(times) == 1 else np.concatenate([after(t[None]) for t in times])

    if over == "rounds":
        found = [largest("jfl.calibrate", after, target) for target in np.ravel(epsilon)]
    else:
        found = [smallest("jfl.calibrate", reached, target) for target in np.ravel(epsilon)]
    return found[0] if np.ndim(epsilon) == 0 else np.reshape(found, np.shape(epsilon))


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
    good = [e for e in fit if not e.refusal]
    if len(good) > 1 and len({(e.unit, e.adjacency) for e in fit}) == 1:
        # noise on the uploads and on the release: each proves it alone, so take the one that does better
        fit = [min(good, key=lambda e: _guarantee(e, 1, 1e-5).epsilon)]
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


def _bare(delta, unit, adjacency, view):
    return Guarantee(math.inf, float(delta), unit or "example", adjacency or "replace_one", view, "none",
                     caveats=(BARE,))


def _segments(segments, rounds, delta, unit, view, adjacency, told):
    segments = list(segments)
    if rounds is not None or told or not segments or not all(
            isinstance(s, tuple) and len(s) == 2 and isinstance(s[0], Plan) for s in segments):
        check.fail("jfl.guarantee", "a Plan and rounds, or a list of (plan, rounds) alone", f"rounds={rounds!r}",
                   "Participation options are for one plan.")
    check_delta(delta)
    _choices(unit, view, adjacency)
    if not all(ledger.entries(plan) for plan, _ in segments):
        return _bare(delta, unit, adjacency, view)        # one segment without noise, and nothing is proved
    entries = ledger.concatenate(segments)
    return _guarantee(_choose("jfl.guarantee", segments[0][0], entries, unit, view, adjacency), 1, delta)


# --- participation ------------------------------------------------------------------------------------------------

def _participations(plan, rounds, delta, view, options):
    if view != "server":
        check.fail("jfl.guarantee", "view='server' beside cap, quantile or realised", f"view={view!r}",
                   "A third party does not see who takes part: its guarantee counts the chance of that already.")
    found = counts(plan, rounds, **options)
    if not found[1] < delta:
        check.fail("jfl.guarantee", "quantile < delta", f"quantile={found[1]:g}, delta={delta:g}",
                   "It is a part of delta: a tenth is usual.")
    return found


def _counted(entry, plan, rounds, often, sizes=None):
    """An entry of a single "round": a whole run, in which clients take part `often`."""
    if entry.one is None:
        check.fail("jfl.guarantee", "noise of the client's own beside cap, quantile or realised",
                   "noise of the release")
    sizes = np.asarray(plan.fed.size).reshape(-1) if sizes is None else sizes
    # a client without rows has no examples, but counts as a client
    active = (often > 0) & ((sizes > 0) | (entry.unit == "client"))
    pairs = frontier(sizes[active], often[active]) if active.any() else []
    if entry.unit == "client" or entry.slip is None:
        pairs = [(0, max(c for _, c in pairs))] if pairs else []
    lost = max((_slip(entry, rows) * count for rows, count in pairs), default=0.0)
    # the noise on an upload is not drawn by rows: what may overflow is the cohort, in every round
    lost = lost if entry.slip else entry.overflow * rounds
    return entry._replace(events=lambda z: tuple(events.repeat(entry.one(z, int(rows)), int(c)) for rows, c in pairs),
                          overflow=lost)


def _slip(entry, rows):
    return entry.slip(np.array([rows])) if entry.slip else 0.0


# --- numbers ------------------------------------------------------------------------------------------------------

class _Overflow(ValueError):
    pass


def _guarantee(entry, rounds, delta):
    if entry.refusal:
        raise ValueError(entry.refusal)
    if not entry.events(entry.z):                         # nobody takes part
        values, exact = np.zeros(1), np.ones(1, bool)
    else:
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
