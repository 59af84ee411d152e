"""Build plans of Talaei, Izadi, 2024, and account for their noise.

The scenarios are configs. A config whose `impact` and `group_noise` hold the groups twice is of
scenario 4, in which clients swap their quality: the second half counts from round SWAP.  Every seed
has a separate split, start and noise.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfl.core.records import Guarantee
from jfl.engine.simulate import simulate
from jfl.privacy import guarantees
from jfl.privacy.guarantees import Overflow
from jfl.runs import build as assemble
from jfl.runs import guarantee_rows, record
from jfl.runs.config import Config
from jfl.runs.record import Stopwatch

from ...harness.programs import Plans
from .. import as_printed
from . import theory as paper

SWAP = paper.SCENARIOS[4].swap_round
LOSS = "test loss"
VIEWS = ("server", "third_party")
SPLITS = dict(labels=dict(partition="labels", classes_per_client=2), iid=dict(partition="iid"))
COMMON = dict(
    algorithm="padpfl",
    dataset="mnist",
    model="mlp",
    hidden=(64,),
    batch_sampler="full",
    steps=5,
    mu=0.1,
    lr=paper.LR,
    rounds=paper.ROUNDS,
    delta=paper.DELTA,
)


def clip_of(hidden: int) -> float:
    """Return a public bound on the weights of 784-hidden-10.

    It is 1.5 times the norm with which they are expected to start.
    """
    return round(1.5 * (hidden + 10) ** 0.5, 1)


def scenario(number: int) -> dict:
    """Return the config fields of a scenario's groups."""
    found = paper.SCENARIOS[number]
    stages = (0,) if found.swap_round is None else (0, found.swap_round)
    noise = [paper.DENSITY[q] for t in stages for q in paper.qualities_at(found, t)]
    groups = tuple(g.clients for g in found.groups)
    return dict(
        groups=groups,
        clients=sum(groups),
        group_rows=tuple(g.rows for g in found.groups),
        group_noise=tuple(noise) if any(noise) else (),
    )


def impact(number: int, assignment: str) -> dict:
    """Return the config fields of an assignment of impact factors."""
    found = paper.SCENARIOS[number]
    stages = (0,) if found.swap_round is None else (0, found.swap_round)
    return dict(
        impact=tuple(float(r) for t in stages for r in paper.ratios_at(found, assignment, t))
    )


def stages(config) -> list:
    """Return (config, rounds) of each stage; noise is computed for all rounds of the run."""
    groups = len(config.groups)
    if len(config.impact) <= groups and len(config.group_noise) <= groups:
        return [(config, config.rounds)]
    swap: Any = SWAP
    cut = min(swap, config.rounds - 1)
    halves = lambda name, i: getattr(config, name)[i * groups : (i + 1) * groups]
    return [
        (
            dataclasses.replace(
                config, impact=halves("impact", i), group_noise=halves("group_noise", i)
            ),
            rounds,
        )
        for i, rounds in enumerate((cut, config.rounds - cut))
    ]


@functools.lru_cache(maxsize=32)
def _owned(config):
    """Return a federation without rows that nobody owns, since the program reads all rows."""
    fed = assemble.federation(config)
    index, size = np.asarray(fed.index), np.asarray(fed.size)
    held = np.arange(index.shape[1]) < size[:, None]
    rows, place = np.unique(index[held], return_inverse=True)
    index = np.zeros_like(index)
    index[held] = place
    return dataclasses.replace(
        fed,
        x=jnp.asarray(np.asarray(fed.x)[rows]),
        y=jnp.asarray(np.asarray(fed.y)[rows]),
        index=jnp.asarray(index),
    )


def build(config):
    """Return the plan of one stage, as `jfl.runs.build.build` makes it, on the owned rows."""
    plan, _ = assemble.build(config)
    return dataclasses.replace(
        plan, fed=_owned(Config(**{n: getattr(config, n) for n in assemble.DATA}))
    )


def proved(plans, view: str, delta: float, **options) -> Guarantee:
    """Return the guarantee of (plan, rounds) pairs that follow each other.

    Weights must not change within a stage.  The noise that the paper prints can be so small that
    floating-point normals miss more than delta of its tails; then nothing is proved.
    """
    try:
        if len(plans) == 1:
            plan, rounds = plans[0]
            return guarantees.guarantee(plan, rounds, delta, view=view, **options)
        return guarantees.guarantee(plans, delta=delta, view=view, **options)
    except Overflow:
        return Guarantee(math.inf, delta, "client", "replace_one", view, "none", "none")


def privacy(plans, config) -> list:
    """Return what is proved for both views, and the paper's claim for a run as printed."""
    found = [guarantee_rows.as_row(proved(plans, view, config.delta)) for view in VIEWS]
    if config.mode == "as_printed":
        found += [
            guarantee_rows.as_row(g)
            for g in as_printed.claims(plans[0][0], config.rounds, config.delta)
        ]
    return found


def of_seed(config):
    """Build a plan with a separate split for each seed."""
    return build(dataclasses.replace(config, partition_seed=config.seed)), config


def swapped(config, axes, out):
    """Run like `jfl.runs.sweep.sweep` over seeds with separate splits, in two stages."""
    stopwatch, parts = Stopwatch(), stages(config)
    plans = {
        seed: [(of_seed(dataclasses.replace(part, seed=seed))[0], rounds) for part, rounds in parts]
        for seed in axes["seed"]
    }
    histories = {
        seed: one_by_one(jax.random.key(seed), plans[seed], config.evaluate_every or 1)
        for seed in plans
    }
    seconds, compiled = (s / len(plans) for s in stopwatch.read())
    guarantees = privacy(next(iter(plans.values())), config)
    entries = [
        record.RunRecord(
            config.algorithm,
            dataclasses.asdict(config),
            seed,
            history,
            seconds,
            compiled,
            guarantees,
            trace={LOSS: history["loss"], "round": history["round"]},
        ).entry()
        for seed, history in histories.items()
    ]
    out.mkdir(parents=True, exist_ok=True)
    record.save_summary(out, entries)
    return entries


def whole_run(plan, config):
    return privacy([(plan, config.rounds)], config)


RUNS = Plans(
    of_seed,
    True,
    whole_run,
    epsilons=None,
    partition=None,
    trace=((LOSS, "loss"), ("round", "round")),
)


def one_by_one(key, plans, evaluate_every):
    """Return the metrics of plans that each continue the one before, as lists."""
    run, found = None, {}
    for plan, rounds in plans:
        out = simulate(key, plan, rounds, evaluate_every=evaluate_every, start=run)
        run = out.run
        for name, values in record.lists(out.metrics).items():
            found[name] = values if name not in found or values is None else found[name] + values
    return found


def budgets(config) -> dict:
    """Return the proved epsilons of a line's noise in both views."""
    names = ("ε server", "ε third party")
    if config.epsilon is None:
        return dict.fromkeys(names)
    plans = [(build(part), rounds) for part, rounds in stages(config)]
    return dict(zip(names, (proved(plans, view, config.delta).epsilon for view in VIEWS)))
