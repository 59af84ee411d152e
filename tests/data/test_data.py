"""Data: datasets are checked where they enter, partitions give no row twice, a federation only adds
an index.

Prepared datasets other than MNIST are not at hand everywhere, so small ones are written to disk in
the format of tensorflow_datasets and read through the public functions.
"""

import errno
import gzip
import io
import json
import os
import pickle
import re

import jax
import numpy as np
import pytest
from helpers.prepared_data import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from jfl.core.errors import DataUnavailable
from jfl.core.records import Federation
from jfl.data import (
    checksum,
    datasets,
    describe,
    federate,
    image_files,
    partition,
    transforms,
)
from jfl.data.image_files import KEYS
from jfl.runs.build import federation
from jfl.runs.config import Config

quick = settings(derandomize=True, deadline=None, max_examples=40)


def skewed(rows, classes, seed=0):
    """Labels with classes of unequal size, each present."""
    rng = np.random.default_rng(seed)
    rest = rng.choice(classes, rows - classes, p=rng.dirichlet(np.ones(classes)))
    return rng.permutation(np.concatenate([np.arange(classes), rest]))


MAKERS = {
    "iid": lambda c, seed: partition.iid(c, seed=seed),
    "dirichlet": lambda c, seed: partition.dirichlet(c, 0.3, min_rows=3, seed=seed),
    "dirichlet tiny": lambda c, seed: partition.dirichlet(c, 1e-4, min_rows=1, seed=seed),
    "balanced": lambda c, seed: partition.dirichlet(c, 0.3, balanced=True, seed=seed),
    "balanced tiny": lambda c, seed: partition.dirichlet(c, 1e-4, balanced=True, seed=seed),
    "shards": lambda c, seed: partition.shards(c, 2, seed=seed),
    "power_law": lambda c, seed: partition.power_law(c, 1.3, min_rows=2, seed=seed),
    "natural": lambda c, seed: partition.natural(
        np.resize(np.random.default_rng(seed).permutation(c), 200), seed=seed
    ),
    "similarity": lambda c, seed: partition.similarity(c, 0.3, seed=seed),
    "similarity sorted": lambda c, seed: partition.similarity(c, 0.3, by="sorted", seed=seed),
}
MNIST_COUNTS = 5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
MNIST_TEST_COUNTS = 980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
MNIST = np.repeat(np.arange(10), MNIST_COUNTS)  # its labels
BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)]
ADULT = np.repeat([0, 1], [24720, 7841])


def same(a, b):
    return all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


# partitions


def test_every_factory_is_tested():
    assert set(partition.__all__) == {
        name.split()[0].replace("balanced", "dirichlet") for name in MAKERS
    } | {"labels"}


@pytest.mark.parametrize("name", MAKERS)
@given(clients=st.integers(5, 20), classes=st.integers(2, 9), seed=st.integers(0, 2**31))
@settings(quick, max_examples=15)
def test_each_row_once_and_seeded(name, clients, classes, seed):
    labels = skewed(200, classes, seed)
    split = MAKERS[name](clients, seed)
    if name == "shards" and (
        np.minimum(np.bincount(labels), clients).sum() < 2 * clients or 2 * clients < classes
    ):
        with pytest.raises(ValueError, match="partition.shards"):
            split(labels)
        return
    rows = split(labels)
    assert len(rows) == split.clients == clients
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(200))
    assert min(map(len, rows)) >= {"dirichlet": 3, "power_law": 2}.get(name, 1)
    assert same(rows, split(labels)) and same(rows, pickle.loads(pickle.dumps(split))(labels))
    assert not same(rows, MAKERS[name](clients, seed + 1)(labels)) or name == "natural"


@given(
    clients=st.integers(1, 30),
    rows=st.integers(30, 300),
    alpha=st.floats(1e-8, 1e8),
    part=st.floats(0, 1),
    classes=st.integers(1, 20),
    balanced=st.booleans(),
)
@quick
def test_dirichlet_at_any_alpha(clients, rows, alpha, part, classes, balanced):
    least = int(part * (rows // clients))
    labels = skewed(rows, classes)
    split = partition.dirichlet(clients, alpha, min_rows=least, balanced=balanced)
    got, note = split.assign(labels)
    assert np.array_equal(np.sort(np.concatenate(got)), np.arange(rows))
    assert min(map(len, got)) >= least
    if balanced:
        assert max(map(len, got)) - min(map(len, got)) <= 1
    free = partition.dirichlet(clients, alpha, min_rows=0)(labels)
    missing = sum(max(least - len(part), 0) for part in free)
    if not balanced:  # exactly the missing rows are moved, and the note says how many
        assert note.startswith(f"{missing} of {rows} rows moved") if missing else note == ""
        assert split.describe(labels)["note"] == note
        kept = sum(len(np.intersect1d(a, b)) for a, b in zip(free, got, strict=True))
        assert kept == rows - missing


def test_moved_rows_are_drawn_from_all_classes():
    """A donor gives random rows: if it gave its last class first, moving would add heterogeneity of
    its own."""
    labels, looked = np.arange(1000) % 10, 0
    for seed in range(20):
        free = partition.dirichlet(2, 1e-3, min_rows=0, seed=seed)(labels)
        poor = int(len(free[1]) < len(free[0]))
        if len(free[poor]) > 310:
            continue
        moved = np.setdiff1d(
            partition.dirichlet(2, 1e-3, min_rows=450, seed=seed)(labels)[poor], free[poor]
        )
        donor = np.flatnonzero(np.bincount(labels[free[1 - poor]], minlength=10) == 100)
        assert len(donor) >= 6 and set(donor) <= set(labels[moved])
        looked += 1
    assert looked >= 3


def test_dirichlet_shares_have_the_right_law():
    """Share of a class at one client ~ Beta(alpha, alpha (C - 1)); false alarm 1e-6 for each client
    looked at."""
    clients, classes, members, alpha = 5, 2000, 200, 2.0
    labels = np.repeat(np.arange(classes), members)
    rows = partition.dirichlet(clients, alpha, seed=3)(labels)
    for client in (0, clients - 1):
        share = np.bincount(labels[rows[client]], minlength=classes) / members

        def p_value(a, share=share):
            return stats.kstest(share, stats.beta(a, a * (clients - 1)).cdf).pvalue

        assert p_value(alpha) > 1e-6
        assert p_value(2 * alpha) < 1e-6 and p_value(alpha / 2) < 1e-6  # power


def test_dirichlet_cuts_favour_nobody():
    """With few rows of many classes the last client must not collect what rounding leaves; false
    alarm 1e-6."""
    labels = np.repeat(np.arange(400), 3)
    sizes = np.array(
        [
            [len(part) for part in partition.dirichlet(20, 1.0, min_rows=0, seed=seed)(labels)]
            for seed in range(20)
        ]
    )

    def fair(sizes):
        z = (sizes.mean(0) - sizes.mean()) / (sizes.std() / np.sqrt(len(sizes)))
        return np.abs(z).max() < stats.norm.isf(1e-6 / 40)

    assert fair(sizes)
    assert not fair(sizes + 20 * (np.arange(20) == 19))  # power: a twentieth of a row of each class


@pytest.mark.parametrize("balanced", [False, True])
def test_small_alpha_is_heterogeneous(balanced):
    data = datasets.digits()
    spread = [
        describe(federate(data, partition.dirichlet(20, a, balanced=balanced)))["label_spread"]
        for a in (0.05, 0.5, 5.0, 500.0)
    ]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] > 0.6 and spread[-1] < 0.2


def test_balanced_mixture_follows_the_prior():
    """Large alpha: every client has the class shares of the whole, also where classes differ in
    size."""
    labels = np.repeat([0, 1, 2], [6000, 3000, 1000])
    for rows in partition.dirichlet(10, 1e5, balanced=True)(labels):
        assert np.abs(np.bincount(labels[rows]) / 1000 - [0.6, 0.3, 0.1]).max() < 0.08


def test_balanced_leftovers_fall_on_anybody():
    """Whoever comes last has fewer classes to choose from: it must not be the same client in every
    seed."""
    labels = np.arange(1000) % 10
    held = np.array(
        [
            [
                len(np.unique(labels[rows]))
                for rows in partition.dirichlet(10, 0.1, balanced=True, seed=seed)(labels)
            ]
            for seed in range(60)
        ]
    )
    assert abs(held[:, 0].mean() - held[:, -1].mean()) < 0.8  # 1.4 apart if they came in order


@given(
    clients=st.integers(1, 25),
    k=st.integers(1, 6),
    classes=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
@quick
def test_shards_give_exactly_k_classes(clients, k, classes, seed):
    labels = skewed(400, classes, seed)
    possible = k <= classes <= clients * k <= np.minimum(np.bincount(labels), clients).sum()
    split = partition.shards(clients, k, seed=seed)
    if not possible:
        with pytest.raises(ValueError, match="partition.shards"):
            split(labels)
        return
    rows = split(labels)
    assert {len(np.unique(labels[part])) for part in rows} == {k}
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(400))


def test_shards_are_even_and_mixed():
    labels = np.arange(1000) % 10
    assert {len(part) for part in partition.shards(20, 2)(labels)} == {50}
    pairs = {
        tuple(np.unique(labels[part]))
        for seed in range(40)
        for part in partition.shards(20, 2, seed)(labels)
    }
    assert len(pairs) == 45  # every pair of classes occurs
    deals = [partition.shards(20, 2, seed)(labels) for seed in range(60)]
    shared = sum(bool(np.intersect1d(labels[deal[0]], labels[deal[1]]).size) for deal in deals)
    assert 5 <= shared <= 40  # neighbours are not dealt alike; 21 expected


@given(clients=st.integers(1, 40), exponent=st.floats(0, 4), part=st.floats(0, 1))
@quick
def test_power_law_sizes(clients, exponent, part):
    rows, least = 5000, max(int(part * 5000 / clients), 1)
    split = partition.power_law(clients, exponent, min_rows=least)
    size = np.sort([len(p) for p in split(np.zeros(rows, int))])[::-1]
    assert size.sum() == rows and size.min() >= least
    above = np.flatnonzero(size > least + 1)
    law = np.arange(1.0, clients + 1) ** -exponent
    assert np.all(np.abs(size[above] - size[0] * law[above] / law[0]) <= 2)


def test_power_law_sizes_are_not_in_order_of_the_id():
    size = [len(p) for p in partition.power_law(30, 1.0)(np.zeros(3000, int))]
    assert size != sorted(size, reverse=True) and partition.power_law(10, 4.0, min_rows=5).describe(
        np.zeros(100, int)
    )["note"].endswith("raised to min_rows = 5")


def test_natural_keeps_owners():
    owners = np.array(["b", "a", "c", "a", "b", "b"])
    assert [rows.tolist() for rows in partition.natural(owners)(np.zeros(6))] == [
        [1, 3],
        [0, 4, 5],
        [2],
    ]


@given(
    clients=st.integers(1, 25),
    k=st.integers(1, 6),
    classes=st.integers(1, 10),
    exponent=st.sampled_from([0, 0.7, 2]),
    part=st.floats(0.05, 1),
    extra=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(quick, max_examples=120)
def test_labels_give_exact_classes_and_sizes(clients, k, classes, exponent, part, extra, seed):
    labels, rows = skewed(400, classes, seed), max(int(part * 400 / clients), 1)
    least = k + extra
    if least > rows:
        with pytest.raises(ValueError, match="partition.labels: expected an integer rows >= "):
            partition.labels(clients, k, rows, exponent, least)
        return
    split = partition.labels(clients, k, rows, exponent, least, seed)
    try:
        got, note = split.assign(labels)
    except ValueError as error:
        assert "partition.labels" in str(error)
        # never refused where every class is large: a third of it holds everybody's largest part
        assert k > classes or 3 * rows * clients > np.bincount(labels).min() or exponent
        return
    size = np.array([len(own) for own in got])
    assert (
        {len(np.unique(labels[own])) for own in got} == {k}
        and size.sum() == rows * clients
        and size.min() >= least
    )
    assert len(np.unique(np.concatenate(got))) == rows * clients
    if not exponent:
        assert set(size) == {rows}
    free = 400 - rows * clients
    assert note == (f"{free} of 400 rows have no owner" if free else "")
    assert same(got, pickle.loads(pickle.dumps(split))(labels))


@pytest.mark.parametrize(
    "labels, options, sizes",
    [
        (ADULT, dict(classes_per_client=1, rows=325), (325, 325)),
        (MNIST, dict(classes_per_client=4, rows=600), (600, 600)),
        (MNIST, dict(classes_per_client=7), (600, 600)),
        (MNIST, dict(classes_per_client=7, exponent=1.0, min_rows=100), (115, 11568)),
        (MNIST, dict(classes_per_client=7, exponent=1.5, min_rows=100), (100, 23500)),
    ],
)
def test_labels_of_the_papers(labels, options, sizes):
    for seed in range(3):
        rows = partition.labels(100, seed=seed, **options)(labels)
        assert {len(np.unique(labels[own])) for own in rows} == {options["classes_per_client"]}
        size = np.array([len(own) for own in rows])
        assert abs(size.min() - sizes[0]) <= 1 and abs(size.max() - sizes[1]) <= 10
        assert (
            len(np.unique(np.concatenate(rows)))
            == size.sum()
            == (32500 if len(labels) == 32561 else 60000)
        )
    if options["classes_per_client"] == 1:
        assert np.bincount([labels[own[0]] for own in rows]).tolist() == [76, 24]


def test_labels_are_drawn_at_random():
    """Every set of classes occurs, large classes more often, and no client is always the same."""
    labels = np.repeat(np.arange(5), [400, 100, 100, 100, 100])
    deals = [partition.labels(10, 2, rows=30, seed=seed)(labels) for seed in range(40)]
    sets = [[tuple(np.unique(labels[own])) for own in rows] for rows in deals]
    assert (
        len({pair for deal in sets for pair in deal}) == 10 and len({deal[0] for deal in sets}) >= 5
    )
    held = np.bincount([label for deal in sets for pair in deal for label in pair], minlength=5)
    assert held[0] > 1.4 * held[1:].max()
    size = [len(own) for own in partition.labels(30, 2, exponent=1.0)(np.arange(3000) % 5)]
    assert size != sorted(size, reverse=True)


@given(
    clients=st.integers(1, 20),
    share=st.floats(0, 1),
    classes=st.integers(1, 6),
    part=st.floats(0.1, 1),
    by=st.sampled_from(["class", "sorted"]),
    whole=st.booleans(),
    seed=st.integers(0, 1000),
)
@quick
def test_similarity(clients, share, classes, part, by, whole, seed):
    labels, rows = skewed(300, classes, seed), max(int(part * 300 / clients), 1)
    total = 300 if whole else rows * clients
    got, note = partition.similarity(clients, share, None if whole else rows, by, seed).assign(
        labels
    )
    size = np.array([len(own) for own in got])
    assert size.sum() == total == len(
        np.unique(np.concatenate(got))
    ) and size.max() - size.min() <= (1 if whole else 0)
    mixed = np.round(share * size).astype(int)  # iid rows come first, the others are of one kind
    rest = [labels[own[k:]] for own, k in zip(got, mixed, strict=True)]
    if by == "sorted":
        assert np.all(np.diff(np.concatenate(rest)) >= 0) and note == ""
    else:
        strange = sum(int((own != client % classes).sum()) for client, own in enumerate(rest))
        assert note == (
            f"{strange} of {total} rows are from another class, whose own was used up"
            if strange
            else ""
        )


def test_similarity_of_the_papers():
    """gamma of Noble et al.: one class, a tenth iid, all iid; 60 clients use all of MNIST."""
    for share, most in ((0.0, 1.0), (0.1, 0.91), (1.0, 0.12)):
        rows = partition.similarity(60, share)(MNIST)
        top = np.array([np.bincount(MNIST[own], minlength=10).max() for own in rows]) / 1000
        assert {len(own) for own in rows} == {1000} and np.median(top) == pytest.approx(
            most, abs=0.04
        )
    rows = partition.similarity(10, 0.0, rows=500)(MNIST)
    assert [np.unique(MNIST[own]).tolist() for own in rows] == [[c] for c in range(10)]
    # the clients of a class that runs dry lose equally: class 5 has 5,421 rows for 6,000 slots
    own = [
        int((MNIST[rows] == c % 10).sum())
        for c, rows in enumerate(partition.similarity(60, 0.0)(MNIST))
    ]
    assert sorted(own[5::10]) == [903, 903, 903, 904, 904, 904]


HALVES, TENS = np.arange(10) % 2, np.arange(10)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: partition.iid(0), "partition.iid: expected an integer clients >= 1"),
        (lambda: partition.iid(3, seed=-1), "seed >= 0, but got seed=-1"),
        (lambda: partition.dirichlet(5, 0), "expected alpha > 0 and finite, but got alpha=0"),
        (lambda: partition.dirichlet(3, 1.0, min_rows=4)(TENS), "min_rows * clients <= rows"),
        (lambda: partition.dirichlet(1, 1.0)(np.zeros((10, 2), int)), "got labels int64[10, 2]"),
        (lambda: partition.dirichlet(3, 1.0)(TENS / 9), "one integer label per row"),
        (lambda: partition.power_law(3, 1.0, min_rows=4)(TENS), "got 4 * 3 > 10"),
        (lambda: partition.power_law(5, min_rows=0), "got min_rows=0"),
        (lambda: partition.labels(5, 2, min_rows=1), "A client needs a row of each"),
        (lambda: partition.labels(5, 2, rows=1), "rows >= 2, but got rows=1"),
        (lambda: partition.labels(5, 2, exponent=-1), "exponent >= 0"),
        (lambda: partition.labels(5, 3, rows=3)(TENS), "rows * clients <= rows, but got 3 * 5"),
        (lambda: partition.labels(5, 3)(HALVES), "min_rows * clients <= rows, but got 3 * 5 > 10"),
        (lambda: partition.labels(2, 3)(HALVES), "got classes_per_client=3 for 2 classes"),
        (lambda: partition.labels(3, 1, rows=6)(np.arange(20) % 2), "that fill 3 clients of 6 to"),
        (
            lambda: partition.labels(3, 2)(np.array([0] * 17 + [1])),
            "20 random attempts that failed",
        ),
        (lambda: partition.similarity(5, 1.1), "share in [0, 1], but got share=1.1"),
        (lambda: partition.similarity(5, 0.1, by="label"), "to be one of 'class', 'sorted'"),
        (lambda: partition.similarity(5, 0.1, rows=3)(TENS), "rows * clients <= rows"),
        (lambda: partition.shards(3, 3)(HALVES), "2 to 6 shards"),
        (lambda: partition.shards(3, 2)(TENS), "but got 3 clients * 2 classes = 6"),
        (lambda: partition.shards(9, 2)(np.array([0] + [1] * 20)), "2 to 10 shards"),
        (lambda: partition.natural()(np.zeros(4)), "expected the owners of the rows, but got none"),
        (lambda: partition.natural([0.5, 1.0]), "integers or strings"),
        (lambda: partition.natural([1, 2])(np.zeros(3)), "2 owners for 3 rows"),
    ],
)
def test_partition_errors(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


# datasets


def test_digits():
    data = datasets.digits()
    assert (
        data.x.shape == (1438, 8, 8, 1)
        and data.x_test.shape == (359, 8, 8, 1)
        and data.classes == 10
    )
    assert (
        data.x.dtype == np.float32
        and data.y.dtype == np.int32
        and data.x.min() == 0
        and data.x.max() == 1
    )
    whole = np.bincount(data.y) + np.bincount(data.y_test)
    assert whole.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.abs(np.bincount(data.y_test) - whole / 5).max() <= 0.5  # stratified
    from sklearn.datasets import load_digits

    images = {image.tobytes() for image in (load_digits().images / 16).astype(np.float32)}
    rows = [image.tobytes() for image in np.concatenate([data.x, data.x_test])]
    assert set(rows) == images and len(rows) == 1797
    assert data.checksum == datasets.digits().checksum != datasets.digits(seed=1).checksum
    for bad in (0.0, 1e-9, float("nan"), -1):
        with pytest.raises(ValueError, match="datasets.digits"):
            datasets.digits(test_fraction=bad)


def good():
    rng = np.random.default_rng(0)
    return dict(
        x=rng.normal(size=(6, 3)),
        y=[0, 1, 2, 0, 1, 2],
        x_test=rng.normal(size=(2, 3)),
        y_test=[1, 2],
    )


def put(values, at, value):
    values = np.array(values)
    values[at] = value
    return values


def test_arrays():
    data = datasets.arrays(**good())
    assert (
        data.classes == 3
        and data.x.dtype == data.x_test.dtype == np.float32
        and data.name == "arrays"
    )
    assert (
        len(data.checksum) == 64
        and data.checksum != datasets.arrays(**good() | {"y_test": [1, 1]}).checksum
    )
    tokens = datasets.arrays(np.array([[5, 7]]), [0], np.array([[1, 2]]), [0])
    assert tokens.x.dtype == np.int32
    numbers = datasets.arrays(
        **good() | {"y": np.linspace(-1, 1, 6), "y_test": [0.5, 0.1]}, classes=0
    )
    assert numbers.classes == 0 and numbers.y.dtype == np.float32
    assert (
        datasets.arrays(
            **good() | {"y": np.array([0, 1] * 3, bool), "y_test": [True, False]}
        ).y.dtype
        == np.int32
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(x=put(good()["x"], (4, 1), np.nan)),
            "finite x (as float32), but got nan or inf in 1 row(s), the first is 4.",
        ),
        (
            dict(x_test=put(good()["x_test"], (1, 0), -np.inf)),
            "finite x_test (as float32), but got nan or inf in 1 row(s), the first is 1",
        ),
        (dict(x=np.zeros((0, 3))), "at least one row in x, but got shape [0, 3]"),
        (dict(x=3.0), "at least one row in x, but got shape []"),
        (dict(x=np.zeros((5, 3))), "y of shape [5], one label per row, but got shape [6]"),
        (dict(x_test=np.zeros((2, 4))), "x float32[6, 3], x_test float32[2, 4]"),
        (dict(x_test=np.zeros((2, 3), int)), "x_test int32[2, 3]"),
        (dict(x=np.zeros((6, 3), np.uint8)), "Images: x / 255"),
        (dict(x=np.full((6, 3), 2**40)), "that fit int32"),
        (dict(x=np.full((6, 3), "a")), "x, one array of numbers"),
        (dict(x=np.full((6, 3), None)), "x, one array of numbers"),
        (dict(y=np.zeros((6, 1), int)), "Use .ravel() for a column"),
        (dict(y=np.eye(6, dtype=int)), "y of shape [6], one label per row, but got shape [6, 6]"),
        (dict(y=[0, 1, 2, -1, 0, 1]), "labels in [0, 3), but got y[3] = -1"),
        (dict(y=[-1] * 6, y_test=[-2, -1]), "labels in [0, 1), but got y[0] = -1"),
        (dict(classes=2), "labels in [0, 2), but got y[2] = 2"),
        (dict(y_test=[1, 5], classes=4), "labels in [0, 4), but got y_test[1] = 5"),
        (dict(y=[0, 1, 2, 2**40, 0, 1]), "classes"),
        (dict(y=[0.0, 1, 2, 0, 1, 2]), "y of integers, but got dtype float64"),
        (dict(y=list("abcabc")), "y of integers, but got dtype <U1"),
        (
            dict(y=[0, 1, np.nan, 0, 1, 2.0], classes=0),
            "finite y (as float32), but got nan or inf in 1 row(s), the first is 2",
        ),
        (dict(classes=-1), "classes >= 0, but got classes=-1"),
    ],
)
def test_array_errors(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.arrays(**good() | change)
    if "classes" not in change:  # a tuple, and a Dataset nobody checked, pass the same test
        values = [(good() | change)[key] for key in ("x", "y", "x_test", "y_test")]
        with pytest.raises(ValueError, match="federate"):
            federate(tuple(values), partition.iid(1))
        with pytest.raises(ValueError, match=re.escape("federate('own')")):
            federate(datasets.Dataset(*values, None, "own", ""), partition.iid(1))


# datasets that tensorflow_datasets prepared


FAKES = {  # public call -> folder, image shape, classes declared, labels used, has an id
    "mnist": (datasets.mnist, "mnist/3.0.1", (28, 28, 1), 10, (0, 10), False),
    "fashion_mnist": (
        datasets.fashion_mnist,
        "fashion_mnist/3.0.1",
        (28, 28, 1),
        10,
        (0, 10),
        False,
    ),
    "emnist/balanced": (datasets.emnist, "emnist/balanced/3.1.0", (28, 28, 1), 47, (0, 47), False),
    "emnist/letters": (
        lambda: datasets.emnist("letters"),
        "emnist/letters/3.1.0",
        (28, 28, 1),
        37,
        (1, 27),
        False,
    ),
    "cifar10": (datasets.cifar10, "cifar10/3.0.2", (32, 32, 3), 10, (0, 10), True),
    "svhn_cropped": (datasets.svhn, "svhn_cropped/3.1.0", (32, 32, 3), 10, (0, 10), True),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def decodes(monkeypatch):
    """Counts how often files are decoded rather than read from the cache."""
    calls, read = [], image_files._records

    def counted(version, split):
        if split == "train":
            calls.append(version)
        return read(version, split)

    monkeypatch.setattr(image_files, "_records", counted)
    return calls


@pytest.mark.parametrize("name", FAKES)
def test_prepared_datasets(name, place, decodes):
    load, *facts = FAKES[name]
    truth = prepare(place / "data" / "tfds", *facts)
    for _ in range(2):  # from the files, then from the cache
        data = load()
        for x, y, split in ((data.x, data.y, "train"), (data.x_test, data.y_test, "test")):
            images, marks = truth[split]
            if name.startswith("emnist"):
                images = images.swapaxes(1, 2)
            np.testing.assert_array_equal(x, images.astype(np.float32) / 255)
            np.testing.assert_array_equal(y, marks - facts[3][0])
            assert x.dtype == np.float32 and y.dtype == np.int32 and x.flags.c_contiguous
        assert data.name == name and data.classes == (26 if name == "emnist/letters" else facts[2])
    assert len(decodes) == 1 and len(data.checksum) == 64
    fed = federate(data, partition.iid(4))
    assert fed.x.shape == (23, *facts[1]) and fed.classes == data.classes


def test_where_data_are_found(place, decodes):
    facts = FAKES["mnist"][1:]
    prepare(place / "none", *facts, seed=1)
    default = datasets.mnist().checksum
    prepare(place / "data", *facts, seed=2)
    assert datasets.mnist().checksum != default
    prepare(place / "data" / "tfds", *facts, seed=1)
    assert datasets.mnist().checksum == default  # the same rows, wherever they lie
    prepare(place / "own", *facts, seed=3)
    own = datasets.mnist(data_dir=place / "own").checksum
    assert own != default
    prepare(place / "own", "mnist/3.0.9", *facts[1:], seed=5)
    own = datasets.mnist(data_dir=place / "own").checksum
    prepare(place / "own", "mnist/3.0.10", *facts[1:], seed=4)
    newest = datasets.mnist(data_dir=str(place / "own")).checksum
    assert newest != own  # 3.0.10 is newer than 3.0.9
    (
        place / "own" / "mnist" / "3.0.10" / "dataset_info.json"
    ).unlink()  # preparation was interrupted
    assert datasets.mnist(data_dir=place / "own").checksum == own


def test_damaged_cache_is_decoded_again(place, decodes):
    prepare(place / "data", *FAKES["mnist"][1:])
    data = datasets.mnist()
    (file,) = (place / "cache").rglob("*.npz")
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    missing = io.BytesIO()
    np.savez(missing, x=data.x)
    bad = [
        b"",
        b"PK",
        whole[:-1],
        whole[:middle],
        flipped,
        missing.getvalue(),
        b"0" * len(whole),
    ]
    for count, content in enumerate(bad, start=2):
        file.write_bytes(content)
        again = datasets.mnist()
        assert len(decodes) == count and again.checksum == data.checksum
        np.testing.assert_array_equal(again.y, data.y)
    rng = np.random.default_rng(0)
    for _ in range(30):  # a flipped byte anywhere is noticed, or has no effect
        at = rng.integers(len(whole)) if rng.random() < 0.5 else len(whole) - 1 - rng.integers(600)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.integers(8))]) + whole[at + 1 :])
        again = datasets.mnist()
        assert again.checksum == data.checksum


def test_cache_is_written_in_one_piece(place, decodes, monkeypatch):
    prepare(place / "data", *FAKES["mnist"][1:])

    def interrupted(file, **values):
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", interrupted)
        with pytest.warns(RuntimeWarning, match="disk full.*JFL_CACHE_DIR"):
            datasets.mnist()
    assert [
        path for path in (place / "cache").rglob("*") if path.is_file()
    ] == []  # no half file, no leftovers

    def refused(source, target):
        raise OSError(errno.EIO, "no rename")

    with monkeypatch.context() as patch:  # the rename alone makes the file appear
        patch.setattr(os, "replace", refused)
        with pytest.warns(RuntimeWarning, match="no rename"):
            datasets.mnist()
    assert [path for path in (place / "cache").rglob("*") if path.is_file()] == []
    datasets.mnist()
    datasets.mnist()
    assert len(decodes) == 3
    (file,) = (path for path in (place / "cache").rglob("*") if path.is_file())
    assert file.suffix == ".npz"


def test_unwritable_cache_only_warns(place, monkeypatch):
    truth = prepare(place / "data", *FAKES["mnist"][1:])
    (place / "file").write_text("not a folder")
    monkeypatch.setenv("JFL_CACHE_DIR", str(place / "file"))
    with pytest.warns(RuntimeWarning, match="could not be stored"):
        assert np.array_equal(datasets.mnist().y, truth["train"][1])


def test_changed_files_are_decoded_again(place, decodes):
    import shutil

    facts = FAKES["mnist"][1:]
    prepare(place / "data", *facts, seed=1)
    first = datasets.mnist().checksum
    shutil.rmtree(place / "data")
    prepare(place / "data", *facts, seed=2)
    assert datasets.mnist().checksum != first and len(decodes) == 2


def test_data_that_are_not_there(place, monkeypatch):
    with pytest.raises(ValueError) as error:
        datasets.emnist("byclass")
    parts = (
        "datasets.emnist/byclass: expected files of emnist/byclass",
        'pip install -e ".[tfds]" tensorflow',
        "tfds build emnist/byclass",
        "download=True",
    )
    assert all(part in str(error.value) for part in parts)
    with pytest.raises(ValueError, match=re.escape("'balanced', 'byclass'")):
        datasets.emnist("digit")
    prepare(place / "data", *FAKES["mnist"][1:], file_format="tfrecord")
    with pytest.raises(ValueError, match="readable files of mnist"):
        datasets.mnist()


def test_damaged_source_and_missing_packages(place, monkeypatch):
    prepare(place / "data", *FAKES["cifar10"][1:])
    file = place / "data" / "cifar10" / "3.0.2" / "cifar10-train.array_record-00000-of-00001"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="datasets.cifar10: expected readable files of cifar10"):
        datasets.cifar10()
    file.write_bytes(whole)
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
        with pytest.raises(ValueError, match=re.escape('pip install -e ".[cli,tfds]"')):
            datasets.cifar10()
    datasets.cifar10()
    with monkeypatch.context() as patch:  # a cache needs none of these packages
        patch.setitem(__import__("sys").modules, "tensorflow_datasets", None)
        datasets.cifar10()


# IDX files


IDX_ROWS = {"train": 23, "t10k": 7}


def idx_bytes(values):
    """The IDX format, written by hand: two zeros, 8 for bytes, the number of axes, their
    lengths."""
    header = bytes([0, 0, 8, values.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def write_idx(folder, seed=0, compressed=True, side=28):
    """The four files of Fashion-MNIST with few rows; gives the images and labels of each half."""
    folder.mkdir(parents=True)
    rng, truth = np.random.default_rng(seed), {}
    for half, rows in IDX_ROWS.items():
        images = rng.integers(0, 256, (rows, side, side), np.uint8)
        labels = rng.permutation(np.resize(np.arange(10, dtype=np.uint8), rows))
        truth[half] = images, labels
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            content, name = idx_bytes(values), f"{half}-{kind}-ubyte"
            if compressed:
                content, name = gzip.compress(content, 1), name + ".gz"
            (folder / name).write_bytes(content)
    return truth


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("where", ["data/fashion-mnist", "data/tfds/fashion-mnist", "debian"])
def test_fashion_mnist_of_idx_files(where, compressed, place, monkeypatch):
    monkeypatch.setattr(image_files, "DEBIAN", place / "debian")
    folder = place / where / "fashion-mnist" if where == "debian" else place / where
    truth = write_idx(folder, compressed=compressed)
    data = datasets.fashion_mnist()
    for x, y, half in ((data.x, data.y, "train"), (data.x_test, data.y_test, "t10k")):
        images, labels = truth[half]
        np.testing.assert_array_equal(x, images[..., None].astype(np.float32) / 255)
        np.testing.assert_array_equal(y, labels)
        assert x.dtype == np.float32 and y.dtype == np.int32 and x.flags.c_contiguous
    assert data.name == "fashion_mnist" and data.classes == 10 and len(data.checksum) == 64
    assert federate(data, partition.iid(4)).x.shape == (23, 28, 28, 1)


def test_which_fashion_mnist_is_read(place, monkeypatch):
    monkeypatch.setattr(image_files, "DEBIAN", place / "debian")
    labels = lambda truth, half="train": truth[half][1].tolist()
    first = write_idx(place / "debian" / "fashion-mnist", seed=1)
    assert datasets.fashion_mnist().y.tolist() == labels(first)
    with pytest.raises(DataUnavailable):  # a folder that is named is the only one
        datasets.fashion_mnist(data_dir=place / "own")
    second = write_idx(place / "data" / "fashion-mnist", seed=2)
    assert datasets.fashion_mnist().y.tolist() == labels(second) != labels(first)
    checksum = datasets.fashion_mnist().checksum
    third = write_idx(place / "own" / "fashion-mnist", seed=3, compressed=False)
    assert datasets.fashion_mnist(data_dir=str(place / "own")).y.tolist() == labels(third)
    write_idx(place / "again" / "fashion-mnist", seed=2, compressed=False)
    assert datasets.fashion_mnist(place / "again").checksum == checksum  # the same rows
    fourth = prepare(place / "data" / "tfds", *FAKES["fashion_mnist"][1:], seed=4)
    assert datasets.fashion_mnist().y.tolist() == labels(fourth)


def test_fashion_mnist_that_is_not_there(place, monkeypatch):
    monkeypatch.setattr(image_files, "DEBIAN", place / "debian")
    with pytest.raises(DataUnavailable) as error:
        datasets.fashion_mnist()
    parts = str(place / "data" / "tfds"), str(place / "debian"), "apt-get install", "JFL_DATA_DIR="
    assert all(part in str(error.value) for part in parts)
    with pytest.raises(DataUnavailable, match="apt-get") as error:
        datasets.fashion_mnist(data_dir=place / "own")
    assert str(place / "debian") not in str(error.value)


TRAIN = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (TRAIN, lambda c: b"", "not an IDX file of bytes with 3 axes"),
        (TRAIN, lambda c: b"\0\0\x0d" + c[3:], "not an IDX file of bytes with 3 axes"),
        (TRAIN, lambda c: c[:9], "buffer is smaller"),
        (TRAIN, lambda c: c[:-1], "cannot reshape array of size 18031"),
        (TRAIN, lambda c: c + b"\0", "cannot reshape array of size 18033"),
        (TRAIN, lambda c: gzip.compress(c)[:-9], "EOFError"),
        (TRAIN, lambda c: gzip.compress(c)[:-8] + bytes(8), "BadGzipFile: CRC check failed"),
        ("t10k-labels-idx1-ubyte", lambda c: None, "FileNotFoundError.*t10k-labels-idx1-ubyte"),
    ],
)
def test_damaged_idx_files(name, change, message, place):
    write_idx(place / "data" / "fashion-mnist", compressed=False)
    path = place / "data" / "fashion-mnist" / name
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(
        DataUnavailable, match="datasets.fashion_mnist: expected readable .*" + message
    ):
        datasets.fashion_mnist()


@pytest.mark.skipif(
    not (image_files.DEBIAN / "fashion-mnist").is_dir(),
    reason="real Fashion-MNIST NOT tested: apt-get install dataset-fashion-mnist",
)
def test_real_fashion_mnist(place):
    """The published counts and moments; the first label of each half is a boot."""
    data = datasets.fashion_mnist()
    assert data.x.shape == (60000, 28, 28, 1) and data.x_test.shape == (10000, 28, 28, 1)
    assert np.bincount(data.y).tolist() == [6000] * 10
    assert np.bincount(data.y_test).tolist() == [1000] * 10
    assert data.y[:5].tolist() == [9, 0, 0, 3, 0] and data.y_test[0] == 9
    assert abs(data.x.mean() - 0.2860) < 1e-4 and abs(data.x.std() - 0.3530) < 1e-4


REAL = os.environ.get("JFL_DATA_DIR")


@pytest.mark.slow
@pytest.mark.skipif(
    not REAL, reason="real MNIST NOT tested: set JFL_DATA_DIR to a folder with tfds/mnist"
)
def test_real_mnist():
    """Counts of LeCun's files; reads through the user's own cache (the first time takes some
    seconds)."""
    data = datasets.mnist()
    assert data.x.shape == (60000, 28, 28, 1) and data.x_test.shape == (10000, 28, 28, 1)
    assert tuple(np.bincount(data.y)) == MNIST_COUNTS
    assert tuple(np.bincount(data.y_test)) == MNIST_TEST_COUNTS
    # the published moments
    assert abs(data.x.mean() - 0.1307) < 1e-4 and abs(data.x.std() - 0.3081) < 1e-4


# federation


def filled(index, size):
    return [row[:k] for row, k in zip(np.asarray(index), np.asarray(size), strict=True)]


@given(
    clients=st.integers(1, 12),
    alpha=st.floats(0.05, 10),
    holdout=st.sampled_from([0.0, 1e-6, 0.2, 0.5, 0.99]),
    seed=st.integers(0, 100),
)
@quick
def test_federate_keeps_every_row_of_every_client(clients, alpha, holdout, seed):
    labels = skewed(120, 4, seed)
    x = np.arange(120, dtype=np.float32)[:, None]
    split = partition.dirichlet(clients, alpha, min_rows=2, seed=seed)
    fed = federate((x, labels, x[:3], labels[:3]), split, holdout=holdout)
    assert isinstance(fed, Federation) and all(
        isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(fed)
    )
    assert {str(a.dtype) for a in (fed.index, fed.size, fed.test_index, fed.test_size, fed.y)} == {
        "int32"
    }
    assert fed.index.shape == (clients, fed.size.max()) and fed.test_index.shape == (
        clients,
        fed.test_size.max(),
    )
    train, test = filled(fed.index, fed.size), filled(fed.test_index, fed.test_size)
    for own, a, b in zip(split(labels), train, test, strict=True):
        assert np.array_equal(
            np.sort(np.concatenate([a, b])), np.sort(own)
        )  # hence disjoint as well
        assert len(a) >= 1 and len(b) == (
            min(max(round(holdout * len(own)), 1), len(own) - 1) if holdout else 0
        )
    for index, size in ((fed.index, fed.size), (fed.test_index, fed.test_size)):
        assert not np.any(np.asarray(index)[np.arange(index.shape[1]) >= np.asarray(size)[:, None]])
    np.testing.assert_array_equal(fed.x[fed.index[0, 0]], x[train[0][0]])
    again = federate((x, labels, x[:3], labels[:3]), split, holdout=holdout)
    assert checksum(again) == checksum(fed)


def test_rows_of_a_client_are_in_random_order():
    labels = np.repeat(np.arange(10), 100)
    x = np.zeros((1000, 1))
    natural = partition.natural(np.zeros(1000, int))
    fed = federate((x, labels, x, labels), natural, holdout=0.2)
    for rows in (*filled(fed.index, fed.size), *filled(fed.test_index, fed.test_size)):
        # The first half of the slots holds all classes; sorted rows would show five.
        assert len(np.unique(labels[rows[: len(rows) // 2]])) == 10
    other = federate(
        (x, labels, x, labels), partition.natural(np.zeros(1000, int), seed=1), holdout=0.2
    )
    assert checksum(other) != checksum(fed)


def test_first_words_of_the_manual():
    fed = federate(datasets.digits(), partition.dirichlet(clients=50, alpha=0.3, min_rows=16))
    assert (
        fed.index.shape[0] == 50
        and fed.size.min() >= 16
        and fed.size.sum() == 1438
        and fed.classes == 10
    )
    assert fed.test_index.shape == (50, 0) and not fed.test_size.any()


def test_federate_copies():
    values = good()
    memory = np.zeros(256, np.uint8)  # aligned to 64 bytes, where JAX on a CPU would share it
    start = -memory.ctypes.data % 64
    x = memory[start : start + 72].view(np.float32).reshape(6, 3)
    fed = federate((x, values["y"], values["x_test"], values["y_test"]), partition.iid(2))
    before = checksum(fed)
    x[:] = 7
    assert checksum(fed) == before and not np.any(np.asarray(fed.x) == 7)


def test_central_test_rows_can_be_replaced():
    data = datasets.arrays(**good())
    other = np.ones((4, 3)), [0, 0, 1, 2]
    for fed in (
        federate(data, partition.iid(2), test=other),
        federate((data.x, data.y), partition.iid(2), test=other),
    ):
        assert (
            fed.x_test.shape == (4, 3) and fed.y_test.tolist() == [0, 0, 1, 2] and fed.classes == 3
        )


def test_owners_and_caveats_of_the_dataset():
    data = datasets.arrays(**good())
    assert (
        data.owners is None
        and data.caveats == ()
        and federate(data, partition.iid(2)).caveats == ()
    )
    data = data._replace(owners=np.array([7, 3, 7, 3, 3, 9]), caveats=("scaled by private rows",))
    fed = federate(data, partition.natural(seed=2))
    assert [sorted(rows.tolist()) for rows in filled(fed.index, fed.size)] == [
        [1, 3, 4],
        [0, 2],
        [5],
    ]
    assert (
        fed.caveats == ("scaled by private rows",) == jax.tree.map(lambda leaf: leaf, fed).caveats
    )
    facts = describe(fed, partition.natural(seed=2))
    assert json.loads(json.dumps(facts)) == facts and facts["caveats"] == ["scaled by private rows"]
    assert facts["partition"] == {"name": "natural", "seed": 2, "note": "owners from the dataset"}
    assert checksum(fed) == checksum(federate(data, partition.natural(data.owners, seed=2)))
    assert checksum(fed) != checksum(federate(data, partition.natural(seed=3)))


def test_fields_of_a_config_reach_the_data():
    fed = federation(
        Config(
            dataset="synthetic",
            partition="natural",
            clients=4,
            rows_per_client=50,
            synthetic_beta=2.0,
            preprocess="standardise,unit_norm",
            partition_seed=3,
        )
    )
    made = transforms.unit_norm(
        transforms.standardise(datasets.synthetic(0.0, 2.0, clients=4, rows=50, seed=3))
    )
    assert (
        checksum(fed) == checksum(federate(made, partition.natural(seed=3)))
        and len(fed.caveats) == 1
    )
    fed = federation(
        Config(
            partition="labels",
            clients=20,
            classes_per_client=3,
            rows_per_client=40,
            preprocess="pca:7",
        )
    )
    assert set(fed.size.tolist()) == {40} and fed.x.shape == (1438, 7)
    fed = federation(
        Config(partition="labels", clients=20, classes_per_client=3, exponent=1.0, min_rows=30)
    )
    assert fed.size.min() == 30 and fed.size.max() > 200
    fed = federation(Config(partition="similarity", clients=10, share=0.5))
    assert checksum(fed) == checksum(federate(datasets.digits(), partition.similarity(10, 0.5)))
    fed = federation(Config(partition="power_law", clients=10))
    assert checksum(fed) == checksum(
        federate(datasets.digits(), partition.power_law(10, 1.0, min_rows=16))
    )
    for bad in ("pca", "unit_norm:3", "whiten", "pca:x"):
        with pytest.raises(ValueError, match="config: expected"):
            federation(Config(preprocess=bad))
    with pytest.raises(ValueError, match="names the owners"):
        federation(Config(partition="natural"))


def test_regression():
    data = datasets.arrays(**good() | {"y": np.linspace(-1, 1, 6), "y_test": [0.5, 0.1]}, classes=0)
    fed = federate(data, partition.power_law(2))
    assert fed.classes == 0 and fed.y.dtype == np.float32 and describe(fed)["label_spread"] is None


def test_checksum_sees_every_array():
    fed = federate(datasets.arrays(**good()), partition.iid(2), holdout=0.3)
    sums = {checksum(fed)}
    for leaf in range(8):
        leaves, structure = jax.tree.flatten(fed)
        leaves[leaf] = leaves[leaf].at[(0,) * leaves[leaf].ndim].add(1)
        sums.add(checksum(jax.tree.unflatten(structure, leaves)))
    sums.add(checksum(Federation(*jax.tree.leaves(fed)[:8], classes=9)))
    assert len(sums) == 10 and all(re.fullmatch("[0-9a-f]{16}", text) for text in sums)


def test_describe():
    data = datasets.digits()
    split = partition.dirichlet(50, 0.1, min_rows=16)
    facts = describe(federate(data, split, holdout=0.2), split)
    assert json.loads(json.dumps(facts)) == facts  # plain values
    assert (
        facts["clients"] == 50
        and facts["rows"] + facts["held_out"] == 1438
        and facts["test_rows"] == 359
    )
    assert (
        facts["slots"] == 50 * facts["max_size"]
        and facts["min_size"] <= facts["median_size"] <= facts["max_size"]
    )
    assert re.fullmatch(
        r"\d+ of 1438 rows moved so that every client has 16", facts["partition"]["note"]
    )
    assert facts["partition"]["alpha"] == 0.1
    one_class = datasets.arrays(np.zeros((40, 1)), np.arange(40) % 4, np.zeros((1, 1)), [0])
    assert describe(federate(one_class, partition.shards(4, 1)))["label_spread"] == 0.75
    assert describe(federate(one_class, partition.natural(np.arange(40) // 4)))["label_spread"] == 0
    assert "partition" not in describe(
        federate(one_class, lambda y: [np.arange(3)]), lambda y: None
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(partition=partition.dirichlet(6, 1e-4, min_rows=0)),
            "federate: expected at least 1 row(s) of each client, but got fewer for client(s)",
        ),
        (
            dict(partition=lambda y: [np.array([0, 1]), np.array([], int)]),
            "fewer for client(s) 1. A holdout",
        ),
        (dict(partition=lambda y: [np.arange(6)] + [np.array([], int)] * 12), "and 2 more"),
        (dict(partition=lambda y: []), "got no clients"),
        (dict(partition=lambda y: [np.array([0, 6])]), "row numbers in [0, 6)"),
        (dict(partition=lambda y: [np.array([-1, 0])]), "row numbers in [0, 6)"),
        (dict(partition=lambda y: [np.array([0.0, 1.0])]), "float64[2] for client 0"),
        (
            dict(partition=lambda y: [np.array([0, 1]), np.array([1, 2])]),
            "expected one owner per row, but got row 1 given 2 times",
        ),
        (dict(holdout=1.0), "holdout in [0, 1), but got holdout=1.0"),
        (dict(holdout=float("nan")), "got holdout=nan"),
        (
            dict(holdout=0.2, partition=partition.iid(5)),
            "at least 2 row(s) of each client, but got fewer for client(s) 1, 2, 3",
        ),
        (dict(test=np.zeros((2, 3))), "x float32[6, 3], x_test float32[3]"),
        (dict(test=(np.zeros((2, 4)), [0, 1])), "x_test float32[2, 4]"),
        (dict(dataset=np.zeros((6, 3))), "a Dataset, (x, y, x_test, y_test)"),
        (dict(dataset=(np.zeros((6, 3)), np.zeros(6, int))), "got 2 arrays"),
        (
            dict(
                dataset=(np.zeros((6, 3)), np.zeros(6, int), np.arange(6)),
                test=(np.zeros((2, 3)), np.zeros(2, int)),
            ),
            "got 3 arrays",
        ),
        (
            dict(partition=partition.natural()),
            "names the owners of its rows for partition.natural(), but got 'arrays'",
        ),
        (
            dict(
                dataset=datasets.arrays(**good())._replace(owners=np.arange(5)),
                partition=partition.natural(),
            ),
            "5 owners for 6 rows",
        ),
    ],
)
def test_federate_errors(options, message):
    given_ = dict(dataset=datasets.arrays(**good()), partition=partition.iid(2)) | options
    with pytest.raises(ValueError, match=re.escape(message)):
        federate(given_.pop("dataset"), given_.pop("partition"), **given_)


# --- plain files


def write_npz(folder, name, shape=(28, 28), classes=10, keys=("x", "y", "x_test", "y_test")):
    """A .npz of few images -> what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, arrays = np.random.default_rng(1), []
    for rows in (23, 7):
        arrays += [rng.integers(0, 256, (rows, *shape), np.uint8), np.arange(rows) % classes]
    np.savez(folder / f"{name}.npz", **dict(zip(keys, arrays, strict=True)))
    return arrays


@pytest.mark.parametrize(
    "read, name, shape",
    [
        (datasets.mnist, "mnist", (28, 28)),
        (datasets.fashion_mnist, "fashion_mnist", (28, 28, 1)),
        (datasets.cifar10, "cifar10", (32, 32, 3)),
        (datasets.svhn, "svhn_cropped", (32, 32, 3)),
    ],
)
def test_images_of_npz_files(read, name, shape, place):
    keys = ("x_train", "y_train", "x_test", "y_test") if name == "mnist" else tuple(KEYS)
    x, y, x_test, y_test = write_npz(place / "data", name, shape, keys=keys)
    data = read()
    for images, stored in ((data.x, x), (data.x_test, x_test)):
        np.testing.assert_array_equal(
            images.reshape(stored.shape), stored.astype(np.float32) / np.float32(255)
        )
        assert images.ndim == 4
    assert data.y.tolist() == y.tolist() and data.y_test.tolist() == y_test.tolist()
    assert data.classes == 10 and len(data.checksum) == 64
    assert read(data_dir=place / "data").checksum == data.checksum


def test_cifar10_of_its_binaries(place):
    folder = place / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), {}
    for name in (*BATCHES, "test_batch.bin"):
        images, labels = rng.integers(0, 256, (3, 32, 32, 3), np.uint8), rng.integers(0, 10, 3)
        rows[name] = images, labels
        planes = images.transpose(0, 3, 1, 2).reshape(3, -1)  # red, green, blue, row by row
        (folder / name).write_bytes(
            b"".join(bytes([n]) + p.tobytes() for n, p in zip(labels, planes))
        )
    data = datasets.cifar10()
    want = np.concatenate([rows[n][0] for n in BATCHES])
    np.testing.assert_array_equal(data.x, want.astype(np.float32) / np.float32(255))
    assert data.y.tolist() == np.concatenate([rows[n][1] for n in BATCHES]).tolist()
    assert data.y_test.tolist() == rows["test_batch.bin"][1].tolist()
    (folder / "data_batch_2.bin").write_bytes(b"123")
    with pytest.raises(DataUnavailable, match="readable files of cifar10.*3073"):
        datasets.cifar10()
    (folder / "data_batch_2.bin").unlink()
    with pytest.raises(DataUnavailable, match="data_batch_2"):
        datasets.cifar10()


@pytest.mark.parametrize("compressed", [True, False])
def test_mnist_and_emnist_of_idx_files(compressed, place):
    truth = write_idx(place / "data" / "mnist", compressed=compressed)
    assert datasets.mnist().y.tolist() == truth["train"][1].tolist()
    truth = write_idx(place / "written", compressed=compressed)
    folder = place / "data" / "emnist"
    folder.mkdir()
    for path in (place / "written").iterdir():
        half, rest = path.name.split("-", 1)
        path.rename(folder / f"emnist-balanced-{dict(t10k='test').get(half, half)}-{rest}")
    data = datasets.emnist()
    images, labels = truth["train"]
    assert data.classes == 47 and data.y.tolist() == labels.tolist()
    # published images are transposed, and stand upright here
    np.testing.assert_array_equal(
        data.x[..., 0], images.swapaxes(1, 2).astype(np.float32) / np.float32(255)
    )
    assert len(datasets.emnist(data_dir=place / "data").x_test) == 7


@pytest.mark.parametrize(
    "arrays, message",
    [
        (dict(x=np.zeros((2, 4, 4))), "float64"),
        (dict(y=np.array([0, 10])), r"labels in \[0, 10\)"),
        (dict(y=np.array([0])), "one label per row"),
        (dict(x=np.zeros((2, 4), np.uint8)), "uint8\\[2, 4\\]"),
        (dict(x_test=None), "x_test"),
    ],
)
def test_npz_files_of_another_form_are_refused(arrays, message, place):
    (place / "data").mkdir(exist_ok=True)
    image, label = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    values = dict(x=image, y=label, x_test=image, y_test=label) | arrays
    np.savez(place / "data" / "cifar10.npz", **{k: v for k, v in values.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        datasets.cifar10()


def test_a_damaged_npz_file_is_named(place):
    (place / "data").mkdir(exist_ok=True)
    (place / "data" / "mnist.npz").write_bytes(b"PK not a zip")
    with pytest.raises(DataUnavailable, match="readable files of mnist in .*data"):
        datasets.mnist()


def test_features_as_the_published_code_of_noble_2022_has_them():
    """Against its loops: row number j where the paper speaks of feature j, changed as it goes."""
    data = datasets.synthetic(1.0, 1.0, clients=3, rows=50, features=4, seed=2)
    new = transforms.noble2022_code(data)
    for client in range(3):
        train = data.x[data.owners == client].astype(float).tolist()
        test = data.x_test[10 * client : 10 * client + 10].astype(float).tolist()
        for dim in range(4):
            high, low = max(train[dim]), min(train[dim])
            for row in (*train, *test):
                row[dim] = (row[dim] - low) / (high - low)
        np.testing.assert_allclose(new.x[data.owners == client], train, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            new.x_test[10 * client : 10 * client + 10], test, rtol=1e-5, atol=1e-6
        )
    assert (new.y == data.y).all() and (new.owners == data.owners).all()
    assert len(new.caveats) == len(data.caveats) + 1 and "private rows" in new.caveats[-1]


@pytest.mark.parametrize(
    "rows, change", [(60, dict(owners=None)), (20, {}), (60, dict(x_test=None))]
)
def test_rows_that_the_published_code_cannot_read_are_refused(rows, change):
    data = datasets.synthetic(0.0, 0.0, clients=2, rows=rows, seed=0)
    if "x_test" in change:
        change = dict(x_test=data.x_test[1:], y_test=data.y_test[1:])
    with pytest.raises(ValueError, match="transforms.noble2022_code: expected rows"):
        transforms.noble2022_code(data._replace(**change))
