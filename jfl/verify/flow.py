"""An interpreter of jaxprs that follows data from its sources to the outputs.

Every value of the program is interpreted as a `Value` with three parts:

* a symbol, which is equal for two values only if they are computed in the same way from the same
  inputs;
* tokens, the sources that influence the value, each with the path by which it came.  A token is a
  pair (kind, detail), such as ("rows", "rows.x").  The tokens of a result are the union of the
  tokens of its operands, because a result may depend on all of them;
* known numbers: small constants, loop counters, and keys as paths from their root.

Loops of a fixed length that contain marks or keys are unrolled, so that each iteration (a pass) has
its own counters and keys.  `RULES` at the end of this module says which rule interprets which
primitive.  For all other primitives, including other loops, each result may depend on each operand.
The marks (see `marks`) are collected here and judged in `client`.
"""

import hashlib
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Primitives that may hide anything: Python, foreign libraries, and batching rules that mix rows.
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
# Primitives that hold a program but do not call it once.
NOT_CALLS = (*OPAQUE, "shard_map", "reduce", "reduce_window")
MARKS = (
    "jfl_release",
    "jfl_bounded",
    "jfl_example",
    "jfl_batch",
    "jfl_slots",
    "jfl_noise_key",
)
# Primitives that derive keys.  Every other primitive that reads a key, except for those in MOVES,
# draws from it.
KEY_DERIVATIONS = ("random_fold_in", "random_split")
HIDES = "hides"  # stands for the primitives in a program that may hide anything
MAX_KNOWN = 2**12  # maximum size of an array whose values are followed
MAX_HASHED = 2**20  # maximum size of a constant that is compared by value; others by identity
MAX_ITERATIONS = 10_000  # maximum number of iterations of all unrolled loops together


class Value(NamedTuple):
    """The interpretation of one value of a program."""

    symbol: int
    tokens: dict  # source -> path, where a path is (earlier path, equation) or None
    known: np.ndarray | None = None  # numbers; for keys, indices into `Flow.keys`


class Place(NamedTuple):
    """The position of an equation in an execution of the program."""

    site: tuple = ()  # the equations around it, outermost first
    passes: tuple = ()  # the iteration of each unrolled loop around it, and each branch

    def enter(self, equation, index=None):
        """Return the place inside an equation; `index` is the iteration of a loop, or a branch."""
        passes = self.passes if index is None else (*self.passes, index)
        return Place((*self.site, id(equation)), passes)


class Mark(NamedTuple):
    """One execution of a mark."""

    kind: str
    site: int  # the same for all iterations of a loop
    params: dict
    operands: list[Value]


class Flow:
    """Interprets one jaxpr; its attributes hold the results."""

    def __init__(self):
        self.nodes = []  # symbol -> how it was computed
        self.shapes = {}  # symbol -> shape
        self.marks = {}  # name -> Mark, in the order of execution
        self.draws = {}  # (equation, passes) -> (key, equation) of everything that reads a key
        self.consts = {}  # id -> array that the program holds
        self.keys = []  # each key as (symbol of its root, number of a child, ...)
        self._symbols, self._key_index, self._texts, self._names = {}, {}, {}, {}
        self._passes = 0

    def node(self, *content, shape=None) -> int:
        """Return the symbol of a value that is computed as `content` states.

        Equal contents have the same symbol.
        """
        symbol = self._symbols.setdefault(content, len(self.nodes))
        if symbol == len(self.nodes):
            self.nodes.append(content)
        if shape is not None:
            self.shapes[symbol] = tuple(shape)
        return symbol

    def value(self, aval, tokens, *content, known=None) -> Value:
        """Return a `Value` with this content and these tokens.

        A key of unknown origin becomes a new root.
        """
        shape = getattr(aval, "shape", ())
        symbol = self.node(*content, shape=shape)
        if known is not None and np.shape(known) != shape:
            known = None
        if known is None and is_key(aval):
            known = np.full(shape, self.key((symbol,)))
        return Value(symbol, tokens, known)

    def input(self, name, aval, *sources) -> Value:
        """Return the value of an input, with these tokens."""
        return self.value(aval, dict.fromkeys(sources), "in", name)

    def key(self, path) -> int:
        """Return the index in `keys` of the key with this path; add it if it is new."""
        index = self._key_index.setdefault(path, len(self.keys))
        if index == len(self.keys):
            self.keys.append(path)
        return index

    def constant(self, value) -> Value:
        """Return the value of a constant of the program."""
        if not hasattr(value, "dtype"):
            value = np.asarray(value)
        if np.ndim(value):
            self.consts[id(value)] = value
        try:
            plain = np.asarray(value)
        except Exception:  # a key or a reference, which equals only itself
            return self.value(value, {}, "const", id(value))
        is_small = plain.size <= MAX_HASHED
        name = hashlib.sha256(plain.tobytes()).hexdigest() if is_small else id(value)
        known = plain if plain.size <= MAX_KNOWN else None
        return self.value(plain, {}, "const", str(plain.dtype), plain.shape, name, known=known)

    # --- programs and equations

    def run(self, closed: ClosedJaxpr, operands, place: Place) -> list[Value]:
        """Interpret a program at a place, and return the Value of each of its outputs."""
        jaxpr = closed.jaxpr
        consts = [self.constant(c) for c in closed.consts]
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
        read = lambda v: self.constant(v.val) if isinstance(v, Literal) else values[v]
        for equation in jaxpr.eqns:
            rule = RULES.get(equation.primitive.name, Flow.apply)
            results = rule(self, equation, [read(v) for v in equation.invars], place)
            values.update(zip(equation.outvars, results))
        return [read(v) for v in jaxpr.outvars]

    def apply(self, equation, operands, place):
        """Interpret an equation by the program inside it, or else as a whole."""
        params = equation.params
        inner = next((params[k] for k in ("jaxpr", "call_jaxpr") if k in params), None)
        if isinstance(inner, Jaxpr) and not isinstance(inner, ClosedJaxpr):
            inner = ClosedJaxpr(inner, ())
        if isinstance(inner, ClosedJaxpr) and equation.primitive.name not in NOT_CALLS:
            jaxpr = inner.jaxpr
            ends = len(jaxpr.constvars), len(jaxpr.invars), len(jaxpr.outvars)
            if ends == (len(inner.consts), len(operands), len(equation.outvars)):
                return self.run(inner, operands, place.enter(equation))
        return self.primitive(equation, operands, place)

    def primitive(self, equation, operands, place: Place):
        """Interpret an equation as a whole: every result may depend on every operand."""
        name, here = equation.primitive.name, place.enter(equation)
        known = self.known(equation, operands)
        tokens = merge_tokens(equation, operands)
        if name not in KEY_DERIVATIONS and name not in MOVES:
            for v, operand in zip(equation.invars, operands):
                if is_key(v.aval):
                    self.draws[here.site, here.passes] = (operand, equation)
                    # The draw itself is judged, which ends the path of the key.
                    tokens.pop(("key", "keys.noise"), None)
        content = ("op", name, self.text(equation), *(o.symbol for o in operands))
        hidden = hides(equation)
        if hidden or self.contains(equation, (*MARKS, HIDES)):
            tokens[("opaque", hidden or name)] = (None, equation)
            content = ("opaque", here.site, here.passes)
        return [
            self.value(v.aval, tokens, *content, i, known=known[i] if known else None)
            for i, v in enumerate(equation.outvars)
        ]

    def contains(self, equation, names) -> bool:
        """Return whether programs within an equation hold one of these primitives.

        The name HIDES stands for every primitive that may hide anything.  The first call for an
        equation also records the constants of its programs.
        """
        if id(equation) not in self._names:
            held, found, hidden = contents(_programs_of(equation))
            self._names[id(equation)] = found | ({HIDES} if hidden else set())
            for value in held:
                self.constant(value)
        return not self._names[id(equation)].isdisjoint(names)

    def text(self, equation) -> str:
        """Return a text that is equal for equations with equal parameters."""
        text = self._texts.get(id(equation))
        if text is None:
            params = {k: v for k, v in equation.params.items() if v is not None}
            values = [v for v in params.values() if not isinstance(v, type)]
            has_program = any(isinstance(v, (Jaxpr, ClosedJaxpr)) or callable(v) for v in values)
            text = f"#{id(equation)}" if has_program else repr(sorted(params.items()))
            self._texts[id(equation)] = text
        return text

    def mark(self, equation, operands, place):
        """Record a mark; its results get new tokens that stand for the mark."""
        kind, here = equation.primitive.name, place.enter(equation)
        site = self.node("site", here.site)
        name = self.node("mark at", here.site, here.passes)
        mark = Mark(kind, site, equation.params, operands)
        self.marks[name] = mark
        if kind == "jfl_noise_key":  # everything drawn from this key is the noise of a release
            tokens = {}
        elif kind == "jfl_slots":  # which rows were drawn is as secret as the rows
            tokens = merge_tokens(equation, operands)
        elif kind == "jfl_release":
            tokens = {("released", site): None} | self.published(mark)
        else:
            kinds = ("rows", "batch", "example", "bounded", "kept")
            ways = [path for o in operands for t, path in o.tokens.items() if t[0] in kinds]
            tokens = {(kind.removeprefix("jfl_"), name): ways[0] if ways else None}
            tokens |= _select_tokens(operands, ("released", "own", "opaque"))
            hidden = [("opaque", name) for name in equation.params.get("hides", ())]
            tokens |= dict.fromkeys(hidden, (None, equation))
        return [self.value(v.aval, tokens, "mark", name, i) for i, v in enumerate(equation.outvars)]

    def bounded_sum(self, mark) -> int | None:
        """Return the index in `marks` of the bounded sum to which the release `mark` adds noise.

        The result is None if the release does not add noise to a bounded sum.
        """
        n = mark.params["n"]
        nodes = [self.nodes[o.symbol] for o in mark.operands[n : 2 * n]]
        (name, *others) = {x[1] if x[0] == "mark" else None for x in nodes}
        in_order = all(x[0] == "mark" and x[2] == i for i, x in enumerate(nodes))
        is_bounded = not others and in_order and self.marks[name].kind == "jfl_bounded"
        return name if is_bounded else None

    def published(self, mark) -> dict:
        """Return the tokens that the noise of a release does not remove.

        These are the tokens of earlier releases, for example.
        """
        name, n = self.bounded_sum(mark), mark.params["n"]
        operands = mark.operands[n : 2 * n] if name is None else self.marks[name].operands
        if name is not None and self.marks[name].params["kind"] == "single":
            # The noise on a single contribution covers the releases that it was computed from.
            return _select_tokens(operands, ("own", "opaque"))
        return _select_tokens(operands, ("released", "own", "opaque"))

    # --- loops and branches

    def scan(self, equation, operands, place):
        """Interpret a scan; it is unrolled if it contains marks or keys."""
        params, length = equation.params, equation.params["length"]
        consts, carried = scan_counts(params)
        fixed, carry, xs = (
            operands[:consts],
            operands[consts : consts + carried],
            operands[consts + carried :],
        )
        has_key = any(is_key(v.aval) for v in equation.invars)
        if not has_key and not self.contains(equation, MARKS):
            return self.primitive(equation, operands, place)
        self._passes += length
        if self._passes > MAX_ITERATIONS:
            raise ValueError(f"its loops have more than {MAX_ITERATIONS:,} iterations")
        columns = [[] for _ in equation.outvars[carried:]]
        for i in reversed(range(length)) if params["reverse"] else range(length):
            inner = [*fixed, *carry, *(self.element(x, i) for x in xs)]
            results = self.run(params["jaxpr"], inner, place.enter(equation, i))
            carry = results[:carried]
            for column, row in zip(columns, results[carried:]):
                column.append(row)
        if params["reverse"]:
            columns = [column[::-1] for column in columns]
        stacks = zip(columns, equation.outvars[carried:])
        return [*carry, *(self.stack(column, v.aval) for column, v in stacks)]

    def element(self, x, i) -> Value:
        """Return row i of a value."""
        content, known = self.nodes[x.symbol], None if x.known is None else x.known[i]
        if content[0] == "stack":
            return Value(content[1 + i], x.tokens, known)
        symbol = self.node("element", x.symbol, i, shape=self.shapes[x.symbol][1:])
        return Value(symbol, x.tokens, known)

    def stack(self, rows, aval) -> Value:
        """Return the value of stacked rows."""
        tokens = {token: path for row in rows for token, path in row.tokens.items()}
        values = [row.known for row in rows]
        is_known = bool(rows) and math.prod(aval.shape) <= MAX_KNOWN
        known = np.stack(values) if is_known and all(v is not None for v in values) else None
        return self.value(aval, tokens, "stack", *(row.symbol for row in rows), known=known)

    def cond(self, equation, operands, place):
        """Interpret all branches of a cond, and merge their results."""
        which, *rest = operands
        branches = [
            self.run(branch, rest, place.enter(equation, ("branch", i)))
            for i, branch in enumerate(equation.params["branches"])
        ]
        results = []
        for i, choices in enumerate(zip(*branches)):
            # Every result reveals which branch was taken.
            tokens = merge_tokens(equation, [which])
            for choice in choices:
                tokens = choice.tokens | tokens
            if len({choice.symbol for choice in choices}) == 1:
                results.append(choices[0]._replace(tokens=tokens))
            else:
                aval = equation.outvars[i].aval
                results.append(self.value(aval, tokens, "cond", id(equation), place, i))
        return results

    # --- numbers and keys that are known

    def known(self, equation, operands) -> list | None:
        """Return the known values of the results of an equation, or None."""
        name, params = equation.primitive.name, equation.params
        values = [o.known for o in operands]
        shape = getattr(equation.outvars[0].aval, "shape", ()) if equation.outvars else ()
        if math.prod(shape) > MAX_KNOWN:
            return None
        if name == "random_fold_in":
            key, number = operands
            return [self.children(key.known, number.known, f"#{number.symbol}")]
        if name == "random_split" and len(shape) == 1:
            return [self.children(values[0], np.arange(shape[0]), None)]
        if any(v is None for v in values):
            return None
        if name in ARITHMETIC:
            whole = all(v.dtype.kind in "iub" for v in values)
            with np.errstate(all="ignore"):
                return [np.asarray(ARITHMETIC[name](*values))] if whole else None
        if name == "iota" and len(shape) == 1:
            return [np.arange(shape[0], dtype=params["dtype"])]
        if name in MOVES:
            try:
                moved = MOVES[name](params, *values)
            except ValueError:
                return None
            return list(moved) if name == "unstack" else [moved]
        return None

    def children(self, parents, numbers, unknown):
        """Return the children of keys.  (Child i of `split` is the same as `fold_in` of i.)

        Args:
            parents: Int[...], indices into `keys`.
            numbers: Int[...], the numbers of the children; None if they are not known.
            unknown: the step that stands for a number that is not known.
        """
        if numbers is None:
            child = lambda parent: self.key((*self.keys[parent], unknown))
            return np.vectorize(child, otypes=[int])(parents)
        child = lambda parent, number: self.key((*self.keys[parent], int(number) % 2**32))
        return np.vectorize(child, otypes=[int])(parents, numbers)


def contents(programs) -> tuple[list, set, set]:
    """Return what programs contain at any depth.

    Args:
        programs: pairs of equations and constants.

    Returns:
        The constants, the names of the primitives, and those of primitives that may hide anything.
    """
    constants, names, hidden, todo = [], set(), set(), [*programs]
    while todo:
        equations, held = todo.pop()
        constants += held
        for equation in equations:
            names.add(equation.primitive.name)
            hidden.add(hides(equation))
            constants += [v.val for v in equation.invars if isinstance(v, Literal)]
            todo += _programs_of(equation)
    return constants, names, hidden - {""}


def hides(equation) -> str:
    """Return the name of an equation that may hide anything, or "".

    A mutable array (`jax.new_ref`) changes without an equation that returns its new value.
    """
    name = equation.primitive.name
    avals = [v.aval for v in (*equation.invars, *equation.outvars)]
    if any(type(aval).__name__ == "AbstractRef" for aval in avals):
        return "a mutable array"
    return name if name in OPAQUE else ""


def opaque_in(closed: ClosedJaxpr) -> tuple:
    """Return the names of the primitives in a program that may hide anything."""
    return tuple(sorted(contents([(closed.jaxpr.eqns, ())])[2]))


def _programs_of(equation):
    """Return the equations and the constants of each program within an equation.

    A kernel has none: the mutable arrays in it are only its operands and results.
    """
    return () if equation.primitive.name == "pallas_call" else _programs_in(equation.params)


def _programs_in(params):
    """Yield the equations and the constants of each program in the parameters of an equation."""
    todo = [*params.values()]
    while todo:
        value = todo.pop()
        if isinstance(value, (tuple, list)):
            todo += value
        elif isinstance(value, ClosedJaxpr):
            yield value.jaxpr.eqns, tuple(value.consts)
        elif isinstance(value, Jaxpr):
            yield value.eqns, ()


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of constants and the number of carried values of a scan, from its
    parameters."""
    if "num_consts" in params:  # before JAX 0.11
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(list(constants)), len(list(carried))


def merge_tokens(equation, operands) -> dict:
    """Return the tokens of all operands, with paths that lead through the equation."""
    tokens = {}
    for operand in operands:
        for token, path in operand.tokens.items():
            if token not in tokens:
                tokens[token] = (path, equation)
    return tokens


def _select_tokens(operands, kinds) -> dict:
    """Return the tokens of all operands that have one of these kinds."""
    return {t: path for o in operands for t, path in o.tokens.items() if t[0] in kinds}


def is_key(aval) -> bool:
    """Return whether an abstract value is a random key."""
    dtype = getattr(aval, "dtype", None)
    return not isinstance(dtype, np.dtype) and "key<" in str(dtype)


def first_overlap(paths):
    """Return the positions of two keys that may be equal, or None if there are no such keys.

    Keys are given as paths from their root.  Two keys with the same root are different if their
    paths have different lengths, or if one of their steps is known to differ.  A step that is not
    known may be any number.
    """
    for (i, one), (j, other) in itertools.combinations(enumerate(paths), 2):
        if one[0] == other[0] and len(one) == len(other) and may_be_equal(one, other):
            return i, j
    return None


def may_be_equal(one, other) -> bool:
    """Return whether two keys may be equal: no steps of their paths are known to differ."""
    differ = lambda s, t: isinstance(s, int) and isinstance(t, int) and s != t
    return not any(map(differ, one, other))


def _dynamic_slice(params, x, *starts):
    """Return a slice of a known array, with clamped starts as in XLA."""
    sizes = params["slice_sizes"]
    begin = [min(max(int(s), 0), n - m) for s, n, m in zip(starts, x.shape, sizes)]
    return x[tuple(slice(b, b + m) for b, m in zip(begin, sizes))]


def _convert(params, x):
    """Convert known integers.  Floats are not followed, because NumPy and XLA may differ."""
    if any(getattr(dtype, "kind", "") not in "iub" for dtype in (x.dtype, params["new_dtype"])):
        raise ValueError("not a conversion of integers")
    return x.astype(params["new_dtype"])


def _broadcast(params, x):
    """Return a known array after broadcast_in_dim."""
    shape = [1] * len(params["shape"])
    for axis, n in zip(params["broadcast_dimensions"], x.shape):
        shape[axis] = n
    return np.broadcast_to(x.reshape(shape), params["shape"])


# Integers are computed as the program computes them, overflow included.
ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
}
# Primitives that move the elements of known numbers and keys without changing them.
MOVES = {
    "convert_element_type": _convert,
    "copy": lambda p, x: x,
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "slice": lambda p, x: x[
        tuple(
            slice(*cut)
            for cut in zip(
                p["start_indices"], p["limit_indices"], p["strides"] or [1] * len(x.shape)
            )
        )
    ],
    "dynamic_slice": _dynamic_slice,
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "select_n": lambda p, which, no, *yes: np.where(which, *yes, no) if len(yes) == 1 else None,
    "unstack": lambda p, x: np.moveaxis(x, p["axis"], 0),
    "random_clone": lambda p, x: x,
}
RULES = {
    "scan": Flow.scan,
    "cond": Flow.cond,
    "jfl_copy": lambda flow, equation, operands, place: operands[: equation.params["n"]],
    **dict.fromkeys(MARKS, Flow.mark),
}
