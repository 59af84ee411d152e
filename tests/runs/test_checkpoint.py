"""A run that stops, anyhow, goes on to the same bits; and no round that may have been seen goes
uncounted."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers.problems import same_bits

from jfl.core import files as atomic
from jfl.core.errors import HealthError, ResumeRefused
from jfl.engine.round import init
from jfl.privacy.guarantees import guarantee
from jfl.runs import build, checkpoint, config, directory, pictures, train
from jfl.runs.checkpoint import Checkpoints, Journal

TINY = config.Config(
    clients=6,
    min_rows=8,
    model="logistic",
    sampler="without_replacement",
    cohort=3,
    batch=4,
    steps=2,
    rounds=6,
    evaluate_every=1,
    checkpoint_every=2,
)
STATEFUL = dataclasses.replace(TINY, algorithm="scaffold", noise_multiplier=1.0)
ADAPTIVE = dataclasses.replace(TINY, unit="client", clip="adaptive", noise_multiplier=1.0)


def final(settings, out):
    """The run in the last checkpoint of a directory."""
    plan, _ = build.build(settings)
    return Checkpoints(out).restore(init(jax.random.key(settings.seed), plan))


def table(out):
    return (out / "metrics.csv").read_text()


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def resumed(out, **change):
    return train.train(dataclasses.replace(STATEFUL, **change), out, resume=True)


def as_straight(out, straight):
    """Whether a directory holds the run without a stop, to the bit."""
    same = same_bits(final(STATEFUL, out), final(STATEFUL, straight))
    return same and table(out) == table(straight)


def rewrite(half, **changes):
    """Another journal; `until`: as if the process had died on its way to this round."""
    record = Journal(half).read() | changes
    (half / "journal.json").write_text(json.dumps(dict(record, digest=atomic.digest_of(record))))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pictures, and programs that are traced to be refused, are of test_cli.py; here they would be
    most of the time."""
    monkeypatch.setattr(pictures, "draw_accuracy", lambda *_: None)
    monkeypatch.setattr(train, "scan", lambda run, plan, rounds: run)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The stateful run without a stop."""
    out = tmp_path_factory.mktemp("runs") / "straight"
    train.train(STATEFUL, out)
    return out


@pytest.fixture(scope="module")
def stopped_at_four(straight, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "half"
    train.train(dataclasses.replace(STATEFUL, rounds=4), out)
    return out


@pytest.fixture
def half(stopped_at_four, tmp_path):
    """The same run, stopped after four of its six rounds; a copy for each test."""
    return shutil.copytree(stopped_at_four, tmp_path / "run")


@pytest.fixture
def elsewhere(monkeypatch):
    """Call it to go on with another program: here, of another version."""
    other = dict(checkpoint.environment(), jax="0.0.0")
    return lambda: monkeypatch.setattr(checkpoint, "environment", lambda: other)


# --- the same bits


def test_a_resumed_run_is_the_straight_one_whatever_a_kill_left(straight, half):
    """The last two checkpoints are kept; a half-written one is not used, and goes."""
    whole = (half / "checkpoints" / "4").read_bytes()
    (half / "checkpoints" / ".5.0123abcd").write_bytes(whole[:-9])
    (half / ".journal.json.0123abcd").write_text("{")
    resumed(half)
    assert as_straight(half, straight) and not list(half.rglob(".*.0123abcd"))
    assert Checkpoints(half).rounds() == [6, 4]


@pytest.mark.slow
def test_a_resumed_run_is_the_straight_one_with_an_adaptive_clip(tmp_path):
    train.train(ADAPTIVE, tmp_path / "a")
    train.train(dataclasses.replace(ADAPTIVE, rounds=2), tmp_path / "b")
    train.train(ADAPTIVE, tmp_path / "b", resume=True)
    a, b = final(ADAPTIVE, tmp_path / "a"), final(ADAPTIVE, tmp_path / "b")
    assert same_bits(a, b) and float(a.mechanism) != ADAPTIVE.clip_norm
    assert table(tmp_path / "a") == table(tmp_path / "b")


class Death(BaseException):
    """Nobody catches it."""


@pytest.mark.by_default("saving-4-2")
@pytest.mark.parametrize("where, at, last", [("computing", 6, 4), ("saving", 4, 2)])
def test_a_run_that_dies_resumes_to_the_straight_one(
    straight, tmp_path, monkeypatch, where, at, last
):
    """In this process, which lives on."""
    announce, move = Journal.announce, os.replace

    def announced(self, until, *rest, **options):
        announce(self, until, *rest, **options)
        if until == at:
            raise Death

    def moved(source, target, *rest, **options):
        if os.path.basename(target) == str(at):
            raise Death
        return move(source, target, *rest, **options)

    with monkeypatch.context() as patch, pytest.raises(Death):
        if where == "computing":
            patch.setattr(Journal, "announce", announced)
        else:
            patch.setattr(os, "replace", moved)
        train.train(STATEFUL, tmp_path)
    assert Checkpoints(tmp_path).latest() == last
    resumed(tmp_path)
    assert as_straight(tmp_path, straight)


def test_the_journal_is_the_first_file(tmp_path, monkeypatch):
    """A directory with files and no journal is refused, so no kill may leave one; and a run that
    was killed over it begins anew."""
    seen = []

    def stop(path, *_):
        seen.append(path.name)
        raise OSError("stop")

    with monkeypatch.context() as patch:
        for module in (atomic, checkpoint, train):
            patch.setattr(module, "write", stop)
        with pytest.raises(OSError, match="stop"):
            train.train(STATEFUL, tmp_path)
    assert seen == ["journal.json"]
    (tmp_path / ".journal.json.0123abcd").write_text("{")
    train.train(dataclasses.replace(STATEFUL, rounds=2), tmp_path)


# --- what does not fit


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(lr=0.123), "lr"),
        (dict(seed=7), "seed"),
        (dict(noise_multiplier=2.0), "noise_multiplier: 1.0 there, 2.0 here"),
        (dict(rounds=3), "rounds"),
    ],
)
def test_another_config_is_refused_and_named(half, change, words):
    before = contents(half)
    with pytest.raises(ValueError, match=words):
        resumed(half, **change)
    assert contents(half) == before


def test_a_run_that_began_before_an_option_existed_goes_on_at_its_default(half):
    recorded = Journal(half).read()["config"]
    assert recorded.pop("clip_decay") == 1
    rewrite(half, config=recorded)
    with pytest.raises(ValueError, match="clip_decay: 1.0 there, 0.9 here"):
        resumed(half, clip_decay=0.9)
    resumed(half)


def test_a_checkpoint_without_its_journal_is_refused(half):
    """Nobody knows then which rounds were seen."""
    (half / "journal.json").unlink()
    with pytest.raises(ValueError, match="journal.*new --seed"):
        resumed(half)


def test_another_plan_is_refused_with_what_differs(half):
    """The config may be the same and the plan another one, of another version of jfl or of a user's
    own function."""
    plan = Journal(half).read()["plan"]
    rewrite(half, plan=plan | dict(weights=2.5))
    before = contents(half)
    with pytest.raises(ValueError, match="got weights: 2.5 there, .* here. Another plan has other"):
        resumed(half)
    assert contents(half) == before


@pytest.mark.parametrize("until", [3, 0])
def test_a_journal_older_than_its_checkpoint_is_refused(half, until):
    rewrite(half, until=until)
    with pytest.raises(ResumeRefused, match="at least as recent as the checkpoint of round 4"):
        resumed(half)


@pytest.mark.parametrize(
    "text, words",
    [("{}", "format 1"), ("[]", "JSON"), (None, "another digest"), ('{"format": 7}', "format 7")],
)
def test_a_journal_that_is_none_is_refused(text, words, half):
    path = half / "journal.json"
    path.write_text(path.read_text().replace('"until": 4', '"until": 3') if text is None else text)
    with pytest.raises(ValueError, match=f"journal .*{words}"):
        Journal(half).read()


@pytest.mark.by_default("{'seed': 1}")
@pytest.mark.parametrize("other", [dict(seed=1), dict(lr=0.01)], ids=str)
def test_a_checkpoint_of_another_run_is_refused(half, other, tmp_path):
    """One that was copied or synchronised into the directory of a run of the same shapes."""
    (name,) = other
    train.train(dataclasses.replace(STATEFUL, rounds=4, **other), tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "checkpoints", half / "checkpoints", dirs_exist_ok=True)
    with pytest.raises(ResumeRefused, match=rf"{name}: .* there, .* here"):
        resumed(half)


def test_every_part_of_a_checkpoint_is_watched(half):
    """A flip anywhere is an error, never another state."""
    path, store = half / "checkpoints" / "4", Checkpoints(half)
    whole = path.read_bytes()
    damaged = [b"", whole[:-1], whole + b"0"]
    for at in np.linspace(0, len(whole) - 1, 100).astype(int):
        damaged.append(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="checkpoints/4: expected"):
            store.load()
    path.write_bytes(whole.replace(b"jfl-checkpoint 5 ", b"jfl-checkpoint 6 ", 1))
    with pytest.raises(ValueError, match="checkpoints/4: expected .*format 6"):
        store.load()


def test_compilation_in_any_process_is_no_part_of_the_seconds_of_a_round(half, monkeypatch):
    """Here each process takes 10 seconds, of which 8 are compilation."""
    path = Checkpoints(half)
    saved, run = path.load(), final(STATEFUL, half)
    path.save(run, saved.meta | dict(seconds=10.0, compile=8.0))
    monkeypatch.setattr(train.Stopwatch, "read", lambda self: (10.0, 8.0))
    assert resumed(half)["seconds"] == dict(compile=16.0, total=20.0, per_round=4.0 / 6)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(straight, half):
    (half / "checkpoints" / "4").unlink()
    resumed(half)
    assert as_straight(half, straight)


# --- rounds that may have been seen

REFUSED = "expected the program and device that released rounds 5 to 6, but got another "


def test_the_same_program_releases_the_same_rounds_again(straight, half):
    rewrite(half, until=6)
    with pytest.raises(ValueError, match="expected >= 6, the rounds already released, but got 5"):
        resumed(half, rounds=5)
    entry = resumed(half)
    assert as_straight(half, straight)
    worth = guarantee(build.build(STATEFUL)[0], 6, STATEFUL.delta).epsilon
    assert [g["epsilon"] for g in entry["privacy"] if g["view"] == "server"] == [worth]


def test_another_program_does_not_release_rounds_again(half, elsewhere):
    rewrite(half, until=6)
    before = contents(half)
    elsewhere()
    with pytest.raises(ResumeRefused, match=f"{REFUSED}jax. Resume there: other rounding errors"):
        resumed(half)
    assert contents(half) == before


def test_another_program_continues_where_nothing_is_released_again(half, elsewhere):
    elsewhere()
    resumed(half)
    assert Journal(half).read()["since"] == 4


def test_a_key_that_changed_is_another_program(half, monkeypatch):
    """The key is compared itself, since nothing else in the record changes with it here."""
    rewrite(half, until=6)
    same = checkpoint.environment()
    monkeypatch.setattr(checkpoint, "environment", lambda: same)
    jax.config.update("jax_random_seed_offset", 5)
    try:
        with pytest.raises(ResumeRefused, match=f"{REFUSED}key"):
            resumed(half)
    finally:
        jax.config.update("jax_random_seed_offset", 0)


def test_nothing_is_computed_before_the_journal_knows_what_was_shown(tmp_path, monkeypatch):
    """The journal is ahead of the log, the terminal, the checkpoints and a report of failure."""
    simulate, book = train.simulate, Journal(tmp_path)
    until = lambda: book.read()["until"]
    save, at = Checkpoints.save, []

    def saved(self, run, meta):
        assert until() >= int(run.round)
        save(self, run, meta)

    def failed(*args, **options):
        result = simulate(*args, **options)
        if int(result.run.round) == 5:
            raise HealthError("round 5", result.run, None)
        return result

    def watch(round, **_):
        at.append(round)
        assert until() == round

    monkeypatch.setattr(Checkpoints, "save", saved)
    monkeypatch.setattr(train, "simulate", failed)
    with pytest.raises(HealthError, match="Last good checkpoint: round 4"):
        train.train(STATEFUL, tmp_path, watch=watch)
    assert at == [1, 2, 3, 4] and until() == 5


def test_a_finished_run_that_goes_on_has_no_summary_until_it_ends(half, monkeypatch):
    """Its epsilon is that of fewer rounds than may be seen from now on."""
    assert (half / "summary.json").exists()

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "simulate", killed)
    with pytest.raises(KeyboardInterrupt):
        resumed(half)
    assert not (half / "summary.json").exists() and Journal(half).read()["until"] == 4


def test_the_furthest_round_is_remembered_through_several_stops(half, elsewhere):
    """Seen up to round 10, then stopped again at round 5: another program may not go on from 4."""
    book = Journal(half, **{k: Journal(half).read()["program"][k] for k in ("layout", "key")})
    rewrite(half, until=10)
    assert book.resume(4) == 0
    book.announce(5, 0)
    assert book.read()["until"] == 10
    elsewhere()
    with pytest.raises(ResumeRefused, match="rounds 5 to 10"):
        book.resume(4)


def test_a_program_does_not_release_the_rounds_of_an_earlier_one(tmp_path, elsewhere):
    """One program goes to round 4, another one to 5: without the checkpoint of round 4 the second
    one would release the rounds of the first one again."""
    book = Journal(tmp_path)
    book.announce(4, 0)
    elsewhere()
    assert book.resume(4) == 4
    book.announce(5, 4)
    assert book.resume(4) == book.resume(5) == 4
    for done in (0, 2):
        with pytest.raises(ResumeRefused, match=f"released rounds {done + 1} to 5"):
            book.resume(done)


# --- what a program is

IDENTITY = """
from jfl.core import identity
from jfl.runs import build, checkpoint
from jfl.runs.config import Config
config = Config(clients=6, min_rows=8, model="logistic", cohort=3, batch=4, noise_multiplier=1.0)
plan, _ = build.build(config)
print(identity.signature(identity.describe(plan)), checkpoint.code()["python"])
"""


@pytest.mark.slow
def test_python_that_compiles_otherwise_has_the_same_noise_and_is_another_program():
    """Noise does not follow from compiled code; what computes it is in the environment record."""

    def of(level):
        done = subprocess.run(
            [sys.executable, "-c", IDENTITY],
            env=os.environ | dict(PYTHONOPTIMIZE=level),
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split(" ", 1)

    one, again, other = of("0"), of("0"), of("1")
    assert one == again and one[0] == other[0] and one[1] != other[1]


def test_where_bits_are_not_repeated_every_process_is_a_program(tmp_path, monkeypatch):
    gpu = dict(checkpoint.environment(), backend="gpu")
    monkeypatch.setattr(checkpoint, "environment", lambda: dict(gpu))
    mine = checkpoint.program()
    assert mine == checkpoint.program()
    monkeypatch.setattr(checkpoint, "PROCESS", "another")
    assert mine != checkpoint.program()
    gpu_book = Journal(tmp_path)
    gpu_book.announce(2, 0)
    monkeypatch.setattr(checkpoint, "PROCESS", "a third")
    assert gpu_book.resume(2) == 2  # nothing is released again
    with pytest.raises(ResumeRefused, match=f"start with XLA_FLAGS={checkpoint.DETERMINISTIC}"):
        gpu_book.resume(1)
    gpu["flags"] = f"--xla_a=1 {checkpoint.DETERMINISTIC}"
    assert checkpoint.program() == gpu


def test_the_program_is_another_by_flags_cores_and_settings_that_change_bits(monkeypatch):
    before = checkpoint.environment()
    assert json.loads(json.dumps(before)) == before
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert checkpoint.environment() != before
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(99)))
        assert checkpoint.environment() == before | dict(cores=99)
    with jax.default_matmul_precision("bfloat16"):
        assert checkpoint.environment()["settings"] != before["settings"]
    monkeypatch.setenv("NPROC", "1")
    assert checkpoint.environment()["settings"] != before["settings"]


# --- places that cannot be written


def test_two_processes_in_one_directory_are_refused(half):
    with directory.locked(half), pytest.raises(ValueError, match="no other process"):
        resumed(half)


def test_locks_that_cannot_be_had_are_not_taken_for_another_process(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        with pytest.raises(ValueError, match="a file system with locks.*No locks available"):
            directory.locked(tmp_path).__enter__()
    (tmp_path / "full" / ".lock").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "full", tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(ValueError, match="--out: expected"):
            train.train(STATEFUL, out)


@contextlib.contextmanager
def files_up_to(size):
    """The kernel refuses to write beyond so many bytes of a file, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fails_keeps_the_last_checkpoint_and_says_so(straight, half):
    kept = (half / "checkpoints" / "4").read_bytes()
    with files_up_to(len(kept) // 2), pytest.raises(OSError, match="a writable disk") as error:
        resumed(half)
    message = str(error.value)
    assert f"Last good checkpoint: round 4 in {half}." in message and "--resume" in message
    assert (half / "checkpoints" / "4").read_bytes() == kept
    assert Checkpoints(half).rounds() == [4, 2]
    assert not [p for p in half.rglob("*") if atomic.temporary(p)]
    resumed(half)
    assert as_straight(half, straight)


def test_a_disk_that_fails_at_once_leaves_nothing(tmp_path):
    with files_up_to(100), pytest.raises(OSError, match="journal.json. Last good checkpoint: none"):
        train.train(STATEFUL, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
