"""What the compilers of accelerators make of training programs.  Nothing is run, and no accelerator
is needed: only the compilers, `pip install -e ".[aot]"`.

Strictly expected failures are known limits: a test that begins to pass is red until its mark goes.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from accelerator.plans import ALGORITHMS, BATCHES, CASES, SAMPLERS
from filelock import FileLock

import jfl
from experiments.bench import aot

pytestmark = pytest.mark.slow
TARGETS = ("v5e", "h200")
OTHERS = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")  # of the other tests


class Compilers:
    """Rows by request.  Each program is compiled once, by one worker at a time."""

    def __init__(self, folder: Path):
        folder.mkdir(exist_ok=True)
        self.folder, self.child = folder, None

    def row(self, target: str, **request) -> dict:
        try:
            aot.check_compiler(target)
        except aot.MissingCompiler as error:
            pytest.skip(f"NOTHING WAS COMPILED. {error}")
        line = json.dumps(dict(request, target=target), sort_keys=True)
        kept = self.folder / f"{hashlib.sha256(line.encode()).hexdigest()[:16]}.json"
        with FileLock(self.folder / "one-at-a-time"):
            if not kept.exists():
                kept.write_text(self._ask(line))
        row = json.loads(kept.read_text())
        if "error" in row:  # no AssertionError: nobody expects it
            raise RuntimeError(row["error"])
        return row

    def _ask(self, line):
        if self.child is None:
            environment = {k: v for k, v in os.environ.items() if k not in OTHERS}
            self.child = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("on_compilers.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # libtpu is loud
                text=True,
                env=environment | dict(JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false"),
            )
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        for said in self.child.stdout:
            if said.startswith("row "):
                return said.removeprefix("row ")
        code, self.child = self.child.wait(), None
        return json.dumps(dict(error=f"the compiler ended with {code} on {line}"))

    def close(self):
        if self.child is not None:
            self.child.stdin.close()
            self.child.wait()
            self.child.stdout.close()


@pytest.fixture(scope="session")
def compilers(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    found = Compilers(shared / "compiled")
    yield found
    found.close()


def expected(reason: str):
    """The mark of what fails today; a program that does not compile at all is no such failure."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)


def programs(known=lambda case, target: "", cases=CASES):
    """Every case on every target; `known` gives the reason why one fails today."""
    return [
        pytest.param(
            case, target, id=f"{case}-{target}", marks=[expected(reason)] if reason else []
        )
        for case in cases
        for target in TARGETS
        for reason in [known(case, target)]
    ]


NO_PHILOX = ("noise key", "noise clipped", "noise integers")


def wide_today(case, target):
    if target == "v5e" or case in NO_PHILOX:
        return ""
    return "the upper half of a product is written in 64 bits, though PTX has mul.hi.u32 for it"


@pytest.mark.parametrize("case, target", programs())
def test_it_compiles(compilers, case, target):
    assert compilers.row(target, case=case)["memory"]["argument"] > 0


@pytest.mark.parametrize("case, target", programs(wide_today))
def test_nothing_is_computed_in_64_bits(compilers, case, target):
    """As written: the compiler of a TPU turns each into many operations on 32 bits."""
    assert compilers.row(target, case=case)["wide_written"] == 0


@pytest.mark.parametrize("case, target", programs(cases=ALGORITHMS))
def test_eight_devices_add_up_once_a_round(compilers, case, target):
    row = compilers.row(target, case=case, devices=8)
    assert row["round_collectives"] == {"all-reduce": 1}


def kernels_of_update(of, folder) -> tuple[list[str], int]:
    """The PTX of each kernel of a private update, and its bytes of temporary memory."""
    try:
        aot.check_compiler("h200")
    except aot.MissingCompiler as error:
        pytest.skip(f"NOTHING WAS COMPILED. {error}")
    flags = f"--xla_dump_to={folder}"
    if jax.__version_info__ >= (0, 11):  # XLA ends a process whose flags it does not know
        flags += " --xla_dump_emitter_re=.*"
    environment = {k: v for k, v in os.environ.items() if k not in OTHERS} | dict(
        XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_ENABLE_COMPILATION_CACHE="false"
    )
    script = [sys.executable, str(Path(__file__).with_name("noise_in_ptx.py")), "h200", of]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [
        kernel
        for file in folder.glob("*.ptx")
        for kernel in re.split(r"(?=\.visible \.entry)", file.read_text())[1:]
    ]
    return kernels, int(done.stdout)


@pytest.mark.parametrize("of", ["cohort", "model"])
def test_two_neighbours_share_a_block_of_the_cipher(of, tmp_path):
    """A thread of a GPU makes four normals: of two blocks, 20 products each, and not of four.  Only
    PTX shows it, because LLVM finds the same block, not XLA.  Blocks are not written to memory."""
    kernels, temporary = kernels_of_update(of, tmp_path)
    products = max(kernel.count("mul.hi.u32") for kernel in kernels)
    assert 30 < products <= 42  # 39; of four blocks, 75
    assert temporary < 4096


def test_a_small_layer_is_summed_and_updated_by_one_kernel(tmp_path):
    """A matrix product would be a kernel of its own, which writes the sum to memory."""
    kernels, temporary = kernels_of_update("layer", tmp_path)
    assert len(kernels) == 1
    assert temporary < 4096


def test_every_part_has_a_case():
    parts = {case.removeprefix("algorithm ") for case in ALGORITHMS}
    assert parts == set(jfl.algorithms.__all__)
    assert set(SAMPLERS) == set(jfl.sampling.__all__) and set(BATCHES) == set(jfl.batches.__all__)
