"""Noise in shapes: sensitivities against brute force, the paper's readings and its rounds, and
post-processing.  tests/kernels/test_haar.py has the covariance of the noise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import (
    CLIENTS,
    design_matrices,
    flat,
    make_federation,
    squared,
    start_params,
)

import jfl
from experiments.papers import as_printed
from experiments.papers.ranaweera2025 import claims as paper
from jfl import bands, wavelet
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key
from jfl.privacy.mechanisms import chain as mech

KEY = jax.random.key(3)
LIKE = {"a": jnp.zeros((4, 2)), "b": jnp.zeros(3), "c": jnp.zeros(())}
LAYOUTS = {
    "flat": bands.flat(LIKE),
    "per_layer": bands.per_layer(LIKE),
    "pixels": bands.pixels(LIKE, (2, 2)),
    "plain": bands.plain(LIKE),
}
# the mean energy of white noise in each band, without what padding drops
KEPT = {
    "flat": bands.sizes(LAYOUTS["flat"]) * 12 / 16,
    "plain": np.array([12.0]),
    "per_layer": np.concatenate([[1, 4, 2, 1], np.array([1, 2, 1]) * 3 / 4, [1]]),
    "pixels": np.array([2.0, 6, 3, 1]),
}


def tree_of(vector):
    parts = np.split(np.asarray(vector, np.float32), [8, 11])
    return {"a": parts[0].reshape(4, 2), "b": parts[1], "c": parts[2].reshape(())}


def stacked(rows):
    return jax.tree.map(lambda *x: jnp.stack(x), *map(tree_of, rows))


def vectors(seed, n):
    """Return contributions with all their weight in few directions, and some without a pattern."""
    r = np.random.default_rng(seed)
    out = np.exp(2 * r.normal(size=(n, 12)) + r.normal(size=(n, 1))) * r.normal(size=(n, 12))
    out[: n // 3] = np.repeat(r.normal(size=(n // 3, 3)), 4, axis=1)
    return out


def by_coefficient(made, numbers):
    """Return numbers [bands], one for each coefficient [coefficients]."""
    coefficients = jax.eval_shape(functools.partial(bands.analyse, made), tree_of(np.ones(12)))
    each = zip(coefficients, bands.ids(made))
    return np.concatenate(
        [np.broadcast_to(np.asarray(numbers)[at], c.shape).ravel() for c, at in each]
    )


@functools.cache
def basis_of(layout):
    """Return the transform as a dense matrix, [coefficients, 12]."""
    analyse = functools.partial(bands.analyse, LAYOUTS[layout])
    columns = jax.jit(jax.vmap(analyse))(stacked(np.eye(12)))
    return np.concatenate([np.reshape(c, (12, -1)) for c in jax.tree.leaves(columns)], 1).T


def covariance(layout, shape):
    """Return the covariance of noise of the shape, in its own units, [12, 12]."""
    basis = basis_of(layout)
    return basis.T @ np.diag(by_coefficient(shape.bands, shape.scales) ** -2.0) @ basis


# --- shapes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shape_has_the_power_of_isotropic_noise(layout):
    made, kept = LAYOUTS[layout], KEPT[layout]
    for energies in (None, np.linspace(2, 1, bands.count(made))):
        shape = wavelet.ellipsoid(made, 0.5, energies)
        power = np.trace(covariance(layout, shape))  # without the padding
        np.testing.assert_allclose(power, 12, rtol=0.25 if layout == "flat" else 0.1)
        std = 1 / np.asarray(shape.scales, np.float64)
        np.testing.assert_allclose((kept * std**2).sum(), kept.sum(), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(wavelet.ellipsoid(made, 0.0).scales), 1.0, rtol=1e-6)


def test_energies_decide_the_shape():
    made, energies = LAYOUTS["per_layer"], np.array([9.0, 1.0, 4.0, 2.0, 1.0, 3.0, 2.0, 1.0])
    for exponent in (0.25, 0.5, 1.0):
        std = 1 / np.asarray(wavelet.ellipsoid(made, exponent, energies).scales, np.float64)
        want = (energies / bands.sizes(made)) ** (exponent / 2)
        np.testing.assert_allclose(std / std[0], want / want[0], rtol=1e-5)


FLAT = LAYOUTS["flat"]
SHAPED_ADAPTIVELY = jfl.chain(
    jfl.clip_adaptive(1.0, 4),
    jfl.total(),
    jfl.gaussian(1.0, shape=wavelet.ellipsoid(FLAT)),
    adjacency="add_remove",
)


def denoised(*noise):
    """Return a release, on the bands FLAT, of noise that has none, or other bands."""
    stages = jfl.clip_l2(5.0), jfl.total(), *noise, wavelet.james_stein(FLAT)
    chain = jfl.chain(*stages, adjacency="add_remove")
    release = functools.partial(mech.release, chain, KEY, ())
    return jax.eval_shape(release, stacked([np.arange(12.0)]), np.ones(1, np.float32))


def clipped_by_bands(dtype):
    """Clip integers or complex numbers, in which noise would be rounded or partly missing."""
    stage = wavelet.clip_bands(np.ones(5), FLAT)
    row = jax.tree.map(lambda x: jnp.ones(x.shape, dtype), LIKE)
    return jax.eval_shape(stage.apply, (), row)


@pytest.mark.parametrize(
    "make, need",
    [
        (lambda: clipped_by_bands(jnp.int32), "contributions of floats, but got int32"),
        (lambda: clipped_by_bands(jnp.complex64), "contributions of floats, but got complex64"),
        (lambda: wavelet.shape(FLAT, np.ones(3)), "one value for each of 5 bands"),
        (lambda: wavelet.shape(FLAT, np.array([1.0, 1, 1, 1, 0])), "std > 0"),
        (lambda: wavelet.shape(FLAT, np.array([1e-6, 1, 1, 1, 1])), "ratios of at most 100000"),
        (lambda: wavelet.ellipsoid(FLAT, 12.0), "ratios of at most 100000"),
        (lambda: wavelet.ellipsoid(LIKE, 0.25, np.ones(5)), "bands of jfl.bands"),
        (lambda: wavelet.ellipsoid(FLAT, np.nan), "exponent >= 0"),
        (lambda: wavelet.ellipsoid(FLAT, 0.5, -np.ones(5)), "energies >= 0"),
        (lambda: wavelet.clip_ellipsoid(1.0, FLAT), "a shape of jfl.wavelet"),
        (lambda: wavelet.clip_ellipsoid(0.0, wavelet.ellipsoid(FLAT)), "bound > 0"),
        (lambda: wavelet.clip_bands(np.ones(2), FLAT), "one value for each of 5 bands"),
        (lambda: wavelet.clip_bands(np.full(5, 1e-20), FLAT), "1e-15"),
        (lambda: wavelet.published("R1", 1.0, 1.0, FLAT), "unsound=True"),
        (lambda: wavelet.published("R5", 1.0, 1.0, FLAT, calibration="lemma2"), "unsound=True"),
        (lambda: wavelet.published("R7", 1.0, 1.0, FLAT, unsound=True), "reading to be one of"),
        (lambda: wavelet.soft_threshold(FLAT, "hard"), "rule to be one of"),
        (lambda: mech.sensitivity(SHAPED_ADAPTIVELY), "isotropic noise"),
        (denoised, "a noise stage"),
        (lambda: denoised(jfl.gaussian(1.0, shape=SHAPES["per_layer"])), "bands of the noise"),
        (
            lambda: jfl.algorithms.band_energies(squared, PARAMS, noise_multiplier=1.0),
            "bands of jfl.bands",
        ),
        (lambda: jfl.algorithms.averaged(jfl.chain(jfl.total()), 0), "an algorithm of"),
    ],
)
def test_what_is_refused(make, need):
    with pytest.raises(ValueError, match=need):
        make()


# --- sensitivity


@pytest.mark.by_default("flat")
@pytest.mark.parametrize("layout", ["flat", "pixels"])
def test_a_row_that_is_not_finite_counts_as_zero_wherever_it_stands(layout):
    made, rows = LAYOUTS[layout], vectors(5, 14)
    good = stacked(np.where(np.arange(14)[:, None] < 2, rows, 0))
    for entry in range(12):  # a transform on a CPU looks at the first one
        rows[2 + entry, entry] = np.nan if entry % 2 else np.inf
    ones = np.ones(bands.count(made), np.float32)
    clips = wavelet.clip_ellipsoid(1.0, wavelet.weighted(made)), wavelet.clip_bands(ones, made)
    for clip in clips:
        chain = jfl.chain(clip, jfl.total())
        contribute = jax.jit(lambda x, chain=chain: mech.clip_and_sum(chain, (), x, jnp.ones(14)))
        found, want = contribute(stacked(rows)), contribute(good)
        np.testing.assert_allclose(flat(found.value), flat(want.value), rtol=1e-6)
        assert int(found.nonfinite) == 12


R = np.random.default_rng(0)
SHAPES = {
    name: wavelet.shape(made, np.exp(R.normal(size=bands.count(made))))
    for name, made in LAYOUTS.items()
}
CLIPS = {
    "l2": lambda s: jfl.clip_l2(0.8),
    "per_layer": lambda s: jfl.clip_per_layer({"a": 0.3, "b": 0.9, "c": 0.5}),
    "own ellipsoid": lambda s: wavelet.clip_ellipsoid(0.8, s),
    "other ellipsoid": lambda s: wavelet.clip_ellipsoid(0.8, wavelet.weighted(s.bands)),
    "ellipsoid of another basis": lambda s: wavelet.clip_ellipsoid(0.8, SHAPES["per_layer"]),
    "bands": lambda s: wavelet.clip_bands(np.linspace(0.2, 0.9, bands.count(s.bands)), s.bands),
    "bands of another basis": lambda s: wavelet.clip_bands(
        np.linspace(0.2, 0.9, 8), LAYOUTS["per_layer"]
    ),
}


@pytest.mark.by_default(
    "flat-l2",
    "flat-own ellipsoid",
    "flat-bands of another basis",
    "pixels-own ellipsoid",
    "pixels-ellipsoid of another basis",
    "plain-own ellipsoid",
)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_clipped_row_is_longer_than_its_bound(layout, clip):
    """In the norm of the noise, on which the multiplier rests."""
    shape = SHAPES[layout]
    stage = CLIPS[clip](shape)
    chain = jfl.chain(stage, jfl.total(), jfl.gaussian(1.0, shape=shape), adjacency="add_remove")
    most = float(mech.sensitivity(chain))
    # the worst direction of the norm comes last
    a = by_coefficient(shape.bands, shape.scales)[:, None] * basis_of(layout)
    sizes = np.logspace(-3, 0, 60)[:, None]
    rows = np.vstack([sizes * vectors(1, 60), 100 * np.linalg.svd(a)[2][0]])
    clipped, over = jax.jit(jax.vmap(lambda row: stage.apply((), row)))(stacked(rows))
    found = np.concatenate([np.reshape(x, (61, -1)) for x in jax.tree.leaves(clipped)], 1)
    # what counts is the noise after its padding is dropped: sqrt(g^T covariance^-1 g)
    whitened = np.linalg.inv(covariance(layout, shape))
    assert np.sqrt(np.einsum("ni,ij,nj->n", found, whitened, found)).max() <= most * (1 + 1e-5)
    assert over.any() and not over.all()
    short = ~np.asarray(over)  # what is short enough is left alone
    np.testing.assert_allclose(found[short], rows[short], rtol=1e-5, atol=1e-6)
    # some row attains the bound, or comes near it if padding drops part of the worst direction
    if clip in ("l2", "own ellipsoid"):
        attained = np.linalg.norm(a @ found[-1])
        want = 0.8 * (np.linalg.norm(a, 2) if clip == "l2" else 1)
        np.testing.assert_allclose(attained, want, rtol=1e-4)
        assert (0.7 if layout == "flat" else 0.999) * most <= attained <= most * (1 + 1e-5)


@pytest.mark.parametrize("band", range(5))
def test_bands_of_very_different_noise_do_not_hide_the_length_of_a_row(band):
    """Rows without energy in a band but for rounding, at the largest ratio of a shape."""
    ratio = np.where(np.arange(5) == band, 1 / wavelet.MAX_RATIO, 1)
    shape = wavelet.shape(FLAT, ratio)
    clip = jax.jit(lambda row: wavelet.clip_ellipsoid(1.0, shape).apply((), row)[0])
    to_coefficients = by_coefficient(FLAT, shape.scales)[:, None] * basis_of("flat")
    without_band = (
        np.linalg.pinv(basis_of("flat"))
        @ np.diag(by_coefficient(FLAT, (np.arange(5) != band).astype(float)))
        @ basis_of("flat")
    )
    for row in vectors(7, 60):
        clipped = flat(clip(tree_of(1e6 * without_band @ row))).astype(np.float64)
        assert np.linalg.norm(to_coefficients @ clipped) <= 1 + 1e-3
    stopped = jax.jit(lambda least: wavelet.shape(FLAT, jnp.ones(5).at[band].set(least)).scales)
    assert np.isfinite(stopped(1e-4)).all() and np.isnan(stopped(1e-6)).all()


def multiplier_of(clip, noise, adjacency="add_remove"):
    return mech.multiplier(jfl.chain(clip, jfl.total(), noise, adjacency=adjacency))


@pytest.mark.parametrize("reading", wavelet.READINGS)
@pytest.mark.parametrize("calibration", wavelet.CALIBRATIONS)
def test_readings_have_the_multiplier_of_the_table(reading, calibration):
    for d, m in ((3, 4), (60, 64), (1000, 1024)):
        made = bands.flat(jnp.zeros(d))
        both = wavelet.published(reading, 0.7, 1.3, made, calibration=calibration, unsound=True)
        want = float(paper.effective_noise_multiplier(reading, m, 1.3, calibration))
        assert multiplier_of(*both) == pytest.approx(want, rel=2e-6)
        assert multiplier_of(*both, "replace_one") == pytest.approx(want / 2, rel=2e-6)


# --- rounds

PARAMS = start_params()
MADE = bands.flat(PARAMS)
# the un-normalised transform of four numbers, and the weights of its coefficients
HAAR = np.array([[1, 1, 1, 1], [2, -2, 0, 0], [0, 0, 2, -2], [1, 1, -1, -1]]) / 4
WEIGHTS = np.array([4.0, 2, 2, 4])


def plan_of(algorithm):
    task = jfl.task(start_params(), squared)
    return jfl.plan(make_federation(), task, algorithm, jfl.sampling.full(CLIENTS))


def noisy_plan(clip, noise):
    chain = jfl.chain(clip, jfl.total(), noise, jfl.divide(4.0))
    grad = jfl.private_grad(squared, chain)
    return plan_of(jfl.algorithms.fedavg(grad, lr=0.2, steps=2, batch=jfl.batches.full()))


def plain_plan(z):
    return noisy_plan(jfl.clip_l2(0.9), jfl.gaussian(z))


def gradients_of(params, fed):
    """Yield the gradients of the rows of each client, [n, 4]."""
    for x, y in design_matrices(fed):
        yield (x @ params - y)[:, None] * x


def test_a_round_is_the_loop_of_the_paper():
    """DP-SGD-WAV, R5: transform, clip weighted coefficients, sum, noise, back, divide; FedAvg."""
    plan = noisy_plan(*wavelet.published("R5", 0.9, 0.5, MADE))
    run = jfl.init(jax.random.key(1), plan)
    after, _ = jax.jit(lambda run: jfl.run_round(run, plan))(run)
    base = stream_key(run_noise_key(run), Stream.ROWS, 0)
    scales = wavelet.weighted(MADE).scales
    draw = jax.jit(lambda k: bands.noise(MADE, k, 0.5 * 0.9 / scales, start_params()))
    each = [flat(start_params()) for _ in range(CLIENTS)]
    for s in range(2):
        for c in range(CLIENTS):
            gradients = list(gradients_of(each[c], plan.fed))[c] @ HAAR.T
            lengths = np.linalg.norm(WEIGHTS * gradients, axis=1, keepdims=True)
            total = (gradients / np.maximum(1, lengths / 0.9)).sum(0)
            key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, c), 0), s)
            each[c] = each[c] - 0.2 * (np.linalg.solve(HAAR, total) + flat(draw(key))) / 4.0
    want = np.mean(each, axis=0)
    np.testing.assert_allclose(flat(after.server.params), want, rtol=2e-4, atol=2e-5)


def test_the_ledger_reads_the_true_multiplier():
    plan = noisy_plan(*wavelet.published("R1", 0.9, 2.0, MADE, unsound=True))
    found = jfl.guarantee(plan, rounds=3, delta=1e-5)
    want = jfl.guarantee(plain_plan(2.0 / np.sqrt(4) / 2), rounds=3, delta=1e-5)
    assert found.epsilon == pytest.approx(want.epsilon, rel=1e-5)
    claim = as_printed.claimed(plan, 3, 1e-5)
    stated = jfl.guarantee(plain_plan(2.0), rounds=3, delta=1e-5)
    assert claim.status == "claimed" and claim.epsilon == pytest.approx(stated.epsilon, rel=0.02)
    assert claim.epsilon < found.epsilon / 3
    z = as_printed.calibrate(plan, epsilon=claim.epsilon, rounds=3)
    assert z == pytest.approx(2.0, rel=1e-3)
    with pytest.raises(ValueError, match="wavelet.published"):
        as_printed.claimed(plain_plan(2.0), 3, 1e-5, paper="ranaweera2025")
    # noise in its own norm costs as much as isotropic noise
    shape = wavelet.ellipsoid(MADE, 0.5)
    shaped = noisy_plan(wavelet.clip_ellipsoid(0.9, shape), jfl.gaussian(1.0, shape=shape))
    one, other = (jfl.calibrate(p, epsilon=3.0, rounds=5) for p in (shaped, plain_plan(1.0)))
    assert one == other


# --- post-processing


def loop(rule, c, at, sizes, levels, std):
    """Return denoised coefficients [n] of a leaf, by the definition of each rule."""
    out = c.copy()
    for b in np.unique(at):
        mine, energy = c[at == b], np.sum(c[at == b] ** 2)
        if rule == "james_stein":
            factor = max(0.0, 1 - (sizes[b] - 2) * std[b] ** 2 / energy) if sizes[b] >= 3 else 1.0
            out[at == b] = factor * mine
        elif levels[b] > 0:
            limit = std[b] * np.sqrt(2 * np.log(c.size))
            if rule == "bayes":
                signal = energy / sizes[b] - std[b] ** 2
                limit = std[b] ** 2 / np.sqrt(signal) if signal > 0 else np.inf
            out[at == b] = np.sign(mine) * np.maximum(np.abs(mine) - limit, 0)
    return out


@pytest.mark.by_default("True-per_layer")
@pytest.mark.parametrize("layout", ["flat", "per_layer"])
@pytest.mark.parametrize("shaped", [False, True])
def test_denoisers_against_a_loop(layout, shaped):
    made, shape = LAYOUTS[layout], SHAPES[layout] if shaped else None
    noise = jfl.gaussian(std=0.6, shape=shape)
    std = 0.6 / 3 / (np.asarray(shape.scales) if shaped else np.ones(bands.count(made)))
    posts = {
        "none": (),
        "james_stein": (wavelet.james_stein(made),),
        "universal": (wavelet.soft_threshold(made, "universal"),),
        "bayes": (wavelet.soft_threshold(made, "bayes"),),
    }

    @jax.jit
    def released(row):
        stages = jfl.clip_l2(5.0), jfl.total(), noise, jfl.divide(3.0)
        chains = (jfl.chain(*stages, *p, adjacency="add_remove") for p in posts.values())
        return [mech.release(c, KEY, (), row, jnp.ones(1))[0] for c in chains]

    for seed in range(3):
        row = np.random.default_rng(seed).normal(size=12)
        found = dict(zip(posts, released(stacked([row]))))
        noisy = [np.asarray(c, np.float64) for c in bands.analyse(made, found.pop("none"))]
        for rule, value in found.items():
            about = KEPT[layout], bands.levels(made), std
            want = [loop(rule, c, at, *about) for c, at in zip(noisy, bands.ids(made))]
            want = tuple(jnp.asarray(w, jnp.float32) for w in want)
            back = flat(bands.synthesise(made, want, value))  # without the padding
            np.testing.assert_allclose(flat(value), back, rtol=1e-3, atol=2e-5)


# --- energies, privately


def test_private_energies_and_what_both_plans_cost():
    estimate = lambda z: plan_of(jfl.algorithms.band_energies(squared, MADE, noise_multiplier=z))
    plan = estimate(1e-6)
    server = jfl.simulate(KEY, plan, 2).run.server  # without a warning that nothing is trained
    clients = []
    for g in gradients_of(flat(start_params()), make_federation()):
        e = (g @ (np.sqrt(WEIGHTS)[:, None] * HAAR).T) ** 2
        e = np.stack([e[:, 0], e[:, 1] + e[:, 2], e[:, 3]], 1)
        clients.append((e / e.sum(1, keepdims=True)).mean(0))
    np.testing.assert_allclose(np.asarray(server.energies), np.mean(clients, 0), atol=1e-4)
    np.testing.assert_allclose(flat(plan.algorithm.params(server)), flat(start_params()))
    segments = [(estimate(5.0), 1), (plain_plan(5.0), 3)]
    both = jfl.guarantee(segments, delta=1e-5, seeds="different")
    exact = jfl.guarantee(plain_plan(5.0 / np.sqrt(7 / 6)), 3)
    assert both.epsilon == pytest.approx(exact.epsilon, rel=1e-4)


# --- averages of iterates


@pytest.mark.slow
def test_averaged_is_the_mean_of_the_models():
    plan = dataclasses.replace(plain_plan(0.3), paired_noise=True)  # both have the same noise
    averaged = dataclasses.replace(plan, algorithm=jfl.algorithms.averaged(plan.algorithm, 2))
    runs, mean, models = jfl.init(KEY, plan), jfl.init(KEY, averaged), []
    step, step_of_mean = (
        jax.jit(lambda run, plan=plan: jfl.run_round(run, plan)[0]) for plan in (plan, averaged)
    )
    for r in range(5):
        runs, mean = step(runs), step_of_mean(mean)
        models.append(flat(runs.server.params))
        np.testing.assert_allclose(flat(mean.server.inner.params), models[-1], rtol=1e-6)
        want = np.mean(models[2:], axis=0) if r >= 2 else models[-1]
        np.testing.assert_allclose(flat(averaged.algorithm.params(mean.server)), want, rtol=1e-5)
    assert jfl.guarantee(averaged, 5).epsilon == jfl.guarantee(plan, 5).epsilon
