"""PADPFL: the algorithm against a NumPy loop of its pseudo-code, its inexactness, and the plans
that declare what does not hold.  What its noise proves, and what the paper prints, is in
tests/privacy/test_uploads.py and tests/experiments/test_papers_talaei2024.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_loops import (
    LEVELS,
    Loop,
    by_round,
    clip,
    drawn_and_run,
    example_gradient,
    falling,
)
from helpers.problems import CLIENTS, SIZES, close, flat, make_federation, squared, start_params

import jfl
from experiments.papers.talaei2024 import claims as paper
from jfl import schedules
from jfl.sampling.weights import impact

STEPS, MU, SERVER_LR, DELTA = 3, 0.3, 0.9, 0.01
SUM, NOISE, CLIP = jfl.total(), jfl.gaussian(1.0), jfl.clip_l2(0.5)
IMPACT = np.repeat([0.0, 1.0, 2.0], (2, 3, 2))


GRAD = jfl.grad(squared)


def plan_of(weights="uniform", grad=GRAD, steps=STEPS, mu=MU, lr=falling, **options):
    sites = {name: options.pop(name) for name in ("upload", "release") if name in options}
    options.setdefault("batch", jfl.batches.full())
    if "sent" in options:
        options["upload"] = options.pop("sent")
    alg = jfl.algorithms.padpfl(grad, mu=mu, lr=lr, steps=steps, server_lr=SERVER_LR, **options)
    task = jfl.task(start_params(), squared)
    return jfl.plan(
        make_federation(), task, alg, jfl.sampling.full(CLIENTS), weights=weights, **sites
    )


# --- the pseudo-code


@dataclasses.dataclass(frozen=True)
class Case:
    weights: object  # of clients
    sent: str = "model"
    bound: float | None = None
    z: object = None
    z_server: float | None = None
    own: float | None = None  # z of a chain inside the client, for a declared sensitivity of 0.05
    batch: int | None = None


CASES = dict(
    printed=Case("impact", "model", 0.5, 0.8, 0.6),
    levels=Case(by_round, "difference", 0.1, LEVELS, batch=3),
    prox_erm=Case("size", own=0.7),
)


def made(case):
    options = dict(sent=case.sent)
    if case.batch is not None:
        options["batch"] = jfl.batches.without_replacement(case.batch)
    if case.own is not None:
        chain = jfl.chain(jfl.bounded(0.05, "prox_erm"), SUM, jfl.gaussian(case.own))
        options |= dict(inexactness=1.0, mechanism=chain)
    if case.bound is not None:
        noise = jfl.gaussian(jnp.asarray(case.z))
        options["upload"] = jfl.chain(jfl.clip_l2(case.bound), SUM, noise)
    if case.z_server is not None:
        noise, declared = jfl.gaussian(case.z_server), jfl.bounded(case.bound, "upload")
        options["release"] = jfl.chain(declared, SUM, noise, jfl.divide(CLIENTS))
    weights = impact((0, 1, 2), (2, 3, 2)) if case.weights == "impact" else case.weights
    return plan_of(weights, **options)


def run_numpy(case, d):
    """-> params, inexactness of every client in the last round."""
    loop = Loop(make_federation(), d)
    gradient = lambda w, x, y: np.mean([example_gradient(w, a, b) for a, b in zip(x, y)], 0)
    w, inexact = flat(start_params()), np.zeros(CLIENTS)
    for r, cohort in loop.cohorts():
        named = dict(size=SIZES, impact=IMPACT)
        p = by_round(r) if callable(case.weights) else named[case.weights]
        p, mean = np.asarray(p, float) / np.sum(p), np.zeros(4)
        for k, i, _ in cohort:
            v = w
            for s in range(STEPS):
                v = v - falling(r * STEPS + s) * (loop.gradient(r, k, i, s, v) + MU * (v - w))
            rows = loop.index[i][: SIZES[i]]
            left = gradient(v, loop.x[rows], loop.y[rows]) + MU * (v - w)
            begun = gradient(w, loop.x[rows], loop.y[rows])
            inexact[i] = np.linalg.norm(left) / np.linalg.norm(begun)
            sent = v - w if case.sent == "difference" else v
            if case.bound is not None:
                z = case.z if isinstance(case.z, float) else case.z[i]
                noise = z * 2 * case.bound * d["upload"][r, k, :4]
                sent = clip(sent, case.bound) + noise
            if case.own is not None:
                sent = sent + case.own * 2 * 0.05 * d["once"][r, k, :4]
            mean = mean + p[i] * sent
        if case.z_server is not None:
            mean = mean + case.z_server * 2 * case.bound * p.max() * d["release"][r][:4]
        w = w + SERVER_LR * (mean if case.sent == "difference" else mean - w)
    return w, inexact


@pytest.mark.by_default("printed", "prox_erm")  # "levels" is like "printed"
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name):
    d, run = drawn_and_run(made(CASES[name]), STEPS)
    params, inexact = run_numpy(CASES[name], d)
    close(flat(run.server.params), params, rtol=2e-5, atol=3e-6)
    close(run.client_states, inexact, rtol=1e-4)
    assert not any(int(v) for v in run.health) and np.ptp(inexact) > 0.05


# --- inexactness, and what rests on it


def test_a_solve_that_stops_too_early_stops_the_run():
    poor = plan_of(inexactness=0.5, steps=1, lr=0.01)
    with pytest.raises(jfl.HealthError, match="overflow") as error:
        jfl.simulate(jax.random.key(0), poor, 2)
    assert int(error.value.health["overflow"]) == 2 * CLIENTS  # every client, every round
    assert np.asarray(error.value.run.client_states).min() > 0.5


@pytest.mark.slow
def test_l2_beside_the_loss_is_part_of_the_problem_that_is_solved():
    def with_l2(params, x, y):
        return squared(params, x, y) + 0.15 * sum((w**2).sum() for w in jax.tree.leaves(params))

    reached = [
        jfl.simulate(jax.random.key(0), plan_of(grad=grad), 2).run.client_states
        for grad in (jfl.grad(squared, l2=0.3), jfl.grad(with_l2), jfl.grad(squared))
    ]
    close(reached[0], reached[1], rtol=1e-4)
    assert np.abs(reached[0] - reached[2]).max() > 0.01


def test_convexity_is_a_condition():
    g = jfl.guarantee(made(CASES["prox_erm"]), 4, DELTA)
    assert (g.status, g.unit) == ("conditional", "example")
    # bounded(0.05), which replace_one doubles
    assert any("solution by at most 0.1" in c for c in g.caveats)
    assert g.epsilon == pytest.approx(float(paper.gaussian_epsilon(2 / 0.7, DELTA)), rel=1e-5)
    g = jfl.guarantee(made(CASES["printed"]), 4, DELTA)
    assert (g.status, g.unit) == ("proved", "client")


# --- refusals

DECLARED, PROX = jfl.bounded(0.5, "upload"), jfl.bounded(0.5, "prox_erm")


@pytest.mark.parametrize(
    "upload, release, match",
    [
        ((DECLARED, SUM, NOISE), None, "only in release"),
        ((PROX, SUM, NOISE), None, r"padpfl\(mechanism"),
        ((CLIP, SUM), (PROX, SUM, NOISE), r"padpfl\(mechanism"),
        (None, (DECLARED, SUM, NOISE), "an upload with a clip"),
        ((SUM,), (DECLARED, SUM, NOISE), "an upload with a clip"),
        ((CLIP, SUM, NOISE), (jfl.bounded(0.4, "upload"), SUM, NOISE), "at least the upload's"),
        ((CLIP, SUM, NOISE), (DECLARED, CLIP, SUM, NOISE), "as the only row stage"),
        (
            (jfl.clip_l2(schedules.inverse(0.5)), SUM, NOISE),
            (DECLARED, SUM, NOISE),
            "fixed clip norm",
        ),
        ((jfl.clip_adaptive(0.5, 7), SUM, NOISE), None, "fixed clip"),
    ],
)
def test_plans_that_declare_what_does_not_hold(upload, release, match):
    sites = {k: jfl.chain(*v) for k, v in dict(upload=upload, release=release).items() if v}
    with pytest.raises(ValueError, match=match):
        plan_of(**sites)


THERE, BACK = jfl.linear_maps.linear_map(
    lambda key, tree: jax.tree.map(lambda v: 1000 * v, tree),
    lambda key, tree: jax.tree.map(lambda v: v / 1000, tree),
)
MAPPED = jfl.chain(THERE, PROX, SUM, NOISE, BACK)  # the bound is not of what the map returns


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(mu=-1.0), "mu"),
        (dict(sent="weights"), "upload"),
        (dict(inexactness=1.5), "inexact"),
        (dict(mechanism=jfl.chain(SUM)), "mechanism"),
        (dict(mechanism=MAPPED, inexactness=0.9), "as the only row stage"),
        (dict(mechanism=jfl.chain(PROX, SUM, NOISE)), "which a prox_erm bound relies on"),
        (dict(mechanism=jfl.chain(jfl.clip_adaptive(0.5, 7), SUM, NOISE)), "mechanism"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        plan_of(**options)
