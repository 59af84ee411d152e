"""Command line of the experiments: `python -m experiments.papers.ranaweera2025 --list`."""

import sys

from ...harness import runner
from . import study
from .figures import EXPERIMENTS


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["study"] and len(argv) > 1 and argv[1] not in ("--quick", "--out"):
        return study.main(argv[1:])
    return runner.main("ranaweera2025", EXPERIMENTS, argv)


if __name__ == "__main__":
    sys.exit(main())
