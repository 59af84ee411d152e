"""The accountant: golden values, other libraries, properties, and what plans are charged with."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ledger_plans import (
    CLIENTS,
    COHORT,
    DELTA,
    NOISY,
    best,
    close,
    eps,
    fixed,
    make,
    poisson,
    poisson_plan,
)
from helpers.paths import DATA
from scipy import stats

import jfl
from jfl import sampling
from jfl.core import records
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, rdp, rdp_events, tightest
from jfl.privacy.ledger import caveats, entries, facts
from jfl.privacy.ledger.entry import worst_columns
from jfl.privacy.mechanisms.chain import chain
from jfl.privacy.mechanisms.stages import clip_l2, gaussian, total
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise")

THIRD, CLIENT, EXAMPLE = {"view": "third_party"}, {"unit": "client"}, {"unit": "example"}


def with_replacement(draws, population, z, times=1):
    return events.repeat(events.with_replacement(draws, population, events.gaussian(z)), times)


def plain(z, times=1):
    return events.repeat(events.gaussian(z), times)


def hidden(share, event, times=1):
    """An event that happens with a probability, in each of several rounds."""
    return events.repeat(events.participation(share, event), times)


# --- golden values


def test_golden_gaussians():
    """Balle and Wang 2018, 60 digits; they compose exactly."""
    close(rdp_events.epsilon(plain(0.5), 1e-5)[0], 9.997256146434301, 1e-9)
    close(rdp_events.epsilon(plain(1.0, 1000), 1e-5)[0], 633.9298513356146, 1e-9)
    assert rdp_events.epsilon(plain(10.0, 10000), 1e-7)[1] == "gaussian_exact"


def test_golden_curves():
    """To 40 digits.  Published bounds of samples of a fixed size are about four times larger."""
    curve = [0.00173765485, 0.00283622827, 0.00864722935, 5.66086725842]
    close(rdp.poisson(np.array([1.25, 2, 5.5, 64]), 0.1, 2.0), curve, 2e-9)
    curve = [0.18403840773, 0.35737401951, 1.91696367196, 63.30139496762]
    close(rdp.poisson(np.array([1.25, 2, 5.5, 128]), 0.5, 1.0), curve, 1e-10)
    curve = [4.2652e-4, 1.70744e-3, 6.92353e-3]
    close(rdp.without_replacement([2.0, 8.0, 32.0], 0.2, 10.0), curve, 1e-5)
    close(rdp.poisson(2.0, 1e-6, 1.0), 1e-12 * math.expm1(1.0), 1e-9)  # lost in float32


@pytest.mark.parametrize(
    "q, z, times, delta, low, high",
    [  # the infimum over real orders, and that over a usual grid
        (0.01, 0.5, 1, 1e-5, 4.394834372263652, 4.395180133955964),
        (1e-4, 0.5, 10**5, 1e-9, 6.118708075846406, 6.133012565082617),
        (0.05, 4.0, 10**5, 1e-2, 18.623661401859394, 18.62463393110196),
        (0.1, 1.5, 1, 1e-7, 1.3984918622524247, 1.4099260737645771),
    ],
)
def test_poisson_epsilon_is_at_its_infimum(q, z, times, delta, low, high):
    got, method = rdp_events.epsilon(poisson(q, z, times), delta)
    assert low * (1 - 1e-9) <= got <= min(high, low * (1 + 1e-4)) and method == "rdp"


def check_poisson(p, v):
    orders = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]
    curve = p["T"] * rdp.poisson(np.array(orders), p["q"], p["sigma"])
    high = v["eps_rdp_exact_same_orders"]
    close(rdp.epsilon(np.array(orders), curve, p["delta"]), high, 1e-8)
    got = eps(poisson(p["q"], p["sigma"], p["T"]), p["delta"])
    assert v["eps_bracket"][0] <= got <= high * (1 + 1e-9)
    if "rdp_orders" in v:
        reach = np.array(v["rdp_orders"]) <= 100
        exact = rdp.poisson(np.array(v["rdp_orders"], float), p["q"], p["sigma"])
        close(exact[reach], np.array(v["rdp_per_step_exact"])[reach], 1e-10)


def check_gaussian(p, v):
    if "eps_exact" in v:
        close(eps(plain(p["sigma"], p["T"]), p["delta"]), v["eps_exact"], 1e-8)


def check_fixed_size(p, v):
    population = 60000 if p["q"] == 1 / 60 else 1000
    got = eps(fixed(p["q"], p["z"], p["T"], population), p["delta"])
    assert v["eps_bracket"][0] * (1 - 1e-6) <= got <= v["eps_rdp_dpa"]


def check_two_kinds(p, v):
    if len(p.get("terms_q_sigma_count", ())) == 2:
        event = events.compose(*(poisson(*term) for term in p["terms_q_sigma_count"]))
        low, high = v["eps_bracket"][0], v["eps_rdp_exact_same_orders"]
        assert low * (1 - 1e-6) <= eps(event, p["delta"]) <= high * (1 + 1e-9)


def check_conversion(p, v):
    orders, curve = np.array(p["orders"]), np.array(p["rdp"])
    close(rdp.epsilon(orders, curve, p["delta"]), v["eps_dpa"], 1e-8)
    found = rdp_events.deltas_of_curve(orders, curve, np.array([p["epsilon"]]))[0]
    close(found, v["delta_dpa"], 2e-5)


@pytest.mark.parametrize(
    "kind, check",
    [
        ("conversion_rdp", check_conversion),
        ("poisson_gaussian", check_poisson),
        ("gaussian", check_gaussian),
        ("wor_gaussian_replace_one", check_fixed_size),
        ("heterogeneous", check_two_kinds),
    ],
)
def test_golden_file(kind, check):
    path = DATA / "golden_accounting.json"
    if not path.exists():
        pytest.skip(f"NOT TESTED against {path}: set JFL_DATA_DIR to its folder")
    entries = [e for e in json.loads(path.read_text())["entries"] if e["kind"] == kind]
    assert entries
    for entry in entries:
        check(entry["params"], entry["values"])


@pytest.mark.parametrize("q, z", [(0.01, 1.0), (0.1, 0.7), (0.5, 5.0)])
def test_agrees_with_dp_accounting(q, z):
    dpa = pytest.importorskip("dp_accounting")
    orders = np.array([2.0, 3, 5, 8, 16, 32])
    relation = dpa.NeighboringRelation

    def theirs(event, neighbours):
        return dpa.rdp.RdpAccountant(orders, neighbours).compose(event, 100)._rdp / 100

    event = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
    poisson = rdp.poisson(orders, q, z)
    close(poisson, theirs(event, relation.ADD_OR_REMOVE_ONE), 1e-9)
    event = dpa.SampledWithoutReplacementDpEvent(1000, int(1000 * q), dpa.GaussianDpEvent(z))
    fixed_size = rdp.without_replacement(orders, q, z)
    assert (fixed_size <= theirs(event, relation.REPLACE_ONE) * (1 + 1e-9)).all()
    # the one-sided pair of a Poisson sample is reached under replace_one too
    assert (fixed_size >= poisson * (1 - 1e-9)).all()


# --- properties of curves and epsilons


def test_all_in_the_sample_is_no_sampling():
    orders = np.array([1.01, 1.5, 2, 10, 300])
    full = rdp.gaussian(orders, 1.3)
    for curve in (rdp.poisson, rdp.without_replacement):
        assert (curve(orders, 1.0, 1.3) == full).all()
        close(curve(orders, 1 - 1e-9, 1.3), full, 1e-8)
    assert (rdp.participation(orders, 1.0, full) == full).all()
    assert eps(poisson(1.0, 1.3, 7)) == eps(fixed(1.0, 1.3, 7)) == eps(plain(1.3, 7))


def test_participation_at_order_two():
    close(rdp.participation(2.0, 0.25, 0.3), math.log(0.75 + 0.25 * math.exp(0.3)), 1e-14)
    close(rdp.participation(3.0, 0.25, 400.0), 400 + math.log(0.25) / 2, 1e-14)
    close(rdp.participation(2.0, 1e-6, 1e-9), 1e-15, 1e-8)


@pytest.mark.by_default("1-0.1", "1-1000.0", "1000000-0.1", "1000000-1000.0")
@pytest.mark.parametrize("z", [0.1, 1.0, 1000.0])
@pytest.mark.parametrize("times", [1, 10**6])
def test_extremes_are_finite_and_between_bounds(z, times):
    for q in (1e-6, 1e-2, 1.0):
        for delta in (1e-12, 1e-3):
            # one release at least: its epsilon is exactly log(1 + q (e^e - 1)) at delta / q
            one = eps(events.gaussian(z), delta / q) if delta < q else 0.0
            low = min(one, math.log1p(q * math.expm1(min(one, 600))))
            for build in (poisson, fixed):
                got = eps(build(q, z, times), delta)
                assert low * (1 - 1e-9) <= got <= eps(plain(z, times), delta) < math.inf


def test_an_order_out_of_reach_is_not_sampled():
    for curve in (rdp.poisson, rdp.without_replacement):
        assert float(curve(1e6, 0.01, 0.5)) == float(rdp.gaussian(1e6, 0.5))


def test_small_divergence_proves_zero():
    assert eps(poisson(1e-4, 4.0, 100), 1e-3) == 0.0
    two, one = np.array([2.0]), np.array([1.0])
    assert float(rdp.epsilon(two, 0.99e-10 * one, 1e-5)) == 0.0
    assert float(rdp.epsilon(two, 1.1e-10 * one, 1e-5)) > 0.0
    close(rdp.epsilon(two, one, 0.1), 1 + math.log(0.5) - math.log(0.2), 1e-12)


@pytest.mark.by_default("0.05")
@pytest.mark.parametrize("z", [0.05, 300.0])
def test_curves_on_the_host_are_those_of_the_programs(z):
    """Up to rounding: logarithms of moments near 0 keep nine digits."""
    orders = rdp_events.ORDERS
    one = rdp.gaussian(orders, z)
    sampled = [
        (curve, rate, z) for curve in ("poisson", "without_replacement") for rate in (1e-6, 1)
    ]
    repeated = [
        ("with_replacement", np.array(law), z) for law in ([0.6, 0.3, 0.1], [0.0, 1.0, 0.0])
    ]
    others = [("participation", 1e-3, one), ("convert", one, 1e-300)]
    for name, *arguments in (*sampled, *repeated, *others):
        host = getattr(rdp, name)(orders, *arguments)
        with jax.enable_x64(True):
            program = jax.jit(getattr(rdp, name))(orders, *arguments)
        assert isinstance(host, np.ndarray) and isinstance(program, jax.Array)
        assert host.dtype == program.dtype == np.float64
        np.testing.assert_allclose(host, program, rtol=1e-8, atol=1e-15)


def test_the_exact_gaussian_is_the_smallest_that_fits():
    """What is returned was tested, and none that fits lies below."""
    r = np.random.default_rng(0)
    mu, delta = np.exp(r.uniform(-20, 8, 2000)), np.exp(r.uniform(-300, -0.01, 2000))
    found = rdp.gaussian_epsilon(mu, delta)
    held = found > 0
    assert 0.5 < held.mean() < 1
    assert (rdp.gaussian_delta(found, mu) <= delta * (1 + 1e-15))[held].all()
    assert (rdp.gaussian_delta(found * (1 - 1e-11), mu) > delta * (1 - 1e-15))[held].all()


# --- draws with replacement


def test_one_draw_is_a_sample_of_one():
    orders = np.array([1.1, 1.5, 2, 4, 16])
    want = rdp.without_replacement(orders, 0.1, 2.0)
    close(rdp.with_replacement(orders, [0.9, 0.1], 2.0), want, 1e-12)
    close(eps(with_replacement(1, 10, 2.0, 50)), eps(fixed(0.1, 2.0, 50, 10)), 1e-3)
    close(rdp.with_replacement(orders, [0.0, 0.0, 1.0], 2.0), rdp.gaussian(orders, 1.0), 1e-12)
    close(eps(with_replacement(3, 1, 2.0, 7)), eps(plain(2.0 / 3, 7)), 1e-14)


@pytest.mark.parametrize("draws, population, z", [(5, 10, 2.0), (4, 4, 1.5)])
def test_repeated_draws_cost_at_least_what_a_dataset_attains(draws, population, z):
    """All other rows at one end and the changed row at the other: sums are k sensitivities apart, k
    ~ binomial."""
    x, k = np.linspace(-12 * z, 6 * draws + 14 * z, 40001), np.arange(draws + 1)
    law, orders = stats.binom.pmf(k, draws, 1 / population), np.array([1.1, 1.5, 2.0, 3.0, 6.0])
    base = stats.norm.logpdf(x, scale=z)
    ratio = np.log(np.exp((2 * x[:, None] * k - k**2) / (2 * z**2)) @ law)
    for sign in (1, -1):  # P from Q, and Q from P
        terms = [np.exp(base + (ratio if sign < 0 else 0) + sign * a * ratio) for a in orders]
        attained = np.log([np.trapezoid(t, x) for t in terms]) / (orders - 1)
        assert (rdp.with_replacement(orders, law, z) >= attained * (1 - 1e-6)).all()


# --- which event a plan is charged with

UNEVEN = np.full(CLIENTS, 100)
UNEVEN[3], UNEVEN[4] = 40, 0  # a client without rows has nothing to lose
STEPS = fixed(0.1, 1.0, 3, 100)  # of one participation
OFTEN = sampling.with_replacement(CLIENTS, 5, independent=True)
SEVERAL = sampling.with_replacement(CLIENTS, 5)
POISSON = sampling.poisson(CLIENTS, 0.25)
MORE = (records.Release(NOISY(2.0), batches.full(), 1),)
RELEASED, UPLOAD = make(release=NOISY()), make(upload=NOISY(2.0))
WEIGHTED = make(release=NOISY(), weights=jnp.arange(1.0, CLIENTS + 1))
JOINING = make(release=NOISY(adjacency="add_remove"), sampler=POISSON, stateful=True)


def drawn(rate):
    """A rate as float32 numbers draw it: in steps of 2^-23, rounded up."""
    return math.ceil(float(np.float32(rate)) * 2**23) / 2**23


def rows(batch=batches.without_replacement(10)):
    return make(NOISY(), batch, sizes=UNEVEN)


@pytest.mark.parametrize(
    "plan, options, event",
    [
        # rows of the smallest client, to the server
        (rows(), {}, fixed(0.25, 1.0, 150, 40)),
        (make(NOISY(std=0.5)), {}, fixed(0.1, 0.5, 150, 100)),
        (rows(batches.full()), {}, plain(1.0, 150)),
        (rows(batches.without_replacement(50, short="all")), {}, plain(1.0, 150)),
        (rows(batches.epochs(10)), {}, plain(1.0, 50)),  # of 4 batches one has the row
        (rows(batches.epochs(20)), {}, plain(1.0, 100)),
        (rows(batches.with_replacement(10)), {}, with_replacement(10, 40, 1.0, 150)),
        (poisson_plan(), {}, poisson(drawn(0.08), 1.0, 150)),
        (poisson_plan(batch=batches.poisson(rate=0.5, capacity=100)), {}, poisson(0.5, 1.0, 150)),
        (make(NOISY(), more=MORE), {}, events.repeat(events.compose(STEPS, plain(2.0)), 50)),
        (make(NOISY(), sampler=OFTEN), {}, events.repeat(STEPS, 250)),
        # rows of clients that may be absent, to a third party
        (make(NOISY()), THIRD, hidden(0.25, STEPS, 50)),
        (make(NOISY(), sampler=sampling.full(CLIENTS)), THIRD, events.repeat(STEPS, 50)),
        (make(NOISY(), sampler=POISSON), THIRD, hidden(0.25, STEPS, 50)),
        (make(NOISY(), sampler=SEVERAL), THIRD, hidden(1 - 0.95**5, STEPS, 50)),
        (make(NOISY(), sampler=OFTEN), THIRD, hidden(0.05, STEPS, 250)),
        # clients, to a third party
        (RELEASED, CLIENT | THIRD, fixed(0.25, 1.0, 50, CLIENTS)),
        (RELEASED, EXAMPLE | THIRD, fixed(0.25, 1.0, 50, CLIENTS)),
        (make(release=NOISY(2.0), sampler=SEVERAL), CLIENT, with_replacement(5, 20, 2.0, 50)),
        # the state of clients shows who came with them: only absence protects
        (make(release=NOISY(), stateful=True), CLIENT, hidden(0.25, plain(1.0), 50)),
        (JOINING, CLIENT | {"adjacency": "add_remove"}, poisson(0.25, 1.0, 50)),
        # a changed example moves a present client's upload by up to twice the bound
        (JOINING, EXAMPLE | THIRD, hidden(0.25, plain(0.5), 50)),
        (UPLOAD, CLIENT | {"view": "server"}, plain(2.0, 50)),
        (UPLOAD, EXAMPLE, plain(2.0, 50)),
        (UPLOAD, CLIENT | THIRD, hidden(0.25, plain(2.0), 50)),
        # of noise at two places the better one counts
        (make(upload=NOISY(9.0), release=NOISY()), CLIENT | THIRD, hidden(0.25, plain(9.0), 50)),
        (make(upload=NOISY(), release=NOISY(9.0)), CLIENT | THIRD, fixed(0.25, 9.0, 50, CLIENTS)),
    ],
)
def test_a_plan_is_charged_with_its_event(plan, options, event, renyi, few_orders):
    found = guarantees.guarantee(plan, 50, **options)
    close(found.epsilon, eps(event), 1e-9)
    # a client with several batch samplers is traced, and the one of these plans computes nothing
    is_traced = len(plan.algorithm.releases) > 1
    assert found.status == ("conditional" if is_traced else "proved") and found.delta == DELTA
    assert all(getattr(found, name) == value for name, value in options.items())


def test_drawing_probabilities_of_clients(renyi, few_orders):
    """The client that is drawn most often counts."""
    sampler = sampling.with_replacement(CLIENTS, 5, np.arange(1, CLIENTS + 1))
    third = lambda **at: guarantees.guarantee(make(sampler=sampler, **at), 50, **THIRD).epsilon
    share = 20 / 210
    close(third(rows=NOISY()), eps(hidden(1 - (1 - share) ** 5, STEPS, 50)), 1e-5)
    close(third(release=NOISY(2.0)), eps(with_replacement(5, 1 / share, 2.0, 50)), 1e-5)


def test_the_worst_client_has_few_rows_or_comes_often(renyi, few_orders):
    sizes, weights = np.arange(50, 50 + CLIENTS), np.arange(1, CLIENTS + 1)[::-1] ** 2
    plan = make(NOISY(), sampler=sampling.with_replacement(CLIENTS, 5, weights), sizes=sizes)
    shares = 1 - (1 - weights / weights.sum()) ** 5
    each = [eps(hidden(s, fixed(10 / n, 1, 3, int(n)), 50)) for n, s in zip(sizes, shares)]
    close(guarantees.guarantee(plan, 50, **THIRD).epsilon, max(each), 1e-5)
    # of a hundred that may be the worst, sixteen pairs leave no one out
    rows, shares = np.arange(100), np.linspace(0.1, 0.9, 100)
    pairs = [(rows[a], shares[b]) for a, b in worst_columns(rows, shares, [], rows)]
    assert len(pairs) == 16
    assert all(any(m <= n and t >= s for m, t in pairs) for n, s in zip(rows, shares))


def test_weights(renyi, few_orders):
    third = lambda noise, weights=None: guarantees.guarantee(
        make(release=noise, weights=weights), 3, **THIRD
    )
    weights = jnp.ones(CLIENTS).at[0].set(2.0)
    assert third(NOISY(), weights).epsilon == third(NOISY()).epsilon
    assert third(NOISY(), records.Fn(jnp.ones)).epsilon == third(NOISY()).epsilon
    # a std of 1 over 2 * 0.5 * the weight of 2
    assert third(NOISY(std=1.0), weights).epsilon == third(NOISY(0.5)).epsilon
    rising = records.Fn(lambda round_: jnp.ones(CLIENTS).at[0].set(1.0 + round_))
    levels = events.compose(*(fixed(0.25, 1 / weight, 1, CLIENTS) for weight in (1, 2, 3)))
    close(third(NOISY(std=1.0), rising).epsilon, eps(levels), 1e-6)


def test_overflow_is_paid_from_delta(renyi):
    """How delta is split is solved for the Renyi bound: only there the equation is exact."""
    tight = poisson_plan(batch=batches.poisson(8.0, capacity=30), sizes=np.full(CLIENTS, 200))
    g = guarantees.guarantee(tight, 50)
    beta = 150 * stats.binom.sf(30, 200, 0.04)
    left = DELTA - beta * (1 + math.exp(g.epsilon))
    assert 1e-3 < 1 - left / DELTA < 0.5
    event = poisson(drawn(0.04), 1.0, 150)
    assert eps(event) < eps(event, left) <= g.epsilon <= eps(event, left) * (1 + 1e-6)
    assert guarantees.guarantees(poisson_plan(batch=batches.poisson(8.0, capacity=12)), 50) == ()


def test_a_plan_without_noise_says_so():
    bare = guarantees.guarantee(make(), 50, unit="client", **THIRD)
    assert bare.epsilon == math.inf and bare.method == bare.status == "none"
    assert bare.caveats == (guarantees.BARE,) and bare.unit == "client"
    assert guarantees.epsilons(make(), [0, 5]).tolist() == [0.0, math.inf]
    # as if one of several releases had none
    bare = make(NOISY(), more=(records.Release(None, batches.full(), 1),))
    assert guarantees.guarantee(bare, 50).method == "none"


@pytest.mark.parametrize(
    "plan, options, want",
    [
        (make(NOISY(), paired=True), {}, {caveats.EVERY_ROUND, caveats.PAIRED}),
        (make(NOISY(), sampler=sampling.full(CLIENTS)), {}, set()),
        (make(NOISY()), THIRD, {caveats.HONEST}),
        (poisson_plan(), {}, {caveats.EVERY_ROUND, entries.PUBLIC}),
        (RELEASED, EXAMPLE | THIRD, {entries.IMPLIED, caveats.HONEST}),
        (WEIGHTED, {}, {entries.PUBLIC, caveats.HONEST}),
    ],
)
def test_caveats_travel(plan, options, want, renyi, few_orders):
    found = set(guarantees.guarantee(plan, 50, **options).caveats)
    about = (entries.PUBLIC, entries.IMPLIED, caveats.EVERY_ROUND, caveats.HONEST, caveats.PAIRED)
    assert {entries.SIMULATION, entries.STOPS} <= found and want == found.intersection(about)


# --- participation, segments, other unknowns


def test_participation_of_clients(renyi, few_orders):
    plan = make(NOISY(), sizes=UNEVEN)
    planned = guarantees.guarantee(plan, 50)
    capped = guarantees.guarantee(plan, 50, cap=5)
    assert capped.status == "conditional" and any(c.code == "cap" for c in capped.caveats)
    assert capped.epsilon == best(fixed(0.25, 1.0, 15, 40))
    assert caveats.EVERY_ROUND not in capped.caveats
    likely = guarantees.guarantee(plan, 50, quantile=1e-6)
    times = int(stats.binom.isf(1e-6, 50, 0.25))
    assert stats.binom.sf(times, 50, 0.25) <= 1e-6
    assert likely.delta == DELTA and likely.status == "proved"
    assert likely.epsilon == best(fixed(0.25, 1.0, 3 * times, 40), DELTA - 1e-6) < planned.epsilon
    seen = np.arange(CLIENTS)
    told = guarantees.guarantee(plan, 50, realised=seen)
    each = guarantees.epsilons_per_client(plan, 50, realised=seen)
    assert told.status == "descriptive" and told.epsilon == each.max()
    assert each[0] == 0 and each[4] == 0
    # Clients are computed together, which may change the last digit.
    assert each[7] == pytest.approx(best(fixed(0.1, 1.0, 21, 100)), rel=1e-12)
    assert guarantees.guarantee(plan, 50, realised=np.zeros(CLIENTS, int)).epsilon == 0


def test_epsilon_of_each_client(renyi, few_orders):
    plan = make(NOISY(), sizes=UNEVEN)
    for view in ("server", "third_party"):
        each = guarantees.epsilons_per_client(plan, 50, view=view)
        assert each[4] == 0 and each[3] == each.max()
        close(each.max(), guarantees.guarantee(plan, 50, view=view).epsilon, 1e-12)
        assert (each[[0, 1, 19]] == each[0]).all() and each[0] < each[3]
    assert guarantees.epsilons_per_client(make(), 5).tolist() == [math.inf] * CLIENTS
    overflow = poisson_plan(batch=batches.poisson(8.0, capacity=34), sizes=np.full(CLIENTS, 200))
    worst = guarantees.guarantee(overflow, 20).epsilon
    close(guarantees.epsilons_per_client(overflow, 20)[0], worst, 1e-9)


CORRELATED = chain(clip_l2(0.5), total(), jfl.correlated(4.0, jfl.strategies.square_root(12)))
FIXED = dict(adjacency="replace_one")
LAPLACE = chain(jfl.clip_l1(0.5), total(), jfl.laplace(4.0), **FIXED)
RISING = chain(clip_l2(0.5), total(), gaussian(lambda round_: 4.0 + round_), **FIXED)
GROUPS = sampling.min_separation(CLIENTS, 2, 3)
JOIN, DRAWN = NOISY(adjacency="add_remove"), batches.poisson(8.0)
TRUNCATED = batches.truncated_poisson(8.0, capacity=12)
# a plan for each kind of entry that the server's view has
KINDS = {
    "poisson": make(JOIN, DRAWN, sampler=sampling.full(CLIENTS)),
    "truncated poisson": make(NOISY(), TRUNCATED, sampler=sampling.full(CLIENTS)),
    "with replacement": make(NOISY(4.0), batches.with_replacement(10)),
    "several releases": make(NOISY(8.0), more=MORE),
    "laplace rows": make(LAPLACE, batches.full(), count=1),
    "noise by the round": make(RISING, batches.full(), count=1),
    "noise by the client": make(NOISY(jnp.linspace(1.0, 3.0, CLIENTS)), batches.full(), count=1),
    "rows that differ": make(JOIN, DRAWN, sizes=30 + np.arange(CLIENTS)),
    "several turns": make(NOISY(8.0), sampler=OFTEN),
    "groups": make(NOISY(), sampler=GROUPS),
    "upload": make(upload=NOISY(4.0)),
    "correlated upload": make(upload=CORRELATED),
    "correlated upload in groups": make(upload=CORRELATED, sampler=GROUPS),
    "integers": make(upload=jfl.distributed(8.0, 0.5, 5, law="skellam", like=np.zeros(4)).upload),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cap_at_what_is_planned_changes_nothing(kind, renyi, few_orders):
    """And fewer participations never cost more."""
    plan, rounds = KINDS[kind], 9
    turns = facts.attendance(plan.sampler).turns
    planned = guarantees.guarantee(plan, rounds, view="server").epsilon
    caps = sorted({1, 3, rounds, rounds * turns})
    found = [guarantees.guarantee(plan, rounds, view="server", cap=k).epsilon for k in caps]
    assert 0 < found[0] and np.all(np.diff(found) >= -1e-12), found
    close(found[-1], planned, 1e-9)
    assert found[0] < 0.8 * planned


def test_segments_add_up(renyi, few_orders):
    first, second = make(NOISY()), make(NOISY(2.0), batches.full())
    got = guarantees.guarantee([(first, 10), (second, 20)])
    close(got.epsilon, eps(events.compose(fixed(0.1, 1.0, 30, 100), plain(2.0, 60))), 1e-12)
    whole = guarantees.guarantee(first, 30).epsilon
    close(guarantees.guarantee([(first, 30)]).epsilon, whole, 1e-9)
    assert guarantees.guarantee([(first, 10), (make(), 1)]).epsilon == math.inf
    tight = poisson_plan(batch=batches.poisson(8.0, capacity=30), sizes=np.full(CLIENTS, 200))
    whole = guarantees.guarantee(tight, 50).epsilon
    close(guarantees.guarantee([(tight, 20), (tight, 30)]).epsilon, whole, 1e-6)
    assert guarantees.guarantee([(first, 10), (second, 20)], **THIRD).epsilon < got.epsilon


def test_many_rounds_at_once(renyi):
    """`epsilons` is the curve of Renyi bounds."""
    rounds = np.array([0, 1, 5, 50])
    for plan, options in (
        (make(NOISY()), THIRD),
        (make(upload=NOISY()), {"unit": "client"}),
        (poisson_plan(batch=batches.poisson(8.0, capacity=34), sizes=np.full(CLIENTS, 200)), {}),
    ):
        got = guarantees.epsilons(plan, rounds, **options)
        assert got.dtype == np.float64 and got[0] == 0 and (np.diff(got) > 0).all()
        each = [guarantees.guarantee(plan, int(r), **options).epsilon for r in rounds[1:]]
        close(got[1:], each, 1e-5)


# --- a small cohort with the noise of a large one

ADAPTIVE = chain(jfl.clip_adaptive(0.5, 5), total(), gaussian(1.0))


@pytest.mark.parametrize(
    "sampler, sizes, event",
    [
        (POISSON, (1000, 100_000), lambda z: poisson(0.01, z, 200)),
        (COHORT, (1000, 100_000), lambda z: fixed(0.01, z, 200, 100_000)),
        (sampling.full(CLIENTS), (1000, 1000), lambda z: plain(z, 200)),
    ],
)
def test_a_deployment_is_accounted_with_its_own_numbers(sampler, sizes, event, renyi):
    noise, (cohort, clients) = NOISY(0.01, sampling.adjacency(sampler)), sizes
    plan = make(release=noise, sampler=sampler)
    found = jfl.at_scale(plan, 200, DELTA, cohort=cohort, clients=clients)
    close(found.epsilon, eps(event(0.01 * cohort / float(sampler.expected))), 1e-6)
    assert found.status == "conditional" and found.unit == "client"
    assert f"Applies to a deployment with {cohort:,} of {clients:,}" in found.caveats[0]
    own = float(found.caveats[0].split("epsilon >= ")[1].rstrip("."))
    assert own > 1000 * found.epsilon


@pytest.mark.parametrize(
    "plan, cohort, clients, words",
    [
        (make(release=NOISY(), sampler=POISSON), 4, 100, "<= cohort <="),
        (make(release=NOISY(), sampler=POISSON), 40, 10, "<= cohort <="),
        (make(release=NOISY(), sampler=sampling.full(CLIENTS)), 40, 100, "sampling.full"),
        (make(release=NOISY(), sampler=GROUPS), 40, 100, "sampling.min_separation"),
        (make(), 40, 40, "client"),
        (make(release=ADAPTIVE), 10, 20, "clip_adaptive"),
        (make(release=NOISY(), stateful=True), 10, 20, "stateless clients"),
    ],
)
def test_what_does_not_carry_over(plan, cohort, clients, words):
    with pytest.raises(ValueError, match=words):
        jfl.at_scale(plan, 10, DELTA, cohort=cohort, clients=clients)


# --- inverses


def test_solved_noise_is_safe_and_tight():
    z = tightest.solve_noise(lambda z: poisson(0.02, z, 500), 1.0, DELTA)
    assert z == float(np.float32(z))
    assert 1.0 * (1 - 1e-3) <= best(poisson(0.02, z, 500)) <= 1.0
    assert best(poisson(0.02, z * (1 - 1e-3), 500)) > 1.0


@pytest.mark.slow
def test_rounds_for_an_epsilon():
    """More than quick bounds allow, and no more than the smallest does."""
    event = events.poisson(0.01, events.gaussian(1.0))
    times = tightest.solve_rounds(event, 2.0, DELTA)
    assert best(events.repeat(event, times)) <= 2.0 < best(events.repeat(event, times + 1))
    assert eps(events.repeat(event, times)) > 2.0


def test_other_unknowns(renyi, few_orders):
    assert tightest.solve_rounds(events.gaussian(0.1), 1.0, DELTA) == 0
    rate = tightest.solve_rate(lambda q: poisson(q, 1.0, 500), 2.0, DELTA)
    assert rate == np.float32(rate) and 2.0 * (1 - 1e-3) <= best(poisson(rate, 1.0, 500)) <= 2.0
    assert tightest.solve_rate(lambda q: poisson(q, 100.0, 5), 2.0, DELTA) == 1.0
    plan = make(NOISY(5.0))
    most = jfl.calibrate(plan, epsilon=2.0, over="rounds")
    at = lambda rounds: guarantees.guarantee(plan, rounds).epsilon
    assert at(most) <= 2.0 < at(most + 1)
    several = jfl.calibrate(plan, epsilon=np.array([1.0, 4.0]), rounds=20)
    assert several.shape == (2,) and several[0] > several[1]
    assert several[0] == jfl.calibrate(plan, epsilon=1.0, rounds=20)


@pytest.mark.parametrize(
    "plan_of, options",
    [
        (lambda z: make(NOISY(z)), THIRD),
        (lambda z: make(release=NOISY(z)), THIRD),
        (lambda z: make(upload=NOISY(z)), {"unit": "client"}),
    ],
)
def test_calibrated_plans_keep_their_promise(plan_of, options, renyi, few_orders):
    z = jfl.calibrate(plan_of(1.0), epsilon=1.0, rounds=20, **options)
    assert 1.0 - 1e-3 <= guarantees.guarantee(plan_of(z), 20, **options).epsilon <= 1.0


# --- refusals

ONE = events.gaussian(1)
FULL_COHORT = sampling.poisson(CLIENTS, 0.25, capacity=8)
ADDED = NOISY(adjacency="add_remove")
OTHER = (records.Release(ADDED, batches.poisson(8.0), 1),)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: events.gaussian(0), "noise_multiplier > 0"),
        (lambda: events.gaussian(float("nan")), "noise_multiplier > 0"),
        (lambda: events.poisson(1.5, ONE), r"rate in \(0, 1\]"),
        (lambda: events.repeat(ONE, 2.5), "an integer times"),
        (lambda: eps(events.compose(poisson(0.5, 1), fixed(0.5, 1))), "one adjacency"),
        (lambda: eps(events.compose(poisson(0.5, 1), with_replacement(3, 10, 1))), "one adjacency"),
        (lambda: eps(events.poisson(0.5, poisson(0.5, 1))), "sample of a sample"),
        (lambda: eps(ONE, 0.0), r"delta in \(0, 1\)"),
        (lambda: tightest.solve_noise(events.gaussian, float("nan"), DELTA), "epsilon > 0"),
        (lambda: tightest.solve_noise(lambda z: plain(z, 10**9), 1e-4, 1e-12), "can reach"),
        (lambda: jfl.calibrate(make(), epsilon=1.0, rounds=5), "noise stage"),
    ],
)
def test_refusals_of_events_and_inverses(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    "plan, options, match",
    [
        (make(ADDED, batches.with_replacement(10)), {}, "matrix.md.*with_replacement.*add_remove"),
        (make(ADDED), {}, "docs/matrix.md.*without_replacement.*add_remove"),
        (make(NOISY(), sizes=np.full(CLIENTS, 7)), {}, "at least batch=10 rows"),
        (make(NOISY(), more=OTHER), {}, "one adjacency for all releases"),
        (make(release=NOISY(), sampler=SEVERAL, stateful=True), THIRD, "stateless clients"),
        (poisson_plan(batch=batches.poisson(8.0, capacity=12)), {}, "Raise the capacity"),
        (make(release=ADDED, sampler=FULL_COHORT), THIRD, "Raise the capacity"),
        (RELEASED, {"view": "server"}, "sees every upload before.*view='third_party'"),
        (make(NOISY()), CLIENT, "Choices: unit='example', view='server'"),
        (make(NOISY(), upload=NOISY()), {}, "fits 2 of them for view='server'"),
        (make(NOISY()), dict(cap=3, quantile=1e-6), "one of cap"),
        (make(NOISY()), dict(quantile=1e-5), "quantile < delta"),
        (make(NOISY()), dict(realised=np.full(CLIENTS, 51)), "whole numbers in 0..50"),
        (make(NOISY()), dict(cap=3, view="third_party"), "view='server'"),
    ],
)
def test_refusals_of_plans(plan, options, match):
    with pytest.raises(ValueError, match=match):
        guarantees.guarantee(plan, **{"rounds": 50} | options)
