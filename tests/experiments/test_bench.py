"""What the benchmark times is what it says: jfl's driver against the numpy reference that every
peer's driver is held to."""

import importlib
import json
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.paths import ROOT

FOLDER = ROOT / "experiments" / "bench" / "peers"


@pytest.fixture
def workloads(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("workloads")
    for name in ("workloads", "jfl_peer", "vmapped_peer", "jax_models"):
        sys.modules.pop(name, None)


def rows(clients=3, count=10, features=784):
    rng = np.random.default_rng(0)
    return SimpleNamespace(
        x=rng.normal(size=(clients, count, features)).astype("f4"),
        y=rng.integers(0, 10, (clients, count)).astype("i4"),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "driver, modes, off", [("jfl", ("private", "vmap"), 1e-5), ("vmapped", ("private",), 1e-4)]
)
def test_a_driver_clips_averages_and_adds_noise(workloads, driver, modes, off):
    """And the check of that can fail: without a clip, or with twice the noise."""
    build = importlib.import_module(f"{driver}_peer").build
    spec = SimpleNamespace(**workloads.WORKLOADS["W1"], block=1)
    unclipped = lambda s, d, m: build(s, d, "plain")
    loud = lambda s, d, m: build(SimpleNamespace(**vars(s) | dict(noise=2 * s.noise)), d, m)
    # What the author of a hand-written program need not care about, the tests of jfl refuse.
    with jax.numpy_rank_promotion("allow"):
        for mode in modes:
            said = workloads.check(build, spec, rows(), mode)
            assert said["off_reference_clip_1"] < off
            assert abs(said["noise_over_wanted"] - 1) < 0.04
        for wrong, words in ((unclipped, "bound|reference"), (loud, "noise")):
            with pytest.raises(AssertionError, match=words):
                workloads.check(wrong, spec, rows(), "private")


TOLD = {  # a row of a table of timings: tool, its modes
    "**jfl**": ("jfl", ["private"]),
    "jfl with": ("jfl", ["vmap"]),
    "FedJAX, ": ("FedJAX", ["jit"]),
    "FedJAX with": ("FedJAX", ["control"]),
    "loop over": ("optax loop", ["optax", "jax_privacy"]),
    "PyTorch": ("PyTorch + Opacus", ["hooks", "ghost", "plain"]),
    "pfl": ("pfl-research", ["vmap", "ghost", "central"]),
    "Flower": ("Flower", ["hooks", "ghost", "client"]),
}


@pytest.mark.parametrize(
    "page, head, rows, least",
    [("docs/speed.md", "## Compared with other tools", 8, 51), ("README.md", "## Speed", 5, 25)],
)
def test_the_pages_tell_what_was_timed(page, head, rows, least):
    timed = {
        (r["workload"], r["tool"], r["mode"]): r["seconds"]
        for r in json.loads((ROOT / "experiments" / "results" / "round.json").read_text())["rows"]
        if "seconds" in r and not r.get("one_process")
    }
    lines = (ROOT / page).read_text().split(head)[1].split("\n\n")[2].splitlines()
    starts = [s for s in TOLD if any(one.startswith(f"| {s}") for one in lines)]
    assert len(starts) == len(lines) - 2 == rows
    workloads, checked = re.findall(r"W\d", lines[0]), 0
    for start in starts:
        tool, modes = TOLD[start]
        (line,) = (one for one in lines if one.startswith(f"| {start}"))
        for workload, cell in zip(workloads, line.split("|")[2:]):
            told = [float(n) for n in re.findall(r"\d+(?:\.\d+)?", cell)]
            every = [timed.get((workload, tool, mode)) for mode in modes]
            found = [seconds for seconds in every if seconds is not None]
            wanted = found + [t / timed[workload, "jfl", "private"] for t in found]
            assert not told or len(told) in (len(found), len(wanted))
            for shown, t in zip(told, wanted):  # two digits, or one after the point
                assert abs(shown - t) <= max(0.05 * t, 0.05 * (t > 0.5)), (line, wanted)
                checked += 1
    assert checked >= least


@pytest.mark.slow
def test_audits_of_every_kind(tmp_path):
    """Few runs: nothing that is proved is contradicted, and what is printed is refuted."""
    out = tmp_path / "audits.json"
    command = [sys.executable, "-m", "experiments.bench.audits", "--trials", "2000"]
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 20 and not any(row["contradicted"] for row in rows.values())
    assert [name for name, row in rows.items() if row["refuted"]] == [
        "client, wavelet noise as printed"
    ]


def test_the_guide_shows_the_stored_rates_of_membership_inference():
    stored = json.loads((ROOT / "experiments/results/audits_of_membership.json").read_text())[
        "rows"
    ]
    guide = (ROOT / "docs" / "guides" / "auditing.md").read_text()
    for row in stored:
        noise = "none" if row["noise"] is None else f"{row['noise']:.2g}"
        (line,) = re.findall(rf"^\| {noise} \|.*\| {row['attack']} \|.*$", guide, re.M)
        cells = [cell.strip() for cell in line.split("|")[4:-1]]
        assert cells[:2] == [f"{row['auroc']:.2f}", f"{row['auroc_bound']:.2f}"]
        rates = [f"{row[name]:.2g}" for name in ("tpr", "bound", "allowed")]
        shown = {0.01: cells[2:5], 0.001: cells[5:]}
        assert row["fpr"] not in shown or shown[row["fpr"]] == rates
        assert not row["contradicted"] and row["shadows"] == 1024


@pytest.mark.slow
def test_membership_is_inferred_with_few_shadows(tmp_path):
    out = tmp_path / "membership.json"
    command = [sys.executable, "-m", "experiments.bench.membership", "--shadows", "64"]
    subprocess.run([*command, "--out", str(out)], check=True, cwd=ROOT, timeout=600)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 18 and not any(row["contradicted"] for row in rows)


@pytest.mark.slow
def test_programs_of_a_device_are_compiled_by_other_processes(tmp_path):
    """The seconds to compile are those of the first call, and older rows are kept."""
    out, cache = tmp_path / "device.json", tmp_path / "programs"
    out.write_text('{"rows": [{"workload": "W1", "mode": "old", "device": "none"}]}')
    command = [sys.executable, "-m", "experiments.bench.device", "--tiny", "--only", "lstm"]
    command += ["--modes", "plain", "--cache", str(cache), "--out", str(out)]
    subprocess.run(command + ["--compile-only", "2"], check=True, cwd=ROOT, timeout=300)
    programs = sorted(cache.glob("jit_block-*-cache"))
    subprocess.run(command, check=True, cwd=ROOT, timeout=300)
    assert len(programs) == 1 and sorted(cache.glob("jit_block-*-cache")) == programs
    old, row = json.loads(out.read_text())["rows"]
    compiled = json.loads((cache / "lstm, jfl, plain.json").read_text())
    assert old["mode"] == "old" and compiled.items() <= row.items()
    assert row["cached_seconds"] > 0 and row["seconds"] > 0
    subprocess.run(command + ["--minutes", "-1"], check=True, cwd=ROOT, timeout=300)
    assert json.loads(out.read_text())["rows"] == [old, row]
