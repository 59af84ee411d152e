"""For computations whose digits matter: float64, and products in full, whatever the caller has
configured."""

import contextlib
from collections.abc import Generator

import jax


@contextlib.contextmanager
def in_float64() -> Generator[None]:
    """A context that computes in float64 and broadcasts as NumPy does.

    The caller's configuration does not count inside: with `jax_numpy_rank_promotion="raise"`, say,
    an epsilon is the same number.
    """
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def in_full() -> Generator[None]:
    """A context in which products of float32 are made in full, also on an accelerator, which would
    round their factors to 10 bits behind the point."""
    with jax.default_matmul_precision("highest"):
        yield
