"""DiceSGD for clients instead of examples: error feedback removes the bias of clipping.

References:
    Zhang et al., "Differentially private SGD without clipping bias: an error-feedback approach",
    ICLR 2024.
"""

import jax.numpy as jnp

from ..core import checks, pytrees
from ..core.options import extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from ..privacy.mechanisms.stages import scale_to_bound
from .base import Number, scalars, train_difference, variant
from .fedavg import fedavg


@named("dicesgd.init")
def _init(params, *, step):
    return step.init(params), pytrees.zeros_like(params)


@named("dicesgd.client")
def _client(context, keys, server, client_state, rows, *, work, upload_norm, feedback_norm):
    diff, diagnostics = train_difference(work, context, keys, server.params, rows)
    sent = pytrees.add(
        scale_to_bound(upload_norm, diff)[0], scale_to_bound(feedback_norm, client_state)[0]
    )
    kept = pytrees.sub(pytrees.add(client_state, diff), sent)
    # A difference that is not finite counts as zero and is not kept.
    is_finite = pytrees.all_finite(kept)
    kept = pytrees.map(lambda new, old: jnp.where(is_finite, new, old), kept, client_state)
    return sent, kept, diagnostics


@extends(fedavg)
def dicesgd(
    grad: Grad, *, upload_norm: Number = 1.0, feedback_norm: Number = 1.0, **fedavg_options
) -> Algorithm:
    """Return FedAvg with error feedback: clients later upload what clipping removed.

    The client state is the sum of all parts that clipping has removed. A client uploads its clipped
    model difference plus its clipped state, and subtracts from the state what it uploaded. If the
    states stay bounded, the mean of all uploads converges to the mean of the differences; with
    clipping alone, it is biased if clients differ.

    Args:
        grad: gradient of the loss, as in `fedavg`.
        upload_norm: clip norm of the model difference, C1 in the paper.
        feedback_norm: clip norm of the client state, C2 in the paper. If it is smaller than
            upload_norm, the state may grow without bound.

    Privacy:
        An upload has a norm of at most `upload_norm + feedback_norm`. For client-level privacy, put
        `clip_l2` with this norm into `release`: it changes no upload, but tells the accountant the
        bound. With a private gradient, uploads and client states are computed from noisy gradients,
        so they are post-processing.

    References:
        Zhang et al., ICLR 2024, Algorithm 1, which keeps a single error for all examples on the
        server. Seide et al. (2014) introduced a separate error for each client, and Khirirat et
        al. (2023, Clip21) combined such errors with clipping.

    Example:
        >>> import jfl
        >>> dicesgd(jfl.grad(lambda w, x, y: (x @ w - y) ** 2), upload_norm=0.1).stateful
        True
    """
    norms = dict(upload_norm=upload_norm, feedback_norm=feedback_norm)
    client = Fn(_client, scalars(checks.require_positive, "dicesgd", **norms))
    base = fedavg(grad, **fedavg_options)
    return variant(base, "dicesgd", init=Fn(_init), client=client, stateful=True)
