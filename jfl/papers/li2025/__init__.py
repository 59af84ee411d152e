"""Li, Wang, Wu, Mathematics 13(3):497, 2025: DP-FedAvg in heterogeneous settings.  `privacy` and
`theory` hold its claims; those of `privacy` are offered here too."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__, offers="privacy")
