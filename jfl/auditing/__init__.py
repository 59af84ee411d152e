"""Audits of privacy: attacks that bound epsilon from below."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
