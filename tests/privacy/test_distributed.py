"""Noise in shares: real numbers and integers, what a secure aggregation shows of them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from scipy import special, stats

import jfl
from jfl.core.errors import ArgumentError, NotAnalysable
from jfl.privacy.accountants import tightest
from jfl.privacy.accountants.events import gaussian, renyi_bound, repeat
from jfl.privacy.mechanisms import distributed as shares
from jfl.privacy.mechanisms.distributed import encoding_of

C, ALARM = 8, 1e-6
KEY = jax.random.key(3)


def encoding(law="skellam", z=1.0, clip=0.5, cohort=4, size=23, bits=12, **more):
    pair = jfl.distributed(z, clip, cohort, law=law, like=np.zeros(size), bits=bits, **more)
    return encoding_of(pair.upload)


# --- one client's integers


def encoded_by_hand(code, key, x):
    """A loop with the draws of `Encoding.encode`: blocks, rounding, noise, modulo."""
    x = np.asarray(x, np.float64)
    x = x * min(1.0, code.clip_norm / np.linalg.norm(x))
    bits = np.asarray(jax.random.bits(jax.random.key(0), x.shape, jnp.uint32))
    x = x * np.where(bits >> 31, -1.0, 1.0)
    start, parts = 0, []
    for size in (16, 4, 2, 1):
        parts.append(scipy.linalg.hadamard(size) / size**0.5 @ x[start : start + size])
        start += size
    assert start == len(x)
    x = np.concatenate(parts) * code.scale
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
    tails = (high << np.uint64(31)) | low
    size = (tails[None] > word[:, None]).sum(1)
    noisy = kept + size * np.where(words[1] & np.uint64(1), -1, 1)
    turn = 2**code.bits
    return (noisy + turn // 2) % turn - turn // 2


@pytest.mark.parametrize(
    "law", ["discrete_gaussian", pytest.param("skellam", marks=pytest.mark.slow)]
)
def test_an_upload_equals_a_loop(law):
    code = encoding(law)
    for seed in range(20):
        x = jax.random.normal(jax.random.key(seed), (23,))
        key, leaves = jax.random.fold_in(KEY, seed), {"a": x[:20].reshape(4, 5), "b": x[20:]}
        found = code.encode(key, leaves)
        flat = np.concatenate([np.ravel(found["a"]), found["b"]])
        by_hand = encoded_by_hand(code, key, x)
        assert (flat == by_hand).mean() > 0.95  # float32 may round one of them the other way
        assert np.abs(flat - by_hand).max() <= 1


def without_noise(code, key, x):
    """What is rounded, before noise; and the norm that it may have."""
    clipped = x * jnp.minimum(1.0, code.clip_norm / jnp.linalg.norm(x))
    scaled = shares.rotate(clipped, shares._signs_key()) * code.scale
    return shares._round_randomly(scaled, code.longest, key)


def test_no_rounded_upload_is_longer_than_the_bound():
    code = encoding(clip=0.5, z=3.0, bits=8)  # few whole numbers: rounding counts
    x = jax.random.normal(KEY, (2000, 23)) * 10
    whole = jax.vmap(lambda k, v: without_noise(code, k, v))(jax.random.split(KEY, 2000), x)
    norms = np.linalg.norm(np.asarray(whole), axis=1)
    assert norms.max() <= code.longest and norms.max() > code.scale * code.clip_norm
    np.testing.assert_array_equal(whole, np.round(whole))


def test_rounding_is_right_on_average():
    code = encoding(bits=10)
    x = jax.random.normal(KEY, (23,))
    whole = jax.vmap(lambda k: without_noise(code, k, x))(jax.random.split(KEY, 20_000))
    exact = shares.rotate(x * code.clip_norm / jnp.linalg.norm(x), shares._signs_key()) * code.scale
    error = (np.asarray(whole).mean(0) - exact) / (0.5 / 20_000**0.5)
    assert np.abs(error).max() < 6  # of 23 standard normals at most: a false alarm in 1e7


def law_of(law, std, reach):
    k = np.arange(-reach, reach + 1)
    if law == "skellam":
        mass = special.ive(np.abs(k), std**2)
    else:
        mass = np.exp(-(k**2) / (2 * std**2))
    return k, mass / mass.sum()


@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
def test_noise_has_its_law(law):
    """Chi-square, a false alarm in 1e6; noise of 5 % more must be told."""
    code = encoding(law, z=1.0, cohort=9, size=200, bits=8)
    std = code.scale * code.share
    keys = jax.random.split(KEY, 500)
    drawn = np.asarray(jax.jit(jax.vmap(lambda k: shares._draw_noise(code, k)))(keys)).ravel()

    def rejects(std):
        k, mass = law_of(law, std, 60)
        cells = np.clip(k, -int(3 * std), int(3 * std))
        names = np.unique(cells)
        expected = np.array([mass[cells == c].sum() for c in names]) * len(drawn)
        clipped = np.clip(drawn, names[0], names[-1])
        counts = np.array([(clipped == c).sum() for c in names])
        return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(names) - 1) < ALARM

    assert 1 < std < 20 and not rejects(std)
    assert rejects(1.05 * std)


@pytest.mark.by_default("0.3", "300.0")
@pytest.mark.parametrize("std", [0.3, 1.0, 7.7, 300.0, 2000.0])
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
    bucket = np.asarray(shares._bucket(high, low << 1))
    size = known.start[bucket]
    above = len(tails) - np.searchsorted(tails[::-1], words, "right")
    assert (size <= above).all() and (above - size < known.reach).all()
    assert known.reach <= max(4, 2 ** np.ceil(np.log2(0.2 * std + 4)))


@pytest.mark.slow
@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
def test_a_sum_is_undone(law):
    """Of 4 clients, with hardly any noise: the mean of what they clipped; and modulo what wraps."""
    pair = jfl.distributed(1e-2, 0.5, 4, law=law, like=np.zeros(23), bits=16)
    code = encoding_of(pair.upload)
    x = jax.random.normal(KEY, (4, 23))
    sent = jax.vmap(lambda k, v: code.encode(k, v))(jax.random.split(KEY, 4), x)
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


@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
@pytest.mark.parametrize("clients", [1, 5])
def test_bounds_hold_in_one_dimension(law, clients):
    """The exact divergence of sums of noise, moved by a whole number."""
    for std in (0.8, 2.0, 6.0):
        k, one = law_of(law, std, 300)
        total = one
        for _ in range(clients - 1):
            total = np.convolve(total, one)[300:-300]
        wide = std * clients**0.5
        for move in (1, 3):
            code = shares.Encoding(law, 1.0, 1.0, clients, 1, 12, 4.0, "zero_out")

            class Known(shares.Encoding):
                scale = 1.0
                share = std
                longest = move

            slopes, constants = Known(*code).bounds(clients)
            for order in (1.5, 2.0, 4.0, 10.0):
                near = np.abs(k) < min(14 * wide, 280)  # beyond, a sum is rounding
                exact = renyi(np.roll(total, move)[near], total[near], order)
                bound = (slopes * order + constants).min()
                assert exact <= bound * (1 + 1e-6)
                if std > 5:
                    assert bound <= 2.5 * exact


def test_the_divergence_of_the_known_discrete_gaussian():
    """Alone, a discrete Gaussian is as concentrated as a Gaussian (Canonne et al., 2020)."""
    code = encoding("discrete_gaussian", cohort=1, bits=14)
    slopes, constants = code.bounds(1)
    rho = (code.longest * (1 + shares.NORM_ERROR) / (code.scale * code.share)) ** 2 / 2
    assert slopes.min() == pytest.approx(rho) and constants[0] == 0
    assert np.sqrt(1 / (2 * rho)) == pytest.approx(1.0, rel=0.02)  # the multiplier asked for


@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
def test_what_moves_twice_as_far_diverges_four_times_as_much(law):
    code = encoding(law, z=2.0, bits=12)
    (one, _), (two, _) = code.bounds(4), code.bounds(4, moves=2.0)
    assert two.min() == pytest.approx(4 * one.min(), rel=1e-3)


def test_many_bits_cost_nothing_and_few_do():
    epsilons = []
    for bits in (16, 12, 8):
        code = encoding("discrete_gaussian", z=2.0, cohort=16, size=1000, bits=bits)
        event = renyi_bound(*code.bounds(16))
        epsilons.append(tightest.epsilon(repeat(event, 10), 1e-5)[0])
    plain = tightest.epsilon(repeat(gaussian(2.0), 10), 1e-5)[0]
    assert epsilons[0] < 1.08 * plain  # Renyi against exact
    assert epsilons[0] <= epsilons[1] < epsilons[2]


# --- plans


@pytest.fixture(scope="module")
def fed():
    x = np.random.default_rng(0).normal(size=(6 * C, 3)).astype(np.float32)
    y = np.arange(len(x)) % 2
    return jfl.federate((x, y, x[:4], y[:4]), lambda _: np.arange(len(x)).reshape(C, 6))


def plan(fed, law="gaussian", sampler=None, cohort=4, weights="uniform", z=2.0, **more):
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=2, batch=jfl.batches.full())
    bits = {} if law == "gaussian" else dict(like=task, bits=12)
    pair = jfl.distributed(z, 0.5, cohort, law=law, **bits, **more)
    return jfl.plan(
        fed,
        task,
        algorithm,
        sampler or jfl.sampling.without_replacement(C, cohort),
        upload=pair.upload,
        release=pair.release,
        weights=weights,
        secure_aggregation=True,
    )


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_shares_are_worth_their_sum(fed, adjacency):
    found = jfl.guarantee(plan(fed, adjacency=adjacency), 10, 1e-5, view="aggregate")
    assert found.status == "conditional" and found.adjacency == adjacency
    assert any("secure aggregation" in c for c in found.caveats)
    expected = tightest.epsilon(repeat(gaussian(2.0), 10), 1e-5)[0]
    assert found.epsilon == pytest.approx(expected)
    alone = jfl.guarantee(plan(fed, adjacency=adjacency), 10, 1e-5, view="server")
    assert alone.epsilon == pytest.approx(tightest.epsilon(repeat(gaussian(1.0), 10), 1e-5)[0])


def test_of_unequal_weights_the_least_noisy_cohort_counts(fed):
    weights = np.array([1.0, 2.0, 0.5, 3.0, 1.0, 1.0, 4.0, 0.0])
    one = plan(fed, weights=weights)
    scaled = np.asarray(one.weights, np.float64)
    (entry,) = [e for e in jfl.ledger(one, 5) if (e.unit, e.view) == ("client", "aggregate")]
    levels = entry.parts[0].noise[0] / entry.parts[0].multiplier[0, 0]
    for client in range(C):
        others = [c for c in range(C) if c != client]
        noise = min(
            np.square(scaled[[client, *rest]]).sum() for rest in itertools.combinations(others, 3)
        )
        level = levels[client]
        if scaled[client] > 0:
            assert level == pytest.approx(noise**0.5 / scaled[client])
        else:
            assert level > 1e9


def test_the_view_has_to_be_declared(fed):
    one = dataclasses.replace(plan(fed), secure_aggregation=False)
    with pytest.raises(ArgumentError, match="secure_aggregation=True"):
        jfl.guarantee(one, 10, 1e-5, view="aggregate")
    assert {e.view for e in jfl.ledger(one, 10)} == {"server", "third_party"}


def test_calibration_knows_the_share(fed):
    z = jfl.calibrate(plan(fed), epsilon=3.0, rounds=10, delta=1e-5, view="aggregate")
    one = plan(fed, z=float(z) * 4**0.5)  # each of 4 adds half
    found = jfl.guarantee(one, 10, 1e-5, view="aggregate").epsilon
    assert 2.99 < found <= 3.0


@pytest.mark.by_default("skellam")
@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
def test_integers_train_and_are_accounted(fed, law):
    one = plan(fed, law)
    out = jfl.simulate(KEY, one, rounds=3)
    assert np.isfinite(out.metrics.loss).all()
    found = {v: jfl.guarantee(one, 3, 1e-5, view=v) for v in ("server", "aggregate", "third_party")}
    assert found["aggregate"].epsilon < found["server"].epsilon
    assert found["third_party"].epsilon <= found["aggregate"].epsilon
    assert found["aggregate"].method.startswith("rdp")
    assert found["aggregate"].status == "conditional"
    exact = tightest.epsilon(repeat(gaussian(2.0), 3), 1e-5)[0]
    assert exact < found["aggregate"].epsilon < 1.15 * exact
    code = encoding_of(one.upload)
    examples = jfl.guarantee(one, 3, 1e-5, unit="example", view="aggregate")
    twice = renyi_bound(*code.bounds(4, moves=2.0))
    assert examples.epsilon == pytest.approx(tightest.epsilon(repeat(twice, 3), 1e-5)[0])


@pytest.mark.slow
def test_chunks_and_the_whole_are_the_same(fed):
    one = plan(fed, "skellam")
    runs = [jfl.simulate(KEY, dataclasses.replace(one, chunk=k), rounds=2) for k in (1, 3, 4)]
    first, *others = (jax.tree.leaves(r.params) for r in runs)
    for other in others:
        for a, b in zip(first, other):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_an_attack_finds_less_than_is_proved():
    """One client's upload against nothing, seen in the direction in which it differs; the bound is
    for 4,000 runs of each side, with a false alarm in 1e4."""
    code = encoding("skellam", z=1.0, cohort=1, size=16, bits=12)
    x = jnp.ones(16)

    def score(value, key):
        sent = code.encode(key, value)
        undone, _ = shares.decode(sent, None, encoding=code)
        return undone.sum() / 4 / code.clip_norm

    keys = jax.random.split(KEY, 8000)
    there = np.asarray(jax.vmap(lambda k: score(x, k))(keys[:4000]))
    absent = np.asarray(jax.vmap(lambda k: score(0 * x, k))(keys[4000:]))
    hits = max((there > t).mean() - np.e**1.0 * (absent > t).mean() for t in np.linspace(0, 2, 41))
    event = renyi_bound(*code.bounds(1))
    slack = 4 * np.e / 4000**0.5 / 2
    assert hits <= tightest.delta(event, 1.0) + slack
    assert np.mean(there) == pytest.approx(1, abs=0.1)  # it sees what is there
    less = renyi_bound(*(b / 9 for b in code.bounds(1)))  # the half that must fail
    assert hits > tightest.delta(less, 1.0) + slack


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(law="skellam", weights="size"), None),
        (dict(law="skellam", weights=np.arange(1.0, C + 1)), 'weights="uniform"'),
        (
            dict(law="skellam", cohort=4, sampler=jfl.sampling.full(C)),
            "(always 4 clients|a row of docs/matrix.md)",
        ),
        (dict(sampler=jfl.sampling.poisson(C, 0.5)), "a row of docs/matrix.md.*poisson"),
        (
            dict(law="skellam", sampler=jfl.sampling.poisson(C, 0.5)),
            "(always 4 clients|a row of docs/matrix.md)",
        ),
    ],
)
def test_what_shares_cannot_do(fed, change, words):
    if words is None:  # clients of one size weigh the same
        assert plan(fed, **change) is not None
        return
    with pytest.raises((ArgumentError, NotAnalysable), match=words):
        jfl.guarantee(plan(fed, **change), 3, 1e-5, view="aggregate")


@pytest.mark.parametrize("law", ["skellam", "discrete_gaussian"])
def test_bits_fit_the_cohort_and_the_noise(law):
    like = np.zeros(1000)
    for cohort, z in itertools.product((1, 2, 8, 100, 2000), (0.5, 4.0)):
        code = encoding_of(jfl.distributed(z, 1.0, cohort, law=law, like=like).upload)
        most = next(b for b in range(16, 0, -1) if _takes(law, z, cohort, like, b))
        assert code.bits == most, (cohort, z)


def _takes(law, z, cohort, like, bits):
    try:
        jfl.distributed(z, 1.0, cohort, law=law, like=like, bits=bits)
    except ArgumentError as error:
        assert "bits=" in str(error) and "bits=None" in str(error)
        return False
    return True


def test_bad_input_says_what_to_do(fed):
    task = jfl.models.logistic(fed)
    for call, words in (
        (lambda: jfl.distributed(1.0, 0.5, 10, law="skellam"), "like=task"),
        (lambda: jfl.distributed(1.0, 0.5, 10, law="laplace"), "law"),
        (
            lambda: jfl.distributed(1.0, 0.5, 1000, law="skellam", like=task, bits=16),
            "at most bits=15",
        ),
        (lambda: jfl.distributed(1.0, 0.5, 2**20, law="skellam", like=task), "smaller cohort"),
        (lambda: jfl.distributed(1.0, 0.5, 100, law="skellam", like=task, bits=5), "more bits"),
        (lambda: jfl.distributed(1.0, 0.5, 2, law="skellam", like=task, bits=24), "fewer bits"),
        (lambda: jfl.distributed(0.0, 0.5, 10), "noise_multiplier"),
        (lambda: jfl.distributed(1.0, 0.5, 10, adjacency="add_remove"), "adjacency"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    pair = jfl.distributed(1.0, 0.5, 4, law="skellam", like=task, bits=12)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=2, batch=jfl.batches.full())
    parts = fed, task, algorithm, jfl.sampling.without_replacement(C, 4)
    mean = jfl.chain(jfl.total(), jfl.divide(4))
    for chains, words in (
        (dict(upload=pair.upload, release=mean), "of one jfl.distributed"),
        (dict(release=pair.release), "of one jfl.distributed"),
        (dict(release=pair.upload), "in upload only"),
    ):
        with pytest.raises(ArgumentError, match=words):
            jfl.plan(*parts, **chains)
    with pytest.raises(ArgumentError, match="in private_grad"):
        grad = jfl.private_grad(task.loss, pair.upload)
        private = jfl.algorithms.fedavg(grad, steps=1, batch=jfl.batches.full())
        jfl.plan(fed, task, private, parts[3])
    with pytest.raises(NotAnalysable, match="a few noise multipliers"):
        jfl.calibrate(plan(fed, "skellam"), epsilon=3.0, rounds=3, delta=1e-5, view="aggregate")
    wrong = jfl.distributed(1.0, 0.5, 4, law="skellam", like=np.zeros(5), bits=12)
    with pytest.raises(ArgumentError, match="uploads of 5 numbers"):
        jfl.simulate(KEY, jfl.plan(*parts, upload=wrong.upload, release=wrong.release), rounds=1)
    with pytest.raises(ArgumentError, match="noise with one of the distributions"):
        stage = dataclasses.replace(jfl.gaussian(1.0), law="skellam")
        jfl.chain(jfl.clip_l2(1.0), jfl.total(), stage)
