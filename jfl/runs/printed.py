"""The formulas of papers, which `mode="as_printed"` uses.

The formulas are in the repository, in experiments/papers, and not in the installed package: no
module of jfl proves anything with them.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentError

PAPERS = ("noble2022", "chen2024", "li2025", "talaei2024", "ranaweera2025")
MODULE = "experiments.papers.as_printed"
REPOSITORY = Path(__file__).resolve().parents[2]


def formulas() -> Any:
    """Import and return the module of the papers' formulas.

    Raises:
        ArgumentError: If the repository's experiments are not importable.
    """
    if (REPOSITORY / "experiments" / "papers").is_dir() and str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    try:
        return importlib.import_module(MODULE)
    except ModuleNotFoundError as error:
        if not MODULE.startswith(str(error.name)):
            raise
        raise ArgumentError(
            'config: mode="as_printed" needs the papers\' formulas, which are not part of the '
            "installed package. Run jfl from a checkout of its repository "
            "(pip install -e .), which has them in experiments/papers."
        ) from error
