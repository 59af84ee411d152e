"""Epsilon from plain numbers: the same accountant as a plan and the command line."""

import math

import numpy as np
import pytest
from scipy.special import log_ndtr

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
        ("zero_out", "poisson", events.poisson),
        ("zero_out", "without_replacement", lambda rate, event: events.zeroed_out(1, 100, event)),
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
    for adjacency, meaning in (("zero_out", "σ/C "), ("replace_one", "σ/(2C) ")):
        numbers = dict(sampler="full", rounds=100, adjacency=adjacency)
        words = f"--sampler full --rounds 100 --adjacency {adjacency}".split()
        assert main.main(["epsilon", "--noise-multiplier", "2", *words]) == 0
        shown = capsys.readouterr().out
        assert f"{jfl.epsilon(noise_multiplier=2.0, **numbers):.4g}" in shown
        assert meaning in shown and adjacency in shown
        assert main.main(["calibrate", "--epsilon", "2", *words]) == 0
        assert f"{jfl.noise_multiplier(epsilon=2.0, **numbers):.6g}" in capsys.readouterr().out


# --- claims of deployed software, whose sources docs/guides/guarantee.md names

FLIP_STD = 1e-4 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 10  # for epsilon 10 at delta 1e-5
ONE_RELEASE = dict(sampler="full", rounds=1)


def exact_delta(epsilon, z):
    """The delta of one Gaussian release, by its closed form (Balle, Wang 2018, Theorem 8)."""
    logs = log_ndtr(1 / (2 * z) - epsilon * z), epsilon + log_ndtr(-1 / (2 * z) - epsilon * z)
    return math.exp(logs[0]) - math.exp(logs[1])


@pytest.mark.parametrize(
    "numbers, z, expected",
    [
        (dict(clip_norm=1.0), FLIP_STD / 2, 852_250_121.48),
        (dict(clip_norm=1.0, adjacency="add_remove"), FLIP_STD, 213_106_544.71),
        (dict(clip_norm=1e-4, adjacency="add_remove"), FLIP_STD * 1e4, 10.393882),
        (dict(clip_norm=1e-4, mean_of=10), FLIP_STD * 5e4, 1.6103161),
    ],
)
def test_epsilon_of_a_standard_deviation(numbers, z, expected):
    assert FLIP_STD == pytest.approx(4.845e-5, rel=1e-4)  # as the software prints it
    found = jfl.epsilon(noise_std=FLIP_STD, **numbers, **ONE_RELEASE)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found == jfl.epsilon(
        noise_multiplier=z, adjacency=numbers.get("adjacency"), **ONE_RELEASE
    )
    # one part in a million less is not proved
    assert exact_delta(found, z) <= 1e-5 * (1 + 1e-6)
    assert exact_delta(found * (1 - 1e-5), z) > 1e-5


def test_sparse_vector_filter_with_default_options():
    fraction, epsilon, noise_var, parameters = 0.1, 0.1, 0.1, 7_033_282
    released = math.ceil(fraction * parameters)
    assert epsilon + released * noise_var == pytest.approx(70_333.0, abs=0.05)
    # The scale of the noise is 2 gamma / 0.1, and the sensitivity of a clipped value is 2 gamma.
    values = events.repeat(events.laplace(1 / noise_var), released)
    both = events.compose(events.pure(epsilon), values)
    found, method = tightest.epsilon(both, 1e-5)
    assert (found, method) == (pytest.approx(3793.906, abs=0.01), "rdp")
    # the same by the RDP of Laplace noise (Mironov 2017, Table II), and the plain conversion
    orders, one = np.linspace(1.01, 1.5, 500), noise_var
    growth = orders / (2 * orders - 1) * np.exp((orders - 1) * one)
    decay = (orders - 1) / (2 * orders - 1) * np.exp(-orders * one)
    rdp = epsilon + released * np.log(growth + decay) / (orders - 1)
    plain = (rdp + math.log(1e5) / (orders - 1)).min()
    assert 0.995 * plain < found < plain


@pytest.mark.parametrize("std", [4.845e-5, 1e-12])
@pytest.mark.parametrize("words", ["--sampler full", "--rate 0.1", "--unit client --rate 0.1"])
def test_little_noise_has_a_large_epsilon(std, words, capsys):
    words = [
        "epsilon",
        "--noise-std",
        str(std),
        "--clip-norm",
        "1",
        "--rounds",
        "9",
    ] + words.split()
    assert main.main(words) == 0
    assert "protects almost nothing" in capsys.readouterr().err


def test_claimed_and_proved_epsilon(capsys):
    words = "epsilon --clip-norm 1 --sampler full --rounds 1 --claimed 10 --noise-std".split()
    assert main.main([*words, "4.845e-5"]) == 1
    out = capsys.readouterr().out
    assert "8.522e+08" in out and "8.522e+07" in out and "do not prove the claim" in out
    assert "multiplier of 0.4999, 2.064e+04 times" in out and "no accountant can prove less" in out
    needed = 0.4999 * 2 * 1.001
    assert main.main([*words, str(needed)]) == 0
    assert "The claim holds" in capsys.readouterr().out
    assert main.main([*words, str(needed / 10), "--mean-of", "10"]) == 0
    assert "The claim holds" in capsys.readouterr().out
    sampled = "epsilon --noise-multiplier 0.01 --rate 0.1 --rounds 10 --claimed 1".split()
    assert main.main(sampled) == 1
    out = capsys.readouterr().out
    assert "jfl does not prove the claim" in out and "no accountant" not in out
    # a client that is almost never absent: the exact ε without sampling is only an upper bound
    absent = "epsilon --noise-multiplier 1 --sampler full --rounds 10 --claimed 1".split()
    for clients, is_exact in ((999999, True), (1000000, False)):
        assert main.main([*absent, "--cohort", "999999", "--clients", str(clients)]) == 1
        out = capsys.readouterr().out
        assert "gaussian_exact" in out and ("no accountant can prove less" in out) == is_exact
    # nothing is claimed for numbers that nobody stated
    for missing in (absent[:5] + absent[7:], absent[:1] + absent[3:]):
        assert main.main(missing) != 0
        assert "rounds and noise for --claimed" in capsys.readouterr().err
    assert main.main([*words[:-1], "--noise-multiplier", "1"]) != 0
    assert "either noise_multiplier" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(noise_multiplier=None), "either noise_multiplier"),
        (dict(noise_std=1.0, clip_norm=1.0), "either noise_multiplier"),
        (dict(mean_of=5), "either noise_multiplier"),
        (dict(noise_multiplier=None, noise_std=1.0), "either noise_multiplier"),
        (dict(noise_multiplier=None, noise_std=1.0, clip_norm=0.0), "clip_norm > 0"),
        (dict(noise_multiplier=None, noise_std=1.0, clip_norm=1.0, mean_of=0), "mean_of >= 1"),
        (dict(rate=1.5), r"rate"),
        (dict(rounds=0), "rounds"),
        (dict(delta=0.0), "delta"),
        (dict(noise_multiplier=0.0), "noise_multiplier"),
        (dict(adjacency="remove"), "adjacency"),
        (dict(sampler="full"), "rate=1"),
        (dict(sampler="without_replacement", adjacency="add_remove"), "use 'poisson'"),
    ],
)
def test_bad_numbers_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        jfl.epsilon(**(dict(noise_multiplier=1.0, **NUMBERS) | change))
