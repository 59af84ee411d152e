"""Pieces of the NumPy loops that algorithms are compared with: what is drawn, clipping, gradients.

The loops take from jfl only what is drawn (cohorts, batch slots, standard normals), at the
documented addresses.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jfl.kernels.normals import normals

import jfl
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key

from .problems import CLIENTS

ROUNDS = 3


def by_round(round_):
    """Client-level weights that move with the round."""
    return 1.0 + jnp.arange(CLIENTS) * (1.0 + round_)


def falling(step):
    return 0.2 / (1.0 + 0.5 * step)


LEVELS = (0.5, 1.1, 2.0, 0.8, 1.4, 0.6, 1.0)  # a noise multiplier for each client


def each_round(draw, *of_round):
    return jax.vmap(draw)(jnp.arange(ROUNDS), *of_round)


def address(base, id_, turn):
    return jax.random.fold_in(jax.random.fold_in(base, id_), turn)


@jax.jit
def cohorts(key, sampler):
    return each_round(lambda r: sampler.draw(stream_key(key, Stream.COHORT, r)))


@functools.partial(jax.jit, static_argnames=("slots", "steps"))
def batches_of(key, batches, sizes, ids, turn, slots, steps):
    """Slots and mask of each step of each client of each round."""

    def slot(r, id_, turn):
        own = address(stream_key(key, Stream.BATCH, r), id_, turn)
        size = sizes.at[id_].get(mode="fill", fill_value=0)
        return jax.vmap(lambda s: batches.draw(own, s, size, slots)[:2])(jnp.arange(steps))

    return each_round(
        lambda r, ids, turn: jax.vmap(functools.partial(slot, r))(ids, turn), ids, turn
    )


@functools.partial(jax.jit, static_argnames=("steps", "dim"))
def normals_of(noise, ids, turn, steps, dim):
    """Standard normals: rows [rounds, clients, steps, 4], uploads [rounds, clients, dim], releases
    [rounds, dim + 1]."""
    normal = lambda k, n: normals(k, jnp.zeros(n))  # one flat vector, leaves in tree order

    def slot(r, id_, turn):
        rows_key = address(stream_key(noise, Stream.ROWS, r), id_, turn)
        rows = jax.vmap(lambda s: normal(jax.random.fold_in(rows_key, s), 4))(jnp.arange(steps))
        return rows, normal(address(stream_key(noise, Stream.UPLOAD, r), id_, turn), dim)

    def one_round(r, ids, turn):
        return *jax.vmap(functools.partial(slot, r))(ids, turn), normal(
            stream_key(noise, Stream.RELEASE, r), dim + 1
        )

    return each_round(one_round, ids, turn)


def draws(key, noise, plan, batches, steps, dim):
    """Everything random of a run, from the addresses (seed, round, stream, client, turn, step)."""
    cohort = cohorts(key, plan.sampler)
    at, mask = batches_of(
        key,
        batches,
        plan.fed.size,
        cohort.ids,
        cohort.repeat_index,
        slots=plan.fed.index.shape[1],
        steps=steps,
    )
    rows, upload, release = normals_of(noise, cohort.ids, cohort.repeat_index, steps=steps, dim=dim)
    return dict(
        ids=cohort.ids,
        turn=cohort.repeat_index,
        count=cohort.times_drawn,
        slots=at,
        mask=mask,
        rows=rows,
        upload=upload,
        release=release,
    )


@jax.jit
def once_a_round(noise, ids, turn):
    """The normals at the address of (round, client), without a step: [rounds, clients, 4]."""

    def one(r, ids, turn):
        base = stream_key(noise, Stream.ROWS, r)
        return jax.vmap(lambda i, turn: normals(address(base, i, turn), jnp.zeros(4)))(ids, turn)

    return each_round(one, ids, turn)


def clip(v, bound):
    return v * min(1.0, bound / np.linalg.norm(v)) if np.any(v) else v


def example_gradient(w, x, y):
    return (w[0] + x @ w[1:] - y) * np.concatenate([[1.0], x])


class Loop:
    """What the loops share: who came, the rows of a batch, and its gradient.

    Args:
        fed: the federation.
        d: what was drawn.
        private: (clip norm, deviation of the noise on the sum, divisor) of noisy gradients; None
            for mean gradients.
    """

    def __init__(self, fed, d, private=None):
        self.x, self.y = np.asarray(fed.x, np.float64), np.asarray(fed.y, np.float64)
        self.index, self.d, self.private = np.asarray(fed.index), d, private

    def cohorts(self):
        """Each round, and the places in its cohort that are taken: (place, client, times)."""
        for r in range(ROUNDS):
            places = enumerate(zip(self.d["ids"][r], self.d["count"][r]))
            yield r, [(k, int(i), int(count)) for k, (i, count) in places if count > 0]

    def rows(self, r, k, i, s):
        at = self.index[i][self.d["slots"][r, k, s][self.d["mask"][r, k, s]]]
        return self.x[at], self.y[at]

    def gradient(self, r, k, i, s, w, noisy=True):
        each = [example_gradient(w, a, b) for a, b in zip(*self.rows(r, k, i, s))]
        if self.private is None or not noisy:
            return sum(each) / len(each)
        bound, std, divisor = self.private
        return (sum(clip(g, bound) for g in each) + std * self.d["rows"][r, k, s]) / divisor


@jax.jit
def run_jfl(key, plan):
    """(the key of its noise, the run) of jfl."""
    begun = jfl.init(key, plan)
    return run_noise_key(begun), jfl.scan(begun, plan, [ROUNDS])[0]


def drawn_and_run(plan, steps, dim=4):
    """(what was drawn, its noise key, the run) of a plan; `steps` are the draws of a client."""
    key = jax.random.key(8)
    noise, run = run_jfl(key, plan)
    d = draws(key, noise, plan, plan.algorithm.releases[0].batches, steps, dim)
    return jax.tree.map(np.asarray, d), noise, run
