"""The ledger is data: fields, codes and errors, so that no reader has to look for words."""

import dataclasses
import json
import pickle

import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, DELTA, NOISY, make, poisson_plan

import jfl
from jfl import sampling
from jfl.core.errors import NotAnalysable
from jfl.core.records import Caveat, code_of
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, pld, tightest
from jfl.privacy.guarantees import epsilons_per_client, guarantee_of
from jfl.privacy.ledger import entries
from jfl.privacy.ledger.entry import events_of, of_client, of_rounds, with_noise
from jfl.privacy.mechanisms import chain
from jfl.report import plots
from jfl.runs import guarantee_rows

WORDS = "implied by nothing, one round of hand-picked rows"


def said(plan):
    """Return the plan with a caveat of its user's, whose words name other things."""
    return dataclasses.replace(plan, fed=dataclasses.replace(plan.fed, caveats=(WORDS,)))


def test_the_words_of_a_caveat_change_nothing(renyi):
    bare = make(NOISY(), upload=NOISY(0.5))
    rows, plain = (guarantee_rows.all_rows(p, 20, DELTA) for p in (said(bare), bare))
    assert len(rows) == 4 and all(WORDS in g["caveats"] for g in rows)
    assert not any(g["implied"] for g in rows) and all(g["rounds"] is None for g in rows)
    assert [g["epsilon"] for g in rows] == [g["epsilon"] for g in plain]
    best = guarantee_rows.best(rows)
    assert (best["unit"], best["view"]) == ("example", "server") and plots.drawable(best)
    rows = guarantee_rows.all_rows(said(make(release=NOISY())), 20, DELTA)
    assert [(g["unit"], g["implied"]) for g in rows] == [("client", False), ("example", True)]
    assert guarantee_rows.best(rows)["unit"] == "client"
    assert [plots.drawable(g) for g in rows] == [True, False]


def test_caveats_have_codes(renyi):
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
    """Raise what NumPy raises at a bug: ValueError, as a refusal does."""
    return np.zeros(2) + np.zeros(3)


@pytest.mark.parametrize("module, name", [(chain, "multipliers"), (entries, "worst_columns")])
def test_a_bug_of_the_ledger_is_not_taken_for_a_refusal(module, name, monkeypatch, renyi):
    monkeypatch.setattr(module, name, broken)
    for plan in (make(NOISY()), make(upload=NOISY()), make(release=NOISY())):
        for call in (jfl.guarantees, guarantee_rows.all_rows):
            with pytest.raises(ValueError, match="broadcast") as raised:
                call(plan, 20, DELTA)
            assert not isinstance(raised.value, NotAnalysable)


def test_a_bug_of_a_bound_is_not_taken_for_a_refusal(monkeypatch):
    event = events.repeat(events.poisson(0.1, events.gaussian(1.0)), 10)
    for name, call in (
        ("epsilon", lambda: tightest.epsilon(event, DELTA)),
        ("epsilon", lambda: jfl.guarantees(poisson_plan(), 2, DELTA)),
        ("deltas", lambda: tightest.delta(event, 1.0)),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="broadcast"):
            patch.setattr(pld, name, broken)
            call()


def test_what_no_theorem_covers_is_distinguished(renyi):
    short = make(NOISY(), sizes=np.full(CLIENTS, 5))
    assert jfl.guarantees(short, 20, DELTA) == ()
    (entry, _) = entries.entries(short, 3)
    for call in (lambda: jfl.guarantee(short, 20, DELTA), lambda: events_of(entry)):
        with pytest.raises(NotAnalysable, match="at least batch=10 rows"):
            call()
    assert "refused: jfl.guarantee: expected at least batch=10 rows" in str(jfl.ledger(short, 3))
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
    """Return all that a record of the ledger holds, inside all of its records."""
    if dataclasses.is_dataclass(value):
        value = tuple(vars(value).values())
    if isinstance(value, tuple):
        return [leaf for v in value for leaf in leaves(v)]
    return [value]


@pytest.mark.parametrize("name", PLANS)
def test_entries_hold_nothing_but_data(name, renyi):
    """Also a multiplier, which can be replaced."""
    listed = jfl.ledger(PLANS[name](), 3)
    kinds = (np.ndarray, np.number, float, int, bool, str, type(None))
    odd = [v for e in listed for v in leaves(e) if not isinstance(v, kinds) or callable(v)]
    assert len(listed) and not odd, odd
    again = pickle.loads(pickle.dumps(listed))
    assert again.rounds == 3 and str(again) == str(listed)
    for entry, other in zip(listed, again):
        assert repr(events_of(entry)) == repr(events_of(other))
        louder = with_noise(entry, 7.0)
        assert {float(z) for p in louder.parts for z in p.multiplier.ravel()} == {7.0}
        before, after = (guarantee_of(e, 3, DELTA).epsilon for e in (entry, louder))
        assert 0 < after < before


def test_a_client_is_a_column(renyi):
    (entry, _) = entries.entries(PLANS["of_each"](), 3)
    each = [guarantee_of(of_client(entry, c), 3, DELTA).epsilon for c in range(CLIENTS)]
    assert each == sorted(each, reverse=True) and len(set(each)) == CLIENTS
    np.testing.assert_array_equal(each, epsilons_per_client(PLANS["of_each"](), 3, DELTA))
    assert each[0] == guarantee_of(entry, 3, DELTA).epsilon


def test_a_round_is_empty_only_if_all_of_its_releases_are(renyi):
    quiet = events.gaussian(np.array([1.0, 1e13, 1.0, 1e13]))
    noise = lambda z, times: events.repeat(events.gaussian(z), times)
    of = lambda event: tightest.epsilon(event, DELTA)[0]
    both = of(of_rounds(events.compose(quiet, noise(0.5, 1.0)), 4))
    assert both == pytest.approx(of(events.compose(noise(1.0, 2), noise(0.5, 4))), rel=1e-6)
    alone = of(of_rounds(events.compose(quiet), 4))
    assert alone == pytest.approx(of(noise(1.0, 2)), rel=1e-6)


def test_the_ledger_prints():
    head, first, second, *below = str(jfl.ledger(make(NOISY(1.5)), 3)).splitlines()
    assert head.split() == list(entries.HEADS)
    assert first.split() == (
        "example server replace_one local step without_replacement 0.1 1.5 3 1".split()
    )
    assert second.split()[-1] == "0.25" and "3 rounds" in below[0]
    assert sum("worst case" in line for line in below) == 1
    assert "1 to 2" in str(jfl.ledger(PLANS["of_each"](), 3))
    assert "example, implied" in str(jfl.ledger(PLANS["uploads"](), 3))
    assert str(jfl.ledger(make(), 3)) == "No mechanism of this plan adds noise."
    with pytest.raises(ValueError, match="rounds"):
        jfl.ledger(make(NOISY()), 0)


AWAKE = np.arange(2 * CLIENTS).reshape(2, CLIENTS) % 3 > 0


@pytest.mark.parametrize(
    "sampler, codes",
    [
        (sampling.first_responders(CLIENTS, 5, latency=np.linspace(1, 9, CLIENTS)), {"latencies"}),
        (sampling.available_poisson(CLIENTS, 0.4, AWAKE, capacity=CLIENTS), {"availability"}),
        (sampling.with_replacement(CLIENTS, 5, weights=np.linspace(1, 2, CLIENTS)), {"shares"}),
        (sampling.first_responders(CLIENTS, 5), set()),
        (sampling.with_replacement(CLIENTS, 5), set()),
    ],
)
def test_what_a_sampler_knows_of_clients_is_assumed_public(sampler, codes):
    listed = jfl.ledger(make(NOISY(), sampler=sampler), 3)
    found = {code_of(c) for e in listed for c in e.caveats}
    assert {c.removeprefix("public-") for c in found if c.startswith("public-")} == codes
