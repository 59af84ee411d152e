"""Power series, the first columns of Toeplitz matrices: Float64[n] on the host."""

import numpy as np


def square_root_series(n: int) -> np.ndarray:
    """The series of 1 / sqrt(1 - x): 1, 1/2, 3/8, ..."""
    k = np.arange(1, n, dtype=np.float64)
    return np.concatenate([np.ones(1), np.cumprod((2 * k - 1) / (2 * k))])[:n]


def inverse(series: np.ndarray, n: int) -> np.ndarray:
    """The first n terms of 1 / series.

    >>> inverse(np.array([1.0, -0.5]), 4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """
    series = np.asarray(series, np.float64)
    out = np.zeros(n)
    out[0] = 1 / series[0]
    for t in range(1, n):
        m = min(t, len(series) - 1)
        out[t] = -(series[1 : m + 1] @ out[t - m : t][::-1]) / series[0]
    return out
