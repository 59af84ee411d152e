"""Noise on uploads, on the release, and on both: what a third party meets in the sum, and what is
refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params
from scipy import optimize, stats

import jfl
from experiments.papers import as_printed
from jfl.algorithms import padpfl
from jfl.core.records import Fn
from jfl.runs import build, train
from jfl.runs.config import Config, refuse_unused
from jfl.schedules import piecewise

C, DELTA = 4, 1e-5
THIRD = dict(unit="client", view="third_party")


def make_plan(
    z_upload=5.0,
    z_release=3.0,
    weights="uniform",
    sampler=None,
    declared=1.0,
    adjacency=None,
    post=(),
    **options,
):
    alg = padpfl(jfl.grad(squared), lr=0.1, steps=1, upload=options.pop("upload", "model"))
    release = (
        ()
        if z_release is None
        else (
            jfl.bounded(declared, "upload"),
            jfl.total(),
            jfl.gaussian(z_release),
            jfl.divide(float(C)),
        )
    )
    upload = jfl.chain(
        jfl.clip_l2(1.0),
        jfl.total(),
        *(() if z_upload is None else (jfl.gaussian(z_upload),)),
        *post,
    )
    return jfl.plan(
        make_federation(sizes=(3, 5, 4, 6)),
        jfl.task(start_params(), squared),
        alg,
        sampler or jfl.sampling.full(C),
        upload=upload,
        release=jfl.chain(*release) if release else None,
        weights=weights,
        adjacency=adjacency,
        **options,
    )


def exact(mu, delta=DELTA):
    """epsilon of Gaussians with these shifts over their std, together, by the definition."""
    mu = np.sqrt(np.sum(np.square(mu)))
    excess = lambda e: (
        stats.norm.cdf(mu / 2 - e / mu) - np.exp(e) * stats.norm.cdf(-mu / 2 - e / mu) - delta
    )
    return optimize.brentq(excess, 0, 500)


def shifts(p, z_upload, z_release, others=True):
    """2 p_i over the std of the sum, of each client; p adds up to 1, uploads are at most 1 long."""
    p, z = np.asarray(p, float), np.broadcast_to(z_upload, len(p))
    noise = (2 * z * p) ** 2
    return 2 * p / np.sqrt((noise.sum() if others else noise) + (2 * z_release * p.max()) ** 2)


MOVING = piecewise([3], [[1.0, 2, 3, 4], [4.0, 1, 1, 0]])


@pytest.mark.parametrize(
    "weights, p",
    [
        ("uniform", [0.25] * 4),
        ([1.0, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]),
        ([0.0, 1, 1, 2], [0, 0.25, 0.25, 0.5]),
    ],
)
@pytest.mark.parametrize("z_upload", [5.0, (1.0, 2.0, 4.0, 8.0)])
@pytest.mark.parametrize("z_release", [None, 3.0])
def test_the_sum_has_everybodys_noise(weights, p, z_upload, z_release):
    z = z_upload if isinstance(z_upload, float) else jnp.array(z_upload)
    plan = make_plan(z, z_release, weights if isinstance(weights, str) else np.array(weights))
    want = exact(np.full(6, shifts(p, z_upload, z_release or 0.0).max()))
    found = jfl.guarantee(plan, 6, DELTA, **THIRD)
    assert found.epsilon == pytest.approx(want, rel=1e-4) and any(
        "other clients" in c for c in found.caveats
    )
    np.testing.assert_allclose(jfl.epsilons(plan, [6], DELTA, **THIRD), found.epsilon, rtol=1e-4)
    if z_release is None and 0 not in p:
        each = jfl.privacy.guarantees.epsilons_per_client(plan, 6, DELTA, view="third_party")
        np.testing.assert_allclose(
            each, [exact(np.full(6, s)) for s in shifts(p, z_upload, 0.0)], rtol=1e-3
        )


@pytest.mark.parametrize("z_release", [None, 3.0])
def test_weights_that_move(z_release):
    plan = make_plan(5.0, z_release, MOVING)
    rounds = [shifts([0.1, 0.2, 0.3, 0.4], 5.0, z_release or 0.0)] * 3 + [
        shifts([4 / 6, 1 / 6, 1 / 6, 0], 5.0, z_release or 0.0)
    ] * 2
    want = exact(np.stack(rounds)[:, np.argmax(np.square(np.stack(rounds)).sum(0))])
    found = jfl.guarantee(plan, 5, DELTA, **THIRD)
    assert found.epsilon == pytest.approx(want, rel=1e-4)
    np.testing.assert_allclose(jfl.epsilons(plan, [5], DELTA, **THIRD), found.epsilon, rtol=1e-4)
    with pytest.raises(ValueError, match="same noise in every round"):
        jfl.calibrate(plan, epsilon=3.0, delta=DELTA, over="rounds", **THIRD)
    if z_release is None:
        z = jfl.calibrate(plan, epsilon=1.0, delta=DELTA, rounds=5, **THIRD)
        assert jfl.guarantee(
            make_plan(z, None, MOVING), 5, DELTA, **THIRD
        ).epsilon == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(
    "weights, p", [("uniform", [0.25] * 4), ([0.0, 1, 1, 2], [0, 0.25, 0.25, 0.5])]
)
def test_uplinks_cost_what_they_show(weights, p):
    plan = make_plan(5.0, 3.0, weights if isinstance(weights, str) else np.array(weights))
    epsilon = lambda n, **k: jfl.guarantee(plan, 10, DELTA, uplinks=n, **THIRD, **k).epsilon
    alone, summed = (shifts(p, 5.0, 3.0, others=o).max() for o in (False, True))
    assert epsilon(0) < epsilon(1) < epsilon(9) < epsilon(10)
    assert epsilon(2) == pytest.approx(exact([1 / 5.0] * 2 + [alone] * 2 + [summed] * 6), rel=1e-4)
    assert epsilon(10) == pytest.approx(
        jfl.guarantee(plan, 10, DELTA, unit="client").epsilon, rel=1e-6
    )
    with pytest.raises(ValueError, match="uplinks are for one plan"):
        jfl.guarantee([(plan, 10)], delta=DELTA, uplinks=3, **THIRD)
    with pytest.raises(ValueError, match="view='third_party'"):
        jfl.guarantee(plan, 10, DELTA, unit="client", uplinks=3)


@pytest.mark.parametrize(
    "options, need",
    [
        (dict(adjacency="add_remove"), "replace_one for noisy uploads"),
        (
            dict(sampler=jfl.sampling.without_replacement(C, 2), upload="difference"),
            "sampling.full and replace_one",
        ),
        (
            dict(sampler=jfl.sampling.poisson(C, 0.5), upload="difference"),
            "sampling.full and replace_one",
        ),
        (dict(sampler=jfl.sampling.without_replacement(C, 2)), "sampling.full for padpfl"),
        (
            dict(post=(jfl.wavelet.james_stein(jfl.bands.plain(start_params())),)),
            "only divides after its noise",
        ),
        (dict(declared=0.9), "at least the upload's"),
    ],
)
def test_what_is_no_sum_of_noisy_uploads(options, need):
    with pytest.raises(ValueError, match=need):
        make_plan(**options)


def test_noise_without_a_sum_stays_its_own():
    """A cohort that is drawn, and a release that clips: an upload's own noise counts, no more."""
    plan = make_plan(5.0, None, sampler=jfl.sampling.without_replacement(C, 2), upload="difference")
    assert jfl.guarantee(plan, 6, DELTA, **THIRD).epsilon > exact(np.full(6, 1 / 10))
    clipped = dataclasses.replace(
        make_plan(5.0, None),
        release=jfl.chain(jfl.clip_l2(1.0), jfl.total(), adjacency="replace_one"),
    )
    assert jfl.guarantee(clipped, 6, DELTA, **THIRD).epsilon == pytest.approx(
        exact(np.full(6, 1 / 5)), rel=1e-4
    )


def test_a_noiseless_upload_may_be_declared_anywhere():
    plan = make_plan(None, 3.0, sampler=jfl.sampling.poisson(C, 0.5), upload="difference")
    want = jfl.plan(
        plan.fed,
        plan.task,
        plan.algorithm,
        plan.sampler,
        release=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(3.0), jfl.divide(2.0)),
    )
    assert (
        jfl.guarantee(plan, 6, DELTA, **THIRD).epsilon
        == jfl.guarantee(want, 6, DELTA, **THIRD).epsilon
    )


def test_each_clients_noise_in_a_sum_is_not_calibrated_alone():
    with pytest.raises(ValueError, match="noise of all clients counts"):
        jfl.privacy.calibration.calibrate_per_client(
            make_plan(5.0, None, np.array([1.0, 2, 3, 4])),
            epsilon=1.0,
            rounds=6,
            view="third_party",
        )


@pytest.mark.parametrize("site", ["private_grad", "output_perturbation"])
def test_a_bound_by_convexity_needs_a_checked_solve(site):
    chain = jfl.chain(jfl.bounded(0.01, "prox_erm"), jfl.total(), jfl.gaussian(1.0))
    with pytest.raises(ValueError, match="prox_erm"):
        alg = (
            jfl.algorithms.fedavg(jfl.private_grad(squared, chain), batch=jfl.batches.full())
            if site == "private_grad"
            else jfl.algorithms.output_perturbation(jfl.grad(squared), chain)
        )
        jfl.plan(
            make_federation(sizes=(3, 5, 4, 6)),
            jfl.task(start_params(), squared),
            alg,
            jfl.sampling.full(C),
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: jfl.clip_l2(1e-20),
        lambda: jfl.clip_per_layer((1e-20, 1.0)),
        lambda: jfl.wavelet.clip_bands(np.full(3, 1e-20), jfl.bands.flat(start_params())),
    ],
)
def test_bounds_whose_squares_vanish(make):
    with pytest.raises(ValueError, match="1e-15"):
        make()


# --- configs

BASE = Config(
    dataset="digits",
    partition="iid",
    clients=10,
    rounds=5,
    steps=2,
    model="logistic",
    batch_sampler="full",
)
PADPFL = dataclasses.replace(
    BASE,
    algorithm="padpfl",
    unit="client",
    mode="as_printed",
    epsilon=5.0,
    clip_norm=20.0,
    delta=0.01,
)


@pytest.mark.parametrize(
    "config, need",
    [
        (dataclasses.replace(PADPFL, clip="per_layer"), "a flat clip and noise as printed"),
        (dataclasses.replace(PADPFL, noise_decay=0.5), "a flat clip and noise as printed"),
        (dataclasses.replace(PADPFL, unit="example"), "unit = client for padpfl"),
        (dataclasses.replace(PADPFL, cohort=5), "all clients|sampling.full"),
        (dataclasses.replace(BASE, average_from=5), "average_from <= 4"),
        (dataclasses.replace(BASE, average_from=1.5), "an integer average_from >= 0"),
        (
            dataclasses.replace(BASE, noise_multiplier=1.0, noise_shape="published"),
            "mode='as_printed'",
        ),
        (dataclasses.replace(BASE, groups=(4, 4), group_noise=(0.5, 0.1)), "add up to clients=10"),
        (
            dataclasses.replace(
                BASE, noise_multiplier=1.0, noise_shape="ellipsoid", clip="per_layer"
            ),
            "clip='flat'",
        ),
    ],
)
def test_configs_that_are_refused(config, need):
    with pytest.raises(ValueError, match=need):
        build.build(config)


@pytest.mark.parametrize(
    "changes, field",
    [
        (dict(groups=(5, 5), group_rows=(20, 30), alpha=0.05), "alpha"),
        (dict(bands="flat"), "bands"),
        (dict(groups=(5, 5), group_rows=(20, 30), partition="labels", min_rows=3), "min_rows"),
        (dict(upload="difference"), "upload"),
        (dict(noise_multiplier=1.0, noise_shape="ellipsoid", reading="R2"), "reading"),
        (dict(groups=(5, 5)), "groups"),
        (dict(groups=(5, 5), impact=(1.0, 2.0), weights="size"), "weights"),
    ],
)
def test_fields_without_effect(changes, field):
    with pytest.raises(ValueError, match=f"for {field}, "):
        refuse_unused(dataclasses.replace(BASE, **changes))


def test_padpfl_as_printed_and_as_proved():
    config = dataclasses.replace(
        PADPFL, groups=(4, 4, 2), impact=(0.0, 1.0, 2.0), group_noise=(0.5, 0.25, 0.05)
    )
    refuse_unused(config)
    plan, _ = build.build(config)
    up, down = as_printed.claims(plan, 5, 0.01)
    assert (
        up.epsilon == pytest.approx(5.0)
        and down.epsilon == pytest.approx(5.0)
        and up.status == "claimed"
    )
    # so little noise that its computed values tell neighbours apart
    with pytest.raises(jfl.errors.NotAnalysable, match="the computed noise cannot reach"):
        jfl.guarantee(plan, 5, 0.01, unit="client")
    # B / max |x| of the noise that ran: 2 B c / (m epsilon), m the rows of the smallest client
    rows, c = int(np.min(plan.fed.size)), np.sqrt(2 * np.log(1.25 / 0.01))
    assert float(plan.upload.stages[-1].noise) == pytest.approx(2 * 20 * c / (rows * 5), rel=1e-5)
    tighter = dataclasses.replace(
        config, mode="sound", upload="difference", clip_norm=1.0, epsilon=5.0, view="third_party"
    )
    sound, found = build.build(tighter)
    assert jfl.guarantee(sound, 5, 0.01, **THIRD).epsilon == pytest.approx(5.0, rel=1e-3)
    assert found.noise_multiplier is not None


def test_published_noise_follows_impact():
    config = dataclasses.replace(
        BASE,
        noise_shape="published",
        reading="R5",
        mode="as_printed",
        unit="client",
        noise_multiplier=2.0,
        groups=(8, 2),
        impact=(1.0, 3.0),
        weights="uniform",
    )
    plan, _ = build.build(config)
    truth = jfl.guarantee(plan, 5, DELTA, **THIRD).epsilon
    claim = as_printed.claimed(plan, 5, DELTA, view="third_party").epsilon
    even = jfl.guarantee(
        build.build(dataclasses.replace(config, groups=(), impact=()))[0], 5, DELTA, **THIRD
    ).epsilon
    assert truth == pytest.approx(even, rel=1e-4) and claim < truth


def test_a_claim_is_read_through_an_average():
    config = Config(
        dataset="digits",
        partition="iid",
        clients=10,
        rounds=5,
        steps=2,
        batch=5,
        model="logistic",
        algorithm="output_perturbation",
        mode="as_printed",
        noise_multiplier=1.0,
    )
    claims = [
        as_printed.claimed(
            build.build(dataclasses.replace(config, average_from=a))[0], 5, DELTA
        ).epsilon
        for a in (None, 2)
    ]
    assert claims[0] == claims[1]


def test_a_function_of_weights_is_kept_whole():
    plan = make_plan(5.0, 3.0, MOVING)
    assert isinstance(plan.weights, Fn)
    out = jfl.simulate(jax.random.key(0), plan, rounds=5)
    assert np.isfinite(np.asarray(out.metrics.loss)).all() and out.run.client_states.shape == (C,)


@pytest.mark.slow
def test_a_paper_without_any_proof_still_runs(tmp_path):
    """Poisson batches, and so little true noise that no delta is left for an overflow: nothing
    proved, and a claim."""
    config = dataclasses.replace(
        BASE,
        batch_sampler="poisson",
        batch=16,
        noise_shape="published",
        mode="as_printed",
        epsilon=4.0,
        rounds=2,
        clients=4,
    )
    entry = train.train(config, tmp_path / "run")
    nothing, claim = entry["privacy"]
    assert (nothing["status"], claim["status"]) == ("no guarantee", "claimed") and nothing[
        "epsilon"
    ] is None
    assert claim["epsilon"] == pytest.approx(4.0, rel=1e-3)
