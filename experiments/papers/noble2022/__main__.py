"""Command line of the experiments: `python -m experiments.papers.noble2022 --list`."""

import sys

from ...harness.runner import main
from .figures import EXPERIMENTS

sys.exit(main("noble2022", EXPERIMENTS))
