"""What the compilers of accelerators make of training programs.  Nothing is run, and no accelerator
is needed: only the compilers, `pip install -e ".[aot]"`.

Strictly expected failures are how far the programs are from their goals: a test that begins to pass
is red until its mark goes.  About 22 minutes on two cores; JFL_TEST_LONG_COMPILES=1 adds goals
whose programs alone take two to four each.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from accelerator.plans import ALGORITHMS, BATCHES, CASES, SAMPLERS
from filelock import FileLock

import jfl
from experiments.bench.ahead_of_time import machines

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
            machines.check(machines.TARGETS[target])
        except machines.MissingCompiler as error:
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


def waits_today(case, target):
    return "" if target == "v5e" else "1 a round: how many rounds there are is data"


@pytest.mark.parametrize("case, target", programs())
def test_it_compiles_and_its_loops_are_known(compilers, case, target):
    row = compilers.row(target, case=case)
    assert row["round"]["launches"] > 0 and row["round"]["seconds"] > 0
    # one step is no loop
    assert ("step" in row) == (case != "algorithm fedsgd")


@pytest.mark.parametrize("case, target", programs(wide_today))
def test_nothing_is_computed_in_64_bits(compilers, case, target):
    """As written too: a TPU's compiler makes 32 bits of it, many times as many."""
    row = compilers.row(target, case=case)
    assert row["round"]["wide"] == 0 and row["wide_written"] == 0


@pytest.mark.parametrize("case, target", programs(waits_today))
def test_nothing_waits_for_the_host(compilers, case, target):
    assert compilers.row(target, case=case)["round"]["host_waits"] == 0


@pytest.mark.parametrize("case, target", programs(cases=ALGORITHMS))
def test_eight_devices_add_up_once_a_round(compilers, case, target):
    found = compilers.row(target, case=case, devices=8)["round"]["collectives"]
    assert found == {"all-reduce": 1}


def test_every_part_has_a_case():
    parts = {case.removeprefix("algorithm ") for case in ALGORITHMS}
    assert parts == set(jfl.algorithms.__all__)
    assert set(SAMPLERS) == set(jfl.sampling.__all__) and set(BATCHES) == set(jfl.batches.__all__)


# --- goals


class Goal(NamedTuple):
    """`value` takes a function (workload, modes, target, more) -> row.

    `today` was found when it was last looked at; `minutes`: it takes minutes to compile.
    """

    name: str
    value: Callable
    most: float
    today: float
    minutes: bool = False


def ratio(value, one, other):
    return lambda of: value(of(*one)) / value(of(*other))


def of_round(what):
    return lambda row: row["round"][what]


def of_step(what):
    return lambda row: row["step"][what]


def milliseconds(workload, target):
    return lambda of: 1000 * seconds(of(workload, "private", target))


POINTS = dict(points=64)
# a GPU's convolutions: by their floors XLA's own are faster, by the clock of an H200 patches are
PATCHES = jax.__version_info__ >= (0, 11)
# of 1e9 draws of a cohort hardly one is drawn again
MANY = dict(devices=8, clients=100_000, rows=20, cohort=1024, turns=["draw_again=0:1"])
W1_H200, W1_V5E = ("W1", "private", "h200"), ("W1", "private", "v5e")
W2_H200, W2_V5E = ("W2", "private", "h200"), ("W2", "private", "v5e")
seconds, launches, moved = of_round("seconds"), of_round("launches"), of_step("bytes")
GOALS = (
    Goal("W1 h200: launches a round", lambda of: launches(of(*W1_H200)), 60, 90),
    Goal("W1 h200: launches a step", lambda of: of_step("launches")(of(*W1_H200)), 9, 12),
    Goal("W1 h200: waits of the host", lambda of: of_round("host_waits")(of(*W1_H200)), 0, 1),
    Goal("W1 h200: 64 bits", lambda of: of_round("wide")(of(*W1_H200)), 0, 29.8e6),
    Goal("W1 v5e: 64 bits as written", lambda of: of(*W1_V5E)["wide_written"], 0, 0),
    Goal("W2 h200: 64 bits", lambda of: of_round("wide")(of(*W2_H200)), 0, 11.45e9),
    Goal(
        "W2 h200: private over plain", ratio(seconds, W2_H200, ("W2", "plain", "h200")), 1.3, 1.80
    ),
    Goal(
        "W2 h200: bytes of a step, private over plain",
        ratio(moved, W2_H200, ("W2", "plain", "h200")),
        1.3,
        1.66,
    ),
    Goal(
        "W2 v5e: private over plain",
        ratio(seconds, W2_V5E, ("W2", "plain", "v5e")),
        1.5,
        2.42,
        True,
    ),
    Goal(
        "W2 h200: a Poisson cohort over a fixed one",
        ratio(seconds, ("W2", "poisson", "h200"), W2_H200),
        1.3,
        1.22,
    ),
    Goal(
        "W2 h200: wavelet noise over isotropic noise",
        ratio(seconds, ("W2", "wavelet", "h200"), W2_H200),
        1.3,
        2.73,
    ),
    Goal("W1 h200: 64 points over one", ratio(seconds, (*W1_H200, POINTS), W1_H200), 2, 2.94),
    Goal("W1 v5e: 64 points over one", ratio(seconds, (*W1_V5E, POINTS), W1_V5E), 4, 11.9),
    Goal("W3 h200: milliseconds a round", milliseconds("W3", "h200"), 6, 11.8 if PATCHES else 5.74),
    Goal("W3 v5e: milliseconds a round", milliseconds("W3", "v5e"), 60, 57.4, True),
    Goal("W5 h200: milliseconds a round", milliseconds("W5", "h200"), 8, 8.04 if PATCHES else 5.44),
    Goal("W1 h200, 8 devices: launches", lambda of: launches(of(*W1_H200, MANY)), 1500, 124),
    Goal(
        "W1 h200, 8 devices: collectives",
        lambda of: sum(of(*W1_H200, MANY)["round"]["collectives"].values()),
        1,
        1,
    ),
)


def reached(compilers, goal):
    if goal.minutes and not os.environ.get("JFL_TEST_LONG_COMPILES"):
        pytest.skip("takes minutes to compile: set JFL_TEST_LONG_COMPILES=1")

    def of(workload, mode, target, more=None):
        return compilers.row(target, workload=workload, modes=[mode], **more or {})

    return goal.value(of)


@pytest.mark.parametrize(
    "goal",
    [
        pytest.param(
            goal,
            id=goal.name,
            marks=[expected(f"{goal.today:.3g} today")] if goal.today > goal.most else [],
        )
        for goal in GOALS
    ],
)
def test_goals(compilers, goal):
    assert reached(compilers, goal) <= goal.most


@pytest.mark.parametrize("goal", GOALS, ids=[goal.name for goal in GOALS])
def test_what_is_far_from_its_goal_gets_no_worse(compilers, goal):
    assert reached(compilers, goal) <= 1.05 * max(goal.today, goal.most)
