"""Command line of the experiments: `python -m experiments.papers.chen2024 --list`."""

import sys

from ...harness.runner import main
from .figures import EXPERIMENTS

sys.exit(main("chen2024", EXPERIMENTS))
