"""DPNFL: FedAvg with clipping and noise in every local step.

References:
    Chen et al., IEEE TKDE 2024, Algorithm 1.
"""

from ..core.options import extends
from ..core.records import Algorithm
from ..gradients.per_example import Grad
from .base import variant
from .fedavg import fedavg


@extends(fedavg)
def dpnfl(grad: Grad, **fedavg_options) -> Algorithm:
    """Return `fedavg` under its name in Chen et al. (2024): clipping and noise in every local step.

    For noise of standard deviation sigma on the mean gradient of B rows, `grad` is
    private_grad(loss, chain(clip_l2(G), total(), gaussian(std=B * sigma), divide(B))). The paper
    prints no clip, but nothing can be proved without one.

    The plan determines the aggregation. With p_i = n_i / sum n_j, n clients, and r of them per
    round:

    - uniform: sampling.without_replacement(n, r), weights="size". It gives w + (n / r) sum p_i
      diff_i, which is unbiased.
    - multinomial: sampling.with_replacement(n, r, weights=fed.size), weights="size". It gives w +
      (1 / r) sum diff_i, where a client drawn m times counts m times; it is unbiased.
    - biased FedAvg: as uniform, with server_lr = r / n. It gives w + sum p_i diff_i, the same path
      in smaller steps.
    - normalised FedAvg: as uniform, with release=chain(total(), divide("weight")). It gives w + sum
      p_i diff_i / sum p_i, which is biased if the p_i differ.
    - first responders: sampling.first_responders(n, r, latency), weights="size". As uniform, but
      biased to fast clients.

    Each participation releases `steps` noisy gradients, and the model difference that is computed
    from them.

    >>> import jfl
    >>> chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=10 * 0.5), jfl.divide(10))
    >>> grad = jfl.private_grad(lambda w, x, y: (x @ w - y) ** 2, chain)
    >>> dpnfl(grad, lr=0.01, steps=300, batch=jfl.batches.without_replacement(10)).name
    'dpnfl'
    """
    return variant(fedavg(grad, **fedavg_options), "dpnfl")
