"""Command line of the experiments: `python -m experiments.papers.li2025 --list`."""

import sys

from ...harness.runner import main
from .figures import EXPERIMENTS

sys.exit(main("li2025", EXPERIMENTS))
