"""Who takes part and which rows are used: the laws of the draws, and what they may not depend on.

Laws are tested on the joint outcome (the whole subset, not one marginal), by chi-square with a
false alarm in 1e6; the same test must reject a sampler that is slightly wrong.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS
from scipy import stats

import jfl
from jfl import sampling
from jfl.privacy.ledger.facts import attendance
from jfl.sampling import batches, uniform

ALARM = 1e-6
KEY = jax.random.key(2)


def rejects(counts, probabilities):
    """True if the counts do not follow the probabilities; a false alarm in 1e6."""
    counts, p = np.asarray(counts, float), np.asarray(probabilities, float)
    assert p.sum() == pytest.approx(1, abs=1e-6)
    assert counts.sum() * p.min() > 5  # chi-square needs cells that are filled
    expected = counts.sum() * p
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(p) - 1) < ALARM


def even(cells):
    return np.full(cells, 1 / cells)


@functools.partial(jax.jit, static_argnames="n")
def _draw_clients(draw, key, n):
    return jax.vmap(draw)(jax.random.split(key, n))


def draw_clients(sampler, n, key=KEY):
    """One program for all rates and weights of a sampler."""
    return jax.tree.map(np.asarray, _draw_clients(sampler.draw, key, n))


@functools.partial(jax.jit, static_argnames=("n", "width", "floyd"))
def _draw_rows(draw, key, step, size, n, width, floyd):
    """`floyd` is what the draw reads of its module, here so that each has a program of its own."""
    return jax.vmap(lambda key: draw(key, step, size, width))(jax.random.split(key, n))


def draw_rows(scheme, n, size, width=9, step=0, key=KEY):
    """One program for all steps, sizes and rates of a scheme."""
    numbers, floyd = map(np.int32, (step, size)), uniform.MAX_FLOYD_SIZE
    drawn = _draw_rows(scheme.draw, key, *numbers, n=n, width=width, floyd=floyd)
    return tuple(map(np.asarray, drawn))


def codes(ids, taken, base):
    """One number for each set of ids: its bit pattern."""
    return (np.where(taken, 1 << np.minimum(ids, base), 0)).sum(1)


def subset_counts(seen, n, k):
    codes_ = [sum(1 << i for i in c) for c in itertools.combinations(range(n), k)]
    found = np.array([(seen == c).sum() for c in codes_])
    assert found.sum() == len(seen), "something that is not a subset of that size was drawn"
    return found


def favoured(who, n, k):
    """The law of subsets of k of n in which one has come ten per cent too often."""
    law = np.array([1.1 if who in s else 1.0 for s in itertools.combinations(range(n), k)])
    return law / law.sum()


# --- clients


def test_without_replacement_is_uniform_over_subsets():
    n = 60_000
    c = draw_clients(sampling.without_replacement(CLIENTS, 3), n)
    assert (c.times_drawn == 1).all() and (c.repeat_index == 0).all()
    found = subset_counts(codes(c.ids, c.times_drawn > 0, CLIENTS), CLIENTS, 3)
    assert not rejects(found, even(35))
    wrong = np.random.default_rng(0).multinomial(n, favoured(0, CLIENTS, 3))
    assert rejects(wrong, even(35))


def _poisson_patterns(rate, clients):
    k = np.array([bin(i).count("1") for i in range(1 << clients)])
    return rate**k * (1 - rate) ** (clients - k)


def test_poisson_is_independent_at_its_rate():
    """All 2^5 patterns at once: rates and independence.  A rate that is 2 per cent off must be
    seen."""

    def count(rate):
        c = draw_clients(sampling.poisson(5, rate, capacity=5), 100_000)
        return np.bincount(codes(c.ids, c.times_drawn > 0, 5), minlength=32)

    assert not rejects(count(0.45), _poisson_patterns(0.45, 5))
    assert rejects(count(1.02 * 0.45), _poisson_patterns(0.45, 5))
    assert count(1.0)[-1] == 100_000


def test_poisson_capacity_changes_who_fits_and_nothing_else():
    wide, tight = (
        draw_clients(sampling.poisson(CLIENTS, 0.4, capacity=k), 500) for k in (CLIENTS, 4)
    )
    taken = wide.times_drawn > 0
    assert ((wide.ids < CLIENTS) == taken).all() and (wide.ids[~taken] == CLIENTS).all()
    assert all(len(set(i[t])) == t.sum() for i, t in zip(wide.ids, taken))
    assert (wide.overflow == 0).all() and (wide.repeat_index == 0).all()
    fits = taken.sum(1) <= 4
    assert (wide.ids[fits, :4] == tight.ids[fits]).all() and (tight.overflow[fits] == 0).all()
    assert (taken.sum(1) - 4 == tight.overflow)[~fits].all() and (~fits).any()


@pytest.mark.parametrize("clients, rate", [(100, 0.3), (1_000_000, 1e-3), (20, 0.001)])
def test_default_capacities_never_overflow(clients, rate):
    """P(overflow) in a million rounds is below 1e-12, and the capacity is not larger than that
    needs."""
    capacity = sampling.poisson(clients, rate).capacity
    tail = lambda k: stats.binom.sf(k, clients, rate)
    assert tail(capacity) <= sampling.OVERFLOW / sampling.HORIZON
    assert capacity == clients or tail(capacity - 3) > sampling.OVERFLOW / sampling.HORIZON
    expected = rate * clients
    rows = batches.poisson(expected).batch
    for size in (max(int(np.ceil(expected)), 1), clients, 10 * clients):
        chance = stats.binom.sf(rows, size, min(1.0, expected / size))
        assert chance <= sampling.OVERFLOW / sampling.HORIZON**2
    assert rows < 3 * expected + 12 * np.sqrt(expected) + 50


SHARE = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("weights", [None, SHARE], ids=["uniform", "weights"])
def test_with_replacement_has_the_law_of_independent_draws(weights):
    """All multisets of 3 of 4 clients.  A share that is 10 per cent off must be seen."""
    n = 60_000
    c = draw_clients(sampling.with_replacement(4, 3, weights=weights), n)
    times = np.zeros((n, 4), int)
    draws = np.repeat(np.arange(n), 3), np.minimum(c.ids, 3).ravel()
    np.add.at(times, draws, c.times_drawn.ravel())
    assert (times.sum(1) == 3).all() and ((c.times_drawn > 0) == (c.ids < 4)).all()
    once = zip(c.ids[:200], c.times_drawn[:200] > 0)
    assert all(len(set(ids[taken])) == taken.sum() for ids, taken in once)
    multisets = [m for m in itertools.product(range(4), repeat=4) if sum(m) == 3]
    law = lambda share: [stats.multinomial.pmf(m, 3, share / share.sum()) for m in multisets]
    counts = [(times == m).all(1).sum() for m in multisets]
    share = np.ones(4) if weights is None else weights
    assert not rejects(counts, law(share))
    assert rejects(counts, law(share * np.array([1.1, 1.0, 1.0, 1.0])))


def test_independent_draws_have_turns():
    one, many = (
        draw_clients(sampling.with_replacement(4, 6, independent=i), 200) for i in (False, True)
    )
    assert (many.times_drawn == 1).all()
    for ids, turn, merged, count in zip(many.ids, many.repeat_index, one.ids, one.times_drawn):
        assert len(set(zip(ids, turn))) == 6  # every run has an address of its own
        assert {i: (ids == i).sum() for i in set(ids)} == {i: k for i, k in zip(merged, count) if k}
        assert all(sorted(turn[ids == i]) == list(range((ids == i).sum())) for i in set(ids))


@pytest.mark.parametrize(
    "clients, weights",
    [
        (4, SHARE),
        (100, np.r_[np.full(50, 3e-6), np.ones(50)]),
        (3, [1e-30, 1.0, 1e-30]),
        (100_000, np.linspace(1, 2, 100_000)),
    ],
    ids=["few", "small", "tiny", "many"],
)
def test_shares_are_those_that_are_drawn(clients, weights, monkeypatch):
    """All 2^32 words, counted: none is nobody's, no client is without, and no client is charged for
    less than it has."""
    sampler = sampling.with_replacement(clients, 2, weights=weights)
    edges = np.r_[0, np.asarray(sampler.draw.data["edges"], np.int64), 2**32]
    drawn, charged = np.diff(edges) / 2.0**32, attendance(sampler).share
    assert drawn.min() > 0 and drawn.sum() == 1 and len(drawn) == clients
    assert (drawn <= charged).all() and np.allclose(charged, drawn, rtol=2e-7)
    wanted = np.asarray(weights) / np.sum(weights)
    np.testing.assert_allclose(drawn, wanted, rtol=1e-4, atol=clients / 2**32)
    # words at both ends of each client's part are its own
    words = np.stack([edges[:-1], edges[1:] - 1])[:, :40].astype(np.uint32).reshape(-1)
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(words))
    cohort = sampling.with_replacement(clients, len(words), weights, independent=True)
    ids = jax.jit(lambda key: cohort.draw(key).ids)(KEY)
    np.testing.assert_array_equal(ids, np.repeat(np.arange(min(clients, 40)), 2))


# --- first responders

MEANS = np.array([1.0, 1.5, 2.0, 3.0, 4.0])


def _race(means, k):
    """Probabilities of the subsets of the k fastest of exponential latencies: the next one is i at
    rate 1 / mean_i."""
    rates = 1 / np.asarray(means)

    def chance(order):
        left = [rates.sum() - rates[list(order[:n])].sum() for n in range(k)]
        return np.prod(rates[list(order)] / left)

    subsets = itertools.combinations(range(len(means)), k)
    return np.array([sum(map(chance, itertools.permutations(subset))) for subset in subsets])


def test_first_responders_follow_the_race():
    """All ten pairs of five exponential latencies.  One client that is ten per cent faster must be
    seen."""
    sampler = sampling.first_responders(5, 2, MEANS)
    assert sampler.scheme == "first_responders" and sampler.share is None and sampler.rate is None
    assert sampler.expected == sampler.capacity == 2
    assert sampling.adjacency(sampler) == "replace_one"
    c = draw_clients(sampler, 100_000)
    assert (c.times_drawn == 1).all() and (c.repeat_index == 0).all() and (c.overflow == 0).all()
    found = subset_counts(codes(c.ids, c.times_drawn > 0, 5), 5, 2)
    assert not rejects(found, _race(MEANS, 2))
    assert rejects(found, _race(MEANS * [1, 0.9, 1, 1, 1], 2)) and rejects(found, even(10))


def test_jitter_is_the_random_part_of_a_latency():
    """Of two clients with means a < b, b is first if a is late by the fixed parts' gap and then
    loses the race."""
    a, b, jitter, n = 1.0, 1.6, 0.4, 100_000

    def beaten(j):
        chance = np.exp(-(b - a) * (1 - j) / (a * j)) * a / (a + b)
        return np.array([chance, 1 - chance])

    ids = draw_clients(sampling.first_responders(2, 1, [a, b], jitter=jitter), n).ids[:, 0]
    counts = [(ids == 1).sum(), (ids == 0).sum()]
    assert not rejects(counts, beaten(jitter))
    assert rejects(counts, beaten(1.05 * jitter)) and rejects(counts, beaten(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [1.0, 1e-4])
def test_equal_latencies_are_a_uniform_cohort(jitter):
    """The same cohorts, to the client: also for thousands, whose latencies are closer than float32
    can tell."""
    for clients, n in ((CLIENTS, 300), (5000, 20)):
        same = draw_clients(sampling.without_replacement(clients, 3), n)
        latency = np.full(clients, 7.3)
        alike = draw_clients(sampling.first_responders(clients, 3, latency, jitter=jitter), n)
        assert (np.sort(alike.ids) == np.sort(same.ids)).all()
    assert sampling.first_responders(CLIENTS, 3).scheme == "without_replacement"


# --- the same in 64 bits


DRAWS = dict(
    weights=lambda key: sampling.with_replacement(4, 3, weights=SHARE).draw(key).ids,
    poisson=lambda key: sampling.poisson(50, 0.3).draw(key).ids,
    rows=lambda key: jnp.where(*batches.poisson(3.0).draw(key, 1, 30, 40)[1::-1], 40),
    uniform=lambda key: sampling.with_replacement(20, 6).draw(key).ids,
    groups=lambda key: sampling.min_separation(20, 4, 3).draw(key, 1).ids,
    subset=lambda key: batches.without_replacement(5).draw(key, 1, 30, 40)[0],
    repeated=lambda key: batches.with_replacement(5).draw(key, 1, 30, 40)[0],
    epoch=lambda key: batches.epochs(5).draw(key, 1, 30, 40)[0],
    few=lambda key: sampling.without_replacement(40_000, 100).draw(key).ids,
    few_weights=lambda key: sampling.with_replacement(40_000, 100).draw(key).ids,
    few_poisson=lambda key: sampling.poisson(40_000, 0.01).draw(key).ids,
    responders=lambda key: sampling.first_responders(20, 5, np.arange(1.0, 21)).draw(key).ids,
)


@pytest.mark.by_default("small")
@pytest.mark.parametrize("names", [list(DRAWS)[:8], list(DRAWS)[8:]], ids=["small", "large"])
def test_draws_are_the_same_in_64_bits(names):
    """Words stay words of 32 bits where JAX is told to take 64: an edge or a rate would mean
    something else."""
    here = jax.jit(lambda key: [DRAWS[name](key) for name in names])(KEY)
    with jax.enable_x64(True):
        there = jax.jit(lambda key: [DRAWS[name](key) for name in names])(KEY)
    for one, other in zip(here, there, strict=True):
        assert np.array_equal(one, other) and len(set(np.asarray(one).tolist())) > 1


# --- rows


@pytest.mark.by_default("floyd-4", "floyd-5")
@pytest.mark.parametrize("size", [4, 5, 9])  # of 3: drawn as those left out, and more
@pytest.mark.parametrize("branch", ["floyd", "distinct"])
def test_batches_without_replacement_are_uniform_over_subsets(branch, size, monkeypatch):
    if branch == "distinct":
        monkeypatch.setattr(uniform, "MAX_FLOYD_SIZE", 0)
    n, many = 60_000, math.comb(size, 3)
    slots, mask, overflow = draw_rows(FLOYD, n, size=size)
    assert mask.all() and (overflow == 0).all() and slots.min() >= 0 and slots.max() < size
    found = subset_counts(codes(slots, mask, 9), size, 3)
    assert not rejects(found, even(many))
    wrong = np.random.default_rng(0).multinomial(n, favoured(size - 1, size, 3))
    assert rejects(wrong, even(many))


def _floyd(draws, top):
    """Floyd's walk as it is printed."""
    chosen = []
    for draw, last in zip(draws, top, strict=True):
        chosen.append(last if draw in chosen else draw)
    return chosen


WALKS = dict(cpu=uniform._resolve_in_loop, elsewhere=uniform._resolve_at_once)


@pytest.mark.parametrize("count", [1, 5, 33, 64])
@pytest.mark.parametrize("walk", WALKS.values(), ids=list(WALKS))
def test_floyds_walk(walk, count):
    """All draws of a few numbers, and draws of many: some taken in long chains, and some free."""
    r, walks = np.random.default_rng(count), jax.jit(jax.vmap(walk, (0, None)))
    for size in (count, count + 1, 2 * count, 100_000):
        top = np.arange(size - count, size, dtype=np.int32)
        draws = r.integers(0, top + 1, (720, count), dtype=np.int32)
        draws[0] = size - count  # the first draw again and again
        draws[1] = np.maximum(top - 1, 0)  # each takes the number of the one before
        draws[2] = np.append(top[0], top[:-1])
        if size <= 6:
            every = itertools.product(*(range(last + 1) for last in top))
            draws = np.resize(np.array(list(every), np.int32), draws.shape)
        found = np.asarray(walks(draws, top))
        assert found.dtype == np.int32 and found.tolist() == [_floyd(row, top) for row in draws]


def test_an_accelerator_draws_without_a_loop(traced_for):
    for backend, platform in (("cpu", "cpu"), ("gpu", "cuda")):
        traced_for(backend)
        draw = jax.jit(lambda key, size: uniform.subset(key, size, 40, 100)).trace(KEY, 100)
        text = draw.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) == (backend == "cpu"), backend


@pytest.mark.parametrize("batch", [65, 3000])
def test_draws_suffice_for_large_batches(batch):
    """`num_draws`: fewer than `batch` distinct numbers of 2 * batch are a matter of 1e-20;
    of fewer draws, not."""

    def too_few(draws):
        chance, held = np.eye(1, batch + 1)[0], np.arange(batch)  # of each count of distinct ones
        for _ in range(draws):
            rise = chance[:batch] * (1 - held / (2 * batch))
            chance[:batch] -= rise
            chance[1:] += rise
        return chance[:batch].sum()

    assert too_few(uniform.num_draws(batch)) < 1e-20
    assert too_few(uniform.num_draws(batch) - math.ceil(7 * math.sqrt(batch)) - 20) > 1e-4


@pytest.mark.by_default("67", "300")
@pytest.mark.parametrize("size", [67, 131, 132, 300])
def test_large_batches_without_replacement(size):
    """The branch for more than 64 rows as it is: exactly 66 distinct ones, each row in and left out
    equally often."""
    n = 5_000
    slots, mask, _ = draw_rows(MANY, n, size=size, width=310)
    assert mask[:, :66].all() and slots.min() >= 0 and slots.max() < size
    slots = slots[:, :66]
    assert (np.diff(np.sort(slots, 1), axis=1) > 0).all()
    if size == 67:  # one is left out: independent draws
        left_out = 67 * 66 // 2 - slots.sum(1)
        assert not rejects(np.bincount(left_out, minlength=67), even(67))
    share = 66 / size
    off = lambda counts: np.abs(counts - n * share).max() / math.sqrt(n * share * (1 - share))
    assert off(np.bincount(slots.ravel(), minlength=size)) < 5.5  # 300 normals: false alarm < 2e-5
    assert off(np.bincount(np.minimum(slots, size - 2).ravel(), minlength=size)) > 5.5


def test_steps_of_a_round_are_independent():
    """Pairs of batches of two steps: 10 x 10 subsets.  The same batch twice must be seen."""
    scheme = batches.without_replacement(2)
    one, two = (draw_rows(scheme, 60_000, size=5, step=s) for s in (0, 1))
    a, b = codes(one[0], one[1], 9), codes(two[0], two[1], 9)
    pair = lambda a, b: np.unique(a * 64 + b, return_counts=True)[1]
    assert len(pair(a, b)) == 100 and not rejects(pair(a, b), even(100))
    mixed = np.where(np.arange(len(a)) % 10 == 0, a, b)
    assert rejects(pair(a, mixed), even(100))


@pytest.mark.parametrize("scheme", [batches.with_replacement(4), batches.without_replacement(4)])
def test_rows_of_a_large_client_are_equally_likely(scheme):
    """The remainders of words of 32 bits hit the rows below 2^30 three times, and others twice."""
    rows, n = 3 * 2**29, 5_000
    slots, mask, _ = draw_rows(scheme, n, size=rows, width=rows)
    assert mask.all() and slots.min() >= 0
    assert not rejects(np.bincount(slots.ravel() // 2**29, minlength=3), even(3))
    wrong = np.random.default_rng(0).multinomial(slots.size, [3 / 8, 3 / 8, 2 / 8])
    assert rejects(wrong, even(3))
    few = draw_rows(scheme, n, size=7, width=7)  # a small client next to it has its own batches
    assert np.array_equal(draw_rows(scheme, n, size=7, width=rows)[0], few[0])


def test_batches_with_replacement_are_independent_draws():
    slots, mask, _ = draw_rows(batches.with_replacement(2), 60_000, size=5)
    assert mask.all()
    pairs = np.bincount(slots[:, 0] * 5 + slots[:, 1], minlength=25)
    assert not rejects(pairs, even(25))
    assert rejects(np.where(np.arange(25) % 6 == 0, 0.9, 1.0) * pairs, even(25))


@pytest.mark.by_default("rate")
@pytest.mark.parametrize(
    "make",
    [lambda q: batches.poisson(5 * q), lambda q: batches.poisson(rate=q, capacity=5)],
    ids=["expected", "rate"],
)
def test_poisson_batches_are_independent_at_their_rate(make):
    n, rate = 100_000, 0.45

    def count(q):
        slots, mask, overflow = draw_rows(make(q), n, size=5)
        assert (overflow == 0).all()
        return np.bincount(codes(slots, mask, 9), minlength=32)

    assert not rejects(count(rate), _poisson_patterns(rate, 5))
    assert rejects(count(1.02 * rate), _poisson_patterns(rate, 5))


def test_batches_of_small_clients_and_overflow():
    """With the programs of other tests here."""
    _, mask, overflow = draw_rows(batches.poisson(8.0, capacity=MEAN.batch), 40, size=3, width=7)
    assert (mask.sum(1) == 3).all() and (overflow == 0).all()
    _, mask, overflow = draw_rows(batches.poisson(rate=1.0, capacity=5), 100_000, size=7)
    assert (mask.sum(1) == 5).all() and (overflow == 2).all()
    for scheme, size, n, width in ((FLOYD, 2, 60_000, 9), (MANY, 4, 5_000, 310)):
        slots, mask, _ = draw_rows(scheme, n, size=size, width=width)
        assert (mask == (np.arange(scheme.batch) < size)).all()
        assert (slots[:, :size] == np.arange(size)).all()


@pytest.mark.parametrize("batch", [1, 4, 12])
def test_epochs_cover_each_row_once(batch):
    scheme = batches.epochs(batch)
    draw = jax.jit(jax.vmap(lambda step, size: scheme.draw(KEY, step, size, 9), (0, None)))
    for size in (1, 4, 7, 9):
        per_epoch = -(-size // batch)
        slots, mask, overflow = map(np.asarray, draw(jnp.arange(27), size))
        sizes, orders = [min(batch, size - k * batch) for k in range(per_epoch)], set()
        for e in range(3):
            part = slice(e * per_epoch, (e + 1) * per_epoch)
            used = slots[part][mask[part]]
            assert sorted(used) == list(range(size)) and (mask[part].sum(1) == sizes).all()
            orders.add(tuple(used))
        assert size < 6 or len(orders) == 3  # shuffled anew
        assert (overflow == 0).all()


def test_epochs_shuffle_uniformly():
    slots, mask, _ = draw_rows(batches.epochs(4), 40_000, size=4)
    assert mask.all()
    seen = np.unique((slots * 5 ** np.arange(4)).sum(1), return_counts=True)[1]
    assert len(seen) == 24 and not rejects(seen, even(24))
    assert rejects(seen * np.where(np.arange(24) < 6, 0.9, 1.0), even(24))


FLOYD, MANY = (batches.without_replacement(n, short="all") for n in (3, 66))
MEAN = batches.poisson(3.0)
SCHEMES = dict(
    full=batches.full(),
    floyd=FLOYD,
    distinct=MANY,
    with_replacement=batches.with_replacement(4),
    poisson=MEAN,
    rate=batches.poisson(rate=0.4, capacity=9),
    epochs=batches.epochs(3),
)


@pytest.mark.by_default("floyd", "poisson", "epochs")
@pytest.mark.parametrize("name", SCHEMES)
def test_draws_never_depend_on_padding(name):
    """Nor on anything but (key, step, size)."""
    scheme, size = SCHEMES[name], 100 if name == "distinct" else 7
    used = lambda width=size, **how: [
        slots[mask].tolist()
        for slots, mask in zip(*draw_rows(scheme, 40, size=size, width=width, **how)[:2])
    ]
    for step in (0, 5):
        assert used(step=step) == used(4 * size + 3, step=step)
    if name != "full":
        assert used() != used(key=jax.random.key(9)) and used() != used(step=7)
    assert draw_rows(scheme, 40, size=0, width=size)[1].sum() == 0  # nobody's rows are nobody's


def test_gather_reads_zeros_in_empty_slots():
    index = jnp.array([7, 3, 0, 0])
    rows = jfl.Rows(jnp.arange(20.0)[:, None], jnp.arange(20), index, jnp.int32(2))
    got = jax.jit(batches.gather)(rows, jnp.array([1, 9, 0]), jnp.array([True, False, True]))
    assert got.y.tolist() == [3, 0, 7] and got.mask.tolist() == [True, False, True]


# --- groups that take turns


def rounds_of(sampler, keys, rounds):
    """Who takes part, Bool[keys, rounds, clients]."""

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None))
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def draw(key, round_):
        return sampling.clients.draw_cohort(sampler, key, round_)

    drawn = jax.tree.map(np.asarray, draw(keys, np.arange(rounds)))
    taken = (drawn.ids[..., None] == np.arange(sampler.clients)) & (drawn.times_drawn > 0)[
        ..., None
    ]
    assert not np.any(drawn.overflow) and np.max(taken.sum(-2)) == drawn.times_drawn.max() == 1
    return taken.any(-2)


def closest(took_part):
    """The fewest rounds between two participations of a client."""
    times = [np.flatnonzero(column) for column in took_part.T]
    return min(int(np.diff(rounds).min()) for rounds in times if len(rounds) > 1)


@pytest.mark.parametrize("clients_, cohort, separation", [(12, 3, 4), (13, 2, 4)])
def test_a_client_stays_away_for_as_long_as_promised(clients_, cohort, separation):
    sampler, keys = sampling.min_separation(clients_, cohort, separation), jax.random.split(KEY, 5)
    for seen in rounds_of(sampler, keys, 10 * separation):
        assert (seen.sum(1) == cohort).all() and closest(seen) == separation
        if clients_ == cohort * separation:  # turns of all are a cyclic order
            assert (seen[:4].sum(0) == 1).all() and (seen[:4] == seen[4:8]).all()
    # rounds in another order would be seen
    assert closest(np.random.default_rng(0).permutation(seen)) < separation


def test_a_cohort_of_a_group_is_a_uniform_subset():
    """Groups of 8, of which 2 are drawn: which pair, in 6,000 rounds of one group."""
    seen = rounds_of(sampling.min_separation(16, 2, 2), KEY[None], 12_000)[0]
    group = np.flatnonzero(seen[::2].any(0))
    assert len(group) == 8 and not seen[1::2, group].any()
    ids = np.nonzero(seen[::2])[1].reshape(-1, 2)
    pairs = {pair: k for k, pair in enumerate(itertools.combinations(group.tolist(), 2))}
    counts = np.bincount([pairs[tuple(pair)] for pair in ids.tolist()], minlength=28)
    assert not rejects(counts, even(28))
    counts[0] += counts[1] + counts[2]
    counts[1] = counts[2] = 6
    assert rejects(counts / counts.sum() * 6000, even(28))


def test_groups_are_drawn_by_the_seed_and_every_client_may_be_in_any():
    seen = rounds_of(sampling.min_separation(7, 2, 3), jax.random.split(KEY, 1500), 60)
    by_group = seen.reshape(1500, 20, 3, 7).any(1)  # keys, groups, clients
    assert (by_group.sum(1) == 1).all()
    for client in range(7):
        assert not rejects(by_group[:, :, client].sum(0), even(3))
    assert (by_group[:, :, :3].sum(2) == 1).all()  # three clients in a row are in other groups


def test_cyclic_poisson_is_poisson_in_a_group():
    """A client joins in its group's rounds with its rate, on its own; in others never."""
    rate, turns, n = 0.3, 3, 3000
    sampler = sampling.cyclic_poisson(8, rate, turns, capacity=8)
    seen = rounds_of(sampler, jax.random.split(KEY, n), 2 * turns)
    times = seen.reshape(n, 2, turns, 8).sum(1)  # by group, clients
    assert ((times > 0).sum(1) <= 1).all()  # only in rounds of one group
    joined = np.bincount(times.sum(1)[:, 0], minlength=3)
    law = lambda rate: [(1 - rate) ** 2, 2 * rate * (1 - rate), rate**2]
    assert not rejects(joined, law(rate)) and rejects(joined, law(0.4))
    # two clients join independently, whatever their groups
    both = np.bincount(2 * seen[:, 0, 0] + seen[:, 0, 1], minlength=4)
    p = rate / turns
    assert not rejects(both, [(1 - p) ** 2, p * (1 - p), p * (1 - p), p**2])
    assert sampler.expected == pytest.approx(8 * rate / turns)


def test_overflow_of_a_cyclic_cohort_is_counted_and_charged():
    few = sampling.cyclic_poisson(8, 0.9, 2, capacity=1)
    draw = jax.jit(jax.vmap(lambda r: sampling.clients.draw_cohort(few, KEY, r).overflow))
    lost = draw(jnp.arange(20))
    assert lost.max() > 0 and attendance(few).overflow > 0.5
    enough = sampling.cyclic_poisson(1000, 0.5, 5)
    assert attendance(enough).overflow < 1e-17 and enough.capacity < 250


# --- room for some of those who join


def kept_by_hand(key, many, rate, capacity):
    """Who joins, and of more than there is room for those whose words are the smallest."""
    words = np.asarray(jax.random.bits(key, (len(many),), jnp.uint32))
    joined = np.flatnonzero(np.asarray(uniform.below(jnp.asarray(words), rate)) & many)
    return np.sort(joined[np.argsort(words[joined], kind="stable")][:capacity])


def test_of_more_than_there_is_room_for_a_uniform_subset_comes():
    """4 clients, room for 2, rate 0.8: the law of all subsets; false alarms as `rejects` has."""
    rate, law = 0.8, {}
    ids = draw_clients(sampling.truncated_poisson(4, rate, 2), 8000).ids
    for joined in itertools.product((0, 1), repeat=4):
        who = [i for i in range(4) if joined[i]]
        kept = list(itertools.combinations(who, min(2, len(who))))
        for one in kept:
            chance = rate ** len(who) * (1 - rate) ** (4 - len(who)) / len(kept)
            law[one] = law.get(one, 0) + chance
    order = {one: i for i, one in enumerate(sorted(law))}
    counts = np.bincount([order[tuple(r[r < 4])] for r in ids], minlength=len(order))
    expected = np.array([law[one] for one in sorted(law)])
    assert not rejects(counts, expected)
    first = np.where([0 in one for one in sorted(law)], 1.3, 1.0) * expected  # the first ones kept
    assert rejects(counts, first / first.sum())


def test_a_truncated_batch_is_the_same_of_rows():
    scheme = batches.truncated_poisson(4.0, 6)
    draw = jax.jit(lambda step, size: scheme.draw(KEY, step, size, 20))
    for step, size in ((0, 20), (1, 13), (2, 3), (3, 0)):
        slots, mask, overflow = map(np.asarray, draw(step, size))
        rate = np.float32(min(1.0, 4.0 / max(size, 1)))
        kept = kept_by_hand(jax.random.fold_in(KEY, step), np.arange(20) < size, rate, 6)
        np.testing.assert_array_equal(slots[mask], kept)
        assert overflow == 0 and len(slots) == 6
    assert batches.truncated_poisson(100.0).batch == sampling.truncated_poisson(1000, 0.1).capacity


# --- arguments


WEIGHTS = [1.0] * 6
NAN = float("nan")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sampling.without_replacement(7, 8), "cohort <= 7"),
        (lambda: sampling.with_replacement(7, 3, weights=[1.0, 2.0]), "one weight"),
        (lambda: sampling.with_replacement(7, 3, weights=[*WEIGHTS, 0.0]), "weights > 0"),
        (lambda: sampling.with_replacement(7, 3, weights=[*WEIGHTS, NAN]), "weights > 0"),
        (lambda: sampling.poisson(7, 1.5), "rate"),
        (lambda: jax.jit(lambda q: sampling.poisson(7, q).draw(KEY).ids)(0.5), "traced"),
        (lambda: sampling.truncated_poisson(10, 0.0, 4), "rate"),
        (lambda: sampling.first_responders(2, 1, [1.0, 0.0]), "latency > 0"),
        (lambda: sampling.first_responders(2, 1, [1.0, 2.0], jitter=1.5), "jitter"),
        (lambda: sampling.min_separation(10, 4, 3), "cohort <= 3"),
        (lambda: sampling.cyclic_poisson(10, 0.5, 2, capacity=11), "capacity <= 10"),
        (lambda: batches.without_replacement(3, short="some"), "short"),
        (lambda: batches.poisson(3.0, rate=0.5), "either"),
        (lambda: batches.poisson(rate=0.5), "capacity together with rate"),
        (lambda: batches.poisson(rate=NAN, capacity=4), "rate"),
    ],
)
def test_arguments_that_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("scheme", ["poisson", "truncated_poisson"])
def test_own_poisson_sampler_needs_its_rate(scheme, fed, task):
    """Without a rate the accountant has nothing to compute epsilon from."""
    known = getattr(jfl.sampling, scheme)(CLIENTS, 0.25, capacity=CLIENTS)
    own = dataclasses.replace(known, rate=None)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), batch=batches.full())
    jfl.plan(fed, task, algorithm, known)
    with pytest.raises(ValueError, match=f"rate=.*the scheme '{scheme}', but got rate=None"):
        jfl.plan(fed, task, algorithm, own)


@pytest.mark.parametrize("scheme", ["poisson", "truncated_poisson"])
def test_own_poisson_batches_need_their_mean(scheme, fed, task):
    known = batches.poisson(2) if scheme == "poisson" else batches.truncated_poisson(2, 3)
    own = dataclasses.replace(known, expected=None)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
    grad = jfl.private_grad(task.loss, chain)
    make = lambda batch: jfl.plan(
        fed, task, jfl.algorithms.fedavg(grad, batch=batch), jfl.sampling.full(CLIENTS)
    )
    make(known)
    with pytest.raises(ValueError, match=f"expected=.*the scheme '{scheme}', but got neither"):
        make(own)
