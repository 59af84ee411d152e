"""AdDPNFL: DPNFL with an adaptive server optimizer.

References:
    Chen et al., IEEE TKDE 2024, Algorithm 2.
    Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2.
"""

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import Number, Rate, variant
from .dpnfl import dpnfl


@extends(dpnfl, without=["server_optimizer"])
def addpnfl(
    grad: Grad,
    *,
    server_lr: Rate = 0.01,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    adaptivity: Number = 1e-3,
    second_moment_of: str = "diff",
    initial: Annotated[Number | None, PYTHON_ONLY] = None,
    noise_std: Annotated[Number | None, PYTHON_ONLY] = None,
    **dpnfl_options,
) -> Algorithm:
    """Return AdDPNFL: DPNFL with the Adam-like server optimizer `jfl.algorithms.adaptive`.

    The server optimizer only post-processes what `dpnfl` releases, so the guarantee is the same.
    The other parameters are those of `fedavg`, except for `server_optimizer`. The plan determines
    how uploads are aggregated, as in `dpnfl`. The paper's experiments use schedules for both
    learning rates: `schedules.inverse_sqrt(server_lr)` and
    `schedules.inverse_sqrt(lr, every=steps)`.

    Args:
        grad: gradient of a client, as in `dpnfl`.
        server_lr: learning rate of the server: a number, or a function of the round.
        beta1: decay of the first moment, b1 of `adaptive`.
        beta2: decay of the second moment, b2 of `adaptive`.
        adaptivity: number added to the root of the second moment, > 0, in units of a model
            difference.
        second_moment_of: "diff" or "momentum", as in `adaptive`.
        initial: as in `adaptive`.
        noise_std: standard deviation of the noise in each coordinate of the released mean. It is
            used as in `adaptive_without_noise_bias`. None uses `adaptive`, as in the paper.

    Raises:
        ValueError: as in `adaptive`, or if server_optimizer is given.
    """
    _check_arguments("addpnfl", second_moment_of, adaptivity, initial, beta1=beta1, beta2=beta2)
    if noise_std is not None:
        checks.require_nonnegative("addpnfl", single=True, noise_std=noise_std)
        if second_moment_of == "momentum":
            checks.fail(
                "addpnfl",
                "second_moment_of='diff' when noise_std is given",
                "second_moment_of='momentum'",
                "noise_std is not the standard deviation of the noise in a momentum.",
            )
    if "server_optimizer" in dpnfl_options:
        checks.fail(
            "addpnfl",
            "no server_optimizer, since AdDPNFL has its own",
            f"{dpnfl_options['server_optimizer']!r}",
            "Use dpnfl(server_optimizer=...) for another optax optimizer.",
        )
    optional = dict(initial=initial, noise_std=noise_std)
    data = dict(b1=beta1, b2=beta2, adaptivity=adaptivity)
    data |= {name: value for name, value in optional.items() if value is not None}
    server = Fn(
        adaptive if noise_std is None else adaptive_without_noise_bias,
        {name: checks.as_scalar(value) for name, value in data.items()},
        dict(second_moment_of=second_moment_of) if noise_std is None else {},
    )
    base = dpnfl(grad, server_lr=server_lr, server_optimizer=server, **dpnfl_options)
    return variant(base, "addpnfl")


class Moments(NamedTuple):
    """The state of `adaptive` and of `adaptive_without_noise_bias`."""

    first: Any  # mu
    second: Any  # nu
    noise: Any  # the expected amount that the known noise has added to nu so far


@named("addpnfl.adaptive")
def adaptive(
    learning_rate: Number,
    b1: Number = 0.9,
    b2: Number = 0.99,
    adaptivity: Number = 1e-3,
    second_moment_of: str = "diff",
    initial: Number | None = None,
) -> optax.GradientTransformation:
    """Return the server optimizer of FedAdam: Adam without bias correction.

    For a gradient g, the optax transformation computes

        mu = b1 mu + (1 - b1) g
        nu = b2 nu + (1 - b2) g^2
        step = -learning_rate mu / (sqrt(nu) + adaptivity)

    On the server, g is minus the released model difference. Pass the optimizer to an algorithm as
    `fedavg(..., server_optimizer=functools.partial(adaptive, b1=0.5))`.

    Args:
        learning_rate: factor of the step.
        b1: decay of the first moment mu, in [0, 1).
        b2: decay of the second moment nu, in [0, 1).
        adaptivity: number added to the root of nu, > 0, in units of g.
        second_moment_of: "diff" uses g^2 as above; "momentum" uses mu^2 instead, as in the text of
            Chen et al.
        initial: nu before the first step, in units of g^2. None means adaptivity^2, the smallest
            value that the theorems of Chen et al. allow.

    Privacy:
        Post-processing of a release.

    Raises:
        ValueError: for arguments outside these ranges.

    References:
        Reddi et al., ICLR 2021, Algorithm 2; Chen et al., 2024, Algorithm 2.

    Example:
        >>> server = adaptive(0.01)
        >>> step, state = server.update(jnp.array([-0.1, 0.2]), server.init(jnp.zeros(2)))
        >>> np.asarray(step, float).round(6).tolist()
        [0.00905, -0.009513]
    """
    _check_arguments("adaptive", second_moment_of, adaptivity, initial, b1=b1, b2=b2)
    return _transformation(learning_rate, b1, b2, adaptivity, second_moment_of, initial, 0.0)


@named("addpnfl.adaptive_without_noise_bias")
def adaptive_without_noise_bias(
    learning_rate: Number,
    noise_std: Number,
    b1: Number = 0.9,
    b2: Number = 0.99,
    adaptivity: Number = 1e-3,
    initial: Number | None = None,
) -> optax.GradientTransformation:
    """Return `adaptive` with the expected contribution of noise subtracted from the second moment.

    In the notation of `adaptive`, noise in the gradient g increases the second moment nu and would
    shorten every step. Each step therefore divides by the root of max(nu - n, 0), where n is the
    amount that noise is expected to have added to nu so far; the state keeps nu itself.
    `jfl.optimizers.adam_without_noise_bias` does the same for Adam.

    Args:
        learning_rate: factor of the step.
        noise_std: standard deviation of the noise in each coordinate of g, in units of g.
            `jfl.optimizers.noise_std` computes it from a chain.
        b1, b2, adaptivity, initial: as in `adaptive`.

    Privacy:
        Post-processing of a release, if noise_std is public.

    Raises:
        ValueError: as in `adaptive`, and for a negative noise_std.

    Example:
        >>> server = adaptive_without_noise_bias(0.01, noise_std=0.1)
        >>> step, state = server.update(jnp.array([-0.1, 0.2]), server.init(jnp.zeros(2)))
        >>> np.asarray(step, float).round(6).tolist()
        [0.050126, -0.0109]
    """
    where = "adaptive_without_noise_bias"
    _check_arguments(where, "diff", adaptivity, initial, b1=b1, b2=b2)
    checks.require_nonnegative(where, single=True, noise_std=noise_std)
    return _transformation(learning_rate, b1, b2, adaptivity, "diff", initial, noise_std)


def _transformation(learning_rate, b1, b2, adaptivity, second_moment_of, initial, noise_std):
    """Return the transformation of `adaptive` (noise_std 0) or `adaptive_without_noise_bias`."""
    decay = lambda b, old, new: pytrees.map(
        lambda o, n: (b * o + (1 - b) * n).astype(o.dtype), old, new
    )

    def init(params):
        second = adaptivity * adaptivity if initial is None else initial
        full = pytrees.map(lambda x: jnp.full_like(x, second), params)
        return Moments(pytrees.zeros_like(params), full, jnp.zeros(()))

    def update(gradient, state, params=None):
        first = decay(b1, state.first, gradient)
        squared = first if second_moment_of == "momentum" else gradient
        second = decay(b2, state.second, pytrees.map(jnp.square, squared))
        noise = decay(b2, state.noise, jnp.square(jnp.asarray(noise_std, jnp.float32)))

        def step(mu, nu):
            signal = jnp.maximum(nu - noise, 0).astype(nu.dtype)
            return -learning_rate * mu / (jnp.sqrt(signal) + adaptivity)

        return pytrees.map(step, first, second), Moments(first, second, noise)

    rule: Any = update  # optax types its states more narrowly
    return optax.GradientTransformation(init, rule)


def _check_arguments(where, second_moment_of, adaptivity, initial, **decays):
    """Check the arguments that `adaptive` and its variants share."""
    checks.require_one_of(where, ("diff", "momentum"), second_moment_of=second_moment_of)
    checks.require_positive(where, single=True, adaptivity=adaptivity)
    checks.require_nonnegative(
        where, single=True, **decays, **({} if initial is None else dict(initial=initial))
    )
    for name, value in decays.items():
        if checks.is_concrete(value) and not np.all(np.asarray(value, np.float32) < 1):
            checks.fail(where, f"{name} in [0, 1)", f"{name}={value!r}")
