"""Settings for a private run: a search with Optuna, and the choice whose price is stated.

    pip install -e ".[tune]"
    python -m experiments.examples.tuning

`jfl.ask_tell` lets a tuner look at every run that it asks for.  That search is in no epsilon: the
guarantee that is printed for the best setting covers one run whose settings were given, not the
search that found them.  Two ways are honest: to search on rows that are public, as `search` does
here, or to let `jfl.choose` draw and train the settings, as `priced` does, whose guarantee holds
for the choice and costs two to four times the epsilon of one run.
"""

import argparse

import jax

import jfl
from jfl.privacy.accountants import choosing

CLIENTS = 20
RATES = (0.1, 0.3, 1.0, 3.0)
DELTA = 1e-3  # of one client among so few; a larger federation takes a smaller one


def plan_of(fed: jfl.Federation, lr: float) -> jfl.Plan:
    """DP-FedAvg at client level: the server clips and adds noise."""
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=lr, steps=5)
    noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(2.0), jfl.divide(CLIENTS))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), release=noise)


def rows(part: int) -> jfl.Federation:
    """Half of the digits, divided among clients: 0 for public ones, 1 for those of the clients."""
    digits = jfl.datasets.digits()
    half = len(digits.x) // 2
    own = slice(0, half) if part == 0 else slice(half, None)
    return jfl.federate(
        digits._replace(x=digits.x[own], y=digits.y[own]), jfl.partition.iid(CLIENTS)
    )


def search(rounds: int = 10, trials: int = 12) -> float:
    """Return the learning rate that Optuna finds on public rows. No epsilon covers the search."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    public = rows(0)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    space = dict(lr=optuna.distributions.FloatDistribution(0.03, 10, log=True))
    jfl.ask_tell(
        lambda lr: plan_of(public, lr), study, space, rounds=rounds, trials=trials, at_once=4
    )
    return study.best_params["lr"]


def priced(rounds: int = 10, runs: int = 5) -> jfl.Choice:
    """One of `RATES`, chosen on the clients' own rows: `guarantee` is that of the choice."""
    private = rows(1)
    return jfl.choose(
        lambda lr: plan_of(private, lr),
        rounds=rounds,
        runs=choosing.logarithmic(runs),
        delta=DELTA,
        view="third_party",
        lr=RATES,
        seed=7,
    )


def main() -> None:
    """Print what both find, and what is known of the privacy of each."""
    parser = argparse.ArgumentParser(description="settings for a private run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=12, help="settings that Optuna tries")
    args = parser.parse_args()
    lr = search(args.rounds, args.trials)
    plan = plan_of(rows(1), lr)
    out = jfl.simulate(jax.random.key(1), plan, args.rounds)
    accuracy = out.metrics.accuracy
    assert accuracy is not None  # of a task that predicts
    one = jfl.guarantee(plan, args.rounds, DELTA, view="third_party")
    print(f"searched on public rows: lr = {lr:.3g}, accuracy {accuracy[-1]:.3f}")
    print(f"  one run with that lr: epsilon = {one.epsilon:.2f}; the search is in no epsilon")
    best = priced(args.rounds)
    if best.setting is None:
        print("chosen on private rows: no run was drawn, as happens now and then")
    else:
        print(f"chosen on private rows: lr = {best.setting['lr']:.3g}, accuracy {best.score:.3f}")
    print(f"  epsilon = {best.guarantee.epsilon:.2f}, the choice included")


if __name__ == "__main__":
    main()
