"""Search over settings: choose the best of many private runs, or let a tuner propose settings.

choose      releases the best of many private runs, with an epsilon that covers the choice
ask_tell    lets a tuner such as Optuna search on public data
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core import checks, pytrees
from ..core.errors import HealthError, NotAnalysable
from ..core.records import Caveat, Guarantee, Plan, brief, safe_repr, size_text
from ..privacy import guarantees
from ..privacy.accountants import choosing, truncation
from ..privacy.accountants.tightest import Release
from ..privacy.ledger.caveats import STOPS
from .callbacks import metric_of
from .metrics import has_accuracy
from .sweep import Trained, points_of, sweep, train

SCORED = Caveat(
    "Assumes, without checking, that the score for choosing a run uses public data only.", "score"
)
SECRET = Caveat(
    "Assumes that the number of runs stays secret: logs, timings and files must not reveal it.",
    "secret-runs",
)
# Seeds of runs are below this number.
NUM_SEEDS = 2**31
# The function that messages name.
WHERE = "jfl.choose"


class Choice(NamedTuple):
    """The released result of many runs.  The other runs and their number stay secret.

    Attributes:
        params: the parameters of the best run; None if all runs failed.
        setting: the arguments of make_plan for the best run; None if all runs failed.
        score: the score of the best run; None if all runs failed.
        guarantee: the guarantee of the whole choice.
    """

    params: Any
    setting: dict[str, Any] | None
    score: float | None
    guarantee: Guarantee

    @safe_repr
    def __repr__(self) -> str:
        best = f"{brief(self.setting)}, score {brief(self.score)}, {size_text(self.params)}"
        return (
            f"Choice: {best if self.setting is not None else 'all runs failed'}\n{self.guarantee}"
        )


def choose(
    make_plan: Callable[..., Plan],
    *,
    rounds: int,
    runs: choosing.Runs,
    seed: int = 0,
    delta: float = 1e-5,
    score: Callable[..., Any] | None = None,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    **axes: Any,
) -> Choice:
    """Train a random number of runs with random settings, and release only the best one.

    Releasing the best point of a sweep reveals something about all of its points, which the epsilon
    of a single run does not cover.  Here the number of runs is drawn from a distribution with a
    suitable tail and never revealed, and each run draws its setting from the grid and has its own
    seed.  The epsilon of the choice is then 1.5 to 4 times the epsilon of one run, however large
    the mean number of runs is.

    Args:
        make_plan: maps settings to a Plan, as in `jfl.sweep`.
        rounds: the number of rounds of each run.
        runs: the distribution of the number of runs, for example `choosing.logarithmic(10)` of
            jfl.privacy.accountants, whose mean is 10.
        seed: the seed of all random draws.  Keep it secret.
        delta: delta of the guarantee.
        score: a function that maps parameters to a number, larger for a better model.  It must use
            public data only.  jfl cannot check that, so the status of the guarantee is then
            "conditional".  None means the accuracy on the federation's test rows, which are then
            assumed to be public.
        unit: as in `jfl.guarantee`.
        view: as in `jfl.guarantee`.
        adjacency: as in `jfl.guarantee`.
        **axes: a list of values for each argument of make_plan.  Each run draws its setting
            uniformly from their cartesian product.  Without axes, runs differ in their seeds only.

    Returns:
        A Choice.  Its params are None if all runs failed.  A run fails if its parameters or its
        score are not finite; nothing else stops a run or affects the choice.

    Privacy:
        The guarantee covers the parameters, the setting and the score together.  It is a Renyi
        bound for the worst setting at each order.  It does not hold against an observer who learns
        the number of runs, for example from the total time.

    Raises:
        NotAnalysable: if a setting has no noise.
        ValueError: as in `jfl.guarantee` and `jfl.sweep`; if settings differ in unit, adjacency or
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
    checks.require_integer(WHERE, rounds=rounds)
    checks.require_type(WHERE, choosing.Runs, "choosing.logarithmic", runs=runs)
    checks.require_seed(WHERE, seed=seed)
    if score is not None and not callable(score):
        checks.fail(
            WHERE,
            "score: a function that maps parameters to a number",
            f"score={checks.short_repr(score)}",
        )
    grid = points_of(axes)
    plans = [make_plan(**setting) for setting in grid]
    selected = dict(unit=unit, view=view, adjacency=adjacency)
    guarantee = _guarantee(plans, rounds, runs, delta, selected)
    for plan in plans:
        checks.require_device_rows(WHERE, plan.fed)
        if score is None and not has_accuracy(plan.task):
            checks.fail(WHERE, "score=, as the task has no accuracy", "no score")
    if score is not None:  # jfl cannot see which data the score uses
        guarantee = guarantee._replace(status="conditional")  # pyright: ignore[reportPrivateUsage]  # of a named tuple
    settings, seeds = _draw_runs(seed, runs, len(grid))
    trained = train([plans[i] for i in settings], seeds, rounds)
    scores = [_score(run, score) for run in trained]
    best = int(np.argmax(scores))  # the first of those with the highest score
    if scores[best] == -np.inf:
        return Choice(None, None, None, guarantee)
    return Choice(trained[best].params, grid[settings[best]], scores[best], guarantee)


def _draw_runs(
    seed: int, distribution: choosing.Runs, num_settings: int
) -> tuple[list[int], list[int]]:
    """Draw the number of runs, and return the setting and the seed of each run."""
    number_key, setting_key, seed_key = jax.random.split(jax.random.key(seed), 3)
    number = int(choosing.draw(number_key, distribution))
    settings = np.asarray(jax.random.randint(setting_key, (number,), 0, num_settings, "int32"))
    first = int(jax.random.bits(seed_key, (), "uint32"))
    return settings.tolist(), [(first + i) % NUM_SEEDS for i in range(number)]


def _score(run: Trained, score: Callable[..., Any] | None) -> float:
    """Return the score of a run; -inf if it failed.

    Only the released parameters and the score decide whether a run failed.  Its Health counts, such
    as empty cohorts or non-finite rows, depend on the data in ways that epsilon does not cover.
    """
    value = run.metrics.accuracy[-1] if score is None else score(run.params)  # pyright: ignore[reportOptionalSubscript]  # `choose` checked it
    found = checks.as_array(WHERE, "the result of score", value)
    if found.size != 1 or found.dtype.kind not in "biuf":
        checks.fail(
            WHERE, "one number from score, larger for a better model", checks.short_repr(value)
        )
    healthy = np.isfinite(found).all() and bool(pytrees.all_finite(run.params))
    return float(found.item()) if healthy else -np.inf


# --- privacy of the choice


def _guarantee(
    plans: Sequence[Plan],
    rounds: int,
    runs: choosing.Runs,
    delta: float,
    selected: dict[str, Any],
) -> Guarantee:
    """Return the guarantee of the choice, from the releases of each setting.

    Args:
        plans: the plan of each setting.
        rounds: the number of rounds of each run.
        runs: the distribution of the number of runs.
        delta: the delta of the guarantee.
        selected: the unit, view and adjacency; None is decided by `jfl.guarantee`.
    """
    each = [guarantees.guarantee(plan, rounds, delta, **selected) for plan in plans]
    kinds = {(g.unit, g.adjacency, g.view) for g in each}
    if len(kinds) > 1:
        checks.fail(
            WHERE,
            "settings with one unit, adjacency and view",
            "; ".join(", ".join(kind) for kind in sorted(kinds)),
            "Pass unit=, adjacency= and view=.",
        )
    (kind,) = kinds
    releases = [getattr(g, "release", None) for g in each]
    if None in releases:
        checks.fail(
            WHERE,
            "noise in every setting",
            "a setting whose guarantee is not based on noise",
            error=NotAnalysable,
        )
    return Guarantee(
        choosing.epsilon_of_choice(_combine_settings(releases), runs, delta),
        float(delta),
        *kind,
        f"repeat_and_select, {runs.name}, rdp",
        "conditional" if any(g.status != "proved" for g in each) else "proved",
        # No run stops early, so the reason for stopping is not a release here.
        (*dict.fromkeys(c for g in each for c in g.caveats if c != STOPS), SCORED, SECRET),
    )


def _combine_settings(releases: Sequence[Any]) -> Release:
    """Return one Release that bounds the releases of all settings."""
    # Equal alternatives are kept once.
    alternatives = {
        str([np.asarray(x).tolist() for x in jax.tree.leaves(e)]) + str(jax.tree.structure(e)): e
        for release in releases
        for e in release.alternatives
    }
    return Release(
        tuple(alternatives.values()),
        max(r.overflow for r in releases),
        max(r.extra for r in releases),
        max((r.shifts for r in releases), key=truncation.total),
    )


# --- tuners


def ask_tell(
    make_plan: Callable[..., Plan],
    study: Any,
    space: Mapping[str, Any],
    *,
    rounds: int,
    trials: int,
    at_once: int = 8,
    metric: str = "accuracy",
    seeds: Sequence[int] = (0,),
    tolerate: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Let a tuner such as Optuna propose settings, and run them as sweeps.

    Args:
        make_plan: maps settings to a Plan, as in `jfl.sweep`.
        study: a study of Optuna, or an object with the same methods ask(space), which returns a
            trial with `params`, and tell(trial, value).  The study decides whether larger values
            are better.
        space: the distribution of each argument of make_plan, in the form that the study expects.
        rounds: the number of rounds of each run.
        trials: the number of settings to try.
        at_once: the number of settings to ask for at a time; they run as one sweep.
        metric: the metric of the last evaluation that is passed to the study: a field of Metrics,
            or the name of a custom metric.
        seeds: every setting runs with each of these seeds, and the study gets the mean metric.
        tolerate: as in `jfl.sweep`.

    Returns:
        A dict per trial: its settings and `value`.  The value is NaN if a run failed or the metric
        is not finite; Optuna counts such a trial as failed.

    Privacy:
        A tuner sees the result of every run, so the best one has no guarantee.  Tune on public data
        or on different seeds and splits, or use `jfl.choose`.

    Example:
        >>> import optuna  # doctest: +SKIP
        >>> study = optuna.create_study(direction="maximize")  # doctest: +SKIP
        >>> space = dict(lr=optuna.distributions.FloatDistribution(1e-3, 1, log=True))
        ... # doctest: +SKIP
        >>> found = ask_tell(make_plan, study, space, rounds=20, trials=32)  # doctest: +SKIP
        >>> study.best_params  # doctest: +SKIP
    """
    where = "ask_tell"
    for name in ("ask", "tell"):
        if not callable(getattr(study, name, None)):
            checks.fail(where, "a study with ask and tell, as of Optuna", checks.short_repr(study))
    checks.require_integer(where, trials=trials, at_once=at_once, rounds=rounds)
    seeds = checks.as_tuple(where, seeds=seeds)
    if not seeds or "seed" in space:
        checks.fail(where, "seeds apart from the space, at least one", f"{seeds!r}")
    tried: list[dict[str, Any]] = []
    while len(tried) < trials:
        asked = [study.ask(space) for _ in range(min(at_once, trials - len(tried)))]
        points = [dict(trial.params, seed=seed) for trial in asked for seed in seeds]
        try:
            swept = sweep(make_plan, rounds=rounds, points=points, tolerate=tolerate)
        except HealthError as error:  # all of these points failed, which the study must learn
            swept = error.run
        values = np.asarray(metric_of(where, swept.metrics, metric))[:, -1].astype(float)
        values[swept.failed | ~np.isfinite(values)] = np.nan
        means = values.reshape(len(asked), len(seeds)).mean(1)
        for trial, value in zip(asked, means.tolist(), strict=True):
            study.tell(trial, value)
            tried.append(dict(trial.params, value=value))
    return tried
