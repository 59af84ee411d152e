"""The notebooks run as they stand, and point where the project is."""
import json
import pathlib
import re
import time

import nbformat
import pytest
from nbclient import NotebookClient

import jfl

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "experiments").glob("*.ipynb"))


def test_there_is_a_notebook():
    assert [n.name for n in NOTEBOOKS] == ["quickstart.ipynb"]


def printed(notebook):
    """What its cells print, one after the other; an error in a cell is one here."""
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))


def accuracies(text):
    return [float(x) for x in re.findall(r"test accuracy (\d\.\d+)", text)]


SHORTER = {"rounds=40": "rounds=4", "[0.4, 0.7, 1.2, 2.5]": "[0.7, 1.2]", "range(3)": "range(2)",
           "(len(noise), 3)": "(len(noise), 2)"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path):
    """All cells and all calls, with fewer rounds and runs."""
    notebook = nbformat.read(path, 4)
    assert not any(c.get("outputs") for c in notebook.cells), "commit notebooks without outputs"
    source = "".join(c.source for c in notebook.cells)
    assert all(long in source for long in SHORTER)
    for cell in notebook.cells:
        for long, short in SHORTER.items():
            cell.source = cell.source.replace(long, short)
    text = printed(notebook)
    assert len(accuracies(text)) == 2 and "4 runs, 1 program" in text, text
    assert "epsilon = 8 at" in text, text                               # calibration reached its target


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)                       # code that runs fast, as a user has it
    begun = time.monotonic()
    text = printed(nbformat.read(path, 4))
    accuracy = accuracies(text)
    assert len(accuracy) == 2 and min(accuracy) > 0.6, accuracy        # learned, both units
    assert "epsilon = 8 at" in text, text                               # calibration reached its target
    print(f"{path.name}: {time.monotonic() - begun:.0f} s")


def links(text):
    return re.findall(r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/([\w./-]+)", text)


@pytest.mark.parametrize("path", [*NOTEBOOKS, ROOT / "README.md"], ids=lambda p: p.name)
def test_badges_point_into_the_tree(path):
    found = links(path.read_text())
    assert found
    for repository, file in found:
        assert repository == jfl.REPOSITORY
        assert (ROOT / file).is_file(), file


def test_notebook_installs_from_the_repository():
    for path in NOTEBOOKS:
        source = "".join("".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code")
        assert f"git+https://github.com/{jfl.REPOSITORY}" in source
