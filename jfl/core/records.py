"""The records that all packages of jfl share.  Read this file first.

Most records are frozen dataclasses and pytrees; results are named tuples.  Numbers and arrays are
leaves: they are traced, and a sweep is a vmap over them.  Fields marked `static` are structure:
they are hashable, and another value compiles another program.

Shapes use C clients, K slots of a cohort, N rows per client (padded), B rows per batch, T local
steps, R rounds and S points of a sweep.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar, dataclass_transform

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import checks, hashing, lazy, trade_off
from .pytrees import Array, Key, Number, Tree, Words, on_device

Class = TypeVar("Class")
Named = TypeVar("Named")  # a function or a class


def static(**options: Any) -> Any:
    """Return a dataclass field that is part of the structure of a record, not of its data."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def record(cls: type[Class]) -> type[Class]:
    """Turn a class into a frozen dataclass that is a pytree and prints without its arrays."""
    new: Any = cls
    new.__repr__ = safe_repr(_call_text if new.__repr__ is object.__repr__ else new.__repr__)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, repr=False)(new))


# --- how records print: in a few lines, without the contents of arrays

MAX_LINE_LENGTH = 200
# A list or a dict with more items prints only their number.
MAX_ITEMS = 8


def safe_repr(method: Callable[[Any], str]) -> Any:
    """Decorate a `__repr__` so that it never fails, and returns lines of bounded length.

    JAX rebuilds pytrees with leaves of any type, and prints them in its error messages.
    """

    @functools.wraps(method)
    def __repr__(self: Any) -> str:
        try:
            lines = method(self).split("\n")
        except Exception:  # raised by a leaf of any type
            return f"{type(self).__name__}(...)"
        cut = lambda line: f"{line[: MAX_LINE_LENGTH - 3]}..."
        return "\n".join(line if len(line) <= MAX_LINE_LENGTH else cut(line) for line in lines)

    return __repr__


def brief(x: Any) -> str:
    """Describe a value in a few words: an array by its type and shape, a function by its name."""
    if isinstance(x, str):
        return repr(x if len(x) <= 60 else x[:57] + "...")
    if isinstance(x, float) or hasattr(x, "shape") and hasattr(x, "dtype"):
        return value_range(x) if np.ndim(x) == 0 else _shape_text(x)
    if isinstance(x, (tuple, list, dict)) and len(x) > MAX_ITEMS:
        return f"{type(x).__name__} of {len(x)}"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {brief(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        inner = ", ".join(map(brief, x))
        return f"[{inner}]" if isinstance(x, list) else f"({inner}{',' * (len(x) == 1)})"
    text = getattr(x, "__qualname__", None) or repr(x)
    if "\n" in text and dataclasses.is_dataclass(x):  # a flax module
        text = _call_text(x)
    is_short = len(text) <= 100 and "\n" not in text and " at 0x" not in text
    return text if is_short else f"{type(x).__name__}(...)"


def value_range(x: Any, form: str = "{:.6g}") -> str:
    """Describe an array by its value, or by its smallest and largest values ("0.1 to 0.5")."""
    try:
        values = np.asarray(x)
    except Exception:  # traced, donated, a key, or stored on another process
        return _shape_text(x)
    if values.dtype.kind not in "biuf" or not values.size:
        return _shape_text(x)
    form = form if values.dtype.kind == "f" else "{}"
    low, high = (form.format(v) for v in (values.min(), values.max()))
    return low if low == high else f"{low} to {high}"


def _shape_text(x: Any) -> str:
    """Describe an array by its type and shape, such as "float32[3,2]"."""
    traced = " traced" if isinstance(x, jax.core.Tracer) else ""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]{traced}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def size_text(tree: Tree) -> str:
    """Return the number of entries in the arrays of a pytree, as text: "650 numbers"."""
    return counted(sum(int(np.prod(np.shape(x))) for x in jax.tree.leaves(tree)), "number")


def _call_text(self: Any) -> str:
    """Describe a dataclass as the call that makes it, without fields that are None."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}
    given = (f"{name}={brief(x)}" for name, x in fields.items() if x is not None)
    return f"{type(self).__name__}({', '.join(given)})"


# --- functions in a plan


# The module and qualified name of the function or class that has each registered name.
REGISTERED_NAMES: dict[str, str] = {}


def named(name: str) -> Callable[[Named], Named]:
    """Give a function or class a name that replaces its source in the identity of a plan.

    The noise of a run is derived from the identity of its plan (`jfl.describe`).  Your own
    functions are identified there by their name and source, so editing one changes the noise.  A
    named function is identified by `name` and the values in its closure instead; a value that
    cannot be read counts by its type only.  Choose another name if the function computes something
    else.

    Args:
        name: a name that nothing else in your plans has.

    Returns:
        A decorator, which returns the function or class itself.

    Example:
        >>> @named("my.loss")
        ... def loss(params, x, y):
        ...     return (params @ x - y) ** 2
        >>> loss._registered_name
        'my.loss'
    """
    if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        raise ValueError(f"named: expected a name, a non-empty string, but got {name!r}.")

    def register(value: Any) -> Any:
        place = f"{value.__module__}.{value.__qualname__}"
        other = REGISTERED_NAMES.get(name, place)
        if other != place and place.startswith("jfl."):
            raise ValueError(
                f"named: expected one name for one thing, but got {name!r} for {other} and {place}."
            )
        REGISTERED_NAMES[name] = place
        value._registered_name = name
        # A wrapper that copied the attributes of the function has other code.
        value._registered_code = getattr(value, "__code__", None)
        return value

    return register


def always_traced(function: Any) -> Any:
    """Decorate a client of jfl that releases more than the gradients of its local steps.

    `jfl.check_privacy` then compares the declared releases with a trace of the client, as it does
    for a user's client.
    """
    function._always_traced = True
    return function


@jax.tree_util.register_pytree_node_class
class Fn:
    """A module-level function with hyperparameters that are bound by name.

    Calling `Fn(step, data=dict(lr=0.1), static=dict(steps=5))` calls `step` with the same arguments
    and with lr=0.1 and steps=5.  An Fn is a pytree: the values in `data` are its leaves, and those
    in `static`, which must be hashable, belong to its structure.  Unlike two closures, two Fns that
    differ in a float share one compiled program.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        data: dict[str, Any] | None = None,
        static: dict[str, Any] | None = None,
    ) -> None:
        self.function, self.data, self.static = function, dict(data or {}), dict(static or {})

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, **self.data, **self.static)

    @safe_repr
    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", None) or type(self.function).__name__
        bound = ", ".join(f"{k}={brief(v)}" for k, v in {**self.data, **self.static}.items())
        return f"{name}({bound})" if bound else name

    def tree_flatten(self) -> tuple[tuple[dict[str, Any]], tuple[Any, ...]]:
        """Return the bound data as children, and the function and static arguments as structure."""
        return (self.data,), (self.function, tuple(sorted(self.static.items())))

    @classmethod
    def tree_unflatten(cls, structure: tuple[Any, ...], children: Sequence[Any]) -> "Fn":
        return cls(structure[0], children[0], dict(structure[1]))


@dataclasses.dataclass(frozen=True)
class Federation:
    """A dataset whose rows are divided among clients.

    The rows of all clients are stored once, in `x` and `y`.  `index` holds the numbers of each
    client's rows, padded to N entries of 4 bytes; N is at least the number of rows of the largest
    client.  The other fields are test rows and facts about the data.

    The field `identity` is a hash of the data, from which the noise of a run is derived.  The
    constructor and `dataclasses.replace` compute it; functions of jax.tree do not.
    """

    x: Array  # [n, ...] float
    y: Array  # [n] int or float
    index: Array  # Int[C, N] rows of each client; slots past size[c] hold 0
    size: Array  # Int[C]
    x_test: Array  # [m, ...] central test rows
    y_test: Array  # [m]
    test_index: Array  # Int[C, Nt] held-out rows of each client, in x and y; Nt may be 0
    test_size: Array  # Int[C]
    classes: int = static(default=0)  # 0: not a classification problem
    # Sentences about the rows that are printed with every guarantee.
    caveats: tuple[Any, ...] = static(default=())
    # A data.host_rows.Population, whose rows stay on the host; then x, y and index have no rows.
    host: Any = static(default=None)
    # UInt32[4], the hash of the data.
    identity: Any = dataclasses.field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Make private copies, so that nobody can change the rows without changing the identity.
        for name in ("x", "y", "index", "size"):
            value = getattr(self, name)
            if not isinstance(value, jax.core.Tracer) and not hashing.is_immutable(value):
                copy = jnp.array(value) if isinstance(value, jax.Array) else on_device(value)
                object.__setattr__(self, name, hashing.mark_immutable(copy))
        words = self.data_identity()
        if not isinstance(words, jax.core.Tracer):
            with jax.ensure_compile_time_eval():
                words = words if isinstance(words, jax.Array) else on_device(words)
        object.__setattr__(self, "identity", words)

    def data_identity(self) -> Words:
        """Return UInt32[4], the hash of the current rows and of the clients that own them."""
        if self.host is not None:
            return self.host.identity
        if np.ndim(self.size) != 1:
            checks.fail(
                "Federation",
                "size of shape [C]",
                f"shape {list(np.shape(self.size))}",
                "For several partitions use jfl.sweep, or stack plans by jax.tree.map.",
            )
        return hashing.hash_rows(self.x, self.y, self.index, self.size)

    @safe_repr
    def __repr__(self) -> str:
        rows = brief(self.x)
        if checks.is_concrete(self.size) and np.ndim(self.size) == 1:
            sizes, held_out = np.asarray(self.size), int(np.sum(np.asarray(self.test_size)))
            on_host = self.host is not None
            dtype, shape = self.x.dtype, self.x.shape[1:]
            if on_host:
                dtype, shape = "host", self.host.shape
            rows = f"{counted(int(sizes.sum()), 'row')} of {dtype}[{','.join(map(str, shape))}], "
            rows += f"{value_range(sizes)} a client{', on the host' if on_host else ''}; "
            rows += counted(self.y_test.shape[0], "test row")
            rows += f"; {held_out:,} held out by clients" if held_out else ""
        if self.classes:
            rows += f"; {self.classes} classes"
            if checks.is_concrete(self.y) and np.ndim(self.y) == 1 and self.host is None:
                absent = np.setdiff1d(np.arange(self.classes), np.asarray(self.y)).tolist()
                listed = [*map(str, absent[:MAX_ITEMS]), *(["..."] * (len(absent) > MAX_ITEMS))]
                rows += f", {len(absent)} without rows ({', '.join(listed)})" if absent else ""
        caveats = "".join(f"\n  caveat: {c}" for c in self.caveats[:MAX_ITEMS])
        return f"Federation: {counted(self.index.shape[0], 'client')}, {rows}{caveats}"

    plot = lazy.later("jfl.data.federation.draw")


_FIELDS = dataclasses.fields(Federation)
_ARRAY_FIELDS = tuple(f.name for f in _FIELDS if not f.metadata.get("static"))
_STATIC_FIELDS = tuple(f.name for f in _FIELDS if f.metadata.get("static"))


def _flatten_federation(fed: Federation) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    arrays = [(jax.tree_util.GetAttrKey(n), getattr(fed, n)) for n in _ARRAY_FIELDS]
    return arrays, tuple(getattr(fed, n) for n in _STATIC_FIELDS)


def _unflatten_federation(static_values: Iterable[Any], arrays: Iterable[Any]) -> Federation:
    """Rebuild a federation with its identity, which is one of the arrays."""
    fed = object.__new__(Federation)
    for name, value in (*zip(_ARRAY_FIELDS, arrays), *zip(_STATIC_FIELDS, static_values)):
        object.__setattr__(fed, name, value)
    return fed


jax.tree_util.register_pytree_with_keys(Federation, _flatten_federation, _unflatten_federation)


class Rows(NamedTuple):
    """The rows that one client can read: the shared rows and the client's part of the index."""

    x: Array  # [n, ...], the rows of all clients
    y: Array  # [n]
    # Int[N], the numbers of the client's rows; slots past `size` hold 0. It hides tuple.index.
    index: Array  # pyright: ignore[reportIncompatibleMethodOverride]
    size: Array  # Int[], the number of the client's rows


class Batch(NamedTuple):
    """The rows of one local step; a slot whose `mask` is False holds no row."""

    x: Array  # [B, ...]
    y: Array  # [B]
    mask: Array  # Bool[B]


@record
class Metric:
    """A custom metric of the test rows: `finish` applied to the mean of `row`.

    Guarantees do not cover it.
    """

    row: Fn  # (params, x, y) -> a number, or a pair (sum, number of its terms)
    finish: Fn | None = None  # mean -> metric; None: the mean itself


@record
class Task:
    """A model and its loss.  All functions except `init` take one example."""

    init: Fn  # key -> params
    loss: Fn  # (params, x, y) -> scalar; or (params, x, y, key) if the loss is random
    predict: Fn | None = None  # (params, x) -> logits; None: no accuracy
    evaluation: Fn | None = None  # like `loss`, for test rows; None: `loss`
    metrics: dict[str, Any] | None = None  # name -> Metric, in addition to loss and accuracy
    target: str = static(default="class")  # the kind of y, a name in models.targets.TARGETS

    def __repr__(self) -> str:
        shapes = jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0)))
        parameters = counted(sum(int(np.prod(x.shape)) for x in shapes), "parameter")
        predict = "none" if self.predict is None else repr(self.predict)
        return (
            f"Task: {parameters} in {counted(len(shapes), 'array')}; "
            f"loss {self.loss!r}, predict {predict}"
        )


@record
class Batches:
    """The sampler of the rows of a local step, and what an accountant may assume about it."""

    draw: Fn  # (round key, step, size, N) -> slots Int[B], mask Bool[B], overflow Int[]
    scheme: str = static()  # the name of its function in jfl.sampling.batches
    batch: int | None = static()  # B, the slots of a batch; None: N
    # What to do for a client with fewer than B rows: "error", or "all" to use all of them.
    short: str = static(default="error")
    # Poisson: probability with which a row is drawn; None: expected / size
    rate: Number | None = None
    expected: Number | None = None  # Poisson: expected number of rows of a batch

    def __repr__(self) -> str:
        size = self.expected if self.scheme.endswith("poisson") else self.batch
        given = [] if size is None else [brief(size)]
        if self.rate is not None:
            given = [f"rate={brief(self.rate)}"]
        if self.scheme == "truncated_poisson":
            given.append(f"capacity={self.batch}")
        if self.short != "error":
            given.append(f"short={self.short!r}")
        return f"{self.scheme}({', '.join(given)})"


@record
class Mechanism:
    """A chain of stages that turns many contributions into one noisy release.

    Use `jfl.chain` to create one.
    """

    # Stages, in the order of their roles: row, sum, noise, post.
    stages: tuple[Any, ...]
    # "add_remove" | "replace_one" | "zero_out"; `plan` replaces None.
    adjacency: str | None = static(default=None)

    def __repr__(self) -> str:
        adjacency = [] if self.adjacency is None else [f'adjacency="{self.adjacency}"']
        return f"chain({', '.join([*map(repr, self.stages), *adjacency])})"


class Context(NamedTuple):
    """Facts about a round that a client or the server may use."""

    round: Array  # Int[]
    client: Array  # Int[], the id of the client; C for the server
    size: Array  # Int[], the number of rows of the client
    weight: Array  # the weight of the client in the aggregate; the mean over clients is 1
    clients: int  # C
    cohort: Array  # the expected number of clients per round


class Keys(NamedTuple):
    """The random keys of a client in a round.

    Batches and noise have separate keys, so that points of a sweep can share batches, but not
    noise.
    """

    batch: Key
    noise: Key


class Diagnostics(NamedTuple):
    """Measurements of local training for the experimenter, which no guarantee covers."""

    loss: Array  # mean training loss over the local steps
    clipped: Array  # fraction of rows that were clipped
    overflow: Array  # number of rows that were drawn, but found no slot in their batch
    nonfinite: Array | int = 0  # number of rows whose gradient was not finite, and counted as zero
    # Fraction of the local steps whose batch had rows.  The others count as 0 in `loss` and
    # `clipped`, and means over clients divide by this fraction.
    measured: Array | float = 1.0

    def in_32_bits(self) -> "Diagnostics":
        """Return the same numbers as float32 and int32, in which loops add them up.

        With JAX_ENABLE_X64, sums of integers and means over float64 parameters have 64 bits.
        """
        dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.int32, jnp.float32)
        return Diagnostics(*map(jnp.asarray, self, dtypes))


@record
class Release:
    """A declaration of what a client releases about its examples.

    The client applies `mechanism` to batches of its rows, `count` times per participation.  If
    `steps` is 0, each of these releases is the gradient of one step.  Otherwise noise is added once
    to the result of that many steps (output perturbation): the adjacency is then replace_one, and
    the sensitivity covers the whole effect of a row on these steps.
    """

    mechanism: Mechanism | None  # None: no privacy
    batches: Batches
    count: int = static()
    steps: int = static(default=0)


@record
class Algorithm:
    """The pure functions of a client and of the server.

    The client function is for a single client: a round draws the cohort, runs its clients under
    vmap, and weights their uploads.  Use `jfl.algorithm` to create an Algorithm.
    """

    init: Fn  # params -> server state, client state (of one client)
    client: Fn  # (context, keys, server, client_state, rows) -> payload, client_state, Diagnostics
    server: Fn  # (context, server, release) -> server
    params: Fn  # server -> params, for evaluation
    # The releases of a client about its examples, each a Release.
    releases: tuple[Any, ...] = ()
    name: str = static(default="algorithm")
    stateful: bool = static(default=False)
    # "difference", or "model" if clients upload models, which requires that all participate.
    uploads: str = static(default="difference")
    # Whether a client checks how accurately it minimized its objective, so that its mechanism may
    # declare the bound "prox_erm".
    checks_its_solve: bool = static(default=False)
    # Whether local steps contract for convex losses, so that a mechanism may declare "contraction".
    contracts: bool = static(default=False)
    # (server, client_state) -> params, which are evaluated on the client's held-out rows.
    # None: `params`.
    personal: Fn | None = None
    # The releases, each a Release, that only personal models use; None: unknown.
    personal_releases: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        settings = _hyperparameters(self.client) | _hyperparameters(self.server)
        return f"{self.name}({', '.join(f'{k}={brief(v)}' for k, v in settings.items())})"

    @property
    def all_releases(self) -> tuple[Any, ...]:
        """The releases of uploads, followed by those of personal models."""
        return self.releases + (self.personal_releases or ())


def _hyperparameters(bound: Fn) -> dict[str, Any]:
    """Return the hyperparameters of a client or a server by name.

    Records that unfold into several, such as local training, have a method `hyperparameters`.
    """
    found = {}
    for name, x in {**bound.data, **bound.static}.items():
        if name == "inner":  # the client or server of an algorithm that this one wraps
            found |= _hyperparameters(x)
        elif hasattr(x, "hyperparameters"):
            found |= x.hyperparameters()
        elif x is not None and name not in ("params", "scale") and not isinstance(x, Mechanism):
            found[name] = x
    return found


class Cohort(NamedTuple):
    """The clients of a round."""

    ids: Array  # Int[K]; C marks an empty slot
    times_drawn: Array  # Int[K]; 0 for an empty slot
    # Int[K]; how often the client occurs earlier in this cohort, if draws are independent.
    repeat_index: Array
    overflow: Array  # Int[]; number of clients that were drawn, but found no slot


class FetchedCohort(NamedTuple):
    """A cohort with its rows and client states, fetched from the host."""

    slots: tuple[Any, ...]  # ids, times_drawn and repeat_index, each Int[chunks, slots]
    overflow: Array  # Int[]; number of clients that were drawn, but found no slot
    rows: tuple[Any, ...]  # x [chunks, slots, N, ...], y [chunks, slots, N]
    client_states: Tree  # leaves [chunks, slots, ...]


@record
class Sampler:
    """The sampler of the clients of a round, and what an accountant may assume about it."""

    draw: Fn  # key of the round -> Cohort; or (key of the run, round) -> Cohort if `over_rounds`
    expected: Number  # expected clients per round, a public divisor
    share: Array | np.ndarray | None = None  # [C], fraction of draws per client; None: 1 / C
    rate: Number | None = None  # Poisson: probability with which a client is drawn
    scheme: str = static(default="full")  # the name of its function in jfl.sampling
    clients: int = static(default=0)  # C
    capacity: int = static(default=0)  # K, the slots of a cohort
    independent: bool = static(default=False)  # with_replacement: a repeated client runs again
    # Minimum number of rounds from one participation of a client to its next. Above 1, groups of
    # clients participate in rotation.
    separation: int = static(default=1)
    # Number of rounds in which each client participates exactly once, in a random one of them.
    epoch: int = static(default=1)

    def __repr__(self) -> str:
        about = "about " if self.scheme.endswith("poisson") else ""
        text = f"{self.scheme}: {about}{brief(self.expected)} of {self.clients:,} clients a round"
        if self.separation > 1:
            text += f", in {self.separation} groups that take turns"
        return text + (f", each once in {self.epoch} rounds" if self.epoch > 1 else "")

    @property
    def over_rounds(self) -> bool:
        """Whether the cohorts of several rounds are drawn together."""
        return self.separation > 1 or self.epoch > 1


@record
class Plan:
    """Everything that determines a run and its guarantee."""

    fed: Federation
    task: Task
    algorithm: Algorithm
    sampler: Sampler
    upload: Mechanism | None  # the chain that each client applies to its upload
    release: Mechanism  # the chain that the server applies to the uploads of a cohort
    weights: Any  # Float[C], or an Fn of the round that returns it
    chunk: int = static(default=0)  # clients that a device runs at the same time; 0: all
    # Whether points of a sweep share noise; no guarantee then covers several of them together.
    paired_noise: bool = static(default=False)
    # Whether the server is assumed to see only sums of uploads.
    secure_aggregation: bool = static(default=False)
    # A jax.sharding.Mesh whose axis "clients" divides each cohort; None: one device.
    mesh: Any = static(default=None)

    def __repr__(self) -> str:
        lines = [
            f"Plan: {self.algorithm.name}, {counted(self.sampler.clients, 'client')}",
            f"{self.task!r}",
            f"{self.fed!r}".replace("\n", "\n  "),
            f"algorithm  {self.algorithm!r}",
            f"sampler    {self.sampler!r}",
        ]
        for site in self.algorithm.releases or [None]:
            often = "" if site is None else f"; {counted(site.count, 'release')} a round"
            mechanism = None if site is None else site.mechanism
            lines.append(f"in clients {'none' if mechanism is None else f'{mechanism!r}{often}'}")
        a_function = isinstance(self.weights, Fn)
        release = self.release
        if all(stage.role != "noise" for stage in release.stages):
            release = dataclasses.replace(release, adjacency=None)  # it has no effect
        lines += [
            f"upload     {'none' if self.upload is None else repr(self.upload)}",
            f"release    {release!r}",
            f"weights    {'a function of the round' if a_function else value_range(self.weights)}",
        ]
        if self.secure_aggregation:
            lines.append("server     assumed to see only the sum of a cohort's uploads")
        if self.paired_noise:
            lines.append("noise      shared by points of a sweep: voids their joint guarantee")
        if self.mesh is not None:
            lines.append(f"devices    {dict(self.mesh.shape)}")
        return "\n  ".join([*lines, "jfl.guarantee(plan, rounds, delta) gives epsilon"])


class Health(NamedTuple):
    """Counts of the problems of a run.

    The compiled program only counts.  Python code on the host reads the counts and decides whether
    to stop the run.
    """

    nonfinite: Array | np.ndarray  # clients or server states with a value that is not finite
    overflow: Array | np.ndarray  # clients or rows that were drawn, but found no slot
    empty_cohort: Array | np.ndarray  # rounds without a client
    # Rows or clients with a value that is not finite, which a clip replaced by zero.
    nonfinite_rows: Array | np.ndarray


@record
class Run:
    """The state of a run: one pytree that can be donated, vmapped, saved and resumed."""

    round: Array  # Int[], the number of rounds that have run
    # Determines cohorts, batches and initial parameters. Noise depends on the plan as well.
    key: Key
    plan_identity: Array  # UInt32[4], the identity of the plan that ran last
    # UInt32[4], a hash of the plans before it and of the rounds at which they ended.
    plan_history: Array
    # Increased if another program computes the same rounds again. It is part of every noise key.
    attempt: Array
    server: Tree
    client_states: Tree  # leaves [C, ...]
    mechanism: Tree  # the state of the release, such as an adaptive clip norm
    health: Health

    def __repr__(self) -> str:
        state = [f"{size_text(self.server)} on the server"]
        if jax.tree.leaves(self.client_states):
            state.append(f"{size_text(self.client_states)} of client states")
        if hasattr(self.mechanism, "shape"):  # one number is an adaptive clip norm
            state.append(f"clip norm {brief(self.mechanism)}")
        elif jax.tree.leaves(self.mechanism):
            state.append("the release remembers earlier ones")
        if checks.is_concrete(self.health):
            counts = {k: int(np.sum(np.asarray(v))) for k, v in self.health._asdict().items()}
            bad = [f"{k}={count}" for k, count in counts.items() if count]
            state.append(", ".join(bad) or "healthy")
        else:
            state.append("health not known here")
        return f"Run: after round {brief(self.round)}, attempt {brief(self.attempt)}; " + "; ".join(
            state
        )


# The percentiles in `Metrics.client_percentiles`.
PERCENTILES = (10, 25, 50, 75, 90)


@record
class Metrics:
    """Measurements, one entry per evaluation.  Guarantees cover none of them except `round`."""

    round: Array  # number of completed rounds
    loss: Array  # mean test loss
    accuracy: Array | None  # test accuracy; None without Task.predict
    client_accuracy: Array | None  # mean over clients of the accuracy on their held-out rows
    # Mean over the cohorts since the last evaluation; batches without rows are left out.
    train_loss: Array
    clip_fraction: Array  # fraction of clipped uploads if the release clips, otherwise of rows
    update_norm: Array  # mean norm of the server's updates since the last evaluation
    cohort: Array  # mean number of clients per round since the last evaluation
    clip_norm: Array | None = None  # current clip norm, if the release adapts it
    # Percentiles over clients of the held-out accuracy, [..., len(PERCENTILES)].
    client_percentiles: Array | None = None
    custom: dict[str, Any] | None = None  # the values of `Task.metrics`, by name

    def __repr__(self) -> str:
        def last(known: dict[str, Any]) -> str:
            return ", ".join(
                f"{name.replace('_', ' ')} {value_range(x[..., -1] if np.ndim(x) else x, '{:.4g}')}"
                for name, x in known.items()
                if x is not None
            )

        fields = vars(self)
        pick = lambda *names: {n: fields[n] for n in names}
        more = pick("train_loss", "clip_fraction", "update_norm", "cohort", "clip_norm")
        *points, evaluations = np.shape(self.round) or (1,)
        each = f"{' x '.join(map(str, points))} points, each " if points else ""
        lines = [
            f"Metrics: {each}{counted(evaluations, 'evaluation')}, the last after "
            f"{last(pick('round'))}",
            last(pick("accuracy", "client_accuracy", "loss")),
            last(more | (self.custom or {})),
            "no guarantee covers these numbers, which depend on the data (except the round number)",
        ]
        return "\n  ".join(lines)


CAVEATS_PAGE = "docs/guides/guarantee.md"  # where a reader finds more about caveats


class Caveat(str):
    """A sentence that is printed with an epsilon, with a code by which programs recognise it.

    Args:
        text: the sentence.
        code: the kind of caveat, which does not change if the sentence is reworded.

    Example:
        >>> once = Caveat("the server sees every upload", "every-upload")
        >>> once, once.code
        ('the server sees every upload', 'every-upload')
    """

    code: str

    def __new__(cls, text: str, code: str) -> Self:
        caveat = super().__new__(cls, text)
        caveat.code = code
        return caveat

    # For pickle: unlike `str`, a caveat has two arguments.
    def __getnewargs__(self) -> tuple[str, str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return str(self), self.code


def first_sentence(caveat: str) -> str:
    """Return the first sentence of a caveat, which summarises the caveat.

    Example:
        >>> first_sentence("For simulation only. Anyone who knows the seed can remove the noise.")
        'For simulation only.'
    """
    # Not at the dots of "a -> ... -> b" and "eq. (6)".
    return re.split(r"(?<=[^.]\.) (?!\()", caveat, maxsplit=1)[0]


def caveat_lines(caveats: Iterable[str]) -> list[str]:
    """Return a line for each caveat, and one that says where a shortened caveat is in full."""
    full = [*dict.fromkeys(caveats)]
    short = [first_sentence(c) for c in full]
    more = [] if short == full else [f"  in full: .caveats; explained: {CAVEATS_PAGE}"]
    return [f"  caveat: {c}" for c in short] + more


def code_of(caveat: str) -> str:
    """Return the code of a caveat, or "" for a sentence without one."""
    return getattr(caveat, "code", "")


class _Fields(NamedTuple):
    epsilon: float
    delta: float
    unit: str  # example | client
    adjacency: str  # add_remove | replace_one | zero_out
    view: str  # server | aggregate | third_party
    method: str  # the name of the bound from which epsilon was computed
    status: str = "proved"  # proved | claimed | audited | conditional | descriptive | none
    caveats: tuple[Any, ...] = ()  # sentences, most of them a `Caveat`
    implied: bool = False  # whether it follows from the guarantee of another unit
    rounds: int | None = None  # number of rounds that it covers; None: all requested ones


class Guarantee(_Fields):
    """An epsilon with its delta, what it protects, from whom, and how it was proved.

    The fields are plain Python values.  Methods return other epsilons and deltas, bounds on
    attacks, and guarantees for groups.  These have the same unit, adjacency, view, status and
    caveats; a guarantee for a group has one more caveat.

    The result of `jfl.guarantee` knows the releases that it covers, and its methods use them.  A
    guarantee that was read from a file, or that a paper claims, knows no releases, so its methods
    use only its epsilon and delta.  The releases are not a field, so comparing, printing and
    storing ignore them.
    """

    _release = None  # see `about`
    _curve = None  # the result of `curve`, once it is computed

    def __str__(self) -> str:
        # A stored guarantee without a finite epsilon may have the status "proved".
        none = self.epsilon == float("inf") and self.status in ("none", "proved")
        eps, status = (
            ("no guarantee", "") if none else (f"epsilon = {self.epsilon:.4g}", f"{self.status}; ")
        )
        text = (
            f"{eps} at delta = {self.delta:.3g} ({status}unit: {self.unit}, adjacency: "
            f"{self.adjacency}, "
            f"view: {self.view}, method: {self.method})"
        )
        return "\n".join([text, *caveat_lines(self.caveats)])

    def about(self, release: Any) -> "Guarantee":
        """Return a copy of this guarantee with `release` attached.

        It can then compute epsilon for other deltas and for groups.

        Args:
            release: an object with `curve()` and `group(size)`, such as
                `accountants.tightest.Release`.
        """
        known = self._make(self)
        known._release = release
        return known

    @property
    def release(self) -> Any:
        """The releases that this guarantee covers; None if only epsilon and delta are known."""
        return self._release

    # A changed guarantee keeps its releases if its epsilon and delta are the same.
    def _replace(self, **fields: Any) -> "Guarantee":  # pyright: ignore[reportIncompatibleMethodOverride]
        changed = super()._replace(**fields)
        keep = (changed.epsilon, changed.delta) == (self.epsilon, self.delta)
        return changed.about(self._release) if keep else changed

    def curve(self) -> trade_off.Curve:
        """Return proved pairs of epsilon and delta, as arrays `.epsilon` and `.delta`.

        The pairs are computed once from every bound that applies, which takes up to a second.

        Privacy:
            The pairs have the unit, adjacency and view of this guarantee.

        Example:
            >>> claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
            >>> claimed.curve().epsilon.tolist()
            [0.0, 1.0]
        """
        if self._curve is None:
            pair = trade_off.curve_of_pair(self.epsilon, self.delta)
            self._curve = pair if self._release is None else _both(self._release.curve(), pair)
        return self._curve

    def delta_at(self, epsilon: ArrayLike) -> np.ndarray:
        """Return the smallest delta that follows from this guarantee at an epsilon.

        Args:
            epsilon: [...] >= 0.

        Returns:
            Float64[...].

        Example:
            >>> claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
            >>> float(claimed.delta_at(2.0)), round(float(claimed.delta_at(0.0)), 4)
            (1e-05, 0.4621)
        """
        return self.curve().delta_at(epsilon)

    def epsilon_at(self, delta: ArrayLike) -> np.ndarray:
        """Return the smallest epsilon that is proved at a delta; inf if none is.

        At the delta of this guarantee it may be slightly smaller than its epsilon.

        Args:
            delta: [...] in [0, 1].

        Returns:
            Float64[...].

        Example:
            >>> claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
            >>> claimed.epsilon_at([1e-6, 1e-5]).tolist()
            [inf, 1.0]
        """
        return self.curve().epsilon_at(delta)

    def tpr(self, fpr: ArrayLike) -> np.ndarray:
        """Return an upper bound on the true-positive rate of any attack at a false-positive rate.

        An attack uses everything that the view sees to decide whether the unit took part
        (add_remove) or which of two units did (replace_one).

        Args:
            fpr: [...] in [0, 1].

        Returns:
            Float64[...], the smallest of several bounds.  Each pair (epsilon, delta) of the curve
            gives min(e^epsilon fpr + delta, 1 - e^-epsilon (1 - delta - fpr)).  For Gaussian noise,
            the exact trade-off curve without amplification by sampling is another bound.

        References:
            Kairouz, Oh, Viswanath, ICML 2015, Theorem 2.1; Dong, Roth, Su, JRSS B 2022.

        Example:
            >>> claimed = Guarantee(1.0, 1e-5, "example", "replace_one", "server", "a paper")
            >>> claimed.tpr([0.0, 0.01, 0.1]).round(4).tolist()
            [0.0, 0.0272, 0.2718]
        """
        return self.curve().tpr(fpr)

    @property
    def mu(self) -> float:
        """The mu of Gaussian differential privacy (mu-GDP).

        No attack does better than one that distinguishes N(mu, 1) from N(0, 1).  This is the
        smallest such mu for attacks with a false-positive rate of at least 1e-12.  At smaller
        rates, the trade-off curve of a sampled mechanism approaches the curve without sampling, so
        a mu for all rates would show no amplification.

        References:
            Dong, Roth, Su, JRSS B 2022, Definition 4.

        Example:
            >>> claimed = Guarantee(1.0, 0.0, "example", "replace_one", "server", "a paper")
            >>> round(claimed.mu, 3)
            1.232
        """
        return self.curve().mu

    def group(self, size: int) -> "Guarantee":
        """Return the guarantee at the same delta for `size` units that differ jointly.

        The units are, for example, all rows of a person or all clients of a household.  Without
        sampling the sensitivity is multiplied by `size`; with Poisson sampling the number of units
        in a sample is binomial.  In all other cases, and if it gives a smaller epsilon, the bound
        for one unit is applied `size` times.

        Args:
            size: the number of units, 1 to 1000.

        Returns:
            This guarantee with another epsilon, and a caveat that states the size.

        Raises:
            ValueError: if size is not an integer in this range.

        References:
            Dong, Roth, Su, JRSS B 2022, Theorem 2.14; Charles et al., arXiv:2407.07737 (samples).

        Example:
            >>> claimed = Guarantee(1.0, 0.0, "example", "replace_one", "server", "a paper")
            >>> claimed.group(3).epsilon
            3.0
        """
        checks.require_integer("Guarantee.group", max_value=trade_off.LARGEST_GROUP, size=size)
        if size == 1:
            return self
        group = _Group(self, int(size))
        return (
            self._make(self)
            ._replace(
                epsilon=float(group.curve().epsilon_at(self.delta)),
                method=f"{self.method}, group of {size}",
                caveats=(
                    *self.caveats,
                    Caveat(f"Protects any {size} {self.unit}s jointly.", "group"),
                ),
            )
            .about(group)
        )


class _Group(NamedTuple):
    """The releases of a guarantee, for a group of `size` units."""

    one: Guarantee
    size: int

    def curve(self) -> trade_off.Curve:
        general = self.one.curve().group(self.size)
        release = self.one.release
        grouped = release.group(self.size) if release is not None else None
        return general if grouped is None else _both(grouped.curve(), general)

    def group(self, size: int) -> "_Group":
        return _Group(self.one, self.size * size)


def _both(first: trade_off.Curve, second: trade_off.Curve) -> trade_off.Curve:
    """Return the curve of all pairs that either of two curves of one mechanism proves."""
    return trade_off.curve_of(
        np.append(first.epsilon, second.epsilon),
        np.append(first.delta, second.delta),
        min(first.gaussian_mu, second.gaussian_mu),
        max(first.missing, second.missing),
    )
