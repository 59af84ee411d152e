"""Federated algorithms, one per file.

The contract tests run all algorithms in `__all__`, and the command line offers them.
"""

from ..core.lazy import submodules as _submodules
from .adaptive_servers import fedadagrad as fedadagrad
from .adaptive_servers import fedadam as fedadam
from .adaptive_servers import fedavgm as fedavgm
from .adaptive_servers import fedyogi as fedyogi
from .addpnfl import adaptive as adaptive
from .addpnfl import adaptive_without_noise_bias as adaptive_without_noise_bias
from .addpnfl import addpnfl as addpnfl
from .band_energies import band_energies as band_energies
from .base import algorithm as algorithm
from .dicesgd import dicesgd as dicesgd
from .ditto import ditto as ditto
from .dpnfl import dpnfl as dpnfl
from .fedavg import fedavg as fedavg
from .fedbuff import fedbuff as fedbuff
from .feddyn import feddyn as feddyn
from .fednova import fednova as fednova
from .fedprox import fedprox as fedprox
from .fedrep import fedper as fedper
from .fedrep import fedrep as fedrep
from .fedsam import fedsam as fedsam
from .fedsgd import fedsgd as fedsgd
from .iterate_averaging import averaged as averaged
from .mimelite import mimelite as mimelite
from .output_perturbation import output_perturbation as output_perturbation
from .padpfl import padpfl as padpfl
from .pfedme import pfedme as pfedme
from .qfedavg import qfedavg as qfedavg
from .scaffold import scaffold as scaffold

__all__ = [
    "addpnfl",
    "dicesgd",
    "ditto",
    "dpnfl",
    "fedavg",
    "fedbuff",
    "feddyn",
    "fednova",
    "fedper",
    "fedprox",
    "fedrep",
    "fedsam",
    "fedsgd",
    "mimelite",
    "output_perturbation",
    "padpfl",
    "pfedme",
    "qfedavg",
    "scaffold",
]

__getattr__, __dir__ = _submodules(__name__, __path__)
