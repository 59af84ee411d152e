"""The journal of a run directory: which rounds may have been seen, and which program computed them.

A run that is killed and resumed computes the rounds since its last checkpoint again.  The journal
is written before anything that those rounds released leaves the process: a checkpoint, a metric, a
line on the terminal.  The same program computes the same releases again, bit for bit, so they count
once.  Another program would release the same rounds a second time with other rounding errors, so
the resume is refused.  If nothing was seen since the last checkpoint, any program may continue.
"""

import json
import uuid
from pathlib import Path

from ..core import files
from ..core.files import digest_of
from . import checkpoint
from .checkpoint import refuse_resume

FORMAT = 4
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
PROCESS = uuid.uuid4().hex
NEW_START = "Start in a new directory with a new --seed."


def program(**layout: str) -> dict:
    """Return everything that the bits of a round depend on.

    These are the environment and the layout of the run.  Where a program does not repeat its bits,
    as on a GPU without `DETERMINISTIC`, the process is included, so every process is a program.
    """
    facts = checkpoint.environment() | layout
    if facts["backend"] not in ("cpu", "tpu") and DETERMINISTIC not in facts["flags"].split():
        facts["process"] = PROCESS
    return facts


class Journal:
    """The file journal.json of a run directory.

    Its record holds `until`, the last round that may have been seen; `program`, what computes the
    rounds after `since`; and the facts that a resumed run must share.

    Args:
        directory: the run directory.
        layout: what the program depends on besides the environment: the layout of the devices and
            the key that the seed became.
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
        """Record that rounds up to `until` may be seen from now on.

        Args:
            until: the last of these rounds; the record never goes back to an earlier one.
            since: the rounds after this one are computed by this program.
            **facts: what a resumed run must share.
        """
        before = self.read()
        until = until if before is None else max(until, before["until"])
        record = dict(
            facts, format=FORMAT, until=until, since=since, program=program(**self.layout)
        )
        files.write(self.path, json.dumps(dict(record, digest=digest_of(record)), indent=1))

    def resume(self, done: int) -> int:
        """Return `since` for a run that continues after round `done`.

        Raises:
            ResumeRefused: if the journal is older than the checkpoint of round `done`, or if rounds
                that may have been seen would be computed again by another program.
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
