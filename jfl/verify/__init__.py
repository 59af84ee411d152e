"""Which paths from rows to payloads end in a mechanism."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
