"""Run the experiments of a paper: `python -m experiments.papers noble2022 --list`."""

import importlib
import sys

from ..harness import runner
from ..harness.results import PAPERS


def main(argv=None) -> int:
    paper, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if paper not in PAPERS:
        print(
            f"expected a paper, one of {', '.join(PAPERS)}, but got {paper or 'none'}. "
            f"Example: python -m experiments.papers {PAPERS[0]} --list",
            file=sys.stderr,
        )
        return 2
    figures = importlib.import_module(f"{__package__}.{paper}.figures")
    return runner.main(paper, figures.EXPERIMENTS, rest)


if __name__ == "__main__":
    sys.exit(main())
