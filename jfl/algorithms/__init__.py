"""One algorithm a file.  What is listed here inherits the contract tests and the command line."""

from ..core.lazy import submodules as _submodules
from .addpnfl import adaptive as adaptive
from .addpnfl import addpnfl as addpnfl
from .band_energies import band_energies as band_energies
from .base import algorithm as algorithm
from .dpnfl import dpnfl as dpnfl
from .fedavg import fedavg as fedavg
from .fedprox import fedprox as fedprox
from .fedsgd import fedsgd as fedsgd
from .iterate_averaging import averaged as averaged
from .output_perturbation import output_perturbation as output_perturbation
from .padpfl import padpfl as padpfl
from .scaffold import scaffold as scaffold

__all__ = [
    "addpnfl",
    "dpnfl",
    "fedavg",
    "fedprox",
    "fedsgd",
    "output_perturbation",
    "padpfl",
    "scaffold",
]

__getattr__, __dir__ = _submodules(__name__, __path__)
