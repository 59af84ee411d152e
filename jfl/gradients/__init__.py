"""Gradients of single examples, clipped and summed: formed one by one, or by ghost clipping."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
