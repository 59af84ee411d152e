"""Differentially private federated learning in JAX.

Start with the README, `help(jfl.plan)` and `help(jfl.simulate)`.
"""

import typing

from .core.lazy import submodules as _submodules

if typing.TYPE_CHECKING:
    from .names import *  # noqa: F403
    from .runs.load import load as load

__version__ = "0.1.0"

# The names are imported late, so that `jfl --help` need not wait for JAX.
__getattr__ = _submodules(
    __name__,
    __path__,  # noqa: F405
    offers="names",
    later={"load": "jfl.runs.load"},
    modules_first=True,
)[0]
if not typing.TYPE_CHECKING:

    def __dir__():
        return __getattr__("__all__")
