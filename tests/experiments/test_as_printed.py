"""The mode as_printed: a paper's formula read off the plan that runs, beside what the plan is
worth."""

import dataclasses

import numpy as np
import pytest
from helpers.ledger_plans import NOISY
from helpers.problems import make_federation, squared, start_params

import jfl
from experiments.papers import as_printed
from experiments.papers.chen2024 import claims as chen
from jfl import sampling
from jfl.core import pytrees, records
from jfl.local import training
from jfl.privacy.accountants import events, tightest
from jfl.runs import build, guarantee_rows, train
from jfl.runs import config as configs
from jfl.sampling import batches
from jfl.schedules import inverse_sqrt


@pytest.fixture
def by_renyi(monkeypatch):
    """Without loss distributions, which take seconds."""
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)


def made(name, z, clients, cohort, rows, batch, steps):
    """A plan with the sizes of a paper and nothing in it; `rows` of every client, or of each."""
    sizes = np.broadcast_to(rows, clients)
    zeros = np.zeros((clients, 1), int)
    x, y = np.zeros((1, 1)), np.zeros(1, int)
    fed = records.Federation(x, y, zeros, sizes, x, y, zeros[:, :0], np.zeros(clients, int))
    nothing = records.Fn(abs)
    release = records.Release(NOISY(z), batches.without_replacement(batch, short="all"), steps)
    client = records.Fn(pytrees.add, dict(held=release))  # jfl's own, and holds what is declared
    alg = records.Algorithm(nothing, client, nothing, nothing, (release,), name)
    sampler = sampling.without_replacement(clients, cohort)
    task, chain = records.Task(nothing, nothing), jfl.chain(jfl.total())
    return records.Plan(fed, task, alg, sampler, None, chain, np.ones(clients))


@pytest.mark.parametrize(
    "sizes, rounds, third",
    [((60.0, 100, 20, 4000, 800, 50), 400, 12.91), ((30.0, 60, 12, 800, 160, 50), 100, 7.15)],
)
def test_noble_prints_what_the_paper_prints(sizes, rounds, third, by_renyi):
    plan, delta = made("scaffold", *sizes), 1 / (sizes[1] * sizes[3])
    g = as_printed.claimed(plan, rounds, delta, view="third_party")
    assert (g.status, g.unit, g.adjacency) == ("claimed", "example", "replace_one")
    assert g.delta == delta and g.caveats and abs(g.epsilon - third) < 0.005
    # and the noise is worth far more than they say: 0.94 and 0.87
    proved = jfl.guarantee(plan, rounds, delta, view="third_party")
    assert proved.status == "proved" and proved.epsilon < 0.95
    assert as_printed.claimed(plan, rounds, delta).epsilon > g.epsilon / 5


def test_noble_noise_reaches_its_claim():
    plan = made("scaffold", 1.0, 100, 20, 4000, 800, 50)
    for view in as_printed.views(plan):
        z = as_printed.calibrate(plan, epsilon=20.0, rounds=100, view=view)
        again = made("scaffold", z, 100, 20, 4000, 800, 50)
        reached = as_printed.claimed(again, 100, view=view).epsilon
        assert 20 * (1 - 1e-3) < reached <= 20 * (1 + 1e-6)
    with pytest.raises(ValueError, match="infinite noise"):
        as_printed.calibrate(plan, epsilon=0.5, rounds=100, view="third_party")


def test_chen_prints_what_the_paper_prints(by_renyi):
    plan = made("dpnfl", 6.766 * 10 / 2, 100, 10, 600, 10, 300)
    g = as_printed.claimed(plan, 100, 1e-2)
    assert abs(g.epsilon - 0.3) < 1e-4 and len(g.caveats) == 1
    assert "expected 10 participations" in g.caveats[0] and as_printed.views(plan) == ("server",)
    adaptive = made("addpnfl", 1.0, 100, 10, 600, 10, 300)
    z = as_printed.calibrate(adaptive, epsilon=0.3, rounds=100, delta=1e-2)
    np.testing.assert_allclose(z, np.full(100, 33.83), rtol=1e-4)
    # the server may see a client a hundred times, ten times the participations, and yet
    assert jfl.guarantee(plan, 100, 1e-2).epsilon < g.epsilon
    small = made("dpnfl", 20.0, 4, 2, np.array([50, 600, 600, 0]), 10, 30)
    z = as_printed.calibrate(small, epsilon=0.3, rounds=10, delta=1e-2)
    assert z[0] > z[1] == z[2] and np.isfinite(z).all()
    assert any("Lemma 4" in c for c in as_printed.claimed(small, 10, 1e-2).caveats)


def test_chen_claims_no_less_than_its_lemma():
    """Lemma 2 up to its largest order, whatever the preconditions of Lemma 4 say; and without
    sampling, where no order is left."""
    plan = lambda z: made("dpnfl", z, 4, 2, 360, 8, 2)
    for asked in (0.3, 50.0):
        z = float(as_printed.calibrate(plan(1.0), epsilon=asked, rounds=2, delta=1e-3)[0])
        sigma = z * 2 / 8
        rho, omega = 26 * 1 * 2 / (360 * sigma) ** 2, (8 * sigma) ** 2 * np.log(45) / 8
        claimed = as_printed.claimed(plan(z), 2, 1e-3).epsilon
        assert claimed == pytest.approx(float(chen.lemma2(rho, omega, 1e-3)), rel=1e-5)
    whole = float(chen.lemma2(2 * 2 / (8 * 0.1 * 2 / 8) ** 2, np.inf, 1e-3))
    assert as_printed.claimed(plan(0.1), 2, 1e-3).epsilon == pytest.approx(whole, rel=1e-5)


def output_plan(noise, clip_steps="all", rows=60, batch=2, lr=0.05):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise)
    alg = jfl.algorithms.output_perturbation(
        jfl.grad(squared), chain, lr=lr, steps=5, batch=batches.epochs(batch), clip_steps=clip_steps
    )
    fed = make_federation(sizes=(rows,) * 3)
    return jfl.plan(fed, jfl.task(start_params(), squared), alg, sampling.without_replacement(3, 1))


@pytest.mark.by_default("constant")
@pytest.mark.parametrize("lr", [0.05, inverse_sqrt(0.2)], ids=["constant", "falling"])
def test_li_prints_what_the_paper_prints(lr, by_renyi):
    """Its noise, read back from the plan, claims what it was made for; in truth it is short by the
    learning rate."""
    std = as_printed.calibrate(output_plan(jfl.gaussian(1.0), lr=lr), epsilon=0.5, rounds=4)
    for clip_steps in ("all", "last"):
        plan = output_plan(jfl.gaussian(std=std), clip_steps, lr=lr)
        g = as_printed.claimed(plan, 4)
        np.testing.assert_allclose(g.epsilon, 0.5, rtol=1e-5)
        assert g.rounds == 1 and "one round" in g.method and "Theorem 2" in g.caveats[-1]
        proved = jfl.guarantee(plan, 4).epsilon
        assert proved == np.inf if clip_steps == "last" else 10 < proved < np.inf


def test_li_noise_is_the_formula():
    """sigma = 8 lr^2 Q G q sqrt(2 log(1.25 q / delta)) / epsilon in the model, over the sum of
    learning rates."""
    std = as_printed.calibrate(output_plan(jfl.gaussian(1.0)), epsilon=0.5, rounds=1)
    q, lr, steps = 5 * 2 / 60, 0.05, 5
    sigma = 8 * lr * steps * q * np.sqrt(2 * np.log(1.25 * q / 1e-5)) / 0.5
    np.testing.assert_allclose(std(0), np.full(3, lr * sigma / (steps * lr)), rtol=1e-5)


def released(plan, **changes):
    release = dataclasses.replace(plan.algorithm.releases[0], **changes)
    algorithm = dataclasses.replace(plan.algorithm, releases=(release,))
    return dataclasses.replace(plan, algorithm=algorithm)


def named(plan, name):
    return dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, name=name))


@pytest.mark.parametrize(
    "change, more, match",
    [
        (lambda p: named(p, "fedprox"), {}, "paper to be one of"),
        (lambda p: released(p, batches=batches.full()), {}, "batches of a fixed size"),
        (lambda p: released(p, batches=batches.poisson(8.0)), {}, "batches of a fixed size"),
        (lambda p: released(p, batches=batches.epochs(8)), {}, "batches of a fixed size"),
        (
            lambda p: dataclasses.replace(p, sampler=sampling.poisson(100, 0.2)),
            {},
            "cohort of fixed size",
        ),
        (lambda p: released(p, mechanism=None), {}, "noise of the client's own"),
        (lambda p: p, dict(paper="li2025"), "output_perturbation"),
        (lambda p: named(p, "dpnfl"), dict(view="third_party"), "view to be one of"),
    ],
)
def test_formulas_are_for_their_plans(change, more, match):
    plan = change(made("scaffold", 60.0, 100, 20, 4000, 800, 50))
    with pytest.raises(ValueError, match=match):
        as_printed.claimed(plan, **dict(rounds=10) | more)


# --- configs

BASE = configs.Config(clients=20, cohort=5, rounds=6, steps=5, partition="iid", model="logistic")


def of(**changes):
    return dataclasses.replace(BASE, **changes)


@pytest.mark.slow
def test_a_config_as_printed(by_renyi):
    config = of(algorithm="scaffold", mode="as_printed", epsilon=20.0)
    plan, found = build.build(config)
    assert found.epsilon is None and found.noise_multiplier > 0
    rows = guarantee_rows.all_rows(plan, 6, 1e-5, (as_printed.claimed(plan, 6),))
    assert [r["status"] for r in rows] == ["proved", "proved", "claimed"]
    assert guarantee_rows.best(rows)["status"] == "proved"
    assert rows[-1]["epsilon"] <= 20 * (1 + 1e-6)
    plan, found = build.build(dataclasses.replace(config, algorithm="addpnfl"))
    noise = plan.algorithm.releases[0].mechanism.stages[2].noise
    assert found.epsilon == 20.0 and np.shape(noise) == (20,)
    config = dataclasses.replace(config, algorithm="output_perturbation", batch=2, epsilon=0.5)
    assert build.build(config)[0].algorithm.releases[0].mechanism is None


@pytest.mark.slow
def test_configs_of_changing_and_own_noise(by_renyi):
    plan, _ = build.build(of(noise_multiplier=2.0, clip_decay=0.5, noise_decay=0.7, rounds=4))
    least = int(np.asarray(plan.fed.size).min())
    one = lambda z: events.without_replacement(16, least, events.gaussian(z))
    falling = 2.0 * 0.7 ** (np.arange(4) / 4)
    whole = events.compose(*(events.repeat(one(z), 5) for z in falling))
    want = tightest.epsilon(whole, 1e-5)[0]
    np.testing.assert_allclose(jfl.guarantee(plan, 4).epsilon, want, rtol=1e-4)
    ((low, high),) = guarantee_rows.noise_levels(plan, 4)  # what ran is written down
    assert high == 2.0 and low == pytest.approx(falling[-1])
    own, _ = build.build(of(epsilon=3.0, per_client_noise=True))
    assert np.shape(own.algorithm.releases[0].mechanism.stages[2].noise) == (20,)
    assert 2.99 < jfl.guarantee(own, 6).epsilon <= 3.0
    slow, _ = build.build(of(sampler="first_responders", latency_spread=5.0))
    assert slow.sampler.scheme == "first_responders"
    decayed, _ = build.build(of(algorithm="scaffold", lr_schedule="inverse_sqrt", warm_rounds=2.0))
    rate = lambda t: float(training.sum_of_rates(decayed.algorithm.client.data["work"].lr, t, 1))
    assert rate(0) == rate(4) == pytest.approx(0.3) and rate(5) == pytest.approx(0.3 / 2**0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [dict(per_client_noise=True, epsilon=5.0), dict(noise_multiplier=1.0, noise_decay=0.5)],
    ids=["own", "falling"],
)
def test_noise_that_follows_the_rounds_does_not_go_on(changes, tmp_path, by_renyi):
    """More rounds would mean other noise from the start: what was proved would not be what ran."""
    config = of(clients=4, cohort=2, rounds=2, steps=2, batch=8, **changes)
    train.train(config, tmp_path)
    with pytest.raises(ValueError, match="for which the noise was computed"):
        train.train(dataclasses.replace(config, rounds=4), tmp_path, resume=True)
    train.train(config, tmp_path, resume=True)  # the same again is fine


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(paper="li2025"), "mode='as_printed' for paper"),
        (dict(mode="as_printed"), "noise_multiplier or epsilon for mode"),
        (dict(per_client_noise=True, noise_multiplier=1.0), "per_client_noise"),
        (dict(clip_decay=0.5), "clip_decay"),
        (dict(clip_norm=2.0), "clip_norm"),
    ],
)
def test_fields_without_effect_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        configs.refuse_unused(of(**changes))


PERTURBED = dict(algorithm="output_perturbation", batch=2)


@pytest.mark.parametrize(
    "changes, match",
    [
        (PERTURBED | dict(mode="as_printed", epsilon=0.5, clip="per_layer"), "flat clip"),
        (PERTURBED | dict(mode="as_printed", epsilon=0.5, clip_decay=0.5), "flat clip"),
        (PERTURBED | dict(unit="client", epsilon=1.0), "unit = example"),
        (
            dict(algorithm="scaffold", mode="as_printed", epsilon=20.0, unit="client"),
            "noise in local steps",
        ),
    ],
)
def test_what_no_formula_covers_is_not_built(changes, match):
    with pytest.raises(ValueError, match=match):
        build.build(of(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm="fedprox"),
        dict(algorithm="scaffold", batch_sampler="poisson"),
        dict(algorithm="scaffold", noise_decay=0.5),
    ],
)
def test_what_cannot_be_claimed_is_refused_before_it_runs(changes, tmp_path, by_renyi):
    with pytest.raises(ValueError, match="printed"):
        train.train(of(mode="as_printed", noise_multiplier=1.0, **changes), tmp_path / "run")
    assert not list(tmp_path.glob("run/*"))
