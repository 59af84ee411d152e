"""A strategy that begins anew after so many rounds: short trees in place of one high one."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....core import checks
from ....core.records import record, static
from . import sensitivities
from .strategy import Strategy

MANY = 2048  # rounds of a copy, beyond which no table of pairs of them is made


@record
class Restarted(Strategy):
    """Copies of one strategy on the diagonal of C."""

    of: Any = None  # a Strategy; with a default, since fields of the base have one
    normals: int = static(default=1)  # that one copy draws

    def words(self) -> str:
        return f"{self.of.words()}, restarted every {self.of.rounds} rounds"

    @property
    def width(self) -> int:
        return self.of.width

    @property
    def steady(self) -> bool:
        return self.of.steady

    @property
    def _copies(self) -> int:
        return -(-self.rounds // self.of.rounds)

    def matrix(self) -> np.ndarray:
        return self._until(self.rounds)

    def _until(self, rounds: int) -> np.ndarray:
        whole, rest = divmod(rounds, self.of.rounds)
        blocks = [self.of.matrix()] * whole
        return _diagonal([*blocks, self.of._until(rest)] if rest else blocks)

    def noising(self) -> np.ndarray:
        one = self.of.noising()
        whole = _diagonal([one] * self._copies)[: self.rounds]
        # what lies beyond the last round counts as drawn where draws are not those of rounds
        return whole[:, : self.rounds] if one.shape[0] == one.shape[1] else whole

    def errors(self) -> np.ndarray:
        one = self.of.errors()
        before = np.arange(self._copies)[:, None] * one[-1]
        return (before + one).reshape(-1)[: self.rounds]

    def says_what_it_draws(self) -> bool:
        """Of copies that share no normals."""
        return self.of.says_what_it_draws() and self.normals >= self.of.noising().shape[1]

    def draws(self, round_: Any) -> tuple[Any, ...]:
        copy, within = round_ // self.of.rounds, round_ % self.of.rounds
        index, weight, count = self.of.draws(within)
        return jnp.asarray(index, jnp.int32) + copy * self.normals, weight, count

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        """The most over the groups of rounds that are `separation` apart; for copies of many
        rounds the sum of the most in each, which is a bound."""
        length = self.of.rounds
        copies = -(-rounds // length)
        if length > MANY:
            one = self.of.squared_sensitivities(min(length, rounds), separation)
            before = np.arange(copies)[:, None] * one[-1]
            return (before + one).reshape(-1)[:rounds]
        rest = rounds - (copies - 1) * length
        whole = _of_groups(self.of.matrix(), separation)
        last = _of_groups(self.of._until(rest), separation)
        group = (np.arange(separation)[:, None] - np.arange(copies) * length) % separation
        ends = whole[group[:, :-1], -1]  # [group of the run, copy]
        before = np.cumsum(ends, axis=1) - ends
        squares = (before[..., None] + whole[group[:, :-1]]).reshape(separation, -1)
        squares = np.hstack([squares, ends.sum(1)[:, None] + last[group[:, -1]]])
        return np.maximum.accumulate(squares.max(0))

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        participations = self._patterns("sensitivity", participations, separation)
        everywhere = -(-self.rounds // separation)
        if epochs and participations == everywhere:
            return float(np.sqrt(self.squared_sensitivities(self.rounds, separation)[-1]))
        most = sensitivities.most_participations(self.of.rounds, participations, separation)
        one = [
            self.of.sensitivity(k, separation, epochs=epochs) ** 2 if k else 0.0
            for k in range(most + 1)
        ]
        best = np.zeros(participations + 1)  # of so many participations in the copies so far
        for _ in range(self._copies):
            best = np.array(
                [
                    max(best[k - here] + one[here] for here in range(min(k, most) + 1))
                    for k in range(participations + 1)
                ]
            )
        return float(np.sqrt(best[-1]))

    def largest_column(self) -> float:
        return self.of.largest_column()


def restarted(strategy: Strategy, rounds: int) -> Strategy:
    """`strategy`, begun anew whenever its rounds are over, for `rounds` in all.

    A client then meets itself in the rounds of one copy only, so what it adds grows with its
    participations in each, while the error of a sum is the sum of the copies' errors.

    Args:
        strategy: of one that draws earlier noise again, such as `tree` or `inverse_banded`.

    Other Parameters:
        rounds: that it covers.

    Raises:
        ValueError: for a strategy that holds buffers, or one of more rounds than these.

    References:
        Kairouz et al., ICML 2021, section 5 (DP-FTRL with tree restarts).

    Example:
        >>> from jfl.privacy.mechanisms.strategies import tree
        >>> restarted(tree(4), 8).errors().tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 2.0]
    """
    where = "strategies.restarted"
    if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        checks.fail(where, "a strategy of jfl.strategies", f"{strategy!r}")
    checks.require_integer(where, rounds=rounds)
    if strategy.memory:
        checks.fail(
            where,
            "a strategy that draws earlier noise again",
            f"{strategy!r}, which holds buffers",
            "Use tree, inverse_banded, square_root or dense.",
        )
    if rounds < strategy.rounds:
        checks.fail(where, f"at least the {strategy.rounds} rounds of the strategy", f"{rounds}")
    normals = strategy.noising().shape[1]
    return Restarted(int(rounds), strategy.separation, strategy, normals)


def _diagonal(blocks: Sequence[np.ndarray]) -> np.ndarray:
    ends = np.cumsum(np.array([block.shape for block in blocks]), axis=0)
    out = np.zeros(ends[-1])
    for block, (row, column) in zip(blocks, ends):
        out[row - block.shape[0] : row, column - block.shape[1] : column] = block
    return out


def _of_groups(matrix: np.ndarray, separation: int) -> np.ndarray:
    """The squared sensitivity of the first 1, 2, ... rounds to who comes in rounds first, first +
    separation, ...: Float64[first, rounds]."""
    gram = np.abs(matrix.T @ matrix)
    length = len(gram)
    out = np.zeros((separation, length))
    for first in range(min(separation, length)):
        here = np.arange(first, length, separation)
        among = gram[np.ix_(here, here)].cumsum(0).cumsum(1).diagonal()
        so_far = np.searchsorted(here, np.arange(length), "right")
        out[first] = np.append(0.0, among)[so_far]
    return out
