"""Search over settings: choose the best of many private runs, or let a tuner propose settings.

choose      releases the best of many private runs, with an epsilon that covers the choice
ask_tell    lets a tuner such as Optuna search on public data
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np

from ..core import checks, pytrees
from ..core.errors import NotAnalysable
from ..core.records import Caveat, Guarantee, Plan, brief, safe_repr, size_text
from ..privacy import guarantees
from ..privacy.accountants import choosing, truncation
from ..privacy.accountants.tightest import Release
from ..privacy.guarantees import choose as choose_entry
from ..privacy.ledger import entries as ledger
from ..privacy.ledger.caveats import STOPS
from ..privacy.ledger.entry import release_of
from ..privacy.mechanisms.correlated import strategy_of
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


class Rung(NamedTuple):
    """A stage of a tournament: all remaining runs train, and the best run of each group continues.

    Attributes:
        rounds: the number of rounds that each run trains in this rung.
        runs: the distribution of the number of runs in each group.
    """

    rounds: int
    runs: choosing.Runs


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
        return f"Choice: {best if self.setting else 'all runs failed'}\n{self.guarantee}"


def choose(
    make_plan: Callable[..., Plan],
    *,
    rounds: int | Sequence[int],
    runs: choosing.Runs | Sequence[choosing.Runs],
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

    A list of numbers of rounds, with one distribution for each, makes a tournament (successive
    halving).  All runs train to the first number of rounds, in groups; the best run of each group
    continues to the next number, and so on.  The best run of the last group is released.  With
    rounds=(10, 30, 90) and means 4, 3 and 2, on average 24 runs train to round 10, 6 of them
    continue to round 30 and 2 to round 90.  Every choice is charged for all rounds before it, so
    early rounds, which precede several choices, cost more than late ones.

    Args:
        make_plan: maps settings to a Plan, as in `jfl.sweep`.
        rounds: the number of rounds of each run.  In a tournament, the rounds after which each rung
            chooses, in ascending order.
        runs: the distribution of the number of runs, for example `choosing.logarithmic(10)` of
            jfl.privacy.accountants, whose mean is 10.  In a tournament, the distribution of the
            size of a group in each rung.
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
        the number of runs, for example from the total time.  A tournament adds up the costs of the
        rounds of each rung, so it requires rounds that are independent and identical.

    Raises:
        NotAnalysable: if a setting has no noise; in a tournament also if the noise changes over
            rounds or is correlated across rounds, or if cohorts of several rounds are drawn
            together.
        ValueError: as in `jfl.guarantee` and `jfl.sweep`; if settings differ in unit, adjacency or
            view; if rounds do not ascend, or if there is not one distribution per rung.

    References:
        Papernot and Steinke, ICLR 2022, "Hyperparameter tuning with Renyi differential privacy".

    Example:
        >>> import jfl
        >>> from jfl.privacy.accountants import choosing
        >>> best = jfl.choose(  # doctest: +SKIP
        ...     make_plan, rounds=50, runs=choosing.logarithmic(10), lr=[0.1, 0.3, 1.0], seed=7
        ... )
        >>> best.setting, best.guarantee.epsilon  # doctest: +SKIP
        >>> runs = [choosing.logarithmic(mean) for mean in (4, 3, 2)]
        >>> best = jfl.choose(  # doctest: +SKIP
        ...     make_plan, rounds=(10, 30, 90), runs=runs, lr=[0.1, 0.3, 1.0], seed=7
        ... )
    """
    rungs = _rungs(rounds, runs)
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
    guarantee = _guarantee(plans, rungs, delta, selected)
    for plan in plans:
        checks.require_device_rows(WHERE, plan.fed)
        if score is None and not has_accuracy(plan.task):
            checks.fail(WHERE, "score=, as the task has no accuracy", "no score")
    if score is not None:  # jfl cannot see which data the score uses
        guarantee = guarantee._replace(status="conditional")  # pyright: ignore[reportPrivateUsage]  # of a named tuple
    groups, settings, seeds = _draw_runs(seed, [rung.runs for rung in rungs], len(grid))
    best = _run_tournament([plans[i] for i in settings], seeds, rungs, groups, score)
    if best is None:
        return Choice(None, None, None, guarantee)
    return Choice(best.trained.params, grid[settings[best.number]], best.score, guarantee)


def _rungs(rounds: Any, runs: Any) -> list[Rung]:
    """Check the arguments of a tournament and return its rungs.

    One number of rounds with one distribution is a single rung.
    """
    if isinstance(runs, (list, tuple)) and not isinstance(runs, choosing.Runs):
        until = checks.as_tuple(WHERE, rounds=rounds)
    else:
        checks.require_type(WHERE, choosing.Runs, "choosing.logarithmic", runs=runs)
        hint = "For a tournament, pass one distribution of runs per rung."
        checks.require_integer(WHERE, hint, rounds=rounds)
        until, runs = (rounds,), (runs,)
    if not runs or len(until) != len(runs):
        checks.fail(
            WHERE,
            "at least one rung, each with a number of rounds and a distribution of runs",
            f"{len(until)} numbers of rounds and {len(runs)} distributions",
        )
    for i, (last, distribution) in enumerate(zip(until, runs)):
        checks.require_integer(WHERE, **{f"rounds[{i}]": last})
        name = f"runs[{i}]"
        checks.require_type(WHERE, choosing.Runs, "choosing.logarithmic", **{name: distribution})
    rounds_of_rung = np.diff([int(last) for last in until], prepend=0)
    if (rounds_of_rung <= 0).any():
        checks.fail(
            WHERE,
            "rounds in ascending order, because each rung continues the one before",
            f"rounds={checks.short_repr(until)}",
        )
    if (mean := np.prod([distribution.mean for distribution in runs])) > choosing.MAX_MEAN_RUNS:
        checks.fail(
            WHERE,
            f"at most {choosing.MAX_MEAN_RUNS:g} runs on average (the product of all means)",
            f"{mean:g}",
        )
    return [Rung(int(n), distribution) for n, distribution in zip(rounds_of_rung, runs)]


# --- the tournament


def _draw_runs(
    seed: int, distributions: Sequence[choosing.Runs], num_settings: int
) -> tuple[list[np.ndarray], list[int], list[int]]:
    """Draw the runs of a tournament.

    Returns:
        The number of runs of each group, Int[groups] per rung; the setting of each run of the first
        rung; and the seed of each.
    """
    number_key, setting_key, seed_key = jax.random.split(jax.random.key(seed), 3)
    count = len(distributions)
    keys = [number_key] if count == 1 else list(jax.random.split(number_key, count))
    # The last rung is a single group, and each of its runs is the winner of a group before it.
    groups, number = [], 1
    for key, runs in zip(reversed(keys), reversed(distributions)):
        groups.insert(0, choosing.draw(key, runs, number))
        number = int(groups[0].sum())
    settings = np.asarray(jax.random.randint(setting_key, (number,), 0, num_settings))
    first = int(jax.random.bits(seed_key, (), "uint32"))
    return groups, settings.tolist(), [(first + i) % NUM_SEEDS for i in range(number)]


class _Runner(NamedTuple):
    """A run of the tournament.

    Attributes:
        number: its index among the runs of the first rung.
        trained: its state after the last rung; None before the first rung.
        score: its score after the last rung; -inf if it failed.
    """

    number: int
    trained: Any = None
    score: float = -np.inf


def _run_tournament(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    rungs: Sequence[Rung],
    groups: Sequence[np.ndarray],
    score: Callable[..., Any] | None,
) -> _Runner | None:
    """Train all runs and return the one to release, or None if all failed.

    A run continues from its own state, exactly as a longer run would.  The accounting treats all of
    its earlier releases as known in the next rung.  Only the clients themselves use their client
    states, which are not released.

    Args:
        plans: the plan of each run.
        seeds: the seed of each run.
        rungs: the rungs.
        groups: Int[groups] per rung, the number of runs in each group.
        score: as in `choose`.
    """
    # None marks a group of which all runs failed.
    runners: list[_Runner | None] = [_Runner(i) for i in range(len(plans))]
    for rung, sizes in zip(rungs, groups):
        alive = [runner for runner in runners if runner is not None]
        if not alive:
            return None
        # All remaining runs continue together, as few programs.
        trained = train(
            [plans[runner.number] for runner in alive],
            [seeds[runner.number] for runner in alive],
            rung.rounds,
            None if rung is rungs[0] else [runner.trained.state for runner in alive],
            keep_states=rung is not rungs[-1],
        )
        scored = iter([(run, _score(run, score)) for run in trained])
        runners = [runner and _Runner(runner.number, *next(scored)) for runner in runners]
        remaining = iter(runners)
        runners = [_best_of([next(remaining) for _ in range(size)]) for size in sizes]
    return runners[0]


def _best_of(group: Sequence[_Runner | None]) -> _Runner | None:
    """Return the first run with the highest score, or None if all runs of the group failed."""
    healthy = [runner for runner in group if runner is not None and runner.score > -np.inf]
    return max(healthy, key=lambda runner: runner.score, default=None)


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
    plans: Sequence[Plan], rungs: Sequence[Rung], delta: float, selected: dict[str, Any]
) -> Guarantee:
    """Return the guarantee of the choice, from the releases of each setting and each rung.

    Args:
        plans: the plan of each setting.
        rungs: the rungs.
        delta: the delta of the guarantee.
        selected: the unit, view and adjacency; None is decided by `jfl.guarantee`.
    """
    rounds = sum(rung.rounds for rung in rungs)
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
    # For each rung, the releases of each setting.
    releases = [[getattr(g, "release", None) for g in each]]
    if None in releases[0]:
        checks.fail(
            WHERE,
            "noise in every setting",
            "a setting whose guarantee is not based on noise",
            error=NotAnalysable,
        )
    if len(rungs) > 1:
        entries = [_entry_of_equal_rounds(plan, rounds, *kind) for plan in plans]
        releases = [[release_of(entry, rung.rounds) for entry in entries] for rung in rungs]
    distributions = [rung.runs for rung in rungs]
    name = "repeat_and_select" if len(rungs) == 1 else f"tournament of {len(rungs)}"
    return Guarantee(
        choosing.epsilon_of_tournament(
            [_combine_settings(of_rung) for of_rung in releases], distributions, delta
        ),
        float(delta),
        *kind,
        f"{name}, {', '.join(dict.fromkeys(d.name for d in distributions))}, rdp",
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


def _entry_of_equal_rounds(plan: Plan, rounds: int, unit: str, adjacency: str, view: str) -> Any:
    """Return the ledger entry of a plan for a tournament.

    Any number of its rounds must have the same guarantee, whichever rounds they are and whatever
    came before.  Plans for which that is not true are refused.
    """

    def refuse(found: str) -> NoReturn:
        checks.fail(
            WHERE,
            "a plan whose rounds are independent and identical, for a tournament",
            found,
            "Use one number of rounds and one distribution of runs; or draw an independent cohort "
            "in every round and keep the noise constant.",
            error=NotAnalysable,
        )

    chains = (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    if any(map(strategy_of, chains)):
        refuse("noise that is correlated across rounds")
    if plan.sampler.over_rounds:
        scheme = f"sampling.{plan.sampler.scheme}"
        refuse(f"{scheme}, which draws the cohorts of several rounds together")
    entries = ledger.entries(plan, rounds)
    entry = choose_entry(WHERE, plan, entries, unit, view, adjacency)
    if entry.changes or entry.method:
        refuse("noise that changes relative to the sensitivity over rounds")
    return entry


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
        swept = sweep(make_plan, rounds=rounds, points=points, tolerate=tolerate)
        values = np.asarray(metric_of(where, swept.metrics, metric))[:, -1].astype(float)
        values[swept.failed | ~np.isfinite(values)] = np.nan
        means = values.reshape(len(asked), len(seeds)).mean(1)
        for trial, value in zip(asked, means.tolist(), strict=True):
            study.tell(trial, value)
            tried.append(dict(trial.params, value=value))
    return tried
