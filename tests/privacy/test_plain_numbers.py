"""Epsilon from plain numbers: the same accountant as a plan and the command line."""

import pytest

import jfl
from jfl.cli import main
from jfl.privacy.accountants import events, tightest

NUMBERS = dict(rate=0.01, rounds=100, delta=1e-6)


@pytest.mark.parametrize(
    "adjacency, sampler, step",
    [
        ("add_remove", "poisson", events.poisson),
        # for the same noise, z under replace_one is half of z under add_remove, and proves less
        ("replace_one", "poisson", events.replaced),
        ("replace_one", "without_replacement", events.touched),
    ],
)
def test_epsilon_is_the_accountants(adjacency, sampler, step, renyi):
    found = jfl.epsilon(noise_multiplier=2.0, adjacency=adjacency, sampler=sampler, **NUMBERS)
    event = events.repeat(step(0.01, events.gaussian(2.0)), 100)
    assert found == tightest.epsilon(event, 1e-6)[0]
    if sampler == "poisson" and adjacency == "add_remove":
        assert found == jfl.epsilon(noise_multiplier=2.0, **NUMBERS)
        z = jfl.noise_multiplier(epsilon=found, adjacency="add_remove", **NUMBERS)
        assert z == pytest.approx(2.0, rel=1e-3)
        assert jfl.epsilon(noise_multiplier=z, **NUMBERS) <= found


def test_full_participation_is_exact():
    whole = jfl.epsilon(noise_multiplier=2.0, rounds=9, sampler="full")
    assert whole == tightest.epsilon(events.repeat(events.gaussian(2.0), 9), 1e-5)[0]


def test_the_command_line_agrees_and_says_what_z_is(capsys):
    for adjacency, meaning in (("add_remove", "σ/C "), ("replace_one", "σ/(2C) ")):
        numbers = dict(sampler="full", rounds=100, adjacency=adjacency)
        words = f"--sampler full --rounds 100 --adjacency {adjacency}".split()
        assert main.main(["epsilon", "--noise-multiplier", "2", *words]) == 0
        shown = capsys.readouterr().out
        assert f"{jfl.epsilon(noise_multiplier=2.0, **numbers):.4g}" in shown
        assert meaning in shown and adjacency in shown
        assert main.main(["calibrate", "--epsilon", "2", *words]) == 0
        assert f"{jfl.noise_multiplier(epsilon=2.0, **numbers):.6g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(rate=1.5), r"rate"),
        (dict(rounds=0), "rounds"),
        (dict(delta=0.0), "delta"),
        (dict(noise_multiplier=0.0), "noise_multiplier"),
        (dict(adjacency="zero_out"), "adjacency"),
        (dict(sampler="full"), "rate=1"),
        (dict(sampler="without_replacement", adjacency="add_remove"), "use 'poisson'"),
    ],
)
def test_bad_numbers_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        jfl.epsilon(**(dict(noise_multiplier=1.0, **NUMBERS) | change))
