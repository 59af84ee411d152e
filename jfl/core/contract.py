"""What the functions of an algorithm must return, checked when they are traced."""

from typing import Any

import jax
import jax.numpy as jnp

from . import checks
from .errors import ArgumentError
from .pytrees import Tree
from .records import Diagnostics


class ContractError(ArgumentError):
    """A function of an algorithm returned something that the engine cannot use."""


def client_results(name: str, results: Any, client_state: Tree) -> tuple[Tree, Tree, Diagnostics]:
    """Return the three results of a client; reject others.

    Args:
        name: the name of the algorithm, for messages.
        results: what its client returned.
        client_state: the state that the client received.
    """
    where = f"client of {name}"
    if not (isinstance(results, (tuple, list)) and len(results) == 3):
        checks.fail(
            where,
            "three results: the upload, the new client state and a jfl.Diagnostics",
            checks.short_repr(results),
            error=ContractError,
        )
    payload, new_state, diagnostics = results
    # The engine writes the states of several clients at once.  It would broadcast a state of
    # another shape, which mixes the states of clients, and cut the fraction off a float in an
    # integer state.
    old, new = jax.tree.flatten(client_state), jax.tree.flatten(new_state)
    if old[1] != new[1] or not all(map(_fits, new[0], old[0])):
        checks.fail(
            where,
            f"a new client state like the one of init, {_described(client_state)}",
            _described(new_state),
            "Return the state in the same form, or let init return the form that the client keeps.",
            error=ContractError,
        )
    if not isinstance(diagnostics, Diagnostics):
        checks.fail(
            where,
            "diagnostics of the class jfl.Diagnostics as its third result",
            checks.short_repr(diagnostics),
            "Return jfl.Diagnostics(loss, clipped, overflow), with 0 for what you do not measure.",
            error=ContractError,
        )
    return payload, new_state, diagnostics.in_32_bits()


def server_state(name: str, new: Tree, old: Tree) -> Tree:
    """Return the new state of a server; reject one of another structure than the old one.

    Args:
        name: the name of the algorithm, for messages.
        new: what its server returned.
        old: the state that the server received.
    """
    if jax.tree.structure(new) != jax.tree.structure(old):
        checks.fail(
            f"server of {name}",
            f"a new server state like the one of init, {jax.tree.structure(old)}",
            str(jax.tree.structure(new)),
            error=ContractError,
        )
    return new


def _fits(new: Any, old: Any) -> bool:
    """Return whether `new` has the shape of `old`, and the dtype of `old` can hold it."""
    if jnp.shape(new) != jnp.shape(old):
        return False
    types = [jax.typeof(x).dtype for x in (new, old)]
    if any(jnp.issubdtype(dtype, jax.dtypes.prng_key) for dtype in types):
        return types[0] == types[1]  # JAX promotes no keys
    return jnp.result_type(new, old) == jnp.result_type(old)


def _described(tree: Tree) -> str:
    """Return a tree with the dtype and shape of each array."""
    return checks.short_repr(jax.tree.map(lambda x: jax.typeof(x).str_short(), tree))
