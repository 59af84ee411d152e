"""Everything on one client: local steps, and the optimizers that take them, on clients and
server."""

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
from ..sampling.batches import drawn as draw
from ..sampling.batches import gather
from ..sampling.uniform import FLOYD

AHEAD = (
    2**10
)  # rows of a client up to which all steps' batches are drawn at once: one call of the generator


# --- optimizers


def optimizer(factory) -> Fn:
    """Any optax transformation, as learning rate -> transformation.

    `factory` is an optax factory whose first argument is the learning rate (optax.sgd, optax.adam,
    or a functools.partial of one), or a ready transformation, which keeps its own learning rate.
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
    """Keeps a ready transformation (a tuple of functions) whole among static arguments."""

    def __init__(self, transformation):
        self.transformation = transformation

    def __eq__(self, other):
        return isinstance(other, _Held) and self.transformation == other.transformation

    def __hash__(self):
        return hash(self.transformation)


def _refuse_unused_rate(name, lr, default, factory):
    """Reject a learning rate that a ready transformation would ignore."""
    if default is None or not isinstance(factory, optax.GradientTransformation):
        return
    if callable(lr) or lr != default:
        checks.fail(
            "algorithm",
            "either a learning rate or a ready optax transformation, which has its own",
            f"{name}={lr!r} and a transformation",
            f"Leave {name} out, or pass the factory itself, such as optax.adam; "
            "functools.partial(optax.adam, b1=0.8) sets its other arguments.",
        )


@named("local.optimizer")
def _ready(lr, *, transformation):
    return transformation.transformation


def rate(lr, name="lr"):
    """A learning rate: a number (traced data), or a schedule of round * T + step."""
    if callable(lr):
        return lr if isinstance(lr, Fn) else Fn(lr)
    checks.require_positive("algorithm", single=True, **{name: lr})
    return checks.as_scalar(lr)


def _at(lr, step):
    return jnp.asarray(lr(step) if isinstance(lr, Fn) else lr, jnp.float32)


def rates(lr, first, steps: int):
    """The sum of the learning rates of `steps` steps from `first` on."""
    return jax.vmap(lambda s: _at(lr, s))(first + jnp.arange(steps)).sum()


def _set_clock(state, step):
    """Schedules inside a ready transformation see round * T + step, though moments start anew each
    round."""
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

    def releases(self) -> tuple:
        """What this work releases about a client's examples in one participation."""
        return (Release(self.grad.mechanism, self.batches, self.steps),)


def work(
    grad: Grad, batches: Batches, *, lr, steps: int, optimizer=optax.sgd, default_lr=0.1
) -> Work:
    """Check and collect the parts of local training.

    Args:
        default_lr: the algorithm's default of `lr`; any other is rejected beside a ready
            transformation, which has a learning rate.  None: the algorithm reads `lr` itself.
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
    _refuse_unused_rate("lr", lr, default_lr, optimizer)
    return Work(grad, batches, rate(lr), globals()["optimizer"](optimizer), steps)


def train(work: Work, ctx, keys, params, rows, correct=None, moving=1.0, drop=False, first=0):
    """Local steps from `params` -> (trained params, mean gradient, sum of learning rates,
    Diagnostics).

    Args:
        work: the steps to take.
        ctx: of the round.
        keys: of batches and of noise.
        params: where the client starts.
        rows: what it can read.
        correct: (gradient, params, step) -> gradient, after the mechanism (a drift, a proximal
            pull): post-processing of a release, as long as it reads no example.  The mean gradient
            is taken before it.
        moving: scales the updates, but not what is returned of gradients and rates: 0 only looks.
        first: the number of the first step, by which its batch and its noise are drawn: work after
            other work of the same round begins where that ended.
        drop: whether a step whose gradient is not finite has a zero gradient, and is counted among
            the rows that did.
    """
    clock = ctx.round * work.steps
    slots = rows.index.shape[0]
    gradient = work.grad
    if gradient.mechanism is not None:  # once a round, not once a step
        gradient = dataclasses.replace(
            gradient, mechanism=mech.at_round(gradient.mechanism, ctx.round)
        )
    state = _set_clock(work.optimizer(_at(work.lr, clock)).init(params), clock)

    def drawn(s):
        return draw(work.batches, keys.batch, s, rows.size, slots), jax.random.fold_in(
            keys.noise, s
        )

    # only what costs its batch and not all of the client's rows, for every client of a round
    batch: Any = work.batches.batch
    ahead = (
        work.batches.scheme in ("without_replacement", "with_replacement")
        and batch <= FLOYD
        and work.steps * batch <= AHEAD
    )

    def step(carry, at_step):
        s, draws = at_step
        w, state, mean, seen = carry
        (at, mask, overflow), key = draws if ahead else drawn(first + s)
        g, look = gradient.watched(key, w, gather(rows, at, mask), ctx)
        pytrees.refuse_other_shapes("local step", g, w)
        if drop:
            lost = ~pytrees.all_finite(g)
            g = pytrees.map(lambda x: jnp.where(lost, jnp.zeros((), x.dtype), x), g)
            look = look._replace(nonfinite=look.nonfinite + lost)
        mean = pytrees.axpy(1.0 / work.steps, g, mean)
        lr = _at(work.lr, clock + s)
        updates, state = work.optimizer(lr).update(
            g if correct is None else correct(g, w, s), state, w
        )
        seen = Diagnostics(
            seen.loss + look.loss / work.steps,
            seen.clipped + look.clipped / work.steps,
            seen.overflow + overflow,
            seen.nonfinite + look.nonfinite,
        )
        updates = (
            updates
            if isinstance(moving, float) and moving == 1.0
            else pytrees.scale(moving, updates)
        )
        return (optax.apply_updates(w, updates), state, mean, seen), lr

    nothing = Diagnostics(
        *(jnp.zeros((), kind) for kind in (jnp.float32, jnp.float32, jnp.int32, jnp.int32))
    )
    start, every = (params, state, pytrees.zeros_like(params), nothing), jnp.arange(work.steps)
    draws = jax.vmap(drawn)(first + every) if ahead else None
    with jax.named_scope("local_steps"):
        (w, _, mean, seen), rates = jax.lax.scan(step, start, (every, draws))
    return w, mean, rates.sum(), seen


def both(one: Diagnostics, other: Diagnostics) -> Diagnostics:
    """What was seen in two pieces of work: loss and clipped fraction of the first, counts of
    both."""
    return one._replace(
        overflow=one.overflow + other.overflow, nonfinite=one.nonfinite + other.nonfinite
    )


def over_steps(diagnostics: Diagnostics) -> Diagnostics:
    """Combine diagnostics stacked over steps: means of losses and clipped fractions, and counts."""
    return Diagnostics(
        diagnostics.loss.mean(),
        diagnostics.clipped.mean(),
        diagnostics.overflow.sum(),
        diagnostics.nonfinite.sum(),
    )


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
        """The server's state before the first round."""
        return Server(params, self.optimizer(_at(self.lr, 0)).init(params))

    def __call__(self, ctx, server: Server, diff) -> Server:
        pytrees.refuse_other_shapes("server step", diff, server.params)
        descent = pytrees.scale(-1.0, diff)
        updates, state = self.optimizer(_at(self.lr, ctx.round)).update(
            descent, server.optimizer, server.params
        )
        return Server(optax.apply_updates(server.params, updates), state)


def server_step(lr, optimizer_=optax.sgd, default_lr=1.0, name="server_lr") -> ServerStep:
    """The server optimizer: optax.sgd at 1.0 is plain averaging, optax.adam is FedAdam."""
    _refuse_unused_rate(name, lr, default_lr, optimizer_)
    return ServerStep(rate(lr, "server_lr"), optimizer(optimizer_))
