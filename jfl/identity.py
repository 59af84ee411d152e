"""The identity of a plan: what its noise follows from, as 128 bits."""
import dataclasses
import hashlib

import jax
import numpy as np

from .core import Batches, Fn, Plan
from .keys import bits_once, structure, together


def words(plan: Plan) -> np.ndarray:
    """UInt32[4]: what runs, its hyperparameters and its data.

    Capacities, chunks, padding and gradient paths do not count.  Plans of one seed whose words differ have independent
    noise.

    Args:
        plan: concrete, on the host.
    """
    sampler = dataclasses.replace(plan.sampler, draw=Fn(plan.sampler.draw.function), capacity=0)
    algorithm = jax.tree.map(_as_computed, plan.algorithm, is_leaf=lambda n: isinstance(n, Batches) or hasattr(n, "microbatch"))
    parts = plan.task, algorithm, sampler, plan.upload, plan.release, plan.weights
    digests = [np.asarray(d) for d in (*together(jax.tree.leaves(parts)), *_data(plan.fed))]
    text = structure(parts).encode() + b"\0".join(d.tobytes() for d in digests)
    return np.frombuffer(hashlib.sha256(text).digest()[:16], np.uint32)


def _data(fed):
    if fed.host is not None:
        return [fed.host.digest]
    index, size = np.asarray(fed.index), np.asarray(fed.size)
    owned = index[np.arange(index.shape[-1]) < size[:, None]]
    return [bits_once(fed.x), bits_once(fed.y), owned, size]


def _as_computed(node):
    """A node without what only says how it is stored or computed."""
    if hasattr(node, "microbatch"):
        return dataclasses.replace(node, microbatch=None, path="auto")
    if isinstance(node, Batches) and node.scheme == "poisson":
        return dataclasses.replace(node, draw=Fn(node.draw.function, node.draw.data), batch=None)
    return node
