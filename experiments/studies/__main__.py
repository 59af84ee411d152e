"""The command line of the studies: `python -m experiments.studies --list`."""

import sys

from ..harness.runner import main
from .study import EXPERIMENTS

if __name__ == "__main__":
    sys.exit(main("studies", EXPERIMENTS))
