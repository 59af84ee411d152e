"""Noise whose scale differs between the bands of a Haar transform, and the matching clips.

The idea is from Ranaweera et al., 2025 ("the paper" below), with improvements.  A shape is a norm
||scales * Haar coefficients||.  Gaussian noise that is isotropic in this norm, after a clip in this
norm, is a Gaussian mechanism and costs as much privacy as isotropic noise; if the scales follow the
energies of the contributions, it disturbs training less.  After any other clip, the chain computes
the true sensitivity in the norm of the noise, so a noise multiplier is always the true one.

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
    require_floats,
    require_isotropic,
    scale_to_bound,
    stretch,
)

READINGS = ("R1", "R2", "R3", "R4", "R5", "R6")
CALIBRATIONS = ("plain", "lemma2")
# The smallest energy of a coefficient, relative to the largest: every band gets some noise.
MIN_RELATIVE_ENERGY = 1e-3**2
# The largest ratio of two standard deviations of a shape.  With a larger one, rounding errors of
# coefficients in one band would hide those in another: at 1e8, contributions of twice the clip norm
# were not clipped.
MAX_RATIO = np.float32(1e5)


# --- shapes


def shape(bands: Bands, std: ArrayLike) -> Shape:
    """Return the norm in which noise with these standard deviations is isotropic, as a Shape.

    Only the ratios of the deviations matter: they are scaled so that, at the same clip norm and
    noise multiplier, the noise has as much power as isotropic noise.  The shape affects how much of
    a contribution passes a clip in its norm.

    Args:
        bands: groups of Haar coefficients, from `jfl.bands`.
        std: Float[bands], > 0, the standard deviations of the noise in the coefficients of each
            band, relative to each other.  Their ratios are at most 1e5.
    """
    checks.require_positive("wavelet.shape", std=std)
    std = haar.one_per_band("wavelet.shape", bands, std)
    ratio = std.max() / std.min()
    if checks.is_concrete(ratio) and not ratio <= MAX_RATIO:
        checks.fail(
            "wavelet.shape",
            f"standard deviations with ratios of at most {MAX_RATIO:g}",
            f"{ratio:g}",
            "Raise the smallest ones, or lower the exponent of an ellipsoid.",
        )
    std = jnp.where(ratio <= MAX_RATIO, std, jnp.nan)  # a traced ratio; nan stops the run
    sizes = jnp.asarray(_num_unpadded(bands), jnp.float32)
    return Shape(bands, jnp.sqrt((sizes * std**2).sum() / sizes.sum()) / std)


def _num_unpadded(bands: Bands) -> np.ndarray:
    """Return the number of coefficients of each band, not counting padding, Float64[bands].

    A block's padding is shared out over its bands in proportion to their sizes.
    """
    sizes, block_of = haar.sizes(bands), haar.blocks(bands)
    entries = np.array(
        [sum(math.prod(bands.shapes[i]) for i in block.leaves) for block in bands.blocks]
    )
    return sizes * (entries / np.bincount(block_of, sizes))[block_of]


def ellipsoid(bands: Bands, exponent: ArrayLike = 0.25, energies: ArrayLike | None = None) -> Shape:
    """Return the Shape with which the noise variance of a coefficient is a power of its energy.

    The variance is proportional to (expected energy of the coefficient)^exponent.

    Args:
        bands: from `jfl.bands`.
        exponent: >= 0; 0 is isotropic noise.  1/2 minimises the mean squared error of the release
            (its noise has the smallest total variance at equal privacy).  Values in between are
            usually best for training; values above 1/2 shape the noise too strongly.
        energies: Float[bands], the energies of a contribution, from public rows
            (`jfl.analysis.public_data.band_energies`) or from a private estimate
            (`jfl.algorithms.band_energies`).  None uses the spectrum of natural images, which needs
            no data.  (On MNIST this shape gained accuracy in only one of seven settings, and less
            than with the energies of public rows.)
    """
    checks.require_nonnegative("wavelet.ellipsoid", single=True, exponent=exponent)
    if energies is None:
        each = jnp.asarray(haar.prior(bands))
    else:
        checks.require_nonnegative("wavelet.ellipsoid", energies=energies)
        each = haar.one_per_band("wavelet.ellipsoid", bands, energies)
        each = each / haar.sizes(bands).astype(np.float32)
        top = jnp.max(each)
        each = jnp.where(top > 0, each / jnp.where(top > 0, top, 1.0), 1.0)
        each = jnp.maximum(each, MIN_RELATIVE_ENERGY)
    return shape(bands, each ** (jnp.asarray(exponent, jnp.float32) / 2))


def weighted(bands: Bands) -> Shape:
    """Return the Shape, a norm, in which the noise of Ranaweera et al., 2025, is isotropic.

    It is ||W h|| for the un-normalised Haar coefficients h, where W has for each coefficient the
    number of entries from which it is computed.
    """
    return Shape(bands, jnp.sqrt(jnp.asarray(haar.leaves(bands), jnp.float32)))


# --- clips


@named("wavelet.clip_ellipsoid")
def _clip_ellipsoid(state: Any, row: Tree, *, bound: Array, shape: Shape) -> tuple[Tree, Array]:
    """Clip a contribution in the norm of `shape`."""
    return scale_to_bound(
        bound, row, jnp.sqrt((haar.energies(shape.bands, row) * shape.scales**2).sum())
    )


@named("wavelet.clip_ellipsoid.bound")
def _ellipsoid_bound(state: Any, other: Shape | None, *, bound: Array, shape: Shape) -> Array:
    """Return the bound of a contribution that is clipped in the norm of `shape`, in the norm of
    `other`."""
    if other is not None and other.bands == shape.bands:
        return bound * jnp.max(other.scales / shape.scales)
    # nothing is known about how the two bases are related
    return bound / jnp.min(shape.scales) * stretch(other)


def clip_ellipsoid(bound: ArrayLike | Callable[..., Any], shape: Shape) -> Stage:
    """Scale each contribution down to a length of at most `bound` in the norm of `shape`.

    Args:
        bound: > 0, in units of the norm of `shape`, or a function of the round.
        shape: a Shape, from a function of this module.

    Privacy:
        With noise of the same shape, the bound of a contribution is `bound`; with isotropic noise,
        it is the longest axis of the ellipsoid.
    """
    if not isinstance(shape, Shape):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        checks.fail("wavelet.clip_ellipsoid", "a shape of jfl.wavelet", checks.short_repr(shape))
    data = dict(bound=as_level("wavelet.clip_ellipsoid", bound=bound), shape=shape)
    return Stage(Fn(_clip_ellipsoid, data), Fn(_ellipsoid_bound, data), name="clip_ellipsoid")


@named("wavelet.clip_bands")
def _clip_bands(state: Any, row: Tree, *, bounds: Array, bands: Bands) -> tuple[Tree, Array]:
    """Clip each band of a contribution separately."""
    require_floats(row)
    shrunk, norms = haar.shrink(bands, bounds, row)
    return shrunk, jnp.any(norms > bounds)


@named("wavelet.clip_bands.bound")
def _bands_bound(state: Any, shape: Shape | None, *, bounds: Array, bands: Bands) -> Array:
    """Return the bound of a contribution whose bands are clipped separately, in the norm of
    `shape`."""
    if shape is not None and shape.bands == bands:
        return jnp.sqrt(jnp.sum(jnp.square(bounds * shape.scales)))
    return jnp.sqrt(jnp.sum(jnp.square(bounds))) * stretch(shape)


def clip_bands(bounds: ArrayLike, bands: Bands) -> Stage:
    """Scale each band of a contribution down to a norm of at most its bound.

    All coefficients are clipped and summed, and get noise, including those of the padding.  The
    padding is dropped at the end, which is post-processing.  A contribution without its padding may
    therefore have a larger norm than its bound.

    Args:
        bounds: Float[bands], > 0, on the norms of the orthonormal coefficients of each band.
        bands: from `jfl.bands`.

    Privacy:
        The bound of a contribution is the square root of the sum of squared bounds, each in units
        of the noise of its band.  Bands with multipliers sigma_b are one release with 1 / sigma^2 =
        sum of 1 / sigma_b^2.
    """
    checks.require_positive("wavelet.clip_bands", bounds=bounds)
    refuse_tiny("wavelet.clip_bands", bounds=bounds)
    data = dict(bounds=haar.one_per_band("wavelet.clip_bands", bands, bounds), bands=bands)
    return Stage(Fn(_clip_bands, data), Fn(_bands_bound, data), name="clip_bands")


@named("wavelet.shares")
def _shares(state: Any, row: Tree, *, bands: Bands) -> tuple[Array, Array]:
    """Return the fraction of a contribution's energy that is in each band."""
    energies = haar.energies(bands, row)
    return energies / jnp.maximum(energies.sum(), jnp.finfo(jnp.float32).tiny), jnp.zeros((), bool)


@named("wavelet.shares.bound")
def _shares_bound(state: Any, shape: Shape | None, *, bands: Bands) -> float:
    """Return the bound 1 of fractions that add up to at most 1."""
    require_isotropic("wavelet.shares", shape, "Shares have no bands.")
    return 1.0


def shares(bands: Bands) -> Stage:
    """Map each contribution to the fraction of its energy in each band, Float32[bands].

    The fractions are >= 0 and add up to at most 1.
    """
    data = dict(bands=bands)
    return Stage(Fn(_shares, data), Fn(_shares_bound, data), name="shares")


# --- the mechanism as printed in the paper


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
    """Return the clip and the noise of Ranaweera et al., 2025, in one reading of their text.

    Noise of std noise_multiplier * bound / W_j is added to the un-normalised coefficient j, which
    is computed from W_j entries.  The readings differ in what is clipped to `bound`:

    - R1: the contribution,
    - R2: all its coefficients,
    - R3: each level of coefficients,
    - R4: each level of weighted coefficients,
    - R5: all weighted coefficients,
    - R6: each level of weighted coefficients, with smaller bounds: their squares add up to that of
      R5.

    Args:
        reading: "R1" to "R6".
        bound: the clip norm, > 0.
        noise_multiplier: the one that the paper states.
        bands: from `jfl.bands`.
        calibration: "plain", or "lemma2" for noise that is smaller by the factor sqrt(2 / (2 + log2
            m)), where m is the size of the largest block.
        max_weight: the largest weight of a client, for a release with weights.
        unsound: True to confirm that you know that R1 to R4 and lemma2 do not have the privacy that
            the paper states.

    Returns:
        The clip and the noise, for the stages before and after `total()` in a chain.

    Privacy:
        `guarantee` uses the true multiplier; for R1 it is noise_multiplier / sqrt(m).
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
            "unsound=True for a mechanism that does not have its stated privacy",
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
    factor = 1.0
    if calibration == "lemma2":
        factor = float(np.sqrt(2 / (2 + np.log2(haar.leaves(bands).max()))))
    noise = gaussian(std=noise_multiplier * factor * bound * max_weight, shape=paper)
    return clip, dataclasses.replace(
        noise, name=f"published_{reading}_{calibration}", claimed=checks.as_scalar(noise_multiplier)
    )


# --- post-processing


def _noise_of_bands(where: str, bands: Bands, after: After) -> Array:
    """Return the standard deviation of the noise in each band, Float32[bands]."""
    if after.std is None:
        checks.fail(
            where, "a noise stage before it", "none", "Without noise there is nothing to remove."
        )
    if after.shape is None:
        return jnp.full(haar.count(bands), after.std)
    if after.shape.bands != bands:
        checks.fail(
            where,
            "the bands of the noise",
            "others",
            "Pass the bands from which the shape was made.",
        )
    return after.std / after.shape.scales


@named("wavelet.james_stein")
def _james_stein(value: Tree, after: After, *, bands: Bands) -> tuple[Tree, After]:
    """Multiply each band of a release by its James-Stein factor."""
    std = _noise_of_bands("wavelet.james_stein", bands, after)
    sizes = jnp.asarray(_num_unpadded(bands), jnp.float32)
    energy = jnp.maximum(haar.energies(bands, value), jnp.finfo(jnp.float32).tiny)
    factor = jnp.where(sizes >= 3, jnp.maximum(0.0, 1 - (sizes - 2) * std**2 / energy), 1.0)
    return haar.scale(bands, factor, value), after


def james_stein(bands: Bands) -> Stage:
    """Shrink each band of a noisy release towards zero by its James-Stein factor.

    This is post-processing and costs no privacy.  It lowers the error of one release; in training
    it biases every step, and usually costs accuracy.  With `jfl.bands.plain(params)`, which is one
    band, the factor is the same for all coordinates.
    """
    return Stage(Fn(_james_stein, dict(bands=bands)), name="james_stein", role="post")


@named("wavelet.soft_threshold")
def _soft_threshold(value: Tree, after: After, *, bands: Bands, rule: str) -> tuple[Tree, After]:
    """Shrink the detail coefficients of a release by the thresholds of their bands."""
    std = _noise_of_bands("wavelet.soft_threshold", bands, after)
    if rule == "universal":
        blocks = haar.blocks(bands)
        length = np.bincount(blocks, haar.sizes(bands))[blocks]
        limit = std * np.sqrt(2 * np.log(np.maximum(length, 2))).astype(np.float32)
    else:
        signal = (
            haar.energies(bands, value) / jnp.asarray(_num_unpadded(bands), jnp.float32) - std**2
        )
        limit = jnp.where(
            signal > 0, std**2 / jnp.sqrt(jnp.maximum(signal, jnp.finfo(jnp.float32).tiny)), jnp.inf
        )
    limit = jnp.where(haar.levels(bands) > 0, limit, 0.0)  # leave bases and plain bands unchanged

    def shrink(c: Array, band: Any) -> Array:
        return jnp.sign(c) * jnp.maximum(jnp.abs(c) - limit[band], 0.0)

    coefficients = tuple(
        shrink(c, band) for c, band in zip(haar.analyse(bands, value), haar.ids(bands))
    )
    return haar.synthesise(bands, coefficients, value), after


def soft_threshold(bands: Bands, rule: str = "bayes") -> Stage:
    """Shrink the detail coefficients of a noisy release towards zero by the threshold of their
    band.

    This is post-processing.  As with `james_stein`, it biases every step of training.

    Args:
        bands: from `jfl.bands`.
        rule: the threshold.  "universal" is std * sqrt(2 log m), for a block of m coefficients;
            "bayes" is the noise variance / the standard deviation of the estimated signal
            (BayesShrink).
    """
    checks.require_one_of("wavelet.soft_threshold", ("bayes", "universal"), rule=rule)
    return Stage(
        Fn(_soft_threshold, dict(bands=bands), dict(rule=rule)), name="soft_threshold", role="post"
    )
