"""Count lines of code as `ruff format` lays them out at width 100."""

import ast
import io
import subprocess
import tokenize
from typing import Any

WIDTH = 100
MARK = "# privacy"  # on a separate line: the next statement is there for privacy
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def _left_out(tree: ast.Module) -> list[ast.stmt]:
    """Imports, and docstrings."""
    out = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            out.append(node)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                out.append(body[0])
    return out


def _tokens(source: str):
    """The tokens of what is counted."""
    dropped = set()
    for node in _left_out(ast.parse(source)):
        dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in _with_whole_strings(tokenize.generate_tokens(io.StringIO(source).readline)):
        if token.type not in SILENT and token.start[0] not in dropped:
            yield token


def _with_whole_strings(tokens):
    """Tokens, of which an f-string is one, as it was before Python 3.12."""
    begun = []
    for token in tokens:
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token)
        elif kind == "FSTRING_END":
            first = begun.pop()
            token = token._replace(type=tokenize.STRING, string="f-string", start=first.start)
        if not begun:
            yield token


def code_lines(source: str) -> list[int]:
    """Numbers of the lines that hold code: no imports, docstrings, comments or blank lines.

    Example:
        >>> code_lines('"What it does."\\nimport math\\n\\nx = 1  # one\\ny = f(\\n    x,\\n)\\n')
        [4, 5, 6, 7]
    """
    held = (range(t.start[0], t.end[0] + 1) for t in _tokens(source))
    return sorted({line for lines in held for line in lines})


def count(source: str) -> dict:
    """Lines of code, those of them for privacy (`MARK`), and tokens, which no layout changes.

    Raises:
        ValueError: for a mark without a statement right below.
    """
    lines = code_lines(source)
    ends: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            ends[first] = max(node.end_lineno or 0, ends.get(first, 0))
    private: set[int] = set()
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() == MARK:
            if number + 1 not in ends:
                raise ValueError(f"line {number}: {MARK!r} needs a statement on the next line")
            private |= set(range(number + 1, ends[number + 1] + 1))
    words = sum(1 for t in _tokens(source) if t.string not in ("(", ")", ","))
    return dict(lines=len(lines), privacy=len(private & set(lines)), tokens=words)


def laid_out(source: str) -> str:
    """The program as it is counted: without what is left out, laid out anew by ruff.

    Comments, brackets and trailing commas of the author make no difference, two statements never
    share a line.
    """
    tree = ast.parse(source)
    left_out = _left_out(tree)
    node: Any
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if s not in left_out] or [ast.Pass()] * bool(body)
    command = ["ruff", "format", "--isolated", "--line-length", str(WIDTH), "-"]
    done = subprocess.run(
        command, input=ast.unparse(tree), capture_output=True, text=True, check=True
    )
    return done.stdout
