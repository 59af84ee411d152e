"""The mode as_printed: a paper's formula read off the plan that runs, beside what the plan is
worth."""

import dataclasses

import numpy as np
import pytest
from helpers.ledger_plans import NOISY
from helpers.problems import make_federation, squared, start_params

import jfl
from experiments.papers import as_printed
from jfl import sampling
from jfl.core import pytrees, records
from jfl.local import training
from jfl.privacy.accountants import events, tightest
from jfl.runs import build, guarantee_rows
from jfl.runs import config as configs
from jfl.sampling import batches
from jfl.schedules import inverse_sqrt


def made(name, z, clients, cohort, rows, batch, steps, sizes=None):
    """A plan with the sizes of a paper and nothing in it."""
    sizes = np.full(clients, rows) if sizes is None else sizes
    zeros = np.zeros((clients, 1), int)
    fed = records.Federation(
        np.zeros((1, 1)),
        np.zeros(1, int),
        zeros,
        sizes,
        np.zeros((1, 1)),
        np.zeros(1, int),
        zeros[:, :0],
        np.zeros(clients, int),
    )
    nothing = records.Fn(abs)
    release = records.Release(NOISY(z), batches.without_replacement(batch, short="all"), steps)
    client = records.Fn(pytrees.add, dict(held=release))  # jfl's own, and holds what is declared
    alg = records.Algorithm(nothing, client, nothing, nothing, (release,), name)
    return records.Plan(
        fed,
        records.Task(nothing, nothing),
        alg,
        sampling.without_replacement(clients, cohort),
        None,
        jfl.chain(jfl.total()),
        np.ones(clients),
    )


@pytest.mark.parametrize(
    "setting, third",
    [
        (dict(z=60.0, clients=100, cohort=20, rows=4000, batch=800, steps=50, rounds=400), 12.91),
        (dict(z=30.0, clients=60, cohort=12, rows=800, batch=160, steps=50, rounds=100), 7.15),
    ],
)
def test_noble_prints_what_the_paper_prints(setting, third):
    rounds, s = setting["rounds"], {k: v for k, v in setting.items() if k != "rounds"}
    plan, delta = made("scaffold", **s), 1 / (s["clients"] * s["rows"])
    g = as_printed.claimed(plan, rounds, delta, view="third_party")
    assert (g.status, g.unit, g.adjacency, g.delta) == (
        "claimed",
        "example",
        "replace_one",
        delta,
    ) and g.caveats
    assert abs(g.epsilon - third) < 0.005
    # and the noise is worth far more than they say: 0.94 and 0.87 by Renyi alone
    proved = jfl.guarantee(plan, rounds, delta, view="third_party")
    assert proved.status == "proved" and proved.epsilon < 0.95
    assert as_printed.claimed(plan, rounds, delta).epsilon > g.epsilon / 5


def test_noble_noise_reaches_its_claim():
    plan = made("scaffold", 1.0, 100, 20, 4000, 800, 50)
    for view in as_printed.views(plan):
        z = as_printed.calibrate(plan, epsilon=20.0, rounds=100, view=view)
        again = made("scaffold", z, 100, 20, 4000, 800, 50)
        assert (
            20 * (1 - 1e-3) < as_printed.claimed(again, 100, view=view).epsilon <= 20 * (1 + 1e-6)
        )
    with pytest.raises(ValueError, match="infinite noise"):
        as_printed.calibrate(plan, epsilon=0.5, rounds=100, view="third_party")


def test_chen_prints_what_the_paper_prints():
    plan = made("dpnfl", 6.766 * 10 / 2, 100, 10, 600, 10, 300)
    g = as_printed.claimed(plan, 100, 1e-2)
    assert (
        abs(g.epsilon - 0.3) < 1e-4
        and "expected 10 participations" in g.caveats[0]
        and len(g.caveats) == 1
    )
    assert as_printed.views(plan) == ("server",)
    z = as_printed.calibrate(
        made("addpnfl", 1.0, 100, 10, 600, 10, 300), epsilon=0.3, rounds=100, delta=1e-2
    )
    np.testing.assert_allclose(z, np.full(100, 33.83), rtol=1e-4)
    # the server may see a client a hundred times: ten times the participations
    assert jfl.guarantee(plan, 100, 1e-2).epsilon < 0.1
    small = made("dpnfl", 20.0, 4, 2, 0, 10, 30, sizes=np.array([50, 600, 600, 0]))
    z = as_printed.calibrate(small, epsilon=0.3, rounds=10, delta=1e-2)
    assert z[0] > z[1] == z[2] and np.isfinite(z).all()
    assert any("Lemma 4" in c for c in as_printed.claimed(small, 10, 1e-2).caveats)


def output_plan(noise, clip_steps="all", rows=60, batch=2, lr=0.05):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise)
    alg = jfl.algorithms.output_perturbation(
        jfl.grad(squared), chain, lr=lr, steps=5, batch=batches.epochs(batch), clip_steps=clip_steps
    )
    fed = make_federation(sizes=(rows,) * 3)
    return jfl.plan(fed, jfl.task(start_params(), squared), alg, sampling.without_replacement(3, 1))


@pytest.mark.by_default("constant")
@pytest.mark.parametrize("lr", [0.05, inverse_sqrt(0.2)], ids=["constant", "falling"])
def test_li_prints_what_the_paper_prints(lr):
    """Its noise, read back from the plan, claims what it was made for; in truth it is short by the
    learning rate."""
    std = as_printed.calibrate(output_plan(jfl.gaussian(1.0), lr=lr), epsilon=0.5, rounds=4)
    for clip_steps in ("all", "last"):
        plan = output_plan(jfl.gaussian(std=std), clip_steps, lr=lr)
        g = as_printed.claimed(plan, 4)
        np.testing.assert_allclose(g.epsilon, 0.5, rtol=1e-5)
        assert "one round" in g.method and "Theorem 2" in g.caveats[-1]
        proved = jfl.guarantee(plan, 4).epsilon
        assert proved == np.inf if clip_steps == "last" else 10 < proved < np.inf


def test_li_noise_is_the_formula():
    """sigma = 8 lr^2 Q G q sqrt(2 log(1.25 q / delta)) / epsilon in the model, over the sum of
    learning rates."""
    std = as_printed.calibrate(output_plan(jfl.gaussian(1.0)), epsilon=0.5, rounds=1)
    q, lr, steps = 5 * 2 / 60, 0.05, 5
    sigma = 8 * lr * steps * q * np.sqrt(2 * np.log(1.25 * q / 1e-5)) / 0.5
    np.testing.assert_allclose(std(0), np.full(3, lr * sigma / (steps * lr)), rtol=1e-5)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(paper="noble"), "paper to be one of"),
        (dict(plan=lambda p: named(p, "fedprox")), "paper to be one of"),
        (dict(plan=lambda p: batched(p, batches.full())), "batches of a fixed size"),
        (dict(plan=lambda p: batched(p, batches.poisson(8.0))), "batches of a fixed size"),
        (
            dict(plan=lambda p: dataclasses.replace(p, sampler=sampling.poisson(100, 0.2))),
            "cohort of fixed size",
        ),
        (dict(paper="li2025"), "output_perturbation"),
        (dict(view="nobody"), "view to be one of"),
        (dict(plan=lambda p: silent(p)), "noise of the client's own"),
        (dict(rounds=0), "integer rounds"),
    ],
)
def test_formulas_are_for_their_plans(change, match):
    plan = change.pop("plan", lambda p: p)(made("scaffold", 60.0, 100, 20, 4000, 800, 50))
    with pytest.raises(ValueError, match=match):
        as_printed.claimed(plan, **dict(rounds=10) | change)


def named(plan, name):
    return dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, name=name))


def batched(plan, new):
    release = dataclasses.replace(plan.algorithm.releases[0], batches=new)
    return dataclasses.replace(
        plan, algorithm=dataclasses.replace(plan.algorithm, releases=(release,))
    )


def silent(plan):
    release = dataclasses.replace(plan.algorithm.releases[0], mechanism=None)
    return dataclasses.replace(
        plan, algorithm=dataclasses.replace(plan.algorithm, releases=(release,))
    )


# --- configs

BASE = configs.Config(clients=20, cohort=5, rounds=6, steps=5, partition="iid", model="logistic")


@pytest.mark.slow
def test_a_config_as_printed(monkeypatch):
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    config = dataclasses.replace(BASE, algorithm="scaffold", mode="as_printed", epsilon=20.0)
    plan, found = build.build(config)
    assert found.epsilon is None and found.noise_multiplier > 0
    rows = guarantee_rows.all_rows(plan, 6, 1e-5, (as_printed.claimed(plan, 6),))
    assert [r["status"] for r in rows] == ["proved", "proved", "claimed"]
    assert guarantee_rows.best(rows)["status"] == "proved" and rows[-1]["epsilon"] <= 20 * (
        1 + 1e-6
    )
    plan, found = build.build(dataclasses.replace(config, algorithm="addpnfl"))
    assert found.epsilon == 20.0 and np.shape(
        plan.algorithm.releases[0].mechanism.stages[2].noise
    ) == (20,)
    plan, _ = build.build(
        dataclasses.replace(config, algorithm="output_perturbation", batch=2, epsilon=0.5)
    )
    assert plan.algorithm.releases[0].mechanism is None
    with pytest.raises(ValueError, match="noise in local steps"):
        build.build(dataclasses.replace(config, unit="client"))


@pytest.mark.slow
def test_configs_of_changing_and_own_noise(monkeypatch):
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    config = dataclasses.replace(
        BASE, noise_multiplier=2.0, clip_decay=0.5, noise_decay=0.7, rounds=4
    )
    plan, _ = build.build(config)
    z = 2.0 * 0.7 ** (np.arange(4) / 4)
    least = int(np.asarray(plan.fed.size).min())
    each = events.compose(
        *(events.repeat(events.without_replacement(16, least, events.gaussian(v)), 5) for v in z)
    )
    np.testing.assert_allclose(
        jfl.guarantee(plan, 4).epsilon, tightest.epsilon(each, 1e-5)[0], rtol=1e-4
    )
    own, _ = build.build(dataclasses.replace(BASE, epsilon=3.0, per_client_noise=True))
    assert np.shape(own.algorithm.releases[0].mechanism.stages[2].noise) == (20,)
    assert 2.99 < jfl.guarantee(own, 6).epsilon <= 3.0
    slow, _ = build.build(dataclasses.replace(BASE, sampler="first_responders", latency_spread=5.0))
    assert slow.sampler.scheme == "first_responders"
    decayed, _ = build.build(
        dataclasses.replace(BASE, algorithm="scaffold", lr_schedule="inverse_sqrt", warm_rounds=2.0)
    )
    rate = lambda t: float(training.sum_of_rates(decayed.algorithm.client.data["work"].lr, t, 1))
    assert rate(0) == rate(4) == pytest.approx(0.3) and rate(5) == pytest.approx(0.3 / 2**0.5)


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(warm_rounds=2.0), "algorithm='scaffold' for warm_rounds"),
        (dict(adaptivity=0.1), "addpnfl"),
        (dict(paper="li2025"), "mode='as_printed' for paper"),
        (dict(mode="as_printed"), "noise_multiplier or epsilon for mode"),
        (dict(per_client_noise=True, noise_multiplier=1.0), "per_client_noise"),
        (dict(clip_decay=0.5), "clip_decay"),
        (dict(latency_spread=9.0), "first_responders"),
        (dict(algorithm="addpnfl", server_optimizer="adam"), "that takes server_optimizer"),
    ],
)
def test_fields_without_effect_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        configs.refuse_unused(dataclasses.replace(BASE, **changes))


# --- what an attack found


@pytest.mark.slow
def test_noise_that_follows_the_rounds_does_not_go_on(tmp_path, monkeypatch):
    """More rounds would mean other noise from the start: what was proved would not be what ran."""
    from jfl.runs import train

    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    small = dataclasses.replace(BASE, clients=4, cohort=2, rounds=2, steps=2, batch=8)
    for name, changes in dict(
        own=dict(per_client_noise=True, epsilon=5.0),
        decay=dict(noise_multiplier=1.0, noise_decay=0.5),
    ).items():
        config = dataclasses.replace(small, **changes)
        train.train(config, tmp_path / name)
        with pytest.raises(ValueError, match="for which the noise was computed"):
            train.train(dataclasses.replace(config, rounds=4), tmp_path / name, resume=True)
        train.train(config, tmp_path / name, resume=True)  # the same again is fine


@pytest.mark.parametrize(
    "changes",
    [
        dict(algorithm="fedprox"),
        dict(algorithm="scaffold", batch_sampler="poisson"),
        dict(algorithm="scaffold", noise_decay=0.5),
    ],
)
def test_what_cannot_be_claimed_is_refused_before_it_runs(changes, tmp_path, monkeypatch):
    from jfl.runs import train

    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    config = dataclasses.replace(BASE, mode="as_printed", noise_multiplier=1.0, **changes)
    with pytest.raises(ValueError, match="printed"):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("asked", [0.3, 5.0, 50.0])
def test_chen_claims_no_less_than_its_lemma(asked):
    """Lemma 2 up to its largest order, whatever the preconditions of Lemma 4 say."""
    from experiments.papers.chen2024 import claims as privacy

    plan = made("dpnfl", 1.0, 4, 2, 360, 8, 2)
    z = as_printed.calibrate(plan, epsilon=asked, rounds=2, delta=1e-3)
    again = made("dpnfl", float(z[0]), 4, 2, 360, 8, 2)
    sigma = float(z[0]) * 2 / 8
    rho, omega = 26 * 1 * 2 / (360 * sigma) ** 2, (8 * sigma) ** 2 * np.log(45) / 8
    want = float(privacy.lemma2(rho, omega, 1e-3)) if omega > 1 else np.inf
    assert (
        as_printed.claimed(again, 2, 1e-3).epsilon == pytest.approx(want, rel=1e-5)
        or want == np.inf
    )
    with pytest.raises(ValueError, match="view to be one of"):
        as_printed.calibrate(plan, epsilon=asked, rounds=2, view="third_party")


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(mode="as_printed", epsilon=0.5, clip="per_layer"), "flat clip"),
        (dict(mode="as_printed", epsilon=0.5, clip_decay=0.5), "flat clip"),
        (dict(unit="client", epsilon=1.0), "unit = example"),
    ],
)
def test_output_perturbation_has_one_clip(changes, match):
    with pytest.raises(ValueError, match=match):
        build.build(dataclasses.replace(BASE, algorithm="output_perturbation", batch=2, **changes))


def test_a_clip_without_noise_is_a_field_of_output_perturbation():
    configs.refuse_unused(dataclasses.replace(BASE, algorithm="output_perturbation", clip_norm=2.0))
    with pytest.raises(ValueError, match="clip_norm"):
        configs.refuse_unused(dataclasses.replace(BASE, clip_norm=2.0))


def test_the_noise_that_ran_is_written_down(monkeypatch):
    monkeypatch.setattr(tightest, "has_loss_distribution", lambda *args: False)
    plan, _ = build.build(
        dataclasses.replace(BASE, noise_multiplier=2.0, noise_decay=0.25, rounds=3)
    )
    ((low, high),) = guarantee_rows.noise_levels(plan, 3)
    assert high == 2.0 and low == pytest.approx(2.0 * 0.25 ** (2 / 3))
