"""Stages of a chain: they clip, sum, add noise and post-process.

The roles follow each other in the order row -> sum -> noise -> post.  A row stage bounds one
contribution; every stage after the sum sees only sums.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks, pytrees
from ...core.pytrees import Tree
from ...core.records import Array, Fn, Task, brief, named, record, static
from ...kernels.normals import GENERATORS


@record
class Stage:
    """One step of a chain.

    Its role determines which fields are set: a row stage has `apply`, `bound` if it clips, and
    `state` and `update` if it depends on earlier releases; a noise stage has `noise` and the fields
    that describe its distribution; a post-processing stage has `apply`.
    """

    # row: (state, row) -> (row, whether it was clipped);  post: (value, After) -> (value, After)
    apply: Fn | None
    # (state, shape of the noise) -> the bound of one contribution, in the norm of the shape
    bound: Fn | None = None
    # a multiplier of the sensitivity or, if absolute, a standard deviation: one number, one for
    # each client, Float[C], or a function of the round
    noise: Any = None
    # a Shape; None: isotropic noise
    shape: Any = None
    # the state of a row stage before the first release
    state: Any = None
    # (state, release) -> (state, release)
    update: Fn | None = None
    name: str = static(default="")
    role: str = static(default="row")
    absolute: bool = static(default=False)
    # the distribution of the noise, which decides what is drawn
    law: str = static(default="")
    # the multiplier that a paper states for the noise
    claimed: Any = None
    # the generator of normals, one of kernels.normals.GENERATORS
    generator: str = static(default="philox")
    # the Strategy that correlates the noise over rounds; None: independent noise in each round
    strategy: Any = None
    # a distributed.Encoding, if the noise is a client's share of integer noise
    encoding: Any = static(default=None)

    def __repr__(self) -> str:
        """Return the call that makes the stage, such as clip_l2(1)."""
        level = lambda x: f"{x!r} of the round" if isinstance(x, Fn) else brief(x)
        bound: Any = self.bound or self.apply
        if self.role == "noise":
            arguments = ["std=" * self.absolute + level(self.noise)]
            arguments += [] if self.shape is None else ["shape=..."]
            arguments += [] if self.strategy is None else [repr(self.strategy)]
        elif self.divisor in ("size", "weight"):
            return f'divide("{self.divisor}")'
        elif self.declared:
            return f'bounded({level(bound.data["value"])}, "{self.declared}")'
        elif self.name == "map_back" or self.is_map:
            arguments = [str(bound.static.get("size", ""))]
        elif self.state is not None and not isinstance(self.state, tuple):
            arguments = [brief(self.state)]
        else:
            arguments = [] if bound is None else [level(v) for v in bound.data.values()]
        return f"{self.name}({', '.join(arguments)})"

    @property
    def declared(self) -> str:
        """The reason why a bound holds that this stage declares without clipping; otherwise "".

        It is "upload", "prox_erm" or "contraction"; see `bounded`.
        """
        return DECLARED.get(self.name, "")

    @property
    def is_map(self) -> bool:
        """Whether this is a row stage without a bound, so that a clip has to follow."""
        return self.role == "row" and self.bound is None

    @property
    def divisor(self) -> str:
        """The kind of divisor: "number", "size" or "weight"; "" for a stage that does not
        divide."""
        return DIVISORS.get(self.name, "")

    def schedules(self) -> dict[str, Fn]:
        """Return the schedules of the stage (numbers that are functions of the round), by name."""
        numbers = dict(noise=self.noise)
        for function in (self.apply, self.bound, self.update):
            numbers |= function.data if function is not None else {}
        return {name: value for name, value in numbers.items() if isinstance(value, Fn)}

    def map_schedules(self, change: Callable[[Fn], Any]) -> "Stage":
        """Return the stage with `change` applied to each of its schedules."""
        if not self.schedules():
            return self
        new = lambda value: change(value) if isinstance(value, Fn) else value

        def inside(f: Fn | None) -> Fn | None:
            return f and Fn(f.function, {k: new(v) for k, v in f.data.items()}, f.static)

        functions = {k: inside(getattr(self, k)) for k in ("apply", "bound", "update")}
        return dataclasses.replace(self, noise=new(self.noise), **functions)


# Properties that follow from the name of a stage.  (Names are part of a plan's identity.)
DECLARED = {"bounded": "upload", "prox_erm": "prox_erm", "contraction": "contraction"}
DIVISORS = {"divide": "number", "divide_by_size": "size", "divide_by_weight": "weight"}


@record
class Shape:
    """A norm of contributions, ||scales * Haar coefficients||, in which noise is isotropic.

    In band b, the noise has the standard deviation sigma / scales[b], where sigma is its standard
    deviation in units of the norm.
    """

    bands: Any  # jfl.privacy.mechanisms.haar_bands.Bands
    scales: Array  # Float[bands], > 0


class After(NamedTuple):
    """Public numbers about a noisy sum, for post-processing stages."""

    # the divisor of divide("size") or divide("weight")
    realised: Any = None
    std: Any = None  # standard deviation of the noise, in the norm of the shape; None without noise
    shape: Any = None  # the Shape of the noise; None if it is isotropic


# The smallest clip norm and noise.  Squares of smaller norms underflow in float32.
FLOOR = np.float32(1e-15)


def as_level(where: str, hint: str = "", **given: ArrayLike | Callable[..., Any]) -> Any:
    """Check a clip norm or noise level, and return it in the form that a plan stores.

    Args:
        where: the name of the caller, for messages.
        hint: the last sentence of messages.
        given: the value (a number or a function of the round), under the name that messages use.
    """
    ((name, value),) = given.items()
    if callable(value):
        return value if isinstance(value, Fn) else Fn(value)
    return as_number(where, hint, **{name: value})


def as_number(where: str, hint: str = "", **given: ArrayLike) -> Any:
    """Same as `as_level`, but reject functions of the round."""
    checks.require_positive(where, hint, single=True, **given)
    refuse_tiny(where, **given)
    (value,) = given.values()
    return checks.as_scalar(value)


def refuse_tiny(where: str, **given: ArrayLike) -> None:
    """Reject values whose squares underflow: with a sensitivity of 0 there would be no noise."""
    for name, value in given.items():
        if checks.is_concrete(value):
            if np.min(np.asarray(value, np.float32), initial=np.inf) < FLOOR:
                hint = "Smaller values underflow in float32; scale the loss."
                checks.fail(where, f"{name} >= {FLOOR:g}", f"{value!r}", hint)


# --- row stages


def shapes_like(like: Any) -> Any:
    """Return the shape of each leaf of a client's contribution, as float32 ShapeDtypeStructs.

    Args:
        like: a Task, whose parameters have these shapes; or a pytree of arrays or shapes.
    """
    if isinstance(like, Task):
        like = jax.eval_shape(like.init, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.float32), like)


def numbers_of(where: str, like: Any) -> int:
    """Return the number of coordinates of a contribution; reject a contribution without any.

    Args:
        where: the name of the caller, for the message.
        like: as in `shapes_like`.
    """
    size = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes_like(like)))
    if not size:
        expected = "like=task, or the contribution of a client (arrays or their shapes)"
        checks.fail(where, expected, f"like={checks.short_repr(like)}")
    return size


def require_like(where: str, row: Tree, shapes: Tree) -> None:
    """Reject a contribution whose leaves do not have the expected shapes.

    Args:
        where: the name of the caller, for the message.
        row: the contribution.
        shapes: a tree with the expected shape of each leaf.
    """
    given = jax.tree.map(jnp.shape, row)
    if given != shapes:
        expected = f"contributions like like=..., {shapes}"
        checks.fail(where, expected, f"{given}", "Pass the contribution of a client as like=...")


def require_isotropic(where: str, shape: "Shape | None", hint: str) -> None:
    """Reject noise with a Shape after a stage whose contributions have no Haar bands.

    Args:
        where: the name of the stage, for the message.
        shape: the Shape of the noise, or None.
        hint: the last sentence of the message.
    """
    if shape is not None:
        checks.fail(where, "isotropic noise", "noise of a shape", hint)


def require_floats(row: Tree) -> None:
    """Reject a contribution with integers or complex numbers.

    Neither a scaled contribution nor noise could be represented in their type.
    """
    dtypes = [x.dtype for x in jax.tree.leaves(row) if not jnp.issubdtype(x.dtype, jnp.floating)]
    if dtypes:
        checks.fail(
            "clip", "contributions of floats", f"{dtypes[0]}", "Cast them before they are clipped."
        )


def scale_to_bound(bound: Any, row: Any, norm: Any = None, gamma: Any = None) -> tuple[Any, ...]:
    """Scale a contribution down to a norm of at most `bound`; also return whether it was longer.

    Args:
        bound: [], the largest norm.
        row: a pytree of floats.
        norm: [], the norm of the row; None for the Euclidean norm.
        gamma: as in `factor_to_bound`.
    """
    require_floats(row)
    norm = pytrees.norm(row) if norm is None else norm
    return pytrees.scale(factor_to_bound(bound, norm, gamma), row), norm > bound


def factor_to_bound(bound: Any, norm: Array, gamma: Any = None) -> Array:
    """Return the factor that scales a contribution down to `bound`; nan if its norm is not finite.

    With `gamma`, the factor of automatic clipping, which may exceed 1.

    The squares of finite values overflow if the norm exceeds 1.8e19.  Such a contribution is
    treated like one with non-finite values: it is replaced by zero, and Health.nonfinite_rows
    counts it.
    """
    if gamma is None:
        factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    else:
        factor = bound / (norm + gamma)
    return jnp.where(jnp.isfinite(norm), factor, jnp.nan)


@named("stages.clip_l2")
def _clip_l2(state: Any, row: Tree, *, bound: Array) -> tuple[Tree, Array]:
    return scale_to_bound(bound, row)


def stretch(shape: Shape | None) -> Array | float:
    """Return the largest ratio of the norm of `shape` to the Euclidean norm."""
    return 1.0 if shape is None else jnp.max(shape.scales)


@named("stages.clip_l2.bound")
def _clip_bound(state: Any, shape: Shape | None, *, bound: Array, **_: Any) -> Array:
    """Return the bound of a contribution after a Euclidean clip, in the norm of `shape`."""
    return bound * stretch(shape)


def clip_l2(bound: ArrayLike | Callable[..., Any]) -> Stage:
    """Scale each contribution down to a Euclidean norm of at most `bound`, over all leaves
    together.

    Args:
        bound: > 0, in the units of the contribution; or a function of the round.

    Privacy:
        One contribution changes the sum by at most `bound` (add_remove) or 2 * bound (replace_one).

    Raises:
        ValueError: unless bound is > 0 and finite (leave the stage out for no clipping).

    References:
        Abadi et al., CCS 2016, Algorithm 1.

    Example:
        >>> from jfl.privacy.mechanisms.chain import chain, release
        >>> m = chain(clip_l2(1.0), total(), adjacency="add_remove")
        >>> release(m, jax.random.key(0), (), jnp.array([[3.0, 4.0]]), jnp.ones(1))[0].tolist()
        [0.6000000238418579, 0.800000011920929]
    """
    data = dict(bound=as_level("clip_l2", "Leave the stage out for no clipping.", bound=bound))
    return Stage(Fn(_clip_l2, data), Fn(_clip_bound, data), name="clip_l2")


# With a smaller gamma, coordinates whose squares underflow in float32 could exceed the bound.
MIN_GAMMA = np.float32(1e-6)


def gamma_of(data: dict[str, Any]) -> Any:
    """Return the stability constant in the numbers of a clip, or None.

    A constant that is traced, or was changed by hand, may be below MIN_GAMMA, which is returned
    instead.
    """
    return jnp.maximum(data["gamma"], MIN_GAMMA) if "gamma" in data else None


@named("stages.clip_automatic")
def _clip_automatic(state: Any, row: Tree, **numbers: Any) -> tuple[Tree, Array]:
    return scale_to_bound(numbers["bound"], row, gamma=gamma_of(numbers))


def clip_automatic(bound: ArrayLike | Callable[..., Any] = 1.0, gamma: ArrayLike = 0.01) -> Stage:
    """Scale each contribution, also a short one, to a Euclidean norm of almost `bound`.

    This is automatic clipping, AUTO-S in the paper: g becomes bound * g / (norm of g + gamma).  A
    bound is equivalent to a factor of the learning rate, so there is no clip norm to tune.  The
    clip fraction counts the contributions that were longer than `bound`.

    Args:
        bound: as in `clip_l2`.
        gamma: in the units of the contribution, at least 1e-6.  Contributions that are much shorter
            stay short.

    Privacy:
        As `clip_l2`: one contribution changes the sum by at most `bound` (add_remove) or 2 * bound
        (replace_one).

    Raises:
        ValueError: as in `clip_l2`; for a gamma below 1e-6.

    References:
        Bu, Wang, Zha, Karypis, NeurIPS 2023, "Automatic clipping: differentially private deep
        learning made easier and stronger", arXiv:2206.07136.

    Example:
        >>> from jfl.privacy.mechanisms.chain import chain, release
        >>> m = chain(clip_automatic(gamma=1.0), total(), adjacency="add_remove")
        >>> release(m, jax.random.key(0), (), jnp.array([[3.0, 0.0]]), jnp.ones(1))[0].tolist()
        [0.75, 0.0]
    """
    where = "clip_automatic"
    data = dict(bound=as_level(where, bound=bound), gamma=as_number(where, gamma=gamma))
    if checks.is_concrete(gamma) and data["gamma"] < MIN_GAMMA:
        checks.fail(where, f"gamma >= {MIN_GAMMA:g}", f"gamma={gamma}")
    return Stage(Fn(_clip_automatic, data), Fn(_clip_bound, data), name="clip_automatic")


@named("stages.clip_l1")
def _clip_l1(state: Any, row: Tree, *, bound: Array) -> tuple[Tree, Array]:
    return scale_to_bound(bound, row, pytrees.norm_l1(row))


def clip_l1(bound: ArrayLike | Callable[..., Any]) -> Stage:
    """Scale each contribution down to an L1 norm of at most `bound`, over all leaves together.

    Args:
        bound: > 0, in the units of the contribution; or a function of the round.

    Privacy:
        One contribution changes the sum by at most `bound` (add_remove) or 2 * bound (replace_one)
        in the L1 norm, as `laplace` noise requires.  The same bound holds in the Euclidean norm,
        which is never larger.

    Raises:
        ValueError: unless bound is > 0 and finite (leave the stage out for no clipping).

    Example:
        >>> from jfl.privacy.mechanisms.chain import chain, release
        >>> m = chain(clip_l1(1.0), total(), adjacency="add_remove")
        >>> release(m, jax.random.key(0), (), jnp.array([[3.0, -1.0]]), jnp.ones(1))[0].tolist()
        [0.75, -0.25]
    """
    data = dict(bound=as_level("clip_l1", "Leave the stage out for no clipping.", bound=bound))
    return Stage(Fn(_clip_l1, data), Fn(_clip_bound, data), name="clip_l1")


def layer_bounds(bounds: Tree, layers: int | None, count: int) -> list[Any]:
    """Return the bound of each of `count` leaves; one number is divided over all of them."""
    return jax.tree.leaves(bounds) if layers else [bounds / np.float32(count) ** 0.5] * count


@named("stages.clip_per_layer")
def _clip_per_layer(
    state: Any, row: Tree, *, bounds: Tree, layers: int | None
) -> tuple[Tree, Array]:
    leaves, treedef = jax.tree.flatten(row)
    if layers not in (None, len(leaves)):
        checks.fail(
            "clip_per_layer",
            f"bounds for the {len(leaves)} leaves of a contribution",
            f"{layers}",
            "The bound of a contribution depends on the number of leaves.",
        )
    limits = layer_bounds(bounds, layers, len(leaves))
    pairs = [scale_to_bound(b, x) for b, x in zip(limits, leaves)]
    return treedef.unflatten([x for x, _ in pairs]), jnp.any(jnp.array([c for _, c in pairs]))


@named("stages.clip_per_layer.bound")
def _layers_bound(state: Any, shape: Shape | None, *, bounds: Tree, layers: int | None) -> Array:
    """Return the bound of a contribution whose leaves are clipped separately, in the norm of
    `shape`."""
    limits = jnp.stack([jnp.float32(b) for b in jax.tree.leaves(bounds)])
    return jnp.sqrt(jnp.sum(jnp.square(limits))) * stretch(shape)


def clip_per_layer(bounds: Sequence[Any] | ArrayLike) -> Stage:
    """Scale each leaf of a contribution down to a norm of at most its bound.

    Args:
        bounds: either a number or a pytree with one number per leaf, in the units of the
            contribution.  A single number bounds the norm of the whole contribution, and each of
            its n leaves is scaled down to a norm of at most bounds / sqrt(n).

    Privacy:
        The norm of a whole contribution is at most the square root of the sum of the squared bounds
        of its leaves.

    Raises:
        ValueError: unless all bounds are > 0.

    References:
        McMahan et al., 2018, "A general approach to adding differential privacy".

    Example:
        >>> from jfl.privacy.mechanisms.chain import chain, sensitivity
        >>> of = lambda stage: chain(stage, total(), gaussian(1.0), adjacency="add_remove")
        >>> [float(sensitivity(of(clip_per_layer(bounds)))) for bounds in (1.0, (3.0, 4.0))]
        [1.0, 5.0]
    """
    limits, tree = jax.tree.flatten(bounds, is_leaf=lambda bound: bound is None)
    if not limits:
        checks.fail("clip_per_layer", "one bound, or one for each leaf", f"bounds={bounds!r}")
    data = dict(bounds=tree.unflatten([as_number("clip_per_layer", bound=b) for b in limits]))
    fixed = dict(layers=None if limits[0] is bounds else len(limits))
    return Stage(
        Fn(_clip_per_layer, data, fixed), Fn(_layers_bound, data, fixed), name="clip_per_layer"
    )


@named("stages.clip_adaptive")
def _clip_adaptive(
    state: Array, row: Tree, *, indicator: Array, floor: Array, **_: Any
) -> tuple[Tree, Array]:
    """Clip a row to the current norm, and append the coordinate that says whether it was
    shorter."""
    norm = jnp.maximum(state, floor)
    clipped, over = scale_to_bound(norm, row)
    bit = jnp.where(over, 0.0, 1.0)
    return (clipped, norm * indicator * (bit - 0.5)), over


@named("stages.clip_adaptive.bound")
def _adaptive_bound(
    state: Array, shape: Shape | None, *, indicator: Array, floor: Array, **_: Any
) -> Array:
    """Return the bound of a clipped row together with its extra coordinate."""
    require_isotropic("clip_adaptive", shape, "One coordinate more has no band.")
    return jnp.maximum(state, floor) * jnp.sqrt(1 + jnp.square(indicator) / 4)


@named("stages.clip_adaptive.update")
def _update_clip_norm(
    state: Array,
    value: Tree,
    *,
    indicator: Array,
    quantile: Array,
    lr: Array,
    count: Array,
    floor: Array,
) -> tuple[Array, Tree]:
    """Return the next clip norm, and the release without the extra coordinate."""
    value, coordinate = value
    norm = jnp.maximum(state, floor)
    below = coordinate / (norm * indicator * count) + 0.5
    return jnp.maximum(norm * jnp.exp(-lr * (below - quantile)), floor), value


# The smallest adaptive clip norm, as a fraction of the initial one.
MIN_RELATIVE_CLIP = 1e-6


def clip_adaptive(
    initial: ArrayLike,
    count: ArrayLike,
    *,
    quantile: ArrayLike = 0.5,
    lr: ArrayLike = 0.2,
    indicator: ArrayLike = 0.1,
) -> Stage:
    """Clip to a norm that privately follows a quantile of the norms of the contributions.

    Each contribution has one additional coordinate, C * indicator * (bit - 1/2), where the bit is 1
    if its norm is at most the clip norm C.  The chain adds one isotropic Gaussian to the sum of
    the contributions with this coordinate, so its noise multiplier already accounts for the bits.
    After each release, C is multiplied by exp(-lr * (noisy fraction of bits - quantile)).

    Args:
        initial: C of the first release, > 0, in the units of a contribution.
        count: the expected number of contributions, assumed public.
        quantile: the quantile of the norms that C follows, in (0, 1].
        lr: the learning rate of log(C).
        indicator: the weight of the bit.  A larger one gives a less noisy C, and slightly more
            noise in the release.

    Privacy:
        The bound is C * sqrt(1 + indicator^2 / 4).  C never falls below a millionth of `initial`,
        nor below 1e-15, where float32 could not represent norms and noise.

    Raises:
        ValueError: for arguments outside those ranges.  `private_grad` rejects this stage, because
            a client keeps no clip norm from step to step.

    References:
        Andrew et al., NeurIPS 2021, with the joint release of one vector.
    """
    where = "clip_adaptive"
    initial = as_number(where, initial=initial)
    checks.require_positive(where, single=True, count=count, lr=lr, indicator=indicator)
    checks.require_fraction(where, single=True, quantile=quantile)
    xp = jnp if isinstance(initial, jax.Array) else np
    floor = xp.maximum(MIN_RELATIVE_CLIP * initial, FLOOR)
    given: dict[str, Any] = dict(
        indicator=indicator, quantile=quantile, lr=lr, count=count, floor=floor
    )
    data = {k: checks.as_scalar(v) for k, v in given.items()}
    return Stage(
        Fn(_clip_adaptive, data),
        Fn(_adaptive_bound, data),
        state=initial,
        update=Fn(_update_clip_norm, data),
        name="clip_adaptive",
    )


@named("stages.bounded")
def _keep_row(state: Any, row: Tree, *, value: Array) -> tuple[Tree, Array]:
    return row, jnp.zeros((), bool)


@named("stages.bounded.bound")
def _declared_bound(state: Any, shape: Shape | None, *, value: Array) -> Array:
    return value * stretch(shape)


def bounded(value: ArrayLike, reason: str) -> Stage:
    """Declare, without clipping, that the norm of a contribution is at most `value`.

    Args:
        value: the bound, > 0, in the units of the contribution.
        reason: why the bound holds.  "upload": in `release`, because the upload is clipped
            (`jfl.plan` checks this).  "prox_erm": in a client, because its problem is strongly
            convex.  "contraction": in a client, because gradient steps on convex losses are
            contractions.  A guarantee that relies on one of the last two is "conditional".
    """
    names = {why: name for name, why in DECLARED.items()}
    checks.require_one_of("bounded", tuple(names), reason=reason)
    data = dict(value=as_number("bounded", value=value))
    return Stage(Fn(_keep_row, data), Fn(_declared_bound, data), name=names[reason])


# --- clipping in coordinates that earlier releases scale


class Squares(NamedTuple):
    """The state of `clip_scaled`."""

    # the running mean of the squared coordinates of earlier releases, shaped like a contribution
    mean: Any


def clip_scaled(
    bound: ArrayLike,
    count: ArrayLike,
    *,
    like: Any,
    decay: ArrayLike = 0.9,
    least: ArrayLike | None = None,
) -> Stage:
    """Clip contributions after dividing each coordinate by its typical size (scale-then-privatize).

    The noisy sum is multiplied by the sizes again.  Coordinates that are usually small therefore
    get less noise, and large ones more.

    The size of a coordinate is the square root of a running mean of squares of earlier releases, as
    in Adam, plus `least`.  All sizes are normalised to a mean square of 1, so the total noise is
    that of clip_l2(bound), and the first release is the same as with clip_l2(bound).

    Args:
        bound: the clip norm, > 0, of a contribution whose coordinates were divided by their sizes.
        count: the expected number of contributions, or sum of their weights; assumed public.
        like: a Task, or the contribution of a client (arrays or their shapes).
        decay: the factor of the running mean at each release, in [0, 1).
        least: the number that is added to each size, > 0, in the units of a coordinate.  If None, a
            tenth of the size of a coordinate when `bound` is spread over all of them.

    Privacy:
        The privacy is that of clip_l2(bound), because the sizes depend only on earlier releases.

    Raises:
        ValueError: for arguments outside those ranges.  `private_grad` and uploads reject this
            stage, because clients do not keep the sizes.

    References:
        "Scale-then-privatize", arXiv 2507.01129, Algorithm 8, which applies it to gradients of
        rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import jfl
        >>> clip = jfl.clip_scaled(1.0, 10.0, like=jnp.zeros(3))
        >>> jfl.chain(clip, jfl.total(), jfl.gaussian(1.0), jfl.divide(10)).stages[0]
        clip_scaled(1, 10, 0.9, 0.057735)
    """
    where = "clip_scaled"
    as_number(where, bound=bound)
    checks.require_positive(where, single=True, count=count)
    checks.require_nonnegative(where, single=True, decay=decay)
    if checks.is_concrete(decay) and not np.asarray(decay) < 1:
        checks.fail(where, "decay < 1", f"decay={decay!r}")
    numbers = numbers_of(where, like)
    least = 0.1 * bound / numbers**0.5 if least is None else least
    checks.require_positive(where, single=True, least=least)
    given: dict[str, Any] = dict(bound=bound, count=count, decay=decay, least=least)
    data = {k: checks.as_scalar(v) for k, v in given.items()}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes_like(like))
    return Stage(
        Fn(_clip_scaled, data),
        Fn(_scaled_bound, data),
        state=Squares(zeros),
        update=Fn(_unscale, data),
        name=where,
    )


def _coordinate_sizes(state: Squares, least: Array) -> Tree:
    """Return the size of each coordinate, normalised to a mean square of 1."""
    sizes = pytrees.map(lambda x: jnp.sqrt(x) + least, state.mean)
    leaves = jax.tree.leaves(sizes)
    mean = sum(jnp.sum(jnp.square(x)) for x in leaves) / sum(x.size for x in leaves)
    return pytrees.map(lambda x: x / jnp.sqrt(mean), sizes)


@named("scaled_clip.clip")
def _clip_scaled(
    state: Squares, row: Tree, *, bound: Array, least: Array, **_: Any
) -> tuple[Tree, Array]:
    sizes = _coordinate_sizes(state, least)
    require_like("clip_scaled", row, jax.tree.map(jnp.shape, sizes))
    return scale_to_bound(bound, pytrees.map(lambda x, size: x / size, row, sizes))


@named("scaled_clip.bound")
def _scaled_bound(state: Squares, shape: Shape | None, *, bound: Array, **_: Any) -> Array:
    require_isotropic("clip_scaled", shape, "Each release changes the shape.")
    return bound


@named("scaled_clip.update")
def _unscale(
    state: Squares, value: Tree, *, count: Array, decay: Array, least: Array, **_: Any
) -> tuple[Squares, Tree]:
    value = pytrees.map(lambda x, size: x * size, value, _coordinate_sizes(state, least))
    keep = lambda old, x: decay * old + (1 - decay) * jnp.square(x / count)
    return Squares(pytrees.map(keep, state.mean, value)), value


# --- sum, noise, post


def total() -> Stage:
    """Sum the contributions; those with weight 0 add exactly zero, whatever their values."""
    return Stage(None, name="total", role="sum")


def gaussian(
    noise_multiplier: ArrayLike | Callable[..., Any] | None = None,
    *,
    std: ArrayLike | Callable[..., Any] | None = None,
    shape: Shape | None = None,
    generator: str = "philox",
) -> Stage:
    """Add N(0, sigma^2) to every coordinate, where sigma = noise_multiplier * sensitivity.

    The sensitivity of a sum of contributions with clip norm C is C under add_remove and zero_out,
    and 2 C under replace_one, the adjacency of samples of fixed size.  The multiplier or std may be
    a function of the round.  In `private_grad` and in `upload` it may also have one number for each
    client.

    Args:
        noise_multiplier: sigma / sensitivity, dimensionless, > 0.
        std: sigma itself, in the units of the sum, > 0; instead of `noise_multiplier`.
        shape: a Shape from `jfl.wavelet`, for noise that is isotropic in its norm; the sensitivity
            is then measured in this norm.
        generator: "philox" computes normals from counters in one pass; "key" uses random words from
            the key of the run (threefry unless you chose another generator) and is several times
            slower.  Noise with a shape always uses "philox".

    Raises:
        ValueError: unless exactly one of noise_multiplier and std is given, and is > 0 (leave the
            stage out for no noise).
    """
    if (noise_multiplier is None) == (std is None):
        checks.fail(
            "gaussian",
            "either noise_multiplier or std",
            f"noise_multiplier={noise_multiplier!r}, std={std!r}",
        )
    name, value = (
        ("std", std) if noise_multiplier is None else ("noise_multiplier", noise_multiplier)
    )
    given: dict[str, Any] = {name: value}
    if not callable(value) and checks.ndim("gaussian", name, value) == 1:
        checks.require_positive("gaussian", **given)
        refuse_tiny("gaussian", **given)
        value = jnp.asarray(value, jnp.float32)
    else:
        hint = "For no noise, leave the stage out (in a config, noise_multiplier=None)."
        value = as_level("gaussian", hint, **given)
    generators = GENERATORS if shape is None else ("philox",)
    checks.require_one_of("gaussian", generators, generator=generator)
    return Stage(
        None,
        noise=value,
        shape=shape,
        name="gaussian",
        role="noise",
        absolute=std is not None,
        law="gaussian",
        generator=generator,
    )


def laplace(noise_multiplier: ArrayLike) -> Stage:
    """Add Laplace noise of scale noise_multiplier * sensitivity to every coordinate.

    The sensitivity is in the L1 norm, so the clip must be `clip_l1`.

    Args:
        noise_multiplier: scale / sensitivity, dimensionless, > 0; the same in all rounds and for
            all clients.  The standard deviation is sqrt(2) times the scale.

    Privacy:
        One release has epsilon = 1 / noise_multiplier at delta = 0.  Several are composed by their
        Renyi divergences.  With a sampling rate q, epsilon is first amplified to
        log(1 + q (e^epsilon - 1)), and the divergences are bounded by those of any mechanism with
        this epsilon, which is valid but not tight.  For a release of many coordinates `gaussian`
        costs less privacy; for few coordinates, or at a tiny delta, Laplace noise does.

    Raises:
        ValueError: unless noise_multiplier is one number > 0.

    References:
        Dwork et al., TCC 2006; Mironov, CSF 2017, Proposition 6.

    Example:
        >>> import jfl
        >>> jfl.chain(jfl.clip_l1(1.0), jfl.total(), jfl.laplace(2.0), jfl.divide(10))
        chain(clip_l1(1), total(), laplace(2), divide(10))
    """
    hint = "A function of the round is not supported. Leave the stage out for no noise."
    value = as_number("laplace", hint, noise_multiplier=noise_multiplier)
    return Stage(None, noise=value, name="laplace", role="noise", law="laplace")


@named("stages.divide")
def _divide(value: Tree, after: After, *, n: ArrayLike) -> tuple[Tree, After]:
    value = pytrees.map(lambda x: x / jnp.asarray(n, x.dtype), value)
    return value, after if after.std is None else after._replace(std=after.std / n)


@named("stages.divide_realised")
def _divide_realised(value: Tree, after: After) -> tuple[Tree, After]:
    return _divide(value, after, n=jnp.where(after.realised > 0, after.realised, 1))


def divide(n: ArrayLike | str) -> Stage:
    """Divide the noisy sum.

    Args:
        n: a public number > 0; "size", the number of rows of the client whose gradients are summed;
            or "weight", the sum of the weights of the cohort.

    Privacy:
        Dividing by a public number is post-processing.  Dividing by a realised count is not,
        because the count is data.  "size" can be used if the unit is an example and the adjacency
        replace_one or zero_out, and assumes public sizes.  "weight" can be used in a release
        without noise (the usual normalised FedAvg).

    Raises:
        ValueError: unless n is > 0 and finite, "size" or "weight".
    """
    if isinstance(n, str):
        checks.require_one_of("divide", ("size", "weight"), n=n)
        return Stage(Fn(_divide_realised), name=f"divide_by_{n}", role="post")
    checks.require_positive("divide", single=True, n=n)
    return Stage(Fn(_divide, dict(n=checks.as_scalar(n))), name="divide", role="post")


@named("post_processing.apply")
def _apply_function(
    value: Tree, after: After, *, function: Callable[..., Any]
) -> tuple[Tree, After]:
    return function(value), after._replace(std=None)


def post_process(function: Callable[..., Any]) -> Stage:
    """Apply a pure function to the noisy sum; it must come at the end of a chain.

    Args:
        function: maps the released value to a value of the same shapes.  Arrays in its closure must
            be public; a plan whose function holds the federation's `x` or `y` is rejected.

    Privacy:
        This is post-processing: the function sees only the noisy sum.

    Example:
        >>> import jfl
        >>> signs = post_process(lambda value: jax.tree.map(jnp.sign, value))
        >>> chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), signs)
        >>> [stage.name for stage in chain.stages]
        ['clip_l2', 'total', 'gaussian', 'post_process']
    """
    if not callable(function) or isinstance(function, Fn):
        need = "a plain function of the released value"
        checks.fail("post_process", need, checks.short_repr(function))
    return Stage(
        Fn(_apply_function, static=dict(function=function)), name="post_process", role="post"
    )


@named("post_processing.clip_values")
def _clip_values(value: Tree, after: After, *, most: Array) -> tuple[Tree, After]:
    clipped = pytrees.map(lambda x: jnp.clip(x, -most.astype(x.dtype), most.astype(x.dtype)), value)
    return clipped, after._replace(std=None)


def clip_values(most: float) -> Stage:
    """Clip every coordinate of a release to [-most, most].

    In a sum of clipped contributions, no coordinate is larger than the clip norm times the number
    of contributions, so larger values are noise.

    Args:
        most: the largest absolute value of a coordinate, > 0, in the units of the release at this
            place of the chain.

    Privacy:
        This is post-processing.
    """
    checks.require_positive("clip_values", single=True, most=most)
    return Stage(
        Fn(_clip_values, dict(most=checks.as_scalar(most))), name="clip_values", role="post"
    )


@named("post_processing.james_stein")
def _james_stein(value: Tree, after: After) -> tuple[Tree, After]:
    if after.std is None or after.shape is not None:
        checks.fail(
            "james_stein",
            "noise of one known standard deviation before it",
            "none" if after.std is None else "noise of a shape",
            "Put it after gaussian(...) and divide(...).",
        )
    leaves = jax.tree.leaves(value)
    dimension = sum(x.size for x in leaves)
    squares = jnp.square(pytrees.norm(value))
    noise = max(dimension - 2, 0) * jnp.square(after.std)  # one coordinate must not grow
    kept = jnp.maximum(0.0, 1 - noise / jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
    return pytrees.scale(kept, value), after._replace(std=None)


def james_stein() -> Stage:
    """Shrink a release towards zero by its James-Stein factor.

    The factor of a release v with d coordinates is max(0, 1 - (d - 2) sigma^2 / ||v||^2), where
    sigma is the standard deviation of the noise in a coordinate.  It removes the length that noise
    adds to v.  For d > 2 the expected squared error is smaller than that of v itself, whatever the
    true value.  For d <= 2 the release stays unchanged.  `jfl.wavelet.james_stein` does this
    separately in each band.

    Privacy:
        This is post-processing: sigma is a public constant of the mechanism.

    Raises:
        ValueError: when it runs, if the chain has no isotropic noise before it.

    References:
        James and Stein, 1961 (the positive part of Baranchik, 1964); Balle and Wang, ICML 2018, for
        Gaussian mechanisms.
    """
    return Stage(Fn(_james_stein), name="james_stein", role="post")
