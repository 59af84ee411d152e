"""Scattering features of images: fixed filters that read no private row.

A scattering transform of order 2 convolves an image with Morlet wavelets, takes the modulus, does
so again with coarser wavelets, and averages.  With 2 scales and 8 angles, an image of 28 x 28 gets
81 channels of 7 x 7: 1 of order 0, 16 of order 1 and 64 of order 2.  Filters, padding and the order
of channels are those of kymatio 0.3 (`Scattering2D(J=2, shape=(28, 28))`).

References:
    Oyallon and Mallat, "Deep roto-translation scattering for object classification", CVPR 2015.
    Tramèr and Boneh, "Differentially private learning needs better features", ICLR 2021.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

SCALES, ANGLES = 2, 8
GROUPS = 27  # of consecutive channels
STRIDE = 2**SCALES  # pixels of the image per pixel of a channel, and pixels of padding
CHUNK = 500  # images that are transformed at a time


def features(images) -> np.ndarray:
    """Return the scattering coefficients of images, normalised within GROUPS of channels.

    Each image is normalised by itself, as `GroupNorm` without parameters does, so the features of a
    row depend on no other row.

    Args:
        images: Float[n, S, S], where S is a multiple of 4.

    Returns:
        Float32[n, 81 * (S/4)^2].
    """
    images = np.asarray(images, np.float32)
    parts = [np.asarray(_normalised(images[i : i + CHUNK])) for i in range(0, len(images), CHUNK)]
    return np.concatenate(parts)


@jax.jit
def _normalised(images):
    grouped = scatter(images).reshape(len(images), GROUPS, -1)
    mean, variance = grouped.mean(2, keepdims=True), grouped.var(2, keepdims=True)
    return ((grouped - mean) / jnp.sqrt(variance + 1e-5)).reshape(len(images), -1)


def scatter(images):
    """Return the scattering coefficients of images, Float[n, 81, S/4, S/4]."""
    padded = jnp.pad(images, ((0, 0), (STRIDE, STRIDE), (STRIDE, STRIDE)), mode="reflect")
    fine, coarse = wavelets(padded.shape[-1])

    image = padded[:, None]
    first = _modulus(image, fine, 1)
    halved = _modulus(image, coarse, 2)
    second = _modulus(first[:, :, None], coarse, 2).reshape(len(images), -1, *halved.shape[2:])

    averages = [_average(each, padded.shape[-1]) for each in (image, first, halved, second)]
    return jnp.concatenate(averages, axis=1)


def _modulus(images, filters, stride):
    """Return every `stride`-th pixel of the modulus of filtered images."""
    spectrum = jnp.fft.fft2(images) * filters[(None,) * (images.ndim - filters.ndim)]
    kept = spectrum.shape[-1] // stride
    folded = spectrum.reshape(*spectrum.shape[:-2], stride, kept, stride, kept).mean((-4, -2))
    return jnp.abs(jnp.fft.ifft2(folded))


def _average(images, side):
    """Return local averages, one per STRIDE pixels of the padded image, without the padding."""
    rows = averaging(side, images.shape[-1])[1:-1][(None,) * (images.ndim - 2)]
    return rows @ images @ jnp.swapaxes(rows, -1, -2)


@functools.cache
def wavelets(side: int) -> np.ndarray:
    """Return the spectra of the Morlet wavelets, Float32[SCALES, ANGLES, side, side].

    A wavelet is a wave under a Gaussian, less a multiple of the Gaussian that makes its mean 0.
    """
    found = np.zeros((SCALES, ANGLES, side, side), np.float32)
    for scale in range(SCALES):
        for i in range(ANGLES):
            angle = (ANGLES // 2 - 1 - i) * np.pi / ANGLES
            window = dict(width=0.8 * 2**scale, angle=angle, slant=4 / ANGLES)
            wave = _gabor(side, frequency=0.75 * np.pi / 2**scale, **window)
            envelope = _gabor(side, frequency=0.0, **window)
            wavelet = wave - wave.sum() / envelope.sum() * envelope
            found[scale, i] = np.fft.fft2(wavelet).real
    return found


@functools.cache
def averaging(side: int, length: int) -> np.ndarray:
    """Return the matrix of local averages along an axis, Float32[side/4, length].

    The weights are Gaussian.  An axis of `length` pixels has every (side/length)-th of `side`
    pixels, and keeps only the lowest frequencies of the weights.
    """
    copies = np.arange(-2 * side, 3 * side)
    width = 0.8 * 2 ** (SCALES - 1)
    weights = np.exp(-(copies**2) / (2 * width**2)).reshape(-1, side).sum(0)
    spectrum = np.fft.fft(weights / (width * np.sqrt(2 * np.pi)))
    lowest = np.fft.fftfreq(length, 1 / length).astype(int)
    response = np.fft.ifft(spectrum[lowest]).real
    centres = np.arange(side // STRIDE) * (length * STRIDE // side)
    return response[(centres[:, None] - np.arange(length)) % length].astype(np.float32)


def _gabor(side, width, angle, frequency, slant):
    """Return a periodic plane wave under a Gaussian, Complex[side, side]."""
    copies = 5  # of the period, added up
    x, y = np.mgrid[-2 * side : 3 * side, -2 * side : 3 * side]
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    exponent = -(along**2 + (slant * across) ** 2) / (2 * width**2) + 1j * frequency * along
    periods = np.exp(exponent).reshape(copies, side, copies, side)
    return periods.sum((0, 2)) * slant / (2 * np.pi * width**2)
