"""Compute Renyi curves of a round in which a client takes several noisy steps.

The adjacency is replace_one of a row.

`participates` (P1) holds for all algorithms and views and is what the ledger uses.  The other two
are smaller, but their conditions cannot be checked on a plan, so the caller must know that the
algorithm meets them. All take the curve of one noisy step, with the client's own noise or with the
noise of the whole cohort.
"""

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import gammaln, logsumexp

from jfl.privacy.accountants import rdp

from .approximate_dp import arrays


def participates(
    orders: ArrayLike, probability: ArrayLike, steps: int, step: ArrayLike
) -> np.ndarray:
    """Return P1: only the client's own noise protects its steps, and its participation is known.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client.
        step: [n], the curve of one step at the client's own noise.

    Returns:
        [n], the curve of the round.

    Privacy:
        server and third party; any local computation on the noisy gradients, and any state.

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
    """Return P1a: like `participates`, but the noise of the whole cohort protects the last step.

    Conditions, none of which a plan states: the observer is a third party, who sees only averages
    of uploads; clients have no state; the cohort has a fixed size K; weights are equal; the upload
    is the model after the last step, which adds its noise with the same factor for all clients;
    there is no other noise.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client.
        participant: [n], the curve of one step at a client's multiplier z.
        shared: [n], the curve of one step at sqrt(K) z.

    Returns:
        [n], the curve of the round.

    References:
        Reveal the cohort and all steps except the last; the noise of all clients in the last step
        adds up. For one step this is the formula of Noble, Bellet, Dieuleveut, AISTATS 2022,
        without their gain from hidden participation.

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
    """Return P2: the noise of the whole cohort protects all steps, if they are non-expansive.

    Conditions in addition to those of `last_step_shared`: losses are convex and L-smooth; step
    sizes are at most 2 / L; no clip is active, or the clip is that of a generalised linear model;
    batches of rate * rows are independent.

    An upload then changes by at most one sensitivity for each of the B ~ Binomial(steps, rate)
    steps that draw the example, and B may be known.

    Args:
        orders: [n] > 1.
        probability: that the client takes part.
        steps: local steps of the client, an integer.
        rate: the probability that a step draws the example.
        z: noise multiplier of one client's step; that of the cohort is sqrt(cohort) z, for a change
            of B sensitivities.
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
