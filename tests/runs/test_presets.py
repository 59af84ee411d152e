"""Settings by name: each is a config that runs, with the epsilon in its name."""

import jax
import numpy as np
import pytest
from helpers import pretended

from jfl.cli import main
from jfl.engine.simulate import simulate
from jfl.privacy.guarantees import guarantee
from jfl.runs import train
from jfl.runs.build import build
from jfl.runs.config import PRESETS, Config, preset_fields


@pytest.mark.by_default("mnist-client-eps8")
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_config_of_what_its_name_says(name, tmp_path, monkeypatch, capsys):
    """Through the command line, which refuses options without effect; MNIST's rows are a
    stand-in, and the program does not run."""
    fields = preset_fields(name)
    told = f"{fields['dataset']}-{fields['unit']}-eps{fields['epsilon']:g}"
    assert told == name
    r = np.random.default_rng(0)
    rows = dict(x=r.integers(0, 256, (8000, 28, 28), np.uint8), y=r.integers(0, 10, 8000))
    np.savez(tmp_path / "mnist.npz", **rows, x_test=rows["x"][:50], y_test=rows["y"][:50])
    monkeypatch.setenv("JFL_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(train, "simulate", pretended.simulate)
    out = tmp_path / "run"
    assert main.main(["train", "--preset", name, "--rounds", "1", "--out", str(out)]) == 0
    assert capsys.readouterr().err.count("warning") == 0 and (out / "summary.json").exists()


@pytest.mark.by_default("digits-client-eps8")
@pytest.mark.parametrize("name", [n for n in PRESETS if n.startswith("digits")])
def test_it_learns_what_it_says(name):
    """The accuracy beside it is of three seeds: one is within 3 points of their range."""
    preset = PRESETS[name]
    plan, config = build(Config(**preset.fields, seed=0, partition_seed=0))
    out = simulate(jax.random.key(0), plan, config.rounds, evaluate_every=config.rounds)
    low, high = map(float, preset.accuracy.split("(")[1].rstrip(")").split(" to "))
    assert low - 0.03 < float(out.metrics.accuracy[-1]) < high + 0.03
    proved = guarantee(plan, config.rounds, config.delta, unit=config.unit, view=config.view)
    assert proved.status == "proved" and proved.epsilon == pytest.approx(8.0, rel=1e-3)


def test_flags_win_over_a_preset(capsys):
    assert main.main(["epsilon", "--preset", "digits-client-eps8", "--rounds", "7"]) == 0
    assert "7" in capsys.readouterr().out
    assert main.main(["epsilon", "--preset", "digits"]) == 2
    assert "digits-client-eps8" in capsys.readouterr().err
    assert main.main(["epsilon", "--preset"]) == 2
    assert "--preset: expected a name" in capsys.readouterr().err
