"""Small plans whose programs are compiled: every algorithm, noise, cohort and batch, of a softmax
regression on seven clients; and convolutions, on images."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
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


def pictures():
    """The same clients, with images for rows."""
    fed, _, _ = problem()
    images = lambda x: jnp.broadcast_to(x[:, :1, None], (x.shape[0], 8, 6))
    return dataclasses.replace(fed, x=images(fed.x), x_test=images(fed.x_test))


def of_another_library(fed):
    """A user's own convolutions."""
    layers = [nn.Conv(4, (3, 3)), nn.relu, nn.Conv(6, (3, 3), strides=2), jnp.ravel, nn.Dense(3)]
    return jfl.models.flax(fed, nn.Sequential([lambda x: x[..., None], *layers]))


def plan(name="fedavg", rows=None, batch=None, sampler=None, model=None, **sites):
    """Noise in every local step, if it is not on an upload or the release.

    Args:
        model: images -> a task, in place of softmax regression.
    """
    fed, task, _ = problem()
    if model is not None:
        fed = pictures()
        task = model(fed)
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


def correlated(strategy):
    """Noise of the release that is correlated over rounds."""
    return plan(release=chain(noise=jfl.correlated(1.1, strategy), divisor=COHORT))


def integers():
    """Uploads as integers, of which each client adds a share of the noise."""
    pair = jfl.distributed(1.1, 0.8, COHORT, law="skellam", like=problem()[1], bits=12)
    return plan(upload=pair.upload, release=pair.release)


NOISES = {
    "gaussian": lambda: plan(),
    "key": lambda: plan(rows=chain(noise=jfl.gaussian(1.1, generator="key"), divisor=3)),
    "clipped": lambda: plan(rows=jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.divide(3))),
    "scheduled": lambda: plan(
        rows=chain(noise=jfl.gaussian(jfl.schedules.inverse_sqrt(1.1)), divisor=3)
    ),
    "per_layer": lambda: plan(rows=chain(jfl.clip_per_layer([0.8] * 2), divisor=3)),
    "wavelet": lambda: shaped(jfl.bands.flat),
    "wavelet_per_layer": lambda: shaped(jfl.bands.per_layer),
    "upload": lambda: plan(upload=chain()),
    "release": lambda: plan(release=chain(divisor=COHORT)),
    "integers": lambda: integers(),
    "scaled": lambda: plan(
        release=chain(jfl.clip_scaled(0.8, COHORT, like=problem()[1]), divisor=COHORT)
    ),
    "adaptive": lambda: plan(release=chain(jfl.clip_adaptive(0.8, COHORT), divisor=COHORT)),
    "correlated, drawn again": lambda: correlated(jfl.strategies.inverse_banded(20, 4)),
    "correlated, bands held": lambda: correlated(jfl.strategies.banded_toeplitz(20, 4)),
    "correlated, sums held": lambda: correlated(jfl.strategies.blt(20, 2)),
    "correlated, uploads": lambda: plan(
        upload=chain(noise=jfl.correlated(1.1, jfl.strategies.inverse_banded(20, 4)))
    ),
    "correlated, tree": lambda: correlated(jfl.strategies.tree(20)),
}
SAMPLERS = dict(
    full=lambda: jfl.sampling.full(CLIENTS),
    without_replacement=lambda: jfl.sampling.without_replacement(CLIENTS, COHORT),
    with_replacement=lambda: jfl.sampling.with_replacement(CLIENTS, COHORT),
    poisson=lambda: jfl.sampling.poisson(CLIENTS, 0.5),
    available_poisson=lambda: jfl.sampling.available_poisson(CLIENTS, 0.9, period=4, awake=0.5),
    truncated_poisson=lambda: jfl.sampling.truncated_poisson(CLIENTS, 0.5, 4),
    first_responders=lambda: jfl.sampling.first_responders(CLIENTS, COHORT, latency_spread=3.0),
    random_allocation=lambda: jfl.sampling.random_allocation(CLIENTS, 2, capacity=CLIENTS),
    balls_in_bins=lambda: jfl.sampling.balls_in_bins(CLIENTS, 2, capacity=CLIENTS),
    min_separation=lambda: jfl.sampling.min_separation(CLIENTS, 3, 2),
    cyclic_poisson=lambda: jfl.sampling.cyclic_poisson(CLIENTS, 0.9, 2, capacity=CLIENTS),
)
BATCHES = dict(
    full=lambda: jfl.batches.full(),
    without_replacement=lambda: jfl.batches.without_replacement(3),
    with_replacement=lambda: jfl.batches.with_replacement(3),
    poisson=lambda: jfl.batches.poisson(2.0, capacity=9),
    truncated_poisson=lambda: jfl.batches.truncated_poisson(2.0, 4),
    epochs=lambda: jfl.batches.epochs(3),
)
small_cnn = functools.partial(jfl.models.cnn, channels=(4, 6), dense=5)
MODELS = dict(
    cnn=lambda: plan(model=small_cnn),
    cnn_of_clients=lambda: plan(
        model=small_cnn, batch=jfl.batches.epochs(3), release=chain(divisor=COHORT)
    ),
    cnn_of_single_rows=lambda: plan(
        model=small_cnn, batch=jfl.batches.epochs(1), release=chain(divisor=COHORT)
    ),
    convolutions_of_flax=lambda: plan(
        model=of_another_library, batch=jfl.batches.epochs(3), release=chain(divisor=COHORT)
    ),
)
ALGORITHMS = tuple(f"algorithm {name}" for name in jfl.algorithms.__all__)
CASES = (
    {case: functools.partial(plan, case.split()[1]) for case in ALGORITHMS}
    | {f"noise {name}": make for name, make in NOISES.items()}
    | {f"model {name}": make for name, make in MODELS.items()}
    | {f"cohort {name}": lambda make=make: plan(sampler=make()) for name, make in SAMPLERS.items()}
    | {"cohort poisson in chunks": lambda: plan(sampler=SAMPLERS["poisson"](), chunk=2)}
    | {f"batch {name}": lambda make=make: plan(batch=make()) for name, make in BATCHES.items()}
)
