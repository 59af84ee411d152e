"""What the equations of a traced program say, where versions of JAX say it in different ways."""

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


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


def within(params: Mapping[str, Any]) -> Iterator[tuple[list[Any], tuple[Any, ...]]]:
    """The programs that an equation holds, each as its equations and its constants.

    Example:
        >>> import jax
        >>> traced = jax.make_jaxpr(jax.jit(lambda x: -x))(1.0)
        >>> [len(equations) for equations, _ in within(traced.eqns[0].params)]
        [1]
    """
    todo = [*params.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, (tuple, list)):
            todo += value
        elif isinstance(value, ClosedJaxpr):
            yield value.jaxpr.eqns, tuple(value.consts)
        elif isinstance(value, Jaxpr):
            yield value.eqns, ()
