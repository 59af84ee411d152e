"""Gradients of one example at a time, clipped and summed: in chunks, or by ghost clipping."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
