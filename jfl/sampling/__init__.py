"""Who takes part in a round, and which rows a local step reads."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(
    __name__, __path__, offers=("clients", "rotation", "availability")
)
