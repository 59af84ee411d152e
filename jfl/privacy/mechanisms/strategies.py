"""Strategies of correlated noise, for `jfl.correlated`.

A strategy is a lower-triangular matrix C.  With x the sums of all rounds and z fresh noise, the
rounds release C^-1 (C x + z), which is one Gaussian release of C x.  A strategy provides the
sensitivity of C x to one unit, which determines privacy, and the noise of each round.

| | C | work in a round | use |
|---|---|---|---|
| `identity` | identity matrix | draws independent noise | comparison |
| `tree` | binary tree | draws 2 nodes on average | comparison with DP-FTRL |
| `square_root` | full | regenerates all earlier noise | a few hundred rounds |
| `banded_toeplitz` | few bands | stores bands - 1 buffers | few participations; cyclic Poisson |
| `inverse_banded` | full | regenerates `bands` rounds of noise | no memory, any run |
| `blt` | full | stores 2 to 5 buffers | long runs |
| `restarted` | copies of another C | as the other C | bounded error with many participations |
| `dense` | full | regenerates all earlier noise | the smallest possible error |

Methods about privacy and error run on the host, in NumPy's float64.  `draws` and `mix` run inside a
round and are traced, in float32.  Strategies with equal shapes differ only in their numbers, so a
sweep over them is one program.

Several functions share these arguments: `participations`, the maximum number of rounds in which one
unit participates; `separation`, the minimum difference between the numbers of two rounds in which
it participates (1 allows consecutive rounds); `epochs`, whether all these differences are multiples
of `separation`.

References:
    Choquette-Choo et al., ICML 2023 (X = C^T C and patterns), NeurIPS 2023 (banded); Kalinin and
    Lampert, NeurIPS 2024, Theorem 2 (Toeplitz).
"""

from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from scipy import linalg

from ...core import checks
from ...core.options import Setting
from ...core.records import record, static
from . import strategy_search as search
from .strategy_search import inverse, lower_toeplitz, square_root_series

__all__ = [
    "Strategy",
    "banded_toeplitz",
    "blt",
    "dense",
    "identity",
    "inverse_banded",
    "momentum",
    "restarted",
    "square_root",
    "tree",
]

# By default an accelerator may round noise before it multiplies: a GPU to 10 bits, a TPU to 7.
FULL_PRECISION = lax.Precision.HIGHEST
# Restarted copies of up to this number of rounds get an exact sensitivity, from a matrix.
MAX_EXACT_ROUNDS = 2048


@record
class Strategy:
    """A lower-triangular matrix C, made by a function of `jfl.strategies`.

    This base class works for any matrix.  Subclasses define C and compute its noise.
    """

    rounds: int = static(default=1)  # number of rounds that it covers
    separation: int = static(default=1)  # rounds between participations for which it is optimised

    def __repr__(self) -> str:
        return f"<{self.describe()}, {self.rounds} rounds>"

    def describe(self) -> str:
        """Return a short name of this kind of strategy."""
        return type(self).__name__.lower()

    @property
    def width(self) -> int:
        """The number of bands of C: the number of rounds that one contribution affects."""
        return self.rounds

    @property
    def memory(self) -> int:
        """The number of stored buffers of the size of a release; 0 if rounds regenerate earlier
        noise."""
        return 0

    @property
    def is_steady(self) -> bool:
        """Whether nearly every round needs all the normals that `draws` returns."""
        return False

    def matrix(self) -> np.ndarray:
        """Return C, Float64[rounds, rounds]; for trees, whose rows are nodes, Float64[nodes,
        rounds]."""
        raise NotImplementedError

    def noising(self) -> np.ndarray:
        """Return M with M C = I, Float64[rounds, draws]: the noise of round t is M[t] @ z."""
        raise NotImplementedError

    def draws(self, round_: Any) -> tuple[Any, ...]:
        """Return the fresh normals that a round needs; only for strategies without memory.

        Returns:
            The numbers of the draws, Int32[n]; their weights, Float32[n]; and the number of draws
            that the round uses: the first of these n, the others are padding.
        """
        raise NotImplementedError

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        """Return the noise of a round and the buffers for the next one; only for strategies with
        memory.

        Args:
            fresh: the fresh normals of the round, one leaf of a release.
            held: the buffers, [memory, ...].
        """
        raise NotImplementedError

    def accounting_matches_noise(self) -> bool:
        """Return whether the accountant's C matches the noise that rounds draw.

        The two differ if somebody changed the numbers of a strategy inconsistently.
        """
        return True

    def matrix_until(self, rounds: int) -> np.ndarray:
        """Return the part of C that the first `rounds` rounds reveal.

        It has the columns of those rounds, and the rows whose noise they use.
        """
        is_used = (self.noising()[:rounds] != 0).any(0)
        return self.matrix()[is_used, :rounds]

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        """Return the squared sensitivity of the first t rounds for each t = 1, ..., `rounds`.

        The result, Float64[rounds], is for a unit that participates in rounds whose numbers differ
        by multiples of `separation`.  Contributions to the first t rounds change C x only through
        the first t columns of C.
        """
        return _squares_by_offset(self.matrix_until(rounds), separation).max(0)

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        """Return the maximum change of C x by one unit, in the Euclidean norm.

        The contribution of the unit to a round has norm at most 1.

        Args:
            participations: the maximum number of rounds in which the unit participates.
            separation: the minimum difference between the numbers of two rounds in which it
                participates.  1 allows consecutive rounds.
            epochs: whether all these differences are multiples of `separation`.

        Returns:
            The exact value for Toeplitz C with at most `separation` bands, or with a decreasing
            first column >= 0; otherwise an upper bound.
        """
        participations = self._max_participations(participations, separation)
        gram = np.abs(self.matrix().T @ self.matrix())
        if not epochs:
            return float(np.sqrt(_worst_square(gram, participations, separation)))
        first_rounds = range(min(separation, self.rounds))
        groups = [gram[first::separation, first::separation] for first in first_rounds]
        return float(np.sqrt(max(_worst_square(g, participations, 1) for g in groups)))

    def largest_column(self) -> float:
        """Return the sensitivity to one participation."""
        return self.sensitivity()

    def errors(self) -> np.ndarray:
        """Return the variance of the noise in the sum of the first t rounds, for each t.

        The result, Float64[rounds], is relative to the variance of fresh noise.
        """
        return np.square(np.cumsum(self.noising(), axis=0)).sum(1)

    def rmse(self, participations: int = 1, separation: int = 1) -> float:
        """Return the root mean squared error of prefix sums, normalised for equal privacy.

        This is the square root of the mean of `errors`, times the sensitivity.  Use it to compare
        strategies without training.

        Example:
            >>> import jfl
            >>> round(jfl.strategies.identity(16).rmse(), 4)
            2.9155
        """
        return float(np.sqrt(self.errors().mean()) * self.sensitivity(participations, separation))

    def _max_participations(self, participations: int, separation: int) -> int:
        """Return the number of these participations that fit into the rounds."""
        where = "strategies.sensitivity"
        checks.require_integer(where, participations=participations, separation=separation)
        return min(participations, -(-self.rounds // separation))


# --- Toeplitz matrices: the effect of a round on later rounds does not depend on its number


def identity(rounds: int) -> Strategy:
    """Return the strategy of independent noise in each round, like `jfl.gaussian`.

    Other Parameters:
        rounds: the number of rounds that it covers.

    Example:
        >>> identity(9).errors().mean()
        np.float64(5.0)
    """
    checks.require_integer("strategies.identity", rounds=rounds)
    one = np.ones(1)
    return Regenerated(int(rounds), 1, one, one)


def square_root(rounds: int) -> Strategy:
    """Return the strategy whose C is the square root of the matrix of prefix sums.

    It suits units that participate once, in any round.  Each round regenerates the noise of all
    rounds before it, so use it for a few hundred rounds.

    Other Parameters:
        rounds: the number of rounds that it covers.

    References:
        Fichtenberger, Henzinger, Upadhyay, ICML 2023, "Constant matters".

    Example:
        >>> square_root(4).matrix()[:, 0].tolist()
        [1.0, 0.5, 0.375, 0.3125]
    """
    checks.require_integer("strategies.square_root", rounds=rounds)
    column = square_root_series(rounds)
    return Regenerated(int(rounds), 1, column, inverse(column, rounds))


def banded_toeplitz(
    rounds: int,
    bands: Annotated[int, Setting("noise_bands", default=8)],
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
) -> Strategy:
    """Return the strategy whose C is the Toeplitz matrix with few bands and the smallest error.

    The error is that of the workload, at equal privacy.  With bands <= separation, the columns of
    one unit's participations do not overlap, and participations add up as with independent noise.
    A run stores the noise of bands - 1 rounds.

    Args:
        bands: the number of bands of C; 1 is `identity`.

    Other Parameters:
        rounds: the number of rounds that it covers.
        participations: the maximum number of participations of a unit for which C is optimised.
        separation: the minimum difference between the numbers of two rounds in which a unit
            participates.
        workload: what training computes from the noisy sums: "prefix" for prefix sums; or
            Float64[rounds], where entry k is the weight of a round in the result k rounds later
            (see `momentum`).
        error: the error to minimise, "mean" or "max" over rounds.

    References:
        Choquette-Choo et al., NeurIPS 2023, "(Amplified) banded matrix factorization"; McKenna,
        2024, "Scaling up the banded matrix factorization mechanism".

    Example:
        >>> round(banded_toeplitz(16, 4).rmse(), 6)
        1.93753
    """
    where = "strategies.banded_toeplitz"
    aim = search.aim(where, rounds, participations, separation, workload, error, bands=bands)
    first = square_root_series(bands)
    return Banded(aim.rounds, aim.separation, search.best_series(aim, first))


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
    """Return a strategy of correlated noise whose matrix C^-1 is Toeplitz with few bands.

    Round t adds row t of C^-1 z, where z is independent Gaussian noise of all rounds.  A round
    regenerates the noise of `bands` rounds, and a run stores nothing.

    Args:
        bands: the number of bands of C^-1; 1 is `identity`.

    Other Parameters:
        rounds: the number of rounds that it covers.
        participations: as in `banded_toeplitz`.
        separation: as in `banded_toeplitz`.
        workload: as in `banded_toeplitz`.
        error: as in `banded_toeplitz`.
        optimise: True to use the bands that minimise the error at equal privacy for the other
            arguments.  False to use the first bands of the inverse of `square_root` (BISR).

    References:
        Kalinin et al., 2025, "Back to square roots" (arXiv 2505.12128).

    Example:
        >>> round(inverse_banded(500, 4, optimise=False).rmse(5, 100), 4)
        14.3994
    """
    where = "strategies.inverse_banded"
    checks.require_one_of(where, (False, True), optimise=optimise)
    aim = search.aim(where, rounds, participations, separation, workload, error, bands=bands)
    first = inverse(square_root_series(rounds), rounds)[:bands]
    noise = search.best_series(aim, first, is_inverse=True) if optimise else first
    return Regenerated(aim.rounds, aim.separation, inverse(noise, aim.rounds), noise)


def blt(
    rounds: int,
    buffers: int = 3,
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
    error: str = "mean",
) -> Strategy:
    """Return a buffered linear Toeplitz (BLT) strategy, whose memory does not depend on the rounds.

    The first column of C is a sum of `buffers` decaying exponentials.  A run of any length needs
    the memory of `buffers` models.

    Args:
        buffers: the number of exponentials; two to five are enough.

    Other Parameters:
        rounds: the number of rounds that it covers.
        participations: as in `banded_toeplitz`.
        separation: as in `banded_toeplitz`.
        workload: as in `banded_toeplitz`.
        error: as in `banded_toeplitz`.

    References:
        Dvijotham et al., FOCS 2024 (arXiv 2404.16706); McMahan et al., 2024, "A hassle-free
        algorithm for private learning in practice" (arXiv 2408.08868).

    Example:
        >>> strategy = blt(100, 2, error="max")
        >>> round(float(strategy.errors()[-1]) * strategy.sensitivity() ** 2, 3)
        6.434
    """
    where = "strategies.blt"
    aim = search.aim(where, rounds, participations, separation, workload, error)
    checks.require_integer(where, max_value=16, buffers=buffers)
    decay, weight = search.best_blt(aim, int(buffers))
    column = _exponentials(aim.rounds, decay, weight)
    return Exponentials(aim.rounds, aim.separation, column, decay, weight, int(buffers))


def momentum(rounds: int, beta: float) -> np.ndarray:
    """Return the workload of gradient descent with momentum, Float64[rounds].

    Entry k is the factor with which the gradient of a round has entered the model k rounds later.

    Args:
        rounds: the number of rounds that it covers.
        beta: the momentum, in [0, 1).

    Example:
        >>> momentum(3, 0.5).tolist()
        [1.0, 1.5, 1.75]
    """
    where = "strategies.momentum"
    checks.require_integer(where, rounds=rounds)
    checks.require_nonnegative(where, single=True, beta=beta)
    if not beta < 1:
        checks.fail(where, "beta < 1", f"beta={beta!r}")
    return np.cumsum(beta ** np.arange(rounds, dtype=np.float64))


def _exponentials(rounds: int, decay: ArrayLike, weight: ArrayLike) -> np.ndarray:
    """Return 1, followed by sum_j weight_j decay_j^(t - 1) for t = 1, 2, ...; Float64[rounds]."""
    powers = np.asarray(decay, np.float64) ** np.arange(max(rounds - 1, 0))[:, None]
    return np.concatenate([np.ones(1), powers @ np.asarray(weight, np.float64)])[:rounds]


def _is_same(one: ArrayLike, other: ArrayLike) -> bool:
    """Return whether two tables are equal up to rounding."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-6, atol=1e-9)


@record
class Toeplitz(Strategy):
    """A Toeplitz matrix C, given by its first column."""

    column: Any = None  # Float64[bands], begins with 1

    @property
    def width(self) -> int:
        return min(len(self.column), self.rounds)

    def _padded(self, values: ArrayLike) -> np.ndarray:
        """Return `values` padded with zeros, or cut, to Float64[rounds]."""
        return np.pad(np.asarray(values, np.float64), (0, self.rounds))[: self.rounds]

    def matrix(self) -> np.ndarray:
        return lower_toeplitz(self._padded(self.column))

    def first_noise(self) -> np.ndarray:
        """Return the first column of C^-1, Float64[rounds]."""
        return inverse(self._padded(self.column), self.rounds)

    def noising(self) -> np.ndarray:
        return lower_toeplitz(self.first_noise())

    def errors(self) -> np.ndarray:
        return np.cumsum(np.cumsum(self.first_noise()) ** 2)

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        return np.cumsum(_toeplitz_squares(self.column, rounds, rounds, separation))

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        participations = self._max_participations(participations, separation)
        squares = _toeplitz_squares(self.column, self.rounds, participations, separation)
        return float(np.sqrt(squares.sum()))


@record
class Regenerated(Toeplitz):
    """A Toeplitz matrix C whose noise is regenerated from that of earlier rounds."""

    bands: Any = None  # Float64[p], the first column of C^-1

    def describe(self) -> str:
        return "identity" if len(self.bands) == 1 else f"inverse of {len(self.bands)} bands"

    def accounting_matches_noise(self) -> bool:
        return _is_same(self._padded(self.column), inverse(self.bands, self.rounds))

    @property
    def is_steady(self) -> bool:
        return 4 * len(self.bands) <= self.rounds

    def first_noise(self) -> np.ndarray:
        return self._padded(self.bands)

    def draws(self, round_: Any) -> tuple[Any, ...]:
        back = jnp.arange(len(self.bands), dtype=jnp.int32)
        weight = jnp.asarray(self.bands, jnp.float32)
        return round_ - back, weight, jnp.minimum(round_ + 1, len(self.bands))


@record
class Banded(Toeplitz):
    """A Toeplitz matrix C with few bands; a run stores the noise of bands - 1 rounds."""

    def describe(self) -> str:
        return f"{len(self.column)} bands"

    @property
    def memory(self) -> int:
        return len(self.column) - 1

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        weight = jnp.asarray(self.column, jnp.float32)
        earlier = jnp.tensordot(weight[1:], held, 1, precision=FULL_PRECISION)
        mixed = (fresh - earlier) / weight[0]
        return mixed, jnp.concatenate([mixed[None], held[:-1]])


@record
class Exponentials(Toeplitz):
    """A BLT strategy; a run stores a few decaying sums of earlier noise."""

    decay: Any = None  # Float64[buffers], theta in the papers
    weight: Any = None  # Float64[buffers], omega in the papers
    buffers: int = static(default=1)

    def describe(self) -> str:
        return f"BLT of {self.buffers} buffers"

    def accounting_matches_noise(self) -> bool:
        sizes = {np.shape(self.decay), np.shape(self.weight)}
        column = _exponentials(self.rounds, self.decay, self.weight)
        return sizes == {(self.buffers,)} and _is_same(self.column, column)

    @property
    def memory(self) -> int:
        return self.buffers

    def mix(self, fresh: Any, held: Any) -> tuple[Any, ...]:
        weight, decay = (jnp.asarray(v, jnp.float32) for v in (self.weight, self.decay))
        mixed = fresh - jnp.tensordot(weight, held, 1, precision=FULL_PRECISION)
        shape = (self.buffers,) + (1,) * fresh.ndim
        return mixed, decay.reshape(shape) * held + mixed[None]


# --- any matrix, as a table


def dense(
    rounds: int,
    *,
    participations: int = 1,
    separation: int = 1,
    workload: str | ArrayLike = "prefix",
) -> Strategy:
    """Return the strategy whose C has the smallest mean error, for up to about a thousand rounds.

    A unit participates in rounds whose numbers differ by multiples of `separation`.  The columns of
    C for such rounds are orthogonal, so participations add up as with independent noise.

    Other Parameters:
        rounds: the number of rounds that it covers.
        participations: the maximum number of participations of a unit: 1, or as many as fit.
        separation: the number of which those differences are multiples.
        workload: as in `banded_toeplitz`.

    References:
        Choquette-Choo et al., ICML 2023, "Multi-epoch matrix factorization mechanisms".

    Example:
        >>> round(dense(16).rmse(), 4)
        1.6894
    """
    where = "strategies.dense"
    aim = search.aim(where, rounds, participations, separation, workload, "mean")
    is_once, fits = aim.participations == 1, -(-aim.rounds // aim.separation)
    if not is_once and aim.participations < fits:
        expected = f"participations=1, or all of the {fits} that fit"
        checks.fail(where, expected, f"participations={participations}")
    table = search.best_dense(aim, aim.rounds if is_once else aim.separation)
    return Table(aim.rounds, aim.separation, table, np.linalg.inv(table), aim.rounds)


@record
class Table(Strategy):
    """Any matrix C, stored as a dense matrix, with a dense matrix M such that M C = I.

    Row t of M holds the weights of the draws in the noise of round t; a round regenerates the draws
    that it uses.
    """

    table: Any = None  # Float64[draws, rounds], C
    inverse: Any = None  # Float64[rounds, draws], M
    max_draws: int = static(default=1)  # maximum number of draws in a round

    def describe(self) -> str:
        return "dense" if np.shape(self.table)[0] == self.rounds else "efficient tree"

    def matrix(self) -> np.ndarray:
        return np.asarray(self.table, np.float64)

    def noising(self) -> np.ndarray:
        return np.asarray(self.inverse, np.float64)

    def accounting_matches_noise(self) -> bool:
        table, noising = self.matrix(), self.noising()
        return (
            table.shape == noising.shape[::-1] == (len(table), self.rounds)
            and bool((noising != 0).sum(1).max() <= self.max_draws)
            and _is_same(noising @ table, np.eye(self.rounds))
            and _is_causal(table, noising)
        )

    def draws(self, round_: Any) -> tuple[Any, ...]:
        row = jnp.asarray(self.inverse, jnp.float32)[jnp.minimum(round_, self.rounds - 1)]
        index = jnp.nonzero(row, size=self.max_draws, fill_value=0)[0].astype(jnp.int32)
        return index, row[index], (row != 0).sum()


def _is_causal(table: np.ndarray, noising: np.ndarray) -> bool:
    """Return whether no noise is used before the last contribution that it hides."""
    is_used = (noising != 0).any(0)
    first_use = (noising[:, is_used] != 0).argmax(0)
    last_contribution = table.shape[1] - 1 - (table[is_used, ::-1] != 0).argmax(1)
    return bool((last_contribution <= first_use).all())


# --- binary trees (DP-FTRL)


def tree(rounds: int, *, efficient: bool = False) -> Strategy:
    """Return the strategy in which the rounds are the leaves of a binary tree of noisy sums.

    A node of the tree is the noisy sum of 1, 2, 4, ... consecutive rounds.  A prefix sum of t
    rounds adds up popcount(t) nodes, and contains their noise.

    Args:
        efficient: whether the estimate of a node also uses the nodes below it (Honaker's estimate
            from the past), which gives less noise at the same privacy.  A round then draws the
            noise of up to two nodes for every earlier round, so use it for a few hundred rounds.

    Other Parameters:
        rounds: the number of rounds that it covers.

    References:
        Dwork et al., STOC 2010; Chan et al., 2011; Honaker, 2015; Kairouz et al., ICML 2021.

    Example:
        >>> tree(8).errors().tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 1.0]
    """
    checks.require_integer("strategies.tree", rounds=rounds)
    checks.require_one_of("strategies.tree", (False, True), efficient=efficient)
    plain = BinaryTree(int(rounds))
    if not efficient:
        return plain
    noising = _noise_of_nodes(int(rounds), efficient=True)
    return Table(int(rounds), 1, plain.matrix(), noising, int((noising != 0).sum(1).max()))


@record
class BinaryTree(Strategy):
    """Noisy sums of 1, 2, 4, ... rounds, from which prefix sums are computed.

    Each sum is a node with independent noise, and begins at a multiple of its length.  The node of
    the `length` rounds from `start` on has the number 2 start + length - 1, which addresses its
    noise.
    """

    def describe(self) -> str:
        return "tree"

    def _nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first round and the length of all complete nodes, Int[nodes] each."""
        lengths = [2**height for height in range(self.rounds.bit_length())]
        starts = [np.arange(0, self.rounds - length + 1, length) for length in lengths]
        return np.concatenate(starts), np.repeat(lengths, [len(s) for s in starts])

    def matrix(self) -> np.ndarray:
        start, length = self._nodes()
        round_, out = np.arange(self.rounds), np.zeros((2 * self.rounds, self.rounds))
        is_inside = (start[:, None] <= round_) & (round_ < (start + length)[:, None])
        out[2 * start + length - 1] = is_inside
        return out

    def matrix_until(self, rounds: int) -> np.ndarray:
        # Count all complete nodes, as in the literature, although rounds use only left children.
        return BinaryTree(rounds).matrix()

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        """Return `rounds` copies of the squared sensitivity of all rounds, an upper bound for each.

        A node changes by the number of a unit's participations in its rounds, so no matrix is
        needed.
        """
        start, length = BinaryTree(rounds)._nodes()
        # the number of participations before a round, minus 1
        before = lambda round_, first: (round_ - 1 - first) // separation
        counts = (
            before(start + length, first) - before(start, first)
            for first in range(min(separation, rounds))
        )
        return np.full(rounds, float(max(np.square(count).sum() for count in counts)))

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        if self._max_participations(participations, separation) == 1:
            return float(np.sqrt(self.rounds.bit_length()))
        return super().sensitivity(participations, separation, epochs=epochs)

    def errors(self) -> np.ndarray:
        return np.array([float(t.bit_count()) for t in range(1, self.rounds + 1)])

    def noising(self) -> np.ndarray:
        return _noise_of_nodes(self.rounds)

    def draws(self, round_: Any) -> tuple[Any, ...]:
        # The difference of two prefix sums: the largest node that the round completes, minus the
        # smaller nodes that it replaces.
        end = jnp.asarray(round_) + 1
        completed = lax.population_count((end & -end) - 1)
        lengths = jnp.left_shift(1, jnp.arange(self.rounds.bit_length()))
        length = jnp.left_shift(1, completed)
        index = jnp.append(2 * (end - length) + length - 1, 2 * (end - 2 * lengths) + lengths - 1)
        weight = jnp.append(1.0, -jnp.ones(len(lengths)))
        return index.astype(jnp.int32), weight.astype(jnp.float32), completed + 1


def _noise_of_nodes(rounds: int, efficient: bool = False) -> np.ndarray:
    """Return the weight of the noise of each node in each round, Float64[rounds, 2 rounds].

    The sum of a node is estimated from its own noise only or, if `efficient`, also from that of all
    nodes below it.
    """
    noise: dict[tuple[int, int], np.ndarray] = {}  # (start, length) -> noise in the estimate
    prefix = np.zeros((rounds + 1, 2 * rounds))
    for t in range(1, rounds + 1):
        length = 1
        while t % length == 0:
            start, half = t - length, length // 2
            node = np.zeros(2 * rounds)
            node[2 * start + length - 1] = 1.0
            if half and efficient:
                weight = 1 / (2 - 1 / length)
                children = noise[start, half] + noise[start + half, half]
                node = weight * node + (1 - weight) * children
            noise[start, length] = node
            length *= 2
        last = t & -t  # the length of the last node whose sum is a part of the prefix
        prefix[t] = prefix[t - last] + noise[t - last, last]
    return np.diff(prefix, axis=0)


# --- strategies made from others


def restarted(strategy: Strategy, rounds: int) -> Strategy:
    """Return the strategy that repeats `strategy` until it covers `rounds` rounds.

    The noise of a copy covers only the contributions of its own rounds.  The squared sensitivity is
    the sum of the squared sensitivities of the copies.  The noise of the copies is independent, so
    variances add up, too: after several copies, the variance in the running sum of the releases is
    the sum of the variances of the copies.

    Args:
        strategy: one that regenerates earlier noise, such as `tree` or `inverse_banded`.

    Other Parameters:
        rounds: the number of rounds that it covers.

    Raises:
        ValueError: for a strategy that stores buffers, or one that covers more than `rounds`.

    References:
        Kairouz et al., ICML 2021, section 5 (DP-FTRL with tree restarts).

    Example:
        >>> restarted(tree(4), 8).errors().tolist()
        [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0, 2.0]
    """
    where = "strategies.restarted"
    if not isinstance(strategy, Strategy):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
        checks.fail(where, "a strategy of jfl.strategies", checks.short_repr(strategy))
    checks.require_integer(where, rounds=rounds)
    if strategy.memory:
        checks.fail(
            where,
            "a strategy that regenerates earlier noise",
            f"{strategy!r}, which stores buffers",
            "Use tree, inverse_banded, square_root or dense.",
        )
    if rounds < strategy.rounds:
        checks.fail(where, f"at least the {strategy.rounds} rounds of the strategy", f"{rounds}")
    normals = strategy.noising().shape[1]
    return Restarted(int(rounds), strategy.separation, strategy, normals)


@record
class Derived(Strategy):
    """A strategy made from another one, with the same sensitivity to one participation."""

    of: Any = None  # the other Strategy; it has a default because earlier fields have one

    @property
    def width(self) -> int:
        return self.of.width

    def accounting_matches_noise(self) -> bool:
        return self.of.accounting_matches_noise()

    def largest_column(self) -> float:
        return self.of.largest_column()


@record
class Restarted(Derived):
    """Copies of one strategy on the diagonal of C."""

    normals: int = static(default=1)  # number of draws of one copy

    def describe(self) -> str:
        return f"{self.of.describe()}, restarted every {self.of.rounds} rounds"

    @property
    def is_steady(self) -> bool:
        return self.of.is_steady

    def matrix(self) -> np.ndarray:
        return self.matrix_until(self.rounds)

    def matrix_until(self, rounds: int) -> np.ndarray:
        copies = (self.of.matrix_until(n) for n in self._lengths(rounds))
        return np.asarray(linalg.block_diag(*copies))

    def noising(self) -> np.ndarray:
        copy = self.of.noising()
        copies = [copy] * len(self._lengths(self.rounds))
        noising = np.asarray(linalg.block_diag(*copies))[: self.rounds]
        # A tree has more draws than rounds, so all draws of the last copy are kept.
        return noising[:, : self.rounds] if copy.shape[0] == copy.shape[1] else noising

    def accounting_matches_noise(self) -> bool:
        """Return whether one copy matches its noise, and no two copies share normals."""
        return super().accounting_matches_noise() and self.normals >= self.of.noising().shape[1]

    def draws(self, round_: Any) -> tuple[Any, ...]:
        copy, within = round_ // self.of.rounds, round_ % self.of.rounds
        index, weight, count = self.of.draws(within)
        return jnp.asarray(index, jnp.int32) + copy * self.normals, weight, count

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        lengths = self._lengths(rounds)
        by_length = {n: self._squares_of_copy(n, separation) for n in set(lengths)}
        so_far, before = [], np.zeros((separation, 1))
        for copy, length in enumerate(lengths):
            offset = (np.arange(separation) - copy * self.of.rounds) % separation
            so_far.append(before + by_length[length][offset])
            before = so_far[-1][:, -1:]
        return np.maximum.accumulate(np.hstack(so_far).max(0))

    def _squares_of_copy(self, rounds: int, separation: int) -> np.ndarray:
        """Return the squared sensitivities of one copy, as `_squares_by_offset` does."""
        if self.of.rounds > MAX_EXACT_ROUNDS:  # its matrix is large: bound all offsets by the worst
            return np.tile(self.of.squared_sensitivities(rounds, separation), (separation, 1))
        return _squares_by_offset(self.of.matrix_until(rounds), separation)

    def sensitivity(
        self, participations: int = 1, separation: int = 1, *, epochs: bool = False
    ) -> float:
        participations = self._max_participations(participations, separation)
        if epochs and participations == -(-self.rounds // separation):
            return float(np.sqrt(self.squared_sensitivities(self.rounds, separation)[-1]))
        most = min(participations, -(-self.of.rounds // separation))
        # squares of one copy, by the number of participations in it
        copy = [0.0] + [
            self.of.sensitivity(k, separation, epochs=epochs) ** 2 for k in range(1, most + 1)
        ]
        # the largest sum over copies, by the total number of participations in them
        worst = np.zeros(participations + 1)
        for _ in self._lengths(self.rounds):
            sums = [worst[k::-1][: len(copy)] + copy[: k + 1] for k in range(participations + 1)]
            worst = np.array([squares.max() for squares in sums])
        return float(np.sqrt(worst[-1]))

    def _lengths(self, rounds: int) -> list[int]:
        """Return the number of rounds of each copy; the last one may be cut short."""
        begins = range(0, rounds, self.of.rounds)
        return [min(self.of.rounds, rounds - begin) for begin in begins]


@record
class Remainder(Derived):
    """The columns of C from round `first` on.

    This is what a strategy reveals about units that contribute nothing before that round.  Only the
    accountant of a plan that continues another one uses it.
    """

    first: int = static(default=0)

    def describe(self) -> str:
        return f"{self.of.describe()}, from round {self.first} on"

    def matrix(self) -> np.ndarray:
        return self.of.matrix()[:, self.first :]

    def matrix_until(self, rounds: int) -> np.ndarray:
        return self.of.matrix_until(self.first + rounds)[:, self.first :]

    def squared_sensitivities(self, rounds: int, separation: int = 1) -> np.ndarray:
        if isinstance(self.of, Toeplitz):  # the columns are the same
            return self.of.squared_sensitivities(rounds, separation)
        return super().squared_sensitivities(rounds, separation)


# --- squared sensitivities


def _toeplitz_squares(
    column: np.ndarray, rounds: int, participations: int, separation: int
) -> np.ndarray:
    """Return what each round adds to the squared sensitivity of a Toeplitz C, Float64[rounds].

    The sum of the first t of them is the squared sensitivity of t rounds.  It is exact if columns
    that are `separation` apart do not overlap, or if the column is decreasing and not negative.
    Otherwise the smallest such column above it is used, which gives an upper bound.
    """
    column = np.asarray(column, np.float64)[:rounds]
    is_decreasing = bool(np.all(column >= 0) and np.all(np.diff(column) <= 0))
    if not is_decreasing and len(np.trim_zeros(column, "b")) > separation:
        column = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
    shift = np.zeros(rounds)  # of C x, by a unit that participates as early and as often as it can
    for first in range(0, rounds, separation)[:participations]:
        part = shift[first : first + len(column)]
        part += column[: len(part)]
    return shift**2


def _squares_by_offset(matrix: np.ndarray, separation: int) -> np.ndarray:
    """Return squared sensitivities of the first 1, 2, ... rounds, Float64[offset, rounds].

    Row `offset` is for a unit that participates in rounds offset, offset + separation, ...
    """
    gram = np.abs(matrix.T @ matrix)
    length = len(gram)
    out = np.zeros((separation, length))
    for offset in range(min(separation, length)):
        participations = np.arange(offset, length, separation)
        among = gram[np.ix_(participations, participations)]
        squares = among.cumsum(0).cumsum(1).diagonal()
        so_far = np.searchsorted(participations, np.arange(length), "right")
        out[offset] = np.append(0.0, squares)[so_far]
    return out


def _worst_square(size: np.ndarray, participations: int, separation: int) -> float:
    """Return an upper bound on the squared sensitivity over all patterns of participation.

    It combines the worst pattern for each row of X = C^T C with the worst sum of rows.  It is exact
    if X >= 0 and a unit may participate in every round.

    Args:
        size: Float64[rounds, rounds], the absolute values of X.
        participations, separation: as in `Strategy.sensitivity`.
    """
    rows = _largest_sum(size, participations, separation)
    return float(_largest_sum(rows, participations, separation))


def _largest_sum(values: np.ndarray, participations: int, separation: int) -> np.ndarray:
    """Return the largest sum of `values` [..., rounds] >= 0 over a pattern of participations."""
    rounds = values.shape[-1]
    # best[i][k] is the largest sum from round i on, with k participations left
    nothing = np.zeros((*values.shape[:-1], participations + 1))
    best: list[Any] = [nothing] * (rounds + separation)
    for i in range(rounds - 1, -1, -1):
        here = best[i + 1].copy()
        taken = values[..., i, None] + best[i + separation][..., :-1]
        here[..., 1:] = np.maximum(here[..., 1:], taken)
        best[i] = here
        best[i + separation] = None  # no longer needed
    return best[0][..., -1]
