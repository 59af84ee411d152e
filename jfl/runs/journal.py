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

from ..core import checks
from ..core.records import Run
from . import checkpoint

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


def program(**made) -> dict:
    """environment(), what else `made` the bits of a round, and the process where a program does not
    give them twice."""
    found = checkpoint.environment() | made
    if found["backend"] not in ("cpu", "tpu") and DETERMINISTIC not in found["flags"].split():
        found["process"] = PROCESS
    return found


class Journal:
    """The file journal.json of a run directory; it is on the disk before what it announces is
    computed.

    `made` says what its program is beside the machine: the layout of its devices, the key that its
    seed became.
    """

    def __init__(self, directory, **made: str):
        self.path, self.made = Path(directory).absolute() / "journal.json", made

    def read(self) -> dict | None:
        """The last record; None if there is no file.

        Raises:
            ValueError: for a file of another format, or one that is not as it was written.
        """
        try:
            found = json.loads(self.path.read_text())
            kind = found.get("format", 1)
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError) as error:
            checks.fail(f"journal {self.path}", "the JSON that a run wrote", str(error), LOST)
        if kind != FORMAT:
            checks.fail(
                f"journal {self.path}",
                f"format {FORMAT}",
                f"format {kind}",
                "Another version of jfl wrote it: resume "
                "with that version, or start in another directory with another --seed.",
            )
        if found.pop("digest", None) != checkpoint.signature(found):
            checks.fail(
                f"journal {self.path}", "the file as it was written", "another digest", LOST
            )
        return found

    def announce(self, until: int, branch: Branch, **facts):
        """Say before computing them which rounds may be seen from now on; `facts` name what is run.

        An earlier try of the same branch and program that went further stays the furthest.
        """
        before = self.read()
        record = dict(facts, format=FORMAT, **branch._asdict(), program=program(**self.made))
        if before is not None and all(
            before[k] == record[k] for k in ("attempt", "origin", "program")
        ):
            until = max(until, before["until"])
        record["until"] = until
        checkpoint.write(
            self.path, json.dumps(dict(record, digest=checkpoint.signature(record)), indent=1)
        )


def rejoin(
    run: Run, journal: dict, saved: Branch | None = None, state: str = BEGINNING, **made: str
) -> tuple[Run, Branch]:
    """-> the run to go on with, and its branch.

    Args:
        journal: what Journal.read gave;  made: as of Journal.
        saved, state: the branch and the digest of the checkpoint that `run` comes from; without
            one, `run` is at round 0.

    Raises:
        ValueError: if the checkpoint knows of more than the journal.

    Rounds past the checkpoint that the journal announced are released again.
    """
    last, done = Branch(*(journal[k] for k in Branch._fields)), int(run.round)
    if saved is not None and (
        saved.attempt > last.attempt
        or saved.recomputed > last.recomputed
        or saved.attempt == last.attempt
        and journal["until"] < done
    ):
        checks.fail(
            "--resume",
            f"a journal that is not older than the checkpoint of round {done}",
            f"one of attempt {last.attempt} up to round {journal['until']}",
            LOST,
        )
    again = max(0, journal["until"] - done)
    if journal["program"] == program(**made) and (
        state == last.origin or saved is not None and saved[:2] == last[:2]
    ):
        branch = last
    elif again and last.attempt == LAST_ATTEMPT:
        checks.fail(
            "--resume",
            "an attempt that has a noise of its own",
            f"{last.attempt}, the last",
            "Start in another directory with another --seed.",
        )
    else:
        branch = Branch(last.attempt + (again > 0), state, last.recomputed + again)
    return dataclasses.replace(run, attempt=jax.numpy.int32(branch.attempt)), branch
