"""Plans of the study of promises: noise that reaches what is stated, and what recipes change."""

import dataclasses

import jax
import numpy as np
import pytest

import jfl
from experiments.studies import recipes
from experiments.studies.recipes import Made
from jfl.runs import build
from jfl.runs.config import Config

BASE = dict(dataset="digits", model="logistic", partition="iid", batch=4, steps=2, rounds=3)
GROUPS = dict(clients=6, groups=(3, 3), group_rows=(20, 60))
CLIENT = BASE | dict(unit="client", view="third_party")
EXAMPLE = BASE | dict(unit="example", view="server")
CASES = dict(
    uploads=CLIENT | dict(clients=6),
    impact=CLIENT
    | GROUPS
    | dict(algorithm="padpfl", upload="difference", impact=(1.0, 3.0), batch_sampler="full"),
    of_each=EXAMPLE | GROUPS,
    by_variance=EXAMPLE | GROUPS | dict(algorithm="addpnfl"),
    known_noise=EXAMPLE | GROUPS | dict(algorithm="addpnfl"),
    contracting=EXAMPLE | dict(clients=6, preprocess="unit_norm"),
    prox_erm={k: v for k, v in EXAMPLE.items() if k not in ("batch", "steps")}
    | dict(clients=6, preprocess="unit_norm", algorithm="padpfl", upload="difference", mu=3.0)
    | dict(batch_sampler="full"),
    measured=EXAMPLE | dict(clients=6),
    by_level=EXAMPLE | dict(clients=6),
)
KEY = jax.random.key(0)


def made(name, **changes):
    return Made(**CASES[name] | dict(epsilon=20.0, recipe=name) | changes)


def test_every_recipe_has_a_case():
    assert set(CASES) == set(recipes.RECIPES)


@pytest.mark.by_default("uploads", "impact", "contracting", "prox_erm")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("endless_noise")  # half the noise of one release ends too early
def test_noise_reaches_what_is_stated(name):
    config = made(name)
    config = dataclasses.replace(config, noise=recipes.noise_of(config))
    found = recipes.worth(config)
    assert 0.97 * 20 <= found.epsilon <= 20 * (1 + 1e-5)
    conditional = ("uploads", "contracting", "prox_erm", "measured", "by_level")
    assert found.status == ("conditional" if name in conditional else "proved")
    assert found.view == (recipes.RECIPES[name].view or config.view) and found.unit == config.unit
    less = dataclasses.replace(config, noise=tuple(0.5 * z for z in config.noise))
    assert recipes.worth(less).epsilon > 1.2 * 20


@pytest.mark.slow
def test_the_energies_are_paid_for():
    config = dataclasses.replace(made("measured"), noise=(2.0,))
    both = recipes.worth(config)
    plan = recipes.plan_of(config)
    training = jfl.guarantee(plan, config.rounds, config.delta, "example", "server")
    estimate = jfl.guarantee(recipes.energies(config), 1, config.delta, "example", "server")
    assert training.epsilon < both.epsilon <= training.epsilon + estimate.epsilon
    assert estimate.epsilon == pytest.approx(recipes.SHARE * 20, rel=0.03)


@pytest.mark.slow
def test_the_shape_follows_the_energies_that_a_run_measured():
    one, other = (recipes.plan_of(made("measured", noise=(2.0,), seed=s)) for s in (1, 2))
    scales = [
        np.asarray(p.algorithm.releases[0].mechanism.stages[-2].shape.scales) for p in (one, other)
    ]
    assert scales[0].shape == scales[1].shape and np.abs(scales[0] - scales[1]).max() > 0
    assert np.ptp(scales[0]) > 0.1  # not isotropic


def test_levels_are_clipped_by_their_measured_energies():
    """Squares of the norms add up to that of the clip norm, in the order of the energies, and the
    noise has the shape that it has where all levels are clipped together."""
    config = made("by_level", noise=(2.0,), clip_norm=0.5)
    plan, joint = (
        recipes.plan_of(dataclasses.replace(config, recipe=name))
        for name in ("by_level", "measured")
    )
    clip, *_, noise, _ = plan.algorithm.releases[0].mechanism.stages
    bounds = np.asarray(clip.apply.data["bounds"], float)
    energies = np.array(
        recipes._measured(made("measured", lr=0.1, clip_norm=1.0, band_exponent=0.25))
    )
    energies += 1e-3 * energies.mean()
    np.testing.assert_allclose(bounds**2, 0.25 * energies / energies.sum(), rtol=1e-4)
    _, _, other, _ = joint.algorithm.releases[0].mechanism.stages
    np.testing.assert_array_equal(noise.shape.scales, other.shape.scales)


def model(out):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(out.run.server.params)])


@pytest.mark.slow
def test_a_factor_before_the_clip_is_a_weight_where_nothing_is_clipped():
    quiet = dict(noise=(1e-6,), clip_norm=10.0)
    scaled = jfl.simulate(KEY, recipes.plan_of(made("impact", **quiet)), 3)
    fields = {f.name: getattr(made("impact"), f.name) for f in dataclasses.fields(Config)}
    plain = Config(**fields | dict(epsilon=None, unit=None, view=None))
    weighted = model(jfl.simulate(KEY, build.build(plain)[0], 3))
    np.testing.assert_allclose(model(scaled), weighted, atol=1e-4)
    equal = recipes.plan_of(made("impact", **quiet | dict(impact=(1.0, 1.0))))
    assert np.abs(model(jfl.simulate(KEY, equal, 3)) - weighted).max() > 1e-2


@pytest.mark.slow
def test_the_variance_of_the_mean_is_the_one_that_is_known():
    """Of models that hardly learn, since their clip norm is small: 1,300 numbers, five errors."""
    config = made("by_variance", noise=(4.0, 1.5), clip_norm=1e-3, lr=100.0, algorithm="fedavg")
    plan, each = recipes.plan_of(config), recipes.variances(config)
    weights = np.asarray(plan.weights)
    np.testing.assert_allclose(weights * each, (weights * each)[0], rtol=1e-5)
    assert weights.mean() == pytest.approx(1) and np.ptp(weights) > 1
    ends = [model(jfl.simulate(jax.random.key(s), plan, 1)) for s in range(4)]
    seen = np.var(np.subtract(ends[::2], ends[1::2])) / 2
    adaptive = dataclasses.replace(config, algorithm="addpnfl", recipe="known_noise")
    server = recipes.plan_of(adaptive).algorithm.server
    known = float(server.data["step"].optimizer.data["noise_std"]) ** 2
    assert seen == pytest.approx(known, rel=0.2)
    uniform = recipes.plan_of(dataclasses.replace(config, recipe="of_each"))
    other = [model(jfl.simulate(jax.random.key(s), uniform, 1)) for s in range(4)]
    assert np.var(np.subtract(other[::2], other[1::2])) / 2 > 1.5 * known  # weights matter


def test_what_may_not_contract_is_refused():
    with pytest.raises(ValueError, match="unit norm"):
        recipes.plan_of(made("contracting", preprocess="none", noise=(1.0,)))
    with pytest.raises(ValueError, match="unit norm"):
        recipes.plan_of(made("contracting", model="mlp", noise=(1.0,)))
    with pytest.raises(ValueError, match="expected algorithm='padpfl' with batch_sampler='full'"):
        recipes.plan_of(made("prox_erm", batch_sampler="poisson", noise=(1.0,)))
    longer = dict(groups=(3, 3), group_noise=(0.3, 0.0))  # after the rows have their norm
    with pytest.raises(ValueError, match="rows of norm 1 at most"):
        recipes.plan_of(made("contracting", noise=(1.0,), **longer))


@pytest.mark.slow
@pytest.mark.parametrize("mu", [1.0, 30.0])
def test_problems_are_solved_as_well_as_the_noise_takes_them_to_be(mu, monkeypatch):
    """Steps for a tenth are too few.  The noise is for what one of a client's rows moves."""
    plan = recipes.plan_of(made("prox_erm", noise=(1e-6,), mu=mu))
    reached = np.asarray(jfl.simulate(KEY, plan, 3).run.client_states)
    assert reached.shape == (6,) and 0 < reached.max() <= 1e-5
    rows = np.asarray(plan.fed.size).min()
    stated = float(plan.algorithm.releases[0].mechanism.stages[0].bound.data["value"])
    assert 2 * stated == pytest.approx(2 * 2 / mu * (1 / rows + 1e-5), rel=1e-5)
    monkeypatch.setattr(recipes, "INEXACTNESS", 0.1)
    plan = recipes.plan_of(made("prox_erm", noise=(1e-6,), mu=mu))
    assert np.asarray(jfl.simulate(KEY, plan, 3).run.client_states).max() > 1e-5


@pytest.mark.parametrize(
    "name, fields",
    [
        ("uploads", dict(clip_decay=0.5)),
        ("contracting", dict(l2=0.1)),
        ("contracting", dict(server_lr=0.5)),
        ("prox_erm", dict(steps=7)),
        ("prox_erm", dict(lr=0.5)),
        ("measured", dict(optimizer="adam")),
        ("of_each", dict(batch_sampler="poisson")),
    ],
)
def test_fields_that_a_recipe_does_not_read_are_refused(name, fields):
    with pytest.raises(ValueError, match=f"{name}: expected the defaults.*{next(iter(fields))}"):
        recipes.plan_of(made(name, noise=(1.0, 1.0), **fields))


@pytest.mark.slow
@pytest.mark.parametrize(
    "epsilon, message",
    [
        (1e5, "expected an epsilon that computed noise can have"),  # of the release before
        (1e-4, "expected an epsilon that a multiplier"),
    ],
)
def test_an_epsilon_out_of_reach_is_refused(epsilon, message):
    with pytest.raises(ValueError, match=message):
        recipes.noise_of(made("measured", epsilon=epsilon))
