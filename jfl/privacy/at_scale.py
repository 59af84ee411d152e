"""The epsilon of a larger deployment that a small simulation stands for."""

import math

import numpy as np

from ..core import checks
from ..core.errors import NotAnalysable
from ..core.records import Caveat, Guarantee, Plan
from .entry_guarantees import choose, entries_of, guarantee_of
from .mechanisms.chain import remembers

WORDS = (
    "not of what ran here, whose own epsilon is {:.4g} or more: of a deployment in which {:,} of "
    "{:,} clients come to a round and the mean over them has the noise that it has here"
)
SAMPLED = {"poisson": "poisson", "without_replacement": "without_replacement", "full": "none"}


def at_scale(
    plan: Plan, rounds: int, delta: float = 1e-5, *, cohort: int, clients: int
) -> Guarantee:
    """What a deployment with a larger cohort would prove, whose mean has the noise of this plan's.

    A simulation of a cohort of 100 cannot bear the noise that hides a client among 100.  So studies
    give its mean the noise of a mean of 10,000: a noise multiplier z of the deployment is z * 100 /
    10,000 here.  How well the model trains is then
    about what the deployment would see; the epsilon is that of the deployment, never of this run.

    Args:
        plan: with noise on the release.
        rounds: of the run.
        delta: of the guarantee, in (0, 1).
        cohort: clients of a round in the deployment (of a Poisson cohort, expected).
        clients: all its clients.

    Returns:
        A guarantee with status "conditional"; its first caveat says what ran here, with the epsilon
        of that.

    Privacy:
        of one client against a third party.  With clip norms and weights as they are here.

    Raises:
        ValueError: without noise on the release; unless cohort <= clients and both are at least
            those of the plan; for samplers or noise that this does not carry over.

    References:
        pfl-research (Granqvist et al., 2024) calls it noise_cohort_size.

    Example:
        >>> import jfl
        >>> fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(100))
        >>> task = jfl.models.logistic(fed)
        >>> small = jfl.gaussian(1.0 * 10 / 10_000)  # z = 1 where 10,000 come
        >>> noise = jfl.chain(jfl.clip_l2(0.5), jfl.total(), small, jfl.divide(10))
        >>> fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=1, batch=jfl.batches.full())
        >>> sampler = jfl.sampling.poisson(100, 0.1)
        >>> plan = jfl.plan(fed, task, fedavg, sampler, release=noise)
        >>> found = jfl.at_scale(plan, 1000, 1e-6, cohort=10_000, clients=1_000_000)
        >>> 1.9 < found.epsilon < 2.2, found.status
        (True, 'conditional')
    """
    where = "jfl.at_scale"
    checks.require_integer(where, cohort=cohort, clients=clients)
    sampler, expected = plan.sampler, float(plan.sampler.expected)
    if not (expected <= cohort <= clients and sampler.clients <= clients):
        checks.fail(
            where,
            f"{expected:g} <= cohort <= clients, and clients >= {sampler.clients}",
            f"cohort={cohort}, clients={clients}",
            "A deployment is no smaller than what stands for it.",
        )
    if sampler.scheme not in SAMPLED or sampler.scheme == "full" and cohort < clients:
        checks.fail(
            where,
            "sampling.poisson, sampling.without_replacement, or sampling.full with all clients",
            f"sampling.{sampler.scheme}, {cohort} of {clients}",
            error=NotAnalysable,
        )
    if remembers(plan.release):
        checks.fail(
            where,
            "a fixed clip norm",
            f"{plan.release!r}, whose clip knows the noise of the cohort that runs",
            error=NotAnalysable,
        )
    entry = choose(where, plan, entries_of(plan, rounds, delta), "client", "third_party", None)
    if entry.noise_of != "server" or entry.parts[0].summed is not None:
        checks.fail(
            where,
            "noise on the release alone",
            "noise of the clients",
            "Its share of a mean does not hang on the cohort like that.",
            error=NotAnalysable,
        )
    try:  # or more, of small cohorts
        here = guarantee_of(entry._replace(overflow=0.0), rounds, delta).epsilon
    except NotAnalysable:  # noise for a large cohort is next to nothing in a small one
        here = math.inf
    part = entry.parts[0]
    if part.sampling not in (SAMPLED[sampler.scheme], "none"):
        checks.fail(
            where,
            "clients that keep no state: who came with whom shows in it",
            f"{plan.algorithm.name}",
            error=NotAnalysable,
        )
    sizes = {
        "none": (np.ones(1), np.ones(1)),
        "poisson": (np.array([cohort / clients]), np.ones(1)),
        "without_replacement": (np.array([float(cohort)]), np.array([float(clients)])),
    }[part.sampling]
    multiplier = part.multiplier * (cohort / expected)
    part = part._replace(multiplier=multiplier, sample=sizes[0], population=sizes[1])
    caveat = Caveat(WORDS.format(here, cohort, clients), "at-scale")
    larger = entry._replace(parts=(part,), overflow=0.0, caveats=(caveat, *entry.caveats))
    found = guarantee_of(larger, rounds, delta)
    return found._replace(status="conditional").about(found.release)
