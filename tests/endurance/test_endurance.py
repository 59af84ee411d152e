"""A run that is killed again and again, and disks that fail: what is measured is in
experiments/results/endurance.json.  Refusals of directories are in runs/test_checkpoint.py.

It is measured again, in ten minutes on two cores (`--only runs` or `--only checks` is a part), by

    python tests/endurance/test_endurance.py --out experiments/results/endurance.json

and `pytest -m slow tests/endurance/test_endurance.py` does the same and judges it.

Each try is `jfl train`, in a process of its own that is forked before JAX has started a backend, so
that a kill costs seconds.  Each try logs the rounds that it computes in a file next to its
directory.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import pytest

# for the tries, which are forked: cheap code, and all of it kept
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

from jfl.cli import main
from jfl.core.files import temporary
from jfl.privacy.guarantees import guarantee
from jfl.runs import build, config, pictures, record, train
from jfl.runs.checkpoint import Checkpoints, Journal, environment

PLAN = config.Config(
    clients=6,
    min_rows=8,
    model="logistic",
    sampler="without_replacement",
    cohort=3,
    batch=4,
    steps=2,
    algorithm="scaffold",
    noise_multiplier=1.0,
    evaluate_every=1,
    checkpoint_every=2,
)
PARTS = dict(
    state=(train, "init"),
    journal=(Journal, "announce"),
    config=(train, "write"),
    compute=(train, "simulate"),
    checkpoint=(Checkpoints, "save"),
    report=(record, "save"),
    picture=(pictures, "draw_accuracy"),
)
NAMES = ("start", *PARTS, "between", "end")
# A fast disk ends a write before a kill arrives, so each step of a write first waits this long.
SLOW_DISK_SECONDS = 0.01
DONE = "none: it had ended"


class Try:
    """`jfl train` in a process of its own; `seen` is memory shared with it: where it is, and how
    often it was there."""

    def __init__(self, *args, log=None, before=(None, 0, None)):
        self.seen = mmap.mmap(-1, 1 + len(NAMES))
        self.errors = tempfile.TemporaryFile()
        self.begun = time.perf_counter()
        self.pid = os.fork()
        if not self.pid:
            self._child([str(a) for a in args], log, before)

    def _child(self, args, log, before):
        code = 99
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(self.errors.fileno(), 2)
            for name in ("fsync", "replace"):
                setattr(os, name, self._slowed(getattr(os, name)))
            for part, (owner, name) in PARTS.items():
                setattr(owner, name, self._marked(part, getattr(owner, name), log, before))
            code = main.main(["train", *args])
            self.seen[0] = NAMES.index("end")
            time.sleep(0.02)  # so that a kill can hit the end
        except BaseException:
            traceback.print_exc()  # `os._exit` says nothing
        finally:
            sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def _slowed(function):
        def slowed(*args):
            time.sleep(SLOW_DISK_SECONDS)
            return function(*args)

        return slowed

    def _marked(self, part, function, log, before):
        index = NAMES.index(part)

        @functools.wraps(function)
        def marked(*args, **options):
            self.seen[0], self.seen[1 + index] = index, min(255, self.seen[1 + index] + 1)
            if before[:2] == (part, self.seen[1 + index]):
                before[2]()
            if part == "compute" and log is not None:
                run = options["start"]
                with open(log, "a") as file:
                    for i in range(args[2]):
                        file.write(f"{int(run.round) + i}\n")
            try:
                return function(*args, **options)
            finally:
                self.seen[0] = NAMES.index("between")

        return marked

    def reach(self, part, times=1) -> bool:
        """Wait until it is in a part for the n-th time; False if it ends before."""
        while self.seen[1 + NAMES.index(part)] < times:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return False
            time.sleep(0.0002)
        return True

    def kill(self) -> str | None:
        """SIGKILL to its process group -> where it was; None if it had ended well."""
        with contextlib.suppress(ProcessLookupError):  # it may not have made its group yet
            os.kill(self.pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        code, errors = self.wait()
        assert code in (0, -signal.SIGKILL), errors
        return NAMES[self.seen[0]] if code else None

    def wait(self):
        """-> exit code, what it wrote to stderr."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.seconds = time.perf_counter() - self.begun
        self.errors.seek(0)
        return code, self.errors.read().decode()


def result(out: Path):
    """All that a run gives, but for times: its table, summary, settings and final state."""
    summary = json.loads((out / "summary.json").read_text())
    for run in summary["runs"]:
        run.pop("seconds")
    return (
        (out / "metrics.csv").read_text(),
        summary,
        (out / "config.toml").read_text(),
        [(str(x.dtype), x.shape, x.tobytes()) for x in Checkpoints(out).load().leaves],
    )


def apart(function, *args):
    """function(*args) in a process of its own: no backend starts in this one."""
    inlet, outlet = os.pipe()
    if not (pid := os.fork()):
        try:
            os.write(outlet, json.dumps(function(*args)).encode())
        finally:
            os._exit(0)
    os.close(outlet)
    with open(inlet) as file:
        found = json.loads(file.read())
    os.waitpid(pid, 0)
    return found


def worth(rounds):
    plan, settings = build.build(dataclasses.replace(PLAN, rounds=rounds))
    return guarantee(plan, rounds, settings.delta).epsilon


def command(folder: Path, out: Path, rounds: int, *more):
    path = folder / "run.toml"
    path.write_text(config.dump(dataclasses.asdict(PLAN)))
    return "--config", path, "--rounds", rounds, "--out", out, *more


def check_directory(out: Path):
    """Check what holds after every kill: the last checkpoint is whole and the journal covers it."""
    store = Checkpoints(out)
    if store.latest() is not None:
        store.load()
        assert store.latest() <= Journal(out).read()["until"]


def finish(attempt):
    """Wait until a try ends well."""
    code, errors = attempt.wait()
    assert code == 0, errors


def straight(folder: Path, rounds: int) -> Path:
    out = folder / f"straight{rounds}"
    if not out.exists():
        finish(Try(*command(folder, out, rounds)))
    return out


def resumes(folder: Path, out: Path) -> bool:
    """Return whether a run resumes, and ends as one that was never stopped."""
    code, _ = Try(*command(folder, out, ROUNDS, "--resume")).wait()
    return code == 0 and result(out) == result(straight(folder, ROUNDS))


def killed(folder: Path, kills: int, seed: int) -> dict:
    """Kill one run at random moments and resume it until it is done."""
    rounds, at_end = 2 * kills // 3, kills // 6
    draw, out, log = random.Random(seed), folder / f"killed{seed}", folder / f"killed{seed}.jsonl"
    reference, hit, ended = straight(folder, rounds), collections.Counter(), 0
    begun = time.perf_counter()
    whole = 3.0  # seconds of a try that is not killed, as seen so far
    while ended < at_end or hit.total() - hit[DONE] < kills:
        last = (Checkpoints(out).latest() or 0) if out.exists() else 0
        attempt = Try(*command(folder, out, rounds, "--resume"), log=log)
        if last == rounds:  # all is computed: what is left are the files of the end
            ended += 1
            part = draw.choice(["config", "report", "report", "picture", "picture"])
            if attempt.reach(part):
                time.sleep(draw.uniform(0, dict(config=0.01, report=0.03, picture=0.5)[part]))
        elif draw.random() < 0.3:
            time.sleep(draw.uniform(0, whole))
        else:
            part = draw.choice(["journal", "checkpoint", "compute"])
            if attempt.reach(part, draw.randint(1, 3)):
                time.sleep(draw.choice([0, 0.002, 0.02, 0.1]) * draw.random())
        hit[attempt.kill() or DONE] += 1
        whole = 0.9 * whole + 0.1 * attempt.seconds
        check_directory(out)
    finish(Try(*command(folder, out, rounds, "--resume"), log=log))
    check_directory(out)
    run = json.loads((out / "summary.json").read_text())["runs"][0]
    privacy = run["privacy"][0]
    return dict(
        kills=hit.total() - hit[DONE],
        where=dict(sorted(hit.items())),
        rounds=rounds,
        equal=result(out) == result(reference),
        computed=len(log.read_text().split()),
        counted=privacy["epsilon"] == apart(worth, rounds),
        **{key: privacy[key] for key in ("epsilon", "unit", "view")},
        seconds=round(time.perf_counter() - begun, 1),
    )


# --- disks that fail

ROUNDS = 6


@contextlib.contextmanager
def small_disk(folder: Path, size="2m"):
    """A file system of its own; None where this user may not mount one."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True
    )
    try:
        yield None if done.returncode else folder
    finally:
        if not done.returncode:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path, left: int):
    """Fill a disk but for `left` bytes."""
    with open(disk / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0" * 4096)
    os.truncate(disk / "filler", max(0, (disk / "filler").stat().st_size - left))


def contents(out: Path) -> dict:
    """What is worth keeping: all files but those of the run that are rewritten as it goes."""
    return {
        str(p.relative_to(out)): p.read_bytes()
        for p in out.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def judged(check: str, tried, words: str, good: bool = True) -> dict:
    """Judge a refusal: one line that says where, what was expected, what came."""
    code, errors = tried
    lines = [
        line for line in errors.splitlines() if line.strip() and not line.startswith("jfl train ")
    ]  # without the progress bar
    message = lines[-1] if lines else ""
    parts = "expected ", ", but got ", words
    clear = message.startswith("jfl train: ") and all(part in message for part in parts)
    return dict(check=check, code=code, clear=clear and len(lines) == 1, message=message, good=good)


def full_disks(folder: Path):
    """A disk that fills up as a file is to be written: at each kind of file, with nothing or a page
    left."""
    for part, times, left, kept in [
        ("journal", 1, 0, None),
        ("config", 1, 0, None),
        ("checkpoint", 2, 4096, 2),
        ("journal", 7, 0, 4),
        ("report", 1, 0, 6),
        ("picture", 1, 4096, 6),
    ]:
        with small_disk(folder / f"disk-{part}-{times}") as disk:
            if disk is None:
                return
            out, full = disk / "run", functools.partial(fill, disk, left)
            tried = Try(*command(folder, out, ROUNDS), before=(part, times, full)).wait()
            store, words = Checkpoints(out), f"round {kept} in" if kept else "checkpoint: none"
            good = store.latest() == kept and words in tried[1]
            good = good and (kept is None or bool(store.load()))
            good = good and not any(map(temporary, out.rglob(".*")))
            row = judged(f"disk full, {part} {times}", tried, "No space left on device", good)
            (disk / "filler").unlink()
            yield row | dict(resumed=resumes(folder, out))


def read_only(folder: Path):
    """A disk that cannot be written."""
    with small_disk(folder / "read-only") as disk:
        if disk is None:
            return
        flip = lambda mode: subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)
        out, words = disk / "run", "a writable directory"
        finish(Try(*command(folder, out, 4)))
        before = contents(out)
        flip("ro")
        again = Try(*command(folder, out, ROUNDS, "--resume")).wait()
        fresh = Try(*command(folder, disk / "new", ROUNDS)).wait()
        rows = [
            judged("resume on a read-only disk", again, words, contents(out) == before),
            judged("a new run on a read-only disk", fresh, words, not (disk / "new").exists()),
        ]
        flip("rw")
        resumed = resumes(folder, out)
        yield from (row | dict(resumed=resumed) for row in rows)


def measure(out: Path, kills: int, seed: int, parts=("runs", "checks")):
    """Everything, in a folder that goes when it is done -> `out`, where parts that are not measured
    stay."""
    import matplotlib.backends.backend_agg  # noqa: F401  forked tries find them loaded
    import sklearn.datasets
    import tyro  # noqa: F401

    sklearn.datasets.load_digits()
    found = dict(title="Kills and disks that fail", runs=[], checks=[])
    if out.exists():
        found |= json.loads(out.read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["JFL_CACHE_DIR"] = str(folder / "cache")
        if "runs" in parts:
            found["runs"] = [killed(folder, kills, seed)]
        if "checks" in parts:
            found["checks"] = [
                row | dict(message=row["message"].replace(name, ""))
                for part in (full_disks, read_only)
                for row in part(folder)
            ]
    found |= dict(
        seed=seed, cores=os.cpu_count(), versions=environment()
    )  # starts a backend: after the last fork
    out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


# --- as tests


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("endurance") / "endurance.json"
    subprocess.run([sys.executable, __file__, "--out", out], check=True, timeout=1800)
    return json.loads(out.read_text())


@pytest.mark.slow
def test_fifty_kills_change_nothing(found):
    (run,) = found["runs"]
    assert run["kills"] >= 50 and run["equal"] and run["counted"]
    assert len(run["where"]) >= 6 and {"compute", "journal", "checkpoint"} <= set(run["where"])
    assert run["computed"] > run["rounds"]  # some rounds were computed more than once


@pytest.mark.slow
def test_every_refusal_is_clear_and_nothing_is_lost(found):
    assert found["checks"]
    for row in found["checks"]:
        assert row["code"] == 2 and row["clear"] and row["good"] and row["resumed"], row


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=54)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("runs", "checks"))
    given = parser.parse_args()
    measure(given.out, given.kills, given.seed, (given.only,) if given.only else ("runs", "checks"))
