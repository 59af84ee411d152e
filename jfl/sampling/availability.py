"""A sampler for clients that are available in some rounds only, such as at certain hours."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.options import Setting
from ..core.records import Array, Fn, Sampler, named, record, static
from . import uniform
from .clients import chosen_cohort, resolve_capacity

__all__ = ["available_poisson"]


@record
class Available(Sampler):
    """A sampler that also knows in which rounds each client is available."""

    available: Array | None = None  # Bool[P, C], row p for rounds t with t mod P = p
    at_once: int = static(default=0)  # maximum number of available clients in a round

    @property
    def over_rounds(self) -> bool:
        """True, since `draw` takes two arguments, the key of the run and the round."""
        return True


@named("sampling.available_poisson")
def _draw_available(key, round_, *, rate, available, clients, capacity):
    words = jax.random.bits(jax.random.fold_in(key, round_), (clients,), jnp.uint32)
    is_available = available[round_ % len(available)]
    return chosen_cohort(is_available & uniform.below(words, rate), capacity)


def available_poisson(
    clients: int,
    rate: ArrayLike,
    available: ArrayLike | None = None,
    *,
    period: Annotated[int, Setting(default=24)] = 24,
    awake: Annotated[float, Setting(default=1 / 3)] = 1 / 3,
    capacity: int | None = None,
) -> Sampler:
    """Include each available client independently with probability `rate`.

    The rounds in which a client is available are public and must not depend on data. Without
    `available`, a day has `period` rounds, and each client is available for a fraction `awake` of
    the day, which begins later for clients with larger ids. If clients with similar ids have
    similar data, cohorts then consist of different kinds of clients in different rounds
    (semi-cyclic data).

    Args:
        period: number of rounds in a day.
        awake: fraction of a day in which a client is available, in (0, 1].

    Other Parameters:
        clients: number of clients.
        rate: probability with which an available client participates in a round, in (0, 1].
        available: Bool[P, C], instead of `period` and `awake`. Row p says which clients are
            available in rounds t with t mod P = p. Clients that are available more often have more
            influence; weights do not correct for this.
        capacity: number of slots of a cohort. None chooses it such that an overflow is very
            unlikely.

    Privacy:
        Epsilon is that of `poisson(clients, rate)`: every round counts as if the client were
        available, which is an upper bound. If few clients are available, a cohort of a given size
        needs a larger rate, so epsilon is larger than for cohorts drawn from all clients.

    Raises:
        ValueError: for arguments out of range, and for a client that is never available.

    References:
        Eichner et al., ICML 2019 (semi-cyclic SGD). Balle et al., NeurIPS 2020 ("random
        check-ins"), on why availability must not count as randomness of the sampler.

    Example:
        >>> sampler = available_poisson(4, 1.0, [[1, 1, 0, 0], [0, 0, 1, 1]], capacity=4)
        >>> [sampler.draw(jax.random.key(0), r).ids.tolist() for r in (0, 1, 2)]
        [[0, 1, 4, 4], [2, 3, 4, 4], [0, 1, 4, 4]]
    """
    where = "sampling.available_poisson"
    checks.require_integer(where, clients=clients)
    checks.require_fraction(where, single=True, rate=rate)
    if available is None:
        checks.require_integer(where, period=period)
        checks.require_fraction(where, single=True, awake=awake)
        begins = np.arange(clients) * period // clients
        hour = (np.arange(period)[:, None] - begins) % period
        available = hour < max(1, round(awake * period))
    available = checks.as_array(where, "available", available)
    is_pattern = available.ndim == 2 and available.shape[1] == clients
    if not is_pattern or not np.isin(available, (0, 1)).all() or not available.any(0).all():
        checks.fail(
            where,
            f"available: Bool[rounds, {clients}], each client in at least one round",
            f"{available.dtype}{list(available.shape)}",
            "Leave clients that are never available out of the federation.",
        )
    available = available.astype(bool)
    at_once = int(available.sum(1).max())
    capacity = resolve_capacity(where, capacity, clients, at_once, rate)
    rate, shown = checks.as_scalar(rate), jnp.asarray(available)
    fixed: dict[str, Any] = dict(clients=int(clients), capacity=capacity)
    return Available(
        Fn(_draw_available, dict(rate=rate, available=shown), fixed),
        rate * float(available.sum(1).mean()),
        rate=rate,
        scheme="available_poisson",
        **fixed,
        available=shown,
        at_once=at_once,
    )
