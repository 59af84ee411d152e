"""Gradients of a batch: the mean gradient, or a private sum of clipped per-example gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.records import Batch, Diagnostics, Fn, Mechanism, named, record, static
from ..models import losses
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import haar_bands
from ..privacy.mechanisms.stages import gamma_of, layer_bounds
from ..verify import marks
from . import ghost

GRAD_PATHS = ("auto", "bookkeeping", "vmap")
BOOKKEEPING_CLIPS = ("clip_l2", "clip_automatic", "clip_per_layer", "clip_ellipsoid")
DTYPES = ("float32", "bfloat16", "float16")
# On a CPU, book-keeping of large models is fastest in blocks of about this many activations, and of
# at least this many examples (docs/guides/model.md has the timings).
MAX_CPU_ACTIVATIONS = 2**22
MIN_CPU_BLOCK = 8
# If gradients are formed, a block has about this many numbers, so that they stay in the cache.
MAX_CPU_GRADIENTS = 2**16


@record
class Grad:
    """A function that computes the gradient of a batch for a local step.

    A call (key, params, batch, ctx), where ctx is the Context of the round, returns the gradient
    and the pair (mean loss, fraction of clipped rows).

    Attributes:
        loss: (params, x, y) -> scalar, of one example. For a loss that draws random numbers, x is a
            pair (see models.losses).
        mechanism: the chain that releases the gradient; None means the mean gradient, which is not
            private.
        l2: a factor; l2 * params is added to the released gradient. None adds nothing.
        microbatch: as in `private_grad`.
        path: as in `private_grad`.
    """

    loss: Fn
    mechanism: Mechanism | None
    l2: Any
    microbatch: int | None = static(default=None)
    path: str = static(default="auto")

    def __call__(self, key, params, batch: Batch, ctx):
        gradient, diagnostics = self.with_diagnostics(key, params, batch, ctx)
        return gradient, (diagnostics.loss, diagnostics.clipped)

    def with_diagnostics(self, key, params, batch: Batch, ctx) -> tuple:
        """Return the gradient and its Diagnostics.

        Args:
            key: the key of the noise, and of random numbers in the loss.
            params: a pytree of floats.
            batch: the rows of the step.
            ctx: the Context of the round.
        """
        compute = _mean_gradient if self.mechanism is None else _private_gradient
        gradient, diagnostics = compute(self, key, params, batch, ctx)
        if self.l2 is not None:
            gradient = pytrees.axpy(self.l2, params, gradient)
        return gradient, diagnostics.in_32_bits()

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the gradient by name, for printing."""
        return {} if self.l2 is None else {"l2": self.l2}


def _clip_stage(mechanism):
    """Return the clip of a chain if book-keeping can apply it, otherwise None."""
    rows = [s for s in mechanism.stages if s.role == "row"]
    if len(rows) != 1 or rows[0].name not in BOOKKEEPING_CLIPS:
        return None
    shape = rows[0].apply.data.get("shape")
    return None if shape and haar_bands.leaves_by_rows(shape.bands) is None else rows[0]


def _make_grad(where, loss, mechanism, l2, compute, **options) -> "Grad":
    """Check the arguments that `grad` and `private_grad` share, and return a Grad."""
    checks.require_one_of(where, DTYPES, compute=compute)
    if l2 is not None:
        checks.require_nonnegative(where, single=True, l2=l2)
        l2 = checks.as_scalar(l2)
    loss = loss if isinstance(loss, Fn) else Fn(loss)
    if losses.takes_key(loss):
        loss = losses.with_key_in_x(loss)
    if compute != "float32":
        loss = Fn(_loss_in_dtype, dict(loss=loss), dict(dtype=compute))
    return Grad(loss, mechanism, l2, **options)


@named("gradients.computed_in")
def _loss_in_dtype(params, x, y, *, loss, dtype):
    """Compute the loss of one example in another dtype.

    The conversions are part of the function, so gradients have the dtype of `params`.
    """
    cast = lambda v: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v
    return loss(jax.tree.map(cast, params), jax.tree.map(cast, x), y).astype(jnp.float32)


def computed_in(grad: Grad) -> str:
    """Return the dtype in which `grad` computes its loss."""
    return grad.loss.static["dtype"] if grad.loss.function is _loss_in_dtype else "float32"


def exact(loss: Fn) -> Fn:
    """Return the loss of a Grad, computed in float32 and, if it is random, with a fixed key."""
    return losses.without_key(loss.data["loss"] if loss.function is _loss_in_dtype else loss)


def grad(loss: Callable, *, l2: ArrayLike | None = None, compute: str = "float32") -> Grad:
    """Return a Grad that computes the mean gradient of `loss` over a batch, without privacy.

    Args:
        loss: any pure function (params, x, y) -> scalar of one example. Or (params, x, y, key),
            which may draw random numbers, as dropout does; each row of each step has a separate
            key.
        l2: a factor >= 0; l2 * params, the gradient of (l2 / 2) ||params||^2, is added. None adds
            nothing.
        compute: the dtype in which the loss is computed, as in `private_grad`.
    """
    return _make_grad("grad", loss, None, l2, compute)


def private_grad(
    loss: Callable,
    mechanism: Mechanism,
    *,
    l2: ArrayLike | None = None,
    microbatch: int | None = None,
    path: str = "auto",
    compute: str = "float32",
) -> Grad:
    """Return a Grad that releases per-example gradients of `loss` through `mechanism`.

    Args:
        loss: any pure function (params, x, y) -> scalar of one example, or (params, x, y, key), as
            in `grad`.
        mechanism: a chain over the examples of a batch, such as chain(clip_l2(1.0), total(),
            gaussian(1.1), divide(16)).
        l2: a factor >= 0; l2 * params is added after clipping and noise. It does not depend on
            examples, so it is not clipped. None adds nothing.
        microbatch: the number of examples that are processed at a time. None means the whole batch;
            on a CPU, fewer examples if their activations or gradients are large, which is faster
            there.
        path: how the clipped sum is computed. "bookkeeping" computes it from activations and
            backprops, at the cost of a plain gradient (but the gradients of a parameter that is
            transformed first, such as a standardised kernel, are formed); it requires a chain with
            one clip_l2, clip_automatic, clip_per_layer or wavelet.clip_ellipsoid (with
            jfl.bands.pixels or jfl.bands.plain), and parameters with a rule (see
            `jfl.gradients.ghost`). "vmap" forms the gradient of every example. "auto" uses
            book-keeping, except for parameters without a rule.
        compute: the dtype in which the loss and its gradient are computed: "float32", or "bfloat16"
            or "float16" for speed on an accelerator. Parameters, clip norms, sums and noise stay
            float32.

    Privacy:
        Each (round, client, step) has independent noise. Epsilon also depends on how batches and
        clients are drawn: see `jfl.guarantee`. A gradient that is not finite is replaced by zero
        and counted in Health.nonfinite_rows, which stops the run.

        Epsilon does not depend on `compute`, because gradients are clipped, summed and made noisy
        in float32. If parameters have half precision, the result is rounded to their dtype. Epsilon
        does not depend on random numbers in the loss either: they are independent of rows and
        noise, and clipping comes after them.

    Raises:
        ValueError: for an adaptive clip, because all clients of a round must have the same clip
            norm. With path="bookkeeping", also for another chain, or (when it runs) a parameter
            without a rule.

    References:
        Abadi et al., CCS 2016, Algorithm 1.
    """
    if not isinstance(mechanism, Mechanism):
        checks.fail(
            "private_grad",
            "a chain of stages",
            checks.short_repr(mechanism),
            "For no privacy use jfl.grad(loss).",
        )
    if mech.remembers(mechanism):
        checks.fail(
            "private_grad",
            "a fixed clip",
            checks.short_repr(mechanism),
            "Use clip_adaptive or clip_scaled in plan(release=...): all clients of a round must "
            "have the same clip norm.",
        )
    if microbatch is not None:
        checks.require_integer("private_grad", microbatch=microbatch)
    checks.require_one_of("private_grad", GRAD_PATHS, path=path)
    if path == "bookkeeping" and _clip_stage(mechanism) is None:
        checks.fail(
            "private_grad",
            "one row stage, clip_l2, clip_automatic or clip_per_layer (or clip_ellipsoid with "
            'bands.pixels or bands.plain), for path="bookkeeping"',
            " -> ".join(s.name for s in mechanism.stages),
            'Use path="auto" or "vmap".',
        )
    options = dict(microbatch=microbatch, path=path)
    return _make_grad("private_grad", loss, mechanism, l2, compute, **options)


def _add_keys(grad: Grad, key, batch):
    """Add the words of a key to each row of a batch if the loss draws random numbers."""
    if not losses.draws(grad.loss):
        return batch
    return batch._replace(x=losses.with_words(batch.x, key, len(batch.mask)))


def _mean_gradient(grad: Grad, key, params, batch, ctx):
    """Return the mean gradient of a batch, and Diagnostics."""
    batch = _add_keys(grad, key, batch)
    x, y = _example(batch)
    loss = ghost.with_fast_convolutions(grad.loss, params, x, y, examples=len(batch.mask))

    def mean_loss(w):
        each = jax.vmap(loss, (None, 0, 0))(w, batch.x, batch.y)
        return jnp.where(batch.mask, each, 0.0).sum() / jnp.maximum(batch.mask.sum(), 1)

    loss, gradient = jax.value_and_grad(mean_loss)(params)
    zero = jnp.zeros((), jnp.int32)
    return gradient, Diagnostics(loss, jnp.zeros(()), zero, zero, batch.mask.any())


def _example(batch):
    """Return the shapes of the x and y of one example."""
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), (batch.x, batch.y))


def _private_gradient(grad: Grad, key, params, batch, ctx):
    """Return the noisy gradient of a batch, and Diagnostics."""
    x, y = _example(batch)
    batch = marks.example(batch, grad.loss, params, losses.shapes_of_x(grad.loss, x), y)
    batch = _add_keys(grad, key, batch)
    weight = batch.mask.astype(jnp.float32)
    partial, loss = clipped_sum(grad, params, batch, weight)
    mechanism: Any = grad.mechanism
    value = marks.bounded(partial.value, mechanism, batch.mask, "examples")
    gradient, _ = mech.release_sum(
        mechanism, key, (), value, realised=ctx.size, client=ctx.client, dtypes=partial.dtypes
    )
    rows = jnp.maximum(partial.count, 1.0)
    zero = jnp.zeros((), jnp.int32)
    clipped, measured = partial.clipped / rows, batch.mask.any()
    return gradient, Diagnostics(loss / rows, clipped, zero, partial.nonfinite, measured)


def _book(grad: Grad, params, x, y):
    """Find the rules of a loss for book-keeping; return None if every gradient must be formed."""
    stage = _clip_stage(grad.mechanism)
    if grad.path == "vmap" or stage is None:
        return None
    count = len(jax.tree.leaves(params))
    if stage.apply.static.get("layers") not in (None, count):
        return None  # the stage itself reports what is wrong
    shape, by_rows = stage.apply.data.get("shape"), ()
    if shape:
        if shape.bands.shapes != tuple(w.shape for w in jax.tree.leaves(params)):
            return None  # likewise
        by_rows = haar_bands.leaves_by_rows(shape.bands)
    book = ghost.read(grad.loss, params, x, y, by_rows)
    if grad.path == "bookkeeping" and book.why_not:
        checks.fail(
            "private_grad",
            'a rule for every parameter, for path="bookkeeping"',
            "; ".join(f"{name}: {why}" for name, why in book.why_not.items()),
            'Use path="auto", which forms per-example gradients for these only.',
        )
    return book if book.rules else None


def gradient_path(plan) -> str:
    """Describe how a plan computes its private gradients, for the record of a run.

    Returns:
        "bookkeeping", with the names of parameters whose per-example gradients are formed because
        their layer has no rule; "vmap", if they are formed for all parameters; or "none" for a plan
        without private gradients.
    """
    private = lambda node: isinstance(node, Grad) and node.mechanism is not None
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (plan.fed.x, plan.fed.y))
    paths = []
    for grad in filter(private, jax.tree.leaves(plan.algorithm, is_leaf=private)):
        book = _book(grad, params, losses.shapes_of_x(grad.loss, x), y)
        dtype = computed_in(grad)
        path = "vmap" if book is None else "bookkeeping"
        if book is not None and book.why_not:
            path += f" (vmap for {', '.join(book.why_not)})"
        paths.append(path if dtype == "float32" else f"{path} in {dtype}")
    return " and ".join(dict.fromkeys(paths)) or "none"


def clipped_sum(grad: Grad, params, batch: Batch, weight):
    """Return the sum of the clipped gradients of a batch.

    Args:
        grad: the gradient, whose mechanism clips.
        params: the parameters.
        batch: the batch.
        weight: Float[B], a factor of each gradient; 0 leaves a row out.

    Returns:
        A PartialSum (see `jfl.privacy.mechanisms.chain`), and the sum of the losses of rows that
        are not left out.
    """
    example = _example(batch)
    book = _book(grad, params, *example)
    mechanism: Any = grad.mechanism

    def sum_block(rows: Batch, w):
        if book is None:
            loss = ghost.with_fast_convolutions(grad.loss, params, *example, examples=1)
            each, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, rows.x, rows.y)
            partial = mech.clip_and_sum(mechanism, (), grads, w, is_part=True)
        else:
            clip: Any = _clip_stage(mechanism)
            shape, *bounds = map(clip.apply.data.get, ("shape", "bound", "bounds"))
            together = clip.name != "clip_per_layer"
            if not together:
                layers, count = clip.apply.static["layers"], len(jax.tree.leaves(params))
                bounds = layer_bounds(bounds[1], layers, count)
            value, is_clipped, is_finite, each = ghost.clipped_sum(
                book,
                grad.loss,
                params,
                rows.x,
                rows.y,
                w,
                jax.tree.leaves(bounds),
                together=together,
                stretches=shape and haar_bands.stretches(shape.bands, shape.scales),
                gamma=gamma_of(clip.apply.data),
            )
            count = lambda x: x.sum().astype(jnp.float32)
            partial = mech.PartialSum(
                value,
                count(w != 0),
                count(is_clipped & is_finite & (w != 0)),
                count(w),
                (~is_finite & (w != 0)).sum(dtype=jnp.int32),
                pytrees.dtypes_of(params),
            )
        return partial, jnp.where(w != 0, each, 0.0).sum()

    size = weight.shape[0]
    block_size = grad.microbatch or _default_block_size(book, params, size)
    if block_size >= size:
        return sum_block(batch, weight)
    num_blocks = -(-size // block_size)
    pad = num_blocks * block_size - size
    cut = lambda x: jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)).reshape(
        (num_blocks, block_size) + x.shape[1:]
    )
    blocks = jax.tree.map(cut, (batch, weight))
    # With an inlined jit, a block is traced once for its shapes and for the body of the loop.
    sum_block = jax.jit(sum_block, inline=True)
    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(sum_block, *jax.tree.map(lambda x: x[0], blocks)),
    )
    add_block = lambda total, block: (pytrees.add(total, sum_block(*block)), None)
    return jax.lax.scan(add_block, zero, blocks)[0]


def _default_block_size(book: ghost.Book | None, params, size: int) -> int:
    """Return the number of examples of a block of a batch of `size`, if the user chose none."""
    if jax.default_backend() != "cpu":
        return size
    if book is None:
        block_size = max(1, MAX_CPU_GRADIENTS // max(1, pytrees.size(params)))
    else:
        block_size = max(MIN_CPU_BLOCK, MAX_CPU_ACTIVATIONS // ghost.num_activations(book))
    num_blocks = max(1, -(-size // block_size))
    return -(-size // num_blocks)  # blocks of almost equal size, so that little is padded
