"""From a plan to a run: rounds, simulation, sweeps, devices."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
