"""The guarantees of a run as rows of its files, epsilon along its rounds, and warnings about its
noise."""

import math

import numpy as np

from ..core.errors import NotAnalysable
from ..core.files import plain
from ..core.records import Caveat, Fn, Guarantee, Plan, code_of
from ..privacy import guarantees as accounting
from ..privacy.ledger import entries
from ..privacy.mechanisms import chain as mechanism

VIEWS = dict(
    server="server",
    third_party="third party",
    aggregate="secure aggregation",
    personal="personal models",
)
# evaluations whose epsilon is proved as tightly as that of the whole run, and those with at least a
# Renyi bound
TIGHT, MANY = 32, 128
WEAK = 20  # a guarantee with a larger epsilon protects almost nothing
GAIN = 1e-3  # the relative gain in epsilon that justifies computing a privacy-loss distribution


def all_rows(plan: Plan, rounds: int, delta: float, claims: tuple = ()) -> list[dict]:
    """Return all guarantees of a plan and the claims, as rows; without a guarantee, one row with
    epsilon None that says why."""
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
    """Return a guarantee as a JSON object: an infinite epsilon is None, and the status says why."""
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
    """Return the row of a guarantee with more caveats."""
    return row | dict(
        caveats=[*row["caveats"], *caveats], codes=[*row["codes"], *map(code_of, caveats)]
    )


def best(guarantees: list[dict]) -> dict:
    """Return the guarantee to show if there is room for only one: proved, not implied, and for the
    server if possible."""
    return min(
        guarantees,
        key=lambda g: (
            g["status"] == "claimed",
            g["epsilon"] is None,
            g.get("implied", False),
            g["view"] != "server",
        ),
    )


def label(guarantees: list[dict], unit: str | None = None) -> str:
    """Describe the first guarantee (of a unit) in a legend."""
    fit = [g for g in guarantees if g["epsilon"] is not None and unit in (None, g["unit"])]
    if not fit:
        return "no privacy"
    g = fit[0]
    return f"ε = {g['epsilon']:.3g} ({g['unit']}, {VIEWS[g['view']]})"


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
    """Return epsilon after several numbers of rounds, as `jfl.guarantee` proves it; the last is
    that of the whole run.

    A privacy-loss distribution takes about a tenth of a second per number of rounds, and a Renyi
    bound a hundredth.  So with more than `most` numbers some get only a Renyi bound, and with more
    than MANY some get the epsilon of the next larger number.

    Args:
        plan: the plan that runs.
        rounds: Int[m], ascending numbers of rounds.
        delta: in (0, 1).
        unit, view, adjacency: as in `jfl.guarantee`.
        last: the epsilon after the last number of rounds, if it is known.
        most: how many are computed as tightly as by `jfl.guarantee`, including the last; 0 means
            none, and `last` is ignored.

    Returns:
        Float64[m], which does not decrease as the number of rounds grows.

    Raises:
        ValueError: See `jfl.guarantee`.

    Privacy:
        The releases of the first rounds are part of those of all rounds, so an epsilon of more
        rounds also holds for fewer.
    """
    rounds = np.asarray(rounds)
    count = len(rounds)

    def proved(i):
        if rounds[i] == 0:
            return 0.0
        return accounting.guarantee(plan, int(rounds[i]), delta, unit, view, adjacency).epsilon

    values, bounded = np.full(count, np.inf), _spread(count, MANY)
    values[bounded] = accounting.epsilons(plan, rounds[bounded], delta, unit, view, adjacency)
    if most and count:
        quick, values[-1] = values[-1], proved(-1) if last is None else last
        if values[-1] < (1 - GAIN) * quick:  # else Renyi bounds and exact Gaussians do as well
            for i in _spread(count, most)[:-1]:
                values[i] = proved(i)
    return np.minimum.accumulate(values[::-1])[::-1]


def _spread(count: int, most: int) -> np.ndarray:
    """Choose at most `most` of the indices 0, ..., count - 1, including the last; they are dense at
    the beginning, where epsilon grows fast."""
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


def signal_to_noise(plan: Plan, rounds: int) -> float | None:
    """Return the largest possible sum of a run's contributions in one direction, divided by the
    standard deviation of the noise there.

    It assumes that all clipped contributions of all rounds point the same way.  The signal of a
    real training is far smaller, so below 1 nothing can be learned.

    Returns:
        The smallest ratio over the places where noise is added; None without noise.
    """
    cohort, rows = float(plan.sampler.expected), float(np.max(np.asarray(plan.fed.size)))
    heaviest = lambda round_: float(
        np.max(np.asarray(plan.weights(round_) if isinstance(plan.weights, Fn) else plan.weights))
    )
    # (chain, contributions in one release, releases of the run whose noise adds up, largest weight)
    sites = [
        (plan.release, cohort, rounds, heaviest),
        (plan.upload, 1.0, rounds * cohort, lambda round_: 1.0),
    ]
    for release in plan.algorithm.releases:
        batch = release.batches
        rate = None if batch.rate is None else float(np.max(np.asarray(batch.rate)))
        drawn = (
            batch.expected
            if batch.expected is not None
            else rows * rate
            if rate is not None
            else batch.batch
        )
        held = rows if release.steps or drawn is None else float(drawn)
        sites.append((release.mechanism, held, rounds * cohort * release.count, lambda round_: 1.0))
    found = [
        float(
            summed
            * math.sqrt(times)
            / np.min(np.asarray(mechanism.multipliers(chain, rounds, heaviest)))
        )
        for chain, summed, times, heaviest in sites
        if mechanism.noisy(chain)
    ]
    return min(found, default=None)


def noise_warning(plan: Plan, rounds: int, unit: str, epsilon: float | None, delta: float) -> str:
    """Return a warning for a run whose model is noise whatever the data are, or that has almost no
    privacy; "" for others.

    It warns only if that can be shown: all contributions of the run together are smaller than the
    noise, or all rows (for unit "client", all clients) together change the odds of any result by
    less than a factor of e (group privacy).
    """
    ratio = signal_to_noise(plan, rounds)
    levels = noise_levels(plan, rounds)
    multiplier = f"noise multiplier {min(low for low, _ in levels):.3g}" if levels else "this noise"
    if ratio is not None and ratio < 1:
        return (
            f"this trains on noise: at {multiplier} all contributions of all {rounds} rounds, if "
            f"they pointed the same way, "
            f"would add up to at most {ratio:.2g} standard deviations of the noise in that one "
            f"direction. Lower the noise, or raise "
            "epsilon."
        )
    units, what = (
        (int(np.sum(np.asarray(plan.fed.size))), "rows")
        if unit == "example"
        else (int(np.size(plan.fed.size)), "clients")
    )
    if epsilon is not None and units * epsilon < 1:
        factor = math.exp(units * epsilon)
        return (
            f"this trains on noise: at epsilon {epsilon:.3g} all {units} {what} together change "
            f"the odds of any result by a "
            f"factor of at most {factor:.4g}, apart from a probability of "
            f"{min(1, units * factor * delta):.2g}. Raise epsilon, "
            "or lower the noise."
        )
    return "" if epsilon is None else weak_guarantee(epsilon, delta)


def weak_guarantee(epsilon: float, delta: float) -> str:
    """Return a warning for an epsilon that protects almost nothing; "" for others.

    >>> weak_guarantee(8.0, 1e-5)
    ''
    """
    if not WEAK < epsilon < math.inf:
        return ""
    return (
        f"epsilon is {epsilon:.3g} at delta {delta:.3g}: above {WEAK}, it protects almost nothing. "
        f"Raise the noise multiplier, or choose an epsilon (--epsilon 8 --unit client)."
    )
