"""The command `jfl`, also as `python -m jfl.cli`."""

import sys

from ..core.lazy import explain_missing_package


def main() -> int:
    """Run the command line, or say how to install what it needs."""
    try:
        with explain_missing_package():
            from .main import main as run
    except ModuleNotFoundError as error:
        print(f"jfl: {error}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
