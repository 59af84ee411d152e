"""Standard Laplace noise for a whole pytree, from normals."""

import jax

from .normals import normals

NUM_NORMALS = 4  # number of normals from which one Laplace number is computed


def laplace(key: jax.Array, like):
    """Draw independent Laplace numbers of scale 1, with density exp(-|x|) / 2, for a whole pytree.

    For independent normals a, b, c and d, ab + cd has this distribution: it equals ((a + b)^2 -
    (a - b)^2 + (c + d)^2 - (c - d)^2) / 4, which is half the difference of two independent
    chi-squares with two degrees of freedom, and these are exponential.

    Args:
        key: as in `normals`.
        like: a pytree of arrays or shapes.

    Returns:
        A float32 pytree with the shapes of `like`.

    Privacy:
        The normals are at most 9.3 standard deviations, so these numbers are at most 86, and less
        than 2^-60 of the probability mass is cut off.  They are floats on a grid, which proofs of
        privacy for real numbers do not cover.

    Example:
        >>> import jax.numpy as jnp
        >>> laplace(jax.random.key(0), jnp.zeros((2, 3))).shape
        (2, 3)
    """
    # Use the key itself: keys derived from it may be the keys of other releases.
    a, b, c, d = normals(key, (like,) * NUM_NORMALS)
    return jax.tree.map(lambda a, b, c, d: a * b + c * d, a, b, c, d)
