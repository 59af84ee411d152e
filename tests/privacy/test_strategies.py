"""Strategies of correlated noise: published numbers, sensitivities against a search of all
patterns, and that a round computes what the matrices say."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfl
from jfl.privacy.mechanisms import strategy_search as series
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
EXACT = {"identity", "square root", "banded", "inverse square root", "blt", "blt for epochs"}


@pytest.fixture(scope="module")
def made():
    return functools.cache(lambda name: MADE[name]())


# --- published numbers


ONE_PARTICIPATION = {
    "identity": (identity, ((16, 2.9154759474), (1000, 22.3718573212))),
    "tree": (tree, ((16, 3.211308), (128, 5.297405), (1000, 7.02709), (1024, 7.416923))),
    "efficient tree": (
        functools.partial(tree, efficient=True),
        ((16, 2.662679), (128, 4.150795), (1000, 5.357328)),
    ),
    "square root": (
        square_root,
        ((16, 1.7968144397), (128, 2.4488257132), (512, 2.8891734914), (1000, 3.1022390635))
        + ((1024, 3.1097899069), (2048, 3.3305168014)),
    ),
}
# (rounds, bands) of banded_toeplitz
BANDED = {
    (16, 4): 1.9375302750,
    (16, 16): 1.7504281398,
    (64, 8): 2.6639748341,
    (128, 8): 3.4328248088,
    (128, 16): 2.8725541219,
    (128, 128): 2.3971778847,
    (512, 16): 4.7467775362,
    (1000, 4): 11.4310008892,
    (1000, 32): 4.9107216467,
}


@pytest.mark.parametrize("name", ONE_PARTICIPATION)
def test_errors_for_one_participation(name):
    make, published = ONE_PARTICIPATION[name]
    for rounds, rmse in published:
        assert make(rounds).rmse() == pytest.approx(rmse, rel=1e-6)


@pytest.mark.parametrize("about", BANDED)
def test_errors_of_bands_for_one_participation(about):
    assert banded_toeplitz(*about).rmse() == pytest.approx(BANDED[about], rel=1e-6)


def _for_epochs(make):
    return lambda n, size: make(n, size, participations=n // 100, separation=100)


def _slow(*row):
    return pytest.param(*row, marks=pytest.mark.slow)


_square_root_bands = functools.partial(inverse_banded, optimise=False)


@pytest.mark.parametrize(
    "make, n, size, rmse",
    [
        (lambda n, _: identity(n), 500, 0, 35.3906767),
        _slow(lambda n, _: identity(n), 1000, 0, 70.7460246),
        (lambda n, _: square_root(n), 500, 0, 8.3902547),
        _slow(lambda n, _: square_root(n), 1000, 0, 15.7161590),
        (_for_epochs(banded_toeplitz), 500, 16, 10.5133997),
        (_for_epochs(banded_toeplitz), 500, 100, 6.8657609),
        _slow(_for_epochs(banded_toeplitz), 1000, 16, 19.8532912),
        _slow(_for_epochs(banded_toeplitz), 1000, 100, 11.5726710),
        (_square_root_bands, 500, 4, 14.3994303),
        (_square_root_bands, 500, 16, 8.5099224),
        _slow(_square_root_bands, 1000, 16, 15.9868126),
        _slow(_for_epochs(blt), 500, 2, 7.1618241),
        _slow(_for_epochs(blt), 1000, 3, 12.1938516),
    ],
)
def test_errors_for_many_participations(make, n, size, rmse):
    assert make(n, size).rmse(n // 100, 100) == pytest.approx(rmse, rel=1e-6)


@pytest.mark.parametrize("bands, rmse", [(4, 7.9209098), (16, 7.1809195)])
def test_optimised_inverse_bands_are_as_good_as_published(bands, rmse):
    found = inverse_banded(500, bands, participations=5, separation=100).rmse(5, 100)
    assert (1 - 2e-4) * rmse < found < rmse


@pytest.mark.parametrize("n, rmse", [(16, 1.6894062966), (64, 2.0998686732)])
def test_dense_is_as_good_as_published(n, rmse):
    assert (1 - 1e-5) * rmse < dense(n).rmse() < rmse


@pytest.mark.parametrize("n, rmse", [(16, 3.6706080215), (64, 4.4078549571)])
def test_dense_for_epochs_is_as_good_as_published(n, rmse):
    found = dense(n, participations=4, separation=n // 4)
    error = np.sqrt(found.errors().mean()) * found.sensitivity(4, n // 4, epochs=True)
    assert (1 - 1e-6) * rmse < error < rmse


@pytest.mark.parametrize(
    "n, bands, first",
    [
        (16, 4, (0.794875, 0.438433, 0.329274, 0.259862)),
        (128, 8, (0.626449, 0.396589, 0.335968, 0.302081, 0.277540, 0.256942)),
        (1000, 32, (0.485666, 0.283575, 0.235334, 0.211785)),
    ],
)
def test_coefficients_of_bands(n, bands, first):
    column = banded_toeplitz(n, bands).column
    np.testing.assert_allclose((column / np.linalg.norm(column))[: len(first)], first, atol=2e-6)


@pytest.mark.parametrize(
    "n, loss",
    [(10, 1.7913439416), (100, 2.5313521126), (1000, 3.2650030807), (10**4, 3.9980102911)],
)
def test_largest_error_of_the_square_root(n, loss):
    made = square_root(n)
    assert np.sqrt(made.errors()[-1]) * made.sensitivity() == pytest.approx(loss, rel=1e-9)
    noise = made.first_noise()[:6]
    np.testing.assert_allclose(noise, (1, -1 / 2, -1 / 8, -1 / 16, -5 / 128, -7 / 256))


@pytest.mark.parametrize(
    "n, buffers, times, apart, loss",
    [
        (100, 2, 1, 1, 6.4339483833),
        (1000, 2, 1, 1, 11.0307795300),
        (1000, 3, 1, 1, 10.6923624576),
        pytest.param(10_000, 3, 1, 1, 16.2671185267, marks=pytest.mark.slow),
        pytest.param(500, 2, 5, 100, 72.12006190, marks=pytest.mark.slow),
    ],
)
def test_largest_error_of_blt(n, buffers, times, apart, loss):
    made = blt(n, buffers, participations=times, separation=apart, error="max")
    found = made.errors()[-1] * made.sensitivity(times, apart) ** 2
    assert found == pytest.approx(loss, rel=1e-7)


@pytest.mark.parametrize(
    "n, buffers, error, times, apart, weight, decay",
    [
        (500, 2, "mean", 5, 100, (0.2461325225, 0.2592202761), (0.9783673607, 0.5862730791)),
        (500, 2, "max", 5, 100, (0.2185799156, 0.2805704637), (0.9844494950, 0.6484326389)),
        (100, 2, "max", 1, 1, (0.1460278042, 0.3235409682), (0.9888596997, 0.7729881333)),
        (1000, 2, "max", 1, 1, (0.0671756973, 0.3197030645), (0.9980772380, 0.9079919470)),
    ],
)
def test_parameters_of_blt(n, buffers, error, times, apart, weight, decay):
    """Where a loss is least it is flat: parameters have half the digits of the loss."""
    made = blt(n, buffers, participations=times, separation=apart, error=error)
    np.testing.assert_allclose(made.weight, weight, rtol=1e-4)
    np.testing.assert_allclose(made.decay, decay, rtol=1e-4)


def test_algebra_of_blt():
    """A column of decays and its inverse, by hand."""
    decay, weight = np.array([0.9, 0.5]), np.array([0.2, 0.3])
    column = np.concatenate([[1], decay ** np.arange(9)[:, None] @ weight])
    made = Exponentials(10, 1, column, decay, weight, 2)
    np.testing.assert_allclose(column[:6], (1, 0.5, 0.33, 0.237, 0.1833, 0.14997))
    noise = (1, -0.5, -0.08, -0.032, -0.0224, -0.0176)
    np.testing.assert_allclose(made.first_noise()[:6], noise, atol=5e-5)
    assert made.sensitivity() ** 2 == pytest.approx(1.5169437117, rel=1e-9)
    assert made.errors()[-1] == pytest.approx(2.2397732785, rel=1e-9)


def test_known_small_cases():
    assert identity(9).errors().mean() == pytest.approx(5)
    np.testing.assert_allclose(tree(8).errors(), (1, 1, 2, 1, 2, 2, 3, 1))
    efficient = tree(4, efficient=True).errors()
    np.testing.assert_allclose(efficient[2:], (1 + 2 / 3, 4 / 7))
    assert tree(16).sensitivity() ** 2 == pytest.approx(5)
    # four bands, every fourth round: columns do not overlap; 32 rounds are 8 of them, but the last
    # are cut off, unless C is normalised
    made = banded_toeplitz(32, 4, participations=8, separation=4)
    assert made.sensitivity(8, 4) ** 2 == pytest.approx(8 * np.square(made.column).sum())
    # a unit in every round: nothing is better than noise of its own
    every = banded_toeplitz(12, 3, participations=12, separation=1)
    assert every.rmse(12, 1) == pytest.approx(identity(12).rmse(12, 1), rel=1e-5)


# --- sensitivity


def patterns(rounds, participations, separation, epochs=False):
    for count in range(1, participations + 1):
        for rounds_in in itertools.combinations(range(rounds), count):
            gaps = np.diff(rounds_in)
            if (gaps >= separation).all() and not (epochs and (gaps % separation).any()):
                yield list(rounds_in)


def searched(matrix, *about, epochs=False):
    """The sensitivity by trying all patterns, contributions of equal and of opposite direction."""
    worst = 0.0
    for chosen in patterns(matrix.shape[1], *about, epochs=epochs):
        columns = matrix[:, chosen]
        for signs in itertools.product((1, -1), repeat=min(len(chosen), 5) - 1):
            signs = np.array([1, *signs, *[1] * (len(chosen) - len(signs) - 1)])
            worst = max(worst, np.linalg.norm(columns @ signs))
    return worst


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    "about",
    [
        (3, 4),
        *(pytest.param(a, marks=pytest.mark.slow) for a in ((1, 1), (4, 3), (2, 5), (11, 1))),
    ],
)
def test_no_pattern_exceeds_the_sensitivity(made, name, about):
    strategy = made(name)
    found, worst = strategy.sensitivity(*about), searched(strategy.matrix(), *about)
    assert found >= worst * (1 - 1e-9)
    assert found <= worst * 1.3  # a bound that were no use
    if name in EXACT:
        assert found == pytest.approx(worst, rel=1e-9)
    if about == (1, 1):
        assert found == pytest.approx(worst, rel=1e-9)


@pytest.mark.parametrize("epochs", [False, True])
def test_a_restarted_strategy_costs_no_more_than_its_copies(epochs):
    """At most the sum over the copies of the squares, for the worst spread of participations."""
    of, about = square_root(8), (5, 3)
    whole = restarted(of, 24).sensitivity(*about, epochs=epochs)
    one = [0.0] + [of.sensitivity(k, 3, epochs=epochs) ** 2 for k in (1, 2, 3)]
    spreads = [k for k in itertools.product(range(4), repeat=3) if sum(k) == 5]
    assert whole == pytest.approx(max(sum(one[i] for i in k) for k in spreads) ** 0.5, rel=1e-12)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize(
    "separation", [3, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 4))]
)
def test_squares_of_all_first_rounds_are_no_less_than_what_a_search_finds(made, name, separation):
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
    made = Banded(9, 1, np.array(column, float))
    for about in ((9, 1), (4, 2), (2, 1)):
        worst = searched(made.matrix(), *about)
        assert worst * (1 - 1e-9) <= made.sensitivity(*about) <= 2 * worst
        squares = made.squared_sensitivities(9, about[1])
        assert squares[-1] >= searched(made.matrix(), 9, about[1], epochs=True) ** 2 * (1 - 1e-9)
    assert made.sensitivity(3, 3) == pytest.approx(searched(made.matrix(), 3, 3), rel=1e-9)


def test_a_sensitivity_that_is_too_small_would_be_seen(made):
    strategy = made("square root")
    assert strategy.sensitivity(3, 4) < searched(strategy.matrix(), 3, 3)


# --- what a round computes


EACH_WAY = ("tree", "restarted", "banded", "inverse banded", "blt")  # to draw noise


@pytest.mark.parametrize(
    "name",
    [n if n in EACH_WAY else pytest.param(n, marks=pytest.mark.slow) for n in MADE],
)
def test_rounds_compute_the_noise_of_the_matrix(made, name):
    strategy = made(name)
    noising = strategy.noising()
    fresh = np.random.default_rng(0).normal(size=(noising.shape[1], 2, 3)).astype("f4")
    wanted = np.tensordot(noising, fresh, 1)
    held, found = np.zeros((strategy.memory, 2, 3), "f4"), []
    for t in range(strategy.rounds):
        if strategy.memory:
            mixed, held = jax.jit(strategy.mix)(fresh[t], held)
        else:
            index, weight, count = jax.jit(strategy.draws)(t)
            used = np.asarray(index)[: int(count)]
            mixed = np.tensordot(np.asarray(weight)[: int(count)], fresh[used], 1)
        found.append(mixed)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("name", ["banded", "blt"])  # that hold noise
def test_noise_is_multiplied_in_full(made, name):
    """By default a GPU rounds what it multiplies to 10 bits behind the point, a TPU to 7: then the
    noise is not the one that is accounted."""
    strategy = made(name)
    fresh, held = jnp.ones(5), jnp.ones((strategy.memory, 5))
    found = [
        e.params["precision"]
        for e in jax.make_jaxpr(strategy.mix)(fresh, held).eqns
        if e.primitive.name == "dot_general"
    ]
    assert found == [(jax.lax.Precision.HIGHEST,) * 2]


@pytest.mark.parametrize("name", [n for n in MADE if "tree" not in n])
def test_noise_is_the_inverse(made, name):
    strategy = made(name)
    product = strategy.matrix() @ strategy.noising()
    np.testing.assert_allclose(product, np.eye(11), atol=1e-9)
    assert not np.triu(strategy.matrix(), 1).any()


def test_a_tree_releases_prefixes_of_its_nodes():
    """The noise of round t is what two prefix sums differ by, each of as many nodes as ones."""
    made = tree(13)
    sums = np.cumsum(made.noising(), axis=0)
    assert [int((row != 0).sum()) for row in sums] == [t.bit_count() for t in range(1, 14)]
    assert set(np.unique(sums)) == {0.0, 1.0}
    assert (made.noising() != 0).sum(1).max() <= 5


def test_a_strategy_is_data():
    """Two of one shape are one program, and derivatives and sweeps reach their numbers."""
    one, other = (inverse_banded(50, 4, participations=5, separation=s) for s in (10, 10))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert jax.tree.structure(one) != jax.tree.structure(inverse_banded(60, 4))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), one, one)
    index, weight, count = jax.vmap(lambda s: s.draws(2))(stacked)
    assert (
        weight.shape == (2, 4) and count.tolist() == [3, 3] and index[0].tolist()[:3] == [2, 1, 0]
    )


def test_series():
    np.testing.assert_allclose(
        np.convolve(series.inverse(series.square_root_series(9), 9), series.square_root_series(9))[
            :9
        ],
        np.eye(9)[0],
        atol=1e-12,
    )
    np.testing.assert_allclose(
        np.convolve(series.square_root_series(9), series.square_root_series(9))[:9], np.ones(9)
    )


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
def test_refusals_say_what_was_needed(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(")", r"\)")):
        call()


@pytest.mark.slow
def test_two_thousand_rounds_are_found_soon():
    """Of the least error that the square root has; the time is told, not held."""
    import time

    begun = time.perf_counter()
    found = banded_toeplitz(2000, 16)
    print(f"2000 rounds, 16 bands: {time.perf_counter() - begun:.2f} s")
    assert square_root(2000).rmse() < found.rmse() < banded_toeplitz(2000, 8).rmse()
