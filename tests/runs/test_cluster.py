"""Sweeps that stop and go on, and sweeps over a Ray cluster: nothing lost, nothing doubled, the
same numbers."""

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest

from jfl.engine.sweep import pad_row_tables
from jfl.runs import build as assemble
from jfl.runs import checkpoint, on_ray, pictures, sweep, train
from jfl.runs.config import Config
from jfl.runs.on_ray import Ray

CONFIG = Config(
    clients=6,
    min_rows=8,
    model="logistic",
    cohort=3,
    batch=4,
    steps=2,
    l2=1.0,
    rounds=4,
    evaluate_every=2,
)
AXES = dict(lr=[0.1, 1e30], seed=[0, 1, 2])  # the last rate fails
CODE = checkpoint.code()
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='needs Ray: pip install -e ".[ray]"'
)


def run(out, config=CONFIG, axes=AXES, **more):
    return sweep.sweep(config, axes, out, block=2, **more)


def lines(out):
    return [json.loads(line) for line in (out / sweep.FILE).read_text().splitlines()[1:]]


def runs(out):
    """summary.json but for the times."""
    return [
        {k: v for k, v in r.items() if k != "seconds"}
        for r in json.loads((out / "summary.json").read_text())["runs"]
    ]


def same(out, other):
    assert (out / "metrics.csv").read_bytes() == (other / "metrics.csv").read_bytes()
    assert runs(out) == runs(other)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Pictures, and programs that are traced to be refused, are of test_cli.py; here they would be
    most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "scan", lambda run, plan, rounds: run)
        patch.setattr(pictures, "draw_accuracy", lambda *args: None)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "straight"
    run(out)
    return out


@pytest.fixture
def computed(monkeypatch):
    """The blocks that are computed from now on."""
    blocks, compute = [], sweep.compute
    monkeypatch.setattr(
        sweep,
        "compute",
        lambda block, *memory, **how: blocks.append(block) or compute(block, *memory, **how),
    )
    return blocks


# --- what is kept


def test_a_sweep_keeps_every_point_once(straight):
    assert [len(r["history"]["loss"]) for r in lines(straight)] == [2] * 6
    assert len({r["key"] for r in lines(straight)}) == 6
    assert len({r["loss"] for r in runs(straight)[:3]}) == 3  # each has its own seed
    assert ["failed" in r for r in runs(straight)] == [False] * 3 + [True] * 3
    assert json.loads((straight / "manifest.json").read_text())["engine"] == dict(
        name="local", nodes=1, workers=1, devices=["cpu cpu"], resumed=0
    )


def test_a_sweep_that_was_stopped_goes_on_with_what_is_missing(
    straight, tmp_path, monkeypatch, computed
):
    out, compute, seen = tmp_path / "run", sweep.compute, []

    def stopped(block, *memory, **how):
        if computed:
            raise KeyboardInterrupt
        return compute(block, *memory, **how)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sweep, "compute", stopped)
        run(out)
    assert len(lines(out)) == 2 and not (out / "summary.json").exists()
    with pytest.raises(ValueError, match="--resume"):
        run(out)
    computed.clear()
    run(out, resume=True, watch=lambda **what: seen.append(what.get("completed")))
    assert [len(b.points) for b in computed] == [2, 2] and len(lines(out)) == len(
        {r["key"] for r in lines(out)}
    ) == 6
    assert [s for s in seen if s is not None] == [2, 4, 6]
    assert json.loads((out / "manifest.json").read_text())["engine"]["resumed"] == 2
    same(out, straight)
    computed.clear()
    run(out, resume=True)  # and what is done is done, failed points too
    assert not computed
    same(out, straight)


@pytest.mark.parametrize("kept, blocks", [(0.5, 3), (4.9, 2)])
def test_a_line_that_was_cut_off_is_not_there(straight, tmp_path, computed, kept, blocks):
    """Kept are so many lines, of which the first is the head; a block of which a point is there is
    run as a whole."""
    whole, out = (straight / sweep.FILE).read_bytes().splitlines(keepends=True), tmp_path / "run"
    out.mkdir()
    part = whole[int(kept)][: int(kept % 1 * len(whole[int(kept)]))]
    (out / sweep.FILE).write_bytes(b"".join(whole[: int(kept)]) + part)
    run(out, resume=True)
    assert len(computed) == blocks and len(lines(out)) == len({r["key"] for r in lines(out)}) == 6
    same(out, straight)


@pytest.mark.parametrize(
    "config, axes, words",
    [
        (dict(steps=3), {}, "steps: 2 there, 3 here"),
        ({}, dict(seed=[0, 2]), "axes seed"),
        ({}, dict(lr=[0.1]), "axes lr"),
        (dict(rounds=6), {}, "rounds: 4 there, 6 here"),
    ],
)
def test_another_sweep_does_not_go_on(straight, tmp_path, computed, config, axes, words):
    out = shutil.copytree(straight, tmp_path / "run")
    with pytest.raises(ValueError, match=words):
        run(out, dataclasses.replace(CONFIG, **config), AXES | axes, resume=True)
    assert not computed and (out / sweep.FILE).read_bytes() == (straight / sweep.FILE).read_bytes()


def test_another_source_or_other_data_do_not_go_on(straight, tmp_path, computed, monkeypatch):
    out = shutil.copytree(straight, tmp_path / "run")
    for target, name, other, words in (
        (checkpoint, "code", lambda: CODE | dict(source="other"), "source: .* there, 'other' here"),
        (sweep, "checksum", lambda fed: "other", "data"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=words):
            patch.setattr(target, name, other)
            run(out, resume=True)
    (out / sweep.FILE).unlink()
    with pytest.raises(ValueError, match=sweep.FILE):
        run(out, resume=True)
    assert not computed


def test_a_file_that_became_shorter_is_not_made_longer(straight, tmp_path):
    out = shutil.copytree(straight, tmp_path / "run")
    store = sweep.points_store(out)
    (out / sweep.FILE).write_bytes((out / sweep.FILE).read_bytes()[:40])
    with pytest.raises(ValueError, match="points.jsonl: expected .*: another process"):
        store.put([dict.fromkeys(sweep.LINE, "new")])
    assert len((out / sweep.FILE).read_bytes()) == 40


def test_the_order_of_axes_may_change(straight, tmp_path, computed):
    out = shutil.copytree(straight, tmp_path / "run")
    run(out, axes=dict(reversed(AXES.items())), resume=True)
    assert not computed
    of = lambda folder: {
        (r["seed"], r["config"]["lr"]): (r["loss"], r["accuracy"]) for r in runs(folder)
    }
    assert of(out) == of(straight)


# --- blocks


def test_blocks_hold_every_point_once_and_fit():
    build = lambda **fields: assemble.build(dataclasses.replace(CONFIG, **fields))[0]
    few, others = [build(partition_seed=s) for s in range(7)], [build(algorithm="scaffold")] * 3
    plans = pad_row_tables(few + others)
    assert len({p.fed.index.shape for p in plans}) == 1 < len({p.fed.index.shape for p in few})
    assert sweep.programs(plans, range(10), 1e12, 3) == [[[0, 3, 6], [1, 4], [2, 5]], [[7, 8, 9]]]
    one = sweep.client_bytes(plans[0]) * plans[0].chunk
    for memory, most, sizes in (
        (one * 2.5, 9, [2, 2, 2, 1]),
        (one / 2, 9, [1] * 7),
        (1e12, 9, [7]),
    ):
        found = sweep.programs(plans[:7], range(7), memory, most)
        assert [len(b) for b in found[0]] == sizes and sorted(sum(found[0], [])) == list(range(7))
    # points of one seed, which draw alike, stand together where all seeds have equally many
    for seeds, most, found in (
        ([0, 1, 2, 3] * 2, 5, [[0, 4, 2, 6], [1, 5, 3, 7]]),
        ([0, 1, 2] * 2, 5, [[0, 3, 2, 5], [1, 4]]),
        ([0, 0, 0, 1], 2, [[0, 2], [1, 3]]),
    ):
        assert sweep.programs(few[:1] * len(seeds), seeds, 1e12, most) == [found], seeds


@pytest.mark.parametrize(
    "seeds, size, more",
    [
        ([5, 6], 2, []),
        ([0, 1], 3, [(1, 2)]),  # seeds with a point each
        ([4, 4], 6, [(0, 0), (1, 0), (0, 1), (1, 1)]),  # with two each
        ([4, 4], 3, [(1, 4)]),  # two of the three points of a seed
        ([0, 0, 1], 5, [(2, 2), (2, 3)]),  # unequally many
    ],
)
def test_a_smaller_block_is_filled_up_so_that_its_program_is_that_of_the_others(seeds, size, more):
    assert sweep.filled(seeds, size) == [*enumerate(seeds), *more]


# --- a cluster that is none


class Pretended(types.ModuleType):
    """The part of Ray that is used, in one process, on two machines of four CPUs; the last task is
    done first."""

    class exceptions:
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), dict(cause=None))

    def __init__(self, address=None):
        super().__init__("ray")
        self.address, self.options, self.gone, self.more = address, [], [], {}

    def init(self, address, **options):
        self.address = address

    def is_initialized(self):
        return self.address is not None

    def shutdown(self):
        self.address = None

    def nodes(self):
        return [
            dict(Alive=True, Resources=dict(CPU=4.0, memory=2e9)),
            dict(Alive=True, Resources=dict(CPU=4.0, memory=8e9)),
            dict(Alive=False, Resources=dict(CPU=64.0)),
        ]

    def cluster_resources(self):
        return dict(CPU=8.0) | self.more

    def remote(self, **options):
        self.options.append(options)
        return lambda function: types.SimpleNamespace(remote=lambda *args: lambda: function(*args))

    def wait(self, refs, num_returns=1, timeout=None):
        return refs[-1:], refs[:-1]

    def get(self, ref):
        try:
            return ref()
        except self.exceptions.RayError:
            raise
        except Exception as cause:
            error = self.exceptions.RayTaskError("a traceback")
            error.cause = cause
            raise error from cause

    def cancel(self, ref):
        self.gone.append(ref)

    def get_runtime_context(self):
        return types.SimpleNamespace(get_node_id=lambda: "0123456789")


@pytest.fixture
def pretended(monkeypatch):
    ray = Pretended()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return ray


def test_over_a_cluster_the_numbers_are_the_same(straight, tmp_path, pretended, computed):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="5 CPU for a task, but got 4 CPU"):
        run(out, engine=Ray(cpus=5))
    run(out, engine=Ray())
    same(out, straight)
    assert len(computed) == 3 and not pretended.is_initialized()
    engine = json.loads((out / "manifest.json").read_text())["engine"]
    assert engine == dict(name="ray", nodes=2, workers=1, devices=["cpu cpu"], resumed=0)
    assert lines(out)[0]["worker"] == f"01234567/{os.getpid()}"
    asked = dict(num_cpus=1.0, num_gpus=0.0, scheduling_strategy="SPREAD")
    assert pretended.options[-1] == asked | dict(max_retries=on_ray.MAX_RETRIES)


def test_a_cluster_sets_the_size_of_blocks(pretended):
    opened = lambda *where, **how: Ray(*where, **how).open(lambda **what: None)
    with opened(cpus=2) as at:
        assert (at.nodes, at.places, at.memory) == (2, 4, 1e9)
        assert [at.most(n) for n in (1, 16, 1000)] == [1, 2, sweep.CPU_BLOCK_SIZE]
    variables = lambda: pretended.options[-1]["runtime_env"]["env_vars"]
    with opened("auto", gpus=0.5) as at:  # none has a GPU now: it may get one
        assert variables() == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.450"}
        at.accelerator = 1e9
        assert at.places == 1 and at.most(1000) == 500
    pretended.more = dict(GPU=2.0)
    with opened("auto"):
        assert pretended.options[-1]["num_gpus"] == 1 and "runtime_env" not in pretended.options[-1]
    with opened("auto", gpus=0):
        assert variables() == {"JAX_PLATFORMS": "cpu"}


def _refuses(config):
    raise ValueError("config: expected a dataset that is there, but got none.")


OTHER = "on the driver, old on a worker"


@pytest.mark.parametrize(
    "function, target, name, other, words",
    [
        ("look", checkpoint, "code", lambda: CODE | dict(source="old"), f"source .* {OTHER}"),
        ("work", checkpoint, "code", lambda: CODE | dict(jax="old"), f"jax .* {OTHER}"),
        ("work", on_ray, "checksum", lambda fed: "old", f"data .* {OTHER}"),
        ("work", on_ray.identity, "signature", lambda plan: "old", f"noise.*plan .* {OTHER}"),
        ("work", assemble, "build", _refuses, "^config: expected a dataset that is there"),
    ],
)
def test_a_worker_that_differs_is_refused(
    tmp_path, pretended, monkeypatch, computed, function, target, name, other, words
):
    original = getattr(on_ray, function)

    def there(*args):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, other)
            return original(*args)

    monkeypatch.setattr(on_ray, function, there)
    with pytest.raises(ValueError, match=words):
        run(tmp_path / "run", engine=Ray())
    assert not computed and not pretended.is_initialized()
    assert (tmp_path / "run").exists() == (function == "work")


@pytest.mark.parametrize(
    "kind, words",
    [("RayError", "6 tries of a block were lost"), ("RayTaskError", "XlaRuntimeError: out of")],
)
def test_a_block_that_is_lost_leaves_the_others(
    straight, tmp_path, pretended, monkeypatch, computed, kind, words
):
    out, work = tmp_path / "run", on_ray.work

    def fails(*args):
        if computed:
            error = getattr(Pretended.exceptions, kind)("lost")
            error.cause = type("XlaRuntimeError", (Exception,), {})("out of memory")
            raise error
        return work(*args)

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{words}.*--resume"):
        patch.setattr(on_ray, "work", fails)
        run(out, engine=Ray())
    assert len(lines(out)) == 2 and pretended.gone
    run(out, resume=True)  # goes on, also here
    assert len(lines(out)) == 6
    same(out, straight)


def test_without_ray_or_where_nobody_answers_it_is_said(tmp_path, pretended, monkeypatch):
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(ValueError, match="--address: expected a Ray cluster"):
            Ray(address).open(lambda **what: None).__enter__()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[ray\]"'):
        run(tmp_path / "run", engine=Ray())
    assert not (tmp_path / "run").exists()


# --- a cluster of this machine, and kills

LONG = dataclasses.replace(CONFIG, rounds=2000, evaluate_every=200)  # seconds for a block
MANY = dict(algorithm=["fedavg", "scaffold"], lr=[0.1, 0.2, 0.3], seed=[0, 1])
CLI = """--clients 6 --min-rows 8 --model logistic --cohort 3 --batch 4 --steps 2 --l2 1
    --rounds 2000 --evaluate-every 200 --block 2""".split()
CLI += [f"--sweep={k}={','.join(map(str, v))}" for k, v in MANY.items()]


@needs_ray
@pytest.mark.slow
def test_workers_that_are_killed_lose_and_double_nothing(tmp_path):
    from experiments.bench import cluster as experiment

    sweep.sweep(LONG, MANY, tmp_path / "local", block=2)
    found = experiment.shot(LONG, MANY, 2, tmp_path)
    assert [k["what"] for k in found["kills"]] == ["process", "machine"]
    found = experiment.compared(tmp_path)
    assert found["points"] == found["lines"] == 12 and found["doubled"] == 0 and found["same_rows"]
    assert found["largest_difference"] < 1e-5 and found["machines"] == 2 and found["processes"] >= 2


@needs_ray
@pytest.mark.slow
def test_a_cluster_of_this_machine_comes_and_goes(tmp_path, monkeypatch):
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    engine = Ray(cpus=0.5)
    run(tmp_path / "ray", engine=engine)
    assert not ray.is_initialized()
    run(tmp_path / "local")
    of = lambda out: [r["history"] for r in sorted(lines(out), key=lambda r: r["key"])]
    assert of(tmp_path / "ray") == of(tmp_path / "local")
    # what a task refuses comes out as it is, and is not tried again
    monkeypatch.setattr(checkpoint, "code", lambda: CODE | dict(source="old"))
    with pytest.raises(ValueError, match="^--engine ray: expected .* source old on the driver"):
        run(tmp_path / "other", engine=engine)
    assert not (tmp_path / "other").exists() and not ray.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=needs_ray)])
def test_a_driver_that_is_killed_goes_on(tmp_path, engine, monkeypatch):
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "jfl.cli", "sweep", *CLI, "--engine", engine]
    out = tmp_path / "run"
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    child = subprocess.Popen([*command, "--out", str(out)], **quiet)
    count = lambda: (out / sweep.FILE).read_bytes().count(b"\n")
    while child.poll() is None and not ((out / sweep.FILE).exists() and count() > 2):
        time.sleep(0.1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = (out / sweep.FILE).read_bytes()
    assert 2 <= len(kept.splitlines()) - 1 < 12 and not (out / "summary.json").exists()
    again = subprocess.run([*command, "--out", str(out), "--resume"], capture_output=True)
    assert again.returncode == 0
    assert (out / sweep.FILE).read_bytes().startswith(kept.rpartition(b"\n")[0])
    assert len(lines(out)) == len({r["key"] for r in lines(out)}) == 12
    sweep.sweep(LONG, MANY, tmp_path / "straight", block=2)
    same(out, tmp_path / "straight")
