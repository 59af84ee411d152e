"""What gives a run its noise: the identity of its plan, the plans before it, and nothing that only
says how it is computed."""

import abc
import collections
import cProfile
import dataclasses
import enum
import functools
import json
import linecache
import operator
import random
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import pins
from flax import linen as nn
from helpers.paths import ROOT
from helpers.problems import (
    CLIENTS,
    make_algorithm,
    make_federation,
    noisy_grad,
    noisy_plan,
    same_bits,
    squared,
    start_params,
)

import jfl
from jfl.core import hashing, identity
from jfl.engine.round import run_noise_key

KEY = jax.random.key(4)


def words(plan):
    return tuple(np.asarray(identity.plan_identity(plan)).tolist())


def of_loss(loss, fed):
    """Return the identity of a plan that has this loss."""
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0))
    algorithm = make_algorithm("fedavg", jfl.private_grad(loss, chain))
    task = jfl.task(start_params(), loss)
    return words(jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS)))


# --- hashes


def test_hashes_are_alike_on_the_host_and_in_a_program():
    held = [
        jnp.arange(3),
        jnp.array([True, False]),
        jnp.zeros((0, 3)),
        jnp.full((2, 2), 1.5, jnp.bfloat16),
        jnp.arange(5, dtype=jnp.uint8),
        jnp.float32([1e-40, -1e-45, 0]),
        jnp.arange(3.0 * 50_000).reshape(-1, 3),
        jnp.float16([1.5, -2]),
        jax.random.key(1),
    ]
    host = hashing.hash_arrays(held)
    assert not np.array_equal(host, hashing.hash_arrays(held[1:]))
    assert same_bits(host, jax.jit(hashing.hash_arrays)(held))
    partly = jax.jit(lambda part: hashing.hash_arrays([*held[:4], *part, *held[7:]]))
    assert same_bits(host, partly(held[4:7]))
    both = jax.jit(hashing.combine)(jnp.asarray(host), jnp.uint32([1, 2, 3, 4]))
    assert same_bits(both, hashing.combine(host, np.uint32([1, 2, 3, 4])))
    assert same_bits(jax.jit(hashing.hash_int)(7), hashing.hash_int(7))


def test_hashes_tell_numbers_and_places_apart():
    of = lambda *x: tuple(hashing.hash_arrays([np.asarray(v, np.float32) for v in x]).tolist())
    assert len({of([1, 2]), of([2, 1]), of([1, 2, 0]), of([0, 1, 2]), of()}) == 5
    # shapes are in the text of the description
    assert of([1], [2, 0]) == of([1, 2], [0]) == of([1, 2, 0])
    assert of([0.0]) == of([-0.0]) and of([0.0]) != of([1e-45])
    # 64 flips of one bit each change about half of the 128 bits: fewer than 40 has a chance below
    # 1e-5
    base, flips = hashing.hash_arrays([np.zeros(2, np.uint32)]), []
    for i in range(64):
        x = np.zeros(2, np.uint32)
        x[i // 32] = np.uint32(1 << (i % 32))
        flips.append(sum(int(v).bit_count() for v in hashing.hash_arrays([x]) ^ base))
    assert min(flips) >= 40 and max(flips) <= 88
    a, b = np.uint32([1, 2, 3, 4]), np.uint32([1, 2, 3, 5])
    assert sum(int(v).bit_count() for v in hashing.combine(a, b) ^ hashing.combine(a, a)) >= 40
    assert not np.array_equal(hashing.combine(a, b), hashing.combine(b, a))


# --- what is part of an identity


def linear(params, x, y):
    return params["w"] @ x - y * params["b"]


def test_identity_tells_plans_apart(fed, task):
    """Whatever changes what is released changes the noise."""
    p = functools.partial(noisy_plan, "fedavg", fed, task)
    swapped = fed.index.at[2].set(fed.index[2][jnp.array([1, 0, 2, 3, 4, 5, 6, 7, 8])])
    of_data = lambda **change: noisy_plan("fedavg", dataclasses.replace(fed, **change), task)
    late = lambda latency, jitter: p(
        sampler=jfl.sampling.first_responders(
            CLIENTS, 3, jnp.arange(1.0, CLIENTS + 1) * latency, jitter=jitter
        )
    )
    plans = dict(
        base=p(),
        lr=p(lr=np.float32(0.1) * (1 + 1e-6)),
        z=p(z=0.7000001),
        algorithm=noisy_plan("fedprox", fed, task),
        label=of_data(y=fed.y.at[11].add(1e-3)),
        partition=of_data(index=swapped),
        weights=p(weights="size"),
        upload=p(upload=jfl.chain(jfl.clip_l2(1.0), jfl.total())),
        sampler=p(sampler=jfl.sampling.poisson(CLIENTS, 0.41, capacity=CLIENTS)),
        responders=late(1.0, 0.5),
        latency=late(2.0, 0.5),
        jitter=late(1.0, 0.6),
        loss=noisy_plan("fedavg", fed, jfl.task(start_params(), linear)),
        start=noisy_plan("fedavg", fed, jfl.task({"b": 0.0, "w": jnp.zeros(3)}, squared)),
    )
    found = {k: words(v) for k, v in plans.items()}
    assert len(set(found.values())) == len(plans), found
    # the same inside and outside of a program, alone and among others
    inside = jax.jit(identity.plan_identity)(plans["base"])
    assert tuple(np.asarray(inside).tolist()) == found["base"]
    together = identity.plan_identities(list(plans.values()))
    assert [tuple(w.tolist()) for w in together] == list(found.values())
    # equal identities are equal descriptions, and the other way round
    described = {k: json.dumps(jfl.describe(v), sort_keys=True) for k, v in plans.items()}
    assert len(set(described.values())) == len(plans)
    assert all("0x" not in v for v in described.values())
    shapes = {"['b']": "float32[]", "['w']": "float32[3]"}
    assert jfl.describe(plans["base"])["parameters"] == shapes
    assert identity.differences(jfl.describe(plans["base"]), jfl.describe(plans["z"])) == [
        "release.stages[2].noise: 0.7 there, 0.7000001 here"
    ]
    assert identity.differences({"a": True, "b": 1}, {"a": 1, "b": 1.0}) == [
        "a: true there, 1 here",
        "b: 1 there, 1.0 here",
    ]


def test_how_a_plan_is_computed_is_no_part_of_it(fed, task):
    p = functools.partial(noisy_plan, "fedavg", fed, task)
    stored = dict(
        chunk=p(chunk=3),
        capacity=p(sampler=jfl.sampling.poisson(CLIENTS, 0.4, capacity=5)),
        padding=noisy_plan("fedavg", make_federation(pad=7), task),
        mesh=dataclasses.replace(p(), mesh=jax.make_mesh((1,), ("clients",))),
    )
    assert {k: words(v) for k, v in stored.items()} == dict.fromkeys(stored, words(p()))

    def at(capacity=9, **options):
        algorithm = make_algorithm(
            "fedavg", noisy_grad(**options), batch=jfl.batches.poisson(rate=0.3, capacity=capacity)
        )
        return words(jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS)))

    assert at() == at(capacity=8) == at(microbatch=2) == at(path="vmap") == at(path="bookkeeping")
    # among many clients a table of the sampler is as long as the capacity
    many = [jfl.sampling.poisson(40_000, 0.001, capacity=c) for c in (90, 99)]
    assert describe(many[0]) == describe(many[1])


@pytest.mark.parametrize("name", jfl.algorithms.__all__)
def test_every_function_of_jfl_has_a_registered_name(name, fed, task):
    """Then files may move and helpers be renamed.  Uploads, weights and schedules too."""
    noise = jfl.gaussian(jfl.schedules.exponential(1.0, 0.9, total=5))
    upload = jfl.chain(jfl.clip_per_layer((1.0, 2.0)), jfl.total(), noise)
    weights = (lambda t: jnp.ones(CLIENTS)) if name == "fedavg" else "size"
    text = json.dumps(jfl.describe(noisy_plan(name, fed, task, upload=upload, weights=weights)))
    assert '"registered": false' not in text and "algorithms" not in text and "jfl.core" not in text


def test_a_name_by_hand(fed):
    def make(factor, name):
        return jfl.named(name)(lambda params, x, y: factor * squared(params, x, y))

    def make_otherwise(factor, name):
        return jfl.named(name)(lambda params, x, y: squared(params, x, y) * factor)

    one = of_loss(make(1.0, "mine"), fed)
    assert one == of_loss(make_otherwise(1.0, "mine"), fed)
    assert len({one, of_loss(make(2.0, "mine"), fed), of_loss(make(1.0, "yours"), fed)}) == 3
    with pytest.raises(ValueError, match="expected a name"):
        jfl.named("")


# --- functions of a user's own


def describe(value):
    reader = identity.Reader()
    return reader.text(reader.data(value))


def closes_over(held):
    return lambda x: (x, held)


def written(text, name="jfl_test_module", folder=None):
    """Return a module made of a text; with a folder, one that has a file."""
    module = types.ModuleType(name)
    module.__file__ = str(folder / f"{name}.py") if folder else f"<{name}>"
    text = textwrap.dedent(text)
    if folder:
        Path(module.__file__).write_text(text)
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class Fields:
    def __init__(self, **fields):
        vars(self).update(fields)

    def __call__(self, z):
        return z


@dataclasses.dataclass
class Record:  # its generated methods have no source
    scale: float


class Pair(NamedTuple):
    scale: float


class Wrapping:
    """A function object that says that it is jnp.tanh."""

    def __init__(self, factor):
        functools.update_wrapper(self, jnp.tanh)
        self.factor = factor

    def __call__(self, z):
        return self.factor * z


def decorated(factor):
    @functools.wraps(jfl.named("decorated")(lambda z: z))
    def inner(z):
        return factor * z

    return inner


def with_a_base(factor):
    class Base(abc.ABC):
        scale = factor

        @abc.abstractmethod
        def double(self): ...

    class Inner(Base):
        def double(self):
            return 2 * self.scale

    return Inner()


def with_a_property(factor):
    class Inner:
        @property
        def doubled(self):
            return 2 * factor

    return Inner()


def with_a_static_method(factor):
    class Inner:
        @staticmethod
        def doubled(z):
            return 2 * z * factor

    return Inner()


def with_wrapped_static_method(factor):
    @functools.wraps(jnp.tanh)
    def inner(z):
        return factor * z

    return type("Inner", (), dict(score=staticmethod(inner), wrapping=Wrapping(factor)))()


def with_a_descriptor(factor):
    class Times:
        def __get__(self, owner, kind=None):
            return factor

        def __set__(self, owner, value): ...

    return type("Inner", (), dict(scale=Times()))()


def with_a_partial_method(factor):
    def run(self, scale, z):
        return scale * z

    return type("Inner", (), dict(__call__=functools.partialmethod(run, factor)))()


def with_an_attribute(factor):
    def inner(z):
        return inner.scale * z

    inner.scale = factor
    return inner


def with_default(factor):
    def inner(z, held=(factor,)):
        return z, held

    return inner


def with_rule(factor):
    @jax.custom_vjp
    def same(v):
        return v

    same.defvjp(lambda v: (v, None), lambda _, g: (factor * g,))
    return same


def activated(factor):
    """A class of flax whose body mentions another function."""
    activation = nn.tanh if factor == 1.0 else nn.relu

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return activation(x)

    return Net()


HELD = dict(
    array=lambda v: np.array([v, 2], np.float32),
    container=lambda v: {"k": [np.float32([v])]},
    scalar=lambda v: (np.float32(v),),
    key=lambda v: jax.random.key(int(v)),
    slots=lambda v: Slots(np.array([v])),
    partial=lambda v: functools.partial(closes_over, held=(np.array([v]),)),
    default=with_default,
    frozen=lambda v: flax.core.FrozenDict(a=v),
    decorated=decorated,
    rule=with_rule,
    body=activated,
    base=with_a_base,
    property=with_a_property,
    static_method=with_a_static_method,
    wrapped_static_method=with_wrapped_static_method,
    descriptor=with_a_descriptor,
    partial_method=with_a_partial_method,
    attribute=with_an_attribute,
    path=lambda v: Path(str(v)),
    unnamed_builtin=lambda v: type(None) if v == 1.0 else type(...),
    private_field=lambda v: Fields(_state=v),
    wrapping=Wrapping,
    method=lambda v: Wrapping(v).__call__,
    method_of_dict=lambda v: {"a": v}.get,
    record=Record,
    pair=Pair,
    namespace=lambda v: types.SimpleNamespace(a=v),
    enum=lambda v: enum.Enum("Sizes", dict(SMALL=v)).SMALL,
    order=lambda v: {"a": 1, "b": 2} if v == 1.0 else {"b": 2, "a": 1},
    keys=lambda v: {1: v, "1": 0.0},
    structure=lambda v: jax.tree.structure({"a": 1} if v == 1.0 else (1, 2)),
)


@pytest.mark.parametrize("name", HELD)
def test_what_a_function_holds_is_in_its_description(name):
    """It is constant in the program: two losses that differ there alone must not share noise."""
    one, same, other = (describe(closes_over(HELD[name](v))) for v in (1.0, 1.0, 2.0))
    assert one == same != other


def test_leaves_are_described_by_their_shape():
    """A program gives them their numbers."""
    tree = jax.tree_util.Partial(closes_over, jnp.ones(2)), {"a": [np.ones(2)]}
    assert describe(tree) == describe(jax.tree.map(lambda x: x + 1, tree))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 1), [0, 1]),
        (1j, "1j"),
        (range(3), "range(0, 3)"),
        (b"a", "b'a'"),
        (..., "Ellipsis"),
        (np.dtype("float32"), "float32"),
        ({1}, frozenset({1})),
        ({"a": 1}, types.MappingProxyType({"a": 1})),
        (jnp.asarray(2.0), jnp.float32(2.0)),  # the first is weakly typed
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_different_types_are_distinguished(one, other):
    assert describe(closes_over(one)) != describe(closes_over(other))
    leaves = isinstance(one, (int, float, jax.Array))  # distinguished by their bits
    assert leaves or describe(one) != describe(other)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_identity_tells_losses_apart(wrap, fed):
    """Two losses of one name; a loss that a user has jitted is a function like any other."""

    def make(factor):
        def loss(params, x, y):
            return factor * squared(params, x, y)

        return wrap(loss)

    assert of_loss(make(1.0), fed) == of_loss(make(1.0), fed) != of_loss(make(2.0), fed)


def test_the_source_counts_and_its_place_does_not(tmp_path):
    text = """
        import jax.numpy as jnp
        FACTOR = {2}
        def loss(params, x, y):
            return {0}(x @ params["w"] + params["b"] - y) ** 2 + FACTOR * jnp.{1}(y)
    """
    source = lambda *words, more="", where="a": describe(
        written(more + textwrap.dedent(text.format(*words)), where, tmp_path).loss
    )
    base = source("", "tanh", 1)
    assert base == source("", "tanh", 1, where="b")
    assert base == source("", "tanh", 1, more="# moved down\n\n\nx = 1\n")
    others = source("2 * ", "tanh", 1), source("", "sinh", 1), source("", "tanh", 2)
    assert len({base, *others}) == 4


def test_a_module_counts_by_its_file(tmp_path):
    """A library's module counts by its name alone."""
    helper = written("def act(v):\n    return v\n", "helper", tmp_path)
    mentions = lambda v: helper.act(jnp.tanh(v))
    before = describe(mentions)
    assert describe(mentions) == before
    Path(helper.__file__).write_text("def act(v):\n    return 2 * v\n")
    assert describe(mentions) != before
    assert '{"module": "jax.numpy"}' in before


def test_a_value_that_was_assigned_to_a_module_counts(tmp_path):
    settings = written("scale = 1.0\nother = 1.0\n", "settings", tmp_path)
    mentions = lambda v: settings.scale * v
    before = describe(mentions)
    settings.other = 2.0
    assert describe(mentions) == before
    settings.scale = 2.0
    assert describe(mentions) != before


def test_a_module_without_a_file_is_rejected():
    settings = types.ModuleType("settings")
    with pytest.raises(ValueError, match="expected a module with a file"):
        describe(lambda v: settings.scale * v)


@pytest.mark.parametrize(
    "text, counts",
    [
        ("FACTOR = {}\ndef loss(v):\n    return (lambda w: FACTOR * w)(v)\n", True),
        ("mean = {}\nloss = lambda v: v.mean()\n", False),  # an attribute of that name
    ],
)
def test_a_global_counts_where_a_function_reads_it_also_in_an_inner_one(text, counts, tmp_path):
    one, other = (describe(written(text.format(v), "globals", tmp_path).loss) for v in (1, 2))
    assert (one != other) == counts


def test_a_variable_without_a_value_yet_is_described():
    def loss(v):
        return helper(v)

    assert '{"cell": "empty"}' in describe(loss)
    helper = None


def test_a_lambda_counts_with_all_its_lines(tmp_path):
    """Several lambdas that begin in one line are not distinguished."""
    texts = ("x = next(iter([\n  lambda v: v\n  + 1]))\n", "x = lambda v: (v +\n  1)\n")
    for text in texts:
        edits = (text, text.replace("1", "2"), f"# moved down\n\n{text}")
        one, other, moved = (describe(written(edit, "lines", tmp_path).x) for edit in edits)
        assert one == moved != other
    one, other = (lambda x: x + 1), (lambda x: x + 2)
    assert describe(one) == describe(other)


def test_a_wrapper_counts_with_its_own_source():
    """inspect.getsource returns that of the function which functools.wraps names."""

    @functools.wraps(squared)
    def one(*args):
        return squared(*args)

    @functools.wraps(squared)
    def other(*args):
        return 2 * squared(*args)

    assert describe(one) != describe(other)


def test_the_order_of_a_set_does_not_count():
    assert list({8, 0}) != list({0, 8})
    assert describe(closes_over({8, 0})) == describe(closes_over({0, 8}))
    # Each item describes its class, so it does not matter which of them is the first.
    Item = dataclasses.make_dataclass("Item", ["scale"], frozen=True)
    assert describe(closes_over({Item(0), Item(8)})).count('"class') == 2


def typed(cell, text):
    """Run a text as a notebook does, which keeps the source of its cells, and return its names."""
    lines = text.splitlines(keepends=True)
    linecache.cache[cell] = (len(text), None, lines, cell)
    names = {"__name__": "__main__"}
    exec(compile(text, cell, "exec"), names)
    return names


def test_a_script_that_a_library_runs_is_the_users(monkeypatch):
    """As by `python -m cProfile script.py`, where `__main__` is the module of the profiler."""
    monkeypatch.setitem(sys.modules, "__main__", cProfile)
    identity._is_library.cache_clear()
    scripts = [typed(f"<script {v}>", f"def loss(x):\n    return {v} * x\n") for v in (1, 2)]
    assert describe(scripts[0]["loss"]) != describe(scripts[1]["loss"])


def test_a_class_and_a_function_in_a_notebook():
    text = "def act(v):\n    return {0} * v\nclass Net:\n    def __call__(self, v):\n        "
    cells = [typed(f"<cell {v}>", (text + "return {0} + v\n").format(v)) for v in (1, 2)]
    assert describe(cells[0]["act"]) != describe(cells[1]["act"])
    assert describe(cells[0]["Net"]) != describe(cells[1]["Net"])


def test_circles_end():
    def one(x):
        return two(x)

    def two(x):
        return one(x) + one.__name__.count("o")

    assert describe(one) == describe(one) != describe(two)
    # objects that all hold each other are described once
    ring = [types.SimpleNamespace() for _ in range(8)]
    for node in ring:
        node.others = [other for other in ring if other is not node]
    assert len(describe(lambda x: (x, ring))) < 20_000


# --- functions that are rejected

REJECTED = "jfl.describe: expected .*jfl.named"


@pytest.mark.parametrize("file", ["<stdin>", "<string>"])
def test_a_function_without_source_is_rejected(file):
    """It was typed into Python, or made by exec."""
    names = {"__name__": "__main__"}
    text = "def loss(x):\n    return x\nclass Net:\n    def __call__(self, x):\n        return x\n"
    exec(compile(text, file, "exec"), names)
    for value in (names["loss"], names["Net"], names["Net"]()):
        with pytest.raises(ValueError, match=r"the source of the function .*jfl.named"):
            describe(value)
    assert describe(jfl.named("tests.bare")(names["loss"]))


def test_two_functions_of_one_name_are_rejected(fed):
    one = jfl.named("twin")(lambda params, x, y: squared(params, x, y))
    two = jfl.named("twin")(lambda params, x, y: 2 * squared(params, x, y))
    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        describe((one, closes_over(two)))
    classes = [jfl.named("twin")(cls) for cls in (type("A", (), {}), type("B", (), {}))]
    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        describe(classes)
    # one statement may make several, which differ in what they close over
    assert describe([jfl.named("scaled")(closes_over(v)) for v in (1.0, 2.0)])

    def plan(loss, lr):
        algorithm = make_algorithm("fedavg", jfl.grad(loss), lr=lr)
        return jfl.plan(fed, jfl.task(start_params(), loss), algorithm, jfl.sampling.full(CLIENTS))

    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        identity.plan_identities([plan(one, 0.1), plan(two, 0.2)])


class Deque(collections.deque):
    """A class of a user's whose base keeps its content in C."""


@pytest.mark.parametrize(
    "value",
    [
        Deque([1]),
        operator.itemgetter(1),
        random.Random(1),
        threading.Lock(),
        iter([1]),
        np.array([1, "a"], object),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_whose_state_is_hidden_are_rejected(value):
    """They may compute different things, and nothing distinguishes them; a name does."""
    held = closes_over(value)
    with pytest.raises(ValueError, match=REJECTED):
        describe(held)
    one, other = (jfl.named(name)(closes_over(value)) for name in ("tests.one", "tests.other"))
    assert describe(one) != describe(other)
    with pytest.raises(ValueError, match=REJECTED):  # also next to a named function that holds it
        describe([one, held])


# --- what gives a call its noise


def flat_loss(params, x, y):
    return 0.0 * params["a"].sum()


def still(fed, value=0.0, lr=0.1):
    """Return a plan whose release is noise alone: every gradient is 0."""
    algorithm = jfl.algorithms.fedavg(jfl.grad(flat_loss), lr=lr, batch=jfl.batches.full(), steps=1)
    task = jfl.task({"a": jnp.full(256, value)}, flat_loss)
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), release=release)


def noises(run, plan, rounds):
    """The noise of each round, [rounds, 256]."""
    out = []
    for _ in range(rounds):
        after, _ = _round(run, plan)
        out.append(np.asarray(after.server.params["a"] - run.server.params["a"]))
        run = after
    return np.array(out), run


_round = jax.jit(jfl.run_round)


def alike(a, b):
    """Return whether two noises of 256 numbers are the same, up to rounding."""
    correlation = np.corrcoef(a, b)[0, 1]
    # independent ones are above with a chance below 1e-10
    assert correlation > 0.99 or abs(correlation) < 0.4
    return correlation > 0.99


@pytest.fixture(scope="module")
def plans(fed):
    """Three plans that differ in a number alone, so that one program serves all."""
    return [still(fed, v) for v in (0.0, 1.0, 2.0)]


def test_histories(plans):
    """A run under another plan has noise of its own, whatever came before; the same plan again
    continues."""
    a, b, c = plans
    faster = still(make_federation(), lr=0.2)
    first = lambda plan, begun: noises(begun, plan, 1)[0][0]
    begin = lambda plan: jfl.init(KEY, plan)
    straight, _ = noises(begin(a), a, 4)
    _, at1 = noises(begin(a), a, 1)
    second, at2 = noises(at1, a, 1)
    assert alike(second[0], straight[1]) and alike(first(a, at2), straight[2])
    # at round 0 the plan does not matter that a run was begun for, except for its parameters
    assert alike(first(faster, begin(a)), first(faster, begin(faster)))
    assert not alike(first(b, begin(a)), first(b, begin(b)))
    # two branches of one run
    assert not alike(first(b, at1), first(c, at1))
    # A -> C and B -> C, at one round and with one seed
    from_a, from_b = (noises(noises(begin(p), p, 1)[1], c, 2)[0] for p in (a, b))
    assert not alike(from_a[0], from_b[0]) and not alike(from_a[1], from_b[1])
    # A -> B at two different rounds: both compute round 2
    assert not alike(noises(at1, b, 2)[0][1], first(b, at2))
    # A -> B -> A is not A
    back = first(a, noises(at1, b, 1)[1])
    assert not alike(back, straight[2])
    assert not alike(back, first(a, noises(at1, c, 1)[1]))


def test_a_vmap_over_plans_from_one_start(plans):
    """Each plan has independent noise, and that of a separate run."""
    begun = jfl.init(KEY, plans[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *plans)
    runs = jax.jit(jax.vmap(lambda plan: jfl.scan(begun, plan, [1])[0]))(stacked)
    moved = np.asarray(runs.server.params["a"])
    assert not alike(moved[0], moved[1]) and not alike(moved[1], moved[2])
    for one, plan in zip(moved, plans, strict=True):
        assert alike(one, noises(begun, plan, 1)[1].server.params["a"])


def test_paired_noise_opts_out(fed, task):
    one, two = (noisy_plan("fedavg", fed, task, lr=lr, paired_noise=True) for lr in (0.1, 0.2))
    assert same_bits(run_noise_key(jfl.init(KEY, one)), run_noise_key(jfl.init(KEY, two)))
    assert words(one) != words(two)
    assert any("share their noise" in c for c in jfl.guarantee(one, 2, view="server").caveats)


@pytest.mark.slow
def test_points_that_would_be_compiled_apart_are_refused(fed, task):
    """They have one noise, and two programs may add in another order."""
    poisson = lambda capacity: jfl.sampling.poisson(CLIENTS, 0.4, capacity=capacity)
    make = lambda capacity, chunk=None, **_: noisy_plan(
        "fedavg", fed, task, chunk=chunk, sampler=poisson(capacity)
    )
    with pytest.raises(ValueError, match="points with different computations.*different seeds"):
        jfl.sweep(make, rounds=1, points=[dict(capacity=6), dict(capacity=7)])
    # with different seeds they may be; in one group they are one and the same release
    points = [
        dict(capacity=7, chunk=2, seed=0),
        dict(capacity=7, chunk=3, seed=0),
        dict(capacity=6, seed=1),
    ]
    out = jfl.sweep(make, rounds=1, points=points, tolerate=("empty_cohort",))
    assert out.groups == 2
    assert same_bits(out.params[0], out.params[1]) and not same_bits(out.params[0], out.params[2])


def test_two_lambdas_of_one_line_are_refused_in_one_sweep(fed):
    """They have one identity, and so one noise."""
    losses = [lambda p, x, y: squared(p, x, y), lambda p, x, y: 2 * squared(p, x, y)]
    make = lambda at, **_: noisy_plan("fedavg", fed, jfl.task(start_params(), losses[at]))
    assert words(make(0)) == words(make(1))
    with pytest.raises(ValueError, match="points with different computations.*two lambdas"):
        jfl.sweep(make, rounds=1, points=[dict(at=0), dict(at=1)])


# --- data


def test_a_federation_knows_its_data(fed):
    """Replaced rows are read again; padding and held-out rows do not count."""
    same = dataclasses.replace(fed, caveats=("a",), x_test=fed.x_test + 1)
    assert same_bits(same.identity, fed.identity)
    assert same_bits(make_federation(pad=3).identity, fed.identity)
    for change in (
        dict(x=fed.x + 1),
        dict(y=fed.y + 1),
        dict(size=fed.size.at[0].add(-1)),
        dict(index=fed.index[::-1]),
    ):
        assert not same_bits(dataclasses.replace(fed, **change).identity, fed.identity)
    assert jax.tree.map(lambda x: x, fed).identity is fed.identity
    with pytest.raises((TypeError, ValueError), match="identity"):
        dataclasses.replace(fed, identity=fed.identity)
    # memory that somebody else can write to is copied
    mine = np.array(fed.x)
    held = dataclasses.replace(fed, x=jax.dlpack.from_dlpack(mine))
    mine[:] = 7
    assert same_bits(held.x, fed.x)


def test_rows_changed_inside_a_program_have_another_identity(fed, task):
    @jax.jit
    def key(x):
        plan = noisy_plan("fedavg", dataclasses.replace(fed, x=x), task)
        return jax.random.key_data(run_noise_key(jfl.init(KEY, plan)))

    one, other, again = key(fed.x), key(fed.x.at[1].add(1)), key(fed.x)
    assert same_bits(one, again) and not same_bits(one, other)


def test_a_federation_whose_arrays_were_swapped_behind_it_is_refused(fed, task):
    leaves, shape = jax.tree.flatten(fed)
    swapped = shape.unflatten([leaves[0] + 1, *leaves[1:]])
    words = "expected a federation with the rows and owners it was made of"
    with pytest.raises(ValueError, match=words):
        noisy_plan("fedavg", swapped, task)
    with pytest.raises(ValueError, match=words):
        identity.plan_identity(dataclasses.replace(noisy_plan("fedavg", fed, task), fed=swapped))


# --- pins: the same numbers everywhere


def test_pins():
    """Descriptions and first words of noise of plans with every algorithm, optimizer, model,
    sampler and mechanism of jfl: a change of one changes every recorded run.

    If that is meant, write the new ones:
    python tests/core/pins.py > tests/core/golden_identity.json
    """
    golden = json.loads((ROOT / "tests" / "core" / "golden_identity.json").read_text())
    assert set(jfl.algorithms.__all__) <= set(golden)
    assert pins.describe() == golden
