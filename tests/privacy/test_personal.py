"""Personal models: what the server's epsilon leaves out, and the view that counts them."""

import inspect

import numpy as np
import pytest
from helpers.problems import make_algorithm, squared

import jfl
from jfl.core.records import code_of
from jfl.privacy.accountants import events, tightest

CLIENTS, ROWS, BATCH, STEPS = 4, 20, 5, 2


def chain(z):
    return jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(BATCH))


@pytest.fixture
def fed():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * ROWS, 2)).astype(np.float32)
    y = x[:, 0]
    return jfl.federate(
        jfl.datasets.arrays(x, y, x[:4], y[:4], classes=0), jfl.partition.iid(CLIENTS)
    )


def plan_of(fed, name, z=2.0, **options):
    task = jfl.task(np.zeros(2, np.float32), lambda w, x, y: (x @ w - y) ** 2)
    grad = jfl.private_grad(task.loss, chain(z)) if z else jfl.grad(task.loss)
    made = getattr(jfl.algorithms, name)(
        grad, steps=STEPS, batch=jfl.batches.without_replacement(BATCH), **options
    )
    return jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS)), task


def ditto(fed, z=2.0, own=3.0):
    _, task = plan_of(fed, "ditto")
    return plan_of(fed, "ditto", z, personal_grad=jfl.private_grad(task.loss, chain(own)))[0]


def codes(guarantee):
    return [code_of(c) for c in guarantee.caveats]


def test_the_view_counts_uploads_and_personal_models(fed, endless_noise):
    plan = ditto(fed)
    both = jfl.guarantee(plan, 10, 1e-5, view="personal")
    # two releases of one algorithm may share a batch: no gain by sampling
    steps = [events.repeat(events.gaussian(z / 1.0), 10 * STEPS) for z in (2.0, 3.0)]
    once = events.compose(*steps)
    assert both.epsilon == pytest.approx(tightest.epsilon(once, 1e-5)[0], rel=1e-6)
    server = jfl.guarantee(plan, 10, 1e-5)
    assert server.view == "server" and server.epsilon < both.epsilon
    assert (both.unit, both.view, both.status) == ("example", "personal", server.status)
    assert "personal" in codes(server) and "personal-too" not in codes(server)
    assert "personal-too" in codes(both) and "personal" not in codes(both)


@pytest.mark.slow
def test_what_was_audited_is_covered_by_the_view(fed):
    """An attack on personal models found more than the server's epsilon; the view proves more."""
    plan = ditto(fed, z=2.0, own=2.0)
    assert (
        jfl.guarantee(plan, 10, 1e-5, view="personal").epsilon
        > 1.2 * jfl.guarantee(plan, 10, 1e-5).epsilon
    )


def test_personal_models_without_noise_are_refused_in_their_view(fed):
    plan, _ = plan_of(fed, "ditto")
    assert "personal" in codes(jfl.guarantee(plan, 10, 1e-5))
    with pytest.raises(jfl.errors.NotAnalysable, match="noise in the training of personal models"):
        jfl.guarantee(plan, 10, 1e-5, view="personal")


@pytest.mark.parametrize("name, options", [("pfedme", {}), ("fedper", dict(shared="w"))])
def test_personal_models_of_the_same_noisy_gradients_cost_nothing_more(name, options, fed):
    if name == "pfedme":
        plan, _ = plan_of(fed, name)
    else:
        params = dict(w=np.zeros(2, np.float32), b=np.zeros((), np.float32))
        task = jfl.task(params, lambda p, x, y: (x @ p["w"] + p["b"] - y) ** 2)
        made = jfl.algorithms.fedper(
            jfl.private_grad(task.loss, chain(2.0)),
            steps=STEPS,
            batch=jfl.batches.without_replacement(BATCH),
            **options,
        )
        plan = jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS))
    both, server = (jfl.guarantee(plan, 5, 1e-5, view=v) for v in ("personal", "server"))
    assert both.epsilon == pytest.approx(server.epsilon, rel=1e-9)
    assert "personal" in codes(server) and "personal-too" in codes(both)


def test_other_questions_about_personal_models_are_refused(fed):
    plan = ditto(fed)
    for asked in (dict(unit="client"), dict(cap=2), dict(realised=np.ones(CLIENTS, int))):
        with pytest.raises(jfl.errors.NotAnalysable, match="all planned rounds"):
            jfl.guarantee(plan, 10, 1e-5, view="personal", **asked)
    with pytest.raises(jfl.errors.NotAnalysable, match="fedavg, which has none"):
        jfl.guarantee(plan_of(fed, "fedavg")[0], 10, 1e-5, view="personal")


def test_an_algorithm_that_does_not_say_what_personal_models_are_of_is_refused(fed):
    import dataclasses

    plan = ditto(fed)
    silent = dataclasses.replace(plan.algorithm, personal_releases=None)
    with pytest.raises(jfl.errors.NotAnalysable, match="does not say what they are of"):
        jfl.guarantee(dataclasses.replace(plan, algorithm=silent), 10, 1e-5, view="personal")


def test_every_algorithm_with_personal_models_says_what_they_are_of():
    found = set()
    for name in jfl.algorithms.__all__:
        if not inspect.isfunction(getattr(jfl.algorithms, name)) or name == "algorithm":
            continue
        try:
            made = make_algorithm(name, jfl.grad(squared))
        except (ValueError, TypeError, KeyError):
            continue
        if made.personal is not None:
            found.add(name)
            assert made.personal_releases is not None, name
    assert found >= {"ditto", "pfedme"}
