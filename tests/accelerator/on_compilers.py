"""What test_compiled_programs.py compiles, in a process of its own: the flags and the cache of the
other tests would change the programs.

    python tests/accelerator/on_compilers.py

Reads requests from its input, one JSON object a line, and answers each with a line: a row as of
`experiments.bench.aot`, or {"error": ...}.

    {"case": "algorithm scaffold", "target": "v5e", "devices": 8}
    {"workload": "W1", "modes": ["private"], "target": "h200", "points": 64}
"""

import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own
sys.path.insert(1, str(Path(__file__).parents[1]))

from accelerator.plans import CASES

from experiments.bench import aot
from experiments.bench.ahead_of_time import machines, report, workloads


def answer(target, case=None, workload=None, modes=(), points=0, turns=(), **rest) -> dict:
    """The row of a request; `rest` are devices, and numbers of a workload."""
    devices, numbers = rest.pop("devices", 1), rest
    if case is not None:
        with report.as_on(target):
            plan = CASES[case]()
        return report.run(plan, target, devices=devices).row()
    told = dict(devices=devices, turns=dict(map(aot.turns_of, turns)))
    make = lambda **change: workloads.workload(workload, modes, **numbers | change).plan
    with report.as_on(target):
        plans = [make(**change) for change in (aot.SPREAD if points else ({},))]
    if points:
        return report.grid(plans, target, points=points, **told).row()
    return report.run(*plans, target, **told).row()


def main():
    jax.config.update("jax_platforms", "cpu")
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except (ValueError, machines.MissingCompiler, jax.errors.JaxRuntimeError) as error:
            said = dict(error=f"{type(error).__name__}: {str(error)[:2000]}")
        print("row " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
