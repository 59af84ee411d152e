"""How records print: what they are in a few lines, without arrays, whatever their leaves are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.problems import (
    CLIENTS,
    make_federation,
    noisy_grad,
    noisy_release,
    squared,
    start_params,
)

import jfl
from jfl.local import training

KEY = jax.random.key(0)


class Hostile:
    """A leaf that answers nothing."""

    def __getattribute__(self, name):
        if name != "__class__":
            raise RuntimeError(f"no {name}")
        return Hostile

    def __repr__(self):
        raise RuntimeError("no text")


@pytest.fixture(scope="module")
def plan():
    fed = make_federation(classes=3, held_out=2)
    task = jfl.models.logistic(fed)
    mechanism = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1), jfl.divide(3))
    alg = jfl.algorithms.scaffold(
        jfl.private_grad(task.loss, mechanism),
        lr=0.25,
        steps=2,
        batch=jfl.batches.without_replacement(3),
        server_optimizer=functools.partial(optax.sgd, momentum=0.9),
    )
    return jfl.plan(
        fed,
        task,
        alg,
        jfl.sampling.without_replacement(CLIENTS, 4),
        release=jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(0.7), jfl.divide(4)),
    )


@pytest.fixture(scope="module")
def out(plan):
    return jfl.simulate(KEY, plan, 4, evaluate_every=2)


@pytest.fixture(scope="module")
def swept(plan):
    return jfl.sweep(lambda lr: plan, rounds=2, lr=[0.1, 0.2], seed=[0, 1])


def short(value, lines=12):
    """The repr, which is short and shows no array."""
    text = repr(value)
    assert (
        0 < len(text) <= 1500
        and text.count("\n") < lines
        and max(map(len, text.split("\n"))) <= 200
    ), text
    assert not any(
        mark in text for mark in ("Array(", "array(", "[[", "Tracer", "object at 0x", "<function")
    ), text
    return text


def test_a_plan_says_what_is_run_and_accounted(plan):
    text = short(plan)
    for part in (
        "scaffold(",
        f"{CLIENTS} clients",
        "12 parameters",
        "lr=0.25",
        "steps=2",
        "without_replacement(3)",
        "sgd(momentum=0.9)",
        "server_lr=1",
        "40 rows",
        "3 classes",
        "4 of 7 clients",
        (
            'chain(clip_l2(0.8), total(), gaussian(1.1), divide(3), adjacency="replace_one"); 2 '
            "releases a round"
        ),
        'chain(clip_l2(0.5), total(), gaussian(0.7), divide(4), adjacency="replace_one")',
        "jfl.guarantee(plan",
    ):
        assert part in text, (part, text)


@pytest.mark.slow
def test_results_say_how_they_ended(out, swept):
    final = f"accuracy {float(out.metrics.accuracy[-1]):.4g}"
    for part in ("4 rounds", "healthy", final, "12 numbers", "jfl.guarantee(plan, rounds=4"):
        assert part in short(out), part
    assert "2 evaluations" in short(out.metrics) and final in short(out.metrics)
    assert "after round 4" in short(out.run) and "healthy" in short(out.run)
    sick = dataclasses.replace(out.run, health=out.run.health._replace(overflow=jnp.int32(3)))
    assert "overflow=3" in short(sick)
    for part in (
        "4 points over",
        "lr",
        "seed",
        "1 program",
        "0 failed",
        "jfl.guarantee(sweep.plans[i]",
    ):
        assert part in short(swept), part
    assert "4 points" in short(swept.metrics)


def test_the_parts(plan, out):
    assert "7 clients, 40 rows of float32[3], 3 to 9 a client" in short(
        plan.fed
    ) and "14 held out" in short(plan.fed)
    assert "12 parameters" in short(plan.task) and "3 parameters" in short(
        jfl.task(jnp.zeros(3), squared)
    )
    for part in (
        plan.algorithm,
        plan.sampler,
        plan.release,
        *plan.release.stages,
        *plan.algorithm.releases,
        plan.algorithm.client,
        plan.algorithm.server,
        out.run.server,
        noisy_grad(),
        plan.algorithm.releases[0].batches,
    ):
        assert "\n" not in short(part)
    assert len(repr(training.Server(jnp.zeros((300, 300)), {"m": np.ones(400)}))) < 100
    assert (
        repr(jfl.Fn(squared, dict(lr=np.float32(0.1), w=np.zeros((5, 2))), dict(steps=3)))
        == "squared(lr=0.1, w=float64[5,2], steps=3)"
    )


def test_a_population_prints_without_its_rows():
    fed = jfl.population(
        (np.zeros((60, 4), "f4"), np.arange(60) % 3),
        [20] * 3,
        test=(np.zeros((6, 4), "f4"), np.arange(6) % 3),
    )
    assert "3 clients, 60 rows of host[4], 20 a client, on the host" in short(fed)


@pytest.mark.parametrize(
    "mechanism",
    [
        noisy_release(),
        noisy_release(adjacency="add_remove"),
        jfl.chain(jfl.total()),
        jfl.chain(jfl.total(), jfl.divide("weight")),
        jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=0.3)),
        jfl.chain(
            jfl.clip_per_layer((3.0, 4.0)), jfl.total(), jfl.gaussian(2.0), jfl.divide("size")
        ),
        jfl.chain(jfl.bounded(2.0, "upload"), jfl.total(), jfl.gaussian(1.5)),
        jfl.chain(jfl.bounded(2.0, "prox_erm"), jfl.total(), jfl.gaussian(1.5)),
    ],
    ids=range(8),
)
def test_a_mechanism_prints_as_the_call_that_makes_it(mechanism):
    again = eval(short(mechanism), vars(jfl))
    assert jax.tree.structure(again) == jax.tree.structure(mechanism)
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(mechanism))
    )


def test_functions_of_the_round_and_levels_of_clients():
    m = jfl.chain(
        jfl.clip_l2(lambda r: 1.0 / (r + 1)), jfl.total(), jfl.gaussian(jnp.ones(CLIENTS))
    )
    assert "of the round" in short(m) and f"float32[{CLIENTS}]" in short(m)
    assert "clip_adaptive(0.1)" in short(
        jfl.chain(jfl.clip_adaptive(0.1, 4), jfl.total(), jfl.gaussian(1.0))
    )


ODD = [
    object(),
    None,
    True,
    3,
    "text",
    np.zeros((2, 3)),
    jax.ShapeDtypeStruct((3, 4), "f4"),
    KEY,
    [1, 2],
    Hostile(),
]


@pytest.mark.parametrize("odd", ODD, ids=lambda x: type(x).__name__)
def test_odd_leaves(plan, out, swept, odd):
    """Pytrees are rebuilt with anything for their leaves; a repr is for looking at them, and never
    fails."""
    for value in (
        plan,
        plan.fed,
        plan.task,
        plan.algorithm,
        plan.sampler,
        plan.release,
        plan.algorithm.releases,
        out,
        out.metrics,
        out.run,
        noisy_grad(),
        plan.algorithm.client,
    ):
        treedef = jax.tree.structure(value)
        text = repr(treedef.unflatten([odd] * treedef.num_leaves))
        assert 0 < len(text) < 2000, text
    replaced = swept._replace(metrics=odd, seconds=odd, points=odd)
    assert repr(replaced) == "Sweep(...)"


def test_under_transformations(plan, out):
    """Traced, mapped and abstract leaves have no value, and are shown by type and shape."""
    seen = []

    def look(*values):
        seen.extend(map(short, values))
        return 0

    jax.make_jaxpr(look)(plan, out)
    jax.vmap(lambda key: look(jfl.init(key, plan)))(jax.random.split(KEY, 3))
    jax.eval_shape(lambda p: look(p.algorithm, p.fed, p.release, p.sampler, p.task), plan)
    assert len(seen) == 8 and "float32[] traced" in seen[0] and "scaffold" in seen[0]
    assert "12 parameters" in seen[0] and "health not known here" in seen[1]
    stacked = jax.tree.map(
        lambda x: jnp.stack([x, x]) if isinstance(x, jax.Array) else x, (out, plan.fed)
    )
    assert all(short(value) for value in stacked)


def test_arrays_that_were_donated(out):
    run = jax.tree.map(jnp.copy, out.run)
    for leaf in jax.tree.leaves(run):
        leaf.delete()
    assert short(run) == "Run(...)"


def test_a_long_list_of_hyperparameters_is_cut(plan):
    many = dataclasses.replace(
        plan,
        algorithm=dataclasses.replace(
            plan.algorithm, client=jfl.Fn(squared, {f"option_{i}": float(i) for i in range(60)})
        ),
    )
    assert "..." in short(many)


def test_the_text_is_of_what_runs(fed, task):
    """Another number, another text: a repr with nothing of the plan in it would not do."""
    make = lambda lr: repr(
        jfl.plan(
            fed,
            task,
            jfl.algorithms.fedsgd(jfl.grad(squared, l2=0.5), lr=lr),
            jfl.sampling.full(CLIENTS),
        )
    )
    assert make(0.1) != make(0.2) and "l2=0.5" in make(0.1)
    assert "in clients none" in make(0.1) and len(jax.tree.leaves(start_params())) == 2


def test_a_run_says_what_its_release_remembers():
    fed = make_federation()
    task = jfl.task(start_params(), squared)
    alg = jfl.algorithms.fedavg(jfl.grad(squared), steps=1, batch=jfl.batches.full())

    def words(clip):
        release = jfl.chain(clip, jfl.total(), jfl.gaussian(1.0), jfl.divide(7))
        plan = jfl.plan(fed, task, alg, jfl.sampling.full(len(fed.size)), release=release)
        return repr(jfl.init(jax.random.key(0), plan))

    assert "clip norm 0.5;" in words(jfl.clip_adaptive(0.5, 7.0))
    assert "; the release remembers earlier ones;" in words(jfl.clip_scaled(0.5, 7.0, like=task))
    assert "clip" not in words(jfl.clip_l2(0.5)) and "remembers" not in words(jfl.clip_l2(0.5))
