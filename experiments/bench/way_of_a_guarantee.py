"""How many steps lead from a plan to its epsilon: the calls between jfl's own functions that
`jfl.guarantee(plan, rounds)` makes, each pair of caller and callee counted once.

    python -m experiments.bench.way_of_a_guarantee          # the counts, room by room
    python -m experiments.bench.way_of_a_guarantee --list   # and every call

The plan is a usual one: FedAvg with `private_grad` and Poisson batches, seen by the server.  The
way ends at the bounds: what the accountants compute inside is arithmetic, with a line of its own.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import jfl

ROOT = Path(jfl.__file__).parent
INSIDE = "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>"  # parts of the function around them


def typical_plan(noise_multiplier: float = 1.1):
    """FedAvg on digits; noise in every local step, on a Poisson batch."""
    fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
    task = jfl.models.logistic(fed)
    noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise_multiplier), jfl.divide(16))
    grad = jfl.private_grad(task.loss, noise)
    fedavg = jfl.algorithms.fedavg(grad, steps=3, batch=jfl.batches.poisson(16))
    return jfl.plan(fed, task, fedavg, jfl.sampling.without_replacement(10, 4))


def name_of(code) -> str | None:
    """module:function of jfl's own code; None for other code, and for parts of a function."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or code.co_name in (*INSIDE, "<module>"):
        return None
    return f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}:{code.co_qualname}"


def calls(function) -> Counter:
    """(caller, callee) -> how often, of jfl's own functions while `function` runs."""
    seen, stack = Counter(), [("", None)]

    def watch(frame, event, _):
        if event == "call":
            name = name_of(frame.f_code)
            if name is not None:
                seen[stack[-1][0], name] += 1
            stack.append((name or stack[-1][0], frame))
        elif event == "return" and stack[-1][1] is frame:
            stack.pop()

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def room(name: str) -> str:
    return name.partition(":")[0].rpartition(".")[0]


def way(seen: Counter) -> list:
    """The calls up to the bounds: not those that accountants make among themselves."""
    inside = lambda name: room(name) == "privacy.accountants"
    return [pair for pair in seen if pair[0] and not inside(pair[0])]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every call")
    options = parser.parse_args(arguments)
    jfl.guarantee(typical_plan(2.0), 50)  # imports and compilation are no steps
    plan = typical_plan()
    seen = calls(lambda: jfl.guarantee(plan, 50))
    steps = way(seen)
    modules = Counter(callee.partition(":")[0] for _, callee in steps)
    print(f"{len(steps)} distinct calls into {len(modules)} modules")
    print(f"{len(seen) - len(steps) - 1} more inside the accountants")
    for module, count in modules.most_common():
        print(f"{count:5} {module}")
    if options.list:
        for caller, callee in steps:
            print(f"{caller} -> {callee}")


if __name__ == "__main__":
    main()
