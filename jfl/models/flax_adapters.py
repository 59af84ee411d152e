"""Adapters of flax.linen modules and flax.nnx models."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax import nnx as flax_nnx
from flax.errors import InvalidRngError

from ..core import checks
from ..core.random_streams import as_kernel_key
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
    traced_once,
)
from .losses import key_of
from .targets import cross_entropy, target_of

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

    jfl calls a module on one example. A module that is written for batches, [N, ...] to [N, ...],
    is called on a batch of one. If its `__call__` takes `train` (or `training`, `is_training`,
    `deterministic`), jfl sets this argument for training and for evaluation. If the module draws
    random numbers in training, as Dropout does, each row of each local step has a separate key.

    Args:
        fed: the federation, which determines the shape of a row and the kind of labels.
        module: a module that maps x to logits [classes], or to the output that `target` needs.
        target: the kind of labels: "class" (logits [classes]), "tokens" (y Int[T], of which
            negative ones are masked; logits [T, classes]), "labels" (y [k] of 0 and 1; k logits) or
            "numbers" (an output with the shape of y). None chooses "class", "tokens" or "numbers"
            from the labels of `fed`.
        trainable: the parameters to train, as `which` in `jfl.models.trainable`. The others keep
            the values in `params`, in one copy for all clients. None trains all parameters.
        params: pretrained values of all or some parameters: a pytree like the module's, or a dict
            from paths such as "Dense_0/kernel" to arrays, as returned by `jfl.models.read_params`.
            The other parameters are initialized at random.
        batched: whether the module is written for batches. None lets jfl decide: the module is
            written for batches if it maps batches of one and of two examples to outputs with one
            and two rows, with the same parameters, and if a call on a single example fails or gives
            another output.

    Raises:
        ValueError: for BatchNorm, for modules with variables other than parameters, and for outputs
            of the wrong shape; also for GroupNorm and InstanceNorm in a module that is written for
            one example, because they treat axis 0 as the batch.

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
    target = target_of(where, fed, target)
    trained, evaluated = find_switches(type(module).__call__)
    apply = lambda variables, x, flags=evaluated: _call_linen(
        variables, x, None, module=module, flags=flags
    )

    def init_and_apply(key, x):
        variables = module.init(key, x, **dict(evaluated))
        return variables, apply(variables, x)

    example = jax.ShapeDtypeStruct(shape, dtype)
    trace = lambda x: jax.eval_shape(init_and_apply, jax.random.key(0), x)
    batched, either_works = takes_batches(where, trace, apply, example, batched)
    module_input = batch_shape(example, 1) if batched else example
    try:
        with linen.intercept_methods(_reject_axis_0(where, batched or either_works)):
            variables, _ = trace(module_input)
    except Exception as error:  # raised by a user's module
        frameworks.explain(where, error, f"x is {dtype}{list(shape)}")
        raise
    if set(variables) != {"params"}:
        checks.fail(
            where,
            "a module with parameters, and no other variables",
            f"collections {sorted(variables)}",
            frameworks.BATCH_NORM if "batch_stats" in variables else "For others use jfl.task.",
        )
    # Leave out the default dtype, so that the identity of a plan does not depend on it.
    other_dtype = {} if dtype == "float32" else dict(dtype=dtype)
    static = dict(module=module) | (dict(flags=evaluated) if evaluated else {})
    init = Fn(_init, static=dict(static, shape=module_input.shape, **other_dtype))
    model = Model(init, Fn(_predict, static=static))
    if trained:
        draws = _draws(functools.partial(apply, flags=trained), variables, module_input)
        form = _predict_drawing if draws else _predict
        training = Fn(form, static=dict(module=module, flags=trained))
        model = model._replace(training=training, draws=draws)
    if batched:
        model = on_batches_of_one(model)
    elif not trained:
        model = model._replace(class_loss=Fn(_cross_entropy, static=static))
    return build_task(where, fed, model, target, trainable, params)


def _reject_axis_0(where, allowed: bool):
    """Return an interceptor of flax that rejects layers which treat axis 0 as the batch.

    Args:
        where: the function that was called, for messages.
        allowed: whether axis 0 is the batch, so that nothing is rejected.
    """

    def call(next_call, args, kwargs, context):
        layer = context.module
        is_norm = isinstance(layer, linen.InstanceNorm) or (
            isinstance(layer, linen.GroupNorm) and layer.reduction_axes is None
        )
        x: Any = args[0] if args else None
        if not allowed and is_norm and context.method_name == "__call__" and jnp.ndim(x) > 1:
            _reject_norm(where, f"{type(layer).__name__} of {list(jnp.shape(x))}")
        return next_call(*args, **kwargs)

    return call


def _reject_norm(where, layer: str, axes=", or give GroupNorm reduction_axes=(-3, -2, -1)"):
    """Reject a layer that treats axis 0 as the batch; `axes` is a further remedy."""
    checks.fail(
        where,
        "a module for batches, [N, ...] to [N, ...], if it has GroupNorm or InstanceNorm, which "
        "treat axis 0 as the batch",
        f"a module for one example with {layer}",
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
    # The key of a run is of this kind, so all calls share one trace.
    key = as_kernel_key(key)
    return _init_linen(key, module=module, shape=shape, dtype=dtype, flags=flags)


@traced_once
def _init_linen(key, *, module, shape, dtype, flags):
    return module.init(key, jnp.zeros(shape, dtype), **dict(flags))["params"]


@named("models.predict")
def _predict(params, x, *, module, flags=()):
    return _call_linen({"params": params}, x, None, module=module, flags=flags)


@named("models.predict_drawing")
def _predict_drawing(params, x, key, *, module, flags):
    # flax uses the stream "params" for a stream that is not passed.
    streams = {"params": key, "dropout": jax.random.fold_in(key, 1)}
    return _call_linen({"params": params}, x, streams, module=module, flags=flags)


@traced_once
def _call_linen(variables, x, streams, *, module, flags):
    return module.apply(variables, x, rngs=streams, **dict(flags))


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

    The model is called on a batch of one or on one example, as in `jfl.models.flax`. Local steps
    call it in `train()` mode, and evaluations in `eval()` mode. The object itself does not change.

    Args:
        model: a model, whose parameters are the initial parameters of every run; or a function
            rngs -> model, whose rngs are derived from the seed of a run.
        fed, target, trainable, params, batched: as in `jfl.models.flax`. An example of a path is
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
        """Return the model in a mode, its weights, and the data and static arguments of `_nnx`."""
        instance = model(flax_nnx.Rngs(0)) if callable(model) and not fixed else model
        if not isinstance(instance, flax_nnx.Module):
            actual = checks.short_repr(instance)
            checks.fail(where, "a flax.nnx model, or a function rngs -> model", actual)
        if jax.tree.leaves(flax_nnx.state(instance, flax_nnx.BatchStat)):
            actual = "variables in BatchStat"
            checks.fail(where, "a model without BatchNorm", actual, frameworks.BATCH_NORM)
        instance = flax_nnx.clone(instance)
        getattr(instance, switch)()
        graph, weights, keys, rest = flax_nnx.split(instance, flax_nnx.Param, flax_nnx.RngKey, ...)
        static: dict[str, Any] = dict(graph=graph, keys=jax.tree.structure(keys))
        return instance, weights, dict(rest=rest), static

    instance, weights, *evaluated = split("eval")
    trained = split("train")[2:]
    init = (
        Fn(held_params, dict(params=weights)) if fixed else Fn(_nnx_init, static=dict(make=model))
    )
    apply = Fn(_nnx, *evaluated)
    adapted = Model(init, apply)
    static: Any = evaluated[1]
    if static["graph"] != trained[1]["graph"]:  # otherwise training does not differ
        draws = static["keys"].num_leaves > 0
        adapted = Model(init, apply, Fn(_nnx_drawing if draws else _nnx, *trained), draws)
    example = jax.ShapeDtypeStruct(tuple(fed.x.shape[1:]), fed.x.dtype)
    shapes = jax.eval_shape(init, jax.random.key(0))
    batched, either_works = takes_batches(
        where, lambda x: (shapes, jax.eval_shape(apply, shapes, x)), apply, example, batched
    )
    norms = [
        type(layer).__name__
        for _, layer in flax_nnx.iter_modules(instance)
        if isinstance(layer, flax_nnx.InstanceNorm)
        or (isinstance(layer, flax_nnx.GroupNorm) and layer.reduction_axes is None)
    ]
    if norms and not (batched or either_works):
        _reject_norm(where, norms[0], "")
    adapted = on_batches_of_one(adapted) if batched else adapted
    return build_task(where, fed, adapted, target, trainable, params)


@named("models.nnx_init")
def _nnx_init(key, *, make):
    return flax_nnx.state(make(flax_nnx.Rngs(key)), flax_nnx.Param)


@named("models.nnx")
def _nnx(params, x, *, rest, graph, keys):
    return _nnx_drawing(params, x, key_of(0), rest=rest, graph=graph, keys=keys)


@named("models.nnx_drawing")
def _nnx_drawing(params, x, key, *, rest, graph, keys):
    return _call_nnx(params, x, key, rest, graph=graph, keys=keys)


@traced_once
def _call_nnx(params, x, key, rest, *, graph, keys):
    streams = [jax.random.fold_in(key, i) for i in range(keys.num_leaves)]
    return flax_nnx.merge(graph, params, jax.tree.unflatten(keys, streams), rest)(x)
