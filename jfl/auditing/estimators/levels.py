"""Checks of the levels that every estimator is asked for: delta, and a confidence."""

from ...core import checks


def check_delta(where: str, delta: float, *, zero: bool = True) -> None:
    """Refuse a delta outside [0, 1), or outside (0, 1) unless `zero`.

    Example:
        >>> check_delta("one_run", 1e-5)
    """
    checks.require_nonnegative(where, single=True, delta=delta)
    if not (0 <= delta < 1 if zero else 0 < delta < 1):
        checks.fail(where, f"delta in {'[' if zero else '('}0, 1)", f"delta={delta!r}")


def check_confidence(where: str, confidence: float) -> None:
    """Refuse a confidence outside (0, 1).

    Example:
        >>> check_confidence("one_run", 0.95)
    """
    checks.require_positive(where, single=True, confidence=confidence)
    if not confidence < 1:
        checks.fail(
            where,
            "confidence in (0, 1)",
            f"confidence={confidence!r}",
            "95 % is 0.95; no number of canaries gives certainty.",
        )
