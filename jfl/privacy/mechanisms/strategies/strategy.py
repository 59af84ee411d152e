"""What a strategy is: the matrix C by which noise is correlated over rounds, as data.

Its methods about privacy and error are NumPy's, in float64, on the host; `draws` and `mix` are what
a round computes, in float32, traced.  Two strategies of one shape differ in their numbers alone, so
a sweep over them is one program.
"""

from typing import Any

import numpy as np

from ....core import checks
from ....core.records import record, static
from . import sensitivities


@record
class Strategy:
    """A lower-triangular C: what rounds release is C^-1 (C x + z), with x their sums and z fresh
    noise.  The base of all of them; made by the functions of jfl.strategies."""

    rounds: int = static(default=1)  # that it covers
    separation: int = static(default=1)  # rounds between participations, for which it was made

    def __repr__(self) -> str:
        return f"<{self.words()}, {self.rounds} rounds>"

    # --- of each kind

    def words(self) -> str:
        """What it is, in a few words."""
        return type(self).__name__.lower()

    @property
    def width(self) -> int:
        """Bands of C: how many rounds a contribution is seen in."""
        return self.rounds

    @property
    def memory(self) -> int:
        """Buffers of the size of a release that a run keeps; 0 where earlier noise is drawn
        again."""
        return 0

    @property
    def steady(self) -> bool:
        """True if nearly every round draws as many normals as `draws` has room for."""
        return False

    def matrix(self) -> np.ndarray:
        """C, Float64[rounds, rounds]; of trees, whose rows are nodes, Float64[nodes, rounds]."""
        raise NotImplementedError

    def noising(self) -> np.ndarray:
        """M, Float64[rounds, draws]: the noise of round t is sum_j M[t, j] z_j.  C^-1 where C is
        square."""
        return np.linalg.inv(self.matrix())

    def draws(self, round_: Any) -> tuple[Any, ...]:
        """Which fresh normals a round draws, where there is no memory.

        Returns:
            Int32[width] and Float32[width], numbers of draws and their weights, the round's own
            first; and how many of them count.
        """
        raise NotImplementedError

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        """The noise of a round from its fresh normals and `held`, [memory, ...]; and what is held
        then."""
        raise NotImplementedError

    def says_what_it_draws(self) -> bool:
        """True if the C of which an accountant reads is that of the noise which a round draws; a
        strategy with numbers that were changed by hand need not be."""
        return True

    # --- of all

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        """The squared sensitivity of the first 1, 2, ... `rounds` rounds for a unit that comes in
        rounds that are multiples of `separation` apart, Float64[rounds]; where only that of all is
        known, it stands for each."""
        matrix = self._until(rounds)
        participations = sensitivities.most_participations(rounds, rounds, separation)
        square = sensitivities.of_epochs(matrix.T @ matrix, participations, separation)
        return np.full(rounds, square)

    def _until(self, rounds: int) -> np.ndarray:
        return self.matrix()[:rounds, :rounds]

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        """How far one unit moves C x at most, in Euclidean norm, where its contribution to a round
        has norm at most 1.

        Args:
            participations: rounds in which it comes, at most.
            separation: any two of them are at least so many rounds apart; 1: any rounds.
            epochs: whether they are multiples of `separation` apart.

        Returns:
            The number itself for C with Toeplitz columns that fall and for banded C, elsewhere a
            bound that is close.
        """
        participations = self._patterns("sensitivity", participations, separation)
        gram = self.matrix().T @ self.matrix()
        found = sensitivities.of_epochs if epochs else sensitivities.of_any
        return float(np.sqrt(found(gram, participations, separation)))

    def largest_column(self) -> float:
        """The sensitivity to one participation."""
        return self.sensitivity()

    def errors(self) -> np.ndarray:
        """Float64[rounds]: the variance of the noise in the sum of the first 1, 2, ... rounds, in
        that of fresh noise."""
        return np.square(np.cumsum(self.noising(), axis=0)).sum(1)

    def rmse(self, participations: int = 1, separation: int = 1) -> float:
        """Root mean squared error of the sums of the first 1, 2, ... rounds at equal privacy: the
        root of the mean of `errors`, times the sensitivity.

        Strategies are compared by it without training.

        Example:
            >>> import jfl
            >>> round(jfl.strategies.identity(16).rmse(), 4)
            2.9155
        """
        return float(np.sqrt(self.errors().mean()) * self.sensitivity(participations, separation))

    def _patterns(self, where: str, participations: int, separation: int) -> int:
        checks.require_integer(
            f"strategies.{where}", participations=participations, separation=separation
        )
        return sensitivities.most_participations(self.rounds, participations, separation)
