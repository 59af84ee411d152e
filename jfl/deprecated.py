"""Names of earlier versions; each warns, and goes with the next release."""

import numpy as np

from .core import checks, earlier_names
from .core.records import Federation
from .engine import round as rounds


def round(run, plan, noise=None):
    """`jfl.run_round`, by its old name; `noise` is not used."""
    earlier_names.warn("jfl.round", "jfl.run_round", 3)
    return rounds.run_round(run, plan)


def start(key, plan):
    """`jfl.init`, by its old name."""
    earlier_names.warn("jfl.start", "jfl.init", 3)
    return rounds.init(key, plan)


def fingerprint(fed):
    """The identity of a federation's data, which nothing takes as an argument any more."""
    earlier_names.warn("jfl.fingerprint", "federation.identity, and no longer needed", 3)
    checks.kind("fingerprint", Federation, "jfl.federate", fed=fed)
    return np.asarray(fed.identity)
