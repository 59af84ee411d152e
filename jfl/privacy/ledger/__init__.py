"""The ledger of a plan: what it releases, and to whom."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
