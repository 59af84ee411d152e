"""What the benchmark times is what it says: jfl's driver against the numpy reference that every peer's driver is held to."""
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

FOLDER = Path(__file__).parents[1] / "experiments" / "bench_peers"


@pytest.fixture
def drivers(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("common"), importlib.import_module("own")
    for name in ("common", "own"):
        sys.modules.pop(name)


def rows(clients=3, count=10, features=784):
    rng = np.random.default_rng(0)
    return SimpleNamespace(x=rng.normal(size=(clients, count, features)).astype("f4"), y=rng.integers(0, 10, (clients, count)).astype("i4"))


@pytest.mark.parametrize("mode", ["private", "vmap"])
def test_the_driver_clips_averages_and_adds_noise(drivers, mode):
    common, own = drivers
    said = common.check(own.build, SimpleNamespace(**common.WORKLOADS["W1"], block=1), rows(), mode)
    assert said["off_reference_clip_1"] < 1e-5 and abs(said["noise_over_wanted"] - 1) < 0.04


def test_the_check_can_fail(drivers, monkeypatch):
    """Without a clip, or with twice the noise."""
    common, own = drivers
    spec = SimpleNamespace(**common.WORKLOADS["W1"], block=1)
    with pytest.raises(AssertionError, match="bound|reference"):
        common.check(lambda s, d, m: own.build(s, d, "plain"), spec, rows(), "private")
    loud = lambda s, d, m: own.build(SimpleNamespace(**vars(s) | dict(noise=2 * s.noise)), d, m)
    with pytest.raises(AssertionError, match="noise"):
        common.check(loud, spec, rows(), "private")
