"""Noise in shares: real numbers and integers, what a secure aggregation shows of them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from helpers.problems import flat, make_federation
from scipy import special, stats

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.privacy.accountants import tightest
from jfl.privacy.accountants.events import gaussian, renyi_bound, repeat
from jfl.privacy.mechanisms import distributed as shares
from jfl.privacy.mechanisms.distributed import encoding_of

C, ALARM = 8, 1e-6
KEY = jax.random.key(3)
LAWS = ["skellam", "discrete_gaussian"]


def encoding(law="skellam", z=1.0, clip=0.5, cohort=4, size=23, bits=12):
    pair = jfl.distributed(z, clip, cohort, law=law, like=np.zeros(size), bits=bits)
    return encoding_of(pair.upload)


def epsilon(event, rounds):
    return tightest.epsilon(repeat(event, rounds), 1e-5)[0]


# --- one client's integers


def encoded_by_hand(code, key, x):
    """A loop with the draws of `Encoding.encode`: blocks, rounding, noise, modulo."""
    x = np.asarray(x, np.float64)
    x = x * min(1.0, code.clip_norm / np.linalg.norm(x))
    bits = np.asarray(jax.random.bits(jax.random.key(0), x.shape, jnp.uint32))
    x = x * np.where(bits >> 31, -1.0, 1.0)
    blocks = np.split(x, np.cumsum((128, 16, 4, 2)))  # 128: several factors
    turned = [scipy.linalg.hadamard(len(b)) / len(b) ** 0.5 @ b for b in blocks]
    x = np.concatenate(turned) * code.scale
    rounding, noise = jax.random.split(key)
    for number in range(shares.NUM_ROUNDING_TRIES):
        draw = jax.random.uniform(jax.random.fold_in(rounding, number), x.shape)
        whole = np.floor(x) + (np.asarray(draw) < x - np.floor(x))
        if np.linalg.norm(whole) <= code.longest:
            kept = whole
    words = np.asarray(jax.random.bits(noise, (2, len(x)), jnp.uint32)).astype(np.uint64)
    word = (words[0] << np.uint64(31)) | (words[1] >> np.uint64(1))
    known = shares.table(code.law, code.scale * code.share)
    high, low = (t.astype(np.uint64) for t in (known.high, known.low))
    size = (((high << np.uint64(31)) | low)[None] > word[:, None]).sum(1)
    noisy = kept + size * np.where(words[1] & np.uint64(1), -1, 1)
    turn = 2**code.bits
    return (noisy + turn // 2) % turn - turn // 2


def test_an_upload_equals_a_loop():
    code = encoding("discrete_gaussian", size=151)
    encode = jax.jit(code.encode)
    for seed in range(5):
        x = jax.random.normal(jax.random.key(seed), (151,))
        key, leaves = jax.random.fold_in(KEY, seed), {"a": x[:20].reshape(4, 5), "b": x[20:]}
        found = encode(key, leaves)
        by_hand = encoded_by_hand(code, key, x)
        assert (flat(found) == by_hand).mean() > 0.95  # float32 may round one the other way
        assert np.abs(flat(found) - by_hand).max() <= 1


@functools.partial(jax.jit, static_argnums=0)
def rounded(code, keys, x):
    """Clipped rows, rotated and scaled: exact, and rounded with each of the keys."""
    clipped = x * jnp.minimum(1.0, code.clip_norm / jnp.linalg.norm(x, axis=-1, keepdims=True))
    exact = jax.vmap(lambda row: shares.rotate(row, shares._signs_key()) * code.scale)(clipped)
    return exact, jax.vmap(lambda k, v: shares._round_randomly(v, code.longest, k))(keys, exact)


def test_rounding_is_the_same_in_64_bits():
    x = jnp.linspace(-3, 3, 40)
    here = shares._round_randomly(x, 100.0, KEY)
    with jax.enable_x64(True):
        assert np.array_equal(here, shares._round_randomly(x, 100.0, KEY))


def test_no_rounded_upload_is_longer_than_the_bound():
    code = encoding(clip=0.5, z=3.0, bits=8)  # few whole numbers: rounding counts
    x = jax.random.normal(KEY, (2000, 23)) * 10
    _, whole = rounded(code, jax.random.split(KEY, 2000), x)
    norms = np.linalg.norm(np.asarray(whole), axis=1)
    assert norms.max() <= code.longest and norms.max() > code.scale * code.clip_norm
    np.testing.assert_array_equal(whole, np.round(whole))


def test_rounding_is_right_on_average():
    x = jnp.tile(jax.random.normal(KEY, (23,)), (20_000, 1))
    exact, whole = rounded(encoding(bits=10), jax.random.split(KEY, 20_000), x)
    error = (np.asarray(whole).mean(0) - exact[0]) / (0.5 / 20_000**0.5)
    assert np.abs(error).max() < 6  # of 23 standard normals at most: a false alarm in 1e7


def law_of(law, std, reach):
    k = np.arange(-reach, reach + 1)
    mass = special.ive(np.abs(k), std**2) if law == "skellam" else np.exp(-(k**2) / (2 * std**2))
    return k, mass / mass.sum()


@pytest.mark.parametrize("law", LAWS)
def test_noise_has_its_distribution(law):
    """Chi-square, a false alarm in 1e6; noise of 5 % more must be told."""
    code = encoding(law, z=1.0, cohort=9, size=200, bits=8)
    std = code.scale * code.share
    keys = jax.random.split(KEY, 500)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: shares._draw_noise(code, k)))(keys)).ravel()

    def rejects(std):
        k, mass = law_of(law, std, 60)
        most = int(3 * std)
        expected = np.bincount(np.clip(k, -most, most) + most, mass) * len(drawn)
        counts = np.bincount(np.clip(drawn, -most, most).astype(int) + most)
        return stats.chisquare(counts, expected).pvalue < ALARM

    assert 1 < std < 20 and not rejects(std)
    assert rejects(1.05 * std)


@pytest.mark.parametrize("std", [0.3, 300.0])
def test_every_search_ends_where_the_table_says(std):
    """Words at, just below and just above every tail and every bucket, and some between."""
    known = shares.table("discrete_gaussian", std)
    tails = (known.high.astype(np.uint64) << np.uint64(31)) | known.low
    rng = np.random.default_rng(0)
    powers = [n for b in range(62) for n in (2**b, 2**b - 1, 17 * 2**b // 16)]
    more = [*powers, *rng.integers(0, 2**63, 5000).tolist(), 0, 1, 2, 2**63 - 1]
    near = tails, tails - np.uint64(1), tails + np.uint64(1)
    words = np.concatenate([*near, np.array(more, np.uint64)]) & np.uint64(2**63 - 1)
    high = jnp.asarray((words >> np.uint64(31)).astype(np.uint32))
    low = jnp.asarray((words & np.uint64(2**31 - 1)).astype(np.uint32))
    size = known.start[np.asarray(shares._bucket(high, low << 1))]
    above = len(tails) - np.searchsorted(tails[::-1], words, "right")
    assert (size <= above).all() and (above - size < known.reach).all()


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_a_sum_is_undone(law):
    """Of 4 clients, with hardly any noise: the mean of what they clipped; and modulo what wraps."""
    code = encoding(law, z=1e-2, bits=16)
    x = jax.random.normal(KEY, (4, 23))
    sent = jax.vmap(code.encode)(jax.random.split(KEY, 4), x)
    found, _ = shares.decode(sent.sum(0), None, encoding=code)
    clipped = x * 0.5 / jnp.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(found, clipped.sum(0), atol=6 * 1e-2 * 0.5 + 3 / code.scale)
    turned, _ = shares.decode(sent.sum(0) + 2.0**16, None, encoding=code)
    np.testing.assert_array_equal(found, turned)
    assert np.abs(np.asarray(sent)).max() <= 2**15


# --- bounds


def renyi(p, q, order):
    keep = (p > 0) & (q > 0)
    terms = order * np.log(p[keep]) + (1 - order) * np.log(q[keep])
    return special.logsumexp(terms) / (order - 1)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("clients", [1, 5])
@pytest.mark.parametrize("std, move", [(0.8, 3), (6.0, 1), (6.0, 3)])
def test_bounds_hold_in_one_dimension(law, clients, std, move):
    """The exact divergence of sums of noise, moved by a whole number."""
    k, one = law_of(law, std, 300)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)[300:-300]

    class Known(shares.Encoding):
        scale = 1.0
        share = std
        longest = move

    code = Known(law, 1.0, 1.0, clients, 1, 12, 4.0, "zero_out")
    slopes, constants = code.bounds(clients)
    near = np.abs(k) < min(14 * std * clients**0.5, 280)  # beyond, a sum is rounding
    for order in (1.5, 2.0, 4.0, 10.0):
        exact = renyi(np.roll(total, move)[near], total[near], order)
        bound = (slopes * order + constants).min()
        assert exact <= bound * (1 + 1e-6)
        assert std < 5 or bound <= 2.5 * exact


@pytest.mark.parametrize("clients, std", [(2, 0.08), (2, 0.1), (3, 0.1), (5, 0.08)])
def test_bounds_hold_for_sums_of_narrow_noise(clients, std):
    """Sums of narrow discrete Gaussians are less private than a Gaussian of the same variance."""

    class Known(shares.Encoding):
        scale = 1.0
        share = std
        longest = 1.0

    _, one = law_of("discrete_gaussian", std, 2)
    total = one
    for _ in range(clients - 1):
        total = np.convolve(total, one)
    code = Known("discrete_gaussian", 1.0, 1.0, clients, 1, 12, 4.0, "zero_out")
    slopes, constants = code.bounds(clients)
    for order in (1.001, 1.5, 2.0, 4.0):
        exact = renyi(total[1:], total[:-1], order)
        assert exact <= (slopes * order + constants).min()


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("z, size, bits", [(1.0, 1, 4), (0.3, 1, 8), (0.2, 1, 12), (0.5, 100, 6)])
def test_the_charge_covers_what_the_table_leaves_out(law, z, size, bits):
    """Noise next to its largest value shows on which side of a move it is."""
    code = encoding(law, z=z, cohort=1, size=size, bits=bits)
    known = shares.table(law, code.scale * code.share)
    tails = np.ldexp(known.high.astype(float), -32) + np.ldexp(known.low.astype(float), -63)
    tails = tails[tails > 0]  # of |noise| >= 1, 2, ...
    moves = np.unique(np.geomspace(1, int(code.longest), 200).astype(int))
    apart = np.minimum(size, code.longest**2 // moves**2)  # coordinates that can move so far
    lost = apart * tails[::-1][moves - 1] / 2
    assert lost.max() <= code.lost_mass(1)
    assert z == 1.0 or code.lost_mass(1) <= 50 * lost.max()
    assert code.lost_mass(1, moves=2.0) > code.lost_mass(1)
    shared = encoding(law, z=z, cohort=4, size=size, bits=bits)
    # each of four shares moves by a fourth, of half the standard deviation
    assert z == 1.0 or shared.lost_mass(4) < shared.lost_mass(1)


@pytest.mark.parametrize("law", LAWS)
def test_the_largest_value_of_integer_noise_is_paid(law):
    """One coordinate that moves as far as possible, 20 times."""
    rounds = 20
    for z in (1.0, 0.7, 0.25):
        one = plan(law, z=z)
        code = encoding_of(one.upload)
        std = code.scale * code.share
        lost = rounds * stats.norm.sf(9.1 - code.longest / std)
        try:
            proof = guarantee(one, rounds, "server")
        except NotAnalysable as error:
            assert "cannot reach" in str(error) and z == 0.25
            continue
        (charged,) = proof.release.shifts
        assert charged.times == rounds and lost <= rounds * charged.lost < 1e-5
    assert lost > 1e-5  # at the smallest z


def test_a_refusal_names_the_views_that_shares_protect():
    """The server is the default view, to which each of many shares is too small."""
    one = plan("skellam", z=0.05)
    with pytest.raises(NotAnalysable, match=r"reach, 1, but got .* ask for view='third_party'"):
        guarantee(one, 20, "server")


def test_the_divergence_of_the_known_discrete_gaussian():
    """Alone, a discrete Gaussian is as concentrated as a Gaussian (Canonne et al., 2020)."""
    code = encoding("discrete_gaussian", cohort=1, bits=14)
    slopes, constants = code.bounds(1)
    rho = (code.longest * (1 + shares.NORM_ERROR) / (code.scale * code.share)) ** 2 / 2
    assert slopes.min() == pytest.approx(rho) and constants[0] == 0
    assert np.sqrt(1 / (2 * rho)) == pytest.approx(1.0, rel=0.02)  # the multiplier asked for
    # what moves twice as far diverges four times as much
    assert code.bounds(1, moves=2.0)[0].min() == pytest.approx(4 * rho)


def test_many_bits_cost_nothing_and_few_do():
    codes = [encoding("discrete_gaussian", 2.0, 0.5, 16, 1000, bits) for bits in (16, 12, 8)]
    epsilons = [epsilon(renyi_bound(*code.bounds(16)), 10) for code in codes]
    assert encoding(cohort=1024, bits=None).bits == 15  # of sums that float32 holds exactly
    assert epsilons[0] < 1.08 * epsilon(gaussian(2.0), 10)  # Renyi against exact
    assert epsilons[0] <= epsilons[1] < epsilons[2]


# --- plans

FED = make_federation(sizes=(6,) * C, classes=2)
TASK = jfl.models.logistic(FED)
DRAWN = jfl.sampling.without_replacement(C, 4)


def plan(law="gaussian", sampler=DRAWN, z=2.0, adjacency="zero_out", secure=True, **parts):
    bits = {} if law == "gaussian" else dict(like=TASK, bits=12)
    pair = jfl.distributed(z, 0.5, 4, law=law, adjacency=adjacency, **bits)
    grad = parts.pop("grad", jfl.grad(TASK.loss))
    algorithm = jfl.algorithms.fedavg(grad, steps=2, batch=jfl.batches.full())
    parts = dict(upload=pair.upload, release=pair.release, weights="uniform") | parts
    return jfl.plan(FED, TASK, algorithm, sampler, secure_aggregation=secure, **parts)


def guarantee(one, rounds, view="aggregate", **options):
    return jfl.guarantee(one, rounds, 1e-5, view=view, **options)


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_shares_are_worth_their_sum(adjacency):
    one = plan(adjacency=adjacency)
    found = guarantee(one, 10)
    assert found.status == "conditional" and found.adjacency == adjacency
    assert any("secure aggregation" in c for c in found.caveats)
    assert found.epsilon == pytest.approx(epsilon(gaussian(2.0), 10))
    assert guarantee(one, 10, "server").epsilon == pytest.approx(epsilon(gaussian(1.0), 10))


def test_of_unequal_weights_the_least_noisy_cohort_counts():
    one = plan(weights=np.array([1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 4.0, 0.0]))
    scaled = np.asarray(one.weights, np.float64)
    (entry,) = [e for e in jfl.ledger(one, 5) if (e.unit, e.view) == ("client", "aggregate")]
    levels = entry.parts[0].noise[0] / entry.parts[0].multiplier[0, 0]
    for client in range(C - 1):
        cohorts = itertools.combinations(np.delete(np.arange(C), client), 3)
        noise = min(np.square(scaled[[client, *rest]]).sum() for rest in cohorts)
        assert levels[client] == pytest.approx(noise**0.5 / scaled[client])
    assert levels[C - 1] > 1e9


def test_calibration_knows_the_share():
    z = jfl.calibrate(plan(), epsilon=3.0, rounds=10, delta=1e-5, view="aggregate")
    assert 2.99 < guarantee(plan(z=float(z) * 4**0.5), 10).epsilon <= 3.0  # each of 4 adds half


@pytest.mark.parametrize(
    "law", ["skellam", pytest.param("discrete_gaussian", marks=pytest.mark.slow)]
)
def test_integers_train_and_are_accounted(law):
    one = plan(law)
    run = jfl.init(KEY, one)
    after = jax.jit(lambda run: jfl.run_round(run, one)[0])(run)
    moved = flat(after.server.params) - flat(run.server.params)
    assert 0 < np.linalg.norm(moved) < 10 and after.health.nonfinite == 0
    found = {view: guarantee(one, 3, view) for view in ("server", "aggregate", "third_party")}
    hidden = found["aggregate"]
    assert found["third_party"].epsilon <= hidden.epsilon < found["server"].epsilon
    assert hidden.method.startswith("rdp") and hidden.status == "conditional"
    exact = epsilon(gaussian(2.0), 3)
    assert exact < hidden.epsilon < 1.15 * exact
    twice = renyi_bound(*encoding_of(one.upload).bounds(4, moves=2.0))
    examples = guarantee(one, 3, unit="example")
    assert examples.epsilon == pytest.approx(epsilon(twice, 3))


@pytest.mark.slow
def test_an_attack_finds_less_than_is_proved():
    """One client's upload against nothing, seen in the direction in which it differs; the bound is
    for 4,000 runs of each side, with a false alarm in 1e4."""
    code = encoding(cohort=1, size=16)

    def score(value, key):
        undone, _ = shares.decode(code.encode(key, value), None, encoding=code)
        return undone.sum() / 4 / code.clip_norm

    keys = jax.random.split(KEY, 8000)
    there = np.asarray(jax.vmap(lambda k: score(jnp.ones(16), k))(keys[:4000]))
    absent = np.asarray(jax.vmap(lambda k: score(jnp.zeros(16), k))(keys[4000:]))
    hits = max((there > t).mean() - np.e**1.0 * (absent > t).mean() for t in np.linspace(0, 2, 41))
    slack = 4 * np.e / 4000**0.5 / 2
    assert hits <= tightest.delta(renyi_bound(*code.bounds(1)), 1.0) + slack
    assert np.mean(there) == pytest.approx(1, abs=0.1)  # it sees what is there
    less = renyi_bound(*(b / 9 for b in code.bounds(1)))  # the half that must fail
    assert hits > tightest.delta(less, 1.0) + slack


def pair_of(law="skellam", z=1.0, cohort=10, **options):
    return jfl.distributed(z, 0.5, cohort, law=law, **options)


PAIR, WRONG = (pair_of(cohort=4, like=like, bits=12) for like in (TASK, np.zeros(5)))
FEW = pair_of(cohort=4, like=TASK, bits=4)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: pair_of(), "like=task"),
        (lambda: pair_of(cohort=1000, like=TASK, bits=16), "at most bits=15"),
        (lambda: pair_of(cohort=100, like=TASK, bits=5), "more bits"),
        (lambda: pair_of("gaussian", adjacency="add_remove"), "adjacency"),
        (lambda: plan(upload=PAIR.upload, release=jfl.chain(jfl.total())), "of one jfl.dist"),
        (lambda: plan(upload=None, release=PAIR.release), "of one jfl.distributed"),
        (lambda: plan(grad=jfl.private_grad(TASK.loss, PAIR.upload)), "in private_grad"),
        (lambda: plan("skellam", weights=np.arange(1.0, C + 1)), 'weights="uniform"'),
        (lambda: jfl.simulate(KEY, plan(**WRONG._asdict()), 1), "uploads of 5 numbers"),
        (lambda: guarantee(plan(secure=False), 10), "secure_aggregation=True"),
        (lambda: guarantee(plan("skellam", jfl.sampling.full(C)), 3), "always 4 clients.* of 8,"),
        (lambda: guarantee(plan(**FEW._asdict()), 3, "server"), "more bits for integers"),
        (lambda: guarantee(plan(sampler=jfl.sampling.poisson(C, 0.5)), 3), "docs/matrix.md"),
        (lambda: guarantee(plan("skellam", jfl.sampling.poisson(C, 0.5)), 3), "docs/matrix.md"),
        (lambda: jfl.calibrate(plan("skellam"), epsilon=3.0, rounds=3), "a few noise multipliers"),
    ],
)
def test_refusals(call, words):
    with pytest.raises((ArgumentError, NotAnalysable), match=words):
        call()
