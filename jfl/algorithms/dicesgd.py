"""DiceSGD (Zhang et al., ICLR 2024) with clients in the place of examples: what clipping cuts off
is sent later, so that clipping has no bias."""

import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from ..privacy.mechanisms.stages import scale_to_bound
from .base import Number, algorithm
from .fedavg import fedavg


@named("dicesgd.init")
def _init(params, *, step):
    return step.init(params), pytrees.zeros_like(params)


@named("dicesgd.client")
def _client(context, keys, server, client_state, rows, *, work, upload_norm, feedback_norm):
    trained, _, _, diagnostics = local.train(work, context, keys, server.params, rows)
    diff = pytrees.sub(trained, server.params)
    sent = pytrees.add(
        scale_to_bound(upload_norm, diff)[0], scale_to_bound(feedback_norm, client_state)[0]
    )
    kept = pytrees.sub(pytrees.add(client_state, diff), sent)
    # a difference that is not finite counts as zero, and is not kept either
    is_finite = pytrees.all_finite(kept)
    kept = pytrees.map(lambda new, old: jnp.where(is_finite, new, old), kept, client_state)
    return sent, kept, diagnostics


@extends(fedavg)
def dicesgd(
    grad: Grad, *, upload_norm: Number = 1.0, feedback_norm: Number = 1.0, **fedavg_options
) -> Algorithm:
    """FedAvg whose clients clip their difference, keep what was cut off, and send a clipped part of
    all that they kept beside the next difference.

    Where the cut-off parts stay bounded, the mean of what is sent is in the long run that of the
    differences.  A clip alone ends elsewhere, where clients differ.

    Args:
        grad: gradients of the loss, as in `fedavg`.
        upload_norm: C1, to which a client clips its difference.
        feedback_norm: C2, to which it clips what it kept; at least C1, or what is kept grows.

    Privacy:
        client level: an upload is no longer than upload_norm + feedback_norm.  Put
        clip_l2(upload_norm + feedback_norm) on the release: it then cuts nothing off, and bounds
        the upload whatever the client does.  What a client keeps follows from its own rows and
        leaves it only in uploads.  Record level: what is kept follows from noisy gradients, and
        costs nothing.

    References:
        Zhang et al., ICLR 2024, Algorithm 1, where the server keeps one error for all examples: a
        sum over all rows that no release covers, to which this has no counterpart.  Errors of
        clients: Seide et al., 2014; with clipping, Khirirat et al., 2023 (Clip21).

    Example:
        >>> import jfl
        >>> dicesgd(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), upload_norm=0.1).stateful
        True
    """
    checks.require_positive("dicesgd", single=True, upload_norm=upload_norm)
    checks.require_positive("dicesgd", single=True, feedback_norm=feedback_norm)
    base = fedavg(grad, **fedavg_options)
    norms = dict(
        upload_norm=checks.as_scalar(upload_norm), feedback_norm=checks.as_scalar(feedback_norm)
    )
    return algorithm(
        Fn(_init, base.server.data),
        Fn(_client, dict(base.client.data, **norms)),
        base.server,
        releases=base.releases,
        name="dicesgd",
        stateful=True,
    )
