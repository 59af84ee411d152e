"""What papers claim, as printed and corrected: pure functions with a verdict.  Nothing that is
proved imports these."""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
