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
from ..verify import marks

# The batches of all steps are drawn in one call of the generator, which is faster, if they have at
# most this many rows in all.
MAX_ROWS_DRAWN_AT_ONCE = 2**10


# --- optimizers


def as_optimizer(factory) -> Fn:
    """Convert an optimizer argument to an Fn that maps a learning rate to a transformation.

    Args:
        factory: an optax factory whose first argument is the learning rate, such as optax.sgd,
            optax.adam, or a functools.partial of one; or a transformation, which keeps its own
            learning rate.
    """
    if isinstance(factory, Fn):
        return factory
    if isinstance(factory, optax.GradientTransformation):
        return Fn(_fixed_transformation, static=dict(transformation=_Held(factory)))
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
            checks.short_repr(factory),
        )
    return Fn(factory)


class _Held:
    """An optax transformation, a tuple of functions, as a single static argument."""

    def __init__(self, transformation):
        self.transformation = transformation

    def __eq__(self, other):
        return isinstance(other, _Held) and self.transformation == other.transformation

    def __hash__(self):
        return hash(self.transformation)


def _reject_unused_rate(name, lr, default, factory):
    """Reject a learning rate that differs from its default, if a transformation ignores it."""
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
def _fixed_transformation(lr, *, transformation):
    return transformation.transformation


def rate(lr, name="lr"):
    """Check a learning rate, and return it as a scalar array, or as an Fn of the step."""
    if callable(lr):
        return lr if isinstance(lr, Fn) else Fn(lr)
    checks.require_positive("algorithm", single=True, **{name: lr})
    return checks.as_scalar(lr)


def _rate_at(lr, step):
    """Return the learning rate of a step, Float[]."""
    return jnp.asarray(lr(step) if isinstance(lr, Fn) else lr, jnp.float32)


def sum_of_rates(lr, first, steps: int):
    """Return the sum of the learning rates of `steps` steps, beginning with step `first`."""
    return jax.vmap(lambda s: _rate_at(lr, s))(first + jnp.arange(steps)).sum()


def _set_clock(state, step):
    """Set the step count of schedules inside the state of a transformation.

    The optimizer state of a client starts again in each round, but its schedules continue.
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
    """Local training of a client in a round: `steps` optimizer steps on batches of its rows."""

    grad: Grad
    batches: Batches
    lr: Any  # a number, or an Fn of round * steps + step
    optimizer: Fn  # learning rate -> optax transformation
    steps: int = static()

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of local training by name, for printing."""
        settings = dict(batch=self.batches, lr=self.lr, optimizer=self.optimizer, steps=self.steps)
        return self.grad.hyperparameters() | settings

    def releases(self) -> tuple:
        """Return what one participation releases about a client's examples, a tuple of Release."""
        return (Release(self.grad.mechanism, self.batches, self.steps),)


def work(
    grad: Grad, batches: Batches, *, lr, steps: int, optimizer=optax.sgd, default_lr=0.1
) -> Work:
    """Check the settings of local training, and return them as a Work.

    Args:
        grad: a Grad, from jfl.grad or jfl.private_grad.
        batches: a batch sampler.
        lr: a number, or a function of round * steps + step.
        steps: the number of local steps.
        optimizer: as in `as_optimizer`.
        default_lr: the algorithm's default of `lr`. Other values are rejected if the optimizer is a
            transformation with its own learning rate. None accepts all values, for an algorithm
            that itself uses `lr`.
    """
    if not isinstance(grad, Grad):
        checks.fail(
            "algorithm",
            "grad = jfl.grad(loss) or jfl.private_grad(loss, mechanism)",
            checks.short_repr(grad),
        )
    if not isinstance(batches, Batches):
        checks.fail(
            "algorithm",
            "batch = a batch sampler such as jfl.batches.without_replacement(16)",
            checks.short_repr(batches),
        )
    checks.require_integer("algorithm", steps=steps)
    _reject_unused_rate("lr", lr, default_lr, optimizer)
    return Work(grad, batches, rate(lr), as_optimizer(optimizer), steps)


def train(work: Work, ctx, keys, params, rows, correct=None, moving=1.0, drop=False, first=0):
    """Train a model on a client by the local steps of a round.

    Args:
        work: the settings of the steps.
        ctx: the Context of the round.
        keys: the client's Keys, for batches and noise.
        params: the initial model.
        rows: the client's Rows.
        correct: a function (gradient, params, step) that returns the gradient to follow, for
            example with a proximal term. It is applied after the mechanism, and is post-processing
            if it reads no example. The returned mean gradient does not include it.
        moving: a factor of all updates. With 0 the model stays at `params`, and the returned
            gradient is the mean gradient there.
        drop: whether a step with a non-finite gradient uses a zero gradient, and is counted among
            the non-finite rows.
        first: the number of the first step within the round. Batches and noise are derived from
            step numbers, so if a client trains twice in a round, the second call must continue the
            numbers of the first.

    Returns:
        The trained params, the mean gradient over the steps, the sum of learning rates, and
        Diagnostics.
    """
    # Schedules of the learning rate count the steps of all rounds.
    first_of_round = ctx.round * work.steps
    num_slots = rows.index.shape[0]
    grad = work.grad
    if grad.mechanism is not None:  # evaluate schedules once per round, not in every step
        grad = dataclasses.replace(grad, mechanism=mech.at_round(grad.mechanism, ctx.round))
    transformation = work.optimizer(_rate_at(work.lr, first_of_round))
    # In half precision, the moments of an optimizer would lose small changes.
    state = _set_clock(transformation.init(pytrees.at_least_float32(params)), first_of_round)

    def draw(number):
        """Draw the batch of step `number`; return its row indices and the key of its noise."""
        slots = draw_slots(work.batches, keys.batch, number, rows.size, num_slots)
        return slots, jax.random.fold_in(keys.noise, number)

    # Other schemes draw a number for each row of the client, so drawing for all steps at once would
    # take too much memory.
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
        gradient, stats = grad.with_diagnostics(key, params, gather(rows, slots, mask), ctx)
        pytrees.require_equal_shapes("local step", gradient, params)
        if drop:
            is_dropped = ~pytrees.all_finite(gradient)
            gradient = pytrees.map(
                lambda x: jnp.where(is_dropped, jnp.zeros((), x.dtype), x), gradient
            )
            stats = stats._replace(nonfinite=stats.nonfinite + is_dropped)
        mean = pytrees.axpy(1.0 / work.steps, gradient, mean)
        total = Diagnostics(
            total.loss + stats.loss / work.steps,
            total.clipped + stats.clipped / work.steps,
            total.overflow + overflow,
            total.nonfinite + stats.nonfinite,
            total.measured + stats.measured / work.steps,
        )

        lr = _rate_at(work.lr, first_of_round + s)
        if correct is not None:
            gradient = correct(gradient, params, s)
        gradient, point = pytrees.at_least_float32((gradient, params))
        updates, state = work.optimizer(lr).update(gradient, state, point)
        if not (isinstance(moving, float) and moving == 1.0):
            updates = pytrees.scale(moving, updates)
        return (optax.apply_updates(params, updates), state, mean, total), lr

    zeros = Diagnostics(
        *(jnp.zeros((), dtype) for dtype in (jnp.float32, jnp.float32, jnp.int32, jnp.int32)),
        measured=jnp.zeros((), jnp.float32),
    )
    start = params, state, pytrees.zeros_like(params), zeros
    params, own_state, mean, zeros = marks.copy_per_client(start, rows.size)
    # Integers of an optimizer count steps, and are equal for all clients.
    is_count = lambda x: jnp.issubdtype(jnp.result_type(x), jnp.integer)
    state = jax.tree.map(lambda x, own: x if is_count(x) else own, state, own_state)
    numbers = jnp.arange(work.steps)
    drawn = jax.vmap(draw)(first + numbers) if draws_at_once else None
    with jax.named_scope("local_steps"):
        (trained, _, mean, total), rates = jax.lax.scan(
            step, (params, state, mean, zeros), (numbers, drawn)
        )
    return trained, mean, rates.sum(), total


def add_counts(diagnostics: Diagnostics, other: Diagnostics) -> Diagnostics:
    """Add the counts of `other` to `diagnostics`, keeping its loss and its clipped fraction."""
    return diagnostics._replace(
        overflow=diagnostics.overflow + other.overflow,
        nonfinite=diagnostics.nonfinite + other.nonfinite,
    )


def over_steps(diagnostics: Diagnostics) -> Diagnostics:
    """Combine Diagnostics with leaves [steps]: average the loss and fractions, and add counts."""
    return Diagnostics(
        diagnostics.loss.mean(),
        diagnostics.clipped.mean(),
        diagnostics.overflow.sum(),
        jnp.sum(jnp.asarray(diagnostics.nonfinite)),
        jnp.mean(jnp.asarray(diagnostics.measured)),
    )


@record
class Server:
    """The server state of most algorithms."""

    params: Any
    optimizer: Any


@record
class ServerStep:
    """A server optimizer, which takes minus the released model difference as its gradient."""

    lr: Any  # a number, or an Fn of the round
    optimizer: Fn  # learning rate -> optax transformation

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the server by name, for printing."""
        return dict(server_lr=self.lr, server_optimizer=self.optimizer)

    def init(self, params) -> Server:
        """Return the server's state before the first round."""
        optimizer = self.optimizer(_rate_at(self.lr, 0))
        return Server(params, optimizer.init(pytrees.at_least_float32(params)))

    def __call__(self, ctx, server: Server, diff) -> Server:
        pytrees.require_equal_shapes("server step", diff, server.params)
        gradient, params = pytrees.at_least_float32((pytrees.scale(-1.0, diff), server.params))
        updates, state = self.optimizer(_rate_at(self.lr, ctx.round)).update(
            gradient, server.optimizer, params
        )
        return Server(optax.apply_updates(server.params, updates), state)


def server_step(lr, optimizer=optax.sgd, default_lr=1.0, name="server_lr") -> ServerStep:
    """Check the settings of a server optimizer, and return them as a ServerStep.

    With optax.sgd at rate 1.0 the server averages models, and with optax.adam it is FedAdam.

    Args:
        lr: a number, or a function of the round.
        optimizer: as in `as_optimizer`.
        default_lr: the algorithm's default of `lr`, as in `work`.
        name: the name of the argument `lr` in the algorithm, for messages.
    """
    _reject_unused_rate(name, lr, default_lr, optimizer)
    return ServerStep(rate(lr, "server_lr"), as_optimizer(optimizer))
