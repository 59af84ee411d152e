"""Strategies whose C is a Toeplitz matrix: what happens after a round does not depend on when it
was."""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from ....core import checks
from ....core.options import Setting
from ....core.records import record, static
from . import optimal, sensitivities
from .series import inverse, square_root_series
from .strategy import Strategy

# by default an accelerator may round the noise before it multiplies: a GPU to 10 bits, a TPU to 7
FULL = lax.Precision.HIGHEST


@record
class Toeplitz(Strategy):
    """C by its first column, the noise of earlier rounds drawn again (`Again`) or held."""

    column: Any = None  # Float64[bands], first 1

    @property
    def width(self) -> int:
        return min(len(self.column), self.rounds)

    def _column(self) -> np.ndarray:
        return np.pad(np.asarray(self.column, np.float64), (0, self.rounds))[: self.rounds]

    def matrix(self) -> np.ndarray:
        return lower_toeplitz(self._column())

    def first_noise(self) -> np.ndarray:
        """The first column of C^-1, Float64[rounds]."""
        return inverse(self._column(), self.rounds)

    def noising(self) -> np.ndarray:
        return lower_toeplitz(self.first_noise())

    def errors(self) -> np.ndarray:
        return np.cumsum(np.cumsum(self.first_noise()) ** 2)

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        squares = sensitivities.toeplitz_squares(self.column, rounds, rounds, separation)
        return np.cumsum(squares)

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        participations = self._patterns("sensitivity", participations, separation)
        column = np.asarray(self.column, np.float64)
        squares = sensitivities.toeplitz_squares(column, self.rounds, participations, separation)
        return float(np.sqrt(squares.sum()))


@record
class Again(Toeplitz):
    """A C^-1 of few bands, or of all: earlier normals are drawn again, and nothing is held."""

    bands: Any = None  # Float64[p], the first column of C^-1

    def words(self) -> str:
        return "identity" if len(self.bands) == 1 else f"inverse of {len(self.bands)} bands"

    def says_what_it_draws(self) -> bool:
        return same(self._column(), inverse(self.bands, self.rounds))

    @property
    def steady(self) -> bool:
        return 4 * len(self.bands) <= self.rounds

    def first_noise(self) -> np.ndarray:
        return np.pad(np.asarray(self.bands, np.float64), (0, self.rounds))[: self.rounds]

    def draws(self, round_: Any) -> tuple[Any, ...]:
        back = jnp.arange(len(self.bands), dtype=jnp.int32)
        weight = jnp.asarray(self.bands, jnp.float32)
        return round_ - back, weight, jnp.minimum(round_ + 1, len(self.bands))


@record
class Banded(Toeplitz):
    """A C of few bands: the noise of as many rounds, less one, is held."""

    def words(self) -> str:
        return f"{len(self.column)} bands"

    @property
    def memory(self) -> int:
        return len(self.column) - 1

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        weight = jnp.asarray(self.column, jnp.float32)
        mixed = (fresh - jnp.tensordot(weight[1:], held, 1, precision=FULL)) / weight[0]
        return mixed, jnp.concatenate([mixed[None], held[:-1]])


def exponentials(rounds: int, decay: ArrayLike, weight: ArrayLike) -> np.ndarray:
    """1, then sum_j weight_j decay_j^(t - 1), Float64[rounds]."""
    powers = np.asarray(decay, np.float64) ** np.arange(max(rounds - 1, 0))[:, None]
    return np.concatenate([np.ones(1), powers @ np.asarray(weight, np.float64)])[:rounds]


def same(one: ArrayLike, other: ArrayLike) -> bool:
    """True if two tables are equal up to rounding."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-6, atol=1e-9)


def lower_toeplitz(column: np.ndarray) -> np.ndarray:
    """The lower-triangular matrix with this first column, Float64[n, n]."""
    n = len(column)
    back = np.arange(n)[:, None] - np.arange(n)
    return np.where(back >= 0, column[np.maximum(back, 0)], 0.0)


def identity(rounds: int) -> Strategy:
    """Noise of its own in each round: `jfl.gaussian`, as a strategy.

    Other Parameters:
        rounds: that it covers.

    Example:
        >>> identity(9).errors().mean()
        np.float64(5.0)
    """
    checks.require_integer("strategies.identity", rounds=rounds)
    one = np.ones(1)
    return Again(int(rounds), 1, one, one)


def square_root(rounds: int) -> Strategy:
    """The square root of the matrix of prefix sums, for one participation in any round.

    Each round draws the noise of all rounds before it again: for a few hundred rounds.

    Other Parameters:
        rounds: that it covers.

    References:
        Fichtenberger, Henzinger, Upadhyay, ICML 2023, "Constant matters".

    Example:
        >>> square_root(4).matrix()[:, 0].tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    checks.require_integer("strategies.square_root", rounds=rounds)
    column = square_root_series(rounds)
    return Again(int(rounds), 1, column, inverse(column, rounds))


def banded_toeplitz(
    rounds: int,
    bands: Annotated[int, Setting("noise_bands", default=8)],
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
) -> Strategy:
    """The best Toeplitz C of few bands: with bands <= separation its columns do not overlap, and
    participations add up as if noise were independent.

    A run holds the noise of bands - 1 rounds.

    Args:
        bands: of C; 1 is `identity`.

    Other Parameters:
        rounds: that it covers.
        participations: of a unit, at most, for which C is best.
        separation: rounds between two of them, at least.
        workload: "prefix", sums over rounds; or Float64[rounds], how much of a round is in what is
            wanted 0, 1, ... rounds later (`momentum`).
        error: "mean" or "max", over rounds.

    References:
        Choquette-Choo et al., NeurIPS 2023, "(Amplified) banded matrix factorization";
        McKenna, 2024, "Scaling up the banded matrix factorization mechanism".

    Example:
        >>> round(banded_toeplitz(16, 4).rmse(), 6)
        1.93753
    """
    asked = optimal.asked(
        "strategies.banded_toeplitz", rounds, participations, separation, workload, error
    )
    _bands("strategies.banded_toeplitz", rounds, bands)
    return Banded(asked.rounds, asked.separation, optimal.banded(asked, int(bands)))


def inverse_banded(
    rounds: int,
    bands: Annotated[int, Setting("noise_bands", default=8)],
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
    optimise: bool = True,
) -> Strategy:
    """A C whose inverse has few bands: the noise of so many rounds is drawn again, and nothing is
    held.

    Args:
        bands: of C^-1; 1 is `identity`.

    Other Parameters:
        rounds: that it covers.
        participations: as in `banded_toeplitz`.
        separation: as in `banded_toeplitz`.
        workload: as in `banded_toeplitz`.
        error: as in `banded_toeplitz`.
        optimise: False: the first bands of the inverse of `square_root` (BISR).

    References:
        Kalinin et al., 2025, "Back to square roots" (arXiv 2505.12128).

    Example:
        >>> round(inverse_banded(500, 4, optimise=False).rmse(5, 100), 4)
        14.3994
    """
    where = "strategies.inverse_banded"
    checks.require_one_of(where, (False, True), optimise=optimise)
    asked = optimal.asked(where, rounds, participations, separation, workload, error)
    _bands(where, rounds, bands)
    first = inverse(square_root_series(rounds), rounds)[:bands]
    noise = optimal.inverse_banded(asked, first) if optimise else first
    return Again(asked.rounds, asked.separation, inverse(noise, asked.rounds), noise)


def _bands(where: str, rounds: int, bands: int) -> None:
    checks.require_integer(where, bands=bands)
    if bands > rounds:
        checks.fail(where, f"bands <= rounds={rounds}", f"bands={bands}")


def momentum(rounds: int, beta: float, learning_rates: ArrayLike | None = None) -> np.ndarray:
    """The workload of gradient descent with momentum: what of a round is in the model later.

    Args:
        rounds: that it covers.
        beta: of the momentum, in [0, 1).
        learning_rates: Float[rounds]; None: the same in every round.

    Returns:
        Float64[rounds] without learning rates, else Float64[rounds, rounds]: how much of round j is
        in the model after round t.

    Example:
        >>> momentum(3, 0.5).tolist()
        [1.0, 1.5, 1.75]
    """
    checks.require_integer("strategies.momentum", rounds=rounds)
    checks.require_nonnegative("strategies.momentum", single=True, beta=beta)
    if not beta < 1:
        checks.fail("strategies.momentum", "beta < 1", f"beta={beta!r}")
    steps = beta ** np.arange(rounds, dtype=np.float64)
    if learning_rates is None:
        return np.cumsum(steps)
    rates = checks.as_array("strategies.momentum", "learning_rates", learning_rates)
    if rates.shape != (rounds,):
        checks.fail("strategies.momentum", f"learning_rates [{rounds}]", f"shape {rates.shape}")
    return np.cumsum(rates[:, None] * lower_toeplitz(steps), axis=0)


@record
class Sums(Toeplitz):
    """A C whose inverse is a few decaying sums of earlier noise (BLT): those are held."""

    decay: Any = None  # Float64[buffers], theta
    weight: Any = None  # Float64[buffers], omega
    buffers: int = static(default=1)

    def words(self) -> str:
        return f"BLT of {self.buffers} buffers"

    def says_what_it_draws(self) -> bool:
        sizes = {np.shape(self.decay), np.shape(self.weight)}
        column = exponentials(self.rounds, self.decay, self.weight)
        return sizes == {(self.buffers,)} and same(self.column, column)

    @property
    def memory(self) -> int:
        return self.buffers

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        weight, decay = (jnp.asarray(v, jnp.float32) for v in (self.weight, self.decay))
        mixed = fresh - jnp.tensordot(weight, held, 1, precision=FULL)
        shape = (self.buffers,) + (1,) * fresh.ndim
        return mixed, decay.reshape(shape) * held + mixed[None]


def blt(
    rounds: int,
    buffers: int = 3,
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
) -> Strategy:
    """Buffered linear Toeplitz: C has a column of `buffers` decaying exponentials, for runs of any
    length with the memory of that many models.

    Args:
        buffers: exponentials of BLT; two to five are enough.

    Other Parameters:
        rounds: that it covers.
        participations: as in `banded_toeplitz`.
        separation: as in `banded_toeplitz`.
        workload: as in `banded_toeplitz`.
        error: as in `banded_toeplitz`.

    References:
        Dvijotham et al., FOCS 2024 (arXiv 2404.16706); McMahan et al., 2024, "A hassle-free
        algorithm for private learning in practice" (arXiv 2408.08868).

    Example:
        >>> made = blt(100, 2, error="max")
        >>> round(float(made.errors()[-1]) * made.sensitivity() ** 2, 3)
        6.434
    """
    where = "strategies.blt"
    asked = optimal.asked(where, rounds, participations, separation, workload, error)
    checks.require_integer(where, max_value=16, buffers=buffers)
    decay, weight = optimal.blt(asked, int(buffers))
    column = exponentials(asked.rounds, decay, weight)
    return Sums(asked.rounds, asked.separation, column, decay, weight, int(buffers))
