"""Rows of bad quality, clients of given sizes, and public rows: exact counts, and draws that follow
rows alone.

False alarms: each statistical bound here holds with probability above 1 - 1e-9 under the law it
tests.
"""

import dataclasses
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jfl.core.records import Federation
from jfl.data import corruption, datasets, federate, partition, transforms

ALARM = 1e-9
quick = settings(derandomize=True, deadline=None, max_examples=40)
MNIST = np.repeat(
    np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
)  # its labels


def grey(rows=240, pixels=(20, 30), test=7, classes=4):
    """Rows whose every change is seen: no pixel is 0 or 1, and rows differ."""
    rng = np.random.default_rng(5)
    x = rng.uniform(0.2, 0.8, (rows + test, *pixels)).astype(np.float32)
    y = rng.integers(0, classes, rows + test)
    return datasets.arrays(x[:rows], y[:rows], x[rows:], y[rows:], classes=classes)._replace(
        caveats=("before",)
    )


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
        if 0 < p < 1:  # power: 1.2 times as many would be seen, and so would equal rows
            assert not within(int(1.2 * count), trials, p)
            for counts, many in (
                (flipped.sum((1, 2)), flipped[0].size),
                (flipped.sum(0).ravel(), len(flipped)),
            ):
                spread = ((counts - many * p) ** 2).sum() / (many * p * (1 - p))
                low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], len(counts))
                assert 0.8 * low < spread < 1.25 * high  # the counts are nearly normal, not exactly


def test_only_training_rows_change():
    fed = federate(grey(), partition.sizes([60, 100, 20]), holdout=0.25)
    noisy, x = corruption.salt_and_pepper(fed, 0.5, low=0, high=1), np.asarray(fed.x)
    changed = (np.asarray(noisy.x) != x).any((1, 2))
    trained = np.sort(np.concatenate([own(fed, c) for c in range(3)]))
    assert np.array_equal(np.flatnonzero(changed), trained)
    also = (np.asarray(corruption.salt_and_pepper(fed, 0.5, held_out=True).x) != x).any((1, 2))
    assert np.array_equal(
        np.flatnonzero(also), np.union1d(trained, np.concatenate([held(fed, c) for c in range(3)]))
    )
    assert also.sum() == 180 and changed.sum() == 135
    for field in dataclasses.fields(Federation):
        if field.name not in ("x", "identity"):
            np.testing.assert_array_equal(getattr(noisy, field.name), getattr(fed, field.name))
    assert noisy.caveats == ("before",)


def test_a_row_is_spoilt_alike_under_every_partition():
    data = grey()
    x = [
        np.asarray(corruption.salt_and_pepper(federate(data, split), 0.3, seed=4).x)
        for split in (partition.iid(4), partition.iid(7, seed=2), partition.dirichlet(5, 0.3))
    ]
    assert np.array_equal(x[0], x[1]) and np.array_equal(x[0], x[2])
    other = np.asarray(corruption.salt_and_pepper(federate(data, partition.iid(4)), 0.3, seed=5).x)
    assert ((other != x[0]).any((1, 2))).all()


def test_the_order_of_clients_and_the_size_of_a_block_change_nothing(monkeypatch):
    fed, density, turn = (
        federate(grey(), partition.power_law(4)),
        np.array([0.0, 0.1, 0.4, 0.9]),
        np.array([2, 0, 3, 1]),
    )
    noisy = corruption.salt_and_pepper(fed, density)
    turned = dataclasses.replace(fed, index=fed.index[turn], size=fed.size[turn])
    assert np.array_equal(corruption.salt_and_pepper(turned, density[turn]).x, noisy.x)
    for room in (1, 600, 7 * 600 + 5):
        monkeypatch.setattr(corruption, "MAX_DRAWS", room)
        assert np.array_equal(corruption.salt_and_pepper(fed, density).x, noisy.x)


@given(a=st.floats(0, 1), b=st.floats(0, 1))
@settings(quick, max_examples=20)
def test_more_density_spoils_more_of_the_same(a, b):
    fed = federate(grey(30, (9, 9)), partition.iid(3))
    less, more = (
        np.asarray(corruption.salt_and_pepper(fed, p, low=0, high=1).x) for p in sorted((a, b))
    )
    touched = less != np.asarray(fed.x)
    assert np.array_equal(less[touched], more[touched])


def test_levels_of_salt_and_pepper():
    fed = federate(grey(), partition.iid(2))
    x = np.asarray(corruption.salt_and_pepper(fed, 1.0).x)
    assert set(np.unique(x)) == {np.asarray(fed.x).min(), np.asarray(fed.x).max()}
    assert set(np.unique(corruption.salt_and_pepper(fed, 1.0, low=-3, high=0.5).x)) == {-3.0, 0.5}
    half = dataclasses.replace(fed, x=fed.x.astype(jnp.bfloat16))
    noisy = corruption.salt_and_pepper(half, 0.3)
    assert noisy.x.dtype == jnp.bfloat16 and jax.tree.structure(noisy) == jax.tree.structure(half)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(noisy))
    assert (
        float(
            jax.jit(lambda fed: (fed.x == 0.5).mean())(
                corruption.salt_and_pepper(fed, 1, low=0, high=0.5)
            )
        )
        > 0.4
    )
    np.testing.assert_array_equal(corruption.salt_and_pepper(fed, 0).x, fed.x)


# --- labels


def test_label_noise():
    data = datasets.arrays(
        np.zeros((8000, 1)), np.arange(8000) % 4, np.zeros((2, 1)), [0, 3], classes=4
    )
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
    assert (np.asarray(corruption.label_noise(fed, 1.0, held_out=True).y) != before).all()
    other = federate(data, partition.iid(9, seed=1))
    assert np.array_equal(
        corruption.label_noise(other, 0.3).y,
        corruption.label_noise(federate(data, partition.iid(2)), 0.3).y,
    )
    assert not np.array_equal(
        corruption.label_noise(other, 0.3).y, corruption.label_noise(other, 0.3, seed=1).y
    )


# --- refusals


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(density=1.1), r"density in \[0, 1\], .* but got density=1.1"),
        (dict(density=[0.1, 0.2]), "one for each of 3 clients, but got density="),
        (dict(density=0.1, low=1, high=0), "got high - low=-1"),
        (dict(density=0.1, low=0, high=float("inf")), "finite"),
        (dict(density=0.1, seed=-1), "got seed=-1"),
        (dict(density=0.1, held_out=2), "held_out to be one of"),
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
        corruption.salt_and_pepper(tested, 0.1, held_out=False)


def test_corrupt_refuses_what_it_cannot_read():
    fed = federate(grey(12, (2, 2)), partition.iid(3))
    with pytest.raises(ValueError, match="corrupt before jax.jit"):
        jax.jit(lambda fed: corruption.salt_and_pepper(fed, 0.1).x)(fed)
    with pytest.raises(ValueError, match="corrupt before jax.jit"):
        jax.jit(lambda p: corruption.salt_and_pepper(fed, p).x)(0.1)
    with pytest.raises(ValueError, match="a Federation"):
        corruption.salt_and_pepper(grey(), 0.1)
    with pytest.raises(ValueError, match="features of float, but got dtype int32"):
        corruption.salt_and_pepper(dataclasses.replace(fed, x=fed.x.astype(jnp.int32)), 0.1)
    with pytest.raises(
        ValueError, match="corruption.label_noise: expected at least two classes, but got classes=0"
    ):
        corruption.label_noise(dataclasses.replace(fed, classes=0), 0.1)
    with pytest.raises(ValueError, match=r"corruption.label_noise: expected share in \[0, 1\]"):
        corruption.label_noise(fed, [0.1, 2, 0.1])


# --- sizes


@pytest.mark.parametrize("classes", [None, 1, 4, 10])
def test_sizes_of_the_paper(classes):
    want = [50] * 20 + [120] * 20 + [271] * 20
    split = partition.sizes(want, classes_per_client=classes, seed=7)
    rows, note = split.assign(MNIST)
    assert [len(part) for part in rows] == want and note == "51180 of 60000 rows have no owner"
    assert len(np.unique(np.concatenate(rows))) == sum(want) == 8820
    for part in rows:
        counts = np.bincount(MNIST[part], minlength=10)
        held = counts[counts > 0]
        if classes is None:
            assert stats.chisquare(counts, len(part) * np.bincount(MNIST) / 60000).pvalue > ALARM
        else:
            assert len(held) == classes and held.max() - held.min() <= 1
    again = pickle.loads(pickle.dumps(split))(MNIST)
    assert all(np.array_equal(a, b) for a, b in zip(rows, again, strict=True))
    assert not np.array_equal(
        rows[0], partition.sizes(want, classes_per_client=classes, seed=8)(MNIST)[0]
    )
    facts = json.loads(json.dumps(split.describe(MNIST)))
    assert (facts["name"], facts["rows"], facts["classes_per_client"]) == ("sizes", want, classes)


@given(
    rows=st.lists(st.integers(3, 40), min_size=1, max_size=12),
    classes=st.sampled_from([None, 1, 2, 3]),
    seed=st.integers(0, 1000),
)
@quick
def test_sizes_are_exact_or_refused(rows, classes, seed):
    labels = np.random.default_rng(seed).integers(0, 3, 300)
    labels[:3] = range(3)
    split = partition.sizes(rows, classes_per_client=classes, seed=seed)
    if sum(rows) > 300:
        with pytest.raises(
            ValueError,
            match="partition.sizes: expected sum of rows <= 300 rows of the data, but got",
        ):
            split(labels)
        return
    try:
        got = split(labels)
    except ValueError as error:
        assert classes == 1 and "20 random attempts that failed" in str(error)
        return
    assert [len(part) for part in got] == rows and len(np.unique(np.concatenate(got))) == sum(rows)
    assert classes is None or {len(np.unique(labels[part])) for part in got} == {classes}


def test_sizes_use_all_rows_and_draw_classes():
    rows, note = partition.sizes(np.array([3, 7])).assign(np.linspace(0, 1, 10))
    assert note == "" and np.array_equal(np.sort(np.concatenate(rows)), np.arange(10))
    sets = {
        tuple(np.unique(MNIST[partition.sizes([20] * 3, classes_per_client=2, seed=s)(MNIST)[0]]))
        for s in range(12)
    }
    assert len(sets) >= 6


@pytest.mark.parametrize(
    "rows, options, labels, message",
    [
        ([], {}, None, "clients >= 1"),
        (5, {}, None, "rows, a list"),
        ([3, 0], {}, None, r"rows\[1\] >= 1, but got rows\[1\]=0"),
        ([5, 2], dict(classes_per_client=3), None, "A client needs a row of"),
        ([6, 5], {}, np.arange(10), "sum of rows <= 10 rows of the data, but got 11. Lower rows"),
        ([5], dict(classes_per_client=3), np.arange(10) % 2, "classes_per_client=3 for 2 classes"),
        ([6] * 3, dict(classes_per_client=1), np.arange(20) % 2, "that fill 3 clients of 6 to 6"),
        ([5], dict(classes_per_client=1), np.linspace(0, 1, 9), "one integer label"),
    ],
)
def test_sizes_refuse(rows, options, labels, message):
    with pytest.raises(ValueError, match="partition.sizes: expected .*" + message):
        partition.sizes(rows, **options)(labels)


# --- public rows


def numbered(kind=float):
    """Row i holds i, so that rows can be told."""
    n = np.arange(50)
    return datasets.arrays(
        n[:, None].astype(kind), n % 5, np.full((3, 1), 99).astype(kind), [0, 1, 2], name="own"
    )._replace(owners=n % 7, caveats=("before",))


@pytest.mark.parametrize("kind", [float, int])
def test_public_rows_leave_the_data(kind):
    data = numbered(kind)
    proxy, rest = transforms.public(data, 12)
    assert proxy._fields == ("x", "y") and proxy.x.shape == (12, 1)
    ids, left = proxy.x[:, 0].astype(int), rest.x[:, 0].astype(int)
    assert np.array_equal(np.sort(np.concatenate([ids, left])), np.arange(50))
    assert (np.diff(left) > 0).all() and not (np.diff(ids) > 0).all()
    assert (
        np.array_equal(proxy.y, ids % 5)
        and np.array_equal(rest.y, left % 5)
        and np.array_equal(rest.owners, left % 7)
    )
    assert rest.caveats == ("before", "Assumes that 12 rows of the training set are public.")
    assert rest.name == "own, public(12)" and rest.classes == 5 and rest.checksum != data.checksum
    assert np.array_equal(rest.x_test, data.x_test) and rest.x.dtype == data.x.dtype
    assert federate(rest, partition.natural()).caveats == rest.caveats
    assert np.array_equal(transforms.public(data, 12)[0].x, proxy.x)
    assert not np.array_equal(transforms.public(data, 12, seed=1)[0].x, proxy.x)
    proxy.x[:] = 7  # copies: the data do not follow
    assert np.array_equal(data.x[:, 0], np.arange(50))


def test_public_rows_are_drawn_at_random():
    data = numbered()._replace(owners=None)
    drawn = np.concatenate(
        [transforms.public(data, 10, seed=s)[0].x[:, 0] for s in range(100)]
    ).astype(int)
    assert all(within(count, 100, 0.2) for count in np.bincount(drawn, minlength=50))
    assert transforms.public(data, 10)[1].owners is None


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0,), "got rows=0"),
        ((50,), "rows <= 49, but got rows=50"),
        ((1.0,), "got rows=1.0"),
        ((5, -1), "got seed=-1"),
    ],
)
def test_public_refuses(arguments, message):
    with pytest.raises(ValueError, match="transforms.public: expected .*" + message):
        transforms.public(numbered(), *arguments)
    with pytest.raises(ValueError, match="a Dataset, but got dataset=3"):
        transforms.public(3, 1)
