"""Functions of a plan, traced one by one on shapes: what they hold, and what they hide."""

import collections
from typing import NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from ..core import checks, losses
from ..core.jaxprs import within
from .flow import OPAQUE
from .ownership import foreign

KNOWN = 256  # structures whose verdict is kept

TRACES: collections.OrderedDict = collections.OrderedDict()


def cached(name, make):
    """make(), once for each name."""
    if name not in TRACES:
        TRACES[name] = make()
        while len(TRACES) > KNOWN:
            TRACES.popitem(last=False)
    TRACES.move_to_end(name)
    return TRACES[name]


def abstract(value):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)


def avals(value):
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple((jnp.shape(x), str(jnp.result_type(x))) for x in leaves)


def key_shape():
    return jax.eval_shape(lambda: jax.random.key(0))


def example_shapes(plan):
    x, y = row_shapes(plan)
    return tuple(jax.ShapeDtypeStruct(v.shape[1:], v.dtype) for v in (x, y))


def row_shapes(plan):
    fed = plan.fed
    if fed.host is None:
        return tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (fed.x, fed.y))
    return tuple(
        jax.ShapeDtypeStruct((fed.host.slots, *rest), kind)
        for kind, rest in zip(fed.host.kind, (fed.host.shape, ()))
    )


def params_shapes(plan):
    return cached(
        ("params", avals(plan.task.init)), lambda: jax.eval_shape(plan.task.init, key_shape())
    )


class Trace(NamedTuple):
    consts: list  # arrays that the function holds
    opaque: tuple  # names of primitives that hide what they do
    error: str = ""


def look_into(function, *operands) -> Trace:
    """What a function holds; it is traced, never run."""
    try:
        closed = jax.make_jaxpr(function)(*operands)
    except Exception as error:  # the function is the user's, and so is its error
        return Trace([], (), checks.describe_error(error))
    plain = lambda c: np.size(c) > 1 and not isinstance(c, jax.core.Tracer)
    consts, names, todo = [], set(), [(closed.jaxpr.eqns, closed.consts)]
    while todo:
        equations, held = todo.pop()
        consts += [c for c in held if plain(c)]
        for equation in equations:
            names.add(equation.primitive.name)
            consts += [v.val for v in equation.invars if isinstance(v, Literal) and plain(v.val)]
            todo += within(equation.params)
    return Trace(consts, tuple(sorted(names & set(OPAQUE))))


def loss_trace(loss, plan) -> Trace:
    """A loss with its gradient: a rule for derivatives may hold what the loss itself does not."""

    def make():
        differentiate = lambda loss, params, x, y: jax.value_and_grad(lambda w: loss(w, x, y))(
            params
        )
        x, y = example_shapes(plan)
        if losses.takes_key(loss):
            differentiate = lambda loss, params, x, y: jax.value_and_grad(
                lambda w: loss(w, x, y, jax.random.key(0))
            )(params)
        elif losses.draws(loss):
            x = x, losses.words_shape()
        return look_into(differentiate, abstract(loss), params_shapes(plan), x, y)

    return cached(("loss", avals(loss), avals(plan.task.init), avals(row_shapes(plan))), make)


def opaque_parts(loss, plan) -> list:
    if not foreign(loss):
        return []
    return [f"what {name} in the loss does" for name in loss_trace(loss, plan).opaque]
