"""Models of other libraries as tasks: flax.linen, flax.nnx, equinox, and plain functions.

Each adapter says how its library makes parameters and calls a model on one example; `_task` does
the rest.  equinox is imported by its adapter alone.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax import nnx as flax_nnx
from flax.errors import InvalidRngError

from ..core import checks
from ..core.errors import ArgumentError
from ..core.losses import key_of
from ..core.records import Federation, Fn, Metric, Task, named
from . import frameworks, partial_training
from .targets import TARGETS, cross_entropy, loss_of, target_of

__all__ = ["equinox", "flax", "functions", "nnx"]

# What a `__call__` may take, by which training and evaluation differ -> its value in training
SWITCHES = dict(train=True, training=True, is_training=True, deterministic=False)


class Model(NamedTuple):
    """A model of one example, whatever library it was written in.

    Attributes:
        init: key -> params.
        apply: (params, x) -> output, as it is evaluated.
        training: as it is trained: (params, x) -> output, or (params, x, key) where `draws`;
            None: as it is evaluated.
        draws: whether `training` takes a key.
    """

    init: Fn
    apply: Fn
    training: Fn | None = None
    draws: bool = False


def flax(
    fed: Federation,
    module: linen.Module,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
    batched: bool | None = None,
) -> Task:
    """A flax.linen module as a task.

    A module that is written for a batch, [N, ...] to [N, ...], is called on a batch of one; a
    module that is written for one example is called without a batch axis.  Where its `__call__`
    takes `train` (or `training`, `is_training`, `deterministic`), that is set for training and for
    evaluation; where it then draws, as Dropout does, each row of each local step has a key of its
    own.

    Args:
        fed: gives the shape of a row and what a label is.
        module: from x to logits [classes], or to what `target` needs.
        target: what a label is: "class", "tokens" (y Int[T], a negative one is masked; logits
            [T, classes]), "labels" (y [labels] of 0 and 1; as many logits) or "numbers" (y as the
            output).  None: as the labels of `fed` show, "class", "tokens" or "numbers".
        trainable: which parameters are trained, as in `jfl.models.trainable`; the others stay as in
            `params`, one copy for all clients.  None: all.
        params: pretrained parameters, all or some: a pytree like the module's, or a dict of paths
            such as "Dense_0/kernel", as `jfl.models.read_params` gives; the others are drawn.
        batched: whether the module is written for a batch.  None: True if it maps batches of one
            and of two examples to as many outputs with the same parameters, unless a call without
            a batch axis gives the same outputs.

    Raises:
        ValueError: for BatchNorm, modules with other variables, or outputs of another shape; for
            GroupNorm and InstanceNorm in a module of one example, whose axis 0 they take for the
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
    flags = _switches(type(module).__call__)
    trained, evaluated = ({k: v != off for k, v in flags.items()} for off in (False, True))

    def whole(key, x):
        variables = module.init(key, x, **evaluated)
        return variables, module.apply(variables, x, **evaluated)

    example = jax.ShapeDtypeStruct(shape, dtype)
    batched, either = _takes_batches(
        where,
        lambda x: jax.eval_shape(whole, jax.random.key(0), x),
        lambda variables, x: module.apply(variables, x, **evaluated),
        example,
        batched,
    )
    given = _batch_of(example, 1) if batched else example
    try:
        with linen.intercept_methods(_reject_axis_0(where, batched or either)):
            variables, _ = jax.eval_shape(whole, jax.random.key(0), given)
    except ArgumentError:
        raise
    except Exception as error:  # of somebody's module
        frameworks.explain(where, error, f"x is {dtype}{list(shape)}")
        raise
    if "batch_stats" in variables:
        checks.fail(
            where, "a module without BatchNorm", "variables in batch_stats", frameworks.BATCH_NORM
        )
    if set(variables) != {"params"}:
        checks.fail(
            where,
            "a module with parameters, and no other variables",
            f"collections {sorted(variables)}",
            "For others use jfl.task(params, loss, predict).",
        )
    # floats are not named: the identity of a plan does not hang on a default
    tokens = {} if dtype == "float32" else dict(dtype=dtype)
    static = dict(module=module) | (dict(flags=_items(evaluated)) if flags else {})
    model = Model(
        Fn(_init, static=dict(static, shape=given.shape, **tokens)), Fn(_predict, static=static)
    )
    if flags:
        static = dict(module=module, flags=_items(trained))
        draws = _draws(lambda v, x: module.apply(v, x, **trained), variables, given)
        training = Fn(_predict_drawing if draws else _predict, static=static)
        model = model._replace(training=training, draws=draws)
    model = _on_batches_of_one(model) if batched else model
    return _task(where, fed, model, target, trainable, params)


def _batch_of(x, examples: int) -> jax.ShapeDtypeStruct:
    """The shape of a batch of examples of shape `x`."""
    return jax.ShapeDtypeStruct((examples, *x.shape), x.dtype)


def _takes_batches(where, trace, apply, x, batched: bool | None) -> tuple[bool, bool]:
    """Whether to call a model on a batch of one, and whether the other call gives the same.

    Args:
        where: the function that was called, for errors.
        trace: shape of an input -> shapes of (parameters, output); raises if the model cannot take
            such an input.
        apply: (parameters, input) -> output.
        x: shape of one example.
        batched: what the user says; None: to be found out.
    """
    checks.require_one_of(where, (True, False, None), batched=batched)
    if batched is not None:
        return bool(batched), False

    def traced(x):
        try:
            params, output = trace(x)
        except Exception:  # of somebody's module, on an input that it may not be written for
            return None
        shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
        return params, shapes, getattr(output, "shape", None)

    one, two = (traced(_batch_of(x, n)) for n in (1, 2))
    if one is None or two is None or one[1] != two[1] or not one[2] or not two[2]:
        return False, False
    if (one[2][0], two[2][0]) != (1, 2) or one[2][1:] != two[2][1:]:
        return False, False
    alone = traced(x)
    if alone is None or alone[1:] != (one[1], one[2][1:]):
        return True, False
    either, mixes = _compare_outputs(apply, one[0], x)
    return not (either or mixes), either


def _compare_outputs(apply, params, x) -> tuple[bool, bool]:
    """Whether a model gives the same output without a batch axis, and whether it mixes the rows of
    a batch, at drawn parameters."""
    draw = np.random.default_rng(0).normal

    def weights(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.zeros(leaf.shape, leaf.dtype)
        fan_in = max(1, leaf.size // max(1, leaf.shape[-1] if leaf.shape else 1))
        return jnp.asarray(draw(size=leaf.shape) / fan_in**0.5, leaf.dtype)

    tokens = not jnp.issubdtype(x.dtype, jnp.floating)

    def rows(size):
        return np.arange(np.prod(size)).reshape(size) % 2 if tokens else draw(size=size)

    @jax.jit
    def outputs(params, pair):
        return apply(params, pair[0]), apply(params, pair[:1])[0], apply(params, pair)[0]

    pair = jnp.asarray(rows((2, *x.shape)), x.dtype)
    alone, of_one, of_two = outputs(jax.tree.map(weights, params), pair)
    equal = lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
    return equal(alone, of_one), not equal(of_one, of_two)


def _reject_axis_0(where, allowed: bool):
    """An interceptor of linen that rejects layers that take axis 0 of an example for the batch."""

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


def _on_batches_of_one(model: Model) -> Model:
    """A model of one example from one that takes batches."""
    one = lambda apply: None if apply is None else Fn(_on_batch_of_one, dict(apply=apply))
    return model._replace(apply=one(model.apply), training=one(model.training))


@named("models.on_batch_of_one")
def _on_batch_of_one(params, x, *key, apply):
    return apply(params, x[None], *key)[0]


def _switches(call) -> dict:
    """The switches between training and evaluation that a function takes, as in training."""
    names = inspect.signature(call).parameters
    return {name: value for name, value in SWITCHES.items() if name in names}


def _items(switches: dict) -> tuple:
    return tuple(sorted(switches.items()))


def _draws(call, variables, x) -> bool:
    """Whether a module asks for a random key that it was not given."""
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


# --- flax.nnx


def nnx(
    fed: Federation,
    model: flax_nnx.Module | Callable,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
    batched: bool | None = None,
) -> Task:
    """A flax.nnx model as a task.

    It is called on a batch of one or on one example, as in `jfl.models.flax`: in `train()` mode by
    local steps, in `eval()` mode by evaluations.  The model itself stays as it is.

    Args:
        model: a model, whose parameters every run starts from; or a function rngs -> model, which
            draws them from the seed of a run.
        fed, target, trainable, params, batched: as in `jfl.models.flax`; paths are such as
            "layer/kernel", and LoRA layers are trained by trainable="*lora*".

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
    if not fixed and not callable(model):
        checks.fail(
            where, "a flax.nnx model, or a function rngs -> model", checks.short_repr(model)
        )
    make = (lambda: flax_nnx.clone(model)) if fixed else (lambda: model(flax_nnx.Rngs(0)))
    made = make()
    if not isinstance(made, flax_nnx.Module):
        checks.fail(where, "a flax.nnx model, or a function rngs -> model", checks.short_repr(made))
    if jax.tree.leaves(flax_nnx.state(made, flax_nnx.BatchStat)):
        checks.fail(
            where, "a model without BatchNorm", "variables in BatchStat", frameworks.BATCH_NORM
        )
    parts = {}
    for name, switch in (("evaluated", "eval"), ("trained", "train")):
        one = make()
        getattr(one, switch)()
        graph, weights, keys, rest = flax_nnx.split(one, flax_nnx.Param, flax_nnx.RngKey, ...)
        held = dict(rest=rest), dict(graph=graph, keys=jax.tree.structure(keys))
        parts[name] = weights, len(jax.tree.leaves(keys)), held
    weights, streams, (data, static) = parts["evaluated"]
    if fixed:
        init = Fn(_held_params, dict(params=weights))
    else:
        init = Fn(_nnx_init, static=dict(make=model))
    apply = Fn(_nnx, data, static)
    _, _, in_training = parts["trained"]
    made = Model(init, apply)
    if static["graph"] != in_training[1]["graph"]:  # else nothing differs in training
        training = Fn(_nnx_drawing if streams else _nnx, *in_training)
        made = Model(init, apply, training, draws=streams > 0)
    example = jax.ShapeDtypeStruct(tuple(fed.x.shape[1:]), fed.x.dtype)
    shapes = jax.eval_shape(init, jax.random.key(0))
    batched, either = _takes_batches(
        where, lambda x: (shapes, jax.eval_shape(apply, shapes, x)), apply, example, batched
    )
    whole: Any = make()
    norms = [
        node
        for _, node in flax_nnx.iter_modules(whole)
        if isinstance(node, flax_nnx.InstanceNorm)
        or (isinstance(node, flax_nnx.GroupNorm) and node.reduction_axes is None)
    ]
    if norms and not (batched or either):
        _reject_norm(where, type(norms[0]).__name__, "")
    made = _on_batches_of_one(made) if batched else made
    return _task(where, fed, made, target, trainable, params)


@named("models.held_params")
def _held_params(key, *, params):
    return params


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


# --- equinox


def equinox(
    fed: Federation,
    model: Any,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
) -> Task:
    """An equinox model as a task.

    It is called on one example.  Where its `__call__` takes `key`, local steps give one;
    evaluations call it in inference mode.  All arrays of floats are trained, everything else stays.

    Args:
        model: an equinox module, whose arrays every run starts from; or a function key -> module,
            which draws them from the seed of a run.
        fed, target, trainable, params: as in `jfl.models.flax`; paths are such as
            "layers/0/weight".

    Returns:
        A task whose parameters are the module with None in the place of all else:
        `eqx.combine(out.params, model)` is the trained model.

    Raises:
        ValueError: as in `jfl.models.flax`; without equinox.
    """
    where = "models.equinox"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    try:
        import equinox as eqx
    except ImportError:
        checks.fail(where, "equinox", "no such package", "pip install equinox")
    fixed = isinstance(model, eqx.Module)
    if not fixed and not callable(model):
        checks.fail(
            where, "an equinox module, or a function key -> module", checks.short_repr(model)
        )
    made = model if fixed else model(jax.random.key(0))
    if not isinstance(made, eqx.Module):
        checks.fail(
            where, "an equinox module, or a function key -> module", checks.short_repr(made)
        )
    if any(isinstance(n, eqx.nn.BatchNorm) for n in _modules(made, eqx)):
        checks.fail(where, "a model without BatchNorm", "equinox.nn.BatchNorm", BATCH_NORM_EQX)
    key = inspect.signature(type(made).__call__).parameters.get("key")
    trained, evaluated = (_divided(m, eqx) for m in (made, eqx.nn.inference_mode(made)))
    weights = trained[0]
    init = (
        Fn(_held_params, dict(params=weights)) if fixed else Fn(_eqx_init, static=dict(make=model))
    )
    needs_key = key is not None and key.default is inspect.Parameter.empty
    apply = Fn(_eqx, dict(arrays=evaluated[1]), dict(rest=_Same(evaluated[2]), needs_key=needs_key))
    training = None
    if key is not None:
        training = Fn(_eqx_drawing, dict(arrays=trained[1]), dict(rest=_Same(trained[2])))
    made = Model(init, apply, training, draws=key is not None)
    return _task(where, fed, made, target, trainable, params)


BATCH_NORM_EQX = (
    "BatchNorm mixes the examples of a batch: an example has no gradient of its own, so clipping "
    "it would bound nothing. Use equinox.nn.GroupNorm or equinox.nn.LayerNorm."
)


def _modules(model, eqx) -> list:
    """All modules in a module."""
    found, todo = [], [model]
    while todo:
        node = todo.pop()
        is_inner = lambda n, node=node: n is not node and isinstance(n, eqx.Module)
        found.append(node)
        todo += [n for n in jax.tree.leaves(node, is_leaf=is_inner) if isinstance(n, eqx.Module)]
    return found


def _divided(model, eqx) -> tuple:
    """What is trained, other arrays, everything else."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    return weights, *eqx.partition(rest, eqx.is_array)


class _Same:
    """A pytree without arrays, among static arguments: equal where its leaves and structure are."""

    def __init__(self, value):
        self.value = value
        leaves, structure = jax.tree.flatten(value)
        self._parts = tuple(leaves), structure

    def __eq__(self, other):
        return isinstance(other, _Same) and self._parts == other._parts

    def __hash__(self):
        return hash(self._parts)


@named("models.equinox_init")
def _eqx_init(key, *, make):
    import equinox as eqx

    return eqx.partition(make(key), eqx.is_inexact_array)[0]


@named("models.equinox")
def _eqx(params, x, *, arrays, rest, needs_key):
    import equinox as eqx

    extra = dict(key=key_of(0)) if needs_key else {}
    return eqx.combine(params, arrays, rest.value)(x, **extra)


@named("models.equinox_drawing")
def _eqx_drawing(params, x, key, *, arrays, rest):
    import equinox as eqx

    return eqx.combine(params, arrays, rest.value)(x, key=key)


# --- plain functions


def functions(
    fed: Federation,
    init: Callable,
    apply: Callable,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
) -> Task:
    """A pair of pure functions as a task: of haiku's `transform`, say, or your own.

    Args:
        init: key -> params; or (key, x) -> params, of one example.
        apply: (params, x) -> output, of one example.  It may take `key` (or `rng`), which local
            steps give, and `train` (or `training`, `is_training`, `deterministic`), which is set
            for training and for evaluation.  A key without such a switch is given in training
            alone, and None in evaluations.
        fed, target, trainable, params: as in `jfl.models.flax`.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = functions(fed, lambda key: jnp.zeros((64, 10)), lambda w, x: x.reshape(-1) @ w)
        >>> task.predict(task.init(jax.random.key(0)), fed.x[0]).shape
        (10,)
    """
    where = "models.functions"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    for name, value, form in (
        ("init", init, "key -> params"),
        ("apply", apply, "(params, x) -> output"),
    ):
        if not callable(value):
            checks.fail(where, f"{name}, a pure function {form}", checks.short_repr(value))
        frameworks.function(where, name, value, form)
    names = inspect.signature(apply).parameters
    key = next((n for n in ("key", "rng") if n in names), None)
    flags = _switches(apply)
    trained, evaluated = (_items({k: v != off for k, v in flags.items()}) for off in (False, True))
    example = jax.ShapeDtypeStruct(fed.x.shape[1:], fed.x.dtype)
    takes_x = len(inspect.signature(init).parameters) > 1
    # bound in `static`: its own closure and source are part of the identity
    static = dict(apply=apply, key=key)
    model = Model(
        Fn(_given_x, static=dict(init=init, shape=example.shape, dtype=str(example.dtype)))
        if takes_x
        else Fn(init),
        Fn(_applied, static=dict(static, flags=evaluated)),
    )
    if key is not None or flags:
        training = Fn(_applied_drawing if key else _applied, static=dict(static, flags=trained))
        model = model._replace(training=training, draws=key is not None)
    return _task(where, fed, model, target, trainable, params)


@named("models.given_x")
def _given_x(key, *, init, shape, dtype):
    return init(key, jnp.zeros(shape, dtype))


@named("models.applied")
def _applied(params, x, *, apply, key, flags):
    return _call(apply, params, x, None, key, flags)


@named("models.applied_drawing")
def _applied_drawing(params, x, drawn, *, apply, key, flags):
    return _call(apply, params, x, drawn, key, flags)


def _call(apply, params, x, drawn, key, flags):
    """apply with its key and its switches by name, and params and x in the places that remain."""
    given = dict(flags) | ({key: drawn} if key else {})
    free = [n for n in inspect.signature(apply).parameters if n not in given][:2]
    return apply(**dict(zip(free, (params, x), strict=True)), **given)


# --- what all have in common


def _task(where, fed, model: Model, target, trainable, params) -> Task:
    target = target_of(where, fed, target)
    kind = TARGETS[target]
    checked = lambda key: frameworks.parameters(where, model.init(key))
    shape = jax.eval_shape(checked, jax.random.key(0))
    x = jax.ShapeDtypeStruct(fed.x.shape[1:], fed.x.dtype)
    try:
        output = jax.eval_shape(model.apply, shape, x)
    except Exception as error:  # of somebody's model
        frameworks.explain(where, error, f"x is {x.dtype}{list(x.shape)}")
        error.add_note(f"In {where}, of one example, whose x is {x.dtype}{list(x.shape)}.")
        raise
    wanted = kind.shape(fed.classes, tuple(fed.y.shape[1:]))
    got = getattr(output, "shape", None)
    if got != wanted:
        checks.fail(
            where,
            f"a model from one example {tuple(x.shape)} to {list(wanted)}, for {kind.words}",
            f"{list(got) if got is not None else checks.short_repr(output)}",
            "It is called on one example; a module of flax that is written for a batch, on a "
            "batch of one.",
        )
    made = _as_task(model, target)
    if params is None and trainable is None:
        return made
    return partial_training.trainable(made, trainable, params, where=where)


def _as_task(model: Model, target: str) -> Task:
    plain = model.apply.function is _predict and "flags" not in model.apply.static
    if target == "class" and plain:
        loss, evaluation = Fn(_cross_entropy, static=model.apply.static), None
    else:
        facts = dict(target=target)
        of = lambda apply: Fn(_loss, dict(apply=apply), facts)
        evaluation = None if model.training is None else of(model.apply)
        loss = of(model.apply)
        if model.training is not None:
            loss = Fn(_drawing_loss if model.draws else _loss, dict(apply=model.training), facts)
    metrics = {
        name: Metric(
            Fn(_watched, dict(apply=model.apply), dict(target=target, name=name)),
            Fn(_finished, static=dict(target=target, name=name)),
        )
        for name in TARGETS[target].metrics
    }
    return Task(model.init, loss, model.apply, evaluation, metrics or None, target)


@named("models.loss")
def _loss(params, x, y, *, apply, target):
    return loss_of(apply(params, x), y, target)


@named("models.drawing_loss")
def _drawing_loss(params, x, y, key, *, apply, target):
    return loss_of(apply(params, x, key), y, target)


@named("models.watched")
def _watched(params, x, y, *, apply, target, name):
    return TARGETS[target].metrics[name][0](apply(params, x), y)


@named("models.finished")
def _finished(mean, *, target, name):
    return TARGETS[target].metrics[name][1](mean)
