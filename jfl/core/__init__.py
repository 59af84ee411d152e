"""The base of all other packages: records, pytrees, checks, random streams, and the identity of a
plan."""

from .lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
