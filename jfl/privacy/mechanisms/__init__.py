"""Mechanisms that make a sum private: clipping, noise and post-processing."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
