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
from jfl.engine.round import advance, run_noise_key

from .problems import CLIENTS

ROUNDS = 3


def by_round(round_):
    """Client-level weights that move with the round."""
    return 1.0 + jnp.arange(CLIENTS) * (1.0 + round_)


def falling(step):
    return 0.2 / (1.0 + 0.5 * step)


LEVELS = (0.5, 1.1, 2.0, 0.8, 1.4, 0.6, 1.0)  # a noise multiplier for each client


BLOCK = 64  # addresses that one program draws at, so that few programs are compiled


def cohorts(key, sampler):
    draw = jax.jit(lambda r: sampler.draw(stream_key(key, Stream.COHORT, r)))
    return jax.tree.map(lambda *rounds: np.stack(rounds), *map(draw, range(ROUNDS)))


def at_each(draw, addresses, *more):
    """What `draw` gives at addresses [..., 4], in blocks of one shape."""
    flat = addresses.reshape(-1, 4)
    blocks = [
        draw(np.resize(flat[at : at + BLOCK], (BLOCK, 4)), *more)
        for at in range(0, len(flat), BLOCK)
    ]
    shaped = lambda v: v[: len(flat)].reshape(*addresses.shape[:-1], *v.shape[1:])
    return jax.tree.map(lambda *parts: shaped(np.concatenate(parts)), *blocks)


@functools.partial(jax.jit, static_argnames="slots")
def batches_at(addresses, key, batches, sizes, slots):
    """Slots and mask of the batch at each address (round, client, turn, step)."""

    def draw(address):
        round_, id_, turn, step = address
        own = jax.random.fold_in(stream_key(key, Stream.BATCH, round_), id_)
        size = sizes.at[id_].get(mode="fill", fill_value=0)
        return batches.draw(jax.random.fold_in(own, turn), step, size, slots)[:2]

    return jax.vmap(draw)(addresses)


@jax.jit
def normals_at(addresses, noise, stream):
    """Nine normals at each address (round, client, turn, step), of which -1 leaves a part out.

    They are those of two trees of start_params and a number, leaves in tree order.
    """
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((), (3,), (), (3,), ())]

    def draw(address):
        key = jax.random.fold_in(noise, stream)
        for part in address:
            key = jnp.where(part < 0, key, jax.random.fold_in(key, part))
        return jnp.concatenate([jnp.ravel(x) for x in normals(key, like)])

    return jax.vmap(draw)(addresses)


def draws(key, noise, plan, batches, steps):
    """Everything random of a run, from the addresses (seed, round, stream, client, turn, step).

    Normals are rows [rounds, clients, steps, 9]; once, without a step, and uploads [rounds,
    clients, 9]; releases [rounds, 9].
    """
    cohort = cohorts(key, plan.sampler)
    of_client = (
        np.arange(ROUNDS)[:, None, None],
        cohort.ids[..., None],
        cohort.repeat_index[..., None],
    )
    each = np.stack(np.broadcast_arrays(*of_client, np.arange(steps)), -1)
    client, round_ = each[:, :, 0].copy(), each[:, 0, 0].copy()
    client[..., 3:], round_[..., 1:] = -1, -1
    at, mask = at_each(batches_at, each, key, batches, plan.fed.size, plan.fed.index.shape[1])
    return dict(
        ids=cohort.ids,
        turn=cohort.repeat_index,
        count=cohort.times_drawn,
        slots=at,
        mask=mask,
        rows=at_each(normals_at, each, noise, Stream.ROWS),
        once=at_each(normals_at, client, noise, Stream.ROWS),
        upload=at_each(normals_at, client, noise, Stream.UPLOAD),
        release=at_each(normals_at, round_, noise, Stream.RELEASE),
    )


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
        return (sum(clip(g, bound) for g in each) + std * self.d["rows"][r, k, s, :4]) / divisor


def drawn_and_run(plan, steps):
    """(what was drawn, the run) of a plan; `steps` are the draws of a client."""
    key = jax.random.key(8)
    run = jfl.init(key, plan)
    noise = run_noise_key(run)
    d = draws(key, noise, plan, plan.algorithm.releases[0].batches, steps)
    for _ in range(ROUNDS):  # compiles faster than jfl.scan, which tests/contracts compares with it
        run, _ = one_round(run, plan, noise)
    return d, run


one_round = jax.jit(advance)
