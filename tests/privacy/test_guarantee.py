"""`guarantee` with all of its bounds, noise that changes over rounds or clients, and inverses."""

import math

import jax
import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, DELTA, NOISY, close, eps, fixed, make, poisson
from helpers.problems import squared
from scipy import stats

import jfl
from jfl import sampling
from jfl.core import records
from jfl.privacy import calibration, guarantees
from jfl.privacy.accountants import events, pld, rdp_events, tightest
from jfl.privacy.ledger import caveats
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise")

ROUNDS = 40


# --- the smallest of all bounds


def test_the_smallest_bound_is_taken_and_named():
    plan = make(NOISY())
    g, third = (guarantees.guarantee(plan, ROUNDS, view=v) for v in ("server", "third_party"))
    assert set(guarantees.guarantees(plan, ROUNDS)) == {g, third}
    assert third.method == "pld, participation mixture" and third.epsilon < g.epsilon
    event = events.repeat(fixed(0.1, 1.0, 3, 100), ROUNDS)
    assert g.method == "pld"
    assert g.epsilon == pld.epsilon(event, DELTA)[0] == tightest.epsilon(event, DELTA)[0]
    assert g.epsilon < 0.95 * rdp_events.epsilon(event, DELTA)[0]
    assert tightest.epsilon(events.repeat(events.gaussian(2.0), 9), DELTA)[1] == "gaussian_exact"


@pytest.mark.parametrize("view", [None, "server"])
def test_clients_without_noise_are_named(view):
    with pytest.raises(ValueError, match="got unit='client'.*No noise .* protects clients; add re"):
        guarantees.guarantee(make(NOISY()), ROUNDS, unit="client", view=view)


def test_the_worst_of_many_events_counts():
    """More events than get a loss distribution of their own: the result bounds each of them."""
    each = tuple(
        poisson(q, z, 50) for q, z in zip(np.linspace(0.01, 0.1, 10), np.linspace(2, 0.9, 10)[::-1])
    )
    alone = np.array([eps(e) for e in each])
    once, delta = np.ones(1), np.full(1, DELTA)
    quick = rdp_events.quick_bounds(each, once, delta)
    assert (alone * (1 - 1e-12) <= quick).all() and (quick <= alone * 1.15).all()
    assert rdp_events.bounds(each, once, delta)[0][0] == alone.max()
    worst = each[int(alone.argmax())]
    release = tightest.Release(each)
    assert tightest.tightest(release, DELTA)[0] == tightest.epsilon(worst, DELTA)[0]
    # of more events that may be the worst than are refined, the Renyi bounds count
    alike = tightest.tightest(tightest.Release((worst,) * 10), DELTA)[0]
    assert alike == pytest.approx(alone.max(), rel=1e-12)


def test_events_outside_the_grid_get_renyi_bounds(monkeypatch):
    monkeypatch.setattr(tightest, "MAX_PARTS", 2)
    for event in (
        poisson(0.01, 1.0, 10**9),
        poisson(0.1, 0.001, 10),
        events.series(events.poisson(0.1, events.gaussian(np.linspace(1, 3, 3))), np.ones(3)),
    ):
        assert tightest.epsilon(event, DELTA) == rdp_events.epsilon(event, DELTA)


def test_a_unit_that_is_hardly_ever_drawn_costs_nothing():
    """A unit that is drawn with probability at most delta costs nothing, whatever the noise."""
    rare = lambda z: poisson(1e-9, z, 1000)
    assert tightest.epsilon(rare(1e-3), 1e-5) == (0.0, tightest.TOTAL_VARIATION)
    assert tightest.epsilon(rare(1e-3), 0.99e-6)[0] > 0
    assert tightest.solve_noise(rare, 1.0, 1e-5) == pytest.approx(1e-3)
    loud = events.gaussian(0.01)
    for sampled in (
        events.without_replacement(1, 1000, loud),
        events.with_replacement(1, 1000, loud),
        events.zeroed_out(1, 1000, loud),
        events.participation(1e-3, loud),
        events.series(events.poisson(5e-4, events.gaussian(np.array([0.01, 1]))), np.ones(2)),
    ):
        assert tightest.participation_bound(sampled) == pytest.approx(1e-3)
        assert tightest.participation_bound(events.compose(sampled, sampled)) > 1.9e-3


def test_an_overflow_is_paid_by_loss_distributions_too():
    plan = make(
        NOISY(adjacency="add_remove"),
        batches.poisson(8.0, capacity=30),
        sizes=np.full(CLIENTS, 200),
    )
    g = guarantees.guarantee(plan, 50)
    beta = 150 * stats.binom.sf(30, 200, 0.04)
    event = poisson(math.ceil(float(np.float32(0.04)) * 2**23) / 2**23, 1.0, 150)
    assert g.method == "pld" and tightest.epsilon(event, DELTA)[0] < g.epsilon
    assert tightest.epsilon(event, DELTA - beta * (1 + math.exp(g.epsilon)))[0] <= g.epsilon


# --- capacities that carry no more


CLIENT = dict(unit="client", view="third_party", adjacency="add_remove")


def poisson_clients(capacity):
    """Return a plan with noise for clients, of whom each participates with probability 0.3."""
    sampler = sampling.poisson(CLIENTS, 0.3, capacity)
    return make(sampler=sampler, release=NOISY(adjacency="add_remove"))


def poisson_rows(capacity):
    noise, batch = NOISY(adjacency="add_remove"), batches.poisson(8.0, capacity=capacity)
    return make(noise, batch, sizes=np.full(CLIENTS, 200))


@pytest.mark.parametrize("over, rounds", [("noise_multiplier", 10), ("rounds", None)])
def test_a_capacity_that_does_not_reach_the_target_is_reported(renyi, over, rounds):
    """No answer is returned whose epsilon stops below the target."""
    find = lambda plan, **options: calibration.calibrate(
        plan, epsilon=30.0, rounds=rounds, over=over, **options
    )
    with pytest.raises(ValueError, match=r"epsilon=30, of which .* is the most .* capacity=\d+"):
        find(poisson_clients(18), **CLIENT)
    with pytest.raises(ValueError, match="is the most that this capacity carries"):
        find(poisson_clients(12), **CLIENT)
    assert find(poisson_clients(CLIENTS), **CLIENT) > 0
    with pytest.raises(ValueError, match="batches.poisson capacity=200"):
        find(poisson_rows(30))


# --- inverses


def test_solvers_return_what_they_tested():
    """For any decreasing function, also one with small steps as finer grids cause them."""
    for power, step in ((1.0, 0.0), (2.5, 0.0), (1.0, 0.01), (0.3, 0.003)):
        tried = {}

        def reached(z, power=power, step=step, tried=tried):
            tried[z] = z**-power * (1 + step * math.sin(50 * z))
            return tried[z]

        for target, first in ((0.2, 1.0), (1.0, 3.7), (7.0, 3.7)):
            z = tightest.smallest("test", reached, target, first)
            assert tried[z] <= target and z == float(np.float32(z))
            assert abs(z / target ** (-1 / power) - 1) < 2e-6 + 5 * step / power
    for value, target, match in (
        (2.0, 1.0, "noise can reach"),
        (math.nan, 1.0, "noise can reach"),
        (2.0, math.nan, "epsilon > 0"),
    ):
        with pytest.raises(ValueError, match=match):
            tightest.smallest("test", lambda z, value=value: value, target)


def test_the_finest_grids_are_used_where_they_gain():
    for gain in (0.0, 0.005, 0.3):
        reached = lambda z, sizes, gain=gain: z**-2.0 * (1 - gain * (sizes == tightest.FINE))
        z = tightest.smallest_refined("test", reached, 0.8, 3.0)
        assert reached(z, tightest.FINE) <= 0.8
        assert z == pytest.approx(((1 - gain) / 0.8) ** 0.5, rel=4e-3)


def test_largest_numbers():
    for most in (0, 1, 17, 12345):
        quick = lambda times, most=most: np.where(np.asarray(times) <= 0.8 * most, 0.5, 2.0)
        one = lambda n, _, most=most: 0.5 if n <= most else 2.0
        assert tightest.largest("test", quick, one, 1.0) == most
    one = lambda n, sizes: n * (0.7e-4 if sizes == tightest.FINE else 1e-4)
    found = tightest.largest("test", lambda n: n * 2e-4, one, 1.0)
    assert 14285 * (1 - 4e-3) <= found <= 14285


# --- noise that changes


def falling_bound(round_):
    return 0.5 * 0.9**round_


def calming(round_, *, first=2.0):
    return first * 0.95**round_


def loud_first(round_):
    return 5.0 - 4.5 * (round_ == 0)


def chain(bound, noise):
    return jfl.chain(jfl.clip_l2(bound), jfl.total(), noise, adjacency="replace_one")


CALMING = chain(0.5, jfl.gaussian(calming))


def levels(rounds):
    return np.float64(np.float32(2.0) * np.float32(0.95) ** np.arange(rounds))


def of_steps(multipliers):
    """Return the epsilon of three steps a round with each of these noise multipliers."""
    return eps(events.compose(*(fixed(0.1, float(z), 3, 100) for z in multipliers)))


def test_noise_that_changes_over_rounds(renyi):
    plan = make(chain(falling_bound, jfl.gaussian(calming)))
    close(guarantees.guarantee(plan, 7).epsilon, of_steps(levels(7)), 1e-6)
    want = [0, of_steps(levels(3)), of_steps(levels(7))]
    close(guarantees.epsilons(plan, np.array([0, 3, 7])), want, 1e-4)
    # a fixed std is a growing multiple of a clip norm that falls
    growing = make(chain(falling_bound, jfl.gaussian(std=1.0)))
    each = [1 / 0.9**r for r in range(7)]
    close(guarantees.guarantee(growing, 7).epsilon, of_steps(each), 1e-5)


def test_changing_noise_in_every_place(renyi):
    each = [events.gaussian(z) for z in levels(5)]
    of = lambda plan, **options: guarantees.guarantee(plan, 5, **options).epsilon
    close(of(make(upload=CALMING)), eps(events.compose(*each)), 1e-6)
    want = eps(events.compose(*(events.participation(0.25, e) for e in each)))
    close(of(make(upload=CALMING), view="third_party"), want, 1e-5)
    want = eps(events.compose(*(fixed(0.25, z, 1, CLIENTS) for z in levels(5))))
    close(of(make(release=CALMING), view="third_party"), want, 1e-5)
    # a client that came twice may have come in the two rounds with the least noise
    close(of(make(CALMING), cap=2), of_steps(levels(5)[-2:]), 1e-5)


@pytest.mark.parametrize("site", ["step", "upload", "release"])
def test_a_later_segment_says_where_its_rounds_begin(renyi, site):
    """Two halves of a run are the whole run, and not twice its first half."""
    plan = make(CALMING) if site == "step" else make(**{site: CALMING})
    options = {} if site == "step" else dict(view="third_party", unit="client")
    whole = guarantees.guarantee(plan, 5, **options).epsilon
    parts = guarantees.guarantee([(plan, 2), (plan, 3, 2)], **options)
    close(parts.epsilon, whole, 1e-5)
    again = guarantees.guarantee([(plan, 2), (plan, 3, 0)], seeds="different", **options)
    assert again.epsilon < 0.99 * whole
    with pytest.raises(ValueError, match="first"):
        guarantees.guarantee([(plan, 2), (plan, 3)])


def test_changing_noise_is_calibrated_in_proportion(renyi):
    plan = make(CALMING)
    z = jfl.calibrate(plan, epsilon=3.0, rounds=2)
    scaled = make(chain(0.5, jfl.gaussian(records.Fn(calming, dict(first=z)))))
    assert 3.0 * (1 - 1e-4) < guarantees.guarantee(scaled, 2).epsilon <= 3.0
    with pytest.raises(ValueError, match="over='rounds'"):
        jfl.calibrate(plan, epsilon=3.0, over="rounds")
    with pytest.raises(ValueError, match="jfl.calibrate: expected plan of jfl.plan"):
        jfl.calibrate(make, epsilon=3.0, rounds=2)


# --- noise of each client


def test_each_client_has_its_noise(renyi):
    sizes = np.where(np.arange(CLIENTS) < 10, 100, 400)
    z = np.where(np.arange(CLIENTS) < 10, 4.0, 0.8).astype(np.float32)
    plan = make(chain(0.5, jfl.gaussian(z)), sizes=sizes)
    of = lambda steps: [eps(fixed(10 / n, float(v), steps, int(n))) for n, v in zip(sizes, z)]
    close(guarantees.epsilons_per_client(plan, 50), of(150), 1e-9)
    close(guarantees.guarantee(plan, 50).epsilon, max(of(150)), 1e-9)
    third = guarantees.epsilons_per_client(plan, 50, view="third_party")
    close(guarantees.guarantee(plan, 50, view="third_party").epsilon, third.max(), 1e-9)
    assert len(set(third)) == 2 and (third < of(150)).all()
    close(guarantees.guarantee(plan, 50, cap=5).epsilon, max(of(15)), 1e-9)
    uploads = make(upload=chain(0.5, jfl.gaussian(np.linspace(1, 3, CLIENTS, dtype=np.float32))))
    want = eps(events.repeat(events.gaussian(1.0), 9))
    for unit in ("client", "example"):
        assert guarantees.guarantee(uploads, 9, unit=unit).epsilon == want


def test_calibrated_clients_reach_the_same_epsilon(renyi):
    sizes = np.full(CLIENTS, 100)
    sizes[:5], sizes[5] = 40, 0
    z = calibration.calibrate_per_client(make(NOISY(), sizes=sizes), epsilon=2.0, rounds=30)
    assert z.dtype == np.float32 and z.shape == (CLIENTS,)
    assert len(set(z.tolist())) == 2 and z[0] > z[-1]
    plan = make(chain(0.5, jfl.gaussian(z)), sizes=sizes)
    found = guarantees.epsilons_per_client(plan, 30)
    assert ((found <= 2.0) & (found > 2.0 * (1 - 1e-4)))[sizes > 0].all() and found[5] == 0
    assert guarantees.guarantee(plan, 30).epsilon == found.max()
    with pytest.raises(ValueError, match="Lower quantile"):
        calibration.calibrate_per_client(
            make(NOISY()), epsilon=1.0, rounds=1, quantile=0.9, delta=0.95
        )


def test_many_kinds_of_clients_get_renyi_bounds(monkeypatch):
    sizes = 50 + np.arange(CLIENTS) // 4
    few, many = make(NOISY(), sizes=np.minimum(sizes, 52)), make(NOISY(), sizes=sizes)
    monkeypatch.setattr(guarantees, "MAX_KINDS", 3)
    monkeypatch.setattr(pld, "epsilon", lambda *args, **options: (0.1, 0.0))
    assert guarantees.epsilons_per_client(few, 9).max() == 0.1
    want = [eps(fixed(10 / n, 1.0, 27, int(n))) for n in sizes]
    close(guarantees.epsilons_per_client(many, 9), want, 1e-9)
    assert calibration.calibrate_per_client(many, epsilon=2.0, rounds=9).max() > 0.5
    assert calibration.calibrate_per_client(few, epsilon=2.0, rounds=9).max() == tightest.LEAST


# --- who comes


def test_responders_gain_nothing(renyi):
    """Fast clients may come in every round."""
    sampler = sampling.first_responders(CLIENTS, 5, latency=np.linspace(1, 9, CLIENTS))
    plan = make(NOISY(), sampler=sampler)
    server = guarantees.guarantee(plan, 50)
    third = guarantees.guarantee(plan, 50, view="third_party")
    assert third.epsilon == server.epsilon == eps(fixed(0.1, 1.0, 150, 100))
    assert caveats.EVERY_ROUND in third.caveats
    assert guarantees.guarantee(plan, 50, quantile=1e-7).epsilon >= server.epsilon
    released = guarantees.guarantee(make(release=NOISY(), sampler=sampler), 50, view="third_party")
    assert released.epsilon == eps(events.repeat(events.gaussian(1.0), 50))


def test_a_client_may_run_often_in_the_loudest_round(renyi):
    """Independent draws may take a client three times in the round with the least noise."""
    sampler = sampling.with_replacement(CLIENTS, 3, independent=True)
    plan = make(chain(0.5, jfl.gaussian(loud_first)), batches.full(), count=1, sampler=sampler)
    seen = np.zeros(CLIENTS, int)
    seen[0] = 3
    for options in (dict(cap=3), dict(realised=seen)):
        want = eps(events.repeat(events.gaussian(0.5), 3))
        close(guarantees.guarantee(plan, 10, **options).epsilon, want, 1e-9)


def test_capped_runs_pay_for_the_overflow_of_large_clients():
    plan = make(
        NOISY(adjacency="add_remove"),
        batches.poisson(rate=0.1, capacity=38),
        sizes=np.where(np.arange(CLIENTS) == 0, 200, 30),
        sampler=sampling.full(CLIENTS),
    )
    for options in ({}, dict(cap=20)):
        with pytest.raises(ValueError, match="Raise the capacity"):
            guarantees.guarantee(plan, 20, **options)


def test_the_better_of_two_noises_counts_also_in_segments(renyi):
    sampler = sampling.with_replacement(CLIENTS, 3)
    both = make(upload=NOISY(), release=NOISY(0.5), sampler=sampler, stateful=True)
    alone = make(upload=NOISY(), sampler=sampler)
    of = lambda plan, *rounds: (
        guarantees.guarantee(plan, *rounds, view="third_party", unit="client").epsilon
    )
    assert of(both, 5) == of(alone, 5)
    close(of([(both, 5)]), of(both, 5), 1e-9)


def test_two_noises_are_compared_after_all_rounds(renyi):
    """For one round the noise on uploads proves more, and for 12 rounds that on the release."""
    sampler = sampling.with_replacement(CLIENTS, 4, np.arange(1.0, CLIENTS + 1))
    noises = dict(upload=NOISY(6.0), release=NOISY(6.0))

    def of(rounds, *places):
        plan = make(sampler=sampler, **{place: noises[place] for place in places})
        return guarantees.guarantee(plan, rounds, view="third_party", unit="client").epsilon

    for rounds in (1, 12):
        assert of(rounds, *noises) == min(of(rounds, place) for place in noises)
    assert of(1, "upload") < of(1, "release") and of(12, "upload") > of(12, "release")


# --- plans that are refused


def in_steps(noise, bound=1.0, divisor=1.0):
    stages = jfl.clip_l2(bound), jfl.total(), noise, jfl.divide(divisor)
    grad = jfl.private_grad(squared, jfl.chain(*stages))
    return dict(algorithm=jfl.algorithms.fedavg(grad, batch=batches.without_replacement(3)))


def mean_of(divisor="weight", noise=1.0, **options):
    stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(divisor)
    return jfl.chain(*stages, **options)


def levels_of(function):
    return lambda: in_steps(jfl.gaussian(function))


@pytest.mark.parametrize(
    "options, match",
    [
        (levels_of(np.ones(3)), "one per client for 7 clients"),
        (levels_of(np.array([1.0, 0.0])), "> 0"),
        (levels_of(np.array([])), "one per client"),
        (levels_of(lambda r: jax.numpy.ones((7, 2))), "one noise level"),
        (levels_of(lambda r: jax.numpy.ones(1)), "one noise level"),
        (levels_of(lambda r: 1.0 if r < 3 else 2.0), "jnp.where"),
        (
            lambda: in_steps(jfl.gaussian(1.0), lambda r: np.ones(7)),
            "one number per round from the function in clip_l2",
        ),
        (lambda: in_steps(jfl.gaussian(1.0), divisor="weight"), "divisor for examples"),
        (lambda: dict(release=mean_of(4.0, np.ones(7))), "one noise level in release"),
        (lambda: dict(release=mean_of()), "public divisor"),
        (lambda: dict(upload=mean_of()), "public divisor"),
        # noise on an upload hides what it holds, not who uploads
        (lambda: dict(upload=mean_of(1.0, adjacency="add_remove")), "upload.*'replace_one'"),
        (lambda: dict(weights=lambda r: jax.numpy.ones(3)), "one weight per client"),
        # the adjacency of a plan is that of its release, and other noise would ignore it
        (
            lambda: in_steps(jfl.gaussian(1.0)) | dict(adjacency="zero_out"),
            r"noise in private_grad.*jfl.chain\(..., adjacency='zero_out'\)",
        ),
        (lambda: dict(upload=mean_of(1.0), adjacency="zero_out"), "noise in upload"),
    ],
)
def test_plans_whose_noise_is_not_what_they_state_are_refused(options, match, fed, task):
    plain = jfl.algorithms.fedavg(jfl.grad(squared), batch=batches.without_replacement(3))
    with pytest.raises(ValueError, match=match):
        jfl.plan(fed, task, sampler=sampling.full(7), **(dict(algorithm=plain) | options()))
