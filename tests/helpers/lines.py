"""Lines of figures with made-up values, and the verdict on one check of them."""

import numpy as np

from experiments.harness import verdicts
from experiments.harness.runner import Line


def line(*values, seeds=(), claimed=None, proved=None, **trace):
    """A line whose accuracies, and losses, are these values of its seeds."""
    of_seeds = np.array(values, float)
    traces = {k: np.array(v, float) for k, v in trace.items()}
    return Line(of_seeds, of_seeds, proved, claimed, 0.0, traces, tuple(seeds))


def near(value, **more):
    """A line of three seeds that hardly differ."""
    return line(value - 1e-4, value + 1e-4, value, **more)


def judged(check, results, differs="our settings"):
    """The verdict and what was seen."""
    (found,) = verdicts.judge([verdicts.Claim("it is so", check)], results, differs)
    return found


def verdict(check, results, differs="our settings"):
    return judged(check, results, differs)[0]
