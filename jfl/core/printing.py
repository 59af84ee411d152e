"""How records print: what they are in a few lines, and no array.

A repr must not fail: records are pytrees, so their leaves may be traced, stacked, deleted, or
anything that somebody put there.  What cannot be read is left out.  Nothing here knows a class of
jfl: records are read by their fields.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np

from .aliases import Tree

WIDTH = 200  # characters of a line
MANY = 8  # entries of a list or a dict that are shown
DERIVED = ("scale", "params", "step")  # what algorithms bind that is no hyperparameter

Text = TypeVar("Text", bound=Callable[[Any], str])  # what a method gives as a text


def safe(text: Text) -> Text:
    """Decorator: what cannot be computed becomes the name of the class; lines have at most WIDTH
    characters."""

    @functools.wraps(text)
    def short(self: Any) -> str:
        try:
            lines = text(self).split("\n")
        except Exception:  # leaves are whatever somebody put there
            return f"{type(self).__name__}(...)"
        return "\n".join(
            line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines
        )

    bounded: Any = short
    return bounded


# --- values


def _array(x: Any) -> str:
    return f"{x.dtype}[{','.join(map(str, x.shape))}]" + (
        " traced" if isinstance(x, jax.core.Tracer) else ""
    )


def _numbers(x: Any) -> np.ndarray | None:
    """`x` as numbers of NumPy; None where its values are not known here."""
    if isinstance(x, jax.core.Tracer):
        return None
    try:
        values = np.asarray(x)
    except Exception:  # a key, an array that was donated, or one of another process
        return None
    return values if values.dtype.kind in "biuf" else None


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def value(x: Any) -> str:
    """Anything in a few words: numbers as they are, arrays by type and shape, functions by name."""
    if isinstance(x, str):
        return repr(x) if len(x) <= 60 else repr(x[:57] + "...")
    if x is None or isinstance(x, (bool, int)):
        return str(x)
    if isinstance(x, (float, np.generic)) or (_is_array(x) and x.shape == ()):
        values = _numbers(x)
        if values is None:
            return _array(x)
        return f"{float(values):.6g}" if values.dtype.kind == "f" else str(values.item())
    if _is_array(x):
        return _array(x)
    if isinstance(x, (tuple, list)):
        if len(x) > MANY:
            return f"{type(x).__name__} of {len(x)}"
        inner = ", ".join(map(value, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
    if isinstance(x, dict):
        if len(x) > MANY:
            return f"dict of {len(x)}"
        return "{" + ", ".join(f"{k}: {value(v)}" for k, v in x.items()) + "}"
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        text = repr(x) if getattr(type(x).__repr__, "__module__", "") == __name__ else module(x)
        return text if "\n" not in text and len(text) <= 100 else f"{type(x).__name__}(...)"
    if hasattr(x, "function") and hasattr(x, "static"):  # Fn
        return repr(x)
    name = getattr(x, "__qualname__", None)
    return name if isinstance(name, str) else f"{type(x).__name__}(...)"


def _named(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{k}={value(v)}" for k, v in pairs)


def _between(x: Any, form: str = "{:.6g}") -> str:
    """The smallest and the largest of some numbers."""
    values = _numbers(x)
    if values is None or not values.size:
        return _array(x) if _is_array(x) else "none"
    least, most = (form.format(v) for v in (values.min(), values.max()))
    return least if least == most else f"{least} to {most}"


def in_bytes(count: float) -> str:
    """A number of bytes, for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _size(tree: Tree) -> int:
    return sum(int(np.prod(np.shape(x))) for x in jax.tree.leaves(tree))


def _many(n: int, thing: str) -> str:
    return f"{n:,} {thing}" + "s" * (n != 1)


# --- records


@safe
def record(self: Any) -> str:
    """A record without a text of its own: its fields, in one line."""
    fields = _named((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
    return f"{type(self).__name__}({fields})"


@safe
def module(self: Any) -> str:
    """A flax module, or another dataclass of somebody else: its fields, in one line."""
    shown = [
        (f.name, getattr(self, f.name))
        for f in dataclasses.fields(self)
        if f.name not in ("parent", "name")
    ]
    return f"{type(self).__name__}({_named(shown)})"


@safe
def function(self: Any) -> str:
    """An Fn: the function's name with what is bound to it."""
    name = getattr(self.function, "__qualname__", None) or type(self.function).__name__
    return f"Fn({', '.join(filter(None, [name, _named({**self.data, **self.static}.items())]))})"


@safe
def stage(self: Any) -> str:
    """A stage as it was written: clip_l2(1)."""
    if self.role == "noise":
        level = "std=" * self.absolute + _level(self.noise)
        level += ", shape=..." * (self.shape is not None)
        return f"{self.name}({level}{'' if self.strategy is None else f', {self.strategy!r}'})"
    if self.divisor in ("size", "weight"):
        return f'divide("{self.divisor}")'
    if self.declared:
        return f'bounded({_level(self.bound.data["value"])}, "{self.declared}")'
    if self.name == "map_back" or self.role == "row" and self.bound is None:
        return f"{self.name}({self.apply.static.get('size', '')})"
    has_level = self.state is not None and not isinstance(self.state, tuple)
    arguments = [value(self.state)] if has_level else []
    for f in (self.bound or self.apply,):
        arguments += [] if f is None or arguments else [_level(v) for v in f.data.values()]
    return f"{self.name}({', '.join(arguments)})"


def _level(x: Any) -> str:
    """A clip norm or a noise level; of a function of the round its name."""
    return f"{x.function.__qualname__} of the round" if hasattr(x, "function") else value(x)


@safe
def mechanism(self: Any) -> str:
    """A mechanism as the chain that made it."""
    parts = [
        *map(repr, self.stages),
        *([] if self.adjacency is None else [f'adjacency="{self.adjacency}"']),
    ]
    return f"chain({', '.join(parts)})"


@safe
def batches(self: Any) -> str:
    """A batch sampler as it was called."""
    size = self.expected if self.scheme.endswith("poisson") else self.batch
    given = (
        [("rate", self.rate)] if self.rate is not None else [] if size is None else [(None, size)]
    )
    given += [("capacity", self.batch)] if self.scheme == "truncated_poisson" else []
    given += [("short", self.short)] if self.short != "error" else []
    arguments = (value(v) if name is None else f"{name}={value(v)}" for name, v in given)
    return f"{self.scheme}({', '.join(arguments)})"


@safe
def sampler(self: Any) -> str:
    """Who takes part in a round."""
    many = value(self.expected)
    return (
        f"{self.scheme}: {'about ' * self.scheme.endswith('poisson')}{many} of {self.clients:,} "
        f"clients a round"
        + f", in {self.separation} groups that take turns" * (self.separation > 1)
        + f", each once in {self.epoch} rounds" * (self.epoch > 1)
    )


def _settings(node: Any, prefix: str = "") -> dict[str, Any]:
    """The hyperparameters bound to a client or a server: name -> value, those of local training
    unfolded."""
    out = {}
    for name, x in (
        {**node.data, **node.static} if hasattr(node, "data") else _fields(node)
    ).items():
        if (
            dataclasses.is_dataclass(x) and hasattr(x, "steps") and hasattr(x, "grad")
        ):  # local training
            out |= _settings(x, prefix)
        elif (
            dataclasses.is_dataclass(x) and hasattr(x, "init") and hasattr(x, "optimizer")
        ):  # a step of the server
            out |= _settings(x, "server_")
        elif dataclasses.is_dataclass(x) and hasattr(x, "loss"):  # how gradients are made
            l2 = getattr(x, "l2", None)
            out |= {prefix + "l2": l2} if l2 is not None else {}
        elif name == "inner":
            out |= _settings(x, prefix)
        elif (
            x is not None and name not in DERIVED and not hasattr(x, "stages")
        ):  # mechanisms have a line
            name = "batch" if name == "batches" else name
            out[prefix + name] = x
    return out


def _fields(node: Any) -> dict[str, Any]:
    return {f.name: getattr(node, f.name) for f in dataclasses.fields(node)}


@safe
def algorithm(self: Any) -> str:
    """An algorithm and its hyperparameters."""
    settings = _settings(self.client) | _settings(self.server)
    return f"{self.name}({', '.join(f'{k}={_setting(v)}' for k, v in settings.items())})"


def _setting(x: Any) -> str:
    """A hyperparameter; a function with what is bound to it: sgd(momentum=0.9)."""
    if not hasattr(x, "function"):
        return value(x)
    bound = {**x.data, **x.static}
    return value(x.function) + f"({_named(bound.items())})" * bool(bound)


@safe
def _data(fed: Any) -> str:
    classes = f"; {fed.classes} classes" if fed.classes else ""
    rows = _numbers(fed.size)
    shape = fed.x.shape[1:] if fed.host is None else fed.host.shape
    of = f"{fed.x.dtype if fed.host is None else 'host'}[{','.join(map(str, shape))}]"
    if rows is None or rows.ndim != 1:
        return f"rows {_array(fed.x)}, owned as {_array(fed.size)}{classes}"
    test_size = _numbers(fed.test_size)
    held_out = 0 if test_size is None else int(np.sum(test_size))
    return (
        f"{_many(int(rows.sum()), 'row')} of {of}, {_between(rows, '{}')} a client"
        f"{', on the host' if fed.host is not None else ''}; "
        f"{_many(fed.y_test.shape[0], 'test row')}"
        f"{f'; {held_out:,} held out by clients' if held_out else ''}{classes}"
    )


@safe
def federation(self: Any) -> str:
    """A federation: who has how many rows."""
    caveats = "".join(f"\n  caveat: {c}" for c in self.caveats[:MANY])
    return f"Federation: {_many(self.index.shape[0], 'client')}, {_data(self)}{caveats}"


def _parameters(task: Any) -> str:
    try:
        shapes = jax.eval_shape(task.init, jax.random.key(0))
    except Exception:  # of a user's own function, or of leaves that are no numbers
        return "parameters of unknown shape"
    return f"{_many(_size(shapes), 'parameter')} in {_many(len(jax.tree.leaves(shapes)), 'array')}"


@safe
def task(self: Any) -> str:
    """A task: how many parameters, which loss."""
    return f"Task: {_parameters(self)}; loss {_name(self.loss)}, predict {_name(self.predict)}"


def _name(f: Any) -> str:
    """A bound function in a few words, without its numbers."""
    return (
        "none"
        if f is None
        else ", ".join([value(f.function), *(value(m) for m in f.static.values())])
    )


def _noise(mechanism: Any) -> str:
    return "none" if mechanism is None else repr(mechanism)


@safe
def _weights(weights: Any) -> str:
    if hasattr(weights, "function"):
        return "a function of the round"
    return _between(weights) if _numbers(weights) is not None else _array(weights)


@safe
def plan(self: Any) -> str:
    """A plan: everything that is run and accounted, in a dozen lines."""
    lines = [
        (
            f"Plan: {self.algorithm.name}, {_many(self.sampler.clients, 'client')}, "
            f"{_parameters(self.task)}"
        ),
        f"loss       {_name(self.task.loss)}",
        f"algorithm  {self.algorithm!r}",
        f"data       {_data(self.fed)}",
        f"sampler    {self.sampler!r}",
    ]
    for site in self.algorithm.releases[:3]:
        often = _many(site.count, "release") + " a round"
        lines.append(
            f"in clients {_noise(site.mechanism)}" + f"; {often}" * (site.mechanism is not None)
        )
    lines += [
        f"upload     {_noise(self.upload)}",
        f"release    {_noise(self.release)}",
        f"weights    {_weights(self.weights)}",
    ]
    lines += ["noise      is shared by points of a sweep: voids their joint guarantee"] * bool(
        self.paired_noise
    )
    lines += [f"devices    {dict(self.mesh.shape)}"] if getattr(self.mesh, "shape", None) else []
    return "\n  ".join([*lines, "jfl.guarantee(plan, rounds, delta) gives epsilon"])


def _health(health: Any) -> str:
    counts = {k: _numbers(v) for k, v in health._asdict().items()}
    if any(v is None for v in counts.values()):
        return "health not known here"
    bad = {k: int(v.sum()) for k, v in counts.items() if v is not None and v.sum()}
    return ", ".join(f"{k}={v}" for k, v in bad.items()) or "healthy"


@safe
def run(self: Any) -> str:
    """The state of a run."""
    client_states = _size(self.client_states)
    clients = f"; clients remember {client_states:,} numbers" if client_states else ""
    held = self.mechanism  # one number is an adaptive clip norm
    clip = f"; clip norm {value(held)}" if hasattr(held, "shape") else ""
    held = "" if clip or not jax.tree.leaves(held) else "; the release remembers earlier ones"
    return (
        f"Run: after round {value(self.round)}, attempt {value(self.attempt)}; "
        f"{_many(_size(self.server), 'number')} "
        f"on the server{clients}{clip}{held}; {_health(self.health)}"
    )


def _last(metrics: Any, name: str) -> str:
    """A metric at the last evaluation: one number, or the range over the points of a sweep."""
    return _last_of(getattr(metrics, name))


def _last_of(x: Any) -> str:
    values = _numbers(x)
    return (
        "none"
        if x is None
        else _array(x)
        if values is None
        else _between(values[..., -1] if values.ndim else values, "{:.4g}")
    )


def _final(metrics: Any) -> str:
    names = [n for n in ("accuracy", "client_accuracy", "loss") if getattr(metrics, n) is not None]
    return ", ".join(f"{n.replace('_', ' ')} {_last(metrics, n)}" for n in names)


@safe
def metrics(self: Any) -> str:
    """Metrics: how many evaluations, and the last one."""
    shape = np.shape(self.round)
    points = f"{' x '.join(map(str, shape[:-1]))} points, each " if len(shape) > 1 else ""
    rest = [
        n
        for n in ("train_loss", "clip_fraction", "update_norm", "cohort", "clip_norm")
        if getattr(self, n) is not None
    ]
    more = ", ".join(f"{n.replace('_', ' ')} {_last(self, n)}" for n in rest)
    custom = [f"{name} {_last_of(v)}" for name, v in (self.custom or {}).items()]
    more = ", ".join([more, *custom])
    return (
        f"Metrics: {points}{_many(shape[-1] if shape else 1, 'evaluation')}, the last after round "
        f"{_last(self, 'round')}"
        f"\n  {_final(self)}\n  {more}\n  all but the round lie outside every guarantee"
    )


@safe
def output(self: Any) -> str:
    """What a simulation gave back."""
    rounds = value(self.run.round)
    known = rounds if rounds.isdigit() else "..."
    return "\n  ".join(
        [
            f"Output: {rounds} rounds, {_health(self.run.health)}",
            f"final      {_final(self.metrics)} (outside every guarantee)",
            (
                f"metrics    {_many(int(np.size(self.metrics.round)), 'evaluation')}: "
                f".metrics.accuracy, .loss, ..."
            ),
            (
                f"params     {_many(_size(self.params), 'number')} in "
                f"{_many(len(jax.tree.leaves(self.params)), 'array')}"
            ),
            f"jfl.guarantee(plan, rounds={known}, delta=1e-5) gives epsilon",
        ]
    )


@safe
def sweep(self: Any) -> str:
    """What a sweep gave back."""
    varied = [k for k in self.points[0] if len({str(value(p.get(k))) for p in self.points}) > 1]
    return "\n  ".join(
        [
            f"Sweep: {_many(len(self.points), 'point')}"
            + f" over {', '.join(varied)}" * bool(varied)
            + (
                f"; {_many(int(self.groups), 'program')}, {float(np.sum(self.seconds)):.3g} s; "
                f"{int(np.sum(self.failed))} failed"
            ),
            f"rounds     {_last(self.metrics, 'round')}",
            f"final      {_final(self.metrics)} (outside every guarantee)",
            (
                "jfl.guarantee(sweep.plans[i], rounds, delta) gives the epsilon of point i; "
                "choosing "
                "the best point is in none"
            ),
        ]
    )
