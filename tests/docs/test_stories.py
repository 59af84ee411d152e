"""The pages of five papers quote what is stored: verdicts, numbers, epsilons, pictures."""

import re

import numpy as np
import pytest
from scipy import stats

from experiments.harness import results, stories, story_pictures
from jfl.core.errors import ArgumentError

AGAIN = "run python -m experiments.harness.stories"
PAGES = (*stories.PAPERS, "index")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_quotes_what_is_stored(page):
    text = (stories.FOLDER / f"{page}.md").read_text()
    assert text == stories.filled(page, text), AGAIN


@pytest.mark.parametrize("told", stories.drawn_pictures(), ids=lambda told: told[0])
def test_a_picture_shows_what_is_stored(told):
    assert story_pictures.up_to_date(*told), AGAIN


def test_a_result_that_changes_changes_the_page(monkeypatch):
    """And a picture of it is out of date."""
    changed = results.read(stories.STORED / "noble2022.json")
    one = changed.experiments["fig3"]
    one.verdicts[0].verdict = "contradicted at the paper's settings"
    one.verdicts[0].seen = "+0.100 ± 0.01 (95 % intervals, 5 seeds)"
    of_loss = changed.experiments["fig1"].lines["DP-FedAvg, K=50, (5,5)"]
    of_loss.trace = {"round": [[1, 2]] * 3, "ln(F - F*)": [[0.0, -9.0]] * 3}
    kept = stories.stored
    monkeypatch.setattr(stories, "stored", lambda n: changed if n == "noble2022" else kept(n))
    text = (stories.FOLDER / "noble2022.md").read_text()
    again = stories.filled("noble2022", text)
    assert again != text and "points | contradicted |" in again
    (told,) = (t for t in stories.drawn_pictures() if t[0] == "noble2022_loss")
    assert not story_pictures.up_to_date(*told)
    drawn = story_pictures.gathered(*told[1:])["panels"][1]["series"]["DP-FedAvg"]
    assert drawn == [(1.0, 0.0, 0.0), (2.0, -9.0, 0.0)]  # rounds, where they are stored


@pytest.mark.parametrize("paper", stories.PAPERS)
def test_a_story_is_short_and_whole(paper):
    text, told = (stories.FOLDER / f"{paper}.md").read_text(), stories.page_words()[paper]
    assert len(text.splitlines()) <= 220 and text.index("**In short.**") < 400
    assert 5 <= len(told["claims"]) <= 8 and len(told["pictures"]) == 2
    marked = [name for _, name, *_ in stories.REGION.findall(text)]
    assert sorted(marked) == sorted([*stories.OF_PAPERS, *told["texts"]])
    for key in ("proposes", "finds", "privacy"):
        part = stories.quoted(told[key], paper)
        assert 1 <= len(re.findall(r"\.(?= |$)", part.replace("et al.", "et al"))) <= 4


def test_every_check_of_the_papers_is_counted():
    """Once: in the counts of its page, and where something is missing, in the table of that."""
    for paper in stories.PAPERS:
        parts = stories.stored(paper).parts()
        given = list(results.statements(parts).values())
        assert f"[all {len(given)} claims]" in stories.counts(paper)
        open_ = sum(
            v.whose == "paper" and v.verdict == stories.UNKNOWN for p in parts for v in p.verdicts
        )
        rows = re.findall(r"^\| (?!undecided)[^|]+ \| (\d+) \|", stories.missing(paper), re.M)
        assert sum(map(int, rows)) == open_


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{accuracy: fig3 | no such line}", "noble2022: fig3: expected a line"),
        ("{verdict: fig3 | no such claim}", "noble2022: fig3: expected a claim"),
        ("{proved: no such figure | line}", "noble2022: expected an experiment"),
        ("{audited: no such plan}", "study_audit: expected a row"),
        ("{cell: worth | fig99 | ε stated}", "noble2022: worth: expected a row and column"),
        ("{guess: fig3}", "noble2022: expected one of accuracy"),
    ],
)
def test_what_is_not_stored_is_an_error_that_says_where(text, where):
    with pytest.raises(ArgumentError, match=re.escape(where)):
        stories.quoted(text, "noble2022")


def given(seen, verdict="undecided"):
    return results.Verdict(claim="c", verdict=verdict, seen=seen)


@pytest.mark.parametrize(
    ("seen", "unit", "shown"),
    [
        ("-0.151 ± 0.19 (99.62 % intervals, 3 seeds)", "points", "−15.1 ± 19 points (3 seeds)"),
        ("+0.043 ± 0.0076, -0.000 (2 seeds)", "", "+0.043 ± 0.0076, 0.000 (2 seeds)"),
        (
            "+0.1 of +0.2; more by; +0.010 ± 0.01, +0.020 ± 0.3, -0.030 ± 0.01, +0.040 ± 0.01 "
            "(99 % intervals, 5 seeds, unpaired)",
            "points",
            "−3.0 to +4.0, ± 30 points (5 seeds)",
        ),
        (
            "is below the start at 1 of 2 T; measured over the bound; T = 10: +0.500 ± 0.1, "
            "T = 33: +0.700 ± 0.2 (99 % intervals, 5 seeds)",
            stories.RATIO,
            "0.500 ± 0.1, 0.700 ± 0.2; informative at 1 of 2 (5 seeds)",
        ),
        ("a|b of F*", "points", r"a\|b of F\*"),
        ("", "points", "computed"),
    ],
)
def test_what_was_seen_in_words(seen, unit, shown):
    assert stories.measured(given(seen), unit) == shown


def test_checks_of_one_statement_are_told_together(monkeypatch):
    """One line for each verdict, with where its means lie."""
    seen = "{} (99 % intervals, 5 seeds)".format
    of = dict(
        a=("holds", seen("+0.010 ± 0.01, +0.020 ± 0.003")),
        b=("undecided", seen("+0.020 ± 0.3")),
        c=("holds", seen("+0.050 ± 0.02, +0.040 ± 0.01")),
        d=(stories.UNKNOWN, "1 of 2 pairs run"),
    )
    told = {name: given(said, verdict) for name, (verdict, said) in of.items()}
    monkeypatch.setattr(stories, "verdict", lambda paper, name, claim: told[claim])
    monkeypatch.setattr(stories, "experiment", lambda paper, name: results.Experiment())
    row = dict(together=True, unit="points", checks=[["fig", n, n.upper()] for n in of])
    assert stories._checked("noble2022", row) == {
        ("holds", "+1.0 to +5.0, ± 2 points (5 seeds)"): ["A", "C"],
        ("undecided", "+2.0 ± 30 points (5 seeds)"): ["B"],
        (stories.UNKNOWN, "not all of its methods and settings were run"): ["D"],
    }


def test_labels_share_what_they_begin_with():
    labels = ["A: x with Z", "A: x without Z", "A: y", "B: x without Z", "Adam", "C: y with Z"]
    assert stories._join_labels(labels) == "A: x, y; B: x without Z; Adam; C: y with Z"


def test_a_gain_is_paired_over_seeds():
    one, less = ("WAV R1 lemma2 σ=3", "vanilla σ=3")
    of = lambda name: np.array(stories.line("ranaweera2025", "sample_mnist", name).accuracy)
    gaps = 100 * (of(one) - of(less))
    half = stats.t.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / len(gaps) ** 0.5
    told = stories.quoted(f"{{gain: sample_mnist | {one} | {less}}}", "ranaweera2025")
    assert told == f"{gaps.mean():+.1f} ± {half:.2g}"


def test_what_is_quoted_of_a_check_or_a_line():
    printed = "a, K=5, 100: -0.246 ± 0.17, b (1,1), 200: +0.154 ± 0.1 (99 % intervals)"
    assert stories._distance(given(printed)) == "0.20 (undecided)"  # the mean of both
    assert stories._constant(given("measured over the bound", "holds")) == "1"
    left_open = "its constant is left open, and would have to be 1.48 or more (T = 3)"
    assert stories._constant(given(left_open, "cannot be checked")) == "1.48"
    for of, seen in ((stories._distance, "computed"), (stories._constant, "+0.1")):
        with pytest.raises(ArgumentError):
            of(given(seen))
    where = "study, scenario 1 | no noise: 0-1-2"
    less = stories.line("talaei2024", *where.split(" | ")).columns["loss less equal"]
    column = lambda name: stories.quoted(f"{{column: {where} | {name}}}", "talaei2024")
    assert column("loss less equal") == f"{less.mean:+.3f} ± {less.half:.3f}"
    assert column("lr") == "0.2"
    with pytest.raises(ArgumentError, match="a column that is there"):
        column("lrs")
