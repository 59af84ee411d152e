"""Gradients of a batch, private or not.

This is the only module in which per-example gradients are formed, or avoided.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks, pytrees
from ..core.records import Batch, Diagnostics, Fn, Mechanism, named, record, static
from ..models import losses
from ..privacy.mechanisms import chain as mech
from ..verify import marks
from . import ghost

GRAD_PATHS = ("auto", "bookkeeping", "vmap")
DTYPES = ("float32", "bfloat16", "float16")


@record
class Grad:
    """A gradient: (key, params, batch, ctx) -> gradient, (loss, clipped fraction)."""

    loss: (
        Fn  # (params, x, y) -> scalar, one example; a random loss takes a pair as x: models.losses
    )
    mechanism: Mechanism | None  # None: the mean gradient, not private
    l2: Any  # added after the mechanism: l2 * params
    microbatch: int | None = static(default=None)
    path: str = static(default="auto")

    def __call__(self, key, params, batch: Batch, ctx):
        g, seen = self.watched(key, params, batch, ctx)
        return g, (seen.loss, seen.clipped)

    def watched(self, key, params, batch: Batch, ctx) -> tuple:
        """Return the gradient and Diagnostics, which count the rows that were not finite and
        counted as zero.
        """
        g, seen = (_mean if self.mechanism is None else _private)(self, key, params, batch, ctx)
        return (g if self.l2 is None else pytrees.axpy(self.l2, params, g)), seen

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the gradient by name, as they print."""
        return {} if self.l2 is None else {"l2": self.l2}


def _clip(mechanism):
    """Return the row stage that book-keeping can apply, or None if there is none."""
    rows = [s for s in mechanism.stages if s.role == "row"]
    return rows[0] if len(rows) == 1 and rows[0].name in ("clip_l2", "clip_per_layer") else None


def _make(where, loss, mechanism, l2, compute, **options) -> "Grad":
    checks.require_one_of(where, DTYPES, compute=compute)
    if l2 is not None:
        checks.require_nonnegative(where, single=True, l2=l2)
        l2 = checks.as_scalar(l2)
    loss = loss if isinstance(loss, Fn) else Fn(loss)
    if losses.takes_key(loss):
        loss = losses.joined(loss)
    if compute != "float32":
        loss = Fn(_coarse, dict(loss=loss), dict(dtype=compute))
    return Grad(loss, mechanism, l2, **options)


@named("gradients.computed_in")
def _coarse(params, x, y, *, loss, dtype):
    """Compute the loss of one example in another type.

    Casts are inside, so derivatives by `params` have the type of `params`.
    """
    cast = lambda v: v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v
    return loss(jax.tree.map(cast, params), jax.tree.map(cast, x), y).astype(jnp.float32)


def computed_in(grad: Grad) -> str:
    """Return the type in which the loss of a gradient is computed."""
    return grad.loss.static["dtype"] if grad.loss.function is _coarse else "float32"


def exact(loss: Fn) -> Fn:
    """Return the loss in float32, whatever type the steps use, and with a fixed key if it draws."""
    return losses.of_three(loss.data["loss"] if loss.function is _coarse else loss)


def grad(loss: Callable, *, l2: ArrayLike | None = None, compute: str = "float32") -> Grad:
    """Return the mean gradient of `loss` over the rows of a batch, without privacy.

    Args:
        loss: any pure function (params, x, y) -> scalar of one example, or (params, x, y, key),
            which may draw random numbers, as dropout does: each row of each step has a separate
            key.
        l2: adds l2 * params, the gradient of (l2 / 2) ||params||^2.
        compute: the type in which the loss is computed, as in `private_grad`.
    """
    return _make("grad", loss, None, l2, compute)


def private_grad(
    loss: Callable,
    mechanism: Mechanism,
    *,
    l2: ArrayLike | None = None,
    microbatch: int | None = None,
    path: str = "auto",
    compute: str = "float32",
) -> Grad:
    """Return the release of per-example gradients of `loss` by `mechanism`.

    Args:
        loss: any pure function (params, x, y) -> scalar of one example, or (params, x, y, key), as
            in `grad`.
        mechanism: a chain over the examples of a batch, such as chain(clip_l2(1.0), total(),
            gaussian(1.1), divide(16)).
        l2: adds l2 * params after clipping and noise. It does not depend on examples, so it is not
            clipped.
        microbatch: number of examples whose gradients are held at once. None means the batch.
        path: "bookkeeping" computes the clipped sum from activations and backprops, at the cost of
            a plain gradient, for a chain with one clip_l2 or clip_per_layer and parameters with a
            rule (see `jfl.gradients.ghost`). "vmap" forms the gradient of every example. "auto"
            forms only those of parameters without a rule.
        compute: the type in which the loss is computed forward and backward, "bfloat16" or
            "float16" for speed on an accelerator. Parameters, clip norms, sums and noise stay
            float32.

    Privacy:
        Clip norms are measured in float32 on the gradient that is added, so a less precise
        `compute` changes the gradient but not its bound, and epsilon stays the same. Gradients of
        parameters in half precision are clipped, summed and made noisy in float32; the result is
        rounded to their type. Random numbers in the loss are independent of rows and noise, and
        clipping comes after them, so epsilon stays the same. A row whose gradient is not finite
        counts as zero; Health.nonfinite_rows counts it and stops the run. Each (round, client,
        step) has independent noise. What epsilon a plan has also depends on how batches and clients
        are drawn: see `jfl.guarantee`.

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
            f"{mechanism!r}",
            "For no privacy use jfl.grad(loss).",
        )
    if mech.remembers(mechanism):
        checks.fail(
            "private_grad",
            "a fixed clip",
            f"{mechanism!r}",
            "All clients of a round share what earlier releases said: use clip_adaptive or "
            "clip_scaled in plan(release=...).",
        )
    if microbatch is not None:
        checks.require_integer("private_grad", microbatch=microbatch)
    checks.require_one_of("private_grad", GRAD_PATHS, path=path)
    if path == "bookkeeping" and _clip(mechanism) is None:
        checks.fail(
            "private_grad",
            'one row stage, clip_l2 or clip_per_layer, for path="bookkeeping"',
            " -> ".join(s.name for s in mechanism.stages),
            'Use path="auto" or "vmap".',
        )
    options = dict(microbatch=microbatch, path=path)
    return _make("private_grad", loss, mechanism, l2, compute, **options)


def _keyed(self, key, batch):
    """Return the batch, with the words of a key for each row if the loss draws."""
    if not losses.draws(self.loss):
        return batch
    return batch._replace(x=losses.with_words(batch.x, key, len(batch.mask)))


def _mean(self, key, params, batch, ctx):
    batch = _keyed(self, key, batch)
    loss = ghost.convolved(self.loss, params, *_example(batch), batch.mask.shape[0])

    def mean_loss(w):
        each = jax.vmap(loss, (None, 0, 0))(w, batch.x, batch.y)
        return jnp.where(batch.mask, each, 0.0).sum() / jnp.maximum(batch.mask.sum(), 1)

    loss, g = jax.value_and_grad(mean_loss)(params)
    zero = jnp.zeros((), jnp.int32)
    return g, Diagnostics(loss, jnp.zeros(()), zero, zero)


def _example(batch):
    """Return the shapes of the x and y of one example."""
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), (batch.x, batch.y))


def _with_words(loss, x, y):
    """Return the shapes x and y, with those of the words of a key if the loss draws."""
    return ((x, losses.words_shape()) if losses.draws(loss) else x), y


def _private(self, key, params, batch, ctx):
    batch = marks.example(batch, self.loss, params, *_with_words(self.loss, *_example(batch)))
    batch = _keyed(self, key, batch)
    weight = batch.mask.astype(jnp.float32)
    partial, loss = clipped_sum(self, params, batch, weight)
    value = marks.bounded(partial.value, self.mechanism, batch.mask, "examples")
    g, _ = mech.release_sum(
        self.mechanism, key, (), value, realised=ctx.size, client=ctx.client, dtypes=partial.dtypes
    )
    rows = jnp.maximum(partial.count, 1.0)
    zero = jnp.zeros((), jnp.int32)
    return g, Diagnostics(loss / rows, partial.clipped / rows, zero, partial.nonfinite)


def _book(self: Grad, params, x, y):
    """Read the loss for book-keeping; return None if every gradient must be formed."""
    stage = _clip(self.mechanism)
    if self.path == "vmap" or stage is None:
        return None
    if stage.name == "clip_per_layer" and stage.apply.static["layers"] != len(
        jax.tree.leaves(params)
    ):
        return None  # the stage itself says what is wrong
    book = ghost.read(self.loss, params, x, y)
    if self.path == "bookkeeping" and book.why_not:
        checks.fail(
            "private_grad",
            'a rule for every parameter, for path="bookkeeping"',
            "; ".join(f"{name}: {why}" for name, why in book.why_not.items()),
            'Use path="auto", which forms per-example gradients for these only.',
        )
    return book if book.rules else None


def gradient_path(plan) -> str:
    """Return how a plan computes its private gradients: "bookkeeping" (and which leaves have no
    rule), "vmap", or "none".
    """
    private = lambda node: isinstance(node, Grad) and node.mechanism is not None
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    x, y = (jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (plan.fed.x, plan.fed.y))
    paths = []
    for grad in filter(private, jax.tree.leaves(plan.algorithm, is_leaf=private)):
        book = _book(grad, params, *_with_words(grad.loss, x, y))
        dtype = computed_in(grad)
        path = "vmap" if book is None else ghost.words(book)
        paths.append(path if dtype == "float32" else f"{path} in {dtype}")
    return " and ".join(dict.fromkeys(paths)) or "none"


def clipped_sum(self: Grad, params, batch: Batch, weight):
    """Return the sum of clipped gradients of a batch, as a PartialSum, and the sum of losses."""
    example = _example(batch)
    book = _book(self, params, *example)
    mechanism: Any = self.mechanism

    def some(rows: Batch, w):
        if book is None:
            loss = ghost.convolved(self.loss, params, *example, examples=1)
            each, grads = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))(params, rows.x, rows.y)
            partial = mech.clip_and_sum(mechanism, (), grads, w)
        else:
            clip: Any = _clip(mechanism)
            (bounds,) = clip.apply.data.values()
            value, over, finite, each = ghost.clipped_sum(
                book,
                self.loss,
                params,
                rows.x,
                rows.y,
                w,
                jax.tree.leaves(bounds),
                together=clip.name == "clip_l2",
            )
            count = lambda x: x.sum().astype(jnp.float32)
            partial = mech.PartialSum(
                value,
                count(w != 0),
                count(over & finite & (w != 0)),
                count(w),
                (~finite & (w != 0)).sum(dtype=jnp.int32),
                pytrees.dtypes_of(params),
            )
        return partial, jnp.where(w != 0, each, 0.0).sum()

    size = weight.shape[0]
    if self.microbatch is None or self.microbatch >= size:
        return some(batch, weight)
    blocks = -(-size // self.microbatch)
    pad = blocks * self.microbatch - size
    cut = lambda x: jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)).reshape(
        (blocks, self.microbatch) + x.shape[1:]
    )
    parts = jax.tree.map(cut, (batch, weight))
    zero = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(some, *jax.tree.map(lambda x: x[0], parts)),
    )
    return jax.lax.scan(lambda acc, part: (pytrees.add(acc, some(*part)), None), zero, parts)[0]
