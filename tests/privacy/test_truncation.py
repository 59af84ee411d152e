"""Computed noise ends at a finite number of standard deviations, and delta pays for that."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ledger_plans import DELTA, NOISY, make, poisson_plan
from jfl.kernels import normals
from scipy import integrate, special

import jfl
from jfl import sampling
from jfl.core.errors import NotAnalysable
from jfl.privacy import calibration, guarantees
from jfl.privacy.accountants import events, truncation
from jfl.privacy.accountants.tightest import Release
from jfl.privacy.accountants.truncation import Shift, lost_mass
from jfl.privacy.ledger import entries
from jfl.privacy.ledger import entry as ledger_entry
from jfl.sampling import batches


def leaving(shift):
    """Return the probability that a shifted pair of normals, of a radius up to REACH, lies
    beyond."""
    end = normals.REACH
    # at radius r the angles a with r^2 + 2 r t cos(a) + t^2 > end^2
    angle = lambda r: np.arccos(np.clip((end**2 - r**2 - shift**2) / (2 * r * shift), -1, 1))
    density = lambda r: angle(r) / np.pi * r * np.exp(-r * r / 2)
    return integrate.quad(density, max(end - shift, 0), end, epsabs=0, limit=200)[0]


@pytest.mark.parametrize("shift", [0.01, 1.0, 4.0, 6.6])
@pytest.mark.parametrize("pairs", [1, 7, 1000])
def test_the_charge_covers_every_spread_of_a_shift(shift, pairs):
    charged = lost_mass(shift, 2 * pairs, normals.MISSING)
    assert pairs * leaving(shift / np.sqrt(pairs)) <= charged
    for largest in (0.5, 0.9):  # one pair takes most of it, the others the rest
        rest = shift * np.sqrt((1 - largest**2) / max(pairs - 1, 1))
        assert leaving(largest * shift) + (pairs - 1) * leaving(rest) <= charged
    if pairs == 1 and shift > 1:  # the charge is not far above what is lost
        assert charged <= 40 * leaving(shift)


def test_normals_reach_as_far_as_is_stated():
    """Words of zeros make the largest normal."""
    largest = normals.pair(*(jnp.zeros(1, jnp.uint32),) * 4)
    np.testing.assert_allclose(np.hypot(*largest), normals.REACH, rtol=1e-5)
    assert normals.MISSING == pytest.approx(np.exp(-(normals.REACH**2) / 2))


@pytest.mark.parametrize("rounds", [1, 100, 10**6])
@pytest.mark.parametrize("z", [0.12, 0.15, 0.2, 0.3, 1.0])
def test_lost_mass_is_paid_or_the_plan_is_refused(z, rounds):
    plan = make(upload=NOISY(z))
    lost = rounds * special.ndtr(-(normals.REACH - 1 / z))  # of a shift of one coordinate
    try:
        found = guarantees.guarantee(plan, rounds, DELTA, view="server", unit="client")
    except NotAnalysable as error:
        assert "cannot reach" in str(error) or "delta" in str(error)
        entry = entries.entries(plan, rounds)[0]
        assert ledger_entry.lost_of(entry, np.array([rounds]), DELTA)[0] >= DELTA
        return
    assert lost <= truncation.total(found.release.shifts) < DELTA


def test_steps_of_a_client_are_all_charged():
    entry = entries.entries(poisson_plan(), 50)[0]
    shifts = ledger_entry.shifts_of(entry, 50)
    assert [(s.length, s.times) for s in shifts] == [(1.0, 150.0)]
    assert ledger_entry.lost_of(entry, np.array([0, 50, 100]), DELTA) == pytest.approx(
        np.array([0, 1, 2]) * (DELTA - truncation.left_of(DELTA, shifts)), rel=1e-6
    )


def test_levels_of_noise_are_charged_as_they_are():
    falling = make(release=NOISY(std=lambda r: 4.0 / (1 + r)))
    entry = [e for e in entries.entries(falling, 3) if not e.refusal][0]
    lengths = sorted(s.length for s in ledger_entry.shifts_of(entry, 3))
    assert len(lengths) == 3 and lengths[2] == pytest.approx(3 * lengths[0])
    after = ledger_entry.lost_of(entry, np.array([1, 2, 3]), DELTA)
    assert (np.diff(after) > 0).all()


def test_a_group_shifts_further():
    one = Release((events.gaussian(1.0),), shifts=(Shift(1.0, 2.0, 2.0**-63),))
    assert one.group(3).shifts == (Shift(3.0, 2.0, 2.0**-63),)


def test_calibration_stops_where_computed_noise_does():
    asked = dict(rounds=1, delta=DELTA, unit="client", view="server")
    plan = make(upload=NOISY(1.0))
    z = calibration.calibrate(plan, epsilon=25.0, **asked)
    assert guarantees.guarantee(make(upload=NOISY(z)), **asked).epsilon <= 25.0
    # Gaussian noise without an end reaches 200 with less noise
    with pytest.raises(ValueError, match="its largest values are finite.*Lower epsilon"):
        calibration.calibrate(plan, epsilon=200.0, **asked)
    with pytest.raises(NotAnalysable, match="cannot reach"):
        guarantees.guarantee(make(upload=NOISY(0.1)), **asked)


def test_a_unit_that_replaces_another_in_a_sample_costs_twice():
    """Three centres: without the unit, with the one, with the other."""
    sampled = make(rows=NOISY(2.0))  # batches without replacement, replace_one
    whole = make(rows=NOISY(2.0), batch=batches.full(), sampler=sampling.full(20))
    shifts = lambda plan: ledger_entry.shifts_of(entries.entries(plan, 1)[0], 1)
    times = lambda plan: sum(s.times for s in shifts(plan))
    assert times(sampled) == 2 * times(whole) == 6


def test_a_sample_that_may_hold_a_unit_several_times_is_charged_as_an_overflow():
    plan = make(rows=NOISY(2.0), batch=batches.with_replacement(10))
    entry = next(e for e in entries.entries(plan, 1) if not e.refusal)
    assert not ledger_entry.shifts_of(entry, 1) and entry.overflow > 0


def test_a_refusal_names_what_uses_up_delta():
    """Laplace noise of full batches has no capacity that could be raised."""
    noise = jfl.chain(jfl.clip_l1(1.0), jfl.total(), jfl.laplace(0.02))
    refused = make(rows=noise, batch=batches.full())
    with pytest.raises(NotAnalysable, match="noise beyond its largest value.*if they have one"):
        guarantees.guarantee(refused, rounds=1, delta=1e-5)
