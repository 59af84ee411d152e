"""Ready-made tasks, and adapters for models of other libraries."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(
    __name__, __path__, offers=("tasks", "adapters", "partial_training")
)
