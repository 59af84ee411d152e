"""The files from which a killed run is resumed: its checkpoints, and its journal.

A checkpoint is a line with the format and the digest of the rest, a line of JSON, and the bytes of
the arrays.  The digest detects a truncated file and a flipped bit.

The journal records which rounds may have been observed, and which program computed them.  It is
written before any output of those rounds leaves the process: a checkpoint, a metric, a line on the
terminal.  A resumed run computes the rounds since its last checkpoint again.  The same program
computes the same releases bit for bit, so they count once.  Another program would release the same
rounds a second time with other rounding errors, so it refuses to resume.  If nothing was observed
since the last checkpoint, any program may continue.
"""

import hashlib
import json
import uuid
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import numpy as np

from ..core import checks, pytrees
from ..core.errors import ResumeRefused
from ..core.files import digest_of, write
from ..core.records import Run
from .environment import code as code
from .environment import environment

MAGIC, FORMAT = "jfl-checkpoint", 5  # of checkpoints and of the journal
NUM_KEPT_CHECKPOINTS = 2
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
PROCESS = uuid.uuid4().hex
NEW_START = "Start in a new directory with a new --seed."


def differences(there: dict, here: dict) -> list[str]:
    """Describe the entries in which the values of a stored run differ from those of this run."""
    return [
        f"{k}: {there.get(k)!r} there, {here.get(k)!r} here"
        for k in there | here
        if there.get(k) != here.get(k)
    ]


def refuse_resume(where: str, expected: str, actual: object, hint: str = "") -> NoReturn:
    """Raise ResumeRefused; the arguments are as in `checks.fail`."""
    checks.fail(where, expected, actual, hint, error=ResumeRefused)


class Saved(NamedTuple):
    """The content of a checkpoint: its JSON metadata and the arrays of the run."""

    meta: dict
    leaves: list[np.ndarray]


class Checkpoints:
    """The last two checkpoints of a run directory."""

    def __init__(self, directory):
        self.directory = Path(directory).absolute()
        self.folder = self.directory / "checkpoints"

    def rounds(self) -> list[int]:
        """Return the rounds of the complete checkpoints, the latest first."""
        files = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((int(p.name) for p in files if p.name.isdecimal()), reverse=True)

    def latest(self) -> int | None:
        """Return the round of the latest complete checkpoint."""
        return next(iter(self.rounds()), None)

    def save(self, run: Run, meta: dict):
        """Save a run together with JSON metadata, then remove older checkpoints.

        The file is on the disk when this returns.
        """
        leaves = [np.asarray(x) for x in jax.tree.leaves(pytrees.keys_to_words(run))]
        record = json.dumps(dict(meta=meta, arrays=_arrays(leaves))).encode() + b"\n"
        parts = [record, *(np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves)]
        self.folder.mkdir(exist_ok=True)
        head = f"{MAGIC} {FORMAT} {_digest(parts)}\n".encode()
        write(self.folder / str(int(run.round)), [head, *parts])
        for old in self.rounds()[NUM_KEPT_CHECKPOINTS:]:
            (self.folder / str(old)).unlink()

    def load(self) -> Saved:
        """Read the latest checkpoint.

        Raises:
            ResumeRefused: If it has another format, is incomplete or was modified.
        """
        path = self.folder / str(self.latest())
        with open(path, "rb") as file:
            head, content = file.readline(), file.read()
        if head != f"{MAGIC} {FORMAT} {_digest([content])}\n".encode():
            words = head.decode("ascii", "replace").split()
            if len(words) == 3 and words[0] == MAGIC and words[1] != str(FORMAT):
                refuse_resume(
                    f"checkpoint {path}",
                    f"format {FORMAT}",
                    f"format {words[1]}",
                    "Another version of jfl wrote it: resume with that version, or start in "
                    "another directory with another --seed.",
                )
            refuse_resume(
                f"checkpoint {path}",
                "the file as it was written",
                f"another digest of its {len(content)} bytes, so it was cut or damaged",
                "Remove that file to resume from the previous one; later rounds are computed "
                "again.",
            )
        line, _, payload = content.partition(b"\n")
        record, leaves, begin = json.loads(line), [], 0
        for kind, shape in record["arrays"]:
            kind, count = jax.numpy.dtype(kind), int(np.prod(shape, dtype=np.int64))
            leaves.append(np.frombuffer(payload, kind, count, begin).reshape(shape))
            begin += count * kind.itemsize
        return Saved(record["meta"], leaves)

    def restore(self, like: Run, saved: Saved | None = None) -> Run:
        """Return the run of `saved`, or of the latest checkpoint; `like` is a run of the same plan.

        Raises:
            ResumeRefused: If its arrays differ from those of `like` in shape or type.
        """
        stored = (self.load() if saved is None else saved).leaves
        leaves, structure = jax.tree.flatten(pytrees.keys_to_words(like))
        number = lambda arrays: dict(enumerate(_arrays(arrays)))
        if differ := differences(number(stored), number(leaves)):
            refuse_resume(
                f"checkpoint {self.directory}",
                "the arrays of this plan",
                "; ".join(differ[:5]),
                "Resume with the config that made it.",
            )
        words = structure.unflatten(map(jax.numpy.asarray, stored))
        return pytrees.words_to_keys(words, like)


def _arrays(leaves) -> list:
    """Return the types and shapes of arrays, for the metadata of a checkpoint."""
    return [[str(x.dtype), list(x.shape)] for x in leaves]


def _digest(parts) -> str:
    """Return the SHA-256 digest of several byte strings."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part)
    return sha.hexdigest()


# --- the journal


def program(**layout: str) -> dict:
    """Return a description of everything on which the exact values of a round depend.

    These are the environment and the layout.  Some programs do not give the same bits twice, such
    as those on a GPU without the flag `DETERMINISTIC`.  Their description includes the process, so
    that each process counts as a different program.

    Args:
        layout: further facts, by name: the layout of the devices and the key of the run, as passed
            to `Journal`.

    Returns:
        A dict of the facts, for JSON.
    """
    facts = environment() | layout
    if facts["backend"] not in ("cpu", "tpu") and DETERMINISTIC not in facts["flags"].split():
        facts["process"] = PROCESS
    return facts


class Journal:
    """The file journal.json of a run directory.

    Its record holds `until`, the last round that may have been observed; `program`, a description
    of the program that computes the rounds after `since`; and the facts that a resumed run must
    share.

    Args:
        directory: the run directory.
        layout: what the program depends on besides the environment: the layout of the devices, and
            the key that was made from the seed.
    """

    def __init__(self, directory, **layout: str):
        self.path, self.layout = Path(directory).absolute() / "journal.json", layout

    def read(self) -> dict | None:
        """Return the record, or None if there is no file.

        Raises:
            ResumeRefused: if the file has another format or was modified.
        """
        where = f"journal {self.path}"
        lost = f"Without it nobody knows which rounds were seen. {NEW_START}"
        try:
            record = json.loads(self.path.read_text())
            found = record.get("format", 1)
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError) as error:
            refuse_resume(where, "the JSON that a run wrote", str(error), lost)
        if found != FORMAT:
            hint = f"Resume with the version of jfl that wrote it. Otherwise: {NEW_START}"
            refuse_resume(where, f"format {FORMAT}", f"format {found}", hint)
        if record.pop("digest", None) != digest_of(record):
            refuse_resume(where, "the file as it was written", "another digest", lost)
        return record

    def announce(self, until: int, since: int, **facts) -> None:
        """Record that rounds up to `until` may be observed from now on.

        Args:
            until: the last of these rounds; the record never goes back to an earlier one.
            since: the rounds after this one are computed by this program.
            **facts: values that a resumed run must share.
        """
        before = self.read()
        until = until if before is None else max(until, before["until"])
        record = dict(
            facts, format=FORMAT, until=until, since=since, program=program(**self.layout)
        )
        write(self.path, json.dumps(dict(record, digest=digest_of(record)), indent=1))

    def resume(self, done: int) -> int:
        """Return `since` for a run that continues after round `done`.

        Raises:
            ResumeRefused: if the journal is older than the checkpoint of round `done`, or if
                another program would compute rounds again that may have been observed.
        """
        record = self.read()
        assert record is not None
        until, since = record["until"], record["since"]
        if until < done:
            refuse_resume(
                "--resume",
                f"a journal at least as recent as the checkpoint of round {done}",
                f"one that ends at round {until}",
                NEW_START,
            )
        here = program(**self.layout)
        if record["program"] == here and since <= done:
            return since
        if until > done:
            differ = [k for k, v in here.items() if record["program"].get(k) != v]
            hint = "Resume there"
            if "process" in here:
                hint = f"On a GPU, start with XLA_FLAGS={DETERMINISTIC} to resume at any point"
            refuse_resume(
                "--resume",
                f"the program and device that released rounds {done + 1} to {until}",
                f"another {', '.join(differ) or 'checkpoint than it left'}",
                f"{hint}: other rounding errors would be a second release of these rounds, which "
                f"epsilon does not cover. Otherwise: {NEW_START}",
            )
        return done
