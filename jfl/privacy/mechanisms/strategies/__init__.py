"""By what noise is correlated over rounds, for `jfl.correlated`: jfl.strategies.

| | C | what a round does | for |
|---|---|---|---|
| `identity` | 1 | draws its own noise | comparison |
| `tree` | binary tree | draws 2 noises on average | comparison with DP-FTRL |
| `square_root` | full | draws all earlier noise again | a few hundred rounds |
| `banded_toeplitz` | few bands | holds bands - 1 noises | few participations; cyclic Poisson |
| `inverse_banded` | full | draws as many noises as bands again | no memory, any run |
| `blt` | full | holds 2 to 5 sums | long runs |
| `restarted` | copies of another | what that does | bounded error of many participations |
| `dense` | full, any | draws all earlier noise again | the least error that there is |
"""

from .dense import dense as dense
from .restarts import restarted as restarted
from .strategy import Strategy as Strategy
from .toeplitz import banded_toeplitz as banded_toeplitz
from .toeplitz import blt as blt
from .toeplitz import identity as identity
from .toeplitz import inverse_banded as inverse_banded
from .toeplitz import momentum as momentum
from .toeplitz import square_root as square_root
from .tree import tree as tree

__all__ = [
    "Strategy",
    "banded_toeplitz",
    "blt",
    "dense",
    "identity",
    "inverse_banded",
    "momentum",
    "restarted",
    "square_root",
    "tree",
]
