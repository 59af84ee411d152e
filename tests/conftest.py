"""How the tests run: cheap code, the same examples in every run, one small problem for all."""

import os

# Cheap code for the CPU compiles about three times faster, and these programs run for milliseconds.
# A speed measurement or a doubt about an optimisation sets JFL_TEST_OPTIMIZED=1.
if not os.environ.get("JFL_TEST_OPTIMIZED"):
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            "--xla_cpu_use_fusion_emitters=false",
        ]
    ).strip()

from pathlib import Path

import hypothesis
import jax
import pytest
from helpers.problems import make_federation, squared, start_params

import jfl

# examples are the same in every run: a red test is red for everyone
hypothesis.settings.register_profile("jfl", derandomize=True, deadline=None)
hypothesis.settings.load_profile("jfl")


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Each compiled program keeps pages mapped, and Linux maps 65,530 of a process: beyond that it
    dies."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 20_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def fed():
    return make_federation()


@pytest.fixture(scope="session")
def task():
    return jfl.task(start_params(), squared)
