"""Noise that is correlated over rounds, as a run adds it: that of a loop in NumPy on the same
draws, with the covariance of its strategy, however a run is cut, chunked or swept."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close, flat, make_federation, on_host, squared, start_params
from jfl.kernels.normals import normals

import jfl
from jfl.core import identity
from jfl.core.random_streams import Stream
from jfl.core.records import Mechanism
from jfl.engine import round as rounds_of
from jfl.privacy.mechanisms import chain as mech
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


@functools.cache
def strategy(name):
    return STRATEGIES[name]()


def plan(name, z=1.5, sampler=None, lr=0.3, made=None, fed=None, site="release", **options):
    noise = jfl.correlated(z, strategy(name) if made is None else made)
    mean = [jfl.divide(float(C))] if site == "release" else []
    chain = jfl.chain(jfl.clip_l2(0.8), jfl.total(), noise, *mean)
    alg = jfl.algorithms.fedavg(
        jfl.grad(squared), lr=lr, steps=2, batch=jfl.batches.without_replacement(3)
    )
    task, fed = jfl.task(start_params(), squared), fed or make_federation()
    return jfl.plan(fed, task, alg, sampler or jfl.sampling.full(C), **{site: chain}, **options)


def models(plan, count=ROUNDS, run=None):
    """The model after each round, Float64[rounds, parameters], of a run in parts of one round."""
    out = []
    for _ in range(count):
        run = jfl.simulate(KEY, plan, 1, start=run).run
        out.append(flat(run.server.params))
    return np.array(out), run


def models_at_once(plan):
    params = flat(jfl.simulate(KEY, plan, ROUNDS).params)
    assert np.isfinite(params).all()
    return params


@functools.partial(jax.jit, static_argnames="count")
def draw_normals(key, count):
    of = jax.vmap(lambda index: normals(jax.random.fold_in(key, index), start_params()))
    return of(jnp.arange(count))


def fresh(plan, run, count):
    """The first normals of a run."""
    words = identity.noise_identity(plan)
    key = rounds_of.run_noise_key(rounds_of.enter_plan(run, words))
    drawn = draw_normals(jax.random.fold_in(key, Stream.RELEASE), count)
    return [flat(jax.tree.map(lambda x, i=i: x[i], drawn)) for i in range(count)]


@pytest.mark.by_default("banded")
@pytest.mark.parametrize("name", NAMES)
def test_rounds_add_the_noise_of_a_loop_in_numpy(name):
    """Clients that do not learn upload zeros, so only noise moves the model.  A run in parts of one
    round equals the run at once."""
    still, noisy = plan(name, lr=1e-30), strategy(name).noising()
    found, run = models(still)
    draws = fresh(still, run, noisy.shape[1])
    std, wanted, model = 1.5 * 2 * 0.8 / C, [], flat(start_params())
    for row in noisy:
        mixed = np.zeros_like(model)
        for weight, draw in zip(row, draws, strict=True):
            mixed = mixed + weight * draw
        model = model + std * mixed
        wanted.append(model)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_array_equal(found[-1], models_at_once(still))


# --- runs in chunks, and under another plan


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("site", ["release", "upload"])
def test_a_run_in_chunks_is_the_run(site, chunk):
    few = jfl.sampling.without_replacement(C, 4)
    whole = plan("", made=inverse_banded(ROUNDS, 3), sampler=few, site=site)
    straight = models_at_once(whole)
    np.testing.assert_array_equal(models(whole)[0][-1], straight)
    again = models_at_once(dataclasses.replace(whole, chunk=chunk))
    np.testing.assert_allclose(again, straight, atol=2e-6)


@pytest.mark.by_default("workloads")
@pytest.mark.parametrize("pair", ["workloads", "full", "blt"])
def test_a_sweep_over_strategies_is_one_program_and_its_runs(pair):
    far = dict(participations=3, separation=3)
    both = dict(
        full=lambda: [
            dataclasses.replace(one, separation=1)
            for one in (square_root(ROUNDS), inverse_banded(ROUNDS, ROUNDS, **far))
        ],
        workloads=lambda: [
            strategy("banded"),
            banded_toeplitz(ROUNDS, 3, workload=np.linspace(1, 2, ROUNDS)),
        ],
        blt=lambda: [strategy("blt"), blt(ROUNDS, 2, error="max")],
    )[pair]()
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
    draws = fresh(second, run, noising.shape[1])
    if strategy(name).memory:  # as in the first rounds of a run
        rows = [np.pad(noising[i, : i + 1], (4, ROUNDS - 5 - i)) for i in range(2)]
    else:
        rows = noising[4:6]
    std, model = 2.5 * 2 * 0.8 / C, flat(run.server.params)
    for row, after in zip(rows, found, strict=True):
        model = model + std * sum(w * d for w, d in zip(row, draws, strict=True))
        np.testing.assert_allclose(after, model, atol=2e-6)
    old = fresh(first, run, 4)
    assert all(np.abs(a - b).min() > 0 for a, b in zip(old, draws))


@pytest.mark.slow
def test_a_population_on_the_host_and_algorithms_that_send_more_than_a_model():
    """State of the noise has the shapes of uploads."""
    alg = jfl.algorithms.scaffold(jfl.grad(squared), batch=jfl.batches.without_replacement(3))
    held = jfl.init(KEY, dataclasses.replace(plan("banded"), algorithm=alg)).mechanism.held
    assert sum(x[0].size for x in jax.tree.leaves(held)) == 2 * 4  # of the model and its control
    near, far = (plan("blt", fed=fed) for fed in (make_federation(), on_host(make_federation())))
    close(jfl.simulate(KEY, near, ROUNDS).params, jfl.simulate(KEY, far, ROUNDS).params)


ONCE = "the same in every round, with correlated noise"


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(site="upload"), "a strategy that regenerates earlier noise for uploads"),
        (dict(site="rows"), "correlated noise in release or upload only, but got it in private_gr"),
        (dict(clip=jfl.clip_adaptive(1.0, C)), ONCE),
        (dict(clip=jfl.clip_l2(jfl.schedules.exponential(1.0, 0.9, 5))), ONCE),
        (dict(weights=lambda r: jnp.ones(C) + jnp.arange(C) * (r % 2)), ONCE),
    ],
)
def test_noise_that_would_lie_is_refused(options, words):
    options = dict(options)
    site, clip = options.pop("site", "release"), options.pop("clip", jfl.clip_l2(0.8))
    noise = jfl.correlated(1.0, strategy("banded"))
    chained = jfl.chain(clip, jfl.total(), noise, jfl.divide(4.0))
    grad = jfl.private_grad(squared, chained) if site == "rows" else jfl.grad(squared)
    alg = jfl.algorithms.fedavg(grad, batch=jfl.batches.without_replacement(3))
    if site != "rows":
        options[site] = chained
    task = jfl.task(start_params(), squared)
    with pytest.raises(ValueError, match=words):
        jfl.plan(make_federation(), task, alg, jfl.sampling.full(C), **options)


def test_a_release_on_its_own_has_no_correlated_noise():
    contribution = jax.tree.map(lambda x: x[None], start_params())
    of = lambda contribution, count: mech.release(
        plan("banded").release, KEY, (), contribution, count
    )
    with pytest.raises(ValueError, match="a release on its own"):
        jax.eval_shape(of, contribution, jnp.ones(1))


# --- what is refused


@pytest.mark.slow
def test_more_rounds_than_the_strategy_covers_are_refused_and_would_be_nan():
    tree, words = plan("tree"), "at most the 9 rounds of the strategy"
    part = jfl.simulate(KEY, tree, 4).run
    for call in (
        lambda: jfl.simulate(KEY, tree, ROUNDS + 1),
        lambda: jfl.guarantee(tree, ROUNDS + 1),
        lambda: jfl.simulate(KEY, tree, 6, start=part),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    step = jax.jit(jfl.run_round)
    for name in KINDS:
        made = plan(name)
        run = jfl.simulate(KEY, made, ROUNDS).run
        run, _ = step(run, made)
        assert np.isnan(flat(run.server.params)).all() and int(run.health.nonfinite) == 1


@pytest.mark.by_default("inverse banded")
@pytest.mark.parametrize("name", ["tree", "inverse banded", "square root"])
def test_each_client_has_a_series_of_its_own(name):
    """Uploads without a signal over all rounds: the noise of a client has the covariance of the
    strategy, and that of two clients none; a test of 400 runs each, false alarms in 1e6."""
    made, clients, runs = strategy(name), 3, 400
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.correlated(1.0, made))
    chain = Mechanism(chain.stages, "zero_out")

    def upload(key, client, round_):
        address = lambda i: jax.random.fold_in(jax.random.fold_in(key, i), client)
        series = address, round_
        return mech.release_one(chain, address(round_), jnp.zeros(2), series=series)[0]

    of_clients = jax.vmap(upload, (None, 0, None))
    of_rounds = jax.vmap(of_clients, (None, None, 0))
    of_runs = jax.jit(jax.vmap(of_rounds, (0, None, None)))
    drawn = of_runs(jax.random.split(KEY, runs), jnp.arange(clients), jnp.arange(ROUNDS))
    # [runs, rounds, clients, 2] -> [samples, clients, rounds]
    seen = np.asarray(drawn, np.float64).transpose(0, 3, 2, 1).reshape(2 * runs, clients, ROUNDS)
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
