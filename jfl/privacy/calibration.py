"""Calibration: the noise multiplier, or the number of rounds, for a given epsilon.

This is the inverse of `guarantees.guarantee`.
"""

import bisect
import dataclasses
import math

import numpy as np
from jax.typing import ArrayLike

from ..core import checks
from ..core.errors import ArgumentError, NotAnalysable
from ..core.records import Plan
from ..verify import check as verify
from .accountants.rdp_events import check_delta
from .accountants.tightest import FINE, LEAST, largest, smallest, smallest_refined, tightest
from .guarantees import Overflow, choose, for_each_client, quick_epsilons
from .ledger import entries as ledger
from .ledger.entry import release_of, with_noise
from .ledger.facts import attendance, changing
from .mechanisms.chain import noisy

NEAR = 0.01  # relative distance to a target that counts as reaching it


def calibrate(
    plan: Plan,
    *,
    epsilon: ArrayLike,
    delta: float = 1e-5,
    rounds: int | None = None,
    unit: str | None = None,
    view: str | None = None,
    adjacency: str | None = None,
    over: str = "noise_multiplier",
) -> float | int | np.ndarray:
    """Return the smallest noise multiplier, or the most rounds, for a target epsilon.

    With the result, the plan's `guarantee` has an epsilon of at most the target.  The plan provides
    everything except the multiplier: put any multiplier into its chain and replace it with the
    result.  If noise on uploads and noise on the release both prove the guarantee, the one that
    gives the smaller epsilon in `plan` is calibrated and the other stays unchanged.  All releases
    of an algorithm get the same multiplier.  If the noise changes over rounds, the result is the
    multiplier of the first round; later rounds keep their ratio to it.

    Args:
        plan: a Plan with a noise stage.
        epsilon: the target, > 0; a number, or an array [...].
        delta: in (0, 1).
        rounds: the number of rounds; None with over="rounds".
        unit: as in `jfl.guarantee`.
        view: as in `jfl.guarantee`; None chooses the same view.
        adjacency: as in `jfl.guarantee`.
        over: what to find: "noise_multiplier"; or "rounds", the largest number of rounds of the
            unchanged plan, which is 0 if even one round exceeds epsilon.

    Returns:
        A Python number, or an array with the shape of `epsilon`.  A multiplier is
        std / sensitivity, as a float32 that is rounded conservatively.

    Raises:
        ValueError: as in `guarantee`; if the plan has no noise stage; if no multiplier reaches
            epsilon; or if the capacity of a Poisson sampler is too small for it (the message gives
            one that is large enough).
    """
    checks.require_type("jfl.calibrate", Plan, "jfl.plan", plan=plan)
    checks.require_one_of("jfl.calibrate", ("noise_multiplier", "rounds"), over=over)
    checks.require_positive("jfl.calibrate", epsilon=epsilon)
    if (rounds is None) != (over == "rounds"):
        checks.fail(
            "jfl.calibrate",
            "rounds, unless over='rounds' finds them",
            f"rounds={rounds!r}, over={over!r}",
        )
    check_delta(delta)
    entries = ledger.entries(plan, 1 if rounds is None else rounds)
    if not entries:
        checks.fail(
            "jfl.calibrate",
            "a chain with a noise stage",
            "a plan without noise",
            "Put gaussian(1.0) into it: the multiplier is ignored and found.",
        )
    entry = choose("jfl.calibrate", plan, entries, unit, view, adjacency, rounds or 1)
    verify.warn_if_conditional("jfl.calibrate", entry)
    if over == "noise_multiplier":
        noisier = lambda z: with_noise(entry, z)
        solved = [_noise(plan, noisier, target, rounds, delta) for target in np.ravel(epsilon)]
    else:
        if changing(plan):
            checks.fail(
                "jfl.calibrate",
                "the same noise in every round for over='rounds'",
                "a function of the round",
                "Look along jfl.epsilons(plan, range(...)).",
            )
        if any(part.joint for part in entry.parts):
            checks.fail(
                "jfl.calibrate",
                "independent rounds for over='rounds'",
                "noise that is correlated over rounds, or clients in rotation",
                "Look along jfl.epsilons(plan, range(...)).",
                error=NotAnalysable,
            )
        solved = [_rounds(plan, entry, target, delta) for target in np.ravel(epsilon)]
    return solved[0] if np.ndim(epsilon) == 0 else np.reshape(solved, np.shape(epsilon))


def calibrate_per_client(
    plan: Plan,
    *,
    epsilon: float,
    delta: float = 1e-5,
    rounds: int,
    view: str | None = None,
    cap: int | None = None,
    quantile: float | None = None,
) -> np.ndarray:
    """Return a noise multiplier for each client, with which its examples have the target epsilon.

    Clients with few rows need more noise, because each of their rows is drawn more often.  Put any
    multiplier into the chain of `private_grad` and replace it with `gaussian(result)`.

    Args:
        plan: a Plan whose noise protects examples.
        epsilon: the target of each client, > 0.
        delta: in (0, 1).
        rounds: the number of rounds.
        view: as in `jfl.guarantee`; None chooses the same view.
        cap: as in `jfl.guarantee`.
        quantile: as in `jfl.guarantee`.

    Returns:
        Float32[C], std / sensitivity of each client.  A client without rows gets the smallest
        multiplier of the others.

    Privacy:
        The unit is "example".  The largest of `epsilons_per_client` is then at most `epsilon`.
        More than 64 different clients are calibrated by Renyi bounds, which need a little more
        noise.

    Raises:
        ValueError: as in `calibrate`.
    """
    check_delta(delta)
    listed = ledger.entries(plan, rounds)
    entry = (
        choose("jfl.calibrate_per_client", plan, listed, "example", view, None) if listed else None
    )
    if entry is None or entry.noise_of == "server":
        checks.fail(
            "jfl.calibrate_per_client",
            "noise of the client's own",
            "none",
            "Use private_grad or upload.",
        )
    verify.warn_if_conditional("jfl.calibrate_per_client", entry)
    if entry.view == "third_party" and noisy(plan.upload) and plan.sampler.scheme == "full":
        checks.fail(
            "jfl.calibrate_per_client",
            "view='server' for noise on uploads",
            "view='third_party'",
            "In a sum the noise of all clients counts for each of them: use jfl.calibrate.",
        )
    tuned = lambda alone, left, tightly: _noise(
        plan, lambda z: with_noise(alone, z, constant=True), epsilon, 1, left, tightly
    )
    options = dict(cap=cap, quantile=quantile, realised=None)
    values = for_each_client(plan, entry, rounds, delta, options, [], tuned).astype(np.float32)
    if not values.any():
        checks.fail(
            "jfl.calibrate_per_client",
            "a client that takes part",
            "none that counts",
            "Lower quantile.",
        )
    return np.where(values > 0, values, values[values > 0].min(initial=np.inf))


def _noise(plan, entry_of_z, target, rounds, delta, tightly=True):
    found, overflown = {}, [0.0]  # epsilons of multipliers; multipliers without one

    def reached(z, bound):
        try:
            found[z] = bound(entry_of_z(z))
        except Overflow:  # so little noise that no delta is left for the overflow
            overflown.append(z)
            found[z] = math.inf
        return found[z]

    quick = lambda e: quick_epsilons(e, np.array([rounds]), delta)[0][0]
    try:
        z = smallest("jfl.calibrate", lambda z: reached(z, quick), target)
    except ArgumentError:
        if len(overflown) > 1:  # no noise leaves delta for the overflow
            _fail_for_capacity(plan, target, 0.0, rounds, delta)
        raise
    if tightly:
        z = smallest_refined(
            "jfl.calibrate",
            lambda z, sizes: reached(z, lambda e: tightest(release_of(e, rounds), delta, sizes)[0]),
            target,
            z,
        )
    # only the overflow, not the target, excludes less noise
    if z > LEAST and max(overflown) > z * (1 - NEAR) and found[z] < target * (1 - NEAR):
        _fail_for_capacity(plan, target, found[z], rounds, delta)
    return z


def _rounds(plan, entry, target, delta):
    overflown = [10**18]  # numbers of rounds without an epsilon

    def quickly(times):
        try:
            return quick_epsilons(entry, np.array([times]), delta)[0][0]
        except Overflow:
            return math.inf

    def tightly(times, sizes):
        try:
            return tightest(release_of(entry, times), delta, sizes)[0]
        except Overflow:
            overflown.append(times)
            return math.inf

    most = largest("jfl.calibrate", quickly, tightly, target)
    if min(overflown) <= most * (1 + NEAR) + 1:
        value = tightly(most, FINE) if most else 0.0
        if value < target * (1 - NEAR):
            _fail_for_capacity(plan, target, value, most + 1, delta)
    return most


def _fail_for_capacity(plan, target, reached, rounds, delta):
    """Say which capacity carries the target: draws that overflow cost 1 + e^epsilon times their
    probability of delta."""
    remedies, affordable = [], delta / 100 / rounds * math.exp(-min(target, 600.0)) / 2
    sampler = plan.sampler
    if attendance(sampler).overflow > 0:
        lost = lambda capacity: attendance(dataclasses.replace(sampler, capacity=capacity)).overflow
        capacities = range(sampler.capacity, getattr(sampler, "at_once", sampler.clients))
        number = bisect.bisect_left(capacities, -affordable, key=lambda c: -lost(c))
        remedies.append(f"the sampler capacity={sampler.capacity + number}")
    if any(r.batches.scheme == "poisson" for r in plan.algorithm.releases):
        rows = int(np.max(np.asarray(plan.fed.size)))
        remedies.append(f"jfl.batches.poisson capacity={rows}, the rows of the largest client")
    if not remedies:
        checks.fail(
            "jfl.calibrate",
            "an epsilon that computed noise can have: its largest values are finite, which costs "
            "delta",
            f"epsilon={target:g}, of which {reached:.4g} is the most at delta={delta:g}",
            "Lower epsilon or raise delta.",
        )
    checks.fail(
        "jfl.calibrate",
        "a capacity whose overflow leaves delta for the target",
        f"epsilon={target:g}, of which {reached:.4g} is the most that this capacity carries",
        f"Give {' and '.join(remedies)}, lower "
        f"epsilon, or use a sampler without overflow, such as without_replacement.",
    )
