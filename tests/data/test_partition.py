"""Partitions: no row goes to two clients, sizes and classes are those asked for, and the draws
follow their laws.

The false-alarm rate of each statistical test stands beside it.
"""

import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import jfl
from jfl.data import partition

quick = settings(derandomize=True, deadline=None, max_examples=40)
MNIST_COUNTS = 5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
MNIST = np.repeat(np.arange(10), MNIST_COUNTS)  # its labels
ADULT = np.repeat([0, 1], [24720, 7841])
TENS, HALVES = np.arange(10), np.arange(10) % 2


def skewed(rows, classes, seed=0):
    """Labels with classes of unequal size, each present."""
    rng = np.random.default_rng(seed)
    rest = rng.choice(classes, rows - classes, p=rng.dirichlet(np.ones(classes)))
    return rng.permutation(np.concatenate([np.arange(classes), rest]))


def same(a, b):
    return all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def classes_of(labels, rows):
    """How many classes each client has."""
    return {len(np.unique(labels[own])) for own in rows}


# --- all of them

MAKERS = {
    "iid": lambda c, seed: partition.iid(c, seed=seed),
    "dirichlet": lambda c, seed: partition.dirichlet(c, 0.3, min_rows=3, seed=seed),
    "balanced": lambda c, seed: partition.dirichlet(c, 1e-4, balanced=True, seed=seed),
    "power_law": lambda c, seed: partition.power_law(c, 1.3, min_rows=2, seed=seed),
    "natural": lambda c, seed: partition.natural(
        np.resize(np.random.default_rng(seed).permutation(c), 200), seed=seed
    ),
    "similarity": lambda c, seed: partition.similarity(c, 0.3, seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
@given(clients=st.integers(5, 20), classes=st.integers(2, 9), seed=st.integers(0, 2**31))
@settings(quick, max_examples=15)
def test_each_row_goes_to_one_client_by_the_seed(name, clients, classes, seed):
    labels = skewed(200, classes, seed)
    split = MAKERS[name](clients, seed)
    rows = split(labels)
    assert len(rows) == split.clients == clients
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(200))
    assert min(map(len, rows)) >= {"dirichlet": 3, "power_law": 2}.get(name, 1)
    assert same(rows, split(labels)) and same(rows, pickle.loads(pickle.dumps(split))(labels))
    assert not same(rows, MAKERS[name](clients, seed + 1)(labels)) or name == "natural"


def test_natural_keeps_owners():
    owners = np.array(["b", "a", "c", "a", "b", "b"])
    rows = partition.natural(owners)(np.zeros(6))
    assert [own.tolist() for own in rows] == [[1, 3], [0, 4, 5], [2]]


def test_flower_partitioners():
    flower = pytest.importorskip(
        "flwr_datasets.partitioner", reason="flwr-datasets is not installed"
    )
    data = jfl.datasets.digits()
    made = flower.DirichletPartitioner(num_partitions=5, partition_by="label", alpha=0.5)
    split = jfl.partition.flower(made)
    fed = jfl.federate(data, split)
    owned = np.concatenate([np.asarray(fed.index)[c][: fed.size[c]] for c in range(5)])
    assert len(set(owned.tolist())) == len(owned) == len(data.y)
    again = jfl.federate(data, jfl.partition.flower(made))
    assert np.array_equal(fed.size, again.size)


# --- dirichlet


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
    size = np.array([len(own) for own in got])
    assert np.array_equal(np.sort(np.concatenate(got)), np.arange(rows)) and size.min() >= least
    if balanced:
        assert size.max() - size.min() <= 1
        return
    free = partition.dirichlet(clients, alpha, min_rows=0)(labels)
    # exactly the missing rows are moved, and the note says how many
    missing = sum(max(least - len(own), 0) for own in free)
    assert note.startswith(f"{missing} of {rows} rows moved") if missing else note == ""
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
        given = partition.dirichlet(2, 1e-3, min_rows=450, seed=seed)(labels)[poor]
        moved = np.setdiff1d(given, free[poor])
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
    split = lambda seed: partition.dirichlet(20, 1.0, min_rows=0, seed=seed)(labels)
    sizes = np.array([[len(own) for own in split(seed)] for seed in range(20)])

    def fair(sizes):
        z = (sizes.mean(0) - sizes.mean()) / (sizes.std() / np.sqrt(len(sizes)))
        return np.abs(z).max() < stats.norm.isf(1e-6 / 40)

    assert fair(sizes)
    assert not fair(sizes + 20 * (np.arange(20) == 19))  # power: a twentieth of a row of each class


def test_balanced_mixtures_follow_alpha_and_the_prior():
    labels = np.repeat([0, 1, 2], [6000, 3000, 1000])
    off = lambda alpha: [
        np.abs(np.bincount(labels[rows], minlength=3) / 1000 - [0.6, 0.3, 0.1]).max()
        for rows in partition.dirichlet(10, alpha, balanced=True)(labels)
    ]
    assert max(off(1e5)) < 0.08 and np.mean(off(0.05)) > 0.3


def test_balanced_leftovers_fall_on_anybody():
    """Whoever comes last has fewer classes to choose from: it must not be the same client in every
    seed."""
    labels = np.arange(1000) % 10
    split = lambda seed: partition.dirichlet(10, 0.1, balanced=True, seed=seed)(labels)
    held = np.array([[len(np.unique(labels[own])) for own in split(seed)] for seed in range(60)])
    assert abs(held[:, 0].mean() - held[:, -1].mean()) < 0.8  # 1.4 apart if they came in order


# --- shards and power laws


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
    assert classes_of(labels, rows) == {k}
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(400))


def test_shards_are_even_and_mixed():
    labels = np.arange(1000) % 10
    deals = [partition.shards(20, 2, seed)(labels) for seed in range(60)]
    assert {len(own) for own in deals[0]} == {50}
    pairs = {tuple(np.unique(labels[own])) for deal in deals[:40] for own in deal}
    assert len(pairs) == 45  # every pair of classes occurs
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
    size = [len(p) for p in partition.power_law(30, 1.0)(np.zeros(3000))]
    assert size != sorted(size, reverse=True)
    facts = partition.power_law(10, 4.0, min_rows=5).describe(np.zeros(100))
    assert facts["note"].endswith("raised to min_rows = 5")


# --- a number of classes for each client


@given(
    clients=st.integers(1, 25),
    k=st.integers(1, 6),
    classes=st.integers(1, 10),
    exponent=st.sampled_from([0, 0.7, 2]),
    part=st.floats(0.05, 1),
    extra=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
@settings(quick, max_examples=30)
def test_labels_give_exact_classes_and_sizes(clients, k, classes, exponent, part, extra, seed):
    labels, rows = skewed(400, classes, seed), max(int(part * 400 / clients), 1)
    least = min(k + extra, rows)
    if least < k:
        return  # refused below
    split = partition.labels(clients, k, rows, exponent, least, seed)
    try:
        got, note = split.assign(labels)
    except ValueError as error:
        assert "partition.labels" in str(error)
        # never refused where every class is large: a third of it holds everybody's largest part
        assert k > classes or 3 * rows * clients > np.bincount(labels).min() or exponent
        return
    size = np.array([len(own) for own in got])
    assert classes_of(labels, got) == {k} and size.min() >= least
    assert len(np.unique(np.concatenate(got))) == size.sum() == rows * clients
    assert exponent or set(size) == {rows}
    free = 400 - rows * clients
    assert note == (f"{free} of 400 rows have no owner" if free else "")
    assert same(got, pickle.loads(pickle.dumps(split))(labels))


@pytest.mark.parametrize(
    "labels, options, sizes",
    [
        (ADULT, dict(classes_per_client=1, rows=325), (325, 325)),
        (MNIST, dict(classes_per_client=7), (600, 600)),
        (MNIST, dict(classes_per_client=7, exponent=1.5, min_rows=100), (100, 23500)),
    ],
)
def test_labels_of_the_papers(labels, options, sizes):
    rows = partition.labels(100, **options)(labels)
    assert classes_of(labels, rows) == {options["classes_per_client"]}
    size = np.array([len(own) for own in rows])
    assert abs(size.min() - sizes[0]) <= 1 and abs(size.max() - sizes[1]) <= 10
    whole = 32500 if labels is ADULT else 60000
    assert len(np.unique(np.concatenate(rows))) == size.sum() == whole
    if labels is ADULT:
        assert np.bincount([labels[own[0]] for own in rows]).tolist() == [76, 24]


def test_labels_are_drawn_at_random():
    """Every set of classes occurs, large classes more often, and no client is always the same."""
    labels = np.repeat(np.arange(5), [400, 100, 100, 100, 100])
    deals = [partition.labels(10, 2, rows=30, seed=seed)(labels) for seed in range(40)]
    sets = [[tuple(np.unique(labels[own])) for own in rows] for rows in deals]
    assert len({pair for deal in sets for pair in deal}) == 10
    assert len({deal[0] for deal in sets}) >= 5
    held = np.bincount([label for deal in sets for pair in deal for label in pair], minlength=5)
    assert held[0] > 1.4 * held[1:].max()
    size = [len(own) for own in partition.labels(30, 2, exponent=1.0)(np.arange(3000) % 5)]
    assert size != sorted(size, reverse=True)


@pytest.mark.parametrize("classes", [None, 4])
def test_sizes_of_a_paper(classes):
    """Without a number of classes, each client has those of the data: false alarm 1e-9 a client."""
    want = [50] * 20 + [120] * 20 + [271] * 20
    split = partition.sizes(want, classes_per_client=classes, seed=7)
    rows, note = split.assign(MNIST)
    assert [len(own) for own in rows] == want and note == "51180 of 60000 rows have no owner"
    assert len(np.unique(np.concatenate(rows))) == sum(want)
    for own in rows:
        counts = np.bincount(MNIST[own], minlength=10)
        held = counts[counts > 0]
        if classes is None:
            assert stats.chisquare(counts, len(own) * np.bincount(MNIST) / 60000).pvalue > 1e-9
        else:
            assert len(held) == classes and held.max() - held.min() <= 1
    other = partition.sizes(want, classes_per_client=classes, seed=8)(MNIST)
    assert same(rows, pickle.loads(pickle.dumps(split))(MNIST))
    assert not np.array_equal(rows[0], other[0])
    assert classes is None or classes_of(MNIST, [rows[0], other[0]]) == {4}
    facts = json.loads(json.dumps(split.describe(MNIST)))
    assert (facts["name"], facts["rows"], facts["classes_per_client"]) == ("sizes", want, classes)


# --- similarity


@given(
    clients=st.integers(1, 20),
    share=st.floats(0, 1),
    classes=st.integers(1, 6),
    part=st.floats(0.1, 1),
    whole=st.booleans(),
    seed=st.integers(0, 1000),
)
@quick
def test_similarity(clients, share, classes, part, whole, seed):
    labels, rows = skewed(300, classes, seed), max(int(part * 300 / clients), 1)
    total = 300 if whole else rows * clients
    split = partition.similarity(clients, share, None if whole else rows, seed)
    got, note = split.assign(labels)
    size = np.array([len(own) for own in got])
    assert size.sum() == total == len(np.unique(np.concatenate(got)))
    assert size.max() - size.min() <= (1 if whole else 0)
    mixed = np.round(share * size).astype(int)  # iid rows come first, the others are of one kind
    rest = [labels[own[k:]] for own, k in zip(got, mixed, strict=True)]
    strange = sum(int((own != client % classes).sum()) for client, own in enumerate(rest))
    words = f"{strange} of {total} rows are from another class, whose own was used up"
    assert note == (words if strange else "")


def test_similarity_of_the_papers():
    """gamma of Noble et al.: one class, a tenth iid, all iid; 60 clients use all of MNIST."""
    for share, most in ((0.0, 1.0), (0.1, 0.91), (1.0, 0.12)):
        rows = partition.similarity(60, share)(MNIST)
        top = [np.bincount(MNIST[own], minlength=10).max() / 1000 for own in rows]
        assert {len(own) for own in rows} == {1000}
        assert np.median(top) == pytest.approx(most, abs=0.04)
    # the clients of a class that runs dry lose equally: class 5 has 5,421 rows for 6,000 slots
    rows = partition.similarity(60, 0.0)(MNIST)
    own = [int((MNIST[part] == c % 10).sum()) for c, part in enumerate(rows)]
    assert sorted(own[5::10]) == [903, 903, 903, 904, 904, 904]


# --- refusals


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: partition.iid(3, seed=-1), "seed >= 0"),
        (lambda: partition.dirichlet(5, 0), "alpha > 0 and finite"),
        (lambda: partition.dirichlet(3, 1.0, min_rows=4)(TENS), "min_rows * clients <= rows"),
        (lambda: partition.dirichlet(1, 1.0)(np.zeros((10, 2), int)), "got labels int64[10, 2]"),
        (lambda: partition.dirichlet(3, 1.0)(TENS / 9), "one integer label per row"),
        (lambda: partition.labels(5, 2, min_rows=1), "A client needs a row of each"),
        (lambda: partition.labels(5, 3, rows=3)(TENS), "rows * clients <= rows"),
        (lambda: partition.labels(3, 1, rows=6)(np.arange(20) % 2), "that fill 3 clients of 6 to"),
        (lambda: partition.labels(3, 2)(np.array([0] * 17 + [1])), "20 random attempts"),
        (lambda: partition.similarity(5, 1.1), "share in [0, 1]"),
        (lambda: partition.similarity(5, 0.1, rows=3)(TENS), "rows * clients <= rows"),
        (lambda: partition.shards(3, 3)(HALVES), "2 to 6 shards"),
        (lambda: partition.sizes([3, 0]), "rows[1] >= 1"),
        (lambda: partition.sizes([5, 2], classes_per_client=3), "A client needs a row of"),
        (lambda: partition.natural()(np.zeros(4)), "the owners of the rows, but got none"),
        (lambda: partition.natural([0.5, 1.0]), "integers or strings"),
        (lambda: partition.natural([1, 2])(np.zeros(3)), "2 owners for 3 rows"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
