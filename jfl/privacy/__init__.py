"""What protects whom, and by how much.

`mechanism` adds the noise; `ledger` says what a plan releases as `events`; `rdp` bounds their divergence;
`accounting` turns that into a guarantee or a noise multiplier.
"""
from ..lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__)
