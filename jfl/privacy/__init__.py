"""Differential privacy of a plan: mechanisms, accounting and guarantees.

`mechanisms` clip contributions and add noise.  `ledger` lists what a plan releases, and to whom.
`accountants` bound what these releases reveal about one person.  `guarantees` and `calibration`
turn the bounds into an epsilon or a noise multiplier.
"""

from ..core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
