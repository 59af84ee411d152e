"""Rows that enter: they are checked once, whoever brings them, and a federation only adds an index.

Rows come as arrays, by client, in data frames, and from other libraries.
"""

import json
import re

import jax
import numpy as np
import pytest
from helpers.problems import same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from jfl.core.records import Federation
from jfl.data import checksum, datasets, describe, federate, partition, transforms
from jfl.runs.build import federation
from jfl.runs.config import Config

quick = settings(derandomize=True, deadline=None, max_examples=15)
R = np.random.default_rng(0)


def rows(n, classes=3):
    return R.normal(size=(n, 2)).astype(np.float32), R.integers(0, classes, n)


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


def filled(index, size):
    """The row numbers of each client, without padding."""
    return [row[:k] for row, k in zip(np.asarray(index), np.asarray(size), strict=True)]


# --- arrays


def test_arrays_get_their_types():
    data = datasets.arrays(**good())
    assert data.classes == 3 and data.x.dtype == data.x_test.dtype == np.float32
    other = datasets.arrays(**good() | {"y_test": [1, 1]})
    assert len(data.checksum) == 64 and data.checksum != other.checksum
    tokens = datasets.arrays(np.array([[5, 7]]), [0], np.array([[1, 2]]), [0])
    assert tokens.x.dtype == np.int32
    numbers = good() | {"y": np.linspace(-1, 1, 6), "y_test": [0.5, 0.1]}
    fed = federate(datasets.arrays(**numbers, classes=0), partition.power_law(2))
    assert fed.classes == 0 and fed.y.dtype == np.float32 and describe(fed)["label_spread"] is None


X, Y = good()["x"], good()["y"]


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(x=put(X, (4, 1), np.nan)), "finite x (as float32), but got nan or inf in 1 row(s)"),
        (dict(x_test=put(good()["x_test"], (1, 0), -np.inf)), "finite x_test (as float32)"),
        (dict(x=np.zeros((5, 3))), "y of shape [5], one label per row, but got shape [6]"),
        (dict(x_test=np.zeros((2, 4))), "x float32[6, 3], x_test float32[2, 4]"),
        (dict(x_test=np.zeros((2, 3), int)), "x_test int32[2, 3]"),
        (dict(x=np.zeros((6, 3), np.uint8)), "Images: x / 255"),
        (dict(x=np.full((6, 3), 2**40)), "that fit int32"),
        (dict(x=np.full((6, 3), "a")), "x, one array of numbers"),
        (dict(x=[[1.0, 2.0], [1.0]] * 3), "Pad or cut"),
        (dict(y=np.zeros((6, 1), int)), "Use .ravel() for a column"),
        (dict(y=np.eye(6, dtype=int)), "one label per row, but got shape [6, 6]"),
        (dict(y=np.eye(6, 3, dtype=int) + np.eye(6, 3, -3, int), classes=3), "one-hot labels"),
        (dict(y=[0, 1, 2, -1, 0, 1]), "labels in [0, 3), but got y[3] = -1"),
        (dict(y_test=[1, 5], classes=4), "labels in [0, 4), but got y_test[1] = 5"),
        (dict(y=np.full((6, 4), 7), classes=5, y_test=[[1] * 4] * 2), "y[0, 0] = 7"),
        (dict(y=[0.0, 1, 2, 0, 1, 2]), "y of integers, but got dtype float64"),
        (dict(y=list("abcabc")), "np.unique"),
        (dict(y=[0, 1, np.nan, 0, 1, 2.0], classes=0), "finite y (as float32)"),
    ],
)
def test_what_is_no_dataset(change, message):
    """Nor as a tuple, nor as a Dataset that nobody checked."""
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.arrays(**good() | change)
    if "classes" not in change:
        values = [(good() | change)[key] for key in ("x", "y", "x_test", "y_test")]
        for dataset in (tuple(values), datasets.Dataset(*values, None, "own", "")):
            with pytest.raises(ValueError, match="federate"):
                federate(dataset, partition.iid(1))


def test_digits_are_those_of_scikit_learn_stratified():
    from sklearn.datasets import load_digits

    data = datasets.digits()
    assert data.x.shape == (1438, 8, 8, 1) and data.x_test.shape == (359, 8, 8, 1)
    assert data.x.dtype == np.float32 and data.classes == 10
    whole = np.bincount(data.y) + np.bincount(data.y_test)
    assert np.abs(np.bincount(data.y_test) - whole / 5).max() <= 0.5
    images = {image.tobytes() for image in (load_digits().images / 16).astype(np.float32)}
    found = [image.tobytes() for image in np.concatenate([data.x, data.x_test])]
    assert set(found) == images and len(found) == 1797
    assert data.checksum == datasets.digits().checksum


# --- federations


@given(
    clients=st.integers(1, 12),
    alpha=st.floats(0.05, 10),
    holdout=st.sampled_from([0.0, 1e-6, 0.2, 0.99]),
    seed=st.integers(0, 100),
)
@quick
def test_federate_keeps_every_row_of_every_client(clients, alpha, holdout, seed):
    labels = np.random.default_rng(seed).integers(0, 4, 120)
    x = np.arange(120, dtype=np.float32)[:, None]
    split = partition.dirichlet(clients, alpha, min_rows=2, seed=seed)
    fed = federate((x, labels, x[:3], labels[:3]), split, holdout=holdout)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(fed))
    integers = fed.index, fed.size, fed.test_index, fed.test_size, fed.y
    assert {str(a.dtype) for a in integers} == {"int32"}
    train, test = filled(fed.index, fed.size), filled(fed.test_index, fed.test_size)
    for own, a, b in zip(split(labels), train, test, strict=True):
        assert np.array_equal(np.sort(np.concatenate([a, b])), np.sort(own))  # hence disjoint
        held_out = min(max(round(holdout * len(own)), 1), len(own) - 1) if holdout else 0
        assert len(a) >= 1 and len(b) == held_out
    for index, size in ((fed.index, fed.size), (fed.test_index, fed.test_size)):
        assert index.shape == (clients, size.max())
        assert not np.any(np.asarray(index)[np.arange(index.shape[1]) >= np.asarray(size)[:, None]])
    np.testing.assert_array_equal(fed.x[:, 0], x[:, 0])
    again = federate((x, labels, x[:3], labels[:3]), split, holdout=holdout)
    assert checksum(again) == checksum(fed)


def test_rows_of_a_client_are_in_random_order():
    labels, x = np.repeat(np.arange(10), 100), np.zeros((1000, 1))
    of = lambda seed: federate(
        (x, labels, x, labels), partition.natural(np.zeros(1000, int), seed=seed), holdout=0.2
    )
    fed = of(0)
    for own in (*filled(fed.index, fed.size), *filled(fed.test_index, fed.test_size)):
        # The first half of the slots holds all classes; sorted rows would show five.
        assert len(np.unique(labels[own[: len(own) // 2]])) == 10
    assert checksum(of(1)) != checksum(fed)


def test_federate_copies():
    values = good()
    memory = np.zeros(256, np.uint8)  # aligned to 64 bytes, where JAX on a CPU would share it
    start = -memory.ctypes.data % 64
    x = memory[start : start + 72].view(np.float32).reshape(6, 3)
    fed = federate((x, values["y"], values["x_test"], values["y_test"]), partition.iid(2))
    before = checksum(fed)
    x[:] = 7
    assert checksum(fed) == before and not np.any(np.asarray(fed.x) == 7)


def test_test_rows_of_arrays_are_a_fraction_of_each_owner():
    owners, x = np.repeat(["a", "b"], [10, 20]), np.arange(90.0).reshape(30, 3)
    data = datasets.arrays(x, np.arange(30) % 2, owners=owners, test_fraction=0.3)
    assert data.x.shape == (21, 3) and data.y_test.shape == (9,)
    fed = federate(data, partition.natural())
    assert fed.size.tolist() == [7, 14]
    for bad, words in (
        (lambda: datasets.arrays(x, x[:, 0], x), "both x_test and y_test"),
        (lambda: datasets.arrays(x, np.arange(29)), "one label and one owner per row"),
        (lambda: datasets.arrays(x, np.arange(30), test_fraction=0.0), "test_fraction"),
    ):
        with pytest.raises(ValueError, match=words):
            bad()


def test_owners_and_caveats_of_the_dataset():
    data = datasets.arrays(**good())
    data = data._replace(owners=np.array([7, 3, 7, 3, 3, 9]), caveats=("scaled by private rows",))
    fed = federate(data, partition.natural(seed=2))
    owned = [sorted(own.tolist()) for own in filled(fed.index, fed.size)]
    assert owned == [[1, 3, 4], [0, 2], [5]]
    assert fed.caveats == ("scaled by private rows",)
    facts = describe(fed, partition.natural(seed=2))
    assert facts["caveats"] == ["scaled by private rows"]
    assert facts["partition"] == {"name": "natural", "seed": 2, "note": "owners from the dataset"}
    assert checksum(fed) == checksum(federate(data, partition.natural(data.owners, seed=2)))
    assert checksum(fed) != checksum(federate(data, partition.natural(seed=3)))


def test_checksum_sees_every_array():
    fed = federate(datasets.arrays(**good()), partition.iid(2), holdout=0.3)
    sums = {checksum(fed)}
    for leaf in range(8):
        leaves, structure = jax.tree.flatten(fed)
        leaves[leaf] = leaves[leaf].at[(0,) * leaves[leaf].ndim].add(1)
        sums.add(checksum(jax.tree.unflatten(structure, leaves)))
    sums.add(checksum(Federation(*jax.tree.leaves(fed)[:8], classes=9)))
    assert len(sums) == 10


def test_facts_of_a_federation():
    split = partition.dirichlet(50, 0.1, min_rows=16)
    facts = describe(federate(datasets.digits(), split, holdout=0.2), split)
    assert json.loads(json.dumps(facts)) == facts  # plain values
    assert facts["clients"] == 50 and facts["rows"] + facts["held_out"] == 1438
    assert facts["test_rows"] == 359 and facts["slots"] == 50 * facts["max_size"]
    assert facts["min_size"] <= facts["median_size"] <= facts["max_size"]
    words = r"\d+ of 1438 rows moved so that every client has 16"
    assert re.fullmatch(words, facts["partition"]["note"]) and facts["partition"]["alpha"] == 0.1
    data = datasets.arrays(np.zeros((40, 1)), np.arange(40) % 4, np.zeros((1, 1)), [0])
    assert describe(federate(data, partition.shards(4, 1)))["label_spread"] == 0.75
    assert describe(federate(data, partition.natural(np.arange(40) // 4)))["label_spread"] == 0
    tokens = datasets.arrays(x := np.arange(20).reshape(4, 5), x, x, x, classes=20)
    assert describe(federate(tokens, partition.iid(2)))["label_spread"] is None


def test_a_dataset_prints_in_a_line():
    text = repr(datasets.arrays(np.zeros((40, 3)), np.arange(40) % 4, owners=np.arange(40) // 20))
    assert text == "Dataset arrays: 32 rows of float32[3], 8 test rows, 4 classes, 2 owners"


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
    data = datasets.synthetic(0.0, 2.0, clients=4, rows=50, seed=3)
    made = transforms.unit_norm(transforms.standardise(data))
    assert checksum(fed) == checksum(federate(made, partition.natural(seed=3)))
    assert len(fed.caveats) == 1
    labels = dict(partition="labels", clients=20, classes_per_client=3)
    fed = federation(Config(**labels, rows_per_client=40, preprocess="pca:7"))
    assert set(fed.size.tolist()) == {40} and fed.x.shape == (1438, 7)
    fed = federation(Config(**labels, exponent=1.0, min_rows=30))
    assert fed.size.min() == 30 and fed.size.max() > 200
    fed = federation(Config(partition="power_law", clients=10))
    made = partition.power_law(10, 1.0, min_rows=16)
    assert checksum(fed) == checksum(federate(datasets.digits(), made))
    for bad in ("pca", "unit_norm:3", "whiten", "pca:x"):
        with pytest.raises(ValueError, match="config: expected"):
            federation(Config(preprocess=bad))


GIVES = {
    "holes": lambda y: [np.array([0, 1]), np.array([], int)],
    "nobody": lambda y: [],
    "high": lambda y: [np.array([0, 6])],
    "low": lambda y: [np.array([-1, 0])],
    "floats": lambda y: [np.array([0.0, 1.0])],
    "twice": lambda y: [np.array([0, 1]), np.array([1, 2])],
}


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(partition=GIVES["holes"]), "fewer for client(s) 1. A holdout"),
        (dict(partition=GIVES["nobody"]), "got no clients"),
        (dict(partition=GIVES["high"]), "row numbers in [0, 6)"),
        (dict(partition=GIVES["low"]), "row numbers in [0, 6)"),
        (dict(partition=GIVES["floats"]), "float64[2] for client 0"),
        (dict(partition=GIVES["twice"]), "expected one owner per row, but got row 1 given 2 times"),
        (dict(holdout=float("nan")), "got holdout=nan"),
        (dict(holdout=0.2, partition=partition.iid(5)), "at least 2 row(s) of each client"),
        (dict(test=(np.zeros((2, 4)), [0, 1])), "x_test float32[2, 4]"),
        (dict(dataset=np.zeros((6, 3))), "a Dataset, (x, y, x_test, y_test)"),
        (dict(dataset=(np.zeros((6, 3)), [0] * 6)), "holdout=0.2 takes test rows from each client"),
        (dict(partition=partition.natural()), "names the owners of its rows"),
        (dict(classes=4), "the dataset's classes, 3, but got classes=4"),
        (dict(partition=3), "a function of the labels"),
        (dict(partition=None), "partition.natural() makes a client of each owner"),
    ],
)
def test_what_federate_refuses(options, message):
    options = dict(dataset=datasets.arrays(**good()), partition=partition.iid(2)) | options
    with pytest.raises(ValueError, match=re.escape(message)):
        federate(**options)


def test_arrays_without_test_rows_are_tested_on_the_held_out_rows():
    owners = np.array(list("abcabcabcabc"))
    x, y = np.arange(12.0)[:, None], np.arange(12) % 2
    fed = federate((x, y), partition.natural(owners), holdout=0.25)
    held_out = np.asarray(fed.test_index).reshape(-1)  # one row of each client
    assert fed.test_size.tolist() == [1, 1, 1] and fed.size.tolist() == [3, 3, 3]
    assert owners[held_out].tolist() == ["a", "b", "c"]
    assert fed.x_test.tolist() == x[held_out].tolist()
    assert fed.y_test.tolist() == y[held_out].tolist()
    trained = np.asarray(fed.index).reshape(-1)
    assert sorted([*trained, *held_out]) == [*range(12)]


# --- rows by client


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_rows_by_client(kind):
    clients = {"ann": rows(5), "bob": rows(12), "cy": rows(7)}
    given = clients if kind == "dict" else list(clients.values())
    fed = federate(given, holdout=0.25)
    train, held = filled(fed.index, fed.size), filled(fed.test_index, fed.test_size)
    begin = 0
    for mine, other, (x, y) in zip(train, held, clients.values()):
        own = np.sort(np.concatenate([mine, other]))
        assert np.array_equal(own, np.arange(begin, begin + len(y)))
        assert same_bits((fed.x[own], fed.y[own]), (x, y.astype(np.int32)))
        begin += len(y)
    # the central test rows are all held-out ones
    assert np.array_equal(fed.x_test, fed.x[np.concatenate(held)])
    assert fed.test_size.tolist() == [1, 3, 2]
    test = rows(4)
    other = federate(given, test=test)
    assert np.array_equal(other.x_test, test[0]) and other.test_index.shape[1] == 0


HALF = dict(holdout=0.5)


@pytest.mark.parametrize(
    "given, options, words",
    [
        ({"a": rows(3)}, {}, "expected test rows, but got none"),
        ({"a": (rows(3)[0], rows(2)[1])}, HALF, "same number of rows for client 'a'"),
        ({"a": ([[1.0, 2.0], [1.0]], [0, 1])}, HALF, "Pad or cut"),
        ({"a": (rows(4)[0], [0, 1, np.nan, 0])}, HALF, "y of integers"),
        ({}, HALF, "at least one client"),
        ([rows(3), (np.zeros((3, 4)), [0, 1, 0])], HALF, "must match exactly"),
        ({"a": rows(3)}, HALF | dict(partition=partition.iid(1)), "each client has its rows"),
        (
            {"a": rows(5), "b": (np.full(rows(5)[0].shape, 200, np.uint8), rows(5)[1])},
            HALF,
            "x of client 'b' as float.*uint8.*x / 255",
        ),
        ({"a": rows(5), "b": rows(1), "c": rows(0)}, HALF, "fewer for client.s. 'b', 'c'"),
        ([rows(5), rows(0), rows(1)], dict(test=rows(4)), "fewer for client.s. 1"),
    ],
)
def test_rows_by_client_that_do_not_fit(given, options, words):
    with pytest.raises(ValueError, match=words):
        federate(given, **options)


# --- data frames and other libraries


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_data_frame(library):
    library = pytest.importorskip(library, reason=f"{library} is not installed")
    columns = dict(
        age=R.normal(size=60),
        height=R.normal(size=60),
        sick=R.integers(0, 2, 60),
        town=R.choice(["x", "y", "z"], 60),
    )
    frame = library.DataFrame(columns)
    data = datasets.frame(frame, "sick", "town", test_fraction=0.25)
    fed = federate(data, partition.natural())
    sizes = [int((columns["town"] == t).sum()) for t in "xyz"]
    assert fed.size.tolist() == [n - round(0.25 * n) for n in sizes]
    assert len(data.x) + len(data.x_test) == 60
    first = columns["town"] == "x"
    theirs = np.stack([columns["age"], columns["height"]], 1)[first].astype(np.float32)
    mine = np.asarray(fed.x)[filled(fed.index, fed.size)[0]]
    assert all((theirs == row).all(1).any() for row in mine)
    given = datasets.frame(frame, "sick", features=["age"], test=frame)
    assert given.x.shape == (60, 1) and given.owners is None and len(given.x_test) == 60
    with pytest.raises(ValueError, match="numbers in column 'town'"):
        datasets.frame(frame, "sick")


@pytest.mark.parametrize(
    "names",
    [("01", "1"), ("1e3", "1000"), ("12345678901234567.0", "12345678901234568.0"), ("9" * 20, "9")],
)
def test_owners_in_a_table_are_text(names, tmp_path):
    lines = [f"{row},{names[row % 2]},{row % 2}" for row in range(20)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,owner,label", *lines]))
    data = datasets.file(str(tmp_path / "rows.csv"))
    assert set(data.owners.tolist()) == set(names)
    assert all(names.index(who) == y for who, y in zip(data.owners, data.y))


@pytest.mark.parametrize("empty", [None, np.nan, "", " ", "nan", "NA"])
def test_rows_without_an_owner_are_refused(empty):
    x, y = np.arange(20.0), np.arange(20) % 2
    owners = np.array(["ann", empty, "ann", "bob"] * 5, object)
    columns = dict(a=x, label=y, owner=owners)
    for make in (
        lambda: datasets.arrays(x[:, None], y, owners=owners),
        lambda: datasets.arrays(x[:, None], y, x[:, None], y, owners=owners),
        lambda: datasets.frame(columns, "label", "owner"),
        lambda: datasets.hugging_face(columns, ["a"], "label", test=columns, owner="owner"),
    ):
        with pytest.raises(ValueError, match="an owner of every row, but got none in 5 row"):
            make()


def test_no_path_makes_a_client_of_rows_without_an_owner(tmp_path):
    """NumPy turns nan among words into the word "nan", and other tools write NA."""
    refused = lambda: pytest.raises(
        ValueError, match="an owner of every row, but got none in 1 row"
    )
    x, y = np.arange(8.0)[:, None], np.arange(8) % 2
    names = ["ann", np.nan, *["bob"] * 6]
    with refused():
        datasets.arrays(x, y, owners=names)
    for owners in (names, [b"ann", b"", *["ö".encode()] * 6]):
        with refused():
            partition.natural(owners)
        with refused():
            dataset = datasets.arrays(x, y, x, y)._replace(owners=np.array(owners))
            federate(dataset, partition.natural())
    assert (
        datasets.arrays(x, y, x, y, owners=np.array(["ö".encode()] * 8)).owners[0] == "ö".encode()
    )
    lines = [f"{row},{'NA' if row == 1 else row % 2},{row % 2}" for row in range(8)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,owner,label", *lines]))
    with refused():
        datasets.file(str(tmp_path / "rows.csv"))


def test_hugging_face_datasets():
    library = pytest.importorskip("datasets", reason="datasets is not installed")
    images = R.integers(0, 256, (30, 4, 4)).astype(np.uint8)
    labels, who = R.integers(0, 3, 30), R.choice(["u", "v"], 30)
    features = dict(
        image=library.Array2D((4, 4), "uint8"),
        label=library.ClassLabel(num_classes=3),
        writer=library.Value("string"),
    )
    columns = dict(image=images.tolist(), label=labels.tolist(), writer=who.tolist())
    stored = library.Dataset.from_dict(columns, features=library.Features(features))
    data = datasets.hugging_face(stored, "image", "label", test=stored, owner="writer")
    np.testing.assert_allclose(data.x, images / 255, rtol=1e-6)
    assert np.array_equal(data.y, labels) and np.array_equal(data.owners, who)
    pictures = library.Dataset.from_dict(
        columns | dict(image=list(images)),
        features=library.Features(features | dict(image=library.Image())),
    )
    same = datasets.hugging_face(pictures, "image", "label", test=pictures)
    np.testing.assert_allclose(same.x, data.x, rtol=1e-6)


def test_columns_of_bytes_are_scaled_as_features_and_not_as_labels_or_owners():
    bytes_ = dict(
        pixels=np.array([[0, 255], [51, 102], [0, 0]], np.uint8),
        label=np.array([0, 1, 2], np.uint8),
        writer=np.array([7, 7, 8], np.uint8),
    )
    data = datasets.hugging_face(bytes_, "pixels", "label", test=bytes_, owner="writer")
    np.testing.assert_allclose(data.x, [[0, 1], [0.2, 0.4], [0, 0]], rtol=1e-6)
    assert data.y.tolist() == [0, 1, 2] and data.owners.tolist() == ["7", "7", "8"]


# --- the picture


@pytest.mark.parametrize("clients, bars", [(7, 7), (90, 60)])
def test_the_picture_shows_who_has_how_many_rows_of_which_class(clients, bars):
    fed = federate(datasets.digits(), partition.dirichlet(clients, 0.5, min_rows=2))
    axes = fed.plot()
    heights = np.array([[bar.get_height() for bar in group] for group in axes.containers])
    assert heights.shape == (10, bars) and (np.diff(heights.sum(0)) <= 0).all()
    largest = int(np.argmax(np.asarray(fed.size)))
    labels = np.asarray(fed.y)[filled(fed.index, fed.size)[largest]]
    assert np.array_equal(heights[:, 0], np.bincount(labels, minlength=10))
    assert bars < clients or heights.sum() == len(fed.y)
