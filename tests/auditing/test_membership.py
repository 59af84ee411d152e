"""Membership inference: scores as loops, shadow models as trainings without rows, and bounds."""

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import audit_plans
from helpers.audit_plans import CLIENTS, ROWS
from helpers.problems import design_matrices, make_federation
from scipy import stats

import jfl
from jfl.auditing import membership, trials
from jfl.privacy.mechanisms import chain as mech

SURE = 1 - 1e-6


# --- scores


def drawn(seed=0, models=12, targets=3, references=5):
    """Losses, losses of references, coins and learners; each learner's target has both kinds."""
    r = np.random.default_rng(seed)
    losses, others = r.exponential(size=(models, targets)), r.exponential(size=(models, references))
    included = r.random((models, targets)) < 0.5
    included[:4] = np.array([True, True, False, False])[:, None]
    return losses, others, included, np.arange(models) < 8


def learned(value, included, learns, model, side):
    """The values of one target under other learning models on one side of the coin."""
    return [
        value[other]
        for other in range(len(value))
        if other != model and learns[other] and included[other] == side
    ]


@pytest.mark.parametrize("everyone", [True, False])
def test_lira_is_the_ratio_of_two_normal_densities(everyone):
    losses, _, included, learns = drawn()
    learns = learns | everyone
    got = membership.lira(losses, included, learns)
    p = np.exp(-losses)
    scaled = np.log(p / (1 - p))
    for s in range(len(losses)):
        for t in range(losses.shape[1]):
            want = 0.0
            for sign, side in ((1, True), (-1, False)):
                of = learned(scaled[:, t], included[:, t], learns, s, side)
                want += sign * stats.norm.logpdf(scaled[s, t], np.mean(of), np.std(of))
            assert got[s, t] == pytest.approx(want, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("everyone", [True, False])
def test_rmia_is_a_rank_among_reference_rows(everyone):
    losses, others, included, learns = drawn()
    learns = learns | everyone
    got = membership.rmia(losses, included, learns, others)
    p, q = np.exp(-losses), np.exp(-others)
    for s in range(len(losses)):
        typical = [
            q[s, z] / np.mean([q[o, z] for o in range(len(q)) if o != s and learns[o]])
            for z in range(others.shape[1])
        ]
        for t in range(losses.shape[1]):
            sides = [learned(p[:, t], included[:, t], learns, s, side) for side in (True, False)]
            ratio = p[s, t] / ((np.mean(sides[0]) + np.mean(sides[1])) / 2)
            below = sum(ratio >= other for other in typical)
            # the ratio decides only between equal ranks
            want = (below + ratio / (1 + ratio)) / (len(typical) + 1)
            assert got[s, t] == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("loss", [0.0, 800.0])
def test_losses_at_the_ends_of_floats_have_finite_scores(loss):
    losses, others, included, learns = drawn()
    losses[:, 0], others[:, 0] = loss, loss
    assert np.isfinite(membership.lira(losses, included, learns)).all()
    assert np.isfinite(membership.rmia(losses, included, learns, others)).all()


@pytest.mark.parametrize("name", ["lira", "rmia"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_score_depends_on_its_model_and_on_what_was_learned(name, constant):
    """Other judged models have no effect, so scores are independent, as the bounds assume."""
    losses, others, included, learns = drawn()
    if constant:
        losses[learns] = 0.7
    attack = getattr(membership, name)
    scores_of = lambda *a: attack(*a, *[others] * (name == "rmia"))
    scores = scores_of(losses, included, learns)
    losses[-1], included[-1], others[-1] = 9.0, ~included[-1], 5.0
    assert np.isfinite(scores).all()
    assert np.array_equal(scores_of(losses, included, learns)[:-1], scores[:-1])


# --- shadow models


def regression(**options):
    """A linear regression without noise, in which every client takes one step on all rows."""
    grad = jfl.grad(audit_plans.squared)
    fedavg = jfl.algorithms.fedavg(grad, steps=1, lr=0.3, batch=jfl.batches.full())
    return jfl.plan(
        audit_plans.FED, audit_plans.TASK, fedavg, jfl.sampling.full(CLIENTS), **options
    )


def trained_in_numpy(excluded_rows, excluded_clients, rounds):
    """The losses of all rows after `rounds` rounds; what is excluded counts as a zero."""
    w = np.array([0.2, 0.5, -0.3, 0.1])
    index = np.asarray(audit_plans.FED.index)
    clients = list(design_matrices(audit_plans.FED))
    for _ in range(rounds):
        sent = []
        for c, (x, y) in enumerate(clients):
            kept = ~np.isin(index[c, :ROWS], excluded_rows) & (c not in excluded_clients)
            sent.append(-0.3 * x.T @ (kept * (x @ w - y)) / ROWS)
        w = w + np.mean(sent, 0)
    losses = np.zeros(len(audit_plans.FED.x))
    for c, (x, y) in enumerate(clients):
        losses[index[c, :ROWS]] = 0.5 * (x @ w - y) ** 2
    return losses


def test_a_shadow_model_is_trained_without_the_excluded_rows():
    found = jfl.audit_membership(regression(), 3, 64, 5)
    for shadow in (0, 1, 63):
        excluded = found.targets[~found.included[shadow]]
        losses = trained_in_numpy(excluded, [], 3)[found.targets]
        np.testing.assert_allclose(found.losses[shadow], losses, rtol=1e-4, atol=1e-6)


def test_a_shadow_model_is_trained_without_the_excluded_clients():
    found = jfl.audit_membership(regression(), 3, 64, [0, 2], unit="client")
    index = np.asarray(audit_plans.FED.index)
    for shadow in (0, 1, 63):
        excluded = found.targets[~found.included[shadow]]
        losses = trained_in_numpy([], excluded, 3)[index[found.targets, :ROWS]].mean(1)
        np.testing.assert_allclose(found.losses[shadow], losses, rtol=1e-4, atol=1e-6)
    assert found.unit == "client" and {*map(len, found.included.T)} == {64}


def test_all_blocks_are_one_program(monkeypatch):
    """The number of blocks changes neither the number of compilations nor a shadow model."""
    compiled, counts, losses = [], [], []
    keep = logging.Handler()
    keep.emit = lambda record: compiled.append(record.getMessage())
    logging.getLogger("jax").addHandler(keep)
    try:
        for most in (64, 32, 16):
            monkeypatch.setattr(trials, "MAX_BLOCK", most)
            compiled.clear()
            with jax.log_compiles():
                plan = audit_plans.of_clients(2.0)
                found = jfl.audit_membership(plan, 2, 64, [0], unit="client")
            counts.append(sum("XLA compilation of jit(run_all)" in m for m in compiled))
            losses.append(found.losses)
    finally:
        logging.getLogger("jax").removeHandler(keep)
    assert counts == [1, 1, 1]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5, atol=1e-6)
    assert len(np.unique(losses[0])) > 60  # each shadow model has noise of its own


# --- what is found


def memorised(noise=None):
    """Twenty-four rows with random labels and more features than rows, of four clients."""
    r = np.random.default_rng(1)
    x, y = r.normal(size=(64, 30)).astype(np.float32), r.integers(0, 2, 64)
    rows = jfl.datasets.arrays(x[:24], y[:24], x[24:], y[24:])
    fed = jfl.federate(rows, jfl.partition.iid(4))
    task = jfl.models.logistic(fed)
    grad = jfl.grad(task.loss)
    if noise is not None:
        stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(6.0)
        grad = jfl.private_grad(task.loss, jfl.chain(*stages))
    fedavg = jfl.algorithms.fedavg(grad, steps=5, lr=1.0, batch=jfl.batches.full())
    return jfl.plan(fed, task, fedavg, jfl.sampling.full(4))


def test_a_model_that_memorises_is_attacked():
    """An attack without an effect would pass with probability 1e-6.

    With coins that say nothing about the training, nothing is found.
    """
    found = jfl.audit_membership(memorised(), 5, 512, 24, fpr=[0.1, 0.01], confidence=SURE)
    assert [attack.name for attack in found.attacks] == ["LiRA", "RMIA"]
    for attack in found.attacks:
        assert attack.auroc > 0.9 and attack.auroc_bound > 0.6
        assert attack.tpr_bound[0] > 0.2 and attack.tpr[0] > 0.7
    assert found.allowed.tolist() == [1.0, 1.0] and not found.contradicted
    assert "no guarantee" in str(found) and "another attack may find more" in str(found)

    wrong, rates = found.included[::-1], np.array([0.1])
    ranks = functools.partial(membership.rmia, references=found.losses)
    for attack in (membership.lira, ranks):
        draw = np.random.default_rng(0)
        none = membership._judge("none", attack, found.losses, wrong, rates, SURE, draw)
        assert none.auroc_bound < 0.5 and none.tpr_bound.tolist() == [0.1]
        assert none.auroc == pytest.approx(0.5, abs=0.05)


def test_a_private_model_is_not():
    """The bounds exceed what is allowed with probability at most 1e-6."""
    found = jfl.audit_membership(memorised(4.0), 2, 256, 24, fpr=[0.1, 0.01], confidence=SURE)
    assert found.proved.status == "proved" and found.proved.view == "third_party"
    for attack in found.attacks:
        assert attack.auroc_bound < 0.5 and attack.auroc < 0.65
        assert np.all(attack.tpr_bound <= found.allowed)
    assert max(found.allowed) < 1 and not found.contradicted
    assert "CONTRADICTED" not in str(found) and ".proved.caveats" in str(found)


def test_noise_that_is_too_small_is_contradicted(monkeypatch):
    """A hundredth of the noise: a client's membership shows, where a rate of 0.2 is allowed."""
    whole = mech.sensitivity
    monkeypatch.setattr(mech, "sensitivity", lambda *arguments: whole(*arguments) / 100)
    plan = audit_plans.of_clients(3.0)
    found = jfl.audit_membership(plan, 1, 512, [0], unit="client", fpr=[0.1], confidence=SURE)
    assert found.contradicted and "CONTRADICTED" in str(found)
    assert found.attacks[0].tpr_bound[0] > found.allowed[0]


def test_bounds_hold_as_often_as_they_say():
    """Normal scores at a distance of 1.5, 300 times at level 0.05: more than 30 failures have a
    probability below 1e-4.  The same bounds are not far from the truth, so those of scores at a
    distance of 3 fail almost always."""
    r, failures, too_far = np.random.default_rng(0), np.zeros(2), np.zeros(2)
    fpr = np.array([0.1])
    truth = np.array(
        [stats.norm.cdf(1.5 / math.sqrt(2)), stats.norm.cdf(1.5 + stats.norm.ppf(0.1))]
    )
    for _ in range(300):
        normals = np.sort(r.normal(size=(2, 250)), axis=1)
        for shift, count in ((1.5, failures), (3.0, too_far)):
            auroc, tpr = membership.lower_bounds(normals[0] + shift, normals[1], fpr, 0.05)
            count += np.array([auroc, tpr[0]]) > truth
    assert np.all(failures <= 30) and np.all(too_far > 200)


def test_a_threshold_that_accepts_too_much_is_thinned():
    """A hundred perfect scores cannot show a rate of 1e-3, but a tenth of them."""
    inside, outside = np.arange(100.0) + 1000, np.arange(100.0)
    bound = membership.lower_bounds(inside, outside, np.array([1e-3]), 0.05)[1]
    rate = 1 - (0.05 / (2 * membership.NUM_THRESHOLDS)) ** (1 / 100)
    assert bound[0] == pytest.approx((1 - rate) * 1e-3 / rate)


def test_targets_without_test_rows_have_no_rmia():
    found = jfl.audit_membership(regression(), 1, 64, unit="client")  # 6 test rows, 8 of a client
    assert [attack.name for attack in found.attacks] == ["LiRA"]
    assert len(found.targets) == CLIENTS


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(shadows=10), "shadows"),
        (dict(targets=[]), "numbers of rows of clients"),
        (dict(targets=[10_000]), "numbers of rows of clients"),
        (dict(targets=[CLIENTS], unit="client"), "ids of clients with rows"),
        (dict(targets=[True, False]), "numbers of rows of clients"),
        (dict(targets=[1.0, 2.0]), "numbers of rows of clients"),
        (dict(fpr=[2.0]), r"fpr, numbers in \[0, 1\]"),
        (dict(fpr=[]), r"fpr, numbers in \[0, 1\]"),
        (dict(fpr=math.nan), r"fpr, numbers in \[0, 1\]"),
        (dict(shadows=64, confidence=SURE), r"shadows >= \d+ for this confidence"),
        (dict(unit="row"), "unit"),
    ],
)
def test_wrong_arguments(change, message, monkeypatch):
    monkeypatch.setattr(membership, "_train", None)  # they are rejected before the training
    with pytest.raises(ValueError, match=message):
        jfl.audit_membership(regression(), 1, **change)


def test_plans_in_which_absence_is_something_else():
    shared = make_federation(sizes=(ROWS,) * CLIENTS)
    index = np.asarray(shared.index).copy()
    index[1, 0] = index[0, 0]
    shared = dataclasses.replace(shared, index=jnp.asarray(index))
    fedavg = jfl.algorithms.fedavg(jfl.grad(audit_plans.squared))
    plan = jfl.plan(shared, audit_plans.TASK, fedavg, jfl.sampling.full(CLIENTS))
    with pytest.raises(jfl.errors.NotAnalysable, match="rows with one owner each"):
        jfl.audit_membership(plan, 1)
    poisson = jfl.sampling.poisson(CLIENTS, 1.0)
    votes = audit_plans.of_clients(1.0, poisson, release=audit_plans.adaptive())
    with pytest.raises(jfl.errors.NotAnalysable, match="no client votes on"):
        jfl.audit_membership(votes, 1, unit="client")
