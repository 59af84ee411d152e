"""Compare Theorems 2, 3 and 4 of Chen et al. (2024) with runs on the problem of Theorem 1.

The rule was fixed before the runs.

    hypotheses       those that a theorem states, at the constants of the run; a number of rounds at
                     which one fails is shown, and is not judged
    above            the measured value over the bound has a mean below 1 over the seeds, with its
                     interval, at each number of rounds and noise
    below the start  the bound is below the measured value at w_0

Measured is the mean of |grad F(w_t)|^2 over t = 0, ..., T - 1 for Theorem 2 (DPNFL) and Theorem 4
(AdDPNFL), and F(w_T) - F* for Theorem 3 (AdDPNFL).  Rates are fixed.  DPNFL has 0.99 of the largest
that Theorem 2 allows.  AdDPNFL has the server of the paper, with 0.99 of the largest local rate
that Theorem 4 then allows; and usual rates, which Theorems 3 and 4 do not allow.  Each runs with
the noise of the paper's epsilon and without noise.

The hypotheses of Theorem 3 never all hold, so it cannot be checked.  Theorem 4 holds up to a
constant (`harness.theorems`).  Its proof assumes that each coordinate of a gradient is at most
G / sqrt(d), which is false here.
"""

from typing import NamedTuple

import jax
import numpy as np

from ...harness import theorems
from ...harness.verdicts import Claim, Evidence, exactly
from ..trajectories import along, objective, square_gradient
from . import theory
from .runs import start_of, worst

SERVER = dict(server_lr=0.01, beta2=0.99, adaptivity=1e-3)  # the paper's
USUAL = 1e-3  # local learning rate
BELOW = 0.99  # of the largest learning rate that a theorem allows
TWO, TWO_OURS = "Theorem 2", "Theorem 2, ours"
THREE, FOUR, FOUR_OTHER = "Theorem 3", "Theorem 4", "Theorem 4, unloosened"
DPNFL, ALLOWED_RATES, USUAL_RATES = "DPNFL", "AdDPNFL, allowed rates", "AdDPNFL, usual rates"
NOISE, NO_NOISE = "noise", "no noise"
VACUOUS = "; vacuous: it is above 2 n / r G^2 at every learning rate, and |∇F|² is below G^2"
SQUARE, GAP = "mean |∇F(w_t)|²", "F(w_T) - F*"


class Line(NamedTuple):
    """A run, with or without noise."""

    name: str
    lr: float  # of a client
    theorems: tuple  # that speak of it


class Row(NamedTuple):
    """A theorem and a run after T rounds."""

    theorem: str
    run: str
    noise: str
    rounds: int
    values: np.ndarray  # [seeds], measured
    start: float  # the same at w_0
    bound: float
    failed: tuple  # of its hypotheses


class Found(NamedTuple):
    """The results of `beyond`."""

    claims: list
    rows: list  # plain
    rates: dict


# --- learning rates


def allowed2(known):
    """Return slightly less than the largest local learning rate of Theorem 2."""
    return BELOW / (200 * known.steps * known.smoothness)


def allowed4(known):
    """Return slightly less than the largest local learning rate of Theorem 4, with SERVER."""
    reach = known.gradient_bound + SERVER["server_lr"] * known.smoothness
    most = min(1 / known.smoothness, SERVER["adaptivity"] / (10 * known.ratio * reach))
    return BELOW * most / (8 * known.steps)


# --- runs


def beside(case, line, level, multipliers, seeds, counts):
    """Run one Line, and return its Rows and constants.

    Args:
        case: the Problem.
        line: what runs.
        level: a name of its noise.
        multipliers: noise multipliers; None: no noise.
        seeds: number of seeds.
        counts: the numbers of rounds.
    """
    known = case.known if multipliers is not None else case.known._replace(noise_2=0.0)
    kind = dict(algorithm="dpnfl") if line.name == DPNFL else dict(algorithm="addpnfl", **SERVER)
    plan = case.plan(multipliers, lr=line.lr, **kind)
    every = along(plan, seeds, np.arange(1, counts[-1] + 1))  # of w_0, w_1, ...
    l2 = known.strong_convexity
    at = jax.tree.map(lambda v: v[np.array([0, *counts])], every)
    known, away = worst(plan, known, at, case.batch), start_of(every, case.best)
    gaps = objective(plan, l2, at) - case.best.value
    squares = square_gradient(plan, l2, every)
    start, rows = float(gaps[0].mean()), []
    for i, t in enumerate(counts):
        for theorem in line.theorems:
            value, failed = bound(theorem, known, t, line.lr, start, away)
            values, first = (
                (gaps[i + 1], start)
                if theorem == THREE
                else (squares[:t].mean(0), float(squares[0].mean()))
            )
            rows.append(Row(theorem, line.name, level, t, values, first, value, failed))
    return rows, known


def bound(theorem, known, rounds, lr, gap, away):
    """Return the bound of a theorem, and the hypotheses that fail."""
    if theorem == TWO_OURS:
        return float(theory.theorem2_ours(known, rounds, gap, lr)), ()
    if theorem == TWO:
        found = theory.theorem2(known, rounds, gap, lr)
    elif theorem == THREE:
        found = theory.theorem3(known, rounds, away, lr, **SERVER)
    else:
        variant = "printed" if theorem == FOUR else "unloosened"
        found = theory.theorem4_order(known, rounds, gap, lr, **SERVER, variant=variant)
    return float(found.value), tuple(found.failed)


# --- claims


def orders(rows):
    """Return in words how many orders of magnitude bounds are above the measured values."""
    far = [np.log10(r.bound / r.values.mean()) for r in rows]
    return f"10^{min(far):.1f} to 10^{max(far):.1f} times what is measured"


def is_above(rows, note="", order=False):
    """Return a check that the measured value is below the bound, at all Rows that meet the
    hypotheses.

    Args:
        rows: the rows of one theorem.
        note: a remark.
        order: whether the theorem holds up to a constant.
    """
    held = [r for r in rows if not r.failed]
    if not held:
        why = "its hypotheses fail: " + "; ".join(missed(rows))
        return lambda results: Evidence(missing=why)
    count = sum(r.bound < r.start for r in held)
    words = theorems.below_the_start(count, f"{len(held)} runs and T")
    return theorems.shares_are_below_1(
        {f"{r.noise}, T = {r.rounds}": r.values / r.bound for r in held},
        f"{orders(held)}{note}; {words}",
        up_to_a_constant=order,
    )


def missed(rows):
    return list(dict.fromkeys(f for r in rows for f in r.failed))


def unknown(rows, why):
    """Return a check that cannot be decided, with the numbers."""
    return lambda results: Evidence(missing=f"{why}; it says {orders(rows)}")


def below_start(name, rows, note=""):
    """Return the claim that a bound is informative."""
    count = sum(r.bound < r.start for r in rows)
    least = min(r.bound for r in rows)
    words = f"at {count} of {len(rows)} T; at w_0 {rows[0].start:.3g}, the least bound {least:.3g}"
    what = "the gap" if rows[0].theorem == THREE else "|∇F|²"
    return Claim(f"{name} is below {what} of the start", exactly(count > 0, words + note), "ours")


def intervals(known):
    """Return the intervals of Theorem 3 for both learning rates, in words."""
    local, server = theory.theorem3_intervals(known, SERVER["beta2"], SERVER["adaptivity"])
    shown = lambda least, most: f"[{least:.3g}, {most:.3g}]"
    need, have = 3 * known.dim**1.5 * known.steps**2, SERVER["beta2"] ** 1.5
    return (
        f"lr in {shown(*local)} and server_lr in {shown(*server)} are both not empty only if "
        f"3 d^1.5 tau^2 = {need:.3g} <= beta2^1.5 = {have:.3g}"
    )


def claims_of(rows, known):
    """Return the claims on Theorems 2, 3 and 4.

    Args:
        rows: all runs.
        known: the constants of the run of Theorem 3.
    """
    of = lambda theorem: [r for r in rows if r.theorem == theorem]
    three, failed = of(THREE), missed(of(THREE))
    allowed = [r for r in of(FOUR) if r.run == ALLOWED_RATES]
    says = " and ".join(f"{r.bound:.3g} ({r.noise})" for r in three if r.rounds == three[-1].rounds)
    never = (
        "no learning rates meet its hypotheses as they stand in our copy, which may be damaged: "
        + intervals(known)
    )
    return [
        Claim("Theorem 2 holds", is_above(of(TWO), VACUOUS)),
        below_start(TWO, of(TWO), VACUOUS),
        Claim("our bound in place of Theorem 2 holds", is_above(of(TWO_OURS)), "ours"),
        below_start(TWO_OURS, of(TWO_OURS)),
        Claim(
            "the hypotheses of Theorem 3 hold at usual rates",
            exactly(
                not failed,
                f"{len(failed)} of 5 fail: {'; '.join(failed)}; it says {says}",
            ),
            "ours",
        ),
        Claim("Theorem 3 holds", unknown(three, never)),
        below_start(THREE, three),
        Claim("Theorem 4 holds", is_above(allowed, order=True)),
        below_start(f"{FOUR} with a constant of 1", allowed),
    ]


def beyond(case, seeds, counts, quick=False) -> Found:
    """Run Theorems 2, 3 and 4, and return their claims."""
    before = worst_before(case)
    lines = (
        Line(DPNFL, allowed2(before), (TWO, TWO_OURS)),
        Line(ALLOWED_RATES, allowed4(before), (FOUR, FOUR_OTHER)),
        Line(USUAL_RATES, USUAL, (THREE, FOUR, FOUR_OTHER)),
    )
    levels = {NOISE: case.noise} if quick else {NOISE: case.noise, NO_NOISE: None}
    rows, known = [], {}
    for level, multipliers in levels.items():
        for line in lines:
            found, known[line.name, level] = beside(case, line, level, multipliers, seeds, counts)
            rows += found
    plain = [
        dict(
            theorem=r.theorem,
            run=r.run,
            noise=r.noise,
            rounds=r.rounds,
            measured=r.values.mean(),
            std=r.values.std(),
            start=r.start,
            bound=r.bound,
            fails="; ".join(r.failed) or "none",
        )
        for r in rows
    ]
    claims = claims_of(rows, known[USUAL_RATES, NOISE])
    return Found(claims, plain, {line.name: line.lr for line in lines})


def worst_before(case):
    """Return the constants with which learning rates are chosen.

    G is the bound for a model that is as far from 0 as the optimum.
    """
    square = sum(float(np.sum(np.square(v))) for v in jax.tree.leaves(case.best.params))
    more = case.known.strong_convexity * square**0.5
    return case.known._replace(gradient_bound=case.known.gradient_bound + more)
