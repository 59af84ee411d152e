"""AdDPNFL against the paper: its steps, aggregations, server and noise.  DPNFL is FedAvg by another
name, which tests/contracts asserts."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.numpy_loops import Loop, drawn_and_run
from helpers.problems import CLIENTS, SIZES, close, flat, make_federation, squared, start_params

import jfl
from jfl.algorithms import adaptive, adaptive_without_noise_bias, addpnfl

COHORT, STEPS, ROWS = 3, 3, 3
BOUND, SIGMA = 0.6, 0.5  # of an example; of the noise on the mean gradient
ADAM = dict(beta1=0.7, beta2=0.8, adaptivity=0.05)
LATENCY = (1.0, 2.0, 1.0, 4.0, 1.0, 3.0, 2.0)
P = np.array(SIZES) / sum(SIZES)


def falling(clock):
    return 0.3 / jnp.sqrt(1.0 + clock)


# --- several rounds against a loop


SAMPLERS = dict(  # the server's second moment: who comes
    diff=lambda: jfl.sampling.first_responders(CLIENTS, COHORT, LATENCY, jitter=0.5),
    momentum=lambda: jfl.sampling.with_replacement(CLIENTS, COHORT, weights=SIZES),
)


def outcome(second):
    """(draws, params after the run): a mean over those who came, or a multinomial one."""
    noise = jfl.gaussian(std=ROWS * SIGMA)
    grad = jfl.private_grad(
        squared, jfl.chain(jfl.clip_l2(BOUND), jfl.total(), noise, jfl.divide(ROWS))
    )
    algorithm = addpnfl(
        grad,
        second_moment_of=second,
        lr=falling,
        server_lr=falling,
        steps=STEPS,
        batch=jfl.batches.without_replacement(ROWS),
        **ADAM,
    )
    release = jfl.chain(jfl.total(), jfl.divide("weight")) if second == "diff" else None
    task = jfl.task(start_params(), squared)
    sampler = SAMPLERS[second]()
    plan = jfl.plan(make_federation(), task, algorithm, sampler, release=release, weights="size")
    d, run = drawn_and_run(plan, STEPS)
    assert not any(int(v) for v in run.health)
    return d, flat(run.server.params)


def loop(second, d):
    """Algorithm 2 in NumPy -> params."""
    steps = Loop(make_federation(), d, (BOUND, ROWS * SIGMA, ROWS))
    w, mu, nu = flat(start_params()), np.zeros(4), np.full(4, ADAM["adaptivity"] ** 2)
    for t, cohort in steps.cohorts():
        total, there = np.zeros(4), 0.0
        for k, i, count in cohort:
            v = w
            for s in range(STEPS):
                v = v - float(falling(t * STEPS + s)) * steps.gradient(t, k, i, s, v)
            share = P[i] if second == "diff" else count / COHORT
            total, there = total + share * (v - w), there + share
        if second == "diff":
            total = total / there
        mu = ADAM["beta1"] * mu + (1 - ADAM["beta1"]) * total
        moved = total if second == "diff" else mu
        nu = ADAM["beta2"] * nu + (1 - ADAM["beta2"]) * moved**2
        w = w + float(falling(t)) * mu / (np.sqrt(nu) + ADAM["adaptivity"])
    return w


@pytest.mark.by_default("diff")
@pytest.mark.parametrize("second", SAMPLERS)
def test_equals_the_papers_loop(second):
    d, params = outcome(second)
    close(params, loop(second, d), rtol=3e-5, atol=3e-6)
    assert second == "diff" or d["count"].max() > 1


# --- the server of AdDPNFL

DIFF = np.array([0.1, -0.2])
STEP = dict(diff=np.array([0.00905028, -0.00951261]), momentum=np.array([0.04148218, -0.06184615]))


@pytest.mark.parametrize("second", STEP)
def test_golden_step(second):
    """Worked out by hand from mu_0 = 0 and nu_0 = adaptivity^2, with the paper's values."""
    server = adaptive(0.01, second_moment_of=second)
    step, state = server.update(jnp.asarray(-DIFF, jnp.float32), server.init(jnp.zeros(2)))
    close(step, STEP[second], rtol=2e-6)
    close(-state.first, np.array([0.01, -0.02]), rtol=1e-6)
    algorithm = addpnfl(jfl.grad(squared), second_moment_of=second)
    begun, _ = algorithm.init(jnp.zeros(2))
    ctx = jfl.Context(jnp.int32(0), 0, 0, 1.0, 1, 1.0)
    after = algorithm.server(ctx, begun, jnp.asarray(DIFF, jnp.float32))
    close(after.params, STEP[second], rtol=2e-6)


def test_known_noise_is_subtracted_where_the_second_moment_divides():
    """What it has added by then, and nowhere else: nu itself goes on with what was seen.  Neither
    has a bias correction; nu starts where it is told to."""
    known, options = 0.02, dict(b1=0.6, b2=0.7, adaptivity=0.1, initial=0.04)
    server, plain = (
        adaptive_without_noise_bias(0.5, known**0.5, **options),
        adaptive(0.5, **options),
    )
    state, other, mu, nu, added = (
        server.init(jnp.zeros(2)),
        plain.init(jnp.zeros(2)),
        0.0,
        0.04,
        0.0,
    )
    for diff in (DIFF, np.array([-0.3, 0.05])):
        step, state = server.update(jnp.asarray(-diff, jnp.float32), state)
        longer, other = plain.update(jnp.asarray(-diff, jnp.float32), other)
        mu, nu, added = 0.6 * mu + 0.4 * diff, 0.7 * nu + 0.3 * diff**2, 0.7 * added + 0.3 * known
        close(step, 0.5 * mu / (np.sqrt(np.maximum(nu - added, 0)) + 0.1), rtol=1e-5)
        close(longer, 0.5 * mu / (np.sqrt(nu) + 0.1), rtol=1e-5)
    close(state.second, other.second)


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(beta1=1.0), "beta1"),
        (dict(beta2=float("nan")), "beta2"),
        (dict(beta2=1 - 1e-12), "beta2"),
        (dict(adaptivity=0.0), "adaptivity"),
        (dict(initial=-1.0), "initial"),
        (dict(noise_std=-1.0), "noise_std"),
        (dict(noise_std=0.1, second_moment_of="momentum"), "second_moment_of"),
        (dict(second_moment_of="gradient"), "second_moment_of"),
        (dict(server_optimizer=optax.adam), "dpnfl"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        addpnfl(jfl.grad(squared), **options)
