"""What the README says is so."""
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_ten_lines_run(capsys):
    exec(compile(blocks("python")[0], "README.md", "exec"), {})        # as a user would paste them
    accuracy, text = capsys.readouterr().out.split("\n", 1)
    assert float(accuracy) > 0.6
    assert "unit: example" in text and "view: server" in text


def test_the_algorithm_shown_is_the_one_that_runs():
    shown = blocks("python")[1]
    assert shown.strip() in (ROOT / "jfl" / "algorithms" / "fedavg.py").read_text()


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
