"""Laplace noise behind a clip in the sum of absolute values: its law, its curves, its ledger."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, flat, make_federation, squared, start_params
from jfl.kernels.laplace import laplace
from jfl.kernels.normals import normals
from scipy import integrate, stats

import jfl
from jfl.core.errors import NotAnalysable
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
    batch = jfl.batches.full() if batch is None else batch
    fedavg = jfl.algorithms.fedavg(grad, lr=0.1, steps=2, batch=batch)
    sampler = jfl.sampling.full(CLIENTS) if sampler is None else sampler
    return jfl.plan(make_federation(), TASK, fedavg, sampler, release=release, **options)


# --- the noise


def test_the_law_of_the_noise():
    """Kolmogorov-Smirnov at 1e-4, of 200,000 numbers; normals of the same variance fail."""
    drawn = flat(laplace(KEY, {"a": jnp.zeros((300, 200)), "b": jnp.zeros(140_000)}))
    assert stats.kstest(drawn, "laplace").pvalue > 1e-4
    normal = np.asarray(normals(KEY, jnp.zeros(200_000))) * math.sqrt(2)
    assert stats.kstest(normal, "laplace").pvalue < 1e-12
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 5 / math.sqrt(len(drawn))


def clip_l1(v, bound):
    return v * min(1.0, bound / np.abs(v).sum())


def test_a_run_equals_a_numpy_loop():
    plan = plan_of(chain_of())
    fed, noise = plan.fed, run_noise_key(jfl.init(KEY, plan))

    def run(clip):
        w = flat(start_params())
        for r in range(3):
            total = 0
            for c in range(CLIENTS):
                rows = np.asarray(fed.index[c][: fed.size[c]])
                x, y, v = np.asarray(fed.x)[rows], np.asarray(fed.y)[rows], w
                for _ in range(2):
                    gap = v[0] + x @ v[1:] - y
                    v = v - 0.1 * np.concatenate([[gap.mean()], (gap[:, None] * x).mean(0)])
                total = total + clip(v - w, 0.5)
            key = stream_key(noise, Stream.RELEASE, r)
            a, b, c, d = np.asarray(normals(key, jnp.zeros(16))).reshape(4, 4)
            w = w + (total + 2 * 0.5 * (a * b + c * d)) / CLIENTS  # replace_one
        return w

    found = flat(jfl.simulate(KEY, plan, 3).params)
    np.testing.assert_allclose(found, run(clip_l1), atol=2e-5)
    wrong = lambda v, bound: v * min(1.0, bound / np.linalg.norm(v))
    assert np.abs(found - run(wrong)).max() > 1e-3


def test_no_contribution_moves_the_sum_by_more_than_its_sensitivity():
    rows = jax.random.normal(KEY, (50, 7)) * jnp.geomspace(1e-3, 1e3, 50)[:, None]
    one = lambda row: mech.clip_and_sum(chain_of(), (), row[None], jnp.ones(1)).value
    lengths = np.abs(np.asarray(jax.vmap(one)(rows))).sum(1)
    assert lengths.max() <= 0.5 * (1 + 1e-6) and lengths.max() > 0.49


# --- its curves


def divergence(order, shift):
    """Renyi, of Laplace densities of scale 1, by an integral."""
    log_ratio = lambda x: abs(x - shift) - abs(x)
    inside = lambda x: math.exp(-abs(x - shift) + order * log_ratio(x)) / 2
    parts = [(-60, 0), (0, shift), (shift, 60 + shift)]
    return math.log(sum(integrate.quad(inside, *p)[0] for p in parts)) / (order - 1)


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0])
def test_the_curve_is_the_divergence(z):
    orders = np.array([1.001, 1.5, 2.0, 7.0, 40.0])
    want = [divergence(a, 1 / z) for a in orders]
    np.testing.assert_allclose(rdp.laplace(orders, z), want, rtol=1e-5)
    assert rdp.laplace(np.array([1e7]), z)[0] == pytest.approx(1 / z, rel=1e-5)


def test_shifts_of_several_coordinates_cost_no_more_than_one():
    """What the sum of absolute values stands for: equality for one coordinate alone."""
    r = np.random.default_rng(0)
    for _ in range(200):
        shifts = r.dirichlet(np.ones(r.integers(2, 6))) * r.uniform(0.1, 5)
        orders = 1 + np.geomspace(1e-3, 1e3, 20)
        apart = sum(rdp.laplace(orders, 1 / s) for s in shifts)
        assert (apart <= rdp.laplace(orders, 1 / shifts.sum()) * (1 + 1e-9)).all()


def test_nothing_pure_is_worse_than_randomized_response():
    """Random pairs on five points with ratios within e^epsilon; the curve of a smaller epsilon is
    exceeded."""
    r, epsilon, worst = np.random.default_rng(1), 1.3, 0.0
    orders = np.array([1.1, 2.0, 5.0, 30.0])
    bound = rdp.pure(orders, epsilon)
    for k in range(2000):
        p = r.dirichlet(np.ones(5))
        q = p * np.exp(epsilon * r.uniform(-1, 1, 5)) if k else p
        if not k:  # randomized response itself
            e = math.exp(epsilon)
            p, q = np.array([e, 1]) / (1 + e), np.array([1, e]) / (1 + e)
        q = q / q.sum()
        if np.abs(np.log(p / q)).max() > epsilon * (1 + 1e-12):
            continue
        found = np.array([np.log((p**a * q ** (1 - a)).sum()) / (a - 1) for a in orders])
        assert (found <= bound * (1 + 1e-9)).all()
        worst = max(worst, (found / bound).max())
    assert worst == pytest.approx(1.0)
    assert (rdp.pure(orders, 1.2) < bound).all()


def sampled(x, shift, rate):
    """The density of a Laplace number that is shifted with a probability."""
    density = lambda x: math.exp(-abs(x)) / 2
    return (1 - rate) * density(x) + rate * density(x - shift)


def test_the_gain_from_a_sample_against_the_truth():
    """One coordinate, Poisson sampled: both directions of the mixture are below what is charged,
    and one is above a first guess, q times epsilon."""
    q, shift = 0.2, 1.5
    charged = events.pure(math.log1p(q * math.expm1(shift)))
    guess = events.pure(q * shift)

    def truth(order, of, against):
        inside = lambda x: (
            sampled(x, shift, of) ** order * sampled(x, shift, against) ** (1 - order)
        )
        parts = ((-40, 0), (0, shift), (shift, 40))
        return math.log(sum(integrate.quad(inside, *p)[0] for p in parts)) / (order - 1)

    over = False
    for order in (1.5, 3.0, 12.0):
        curve = lambda event, order=order: rdp_events.curve(event, np.array([order]))[0]
        for pair in ((0.0, q), (q, 0.0)):
            assert truth(order, *pair) <= curve(charged) * (1 + 1e-6)
            over |= truth(order, *pair) > curve(guess)
    assert over


def test_epsilons():
    assert tightest.epsilon(events.laplace(2.0), 1e-12)[0] == pytest.approx(0.5, rel=1e-4)
    many = events.repeat(events.laplace(20.0), 400)
    value, method = tightest.epsilon(many, 1e-5)
    assert method == "rdp" and value < 400 / 20 / 3
    # many small Laplace releases are a Gaussian one of the same variance, or worse
    normal = tightest.epsilon(events.repeat(events.gaussian(20 * math.sqrt(2)), 400), 1e-5)[0]
    assert normal < value
    pair = events.of_group(events.compose(events.laplace(2.0), events.pure(0.1)), 3)
    assert pair == events.compose(events.laplace(2.0 / 3), events.pure(0.1 * 3))
    with pytest.raises(NotAnalysable, match="Gaussians inside"):
        tightest.epsilon(events.poisson(0.1, events.laplace(1.0)), 1e-5)
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError):
            events.laplace(wrong)
    deltas = rdp_events.deltas(events.laplace(2.0), np.array([0.0, 0.4, 0.51]))
    assert 1 - math.exp(-0.25) <= deltas[0] < 1 and deltas[2] < 1e-10


# --- what a plan proves


def epsilon_of(plan, rounds=4, **options):
    found = jfl.guarantee(plan, rounds, delta=1e-5, **options)
    assert found.status == "proved", found.caveats
    return found.epsilon


def by_hand(event, rounds=4):
    return tightest.epsilon(events.repeat(event, rounds), 1e-5)[0]


def test_client_level():
    assert epsilon_of(plan_of(chain_of(2.0))) == by_hand(events.laplace(2.0))
    drawn = plan_of(chain_of(2.0), sampler=jfl.sampling.poisson(CLIENTS, 0.3, capacity=CLIENTS))
    gain = events.pure(math.log1p(float(np.float32(0.3)) * math.expm1(0.5)))
    assert epsilon_of(drawn) == pytest.approx(by_hand(gain), rel=1e-6)
    some = jfl.sampling.without_replacement(CLIENTS, 3)
    gain = events.pure(math.log1p(3 / CLIENTS * math.expm1(0.5)))
    assert epsilon_of(plan_of(chain_of(2.0), sampler=some)) == pytest.approx(by_hand(gain))
    zeroed = plan_of(chain_of(2.0, adjacency="zero_out"), sampler=some)
    assert epsilon_of(zeroed) == by_hand(events.laplace(2.0))  # no gain is known
    hours = jfl.sampling.available_poisson(CLIENTS, 0.3, period=3, awake=0.7, capacity=CLIENTS)
    assert epsilon_of(plan_of(chain_of(2.0), sampler=hours)) == pytest.approx(
        epsilon_of(drawn), rel=1e-6
    )


def test_what_is_implied_for_examples_is_of_twice_the_move():
    plan = plan_of(chain_of(2.0), sampler=jfl.sampling.poisson(CLIENTS, 0.3, capacity=CLIENTS))
    implied = jfl.guarantee(plan, 4, delta=1e-5, unit="example")
    assert implied.implied
    absent = events.participation(float(np.float32(0.3)), events.laplace(1.0))
    assert implied.epsilon == pytest.approx(by_hand(absent), rel=1e-6)


def test_example_level_and_uploads():
    grad = jfl.private_grad(squared, chain_of(2.0, divisor=4))
    plan = plan_of(grad=grad, batch=jfl.batches.poisson(2, capacity=9))
    assert jfl.check_privacy(plan).status == "proved"
    least = min(make_federation().size)
    gain = events.pure(math.log1p(2 / int(least) * math.expm1(0.5)))
    found = epsilon_of(plan, view="server")
    assert found == pytest.approx(by_hand(events.repeat(gain, 2)), rel=1e-3)
    assert jfl.gradients.per_example.gradient_path(plan) == "vmap"
    local = plan_of(upload=jfl.chain(jfl.clip_l1(1.0), jfl.total(), jfl.laplace(2.0)))
    server, third = (epsilon_of(local, view=v, unit="client") for v in ("server", "third_party"))
    assert server == third == by_hand(events.laplace(2.0))  # a sum of Laplace numbers is not one


def test_calibrated():
    plan = plan_of(chain_of(2.0))
    z = jfl.calibrate(plan, epsilon=1.0, rounds=4)
    assert 0.999 < epsilon_of(plan_of(chain_of(z))) <= 1.0
    assert "2 laplace" in str(jfl.ledger(plan, 4))


def test_chosen_from_many():
    from jfl.privacy.accountants import choosing

    one = jfl.guarantee(plan_of(chain_of(2.0)), 4)
    many = choosing.epsilon_of_choice(one, choosing.geometric(5), 1e-5)
    assert one.epsilon < many < 5 * one.epsilon


def test_a_chain_put_together_by_hand_is_not_believed():
    stages = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.divide(4.0)).stages
    forged = Mechanism((*stages[:2], jfl.laplace(1.0), stages[2]), "replace_one")
    found = jfl.guarantee(plan_of(forged), 2)
    assert found.status == "conditional"
    assert any("other than clip_l1" in str(c) for c in found.caveats)


def test_what_takes_gaussian_noise_alone_says_so():
    plan = plan_of(chain_of())
    with pytest.raises(NotAnalysable, match="Gaussian noise"):
        jfl.auditing.distribution.noise_test(plan, 2)
    with pytest.raises(NotAnalysable, match="Gaussian"):
        jfl.optimizers.noise_std(chain_of())
    turns = jfl.sampling.min_separation(CLIENTS, 2, 3)
    with pytest.raises(NotAnalysable, match="a row of docs/matrix.md.*min_separation"):
        jfl.guarantee(plan_of(chain_of(), sampler=turns), 4)


@pytest.mark.slow
def test_audited_is_below_proved():
    plan = plan_of(chain_of(0.5))
    report = jfl.audit(plan, 2, trials=4000, delta=0.01, seed=1)
    assert 0.5 < report.epsilon <= jfl.guarantee(plan, 2, delta=0.01).epsilon


def test_bad_arguments():
    for stages in (
        (jfl.clip_l2(1.0), jfl.total(), jfl.laplace(1.0)),
        (jfl.clip_l1(1.0), jfl.clip_l2(1.0), jfl.total(), jfl.laplace(1.0)),
    ):
        with pytest.raises(ValueError, match="clip_l1"):
            jfl.chain(*stages)
    for wrong in (0.0, -1.0, lambda r: 1.0, np.ones(3)):
        with pytest.raises(ValueError, match="laplace"):
            jfl.laplace(wrong)
    with pytest.raises(ValueError, match="clip_l1"):
        jfl.clip_l1(0.0)


def test_the_noise_is_of_the_key_itself():
    """A key that is derived from it may be that of another release: its normals must not be seen
    in this one."""
    here = np.asarray(laplace(KEY, jnp.zeros(64)))
    derived = [np.asarray(normals(jax.random.fold_in(KEY, i), jnp.zeros(64))) for i in range(4)]
    assert np.abs(here - (derived[0] * derived[1] + derived[2] * derived[3])).max() > 1
    drawn = np.asarray(normals(KEY, jnp.zeros(256))).reshape(4, 64)
    np.testing.assert_allclose(here, drawn[0] * drawn[1] + drawn[2] * drawn[3], rtol=1e-6)


def test_a_gain_without_a_cap_and_rounds_without_a_release():
    tiny = plan_of(chain_of(1e-3), sampler=jfl.sampling.poisson(CLIENTS, 0.5, capacity=CLIENTS))
    assert epsilon_of(tiny, 1) == pytest.approx(1000 + math.log(0.5), rel=1e-3)
    found = jfl.epsilons(plan_of(chain_of(2.0)), np.array([0, 1, 2]), delta=1e-12)
    np.testing.assert_allclose(found, [0.0, 0.5, 1.0], rtol=1e-3)


def test_a_round_is_empty_only_if_all_of_its_releases_are():
    from jfl.privacy.ledger.entry import of_rounds

    noisy = events.gaussian(np.array([1.0, 1e13, 1.0, 1e13]))
    both = of_rounds(events.compose(noisy, events.repeat(events.gaussian(0.5), 1.0)), 4)
    charged = tightest.epsilon(both, 1e-5)[0]
    whole = events.compose(
        events.repeat(events.gaussian(1.0), 2), events.repeat(events.gaussian(0.5), 4)
    )
    assert charged == pytest.approx(tightest.epsilon(whole, 1e-5)[0], rel=1e-6)
    alone = of_rounds(events.compose(noisy), 4)
    assert tightest.epsilon(alone, 1e-5)[0] == pytest.approx(
        tightest.epsilon(events.repeat(events.gaussian(1.0), 2), 1e-5)[0], rel=1e-6
    )


def test_stages_changed_by_hand_are_not_believed():
    bands = jfl.bands.of(start_params()) if hasattr(jfl.bands, "of") else None
    changed = [dataclasses.replace(jfl.laplace(2.0), absolute=True)]
    if bands is not None:
        changed.append(dataclasses.replace(jfl.laplace(2.0), shape=bands))
    for stage in changed:
        with pytest.raises(ValueError, match="Laplace noise as laplace"):
            jfl.chain(jfl.clip_l1(1.0), jfl.total(), stage)
        bare = Mechanism((jfl.clip_l1(0.5), jfl.total(), stage), "replace_one")
        assert jfl.guarantee(plan_of(bare), 2).status == "conditional"
    renamed = dataclasses.replace(jfl.clip_l1(0.1), name="clip_l2")
    chain = Mechanism((renamed, jfl.total(), jfl.gaussian(1.0)), "replace_one")
    found = jfl.guarantee(plan_of(grad=jfl.private_grad(squared, chain)), 2)
    assert found.status == "conditional"
