"""Noble, Bellet, Dieuleveut, AISTATS 2022: DP-SCAFFOLD.  `privacy` and `theory` hold its claims;
those of `privacy` are offered here too."""

from ...core.lazy import submodules as _submodules

__getattr__, __dir__ = _submodules(__name__, __path__, offers="privacy")
