"""The text of a compiled program (HLO), taken apart into computations and instructions."""

import contextlib
import dataclasses
import json
import math
import re
from typing import Any, NamedTuple

BITS = dict(pred=8, token=0, opaque=0, bf16=16, tf32=32)
WIDE = ("s64", "u64", "f64", "c128")
COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
ARRAY = re.compile(
    r"\b(pred|token|opaque|bf16|tf32|[sufc]\d+(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]"
    r"(?:\{([\d,]*)(?::([^}]*))?\})?"
)
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
)
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
# what jax itself puts into the name of an instruction
NO_SCOPE = re.compile(r"body|cond|branch_\d+_fun|closed_call|checkpoint|shard_map|while|")
LINE = re.compile(r"^\s*(?:ROOT )?%?\S+ = (?P<type>\([^()]*\)|\S+) (?P<kind>[\w\-]+)\(")
NO_OPERATION = ("parameter", "constant", "tuple", "get-tuple-element", "while", "call")


class Array(NamedTuple):
    """An array of a program.

    `count` are the elements that it takes, with the padding of its layout; `near` is True beside
    the core (a TPU's vector memory), not in the device's memory.
    """

    kind: str
    shape: tuple
    count: int
    near: bool

    def bytes(self) -> float:
        digits = re.search(r"\d+", self.kind)
        return self.count * BITS.get(self.kind, int(digits.group()) if digits else 32) / 8

    def __str__(self):
        return f"{self.kind}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass
class Instruction:
    """One instruction: `arrays` is its result, `called` maps a role to names of computations."""

    name: str
    kind: str
    arrays: tuple
    operands: list
    attributes: str
    called: dict
    root: bool = False

    def bytes(self) -> float:
        """In the memory of the device."""
        return sum(array.bytes() for array in self.arrays if not array.near)

    def size(self) -> int:
        """Elements of the largest array of the result."""
        return max((math.prod(array.shape) for array in self.arrays), default=0)

    def is_wide(self) -> bool:
        """True where the result has numbers of 64 bits."""
        return any(array.kind in WIDE for array in self.arrays)

    def notes(self) -> dict:
        """What the backend notes, as far as it is JSON."""
        _, _, text = self.attributes.partition("backend_config=")
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(text)[0]
        return {}

    def target(self) -> str:
        """Of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def source(self) -> str:
        """jax's name for it: the scopes and functions that it was traced in."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""


def scope_of(source: str) -> str:
    """The `jax.named_scope` that stands directly around a loop; "" where there is none.

    >>> scope_of("jit(_scan)/while/body/closed_call/vmap(rounds)/while")
    'rounds'
    >>> scope_of("jit(_scan)/while/body/while")
    ''
    """
    parts = source.split("/")
    while parts and parts[-1] in ("while", "body", "closed_call"):
        last = parts.pop()
        if last == "while":
            break
    if not parts:
        return ""
    found: Any = re.fullmatch(r"((?:\w+\()*)([^()]*)\)*", parts[-1])
    wrapped, scope = found.groups()
    return "" if NO_SCOPE.fullmatch(scope) or "jit(" in wrapped else scope


def wide_lines(text: str) -> int:
    """Instructions whose result has 64 bits, each counted once, in a program of any stage."""
    found = (LINE.match(line) for line in text.splitlines())
    return sum(
        any(re.search(rf"\b{kind}\[", one["type"]) for kind in WIDE)
        for one in found
        if one and one["kind"] not in NO_OPERATION
    )


def _numbers(text):
    digits = (re.sub(r"\D", "", part) for part in (text or "").split(","))
    return tuple(int(d) for d in digits if d)


def arrays_of(text: str) -> tuple:
    """The arrays of a type: one, or those of a tuple."""
    found = []
    for kind, shape, order, rest in ARRAY.findall(text):
        tiles = re.match(r"T\(([\d,]+)\)", rest)
        shape, order, tile = _numbers(shape), _numbers(order), _numbers(tiles and tiles.group(1))
        held = [shape[d] for d in order] if tile and len(order) == len(shape) else list(shape)
        for i, width in enumerate(reversed(tile)):  # minor dimensions are filled up to a tile
            if i < len(held):
                held[i] = -(-held[i] // width) * width
        near = bool(re.search(r"S\([1-9]", rest))
        found.append(Array(kind, shape, math.prod(held), near))
    return tuple(found)


def _closed(text, start):
    """Where the parenthesis at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    return len(text) - 1


def instruction(line: str) -> Instruction | None:
    """The instruction of a line; None where it holds none."""
    line = line.strip()
    name, _, rest = line.removeprefix("ROOT ").partition(" = ")
    if not rest:
        return None
    end = _closed(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opened = rest.find("(")
    closed = _closed(rest, opened)
    kind, inside, attributes = rest[:opened], rest[opened + 1 : closed], rest[closed + 1 :]
    called = {}
    for role, other in CALLED.findall(attributes):
        called.setdefault(role, []).append(other)
    for others in BRANCHES.findall(attributes):
        called.setdefault("branches", []).extend(NAME.findall(others))
    operands = NAME.findall(inside)
    if kind in ("parameter", "constant"):  # their number, or value
        operands, attributes = [], inside
    root = line.startswith("ROOT ")
    return Instruction(name.lstrip("%"), kind, arrays_of(shape), operands, attributes, called, root)


def parse(text: str) -> tuple[dict, str]:
    """The instructions of every computation, by its name, and the name of the entry."""
    found, entry, current = {}, "", None
    for line in text.splitlines():
        if current is None:
            head = COMPUTATION.match(line)
            if head and not line.startswith("HloModule"):
                current = found.setdefault(head.group(2), [])
                entry = head.group(2) if head.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif one := instruction(line):
            current.append(one)
    return found, entry
