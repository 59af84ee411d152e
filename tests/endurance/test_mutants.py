"""A break of the library that no test sees would tell that a guard was lost: each in the tables of
mutants makes a test fail that runs by default, but for the few that say `slow`."""

import importlib
import importlib.util

import pytest
from helpers import mutants

TABLES = [
    importlib.import_module(name).MUTANTS
    for name in ("helpers.mutants_numeric", "helpers.mutants_runs")
    if importlib.util.find_spec(name)
]
MUTANTS = [m for table in TABLES for m in table]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.file}-{m.tests.split('::')[-1]}")
def test_a_break_is_seen(mutant, tmp_path):
    assert mutants.run(mutant, tmp_path)


@pytest.mark.slow
def test_without_a_break_they_pass(tmp_path):
    tests = " ".join(dict.fromkeys(m.tests for m in MUTANTS))
    assert mutants.outcome(mutants.copied(tmp_path), tests, slow=True) == mutants.PASSED


def test_breaks_are_of_texts_that_occur_once():
    """Whoever edits such a line brings the table up to date."""
    for mutant in MUTANTS:
        text = (mutants.ROOT / mutant.file).read_text()
        assert text.count(mutant.old) == 1 and mutant.new != mutant.old, mutant
