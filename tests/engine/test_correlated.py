"""Noise that is correlated over rounds, as a run adds it: that of a loop in NumPy on the same
draws, with the covariance of its strategy, however a run is cut, chunked or swept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import flat, make_federation, squared, start_params
from jfl.kernels.normals import normals

import jfl
from jfl.core import identity
from jfl.core.random_streams import Stream
from jfl.core.records import Mechanism
from jfl.engine import round as rounds_of
from jfl.privacy.mechanisms import chain as mech
from jfl.privacy.mechanisms import correlated as correlated_noise
from jfl.privacy.mechanisms.strategies import (
    banded_toeplitz,
    blt,
    dense,
    inverse_banded,
    restarted,
    square_root,
    tree,
)
from jfl.privacy.mechanisms.strategies import (
    identity as uncorrelated,
)

C, ROUNDS, KEY = 7, 9, jax.random.key(3)
STRATEGIES = {
    "identity": lambda: uncorrelated(ROUNDS),
    "tree": lambda: tree(ROUNDS),
    "restarted": lambda: restarted(tree(4), ROUNDS),
    "efficient tree": lambda: tree(ROUNDS, efficient=True),
    "square root": lambda: square_root(ROUNDS),
    "banded": lambda: banded_toeplitz(ROUNDS, 3),
    "inverse banded": lambda: inverse_banded(ROUNDS, 4),
    "blt": lambda: blt(ROUNDS, 2),
    "dense": lambda: dense(ROUNDS),
}
NAMES = list(STRATEGIES)
KINDS = ["tree", "inverse banded", "banded", "blt"]  # one of each way to draw
OFTEN = [pytest.param(n, marks=() if n == "banded" else pytest.mark.slow) for n in NAMES]


@functools.cache
def strategy(name):
    return STRATEGIES[name]()


def plan(name, z=1.5, sampler=None, lr=0.3, made=None, **options):
    made = strategy(name) if made is None else made
    release = jfl.chain(
        jfl.clip_l2(0.8), jfl.total(), jfl.correlated(z, made), jfl.divide(float(C))
    )
    alg = jfl.algorithms.fedavg(
        jfl.grad(squared), lr=lr, steps=2, batch=jfl.batches.without_replacement(3)
    )
    return jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        alg,
        sampler or jfl.sampling.full(C),
        release=release,
        **options,
    )


def models(plan, count=ROUNDS, run=None):
    """The model after each round, Float64[rounds, parameters]."""
    run = jfl.init(KEY, plan) if run is None else run
    step, out = jax.jit(jfl.run_round), []
    for _ in range(count):
        run, _ = step(run, plan)
        out.append(flat(run.server.params))
    return np.array(out), run


def fresh(plan, run, index):
    """The normals of draw `index` of a run."""
    words = identity.noise_identity(plan)
    key = jax.random.fold_in(
        rounds_of.run_noise_key(rounds_of.enter_plan(run, words)), Stream.RELEASE
    )
    return flat(normals(jax.random.fold_in(key, index), start_params()))


@pytest.mark.by_default("banded")
@pytest.mark.parametrize("name", NAMES)
def test_rounds_add_the_noise_of_a_loop_in_numpy(name):
    """Clients that do not learn send nothing, so the model moves by noise alone."""
    still, noisy = plan(name, lr=1e-30), strategy(name).noising()
    found, _ = models(still)
    run = jfl.init(KEY, still)
    draws = [fresh(still, run, i) for i in range(noisy.shape[1])]
    std, wanted, model = 1.5 * 2 * 0.8 / C, [], flat(start_params())
    for row in noisy:
        mixed = np.zeros_like(model)
        for weight, draw in zip(row, draws, strict=True):
            mixed = mixed + weight * draw
        model = model + std * mixed
        wanted.append(model)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.slow
def test_identity_is_gaussian_noise():
    one = plan("identity")
    stages = [jfl.gaussian(1.5) if s.role == "noise" else s for s in one.release.stages]
    other = dataclasses.replace(one, release=jfl.chain(*stages, adjacency="replace_one"))
    # What computed normals cannot reach is charged for the shift of the whole run, not of a round.
    mine, independent = (jfl.guarantee(p, 5).epsilon for p in (one, other))
    assert independent <= mine <= independent * (1 + 1e-9)
    same = identity.noise_identity(one)
    run = dataclasses.replace(jfl.init(KEY, other), plan_identity=jnp.asarray(same))
    mine = jfl.init(KEY, one)
    noise = rounds_of.run_noise_key(rounds_of.enter_plan(run, same))
    for _ in range(3):
        run, _ = rounds_of.advance(run, other, noise)
        mine, _ = rounds_of.advance(mine, one, noise)
    np.testing.assert_array_equal(flat(mine.server.params), flat(run.server.params))


def covariance(name, seeds, made=None):
    """Of what rounds release, from many runs that do not learn; and how many numbers it is of."""
    still = plan(name, lr=1e-30, made=made)

    @jax.jit
    @jax.vmap
    def moved(key):
        run = jfl.init(key, still)
        run = rounds_of.enter_plan(run, words)
        noise = rounds_of.run_noise_key(run)

        def one(run, _):
            before = run.server.params
            run, _ = rounds_of.advance(run, still, noise)
            gone = jax.tree.map(jnp.subtract, run.server.params, before)
            return run, jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(gone)])

        return jax.lax.scan(one, run, None, length=ROUNDS)[1]

    words = identity.noise_identity(still)
    seen = np.asarray(moved(jax.random.split(KEY, seeds)), np.float64) / (1.5 * 2 * 0.8 / C)
    columns = np.moveaxis(seen, 1, -1).reshape(-1, ROUNDS)
    return columns.T @ columns / len(columns), len(columns)


def surprise(found, wanted, count):
    """The largest deviation of a covariance, in standard deviations."""
    size = np.sqrt((np.outer(np.diag(wanted), np.diag(wanted)) + wanted**2) / count)
    return (np.abs(found - wanted) / size).max()


# 45 numbers, normal to within a hundredth: beyond 6.3 deviations once in 1e8 tests
BEYOND = 6.3


@pytest.mark.parametrize("name", OFTEN)
def test_the_noise_has_the_covariance_of_its_strategy(name):
    found, count = covariance(name, 3000)
    noising = strategy(name).noising()
    assert surprise(found, noising @ noising.T, count) < BEYOND
    # and noise of another strategy would be seen, such as independent noise
    other = strategy("identity" if name != "identity" else "blt").noising()
    assert surprise(found, other @ other.T, count) > 2 * BEYOND


# --- however it is cut


@pytest.mark.parametrize("name", OFTEN)
def test_a_run_in_parts_and_in_chunks_is_the_run(name):
    whole = jfl.simulate(KEY, plan(name, chunk=C), ROUNDS).run
    part = jfl.simulate(KEY, plan(name, chunk=C), 4).run
    again = jfl.simulate(KEY, plan(name, chunk=C), ROUNDS - 4, start=part).run
    np.testing.assert_array_equal(flat(again.server.params), flat(whole.server.params))
    chunked = jfl.simulate(KEY, plan(name, chunk=2), ROUNDS).run
    np.testing.assert_allclose(flat(chunked.server.params), flat(whole.server.params), atol=2e-6)


@pytest.mark.parametrize(
    "names",
    [
        ("banded", "epochs"),
        pytest.param(("square root", "inverse"), marks=pytest.mark.slow),
        pytest.param(("blt", "max"), marks=pytest.mark.slow),
    ],
)
def test_a_sweep_over_strategies_is_one_program_and_its_runs(names):
    made = {
        "square root": lambda: square_root(ROUNDS),
        "inverse": lambda: inverse_banded(ROUNDS, ROUNDS, participations=3, separation=3),
        "banded": lambda: strategy("banded"),
        "epochs": lambda: banded_toeplitz(ROUNDS, 3, workload=np.linspace(1, 2, ROUNDS)),
        "blt": lambda: strategy("blt"),
        "max": lambda: blt(ROUNDS, 2, error="max"),
    }
    both = [dataclasses.replace(made[n](), separation=1) for n in names]
    assert jax.tree.structure(both[0]) == jax.tree.structure(both[1])
    make = lambda which: plan("", made=both[which])
    out = jfl.sweep(make, which=[0, 1], rounds=ROUNDS, seed=5)
    for which in (0, 1):
        alone = jfl.simulate(jax.random.key(5), make(which), ROUNDS)
        found = jax.tree.map(lambda x, which=which: x[which], out.metrics.loss)
        np.testing.assert_allclose(np.ravel(found), np.ravel(alone.metrics.loss), rtol=2e-5)
    assert np.ptp(np.asarray(out.metrics.loss)[:, -1]) > 0


@pytest.mark.by_default("banded")
@pytest.mark.parametrize("name", KINDS)
def test_another_plan_begins_a_factorisation_of_its_own(name):
    """What was held is gone, and normals that earlier rounds drew are not drawn again."""
    first, second = plan(name, lr=1e-30), plan(name, z=2.5, lr=1e-30)
    _, run = models(first, 4)
    found, _ = models(second, 2, run)
    entered = rounds_of.enter_plan(run, identity.noise_identity(second))
    held = jax.tree.leaves(entered.mechanism)
    assert all(not np.asarray(x).any() for x in held)
    noising = strategy(name).noising()
    draws = [fresh(second, run, i) for i in range(noising.shape[1])]
    if strategy(name).memory:  # as in the first rounds of a run
        rows = [np.pad(noising[i, : i + 1], (4, ROUNDS - 5 - i)) for i in range(2)]
    else:
        rows = noising[4:6]
    std, model = 2.5 * 2 * 0.8 / C, flat(run.server.params)
    for row, after in zip(rows, found, strict=True):
        model = model + std * sum(w * d for w, d in zip(row, draws, strict=True))
        np.testing.assert_allclose(after, model, atol=2e-6)
    old = [fresh(first, jfl.init(KEY, first), i) for i in range(4)]
    assert all(np.abs(a - b).min() > 0 for a, b in zip(old, draws))


@pytest.mark.slow
def test_a_population_on_the_host_and_algorithms_that_send_more_than_a_model():
    """What is held has the shapes of what clients send."""
    alg = jfl.algorithms.scaffold(
        jfl.grad(squared), lr=0.1, steps=2, batch=jfl.batches.without_replacement(3)
    )
    sums = dataclasses.replace(plan("banded"), algorithm=alg)
    held = jfl.init(KEY, sums).mechanism.held
    assert sum(x[0].size for x in jax.tree.leaves(held)) == 2 * 4  # of the model and its control
    fed = make_federation()
    owned = np.concatenate([np.asarray(fed.index[c, :n]) for c, n in enumerate(fed.size)])
    x, y = (np.asarray(v)[owned] for v in (fed.x, fed.y))
    many = jfl.population(
        (x, (y > 0).astype(int)),
        sizes=fed.size.tolist(),
        test=(fed.x_test, (fed.y_test > 0).astype(int)),
    )
    alg = plan("blt").algorithm
    hosted = jfl.plan(
        many,
        jfl.task(start_params(), squared),
        alg,
        jfl.sampling.full(C),
        release=plan("blt").release,
    )
    out = jfl.simulate(KEY, hosted, ROUNDS)
    assert np.isfinite(flat(out.params)).all()


# --- what is refused


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(upload=True), "a strategy that regenerates earlier noise for uploads"),
        (
            dict(private=True),
            "correlated noise in release or upload only, but got it in private_grad",
        ),
        (dict(adaptive=True), "the same in every round, with correlated noise"),
        (dict(scheduled=True), "the same in every round, with correlated noise"),
        (dict(weights=True), "the same in every round, with correlated noise"),
    ],
)
def test_noise_that_would_lie_is_refused(change, words):
    noise = jfl.correlated(1.0, strategy("blt"))
    clip = jfl.clip_l2(0.8)
    if "adaptive" in change:
        clip = jfl.clip_adaptive(1.0, C)
    if "scheduled" in change:
        clip = jfl.clip_l2(jfl.schedules.exponential(1.0, 0.9, 5))
    chained = jfl.chain(clip, jfl.total(), noise, jfl.divide(4.0))
    grad = jfl.private_grad(squared, chained) if "private" in change else jfl.grad(squared)
    alg = jfl.algorithms.fedavg(grad, lr=0.1, steps=1, batch=jfl.batches.without_replacement(3))
    options = dict(upload=chained) if "upload" in change else dict(release=chained)
    if "private" in change:
        options = {}
    if "weights" in change:
        options["weights"] = lambda r: jnp.ones(C) + jnp.arange(C) * (r % 2)
    with pytest.raises(ValueError, match=words):
        jfl.plan(
            make_federation(),
            jfl.task(start_params(), squared),
            alg,
            jfl.sampling.full(C),
            **options,
        )


@pytest.mark.slow
def test_more_rounds_than_the_strategy_covers_are_refused_and_would_be_nan():
    with pytest.raises(ValueError, match="at most the 9 rounds of the strategy"):
        jfl.simulate(KEY, plan("tree"), ROUNDS + 1)
    with pytest.raises(ValueError, match="at most the 9 rounds of the strategy"):
        jfl.guarantee(plan("tree"), ROUNDS + 1)
    part = jfl.simulate(KEY, plan("tree"), 4).run
    with pytest.raises(ValueError, match="at most the 9 rounds of the strategy"):
        jfl.simulate(KEY, plan("tree"), 6, start=part)
    for name in KINDS:
        found, run = models(plan(name), ROUNDS + 1)
        assert np.isfinite(found[:-1]).all() and np.isnan(found[-1]).all()
        assert int(run.health.nonfinite) == 1


def test_a_release_on_its_own_has_no_correlated_noise():
    chained = plan("tree").release
    with pytest.raises(ValueError, match="a release on its own"):
        jfl.privacy.mechanisms.chain.release(
            chained, KEY, (), jax.tree.map(lambda x: x[None], start_params()), jnp.ones(1)
        )
    assert correlated_noise.strategy_of(chained) is strategy("tree")


@pytest.mark.by_default("tree", "inverse banded")
@pytest.mark.parametrize("name", ["tree", "restarted", "inverse banded", "square root"])
def test_each_client_has_a_series_of_its_own(name):
    """Uploads without a signal over all rounds: the noise of a client has the covariance of the
    strategy, and that of two clients none; a test of 400 runs each, false alarms in 1e6."""
    made = STRATEGIES[name]()
    clients, runs = 3, 400
    chain_ = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.correlated(1.0, made))

    def uploads(key):
        def of(client, round_):
            address = lambda i: jax.random.fold_in(jax.random.fold_in(key, i), client)
            release = mech.release_one(
                Mechanism(chain_.stages, "zero_out"),
                address(round_),
                jnp.zeros(2),
                series=(address, round_),
            )[0]
            return release

        each = jax.vmap(of, (None, 0))
        return jax.vmap(each, (0, None))(jnp.arange(clients), jnp.arange(ROUNDS))

    drawn = jax.jit(jax.vmap(uploads))(jax.random.split(KEY, runs))  # [runs, clients, rounds, 2]
    seen = np.asarray(drawn, np.float64).transpose(0, 3, 1, 2).reshape(2 * runs, clients, ROUNDS)
    noising = made.noising()
    exact = noising @ noising.T
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)) / (2 * runs))
    for a in range(clients):
        own = seen[:, a].T @ seen[:, a] / (2 * runs)
        assert np.abs((own - exact) / scale).max() < 8
        other = seen[:, a].T @ seen[:, (a + 1) % clients] / (2 * runs)
        assert np.abs(other / scale).max() < 7
    if name != "tree":  # the half that must fail: noise of the round alone
        assert np.abs((np.diag(np.diag(exact)) - exact) / scale).max() > 7


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2])
def test_uploads_train_with_noise_that_goes_on(chunk):
    """The same in runs that go on, and in chunks."""
    fed, task = make_federation(), jfl.task(start_params(), squared)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=2, batch=jfl.batches.full())
    noise = jfl.correlated(0.05, jfl.strategies.inverse_banded(6, 3))
    chain_ = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise)
    sampler = jfl.sampling.without_replacement(C, 4)
    one = jfl.plan(fed, task, algorithm, sampler, upload=chain_)
    whole = jax.tree.leaves(jfl.simulate(KEY, one, 6).params)
    begun = jfl.simulate(KEY, one, 2)
    rest = jax.tree.leaves(jfl.simulate(KEY, one, 4, start=begun.run).params)
    other = dataclasses.replace(one, chunk=chunk)
    again = jax.tree.leaves(jfl.simulate(KEY, other, 6).params)
    for a, b, c in zip(whole, rest, again):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=2e-6)
    assert np.isfinite(np.concatenate([np.ravel(x) for x in whole])).all()
