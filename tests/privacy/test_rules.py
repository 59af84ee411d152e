"""The table of what can be proved: every need of every rule refuses, and nothing else answers."""

import dataclasses

import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, NOISY, make

import jfl
from jfl import sampling
from jfl.core import records
from jfl.core.errors import NotAnalysable
from jfl.privacy.accountants import samples
from jfl.privacy.ledger import entries, facts, rules
from jfl.sampling import batches

TREE = jfl.strategies.tree(6)
TURNS = jfl.strategies.banded_toeplitz(6, 3, participations=2, separation=3)
NARROW = jfl.strategies.banded_toeplitz(6, 2, participations=3, separation=2)
FALLING = lambda: NOISY(lambda round_: 4.0 / (1 + round_))
INTEGERS = lambda: jfl.distributed(8.0, 0.5, 5, law="skellam", like=np.zeros(4)).upload


def correlated(strategy):
    noise = jfl.correlated(4.0, strategy)
    return jfl.chain(jfl.clip_l2(0.5), jfl.total(), noise, jfl.divide(8.0), adjacency="replace_one")


def contracting(steps, batch):
    """Return a plan that releases local training whose steps contract."""
    chain = jfl.chain(
        jfl.bounded(0.5, "contraction"), jfl.total(), jfl.gaussian(3.0), adjacency="replace_one"
    )
    plan = make(chain, batch, 1)
    release = records.Release(chain, batch, 1, steps)
    algorithm = dataclasses.replace(plan.algorithm, releases=(release,))
    return dataclasses.replace(plan, algorithm=algorithm)


def secure(plan):
    return dataclasses.replace(plan, secure_aggregation=True)


FIXED = sampling.without_replacement(CLIENTS, 5)
CLIPPED = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.divide(8.0), adjacency="replace_one")
# place of the noise -> unit and view
ANSWERS = {
    "local step": ("example", "server"),
    "local training": ("example", "server"),
    "upload": ("client", "server"),
    "summed upload": ("client", "aggregate"),
    "release": ("client", "third_party"),
}
# place, need -> a plan that has all but this need
CASES = {
    ("local step", "FULL_BATCHES"): lambda: make(
        NOISY(3.0), batches.without_replacement(10), sizes=np.full(CLIENTS, 9)
    ),
    ("local step", "SOME_ROWS"): lambda: make(NOISY(3.0), sizes=np.zeros(CLIENTS, int)),
    ("local training", "ROWS_ONCE"): lambda: contracting(11, batches.without_replacement(10)),
    ("upload", "SHARES"): lambda: make(
        upload=INTEGERS(), sampler=sampling.without_replacement(CLIENTS, 4)
    ),
    ("upload", "APART"): lambda: make(upload=correlated(TURNS), sampler=FIXED),
    ("summed upload", "PLAIN"): lambda: secure(
        make(upload=NOISY(3.0), release=CLIPPED, sampler=FIXED)
    ),
    ("summed upload", "EQUAL"): lambda: secure(
        make(upload=NOISY(np.linspace(1.0, 2.0, CLIENTS)), sampler=FIXED)
    ),
    ("release", "APART"): lambda: make(release=correlated(TURNS), sampler=FIXED),
    ("release", "HIDDEN"): lambda: make(
        release=NOISY(3.0), sampler=sampling.with_replacement(CLIENTS, 5), stateful=True
    ),
}


@pytest.mark.parametrize("place, need", CASES)
def test_a_rule_is_refused_without_its_need(place, need, monkeypatch):
    plan, (unit, view) = CASES[place, need](), ANSWERS[place]

    def found():
        listed = entries.entries(plan, 6)
        return next(e for e in listed if (e.unit, e.view) == (unit, view))

    refused = found()
    assert refused.refusal and not refused.parts
    with pytest.raises(NotAnalysable, match=r"jfl\.guarantee: expected"):
        jfl.guarantee(plan, 6, unit=unit, view=view)
    # it is this need that refuses: without it the rule answers
    wanted = getattr(rules, need)
    left = lambda rule: tuple(n for n in rule.needs if n is not wanted)
    without = lambda several: [dataclasses.replace(r, needs=left(r)) for r in several]
    table = {row: without(several) for row, several in rules.TABLE.items()}
    monkeypatch.setattr(rules, "TABLE", table)
    assert not found().refusal


def noise_on_both(release=None, upload=None):
    """Return a plan with noise on uploads and on the release, which counts both."""
    stages = jfl.bounded(0.5, "upload"), jfl.total(), jfl.gaussian(3.0), jfl.divide(8.0)
    release = release or jfl.chain(*stages, adjacency="replace_one")
    return make(upload=upload or NOISY(2.0), release=release, sampler=sampling.full(CLIENTS))


def in_rotation(release):
    return make(release=release, sampler=sampling.min_separation(CLIENTS, 4, 3))


def cyclic(strategy):
    sampler = sampling.cyclic_poisson(CLIENTS, 0.8, 2, capacity=CLIENTS)
    return make(release=correlated(strategy), sampler=sampler)


WIDE = jfl.strategies.banded_toeplitz(6, 3, participations=3, separation=2)
# need -> plans without and with it, of a rule that stands before another: the other one answers
CHOICES = {
    "STEADY": (
        lambda: in_rotation(FALLING()),
        lambda: in_rotation(NOISY(3.0)),
        lambda part: part.joint,
    ),
    "SHOWN": (
        lambda: make(release=NOISY(3.0), sampler=FIXED),
        lambda: make(release=NOISY(3.0), sampler=FIXED, stateful=True),
        lambda part: part.sampling == "participation",
    ),
    "NOISY_UPLOADS": (
        lambda: make(release=NOISY(3.0), sampler=sampling.full(CLIENTS)),
        noise_on_both,
        lambda part: part.summed is not None,
    ),
    "ISOTROPIC": (
        lambda: noise_on_both(NOISY(3.0)),
        noise_on_both,
        lambda part: part.summed is not None,
    ),
    "SAME_NEIGHBOURS": (
        lambda: noise_on_both(upload=NOISY(2.0, "zero_out")),
        noise_on_both,
        lambda part: part.summed is not None,
    ),
    "NARROW": (
        lambda: cyclic(WIDE),
        lambda: cyclic(NARROW),
        lambda part: np.isinf(part.factor).any(),
    ),
}


@pytest.mark.parametrize("need", CHOICES)
def test_a_better_rule_needs_what_it_says(need):
    without, with_it, is_better = CHOICES[need]
    wanted = "client", "third_party", "server"
    of = lambda plan: next(
        e for e in entries.entries(plan(), 6) if (e.unit, e.view, e.noise_of) == wanted
    )
    assert not is_better(of(without).parts[0]) and is_better(of(with_it).parts[0])


def test_every_need_has_a_case():
    of_rules = {need for found in rules.TABLE.values() for rule in found for need in rule.needs}
    needs = {n: v for n, v in vars(rules).items() if isinstance(v, rules.Need) and v in of_rules}
    assert len(needs) == len(of_rules)
    assert set(needs) == {need for _, need in CASES} | set(CHOICES) | {
        "LONG",
        "ASSUMED",
        "ROTATION",
    }


def test_needs_that_other_checks_make_first():
    """More rounds than a strategy has, and a view that is not declared, are refused before."""
    known = facts.read(make(release=correlated(TREE), sampler=FIXED), 6)
    later = known._replace(rounds=7)
    assert rules.LONG.test(known, known.release) and not rules.LONG.test(later, later.release)
    known = facts.read(make(upload=NOISY(3.0), sampler=FIXED), 6)
    with pytest.raises(NotAnalysable, match="secure_aggregation=True"):
        rules.find(known, known.upload, "client", "aggregate")
    alone = dataclasses.replace(sampling.min_separation(CLIENTS, 4, 3), separation=1)
    known = facts.read(make(release=NOISY(3.0), sampler=alone), 6)
    assert rules.find(known, known.release, "client", "third_party").name == "every round"


def test_what_has_no_row_names_the_nearest():
    plan = make(release=NOISY(3.0), sampler=FIXED)
    known = facts.read(plan, 6)
    odd = known.release._replace(adjacency="add_remove")
    with pytest.raises(NotAnalysable, match="a row of docs/matrix.md.*adjacency='zero_out'"):
        rules.find(known, odd, "client", "third_party")
    unknown = known.release._replace(scheme="a user's own")
    with pytest.raises(NotAnalysable, match="scheme='other'"):
        rules.find(known, unknown, "client", "third_party")


def test_rows_have_proofs():
    """A row of a sampled release has an event for its sample and adjacency."""
    for unit, place, _, _, scheme, adjacency in rules.TABLE:
        assert unit in ("example", "client") and adjacency in samples.ALL
        if place == "local step":
            assert adjacency in samples.EVENTS[facts.SCHEMES[scheme].kind]
        if place == "local training":
            assert adjacency in samples.EVENTS["touched"]


def test_examples_under_secure_aggregation_are_those_of_the_worst_client():
    """Noise for clients, zero_out, unequal weights: any client may be the worst, not the first."""
    weights = np.linspace(0.5, 1.5, CLIENTS)
    upload = NOISY(3.0, adjacency="zero_out")
    plan = secure(make(upload=upload, sampler=FIXED, weights=weights))
    turned = secure(make(upload=upload, sampler=FIXED, weights=weights[::-1].copy()))
    of = lambda plan, unit: jfl.guarantee(plan, 3, unit=unit, view="aggregate").epsilon
    assert of(plan, "example") == pytest.approx(of(turned, "example"), rel=1e-9)
    assert of(plan, "example") > of(plan, "client")
