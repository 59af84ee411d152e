"""Searches of the accountants: what they return was tested, and lies on the safe side."""

import math

import pytest

from jfl.privacy.accountants import roots

FALLING = {
    "straight": (lambda x: 1.3 - x, 1.3),
    "convex": (lambda x: math.exp(-5 * x) - 1e-3, math.log(1e3) / 5),
    "jump": (lambda x: math.inf if x < 0.7 else -1.0, 0.7),
    "flat after": (lambda x: max(0.4 - x, 0.0), 0.4),  # zero from 0.4 on: the first zero counts
    "nan before": (lambda x: math.nan if x < 1.1 else -1e-9, 1.1),
}


@pytest.mark.parametrize("name", FALLING)
def test_the_smallest_that_fits(name):
    excess, crossing = FALLING[name]
    tested = {}

    def watched(x):
        tested[x] = excess(x)
        return tested[x]

    x = roots.smallest_fitting(watched, 0.0, 2.0, 1e-6)
    assert tested[x] <= 0 and crossing - 1e-12 <= x <= crossing + 1e-6
    assert any(x - 1e-6 <= other < x and not value <= 0 for other, value in tested.items())
    assert roots.smallest_fitting(lambda x: -1.0, 0.5, 2.0, 1e-6) == 0.5
    with pytest.raises(ValueError, match="different signs"):
        roots.smallest_fitting(lambda x: 1.0, 0.5, 2.0, 1e-6)
