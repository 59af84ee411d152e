"""The base of all other packages: records, checks, random streams and identities of plans."""

from .lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
