"""Find the commits whose code ran the stored results.

    python -m experiments.harness.commits   # updates experiments/results/commits.json

Results name the code of jfl that ran them by a hash (`jfl.core.files.source`), which does not tell
where to find that code.  commits.json has the first commit with each of these hashes, or null if no
commit has it, because the code ran before it was committed.
"""

import json
import subprocess
import sys
from pathlib import Path

from jfl.core.files import SOURCE_FOLDERS, source_of, write

from . import command_line
from . import results as results_file
from .results import PAPERS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "experiments" / "results" / "commits.json"


def sources() -> set[str]:
    """Return the hashes that the stored results of all papers name."""
    found = set()
    for module in PAPERS:
        for one in results_file.read(FILE.parent / f"{module}.json").experiments.values():
            found |= {one.versions.get("source", "")} | {x.source for x in one.lines.values()}
    return found - {""}


def stored() -> dict[str, str | None]:
    """Return hash -> commit, as commits.json has it."""
    return json.loads(FILE.read_text())


def first_commits(wanted: set[str], root: Path = ROOT) -> dict[str, str]:
    """Return hash -> the first commit with this code, for the wanted hashes that a commit has."""
    found, contents = {}, {}
    for commit in _git(root, "rev-list", "--first-parent", "HEAD").decode().split():
        # a file is listed as: mode, type, name of the content, and after a tab the path
        listed = _git(root, "ls-tree", "-r", commit, *SOURCE_FOLDERS).decode().splitlines()
        of = {path: facts.split()[2] for facts, path in (line.split("\t") for line in listed)}
        paths = [p for p in of if p.endswith(".py")]
        for name in {of[path] for path in paths} - contents.keys():
            contents[name] = _git(root, "cat-file", "blob", name)
        if (source := source_of({path: contents[of[path]] for path in paths})) in wanted:
            found[source] = commit  # commits come from the last to the first
    return found


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, check=True
    ).stdout


def main(argv=None) -> int:
    def command() -> int:
        """Look for the commit of every hash in the stored results."""
        wanted = sources()
        found = stored() | first_commits(wanted)  # a shallow clone lacks earlier commits
        commits = {source: found.get(source) for source in sorted(wanted)}
        write(FILE, json.dumps(commits, indent=1) + "\n")
        known = sum(commit is not None for commit in commits.values())
        print(f"{known} of {len(wanted)} hashes belong to a commit")
        return 0

    return command_line.called(command, "python -m experiments.harness.commits", argv)


if __name__ == "__main__":
    sys.exit(main())
