"""What test_compiled_programs.py compiles, in a process of its own: the flags and the cache of the
other tests would change the programs.

    python tests/accelerator/on_compilers.py

Reads requests from its input, one JSON object a line, and answers each with a line: a row as of
`experiments.bench.aot`, or {"error": ...}.

    {"case": "algorithm scaffold", "target": "v5e", "devices": 8}
"""

import json
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))  # a script of its own
sys.path.insert(1, str(Path(__file__).parents[1]))

from accelerator.plans import CASES

from experiments.bench import aot


def answer(case, target, devices=1) -> dict:
    """The row of a request."""
    with aot.as_on(target):
        plan = CASES[case]()
    return aot.compile_plan(plan, target, devices)


def main():
    jax.config.update("jax_platforms", "cpu")
    for line in sys.stdin:
        try:
            said = answer(**json.loads(line))
        except (ValueError, aot.MissingCompiler, jax.errors.JaxRuntimeError) as error:
            said = dict(error=f"{type(error).__name__}: {str(error)[:2000]}")
        print("row " + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
