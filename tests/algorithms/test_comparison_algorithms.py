"""Algorithms that papers compare with, each against a plain NumPy loop of its pseudo-code.

As in test_algorithms.py a loop takes from jfl only what is drawn, and computes all else itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.numpy_loops import ROUNDS, address, clip, draws, example_gradient, run_jfl
from helpers.problems import (
    CLIENTS,
    close,
    flat,
    make_federation,
    noisy_grad,
    squared,
    start_params,
)
from jfl.kernels.normals import normals

import jfl
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key

LR, SERVER_LR, STEPS = 0.15, 0.9, 3
NORM, Z, DIVISOR = 0.8, 1.1, 3.0  # of noisy_grad
COHORT = 3
LOCAL_STEPS = (3, 1, 2, 3, 1, 2, 2)
LOSS = (0.7, 0.9, 3.0)  # clip, noise multiplier and divisor of a released loss


@functools.cache
def fed():
    return make_federation()


def loss_chain():
    most, z, divisor = LOSS
    return jfl.chain(jfl.clip_l2(most), jfl.total(), jfl.gaussian(z), jfl.divide(divisor))


@functools.cache
def run_of(name, noisy=True, **options):
    """(draws, run) of jfl; the draws of as many steps as the algorithm has."""
    grad = noisy_grad() if noisy else jfl.grad(squared)
    steps = options.pop("steps", STEPS)
    numbers = options.pop("local_steps", None)
    if numbers is not None:
        options["local_steps"] = np.array(numbers)
    if name == "qfedavg" and noisy:
        options["loss_mechanism"] = loss_chain()
    batch = jfl.batches.without_replacement(3)
    factory = getattr(jfl.algorithms, name)
    algorithm = factory(grad, lr=LR, server_lr=SERVER_LR, steps=steps, batch=batch, **options)
    sampler = jfl.sampling.without_replacement(CLIENTS, COHORT)
    plan = jfl.plan(fed(), jfl.task(start_params(), squared), algorithm, sampler)
    noise, run = run_jfl(jax.random.key(2), plan)
    many = sum(r.count for r in algorithm.releases) + steps  # personal models take more
    return draws(jax.random.key(2), noise, plan, batch, many, 4), run, plan


class Loop:
    """What all loops share: rows, batches, gradients, the server's mean."""

    def __init__(self, d, noisy=True, wrong=""):
        f = fed()
        self.x, self.y, self.index = (np.asarray(v) for v in (f.x, f.y, f.index))
        self.x, self.y = self.x.astype(float), self.y.astype(float)
        self.d, self.noisy, self.wrong = d, noisy, wrong

    def rows(self, r, k, i, s):
        at = self.d["slots"][r, k, s][self.d["mask"][r, k, s]]
        rows = self.index[i][at]
        return self.x[rows], self.y[rows]

    def gradient(self, r, k, i, s, w, noisy=None):
        x, y = self.rows(r, k, i, s)
        each = [example_gradient(w, a, b) for a, b in zip(x, y)]
        if not (self.noisy if noisy is None else noisy):
            return sum(each) / len(each)
        total = sum(clip(g, NORM) for g in each) + Z * 2 * NORM * self.d["rows"][r, k, s]
        return total / DIVISOR

    def loss(self, r, k, i, s, w):
        x, y = self.rows(r, k, i, s)
        each = [0.5 * (w[0] + a @ w[1:] - b) ** 2 for a, b in zip(x, y)]
        if not self.noisy:
            return np.mean(each)
        most, z, divisor = LOSS
        normal = self.d["of_loss"][r, k]
        return (sum(min(v, most) for v in each) + z * 2 * most * normal) / divisor

    def cohorts(self):
        for r in range(ROUNDS):
            there = self.d["count"][r] > 0
            yield r, [(k, int(i)) for k, i in enumerate(self.d["ids"][r]) if there[k]]


def fednova(d, noisy, wrong, local_steps=LOCAL_STEPS):
    loop, w = Loop(d, noisy), flat(start_params())
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            v = w
            for s in range(local_steps[i]):
                v = v - LR * loop.gradient(r, k, i, s, v)
            total = total + (v - w) / (1 if wrong else local_steps[i])
        w = w + SERVER_LR * np.mean(local_steps) * total / COHORT
    return w, None


def feddyn(d, noisy, wrong, mu=0.2):
    loop, w, h, own = Loop(d, noisy), flat(start_params()), np.zeros(4), np.zeros((CLIENTS, 4))
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            v = w
            for s in range(STEPS):
                v = v - LR * (loop.gradient(r, k, i, s, v) - own[i] + mu * (v - w))
            own[i] = own[i] + (mu if wrong else -mu) * (v - w)
            total = total + v - w
        h = h - mu * total / CLIENTS
        w = w + SERVER_LR * (total / COHORT - h / mu)
    return w, own


def dicesgd(d, noisy, wrong, upload_norm=0.1, feedback_norm=0.15):
    loop, w, own = Loop(d, noisy), flat(start_params()), np.zeros((CLIENTS, 4))
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            v = w
            for s in range(STEPS):
                v = v - LR * loop.gradient(r, k, i, s, v)
            sent = clip(v - w, upload_norm) + clip(own[i], feedback_norm) * (not wrong)
            own[i] = own[i] + v - w - sent
            total = total + sent
        w = w + SERVER_LR * total / COHORT
    return w, own


def mimelite(d, noisy, wrong, momentum=0.8):
    loop, w, m = Loop(d, noisy), flat(start_params()), np.zeros(4)
    for r, cohort in loop.cohorts():
        total, gradients = 0, 0
        for k, i in cohort:
            v = w
            for s in range(STEPS):
                v = v - LR * ((1 - momentum) * loop.gradient(r, k, i, s, v) + momentum * m)
            total = total + v - w
            gradients = gradients + loop.gradient(r, k, i, STEPS, v if wrong else w)
        w = w + SERVER_LR * total / COHORT
        m = momentum * m + (1 - momentum) * gradients / COHORT
    return w, None


def qfedavg(d, noisy, wrong, q=2.0):
    loop, w = Loop(d, noisy), flat(start_params())
    for r, cohort in loop.cohorts():
        total, weights = 0, 0
        for k, i in cohort:
            v = w
            for s in range(STEPS):
                v = v - LR * loop.gradient(r, k, i, s, v)
            f = max(loop.loss(r, k, i, STEPS, w), 1e-6)
            total = total + f**q * (v - w)
            more = 0 if wrong else q * f ** (q - 1) * ((v - w) @ (v - w)) / LR
            weights = weights + f**q + more
        w = w + SERVER_LR * (total / COHORT) / max(weights / COHORT, 1e-3)
    return w, None


def ditto(d, noisy, wrong, mu=0.4):
    loop, w = Loop(d, noisy), flat(start_params())
    own = np.tile(w, (CLIENTS, 1))
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            v, p = w, own[i]
            for s in range(STEPS):
                v = v - LR * loop.gradient(r, k, i, s, v)
                g = loop.gradient(r, k, i, STEPS + s, p, noisy=False)
                p = p - LR * (g + (0 if wrong else mu) * (p - w))
            own[i], total = p, total + v - w
        w = w + SERVER_LR * total / COHORT
    return w, own


def fedper(d, noisy, wrong, personal_steps=None):
    """`b` is the first of the flat parameters: each client's own."""
    loop, w, own = Loop(d, noisy), flat(start_params()), np.full(CLIENTS, 0.2)
    shared = np.array([0, 1, 1, 1])
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            begin = np.where(shared, w, own[i])
            v = begin
            for s in range(STEPS):
                g = loop.gradient(r, k, i, s, v)
                if personal_steps is not None:
                    g = g * ((1 - shared) if s < personal_steps else shared)
                v = v - LR * g
            total = total + (v - begin) * (1 if wrong else shared)
            own[i] = v[0]
        w = w + SERVER_LR * total / COHORT
    return w, own[:, None]


def pfedme(d, noisy, wrong, pull=2.0, outer_lr=0.1, inner_steps=2):
    loop, w = Loop(d, noisy), flat(start_params())
    own = np.tile(w, (CLIENTS, 1))
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            mine, s = w, 0
            for _ in range(STEPS):
                p = mine
                for _ in range(inner_steps):
                    p = p - LR * (
                        loop.gradient(r, k, i, s, p) + pull * (p - (w if wrong else mine))
                    )
                    s += 1
                mine = mine - outer_lr * pull * (mine - p)
            own[i], total = p, total + mine - w
        w = w + SERVER_LR * total / COHORT
    return w, own


def fedsam(d, noisy, wrong, rho=0.3):
    loop, w = Loop(d, noisy), flat(start_params())
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            v = w
            for s in range(STEPS):
                up = loop.gradient(r, k, i, STEPS + s, v)
                at = v + (-rho if wrong else rho) * up / np.linalg.norm(up)
                v = v - LR * loop.gradient(r, k, i, s, at)
            total = total + v - w
        w = w + SERVER_LR * total / COHORT
    return w, None


def fedbuff(d, noisy, wrong, staleness=2):
    loop, w = Loop(d, noisy), flat(start_params())
    past = [w] * (staleness + 1)
    for r, cohort in loop.cohorts():
        total = 0
        for k, i in cohort:
            age = d["ages"][r, k]
            begin = past[age]
            v = begin
            for s in range(STEPS):
                v = v - LR * loop.gradient(r, k, i, s, v)
            total = total + (v - begin) / (1 if wrong else np.sqrt(1 + age))
        w = w + SERVER_LR * total / COHORT
        past = [w, *past[:-1]]
    return w, None


CASES = dict(
    fednova=(fednova, dict(local_steps=LOCAL_STEPS)),
    feddyn=(feddyn, dict(mu=0.2)),
    dicesgd=(dicesgd, dict(upload_norm=0.1, feedback_norm=0.15)),
    mimelite=(mimelite, dict(momentum=0.8)),
    qfedavg=(qfedavg, dict(q=2.0)),
    ditto=(ditto, dict(mu=0.4)),
    fedper=(fedper, dict(shared="w")),
    fedrep=(functools.partial(fedper, personal_steps=1), dict(shared="w", personal_steps=1)),
    pfedme=(pfedme, dict(pull=2.0, outer_lr=0.1, inner_steps=2)),
    fedsam=(fedsam, dict(rho=0.3)),
    fedbuff=(fedbuff, dict(staleness=2)),
)


def more_draws(name, d, run, plan):
    """What some algorithms draw beside cohorts, batches and noise of gradients."""
    key, d = jax.random.key(2), dict(d)
    base = run_noise_key(jfl.init(key, plan))
    each = lambda f: np.array(
        [[f(r, i, t) for i, t in zip(d["ids"][r], d["turn"][r])] for r in range(ROUNDS)]
    )
    if name == "fedbuff":
        own = lambda r, i: jax.random.fold_in(jax.random.fold_in(jax.random.key(2022), r), i)
        d["ages"] = each(lambda r, i, t: int(jax.random.randint(own(r, i), (), 0, 3)))
    if name == "qfedavg":
        own = lambda r, i, t: jax.random.fold_in(
            address(stream_key(base, Stream.ROWS, r), i, t), STEPS
        )
        d["of_loss"] = each(lambda r, i, t: float(normals(own(r, i, t), jnp.zeros(()))))
    return d


@pytest.mark.parametrize(
    "noisy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["noisy", "plain"]
)
@pytest.mark.parametrize("name", CASES)
def test_equals_its_numpy_loop(name, noisy):
    loop, options = CASES[name]
    d, run, plan = run_of(name, noisy, **options)
    d = more_draws(name, d, run, plan)
    w, own = loop(d, noisy, "")
    close(flat(plan.algorithm.params(run.server)), w, rtol=3e-4, atol=3e-5)
    if own is not None:
        leaves = [np.asarray(v).reshape(CLIENTS, -1) for v in jax.tree.leaves(run.client_states)]
        mine = np.concatenate(leaves, 1)
        close(mine, own, rtol=3e-4, atol=3e-5)
    wrong, _ = loop(d, noisy, "wrong")
    far = np.abs(wrong - w).max()
    if name == "ditto":  # the mistake is in the personal models alone
        far = np.abs(loop(d, noisy, "wrong")[1] - own).max()
    assert far > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options",
    [
        ("fednova", dict(local_steps=(STEPS,) * CLIENTS)),
        ("mimelite", dict(momentum=0.0)),
        ("qfedavg", dict(q=0.0)),
        ("dicesgd", dict(upload_norm=1e6)),
        ("ditto", dict(mu=0.3)),
        ("fedsam", dict(rho=0.0)),
        ("fedbuff", dict(staleness=0)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_shared_model_is_that_of_fedavg(name, options):
    """At the setting where nothing is left of the idea."""
    _, run, plan = run_of(name, False, **options)
    _, base, of = run_of("fedavg", False)
    mine, theirs = (p.algorithm.params(r.server) for p, r in ((plan, run), (of, base)))
    close(flat(mine), flat(theirs), rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_what_is_proved_is_what_is_released(name):
    """As many noisy gradients as the docstring says, proved, and told by the check."""
    _, _, plan = run_of(name, True, **CASES[name][1])
    gradients = dict(mimelite=STEPS + 1, pfedme=2 * STEPS, fedsam=2 * STEPS).get(name, STEPS)
    assert plan.algorithm.releases[0].count == gradients
    assert len(plan.algorithm.releases) == (2 if name == "qfedavg" else 1)
    report = jfl.check_privacy(plan)
    own = jfl.guarantee(plan, 5, delta=1e-5)
    assert own.status == "proved" and own.unit == "example", report
    of = run_of("fedavg", True)[2]
    reference = jfl.guarantee(of, 5, delta=1e-5).epsilon
    same = name not in ("mimelite", "pfedme", "fedsam", "qfedavg")
    assert own.epsilon == reference if same else own.epsilon > reference


@pytest.mark.parametrize("name", ["mimelite", "pfedme", "fedsam", "qfedavg"])
def test_a_release_that_is_not_declared_is_found(name):
    """Also where jfl made the client: fewer gradients declared than it takes, or no loss."""
    plan = run_of(name, True, **CASES[name][1])[2]
    first, *others = plan.algorithm.releases
    less = (first,) if others else (dataclasses.replace(first, count=first.count - 1),)
    algorithm = dataclasses.replace(plan.algorithm, releases=less)
    plan = dataclasses.replace(plan, algorithm=algorithm)
    assert jfl.guarantee(plan, 5, delta=1e-5).status == "conditional"


@pytest.mark.parametrize(
    "name, optimizer",
    [
        ("fedavgm", functools.partial(optax.sgd, momentum=0.9, nesterov=False)),
        ("fedadam", functools.partial(optax.adam, b1=0.9, b2=0.99, eps=1e-3)),
        ("fedyogi", functools.partial(optax.yogi, b1=0.9, b2=0.99, eps=1e-3)),
        ("fedadagrad", functools.partial(optax.adagrad, initial_accumulator_value=0.0, eps=1e-3)),
    ],
)
def test_presets_are_fedavg_with_that_optimizer(name, optimizer):
    preset = getattr(jfl.algorithms, name)(jfl.grad(squared), server_lr=0.05)
    by_hand = jfl.algorithms.fedavg(jfl.grad(squared), server_lr=0.05, server_optimizer=optimizer)
    assert preset.name == name
    structure = jax.tree.structure(dataclasses.replace(preset, name="fedavg"))
    assert structure == jax.tree.structure(by_hand)
    close(jax.tree.leaves(preset), jax.tree.leaves(by_hand), rtol=0, atol=0)


@pytest.mark.slow
def test_personal_models_do_better_where_clients_disagree():
    """Each client has labels of its own, which one model cannot have: Ditto, FedPer and pFedMe."""
    r = np.random.default_rng(0)
    clients = {}
    for c in range(6):
        x = r.normal(size=(60, 2))
        clients[c] = x, ((x[:, 0] > 0) ^ (c % 2)).astype(int)
    data = jfl.federate(clients, holdout=0.3)
    task = jfl.models.mlp(data, hidden=(8,))
    grad = jfl.grad(task.loss)

    def accuracy(name, **options):
        batch = jfl.batches.without_replacement(10)
        algorithm = getattr(jfl.algorithms, name)(grad, lr=0.3, batch=batch, **options)
        plan = jfl.plan(data, task, algorithm, jfl.sampling.full(6))
        metrics = jfl.simulate(jax.random.key(0), plan, 30, evaluate_every=30).metrics
        return float(metrics.client_accuracy[-1]), np.asarray(metrics.client_percentiles[-1])

    shared, _ = accuracy("fedavg")
    assert shared < 0.75
    for name, options in (
        ("ditto", dict(mu=0.01)),
        ("fedper", dict(shared="Dense_0/*")),
        ("fedrep", dict(shared="Dense_0/*")),
        ("pfedme", dict(pull=0.5, outer_lr=0.05)),
    ):
        own, percentiles = accuracy(name, **options)
        assert own > 0.85, name
        assert (np.diff(percentiles) >= 0).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda g: jfl.algorithms.fednova(g, local_steps=[0, 1]), "local_steps"),
        (lambda g: jfl.algorithms.fednova(g, steps=2, local_steps=[3]), "from 1 to steps=2"),
        (lambda g: jfl.algorithms.fedprox(g, mu=float("nan")), "mu"),
        (lambda g: jfl.algorithms.feddyn(g, mu=0.0), "mu"),
        (lambda g: jfl.algorithms.mimelite(g, momentum=1.0), "momentum"),
        (lambda g: jfl.algorithms.dicesgd(g, upload_norm=0.0), "upload_norm"),
        (lambda g: jfl.algorithms.dicesgd(g, feedback_norm=-1.0), "feedback_norm"),
        (lambda g: jfl.algorithms.qfedavg(g, q=-1.0), "q"),
        (lambda g: jfl.algorithms.qfedavg(noisy_grad()), "loss_mechanism for a private gradient"),
        (lambda g: jfl.algorithms.ditto(g, personal_grad=squared), "personal_grad"),
        (lambda g: jfl.algorithms.fedrep(g, steps=2, personal_steps=3), "personal_steps"),
        (lambda g: jfl.algorithms.fedper(g, shared=3), "shared"),
        (lambda g: jfl.algorithms.pfedme(g, inner_steps=0), "inner_steps"),
        (lambda g: jfl.algorithms.pfedme(g, pull=0.0), "pull"),
        (lambda g: jfl.algorithms.fedbuff(g, staleness=-1), "staleness"),
        (lambda g: jfl.algorithms.fedsam(g, rho=-1.0), "rho"),
    ],
)
def test_bad_arguments(make, words):
    with pytest.raises(ValueError, match=words):
        make(jfl.grad(squared))


def test_what_a_clip_cuts_off_is_sent_later():
    """Three clients want 0, 0 and 9: a clip alone ends where two outweigh one, near 0; with what
    was cut off, at the mean.  An upload is never longer than its two norms, so a clip to their sum
    cuts nothing off, but for rounding."""
    x, y = np.zeros((3, 1), np.float32), np.array([0.0, 0.0, 9.0], np.float32)
    rows = {str(i): (x[i : i + 1], y[i : i + 1]) for i in range(3)}
    three = jfl.federate(rows, test=(x, y), classes=0)
    task = jfl.task(jnp.zeros(()), lambda w, x, y: 0.5 * (w - y) ** 2)
    options = dict(lr=0.3, steps=1, batch=jfl.batches.full())
    ends = {}
    for name, norms, bound in (
        ("fedavg", {}, 0.2),
        ("dicesgd", dict(upload_norm=0.1, feedback_norm=0.1), 0.2),
        ("dicesgd", dict(upload_norm=0.1, feedback_norm=5.0), 5.1),
    ):
        algorithm = getattr(jfl.algorithms, name)(jfl.grad(task.loss), **options, **norms)
        chain = jfl.chain(jfl.clip_l2(bound * 1.00001), jfl.total(), jfl.divide(3.0))
        plan = jfl.plan(three, task, algorithm, jfl.sampling.full(3), release=chain)
        out = jfl.simulate(jax.random.key(0), plan, 300)
        ends[name, bound] = float(out.params)
        if name == "dicesgd":
            assert float(out.metrics.clip_fraction.max()) == 0
    assert abs(ends["fedavg", 0.2]) < 0.4
    assert abs(ends["dicesgd", 5.1] - 3) < 0.1


def test_a_part_that_is_everything_or_nothing():
    task = jfl.task(start_params(), squared)
    for shared in ("*", "tail/*"):
        batch = jfl.batches.without_replacement(3)
        algorithm = jfl.algorithms.fedper(jfl.grad(squared), shared=shared, batch=batch)
        plan = jfl.plan(fed(), task, algorithm, jfl.sampling.full(CLIENTS))
        with pytest.raises(ValueError, match="a shared and a personal part, but got shared="):
            jfl.simulate(jax.random.key(0), plan, 1)


def test_a_number_of_steps_for_each_client():
    batch = jfl.batches.without_replacement(3)
    algorithm = jfl.algorithms.fednova(jfl.grad(squared), local_steps=[1, 2], batch=batch)
    task = jfl.task(start_params(), squared)
    plan = jfl.plan(fed(), task, algorithm, jfl.sampling.full(CLIENTS))
    with pytest.raises(ValueError, match="local_steps for each of 7 clients, but got 2"):
        jfl.simulate(jax.random.key(0), plan, 1)
