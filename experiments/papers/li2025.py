"""DP-FedAvg (Li, Wang, Wu, Mathematics 13(3):497, 2025): its figures, and its bounds on a strongly
convex problem.

The paper prints curves and no numbers; grids, numbers of rounds, seeds and features are ours.
Lines "printed" run Algorithm 1 with its own noise, which proves nothing; lines "sound" clip every
step, and add to the model the noise that makes one round private at the same epsilon.
"""

import functools
import sys

import numpy as np

from jfl.cli import console
from jfl.report import results as results_file

from ..harness.runner import (
    CONFIRMED,
    NOT,
    UNKNOWN,
    Claim,
    Experiment,
    Line,
    close,
    main,
    standard_error,
)
from .li2025_bounds import bounds
from .li2025_plans import budgets, runs, written

MAJORITY = 12435 / 16281  # of Adult's test rows: who always says no has this accuracy
EPSILONS = (0.1, 0.5, 1.0, 5.0, 10.0)  # of one round
STEPS = dict(
    mnist=(1, 5, 10, 20, 50), adult=(1, 5, 10, 20, 32)
)  # steps * batch distinct rows of a client
SPLITS = dict(iid=dict(partition="similarity", share=1.0), noniid=dict(partition="labels"))
COMMON = dict(
    algorithm="output_perturbation",
    model="logistic",
    clients=100,
    cohort=10,
    batch_sampler="epochs",
    batch=10,
    steps=5,
    rounds=100,
    clip_norm=1.0,
    delta=1e-5,
)
DATA = dict(
    mnist=dict(
        dataset="mnist", preprocess="flatten", rows_per_client=600, lr=0.04, classes_per_client=4
    ),
    adult=dict(
        dataset="adult",
        preprocess="standardise",
        rows_per_client=325,
        lr=0.01,
        classes_per_client=1,
    ),
)
MODES = dict(printed=dict(mode="as_printed"), sound={})


# --- claims


def noise(*lines):
    """Two standard errors of the difference of two lines' means."""
    return 2 * np.sqrt(sum(standard_error(line.accuracy) ** 2 for line in lines))


def known(*names):
    """A check, of lines that were all run."""

    def wrap(check):
        missing = UNKNOWN, "lines that were not run"
        return lambda results: check(results) if all(n in results for n in names) else missing

    return wrap


def never_below(*pairs):
    """A check that the first line of each pair ends no lower than the second, beyond the noise of
    seeds."""

    @known(*(n for pair in pairs for n in pair))
    def check(results):
        mean = lambda n: results[n].accuracy.mean()
        below = [
            f"{a} {mean(a):.3f} < {b} {mean(b):.3f}"
            for a, b in pairs
            if mean(a) < mean(b) - noise(results[a], results[b])
        ]
        seen = below or [
            f"{mean(a):.3f} {'≥' if mean(a) >= mean(b) else '≈'} {mean(b):.3f}" for a, b in pairs
        ]
        return (NOT if below else CONFIRMED), ", ".join(seen)

    return check


def interior(*names):
    """A check that some line between the first and the last ends above both, beyond the noise of
    seeds."""

    @known(*names)
    def check(results):
        lines = [results[n] for n in names]
        best = max(lines, key=lambda line: line.accuracy.mean())
        holds = all(
            best.accuracy.mean() > end.accuracy.mean() + noise(best, end)
            for end in (lines[0], lines[-1])
        )
        return (CONFIRMED if holds else NOT), ", ".join(
            f"{line.accuracy.mean():.3f}" for line in lines
        )

    return check


def beats(floor, names):
    """A check that each of these lines ends above `floor`; those that were not run leave it
    open."""

    def check(results):
        poor = [n for n in names if n in results and results[n].accuracy.mean() <= floor]
        whole = all(n in results for n in names)
        return (
            NOT if poor else CONFIRMED if whole else UNKNOWN
        ), f"{len(poor)} of {len(results)} do not: {', '.join(poor) or '-'}"

    return check


def drop_is_larger(split, mode):
    """A check, of both data sets together, that Adult loses more to noise than MNIST does."""
    names = [f"{d} {split} {m}" for d in DATA for m in ("no privacy", f"{mode} ε=0.5")]

    @known(*names)
    def check(results):
        mnist, less, adult, worse = (results[n].accuracy.mean() for n in names)
        seen = f"MNIST loses {mnist - less:.3f}, Adult {adult - worse:.3f}"
        if adult <= MAJORITY + 0.005:
            return UNKNOWN, seen + ", and Adult without noise is no better than the majority class"
        margin = noise(*(results[n] for n in names))
        return (CONFIRMED if adult - worse > mnist - less + margin else NOT), seen

    return check


def best_differs(split, mode):
    """A check, of both data sets together, that each has a best number of steps that is not the
    other's.

    Among the numbers that both have: the largest is what a client has rows for, which differs
    anyway.
    """
    shared = [q for q in STEPS["mnist"] if q in STEPS["adult"]]
    name = lambda d, q: f"{d} {split} {mode} Q={q}"

    @known(*(name(d, q) for d in DATA for q in shared))
    def check(results):
        best = {d: max(shared, key=lambda q: results[name(d, q)].accuracy.mean()) for d in DATA}
        pairs = [
            (results[name(d, best[d])], results[name(d, best[o])])
            for d, o in zip(DATA, reversed(DATA))
        ]
        differ = all(a.accuracy.mean() > b.accuracy.mean() + noise(a, b) for a, b in pairs)
        return (
            CONFIRMED if differ else NOT
        ), f"MNIST Q={best['mnist']}, Adult Q={best['adult']}, of {shared}"

    return check


# --- figures


def fig2(data):
    lines = {
        f"{s} {name}": {**SPLITS[s], **changes}
        for s in SPLITS
        for name, changes in {
            "no privacy": dict(algorithm="fedavg"),
            "clipped": {},
            **{f"{m} ε={e:g}": {**MODES[m], "epsilon": e} for m in MODES for e in EPSILONS},
        }.items()
    }
    at = lambda s, m: [f"{s} {m} ε={e:g}" for e in EPSILONS]
    claims = [
        Claim(
            f"(a) accuracy does not fall as ε grows, {s}, {m}",
            never_below(*zip(at(s, m)[1:], at(s, m))),
        )
        for s in SPLITS
        for m in MODES
    ]
    if data == "mnist":
        claims += [
            Claim(
                f"(b) ε=0.5 costs at most 0.02, {s}, {m}",
                close(f"{s} no privacy", f"{s} {m} ε=0.5"),
            )
            for s in SPLITS
            for m in MODES
        ]
    claims += [
        Claim(
            f"(d) iid ends no lower than non-iid at equal ε, {m}",
            never_below(*zip(at("iid", m), at("noniid", m))),
        )
        for m in MODES
    ]
    return figure(
        f"accuracy against ε of a round, {data}",
        data,
        lines,
        claims,
        tuple(n for n in lines if n.split()[1] in ("no", "clipped") or n.endswith("ε=0.5")),
    )


def fig3(data):
    lines = {
        f"{s} {m} Q={q}": {**SPLITS[s], **MODES[m], "epsilon": 0.5, "steps": q}
        for s in SPLITS
        for m in MODES
        for q in STEPS[data]
    }
    at = lambda s, m: [f"{s} {m} Q={q}" for q in STEPS[data]]
    if data == "adult":
        claims = [
            Claim(f"(a) a Q between the extremes is best, {s}, {m}", interior(*at(s, m)))
            for s in SPLITS
            for m in MODES
        ]
    else:
        claims = [
            Claim(
                f"(b) Q=50 costs at most 0.02 against any other Q, {s}, {m}", small_harm(*at(s, m))
            )
            for s in SPLITS
            for m in MODES
        ]
    claims += [
        Claim(
            f"(c) iid ends no lower than non-iid for the same Q, {m}",
            never_below(*zip(at("iid", m), at("noniid", m))),
        )
        for m in MODES
    ]
    few = tuple(
        f"{s} {m} Q={q}" for s in SPLITS for m in MODES for q in (STEPS[data][0], STEPS[data][2])
    )
    return figure(
        f"accuracy against local steps Q at ε = 0.5 a round, {data}", data, lines, claims, few
    )


def small_harm(*names):
    """A check that the last line ends at most 0.02 below the best one."""

    @known(*names)
    def check(results):
        mean = [results[n].accuracy.mean() for n in names]
        return (CONFIRMED if max(mean) - mean[-1] <= 0.02 else NOT), ", ".join(
            f"{m:.3f}" for m in mean
        )

    return check


def figure(title, data, lines, claims, few, clock="step"):
    if data == "adult":
        claims = [
            *claims,
            Claim(f"every line beats the majority class, {MAJORITY:.4f}", beats(MAJORITY, lines)),
        ]
    return Experiment(
        title,
        {**COMMON, **DATA.get(data, {})},
        lines,
        tuple(claims),
        dict(rounds=20),
        tuple(range(5)),
        runs=runs(clock),
        columns=functools.partial(budgets, clock=clock),
        quick_lines=few,
    )


def by_round():
    lines = {
        f"{d} {s} {m}": {**DATA[d], **SPLITS[s], **changes}
        for d in DATA
        for s in SPLITS
        for m, changes in {
            "no privacy": dict(algorithm="fedavg"),
            **{f"{m} ε=0.5": {**MODES[m], "epsilon": 0.5} for m in MODES},
        }.items()
    }
    claims = [
        Claim(f"(c) noise costs Adult more than MNIST, {s}, {m}", drop_is_larger(s, m))
        for s in SPLITS
        for m in MODES
    ]
    few = tuple(n for n in lines if "noniid" not in n)
    return figure(
        "as figure 2 with learning rates that fall once a round",
        None,
        lines,
        claims,
        few,
        clock="round",
    )


def across(name, experiment, out, quick):
    """Claims about both data sets, on what fig2 and fig3 left beside this directory."""
    results, missing = {}, []
    for figure in ("fig2", "fig3"):
        for data in DATA:
            found = out.parent / f"{figure}-{data}{'-quick' if quick else ''}" / "results.json"
            if not found.exists():
                missing.append(found.parent.name)
                continue
            for name, line in results_file.read(found).lines.items():
                results[f"{data} {name}"] = Line(
                    np.array(line.accuracy, float),
                    np.array(line.loss, float),
                    line.epsilon_proved,
                    line.epsilon_claimed,
                    line.seconds_per_round,
                )
    if missing:
        print(f"Run first: {', '.join(missing)}", file=sys.stderr)
    verdicts = [(c.text, *c.check(results)) for c in experiment.claims]
    console.table(
        experiment.title, [("claim", False), ("verdict", False), ("seen", False)], verdicts
    )
    return written(
        out,
        dict(
            experiment=name,
            quick=quick,
            verdicts=[dict(claim=t, verdict=v, seen=s) for t, v, s in verdicts],
        ),
    )


EXPERIMENTS = {f"{f}-{d}": make(d) for f, make in (("fig2", fig2), ("fig3", fig3)) for d in DATA}
EXPERIMENTS["across"] = Experiment(
    "both data sets, from the results of fig2 and fig3",
    {},
    {},
    tuple(
        Claim(f"{text}, {s}, {m}", check(s, m))
        for text, check in (
            ("fig2 (c) noise costs Adult more than MNIST", drop_is_larger),
            ("fig3 (d) the best Q depends on the data", best_differs),
        )
        for s in SPLITS
        for m in MODES
    ),
    special=across,
)
EXPERIMENTS["clock"] = by_round()
EXPERIMENTS["bounds"] = Experiment(
    "softmax regression with l2 on Adult, one class a client",
    {
        **COMMON,
        **DATA["adult"],
        **SPLITS["noniid"],
        "preprocess": "unit_norm",
        "l2": 0.01,
        "clip_norm": 2.5,
        "epsilon": 0.5,
        "rounds": 200,
    },
    {
        "base": {},
        "Q=1": dict(steps=1),
        "Q=20": dict(steps=20),
        "all clients": dict(cohort=100),
        "with replacement": dict(sampler="with_replacement"),
        "ε=10": dict(epsilon=10.0),
        "G=1": dict(clip_norm=1.0),
        "l2=0.001": dict(l2=0.001),
        "iid": SPLITS["iid"],
    },
    quick=dict(rounds=50, clients=20, cohort=5),
    seeds=(0, 1, 2),
    quick_lines=("base",),
    special=bounds,
)

if __name__ == "__main__":
    sys.exit(main("li2025", EXPERIMENTS))
