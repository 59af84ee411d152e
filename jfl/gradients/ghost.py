"""Book-keeping: sums of clipped per-example gradients, without forming most of these gradients.

The loss of one example is traced to a jaxpr, which shows every use of every parameter, in any
library. A parameter has a *rule* if it is used once, in a matrix product, a convolution or a table
lookup with the data. The gradient of an example is then the product of the activations that enter
the operation and of the gradient with respect to its output, the *backprop*. Norms and clipped sums
are computed from these two factors. To get the backprop, a *tap* is added to the output: an array
of zeros whose gradient is the backprop. There are also rules for parameters that a loop (a scan)
reads once per iteration, either whole, as in recurrent layers, or one slice per iteration, as in a
loop over layers. Their taps have an additional axis of iterations.

Two more kinds of parameters have rules. A *table* [rows, columns] may be used several times, as a
tied embedding is: its gradient is one product over the positions of all uses. And a parameter may
be transformed before it meets the data, as a standardised kernel is: the gradient of each example
with respect to the result is formed from the two factors, and the derivative of the transformation,
which is the same for all examples, converts it.

For all other parameters, the gradient of each example is formed, as vmap(grad) does. If such a
parameter is used elementwise (a bias, a scale), these gradients are no larger than the activations.

In this module, a leaf is a parameter array, and an equation is one operation of the jaxpr.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxpr_as_fun
from jax.extend.core import primitives as p

from ..kernels.ghost_sums import Formed, Product, product, shrink
from ..models import frameworks
from ..verify.flow import scan_counts
from .ghost_rules import RULES, convolution, gather_in_loop

# Operations that keep all numbers and change their shape or dtype, so gradients keep their norms.
VIEWS = (
    p.reshape_p,
    p.transpose_p,
    p.squeeze_p,
    p.broadcast_in_dim_p,
    p.convert_element_type_p,
    p.copy_p,
)
SAME_SHAPE = (p.convert_element_type_p, p.copy_p)
REPEATED = "it is repeated before it is used"  # its gradient is then a sum over the copies
ELEMENTWISE = (p.add_p, p.sub_p, p.mul_p, p.div_p, p.max_p, p.min_p)


class Rule(NamedTuple):
    """How the gradients of one leaf are computed without forming them.

    A rule belongs to the equation that uses the leaf.

    Attributes:
        leaf: the index of the leaf among the parameters; None until it is known. Only the rules of
            a table have the same leaf as another rule.
        parts: the ghost_rules.Parts for this kind of equation.
        shape: the shape of the tap.
        dtype: the dtype of the tap.
        apply: maps the operands of the equation to its output and to the activations to record.
        gather: maps recorded activations and backprops, [N, ...], to Formed, Product or Lookup of
            kernels.ghost_sums. For a table that is used several times, to factors [N, 1, P, rows]
            and [N, 1, P, columns].
        back: maps a sum over examples in the shape of the rule to the shape of the leaf, or of the
            transformed leaf.
        transform: maps the leaf to what enters the equation, for a leaf that is transformed before
            it meets the data; otherwise None.
        is_by_rows: as in ghost_rules.Parts, for the leaf.
    """

    leaf: int | None
    parts: Any
    shape: tuple
    dtype: Any
    apply: Any
    gather: Any
    back: Any
    transform: Any = None
    is_by_rows: bool = False


class Book(NamedTuple):
    """A traced loss with the rules of its parameters.

    Attributes:
        jaxpr: the jaxpr (leaves of the parameters, of the loss, of x, of y) -> loss, without inner
            jits.
        rules: the Rule of each equation that has one. The key is (index of the equation, None), or
            (index of a scan, index of the equation in its iteration).
        why_not: a dict from the name of each leaf without a rule to the reason.
        loops: a dict from the index of each scan to the jaxpr of its iteration, without inner jits.
    """

    jaxpr: Any
    rules: dict
    why_not: dict
    loops: dict


def read(loss, params, x, y, by_rows=()) -> Book:
    """Trace a loss, and find how the clipped gradient of each parameter can be computed.

    The result is a Book, which has rules for each parameter that is used in known layers.

    Args:
        loss: a function (params, x, y) -> scalar that is a pytree, such as an Fn.
        params: a pytree of floats.
        x: one example, as arrays or jax.ShapeDtypeStruct.
        y: its label, likewise.
        by_rows: the indices of the leaves that need a rule with `is_by_rows`, or no rule.

    Example:
        >>> loss = jax.tree_util.Partial(
        ...     lambda w, x, y: jnp.tanh(x @ w["in"]) @ w["out"] + jnp.abs(w["out"]).sum()
        ... )
        >>> read(loss, {"in": jnp.ones((3, 2)), "out": jnp.ones(2)}, jnp.ones(3), 0).why_not
        {'out': 'it is used 2 times'}
    """
    traced = _inline_jits(_trace(loss, params, x, y))
    paths = jax.tree_util.tree_leaves_with_path(params)
    inputs = traced.jaxpr.invars[: len(paths)]
    data = traced.jaxpr.invars[-len(jax.tree.leaves((x, y))) :]
    loops = {
        at: _inline_jits(equation.params["jaxpr"])
        for at, equation in enumerate(traced.jaxpr.eqns)
        if equation.primitive is p.scan_p
    }
    rules, why_not = {}, {}
    found = _find_rules(traced.jaxpr, inputs, data, loops)
    for leaf, ((path, _), rule) in enumerate(zip(paths, found)):
        if leaf in by_rows and isinstance(rule, dict):
            if len(rule) > 1 or not all(one.is_by_rows for one in rule.values()):
                rule = "it does not multiply one vector of each example along its first axis"
        if isinstance(rule, dict):
            rules |= {place: one._replace(leaf=leaf) for place, one in rule.items()}
        elif rule and inputs[leaf].aval.size > 1:  # the gradient of one number is one number
            why_not[jax.tree_util.keystr(path, simple=True, separator="/") or "params"] = rule
    return Book(traced, rules, why_not, loops)


def _find_rules(jaxpr, leaves, data, loops) -> list:
    """Find the rules of the leaves of a jaxpr.

    Args:
        jaxpr: the jaxpr of the loss, or of one iteration of a loop.
        leaves: input variables that are parameters.
        data: input variables that are data, or depend on data.
        loops: index of a scan -> the jaxpr of its iteration; empty for an iteration.

    Returns:
        For each leaf, a dict of its rules with keys as in `Book.rules`; or the reason why it has
        none, which is "" for an elementwise use.
    """
    equations, uses = jaxpr.eqns, {}
    for at, equation in enumerate(equations):
        for side, v in enumerate(equation.invars):
            if not isinstance(v, Literal):
                uses.setdefault(v, []).append((at, side))
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            uses.setdefault(v, []).append((None, 0))
    depends_on_data, found = _dependent_variables(equations, data), []
    is_before_data = lambda use: (
        not isinstance(use, str) and depends_on_data.isdisjoint(equations[use[0]].outvars)
    )
    for v in leaves:
        ends = _follow(equations, uses, v)
        if any(is_before_data(use) for _, use in ends):
            found.append(_rule_of_transformed(jaxpr, uses, v, ends, depends_on_data))
        elif len(ends) > 1:
            found.append(_rules_of_table(equations, ends, v.aval))
        else:
            ((views, use),) = ends
            if isinstance(use, str):
                found.append(use)
                continue
            (at, side), equation = use, equations[use[0]]
            if at not in loops:
                rule = _rule_of_use(equation, side, views, v.aval)
                found.append({(at, None): rule} if isinstance(rule, Rule) else rule)
                continue
            is_data = [not isinstance(v, Literal) and v in depends_on_data for v in equation.invars]
            found.append(_rule_in_loop(equation, at, side, views, v.aval, loops[at].jaxpr, is_data))
    return found


def _rules_of_table(equations, ends, aval):
    """Return the entry of `_find_rules` for a leaf that is used several times.

    Args:
        equations: the equations of the jaxpr.
        ends: the uses of the leaf, see `_follow`.
        aval: its shape and dtype.
    """
    why_not, rules = f"it is used {len(ends)} times", {}
    for views, use in ends:
        rule = use if isinstance(use, str) else _rule_of_use(equations[use[0]], use[1], views, aval)
        if not isinstance(rule, Rule) or not rule.parts.table:
            return why_not
        if any(e.primitive not in (p.transpose_p, *SAME_SHAPE) for e in views):
            return why_not
        is_transposed = sum(e.params.get("permutation") == (1, 0) for e in views) % 2
        gather = functools.partial(_factors_of_table, rule.parts.table, is_transposed)
        rules[use[0], None] = rule._replace(gather=gather, back=lambda total: total[0])
    return rules if len(rules) == len(ends) else why_not


def _factors_of_table(table, is_transposed, a, b):
    """Return the factors of a table's gradients, those of rows first; see `Parts.table`."""
    rows, columns = table(a, b)
    return (columns, rows) if is_transposed else (rows, columns)


def _rule_of_transformed(jaxpr, uses, v, ends, depends_on_data):
    """Return the entry of `_find_rules` for a leaf that is transformed before it meets the data.

    There is a rule if the result depends on no other input and enters one equation with the data.

    Args:
        jaxpr: the jaxpr of the loss.
        uses: the uses of each variable, see `_follow`.
        v: the variable of the leaf.
        ends: its uses, see `_follow`.
        depends_on_data: the variables that depend on data.
    """
    equations = jaxpr.eqns
    why_not = f"it is used {len(ends)} times"
    if len(ends) == 1:
        why_not = f"it enters {equations[ends[0][1][0]].primitive.name} before it meets the data"
    own = [w for w in _dependent_variables(equations, [v]) if w not in depends_on_data]
    meetings = [
        (w, at, side)
        for w in own
        for at, side in uses.get(w, [])
        if at is None or not depends_on_data.isdisjoint(equations[at].outvars)
    ]
    others = _dependent_variables(equations, [w for w in jaxpr.invars if w is not v])
    if len(meetings) != 1 or meetings[0][1] is None or meetings[0][0] in others:
        return why_not
    ((w, at, side),) = meetings
    rule = _rule_of_use(equations[at], side, [], w.aval)
    # The gradient of a table that is looked up has no factors from which it could be formed.
    if not isinstance(rule, Rule) or equations[at].primitive is p.gather_p:
        return why_not
    needed, steps = {w}, []  # the equations from the leaf to w
    for equation in reversed(equations):
        if not needed.isdisjoint(equation.outvars):
            steps.insert(0, equation)
            needed.update(u for u in equation.invars if not isinstance(u, Literal))
    if needed.intersection(jaxpr.constvars):
        return why_not

    def transform(leaf):
        env = {v: leaf}
        _run_equations(steps, env)
        return env[w]

    return {(at, None): rule._replace(transform=transform, is_by_rows=False)}


def _rule_in_loop(equation, at, side, views, aval, iteration, is_data):
    """Return the entry of `_find_rules` for a leaf that is used in a loop.

    A loop over time reads the whole leaf in each iteration, and a loop over layers reads one slice
    of it, that of the layer.

    Args:
        equation: the scan.
        at: its index.
        side: which operand of the scan the leaf is.
        views: the views through which the leaf enters the scan.
        aval: the shape and dtype of the leaf.
        iteration: the jaxpr of an iteration.
        is_data: for each operand of the scan, whether it depends on data.
    """
    (constants, carried), length = scan_counts(equation.params), equation.params["length"]
    if constants <= side < constants + carried:
        return "a loop changes it"
    if equation.invars[side].aval.size != aval.size:
        return REPEATED
    carry = range(constants, constants + carried)
    data = [v for i, v in enumerate(iteration.invars) if is_data[i] or i in carry]
    (rules,) = _find_rules(iteration, [iteration.invars[side]], data, {})
    if isinstance(rules, str):
        return rules and f"in a loop {rules}"
    if len(rules) > 1:
        return f"in a loop it is used {len(rules)} times"
    ((place, rule),) = rules.items()
    if rule.transform:
        return "in a loop it is transformed before it meets the data"
    if rule.parts.factors is None:
        return "in a loop it enters an operation that is not a matrix product"
    is_sliced, back = side >= constants, rule.back
    if is_sliced:
        back = lambda total: jax.vmap(rule.back)(total.reshape(length, -1, *total.shape[1:]))
    rule_in_loop = rule._replace(
        shape=(length, *rule.shape),
        gather=gather_in_loop(rule.parts, length, is_sliced),
        is_by_rows=False,
        back=lambda total: _undo_views(views, aval, back(total)),
    )
    return {(at, place[0]): rule_in_loop}


def num_activations(book: Book) -> int:
    """Return how many numbers are computed to evaluate the loss on one example.

    The count includes the outputs of all operations of the traced loss, and those of the operations
    in a scan once per iteration.
    """
    of = lambda equation: sum(v.aval.size for v in equation.outvars)
    in_loops = (
        book.jaxpr.eqns[at].params["length"] * sum(map(of, iteration.eqns))
        for at, iteration in book.loops.items()
    )
    return sum(map(of, book.jaxpr.eqns)) + sum(in_loops)


def _inline_jits(closed):
    """Return a jaxpr without inner jits."""
    return jax.make_jaxpr(lambda *args: _run(closed, args))(*closed.in_avals)


def _trace(loss, params, x, y):
    """Return the jaxpr (leaves of params, of loss, of x, of y) -> loss."""
    try:
        return jax.make_jaxpr(lambda params, loss, x, y: loss(params, x, y))(params, loss, x, y)
    except Exception as error:  # the user's loss may expect rows of another shape
        shapes = [f"{jnp.result_type(v)}{list(jnp.shape(v))}" for v in jax.tree.leaves((x, y))]
        frameworks.explain("the loss", error, f"x and y are {' and '.join(shapes)}")
        error.add_note(f"In the loss of one example, whose x and y are {' and '.join(shapes)}.")
        raise


def _dependent_variables(equations, start) -> set:
    """Return the variables in `start`, and all variables that depend on them."""
    dependent = set(start)
    for equation in equations:
        if any(v in dependent for v in equation.invars if not isinstance(v, Literal)):
            dependent.update(equation.outvars)
    return dependent


def _follow(equations, uses, v, views=()):
    """Follow a leaf through views to its uses.

    Args:
        equations: the equations of the jaxpr.
        uses: for each variable, the equations that use it, as (index, operand).
        v: the variable of the leaf, or of a view of it.
        views: the views from the leaf to v.

    Returns:
        For each use, the views that lead to it, and the use as (index of the equation, operand), or
        the reason why there is none.
    """
    ends = []
    for at, side in uses.get(v, []):
        if at is None:
            ends.append((views, "it is the loss itself"))
            continue
        result: Any = equations[at].outvars[0] if len(equations[at].outvars) == 1 else None
        if equations[at].primitive in VIEWS and jnp.issubdtype(result.aval.dtype, jnp.floating):
            ends += _follow(equations, uses, result, (*views, equations[at]))
        else:
            ends.append((views, (at, side)))
    return ends or [(views, "")]  # a leaf that is not used has a gradient of zeros


def _rule_of_use(equation, side, views, aval):
    """Return the Rule of a leaf that an equation uses, or the reason why there is none.

    The reason is "" for an elementwise use.

    Args:
        equation: the equation.
        side: which operand the leaf is.
        views: the views through which the leaf enters the equation.
        aval: the shape and dtype of the leaf.
    """
    if equation.primitive in ELEMENTWISE:
        return ""
    operands, out = [v.aval for v in equation.invars], equation.outvars[0].aval
    make = RULES.get(equation.primitive)
    parts = make and make(equation.params, side, [v.shape for v in operands], out)
    if not parts:
        return f"it enters {equation.primitive.name}"
    if operands[side].size != aval.size:
        return REPEATED
    bind = lambda w, other: _bind(equation, (other, w) if side else (w, other))[0]
    apply = lambda *operands: parts.apply(bind, operands[side], operands[1 - side])
    back = lambda total: _undo_views(views, aval, parts.back(total))
    is_by_rows = parts.is_by_rows and all(e.primitive in SAME_SHAPE for e in views)
    return Rule(None, parts, out.shape, out.dtype, apply, parts.gather, back, is_by_rows=is_by_rows)


def _undo_views(views, aval, total):
    """Convert a sum from the shape after the views of a leaf to the shape of the leaf.

    Conversions of dtype are skipped, because the release rounds once, after the noise.
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
    """Run an equation, and return the list of its outputs."""
    with equation.ctx.manager:
        outputs = equation.primitive.bind(
            *operands, **equation.primitive.get_bind_params(equation.params)
        )
    return outputs if equation.primitive.multiple_results else [outputs]


def _run(closed, args, hooks=None):
    """Evaluate a jaxpr; inner jits are inlined.

    Args:
        closed: the jaxpr.
        args: its arguments.
        hooks: functions that run instead of equations, by index, and return all their outputs.
    """
    env = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args]))
    _run_equations(closed.jaxpr.eqns, env, hooks)
    return [v.val if isinstance(v, Literal) else env[v] for v in closed.jaxpr.outvars]


def _run_equations(equations, env, hooks=None):
    """Evaluate equations as `_run` does, and add their outputs to `env`, the values by variable."""
    value = lambda v: v.val if isinstance(v, Literal) else env[v]
    for at, equation in enumerate(equations):
        operands = [value(v) for v in equation.invars]
        if hooks and at in hooks:
            outputs = hooks[at](*operands)
        elif equation.primitive is p.jit_p:
            outputs = _run(equation.params["jaxpr"], operands)
        else:
            outputs = _bind(equation, operands)
        env.update(zip(equation.outvars, outputs))


def with_fast_convolutions(loss, params, x, y, examples: int):
    """Return `loss` with its convolutions computed as kernels.conv chooses for the backend.

    Under vmap over clients, XLA computes a grouped convolution, whose backward pass inside a loop
    is slow on a CPU: for a small CNN it takes seven times as long as that of kernels.conv. Values
    are equal up to rounding.

    Args:
        loss, params, x, y: as in `read`.
        examples: the number of examples whose gradients are added.
    """
    closed, hooks = _trace(loss, params, x, y), {}
    traced = _inline_jits(closed)
    for at, equation in enumerate(traced.jaxpr.eqns):
        if equation.primitive is p.conv_general_dilated_p:
            shapes, out = [v.aval.shape for v in equation.invars], equation.outvars[0].aval
            if parts := convolution(equation.params, 1, shapes, out, examples):
                hooks[at] = lambda x, w, apply=parts.apply: apply(None, w, x)[:1]
    if not hooks:  # the jaxpr stands for the loss, which is then not traced again
        run = jaxpr_as_fun(closed)
        return lambda params, x, y: run(*jax.tree.leaves((params, loss, x, y)))[0]
    return lambda params, x, y: _run(traced, jax.tree.leaves((params, loss, x, y)), hooks)[0]


def gradients(book: Book, loss, params, x, y):
    """Return per-example gradients from one forward and one backward pass.

    The gradients of a leaf that is used in a known layer, such as a dense layer or an embedding,
    are not formed. They are returned as the two factors of which each is the product: the
    activations that enter the layer, and the gradient with respect to its output (the backprop).
    `book` has a rule for each such leaf.

    Args:
        book: the result of `read` for this loss.
        loss: the loss of one example, as passed to `read`.
        params: a pytree of floats.
        x: leaves [N, ...], the rows.
        y: leaves [N, ...], their labels.

    Returns:
        The losses [N]; and a list with a pair for each leaf. The first item of a pair holds the
        gradients of the N examples: Formed holds the gradients themselves, and Product and Lookup
        hold their factors (see kernels.ghost_sums). The second item is a function that maps a sum
        of these gradients over examples to the shape of the leaf.
    """
    leaves = jax.tree.leaves(params)
    keys_of_leaf = {}
    for key, rule in book.rules.items():
        keys_of_leaf.setdefault(rule.leaf, []).append(key)
    formed = {leaf: leaves[leaf] for leaf in range(len(leaves)) if leaf not in keys_of_leaf}
    taps = {key: jnp.zeros(rule.shape, rule.dtype) for key, rule in book.rules.items()}

    def loss_of_example(formed, taps, x, y):
        records = {}
        weights = [formed.get(leaf, w) for leaf, w in enumerate(leaves)]
        hooks = _hooks(book, taps, records)
        (value,) = _run(book.jaxpr, [*weights, *jax.tree.leaves((loss, x, y))], hooks)
        return value, records

    with_gradient = jax.value_and_grad(loss_of_example, (0, 1), has_aux=True)
    (losses, records), (formed_gradients, backprops) = jax.vmap(with_gradient, (None, None, 0, 0))(
        formed, taps, x, y
    )
    parts = []
    for leaf in range(len(leaves)):
        keys = keys_of_leaf.get(leaf)
        if keys is None:
            parts.append((Formed(formed_gradients[leaf]), lambda total: total))
            continue
        rule, *others = (book.rules[key] for key in keys)
        gathered = [book.rules[key].gather(records[key], backprops[key]) for key in keys]
        if others:
            a, b = (jnp.concatenate(factors, 2) for factors in zip(*gathered))
            parts.append((product(a, b), rule.back))
        elif rule.transform:
            parts.append((_before_transform(rule, leaves[leaf], *gathered), lambda total: total))
        else:
            parts.append((*gathered, rule.back))
    return losses, parts


def _before_transform(rule, leaf, gathered) -> Formed:
    """Return the per-example gradients of a leaf, from those of the transformed leaf.

    They are formed, because the derivative must be applied before the norm is taken, and to each
    gradient separately: if most of a gradient cancels in the derivative, the rounding errors of a
    derivative of the sum would not be bounded by the clip norm.
    """
    transformed, derivative = jax.vjp(rule.transform, leaf)
    one = lambda g: derivative(rule.back(g).astype(transformed.dtype))[0]
    return Formed(jax.vmap(one)(gathered.each()))


def _add_tap(rule, tap, records, key):
    """Return a function that runs instead of an equation, records activations and adds the tap."""

    def run(*operands):
        output, records[key] = rule.apply(*operands)
        return [output + tap]

    return run


def _hooks(book, taps, records) -> dict:
    """Return the functions that run instead of the equations of the loss that have rules.

    Args:
        book: the traced loss.
        taps: the tap of each rule, by its key.
        records: a dict to which the functions add the activations of each rule.
    """
    hooks, taps_of_loop = {}, {}
    for (at, inner), tap in taps.items():
        if inner is None:
            hooks[at] = _add_tap(book.rules[at, None], tap, records, (at, None))
        else:
            taps_of_loop.setdefault(at, {})[inner] = tap
    for at, inner_taps in taps_of_loop.items():
        hooks[at] = functools.partial(_run_loop, book, at, inner_taps, records)
    return hooks


def _run_loop(book, at, taps, records, *operands):
    """Run a loop over time with taps and records in its iterations.

    Args:
        book: the traced loss.
        at: the index of the scan.
        taps: taps [iterations, ...], by the index of the equation in an iteration.
        records: a dict to which the activations [iterations, ...] are added.
        *operands: the operands of the scan.
    """
    params, iteration = book.jaxpr.jaxpr.eqns[at].params, book.loops[at]
    constants, carried = scan_counts(params)
    fixed, initial = operands[:constants], operands[constants : constants + carried]

    def run_iteration(carry, inputs):
        xs, inner_taps = inputs
        inner_records = {}
        hooks = {
            inner: _add_tap(book.rules[at, inner], tap, inner_records, (at, inner))
            for inner, tap in inner_taps.items()
        }
        outputs = _run(iteration, [*fixed, *carry, *xs], hooks)
        return outputs[:carried], (outputs[carried:], inner_records)

    carry, (ys, inner_records) = jax.lax.scan(
        run_iteration,
        list(initial),
        (list(operands[constants + carried :]), taps),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    records.update(inner_records)
    return [*carry, *ys]


def clipped_sum(
    book: Book, loss, params, x, y, weight, bounds, together: bool, stretches=None, gamma=None
):
    """Return the weighted sum of clipped per-example gradients.

    A gradient whose norm is not finite in float32 counts as zero: its activations and backprops are
    masked.

    Args:
        book: the result of `read` for this loss.
        loss: the loss of one example, as passed to `read`.
        params: a pytree of floats.
        x: leaves [N, ...], the rows.
        y: leaves [N, ...], their labels.
        weight: Float[N], 0 for a masked row.
        bounds: a list of clip norms: one, or one per leaf.
        together: whether a clip norm bounds the norm of all leaves together, or of each leaf.
        stretches: for each leaf, the linear map of its gradient whose Euclidean norm is bounded: a
            factor, or a function as in `haar_bands.stretches`, which needs a book that was read
            with this leaf in `by_rows`. None bounds the gradient itself.
        gamma: the stability constant of automatic clipping; None for a clip.

    Returns:
        The sum, a tree like params, at least in float32; Bool[N], which gradients were clipped;
        Bool[N], which were finite; and the losses [N].
    """
    losses, parts = gradients(book, loss, params, x, y)
    if stretches is None:
        squares = [part.squares() for part, _ in parts]
    else:
        squares = [_stretched_squares(part, s) for (part, _), s in zip(parts, stretches)]
    norms = [jnp.sqrt(sum(squares))] if together else [jnp.sqrt(s) for s in squares]
    is_finite = jnp.all(jnp.isfinite(jnp.stack(norms)), 0)
    bounds = list(bounds) * len(norms) if len(bounds) == 1 else bounds
    is_kept = is_finite & (weight != 0)
    factors = [
        jnp.where(is_kept, weight * shrink(norm, bound, gamma), 0.0)
        for norm, bound in zip(norms, bounds)
    ]
    is_clipped = jnp.any(jnp.stack([n > b for n, b in zip(norms, bounds)]), 0)
    if together:
        factors *= len(parts)
    sums = [back(part.total(factor)) for (part, back), factor in zip(parts, factors)]
    return jax.tree.structure(params).unflatten(sums), is_clipped, is_finite, losses


def _stretched_squares(part, stretch):
    """Return the squared norms of gradients after a linear map, Float[N].

    A map M of the first axis of a leaf can be applied to the activations: M (a^T b) = (M a^T) b.
    With one position, this rounds no more than the map of the gradient itself would.
    """
    if not callable(stretch):
        return jnp.square(stretch) * part.squares()
    if isinstance(part, Formed):
        return Formed(stretch(part.g)).squares()
    a: Any = stretch(part.a)
    return Product(a.reshape(len(a), 1, 1, -1), part.b).squares()
