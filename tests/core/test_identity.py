"""What gives a run its noise: the identity of its plan, the plans before it, and nothing that only
says how it is computed."""

import collections
import dataclasses
import enum
import fractions
import functools
import json
import operator
import os
import random
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.paths import ROOT
from helpers.problems import (
    CLIENTS,
    close,
    make_algorithm,
    make_federation,
    noisy_grad,
    noisy_release,
    same_bits,
    squared,
    start_params,
)

import jfl
from jfl.core import hashing, identity
from jfl.core.records import Federation
from jfl.engine.round import run_noise_key

KEY = jax.random.key(4)


def noisy_plan(name, fed, task, *, lr=0.1, z=0.7, sampler=None, batch=None, upload=None, **options):
    algorithm = make_algorithm(name, noisy_grad(), lr=lr, batch=batch)
    return jfl.plan(
        fed,
        task,
        algorithm,
        sampler or jfl.sampling.poisson(CLIENTS, 0.4, capacity=CLIENTS),
        release=noisy_release(z=z),
        upload=upload,
        **options,
    )


def words(plan):
    return tuple(np.asarray(identity.plan_identity(plan)).tolist())


def of_loss(loss, fed):
    """The identity of a plan that has this loss."""
    return words(
        jfl.plan(
            fed,
            jfl.task(start_params(), loss),
            make_algorithm(
                "fedavg",
                jfl.private_grad(loss, jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0))),
            ),
            jfl.sampling.full(CLIENTS),
        )
    )


# --- hashes


def arrays():
    return [
        np.arange(3),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.float32(3),
        np.int32(-4),
        np.float64(2.5),
        np.full((2, 2), 1.5, jnp.bfloat16),
        np.arange(5, dtype=np.uint8),
        np.float32([1e-40, -1e-45, 0]),
        np.arange(3.0 * 50_000, dtype=np.float32).reshape(-1, 3),
        np.float16([1.5, -2]),
    ]


def test_hashes_are_alike_on_the_host_and_in_a_program():
    held = [jnp.asarray(x) for x in arrays()] + [jax.random.key(1)]
    host = hashing.hash_arrays(held)
    assert (
        isinstance(host, np.ndarray)
        and not np.array_equal(host, hashing.hash_arrays([*held[:7], *held[8:]]))
        and same_bits(host, jax.jit(hashing.hash_arrays)(held))
    )
    # some concrete, some traced
    assert same_bits(
        host, jax.jit(lambda part: hashing.hash_arrays([*held[:4], *part, *held[7:]]))(held[4:7])
    )
    both = jax.jit(hashing.combine)(jnp.asarray(host), jnp.uint32([1, 2, 3, 4]))
    assert same_bits(both, hashing.combine(host, np.uint32([1, 2, 3, 4])))
    assert same_bits(jax.jit(hashing.hash_int)(7), hashing.hash_int(7))


def test_hashes_tell_numbers_and_places_apart():
    of = lambda *x: tuple(hashing.hash_arrays([np.asarray(v, np.float32) for v in x]).tolist())
    assert (
        len(
            {
                of([1, 2]),
                of([2, 1]),
                of([1], [2, 0]),
                of([1, 2, 0]),
                of([1, 2], [0]),
                of([0, 1, 2]),
                of(),
            }
        )
        == 5
    )
    assert (
        of([1], [2, 0]) == of([1, 2], [0]) == of([1, 2, 0])
    )  # shapes are told by a text beside the numbers
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


def test_numbers_on_a_mesh_hash_alike():
    """Whatever else a user's program does with the numbers: here they lie on a mesh, there they
    vary along it."""
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    lies = lambda *axes: jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P(*axes)))
    host = hashing.hash_arrays([np.arange(4, dtype=np.float32)] * 2)
    assert same_bits(jax.jit(lambda a, b: hashing.hash_arrays([a, b]))(lies("a"), lies()), host)
    part = lambda x: hashing.hash_arrays([x[0], x[1], jnp.float32(3)])[None]
    spread = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=jax.P("a"), out_specs=jax.P("a")))
    assert same_bits(
        spread(lies("a"))[0], hashing.hash_arrays([np.float32(0), np.float32(1), np.float32(3)])
    )


# --- what is part of an identity


def linear(params, x, y):
    return params["w"] @ x - y * params["b"]


def test_identity_tells_plans_apart(fed, task):
    """Whatever changes what is released changes the noise; how it is stored does not."""
    p = functools.partial(noisy_plan, "fedavg", fed, task)
    other = make_federation(seed=9)
    swapped = dataclasses.replace(
        fed, index=fed.index.at[2].set(fed.index[2][jnp.array([1, 0, 2, 3, 4, 5, 6, 7, 8])])
    )
    plans = dict(
        base=p(),
        lr=p(lr=np.float32(0.1) * (1 + 1e-6)),
        z=p(z=0.7000001),
        algorithm=noisy_plan("fedprox", fed, task),
        data=noisy_plan("fedavg", other, task),
        label=noisy_plan("fedavg", dataclasses.replace(fed, y=fed.y.at[11].add(1e-3)), task),
        partition=noisy_plan("fedavg", swapped, task),
        weights=p(weights="size"),
        upload=p(upload=jfl.chain(jfl.clip_l2(1.0), jfl.total())),
        sampler=p(sampler=jfl.sampling.poisson(CLIENTS, 0.41, capacity=CLIENTS)),
        loss=noisy_plan("fedavg", fed, jfl.task(start_params(), linear)),
        start=noisy_plan("fedavg", fed, jfl.task({"b": 0.0, "w": jnp.zeros(3)}, squared)),
    )
    found = {k: words(v) for k, v in plans.items()}
    assert len(set(found.values())) == len(plans), found
    # the same inside and outside of a program, alone and among others
    assert (
        tuple(np.asarray(jax.jit(identity.plan_identity)(plans["base"])).tolist()) == found["base"]
    )
    assert [tuple(w.tolist()) for w in identity.plan_identities(list(plans.values()))] == list(
        found.values()
    )
    assert jfl.describe(plans["base"])["parameters"] == {
        "['b']": "float32[]",
        "['w']": "float32[3]",
    }
    # equal identities are equal descriptions, and the other way round
    said = {k: json.dumps(jfl.describe(v), sort_keys=True) for k, v in plans.items()}
    assert len(set(said.values())) == len(plans) and all("0x" not in v for v in said.values())
    assert identity.differences(jfl.describe(plans["base"]), jfl.describe(plans["z"])) == [
        "release.stages[2].noise: 0.7 there, 0.7000001 here"
    ]


def test_how_a_plan_is_computed_is_no_part_of_it(fed, task):
    """The list in identity.EXCLUDED_FIELDS, and what no plan holds."""
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

    assert (
        at(capacity=9)
        == at(capacity=8)
        == at(microbatch=2)
        == at(path="vmap")
        == at(path="bookkeeping")
    )
    many = [
        jfl.sampling.poisson(40_000, 0.001, capacity=c) for c in (90, 99)
    ]  # a law up to the capacity
    few = identity.Reader()
    assert few.text(few.data(many[0])) == few.text(few.data(many[1]))
    assert set(identity.EXCLUDED_FIELDS) == {
        "Plan",
        "Grad",
        "Task",
        "Algorithm",
        "Sampler",
        "Responders",
        "Available",
        "sampling.poisson",
        "sampling.poisson_few",
        "batches.poisson",
    }


def test_responders_are_told_by_their_latencies(fed, task):
    make = lambda latency, jitter: words(
        noisy_plan(
            "fedavg",
            fed,
            task,
            sampler=jfl.sampling.first_responders(
                CLIENTS, 3, jnp.arange(1.0, CLIENTS + 1) * latency, jitter=jitter
            ),
        )
    )
    assert len({make(1.0, 0.5), make(2.0, 0.5), make(1.0, 0.6)}) == 3


@pytest.mark.parametrize("name", jfl.algorithms.__all__)
def test_every_function_of_jfl_has_a_registered_name(name, fed, task):
    """Then files may move and helpers be renamed.  Uploads, weights, shapes and schedules too."""
    upload = jfl.chain(
        jfl.clip_per_layer((1.0, 2.0)),
        jfl.total(),
        jfl.gaussian(jfl.schedules.exponential(1.0, 0.9, total=5)),
    )
    plan = noisy_plan(
        name,
        fed,
        task,
        upload=upload,
        weights=jfl.schedules.piecewise([3], np.ones((2, CLIENTS))) if name == "fedavg" else "size",
    )
    said = json.dumps(jfl.describe(plan))
    assert '"registered": false' not in said and "algorithms" not in said and "jfl.core" not in said


def test_a_name_by_hand(fed):
    def make(factor, name):
        def loss(params, x, y):
            return factor * squared(params, x, y)

        return jfl.named(name)(loss)

    def make_otherwise(factor, name):
        return jfl.named(name)(lambda params, x, y: squared(params, x, y) * factor)

    assert of_loss(make(1.0, "mine"), fed) == of_loss(make_otherwise(1.0, "mine"), fed)
    assert (
        len(
            {
                of_loss(make(1.0, "mine"), fed),
                of_loss(make(2.0, "mine"), fed),
                of_loss(make(1.0, "yours"), fed),
            }
        )
        == 3
    )
    with pytest.raises(ValueError, match="expected a name"):
        jfl.named("")


# --- functions of a user's own


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


def _closes_over(held):
    return lambda x: (x, held)


def said(value):
    reader = identity.Reader()
    return reader.text(reader.data(value))


@pytest.mark.parametrize(
    "make",
    [
        lambda a: _closes_over(a),
        lambda a: _closes_over({"k": [a]}),
        lambda a: _closes_over(Slots(a)),
        lambda a: functools.partial(_closes_over, a),
        lambda a: functools.partial(_closes_over, held=(a,)),
        lambda a: _closes_over(functools.partial(_closes_over, a)),
        lambda a: lambda x, held=(a,): (x, held),
        lambda a: _closes_over((np.float32(a[0]),)),
        lambda a: _closes_over(jax.random.key(int(a[0]))),
    ],
    ids=["bare", "container", "slots", "partial", "keyword", "inside", "default", "scalar", "key"],
)
def test_numbers_that_a_function_holds_are_in_its_name(make):
    """They are constants of the program: two losses that differ there alone must not share
    noise."""
    one, same, other = (said(make(np.array(v, np.float32))) for v in ([1, 2], [1, 2], [2, 2]))
    assert one == same != other
    # leaves are named by their shape: a program gives them their numbers
    tree = jax.tree_util.Partial(_closes_over, jnp.ones(2)), {"a": [np.ones(2)]}
    assert said(tree) == said(jax.tree.map(lambda x: x + 1, tree))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jitted", "checkpoint"]
)
def test_identity_tells_losses_apart(wrap, fed):
    """Two losses of one name; a loss that a user has jitted is a function like any other."""

    def make(factor):
        def loss(params, x, y):
            return factor * squared(params, x, y)

        return wrap(loss)

    def nested(one):
        if one:

            def loss(params, x, y):
                return (lambda v: 1.0 * v)(squared(params, x, y))
        else:

            def loss(params, x, y):
                return (lambda v: 2.0 * v)(squared(params, x, y))

        return wrap(loss)

    assert of_loss(make(1.0), fed) != of_loss(make(2.0), fed)
    assert of_loss(nested(True), fed) != of_loss(nested(False), fed)
    assert of_loss(make(1.0), fed) == of_loss(make(1.0), fed)


SCALE = 1.0


def of_a_global(params, x, y):
    return SCALE * squared(params, x, y)


def test_globals_count(fed, monkeypatch):
    before = of_loss(of_a_global, fed)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert of_loss(of_a_global, fed) != before
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    assert of_loss(of_a_global, fed) == before


def written(text, name="jfl_test_module", folder=None):
    """A module made of a text; with a folder, one that has a file."""
    module = types.ModuleType(name)
    file = str(folder / f"{name}.py") if folder else f"<{name}>"
    if folder:
        Path(file).write_text(textwrap.dedent(text))
    module.__file__ = file
    exec(compile(textwrap.dedent(text), file, "exec"), module.__dict__)
    return module


def test_the_source_counts_and_its_place_does_not(tmp_path):
    text = """
        import jax.numpy as jnp
        def loss(params, x, y):
            return {0}(x @ params["w"] + params["b"] - y) ** 2 + 0 * jnp.{1}(y)
    """
    source = lambda *words, more="", where="a": (
        written(more + textwrap.dedent(text.format(*words)), where, tmp_path).loss
    )
    base = said(source("", "tanh"))
    assert (
        base
        == said(source("", "tanh", where="b"))
        == said(source("", "tanh", more="# moved down\n\n\nx = 1\n"))
    )
    assert len({base, said(source("2 * ", "tanh")), said(source("", "sinh"))}) == 3


REJECTED = "jfl.describe: expected .*jfl.named"


def test_a_function_without_its_source_is_rejected(tmp_path):
    """Made by exec, or in a file that was edited after the import: the code and the text differ."""
    bare = written("def loss(x):\n    return x\n")
    with pytest.raises(ValueError, match="the source of the function loss.*jfl.named"):
        said(bare.loss)
    assert said(jfl.named("tests.bare")(bare.loss))
    module = written("def loss(params, x, y):\n    return params @ x - y\n", "edited", tmp_path)
    before = said(module.loss)
    (tmp_path / "edited.py").write_text("def loss(params, x, y):\n    return params @ x + y\n")
    with pytest.raises(ValueError, match=REJECTED):
        said(module.loss)
    again = written("def loss(params, x, y):\n    return params @ x + y\n", "edited", tmp_path)
    assert before != said(again.loss)


def with_an_assert(params, x, y):
    assert x.ndim == 1
    return params @ x - y


def test_code_that_differs_from_its_source_is_rejected():
    """Pytest compiles the asserts of this file to other code; `replace` makes another function."""
    with pytest.raises(ValueError, match="an import hook rewrote it.*jfl.named"):
        said(with_an_assert)
    code = bare.__code__.replace(co_consts=(None, 2.0))
    with pytest.raises(ValueError, match=REJECTED):
        said(types.FunctionType(code, globals(), "bare"))
    assert said(bare)


def bare(x):
    return x * 1.0


def test_a_module_that_is_passed_on_counts_as_a_whole(monkeypatch):
    helper = types.ModuleType("jfl_test_helper")
    helper.A, helper.B = 1.0, 1.0
    takes_b = lambda module, v: v * module.B
    passes_on = lambda v: takes_b(helper, v) * helper.A
    takes_a = lambda v: v * helper.A
    before, alone = said(passes_on), said(takes_a)
    helper.B = 2.0
    assert said(passes_on) != before
    assert said(takes_a) == alone


def test_lambdas_of_one_line_are_distinguished(tmp_path):
    one, other = (lambda x: x + 1), (lambda x: x + 2)
    assert said(one) != said(other)
    starred = written("f = lambda*a: sum(a)\ng = lambda*a: max(a)\n", "starred", tmp_path)
    assert said(starred.f) != said(starred.g)
    edits = ("x = lambda v: (v +\n  1)\n", "x = lambda v: (v +\n  2)\n")
    first, second = (said(written(text, "lines", tmp_path).x) for text in edits)
    assert first != second


class Net(nn.Module):
    """Two activation functions inside one class: the body is not a field."""

    _gain: float = 1.0

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(x))[0] * self._gain


def of_module(module, fed):
    params = module.init(jax.random.key(0), jnp.zeros(3))
    return of_loss(lambda p, x, y: (module.apply(params, x) - y) ** 2 + 0 * p["b"], fed)


def test_bodies_of_classes_and_private_fields_count(fed):
    """A flax class whose body was edited, and a field whose name begins with an underscore."""

    def edited(activation):
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1)(activation(x))[0]

        return Net()

    def other():
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(1)(nn.sigmoid(x))[0]

        return Net()

    found = [
        of_module(m, fed)
        for m in (Net(), Net(_gain=2.0), edited(nn.tanh), edited(nn.relu), other())
    ]
    assert len(set(found)) == len(found)
    assert of_module(Net(), fed) == found[0] and of_module(other(), fed) == found[-1]

    class Plain:
        def __init__(self, factor):
            self._factor = factor

        def __call__(self, params, x, y):
            return self._factor * squared(params, x, y)

    assert of_loss(Plain(1.0), fed) == of_loss(Plain(1.0), fed) != of_loss(Plain(2.0), fed)


def test_rules_of_derivatives_count(fed):
    def make(factor):
        @jax.custom_vjp
        def same(v):
            return v

        same.defvjp(lambda v: (v, None), lambda _, g: (factor * g,))
        return lambda params, x, y: same(squared(params, x, y))

    assert of_loss(make(1.0), fed) == of_loss(make(1.0), fed) != of_loss(make(2.0), fed)


def test_modules_that_a_function_mentions(tmp_path):
    """A library's module counts by its name, a user's by what the function can take from it."""
    helper = written(
        "FACTOR = 1.0\nUNUSED = 1\ndef act(v):\n    return FACTOR * v\n", "helper", tmp_path
    )
    uses = lambda v: helper.act(jnp.tanh(v))
    passes_on = lambda v: getattr(helper, "a" + "ct")(v)
    base, whole = said(uses), said(passes_on)
    helper.UNUSED = 2
    assert said(uses) == base and said(passes_on) != whole
    helper.FACTOR = 2.0
    assert said(uses) != base


def test_circles_end():
    def one(x):
        return two(x)

    def two(x):
        return one(x) + one.__name__.count("o")

    held = {}
    held["self"] = lambda x: held and x
    assert said(one) == said(one) != said(two) and "same as" in said(held["self"])
    # objects that all hold each other, and shared ones, are said once
    ring = [types.SimpleNamespace() for _ in range(8)]
    for node in ring:
        node.others = [other for other in ring if other is not node]
    assert len(said(lambda x: (x, ring))) < 20_000


def decorated(factor):
    @functools.wraps(jfl.named("decorated")(lambda z: z))
    def inner(z):
        return factor * z

    return inner


def with_attribute(factor):
    def inner(z):
        return inner.factor * z

    inner.factor = factor
    return inner


class Fields:
    def __init__(self, **fields):
        vars(self).update(fields)

    def __call__(self, z):
        return z


def enum_of(value):
    return enum.Enum("Sizes", dict(SMALL=value)).SMALL


def remat(factor):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, z):
            return factor * z

    return nn.remat(Block)()


class Wrapping:
    def __init__(self, factor):
        functools.update_wrapper(self, jnp.tanh)
        self.factor = factor

    def __call__(self, z):
        return self.factor * z


class Answers:
    """A config whose every unknown attribute has an answer."""

    def __init__(self, **fields):
        self._fields_ = fields

    def __getattr__(self, name):
        return self.__dict__.get("_fields_", {}).get(name)


@pytest.mark.parametrize(
    "make",
    [
        lambda v: flax.core.FrozenDict(a=v),
        decorated,
        with_attribute,
        lambda v: Fields(scope=v),
        lambda v: Fields(parent=v),
        lambda v: Fields(_state=v),
        enum_of,
        lambda v: {"a": 1, "b": 2} if v == 1.0 else {"b": 2, "a": 1},
        lambda v: {1: v, "1": 0.0},
        lambda v: {"a": v}.get,
        remat,
        Wrapping,
        lambda v: Answers(a=v),
        fractions.Fraction,
        lambda v: types.SimpleNamespace(a=v),
        lambda v: Wrapping(v).__call__,
        lambda v: jax.tree.structure({"a": 1, "b": v and None} if v == 1.0 else (1, 2)),
        lambda v: slice(int(v)),
        lambda v: (lambda *a: a) if v == 1.0 else (lambda a: a),
        lambda v: collections.OrderedDict(a=v),
        lambda v: np.ma.masked_array([1.0, 2.0], [v == 1.0, False]),
    ],
    ids=lambda f: "",
)
def test_what_else_a_function_may_hold(make):
    """Each of these changes what is computed, and two values of it have two descriptions; equal
    ones have one."""
    one, same, other = (said(_closes_over(make(v))) for v in (1.0, 1.0, 2.0))
    assert one == same != other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0, 1), [0, 1]),
        ({"a": (0,)}, {"a": [0]}),
        (1j, "1j"),
        (range(3), "range(0, 3)"),
        (b"a", "b'a'"),
        (..., "Ellipsis"),
        (np.dtype("float32"), "float32"),
        ({1}, frozenset({1})),
        ({"a": 1}, types.MappingProxyType({"a": 1})),
        (np.array([1, "a"], object), (1, "a")),
        (np.array([[1, 2]], object), np.array([[1], [2]], object)),
        (jnp.asarray(2.0), jnp.float32(2.0)),  # the first is weakly typed
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_different_types_are_distinguished(one, other):
    assert said(_closes_over(one)) != said(_closes_over(other))
    assert said(one) != said(other) or isinstance(one, (int, float, jax.Array))  # leaves: by bits


def test_an_empty_cell_is_not_a_string():
    def make(fill):
        if fill:
            held = {"cell": "empty"} if fill == "dict" else "empty"
        return lambda x: (x, held)

    assert len({said(make(fill)) for fill in ("", "text", "dict")}) == 3


def test_differences_distinguish_types():
    assert identity.differences({"a": True, "b": 1}, {"a": 1, "b": 1.0}) == [
        "a: true there, 1 here",
        "b: 1 there, 1.0 here",
    ]


def test_a_container_that_contains_itself_is_rejected():
    held, outer = [1], {}
    held.append((held,))
    outer["self"] = outer
    for value in (held, outer):
        with pytest.raises(ValueError, match="do not contain themselves"):
            said(_closes_over(value))
    assert "contains itself" in said(jfl.named("holds a circle")(_closes_over(held)))
    node = Fields()
    node.all = {node}
    with pytest.raises(ValueError, match="do not contain themselves"):
        said(_closes_over(node.all))
    # one that is reached again through an object has a description, and so has one that is shared
    node, row = types.SimpleNamespace(), [1]
    node.all = [node]
    assert said(_closes_over([node])) and said(_closes_over([row, row]))


def test_two_functions_of_one_name_are_rejected(fed):
    one = jfl.named("twin")(lambda params, x, y: squared(params, x, y))
    two = jfl.named("twin")(lambda params, x, y: 2 * squared(params, x, y))
    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        said((one, _closes_over(two)))
    classes = [jfl.named("twin")(cls) for cls in (type("A", (), {}), type("B", (), {}))]
    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        said(classes)
    # one statement may make several, which differ in what they close over
    assert said([jfl.named("scaled")(_closes_over(v)) for v in (1.0, 2.0)])

    def plan(loss, lr):
        algorithm = make_algorithm("fedavg", jfl.grad(loss), lr=lr)
        task = jfl.task(start_params(), loss)
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))

    with pytest.raises(ValueError, match="one function for the name 'twin'"):
        identity.plan_identities([plan(one, 0.1), plan(two, 0.2)])


class Deque(collections.deque):
    """A class of a user's whose base keeps its content in C."""


@pytest.mark.parametrize(
    "value",
    [
        collections.deque([1]),
        Deque([1]),
        operator.itemgetter(1),
        re.compile("a"),
        random.Random(1),
        np.random.default_rng(1),
        threading.Lock(),
        iter([1]),
        np.frompyfunc(abs, 1, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_whose_state_is_hidden_are_rejected(value):
    """They may compute different things, and nothing distinguishes them; a name does."""
    with pytest.raises(ValueError, match=REJECTED):
        said(_closes_over(value))
    one, other = (
        said(jfl.named(name)(_closes_over(value))) for name in ("tests.one", "tests.other")
    )
    assert one != other
    with pytest.raises(ValueError, match=REJECTED):  # also next to a named function that holds it
        said([jfl.named("tests.one")(_closes_over(value)), _closes_over(value)])


def imports_when_called(z):
    from helpers.paths import ROOT as place

    return z if place else 0.0


def imports_a_library(z):
    import optax

    return optax.l2_loss(z)


def test_functions_that_import_a_module_of_the_users_are_rejected():
    assert said(imports_a_library)
    with pytest.raises(ValueError, match="imported at the top of a file.*helpers.paths"):
        said(imports_when_called)


# --- what gives a call its noise


def flat_loss(params, x, y):
    return 0.0 * params["a"].sum()


def still(fed, value=0.0, lr=0.1, **options):
    """A plan whose release is noise alone: every gradient is 0."""
    algorithm = jfl.algorithms.fedavg(jfl.grad(flat_loss), lr=lr, batch=jfl.batches.full(), steps=1)
    return jfl.plan(
        fed,
        jfl.task({"a": jnp.full(256, value)}, flat_loss),
        algorithm,
        jfl.sampling.full(CLIENTS),
        release=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0)),
        **options,
    )


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
    """Whether two noises of 256 numbers are the same, up to the rounding of what they were added
    to."""
    correlation = np.corrcoef(a, b)[0, 1]
    assert (
        correlation > 0.99 or abs(correlation) < 0.4
    )  # independent ones are above with a chance below 1e-10
    return correlation > 0.99


@pytest.fixture(scope="module")
def plans(fed):
    """Three plans that differ in a number alone, so that one program serves all."""
    return [still(fed, v) for v in (0.0, 1.0, 2.0)]


def test_histories(plans):
    """What runs under another plan has noise of its own, whatever came before; the same plan again
    goes on."""
    a, b, c = plans
    straight, _ = noises(jfl.init(KEY, a), a, 4)
    first, at1 = noises(jfl.init(KEY, a), a, 1)
    second, at2 = noises(at1, a, 1)
    assert alike(first[0], straight[0]) and alike(second[0], straight[1])
    assert alike(
        noises(at2, a, 1)[0][0], straight[2]
    )  # the same plan again equals the straight run
    # at round 0 only the identity changes: what a run was begun for does not matter, but for its
    # first parameters
    faster = dataclasses.replace(a, algorithm=still(make_federation(), lr=0.2).algorithm)
    assert alike(
        noises(jfl.init(KEY, a), faster, 1)[0][0], noises(jfl.init(KEY, faster), faster, 1)[0][0]
    )
    assert not alike(noises(jfl.init(KEY, a), b, 1)[0][0], noises(jfl.init(KEY, b), b, 1)[0][0])
    # two branches of one run
    assert not alike(noises(at1, b, 1)[0][0], noises(at1, c, 1)[0][0])
    # A -> C against B -> C, at one round and with one seed
    from_a, from_b = (noises(noises(jfl.init(KEY, p), p, 1)[1], c, 2)[0] for p in (a, b))
    assert not alike(from_a[0], from_b[0]) and not alike(from_a[1], from_b[1])
    # A -> B at two different rounds: what both compute is round 2
    early, late = noises(at1, b, 2)[0][1], noises(at2, b, 1)[0][0]
    assert not alike(early, late)
    # A -> B -> A is not A
    back = noises(noises(at1, b, 1)[1], a, 1)[0][0]
    assert not alike(back, straight[2])
    assert not alike(back, noises(noises(at1, c, 1)[1], a, 1)[0][0])


def test_a_vmap_over_plans_from_one_start(plans):
    """Each plan has noise of its own, and that of a run of its own."""
    begun = jfl.init(KEY, plans[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *plans)
    runs = jax.jit(jax.vmap(lambda plan: jfl.scan(begun, plan, [1])[0]))(stacked)
    moved = np.asarray(runs.server.params["a"])
    assert not alike(moved[0], moved[1]) and not alike(moved[1], moved[2])
    for i, plan in enumerate(plans):
        alone = noises(begun, plan, 1)[1].server.params["a"]
        assert alike(moved[i], alone)


def test_simulate_scan_and_rounds_have_one_noise(fed, task):
    everyone = dict(sampler=jfl.sampling.full(CLIENTS), batch=jfl.batches.full())
    plan = noisy_plan("fedavg", fed, task, **everyone)
    ours = jfl.simulate(KEY, plan, 3, evaluate_every=3)
    scanned = jax.jit(lambda run: jfl.scan(run, plan, [3])[0])(jfl.init(KEY, plan))
    run, one_round = jfl.init(KEY, plan), jax.jit(lambda run: jfl.run_round(run, plan)[0])
    for _ in range(3):
        run = one_round(run)
    close(ours.run.server, scanned.server)
    close(ours.run.server, run.server)
    assert same_bits(ours.run.plan_identity, identity.plan_identity(plan)) and same_bits(
        ours.run.plan_history, identity.initial_history(plan)
    )
    assert same_bits(run_noise_key(ours.run), run_noise_key(run))


def test_paired_noise_opts_out(fed, task):
    one, two = (noisy_plan("fedavg", fed, task, lr=lr, paired_noise=True) for lr in (0.1, 0.2))
    assert same_bits(run_noise_key(jfl.init(KEY, one)), run_noise_key(jfl.init(KEY, two)))
    assert words(one) != words(two)
    assert any("share their noise" in c for c in jfl.guarantee(one, 2, view="server").caveats)


@pytest.mark.slow
def test_points_that_would_be_compiled_apart_are_refused(fed, task):
    """They have one noise, and two programs may add in another order."""
    make = lambda capacity, chunk=None, **_: noisy_plan(
        "fedavg",
        fed,
        task,
        chunk=chunk,
        sampler=jfl.sampling.poisson(CLIENTS, 0.4, capacity=capacity),
    )
    with pytest.raises(
        ValueError, match="sweep: expected points with different computations.*different seeds"
    ):
        jfl.sweep(make, rounds=1, points=[dict(capacity=6), dict(capacity=7)])
    with pytest.raises(ValueError, match="expected points"):
        jfl.sweep(
            lambda path: jfl.plan(
                fed,
                task,
                make_algorithm("fedavg", noisy_grad(path=path)),
                jfl.sampling.full(CLIENTS),
            ),
            rounds=1,
            points=[dict(path="vmap"), dict(path="auto")],
        )
    # of different seeds they may be; in one group they are one and the same release
    out = jfl.sweep(
        make,
        rounds=1,
        points=[
            dict(capacity=7, chunk=2, seed=0),
            dict(capacity=7, chunk=3, seed=0),
            dict(capacity=6, seed=1),
        ],
        tolerate=("empty_cohort",),
    )
    assert out.groups == 2
    assert same_bits(out.params[0], out.params[1]) and not same_bits(out.params[0], out.params[2])


# --- data


def test_a_federation_knows_its_data(fed):
    """Replaced rows are read again; a carried federation keeps what it knows; padding and held-out
    rows do not count."""
    same = dataclasses.replace(fed, caveats=("a",), x_test=fed.x_test + 1)
    assert same_bits(same.identity, fed.identity) and same_bits(
        make_federation(pad=3).identity, fed.identity
    )
    for change in (
        dict(x=fed.x + 1),
        dict(y=fed.y + 1),
        dict(size=fed.size.at[0].add(-1)),
        dict(index=fed.index[::-1]),
    ):
        assert not same_bits(dataclasses.replace(fed, **change).identity, fed.identity)
    carried = jax.tree.map(lambda x: x, fed)
    assert carried.identity is fed.identity
    with pytest.raises((TypeError, ValueError), match="identity"):
        dataclasses.replace(fed, identity=fed.identity)
    # memory that somebody else can write to is copied
    mine = np.ones((4, 2), np.float32)
    held = Federation(
        jax.dlpack.from_dlpack(mine),
        jnp.zeros(4),
        jnp.zeros((1, 4), jnp.int32),
        jnp.array([4]),
        mine[:1],
        mine[:1, 0],
        jnp.zeros((1, 0), jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    mine[:] = 7
    assert np.asarray(held.x).max() == 1


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
    with pytest.raises(
        ValueError, match="expected a federation with the rows and owners it was made of"
    ):
        noisy_plan("fedavg", swapped, task)
    with pytest.raises(
        ValueError, match="expected a federation with the rows and owners it was made of"
    ):
        identity.plan_identity(dataclasses.replace(noisy_plan("fedavg", fed, task), fed=swapped))
    fine = dataclasses.replace(fed, x=fed.x + 1)
    assert words(noisy_plan("fedavg", fine, task)) != words(noisy_plan("fedavg", fed, task))


def test_no_program_reads_rows_for_the_noise(fed, task):
    """To hash rows a program looks at their bits: none of the size of x are."""

    def looks(jaxpr):
        for eqn in jaxpr.eqns:
            if "bitcast" in str(eqn.primitive):
                yield eqn.invars[0].aval.size
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")
            ):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    yield from looks(getattr(inner, "jaxpr", inner))

    plan = noisy_plan("fedavg", fed, task)
    seen = list(
        looks(
            jax.make_jaxpr(lambda run, plan: jfl.scan(run, plan, [1]))(
                jfl.init(KEY, plan), plan
            ).jaxpr
        )
    )
    assert seen and not {fed.x.size, fed.y.size, fed.index.size} & set(seen)
    assert fed.x.size in set(looks(jax.make_jaxpr(lambda x: hashing.hash_arrays([x]))(fed.x).jaxpr))


# --- pins: the same numbers everywhere

GOLDEN = ROOT / "tests" / "core" / "golden_identity.json"


def pinned(python=sys.executable, **environment):
    done = subprocess.run(
        [python, str(ROOT / "tests" / "core" / "pins.py")],
        env=os.environ | dict(JAX_PLATFORMS="cpu", **environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_pins():
    """Descriptions and first words of noise of plans with every algorithm, optimizer, model,
    sampler and mechanism of jfl: whoever changes them changes every recorded run.

    If that is meant, write the new ones:
    python tests/core/pins.py > tests/core/golden_identity.json
    """
    found, golden = pinned(), json.loads(GOLDEN.read_text())
    assert set(jfl.algorithms.__all__) <= set(golden)
    assert found == golden


def copied(folder):
    """The package, as a folder that PYTHONPATH can name."""
    shutil.copytree(ROOT / "jfl", folder / "jfl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "kernels", folder / "jfl" / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    return str(folder)


@pytest.mark.slow  # every function has a registered name, in which no module is
def test_moved_modules_keep_the_noise(tmp_path):
    """The package with two modules renamed: every description and all noise stay."""
    copied(tmp_path)
    moved = {"privacy/mechanisms/stages": "links", "sampling/batches": "row_batches"}
    for old, new in moved.items():
        path = tmp_path / "jfl" / f"{old}.py"
        path.rename(path.with_name(f"{new}.py"))
    for path in (tmp_path / "jfl").rglob("*.py"):
        text = path.read_text()
        for old, new in moved.items():
            name = old.split("/")[-1]
            text = re.sub(rf"(?m)^(from \.[\w.]*)\b{name} import", rf"\1{new} import", text)
            text = re.sub(
                rf"(?m)^(from \.[\w.]* import )(.*, )?{name}\b( as \w+)?",
                lambda m, name=name, new=new: f"{m[1]}{m[2] or ''}{new}{m[3] or f' as {name}'}",
                text,
            )
        path.write_text(text)
    assert not (tmp_path / "jfl" / "sampling" / "batches.py").exists()
    assert pinned(PYTHONPATH=str(tmp_path)) == json.loads(GOLDEN.read_text())


def other_pythons():
    """Interpreters of other versions that have this version of jax; JFL_OTHER_PYTHON names one."""
    names = (
        [os.environ["JFL_OTHER_PYTHON"]]
        if os.environ.get("JFL_OTHER_PYTHON")
        else [f"python3.{minor}" for minor in (11, 12, 13, 14) if minor != sys.version_info[1]]
    )
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        probe = "import sys, jax; print(*sys.version_info[:2], jax.__version__)"
        done = subprocess.run([path, "-c", probe], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.split()[2:] == [jax.__version__]:
            yield path


@pytest.mark.slow
def test_another_python_has_the_same_noise(tmp_path):
    found = next(other_pythons(), None)
    if found is None:
        pytest.skip(
            "no other Python with this jax here: name one in JFL_OTHER_PYTHON (3.11 and 3.13 are "
            "to agree)"
        )
    assert pinned(found, PYTHONPATH=copied(tmp_path)) == json.loads(GOLDEN.read_text())
