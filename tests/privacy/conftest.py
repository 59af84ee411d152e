"""Few orders of Renyi curves, where what is tested is which events a plan is worth, and not how
near the bounds of those come."""

import numpy as np
import pytest

from jfl.privacy.accountants import rdp_events, tightest

# Both sides of these tests ask the same accountant: any orders tell events apart.  What curves
# prove, and how near they come, is tested in the files of the accountants.
LEDGER = {"test_guarantee", "test_ledger", "test_segments", "test_uploads"}
FEW = 16


@pytest.fixture(scope="module", autouse=True)
def few_orders_of_the_ledger(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem in LEDGER:
            take_few_orders(patch)
        yield


def take_few_orders(patch):
    patch.setattr(rdp_events, "BLOCK", FEW)
    patch.setattr(rdp_events, "ORDERS", 1 + np.geomspace(1e-5, 1e7, 2 * FEW))


@pytest.fixture
def renyi(monkeypatch):
    """Leave out loss distributions, which compile for each kind of event: where both sides of a
    comparison ask the same accountant, or the point is a Renyi value."""
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)


@pytest.fixture
def few_orders(monkeypatch):
    take_few_orders(monkeypatch)
