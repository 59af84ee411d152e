"""What the ledger says in fields, codes and errors, so that no reader has to look for words."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from helpers.ledger_plans import BATCH, CLIENTS, DELTA, NOISY, make, poisson_plan

import jfl
from jfl import sampling
from jfl.cli import console
from jfl.core import records
from jfl.core.errors import NotAnalysable
from jfl.core.records import Caveat, code_of
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, pld, tightest
from jfl.privacy.guarantees import epsilons_per_client, guarantee_of
from jfl.privacy.ledger import entries
from jfl.privacy.ledger.entry import events_of, of_client, with_noise
from jfl.privacy.mechanisms import chain
from jfl.report import plots
from jfl.runs import guarantee_rows

WORDS = "implied by nothing, one round of hand-picked rows"


@pytest.fixture(autouse=True)
def renyi_alone(request, monkeypatch):
    if "distributions" not in request.fixturenames:
        monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)


@pytest.fixture
def distributions():
    """All bounds, as users have them."""


def said(plan):
    """The plan, with a caveat of its user's."""
    return dataclasses.replace(plan, fed=dataclasses.replace(plan.fed, caveats=(WORDS,)))


def test_words_of_a_caveat_change_nothing():
    plan = said(make(NOISY(), upload=NOISY(0.5)))
    rows = guarantee_rows.all_rows(plan, 20, DELTA)
    assert len(rows) == 4 and all(WORDS in g["caveats"] for g in rows)
    assert not any(g["implied"] for g in rows) and all(g["rounds"] is None for g in rows)
    plain = guarantee_rows.all_rows(make(NOISY(), upload=NOISY(0.5)), 20, DELTA)
    assert [g["epsilon"] for g in rows] == [g["epsilon"] for g in plain]
    best = guarantee_rows.best(rows)
    assert (best["unit"], best["view"]) == ("example", "server") and plots.drawable(best)
    assert guarantee_rows.best([g | dict(implied=True) for g in rows[:1]] + rows[2:3]) == rows[2]
    assert "one round" not in console._claim(rows[0] | dict(status="claimed"))


def test_what_is_implied_is_a_field():
    plan = said(make(release=NOISY()))
    own = guarantees.guarantee(plan, 20, DELTA, unit="client")
    implied = guarantees.guarantee(plan, 20, DELTA, unit="example", view="third_party")
    assert not own.implied and implied.implied
    rows = guarantee_rows.all_rows(plan, 20, DELTA)
    assert [(g["unit"], g["implied"]) for g in rows] == [("client", False), ("example", True)]
    assert guarantee_rows.best(rows)["unit"] == "client"
    assert [plots.drawable(g) for g in rows] == [True, False]


def test_caveats_have_codes():
    g = guarantees.guarantee(said(make(NOISY())), 20, DELTA)
    assert [code_of(c) for c in g.caveats] == ["every-round", "simulation", "stops", "data"]
    row = json.loads(json.dumps(guarantee_rows.as_row(g)))
    assert row["codes"] == [c.code for c in g.caveats] and row["caveats"] == list(g.caveats)
    more = guarantee_rows.add_caveats(row, [Caveat("of a sweep", "selection"), "a sentence"])
    assert more["codes"][-2:] == ["selection", ""] and more["caveats"][-1] == "a sentence"
    assert len(row["codes"]) == len(row["caveats"]) == 4
    again = pickle.loads(pickle.dumps(g.caveats[0]))
    assert (again, again.code) == (g.caveats[0], "every-round")


def broken(*args, **options):
    """A bug: NumPy says ValueError, as a refusal does."""
    return np.zeros(2) + np.zeros(3)


@pytest.mark.parametrize(
    "plan",
    [
        lambda: make(NOISY()),
        lambda: make(upload=NOISY()),
        lambda: make(release=NOISY()),
    ],
)
@pytest.mark.parametrize("module, name", [(chain, "multipliers"), (entries, "worst_columns")])
def test_a_bug_is_no_refusal(module, name, plan, monkeypatch):
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(ValueError, match="broadcast") as raised:
        jfl.guarantees(plan(), 20, DELTA)
    assert not isinstance(raised.value, NotAnalysable)
    with pytest.raises(ValueError, match="broadcast"):
        guarantee_rows.all_rows(plan(), 20, DELTA)


def test_a_bug_of_a_bound_is_no_refusal(distributions, monkeypatch):
    event = events.repeat(events.poisson(0.1, events.gaussian(1.0)), 10)
    monkeypatch.setattr(pld, "epsilon", broken)
    with pytest.raises(ValueError, match="broadcast"):
        tightest.epsilon(event, DELTA)
    with pytest.raises(ValueError, match="broadcast"):
        jfl.guarantees(poisson_plan(), 2, DELTA)
    monkeypatch.setattr(pld, "deltas", broken)
    with pytest.raises(ValueError, match="broadcast"):
        tightest.delta(event, 1.0)


def test_what_no_theorem_covers_is_told_apart():
    short = make(NOISY(), sizes=np.full(20, 5))
    assert jfl.guarantees(short, 20, DELTA) == ()
    with pytest.raises(NotAnalysable, match="at least batch=10 rows"):
        jfl.guarantee(short, 20, DELTA)
    (row,) = guarantee_rows.all_rows(short, 20, DELTA)
    assert row["epsilon"] is None and row["codes"] == ["not-analysable"]
    with pytest.raises(ValueError, match="Choices: unit='example'") as raised:
        jfl.guarantee(make(NOISY()), 20, DELTA, unit="client")
    assert not isinstance(raised.value, NotAnalysable)


# --- the ledger is data

PLANS = dict(
    gradients=lambda: make(NOISY(1.5)),
    poisson=poisson_plan,
    uploads=lambda: make(upload=NOISY(2.0)),
    summed=lambda: make(upload=NOISY(2.0), release=NOISY(3.0), sampler=sampling.full(CLIENTS)),
    clients=lambda: make(
        release=NOISY(2.0, "add_remove"), sampler=sampling.poisson(CLIENTS, 0.25, capacity=15)
    ),
    of_each=lambda: make(NOISY(np.linspace(1.0, 2.0, CLIENTS))),
)


def leaves(value):
    """All that a record of the ledger holds, inside all its records."""
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    if isinstance(value, tuple):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


@pytest.mark.parametrize("name", PLANS)
def test_entries_hold_nothing_but_data(name):
    listed = jfl.ledger(PLANS[name](), 3)
    assert len(listed) == len(entries.entries(PLANS[name](), 3)) > 0
    kinds = (np.ndarray, np.number, float, int, bool, str, type(None))
    for entry in listed:
        odd = [v for v in leaves(entry) if not isinstance(v, kinds) or callable(v)]
        assert not odd, odd
    again = pickle.loads(pickle.dumps(listed))
    assert again.rounds == 3 and str(again) == str(listed)
    pairs = zip((events_of(e) for e in listed), (events_of(e) for e in again))
    assert all(repr(one) == repr(other) for one, other in pairs)


@pytest.mark.parametrize("name", PLANS)
def test_noise_is_a_field(name):
    """A multiplier that is put into an entry is worth what it is worth in the chain."""
    for entry in entries.entries(PLANS[name](), 3):
        louder = with_noise(entry, 7.0)
        assert {float(z) for p in louder.parts for z in p.multiplier.ravel()} == {7.0}
        before, after = (guarantee_of(e, 3, DELTA).epsilon for e in (entry, louder))
        assert 0 < after < before


def test_a_client_is_a_column():
    (entry, _) = entries.entries(PLANS["of_each"](), 3)
    each = [guarantee_of(of_client(entry, c), 3, DELTA).epsilon for c in range(CLIENTS)]
    assert each == sorted(each, reverse=True) and len(set(each)) == CLIENTS
    np.testing.assert_array_equal(each, epsilons_per_client(PLANS["of_each"](), 3, DELTA))
    assert each[0] == guarantee_of(entry, 3, DELTA).epsilon


def test_the_ledger_prints():
    text = str(jfl.ledger(make(NOISY(1.5)), 3))
    head, first, second, *below = text.splitlines()
    assert head.split() == list(entries.HEADS)
    assert first.split() == (
        "example server replace_one local step without_replacement 0.1 1.5 3 1".split()
    )
    assert second.split()[-1] == "0.25" and "3 rounds" in below[0]
    assert sum("worst case" in line for line in below) == 1
    assert "1 to 2" in str(jfl.ledger(PLANS["of_each"](), 3))
    assert "example, implied" in str(jfl.ledger(PLANS["uploads"](), 3))
    short = make(NOISY(), sizes=np.full(CLIENTS, 5))
    assert "refused: jfl.guarantee: expected at least batch=10 rows" in str(jfl.ledger(short, 3))
    assert str(jfl.ledger(make(), 3)) == "No mechanism of this plan adds noise."
    with pytest.raises(ValueError, match="rounds"):
        jfl.ledger(make(NOISY()), 0)


def test_refused_entries_have_no_events():
    (entry, _) = entries.entries(make(NOISY(), sizes=np.full(CLIENTS, 5)), 3)
    with pytest.raises(NotAnalysable, match="at least batch=10 rows"):
        events_of(entry)


def test_releases_on_one_sample_count_as_seen_in_segments_too():
    """Of an algorithm with several sampled releases no epsilon of independent samples holds."""
    two = lambda z: make(NOISY(z), BATCH, more=(records.Release(NOISY(z), BATCH, 3),))
    both = guarantees.guarantee([(two(1.0), 10), (two(2.0), 1)], delta=DELTA).epsilon
    seen = events.gaussian((60 / 1.0**2 + 6 / 2.0**2) ** -0.5)
    assert both == pytest.approx(tightest.epsilon(seen, DELTA)[0], rel=1e-6)


@pytest.mark.parametrize(
    "sampler, code",
    [
        (
            lambda: sampling.first_responders(CLIENTS, 5, latency=np.linspace(1, 9, CLIENTS)),
            "public-latencies",
        ),
        (
            lambda: sampling.available_poisson(
                CLIENTS, 0.4, np.arange(2 * CLIENTS).reshape(2, CLIENTS) % 3 > 0, capacity=CLIENTS
            ),
            "public-availability",
        ),
        (
            lambda: sampling.with_replacement(CLIENTS, 5, weights=np.linspace(1, 2, CLIENTS)),
            "public-shares",
        ),
    ],
)
def test_what_a_sampler_knows_of_clients_is_assumed_public(sampler, code):
    codes = lambda sampler: {
        code_of(c) for e in jfl.ledger(make(NOISY(), sampler=sampler), 3) for c in e.caveats
    }
    assert code in codes(sampler())
    for plain in (sampling.first_responders(CLIENTS, 5), sampling.with_replacement(CLIENTS, 5)):
        assert not {c for c in codes(plain) if c.startswith("public-")}
