"""Figures, tables and claims of the five papers: what is listed, that the fields of every line
count, and that the papers' own checks hold and fail on made-up lines.

Which claims a figure makes, whose they are and what they found is pinned by the stored verdicts, in
test_experiments_verdicts.py."""

import importlib

import pytest
from helpers.lines import line, near, verdict

from experiments.harness import runner
from experiments.harness.results import PAPERS
from experiments.harness.verdicts import HOLDS, NOT_REPRODUCED, UNDECIDED, UNKNOWN
from experiments.papers import __main__ as command_line
from experiments.papers.chen2024 import figures as chen2024
from experiments.papers.li2025 import figures as li2025
from experiments.papers.noble2022 import runs as noble2022
from experiments.papers.ranaweera2025 import figures as ranaweera2025
from experiments.papers.talaei2024 import figures as talaei2024
from experiments.studies import study as studies
from experiments.studies.plans import PLANS
from jfl.runs.config import Config, refuse_unused

FIGURES = {p: importlib.import_module(f"experiments.papers.{p}.figures") for p in PAPERS}
PARTS = ("synthetic", "femnist", "mnist")
NAMES = dict(
    noble2022={f"fig{i}" for i in (1, 3, 4, 5, 6, 7, 8)}
    | {f"fig{i}_{part}" for i in (9, 10) for part in PARTS}
    | {"fig2a", "fig2b", "table1", "table4", "bounds"},
    chen2024={"fig1ab", "fig3", "fig4", "fig5", "table2", "accountants", "bounds"},
    li2025={"fig2-mnist", "fig2-adult", "fig3-mnist", "fig3-adult", "across", "clock", "bounds"},
    ranaweera2025={"sample_mnist", "client_cifar10", "table2", "table3", "fig4", "study"}
    | {"audit_wavelet_leak", "accounting", "hours", "bounds"},
    talaei2024={f"fig{i}" for i in range(2, 10)} | {"noise", "argmin", "study", "bounds"},
)


# --- what is there


@pytest.mark.parametrize("paper", PAPERS)
def test_the_figures_of_a_paper_are_there_and_the_fields_of_their_lines_count(paper):
    experiments = FIGURES[paper].EXPERIMENTS
    assert NAMES[paper] <= experiments.keys()
    for experiment in experiments.values():
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


# --- checks go both ways


def lines(**means):
    return {name.replace("_", " "): near(mean) for name, mean in means.items()}


def curves(**rows):
    return {name: line(0.5, 0.5, 0.5, curve=[row] * 3) for name, row in rows.items()}


def of_epsilons(proved):
    return dict(a=line(0.5, claimed=1.0, proved=proved), b=line(0.5, claimed=1.0))


def spreads(*halves):
    """Lines whose accuracies are this far from 0.5: two of a method, and two of a level one."""
    wide = lambda half: line(0.5 - half, 0.5 + half, 0.5, 0.5 - half / 2, 0.5 + half / 2)
    return dict(zip("abcd", map(wide, halves)))


UNSTEADY = noble2022.unsteady(["a", "b"], ["c", "d"])


PUBLISHED = dict(a=(0.3, 0.1, 0.0, -0.1))  # at the marks


def gaps(*values, rounds=(100, 200, 300, 400)):
    seeds = [[v + e for v in values] for e in (-1e-4, 0, 1e-4)]
    return dict(a=line(0.5, 0.5, 0.5, **{noble2022.GAP: seeds, "round": [rounds] * 3}))


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (chen2024.changes("a", "b", 1), lines(a=0.5, b=0.6), lines(a=0.5, b=0.4)),
        (chen2024.changes("a", "b", -1), lines(a=0.6, b=0.5), lines(a=0.5, b=0.6)),
        (chen2024.keeps("a", "b"), lines(a=0.5, b=0.49), lines(a=0.5, b=0.4)),
        (chen2024.flat("a", "b"), lines(a=0.5, b=0.51), lines(a=0.5, b=0.6)),
        (
            chen2024.rougher("a", "b"),
            curves(a=(0.9, 0.1, 0.5, 0.3), b=(0.1, 0.9, 0.5, 0.51)),
            curves(a=(0.9, 0.1, 0.5, 0.505), b=(0.5, 0.5, 0.5, 0.51)),
        ),
        (
            chen2024.lead("a", ("b", "c"), "1", "2"),
            lines(a_1=0.6, b_1=0.4, c_1=0.3, a_2=0.7, b_2=0.6, c_2=0.69),
            lines(a_1=0.6, b_1=0.4, c_1=0.59, a_2=0.7, b_2=0.6, c_2=0.5),
        ),
        pytest.param(
            chen2024.lead("a", ("b",), "1", "2"),
            lines(a_1=0.6, b_1=0.5, a_2=0.7, b_2=0.9),
            lines(a_1=0.5, b_1=0.6, a_2=0.7, b_2=0.9),
            id="behind both times, though less",
        ),
        (
            li2025.small_harm("a", "b", "c"),
            lines(a=0.7, b=0.8, c=0.79),
            lines(a=0.7, b=0.8, c=0.77),
        ),
        (
            li2025.above_floor(0.75, "abc"),
            lines(a=0.8, b=0.76, c=0.9),
            lines(a=0.8, b=0.74, c=0.9),
        ),
        (UNSTEADY, spreads(0.01, 0.2, 0.2, 0.01), spreads(0.2, 0.01, 0.2, 0.01)),
        (UNSTEADY, spreads(0.01, 0.2, 0.2, 0.01), spreads(0.01, 0.2, 0.01, 0.2)),
        (noble2022.as_drawn(PUBLISHED), gaps(0.35, 0.2, 0.0, -0.1), gaps(0.35, 0.3, 0.0, 0.0)),
        (
            ranaweera2025.reproduces([("wav", "matched", "vanilla")]),
            lines(wav=0.9, matched=0.88, vanilla=0.8),
            lines(wav=0.9, matched=0.84, vanilla=0.8),
        ),
        (ranaweera2025.understated(["a", "b"]), of_epsilons(50.0), of_epsilons(1.0)),
        pytest.param(
            talaei2024.lower("a", "b"), lines(a=0.5, b=0.6), lines(a=0.6, b=0.5), id="of losses"
        ),
    ],
)
def test_checks_hold_and_fail(check, good, bad):
    assert verdict(check, good) == HOLDS
    assert verdict(check, bad) == NOT_REPRODUCED
    one, *_ = good
    assert verdict(check, {n: r for n, r in good.items() if n != one}) == UNKNOWN


def test_what_the_checks_of_figures_leave_open():
    noisy = dict(a=line(0.5, 0.5, 0.5), b=line(0.4, 0.9, 0.1))
    assert verdict(chen2024.changes("a", "b", 1), noisy) == UNDECIDED
    no_gain = lines(wav=0.8, matched=0.84, vanilla=0.8)  # to have a share of
    assert verdict(ranaweera2025.reproduces([("wav", "matched", "vanilla")]), no_gain) == UNKNOWN
    assert verdict(noble2022.as_drawn(PUBLISHED), gaps(0.35, 0.2, rounds=(100, 200))) == UNKNOWN
    assert verdict(UNSTEADY, spreads(0.01, 0.011, 0.2, 0.01)) == UNDECIDED
    few = spreads(0.01, 0.2, 0.2, 0.01) | dict(a=line(0.5))
    assert verdict(UNSTEADY, few) == UNKNOWN
    paired = [0.1, 0.5, 0.9, 1.3]  # the spread of lines is not that of their difference
    other = [a + b for a, b in zip(paired, (0.05, 0.06, 0.05, 0.06))]
    assert verdict(talaei2024.lower("a", "b"), dict(a=line(*paired), b=line(*other))) == HOLDS


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
