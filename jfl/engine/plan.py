"""Plans, which combine the parts of an experiment after checking that they fit together."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr
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
from .sharding import CPU_CHUNKS_PER_COHORT

# Bytes that the clients of one chunk may take on a device, if `chunk` is None.
MAX_CHUNK_BYTES = 2**31


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
    secure_aggregation: bool = False,
    paired_noise: bool = False,
) -> Plan:
    """Combine the parts of an experiment into a Plan, after checking that they fit together.

    `jfl.simulate` runs a plan, and `jfl.guarantee` computes its epsilon.

    Args:
        fed: the rows and the clients that own them.
        task: the model and its loss.
        algorithm: what clients and the server compute.
        sampler: how the cohort of a round is drawn.
        upload: a chain that each client applies to its own upload before sending it, such as
            jfl.chain(clip_l2(1.0), total(), gaussian(1.1)).  Its stage total() has a single term.
        release: a chain that the server applies to the uploads of a cohort.  None means the sum of
            uploads divided by the expected cohort size, which is not private.
        weights: the weights of clients: "uniform"; "size", proportional to their rows; Float[C]; or
            a function of the round that returns Float[C].  Weights are scaled to mean 1.  If some
            clients are drawn more often than others, weights are divided by the frequency of a
            client, so that the release is an unbiased estimate of the weighted mean over all
            clients.  Weights multiply uploads after the release has clipped them.
        adjacency: the adjacency of a release with noise: "add_remove", "replace_one" or "zero_out".
            None means the adjacency that the sampler implies.  Chains of `upload` and
            `private_grad` state their own.
        chunk: the number of clients that a device runs at the same time.  None means as many as fit
            into about 2 GiB, and fewer if the cohort size is random, because chunks without a
            client do not run.  On an accelerator the default depends on the rate of a Poisson
            sampler, so plans with different rates are compiled separately unless `chunk` is given;
            points of a sweep use the largest chunk among them.  Reverse-mode differentiation of a
            round requires a single chunk (chunk=sampler.capacity), and one device if clients keep
            state; forward-mode differentiation always works.
        secure_aggregation: True assumes that the server sees only the sum of a cohort's uploads, so
            that `jfl.guarantee` accepts the view "aggregate".  Nothing is encrypted here.
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
    flags = dict(paired_noise=paired_noise, secure_aggregation=secure_aggregation)
    checks.require_one_of("plan", (False, True), **flags)
    if chunk is not None:
        checks.require_integer("plan", chunk=chunk)
    algorithm, upload, release = _bind_chains(algorithm, sampler, upload, release, adjacency)
    _check_declared_bounds(algorithm, sampler, upload, release)
    _check_contraction(fed, task, algorithm)
    private = [r.mechanism for r in algorithm.all_releases]
    _check_level_shapes(sampler.clients, release, upload, *private)
    weights = _client_weights(weights, fed, sampler)
    result = Plan(fed, task, algorithm, sampler, upload, release, weights, 0, **flags)
    correlated.check_plan("plan", upload, release, private, weights)
    distributed.check_plan("plan", upload, release, private, weights)
    # Only the first round is checked here, because the number of rounds is not known yet.
    mech.check_schedules("plan", result, 1)
    verify.require_no_held_rows("plan", result)
    if chunk is None:
        chunk = min(_default_chunk(sampler), max(1, int(MAX_CHUNK_BYTES // client_bytes(result))))
    return dataclasses.replace(result, chunk=min(chunk, sampler.capacity))


def _bind_chains(
    algorithm: Algorithm,
    sampler: Sampler,
    upload: Mechanism | None,
    release: Mechanism | None,
    adjacency: str | None,
) -> tuple[Algorithm, Mechanism | None, Mechanism]:
    """Bind each chain of a plan to an adjacency, and reject chains that cannot be used there."""
    accepted = sampling.adjacencies(sampler)
    if adjacency is not None:
        where = f"plan with sampling.{sampler.scheme}"
        checks.require_one_of(where, accepted, adjacency=adjacency)
        accepted = ("zero_out",)
        private = any(mech.noisy(r.mechanism) for r in algorithm.all_releases)
        if (private or mech.noisy(upload)) and not mech.noisy(release):
            checks.fail(
                "plan",
                "a release with noise when adjacency is given",
                f"adjacency={adjacency!r} and noise in {'private_grad' if private else 'upload'}",
                f"Pass it to the chain that adds noise: jfl.chain(..., adjacency={adjacency!r}).",
            )
    if release is None:
        release = chain(total(), divide(sampler.expected))
    for site, m in (("release", release), ("upload", upload)):
        if m is not None:
            checks.require_type("plan", Mechanism, "jfl.chain", **{site: m})
            _reject_private_divisor(m, site)
    implied = adjacency or sampling.adjacency(sampler)
    release = bind(release, implied, "plan(release=...)", required=True, also=accepted)
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
    if upload is not None:
        upload = bind(upload, "replace_one", "plan(upload=...)", required=True)
    return _bind_example_chains(algorithm), upload, release


def _default_chunk(sampler: Sampler) -> int:
    """Return the number of slots of a chunk if memory does not limit it.

    If the cohort size is random, small chunks leave fewer slots of the last chunk empty, and cost
    a CPU nothing.  On an accelerator each chunk launches as many kernels as a whole cohort, so
    nearly every cohort should fit into one chunk.
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


def _check_parts(fed: Federation, task: Task, algorithm: Algorithm, sampler: Sampler) -> None:
    """Reject parts of other types, and parts that cannot be combined."""
    checks.require_type("plan", Federation, "jfl.federate", fed=fed)
    checks.require_type("plan", Task, "jfl.models or jfl.task", task=task)
    checks.require_type("plan", Algorithm, "jfl.algorithms", algorithm=algorithm)
    checks.require_type("plan", Sampler, "jfl.sampling", sampler=sampler)
    if fed.index.shape[0] != sampler.clients:
        checks.fail(
            "plan",
            "the same number of clients in fed and sampler",
            f"federation {fed.index.shape[0]}, sampler {sampler.clients}",
        )
    if sampler.scheme.endswith("poisson") and sampler.rate is None:
        checks.fail(
            "plan",
            "rate=, the probability with which a client is drawn, in a Sampler with the scheme "
            f"{sampler.scheme!r}",
            "rate=None",
            "The accountant computes epsilon from it.",
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
    for b in (r.batches for r in algorithm.all_releases):
        if b.scheme.endswith("poisson") and b.rate is None and b.expected is None:
            checks.fail(
                "plan",
                "expected=, the mean number of rows of a batch, or rate= in Batches with the "
                f"scheme {b.scheme!r}",
                "neither",
                "The accountant computes epsilon from it.",
            )
        if b.scheme == "without_replacement" and b.short == "error":
            _require_rows(
                fed.size,
                b.batch,
                f"batch={b.batch}",
                "Raise min_rows of the partition, reduce batch (--batch), use all rows in each "
                "step by batches.full() (--batch-sampler full), or let clients with fewer rows use "
                'all of them by batches.without_replacement(batch, short="all").',
            )


def _require_rows(size: Array, needed: int, use: str, hint: str) -> None:
    """Reject clients that own fewer rows than a round uses.

    Args:
        size: Int[C], the rows of each client.
        needed: the rows that a round uses.
        use: what the rows are needed for, in the message.
        hint: how to provide enough rows.
    """
    if checks.is_concrete(size) and (few := np.flatnonzero(np.asarray(size) < needed)).size:
        checks.fail(
            "plan",
            f"at least {needed} rows in every client, for {use}",
            f"{few.size} clients with fewer, first client {few[0]} with {int(size[few[0]])}",
            hint,
        )


def _check_functions(fed: Federation, task: Task, algorithm: Algorithm) -> None:
    """Trace losses, predictions and metrics, and reject those that do not take one example."""
    params = _parameter_shapes(task)
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (fed.x, fed.y))
    is_grad = lambda node: isinstance(node, per_example.Grad)
    grads = [g for g in jax.tree.leaves(algorithm, is_leaf=is_grad) if is_grad(g)]
    scalars = {
        "the loss": losses.without_key(task.loss),
        "evaluation": task.evaluation,
        **{f"the loss of gradient {i}": per_example.exact(g.loss) for i, g in enumerate(grads)},
    }
    for name, loss in scalars.items():
        value = np.zeros(()) if loss is None else _output_shape(name, loss, params, x, y)
        if jax.tree.leaves(value) != [value] or value.shape != ():
            shapes = [f"{v.dtype}{list(v.shape)}" for v in jax.tree.leaves(value)]
            checks.fail(
                "plan",
                f"{name} to return one number for one example",
                ", ".join(shapes) or "nothing",
                "Return its .mean() or .sum().",
            )
    for name, metric in (task.metrics or {}).items():
        _output_shape(f"metric {name!r}", metric.row, params, x, y)
    _check_server_state(algorithm, params)
    if task.predict is not None:
        output = _output_shape("predict", task.predict, params, x)
        _check_predictions(output, task.target, fed.classes, y)
    losses_of_gradients = [losses.without_key(per_example.exact(g.loss)) for g in grads]
    _check_reach(losses_of_gradients, task.predict, params, x, y)


def _check_reach(trained: list[Any], predict: Any, params: Tree, x: Any, y: Any) -> None:
    """Check that gradients reach the parameters, and that predictions use the trained ones.

    Otherwise a run reports an epsilon and perhaps a falling loss, but its model does not learn.
    The check sees which parameters a traced program reads, and not which values it computes.

    Args:
        trained: the losses whose gradients an algorithm computes; nothing is checked if it has
            none.
        predict: the predictions of the task, or None.
        params, x, y: the shapes of the parameters and of one example.
    """
    if not trained:
        return
    paths = list(pytrees.by_path(params))
    # A gradient is structurally zero if the derivative does not read the tangent of a parameter.
    derivative = lambda tangents, loss, params, x, y: jax.jvp(
        lambda params: loss(params, x, y), (params,), (tangents,)
    )[1]
    read = [_leaves_read(derivative, params, loss, params, x, y) for loss in trained]
    moved = [path for path, *hits in zip(paths, *read) if any(hits)]
    _require_use(
        "the gradient of the loss",
        paths,
        moved,
        "A loss must use the params that it is given, without stop_gradient or rounding. Choose "
        "what to train with jfl.models.trainable.",
    )
    if predict is not None:
        call = lambda params, predict, x: predict(params, x)
        used = _leaves_read(call, params, predict, x)
        used = [path for path, hit in zip(paths, used) if hit]
        hint = "predict must use the params that it is given, because those are trained."
        _require_use("predict", moved, used, hint)


def _require_use(what: str, paths: list[str], used: list[str], hint: str) -> None:
    """Reject a function that uses none of `paths`, and warn of one that uses only some of them."""
    if unused := [path for path in paths if path not in used]:
        names = f"{', '.join(unused[:6])}{', ...' * (len(unused) > 6)}"
        if len(unused) == len(paths):
            checks.fail("plan", f"{what} to depend on the parameters", f"no use of {names}", hint)
        warnings.warn(f"plan: {what} does not depend on {names}. {hint}", stacklevel=5)


def _leaves_read(function: Callable[..., Any], first: Tree, *rest: Any) -> list[bool]:
    """Return for each leaf of the first argument whether the outputs depend on it."""
    traced = jax.make_jaxpr(function)(first, *rest).jaxpr
    _, used = dce_jaxpr(traced, [True] * len(traced.outvars))
    return used[: len(jax.tree.leaves(first))]


def _check_server_state(algorithm: Algorithm, params: Tree) -> None:
    """Reject an algorithm whose server state does not hold the parameters of the task."""
    describe = lambda tree: (
        jax.tree.structure(tree),
        [leaf.shape for leaf in jax.tree.leaves(tree)],
    )
    found = jax.eval_shape(lambda p: algorithm.params(algorithm.init(p)[0]), params)
    if describe(found) != describe(params):
        checks.fail(
            "plan",
            f"the server state of {algorithm.name} to hold the parameters of the task as its field "
            "params",
            checks.short_repr(found),
            "Return a NamedTuple with the field params from init, or give "
            "jfl.algorithm(..., params=), a function of the server state that returns them.",
        )


def _output_shape(name: str, function: Callable[..., Any], params: Tree, x: Any, *y: Any) -> Any:
    """Return the shapes of what a function of one example returns; explain why it fails."""
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


def _check_predictions(output: Any, target: str, classes: int, y: Any) -> None:
    """Reject predictions and labels from which no accuracy can be computed."""
    if target == "class" and not jnp.issubdtype(y.dtype, jnp.integer):
        checks.fail(
            "plan",
            "integer labels y for a task of class labels",
            str(y.dtype),
            'For numbers, write jfl.task(..., target="numbers"); for vectors of zeros and ones, '
            'target="labels".',
        )
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


def _reject_private_divisor(mechanism: Mechanism, site: str) -> None:
    """Reject a private sum that is divided by a number that depends on the data."""
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
    """Reject declared bounds in places where nothing ensures that they hold."""
    declared = lambda m: [s.declared for s in m.stages] if m is not None else []
    of_clients = [r for r in algorithm.all_releases if any(declared(r.mechanism))]
    for r in of_clients:
        rows: Any = [s.name for s in r.mechanism.stages if s.role == "row"]  # pyright: ignore[reportOptionalMemberAccess]
        if len(rows) > 1:
            checks.fail(
                "plan",
                "the declared bound as the only row stage of a client's chain",
                rows,
                "The declared bound applies to the raw update, not to anything computed from it.",
            )
    if "upload" in declared(upload) or any("upload" in declared(r.mechanism) for r in of_clients):
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
            reason in declared(r.mechanism) and not (r.steps and holds) for r in of_clients
        ):
            expected = f'bounded(..., "{reason}") only in algorithms.{where}'
            checks.fail("plan", expected, "it elsewhere", why)
    if "upload" in declared(release):
        _check_declared_uploads(sampler, upload, release)


def _check_declared_uploads(sampler: Sampler, upload: Mechanism | None, release: Mechanism) -> None:
    """Reject a release that relies on bounded uploads if the uploads may be larger."""
    what = 'bounded(..., "upload")'
    if upload is None or not mech.has_clip(upload):
        checks.fail("plan", f"an upload with a clip for {what}", f"upload={upload!r}")
    if any(s.role == "post" and s.divisor != "number" for s in upload.stages):
        checks.fail(
            "plan",
            f"an upload that only divides after its noise for {what}",
            [s.name for s in upload.stages],
        )
    if mech.noisy(upload) and (sampler.scheme != "full" or release.adjacency == "add_remove"):
        # The variance of the sum would reveal who participates.
        checks.fail(
            "plan",
            f"sampling.full and replace_one for noisy uploads with {what}",
            f"sampling.{sampler.scheme}, {release.adjacency}",
            "Clip in release instead.",
        )
    if release.stages[0].declared != "upload" or release.stages[1].role != "sum":
        checks.fail(
            "plan", f"{what} as the only row stage of release", [s.name for s in release.stages]
        )
    clips = [s.bound for s in upload.stages if s.role == "row" and not s.is_map]
    if any(isinstance(v, Fn) for bound in clips for v in bound.data.values()):
        checks.fail("plan", f"a fixed clip norm in upload for {what}", "a function of the round")
    if checks.is_concrete((upload, release)):
        norm, declared_norm = mech.limit(upload), float(mech.bound(release))
        if norm > declared_norm * (1 + 1e-6):
            checks.fail(
                "plan",
                f"a bound in release of at least the upload's norm {norm:g}",
                f"{declared_norm:g}",
            )


def _check_contraction(fed: Federation, task: Task, algorithm: Algorithm) -> None:
    """Reject a plan whose local steps are declared to contract but cannot."""
    if not algorithm.contracts:
        return
    dtypes = {str(p.dtype) for p in jax.tree.leaves(_parameter_shapes(task))}
    if coarse := dtypes - {"float32", "float64"}:
        checks.fail(
            "plan",
            "parameters in float32 for steps that contract",
            ", ".join(sorted(coarse)),
            "Rounding a model after each step can increase the distance between two models.",
        )
    for r in algorithm.all_releases:
        needed = r.steps * (r.batches.batch or 1)
        _require_rows(
            jnp.where(fed.size > 0, fed.size, needed),  # a client without rows takes no step
            needed,
            f"steps={r.steps} of batch={r.batches.batch} that use a row at most once",
            "A row that two steps use changes the model twice. Use fewer steps or smaller batches.",
        )


def _check_level_shapes(clients: int, release: Mechanism, *client_chains: Mechanism | None) -> None:
    """Reject noise levels and clip norms with shapes that the engine cannot use."""
    for m in (release, *(m for m in client_chains if m is not None)):
        for s in m.stages:
            for function in (
                v for f in (s.apply, s.bound) if f is not None for v in f.data.values()
            ):
                if isinstance(function, Fn) and (shape := _schedule_shape(function, s.name)) != ():
                    expected = f"one number per round from the function in {s.name}"
                    checks.fail("plan", expected, f"shape {shape}")
            is_schedule = isinstance(s.noise, Fn)
            shape = _schedule_shape(s.noise, "gaussian") if is_schedule else np.shape(s.noise)
            if shape != () and (m is release or shape != (clients,)):
                of_clients = f"one noise level, or one per client for {clients} clients"
                checks.fail(
                    "plan",
                    "one noise level in release" if m is release else of_clients,
                    f"shape {shape}",
                )


def _schedule_shape(function: Callable[..., Any], name: str) -> tuple[int, ...]:
    """Return the shape of what a function of the round returns."""
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
    releases = [r for r in algorithm.all_releases if r.mechanism is not None]
    implied = {"replace_one" if r.steps else batches.adjacency(r.batches) for r in releases}
    if not implied:
        return algorithm
    if len(implied) > 1:
        checks.fail("plan", "batch samplers that imply one adjacency", f"{sorted(implied)}")
    (adjacency,) = implied
    # Full batches suit every adjacency, so the user may choose.
    is_free = all(r.batches.scheme == "full" and not r.steps for r in algorithm.all_releases)
    accepted = ("zero_out", "replace_one") if adjacency != "replace_one" else ("zero_out",)

    def bind_chain(node: Any) -> Any:
        if not isinstance(node, Mechanism):
            return node
        bound = bind(node, adjacency, "private_grad", required=not is_free, also=accepted)
        divisors = {s.divisor for s in bound.stages}
        if "weight" in divisors:
            hint = 'Use a number, or divide("size").'
            checks.fail("plan", "a divisor for examples", 'divide("weight")', hint)
        if bound.adjacency == "add_remove" and "size" in divisors:
            hint = "Divide by the expected batch size."
            checks.fail("plan", "a public divisor under add_remove", 'divide("size")', hint)
        return bound

    return jax.tree.map(bind_chain, algorithm, is_leaf=lambda n: isinstance(n, Mechanism))


def _client_weights(
    weights: str | ArrayLike | Callable[..., Any], fed: Federation, sampler: Sampler
) -> Array | Fn:
    """Return the weights that `plan` describes: Float[C], or a function of the round."""
    clients = sampler.clients
    share = np.full(clients, 1 / clients, np.float32) if sampler.share is None else sampler.share
    if callable(weights):
        weights = weights if isinstance(weights, Fn) else Fn(weights)
        if (shape := _schedule_shape(weights, "weights")) != (clients,):
            expected = f"one weight per client ({clients}) from a function of the round"
            checks.fail("plan", expected, f"shape {shape}")
        return Fn(_scaled, dict(of=weights, share=jnp.asarray(share)))
    if isinstance(weights, str):
        checks.require_one_of("plan", ("uniform", "size"), weights=weights)
        weights = fed.size if weights == "size" else np.ones(clients, np.float32)
    checks.ndim("plan", "weights", weights)  # refuses what is not an array
    if np.shape(weights) != (clients,):
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
    """Return of / sum(of) / share, Float[C].

    Its mean is 1 if all clients are drawn equally often.

    Args:
        round_: Int[], the round; None if `of` is not a function.
        of: Float[C], the weights, or a function of the round that returns them.
        share: Float[C], the fraction of draws that each client gets; the sum is 1.
    """
    values = jnp.asarray(of(round_) if isinstance(of, Fn) else of, jnp.float32)
    # Noise is scaled to the largest weight. A negative weight becomes NaN, which Health reports.
    values = jnp.where(values >= 0, values, jnp.nan)
    return values / values.sum() / share


def _parameter_shapes(task: Task) -> Tree:
    """Return the shapes of the parameters; reject parameters that cannot be trained."""
    try:
        return jax.eval_shape(
            lambda key: frameworks.parameters("task", task.init(key)), jax.random.key(0)
        )
    except Exception as error:  # raised by the user's function
        frameworks.explain("task", error)
        raise


def client_bytes(plan: Plan) -> float:
    """Estimate the memory in bytes that one client takes on a device during a round.

    The estimate counts the copies of the model, the optimizer's state and per-example gradients.
    """
    slots = plan.fed.index.shape[-1] if plan.fed.host is None else plan.fed.host.slots
    private = [r.batches for r in plan.algorithm.releases if r.mechanism is not None]
    rows = max([2 * (b.batch or slots) for b in private], default=0)
    return 4.0 * pytrees.size(_parameter_shapes(plan.task)) * (8 + rows)
