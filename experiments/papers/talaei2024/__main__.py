"""Command line of the experiments: `python -m experiments.papers.talaei2024 --list`."""

import sys

from ...harness.runner import main
from .figures import EXPERIMENTS

sys.exit(main("talaei2024", EXPERIMENTS))
