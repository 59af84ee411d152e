"""What a compiled program does: launches, bytes, operations, and how often its loops turn.

launch      what a device is told to do on its own: a fusion, a library call, a copy, a sort, a
            collective.  They are counted in the scheduled program, and a loop counts its body as
            often as it turns.
bytes       what launches read and write in the device's memory, slices and gathers at the size of
            what they take.  Reads that come out of a cache count: an upper estimate of traffic.
flops       of matrix products and convolutions; `other` are all other operations on numbers.  The
            upper half of a product of two numbers of 32 bits is one of them on a GPU, however it is
            written: mul.hi.u32 is what stands in PTX.
wide        operations on 64 bits, as they are written.
seconds     a floor.  Of a GPU: launch by launch the largest of the time of a launch, bytes over
            bandwidth, flops and other operations over their peaks; and a wait of the host each time
            it has to read a number.  No prediction: real kernels reach half to nine tenths of a
            peak.  Of a TPU: the compiler's own estimate of cycles over the clock, no measurement;
            for what it has no estimate of, the gradient of a pooling, the same floor.
busy        the same without launches and waits: what the peaks alone take, on either.

The compiler knows the turns of many loops.  The loop over rounds is known by its name, and counted
as one turn.  The turns of every other loop have to be told: what hides in a loop is not free.
"""

import dataclasses
import math
import re
from collections import Counter
from typing import NamedTuple

from .machines import GRAPH, GRAPH_LAUNCH, HOST_WAIT, LAUNCH, Target
from .program import Instruction, parse, scope_of

ROUNDS = "rounds"  # the scopes that the engine gives its loops
LOCAL_STEPS = "local_steps"

NO_LAUNCH = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("partition-id", "replica-id", "domain", "add-dependency", "get-dimension-size"),
    *("async-done", "async-update", "copy-done", "send-done", "recv-done"),
    *("all-reduce-done", "all-gather-done", "collective-permute-done"),
    *("reduce-scatter-done", "all-to-all-done"),
}
COLLECTIVES = {
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}
HOST = {"send", "recv", "infeed", "outfeed"}
PRODUCTS = {"dot", "convolution"}
MOVES = {
    *("broadcast", "reshape", "transpose", "slice", "concatenate", "pad", "reverse", "iota"),
    *("copy", "gather", "dynamic-slice", "dynamic-update-slice", "scatter", "bitcast-convert"),
    *("real", "imag", "complex", "rng-get-and-update-state", "sort", "fusion", "call", "while"),
    *("conditional", "custom-call", "map", "reduce-window", "select-and-scatter"),
}
NOT_ESTIMATED = {"select-and-scatter"}  # by a TPU's compiler
SLOW = {
    *("exponential", "log", "tanh", "power", "sine", "cosine", "rsqrt", "sqrt", "divide", "erf"),
    *("exponential-minus-one", "log-plus-one", "logistic", "remainder", "cbrt", "tan", "atan2"),
}
OF_SLOW = 4  # operations that a slow one counts as
READ_WHOLE = {
    *("reduce-window", "sort", "fusion", "scatter", "dynamic-update-slice"),
    *PRODUCTS,
}
BLOCK_SORT = 11  # a GPU sorts 2^11 numbers in one kernel


class UnknownLoops(ValueError):
    """Loops whose turns neither the compiler nor the caller knows."""


class Turns(NamedTuple):
    """How often a loop is expected to turn, and how often at most."""

    mean: float
    capacity: float


@dataclasses.dataclass
class Cost:
    """What a part of a program does; `launches` by kind, `collectives` by their name."""

    launches: Counter = dataclasses.field(default_factory=Counter)
    collectives: Counter = dataclasses.field(default_factory=Counter)
    bytes: float = 0.0
    flops: float = 0.0
    other: float = 0.0
    wide: float = 0.0
    seconds: float = 0.0
    busy: float = 0.0
    host_waits: float = 0.0
    collective_bytes: float = 0.0

    def plus(self, more: "Cost", times: float = 1) -> "Cost":
        """This and `times` of another one."""
        sums = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(more, field.name)
            if isinstance(mine, Counter):
                keys = {**mine, **theirs}
                sums[field.name] = Counter({k: mine[k] + times * theirs[k] for k in keys})
            else:
                sums[field.name] = mine + times * theirs
        return Cost(**sums)

    def plain(self) -> dict:
        """As plain values, with the sum of all launches."""
        return dataclasses.asdict(self) | dict(
            launches=self.launches.total(),
            launches_by_kind=dict(self.launches.most_common()),
            collectives=dict(self.collectives),
        )


class Launch(NamedTuple):
    """One launch of a loop's body, for a reader."""

    seconds: float
    kind: str
    name: str
    arrays: tuple
    source: str
    bytes: float


@dataclasses.dataclass
class Loop:
    """A body: what one turn of it does by itself, and the loops in it.

    Args:
        name: the computation; scope: the `jax.named_scope` around it; source: jax's whole name.
        turns: None where neither the compiler nor the caller knows them.
    """

    name: str
    scope: str
    source: str
    turns: Turns | None
    turn: Cost = dataclasses.field(default_factory=Cost)
    loops: list = dataclasses.field(default_factory=list)
    launches: list = dataclasses.field(default_factory=list)

    def whole(self, turns: str = "mean", without: "Loop | None" = None) -> Cost:
        """One turn with the loops in it, at the `mean` of their turns or at their `capacity`.

        Args:
            without: a loop to leave out.
        """
        cost = self.turn
        for loop in self.loops:
            if loop is not without:
                times = 1 if loop.turns is None else getattr(loop.turns, turns)
                cost = cost.plus(loop.whole(turns, without), times)
        return cost

    def every(self, turns: str = "mean", times: float = 1):
        """(how often it turns in one turn of this, loop) of all loops in it."""
        for loop in self.loops:
            many = times * (1 if loop.turns is None else getattr(loop.turns, turns))
            yield many, loop
            yield from loop.every(turns, many)

    def scoped(self, scope: str) -> list:
        """The (how often, loop) in it that stand in a scope of this name."""
        return [(many, loop) for many, loop in self.every() if loop.scope == scope]


def read(text: str, target: Target, turns: dict | None = None) -> Loop:
    """The loops of a compiled program.

    Args:
        turns: of loops that the compiler does not know: the name of their scope or of their
            computation -> Turns.

    Raises:
        UnknownLoops: for one that is not there.
    """
    reader = Reader(text, target, turns or {})
    program = reader.body(reader.entry, "", Turns(1, 1))
    unknown = {loop.name: loop for loop in reader.loops if loop.turns is None}
    unknown = [loop for loop in unknown.values() if loop.scope != ROUNDS]
    if unknown:
        raise UnknownLoops(
            "the compiler does not know the turns of "
            + "; ".join(
                f"loop {loop.scope or loop.name} (op_name {loop.source or 'missing'})"
                for loop in unknown
            )
            + ". Tell them: --turns NAME=MEAN or NAME=MEAN:CAPACITY."
        )
    return program


class Reader:
    """Counts.  Of a TPU, numbers alone (no arrays) are the scalar core's and not counted."""

    def __init__(self, text: str, target: Target, turns: dict):
        self.computations, self.entry = parse(text)
        self.target, self.told = target, turns
        self.loops = []  # all that were read, those in branches that are not counted too
        self.named = {
            name: {one.name: one for one in body} for name, body in self.computations.items()
        }
        self.known = {}

    def body(self, name: str, source: str, turns: Turns | None) -> Loop:
        """A computation as the body of a loop."""
        loop = Loop(name, scope_of(source), source, turns)
        self._sequence(name, loop)
        return loop

    def _sequence(self, name, loop, run=None):
        """Add a computation to a body; `run` are launches since the last loop: (how many, busy)."""
        outer, run = run is not None, [] if run is None else run
        for one in self.computations[name]:
            if one.kind in NO_LAUNCH or self._scalar(one):
                continue
            if one.kind in ("while", "conditional"):
                self._end(run, loop.turn)
                (self._while if one.kind == "while" else self._branches)(name, one, loop)
            elif one.kind in ("call", "async-start") and one.called:
                for inner in (c for role in one.called.values() for c in role):
                    self._sequence(inner, loop, run)
            else:
                self._launch(name, one, loop, run)
        if not outer:
            self._end(run, loop.turn)

    def _while(self, where, one, loop):
        body, source = one.called["body"][0], one.source()
        known = self._turns(where, one)
        told = self.told.get(scope_of(source), self.told.get(body))
        inner = self.body(body, source, Turns(known, known) if known is not None else told)
        if known is None:  # it is asked before every turn, and once more
            asked = self.body(one.called["condition"][0], source, None)
            self._wait(asked.turn)
            for part in (inner, loop):
                part.turn = part.turn.plus(asked.turn)
                part.loops += asked.loops
        loop.loops.append(inner)
        self.loops.append(inner)

    def _branches(self, where, one, loop):
        """The branch with the most launches counts."""
        found = [
            self.body(c, one.source(), Turns(1, 1)) for role in one.called.values() for c in role
        ]
        self._wait(loop.turn)
        if found:
            loop.loops.append(max(found, key=lambda b: b.whole().launches.total()))

    def _wait(self, turn):
        """A GPU's host reads the number that decides; a TPU's scalar core decides itself."""
        if self.target.platform == "cuda":
            turn.host_waits += 1
            turn.seconds += HOST_WAIT

    def _end(self, run, turn):
        """Launches one after another: one CUDA graph, where they are enough."""
        if self.target.platform == "cuda":
            least = GRAPH_LAUNCH if sum(n for n, _ in run) >= GRAPH else LAUNCH
            turn.seconds += sum(max(n * least, busy) for n, busy in run)
        run.clear()

    def _scalar(self, one):
        return (
            self.target.platform == "tpu"
            and not one.called
            and one.kind != "custom-call"
            and not one.kind.endswith(("-start", "-done"))
            and one.kind not in COLLECTIVES
            and all(not array.shape for array in one.arrays)
        )

    # --- how often a loop turns

    def _turns(self, where, one):
        """As the compiler notes it, or as it is written: from 0 by 1 while i < n."""
        known = one.notes().get("known_trip_count", {}).get("n")
        if known is not None:
            return int(known)
        condition, body = (self.named[one.called[role][0]] for role in ("condition", "body"))
        test = self._root(condition)
        if test is None or "direction=LT" not in test.attributes:
            return None
        counter, limit = (_origin(condition, name) for name in test.operands)
        position, limit = _position(counter), _constant(limit)
        if position is None or limit is None:
            return None
        first = self._element(self.named[where], one.operands[0], position)
        after = self._element(body, getattr(self._root(body), "name", ""), position)
        if after is None or after.kind != "add" or _constant(first) != 0:
            return None
        added = [_origin(body, name) for name in after.operands]
        by_one = any(_constant(x) == 1 for x in added)
        return limit if by_one and any(_position(x) == position for x in added) else None

    @staticmethod
    def _root(named):
        return next((one for one in named.values() if one.root), None)

    @staticmethod
    def _element(named, name, position):
        """What stands at a position of a tuple."""
        one = _origin(named, name)
        if one is None or one.kind != "tuple" or position >= len(one.operands):
            return None
        return _origin(named, one.operands[position])

    # --- one launch

    def _launch(self, where, one, loop, run):
        kind, many = self._kind(one)
        moved, (flops, exact) = self._moved(where, one), self._flops(where, one)
        other, wide = self._other(where, one)
        target, turn = self.target, loop.turn
        products = (flops - exact) / target.coarse_products + exact / target.products
        busy = max(moved / target.bandwidth, products, other / target.other)
        if target.platform == "tpu":
            found = re.search(r'"estimated_cycles":"(\d+)"', one.attributes)
            seconds = float(found.group(1)) / target.clock if found else 0.0
            seconds = max(seconds, busy) if one.kind in NOT_ESTIMATED else seconds
            turn.seconds += seconds
        else:
            seconds = max(many * GRAPH_LAUNCH, busy)
            run.append((many, busy))
        turn.busy += busy
        turn.launches[kind] += many
        turn.bytes, turn.flops = turn.bytes + moved, turn.flops + flops
        turn.other, turn.wide = turn.other + other, turn.wide + wide
        if kind == "collective":
            turn.collectives[one.kind.removesuffix("-start")] += 1
            turn.collective_bytes += sum(array.bytes() for array in one.arrays)  # near ones too
        if kind == "host":
            turn.host_waits += 1
        loop.launches.append(Launch(seconds, kind, one.name, one.arrays, one.source(), moved))

    def _inside(self, one):
        """The instructions of the fusion that it is; none where it is no fusion."""
        return [i for c in one.called.get("calls", []) for i in self.computations.get(c, [])]

    def _kind(self, one):
        """-> what is launched, how often."""
        inside = self._inside(one)
        kinds = {i.kind for i in inside} | {one.kind}
        target = one.target()
        if one.kind.removesuffix("-start") in COLLECTIVES:
            return "collective", 1
        if one.kind in HOST or "callback" in target:
            return "host", 1
        if one.kind == "custom-call":
            return _kind_of_call(target)
        if "sort" in kinds:
            return "sort", self._sorts(one)
        if "convolution" in kinds:  # a TPU writes every matrix product as one, but without a window
            windows = (i for i in (*inside, one) if i.kind == "convolution")
            real = any("window={size=" in i.attributes for i in windows)
            return "convolution" if real else "product", 1
        if "dot" in kinds or "triton_gemm" in one.attributes or "triton_gemm" in one.name:
            return "product", 1
        if kinds <= {"fusion", "parameter", "copy", "copy-start", "bitcast"}:
            return "copy", 1
        for kind in ("scatter", "gather"):
            if kind in kinds:
                return kind, 1
        return "fusion" if one.kind == "fusion" else "other", 1

    def _sorts(self, one):
        """Kernels of a bitonic sort: one for what fits into a block, one for every longer
        stride."""
        if self.target.platform == "tpu":
            return 1
        length = max((d for array in one.arrays for d in array.shape), default=1)
        stages = max(1, math.ceil(math.log2(max(length, 2))))
        return 1 + sum(max(0, s - BLOCK_SORT) + 1 for s in range(BLOCK_SORT + 1, stages + 1))

    # --- bytes

    def _moved(self, where, one):
        """Bytes that a launch reads and writes."""
        held = self._held(where, one)
        if one.kind in ("dynamic-slice", "gather", "slice"):
            return 2 * one.bytes()
        if one.kind == "dynamic-update-slice":
            return 2 * held[1].bytes() if len(held) > 1 else one.bytes()
        if one.kind == "copy-start":
            return 2 * max((array.bytes() for array in one.arrays), default=0)
        if one.kind == "custom-call":
            work = len(one.arrays) > 1 and one.arrays[-1].kind in ("s8", "u8")
            results = one.arrays[:-1] if work else one.arrays  # the last one is its workspace
            return sum(a.bytes() for a in results) + sum(h.bytes() for h in held)
        inside = one.called.get("calls")
        if not inside or inside[0] not in self.computations:
            return one.bytes() + sum(h.bytes() for h in held)
        wanted, named = self._wanted(inside[0]), self.named[inside[0]]
        given = [p for p in named.values() if p.kind == "parameter" and p.size()]
        taken = sum(p.bytes() * min(1.0, wanted[p.name] / p.size()) for p in given)
        root = self._root(named)
        return taken + (self._written(root, named) if root else one.bytes())

    def _held(self, where, one):
        named = self.named[where]
        return [named[name] for name in one.operands if name in named]

    def _written(self, one, named):
        """Bytes that a fusion with this root writes."""
        held = [named[name] for name in one.operands if name in named]
        if one.kind == "tuple":
            return sum(self._written(h, named) for h in held)
        if one.kind == "bitcast" and held:
            return self._written(held[0], named)
        if one.kind == "dynamic-update-slice" and len(held) > 1:
            return held[1].bytes()
        if one.kind == "scatter" and len(held) > 2:
            return 2 * held[2].bytes()
        return one.bytes()

    # --- operations

    def _flops(self, where, one):
        """Of products, in a launch and in what it calls -> all, those in full precision."""
        total = exact = 0.0
        for c in one.called.get("calls", []):
            for inner in self.computations.get(c, []):
                more, more_exact = self._flops(c, inner)
                total, exact = total + more, exact + more_exact
        held = self._held(where, one)
        own = _multiplied(one, held)
        half = any(array.kind in ("bf16", "f16") for h in held for array in h.arrays)
        precision = one.attributes.partition("operand_precision")[2][:20].lower()
        full = "highest" in precision or "HIGHEST" in one.attributes
        return total + own, exact + own * (full and not half)

    def _other(self, where, one):
        """-> other operations, those of them on 64 bits; what is computed twice counts twice."""
        inside = one.called.get("calls", [])
        if not inside or inside[0] not in self.computations:
            if one.kind in MOVES | NO_LAUNCH | COLLECTIVES | PRODUCTS:
                return 0.0, 0.0
            many = one.size() * (OF_SLOW if one.kind in SLOW else 1)
            return many, many * _touches_wide(one, self._held(where, one))
        other = wide = 0.0
        wanted, named = self._wanted(inside[0]), self.named[inside[0]]
        parts = of_upper_halves(named) if self.target.platform == "cuda" else set()
        for i in self.computations[inside[0]]:
            if i.name in parts:
                wide += wanted[i.name]
                continue
            held = [named[name] for name in i.operands if name in named]
            if i.kind == "fusion":
                more, more_wide = self._other(inside[0], i)
                other, wide = other + more, wide + more_wide
                continue
            many = wanted[i.name]
            if i.kind == "reduce":
                each = max(1.0, many / max(i.size(), 1))
                many = sum(h.size() for h in held[:1]) * each
            elif i.kind in MOVES | NO_LAUNCH | PRODUCTS:
                continue
            many *= OF_SLOW if i.kind in SLOW else 1
            other, wide = other + many, wide + many * _touches_wide(i, held)
        return other, wide

    def _wanted(self, name) -> dict:
        """How many elements of each instruction of a fusion are computed for its result."""
        if name in self.known:
            return self.known[name]
        body, named = self.computations[name], self.named[name]
        apart = dict.fromkeys(named, 0.0)
        shared = dict.fromkeys(named, 0.0)  # of readers who share one evaluation
        for one in reversed(body):
            if one.root:
                shared[one.name] = float(one.size())
            many = apart[one.name] + shared[one.name]
            held = [named.get(operand) for operand in one.operands]
            for side, x in enumerate(held):
                if x is None or (side == 0 and one.kind in ("dynamic-update-slice", "scatter")):
                    continue  # the first is changed in its place
                together, alone = _asked(one, x, many, held)
                shared[x.name] = max(shared[x.name], together)
                apart[x.name] += alone
        self.known[name] = {one.name: apart[one.name] + shared[one.name] for one in body}
        return self.known[name]


def _asked(one, x, many, held):
    """What an instruction asks of an operand for `many` of its elements -> elements that it shares
    with other readers, elements of its own."""
    if one.kind == "tuple":
        return float(x.size()), 0.0
    if one.kind == "reduce":
        return 0.0, x.size() * max(1.0, many / max(one.size(), 1))
    if one.kind in READ_WHOLE:
        return 0.0, float(x.size())
    if one.kind in ("concatenate", "pad"):
        return 0.0, many * x.size() / max(sum(y.size() for y in held if y), 1)
    if x.size() == one.size() and one.kind not in ("transpose", "reverse"):
        return many, 0.0
    return 0.0, many


def _origin(named, name):
    """The instruction that made a value, before it was copied."""
    one = named.get(name)
    while one is not None and one.kind.startswith(("copy", "bitcast")) and one.operands:
        one = named.get(one.operands[0])
    return one


def _position(one):
    """The index of a get-tuple-element; None for anything else."""
    found = re.search(r"index=(\d+)", one.attributes) if one is not None else None
    return int(found.group(1)) if found and one and one.kind == "get-tuple-element" else None


def _constant(one):
    """The value of a whole constant; None for anything else."""
    text = one.attributes if one is not None and one.kind == "constant" else ""
    return int(text) if text.isdigit() else None


def _touches_wide(one: Instruction, held) -> bool:
    return one.is_wide() or any(h.is_wide() for h in held)


def of_upper_halves(named: dict) -> set:
    """Products of two UInt32 by way of 64 bits, of which nothing but the upper half is read.

    Args:
        named: the instructions of a computation.

    Returns:
        The names of what leads to the halves; the last step, to 32 bits, is not among them.
    """
    readers = {name: [] for name in named}
    for one in named.values():
        for operand in one.operands:
            if operand in readers:
                readers[operand].append(one)
    parts = set()
    for product in named.values():
        shifts = readers[product.name]
        ends = [end for shift in shifts for end in readers[shift.name]]
        factors = [named.get(name) for name in product.operands]
        if (
            _is(product, "multiply", "u64")
            and ends
            and all(_is(shift, "shift-right-logical", "u64") for shift in shifts)
            and all(_value(named, shift.operands[1]) == 32 for shift in shifts)
            and all(_is(end, "convert", "u32") for end in ends)
            and all(_is_short(named, factor) for factor in factors)
        ):
            parts |= {product.name} | {shift.name for shift in shifts}
    for name, told in readers.items():
        if _is(named[name], "convert", "u64") and {one.name for one in told} <= parts:
            parts.add(name)
    return parts


def _is(one, kind, number):
    return one is not None and one.kind == kind and one.arrays[0].kind == number


def _value(named, name):
    """Of a constant, broadcast or not; None for anything else."""
    one = named.get(name)
    if one is not None and one.kind == "broadcast":
        one = named.get(one.operands[0])
    return _constant(one)


def _is_short(named, one):
    """True for a number of 64 bits that 32 bits hold."""
    if _is(one, "convert", "u64"):
        source = named.get(one.operands[0])
        return source is not None and source.arrays[0].kind == "u32"
    value = _value(named, one.name) if one is not None else None
    return value is not None and value < 2**32


def _kind_of_call(target):
    for kind, pattern in (
        ("product", r"cublas|matmul|gemm|dot"),
        ("convolution", r"cudnn\$conv|convolution"),
    ):
        if re.search(pattern, target, re.I):
            return kind, 1
    if "Sort" in target:
        return "sort", 4
    return ("sort" if "TopK" in target else "custom"), 1


def _multiplied(one, held):
    """Flops of one product."""
    target = one.target()
    if one.kind == "dot" and held:
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        dims = [int(d) for d in found.group(1).split(",") if d] if found else []
        return 2 * one.size() * math.prod(held[0].arrays[0].shape[d] for d in dims)
    if one.kind == "custom-call" and "cublas" in target and held:
        notes = one.notes()
        numbers = notes.get("gemm_backend_config", notes).get("dot_dimension_numbers", {})
        dims = [int(d) for d in numbers.get("lhs_contracting_dimensions", [])]
        long = math.prod(held[0].arrays[0].shape[d] for d in dims)
        return 2 * math.prod(one.arrays[0].shape) * long
    if (one.kind == "convolution" or "cudnn$conv" in target) and len(held) > 1:
        return _convolved(one, held, target)
    return 0.0


def _convolved(one, held, target):
    """Flops of a convolution, or of the matrix product that a TPU writes as one."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    result, kernel = one.arrays[0].shape, held[1].arrays[0].shape
    channels = labels.group(2).find("o") if labels else -1
    if channels < 0:
        return 0.0
    if "BackwardFilter" in target:  # the result is the kernel: as the forward pass
        return 2 * held[1].size() * math.prod(result) / max(result[channels], 1)
    if "BackwardInput" in target:
        return 2 * held[0].size() * math.prod(kernel) / max(kernel[channels], 1)
    # a TPU writes the batch of a batched matrix product as a window
    window = _window(one)
    batch = window["size"]
    if "dot_general" not in one.source():  # and clients, each with a kernel of its own
        moves = zip(*(window[part] for part in ("size", "stride", "lhs_dilate")), strict=True)
        batch = [size for size, stride, dilate in moves if (stride, dilate) == (size - 1, size)]
    batch = math.prod(batch)
    return 2 * math.prod(result) * math.prod(kernel) / max(kernel[channels], 1) / batch


def _window(one):
    """Of a convolution: the sizes, strides and dilations of its window, axis by axis."""
    inside = re.search(r"window=\{([^}]*)\}", one.attributes)
    parts = dict(part.split("=") for part in inside.group(1).split()) if inside else {}
    axes = len(parts["size"].split("x")) if parts else 0
    read = lambda name: [int(n) for n in parts.get(name, "x".join("1" * axes)).split("x") if n]
    return {name: read(name) for name in ("size", "stride", "lhs_dilate")}
