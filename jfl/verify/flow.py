"""What flows where in a jaxpr: which values data reached and by which way, and how keys and
counters were made.

Each value has a symbol, equal for values that were computed alike from the same inputs, and tokens,
the sources that reached it, each with its path.  Marks (see `jfl.core.marks`) are collected; what
they mean is judged in `client`.
"""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core import primitives as p

from ..core.jaxprs import of_scan, within
from . import marks

MARKS = {
    q: q.name
    for q in (
        marks.release_p,
        marks.bounded_p,
        marks.example_p,
        marks.batch_p,
        marks.slots_p,
        marks.key_p,
    )
}
# what may hide anything: Python, foreign libraries, and rules of batching that mix the rows of a
# batch
OPAQUE = (
    "pure_callback",
    "io_callback",
    "buffer_callback",
    "ffi_call",
    "custom_call",
    "custom_vmap_call",
    "call_exported",
    "infeed",
)
# they move keys, or make children of them; all else that reads a key draws from it
KEYS = (
    "random_fold_in",
    "random_split",
    "random_clone",
    "slice",
    "squeeze",
    "reshape",
    "broadcast_in_dim",
    "copy",
    "dynamic_slice",
    "gather",
    "select_n",
    "concatenate",
    "stack",
    "unstack",
    "transpose",
    "jfl_noise_key",
)
SAME = ("convert_element_type", "copy", "copy_p", "reshape", "squeeze", "broadcast_in_dim")
LARGE = 2**20  # numbers of a constant beyond which it is equal only to itself
PASSES = 60


class Value(NamedTuple):
    symbol: int
    tokens: dict  # source -> path, (the path before, an equation) or None


class Mark(NamedTuple):
    kind: str
    params: dict
    operands: list  # of Value
    loops: tuple  # around it, outermost first
    equation: Any


class Flow:
    """Runs a jaxpr on symbols and tokens."""

    def __init__(self):
        self.nodes, self.ids, self.shapes = [], {}, {}
        self.marks, self.drawn, self.consts = {}, {}, {}
        self.length, self.carries, self._varies, self._params, self.details = {}, {}, {}, {}, {}
        self._open = set()
        self.outside = False  # inside a shard_map

    def node(self, *content, shape=None) -> int:
        """The number of a symbol; equal contents, equal numbers."""
        number = self.ids.get(content)
        if number is None:
            number = self.ids[content] = len(self.nodes)
            self.nodes.append(content)
        if shape is not None:
            self.shapes[number] = tuple(shape)
        return number

    def input(self, name, aval, *sources) -> Value:
        return Value(self.node("in", name, shape=aval.shape), {s: None for s in sources})

    def constant(self, value) -> Value:
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        try:
            plain = np.asarray(value)
        except Exception:  # a key, or a reference: equal to itself only
            self.consts[id(value)] = value
            return Value(self.node("const", id(value), shape=np.shape(value)), {})
        if plain.ndim == 0:
            number = plain.item()
            number = number if number == number else None  # nan is not equal to itself
            return Value(self.node("lit", str(plain.dtype), plain.tobytes(), number, shape=()), {})
        self.consts[id(value)] = value
        name = id(value) if plain.size > LARGE else hashlib.sha256(plain.tobytes()).hexdigest()
        return Value(
            self.node("const", str(plain.dtype), name, self._steps(plain), shape=plain.shape), {}
        )

    @staticmethod
    def _steps(plain):
        """(first, step) of whole numbers that go up evenly."""
        if plain.ndim != 1 or plain.dtype.kind not in "iu" or not plain.size:
            return None
        steps = np.diff(plain.astype(np.int64))
        return (
            (int(plain[0]), int(steps[0]) if steps.size else 0)
            if not steps.size or (steps == steps[0]).all()
            else None
        )

    # --- running it

    def closed(self, closed: ClosedJaxpr, operands, stack=(), loops=()):
        return self.run(
            closed.jaxpr, [self.constant(c) for c in closed.consts], operands, stack, loops
        )

    def run(self, jaxpr, consts, operands, stack, loops):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
        value = lambda v: self.constant(v.val) if isinstance(v, Literal) else env[v]
        for equation in jaxpr.eqns:
            operands = [value(v) for v in equation.invars]
            results = self.equation(equation, operands, (*stack, id(equation)), loops)
            env.update(zip(equation.outvars, results))
        return [value(v) for v in jaxpr.outvars]

    def equation(self, equation, operands, stack, loops):
        primitive, params = equation.primitive, equation.params
        if primitive in MARKS:
            return self.mark(equation, operands, stack, loops)
        if primitive is p.scan_p:
            return self.scan(equation, operands, stack, loops)
        if primitive is p.while_p:
            return self.while_(equation, operands, stack, loops)
        if primitive is p.cond_p:
            return self.cond(equation, operands, stack, loops)
        if primitive.name == "unstack":
            return self.unstack(equation, operands)
        if primitive.name not in OPAQUE:
            inner = next(
                (
                    params[k]
                    for k in ("jaxpr", "call_jaxpr")
                    if isinstance(params.get(k), (Jaxpr, ClosedJaxpr))
                ),
                None,
            )
            closed = inner
            # with jax 0.11 both are one class, and a jaxpr has its constants
            if inner is not None and not isinstance(inner, ClosedJaxpr):
                closed = ClosedJaxpr(inner, ())
            if (
                closed is not None
                and not closed.jaxpr.constvars[len(closed.consts) :]
                and len(closed.jaxpr.invars) == len(operands)
                and len(closed.jaxpr.outvars) == len(equation.outvars)
            ):
                before, self.outside = self.outside, self.outside or primitive.name == "shard_map"
                results = self.closed(closed, operands, stack, loops)
                self.outside = before
                return results
        return self.other(equation, operands, stack, loops)

    def other(self, equation, operands, stack, loops):
        """Any other primitive: what goes in may come out, and what nobody can see in it."""
        name = equation.primitive.name
        hides = name in OPAQUE or self.hides(equation.params)
        for v, operand in zip(equation.invars, operands):
            if name not in KEYS and is_key(v.aval):
                self.drawn[stack] = (operand.symbol, equation)
        tokens = self.along(equation, operands)
        if hides:
            tokens[("opaque", name)] = (None, equation)
            content = ("opaque", stack, loops)
        else:
            content = ("op", name, self.parameters(equation), *(o.symbol for o in operands))
        return [
            Value(self.node(*content, i, shape=getattr(v.aval, "shape", ())), tokens)
            for i, v in enumerate(equation.outvars)
        ]

    def hides(self, params) -> bool:
        """Whether programs within an equation that are not followed hold a mark, or what may hide
        anything.  Their constants are kept with the others."""
        found = False
        for equations, constants in within(params):
            for value in constants:
                self.constant(value)
            for equation in equations:
                for v in equation.invars:
                    if isinstance(v, Literal):
                        self.constant(v.val)
                found |= equation.primitive in MARKS or equation.primitive.name in OPAQUE
                found |= self.hides(equation.params)
        return found

    def unstack(self, equation, operands):
        """The rows along an axis: slices, as JAX wrote them before 0.11."""
        (operand,), axis = operands, equation.params["axis"]
        one = [1 if a == axis else n for a, n in enumerate(equation.invars[0].aval.shape)]
        tokens, rows = self.along(equation, operands), []
        for i, v in enumerate(equation.outvars):
            begin = tuple(i if a == axis else 0 for a in range(len(one)))
            end = tuple(first + size for first, size in zip(begin, one))
            cut = self.text(dict(limit_indices=end, start_indices=begin, strides=None))
            cut = self.node("op", "slice", cut, operand.symbol, 0, shape=one)
            row = ("op", "squeeze", self.text(dict(dimensions=(axis,))), cut, 0)
            rows.append(Value(self.node(*row, shape=v.aval.shape), tokens))
        return rows

    def text(self, params):
        """Of what an operation does, under which `details` has it."""
        plain = {k: v for k, v in params.items() if v is not None and k != "sharding"}
        known = repr(sorted(plain.items(), key=lambda i: i[0]))
        self.details[known] = params
        return known

    def parameters(self, equation):
        """A text of what an equation does; its own where that has none."""
        known = self._params.get(id(equation))
        if known is None:
            inside = any(
                isinstance(v, (Jaxpr, ClosedJaxpr)) or callable(v)
                for v in equation.params.values()
                if not isinstance(v, type)
            )
            if inside:
                known = f"#{id(equation)}"
                self.details[known] = equation.params
            else:
                known = self.text(equation.params)
            self._params[id(equation)] = known
        return known

    @staticmethod
    def along(equation, operands):
        out = {}
        for operand in operands:
            for token, path in operand.tokens.items():
                if token not in out:
                    out[token] = (path, equation)
        return out

    def mark(self, equation, operands, stack, loops):
        kind = MARKS[equation.primitive]
        name = self.node("at", stack)
        params = dict(equation.params, outside=self.outside)
        self.marks[name] = new_mark = Mark(kind, params, operands, loops, equation)
        if kind == "jfl_noise_key":
            tokens = {}
        elif kind == "jfl_slots":  # who was drawn is as secret as the rows
            tokens = self.along(equation, operands)
        elif kind == "jfl_release":
            tokens = {("released", name): None} | self.inner(new_mark)
        else:
            tokens = {(kind.removeprefix("jfl_"), name): self.first(operands)} | self.kept(operands)
        return [
            Value(self.node("mark", name, i, shape=v.aval.shape), tokens)
            for i, v in enumerate(equation.outvars)
        ]

    def first(self, operands):
        """The way in which rows came here, if any did."""
        return next(
            (
                path
                for o in operands
                for token, path in o.tokens.items()
                if token[0] in ("rows", "batch", "example", "bounded", "kept")
            ),
            None,
        )

    @staticmethod
    def kept(operands, kinds=("released", "own", "opaque")):
        """What a mark does not end."""
        return {t: path for o in operands for t, path in o.tokens.items() if t[0] in kinds}

    def bounds(self, mark):
        """The mark of the bounded sum that a release made noisy, or None."""
        n, bounding = mark.params["n"], set()
        for i, o in enumerate(mark.operands[n : 2 * n]):
            node = self.nodes[o.symbol]
            bounding.add(node[1] if node[0] == "mark" and node[2] == i else None)
        (name,) = bounding if len(bounding) == 1 else (None,)
        return name if name is not None and self.marks[name].kind == "jfl_bounded" else None

    def inner(self, mark):
        """Earlier releases that a release publishes beside itself: what one is computed at, the
        other depends on."""
        bound, n = self.bounds(mark), mark.params["n"]
        operands = mark.operands[n : 2 * n] if bound is None else self.marks[bound].operands
        if bound is not None and self.marks[bound].params["kind"] == "single":
            return self.kept(
                operands, ("own", "opaque")
            )  # its noise covers all else that went into it
        return self.kept(operands)

    def scan(self, equation, operands, stack, loops):
        params = equation.params
        consts, carried = of_scan(params)
        loop = self.node("loop", stack)
        self.length[loop] = params["length"]
        fixed, start, rows = (
            operands[:consts],
            operands[consts : consts + carried],
            operands[consts + carried :],
        )
        xs = [
            Value(
                self.node("elem", loop, x.symbol, shape=self.shapes.get(x.symbol, (0,))[1:]),
                x.tokens,
            )
            for x in rows
        ]
        carry, outs = self.fixpoint(
            loop,
            start,
            lambda carry: self.closed(
                params["jaxpr"], [*fixed, *carry, *xs], stack, (*loops, loop)
            ),
        )
        ys = [
            Value(self.node("ys", loop, i, shape=v.aval.shape), y.tokens)
            for i, (y, v) in enumerate(zip(outs[carried:], equation.outvars[carried:]))
        ]
        return [*carry, *ys]

    def while_(self, equation, operands, stack, loops):
        params = equation.params
        a, b = params["cond_nconsts"], params["body_nconsts"]
        loop = self.node("loop", stack)
        self.length[loop] = None

        def body(carry):
            (test,) = self.closed(
                params["cond_jaxpr"], [*operands[:a], *carry], (*stack, "cond"), (*loops, loop)
            )
            outs = self.closed(
                params["body_jaxpr"], [*operands[a : a + b], *carry], stack, (*loops, loop)
            )
            often = self.along(equation, [test])  # how often it ran shows in all that comes out
            return [o._replace(tokens=often | o.tokens) for o in outs]

        return self.fixpoint(loop, operands[a + b :], body)[0]

    def fixpoint(self, loop, start, body):
        """Carried values after a loop, and what its body gives, once neither tokens nor invariants
        change."""
        same, tokens = [None] * len(start), [s.tokens for s in start]
        for _ in range(PASSES):
            names = [
                s
                if s is not None
                else self.node("carry", loop, j, shape=self.shapes.get(start[j].symbol, ()))
                for j, s in enumerate(same)
            ]
            outs = body([Value(s, t) for s, t in zip(names, tokens)])
            changed = False
            for j in range(len(start)):
                self.carries[loop, j] = (start[j].symbol, outs[j].symbol)
                new = {t: path for t, path in outs[j].tokens.items() if t not in tokens[j]}
                if new:
                    tokens[j], changed = tokens[j] | new, True
                if same[j] is None and outs[j].symbol == names[j]:
                    same[j], changed = start[j].symbol, True
                elif same[j] is not None and outs[j].symbol != same[j]:
                    raise RuntimeError("a carried value that seemed to stay the same does not")
            if not changed:
                break
        else:
            raise RuntimeError(f"no end after {PASSES} passes over a loop")
        ends = [
            s
            if s is not None
            else self.node("final", loop, j, shape=self.shapes.get(start[j].symbol, ()))
            for j, s in enumerate(same)
        ]
        return [Value(e, t) for e, t in zip(ends, tokens)], outs

    def cond(self, equation, operands, stack, loops):
        which, rest = operands[0], operands[1:]
        chosen = self.along(equation, [which])
        branches = [
            self.closed(b, rest, (*stack, i), loops)
            for i, b in enumerate(equation.params["branches"])
        ]
        results = []
        for i, outs in enumerate(zip(*branches)):
            symbols = {o.symbol for o in outs}
            tokens = dict(chosen)
            for o in outs:
                tokens = o.tokens | tokens
            results.append(
                Value(
                    symbols.pop()
                    if len(symbols) == 1
                    else self.node("cond", stack, loops, i, shape=equation.outvars[i].aval.shape),
                    tokens,
                )
            )
        return results

    # --- counters

    def affine(self, symbol):
        """A whole number as ({atom: factor}, constant); atoms: ("index", loop), ("place", n) in an
        array, ("is", symbol)."""
        content = self.nodes[symbol]
        by_kind = dict(
            lit=self._affine_literal,
            const=self._affine_array,
            elem=self._affine_element,
            carry=self._affine_carry,
            op=self._affine_operation,
        ).get(content[0])
        form = None if by_kind is None else by_kind(symbol, content)
        return ({("is", symbol): 1}, 0) if form is None else form

    # Each gives the affine form of a symbol of one kind, or None where there is none.

    def _affine_literal(self, symbol, content):
        return ({}, int(content[3])) if isinstance(content[3], (int, bool)) else None

    def _affine_array(self, symbol, content):
        (n,) = (self.shapes[symbol] + (0,))[:1]
        first_and_step = content[3] if len(content) > 3 else None
        if not first_and_step:
            return None
        first, step = first_and_step
        return {("place", n): step} if step else {}, first

    def _affine_element(self, symbol, content):
        return self._placed(self.affine(content[2]), {("index", content[1]): 1}, 0)

    def _affine_carry(self, symbol, content):
        start, after = self.carries.get((content[1], content[2]), (None, None))
        step = self._step(symbol, after) if after is not None else None
        return (
            None if step is None else _sum(self.affine(start), ({("index", content[1]): step}, 0))
        )

    def _affine_operation(self, symbol, content):
        name, inputs, shape = content[1], content[3:-1], self.shapes.get(symbol, ())
        if name == "iota" and len(shape) == 1:
            return {("place", shape[0]): 1}, 0
        if name in SAME and len(shape) <= 2:
            form = self.affine(inputs[0])
            is_scalar = math.prod(self.shapes.get(inputs[0], ())) == 1
            return self._placed(form, {}, 0) if is_scalar else form
        if name == "slice" and len(shape) == 1:
            first, stride = _slice(self.details[content[2]])
            return self._placed(self.affine(inputs[0]), {("place", shape[0]): stride}, first)
        if name in ("add", "sub"):
            return _sum(self.affine(inputs[0]), self.affine(inputs[1]), 1 if name == "add" else -1)
        if name == "mul":
            return self._affine_product(*map(self.affine, inputs))
        if name == "select_n" and len(inputs) == 3:
            return self._affine_wrapped_index(*inputs)
        return None

    @staticmethod
    def _affine_product(one, other):
        """One of the two has to be a number."""
        form, (atoms, number) = (one, other) if not other[0] else (other, one)
        if atoms:
            return None
        return {atom: factor * number for atom, factor in form[0].items()}, form[1] * number

    def _affine_wrapped_index(self, test, index, from_end):
        """Where jnp lets an index count from the end, and it does not."""
        one, other, test = self.affine(index), self.affine(from_end), self.nodes[test]
        is_not_negative = test[:2] == ("op", "lt") and self.affine(test[3]) == one
        if is_not_negative and one[0] == other[0] and self._least(one) >= 0:
            return one
        return None

    def _step(self, symbol, after):
        """By how much a counter goes up in each pass of its loop."""
        content = self.nodes[after]
        if content[0] == "op" and content[1] == "add":
            for one, other in ((content[3], content[4]), (content[4], content[3])):
                step = self.affine(other)
                if one == symbol and not step[0] and step[1]:
                    return step[1]
        return None

    def _placed(self, form, place, first):
        """With `place` + first for the place in the array."""
        atoms, constant = form
        factor = sum(v for k, v in atoms.items() if k[0] == "place")
        rest = ({k: v for k, v in atoms.items() if k[0] != "place"}, constant + factor * first)
        return _sum(rest, ({k: factor * v for k, v in place.items() if factor}, 0))

    def range(self, atom):
        """The values of an atom, or None."""
        n = {"index": lambda: self.length[atom[1]], "place": lambda: atom[1], "is": lambda: None}[
            atom[0]
        ]()
        return None if n is None else (0, max(n - 1, 0))

    def _least(self, form):
        atoms, constant = form
        ends: list[Any] = [self.range(a) for a in atoms]
        if any(e is None for e in ends):
            return -math.inf
        return constant + sum(min(v * e[0], v * e[1]) for v, e in zip(atoms.values(), ends))

    def varies(self, symbol) -> bool:
        """True if it may differ between passes of a loop."""
        if symbol not in self._varies:
            todo, seen, is_varying = [symbol], set(), False
            while todo and not is_varying:
                current = todo.pop()
                if current in seen:
                    continue
                seen.add(current)
                content = self.nodes[current]
                is_varying = content[0] not in ("in", "lit", "const", "op")
                if content[0] == "op":
                    todo += content[3:-1]
            self._varies[symbol] = is_varying
        return self._varies[symbol]

    # --- keys

    def key(self, symbol):
        """(root, steps): a key as what was done to the root; steps ("child", number) or ("often",
        loop, steps, done).

        A split gives the same keys as fold_in does: child i of split(key) is fold_in(key, i) for
          the usual generator.
        """
        content = self.nodes[symbol]
        kind, itself = content[0], (symbol, ())
        if kind == "elem":
            return self._moved(self.key(content[2]), {("index", content[1]): 1}, 0)
        if kind in ("carry", "final"):
            where = content[1:3]
            if where in self._open or where not in self.carries:
                return (self.node("carry", *where), ())
            start, after = self.carries[where]
            self._open.add(where)
            root, steps = self.key(after)
            self._open.discard(where)
            if root != self.node("carry", *where) or not steps:
                return itself
            begun = self.key(start)
            return begun[0], (*begun[1], ("often", content[1], steps, kind == "final"))
        if kind != "op":
            return itself
        name, inputs = content[1], content[3:-1]
        if name == "random_fold_in":
            root, steps = self.key(inputs[0])
            return root, (*steps, ("child", self.affine(inputs[1])))
        if name == "random_split" and len(self.shapes[symbol]) == 1:
            root, steps = self.key(inputs[0])
            return root, (*steps, ("child", ({("place", self.shapes[symbol][0]): 1}, 0)))
        if name in ("squeeze", "reshape", "copy", "random_clone", "broadcast_in_dim"):
            parent = self.key(inputs[0])
            if name != "copy" and self.shapes.get(inputs[0]) == (1,):
                return self._moved(parent, {}, 0)
            plain = name in ("copy", "random_clone") or self.shapes.get(inputs[0]) in (
                (),
                self.shapes.get(symbol),
            )
            return parent if plain else itself
        if name == "slice" and len(self.shapes[symbol]) == 1:
            first, stride = _slice(self.details[content[2]])
            return self._moved(
                self.key(inputs[0]), {("place", self.shapes[symbol][0]): stride}, first
            )
        if (
            name in ("dynamic_slice", "gather")
            and len(self.shapes.get(inputs[0], ())) == 1
            and math.prod(self.shapes[symbol]) == 1
        ):
            atoms, constant = self.affine(inputs[1])
            return self._moved(self.key(inputs[0]), atoms, constant)
        return itself

    def _moved(self, key, place, first):
        root, steps = key
        return root, tuple(
            s if s[0] != "child" else ("child", self._placed(s[1], place, first)) for s in steps
        )

    def apart(self, one, other, same=False) -> bool:
        """True if two keys differ in any two executions; `same`: of one mark, where loops make the
        difference."""
        if one[0] != other[0]:
            return True
        a, b = one[1], other[1]
        splits: list[Any] = [
            next((i for i, s in enumerate(steps) if s[0] == "often"), None) for steps in (a, b)
        ]
        if splits == [None, None]:
            return self._apart(a, b)
        if any(
            s[0] == "often"
            for steps, i in zip((a, b), splits)
            for s in steps[(i if i is not None else len(steps)) + 1 :]
        ):
            return False
        if None in splits:
            (many, i), few = ((a, splits[0]), b) if splits[1] is None else ((b, splits[1]), a)
            return all(
                self._apart(many[:i] + many[i][2] * k + many[i + 1 :], few)
                for k in range(len(few) + 1)
            )
        (i, j), (x, y) = splits, (a[splits[0]], b[splits[1]])
        if self._apart(a[:i][:j], b[:j][:i]) and i == j:
            return True
        if i != j or x[1:3] != y[1:3] or a[:i] != b[:j]:
            return False
        least = 1 if same or x[3] != y[3] else 0
        rest, theirs, more = a[i + 1 :], b[j + 1 :], x[2]
        return all(
            self._apart(more * k + rest, theirs) and self._apart(rest, more * k + theirs)
            for k in range(least, len(rest) + len(theirs) + 2)
        )

    def _apart(self, a, b) -> bool:
        return len(a) != len(b) or any(self._differ(s, t) for s, t in zip(a, b))

    def _differ(self, s, t) -> bool:
        """True if two numbers differ whatever the passes of their loops are."""
        (left, c), (right, d) = s[1], t[1]
        factors, low, high, constant = [], 0, 0, c - d
        for atom in {*left, *right}:
            if atom[0] == "is":
                if left.get(atom) != right.get(atom) or self.varies(atom[1]):
                    return False
                continue
            for sign, side in ((1, left), (-1, right)):
                if atom in side:
                    ends = self.range(atom)
                    if ends is None:
                        return False
                    if ends == (0, 0):  # a loop of one pass adds nothing
                        continue
                    factors.append(side[atom])
                    both = sorted((sign * side[atom] * ends[0], sign * side[atom] * ends[1]))
                    low, high = low + both[0], high + both[1]
        if not factors:
            return constant % 2**32 != 0
        if max(abs(low), abs(high)) + abs(constant) >= 2**31:
            return False
        return constant % math.gcd(*factors) != 0 or not low <= -constant <= high

    def covers(self, key, loops) -> set:
        """Those of `loops` in each of whose passes a key, or a number, is another one."""
        covered = set()
        for step in key[1]:
            if step[0] == "often":
                covered.add(step[1])
                continue
            atoms = step[1][0]
            turns = sorted(
                ((abs(v), k) for k, v in atoms.items() if k[0] != "is"), key=lambda t: t[0]
            )
            if any(k[0] == "is" and self.varies(k[1]) for k in atoms):
                continue
            reach, fine = 0, True
            for factor, atom in turns:  # digits of a number: each larger than all below it
                ends = self.range(atom)
                if ends == (0, 0):
                    continue
                fine = fine and ends is not None and factor > reach
                reach += factor * ends[1] if ends else 0
            if fine and reach < 2**32:
                covered |= {atom[1] if atom[0] == "index" else "batch" for _, atom in turns}
        return (covered & set(loops)) | {loop for loop in loops if self.length[loop] == 1}


def is_key(aval) -> bool:
    return "key<" in str(getattr(aval, "dtype", ""))


def _sum(a, b, sign=1):
    atoms = dict(a[0])
    for k, v in b[0].items():
        atoms[k] = atoms.get(k, 0) + sign * v
    return {k: v for k, v in atoms.items() if v}, a[1] + sign * b[1]


def _slice(params):
    """First and stride of a slice along one axis."""
    return params["start_indices"][0], (params["strides"] or (1,))[0]
