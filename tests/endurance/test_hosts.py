"""Several processes as one run, on the loopback over gloo: the same results, and nothing lost when
one is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.paths import ROOT

from jfl.engine import devices
from jfl.engine.devices import LOST_PROCESS_WORDS

HERE = Path(__file__).parent
TRAIN = """-m jfl.cli train --algorithm scaffold --clients 12 --cohort 6 --rounds 24 --steps 2
    --batch 8 --noise-multiplier 1.1 --evaluate-every 2 --out""".split()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def begin(*command, **environment):
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ, JAX_PLATFORMS="cpu", **environment),
        cwd=ROOT,
        start_new_session=True,
    )


def ended(processes, seconds=600):
    """(stdout, stderr, exit code) of each; all are killed if one takes too long."""
    try:
        return [(*p.communicate(timeout=seconds), p.returncode) for p in processes]
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)


def together(count, *names):
    port = free_port()
    done = ended([begin(HERE / "on_hosts.py", count, i, port, *names) for i in range(count)])
    for _, error, code in done:
        assert code == 0, error[-3000:]
    return [json.loads(line) for line in done[0][0].splitlines() if line.startswith("{")]


def same_as_one(rows):
    from endurance import on_hosts

    one = dict(on_hosts.results([r["name"] for r in rows]))
    assert rows
    for row in rows:
        np.testing.assert_allclose(row["values"], one[row["name"]], rtol=2e-5, atol=2e-5)
    assert np.abs(np.array(rows[0]["values"])[:3]).max() > 1e-3


@pytest.mark.slow
def test_processes_with_unequal_memory_run_one_sweep():
    """Blocks of the same points, by what the smaller one has; else each would wait for another
    message."""
    from endurance import on_hosts

    (row,) = together(2, "sweep")
    lines, values = on_hosts.grid()
    assert "12 at a time" in lines[0] and "1 at a time on each of 2 devices" in row["name"][0]
    np.testing.assert_allclose(row["values"], values, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_four_processes_are_one():
    same_as_one(together(4, "fedavg", "scaffold", "states"))


def several(count):
    """Return the flags of `jfl train` in several processes, but for the number of each."""
    return ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", count]


def train(out, count, *more):
    """Begin `jfl train` in one or several processes."""
    cache = dict(JFL_CACHE_DIR=str(out.parent))
    if count == 1:
        return [begin(*TRAIN, out, *more, **cache)]
    command = [*TRAIN, out, *several(count), *more]
    return [begin(*command, "--process", i, **cache) for i in range(count)]


def metrics(out):
    lines = (out / "metrics.csv").read_text().splitlines()
    return [[float(v) if v else np.nan for v in line.split(",")[2:6]] for line in lines[1:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim, then, how", [(1, 1, signal.SIGKILL), (0, 4, signal.SIGKILL), (0, 1, signal.SIGTERM)]
)
def test_a_killed_process_stops_the_others_and_the_run_goes_on(victim, then, how, tmp_path):
    """The other processes stop with a clear message, and the run resumes from its checkpoint, also
    with another number of processes if nothing was released since."""
    straight, out = tmp_path / "straight", tmp_path / "run"
    ((_, error, code),) = ended(train(straight, 1))
    assert code == 0, error[-3000:]
    processes = train(out, 2)
    kept = lambda: [int(p.name) for p in (out / "checkpoints").glob("[0-9]*")]
    deadline = time.monotonic() + 500
    while len(kept()) < 2:
        assert time.monotonic() < deadline and all(p.poll() is None for p in processes)
        time.sleep(0.05)
    os.killpg(processes[victim].pid, how)
    killed = time.monotonic()
    if how == signal.SIGTERM:
        _, error, code = ended([processes[victim]], 100)[0]
        assert code == 143 and "terminated. Kept in" in error, error[-2000:]
    _, error, code = ended([processes[1 - victim]], 100)[0]
    assert code != 0 and time.monotonic() - killed < 60
    assert "gone" in error and "--resume" in error and "Traceback" not in error, error[-2000:]
    assert any(word in error.lower() for word in LOST_PROCESS_WORDS), error[-2000:]
    until = json.loads((out / "journal.json").read_text())["until"]
    done = max(kept())
    assert not (out / "summary.json").exists()
    codes = ended(train(out, then, "--resume"))
    if until > done:  # killed between the journal and the checkpoint
        assert all(code == 2 and "the program and device" in error for _, error, code in codes)
        return
    for _, error, code in codes:
        assert code == 0, error[-3000:]
    np.testing.assert_allclose(
        metrics(out)[: done // 2], metrics(straight)[: done // 2], rtol=1e-4, atol=1e-4
    )
    assert len(metrics(out)) == len(metrics(straight))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, environment", [(["--lr", "0.2"], {}), ([], dict(PYTHONOPTIMIZE="1"))]
)
def test_processes_that_differ_are_refused(tmp_path, arguments, environment):
    """Also where the config is one, but Python compiles it otherwise: each process would add
    independent noise."""
    command = [*TRAIN, tmp_path / "run", *several(2)]
    one = begin(*command, "--process", 0)
    other = begin(*command, "--process", 1, *arguments, **environment)
    for _, error, code in ended([one, other]):
        assert code == 2 and "the same config" in error and "Traceback" not in error, error[-2000:]
    assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]


GLOO = "UNKNOWN: Gloo AllGather failed: Read error: Connection reset by peer"
JaxError = jax.errors.JaxRuntimeError


@pytest.mark.parametrize(
    "error, expected",
    [
        (ValueError(GLOO), ConnectionError),
        (JaxError("UNAVAILABLE: Socket closed"), ConnectionError),
        (ValueError("config: expected a connection, but got none."), ValueError),
        (JaxError("RESOURCE_EXHAUSTED: Out of memory"), JaxError),
    ],
)
def test_what_says_that_a_process_is_gone(monkeypatch, error, expected):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(expected) as caught, devices.explain_lost_process():
        raise error
    assert (caught.value is error) == (expected is type(error))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apart", "sweep apart"])
def test_calls_that_differ_are_refused(name):
    """Of jfl.simulate and jfl.sweep, by a script that gives each process another seed."""
    port, words = free_port(), "expected the same config, data and versions in all processes"
    for _, error, code in ended([begin(HERE / "on_hosts.py", 2, i, port, name) for i in range(2)]):
        assert code == 1 and words in error, error[-2000:]


@pytest.mark.slow
def test_what_the_first_process_refuses_all_refuse(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("in the way")
    words = "an empty or new directory"
    for _, error, code in ended(train(tmp_path / "run", 2)):
        assert code == 2 and words in error and "Traceback" not in error, error[-2000:]
