"""The pages of five papers quote what is stored: verdicts, numbers, epsilons, pictures."""

import dataclasses
import re

import numpy as np
import pytest
from scipy import stats

from experiments.harness import results, runner, stories, story_pictures
from jfl.core.errors import ArgumentError

AGAIN = "run python -m experiments.harness.stories"
PAGES = (*stories.PAPERS, "index")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_quotes_what_is_stored(page):
    text = (stories.FOLDER / f"{page}.md").read_text()
    assert text == stories.filled(page, text), AGAIN


@pytest.mark.parametrize("paper", stories.PAPERS)
def test_a_page_is_short_and_the_long_one_is_of_what_is_stored(paper):
    page = (stories.FOLDER / f"{paper}.md").read_text()
    assert len(page.splitlines()) <= 120
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|]+ \| <b class", page, re.M)
    assert 5 <= len(rows) <= 8 and f"experiments/results/{paper}.md" in page
    assert (stories.STORED / f"{paper}.md").read_text() == stories.long_page(paper), AGAIN


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
    cell = '+10.0 ± 1 points | <b class="contradicted">contradicted</b> |'
    assert again != text and cell in again and cell in stories.long_page("noble2022")
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


@pytest.mark.parametrize("paper", stories.PAPERS)
def test_a_page_shows_the_verdict_that_counts_for_each_of_its_claims(paper):
    """Else a page could show the checks that hold, and count the claim as not reproduced."""
    counted, shown = results.statements(stories.stored(paper).parts()), {}
    for row in stories.page_words()[paper]["claims"]:
        for name, claim, *_ in row["checks"]:
            given = stories.verdict(paper, name, claim)
            if given.whose == "paper":
                key = given.statement or f"{name}: {given.claim}"
                shown.setdefault(key, set()).add(given.verdict)
    assert shown and {k for k, seen in shown.items() if counted[k] not in seen} == set()


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


def test_a_verdict_is_quoted_once_for_two_claims_if_they_share_it():
    ends, grows = (
        "DP-SCAFFOLD-warm ends better than DP-FedAvg and DP-FedSGD",
        "the gap to DP-FedAvg grows with K, (0,0)",
    )
    told = stories.quoted(f"{{same: fig6 | {ends} | fig1 | {ends}}}", "noble2022")
    assert told == stories.verdict("noble2022", "fig6", ends).verdict
    with pytest.raises(ArgumentError, match="noble2022: expected two claims with one verdict"):
        stories.quoted(f"{{same: fig1 | {ends} | fig3 | {grows}}}", "noble2022")


def test_a_bound_without_an_interval_is_shown_as_a_difference():
    seen = "bound -0.3568, measured 0.04252"
    of = results.Verdict("it is a bound", stories.CONTRADICTED, seen, "paper")
    assert stories.measured(of, "") == "−0.399"


def test_a_gain_is_paired_over_seeds():
    one, less = ("WAV R1 lemma2 σ=3", "vanilla σ=3")
    of = lambda name: np.array(stories.line("ranaweera2025", "client_mnist", name).accuracy)
    gaps = 100 * (of(one) - of(less))
    half = stats.t.ppf(0.975, len(gaps) - 1) * np.std(gaps, ddof=1) / len(gaps) ** 0.5
    told = stories.quoted(f"{{gain: client_mnist | {one} | {less}}}", "ranaweera2025")
    assert told == f"{gaps.mean():+.1f} ± {half:.2g}"


ROW = dict(says="it is better", printed="yes", unit="points")


def checked(*given):
    """Checks of a claim: (verdict, what was seen, whose)."""
    return [
        stories.Checked(label, "points", v, stories.measured(v, "points"))
        for label, (word, seen, whose) in zip("abc", given)
        for v in [results.Verdict("it is better", word, seen, whose)]
    ]


def test_a_claim_has_a_row_for_each_verdict_of_the_papers_own_checks(monkeypatch):
    gains = ["+0.100 ± 0.01 (95 % intervals, 5 seeds)", "+0.200 ± 0.02 (95 % intervals, 8 seeds)"]
    words = {"noble2022": dict(claims=[ROW])}
    monkeypatch.setattr(stories, "page_words", lambda: words)

    def rows(*given):
        monkeypatch.setattr(stories, "_checked", lambda *_: checked(*given))
        return stories.claims("noble2022").splitlines()[2:]

    one = ("holds", gains[0], "paper")
    assert rows(one, ("undecided", gains[1], "ours"))[0] == (
        '| it is better | yes | +10.0 ± 1 points | <b class="holds">holds</b> |'
    )
    mixed = rows(one, ("undecided", gains[1], "paper"))
    assert mixed[0].startswith('| it is better | yes | a: +10.0 ± 1 points | <b class="holds">')
    assert mixed[1] == '|  |  | b: +20.0 ± 2 points | <b class="undecided">undecided</b> |'
    assert mixed[-1] == "Values are means over 5 to 8 seeds."
    both = rows(one, ("holds", gains[1], "paper"))
    assert "| +10.0 ± 1, +20.0 ± 2 points |" in both[0] and len(both) == 3


def test_checks_with_different_units_do_not_share_a_unit():
    """Also if they are all checks of a claim."""
    given = lambda seen: results.Verdict("c", "holds", f"{seen} (95 % intervals, 5 seeds)")
    parts = [
        (given("+0.500 ± 0.01"), "loss", "in loss"),
        (given("+0.250 ± 0.01"), "accuracy", "points"),
    ]
    checked = [stories.Checked(n, u, v, stories.measured(v, u)) for v, n, u in parts]
    shown = stories._measured_in_row(checked, whole=True)
    assert shown == "loss: +0.500 ± 0.01 in loss; accuracy: +25.0 ± 1 points"


def test_a_printed_number_agrees_if_one_more_run_could_have_it():
    """In 95 % of the cases, so that neither a mean's interval nor the range of seeds decides."""
    values = np.array([0.40, 0.44, 0.46, 0.50])
    line = lambda *v: runner.Line(np.array(v), np.zeros(len(v)), None, None, 0.0, {}, (0, 1, 2, 3))
    half = stats.t.ppf(0.975, 3) * np.std(values, ddof=1) * (1 + 1 / 4) ** 0.5
    lines = dict(a=line(*values), b=line(*(values - 0.1)))
    ends = 100 * (values.mean() + half * np.array([-1, 1]))
    for value, found in (
        (ends[0] - 0.01, stories.LOWER),
        (ends[0] + 0.01, stories.INSIDE),
        (ends[1] - 0.01, stories.INSIDE),
        (ends[1] + 0.01, stories.HIGHER),
    ):
        row = stories._compared("", f"{value:.4f}", lines, "a", "")
        assert row.verdict == found and row.interval == f"{ends[0]:.1f} to {ends[1]:.1f}"
    gain = stories._compared("", "+10.0", lines, "a", "b")  # paired: the same in all seeds
    assert gain.verdict == stories.INSIDE and gain.ours == "+10.0 points (4 seeds)"
    assert stories._compared("", "+9.8", lines, "a", "b").verdict == stories.LOWER
    lines["b"] = dataclasses.replace(lines["b"], failed=(4,))
    for other in ("b", "c"):
        assert stories._compared("", "+10.0", lines, "a", other).verdict == stories.NOT_RUN


def test_printed_numbers_are_those_of_the_papers():
    """Each once, with the line or the difference that it is of."""
    words = stories.page_words()
    groups = {p: words[p].get("printed", []) for p in stories.PAPERS}
    rows = {p: [stories.printed_numbers(p, g) for g in groups[p]] for p in stories.PAPERS}
    assert [len(r) for r in rows["noble2022"]] == [31, 50]
    assert [len(r) for r in rows["chen2024"]] == [50, 16, 8]
    assert [len(r) for r in rows["ranaweera2025"]] == [18] * 5
    found = {row.where: row for group in rows["ranaweera2025"] for row in group}
    assert found["client_fmnist: WAV R1 lemma2 σ=3 minus vanilla"].printed == "+27.3 points"
    assert found["sample_mnist: WAV R2 plain σ=1 minus dynamic"].printed == "+2.87 points"
    assert found["table3: mnist adam σ=3, WAV minus vanilla"].printed == "+6.12 points"
    found = {row.where: row for group in rows["chen2024"] for row in group}
    assert found["fig1ab: balanced DPNFL"].printed == "80.59 %"
    assert found["fig7b: DPNFL"].verdict == stories.NOT_RUN
