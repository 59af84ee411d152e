"""Programs compiled for a device that need not be attached; here for this machine's CPU."""

import json

import pytest

from experiments.bench import aot

FEW = ["clients=12", "rows=10", "cohort=4", "batch=5", "steps=2"]


@pytest.mark.slow
def test_a_workload_is_compiled_and_not_run_or_fails_and_is_named(capsys):
    assert aot.main(["--target", "cpu", "--mode", "private", "plain", "--set", *FEW]) == 0
    private, plain = map(json.loads, capsys.readouterr().out.splitlines())
    assert (private["mode"], plain["mode"]) == ("private", "plain")
    for row in (private, plain):
        assert row["memory"]["argument"] > 12 * 10 * 784 * 4 and row["collectives"] == {}
    assert aot.main(["--target", "cpu", "--devices", "4096", "--set", *FEW]) == 1
    assert "expected at most" in capsys.readouterr().err


def test_compilers_of_another_version_are_rejected():
    here = {"jax": "0.10.2"} | dict.fromkeys(aot.COMPILERS["gpu"], "0.10.2")
    aot.check_compiler("h200", here)
    with pytest.raises(aot.MissingCompiler, match="libtpu is not installed"):
        aot.check_compiler("v5e", here)
    with pytest.raises(aot.MissingCompiler, match=r"pip install jax-cuda12-pjrt==0.10.2"):
        aot.check_compiler("h200", here | {"jax-cuda12-pjrt": "0.10.1"})
