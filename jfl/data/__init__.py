"""Datasets, partitions of their rows among clients, and federations, which combine both."""

from ..core.lazy import submodules as _submodules
from . import datasets as datasets
from . import partition as partition
from . import transforms as transforms
from .federation import checksum as checksum
from .federation import describe as describe
from .federation import federate as federate

__getattr__, __dir__ = _submodules(__name__, __path__)
