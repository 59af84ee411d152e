"""What a page says first: which setting is the best private one, with what promise, and what is
said beside it."""

import json

import pytest
from helpers.report_pages import guarantee, made

from jfl.report import document, headline, read, sections


def cards(*sources):
    """heading -> card, and the words beside them."""
    sources = [read.read(s) for s in sources]
    found, beside = headline.of(read.settings(sources))
    return {card.heading: card for card in found}, " ".join(text.words for text in beside)


def facts(card):
    return dict(card.facts)


PROMISE = dict(unit="client", view="third_party", adjacency="zero_out", delta=1e-6)


def test_the_most_accurate_of_what_is_proved_is_the_best(tmp_path):
    settings = {
        "no noise": ([0.99, 0.97], [guarantee(None)], {}),
        "claimed alone": ([0.95], [guarantee(1.0, "claimed")], {}),
        "conditional": ([0.94], [guarantee(1.0, "conditional")], {}),
        "failed": ([0.98], [guarantee(1.0)], dict(failed=(0,))),
        "best": ([0.8, 0.9, 0.1], [guarantee(4.0, **PROMISE)], dict(failed=(2,))),
        "less": ([0.7], [guarantee(2.0)], {}),
    }
    found, beside = cards(made(tmp_path / "run", settings))
    best, epsilon, proved, without = found.values()
    assert [*found][0] == "Best private accuracy" and [*found][3].startswith("Without a guarantee")
    assert best.value == "0.8500 ± 0.6353"  # t of one degree of freedom
    assert facts(best) == dict(setting="best", seeds="2 (+1 failed)")
    told = {"δ": "1e-06", "unit": "client", "adjacency": "zero_out", "view": "third party"}
    assert epsilon.value == "4" and facts(epsilon) == told
    assert proved.value == "proved"
    assert facts(proved) == dict(method="pld", caveats="1, listed below")
    assert proved.notes == ["3 of 6 settings have a proved ε."]
    assert without.value == "0.9800 ± 0.1271"
    assert "best of 2 settings with an ε here, chosen after looking at test accuracy" in beside
    assert "No ε covers that choice" in beside and "jfl.choose" in beside
    assert "not comparable" in beside and "data differ" not in beside


def test_without_an_epsilon_nothing_is_promised(tmp_path):
    settings = {"a": ([0.9], [guarantee(None)], {}), "b": ([0.8], [guarantee(1.0, "claimed")], {})}
    found, beside = cards(made(tmp_path / "run", settings))
    assert found["Best private accuracy"].value == "none" and not beside
    assert "nothing is guaranteed" in found["Best private accuracy"].notes[0]
    assert found["Without a guarantee"].value == "0.9000"  # a claim is not without any


def test_what_is_conditional_is_named_as_such(tmp_path):
    settings = {
        "a": ([0.9], [guarantee(3.0, "conditional"), guarantee(9.0, "claimed")], {}),
        "b": ([0.8], [guarantee(None)], {}),
    }
    found, beside = cards(made(tmp_path / "run", settings))
    card = found["Best accuracy with a conditional ε"]
    assert card.value == "0.9000" and card.notes == ["One seed gives no interval."]
    assert found["ε"].value == "3" and found["What is proved"].value == "conditional"
    assert found["What is proved"].notes == [headline.CONDITIONAL]
    assert "It is the only setting here" in beside and "no ε covers" in beside


def test_other_data_are_told_and_are_no_reference(tmp_path):
    settings = {
        "a": ([0.9], [guarantee(1.0)], {}),
        "b": ([0.8], [guarantee(1.0)], dict(dataset="mnist")),
        "plain": ([0.99], [guarantee(None)], dict(dataset="mnist")),
    }
    found, beside = cards(made(tmp_path / "run", settings))
    assert facts(found["Best private accuracy"])["setting"] == "a"
    assert "data differ too" in beside and "different units" not in beside
    assert [*found] == ["Best private accuracy", "ε", "What is proved"]


def test_an_audit_above_the_proof_stands_first(tmp_path):
    folder = made(tmp_path / "run")
    proved, promise = guarantee(2.0), dict(unit="example", adjacency="add_remove", view="server")
    found = dict(status="audited", epsilon=9.0, delta=1e-5, method="m", confidence=0.95)
    attack = dict(canary="c", trials=10, rounds=2, config={})
    judged = dict(proved=proved, claimed=None, refuted=False, contradicted=True)
    audits = dict(format=1, audits=[promise | found | attack | judged])
    (folder / "audit.json").write_text(json.dumps(audits))
    first = next(iter(cards(folder)[0].values()))
    assert first.alarm and first.value == "contradicts the proof" and "bug" in first.notes[0]


@pytest.mark.parametrize(
    "status, contradicted, verdict",
    [("proved", True, document.CONTRADICTED), ("conditional", False, document.CONDITION_REFUTED)],
)
def test_an_audit_above_a_guarantee_refutes_it(status, contradicted, verdict, tmp_path):
    """The table says it as the report of the audit does."""
    folder = made(tmp_path / "run")
    whose = dict(unit="example", adjacency="add_remove", view="server", delta=1e-5, method="m")
    found = whose | dict(status="audited", epsilon=9.0, confidence=0.95)
    found |= dict(canary="c", trials=10, rounds=2, config={}, claimed=1.0, refuted=True)
    found |= dict(proved=guarantee(2.0) | dict(status=status), contradicted=contradicted)
    (folder / "audit.json").write_text(json.dumps(dict(format=1, audits=[found])))
    table, *_ = sections._audits(read.settings([read.read(folder)]))
    assert table.rows[0][-1] == verdict
