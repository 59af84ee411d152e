"""Epsilon from plain numbers: the same accountant as a plan and the command line."""

import pytest

import jfl
from jfl.cli import main
from jfl.privacy.accountants import events, tightest

NUMBERS = dict(rate=0.01, rounds=1000, delta=1e-6)


def test_epsilon_is_the_accountants_and_has_an_inverse():
    event = events.repeat(events.poisson(0.01, events.gaussian(1.0)), 1000)
    value = jfl.epsilon(noise_multiplier=1.0, adjacency="add_remove", **NUMBERS)
    assert value == tightest.epsilon(event, 1e-6)[0] == jfl.epsilon(noise_multiplier=1.0, **NUMBERS)
    z = jfl.noise_multiplier(epsilon=value, adjacency="add_remove", **NUMBERS)
    assert z == pytest.approx(1.0, rel=1e-3)
    assert jfl.epsilon(noise_multiplier=z, **NUMBERS) <= value
    whole = jfl.epsilon(noise_multiplier=2.0, rounds=9, sampler="full")
    assert whole == tightest.epsilon(events.repeat(events.gaussian(2.0), 9), 1e-5)[0]


def test_adjacency_decides_the_sample_and_what_z_is():
    """Of one noise, z under replace_one is half of z under add_remove, and proves less."""
    replaced = events.repeat(events.replaced(0.01, events.gaussian(0.5)), 1000)
    value = jfl.epsilon(noise_multiplier=0.5, adjacency="replace_one", **NUMBERS)
    assert value == tightest.epsilon(replaced, 1e-6)[0]
    assert value > jfl.epsilon(noise_multiplier=1.0, adjacency="add_remove", **NUMBERS)
    fixed = events.repeat(events.touched(0.01, events.gaussian(2.0)), 1000)
    assert (
        jfl.epsilon(noise_multiplier=2.0, sampler="without_replacement", **NUMBERS)
        == tightest.epsilon(fixed, 1e-6)[0]
    )


@pytest.mark.parametrize("adjacency, meaning", [("add_remove", "σ/C "), ("replace_one", "σ/(2C) ")])
def test_the_command_line_agrees_and_says_what_z_is(capsys, adjacency, meaning):
    words = "epsilon --noise-multiplier 2 --rate 0.01 --rounds 100 --delta 1e-6 --adjacency"
    assert main.main([*words.split(), adjacency]) == 0
    shown = capsys.readouterr().out
    numbers = NUMBERS | dict(rounds=100)
    value = jfl.epsilon(noise_multiplier=2.0, adjacency=adjacency, **numbers)
    assert f"{value:.4g}" in shown and meaning in shown and adjacency in shown


def test_the_command_line_calibrates_alike(capsys):
    words = "calibrate --epsilon 2 --sampler full --rounds 100 --adjacency add_remove".split()
    assert main.main(words) == 0
    z = jfl.noise_multiplier(epsilon=2.0, sampler="full", rounds=100, adjacency="add_remove")
    assert f"{z:.6g}" in capsys.readouterr().out


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
def test_bad_numbers_are_rejected(change, match):
    with pytest.raises(ValueError, match=match):
        jfl.epsilon(**(dict(noise_multiplier=1.0, **NUMBERS) | change))
