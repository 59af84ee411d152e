"""Marks that a program carries for `jfl.check_privacy`: what a mechanism did, as steps of a jaxpr
that compute nothing.

A mark hands its first `n` operands through and lowers to nothing, so a compiled program is the same
with and without. Its other operands say what it is of (the key, the numbers of the mechanism), so
that the check sees where they come from.  Derivatives pass by a mark: a tangent of a release has no
noise of its own.

Only jfl sets marks.  One that is set by hand says what it says, and the check believes it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from ..core.aliases import Array, Key, Tree
from ..core.records import Batch, Batches, Mechanism, Rows


def _define(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, n, **_: list(operands[:n]))
    primitive.def_abstract_eval(lambda *operands, n, **_: list(operands[:n]))

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, n: int, **params: Any
    ) -> tuple[list[Any], list[Any]]:
        return primitive.bind(*primals, n=n, **params), list(tangents[:n])

    def batched(
        operands: Sequence[Any],
        dims: Sequence[int | None],
        *,
        n: int,
        batch: tuple[Any, ...],
        **params: Any,
    ) -> tuple[list[Any], list[Any]]:
        (size,) = {x.shape[d] for x, d in zip(operands, dims) if d is not None}
        batch = batch + ((size, tuple(-1 if d is None else d for d in dims)),)
        return primitive.bind(*operands, n=n, batch=batch, **params), list(
            dims[:n]
        )  # nothing is moved

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batched
    mlir.register_lowering(
        primitive, lambda ctx, *operands, n, **_: list(operands[:n]), cacheable=False
    )
    return primitive


release_p = _define("jfl_release")  # a sum that was made noisy
bounded_p = _define("jfl_bounded")  # a sum whose contributions a row stage bounded
example_p = _define("jfl_example")  # a batch, whose rows go on one by one
batch_p = _define("jfl_batch")  # the rows in some slots of the client's own
slots_p = _define("jfl_slots")  # slots as a batch sampler drew them
key_p = _define("jfl_noise_key")  # the key that a mechanism draws its noise from


def _bind(primitive: Primitive, value: Tree, *of: Any, **params: Any) -> Tree:
    leaves, treedef = jax.tree.flatten(value)
    if not leaves:
        return value
    return treedef.unflatten(primitive.bind(*leaves, *of, n=len(leaves), batch=(), **params))


def noise_key(key: Key) -> Key:
    return _bind(key_p, key)


def release(
    noisy: Tree,
    summed: Tree,
    key: Key,
    mechanism: Mechanism,
    *,
    max_weight: ArrayLike,
    client: Array | None,
) -> Tree:
    """`noisy` is `summed` with the noise of `mechanism`, drawn from `key`."""
    leaves, structure = jax.tree.flatten(mechanism)
    each = any(s.role == "noise" and jnp.ndim(s.noise) > 0 for s in mechanism.stages)
    return _bind(
        release_p,
        noisy,
        *jax.tree.leaves(summed),
        key,
        jnp.asarray(max_weight, jnp.float32),
        jnp.int32(-1) if client is None else client,
        *leaves,
        structure=structure,
        each=each,
    )


def bounded(value: Tree, mechanism: Mechanism, reference: Array, kind: str) -> Tree:
    """`value` is a sum of contributions that the row stages of `mechanism` bounded.

    Args:
        value: the sum.
        mechanism: whose row stages bounded it.
        reference: what `kind` says: the mask of a batch, Bool[B], or a weight.
        kind: "examples", one contribution of each row of the batch whose mask `reference` is;
            "single", one of weight `reference`, of whatever it was made.
    """
    leaves, structure = jax.tree.flatten(mechanism)
    return _bind(bounded_p, value, reference, *leaves, structure=structure, kind=kind)


def example(batch: Batch) -> Batch:
    return Batch(*_bind(example_p, tuple(batch)))


def batch(found: Batch, rows: Rows, slots: Array, mask: Array) -> Batch:
    """`found` holds the rows in `slots` of a client."""
    return Batch(*_bind(batch_p, tuple(found), rows.x, rows.y, rows.index, rows.size, slots, mask))


def slots(found: Tree, batches: Batches, key: Key, step: ArrayLike, size: ArrayLike) -> Tree:
    """`found`, slots and mask, are what `batches` drew."""
    leaves, structure = jax.tree.flatten(batches)
    return _bind(slots_p, found, key, step, size, *leaves, structure=structure)
