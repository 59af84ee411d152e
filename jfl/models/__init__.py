"""Tasks: ready-made models, and adapters for models of other libraries."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(
    __name__,
    __path__,
    offers=("tasks", "adapters", "flax_adapters", "equinox_adapter", "fine_tuning", "low_rank"),
)
