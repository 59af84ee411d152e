"""Rows that are made or changed: Synthetic(alpha, beta), UCI Adult from its files, and transforms
of features."""

import os
import re

import numpy as np
import pytest
from scipy import stats

from jfl.data import adult, checksum, datasets, federate, partition, transforms

# --- Synthetic(alpha, beta)

SMALL = dict(clients=6, rows=40, features=5, classes=4)


def own(data):
    """Rows and labels of each client."""
    clients = range(data.owners.max() + 1)
    return [(data.x[data.owners == c], data.y[data.owners == c]) for c in clients]


def test_the_sizes_of_noble():
    data = datasets.synthetic(1.0, 1.0, clients=4)
    assert data.x.shape == (16000, 40) and data.x_test.shape == (4000, 40) and data.classes == 10
    assert np.bincount(data.owners).tolist() == [4000] * 4 and data.caveats == ()


def test_rows_of_a_client_follow_from_the_seed_alone():
    made = lambda **change: datasets.synthetic(1.0, 2.0, **SMALL | change)
    data = made()
    assert data.checksum == made().checksum != made(seed=1).checksum
    fewer = made(clients=3)
    for some, rows in zip(own(fewer), own(data)):  # do not depend on the other clients
        for a, b in zip(some, rows, strict=True):
            np.testing.assert_array_equal(a, b)
    assert len({x.tobytes() for x, _ in own(data)}) == 6


@pytest.mark.parametrize("options", [dict(), dict(means="client", scale="std")])
def test_rows_have_the_law_of_the_paper(options, beta=4.0):
    """Variance j ^ -1.2 around a centre ~ N(B, 1), B of variance beta (std: beta^2); false alarm
    1e-6 a test."""
    data = datasets.synthetic(
        0.0, beta, clients=300, rows=50, features=8, label_noise=0.0, **options
    )
    x = data.x.reshape(300, 40, 8).astype(float)
    within = ((x - x.mean(1, keepdims=True)) ** 2).sum((0, 1)) * np.arange(1, 9) ** 1.2
    assert np.all(np.abs(stats.norm.ppf(stats.chi2.cdf(within, 300 * 39))) < 5.3)
    centre = x.mean(1)
    spread = beta**2 if options else beta
    noise = np.arange(1, 9) ** -1.2 / 40
    if options:  # one B a client: features move together
        score = (centre.mean(1) ** 2).sum() / (spread + (1 + noise.mean()) / 8)
        assert abs(stats.norm.ppf(stats.chi2.cdf(score, 300))) < 5.3
        return
    score = (centre**2).sum(0) / (1 + spread + noise)
    assert np.all(np.abs(stats.norm.ppf(stats.chi2.cdf(score, 300))) < 5.3)
    assert np.all(stats.chi2.cdf((centre**2).sum(0) / (2 * (1 + spread)), 300) < 1e-6)  # power


def test_labels_come_from_one_linear_classifier_a_client():
    from sklearn.linear_model import LogisticRegression

    options = dict(rows=1000, features=4, classes=3, label_noise=0.0)
    data = datasets.synthetic(0.0, 0.0, clients=3, **options)
    fits = [LogisticRegression(C=1e3, max_iter=500).fit(x, y) for x, y in own(data)]
    table = np.array([[fit.score(x, y) for x, y in own(data)] for fit in fits])
    assert np.all(table.diagonal() > 0.985) and table[~np.eye(3, dtype=bool)].max() < 0.95
    data = datasets.synthetic(clients=4, iid=True, **options)  # one for all of them
    fit = LogisticRegression(C=1e3, max_iter=500).fit(*own(data)[0])
    assert min(fit.score(x, y) for x, y in own(data)) > 0.97


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
    the same law; false alarm 1e-6."""

    def made(alpha, means="entry", noise=0.0):
        shape = dict(clients=200, rows=20, features=6, classes=3)
        return datasets.synthetic(alpha, 1.0, **shape, label_noise=noise, means=means)

    np.testing.assert_array_equal(made(0.0, "client").y, made(9.0, "client").y)
    low, high, other = made(0.0), made(9.0), made(0.0, noise=0.5)
    assert (low.y != high.y).mean() > 0.1
    largest = lambda data: [np.bincount(y).max() / len(y) for _, y in own(data)]
    assert stats.ks_2samp(largest(low), largest(high)).pvalue > 1e-6
    assert stats.ks_2samp(largest(low), largest(other)).pvalue < 1e-6  # power


def test_unequal_sizes():
    shape = dict(clients=100, rows=400, features=2, min_rows=50)
    data = datasets.synthetic(1.0, 1.0, **shape, sizes="lognormal")
    train = np.bincount(data.owners)
    assert len(data.y) + len(data.y_test) == 40000
    assert len(data.y_test) == pytest.approx(8000, abs=50)
    assert train.min() == 40 and train.max() > 2000 and train.argmax() != 0
    # above the floor it is straight on normal scores
    scores, top = stats.norm.isf((np.arange(60) + 0.6) / 100), np.sort(train)[:-61:-1]
    assert stats.pearsonr(np.log(top), scores).statistic > 0.97


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(alpha=-1.0), "alpha >= 0"),
        (dict(beta=float("nan")), "beta >= 0"),
        (dict(test_fraction=1.0), "test_fraction in [0, 1)"),
        (dict(sizes="zipf"), "'equal', 'lognormal'"),
        (dict(sizes="lognormal", min_rows=41), "min_rows <= 40"),
        (dict(iid=True, beta=1.0), "alpha=0 and beta=0 when iid=True"),
        (dict(test_fraction=0.0), "at least one row in x_test"),
    ],
)
def test_synthetic_refuses(change, message):
    with pytest.raises(ValueError, match="datasets.synthetic: expected .*" + re.escape(message)):
        datasets.synthetic(**SMALL | change)


# --- UCI Adult

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


def test_lines_of_adult(place):
    data = datasets.adult()
    assert data.x.shape == (3, 105) and data.x_test.shape == (2, 105) and data.classes == 2
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
    known = {name.split("=")[0] for name in row(data.x[1])}
    assert not known & {"workclass", "occupation", "native-country"}
    assert row(data.x[2])["native-country=Holand-Netherlands"] == 1
    last = row(data.x_test[1])
    assert last["capital-loss"] == 0.3804 and "capital-gain" not in last


def test_the_encoding_of_adult_depends_on_no_other_row(place):
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
    ],
)
def test_adult_names_the_bad_value(place, old, new, message):
    (place / "adult.data").write_text(TRAIN.replace(old, new, 1))
    with pytest.raises(ValueError, match=re.escape(message)):
        datasets.adult()


def test_half_of_adult_is_not_enough(place):
    (place / "adult.test").unlink()
    with pytest.raises(ValueError, match="the files adult.data and adult.test.*JFL_DATA_DIR=DIR"):
        datasets.adult()


@pytest.mark.skipif(
    not os.environ.get("JFL_DATA_DIR"),
    reason="real UCI Adult NOT tested: set JFL_DATA_DIR to a folder with adult/adult.data",
)
def test_real_adult():
    data = datasets.adult()
    assert data.x.shape == (32561, 105) and data.x_test.shape == (16281, 105)
    assert data.y.sum() == 7841 and (data.y_test == 0).sum() == 12435
    assert data.x.min() == 0 and data.x.max() < 1.5
    assert np.all(data.x.max(0) > 0)  # every column is used
    known = data.x[:, 6:].sum(1)
    assert (known == 8).sum() == 30162  # the published count of rows without "?"


# --- transforms


def images(rows=60, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 4, 3)) * np.arange(1, 4) + 5
    x[:, 2, 1] = 0.3  # a feature that never varies
    labels = rng.integers(0, 3, rows)
    data = datasets.arrays(x, labels, x[:9] + 1, np.arange(len(x[:9])) % 3, classes=3, name="own")
    return data._replace(owners=np.arange(rows) % 4, caveats=("before",))


TRANSFORMS = {
    "flatten": transforms.flatten,
    "unit_norm": transforms.unit_norm,
    "standardise": transforms.standardise,
    "pca": lambda data, **options: transforms.pca(data, 5, **options),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_keep_the_rest_and_say_what_they_took_from_private_rows(name):
    data, fitted = images(), name in ("pca", "standardise")
    new = TRANSFORMS[name](data)
    for key in ("y", "y_test", "owners"):
        np.testing.assert_array_equal(getattr(new, key), getattr(data, key))
    assert new.classes == 3 and new.checksum != data.checksum and new.x.dtype == np.float32
    assert new.name == f"own, {'pca(5)' if name == 'pca' else name}"
    caveats = federate(new, partition.natural()).caveats
    assert caveats[0] == "before" and len(caveats) == (2 if fitted else 1)
    assert all("Does not cover the preprocessing" in text for text in caveats[1:])
    tokens = datasets.arrays(np.ones((3, 2), int), [0, 1, 0], np.ones((1, 2), int), [0])
    with pytest.raises(ValueError, match=f"transforms.{name}: expected features of float"):
        TRANSFORMS[name](tokens)
    if not fitted:
        return
    other = images(seed=1)
    public = TRANSFORMS[name](data, public=other.x)
    assert public.caveats == ("before",)
    # as where the same rows are the training rows
    same = TRANSFORMS[name](other._replace(x_test=data.x, y_test=data.y))
    np.testing.assert_allclose(public.x, same.x_test, rtol=1e-5, atol=1e-5)
    for bad in (data.x[:, :2], np.full((3, 4, 3), np.nan), data.x[:0]):
        with pytest.raises(ValueError, match=f"transforms.{name}: expected .*public rows"):
            TRANSFORMS[name](data, public=bad)


def test_flatten_and_unit_norm():
    data = images()
    np.testing.assert_array_equal(transforms.flatten(data).x, data.x.reshape(60, 12))
    new = transforms.unit_norm(data)
    np.testing.assert_allclose((new.x**2).sum((1, 2)), 1, rtol=1e-6)
    norms = np.linalg.norm(data.x_test.reshape(9, -1), axis=1)[:, None, None]
    np.testing.assert_allclose(new.x_test * norms, data.x_test, rtol=1e-6)
    zero = transforms.unit_norm(datasets.arrays([[0, 0.0], [3, 4]], [0, 1], [[0, 2.0]], [0]))
    np.testing.assert_allclose(zero.x, [[0, 0], [0.6, 0.8]])


def test_standardise():
    data = images()
    new = transforms.standardise(data)
    np.testing.assert_allclose(new.x.mean(0), 0, atol=1e-6)
    spread = np.ones((4, 3))
    spread[2, 1] = 0
    np.testing.assert_allclose(new.x.std(0), spread, atol=1e-5)
    step = np.where(spread, 1 / np.where(spread, data.x.std(0), 1), 0)
    np.testing.assert_allclose(new.x_test[0] - new.x[0], step, rtol=1e-4)
    tenth = np.full((10, 4, 3), 0.1)  # a mean of ten times 0.1 is not 0.1
    assert tenth.sum(0)[0, 0] / 10 != 0.1 and not transforms.standardise(data, public=tenth).x.any()
    x = np.array([[4e4], [4e4 + 1], [4e4 + 2]])  # little spread, large mean
    far = transforms.standardise(datasets.arrays(x, [0, 1, 0], [[4e4]], [0]))
    np.testing.assert_allclose(far.x[:, 0], [-1.2247448, 0, 1.2247448], rtol=1e-3)


def test_pca_is_that_of_scikit_learn(monkeypatch):
    from sklearn.decomposition import PCA

    data = images()
    monkeypatch.setattr(transforms, "ROWS_PER_BLOCK", 7)  # blocks do not matter
    new = transforms.pca(data, 5)
    peer = PCA(5, svd_solver="full").fit(data.x.reshape(60, 12).astype(float))
    for ours, rows in ((new.x, data.x), (new.x_test, data.x_test)):
        theirs = peer.transform(rows.reshape(len(rows), 12).astype(float))
        sign = np.sign((ours * theirs).sum(0))
        np.testing.assert_allclose(ours, theirs * sign, atol=2e-5)
    axes = np.linalg.lstsq(new.x, (data.x - data.x.mean(0)).reshape(60, 12), rcond=None)[0]
    largest = axes[np.arange(5), np.abs(axes).argmax(1)]
    assert np.all(largest > 0) and np.all(np.diff(new.x.var(0)) < 0)
    for components, rows in ((13, 60), (5, 5), (0, 60)):
        with pytest.raises(ValueError, match="transforms.pca: expected .*components"):
            transforms.pca(images(rows), components)


def test_a_caveat_stands_once_after_two_transforms():
    """The preparation of Noble et al.: standardise, then unit norm."""
    data = transforms.unit_norm(transforms.standardise(datasets.synthetic(0.0, 0.0, **SMALL)))
    assert data.name == "synthetic(0, 0), standardise, unit_norm" and len(data.caveats) == 1
    natural = partition.natural(data.owners)
    assert checksum(federate(data, partition.natural())) == checksum(federate(data, natural))


def test_features_as_the_published_code_of_noble_2022_has_them():
    """Against its loops: row number j where the paper speaks of feature j, changed as it goes."""
    data = datasets.synthetic(1.0, 1.0, clients=3, rows=50, features=4, seed=2)
    new = transforms.noble2022_code(data)
    for client in range(3):
        mine, tests = data.owners == client, slice(10 * client, 10 * client + 10)
        train, test = data.x[mine].astype(float).tolist(), data.x_test[tests].astype(float).tolist()
        for dim in range(4):
            high, low = max(train[dim]), min(train[dim])
            for row in (*train, *test):
                row[dim] = (row[dim] - low) / (high - low)
        np.testing.assert_allclose(new.x[mine], train, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(new.x_test[tests], test, rtol=1e-5, atol=1e-6)
    assert len(new.caveats) == len(data.caveats) + 1 and "private rows" in new.caveats[-1]


@pytest.mark.parametrize("rows, change", [(60, dict(owners=None)), (20, {}), (60, "fewer tests")])
def test_rows_that_the_published_code_cannot_read_are_refused(rows, change):
    data = datasets.synthetic(0.0, 0.0, clients=2, rows=rows, seed=0)
    if change == "fewer tests":
        change = dict(x_test=data.x_test[1:], y_test=data.y_test[1:])
    with pytest.raises(ValueError, match="transforms.noble2022_code: expected rows"):
        transforms.noble2022_code(data._replace(**change))


# --- public rows


def numbered(kind=float):
    """Row i holds i, so that rows can be told."""
    n = np.arange(50)
    x, test = n[:, None].astype(kind), np.full((3, 1), 99).astype(kind)
    data = datasets.arrays(x, n % 5, test, [0, 1, 2], name="own")
    return data._replace(owners=n % 7, caveats=("before",))


@pytest.mark.parametrize("kind", [float, int])
def test_public_rows_leave_the_data(kind):
    data = numbered(kind)
    proxy, rest = transforms.public(data, 12)
    ids, left = proxy.x[:, 0].astype(int), rest.x[:, 0].astype(int)
    assert np.array_equal(np.sort(np.concatenate([ids, left])), np.arange(50)) and len(ids) == 12
    assert (np.diff(left) > 0).all() and not (np.diff(ids) > 0).all()
    assert np.array_equal(proxy.y, ids % 5) and np.array_equal(rest.y, left % 5)
    assert np.array_equal(rest.owners, left % 7)
    assert rest.caveats == ("before", "Assumes that 12 rows of the training set are public.")
    assert rest.name == "own, public(12)" and rest.checksum != data.checksum
    assert np.array_equal(rest.x_test, data.x_test) and rest.x.dtype == data.x.dtype
    assert np.array_equal(transforms.public(data, 12)[0].x, proxy.x)
    proxy.x[:] = 7  # copies: the data do not follow
    assert np.array_equal(data.x[:, 0], np.arange(50))


def test_public_rows_are_drawn_at_random():
    """How often each row is drawn in 100 seeds; false alarm 1e-9 a row."""
    data = numbered()
    drawn = [transforms.public(data, 10, seed=s)[0].x[:, 0] for s in range(100)]
    counts = np.bincount(np.concatenate(drawn).astype(int), minlength=50)
    low, high = stats.binom.ppf([5e-10, 1 - 5e-10], 100, 0.2)
    assert counts.min() >= low and counts.max() <= high


@pytest.mark.parametrize(
    "arguments, message",
    [((0,), "got rows=0"), ((50,), "rows <= 49"), ((1.0,), "got rows=1.0"), ((5, -1), "seed")],
)
def test_public_refuses(arguments, message):
    with pytest.raises(ValueError, match="transforms.public: expected .*" + message):
        transforms.public(numbered(), *arguments)
