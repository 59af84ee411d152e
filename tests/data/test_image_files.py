"""Datasets of images from files: what is read of each form, which folder counts, what is damaged.

Prepared datasets are not at hand everywhere, so small ones are written to disk in their formats and
read through the public functions.
"""

import errno
import gzip
import io
import os
import sys

import numpy as np
import pytest
from helpers.prepared_data import prepare

from jfl.core.errors import DataUnavailable
from jfl.data import datasets, federate, image_files, partition
from jfl.data.image_files import KEYS

MNIST_COUNTS = 5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
MNIST_TEST_COUNTS = 980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
# public call, folder, image shape, classes declared, labels used, has an id
MNIST = datasets.mnist, "mnist/3.0.1", (28, 28, 1), 10, (0, 10), False
FASHION = datasets.fashion_mnist, "fashion_mnist/3.0.1", (28, 28, 1), 10, (0, 10), False
CIFAR = datasets.cifar10, "cifar10/3.0.2", (32, 32, 3), 10, (0, 10), True
LETTERS = (
    lambda: datasets.emnist("letters"),
    "emnist/letters/3.1.0",
    (28, 28, 1),
    37,
    (1, 27),
    False,
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder that holds the data, and nothing else to be found."""
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(image_files, "DEBIAN", tmp_path / "debian")
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


def of_bytes(images):
    """Pictures with values in [0, 1]."""
    return images.astype(np.float32) / np.float32(255)


def write_npz(folder, name, shape, keys=KEYS):
    """A .npz of few images -> what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, arrays = np.random.default_rng(1), []
    for rows in (23, 7):
        arrays += [rng.integers(0, 256, (rows, *shape), np.uint8), np.arange(rows) % 10]
    np.savez(folder / f"{name}.npz", **dict(zip(keys, arrays, strict=True)))
    return arrays


def idx_bytes(values):
    """The IDX format, written by hand: two zeros, 8 for bytes, the number of axes, their
    lengths."""
    header = bytes([0, 0, 8, values.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def write_idx(folder, seed=0, compressed=True, names="{half}-{kind}-ubyte", test="t10k"):
    """The four files of Fashion-MNIST with few rows; gives the images and labels of each half."""
    folder.mkdir(parents=True)
    rng, truth = np.random.default_rng(seed), {}
    for half, rows in (("train", 23), (test, 7)):
        images = rng.integers(0, 256, (rows, 28, 28), np.uint8)
        labels = rng.permutation(np.resize(np.arange(10, dtype=np.uint8), rows))
        truth[half] = images, labels
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            content, name = idx_bytes(values), names.format(half=half, kind=kind)
            if compressed:
                content, name = gzip.compress(content, 1), name + ".gz"
            (folder / name).write_bytes(content)
    return truth


# --- prepared by tensorflow_datasets


@pytest.mark.parametrize("known", [MNIST, CIFAR, LETTERS], ids=["mnist", "cifar10", "letters"])
def test_prepared_datasets(known, place, decodes):
    load, folder, *facts = known
    truth = prepare(place / "data" / "tfds", folder, *facts)
    letters = folder.startswith("emnist")
    for _ in range(2):  # from the files, then from the cache
        data = load()
        for x, y, split in ((data.x, data.y, "train"), (data.x_test, data.y_test, "test")):
            images, marks = truth[split]
            # published letters are transposed and numbered from 1
            images = images.swapaxes(1, 2) if letters else images
            np.testing.assert_array_equal(x, of_bytes(images))
            np.testing.assert_array_equal(y, marks - letters)
            assert x.dtype == np.float32 and y.dtype == np.int32 and x.flags.c_contiguous
        assert data.name == folder.rpartition("/")[0] and data.classes == (26 if letters else 10)
    assert len(decodes) == 1 and len(data.checksum) == 64
    assert federate(data, partition.iid(4)).x.shape == (23, *facts[0])


def test_where_data_are_found(place):
    facts = MNIST[1:]
    prepare(place / "none", *facts, seed=1)
    default = datasets.mnist().checksum
    prepare(place / "data", *facts, seed=2)
    assert datasets.mnist().checksum != default
    prepare(place / "data" / "tfds", *facts, seed=1)
    assert datasets.mnist().checksum == default  # the same rows, wherever they lie
    prepare(place / "own", "mnist/3.0.9", *facts[1:], seed=5)
    own = datasets.mnist(data_dir=place / "own").checksum
    prepare(place / "own", "mnist/3.0.10", *facts[1:], seed=4)
    newest = datasets.mnist(data_dir=str(place / "own")).checksum
    assert len({default, own, newest}) == 3  # 3.0.10 is newer than 3.0.9
    (place / "own" / "mnist" / "3.0.10" / "dataset_info.json").unlink()  # it was interrupted
    assert datasets.mnist(data_dir=place / "own").checksum == own


def test_a_damaged_cache_is_decoded_again(place, decodes):
    prepare(place / "data", *MNIST[1:])
    data = datasets.mnist()
    (file,) = (place / "cache").rglob("*.npz")
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    missing = io.BytesIO()
    np.savez(missing, x=data.x)
    for count, content in enumerate((b"", whole[:-1], flipped, missing.getvalue()), start=2):
        file.write_bytes(content)
        again = datasets.mnist()
        assert len(decodes) == count and again.checksum == data.checksum
        np.testing.assert_array_equal(again.y, data.y)


def test_a_cache_that_cannot_be_written_only_warns_and_leaves_nothing(place, decodes, monkeypatch):
    prepare(place / "data", *MNIST[1:])

    def refused(source, target):
        raise OSError(errno.EIO, "no rename")

    with monkeypatch.context() as patch:  # the rename alone makes the file appear
        patch.setattr(os, "replace", refused)
        with pytest.warns(RuntimeWarning, match="no rename.*JFL_CACHE_DIR"):
            datasets.mnist()
    assert not [path for path in (place / "cache").rglob("*") if path.is_file()]
    datasets.mnist()
    datasets.mnist()
    assert len(decodes) == 2


def test_changed_files_are_decoded_again(place, decodes):
    prepare(place / "data", *MNIST[1:], seed=1)
    first = datasets.mnist().checksum
    (place / "data" / "mnist").rename(place / "gone")
    prepare(place / "data", *MNIST[1:], seed=2)
    assert datasets.mnist().checksum != first and len(decodes) == 2


def test_records_of_one_s_own(tmp_path):
    """As FEMNIST by writer: an owner a record."""
    truth = prepare(tmp_path, "letters/1.0.0", (4, 4, 1), 10, (0, 10), True)
    images, labels = truth["train"]
    row = lambda r: (r["image"] / 255, r["label"], r["id"][-1:])
    read = lambda row, name="letters", **how: datasets.prepared(name, row, data_dir=tmp_path, **how)
    data = read(row)
    np.testing.assert_allclose(data.x, images / 255, rtol=1e-6)
    assert data.y.tolist() == labels.tolist() and data.x_test.shape == (7, 4, 4, 1)
    assert data.owners.tolist() == [str(i)[-1] for i in range(len(labels))]
    assert read(lambda r: row(r)[:2]).owners is None
    with pytest.raises(ValueError, match=r"\(x, y\) or \(x, y, owner\) of each record"):
        read(lambda r: r["image"])
    with pytest.raises(DataUnavailable, match="nothing in"):
        read(row, "femnist")
    with pytest.raises(DataUnavailable, match="split 'dev'"):
        read(row, splits=("train", "dev"))


def test_missing_packages_are_named_and_a_cache_needs_none(place, monkeypatch):
    prepare(place / "data", *CIFAR[1:])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "tensorflow_datasets", None)
        with pytest.raises(DataUnavailable, match="pip install"):
            datasets.cifar10()
    data = datasets.cifar10()
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    assert datasets.cifar10().checksum == data.checksum


# --- plain files


@pytest.mark.parametrize(
    "read, name, shape, keys",
    [
        (datasets.mnist, "mnist", (28, 28), ("x_train", "y_train", "x_test", "y_test")),
        (datasets.svhn, "svhn_cropped", (32, 32, 3), KEYS),
    ],
)
def test_images_of_npz_files(read, name, shape, keys, place):
    x, y, x_test, y_test = write_npz(place / "data", name, shape, keys)
    data = read()
    for images, stored in ((data.x, x), (data.x_test, x_test)):
        np.testing.assert_array_equal(images.reshape(stored.shape), of_bytes(stored))
        assert images.ndim == 4
    assert data.y.tolist() == y.tolist() and data.y_test.tolist() == y_test.tolist()
    assert data.classes == 10
    assert read(data_dir=place / "data").checksum == data.checksum


def test_cifar10_of_its_binaries(place):
    folder = place / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    train = [f"data_batch_{i}.bin" for i in range(1, 6)]
    rng, rows = np.random.default_rng(0), {}
    for name in (*train, "test_batch.bin"):
        images, labels = rng.integers(0, 256, (3, 32, 32, 3), np.uint8), rng.integers(0, 10, 3)
        rows[name] = images, labels
        planes = images.transpose(0, 3, 1, 2).reshape(3, -1)  # red, green, blue, row by row
        content = b"".join(bytes([n]) + p.tobytes() for n, p in zip(labels, planes))
        (folder / name).write_bytes(content)
    data = datasets.cifar10()
    np.testing.assert_array_equal(data.x, of_bytes(np.concatenate([rows[n][0] for n in train])))
    assert data.y.tolist() == np.concatenate([rows[n][1] for n in train]).tolist()
    assert data.y_test.tolist() == rows["test_batch.bin"][1].tolist()


def test_emnist_of_idx_files(place):
    names = "emnist-balanced-{half}-{kind}-ubyte"
    truth = write_idx(place / "data" / "emnist", names=names, test="test")
    data = datasets.emnist()
    assert data.classes == 47 and data.y.tolist() == truth["train"][1].tolist()
    upright = truth["train"][0].swapaxes(1, 2)
    np.testing.assert_array_equal(data.x[..., 0], of_bytes(upright))
    with pytest.raises(ValueError, match="'balanced', 'byclass'"):
        datasets.emnist("digit")


def test_which_fashion_mnist_is_read(place):
    labels = lambda truth, half="train": truth[half][1].tolist()
    with pytest.raises(DataUnavailable, match="apt-get install.*JFL_DATA_DIR=") as error:
        datasets.fashion_mnist()
    assert str(place / "data" / "tfds") in str(error.value)
    first = write_idx(place / "debian" / "fashion-mnist", seed=1)
    data = datasets.fashion_mnist()
    for x, y, half in ((data.x, data.y, "train"), (data.x_test, data.y_test, "t10k")):
        np.testing.assert_array_equal(x, of_bytes(first[half][0][..., None]))
        assert y.tolist() == labels(first, half)
    with pytest.raises(DataUnavailable):  # a folder that is named is the only one
        datasets.fashion_mnist(data_dir=place / "own")
    second = write_idx(place / "data" / "fashion-mnist", seed=2)
    assert datasets.fashion_mnist().y.tolist() == labels(second) != labels(first)
    same = datasets.fashion_mnist().checksum
    write_idx(place / "again" / "fashion-mnist", seed=2, compressed=False)
    assert datasets.fashion_mnist(place / "again").checksum == same
    third = prepare(place / "data" / "tfds", *FASHION[1:], seed=4)
    assert datasets.fashion_mnist().y.tolist() == labels(third)


# --- damage


TRAIN = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    "name, change, message",
    [
        (TRAIN, lambda c: b"\0\0\x0d" + c[3:], "not an IDX file of bytes with 3 axes"),
        (TRAIN, lambda c: c[:9], "buffer is smaller"),
        (TRAIN, lambda c: c + b"\0", "cannot reshape array of size 18033"),
        (TRAIN, lambda c: gzip.compress(c)[:-8] + bytes(8), "CRC check failed"),
        ("t10k-labels-idx1-ubyte", lambda c: None, "FileNotFoundError.*t10k-labels-idx1-ubyte"),
    ],
)
def test_damaged_idx_files_are_named(name, change, message, place):
    write_idx(place / "data" / "fashion-mnist", compressed=False)
    path = place / "data" / "fashion-mnist" / name
    content = change(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DataUnavailable, match="fashion_mnist: expected readable .*" + message):
        datasets.fashion_mnist()


def test_npz_files_of_another_form_are_refused(place):
    (place / "data").mkdir()
    image, label = np.zeros((2, 4, 4), np.uint8), np.array([0, 1])
    values = dict(x=image, y=label, x_test=image, y_test=label)
    for change, message in ((dict(x=image / 2), "float64"), (dict(y=label + 9), "labels in")):
        np.savez(place / "data" / "cifar10.npz", **values | change)
        with pytest.raises(ValueError, match=message):
            datasets.cifar10()


def test_damaged_prepared_files_are_named(place):
    prepare(place / "data", *CIFAR[1:])
    file = place / "data" / "cifar10" / "3.0.2" / "cifar10-train.array_record-00000-of-00001"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataUnavailable, match="datasets.cifar10: expected readable files"):
        datasets.cifar10()


# --- real ones


@pytest.mark.slow
@pytest.mark.skipif(
    not os.environ.get("JFL_DATA_DIR"),
    reason="real MNIST NOT tested: set JFL_DATA_DIR to a folder with tfds/mnist",
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
