"""In place of programs, where what is kept, told or accounted of their runs is tested."""

import dataclasses
import zlib
from types import SimpleNamespace

import numpy as np

import jfl

SERIES = ("loss", "train_loss", "clip_fraction", "update_norm", "cohort")


def simulate(key, plan, rounds, *, start, **how):
    """What `jfl.simulate` gives of rounds that end in one evaluation, without a program: the state
    goes on by its rounds alone."""
    run = dataclasses.replace(start, round=start.round + rounds)
    one = np.ones(1)
    metrics = jfl.Metrics(
        round=np.array([int(run.round)]),
        loss=one,
        accuracy=one / (1 + int(run.round)),
        client_accuracy=None,
        train_loss=one,
        clip_fraction=one,
        update_norm=one,
        cohort=one,
    )
    return SimpleNamespace(run=run, metrics=metrics)


def compute(block, *memory, **how):
    """What `jfl.runs.sweep.compute` gives, without a program.

    The numbers of a run follow from its config.  It fails at a huge rate, and in one of three seeds
    where a cohort may be empty.
    """
    return [_measured(config) for config, *_ in block.points]


def _measured(config):
    every = config.evaluate_every or 1
    rounds = sorted({*range(every, config.rounds + 1, every), config.rounds})
    own = zlib.crc32(repr(config).encode()) / 2**32  # no two configs have the same numbers
    accuracy = [0.98 - 0.9 / (1 + config.lr + r) + 0.01 * own for r in rounds]
    empty = config.sampler == "poisson" and config.seed % 3 == 0
    health = dict(nonfinite=int(config.lr > 1e6), overflow=0, empty_cohort=int(empty))
    return dict(
        seconds=0.1,
        compile=0.05,
        health=health | dict(nonfinite_rows=0),
        history=dict(round=rounds, accuracy=accuracy)
        | {name: [1 - a for a in accuracy] for name in SERIES},
    )
