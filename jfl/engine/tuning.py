"""Ask and tell: a tuner proposes settings, a sweep runs many of them as one program."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..core import checks
from ..core.records import Plan
from .callbacks import metric_of
from .sweep import sweep


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
    """Let a tuner such as Optuna choose settings, several at a time, each batch one sweep.

    Args:
        make_plan: settings -> Plan, as of `jfl.sweep`.
        study: has ask(space) -> a trial with `params`, and tell(trial, value): a study of Optuna.
            It knows whether a larger value is better.
        space: name -> distribution, as the study takes it.
        rounds: of each run.
        trials: how many settings are tried.
        at_once: of them, how many are asked for before any is told: as many run as one program.
        metric: what is told, of the last evaluation: a name in Metrics, or of a custom one.
        seeds: each setting is run with all of them, and told the mean.
        tolerate: as of `jfl.sweep`.

    Returns:
        A dict for each trial: its settings and `value`, NaN where a run failed or the metric is not
        finite; Optuna counts such
        a trial as failed.

    Privacy:
        a tuner looks at every run, so the best one has no guarantee of its own: tune on public data
        or on other seeds and splits, or train by `jfl.choose`.

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
        values = (
            np.where(swept.failed | ~np.isfinite(values), np.nan, values)
            .reshape(len(asked), len(seeds))
            .mean(1)
        )
        for trial, value in zip(asked, values.tolist(), strict=True):
            study.tell(trial, value)
            tried.append(dict(trial.params, value=value))
    return tried
