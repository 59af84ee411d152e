"""Noise once a round: the algorithm against a NumPy loop, its sensitivity on worst-case rows, and
its epsilon."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_loops import LEVELS, Loop, clip, drawn_and_run, falling, one_round
from helpers.problems import CLIENTS, SIZES, close, flat, make_federation, squared, start_params

import jfl
from jfl.core import records
from jfl.core.errors import NotAnalysable
from jfl.privacy.accountants import events, rdp_events, tightest

STEPS, CLIP = 4, 0.7
TASK = jfl.task(start_params(), squared)


def printed_std(round_, *, scale):
    """A std that falls with the squared learning rate, one for each client."""
    return scale * falling(round_ * STEPS) ** 2


NOISES = dict(
    number=lambda: jfl.gaussian(0.9),
    levels=lambda: jfl.gaussian(jnp.array(LEVELS)),
    printed=lambda: jfl.gaussian(std=records.Fn(printed_std, dict(scale=50 * jnp.array(LEVELS)))),
)


def std_of(noise, round_, client):
    if noise == "number":
        return 0.9 * 2 * CLIP
    levels = 2 * CLIP if noise == "levels" else 50 * falling(round_ * STEPS) ** 2
    return LEVELS[client] * levels


def algorithm(noise="number", clip_steps="all", batch=None, **options):
    chain = jfl.chain(jfl.clip_l2(CLIP), jfl.total(), NOISES[noise]())
    return jfl.algorithms.output_perturbation(
        jfl.grad(squared),
        chain,
        lr=falling,
        steps=STEPS,
        batch=batch or jfl.batches.without_replacement(3),
        server_lr=0.9,
        clip_steps=clip_steps,
        **options,
    )


def run_numpy(noise, clip_steps, mu, d):
    loop, w, share = Loop(make_federation(), d), flat(start_params()), np.array(SIZES) / sum(SIZES)
    for r, cohort in loop.cohorts():
        rates = [falling(r * STEPS + s) for s in range(STEPS)]
        total = np.zeros(4)
        for k, i, _ in cohort:
            v = w
            for s in range(STEPS):
                g = loop.gradient(r, k, i, s, v)
                if clip_steps == "all" or s == STEPS - 1:
                    g = clip(g, CLIP)
                v = v - rates[s] * (g + (mu or 0) * (v - w))
            if mu is not None:  # a pull that overshoots: the chain clips the mean gradient
                v = w + sum(rates) * clip((v - w) / sum(rates), CLIP)
            v = v + sum(rates) * std_of(noise, r, i) * d["once"][r, k, :4]
            total += share[i] * CLIENTS / 3 * (v - w)
        w = w + 0.9 * total
    return w


@pytest.mark.by_default("levels-all-40.0")
@pytest.mark.parametrize(
    "noise, clip_steps, mu",
    [
        ("levels", "all", 40.0),  # times a learning rate above 1: it overshoots
        ("printed", "all", None),
        ("number", "last", None),
    ],
)
def test_equals_numpy(noise, clip_steps, mu):
    made = algorithm(noise, clip_steps, mu=mu)
    cohort = jfl.sampling.without_replacement(CLIENTS, 3)
    plan = jfl.plan(make_federation(), TASK, made, cohort, weights="size")
    d, run = drawn_and_run(plan, STEPS)
    want = run_numpy(noise, clip_steps, mu, d)
    close(flat(run.server.params), want, rtol=2e-5, atol=3e-6)


SUM = sum(falling(s) for s in range(STEPS))


@pytest.mark.parametrize("mu, share", [(None, 0.9), (40.0, 0.2)])
def test_the_sensitivity_is_reached_and_not_exceeded(mu, share):
    """2 G (sum of learning rates) covers a change of one row.  With full batches one row of huge
    norm turns every gradient around, also where a strong pull overshoots."""
    most, r = 2 * CLIP * SUM * (1 + 1e-5), np.random.default_rng(0)
    far = moved(mu, (np.full(3, 1e4), 1e5), (np.full(3, 1e4), -1e5))
    assert share * 2 * CLIP * SUM < far <= most
    for scale in (0.1, 1.0, 100.0) * 5:
        one, other = ((r.normal(size=3) * scale, r.normal() * scale) for _ in range(2))
        assert moved(mu, one, other) <= most


def moved(mu, one, other):
    """How far the upload of a client moves if its first row is one (x, y) or the other."""
    fed, end = _lone_client(mu)
    x, y, row, ends = np.array(fed.x), np.array(fed.y), int(fed.index[0, 0]), []
    for x[row], y[row] in (one, other):
        ends.append(end(with_rows(fed, x, y)))
    return np.linalg.norm(ends[0] - ends[1]) / 0.9


@functools.cache
def _lone_client(mu):
    chain = jfl.chain(jfl.clip_l2(CLIP), jfl.total())
    return noiseless(chain, jfl.batches.full(), squared, start_params(), falling, STEPS, 0.9, mu)


def noiseless(chain, batch, loss, start, lr, steps, server_lr=1.0, mu=None):
    """One client of 4 rows, and a function of its rows that returns its model after a round."""
    alg = jfl.algorithms.output_perturbation(
        jfl.grad(loss), chain, lr=lr, steps=steps, batch=batch, server_lr=server_lr, mu=mu
    )
    fed = make_federation(sizes=(4,))
    plan = jfl.plan(fed, jfl.task(start, loss), alg, jfl.sampling.full(1))

    run = jfl.init(jax.random.key(0), plan)
    return fed, lambda fed: flat(
        one_round(run, dataclasses.replace(plan, fed=fed), run.key)[0].server.params
    )


def with_rows(fed, x, y):
    return dataclasses.replace(fed, x=jnp.asarray(x), y=jnp.asarray(y))


# --- epsilon


@pytest.mark.parametrize(
    "batch, rate",
    [
        (jfl.batches.without_replacement(2), 1 - (1 - 2 / 5) ** STEPS),
        (jfl.batches.with_replacement(2), 1 - (4 / 5) ** (2 * STEPS)),
        (jfl.batches.epochs(1), STEPS / 5),
        (jfl.batches.epochs(2), 1.0),
        (jfl.batches.poisson(rate=0.25, capacity=9), 1 - 0.75**STEPS),
    ],
    ids=["without", "with", "epochs", "more_than_an_epoch", "poisson"],
)
def test_a_row_is_protected_by_its_absence_from_the_round(batch, rate, monkeypatch):
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    fed = make_federation(sizes=(5,) * CLIENTS)
    plan = jfl.plan(fed, TASK, algorithm(batch=batch), jfl.sampling.full(CLIENTS))
    g = jfl.guarantee(plan, 20, 1e-5)
    noise = events.gaussian(np.float32(0.9))
    event = events.touched(rate, noise) if rate < 1 else noise
    want, _ = rdp_events.epsilon(events.repeat(event, 20), 1e-5)
    assert (g.unit, g.adjacency, g.view) == ("example", "replace_one", "server")
    np.testing.assert_allclose(g.epsilon, want, rtol=1e-6)


def test_one_step_is_the_sampled_gaussian():
    """At one step of one batch the event is that of any noisy step."""
    noise = events.gaussian(1.3)
    sampled = events.without_replacement(1, 4, noise)
    touched = events.touched(0.25, noise)
    assert rdp_events.epsilon(touched, 1e-5) == rdp_events.epsilon(sampled, 1e-5)


def test_as_printed_proves_nothing():
    made = algorithm(clip_steps="last")
    plan = jfl.plan(make_federation(), TASK, made, jfl.sampling.full(CLIENTS))
    assert jfl.guarantee(plan, 5).epsilon == np.inf


def noisy_chain(adjacency=None):
    return jfl.chain(jfl.clip_l2(CLIP), jfl.total(), jfl.gaussian(1.0), adjacency=adjacency)


@pytest.mark.parametrize(
    "chain, options, match",
    [
        (jfl.chain(jfl.total()), {}, "mechanism = chain"),
        (jfl.chain(jfl.clip_adaptive(1.0, 3), jfl.total()), {}, "mechanism = chain"),
        (noisy_chain("add_remove"), {}, "replace_one"),
        (noisy_chain(), dict(clip_steps="some"), "clip_steps"),
        (noisy_chain(), dict(grad=jfl.private_grad(squared, noisy_chain())), "without noise"),
    ],
)
def test_bad_arguments_are_refused(chain, options, match):
    options = dict(grad=jfl.grad(squared)) | options
    with pytest.raises(ValueError, match=match):
        jfl.algorithms.output_perturbation(mechanism=chain, **options)


# --- steps that contract


TURNS, BATCH = 2, 2  # local steps of a round, and rows of each
STEEP, SMOOTH = 2**0.5, 0.5  # of logistic regression on rows (1, x) with ||x|| <= 1


def logistic(params, x, y):
    return jnp.logaddexp(0.0, -jnp.sign(y) * (params["w"] @ x + params["b"]))


def contracting(lr=0.9, z=0.9, bound=STEEP / (TURNS * BATCH), batch=None, loss=logistic, **more):
    chain = jfl.chain(jfl.bounded(bound, "contraction"), jfl.total(), jfl.gaussian(z))
    options = dict(steps=TURNS, smoothness=SMOOTH) | more
    grad = options.pop("grad", None) or jfl.grad(loss)
    return jfl.algorithms.output_perturbation(
        grad,
        options.pop("chain", chain),
        lr=lr,
        batch=batch or jfl.batches.epochs(BATCH),
        **options,
    )


def plan_of(algorithm, sizes=(4, 6, 5, 4)):
    fed = make_federation(sizes=sizes)
    x = np.asarray(fed.x) / np.linalg.norm(np.asarray(fed.x), axis=1, keepdims=True)
    fed = with_rows(fed, x, np.asarray(fed.y))
    start = jax.tree.map(jnp.zeros_like, start_params())
    return jfl.plan(fed, jfl.task(start, logistic), algorithm, jfl.sampling.full(len(sizes)))


def test_contracting_steps_equal_numpy():
    """No step is clipped, and the noise is that of the small bound."""
    plan = plan_of(contracting())
    d, run = drawn_and_run(plan, TURNS)
    loop, model = Loop(plan.fed, d), np.zeros(4)
    std = 0.9 * 2 * STEEP / (TURNS * BATCH) * TURNS * 0.9
    for r, cohort in loop.cohorts():
        ends = []
        for k, i, _ in cohort:
            v = model
            for s in range(TURNS):
                x, y = loop.rows(r, k, i, s)
                assert len(x) == BATCH
                inputs, signs = np.insert(x, 0, 1.0, axis=1), np.sign(y)
                slopes = -signs / (1 + np.exp(signs * (inputs @ v)))
                v = v - 0.9 * (slopes[:, None] * inputs).mean(0)
            ends.append(v + std * d["once"][r, k, :4])
        model = np.mean(ends, 0)
    close(flat(run.server.params), model, rtol=2e-5, atol=5e-6)


@functools.cache
def _ends(batch, lr):
    """From a model that is sure of itself."""
    start = dict(w=jnp.array([0.0, 200.0, 0.0]), b=jnp.zeros(()))
    chain = jfl.chain(jfl.clip_l2(1e6), jfl.total())
    return noiseless(chain, batch, logistic, start, lr, TURNS)


def furthest(batch, lr=0.9, scale=1.0):
    """How far one row moved the model at most, as a multiple of 2 L lr / batch.

    The model is wrong of both rows, and they lie close to each other: the worst there are.
    """
    fed, end = _ends(batch, lr)
    r, most = np.random.default_rng(0), 0.0
    for row in np.asarray(fed.index[0]):
        x, y = r.normal(size=fed.x.shape), np.sign(r.normal(size=len(fed.y)))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        ends = []
        for side in (1, -1):
            x[row], y[row] = scale * np.array([np.cos(0.05), side * np.sin(0.05), 0.0]), -side
            ends.append(end(with_rows(fed, x, y)))
        most = max(most, np.linalg.norm(ends[0] - ends[1]))
    return most / (2 * STEEP * lr / BATCH)


def test_a_row_that_is_used_once_moves_the_model_once():
    """By at most 2 L lr / batch, which is nearly reached; not where two batches share a row, nor
    where a row is longer than was said."""
    assert 0.95 < furthest(jfl.batches.epochs(BATCH)) <= 1 + 1e-5
    assert furthest(jfl.batches.without_replacement(BATCH)) > 1.5
    assert furthest(jfl.batches.epochs(BATCH), scale=2.0) > 1.4


def test_what_contracts_is_conditional_and_its_noise_is_small():
    plan = plan_of(contracting(z=2.0))
    found = jfl.guarantee(plan, 10, 1e-5)
    assert found.status == "conditional" and any("convex" in str(c) for c in found.caveats)
    assert any("1.41421-Lipschitz" in str(c) for c in found.caveats)
    want = events.repeat(events.gaussian(np.float32(2.0)), 10)  # a client of 4 rows uses them all
    np.testing.assert_allclose(found.epsilon, tightest.epsilon(want, 1e-5)[0], rtol=1e-6)
    clipped = jfl.chain(jfl.clip_l2(STEEP), jfl.total(), jfl.gaussian(2.0))
    same = contracting(chain=clipped, smoothness=None)
    at = lambda alg: float(jfl.privacy.mechanisms.chain.sensitivity(alg.releases[0].mechanism))
    assert at(same) == pytest.approx(TURNS * BATCH * at(contracting(z=2.0)), rel=1e-6)


def test_a_client_whose_rows_are_used_twice_is_refused():
    with pytest.raises(ValueError, match="at least 4 rows in every client.*1 clients"):
        plan_of(contracting(), sizes=(4, 3, 5))
    short = make_federation(sizes=(4, 3, 5, 4))  # put there by hand
    plan = dataclasses.replace(plan_of(contracting()), fed=short)
    with pytest.raises(NotAnalysable, match="at least steps \\* batch rows in every client"):
        jfl.guarantee(plan, 5)


def clipped_first(clip):
    """A clip in another norm might drive apart what steps did not."""
    bound = jfl.bounded(STEEP / (TURNS * BATCH), "contraction")
    return jfl.chain(clip, bound, jfl.total(), jfl.gaussian(1.0))


def test_rounded_parameters_do_not_contract():
    start = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start_params())
    fed, task = make_federation(sizes=(4, 4)), jfl.task(start, logistic)
    with pytest.raises(ValueError, match="parameters in float32"):
        jfl.plan(fed, task, contracting(), jfl.sampling.full(2))


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(chain=clipped_first(jfl.clip_l1(0.5))), "as the only row stage"),
        (dict(chain=clipped_first(jfl.clip_l2(0.5))), "as the only row stage"),
        (dict(smoothness=None), "together, or neither"),
        (dict(chain=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0))), "together"),
        (dict(smoothness=0.0), "smoothness"),
        (dict(lr=4.1), "lr <= 2 / smoothness = 4"),
        (dict(lr=lambda t: 0.1), "concrete numbers"),
        (dict(grad=jfl.grad(logistic, compute="bfloat16")), "computed in float32"),
        (dict(lr=[0.1, 0.2]), "lr"),
        (dict(batch=jfl.batches.without_replacement(2)), "epochs"),
        (dict(grad=jfl.grad(logistic, l2=0.1)), "l2"),
        (dict(mu=0.1), "mu"),
        (dict(clip_steps="last"), "clip_steps"),
        (dict(grad=jfl.private_grad(logistic, jfl.chain(jfl.clip_l2(1.0), jfl.total()))), "mech"),
    ],
)
def test_steps_that_may_not_contract_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        plan_of(contracting(**options))


def test_a_bound_by_contraction_stands_nowhere_else():
    chain = jfl.chain(jfl.bounded(0.1, "contraction"), jfl.total(), jfl.gaussian(1.0))
    batch, plain = jfl.batches.epochs(2), jfl.grad(logistic)
    for make in (
        lambda: jfl.algorithms.fedavg(jfl.private_grad(logistic, chain), batch=batch),
        lambda: jfl.algorithms.padpfl(plain, mechanism=chain),
    ):
        with pytest.raises(ValueError, match="contraction"):
            plan_of(make())
    fedavg = jfl.algorithms.fedavg(jfl.grad(squared), batch=batch)
    with pytest.raises(ValueError, match="contraction"):
        jfl.plan(make_federation(), TASK, fedavg, jfl.sampling.full(CLIENTS), release=chain)
