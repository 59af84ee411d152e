"""What the README says is so."""
import json
import pathlib
import re
import subprocess
import sys

import pytest

from jfl import collected, report

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_ten_lines_run(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)                       # 200 rounds: code that runs fast, as a user has it
    out = subprocess.run([sys.executable, "-c", blocks("python")[0]], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    accuracy, text = out.stdout.split("\n", 1)
    assert float(accuracy) > 0.6
    assert "unit: example" in text and "view: server" in text


def test_the_algorithm_shown_is_the_one_that_runs():
    source = (ROOT / "jfl" / "algorithms" / "fedavg.py").read_text()
    without_docstring = re.sub(r'    """Clients take.*?"""\n', "", source, flags=re.S)
    shown, = (b for b in blocks("python") if b.startswith("def _init"))
    assert shown.strip() in without_docstring


def test_the_tables_show_the_committed_numbers():
    results = ROOT / "experiments" / "results"
    rows = json.loads((results / "mnist.json").read_text())
    assert len(rows) == 7
    for row in rows:
        assert f"| {row['accuracy']:.4f} | {row['std']:.4f} |" in README
        assert row["command"].split("--model logistic")[1] in README
        for g in row["privacy"]:
            assert g["epsilon"] is None or f"| {g['epsilon']:.2f} |" in README
    runs = json.loads((results / "demo.json").read_text())["runs"]
    for name in {r["name"] for r in runs}:
        final = [r["accuracy"]["final"] for r in runs if r["name"] == name]
        assert f"| {report.plus_minus(*report.interval(final), digits=3)} |" in README


def test_the_page_of_the_papers_is_of_the_committed_results():
    results = ROOT / "experiments" / "results"
    page = (results / "papers.md").read_text()
    for paper in ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024"):
        found = collected.read(results / f"{paper}.json")
        given = [c["verdict"] for e in found for c in e.verdicts]
        counts = " | ".join(map(str, [len(given), *map(given.count, collected.VERDICTS)]))
        assert f"| {paper} | {found[0].title.replace('_', chr(92) + '_')} | {counts} |" in page
        assert all(f"{c['seen'][:20]}" in page.replace(chr(92), "") for e in found for c in e.verdicts if "|" not in c["seen"])
    pictures = re.findall(r"\]\(<(papers_files/[^>]+)>\)", page)
    assert len(pictures) > 20 and all((results / p).exists() for p in pictures)


def test_ci_runs_the_readme_command():
    command = next(b.strip() for b in blocks("bash") if "pytest" in b)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_file_named_exists():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("command", ["demo", "train", "sweep", "epsilon", "calibrate", "list"])
def test_every_command_helps(command):
    out = subprocess.run([sys.executable, "-m", "jfl.cli", command, "--help"], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and "jfl " + command in out.stdout, out.stderr
