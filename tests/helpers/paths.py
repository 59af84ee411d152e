"""Where the repository and the prepared data lie."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
DATA = Path(os.environ.get("JFL_DATA_DIR", ROOT.parent / "shared" / "data"))
