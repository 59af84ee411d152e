"""Scattering features, against direct sums over pixels; and the noise of a federation that adds
shares of it."""

import dataclasses

import jax
import numpy as np
import pytest

import jfl
from experiments.studies import recipes, scattering
from experiments.studies.recipes import Made

SIDE = 8
IMAGE = np.random.default_rng(0).random((SIDE, SIDE)).astype(np.float32)


def wavelet(scale, angle, period):
    """Morlet: a wave under a Gaussian, less a Gaussian, added up over periods."""
    x, y = np.mgrid[-2 * period : 3 * period, -2 * period : 3 * period]
    width = 0.8 * 2**scale
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    window = np.exp(-(along**2 + (across / 2) ** 2) / (2 * width**2))
    wave = window * np.exp(0.75j * np.pi / 2**scale * along)
    wave -= wave.sum() / window.sum() * window
    return wave.reshape(5, period, 5, period).sum((0, 2)) / (4 * np.pi * width**2)


def convolved(image, weights):
    """Circular convolution, one shifted image per pixel of the weights."""
    pixels = np.ndindex(*weights.shape)
    return sum(weights[i, j] * np.roll(image, (i, j), (0, 1)) for i, j in pixels)


def averaged(image):
    """Gaussian average of width 1.6 on an image of full resolution, at the inner fourth pixels."""
    n = len(image)
    x, y = np.mgrid[-2 * n : 3 * n, -2 * n : 3 * n]
    weights = np.exp(-(x**2 + y**2) / (2 * 1.6**2)) / (2 * np.pi * 1.6**2)
    return convolved(image, weights.reshape(5, n, 5, n).sum((0, 2)))[::4, ::4][1:-1, 1:-1]


def test_scattering_is_its_definition():
    found = np.asarray(scattering.scatter(IMAGE[None]))[0]
    assert found.shape == (81, 2, 2)
    padded = np.pad(IMAGE, 4, mode="reflect")
    np.testing.assert_allclose(found[0], averaged(padded), rtol=1e-4)
    angles = [(3 - i) * np.pi / 8 for i in range(8)]
    for i in (0, 5):  # order 1, fine
        fine = np.abs(convolved(padded, wavelet(0, angles[i], 16)))
        np.testing.assert_allclose(found[1 + i], averaged(fine), rtol=1e-3)
        # coarse: every second pixel; its average keeps only the lowest frequencies
        for at, image in ((9, padded), (17 + 8 * i, fine)):
            for k in (0, 3):
                coarse = np.abs(convolved(image, wavelet(1, angles[k], 16)))[::2, ::2]
                weights = scattering.averaging(16, 8)[1:-1]
                np.testing.assert_allclose(found[at + k], weights @ coarse @ weights.T, rtol=1e-3)
    # the average of a constant is close to it at either resolution
    for length in (16, 8):
        sums = scattering.averaging(16, length).sum(1) * length / 16
        np.testing.assert_allclose(sums, sums[0], rtol=1e-5)


def test_wavelets_ignore_brightness_and_features_are_normalised_by_row():
    plain, brighter = (np.asarray(scattering.scatter(x[None])) for x in (IMAGE, IMAGE + 1))
    np.testing.assert_allclose(plain[:, 1:], brighter[:, 1:], atol=2e-6)
    assert (brighter[:, 0] > plain[:, 0] + 0.9).all()
    both = scattering.features(np.stack([IMAGE, IMAGE.T]))
    np.testing.assert_allclose(both[:1], scattering.features(IMAGE[None]), atol=1e-5)
    grouped = both.reshape(2, 27, -1)
    np.testing.assert_allclose(grouped.mean(2), 0, atol=1e-5)
    variance = plain.reshape(27, -1).var(1)
    np.testing.assert_allclose(grouped[0].var(1), variance / (variance + 1e-5), rtol=1e-3)


def test_shares_of_noise_add_up_to_that_of_one_client():
    fields = dict(dataset="digits", model="logistic", partition="iid", batch=60, rounds=1, lr=1.0)
    fields |= dict(algorithm="fedsgd", batch_sampler="poisson", epsilon=20.0)
    fields |= dict(unit="example", view="server", noise=(1e3,), clip_norm=1e-3)

    def moved(recipe, clients):
        plan = recipes.plan_of(Made(**fields | dict(recipe=recipe, clients=clients)))
        model = lambda rounds: jfl.simulate(jax.random.key(0), plan, rounds).run.server.params
        start = plan.task.init(jax.random.key(0))
        change = jax.tree.map(lambda a, b: np.ravel(a - b), model(1), start)
        return np.concatenate(jax.tree.leaves(change)).std()

    assert moved("scattered", 1) == pytest.approx(1 / 60, rel=0.05)  # 3,250 normals
    assert moved("shares", 9) == pytest.approx(1 / 60, rel=0.05)
    assert moved("scattered", 9) == pytest.approx(3 / 60, rel=0.05)
    config = dataclasses.replace(Made(**fields | dict(recipe="shares", clients=9)), noise=(2.0,))
    found = recipes.worth(config)
    assert (found.view, found.status) == ("aggregate", "conditional")
    one = recipes.worth(dataclasses.replace(config, recipe="scattered", clients=1))
    assert found.epsilon == one.epsilon
