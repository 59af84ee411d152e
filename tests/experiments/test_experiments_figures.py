"""Figures and tables of the five papers: what is listed, and that the fields of every line count.

Which claims a figure makes, whose they are, what their checks find and what they leave open is
pinned by the stored verdicts, in test_experiments_verdicts.py."""

import importlib

import pytest
from helpers.lines import line, verdict

from experiments.harness import runner
from experiments.harness.results import PAPERS
from experiments.harness.verdicts import HOLDS, NOT_REPRODUCED, UNKNOWN
from experiments.papers import __main__ as command_line
from experiments.papers.li2025 import figures as li2025
from experiments.studies import study as studies
from experiments.studies.plans import PLANS
from jfl.runs.config import Config, refuse_unused

FIGURES = {p: importlib.import_module(f"experiments.papers.{p}.figures") for p in PAPERS}


@pytest.mark.parametrize("paper", PAPERS)
def test_the_fields_of_the_lines_of_figures_count(paper):
    for experiment in FIGURES[paper].EXPERIMENTS.values():
        assert {*(experiment.quick_lines or ())} <= set(experiment.lines)
        for changes in experiment.lines.values():
            config = Config(**{**experiment.base, **changes})
            if paper in ("noble2022", "ranaweera2025"):  # others make plans of their own
                refuse_unused(config)


def test_a_command_lists_experiments_and_lines(capsys):
    assert command_line.main(["noble2022", "--list"]) == 0
    listed = {words.split()[0] for words in capsys.readouterr().out.splitlines()}
    assert listed == set(FIGURES["noble2022"].EXPERIMENTS)
    assert command_line.main(["noble2022", "table1", "--list"]) == 0
    assert "sigma=160, K=40" in capsys.readouterr().out.splitlines()
    assert runner.main("studies", studies.EXPERIMENTS, ["--list"]) == 0
    listed = {words.split()[0] for words in capsys.readouterr().out.splitlines()}
    assert listed == set(studies.EXPERIMENTS) == set(PLANS)
    assert command_line.main(["nobody2022"]) == 2
    assert "expected a paper, one of noble2022" in capsys.readouterr().err


@pytest.mark.parametrize(
    "adult, sound, found",
    [(0.85, 0.60, HOLDS), (0.85, 0.80, NOT_REPRODUCED), (0.764, 0.60, UNKNOWN)],
)
def test_a_drop_from_the_majority_class_says_nothing(adult, sound, found):
    means = {
        "mnist iid no privacy": 0.9,
        "mnist iid sound ε=0.5": 0.8,
        "adult iid no privacy": adult,
        "adult iid sound ε=0.5": sound,
    }
    results = {n: line(m, m + 1e-4) for n, m in means.items()}
    assert verdict(li2025.drop_is_larger("iid", "sound"), results) == found
