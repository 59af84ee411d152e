"""What makes a sum private: clipping, noise, noise of a given shape."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
