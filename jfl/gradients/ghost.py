"""Book-keeping for clipped gradient sums: which parameters of a loss have a rule, and the numbers
that the rules need.

The loss of one example is traced to a jaxpr, which shows every use of every parameter, in any
library. A leaf that meets the data once, in a matrix product, a convolution or a table lookup, gets
a tap: a zero that is added to the result, whose gradient is the backprop there. A leaf that enters
elementwise (a bias, a scale) has gradients no larger than the activations, so they are formed. The
same holds for a leaf that a loop over time (a scan) reads once per iteration, as recurrent layers
do; the tap then has an axis of iterations. Every other leaf (used twice, or under a nonlinear
function) has no rule: its gradients are formed too, as vmap(grad) does.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from ..kernels.ghost_sums import Formed, shrink
from ..models import frameworks
from ..verify.flow import scan_counts
from .ghost_rules import RULES, convolution, over_time

# the same numbers in another shape: a gradient passes with its norm
VIEWS = (
    p.reshape_p,
    p.transpose_p,
    p.squeeze_p,
    p.broadcast_in_dim_p,
    p.convert_element_type_p,
    p.copy_p,
)
ELEMENTWISE = (p.add_p, p.sub_p, p.mul_p, p.div_p, p.max_p, p.min_p)


class Rule(NamedTuple):
    """How one leaf meets the data."""

    leaf: int | None
    parts: Any  # what ghost_rules says of the equation
    shape: tuple  # of the tap
    dtype: Any
    apply: Any  # operands of the equation -> its output, what to record
    gather: Any  # (records, backprops) [N, ...] -> Formed, Product or Lookup
    back: Any  # a sum in the rule's shape -> in the leaf's


class Book(NamedTuple):
    """A traced loss with its rules."""

    jaxpr: Any  # (leaves of the parameters, of the loss, of x, of y) -> loss; no inner jit
    rules: dict  # (index of an equation, of one in its loop or None) -> Rule
    why_not: dict  # name of a leaf -> why it has no rule
    loops: dict  # index of a scan -> the jaxpr of its turn, without inner jits


def read(loss, params, x, y) -> Book:
    """Find the rule of every leaf.

    Args:
        loss: (params, x, y) -> scalar, as a pytree, such as Fn.
        params: a pytree of floats.
        x: one example, as arrays or jax.ShapeDtypeStruct.
        y: its label, likewise.

    Example:
        >>> loss = jax.tree_util.Partial(
        ...     lambda w, x, y: jnp.tanh(x @ w["in"]) @ w["out"] + jnp.abs(w["out"]).sum()
        ... )
        >>> read(loss, {"in": jnp.ones((3, 2)), "out": jnp.ones(2)}, jnp.ones(3), 0).why_not
        {'out': 'it is used 2 times'}
    """
    flat = _flat(loss, params, x, y)
    paths = jax.tree_util.tree_leaves_with_path(params)
    inputs = flat.jaxpr.invars[: len(paths)]
    data = flat.jaxpr.invars[-len(jax.tree.leaves((x, y))) :]
    loops = {
        at: _unfolded(equation.params["jaxpr"])
        for at, equation in enumerate(flat.jaxpr.eqns)
        if equation.primitive is p.scan_p
    }
    rules, why_not = {}, {}
    for leaf, ((path, _), (place, end)) in enumerate(
        zip(paths, _ends(flat.jaxpr, inputs, data, loops))
    ):
        if isinstance(end, Rule):
            rules[place] = end._replace(leaf=leaf)
        elif end and inputs[leaf].aval.size > 1:  # of one number the gradient is one number
            why_not[jax.tree_util.keystr(path, simple=True, separator="/") or "params"] = end
    return Book(flat, rules, why_not, loops)


def _ends(jaxpr, leaves, data, loops) -> list:
    """Return, for each of `leaves`, its place and its Rule, or the reason why it has none ("" for
    an elementwise use).

    Args:
        jaxpr: the jaxpr of the loss, or of one iteration of a loop.
        leaves: input variables that are parameters.
        data: input variables that are data, or depend on data.
        loops: index of a scan -> the jaxpr of its iteration; empty for an iteration.
    """
    equations, uses = jaxpr.eqns, {}
    for at, equation in enumerate(equations):
        for side, v in enumerate(equation.invars):
            if not isinstance(v, Literal):
                uses.setdefault(v, []).append((at, side))
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            uses.setdefault(v, []).append((None, 0))
    reached, found = _reached(equations, data), []
    for v in leaves:
        views, end = _follow(equations, uses, v)
        if isinstance(end, str):
            found.append((None, end))
            continue
        (at, side), equation = end, equations[end[0]]
        if reached.isdisjoint(equation.outvars):
            name = equation.primitive.name
            found.append((None, f"it enters {name} before it meets the data"))
        elif at in loops and side < scan_counts(equation.params)[0]:
            found.append(_in_loop(equation, at, side, views, v.aval, loops[at].jaxpr))
        else:
            found.append(((at, None), _rule(equation, side, views, v.aval)))
    return found


def _in_loop(equation, at, side, views, aval, turn):
    """Return the entry of `_ends` for a leaf that a loop over time reads in each iteration."""
    (constants, _), length = scan_counts(equation.params), equation.params["length"]
    ((place, end),) = _ends(turn, [turn.invars[side]], turn.invars[constants:], {})
    if not isinstance(end, Rule):
        return None, end and f"in a loop {end}"
    if end.parts.factors is None:
        return None, "in a loop it enters what is no matrix product"
    parts = over_time(end.parts, length)
    rule = end._replace(
        shape=(length, *end.shape),
        gather=parts.gather,
        back=lambda total: _through(views, aval, end.back(total)),
    )
    return (at, place[0]), rule


def _unfolded(closed):
    """Return a jaxpr without inner jits."""
    return jax.make_jaxpr(lambda *args: _run(closed, args))(*closed.in_avals)


def _flat(loss, params, x, y):
    """Return the jaxpr (leaves of params, of loss, of x, of y) -> loss, without inner jits."""
    try:
        closed = jax.make_jaxpr(lambda params, loss, x, y: loss(params, x, y))(params, loss, x, y)
    except Exception as error:  # whose rows a user may have thought of another shape
        shapes = [f"{jnp.result_type(v)}{list(jnp.shape(v))}" for v in jax.tree.leaves((x, y))]
        frameworks.explain("the loss", error, f"x and y are {' and '.join(shapes)}")
        error.add_note(f"In the loss of one example, whose x and y are {' and '.join(shapes)}.")
        raise
    return _unfolded(closed)


def _reached(equations, start) -> set:
    """Return the variables that depend on those in `start`."""
    found = set(start)
    for equation in equations:
        if any(v in found for v in equation.invars if not isinstance(v, Literal)):
            found.update(equation.outvars)
    return found


def _follow(equations, uses, v):
    """Follow a leaf through views to its only use.

    Returns:
        The views, and (equation, operand), or the reason why there is none.
    """
    views = []
    while True:
        found = uses.get(v, [])
        if not found:
            return views, ""  # not used: its gradient is zero
        if len(found) > 1:
            return views, f"it is used {len(found)} times"
        ((at, side),) = found
        if at is None:
            return views, "it is the loss itself"
        made: Any = equations[at].outvars[0] if len(equations[at].outvars) == 1 else None
        if equations[at].primitive not in VIEWS or not jnp.issubdtype(
            made.aval.dtype, jnp.floating
        ):
            return views, (at, side)
        views.append(equations[at])
        v = made


def _rule(equation, side, views, aval):
    """Return the Rule of a leaf that `equation` uses as operand `side`; "" for an elementwise use,
    or the reason why there is none.
    """
    if equation.primitive in ELEMENTWISE:
        return ""
    operands, out = [v.aval for v in equation.invars], equation.outvars[0].aval
    make = RULES.get(equation.primitive)
    parts = make and make(equation.params, side, [v.shape for v in operands], out)
    if not parts:
        return f"it enters {equation.primitive.name}"
    if operands[side].size != aval.size:
        return "it is repeated before it is used"
    bind = lambda w, other: _bind(equation, (other, w) if side else (w, other))[0]
    ordered = lambda *operands: parts.apply(bind, operands[side], operands[1 - side])
    whole = lambda total: _through(views, aval, parts.back(total))
    return Rule(None, parts, out.shape, out.dtype, ordered, parts.gather, whole)


def _through(views, aval, total):
    """Apply the transposed views of a leaf to a sum.

    Conversions of type are skipped, because rounding comes last, after the noise.
    """
    view = lambda w: functools.reduce(
        lambda x, e: (
            x if e.primitive is p.convert_element_type_p else e.primitive.bind(x, **e.params)
        ),
        views,
        w,
    )
    wide = jax.ShapeDtypeStruct(aval.shape, total.dtype)
    return jax.linear_transpose(view, wide)(total)[0]


# --- running it


def _bind(equation, operands):
    with equation.ctx.manager:
        made = equation.primitive.bind(
            *operands, **equation.primitive.get_bind_params(equation.params)
        )
    return made if equation.primitive.multiple_results else [made]


def _run(closed, args, hooks=None):
    """Evaluate a jaxpr without inner jits.

    Args:
        hooks: index of an equation -> a function that runs instead and returns all its outputs.
    """
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args]))
    value = lambda v: v.val if isinstance(v, Literal) else env[v]
    for at, equation in enumerate(closed.jaxpr.eqns):
        operands = [value(v) for v in equation.invars]
        if hooks and at in hooks:
            made = hooks[at](*operands)
        elif equation.primitive is p.jit_p:
            made = _run(equation.params["jaxpr"], operands)
        else:
            made = _bind(equation, operands)
        env.update(zip(equation.outvars, made))
    return [value(v) for v in closed.jaxpr.outvars]


def convolved(loss, params, x, y, examples: int):
    """Return `loss` with its convolutions computed as in kernels.conv, or `loss` if it has none.

    Under vmap over clients a convolution becomes a grouped one, whose backward pass inside a loop
    is slow on a CPU: for a small CNN seven times slower than this. Values are equal up to rounding.

    Args:
        examples: number of examples whose gradients are added.
    """
    flat, hooks = _flat(loss, params, x, y), {}
    for at, equation in enumerate(flat.jaxpr.eqns):
        if equation.primitive is p.conv_general_dilated_p:
            shapes, out = [v.aval.shape for v in equation.invars], equation.outvars[0].aval
            if parts := convolution(equation.params, 1, shapes, out, examples):
                hooks[at] = lambda x, w, apply=parts.apply: apply(None, w, x)[:1]
    if not hooks:
        return loss
    return lambda params, x, y: _run(flat, jax.tree.leaves((params, loss, x, y)), hooks)[0]


def rows(book: Book, loss, params, x, y):
    """Run one forward and one backward pass.

    Args:
        book: the result of `read` for this loss.
        loss: the loss of one example, as passed to `read`.
        params: a pytree of floats.
        x: leaves [N, ...], the rows.
        y: leaves [N, ...], their labels.

    Returns:
        The losses [N]; and for each leaf its gradients, and a function that maps their sum back to
        the leaf's shape.
    """
    leaves = jax.tree.leaves(params)
    ruled = {rule.leaf: at for at, rule in book.rules.items()}
    formed = {leaf: leaves[leaf] for leaf in range(len(leaves)) if leaf not in ruled}
    taps = {at: jnp.zeros(rule.shape, rule.dtype) for at, rule in book.rules.items()}

    def one(formed, taps, x, y):
        records = {}

        held = [formed.get(leaf, w) for leaf, w in enumerate(leaves)]
        hooks = _hooks(book, taps, records)
        (value,) = _run(book.jaxpr, [*held, *jax.tree.leaves((loss, x, y))], hooks)
        return value, records

    derive = jax.vmap(jax.value_and_grad(one, (0, 1), has_aux=True), (None, None, 0, 0))
    (losses, records), (g, backprops) = derive(formed, taps, x, y)
    parts = []
    for leaf in range(len(leaves)):
        at = ruled.get(leaf)
        parts.append(
            (Formed(g[leaf]), lambda total: total)
            if at is None
            else (book.rules[at].gather(records[at], backprops[at]), book.rules[at].back)
        )
    return losses, parts


def _tapped(rule, tap, records, key):
    """Return a function that runs instead of an equation, records the factors and adds the tap."""

    def run(*operands):
        made, records[key] = rule.apply(*operands)
        return [made + tap]

    return run


def _hooks(book, taps, records) -> dict:
    """Return the functions that run instead of the equations of the loss that have rules."""
    hooks, loops = {}, {}
    for (at, inner), tap in taps.items():
        if inner is None:
            hooks[at] = _tapped(book.rules[at, None], tap, records, (at, None))
        else:
            loops.setdefault(at, {})[inner] = tap
    for at, inside in loops.items():
        hooks[at] = functools.partial(_loop, book, at, inside, records)
    return hooks


def _loop(book, at, taps, records, *operands):
    """Run a loop over time with taps and records in its iterations.

    Args:
        taps: index of an equation -> taps [iterations, ...].
    """
    params, turn = book.jaxpr.jaxpr.eqns[at].params, book.loops[at]
    constants, carried = scan_counts(params)
    fixed, begin = operands[:constants], operands[constants : constants + carried]

    def one(carry, step):
        xs, of_turn = step
        noted = {}
        hooks = {
            inner: _tapped(book.rules[at, inner], tap, noted, (at, inner))
            for inner, tap in of_turn.items()
        }
        made = _run(turn, [*fixed, *carry, *xs], hooks)
        return made[:carried], (made[carried:], noted)

    carry, (ys, noted) = jax.lax.scan(
        one,
        list(begin),
        (list(operands[constants + carried :]), taps),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    records.update(noted)
    return [*carry, *ys]


def clipped_sum(book: Book, loss, params, x, y, weight, bounds, together: bool):
    """Return the sum of clipped gradients.

    A gradient whose norm is not finite in float32 adds exactly nothing: its activations and
    backprops are masked.

    Args:
        book: the result of `read` for this loss.
        loss: the loss of one example, as passed to `read`.
        params: a pytree of floats.
        x: leaves [N, ...], the rows.
        y: leaves [N, ...], their labels.
        weight: Float[N], 0 for a row that does not count.
        bounds: a list of clip norms, in the units of the gradient: one, or one per leaf.
        together: whether a bound is for all leaves together or for each leaf.

    Returns:
        The sum, a tree like params, at least in float32; two Bool[N], which gradients were clipped
        and which were finite; and the losses [N].
    """
    losses, parts = rows(book, loss, params, x, y)
    squares = [part.squares() for part, _ in parts]
    norms = [jnp.sqrt(sum(squares))] * len(parts) if together else [jnp.sqrt(s) for s in squares]
    finite = jnp.all(jnp.isfinite(jnp.stack(norms)), 0)
    bounds = list(bounds) * len(parts) if len(bounds) == 1 else bounds
    sums = []
    for (part, back), norm, bound in zip(parts, norms, bounds):
        factor = jnp.where(finite & (weight != 0), weight * shrink(norm, bound), 0.0)
        sums.append(back(part.total(factor)))
    over = jnp.any(jnp.stack([n > b for n, b in zip(norms, bounds)]), 0)
    return jax.tree.structure(params).unflatten(sums), over, finite, losses


def words(book: Book) -> str:
    """Return the description of a book in a manifest."""
    return "bookkeeping" + (f" (vmap for {', '.join(book.why_not)})" if book.why_not else "")
