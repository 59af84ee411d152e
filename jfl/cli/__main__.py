"""The entry point of the command `jfl`, which is also `python -m jfl.cli`."""

import sys

from ..core.lazy import explain_missing_package
from .main import main as run


def main() -> int:
    """Run the command line, or print how to install a missing package; return the exit code."""
    try:
        with explain_missing_package():
            return run()
    except ModuleNotFoundError as error:
        print(f"jfl: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
