"""Marks in a traced program: equations that compute nothing, but record what a mechanism did.

A mark returns its first `n` operands and lowers to nothing, so the compiled program is the same
with and without it.  Its other operands describe the event, such as the key and the numbers of the
mechanism, so that the check sees where they come from.  Derivatives ignore marks: the tangent of a
release has no noise.

Only jfl sets marks.  The check trusts every mark, including one that a user sets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike

from ..core.pytrees import Array, Key, Tree
from ..core.records import Batch, Batches, Mechanism, Rows
from .flow import opaque_in


def _define(name: str) -> Primitive:
    """Return the primitive of a mark.

    Its parameter `batch` holds, for each vmap around it, the size and the mapped axes of its
    operands.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, n, **_: list(operands[:n]))
    primitive.def_abstract_eval(lambda *operands, n, **_: list(operands[:n]))

    def jvp(
        primals: Sequence[Any], tangents: Sequence[Any], *, n: int, **params: Any
    ) -> tuple[list[Any], list[Any]]:
        return primitive.bind(*primals, n=n, **params), list(tangents[:n])

    def add_batch_dimension(
        operands: Sequence[Any],
        dims: Sequence[int | None],
        *,
        n: int,
        batch: tuple[Any, ...],
        **params: Any,
    ) -> tuple[list[Any], list[Any]]:
        (size,) = {x.shape[d] for x, d in zip(operands, dims) if d is not None}
        batch = batch + ((size, tuple(-1 if d is None else d for d in dims)),)
        return primitive.bind(*operands, n=n, batch=batch, **params), list(dims[:n])

    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = add_batch_dimension
    mlir.register_lowering(
        primitive, lambda ctx, *operands, n, **_: list(operands[:n]), cacheable=False
    )
    return primitive


release_p = _define("jfl_release")  # a noisy sum
bounded_p = _define("jfl_bounded")  # a sum of contributions that a row stage bounded
example_p = _define("jfl_example")  # a batch whose rows are used separately
batch_p = _define("jfl_batch")  # rows that were read from a client's rows
slots_p = _define("jfl_slots")  # the slots that a batch sampler drew
key_p = _define("jfl_noise_key")  # the key from which a mechanism draws its noise
copy_p = _define("jfl_copy")  # no event: see `copy_per_client`


def _bind(primitive: Primitive, value: Tree, *of: Any, **params: Any) -> Tree:
    """Apply a mark to a pytree.

    Args:
        primitive: the mark.
        value: the pytree that the mark returns.
        of: arrays that describe the event.
        params: static parameters of the mark.
    """
    leaves, treedef = jax.tree.flatten(value)
    if not leaves:
        return value
    return treedef.unflatten(primitive.bind(*leaves, *of, n=len(leaves), batch=(), **params))


def copy_per_client(value: Tree, of_client: Array) -> Tree:
    """Return `value` unchanged; under a vmap over clients, make a copy for each client.

    All clients start from the same model, but each has a different one after one step.  JAX's vmap
    discovers this only after it has batched the loop over steps, and then batches the loop again,
    which takes seconds for a large model.  If copies are made before the loop, vmap batches it only
    once.

    Args:
        value: a pytree of arrays, which a loop changes.
        of_client: an array that differs between clients.
    """
    return _bind(copy_p, value, of_client)


def _copy_under_vmap(
    operands: Sequence[Any], dims: Sequence[int | None], *, n: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    *values, of_client = operands
    axis = dims[n]
    if axis is None:
        return copy_p.bind(*operands, n=n, **params), list(dims[:n])
    size = of_client.shape[axis]
    # Without the barrier, XLA would read the copies again after the loop, instead of the one value
    # that was copied, and would keep them in memory during the loop.
    copy = lambda x: jnp.broadcast_to(jax.lax.optimization_barrier(x), (size, *jnp.shape(x)))
    copies = [copy(x) if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(values, dims)]
    of_client = jnp.moveaxis(of_client, axis, 0)
    return copy_p.bind(*copies, of_client, n=n, **params), [0] * n


batching.primitive_batchers[copy_p] = _copy_under_vmap


def noise_key(key: Key) -> Key:
    """Mark the key from which a release draws its noise.

    The check judges the key when it reaches that release.
    """
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
    """Mark `noisy` as the sum `summed` plus the noise of a mechanism.

    The noise was drawn from `key`; `max_weight` and `client` are as in `chain.release_sum`.
    """
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
    """Mark a sum of contributions that the row stages of a mechanism bounded.

    Args:
        value: the sum.
        mechanism: the chain with the row stages.
        reference: Bool[B], the mask of a batch, for kind "examples"; Float[1], the weight of the
            contribution, for kind "single".
        kind: "examples" if each row of the batch contributes separately, or "single" if there is
            one contribution of the whole client.
    """
    leaves, structure = jax.tree.flatten(mechanism)
    return _bind(bounded_p, value, reference, *leaves, structure=structure, kind=kind)


# True while `check_privacy` traces a client.  The caches of `jax.jit` depend on this context, so a
# function that was traced before is traced again.
CHECKING = jax.make_user_context(False)


def example(batch: Batch, loss: Callable[..., Any], params: Tree, x: Tree, y: Tree) -> Batch:
    """Mark a batch whose rows are used separately from here on, one in each call of a loss.

    A `custom_vmap` in the loss may mix rows, and the program that vmap returns does not show this.
    The check therefore also traces the loss of one row.

    Args:
        batch: the rows.
        loss: (params, x, y) -> scalar.
        params: the parameters at which the loss is called.
        x: the shapes of one row, as the loss takes it.
        y: the shapes of its label.
    """
    hides: tuple[str, ...] = ()
    if CHECKING.value:
        hides = opaque_in(jax.make_jaxpr(jax.value_and_grad(loss))(params, x, y))
    return Batch(*_bind(example_p, tuple(batch), hides=hides))


def batch(found: Batch, rows: Rows, slots: Array, mask: Array) -> Batch:
    """Mark a batch as the rows in some slots of a client.

    Args:
        found: the batch.
        rows: the client's rows.
        slots: Int[B], the slots that were read.
        mask: Bool[B], which of them hold a row of the batch.
    """
    return Batch(*_bind(batch_p, tuple(found), rows.x, rows.y, rows.index, rows.size, slots, mask))


def slots(found: Tree, batches: Batches, key: Key, step: ArrayLike, size: ArrayLike) -> Tree:
    """Mark the indices of the rows of a batch as the result of a draw by a batch sampler.

    Args:
        found: the slots, which are indices into the client's padded rows, and the mask of those
            that belong to the batch.
        batches: the batch sampler.
        key: the key with which it drew.
        step: Int[], the number of the local step.
        size: Int[], the number of rows of the client.
    """
    leaves, structure = jax.tree.flatten(batches)
    return _bind(slots_p, found, key, step, size, *leaves, structure=structure)
