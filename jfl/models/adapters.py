"""The protocol of model adapters, and the adapter of plain functions.

An adapter turns a model of some library into a `Model`: functions that draw parameters, and that
apply the model to one example. `build_task` turns a `Model` into a Task. Other adapters are in
flax_adapters.py and equinox_adapter.py.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.records import Federation, Fn, Metric, Task, named
from . import fine_tuning, frameworks
from .targets import TARGETS, loss_of, target_of

__all__ = ["functions"]

# Arguments of a model that switch between training and evaluation, and their values in training.
SWITCHES = dict(train=True, training=True, is_training=True, deterministic=False)


def traced_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate an adapter's function that calls a model, so that JAX traces the model only once.

    Losses, predictions and metrics of a run call a model with the same shapes, and tracing a large
    model takes seconds.  The equations of the model become part of the caller, as without this
    decorator.

    Args:
        function: a module-level function.  Its positional arguments are arrays, and its keyword
            arguments are static.
    """

    @functools.wraps(function)
    def call(*arrays, **static):
        return _call_inline(Fn(function, static=static), *arrays)

    return call


@functools.partial(jax.jit, inline=True)
def _call_inline(bound, *arrays):
    return bound(*arrays)


class Model(NamedTuple):
    """A model from any library, as functions of one example.

    Attributes:
        init: key -> params.
        apply: (params, x) -> output, in evaluation.
        training: like `apply`, in training; it takes (params, x, key) if `draws`. None means that
            training does not differ from evaluation.
        draws: whether `training` takes a key.
        class_loss: (params, x, y) -> loss, for class labels. None means that the loss is computed
            from the output of `apply`.
    """

    init: Fn
    apply: Fn
    training: Fn | None = None
    draws: bool = False
    class_loss: Fn | None = None


def functions(
    fed: Federation,
    init: Callable,
    apply: Callable,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
) -> Task:
    """Return a task from two pure functions, such as those of haiku's `transform`.

    Args:
        init: a function key -> params, or (key, x) -> params with one example x.
        apply: a function (params, x) -> output of one example. It may also take `key` (or `rng`),
            which is None in evaluations, and `train` (or `training`, `is_training`,
            `deterministic`), which jfl sets for training and for evaluation.
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
    frameworks.function(where, "init", init, "key -> params")
    frameworks.function(where, "apply", apply, "(params, x) -> output")
    names = inspect.signature(apply).parameters
    key = next((n for n in ("key", "rng") if n in names), None)
    trained, evaluated = find_switches(apply)
    # bound in `static`: its own closure and source are part of the identity
    static = dict(apply=apply, key=key)
    draw = Fn(init)
    if len(inspect.signature(init).parameters) > 1:
        shape = dict(shape=tuple(fed.x.shape[1:]), dtype=str(fed.x.dtype))
        draw = Fn(_given_x, static=dict(init=init, **shape))
    model = Model(draw, Fn(_applied, static=dict(static, flags=evaluated)))
    if key is not None or trained:
        training = Fn(_applied_drawing if key else _applied, static=dict(static, flags=trained))
        model = model._replace(training=training, draws=key is not None)
    return build_task(where, fed, model, target, trainable, params)


@named("models.given_x")
def _given_x(key, *, init, shape, dtype):
    return init(key, jnp.zeros(shape, dtype))


@named("models.applied")
def _applied(params, x, *, apply, key, flags):
    return _call(params, x, None, apply=apply, key=key, flags=flags)


@named("models.applied_drawing")
def _applied_drawing(params, x, drawn, *, apply, key, flags):
    return _call(params, x, drawn, apply=apply, key=key, flags=flags)


@traced_once
def _call(params, x, drawn, *, apply, key, flags):
    """Call a user's `apply`; its first two arguments that are no key or switch are params and x.

    Args:
        params: its parameters.
        x: one example.
        drawn: the key, or None.
        apply: the function.
        key: the name of the argument that takes the key, or None.
        flags: names and values of the switches.
    """
    given = dict(flags) | ({key: drawn} if key else {})
    free = [n for n in inspect.signature(apply).parameters if n not in given][:2]
    return apply(**dict(zip(free, (params, x), strict=True)), **given)


def build_task(where, fed, model: Model, target, trainable, params) -> Task:
    """Check a model on one example, and return its task.

    Args:
        where: the function that was called, for messages.
        fed: the federation, which determines the shape of a row and the kind of labels.
        model: the model.
        target, trainable, params: as in `jfl.models.flax`.
    """
    target = target_of(where, fed, target)
    kind = TARGETS[target]
    init = lambda key: frameworks.parameters(where, model.init(key))
    shapes = jax.eval_shape(init, jax.random.key(0))
    x = jax.ShapeDtypeStruct(fed.x.shape[1:], fed.x.dtype)
    try:
        output = jax.eval_shape(model.apply, shapes, x)
    except Exception as error:  # raised by a user's model
        frameworks.explain(where, error, f"x is {x.dtype}{list(x.shape)}")
        error.add_note(f"In {where}, for one example with x {x.dtype}{list(x.shape)}.")
        raise
    expected = kind.shape(fed.classes, tuple(fed.y.shape[1:]))
    actual = getattr(output, "shape", None)
    if actual != expected:
        checks.fail(
            where,
            f"a model that maps one example of shape {list(x.shape)} to {list(expected)}, "
            f"for {kind.words}",
            f"{list(actual) if actual is not None else checks.short_repr(output)}",
            "It is called on one example; a module of flax that is written for a batch, on a "
            "batch of one.",
        )
    task = _as_task(model, target)
    if params is None and trainable is None:
        return task
    return fine_tuning.trainable(task, trainable, params, where=where)


def _as_task(model: Model, target: str) -> Task:
    """Return the task of a model, with the loss and the metrics of a kind of labels."""
    loss = evaluation = Fn(_loss, dict(apply=model.apply), dict(target=target))
    if model.training is not None:
        form = _drawing_loss if model.draws else _loss
        loss = Fn(form, dict(apply=model.training), dict(target=target))
    elif target == "class" and model.class_loss is not None:
        loss = model.class_loss
    metrics = {
        name: Metric(
            Fn(_metric_of_row, dict(apply=model.apply), dict(target=target, name=name)),
            Fn(_finish_metric, static=dict(target=target, name=name)),
        )
        for name in TARGETS[target].metrics
    }
    evaluation = None if model.training is None else evaluation
    return Task(model.init, loss, model.apply, evaluation, metrics or None, target)


@named("models.loss")
def _loss(params, x, y, *, apply, target):
    return loss_of(apply(params, x), y, target)


@named("models.drawing_loss")
def _drawing_loss(params, x, y, key, *, apply, target):
    return loss_of(apply(params, x, key), y, target)


@named("models.watched")
def _metric_of_row(params, x, y, *, apply, target, name):
    return TARGETS[target].metrics[name][0](apply(params, x), y)


@named("models.finished")
def _finish_metric(mean, *, target, name):
    return TARGETS[target].metrics[name][1](mean)


def batch_shape(x, examples: int) -> jax.ShapeDtypeStruct:
    """Return the shape of a batch of examples of shape `x`."""
    return jax.ShapeDtypeStruct((examples, *x.shape), x.dtype)


def takes_batches(where, trace, apply, x, batched: bool | None) -> tuple[bool, bool]:
    """Determine whether a model is written for batches or for a single example.

    Args:
        where: the function that was called, for messages.
        trace: a function that maps the shape of an input to the shapes of (params, output). It
            raises an error if the model cannot take such an input.
        apply: (params, input) -> output.
        x: the shape of one example.
        batched: the user's choice; None means that this function tries both.

    Returns:
        Whether to call the model on a batch of one instead of on one example, and whether both
        calls are known to give the same output.
    """
    checks.require_one_of(where, (True, False, None), batched=batched)
    if batched is not None:
        return batched, False

    def shapes(x):
        try:
            params, output = trace(x)
        except Exception:  # raised by a user's module that is not written for this input
            return None, ()
        return params, getattr(output, "shape", ())

    params, one = shapes(batch_shape(x, 1))
    params_of_two, two = shapes(batch_shape(x, 2))
    if params is None or params_of_two != params or (one[:1], two) != ((1,), (2, *one[1:])):
        return False, False
    if shapes(x) != (params, one[1:]):
        return True, False
    is_same, mixes_rows = _compare_outputs(apply, params, x)
    return not (is_same or mixes_rows), is_same


def _compare_outputs(apply, params, x) -> tuple[bool, bool]:
    """Compare outputs of a model at random parameters.

    Returns:
        Whether a call without a batch axis gives the same output as a batch of one, and whether the
        output of a row depends on the other rows of its batch.
    """
    rng, size = np.random.default_rng(0), (2, *x.shape)

    def draw_weights(leaf):
        return jnp.asarray(
            rng.normal(size=leaf.shape) / np.prod(leaf.shape[:-1]) ** 0.5, leaf.dtype
        )

    @jax.jit
    def outputs(params, pair):
        return apply(params, pair[0]), apply(params, pair[:1])[0], apply(params, pair)[0]

    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    rows = rng.normal(size=size) if is_float else np.arange(np.prod(size)).reshape(size) % 2
    weights = jax.tree.map(draw_weights, params)
    alone, of_one, of_two = outputs(weights, jnp.asarray(rows, x.dtype))
    equal = lambda a, b: np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
    return equal(alone, of_one), not equal(of_one, of_two)


def on_batches_of_one(model: Model) -> Model:
    """Convert a model that takes batches to a model of one example."""
    one = lambda apply: None if apply is None else Fn(_on_batch_of_one, dict(apply=apply))
    return model._replace(apply=one(model.apply), training=one(model.training))


@named("models.on_batch_of_one")
def _on_batch_of_one(params, x, *key, apply):
    return apply(params, x[None], *key)[0]


def find_switches(call) -> tuple[tuple, tuple]:
    """Return the arguments that switch a function between training and evaluation.

    Args:
        call: the function, such as the `__call__` of a module.

    Returns:
        Pairs (name, value) for training, and pairs (name, value) for evaluation.
    """
    names = inspect.signature(call).parameters
    switches = [(name, value) for name, value in sorted(SWITCHES.items()) if name in names]
    return tuple(switches), tuple((name, not value) for name, value in switches)


@named("models.held_params")
def held_params(key, *, params):
    """Return `params` for any key.  This is the `init` of a model with given parameters."""
    return params
