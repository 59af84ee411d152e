"""The loop over rounds: many rounds and their evaluations as one compiled program.

simulate    runs this program, with checks, several devices and callbacks
scan        is the same loop as a pure function, for jit and vmap
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, identity, lazy, pytrees
from ..core.pytrees import Array, Key, Tree, Words
from ..core.random_streams import derive_noise_key, noise_seed_words
from ..core.records import Health, Metrics, Plan, Run, brief, safe_repr, size_text
from ..privacy import budget as budgets
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import correlated
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

# More evaluations in one run must be a mistake.
MAX_EVALUATIONS = 10**7
# The square of a larger parameter overflows in float32.
LARGEST_PARAMETER = 1e18
# A compiled program has room for at least so many evaluations.  The default is about twenty.
MIN_METRIC_SLOTS = 32
# What each part of a Run is called in messages, for the parts that must fit a plan.
STATE_DESCRIPTIONS = dict(
    server="a server state",
    client_states="client states",
    mechanism="a state of the release",
)


class Output(NamedTuple):
    """The result of a simulation.

    A guarantee covers `params`.  It does not cover `metrics`, which are for the experimenter.
    """

    run: Run  # the state after the last round
    metrics: Metrics  # leaves [evaluations]
    params: Any
    budget: budgets.Budget | None = None  # after the last round; None without stop_at
    frame = lazy.later("jfl.runs.tables.frame")

    @safe_repr
    def __repr__(self) -> str:
        rounds = brief(self.run.round)
        lines = [
            f"Output: {rounds} rounds",
            f"{self.run!r}",
            *f"{self.metrics!r}".split("\n"),
            f"params: {size_text(self.params)}",
            f"jfl.guarantee(plan, rounds={rounds}, delta=1e-5) gives epsilon"
            if self.budget is None
            else f"{self.budget!r}",
        ]
        return "\n  ".join(lines)


def scan(run: Run, plan: Plan, rounds: ArrayLike | Sequence[int]) -> tuple[Run, Metrics]:
    """Run rounds and evaluations.  This function is pure: use it under jit and vmap.

    Args:
        run: the result of `jfl.init` or of earlier rounds.
        plan: a Plan.
        rounds: Int[E], the number of rounds to run before each of E evaluations.  For example,
            [10, 10, 5] evaluates after rounds 10, 20 and 25.

    Returns:
        The run after all rounds, and metrics with leaves [E].
    """
    checks.require_type("scan", Run, "jfl.init", run=run)
    checks.require_type("scan", Plan, "jfl.plan", plan=plan)
    counts: Any = (
        checks.as_array("scan", "rounds", rounds) if checks.is_concrete(rounds) else rounds
    )
    if counts.ndim != 1 or not jnp.issubdtype(counts.dtype, jnp.integer):
        checks.fail(
            "scan",
            "rounds Int[E], the number before each evaluation",
            checks.short_repr(rounds),
            "For example, [10, 10, 5] evaluates after rounds 10, 20 and 25.",
        )
    run = enter_plan(run, identity.noise_identity(plan))
    return scan_from(run, plan, rounds, run_noise_key(run))


def scan_from(
    run: Run,
    plan: Plan,
    rounds: ArrayLike | Sequence[int],
    noise: Key,
    evaluations: Array | int | None = None,
) -> tuple[Run, Metrics]:
    """Run rounds and evaluations, as `scan` does, after `enter_plan` has prepared the run.

    Args:
        run: the state before the first round.
        plan: a Plan.
        rounds: as in `scan`.
        noise: `run_noise_key(run)`.
        evaluations: the number of evaluations to run, at most E; the metrics of the others are
            zero.  None runs all of them.

    Returns:
        The run after all rounds, and metrics with leaves [E].
    """
    sampling_key, states = run_sampling_key(run), run.client_states
    rounds = jnp.asarray(rounds, jnp.int32)

    def run_one(_: Array, carry: tuple[Run, RoundStats]) -> tuple[Run, RoundStats]:
        run, sums = carry
        run, stats = advance(run, plan, noise, sampling_key)
        return run, pytrees.add(sums, stats)

    # With an inlined jit, one trace gives both the shapes and the body of the loop.
    @functools.partial(jax.jit, inline=True)
    def until_evaluation(run: Run, count: Array) -> tuple[Run, Metrics]:
        # Tools find this loop in a compiled program by its name.
        with jax.named_scope("rounds"):
            run, sums = jax.lax.fori_loop(0, count, run_one, (run, RoundStats.zeros()))
        return run, _metrics(run, plan, sums)

    def evaluate_one(i: Array, carry: tuple[Run, Metrics]) -> tuple[Run, Metrics]:
        run, metrics = carry
        run, new_metrics = until_evaluation(run, rounds[i])
        return run, jax.tree.map(lambda old, new: old.at[i].set(new), metrics, new_metrics)

    padded_states = sharding.pad_rows(states, meshes.devices(plan.mesh))
    run = dataclasses.replace(run, client_states=padded_states)
    _, shapes = jax.eval_shape(until_evaluation, run, jnp.int32(0))
    metrics = jax.tree.map(lambda s: jnp.zeros((len(rounds), *s.shape), s.dtype), shapes)
    with jax.named_scope("evaluations"):
        evaluations = len(rounds) if evaluations is None else evaluations
        run, metrics = jax.lax.fori_loop(0, evaluations, evaluate_one, (run, metrics))
    states = sharding.unpad_rows(run.client_states, states)
    return dataclasses.replace(run, client_states=states), metrics


def _metrics(run: Run, plan: Plan, sums: RoundStats) -> Metrics:
    """Evaluate the model of a run, and average the round statistics since the last evaluation."""
    personal = None
    if plan.algorithm.personal is not None:
        client_states = jax.tree.map(lambda x: x[: plan.sampler.clients], run.client_states)
        personal = plan.algorithm.personal, run.server, client_states
    params, mesh = plan.algorithm.params(run.server), meshes.devices(plan.mesh)
    mean = lambda x: x / jnp.maximum(sums.rounds, 1)
    return Metrics(
        round=run.round,
        train_loss=sums.loss / jnp.maximum(sums.has_loss, 1),
        clip_fraction=sums.clip_fraction / jnp.maximum(sums.has_clips, 1),
        update_norm=mean(sums.update_norm),
        cohort=mean(sums.cohort_size),
        clip_norm=run.mechanism if mech.adaptive(plan.release) else None,
        **evaluate(plan.task, params, plan.fed, mesh, personal),
    )


_metrics_jit = jax.jit(_metrics)


@functools.partial(jax.jit, donate_argnums=0)
def _scan(
    run: Run, plan: Plan, rounds: Array, evaluations: Array, words: Words
) -> tuple[Run, Metrics]:
    """Do the same as `scan` for the first `evaluations` entries of `rounds`.

    One compiled program serves any number of rounds, and any number of evaluations up to the length
    of `rounds`.
    """
    return scan_from(run, plan, rounds, derive_noise_key(run.key, words), evaluations)


def _run_program(run: Run, plan: Plan, counts: Any, words: Words, mesh: Any) -> tuple[Run, Metrics]:
    """Call the compiled `_scan` with `counts` and return only the metrics of its evaluations."""
    # Rounding the number of slots up to a power of two lets runs of other lengths share a program.
    slots = max(MIN_METRIC_SLOTS, 2 ** int(np.ceil(np.log2(len(counts)))))
    rounds = np.zeros(slots, np.int32)
    rounds[: len(counts)] = counts
    arguments = meshes.replicate((rounds, np.int32(len(counts)), words), mesh)
    run, metrics = _scan(run, plan, *arguments)
    if not meshes.spans_all_processes(mesh):
        # Slice on the host: a slice on the device is compiled for each number of evaluations.
        metrics = jax.tree.map(lambda x: pytrees.on_device(np.asarray(x)[: len(counts)]), metrics)
        return run, metrics
    return run, jax.tree.map(lambda x: x[: len(counts)], metrics)


_noise_key_jit = jax.jit(derive_noise_key)


def rounds_before_evaluations(rounds: int, every: int | None) -> np.ndarray:
    """Return Int[E], the number of rounds to run before each of E evaluations, as in `scan`.

    Args:
        rounds: the number of rounds of the run.
        every: rounds between evaluations; None means about twenty evaluations.  If it does not
            divide `rounds`, fewer rounds precede the last evaluation.
    """
    checks.require_integer("simulate", rounds=rounds)
    if every is None:
        every = -(-int(rounds) // 20)
    checks.require_integer("simulate", evaluate_every=every)
    full, rest = divmod(int(rounds), int(every))
    if full > MAX_EVALUATIONS:
        checks.fail(
            "simulate",
            f"at most {MAX_EVALUATIONS} evaluations",
            f"rounds={rounds}, evaluate_every={every}",
            "Evaluate less often.",
        )
    return np.array([every] * full + [rest] * (rest > 0), np.int32)


def tolerated_health(where: str, tolerate: Any) -> tuple[str, ...]:
    """Check an argument `tolerate`, and return the names of the Health counts that may be positive.

    A run stops if another field of Health is positive.  Tolerating "nonfinite" includes tolerating
    "nonfinite_rows".

    Args:
        where: the name of the caller, for messages.
        tolerate: the name of a field of Health, or a sequence of such names.
    """
    given = checks.as_tuple(where, tolerate=tolerate)
    checks.require_one_of(
        where, Health._fields, **{f"tolerate[{i}]": t for i, t in enumerate(given)}
    )
    return given + (("nonfinite_rows",) if "nonfinite" in given else ())


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
    stop_at: budgets.Budget | tuple[float, float] | None = None,
) -> Output:
    """Run `rounds` rounds of `plan` as one XLA program.

    Plans that differ only in numbers share one compiled program, also with different `rounds`.  The
    logger "jfl" reports the seconds of tracing, compiling and running at level INFO, and warns once
    per process if the program is not ready after 10 s.  For a `jfl.population`, the program runs
    once per round, while the rows of the next cohort are fetched; client states are then NumPy
    arrays.

    Args:
        key: jax.random.key(seed).  Every draw is derived from this key, the round and the client.
            Evaluating more often, changing the chunk size, or stopping and resuming therefore
            changes no draw.
        plan: a Plan.
        rounds: the number of rounds to run.
        evaluate_every: rounds between evaluations; by default about twenty evaluations.
        start: a state to continue from, such as `out.run` of an earlier Output.  It may be from
            another plan with the same clients and shapes of states.  `key` is then not used.
        tolerate: names of Health counts that may be positive, such as ("empty_cohort",).
        mesh: devices that share each cohort: "auto", a number, or the result of
            `jfl.mesh.devices`; None means one device.
        progress: True shows a progress bar on standard error, with the present stage or the last
            metrics, and at the end the seconds of each stage.
        callbacks: functions of a `callbacks.Moment`, called after each evaluation; one that returns
            True stops the run.  See jfl.callbacks: early_stopping, checkpoint, log.  Draws and the
            compiled program are the same as without callbacks.
        stop_at: a privacy budget, (epsilon, delta) or the result of `jfl.budget`, of which
            (epsilon, delta) makes one.  The run ends before the first round that would exceed it.
            To continue the run, pass `out.budget` together with start=out.run.

    Returns:
        An Output: the run, metrics with leaves [evaluations], params, and with stop_at the budget
        after the run, whose `stopped` says why fewer than `rounds` rounds ran.

    Privacy:
        A guarantee covers the rounds that ran.  If a callback that sees training rows can stop the
        run early, ask for the guarantee of all planned rounds.  With stop_at, the result of
        out.budget.guarantee() also holds if `plan` and `rounds` depend on earlier releases.

    Raises:
        HealthError: If a value is not finite, a draw overflows its capacity or a cohort is empty.
        ValueError: If `start` does not fit the plan, or a clip norm or noise falls below 1e-15 in
            one of the rounds; or if `stop_at` admits no round.
    """
    checks.require_type("simulate", Plan, "jfl.plan", plan=plan)
    if not checks.is_concrete((key, plan, start)):
        checks.fail(
            "simulate",
            "concrete values",
            "traced ones",
            "Call it outside jit and vmap. Inside them, call jfl.init, jfl.run_round and jfl.scan; "
            "for many settings or seeds in one program, use jfl.sweep.",
        )
    key, tolerate = checks.as_key("simulate", key), tolerated_health("simulate", tolerate)
    if start is not None:
        checks.require_type("simulate", Run, "an earlier output", start=start)
    before, budget = 0 if start is None else int(start.round), None
    if stop_at is not None:
        budget, rounds = budgets.admitted("simulate", stop_at, plan, rounds, start)
    counts = rounds_before_evaluations(rounds, evaluate_every)
    mech.check_schedules("simulate", plan, rounds, before)
    mesh = meshes.devices(plan.mesh if mesh is None else mesh)
    words = identity.noise_identity(plan)
    with meshes.explain_lost_process():
        # Otherwise processes with different noise would go unnoticed.
        if meshes.spans_all_processes(mesh):
            initial = (
                (key, 0, 0)
                if start is None
                else (start.key, int(start.round), int(start.attempt), start.plan_history.tolist())
            )
            meshes.require_agreement(
                "simulate", f"{identity.plan_identity(plan).tolist()} {initial} {counts.tolist()}"
            )
        plan = sharding.place(dataclasses.replace(plan, mesh=mesh), mesh)
        key = meshes.replicate(key, mesh)
        with watching(plan, rounds, before, progress, callbacks, tolerate) as watch:
            if start is not None:
                run = _copy_start(start, plan)
            else:
                init = init_run_jit if plan.fed.host is None else host_feed.init_population_run
                run = init(key, plan, words, identity.initial_history(plan))
            run, words = _enter_plan_on_host(run, words)
            started = _starting_params(run, start, plan, mesh)
            if plan.fed.host is not None:
                run, metrics = _simulate_population(run, plan, counts, words, watch)
            else:
                run = meshes.one_device(run) if mesh is None else sharding.place(run, mesh)
                run, metrics = _simulate_on_device(run, plan, counts, words, mesh, watch)
            stop_if_unhealthy(run, tolerate)  # waits for the run
        if plan.fed.host is None and meshes.spans_all_processes(mesh):
            run = dataclasses.replace(run, client_states=sharding.gather_to_host(run.client_states))
    params = plan.algorithm.params(run.server)
    if signs := signs_of_divergence(run.health, metrics, params):
        warnings.warn(f"simulate: the run diverged: {signs}", RuntimeWarning, stacklevel=2)
    if (
        started
        and plan.algorithm.name != "band_energies"  # which only measures
        and np.any(norms := np.asarray(metrics.update_norm))
        and all(map(np.array_equal, started, jax.tree.leaves(params)))
    ):
        warnings.warn(
            f"simulate: no parameter changed in {int(run.round) - before} rounds, although updates "
            f"of norm {norms.max():.3g} were released; check the server step of "
            f"{plan.algorithm.name}, its optimizer and its learning rate",
            RuntimeWarning,
            stacklevel=2,
        )
    if budget is not None:
        spent = budget.spend(plan, int(run.round) - before)
        budget = dataclasses.replace(spent, history=budgets.history_of(run))
    return Output(run, metrics, params, budget)


def _starting_params(run: Run, start: Run | None, plan: Plan, mesh: Any) -> list[Any]:
    """Return the parameters before the first round; [] if they cannot be read here.

    The program donates those of a new run, so they are copied to the host.  Those of `start` are
    not donated.
    """
    if meshes.spans_all_processes(mesh):
        return []
    if start is not None:
        return jax.tree.leaves(plan.algorithm.params(start.server))
    return [np.array(leaf) for leaf in jax.tree.leaves(plan.algorithm.params(run.server))]


def signs_of_divergence(health: Health, metrics: Metrics, params: Tree) -> str:
    """Describe signs that a run diverged although its state is finite; return "" if there are none.

    A loss can be NaN while its gradients are finite, and parameters can be finite while their
    squares are not.  Neither case stops a run.
    """
    if int(health.nonfinite) or int(health.nonfinite_rows):  # already reported by Health
        return ""
    signs = []
    for name, values in (("training", metrics.train_loss), ("test", metrics.loss)):
        if bad := np.isnan(np.asarray(values, np.float64)).sum():
            signs.append(
                f"the {name} loss is nan in {bad} of {np.size(values)} evaluations, while the "
                f"gradients are finite; check the loss for log(0) or 0 / 0"
            )
    largest = max([float(np.max(np.abs(x), initial=0)) for x in jax.tree.leaves(params)])
    if largest > LARGEST_PARAMETER:
        signs.append(
            f"parameters are as large as {largest:.1g}; lower the learning rate, or clip updates"
        )
    return "; ".join(signs)


def _enter_plan_on_host(run: Run, words: Words) -> tuple[Run, Words]:
    """Bind a concrete run to its plan with NumPy, which needs no compiled program.

    Args:
        run: the run.
        words: UInt32[4], the noise identity of the plan.

    Returns:
        The run, and UInt32[4], from which `derive_noise_key` derives the key of its noise.
    """
    names = ("round", "plan_identity", "plan_history", "attempt")
    on_host = dataclasses.replace(run, **{n: np.asarray(getattr(run, n)) for n in names})
    on_host = enter_plan(on_host, words)
    bound = {n: pytrees.on_device(getattr(on_host, n)) for n in ("plan_identity", "plan_history")}
    run = dataclasses.replace(run, mechanism=on_host.mechanism, **bound)
    words = noise_seed_words(on_host.plan_identity, on_host.plan_history, on_host.attempt)
    return run, words


def _simulate_on_device(
    run: Run,
    plan: Plan,
    counts: Any,
    words: Words,
    mesh: Any,
    watch: Callable[[Run, list[Metrics]], bool] | None,
) -> tuple[Run, Metrics]:
    """Run all rounds in one call, or, if there are callbacks, one call per evaluation.

    Args:
        run: the state before the first round, which is donated.
        plan: the plan.
        counts: Int[E], the number of rounds before each evaluation.
        words: UInt32[4] of `_enter_plan_on_host`.
        mesh: the devices.
        watch: a function of the run and the metrics so far that returns whether to stop, or None.
    """
    if watch is None:
        return _run_program(run, plan, counts, words, mesh)
    history = []
    for count in counts:
        run, metrics = _run_program(run, plan, [count], words, mesh)
        history.append(jax.tree.map(lambda x: x[0], metrics))
        if watch(run, history):
            break
    return run, jax.tree.map(lambda *x: jnp.stack(x), *history)


def _simulate_population(
    run: Run,
    plan: Plan,
    counts: np.ndarray,
    words: Words,
    watch: Callable[[Run, list[Metrics]], bool] | None,
) -> tuple[Run, Metrics]:
    """Do the same as `_simulate_on_device` for a population, whose rows are on the host."""
    history, states = [], run.client_states
    run = meshes.replicate(dataclasses.replace(run, client_states=()), plan.mesh)
    noise = _noise_key_jit(run.key, meshes.replicate(words, plan.mesh))
    with host_feed.Feeder(run, states, plan, noise, int(counts.sum())) as feeder:
        for count in counts:
            sums = RoundStats.zeros()
            for _ in range(count):
                run, sums = feeder.round(run, sums)
            history.append(_metrics_jit(run, plan, sums))
            whole = dataclasses.replace(run, client_states=states)
            if watch is not None and watch(whole, history):
                break
    metrics = jax.tree.map(lambda *x: jnp.stack(x), *history)
    return dataclasses.replace(run, client_states=states), metrics


def _copy_start(run: Run, plan: Plan) -> Run:
    """Check that the state to continue from fits the plan, and copy it.

    The compiled program donates its arguments, so it must not get the caller's arrays.
    """
    fresh = jax.eval_shape(init_run, run.key, plan, run.plan_identity, run.plan_history)
    buffers = correlated.fit_buffers(run.mechanism, fresh.mechanism)
    run = dataclasses.replace(run, mechanism=buffers)
    shapes = lambda tree: jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", tree)
    for name, description in STATE_DESCRIPTIONS.items():
        expected, actual = (shapes(getattr(r, name)) for r in (fresh, run))
        if jax.tree.flatten(expected) != jax.tree.flatten(actual):
            checks.fail(
                "simulate(start=...)",
                f"{description} like this plan's: {expected}",
                f"{actual}",
                "Use the plan that made it, or one with the same algorithm, model and clients.",
            )
    if plan.fed.host is not None:
        return dataclasses.replace(
            jax.tree.map(jnp.copy, dataclasses.replace(run, client_states=())),
            client_states=host_feed.copy_states(run.client_states),
        )
    # States that came from several processes are NumPy arrays.
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else jnp.copy(x), run)
