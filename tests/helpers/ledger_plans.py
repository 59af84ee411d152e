"""Plans and sampled mechanisms whose epsilon the tests of the accountant compare."""

import jax.numpy as jnp
import numpy as np

from jfl import sampling
from jfl.core import pytrees, records
from jfl.privacy.accountants import events, rdp_events, tightest
from jfl.privacy.mechanisms.chain import chain
from jfl.privacy.mechanisms.stages import clip_l2, divide, gaussian, total
from jfl.sampling import batches

DELTA = 1e-5


def eps(event, delta=DELTA):
    """The Renyi bound (or the exact Gaussian) of an event, without loss distributions."""
    return rdp_events.epsilon(event, delta)[0]


def best(event, delta=DELTA):
    """The smallest of all bounds of an event, as `guarantee` takes it."""
    return tightest.epsilon(event, delta)[0]


def close(got, want, rel):
    np.testing.assert_allclose(np.asarray(got), want, rtol=rel)


def poisson(rate, z, times=1):
    return events.repeat(events.poisson(rate, events.gaussian(z)), times)


def fixed(rate, z, times=1, population=10**6):
    return events.repeat(
        events.without_replacement(round(rate * population), population, events.gaussian(z)), times
    )


CLIENTS = 20


NOISY = lambda z=1.0, adjacency="replace_one", **std: chain(
    clip_l2(0.5), total(), gaussian(**std) if std else gaussian(z), divide(8.0), adjacency=adjacency
)


PLAIN = chain(total(), divide(8.0), adjacency="replace_one")


BATCH = batches.without_replacement(10)


COHORT = sampling.without_replacement(CLIENTS, 5)


def make(
    rows=None,
    batch=BATCH,
    count=3,
    sampler=COHORT,
    upload=None,
    release=PLAIN,
    weights=None,
    sizes=None,
    stateful=False,
    paired=False,
    more=(),
):
    """A plan of records: the ledger looks at nothing else."""
    sizes = np.full(CLIENTS, 100) if sizes is None else np.asarray(sizes)
    fed = records.Federation(
        jnp.zeros((1, 1)),
        jnp.zeros(1, int),
        jnp.zeros((CLIENTS, 1), int),
        jnp.asarray(sizes),
        jnp.zeros((1, 1)),
        jnp.zeros(1, int),
        jnp.zeros((CLIENTS, 0), int),
        jnp.zeros(CLIENTS, int),
    )
    nothing, releases = records.Fn(abs), (records.Release(rows, batch, count), *more)
    client = records.Fn(pytrees.add, dict(held=releases))  # jfl's own, and holds what is declared
    alg = records.Algorithm(nothing, client, nothing, nothing, releases, stateful=stateful)
    return records.Plan(
        fed,
        records.Task(nothing, nothing),
        alg,
        sampler,
        upload,
        release,
        jnp.ones(CLIENTS) if weights is None else weights,
        paired_noise=paired,
    )


def poisson_plan(**changes):
    return make(**{"rows": NOISY(adjacency="add_remove"), "batch": batches.poisson(8.0)} | changes)
