"""Who takes part and which rows are used: the laws of the draws, and what they may not depend on.

Laws are tested on the joint outcome (the whole subset, not one marginal), by chi-square with a
false alarm in 1e6; the same test must reject a sampler that is slightly wrong.
"""

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
from jfl.sampling import clients as cohorts

ALARM = 1e-6
KEY = jax.random.key(2)


def rejects(counts, probabilities):
    """True if the counts do not follow the probabilities; a false alarm in 1e6."""
    counts, p = np.asarray(counts, float), np.asarray(probabilities, float)
    assert (
        p.sum() == pytest.approx(1, abs=1e-6) and counts.sum() * p.min() > 5
    )  # chi-square needs cells that are filled
    expected = counts.sum() * p
    return stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), len(p) - 1) < ALARM


def draw_clients(sampler, n, key=KEY):
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(sampler.draw))(jax.random.split(key, n)))


PROGRAMS = {}  # of schemes that tests share


def draw_rows(scheme, n, size, width=9, step=0, key=KEY):
    """One program for all steps and sizes of a scheme."""
    known = PROGRAMS.setdefault(
        (id(scheme), width, uniform.MAX_FLOYD_SIZE),
        (scheme, jax.jit(jax.vmap(functools.partial(_draw, scheme, width), (0, None, None)))),
    )
    slots, mask, overflow = known[1](jax.random.split(key, n), np.int32(step), np.int32(size))
    return np.asarray(slots), np.asarray(mask), np.asarray(overflow)


def _draw(scheme, width, key, step, size):
    return scheme.draw(key, step, size, width)


def codes(ids, taken, base):
    """One number for each set of ids: its bit pattern."""
    return (np.where(taken, 1 << np.minimum(ids, base), 0)).sum(1)


def subset_counts(seen, n, k):
    codes_ = [sum(1 << i for i in c) for c in itertools.combinations(range(n), k)]
    found = np.array([(seen == c).sum() for c in codes_])
    assert found.sum() == len(seen), "something that is not a subset of that size was drawn"
    return found


# --- clients


def test_full_takes_everyone():
    c = draw_clients(sampling.full(CLIENTS), 3)
    assert (
        (c.ids == np.arange(CLIENTS)).all()
        and (c.times_drawn == 1).all()
        and (c.repeat_index == 0).all()
        and (c.overflow == 0).all()
    )


def test_without_replacement_is_uniform_over_subsets():
    n = 60_000
    c = draw_clients(sampling.without_replacement(CLIENTS, 3), n)
    assert (c.times_drawn == 1).all() and (c.repeat_index == 0).all()
    found = subset_counts(codes(c.ids, c.times_drawn > 0, CLIENTS), CLIENTS, 3)
    assert not rejects(found, np.full(35, 1 / 35))
    # must fail: client 0 ten per cent too often
    favoured = np.array([1.1 if 0 in s else 1.0 for s in itertools.combinations(range(CLIENTS), 3)])
    wrong = np.random.default_rng(0).multinomial(n, favoured / favoured.sum())
    assert rejects(wrong, np.full(35, 1 / 35))


def _poisson_patterns(rate, clients):
    k = np.array([bin(i).count("1") for i in range(1 << clients)])
    return rate**k * (1 - rate) ** (clients - k)


def test_poisson_is_independent_at_its_rate():
    """All 2^5 patterns at once: rates and independence.  A rate that is 2 per cent off must be
    seen."""
    n, rate, clients = 200_000, 0.45, 5
    count = lambda r: np.bincount(
        codes(
            *(lambda c: (c.ids, c.times_drawn > 0))(
                draw_clients(sampling.poisson(clients, r, capacity=clients), n)
            ),
            clients,
        ),
        minlength=64,
    )[:32]
    assert not rejects(count(rate), _poisson_patterns(rate, clients))
    assert rejects(count(1.02 * rate), _poisson_patterns(rate, clients))


def test_poisson_slots():
    c = draw_clients(sampling.poisson(CLIENTS, 0.4, capacity=CLIENTS), 500)
    taken = c.times_drawn > 0
    assert (
        ((c.ids < CLIENTS) == taken).all()
        and (c.ids[~taken] == CLIENTS).all()
        and (c.repeat_index == 0).all()
    )
    assert all(len(set(i[t])) == t.sum() for i, t in zip(c.ids, taken)) and (c.overflow == 0).all()
    all_in = draw_clients(sampling.poisson(CLIENTS, 1.0), 5)
    assert (all_in.times_drawn == 1).all()
    traced = jax.jit(
        lambda q: sampling.poisson(CLIENTS, q, capacity=CLIENTS).draw(KEY).times_drawn.sum()
    )
    assert int(traced(1.0)) == CLIENTS and int(traced(0.0)) == 0


def test_poisson_capacity_changes_who_fits_and_nothing_else():
    wide, tight = (
        draw_clients(sampling.poisson(CLIENTS, 0.4, capacity=k), 500) for k in (CLIENTS, 4)
    )
    fits = (wide.times_drawn > 0).sum(1) <= 4
    assert (wide.ids[fits, :4] == tight.ids[fits]).all() and (tight.overflow[fits] == 0).all()
    assert ((wide.times_drawn > 0).sum(1) - 4 == tight.overflow)[~fits].all() and (~fits).any()


@pytest.mark.parametrize(
    "clients, rate", [(1000, 0.01), (100, 0.3), (50, 0.9), (1_000_000, 1e-3), (20, 0.001)]
)
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
        assert (
            stats.binom.sf(rows, size, min(1.0, expected / size))
            <= sampling.OVERFLOW / sampling.HORIZON**2
        )
    assert rows < 3 * expected + 12 * np.sqrt(expected) + 50


SHARE = np.array([1.0, 2.0, 3.0, 4.0])


@pytest.mark.parametrize("weights", [None, SHARE], ids=["uniform", "weights"])
def test_with_replacement_has_the_law_of_independent_draws(weights):
    """All multisets of 3 of 4 clients.  A share that is 10 per cent off must be seen."""
    n = 100_000
    c = draw_clients(sampling.with_replacement(4, 3, weights=weights), n)
    times = np.zeros((n, 4), int)
    np.add.at(
        times, (np.repeat(np.arange(n), 3), np.minimum(c.ids, 3).ravel()), c.times_drawn.ravel()
    )
    assert (times.sum(1) == 3).all() and ((c.times_drawn > 0) == (c.ids < 4)).all()
    assert all(
        len(set(i[k > 0])) == (k > 0).sum() for i, k in zip(c.ids[:200], c.times_drawn[:200])
    )  # once a round

    def law(share):
        share = share / share.sum()
        return [stats.multinomial.pmf(m, 3, share) for m in multisets]

    multisets = [m for m in itertools.product(range(4), repeat=4) if sum(m) == 3]
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


# --- first responders

MEANS = np.array([1.0, 1.5, 2.0, 3.0, 4.0])


def _race(means, k):
    """Probabilities of the subsets of the k fastest of exponential latencies: the next one is i at
    rate 1 / mean_i."""
    rates, law = 1 / np.asarray(means), []
    for subset in itertools.combinations(range(len(means)), k):
        law.append(
            sum(
                np.prod(
                    [
                        rates[i] / (rates.sum() - rates[list(order[:n])].sum())
                        for n, i in enumerate(order)
                    ]
                )
                for order in itertools.permutations(subset)
            )
        )
    return np.array(law)


def test_first_responders_follow_the_race():
    """All ten pairs of five exponential latencies.  One client that is ten per cent faster must be
    seen."""
    c = draw_clients(sampling.first_responders(5, 2, MEANS), 100_000)
    assert (c.times_drawn == 1).all() and (c.repeat_index == 0).all() and (c.overflow == 0).all()
    found = subset_counts(codes(c.ids, c.times_drawn > 0, 5), 5, 2)
    assert not rejects(found, _race(MEANS, 2))
    assert rejects(found, _race(MEANS * [1, 0.9, 1, 1, 1], 2)) and rejects(found, np.full(10, 0.1))


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
        uniform = draw_clients(sampling.without_replacement(clients, 3), n)
        alike = draw_clients(
            sampling.first_responders(clients, 3, np.full(clients, 7.3), jitter=jitter), n
        )
        assert (np.sort(alike.ids) == np.sort(uniform.ids)).all()
    assert sampling.first_responders(CLIENTS, 3).scheme == "without_replacement"
    assert (
        draw_clients(sampling.first_responders(CLIENTS, 3, jitter=jitter), 9).ids
        == draw_clients(sampling.without_replacement(CLIENTS, 3), 9).ids
    ).all()


def test_fast_clients_take_part_in_every_round():
    """K_i = T for the fast and 0 for the slow as the random part vanishes; with it, K_i falls as
    the mean grows."""
    rounds, means = 400, np.array([1.0, 9.0, 1.2, 9.5, 1.1, 9.9, 9.7])

    def times(jitter, m):
        ids = draw_clients(sampling.first_responders(CLIENTS, 3, m, jitter=jitter), rounds).ids
        return np.bincount(ids.ravel(), minlength=CLIENTS)

    assert times(0.01, means).tolist() == [rounds, 0, rounds, 0, rounds, 0, 0]
    spread = times(1.0, 2.0 ** np.arange(CLIENTS))
    assert (np.diff(spread) < 0).all() and spread.sum() == 3 * rounds and spread[-1] > 0


def test_first_responders_come_in_order():
    """The first of a large cohort are the small cohort; the unit of time does not matter; latencies
    may be traced."""
    means = jnp.asarray(2.0 ** np.arange(CLIENTS))
    small, large, minutes = (
        draw_clients(sampling.first_responders(CLIENTS, k, m, jitter=0.5), 100).ids
        for k, m in ((2, means), (5, means), (2, 64 * means))
    )
    assert (small == large[:, :2]).all() and (small == minutes).all()
    traced = jax.jit(
        jax.vmap(lambda m, j: sampling.first_responders(CLIENTS, 1, m, jitter=j).draw(KEY).ids[0])
    )
    slow = jnp.stack([jnp.full(CLIENTS, 50.0).at[i].set(1.0) for i in range(CLIENTS)])
    assert traced(slow, jnp.full(CLIENTS, 1e-3)).tolist() == list(range(CLIENTS))


def test_what_first_responders_claim():
    sampler = sampling.first_responders(CLIENTS, 3, MEANS[[0, 1, 2, 3, 4, 0, 0]])
    assert sampler.scheme == "first_responders" and sampler.share is None and sampler.rate is None
    assert (
        float(sampler.expected) == 3
        and sampler.capacity == 3
        and sampling.adjacency(sampler) == "replace_one"
    )


# --- what samplers have in common


@pytest.mark.parametrize(
    "clients, weights",
    [
        (4, SHARE),
        (1, [3.0]),
        (100, np.r_[np.full(50, 3e-6), np.ones(50)]),
        (3, [1e-30, 1.0, 1e-30]),
        (90, None),
        (100_000, None),
    ],
)
def test_shares_are_those_that_are_drawn(clients, weights, monkeypatch):
    """All 2^32 words, counted: none is nobody's, no client is without, and no client is charged for
    less than it has."""
    sampler = sampling.with_replacement(
        clients, 2, weights=np.linspace(1, 2, clients) if weights is None else weights
    )
    edges = np.r_[0, np.asarray(sampler.draw.data["edges"], np.int64), 2**32]
    drawn, charged = np.diff(edges) / 2.0**32, attendance(sampler).share
    assert drawn.min() > 0 and drawn.sum() == 1 and len(drawn) == clients
    assert (drawn <= charged).all() and np.allclose(charged, drawn, rtol=2e-7)
    wanted = np.linspace(1, 2, clients) if weights is None else np.asarray(weights)
    np.testing.assert_allclose(drawn, wanted / wanted.sum(), rtol=1e-4, atol=clients / 2**32)
    # words at both ends of each client's part are its own
    words = np.stack([edges[:-1], edges[1:] - 1])[:, :40].astype(np.uint32).reshape(-1)
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(words))
    cohort = sampling.with_replacement(
        clients,
        len(words),
        np.linspace(1, 2, clients) if weights is None else weights,
        independent=True,
    )
    np.testing.assert_array_equal(cohort.draw(KEY).ids, np.repeat(np.arange(min(clients, 40)), 2))


@pytest.mark.by_default("<lambda>1", "<lambda>4")
@pytest.mark.parametrize(
    "make",
    [
        lambda: sampling.without_replacement(50, 7),
        lambda: sampling.with_replacement(4, 3, weights=SHARE),
        lambda: sampling.poisson(50, 0.3),
        lambda: sampling.without_replacement(40_000, 100),
        lambda: sampling.with_replacement(40_000, 100),
        lambda: sampling.poisson(40_000, 0.01),
        lambda: sampling.first_responders(20, 5, np.arange(1.0, 21)),
    ],
)
def test_draws_are_the_same_in_64_bits(make):
    """Words stay words of 32 bits where JAX is told to take 64: an edge or a rate would mean
    something else."""
    here = jax.jit(lambda key: make().draw(key))(KEY)
    with jax.enable_x64(True):
        there = jax.jit(lambda key: make().draw(key))(KEY)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there)))
    assert len(set(np.asarray(here.ids).tolist())) > 1


def test_poisson_batches_are_the_same_in_64_bits():
    here = jax.jit(lambda key: batches.poisson(3.0).draw(key, 1, 30, 40))(KEY)
    with jax.enable_x64(True):
        there = jax.jit(lambda key: batches.poisson(3.0).draw(key, 1, 30, 40))(KEY)
    assert all(np.array_equal(a, b) for a, b in zip(here, there)) and here[1].any()


@pytest.mark.parametrize(
    "sampler",
    [
        sampling.without_replacement(CLIENTS, 3),
        sampling.poisson(CLIENTS, 0.5),
        sampling.with_replacement(CLIENTS, 3),
        sampling.first_responders(CLIENTS, 3, np.arange(1.0, 1 + CLIENTS)),
    ],
    ids=lambda s: s.scheme,
)
def test_cohorts_depend_on_the_key_and_only_on_it(sampler):
    a, b, other = (draw_clients(sampler, 50, jax.random.key(s)) for s in (0, 0, 1))
    assert (a.ids == b.ids).all() and (a.ids != other.ids).any()
    assert len({tuple(i) for i in a.ids}) > 5  # another round, another cohort


# --- rows


@pytest.mark.by_default("floyd-4", "floyd-5")
@pytest.mark.parametrize(
    "size", [4, 5, 6, 9]
)  # of 3: all but one or two drawn as those left out, and more
@pytest.mark.parametrize("branch", ["floyd", "distinct"])
def test_batches_without_replacement_are_uniform_over_subsets(branch, size, monkeypatch):
    if branch == "distinct":
        monkeypatch.setattr(uniform, "MAX_FLOYD_SIZE", 0)
    n, many = 60_000, math.comb(size, 3)
    slots, mask, overflow = draw_rows(batches.without_replacement(3), n, size=size)
    assert mask.all() and (overflow == 0).all() and slots.min() >= 0 and slots.max() < size
    found = subset_counts(codes(slots, mask, 9), size, 3)
    assert not rejects(found, np.full(many, 1 / many))
    favoured = np.array(
        [1.1 if size - 1 in s else 1.0 for s in itertools.combinations(range(size), 3)]
    )
    assert rejects(
        np.random.default_rng(0).multinomial(n, favoured / favoured.sum()), np.full(many, 1 / many)
    )


def _floyd(draws, top):
    """Floyd's walk as it is printed."""
    chosen = []
    for draw, last in zip(draws, top, strict=True):
        chosen.append(last if draw in chosen else draw)
    return chosen


WALKS = dict(cpu=uniform._resolve_in_loop, elsewhere=uniform._resolve_at_once)


@functools.cache
def _all_walks(walk):
    return jax.jit(jax.vmap(walk, (0, None)))


@pytest.mark.parametrize("walk", WALKS.values(), ids=list(WALKS))
@pytest.mark.parametrize(
    "size, count", [(n, b) for n in range(1, 7) for b in range(1, min(n, 5) + 1)]
)
def test_floyds_walk_for_all_draws_there_are(walk, size, count):
    top = np.arange(size - count, size, dtype=np.int32)
    every = np.array(list(itertools.product(*(range(last + 1) for last in top))), np.int32)
    # as many rows in all cases, so that a program serves all sizes
    rows = np.pad(every, ((0, 720 - len(every)), (0, 0)), mode="edge")
    found = np.asarray(_all_walks(walk)(rows, top))[: len(every)]
    assert found.dtype == np.int32 and found.tolist() == [_floyd(row, top) for row in every]
    assert all(len(set(row)) == count for row in found.tolist())


@pytest.mark.by_default("1-elsewhere", "32-cpu", "33-elsewhere", "64-elsewhere")
@pytest.mark.parametrize("walk", WALKS.values(), ids=list(WALKS))
@pytest.mark.parametrize("count", [1, 10, 31, 32, 33, 63, 64])
def test_floyds_walk_at_random(walk, count):
    """Where much is taken already, in long chains, and where nothing is; at both ends of a word."""
    r, walk = np.random.default_rng(count), jax.jit(jax.vmap(walk))
    for size in (count, count + 1, 2 * count, 100_000):
        top = np.arange(size - count, size, dtype=np.int32)
        draws = r.integers(0, top + 1, (400, count), dtype=np.int32)
        draws[0] = size - count  # the first draw again and again
        draws[1] = np.maximum(top - 1, 0)  # each takes the number of the one before
        draws[2, 1:] = top[:-1]
        draws[2, 0] = top[0]
        tops = np.broadcast_to(top, draws.shape)
        assert np.asarray(walk(draws, tops)).tolist() == [_floyd(row, top) for row in draws]


def test_an_accelerator_draws_without_a_loop(traced_for):
    for backend, platform in (("cpu", "cpu"), ("gpu", "cuda"), ("tpu", "tpu")):
        traced_for(backend)
        draw = jax.jit(lambda key, size: uniform.subset(key, size, 40, 100)).trace(KEY, 100)
        text = draw.lower(lowering_platforms=(platform,)).as_text()
        assert ("stablehlo.while" in text) == (backend == "cpu"), backend


@pytest.mark.parametrize("batch", [65, 400, 3000])
def test_draws_suffice_for_large_batches(batch):
    """`num_draws`: fewer than `batch` distinct numbers of 2 * batch are a matter of 1e-20;
    of fewer draws, not."""

    def too_few(draws):
        chance, held = (
            np.eye(1, batch + 1)[0],
            np.arange(batch),
        )  # of each count of distinct numbers
        for _ in range(draws):
            rise = chance[:batch] * (1 - held / (2 * batch))
            chance[:batch] -= rise
            chance[1:] += rise
        return chance[:batch].sum()

    assert too_few(uniform.num_draws(batch)) < 1e-20
    assert too_few(uniform.num_draws(batch) - math.ceil(7 * math.sqrt(batch)) - 20) > 1e-4


@pytest.mark.by_default("300")
@pytest.mark.parametrize("size", [67, 131, 132, 300])
def test_large_batches_without_replacement(size):
    """The branch for more than 64 rows as it is: exactly 66 distinct ones, each row in and left out
    equally often."""
    n = 20_000
    slots, mask, _ = draw_rows(batches.without_replacement(66), n, size=size, width=310)
    assert (
        mask.all()
        and slots.min() >= 0
        and slots.max() < size
        and (np.diff(np.sort(slots, 1), axis=1) > 0).all()
    )
    if size == 67:  # one is left out: independent draws
        assert not rejects(
            np.bincount(67 * 66 // 2 - slots.sum(1), minlength=67), np.full(67, 1 / 67)
        )
    share = 66 / size
    off = lambda counts: np.abs(counts - n * share).max() / math.sqrt(n * share * (1 - share))
    assert off(np.bincount(slots.ravel(), minlength=size)) < 5.5  # 300 normals: false alarm < 2e-5
    assert off(np.bincount(np.minimum(slots, size - 2).ravel(), minlength=size)) > 5.5


def test_steps_of_a_round_are_independent():
    """Pairs of batches of two steps: 10 x 10 subsets.  The same batch twice must be seen."""
    one, two = (draw_rows(batches.without_replacement(2), 60_000, size=5, step=s) for s in (0, 1))
    a, b = codes(one[0], one[1], 9), codes(two[0], two[1], 9)
    pair = lambda a, b: np.unique(a * 64 + b, return_counts=True)[1]
    assert len(pair(a, b)) == 100 and not rejects(pair(a, b), np.full(100, 1 / 100))
    mixed = np.where(np.arange(len(a)) % 10 == 0, a, b)
    assert rejects(pair(a, mixed), np.full(100, 1 / 100))


def test_batches_with_replacement_are_independent_draws():
    slots, mask, _ = draw_rows(batches.with_replacement(2), 60_000, size=5)
    assert mask.all()
    pairs = np.bincount(slots[:, 0] * 5 + slots[:, 1], minlength=25)
    assert not rejects(pairs, np.full(25, 1 / 25))
    assert rejects(np.where(np.arange(25) % 6 == 0, 0.9, 1.0) * pairs, np.full(25, 1 / 25))


@pytest.mark.by_default("rate")
@pytest.mark.parametrize(
    "make",
    [lambda q: batches.poisson(5 * q), lambda q: batches.poisson(rate=q, capacity=5)],
    ids=["expected", "rate"],
)
def test_poisson_batches_are_independent_at_their_rate(make):
    n, rate = 200_000, 0.45

    def count(q):
        slots, mask, overflow = draw_rows(make(q), n, size=5)
        assert (overflow == 0).all()
        return np.bincount(codes(slots, mask, 9), minlength=32)

    assert not rejects(count(rate), _poisson_patterns(rate, 5))
    assert rejects(count(1.02 * rate), _poisson_patterns(rate, 5))


def test_poisson_batches_of_small_clients_and_overflow():
    slots, mask, overflow = draw_rows(batches.poisson(8.0), 50, size=3)
    assert (mask.sum(1) == 3).all() and (overflow == 0).all()
    _, mask, overflow = draw_rows(batches.poisson(rate=1.0, capacity=4), 50, size=7)
    assert (mask.sum(1) == 4).all() and (overflow == 3).all()


@pytest.mark.by_default("1-1", "1-7", "3-7", "9-6", "3-4")
@pytest.mark.parametrize("size", [1, 4, 6, 7, 9])
@pytest.mark.parametrize("batch", [1, 3, 4, 9, 12])
def test_epochs_cover_each_row_once(size, batch):
    scheme = batches.epochs(batch)
    draw = jax.jit(jax.vmap(lambda s: scheme.draw(KEY, s, jnp.int32(size), 9)))
    per_epoch = -(-size // batch)
    slots, mask, overflow = map(np.asarray, draw(jnp.arange(3 * per_epoch)))
    orders = []
    for e in range(3):
        part = slice(e * per_epoch, (e + 1) * per_epoch)
        used = slots[part][mask[part]]
        assert sorted(used) == list(range(size))
        assert (mask[part].sum(1) == [min(batch, size - k * batch) for k in range(per_epoch)]).all()
        orders.append(tuple(used))
    assert size < 6 or len(set(orders)) == 3  # shuffled anew
    assert (overflow == 0).all()


def test_epochs_shuffle_uniformly():
    slots, mask, _ = draw_rows(batches.epochs(4), 40_000, size=4)
    assert mask.all()
    seen = np.unique((slots * 5 ** np.arange(4)).sum(1), return_counts=True)[1]
    assert len(seen) == 24 and not rejects(seen, np.full(24, 1 / 24))
    assert rejects(seen * np.where(np.arange(24) < 6, 0.9, 1.0), np.full(24, 1 / 24))


def test_short_clients():
    slots, mask, _ = draw_rows(batches.without_replacement(5, short="all"), 3, size=4)
    assert (mask == [True] * 4 + [False]).all() and (slots[:, :4] == np.arange(4)).all()
    slots, mask, _ = draw_rows(batches.without_replacement(70, short="all"), 3, size=4)
    assert (mask.sum(1) == 4).all() and (slots[:, :4] == np.arange(4)).all()
    for scheme in SCHEMES.values():
        assert draw_rows(scheme, 3, size=0)[1].sum() == 0  # nobody's rows are nobody's


SCHEMES = dict(
    full=batches.full(),
    floyd=batches.without_replacement(3),
    distinct=batches.without_replacement(66, short="all"),
    with_replacement=batches.with_replacement(4),
    poisson=batches.poisson(3.0),
    rate=batches.poisson(rate=0.4, capacity=9),
    epochs=batches.epochs(3),
)


@pytest.mark.by_default("floyd", "poisson", "epochs")
@pytest.mark.parametrize("name", SCHEMES)
def test_draws_never_depend_on_padding(name):
    """Nor on anything but (key, step, size)."""
    scheme, size = SCHEMES[name], 100 if name == "distinct" else 7
    for step in (0, 5):
        narrow = draw_rows(scheme, 40, size=size, width=size, step=step)
        wide = draw_rows(scheme, 40, size=size, width=4 * size + 3, step=step)
        for a, am, b, bm in zip(*narrow[:2], *wide[:2]):
            assert a[am].tolist() == b[bm].tolist()
    again, other = (
        draw_rows(scheme, 40, size=size, width=size, key=k) for k in (KEY, jax.random.key(9))
    )
    assert (again[0] == draw_rows(scheme, 40, size=size, width=size)[0]).all()
    if name != "full":
        differ = lambda u, v: any(
            a[am].tolist() != b[bm].tolist() for a, am, b, bm in zip(*u[:2], *v[:2])
        )
        assert differ(again, other)
        assert differ(again, draw_rows(scheme, 40, size=size, width=size, step=7))


def test_gather_reads_zeros_in_empty_slots():
    rows = jfl.Rows(
        jnp.arange(20.0)[:, None], jnp.arange(20), jnp.array([7, 3, 0, 0]), jnp.int32(2)
    )
    got = batches.gather(rows, jnp.array([1, 9, 0]), jnp.array([True, False, True]))
    assert got.y.tolist() == [3, 0, 7] and got.mask.tolist() == [True, False, True]


# --- arguments


WEIGHTS = [1.0] * 6
NAN = float("nan")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sampling.full(0), "integer clients"),
        (lambda: sampling.without_replacement(7, 2.5), "integer cohort"),
        (lambda: sampling.without_replacement(7, 8), "cohort <= 7, but got cohort=8"),
        (lambda: sampling.with_replacement(7, 3, weights=[1.0, 2.0]), "one weight"),
        (lambda: sampling.with_replacement(7, 3, weights=[*WEIGHTS, 0.0]), "weights > 0"),
        (lambda: sampling.with_replacement(7, 3, weights=[*WEIGHTS, NAN]), "weights > 0"),
        (lambda: sampling.poisson(7, 1.5), "rate"),
        (lambda: sampling.poisson(7, 0.5, capacity=8), "capacity <= 7, but got capacity=8"),
        (lambda: jax.jit(lambda q: sampling.poisson(7, q).draw(KEY).ids)(0.5), "traced"),
        (lambda: sampling.truncated_poisson(10, 0.5, 11), "capacity <= 10"),
        (lambda: sampling.truncated_poisson(10, 0.0, 4), "rate"),
        (lambda: sampling.first_responders(2, 1, [1.0, 0.0]), "latency > 0"),
        (lambda: sampling.first_responders(2, 1, [1.0, 2.0], jitter=1.5), "jitter"),
        (lambda: sampling.first_responders(2, 1, jitter=0.0), "jitter"),
        (lambda: sampling.first_responders(CLIENTS, 3, 1.0), "one latency"),
        (lambda: sampling.first_responders(7, 8), "integer cohort <= 7"),
        (lambda: sampling.min_separation(10, 4, 3), "cohort <= 3, but got cohort=4"),
        (lambda: sampling.min_separation(10, 4, 1), "1 is sampling.without_replacement"),
        (lambda: sampling.cyclic_poisson(10, 0.5, 1), "1 is sampling.poisson"),
        (lambda: sampling.cyclic_poisson(10, 1.5, 2), "rate"),
        (lambda: sampling.cyclic_poisson(10, 0.5, 2, capacity=11), "capacity <= 10"),
        (lambda: batches.without_replacement(0), "integer batch"),
        (lambda: batches.without_replacement(3, short="some"), "short"),
        (lambda: batches.poisson(), "either"),
        (lambda: batches.poisson(3.0, rate=0.5), "either"),
        (lambda: batches.poisson(-1.0), "batch > 0"),
        (lambda: batches.poisson(rate=0.5), "capacity together with rate"),
        (lambda: batches.poisson(rate=NAN, capacity=4), "rate"),
        (lambda: batches.truncated_poisson(4.0, 0), "capacity"),
    ],
)
def test_arguments_that_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# --- groups that take turns


def rounds_of(sampler, key, rounds):
    """Who takes part, Bool[rounds, clients]."""
    one = jax.jit(lambda key, r: cohorts.draw_cohort(sampler, key, r))
    out = np.zeros((rounds, sampler.clients), bool)
    for r in range(rounds):
        cohort = jax.tree.map(np.asarray, one(key, r))
        assert cohort.overflow == 0 and (cohort.repeat_index == 0).all()
        here = cohort.ids[cohort.times_drawn > 0]
        assert len(set(here.tolist())) == len(here)
        out[r, here] = True
    return out


def closest(took_part):
    """The fewest rounds between two participations of a client."""
    return min(
        int(np.diff(np.flatnonzero(column)).min()) for column in took_part.T if column.sum() > 1
    )


@pytest.mark.parametrize("clients_, cohort, separation", [(12, 3, 4), (13, 2, 4), (7, 3, 2)])
def test_a_client_stays_away_for_as_long_as_promised(clients_, cohort, separation):
    sampler = sampling.min_separation(clients_, cohort, separation)
    for seed in range(5):
        seen = rounds_of(sampler, jax.random.key(seed), 10 * separation)
        assert (seen.sum(1) == cohort).all()
        assert closest(seen) == separation
    # a sampler without groups would be seen
    free = sampling.without_replacement(clients_, cohort)
    assert closest(rounds_of(free, KEY, 10 * separation)) < separation


def test_turns_of_all_are_a_cyclic_order():
    seen = rounds_of(sampling.min_separation(12, 3, 4), KEY, 8)
    assert (seen[:4].sum(0) == 1).all() and (seen[:4] == seen[4:]).all()


def test_a_cohort_of_a_group_is_a_uniform_subset():
    """Groups of 8, of which 2 are drawn: which pair, in 6,000 rounds of one group."""
    sampler = sampling.min_separation(16, 2, 2)
    seen = rounds_of(sampler, KEY, 2)
    draw = jax.jit(jax.vmap(lambda r: cohorts.draw_cohort(sampler, KEY, r).ids))
    ids = np.sort(np.asarray(draw(2 * jnp.arange(6000))), axis=1)
    group = np.unique(ids)
    assert len(group) == 8 and not set(group) & set(np.flatnonzero(seen[1]))
    pairs = {pair: k for k, pair in enumerate(itertools.combinations(group.tolist(), 2))}
    counts = np.bincount([pairs[tuple(pair)] for pair in ids.tolist()], minlength=28)
    assert not rejects(counts, np.full(28, 1 / 28))
    counts[0] += counts[1] + counts[2]
    counts[1] = counts[2] = 6
    assert rejects(counts / counts.sum() * 6000, np.full(28, 1 / 28))


def test_groups_are_drawn_by_the_seed_and_every_client_may_be_in_any():
    sampler = sampling.min_separation(7, 2, 3)

    @jax.jit
    @jax.vmap
    def groups(key):
        """The round of three in which a client may take part: who is drawn, over many rounds."""
        rounds = jnp.arange(60)
        ids = jax.vmap(lambda r: sampler.draw(key, r).ids)(rounds)
        return jnp.zeros(7, int).at[ids.ravel()].set(jnp.repeat(rounds % 3, 2))

    group = groups(jax.random.split(KEY, 3000))
    counts = np.stack([(np.asarray(group) == g).sum(0) for g in range(3)])
    for client in range(7):
        assert not rejects(counts[:, client], np.full(3, 1 / 3))
    # of three clients in a row, each is in another group
    assert (np.sort(np.asarray(group)[:, :3], axis=1) == np.arange(3)).all()


def test_cyclic_poisson_is_poisson_in_a_group():
    """A client joins in its group's rounds with its rate, on its own; in others never."""
    rate, turns, n = 0.3, 3, 3000
    sampler = sampling.cyclic_poisson(8, rate, turns, capacity=8)

    def one(key):
        draw = lambda r: cohorts.draw_cohort(sampler, key, r)
        ids = jax.vmap(draw)(jnp.arange(2 * turns)).ids
        return jax.vmap(lambda i: jnp.zeros(8, bool).at[i].set(True, mode="drop"))(ids)

    seen = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, n)))  # [n, rounds, clients]
    times = seen.reshape(n, 2, turns, 8).sum(1)  # by group, clients
    assert ((times > 0).sum(1) <= 1).all()  # only in rounds of one group
    joined = times.sum(1)[:, 0]
    law = [(1 - rate) ** 2, 2 * rate * (1 - rate), rate**2]
    assert not rejects(np.bincount(joined, minlength=3), law)
    assert rejects(np.bincount(joined, minlength=3), [(1 - 0.4) ** 2, 2 * 0.4 * 0.6, 0.4**2])
    # two clients join independently, whatever their groups
    both = np.bincount(2 * seen[:, 0, 0] + seen[:, 0, 1], minlength=4)
    p = rate / turns
    assert not rejects(both, [(1 - p) ** 2, p * (1 - p), p * (1 - p), p**2])
    assert sampler.expected == pytest.approx(8 * rate / turns)


def test_overflow_of_a_cyclic_cohort_is_counted_and_charged():
    few = sampling.cyclic_poisson(8, 0.9, 2, capacity=1)
    lost = [int(cohorts.draw_cohort(few, KEY, r).overflow) for r in range(20)]
    assert max(lost) > 0
    assert attendance(few).overflow > 0.5
    enough = sampling.cyclic_poisson(1000, 0.5, 5)
    assert attendance(enough).overflow < 1e-17 and enough.capacity < 250


def truncated_by_hand(key, clients_, rate, capacity):
    """Who joins, and of more than there is room for those whose words are the smallest."""
    words = np.asarray(jax.random.bits(key, (clients_,), jnp.uint32))
    joined = np.flatnonzero(np.asarray(uniform.below(jnp.asarray(words), rate)))
    kept = joined[np.argsort(words[joined], kind="stable")][:capacity]
    return np.sort(kept)


@pytest.mark.slow
def test_a_truncated_cohort_equals_a_loop():
    sampler = sampling.truncated_poisson(40, 0.3, 12)
    sizes = set()
    for seed in range(40):
        key = jax.random.key(seed)
        cohort, by_hand = sampler.draw(key), truncated_by_hand(key, 40, 0.3, 12)
        sizes.add(len(by_hand))
        np.testing.assert_array_equal(
            cohort.ids, np.pad(by_hand, (0, 12 - len(by_hand)), constant_values=40)
        )
        np.testing.assert_array_equal(cohort.times_drawn, np.arange(12) < len(by_hand))
        assert cohort.overflow == 0
    assert max(sizes) == 12 and min(sizes) < 12
    whole = sampling.truncated_poisson(40, 1.0, 12).draw(KEY)
    assert (whole.times_drawn == 1).all()


def test_of_more_than_there_is_room_for_a_uniform_subset_comes():
    """4 clients, room for 2, rate 0.8: the law of all subsets; false alarms as `rejects` has."""
    sampler, rate = sampling.truncated_poisson(4, 0.8, 2), 0.8
    ids = np.asarray(jax.jit(jax.vmap(lambda k: sampler.draw(k).ids))(jax.random.split(KEY, 8000)))
    law = {}
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
    draw = batches.truncated_poisson(4.0, 6)
    for step, size in ((0, 20), (1, 13), (2, 3), (3, 0)):
        slots, mask, overflow = draw.draw(KEY, step, size, 20)
        words = np.asarray(jax.random.bits(jax.random.fold_in(KEY, step), (20,), jnp.uint32))
        rate = np.float32(min(1.0, 4.0 / max(size, 1)))
        joined = np.asarray(uniform.below(jnp.asarray(words), rate)) & (np.arange(20) < size)
        joined = np.flatnonzero(joined)
        kept = np.sort(joined[np.argsort(words[joined], kind="stable")][:6])
        np.testing.assert_array_equal(np.asarray(slots)[np.asarray(mask)], kept)
        assert overflow == 0 and len(slots) == 6
    few, mask, _ = draw.draw(KEY, 0, 3, 4)  # fewer rows than slots
    assert len(few) == 6 and mask.sum() <= 3
    assert batches.truncated_poisson(100.0).batch == sampling.truncated_poisson(1000, 0.1).capacity
