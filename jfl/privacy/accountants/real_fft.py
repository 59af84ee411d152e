"""The FFT of real numbers and its inverse, of one row at a time, however they are mapped.

XLA distributes the rows of an FFT on a CPU over the threads of a pool, and with jax 0.11 it waits
for them on a thread of that pool: two such FFTs at once on two cores wait for ever.  So under vmap
the rows are computed sequentially.
"""

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike


@custom_vmap
def rfft(x: ArrayLike) -> jax.Array:
    """Float[n] -> Complex[n // 2 + 1], as jnp.fft.rfft.

    Example:
        >>> rfft(jnp.array([1.0, 0.0])).real.tolist()
        [1.0, 1.0]
    """
    return jnp.fft.rfft(x)


@rfft.def_vmap
def _(axis_size, in_batched, x):
    return jax.lax.map(rfft, x), True


def irfft(x: ArrayLike, n: int) -> jax.Array:
    """Complex[n // 2 + 1] -> Float[n], as jnp.fft.irfft.

    Example:
        >>> irfft(jnp.array([1.0 + 0j, 1.0 + 0j]), 2).tolist()
        [1.0, 0.0]
    """

    @custom_vmap
    def of_row(x):
        return jnp.fft.irfft(x, n=n)

    @of_row.def_vmap
    def _(axis_size, in_batched, x):
        return jax.lax.map(of_row, x), True

    return of_row(x)
