"""Laplace noise after a clip of the L1 norm: its distribution, its curves, and what plans prove."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import (
    CLIENTS,
    design_matrices,
    flat,
    make_federation,
    squared,
    start_params,
)
from jfl.kernels.laplace import laplace
from jfl.kernels.normals import normals
from scipy import integrate, stats

import jfl
from jfl.core.random_streams import Stream, stream_key
from jfl.core.records import Mechanism
from jfl.engine.round import run_noise_key
from jfl.privacy.accountants import events, rdp, rdp_events, tightest
from jfl.privacy.mechanisms import chain as mech

pytestmark = pytest.mark.usefixtures("endless_noise")

KEY = jax.random.key(5)
TASK = jfl.task(start_params(), squared)


def chain_of(z=1.0, bound=0.5, divisor=CLIENTS, **options):
    return jfl.chain(
        jfl.clip_l1(bound), jfl.total(), jfl.laplace(z), jfl.divide(divisor), **options
    )


def plan_of(release=None, grad=None, sampler=None, batch=None, **options):
    grad = jfl.grad(squared) if grad is None else grad
    fedavg = jfl.algorithms.fedavg(grad, lr=0.1, steps=2, batch=batch or jfl.batches.full())
    sampler = sampler or jfl.sampling.full(CLIENTS)
    return jfl.plan(make_federation(), TASK, fedavg, sampler, release=release, **options)


# --- the noise


def test_the_noise_has_a_laplace_distribution():
    """Kolmogorov-Smirnov of 200,000 numbers; false alarm 1e-4.  Normals of the same variance
    fail."""
    drawn = flat(laplace(KEY, {"a": jnp.zeros((300, 200)), "b": jnp.zeros(140_000)}))
    assert stats.kstest(drawn, "laplace").pvalue > 1e-4
    normal = np.asarray(normals(KEY, jnp.zeros(200_000))) * math.sqrt(2)
    assert stats.kstest(normal, "laplace").pvalue < 1e-12
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(len(drawn))


def test_a_run_equals_a_numpy_loop():
    """The noise comes from the normals of the key itself: a derived key may be that of another
    release."""
    plan = plan_of(chain_of())
    noise = run_noise_key(jfl.init(KEY, plan))

    def run(norm):
        w = flat(start_params())
        for r in range(3):
            total = 0
            for x, y in design_matrices(plan.fed):
                v = w
                for _ in range(2):
                    v = v - 0.1 * ((x @ v - y)[:, None] * x).mean(0)
                total = total + (v - w) * min(1.0, 0.5 / norm(v - w))
            key = stream_key(noise, Stream.RELEASE, r)
            a, b, c, d = map(flat, normals(key, (start_params(),) * 4))
            w = w + (total + 2 * 0.5 * (a * b + c * d)) / CLIENTS  # replace_one
        return w

    # without an evaluation, which would be compiled
    trained, step = jfl.init(KEY, plan), jax.jit(lambda run: jfl.run_round(run, plan)[0])
    for _ in range(3):
        trained = step(trained)
    found = flat(trained.server.params)
    np.testing.assert_allclose(found, run(lambda v: np.abs(v).sum()), atol=2e-5)
    assert np.abs(found - run(np.linalg.norm)).max() > 1e-3


def test_no_contribution_moves_the_sum_by_more_than_its_sensitivity():
    rows = jax.random.normal(KEY, (50, 7)) * jnp.geomspace(1e-3, 1e3, 50)[:, None]
    one = lambda row: mech.clip_and_sum(chain_of(), (), row[None], jnp.ones(1)).value
    lengths = np.abs(np.asarray(jax.jit(jax.vmap(one))(rows))).sum(1)
    assert 0.49 < lengths.max() <= 0.5 * (1 + 1e-6)


# --- its curves


def divergence(order, shift, rate=1.0, back=False):
    """Return the Renyi divergence of Laplace densities of scale 1, one of which is shifted with
    probability `rate`, by an integral."""
    density = lambda x: math.exp(-abs(x)) / 2
    mixed = lambda x: (1 - rate) * density(x) + rate * density(x - shift)
    p, q = (density, mixed) if back else (mixed, density)
    inside = lambda x: p(x) ** order * q(x) ** (1 - order)
    parts = [(-40, 0), (0, shift), (shift, 40 + shift)]
    return math.log(sum(integrate.quad(inside, *p)[0] for p in parts)) / (order - 1)


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0])
def test_the_curve_is_the_divergence(z):
    orders = np.array([1.001, 1.5, 2.0, 7.0])
    want = [divergence(a, 1 / z) for a in orders]
    np.testing.assert_allclose(rdp.laplace(orders, z), want, rtol=1e-5)
    assert rdp.laplace(np.array([1e7]), z)[0] == pytest.approx(1 / z, rel=1e-5)


def test_shifts_of_several_coordinates_cost_no_more_than_one():
    """A clip of the L1 norm is enough: one coordinate that takes all of it is the worst case."""
    r = np.random.default_rng(0)
    orders = 1 + np.geomspace(1e-3, 1e3, 20)
    for _ in range(50):
        shifts = r.dirichlet(np.ones(r.integers(2, 6))) * r.uniform(0.1, 5)
        apart = sum(rdp.laplace(orders, 1 / s) for s in shifts)
        assert (apart <= rdp.laplace(orders, 1 / shifts.sum()) * (1 + 1e-9)).all()


def test_randomized_response_attains_the_curve_of_a_pure_guarantee():
    """No pair with ratios within e^epsilon exceeds it, and the curve of less is exceeded."""
    orders, epsilon, r = np.array([1.1, 2.0, 5.0, 30.0]), 1.3, np.random.default_rng(1)
    of = lambda p, q: np.array([np.log((p**a * q ** (1 - a)).sum()) / (a - 1) for a in orders])
    response = np.array([math.exp(epsilon), 1]) / (1 + math.exp(epsilon))
    bound = rdp.pure(orders, epsilon)
    np.testing.assert_allclose(of(response, response[::-1]), bound, rtol=1e-9)
    assert (rdp.pure(orders, 1.2) < bound).all()
    for p in r.dirichlet(np.ones(5), 100):
        q = p * np.exp(epsilon / 2 * r.uniform(-1, 1, 5))
        assert (of(p, q / q.sum()) <= bound * (1 + 1e-9)).all()


def test_the_gain_from_a_sample_against_the_truth():
    """One coordinate of a Poisson sample: both directions of the mixture are below what is charged,
    and one is above a first guess, the rate times epsilon."""
    rate, shift = 0.2, 1.5
    charged, guess = events.pure(math.log1p(rate * math.expm1(shift))), events.pure(rate * shift)
    over = False
    for order in (1.5, 3.0, 12.0):
        of = lambda event, order=order: rdp_events.curve(event, np.array([order]))[0]
        for back in (False, True):
            truth = divergence(order, shift, rate, back)
            assert truth <= of(charged) * (1 + 1e-6)
            over |= truth > of(guess)
    assert over


def test_epsilons_of_events():
    assert tightest.epsilon(events.laplace(2.0), 1e-12)[0] == pytest.approx(0.5, rel=1e-4)
    value, method = tightest.epsilon(events.repeat(events.laplace(20.0), 400), 1e-5)
    # many small Laplace releases cost a little more than Gaussians of the same variance
    normal = tightest.epsilon(events.repeat(events.gaussian(20 * math.sqrt(2)), 400), 1e-5)[0]
    assert method == "rdp" and normal < value < 400 / 20 / 3
    group = events.of_group(events.compose(events.laplace(2.0), events.pure(0.1)), 3)
    assert group == events.compose(events.laplace(2.0 / 3), events.pure(0.1 * 3))
    deltas = rdp_events.deltas(events.laplace(2.0), np.array([0.0, 0.4, 0.51]))
    assert 1 - math.exp(-0.25) <= deltas[0] < 1 and deltas[2] < 1e-10


# --- what a plan proves


def epsilon_of(plan, rounds=4, **options):
    found = jfl.guarantee(plan, rounds, delta=1e-5, **options)
    assert found.status == "proved", found.caveats
    return found.epsilon


def by_hand(event, rounds=4):
    return tightest.epsilon(events.repeat(event, rounds), 1e-5)[0]


def gain(rate, epsilon=0.5):
    return events.pure(math.log1p(rate * math.expm1(epsilon)))


RATE = float(np.float32(0.3))
SOME = jfl.sampling.without_replacement(CLIENTS, 3)
POISSON = jfl.sampling.poisson(CLIENTS, 0.3, capacity=CLIENTS)
HOURS = jfl.sampling.available_poisson(CLIENTS, 0.3, period=3, awake=0.7, capacity=CLIENTS)


@pytest.mark.parametrize(
    "sampler, adjacency, event",
    [
        pytest.param(None, None, events.laplace(2.0), id="full"),
        pytest.param(POISSON, None, gain(RATE), id="poisson"),
        pytest.param(HOURS, None, gain(RATE), id="available poisson"),
        pytest.param(SOME, None, gain(3 / CLIENTS), id="without replacement"),
        pytest.param(SOME, "zero_out", events.laplace(2.0), id="zero_out has no known gain"),
    ],
)
def test_clients(sampler, adjacency, event):
    plan = plan_of(chain_of(2.0, adjacency=adjacency), sampler=sampler)
    assert epsilon_of(plan) == pytest.approx(by_hand(event), rel=1e-6)


def test_examples_and_uploads():
    implied = jfl.guarantee(plan_of(chain_of(2.0), sampler=POISSON), 4, delta=1e-5, unit="example")
    absent = events.participation(RATE, events.laplace(1.0))  # twice the move
    assert implied.implied and implied.epsilon == pytest.approx(by_hand(absent), rel=1e-6)
    grad = jfl.private_grad(squared, chain_of(2.0, divisor=4))
    plan = plan_of(grad=grad, batch=jfl.batches.poisson(2, capacity=9))
    assert jfl.check_privacy(plan).status == "proved"
    step = gain(2 / int(min(make_federation().size)))
    want = pytest.approx(by_hand(events.repeat(step, 2)), rel=1e-3)
    assert epsilon_of(plan, view="server") == want
    assert jfl.gradients.per_example.gradient_path(plan) == "vmap"
    local = plan_of(upload=jfl.chain(jfl.clip_l1(1.0), jfl.total(), jfl.laplace(2.0)))
    server, third = (epsilon_of(local, view=v, unit="client") for v in ("server", "third_party"))
    assert server == third == by_hand(events.laplace(2.0))  # a sum of them is not Laplace


def test_calibrated_noise_reaches_the_target():
    z = jfl.calibrate(plan_of(chain_of(2.0)), epsilon=1.0, rounds=4)
    assert 0.999 < epsilon_of(plan_of(chain_of(z))) <= 1.0
    found = jfl.epsilons(plan_of(chain_of(2.0)), np.array([0, 1, 2]), delta=1e-12)
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0], rtol=1e-3)


CUT = jfl.clip_l2(0.5), jfl.total()
CHANGED = dataclasses.replace(jfl.laplace(2.0), absolute=True)
RENAMED = dataclasses.replace(jfl.clip_l1(0.1), name="clip_l2")


@pytest.mark.parametrize(
    "stages, in_steps",
    [
        pytest.param((*CUT, jfl.laplace(1.0), jfl.divide(4.0)), False, id="after an L2 clip"),
        pytest.param((jfl.clip_l1(0.5), jfl.total(), CHANGED), False, id="of a changed noise"),
        pytest.param((RENAMED, jfl.total(), jfl.gaussian(1.0)), True, id="of a renamed clip"),
    ],
)
def test_chains_put_together_by_hand_are_not_believed(stages, in_steps):
    chain = Mechanism(stages, "replace_one")
    plan = plan_of(grad=jfl.private_grad(squared, chain)) if in_steps else plan_of(chain)
    assert jfl.guarantee(plan, 2).status == "conditional"


@pytest.mark.slow
def test_audited_is_below_proved():
    plan = plan_of(chain_of(0.5))
    report = jfl.audit(plan, 2, trials=4000, delta=0.01, seed=1)
    assert 0.5 < report.epsilon <= jfl.guarantee(plan, 2, delta=0.01).epsilon


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: jfl.chain(*CUT, jfl.laplace(1.0)), "clip_l1"),
        (lambda: jfl.chain(jfl.clip_l1(1.0), *CUT, jfl.laplace(1.0)), "clip_l1"),
        (lambda: jfl.chain(jfl.clip_l1(1.0), jfl.total(), CHANGED), "as laplace"),
        (lambda: jfl.laplace(0.0), "laplace"),
        (lambda: jfl.laplace(lambda r: 1.0), "laplace"),
        (lambda: jfl.laplace(np.ones(3)), "laplace"),
        (lambda: jfl.clip_l1(0.0), "clip_l1"),
        (
            lambda: tightest.epsilon(events.poisson(0.1, events.laplace(1.0)), 1e-5),
            "Gaussians inside",
        ),
        (lambda: jfl.optimizers.noise_std(chain_of()), "Gaussian"),
        (
            lambda: epsilon_of(
                plan_of(chain_of(), sampler=jfl.sampling.min_separation(CLIENTS, 2, 3))
            ),
            "a row of docs/matrix.md.*min_separation",
        ),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()
