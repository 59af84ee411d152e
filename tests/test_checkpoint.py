"""A run that stops, anyhow, goes on to the same bits; and no round that may have been seen goes uncounted."""
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import same_bits
from jax.experimental.compilation_cache import compilation_cache

from jfl import assemble, checkpoint, config, train
from jfl.checkpoint import Store, resume_attempt
from jfl.privacy.accounting import guarantee
from jfl.round import start

TINY = config.Config(clients=6, min_rows=8, model="logistic", sampler="without_replacement", cohort=3, batch=4, steps=2,
                     rounds=6, evaluate_every=1, checkpoint_every=2)
STATEFUL = dataclasses.replace(TINY, algorithm="scaffold", noise_multiplier=1.0)
ADAPTIVE = dataclasses.replace(TINY, unit="client", clip="adaptive", noise_multiplier=1.0)


def final(settings, out):
    """The run in the last checkpoint of a directory."""
    plan, _ = assemble.build(settings)
    store = Store(out)
    run = store.restore(start(jax.random.key(settings.seed), plan))
    store.close()
    return run


def table(out):
    return (out / "metrics.csv").read_text()


def files(out):
    return sorted((str(p.relative_to(out)), p.stat().st_mtime_ns) for p in out.rglob("*") if p.is_file())


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """Compiled programs are kept, as by the command line: these runs are one program, started often."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path_factory.mktemp("programs")), 0.0)):
        jax.config.update(name, value)
    compilation_cache.reset_cache()                       # it holds the folder of its first use
    yield
    for name, value in zip(names, before):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


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


def elsewhere(monkeypatch):
    """Resume under another program: here, another version."""
    other = dict(checkpoint.identity(), jax="0.0.0")
    monkeypatch.setattr(checkpoint, "identity", lambda: other)


# --- the same bits ------------------------------------------------------------------------------------------------

def test_a_resumed_run_is_the_straight_one_with_client_state(straight, half):
    train.train(STATEFUL, half, resume=True)
    assert same_bits(final(STATEFUL, half), final(STATEFUL, straight))
    assert table(half) == table(straight)


def test_a_resumed_run_is_the_straight_one_with_an_adaptive_clip(tmp_path):
    train.train(ADAPTIVE, tmp_path / "a")
    train.train(dataclasses.replace(ADAPTIVE, rounds=2), tmp_path / "b")
    entry = train.train(ADAPTIVE, tmp_path / "b", resume=True)
    a, b = final(ADAPTIVE, tmp_path / "a"), final(ADAPTIVE, tmp_path / "b")
    assert same_bits(a, b) and float(a.mechanism) != ADAPTIVE.clip_norm
    assert table(tmp_path / "a") == table(tmp_path / "b")
    assert entry["config"]["recomputed"] == 0


def test_a_finished_run_resumes_to_itself(straight, tmp_path):
    shutil.copytree(straight, tmp_path / "run")
    train.train(STATEFUL, tmp_path / "run", resume=True)
    assert table(tmp_path / "run") == table(straight)


def test_the_last_two_checkpoints_are_kept(straight):
    assert sorted(int(p.name) for p in (straight / "checkpoints").iterdir() if p.name.isdigit()) == [4, 6]


CHILD = """
import os, signal, sys, pathlib
from jfl import cli
from jfl.checkpoint import Store
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
where, at = sys.argv[1], int(sys.argv[2])
if where == "computing":                       # the journal is written, the rounds are not done
    announce = Store.announce
    def announced(self, until, *rest, **options):
        announce(self, until, *rest, **options)
        if until == at: die()
    Store.announce = announced
else:                                          # the checkpoint is written, but for the rename that completes it
    for module, name in ((os, "rename"), (os, "replace"), (pathlib.Path, "rename"), (pathlib.Path, "replace")):
        def moved(source, target, *rest, _move=getattr(module, name), **options):
            if pathlib.Path(target).name == str(at): die()
            return _move(source, target, *rest, **options)
        setattr(module, name, moved)
cli.main(sys.argv[3:])
"""


@pytest.mark.parametrize("where, at, last", [("computing", 6, 4), ("saving", 4, 2), ("computing", 1, None)])
def test_a_killed_run_resumes_to_the_straight_one(straight, tmp_path, monkeypatch, where, at, last):
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(config.dump(dataclasses.asdict(STATEFUL)))
    command = ["train", "--config", str(tmp_path / "run.toml"), "--out", str(out)]
    env = dict(os.environ, JFL_CACHE_DIR=str(tmp_path / "cache"))
    child = subprocess.run([sys.executable, "-c", CHILD, where, str(at), *command], env=env, capture_output=True, text=True,
                           timeout=300)
    assert child.returncode == -signal.SIGKILL, child.stderr
    store = Store(out)
    assert store.latest() == last
    store.close()
    entry = train.train(STATEFUL, out, resume=True)
    assert same_bits(final(STATEFUL, out), final(STATEFUL, straight))
    assert table(out) == table(straight)
    assert entry["config"]["recomputed"] == 0


def test_a_half_written_checkpoint_is_not_used(straight, half):
    steps = half / "checkpoints"
    shutil.copytree(steps / "4", steps / "5.orbax-checkpoint-tmp")
    shutil.rmtree(steps / "5.orbax-checkpoint-tmp" / "run")
    train.train(STATEFUL, half, resume=True)
    assert table(half) == table(straight)


# --- what does not fit ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change", [dict(lr=0.123), dict(noise_multiplier=2.0), dict(seed=7), dict(model="mlp"),
                                    dict(alpha=1.0)])
def test_another_config_is_refused_and_named(half, change):
    before = files(half)
    name, = change
    with pytest.raises(ValueError, match=name):
        train.train(dataclasses.replace(STATEFUL, **change), half, resume=True)
    assert files(half) == before


def test_another_config_is_refused_before_the_first_checkpoint_too(half):
    shutil.rmtree(half / "checkpoints")
    with pytest.raises(ValueError, match="lr"):
        train.train(dataclasses.replace(STATEFUL, lr=0.123), half, resume=True)


def test_fewer_rounds_than_done_are_refused(half):
    with pytest.raises(ValueError, match="rounds"):
        train.train(dataclasses.replace(STATEFUL, rounds=3), half, resume=True)


def test_a_checkpoint_without_its_journal_is_refused(half):
    """Nobody knows then which rounds were seen."""
    (half / "journal.json").unlink()
    with pytest.raises(ValueError, match="journal"):
        train.train(STATEFUL, half, resume=True)


# --- rounds that may have been seen ---------------------------------------------------------------------------------

def stopped(half, until):
    """As if the process had died on its way to round `until`."""
    journal = json.loads((half / "journal.json").read_text())
    (half / "journal.json").write_text(json.dumps(dict(journal, until=until)))


def test_the_same_program_counts_once(half):
    stopped(half, 6)
    entry = train.train(STATEFUL, half, resume=True)
    assert entry["config"]["recomputed"] == 0
    assert int(final(STATEFUL, half).attempt) == 0


def test_another_program_draws_new_noise_and_counts_twice(straight, half, monkeypatch):
    stopped(half, 6)
    elsewhere(monkeypatch)
    entry = train.train(STATEFUL, half, resume=True)
    run = final(STATEFUL, half)
    assert entry["config"]["recomputed"] == 2 and int(run.attempt) == 1
    assert not same_bits(run.server, final(STATEFUL, straight).server)
    plan, _ = assemble.build(STATEFUL)
    worth = [p["epsilon"] for p in entry["privacy"] if p["view"] == "server"]
    assert worth == [pytest.approx(guarantee(plan, 8, STATEFUL.delta).epsilon)]
    assert worth[0] > 1.01 * guarantee(plan, 6, STATEFUL.delta).epsilon
    summary = json.loads((half / "summary.json").read_text())
    assert summary["runs"][0]["privacy"][0]["epsilon"] == worth[0]


def test_another_program_with_nothing_to_recompute_counts_once(half, monkeypatch):
    elsewhere(monkeypatch)
    assert train.train(STATEFUL, half, resume=True)["config"]["recomputed"] == 0


def test_the_furthest_round_is_remembered_through_several_stops(tmp_path, monkeypatch, half):
    """Seen up to round 10; killed again at round 5 of the second try; then another program goes on from 4."""
    run, store = final(STATEFUL, half), Store(half)
    stopped(half, 10)
    again, recomputed = resume_attempt(run, store.journal())
    assert (int(again.attempt), recomputed) == (0, 0)
    store.announce(5, 0, 0)
    elsewhere(monkeypatch)
    again, recomputed = resume_attempt(run, store.journal())
    assert (int(again.attempt), recomputed) == (1, 6)
    store.announce(5, 1, 6)                    # and this program is killed on its way to 5 as well
    assert resume_attempt(run, store.journal())[1] == 6
    other = dict(checkpoint.identity(), jax="0.0.1")
    monkeypatch.setattr(checkpoint, "identity", lambda: other)
    again, recomputed = resume_attempt(run, store.journal())
    assert (int(again.attempt), recomputed) == (2, 7)


def test_the_identity_sees_flags_that_change_bits(monkeypatch):
    before = checkpoint.identity()
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert checkpoint.identity() != before
    assert json.loads(json.dumps(before)) == before


def test_writing_replaces_a_file_whole(tmp_path, monkeypatch):
    checkpoint.write(tmp_path / "a", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError):
        checkpoint.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_leaves_come_back_as_they_were(half):
    run = final(STATEFUL, half)
    assert same_bits(checkpoint.unpack(checkpoint.pack(run), run), run)
    assert np.array_equal(jax.random.key_data(run.key), jax.random.key_data(jax.random.key(0)))


def test_rounds_announced_beyond_the_end_are_charged(half):
    journal = json.loads((half / "journal.json").read_text())
    (half / "journal.json").write_text(json.dumps(journal | dict(until=9)))        # killed in a longer run of this plan
    entry = train.train(dataclasses.replace(STATEFUL, rounds=4), half, resume=True)
    worth = guarantee(assemble.build(STATEFUL)[0], 9, STATEFUL.delta).epsilon
    assert next(g["epsilon"] for g in entry["privacy"] if g["view"] == "server") == pytest.approx(worth)


def test_two_processes_in_one_directory_are_refused(half):
    with train.alone(half), pytest.raises(ValueError, match="no other process"):
        train.train(STATEFUL, half, resume=True)


def test_a_place_that_cannot_be_written_is_refused_before_computing(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(ValueError, match="--out"):
            train.train(STATEFUL, out)


@pytest.mark.parametrize("text", ["{}", "[]", "3", "{"])
def test_a_journal_that_is_none_is_refused(text, half):
    (half / "journal.json").write_text(text)
    with pytest.raises(ValueError, match="journal"):
        train.train(STATEFUL, half, resume=True)


def test_a_damaged_checkpoint_is_named(half):
    for path in (half / "checkpoints" / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(ValueError, match="checkpoints/4: need a readable checkpoint"):
        train.train(STATEFUL, half, resume=True)


def test_rounds_beyond_the_end_are_not_released_twice_by_a_longer_run(half):
    journal = json.loads((half / "journal.json").read_text())
    (half / "journal.json").write_text(json.dumps(journal | dict(until=6)))        # killed between 4 and 6
    entry = train.train(dataclasses.replace(STATEFUL, rounds=5), half, resume=True)
    assert (entry["config"]["recomputed"], entry["config"]["beyond"]) == (0, 1)
    entry = train.train(STATEFUL, half, resume=True)
    assert (entry["config"]["recomputed"], entry["config"]["beyond"]) == (0, 0)
    worth = guarantee(assemble.build(STATEFUL)[0], 6, STATEFUL.delta).epsilon
    assert next(g["epsilon"] for g in entry["privacy"] if g["view"] == "server") == pytest.approx(worth)
