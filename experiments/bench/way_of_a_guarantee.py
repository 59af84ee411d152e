"""How many steps lead from a plan to its epsilon: the distinct calls between jfl's own functions
that `jfl.guarantee(plan, rounds)` makes on its way.

    python -m experiments.bench.way_of_a_guarantee          # the counts, module by module
    python -m experiments.bench.way_of_a_guarantee --list   # and every call, in order

The plan is a usual one: FedAvg with `private_grad` and Poisson batches, seen by the server.  The
way is what one has to read to follow the number: which function calls which, each pair once.  Four
things are looked at from outside, as one step each time they are asked: checks of arguments, the
taint check, the mechanisms, and the arithmetic of the accountants.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

import jfl

ROOT = Path(jfl.__file__).parent
OUTSIDE = ("core.", "privacy.taint.", "privacy.mechanisms.", "privacy.accountants.")
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


def way(seen: Counter) -> list:
    """The calls to be read: all but checks of arguments, and what is done inside `OUTSIDE`."""
    outside = lambda name: name.startswith(OUTSIDE)
    return [
        (caller, callee)
        for caller, callee in seen
        if caller and not outside(caller) and not callee.startswith("core.")
    ]


def stays(steps: list) -> int:
    """How many times one turns to another module when reading the calls in order, back to a caller
    included."""
    places = [name.partition(":")[0] for pair in steps for name in pair]
    return 1 + sum(here != there for here, there in itertools.pairwise(places))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every call")
    options = parser.parse_args(arguments)
    jfl.guarantee(typical_plan(2.0), 50)  # imports and compilation are no steps
    plan = typical_plan()
    seen = calls(lambda: jfl.guarantee(plan, 50))
    steps = way(seen)
    modules = Counter(callee.partition(":")[0] for _, callee in steps)
    functions = {name for pair in steps for name in pair}
    print(f"{len(steps)} calls between {len(functions)} functions of {len(modules)} modules")
    print(f"{stays(steps)} stays in a module, read in order")
    print(f"{len(seen) - len(steps) - 1} more inside checks, mechanisms and accountants")
    for module, count in modules.most_common():
        print(f"{count:5} {module}")
    if options.list:
        for caller, callee in steps:
            print(f"{caller} -> {callee}")


if __name__ == "__main__":
    main()
