"""`python -m jfl.cli` is the command `jfl`."""

import sys

from .main import main

sys.exit(main())
