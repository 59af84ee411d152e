"""Plans: the parts of one experiment, checked against each other and bound together."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks, identity, pytrees
from ..core.errors import ArgumentError
from ..core.pytrees import Array, Tree
from ..core.records import Algorithm, Federation, Fn, Mechanism, Plan, Sampler, Task, named
from ..gradients import per_example
from ..models import frameworks, losses
from ..models.targets import TARGETS
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import correlated, distributed, linear_maps
from ..privacy.mechanisms.chain import bind, chain
from ..privacy.mechanisms.stages import divide, total
from ..sampling import batches
from ..sampling import clients as sampling
from ..verify import check as verify
from .slots import CPU_CHUNKS_PER_COHORT

# Bytes for what a round computes at the same time.
MEMORY = 2**31


def plan(
    fed: Federation,
    task: Task,
    algorithm: Algorithm,
    sampler: Sampler,
    *,
    upload: Mechanism | None = None,
    release: Mechanism | None = None,
    weights: str | ArrayLike | Callable[..., Any] = "uniform",
    adjacency: str | None = None,
    chunk: int | None = None,
    memory: float = MEMORY,
    secure_aggregation: bool = False,
    paired_noise: bool = False,
) -> Plan:
    """Bind the parts of one experiment, after checking that they fit together.

    The result is what `jfl.simulate` runs and what `jfl.guarantee` accounts for.

    Args:
        fed: the rows and the clients that own them.
        task: the model and its loss.
        algorithm: what clients and the server compute.
        sampler: how the cohort of a round is drawn.
        upload: a chain that each client applies to its own upload, as to a sum of one, such as
            jfl.chain(clip_l2(1.0), total(), gaussian(1.1)).
        release: a chain that the server applies to the uploads of a cohort.  None means their mean
            over the expected cohort size, which is not private.
        weights: the weights of clients: "uniform"; "size", proportional to their rows; Float[C]; or
            a function of the round that returns Float[C].  They are scaled to mean 1 and divided by
            the probability with which a client is drawn, so that the release is an unbiased
            estimate of the weighted mean over all clients.  They apply after the row clip.
        adjacency: the adjacency of the release: "add_remove", "replace_one" or "zero_out".  None
            means the one that the sampler implies.
        chunk: the number of clients that a device computes at the same time.  None means as many as
            `memory` allows, and fewer if the cohort size is random, because chunks without a client
            do not run.  On an accelerator the default depends on the rate of a Poisson cohort, so
            plans with other rates are compiled separately unless `chunk` is given; points of a
            sweep share one.  A round can be differentiated forwards; backwards it must be a single
            chunk, chunk=sampler.capacity, and with client states it must run on one device.
        memory: bytes for what a round computes at the same time, if `chunk` is None.
        secure_aggregation: True assumes that the server sees only the sum of a cohort's uploads,
            and adds the view "aggregate" to the ledger.  Nothing is encrypted here.
        paired_noise: True gives points of a sweep with the same seed the same noise.  Releasing
            several of them together is then not private.

    Returns:
        A Plan.

    Raises:
        ValueError: If the parts do not fit together, with the reason and what to change.
    """
    config: Any = jax.config  # its type does not declare the options
    if not config.jax_threefry_partitionable:
        checks.fail(
            "plan",
            "jax_threefry_partitionable=True",
            "False",
            "Otherwise draws depend on the number of reserved slots, and two runs could share "
            "noise on different cohorts.",
        )
    _check_parts(fed, task, algorithm, sampler)
    _check_functions(fed, task, algorithm)
    identity.require_unmodified(fed)
    memory = checks.as_bytes("plan", memory)
    checks.require_one_of("plan", (False, True), paired_noise=paired_noise)
    checks.require_one_of("plan", (False, True), secure_aggregation=secure_aggregation)
    implied = sampling.adjacency(sampler)
    if adjacency is not None:
        checks.require_one_of("plan", mech.ADJACENCIES, adjacency=adjacency)
        if adjacency not in sampling.adjacencies(sampler):
            checks.fail(
                "plan",
                f"adjacency {' or '.join(map(repr, sampling.adjacencies(sampler)))} for "
                f"sampling.{sampler.scheme}",
                f"adjacency={adjacency!r}",
                "Leave it out, or change the sampler.",
            )
        implied = adjacency
    if release is None:
        release = chain(total(), divide(sampler.expected))
    for site, m in (("release", release), ("upload", upload)):
        if m is not None and not isinstance(m, Mechanism):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
            checks.fail("plan", f"{site} to be a chain of stages", f"{m!r}")
        if m is not None:
            _refuse_secret_divisor(m, site)
    release = bind(
        release,
        implied,
        "plan(release=...)",
        required=True,
        also=sampling.adjacencies(sampler) if adjacency is None else ("zero_out",),
    )
    if upload is not None and mech.remembers(upload):
        checks.fail(
            "plan",
            "a fixed clip in upload",
            f"{upload!r}",
            "A client does not keep state of earlier releases. Use clip_adaptive or clip_scaled in "
            "release.",
        )
    linear_maps.refuse_unpaired("plan", upload, release)
    for declared in algorithm.all_releases:
        linear_maps.refuse_unpaired("private_grad", declared.mechanism)
    # The server sees which clients upload, so noise can only hide the content of an upload.
    upload = bind(upload, "replace_one", "plan(upload=...)", required=True)
    algorithm = _bind_example_chains(algorithm)
    _check_declared_bounds(algorithm, sampler, upload, release)
    _check_declared_bound_is_alone(algorithm)
    _check_contraction(fed, task, algorithm)
    _check_levels(sampler.clients, release, upload, *(r.mechanism for r in algorithm.all_releases))
    result = Plan(
        fed,
        task,
        algorithm,
        sampler,
        upload,
        release,
        _weights(weights, fed, sampler),
        0,
        paired_noise,
        secure_aggregation=secure_aggregation,
    )
    private = [r.mechanism for r in algorithm.all_releases]
    correlated.check_plan("plan", upload, release, private, result.weights)
    distributed.check_plan("plan", upload, release, private, result.weights)
    each = client_bytes(result)
    # Only the first round is checked here, because the number of rounds is not known yet.
    mech.check_schedules("plan", result, 1)
    verify.require_no_held_rows("plan", result)
    if chunk is not None:
        checks.require_integer("plan", chunk=chunk)
        return dataclasses.replace(result, chunk=min(chunk, sampler.capacity))
    fits = int(max(1, memory // each))
    return dataclasses.replace(result, chunk=min(sampler.capacity, fits, _default_chunk(sampler)))


def _default_chunk(sampler: Sampler) -> int:
    """Return the number of slots of a chunk if memory does not limit it.

    Chunks without a client do not run.  A CPU is as fast with small chunks, which leave fewer slots
    of the last chunk empty.  On an accelerator each chunk launches as many kernels as a whole
    cohort, so nearly every cohort should fit into one chunk.
    """
    if sampling.fills_every_slot(sampler):
        return sampler.capacity
    if jax.default_backend() == "cpu":
        return -(-sampler.capacity // CPU_CHUNKS_PER_COHORT)
    if sampler.scheme in sampling.VARIABLE_SIZE_SCHEMES and checks.is_concrete(sampler.expected):
        mean = float(sampler.expected)
        deviation = (mean * (1 - min(1, mean / sampler.clients))) ** 0.5
        return int(np.ceil(mean + 2 * deviation))
    return sampler.capacity


def _check_declared_bound_is_alone(algorithm: Algorithm) -> None:
    """Refuse a declared bound next to other row stages of a client's chain."""
    for r in algorithm.all_releases:
        rows = [s for s in r.mechanism.stages if s.role == "row"] if r.mechanism else []
        if len(rows) > 1 and any(s.declared for s in rows):
            checks.fail(
                "plan",
                "the declared bound as the only row stage of a client's chain",
                [s.name for s in rows],
                "The declared bound applies to the raw update, not to anything computed from it.",
            )


def _check_contraction(fed: Federation, task: Task, algorithm: Algorithm) -> None:
    """Refuse plans in which local steps that are declared to contract visibly do not."""
    if not algorithm.contracts:
        return
    params = jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))
    if coarse := {str(p.dtype) for p in params if p.dtype not in (jnp.float32, jnp.float64)}:
        checks.fail(
            "plan",
            "parameters in float32 for steps that contract",
            ", ".join(sorted(coarse)),
            "Rounding a model after each step can increase the distance between two models.",
        )
    for r in algorithm.all_releases if checks.is_concrete(fed.size) else ():
        needed, sizes = r.steps * (r.batches.batch or 1), np.asarray(fed.size)
        few = np.flatnonzero((sizes > 0) & (sizes < needed))
        if few.size:
            checks.fail(
                "plan",
                f"at least {needed} rows in every client, for steps={r.steps} of "
                f"batch={r.batches.batch} that use a row at most once",
                f"{len(few)} clients with fewer, first client {few[0]} with {sizes[few[0]]}",
                "A row that two steps use changes the model twice. Use fewer steps or smaller "
                "batches.",
            )


def _check_parts(fed: Federation, task: Task, algorithm: Algorithm, sampler: Sampler) -> None:
    for value, kind, make in (
        (fed, Federation, "jfl.federate"),
        (task, Task, "jfl.models or jfl.task"),
        (algorithm, Algorithm, "jfl.algorithms"),
        (sampler, Sampler, "jfl.sampling"),
    ):
        if not isinstance(value, kind):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
            checks.fail("plan", f"a {kind.__name__} (from {make})", f"{type(value).__name__}")
    if fed.index.shape[0] != sampler.clients:
        checks.fail(
            "plan",
            "the same number of clients in fed and sampler",
            f"federation {fed.index.shape[0]}, sampler {sampler.clients}",
        )
    if algorithm.uploads == "model" and sampler.scheme != "full":
        checks.fail(
            "plan",
            f'sampling.full for {algorithm.name}(upload="model"), because the weights of a mean of '
            "models must add up to 1",
            f"sampling.{sampler.scheme}",
            'Use upload="difference".',
        )
    if sampler.independent and algorithm.stateful:
        checks.fail(
            "plan",
            "a sampler that runs a client at most once per round, because clients keep state",
            "with_replacement(independent=True)",
            "Use independent=False.",
        )
    for r in algorithm.all_releases:
        b = r.batches
        if (
            b.scheme == "without_replacement"
            and b.short == "error"
            and checks.is_concrete(fed.size)
        ):
            sizes = np.asarray(fed.size)
            if (sizes < b.batch).any():
                few = np.flatnonzero(sizes < b.batch)
                checks.fail(
                    "plan",
                    f"at least batch={b.batch} rows in every client",
                    f"{len(few)} clients with fewer, first client {few[0]} with {sizes[few[0]]}",
                    "Raise min_rows of the partition, reduce "
                    'batch, or use batches.without_replacement(batch, short="all").',
                )


def _check_functions(fed: Federation, task: Task, algorithm: Algorithm) -> None:
    """Reject losses, predictions and metrics that do not take one example; nothing is computed."""
    params = _initial(task)
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (fed.x, fed.y))
    is_grad = lambda node: isinstance(node, per_example.Grad)
    grads = [g for g in jax.tree.leaves(algorithm, is_leaf=is_grad) if is_grad(g)]
    scalars = {
        "the loss": losses.of_three(task.loss),
        "evaluation": task.evaluation,
        **{f"the loss of gradient {i}": per_example.exact(g.loss) for i, g in enumerate(grads)},
    }
    for name, loss in scalars.items():
        if loss is not None:
            _check_scalar(name, _traced(name, loss, params, x, y))
    for name, metric in (task.metrics or {}).items():
        _traced(f"metric {name!r}", metric.row, params, x, y)
    if task.predict is not None:
        _check_output(_traced("predict", task.predict, params, x), task.target, fed.classes, y)


def _traced(name: str, function: Callable[..., Any], params: Tree, x: Any, *y: Any) -> Any:
    """Return the shape of what a function of one example returns."""
    kinds = " and ".join(f"{v.dtype}{list(v.shape)}" for v in (x, *y))
    # The function is an argument because an nnx model changes the counters that it holds.
    call = lambda function, *given: function(*given)
    try:
        return jax.eval_shape(call, function, params, x, *y)
    except ArgumentError:
        raise
    except Exception as error:  # raised by the user's function
        context = f"{'x and y are' if y else 'x is'} {kinds}"
        frameworks.explain(name, error, context)
        if not isinstance(error, (TypeError, ValueError, IndexError, AssertionError)):
            raise
        raise ArgumentError(
            f"plan: expected {name} to take one example ({context}), but got "
            f"{checks.describe_error(error)}. The "
            f"model gets one example of shape {x.shape}, without a batch axis. Call a model that "
            "is written for batches with x[None] and take [0] of its output."
        ) from error


def _check_scalar(name: str, value: Any) -> None:
    if jax.tree.leaves(value) != [value] or value.shape != ():
        checks.fail(
            "plan",
            f"{name} to return one number for one example",
            ", ".join(f"{v.dtype}{list(v.shape)}" for v in jax.tree.leaves(value)) or "nothing",
            "Return its .mean() or .sum().",
        )


def _check_output(output: Any, target: str, classes: int, y: Any) -> None:
    """Reject an output from which no accuracy can be computed."""
    if TARGETS[target].hits is None or not classes:
        return
    wanted, got = TARGETS[target].shape(classes, tuple(y.shape)), getattr(output, "shape", None)
    # A model may have more logits than the data has classes.
    if got is None or got[:-1] != wanted[:-1] or len(got) != len(wanted) or got[-1] < wanted[-1]:
        checks.fail(
            "plan",
            f"predict to return {list(wanted)} for one example, for {TARGETS[target].words}",
            checks.short_repr(output) if got is None else str(list(got)),
            "Return one logit per class, without a batch axis, or declare the kind of y by "
            "jfl.task(..., target=...).",
        )


def _refuse_secret_divisor(mechanism: Mechanism, site: str) -> None:
    """Refuse a realised number as the divisor of a private sum, because it depends on the data."""
    divisors = {s.divisor for s in mechanism.stages}
    if "size" in divisors:
        checks.fail(
            "plan",
            f"a public divisor in {site}",
            'divide("size")',
            "Divide by the expected cohort size.",
        )
    if "weight" in divisors and (site == "upload" or mech.noisy(mechanism)):
        checks.fail(
            "plan",
            f"a public divisor in {site}",
            'divide("weight")',
            "Who participates is private. Divide a noisy sum by the expected cohort size.",
        )


def _check_declared_bounds(
    algorithm: Algorithm, sampler: Sampler, upload: Mechanism | None, release: Mechanism
) -> None:
    """Refuse declared bounds in places where nothing ensures that they hold."""
    declared = lambda m: [s.declared for s in m.stages] if m is not None else []
    if "upload" in declared(upload) or any(
        "upload" in declared(r.mechanism) for r in algorithm.all_releases
    ):
        checks.fail(
            "plan",
            'bounded(..., "upload") only in release',
            "it in a client's own chain",
            "Clip in the client's chain instead.",
        )
    for reason, holds, where, why in (
        (
            "prox_erm",
            algorithm.checks_its_solve,
            "padpfl(mechanism=...)",
            "The bound requires solves whose error is checked.",
        ),
        (
            "contraction",
            algorithm.contracts,
            "output_perturbation(smoothness=...)",
            "The bound requires the local steps of that algorithm.",
        ),
    ):
        if reason in declared(upload) + declared(release) or any(
            reason in declared(r.mechanism) and not (r.steps and holds)
            for r in algorithm.all_releases
        ):
            checks.fail(
                "plan", f'bounded(..., "{reason}") only in algorithms.{where}', "it elsewhere", why
            )
    if "upload" not in declared(release):
        return
    if upload is None or not mech.has_clip(upload):
        checks.fail(
            "plan", 'an upload with a clip for bounded(..., "upload")', f"upload={upload!r}"
        )
    if any(s.role == "post" and s.divisor != "number" for s in upload.stages):
        checks.fail(
            "plan",
            'an upload that only divides after its noise for bounded(..., "upload")',
            [s.name for s in upload.stages],
        )
    if mech.noisy(upload) and (sampler.scheme != "full" or release.adjacency == "add_remove"):
        # The variance of the sum would reveal who participates.
        checks.fail(
            "plan",
            'sampling.full and replace_one for noisy uploads with bounded(..., "upload")',
            f"sampling.{sampler.scheme}, {release.adjacency}",
            "Clip in release instead.",
        )
    if release.stages[0].declared != "upload" or release.stages[1].role != "sum":
        checks.fail(
            "plan",
            'bounded(..., "upload") as the only row stage of release',
            [s.name for s in release.stages],
        )
    fixed = not any(
        isinstance(v, Fn)
        for s in upload.stages
        if s.role == "row" and not s.is_map
        for v in s.bound.data.values()
    )
    if checks.is_concrete((upload, release)) and fixed:
        norm, declared_norm = mech.limit(upload), float(mech.bound(release))
        if norm > declared_norm * (1 + 1e-6):
            checks.fail(
                "plan",
                f"a bound in release of at least the upload's norm {norm:g}",
                f"{declared_norm:g}",
            )
    elif not fixed:
        checks.fail(
            "plan",
            'a fixed clip norm in upload for bounded(..., "upload")',
            "a function of the round",
        )


def _check_levels(clients: int, release: Mechanism, *own: Mechanism | None) -> None:
    """Refuse noise and clip norms with shapes that the engine cannot use."""
    for site, m in (("release", release), *(("a client's chain", m) for m in own if m is not None)):
        for s in m.stages:
            held = [
                (s.name, v)
                for f in (s.apply, s.bound)
                if f is not None
                for v in f.data.values()
                if isinstance(v, Fn)
            ]
            for name, shape in [(name, _shape(v, name)) for name, v in held]:
                if shape != ():
                    checks.fail(
                        "plan",
                        f"one number per round from the function in {name}",
                        f"shape {shape}",
                    )
            shape = _shape(s.noise, "gaussian") if isinstance(s.noise, Fn) else np.shape(s.noise)
            if m is release and shape != ():
                checks.fail(
                    "plan",
                    "one noise level in release",
                    f"shape {shape}",
                    "The sum has a single noise level.",
                )
            if shape not in ((), (clients,)):
                checks.fail(
                    "plan",
                    f"one noise level, or one per client for {clients} clients, in {site}",
                    f"shape {shape}",
                )


def _shape(function: Callable[..., Any], name: str) -> tuple[int, ...]:
    try:
        return jax.eval_shape(function, jax.ShapeDtypeStruct((), jnp.int32)).shape
    except (TypeError, AttributeError, jax.errors.JAXTypeError) as error:
        checks.fail(
            "plan",
            f"a traceable function of the round in {name}, such as jfl.schedules.exponential",
            f"{function!r}: {str(error).splitlines()[0]}",
            "Use jnp.where instead of if.",
        )


def _bind_example_chains(algorithm: Algorithm) -> Algorithm:
    """Bind the chains inside an algorithm to the adjacency that its batch sampler implies."""
    kinds = {
        "replace_one" if r.steps else batches.adjacency(r.batches)
        for r in algorithm.all_releases
        if r.mechanism is not None
    }
    if not kinds:
        return algorithm
    if len(kinds) > 1:
        checks.fail("plan", "batch samplers that imply one adjacency", f"{sorted(kinds)}")
    (kind,) = kinds
    free = all(r.batches.scheme == "full" and not r.steps for r in algorithm.all_releases)

    def bind_chain(node: Any) -> Any:
        if not isinstance(node, Mechanism):
            return node
        also = ("zero_out", "replace_one") if kind != "replace_one" else ("zero_out",)
        bound = bind(node, kind, "private_grad", required=not free, also=also)
        if any(s.divisor == "weight" for s in bound.stages):
            checks.fail(
                "plan",
                "a divisor for examples",
                'divide("weight")',
                'Use a number, or divide("size").',
            )
        if bound.adjacency == "add_remove" and any(s.divisor == "size" for s in bound.stages):
            checks.fail(
                "plan",
                "a public divisor under add_remove",
                'divide("size")',
                "Divide by the expected batch size.",
            )
        return bound

    return jax.tree.map(bind_chain, algorithm, is_leaf=lambda n: isinstance(n, Mechanism))


def _weights(
    weights: str | ArrayLike | Callable[..., Any], fed: Federation, sampler: Sampler
) -> Array | Fn:
    clients = sampler.clients
    even = np.full(clients, 1 / clients, np.float32)
    share = even if sampler.share is None else sampler.share
    if callable(weights):
        weights = weights if isinstance(weights, Fn) else Fn(weights)
        if _shape(weights, "weights") != (clients,):
            checks.fail(
                "plan",
                f"one weight per client ({clients}) from a function of the round",
                f"shape {_shape(weights, 'weights')}",
            )
        return Fn(_scaled, dict(of=weights, share=jnp.asarray(share)))
    if isinstance(weights, str):
        checks.require_one_of("plan", ("uniform", "size"), weights=weights)
        weights = fed.size if weights == "size" else np.ones(clients, np.float32)
    if checks.ndim("plan", "weights", weights) != 1 or np.shape(weights) != (clients,):
        checks.fail(
            "plan",
            f'weights "uniform", "size", one number per client ({clients}), or a function of the '
            "round",
            f"shape {np.shape(weights)}",
        )
    checks.require_nonnegative("plan", weights=weights)
    if checks.is_concrete(weights) and not np.asarray(weights).sum() > 0:
        checks.fail("plan", "weights with a positive sum", f"{weights!r}")
    if checks.is_concrete((weights, share)) and _sums_exactly(np.asarray(weights)):
        values = np.asarray(weights, np.float32)
        return pytrees.on_device(values / values.sum() / np.asarray(share))
    return _scaled(None, of=jnp.asarray(weights), share=jnp.asarray(share))


def _sums_exactly(weights: np.ndarray) -> bool:
    """Whether the weights are nonnegative integers whose float32 sum is exact in any order.

    Host and device then compute the same sum.
    """
    values = weights.astype(np.float64)
    return bool((values >= 0).all() and (values == np.floor(values)).all() and values.sum() < 2**24)


@named("plan.weights")
def _scaled(round_: Array | None, *, of: Any, share: Array) -> Array:
    """Return p / q, where p are the normalised weights and q the clients' shares of draws.

    Its mean is 1 for uniform q.
    """
    values = jnp.asarray(of(round_) if isinstance(of, Fn) else of, jnp.float32)
    # Noise is scaled to the largest weight. A negative weight becomes NaN, which Health reports.
    values = jnp.where(values >= 0, values, jnp.nan)
    return values / values.sum() / share


def _initial(task: Task) -> Tree:
    """Return the shapes of the parameters, and refuse parameters that cannot be trained."""
    try:
        return jax.eval_shape(
            lambda key: frameworks.parameters("task", task.init(key)), jax.random.key(0)
        )
    except Exception as error:  # raised by the user's function
        frameworks.explain("task", error)
        raise


def client_bytes(plan: Plan) -> float:
    """Estimate the bytes that one client of a round holds.

    They are for models, optimizer state and per-example gradients.
    """
    params = pytrees.size(_initial(plan.task))
    rows, slots = 0, plan.fed.index.shape[-1] if plan.fed.host is None else plan.fed.host.slots
    for r in plan.algorithm.releases:
        if r.mechanism is not None:
            rows = max(rows, 2 * (r.batches.batch or slots))
    return 4.0 * params * (8 + rows)
