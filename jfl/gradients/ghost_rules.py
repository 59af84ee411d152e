"""The rules of ghost.py for matrix products, convolutions and table lookups.

Each function for a primitive takes the params of an equation, `side` (0 or 1: which operand the
parameter is), the shapes of both operands, and the shape and dtype of the output. It returns
`Parts`, or None if there is no rule for such an equation.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from ..kernels.conv import apart, is_kept_apart, multiplies_patches
from ..kernels.ghost_sums import Lookup, patches, product

MODES = (
    jax.lax.GatherScatterMode.FILL_OR_DROP,
    jax.lax.GatherScatterMode.CLIP,
    jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


class Parts(NamedTuple):
    """How equations of one jaxpr primitive, such as dot_general, use a parameter.

    N is the number of examples of a batch and P the number of positions, such as the tokens of a
    sequence, at which one example uses the parameter.  E counts the groups of a grouped operation.

    Attributes:
        apply: (bind, parameter, other operand) -> output and activations to record, where `bind`
            runs the equation itself.
        gather: (recorded activations, backprops), both [N, ...], -> the gradients, as Formed,
            Product or Lookup of kernels.ghost_sums.
        back: maps a sum of such gradients to the shape of the parameter.
        factors: (recorded activations, backprops) -> the two factors of a Product, [N, E, P, I] and
            [N, E, P, O], for I inputs and O outputs. None if gradients are not products; such an
            equation has no rule inside a loop.
        table: for a parameter [rows, columns], (recorded activations, backprops) -> factors
            [N, 1, P, rows] and [N, 1, P, columns] of the gradients; otherwise None.
        is_by_rows: whether E and P are 1, I is the first axis of the parameter, and O the others.
    """

    apply: Callable
    gather: Callable
    back: Callable
    factors: Callable | None = None
    table: Callable | None = None
    is_by_rows: bool = False


def matmul(params, side, shapes, out):
    """Return the rule of a matrix product, with or without batch dimensions.

    Args:
        params, side, shapes, out: see the module.
    """
    mine, theirs = ([tuple(d[s]) for d in params["dimension_numbers"]] for s in (side, 1 - side))
    free = lambda dims, shape: tuple(d for d in range(len(shape)) if d not in dims[0] + dims[1])
    here, there = free(mine, shapes[side]), free(theirs, shapes[1 - side])
    order = mine[1] + mine[0] + here
    size = lambda dims, shape: math.prod(shape[d] for d in dims)
    e, i, o = (size(dims, shapes[side]) for dims in (mine[1], mine[0], here))
    places = size(there, shapes[1 - side])

    def apply(bind, leaf, other):
        return bind(leaf, other), other.transpose(theirs[1] + there + theirs[0]).reshape(
            e, places, i
        )

    def factors(a, b):
        b = b.reshape((-1, e, places, o) if side else (-1, e, o, places))
        return a, b if side else b.swapaxes(2, 3)

    def back(total):
        return total.reshape([shapes[side][d] for d in order]).transpose(np.argsort(order))

    is_table = len(shapes[side]) == 2 and len(mine[0]) == 1 and not mine[1]
    step = 1 if order == (0, 1) else -1
    table = (lambda a, b: factors(a, b)[::step]) if is_table else None
    is_by_rows = mine == [(0,), ()] and places == 1
    gather = lambda a, b: product(*factors(a, b))
    return Parts(apply, gather, back, factors, table, is_by_rows)


def convolution(params, side, shapes, out, examples=math.inf):
    """Return the rule of a convolution, which multiplies patches of the input with the kernel.

    If kernels.conv prefers XLA's convolution on this backend, that one computes the output.

    Args:
        params, side, shapes, out: see the module.
        examples: the number of examples over which XLA would sum the gradient of the kernel; inf
            for book-keeping, which computes this gradient from patches.
    """
    if side == 0 or params["batch_group_count"] != 1 or 0 in out.shape:
        return None
    dims, groups = params["dimension_numbers"], params["feature_group_count"]
    last = lambda spec: (spec[0], *spec[2:], spec[1])  # batch (or output), space, features
    kernel = (*dims.rhs_spec[2:], dims.rhs_spec[1], dims.rhs_spec[0])
    sizes = [shapes[1][d] for d in kernel]
    window, o = sizes[:-2], sizes[-1] // groups
    where = (
        window,
        *(params[k] for k in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")),
    )
    shape = [out.shape[d] for d in last(dims.out_spec)]
    places = math.prod(shape[:-1])

    uses_xla = not multiplies_patches() and is_kept_apart(groups, sizes[-2], o, examples)

    def cut(x):
        """Return the patches of an input, [groups, positions, entries of a patch]."""
        a = patches(x.transpose(last(dims.lhs_spec)), *where)
        return (
            a.reshape(places, math.prod(window), groups, -1)
            .transpose(2, 0, 1, 3)
            .reshape(groups, places, -1)
        )

    def apply(bind, leaf, other):
        if uses_xla:
            return apart(other, leaf, params), other
        a, w = cut(other), leaf.transpose(kernel).reshape(-1, groups, o)
        value = jnp.einsum(
            "gpi,igo->pgo",
            a,
            w,
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
        )
        return value.reshape(shape).transpose(np.argsort(last(dims.out_spec))), a

    def gather(a, b):
        b = b.transpose(0, *(d + 1 for d in last(dims.out_spec))).reshape(-1, places, groups, o)
        return product(jax.vmap(cut)(a) if uses_xla else a, b.swapaxes(1, 2))

    def back(total):
        return total.swapaxes(0, 1).reshape(sizes).transpose(np.argsort(kernel))

    return Parts(apply, gather, back)


def lookup(params, side, shapes, out):
    """Return the rule of a table lookup, such as an embedding: rows of a parameter by index.

    Args:
        params, side, shapes, out: see the module.
    """
    dims, (size, *row) = params["dimension_numbers"], shapes[0] or (0,)
    at, mode = shapes[1][:-1], params["mode"]
    selects_rows = (
        dims.collapsed_slice_dims == (0,) == dims.start_index_map
        and not dims.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *row)
        and dims.offset_dims == tuple(range(len(at), len(at) + len(row)))
    )
    if side or not selects_rows or mode not in MODES:
        return None

    def apply(bind, leaf, other):
        rows = other.reshape(-1).astype(jnp.int32)
        if mode == jax.lax.GatherScatterMode.CLIP:
            rows = jnp.clip(rows, 0, size - 1)
        else:  # row `size` has no gradient
            rows = jnp.where((rows < 0) | (rows >= size), size, rows)
        return bind(leaf, other), rows

    def table(a, b):  # index `size` becomes a row of zeros
        return jax.nn.one_hot(a, size)[:, None], b.reshape(len(a), 1, a.shape[1], -1)

    return Parts(
        apply,
        lambda a, b: Lookup(a, b.reshape(*a.shape, -1), size),
        lambda total: total.reshape(shapes[0]),
        table=table if len(row) == 1 else None,
    )


RULES = {p.dot_general_p: matmul, p.conv_general_dilated_p: convolution, p.gather_p: lookup}


def gather_in_loop(parts: Any, length: int, is_sliced: bool) -> Callable:
    """Return the `gather` of an equation that runs in each iteration of a loop.

    If all iterations use the same parameter, their positions become positions of one Product.  If
    each uses another slice of the parameter, the slices become blocks of the Product.  Recorded
    activations and backprops are [N, length, ...].

    Args:
        parts: the Parts of the equation in one iteration, which has `factors`.
        length: the number of iterations.
        is_sliced: whether each iteration uses another slice of the parameter.
    """

    def gather(a, b):
        examples = len(a)
        factors = []  # [N, length, E, P, I or O]
        for x in parts.factors(*(x.reshape(-1, *x.shape[2:]) for x in (a, b))):
            x = x.reshape(examples, length, *x.shape[1:])
            if is_sliced:
                factors.append(x.reshape(examples, -1, *x.shape[3:]))
            else:
                factors.append(x.swapaxes(1, 2).reshape(examples, x.shape[2], -1, x.shape[4]))
        return product(*factors)

    return gather
