"""Time correlated noise: a round of clients, the noise of a round, and finding a strategy.

    JFL_DATA_DIR=... python -m experiments.bench.correlated [--repeats 15] [--out FILE]

The shape of W2 (MLP 784-200-10, cohort 20, 50 steps of 20 rows) with noise for clients, added once
per round.  Variants run alternately in one process; `ratio` is to independent noise in the same
turn.  The goals are: the noise of 4 inverse bands takes at most 1.3 x 4 times as long as
independent noise, a round with a BLT of 3 buffers at most 1.2 times as long as one with independent
noise, and 16 bands for 2,000 rounds are found within 5 s.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from jfl.kernels.normals import normals

import jfl
from jfl.core.random_streams import Stream
from jfl.privacy.mechanisms import correlated

from . import timing

RESULTS = timing.RESULTS / "correlated.json"
ROUNDS = 200
BLOCK = 50  # draws of noise in a timed call, so that the overhead of a call is negligible


def strategies() -> dict:
    """Return the noise of each variant."""
    named = jfl.strategies
    return {
        "independent": None,
        "4 inverse bands": named.inverse_banded(ROUNDS, 4),
        "16 inverse bands": named.inverse_banded(ROUNDS, 16),
        "4 bands": named.banded_toeplitz(ROUNDS, 4),
        "16 bands": named.banded_toeplitz(ROUNDS, 16),
        "BLT, 3 buffers": named.blt(ROUNDS, 3),
        "tree": named.tree(ROUNDS),
    }


def make_plan(fed, strategy):
    noise = jfl.gaussian(1.0) if strategy is None else jfl.correlated(1.0, strategy)
    task = jfl.models.mlp(fed, (200,))
    alg = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=0.1, steps=50, batch=jfl.batches.without_replacement(20)
    )
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(20))
    return jfl.plan(fed, task, alg, jfl.sampling.without_replacement(100, 20), release=release)


def noise_of(plan):
    """Return a function that draws the noise of many rounds, and nothing else."""
    (stage,) = [s for s in plan.release.stages if s.role == "noise"]
    like = jax.eval_shape(plan.task.init, jax.random.key(0))
    if stage.strategy is None:  # the same code, without correlation
        stage = jfl.correlated(1.0, jfl.strategies.identity(ROUNDS))
    empty = correlated.initial_buffers(stage.strategy, like) if stage.strategy.memory else ()

    @jax.jit
    def many(key, stage, state):
        key = jax.random.fold_in(key, Stream.RELEASE)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        fresh = lambda index: normals(jax.random.fold_in(key, index), zeros, stage.generator)

        def one(round_, carry):
            total, state = carry
            drawn, state = correlated.mix(stage.strategy, fresh, round_ + 40, state)
            return jax.tree.map(jnp.add, total, drawn), state

        return jax.lax.fori_loop(0, BLOCK, one, (zeros, state))

    return lambda: jax.block_until_ready(many(jax.random.key(0), stage, empty))


def found_in(repeats: int) -> list[dict]:
    """Return rows with the seconds to find the coefficients of strategies."""
    named = jfl.strategies
    makes = {
        "16 bands, 2,000 rounds": lambda: named.banded_toeplitz(2000, 16),
        "16 inverse bands, 2,000 rounds, 10 participations": lambda: named.inverse_banded(
            2000, 16, participations=10, separation=200
        ),
        "BLT of 3, 2,000 rounds, 10 participations": lambda: named.blt(
            2000, 3, participations=10, separation=200
        ),
        "dense, 300 rounds": lambda: named.dense(300),
    }
    rows = []
    for name, make in makes.items():
        seconds = []
        for _ in range(repeats):
            begun = time.perf_counter()
            make()
            seconds.append(time.perf_counter() - begun)
        rows.append(dict(what="strategy", variant=name, seconds=statistics.median(seconds)))
    return rows


def main():
    args = timing.arguments(__doc__, RESULTS, repeats=15)
    fed = jfl.federate(jfl.datasets.mnist(), jfl.partition.iid(100))
    plans = {name: make_plan(fed, strategy) for name, strategy in strategies().items()}
    rows = []
    for what, runs, each in (
        ("round", {n: timing.two_rounds(p) for n, p in plans.items()}, 2),
        ("noise of a round", {n: noise_of(p) for n, p in plans.items()}, BLOCK),
    ):
        for name, one in timing.alternate(runs, args.repeats).items():
            rows.append(
                dict(what=what, variant=name, seconds=one["seconds"] / each, ratio=one["ratio"])
            )
            print(f"{what:<18} {name:<18} {rows[-1]['seconds']:.3g} s  {one['ratio']:.2f}")
    rows += found_in(3)
    for row in rows[-4:]:
        print(f"{row['what']:<18} {row['variant']:<18} {row['seconds']:.3g} s")
    timing.save(args.out, rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
