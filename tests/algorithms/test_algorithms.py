"""Each algorithm against a plain NumPy loop of its pseudo-code.

The loop takes from jfl only what is drawn (cohorts, batch slots, standard normals) at the
documented addresses; all else (gradients, clipping, noise scales, divisors, local steps, weights,
control variates, server steps) it computes itself, in float64, on flat parameter vectors.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.numpy_loops import (
    LEVELS,
    Loop,
    by_round,
    clip,
    drawn_and_run,
    example_gradient,
    falling,
)
from helpers.problems import (
    CLIENTS,
    SIZES,
    close,
    flat,
    make_algorithm,
    make_federation,
    squared,
    start_params,
)

import jfl

LR, SERVER_LR, MU = 0.15, 0.9, 0.3
ARRAY = (1.0, 2.0, 0.5, 1.0, 3.0, 1.5, 1.0)
SHARES = (1.0, 3.0, 2.0, 1.0, 1.0, 2.0, 4.0)


def shrinking(round_):
    """A clip norm that falls, as in Dynamic DP-SGD."""
    return 0.6 * 0.7**round_


def calming(round_):
    return 1.1 * 0.8**round_


SAMPLERS = dict(
    full=lambda: jfl.sampling.full(CLIENTS),
    without=lambda: jfl.sampling.without_replacement(CLIENTS, 3),
    poisson=lambda: jfl.sampling.poisson(CLIENTS, 0.45, capacity=CLIENTS),
    multiplicity=lambda: jfl.sampling.with_replacement(CLIENTS, 6),
    shares=lambda: jfl.sampling.with_replacement(CLIENTS, 6, weights=SHARES),
    independent=lambda: jfl.sampling.with_replacement(CLIENTS, 6, independent=True),
)
EXPECTED = dict(
    full=7.0, without=3.0, poisson=0.45 * 7, multiplicity=6.0, shares=6.0, independent=6.0
)
BATCHES = dict(
    short=lambda: jfl.batches.without_replacement(5, short="all"),
    with_=lambda: jfl.batches.with_replacement(4),
    poisson=lambda: jfl.batches.poisson(3.0),
    rate=lambda: jfl.batches.poisson(rate=0.6, capacity=9),
    epochs=lambda: jfl.batches.epochs(3),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table below: who, on which batches, with which noise."""

    algorithm: str
    sampler: str = "without"
    batch: str = "epochs"
    rows: tuple | None = None  # (clip, z, divisor) of examples
    upload: tuple | None = None  # (clip, z) of a client's upload
    release: tuple | None = None  # (clip, z, divisor) of the cohort
    adaptive: bool = False
    weights: object = "uniform"
    server: str = "sgd"
    client: str = "sgd"
    lr: object = LR
    adjacency: str | None = None  # of the release
    l2: float = 0.0
    microbatch: int | None = None
    chunk: int | None = None
    warm: float | None = None  # rounds that only find control variates

    @property
    def steps(self):
        return 1 if self.algorithm == "fedsgd" else 3


ROWS, UPLOAD, RELEASE = (0.6, 1.1, 4.0), (0.3, 0.8), (0.2, 0.9, 3.0)
CASES = dict(
    private_and_release_by_size=Case(
        "fedavg", batch="with_", rows=ROWS, release=RELEASE, weights="size", chunk=2
    ),
    several_turns_short_batches=Case(
        "fedavg",
        "multiplicity",
        "short",
        rows=(shrinking, calming, 4.0),
        l2=0.2,
        microbatch=2,
        client="adam",
    ),
    fedsgd_divided_by_size=Case(
        "fedsgd",
        "full",
        "epochs",
        rows=(0.6, 1.1, "size"),
        weights=by_round,
        lr=falling,
        release=RELEASE,
        adjacency="add_remove",
        server="momentum",
    ),
    fedprox_private_and_release=Case(
        "fedprox",
        "full",
        "poisson",
        rows=ROWS,
        release=RELEASE,
        weights=ARRAY,
        adaptive=True,
        client="momentum",
    ),
    scaffold_noise_everywhere=Case(
        "scaffold",
        "poisson",
        "poisson",
        rows=ROWS,
        upload=UPLOAD,
        release=RELEASE,
        lr=falling,
        warm=1.0,
        server="adam",
    ),
    noise_by_round_and_client=Case(
        "fedavg",
        "independent",
        "rate",
        rows=(0.6, LEVELS, 4.0),
        upload=(shrinking, LEVELS),
        release=(shrinking, calming, 3.0),
        weights=ARRAY,
        client="adagrad",
    ),
)
OPTIMIZERS = dict(
    sgd=optax.sgd,
    momentum=functools.partial(optax.sgd, momentum=0.9),
    adam=optax.adam,
    adagrad=optax.adagrad,
)


def now(value, round_, client=None):
    """A clip norm or noise multiplier in one round, for one client."""
    value = float(value(round_)) if callable(value) else value
    return value[client] if isinstance(value, tuple) else value


def noise_stage(z):
    return jfl.gaussian(jnp.array(z) if isinstance(z, tuple) else z)


def build(case, fed, task):
    """The plan of a case: what jfl is asked to run."""
    if case.rows is None:
        grad = jfl.grad(squared, l2=case.l2 or None)
    else:
        bound, z, divisor = case.rows
        grad = jfl.private_grad(
            squared,
            jfl.chain(jfl.clip_l2(bound), jfl.total(), noise_stage(z), jfl.divide(divisor)),
            l2=case.l2 or None,
            microbatch=case.microbatch,
        )
    options = dict(server_optimizer=OPTIMIZERS[case.server], batch=BATCHES[case.batch]())
    if case.algorithm == "fedsgd":
        options["lr"] = case.lr
    else:
        options.update(lr=case.lr, server_lr=SERVER_LR, optimizer=OPTIMIZERS[case.client])
    if case.algorithm == "fedprox":
        options["mu"] = MU
    if case.warm is not None:
        options["warm_rounds"] = case.warm
    algorithm = make_algorithm(case.algorithm, grad, steps=case.steps, **options)
    upload = release = None
    if case.upload:
        upload = jfl.chain(jfl.clip_l2(case.upload[0]), jfl.total(), noise_stage(case.upload[1]))
    if case.release:
        bound, z, divisor = case.release
        clip = (
            jfl.clip_adaptive(bound, EXPECTED[case.sampler], **ADAPTIVE)
            if case.adaptive
            else jfl.clip_l2(bound)
        )
        release = jfl.chain(clip, jfl.total(), jfl.gaussian(z), jfl.divide(divisor))
    weights = jnp.array(case.weights) if isinstance(case.weights, tuple) else case.weights
    return jfl.plan(
        fed,
        task,
        algorithm,
        SAMPLERS[case.sampler](),
        upload=upload,
        release=release,
        weights=weights,
        adjacency=case.adjacency,
        chunk=case.chunk,
    )


ADAPTIVE = dict(quantile=0.6, lr=0.4, indicator=0.3)


# --- the pseudo-code


def descend(w, gradient, state, lr, kind):
    """One optimizer step; `state` is a dict that lives as long as the optimizer."""
    if kind == "momentum":
        gradient = state["m"] = gradient + 0.9 * state.get("m", 0.0)
    if kind == "adam":
        t = state["t"] = state.get("t", 0) + 1
        state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * gradient
        state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * gradient**2
        gradient = state["m"] / (1 - 0.9**t) / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8)
    if kind == "adagrad":
        state["s"] = state.get("s", 0.1) + gradient**2
        gradient = gradient / np.sqrt(state["s"] + 1e-7)
    return w - lr * gradient


def client_weights(case, round_):
    """Distribution over clients divided by the client's share of draws, by hand."""
    named = dict(uniform=np.ones(CLIENTS), size=SIZES)
    given = by_round(round_) if callable(case.weights) else named.get(case.weights, case.weights)
    given = np.asarray(given, float)
    return given / given.sum() * CLIENTS


def local_gradient(case, w, rows, noise, size, r, i):
    """The gradient of one batch: a mean, or clip, sum, noise, divide."""
    each = [example_gradient(w, a, b) for a, b in zip(*rows)]
    if case.rows is None:
        return sum(each, np.zeros(4)) / max(len(each), 1) + case.l2 * w
    bound, z, divisor = case.rows
    bound, z = now(bound, r), now(z, r, i)
    divisor = size if divisor == "size" else divisor
    neighbours = 1 if case.batch in ("poisson", "rate") else 2
    total, noise = sum((clip(g, bound) for g in each), np.zeros(4)), z * neighbours * bound * noise
    return (total + noise) / divisor + case.l2 * w


def run_numpy(case, fed, d):
    """The whole run -> params, control, own, clip norm."""
    scaffold, loop = case.algorithm == "scaffold", Loop(fed, d)
    w, memory = flat(start_params()), {}
    control, own = np.zeros(4), np.zeros((CLIENTS, 4))
    norm = now(case.release[0], 0) if case.release else None
    for r, cohort in loop.cohorts():
        still = case.warm is not None and r < case.warm
        norm = norm if norm is None or case.adaptive else now(case.release[0], r)
        weights, total, coordinate, new_own = client_weights(case, r), 0.0, 0.0, own.copy()
        lrs = [
            case.lr(r * case.steps + s) if callable(case.lr) else case.lr for s in range(case.steps)
        ]
        for k, i, count in cohort:
            v, mean, state = w, np.zeros(4), {}
            for s in range(case.steps):
                noise, rows = d["rows"][r, k, s, :4], loop.rows(r, k, i, s)
                g = local_gradient(case, v, rows, noise, SIZES[i], r, i)
                mean = mean + g / case.steps
                if case.algorithm == "fedprox":
                    g = g + MU * (v - w)
                if scaffold:
                    g = g + control - own[i]
                v = v if still else descend(v, g, state, lrs[s], case.client)
            payload = -mean if case.algorithm == "fedsgd" else v - w
            if scaffold:
                payload = np.concatenate([payload, sum(lrs) * (mean - own[i])])
                new_own[i] = mean
            if case.upload:
                bound, z = now(case.upload[0], r), now(case.upload[1], r, i)
                payload = clip(payload, bound) + z * 2 * bound * d["upload"][r, k][: payload.size]
            over = norm is not None and np.linalg.norm(payload) > norm
            payload = clip(payload, norm) if case.release else payload
            total = total + weights[i] * count * payload
            coordinate += weights[i] * count * ((0.0 if over else 1.0) - 0.5)
        own, dim = new_own, 8 if scaffold else 4
        total = total + np.zeros(dim)
        if case.release:
            _, z, divisor = case.release
            adjacency = case.adjacency or (
                "add_remove" if case.sampler == "poisson" else "replace_one"
            )
            neighbours = 1 if adjacency == "add_remove" else 2
            kappa = ADAPTIVE["indicator"] if case.adaptive else 0.0
            sigma = now(z, r) * neighbours * norm * np.sqrt(1 + kappa**2 / 4) * weights.max()
            noise = sigma * d["release"][r]
            released = (total + noise[:dim]) / divisor
            if case.adaptive:
                seen = norm * kappa * coordinate + noise[dim]
                below = seen / (norm * kappa * EXPECTED[case.sampler]) + 0.5
                norm = norm * np.exp(-ADAPTIVE["lr"] * (below - ADAPTIVE["quantile"]))
        else:
            released = total / EXPECTED[case.sampler]
        lr = lrs[0] if case.algorithm == "fedsgd" else SERVER_LR
        w = w if still else descend(w, -released[:4], memory, lr, case.server)
        if scaffold:
            control = control + EXPECTED[case.sampler] / CLIENTS * released[4:] / sum(lrs)
    return types.SimpleNamespace(params=w, control=control, own=own, norm=norm)


@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name):
    case, fed = CASES[name], make_federation()
    plan = build(case, fed, jfl.task(start_params(), squared))
    d, run = drawn_and_run(plan, case.steps)
    want, params = run_numpy(case, fed, d), run.server.params
    close(flat(params), want.params, rtol=2e-5, atol=3e-6)
    if case.algorithm == "scaffold":
        close(flat(run.server.control), want.control, rtol=2e-5, atol=3e-6)
        own = np.concatenate(
            [np.asarray(run.client_states["b"])[:, None], np.asarray(run.client_states["w"])], 1
        )
        close(own, want.own, rtol=2e-5, atol=3e-6)
    if case.adaptive:
        close(run.mechanism, want.norm)
    assert sum(int(v) for v in (run.health.nonfinite, run.health.overflow)) == 0
    # something was learned or noised
    assert np.abs(want.params - flat(start_params())).max() > 0.01


# --- estimates


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_release_is_unbiased(fed, task, sampler):
    """The mean release over cohorts is the weighted mean over all clients (5 sigma; a biased form
    must fail)."""
    value, algorithm = np.arange(1.0, 8.0) ** 2, make_algorithm("fedsgd", jfl.grad(squared))
    drawer = SAMPLERS[sampler]()
    cohorts = jax.jit(jax.vmap(drawer.draw))(jax.random.split(jax.random.key(1), 4000))
    ids, count = np.asarray(cohorts.ids), np.asarray(cohorts.times_drawn)
    for weights, p in (("uniform", np.ones(7)), ("size", SIZES), (jnp.array(ARRAY), ARRAY)):
        plan = jfl.plan(fed, task, algorithm, drawer, weights=weights)
        each = np.append(np.asarray(plan.weights) * value, 0.0)[np.minimum(ids, CLIENTS)] * count
        estimates = each.sum(1) / float(drawer.expected)
        want = np.asarray(p, float) @ value / sum(p)
        error = max(5 * estimates.std() / np.sqrt(len(estimates)), 1e-4 * want)
        assert abs(estimates.mean() - want) < error
        assert abs(estimates.mean() - 1.1 * want) > error


# --- arguments


@pytest.mark.parametrize("name", jfl.algorithms.__all__)
def test_bad_arguments_are_refused(name):
    bad = dict(lr=(0.0, float("nan"), "fast", None), batch=(16,), server_optimizer=("adam",))
    if name != "fedsgd":
        bad["steps"] = (0, 2.5, True)
    for argument, values in bad.items():
        for value in values:
            words = "optax" if argument == "server_optimizer" else argument
            with pytest.raises(ValueError, match=words):
                make_algorithm(name, jfl.grad(squared), **{argument: value})
    with pytest.raises(ValueError, match="grad = "):
        make_algorithm(name, squared)
