"""The vocabulary: records without behaviour.  Read this file first; it imports nothing of jfl.

Axes, named once and used everywhere:
    C clients   K cohort slots   N rows per client (padded)   B batch   T local steps   R rounds   S sweep points

Every record is a frozen dataclass and a pytree.  Floats and arrays are leaves (traced data, a sweep is a vmap
over them); fields marked `static` are structure (hashable, a new value compiles anew).
"""
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Array = jax.Array
Key = jax.Array
Tree = Any


def static(**options):
    """A dataclass field that belongs to the structure of a record, not to its data."""
    return dataclasses.field(metadata={"static": True}, **options)


def record(cls):
    """Class decorator: a frozen dataclass that is a pytree."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@jax.tree_util.register_pytree_node_class
class Fn:
    """A module-level function with its hyperparameters bound by name.

    `Fn(step, data=dict(lr=0.1), static=dict(steps=5))` is called like `step`, with lr and steps filled in.  `data`
    is a pytree and holds the leaves, `static` is hashable; so two Fns that differ in a float share one compiled
    program, which closures cannot.
    """

    def __init__(self, function: Callable, data: dict | None = None, static: dict | None = None):
        self.function, self.data, self.static = function, dict(data or {}), dict(static or {})

    def __call__(self, *args):
        return self.function(*args, **self.data, **self.static)

    def __repr__(self):
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"Fn({name}, {self.data}, {self.static})"

    def tree_flatten(self):
        return (self.data,), (self.function, tuple(sorted(self.static.items())))

    @classmethod
    def tree_unflatten(cls, structure, children):
        return cls(structure[0], children[0], dict(structure[1]))


@record
class Federation:
    """One copy of the rows, and who owns them: an index, not a padded copy, so a client costs 4 bytes a slot."""
    x: Array             # [n, ...] float
    y: Array             # [n] int or float
    index: Array         # Int[C, N] rows of each client; slots past size[c] hold 0
    size: Array          # Int[C]
    x_test: Array        # [m, ...] central test rows
    y_test: Array        # [m]
    test_index: Array    # Int[C, Nt] each client's held-out rows, into x and y; Nt = 0 without held-out rows
    test_size: Array     # Int[C]
    classes: int = static(default=0)      # 0: not a classification problem
    caveats: tuple = static(default=())   # sentences about the rows that belong beside every guarantee
    host: Any = static(default=None)      # data.population.Population: rows that stay on the host; x, y, index have none


class Rows(NamedTuple):
    """What one client can read: the shared rows and its own part of the index."""
    x: Array             # [n, ...] shared by all clients
    y: Array             # [n]
    index: Array         # Int[N]
    size: Array          # Int[]


class Batch(NamedTuple):
    """Rows of one step; `mask` False marks a slot that holds no row."""
    x: Array             # [B, ...]
    y: Array             # [B]
    mask: Array          # Bool[B]


@record
class Task:
    """What is learned.  `loss` and `predict` speak of one example; `params` is drawn from a key."""
    init: Fn                              # key -> params
    loss: Fn                              # (params, x, y) -> scalar, one example
    predict: Fn | None = None             # (params, x) -> logits of one example; None: no accuracy


@record
class Batches:
    """Which of its rows a client uses in a step, and what an accountant may assume about it."""
    draw: Fn             # (round key, step, size, N) -> slots Int[B], mask Bool[B], overflow Int[]
    scheme: str = static()                # full | without_replacement | with_replacement | poisson | epochs
    batch: int | None = static()          # slots of a batch (None: N); the size drawn, but for poisson
    short: str = static(default="error")  # a client with fewer rows than a batch: "error" | "all"
    rate: Array | None = None             # poisson: probability of a row; None: expected / size
    expected: float | None = None         # poisson: expected rows of a batch


@record
class Mechanism:
    """Many masked contributions in, one release out: the only privacy boundary.  Built by `chain`."""
    stages: tuple                         # of Stage; roles run row -> sum -> noise -> post
    adjacency: str | None = static(default=None)     # add_remove | replace_one | None (bound by `plan`)


class Context(NamedTuple):
    """What a client may know about the round it takes part in."""
    round: Array
    client: Array        # id
    size: Array          # its rows
    weight: Array        # its aggregation weight, mean 1
    clients: int         # C
    cohort: Array        # expected clients a round


class Keys(NamedTuple):
    """Two streams, so that points of a sweep share batches but never noise."""
    batch: Key
    noise: Key


class Diagnostics(NamedTuple):
    """Seen by the experimenter only: outside every guarantee."""
    loss: Array          # mean training loss over the local steps
    clipped: Array       # fraction of rows that were clipped
    overflow: Array      # rows drawn that found no slot
    nonfinite: Array = 0 # rows that counted as zero, since their gradient was not finite


@record
class Release:
    """One site of an algorithm where data meet a mechanism: `count` releases a participation.

    With `steps`, noise is added once to what so many steps made, under replace_one and with a sensitivity that
    covers all that a row can do in them (output perturbation); 0: each release is one noisy step.
    """
    mechanism: Mechanism | None           # None: no privacy
    batches: Batches
    count: int = static()
    steps: int = static(default=0)


@record
class Algorithm:
    """What one client does and what the server does with the release; three pure functions.

    No vmap, mask, sampling, weighting or noise inside.  Build it with `jfl.algorithm`.
    """
    init: Fn             # params -> server, own                      (own: what one client remembers)
    client: Fn           # (ctx, keys, server, own, rows) -> payload, own, Diagnostics
    server: Fn           # (ctx, server, release) -> server
    params: Fn           # server -> params, for evaluation
    releases: tuple = ()                  # of Release: what the ledger charges to the examples of a client
    name: str = static(default="algorithm")
    stateful: bool = static(default=False)


class Cohort(NamedTuple):
    """Who takes part in a round."""
    ids: Array           # Int[K]; C marks an empty slot
    count: Array         # Int[K]; times drawn, 0 for an empty slot
    turn: Array          # Int[K]; how often the client came before in this cohort (0 but for independent draws)
    overflow: Array      # Int[]; clients drawn that found no slot


class Feed(NamedTuple):
    """A cohort and what was fetched for it, where rows or client states stay on the host; leaves [chunks, slots, ...]."""
    slots: tuple         # ids, count, turn
    overflow: Array      # Int[]; clients drawn that found no slot
    rows: tuple          # x [.., N, ...], y [.., N]
    own: Tree            # what the clients remember


@record
class Sampler:
    """Who takes part, and what an accountant may assume about it."""
    draw: Fn             # key -> Cohort
    expected: Array      # expected clients a round: the public denominator
    share: Array | None = None            # [C] each client's share of the draws; None: 1 / C
    rate: Array | None = None             # poisson: probability of a client
    scheme: str = static(default="full")  # full | without_replacement | with_replacement | poisson
    clients: int = static(default=0)
    capacity: int = static(default=0)     # slots K
    independent: bool = static(default=False)        # with_replacement: a repeated client runs again


@record
class Plan:
    """The objects of one experiment together: what runs is what is accounted."""
    fed: Federation
    task: Task
    algorithm: Algorithm
    sampler: Sampler
    upload: Mechanism | None              # noise on each client's own upload
    release: Mechanism                    # from the cohort's uploads to what the server applies
    weights: Any                          # [C] array with mean 1, or Fn(round) -> [C]
    chunk: int = static(default=0)        # clients computed at once; 0: all
    paired_noise: bool = static(default=False)       # sweep points share noise: voids their joint guarantee
    mesh: Any = static(default=None)      # jax.sharding.Mesh whose axis "clients" shares each cohort; None: one device


class Health(NamedTuple):
    """Counted inside the program, judged on the host."""
    nonfinite: Array     # clients or server states with a value that is not finite
    overflow: Array      # clients or rows that were drawn and found no slot
    empty_cohort: Array  # rounds without a client
    nonfinite_rows: Array     # rows, or clients, that met a clip with a value that is not finite: they counted as zero


@record
class Run:
    """All state of a run: one pytree to donate, vmap, save and resume."""
    round: Array
    key: Key
    attempt: Array       # raised when rounds are computed again under another program; part of every noise key
    server: Tree
    own: Tree            # [C, ...]
    mechanism: Tree      # what the release remembers (an adaptive clip norm)
    health: Health


@record
class Metrics:
    """One entry per evaluation.  All but `round` lie outside the guarantee."""
    round: Array                          # rounds done
    loss: Array                           # mean test loss
    accuracy: Array | None                # test accuracy; None without Task.predict
    client_accuracy: Array | None         # mean over clients of their own held-out accuracy
    train_loss: Array                     # of the cohorts since the last evaluation
    clip_fraction: Array                  # of uploads where the release clips, else of rows
    update_norm: Array                    # of what the server applied, mean since the last evaluation
    cohort: Array                         # mean clients a round
    clip_norm: Array | None = None        # of an adaptive release


class Guarantee(NamedTuple):
    """An epsilon is never a bare float.  All fields are plain Python values."""
    epsilon: float
    delta: float
    unit: str            # example | client
    adjacency: str       # add_remove | replace_one
    view: str            # server | third_party
    method: str          # which bound gave the number
    status: str = "proved"                # proved | claimed | audited | conditional | descriptive
    caveats: tuple = ()

    def __str__(self):
        none = self.epsilon == float("inf") and self.status == "proved"
        eps, status = ("no guarantee", "") if none else (f"epsilon = {self.epsilon:.4g}", f"{self.status}; ")
        text = (f"{eps} at delta = {self.delta:.3g} ({status}unit: {self.unit}, adjacency: {self.adjacency}, "
                f"view: {self.view}, method: {self.method})")
        return text + "".join(f"\n  caveat: {c}" for c in self.caveats)
