"""How far one unit moves C times the data of all rounds, over the rounds in which it may come.

A unit comes in at most `participations` rounds, any two of them at least `separation` rounds apart
(1: in any rounds).  Everything is float64 on the host.

References:
    Choquette-Choo et al., ICML 2023 (X = C^T C and patterns), NeurIPS 2023 (banded); Kalinin and
    Lampert, NeurIPS 2024, Theorem 2 (Toeplitz).
"""

import numpy as np


def most_participations(rounds: int, participations: int, separation: int) -> int:
    """No more than fit into so many rounds."""
    return min(participations, -(-rounds // separation))


def toeplitz_squares(
    column: np.ndarray, rounds: int, participations: int, separation: int
) -> np.ndarray:
    """What each round adds to the squared sensitivity of a lower-triangular Toeplitz matrix.

    Exact where columns that far apart do not overlap, and where the column does not increase and is
    not negative; elsewhere of the least such column above it, which is a bound.

    Args:
        column: Float64[bands], the first column of the matrix, zero beyond.
        rounds: of the run.
        participations: of a unit, at most.
        separation: rounds between two of them, at least.

    Returns:
        Float64[rounds]: its first t add up to the squared sensitivity of t rounds.
    """
    column = np.asarray(column, np.float64)[:rounds]
    if not is_exact(column, separation):
        column = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
    moved = np.zeros(rounds)
    for first in range(0, rounds, separation)[:participations]:
        part = moved[first : first + len(column)]
        part += column[: len(part)]
    return moved**2


def is_exact(column: np.ndarray, separation: int) -> bool:
    """True if the first rounds are the worst for a unit to come in."""
    falls = bool(np.all(column >= 0) and np.all(np.diff(column) <= 0))
    return falls or len(np.trim_zeros(column, "b")) <= separation


def of_epochs(gram: np.ndarray, participations: int, separation: int) -> float:
    """The squared sensitivity where a unit comes only in rounds that are a multiple of `separation`
    apart; exact where no entry of X = C^T C is negative and it may come in all of them.

    Args:
        gram: Float64[rounds, rounds], X.
        participations: of a unit, at most.
        separation: the length of an epoch.
    """
    size = np.abs(gram)
    worst = 0.0
    for offset in range(min(separation, len(gram))):
        own = size[offset::separation, offset::separation]
        rows = np.sort(own, axis=1)[:, ::-1][:, :participations].sum(1)
        worst = max(worst, float(np.sort(rows)[::-1][:participations].sum()))
    return worst


def of_any(gram: np.ndarray, participations: int, separation: int) -> float:
    """A bound of the squared sensitivity over all patterns; exact where no entry of X is negative
    and a unit may come in every round.

    The worst pattern for each row of X, then the worst sum of rows: `of_pattern` twice.
    """
    size = np.abs(gram)
    return float(
        of_pattern(of_pattern(size, participations, separation), *(participations, separation))
    )


def of_pattern(values: np.ndarray, participations: int, separation: int) -> np.ndarray:
    """The largest sum of `values` [..., rounds] >= 0 over a pattern."""
    rounds = values.shape[-1]
    # best[i][k]: from round i on, with k participations left
    nothing = np.zeros((*values.shape[:-1], participations + 1))
    best = [nothing] * (rounds + separation)
    for i in range(rounds - 1, -1, -1):
        here = best[i + 1].copy()
        taken = values[..., i, None] + best[i + separation][..., :-1]
        here[..., 1:] = np.maximum(here[..., 1:], taken)
        best[i] = here
        best[i + separation] = None  # no longer needed
    return best[0][..., -1]
