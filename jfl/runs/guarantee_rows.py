"""The guarantees of a run as rows of its files, epsilon over its rounds, and warnings about its
noise.
"""

import math
import pickle
from collections.abc import Callable

import numpy as np

from ..core.errors import NotAnalysable
from ..core.files import plain
from ..core.records import Caveat, Guarantee, Plan, code_of
from ..privacy import guarantees as accounting
from ..privacy.ledger import entries

VIEWS = dict(
    server="server",
    third_party="third party",
    aggregate="secure aggregation",
    personal="personal models",
)
# The number of evaluations whose epsilon is proved as tightly as that of the whole run, and the
# number of those with at least a Renyi bound.
TIGHT, MANY = 32, 128
WEAK = 20  # a guarantee with a larger epsilon protects almost nothing
TYPICAL_NUM_UNITS = 1000  # rows or clients of a training whose data are unknown
MIN_PLD_GAIN = (
    1e-3  # the relative gain in epsilon that justifies computing a privacy-loss distribution
)


def all_rows(plan: Plan, rounds: int, delta: float, claims: tuple = ()) -> list[dict]:
    """Return the guarantees of a plan, followed by the claims, as rows.

    Without a guarantee, one row with epsilon None gives the reason.
    """
    found = accounting.guarantees(plan, rounds, delta)
    if not found:
        try:
            found = (accounting.guarantee(plan, rounds, delta),)
        except NotAnalysable as error:
            found = (
                Guarantee(
                    math.inf,
                    delta,
                    "example",
                    "replace_one",
                    "server",
                    "none",
                    caveats=(Caveat(str(error), "not-analysable"),),
                ),
            )
    return [as_row(g) for g in (*found, *claims)]


def as_row(g: Guarantee) -> dict:
    """Return a guarantee as a JSON object; an infinite epsilon becomes None."""
    return dict(
        unit=g.unit,
        adjacency=g.adjacency,
        view=g.view,
        delta=g.delta,
        epsilon=plain(g.epsilon),
        method=g.method,
        status=g.status if math.isfinite(g.epsilon) else "no guarantee",
        caveats=list(g.caveats),
        codes=[code_of(c) for c in g.caveats],
        implied=g.implied,
        rounds=g.rounds,
    )


def add_caveats(row: dict, caveats) -> dict:
    """Return the row of a guarantee with further caveats added."""
    return row | dict(
        caveats=[*row["caveats"], *caveats], codes=[*row["codes"], *map(code_of, caveats)]
    )


def best(guarantees: list[dict], view: str | None = None) -> dict:
    """Return the guarantee to show if there is space for only one.

    The preferred guarantee, in this order of priority, is not the claim of a paper, has an epsilon,
    does not follow from the guarantee of another unit, and is for `view`, by default the server.
    """
    return min(
        guarantees,
        key=lambda g: (
            g["status"] == "claimed",
            g["epsilon"] is None,
            g.get("implied", False),
            g["view"] != (view or "server"),
        ),
    )


def label(guarantee: dict | None) -> str:
    """Return a short description of a guarantee for the legend of a plot.

    Args:
        guarantee: a guarantee as `as_row` returns it; None for a run without privacy.
    """
    if guarantee is None:
        return "no privacy"
    return f"ε = {guarantee['epsilon']:.3g} ({promise(guarantee)})"


def promise(guarantee: dict | None) -> str:
    """Return the unit and the view of a guarantee; "" for None."""
    return "" if guarantee is None else f"{guarantee['unit']}, {VIEWS[guarantee['view']]}"


def claim(guarantee: dict) -> str:
    """Return the epsilon that a paper claims, with its view, as text for a table."""
    epsilon = "nothing" if guarantee["epsilon"] is None else f"{guarantee['epsilon']:.4g}"
    once = ", one round" if guarantee["rounds"] == 1 else ""
    return f"{epsilon} ({guarantee['view'].replace('_', ' ')}{once})"


def epsilons(
    plan: Plan,
    rounds,
    delta: float,
    unit: str | None = None,
    view: str = "server",
    adjacency: str | None = None,
    *,
    last: float | None = None,
    most: int = TIGHT,
) -> np.ndarray:
    """Return the epsilon of a run after each of several rounds, such as those with an evaluation.

    To save time, not every epsilon is computed as tightly as by `jfl.guarantee`.  That takes about
    0.1 seconds for a privacy-loss distribution, and 0.01 seconds for a looser Renyi bound.  At most
    `most` epsilons are tight, and up to MANY are at least Renyi bounds.  Any others are copied from
    the next later round that has a bound.

    Args:
        plan: the plan that runs.
        rounds: Int[m], the numbers of completed rounds, ascending.
        delta: in (0, 1).
        unit, view, adjacency: as in `jfl.guarantee`.
        last: the tight epsilon after rounds[-1], if it is known already.
        most: the maximum number of tight epsilons, including the last.  With 0 all epsilons are
            Renyi bounds, and `last` is ignored.

    Returns:
        Float64[m], which does not decrease as the number of rounds grows.

    Raises:
        ValueError: See `jfl.guarantee`.

    Privacy:
        An epsilon of more rounds also holds for fewer, because the releases of the first rounds are
        among those of all rounds.
    """
    rounds = np.asarray(rounds)
    count = len(rounds)

    def proved(i):
        if rounds[i] == 0:
            return 0.0
        return accounting.guarantee(plan, int(rounds[i]), delta, unit, view, adjacency).epsilon

    values, bounded = np.full(count, np.inf), _choose_indices(count, MANY)
    values[bounded] = accounting.epsilons(plan, rounds[bounded], delta, unit, view, adjacency)
    if most and count:
        quick, values[-1] = values[-1], proved(-1) if last is None else last
        if (
            values[-1] < (1 - MIN_PLD_GAIN) * quick
        ):  # else Renyi bounds and exact Gaussians do as well
            for i in _choose_indices(count, most)[:-1]:
                values[i] = proved(i)
    return np.minimum.accumulate(values[::-1])[::-1]


def ledger(plan: Plan, rounds) -> bytes:
    """Return the ledgers of a plan after the rounds for which `epsilons` may prove a tight bound.

    Plans with equal ledgers have equal guarantees and epsilons, and comparing ledgers takes much
    less time than computing epsilons.  The ledger after the last round is not enough: two
    strategies of correlated noise can prove the same for a whole run, but not for its beginning.

    Args:
        plan: a plan.
        rounds: Int[m], the numbers of completed rounds, ascending, as in `epsilons`.
    """
    counts = [int(rounds[i]) for i in _choose_indices(len(rounds), TIGHT)]
    return pickle.dumps([entries.entries(plan, count) for count in counts if count > 0])


def _choose_indices(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the indices 0, ..., count - 1, including the last.

    They are dense at the beginning, where epsilon grows fast.
    """
    if count <= most:
        return np.arange(count)
    if most < 2:
        return np.arange(count)[count - most :]
    early, late = (
        np.geomspace(1, count, most // 2),
        np.linspace(count, 1, most - most // 2 + 1)[:-1],
    )
    return np.unique(np.append(early, late).round().astype(int)) - 1


def noise_levels(plan: Plan, rounds: int) -> list:
    """Return the smallest and largest noise multiplier over rounds and clients, per noisy chain."""
    listed = [e for e in entries.entries(plan, rounds) if not (e.implied or e.refusal)]
    levels = [(e.unit, p.multiplier) for e in listed for p in e.parts]
    found = {(unit, z.tobytes()): z for unit, z in levels}.values()
    return [[float(z.min()), float(z.max())] for z in found]


def noise_warning(
    epsilon_at: Callable[[float], float],
    delta: float,
    unit: str,
    num_units: float = TYPICAL_NUM_UNITS,
) -> str:
    """Return a warning if epsilon is so small that the model is pure noise, or so large that almost
    nothing is protected; otherwise "".

    By group privacy, n rows (for unit "client", n clients) change the odds of a result by a factor
    of at most e^(n epsilon), except with a probability of at most n e^(n epsilon) delta.  They
    therefore have almost no effect if n is below both 1 / epsilon and 0.1 / delta.

    Args:
        epsilon_at: the smallest epsilon that is proved at a delta.
        delta: the delta of the run.
        unit: "example" or "client".
        num_units: how many rows, or clients, there are.

    Example:
        >>> noise_warning(lambda delta: 8.0, 1e-5, "example")
        ''
    """
    units = "rows" if unit == "example" else "clients"
    epsilon = least = float(epsilon_at(delta))
    small = min(delta, 0.099 / num_units)  # a delta at which all units together can be hidden
    if small < delta:
        least = float(epsilon_at(small))
    hidden = min(1 / max(least, 1e-300), 0.1 / small)
    if num_units <= hidden:
        return (
            f"this trains on noise: epsilon {least:.3g} at delta {small:.3g} hides even "
            f"{hidden:.2g} {units} together almost completely, and a model that is trained on "
            f"fewer is noise. Raise epsilon, or lower the noise."
        )
    if WEAK < epsilon < math.inf:
        return (
            f"epsilon is {epsilon:.3g} at delta {delta:.3g} (unit: {unit}): above {WEAK}, it "
            "protects almost nothing. Raise the noise multiplier, or choose an epsilon: jfl train "
            "and jfl calibrate take --epsilon 8."
        )
    return ""
