"""Names of earlier versions; each warns, and goes with the next release."""

import warnings

import numpy as np

from .core import checks
from .core.records import Federation
from .engine import round as rounds


def _gone(old, new):
    warnings.warn(
        f"jfl.{old} is now {new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=3,
    )


def round(run, plan, noise=None):
    """`jfl.run_round`, by its old name; `noise` is not used."""
    _gone("round", "jfl.run_round")
    return rounds.run_round(run, plan)


def start(key, plan):
    """`jfl.init`, by its old name."""
    _gone("start", "jfl.init")
    return rounds.init(key, plan)


def fingerprint(fed):
    """The identity of a federation's data, which nothing takes as an argument any more."""
    _gone("fingerprint", "federation.identity, and no longer needed")
    checks.kind("fingerprint", Federation, "jfl.federate", fed=fed)
    return np.asarray(fed.identity)
