"""Commits whose code ran the stored results."""

import hashlib
import subprocess

from experiments.harness import commits


def test_the_first_commit_with_a_hash_is_found(tmp_path):
    """Files are hashed in the order of `jfl.core.files.source`, and only those of jfl."""
    git = lambda *a: subprocess.run(["git", *a], cwd=tmp_path, check=True, capture_output=True)
    git("init", "-q")
    git("config", "user.email", "a@b")
    git("config", "user.name", "a")

    def commit(**texts):
        for name, text in texts.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".py").write_text(text)
        git("add", ".")
        git("commit", "-qm", "a change")
        return git("rev-parse", "HEAD").stdout.decode().strip()

    def source():
        parts = [
            p.read_bytes()
            for folder in ("jfl", "kernels")
            for p in sorted((tmp_path / folder).rglob("*.py"))
        ]
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    # "jfl/a.py" comes after "jfl/a/b.py", but "jfl/a" before "jfl/aa.py"
    first = commit(jfl__a="1", jfl__a__b="2", jfl__aa="3", kernels__c="4")
    of_first = source()
    commit(tests__a="5")
    second = commit(kernels__c="6")
    found = commits.first_commits({of_first, source(), "another"}, tmp_path)
    assert found == {of_first: first, source(): second}


def test_every_stored_hash_was_looked_up():
    known = commits.stored()
    assert set(known) == commits.sources()
    assert None not in known.values()
