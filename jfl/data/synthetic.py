"""Synthetic(alpha, beta): rows of clients with different classifiers and different centres.

Shapes use C clients, d features and k classes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import checks
from . import partition

MAX_NUMBERS = 2**31  # in x, which is 8 GiB
MEANS, SCALES, SIZES = ("entry", "client"), ("variance", "std"), ("equal", "lognormal", "power_law")


def generate(
    where: str,
    alpha: float,
    beta: float,
    clients: int,
    rows: int | Sequence[int],
    features: int,
    classes: int,
    label_noise: float,
    means: str,
    scale: str,
    iid: bool,
    sizes: str,
    skew: float,
    min_rows: int,
    test_fraction: float,
    seed: int,
) -> tuple:
    """Return x, y, x_test, y_test and the owner of each training row.

    The arguments are those of `datasets.synthetic`.
    """
    checks.require_integer(where, clients=clients, features=features, min_rows=min_rows)
    checks.require_integer(where, min_value=2, classes=classes)
    checks.require_seed(where, seed=seed)
    numbers: dict[str, Any] = dict(
        alpha=alpha, beta=beta, label_noise=label_noise, test_fraction=test_fraction, skew=skew
    )
    checks.require_nonnegative(where, single=True, **numbers)
    alpha, beta, label_noise, test_fraction, skew = map(float, numbers.values())
    clients, features, classes, min_rows = map(int, (clients, features, classes, min_rows))
    checks.require_one_of(where, MEANS, means=means)
    checks.require_one_of(where, SCALES, scale=scale)
    checks.require_one_of(where, (False, True), iid=iid)
    checks.require_one_of(where, SIZES, sizes=sizes)
    if label_noise > 1 or test_fraction >= 1:
        checks.fail(
            where,
            "label_noise in [0, 1] and test_fraction in [0, 1)",
            f"label_noise={label_noise!r}, test_fraction={test_fraction!r}",
        )
    if iid and (alpha or beta):
        checks.fail(
            where,
            "alpha=0 and beta=0 when iid=True",
            f"alpha={alpha!r}, beta={beta!r}",
            "With iid=True all clients share one classifier.",
        )
    count = checks.as_array(where, "rows", rows)
    if (
        count.dtype.kind in "iu"
        and count.size
        and float(count.mean()) * clients * features > MAX_NUMBERS
        or features * classes > MAX_NUMBERS
    ):
        checks.fail(
            where,
            f"at most {MAX_NUMBERS} numbers in x and in a classifier",
            f"clients={clients}, rows={checks.short_repr(rows)}, features={features}, "
            f"classes={classes}",
            "Lower one of them.",
        )
    size = _sizes(where, rows, clients, sizes, skew, min_rows, seed)
    test = np.minimum(np.round(test_fraction * size).astype(int), size - 1)
    if not test.any():
        checks.fail(
            where,
            "at least one test row in all",
            f"none of {size.sum()} rows at test_fraction={test_fraction!r}",
            "Raise test_fraction or rows.",
        )
    # Standard deviations.
    alpha, beta = (value if scale == "std" else value**0.5 for value in (alpha, beta))
    # Feature j has variance j ** -1.2.
    decay = (np.arange(1, features + 1) ** -0.6).astype(np.float32)
    model = (
        _classifier(np.random.default_rng([seed, 0]), features, classes, 0.0, means)
        if iid
        else None
    )
    ends, test_ends = np.cumsum(size - test), np.cumsum(test)
    x, x_test = (np.empty((end[-1], features), np.float32) for end in (ends, test_ends))
    y, y_test = (np.empty(end[-1], np.int32) for end in (ends, test_ends))
    for client, (n, m) in enumerate(zip(size, test, strict=True)):
        rng = np.random.default_rng([seed, 1, client])
        weight, bias = _classifier(rng, features, classes, alpha, means) if model is None else model
        features_x = rng.standard_normal((n, features), np.float32)
        features_x *= decay
        if not iid:
            features_x += _normal(rng, features, beta, means).astype(np.float32)
        label = (features_x @ weight.astype(np.float32) + bias.astype(np.float32)).argmax(1)
        other = rng.random(n) < label_noise
        label[other] = rng.integers(classes, size=other.sum())
        # Rows of a client are iid, so the first ones can be the training rows.
        index, test_index = (
            slice(ends[client] - (n - m), ends[client]),
            slice(test_ends[client] - m, test_ends[client]),
        )
        x[index], y[index], x_test[test_index], y_test[test_index] = (
            features_x[: n - m],
            label[: n - m],
            features_x[n - m :],
            label[n - m :],
        )
    return x, y, x_test, y_test, np.repeat(np.arange(clients), size - test)


def _normal(rng, shape, spread, means, mean=None):
    """Draw N(u, 1) entries, whose mean u ~ N(0, spread^2) is drawn per entry, or once."""
    mean = spread * rng.standard_normal(shape if means == "entry" else ()) if mean is None else mean
    return mean + rng.standard_normal(shape)


def _classifier(rng, features, classes, spread, means):
    # With means="client", W and b have the same mean.
    shared = spread * rng.standard_normal() if means == "client" else None
    return tuple(
        _normal(rng, shape, spread, means, shared) for shape in ((features, classes), (classes,))
    )


def _sizes(where, rows, clients, sizes, skew, min_rows, seed):
    if np.ndim(rows):
        size = np.asarray(rows)
        if (
            sizes != "equal"
            or size.shape != (clients,)
            or size.dtype.kind not in "iu"
            or size.min() < 1
        ):
            checks.fail(
                where,
                f"rows, {clients} integers >= 1, together with sizes='equal'",
                f"{size.dtype}{list(size.shape)} and sizes={sizes!r}",
            )
        return size
    checks.require_integer(where, rows=rows)
    rows = int(rows)
    if sizes == "equal":
        return np.full(clients, rows)
    if min_rows > rows:
        checks.fail(
            where,
            "min_rows <= rows, which is the mean of a client",
            f"min_rows={min_rows!r}, rows={rows!r}",
        )
    rng = np.random.default_rng([seed, 2])
    if sizes == "power_law":
        share = np.arange(1, clients + 1) ** -float(skew)
    else:
        logs = np.sort(skew * rng.standard_normal(clients))[::-1]
        share = np.exp(logs - logs[0])
    return rng.permutation(partition.split_with_minimum(rows * clients, share, min_rows)[0])
