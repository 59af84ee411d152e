"""Everything on one client: gradients, private gradients, local steps."""
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from . import check, taps, tree
from .batches import gather
from .core import Batch, Batches, Diagnostics, Fn, Mechanism, Release, record, static
from .privacy import mechanism as mech

GRAD_PATHS = ("auto", "bookkeeping", "vmap")


@record
class Grad:
    """(key, params, batch, ctx) -> gradient, (loss, clipped fraction)."""
    loss: Fn                             # (params, x, y) -> scalar, one example
    mechanism: Mechanism | None          # None: the mean gradient, not private
    l2: Any                              # added after the mechanism: l2 * params
    microbatch: int | None = static(default=None)
    path: str = static(default="auto")

    def __call__(self, key, params, batch: Batch, ctx):
        g, aux = (_mean if self.mechanism is None else _private)(self, key, params, batch, ctx)
        return (g if self.l2 is None else tree.axpy(self.l2, params, g)), aux


def _clip(mechanism):
    """The row stage that book-keeping serves, or None where the rows meet others."""
    rows = [s for s in mechanism.stages if s.role == "row"]
    return rows[0] if len(rows) == 1 and rows[0].name in ("clip_l2", "clip_per_layer") else None


def _as_fn(function) -> Fn:
    return function if isinstance(function, Fn) else Fn(function)


def grad(loss, *, l2=None) -> Grad:
    """The mean gradient of `loss` over the rows of a batch: no privacy.

    `l2` adds l2 * params, the gradient of (l2 / 2) ||params||^2.
    """
    if l2 is not None:
        check.nonnegative("grad", l2=l2)
    return Grad(_as_fn(loss), None, None if l2 is None else check.scalar(l2))


def private_grad(loss, mechanism: Mechanism, *, l2=None, microbatch: int | None = None, path: str = "auto") -> Grad:
    """Per-example gradients of `loss` through `mechanism`.

    Args     loss: any pure (params, x, y) -> scalar for one example.
             mechanism: a chain over the examples of a batch, such as
             chain(clip_l2(1.0), total(), gaussian(1.1), divide(16)).
             l2: adds l2 * params after clipping and noise: it depends on no example, so it is not clipped.
             microbatch: examples whose gradients are held at once; None: the batch.
             path: "bookkeeping" has the clipped sum from activations and backprops, at the cost of a plain gradient,
             for a chain with one clip_l2 or clip_per_layer and parameters with a rule (see `jfl.taps`); "vmap" forms
             every example's gradient; "auto" forms only those of the parameters without a rule.
    Privacy  noise is drawn anew for every (round, client, step).  What an epsilon is worth depends on how batches
             and clients are drawn: see `jfl.guarantee`.
    Errors   ValueError for an adaptive clip: one clip norm must serve all clients of a round; with
             path="bookkeeping", for another chain, or (when it runs) a parameter without a rule.
    Source   Abadi et al., CCS 2016, Algorithm 1.
    """
    if not isinstance(mechanism, Mechanism):
        check.fail("private_grad", "a chain of stages", f"{mechanism!r}", "For no privacy use jfl.grad(loss).")
    if mech.adaptive(mechanism):
        check.fail("private_grad", "a fixed clip", "clip_adaptive",
                   "All clients of a round share one clip norm: use clip_adaptive in plan(release=...).")
    if l2 is not None:
        check.nonnegative("private_grad", l2=l2)
    if microbatch is not None:
        check.whole("private_grad", microbatch=microbatch)
    check.choice("private_grad", GRAD_PATHS, path=path)
    if path == "bookkeeping" and _clip(mechanism) is None:
        check.fail("private_grad", "one row stage, clip_l2 or clip_per_layer, for path=\"bookkeeping\"",
                   " -> ".join(s.name for s in mechanism.stages), "Use path=\"auto\" or \"vmap\".")
    return Grad(_as_fn(loss), mechanism, None if l2 is None else check.scalar(l2), microbatch, path)


def _mean(self, key, params, batch, ctx):
    def mean_loss(w):
        losses = jax.vmap(self.loss, (None, 0, 0))(w, batch.x, batch.y)
        return jnp.where(batch.mask, losses, 0.0).sum() / jnp.maximum(batch.mask.sum(), 1)

    loss, g = jax.value_and_grad(mean_loss)(params)
    return g, (loss, jnp.zeros(()))


def _private(self, key, params, batch, ctx):
    weight = batch.mask.astype(jnp.float32)
    partial, loss = clipped_sum(self, params, batch, weight)
    g, _ = mech.finish(self.mechanism, key, (), partial.value, realised=ctx.size, client=ctx.client)
    rows = jnp.maximum(partial.rows, 1.0)
    return g, (loss / rows, partial.clipped / rows)


def _book(self: Grad, params, x, y):
    """The loss read for book-keeping; None where every gradient must be formed.  x, y: one example."""
    stage = _clip(self.mechanism)
    if self.path == "vmap" or stage is None:
        return None
    if stage.name == "clip_per_layer" and stage.apply.static["layers"] != len(jax.tree.leaves(params)):
        return None                                       # the stage itself says what is wrong
    book = taps.read(self.loss, params, x, y)
    if self.path == "bookkeeping" and book.why_not:
        check.fail("private_grad", "a rule for every parameter, for path=\"bookkeeping\"",
                   "; ".join(f"{name}: {why}" for name, why in book.why_not.items()),
                   "Use path=\"auto\", which forms per-example gradients for these alone.")
    return book if book.rules else None


def gradient_path(plan) -> str:
    """How a plan has its private gradients: "bookkeeping" (then which leaves have no rule), "vmap", or "none"."""
    private = lambda node: isinstance(node, Grad) and node.mechanism is not None
    grads = [g for g in jax.tree.leaves(plan.algorithm, is_leaf=private) if private(g)]
    params = jax.eval_shape(plan.task.init, jax.random.key(0))
    example = [jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (plan.fed.x, plan.fed.y)]
    books = [_book(g, params, *example) for g in grads]
    return " and ".join(dict.fromkeys("vmap" if b is None else taps.words(b) for b in books)) or "none"


def clipped_sum(self: Grad, params, batch: Batch, weight):
    """Clipped gradients of a batch, summed -> Partial, sum of losses.  The one place where a faster path plugs in."""
    book = _book(self, params, *jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), (batch.x, batch.y)))

    def some(rows: Batch, w):
        if book is None:
            losses, grads = jax.vmap(jax.value_and_grad(self.loss), (None, 0, 0))(params, rows.x, rows.y)
            partial = mech.contribute(self.mechanism, (), grads, w)
        else:
            bounds, = _clip(self.mechanism).apply.data.values()
            value, over, losses = taps.clipped_sum(book, self.loss, params, rows.x, rows.y, w, jax.tree.leaves(bounds),
                                                   together=_clip(self.mechanism).name == "clip_l2")
            count = lambda x: x.sum().astype(jnp.float32)
            partial = mech.Partial(value, count(w != 0), count(over & (w != 0)), count(w))
        return partial, jnp.where(w != 0, losses, 0.0).sum()

    size = weight.shape[0]
    if self.microbatch is None or self.microbatch >= size:
        return some(batch, weight)
    blocks = -(-size // self.microbatch)
    pad = blocks * self.microbatch - size
    cut = lambda x: jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1)).reshape((blocks, self.microbatch) + x.shape[1:])
    parts = jax.tree.map(cut, (batch, weight))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(some, *jax.tree.map(lambda x: x[0], parts)))
    return jax.lax.scan(lambda acc, part: (tree.add(acc, some(*part)), None), zero, parts)[0]


# --- optimizers ----------------------------------------------------------------------------------------------------

def optimizer(factory) -> Fn:
    """Any optax transformation, as learning rate -> transformation.

    `factory` is an optax factory whose first argument is the learning rate (optax.sgd, optax.adam, or a
    functools.partial of one), or a ready transformation, which keeps its own learning rate.
    """
    if isinstance(factory, Fn):
        return factory
    if isinstance(factory, optax.GradientTransformation):
        return Fn(_ready, static=dict(transformation=_Held(factory)))
    if isinstance(factory, functools.partial) and not factory.args:
        data = {k: check.scalar(v) for k, v in factory.keywords.items() if isinstance(v, (float, jax.Array))}
        rest = {k: v for k, v in factory.keywords.items() if k not in data}
        return Fn(factory.func, data, rest)
    if not callable(factory):
        check.fail("optimizer", "an optax factory such as optax.sgd, or a ready transformation", f"{factory!r}")
    return Fn(factory)


class _Held:
    """Keeps a ready transformation (a tuple of functions) whole among static arguments."""

    def __init__(self, transformation):
        self.transformation = transformation

    def __eq__(self, other):
        return isinstance(other, _Held) and self.transformation == other.transformation

    def __hash__(self):
        return hash(self.transformation)


def _ready(lr, *, transformation):
    return transformation.transformation


def rate(lr):
    """A learning rate: a number (traced data), or a schedule of round * T + step."""
    if callable(lr):
        return _as_fn(lr)
    check.positive("lr", lr=lr)
    return check.scalar(lr)


def _at(lr, step):
    return jnp.asarray(lr(step) if isinstance(lr, Fn) else lr, jnp.float32)


def rates(lr, first, steps: int):
    """The sum of the learning rates of `steps` steps from `first` on."""
    return jax.vmap(lambda s: _at(lr, s))(first + jnp.arange(steps)).sum()


def _set_clock(state, step):
    """Schedules inside a ready transformation see round * T + step, though moments start anew each round."""
    scheduled = optax.ScaleByScheduleState
    return jax.tree.map(lambda s: s._replace(count=jnp.asarray(step, s.count.dtype)) if isinstance(s, scheduled) else s,
                        state, is_leaf=lambda s: isinstance(s, scheduled))


# --- local steps ---------------------------------------------------------------------------------------------------

@record
class Work:
    """Local training: `steps` optimizer steps on batches drawn by `batches`."""
    grad: Grad
    batches: Batches
    lr: Any
    optimizer: Fn
    steps: int = static()

    def releases(self) -> tuple:
        """What this work releases about a client's examples in one participation."""
        return (Release(self.grad.mechanism, self.batches, self.steps),)


def work(grad: Grad, batches: Batches, *, lr, steps: int, optimizer=optax.sgd) -> Work:
    """Check and collect the parts of local training."""
    if not isinstance(grad, Grad):
        check.fail("algorithm", "grad = jfl.grad(loss) or jfl.private_grad(loss, mechanism)", f"{grad!r}")
    if not isinstance(batches, Batches):
        check.fail("algorithm", "batch = a batch sampler such as jfl.batches.without_replacement(16)", f"{batches!r}")
    check.whole("algorithm", steps=steps)
    return Work(grad, batches, rate(lr), globals()["optimizer"](optimizer), steps)


def train(work: Work, ctx, keys, params, rows, correct=None, moving=1.0):
    """Local steps from `params` -> (trained params, mean gradient, sum of learning rates, Diagnostics).

    `moving` scales the updates, but not what is returned of gradients and rates: 0 only looks.
    `correct(gradient, params, step)` changes a gradient after the mechanism (a drift, a proximal pull): post-processing of
    a release, as long as it reads no example.  The mean gradient is taken before `correct`.
    """
    clock = ctx.round * work.steps
    slots = rows.index.shape[0]
    gradient = work.grad
    if gradient.mechanism is not None:                    # once a round, not once a step
        gradient = dataclasses.replace(gradient, mechanism=mech.at(gradient.mechanism, ctx.round))
    state = _set_clock(work.optimizer(_at(work.lr, clock)).init(params), clock)

    def step(carry, s):
        w, state, mean, seen = carry
        at, mask, overflow = work.batches.draw(keys.batch, s, rows.size, slots)
        key = jax.random.fold_in(keys.noise, s)
        g, (loss, clipped) = gradient(key, w, gather(rows, at, mask), ctx)
        mean = tree.axpy(1.0 / work.steps, g, mean)
        lr = _at(work.lr, clock + s)
        updates, state = work.optimizer(lr).update(g if correct is None else correct(g, w, s), state, w)
        seen = Diagnostics(seen.loss + loss / work.steps, seen.clipped + clipped / work.steps, seen.overflow + overflow)
        updates = updates if isinstance(moving, float) and moving == 1.0 else tree.scale(moving, updates)
        return (optax.apply_updates(w, updates), state, mean, seen), lr

    nothing = Diagnostics(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))
    start = (params, state, tree.zeros_like(params), nothing)
    (w, _, mean, seen), rates = jax.lax.scan(step, start, jnp.arange(work.steps))
    return w, mean, rates.sum(), seen


@record
class Server:
    """What most servers remember."""
    params: Any
    optimizer: Any


@record
class ServerStep:
    """Applies a released model difference as a pseudo-gradient."""
    lr: Any
    optimizer: Fn

    def init(self, params) -> Server:
        return Server(params, self.optimizer(_at(self.lr, 0)).init(params))

    def __call__(self, ctx, server: Server, diff) -> Server:
        descent = tree.scale(-1.0, diff)
        updates, state = self.optimizer(_at(self.lr, ctx.round)).update(descent, server.optimizer, server.params)
        return Server(optax.apply_updates(server.params, updates), state)


def server_step(lr, optimizer_=optax.sgd) -> ServerStep:
    """The server optimizer: optax.sgd at 1.0 is plain averaging, optax.adam is FedAdam."""
    return ServerStep(rate(lr), optimizer(optimizer_))
