"""Noise that follows the bands of a Haar transform, and the clips that go with it (Ranaweera et
al., 2025, and better).

A shape is a norm ||scales * Haar coefficients||.  Gaussian noise that is isotropic in that norm,
after a clip in that norm, is the Gaussian mechanism and costs what isotropic noise costs; if the
scales follow the energies of the contributions, it disturbs less.  After any other clip the chain
measures the true sensitivity in the norm of the noise, so a noise multiplier is the true one
whatever is combined.

    bands = jfl.bands.pixels(params, (28, 28))
    shape = jfl.wavelet.ellipsoid(bands, exponent=0.25)
    jfl.chain(jfl.wavelet.clip_ellipsoid(1.0, shape), jfl.total(), jfl.gaussian(1.1, shape=shape),
              jfl.divide(16))
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.pytrees import Array, Tree
from ...core.records import Fn, named
from . import haar_bands as haar
from .haar_bands import Bands
from .stages import (
    After,
    Shape,
    Stage,
    as_level,
    clip_l2,
    gaussian,
    refuse_tiny,
    require_isotropic,
    scale_to_bound,
    stretch,
)

READINGS = ("R1", "R2", "R3", "R4", "R5", "R6")
CALIBRATIONS = ("plain", "lemma2")
# The energy that a coefficient is given at least, relative to the largest one: no band is frozen.
SMALLEST_ENERGY = 1e-3**2


# --- shapes


def shape(bands: Bands, std: ArrayLike) -> Shape:
    """Return the shape of noise whose coefficients have these standard deviations, one per band.

    Only their ratios matter: they are scaled such that, at the same clip norm and noise multiplier,
    the noise has as much power as isotropic noise.  What a shape changes is how much of a
    contribution passes a clip in its norm.

    Args:
        bands: of `jfl.bands`.
        std: Float[bands], > 0, relative to each other.
    """
    _one_each("wavelet.shape", bands, std=std)
    std, sizes = jnp.asarray(std, jnp.float32), jnp.asarray(_kept(bands), jnp.float32)
    return Shape(bands, jnp.sqrt((sizes * std**2).sum() / sizes.sum()) / std)


def _kept(bands: Bands) -> np.ndarray:
    """Return the number of coefficients of each band, without the share of padding: of white noise,
    its mean energy there, Float64[bands]."""
    sizes, block_of = np.asarray(haar.sizes(bands)), np.asarray(haar.blocks(bands))
    entries = np.array(
        [sum(math.prod(bands.shapes[i]) for i in block.leaves) for block in bands.blocks]
    )
    return sizes * (entries / np.bincount(block_of, sizes))[block_of]


def ellipsoid(bands: Bands, exponent: ArrayLike = 0.25, energies: ArrayLike | None = None) -> Shape:
    """Return the shape whose noise variance of a coefficient is the `exponent`-th power of its
    expected energy.

    Args:
        bands: of `jfl.bands`.
        exponent: 0 is isotropic; 1/2 has the smallest mean squared error of the release (its noise
            has the smallest total variance at equal privacy); in between is usually best for
            training, and more than 1/2 is too much.
        energies: Float[bands], of a contribution, from public rows
            (`jfl.analysis.public_data.band_energies`) or from a private estimate
            (`jfl.algorithms.band_energies`); None: the spectrum of natural images, which reads no
            data (on MNIST it gained less than energies of public rows, and in one setting of seven
            only).

    References:
        spec of Ranaweera et al., 2025, section 3.6: not in the paper.
    """
    given = (
        checks.as_array("wavelet.ellipsoid", "exponent", exponent)
        if checks.is_concrete(exponent)
        else np.zeros(())
    )
    if given.ndim or given.dtype.kind not in "iuf" or not abs(given) <= 4:
        checks.fail(
            "wavelet.ellipsoid",
            "an exponent within -4 and 4",
            checks.short_repr(exponent),
            "0 to 1/2 is usual.",
        )
    if energies is None:
        each = jnp.asarray(haar.prior(bands))
    else:
        _one_each("wavelet.ellipsoid", bands, least=0.0, energies=energies)
        each = jnp.asarray(energies, jnp.float32) / haar.sizes(bands).astype(np.float32)
        top = jnp.max(each)
        each = jnp.where(top > 0, each / jnp.where(top > 0, top, 1.0), 1.0)
        each = jnp.maximum(each, SMALLEST_ENERGY)
    return shape(bands, each ** (jnp.asarray(exponent, jnp.float32) / 2))


def weighted(bands: Bands) -> Shape:
    """Return the shape of the paper: its norm is ||W h|| of the un-normalised coefficients h, where
    W are their numbers of leaves."""
    return Shape(bands, jnp.sqrt(jnp.asarray(haar.leaves(bands), jnp.float32)))


def _one_each(where: str, bands: Bands, least: float | None = None, **values: Any) -> None:
    ((name, value),) = values.items()
    n = haar.count(bands)
    if checks.ndim(where, name, value) != 1 or np.shape(value) != (n,):
        checks.fail(where, f"one of {name} for each of {n} bands", f"shape {np.shape(value)}")
    (checks.require_positive if least is None else checks.require_nonnegative)(where, **values)


# --- clips


@named("wavelet.clip_ellipsoid")
def _clip_ellipsoid(state: Any, row: Tree, *, bound: Array, shape: Shape) -> tuple[Tree, Array]:
    return scale_to_bound(
        bound, row, jnp.sqrt((haar.energies(shape.bands, row) * shape.scales**2).sum())
    )


@named("wavelet.clip_ellipsoid.bound")
def _ellipsoid_bound(state: Any, other: Shape | None, *, bound: Array, shape: Shape) -> Array:
    if other is not None and other.bands == shape.bands:
        return bound * jnp.max(other.scales / shape.scales)
    # the two bases may lie anyhow to each other
    return bound / jnp.min(shape.scales) * stretch(other)


def clip_ellipsoid(bound: ArrayLike | Callable[..., Any], shape: Shape) -> Stage:
    """Shrink each contribution to length `bound` in the norm of `shape`, keeping its direction.

    Args:
        bound: > 0, in units of the norm of `shape`, or a function of the round that gives it.
        shape: the norm, of this module.

    Privacy:
        in noise of the same shape the bound of a contribution is `bound`; in isotropic noise it is
        the longest axis of the ellipsoid.
    """
    if not isinstance(shape, Shape):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        checks.fail("wavelet.clip_ellipsoid", "a shape of jfl.wavelet", f"{shape!r}")
    data = dict(bound=as_level("wavelet.clip_ellipsoid", bound=bound), shape=shape)
    return Stage(Fn(_clip_ellipsoid, data), Fn(_ellipsoid_bound, data), name="clip_ellipsoid")


@named("wavelet.clip_bands")
def _clip_bands(state: Any, row: Tree, *, bounds: Array, bands: Bands) -> tuple[Tree, Array]:
    shrunk, norms = haar.shrink(bands, bounds, row)
    return shrunk, jnp.any(norms > bounds)


@named("wavelet.clip_bands.bound")
def _bands_bound(state: Any, shape: Shape | None, *, bounds: Array, bands: Bands) -> Array:
    if shape is not None and shape.bands == bands:
        return jnp.sqrt(jnp.sum(jnp.square(bounds * shape.scales)))
    return jnp.sqrt(jnp.sum(jnp.square(bounds))) * stretch(shape)


def clip_bands(bounds: ArrayLike, bands: Bands) -> Stage:
    """Shrink each band of a contribution on its own.

    All coefficients are clipped, summed and made noisy, including those of the padding.  The
    padding is dropped last, which is post-processing.  A contribution without its padding may then
    look longer than its bound.

    Args:
        bounds: Float[bands], > 0, on the norms of the orthonormal coefficients of each band.
        bands: of `jfl.bands`.

    Privacy:
        The bound of a contribution is the root of the sum of squared bounds, each in units of its
        band's noise: bands with multipliers sigma_b are one release with 1 / sigma^2 = sum of 1 /
        sigma_b^2.
    """
    _one_each("wavelet.clip_bands", bands, bounds=bounds)
    refuse_tiny("wavelet.clip_bands", bounds=bounds)
    data = dict(bounds=jnp.asarray(bounds, jnp.float32), bands=bands)
    return Stage(Fn(_clip_bands, data), Fn(_bands_bound, data), name="clip_bands")


@named("wavelet.shares")
def _shares(state: Any, row: Tree, *, bands: Bands) -> tuple[Array, Array]:
    energies = haar.energies(bands, row)
    return energies / jnp.maximum(energies.sum(), jnp.finfo(jnp.float32).tiny), jnp.zeros((), bool)


@named("wavelet.shares.bound")
def _one(state: Any, shape: Shape | None, *, bands: Bands) -> float:
    require_isotropic("wavelet.shares", shape, "Shares have no bands.")
    return 1.0


def shares(bands: Bands) -> Stage:
    """Turn each contribution into its bands' shares of its energy, Float32[bands]: >= 0, they add
    up to at most 1."""
    data = dict(bands=bands)
    return Stage(Fn(_shares, data), Fn(_one, data), name="shares")


# --- as the paper has it


def published(
    reading: str,
    bound: ArrayLike,
    noise_multiplier: ArrayLike,
    bands: Bands,
    *,
    calibration: str = "plain",
    max_weight: ArrayLike = 1.0,
    unsound: bool = False,
) -> tuple[Stage, Stage]:
    """Return the paper's mechanism under one reading of its text.

    Noise of std noise_multiplier * bound / W_j is added to the un-normalised coefficient j.  The
    readings differ in what is clipped to `bound`: R1 the contribution, R2 its coefficients, R3 each
    level of them, R4 each level of the weighted coefficients; R5 all weighted coefficients together
    and R6 their levels, whose squared bounds add up.

    Args:
        reading: "R1" to "R6".
        bound: the clip norm, > 0.
        noise_multiplier: the one that the paper states.
        bands: of `jfl.bands`.
        calibration: "plain", or "lemma2", with less noise by sqrt(2 / (2 + log2 m)), m the largest
            block.
        max_weight: the largest weight of a client, for a release with weights.
        unsound: R1 to R4 and lemma2 do not have the privacy that the paper states: say that you
            know.

    Returns:
        The clip and the noise, to stand around `total()` in a chain.

    Privacy:
        `guarantee` counts the true multiplier; R1: noise_multiplier / sqrt(m).
        `experiments.papers.as_printed` shows the stated one.
    """
    checks.require_one_of("wavelet.published", READINGS, reading=reading)
    checks.require_one_of("wavelet.published", CALIBRATIONS, calibration=calibration)
    checks.require_positive(
        "wavelet.published",
        single=True,
        bound=bound,
        noise_multiplier=noise_multiplier,
        max_weight=max_weight,
    )
    checks.require_one_of("wavelet.published", (False, True), unsound=unsound)
    sound = reading in ("R5", "R6") and calibration == "plain"
    if not (sound or unsound):
        checks.fail(
            "wavelet.published",
            "unsound=True for a mechanism without the privacy that it states",
            f"reading={reading!r}, calibration={calibration!r}",
            "For sound noise of a shape use wavelet.clip_ellipsoid and gaussian(..., shape=...).",
        )
    paper = weighted(bands)
    clip = {
        "R1": lambda: clip_l2(bound),
        "R2": lambda: clip_ellipsoid(bound, Shape(bands, 1 / paper.scales)),
        "R3": lambda: clip_bands(bound * paper.scales, bands),
        "R4": lambda: clip_bands(bound / paper.scales, bands),
        "R5": lambda: clip_ellipsoid(bound, paper),
        "R6": lambda: clip_bands(bound / paper.scales / np.sqrt(haar.count(bands)), bands),
    }[reading]()
    std = noise_multiplier * lemma2(bands, calibration) * bound * max_weight
    noise = gaussian(std=std, shape=paper)
    return clip, dataclasses.replace(
        noise, name=f"published_{reading}_{calibration}", claimed=checks.as_scalar(noise_multiplier)
    )


def lemma2(bands: Bands, calibration: str = "lemma2") -> float:
    """Return the factor by which Lemma 2 multiplies the noise."""
    return (
        1.0
        if calibration == "plain"
        else float(np.sqrt(2 / (2 + np.log2(haar.leaves(bands).max()))))
    )


# --- post-processing


def _noise_of_bands(where: str, bands: Bands, after: After) -> Array:
    if after.std is None:
        checks.fail(
            where, "a noise stage before it", "none", "Without noise there is nothing to take away."
        )
    if after.shape is None:
        return jnp.full(haar.count(bands), after.std)
    if after.shape.bands != bands:
        checks.fail(
            where,
            "the bands of the noise",
            "others",
            "Give it the bands that the shape was made of.",
        )
    return after.std / after.shape.scales


@named("wavelet.james_stein")
def _james_stein(value: Tree, after: After, *, bands: Bands) -> tuple[Tree, After]:
    std, sizes = (
        _noise_of_bands("wavelet.james_stein", bands, after),
        jnp.asarray(_kept(bands), jnp.float32),
    )
    energy = jnp.maximum(haar.energies(bands, value), jnp.finfo(jnp.float32).tiny)
    factor = jnp.where(sizes >= 3, jnp.maximum(0.0, 1 - (sizes - 2) * std**2 / energy), 1.0)
    return haar.scale(bands, factor, value), after


def james_stein(bands: Bands) -> Stage:
    """Shrink each band of a noisy release towards zero by James and Stein's factor.

    It is post-processing: free in privacy.  It lowers the error of one release; in training it
    biases every step, and usually costs accuracy.  `jfl.bands.plain(params)` makes one band of all.
    """
    return Stage(Fn(_james_stein, dict(bands=bands)), name="james_stein", role="post")


@named("wavelet.soft_threshold")
def _soft(value: Tree, after: After, *, bands: Bands, rule: str) -> tuple[Tree, After]:
    std, level = (
        _noise_of_bands("wavelet.soft_threshold", bands, after),
        np.asarray(haar.levels(bands)),
    )
    sizes = np.asarray(haar.sizes(bands))
    if rule == "universal":
        blocks = np.asarray(haar.blocks(bands))
        length = np.array([sizes[blocks == b].sum() for b in blocks])
        limit = std * np.sqrt(2 * np.log(np.maximum(length, 2))).astype(np.float32)
    else:
        signal = haar.energies(bands, value) / jnp.asarray(_kept(bands), jnp.float32) - std**2
        limit = jnp.where(
            signal > 0, std**2 / jnp.sqrt(jnp.maximum(signal, jnp.finfo(jnp.float32).tiny)), jnp.inf
        )
    limit = jnp.where(level > 0, limit, 0.0)  # never a base, nor what has no levels

    def one(c: Array, band: Any) -> Array:
        return jnp.sign(c) * jnp.maximum(jnp.abs(c) - limit[band], 0.0)

    coefficients = tuple(
        one(c, band) for c, band in zip(haar.analyse(bands, value), haar.ids(bands))
    )
    return haar.synthesise(bands, coefficients, value), after


def soft_threshold(bands: Bands, rule: str = "bayes") -> Stage:
    """Pull the detail coefficients of a noisy release towards zero, each by its band's threshold.

    It is post-processing, as `james_stein`, and with the same warning.

    Args:
        bands: of `jfl.bands`.
        rule: "universal", std * sqrt(2 log m); "bayes", variance over the estimated signal
            (BayesShrink).
    """
    checks.require_one_of("wavelet.soft_threshold", ("bayes", "universal"), rule=rule)
    return Stage(Fn(_soft, dict(bands=bands), dict(rule=rule)), name="soft_threshold", role="post")
