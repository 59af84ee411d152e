"""Compare audited with proved epsilons: small plans of each kind, with worst-case canaries.

    python -m experiments.bench.audits [--trials 200000] [--out FILE]

Each plan has a row with the audited epsilon at 95 % confidence, the proved epsilon, the claimed one
if the noise is a paper's, the measured distance in standard deviations, and processor seconds.

    python -m experiments.bench.audits --trainings [--out FILE]
    python -m experiments.bench.audits --one-run [--out FILE]

The first of these audits trainings on digits, by the observer; the second inserts many canaries
into one run.
"""

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jfl

from ..papers import as_printed
from . import timing

RESULTS = timing.RESULTS / "audits.json"
DELTA = 1e-2
TRAININGS = 3000  # runs of each side
CLIENTS, ROWS, FEATURES = 4, 8, 3
batches, sampling = jfl.batches, jfl.sampling


def squared(params, x, y):
    return 0.5 * (x @ params["w"] + params["b"] - y) ** 2


def start(key):
    return {"b": jnp.zeros(()), "w": jnp.zeros(FEATURES)}


def chain(z, *clip, divide=3.0):
    return jfl.chain(*clip or (jfl.clip_l2(0.8),), jfl.total(), jfl.gaussian(z), jfl.divide(divide))


def rows():
    """Return 32 rows in four equal parts: an audit puts its own into their place."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(CLIENTS * ROWS, FEATURES)), rng.normal(size=CLIENTS * ROWS)
    one = x.astype(np.float32), y.astype(np.float32)
    own = lambda labels: np.split(np.arange(len(labels)), CLIENTS)
    return jfl.datasets.arrays(*one, *one, classes=0), own


class Kinds:
    """Makers of plans on one federation."""

    def __init__(self):
        self.fed = jfl.federate(*rows())
        self.task = jfl.task(start, squared)

    def record(self, z, batch, steps=1, name="fedavg", sampler=None):
        grad = jfl.private_grad(squared, chain(z))
        algorithm = getattr(jfl.algorithms, name)(grad, steps=steps, lr=0.3, batch=batch)
        return jfl.plan(self.fed, self.task, algorithm, sampler or sampling.full(CLIENTS))

    def client(self, sampler=None, name="fedavg", **chains):
        algorithm = getattr(jfl.algorithms, name)(
            jfl.grad(squared), steps=1, lr=0.1, batch=batches.full()
        )
        return jfl.plan(self.fed, self.task, algorithm, sampler or sampling.full(CLIENTS), **chains)

    def published(self, z):
        made = jfl.bands.flat(start(None))
        clip, noise = jfl.wavelet.published("R1", 1.0, z, made, unsound=True)
        return self.client(release=jfl.chain(clip, jfl.total(), noise, jfl.divide(CLIENTS)))


def cases():
    """Return name -> plan, rounds, what is asked of `jfl.audit`."""
    of, share = Kinds(), sampling.without_replacement(CLIENTS, 2)
    shape = jfl.wavelet.ellipsoid(jfl.bands.flat(start(None)))
    shaped = jfl.wavelet.clip_ellipsoid(0.5, shape), jfl.total(), jfl.gaussian(1.0, shape=shape)
    adaptive = jfl.clip_adaptive(1.0, indicator=1.0, count=float(CLIENTS))
    upload = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.0))
    server, third_party = dict(view="server"), dict(view="third_party")
    return {
        "record, full batch": (of.record(1.0, batches.full()), 1, {}),
        "record, full batch, 3 rounds of 2 steps": (of.record(2.0, batches.full(), 2), 3, {}),
        "record, Poisson 1/2": (of.record(1.0, batches.poisson(4)), 1, {}),
        "record, Poisson 1/2, 4 rounds": (of.record(2.0, batches.poisson(4)), 4, {}),
        "record, 4 of 8": (of.record(0.7, batches.without_replacement(4)), 1, {}),
        "record, 4 of 8, 4 rounds": (of.record(1.0, batches.without_replacement(4)), 4, {}),
        "record, 4 of 8 with replacement": (of.record(1.0, batches.with_replacement(4)), 1, {}),
        "record, epochs of 2 steps, 2 rounds": (of.record(1.0, batches.epochs(4), 2), 2, {}),
        "record, SCAFFOLD, 3 rounds of 2 steps": (
            of.record(2.0, batches.full(), 2, "scaffold"),
            3,
            {},
        ),
        "record, third party, cohorts of 2": (
            of.record(1.0, batches.full(), sampler=share),
            1,
            third_party,
        ),
        "client": (of.client(release=chain(1.0)), 1, {}),
        "client, SCAFFOLD": (of.client(name="scaffold", release=chain(1.0)), 1, {}),
        "client, cohorts of 2": (of.client(share, release=chain(0.7)), 1, {}),
        "client, Poisson 1/2": (
            of.client(sampling.poisson(CLIENTS, 0.5), release=chain(1.0)),
            1,
            {},
        ),
        "client, clip per layer": (
            of.client(release=chain(1.0, jfl.clip_per_layer((0.5, 0.8)))),
            1,
            {},
        ),
        "client, adaptive clip": (of.client(release=chain(1.0, adaptive)), 1, {}),
        "client, shaped noise": (of.client(release=jfl.chain(*shaped, jfl.divide(CLIENTS))), 1, {}),
        "client, wavelet noise as printed": (of.published(1.0), 1, {}),
        "upload, server": (of.client(upload=upload), 1, server),
        "upload, third party": (of.client(upload=upload), 1, third_party),
    }


def digits(clients):
    fed = jfl.federate(jfl.datasets.digits(), jfl.partition.iid(clients))
    return fed, jfl.models.logistic(fed)


def of_clients(clients, z):
    """Return noise on the aggregate of logistic models of ten local steps."""
    fed, task = digits(clients)
    fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=10, lr=0.5)
    release = chain(z, jfl.clip_l2(1.0), divide=float(clients))
    return jfl.plan(fed, task, fedavg, sampling.full(clients), release=release)


def of_rows(clients, z):
    """Return noise in each client's steps, on half of its rows."""
    fed, task = digits(clients)
    half = float(fed.size.min()) / 2
    grad = jfl.private_grad(task.loss, chain(z, jfl.clip_l2(1.0), divide=half))
    fedavg = jfl.algorithms.fedavg(grad, steps=2, lr=0.5, batch=batches.poisson(half))
    return jfl.plan(fed, task, fedavg, sampling.full(clients))


def small_plans(trials):
    """Yield a row and a report for each of `cases`."""
    for name, (plan, rounds, asked) in cases().items():
        found = jfl.audit(plan, rounds, trials, DELTA, **asked)
        claimed = as_printed.claimed_beside(plan, rounds, found)
        refuted = claimed is not None and found.epsilon > claimed
        row = dict(case=name, rounds=rounds, runs=2 * trials)
        yield row, found._replace(claimed=claimed, refuted=refuted)


def trainings():
    """Yield the rows and reports of `--trainings`."""
    for unit, plan in {"client": of_clients(10, 0.5), "record": of_rows(10, 1.0)}.items():
        for canary in ("direction", "mislabelled", "blank"):
            for sees in ("releases", "models", "final model"):
                found = jfl.audit(plan, 5, TRAININGS, DELTA, canary=canary, sees=sees)
                yield dict(case=unit, rounds=5, runs=2 * TRAININGS), found


def one_run():
    """Yield those of `--one-run`: at a delta that does not spend the level of many canaries."""
    for unit, plan in {"client": of_clients(100, 0.5), "record": of_rows(10, 1.0)}.items():
        for canary in ("direction", "mislabelled"):
            found = jfl.audit_one_run(plan, 5, 100, 1e-5, canary=canary)
            runs = 1 + (found.learning_runs or 0)
            yield dict(case=unit, rounds=5, runs=runs, canaries=100, estimate=found.estimate), found


def main():
    parser = timing.parser(__doc__)
    parser.add_argument("--trials", type=int, default=200_000)
    parser.add_argument("--trainings", action="store_true")
    parser.add_argument("--one-run", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    reports, out = small_plans(args.trials), RESULTS
    if args.trainings:
        reports, out = trainings(), RESULTS.with_name("audits_of_trainings.json")
    elif args.one_run:
        reports, out = one_run(), RESULTS.with_name("audits_in_one_run.json")
    rows, begun, before = [], time.perf_counter(), time.process_time()
    for row, found in reports:
        spent, before = time.process_time() - before, time.process_time()
        assert found.proved is not None
        reported = ("claimed", "refuted", "contradicted", "mu", "unit", "view", "adjacency")
        reported += ("delta", "canary")
        row |= {name: getattr(found, name) for name in reported} | dict(
            sees=found.adversary,
            audited=found.epsilon,
            proved=found.proved.epsilon,
            method=found.proved.method,
            ratio=found.epsilon / found.proved.epsilon,
            processor_seconds=spent,
        )
        rows.append(row)
        claim = f", claimed {found.claimed:.3g}" if found.claimed is not None else ""
        print(
            f"{row['case']:40} {str(row['canary'])[:30]:30} {str(row['sees'])[:36]:36} "
            f"audited {row['audited']:6.3f} of {row['proved']:6.3f} ({row['ratio']:.2f}), "
            f"mu {row['mu']:.3f}{claim}",
            flush=True,
        )
    timing.save(args.out or out, rows, confidence=0.95, seconds=time.perf_counter() - begun)


if __name__ == "__main__":
    main()
