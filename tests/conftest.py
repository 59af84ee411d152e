"""How the tests run: cheap code, each program compiled once, the same examples in every run."""

import gc
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest
from helpers.problems import make_federation, squared, start_params

import jfl

# Compiling is most of the time of these tests.  Code without optimisations compiles about three
# times faster, and these programs run for milliseconds; one module of code a program is cheaper
# than many in parallel.  JFL_TEST_OPTIMIZED=1 (.ci/optimized) tests the code that users run.
CHEAP = """--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true
--xla_cpu_parallel_codegen_split_count=1"""
if jax.__version_info__ < (0, 11):  # XLA ends a process whose flags it does not know
    CHEAP += " --xla_cpu_use_fusion_emitters=false"
if not os.environ.get("JFL_TEST_OPTIMIZED") and CHEAP.split()[0] not in os.environ.get(
    "XLA_FLAGS", ""
):
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *CHEAP.split()]).strip()

# What one worker, or a process that a test starts, has compiled is there for the others; what
# compiles in less than a tenth of a second is not worth a file.  The folder goes with the process
# of pytest that made it; JAX_COMPILATION_CACHE_DIR names one that stays, for whoever runs the
# tests often.
COMPILED = None
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    COMPILED = tempfile.mkdtemp(prefix="jfl-tests-compiled-")
for name, value in dict(
    jax_compilation_cache_dir=COMPILED or os.environ["JAX_COMPILATION_CACHE_DIR"],
    jax_persistent_cache_min_compile_time_secs=0.1,
    jax_persistent_cache_min_entry_size_bytes=-1,
).items():
    os.environ[name.upper()] = str(value)
    jax.config.update(name, value)

# Of the workers, which start after this.  They fill the cores: threads of BLAS would spin for each
# other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# A sum of arrays of different ranks is a mistake more often than it is meant.  Accountants
# broadcast as NumPy does, in a context of their own (`jfl.core.pytrees.in_float64`).
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
jax.config.update("jax_numpy_rank_promotion", "raise")

# What jax has traced stays for long: the collector would look at millions of such objects again and
# again, for 3 % of a worker's time.
gc.set_threshold(10_000, 20, 200)

# examples are the same in every run: a red test is red for everyone
hypothesis.settings.register_profile("jfl", derandomize=True, deadline=None)
hypothesis.settings.load_profile("jfl")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Cases that `by_default` does not name are slow."""
    cases = {}
    for item in items:
        if mark := item.get_closest_marker("by_default"):
            cases.setdefault(item.nodeid.partition("[")[0], (mark.args, set()))[1].add(
                item.callspec.id
            )
            if item.callspec.id not in mark.args:
                item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        for test, (named, found) in cases.items():
            if unknown := set(named) - found:
                raise pytest.UsageError(f"{test}: by_default names {unknown}, which are no cases")


def pytest_unconfigure():
    if COMPILED is not None:
        shutil.rmtree(COMPILED, ignore_errors=True)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Drop what JAX has compiled when a worker holds too much of it.

    Each compiled program keeps pages mapped, and Linux maps 65,530 of a process: beyond that it
    dies.  A module of tests maps some thousands (2,200 those of contracts/test_engine.py).  The
    slow tests also fill the memory: a worker grew to 10 GB.
    """
    yield
    own = Path("/proc/self")
    if not (own / "maps").exists():
        return
    pages = int((own / "statm").read_text().split()[1])  # in memory
    full = pages * os.sysconf("SC_PAGE_SIZE") > 4e9
    if full or (own / "maps").read_text().count("\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """What commands keep stays out of the user's folder; their programs go where those of all tests
    are."""
    assert jax.config.jax_compilation_cache_dir is not None
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def traced_for(monkeypatch):
    """A function of a backend's name, as for which programs are traced from then on; here they
    run."""
    return lambda backend: monkeypatch.setattr(jax, "default_backend", lambda: backend)


@pytest.fixture(scope="session")
def fed():
    return make_federation()


@pytest.fixture(scope="session")
def task():
    return jfl.task(start_params(), squared)


@pytest.fixture
def endless_noise(monkeypatch):
    """Noise without an end: tests that compare a plan's epsilon with that of an event, to the last
    digit.  test_truncation.py has what the end of the noise costs."""
    from jfl.privacy.accountants import truncation
    from jfl.privacy.ledger import entries, entry

    monkeypatch.setattr(truncation, "lost_mass", lambda length, normals, missing: 0.0 * length)
    monkeypatch.setattr(entry, "MISSING", 0.0)
    monkeypatch.setattr(entries, "MISSING", 0.0)  # also of Laplace noise
