"""Whether the noise of a plan is what its ledger states: its law, its level, its independence.

An epsilon is moved little by noise that is a little wrong.  Here all contributions are zero, so
what a mechanism releases is its noise alone: N(0, sigma^2 I) with the sigma that the ledger states,
and independent of all other noise.  Each test has an exact null distribution, so a false alarm is
as rare as `level` says.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..core import checks, identity, pytrees
from ..core.errors import NotAnalysable
from ..core.records import Algorithm, Diagnostics, Fn, Mechanism, Plan, Task, named
from ..engine.round import enter_plan, init, run_noise_key
from ..engine.simulate import scan_from
from ..local import training
from ..privacy.ledger.facts import levels
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import haar_bands as bands
from ..privacy.mechanisms.stages import total
from ..sampling import clients as sampling
from . import canaries

COORDINATES = 256  # of a release that are looked at, in all of its leaves or bands
STEPS = 4  # of a client's local steps, the first ones
SOME = 256  # slices of an axis up to which each is compared with each
LAGS = 8  # beyond, how far apart two of them are at most
AT_ONCE = 2**22  # numbers of runs that are drawn at once
GRAIN = 1e-4  # deviations to which numbers are rounded before equal ones are looked for
AXES = ("runs", "sweep points", "rounds", "clients", "steps", "coordinates")
WHERE = "noise_test"


class NoiseTest(NamedTuple):
    """One hypothesis about the noise.

    Attributes:
        name: what it is about.
        statistic: of the test; of several, the one that deviates most.
        p_value: of this test alone, corrected for what it tries itself.
        adjusted: by Holm, for all tests of the report.
        found: the statistic in words.
    """

    name: str
    statistic: float
    p_value: float
    adjusted: float
    found: str


class NoiseReport(NamedTuple):
    """What the tests of a plan's noise say.

    Attributes:
        tests: all of them.
        level: the probability that noise as stated fails one of them or more, at most.
        samples: numbers of noise that were seen.
        resolution: the relative error of a sigma of all that is found with probability 0.99.
    """

    tests: tuple
    level: float
    samples: int
    resolution: float

    @property
    def failed(self) -> tuple:
        """The tests that noise as stated would hardly ever fail."""
        return tuple(test for test in self.tests if test.adjusted < self.level)

    @property
    def ok(self) -> bool:
        """True if no test failed."""
        return not self.failed

    def __str__(self):
        verdict = "as stated" if self.ok else "NOT as stated"
        lines = [
            f"noise {verdict} in {len(self.tests) - len(self.failed)} of {len(self.tests)} tests "
            f"of {self.samples} numbers, at a family-wise level of {self.level:g}"
        ]
        lines += [f"  failed: {t.name}: {t.found} (p = {t.adjusted:.2g})" for t in self.failed]
        lines.append(f"  an error of sigma of {100 * self.resolution:.2g} % is found")
        return "\n".join(lines)


def noise_test(
    plan: Plan, rounds: int = 2, runs: int = 1000, *, seed: int = 0, level: float = 1e-6
) -> NoiseReport:
    """Test the noise of local steps, uploads and the server's release, each by itself.

    The plan's chains and local steps run in jfl's own loop, on the plan's mesh: with its sampler
    for the server's release, with all clients for noise of their own.  What an algorithm of your
    own does beside them, with its keys or in what it sends, is not seen: that is for `jfl.audit`.
    All contributions are zero.  What is tested is the release
    after its public divisor: its law (Kolmogorov-Smirnov), its variance (chi-square: of all, of
    each leaf or band, round, client and step), its mean, and its independence (correlations of the
    values and of their sizes) across coordinates, clients, steps, rounds, runs and the points of a
    sweep that share a seed.  Repeats are looked for across all of them.

    Args:
        plan: a Plan with noise.  Of `with_replacement`, a client's first turn is tested.  To see
            the upload of each client alone, all of them run once for each: take few clients.
        rounds: of each run.
        runs: each with a key of its own.
        seed: of all runs.
        level: in (0, 1), at which noise as stated fails any of the tests: Holm's correction.

    Returns:
        A report; print it.

    Privacy:
        Sigma is the ledger's multiplier times how far the chain was seen to let one contribution
        move a release: a clip that the noise does not follow is found.

    Raises:
        NotAnalysable: for a plan without noise, or with noise that an algorithm adds in a way of
            its own.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(5))
        >>> task = jfl.models.logistic(fed)
        >>> noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(5))
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss))
        >>> plan = jfl.plan(fed, task, fedavg, jfl.sampling.full(5), release=noise)
        >>> noise_test(plan, runs=50).ok
        True
    """
    checks.require_type(WHERE, Plan, "jfl.plan", plan=plan)
    checks.require_integer(WHERE, rounds=rounds, runs=runs)
    checks.require_integer(WHERE, min_value=0, seed=seed)
    checks.require_fraction(WHERE, single=True, level=level)
    checks.require_positive(WHERE, single=True, level=level)
    results, samples = [], []
    for source in _sources(plan):
        z, groups = _noise(plan, source, rounds, runs, seed)
        samples.append(z.size)
        results += [(f"{source.name}: {name}", *rest) for name, *rest in _tests(z, groups)]
    adjusted = _holm([p for _, _, p, _ in results])
    tests = tuple(
        NoiseTest(name, float(statistic), float(p), float(a), found)
        for (name, statistic, p, found), a in zip(results, adjusted)
    )
    from scipy import stats  # slow: not at import

    need = stats.norm.isf(level / 2 / len(tests)) + stats.norm.isf(0.01)
    return NoiseReport(tests, level, sum(samples), float(need / math.sqrt(2 * min(samples))))


def _holm(p_values):
    """Holm's adjusted p-values: any below a level is an error with at most that probability."""
    order, found, worst = np.argsort(p_values), np.ones(len(p_values)), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        found[i] = worst
    return found


# --- where noise is added


class _Source(NamedTuple):
    name: str
    kind: str  # local | upload | release
    mechanism: Mechanism
    work: training.Work | None = None


def _sources(plan):
    is_work = lambda node: isinstance(node, training.Work)
    works = [w for w in jax.tree.leaves(plan.algorithm, is_leaf=is_work) if is_work(w)]
    noisy = []
    for work in works:  # init, client and server may hold the same one
        if mech.noisy(work.grad.mechanism) and not any(work is other for other in noisy):
            noisy.append(work)
    inside = [r for r in plan.algorithm.releases if mech.noisy(r.mechanism)]
    if any(r.steps for r in inside) or (inside and not noisy):
        raise NotAnalysable(
            f"{WHERE}: expected noise of local steps, uploads or the release, but got "
            "noise that the "
            f"client of {plan.algorithm.name!r} adds in its own way. Audit it: jfl.audit."
        )
    found = [_Source("local steps", "local", work.grad.mechanism, work) for work in noisy]
    if mech.noisy(plan.upload):
        found.append(_Source("uploads", "upload", plan.upload))
    if mech.noisy(plan.release):
        found.append(_Source("release", "release", plan.release))
    if not found:
        raise NotAnalysable(
            f"{WHERE}: expected a plan with noise, but got one without. Nothing is tested."
        )
    for source in found:
        others = [s.name for s in source.mechanism.stages if s.is_map or s.law == "laplace"]
        if others:
            raise NotAnalysable(
                f"{WHERE}: expected Gaussian noise of a contribution's own coordinates, but got "
                f"{', '.join(others)} in {source.name}. Audit it: jfl.audit."
            )
    return found


def _public(mechanism):
    """Without what follows the public divisor: other divisors and what is not linear."""
    stages = tuple(s for s in mechanism.stages if s.role != "post" or s.divisor == "number")
    return Mechanism(stages, mechanism.adjacency)


def _noise(plan, source, rounds, runs, seed):
    """What is released of zero contributions, in its stated deviations, Float64[runs, points,
    rounds, clients, steps, coordinates]; and the name of each coordinate's leaf or band."""
    params = _wide(jax.eval_shape(plan.task.init, jax.random.key(0)))
    like = params if source.kind == "local" else _wide(canaries.upload_shapes(plan))
    shape = mech.shape(source.mechanism)
    which, groups = _coordinates(shape, like)
    probe = _probe(plan, source, params, like, which, rounds)
    points = 1 if plan.paired_noise else 2  # of a sweep with one seed
    each = rounds * which.size * plan.sampler.clients * STEPS * points
    keys = jax.random.split(jax.random.key(seed), runs)
    observe = functools.partial(_observe, kind=source.kind, rounds=rounds, points=points)
    draw = lambda keys, probe: jax.lax.map(
        lambda key: observe(key, probe), keys, batch_size=min(runs, max(1, AT_ONCE // each))
    )
    seen, norms = jax.jit(draw)(keys, probe)
    stated = _stated(plan, source, like, rounds)
    z = np.asarray(seen, np.float64) / stated[:, :, None, None]
    if norms is not None:  # an adaptive clip norm, which the noise follows
        norms = np.asarray(norms, np.float64)
        first = float(mech.initial_state(source.mechanism))
        before = np.concatenate([np.full_like(norms[:, :, :1], first), norms[:, :, :-1]], axis=2)
        z = z / (before / first)[..., None, None, None]
    if shape is not None:
        scales = np.asarray(shape.scales, np.float64)
        z = z * scales[np.asarray(groups)]
        return z, np.asarray([f"band {b}" for b in groups])
    return z, np.asarray(groups)


def _wide(like):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), like)


def _coordinates(shape, like):
    """Int[d] of the flat release, or of its coefficients, that are looked at, and their groups."""
    if shape is None:
        sizes = [math.prod(x.shape) for x in jax.tree.leaves(like)]
        home = np.repeat(np.arange(len(sizes)), sizes)
    else:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), like)
        coefficients = jax.eval_shape(lambda: bands.analyse(shape.bands, zeros))
        ids = bands.ids(shape.bands)
        home = np.concatenate(
            [np.broadcast_to(i, c.shape).reshape(-1) for i, c in zip(ids, coefficients)]
        )
    drawn = np.random.default_rng(0)
    count = len(np.unique(home))
    chosen = [
        drawn.permutation(np.flatnonzero(home == g))[: max(4, COORDINATES // count)]
        for g in range(count)
    ]
    which = np.sort(np.concatenate(chosen))
    if shape is not None:  # a wavelet that reaches into padding is cut there, and less noisy

        def length(i):
            flat, parts = jnp.zeros(len(home)).at[i].set(1.0), []
            for c in coefficients:
                size = math.prod(c.shape)
                parts.append(flat[:size].reshape(c.shape))
                flat = flat[size:]
            return pytrees.norm(bands.synthesise(shape.bands, tuple(parts), zeros))

        whole = np.asarray(jax.lax.map(length, jnp.asarray(which))) > 1 - 1e-4
        which = which[whole]
        return which, home[which]
    return which, [f"leaf {i}" for i in home[which]]


def _stated(plan, source, like, rounds):
    """Float64[rounds, clients or 1], the deviation that the ledger states, after public divisors;
    of a shape, that of a coefficient whose scale is 1."""
    mechanism, released = source.mechanism, source.kind == "release"
    weight = lambda r: 1.0
    if released:
        of = lambda r: plan.weights(r) if isinstance(plan.weights, Fn) else plan.weights
        weight = lambda r: float(np.max(np.asarray(of(r))))
    multiplier = levels(mechanism, rounds, plan.sampler.clients, weight)
    sides = 2.0 if mechanism.adjacency == "replace_one" else 1.0
    every = range(rounds) if mech.scheduled(mechanism) else [0]
    far = [_distance(mech.at_round(mechanism, jnp.int32(r)), like) for r in every]
    scale = sides * np.array(far) / (mech.denominator(mechanism) or 1.0)
    weights = np.array([weight(r) for r in range(rounds)])
    return multiplier * (scale * np.ones(rounds) * weights)[:, None]


def _distance(mechanism, like):
    """How far one contribution moves the sum, in the norm of the noise: seen, not stated."""
    row, _, _ = canaries.worst(mechanism, like)
    stacked = jax.tree.map(lambda v: v[None], row)
    moved = mech.clip_and_sum(mechanism, mech.initial_state(mechanism), stacked, jnp.ones(1)).value
    shape = mech.shape(mechanism)
    if shape is None:
        return float(pytrees.norm(moved))
    return float(pytrees.norm(bands.scale(shape.bands, shape.scales, moved)))


# --- the program


class _Server(NamedTuple):
    params: object
    seen: object  # Float[rounds, d] of the release


def _probe(plan, source, params, like, which, rounds):
    """The plan with clients that contribute nothing and remember their noise."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    mechanism = _public(source.mechanism)
    clients, work = plan.sampler.clients, None
    changes = dict(upload=None, release=Mechanism((total(),), plan.release.adjacency))
    if source.kind == "local":
        grad = dataclasses.replace(
            source.work.grad,
            loss=Fn(canaries.nothing),
            mechanism=mechanism,
            l2=None,
            path="auto" if source.work.grad.path == "bookkeeping" else source.work.grad.path,
        )
        work = dataclasses.replace(
            source.work,
            grad=grad,
            optimizer=training.optimizer(optax.sgd),
            steps=min(source.work.steps, STEPS),
        )
    elif source.kind == "upload":
        changes["upload"] = mechanism
    else:
        changes["release"] = mechanism
    if source.kind != "release":
        changes |= dict(sampler=sampling.full(clients), chunk=min(plan.chunk, clients))
    index, rows, width = canaries.rows_of(plan.fed)
    data = dict(which=jnp.asarray(which), shape=mech.shape(mechanism))
    steps = 0 if work is None else work.steps
    algorithm = Algorithm(
        init=Fn(
            _init, dict(params=zeros(params)), dict(size=which.size, rounds=rounds, steps=steps)
        ),
        client=Fn(_client, dict(work=work, like=zeros(like), **data)),
        server=Fn(_server, dict(point=jnp.float32(0), **data)),
        params=Fn(_params),
        releases=plan.algorithm.releases,
        name="noise_test",
        stateful=work is not None,
    )
    return dataclasses.replace(
        plan,
        fed=canaries.federation(np.zeros(max(rows, 1), np.float32), index, width),
        task=Task(init=plan.task.init, loss=Fn(canaries.nothing)),
        algorithm=algorithm,
        **changes,
    )


def _observe(key, plan, *, kind, rounds, points):
    """One run -> what is seen [points, rounds, clients, steps, d], and clip norms [points,
    rounds] where they adapt."""

    def of_point(point):
        server = plan.algorithm.server
        server = Fn(server.function, server.data | dict(point=point), server.static)
        probe = dataclasses.replace(
            plan, algorithm=dataclasses.replace(plan.algorithm, server=server)
        )
        run = enter_plan(init(key, probe), identity.noise_identity(probe))
        noise = run_noise_key(run)
        go = lambda probe: scan_from(run, probe, jnp.ones(rounds, jnp.int32), noise)
        if kind == "upload":  # that of one client after another
            of_client = lambda w: go(dataclasses.replace(probe, weights=w))[0].server.seen
            return jnp.moveaxis(jax.vmap(of_client)(jnp.eye(plan.sampler.clients)), 0, 1)[
                :, :, None
            ], None
        run, metrics = go(probe)
        if kind == "local":
            return jnp.moveaxis(run.client_states, 0, 1), None
        return run.server.seen[:, None, None], metrics.clip_norm

    return jax.vmap(of_point)(jnp.arange(points, dtype=jnp.float32))


@named("noise_test.init")
def _init(_, *, params, size, rounds, steps):
    own = jnp.zeros((rounds, steps, size)) if steps else ()
    return _Server(params, jnp.zeros((rounds, size))), own


@named("noise_test.client")
def _client(context, keys, server, own, rows, *, work, like, which, shape):
    zero = jnp.zeros(())
    nothing = Diagnostics(zero, zero, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
    if work is None:
        return like, own, nothing

    def gradient(step):  # with this learning rate what is left of all steps is this one
        lr = Fn(_one_step, dict(step=step), dict(steps=work.steps))
        alone = dataclasses.replace(work, lr=lr)
        trained = training.train(alone, context, keys, server.params, rows)[0]
        return _looked_at(pytrees.scale(-1.0, trained), which, shape)

    every = jax.vmap(gradient)(jnp.arange(work.steps))
    return like, own.at[context.round].set(every), nothing


@named("noise_test.one_step")
def _one_step(clock, *, step, steps):
    return jnp.where(clock % steps == step, 1.0, 0.0)


@named("noise_test.server")
def _server(context, server, release, *, point, which, shape):
    seen = server.seen.at[context.round].set(_looked_at(release, which, shape))
    return server._replace(seen=seen)


@named("noise_test.params")
def _params(server):
    return server.params


def _looked_at(tree, which, shape):
    leaves = jax.tree.leaves(tree) if shape is None else bands.analyse(shape.bands, tree)
    flat = jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in leaves])
    # what the program does not release is 0, which no test passes
    return flat.at[which].get(mode="fill", fill_value=0.0)


# --- the tests, of numbers that are independent and standard normal if all is as stated


def _tests(z, groups):
    """Of Float64[runs, points, rounds, clients, steps, d]: name, statistic, p-value and words."""
    from scipy import stats  # slow: not at import

    if not np.all(np.isfinite(z)):
        yield "finite", float(np.sum(~np.isfinite(z))), 0.0, "a number is not finite"
        return
    found = stats.kstest(z.reshape(-1), "norm")
    yield (
        "law",
        found.statistic,
        found.pvalue,
        f"Kolmogorov-Smirnov {found.statistic:.4f} of normal",
    )
    mean = z.sum() / math.sqrt(z.size)
    yield "mean", mean, 2 * stats.norm.sf(abs(mean)), f"{mean:.3g} deviations from 0"
    squares = np.square(z)
    yield "variance", *_variance([squares.sum()], [z.size], ["all"])
    labels = np.unique(groups)
    sums = [squares[..., groups == g].sum() for g in labels]
    counts = [z[..., groups == g].size for g in labels]
    kind = "band" if labels[0].startswith("band") else "leaf"
    yield f"variance of each {kind}", *_variance(sums, counts, labels)
    for axis, name in list(enumerate(AXES))[1:5]:
        if (n := z.shape[axis]) > 1:
            sums = np.moveaxis(squares, axis, 0).reshape(n, -1).sum(1)
            labels = [f"{name} {i}" for i in range(n)]
            yield f"variance across {name}", *_variance(sums, [z.size // n] * n, labels)
    # sizes, made standard normal too: equal sizes with other signs are no correlation
    sizes = stats.norm.isf(np.clip(2 * stats.norm.sf(np.abs(z)), 1e-300, 1 - 1e-16))
    for axis, name in enumerate(AXES):
        if z.shape[axis] > 1:
            for what, values in (("", z), (" of sizes", sizes)):
                yield f"independence{what} across {name}", *_correlation(values, axis, name)
    yield "no repeats", *_repeats(z)


def _variance(sums, counts, labels):
    from scipy import stats

    sums, counts = np.asarray(sums, float), np.asarray(counts, float)
    p = 2 * np.minimum(stats.chi2.sf(sums, counts), stats.chi2.cdf(sums, counts))
    worst, ratio = int(np.argmin(p)), np.sqrt(sums / counts)
    words = f"{labels[worst]}: {ratio[worst]:.4g} of the sigma that is stated"
    return ratio[worst], min(1.0, len(p) * p[worst]), words


def _correlation(z, axis, name):
    """Two slices a, b of independent normals: a.b / |b| is standard normal whatever b is."""
    from scipy import stats

    slices = np.moveaxis(z, axis, 0).reshape(z.shape[axis], -1)
    count = len(slices)
    if count <= SOME:
        length = np.sqrt(np.square(slices).sum(1))
        t = (slices @ slices.T / np.maximum(length, 1e-300))[np.triu_indices(count, 1)]
        first, second = (i[int(np.argmax(np.abs(t)))] for i in np.triu_indices(count, 1))
        which, samples = f"{name} {first} and {second}", slices.shape[1]
    else:  # neighbours at a few distances; each slice is in one pair
        t = []
        for lag in range(1, LAGS + 1):
            left = np.flatnonzero((np.arange(count - lag) // lag) % 2 == 0)
            a, b = slices[left].reshape(-1), slices[left + lag].reshape(-1)
            t.append(a @ b / max(math.sqrt(b @ b), 1e-300))
        t = np.array(t)
        which, samples = f"{name} {int(np.argmax(np.abs(t))) + 1} apart", len(a)
    worst = float(t[np.argmax(np.abs(t))])
    words = f"{which}: correlation {worst / math.sqrt(samples):.3g}"
    return worst, min(1.0, len(t) * 2 * stats.norm.sf(abs(worst))), words


def _repeats(z):
    """Vectors of noise that occur twice, at whatever addresses."""
    depth = min(z.shape[-1], 8)
    rows = np.round(z.reshape(-1, z.shape[-1])[:, :depth] / GRAIN).astype(np.int64)
    repeats = len(rows) - len(np.unique(rows, axis=0))
    chance = (GRAIN / (2 * math.sqrt(math.pi))) ** depth  # that two normals round to one number
    p = 1.0 if not repeats else min(1.0, len(rows) * (len(rows) - 1) / 2 * chance)
    return repeats, p, f"{repeats} of {len(rows)} draws occur twice"
