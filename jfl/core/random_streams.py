"""Named random streams: a draw is addressed by (seed, round, stream, client, step), never threaded.

So slot order, capacity, chunk size, evaluation and resume cannot change a draw.  Noise keys also
fold in the identity of the plan that runs, so that two points of a sweep that share a seed share
cohorts and batches but never noise: their difference would be free of it.
"""

import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from . import hashing
from .aliases import Key, Words
from .threefry import as_kernel_key


class Stream(enum.IntEnum):
    """Append, never renumber: a number is part of every recorded result."""

    INIT = 0
    COHORT = 1
    BATCH = 2
    ROWS = 3  # noise of local steps
    UPLOAD = 4  # noise of a client's upload
    RELEASE = 5  # noise of the server's release
    ATTEMPT = 6  # cohorts and batches of a later attempt


def stream_key(key: Key, name: Stream, round_: ArrayLike) -> Key:
    return jax.random.fold_in(jax.random.fold_in(key, name), round_)


def stream_keys(key: Key, names: Sequence[Stream], round_: ArrayLike) -> Key:
    """One key of each stream, [len(names)]; together, since on a CPU a generator costs by the call,
    not by the key."""
    return jax.vmap(lambda name: stream_key(key, name, round_))(jnp.array(names, jnp.int32))


def noise_seed_words(identity: Words, history: Words, attempt: Any) -> Words:
    """UInt32[4] from which, with its key, all noise of a run follows.

    Args:
        identity: UInt32[4], of the plan that runs (see identity.py).
        history: UInt32[4], of the plans before it.
        attempt: Int[]; another one has other noise.
    """
    return hashing.combine(hashing.combine(history, identity), hashing.hash_int(attempt))


def derive_noise_key(key: Key, words: Words) -> Key:
    """The key all noise of a run descends from: of its own key and noise_words."""
    return jax.random.fold_in(jax.random.fold_in(as_kernel_key(key), words[0]), words[1])
