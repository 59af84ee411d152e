"""Binary trees over rounds: the first of the strategies (DP-FTRL)."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ....core import checks
from ....core.records import record, static
from .strategy import Strategy
from .toeplitz import same


@record
class Tree(Strategy):
    """Sums of 1, 2, 4, ... rounds that begin at a multiple of their length, each with noise of its
    own, added up to the sum of all rounds so far.

    Node (height, start) has the number 2 start + 2^height - 1, by which its noise is drawn.
    """

    @property
    def heights(self) -> int:
        """Of the nodes that are complete within the rounds."""
        return self.rounds.bit_length()

    def _nodes(self) -> list[tuple[int, int]]:
        """(height, start) of all complete nodes."""
        return [
            (height, start)
            for height in range(self.heights)
            for start in range(0, self.rounds - 2**height + 1, 2**height)
        ]

    def matrix(self) -> np.ndarray:
        nodes = self._nodes()
        out = np.zeros((len(nodes), self.rounds))
        for row, (height, start) in zip(out, nodes):
            row[start : start + 2**height] = 1.0
        return out

    def _until(self, rounds: int) -> np.ndarray:
        nodes = self._nodes()
        inside = [start + 2**height <= rounds for height, start in nodes]
        return self.matrix()[inside, :rounds]

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        """Each node holds as many of a unit's contributions as rounds of its are in it: counted,
        without the matrix."""
        starts = [np.arange(0, rounds - 2**h + 1, 2**h) for h in range(rounds.bit_length())]
        ends = np.concatenate([start + 2**h for h, start in enumerate(starts)])
        starts = np.concatenate(starts)
        worst = 0
        for first in range(min(separation, rounds)):
            inside = (ends - 1 - first) // separation - (starts - 1 - first) // separation
            worst = max(worst, int(np.square(inside).sum()))
        return np.full(rounds, float(worst))

    def errors(self) -> np.ndarray:
        return np.array([float(t.bit_count()) for t in range(1, self.rounds + 1)])

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        participations = self._patterns("sensitivity", participations, separation)
        if participations == 1:
            return float(np.sqrt(self.heights))
        return super().sensitivity(participations, separation, epochs=epochs)

    def noising(self) -> np.ndarray:
        out = np.zeros((self.rounds, 2 * self.rounds))
        for t, row in enumerate(out):
            index, weight, count = self._draws(t + 1, np)
            row[index[:count]] = weight[:count]
        return out

    def draws(self, round_: Any) -> tuple[Any, ...]:
        index, weight, count = self._draws(round_ + 1, jnp)
        return index.astype(jnp.int32), weight.astype(jnp.float32), count

    def _draws(self, t: Any, xp: Any) -> tuple[Any, Any, Any]:
        """Of the t-th round, from 1: the node that it completes, less the smaller ones before it,
        which the sum of t - 1 rounds was made of."""
        height = _trailing_zeros(t, xp)
        below = xp.arange(self.heights)
        length = xp.left_shift(1, below)
        first = 2 * (t - xp.left_shift(1, height)) + xp.left_shift(1, height) - 1
        rest = 2 * (t - 2 * length) + length - 1
        index = xp.concatenate([xp.reshape(first, (1,)), rest])
        weight = xp.concatenate([xp.ones(1), -xp.ones(self.heights)])
        return index, weight, height + 1


@record
class EfficientTree(Tree):
    """The tree, each node's sum estimated from its own noise and that of all nodes below it."""

    table: Any = None  # Float64[rounds, draws]
    most: int = static(default=1)  # draws of a round, at most

    def words(self) -> str:
        return "efficient tree"

    def noising(self) -> np.ndarray:
        return np.asarray(self.table, np.float64)

    def errors(self) -> np.ndarray:
        return Strategy.errors(self)

    def says_what_it_draws(self) -> bool:
        table = self.noising()
        return same(table, _estimates(self.rounds)) and (table != 0).sum(1).max() <= self.most

    def draws(self, round_: Any) -> tuple[Any, ...]:
        row = jnp.asarray(self.table, jnp.float32)[jnp.minimum(round_, self.rounds - 1)]
        index = jnp.nonzero(row, size=self.most, fill_value=0)[0].astype(jnp.int32)
        return index, row[index], (row != 0).sum()


def tree(rounds: int, *, efficient: bool = False) -> Strategy:
    """The binary tree: the sum of t rounds has the noise of as many nodes as t has binary ones.

    Args:
        efficient: whether what is below a node counts in its estimate (Honaker's, of the past
            alone): less noise, at the same privacy; a round then draws the noise of up to twice as
            many nodes as there were rounds, so for a few hundred rounds.

    Other Parameters:
        rounds: that it covers.

    References:
        Dwork et al., STOC 2010; Chan et al., 2011; Honaker, 2015; Kairouz et al., ICML 2021.

    Example:
        >>> tree(8).errors().tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    """
    checks.require_integer("strategies.tree", rounds=rounds)
    checks.require_one_of("strategies.tree", (False, True), efficient=efficient)
    if not efficient:
        return Tree(int(rounds))
    table = _estimates(int(rounds))
    return EfficientTree(int(rounds), 1, table, int((table != 0).sum(1).max()))


def _estimates(rounds: int) -> np.ndarray:
    """How much of each node's noise a round releases, Float64[rounds, 2 rounds]."""

    def node(height: int, start: int) -> np.ndarray:
        """The noise of the best estimate of a node's sum."""
        own = np.zeros(2 * rounds)
        own[2 * start + 2**height - 1] = 1.0
        if height == 0:
            return own
        share = 1 / (2 - 2.0**-height)
        halves = known[height - 1, start] + known[height - 1, start + 2 ** (height - 1)]
        return share * own + (1 - share) * halves

    known, prefix = {}, np.zeros((rounds + 1, 2 * rounds))
    for t in range(1, rounds + 1):
        for height in range(_trailing_zeros(t, np) + 1):
            start = t - 2**height
            known[height, start] = node(height, start)
        at = 0
        for height in range(t.bit_length() - 1, -1, -1):
            if t >> height & 1:
                prefix[t] += known[height, at]
                at += 2**height
    return np.diff(prefix, axis=0)


def _trailing_zeros(t: Any, xp: Any) -> Any:
    """Int[], of t >= 1."""
    return sum(xp.where(t % 2**k == 0, 1, 0) for k in range(1, 31))
