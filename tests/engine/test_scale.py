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
    SIZES,
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
from jfl.data import host_rows
from jfl.engine.round import run_sampling_key
from jfl.sampling import uniform
from jfl.sampling.clients import draw_cohort

MANY = sampling.MIN_SPARSE_CLIENTS


_draw = jax.jit(lambda draw, key: draw(key))


def draw_of(sampler):
    return lambda key: _draw(sampler.draw, key)


# --- draws of a few clients among many


@pytest.mark.by_default("1000000-1000", "32768-16384")
@pytest.mark.parametrize("clients, cohort", [(MANY, 1), (10**6, 1000), (MANY, MANY // 2)])
def test_a_cohort_of_many_clients_has_no_client_twice(clients, cohort):
    sampler = jfl.sampling.without_replacement(clients, cohort)
    assert sampler.draw.function is sampling._draw_few
    c = draw_of(sampler)(jax.random.key(0))
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


@pytest.mark.slow
def test_poisson_of_many_clients_has_the_binomial_law():
    """Counts by chi-square, false alarm 1e-4, over ranges of equal chance; a rate that is 5 % off
    is found."""
    clients, rate, draws = MANY, 0.002, 4000
    sampler = jfl.sampling.poisson(clients, rate)
    cohorts = jax.jit(jax.vmap(sampler.draw))(jax.random.split(jax.random.key(7), draws))
    count, ids = np.asarray((cohorts.times_drawn > 0).sum(1)), np.asarray(cohorts.ids)
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


def test_the_law_of_how_many_join_is_no_more_likely_to_overflow_than_is_charged():
    """The table's last entries are those of the binomial law, and only one word of 2^64 lies beyond
    the last one."""
    high, low = np.asarray(sampling.binomial_steps(MANY, 0.002, 150)).astype(object)
    steps = [int(h) * 2**32 + int(w) for h, w in zip(high, low)]
    assert steps == sorted(steps) and steps[-1] == 2**64 - 1
    law = stats.binom(MANY, float(np.float32(0.002)))
    for k in (40, 66, 90):
        assert abs(steps[k] / 2**64 - law.cdf(k)) < 1e-15


def test_capacity_of_a_rare_draw_changes_no_draw_and_an_overflow_is_counted():
    few, many = (jfl.sampling.poisson(MANY, 0.002, capacity=n) for n in (60, 150))
    overflowed = []
    for seed in range(12):
        one, two = (draw_of(s)(jax.random.key(seed)) for s in (few, many))
        n = int((two.times_drawn > 0).sum())
        assert int((one.times_drawn > 0).sum()) == min(n, 60) and (n <= 60) == (one.overflow == 0)
        assert n > 60 or np.array_equal(np.asarray(one.ids)[:n], np.asarray(two.ids)[:n])
        overflowed.append(n > 60)
    assert any(overflowed) and not all(overflowed)


# --- rounds that are released again


def test_another_attempt_draws_its_own_cohorts_and_batches():
    """Charged as another sample, it is one: independent noise on the same sample would only be
    averaged away."""
    plan = make_plan(make_federation(), "fedavg")
    run = jfl.init(jax.random.key(0), plan)
    again = dataclasses.replace(run, attempt=jnp.int32(1))
    batches = plan.algorithm.client.data["work"].batches
    draws = [
        lambda key, r: jnp.sort(draw_cohort(plan.sampler, key, r).ids),
        lambda key, r: batches.draw(stream_key(key, Stream.BATCH, r), 0, 9, 9)[0],
    ]
    for draw in draws:
        of = jax.jit(jax.vmap(draw, (None, 0)))
        one, other = (np.asarray(of(run_sampling_key(r), jnp.arange(20))) for r in (run, again))
        assert np.mean(one != other) > 0.3
    assert same_bits(run_sampling_key(run), run.key)  # what was recorded before stays


# --- rows on the host


def make_plan(fed, name="scaffold", **options):
    task = jfl.task(start_params(), squared)
    algorithm = getattr(jfl.algorithms, name)(
        noisy_grad(), lr=0.3, steps=2, batch=jfl.batches.without_replacement(3)
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.without_replacement(7, 5), **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options", [("fedavg", dict(chunk=2)), ("scaffold", dict(weights="size", chunk=2))]
)
def test_a_population_is_the_same_run(name, options, tmp_path):
    fed = make_federation()
    host = on_host(fed, tmp_path / "x.npy")
    assert np.array_equal(np.asarray(fed.identity), np.asarray(host.identity))
    run = lambda seed, fed: jfl.simulate(
        jax.random.key(seed), make_plan(fed, name, **options), 5, evaluate_every=2
    )
    near, far, other = run(1, fed), run(1, host), run(2, host)
    close(
        (near.params, near.metrics, near.run.client_states),
        (far.params, far.metrics, far.run.client_states),
    )
    assert np.abs(flat(other.params) - flat(far.params)).max() > 1e-3  # what is compared can differ


def test_a_population_goes_on_where_it_was_and_keeps_what_it_began_from():
    plan = make_plan(on_host(make_federation()))
    run = lambda rounds, start=None, callbacks=(): jfl.simulate(
        jax.random.key(1), plan, rounds, evaluate_every=2, start=start, callbacks=callbacks
    )
    whole, half, first = run(6), run(6, callbacks=[lambda moment: moment.round == 4]), run(1)
    assert int(half.run.round) == 4
    kept = jax.tree.map(np.array, half.run.client_states)
    for _ in range(2):  # also a second time from the same state
        rest = run(2, half.run)
        assert same_bits(
            (rest.params, rest.run.client_states), (whole.params, whole.run.client_states)
        )
        assert same_bits(kept, half.run.client_states)
    # the states of those that took part, and no others, were written back
    states = np.concatenate(
        [np.asarray(x).reshape(7, -1) for x in jax.tree.leaves(first.run.client_states)], axis=1
    )
    drawn = np.asarray(draw_cohort(plan.sampler, jax.random.key(1), 0).ids)
    assert np.array_equal(np.flatnonzero(states.any(1)), np.sort(drawn)) and len(drawn) == 5


def test_a_checkpoint_of_a_population_holds_the_states_of_its_clients(tmp_path):
    plan = make_plan(on_host(make_federation()))
    run = lambda rounds, **how: jfl.simulate(
        jax.random.key(1), plan, rounds, evaluate_every=2, **how
    )
    moments, stop = [], lambda moment: moment.round == 2
    run(4, callbacks=[jfl.callbacks.checkpoint(tmp_path / "state"), moments.append, stop])
    whole = run(4)
    for start in (moments[0].run, jfl.callbacks.restore(tmp_path / "state", plan)):
        rest = run(2, start=start)
        assert same_bits(
            (rest.params, rest.run.client_states), (whole.params, whole.run.client_states)
        )


def test_rows_come_from_a_data_source_too():
    fed = make_federation(classes=3)
    x, y, size = np.asarray(fed.x), np.asarray(fed.y), np.asarray(fed.size)

    class Source:
        def __len__(self):
            return len(y)

        def __getitem__(self, i):
            return dict(image=x[i], label=y[i])

    test = (np.asarray(fed.x_test), np.asarray(fed.y_test))
    a = jfl.population((x, y), size, test=test)
    b = jfl.population(Source(), size, test=test)
    assert np.array_equal(a.identity, b.identity) and a.classes == b.classes == 3
    for one, two in zip(a.host.fetch(np.array([6, 2, 7])), b.host.fetch(np.array([6, 2, 7]))):
        assert np.array_equal(one, two) and not two[2].any()  # an id past the end has no rows


@pytest.mark.parametrize("at_once", [0, 2**40], ids=["threads", "one"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3, 3), (1, 4, 2, 5, 3)], ids=["even", "ragged"])
def test_rows_of_a_cohort_are_those_of_its_clients(sizes, ordered, at_once, monkeypatch):
    """Compared with a loop over clients, also beyond the last; rows as they are stored."""
    monkeypatch.setattr(host_rows, "MAX_SINGLE_THREAD_BYTES", at_once)
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
    for ids in ([4, 0, 2, 5], [5, 5], [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]):
        found = fed.host.fetch(np.array(ids))
        assert [v.dtype for v in found] == [np.uint8, np.int32]
        for i, client in enumerate(ids):
            own = order[starts[client] : starts[client + 1]] if client < len(sizes) else []
            for value, rows in zip(found, (x, y)):
                assert np.array_equal(value[i, : len(own)], rows[np.array(own, int)])
                assert value.shape[1] == max(sizes) and not value[i, len(own) :].any()
    assert copy.deepcopy(fed).host.slots == fed.host.slots  # also after threads read it


def test_rows_that_are_prepared_on_the_device_are_the_same_run():
    """Bytes that become numbers there, and the same numbers from the host."""
    rng, n = np.random.default_rng(0), sum(SIZES)
    pixels, y = rng.integers(0, 256, (n, 3)).astype(np.uint8), rng.normal(size=n)
    scaled = lambda x: x * np.float32(1 / 256)
    given = dict(sizes=SIZES, test=(scaled(pixels[:6]), y[:6]), classes=0)
    host = jfl.population((scaled(pixels), y), **given)
    device = jfl.population((pixels, y), prepare_row=scaled, **given)
    assert device.host.fetch(np.array([1]))[0].dtype == np.uint8
    assert np.array_equal(host.identity, device.identity)
    one, other = (
        jfl.simulate(jax.random.key(0), make_plan(fed), 3, evaluate_every=2)
        for fed in (host, device)
    )
    close(one, other)
    assert not np.allclose(flat(one.params), flat(start_params()), atol=1e-3)


BAD = np.zeros((10, 2), np.float32)


BAD[7, 1] = np.nan


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(sizes=[3, 0]), "each at least 1"),
        (dict(sizes=[50, 50]), "add up to at most"),
        (dict(sizes=[1.5]), "Int"),
        (dict(order=[0, 0, 1], sizes=[3]), "one owner"),
        (dict(order=[0, 99, 1], sizes=[3]), "row numbers"),
        (dict(rows=(BAD, np.zeros(10, int)), sizes=[5, 5]), "rows from"),
        (dict(rows=(np.zeros((10, 2)), np.zeros((10, 1), int))), "the same number of rows"),
        (dict(rows=(np.zeros((10, 2)), np.zeros(10, int)), prepare_row=np.sqrt), "at most 32 bits"),
    ],
)
def test_a_population_refuses_what_does_not_fit(change, message):
    x, y = np.zeros((10, 2), np.float32), np.zeros(10, np.int32)
    given = dict(rows=(x, y), sizes=[4, 4], test=(x, y)) | change
    with pytest.raises(ValueError, match=f"population.*{message}"):
        jfl.population(**given)


@pytest.mark.parametrize(
    "later, message",
    [
        (lambda x, y: [(x[0], y[0])], r"rows of shape \[2\], as before, but got \[1, 2\]"),
        (lambda x, y: list(zip(x[:, :1], y)), "rows of shape"),
        (lambda x, y: list(zip(x, y + 75)), "expected labels below 3, as before, but got 75 to 77"),
    ],
)
def test_rows_that_change_after_they_were_read_are_noticed(later, message):
    """By their number, shape and labels; one row would otherwise stand for all of a cohort."""

    class Rows:
        change = staticmethod(lambda x, y: list(zip(x, y)))

        def __len__(self):
            return len(x)

        def __getitems__(self, at):
            return self.change(x[np.array(at)], y[np.array(at)])

        def __getitem__(self, i):
            return x[i], y[i]

    x, y = np.ones((12, 2), np.float32), np.arange(12) % 3
    rows = Rows()
    fed = jfl.population(rows, [3, 4, 5], test=(x, y))
    assert fed.host.fetch(np.array([1]))[0].shape == (1, 5, 2)
    rows.change = later
    with pytest.raises(ValueError, match=message):
        fed.host.fetch(np.array([1]))


def test_what_rows_on_the_host_cannot_do_and_what_they_do_not_change():
    fed = make_federation()
    near, plan = make_plan(fed), make_plan(on_host(fed))
    run = jfl.init(jax.random.key(0), plan)
    for call in (
        lambda: jfl.run_round(run, plan),
        lambda: jfl.sweep(lambda: plan, rounds=1),
        lambda: jfl.scan(run, plan, [1]),
    ):
        with pytest.raises(ValueError, match="keeps its rows on the host"):
            call()
    assert jfl.guarantee(near, 5, 1e-5) == jfl.guarantee(plan, 5, 1e-5)


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
