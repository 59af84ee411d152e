"""Renyi curves of a round in which a client takes several noisy steps, for replace_one of a row.

`participates` (P1) holds for all algorithms and views and is what the ledger uses.  The other two
are smaller and need more than a plan can show, so they are here for those who know that their
algorithm fits.  All take the curve of one noisy step, at the client's own noise or at the noise of
the whole cohort.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from jfl.privacy.accountants import rdp

from .approximate_dp import arrays


def participates(
    orders: ArrayLike, probability: ArrayLike, steps: int, step: ArrayLike
) -> np.ndarray:
    """Return P1: a client that takes part runs its steps with its own noise, and may be seen.

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
    return rdp.participation(orders, probability, steps * arrays(step)[0])


def last_step_shared(
    orders: ArrayLike, probability: ArrayLike, steps: int, participant: ArrayLike, shared: ArrayLike
) -> np.ndarray:
    """Return P1a: as `participates`, but the last step hides in the noise of the whole cohort.

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
    own, last = arrays(participant, shared)
    return rdp.participation(orders, probability, (steps - 1) * own + last)


def nonexpansive(
    orders: ArrayLike,
    probability: float,
    steps: int,
    rate: float,
    z: float,
    cohort: float,
) -> np.ndarray:
    """Return P2: all steps hide in the noise of the whole cohort, if the steps are non-expansive.

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
    (order,) = arrays(orders)
    if rate >= 1:
        return rdp.participation(order, probability, order * steps**2 / (2 * cohort * z**2))
    copies = np.arange(steps + 1.0)
    choose = gammaln(steps + 1.0) - gammaln(copies + 1) - gammaln(steps - copies + 1)
    log_law = choose + copies * np.log(rate) + (steps - copies) * np.log1p(-rate)
    a = np.atleast_1d(order)[:, None]
    power = a * (a - 1) * copies**2 / (2 * cohort * z**2)
    # E[e^power] - 1 = E[expm1(power)]: nothing cancels.
    excess = np.log(-np.expm1(-power[:, 1:])) + power[:, 1:] + log_law[1:]
    curve = np.logaddexp(np.asarray(logsumexp(excess, axis=1)), 0.0) / (a[:, 0] - 1)
    return rdp.participation(order, probability, curve.reshape(order.shape))
