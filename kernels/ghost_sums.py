"""Norms and clipped sums of per-example gradients, computed without the gradients.

The gradient of a linear layer on one example is a sum of outer products, a^T b, over P positions:
`a` [P, I] is the input of the layer, and `b` [P, O] is the derivative with respect to its output.
The norm of the gradient and a weighted sum over examples can be computed from a and b (Goodfellow,
2015; Bu et al., ICML 2023, who store both instead of running a second backward pass).

Each kind of leaf has two functions: `squares()` returns the squared norms, Float[N], and
`total(factor)` returns the sum of factor[n] times gradient n.  A factor of exactly 0 removes an
example, whatever its values.  All computations use at least float32 and full matmul precision, also
on devices that use less by default, because the privacy guarantee relies on the clip norm.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

FULL = jax.lax.Precision.HIGHEST
# A GPU adds up the outer products of at most so many rows, with at most so many entries, without a
# matrix product.  XLA then computes the sum, the noise and the update of a leaf in one kernel.
FEW_ROWS, FEW_ENTRIES = 32, 2**13
# The numbers of terms that are added without a break, and how many blocks of products there are at
# most, so that programs stay small.
BLOCK, SUM_BLOCK, MAX_BLOCKS = 512, 32, 16


def _at_least_float32(x):
    """Return `x` in float32, or in a wider type if it has one."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _drop_zero_factors(factor, x):
    """Replace the rows of `x` whose factor is 0 by zeros, even if they contain nan."""
    return jnp.where(
        factor.reshape(factor.shape + (1,) * (x.ndim - 1)) != 0, x, jnp.zeros((), x.dtype)
    )


def _scale_rows(factor, x):
    """Multiply each row of `x` by its factor; a factor of 0 gives zeros."""
    return _drop_zero_factors(
        factor, factor.reshape(factor.shape + (1,) * (x.ndim - 1)).astype(x.dtype) * x
    )


def shrink(norm, bound, gamma=None):
    """Return the factor that clips a gradient of this norm; 0 if the norm is not finite.

    With `gamma`, a stability constant, the factor is that of automatic clipping.
    """
    if gamma is None:
        factor = jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
    else:
        factor = bound / (norm + gamma)
    return jnp.where(jnp.isfinite(norm), factor, 0.0)


def _gram(x):
    """Return the products of all pairs of positions, [N, E, P, P], for x [N, E, P, I].

    Long sums are made of the sums of blocks, because their rounding error grows with the longest.

    Returns:
        The products, and the number of terms for which their rounding error counts.
    """
    size = x.shape[3]
    block = max(BLOCK, -(-size // MAX_BLOCKS))
    blocks = [x[..., i : i + block] for i in range(0, size, block)]
    gram = sum(jnp.einsum("nepi,neqi->nepq", part, part, precision=FULL) for part in blocks)
    return gram, min(size, block) + len(blocks)


def _sum_in_blocks(x):
    """Return the sums of x [N, E, P, P] over its last two axes, and their terms as in `_gram`."""
    x, terms = x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]), 0
    while x.shape[2] > 1:
        width = min(x.shape[2], SUM_BLOCK)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % width)))
        x = x.reshape(*x.shape[:2], x.shape[2] // width, width).sum(3)
        # the barrier keeps XLA from making one long sum of several short ones
        x = jax.lax.optimization_barrier(x)
        terms += width
    return x[:, :, 0], terms


class Formed(NamedTuple):
    """Gradients that are small enough to be stored: g [N, ...]."""

    g: jax.Array

    def each(self):
        """Return all gradients, in their shape [N, ...]."""
        return self.g

    @jax.jit
    def squares(self):
        return jnp.square(_at_least_float32(self.g)).sum(tuple(range(1, self.g.ndim)))

    @jax.jit
    def total(self, factor):
        return _scale_rows(factor, _at_least_float32(self.g)).sum(0)


class Product(NamedTuple):
    """Gradients a^T b of E blocks (groups of a convolution): a [N, E, P, I], b [N, E, P, O]."""

    a: jax.Array
    b: jax.Array

    def each(self):
        """Return all gradients, [N, E, I, O], which may be large."""
        a, b = _at_least_float32(self.a), _at_least_float32(self.b)
        return jnp.einsum("nepi,nepo->neio", a, b, precision=FULL)

    @jax.jit
    def squares(self):
        """Return an upper bound of <a a^T, b b^T>, which is the squared norm for P positions.

        If outer products cancel, rounding can make this sum of large terms too small, and the
        gradient would not be clipped enough.  A bound of the rounding error is therefore added: a
        gradient is at worst clipped too much.  A sum of n terms in any order is wrong by at most
        about n eps / 2 times the sum of their sizes, and rows of nearly equal numbers come close.
        """
        a, b = _at_least_float32(self.a), _at_least_float32(self.b)
        # A square that underflows is at most `tiny`.  Adding it prevents a row of tiny activations
        # and huge backprops from appearing shorter than it is.
        tiny = float(jnp.finfo(a.dtype).tiny)
        squares_a = jnp.square(a).sum(3) + a.shape[3] * tiny
        squares_b = jnp.square(b).sum(3) + b.shape[3] * tiny
        own = squares_a * squares_b
        if a.shape[2] <= 1:
            return own.sum((1, 2))
        (gram_a, terms_a), (gram_b, terms_b) = _gram(a), _gram(b)
        found, terms = _sum_in_blocks(gram_a * gram_b)
        # slightly more than eps / 2, for the rounding of `own` and of `total`
        relative = 0.51 * float(jnp.finfo(a.dtype).eps) * (terms_a + terms_b + terms + 2)
        slack = relative * jnp.square(jnp.sqrt(own).sum(2))
        slack += a.shape[3] * tiny * jnp.square(jnp.sqrt(squares_b).sum(2))
        slack += b.shape[3] * tiny * jnp.square(jnp.sqrt(squares_a).sum(2))
        return jnp.maximum(found + slack, 0).sum(1)

    @jax.jit
    def total(self, factor):
        a, b = (
            _drop_zero_factors(factor, _at_least_float32(self.a)),
            _scale_rows(factor, _at_least_float32(self.b)),
        )
        if a.shape[1] == 1:  # a plain matrix product is a third faster on a CPU
            a, b = (x.reshape(-1, x.shape[-1]) for x in (a, b))
            is_small = len(a) <= FEW_ROWS and a.shape[1] * b.shape[1] <= FEW_ENTRIES
            if is_small and jax.default_backend() == "gpu":
                return (a[:, :, None] * b[:, None, :]).sum(0)[None]
            return jnp.dot(b.T, a, precision=FULL).T[None]
        return jnp.einsum("nepi,nepo->eio", a, b, precision=FULL)


def product(a, b):
    """Return the gradients a^T b as Formed if that costs less than Gram matrices, else as Product.

    The norm of a Product needs Gram matrices of its positions, [P, P] per example and block.
    """
    p, i, o = a.shape[2], a.shape[3], b.shape[3]
    if p == 1 or 2 * p * p < i * o:
        return Product(a, b)
    return Formed(Product(a, b).each())


class Lookup(NamedTuple):
    """Gradients of rows looked up in a table.

    Attributes:
        at: Int[N, P], the indices of the looked-up rows; index `size` stands for no row.
        b: [N, P, D], the derivative with respect to each looked-up row.
        size: the number of rows of the table.
    """

    at: jax.Array
    b: jax.Array
    size: int

    def squares(self):
        """Return upper bounds of the squared norms, Float[N].

        Positions that look up the same row are added up.  If they cancel, `total` may round their
        sum differently, so a bound of the rounding error is added, as in `Product.squares`.
        """
        b = jnp.where(self.at[..., None] < self.size, _at_least_float32(self.b), 0)
        p = self.at.shape[1]
        if p == 1:
            return jnp.square(b).sum((1, 2))
        same = self.at[:, :, None] == self.at[:, None, :]
        first = ~jnp.any(same & jnp.tri(p, k=-1, dtype=bool)[None], 2)
        rows = jnp.einsum("npq,nqd->npd", same.astype(b.dtype), b, precision=FULL)
        lengths = jnp.einsum("npq,nq->np", same.astype(b.dtype), jnp.sqrt(jnp.square(b).sum(2)))
        # this sum and that of `total` are each wrong by at most p eps / 2 times the lengths
        slack = 1.02 * p * float(jnp.finfo(b.dtype).eps) * lengths
        longest = jnp.sqrt(jnp.square(rows).sum(2)) + slack
        return jnp.where(first, jnp.square(longest), 0).sum(1)

    def total(self, factor):
        b = _scale_rows(factor, _at_least_float32(self.b))
        table = jnp.zeros((self.size,) + b.shape[2:], b.dtype)
        return table.at[self.at.reshape(-1)].add(b.reshape((-1,) + b.shape[2:]), mode="drop")


def patches(x, window, strides, padding, x_dilation, dilation):
    """Return the patches that a convolution multiplies by its kernel.

    Shapes:
        x [N, *space, C] -> [N, *places, prod(window) * C].

    Args:
        x: the input.
        window: the spatial shape of the kernel.
        strides: the stride of each spatial axis.
        padding: (low, high) of each spatial axis.
        x_dilation: the dilation of the input.
        dilation: the dilation of the kernel.
    """
    around = [(*p, d - 1) for p, d in zip(padding, x_dilation)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *around, (0, 0, 0)])
    space = x.shape[1:-1]
    places = [
        (n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(space, window, dilation, strides)
    ]
    slices = []
    for flat in range(math.prod(window)):
        offset = []
        for k, d in zip(reversed(window), reversed(dilation)):
            flat, at = divmod(flat, k)
            offset.insert(0, at * d)
        end = [o + (n - 1) * s + 1 for o, n, s in zip(offset, places, strides)]
        slices.append(
            jax.lax.slice(x, (0, *offset, 0), (x.shape[0], *end, x.shape[-1]), (1, *strides, 1))
        )
    return jnp.concatenate(slices, -1)
