"""Chains of stages, from many masked contributions to one release.

The user gives the noise multiplier z; the chain computes sigma = z * sensitivity, so that noise for
a sum cannot be added to a mean.  Sensitivity of the sum is the bound of one contribution
(add_remove, zero_out) or twice that (replace_one).

A mechanism works in two halves, so that a cohort can be summed chunk by chunk: `clip_and_sum` (rows
and sum) and `release_sum` (noise and post-processing).  `release` does both.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, overload

import jax
import jax.numpy as jnp
import numpy as np

from ...core import checks, pytrees
from ...core.errors import NotAnalysable
from ...core.pytrees import Array, Tree
from ...core.records import Fn, Key, Mechanism, Plan, named, record, static
from ...kernels.laplace import laplace
from ...kernels.normals import normals
from ...verify import marks
from . import correlated, haar_bands
from .stages import FLOOR, After, Stage
from .strategies import Remainder

ROLES = ("row", "sum", "noise", "post")
# One unit more or less; another in its place; or the same samples, to which it contributes zero.
ADJACENCIES = ("add_remove", "replace_one", "zero_out")
LAWS = ("gaussian", "laplace", "discrete_gaussian", "skellam")
INTEGER_LAWS = ("discrete_gaussian", "skellam")
# Schedules are checked in blocks of this many rounds, so that all runs share one program.  Blocks
# are smaller if a round has a number for each client.
ROUNDS_PER_CHECK, NUMBERS_PER_CHECK = 2**14, 2**20
# The last round that the clock of a run can count.
LAST_ROUND = 2**31 - 1


@record
class PartialSum:
    """The sum of some of the contributions.

    Attributes:
        value: the masked, weighted sum, in float32 at least.
        count: the number of contributions.
        clipped: how many of them were clipped.
        weight: the sum of their weights.
        nonfinite: how many counted as zero, since they were not finite.
        dtypes: `pytrees.dtypes_of` of a contribution, to which a release is cast back.
    """

    value: Any
    count: Any
    clipped: Any
    weight: Any
    nonfinite: Any
    dtypes: tuple[Any, ...] = static()


def chain(*stages: Stage, adjacency: str | None = None) -> Mechanism:
    """Compose stages left to right into one mechanism.

    `adjacency` may stay open: `plan` binds it from the sampler.  A noisy chain that nobody bound
    refuses to run.

    Raises:
        ValueError: unless the roles run row -> sum -> noise -> post with exactly one sum, at most
            one noise, and a row stage that bounds what the noise covers.

    Example:
        >>> from jfl.privacy.mechanisms.stages import clip_l2, gaussian, total
        >>> chain(gaussian(1.0), clip_l2(1.0), total())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        jfl.core.errors.ArgumentError: chain: expected stages in the order row -> sum -> noise ...
    """
    for s in stages:
        if not isinstance(s, Stage):  # pyright: ignore[reportUnnecessaryIsInstance]  # of a user
            expected = "stages such as clip_l2(1.0), total(), gaussian(1.1), divide(16)"
            checks.fail("chain", expected, f"{s!r}")
    got = " -> ".join(f"{s.name}[{s.role}]" for s in stages) or "no stage"

    def require(condition: bool, expected: str, hint: str = "") -> None:
        if not condition:
            checks.fail("chain", expected, got, hint)

    order = [ROLES.index(s.role) for s in stages]
    require(
        order == sorted(order) and order.count(1) == 1,
        "stages in the order row -> sum -> noise -> post with exactly one sum",
        "Noise before the sum is added once per row, and a clip after it protects nobody.",
    )
    noises = [s for s in stages if s.role == "noise"]
    require(
        len(noises) <= 1, "at most one noise stage", "Two Gaussians are one: add their variances."
    )
    require(
        all(s.law in LAWS and (s.law in INTEGER_LAWS) == (s.encoding is not None) for s in noises),
        f"noise with one of the distributions {', '.join(LAWS)}, such as gaussian(1.1)",
        "No other noise is drawn and accounted, whatever a stage is called.",
    )
    rows = [s for s in stages if s.role == "row"]
    clips = [s for s in rows if not s.is_map]
    require(
        bool(rows or not noises),
        "a bound before the noise",
        "Start with clip_l2(...): noise hides only what is bounded.",
    )
    require(
        not rows[-1].is_map if clips else not noises,
        "a clip after the last map",
        "Put clip_l2(...) between the map and total(): what a map makes of a bounded contribution "
        "has no bound.",
    )
    for s in noises:
        if s.law == "laplace":
            require(plain_laplace(s), f"Laplace noise as laplace(...) makes it, but not {s!r}")
            require(
                rows[-1].name == "clip_l1",
                "clip_l1(...) as the last clip before laplace(...)",
                "Its noise covers the sum of absolute values, which no other clip bounds.",
            )
    states = [s for s in stages if s.state is not None]
    require(
        len(states) <= 1 and (not states or len(clips) <= 1), "an adaptive clip as the only clip"
    )
    if adjacency is not None:
        checks.require_one_of("chain", ADJACENCIES, adjacency=adjacency)
    return Mechanism(tuple(stages), adjacency)


def _of(mechanism: Mechanism, role: str) -> list[Any]:
    return [s for s in mechanism.stages if s.role == role]


def noise_of(mechanism: Mechanism | None) -> Stage | None:
    """Return the noise stage of a chain; None without noise."""
    return next(iter(_of(mechanism, "noise")), None) if mechanism is not None else None


def noisy(mechanism: Mechanism | None) -> TypeGuard[Mechanism]:
    return noise_of(mechanism) is not None


def plain_laplace(stage: Stage) -> bool:
    """Return whether this is Laplace noise of one level in units of the sensitivity, the same in
    all rounds."""
    return (
        not isinstance(stage.noise, Fn)
        and np.ndim(stage.noise) == 0
        and not stage.absolute
        and stage.shape is stage.strategy is stage.encoding is None
    )


def has_clip(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and not all(s.is_map for s in _of(mechanism, "row"))


def adaptive(mechanism: Mechanism) -> bool:
    """Return whether the clip norm changes from release to release."""
    return any(s.state is not None and s.name == "clip_adaptive" for s in mechanism.stages)


def remembers(mechanism: Mechanism) -> bool:
    """Return whether a stage reads earlier releases."""
    return any(s.state is not None for s in mechanism.stages)


@overload
def bind(
    mechanism: Mechanism,
    adjacency: str,
    where: str,
    required: bool = ...,
    also: Sequence[str] = ...,
) -> Mechanism: ...
@overload
def bind(
    mechanism: Mechanism | None,
    adjacency: str,
    where: str,
    required: bool = ...,
    also: Sequence[str] = ...,
) -> Mechanism | None: ...
def bind(
    mechanism: Mechanism | None,
    adjacency: str,
    where: str,
    required: bool = False,
    also: Sequence[str] = ("zero_out",),
) -> Mechanism | None:
    """Return the mechanism under `adjacency`; `required` if another one given in the chain would be
    wrong, except for those in `also`, which the sample allows too."""
    if mechanism is None:
        return None
    if mechanism.adjacency is None:
        return Mechanism(mechanism.stages, adjacency)
    if required and mechanism.adjacency not in (adjacency, *also):
        checks.fail(
            where,
            f"adjacency {adjacency!r}, which its sampler implies"
            + "".join(f", or {other!r}" for other in also),
            f"adjacency={mechanism.adjacency!r}",
            "Leave adjacency out of chain(...), or change the sampler.",
        )
    return mechanism


def initial_state(mechanism: Mechanism) -> Any:
    """Return the state of the first release."""
    states = [s.state for s in mechanism.stages if s.state is not None]
    wide = lambda x: jnp.asarray(x, jnp.float32)
    return jax.tree.map(wide, states[0]) if states else ()


def bound(mechanism: Mechanism, state: Any = None, shape: Any = None) -> Any:
    """Return the bound of one contribution of weight 1, in the units of the sum: Euclidean, or in
    the norm of a shape."""
    state = initial_state(mechanism) if state is None else state
    rows = _of(mechanism, "row")
    return rows[-1].bound(state, shape) if rows and not rows[-1].is_map else math.inf


def limit(mechanism: Mechanism) -> float:
    """Return the bound of one contribution after public divisors, as an upload adds it to a
    release."""
    return float(bound(mechanism)) / (denominator(mechanism) or 1.0)


def shape(mechanism: Mechanism) -> Any:
    """Return the shape of the noise; None if it is isotropic, or if there is none."""
    stage = noise_of(mechanism)
    return None if stage is None else stage.shape


def sensitivity(mechanism: Mechanism, state: Any = None, max_weight: Any = 1.0) -> Any:
    """Return how far one neighbour moves the sum, in the norm of the noise: bound * max_weight, or
    twice that under replace_one."""
    if mechanism.adjacency is None:
        hint = (
            'jfl.plan sets it from the samplers; otherwise use chain(..., adjacency="add_remove").'
        )
        checks.fail("chain", "an adjacency before noise is added", "adjacency=None", hint)
    return (
        (2.0 if mechanism.adjacency == "replace_one" else 1.0)
        * bound(mechanism, state, shape(mechanism))
        * max_weight
    )


def at_round(mechanism: Mechanism, round_: Any) -> Mechanism:
    """Return the mechanism of one round, with the values of clip norms and noise that change over
    rounds."""
    now = lambda function: _now(function, round_)
    stages = (s.map_schedules(now) for s in mechanism.stages)
    return Mechanism(tuple(stages), mechanism.adjacency)


def _now(function: Fn, round_: Array) -> Array:
    value = jnp.asarray(function(round_), jnp.float32)
    return jnp.where(value >= FLOOR, value, jnp.nan)  # Health stops a clip or a noise that is none


@named("mechanism.later")
def _shifted(round_: Array, *, of: Fn, first: int) -> Any:
    return of(round_ + first)


def later(value: Any, first: int) -> Any:
    """Return a mechanism, or a function of the round, that begins at round `first`; None stays.

    An accountant reads it if a plan continues another one: correlated noise begins there.
    """
    if isinstance(value, Fn):
        return Fn(_shifted, dict(of=value), dict(first=first))
    if value is None:
        return value
    stages = [s.map_schedules(lambda function: later(function, first)) for s in value.stages]
    for i, s in enumerate(stages):
        if s.strategy is not None:
            rest = max(s.strategy.rounds - first, 0)
            remainder = Remainder(rest, s.strategy.separation, s.strategy, int(first))
            stages[i] = dataclasses.replace(s, strategy=remainder)
    return Mechanism(tuple(stages), value.adjacency)


def scheduled(mechanism: Mechanism | None) -> bool:
    """Return whether a clip norm or the noise is a function of the round."""
    return mechanism is not None and any(s.schedules() for s in mechanism.stages)


def multiplier(mechanism: Mechanism | None, max_weight: float = 1.0) -> Any:
    """Return the true noise multiplier, std over sensitivity, as the float32 that runs; None
    without noise.

    A Python number, or Float64[C] where each client has its own.  Of a mechanism `at` one round.
    """
    stage = noise_of(mechanism)
    if mechanism is None or stage is None:
        return None
    value = np.asarray(stage.noise, np.float64)
    if stage.absolute:
        if adaptive(mechanism):
            checks.fail(
                "gaussian",
                "noise_multiplier beside an adaptive clip",
                "std",
                "The sensitivity changes from round to round, and std does not follow it.",
                error=NotAnalysable,
            )
        value = value / float(sensitivity(mechanism, max_weight=max_weight))
    return value if value.ndim else float(value)


def multiplier_follows(mechanism: Mechanism) -> bool:
    """Return whether the noise is stated in units of the sensitivity, whatever that is."""
    stage = noise_of(mechanism)
    return stage is None or not stage.absolute


def multipliers(
    mechanism: Mechanism, rounds: int, clients: int, max_weight: Any = lambda round_: 1.0
) -> np.ndarray:
    """Return the noise multipliers of the first rounds, Float64[rounds or 1, clients or 1]: one row
    unless rounds differ, one column unless clients differ.

    Args:
        mechanism: a chain with noise.
        rounds: the number of rounds.
        clients: the number of clients.
        max_weight: round -> the largest weight, for noise with an absolute std.

    Raises:
        NotAnalysable: unless they are positive and finite, one or one for each client.
    """
    if multiplier_changes(mechanism):
        at = lambda round_: at_round(mechanism, jnp.int32(round_))
        noise = np.array([multiplier(at(r), max_weight(r)) for r in range(rounds)])
    else:
        noise = np.asarray(multiplier(mechanism, max_weight(0)))[None]
    noise = noise if noise.ndim == 2 else noise[:, None]
    if noise.shape[1] not in (1, clients):
        checks.fail(
            "jfl.guarantee",
            f"one noise level, or one for each of {clients} clients",
            f"{noise.shape[1]}",
            error=NotAnalysable,
        )
    if not (np.all(noise > 0) and np.all(np.isfinite(noise))):
        checks.fail(
            "jfl.guarantee",
            "clip norms and noise > 0 in every round",
            f"noise multipliers {np.min(noise)}",
            error=NotAnalysable,
        )
    return noise


def multiplier_changes(mechanism: Mechanism | None) -> TypeGuard[Mechanism]:
    """Return whether the noise multiplier is a function of the round.  A clip that changes does not
    change it, unless the noise has an absolute std."""
    stage = noise_of(mechanism)
    if mechanism is None or stage is None:
        return False
    clips = [s for s in _of(mechanism, "row") if not s.is_map and stage.absolute]
    return any(s.schedules() for s in (stage, *clips))


def clip_and_sum(mechanism: Mechanism, state: Any, rows: Any, weight: Any) -> PartialSum:
    """Apply the row stages and return the weighted sum.

    A contribution that is not finite after the row stages counts as zero; without a row stage it
    stays as it is.

    Args:
        mechanism: the chain.
        state: its state, from `initial_state` or the previous release.
        rows: leaves [n, ...].  Those in half precision are widened first: clipped, weighted and
            summed in float32.
        weight: Float[n], 0 for a slot that holds nothing.

    Privacy:
        A sum in half precision would be rounded before the noise, and one row can turn the rounding
        of every coordinate.  A contribution that is not finite would be visible through any
        noise.
    """
    form, rows = pytrees.dtypes_of(rows), pytrees.at_least_float32(rows)

    def one(row: Tree) -> tuple[Tree, Array, Array]:
        clipped = jnp.zeros((), bool)
        for s in _of(mechanism, "row"):
            row, over = s.apply(state, row)
            clipped = clipped | over
        return row, clipped, pytrees.all_finite(row)

    is_counted = counts = weight != 0
    clipped = bad = jnp.zeros(weight.shape, bool)
    if _of(mechanism, "row"):
        rows, clipped, finite = jax.vmap(one)(rows)
        counts, bad = is_counted & finite, is_counted & ~finite

    def weighted(x: Array) -> Array:
        w, kept = (v.reshape(weight.shape + (1,) * (x.ndim - 1)) for v in (weight, counts))
        return jnp.where(kept, w.astype(x.dtype) * x, jnp.zeros((), x.dtype)).sum(0)

    value, count = pytrees.map(weighted, rows), lambda x: x.sum().astype(jnp.float32)
    if weight.shape == (1,) and has_clip(mechanism):
        value = marks.bounded(value, mechanism, weight, "single")
    return PartialSum(
        value,
        count(is_counted),
        count(clipped & counts),
        count(weight),
        bad.sum(dtype=jnp.int32),
        form,
    )


def release_sum(
    mechanism: Mechanism,
    key: Key,
    state: Any,
    value: Any,
    *,
    max_weight: Any = 1.0,
    realised: Any = None,
    client: Any = None,
    dtypes: Any = None,
    series: Any = None,
) -> tuple[Any, ...]:
    """Add noise to a finished sum and post-process it.

    Args:
        mechanism: the chain.
        key: the key of the noise.
        state: the state of the chain, as in `clip_and_sum`.
        value: the sum.
        max_weight: the largest weight that a contribution can have.
        realised: the value of divide("size") or divide("weight"): the number of the client's rows,
            or the weight of the cohort.
        client: whose noise it is, where each client has its own level.
        dtypes: `pytrees.dtypes_of` of a contribution: the release is rounded to its types, after
            everything else.  None: of the sum.
        series: for noise that is correlated over the releases of a run, a pair: a function from the
            number of a release to its key, and the number of this release.

    Returns:
        The release, and the state for the next one.

    Privacy:
        Noise is added in float32 at least.  Noise or a bound that is too small for float32 becomes
        nan, which stops the run with a HealthError.
    """
    form = pytrees.dtypes_of(value) if dtypes is None else dtypes
    after, value = After(realised), pytrees.at_least_float32(value)
    stage = noise_of(mechanism)
    if stage is not None:
        level = stage.noise
        if jnp.ndim(level):  # a level for each client
            level = level.at[client].get(mode="fill", fill_value=jnp.nan)
        sigma = jnp.asarray(
            level if stage.absolute else level * sensitivity(mechanism, state, max_weight),
            jnp.float32,
        )
        is_bounded = bound(mechanism, state, stage.shape) >= FLOOR
        sigma = jnp.where(is_bounded & _lasts(sigma), sigma, jnp.nan)
        # of a Laplace number of scale 1 the variance is 2
        std = sigma * math.sqrt(2) if stage.law == "laplace" else sigma
        after = after._replace(std=std, shape=stage.shape)
        released, state = _add_noise(stage, sigma, key, value, state, series)
        value = marks.release(released, value, key, mechanism, max_weight=max_weight, client=client)
    for s in mechanism.stages:
        if s.update is not None:
            state, value = s.update(state, value)
    for s in _of(mechanism, "post"):
        value, after = s.apply(value, after)
    return pytrees.cast_to(value, form), state


def _add_noise(
    stage: Stage, sigma: Array, key: Key, value: Tree, state: Any, series: Any
) -> tuple[Tree, Any]:
    """Return a sum with the noise of a stage of scale `sigma`, and the state of the chain."""
    noise_key = marks.noise_key(key)
    if stage.encoding is not None:
        return stage.encoding.encode(noise_key, value), state
    if stage.shape is not None:
        stds = sigma / stage.shape.scales
        stds = jnp.where(_lasts(stds), stds, jnp.nan)
        noise = haar_bands.noise(stage.shape.bands, noise_key, stds, value)
    else:
        if stage.law == "laplace":
            unit = laplace(noise_key, value)
        elif stage.strategy is None:
            unit = normals(noise_key, value, stage.generator)
        elif series is None:
            expected = "correlated noise in release or upload only"
            unit = checks.fail("chain", expected, "it in a release on its own", "Use gaussian.")
        else:
            key_of_round, round_ = series
            fresh = lambda index: normals(
                marks.noise_key(key_of_round(index)), value, stage.generator
            )
            unit, state = correlated.mix(stage.strategy, fresh, round_, state)
        noise = pytrees.map(lambda n: sigma * n, unit)
    return pytrees.map(lambda x, n: x + n.astype(x.dtype), value, noise), state


def _lasts(std: Array) -> Array:
    return std >= jnp.finfo(jnp.float32).tiny


def release(
    mechanism: Mechanism, key: Key, state: Any, rows: Any, weight: Any, **options: Any
) -> tuple[Any, ...]:
    """Return `release_sum` of `clip_and_sum`: the release, and the new state."""
    part = clip_and_sum(mechanism, state, rows, weight)
    return release_sum(mechanism, key, state, part.value, dtypes=part.dtypes, **options)


def release_one(mechanism: Mechanism, key: Key, row: Any, **options: Any) -> tuple[Any, ...]:
    """Return the release of one contribution, in float32 at least; and 1 if it counted as zero
    because it was not finite.

    Not rounded to the contribution's type: what is summed next must not be.
    """
    part = clip_and_sum(mechanism, (), pytrees.map(lambda x: x[None], row), jnp.ones(1))
    return release_sum(mechanism, key, (), part.value, **options)[0], part.nonfinite


def denominator(mechanism: Mechanism) -> float | None:
    """Return the product of the public divisors; None if there are none or they are traced."""
    values = [s.apply.data["n"] for s in _of(mechanism, "post") if s.divisor == "number"]
    if not values or not checks.is_concrete(values):
        return None
    return float(np.prod([np.asarray(v) for v in values]))


# --- clip norms and noise that change over rounds


def check_schedules(where: str, plan: Plan, rounds: int, first: int = 0) -> None:
    """Reject a plan in which a function of the round falls below the smallest clip norm or noise,
    or whose correlated noise covers fewer rounds.

    Constants are checked when a stage is made.  Below the floor squares of norms underflow: a clip
    would bound nothing, though the noise follows it down.  Traced functions pass: the program makes
    nan of such a value, and Health stops it.

    Args:
        where: who asks, for the message.
        plan: whose release, upload and private gradients are looked at.
        rounds: how many rounds will run.
        first: the number of the first of them.

    Raises:
        ValueError: with the first round in which a value is below 1e-15 or not finite.

    Example:
        >>> import jfl
        >>> falls = jfl.schedules.exponential(
        ...     1.0, 1e-3, 10
        ... )  # by 1000 in 10 rounds: 1e-15 in round 50
        >>> [bool(v) for v in (_values_of_rounds(falls, jnp.array([49, 51])) >= FLOOR)]
        [True, False]
    """
    for mechanism in (plan.upload, plan.release):
        correlated.covers(where, mechanism, first + rounds)
    private = [("private_grad", r.mechanism) for r in plan.algorithm.all_releases]
    for site, mechanism in (("release", plan.release), ("upload", plan.upload), *private):
        for stage in mechanism.stages if mechanism is not None else ():
            for name, function in stage.schedules().items():
                what = f"{name} of {stage.name} in {site}"
                if checks.is_concrete(function):
                    _check_schedule(where, what, function, first, rounds)


def _check_schedule(where: str, name: str, function: Fn, first: int, rounds: int) -> None:
    end = min(first + rounds, LAST_ROUND)
    shape = jax.eval_shape(lambda r: jnp.asarray(function(r)), np.int32(first)).shape
    size = max(min(ROUNDS_PER_CHECK, NUMBERS_PER_CHECK // max(math.prod(shape), 1)), 1)
    for begin in range(first, end, size):
        block = np.minimum(begin + np.arange(size), end - 1).astype(np.int32)
        values = _values_of_rounds(function, block)
        if not checks.is_concrete(values):  # a closure over something traced
            return
        values = np.asarray(values, np.float64).reshape(len(block), -1)
        bad = np.flatnonzero(~((values >= FLOOR) & np.isfinite(values)).all(1))
        if bad.size:
            checks.fail(
                where,
                f"{name} >= {FLOOR:g} and finite in every round",
                f"{values[bad[0]].min():g} in round {block[bad[0]]}",
                "Smaller ones are lost in float32: end the schedule higher, "
                "jnp.maximum(value, 1e-6), or scale the loss.",
            )


@jax.jit
def _values_of_rounds(function: Callable[..., Any], rounds: np.ndarray) -> Array:
    return jax.vmap(lambda r: jnp.asarray(function(r), jnp.float32))(rounds)
