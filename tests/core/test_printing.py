"""How records print: what they are in a few lines, without arrays, whatever their leaves are."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.paths import ROOT
from helpers.problems import (
    CLIENTS,
    make_federation,
    noisy_grad,
    noisy_release,
    squared,
    start_params,
)

import jfl
from jfl.core import records

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
    sampler = jfl.sampling.without_replacement(CLIENTS, 4)
    return jfl.plan(fed, task, alg, sampler, release=noisy_release(divisor=4))


@pytest.fixture(scope="module")
def out(plan):
    """As of a run that ended, whose numbers are made up."""
    run, ones = jfl.init(KEY, plan), jnp.ones(2)
    seen = jfl.Metrics(jnp.array([2, 4]), ones, ones, None, ones, ones, ones, ones)
    return jfl.Output(run, seen, run.server.params)


def short(value):
    """Return the repr, which is short and shows no array."""
    text = repr(value)
    assert 0 < len(text) <= 1500 and text.count("\n") < 12, text
    marks = ("Array(", "array(", "[[", "Tracer", "object at 0x", "<function")
    assert not any(mark in text for mark in marks), text
    return text


def test_a_plan_says_what_is_run_and_accounted(plan):
    rows = 'chain(clip_l2(0.8), total(), gaussian(1.1), divide(3), adjacency="replace_one"); 2'
    release = 'chain(clip_l2(0.5), total(), gaussian(0.7), divide(4), adjacency="replace_one")'
    for part in (
        "scaffold(",
        f"{CLIENTS} clients",
        "12 parameters",
        "lr=0.25",
        "without_replacement(3)",
        "sgd(momentum=0.9)",
        "40 rows",
        "4 of 7 clients",
        f"{rows} releases a round",
        release,
        "jfl.guarantee(plan",
    ):
        assert part in short(plan), part
    for part in (plan.fed, plan.task, plan.algorithm, plan.sampler, plan.algorithm.client):
        assert "\n" not in short(part)
    assert "only the sum" not in short(plan)
    quiet = dataclasses.replace(
        plan, release=jfl.chain(jfl.total(), adjacency="replace_one"), secure_aggregation=True
    )
    assert "release    chain(total())\n" in short(quiet) and "only the sum" in short(quiet)


@pytest.mark.slow
def test_results_say_how_they_ended(plan):
    out = jfl.simulate(KEY, plan, 4, evaluate_every=2)
    final = f"accuracy {float(out.metrics.accuracy[-1]):.4g}"
    for part in ("4 rounds", "healthy", final, "12 numbers", "jfl.guarantee(plan, rounds=4"):
        assert part in short(out), part
    assert "2 evaluations" in short(out.metrics) and "after round 4" in short(out.run)
    sick = dataclasses.replace(out.run, health=out.run.health._replace(overflow=jnp.int32(3)))
    assert "overflow=3" in short(sick)
    swept = jfl.sweep(lambda lr: plan, rounds=2, lr=[0.1, 0.2], seed=[0, 1])
    for part in ("4 points over lr, seed", "1 program", "0 failed", "jfl.guarantee(sweep.plans[i]"):
        assert part in short(swept), part


@pytest.mark.parametrize(
    "mechanism",
    [
        noisy_release(adjacency="add_remove"),
        jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=0.3), jfl.divide("weight")),
        jfl.chain(jfl.clip_per_layer((3.0, 4.0)), jfl.total(), jfl.divide("size")),
        jfl.chain(jfl.bounded(2.0, "prox_erm"), jfl.total(), jfl.gaussian(1.5)),
    ],
    ids=["adjacency", "std", "layers", "bounded"],
)
def test_a_mechanism_prints_as_the_call_that_makes_it(mechanism):
    again = eval(short(mechanism), {name: getattr(jfl, name) for name in jfl.__all__})
    assert jax.tree.structure(again) == jax.tree.structure(mechanism)
    assert jax.tree.all(jax.tree.map(np.array_equal, again, mechanism))


@pytest.mark.parametrize("odd", [None, "text", KEY, [1, 2], Hostile()], ids=range(5))
def test_odd_leaves(plan, out, odd):
    """Pytrees are rebuilt with anything for their leaves; a repr never fails."""
    for value in (plan, plan.fed, plan.task, plan.algorithm, plan.sampler, plan.release, out):
        treedef = jax.tree.structure(value)
        text = repr(treedef.unflatten([odd] * treedef.num_leaves))
        assert 0 < len(text) < 2000, text


def test_leaves_without_a_value(plan, out):
    """Traced and mapped leaves are shown by type and shape; deleted ones break nothing."""
    seen = []

    def look(*values):
        seen.extend(map(short, values))
        return 0

    jax.make_jaxpr(look)(plan, out)
    jax.vmap(lambda key: look(jfl.init(key, plan)))(jax.random.split(KEY, 3))
    assert len(seen) == 3 and "float32[] traced" in seen[0] and "12 parameters" in seen[0]
    assert "health not known here" in seen[1]
    run = jax.tree.map(jnp.copy, out.run)
    for leaf in jax.tree.leaves(run):
        leaf.delete()
    assert short(run) == "Run(...)"


def test_a_run_says_what_its_release_remembers():
    task = jfl.task(start_params(), squared)
    alg = jfl.algorithms.fedavg(noisy_grad(), steps=1, batch=jfl.batches.full())

    def words(clip):
        release = jfl.chain(clip, jfl.total(), jfl.gaussian(1.0), jfl.divide(7))
        plan = jfl.plan(make_federation(), task, alg, jfl.sampling.full(CLIENTS), release=release)
        return repr(jfl.init(jax.random.key(0), plan))

    assert "clip norm 0.5;" in words(jfl.clip_adaptive(0.5, 7.0))
    assert "; the release remembers earlier ones;" in words(jfl.clip_scaled(0.5, 7.0, like=task))
    assert "clip" not in words(jfl.clip_l2(0.5))


def test_the_number_of_an_equation_ends_no_sentence():
    """The claims of a paper are shown by their first sentences."""
    assert records.first_sentence("eq. (6) is false. More.") == "eq. (6) is false."


def test_a_caveat_prints_its_first_sentence_and_where_the_rest_is():
    long = records.Caveat("Assumes honest sampling. Delta includes 0.5 of it.", "quantile")
    found = jfl.Guarantee(1.0, 1e-5, "client", "add_remove", "server", "pld", caveats=(long,))
    _, shown, more = str(found).splitlines()
    assert shown == "  caveat: Assumes honest sampling." and ".caveats" in more
    assert (ROOT / records.CAVEATS_PAGE).is_file()
    short = found._replace(caveats=(records.Caveat("Assumes honest sampling.", "quantile"),))
    assert len(str(short).splitlines()) == 2


def test_a_choice_is_short_and_has_its_guarantee():
    proved = jfl.Guarantee(2.0, 1e-5, "example", "add_remove", "server", "rdp")
    text = short(jfl.Choice({"w": np.ones((64, 10))}, dict(lr=0.5), 0.81, proved))
    assert text.startswith("Choice: {lr: 0.5}, score 0.81, 640 numbers\nepsilon = 2 at")


def test_a_federation_names_the_classes_that_have_no_rows():
    labels, x = np.array([0, 2, 2, 4]), np.zeros((4, 3), np.float32)
    data = jfl.datasets.arrays(x, labels, x, labels, classes=6)
    fed = jfl.federate(data, jfl.partition.iid(2))
    assert "6 classes, 3 without rows (1, 3, 5)" in short(fed)


def test_an_error_names_a_frame_or_a_key_and_does_not_print_it():
    frame = pytest.importorskip("pandas").DataFrame({"a": range(50)})
    for value, words in ((frame, "DataFrame[50, 1]"), (jax.random.split(KEY, 3), "Array[3]")):
        for call in (
            lambda value=value: jfl.plan(value, None, None, None),
            lambda value=value: jfl.chain(value, jfl.total()),
            lambda value=value: jfl.algorithms.fedavg(value),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            text = str(caught.value)
            assert "\n" not in text and words in text and len(text) < 300, text
