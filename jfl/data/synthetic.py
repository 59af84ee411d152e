"""The dataset Synthetic(alpha, beta), whose clients have different distributions.

Shapes use C clients, d features and k classes.
"""

from typing import Annotated, Any

import numpy as np

from ..core import checks
from ..core.options import Setting
from .partition import split_with_minimum
from .rows import Dataset, make_dataset

# The largest number of entries of x (8 GiB) and of a classifier.
MAX_NUMBERS = 2**31


def synthetic(
    alpha: Annotated[float, Setting("synthetic_alpha")] = 0.0,
    beta: Annotated[float, Setting("synthetic_beta")] = 0.0,
    clients: Annotated[int, Setting("clients")] = 100,
    rows: Annotated[int, Setting("rows_per_client")] = 5000,
    *,
    features: int = 40,
    classes: int = 10,
    label_noise: float = 0.05,
    means: str = "entry",
    scale: str = "variance",
    iid: bool = False,
    sizes: str = "equal",
    min_rows: int = 50,
    test_fraction: float = 0.2,
    seed: Annotated[int, Setting("partition_seed")] = 0,
) -> Dataset:
    """Return Synthetic(alpha, beta): Gaussian rows of clients, labelled by linear classifiers.

    A client draws a classifier W [features, classes] and b [classes] ~ N(u, 1), and a centre
    v [features] ~ N(B, 1). Its rows are x ~ N(v, diag(j^-1.2)), where j = 1, 2, ... numbers the
    features, and its labels are y = argmax(x W + b). The means u ~ N(0, alpha) and B ~ N(0, beta)
    differ between clients.

    Clients differ a lot even if alpha = beta = 0, and only beta makes them more different. alpha
    does not change the distribution of labels: a single u adds the same number to every logit, and
    a separate u per entry multiplies all logits by sqrt(1 + alpha), neither of which changes the
    argmax.

    Use `partition.natural()`, which gives every client its own rows. The rows of a client depend
    only on the seed, the client's number and its size. `federate(..., holdout=0.2)` holds out rows
    of each client.

    Args:
        alpha: variance of the mean of a client's classifier.
        beta: variance of the mean of a client's centre; larger is more heterogeneous.
        clients: number of clients.
        rows: mean number of rows of a client, including test rows.
        seed: seed of all draws.

    Other Parameters:
        features: number of features.
        classes: number of classes.
        label_noise: probability, in [0, 1], that a label is replaced by a uniformly drawn class.
        means: "entry" draws one u per entry of W and b and one B per feature; "client" draws one u
            and one B per client.
        scale: "variance", or "std" if alpha and beta are standard deviations.
        iid: whether all clients share one W and b ~ N(0, 1) and v = 0. Requires alpha = beta = 0.
        sizes: the distribution of the sizes of clients: "equal", or "lognormal", where the standard
            deviation of the log size is 2.
        min_rows: minimum number of rows of a client if sizes are not equal.
        test_fraction: fraction of each client's rows, in [0, 1), that become central test rows; at
            least one row in all.

    Returns:
        The dataset: x [n, features], and `owners` [n], the client of each training row.

    References:
        Li et al., MLSys 2020 (FedProx), section 5.1. Noble et al., AISTATS 2022, use the defaults.
        Chen et al., TKDE 2024, use features=60, means="client", scale="std", label_noise=0 and
        sizes="lognormal".

    Example:
        >>> synthetic(1.0, 1.0, clients=3, rows=10).x.shape
        (24, 40)
    """
    where = "datasets.synthetic"
    checks.require_integer(where, features=features, min_rows=min_rows)
    max_rows = MAX_NUMBERS // features
    checks.require_integer(where, max_value=max_rows, clients=clients)
    checks.require_integer(where, min_value=2, max_value=max_rows, classes=classes)
    checks.require_seed(where, seed=seed)
    checks.require_nonnegative(where, single=True, alpha=alpha, beta=beta)
    checks.require_nonnegative(
        where, single=True, label_noise=label_noise, test_fraction=test_fraction
    )
    checks.require_one_of(where, ("entry", "client"), means=means)
    checks.require_one_of(where, ("variance", "std"), scale=scale)
    checks.require_one_of(where, (False, True), iid=iid)
    checks.require_one_of(where, ("equal", "lognormal"), sizes=sizes)
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
    checks.require_integer(where, rows=rows)
    size = np.full(clients, rows)
    if sizes == "lognormal":
        size = _lognormal_sizes(where, rows, clients, min_rows, seed)
    total: dict[str, Any] = {"sum of rows": int(size.sum())}
    checks.require_integer(where, max_value=max_rows, **total)
    num_test = np.minimum(np.round(test_fraction * size).astype(int), size - 1)
    name = "synthetic(iid)" if iid else f"synthetic({alpha:g}, {beta:g})"
    # Standard deviations.
    alpha, beta = (float(value) if scale == "std" else value**0.5 for value in (alpha, beta))
    # Feature j has variance j ** -1.2.
    decay = (np.arange(1, features + 1) ** -0.6).astype(np.float32)
    shared = None
    if iid:
        shared = _classifier(np.random.default_rng([seed, 0]), features, classes, 0.0, means)
    x, y = np.empty((size.sum(), features), np.float32), np.empty(size.sum(), np.int32)
    is_test = np.zeros(size.sum(), bool)
    for client, end in enumerate(np.cumsum(size)):
        own = slice(end - size[client], end)
        rng = np.random.default_rng([seed, 1, client])
        weight, bias = shared or _classifier(rng, features, classes, alpha, means)
        x[own] = rng.standard_normal((size[client], features), np.float32) * decay
        if not iid:
            x[own] += _normal(rng, features, beta, means).astype(np.float32)
        y[own] = (x[own] @ weight.astype(np.float32) + bias.astype(np.float32)).argmax(1)
        is_noisy = rng.random(size[client]) < label_noise
        y[own][is_noisy] = rng.integers(classes, size=is_noisy.sum())
        # Rows of a client are iid, so its last ones can be the test rows.
        is_test[end - num_test[client] : end] = True
    parts = x[~is_test], y[~is_test], x[is_test], y[is_test]
    owners = np.repeat(np.arange(clients), size - num_test)
    return make_dataset(where, *parts, int(classes), name)._replace(owners=owners)


def _normal(rng, shape, spread, means, mean=None):
    """Draw an array with entries ~ N(u, 1).

    The mean u ~ N(0, spread^2) is drawn for each entry, or once for all if `means` is "client".  If
    `mean` is given, it takes the place of u.
    """
    mean = spread * rng.standard_normal(shape if means == "entry" else ()) if mean is None else mean
    return mean + rng.standard_normal(shape)


def _classifier(rng, features, classes, spread, means):
    """Draw a classifier: W [features, classes] and b [classes]."""
    # With means="client", W and b have the same mean.
    mean = spread * rng.standard_normal() if means == "client" else None
    return tuple(
        _normal(rng, shape, spread, means, mean) for shape in ((features, classes), (classes,))
    )


def _lognormal_sizes(where, rows, clients, min_rows, seed):
    """Return Int[clients], numbers of rows with mean `rows`."""
    checks.require_integer(
        where, "rows is the mean of a client.", max_value=rows, min_rows=min_rows
    )
    rng = np.random.default_rng([seed, 2])
    logs = np.sort(2.0 * rng.standard_normal(clients))[::-1]
    share = np.exp(logs - logs[0])
    return rng.permutation(split_with_minimum(rows * clients, share, min_rows)[0])
