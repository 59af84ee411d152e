"""Privacy claims of Li, Wang, Wu, 2025 (DP-FedAvg), as printed and corrected.

The paper is "Convergence analysis for differentially private federated averaging in heterogeneous
settings", Mathematics 13(3):497.

A client takes `steps` steps on batches of `batch` of its `rows`, adds Gaussian noise once, and
uploads its model to a server that knows who participates. The unit is one example of one client,
under replace_one. The printed algorithm has two defects. The sensitivity needs bounded gradients,
but only the last gradient of a round is clipped (D1). The noise is computed for the model but added
to the gradient, so the learning rate shrinks it (D2). The sound version clips every step and then
adds to the model noise of std `noise_multiplier` times `sensitivity_sound`.

Float64; functions with preconditions return `Checked`.  `rate` is the probability that a round uses
an example, and a multiplier is the std of the noise on the model over the sensitivity that covers
all uses in a round.
"""

import numpy as np

from jfl.core import checks
from jfl.privacy.accountants import rdp

from .. import approximate_dp
from ..approximate_dp import arrays
from ..claim import Checked, checked, claim

# --- mechanisms and sampling


@claim(
    "Lemma 1",
    "conditional",
    "needs epsilon <= 1; N(0, (sensitivity sigma)^2) would count the sensitivity twice",
)
def sigma(sensitivity, epsilon, delta) -> Checked:
    """Return the classical noise std, sensitivity sqrt(2 log(1.25 / delta)) / epsilon.

    It is the whole std, as equation (20) uses it.


    Example:
        >>> round(float(sigma(1.0, 0.5, 1e-5).value), 6)
        9.689611
    """
    (e,) = arrays(epsilon)
    value = approximate_dp.gaussian_sigma(sensitivity, 1.0, delta) / e
    return checked(value, {"epsilon <= 1": e <= 1})


# --- sensitivity of a round


@claim(
    "Lemma 2",
    "conditional",
    "Algorithm 1 clips the last step only (D1); too small in round 0 of lr / (1 + t)",
)
def sensitivity_paper(steps: int, clip_norm, lr):
    """Return 4 steps clip_norm lr, with the learning rate `lr` after the last step of the round.

    It holds if every step is clipped and the round begins with a learning rate of at most 2 lr.
    """
    bound, last = arrays(clip_norm, lr)
    return 4 * steps * bound * last


@claim(
    "Lemma 2", "ours", "how far the models of any two sequences of clipped gradients can be apart"
)
def sensitivity_sound(lrs, clip_norm):
    """Return 2 clip_norm sum(lrs), for steps that are all clipped; never above `sensitivity_paper`
    where that is proved.

    Args:
        lrs: [..., steps], the learning rates of a round.
        clip_norm: bound on a step's gradient.

    Returns:
        [...], in units of the model.

    Example:
        >>> round(float(sensitivity_sound([0.04, 0.02], 1.0)), 9)
        0.12
    """
    bound, eta = arrays(clip_norm, lrs)
    return 2 * bound * eta.sum(axis=-1)


# --- noise of a round


@claim(
    "Lemma 3",
    "conditional",
    "the paper's settings miss epsilon <= 2 rate: 3.0 and 1.6 instead of 1 at epsilon = 0.5",
)
def budget_split(epsilon, delta, rate) -> Checked:
    """Return (epsilon / (2 rate), delta / rate), which the release on a round's sample may spend.

    It also holds for rate > 1/2; the round then spends less than epsilon.

    Raises:
        ValueError: if delta >= rate.

    Example:
        >>> budget_split(0.5, 1e-5, 1 / 12).failed
        ('epsilon / (2 rate) <= 1',)
    """
    inner_delta = approximate_dp.local_budget(epsilon, delta, rate)[1]
    e, q = arrays(epsilon, rate)
    value = e / (2 * q), inner_delta
    return checked(value, {"epsilon / (2 rate) <= 1": value[0] <= 1})


@claim(
    "Lemmas 1 to 3",
    "conditional",
    "too small for large epsilon and few steps, too large for the opposite",
)
def noise_multiplier_printed(epsilon, delta, rate) -> Checked:
    """Return noise std over sensitivity, 2 rate sqrt(2 log(1.25 rate / delta)) / epsilon.

    `delivered_epsilon` returns the epsilon that it really gives.
    """
    split = budget_split(epsilon, delta, rate)
    return split._replace(value=sigma(1.0, *split.value).value)


@claim(
    "eq. (20)",
    "unsound",
    "made for the model, added to the gradient: uploads have learning rate times this (D2)",
)
def noise_std_printed(lr, steps: int, clip_norm, batch: int, rows, epsilon, delta) -> Checked:
    """Return a client's noise std, 8 lr steps clip_norm q sqrt(2 log(1.25 q / delta)) / epsilon, q
    = steps batch / rows.

    >>> round(float(noise_std_printed(0.04, 5, 1.0, 10, 600, 0.5, 1e-5).value), 6)
    1.147049
    """
    (rows,) = arrays(rows)
    needed = batch * steps
    if np.any(rows < needed):
        checks.fail(
            "li2025.noise_std_printed",
            f"at least {needed} rows",
            f"rows={rows}",
            "Use fewer or smaller batches.",
        )
    multiplier = noise_multiplier_printed(epsilon, delta, needed / rows)
    return multiplier._replace(value=multiplier.value * sensitivity_paper(steps, clip_norm, lr))


@claim("Lemma 3", "ours", "exact amplification and the exact Gaussian: for every epsilon and rate")
def noise_multiplier(epsilon, delta, rate):
    """Return the smallest multiplier with which a round is (epsilon, delta)-private."""
    return approximate_dp.analytic_sigma(1.0, *approximate_dp.local_budget(epsilon, delta, rate))


# --- what it gives


@claim("Lemma 3", "ours", "exact for the release on the sample, and then for the sampling")
def round_epsilon(multiplier, delta, rate):
    """Return the epsilon of a round at `delta`.

    It is 0 if delta >= rate, since the example is then used too rarely to matter.
    """
    z, d, q = arrays(multiplier, delta, rate)
    return approximate_dp.amplify(rdp.gaussian_epsilon(1 / z, d / q), d, q)[0]


@claim("Lemmas 1 to 3", "ours", "epsilon of a round with the printed noise")
def delivered_epsilon(epsilon, delta, rate, lr=None):
    """Return the epsilon that a round really has at `delta` with the noise that is printed for a
    claimed `epsilon`.

    Args:
        epsilon: the epsilon that is claimed for a round.
        delta: in (0, 1).
        rate: the probability that a round uses an example.
        lr: None: the noise is added to the model.  A number: it is added to the gradient of a step
            with this learning rate, as printed (D2).

    Example:
        >>> [round(float(delivered_epsilon(0.5, 1e-5, 1 / 12, lr)), 3) for lr in (None, 0.04)]
        [0.637, 212.654]
    """
    shrunk = 1.0 if lr is None else lr
    multiplier = arrays(shrunk)[0] * noise_multiplier_printed(epsilon, delta, rate).value
    return round_epsilon(multiplier, delta, rate)


@claim(
    "Theorem 2",
    "unsound",
    "an unknown constant, no delta, the gain of sampling twice, expected participations",
)
def total_epsilon_heuristic(epsilon, rate, probability, rounds):
    """Return rate epsilon sqrt(probability rounds / (1 - rate)): never a guarantee.

    The paper does not give its constant c_0, which is 1 here.

    Args:
        epsilon: epsilon of one round.
        rate: the probability that a round uses an example.
        probability: that the client takes part in a round.
        rounds: how many rounds are run.

    Example:
        >>> round(float(total_epsilon_heuristic(0.5, 1 / 12, 0.1, 100)), 7)  # less than for a round
        0.1376205
    """
    e, q, p, r = arrays(epsilon, rate, probability, rounds)
    return q * e * np.sqrt(p * r / (1 - q))
