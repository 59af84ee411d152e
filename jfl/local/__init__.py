"""Local training on a client, and optimizers for clients and the server."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__, offers="training")
