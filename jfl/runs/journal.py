"""The journal of a run directory: which rounds may have been seen, under which program they were
computed.

Before rounds are computed the journal says how far they will go.  A run that is killed and resumed
computes some rounds again.  The same program, from the state from which it began, gives the same
releases, and they count once.  Anything else gives new ones: the run's `attempt` is raised, which
changes its noise, cohorts and batches, and they count twice.
"""

import dataclasses
import json
import uuid
from pathlib import Path
from typing import NamedTuple

import jax

from ..core import files
from ..core.records import Run
from . import checkpoint
from .checkpoint import refuse_resume

FORMAT = 3
BEGINNING = "round 0"
LAST_ATTEMPT = 2**31 - 1
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
PROCESS = uuid.uuid4().hex
LOST = (
    "Without it nobody knows which rounds were seen: start in another directory with another "
    "--seed."
)


class Branch(NamedTuple):
    """Where a run goes on: rounds of one branch that are computed again are the same releases."""

    attempt: int = 0
    origin: str = BEGINNING  # digest of the state from which this program began under this attempt
    recomputed: int = 0  # rounds released before, and released again as something else


def program(**layout: str) -> dict:
    """What the bits of a round follow from: the environment, the layout of this run, and the
    process where a program does not give them twice."""
    facts = checkpoint.environment() | layout
    if facts["backend"] not in ("cpu", "tpu") and DETERMINISTIC not in facts["flags"].split():
        facts["process"] = PROCESS
    return facts


class Journal:
    """The file journal.json of a run directory; it is on the disk before what it announces is
    computed.

    Args:
        directory: of the run.
        layout: what its program is beside the machine: the layout of its devices, the key that its
            seed became.
    """

    def __init__(self, directory, **layout: str):
        self.path, self.layout = Path(directory).absolute() / "journal.json", layout

    def read(self) -> dict | None:
        """The last record; None if there is no file.

        Raises:
            ResumeRefused: for a file of another format, or one that is not as it was written.
        """
        try:
            record = json.loads(self.path.read_text())
            kind = record.get("format", 1)
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError) as error:
            refuse_resume(f"journal {self.path}", "the JSON that a run wrote", str(error), LOST)
        if kind != FORMAT:
            refuse_resume(
                f"journal {self.path}",
                f"format {FORMAT}",
                f"format {kind}",
                "Another version of jfl wrote it: resume "
                "with that version, or start in another directory with another --seed.",
            )
        if record.pop("digest", None) != checkpoint.signature(record):
            refuse_resume(
                f"journal {self.path}", "the file as it was written", "another digest", LOST
            )
        return record

    def announce(self, until: int, branch: Branch, **facts):
        """Say before computing them which rounds may be seen from now on; `facts` name what is run.

        An earlier try of the same branch and program that went further stays the furthest.
        """
        before = self.read()
        record = dict(facts, format=FORMAT, **branch._asdict(), program=program(**self.layout))
        if before is not None and all(
            before[k] == record[k] for k in ("attempt", "origin", "program")
        ):
            until = max(until, before["until"])
        record["until"] = until
        files.write(
            self.path, json.dumps(dict(record, digest=checkpoint.signature(record)), indent=1)
        )


def rejoin(
    run: Run, journal: dict, saved: Branch | None = None, state: str = BEGINNING, **layout: str
) -> tuple[Run, Branch]:
    """-> the run to go on with, and its branch.

    Args:
        run: of the last checkpoint, or at round 0.
        journal: what Journal.read gave.
        layout: as of Journal.
        saved, state: the branch and the digest of the checkpoint that `run` comes from; without
            one, `run` is at round 0.

    Raises:
        ResumeRefused: if the checkpoint knows of more than the journal.

    Rounds past the checkpoint that the journal announced are released again.
    """
    last, done = Branch(*(journal[k] for k in Branch._fields)), int(run.round)
    if saved is not None and (
        saved.attempt > last.attempt
        or saved.recomputed > last.recomputed
        or saved.attempt == last.attempt
        and journal["until"] < done
    ):
        refuse_resume(
            "--resume",
            f"a journal that is not older than the checkpoint of round {done}",
            f"one of attempt {last.attempt} up to round {journal['until']}",
            LOST,
        )
    again = max(0, journal["until"] - done)
    if journal["program"] == program(**layout) and (
        state == last.origin or saved is not None and saved[:2] == last[:2]
    ):
        branch = last
    elif again and last.attempt == LAST_ATTEMPT:
        refuse_resume(
            "--resume",
            "an attempt that has a noise of its own",
            f"{last.attempt}, the last",
            "Start in another directory with another --seed.",
        )
    else:
        branch = Branch(last.attempt + (again > 0), state, last.recomputed + again)
    return dataclasses.replace(run, attempt=jax.numpy.int32(branch.attempt)), branch
