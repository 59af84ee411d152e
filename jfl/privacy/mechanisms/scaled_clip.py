"""Clipping in coordinates that are scaled by what earlier releases showed of their size."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks, pytrees
from ...core.aliases import Array, Tree
from ...core.records import Fn, named
from .stages import Shape, Stage, refuse_tiny, scale_to_bound, shapes_like


class Squares(NamedTuple):
    """What `clip_scaled` remembers."""

    mean: Any  # like a contribution: of the squared coordinates of earlier mean contributions


def clip_scaled(
    bound: ArrayLike,
    count: ArrayLike,
    *,
    like: Any,
    decay: ArrayLike = 0.9,
    least: ArrayLike | None = None,
) -> Stage:
    """Clip contributions whose coordinates are divided by their usual size, and multiply the noisy
    sum by it (scale-then-privatize): small coordinates get less noise, large ones more.

    The usual size of a coordinate is the root of a running mean of squares of earlier releases, as
    in Adam, plus `least`.  All sizes are scaled together so that their mean square is 1: the noise
    of all coordinates together is that of clip_l2(bound), which the first release equals.

    Args:
        bound: the clip norm, > 0, of a contribution whose coordinates are divided by their size.
        count: the expected number of contributions, or sum of their weights, which is public.
        like: a Task, or what a client contributes (arrays or their shapes).
        decay: how much of the running mean stays at each release, in [0, 1).
        least: of a size, > 0, in the units of a coordinate; None: a tenth of what a coordinate has
            where `bound` is spread over all of them.

    Privacy:
        that of clip_l2(bound): sizes follow from earlier releases alone.

    Raises:
        ValueError: outside those ranges; in `private_grad` and in uploads, where a client keeps no
            sizes.

    References:
        "Scale-then-privatize", arXiv 2507.01129, Algorithm 8, there for the gradients of rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import jfl
        >>> clip = jfl.clip_scaled(1.0, 10.0, like=jnp.zeros(3))
        >>> jfl.chain(clip, jfl.total(), jfl.gaussian(1.0), jfl.divide(10)).stages[0]
        clip_scaled(1, 10, 0.9, 0.057735)
    """
    where = "clip_scaled"
    checks.require_positive(where, single=True, bound=bound, count=count)
    refuse_tiny(where, bound=bound)
    checks.require_nonnegative(where, single=True, decay=decay)
    if checks.is_concrete(decay) and not np.asarray(decay) < 1:
        checks.fail(where, "decay < 1", f"decay={decay!r}")
    shapes = shapes_like(like)
    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    if not numbers:
        checks.fail(where, "like=task, or what a client contributes", f"like={like!r}")
    least = 0.1 * bound / numbers**0.5 if least is None else least
    checks.require_positive(where, single=True, least=least)
    given: dict[str, Any] = dict(bound=bound, count=count, decay=decay, least=least)
    data = {k: checks.as_scalar(v) for k, v in given.items()}
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    return Stage(
        Fn(_clip_scaled, data),
        Fn(_scaled_bound, data),
        state=Squares(zeros),
        update=Fn(_unscale, data),
        name=where,
    )


def _sizes(state: Squares, least: Array) -> Tree:
    """Of each coordinate, with a mean square of 1."""
    sizes = pytrees.map(lambda x: jnp.sqrt(x) + least, state.mean)
    leaves = jax.tree.leaves(sizes)
    mean = sum(jnp.sum(jnp.square(x)) for x in leaves) / sum(x.size for x in leaves)
    return pytrees.map(lambda x: x / jnp.sqrt(mean), sizes)


@named("scaled_clip.clip")
def _clip_scaled(
    state: Squares, row: Tree, *, bound: Array, count: Array, decay: Array, least: Array
) -> tuple[Tree, Array]:
    sizes = _sizes(state, least)
    if _differ(row, sizes):
        checks.fail(
            "clip_scaled",
            f"contributions like like=..., {jax.tree.map(jnp.shape, sizes)}",
            f"{jax.tree.map(jnp.shape, row)}",
            "Give what a client contributes as like=...",
        )
    return scale_to_bound(bound, pytrees.map(lambda x, size: x / size, row, sizes))


def _differ(one: Tree, other: Tree) -> bool:
    """True for another structure or other shapes."""
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (one, other)]
    return jax.tree.structure(one) != jax.tree.structure(other) or shapes[0] != shapes[1]


@named("scaled_clip.bound")
def _scaled_bound(
    state: Squares, shape: Shape | None, *, bound: Array, count: Array, decay: Array, least: Array
) -> Array:
    if shape is not None:
        checks.fail(
            "clip_scaled", "isotropic noise", "noise of a shape", "Each of them changes the shape."
        )
    return bound


@named("scaled_clip.update")
def _unscale(
    state: Squares, value: Tree, *, bound: Array, count: Array, decay: Array, least: Array
) -> tuple[Squares, Tree]:
    value = pytrees.map(lambda x, size: x * size, value, _sizes(state, least))
    keep = lambda old, x: decay * old + (1 - decay) * jnp.square(x / count)
    return Squares(pytrees.map(keep, state.mean, value)), value
