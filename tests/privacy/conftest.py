"""Small grids of loss distributions where what is tested is which events a plan is worth."""

import pytest

from jfl.privacy.accountants import pld

# Both sides of these tests ask for loss distributions: any grid tells events apart.  What grids
# prove, and that finer ones prove less, is tested in test_pld.py and test_with_replacement.py.
LEDGER = {"test_accounting", "test_guarantee", "test_segments", "test_uploads"}


@pytest.fixture(scope="module", autouse=True)
def small_grids(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem in LEDGER:
            patch.setattr(pld, "SIZES", (2**12,))
        yield
