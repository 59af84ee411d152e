"""The later rounds of a strategy, as the accountant of a plan reads them that went on from
another."""

from typing import Any

import numpy as np

from ....core.records import record, static
from . import sensitivities
from .strategy import Strategy
from .toeplitz import Toeplitz


@record
class Rest(Strategy):
    """The columns of C from round `first` on: what reaches somebody who added nothing before."""

    of: Any = None  # a Strategy; with a default, since fields of the base have one
    first: int = static(default=0)

    def words(self) -> str:
        return f"{self.of.words()}, from round {self.first} on"

    @property
    def width(self) -> int:
        return self.of.width

    def matrix(self) -> np.ndarray:
        return self.of.matrix()[:, self.first :]

    def says_what_it_draws(self) -> bool:
        return self.of.says_what_it_draws()

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        if isinstance(self.of, Toeplitz):  # the columns are the same
            return self.of.squared_sensitivities(rounds, separation)
        columns = self.of._until(self.first + rounds)[:, self.first :]
        participations = sensitivities.most_participations(rounds, rounds, separation)
        square = sensitivities.of_epochs(columns.T @ columns, participations, separation)
        return np.full(rounds, square)

    def largest_column(self) -> float:
        return self.of.largest_column()


def after(strategy: Strategy, first: int) -> Strategy:
    """The strategy of the rounds from `first` on."""
    return Rest(max(strategy.rounds - first, 0), strategy.separation, strategy, int(first))
