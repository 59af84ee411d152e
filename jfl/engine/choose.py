"""The best of several runs, or of a tournament of runs, with the epsilon of the whole choice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Caveat, Guarantee, Plan
from ..privacy import guarantees
from ..privacy.accountants import choosing, truncation
from ..privacy.accountants.tightest import Release
from ..privacy.guarantees import choose as choose_entry
from ..privacy.guarantees import entries_of, release_of
from ..privacy.ledger.entries import STOPS
from ..privacy.mechanisms.correlated import strategy_of
from .metrics import has_accuracy
from .sweep import Trained, points_of, train

SCORED = Caveat(
    "asserted, not checked: the score by which a run was chosen reads public rows only", "score"
)
SECRET = Caveat(
    "how many runs there were is secret: no log, no clock and no file may tell it", "secret-runs"
)
SEEDS = 2**31
WHERE = "jfl.choose"


class Rung(NamedTuple):
    """A choice, and what the runs that it chooses from train before it."""

    rounds: int  # behind those of the rungs before
    runs: choosing.Runs  # the law of how many runs there are


class Choice(NamedTuple):
    """What is released of many runs: one model and how it was made.  What is not here is secret:
    the other runs, and how many they were."""

    params: Any  # of the best run; None if no run was drawn, or all of them failed
    setting: dict[str, Any] | None  # the arguments of make_plan
    score: float | None
    guarantee: Guarantee  # of the choice


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
    """Train a random number of times with random settings, and release the best run alone.

    A sweep that shows its best point has looked at all of them: no epsilon of one run covers that.
    Here the number of runs is drawn from a law with the right tail and never told, each run draws
    its setting from the grid and has a seed of its own, and one run is released: that costs two to
    four times the epsilon of one, however many there are on average.

    With several numbers of rounds and as many laws it is a tournament (successive halving).  Short
    runs are drawn in groups, the best of each group goes on to the next number of rounds, and so on
    up to the last group, whose best is released.  With rounds=(10, 30, 90) and means 4, 3 and 2 it
    trains 24 runs to round 10, 6 of them on to round 30 and 2 to round 90, on average.  Each rung's
    choice is paid for all rounds before it, so that early rounds cost several times what late ones
    do.

    Args:
        make_plan: as in `jfl.sweep`: settings -> Plan.
        rounds: of each run; of a tournament, up to the choice of each rung, ascending.
        runs: the law of their number, such as `choosing.logarithmic(10)` of
            jfl.privacy.accountants: ten on average.  Of a tournament, the law of each rung.
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

    Returns:
        Choice.  Without params where no run was drawn, or all of them failed; a tournament also
        ends so where nothing is left in any group.  A run fails where its model or its score is not
        finite; nothing else that a run counts stops it or decides the choice.

    Privacy:
        of the parameters, the setting and the score together, by Renyi bounds, for the setting that
        is worst at each order.  Whoever learns how many runs there were (from the time they took,
        say) learns what no epsilon here covers.  A tournament asks for rounds that stand alone and
        are alike, since it charges each rung for the rounds behind the rung before it.

    Raises:
        NotAnalysable: of settings without noise; of a tournament, where noise changes from round
            to round or is correlated over rounds, or cohorts of several rounds are drawn together.
        ValueError: as `jfl.guarantee` and `jfl.sweep`; if settings differ in unit, adjacency or
            view; if rounds do not ascend, or rungs have no law each.

    References:
        Papernot and Steinke, ICLR 2022, "Hyperparameter tuning with Renyi differential privacy".

    Example:
        >>> import jfl
        >>> from jfl.privacy.accountants import choosing
        >>> best = jfl.choose(  # doctest: +SKIP
        ...     make_plan, rounds=50, runs=choosing.logarithmic(10), lr=[0.1, 0.3, 1.0], seed=7
        ... )
        >>> best.setting, best.guarantee.epsilon  # doctest: +SKIP
        >>> laws = [choosing.logarithmic(mean) for mean in (4, 3, 2)]
        >>> best = jfl.choose(  # doctest: +SKIP
        ...     make_plan, rounds=(10, 30, 90), runs=laws, lr=[0.1, 0.3, 1.0], seed=7
        ... )
    """
    rungs = _rungs(rounds, runs)
    checks.require_seed(WHERE, seed=seed)
    if score is not None and not callable(score):
        checks.fail(
            WHERE,
            "score: a function of parameters that gives a number",
            f"score={checks.short_repr(score)}",
        )
    grid = points_of(axes)
    plans = functools.cache(lambda i: make_plan(**grid[i]))
    ask = dict(unit=unit, view=view, adjacency=adjacency)
    told = _guarantee([plans(i) for i in range(len(grid))], rungs, delta, ask)
    for i in range(len(grid)):
        _refuse_untrained(plans(i), score)
    if score is not None:  # what it reads cannot be seen
        told = told._replace(status="conditional")  # pyright: ignore[reportPrivateUsage]  # of a named tuple
    groups, settings, seeds = _drawn(seed, [rung.runs for rung in rungs], len(grid))
    best = _winner([plans(int(i)) for i in settings], seeds, rungs, groups, score)
    if best is None:
        return Choice(None, None, None, told)
    return Choice(best.trained.params, grid[settings[best.number]], best.score, told)


def _rungs(rounds: Any, runs: Any) -> list[Rung]:
    """The rungs of a tournament; one number of rounds with one law is one rung."""
    if isinstance(runs, choosing.Runs) or not isinstance(runs, (list, tuple)):
        checks.require_type(WHERE, choosing.Runs, "choosing.logarithmic", runs=runs)
        checks.require_integer(WHERE, "Of a tournament give runs a law for each.", rounds=rounds)
        return [Rung(int(rounds), runs)]
    until = checks.as_tuple(WHERE, rounds=rounds)
    if not runs or len(until) != len(runs):
        checks.fail(
            WHERE,
            "rounds and a law of runs for each rung, and a rung",
            f"{len(until)} of rounds and {len(runs)} of runs",
        )
    for i, (last, law) in enumerate(zip(until, runs)):
        checks.require_integer(WHERE, **{f"rounds[{i}]": last})
        checks.require_type(WHERE, choosing.Runs, "choosing.logarithmic", **{f"runs[{i}]": law})
    own = np.diff([int(last) for last in until], prepend=0)
    if (own <= 0).any():
        checks.fail(
            WHERE,
            "rounds that ascend: each rung goes on from the one before",
            f"rounds={checks.short_repr(until)}",
        )
    if (mean := np.prod([law.mean for law in runs])) > choosing.MOST_RUNS:
        checks.fail(
            WHERE,
            f"at most {choosing.MOST_RUNS:g} runs on average, the product of the means of all laws",
            f"{mean:g}",
        )
    return [Rung(int(n), law) for n, law in zip(own, runs)]


def _refuse_untrained(plan: Plan, score: Callable[..., Any] | None) -> None:
    checks.require_device_rows(WHERE, plan.fed)
    if score is None and not has_accuracy(plan.task):
        checks.fail(WHERE, "score: a function of parameters", "a task without an accuracy")


# --- who wins


def _drawn(seed: int, laws: Sequence[choosing.Runs], settings: int) -> tuple[list[Any], Any, Any]:
    """How many runs each group of each rung chooses from, Int[groups] for each rung; and the
    setting and the seed of each run of the first rung."""
    number_key, setting_key, seed_key = jax.random.split(jax.random.key(seed), 3)
    keys = [number_key] if len(laws) == 1 else list(jax.random.split(number_key, len(laws)))
    groups, number = [], 1  # from the last rung, which is one group; each of its runs is a group
    for key, law in zip(reversed(keys), reversed(laws)):
        groups.insert(0, choosing.draw(key, law, number) if number else np.zeros(0, int))
        number = int(groups[0].sum())
    if not number:
        return groups, (), ()
    drawn = np.asarray(jax.random.randint(setting_key, (number,), 0, settings))
    first = int(jax.random.bits(seed_key, (), "uint32"))
    return groups, drawn, (first + np.arange(number)) % SEEDS


class _Runner(NamedTuple):
    """A run in the tournament, after the rounds of a rung."""

    number: int  # among the runs of the first rung
    trained: Any = None  # Trained; None before its first rung
    score: float = -np.inf  # of a run that failed, too


def _winner(
    plans: Sequence[Plan],
    seeds: Sequence[int],
    rungs: Sequence[Rung],
    groups: Sequence[Any],
    score: Callable[..., Any] | None,
) -> _Runner | None:
    """The run that is released, None if there is none.

    All that a run has released counts as seen by the next rung, and what clients remember is used
    by them alone: to go on from its state is what a longer run does.
    """
    field = [_Runner(i) for i in range(len(plans))]
    for rung, sizes in zip(rungs, groups):
        # one program goes on with all of them from where they are
        alive = [runner for runner in field if runner is not None]
        if not alive:
            return None
        trained = train(
            [plans[runner.number] for runner in alive],
            [seeds[runner.number] for runner in alive],
            rung.rounds,
            None if rung is rungs[0] else [runner.trained.state for runner in alive],
            keeps=rung is not rungs[-1],
        )
        done = iter(zip(trained, _scores(trained, score)))
        field = [runner and _Runner(runner.number, *next(done)) for runner in field]
        ends = np.cumsum(sizes)
        field = [_best(field[end - size : end]) for size, end in zip(sizes, ends)]
    return field[0]


def _best(group: Sequence[_Runner | None]) -> _Runner | None:
    """The first of those with the highest score; None of a group in which nobody has any."""
    there = [runner for runner in group if runner is not None and runner.score > -np.inf]
    return max(there, key=lambda runner: runner.score, default=None)


def _scores(trained: Sequence[Trained], score: Callable[..., Any] | None) -> list[float]:
    """Of each run; -inf of one that failed, which its released model alone decides.

    What a run counts on the way (empty cohorts, rows that are not finite or found no slot, what
    clients keep) hangs on who is there in ways that no epsilon covers.
    """
    scores = [_accuracy(t) if score is None else _scored(WHERE, score(t.params)) for t in trained]
    finite = [np.isfinite(s) and _finite(t.params) for s, t in zip(scores, trained)]
    return [s if good else -np.inf for s, good in zip(scores, finite)]


def _accuracy(run: Trained) -> float:
    measured: Any = run.metrics.accuracy  # a task without one was refused
    return float(measured[-1])


def _finite(params: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def _scored(where: str, value: Any) -> float:
    found = checks.as_array(where, "what score returns", value)
    if found.size != 1 or found.dtype.kind not in "biuf":
        checks.fail(
            where, "one number from score, larger for a better model", checks.short_repr(value)
        )
    return float(found.item())


# --- what it costs


def _guarantee(
    plans: Sequence[Plan], rungs: Sequence[Rung], delta: float, ask: dict[str, Any]
) -> Guarantee:
    """Of the choice: that of one run with any setting, made dearer."""
    rounds = sum(rung.rounds for rung in rungs)
    each = [guarantees.guarantee(plan, rounds, delta, **ask) for plan in plans]
    kinds = {(g.unit, g.adjacency, g.view) for g in each}
    if len(kinds) > 1:
        checks.fail(
            WHERE,
            "settings with one unit, adjacency and view",
            "; ".join(", ".join(kind) for kind in sorted(kinds)),
            "Give unit=, adjacency= and view=.",
        )
    releases = [getattr(g, "release", None) for g in each]
    if any(release is None for release in releases):
        checks.fail(
            WHERE,
            "noise in every setting",
            "one whose guarantee has no noise behind it",
            error=NotAnalysable,
        )
    # of each setting what each rung releases
    parts = [releases] if len(rungs) == 1 else _of_rungs(plans, rungs, delta, *next(iter(kinds)))
    # no run stops here
    caveats = dict.fromkeys(c for g in each for c in g.caveats if c != STOPS)
    status = "conditional" if any(g.status != "proved" for g in each) else "proved"
    unit, adjacency, view = kinds.pop()
    laws = [rung.runs for rung in rungs]
    name = "repeat_and_select" if len(rungs) == 1 else f"tournament of {len(rungs)}"
    return Guarantee(
        choosing.epsilon_of_tournament([_of_any(part) for part in parts], laws, delta),
        float(delta),
        unit,
        adjacency,
        view,
        f"{name}, {', '.join(dict.fromkeys(law.law for law in laws))}, rdp",
        status,
        (*caveats, SCORED, SECRET),
    )


def _of_any(releases: Sequence[Release | None]) -> Release:
    """What rounds with any setting release, out of what they release with each."""
    # settings that differ in what no accounting reads are one
    held: Any = releases  # none of them is None
    alternatives = {
        str([np.asarray(x).tolist() for x in jax.tree.leaves(e)]) + str(jax.tree.structure(e)): e
        for release in held
        for e in release.alternatives
    }
    return Release(
        tuple(alternatives.values()),
        max(r.overflow for r in held),
        max(r.extra for r in held),
        max((r.shifts for r in held), key=truncation.total),
    )


def _of_rungs(
    plans: Sequence[Plan], rungs: Sequence[Rung], delta: float, unit: str, adjacency: str, view: str
) -> list[list[Release]]:
    """For each rung what its own rounds release, with each setting.

    So many rounds of a run have one guarantee, whichever they are and whatever came before them.
    Plans of which that is not true are refused.
    """
    rounds = sum(rung.rounds for rung in rungs)
    entries = []
    for plan in plans:
        _refuse_rounds_drawn_together(plan)
        listed = entries_of(plan, rounds, delta)
        entry = choose_entry(WHERE, plan, listed, unit, view, adjacency)
        if entry.changes or entry.method:
            _refuse_rounds("noise that changes from round to round, against what it hides")
        entries.append(entry)
    return [[release_of(entry, rung.rounds) for entry in entries] for rung in rungs]


def _refuse_rounds_drawn_together(plan: Plan) -> None:
    chains = (plan.upload, plan.release, *(r.mechanism for r in plan.algorithm.releases))
    if any(map(strategy_of, chains)):
        _refuse_rounds("noise that is correlated over rounds")
    if plan.sampler.over_rounds:
        _refuse_rounds(f"sampling.{plan.sampler.scheme}, which draws cohorts by the round")


def _refuse_rounds(got: str) -> NoReturn:
    checks.fail(
        WHERE,
        "a plan whose rounds stand alone and are alike, for several numbers of rounds",
        got,
        "Give one number of rounds and one law; or take cohorts that are drawn anew in every "
        "round, and the same noise.",
        error=NotAnalysable,
    )
