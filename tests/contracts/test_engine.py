"""Contracts of the engine, for every algorithm in `jfl.algorithms.__all__`: a new one inherits
them.

What a run computes may depend on its seed, its plan and its data, and on nothing else: not on
slots, chunks, capacities, padding, evaluation or where it was stopped.
"""

import dataclasses
import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import (
    CLIENTS,
    SIZES,
    close,
    flat,
    make_algorithm,
    make_federation,
    noisy_grad,
    noisy_plan,
    noisy_release,
    raw,
    same_bits,
    squared,
    start_params,
)

import jfl
from jfl.core.identity import plan_identity
from jfl.core.random_streams import Stream, as_kernel_key, stream_key
from jfl.core.records import Cohort, Fn, Sampler
from jfl.engine.plan import client_bytes
from jfl.engine.round import advance, run_noise_key, run_sampling_key

pytestmark = pytest.mark.accelerator

# jfl.simulate and jfl.round are functions; their modules are reached by name
sim, sweeps = (
    importlib.import_module("jfl.engine.simulate"),
    importlib.import_module("jfl.engine.sweep"),
)
KEY, PLAIN = jax.random.key(4), jfl.grad(squared)
EMPTY = ("empty_cohort",)
# dpnfl is fedavg; these differ from fedavg or scaffold in the local step, the server's or the
# weights alone, and wait for the slow run
ALIKE = """fedprox fedsgd output_perturbation addpnfl padpfl fednova feddyn mimelite dicesgd ditto
fedrep fedper pfedme fedsam fedbuff qfedavg""".split()


def algorithms(*slow):
    """Parametrize by algorithm; those that are named wait for the slow run, a new one does not."""
    mark = lambda name: pytest.mark.slow if name in slow else ()
    names = [n for n in jfl.algorithms.__all__ if n != "dpnfl"]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=mark(n)) for n in names])


# scaffold shows here what fedavg shows, which alone is in test_algorithms.py and in tests below
most_algorithms = algorithms(*ALIKE, "fedavg")
# the NumPy loops of test_algorithms.py have noise of these two at each place
new_algorithms = algorithms(*ALIKE, "fedavg", "scaffold")


def test_dpnfl_is_fedavg_by_another_name():
    one, other = (make_algorithm(n, noisy_grad()) for n in ("dpnfl", "fedavg"))
    named = dataclasses.replace(one, name="fedavg")
    assert one.name == "dpnfl" and jax.tree.structure(named) == jax.tree.structure(other)
    assert same_bits(named, other)


def run4(plan, every=2, key=KEY, **options):
    return jfl.simulate(key, plan, 4, evaluate_every=every, tolerate=EMPTY, **options)


@pytest.fixture(scope="module")
def base(fed, task):
    """Return a function of a name: a plan and its output after four rounds, computed once."""

    @functools.cache
    def get(name):
        plan = noisy_plan(name, fed, task)
        return plan, run4(plan)

    return get


@most_algorithms
def test_compiles_once(name, fed, task, base):
    base(name)
    before = sim._scan._cache_size()
    for options in (dict(lr=0.3), dict(z=1.4)):
        run4(noisy_plan(name, fed, task, **options))
    run4(noisy_plan(name, make_federation(5), task))
    assert sim._scan._cache_size() == before


@most_algorithms
def test_same_key_same_run_other_key_other_run(name, base):
    plan, out = base(name)
    assert same_bits(out, run4(plan))
    other = run4(plan, key=jax.random.key(5))
    assert not np.allclose(flat(out.params), flat(other.params), atol=1e-3)


@most_algorithms
def test_scan_equals_a_loop_of_rounds(name, base):
    plan, out = base(name)
    step = jax.jit(lambda run, plan: jfl.run_round(run, plan)[0])
    run = jfl.init(KEY, plan)
    for _ in range(4):
        run = step(run, plan)
    assert step._cache_size() == 1  # no weak type creeps into the state
    close(run, out.run)


@most_algorithms
def test_evaluation_and_resume_change_no_bit(name, base):
    plan, out = base(name)
    uneven, last = run4(plan, every=3), run4(plan, every=4)
    assert same_bits(out.run, uneven.run) and same_bits(out.run, last.run)
    assert uneven.metrics.round.tolist() == [3, 4] and last.metrics.round.tolist() == [4]
    half = jfl.simulate(KEY, plan, 2, evaluate_every=2, tolerate=EMPTY)
    copy = raw(half.run)
    on = jfl.simulate(KEY, plan, 2, evaluate_every=2, start=half.run, tolerate=EMPTY)
    assert same_bits(out.run, on.run) and same_bits(out.params, on.params)
    # a state from which a run resumed is still there
    assert all(np.array_equal(a, b) for a, b in zip(copy, raw(half.run)))
    assert np.array_equal(np.asarray(on.metrics.loss), np.asarray(out.metrics.loss)[-1:])


@most_algorithms
def test_chunks_capacity_and_padding_never_matter(name, task, base):
    """The same experiment, stored and computed in another shape."""
    plan, out = base(name)
    sampler = jfl.sampling.poisson(CLIENTS, 0.4, capacity=5)
    wide = noisy_plan(name, make_federation(pad=4), task, chunk=5, sampler=sampler)
    assert plan.chunk != wide.chunk == 5
    other = run4(wide)
    close((out.run.server, out.run.client_states), (other.run.server, other.run.client_states))
    assert np.array_equal(plan_identity(plan), plan_identity(wide))


def _given(key, *, ids, count):
    return Cohort(ids, count, jnp.zeros_like(ids), jnp.zeros((), jnp.int32))


def given_sampler(ids, empty=()):
    """A cohort that a test chooses; CLIENTS marks an empty slot, or its place in `empty`."""
    ids = np.array(ids, np.int32)
    count = (ids < CLIENTS).astype(np.int32)
    count[list(empty)] = 0
    data = dict(ids=jnp.asarray(ids), count=jnp.asarray(count))
    return Sampler(Fn(_given, data), np.float32(3), clients=CLIENTS, capacity=5)


@most_algorithms
def test_slots_and_memory(name, fed, task):
    """Slot order and empty slots change nothing, and a client that is not drawn keeps its state:
    client 0 above all."""
    of_cohort = lambda *cohort: noisy_plan(name, fed, task, sampler=given_sampler(*cohort))
    plans = [
        of_cohort([1, 3, 5, 7, 7]),
        of_cohort([5, 7, 1, 7, 3]),
        of_cohort([0, 3, 2, 5, 1], [0, 2]),  # empty slots that name a client
    ]
    start = jfl.init(KEY, plans[0])
    states = jax.tree.map(lambda x: x + 3.0, start.client_states)
    start = dataclasses.replace(start, client_states=states)
    # other draws are other plans, with other noise: here they have one
    step = lambda run, plan: _noisy_round(run, plan, run_noise_key(start))
    a, b, c = (step(start, p) for p in plans)
    close((a.server, a.client_states), (b.server, b.client_states))
    close((a.server, a.client_states), (c.server, c.client_states))
    for old, new in zip(raw(start.client_states), raw(a.client_states)):
        assert np.array_equal(old[[0, 2, 4, 6]], new[[0, 2, 4, 6]])
        assert np.all(old[[1, 3, 5]] != new[[1, 3, 5]])
    nobody = step(start, of_cohort([7] * 5))
    assert same_bits(nobody.client_states, start.client_states)
    assert int(nobody.health.empty_cohort) == 1
    # an empty round is a release of noise, not a silent one: that nobody came is hidden
    assert not np.allclose(flat(nobody.server.params), flat(start.server.params), atol=1e-4)


class Counted:
    """A loss that counts on the host how often it runs."""

    calls = 0

    @staticmethod
    @jfl.named("tests.counted_loss")
    def loss(params, x, y):
        jax.debug.callback(Counted.add, x[0])
        return squared(params, x, y)

    @classmethod
    def add(cls, _):
        cls.calls += 1


def computed(f, *args) -> int:
    """How many losses a call computes, in units of a client's: two steps of three rows."""
    jax.block_until_ready(f(*args))
    jax.effects_barrier()
    Counted.calls = 0
    jax.block_until_ready(f(*args))
    jax.effects_barrier()
    return Counted.calls / 6


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_chunks_without_a_client_do_not_run(chunk, fed):
    """Alone, and in a sweep, where as many run as the point that needs most has."""
    plan = jfl.plan(
        fed,
        jfl.task(start_params(), Counted.loss),
        make_algorithm("scaffold", jfl.grad(Counted.loss)),
        jfl.sampling.poisson(CLIENTS, 0.4, capacity=CLIENTS),
        chunk=chunk,
    )
    keys = jax.random.split(KEY, 12)
    runs = [jfl.init(key, plan) for key in keys]
    draw = jax.jit(
        lambda run, plan: plan.sampler.draw(stream_key(run_sampling_key(run), Stream.COHORT, 0))
    )
    many = [int((draw(run, plan).times_drawn > 0).sum()) for run in runs]
    assert len(set(many)) >= 3
    slots = [-(-n // chunk) * chunk for n in many]
    step = jax.jit(jfl.run_round)
    assert [computed(step, run, plan) for run in runs] == slots
    both = jax.jit(jax.vmap(jfl.run_round, (0, None)))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *runs)
    assert computed(both, stacked, plan) == len(runs) * max(slots)
    for i, run in enumerate(runs):
        close(jax.tree.map(lambda x, i=i: x[i], both(stacked, plan)), step(run, plan))


def few_slots(name, fed, task, clients, rows):
    """Poisson cohorts and batches of these rates: six clients and four rows find a slot."""
    sampler = jfl.sampling.poisson(CLIENTS, clients, capacity=6)
    algorithm = make_algorithm(name, PLAIN, batch=jfl.batches.poisson(rate=rows, capacity=4))
    return jfl.plan(fed, task, algorithm, sampler)


# of one step here, whose program others share
@algorithms(*set(ALIKE) - {"fedsgd"}, "fedavg", "scaffold")
def test_rows_that_nobody_owns_never_matter(name, task):
    """Not even if they are nan: row 0 is what padding points to."""
    feds = [make_federation(junk=junk) for junk in (7.0, np.nan)]
    clean, dirty = (
        _round(jfl.init(KEY, p), p) for p in (few_slots(name, f, task, 0.4, 0.4) for f in feds)
    )
    # the identity knows that the data differ
    assert same_bits(dataclasses.replace(clean, plan_identity=dirty.plan_identity), dirty)
    assert np.isfinite(flat(dirty.server)).all()


@most_algorithms
def test_sweep_equals_separate_runs(name, fed, task, base):
    base(name)
    make = lambda lr, z: noisy_plan(name, fed, task, lr=lr, z=z)
    axes = dict(lr=[0.1, 0.2], z=[0.7, 1.4], seed=[4, 5])
    out = jfl.sweep(make, rounds=4, evaluate_every=2, tolerate=EMPTY, **axes)
    assert out.groups == 1 and len(out.points) == 8
    for i, p in enumerate(out.points):
        alone = run4(make(p["lr"], p["z"]), key=jax.random.key(p["seed"]))
        close(out.params[i], alone.params)
        close(jax.tree.map(lambda x, i=i: x[i], out.metrics), alone.metrics, rtol=1e-4, atol=1e-5)
    assert len({tuple(flat(p)) for p in out.params}) == 8


@most_algorithms
def test_inside_a_users_own_jit_and_vmap(name, fed, task, base):
    """Plans may be built from traced numbers; seeds and rates map."""

    def one(key, lr):
        plan = noisy_plan(name, fed, task, lr=lr)
        run, metrics = jfl.scan(jfl.init(key, plan), plan, [2, 2])
        return run.server.params, metrics.loss

    seeds, lrs = (4, 5, 6), (0.1, 0.1, 0.3)
    params, loss = jax.jit(jax.vmap(one))(
        jnp.stack([jax.random.key(s) for s in seeds]), jnp.array(lrs)
    )
    for i, (s, lr) in enumerate(zip(seeds, lrs)):
        out = run4(noisy_plan(name, fed, task, lr=lr), key=jax.random.key(s))
        close(jax.tree.map(lambda x, i=i: x[i], params), out.params)
        close(loss[i], out.metrics.loss, rtol=1e-4)


def test_predictions_inside_a_users_own_scan(fed):
    predict = lambda params, x: x @ params["w"] + params["b"]
    linear = jfl.task(start_params(), squared, predict, target="numbers")
    plan = noisy_plan("fedavg", fed, linear)

    def one_round(run, _):
        run, _ = jfl.run_round(run, plan)
        return run, jfl.predict(linear, plan.algorithm.params(run.server), fed.x_test)

    run = jfl.init(KEY, plan)
    _, predictions = jax.jit(lambda run: jax.lax.scan(one_round, run, length=4))(run)
    close(predictions[-1], jfl.predict(linear, run4(plan).params, fed.x_test))


def test_simulate_inside_jit_says_what_to_call(fed, task):
    make = lambda lr: noisy_plan("fedavg", fed, task, lr=lr)
    for traced in (
        lambda x: jfl.simulate(jax.random.key(x), make(0.1), 1).params,
        lambda x: jfl.simulate(KEY, make(x), 1).params,
    ):
        with pytest.raises(ValueError, match="simulate: expected concrete .* jfl.run_round"):
            jax.jit(traced)(1)


def test_scan_takes_the_rounds_before_each_evaluation(base):
    plan, out = base("fedavg")
    with pytest.raises(ValueError, match="scan: expected rounds .* got 5. For example, .10, 10, 5"):
        jfl.scan(out.run, plan, 5)


@pytest.mark.parametrize("site", ["rows", "upload", "release"])
@new_algorithms
def test_noise_is_never_ignored(name, site, fed, task):
    """Wherever a chain with noise is given, noise arrives in the model (a strategy that drops its
    privacy options without a word was found in the field)."""

    def moved(z):
        chain = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(z))
        grad = jfl.private_grad(squared, chain) if site == "rows" else jfl.grad(squared)
        sites = {} if site == "rows" else {site: chain}
        full, algorithm = jfl.sampling.full(CLIENTS), make_algorithm(name, grad)
        plan = jfl.plan(fed, task, algorithm, full, paired_noise=True, **sites)
        start = jfl.init(KEY, plan)
        noises = (
            run_noise_key(dataclasses.replace(start, attempt=jnp.int32(attempt)))
            for attempt in (0, 1)
        )
        one, two = (_noisy_round(start, plan, noise) for noise in noises)
        return flat(one.server.params) - flat(two.server.params)  # of the same cohort and batches

    quiet, loud = moved(1e-4), moved(50.0)
    assert np.linalg.norm(loud) > 20 * np.linalg.norm(quiet) > 0


_noisy_round = jax.jit(lambda run, plan, noise: advance(run, plan, noise)[0])
_round = lambda run, plan: _noisy_round(run, plan, run_noise_key(run))


def lopsided(round_):
    """Weights whose largest in size is negative."""
    return jnp.full(CLIENTS, 2.0).at[0].set(-5.0)


def test_weights_from_a_function_cannot_lower_the_noise(fed):
    """A function of the round is not seen before it runs: negative weights must count by their
    size, or be reported."""
    plan = still_plan(fed, "release", weights=lopsided)
    run = _round(jfl.init(KEY, plan), plan)
    enough = float(np.std(np.asarray(run.server.params))) > 0.8 * 2 * 5.0
    assert enough or int(run.health.nonfinite) > 0


# --- addresses of noise


def still(params, x, y):
    """No gradient: what moves is noise."""
    return 0.0 * jnp.sum(params) * y


DIM = 400


def still_plan(fed, site, z=1.0, lr=0.1, **options):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z))
    grad = jfl.private_grad(still, chain) if site == "rows" else jfl.grad(still)
    sites = {} if site == "rows" else {site: chain}
    algorithm = jfl.algorithms.fedavg(grad, lr=lr, steps=2, batch=jfl.batches.full())
    task, full = jfl.task(jnp.zeros(DIM), still), jfl.sampling.full(CLIENTS)
    return jfl.plan(fed, task, algorithm, full, **sites, **options)


LIMIT = 5.5 / np.sqrt(DIM)  # a false alarm in 4e-8 of pairs


@pytest.mark.by_default("rows")  # one key for all three: the NumPy loops know their addresses
@pytest.mark.parametrize("site", ["rows", "upload", "release"])
def test_points_of_a_sweep_never_share_noise(site, fed):
    """Two points with one seed: their difference would be free of noise."""
    points = [dict(z=1.0, lr=0.1), dict(z=2.0, lr=0.1), dict(z=1.0, lr=0.2)]
    make = lambda z, lr: still_plan(fed, site, z, lr)
    own = np.array(jfl.sweep(make, rounds=1, points=points).params)
    apart = lambda seen: (np.abs(np.corrcoef(seen)) - np.eye(len(seen))).max()
    assert own.std() > 0.01 and apart(own) < LIMIT
    assert apart(own + own[:1]) > LIMIT  # a common part must be seen


@pytest.mark.by_default("rows")
@pytest.mark.parametrize("site", ["rows", "upload"])
def test_clients_steps_and_rounds_never_share_noise(site, fed):
    """Seen at the uploads themselves: a weight for one client alone shows what it sends."""
    plan = still_plan(fed, site)
    plan = dataclasses.replace(plan, release=jfl.chain(jfl.total(), adjacency="replace_one"))

    def alone(run, client):
        weighed = dataclasses.replace(plan, weights=jnp.zeros(CLIENTS).at[client].set(1.0))
        return advance(run, weighed, run_noise_key(run))[0].server.params

    run = jfl.init(KEY, plan)
    later = dataclasses.replace(run, round=jnp.int32(1))
    again = dataclasses.replace(run, attempt=jnp.int32(1))
    of_all = jax.jit(jax.vmap(alone, (None, 0)))
    seen = np.concatenate([of_all(r, jnp.arange(CLIENTS)) for r in (run, later, again)])
    assert len(seen) == 3 * CLIENTS and seen.std() > 0.01
    apart = np.abs(np.corrcoef(seen)) - np.eye(len(seen))
    assert apart.max() < LIMIT, "two uploads share noise"
    shared = np.abs(np.corrcoef(seen + 2 * seen[:1])) - np.eye(len(seen))
    assert shared.max() > LIMIT  # a common part must be seen


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg"])
def test_generators_that_repeat_noise_are_refused(generator, fed):
    """Under vmap they ignore all keys but the first, and fold_in of one of them commutes."""
    key = jax.random.key(0, impl=generator)
    plan = still_plan(fed, "rows")
    repeated = r"expected a key whose draws .* the generator " + generator
    for start in (jfl.init, lambda key, plan: jfl.simulate(key, plan, rounds=1)):
        with pytest.raises(ValueError, match=repeated):
            start(key, plan)
    with pytest.raises(ValueError, match=repeated):
        jfl.sweep(lambda: plan, rounds=1, seed=[key])
    with jax.default_prng_impl(generator), pytest.raises(ValueError, match=repeated):
        jfl.sweep(lambda: plan, rounds=1, seed=[0])


def test_every_address_is_a_key_of_its_own(fed, task):
    """Streams, rounds, clients, turns, steps and attempts: no two keys of a run are equal."""
    run = jfl.init(KEY, noisy_plan("fedavg", fed, task))
    later = dataclasses.replace(run, attempt=jnp.int32(1))
    bases = run.key, run_sampling_key(later), run_noise_key(run), run_noise_key(later)
    streams = jnp.array(sorted(set(Stream) - {Stream.ATTEMPT}))  # whose keys are such a base
    folded = jax.vmap(jax.random.fold_in, (None, 0))
    deeper = lambda keys, many: jax.vmap(folded, (0, None))(keys, jnp.arange(many)).ravel()

    @jax.jit
    def words_of(base):
        rounds = deeper(folded(base, streams), 2)
        turns = deeper(deeper(rounds, 3), 2)  # of three clients
        return [jax.random.key_data(keys) for keys in (rounds, turns, deeper(turns, 2))]

    words = np.concatenate([v for base in bases for v in words_of(as_kernel_key(base))])
    assert len(words) == 4 * 6 * 2 * (1 + 6 + 12) == len(np.unique(words, axis=0))


def test_a_raised_attempt_changes_the_run(fed, task, base):
    plan, out = base("scaffold")
    fresh = jfl.init(KEY, plan)
    again = run4(plan, start=dataclasses.replace(fresh, attempt=jnp.int32(1)))
    assert not np.allclose(flat(again.params), flat(out.params), atol=1e-3)
    assert not same_bits(again.metrics.cohort, out.metrics.cohort)  # Poisson cohorts of its own
    assert same_bits(run4(plan, start=fresh).params, out.params)


# --- sweeps


def plain_plan(fed, task, *, lr=0.1, steps=2, **options):
    algorithm = make_algorithm("fedavg", PLAIN, steps=steps, batch=jfl.batches.full(), lr=lr)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), **options)


def test_sweep_groups_by_structure(task):
    """Numbers and partitions of another width share a program; another number of steps does not.
    Each point is a separate run."""
    feds = {seed: make_federation(seed=seed, pad=seed) for seed in (0, 2)}
    make = lambda lr, steps, fed, seed: plain_plan(feds[fed], task, lr=lr, steps=steps)
    axes = dict(lr=[0.1, 0.2], steps=[1, 2], fed=[0, 2])
    out = jfl.sweep(make, rounds=1, **axes)
    assert out.groups == 2 and len(out.params) == 8
    assert [p["steps"] for p in out.points] == [1, 1, 2, 2] * 2
    assert out.seconds.shape == (8,) and (out.seconds > 0).all()
    assert out.points[6] == dict(lr=0.2, steps=2, fed=0, seed=0)  # the narrower one, padded
    alone = jfl.simulate(jax.random.key(0), make(**out.points[6]), 1)
    close(out.params[6], alone.params)


def test_points_that_run_at_once_fit_into_memory(fed, task):
    """By the compiler's count: a first guess that was too high is compiled once more, for fewer
    points, and a second block is the same program."""
    lines, compiled = [], []
    plans = {lr: plain_plan(fed, task, lr=lr) for lr in (0.1, 0.2, 0.3, 0.4, 0.5)}
    go = lambda **more: jfl.sweep(
        lambda lr: plans[lr], rounds=1, lr=list(plans), watch=lines.append, **more
    )
    whole = go()
    assert np.isfinite(whole.point_bytes).all() and whole.point_bytes[0] > 1000
    each = f"{whole.point_bytes[0] / 1e6:.3g} MB of device memory per point"
    assert lines == [f"5 points as one program, 5 at a time, {each}"]
    memory = 5 * client_bytes(plans[0.1]) * plans[0.1].chunk
    assert memory < whole.point_bytes.sum()  # the guess is 5, and too high
    small = go(memory=memory)
    listen = lambda event, seconds, **_: compiled.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        again = go(memory=memory)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not any(event.endswith("backend_compile_duration") for event in compiled)
    assert lines[1] in lines[2:] and lines[2].endswith(" of 5 points done")
    at_once = int(re.search("(\\d+) at a time", lines[1])[1])
    assert at_once < 5 and (at_once == 1 or at_once * small.point_bytes[0] <= memory)
    assert same_bits(again.params, small.params)
    close(small.params, whole.params)
    with pytest.warns(RuntimeWarning, match="1 point at a time needs .* more than the 1e-06 MB"):
        go(memory=1)


@pytest.mark.by_default("2-2")
@pytest.mark.parametrize("memory, at_once", [(None, 6), (4, 3), (2, 2), (1, 1)])
def test_rates_times_seeds_are_runs_of_their_own(task, monkeypatch, memory, at_once):
    """Each seed has separate rows, and three rates stand in one row of the program; blocks are of
    whole rows or of parts of one, and results come in the order of the points."""
    feds, lines = {seed: make_federation(seed=seed) for seed in (0, 1)}, []
    monkeypatch.setattr(sweeps, "client_bytes", lambda plan: 1 / 3)  # three clients at once
    monkeypatch.setattr(sweeps._Program, "_compiled_bytes", lambda program: 0.0)
    cohorts = jfl.sampling.without_replacement(CLIENTS, 3)
    make = lambda lr, seed: jfl.plan(
        feds[seed], task, make_algorithm("fedsgd", noisy_grad(), lr=lr), cohorts
    )
    options = dict(lr=[0.1, 0.2, 0.3], seed=[0, 1], memory=memory, watch=lines.append)
    out = jfl.sweep(make, rounds=2, evaluate_every=2, **options)
    assert f"{at_once} at a time" in lines[0]
    assert [line.split(" of ")[0] for line in lines[1:]] == {6: [], 3: ["3"]}.get(
        at_once, ["2", "3", "5"] if at_once == 2 else list("12345")
    )
    for point, params, loss in zip(out.points, out.params, out.metrics.loss):
        alone = jfl.simulate(jax.random.key(point["seed"]), make(**point), 2, evaluate_every=2)
        close(params, alone.params)
        close(loss, alone.metrics.loss)


def test_sweep_marks_a_failed_point(fed, task):
    make, options = lambda lr: plain_plan(fed, task, lr=lr), dict(rounds=2, evaluate_every=2)
    rates = [0.1, 1e30, 0.2, 0.3, 0.4]  # five share a program with the test above
    out = jfl.sweep(make, lr=rates, **options)
    assert out.failed.tolist() == [rate == 1e30 for rate in rates] and out.health.nonfinite[1] > 0
    close(out.params[2], jfl.simulate(jax.random.key(0), make(0.2), 2, evaluate_every=2).params)
    with pytest.raises(jfl.HealthError):
        jfl.sweep(make, lr=[1e30, 2e30, 3e30, 4e30, 5e30], **options)


def test_axes():
    points = sweeps.points_of
    assert points(dict(a=[1, 2], b=(3, 4), c="word", d=5)) == [
        dict(a=a, b=b, c="word", d=5) for a in (1, 2) for b in (3, 4)
    ]
    assert [p["hidden"] for p in points(dict(hidden=[(64,), (64, 32)]))] == [(64,), (64, 32)]
    assert len(points(dict(seed=[jax.random.key(0), jax.random.key(1)]))) == 2
    assert len(points(dict(seed=jax.random.split(jax.random.key(0), 3)))) == 3
    with pytest.raises(ValueError, match="at least one value of lr"):
        points(dict(lr=[]))
    with pytest.raises(ValueError, match="either points or axes"):
        jfl.sweep(lambda lr: None, rounds=1, points=[dict(lr=1)], lr=[1])


# --- health


def test_nan_data_and_explosions_are_reported(fed, task):
    for bad in (
        plain_plan(dataclasses.replace(fed, x=fed.x.at[fed.index[:, 0]].set(jnp.nan)), task),
        plain_plan(fed, task, lr=1e30),
    ):
        with pytest.raises(jfl.HealthError, match="nonfinite") as error:
            jfl.simulate(jax.random.key(0), bad, 2, evaluate_every=2)
        assert error.value.health["nonfinite"] > 0 and int(error.value.run.round) == 2
    out = jfl.simulate(jax.random.key(0), bad, 2, evaluate_every=2, tolerate=("nonfinite",))
    assert not np.isfinite(flat(out.params)).all()


def test_one_bad_client_is_not_hidden_by_clipping(fed, task):
    """A clipped nan counts as zero, and is counted, also where the client has weight 0."""
    bad = dataclasses.replace(fed, x=fed.x.at[fed.index[2, :8]].set(jnp.inf))
    algorithm = make_algorithm("fedsgd", PLAIN, batch=jfl.batches.full())
    release = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.divide(3.0))
    options = dict(release=release, weights=jnp.ones(CLIENTS).at[2].set(0.0))
    plan = jfl.plan(bad, task, algorithm, jfl.sampling.full(CLIENTS), **options)
    run = _round(jfl.init(KEY, plan), plan)
    assert int(run.health.nonfinite_rows) == 1 and int(run.health.nonfinite) == 0
    assert np.isfinite(flat(run.server.params)).all()


def test_overflow_is_counted(fed, task):
    """Of clients and of rows, that are drawn and find no slot."""
    draw = jax.jit(lambda sampler, keys: jax.vmap(sampler.draw)(keys))
    for clients, rows in ((1.0, 1e-6), (0.6, 1.0), (0.6, 1e-6)):
        plan = few_slots("fedsgd", fed, task, clients, rows)
        run = jfl.init(KEY, plan)
        key = stream_key(run_sampling_key(run), Stream.COHORT, 0)
        here = [SIZES[i] for i in draw(plan.sampler, key[None]).ids[0].tolist() if i < CLIENTS]
        overflow = (clients == 1) + sum(max(0, size - 4) for size in here) * (rows == 1)
        assert len(here) in (3, 4, 5, 6) and _round(run, plan).health.overflow == overflow
    few = jfl.sampling.poisson(CLIENTS, 0.9, capacity=2)
    drawn = draw(few, jax.random.split(KEY, 300))
    total = np.asarray((drawn.times_drawn > 0).sum(1) + drawn.overflow)
    assert abs(total.mean() - 0.9 * CLIENTS) < 6 * np.sqrt(CLIENTS * 0.09 / 300)


def test_empty_cohorts_are_counted_and_may_be_tolerated(fed, task):
    sampler = jfl.sampling.poisson(CLIENTS, 1e-6, capacity=CLIENTS)
    rare = noisy_plan("scaffold", fed, task, sampler=sampler)
    with pytest.raises(jfl.HealthError, match="empty_cohort=4") as error:
        jfl.simulate(KEY, rare, 4, evaluate_every=2)
    assert error.value.health == dict(nonfinite=0, overflow=0, empty_cohort=4, nonfinite_rows=0)
    out = run4(rare)
    assert np.isfinite(flat(out.params)).all()
    assert np.asarray(out.metrics.cohort).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="tolerate"):
        jfl.simulate(KEY, rare, 4, tolerate=("empty",))


def clipped_plan(fed, task):
    """Everyone takes one step with all of its rows."""
    grad = jfl.private_grad(squared, jfl.chain(jfl.clip_l2(1e-3), jfl.total(), jfl.divide(3)))
    batch = jfl.batches.without_replacement(max(SIZES), short="all")
    algorithm = jfl.algorithms.fedsgd(grad, lr=0.1, batch=batch)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def test_a_client_without_rows_sends_nothing(task):
    """Size 0 (a partition may leave it): its padding points at row 0, which may hold anything."""
    fed = make_federation(sizes=(0, 5, 8, 4, 6, 9, 8), junk=np.nan)
    out = jfl.simulate(KEY, clipped_plan(fed, task), 1)
    assert int(out.run.health.nonfinite) == 0 and np.isfinite(flat(out.params)).all()


# --- state


def test_start_must_fit(fed, task):
    out = jfl.simulate(KEY, plain_plan(fed, task), 2, evaluate_every=2)
    scaffold = make_algorithm("scaffold", jfl.grad(squared))
    other = jfl.plan(fed, task, scaffold, jfl.sampling.full(CLIENTS))
    with pytest.raises(ValueError, match="like this plan's"):
        jfl.simulate(KEY, other, 2, start=out.run)
    # another plan with the same state resumes
    on = jfl.simulate(KEY, plain_plan(fed, task, lr=0.01), 2, evaluate_every=2, start=out.run)
    assert int(on.run.round) == 4


def test_schedule():
    counts = sim.rounds_before_evaluations
    assert counts(60, None).tolist() == [3] * 20 and counts(5, 10).tolist() == [5]
    assert counts(7, 3).tolist() == [3, 3, 1] and counts(61, None).sum() == 61
    for bad in (0, 1.5, True):
        with pytest.raises(ValueError, match="rounds"):
            counts(bad, None)
        with pytest.raises(ValueError, match="evaluate_every"):
            counts(4, bad)


def test_metrics(fed, task):
    """What is reported is what happened: losses of the cohort, clients a round, the share that was
    clipped."""
    out = jfl.simulate(KEY, clipped_plan(fed, task), 1)
    p, m = start_params(), out.metrics
    loss = lambda x, y: 0.5 * (np.asarray(x) @ np.asarray(p["w"]) + 0.2 - np.asarray(y)) ** 2
    rows = [np.asarray(fed.index[c, :s]) for c, s in enumerate(SIZES)]
    want = np.mean([loss(fed.x[r], fed.y[r]).mean() for r in rows])
    np.testing.assert_allclose(m.train_loss, [want], rtol=1e-5)
    np.testing.assert_allclose(m.loss, [loss(fed.x_test, fed.y_test).mean()], rtol=1e-4)
    assert m.clip_fraction.tolist() == [1.0] and m.cohort.tolist() == [7.0] and m.accuracy is None
    moved = flat(out.params) - flat(p)
    np.testing.assert_allclose(m.update_norm, [np.linalg.norm(moved) / 0.1], rtol=1e-3)


@pytest.mark.parametrize("site", ["rows", "clients"])
def test_batches_and_cohorts_without_rows_do_not_lower_the_training_loss(fed, site):
    """Every row has the same loss and is clipped, so the means do not depend on what is drawn."""
    same = lambda params, x, y: 3.0 + 10 * (params["w"].sum() + params["b"])
    start = jax.tree.map(jnp.zeros_like, start_params())
    chain = jfl.chain(jfl.clip_l2(1e-6), jfl.total(), jfl.gaussian(1.0), jfl.divide(1.0))
    algorithm = jfl.algorithms.fedavg(
        jfl.private_grad(same, chain), lr=1e-3, steps=2, batch=jfl.batches.poisson(0.5)
    )
    sampler = jfl.sampling.poisson(CLIENTS, 0.15, capacity=CLIENTS)
    release = noisy_release(bound=1e-12) if site == "clients" else None
    plan = jfl.plan(fed, jfl.task(start, same), algorithm, sampler, release=release)
    out = jfl.simulate(KEY, plan, 40, evaluate_every=40, tolerate=("empty_cohort",))
    assert int(out.run.health.empty_cohort) > 0
    np.testing.assert_allclose(out.metrics.train_loss, [3.0], rtol=1e-5)
    np.testing.assert_allclose(out.metrics.clip_fraction, [1.0], rtol=1e-5)


def test_uploads_of_clients_without_rows_count_as_uploads_that_are_not_clipped(fed, task):
    """All other uploads are clipped; with one client per round, these rounds have no loss."""
    batch, clip = jfl.batches.poisson(0.5), noisy_release(bound=1e-4)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=0.1, steps=1, batch=batch)
    sampler = jfl.sampling.without_replacement(CLIENTS, 1)
    plan = jfl.plan(fed, task, algorithm, sampler, release=clip)
    metrics = jfl.simulate(KEY, plan, 60, evaluate_every=60).metrics
    share = float(metrics.clip_fraction[0])  # each client has an empty batch with probability 0.6
    assert 0.2 < share < 0.6, share


# --- plans

ADAPTIVE = jfl.chain(jfl.clip_adaptive(1.0, 7), jfl.total(), jfl.gaussian(1.0))
OF_SIZE = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide("size"))
OF_OWN_SIZE = jfl.private_grad(squared, OF_SIZE)
FOUR, POISSON = jfl.batches.without_replacement(4), jfl.batches.poisson(2.0)
IN_TURN = jfl.sampling.with_replacement(CLIENTS, 3, independent=True)


@pytest.mark.parametrize(
    "words, parts",
    [
        ("number of clients", dict(sampler=jfl.sampling.full(6))),
        ("plan", dict(algorithm="fedavg")),
        ("plan", dict(release="mean")),
        ("adjacency to be one of", dict(adjacency="add_remove")),
        ("adjacency", dict(release=noisy_release(adjacency="add_remove"))),
        ("public divisor", dict(release=OF_SIZE)),
        ("clip_adaptive", dict(upload=ADAPTIVE)),
        ("batch=4", dict(algorithm=make_algorithm("fedavg", PLAIN, batch=FOUR))),
        ("add_remove", dict(algorithm=make_algorithm("fedavg", OF_OWN_SIZE, batch=POISSON))),
        (
            "independent=False",
            dict(algorithm=make_algorithm("scaffold", PLAIN), sampler=IN_TURN),
        ),
        ("weights", dict(weights=np.ones(3))),
        ("weights", dict(weights=-np.ones(CLIENTS))),
        ("weights", dict(weights=np.zeros(CLIENTS))),
        ("chunk", dict(chunk=0)),
    ],
)
def test_plan_refuses_what_does_not_fit(fed, task, words, parts):
    algorithm, sampler = make_algorithm("fedavg", PLAIN), jfl.sampling.without_replacement(7, 2)
    plan = dict(fed=fed, task=task, algorithm=algorithm, sampler=sampler)
    assert jfl.plan(**plan)
    with pytest.raises(ValueError, match=words):
        jfl.plan(**plan | parts)
    with pytest.raises(ValueError, match="clip_adaptive"):
        jfl.private_grad(squared, ADAPTIVE)


@pytest.mark.parametrize(
    "batch, adjacency",
    [(jfl.batches.poisson(2.0), "add_remove"), (jfl.batches.epochs(3), "replace_one")],
)
def test_samplers_imply_the_adjacency_that_runs(batch, adjacency, fed, task):
    algorithm = make_algorithm("fedavg", noisy_grad(), batch=batch)
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    is_chain = lambda node: isinstance(node, jfl.Mechanism)
    chains = list(filter(is_chain, jax.tree.leaves(plan.algorithm, is_leaf=is_chain)))
    # what runs and what is accounted
    assert len(chains) == 2 and {c.adjacency for c in chains} == {adjacency}
    for sampler, implied in (
        (jfl.sampling.poisson(CLIENTS, 0.5), "add_remove"),
        (jfl.sampling.without_replacement(CLIENTS, 3), "replace_one"),
        (jfl.sampling.with_replacement(CLIENTS, 3), "replace_one"),
    ):
        plan = jfl.plan(fed, task, algorithm, sampler, release=noisy_release())
        assert plan.release.adjacency == implied
