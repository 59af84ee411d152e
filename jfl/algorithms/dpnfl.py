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
    """Return DPNFL, which is `fedavg` with clipping and noise in every local step.

    To add noise of standard deviation sigma to the mean gradient of B rows, pass `grad` =
    `private_grad(loss, chain(clip_l2(G), total(), gaussian(std=B * sigma), divide(B)))` with a clip
    norm G. The paper's algorithm does not clip, but nothing can be proved without a clip. Each
    participation releases `steps` noisy gradients, and the model difference that is computed from
    them.

    The sampler and the weights of the plan determine how uploads are aggregated. Let n be the
    number of clients, r the number of clients per round, p_i the fraction of all rows that client i
    owns, and d_i its model difference. Sums are over the cohort, and w is the old model.

    - uniform: `sampling.without_replacement(n, r)` and `weights="size"`. The new model is
      w + (n / r) sum p_i d_i, which is unbiased.
    - multinomial: `sampling.with_replacement(n, r, weights=fed.size)` and `weights="size"`. The new
      model is w + (1 / r) sum d_i, where a client drawn m times counts m times; it is unbiased. The
      weight of a client is divided by its probability of being drawn, so its size cancels.
    - biased FedAvg: as in uniform, with `server_lr` = r / n. The new model is w + sum p_i d_i. The
      step has the same direction as in uniform, but is smaller.
    - normalised FedAvg: as in uniform, with `release=chain(total(), divide("weight"))`. The new
      model is w + sum p_i d_i / sum p_i, which is biased if the p_i differ.
    - first responders: `sampling.first_responders(n, r, latency)` and `weights="size"`. The formula
      is that of uniform, but fast clients participate more often, so the new model is biased.

    Example:
        >>> import jfl
        >>> chain = jfl.chain(
        ...     jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(std=10 * 0.5), jfl.divide(10)
        ... )
        >>> grad = jfl.private_grad(lambda w, x, y: (x @ w - y) ** 2, chain)
        >>> dpnfl(grad, lr=0.01, steps=300, batch=jfl.batches.without_replacement(10)).name
        'dpnfl'
    """
    return variant(fedavg(grad, **fedavg_options), "dpnfl")
