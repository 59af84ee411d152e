"""Stages that come after the noise: they see the release alone, so they cost no privacy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ...core import checks, pytrees
from ...core.aliases import Array, Tree
from ...core.records import Fn, named
from .stages import After, Stage


@named("post_processing.apply")
def _apply(value: Tree, after: After, *, function: Callable[..., Any]) -> tuple[Tree, After]:
    return function(value), after._replace(std=None)


def post_process(function: Callable[..., Any]) -> Stage:
    """Apply a pure function to the noisy sum, as the last stages of a chain.

    Args:
        function: maps the released value to a value of the same shapes.  Arrays that it holds in a
            closure must be public; a plan whose function holds the federation's `x` or `y` is
            rejected.

    Privacy:
        None is lost: the function reads only the noisy sum.

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
    return Stage(Fn(_apply, static=dict(function=function)), name="post_process", role="post")


@named("post_processing.clip_values")
def _clip_values(value: Tree, after: After, *, most: Array) -> tuple[Tree, After]:
    clipped = pytrees.map(lambda x: jnp.clip(x, -most.astype(x.dtype), most.astype(x.dtype)), value)
    return clipped, after._replace(std=None)


def clip_values(most: float) -> Stage:
    """Cut every coordinate of a release to [-most, most].

    Of a sum of clipped contributions no coordinate is larger than the clip norm times the number of
    contributions: what is beyond is noise.

    Args:
        most: in the units of the release at this place of the chain, > 0.

    Privacy:
        post-processing.
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
            "Put it behind gaussian(...) and divide(...).",
        )
    leaves = jax.tree.leaves(value)
    dimension = sum(x.size for x in leaves)
    squares = jnp.square(pytrees.norm(value))
    noise = (dimension - 2) * jnp.square(after.std)
    kept = jnp.maximum(0.0, 1 - noise / jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
    return pytrees.scale(kept, value), after._replace(std=None)


def james_stein() -> Stage:
    """Shrink a release towards zero as far as its noise makes it too long: max(0, 1 - (d - 2)
    sigma^2 / ||v||^2) times v.

    For d > 2 coordinates the expected squared error is smaller than that of v itself, whatever the
    truth is.  `jfl.wavelet.james_stein` does so in each band.

    Privacy:
        post-processing: sigma is a number of the mechanism.

    Raises:
        ValueError: when it runs, without isotropic noise before it.

    References:
        James and Stein, 1961 (the positive part of Baranchik, 1964); Balle and Wang, ICML 2018, for
        Gaussian mechanisms.
    """
    return Stage(Fn(_james_stein), name="james_stein", role="post")
