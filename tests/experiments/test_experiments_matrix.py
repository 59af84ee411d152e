"""The pages that are made from the code are what the code says."""

import pytest

import jfl
from experiments.harness import cards, matrix


@pytest.mark.slow
def test_the_page_of_the_matrix_is_up_to_date():
    assert matrix.PAGE.read_text() == matrix.page(), "run python -m experiments.harness.matrix"


def test_the_cards_of_algorithms_are_up_to_date():
    for name, text in cards.pages().items():
        assert (cards.FOLDER / name).read_text() == text, "run python -m experiments.harness.cards"


def test_every_algorithm_has_a_card():
    """With what it is for, in words that a person wrote."""
    by_hand = set(cards.written()) - {"families"}
    assert by_hand == set(jfl.algorithms.__all__) == set(cards.NAMES)
    text = "".join(page.read_text() for page in cards.FOLDER.glob("*.md"))
    for name in jfl.algorithms.__all__:
        assert f"{{ #{name} }}" in text and cards.written()[name]["when"] in text
        assert cards.tests_of(name)
