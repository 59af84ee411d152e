"""One algorithm a file.  What is listed here inherits the contract tests and the command line."""
from .base import algorithm as algorithm
from .fedavg import fedavg as fedavg
from .fedprox import fedprox as fedprox
from .fedsgd import fedsgd as fedsgd
from .scaffold import scaffold as scaffold

__all__ = ["fedavg", "fedprox", "fedsgd", "scaffold"]
