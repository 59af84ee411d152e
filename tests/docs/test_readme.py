"""What the README says is so."""

import json
import os
import re
import subprocess

import numpy as np
import pytest
from helpers import pages
from helpers.paths import ROOT
from scipy import optimize, stats

import jfl
from experiments.harness import results
from jfl.runs import statistics

README = (ROOT / "README.md").read_text()


DOCS = ROOT / "docs"
ALGORITHM = DOCS / "guides" / "algorithm.md"
RESULTS = (DOCS / "results.md").read_text()


def test_the_ten_lines_are_the_same_everywhere():
    ten = next(b.text for b in pages.blocks(pages.README) if b.runs)
    assert ten == pages.blocks(DOCS / "start" / "ten_lines.md")[0].text
    assert ten in [block.text for block in pages.blocks(DOCS / "index.md")]


def test_the_algorithm_shown_is_the_one_that_runs():
    source = (ROOT / "jfl" / "algorithms" / "fedavg.py").read_text()
    without_docstring = re.sub(r'    """Return FedAvg: .*?"""\n', "", source, flags=re.S)
    without_docstring = re.sub(
        r"^@named\(.*\)\n", "", without_docstring, flags=re.M
    )  # jfl's own names and signatures; a user needs none
    (shown,) = (b.text for b in pages.blocks(ALGORITHM) if "def _init" in b.text)
    assert shown[shown.index("def _init") :].strip() in without_docstring
    above = shown[: shown.index("def _init")].split("\n")
    assert all(line.startswith(("import ", "from ")) for line in above if line)


def test_the_tables_show_the_committed_numbers():
    results = ROOT / "experiments" / "results"
    rows = json.loads((results / "mnist.json").read_text())
    assert len(rows) == 7
    for row in rows:
        assert f"| {row['accuracy']:.4f} | {row['std']:.4f} |" in RESULTS
        assert row["command"].split("--model logistic")[1] in RESULTS
        for g in row["privacy"]:
            assert g["epsilon"] is None or f"| {g['epsilon']:.2f} |" in RESULTS
    runs = json.loads((results / "demo.json").read_text())["runs"]
    for name in {r["name"] for r in runs}:
        final = [r["accuracy"]["final"] for r in runs if r["name"] == name]
        assert f"| {statistics.plus_minus(*statistics.interval(final), digits=3)} |" in RESULTS


def test_ci_runs_the_readme_command():
    bash = [b.text.strip() for b in pages.blocks(pages.README) if b.language == "bash"]
    command = next(b for b in bash if "pytest" in b)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.mark.parametrize("job", ["run", "slow", "optimized", "lowest", "dist"])
def test_ci_jobs_name_what_exists(job):
    file = ROOT / ".ci" / job
    text = file.read_text()
    assert os.access(file, os.X_OK) and subprocess.run(["bash", "-n", file]).returncode == 0
    assert f"`.ci/{job}`" in (ROOT / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"(?<!\S)tests/\S+", text.replace("\\\n", " ")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_every_file_named_exists(page):
    """As a reader of the repository follows them; the site hands such files on."""
    for target in pages.links(page):
        assert (page.parent / target).exists(), target


def test_no_address_is_invented():
    """A page that names the repository's address takes the one of jfl."""
    for page in pages.PAGES:
        found = re.findall(r"github\.com/(?:github/)?([\w.-]+/jfl)\b", page.read_text())
        assert set(found) <= {jfl.REPOSITORY}, page


def test_the_page_on_audits_has_the_rows_that_were_measured():
    """The table of the house experiment is of experiments/results/study_audit.json."""
    path = ROOT / "experiments" / "results" / "study_audit.json"
    study, page = results.read(path), (DOCS / "guides" / "auditing.md").read_text()
    assert study.name == "audit" and not study.quick
    assert {v.verdict for v in study.verdicts} == {"confirmed"}
    number = lambda e: "nothing" if e is None else f"{e:.3g}"
    printed = [p for p in study.points if p.claimed is not None]
    assert len(printed) >= 10
    for p in printed:
        numbers = map(number, (p.claimed, p.audited, p.ceiling, p.epsilon))
        verdict = "**refuted**" if p.audited > p.claimed else "not refuted"
        assert f" | {' | '.join(numbers)} | {verdict} |" in page, p.line
    proved = [p for p in study.points if p.status == "proved"]
    assert f"{len(proved)} rows" in page and all(p.audited <= p.epsilon for p in proved)
    nearest = max(p.audited / p.epsilon for p in proved)
    assert f"the largest ratio of the two is {nearest:.2f}" in page


def test_what_an_epsilon_allows():
    """The table of the page on epsilon: true positives of the best attack on one Gaussian."""
    page = (DOCS / "concepts" / "epsilon.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| ([\d.]+) % \|$", page, re.M)
    assert len(rows) == 5
    for epsilon, told in rows:
        excess = lambda mu, e=float(epsilon): (
            stats.norm.cdf(mu / 2 - e / mu) - np.exp(e) * stats.norm.cdf(-mu / 2 - e / mu) - 1e-5
        )
        mu = optimize.brentq(excess, 1e-3, 20)
        found = 100 * stats.norm.cdf(stats.norm.ppf(0.01) + mu)
        assert f"{found:.2g}" == f"{float(told):.2g}", (epsilon, found)
