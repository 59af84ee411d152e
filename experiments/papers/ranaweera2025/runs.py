"""Define what the experiments on Ranaweera et al., 2025, need beyond `harness.runner`."""

import time

import jax
import numpy as np

import jfl
from jfl.privacy.accountants.tightest import tightest
from jfl.privacy.guarantees import Overflow
from jfl.privacy.ledger import entries
from jfl.privacy.ledger.entry import release_of
from jfl.runs import train
from jfl.runs.config import the_unit, the_view

from ...harness.programs import CURVE, Plans, drawn, guarantees
from ...harness.verdicts import NOT_RUN, Comparison, Evidence, difference, known

TRUE = "ε as if no batch overflowed"  # heading of a column


def true_epsilon(config) -> dict:
    """Return the epsilon of a line as if no batch overflowed and normals were unbounded.

    It is None for a line without noise.  If the noise is so small that this epsilon is large, the
    tiny probability that a Poisson batch overflows (below 1e-12 in a run) takes all of delta, and
    nothing is proved.
    """
    if (unit := the_unit(config)) is None:
        return {TRUE: None}
    plan, config = drawn(config)
    view = the_view(config)
    found = entries.entries(plan, config.rounds)
    entry = next((e for e in found if (e.unit, e.view) == (unit, view)), None)
    if entry is None:
        return {TRUE: None}
    entry = entry._replace(overflow=0.0, normals=0.0)
    return {TRUE: tightest(release_of(entry, config.rounds), config.delta)[0]}


def epsilons(plan, config, rounds):
    """Return None, as if nothing were proved, if overflow takes all of delta."""
    try:
        return train.epsilons(plan, config, rounds)
    except Overflow:
        return None


RUNS = Plans(
    drawn,
    seeded=True,
    privacy=guarantees,
    epsilons=epsilons,
    trace=CURVE,
)


def step_seconds(base: dict, level: str) -> float:
    """Return the seconds of one local step of one client with the CNN, on this machine.

    Rows are random, as time does not depend on them: two clients take a few steps, twice, and the
    second time counts.  At sample level each step has wavelet noise, like most lines.
    """
    steps, shape = 4, (32, 32, 3) if base["dataset"] == "cifar10" else (28, 28)
    draw = np.random.default_rng(0)
    rows = lambda n: (draw.random((n, *shape), np.float32), draw.integers(0, 10, n))
    fed = jfl.federate([rows(base["rows_per_client"])] * 2, test=rows(10))
    task = jfl.models.cnn(fed)
    like = jax.eval_shape(task.init, jax.random.key(0))
    clip, *noise = jfl.wavelet.published("R1", 1.0, 1.0, jfl.bands.per_layer(like), unsound=True)
    chain = jfl.chain(clip, jfl.total(), *noise, jfl.divide(base["batch"]))
    samples = level == "sample"
    algorithm = jfl.algorithms.fedavg(
        jfl.private_grad(task.loss, chain) if samples else jfl.grad(task.loss),
        lr=base["lr"],
        steps=steps,
        batch=getattr(jfl.batches, base["batch_sampler"])(base["batch"]),
    )
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(2))
    for key in (0, 1):
        begun = time.perf_counter()
        jax.block_until_ready(jfl.simulate(jax.random.key(key), plan, 1, evaluate_every=1))
    return (time.perf_counter() - begun) / (2 * steps)


# --- claims


def reproduces(triples):
    """Return a check that matched noise has more than half of the published gain.

    The triples are (published, matched, vanilla).
    """

    def check(results):
        run = [t for t in triples if not known(results, *t)]
        gains = [
            tuple(difference(results, n, vanilla) for n in (first, matched))
            for first, matched, vanilla in run
        ]
        words = ", ".join(f"{b.mean:+.3f} of {a.mean:+.3f}" for a, b in gains)
        missing = "" if len(run) == len(triples) else f"{len(run)} of {len(triples)} run"
        if any(a.mean <= 0 for a, _ in gains):
            missing = "a line without gain, of which nothing can be a share"
        return Evidence(
            tuple(Comparison(b - 0.5 * a, low=0.0) for a, b in gains if a.mean > 0),
            missing,
            seen=f"{words}; more than 0.5 of it by",
        )

    return check


def understated(names):
    """Return a check that more is proved than claimed for each line.

    If nothing is proved, there is nothing to compare.
    """

    def check(results):
        run = [results[n] for n in names if n in results and results[n].claimed is not None]
        shown = lambda e: "nothing" if e is None else f"{e:.3g}"
        seen = ", ".join(f"claimed {r.claimed:.3g}, proved {shown(r.proved)}" for r in run)
        if any(r.proved is not None and r.proved <= r.claimed for r in run):
            return Evidence(exact=False, seen=seen)
        if len(run) < len(names):
            return Evidence(seen=seen, missing=NOT_RUN)
        if any(r.proved is None for r in run):
            return Evidence(seen=seen, missing="nothing is proved for noise in float32")
        return Evidence(exact=True, seen=seen)

    return check
