"""The house in numbers: rooms, arrows between them, floors, and lines of each package.

A room is a package of `jfl` (the packages inside `jfl.privacy` are rooms of their own) or a module
that stands at the root.  An arrow is an import from one room into another.  The floor of a room is
the longest way down from it.

Run:
    python experiments/bench/house.py                    # this checkout
    git worktree add ../before COMMIT && python experiments/bench/house.py ../before
"""

import ast
import sys
from collections import Counter
from pathlib import Path

SPLIT = {"privacy"}  # packages whose packages are rooms


def modules(root: Path) -> dict[str, Path]:
    """Names of all modules without the leading `jfl.`, and where they are."""
    found = {}
    for top, base in ((root / "jfl", root / "jfl"), (root / "kernels", root)):
        for path in sorted(top.rglob("*.py")):
            name = ".".join(path.relative_to(base).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def room_of(name: str, packages: set[str]) -> str:
    """The room that a module stands in."""
    first, *rest = name.split(".")
    if first in SPLIT and rest and f"{first}.{rest[0]}" in packages:
        return f"{first}.{rest[0]}"
    return first


def imports(name: str, path: Path, names: dict[str, Path]):
    """The modules that module `name` imports."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - (node.level - 1)]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            full = ".".join([*base, alias.name])
            yield full if full in names else ".".join(base)


def floors(below: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room; ValueError where rooms stand on one another in a circle."""
    height: dict[str, int] = {}

    def visit(room, path):
        if room in path:
            raise ValueError("a circle: " + " -> ".join([*path[path.index(room) :], room]))
        if room not in height:
            height[room] = 1 + max((visit(r, [*path, room]) for r in below[room]), default=0)
        return height[room]

    for room in below:
        visit(room, [])
    return height


def main(root: Path):
    names = modules(root)
    packages = {name for name, path in names.items() if path.name == "__init__.py"}
    names.pop("__init__")
    below: dict[str, set[str]] = {room_of(name, packages): set() for name in names}
    lines = Counter()
    for name, path in names.items():
        lines[room_of(name, packages)] += len(path.read_text().splitlines())
        if path.name == "__init__.py" or name == "lazy":  # how packages offer their modules
            continue
        for target in imports(name, path, names):
            if target and target in names:
                below[room_of(name, packages)] |= {room_of(target, packages)}
    below = {room: rooms - {room} for room, rooms in below.items()}
    height = floors(below)
    print(
        f"{len(below)} rooms, {sum(map(len, below.values()))} arrows, {max(height.values())} floors"
    )
    for room in sorted(below, key=lambda room: (height[room], room)):
        print(
            f"{height[room]:3} {room:24} {lines[room]:6} lines  <- {', '.join(sorted(below[room]))}"
        )
    print(f"{sum(lines.values())} lines, {sum(lines.values()) - lines['papers']} outside papers")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2])
