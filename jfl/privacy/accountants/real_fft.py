"""The FFT of real numbers and its inverse, of one row at a time, however they are mapped.

XLA shares the rows of an FFT on a CPU out to the threads of a pool, and with jax 0.11 it waits for
them on a thread of that pool: two such FFTs at once on two cores wait for ever.  So under vmap rows
go one after another.  Both are linear, and a primitive of its own has to say what that means for
derivatives, forward and on the way back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import ArrayLike


def rfft(x: ArrayLike) -> jax.Array:
    """Float[n] -> Complex[n // 2 + 1], as jnp.fft.rfft.

    Example:
        >>> rfft(jnp.array([1.0, 0.0])).real.tolist()
        [1.0, 1.0]
    """
    return row_p.bind(jnp.asarray(x), kind="rfft", n=jnp.shape(x)[0])


def irfft(x: ArrayLike, n: int) -> jax.Array:
    """Complex[n // 2 + 1] -> Float[n], as jnp.fft.irfft.

    Example:
        >>> irfft(jnp.array([1.0 + 0j, 1.0 + 0j]), 2).tolist()
        [1.0, 0.0]
    """
    return row_p.bind(jnp.asarray(x), kind="irfft", n=n)


TRANSFORMS = dict(
    rfft=lambda n: jnp.fft.rfft, irfft=lambda n: functools.partial(jnp.fft.irfft, n=n)
)
TRANSPOSED = "transposed "  # before the name of what is


def _play(x: Any, *, kind: str, n: int) -> Any:
    of = kind.removeprefix(TRANSPOSED)
    transform = TRANSFORMS[of](n)
    with jax.enable_x64(True):  # a program is lowered where nobody asks for float64 any more
        if of == kind:
            return transform(x)
        given = jax.eval_shape(TRANSFORMS["rfft" if of == "irfft" else "irfft"](n), x)
        return jax.linear_transpose(transform, given)(x)[0]


def _by_rows(operands: Any, dims: Any, **what: Any) -> tuple[Any, int]:
    rows = jnp.moveaxis(operands[0], dims[0], 0)
    return jax.lax.map(lambda row: row_p.bind(row, **what), rows), 0


def _transpose(cotangent: Any, x: Any, *, kind: str, n: int) -> list[Any]:
    of = kind.removeprefix(TRANSPOSED)
    return [row_p.bind(cotangent, kind=TRANSPOSED + of if of == kind else of, n=n)]


def _shape(x: Any, **what: Any) -> Any:
    found = jax.eval_shape(functools.partial(_play, **what), x)
    return x.update(shape=found.shape, dtype=found.dtype)


row_p = Primitive("jfl_fft_of_a_row")
row_p.def_impl(lambda x, **what: jax.jit(functools.partial(_play, **what))(x))
row_p.def_abstract_eval(_shape)
mlir.register_lowering(row_p, mlir.lower_fun(_play, multiple_results=False))
batching.primitive_batchers[row_p] = _by_rows
ad.deflinear2(row_p, _transpose)
