"""Privacy budgets for runs whose noise or number of rounds is chosen while they run.

A `Budget` is a privacy filter.  It adds up the privacy losses of rounds, and admits a round only if
the sum stays within a limit that was fixed before the run.  It is either of two filters:

- Renyi filter: rounds whose Renyi divergences of one order a add up to at most `limit`, however
  they are chosen, have together a divergence of at most `limit` (Feldman and Zrnic, NeurIPS 2021).
  The a-th power of the likelihood ratio, divided by exp((a - 1) * sum of the divergences so far),
  has a mean that no round increases.  The order must be fixed before the run: the smallest bound
  of several orders, or an order that is chosen afterwards, proves nothing for adaptive choices.
- GDP filter (Gaussian differential privacy): if round t is mu_t-GDP, given everything before it,
  and the sum of mu_t^2 is at most mu^2, all rounds together are mu-GDP (Koskela, Tobaben and
  Honkela, ICLR 2023).  Each round reveals no more than a Brownian motion with drift 0 or 1 reveals
  in a time of mu_t^2, so all of them reveal no more than it does in a time of mu^2.  Sampling does
  not amplify privacy here.

Composing trade-off curves, or privacy-loss distributions, until they cross a target is not a valid
filter (arXiv:2602.06756), so jfl has none.

A share of delta, RESERVED, pays for samples that overflow and for the finite range of the noise.
Both are probabilities, which add up whatever is chosen.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Guarantee, Plan, Run, counted
from ..verify import check as verify
from .accountants import events, rdp_events, tightest
from .guarantees import choose
from .ledger import entries as ledger
from .ledger import segments
from .ledger.caveats import ADAPTIVE
from .ledger.entry import Entry, events_of, levels_of, lost_of

RESERVED = 0.01  # the share of delta that pays for overflows and for the finite range of the noise
ROUNDING = 1e-9  # a limit is smaller by this factor, so that rounding errs on the conservative side
MAX_ORDER = 1e6
FIRST_ROUNDS = 1000  # `max_rounds` considers more rounds only if these fit
WHERE = "jfl.budget"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Budget:
    """An (epsilon, delta) budget, and how much of it the rounds of one run have spent.

    `jfl.budget` makes one.  It does not change: `spend` returns another one.  Losses are Renyi
    divergences of `order`, or mu^2 of Gaussian differential privacy if `order` is None.

    Attributes:
        epsilon: the epsilon that holds however the noise and the number of rounds are chosen.
        delta: its delta.
        unit: what is protected, "example" or "client".
        view: the observer, as in `jfl.guarantee`.
        adjacency: as in `jfl.guarantee`.
        order: the order of the Renyi filter; None for the GDP filter.
        limit: the largest sum of losses.
        spent: the sum of the losses of all rounds so far.
        lost: the delta that overflows and the finite range of the noise cost in all rounds so far.
        rounds: the number of rounds so far.
        status: as in `Guarantee`.
        caveats: what epsilon assumes and does not cover.
        stopped: why the last call of `simulate` ended before its number of rounds; "" if the budget
            admitted all of them.
        history: numbers that identify the run whose rounds `simulate` has counted; () if the rounds
            were counted by `spend`.
    """

    epsilon: float
    delta: float
    unit: str
    view: str
    adjacency: str
    order: float | None
    limit: float
    spent: float = 0.0
    lost: float = 0.0
    rounds: int = 0
    status: str = "proved"
    caveats: tuple = (ADAPTIVE,)
    stopped: str = ""
    history: tuple = ()

    def max_rounds(self, plan: Plan, rounds: int) -> int:
        """Return how many of the next `rounds` rounds of a plan fit into the budget.

        Args:
            plan: a Plan.  Its noise may have been chosen by what the view has seen so far.
            rounds: the largest number of rounds to consider.

        Returns:
            A number in 0..rounds.  The rounds begin where the earlier ones ended.

        Raises:
            ValueError: as in `jfl.guarantee`; or if the losses of rounds do not add up, because
                noise is correlated over rounds or clients participate in rotation; or for noise
                that is not Gaussian in a GDP filter.
        """
        checks.require_integer(WHERE, max_value=ledger.MAX_ROUNDS, rounds=rounds)
        number = min(int(rounds), FIRST_ROUNDS)
        _, after = self._costs(plan, number)
        # The schedules of the plan are evaluated only for rounds that may fit.
        while number < rounds and after(number) is not None:
            number = min(8 * number, int(rounds))
            _, after = self._costs(plan, number)
        return bisect.bisect_left(range(1, number + 1), True, key=lambda n: after(n) is None)

    def spend(self, plan: Plan, rounds: int) -> "Budget":
        """Return the budget after `rounds` more rounds of a plan.

        Args:
            plan: a Plan.
            rounds: the number of rounds, which continue where the earlier ones ended.

        Raises:
            ValueError: as in `max_rounds`; or if the rounds exceed the budget.

        Example:
            >>> import jfl
            >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(10))
            >>> task = jfl.models.logistic(fed)
            >>> def plan(z):
            ...     noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(9))
            ...     grad = jfl.private_grad(task.loss, noise)
            ...     fedavg = jfl.algorithms.fedavg(grad, steps=1, batch=jfl.batches.full())
            ...     return jfl.plan(fed, task, fedavg, jfl.sampling.full(10))
            >>> one = jfl.budget(plan(4.0), epsilon=2.0).spend(plan(4.0), 2)
            >>> one.max_rounds(plan(8.0), 100), one.spend(plan(8.0), 5).rounds
            (8, 7)
        """
        entry, after = self._costs(plan, rounds)
        costs = after(int(rounds))
        if costs is None:
            checks.fail(
                f"{WHERE}.spend",
                f"at most {self.max_rounds(plan, rounds)} rounds, which this budget admits",
                f"rounds={rounds}, after {self.spent / self.limit:.1%} are spent",
                "Stop, or use a plan with more noise.",
            )
        return dataclasses.replace(
            self,
            spent=costs[0],
            lost=costs[1],
            rounds=self.rounds + int(rounds),
            status=entry.status if self.status == "proved" else self.status,
            caveats=tuple(dict.fromkeys(self.caveats + entry.caveats)),
            history=(),
        )

    def guarantee(self) -> Guarantee:
        """Return the guarantee of all rounds that this budget has admitted or will admit.

        Its epsilon is that of the budget, even if little of it is spent: a smaller one would
        depend on the choices, and would not be a guarantee.
        """
        method = "gdp_filter" if self.order is None else f"rdp_filter, order {self.order:.4g}"
        what = (self.unit, self.adjacency, self.view, method, self.status, self.caveats)
        return Guarantee(self.epsilon, self.delta, *what)

    def __repr__(self) -> str:
        proof = self.guarantee()
        kind = ", ".join((proof.status, self.unit, self.adjacency, self.view, proof.method))
        stopped = f"; {self.stopped}" * bool(self.stopped)
        spent = f"{counted(self.rounds, 'round')} spent {self.spent / self.limit:.1%}"
        target = f"epsilon = {self.epsilon:.4g} at delta = {self.delta:.3g}"
        return f"Budget: {spent} of {target} ({kind}){stopped}"

    def _costs(self, plan: Plan, rounds: int) -> tuple[Entry, Callable]:
        """Return the ledger entry of the next rounds of a plan; and a function that returns the
        fields `spent` and `lost` after n of these rounds, or None if they exceed the budget."""
        entry = _entry(plan, rounds, self.unit, self.view, self.adjacency, first=self.rounds)
        total = _losses(entry, int(rounds), np.array([self.order or 2.0]))
        column = -1 if self.order is None else 0
        if not np.isfinite(total(1)[column]):
            checks.fail(
                WHERE,
                "Gaussian noise, which is what the GDP filter of this budget counts",
                "noise whose loss is infinite",
                "Give jfl.budget an order, which makes a Renyi filter.",
                error=NotAnalysable,
            )
        overflow = entry.overflow * (1 + math.exp(min(self.epsilon, 700.0)))

        def after(n: int) -> tuple[float, float] | None:
            spent = self.spent + float(total(n)[column])
            if not spent <= self.limit:  # also nan
                return None
            missed = lost_of(entry, np.array([n]), self.delta)[0]
            lost = self.lost + float(missed + overflow * n)
            return (spent, lost) if lost <= RESERVED * self.delta else None

        return entry, after


def budget(
    plan: Plan,
    *,
    epsilon: float,
    delta: float = 1e-5,
    order: float | None = None,
    rounds: int = 1,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
) -> Budget:
    """Return a budget that halts a run, whose noise and rounds may be chosen from its results.

    The choices made here must not depend on private results: epsilon, delta, order, unit, view and
    adjacency, and the plan and rounds from which they are derived.

    Args:
        plan: the Plan that is likely to run, which determines what None means below.
        epsilon: the epsilon that must not be exceeded, > 0.
        delta: in (0, 1).
        order: the order of the Renyi filter, greater than 1 - log(delta) / epsilon.  None chooses
            the filter and the order that admit most rounds of `plan`: the GDP filter for Gaussian
            noise without sampling.
        rounds: the number of rounds that are likely to run.  It only matters if the noise of
            `plan` changes over rounds.
        unit: as in `jfl.guarantee`.
        view: as in `jfl.guarantee`; None chooses the same view.
        adjacency: as in `jfl.guarantee`.

    Returns:
        A Budget of which nothing is spent.

    Privacy:
        If `max_rounds` admits each round before it runs, all rounds together are (epsilon,
        delta)-private, however their noise and number depend on what the view has seen.  Metrics
        are not part of any view.  See docs/guides/guarantee.md.

    Raises:
        ValueError: as in `jfl.guarantee`; for a plan without noise; or if epsilon is so small that
            nothing is left of it at this order.

    References:
        Feldman and Zrnic, NeurIPS 2021; Koskela, Tobaben and Honkela, ICLR 2023.

    Example:
        Ten rounds, and then as many as the budget admits, with noise chosen after a look at the
        model:

        >>> out = jfl.simulate(  # doctest: +SKIP
        ...     key, plan(4.0), 10, stop_at=jfl.budget(plan(4.0), epsilon=2.0)
        ... )
        >>> less = plan(noise_for(out.params))  # doctest: +SKIP
        >>> out = jfl.simulate(key, less, 90, start=out.run, stop_at=out.budget)  # doctest: +SKIP
    """
    checks.require_positive(WHERE, single=True, epsilon=epsilon)
    rdp_events.check_delta(delta)
    entry = _entry(plan, rounds, unit, view, adjacency)
    verify.warn_if_conditional(WHERE, entry)
    left = delta * (1 - RESERVED)

    # rdp.convert, solved for the divergence; and the limit of the GDP filter
    orders = rdp_events.MANY_ORDERS if order is None else np.array([float(order)])
    with np.errstate(all="ignore"):  # orders that are rejected below
        limits = epsilon - np.log1p(-1 / orders) + (math.log(left) + np.log(orders)) / (orders - 1)
    z = math.inf if order else tightest.solve_noise(events.gaussian, float(epsilon), left)
    limits = np.append(limits, z**-2.0)
    if not (orders.max() <= MAX_ORDER and orders.min() > 1 and limits.max() > 0):
        checks.fail(
            WHERE,
            f"order in ({1 - math.log(left) / epsilon:.3g}, {MAX_ORDER:g}] for epsilon={epsilon:g}",
            f"order={order}",
            "A smaller order leaves nothing of this epsilon to spend.",
        )
    with np.errstate(divide="ignore"):
        ratios = np.maximum(limits, 0.0) / _losses(entry, int(rounds), orders)(rounds)
    best = int(np.nanargmax(ratios))
    return Budget(
        float(epsilon),
        float(delta),
        entry.unit,
        entry.view,
        entry.adjacency,
        float(orders[best]) if best < len(orders) else None,
        float(limits[best] * (1 - ROUNDING)),
        status=entry.status,
        caveats=tuple(dict.fromkeys((ADAPTIVE, *entry.caveats))),
    )


def history_of(run: Run) -> tuple:
    """Return numbers that identify the plans of a run and their noise."""
    return (*np.asarray(run.plan_identity).tolist(), *np.asarray(run.plan_history).tolist())


def admitted(
    where: str, stop_at: Any, plan: Plan, rounds: int, start: Run | None
) -> tuple[Budget, int]:
    """Return the budget of a run, and the number of rounds that it admits.

    Args:
        where: the name of the caller, for messages.
        stop_at: a Budget, or a pair (epsilon, delta).
        plan: the plan that will run.
        rounds: the number of rounds that are planned.
        start: the state from which the run continues; None for a new run.

    Raises:
        ArgumentError: if `stop_at` is neither; if the budget has counted other rounds than those
            that have run; or if it admits no round.
    """
    checks.require_integer(where, rounds=rounds)
    before = 0 if start is None else int(start.round)
    if not isinstance(stop_at, Budget):
        if not isinstance(stop_at, (tuple, list)) or len(stop_at) != 2:
            checks.fail(where, "stop_at=(epsilon, delta) or a Budget", checks.short_repr(stop_at))
        stop_at = budget(plan, epsilon=stop_at[0], delta=stop_at[1], rounds=rounds)
    # The numbers of a run with paired noise are all 0, so they do not tell which run it is.
    is_same = start is not None and any(stop_at.history) and stop_at.history == history_of(start)
    is_other = start is not None and stop_at.history != () and not is_same
    if stop_at.rounds != before or is_other:
        checks.fail(
            where,
            f"a budget that has counted the {before} rounds that have run",
            f"one that has counted {stop_at.rounds}"
            + " of another run, or of runs with paired_noise, which it cannot tell apart"
            * is_other,
            "Continue with stop_at=out.budget of the Output that start=out.run is from.  Rounds "
            "that ran in other ways are counted by budget.spend(plan, rounds).",
        )
    number = stop_at.max_rounds(plan, rounds)
    if not number:
        checks.fail(
            where,
            "a budget that admits a round of this plan",
            f"{stop_at!r}",
            "Use more noise, or a larger epsilon or delta for a new run.  If samples overflow, "
            "raise the capacity of the sampler or of the batches.",
        )
    stopped = f"it admits {number} of {rounds} rounds" * (number < rounds)
    return dataclasses.replace(stop_at, stopped=stopped), number


def _entry(plan, rounds, unit, view, adjacency, first=0) -> Entry:
    """Return the only ledger entry of the next rounds, whose losses add up over rounds."""
    listed = ledger.entries(segments.from_round(plan, first), rounds)
    if not listed:
        checks.fail(WHERE, "a plan with noise", "a plan without noise", "Add a noise stage.")
    entry = choose(WHERE, plan, listed, unit, view, adjacency)
    # Clients in rotation have a bound for each round as well, but only for some numbers of rounds.
    takes_turns = max(plan.sampler.separation, plan.sampler.epoch) > 1
    rotates = entry.noise_of == "server" and takes_turns
    if rotates or any(part.joint for part in entry.parts):
        checks.fail(
            WHERE,
            "rounds that each have a privacy loss of their own",
            "rounds that are accounted together: noise that is correlated over rounds, clients in "
            "rotation, or sums of fixed cohorts",
            "Use jfl.guarantee, for a plan and a number of rounds that are fixed in advance.",
            error=NotAnalysable,
        )
    return entry


def _losses(entry: Entry, rounds: int, orders: np.ndarray) -> Callable:
    """Return a function of a number n <= rounds: the losses of the first n rounds.

    They are Float64[len(orders) + 1]: Renyi divergences, and the mu^2 of Gaussian differential
    privacy, each of the client that is worst off.
    """
    listed, which = events_of(entry), np.zeros(1, int)
    if entry.changes:
        listed, which = levels_of(listed, rounds)
    levels = int(which.max()) + 1
    each = [np.zeros((levels, len(orders) + 1))]  # if nobody participates
    for event in listed:
        event, _ = rdp_events.with_multiplicities(event, 0.0)
        squared_mu = np.broadcast_to(events.precision(event), levels)
        each.append(np.column_stack((rdp_events.level_curves(event, orders, levels), squared_mu)))

    def total(n: int) -> np.ndarray:
        times = np.bincount(which[:n], minlength=levels) if entry.changes else np.full(1, n)
        with np.errstate(invalid="ignore"):  # 0 * inf
            return np.max(times @ np.stack(each), axis=0)

    return total
