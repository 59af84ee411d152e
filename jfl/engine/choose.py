"""The best of several runs, with the epsilon of the whole choice."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Caveat, Guarantee, Plan
from ..privacy import guarantees
from ..privacy.accountants import choosing
from ..privacy.accountants.curves import Release
from .sweep import points_of, sweep

SCORED = Caveat(
    "asserted, not checked: the score by which a run was chosen reads public rows only", "score"
)
SECRET = Caveat(
    "how many runs there were is secret: no log, no clock and no file may tell it", "secret-runs"
)
SEEDS = 2**31


class Choice(NamedTuple):
    """What is released of many runs: one model and how it was made.  What is not here is secret:
    the other runs, and how many they were."""

    params: Any  # of the best run; None if no run was drawn, or all of them failed
    setting: dict | None  # the arguments of make_plan
    score: float | None
    guarantee: Guarantee  # of the choice


def choose(
    make_plan: Callable[..., Plan],
    *,
    rounds: int,
    runs: choosing.Runs,
    seed: int = 0,
    delta: float = 1e-5,
    score: Callable | None = None,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    **axes: Any,
) -> Choice:
    """Train a random number of times with random settings, and release the best run alone.

    A sweep that shows its best point has looked at all of them: no epsilon of one run covers that.
    Here the number of runs is drawn from a law with the right tail and never told, each run draws
    its setting from the grid and has a seed of its own, and one run is released: that costs two to
    four times the epsilon of one, however many there are on average.

    Args:
        make_plan: as in `jfl.sweep`: settings -> Plan.
        rounds: of each run.
        runs: the law of their number, such as `choosing.logarithmic(10)` of
            jfl.privacy.accountants: ten on average.
        seed: all of it follows from it: keep it secret.
        delta: of the guarantee.
        score: parameters -> a number, larger is better, on public rows, which nobody can check:
            the guarantee is then conditional; None: the accuracy on the federation's test rows,
            which then count as public.
        unit: as in `jfl.guarantee`.
        view: as in `jfl.guarantee`.
        adjacency: as in `jfl.guarantee`.
        **axes: values of each argument of make_plan: a grid, of which each point is as likely;
            none: the best of several seeds.

    Privacy:
        of the parameters, the setting and the score together, by Renyi bounds, for the setting that
        is worst at each order.  Whoever learns how many runs there were (from the time they took,
        say) learns what no epsilon here covers.

    Raises:
        ValueError: as `jfl.guarantee` and `jfl.sweep`; if settings differ in unit, adjacency or
            view.

    References:
        Papernot and Steinke, ICLR 2022, "Hyperparameter tuning with Renyi differential privacy".

    Example:
        >>> import jfl
        >>> from jfl.privacy.accountants import choosing
        >>> best = jfl.choose(  # doctest: +SKIP
        ...     make_plan, rounds=50, runs=choosing.logarithmic(10), lr=[0.1, 0.3, 1.0], seed=7
        ... )
        >>> best.setting, best.guarantee.epsilon  # doctest: +SKIP
    """
    where = "jfl.choose"
    checks.kind(where, choosing.Runs, "choosing.logarithmic", runs=runs)
    checks.seed(where, seed=seed)
    if score is not None and not callable(score):
        checks.fail(
            where,
            "score: a function of parameters that gives a number",
            f"score={checks.shown(score)}",
        )
    grid = points_of(axes)
    plans = functools.cache(lambda i: make_plan(**grid[i]))
    ask = dict(unit=unit, view=view, adjacency=adjacency)
    told = _guarantee([plans(i) for i in range(len(grid))], rounds, runs, delta, ask)
    if score is not None:  # what it reads cannot be seen
        told = told._replace(status="conditional")
    number, drawn, seeds = _drawn(seed, runs, len(grid))
    if not number:
        return Choice(None, None, None, told)
    out = sweep(
        lambda setting: plans(setting),
        rounds=rounds,
        evaluate_every=rounds,
        points=[dict(setting=int(i), seed=int(s)) for i, s in zip(drawn, seeds)],
    )
    if score is None:
        scores = np.asarray(out.metrics.accuracy)[:, -1]
    else:
        scores = np.array([_scored(where, score(params)) for params in out.params])
    scores = np.where(np.asarray(out.failed) | ~np.isfinite(scores), -np.inf, scores)
    best = int(np.argmax(scores))
    if scores[best] == -np.inf:
        return Choice(None, None, None, told)
    return Choice(out.params[best], grid[drawn[best]], float(scores[best]), told)


def _scored(where, value):
    found = checks.array(where, "what score returns", value)
    if found.size != 1 or found.dtype.kind not in "biuf":
        checks.fail(where, "one number from score, larger for a better model", checks.shown(value))
    return float(found.item())


def _drawn(seed, runs, settings):
    """How many runs, and the setting and the seed of each."""
    number_key, setting_key, seed_key = jax.random.split(jax.random.key(seed), 3)
    number = choosing.draw(number_key, runs)
    if not number:
        return 0, (), ()
    drawn = np.asarray(jax.random.randint(setting_key, (number,), 0, settings))
    first = int(jax.random.bits(seed_key, (), "uint32"))
    return number, drawn, (first + np.arange(number)) % SEEDS


def _guarantee(plans, rounds, runs, delta, ask) -> Guarantee:
    """Of the choice: that of one run with any setting, made dearer."""
    each = [guarantees.guarantee(plan, rounds, delta, **ask) for plan in plans]
    kinds = {(g.unit, g.adjacency, g.view) for g in each}
    if len(kinds) > 1:
        checks.fail(
            "jfl.choose",
            "settings with one unit, adjacency and view",
            "; ".join(", ".join(kind) for kind in sorted(kinds)),
            "Give unit=, adjacency= and view=.",
        )
    releases = [getattr(g, "release", None) for g in each]
    if any(release is None for release in releases):
        checks.fail(
            "jfl.choose",
            "noise in every setting",
            "one whose guarantee has no noise behind it",
            error=NotAnalysable,
        )
    # settings that differ in what no accounting reads are one
    alternatives = {
        str([np.asarray(x).tolist() for x in jax.tree.leaves(e)]) + str(jax.tree.structure(e)): e
        for release in releases
        for e in release.alternatives
    }
    whole = Release(
        tuple(alternatives.values()),
        max(r.overflow for r in releases),
        max(r.extra for r in releases),
    )
    caveats = tuple(dict.fromkeys(c for g in each for c in g.caveats)) + (SCORED, SECRET)
    status = "conditional" if any(g.status != "proved" for g in each) else "proved"
    unit, adjacency, view = kinds.pop()
    return Guarantee(
        choosing.epsilon_of_choice(whole, runs, delta),
        float(delta),
        unit,
        adjacency,
        view,
        f"repeat_and_select, {runs.law}, rdp",
        status,
        caveats,
    )
