"""DPNFL (Chen et al., IEEE TKDE 2024, Algorithm 1): FedAvg with clipping and noise in every local
step."""

import dataclasses

from ..core.options import extends
from ..core.records import Algorithm
from ..gradients.per_example import Grad
from .fedavg import fedavg


@extends(fedavg)
def dpnfl(grad: Grad, **fedavg_options) -> Algorithm:
    """FedAvg with clipping and noise in every local step: `fedavg` under the paper's name, and its
    aggregations.

    For noise of standard deviation sigma on the mean gradient of B rows, `grad` is
    private_grad(loss, chain(clip_l2(G), total(), gaussian(std=B * sigma), divide(B))); a chain
    without a clip proves nothing, though the paper prints none.  With p_i = n_i / sum n_j, n
    clients and r of them a round, the plan says how to aggregate:

    - uniform: sampling.without_replacement(n, r), weights="size".  It gives w + (n / r) sum
      p_i diff_i, unbiased.
    - multinomial: sampling.with_replacement(n, r, weights=fed.size), weights="size".  It gives
      w + (1 / r) sum diff_i, where a client drawn m times counts m times; unbiased.
    - biased FedAvg: as uniform, with server_lr = r / n.  It gives w + sum p_i diff_i, the same path
      in smaller steps.
    - normalised FedAvg: as uniform, with release=chain(total(), divide("weight")).  It gives
      w + sum p_i diff_i / sum p_i, biased where the p_i differ.
    - first responders: sampling.first_responders(n, r, latency), weights="size".  As uniform, but
      biased to fast clients.

    It releases `steps` noisy gradients a participation, and the difference of models that follows
    from them.

    >>> import jfl
    >>> chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=10 * 0.5), jfl.divide(10))
    >>> grad = jfl.private_grad(lambda w, x, y: (x @ w - y) ** 2, chain)
    >>> dpnfl(grad, lr=0.01, steps=300, batch=jfl.batches.without_replacement(10)).name
    'dpnfl'
    """
    return dataclasses.replace(fedavg(grad, **fedavg_options), name="dpnfl")
