"""Preprocessing of the features of a Dataset.

A transform returns a new Dataset with the same labels, owners and caveats, and may add a caveat.
`public` instead splits off rows. Shapes use n training rows, m test rows and d features.
"""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from scipy import linalg

from ..core import checks
from .rows import Dataset, make_dataset

# The transforms that a config can name.
__all__ = ["flatten", "noble2022_code", "pca", "standardise", "unit_norm"]

# The number of the random stream that draws public rows. Partitions use other streams of a seed.
PUBLIC_STREAM = 4
# Rows that are converted to float64 at a time.
ROWS_PER_BLOCK = 1 << 13


def flatten(dataset: Dataset) -> Dataset:
    """Reshape each row to a vector [d]. Privacy is unaffected."""
    return _replace_features("flatten", dataset, *(_flat(x) for x in _rows("flatten", dataset)))


def unit_norm(dataset: Dataset) -> Dataset:
    """Divide each row by its Euclidean norm; rows of zeros are unchanged.

    Privacy:
        Each row is changed independently, so no caveat is added.

    Example:
        >>> import jfl
        >>> scaled = jfl.transforms.unit_norm(jfl.datasets.digits())
        >>> float(np.linalg.norm(scaled.x[0]).round(6))
        1.0
    """

    def scaled(x):
        norm = np.sqrt(np.square(_flat(x), dtype=np.float64).sum(1))
        return x / np.where(norm > 0, norm, 1).reshape(-1, *[1] * (x.ndim - 1)).astype(np.float32)

    return _replace_features(
        "unit_norm", dataset, *(scaled(x) for x in _rows("unit_norm", dataset))
    )


def standardise(dataset: Dataset, public: ArrayLike | None = None) -> Dataset:
    """Subtract the mean of each feature and divide by its standard deviation.

    Constant features become 0.

    Args:
        dataset: the dataset whose training and test rows are changed.
        public: rows [p, ...] from which the mean and standard deviation are computed. None uses the
            training rows.

    Privacy:
        Without `public`, the mean and standard deviation of private rows enter every feature, and
        no noise covers them: the dataset gets a caveat that is printed with every guarantee.

    Raises:
        ValueError: for integer x (tokens), and for public rows of another shape.
    """
    x, x_test = _rows("standardise", dataset)
    mean, variance, _ = _moments(_rows_to_fit("standardise", x, public))
    # Rounding gives a constant feature a standard deviation of about 1e-8 times its value.
    varies = variance > (1e-6 * np.abs(mean)) ** 2
    std = np.sqrt(np.where(varies, variance, 1))
    mean, std = (v.astype(np.float32).reshape(x.shape[1:]) for v in (mean, std))
    varies = varies.reshape(x.shape[1:])
    caveat = (
        "Does not cover the preprocessing: features were standardised with the mean and standard "
        "deviation of private rows, without noise."
    )
    values = (np.where(varies, (part - mean) / std, np.float32(0)) for part in (x, x_test))
    return _replace_features(
        "standardise", dataset, *values, caveat=caveat if public is None else None
    )


def pca(dataset: Dataset, components: int, public: ArrayLike | None = None) -> Dataset:
    """Project flattened, centred rows onto their first principal components: x [n, components].

    The result is not whitened. The sign of a component is chosen such that its largest entry is
    positive.

    Args:
        dataset: the dataset whose training and test rows are changed.
        components: number of components; at most d, and less than the number of rows from which
            they are computed.
        public: rows [p, ...] from which the mean and the components are computed. None uses the
            training rows.

    Privacy:
        As in `standardise`: without `public`, a caveat is printed with every guarantee.

    Speed:
        The covariance takes n d^2 operations and its eigenvectors d^3: about 2 s for 60,000 x 784.

    Raises:
        ValueError: for integer x (tokens), and for too many components.
    """
    checks.require_integer("transforms.pca", components=components)
    x, x_test = _rows("pca", dataset)
    fit = _rows_to_fit("pca", x, public)
    if components > fit.shape[1] or components >= len(fit):
        checks.fail(
            "transforms.pca",
            f"components <= {fit.shape[1]} features and < {len(fit)} rows",
            f"components={components}",
        )
    mean, _, covariance = _moments(fit, covariance=True)
    last = len(covariance) - 1
    _, axes = linalg.eigh(
        covariance, subset_by_index=(last - components + 1, last), overwrite_a=True
    )
    axes = axes[:, ::-1]
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(components)])
    # Subtract the mean after the projection, which needs no second copy of the rows.
    axes32, offset = axes.astype(np.float32), (mean @ axes).astype(np.float32)
    values = (_flat(part) @ axes32 - offset for part in (x, x_test))
    caveat = (
        f"Does not cover the preprocessing: the {components} principal components were computed "
        "from private rows, without noise."
    )
    return _replace_features(
        f"pca({components})", dataset, *values, caveat=caveat if public is None else None
    )


def noble2022_code(dataset: Dataset) -> Dataset:
    """Scale the features of each client as the published code of Noble et al. 2022 does.

    Their paper says that features are standardised. For j = 0, 1, ..., their code instead subtracts
    from feature j of a client the minimum of the client's *row number j*, and divides by the range
    of that row, which already contains the changed features 0 to j - 1. Using a row instead of a
    column gives each client random factors and offsets, which makes clients more different.

    Args:
        dataset: a dataset with owners, with at least as many rows per client as features, and the
            same number of test rows for each client, in the order of clients, as in
            `datasets.synthetic`.

    Privacy:
        The offsets and factors are computed from private rows without noise, so the dataset gets a
        caveat that is printed with every guarantee.

    Raises:
        ValueError: for rows without owners, clients with fewer rows than features, or a number of
            test rows that is not a multiple of the number of clients.

    References:
        Noble, Bellet, Dieuleveut, AISTATS 2022: data/Logistic/data_generator.py of its repository.
    """
    x, x_test = _rows("noble2022_code", dataset)
    num_rows = np.bincount([0] if dataset.owners is None else dataset.owners)
    if x.ndim != 2 or num_rows.min() < x.shape[1] or len(x_test) % len(num_rows):
        checks.fail(
            "transforms.noble2022_code",
            "rows [n, d] with owners, at least d rows and as many test rows for each of them",
            f"x {x.shape}, test rows {len(x_test)}, {len(num_rows)} owners with {num_rows.min()} "
            "rows or more",
        )
    new, new_test = x.astype(np.float64), x_test.astype(np.float64)
    # A view, so that changes of a client's rows are changes of `new_test`.
    of_client = new_test.reshape(len(num_rows), -1, x.shape[1])
    for client, rows_test in enumerate(of_client):
        own = dataset.owners == client
        rows = new[own]
        for j in range(x.shape[1]):
            low, high = rows[j].min(), rows[j].max()
            rows[:, j] = (rows[:, j] - low) / (high - low)
            rows_test[:, j] = (rows_test[:, j] - low) / (high - low)
        new[own] = rows
    return _replace_features(
        "noble2022_code",
        dataset,
        new.astype(np.float32),
        new_test.astype(np.float32),
        caveat="Does not cover the preprocessing: features were scaled with statistics of each "
        "client's private rows, without noise.",
    )


class Public(NamedTuple):
    """Rows and labels that everyone may read."""

    x: np.ndarray  # [p, ...]
    y: np.ndarray  # [p]


def public(dataset: Dataset, rows: int, seed: int = 0) -> tuple[Public, Dataset]:
    """Split off random training rows that are treated as public and belong to no client.

    Args:
        dataset: the dataset.
        rows: number of public rows.
        seed: seed of the choice of rows.

    Returns:
        The public rows, x [rows, ...] and y [rows] in random order; and the dataset without them,
        whose n - rows training rows keep their order and owners.

    Privacy:
        Measurements on public rows (`jfl.analysis.public_data`) reveal nothing about the other
        rows, which stay private. That the chosen rows are public is an assumption, so the dataset
        gets a caveat that is printed with every guarantee.

    Raises:
        ValueError: unless 1 <= rows < n.

    Example:
        >>> import jfl
        >>> proxy, rest = jfl.transforms.public(jfl.datasets.digits(), 100)
        >>> proxy.x.shape, rest.x.shape
        ((100, 8, 8, 1), (1338, 8, 8, 1))
    """
    n = len(dataset.x)
    checks.require_integer("transforms.public", max_value=n - 1, rows=rows)
    checks.require_seed("transforms.public", seed=seed)
    order = np.random.default_rng([seed, PUBLIC_STREAM]).permutation(n)
    proxy, rest = order[:rows], np.sort(order[rows:])
    owners = None if dataset.owners is None else dataset.owners[rest]
    left = dataset._replace(x=dataset.x[rest], y=dataset.y[rest], owners=owners)
    caveat = f"Assumes that {rows} rows of the training set are public."
    left = _replace_features(f"public({rows})", left, left.x, left.x_test, caveat)
    return Public(dataset.x[proxy], dataset.y[proxy]), left


def _rows(name, dataset):
    """Return x and x_test of a dataset; reject features that are not floats."""
    if dataset.x.dtype.kind != "f":
        checks.fail(
            f"transforms.{name}",
            "features of float",
            f"dtype {dataset.x.dtype}",
            "Tokens cannot be transformed.",
        )
    return dataset.x, dataset.x_test


def _flat(x):
    return x.reshape(len(x), -1)


def _rows_to_fit(name, x, public):
    """Return the flattened rows from which a transform computes its statistics."""
    if public is None:
        return _flat(x)
    public = checks.as_array(f"transforms.{name}", "public", public)
    is_like_x = public.shape[1:] == x.shape[1:] and public.dtype.kind in "buif" and len(public)
    if not is_like_x or not np.isfinite(public).all():
        checks.fail(
            f"transforms.{name}",
            f"public rows of finite numbers, shape [p, {', '.join(map(str, x.shape[1:]))}]",
            f"{public.dtype}{list(public.shape)}",
        )
    return _flat(public)


def _moments(x: np.ndarray, covariance: bool = False) -> tuple[Any, Any, Any]:
    """Return the mean [d], the variance [d] and optionally the covariance [d, d], in float64.

    The variance and the covariance are computed from centred rows.
    """
    blocks = [x[first : first + ROWS_PER_BLOCK] for first in range(0, len(x), ROWS_PER_BLOCK)]
    mean = sum(block.sum(0, dtype=np.float64) for block in blocks) / len(x)
    if not covariance:
        return mean, sum(np.square(block - mean).sum(0) for block in blocks) / len(x), None
    total = np.zeros((x.shape[1], x.shape[1]))
    for block in blocks:
        centred = block - mean
        total += centred.T @ centred
    return mean, np.diag(total) / len(x), total / len(x)


def _replace_features(name, dataset, x, x_test, caveat=None):
    """Return a dataset with other features, the name of the transform and possibly a caveat."""
    label = f"{dataset.name}, {name}"
    new = make_dataset(
        f"transforms.{name}", x, dataset.y, x_test, dataset.y_test, dataset.classes, label
    )
    return new._replace(
        owners=dataset.owners, caveats=dataset.caveats + ((caveat,) if caveat else ())
    )
