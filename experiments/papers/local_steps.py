"""Curves of a round in which a client takes several noisy steps, for replace_one of one of its
examples.

`participates` (P1) holds for all algorithms and views and is what the ledger uses.  The other two
are smaller and need more than a plan can show, so they are here for those who know that their
algorithm fits.  All take the curve of one noisy step, at the client's own noise or at the noise of
the whole cohort.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jax.typing import ArrayLike

from jfl.core import checks
from jfl.privacy.accountants import rdp


def participates(
    orders: ArrayLike, probability: ArrayLike, steps: int, step: ArrayLike
) -> jax.Array:
    """P1: the client runs `steps` steps with its own noise if it takes part, which may be seen.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client.
        step: [n], the curve of one step at the client's own noise.

    Returns:
        [n], the curve of the round.

    Privacy:
        server and third party; any local work on the noisy gradients, any state that they make.

    References:
        Reveal the cohort and all noisy gradients: the rest is post-processing.

    Example:
        >>> float(participates(2.0, 1.0, 5, 0.1))
        0.5
    """
    return rdp.participation(orders, probability, _times(steps, step))


def last_step_shared(
    orders: ArrayLike, probability: ArrayLike, steps: int, participant: ArrayLike, shared: ArrayLike
) -> jax.Array:
    """P1a: as `participates`, but the last step hides in the noise of the whole cohort.

    Conditions, none of which a plan states: a third party, who sees averages of uploads only;
    clients that remember nothing; a cohort of fixed size K; equal weights; the upload is the model
    after the last step, which adds that step's noise to it with the same factor for all; no noise
    but the steps'.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client.
        participant: [n], the curve of one step at a client's multiplier z.
        shared: [n], the curve of one step at sqrt(K) z.

    Returns:
        [n], the curve of the round.

    References:
        Reveal all steps but the last, and the cohort: the last noises of all add up.  At one step
        it is the formula of Noble, Bellet, Dieuleveut, AISTATS 2022, without their gain from hidden
        participation.

    Example:
        >>> float(last_step_shared(2.0, 1.0, 5, 0.1, 0.01))
        0.41000000000000003
    """
    return rdp.participation(orders, probability, _add(_times(steps - 1, participant), shared))


def nonexpansive(
    orders: ArrayLike,
    probability: ArrayLike,
    steps: int,
    rate: ArrayLike,
    z: ArrayLike,
    cohort: ArrayLike,
) -> jax.Array:
    """P2: all steps hide in the noise of the whole cohort, if the local steps are non-expansive.

    Conditions, beside those of `last_step_shared`: convex losses that are L-smooth, step sizes at
    most 2 / L, and no clipping that acts, or the clipping of a generalised linear model; batches of
    rate * rows, independent.

    An upload then moves by at most one sensitivity for each of the B ~ Binomial(steps, rate) steps
    that draw the example, and B may be seen.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client, a whole number.
        rate: the probability that a step draws the example.
        z: multiplier of one client's step; the cohort's is sqrt(cohort) z, over B sensitivities.
        cohort: clients of the round.

    Returns:
        Float64[n], the curve of the round.
    """
    checks.require_integer("local_steps.nonexpansive", steps=steps)
    return _nonexpansive(orders, probability, rate, z, cohort, np.arange(steps + 1.0))


@rdp.float64
def _nonexpansive(orders, probability, rate, z, cohort, copies):
    steps = len(copies) - 1
    choose = gammaln(steps + 1.0) - gammaln(copies + 1) - gammaln(steps - copies + 1)
    q = jnp.where(rate < 1, rate, 0.5)
    log_law = choose + copies * jnp.log(q) + (steps - copies) * jnp.log1p(-q)
    a = jnp.atleast_1d(orders)[:, None]
    power = a * (a - 1) * copies**2 / (2 * cohort * z**2)
    # E[e^power] - 1 = E[expm1(power)]: nothing cancels
    excess = jnp.log(-jnp.expm1(-power[:, 1:])) + power[:, 1:] + log_law[1:]
    curve = jnp.logaddexp(logsumexp(excess, axis=1), 0.0) / (a[:, 0] - 1)
    curve = jnp.where(rate < 1, curve, a[:, 0] * steps**2 / (2 * cohort * z**2)).reshape(
        jnp.shape(orders)
    )
    return rdp.participation(orders, probability, curve)


@rdp.float64
def _times(count, curve):
    return count * curve


@rdp.float64
def _add(one, other):
    return one + other
