"""Adapters of flax.linen modules and flax.nnx models."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax import nnx as flax_nnx
from flax.errors import InvalidRngError

from ..core import checks
from ..core.records import Federation, Fn, Task, named
from . import frameworks
from .adapters import (
    Model,
    batch_shape,
    build_task,
    find_switches,
    held_params,
    on_batches_of_one,
    takes_batches,
)
from .losses import key_of
from .targets import cross_entropy

__all__ = ["flax", "nnx"]


def flax(
    fed: Federation,
    module: linen.Module,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
    batched: bool | None = None,
) -> Task:
    """Return a task from a flax.linen module.

    A module that is written for a batch, [N, ...] to [N, ...], is called on a batch of one; a
    module that is written for one example is called without a batch axis. If its `__call__` takes
    `train` (or `training`, `is_training`, `deterministic`), jfl sets it for training and for
    evaluation. If the module draws random numbers in training, as Dropout does, each row of each
    local step has a separate key.

    Args:
        fed: the federation, which determines the shape of a row and the kind of labels.
        module: a module from x to logits [classes], or to the output that `target` needs.
        target: the kind of labels: "class", "tokens" (y Int[T], negative ones are masked; logits
            [T, classes]), "labels" (y [labels] of 0 and 1; the same number of logits) or "numbers"
            (y has the shape of the output). None chooses "class", "tokens" or "numbers" by the
            labels of `fed`.
        trainable: which parameters are trained, as in `jfl.models.trainable`; the others stay as in
            `params`, in one copy for all clients. None means all.
        params: pretrained parameters, all or some: a pytree like the module's, or a dict of paths
            such as "Dense_0/kernel", as returned by `jfl.models.read_params`. The others are drawn.
        batched: whether the module is written for a batch. None means True if, with the same
            parameters, it maps batches of one and of two examples to outputs of one and two rows,
            unless a call without a batch axis gives the same outputs.

    Raises:
        ValueError: for BatchNorm, modules with other variables, or outputs of another shape; for
            GroupNorm and InstanceNorm in a module of one example, because they take axis 0 for the
            batch.

    Example:
        >>> import jfl
        >>> class Net(linen.Module):
        ...     @linen.compact
        ...     def __call__(self, x, train):
        ...         x = linen.relu(linen.Dense(16)(x.reshape(-1)))
        ...         return linen.Dense(10)(linen.Dropout(0.2, deterministic=not train)(x))
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> sorted(flax(fed, Net()).init(jax.random.key(0)))
        ['Dense_0', 'Dense_1']
    """
    where = "models.flax"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    if not isinstance(module, linen.Module):
        checks.fail(
            where,
            "a flax.linen module",
            checks.short_repr(module),
            "For others see jfl.models.nnx, .equinox and .functions, or jfl.task.",
        )
    shape, dtype = tuple(fed.x.shape[1:]), str(fed.x.dtype)
    trained, evaluated = find_switches(type(module).__call__)
    apply = lambda variables, x: module.apply(variables, x, **dict(evaluated))

    def whole(key, x):
        variables = module.init(key, x, **dict(evaluated))
        return variables, apply(variables, x)

    example = jax.ShapeDtypeStruct(shape, dtype)
    trace = lambda x: jax.eval_shape(whole, jax.random.key(0), x)
    batched, either = takes_batches(where, trace, apply, example, batched)
    given = batch_shape(example, 1) if batched else example
    try:
        with linen.intercept_methods(_reject_axis_0(where, batched or either)):
            variables, _ = trace(given)
    except Exception as error:  # of somebody's module
        frameworks.explain(where, error, f"x is {dtype}{list(shape)}")
        raise
    if set(variables) != {"params"}:
        checks.fail(
            where,
            "a module with parameters, and no other variables",
            f"collections {sorted(variables)}",
            frameworks.BATCH_NORM if "batch_stats" in variables else "For others use jfl.task.",
        )
    # floats are not named: the identity of a plan does not hang on a default
    tokens = {} if dtype == "float32" else dict(dtype=dtype)
    static = dict(module=module) | (dict(flags=evaluated) if evaluated else {})
    init = Fn(_init, static=dict(static, shape=given.shape, **tokens))
    model = Model(init, Fn(_predict, static=static))
    if trained:
        draws = _draws(lambda v, x: module.apply(v, x, **dict(trained)), variables, given)
        form = _predict_drawing if draws else _predict
        training = Fn(form, static=dict(module=module, flags=trained))
        model = model._replace(training=training, draws=draws)
    if batched:
        model = on_batches_of_one(model)
    elif not trained:
        model = model._replace(class_loss=Fn(_cross_entropy, static=static))
    return build_task(where, fed, model, target, trainable, params)


def _reject_axis_0(where, allowed: bool):
    """Return an interceptor that rejects layers which take axis 0 of an example for the batch."""

    def call(next_call, args, kwargs, context):
        layer = context.module
        takes = isinstance(layer, linen.InstanceNorm) or (
            isinstance(layer, linen.GroupNorm) and layer.reduction_axes is None
        )
        x: Any = args[0] if args else None
        if not allowed and takes and context.method_name == "__call__" and jnp.ndim(x) > 1:
            _reject_norm(where, f"{type(layer).__name__} of {list(jnp.shape(x))}")
        return next_call(*args, **kwargs)

    return call


def _reject_norm(where, got: str, axes=", or give GroupNorm reduction_axes=(-3, -2, -1)"):
    checks.fail(
        where,
        "a module for a batch, [N, ...] to [N, ...], around GroupNorm and InstanceNorm, which take "
        "axis 0 for the batch",
        f"a module for one example with {got}",
        f"Write x.mean((1, 2)) and x.reshape(len(x), -1){axes}.",
    )


def _draws(call, variables, x) -> bool:
    """Return whether a module asks for a random key that it was not given."""
    try:
        jax.eval_shape(call, variables, x)
    except InvalidRngError:
        return True
    return False


@named("models.init")
def _init(key, *, module, shape, dtype="float32", flags=()):
    return module.init(key, jnp.zeros(shape, dtype), **dict(flags))["params"]


@named("models.predict")
def _predict(params, x, *, module, flags=()):
    return module.apply({"params": params}, x, **dict(flags))


@named("models.predict_drawing")
def _predict_drawing(params, x, key, *, module, flags):
    # a stream that is not named falls back to "params"
    streams = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    return module.apply({"params": params}, x, rngs=streams, **dict(flags))


@named("models.cross_entropy")
def _cross_entropy(params, x, y, *, module):
    return cross_entropy(_predict(params, x, module=module), y)


def nnx(
    fed: Federation,
    model: flax_nnx.Module | Callable,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
    batched: bool | None = None,
) -> Task:
    """Return a task from a flax.nnx model.

    The model is called on a batch of one or on one example, as in `jfl.models.flax`: in `train()`
    mode by local steps, and in `eval()` mode by evaluations. The model itself does not change.

    Args:
        model: a model, whose parameters every run starts from; or a function rngs -> model, which
            draws them from the seed of a run.
        fed, target, trainable, params, batched: as in `jfl.models.flax`. Paths are such as
            "layer/kernel", and trainable="*lora*" trains LoRA layers.

    Raises:
        ValueError: as in `jfl.models.flax`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.adult(), jfl.partition.iid(10))  # doctest: +SKIP
        >>> nnx(fed, lambda rngs: flax_nnx.Linear(105, 2, rngs=rngs))  # doctest: +SKIP
    """
    where = "models.nnx"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    fixed = isinstance(model, flax_nnx.Module)

    def split(switch):
        """Return weights, and the other arrays and everything else as arguments of `_nnx`."""
        made = model(flax_nnx.Rngs(0)) if callable(model) and not fixed else model
        if not isinstance(made, flax_nnx.Module):
            got = checks.short_repr(made)
            checks.fail(where, "a flax.nnx model, or a function rngs -> model", got)
        if jax.tree.leaves(flax_nnx.state(made, flax_nnx.BatchStat)):
            got = "variables in BatchStat"
            checks.fail(where, "a model without BatchNorm", got, frameworks.BATCH_NORM)
        made = flax_nnx.clone(made)
        getattr(made, switch)()
        graph, weights, keys, rest = flax_nnx.split(made, flax_nnx.Param, flax_nnx.RngKey, ...)
        static: dict[str, Any] = dict(graph=graph, keys=jax.tree.structure(keys))
        return made, weights, dict(rest=rest), static

    whole, weights, *evaluated = split("eval")
    trained = split("train")[2:]
    init = (
        Fn(held_params, dict(params=weights)) if fixed else Fn(_nnx_init, static=dict(make=model))
    )
    apply = Fn(_nnx, *evaluated)
    made = Model(init, apply)
    static: Any = evaluated[1]
    if static["graph"] != trained[1]["graph"]:  # else nothing differs in training
        draws = static["keys"].num_leaves > 0
        made = Model(init, apply, Fn(_nnx_drawing if draws else _nnx, *trained), draws)
    example = jax.ShapeDtypeStruct(tuple(fed.x.shape[1:]), fed.x.dtype)
    shapes = jax.eval_shape(init, jax.random.key(0))
    batched, either = takes_batches(
        where, lambda x: (shapes, jax.eval_shape(apply, shapes, x)), apply, example, batched
    )
    norms = [
        type(layer).__name__
        for _, layer in flax_nnx.iter_modules(whole)
        if isinstance(layer, flax_nnx.InstanceNorm)
        or (isinstance(layer, flax_nnx.GroupNorm) and layer.reduction_axes is None)
    ]
    if norms and not (batched or either):
        _reject_norm(where, norms[0], "")
    made = on_batches_of_one(made) if batched else made
    return build_task(where, fed, made, target, trainable, params)


@named("models.nnx_init")
def _nnx_init(key, *, make):
    return flax_nnx.state(make(flax_nnx.Rngs(key)), flax_nnx.Param)


@named("models.nnx")
def _nnx(params, x, *, rest, graph, keys):
    return _nnx_drawing(params, x, key_of(0), rest=rest, graph=graph, keys=keys)


@named("models.nnx_drawing")
def _nnx_drawing(params, x, key, *, rest, graph, keys):
    streams = [jax.random.fold_in(key, i) for i in range(keys.num_leaves)]
    return flax_nnx.merge(graph, params, jax.tree.unflatten(keys, streams), rest)(x)
