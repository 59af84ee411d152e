"""Low-rank adapters (LoRA) of the dense layers of a flax.linen model."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from ..core import checks, pytrees
from ..core.records import Fn, Metric, Task, named
from . import adapters, fine_tuning, flax_adapters, losses

__all__ = ["lora"]


def lora(
    task: Task,
    params: Any,
    rank: int = 4,
    *,
    layers: str | Sequence[str] = "*",
    trainable: str | Sequence[str] | Callable = "*/lora_[ab]",
    seed: int = 0,
) -> Task:
    """Return a task that trains low-rank matrices next to the frozen dense layers of a model.

    A layer x W + b becomes x W + x A B + b. A has the shape [in, rank] and starts with independent
    normal entries of variance 1 / in; B has the shape [rank, out] and starts at zero, so training
    starts from the pretrained model. W and b are frozen: they are not uploaded and get no noise,
    and all clients read one copy.

    With noise, a trained product of A and B also contains a product of the noise of both.
    FFA-LoRA, `trainable="*/lora_b"`, freezes A. The product then is linear in what is trained.

    Args:
        task: a ready-made model such as `gpt`, or a task of `jfl.models.flax`.
        params: pretrained values of all parameters: a pytree like the task's, or a dict from paths
            to arrays, as returned by `read_params`.
        rank: the number of columns of A and of rows of B.
        layers: shell patterns for the paths of the layers that are adapted, such as "*/query" and
            "*/value". They can be Dense and DenseGeneral. Attention has "query", "key", "value" and
            "out". Leave out layers whose kernel is transformed first, as in WeightNorm: `merged`
            would transform A B as well.
        trainable: the parameters to train, as `which` in `trainable`. A and B of a layer are named
            "lora_a" and "lora_b"; other parameters of the model, such as a last layer, can be
            trained as well.
        seed: determines the first values of all A, which are public and the same in every run.

    Returns:
        A task whose parameters are a dict from the path of each trained array to the array.
        `merged(task, out.params)` returns the parameters of the original model, with A B added.

    Privacy:
        No guarantee covers the data that `params` were computed from: pretrain on public data.

    Raises:
        ValueError: for a task of another library, patterns that match no dense layer, and params
            that are missing or that do not fit.

    References:
        Hu et al., ICLR 2022 (LoRA); Sun et al., ICLR 2024 (FFA-LoRA).

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.mlp(fed, hidden=(32,))
        >>> pretrained = task.init(jax.random.key(1))
        >>> sorted(lora(task, pretrained, layers="Dense_1").init(jax.random.key(0)))
        ['Dense_1/lora_a', 'Dense_1/lora_b']
    """
    where = "models.lora"
    checks.require_type(where, Task, "jfl.models or jfl.task", task=task)
    checks.require_integer(where, rank=rank)
    checks.require_integer(where, min_value=0, seed=seed)
    if getattr(task.init, "function", None) is not flax_adapters._init:
        checks.fail(
            where,
            "a task of jfl.models.flax that trains all parameters",
            checks.short_repr(task),
            'For flax.nnx use its LoRA layers, and jfl.models.nnx(..., trainable="*lora*").',
        )
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    by_path = pytrees.by_path(shapes)
    given = fine_tuning.pretrained_by_path(where, by_path, params)
    if missing := [path for path in by_path if path not in given]:
        checks.fail(
            where, "pretrained params for the whole model", f"none for {', '.join(missing[:6])}"
        )
    whole = pytrees.map_by_path(lambda path, _: given[path], shapes)
    dense = _dense_layers(task.init)
    chosen = fine_tuning.matching(where, "dense layers to adapt", layers, dense)
    keys = jax.random.split(losses.key_of(seed), len(chosen))
    for path, key in zip(chosen, keys):
        layer = whole
        for name in path.split("/"):
            layer = layer[name]
        kernel, (shape, axes) = layer["kernel"], dense[path]
        stack = kernel.shape[: kernel.ndim - len(shape)]  # the layers of a loop (nn.scan)
        size, out = int(np.prod(shape[:axes])), int(np.prod(shape[axes:]))
        first = jax.random.normal(key, (*stack, size, rank), kernel.dtype)
        layer["lora_a"] = first / size**0.5
        layer["lora_b"] = jnp.zeros((*stack, rank, out), kernel.dtype)

    def adapt(function: Any, form: Callable = _adapted) -> Any:
        return None if function is None else Fn(form, dict(of=function))

    metrics = {
        name: Metric(adapt(metric.row), metric.finish)
        for name, metric in (task.metrics or {}).items()
    }
    adapted = Task(
        Fn(adapters.held_params, dict(params=whole)),
        adapt(task.loss, _adapted_with_key if losses.takes_key(task.loss) else _adapted),
        adapt(task.predict),
        adapt(task.evaluation),
        metrics or None,
        task.target,
    )
    return fine_tuning.trainable(adapted, trainable, where=where)


def _dense_layers(init: Fn) -> dict[str, tuple]:
    """Return the shape of the kernel, and the number of its input axes, by path of a layer.

    Args:
        init: the function that draws the parameters of a flax.linen model.
    """
    found = {}

    def record(next_call, args, kwargs, context):
        y, layer = next_call(*args, **kwargs), context.module
        if context.method_name == "__call__" and (axes := _input_axes(layer)):
            found["/".join(layer.path)] = layer.get_variable("params", "kernel").shape, axes
        return y

    # Without the decorator, which would skip the interceptor if the function was traced before.
    draw = flax_adapters._init_linen.__wrapped__
    static = dict(dtype="float32", flags=()) | init.static
    with linen.intercept_methods(record):
        jax.eval_shape(lambda key: draw(key, **static), jax.random.key(0))
    return found


def _input_axes(layer) -> int:
    """Return the number of last axes of x that a dense layer multiplies; 0 for other layers."""
    if isinstance(layer, linen.Dense):
        return 1
    if not isinstance(layer, linen.DenseGeneral) or layer.batch_dims:
        return 0
    axes = (layer.axis,) if isinstance(layer.axis, int) else tuple(layer.axis)
    return len(axes) if axes == tuple(range(-len(axes), 0)) else 0


def _add_product(next_call, args, kwargs, context):
    """Add x A B to the output of a dense layer.  This is an interceptor of flax."""
    y, layer = next_call(*args, **kwargs), context.module
    axes = _input_axes(layer) if context.method_name == "__call__" else 0
    if not axes or not layer.has_variable("params", "lora_a"):
        return y
    a, b = (layer.get_variable("params", name) for name in ("lora_a", "lora_b"))
    x = jnp.asarray(args[0] if args else kwargs["inputs"])
    x = x.reshape(*x.shape[: x.ndim - axes], -1)
    return y + (x @ a @ b).reshape(y.shape).astype(y.dtype)


@named("models.lora")
def _adapted(params, *operands, of):
    with linen.intercept_methods(_add_product):
        return of(params, *operands)


@named("models.lora_with_key")
def _adapted_with_key(params, x, y, key, *, of):
    return _adapted(params, x, y, key, of=of)
