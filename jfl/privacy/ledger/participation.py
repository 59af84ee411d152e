"""How often a client takes part: what a sampler says, and what is planned, asserted, likely or
seen."""

import math
from typing import NamedTuple

import numpy as np

from ...core import checks
from ...core.records import Caveat, Plan, Sampler
from ...sampling.clients import BY_RATE

EVERY_ROUND = Caveat("planned worst case: the client participates in every round", "every-round")
TURNS = (
    "planned worst case: the client takes part whenever the turn of its group comes, in one of {} "
    "rounds"
)
HONEST = Caveat("cohort drawn honestly and not revealed to the third party", "honest-cohort")
ASSERTED = "asserted, not enforced: no client participates more than {} times"
LIKELY = (
    "participations are at most their quantile but for probability {:g}, which delta includes; "
    "cohorts drawn "
    "honestly and without regard to data"
)
SEEN = Caveat(
    "participations as they happened, not as planned: a description of this run, not a guarantee",
    "realised",
)
VIEWS = ("server", "third_party", "aggregate")
# schemes without a chance of absence, or with one that nobody knows, or that rounds share
UNKNOWN = (
    "full",
    "first_responders",
    "min_separation",
    "cyclic_poisson",
    "random_allocation",
    "balls_in_bins",
)
GROUPS = 16  # of clients, in the search for the worst one


def share_of(sampler: Sampler):
    """The probability that one draw takes a client: a number, or one for each client."""
    if sampler.scheme == "with_replacement":
        if sampler.share is None:
            return 1 / sampler.clients
        return np.minimum(np.nextafter(np.asarray(sampler.share), np.float32(1)), 1).astype(
            np.float64
        )  # not below what is drawn
    if sampler.scheme in ("random_allocation", "balls_in_bins"):
        return 1 / sampler.epoch
    if sampler.scheme in BY_RATE:  # of clients that take turns, in a round of their own
        return drawn(np.asarray(sampler.rate))
    return sampler.capacity / sampler.clients if sampler.scheme == "without_replacement" else 1.0


def drawn(rate):
    """The probability that a uniform float32, a multiple of 2^-23, lies below the float32 that
    `rate` is."""
    return math.ceil(float(np.float32(rate)) * 2**23) / 2**23


def tail(capacity, trials, rate):
    """The probability that a binomial number exceeds `capacity`."""
    if capacity >= trials:
        return 0.0
    from scipy import stats  # half a second: not at import

    return float(stats.binom.sf(capacity, trials, rate))


class Attendance(NamedTuple):
    """How a view meets the clients of a round."""

    share: np.ndarray  # [C] of a draw of the cohort; 0 where every round counts
    chance: np.ndarray  # [C] that a client takes part, each time that it may
    turns: int  # how often it may in a round
    gains: bool  # from rounds in which a client is absent
    caveats: tuple


def attendance_of(plan: Plan, view: str, share=None) -> Attendance:
    """How a view meets the clients.

    The server sees who takes part, so for it every client does; a third party does not, where there
    is a chance of absence that is known.

    Args:
        plan: says who takes part.
        view: "server" or "third_party".
        share: [C], of a draw, instead of each client's own.
    """
    sampler = plan.sampler
    hidden = view == "third_party"
    share = np.broadcast_to(share_of(sampler) if share is None else share, np.shape(plan.fed.size))
    caveats = who(plan, view)
    if not hidden or sampler.scheme in UNKNOWN:
        shown = share if hidden else np.zeros(share.shape)
        return Attendance(shown, np.ones(share.shape), turns(sampler), False, caveats)
    # each draw of its own is a chance of its own
    within = np.minimum(share, 1.0)
    chance = within if sampler.independent else _chance(sampler, within)
    chance = np.where(share >= 1, 1.0, chance)
    return Attendance(share, chance, turns(sampler), True, caveats)


def who(plan: Plan, view: str) -> tuple:
    """The caveat about participation."""
    if plan.sampler.scheme == "full":
        return ()
    return (EVERY_ROUND,) if view == "server" or plan.sampler.scheme in UNKNOWN else (HONEST,)


def in_turns(plan: Plan) -> tuple:
    """The caveat about participation in a release, of which rounds of other groups are no part."""
    if plan.sampler.epoch > 1:
        return (HONEST,)
    if plan.sampler.separation == 1:
        return who(plan, "third_party")
    turns = Caveat(TURNS.format(plan.sampler.separation), "turns")
    return (turns, HONEST) if plan.sampler.scheme in BY_RATE else (turns,)


def frontier(sizes, share):
    """Pairs (rows, share) such that every client has at least the rows and at most the share of one
    of them."""
    pairs, most = [], -1.0
    for rows, s in sorted(set(zip(sizes.tolist(), share.tolist())), key=lambda p: (p[0], -p[1])):
        if s > most:
            pairs.append((rows, s))
            most = s
    cuts = np.array_split(np.arange(len(pairs)), min(GROUPS, len(pairs)))
    return [(pairs[c[0]][0], pairs[c[-1]][1]) for c in cuts]


def worst_columns(rows, amount, noise, counted) -> tuple:
    """Pairs of columns such that every client is at most as badly off as one of these: with the
    rows and noise of the one, and the amount of the other.

    Args:
        rows: Int[C]; fewer never help: a larger rate, or more looks at each row.
        amount: [C], of participation; less never hurts.
        noise: arrays [rounds or 1, C or 1] in which clients differ.
        counted: Int[n], the clients that count.
    """
    counted = np.asarray(counted)
    if not counted.size:
        return ()
    rows, amount = np.asarray(rows)[counted], np.asarray(amount)[counted]
    if all(z.shape[1] == 1 for z in noise):
        column = {value: c for value, c in zip(rows[::-1].tolist(), counted[::-1].tolist())}
        other = {value: c for value, c in zip(amount[::-1].tolist(), counted[::-1].tolist())}
        return tuple((column[r], other[a]) for r, a in frontier(rows, amount))
    columns = [
        np.broadcast_to(z if z.shape[1] == 1 else z[:, counted], (len(z), len(rows))) for z in noise
    ]
    apart = np.unique(
        np.concatenate([rows[None], amount[None], *columns]), axis=1, return_index=True
    )[1]
    return tuple((c, c) for c in counted[apart].tolist())


def counts(plan: Plan, rounds: int, cap=None, quantile=None, realised=None):
    """How often each client takes part in `rounds` rounds, at most.

    Without `cap`, `quantile` and `realised` it is the planned worst case.

    Args:
        plan: says who takes part.
        rounds: how many rounds are run.
        cap: participations that no client exceeds; the engine does not enforce it.
        quantile: the probability with which a client may exceed the number that counts for it.
        realised: Int[C], the participations as they happened.

    Returns:
        Int[C], the participations of each client; the probability that a client exceeds its number;
        the status of a guarantee that rests on them; its caveats.

    Raises:
        ValueError: unless at most one is given, and in range.
    """
    sampler, where = plan.sampler, "jfl.guarantee"
    given = [
        name
        for name, v in dict(cap=cap, quantile=quantile, realised=realised).items()
        if v is not None
    ]
    if len(given) > 1:
        checks.fail(where, "one of cap, quantile and realised", " and ".join(given))
    clients, trials = np.size(plan.fed.size), rounds * turns(sampler)
    planned = np.full(clients, trials)
    if cap is not None:
        checks.whole(where, cap=cap)
        return np.minimum(planned, cap), 0.0, "conditional", (Caveat(ASSERTED.format(cap), "cap"),)
    if quantile is not None:
        checks.fraction(where, single=True, quantile=quantile)
        if sampler.scheme in UNKNOWN:
            return planned, 0.0, "proved", who(plan, "server")
        from scipy import stats  # half a second: not at import

        chance = share_of(sampler) if sampler.independent else _chance(sampler, share_of(sampler))
        most = stats.binom.isf(float(quantile), trials, np.broadcast_to(chance, clients))
        return (
            np.minimum(most.astype(int), trials),
            float(quantile),
            "proved",
            (Caveat(LIKELY.format(quantile), "quantile"),),
        )
    if realised is not None:
        seen = checks.array(where, "realised", realised)
        trials = -(-rounds // sampler.separation) * turns(sampler)
        if (
            seen.shape != (clients,)
            or seen.dtype.kind not in "iu"
            or (seen < 0).any()
            or (seen > trials).any()
        ):
            checks.fail(
                where, f"realised: whole numbers in 0..{trials}, Int[{clients}]", f"{realised!r}"
            )
        return seen, 0.0, "descriptive", (SEEN,)
    return planned, 0.0, "proved", who(plan, "server")


def turns(sampler):
    """How often a client may run in one round."""
    return sampler.capacity if sampler.independent else 1


def _chance(sampler, share):
    """The probability of a round, from that of a draw."""
    if sampler.scheme != "with_replacement":
        return share
    return -np.expm1(sampler.capacity * np.log1p(-share))
