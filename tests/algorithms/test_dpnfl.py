"""DPNFL and AdDPNFL against the paper: their steps, aggregations, server and noise.

Cohorts, batches and standard normals are taken from jfl at their documented addresses; everything
else is computed here in float64.  A loop with one deliberate mistake must disagree.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.numpy_loops import ROUNDS, clip, draws, example_gradient, run_jfl
from helpers.problems import CLIENTS, SIZES, close, flat, make_federation, squared, start_params

import jfl
from jfl.algorithms import adaptive, adaptive_without_noise_bias, addpnfl, dpnfl
from jfl.core.identity import plan_identity

COHORT, STEPS, ROWS = 3, 3, 3
BOUND, SIGMA = 0.6, 0.5  # of an example; of the noise on the mean gradient
LR, SERVER_LR = 0.15, 0.9
ADAM = dict(beta1=0.7, beta2=0.8, adaptivity=0.05)
LATENCY = (1.0, 2.0, 1.0, 4.0, 1.0, 3.0, 2.0)
P = np.array(SIZES) / sum(SIZES)


def falling(clock):
    return 0.3 / jnp.sqrt(1.0 + clock)


# --- several rounds against a loop


@dataclasses.dataclass(frozen=True)
class Case:
    aggregation: str = (
        "uniform"  # uniform | biased | multinomial | normalised (over first responders)
    )
    second: str | None = None  # AdDPNFL's second moment; None: DPNFL
    lr: object = LR
    server_lr: object = SERVER_LR

    def __str__(self):
        return f"{'dpnfl' if self.second is None else 'addpnfl'}-{self.aggregation}-{self.second}"


CASES = dict(
    plain=Case(),
    biased=Case("biased", lr=2 * LR, server_lr=COHORT / CLIENTS),
    normalised=Case("normalised", lr=falling, server_lr=falling),
    diff=Case(second="diff", lr=falling, server_lr=falling),
    multinomial=Case("multinomial", second="momentum"),
)
SAMPLERS = dict(
    multinomial=lambda: jfl.sampling.with_replacement(CLIENTS, COHORT, weights=SIZES),
    normalised=lambda: jfl.sampling.first_responders(CLIENTS, COHORT, LATENCY, jitter=0.5),
)


def paper_grad():
    """Clip to BOUND, sum, noise, divide: the noise on the mean has standard deviation SIGMA."""
    return jfl.private_grad(
        squared,
        jfl.chain(
            jfl.clip_l2(BOUND), jfl.total(), jfl.gaussian(std=ROWS * SIGMA), jfl.divide(ROWS)
        ),
    )


def plan_of(case, fed):
    options = dict(
        lr=case.lr,
        steps=STEPS,
        server_lr=case.server_lr,
        batch=jfl.batches.without_replacement(ROWS),
    )
    if case.second is None:
        algorithm = dpnfl(paper_grad(), **options)
    else:
        algorithm = addpnfl(paper_grad(), second_moment_of=case.second, **ADAM, **options)
    sampler = SAMPLERS.get(
        case.aggregation, lambda: jfl.sampling.without_replacement(CLIENTS, COHORT)
    )()
    release = (
        jfl.chain(jfl.total(), jfl.divide("weight")) if case.aggregation == "normalised" else None
    )
    return jfl.plan(
        fed, jfl.task(start_params(), squared), algorithm, sampler, release=release, weights="size"
    )


@functools.cache
def outcome(case):
    fed = make_federation()
    plan = plan_of(case, fed)
    key = jax.random.key(8)
    noise, run = run_jfl(key, plan)
    d = draws(key, noise, plan, plan.algorithm.releases[0].batches, STEPS, 4)
    assert sum(int(v) for v in (run.health.nonfinite, run.health.overflow)) == 0
    return jax.tree.map(np.asarray, d), flat(run.server.params), fed


def loop(case, d, fed, wrong=""):
    """Algorithms 1 and 2 in NumPy -> params."""
    x, y, index = (
        np.asarray(fed.x, np.float64),
        np.asarray(fed.y, np.float64),
        np.asarray(fed.index),
    )
    at = lambda rate, clock: float(rate(clock)) if callable(rate) else rate
    w, mu, nu = flat(start_params()), np.zeros(4), np.full(4, ADAM["adaptivity"] ** 2)
    for t in range(ROUNDS):
        total, there = np.zeros(4), 0.0
        for k, (i, count) in enumerate(zip(d["ids"][t], d["count"][t])):
            if count == 0:
                continue
            v = w
            for s in range(STEPS):
                rows = index[i][d["slots"][t, k, s][d["mask"][t, k, s]]]
                g = [example_gradient(v, a, b) for a, b in zip(x[rows], y[rows])]
                g = sum(g if wrong == "unclipped" else [clip(one, BOUND) for one in g]) / ROWS
                noise = (s == 0) if wrong == "noise_once" else 1
                clock = t if wrong == "round_clock" else t * STEPS + s
                v = v - at(case.lr, clock) * (g + noise * SIGMA * d["rows"][t, k, s])
            share = dict(multinomial=count / COHORT, biased=P[i], normalised=P[i]).get(
                case.aggregation, CLIENTS / COHORT * P[i]
            )
            share = (
                share / count
                if wrong == "no_multiplicity"
                else P[i]
                if wrong == "no_n_over_r"
                else share
            )
            total, there = total + share * (v - w), there + share
        if case.aggregation == "normalised" and wrong != "not_normalised":
            total = total / there
        if case.second is None:
            w = w + (1.0 if case.aggregation == "biased" else at(case.server_lr, t)) * total
            continue
        mu = ADAM["beta1"] * mu + (1 - ADAM["beta1"]) * total
        moved = total if (case.second == "diff") != (wrong == "other_moment") else mu
        nu = ADAM["beta2"] * nu + (1 - ADAM["beta2"]) * moved**2
        debias = 1 - ADAM["beta1"] ** (t + 1) if wrong == "bias_correction" else 1.0
        root = (
            np.sqrt(nu + ADAM["adaptivity"] ** 2)
            if wrong == "inside_the_root"
            else np.sqrt(nu) + ADAM["adaptivity"]
        )
        w = w + (-1 if wrong == "sign" else 1) * at(case.server_lr, t) * mu / debias / root
    return w


def agree(case, wrong=""):
    d, params, fed = outcome(case)
    close(params, loop(case, d, fed, wrong), rtol=3e-5, atol=3e-6)


@pytest.mark.by_default("plain", "biased", "diff", "multinomial")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_papers_loop(case):
    agree(case)
    assert np.abs(outcome(case)[1] - flat(start_params())).max() > 0.03


@pytest.mark.parametrize(
    "wrong, case",
    [
        ("unclipped", "plain"),
        ("noise_once", "plain"),
        ("no_n_over_r", "plain"),
        ("not_normalised", "normalised"),
        ("round_clock", "normalised"),
        ("round_clock", "diff"),
        ("other_moment", "diff"),
        ("bias_correction", "diff"),
        ("inside_the_root", "diff"),
        ("other_moment", "multinomial"),
        ("sign", "multinomial"),
        ("no_multiplicity", "multinomial"),
    ],
)
def test_a_wrong_loop_disagrees(wrong, case):
    with pytest.raises(AssertionError):
        agree(CASES[case], wrong)


def test_the_multinomial_loop_saw_a_client_twice():
    assert outcome(CASES["multinomial"])[0]["count"].max() > 1


# --- the server of AdDPNFL

DIFF, STEP = (
    np.array([0.1, -0.2]),
    dict(diff=np.array([0.00905028, -0.00951261]), momentum=np.array([0.04148218, -0.06184615])),
)


@pytest.mark.parametrize("second", ["diff", "momentum"])
def test_golden_step(second):
    """Worked out by hand from mu_0 = 0 and nu_0 = adaptivity^2."""
    server = adaptive(0.01, second_moment_of=second)
    step, state = server.update(jnp.asarray(-DIFF, jnp.float32), server.init(jnp.zeros(2)))
    close(step, STEP[second], rtol=2e-6)
    close(-state.first, np.array([0.01, -0.02]), rtol=1e-6)
    if second == "diff":
        close(state.second, np.array([1.0099e-4, 4.0099e-4]), rtol=1e-5, atol=0)
    algorithm = addpnfl(jfl.grad(squared), second_moment_of=second)  # the paper's values by default
    begun, _ = algorithm.init(jnp.zeros(2))
    ctx = jfl.Context(jnp.int32(0), 0, 0, 1.0, 1, 1.0)
    close(
        algorithm.server(ctx, begun, jnp.asarray(DIFF, jnp.float32)).params, STEP[second], rtol=2e-6
    )


def test_two_steps_and_another_start():
    """mu and nu go on, without bias correction; nu starts where it is told to, in the dtype of the
    parameters."""
    server = adaptive(0.5, b1=0.6, b2=0.7, adaptivity=0.1, initial=0.04)
    state, mu, nu = server.init(jnp.zeros(2)), np.zeros(2), np.full(2, 0.04)
    for diff in (DIFF, np.array([-0.3, 0.05])):
        step, state = server.update(jnp.asarray(-diff, jnp.float32), state)
        mu, nu = 0.6 * mu + 0.4 * diff, 0.7 * nu + 0.3 * diff**2
        close(step, 0.5 * mu / (np.sqrt(nu) + 0.1), rtol=1e-5)
    half = adaptive(np.float32(0.5), b1=np.float32(0.5))
    state = half.init(jnp.zeros(2, jnp.bfloat16))
    after = half.update(jnp.ones(2, jnp.bfloat16), state)[1]
    assert [x.dtype for x in state[:2]] == [x.dtype for x in after[:2]] == [jnp.bfloat16] * 2


def test_known_noise_is_subtracted_where_the_second_moment_divides():
    """What it has added by then, and nowhere else: nu itself goes on with what was seen."""
    known, options = 0.02, dict(b1=0.6, b2=0.7, adaptivity=0.1, initial=0.0)
    server, plain = (
        adaptive_without_noise_bias(0.5, known**0.5, **options),
        adaptive(0.5, **options),
    )
    state, other, mu, nu, added = server.init(jnp.zeros(2)), plain.init(jnp.zeros(2)), 0.0, 0.0, 0.0
    sides = set()
    for diff in (DIFF, np.array([-0.3, 0.05])):
        step, state = server.update(jnp.asarray(-diff, jnp.float32), state)
        longer, other = plain.update(jnp.asarray(-diff, jnp.float32), other)
        mu, nu, added = 0.6 * mu + 0.4 * diff, 0.7 * nu + 0.3 * diff**2, 0.7 * added + 0.3 * known
        close(step, 0.5 * mu / (np.sqrt(np.maximum(nu - added, 0)) + 0.1), rtol=1e-5)
        assert np.all(np.abs(step) > np.abs(longer))
        sides |= set(nu > added)
    close(state.second, other.second)
    assert sides == {True, False}  # both sides of the maximum were met


@pytest.mark.parametrize("rounds", [5, 500])
def test_a_signal_beside_known_noise_is_divided_by_itself(rounds):
    """Also in the first rounds, when nu has not met all of the noise: on average over coordinates,
    nu less what is subtracted is that of the signal alone."""
    std, signal, rng = 0.3, 0.2, np.random.default_rng(0)
    server = adaptive_without_noise_bias(1.0, std, b1=0.0, initial=0.0)
    state = server.init(jnp.zeros(20_000))
    for _ in range(rounds):
        seen = signal + rng.normal(0, std, 20_000)
        _, state = server.update(jnp.asarray(seen, jnp.float32), state)
    wanted = signal**2 * (1 - 0.99**rounds)
    left = float(np.mean(np.asarray(state.second) - float(state.noise)))
    assert left == pytest.approx(wanted, rel=0.1)
    assert float(np.mean(np.asarray(state.second))) > 2 * wanted
    if rounds == 5:  # all of the noise at once would leave nothing
        assert np.all(np.asarray(state.second) < std**2)


def test_every_number_of_the_server_is_data():
    """A sweep over them is one program, and each of them is used."""
    fed, task = make_federation(), jfl.task(start_params(), squared)
    base = dict(server_lr=0.1, beta1=0.5, beta2=0.9, adaptivity=1e-2, initial=1e-3)
    other = dict(server_lr=0.2, beta1=0.0, beta2=0.5, adaptivity=1e-1, initial=1e-2)
    points = [base, *(base | {name: value} for name, value in other.items())]

    def make(seed, **numbers):
        algorithm = addpnfl(jfl.grad(squared), lr=0.1, steps=2, batch=jfl.batches.full(), **numbers)
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), weights="size")

    found = jfl.sweep(make, rounds=2, points=points)
    assert found.groups == 1 and len({tuple(flat(p)) for p in found.params}) == len(points)


# --- what a plan may claim


@pytest.mark.parametrize("site", ["rows", "upload", "release"])
def test_first_responders_never_gain(site):
    """Every view charges every round, as for the full cohort, and says so."""
    fed, task = make_federation(), jfl.task(start_params(), squared)
    noisy = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(5.0))

    def guarantees_of(sampler):
        algorithm = dpnfl(
            paper_grad() if site == "rows" else jfl.grad(squared),
            steps=STEPS,
            batch=jfl.batches.full(),
        )
        plan = jfl.plan(fed, task, algorithm, sampler, **({} if site == "rows" else {site: noisy}))
        return {(g.unit, g.view): g for g in jfl.guarantees(plan, 20, 1e-5)}

    full = guarantees_of(jfl.sampling.full(CLIENTS))
    fast = guarantees_of(jfl.sampling.first_responders(CLIENTS, COHORT, LATENCY))
    assert full and full.keys() == fast.keys()
    for key, g in fast.items():
        # the sum of all has everybody's noise in it, whoever is fast
        better = site == "upload" and key[1] == "third_party"
        assert (
            g.epsilon > 1.5 * full[key].epsilon
            if better
            else g.epsilon == pytest.approx(full[key].epsilon)
        )
        assert any("every round" in c for c in g.caveats) and not any(
            "honest" in c for c in g.caveats
        )


def test_latencies_get_noise_of_their_own():
    """Two plans that differ in latencies draw other cohorts: with the same noise, their difference
    has none."""
    fed, task = make_federation(), jfl.task(start_params(), squared)
    algorithm = dpnfl(paper_grad(), batch=jfl.batches.full())
    make = lambda latency, jitter: plan_identity(
        jfl.plan(
            fed, task, algorithm, jfl.sampling.first_responders(CLIENTS, 3, latency, jitter=jitter)
        )
    )
    found = jax.jit(jax.vmap(make))(
        jnp.array([LATENCY, LATENCY, LATENCY[::-1]]), jnp.array([1.0, 0.5, 1.0])
    )
    assert len({tuple(d) for d in np.asarray(found)}) == 3


# --- arguments


@pytest.mark.parametrize(
    "options, match",
    [
        (dict(beta1=1.0), "beta1"),
        (dict(beta1=-0.1), "beta1"),
        (dict(beta2=float("nan")), "beta2"),
        (dict(beta2=1 - 1e-12), "beta2"),
        (dict(beta1="high"), "beta1"),
        (dict(adaptivity=0.0), "adaptivity"),
        (dict(adaptivity=-1e-3), "adaptivity"),
        (dict(initial=-1.0), "initial"),
        (dict(initial=float("inf")), "initial"),
        (dict(noise_std=-1.0), "noise_std"),
        (dict(noise_std=0.1, second_moment_of="momentum"), "second_moment_of"),
        (dict(second_moment_of="gradient"), "second_moment_of"),
        (dict(server_lr=0.0), "lr"),
        (dict(server_optimizer=optax.adam), "dpnfl"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        addpnfl(jfl.grad(squared), **options)


def test_bad_arguments_of_the_transformation_are_refused():
    for options in (
        dict(b1=1.0),
        dict(b2=-0.1),
        dict(adaptivity=0.0),
        dict(initial=-1.0),
        dict(second_moment_of="mean"),
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            adaptive(0.1, **options)
