"""Scale: draws that cost their cohort alone, rows that stay on the host, and many devices that
share a run.

A population must be the same federation as one on the device, and any number of devices the same
run as one: cohorts, batches and noise are addressed, so only the order of summation may differ.
"""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import ROOT
from helpers.problems import (
    close,
    flat,
    make_federation,
    noisy_grad,
    on_host,
    same_bits,
    squared,
    start_params,
)
from scipy import stats

import jfl
from jfl import sampling
from jfl.core.random_streams import Stream, stream_key
from jfl.data import checksum, host_rows
from jfl.engine.round import run_sampling_key
from jfl.sampling import uniform
from jfl.sampling.clients import draw_cohort

MANY = sampling.MIN_SPARSE_CLIENTS


_draw = jax.jit(lambda draw, key: draw(key))


def draw_of(sampler):
    return lambda key: _draw(sampler.draw, key)


# --- draws of a few clients among many


@pytest.mark.parametrize(
    "clients, cohort", [(MANY, 1), (MANY, 700), (10**6, 1000), (MANY, MANY // 2)]
)
def test_a_cohort_of_many_clients_has_no_client_twice(clients, cohort):
    sampler = jfl.sampling.without_replacement(clients, cohort)
    assert sampler.draw.function is sampling._draw_few
    for seed in range(3):
        c = draw_of(sampler)(jax.random.key(seed))
        ids = np.asarray(c.ids)
        assert len(set(ids.tolist())) == cohort and ids.min() >= 0 and ids.max() < clients
        assert np.all(np.asarray(c.times_drawn) == 1) and int(c.overflow) == 0


def _p_of_uniform(ids, clients, cells=64):
    counts = np.bincount(np.asarray(ids).ravel() * cells // clients, minlength=cells)
    return stats.chisquare(counts).pvalue


@pytest.mark.slow
def test_every_client_is_as_likely_wherever_it_stands():
    """Chi-square over 64 ranges of ids, false alarm 1e-4; ids of which few are taken from the upper
    half are found."""
    sampler = jfl.sampling.without_replacement(MANY, 400)
    ids = jax.vmap(lambda k: sampler.draw(k).ids)(jax.random.split(jax.random.key(3), 200))
    assert _p_of_uniform(ids, MANY) > 1e-4
    biased = np.where(
        np.arange(ids.size).reshape(ids.shape) % 10 == 0, np.asarray(ids) % (MANY // 2), ids
    )
    assert _p_of_uniform(biased, MANY) < 1e-4
    # which of the slots a client gets is in order of the draw: no slot prefers low ids
    assert _p_of_uniform(ids[:, 0], MANY, 16) > 1e-4 and _p_of_uniform(ids[:, -1], MANY, 16) > 1e-4


def test_too_few_new_clients_are_drawn_again(monkeypatch):
    """With no draw to spare about every second attempt fails, and the cohort is still whole."""
    monkeypatch.setattr(uniform, "NUM_SPARE_DEVIATIONS", 0)
    whole = jax.jit(jax.vmap(lambda key: uniform.sparse_subset(key, 512, 200, 200)))
    for ids in np.asarray(whole(jax.random.split(jax.random.key(0), 12))):
        assert len(set(ids.tolist())) == 200


@pytest.mark.parametrize("rate", [0.3, 0.1, 2.0**-20, 1e-7, 1.0])
def test_a_word_lies_below_a_rate_as_often_as_it_says(rate):
    """Of all words the fraction is the float32 rate rounded down to 2^-32: checked at the words
    around the edge."""
    edge = int(np.floor(float(np.float32(rate)) * 2**32))
    words = np.clip(np.array([0, edge - 1, edge, edge + 1, 2**32 - 1], np.int64), 0, 2**32 - 1)
    found = np.asarray(uniform.below(jnp.asarray(words.astype(np.uint32)), jnp.float32(rate)))
    assert found.tolist() == (words < edge).tolist()


def _law(clients, rate, draws=4000):
    sampler = jfl.sampling.poisson(clients, rate)
    cohorts = jax.jit(jax.vmap(sampler.draw))(jax.random.split(jax.random.key(7), draws))
    return np.asarray((cohorts.times_drawn > 0).sum(1)), np.asarray(cohorts.ids), sampler


@pytest.mark.slow
def test_poisson_of_many_clients_has_the_binomial_law():
    """Counts by chi-square, false alarm 1e-4, over ranges of equal chance; a rate that is 5 % off
    is found."""
    clients, rate = MANY, 0.002
    count, ids, sampler = _law(clients, rate)
    assert sampler.draw.function is sampling._draw_poisson_few and sampler.capacity < clients // 100
    edges = np.unique(stats.binom.ppf(np.linspace(0, 1, 21)[1:-1], clients, rate))

    def p(rate):
        chance = np.diff(np.concatenate([[0], stats.binom.cdf(edges, clients, rate), [1]]))
        seen = np.bincount(np.searchsorted(edges, count), minlength=len(chance))
        return stats.chisquare(seen, chance * len(count)).pvalue

    assert p(rate) > 1e-4 > p(rate * 1.05)
    assert _p_of_uniform(ids[ids < clients], clients) > 1e-4
    for row, n in zip(ids[:50], count):
        assert len(set(row[:n].tolist())) == n and np.all(row[n:] == clients)


def test_poisson_capacity_is_the_tail_and_not_all_clients():
    """P(overflow) < 1e-18 in a draw, as small as that allows; among few clients all have a slot."""
    for clients, rate in ((10**4, 0.1), (10**6, 1e-3), (200, 0.1)):
        capacity = jfl.sampling.poisson(clients, rate).capacity
        assert (
            stats.binom.sf(capacity, clients, rate)
            < 1e-18
            < stats.binom.sf(capacity - 2, clients, rate)
        )
    assert jfl.sampling.poisson(50, 0.2).capacity == 50


def test_the_law_of_how_many_join_is_no_more_likely_to_overflow_than_is_charged():
    """The table's last entries are those of the binomial law, and only one word of 2^64 lies beyond
    the last one."""
    high, low = np.asarray(sampling.binomial_steps(MANY, 0.002, 150)).astype(object)
    steps = [int(h) * 2**32 + int(w) for h, w in zip(high, low)]
    assert steps == sorted(steps) and steps[-1] == 2**64 - 1
    law = stats.binom(MANY, float(np.float32(0.002)))
    for k in (40, 66, 90):
        assert abs(steps[k] / 2**64 - law.cdf(k)) < 1e-15


def test_an_overflow_of_a_rare_draw_is_counted():
    sampler = jfl.sampling.poisson(MANY, 0.002, capacity=60)
    found = [draw_of(sampler)(jax.random.key(s)) for s in range(12)]
    assert any(int(c.overflow) > 0 for c in found) and any(int(c.overflow) == 0 for c in found)
    for c in found:
        assert int((c.times_drawn > 0).sum()) == 60 or int(c.overflow) == 0


def test_capacity_changes_no_draw_of_many_clients():
    a, b = (jfl.sampling.poisson(MANY, 0.002, capacity=n) for n in (150, 400))
    for seed in range(5):
        one, two = (draw_of(s)(jax.random.key(seed)) for s in (a, b))
        n = int((one.times_drawn > 0).sum())
        assert (
            np.array_equal(np.asarray(one.ids)[:n], np.asarray(two.ids)[:n])
            and int((two.times_drawn > 0).sum()) == n
        )


# --- rounds that are released again


def test_another_attempt_draws_its_own_cohorts_and_batches():
    """Charged as another sample, it is one: noise of its own on the same sample would only be
    averaged away."""
    plan = make_plan(make_federation(), "fedavg")
    run = jfl.init(jax.random.key(0), plan)
    again = dataclasses.replace(run, attempt=jnp.int32(1))
    cohorts = jax.vmap(lambda key, r: draw_cohort(plan.sampler, key, r).ids, (None, 0))
    ids = [np.asarray(cohorts(run_sampling_key(r), jnp.arange(20))) for r in (run, again)]
    assert np.mean(np.sort(ids[0]) != np.sort(ids[1])) > 0.3
    assert same_bits(run_sampling_key(run), run.key)  # what was recorded before stays
    batches = plan.algorithm.client.data["work"].batches
    slots = jax.vmap(
        lambda key, r: batches.draw(stream_key(key, Stream.BATCH, r), 0, 9, 9)[0], (None, 0)
    )
    drawn = [np.asarray(slots(run_sampling_key(r), jnp.arange(20))) for r in (run, again)]
    assert np.mean(drawn[0] != drawn[1]) > 0.3


# --- rows on the host


def make_plan(fed, name="scaffold", **options):
    task = jfl.task(start_params(), squared)
    algorithm = getattr(jfl.algorithms, name)(
        noisy_grad(), lr=0.3, steps=2, batch=jfl.batches.without_replacement(3)
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.without_replacement(7, 5), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("scaffold", dict(weights="size")),
        ("fedavg", dict(chunk=2)),
        ("scaffold", dict(weights="size", chunk=2)),
    ],
)
def test_a_population_is_the_same_run(name, options, tmp_path):
    fed = make_federation()
    host = on_host(fed, tmp_path / "x.npy")
    assert np.array_equal(np.asarray(fed.identity), np.asarray(host.identity))
    near, far = (
        jfl.simulate(jax.random.key(1), make_plan(f, name, **options), 5, evaluate_every=2)
        for f in (fed, host)
    )
    close(
        (near.params, near.metrics, near.run.client_states),
        (far.params, far.metrics, far.run.client_states),
    )
    other = jfl.simulate(jax.random.key(2), make_plan(host, name, **options), 5, evaluate_every=2)
    assert np.abs(flat(other.params) - flat(far.params)).max() > 1e-3  # what is compared can differ


def test_a_population_goes_on_where_it_was_and_keeps_what_it_began_from():
    host = on_host(make_federation())
    plan = make_plan(host)
    whole = jfl.simulate(jax.random.key(1), plan, 6, evaluate_every=2)
    half = jfl.simulate(jax.random.key(1), plan, 4, evaluate_every=2)
    kept = jax.tree.map(np.array, half.run.client_states)
    for _ in range(2):  # also a second time from the same state
        rest = jfl.simulate(jax.random.key(9), plan, 2, evaluate_every=2, start=half.run)
        assert same_bits(
            (rest.params, rest.run.client_states), (whole.params, whole.run.client_states)
        )
        assert same_bits(kept, half.run.client_states)


def test_a_state_is_written_back_once_for_each_client_that_took_part():
    host = on_host(make_federation())
    plan = make_plan(host)
    out = jfl.simulate(jax.random.key(1), plan, 1, evaluate_every=1)
    taken = set(np.asarray(draw_cohort(plan.sampler, jax.random.key(1), 0).ids).tolist())
    changed = {
        c
        for c in range(7)
        if any(np.any(np.asarray(x)[c] != 0) for x in jax.tree.leaves(out.run.client_states))
    }
    assert changed == taken and len(taken) == 5


def test_rows_come_from_a_data_source_too():
    fed = make_federation(classes=3)
    x, y = np.asarray(fed.x), np.asarray(fed.y)

    class Source:
        def __len__(self):
            return len(y)

        def __getitem__(self, i):
            return dict(image=x[i], label=y[i])

    size = np.asarray(fed.size)
    test = (np.asarray(fed.x_test), np.asarray(fed.y_test))
    a = jfl.population((x, y), size, test=test)
    b = jfl.population(Source(), size, test=test)
    assert np.array_equal(a.identity, b.identity) and a.classes == b.classes == 3
    for one, two in zip(a.host.fetch(np.array([6, 2, 7])), b.host.fetch(np.array([6, 2, 7]))):
        assert np.array_equal(one, two) and not two[2].any()  # an id past the end has no rows
    doubled = jfl.population((x, y), size, test=test, prepare=lambda v: 2 * v)
    assert np.array_equal(doubled.host.fetch(np.array([1]))[0], 2 * a.host.fetch(np.array([1]))[0])


@pytest.mark.parametrize("at_once", [0, 2**40], ids=["threads", "one"])
@pytest.mark.parametrize("large", [0, 2**40], ids=["large", "small"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3, 3), (1, 4, 2, 5, 3)], ids=["even", "ragged"])
def test_rows_of_a_cohort_are_those_of_its_clients(sizes, ordered, large, at_once, monkeypatch):
    """Against a loop over clients, also beyond the last; rows as they are stored."""
    monkeypatch.setattr(host_rows, "MAX_SINGLE_THREAD_BYTES", at_once)
    monkeypatch.setattr(host_rows, "LARGE_CLIENT_BYTES", large)
    n, starts = sum(sizes), np.cumsum([0, *sizes])
    x = np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2)
    y = (np.arange(n) % 3).astype(np.int64)
    order = np.random.default_rng(0).permutation(n) if ordered else np.arange(n)
    fed = jfl.population(
        (x, y),
        sizes,
        order=order if ordered else None,
        test=(x[:2] / np.float32(255), y[:2]),
        prepare_row=lambda row: row / jnp.float32(255),
    )
    for ids in ([4, 0, 2, 5], [1], [5, 5], [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]):
        found = fed.host.fetch(np.array(ids))
        assert [v.dtype for v in found] == [np.uint8, np.int32]
        for i, client in enumerate(ids):
            own = order[starts[client] : starts[client + 1]] if client < len(sizes) else []
            for value, rows in zip(found, (x, y)):
                assert np.array_equal(value[i, : len(own)], rows[np.array(own, int)])
                assert value.shape[1] == max(sizes) and not value[i, len(own) :].any()


def test_rows_of_a_population_that_changed_are_refused():
    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 3
    test = (x[:2].copy(), y[:2].copy())
    fed = jfl.population((x, y), [2, 4], test=test)
    y[3] = 77
    fed.host.fetch(np.array([0]))
    with pytest.raises(ValueError, match="expected labels below 3, as before, but got 1 to 77"):
        fed.host.fetch(np.array([1]))


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(rows=(np.zeros((6, 2)), np.zeros((6, 1), int))), "the same number of rows"),
        (dict(order=np.arange(6)[None]), "6 different row numbers below 6"),
        (dict(test=(np.zeros((2, 2)), np.zeros(2, int), 2)), "too many values"),
    ],
)
def test_a_population_of_other_shapes_is_refused(change, words):
    x, y = np.zeros((6, 2)), np.arange(6) % 2
    given = dict(rows=(x, y), sizes=[2, 4], test=(x[:2], y[:2])) | change
    with pytest.raises(ValueError, match=words):
        jfl.population(**given)


def test_rows_of_64_bits_for_the_device_are_refused_before_they_are_read():
    reads = []

    class Source:
        def __len__(self):
            return 6

        def __getitem__(self, i):
            reads.append(i)
            return dict(image=np.zeros(2), label=0)

    test = (np.zeros((2, 2)), np.zeros(2, int))
    with pytest.raises(ValueError, match="at most 32 bits"):
        jfl.population(Source(), [2, 4], test=test, prepare_row=lambda row: row)
    assert len(reads) == 1


def test_rows_without_numbers():
    fed = jfl.population(
        (np.zeros((8, 0, 3), np.float32), np.arange(8) % 2),
        [2, 3, 3],
        test=(np.zeros((2, 0, 3), np.float32), np.array([0, 1])),
    )
    assert fed.host.fetch(np.array([0, 1, 2]))[0].shape == (3, 3, 0, 3)


@pytest.mark.by_default("scaffold")
@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_rows_that_are_prepared_on_the_device_are_the_same_run(name):
    """Bytes that become numbers there, and the same numbers from the host."""
    rng, sizes = np.random.default_rng(0), (3, 5, 2, 4)
    pixels, y = rng.integers(0, 256, (14, 3)).astype(np.uint8), rng.normal(size=14)
    scaled = lambda x: x * np.float32(1 / 256)
    given = dict(sizes=sizes, test=(scaled(pixels), y), classes=0)
    host = jfl.population((pixels, y), prepare=scaled, **given)
    device = jfl.population((pixels, y), prepare_row=scaled, **given)
    assert device.host.fetch(np.array([1]))[0].dtype == np.uint8
    assert np.array_equal(host.identity, device.identity)
    algorithm = getattr(jfl.algorithms, name)(
        noisy_grad(), lr=0.3, steps=2, batch=jfl.batches.without_replacement(2)
    )
    sampler = jfl.sampling.without_replacement(4, 3)
    one, other = (
        jfl.simulate(
            jax.random.key(0),
            jfl.plan(fed, jfl.task(start_params(), squared), algorithm, sampler),
            3,
            evaluate_every=3,
        )
        for fed in (host, device)
    )
    close(one, other)
    assert not np.allclose(flat(one.params), flat(start_params()), atol=1e-3)


def test_a_row_that_the_device_prepares_has_at_most_32_bits():
    x, y = np.zeros((4, 3), np.int64), np.zeros(4, np.int32)
    scaled = lambda x: x / jnp.float32(255)
    with pytest.raises(ValueError, match="at most 32 bits per number.*got int64"):
        jfl.population((x, y), [2, 2], test=(x / 255, y), prepare_row=scaled)


def test_prepared_rows_have_the_type_that_was_declared():
    """What the check of privacy sees is what runs."""
    x, y = np.arange(12, dtype=np.uint8).reshape(4, 3), np.zeros(4, np.int32)
    half = lambda row: row.astype(jnp.float16)
    fed = jfl.population((x, y), [2, 2], test=(x / 255, y), prepare_row=half)
    assert fed.host.kind[0] == fed.host.read(np.arange(2))[0].dtype == np.float32


def test_arrays_in_another_order_are_not_copied_whole(monkeypatch):
    """np.take would; and a population may be copied after it was read by threads."""
    monkeypatch.setattr(host_rows, "MAX_SINGLE_THREAD_BYTES", 0)
    x, y = np.arange(72, dtype=np.float32).reshape(6, 3, 4), np.zeros(6, np.int32)
    fed = jfl.population((x.transpose(0, 2, 1), y), [2, 2, 2], test=(x.transpose(0, 2, 1), y))
    monkeypatch.setattr(np, "take", None)
    found = fed.host.fetch(np.array([2, 0]))[0]
    assert np.array_equal(found, x.transpose(0, 2, 1)[[4, 5, 0, 1]].reshape(2, 2, 4, 3))
    assert copy.deepcopy(fed).host.slots == 2


def test_another_row_is_another_noise_and_another_checksum():
    fed = make_federation()
    changed = dataclasses.replace(fed, x=fed.x.at[-1, 0].add(1.0))
    a, b = on_host(fed), on_host(changed)
    assert not np.array_equal(a.identity, b.identity) and checksum(a) != checksum(b)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(sizes=[3, 0]), "each at least 1"),
        (dict(sizes=[50, 50]), "add up to at most"),
        (dict(sizes=[1.5]), "Int"),
        (dict(order=[0, 0, 1], sizes=[3]), "one owner"),
        (dict(order=[0, 99, 1], sizes=[3]), "row numbers"),
    ],
)
def test_a_population_refuses_what_does_not_fit(change, message):
    x, y = np.zeros((10, 2), np.float32), np.zeros(10, np.int32)
    with pytest.raises(ValueError, match=f"population.*{message}"):
        jfl.population((x, y), **(dict(sizes=[4, 4], test=(x, y)) | change))


def test_bad_rows_of_a_population_are_found_where_they_are():
    x, y = np.zeros((10, 2), np.float32), np.zeros(10, np.int32)
    x[7, 1] = np.nan
    with pytest.raises(ValueError, match="population.*rows from"):
        jfl.population((x, y), sizes=[5, 5], test=(x[:5], y[:5]))


@pytest.mark.parametrize(
    "later, message",
    [
        (
            lambda at, x, y: [(x[at[0]], y[at[0]])],
            r"rows of shape \[2\], as before, but got \[1, 2\]",
        ),
        (lambda at, x, y: [(x[a, :1], y[a]) for a in at], "rows of shape"),
    ],
)
def test_rows_that_change_after_they_were_read_are_noticed(later, message):
    """By their number and shape; one row would otherwise stand for all of a cohort."""

    class Rows:
        def __len__(self):
            return len(x)

        def __getitems__(self, at):
            return (later if begun else lambda at, x, y: [(x[a], y[a]) for a in at])(at, x, y)

        def __getitem__(self, i):
            return x[i], y[i]

    begun = False
    x, y = np.ones((12, 2), np.float32), np.arange(12) % 3
    fed = jfl.population(Rows(), [3, 4, 5], test=(x, y))
    assert fed.host.fetch(np.array([1]))[0].shape == (1, 5, 2)
    begun = True
    with pytest.raises(ValueError, match=message):
        fed.host.fetch(np.array([1]))


def test_what_needs_rows_on_the_device_says_so():
    plan = make_plan(on_host(make_federation()))
    for call in (
        lambda: jfl.run_round(jfl.init(jax.random.key(0), plan), plan),
        lambda: jfl.sweep(lambda: plan, rounds=1),
        lambda: jfl.scan(jfl.init(jax.random.key(0), plan), plan, [1]),
    ):
        with pytest.raises(ValueError, match="keeps its rows on the host"):
            call()


def test_the_same_guarantee_wherever_rows_are():
    fed = make_federation()
    a, b = (jfl.guarantee(make_plan(f), 5, 1e-5) for f in (fed, on_host(fed)))
    assert a == b


# --- many devices of one process

SCRIPT = Path(__file__).with_name("on_devices.py")


def on_devices(*what):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *what],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env=dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def judge(rows, at_least):
    assert len(rows) >= at_least
    for row in rows:
        assert row["apart"] < 2e-5, row  # order of summation
        assert row["other_seed"] > 1e-3, row  # what is compared can differ


@pytest.mark.slow
def test_eight_devices_are_one():
    """A run on 8 devices with chunks, on rows of the device and of the host, and a sweep over 2 x 4
    of them; each device holds the states of its clients alone."""
    rows = on_devices("short")
    judge(rows, 3)
    assert rows[0]["held"] == [1] and rows[0]["placed"] == [[1], [1], [6]]  # 8 do not divide 6


@pytest.mark.slow
def test_devices_add_up_half_precision_in_float32():
    """One client a chunk on 2 and on 8 devices against all at once: in half precision they would
    differ by 1e-3."""
    judge(on_devices("half"), 4)


@pytest.mark.slow
def test_any_number_of_devices_is_one():
    """1, 2, 4, 8 devices; any chunk; stateless and stateful; rows on device and host; client noise;
    sweeps."""
    rows = on_devices("long")
    judge(rows, 88)
    divided = [row["held"] for row in rows if row.get("clients") == 16]
    assert divided == [[8], [2]] * 10


def test_a_mesh_that_is_none_is_refused():
    for wrong in (0, 1.5, "all", 10**6, jax.make_mesh((1,), ("rows",))):
        with pytest.raises(ValueError, match="mesh"):
            jfl.mesh.devices(wrong)
    assert jfl.mesh.devices(None) is None
    with pytest.raises(ValueError, match="connect"):
        jfl.mesh.connect("127.0.0.1:1", 2)
    with pytest.raises(ValueError, match="connect"):
        jfl.mesh.connect("127.0.0.1:1", 2, 2)
