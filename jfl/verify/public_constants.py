"""Arrays of numbers that a plan holds and that a guarantee assumes to be public.

No check can see what an array was computed from: a mean of rows, a scaled row, and a model that was
trained on them without noise look like any other numbers.  So a guarantee names the arrays that it
assumes to be public.  It does not name numbers, such as a learning rate or a clip norm, or arrays
that have the same number in all places: a plan has dozens of them, and none can hold a row.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import checks
from ..core.records import Caveat, Fn, Mechanism, Plan
from .ownership import nodes

CODE = "public-constants"
INIT, LOSS, WEIGHTS = "starting parameters", "loss", "weights"
# arrays that a caveat does not name: jfl computed them, or nothing that is released depends on them
UNLISTED = ""
SHAPES = 8  # of one place that are written out


def bound(plan: Plan) -> list[tuple[str, list]]:
    """Return the arrays that the records of a plan hold, by place, without those of closures."""
    task, algorithm = plan.task, plan.algorithm
    is_chain = lambda node: isinstance(node, Mechanism)
    plain = [x for x in jax.tree.leaves(algorithm, is_leaf=is_chain) if not is_chain(x)]
    parts: list[tuple[str, Any]] = [(INIT, task.init), (LOSS, task.loss)]
    for stage in (
        s for m in nodes((algorithm, plan.upload, plan.release), Mechanism) for s in m.stages
    ):
        parts.append((UNLISTED, stage.strategy))
        parts.append(
            (
                stage.name,
                [stage.apply, stage.bound, stage.noise, stage.state, stage.update, stage.shape],
            )
        )
    parts.append(("algorithm", plain))
    parts.append((UNLISTED if _follow_sizes(plan) else WEIGHTS, plan.weights))
    parts.append((UNLISTED, (task.predict, task.evaluation, task.metrics)))
    return [(place, [x for x in jax.tree.leaves(part) if np.size(x) > 1]) for place, part in parts]


def _follow_sizes(plan) -> bool:
    """True for the weights "uniform" and "size"."""
    if isinstance(plan.weights, Fn):
        return False
    share = getattr(plan.sampler, "share", None)
    if not checks.is_concrete((plan.weights, plan.fed.size, share)):  # a plan that is made in a jit
        return False
    wanted = np.asarray(plan.weights, np.float64) * (1.0 if share is None else np.asarray(share))
    sizes = np.asarray(plan.fed.size, np.float64).reshape(-1)
    same = lambda other: np.allclose(wanted * other.sum(), other * wanted.sum(), rtol=1e-4)
    return same(np.ones(wanted.shape)) or same(sizes)


def caveats(held: list[tuple[str, list]]) -> tuple[Caveat, ...]:
    """Return the caveat that names the arrays, or nothing if there are none.

    Args:
        held: arrays by place, the same array perhaps in several.
    """
    named, seen = {}, set()
    for place, arrays in held:
        for array in arrays:
            if id(array) in seen:
                continue
            seen.add(id(array))
            if place != UNLISTED and _tells(array):
                shapes = named.setdefault(place, {})
                words = f"{array.dtype}{list(np.shape(array))}"
                shapes[words] = shapes.get(words, 0) + 1
    if not named:
        return ()
    listed = ", ".join(f"{place} {_words(shapes)}" for place, shapes in named.items())
    return (Caveat(f"Assumes that constants are public: {listed}.", CODE),)


def _tells(array) -> bool:
    """Return whether an array holds numbers that are not all equal.

    Labels and images are integers as well, but no data set stores uint32, which are the constants
    of the random number generators.
    """
    if isinstance(array, jax.core.Tracer):
        return False
    kind = jnp.result_type(array)
    if kind == jnp.uint32 or not (
        jnp.issubdtype(kind, jnp.number) or jnp.issubdtype(kind, jnp.bool_)
    ):
        return False
    values = np.asarray(array)
    return values.ndim > 0 and bool((values != values.reshape(-1)[0]).any())


def _words(shapes: dict[str, int]) -> str:
    """The shapes of a place with how often each occurs."""
    each = [f"{words} ({n} times)" if n > 1 else words for words, n in shapes.items()]
    rest = sum(list(shapes.values())[SHAPES:])
    return ", ".join(each[:SHAPES] + [f"{rest} more arrays"] * (rest > 0))
