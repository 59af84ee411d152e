"""A run on disk: what is resumed is what would have been, and what was seen is counted."""
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jfl import checkpoint
from jfl.config import Config
from jfl.train import train

SMALL = dict(clients=8, model="logistic", rounds=6, evaluate_every=1, steps=2, batch=8, cohort=4)
STATEFUL = Config(algorithm="scaffold", noise_multiplier=1.0, **SMALL)
ADAPTIVE = Config(unit="client", clip="adaptive", noise_multiplier=0.5, seed=3, server_optimizer="adam", server_lr=0.1,
                  **SMALL)


def files(out):
    summary = json.loads((out / "summary.json").read_text())["runs"][0]
    return (out / "metrics.csv").read_text(), {k: summary[k] for k in ("accuracy", "loss", "privacy", "rounds")}


def final_state(out, config):
    from jfl.assemble import build
    from jfl.round import start
    store = checkpoint.Store(out)
    run = store.restore(start(jax.random.key(config.seed), build(config)[0]))
    store.close()
    return checkpoint.pack(run)


def same(a, b):
    assert a.keys() == b.keys()
    for k in a:
        np.testing.assert_array_equal(a[k], b[k])


@pytest.mark.parametrize("config", [STATEFUL, ADAPTIVE], ids=["scaffold", "adaptive"])
def test_resume_equals_straight_to_the_bit(config, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(config, straight)
    train(dataclasses.replace(config, rounds=3), broken)
    assert checkpoint.Store(broken).latest() == 3
    train(config, broken, resume=True)
    same(final_state(straight, config), final_state(broken, config))
    assert files(straight) == files(broken)
    assert len(np.unique(final_state(straight, config)["0003"])) > 1           # parameters, and they moved


def test_cadence_changes_no_bit(tmp_path):
    train(STATEFUL, tmp_path / "often")
    sparse = dataclasses.replace(STATEFUL, evaluate_every=4, checkpoint_every=5)
    train(sparse, tmp_path / "sparse")
    same(final_state(tmp_path / "often", STATEFUL), final_state(tmp_path / "sparse", sparse))


def test_a_killed_run_resumes(tmp_path):
    flags = ["--algorithm", "scaffold", "--noise-multiplier", "1.0", "--clients", "8", "--model", "logistic", "--rounds",
             "400", "--evaluate-every", "4", "--steps", "2", "--batch", "8", "--cohort", "4", "--out"]
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "jfl.cli", "train", *flags, str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 180
    while len(list(out.glob("checkpoints/*"))) < 2 and time.monotonic() < until and process.poll() is None:
        time.sleep(0.02)
    assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "summary.json").exists()
    config = Config(algorithm="scaffold", noise_multiplier=1.0, clients=8, model="logistic", rounds=400,
                    evaluate_every=4, steps=2, batch=8, cohort=4)
    before = checkpoint.Store(out).latest()
    assert 0 < before < 400
    # the same backend flags as the killed process, or the program would be another one
    subprocess.run([*command, "--resume"], check=True, capture_output=True, timeout=300)
    subprocess.run([*command[:-1], str(tmp_path / "straight")], check=True, capture_output=True, timeout=300)
    same(final_state(out, config), final_state(tmp_path / "straight", config))
    assert files(out) == files(tmp_path / "straight")


def test_a_half_written_checkpoint_is_not_used(tmp_path):
    out = tmp_path / "run"
    train(dataclasses.replace(STATEFUL, rounds=3), out)
    last = sorted((out / "checkpoints").iterdir())[-1]
    half = out / "checkpoints" / "5.orbax-checkpoint-tmp"           # what orbax leaves when it is killed while it writes
    half.mkdir()
    (half / "run").mkdir()
    assert checkpoint.Store(out).latest() == int(last.name) == 3
    train(STATEFUL, out, resume=True)
    train(STATEFUL, tmp_path / "straight")
    assert files(out) == files(tmp_path / "straight")


@pytest.mark.parametrize("change, named", [(dict(lr=0.7), "lr"), (dict(noise_multiplier=2.0), "noise_multiplier"),
                                           (dict(seed=1), "seed"), (dict(algorithm="fedavg"), "algorithm")])
def test_another_config_is_refused_and_nothing_changes(change, named, tmp_path):
    out = tmp_path / "run"
    train(dataclasses.replace(STATEFUL, rounds=2), out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    with pytest.raises(ValueError, match=rf"checkpoint .*: need the config that made it; got {named}: "):
        train(dataclasses.replace(STATEFUL, **change), out, resume=True)
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*")}


def test_an_existing_run_is_not_overwritten(tmp_path):
    train(dataclasses.replace(STATEFUL, rounds=1), tmp_path / "run")
    with pytest.raises(ValueError, match="--resume"):
        train(STATEFUL, tmp_path / "run")


def announced(until, attempt=0, recomputed=0, **other):
    return dict(until=until, attempt=attempt, recomputed=recomputed, identity=checkpoint.identity() | other)


@pytest.mark.parametrize("journal, attempt, recomputed", [
    (None, 0, 0),
    (announced(4), 0, 0),                                   # nothing past the checkpoint
    (announced(6), 0, 0),                                   # the same program: the same release again
    (announced(6, jax="0.0.1"), 1, 2),                      # another program: two rounds released twice
    (announced(4, jax="0.0.1"), 0, 0),
    (announced(6, attempt=1, recomputed=2), 1, 2),          # killed again: the second attempt's noise is repeated
    (announced(7, attempt=1, recomputed=2, device="x"), 2, 5)])
def test_what_was_seen_is_counted(journal, attempt, recomputed):
    from jfl.assemble import build
    from jfl.round import start
    run = start(jax.random.key(0), build(STATEFUL)[0])
    run = dataclasses.replace(run, round=jax.numpy.int32(4))
    after, again = checkpoint.resume_attempt(run, journal)
    assert (int(after.attempt), again) == (attempt, recomputed)


def test_rounds_seen_twice_cost_epsilon(tmp_path):
    out = tmp_path / "run"
    plain = train(STATEFUL, tmp_path / "straight")
    train(dataclasses.replace(STATEFUL, rounds=3), out)
    journal = json.loads((out / "journal.json").read_text())
    journal["until"], journal["identity"]["jax"] = 5, "0.0.1"           # two more rounds were under way elsewhere
    (out / "journal.json").write_text(json.dumps(journal))
    entry = train(STATEFUL, out, resume=True)
    assert entry["config"]["recomputed"] == 2
    worth = train(dataclasses.replace(STATEFUL, rounds=8), tmp_path / "longer")
    assert entry["privacy"] == worth["privacy"] and entry["privacy"] != plain["privacy"]
    state, straight = final_state(out, STATEFUL), final_state(tmp_path / "straight", STATEFUL)
    assert any((state[k] != straight[k]).any() for k in state)          # new noise, not the old one again
