"""What an attack measures beside what is proved: audits of privacy."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
