"""What protects whom, and by how much.

`mechanisms` add the noise; `ledger` says what a plan releases, and to whom; `accountants` bound
what that tells about one person; `guarantees` and `calibration` turn the bounds into epsilon or
into a noise multiplier.
"""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
