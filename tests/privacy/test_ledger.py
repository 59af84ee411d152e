"""What the ledger says in fields, codes and errors, so that no reader has to look for words."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from helpers.ledger_plans import DELTA, NOISY, make, poisson_plan

import jfl
from jfl.cli import accounting, console
from jfl.core.errors import NotAnalysable
from jfl.core.records import Caveat, code_of
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, pld, tightest
from jfl.privacy.ledger import client_level, entries, example_level
from jfl.report import plots
from jfl.runs import record

WORDS = "implied by nothing, one round of hand-picked rows"


@pytest.fixture(autouse=True)
def renyi_alone(request, monkeypatch):
    if "distributions" not in request.fixturenames:
        monkeypatch.setattr(tightest, "takes", lambda *args: False)


@pytest.fixture
def distributions():
    """All bounds, as users have them."""


def said(plan):
    """The plan, with a caveat of its user's."""
    return dataclasses.replace(plan, fed=dataclasses.replace(plan.fed, caveats=(WORDS,)))


def test_words_of_a_caveat_change_nothing():
    plan = said(make(NOISY(), upload=NOISY(0.5)))
    rows = record.privacy(plan, 20, DELTA)
    assert len(rows) == 4 and all(WORDS in g["caveats"] for g in rows)
    assert not any(g["implied"] for g in rows) and all(g["rounds"] is None for g in rows)
    plain = record.privacy(make(NOISY(), upload=NOISY(0.5)), 20, DELTA)
    assert [g["epsilon"] for g in rows] == [g["epsilon"] for g in plain]
    best = record.best(rows)
    assert (best["unit"], best["view"]) == ("example", "server") and plots._drawn(best)
    assert accounting.worth_of(plan, 20, DELTA)[1] is not None
    assert record.best([g | dict(implied=True) for g in rows[:1]] + rows[2:3]) == rows[2]
    assert "one round" not in console.claimed([rows[0] | dict(status="claimed")])


def test_what_is_implied_is_a_field():
    plan = said(make(release=NOISY()))
    own = guarantees.guarantee(plan, 20, DELTA, unit="client")
    implied = guarantees.guarantee(plan, 20, DELTA, unit="example", view="third_party")
    assert not own.implied and implied.implied
    rows = record.privacy(plan, 20, DELTA)
    assert [(g["unit"], g["implied"]) for g in rows] == [("client", False), ("example", True)]
    assert record.best(rows)["unit"] == "client"
    assert [plots._drawn(g) for g in rows] == [True, False]


def test_caveats_have_codes():
    g = guarantees.guarantee(said(make(NOISY())), 20, DELTA)
    assert [code_of(c) for c in g.caveats] == ["every-round", "simulation", "stops", "data"]
    row = json.loads(json.dumps(record.row(g)))
    assert row["codes"] == [c.code for c in g.caveats] and row["caveats"] == list(g.caveats)
    more = record.with_caveats(row, [Caveat("of a sweep", "selection"), "a sentence"])
    assert more["codes"][-2:] == ["selection", ""] and more["caveats"][-1] == "a sentence"
    assert len(row["codes"]) == len(row["caveats"]) == 4
    again = pickle.loads(pickle.dumps(g.caveats[0]))
    assert (again, again.code) == (g.caveats[0], "every-round")


def test_files_of_the_version_before_are_read():
    row = record.row(guarantees.guarantee(make(release=NOISY()), 20, DELTA))
    new = ("codes", "implied", "rounds")
    old = {k: v for k, v in row.items() if k not in new}
    assert record.as_today(row) is row
    assert record.as_today(old) == old | dict(
        codes=[""] * len(row["caveats"]), implied=False, rounds=None
    )
    follows = old | dict(caveats=[str(entries.IMPLIED_TWICE), WORDS])
    assert record.as_today(follows) == follows | dict(
        codes=["implied-twice", ""], implied=True, rounds=None
    )
    assert not record.as_today(old | dict(caveats=[WORDS]))["implied"]
    claim = old | dict(status="claimed", method="li2025, eq. (20), one round")
    assert record.as_today(claim)["rounds"] == 1


def broken(*args, **options):
    """A bug: NumPy says ValueError, as a refusal does."""
    return np.zeros(2) + np.zeros(3)


@pytest.mark.parametrize(
    "module, name, plan",
    [
        (example_level, "levels", lambda: make(NOISY())),
        (client_level, "levels", lambda: make(upload=NOISY())),
        (client_level, "_release_levels", lambda: make(release=NOISY())),
    ],
)
def test_a_bug_is_no_refusal(module, name, plan, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(ValueError, match="broadcast") as raised:
        jfl.guarantees(plan(), 20, DELTA)
    assert not isinstance(raised.value, NotAnalysable)
    with pytest.raises(ValueError, match="broadcast"):
        record.privacy(plan(), 20, DELTA)


def test_a_bug_of_a_bound_is_no_refusal(distributions, monkeypatch):
    event = events.repeat(events.poisson(0.1, events.gaussian(1.0)), 10)
    monkeypatch.setattr(pld, "pld_epsilon", broken)
    with pytest.raises(ValueError, match="broadcast"):
        tightest.epsilon(event, DELTA)
    with pytest.raises(ValueError, match="broadcast"):
        jfl.guarantees(poisson_plan(), 2, DELTA)
    monkeypatch.setattr(pld, "delta", broken)
    with pytest.raises(ValueError, match="broadcast"):
        tightest.delta(event, 1.0)


def test_what_no_theorem_covers_is_told_apart():
    short = make(NOISY(), sizes=np.full(20, 5))
    assert jfl.guarantees(short, 20, DELTA) == ()
    with pytest.raises(NotAnalysable, match="at least batch=10 rows"):
        jfl.guarantee(short, 20, DELTA)
    (row,) = record.privacy(short, 20, DELTA)
    assert row["epsilon"] is None and row["codes"] == ["not-analysable"]
    with pytest.raises(ValueError, match="Choices: unit='example'") as raised:
        jfl.guarantee(make(NOISY()), 20, DELTA, unit="client")
    assert not isinstance(raised.value, NotAnalysable)
