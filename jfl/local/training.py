"""Local steps on a client, and the optimizers of clients and server."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..core import checks, pytrees
from ..core.records import Batches, Diagnostics, Fn, Release, named, record, static
from ..gradients.per_example import Grad
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import draw_slots, gather
from ..sampling.uniform import MAX_FLOYD_SIZE

# Batches of all steps are drawn at once if they have at most this many rows in all: one call of
# the generator is faster.
MAX_ROWS_DRAWN_AT_ONCE = 2**10


# --- optimizers


def optimizer(factory) -> Fn:
    """Convert an optax transformation to a function from learning rate to transformation.

    `factory` is an optax factory whose first argument is the learning rate (optax.sgd, optax.adam,
    or a functools.partial of one), or a transformation, which keeps its own learning rate.
    """
    if isinstance(factory, Fn):
        return factory
    if isinstance(factory, optax.GradientTransformation):
        return Fn(_ready, static=dict(transformation=_Held(factory)))
    if isinstance(factory, functools.partial) and not factory.args:
        data = {
            k: checks.as_scalar(v)
            for k, v in factory.keywords.items()
            if isinstance(v, (float, jax.Array))
        }
        rest = {k: v for k, v in factory.keywords.items() if k not in data}
        return Fn(factory.func, data, rest)
    if not callable(factory):
        checks.fail(
            "optimizer",
            "an optax factory such as optax.sgd, or a ready transformation",
            f"{factory!r}",
        )
    return Fn(factory)


class _Held:
    """A transformation (a tuple of functions) as one static argument."""

    def __init__(self, transformation):
        self.transformation = transformation

    def __eq__(self, other):
        return isinstance(other, _Held) and self.transformation == other.transformation

    def __hash__(self):
        return hash(self.transformation)


def _reject_unused_rate(name, lr, default, factory):
    """Reject a learning rate that a transformation would ignore."""
    if default is None or not isinstance(factory, optax.GradientTransformation):
        return
    if callable(lr) or lr != default:
        checks.fail(
            "algorithm",
            "either a learning rate or an optax transformation, which has its own",
            f"{name}={lr!r} and a transformation",
            f"Leave {name} out, or pass a factory such as optax.adam; "
            "functools.partial(optax.adam, b1=0.8) sets its other arguments.",
        )


@named("local.optimizer")
def _ready(lr, *, transformation):
    return transformation.transformation


def rate(lr, name="lr"):
    """Check a learning rate, and return it as a scalar array (traced) or as a function of
    round * steps + step."""
    if callable(lr):
        return lr if isinstance(lr, Fn) else Fn(lr)
    checks.require_positive("algorithm", single=True, **{name: lr})
    return checks.as_scalar(lr)


def _at(lr, step):
    return jnp.asarray(lr(step) if isinstance(lr, Fn) else lr, jnp.float32)


def rates(lr, first, steps: int):
    """Return the sum of the learning rates of `steps` steps, beginning with step `first`."""
    return jax.vmap(lambda s: _at(lr, s))(first + jnp.arange(steps)).sum()


def _set_clock(state, step):
    """Set the step count of schedules inside a transformation to round * steps + step.

    Moments start again in each round, but schedules continue.
    """
    scheduled = optax.ScaleByScheduleState
    return jax.tree.map(
        lambda s: (
            s._replace(count=jnp.asarray(step, jnp.asarray(s.count).dtype))
            if isinstance(s, scheduled)
            else s
        ),
        state,
        is_leaf=lambda s: isinstance(s, scheduled),
    )


# --- local steps


@record
class Work:
    """Local training: `steps` optimizer steps on batches drawn by `batches`."""

    grad: Grad
    batches: Batches
    lr: Any
    optimizer: Fn
    steps: int = static()

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of local training by name, as they print."""
        settings = dict(batch=self.batches, lr=self.lr, optimizer=self.optimizer, steps=self.steps)
        return self.grad.hyperparameters() | settings

    def releases(self) -> tuple:
        """Return what one participation releases about a client's examples."""
        return (Release(self.grad.mechanism, self.batches, self.steps),)


def work(
    grad: Grad, batches: Batches, *, lr, steps: int, optimizer=optax.sgd, default_lr=0.1
) -> Work:
    """Check and collect the parts of local training.

    Args:
        default_lr: the algorithm's default of `lr`. Another value is rejected if the optimizer is a
            transformation with its own learning rate. None means that the algorithm itself reads
            `lr`, so nothing is rejected.
    """
    if not isinstance(grad, Grad):
        checks.fail(
            "algorithm", "grad = jfl.grad(loss) or jfl.private_grad(loss, mechanism)", f"{grad!r}"
        )
    if not isinstance(batches, Batches):
        checks.fail(
            "algorithm",
            "batch = a batch sampler such as jfl.batches.without_replacement(16)",
            f"{batches!r}",
        )
    checks.require_integer("algorithm", steps=steps)
    _reject_unused_rate("lr", lr, default_lr, optimizer)
    return Work(grad, batches, rate(lr), globals()["optimizer"](optimizer), steps)


def train(work: Work, ctx, keys, params, rows, correct=None, moving=1.0, drop=False, first=0):
    """Take local steps from `params`.

    Args:
        work: the steps to take.
        ctx: the context of the round.
        keys: the client's keys for batches and noise.
        params: the initial model.
        rows: the client's rows.
        correct: a function (gradient, params, step) -> gradient, applied after the mechanism, such
            as a proximal term. It is post-processing if it reads no example. The returned mean
            gradient does not include it.
        moving: a factor of the updates that does not affect the returned gradient and rates. 0
            computes the mean gradient at `params`.
        drop: whether a step with a non-finite gradient uses a zero gradient, and is counted among
            the non-finite rows.
        first: number of the first step, from which batches and noise are derived. Further work in
            the same round continues the numbers of the work before.

    Returns:
        The trained params, the mean gradient, the sum of learning rates, and Diagnostics.
    """
    clock = ctx.round * work.steps
    num_slots = rows.index.shape[0]
    grad = work.grad
    if grad.mechanism is not None:  # once per round, not in every step
        grad = dataclasses.replace(grad, mechanism=mech.at_round(grad.mechanism, ctx.round))
    state = _set_clock(work.optimizer(_at(work.lr, clock)).init(params), clock)

    def draw(number):
        slots = draw_slots(work.batches, keys.batch, number, rows.size, num_slots)
        return slots, jax.random.fold_in(keys.noise, number)

    # Other schemes draw a number for each row of the client, so all steps at once take too much
    # memory.
    batch: Any = work.batches.batch
    draws_at_once = (
        work.batches.scheme in ("without_replacement", "with_replacement")
        and batch <= MAX_FLOYD_SIZE
        and work.steps * batch <= MAX_ROWS_DRAWN_AT_ONCE
    )

    def step(carry, inputs):
        s, drawn = inputs
        params, state, mean, total = carry
        (slots, mask, overflow), key = drawn if draws_at_once else draw(first + s)
        gradient, stats = grad.watched(key, params, gather(rows, slots, mask), ctx)
        pytrees.refuse_other_shapes("local step", gradient, params)
        if drop:
            is_lost = ~pytrees.all_finite(gradient)
            gradient = pytrees.map(
                lambda x: jnp.where(is_lost, jnp.zeros((), x.dtype), x), gradient
            )
            stats = stats._replace(nonfinite=stats.nonfinite + is_lost)
        mean = pytrees.axpy(1.0 / work.steps, gradient, mean)
        total = Diagnostics(
            total.loss + stats.loss / work.steps,
            total.clipped + stats.clipped / work.steps,
            total.overflow + overflow,
            total.nonfinite + stats.nonfinite,
        )

        lr = _at(work.lr, clock + s)
        if correct is not None:
            gradient = correct(gradient, params, s)
        updates, state = work.optimizer(lr).update(gradient, state, params)
        if not (isinstance(moving, float) and moving == 1.0):
            updates = pytrees.scale(moving, updates)
        return (optax.apply_updates(params, updates), state, mean, total), lr

    zeros = Diagnostics(
        *(jnp.zeros((), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32, jnp.int32))
    )
    numbers = jnp.arange(work.steps)
    drawn = jax.vmap(draw)(first + numbers) if draws_at_once else None
    with jax.named_scope("local_steps"):
        (trained, _, mean, total), rates = jax.lax.scan(
            step, (params, state, pytrees.zeros_like(params), zeros), (numbers, drawn)
        )
    return trained, mean, rates.sum(), total


def both(one: Diagnostics, other: Diagnostics) -> Diagnostics:
    """Combine two diagnostics: loss and clipped fraction of the first, and counts of both."""
    return one._replace(
        overflow=one.overflow + other.overflow, nonfinite=one.nonfinite + other.nonfinite
    )


def over_steps(diagnostics: Diagnostics) -> Diagnostics:
    """Combine diagnostics stacked over steps: means of losses and clipped fractions, and counts."""
    return Diagnostics(
        diagnostics.loss.mean(),
        diagnostics.clipped.mean(),
        diagnostics.overflow.sum(),
        jnp.sum(jnp.asarray(diagnostics.nonfinite)),
    )


@record
class Server:
    """The state of most servers."""

    params: Any
    optimizer: Any


@record
class ServerStep:
    """A server optimizer that uses a released model difference as minus the gradient."""

    lr: Any
    optimizer: Fn

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the server by name, as they print."""
        return dict(server_lr=self.lr, server_optimizer=self.optimizer)

    def init(self, params) -> Server:
        """Return the server's state before the first round."""
        return Server(params, self.optimizer(_at(self.lr, 0)).init(params))

    def __call__(self, ctx, server: Server, diff) -> Server:
        pytrees.refuse_other_shapes("server step", diff, server.params)
        descent = pytrees.scale(-1.0, diff)
        updates, state = self.optimizer(_at(self.lr, ctx.round)).update(
            descent, server.optimizer, server.params
        )
        return Server(optax.apply_updates(server.params, updates), state)


def server_step(lr, optimizer_=optax.sgd, default_lr=1.0, name="server_lr") -> ServerStep:
    """Return the server's step: optax.sgd at rate 1.0 is plain averaging, optax.adam is FedAdam."""
    _reject_unused_rate(name, lr, default_lr, optimizer_)
    return ServerStep(rate(lr, "server_lr"), optimizer(optimizer_))
