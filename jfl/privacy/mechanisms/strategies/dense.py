"""Any lower-triangular C: the least error that noise of earlier rounds can have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ....core import checks
from ....core.records import record
from . import optimal
from .strategy import Strategy
from .toeplitz import lower_toeplitz, same


@record
class Dense(Strategy):
    """C and its inverse as tables; earlier normals are drawn again."""

    table: Any = None  # Float64[rounds, rounds], C
    inverse: Any = None  # its inverse

    def matrix(self) -> np.ndarray:
        return np.asarray(self.table, np.float64)

    def noising(self) -> np.ndarray:
        return np.asarray(self.inverse, np.float64)

    def says_what_it_draws(self) -> bool:
        shape = (self.rounds, self.rounds)
        table, inverse = self.matrix(), self.noising()
        return (
            table.shape == inverse.shape == shape
            and not np.triu(table, 1).any()
            and same(table @ inverse, np.eye(self.rounds))
        )

    def draws(self, round_: Any) -> tuple[Any, ...]:
        back = jnp.arange(self.rounds, dtype=jnp.int32)
        at = jnp.minimum(round_, self.rounds - 1)
        row = jnp.asarray(self.inverse, jnp.float32)[at]
        index = jnp.maximum(at - back, 0)
        return index, row[index], at + 1


def dense(
    rounds: int,
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
) -> Strategy:
    """The C with the least mean error of all, for units that come in rounds that are multiples of
    `separation` apart: for up to about a thousand rounds.

    Two rounds in which one unit may come have orthogonal columns, so that its participations add up
    as if noise were independent.

    Other Parameters:
        rounds: that it covers.
        participations: of a unit, at most: 1, or as many as fit.
        separation: rounds between two of them.
        workload: as in `banded_toeplitz`.
        error: "mean".

    References:
        Choquette-Choo et al., ICML 2023, "Multi-epoch matrix factorization mechanisms".

    Example:
        >>> round(dense(16).rmse(), 4)
        1.6894
    """
    where = "strategies.dense"
    asked = optimal.asked(where, rounds, participations, separation, workload, error)
    if error != "mean":
        checks.fail(where, 'error="mean"', f"error={error!r}", "Use banded_toeplitz.")
    n, b = asked.rounds, asked.separation
    epochs = asked.participations > 1
    if epochs and asked.participations < -(-n // b):
        checks.fail(
            where,
            f"participations=1, or all of the {-(-n // b)} that fit",
            f"participations={participations}",
        )
    wanted = _workload(asked)
    unit = np.arange(n) % b if epochs else np.arange(n)
    square = _least_error(wanted.T @ wanted / n, unit)
    # X = C^T C with C lower triangular: Cholesky from the end
    table = np.linalg.cholesky(square[::-1, ::-1]).T[::-1, ::-1]
    return Dense(n, b if epochs else 1, table, np.linalg.inv(table))


def _least_error(weight: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """The X = C^T C with the least tr(weight X^-1), a convex problem; what a unit adds in all its
    rounds has squared length 1, and rounds of one unit are orthogonal."""
    same = unit[:, None] == unit
    share = np.bincount(unit)[unit]

    def projected(gradient: np.ndarray) -> np.ndarray:
        """Along which X may move."""
        diagonal = np.diagonal(gradient)
        mean = np.bincount(unit, diagonal)[unit] / share
        return np.where(same, 0.0, gradient) + np.diag(diagonal - mean)

    def loss(square: np.ndarray) -> tuple[float, Any]:
        try:
            lower = np.linalg.inv(np.linalg.cholesky(square))
        except np.linalg.LinAlgError:  # no square
            return np.inf, None
        inverse = lower.T @ lower
        back = inverse @ weight
        return np.trace(back), projected(-back @ inverse)

    return _descended(loss, np.diag(1.0 / share))


def _descended(
    loss: Callable[[np.ndarray], tuple[float, Any]],
    x: np.ndarray,
    memory: int = 20,
    most: int = 5000,
    enough: float = 1e-7,
) -> np.ndarray:
    """L-BFGS with steps that are halved until they stay where the loss is finite and fall."""
    value, gradient = loss(x)
    past = []
    for _ in range(most):
        if np.abs(gradient).max() <= enough * value:
            break
        step = -_turned(gradient, past)
        slope = np.vdot(step, gradient)
        size = 1.0 if past else min(1.0, 0.1 / np.abs(gradient).max())
        while True:
            new, its_gradient = loss(x + size * step)
            if new <= value + 1e-4 * size * slope:
                break
            size /= 2
            if size < 1e-12:
                return x
        moved, turned = size * step, its_gradient - gradient
        if np.vdot(moved, turned) > 0:
            past = [*past[-memory + 1 :], (moved, turned)]
        x, value, gradient = x + moved, new, its_gradient
    return x


def _turned(gradient: np.ndarray, past: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The gradient times an estimate of the inverse Hessian."""
    turned, kept = gradient, []
    for moved, change in reversed(past):
        share = np.vdot(moved, turned) / np.vdot(moved, change)
        kept.append(share)
        turned = turned - share * change
    if past:
        moved, change = past[-1]
        turned = turned * (np.vdot(moved, change) / np.vdot(change, change))
    for (moved, change), share in zip(past, reversed(kept), strict=True):
        turned = turned + moved * (share - np.vdot(change, turned) / np.vdot(moved, change))
    return turned


def _workload(asked: optimal.Asked) -> np.ndarray:
    """Float64[n, n]."""
    if asked.workload is None:
        return np.tril(np.ones((asked.rounds, asked.rounds)))
    return lower_toeplitz(asked.workload) if asked.workload.ndim == 1 else asked.workload
