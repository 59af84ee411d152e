"""Small plans whose programs are compiled: every algorithm, noise, cohort and batch, of a softmax
regression on seven clients."""

import functools

import jax
from helpers.problems import SIZES, make_algorithm, make_federation

import jfl

CLIENTS, STEPS, COHORT = len(SIZES), 4, 4


@functools.cache
def problem():
    """Federation, task, and the shapes of its parameters."""
    fed = make_federation(classes=3)
    task = jfl.models.logistic(fed)
    return fed, task, jax.eval_shape(task.init, jax.eval_shape(lambda: jax.random.key(0)))


def chain(clip=None, noise=None, divisor=None):
    """A private sum of gradients or uploads."""
    clip, noise = clip or jfl.clip_l2(0.8), noise or jfl.gaussian(1.1)
    after = () if divisor is None else (jfl.divide(divisor),)
    return jfl.chain(clip, jfl.total(), noise, *after)


def plan(name="fedavg", rows=None, batch=None, sampler=None, **sites):
    """Noise in every local step, if it is not on an upload or the release."""
    fed, task, _ = problem()
    grad = jfl.grad(task.loss)
    if not {"upload", "release"} & set(sites):
        grad = jfl.private_grad(task.loss, rows or chain(divisor=3))
    algorithm = make_algorithm(name, grad, steps=STEPS, batch=batch)
    sampler = sampler or jfl.sampling.without_replacement(CLIENTS, COHORT)
    return jfl.plan(fed, task, algorithm, sampler, **sites)


def shaped(make_bands):
    """Noise shaped by the bands of the model."""
    shape = jfl.wavelet.ellipsoid(make_bands(problem()[2]))
    noise = jfl.gaussian(1.1, shape=shape)
    return plan(rows=chain(jfl.wavelet.clip_ellipsoid(0.8, shape), noise, 3))


NOISES = {
    "gaussian": lambda: plan(),
    "key": lambda: plan(rows=chain(noise=jfl.gaussian(1.1, generator="key"), divisor=3)),
    "clipped": lambda: plan(rows=jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.divide(3))),
    "scheduled": lambda: plan(
        rows=chain(noise=jfl.gaussian(jfl.schedules.inverse_sqrt(1.1)), divisor=3)
    ),
    "per_layer": lambda: plan(rows=chain(jfl.clip_per_layer(0.8, layers=2), divisor=3)),
    "wavelet": lambda: shaped(jfl.bands.flat),
    "wavelet_per_layer": lambda: shaped(jfl.bands.per_layer),
    "upload": lambda: plan(upload=chain()),
    "release": lambda: plan(release=chain(divisor=COHORT)),
    "adaptive": lambda: plan(release=chain(jfl.clip_adaptive(0.8, COHORT), divisor=COHORT)),
}
SAMPLERS = dict(
    full=lambda: jfl.sampling.full(CLIENTS),
    without_replacement=lambda: jfl.sampling.without_replacement(CLIENTS, COHORT),
    with_replacement=lambda: jfl.sampling.with_replacement(CLIENTS, COHORT),
    poisson=lambda: jfl.sampling.poisson(CLIENTS, 0.5),
    first_responders=lambda: jfl.sampling.first_responders(CLIENTS, COHORT, latency_spread=3.0),
)
BATCHES = dict(
    full=lambda: jfl.batches.full(),
    without_replacement=lambda: jfl.batches.without_replacement(3),
    with_replacement=lambda: jfl.batches.with_replacement(3),
    poisson=lambda: jfl.batches.poisson(2.0, capacity=9),
    epochs=lambda: jfl.batches.epochs(3),
)
ALGORITHMS = tuple(f"algorithm {name}" for name in jfl.algorithms.__all__)
CASES = (
    {case: functools.partial(plan, case.split()[1]) for case in ALGORITHMS}
    | {f"noise {name}": make for name, make in NOISES.items()}
    | {f"cohort {name}": lambda make=make: plan(sampler=make()) for name, make in SAMPLERS.items()}
    | {"cohort poisson in chunks": lambda: plan(sampler=SAMPLERS["poisson"](), chunk=2)}
    | {f"batch {name}": lambda make=make: plan(batch=make()) for name, make in BATCHES.items()}
)
