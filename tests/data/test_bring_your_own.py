"""Rows that users bring: by client, in data frames, of other libraries."""

import jax
import numpy as np
import pytest
from helpers.prepared_data import prepare

import jfl
from jfl.core.errors import DataUnavailable

R = np.random.default_rng(0)


def rows(n, classes=3):
    return R.normal(size=(n, 2)).astype(np.float32), R.integers(0, classes, n)


def of_client(fed, c, held_out=False):
    index, size = (fed.test_index, fed.test_size) if held_out else (fed.index, fed.size)
    at = np.asarray(index)[c][: int(size[c])]
    return np.asarray(fed.x)[at], np.asarray(fed.y)[at]


def both(fed, c):
    x, y = (np.concatenate(v) for v in zip(of_client(fed, c), of_client(fed, c, True)))
    order = np.lexsort(x.T)
    return x[order], y[order]


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_rows_by_client(kind):
    clients = {"ann": rows(5), "bob": rows(12), "cy": rows(7)}
    given = clients if kind == "dict" else list(clients.values())
    fed = jfl.federate(given, holdout=0.25)
    for c, (x, y) in enumerate(clients.values()):
        mine = both(fed, c)
        order = np.lexsort(x.T)
        assert np.array_equal(mine[0], x[order]) and np.array_equal(mine[1], y[order])
    # the central test rows are all held-out ones
    held = np.concatenate([of_client(fed, c, True)[0] for c in range(3)])
    assert np.array_equal(np.asarray(fed.x_test), held) and len(held) == 1 + 3 + 2
    test = rows(4)
    other = jfl.federate(given, test=test)
    assert np.array_equal(np.asarray(other.x_test), test[0]) and other.test_index.shape[1] == 0
    task = jfl.models.logistic(other)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
    plan = jfl.plan(other, task, algorithm, jfl.sampling.full(3))
    assert np.isfinite(jfl.simulate(jax.random.key(0), plan, 1).metrics.loss).all()


@pytest.mark.parametrize(
    "given, options, words",
    [
        ({"a": rows(3)}, {}, "expected test rows, but got none"),
        ({"a": (rows(3)[0], rows(2)[1])}, dict(holdout=0.5), "same number of rows for client 'a'"),
        ({"a": rows(3)[0]}, dict(holdout=0.5), "for client 'a'"),
        ({}, dict(holdout=0.5), "at least one client"),
        (
            {"a": (np.zeros((3, 2)), [0, 1, 0]), "b": (np.zeros((3, 4)), [0, 1, 0])},
            dict(holdout=0.5),
            "must match exactly",
        ),
        (
            {"a": rows(3)},
            dict(holdout=0.5, partition=jfl.partition.iid(1)),
            "no partition: each client has its rows",
        ),
        ({"a": rows(1), "b": rows(4)}, dict(holdout=0.5), "at least 2 row"),
    ],
    ids=["test", "lengths", "pair", "nobody", "shapes", "partition", "one_row"],
)
def test_rows_by_client_that_do_not_fit(given, options, words):
    with pytest.raises(ValueError, match=words):
        jfl.federate(given, **options)


def test_numbers_and_sequences_by_client():
    """`classes` says what labels are, where they do not show it."""
    clients = [(R.normal(size=(6, 2)), R.normal(size=6)) for _ in range(2)]
    fed = jfl.federate(clients, holdout=0.2, classes=0)
    assert fed.classes == 0 and fed.y.dtype == np.float32
    tokens = [(R.integers(0, 5, (6, 4)), R.integers(-1, 5, (6, 4))) for _ in range(2)]
    fed = jfl.federate(tokens, holdout=0.2, classes=5)
    assert fed.y.shape == (12, 4) and fed.classes == 5
    with pytest.raises(ValueError, match="the dataset's classes, 10, but got classes=3"):
        jfl.federate(jfl.datasets.digits(), jfl.partition.iid(2), classes=3)


# --- data frames


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
    data = jfl.datasets.frame(frame, "sick", "town", test_fraction=0.25)
    fed = jfl.federate(data, jfl.partition.natural())
    assert data.x.shape[1] == 2 and len(data.x) + len(data.x_test) == 60
    sizes = [int((columns["town"] == t).sum()) for t in "xyz"]
    assert np.asarray(fed.size).tolist() == [n - round(0.25 * n) for n in sizes]
    first = np.flatnonzero(columns["town"] == "x")
    mine = of_client(fed, 0)[0]
    theirs = np.stack([columns["age"], columns["height"]], 1)[first].astype(np.float32)
    assert all((theirs == row).all(1).any() for row in mine)
    given = jfl.datasets.frame(frame, "sick", features=["age"], test=frame)
    assert given.x.shape == (60, 1) and given.owners is None and len(given.x_test) == 60
    with pytest.raises(ValueError, match="numbers in column 'town'"):
        jfl.datasets.frame(frame, "sick")


# --- other libraries


def test_hugging_face_datasets():
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    images = R.integers(0, 256, (30, 4, 4)).astype(np.uint8)
    labels, who = R.integers(0, 3, 30), R.choice(["u", "v"], 30)
    stored = datasets.Dataset.from_dict(
        dict(image=images.tolist(), label=labels.tolist(), writer=who.tolist()),
        features=datasets.Features(
            dict(
                image=datasets.Array2D((4, 4), "uint8"),
                label=datasets.ClassLabel(num_classes=3),
                writer=datasets.Value("string"),
            )
        ),
    )
    data = jfl.datasets.hugging_face(stored, "image", "label", test=stored, owner="writer")
    np.testing.assert_allclose(data.x, images / 255, rtol=1e-6)
    assert np.array_equal(data.y, labels) and np.array_equal(data.owners, who)
    fed = jfl.federate(data, jfl.partition.natural())
    assert np.asarray(fed.size).tolist() == [(who == w).sum() for w in ("u", "v")]
    pictures = datasets.Dataset.from_dict(
        dict(image=list(images), label=labels.tolist()),
        features=datasets.Features(
            dict(image=datasets.Image(), label=datasets.ClassLabel(num_classes=3))
        ),
    )
    same = jfl.datasets.hugging_face(pictures, "image", "label", test=pictures)
    np.testing.assert_allclose(same.x, data.x, rtol=1e-6)


def test_flower_partitioners():
    flower = pytest.importorskip(
        "flwr_datasets.partitioner", reason="flwr-datasets is not installed"
    )
    data = jfl.datasets.digits()
    for made in (
        flower.IidPartitioner(num_partitions=5),
        flower.DirichletPartitioner(num_partitions=5, partition_by="label", alpha=0.5),
    ):
        split = jfl.partition.flower(made)
        fed = jfl.federate(data, split)
        owned = np.concatenate([np.asarray(fed.index)[c][: fed.size[c]] for c in range(5)])
        assert len(set(owned.tolist())) == len(owned) == len(data.y)
        again = jfl.federate(data, jfl.partition.flower(made))
        assert np.array_equal(np.asarray(fed.size), np.asarray(again.size))
    with pytest.raises(ValueError, match="a partitioner of flwr-datasets"):
        jfl.partition.flower(3)


# --- the picture


@pytest.mark.parametrize("clients, bars", [(7, 7), (90, 60)])
def test_the_picture_shows_who_has_how_many_rows_of_which_class(clients, bars):
    data = jfl.datasets.digits()
    fed = jfl.federate(data, jfl.partition.dirichlet(clients, 0.5, min_rows=2))
    axes = fed.plot()
    heights = np.array([[bar.get_height() for bar in group] for group in axes.containers])
    assert heights.shape == (10, bars)
    sizes = np.sort(np.asarray(fed.size))[::-1]
    assert heights.sum(0)[0] == sizes[0] and (np.diff(heights.sum(0)) <= 0).all()
    largest = int(np.argmax(np.asarray(fed.size)))
    labels = of_client(fed, largest)[1]
    assert np.array_equal(heights[:, 0], np.bincount(labels, minlength=10))
    if bars == clients:
        assert heights.sum() == len(data.y)


def test_the_picture_of_numbers_and_of_rows_on_the_host():
    x, y = rows(20)
    on_host = jfl.population((x, y), [8, 12], test=(x, y))
    heights = np.array([[b.get_height() for b in group] for group in on_host.plot().containers])
    assert heights.sum(0).tolist() == [12, 8]
    numbers = jfl.federate([(x, x[:, 0])], holdout=0.5, classes=0)
    assert [b.get_height() for b in numbers.plot().containers[0]] == [10]


def test_data_that_tensorflow_datasets_prepared(tmp_path):
    """As FEMNIST by writer: an owner a record."""
    truth = prepare(tmp_path, "letters/1.0.0", (4, 4, 1), 10, (0, 10), True)
    images, labels = truth["train"]
    row = lambda r: (r["image"] / 255, r["label"], r["id"][-1:])
    data = jfl.datasets.prepared("letters", row, data_dir=tmp_path)
    np.testing.assert_allclose(data.x, images / 255, rtol=1e-6)
    assert data.y.tolist() == labels.tolist() and data.x_test.shape == (7, 4, 4, 1)
    assert data.owners.tolist() == [str(i)[-1] for i in range(len(labels))]
    fed = jfl.federate(data, jfl.partition.natural())
    assert len(fed.size) == 10
    bare = jfl.datasets.prepared("letters", lambda r: row(r)[:2], data_dir=tmp_path)
    assert bare.owners is None
    with pytest.raises(ValueError, match=r"\(x, y\) or \(x, y, owner\) of each record"):
        jfl.datasets.prepared("letters", lambda r: r["image"], data_dir=tmp_path)
    with pytest.raises(DataUnavailable, match="nothing in"):
        jfl.datasets.prepared("femnist", row, data_dir=tmp_path)
    with pytest.raises(DataUnavailable, match="split 'dev'"):
        jfl.datasets.prepared("letters", row, splits=("train", "dev"), data_dir=tmp_path)


# --- clients and rows that do not fit


@pytest.mark.parametrize("kind", ["dict", "list"])
@pytest.mark.parametrize(
    "options", [dict(holdout=0.25), dict(test=rows(4))], ids=["holdout", "test"]
)
def test_a_client_without_rows_is_refused_by_name(kind, options):
    clients = {"ann": rows(5), "bob": rows(0), "cy": rows(7), "dan": ([], [])}
    given, names = (clients, "'bob', 'dan'") if kind == "dict" else (list(clients.values()), "1, 3")
    with pytest.raises(ValueError, match=rf"at least . row.*fewer for .*{names}"):
        jfl.federate(given, **options)


NUMBERS, CLASSES = rows(4)


@pytest.mark.parametrize(
    "x, y, words",
    [
        (
            {"age": NUMBERS, "bmi": NUMBERS},
            CLASSES,
            "one array of numbers, but got dtype object.*Join|same number of rows",
        ),
        (
            (NUMBERS, NUMBERS[:, :1]),
            CLASSES,
            "x.* as an array.*Pad or cut",
        ),
        ([[1.0, 2.0], [1.0], [2.0], [3.0]], CLASSES, "x.* as an array.*Pad or cut"),
        (
            np.array([NUMBERS[0], NUMBERS[1, :1], *NUMBERS[2:]], object),
            CLASSES,
            "one array of numbers, but got dtype object.*Pad or cut",
        ),
        (NUMBERS, np.array(["a", "b", "a", "b"]), "y of integers.*np.unique"),
        (
            NUMBERS,
            np.array(["a", "b", "a", "b"], object),
            "y of integers.*np.unique",
        ),
        (NUMBERS, np.array([0, 1, np.nan, 0]), "y of integers.*Drop"),
    ],
    ids=["dict", "tuple", "ragged", "objects", "strings", "names", "nan"],
)
def test_rows_and_labels_that_are_no_arrays_of_numbers(x, y, words):
    for use in (
        lambda: jfl.federate((x, y, NUMBERS, CLASSES), jfl.partition.iid(2)),
        lambda: jfl.federate({"ann": (x, y)}, holdout=0.25),
    ):
        with pytest.raises(ValueError, match=f"federate.*({words})"):
            use()
