"""The check of users' code: does every path from a client's rows to its upload pass a release?"""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
