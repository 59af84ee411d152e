"""Execution of code from a page or a notebook, whose functions then have a source."""

import linecache
from typing import Any


def execute(text: str, name: str, namespace: dict[str, Any]) -> None:
    """Run `text` in `namespace`, as IPython does: `inspect` finds its lines under `name`."""
    name = f"<{name}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    exec(compile(text, name, "exec"), namespace)
