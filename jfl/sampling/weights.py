"""Weights of clients in the aggregate."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core import checks

__all__ = ["impact"]


def impact(ratios: Sequence[float], groups: Sequence[int]) -> np.ndarray:
    """Return client weights that are equal within a group and proportional to the group's ratio.

    A client of group g has weight ratios[g] / sum_h(ratios[h] groups[h]).

    Args:
        ratios: [G], the relative weight of a client of each group.
        groups: [G], the number of clients of each group.

    Returns:
        Float64[C], for C clients in the order of the groups; the sum is 1.

    Privacy:
        `plan(weights=...)` assumes that weights are public: do not compute ratios from the data of
        clients.

    Raises:
        ValueError: unless ratios are >= 0 with a positive sum and groups are integers of at least
            1.

    References:
        Talaei and Izadi, 2024.

    Example:
        >>> impact((0, 1, 2), (2, 1, 1)).round(4).tolist()
        [0.0, 0.0, 0.3333, 0.6667]
    """
    where = "weights.impact"
    checks.require_nonnegative(where, ratios=ratios)
    if np.ndim(ratios) != 1 or np.shape(ratios) != checks.as_array(where, "groups", groups).shape:
        checks.fail(where, "a ratio and a size for each group", f"{ratios!r} and {groups!r}")
    each: dict[str, Any] = {f"groups[{group}]": count for group, count in enumerate(groups)}
    checks.require_integer(where, **each)
    shares, sizes = np.asarray(ratios, np.float64), np.asarray(groups)
    total: dict[str, Any] = {"sum of ratios": shares.sum()}
    checks.require_positive(where, **total)
    return np.repeat(shares / (shares @ sizes), sizes)
