"""Published bounds that papers use: classical accounting, and series for samples."""

import math

import numpy as np
import pytest

from experiments.papers import approximate_dp, wang2019
from experiments.papers.chen2024 import claims as chen2024
from jfl.privacy.accountants import rdp

WHOLE = np.arange(2.0, 129)


def close(got, want, rel=1e-9):
    np.testing.assert_allclose(np.asarray(got), want, rtol=rel)


@pytest.mark.parametrize(
    "rho, rate, failed",
    [
        (0.1, 0.1, []),
        (1.77, 1 / 60, ["rho <= 0.1", "log(1 / rate) >= 3", "log(1 / rate) / (2 rho) >= 3"]),
        (0.01, 0.101, ["rate <= 0.1"]),
        (0.101, 0.01, ["rho <= 0.1"]),
        (0.3, 0.1, ["rho <= 0.1", "log(1 / rate) >= 3"]),
    ],
)
def test_every_precondition_of_amplification_is_tested(rho, rate, failed):
    found = chen2024.lemma4(rho, rate)
    close(found.value, (13 * rate**2 * rho, math.log(1 / rate) / (4 * rho)))
    assert len(found.failed) == len(failed)
    assert all(words.startswith(begin) for words, begin in zip(found.failed, failed))


# --- classical accounting


def test_noise_and_amplification():
    classical = 2 * math.sqrt(2 * math.log(1.25e5)) / 0.5
    close(approximate_dp.gaussian_sigma(2.0, 0.5, 1e-5), classical, 1e-12)
    close(approximate_dp.amplify(1000.0, 1e-5, 0.1)[0], 1000 + math.log(0.1))
    inner = approximate_dp.local_budget(0.5, 1e-5, 1 / 12)
    close(approximate_dp.amplify(*inner, 1 / 12), (0.5, 1e-5), 1e-12)
    close(approximate_dp.amplify(1e-12, 1e-5, 1e-3)[0], 1e-15)
    with pytest.raises(ValueError, match="delta < rate"):
        approximate_dp.local_budget(1.0, 0.2, 0.1)


# --- published series


def test_series_for_samples_of_fixed_size():
    """Chen et al., 10 rounds of 300 steps with 10 of 600 rows; delta 1e-2, 1e-5."""
    for series, want in ((wang2019.refined, (0.052, 0.195)), (wang2019.crude, (0.464, 1.307))):
        curve = 3000 * np.asarray(series(WHOLE, 1 / 60, 6.766 * 10 / 2))
        got = [float(rdp.epsilon(WHOLE, curve, delta)) for delta in (1e-2, 1e-5)]
        np.testing.assert_allclose(got, want, atol=6e-4)


def test_series_are_ordered_and_interpolated():
    close(wang2019.refined([2.0, 8.0, 32.0], 0.2, 10.0), [1.607e-3, 6.750e-3, 2.515e-2], 3e-4)
    close(wang2019.crude([2.0, 4.0, 64.0], 0.01, 0.5), [0.01086044, 2.09230847, 123.332734], 1e-6)
    orders = np.array([2.0, 3, 4, 8, 16, 32])
    for z in (0.5, 1.0, 10.0):
        bounds = (rdp.without_replacement, wang2019.refined, wang2019.crude)
        tight, fine, coarse = (np.asarray(bound(orders, 0.2, z)) for bound in bounds)
        assert (tight <= fine * (1 + 1e-9)).all() and (fine <= coarse * (1 + 1e-12)).all()
    one, two, middle, three = wang2019.crude([1.5, 2.0, 2.5, 3.0], 0.1, 3.0)
    close(one, two)  # (a - 1) times it, on a chord from 0
    close(middle, (0.5 * 1 * two + 0.5 * 2 * three) / 1.5)
