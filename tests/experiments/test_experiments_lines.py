"""The table of lines that a user writes: the rule, the programs, and what the page tells."""

import json
import runpy
import shutil

import pytest
from helpers.paths import ROOT

from experiments.bench.lines import __main__ as lines
from experiments.bench.lines import counting

FOLDER = ROOT / "experiments" / "bench" / "lines"
RESULTS = json.loads((ROOT / "experiments" / "results" / "lines.json").read_text())


def test_the_rule_on_small_programs():
    """Without imports, docstrings and comments; a mark is of the whole statement below it."""
    head = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n    # a comment\n'
    source = head + '    return math.pi * r**2  # another\n\n\ntext = """one\ntwo"""\n'
    assert counting.code_lines(source) == [4, 7, 10, 11]
    marked = "x = 1\n# privacy\ny = [\n    2,\n]\nz = 3\n"
    assert counting.count(marked) == dict(lines=5, privacy=3, tokens=11)
    with pytest.raises(ValueError, match="line 2: .*statement on the next line"):
        counting.count("x = 1\n# privacy\n\ny = 2\n")


@pytest.mark.skipif(shutil.which("ruff") is None, reason="ruff lays programs out")
def test_the_layout_of_the_author_makes_no_difference():
    """Half of this must fail: lines that are squeezed or drawn out are seen."""
    count = lambda source: len(counting.code_lines(source))
    assert count(counting.laid_out("x = 1; y = 2\n")) == 2 != count("x = 1; y = 2\n")
    assert count(counting.laid_out("x = [\n    1,\n]\n")) == 1 != count("x = [\n    1,\n]\n")
    assert lines.not_as_laid_out(lines.counted()) == []


def test_every_program_is_there_and_its_counts_are_the_recorded_ones():
    """Five tasks in four tools, and no other program in the folder."""
    rows = lines.counted()
    assert len(rows) == 20 and all(row["lines"] >= 10 and row["privacy"] >= 1 for row in rows)
    others = {"__main__.py", "counting.py", "tasks.py"}
    programs = {lines.program(row["task"], row["tool"]).name for row in rows}
    assert programs == {path.name for path in FOLDER.glob("*.py")} - others
    assert all("from tasks import" in (FOLDER / name).read_text() for name in programs)
    keys = ("task", "tool", "checksum", "lines", "privacy", "tokens")
    assert [{key: row[key] for key in keys} for row in RESULTS["rows"]] == rows
    page = (ROOT / "docs" / "guides" / "index.md").read_text()
    assert lines.table(RESULTS["rows"]) in page


def test_programs_of_one_task_did_the_same_and_jfl_takes_the_fewest():
    """They learned, and whoever accounts tightly has the same epsilon."""
    for row in (r for r in RESULTS["rows"] if r["ran"]):
        printed = row["printed"]
        assert printed["accuracy"] > (0.4 if row["task"] == "text" else 0.5), row
        assert (row["task"] == "own_data") == ("tenth" in printed)
        if row["tool"] == "flower":  # Renyi bounds
            assert 11.48 < printed["epsilon"] < 12.5
        else:
            assert printed["epsilon"] == pytest.approx(11.48, abs=0.01)
    for unit in ("lines", "tokens"):
        for task in lines.TASKS:
            count = {r["tool"]: r[unit] for r in RESULTS["rows"] if r["task"] == task}
            assert count.pop("jfl") < min(count.values()), task


@pytest.mark.slow
@pytest.mark.parametrize("task", lines.TASKS)
def test_programs_of_jfl_run(task, monkeypatch, capsys):
    """As a user would start them, and with the accuracy on record."""
    monkeypatch.syspath_prepend(str(FOLDER))
    runpy.run_path(str(lines.program(task, "jfl")))
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = (r for r in RESULTS["rows"] if (r["task"], r["tool"]) == (task, "jfl"))
    assert printed.keys() == row["printed"].keys()
    assert printed["epsilon"] == pytest.approx(row["printed"]["epsilon"], abs=0.01)
    assert printed["accuracy"] == pytest.approx(row["printed"]["accuracy"], abs=0.05)
