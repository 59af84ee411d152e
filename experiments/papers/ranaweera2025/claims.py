"""Privacy claims of Ranaweera et al., arXiv 2503.21154, 2025, as printed and corrected.

The paper is "Federated learning with differential privacy: an utility-enhanced approach". `theory`
has its utility, convergence and reported gains.

Vectors of length m = 2^L go through the Haar transform h (means and half differences of pairs);
coefficient j, above s_j leaves, gets Gaussian noise of std sigma C / W_j with weight W_j = s_j, and
the transform is undone.  The paper then passes sigma to an accountant. This is correct only if ||W
h|| <= C (R5, R6). As printed it is not: the sum of all entries has m times less noise variance than
in DP-SGD, and the true noise multiplier is sigma / sqrt(m) or less.

Readings of the clip, which the text leaves open: R1 ||g|| <= C; R2 ||h|| <= C; R3 each level of h
<= C; R4 each level of W h <= C; R5 ||W h|| <= C; R6 each level l of W h <= C_l, sum C_l^2 = C^2.
The base is a level by itself.

The adjacency is add_remove.  Arguments are numbers or arrays, which broadcast.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtr

from jfl.auditing.estimators.thresholds import Explicit
from jfl.auditing.estimators.two_samples import Estimate, lower_bound
from jfl.core import checks
from jfl.privacy.accountants import events, rdp, tightest

from ..approximate_dp import arrays
from ..claim import claim

ORDERS = 1 + np.geomspace(1e-3, 1e4, 512)
READINGS = {  # the largest ||W h|| / C of a clipped vector
    "R1": lambda m: m**0.5,  # the singular values of diag(W) H are sqrt(s_j)
    "R2": lambda m: m,
    "R3": lambda m: ((7 * m**2 - 4) / 3) ** 0.5,  # m^2 of the base and 4^l of each level
    "R4": lambda m: (1 + np.log2(m)) ** 0.5,
    "R5": lambda m: m**0,
    "R6": lambda m: m**0,
}
AUDITED = ("R1", "R2", "R5")  # those whose worst vector is constant


# --- noise


@claim(
    "Lemma 1",
    "rigorous",
    "for the sum of a range of entries; one entry has about sigma^2 / 3, whatever m",
)
def lemma1_variance_bound(m, sigma):
    """Return sigma^2 (2 + log2 m) / 2: bounds the noise variance of sums of neighbouring entries,
    for C = 1."""
    m, sigma = _setting(m, sigma)
    return sigma**2 * (2 + np.log2(m)) / 2


@claim("Lemma 1", "ours", "exact: 1 / m^2 from the base and 4^-l from level l")
def haar_coordinate_variance(m, sigma):
    """Return sigma^2 (1/3 + 2 / (3 m^2)): noise variance of every entry, for C = 1."""
    m, sigma = _setting(m, sigma)
    return sigma**2 * (1 / 3 + 2 / (3 * m**2))


# --- the printed calibration


def lemma2_factor(m):
    """Return sqrt(2 / (2 + log2 m)), by which Lemma 2 lowers the noise."""
    return lemma1_variance_bound(m, 1.0) ** -0.5


# --- privacy


@claim(
    "section 4.2",
    "ours",
    "the sensitivity of the weighted coefficients, which the paper never computes; attained",
)
def effective_noise_multiplier(reading: str, m, sigma, calibration: str = "plain"):
    """Return the true noise multiplier of a release, which an accountant needs.

    Args:
        reading: "R1" to "R6", see the module.
        m: length of the vector, a power of two.
        sigma: the multiplier that the paper states.
        calibration: "plain", or "lemma2" for noise that `lemma2_factor` lowers.

    Privacy:
        add_remove of one clipped vector.  Padding does not help: a vector of m / 2 entries is among
        the worst.

    Example:
        >>> [round(float(effective_noise_multiplier(r, 1024, 3.0)), 5) for r in READINGS]
        [0.09375, 0.00293, 0.00192, 0.90453, 3.0, 3.0]
    """
    checks.require_one_of(
        "ranaweera2025.effective_noise_multiplier", tuple(READINGS), reading=reading
    )
    checks.require_one_of(
        "ranaweera2025.effective_noise_multiplier", ("plain", "lemma2"), calibration=calibration
    )
    m, sigma = _setting(m, sigma)
    return sigma * (lemma2_factor(m) if calibration == "lemma2" else 1.0) / READINGS[reading](m)


@claim("section 4.2", "ours", "exact")
def true_epsilon(reading: str, m, sigma, delta, calibration: str = "plain"):
    """Return the epsilon of one release.

    >>> round(float(true_epsilon("R1", 1024, 1.0, 1e-5)), 1)
    647.5
    """
    return rdp.gaussian_epsilon(
        1 / effective_noise_multiplier(reading, m, sigma, calibration), delta
    )


@claim(
    "section 4.2, the accountant as a black box",
    "unsound",
    "right for R5 and R6; the others have less noise",
)
def nominal_epsilon(rate, sigma, steps, delta):
    """Return what an RDP accountant says of `steps` Poisson samples at multiplier sigma: the
    epsilon that is reported.

    >>> [round(float(nominal_epsilon(0.05, s, 300, 1e-5)), 2) for s in (1.0, 1.5, 3.0)]
    [6.46, 3.18, 1.27]
    """
    one = lambda q, z, n, d: rdp.epsilon(ORDERS, n * rdp.poisson(ORDERS, q, z), d)
    return np.vectorize(one)(rate, sigma, steps, delta)


@claim(
    "section 4.2, the accountant as a black box",
    "ours",
    "accountants, given the multiplier that is there",
)
def run_epsilon(
    reading: str, m: int, sigma, rate, steps: int, delta, calibration: str = "plain"
) -> float:
    """Return the smallest proved epsilon of a run, on the host; sampling hides little where
    multipliers are far below 1."""
    multiplier = float(effective_noise_multiplier(reading, m, sigma, calibration))
    return tightest.epsilon(
        events.repeat(events.poisson(rate, events.gaussian(multiplier)), steps), delta
    )[0]


# --- audit


@claim("section 4.2", "ours", "closed form of `audit_wavelet_leak`")
def audit_power(reading: str, m, sigma):
    """Return (d', chance of either error half way) of the sum of all entries, with and without the
    worst vector."""
    checks.require_one_of("ranaweera2025.audit_power", AUDITED, reading=reading)
    apart = 1 / effective_noise_multiplier(reading, m, sigma)
    return apart, ndtr(-apart / 2)


@claim("section 4.2", "ours", "for R1 and R2 it refutes the reported epsilon")
def audit_wavelet_leak(reading: str, m: int, sigma: float, runs: int, key, delta=1e-5) -> Estimate:
    """Attack `runs` releases without and `runs` with a constant vector, clipped as R1, R2 or R5.

    The attack adds up the entries of a release and compares the sum with a threshold.

    Every coefficient gets its noise and goes through the inverse transform; the threshold is half
    way. The result has a lower bound on epsilon at a confidence of 95 %.

    >>> found = audit_wavelet_leak("R1", 1024, 3.0, 100, jax.random.key(0))
    >>> found.false_positives, found.false_negatives, 3.2 < found.epsilon < 3.3
    (0, 0, True)
    """
    checks.require_one_of("ranaweera2025.audit_wavelet_leak", AUDITED, reading=reading)
    _setting(m, sigma)
    total = READINGS[reading](m)  # the vector's entries add up to this
    keys = jax.random.split(key, (2, runs))
    absent, present = (
        np.asarray(_scores(m, keys[i], np.float32(sigma), np.float32(i * total / m)))
        for i in range(2)
    )
    return lower_bound(present, absent, delta=delta, thresholds=Explicit(total / 2))


# --- parts


def _setting(m, sigma):
    """Return m, which must be a power of two, and sigma as arrays."""
    m, sigma = arrays(m, sigma)
    if not np.all((np.frexp(m)[0] == 0.5) & (m >= 1)):
        checks.fail("ranaweera2025", "m to be a power of two", f"m={m}", "Take the padded length.")
    return m, sigma


def _release(m, key, sigma, entry):
    z = sigma * jax.random.normal(key, (m,))
    x = z[:1] / m  # the base; then levels from the root down
    for n in (2**i for i in range(m.bit_length() - 1)):
        d = z[n : 2 * n] * (n / m)  # half differences above m / n leaves
        x = jnp.stack([x + d, x - d], axis=-1).ravel()
    return entry + x


@functools.partial(jax.jit, static_argnums=0)
def _scores(m, keys, sigma, entry):
    return jax.lax.map(lambda key: _release(m, key, sigma, entry).sum(), keys, batch_size=64)
