"""The only loop: rounds inside one program, with an evaluation every so many."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, identity, lazy, printing, pytrees
from ..core.aliases import Array, Key, Tree, Words
from ..core.random_streams import derive_noise_key, noise_seed_words
from ..core.records import Health, Metrics, Plan, Run
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import correlated, float_floors
from . import devices as meshes
from . import host_feed, sharding
from .callbacks import stop_if_unhealthy, watching
from .metrics import evaluate
from .round import (
    RoundStats,
    advance,
    enter_plan,
    init_run,
    init_run_jit,
    run_noise_key,
    run_sampling_key,
)

MAX_EVALUATIONS = 10**7  # of a run: more is a slip
LARGEST_PARAMETER = 1e18  # the square of a larger one overflows in float32
MIN_METRIC_SLOTS = 32  # for metrics, at least: what a default cadence needs


class Output(NamedTuple):
    """What a simulation gives back.  `metrics` and what it holds lie outside the guarantee;
    `params` is the release."""

    run: Run
    metrics: Metrics  # leaves [evaluations]
    params: Any
    __repr__ = printing.output
    frame = lazy.later("jfl.runs.tables.frame")


def scan(run: Run, plan: Plan, rounds: ArrayLike | Sequence[int]) -> tuple[Run, Metrics]:
    """Rounds and evaluations as one pure function: for jit, vmap and a user's own code.

    Args:
        run: of `jfl.init`, or of earlier rounds.
        plan: a Plan.
        rounds: Int[E], how many rounds come before each of E evaluations.

    Returns:
        The run after all rounds, and metrics with leaves [E].
    """
    checks.kind("scan", Run, "jfl.init", run=run)
    checks.kind("scan", Plan, "jfl.plan", plan=plan)
    found: Any = checks.array("scan", "rounds", rounds) if checks.concrete(rounds) else rounds
    if found.ndim != 1 or not jnp.issubdtype(found.dtype, jnp.integer):
        checks.fail("scan", "rounds Int[E], those before each evaluation", checks.shown(rounds))
    run = enter_plan(run, identity.noise_identity(plan))
    return scan_from(run, plan, rounds, run_noise_key(run))


def scan_from(
    run: Run, plan: Plan, rounds: ArrayLike | Sequence[int], noise: Key
) -> tuple[Run, Metrics]:
    """`scan` of a run that has entered its plan; `noise` is its noise_key."""
    run, until_evaluation, own = _prepared(run, plan, noise)
    run, metrics = jax.lax.scan(until_evaluation, run, jnp.asarray(rounds, jnp.int32))
    return dataclasses.replace(
        run, client_states=sharding.unpad_client_states(run.client_states, own)
    ), metrics


def _prepared(
    run: Run, plan: Plan, noise: Key
) -> tuple[Run, Callable[[Run, Array], tuple[Run, Metrics]], Tree]:
    """The run as a loop carries it; (run, number of rounds) -> run, Metrics; what clients remember,
    as it was."""
    draws, own = run_sampling_key(run), run.client_states
    run = dataclasses.replace(
        run, client_states=sharding.pad_client_states(own, meshes.devices(plan.mesh))
    )

    def until_evaluation(run: Run, count: Array) -> tuple[Run, Metrics]:
        nothing = RoundStats(*(jnp.zeros(()) for _ in RoundStats._fields))

        def one(_: Array, carry: tuple[Run, RoundStats]) -> tuple[Run, RoundStats]:
            run, sums = carry
            run, seen = advance(run, plan, noise, draws)
            return run, pytrees.add(sums, seen)

        with jax.named_scope("rounds"):  # by which tools find this loop in a compiled program
            run, sums = jax.lax.fori_loop(0, count, one, (run, nothing))
        return run, _metrics(run, plan, sums)

    return run, until_evaluation, own


def _metrics(run: Run, plan: Plan, sums: RoundStats) -> Metrics:
    mesh, personal = meshes.devices(plan.mesh), plan.algorithm.personal
    seen = evaluate(
        plan.task,
        plan.algorithm.params(run.server),
        plan.fed,
        mesh,
        personal,
        run.server,
        ()
        if personal is None
        else jax.tree.map(lambda x: x[: plan.sampler.clients], run.client_states),
    )
    mean = lambda x: x / jnp.maximum(sums.rounds, 1)
    return Metrics(
        run.round,
        seen.loss,
        seen.accuracy,
        seen.client_accuracy,
        mean(sums.loss),
        mean(sums.clip_fraction),
        mean(sums.update_norm),
        mean(sums.cohort_size),
        run.mechanism if mech.adaptive(plan.release) else None,
        seen.client_percentiles,
        seen.custom,
    )


_measured = jax.jit(_metrics)


@functools.partial(jax.jit, donate_argnums=0)
def _scan(
    run: Run, plan: Plan, rounds: Array, evaluations: Array, words: Words
) -> tuple[Run, Metrics]:
    """`scan` of the first `evaluations` entries of `rounds`: metrics have a place for each entry,
    so that one program serves all numbers of rounds and of evaluations up to that many."""
    run, until_evaluation, own = _prepared(run, plan, derive_noise_key(run.key, words))
    # One trace gives the shapes and the body of the loop; the equations are those without a jit.
    until_evaluation = jax.jit(until_evaluation, inline=True)
    of_one = jax.eval_shape(until_evaluation, run, rounds[0])[1]
    found = jax.tree.map(lambda s: jnp.zeros((len(rounds), *s.shape), s.dtype), of_one)

    def one(i: Array, carry: tuple[Run, Metrics]) -> tuple[Run, Metrics]:
        run, found = carry
        run, seen = until_evaluation(run, rounds[i])
        return run, jax.tree.map(lambda all_, x: all_.at[i].set(x), found, seen)

    with jax.named_scope("evaluations"):  # as `rounds`
        run, found = jax.lax.fori_loop(0, evaluations, one, (run, found))
    return dataclasses.replace(
        run, client_states=sharding.unpad_client_states(run.client_states, own)
    ), found


def _places(evaluations: int) -> int:
    """Places for metrics in a program that serves so many evaluations, and others."""
    return max(MIN_METRIC_SLOTS, 2 ** int(np.ceil(np.log2(evaluations))))


def _scanned(run: Run, plan: Plan, counts: Any, words: Words, mesh: Any) -> tuple[Run, Metrics]:
    """`_scan` of `counts`, and the metrics of its evaluations alone."""
    rounds = np.zeros(_places(len(counts)), np.int32)
    rounds[: len(counts)] = counts
    many = np.int32(len(counts))
    spread = (meshes.replicate(v, mesh) for v in (rounds, many, words))
    run, metrics = _scan(run, plan, *spread)
    if meshes.spans_all_processes(mesh):
        return run, jax.tree.map(lambda x: x[: len(counts)], metrics)
    # on the host: a slice on the device would be a program for each number of evaluations
    return run, jax.tree.map(lambda x: pytrees.on_device(np.asarray(x)[: len(counts)]), metrics)


_noise_base = jax.jit(derive_noise_key)


def rounds_before_evaluations(rounds: int, every: int | None) -> np.ndarray:
    """Int[E]: rounds before each evaluation; the last may be fewer.  Default: about twenty
    evaluations."""
    checks.whole("simulate", rounds=rounds)
    if every is None:
        every = max(1, round_up(rounds / 20))
    checks.whole("simulate", evaluate_every=every)
    full, rest = divmod(int(rounds), int(every))
    if full > MAX_EVALUATIONS:
        checks.fail(
            "simulate",
            f"at most {MAX_EVALUATIONS} evaluations",
            f"rounds={rounds}, evaluate_every={every}",
            "Evaluate more rarely.",
        )
    return np.append(np.full(full, every, np.int32), np.full(int(rest > 0), rest, np.int32))


def tolerated_health(where: str, tolerate: Any) -> tuple[str, ...]:
    """The names of Health counts that may be above 0; who tolerates what is not finite tolerates
    such rows too."""
    given = checks.several(where, tolerate=tolerate)
    checks.choice(where, Health._fields, **{f"tolerate[{i}]": t for i, t in enumerate(given)})
    return given + (("nonfinite_rows",) if "nonfinite" in given else ())


def round_up(x: float) -> int:
    return int(np.ceil(x))


def simulate(
    key: jax.Array,
    plan: Plan,
    rounds: int,
    *,
    evaluate_every: int | None = None,
    start: Run | None = None,
    tolerate: Sequence[str] = (),
    mesh: Any = None,
    progress: bool = False,
    callbacks: Sequence[Callable[..., Any]] = (),
) -> Output:
    """Run `rounds` rounds of `plan` as one XLA program.

    Plans of one structure share one compiled program, whatever their numbers and however many
    rounds they run; the logger "jfl" says (at level INFO) when one is compiled.  Of a
    `jfl.population` each round is one program, while the next cohort's rows are fetched; what
    clients remember is then in numpy arrays.

    Args:
        key: jax.random.key(seed); everything is addressed from it, so evaluating more often,
            chunking or stopping and going on changes no draw.
        plan: a Plan.
        rounds: how many rounds are run.
        evaluate_every: rounds between evaluations; default about twenty evaluations.
        start: a state to go on from (`out.run`), under this plan or another with the same clients
            and state; `key` is then not used.
        tolerate: names of Health counts that may be above 0, such as ("empty_cohort",).
        mesh: devices that share each cohort: "auto", a number, or a mesh as
            jfl.engine.devices.devices makes; None: one.
        progress: whether a bar on standard error shows the round, the time that is left and the
            last metrics.
        callbacks: functions of a `callbacks.Moment`, called after each evaluation; one that returns
            True stops the run there.  See jfl.callbacks: early_stopping, checkpoint, log.  The
            draws are those of a run without them, and so is the compiled program.

    Returns:
        Output(run, metrics with leaves [evaluations], params).

    Privacy:
        a guarantee covers the rounds that ran.  Where a callback stops a run by what it sees, and
        it sees training rows, ask for the guarantee of all rounds that were planned.

    Raises:
        HealthError: if a value was not finite, a draw overflowed its capacity or a cohort was
            empty.
        ValueError: where `start` does not fit the plan, or a clip norm or noise falls below 1e-15
            in one of the rounds.
    """
    checks.kind("simulate", Plan, "jfl.plan", plan=plan)
    key, tolerate = checks.key("simulate", key), tolerated_health("simulate", tolerate)
    if start is not None:
        checks.kind("simulate", Run, "an earlier output", start=start)
    counts = rounds_before_evaluations(rounds, evaluate_every)
    float_floors.lasting("simulate", plan, rounds, 0 if start is None else int(start.round))
    mesh = meshes.devices(plan.mesh if mesh is None else mesh)
    words = identity.noise_identity(plan)
    with meshes.explain_lost_process():
        if meshes.spans_all_processes(
            mesh
        ):  # noise that differs from process to process would be no error
            begun = (
                (key, 0, 0)
                if start is None
                else (start.key, int(start.round), int(start.attempt), start.plan_history.tolist())
            )
            meshes.require_agreement(
                "simulate", f"{identity.plan_identity(plan).tolist()} {begun} {counts.tolist()}"
            )
    plan = sharding.place(dataclasses.replace(plan, mesh=mesh), mesh)
    key = meshes.replicate(key, mesh)
    with meshes.explain_lost_process():
        fresh = host_feed.init_population_run if plan.fed.host is not None else init_run_jit
        run = (
            fresh(key, plan, words, identity.initial_history(plan))
            if start is None
            else _resumable(start, plan)
        )
        run, words = _entered(run, words)
        with watching(plan, rounds, int(run.round), progress, callbacks, tolerate) as watch:
            if plan.fed.host is not None:
                run, metrics = _fed(run, plan, counts, words, watch)
            else:
                run = meshes.one_device(run) if mesh is None else sharding.place(run, mesh)
                run, metrics = _on_device(run, plan, counts, words, mesh, watch)
        if plan.fed.host is None and meshes.spans_all_processes(mesh):
            run = dataclasses.replace(run, client_states=sharding.gather_to_host(run.client_states))
        stop_if_unhealthy(run, tolerate)  # waits for the run
    params = plan.algorithm.params(run.server)
    if signs := signs_of_divergence(run.health, metrics, params):
        warnings.warn(f"simulate: the run diverged: {signs}", RuntimeWarning, stacklevel=2)
    return Output(run, metrics, params)


def signs_of_divergence(health: Health, metrics: Metrics, params: Tree) -> str:
    """Return what says that a run without a non-finite state has diverged, "" if nothing does.

    A loss can be nan while its gradients are finite, and parameters can be finite while their
    squares are not.  Neither stops a run.
    """
    if not checks.concrete((health, metrics, params)):  # inside of a user's jit
        return ""
    if int(health.nonfinite) or int(health.nonfinite_rows):  # it is reported already
        return ""
    signs = []
    losses = {"training": metrics.train_loss, "test": metrics.loss}
    for name, values in losses.items():
        if bad := np.isnan(np.asarray(values, np.float64)).sum():
            signs.append(
                f"the {name} loss is nan in {bad} of {np.size(values)} evaluations, while the "
                f"gradients are finite; check the loss for log(0) or 0 / 0"
            )
    largest = max(
        (float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(params) if x.size), default=0
    )
    if largest > LARGEST_PARAMETER:
        signs.append(
            f"parameters are as large as {largest:.1g}; lower the learning rate, or clip updates"
        )
    return "; ".join(signs)


def _entered(run: Run, words: Words) -> tuple[Run, Words]:
    """A concrete run that has entered its plan, and its noise_words: hashed here, where it costs no
    program."""
    names = ("round", "plan_identity", "plan_history", "attempt")
    there = enter_plan(
        dataclasses.replace(run, **{n: np.asarray(getattr(run, n)) for n in names}), words
    )
    identity_, history = (pytrees.on_device(x) for x in (there.plan_identity, there.plan_history))
    run = dataclasses.replace(
        run, plan_identity=identity_, plan_history=history, mechanism=there.mechanism
    )
    return run, noise_seed_words(there.plan_identity, there.plan_history, there.attempt)


def _on_device(
    run: Run,
    plan: Plan,
    counts: Any,
    words: Words,
    mesh: Any,
    watch: Callable[[Run, list[Metrics]], bool] | None,
) -> tuple[Run, Metrics]:
    """All rounds at once; or, where somebody watches, those up to the next evaluation."""
    if watch is None:
        return _scanned(run, plan, counts, words, mesh)
    found = []
    for count in counts:
        run, seen = _scanned(run, plan, [count], words, mesh)
        found.append(jax.tree.map(lambda x: x[0], seen))
        if watch(run, found):
            break
    return run, jax.tree.map(lambda *x: jnp.stack(x), *found)


def _fed(
    run: Run,
    plan: Plan,
    counts: np.ndarray,
    words: Words,
    watch: Callable[[Run, list[Metrics]], bool] | None,
) -> tuple[Run, Metrics]:
    """As `scan`, of a population."""
    found, states = [], run.client_states
    run = meshes.replicate(dataclasses.replace(run, client_states=()), plan.mesh)
    noise = _noise_base(run.key, meshes.replicate(words, plan.mesh))
    with host_feed.Feeder(run, states, plan, noise, int(counts.sum())) as feeder:
        for count in counts:
            sums = RoundStats(*(jnp.zeros(()) for _ in RoundStats._fields))
            for _ in range(count):
                run, sums = feeder.round(run, sums)
            found.append(_measured(run, plan, sums))
            if watch is not None and watch(run, found):
                break
    return dataclasses.replace(run, client_states=states), jax.tree.map(
        lambda *x: jnp.stack(x), *found
    )


def _resumable(run: Run, plan: Plan) -> Run:
    """A copy of `run` (the program consumes what it is given) that fits `plan`."""
    fresh = jax.eval_shape(init_run, run.key, plan, run.plan_identity, run.plan_history)
    held = correlated.begun_anew(run.mechanism, fresh.mechanism)
    run = dataclasses.replace(run, mechanism=held)
    if _kind(fresh) != _kind(run):
        unlike = [n for n in STATES if _kind(getattr(fresh, n)) != _kind(getattr(run, n))]
        name = unlike[0] if unlike else "server"
        need, got = (_shapes(getattr(r, name)) for r in (fresh, run))
        checks.fail(
            "simulate(start=...)",
            f"a state like this plan's, of {STATES[name]}: {need}",
            f"{got}",
            "Use the plan that made it, or one with the same algorithm, model and clients.",
        )
    if plan.fed.host is not None:
        return dataclasses.replace(
            jax.tree.map(jnp.copy, dataclasses.replace(run, client_states=())),
            client_states=host_feed.copy_states(run.client_states),
        )
    # what several processes remember comes in NumPy's arrays
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else jnp.copy(x), run)


STATES = dict(server="the server", client_states="the clients", mechanism="the release")


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)


def _kind(tree: Tree) -> tuple[Any, list[Any]]:
    """What of a state must be that of its plan."""
    return jax.tree.structure(tree), jax.tree.leaves(_shapes(tree))
