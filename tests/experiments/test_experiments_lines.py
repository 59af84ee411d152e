"""The table of lines that a user writes: the rule, the programs, and what the page tells."""

import ast
import json
import runpy
import shutil

import pytest
from helpers.paths import ROOT

from experiments.bench.lines import __main__ as lines
from experiments.bench.lines import counting

FOLDER = ROOT / "experiments" / "bench" / "lines"
RESULTS = json.loads((ROOT / "experiments" / "results" / "lines.json").read_text())
SMALL = '''"""What it is,
in two lines."""

import math
from os import (
    path,
)


def area(r):
    """Of a circle."""
    import sys  # not counted either

    # a comment
    return math.pi * r**2  # another


text = """one
two"""
'''


def test_the_rule_on_a_small_program():
    """The def, the return, and two lines of a string."""
    assert counting.code_lines(SMALL) == [10, 15, 18, 19]
    assert counting.count(SMALL)["lines"] == 4


@pytest.mark.parametrize(
    "more, lines_more",
    [
        ("# a comment\n\n", 0),
        ("import json\n", 0),
        ('class A:\n    """It."""\n\n    x = 1\n', 2),
        ("x = 1\n", 1),
        ("x = [\n    1,\n]\n", 3),
    ],
)
def test_what_adds_a_line(more, lines_more):
    assert counting.count(SMALL + more)["lines"] == 4 + lines_more


def test_a_mark_is_of_the_whole_statement_below_it():
    source = "x = 1\n# privacy\ny = [\n    2,\n]\nz = 3\n"
    assert counting.count(source) == dict(lines=5, privacy=3, tokens=11)
    assert counting.count(source.replace("# privacy", "# private"))["privacy"] == 0
    with pytest.raises(ValueError, match="line 2: .*statement on the next line"):
        counting.count("x = 1\n# privacy\n\ny = 2\n")


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff lays programs out")
def test_the_layout_of_the_author_makes_no_difference():
    """Half of this must fail: lines that are squeezed or drawn out are seen."""
    count = lambda source: len(counting.code_lines(source))
    assert count(counting.laid_out("x = 1; y = 2\n")) == 2 != count("x = 1; y = 2\n")
    assert count(counting.laid_out("x = [\n    1,\n]\n")) == 1 != count("x = [\n    1,\n]\n")
    assert lines.not_as_laid_out(lines.counted()) == []


def test_every_program_is_there_and_is_counted():
    """Five tasks in four tools, and no other program in the folder."""
    rows = lines.counted()
    assert len(rows) == 20 and all(row["lines"] >= 10 and row["privacy"] >= 1 for row in rows)
    others = {"__main__.py", "counting.py", "tasks.py"}
    programs = {lines.program(row["task"], row["tool"]).name for row in rows}
    assert programs == {path.name for path in FOLDER.glob("*.py")} - others
    for name in programs:
        tree = ast.parse((FOLDER / name).read_text())
        used = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert ast.get_docstring(tree) and "tasks" in used, name


def test_programs_of_jfl_use_its_public_names_alone():
    import jfl

    for task in lines.TASKS:
        tree = ast.parse(lines.program(task, "jfl").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert not node.module.startswith("jfl"), task
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "jfl":
                assert node.attr in (*jfl.__all__, "local"), (task, node.attr)


def test_the_results_are_of_these_programs():
    keys = ("task", "tool", "checksum", "lines", "privacy", "tokens")
    recorded = [{key: row[key] for key in keys} for row in RESULTS["rows"]]
    assert recorded == lines.counted()
    assert set(RESULTS["about"]["versions"]) == {r["tool"] for r in RESULTS["rows"] if r["ran"]}


def test_programs_of_one_task_did_the_same():
    """They learned, and whoever accounts tightly has the same epsilon."""
    for row in (r for r in RESULTS["rows"] if r["ran"]):
        printed = row["printed"]
        assert printed["accuracy"] > (0.4 if row["task"] == "text" else 0.5), row
        assert (row["task"] == "own_data") == ("tenth" in printed)
        if row["tool"] == "flower":  # Renyi bounds
            assert 11.48 < printed["epsilon"] < 12.5
        else:
            assert printed["epsilon"] == pytest.approx(11.48, abs=0.01)


@pytest.mark.parametrize("unit", ["lines", "tokens"])
def test_jfl_takes_the_fewest(unit):
    """As the page says."""
    for task in lines.TASKS:
        count = {r["tool"]: r[unit] for r in RESULTS["rows"] if r["task"] == task}
        assert count.pop("jfl") < min(count.values()), task


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "guides" / "index.md").read_text()
    assert lines.table(RESULTS["rows"]) in page


@pytest.mark.parametrize(
    "task",
    [
        task if task == "own_data" else pytest.param(task, marks=pytest.mark.slow)
        for task in lines.TASKS
    ],
)
def test_programs_of_jfl_run(task, monkeypatch, capsys):
    """As a user would start them, and with the accuracy on record."""
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(lines.program(task, "jfl")))
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = (r for r in RESULTS["rows"] if (r["task"], r["tool"]) == (task, "jfl"))
    assert printed.keys() == row["printed"].keys()
    assert printed["epsilon"] == pytest.approx(row["printed"]["epsilon"], abs=0.01)
    assert printed["accuracy"] == pytest.approx(row["printed"]["accuracy"], abs=0.05)
