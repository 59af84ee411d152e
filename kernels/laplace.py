"""Standard Laplace noise for a whole pytree, from normals."""

import jax

from .normals import normals

PARTS = 4  # normals in one number


def laplace(key: jax.Array, like):
    """A pytree of independent Laplace numbers of scale 1 (density exp(-|x|) / 2) with the shapes of
    `like`.

    The product of two normals plus that of two others has this law: the squares in ab + cd =
    ((a + b)^2 - (a - b)^2 + (c + d)^2 - (c - d)^2) / 4 make half the difference of two chi-squares
    of two degrees of freedom, which are exponential.

    Args:
        key: as in `normals`.
        like: shapes of the numbers.

    Privacy:
        normals reach 9.3 standard deviations, so these reach 86: less than 2^-60 of the mass is
        missed.  They are floats on a grid, which exact differential privacy does not allow for.

    Example:
        >>> import jax.numpy as jnp
        >>> laplace(jax.random.key(0), jnp.zeros((2, 3))).shape
        (2, 3)
    """
    # of the key itself: keys that are derived from it may be those of other releases
    a, b, c, d = normals(key, (like,) * PARTS)
    return jax.tree.map(lambda a, b, c, d: a * b + c * d, a, b, c, d)
