"""Tests of whether the noise of a plan is what its ledger states: `noise_test`.

A slightly wrong noise level hardly changes epsilon.  Here all contributions are zero, so a
mechanism releases only its noise, which must be N(0, sigma^2 I) with the sigma that the ledger
states, and independent of all other noise.  Each test has an exact null distribution, so a false
alarm is as rare as `level` says.

Noise z is an array [runs, points, rounds, clients, steps, d], in units of its stated standard
deviation.  The points are those of a sweep with one seed, and d is the number of coordinates.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from jfl.auditing import canaries
from jfl.core import identity, pytrees
from jfl.core.records import Algorithm, Diagnostics, Fn, Mechanism, Plan, Task, named
from jfl.engine.round import enter_plan, init, run_noise_key
from jfl.engine.simulate import scan_from
from jfl.local import training
from jfl.privacy.mechanisms import chain as mech
from jfl.privacy.mechanisms.stages import total
from jfl.sampling import clients as sampling

MAX_STEPS = 4  # number of tested local steps of a client, counted from the first
MAX_ALL_PAIRS = 256  # up to this number of slices of an axis, all pairs are compared
MAX_LAG = 8  # with more slices, the largest distance between compared slices
MAX_NUMBERS = 2**22  # number of noise values that are drawn at once
RESOLUTION = 1e-4  # numbers are rounded to this, in standard deviations, to find repeats
AXES = ("runs", "sweep points", "rounds", "clients", "steps", "coordinates")


class NoiseReport(NamedTuple):
    """The tests of a plan's noise.

    Attributes:
        failed: maps the name of each test that failed to what it found.
        tests: the names of all tests.
        samples: the number of values of noise.
    """

    failed: dict
    tests: list
    samples: int


def noise_test(
    plan: Plan, rounds: int = 2, runs: int = 1000, *, seed: int = 0, level: float = 1e-6
) -> NoiseReport:
    """Test the noise of local steps, of uploads and of the server's release, each separately.

    The plan's chains and local steps run in a separate loop, on the plan's mesh: with its sampler
    for the server's release, and with all clients for their own noise.  What an algorithm sends in
    addition to its noise, and how it uses its keys, is not observed; use `jfl.audit` for these.

    The release after its public divisor is tested for its distribution (Kolmogorov-Smirnov), its
    variance (chi-square: in total, and for each leaf, round, client and step), its mean,
    and its independence (correlations of the values and of their sizes) across coordinates,
    clients, steps, rounds, runs and points of a sweep that share a seed.  Repeated values are
    searched across all of them.

    The expected sigma is the ledger's multiplier times the largest change by one contribution that
    the chain was observed to let through.  The test therefore also finds a clip whose norm differs
    from the one that the noise assumes.

    Args:
        plan: with noise.  To observe the upload of each client, all clients run once for each of
            them, so few clients are enough.
        runs: the number of runs, each with a separate key.
        level: the maximum probability that correct noise fails any of the tests.
    """
    results, samples = [], 0
    for source in _sources(plan):
        z, groups = _standardised_noise(plan, source, rounds, runs, seed)
        samples += z.size
        results += [(f"{source.name}: {name}", *rest) for name, *rest in _run_tests(z, groups)]
    failed = {name: found for name, p, found in results if len(results) * p < level}
    return NoiseReport(failed, [name for name, *_ in results], samples)


# --- where noise is added


class _Source(NamedTuple):
    """A place at which a plan adds noise."""

    name: str
    kind: str  # local | upload | release
    mechanism: Mechanism
    work: training.Work | None = None


def _sources(plan):
    """Return the places at which a plan adds noise."""
    is_work = lambda node: isinstance(node, training.Work)
    works = [w for w in jax.tree.leaves(plan.algorithm, is_leaf=is_work) if is_work(w)]
    works = {id(w): w for w in works if mech.noisy(w.grad.mechanism)}.values()
    inside = [r for r in plan.algorithm.releases if mech.noisy(r.mechanism)]
    assert not any(r.steps for r in inside) and (works or not inside), "noise of a client"
    found = [_Source("local steps", "local", work.grad.mechanism, work) for work in works]
    if mech.noisy(plan.upload):
        found.append(_Source("uploads", "upload", plan.upload))
    if mech.noisy(plan.release):
        found.append(_Source("release", "release", plan.release))
    stages = [stage for place in found for stage in place.mechanism.stages]
    assert stages and not any(s.is_map or s.law == "laplace" for s in stages), "Gaussian noise"
    assert not any(mech.shape(place.mechanism) for place in found), "noise without a shape"
    return found


def _standardised_noise(plan, source, rounds, runs, seed):
    """Return the noise z of a source, and the name of each coordinate's leaf."""
    wide = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32)
    params = jax.tree.map(wide, jax.eval_shape(plan.task.init, jax.random.key(0)))
    like = params
    if source.kind != "local":
        like = jax.tree.map(wide, canaries.upload_shapes(plan))
    groups = [f"leaf {i}" for i, x in enumerate(jax.tree.leaves(like)) for _ in range(x.size)]
    probe = _probe(plan, source, params, like, len(groups), rounds)
    points = 1 if plan.paired_noise else 2
    each = rounds * len(groups) * plan.sampler.clients * MAX_STEPS * points
    keys = jax.random.split(jax.random.key(seed), runs)
    observe = functools.partial(_observe, kind=source.kind, rounds=rounds, points=points)
    draw = lambda keys, probe: jax.lax.map(
        lambda key: observe(key, probe), keys, batch_size=min(runs, max(1, MAX_NUMBERS // each))
    )
    seen, norms = jax.jit(draw)(keys, probe)
    stated = _stated_deviation(plan, source, like, rounds)
    z = np.asarray(seen, np.float64) / stated[:, :, None, None]
    if norms is not None:  # an adaptive clip norm, which the noise follows
        norms = np.asarray(norms, np.float64)
        first = float(mech.initial_state(source.mechanism))
        before = np.concatenate([np.full_like(norms[:, :, :1], first), norms[:, :, :-1]], axis=2)
        z = z / (before / first)[..., None, None, None]
    return z, np.asarray(groups)


def _stated_deviation(plan, source, like, rounds):
    """Return the standard deviation that the ledger states, after public divisors, Float64[rounds,
    clients or 1]."""
    mechanism = source.mechanism
    weights = np.ones(rounds)
    if source.kind == "release":
        of = lambda r: plan.weights(r) if isinstance(plan.weights, Fn) else plan.weights
        weights = np.array([float(np.max(np.asarray(of(r)))) for r in range(rounds)])
    multiplier = mech.multipliers(mechanism, rounds, plan.sampler.clients, lambda r: weights[r])
    sides = 2.0 if mechanism.adjacency == "replace_one" else 1.0
    every = range(rounds) if mech.scheduled(mechanism) else [0]
    change = [_largest_change(mech.at_round(mechanism, jnp.int32(r)), like) for r in every]
    scale = sides * np.array(change) / (mech.denominator(mechanism) or 1.0)
    return multiplier * (scale * weights)[:, None]


def _largest_change(mechanism, like):
    """Return how much one contribution was observed to change the sum, in the norm of the noise."""
    row, _, _ = canaries.worst(mechanism, like)
    stacked = jax.tree.map(lambda v: v[None], row)
    moved = mech.clip_and_sum(mechanism, mech.initial_state(mechanism), stacked, jnp.ones(1)).value
    return float(pytrees.norm(moved))


# --- the program


class _Server(NamedTuple):
    """The server state of a probed run."""

    params: object
    seen: object  # Float[rounds, d] of the release


def _probe(plan, source, params, like, size, rounds):
    """Return the plan with clients that contribute nothing and keep their noise."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    # what follows the public divisor may be another divisor, or not linear
    stages = [s for s in source.mechanism.stages if s.role != "post" or s.divisor == "number"]
    mechanism = Mechanism(tuple(stages), source.mechanism.adjacency)
    clients, work = plan.sampler.clients, None
    changes = dict(upload=None, release=Mechanism((total(),), plan.release.adjacency))
    if source.kind == "local":
        grad = source.work.grad
        path = "auto" if grad.path == "bookkeeping" else grad.path
        loss = Fn(canaries.nothing)
        work = dataclasses.replace(
            source.work,
            grad=dataclasses.replace(grad, loss=loss, mechanism=mechanism, l2=None, path=path),
            optimizer=training.as_optimizer(optax.sgd),
            steps=min(source.work.steps, MAX_STEPS),
        )
    else:
        changes[source.kind] = mechanism
    if source.kind != "release":
        changes |= dict(sampler=sampling.full(clients), chunk=min(plan.chunk, clients))
    steps = 0 if work is None else work.steps
    sizes = dict(size=size, rounds=rounds, steps=steps)
    algorithm = Algorithm(
        init=Fn(_init, dict(params=zeros(params)), sizes),
        client=Fn(_client, dict(work=work, like=zeros(like))),
        server=Fn(_server, dict(point=jnp.float32(0))),
        params=Fn(_params),
        releases=plan.algorithm.releases,
        name="noise_test",
        stateful=work is not None,
    )
    fed, task = canaries.numbers_like(plan.fed), Task(plan.task.init, Fn(canaries.nothing))
    return dataclasses.replace(plan, fed=fed, task=task, algorithm=algorithm, **changes)


def _observe(key, plan, *, kind, rounds, points):
    """Run once, and return the noise [points, rounds, clients, steps, d], and the clip norms
    [points, rounds] if they adapt."""

    def of_point(point):
        server = plan.algorithm.server
        server = Fn(server.function, server.data | dict(point=point), server.static)
        algorithm = dataclasses.replace(plan.algorithm, server=server)
        probe = dataclasses.replace(plan, algorithm=algorithm)
        run = enter_plan(init(key, probe), identity.noise_identity(probe))
        noise = run_noise_key(run)
        go = lambda probe: scan_from(run, probe, jnp.ones(rounds, jnp.int32), noise)
        if kind == "upload":  # of each client separately
            of_client = lambda w: go(dataclasses.replace(probe, weights=w))[0].server.seen
            seen = jax.vmap(of_client)(jnp.eye(plan.sampler.clients))
            return jnp.moveaxis(seen, 0, 1)[:, :, None], None
        run, metrics = go(probe)
        if kind == "local":
            return jnp.moveaxis(run.client_states, 0, 1), None
        return run.server.seen[:, None, None], metrics.clip_norm

    return jax.vmap(of_point)(jnp.arange(points, dtype=jnp.float32))


@named("noise_test.init")
def _init(_, *, params, size, rounds, steps):
    """Return the initial states of a probed run."""
    own = jnp.zeros((rounds, steps, size)) if steps else ()
    return _Server(params, jnp.zeros((rounds, size))), own


@named("noise_test.client")
def _client(context, keys, server, own, rows, *, work, like):
    """Return a zero upload, and record the noise of this round."""
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    diagnostics = Diagnostics(zero, zero, none, none)
    if work is None:
        return like, own, diagnostics

    def noise_of_step(step):  # with this learning rate only one step remains
        lr = Fn(_one_step, dict(step=step), dict(steps=work.steps))
        only = dataclasses.replace(work, lr=lr)
        trained = training.train(only, context, keys, server.params, rows)[0]
        return _flat(pytrees.scale(-1.0, trained))

    every = jax.vmap(noise_of_step)(jnp.arange(work.steps))
    return like, own.at[context.round].set(every), diagnostics


@named("noise_test.one_step")
def _one_step(clock, *, step, steps):
    """Return a learning rate that is 1 in one local step and 0 in all others."""
    return jnp.where(clock % steps == step, 1.0, 0.0)


@named("noise_test.server")
def _server(context, server, release, *, point):
    """Record a release."""
    return server._replace(seen=server.seen.at[context.round].set(_flat(release)))


@named("noise_test.params")
def _params(server):
    """Return the parameters of a probed run."""
    return server.params


def _flat(tree):
    """Return all numbers of a release as one vector."""
    return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(tree)])


# --- tests of numbers that are independent and standard normal if the noise is as stated


def _run_tests(z: np.ndarray, groups: np.ndarray):
    """Yield the name, p-value and description of each test of noise z."""
    if not np.all(np.isfinite(z)):
        yield "finite", 0.0, "a number is not finite"
        return
    ks = stats.kstest(z.reshape(-1), "norm")
    distance = f"Kolmogorov-Smirnov distance {ks.statistic:.4f} from normal"
    yield "distribution", ks.pvalue, distance
    mean = z.sum() / math.sqrt(z.size)
    yield "mean", 2 * stats.norm.sf(abs(mean)), f"{mean:.3g} standard errors from 0"
    squares = np.square(z)
    yield "variance", *_variance(squares.reshape(-1, 1), ["all"])
    yield f"variance of each {groups[0].split()[0]}", *_variance(squares, groups)
    for axis, name in list(enumerate(AXES))[1:5]:
        if (n := z.shape[axis]) > 1:
            labels = [f"{name} {i}" for i in range(n)]
            yield f"variance across {name}", *_variance(np.moveaxis(squares, axis, -1), labels)
    # Sizes are made standard normal too; equal sizes with different signs are not correlated.
    sizes = stats.norm.isf(np.clip(2 * stats.norm.sf(np.abs(z)), 1e-300, 1 - 1e-16))
    for axis, name in enumerate(AXES):
        if z.shape[axis] > 1:
            for what, values in (("", z), (" of sizes", sizes)):
                yield f"independence{what} across {name}", *_correlation(values, axis, name)
    yield "no repeats", *_repeats(z)


def _variance(squares, labels):
    """Compare sums of squares with chi-square, one for each different label of the last axis."""
    groups, of = np.unique(labels, return_inverse=True)
    members = np.bincount(of)
    sums = np.bincount(of, squares.reshape(-1, len(of)).sum(0))
    counts = members * (squares.size // len(of))
    p = 2 * np.minimum(stats.chi2.sf(sums, counts), stats.chi2.cdf(sums, counts))
    worst, ratio = int(np.argmin(p)), np.sqrt(sums / counts)
    words = f"{groups[worst]}: {ratio[worst]:.4g} of the stated sigma"
    return min(1.0, len(p) * p[worst]), words


def _correlation(z, axis, name):
    """Compare slices a, b of an axis: for independent normals a.b / |b| is standard normal."""
    slices = np.moveaxis(z, axis, 0).reshape(z.shape[axis], -1)
    count = len(slices)
    if count <= MAX_ALL_PAIRS:
        length = np.sqrt(np.square(slices).sum(1))
        pairs = np.triu_indices(count, 1)
        t = (slices @ slices.T / np.maximum(length, 1e-300))[pairs]
        i = int(np.argmax(np.abs(t)))
        which, samples = f"{name} {pairs[0][i]} and {pairs[1][i]}", slices.shape[1]
    else:  # neighbours at a few distances; each slice is in one pair per distance
        t = []
        for lag in range(1, MAX_LAG + 1):
            left = np.flatnonzero((np.arange(count - lag) // lag) % 2 == 0)
            a, b = slices[left].reshape(-1), slices[left + lag].reshape(-1)
            t.append(a @ b / max(math.sqrt(b @ b), 1e-300))
        i = int(np.argmax(np.abs(t)))
        which, samples = f"{name} {i + 1} apart", len(a)
    p = min(1.0, len(t) * 2 * stats.norm.sf(abs(t[i])))
    return p, f"{which}: correlation {t[i] / math.sqrt(samples):.3g}"


def _repeats(z):
    """Count vectors of noise that occur twice, at any addresses."""
    depth = min(z.shape[-1], 8)
    rows = np.round(z.reshape(-1, z.shape[-1])[:, :depth] / RESOLUTION).astype(np.int64)
    repeats = len(rows) - len(np.unique(rows, axis=0))
    # the probability that two normals round to one number
    probability = (RESOLUTION / (2 * math.sqrt(math.pi))) ** depth
    p = 1.0 if not repeats else min(1.0, len(rows) * (len(rows) - 1) / 2 * probability)
    return p, f"{repeats} of {len(rows)} draws occur twice"
