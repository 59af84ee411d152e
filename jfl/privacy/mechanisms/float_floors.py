"""Clip norms and noise that change from round to round, in every round that will run: never below
what float32 holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core import checks
from ...core.aliases import Array
from ...core.records import Fn, Plan
from . import correlated
from .stages import FLOOR

BLOCK = 2**16  # rounds evaluated at once
LAST = 2**31 - 1  # of the clock


def lasting(where: str, plan: Plan, rounds: int, first: int = 0) -> None:
    """Refuse a plan in which a function of the round falls below the floor of clip norms and noise,
    or whose correlated noise ends before its rounds do.

    Constants are checked when a stage is made.  Below the floor squares of norms underflow: a clip
    would bound nothing, though the noise follows it down.  Traced functions pass: the program makes
    nan of such a value, and Health stops it.

    Args:
        where: who asks, for the message.
        plan: whose release, upload and private gradients are looked at.
        rounds: how many rounds will run.
        first: the number of the first of them.

    Raises:
        ValueError: with the first round in which a value is below 1e-15 or not finite.

    Example:
        >>> import jfl
        >>> falls = jfl.schedules.exponential(
        ...     1.0, 1e-3, 10
        ... )  # by 1000 in 10 rounds: 1e-15 in round 50
        >>> [bool(v) for v in (_values(falls, jnp.array([49, 51])) >= FLOOR)]
        [True, False]
    """
    for mechanism in (plan.upload, plan.release):
        correlated.covers(where, mechanism, first + rounds)
    of_clients = [("private_grad", r.mechanism) for r in plan.algorithm.all_releases]
    for site, mechanism in (("release", plan.release), ("upload", plan.upload), *of_clients):
        for stage in mechanism.stages if mechanism is not None else ():
            levels = {
                name: v
                for f in (stage.bound, stage.apply)
                if f is not None
                for name, v in f.data.items()
            }
            for name, function in (levels | dict(noise=stage.noise)).items():
                if isinstance(function, Fn) and checks.is_concrete(function):
                    _function(where, f"{name} of {stage.name} in {site}", function, first, rounds)


def _function(where: str, name: str, function: Callable[..., Any], first: int, rounds: int) -> None:
    end = min(first + rounds, LAST)
    size = min(
        BLOCK, 1 << max(int(end - first) - 1, 0).bit_length()
    )  # of few sizes, for few programs
    for begin in range(first, end, size):
        sampled_rounds = np.minimum(begin + np.arange(size), end - 1).astype(np.int32)
        values = _values(function, sampled_rounds)
        if not checks.is_concrete(values):  # a closure over something traced
            return
        values = np.asarray(values, np.float64)
        holds = (values >= FLOOR) & np.isfinite(values)
        bad = np.flatnonzero(~holds.reshape(size, -1).all(1))
        if bad.size:
            got = values[bad[0]].min()
            checks.fail(
                where,
                f"{name} >= {FLOOR:g} and finite in every round",
                f"{got:g} in round {sampled_rounds[bad[0]]}",
                (
                    "Smaller ones are lost in float32: end the schedule higher, jnp.maximum(value, "
                    "1e-6), or scale the loss."
                ),
            )


@jax.jit
def _values(function: Callable[..., Any], rounds: np.ndarray) -> Array:
    return jax.vmap(lambda r: jnp.asarray(function(r), jnp.float32))(rounds)
