"""The page of what can be proved is what the code says."""

import pytest

from experiments.harness import matrix


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert matrix.PAGE.read_text() == matrix.page(), "run python -m experiments.harness.matrix"
