"""Sums of clipped per-example gradients, computed with vmap or by book-keeping."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
