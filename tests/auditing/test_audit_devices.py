"""Audits on several devices: runs that they share, and plans whose program they share."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT

SCRIPT = Path(__file__).with_name("on_devices.py")


def on_devices(what):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), what],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env=dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])[what]


@pytest.mark.slow
def test_runs_that_eight_devices_share_are_those_of_one():
    """1,001 runs of each side, which 8 does not divide: the same report to the last bit, each
    device with its part of a block, and no message between them."""
    found = on_devices("shared")
    assert found["same"]
    assert [part[0] for part in found["held"]] == [2] * 8
    assert found["messages"] == []
    assert "expected mesh=None for a plan that has a mesh" in found["refused"]


@pytest.mark.slow
def test_the_program_of_a_mesh_is_what_is_audited():
    """The distance of the canary is that of one device: at five deviations of 2,000 runs, so noise
    divided by the number of devices, which doubles the distance, is found for certain."""
    found = on_devices("own")
    error = 5 * math.sqrt(2 / 1400)
    assert found == dict(
        release=pytest.approx(1.0, abs=error), uploads=pytest.approx(0.5, abs=error)
    )


@pytest.mark.slow
def test_noise_on_a_mesh_is_as_stated():
    """Of clients on different devices, too.  False alarms: 1e-6."""
    found = on_devices("noise")
    assert not found["failed"]
    assert "uploads: independence across clients" in found["tests"]
