"""What a contributor reads and uses: the picture of the house, the jobs, what is tracked."""

import os.path
import re
import shutil
import subprocess
import tomllib

import pytest
from helpers.paths import ROOT
from test_layout import FLOORS

import jfl

PICTURE = re.compile(r"\.(png|svg|jpe?g|gif|webp|pdf)$")
LINK = re.compile(r"[\w./-]+\.(?:png|svg|jpe?g|gif|webp|pdf)\b")


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_picture_of_the_house_is_the_house():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"^```\n(cli .*?)^```", text, re.S | re.M)
    drawn = [re.split(r" {2,}", line)[0] for line in block.strip().splitlines()]
    assert drawn == FLOORS[::-1]


def test_paths_that_contributors_are_told_exist():
    for page in ("CONTRIBUTING.md", "CHANGELOG.md"):
        text = (ROOT / page).read_text()
        paths = re.findall(r"`((?:\.ci|\.github|jfl|tests|experiments|docs)/[\w./-]+)`", text)
        missing = [p for p in paths if "NAME" not in p and not (ROOT / p).exists()]
        assert not missing and len(paths) > 1, f"{page} names {missing}"
        for jobs in re.findall(r"`(\.ci/\w+)`", text):
            assert os.access(ROOT / jobs, os.X_OK)


def test_the_version_is_one():
    version = project()["project"]["version"]
    assert jfl.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_types_are_installed_with_the_code():
    assert "py.typed" in project()["tool"]["setuptools"]["package-data"]["jfl"]
    assert (ROOT / "jfl" / "py.typed").exists()


def test_the_oldest_jax_and_python_are_tested():
    told = project()["project"]
    jax = next(d for d in told["dependencies"] if d.startswith("jax>="))
    oldest = jax.removeprefix("jax>=")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(rf'jax: "jax=={re.escape(oldest)}(\.0)* ', workflow)
    assert f'python: "{told["requires-python"].removeprefix(">=")}"' in workflow
    for job in re.findall(r"run: (\.ci/\w+)", workflow):
        assert (ROOT / job).exists()


def test_hooks_fetch_nothing():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", hooks) == ["local"] and "http" not in hooks
    assert set(re.findall(r"entry: (ruff \w+)", hooks)) == {"ruff check", "ruff format"}


def tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git, or no repository: which files are tracked is not known")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return [name for name in done.stdout.decode().split("\0") if name]


def test_every_tracked_picture_is_shown():
    """A page, a notebook, or a stylesheet of the site names it: the history does not grow by
    pictures that nobody sees."""
    files, shown = tracked(), set()
    pages = (".md", ".ipynb", ".html", ".css", ".yml", ".j2")
    for page in files:
        path = ROOT / page
        if page.endswith(pages) and path.exists():
            for link in LINK.findall(path.read_text(encoding="utf-8")):
                shown.add(os.path.normpath(os.path.join(os.path.dirname(page), link)))
                shown.add(os.path.normpath(os.path.join("docs", link)))  # of mkdocs.yml
    pictures = [name for name in files if PICTURE.search(name) and (ROOT / name).exists()]
    unseen = sorted(set(pictures) - shown)
    assert not unseen, f"no page shows {unseen}: git rm them, or show them"
    assert len(pictures) > 5
