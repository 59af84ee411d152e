"""The adapter of equinox modules.  Equinox is imported only when the adapter is used."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ..core import checks
from ..core.records import Federation, Fn, Task, named
from . import frameworks
from .adapters import Model, build_task, held_params, traced_once
from .losses import key_of

__all__ = ["equinox"]


def equinox(
    fed: Federation,
    model: Any,
    *,
    target: str | None = None,
    trainable: str | Sequence[str] | Callable | None = None,
    params: Any = None,
) -> Task:
    """Return a task from an equinox model.

    The model is called on one example. If its `__call__` takes `key`, local steps pass a key.
    Evaluations call the model in inference mode. By default, all arrays of floats are trained.

    Args:
        model: an equinox module, whose arrays are the initial parameters of every run; or a
            function key -> module, whose key is derived from the seed of a run.
        fed, target, trainable, params: as in `jfl.models.flax`. An example of a path is
            "layers/0/weight".

    Returns:
        A task. Its parameters are the module, with None for everything that is not trained, so that
        `eqx.combine(out.params, model)` is the trained model.

    Raises:
        ValueError: as in `jfl.models.flax`, and if equinox is not installed.
    """
    where = "models.equinox"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    try:
        import equinox as eqx
    except ImportError:
        checks.fail(where, "equinox", "no such package", "pip install equinox")
    fixed = isinstance(model, eqx.Module)
    instance = model(jax.random.key(0)) if callable(model) and not fixed else model
    if not isinstance(instance, eqx.Module):
        checks.fail(
            where, "an equinox module, or a function key -> module", checks.short_repr(instance)
        )
    is_norm = lambda node: isinstance(node, eqx.nn.BatchNorm)
    if any(map(is_norm, jax.tree.leaves(instance, is_leaf=is_norm))):
        checks.fail(
            where, "a model without BatchNorm", "equinox.nn.BatchNorm", frameworks.BATCH_NORM
        )
    key = inspect.signature(type(instance).__call__).parameters.get("key")
    trained, evaluated = (_split(m, eqx) for m in (instance, eqx.nn.inference_mode(instance)))
    weights = trained[0]
    init = (
        Fn(held_params, dict(params=weights)) if fixed else Fn(_eqx_init, static=dict(make=model))
    )
    needs_key = key is not None and key.default is inspect.Parameter.empty
    apply = Fn(_eqx, dict(arrays=evaluated[1]), dict(rest=_Same(evaluated[2]), needs_key=needs_key))
    training = None
    if key is not None:
        training = Fn(_eqx_drawing, dict(arrays=trained[1]), dict(rest=_Same(trained[2])))
    adapted = Model(init, apply, training, draws=key is not None)
    return build_task(where, fed, adapted, target, trainable, params)


def _split(model, eqx) -> tuple:
    """Split a module into trained arrays, other arrays, and everything else."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)
    return weights, *eqx.partition(rest, eqx.is_array)


class _Same:
    """A pytree without arrays that can be a static argument: it has a hash and can be compared."""

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
    extra = dict(key=key_of(0)) if needs_key else {}
    return _call_equinox(params, x, arrays, extra, rest=rest)


@named("models.equinox_drawing")
def _eqx_drawing(params, x, key, *, arrays, rest):
    return _call_equinox(params, x, arrays, dict(key=key), rest=rest)


@traced_once
def _call_equinox(params, x, arrays, extra, *, rest):
    import equinox as eqx

    return eqx.combine(params, arrays, rest.value)(x, **extra)
