"""What the equations of a traced program say, where versions of JAX say it in different ways."""

from collections.abc import Mapping
from typing import Any


def of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many constants a scan takes, and how many values it carries from turn to turn.

    Args:
        params: of its equation.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> of_numbers = lambda w, x: jax.lax.scan(lambda c, row: (c + w * row, c), 0.0, x)
        >>> traced = jax.make_jaxpr(of_numbers)(2.0, jnp.ones(3))
        >>> of_scan(traced.eqns[-1].params)
        (1, 1)
    """
    if "num_consts" in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))
