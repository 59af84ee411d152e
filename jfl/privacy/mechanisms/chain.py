"""Chains of stages that turn many contributions into one release.

The user gives the noise multiplier z, and the chain computes sigma = z * sensitivity, so noise that
is meant for a sum cannot be added to a mean.  The sensitivity of the sum is the bound of one
contribution (add_remove, zero_out) or twice that bound (replace_one).

A mechanism works in two halves, so that a cohort can be summed chunk by chunk: `clip_and_sum` (row
stages and sum) and `release_sum` (noise and post-processing).  `release` does both.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeGuard

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
from .stages import FLOOR, After, Stage, require_floats
from .strategies import Remainder

ROLES = ("row", "sum", "noise", "post")
# Neighbours differ by adding or removing one unit; by replacing one unit with another; or in that
# one unit contributes zero to the same samples.
ADJACENCIES = ("add_remove", "replace_one", "zero_out")
LAWS = ("gaussian", "laplace", "discrete_gaussian", "skellam")
INTEGER_LAWS = ("discrete_gaussian", "skellam")
# The last round that the clock of a run can count.
LAST_ROUND = 2**31 - 1


@record
class PartialSum:
    """The sum of some of the contributions to a release.

    Attributes:
        value: the weighted sum, in float32 or wider; masked contributions add zero.
        count: the number of contributions.
        clipped: how many of them were clipped.
        weight: the sum of their weights.
        nonfinite: how many of them were not finite, and counted as zero.
        dtypes: `pytrees.dtypes_of` of a contribution; the release is cast to these types.
    """

    value: Any
    count: Any
    clipped: Any
    weight: Any
    nonfinite: Any
    dtypes: tuple[Any, ...] = static()


def chain(*stages: Stage, adjacency: str | None = None) -> Mechanism:
    """Compose stages, in order, into one mechanism.

    Args:
        stages: stages such as clip_l2(1.0), total(), gaussian(1.1).
        adjacency: one of ADJACENCIES.  If None, `jfl.plan` derives it from the sampler; until then,
            the chain cannot add noise.

    Raises:
        ValueError: unless the roles are in the order row -> sum -> noise -> post, with exactly one
            sum and at most one noise; or if there is noise but no row stage bounds contributions.

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
            checks.fail("chain", expected, checks.short_repr(s))
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
        "jfl draws and accounts for no other noise, whatever the name of a stage.",
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
        "Put clip_l2(...) between the map and total(): the result of a map has no bound.",
    )
    for s in noises:
        if s.law == "laplace":
            require(plain_laplace(s), f"Laplace noise as laplace(...) makes it, not {s!r}")
            require(
                rows[-1].name == "clip_l1",
                "clip_l1(...) as the last clip before laplace(...)",
                "Laplace noise covers the L1 norm, which no other clip bounds.",
            )
    states = [s for s in stages if s.state is not None]
    require(
        len(states) <= 1 and (not states or len(clips) <= 1), "an adaptive clip as the only clip"
    )
    if adjacency is not None:
        checks.require_one_of("chain", ADJACENCIES, adjacency=adjacency)
    return Mechanism(tuple(stages), adjacency)


def _stages_with_role(mechanism: Mechanism, role: str) -> list[Any]:
    """Return the stages of a mechanism that have this role."""
    return [s for s in mechanism.stages if s.role == role]


def noise_of(mechanism: Mechanism | None) -> Stage | None:
    """Return the noise stage of a chain; None without noise."""
    return None if mechanism is None else next(iter(_stages_with_role(mechanism, "noise")), None)


def noisy(mechanism: Mechanism | None) -> TypeGuard[Mechanism]:
    """Return whether a mechanism adds noise."""
    return noise_of(mechanism) is not None


def plain_laplace(stage: Stage) -> bool:
    """Return whether the noise of a stage is one constant multiplier, as Laplace noise requires."""
    return (
        not isinstance(stage.noise, Fn)
        and np.ndim(stage.noise) == 0
        and not stage.absolute
        and stage.shape is stage.strategy is stage.encoding is None
    )


def has_clip(mechanism: Mechanism | None) -> bool:
    """Return whether a mechanism bounds each contribution."""
    return mechanism is not None and not all(s.is_map for s in _stages_with_role(mechanism, "row"))


def adaptive(mechanism: Mechanism) -> bool:
    """Return whether the clip norm changes from release to release."""
    return any(s.state is not None and s.name == "clip_adaptive" for s in mechanism.stages)


def remembers(mechanism: Mechanism) -> bool:
    """Return whether a mechanism has state, that is, whether a stage depends on earlier
    releases."""
    return any(s.state is not None for s in mechanism.stages)


def bind(
    mechanism: Mechanism,
    adjacency: str,
    where: str,
    required: bool = False,
    also: Sequence[str] = ("zero_out",),
) -> Mechanism:
    """Return the mechanism with its adjacency set.

    Args:
        mechanism: a chain, with or without an adjacency.
        adjacency: the adjacency that the sampler implies.
        where: the name of the caller, for the message.
        required: True to reject a chain that states another adjacency.
        also: other adjacencies that the sampler allows.
    """
    if mechanism.adjacency is None:
        return Mechanism(mechanism.stages, adjacency)
    if required and mechanism.adjacency not in (adjacency, *also):
        checks.fail(
            where,
            f"adjacency {adjacency!r}, which the sampler implies"
            + "".join(f", or {other!r}" for other in also if other != adjacency),
            f"adjacency={mechanism.adjacency!r}",
            "Leave adjacency out of chain(...), or change the sampler.",
        )
    return mechanism


def initial_state(mechanism: Mechanism) -> Any:
    """Return the state of a mechanism before its first release; () if it has none."""
    states = [s.state for s in mechanism.stages if s.state is not None]
    as_float32 = lambda x: jnp.asarray(x, jnp.float32)
    return jax.tree.map(as_float32, states[0]) if states else ()


def bound(mechanism: Mechanism, state: Any = None, shape: Any = None) -> Any:
    """Return the largest norm of a contribution of weight 1 when it is summed; inf without a clip.

    Args:
        mechanism: the chain.
        state: its state; None for the initial one.
        shape: a Shape, the covariance of noise that is not isotropic, in whose norm the bound is
            measured; None for the Euclidean norm.
    """
    state = initial_state(mechanism) if state is None else state
    rows = _stages_with_role(mechanism, "row")
    return rows[-1].bound(state, shape) if rows and not rows[-1].is_map else math.inf


def limit(mechanism: Mechanism) -> float:
    """Return the largest norm that one contribution can add to the release.

    This is `bound`, divided by the public divisors of the chain.
    """
    return float(bound(mechanism)) / (denominator(mechanism) or 1.0)


def shape(mechanism: Mechanism) -> Any:
    """Return the Shape of the noise, its covariance; None without noise or for isotropic noise."""
    stage = noise_of(mechanism)
    return None if stage is None else stage.shape


def sensitivity(mechanism: Mechanism, state: Any = None, max_weight: Any = 1.0) -> Any:
    """Return the sensitivity of the sum, in the norm of the noise.

    This is bound * max_weight, or twice that under replace_one.

    Args:
        mechanism: the chain, with its adjacency set.
        state: its state; None for the initial one.
        max_weight: the largest weight that a contribution can have.
    """
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
    """Return the mechanism of one round, with the values of its schedules in that round."""
    evaluate = lambda function: _evaluate_schedule(function, round_)
    stages = (s.map_schedules(evaluate) for s in mechanism.stages)
    return Mechanism(tuple(stages), mechanism.adjacency)


def _evaluate_schedule(function: Fn, round_: Array) -> Array:
    """Return the value of a schedule in a round, in float32; nan if it is too small."""
    value = jnp.asarray(function(round_), jnp.float32)
    return jnp.where(value >= FLOOR, value, jnp.nan)  # Health reports nan and stops the run


@named("mechanism.later")
def _evaluate_later(round_: Array, *, of: Fn, first: int) -> Any:
    """Return the value of the schedule `of`, which started `first` rounds earlier."""
    return of(round_ + first)


def later(value: Any, first: int) -> Any:
    """Shift a mechanism or a schedule so that its round `first` becomes round 0; None stays None.

    Accountants use this for a plan that starts in round `first` of a run.  A strategy for
    correlated noise keeps only its rounds from `first` on.
    """
    if isinstance(value, Fn):
        return Fn(_evaluate_later, dict(of=value), dict(first=first))
    if value is None:
        return value
    stages = [s.map_schedules(lambda function: later(function, first)) for s in value.stages]
    for i, s in enumerate(stages):
        if s.strategy is not None:
            num_left = max(s.strategy.rounds - first, 0)
            remainder = Remainder(num_left, s.strategy.separation, s.strategy, int(first))
            stages[i] = dataclasses.replace(s, strategy=remainder)
    return Mechanism(tuple(stages), value.adjacency)


def scheduled(mechanism: Mechanism | None) -> bool:
    """Return whether a clip norm or the noise is a function of the round."""
    return mechanism is not None and any(s.schedules() for s in mechanism.stages)


def multiplier(mechanism: Mechanism | None, max_weight: float = 1.0) -> Any:
    """Return the noise multiplier, std / sensitivity, from the float32 numbers that a run uses.

    Args:
        mechanism: a chain without schedules, or the result of `at_round`.
        max_weight: the largest weight that a contribution can have.

    Returns:
        A Python number; Float64[C] if each client has a separate one; None without noise.
    """
    stage = noise_of(mechanism)
    if mechanism is None or stage is None:
        return None
    value = np.asarray(stage.noise, np.float64)
    if stage.absolute:
        if adaptive(mechanism):
            checks.fail(
                "gaussian",
                "noise_multiplier if the clip is adaptive",
                "std",
                "The sensitivity changes from round to round, so a fixed std does not fit it.",
                error=NotAnalysable,
            )
        value = value / float(sensitivity(mechanism, max_weight=max_weight))
    return value if value.ndim else float(value)


def multiplier_follows(mechanism: Mechanism) -> bool:
    """Return whether the noise is stated as a multiple of the sensitivity."""
    stage = noise_of(mechanism)
    return stage is None or not stage.absolute


def multipliers(
    mechanism: Mechanism, rounds: int, clients: int, max_weight: Any = lambda round_: 1.0
) -> np.ndarray:
    """Return the noise multipliers, std / sensitivity, of the first `rounds` rounds of a run.

    Args:
        mechanism: a chain with noise.
        rounds: the number of rounds.
        clients: the number of clients.
        max_weight: a function from a round to the largest weight of a contribution.  It is used
            only if the noise is stated as a std, which is then divided by the sensitivity.

    Returns:
        Float64[rounds, clients].  There is only one row if all rounds have the same multipliers,
        and only one column if all clients do.

    Raises:
        NotAnalysable: unless each round has one multiplier, or one for each client, all positive
            and finite.
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
    """Return whether the noise multiplier is a function of the round.

    A scheduled clip norm changes the multiplier only if the noise has an absolute std.
    """
    stage = noise_of(mechanism)
    if mechanism is None or stage is None:
        return False
    clips = [s for s in _stages_with_role(mechanism, "row") if not s.is_map and stage.absolute]
    return any(s.schedules() for s in (stage, *clips))


def clip_and_sum(
    mechanism: Mechanism, state: Any, rows: Any, weight: Any, *, is_part: bool = False
) -> PartialSum:
    """Apply the stages on single contributions, such as clipping, and return the weighted sum.

    A contribution that is not finite after these stages (the row stages) counts as zero; without a
    row stage it is added unchanged.

    Args:
        mechanism: the chain.
        state: the state of the chain, from `initial_state` or the previous release.
        rows: the contributions, leaves [n, ...].  Half precision is widened first: contributions
            are clipped, weighted and summed in float32.
        weight: Float[n], 0 for an empty slot.
        is_part: whether the rows are a part of a batch, so that `jfl.check_privacy` does not take a
            single one for all that a client contributes.

    Privacy:
        The sum is never in half precision, because it would be rounded before noise is added, and
        one row can change the rounding of every coordinate.  A contribution that is not finite
        would be visible through any noise.
    """
    dtypes, rows = pytrees.dtypes_of(rows), pytrees.at_least_float32(rows)

    def apply_row_stages(row: Tree) -> tuple[Tree, Array, Array]:
        clipped = jnp.zeros((), bool)
        for s in _stages_with_role(mechanism, "row"):
            row, over = s.apply(state, row)
            clipped = clipped | over
        return row, clipped, pytrees.all_finite(row)

    is_present = is_used = weight != 0
    clipped = nonfinite = jnp.zeros(weight.shape, bool)
    if _stages_with_role(mechanism, "row"):
        rows, clipped, finite = jax.vmap(apply_row_stages)(rows)
        is_used, nonfinite = is_present & finite, is_present & ~finite

    def weighted_sum(x: Array) -> Array:
        w, used = (v.reshape(weight.shape + (1,) * (x.ndim - 1)) for v in (weight, is_used))
        return jnp.where(used, w.astype(x.dtype) * x, jnp.zeros((), x.dtype)).sum(0)

    value, count = pytrees.map(weighted_sum, rows), lambda x: x.sum().astype(jnp.float32)
    if weight.shape == (1,) and not is_part and has_clip(mechanism):
        value = marks.bounded(value, mechanism, weight, "single")
    return PartialSum(
        value,
        count(is_present),
        count(clipped & is_used),
        count(weight),
        nonfinite.sum(dtype=jnp.int32),
        dtypes,
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
        realised: the divisor of divide("size") or divide("weight"): the number of the client's
            rows, or the sum of the weights of the cohort.
        client: the id of the client that adds the noise, if each client has a separate multiplier.
        dtypes: `pytrees.dtypes_of` of a contribution, to which the result is rounded at the end.
            None means the dtypes of the sum.
        series: for noise that is correlated over the releases of a run, a pair: a function from the
            number of a release to its key, and the number of this release.

    Returns:
        The release, and the state for the next one.

    Privacy:
        Noise is added in float32 or wider.  Noise or a bound that is too small for float32 becomes
        nan, which stops the run with a HealthError.
    """
    dtypes = pytrees.dtypes_of(value) if dtypes is None else dtypes
    after, value = After(realised), pytrees.at_least_float32(value)
    stage = noise_of(mechanism)
    if stage is not None:
        require_floats(value)
        level = stage.noise
        if jnp.ndim(level):  # one multiplier for each client
            level = level.at[client].get(mode="fill", fill_value=jnp.nan)
        sigma = jnp.asarray(
            level if stage.absolute else level * sensitivity(mechanism, state, max_weight),
            jnp.float32,
        )
        is_bounded = bound(mechanism, state, stage.shape) >= FLOOR
        sigma = jnp.where(is_bounded & _is_normal_float32(sigma), sigma, jnp.nan)
        # Laplace noise of scale 1 has variance 2.
        std = sigma * math.sqrt(2) if stage.law == "laplace" else sigma
        after = after._replace(std=std, shape=stage.shape)
        released, state = _add_noise(stage, sigma, key, value, state, series)
        value = marks.release(released, value, key, mechanism, max_weight=max_weight, client=client)
    for s in mechanism.stages:
        if s.update is not None:
            state, value = s.update(state, value)
    for s in _stages_with_role(mechanism, "post"):
        value, after = s.apply(value, after)
    return pytrees.cast_to(value, dtypes), state


def _add_noise(
    stage: Stage, sigma: Array, key: Key, value: Tree, state: Any, series: Any
) -> tuple[Tree, Any]:
    """Return a sum with the noise of a stage of scale `sigma`, and the new state of the chain."""
    noise_key = marks.noise_key(key)
    if stage.encoding is not None:
        return stage.encoding.encode(noise_key, value), state
    if stage.shape is not None:
        stds = sigma / stage.shape.scales
        stds = jnp.where(_is_normal_float32(stds), stds, jnp.nan)
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


def _is_normal_float32(std: Array) -> Array:
    """Return whether a standard deviation is not subnormal in float32 (subnormals may become
    zero)."""
    return std >= jnp.finfo(jnp.float32).tiny


def release(
    mechanism: Mechanism, key: Key, state: Any, rows: Any, weight: Any, **options: Any
) -> tuple[Any, ...]:
    """Return `release_sum` of `clip_and_sum`: the release, and the new state.

    Args:
        mechanism, key, state: as in `release_sum`.
        rows, weight: as in `clip_and_sum`.
        options: further arguments of `release_sum`.
    """
    part = clip_and_sum(mechanism, state, rows, weight)
    return release_sum(mechanism, key, state, part.value, dtypes=part.dtypes, **options)


def release_one(mechanism: Mechanism, key: Key, row: Any, **options: Any) -> tuple[Any, ...]:
    """Return the release of one contribution, and whether it was not finite (1 or 0).

    A contribution that is not finite counts as zero.  The release is float32 or wider.  It is not
    rounded to the type of the contribution, because it will be summed.

    Args:
        mechanism: a chain without state.
        key: the key of the noise.
        row: the contribution, a pytree.
        options: further arguments of `release_sum`.
    """
    part = clip_and_sum(mechanism, (), pytrees.map(lambda x: x[None], row), jnp.ones(1))
    return release_sum(mechanism, key, (), part.value, **options)[0], part.nonfinite


def denominator(mechanism: Mechanism) -> float | None:
    """Return the product of the public divisors; None if there are none or they are traced."""
    values = [
        s.apply.data["n"] for s in _stages_with_role(mechanism, "post") if s.divisor == "number"
    ]
    if not values or not checks.is_concrete(values):
        return None
    return float(np.prod([np.asarray(v) for v in values]))


# --- clip norms and noise that change over rounds


def check_schedules(where: str, plan: Plan, rounds: int, first: int = 0) -> None:
    """Reject a plan whose scheduled clip norms or noise become too small.

    Also reject more rounds than the strategy of correlated noise covers.

    For a clip norm below 1e-15, the squared norms of contributions can underflow.  Clipping would
    then bound nothing, but the noise would still be scaled down with the clip norm.  Constants are
    not checked here, but when a stage is made.  Traced schedules are not checked here either: the
    program turns values that are too small into nan, and Health stops the run.

    Args:
        where: the name of the caller, for the message.
        plan: the plan, whose release, upload and private gradients are checked.
        rounds: the number of rounds that will run.
        first: the number of the first of them.

    Raises:
        ValueError: if a value is below 1e-15 or not finite; the message names the first such round.
    """
    for mechanism in (plan.upload, plan.release):
        correlated.require_enough_rounds(where, mechanism, first + rounds)
    private = [("private_grad", r.mechanism) for r in plan.algorithm.all_releases]
    for site, mechanism in (("release", plan.release), ("upload", plan.upload), *private):
        for stage in mechanism.stages if mechanism is not None else ():
            for name, function in stage.schedules().items():
                if checks.is_concrete(function):
                    what = f"{name} of {stage.name} in {site}"
                    _check_schedule(where, what, function, first, min(first + rounds, LAST_ROUND))


def _check_schedule(where: str, name: str, function: Fn, first: int, end: int) -> None:
    """Reject a schedule whose value is too small in a round from `first` to `end` - 1."""
    bad = _first_bad_round(function, np.int32(first), np.int32(end))
    # `bad` is traced if the schedule closes over a traced value.
    if checks.is_concrete(bad) and bad < end:
        checks.fail(
            where,
            f"{name} >= {FLOOR:g} and finite in every round",
            f"{np.min(function(bad)):g} in round {bad}",
            "Smaller values underflow in float32: bound the schedule from below with "
            "jnp.maximum(value, 1e-6), or scale the loss.",
        )


@jax.jit
def _first_bad_round(function: Fn, first: Array, end: Array) -> Array:
    """Return the first round in which a schedule is too small or not finite; `end` if none is."""
    is_good = lambda round_: jnp.isfinite(_evaluate_schedule(function, round_)).all()
    return jax.lax.while_loop(lambda r: (r < end) & is_good(r), lambda r: r + 1, first)
