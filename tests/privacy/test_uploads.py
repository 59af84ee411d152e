"""Noise on uploads, on the release, and on both: what a third party meets in the sum, and what is
refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params
from scipy import optimize, stats

import jfl
from jfl.algorithms import padpfl
from jfl.privacy.accountants import events, tightest
from jfl.runs import build
from jfl.runs.config import Config

C, DELTA = 4, 1e-5
THIRD = dict(unit="client", view="third_party")


def make_plan(
    z_upload=5.0,
    z_release=3.0,
    weights="uniform",
    sampler=None,
    declared=1.0,
    post=(),
    kind="model",
    upload_adjacency=None,
    **options,
):
    """Return a plan of PADPFL with noise on uploads and on the release; None leaves either out."""
    noise = () if z_upload is None else (jfl.gaussian(z_upload),)
    stages = jfl.clip_l2(1.0), jfl.total(), *noise, *post
    upload = jfl.chain(*stages, adjacency=upload_adjacency)
    release = None
    if z_release is not None:
        bound = jfl.bounded(declared, "upload")
        release = jfl.chain(bound, jfl.total(), jfl.gaussian(z_release), jfl.divide(float(C)))
    return jfl.plan(
        make_federation(sizes=(3, 5, 4, 6)),
        jfl.task(start_params(), squared),
        padpfl(jfl.grad(squared), lr=0.1, steps=1, upload=kind),
        sampler or jfl.sampling.full(C),
        upload=upload,
        release=release,
        weights=np.array(weights) if isinstance(weights, list) else weights,
        **options,
    )


def exact(mu, delta=DELTA):
    """Return epsilon of Gaussians with these shifts over their std, together, by the definition."""
    mu = np.sqrt(np.sum(np.square(mu)))
    profile = lambda e: (
        stats.norm.cdf(mu / 2 - e / mu) - np.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)
    )
    return optimize.brentq(lambda e: profile(e) - delta, 0, 500)


def shifts(p, z_upload, z_release, others=True):
    """Return 2 p_i over the std of the sum for each client; p adds up to 1, uploads are at most 1
    long."""
    p, z = np.asarray(p, float), np.broadcast_to(z_upload, len(p))
    noise = (2 * z * p) ** 2
    return 2 * p / np.sqrt((noise.sum() if others else noise) + (2 * z_release * p.max()) ** 2)


def epsilon_of(plan, rounds, **options):
    return jfl.guarantee(plan, rounds, DELTA, **THIRD, **options).epsilon


EVEN, RISING, ABSENT = [0.25] * 4, [0.1, 0.2, 0.3, 0.4], [0, 0.25, 0.25, 0.5]
LEVELS = (1.0, 2.0, 4.0, 8.0)


@pytest.mark.parametrize(
    "p, z_upload, z_release",
    [(EVEN, 5.0, None), (RISING, LEVELS, None), (ABSENT, 5.0, 3.0), (RISING, LEVELS, 3.0)],
)
def test_the_sum_has_the_noise_of_all_clients(p, z_upload, z_release):
    z = jnp.array(z_upload) if isinstance(z_upload, tuple) else z_upload
    plan = make_plan(z, z_release, p)
    each = shifts(p, z_upload, z_release or 0.0)
    found = jfl.guarantee(plan, 6, DELTA, **THIRD)
    assert found.epsilon == pytest.approx(exact(np.full(6, each.max())), rel=1e-4)
    assert any("other clients" in c for c in found.caveats)
    np.testing.assert_allclose(jfl.epsilons(plan, [6], DELTA, **THIRD), found.epsilon, rtol=1e-4)
    if z_release is None:
        per_client = jfl.privacy.guarantees.epsilons_per_client(plan, 6, DELTA, view="third_party")
        np.testing.assert_allclose(per_client, [exact(np.full(6, s)) for s in each], rtol=1e-3)


@pytest.mark.parametrize("z_release", [None, 3.0])
def test_weights_that_change_over_rounds(z_release):
    before, after = jnp.array([[1.0, 2, 3, 4], [4.0, 1, 1, 0]])
    moving = lambda t: jnp.where(t < 3, before, after)
    plan = make_plan(5.0, z_release, moving)
    of = lambda p: shifts(p, 5.0, z_release or 0.0)
    rounds = np.stack([of(RISING)] * 3 + [of([4 / 6, 1 / 6, 1 / 6, 0])] * 2)
    want = exact(rounds[:, np.argmax(np.square(rounds).sum(0))])
    assert epsilon_of(plan, 5) == pytest.approx(want, rel=1e-4)
    np.testing.assert_allclose(jfl.epsilons(plan, [5], DELTA, **THIRD), want, rtol=1e-4)
    with pytest.raises(ValueError, match="same noise in every round"):
        jfl.calibrate(plan, epsilon=3.0, delta=DELTA, over="rounds", **THIRD)
    if z_release is None:
        z = jfl.calibrate(plan, epsilon=1.0, delta=DELTA, rounds=5, **THIRD)
        assert epsilon_of(make_plan(z, None, moving), 5) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("p", [EVEN, ABSENT])
def test_uploads_that_a_third_party_sees_cost_what_they_show(p):
    plan = make_plan(5.0, 3.0, p)
    of = lambda uplinks: epsilon_of(plan, 10, uplinks=uplinks)
    alone, summed = (shifts(p, 5.0, 3.0, others=o).max() for o in (False, True))
    assert of(0) < of(1) < of(9) < of(10)
    assert of(2) == pytest.approx(exact([1 / 5.0] * 2 + [alone] * 2 + [summed] * 6), rel=1e-4)
    server = jfl.guarantee(plan, 10, DELTA, unit="client").epsilon
    assert of(10) == pytest.approx(server, rel=1e-6)
    with pytest.raises(ValueError, match="uplinks are for one plan"):
        jfl.guarantee([(plan, 10)], delta=DELTA, uplinks=3, **THIRD)
    with pytest.raises(ValueError, match="view='third_party'"):
        jfl.guarantee(plan, 10, DELTA, unit="client", uplinks=3)


def test_uploads_that_a_third_party_sees_show_who_participated(renyi):
    """In a round of one client, the upload of another shows that the client was absent."""
    z_upload, z_release, rounds = 2.0, 3.0, 6
    noisy = lambda z: jfl.chain(
        jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(1.0), adjacency="replace_one"
    )

    def of(sampler, uplinks):
        plan = jfl.plan(
            make_federation(sizes=(3, 5, 4, 6)),
            jfl.task(start_params(), squared),
            jfl.algorithms.fedavg(jfl.grad(squared), steps=1, batch=jfl.batches.full()),
            sampler,
            upload=noisy(z_upload),
            release=noisy(z_release),
        )
        return epsilon_of(plan, rounds, uplinks=uplinks)

    rest = events.repeat(events.participation(1 / C, events.gaussian(z_release)), rounds - 1)
    both = events.compose(events.gaussian(z_upload), rest)
    shown = tightest.epsilon(both, DELTA)[0]
    one = jfl.sampling.without_replacement(C, 1)
    assert of(one, 1) == pytest.approx(shown, rel=1e-3) and of(one, 0) < 0.6 * shown
    # the others of a Poisson cohort show nothing about a client
    poisson = jfl.sampling.poisson(C, 1 / C, capacity=C)
    assert of(poisson, 1) < 0.8 * shown


def test_noise_without_a_sum_counts_only_its_own():
    """A cohort that is drawn, and a release that clips: only the upload's own noise counts."""
    drawn = jfl.sampling.without_replacement(C, 2)
    plan = make_plan(5.0, None, sampler=drawn, kind="difference")
    assert epsilon_of(plan, 6) > exact(np.full(6, 1 / 10))
    clip = jfl.chain(jfl.clip_l2(1.0), jfl.total(), adjacency="replace_one")
    clipped = dataclasses.replace(make_plan(5.0, None), release=clip)
    assert epsilon_of(clipped, 6) == pytest.approx(exact(np.full(6, 1 / 5)), rel=1e-4)


def test_uploads_under_zero_out_do_not_count_for_replace_one():
    """Their noise is half as large, and a client that is replaced moves the sum by two clip norms.

    The attained epsilon is that of a move by 2 / C against all of this noise.
    """
    plan = make_plan(5.0, 3.0, upload_adjacency="zero_out")
    found = jfl.guarantee(plan, 1, DELTA, adjacency="replace_one", **THIRD)
    assert found.epsilon == pytest.approx(exact(1 / 3.0), rel=1e-4)
    attained = exact(2 / np.sqrt(C * 5.0**2 + (2 * 3.0) ** 2))
    of_both = jfl.guarantee(make_plan(5.0, 3.0), 1, DELTA, **THIRD)
    assert of_both.epsilon < attained < found.epsilon


def test_an_upload_without_noise_may_be_declared_for_any_sampler():
    plan = make_plan(None, 3.0, sampler=jfl.sampling.poisson(C, 0.5), kind="difference")
    stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(3.0), jfl.divide(2.0)
    plain = jfl.plan(plan.fed, plan.task, plan.algorithm, plan.sampler, release=jfl.chain(*stages))
    assert epsilon_of(plan, 6) == epsilon_of(plain, 6)


def solved_by(site):
    """Return a plan that states a bound by convexity for something that is not a solve."""
    chain = jfl.chain(jfl.bounded(0.01, "prox_erm"), jfl.total(), jfl.gaussian(1.0))
    if site == "step":
        made = jfl.algorithms.fedavg(jfl.private_grad(squared, chain), batch=jfl.batches.full())
    else:
        made = jfl.algorithms.output_perturbation(jfl.grad(squared), chain)
    task = jfl.task(start_params(), squared)
    return jfl.plan(make_federation(sizes=(3, 5, 4, 6)), task, made, jfl.sampling.full(C))


DRAWN, POISSON = jfl.sampling.without_replacement(C, 2), jfl.sampling.poisson(C, 0.5)
REFUSED = {
    "adjacency": (lambda: make_plan(adjacency="add_remove"), "replace_one for noisy uploads"),
    "drawn": (
        lambda: make_plan(sampler=DRAWN, kind="difference"),
        "sampling.full and replace_one",
    ),
    "poisson": (
        lambda: make_plan(sampler=POISSON, kind="difference"),
        "sampling.full and replace_one",
    ),
    "a mean of some models": (lambda: make_plan(sampler=DRAWN), "sampling.full for padpfl"),
    "not linear": (
        lambda: make_plan(post=(jfl.wavelet.james_stein(jfl.bands.plain(start_params())),)),
        "only divides after its noise",
    ),
    "a smaller bound": (lambda: make_plan(declared=0.9), "at least the upload's"),
    "of each client": (
        lambda: jfl.privacy.calibration.calibrate_per_client(
            make_plan(5.0, None, RISING), epsilon=1.0, rounds=6, view="third_party"
        ),
        "noise of all clients counts",
    ),
    "no solve in steps": (lambda: solved_by("step"), "prox_erm"),
    "no solve in uploads": (lambda: solved_by("upload"), "prox_erm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sum_of_noisy_uploads_is_refused(name):
    call, need = REFUSED[name]
    with pytest.raises(ValueError, match=need):
        call()


# --- configs

BASE = dict(dataset="digits", partition="iid", clients=10, rounds=5, steps=2, model="logistic")
BASE |= dict(batch_sampler="full")
PADPFL = BASE | dict(algorithm="padpfl", unit="client", mode="as_printed", epsilon=5.0)
PADPFL |= dict(clip_norm=20.0, delta=0.01)
NOISY = BASE | dict(noise_multiplier=1.0)


@pytest.mark.parametrize(
    "config, need",
    [
        (PADPFL | dict(clip="per_layer"), "a flat clip and noise as printed"),
        (PADPFL | dict(noise_decay=0.5), "a flat clip and noise as printed"),
        (PADPFL | dict(unit="example"), "unit = client for padpfl"),
        (PADPFL | dict(cohort=5), "all clients|sampling.full"),
        (BASE | dict(average_from=5), "average_from <= 4"),
        (NOISY | dict(noise_shape="published"), "mode='as_printed'"),
        (BASE | dict(groups=(4, 4), group_noise=(0.5, 0.1)), "add up to clients=10"),
        (NOISY | dict(noise_shape="ellipsoid", clip="per_layer"), "clip='flat'"),
    ],
)
def test_configs_whose_noise_would_not_be_what_they_say_are_refused(config, need):
    with pytest.raises(ValueError, match=need):
        build.build(Config(**config))
