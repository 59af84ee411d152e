"""Rows of bad quality: each client has its share of wrong pixels and labels, and the draws follow
rows alone.

False alarms: each statistical bound here holds with probability above 1 - 1e-9 under the law it
tests.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jfl.core.records import Federation
from jfl.data import corruption, datasets, federate, partition

ALARM = 1e-9


def grey(rows=240, pixels=(20, 30), test=7, classes=4):
    """Rows whose every change is seen: no pixel is 0 or 1, and rows differ."""
    rng = np.random.default_rng(5)
    x = rng.uniform(0.2, 0.8, (rows + test, *pixels)).astype(np.float32)
    y = rng.integers(0, classes, rows + test)
    data = datasets.arrays(x[:rows], y[:rows], x[rows:], y[rows:], classes=classes)
    return data._replace(caveats=("before",))


def within(count, trials, p):
    low, high = stats.binom.ppf([ALARM / 2, 1 - ALARM / 2], trials, p)
    return low <= count <= high


def own(fed, client):
    return np.asarray(fed.index[client, : fed.size[client]])


def held(fed, client):
    return np.asarray(fed.test_index[client, : fed.test_size[client]])


# --- pixels


def test_each_client_has_its_density():
    fed, density = federate(grey(), partition.iid(4)), np.array([0.0, 0.05, 0.25, 1.0])
    noisy = corruption.salt_and_pepper(fed, density, low=0, high=1)
    for client, p in enumerate(density):
        before, after = (np.asarray(x)[own(fed, client)] for x in (fed.x, noisy.x))
        flipped = before != after
        assert set(np.unique(after[flipped])) <= {0.0, 1.0}
        count, trials = int(flipped.sum()), flipped.size
        assert within(count, trials, p)
        assert within(int(after[flipped].sum()), count, 0.5)
        if not 0 < p < 1:
            continue
        # power: 1.2 times as many would be seen, and so would equal rows
        assert not within(int(1.2 * count), trials, p)
        by_row, by_pixel = flipped.sum((1, 2)), flipped.sum(0).ravel()
        for counts, many in ((by_row, flipped[0].size), (by_pixel, len(flipped))):
            spread = ((counts - many * p) ** 2).sum() / (many * p * (1 - p))
            low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(counts))
            assert 0.8 * low < spread < 1.25 * high  # the counts are nearly normal, not exactly


def test_only_training_rows_change():
    fed = federate(grey(), partition.sizes([60, 100, 20]), holdout=0.25)
    noisy, x = corruption.salt_and_pepper(fed, 0.5, low=0, high=1), np.asarray(fed.x)
    changed = (np.asarray(noisy.x) != x).any((1, 2))
    trained = np.sort(np.concatenate([own(fed, c) for c in range(3)]))
    assert np.array_equal(np.flatnonzero(changed), trained)
    for field in dataclasses.fields(Federation):
        if field.name not in ("x", "identity"):
            np.testing.assert_array_equal(getattr(noisy, field.name), getattr(fed, field.name))
    assert noisy.caveats == ("before",)


def test_a_row_is_spoilt_alike_under_every_partition():
    data = grey()
    of = lambda split, seed=4: np.asarray(
        corruption.salt_and_pepper(federate(data, split), 0.3, seed=seed).x
    )
    one = of(partition.iid(4))
    assert np.array_equal(one, of(partition.dirichlet(5, 0.3)))
    assert (of(partition.iid(4), seed=5) != one).any((1, 2)).all()


def test_the_order_of_clients_and_the_size_of_a_block_change_nothing(monkeypatch):
    fed, turn = federate(grey(), partition.power_law(4)), np.array([2, 0, 3, 1])
    density = np.array([0.0, 0.1, 0.4, 0.9])
    noisy = corruption.salt_and_pepper(fed, density)
    turned = dataclasses.replace(fed, index=fed.index[turn], size=fed.size[turn])
    assert np.array_equal(corruption.salt_and_pepper(turned, density[turn]).x, noisy.x)
    for room in (1, 7 * 600 + 5):
        monkeypatch.setattr(corruption, "MAX_DRAWS", room)
        assert np.array_equal(corruption.salt_and_pepper(fed, density).x, noisy.x)


def test_more_density_spoils_more_of_the_same():
    fed = federate(grey(30, (9, 9)), partition.iid(3))
    x = [np.asarray(corruption.salt_and_pepper(fed, p, low=0, high=1).x) for p in (0, 0.2, 0.7, 1)]
    assert np.array_equal(x[0], fed.x)
    for less, more in zip(x, x[1:]):
        touched = less != x[0]
        assert np.array_equal(less[touched], more[touched]) and (less != more).any()


def test_levels_of_salt_and_pepper():
    fed = federate(grey(), partition.iid(2))
    x = np.asarray(corruption.salt_and_pepper(fed, 1.0).x)
    assert set(np.unique(x)) == {np.asarray(fed.x).min(), np.asarray(fed.x).max()}
    assert set(np.unique(corruption.salt_and_pepper(fed, 1.0, low=-3, high=0.5).x)) == {-3.0, 0.5}
    half = dataclasses.replace(fed, x=fed.x.astype(jnp.bfloat16))
    assert corruption.salt_and_pepper(half, 0.3).x.dtype == jnp.bfloat16


# --- labels


def test_label_noise():
    labels = np.arange(8000) % 4
    data = datasets.arrays(np.zeros((8000, 1)), labels, np.zeros((2, 1)), [0, 3], classes=4)
    fed, share = federate(data, partition.iid(3), holdout=0.1), np.array([0.0, 0.3, 1.0])
    noisy = corruption.label_noise(fed, share)
    before, after = np.asarray(fed.y), np.asarray(noisy.y)
    for client, p in enumerate(share):
        rows = own(fed, client)
        wrong = (before != after)[rows]
        assert within(int(wrong.sum()), len(rows), p)
        step = (after - before)[rows][wrong] % 4  # each other class equally often
        assert all(within(int((step == k).sum()), len(step), 1 / 3) for k in (1, 2, 3))
        assert np.array_equal(before[held(fed, client)], after[held(fed, client)])
    assert noisy.y.dtype == fed.y.dtype and after.min() == 0 and after.max() == 3
    assert np.array_equal(noisy.x, fed.x) and np.array_equal(noisy.y_test, fed.y_test)
    of = lambda clients, seed=0: np.asarray(
        corruption.label_noise(federate(data, partition.iid(clients)), 0.3, seed=seed).y
    )
    assert np.array_equal(of(9), of(2)) and not np.array_equal(of(9), of(9, seed=1))


# --- refusals


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(density=1.1), r"density in \[0, 1\]"),
        (dict(density=[0.1, 0.2]), "one for each of 3 clients"),
        (dict(density=0.1, low=1, high=0), "got high - low=-1"),
    ],
)
def test_salt_and_pepper_refuses(options, message):
    with pytest.raises(ValueError, match="corruption.salt_and_pepper: expected .*" + message):
        corruption.salt_and_pepper(federate(grey(12, (2, 2)), partition.iid(3)), **options)


def test_a_row_with_two_levels_is_refused():
    fed = federate(grey(12, (2, 2)), partition.iid(3))
    shared = dataclasses.replace(fed, index=fed.index.at[1].set(fed.index[0]))
    assert corruption.salt_and_pepper(shared, 0.1).x.shape == fed.x.shape
    with pytest.raises(ValueError, match="expected one density for each row, but got a row of two"):
        corruption.salt_and_pepper(shared, [0.1, 0.2, 0.1])
    tested = dataclasses.replace(fed, test_index=fed.index[:, :1], test_size=jnp.ones(3, jnp.int32))
    with pytest.raises(ValueError, match="or held out as well"):
        corruption.salt_and_pepper(tested, 0.1)


def test_what_cannot_be_read_is_refused():
    fed = federate(grey(12, (2, 2)), partition.iid(3))
    tokens = dataclasses.replace(fed, x=fed.x.astype(jnp.int32))
    for use, words in (
        (lambda p: corruption.salt_and_pepper(grey(), p), "a Federation"),
        (lambda p: corruption.salt_and_pepper(tokens, p), "features of float"),
        (lambda p: corruption.label_noise(dataclasses.replace(fed, classes=0), p), "two classes"),
        (lambda p: corruption.label_noise(fed, 20 * p), r"share in \[0, 1\]"),
    ):
        with pytest.raises(ValueError, match=words):
            use(0.1)
