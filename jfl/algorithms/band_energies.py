"""A private estimate of how the energy of per-example gradients is distributed over wavelet bands.

`wavelet.ellipsoid` computes a shape of noise from the estimate.
"""

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
from ..sampling.batches import draw_slots, full, gather
from .base import Rate, algorithm


@record
class State:
    """The server's state."""

    params: Any  # constant, since nothing is trained
    energies: Any  # Float[bands], mean fraction of energy in each band over the rounds so far


@named("band_energies.init")
def _init(params, *, bands):
    return State(params, jnp.zeros(count(bands))), ()


@named("band_energies.client")
def _client(context, keys, server, client_state, rows, *, grad, batch):
    slots, mask, overflow = draw_slots(
        batch, keys.batch, jnp.int32(0), rows.size, rows.index.shape[0]
    )
    grad = dataclasses.replace(grad, mechanism=mech.at_round(grad.mechanism, context.round))
    shares, diagnostics = grad.with_diagnostics(
        keys.noise, server.params, gather(rows, slots, mask), context
    )
    return shares, client_state, diagnostics._replace(overflow=overflow)


@named("band_energies.server")
def _server(context, server, shares):
    num_rounds = context.round.astype(jnp.float32)
    return State(server.params, (num_rounds * server.energies + shares) / (num_rounds + 1))


def band_energies(
    loss: Callable,
    bands: Bands,
    *,
    noise_multiplier: Rate,
    batch: Batches = full(),
) -> Algorithm:
    """Return an algorithm that estimates the fraction of gradient energy in each wavelet band.

    The energy of a gradient in a band is the squared norm of its wavelet coefficients in that band.
    An example contributes the fraction of its gradient's energy in each band. These fractions are
    nonnegative and sum to 1, so the contribution has a norm of at most 1.

    The algorithm trains nothing. The estimate is in `out.run.server.energies`, where `out` is the
    result of `jfl.simulate`. Noise may make entries slightly negative, so pass
    jnp.maximum(energies, 0) to `wavelet.ellipsoid`.

    Args:
        loss: any pure function (params, x, y) -> scalar of one example.
        bands: the bands of the parameters, from `jfl.bands`.
        noise_multiplier: standard deviation of the noise divided by the sensitivity of the sum.
        batch: the sampler of the rows that a client uses.

    Privacy:
        Each participation is one release. Run the estimate as a separate plan, with a seed that
        differs from that of training. jfl.guarantee([(estimate, 1), (training, rounds)], delta=...,
        seeds="different") returns the guarantee for both plans together.
    """
    if not isinstance(bands, Bands):
        checks.fail("band_energies", "bands of jfl.bands", checks.short_repr(bands))
    # The sum over rows is divided by the number of rows of a batch; if a batch is all rows of the
    # client, by the client's number of rows.
    if batch.scheme != "poisson" and batch.batch:
        divisor = batch.batch
    else:
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
