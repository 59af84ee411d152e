"""Compute softmax regression on the rows of clients in float64 NumPy.

Bounds take some quantities as known. This module measures them along a run, without the library's
gradients.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
from scipy.special import log_softmax

import jfl

from ..harness import objectives
from . import trajectories

DEALS = dict(iid=1.0, skewed=0.5, classes=0.0)  # the share of a client's rows that is iid


class Rows(NamedTuple):
    """Rows of clients that all have the same number of rows; objectives have l2 / 2 |w|^2."""

    x: np.ndarray  # Float64[C, n, f], the last column is 1
    y: np.ndarray  # Float64[C, n, k], one-hot
    l2: float


def federation(dataset: str, deal: str, clients: int, rows: int):
    """Return rows of norm 1, `rows` per client; `deal` is "alike" (all the same) or in DEALS."""
    data = jfl.transforms.unit_norm(jfl.transforms.flatten(getattr(jfl.datasets, dataset)()))
    test = data.x_test[:10], data.y_test[:10]  # accuracies are not looked at
    if deal != "alike":
        part = jfl.partition.similarity(clients, DEALS[deal], rows)
        return jfl.federate((data.x, data.y), part, test=test)
    one = np.random.default_rng(0).permutation(len(data.x))[:rows]
    return jfl.federate([(data.x[one], data.y[one])] * clients, test=test)


@functools.lru_cache(maxsize=4)
def problem(dataset: str, deal: str, clients: int, rows: int, l2: float):
    """Return a `federation`, and the largest smoothness constant of its clients' objectives."""
    fed = federation(dataset, deal, clients, rows)
    return fed, float(objectives.smoothness(fed, l2=l2).max())


def rows_of(fed, l2: float) -> Rows:
    """Return the rows of a federation."""
    index = np.asarray(fed.index)
    x = np.asarray(fed.x, np.float64)[index]
    x = np.concatenate([x, np.ones((*x.shape[:2], 1))], 2)
    return Rows(x, np.eye(fed.classes)[np.asarray(fed.y)[index]], l2)


def matrix(params) -> np.ndarray:
    """Return weights and biases of `models.logistic` as one Float64[..., f, k]."""
    (dense,) = params.values()
    kernel, bias = (np.asarray(dense[n], np.float64) for n in ("kernel", "bias"))
    return np.concatenate([kernel, bias[..., None, :]], -2)


def gradients(rows: Rows, w) -> np.ndarray:
    """Return the gradients of each client's objective, [C, f, k]."""
    return moments(rows, w)[1]


def moments(rows: Rows, w) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return objectives [C], gradients [C, f, k], and mean squared norms of rows' gradients [C].

    The last are without l2.  The model w is one for all clients [f, k], or one per client
    [C, f, k].
    """
    logs = log_softmax(rows.x @ w, -1)
    wrong, rest = np.exp(logs) - rows.y, rows.l2 / 2 * (w**2).sum((-2, -1))
    return (
        rest - (rows.y * logs).sum(-1).mean(-1),
        rows.x.transpose(0, 2, 1) @ wrong / rows.x.shape[1] + rows.l2 * w,
        ((wrong**2).sum(-1) * (rows.x**2).sum(-1)).mean(-1),
    )


def best(fed, l2: float, weights) -> tuple[np.ndarray, float]:
    """Return the minimiser and the minimum of the weighted objective."""
    found = objectives.optimum(jfl.models.logistic(fed), fed, l2, weights=weights)
    return matrix(found.params), found.value


def along(plan, seeds: int, rounds: int) -> np.ndarray:
    """Return the server's models before each round and after the last: Float64[seeds, rounds + 1,
    f, k]."""
    models = trajectories.along(plan, seeds, np.arange(1, rounds + 1))
    return matrix(jax.device_get(models)).swapaxes(0, 1)


def spread(values) -> str:
    """Return a mean over seeds with its standard error, in words."""
    if len(values) == 1:
        return f"{values[0]:.4g}"
    return f"{values.mean():.4g} ({values.std(ddof=1) / len(values) ** 0.5:.1g})"


def as_lists(lines: dict) -> dict:
    """Return measured values of each line without arrays."""
    return {
        line: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in found.items()}
        for line, found in lines.items()
    }
