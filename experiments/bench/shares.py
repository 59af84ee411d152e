"""Time a round with noise in shares, and with cohorts that have few slots.

    JFL_DATA_DIR=... python -m experiments.bench.shares [--repeats 9] [--out FILE]

The shape of W2 (MLP 784-200-10, cohort 20 of 100, 50 steps of 20 rows), client level.  Variants
run alternately in one process; `ratio` is to the first of the same turn.
"""

import jfl

from . import timing

RESULTS = timing.RESULTS / "shares.json"
CLIENTS, COHORT = 100, 20


def parts(fed):
    task = jfl.models.mlp(fed, (200,))
    average = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=0.1, steps=50, batch=jfl.batches.without_replacement(20)
    )
    return fed, task, average


def of_noise(fed) -> dict:
    """Return plans with noise of the server, and with shares of the clients."""
    made = parts(fed)
    drawn = jfl.sampling.without_replacement(CLIENTS, COHORT)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(COHORT))
    plans = {"gaussian of the server": jfl.plan(*made, drawn, release=chain)}
    for law, bits in (
        ("gaussian", 16),
        ("discrete_gaussian", 16),
        ("skellam", 16),
        ("skellam", 12),
    ):
        more = {} if law == "gaussian" else dict(like=made[1], bits=bits)
        pair = jfl.distributed(1.0, 1.0, COHORT, law=law, **more)
        name = f"{law} in shares" + f", {bits} bits" * (law != "gaussian")
        plans[name] = jfl.plan(*made, drawn, upload=pair.upload, release=pair.release)
    return plans


def of_cohorts(fed) -> dict:
    """Return plans with cohorts of 20 clients, fixed or on average."""
    sampling, rate = jfl.sampling, COHORT / CLIENTS
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(COHORT))
    samplers = (
        sampling.without_replacement(CLIENTS, COHORT),
        sampling.poisson(CLIENTS, rate),
        sampling.truncated_poisson(CLIENTS, rate),
        sampling.truncated_poisson(CLIENTS, rate, 29),
        sampling.random_allocation(CLIENTS, CLIENTS // COHORT),
    )
    named = {f"{s.scheme}, {s.capacity} slots": s for s in samplers}
    return {name: jfl.plan(*parts(fed), s, release=chain) for name, s in named.items()}


def main():
    args = timing.arguments(__doc__, RESULTS, repeats=9)
    fed = jfl.federate(jfl.datasets.mnist(), jfl.partition.iid(CLIENTS))
    rows = []
    for what, plans in (("noise", of_noise(fed)), ("cohort", of_cohorts(fed))):
        found = timing.alternate(
            {name: timing.two_rounds(plan) for name, plan in plans.items()}, args.repeats
        )
        for name, numbers in found.items():
            epsilons = dict(epsilon=_epsilon(plans[name])) if what == "cohort" else {}
            rows.append(
                dict(
                    what=what,
                    variant=name,
                    seconds=numbers["seconds"] / 2,
                    ratio=numbers["ratio"],
                    **epsilons,
                )
            )
            print(rows[-1], flush=True)
    timing.save(args.out, rows, repeats=args.repeats)


def _epsilon(plan):
    """Return epsilon for 100 rounds at delta = 1e-5, and the adjacency that the sampler implies."""
    found = jfl.guarantee(plan, 100, 1e-5, unit="client", view="third_party")
    return dict(adjacency=found.adjacency, value=found.epsilon)


if __name__ == "__main__":
    main()
