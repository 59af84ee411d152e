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


def test_a_gain_is_paired_over_seeds():
    one, less = ("WAV R1 lemma2 σ=3", "vanilla σ=3")
    of = lambda name: np.array(stories.line("ranaweera2025", "client_mnist", name).accuracy)
    gaps = 100 * (of(one) - of(less))
    half = stats.t.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / len(gaps) ** 0.5
    told = stories.quoted(f"{{gain: client_mnist | {one} | {less}}}", "ranaweera2025")
    assert told == f"{gaps.mean():+.1f} ± {half:.2g}"
