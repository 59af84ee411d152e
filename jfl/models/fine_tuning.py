"""Fine-tuning: LoRA, frozen backbones, and pretrained weights from a file."""

import fnmatch
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore

from ..core import checks, files, pytrees
from ..core.records import Fn, Metric, Task, named
from . import losses

# Registered names of init functions that ignore the key.
CONSTANT_INITS = ("models.fixed", "models.held_params")
# Registered names of the losses of `low_rank.lora`.
LORA_LOSSES = ("models.lora", "models.lora_with_key")

__all__ = ["merged", "read_params", "trainable", "write_params"]


def trainable(
    task: Task,
    which: str | Sequence[str] | Callable | None = None,
    params: Any = None,
    *,
    where: str = "models.trainable",
) -> Task:
    """Return a task that trains a part of a model, such as LoRA layers or the last layers.

    Only the trained part is uploaded, clipped and made noisy. All clients read the same copy of the
    frozen part.

    Args:
        task: any task.
        which: shell patterns for the paths of trained parameters, such as "*lora*" or ("head/*",
            "*/bias"); or a function from a path to a bool. None trains all parameters.
        params: pretrained values of all or some parameters: a pytree like the task's, or a dict
            from paths to arrays. The others start as in `task`. Values of frozen parameters must be
            given, unless the task always starts from the same parameters.
        where: the function that is named in messages.

    Returns:
        A task whose parameters are a dict from the path of each trained array to the array.
        `merged(task, out.params)` returns the whole model.

    Privacy:
        No guarantee covers the data that `params` were computed from: pretrain on public data.

    Raises:
        ValueError: for patterns that match nothing, paths or shapes that the task does not have,
            and frozen parameters that are not given.

    References:
        Yu et al., ICLR 2022 (differentially private fine-tuning); Hu et al., ICLR 2022 (LoRA).

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
        >>> task = jfl.models.mlp(fed, hidden=(32,))
        >>> pretrained = task.init(jax.random.key(1))
        >>> sorted(trainable(task, "Dense_1/*", pretrained).init(jax.random.key(0)))
        ['Dense_1/bias', 'Dense_1/kernel']
    """
    checks.require_type(where, Task, "jfl.models or jfl.task", task=task)
    shapes = pytrees.by_path(jax.eval_shape(task.init, jax.random.key(0)))
    pretrained = pretrained_by_path(where, shapes, params)
    if which is None:
        return _start_from(task, pretrained)
    names = matching(where, "a part to train", which, shapes)
    # A task that always starts from the same parameters provides those of the frozen part.
    constant = getattr(task.init.function, "_registered_name", "") in CONSTANT_INITS
    known = (pytrees.by_path(task.init.data["params"]) if constant else {}) | pretrained
    frozen = {name: known.get(name) for name in shapes if name not in names}
    missing = [name for name, value in frozen.items() if value is None]
    if missing:
        checks.fail(
            where,
            "pretrained parameters for every frozen layer",
            f"none for {', '.join(missing[:6])}{', ...' * (len(missing) > 6)}",
            "A frozen layer with random parameters is not useful: pass params.",
        )
    started = _start_from(task, {n: v for n, v in pretrained.items() if n in names})

    def of_part(function: Any, form: Callable) -> Any:
        """Turn a function of the whole model into one of its trained part; the rest is frozen."""
        if function is None:
            return None
        return Fn(form, dict(frozen=frozen, init=task.init, of=function))

    metrics = {
        name: Metric(of_part(metric.row, _on_part), metric.finish)
        for name, metric in (task.metrics or {}).items()
    }
    return Task(
        Fn(_init_part, dict(init=started.init), dict(names=names)),
        of_part(task.loss, _on_part_with_key if losses.takes_key(task.loss) else _on_part),
        of_part(task.predict, _predict_with_part),
        of_part(task.evaluation, _on_part),
        metrics or None,
        task.target,
    )


def merged(task: Task, params: Mapping[str, Any]) -> Any:
    """Combine the trained and the frozen part of a model.

    Args:
        task: a task that `trainable` or `lora` returned.
        params: the trained part, such as `out.params`.

    Returns:
        A pytree like that of the original task. For `lora`, the product of the two matrices of a
        layer is added to its kernel.

    Raises:
        ValueError: for other tasks.
    """
    if not isinstance(task, Task) or task.loss.function not in (_on_part, _on_part_with_key):
        checks.fail(
            "models.merged", "a task of jfl.models.trainable or lora", checks.short_repr(task)
        )
    whole = _whole(params, task.loss.data["frozen"], task.loss.data["init"])
    adapted = getattr(task.loss.data["of"].function, "_registered_name", "") in LORA_LOSSES
    return _add_products(whole) if adapted else whole


def _add_products(params: Any) -> Any:
    """Return nested dicts of parameters, with the product of `lora_a` and `lora_b` in kernels."""
    if not isinstance(params, Mapping):
        return params
    rest = {k: _add_products(v) for k, v in params.items() if k not in ("lora_a", "lora_b")}
    if "lora_a" in params:
        product = params["lora_a"] @ params["lora_b"]
        rest["kernel"] = rest["kernel"] + product.reshape(rest["kernel"].shape)
    return rest


def matching(where: str, expected: str, which: Any, paths: Any) -> tuple[str, ...]:
    """Return the paths that match `which`, a shell pattern, several, or a function to a bool."""
    patterns: Any = (which,) if isinstance(which, str) else which
    matches = which if callable(which) else lambda p: any(fnmatch.fnmatch(p, g) for g in patterns)
    names = tuple(filter(matches, paths))
    if not names:
        actual = f"{which!r}, which matches none of {', '.join(list(paths)[:12])}"
        checks.fail(where, expected, actual)
    return names


def pretrained_by_path(where, shapes, params) -> dict:
    """Return pretrained arrays by path, in the dtypes of the task.

    Args:
        where: the function that is named in messages.
        shapes: the shape of each parameter of the task, by path.
        params: as in `trainable`.
    """
    if params is None:
        return {}
    arrays = pytrees.by_path(params)
    if isinstance(params, Mapping):
        by_name = {k: v for k, v in params.items() if isinstance(k, str)}
        arrays |= {k: v for k, v in by_name.items() if not isinstance(v, Mapping | list | tuple)}
    paths = f"params by the paths of the model: {', '.join(list(shapes)[:12])}"
    if not arrays:
        checks.fail(where, paths, "none")
    for name, value in arrays.items():
        if name not in shapes:
            checks.fail(where, paths, name)
        if np.shape(value) != shapes[name].shape:
            expected = f"params of the model's shapes: {name} {list(shapes[name].shape)}"
            checks.fail(where, expected, list(np.shape(value)))
    return {name: jnp.asarray(value, shapes[name].dtype) for name, value in arrays.items()}


def _start_from(task, pretrained) -> Task:
    """Return the task with pretrained arrays, by path, instead of those that it draws."""
    if not pretrained:
        return task
    init = Fn(_init_pretrained, dict(init=task.init, given=pretrained))
    return Task(init, task.loss, task.predict, task.evaluation, task.metrics, task.target)


@named("models.pretrained")
def _init_pretrained(key, *, init, given):
    """Draw parameters, and replace those that are given by path."""
    return pytrees.map_by_path(lambda path, leaf: given.get(path, leaf), init(key))


@named("models.part")
def _init_part(key, *, init, names):
    """Draw parameters, and return the trained ones by path."""
    whole = pytrees.by_path(init(key))
    return {name: whole[name] for name in names}


def _whole(part, frozen, init):
    """Combine the trained and the frozen part in one pytree.

    If the trained part has half precision, the frozen part is converted to its dtype.
    """
    shapes = jax.eval_shape(init, jax.random.key(0))
    dtype = jnp.result_type(*jax.tree.leaves(part))
    cast = lambda x: x.astype(dtype) if jnp.finfo(dtype).bits < 32 else x
    return pytrees.map_by_path(
        lambda path, _: part[path] if path in part else cast(frozen[path]), shapes
    )


@named("models.on_part")
def _on_part(part, x, y, *, of, frozen, init):
    return of(_whole(part, frozen, init), x, y)


@named("models.on_part_with_key")
def _on_part_with_key(part, x, y, key, *, of, frozen, init):
    return of(_whole(part, frozen, init), x, y, key)


@named("models.output_of_part")
def _predict_with_part(part, x, *, of, frozen, init):
    return of(_whole(part, frozen, init), x)


def write_params(path: str | Path, params: Any) -> None:
    """Write the parameters of a model to a file, which `read_params` reads.

    Args:
        path: an .npz file, or a .safetensors file (which needs the package safetensors).
        params: a pytree, such as `out.params`.
    """
    path = Path(path)
    leaves: dict[str, Any] = {n: np.asarray(x) for n, x in pytrees.by_path(params).items()}
    if path.suffix == ".safetensors":
        from safetensors.numpy import save

        content = save({name: np.ascontiguousarray(leaf) for name, leaf in leaves.items()})
    elif path.suffix == ".npz":
        buffer = io.BytesIO()
        # NumPy's format loses the type of bfloat16 (kind "V"); float32 holds all of its values.
        known = {n: x.astype(np.float32) if x.dtype.kind == "V" else x for n, x in leaves.items()}
        np.savez(buffer, **known)
        content = buffer.getvalue()
    else:
        checks.fail("models.write_params", "a file .npz or .safetensors", path.name)
    files.write(path, [content])


def read_params(path: str | Path) -> dict:
    """Read pretrained parameters from a file, for the argument `params` of an adapter.

    Args:
        path: an .npz file, a .safetensors file (which needs the package safetensors), or a .msgpack
            file of flax.serialization. Paths of parameters may be written with "/" or ".".

    Returns:
        A dict from paths such as "Dense_0/kernel" to NumPy arrays.

    Raises:
        ValueError: for a file of another kind.
        FileNotFoundError: if there is no such file.

    Example:
        >>> import io, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> np.savez(f"{folder}/model.npz", **{"Dense_0/kernel": np.zeros((3, 2))})
        >>> read_params(f"{folder}/model.npz")["Dense_0/kernel"].shape
        (3, 2)
    """
    path = Path(path)
    if path.suffix == ".npz":
        with np.load(path) as stored:
            found = dict(stored)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        found = load_file(path)
    elif path.suffix == ".msgpack":
        found = pytrees.by_path(msgpack_restore(path.read_bytes()))
    else:
        checks.fail("models.read_params", "a file .npz, .safetensors or .msgpack", path.name)
    return {name.replace(".", "/"): value for name, value in found.items()}
