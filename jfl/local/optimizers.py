"""Optimizers for noisy gradients, as optax transformations.

An optimizer post-processes released gradients, so it does not affect privacy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Mechanism
from ..privacy.mechanisms import chain

__all__ = ["adam_without_noise_bias", "noise_std"]


class Moments(NamedTuple):
    """The state of `adam_without_noise_bias`."""

    count: jax.Array
    mean: optax.Updates
    square: optax.Updates


def noise_std(mechanism: Mechanism) -> float:
    """Return the standard deviation of the noise in each coordinate of a chain's release.

    This is the standard deviation after the chain's divisions.

    Args:
        mechanism: a chain with isotropic Gaussian noise of a constant level, a fixed clip norm, and
            divisors that are numbers.

    Raises:
        ValueError: for any other chain.

    Example:
        >>> import jfl
        >>> clip, noise = jfl.clip_l2(0.5), jfl.gaussian(2.0)
        >>> round(noise_std(jfl.chain(clip, jfl.total(), noise, jfl.divide(10))), 6)
        0.1
    """
    where = "optimizers.noise_std"
    checks.require_type(where, Mechanism, "jfl.chain", mechanism=mechanism)
    bound = mechanism if mechanism.adjacency else Mechanism(mechanism.stages, "add_remove")
    noise = chain.noise_of(bound)
    multiplier = None if chain.scheduled(bound) else chain.multiplier(bound)
    post = [s for s in bound.stages if s.role == "post"]
    divisor = chain.denominator(bound) or 1.0
    if (
        not isinstance(multiplier, float)
        or noise is None
        or noise.law != "gaussian"
        or noise.shape is not None
        or chain.remembers(bound)
        or any(s.divisor != "number" for s in post)
    ):
        checks.fail(
            where,
            "isotropic Gaussian noise of one level, a fixed clip norm, and divisors that are "
            "numbers",
            checks.short_repr(mechanism),
            "Compute the standard deviation yourself.",
            error=NotAnalysable,
        )
    return multiplier * float(chain.sensitivity(bound)) / divisor


def adam_without_noise_bias(
    learning_rate: ArrayLike,
    noise_std: ArrayLike = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    least: ArrayLike = 1e-8,
) -> optax.GradientTransformation:
    """Return Adam with the noise variance subtracted from its second moment (DP-Adam-BC).

    Noise of standard deviation s adds s^2 to the second moment of every coordinate. If gradients
    are small in comparison, Adam divides all coordinates by nearly the same number, and becomes
    slow gradient descent. Subtracting s^2 restores Adam.

    Args:
        learning_rate: learning rate, > 0.
        noise_std: standard deviation of the noise in each coordinate of a gradient, from
            `noise_std(chain)`. With 0 this is Adam with `least` instead of its epsilon.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        least: minimum of the second moment after the subtraction, > 0.

    Privacy:
        Post-processing: no row is read.

    References:
        Tang, Shpilevskiy, Lécuyer, "DP-AdamBC", AAAI 2024.

    Example:
        >>> import functools, jfl
        >>> noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(16))
        >>> adam = functools.partial(adam_without_noise_bias, noise_std=noise_std(noise))
        >>> adam.keywords["noise_std"]
        0.0625
    """
    where = "optimizers.adam_without_noise_bias"
    checks.require_nonnegative(where, noise_std=noise_std)
    checks.require_positive(where, least=least)
    for name, value in dict(b1=b1, b2=b2).items():
        if checks.is_concrete(value) and not 0 <= value < 1:
            checks.fail(where, f"{name} in [0, 1)", f"{name}={value!r}")

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return Moments(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(gradient, state, params=None):
        count = state.count + 1
        mean = optax.tree_utils.tree_update_moment(gradient, state.mean, b1, 1)
        square = optax.tree_utils.tree_update_moment(gradient, state.square, b2, 2)
        corrected_mean = optax.tree_utils.tree_bias_correction(mean, b1, count)
        corrected_square = optax.tree_utils.tree_bias_correction(square, b2, count)

        def step(m, v):
            signal = jnp.maximum(v - jnp.square(noise_std), least)
            rate: Any = learning_rate
            return -rate * m / jnp.sqrt(signal)

        return jax.tree.map(step, corrected_mean, corrected_square), Moments(count, mean, square)

    rule: Any = update  # optax types its states more narrowly
    return optax.GradientTransformation(init, rule)
