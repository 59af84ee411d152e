"""A private look at which bands hold the energy of per-example gradients, to choose the shape of
the noise by."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .. import local
from ..core import checks
from ..core.records import Algorithm, Batches, Fn, named, record
from ..gradients import per_example
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import wavelet
from ..privacy.mechanisms.chain import chain
from ..privacy.mechanisms.haar_bands import Bands, count
from ..privacy.mechanisms.stages import divide, gaussian, total
from ..sampling.batches import drawn, full, gather
from .base import Number, Rate, algorithm


@record
class State:
    params: Any  # as they were: nothing is trained
    energies: Any  # Float[bands], the mean share of each band, of the rounds so far


@named("band_energies.init")
def _init(params, *, bands):
    return State(params, jnp.zeros(count(bands))), ()


@named("band_energies.client")
def _client(context, keys, server, client_state, rows, *, grad, batch):
    slots, mask, overflow = drawn(batch, keys.batch, jnp.int32(0), rows.size, rows.index.shape[0])
    grad = dataclasses.replace(grad, mechanism=mech.at_round(grad.mechanism, context.round))
    shares, diagnostics = grad.watched(
        keys.noise, server.params, gather(rows, slots, mask), context
    )
    return shares, client_state, diagnostics._replace(overflow=overflow)


@named("band_energies.server")
def _server(context, server, shares):
    done = context.round.astype(jnp.float32)
    return State(server.params, (done * server.energies + shares) / (done + 1))


def band_energies(
    loss: Callable,
    bands: Bands,
    *,
    noise_multiplier: Rate,
    batch: Batches = full(),
    divisor: Number | str | None = None,
) -> Algorithm:
    """One round estimates the mean share of each band in an example's gradient energy, with noise.

    An example contributes its shares, which are >= 0 and add up to 1, so their length is at most 1
    whatever the gradient.  Nothing is trained.  `out.run.server.energies` may be a little negative;
    for `wavelet.ellipsoid` take jnp.maximum(energies, 0).

    Args:
        loss: any pure (params, x, y) -> scalar for one example.
        bands: of `jfl.bands`, for the parameters.
        noise_multiplier: standard deviation of the noise over the sensitivity of the sum of shares.
        batch: which rows a client looks at.
        divisor: what the sum of shares is divided by: a public number, or "size", the client's own
            rows.  None: the rows of a batch; "size" where a batch is all rows.

    Privacy:
        one release an example and round.  It is a plan of its own, and a run of its own with a seed
        of its own: both together have jfl.guarantee([(estimate, 1), (training, rounds)],
        delta=..., seeds="different").
    """
    if not isinstance(bands, Bands):
        checks.fail("band_energies", "bands of jfl.bands", f"{bands!r}")
    if divisor is None and batch.scheme != "poisson" and batch.batch:
        divisor = batch.batch
    elif divisor is None:
        divisor = "size" if batch.expected is None else float(batch.expected)
    mechanism = chain(wavelet.shares(bands), total(), gaussian(noise_multiplier), divide(divisor))
    grad = per_example.private_grad(loss, mechanism)
    return algorithm(
        Fn(_init, dict(bands=bands)),
        Fn(_client, dict(grad=grad, batch=batch)),
        _server,
        releases=local.work(grad, batch, lr=1.0, steps=1).releases(),
        name="band_energies",
    )
