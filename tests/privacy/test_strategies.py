"""Strategies of correlated noise: published numbers, sensitivities against a search of all
patterns, and that a round computes what the matrices say."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl
from jfl.privacy.mechanisms.strategies import (
    Banded,
    Exponentials,
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    momentum,
    restarted,
    square_root,
    tree,
)

MADE = {  # of 11 rounds, so that nothing is a power of two or a multiple of the bands
    "identity": lambda: identity(11),
    "tree": lambda: tree(11),
    "restarted tree": lambda: restarted(tree(4), 11),
    "restarted": lambda: restarted(inverse_banded(4, 3), 11),
    "restarted twice": lambda: restarted(restarted(inverse_banded(2, 2), 4), 11),
    "efficient tree": lambda: tree(11, efficient=True),
    "square root": lambda: square_root(11),
    "banded": lambda: banded_toeplitz(11, 3),
    "banded for epochs": lambda: banded_toeplitz(11, 3, participations=3, separation=4),
    "wide bands for epochs": lambda: banded_toeplitz(11, 6, participations=4, separation=3),
    "inverse banded": lambda: inverse_banded(11, 3),
    "inverse square root": lambda: inverse_banded(11, 4, optimise=False),
    "blt": lambda: blt(11, 2),
    "blt for epochs": lambda: blt(11, 2, participations=3, separation=4, error="max"),
    "dense": lambda: dense(11),
    "dense for epochs": lambda: dense(11, participations=3, separation=4),
    "momentum": lambda: banded_toeplitz(11, 3, workload=momentum(11, 0.9)),
    "dense, momentum": lambda: dense(11, workload=momentum(11, 0.9)),
}
# by the same code as the others, with other numbers
RARE = {"banded for epochs", "blt for epochs", "momentum", "dense, momentum"}
EXACT = {"identity", "square root", "banded", "inverse square root", "blt", "blt for epochs"}


@functools.cache
def made(name):
    return MADE[name]()


def slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


NAMES = [slow(name) if name in RARE else name for name in MADE]


# --- published numbers

efficient_tree = functools.partial(tree, efficient=True)
square_root_bands = functools.partial(inverse_banded, optimise=False)


def for_epochs(make):
    return functools.partial(make, participations=5, separation=100)


ONCE, EPOCHS = (1, 1), (5, 100)  # participations, and the rounds between two of them
PUBLISHED = [  # make, its arguments, participations, rmse, and its relative tolerance
    (identity, (1000,), ONCE, 22.3718573212, 1e-6),
    (tree, (1000,), ONCE, 7.02709, 1e-6),
    (efficient_tree, (1000,), ONCE, 5.357328, 1e-6),
    (square_root, (2048,), ONCE, 3.3305168014, 1e-6),
    (banded_toeplitz, (16, 4), ONCE, 1.9375302750, 1e-6),
    (banded_toeplitz, (128, 128), ONCE, 2.3971778847, 1e-6),
    slow(banded_toeplitz, (1000, 32), ONCE, 4.9107216467, 1e-6),
    (dense, (64,), ONCE, 2.0998686732, 1e-5),
    (identity, (500,), EPOCHS, 35.3906767, 1e-6),
    (square_root, (500,), EPOCHS, 8.3902547, 1e-6),
    (for_epochs(banded_toeplitz), (500, 16), EPOCHS, 10.5133997, 1e-6),
    (square_root_bands, (500, 4), EPOCHS, 14.3994303, 1e-6),
    (for_epochs(inverse_banded), (500, 4), EPOCHS, 7.9209098, 2e-4),
    slow(for_epochs(inverse_banded), (500, 16), EPOCHS, 7.1809195, 2e-4),
    slow(for_epochs(blt), (500, 2), EPOCHS, 7.1618241, 1e-6),
]


@pytest.mark.parametrize("make, about, times, rmse, tolerance", PUBLISHED)
def test_published_errors(make, about, times, rmse, tolerance):
    assert make(*about).rmse(*times) == pytest.approx(rmse, rel=tolerance)


@pytest.mark.parametrize(
    "make, about, times, loss",
    [
        (square_root, (10**4,), ONCE, 3.9980102911**2),
        (functools.partial(blt, error="max"), (100, 2), ONCE, 6.4339483833),
        slow(functools.partial(blt, error="max"), (1000, 3), ONCE, 10.6923624576),
        slow(for_epochs(functools.partial(blt, error="max")), (500, 2), EPOCHS, 72.12006190),
    ],
)
def test_largest_errors(make, about, times, loss):
    strategy = make(*about)
    assert strategy.errors()[-1] * strategy.sensitivity(*times) ** 2 == pytest.approx(
        loss, rel=1e-7
    )


def test_small_cases_by_hand():
    np.testing.assert_allclose(tree(8).errors(), (1, 1, 2, 1, 2, 2, 3, 1))
    np.testing.assert_allclose(efficient_tree(4).errors()[2:], (1 + 2 / 3, 4 / 7))
    noise = square_root(100).first_noise()[:6]
    np.testing.assert_allclose(noise, (1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, -7 / 256))
    decay, weight = np.array([0.9, 0.5]), np.array([0.2, 0.3])
    column = np.concatenate([[1], decay ** np.arange(9)[:, None] @ weight])
    noise = Exponentials(10, 1, column, decay, weight, 2).first_noise()[:6]
    np.testing.assert_allclose(noise, (1, -0.5, -0.08, -0.032, -0.0224, -0.0176), atol=5e-5)


# --- sensitivity


def patterns(rounds, participations, separation, epochs=False):
    for count in range(1, participations + 1):
        for rounds_in in itertools.combinations(range(rounds), count):
            gaps = np.diff(rounds_in)
            if (gaps >= separation).all() and not (epochs and (gaps % separation).any()):
                yield list(rounds_in)


def searched(matrix, *about, epochs=False):
    """Return the sensitivity by trying all patterns, with contributions of equal and of opposite
    direction."""
    worst = 0.0
    for chosen in patterns(matrix.shape[1], *about, epochs=epochs):
        columns = matrix[:, chosen]
        for signs in itertools.product((1, -1), repeat=min(len(chosen), 5) - 1):
            signs = np.array([1, *signs, *[1] * (len(chosen) - len(signs) - 1)])
            worst = max(worst, np.linalg.norm(columns @ signs))
    return worst


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("about", [(3, 4), *map(slow, [(1, 1), (4, 3), (11, 1)])])
def test_no_pattern_exceeds_the_sensitivity(name, about):
    strategy = made(name)
    found, worst = strategy.sensitivity(*about), searched(strategy.matrix(), *about)
    assert found >= worst * (1 - 1e-9)
    assert found <= worst * 1.3  # a bound that were no use
    if name in EXACT or about == (1, 1):
        assert found == pytest.approx(worst, rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("separation", [3, slow(1), slow(4)])
def test_no_pattern_exceeds_the_squares_of_the_first_rounds(name, separation):
    strategy = made(name)
    for rounds in (1, 2, 5, 8, 11):
        squares = strategy.squared_sensitivities(rounds, separation)
        assert squares.shape == (rounds,) and (np.diff(squares) >= 0).all()
        matrix = strategy.matrix_until(rounds)
        worst = searched(matrix, -(-rounds // separation), separation, epochs=True)
        assert squares[-1] >= worst**2 * (1 - 1e-9)
        assert squares[-1] <= 1.3 * worst**2


@pytest.mark.parametrize("column", [(1, 0.2, 0.9), (1, -0.5, 0.8), (1, -0.9, -0.9), (1, 1.5)])
def test_columns_of_your_own_that_rise_or_turn_are_bounded(column):
    """What falls and is above them is charged; with turns as long as the column they are exact."""
    found = Banded(9, 1, np.array(column, float))
    for about in ((9, 1), (4, 2), (2, 1)):
        worst = searched(found.matrix(), *about)
        assert worst * (1 - 1e-9) <= found.sensitivity(*about) <= 2 * worst
        squares = found.squared_sensitivities(9, about[1])
        assert squares[-1] >= searched(found.matrix(), 9, about[1], epochs=True) ** 2 * (1 - 1e-9)
    assert found.sensitivity(3, 3) == pytest.approx(searched(found.matrix(), 3, 3), rel=1e-9)


def test_a_sensitivity_that_is_too_small_would_be_seen():
    strategy = made("square root")
    assert strategy.sensitivity(3, 4) < searched(strategy.matrix(), 3, 3)


# --- what a round computes


EACH_WAY = ("tree", "restarted", "banded", "inverse banded", "blt")  # to draw noise


@pytest.mark.parametrize("name", [n if n in EACH_WAY else slow(n) for n in MADE])
def test_rounds_compute_the_noise_of_the_matrix(name):
    strategy = made(name)
    noising = strategy.noising()
    fresh = np.random.default_rng(0).normal(size=(noising.shape[1], 2, 3)).astype("f4")
    wanted = np.tensordot(noising, fresh, 1)
    held, found = np.zeros((strategy.memory, 2, 3), "f4"), []
    draws, mix = jax.jit(strategy.draws), jax.jit(strategy.mix)
    for t in range(strategy.rounds):
        if strategy.memory:
            mixed, held = mix(fresh[t], held)
        else:
            index, weight, count = draws(t)
            used = np.asarray(index)[: int(count)]
            mixed = np.tensordot(np.asarray(weight)[: int(count)], fresh[used], 1)
        found.append(mixed)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["banded", "blt"])  # that hold noise
def test_noise_is_multiplied_in_full(name):
    """By default a GPU rounds factors to 10 bits, a TPU to 7: then the noise is not the one that is
    accounted."""
    strategy = made(name)
    jaxpr = jax.make_jaxpr(strategy.mix)(jnp.ones(5), jnp.ones((strategy.memory, 5)))
    dots = [e.params["precision"] for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert dots == [(jax.lax.Precision.HIGHEST,) * 2]


@pytest.mark.parametrize("name", [n for n in NAMES if "tree" not in str(n)])
def test_noise_is_the_inverse(name):
    strategy = made(name)
    np.testing.assert_allclose(strategy.matrix() @ strategy.noising(), np.eye(11), atol=1e-9)
    assert not np.triu(strategy.matrix(), 1).any()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: banded_toeplitz(4, 5), "bands <= rounds=4"),
        (lambda: banded_toeplitz(0, 1), "rounds"),
        (lambda: inverse_banded(4, 2, error="median"), "mean"),
        (lambda: blt(10, 0), "buffers"),
        (lambda: banded_toeplitz(4, 2, workload=np.zeros(4)), "only zeros"),
        (lambda: banded_toeplitz(4, 2, workload=np.ones(3)), "shape (3,)"),
        (lambda: dense(8, participations=2, separation=2), "all of the 4"),
        (lambda: identity(4).sensitivity(0), "participations"),
        (lambda: momentum(4, 1.0), "beta < 1"),
        (lambda: jfl.correlated(1.0, "tree"), "jfl.strategies"),
        (lambda: jfl.correlated(lambda r: 1.0, identity(4)), "one noise multiplier"),
        (lambda: jfl.correlated(0.0, identity(4)), "noise_multiplier"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        call()
