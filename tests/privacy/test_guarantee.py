"""`guarantee` with all its bounds, noise that changes over rounds and clients, and the inverses."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, DELTA, NOISY, close, fixed, make, poisson

import jfl
from jfl import sampling
from jfl.core import records
from jfl.privacy import calibration, guarantees
from jfl.privacy.accountants import events, pld, rdp_events, tightest
from jfl.privacy.ledger import caveats
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise")

ROUNDS = 40


@functools.cache
def sampled(view="server", rounds=ROUNDS):
    return guarantees.guarantee(make(NOISY()), rounds, view=view)


# --- the smallest of all bounds


def test_the_smallest_bound_is_taken_and_named():
    g = sampled()
    event = events.repeat(fixed(0.1, 1.0, 3, 100), ROUNDS)
    assert (
        g.method == "pld"
        and g.epsilon == pld.epsilon(event, DELTA)[0] == tightest.epsilon(event, DELTA)[0]
    )
    assert g.epsilon < 0.95 * rdp_events.epsilon(event, DELTA)[0]
    assert tightest.epsilon(events.repeat(events.gaussian(2.0), 9), DELTA)[1] == "gaussian_exact"
    assert (
        guarantees.guarantee(make(NOISY()), ROUNDS, view="third_party").method
        == "pld, participation mixture"
    )


def test_worst_client_with_loss_distributions():
    """Several clients may be the worst: the guarantee is the largest of their smallest."""
    sizes, weights = np.arange(50, 50 + CLIENTS), np.arange(1, CLIENTS + 1)[::-1] ** 2
    plan = make(NOISY(), sampler=sampling.with_replacement(CLIENTS, 5, weights), sizes=sizes)
    got = guarantees.guarantee(plan, ROUNDS, view="third_party").epsilon
    each = [
        tightest.epsilon(
            events.repeat(
                events.participation(1 - (1 - w / weights.sum()) ** 5, fixed(10 / n, 1, 3, int(n))),
                ROUNDS,
            ),
            DELTA,
        )[0]
        for n, w in zip(sizes[:3], weights[:3])
    ]
    close(got, max(each), 1e-4)


def test_deltas_invert_epsilons():
    event = events.repeat(events.poisson(0.05, events.gaussian(1.5)), 100)
    value = tightest.epsilon(event, 1e-6)[0]
    found = tightest.delta(event, value)
    assert 0.9e-6 < found <= 1.005e-6 < rdp_events.deltas(event, np.array([value]))[0]


def test_what_is_beyond_the_grid_is_still_proved(monkeypatch):
    monkeypatch.setattr(tightest, "MAX_PARTS", 2)
    for event in (
        events.repeat(events.poisson(0.01, events.gaussian(1.0)), 10**9),
        events.repeat(events.poisson(0.1, events.gaussian(0.001)), 10),
        events.series(events.poisson(0.1, events.gaussian(np.linspace(1, 3, 3))), np.ones(3)),
    ):
        assert tightest.epsilon(event, DELTA) == rdp_events.epsilon(event, DELTA)


def test_a_unit_that_is_hardly_ever_drawn_costs_nothing():
    """Where the unit is drawn with probability at most delta, no outcome is more than delta
    likelier, whatever the noise."""
    rare = lambda z: events.repeat(events.poisson(1e-9, events.gaussian(z)), 1000)
    assert tightest.epsilon(rare(1e-3), 1e-5) == (0.0, tightest.TOTAL_VARIATION)
    assert tightest.epsilon(rare(1e-3), 0.99e-6)[0] > 0
    assert tightest.solve_noise(rare, 1.0, 1e-5) == pytest.approx(1e-3)
    for sampled in (
        events.without_replacement(1, 1000, events.gaussian(0.01)),
        events.with_replacement(1, 1000, events.gaussian(0.01)),
        events.zeroed_out(1, 1000, events.gaussian(0.01)),
        events.participation(1e-3, events.gaussian(0.01)),
        events.series(events.poisson(5e-4, events.gaussian(np.array([0.01, 1]))), np.ones(2)),
    ):
        assert tightest.epsilon(sampled, 1.01e-3)[0] == 0.0
        assert tightest.epsilon(events.compose(sampled, sampled), 1.01e-3)[0] > 0
        # the smallest delta at epsilon 0 of an outcome that shows whether the unit was drawn
        assert tightest.epsilon(sampled, 0.9e-3)[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", [(1e-6, 10**6, 1e-5, 0.1), (0.01, 1000, 0.4, 1.0)])
def test_hard_calibrations_take_few_of_the_finest_grids(monkeypatch, setting):
    rate, times, delta, target = setting
    finest, of_grid = [], pld._compose_upper

    def counted(groups, way, size, delta):
        finest.extend([size] if size == tightest.FINE[-1] else [])
        return of_grid(groups, way, size, delta)

    monkeypatch.setattr(pld, "_compose_upper", counted)
    make_event = lambda z: events.repeat(events.poisson(rate, events.gaussian(z)), times)
    z = tightest.solve_noise(make_event, target, delta)
    assert len(finest) <= 16
    found = tightest.epsilon(make_event(z), delta)[0]
    assert target * 0.9 <= found <= target < tightest.epsilon(make_event(z * 0.98), delta)[0]


def test_overflow_is_paid_by_the_tight_bound_too():
    from scipy import stats

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


# --- inverses


def poisson_clients(capacity=None):
    """Client-level noise on Poisson cohorts."""
    release = jfl.chain(
        jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(10.0), adjacency="add_remove"
    )
    return make(None, sampler=sampling.poisson(CLIENTS, 0.3, capacity), release=release)


CLIENT = dict(unit="client", view="third_party", adjacency="add_remove")


@pytest.mark.parametrize("over", ["noise_multiplier", "rounds"])
@pytest.mark.parametrize("target", [30.0, [0.5, 30.0, 1000.0]])
def test_a_capacity_that_carries_no_more_is_reported(over, target):
    """Instead of an answer whose epsilon stops below the target."""
    rounds = None if over == "rounds" else 10
    find = lambda plan, epsilon: calibration.calibrate(
        plan, epsilon=epsilon, rounds=rounds, over=over, **CLIENT
    )
    with pytest.raises(ValueError, match=r"epsilon=30, of which .* is the most .* capacity=\d+"):
        find(poisson_clients(18), target)
    with pytest.raises(ValueError, match="is the most that this capacity carries"):
        find(poisson_clients(12), target)
    found = np.ravel(find(poisson_clients(CLIENTS), target))
    if over == "noise_multiplier":
        for z, wanted in zip(found, np.ravel(target)):
            one = events.repeat(events.poisson(0.3, events.gaussian(z)), 10)
            assert wanted * 0.9 <= tightest.epsilon(one, DELTA)[0] <= wanted * 1.001


def test_the_capacity_that_is_named_carries_the_target():
    with pytest.raises(ValueError) as raised:
        calibration.calibrate(poisson_clients(18), epsilon=9.0, rounds=10, **CLIENT)
    capacity = int(re.search(r"the sampler capacity=(\d+)", str(raised.value)).group(1))
    assert 18 < capacity <= CLIENTS
    z = calibration.calibrate(poisson_clients(capacity), epsilon=9.0, rounds=10, **CLIENT)
    assert z == pytest.approx(
        calibration.calibrate(poisson_clients(CLIENTS), epsilon=9.0, rounds=10, **CLIENT), rel=0.01
    )


def test_batches_that_carry_no_more_are_reported():
    plan = lambda capacity: make(
        NOISY(adjacency="add_remove"),
        batches.poisson(8.0, capacity=capacity),
        sizes=np.full(CLIENTS, 200),
    )
    for over, rounds in (("noise_multiplier", 50), ("rounds", None)):
        with pytest.raises(ValueError, match="batches.poisson capacity=200"):
            calibration.calibrate(plan(30), epsilon=50.0, rounds=rounds, over=over)
    with pytest.raises(ValueError, match="batches.poisson capacity=200"):
        calibration.calibrate_per_client(plan(30), epsilon=50.0, rounds=50)
    assert calibration.calibrate(plan(200), epsilon=50.0, rounds=50) > 0.2


def test_solvers_return_what_they_tested():
    """On any decreasing function, also with steps as refined grids have them, the answer passes its
    own test."""
    for power, step in ((1.0, 0.0), (2.5, 0.0), (1.0, 0.01), (0.3, 0.003)):
        tried = {}

        def reached(z, power=power, step=step, tried=tried):
            tried[z] = z**-power * (1 + step * math.sin(50 * z))
            return tried[z]

        for target in (0.2, 1.0, 7.0):
            for first in (1.0, 3.7):
                z = tightest.smallest("test", reached, target, first)
                assert tried[z] <= target and z == float(np.float32(z))
                assert abs(z / target ** (-1 / power) - 1) < 2e-6 + 5 * step / power
    with pytest.raises(ValueError, match="noise can reach"):
        tightest.smallest("test", lambda z: 2.0, 1.0)
    with pytest.raises(ValueError, match="epsilon > 0"):
        tightest.smallest("test", lambda z: 2.0, math.nan)


@pytest.mark.parametrize("gain, most", [(0.0, 1), (0.005, 1), (0.3, 12)])
def test_the_finest_grids_are_asked_where_they_gain(gain, most):
    finest, bound = [], lambda z: z**-2.0

    def reached(z, sizes):
        finest.extend([z] if sizes == tightest.FINE else [])
        return bound(z) * ((1 - gain) if sizes == tightest.FINE else 1)

    z = tightest.smallest_refined("test", reached, 0.8, 3.0)
    assert len(finest) <= most and reached(z, tightest.FINE) <= 0.8
    assert z == pytest.approx(((1 - gain) / 0.8) ** 0.5, rel=4e-3)
    assert tightest.smallest_refined("test", lambda z, _: bound(z), 0.8, 3.0) == (
        tightest.smallest("test", bound, 0.8, 3.0)
    )


def test_rounds_are_refined_on_the_finest_grids():
    one = lambda n, sizes: n * (0.7e-4 if sizes == tightest.FINE else 1e-4)
    found = tightest.largest("test", lambda n: n * 2e-4, one, 1.0)
    assert 14285 * (1 - 4e-3) <= found <= 14285


def test_few_evaluations_at_a_jump():
    calls = []
    reached = lambda z: calls.append(z) or (1.4 / z if z < 0.3042 else 0.0)
    z = tightest.smallest("test", reached, 1.0, 0.32)
    assert 0.3042 <= z <= 0.3042 * 1.004 and len(calls) <= 14


def test_few_evaluations():
    """The solver follows the slope: about ten evaluations where bisection needs twenty-five."""
    calls = []
    tightest.smallest("test", lambda z: calls.append(z) or 5 * z**-1.7 + 0.01 / z**4, 0.8, 3.0)
    assert len(calls) <= 14


def test_largest_numbers():
    for most in (0, 1, 17, 12345):
        quick = lambda times, most=most: np.where(np.asarray(times) <= 0.8 * most, 0.5, 2.0)
        assert (
            tightest.largest("test", quick, lambda n, _, most=most: 0.5 if n <= most else 2.0, 1.0)
            == most
        )


# --- noise that changes


def falling_bound(round_):
    return 0.5 * 0.9**round_


def calming(round_):
    return 2.0 * 0.95**round_


def chain(bound, noise):
    return jfl.chain(jfl.clip_l2(bound), jfl.total(), noise, adjacency="replace_one")


def levels(rounds):
    return np.float64(np.float32(2.0) * np.float32(0.95) ** np.arange(rounds))


def test_noise_that_changes_over_rounds(renyi):
    want = lambda rounds: eps_of(events.compose(*(fixed(0.1, z, 3, 100) for z in levels(rounds))))
    plan = make(chain(falling_bound, jfl.gaussian(calming)))
    close(guarantees.guarantee(plan, 7).epsilon, want(7), 1e-6)
    close(guarantees.epsilons(plan, np.array([0, 3, 7])), [0, want(3), want(7)], 1e-4)
    # a fixed std over a clip norm that falls is more and more noise
    growing = make(chain(falling_bound, jfl.gaussian(std=1.0)))
    each = [fixed(0.1, 1 / 0.9**r, 3, 100) for r in range(7)]
    close(guarantees.guarantee(growing, 7).epsilon, eps_of(events.compose(*each)), 1e-5)


def test_changing_noise_in_every_place(renyi):
    noise = chain(0.5, jfl.gaussian(calming))
    each = [events.gaussian(z) for z in levels(5)]
    server = guarantees.guarantee(make(upload=noise), 5)
    close(server.epsilon, eps_of(events.compose(*each)), 1e-6)
    third = guarantees.guarantee(make(upload=noise), 5, view="third_party")
    close(
        third.epsilon, eps_of(events.compose(*(events.participation(0.25, e) for e in each))), 1e-5
    )
    released = guarantees.guarantee(make(release=noise), 5, view="third_party")
    close(
        released.epsilon,
        eps_of(events.compose(*(fixed(0.25, z, 1, CLIENTS) for z in levels(5)))),
        1e-5,
    )
    # a client that came twice may have come in the two rounds with the least noise
    capped = guarantees.guarantee(make(noise), 5, cap=2)
    close(
        capped.epsilon,
        eps_of(events.compose(*(fixed(0.1, z, 3, 100) for z in levels(5)[-2:]))),
        1e-5,
    )


@pytest.mark.slow
def test_segments_of_changing_noise(renyi):
    plan = make(chain(0.5, jfl.gaussian(calming)))
    steady = make(NOISY(3.0))
    got = guarantees.guarantee([(plan, 4), (steady, 10)]).epsilon
    close(
        got,
        eps_of(
            events.compose(*(fixed(0.1, z, 3, 100) for z in levels(4)), fixed(0.1, 3.0, 30, 100))
        ),
        1e-5,
    )


@pytest.mark.slow
def test_a_later_segment_says_where_its_rounds_begin(renyi):
    """simulate(start=...) goes on counting: two halves are the whole, and not twice the first
    half."""
    plan = make(chain(0.5, jfl.gaussian(calming)))
    whole = guarantees.guarantee(plan, 4).epsilon
    close(guarantees.guarantee([(plan, 2), (plan, 2, 2)]).epsilon, whole, 1e-6)
    close(guarantees.guarantee([(plan, 2, 0), (plan, 2, 2)]).epsilon, whole, 1e-6)
    again = guarantees.guarantee([(plan, 2), (plan, 2, 0)], seeds="different")
    assert again.epsilon < 0.99 * whole
    with pytest.raises(ValueError, match="first"):
        guarantees.guarantee([(plan, 2), (plan, 2)])
    for site in ("upload", "release"):
        noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(calming))
        plan = make(**{site: noise})
        close(
            guarantees.guarantee(
                [(plan, 2), (plan, 3, 2)], view="third_party", unit="client"
            ).epsilon,
            guarantees.guarantee(plan, 5, view="third_party", unit="client").epsilon,
            1e-5,
        )


@pytest.mark.slow
def test_changing_noise_with_all_bounds():
    plan = make(chain(0.5, jfl.gaussian(calming)))
    g = guarantees.guarantee(plan, 3)
    each = [events.repeat(fixed(0.1, z, 3, 100), 1) for z in levels(3)]
    assert g.method == "pld" and g.epsilon < eps_of(events.compose(*each))
    close(g.epsilon, tightest.epsilon(events.compose(*each), DELTA)[0], 2e-3)


def test_changing_noise_is_calibrated_in_proportion(renyi):
    plan = make(chain(0.5, jfl.gaussian(calming)))
    z = jfl.calibrate(plan, epsilon=3.0, rounds=2)
    scaled = make(chain(0.5, jfl.gaussian(records.Fn(scaled_calming, dict(first=z)))))
    assert 3.0 * (1 - 1e-4) < guarantees.guarantee(scaled, 2).epsilon <= 3.0
    with pytest.raises(ValueError, match="over='rounds'"):
        jfl.calibrate(plan, epsilon=3.0, over="rounds")


def scaled_calming(round_, *, first):
    return first * 0.95**round_


def test_noise_that_ends_is_refused(renyi):
    dying = make(chain(0.5, jfl.gaussian(records.Fn(lambda r: 1.0 - 0.3 * r))))
    assert guarantees.guarantee(dying, 3).epsilon > 0
    with pytest.raises(
        ValueError,
        match="noise of gaussian in private_grad >= 1e-15 .* in every round, but got "
        "-0.2 in round 4",
    ):
        guarantees.guarantee(dying, 5)


# --- noise of each client


def test_each_client_has_its_noise(renyi):
    sizes = np.where(np.arange(CLIENTS) < 10, 100, 400)
    z = np.where(np.arange(CLIENTS) < 10, 4.0, 0.8).astype(np.float32)
    plan = make(chain(0.5, jfl.gaussian(z)), sizes=sizes)
    each = [eps_of(fixed(10 / n, float(v), 150, int(n))) for n, v in zip(sizes, z)]
    close(guarantees.epsilons_per_client(plan, 50), each, 1e-9)
    close(guarantees.guarantee(plan, 50).epsilon, max(each), 1e-9)
    third = guarantees.epsilons_per_client(plan, 50, view="third_party")
    close(guarantees.guarantee(plan, 50, view="third_party").epsilon, third.max(), 1e-9)
    assert len(set(third)) == 2 and (third < each).all()
    capped = guarantees.guarantee(plan, 50, cap=5).epsilon
    close(capped, max(eps_of(fixed(10 / n, float(v), 15, int(n))) for n, v in zip(sizes, z)), 1e-9)


def test_uploads_of_each_client(renyi):
    z = np.linspace(1, 3, CLIENTS).astype(np.float32)
    plan = make(upload=chain(0.5, jfl.gaussian(z)))
    assert guarantees.guarantee(plan, 9).epsilon == eps_of(events.repeat(events.gaussian(1.0), 9))
    assert (
        guarantees.guarantee(plan, 9, unit="example").epsilon
        == guarantees.guarantee(plan, 9).epsilon
    )


def test_calibrated_clients_reach_the_same_epsilon(renyi):
    sizes = np.full(CLIENTS, 100)
    sizes[:5], sizes[5] = 40, 0
    z = calibration.calibrate_per_client(make(NOISY(), sizes=sizes), epsilon=2.0, rounds=30)
    assert (
        z.dtype == np.float32
        and z.shape == (CLIENTS,)
        and len(set(z.tolist())) == 2
        and z[0] > z[-1]
    )
    plan = make(chain(0.5, jfl.gaussian(z)), sizes=sizes)
    found = guarantees.epsilons_per_client(plan, 30)
    assert ((found <= 2.0) & (found > 2.0 * (1 - 1e-4)))[sizes > 0].all() and found[5] == 0
    assert guarantees.guarantee(plan, 30).epsilon == found.max()


@pytest.mark.slow
def test_many_clients_that_reach_one_epsilon_reach_it_together(monkeypatch):
    """All are the worst one: a search that stops at some of them may not say more than the bound of
    all."""
    monkeypatch.setattr(guarantees, "MAX_KINDS", 3)
    sizes = 20 + np.arange(CLIENTS)
    z = calibration.calibrate_per_client(make(NOISY(), sizes=sizes), epsilon=1.0, rounds=3)
    plan = make(NOISY(z), sizes=sizes)
    each = guarantees.epsilons_per_client(plan, rounds=3)
    found = guarantees.guarantee(plan, 3)
    assert each.max() * (1 - 1e-12) <= found.epsilon <= min(1.0, guarantees.epsilons(plan, [3])[0])


def test_many_kinds_of_clients_are_quick(monkeypatch):
    """Beyond some number, Renyi bounds: sound, a little above."""
    sizes = 50 + np.arange(CLIENTS) // 4
    few, many = make(NOISY(), sizes=np.minimum(sizes, 52)), make(NOISY(), sizes=sizes)
    monkeypatch.setattr(guarantees, "MAX_KINDS", 3)
    monkeypatch.setattr(pld, "epsilon", lambda *args, **options: (0.1, 0.0))
    assert guarantees.epsilons_per_client(few, 9).max() == 0.1
    close(
        guarantees.epsilons_per_client(many, 9),
        [eps_of(fixed(10 / n, 1.0, 27, int(n))) for n in sizes],
        1e-9,
    )
    assert calibration.calibrate_per_client(many, epsilon=2.0, rounds=9).max() > 0.5
    assert calibration.calibrate_per_client(few, epsilon=2.0, rounds=9).max() == tightest.LEAST


def test_levels_are_checked(fed, task):
    from helpers.problems import squared

    wrong = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(np.ones(3)))
    alg = jfl.algorithms.fedavg(
        jfl.private_grad(squared, wrong), batch=batches.without_replacement(3)
    )
    with pytest.raises(ValueError, match="one per client for 7 clients"):
        jfl.plan(fed, task, alg, sampling.full(7))
    plain = jfl.algorithms.fedavg(jfl.grad(squared), batch=batches.without_replacement(3))
    with pytest.raises(ValueError, match="one noise level in release"):
        jfl.plan(fed, task, plain, sampling.full(7), release=wrong)
    with pytest.raises(ValueError, match="> 0"):
        jfl.gaussian(np.array([1.0, 0.0]))


# --- who comes


def test_responders_gain_nothing(renyi):
    """Fast clients may come in every round."""
    plan = make(
        NOISY(), sampler=sampling.first_responders(CLIENTS, 5, latency=np.linspace(1, 9, CLIENTS))
    )
    server = guarantees.guarantee(plan, 50)
    third = guarantees.guarantee(plan, 50, view="third_party")
    assert third.epsilon == server.epsilon == eps_of(fixed(0.1, 1.0, 150, 100))
    assert caveats.EVERY_ROUND in third.caveats
    assert guarantees.guarantee(plan, 50, quantile=1e-7).epsilon >= server.epsilon
    released = make(release=NOISY(), sampler=plan.sampler)
    assert guarantees.guarantee(released, 50, view="third_party").epsilon == eps_of(
        events.repeat(events.gaussian(1.0), 50)
    )


@pytest.fixture
def renyi(monkeypatch):
    """Without loss distributions: which events the ledger finds."""
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)


def eps_of(event):
    return rdp_events.epsilon(event, DELTA)[0]


def test_the_mean_is_over_the_cohort_that_came(fed, task):
    """A realised weight divides a release without noise; beside noise it is refused."""
    from helpers.problems import squared

    alg = jfl.algorithms.fedavg(jfl.grad(squared), batch=batches.without_replacement(3))
    normal = jfl.chain(jfl.total(), jfl.divide("weight"))
    plan = jfl.plan(
        fed, task, alg, sampling.without_replacement(7, 3), weights="size", release=normal
    )
    one_round = jax.jit(lambda run: jfl.run_round(run, plan)[0])
    assert np.isfinite(one_round(jfl.init(jax.random.key(0), plan)).server.params["b"])
    noisy = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide("weight"))
    for site in ("release", "upload"):
        with pytest.raises(ValueError, match="public divisor"):
            jfl.plan(fed, task, alg, sampling.full(7), **{site: noisy})
    inside = jfl.algorithms.fedavg(
        jfl.private_grad(squared, noisy), batch=batches.without_replacement(3)
    )
    with pytest.raises(ValueError, match="divisor for examples"):
        jfl.plan(fed, task, inside, sampling.full(7))


# --- what an attack found


def loud_first(round_):
    return 5.0 - 4.5 * (round_ == 0)


def test_a_client_may_run_often_in_the_loudest_round(renyi):
    """Independent draws may take a client three times in the round with the least noise."""
    sampler = sampling.with_replacement(CLIENTS, 3, independent=True)
    plan = make(chain(0.5, jfl.gaussian(loud_first)), batches.full(), count=1, sampler=sampler)
    want = eps_of(events.repeat(events.gaussian(0.5), 3))
    seen = np.zeros(CLIENTS, int)
    seen[0] = 3
    for options in (dict(cap=3), dict(realised=seen)):
        close(guarantees.guarantee(plan, 10, **options).epsilon, want, 1e-9)


def test_capped_runs_pay_for_the_overflow_of_large_clients():
    sizes = np.where(np.arange(CLIENTS) == 0, 200, 30)
    plan = make(
        NOISY(adjacency="add_remove"),
        batches.poisson(rate=0.1, capacity=38),
        sizes=sizes,
        sampler=sampling.full(CLIENTS),
    )
    for options in ({}, dict(cap=20)):
        with pytest.raises(ValueError, match="Raise the capacity"):
            guarantees.guarantee(plan, 20, **options)


def test_uploads_hide_what_is_uploaded_not_who_uploads(fed, task):
    from helpers.problems import squared

    alg = jfl.algorithms.fedavg(jfl.grad(squared), batch=batches.without_replacement(3))
    hiding = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0), adjacency="add_remove")
    with pytest.raises(ValueError, match="upload.*'replace_one'"):
        jfl.plan(fed, task, alg, sampling.full(7), upload=hiding)


def test_one_good_entry_is_enough(renyi):
    sampler = sampling.with_replacement(CLIENTS, 3)
    both = make(upload=NOISY(), release=NOISY(0.5), sampler=sampler, stateful=True)
    alone = make(upload=NOISY(), sampler=sampler)
    third = lambda plan: guarantees.guarantee(plan, 5, view="third_party", unit="client").epsilon
    assert third(both) == third(alone)


def test_segments_take_the_better_noise(renyi):
    plan = make(upload=NOISY(3.0), release=NOISY(0.5))
    one = guarantees.guarantee(plan, 5, view="third_party")
    joined = guarantees.guarantee([(plan, 5)], view="third_party")
    close(joined.epsilon, one.epsilon, 1e-9)


def test_a_bound_that_is_none_is_not_reached():
    with pytest.raises(ValueError, match="noise can reach"):
        tightest.smallest("test", lambda z: math.nan, 1.0)


@pytest.mark.parametrize(
    "stages, match",
    [
        (
            lambda: (jfl.clip_l2(lambda r: np.ones(7)), jfl.gaussian(1.0)),
            "one number per round from the function in clip_l2",
        ),
        (
            lambda: (jfl.clip_l2(1.0), jfl.gaussian(lambda r: jax.numpy.ones((7, 2)))),
            "one noise level",
        ),
        (lambda: (jfl.clip_l2(1.0), jfl.gaussian(lambda r: jax.numpy.ones(1))), "one noise level"),
        (lambda: (jfl.clip_l2(1.0), jfl.gaussian(lambda r: None)), "traceable function"),
        (lambda: (jfl.clip_l2(1.0), jfl.gaussian(lambda r: 1.0 if r < 3 else 2.0)), "jnp.where"),
        (lambda: (jfl.clip_l2(1.0), jfl.gaussian(np.array([]))), "one per client"),
    ],
)
def test_functions_of_the_round_have_a_shape(fed, task, stages, match):
    from helpers.problems import squared

    with pytest.raises(ValueError, match=match):
        first, noise = stages()
        grad = jfl.private_grad(squared, jfl.chain(first, jfl.total(), noise))
        jfl.plan(
            fed,
            task,
            jfl.algorithms.fedavg(grad, batch=batches.without_replacement(3)),
            sampling.full(7),
        )


def test_weights_of_the_round_have_a_shape(fed, task):
    from helpers.problems import squared

    alg = jfl.algorithms.fedavg(jfl.grad(squared), batch=batches.without_replacement(3))
    for bad in (lambda r: jax.numpy.ones(3), lambda r: 1.0):
        with pytest.raises(ValueError, match="one weight per client|traceable"):
            jfl.plan(fed, task, alg, sampling.full(7), weights=bad)


def test_many_events_at_once_bound_each():
    """The worst of many is found among quick upper bounds, and is what each alone would give."""
    each = [
        events.repeat(events.poisson(q, events.gaussian(z)), 50)
        for q, z in zip(np.linspace(0.01, 0.1, 7), np.linspace(2, 0.9, 7)[::-1])
    ]
    alone = [rdp_events.epsilon(e, DELTA)[0] for e in each]
    high = rdp_events.quick_bounds(tuple(each), np.ones(1), np.full(1, DELTA))
    assert (high >= np.array(alone) * (1 - 1e-12)).all() and (high <= np.array(alone) * 1.15).all()
    assert rdp_events.bounds(tuple(each), np.ones(1), np.full(1, DELTA))[0][0] == max(alone)
    assert tightest.tightest(tightest.Release(tuple(each)), DELTA)[0] == max(
        tightest.epsilon(e, DELTA)[0] for e in each
    )


def test_a_bound_needs_clients(renyi):
    plan = make(NOISY())
    with pytest.raises(ValueError, match="Lower quantile"):
        calibration.calibrate_per_client(plan, epsilon=1.0, rounds=1, quantile=0.9, delta=0.95)
