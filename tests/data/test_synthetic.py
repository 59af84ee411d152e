"""Rows that are made or changed: Synthetic(alpha, beta), UCI Adult from its files, and feature
transforms."""

import os
import re
import types

import numpy as np
import pytest
from scipy import stats

from jfl.data import adult, checksum, datasets, federate, partition, synthetic, transforms

# Synthetic(alpha, beta)

SMALL = dict(clients=6, rows=40, features=5, classes=4)


def own(data):
    """Rows and labels of each client."""
    return [
        (data.x[data.owners == c], data.y[data.owners == c]) for c in range(data.owners.max() + 1)
    ]


def test_the_sizes_of_noble():
    data = datasets.synthetic(1.0, 1.0, clients=4)
    assert data.x.shape == (16000, 40) and data.x_test.shape == (4000, 40) and data.classes == 10
    assert (
        np.bincount(data.owners).tolist() == [4000] * 4
        and data.name == "synthetic(1, 1)"
        and data.caveats == ()
    )
    fed = federate(data, partition.natural(), holdout=0.25)
    assert (
        fed.size.tolist() == [3000] * 4
        and fed.test_size.tolist() == [1000] * 4
        and fed.x_test.shape == (4000, 40)
    )
    for client, rows in enumerate(np.asarray(fed.index)):
        assert set(data.owners[rows]) == {client}


def test_the_same_by_seed_and_one_client_at_a_time():
    data, other = (
        datasets.synthetic(1.0, 2.0, **SMALL),
        datasets.synthetic(1.0, 2.0, **SMALL | dict(seed=1)),
    )
    assert data.checksum == datasets.synthetic(1.0, 2.0, **SMALL).checksum != other.checksum
    fewer = datasets.synthetic(1.0, 2.0, **SMALL | dict(clients=3, rows=[40, 9, 40]))
    for client in (0, 2):  # a client's rows do not depend on the others
        for a, b in zip(own(fewer)[client], own(data)[client], strict=True):
            np.testing.assert_array_equal(a, b)
    assert len({x.tobytes() for x, _ in own(data)}) == 6


@pytest.mark.parametrize("options", [dict(), dict(means="client", scale="std")])
@pytest.mark.parametrize("beta", [0.0, 4.0])
def test_rows_have_the_law_of_the_paper(options, beta):
    """Variance j ^ -1.2 around a centre ~ N(B, 1), B of variance beta (std: beta^2); false alarm
    1e-6 a test."""
    data = datasets.synthetic(
        0.0, beta, clients=300, rows=50, features=8, label_noise=0.0, **options
    )
    x = data.x.reshape(300, 40, 8).astype(float)
    within = ((x - x.mean(1, keepdims=True)) ** 2).sum((0, 1)) * np.arange(1, 9) ** 1.2
    assert np.all(np.abs(stats.norm.ppf(stats.chi2.cdf(within, 300 * 39))) < 5.3)
    centre = x.mean(1)
    spread = beta if not options else beta**2
    noise = np.arange(1, 9) ** -1.2 / 40
    if not options:
        score = (centre**2).sum(0) / (1 + spread + noise)
        assert np.all(np.abs(stats.norm.ppf(stats.chi2.cdf(score, 300))) < 5.3)
        assert np.all(stats.chi2.cdf((centre**2).sum(0) / (2 * (1 + spread)), 300) < 1e-6)  # power
    else:  # one B a client: features move together
        mean = centre.mean(1)
        score = (mean**2).sum() / (spread + (1 + noise.mean()) / 8)
        assert abs(stats.norm.ppf(stats.chi2.cdf(score, 300))) < 5.3


def test_labels_come_from_one_linear_classifier_a_client():
    data = datasets.synthetic(
        0.0, 0.0, clients=3, rows=1000, features=4, classes=3, label_noise=0.0
    )
    from sklearn.linear_model import LogisticRegression

    fits = [LogisticRegression(C=1e3, max_iter=500).fit(x, y) for x, y in own(data)]
    table = np.array([[fit.score(x, y) for x, y in own(data)] for fit in fits])
    assert np.all(table.diagonal() > 0.985) and table[~np.eye(3, dtype=bool)].max() < 0.95


def test_label_noise():
    clean, noisy, all_ = (
        datasets.synthetic(1.0, 1.0, clients=5, rows=4000, label_noise=p) for p in (0.0, 0.05, 1.0)
    )
    np.testing.assert_array_equal(clean.x, noisy.x)
    changed = (clean.y != noisy.y).mean()  # a tenth of the redrawn labels stays
    assert abs(changed - 0.045) < 5.3 * np.sqrt(0.045 / len(clean.y))
    assert stats.chisquare(np.bincount(all_.y, minlength=10)).pvalue > 1e-6
    assert stats.chisquare(np.bincount(clean.y, minlength=10)).pvalue < 1e-6


def test_alpha_changes_no_law():
    """One u a client moves all logits alike: the labels are the same.  One u an entry scales them:
    the same law."""

    def flavour(alpha, means):
        return datasets.synthetic(
            alpha, 1.0, clients=200, rows=20, features=6, classes=3, label_noise=0.0, means=means
        )

    np.testing.assert_array_equal(flavour(0.0, "client").y, flavour(9.0, "client").y)
    low, high = flavour(0.0, "entry"), flavour(9.0, "entry")
    assert (low.y != high.y).mean() > 0.1
    largest = [
        [np.bincount(y, minlength=3).max() / len(y) for _, y in own(data)] for data in (low, high)
    ]
    assert stats.ks_2samp(*largest).pvalue > 1e-6
    assert (
        stats.ks_2samp(
            largest[0],
            [
                np.bincount(y, minlength=3).max() / len(y)
                for _, y in own(
                    datasets.synthetic(
                        0.0, 1.0, clients=200, rows=20, features=6, classes=3, label_noise=0.5
                    )
                )
            ],
        ).pvalue
        < 1e-6
    )


def test_means_of_a_classifier():
    """One mean for W and b of a client, or one for each entry."""
    for means, alike in (("client", True), ("entry", False)):
        weight, bias = synthetic._classifier(np.random.default_rng(0), 3, 2, 1e6, means)
        assert (np.ptp(np.append(weight, bias)) < 10) == alike


def test_iid_clients_share_one_classifier():
    data = datasets.synthetic(
        clients=200, rows=50, features=4, classes=3, iid=True, label_noise=0.0
    )
    x, y = data.x, data.y
    from sklearn.linear_model import LogisticRegression

    assert (
        LogisticRegression(C=1e4, max_iter=2000).fit(x[:4000], y[:4000]).score(x[4000:], y[4000:])
        > 0.985
    )
    score = x.astype(float).sum(0) * np.arange(1, 5) ** 0.6 / np.sqrt(len(x))
    assert np.abs(score).max() < 5.3 and data.name == "synthetic(iid)"


@pytest.mark.parametrize(
    "sizes, skew", [("lognormal", 2.0), ("lognormal", 0.0), ("power_law", 1.0)]
)
def test_unequal_sizes(sizes, skew):
    data = datasets.synthetic(
        1.0, 1.0, clients=100, rows=400, features=2, sizes=sizes, skew=skew, min_rows=50
    )
    train = np.bincount(data.owners)
    assert len(data.y) + len(data.y_test) == 40000 and len(data.y_test) == pytest.approx(
        8000, abs=50
    )
    assert train.min() == {"lognormal": 40 if skew else 320, "power_law": 62}[sizes]
    assert skew == 0 or train.max() > 2000 and train.argmax() != 0
    if sizes == "power_law":
        top = np.sort(train)[::-1][:4]
        np.testing.assert_allclose(top[0] / top, [1, 2, 3, 4], rtol=0.01)
    elif skew:
        tail = np.log(
            np.sort(train)[::-1][:60]
        )  # a lognormal above the floor: straight on normal scores
        assert stats.pearsonr(tail, stats.norm.isf((np.arange(60) + 0.6) / 100)).statistic > 0.97


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(clients=0), "clients >= 1"),
        (dict(classes=1), "classes >= 2"),
        (dict(features=0), "features >= 1"),
        (dict(alpha=-1.0), "alpha >= 0"),
        (dict(beta=float("nan")), "beta >= 0"),
        (dict(rows=0), "rows >= 1"),
        (dict(label_noise=1.5), "label_noise in [0, 1]"),
        (dict(test_fraction=1.0), "test_fraction in [0, 1)"),
        (dict(means="row"), "'entry', 'client'"),
        (dict(scale="sigma"), "'variance', 'std'"),
        (dict(sizes="zipf"), "'equal', 'lognormal', 'power_law'"),
        (dict(rows=[3, 4]), "6 integers >= 1"),
        (dict(rows=[3.5] * 6), "float64[6]"),
        (dict(rows=[40] * 6, sizes="power_law"), "together with sizes='equal'"),
        (dict(sizes="lognormal", min_rows=41), "min_rows <= rows"),
        (dict(iid=True, beta=1.0), "alpha=0 and beta=0 when iid=True"),
        (dict(test_fraction=0.0), "at least one row in x_test"),
        (dict(rows=1), "at least one row in x_test"),
        (dict(seed=-1), "seed >= 0"),
    ],
)
def test_synthetic_errors(change, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        datasets.synthetic(**SMALL | change)
    assert str(error.value).startswith("datasets.synthetic: expected ")


# UCI Adult

TRAIN = """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, United-States, <=50K
52, ?, 209642, HS-grad, 9, Married-civ-spouse, ?, Husband, White, Male, 0, 0, 45, ?, >50K

31, Private, 45781, Masters, 14, Never-married, Prof-specialty, Not-in-family, White, Female, 14084, 0, 50, Holand-Netherlands, >50K
"""  # noqa: E501
TEST = """|1x3 Cross validator
25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, Own-child, Black, Male, 0, 0, 40, United-States, <=50K.
28, Local-gov, 336951, Assoc-acdm, 12, Married-civ-spouse, Protective-serv, Husband, White, Male, 0, 1902, 40, United-States, >50K.
"""  # noqa: E501


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with small files, and nothing else to be found."""
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(adult, "NUM_ROWS", {"adult.data": 3, "adult.test": 2})
    folder = tmp_path / "data" / "adult"
    folder.mkdir(parents=True)
    (folder / "adult.data").write_text(TRAIN)
    (folder / "adult.test").write_text(TEST)
    return folder


def row(x):
    categories = [f"{name}={value}" for name, known in adult.CATEGORIES.items() for value in known]
    columns = [*adult.NUMBERS, *categories]
    return {name: round(float(value), 6) for name, value in zip(columns, x, strict=True) if value}


def test_adult_lines(place):
    data = datasets.adult()
    assert (
        data.x.shape == (3, 105)
        and data.x_test.shape == (2, 105)
        and data.classes == 2
        and data.name == "adult"
    )
    assert data.y.tolist() == [0, 1, 1] and data.y_test.tolist() == [0, 1]
    assert row(data.x[0]) == {
        "age": 0.39,
        "fnlwgt": 0.077516,
        "education-num": 0.8125,
        "capital-gain": 0.02174,
        "hours-per-week": 0.4,
        "workclass=State-gov": 1,
        "education=Bachelors": 1,
        "marital-status=Never-married": 1,
        "occupation=Adm-clerical": 1,
        "relationship=Not-in-family": 1,
        "race=White": 1,
        "sex=Male": 1,
        "native-country=United-States": 1,
    }
    unknown = [
        name
        for name in row(data.x[1])
        if name.split("=")[0] in ("workclass", "occupation", "native-country")
    ]
    assert unknown == [] and row(data.x[2])["native-country=Holand-Netherlands"] == 1
    assert row(data.x_test[1])["capital-loss"] == 0.3804 and "capital-gain" not in row(
        data.x_test[1]
    )


def test_adult_encoding_depends_on_no_row(place):
    whole = datasets.adult().x
    (place / "adult.data").write_text(TRAIN.split("\n")[3])
    with pytest.warns(RuntimeWarning, match="adult.data has 1 rows, but the published file has 3"):
        np.testing.assert_array_equal(datasets.adult().x, whole[2:])


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("Bachelors", "Bachelor", "'Bachelor' is not a published education"),
        ("209642", "209642.5", "209642.5"),
        ("52, ?", "-52, ?", "-52 is not a published age"),
        (">50K\n\n", "50K\n\n", "'50K' is not a published income"),
        (", Male, 2174", ", 2174", "number of columns changed"),
        (TRAIN, "", "no data"),
        ("Masters", "M\u00e4sters", "UnicodeDecodeError"),
    ],
)
def test_adult_names_the_bad_value(place, old, new, message):
    (place / "adult.data").write_text(TRAIN.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.adult()


def test_adult_places(place, tmp_path):
    (tmp_path / "own" / "tfds" / "adult").mkdir(parents=True)
    for name in adult.NUM_ROWS:
        (tmp_path / "own" / "tfds" / "adult" / name).write_bytes((place / name).read_bytes())
    assert datasets.adult(data_dir=tmp_path / "own").checksum == datasets.adult().checksum
    (place / "adult.test").unlink()  # half of it is not enough
    with pytest.raises(ValueError) as error:
        datasets.adult()
    for part in (
        "datasets.adult: expected the files adult.data and adult.test",
        str(place),
        "JFL_DATA_DIR=DIR",
        "download=",
    ):
        assert part in str(error.value)


def openml(first, second):
    """What scikit-learn gives for OpenML's copy: categories as numbers in an order of their own,
    nan where unknown."""

    def fields(text):
        return [
            [v.strip() for v in line.rstrip(".").split(",")]
            for line in text.splitlines()
            if "," in line
        ]

    rows = fields(first) + fields(second)
    known = {name: sorted(values) for name, values in adult.CATEGORIES.items()}
    data = np.array(
        [
            [
                known[name].index(value)
                if name in known and value != "?"
                else np.nan
                if value == "?"
                else float(value)
                for name, value in zip(adult.ATTRIBUTES, line, strict=False)
            ]
            for line in rows
        ]
    )
    order = np.argsort(list(adult.ATTRIBUTES))  # nothing may depend on the order of the columns
    return types.SimpleNamespace(
        data=data[:, order],
        feature_names=[list(adult.ATTRIBUTES)[i] for i in order],
        categories=known,
        target=np.array([line[-1] for line in rows]),
    )


def test_adult_download_restores_the_split(place, tmp_path, monkeypatch):
    want, calls = datasets.adult(), []

    def fetch(name, **options):
        calls.append((name, options["version"]))
        return openml(TEST, TRAIN)

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)
    for _ in range(2):  # the second time the files are there
        got = datasets.adult(data_dir=tmp_path / "new", download=True)
        assert got.checksum == want.checksum and calls == [("adult", 2)]
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *a, **k: openml(TEST, TEST + TRAIN))
    with pytest.raises(ValueError, match="OpenML's copy has 7 rows"):
        datasets.adult(data_dir=tmp_path / "other", download=True)
    with monkeypatch.context() as patch:
        patch.setattr("sklearn.datasets.fetch_openml", lambda *a, **k: 1 / 0)
        with pytest.raises(ValueError, match="a download that works, but got ZeroDivisionError"):
            datasets.adult(data_dir=tmp_path / "other", download=True)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(
    not os.environ.get("JFL_DATA_DIR"),
    reason="real UCI Adult NOT tested: set JFL_DATA_DIR to a folder with adult/adult.data",
)
def test_real_adult():
    data = datasets.adult()
    assert data.x.shape == (32561, 105) and data.x_test.shape == (16281, 105)
    assert data.y.sum() == 7841 and (data.y_test == 0).sum() == 12435
    assert (
        data.x.min() == 0 and data.x.max() < 1.5 and np.all(data.x.max(0) > 0)
    )  # every column is used
    known = data.x[:, 6:].sum(1)
    assert (known == 8).sum() == 30162  # the published count of rows without "?"
    rows = partition.labels(100, 1, 325)(data.y)
    assert np.bincount([data.y[part[0]] for part in rows]).tolist() == [76, 24]


# transforms


def images(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4, 3)) * np.arange(1, 4) + 5
    x[:, 2, 1] = 0.3  # a feature that never varies
    return datasets.arrays(
        x, rng.integers(0, 3, rows), x[:9] + 1, rng.integers(0, 3, len(x[:9])), name="own"
    )._replace(owners=np.arange(rows) % 4, caveats=("before",))


TRANSFORMS = {
    "flatten": transforms.flatten,
    "unit_norm": transforms.unit_norm,
    "standardise": transforms.standardise,
    "pca": lambda data, **options: transforms.pca(data, 5, **options),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_keep_the_rest(name):
    data = images()
    new = TRANSFORMS[name](data)
    # noble2022_code wants rows of clients in their order, and has tests of its own
    assert set(transforms.__all__) == set(TRANSFORMS) | {"noble2022_code"}
    for key in ("y", "y_test", "owners"):
        np.testing.assert_array_equal(getattr(new, key), getattr(data, key))
    assert new.classes == 3 and new.checksum != data.checksum and new.x.dtype == np.float32
    assert new.name == f"own, {'pca(5)' if name == 'pca' else name}"
    assert new.caveats[0] == "before" and len(new.caveats) == (
        2 if name in ("pca", "standardise") else 1
    )
    fed = federate(new, partition.natural())
    assert fed.caveats == new.caveats and all(
        "Does not cover the preprocessing" in text for text in fed.caveats[1:]
    )
    if name in ("pca", "standardise"):
        other = images(seed=1)
        public = TRANSFORMS[name](data, public=other.x)
        assert public.caveats == ("before",)
        same = TRANSFORMS[name](
            other._replace(x_test=data.x, y_test=data.y)
        )  # fitted on the same rows
        np.testing.assert_allclose(public.x, same.x_test, rtol=1e-5, atol=1e-5)
        for bad in (data.x[:, :2], np.full((3, 4, 3), np.nan), data.x[:0], np.full((3, 4, 3), "a")):
            with pytest.raises(ValueError, match=f"transforms.{name}: expected .*public rows"):
                TRANSFORMS[name](data, public=bad)
    for bad in (
        (data.x, data.y),
        datasets.arrays(np.ones((3, 2), int), [0, 1, 0], np.ones((1, 2), int), [0]),
    ):
        with pytest.raises(ValueError, match=f"transforms.{name}: expected"):
            TRANSFORMS[name](bad)


def test_flatten_and_unit_norm():
    data = images()
    np.testing.assert_array_equal(transforms.flatten(data).x, data.x.reshape(60, 12))
    new = transforms.unit_norm(data)
    assert new.x.shape == (60, 4, 3)
    np.testing.assert_allclose((new.x**2).sum((1, 2)), 1, rtol=1e-6)
    np.testing.assert_allclose(
        new.x_test * np.linalg.norm(data.x_test.reshape(9, -1), axis=1)[:, None, None],
        data.x_test,
        rtol=1e-6,
    )
    zero = transforms.unit_norm(datasets.arrays([[0, 0.0], [3, 4]], [0, 1], [[0, 2.0]], [0]))
    np.testing.assert_allclose(zero.x, [[0, 0], [0.6, 0.8]])


def test_standardise():
    data = images()
    new = transforms.standardise(data)
    assert new.x.shape == (60, 4, 3)
    np.testing.assert_allclose(new.x.mean(0), 0, atol=1e-6)
    spread = np.ones((4, 3))
    spread[2, 1] = 0
    np.testing.assert_allclose(new.x.std(0), spread, atol=1e-5)
    np.testing.assert_allclose(
        new.x_test[0] - new.x[0],
        np.where(spread, 1 / np.where(spread, data.x.std(0), 1), 0),
        rtol=1e-4,
    )
    tenth = np.full((10, 4, 3), 0.1)  # a mean of ten times 0.1 is not 0.1
    assert tenth.sum(0)[0, 0] / 10 != 0.1 and not transforms.standardise(data, public=tenth).x.any()
    far = datasets.arrays(
        np.array([[4e4], [4e4 + 1], [4e4 + 2]]), [0, 1, 0], [[4e4]], [0]
    )  # little spread, large mean
    np.testing.assert_allclose(
        transforms.standardise(far).x[:, 0], [-1.2247448, 0, 1.2247448], rtol=1e-3
    )


def test_pca_is_that_of_scikit_learn(monkeypatch):
    from sklearn.decomposition import PCA

    data = images()
    monkeypatch.setattr(transforms, "ROWS_PER_BLOCK", 7)  # blocks do not matter
    new, peer = (
        transforms.pca(data, 5),
        PCA(5, svd_solver="full").fit(data.x.reshape(60, 12).astype(float)),
    )
    for ours, rows in ((new.x, data.x), (new.x_test, data.x_test)):
        theirs = peer.transform(rows.reshape(len(rows), 12).astype(float))
        sign = np.sign((ours * theirs).sum(0))
        np.testing.assert_allclose(ours, theirs * sign, atol=2e-5)
    axes = np.linalg.lstsq(new.x, (data.x - data.x.mean(0)).reshape(60, 12), rcond=None)[0]
    assert np.all(
        axes[np.arange(5), np.abs(axes).argmax(1)] > 0
    )  # the largest entry of an axis is positive
    assert np.all(np.diff(new.x.var(0)) < 0)


@pytest.mark.parametrize("components, rows", [(13, 60), (5, 5), (0, 60)])
def test_pca_refuses_too_many(components, rows):
    with pytest.raises(ValueError, match="transforms.pca: expected .*components"):
        transforms.pca(images(rows), components)


def test_transforms_chain():
    """The preparation of Noble et al.: standardise, then unit norm; and a caveat once."""
    data = transforms.unit_norm(transforms.standardise(datasets.synthetic(0.0, 0.0, **SMALL)))
    assert data.name == "synthetic(0, 0), standardise, unit_norm" and len(data.caveats) == 1
    assert checksum(federate(data, partition.natural())) == checksum(
        federate(data, partition.natural(data.owners))
    )
