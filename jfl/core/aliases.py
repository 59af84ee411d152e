"""Names of types that functions all over the house take.  A type cannot say what a pytree holds:
`Tree` is where one may be."""

from typing import Any, TypeAlias

import jax
import numpy as np

Array: TypeAlias = jax.Array
Key: TypeAlias = jax.Array
Number: TypeAlias = jax.Array | np.ndarray | float  # a leaf: traced, of NumPy on the host, or plain
Tree: TypeAlias = Any
Words: TypeAlias = Any  # UInt32[...]: of NumPy on the host, or traced
