"""Define the experiments of Li, Wang, Wu, Mathematics 13(3):497, 2025 (DP-FedAvg).

The paper prints curves and no numbers; grids, numbers of rounds, seeds and features are ours.
Lines "printed" run Algorithm 1 with its noise, which proves nothing; lines "sound" clip every step,
and add to the model the noise that makes one round private at the same epsilon.  The bounds are on
a strongly convex problem.
"""

import dataclasses
import functools
import sys

from experiments.harness import results as results_file

from ...harness.baselines import RATES, with_chosen
from ...harness.runner import FIRST, Experiment, judged, stored_line
from ...harness.verdicts import (
    POINTS,
    WRONG,
    Claim,
    Comparison,
    Evidence,
    beats,
    difference,
    end,
    exactly,
    inner,
    known,
    no_lower,
)
from .bounds import bounds
from .lemmas import lemmas
from .plans import budgets, runs

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
OPEN = "rounds, batches, grids of ε and Q, and which Adult features are ours: the paper gives none"
# of gradients of minibatches over the rounds of a run without privacy: li2025_plans.median_norm
MEDIANS = dict(mnist=dict(iid=2.40, noniid=3.13), adult=dict(iid=1.79, noniid=1.89))
BY_MEDIAN = ", G by median"  # ends the names of such lines
MODES = dict(printed=dict(mode="as_printed"), sound={})
# Name of the lines -> reading of `plans.build`.
OTHER_READINGS = {"noise in the model": "model", "every step clipped": "step"}


# --- claims


def above_floor(floor, names):
    """Return a check that each of these lines ends above `floor`."""

    def check(results):
        run = [n for n in names if n in results]
        missing = "" if len(run) == len(names) else f"{len(run)} of {len(names)} lines run"
        poor = [n for n in run if end(results[n]).mean <= floor]
        return Evidence(
            tuple(Comparison(end(results[n]), low=floor) for n in run),
            missing,
            seen=f"{len(poor)} of {len(run)} end below: {', '.join(poor) or '-'}",
        )

    return check


def at_one_rate(results, line):
    """Return the line without privacy at the rate of the private lines.

    The cost of noise is a difference at one rate. A line without privacy whose rate was chosen has
    another rate, so its first rate is used.
    """
    return line + FIRST if line + FIRST in results else line


def costs_little(private, free):
    """Return a check that noise costs at most POINTS."""
    return lambda results: no_lower((private, at_one_rate(results, free)))(results)


def drop_is_larger(split, mode):
    """Return a check, on both datasets, that Adult loses more to noise than MNIST does."""

    def check(results):
        free = {d: at_one_rate(results, f"{d} {split} no privacy") for d in DATA}
        names = [n for d in DATA for n in (free[d], f"{d} {split} {mode} ε=0.5")]
        if why := known(results, *names):
            return Evidence(missing=why)
        mnist, less, adult, worse = (end(results[n]) for n in names)
        words = f"MNIST loses {mnist.mean - less.mean:.3f}, Adult {adult.mean - worse.mean:.3f}"
        if adult.mean <= MAJORITY + 0.005:
            return Evidence(
                seen=words, missing="Adult without noise is no better than the majority class"
            )
        more = Comparison((adult - worse) - (mnist - less), low=0.0, same=POINTS)
        return Evidence((more,), seen=words)

    return check


def best_differs(split, mode):
    """Return a check that the datasets differ in their best number of steps.

    Only numbers that both datasets have are compared: the largest is limited by the rows of a
    client and differs anyway.  If both have the same best number, the claim is contradicted if this
    number is better than each other one on both.
    """
    shared = [q for q in STEPS["mnist"] if q in STEPS["adult"]]
    name = lambda d, q: f"{d} {split} {mode} Q={q}"

    def check(results):
        if why := known(results, *(name(d, q) for d in DATA for q in shared)):
            return Evidence(missing=why)
        best = {d: max(shared, key=lambda q: end(results[name(d, q)]).mean) for d in DATA}
        words = f"MNIST Q={best['mnist']}, Adult Q={best['adult']}, of {shared}"
        less = lambda d, q: difference(results, name(d, best[d]), name(d, q))
        if best["mnist"] != best["adult"]:
            found = [less(d, best[o]) for d, o in zip(DATA, reversed(DATA))]
            return Evidence(tuple(Comparison(q, low=0.0) for q in found), seen=words)
        others = [q for q in shared if q != best["mnist"]]
        # of the differences that would all have to be real, the one that is least so
        found = min((less(d, q) for d in DATA for q in others), key=lambda q: q.interval(WRONG)[0])
        return Evidence((Comparison(-1 * found, low=0.0),), seen=f"{words}; it leads by")

    return check


def stated(figure, text, split, mode, check, whose="paper"):
    """Return the claim of a figure on one split in one mode; splits are checks of one statement."""
    where = f", {split}" if split else ""
    # the proof of the paper puts the noise in the gradient: the other reading is not its claim
    whose = "ours" if mode in ("sound", *OTHER_READINGS) else whose
    own = mode.removesuffix(BY_MEDIAN)  # both clip norms check one statement
    return Claim(f"{text}{where}, {mode}", check, whose, f"{figure} {text}, {own}")


# --- figures


def fig2(data, modes=MODES, splits=SPLITS, what="", **more):
    """Define accuracy against epsilon.

    Args:
        data: a key of DATA.
        modes: name -> fields of the private lines.
        splits: name -> fields.
        what: how the title differs.
        more: for `figure`.
    """
    lines = {
        f"{s} {name}": {**splits[s], **changes}
        for s in splits
        for name, changes in {
            # whatever G is: all figures share its runs
            "no privacy": dict(algorithm="fedavg", clip_norm=COMMON["clip_norm"]),
            "clipped": {},
            **{f"{m} ε={e:g}": {**modes[m], "epsilon": e} for m in modes for e in EPSILONS},
        }.items()
    }
    at = lambda s, m: [f"{s} {m} ε={e:g}" for e in EPSILONS]
    claims = [
        stated(
            f"fig2-{data}",
            "(a) accuracy does not fall as ε grows",
            s,
            m,
            no_lower(*zip(at(s, m)[1:], at(s, m))),
            "ours",
        )
        for s in SPLITS
        for m in modes
    ]
    claims += [
        stated(
            f"fig2-{data}",
            "(b) ε=0.5 costs at most 0.02",
            s,
            m,
            costs_little(f"{s} {m} ε=0.5", f"{s} no privacy"),
        )
        for s in SPLITS
        for m in modes
    ]
    claims += [
        stated(
            f"fig2-{data}",
            "(d) iid ends above non-iid at equal ε",
            "",
            m,
            beats(list(zip(at("iid", m), at("noniid", m)))),
            "ours",  # the paper says it of Figure 3
        )
        for m in modes
    ]
    return figure(
        f"accuracy against ε of a round, {data}{what}",
        data,
        lines,
        claims,
        tuple(n for n in lines if n.split()[1] in ("no", "clipped") or n.endswith("ε=0.5")),
        **more,
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
            stated(
                "fig3-adult",
                "(a) a Q between the extremes is best",
                s,
                m,
                inner(*at(s, m)),
            )
            for s in SPLITS
            for m in MODES
        ]
    else:
        claims = [
            stated(
                "fig3-mnist",
                "(b) Q=50 costs at most 0.02 against any other Q",
                s,
                m,
                small_harm(*at(s, m)),
            )
            for s in SPLITS
            for m in MODES
        ]
    claims += [
        stated(
            f"fig3-{data}",
            "(c) iid ends above non-iid for the same Q",
            "",
            m,
            beats(list(zip(at("iid", m), at("noniid", m)))),
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
    """Return a check that the last line ends at most POINTS below each other one."""
    return no_lower(*((names[-1], n) for n in names[:-1]))


@functools.cache  # one function for all figures: lines of one config and one function share a run
def columns(clock, reading):
    return functools.partial(budgets, clock=clock, reading=reading)


def figure(title, data, lines, claims, few, clock="step", reading="gradient"):
    if data == "adult":
        claims = [
            *claims,
            Claim(
                f"every line beats the majority class, {MAJORITY:.4f}",
                above_floor(MAJORITY, lines),
                whose="ours",
            ),
        ]
    return Experiment(
        title,
        {**COMMON, **DATA.get(data, {})},
        lines,
        tuple(claims),
        dict(rounds=20),
        tuple(range(5)),
        differs=OPEN,
        baselines={
            n: tuple(m for m in lines if "ε" in m and m.startswith(n.removesuffix("no privacy")))
            for n in lines
            if n.endswith("no privacy")
        },
        runs=runs(clock, reading),
        columns=columns(clock, reading),
        quick_lines=few,
    )


def of_both():
    """Return the lines at ε = 0.5 per round on both datasets, and without privacy."""
    return {
        f"{d} {s} {m}": {**DATA[d], **SPLITS[s], **changes}
        for d in DATA
        for s in SPLITS
        for m, changes in {
            "no privacy": dict(algorithm="fedavg"),
            **{f"{m} ε=0.5": {**MODES[m], "epsilon": 0.5} for m in MODES},
        }.items()
    }


def by_round():
    lines = of_both()
    claims = [
        stated("fig2", "(c) noise costs Adult more than MNIST", s, m, drop_is_larger(s, m))
        for s in SPLITS
        for m in MODES
    ]
    few = tuple(n for n in lines if "noniid" not in n)
    return figure(
        "as figure 2 with learning rates that fall once per round",
        None,
        lines,
        claims,
        few,
        clock="round",
    )


def tuned():
    """Define printed lines at ε = 0.5, and those without privacy, with tuned rates.

    Each line has the best rate of one grid.  The clip norm G stays 1.  G was in the grid at first,
    and the smallest G of any grid was best: the noise is proportional to G, but only the last step
    of a round is clipped, so a small G removes the noise.
    """
    lines = {n: f for n, f in of_both().items() if "sound" not in n}
    claims = [
        Claim(f"{text}, {s}, printed, each at the best of one grid", check, whose="ours")
        for s in SPLITS
        for text, check in (
            (
                "(b) ε=0.5 costs at most 0.02",
                no_lower((f"mnist {s} printed ε=0.5", f"mnist {s} no privacy")),
            ),
            ("(c) noise costs Adult more than MNIST", drop_is_larger(s, "printed")),
        )
    ]
    few = tuple(n for n in lines if "noniid" not in n)
    title = "as figure 2, each line at the best of one grid of rates"
    of_one_rate = figure(title, None, lines, claims, few)
    return dataclasses.replace(
        of_one_rate, baselines={}, methods={n: n for n in lines}, grid=dict(lr=RATES)
    )


def across(experiment, out, quick):
    """Judge claims about both datasets, on the results of fig2 and fig3 in the same directory."""
    results, missing = {}, []
    for figure in ("fig2", "fig3"):
        for data in DATA:
            found = out.parent / f"{figure}-{data}{'-quick' if quick else ''}" / "results.json"
            if not found.exists():
                missing.append(found.parent.name)
                continue
            for name, line in results_file.read(found).lines.items():
                results[f"{data} {name}"] = stored_line(line, ())
    if missing:
        print(f"Run first: {', '.join(missing)}", file=sys.stderr)
    return dict(verdicts=judged(experiment, results))


EXPERIMENTS = {f"{f}-{d}": make(d) for f, make in (("fig2", fig2), ("fig3", fig3)) for d in DATA}
# Fixed before the runs, by how many undecided statements more seeds were expected to settle.
for name in ("fig2-adult", "fig3-adult", "fig3-mnist"):
    EXPERIMENTS[name] = dataclasses.replace(EXPERIMENTS[name], seeds=tuple(range(20)))
EXPERIMENTS["across"] = Experiment(
    "both data sets, from the results of fig2 and fig3",
    {},
    {},
    tuple(
        dataclasses.replace(stated(f, text, s, m, check(s, m)), text=f"{f} {text}, {s}, {m}")
        for f, text, check in (
            ("fig2", "(c) noise costs Adult more than MNIST", drop_is_larger),
            ("fig3", "(d) the best Q depends on the data", best_differs),
        )
        for s in SPLITS
        for m in MODES
    ),
    special=across,
    differs=OPEN,
)
EXPERIMENTS["clock"] = by_round()
EXPERIMENTS["fig2_tuned"] = tuned()
for d in DATA:
    # the other readings of equation (13) and of line 8, and the other clip norm: a choice had to be
    # made of each
    for words, reading in OTHER_READINGS.items():
        of_reading = fig2(d, {words: MODES["printed"]}, what=f", {words}", reading=reading)
        # a reading changes private lines only: the others are those of figure 2
        free = {n: (f"fig2-{d}", n) for n in of_reading.baselines}
        EXPERIMENTS[f"fig2-{d}-{reading}"] = dataclasses.replace(of_reading, same_law=free)
    EXPERIMENTS[f"fig2-{d}-median"] = fig2(
        d,
        {f"printed{BY_MEDIAN}": MODES["printed"]},
        {s: fields | dict(clip_norm=MEDIANS[d][s]) for s, fields in SPLITS.items()},
        what=", clipped at the median norm of gradients, which nothing accounts for",
    )
EXPERIMENTS["bounds"] = Experiment(
    "softmax regression with l2 on Adult, one class per client",
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

# of the runs of Figures 2 and 3; the clients of each have equally many rows
MET = {
    "1, L-smooth losses": (True, "L is at most max |(x, 1)|^2 / 2 for softmax regression"),
    "2, strongly convex losses": (False, "without l2 softmax regression is convex only"),
    "3, bounded variance": (True, "it is at most 2 max |(x, 1)|^2"),
    "4, gradients of norm at most G": (
        min(min(of_split.values()) for of_split in MEDIANS.values()) <= float(COMMON["clip_norm"]),
        "without privacy the median norm is 1.8 to 3.1, and G is 1 or this median",
    ),
    "5, unbiased averages": (True, "by Lemma A5, without replacement"),
}
EXPERIMENTS["lemmas"] = dataclasses.replace(
    EXPERIMENTS["bounds"],
    title="Lemmas A1, A2, A3, A5 and A6, on the problem of Theorems 3 and 4",
    base=EXPERIMENTS["bounds"].base | dict(rounds=20),
    lines={},
    claims=tuple(
        Claim(f"Figures 2 and 3 meet Assumption {which}", exactly(*met), "ours")
        for which, met in MET.items()
    ),
    quick=dict(rounds=2, clients=20, cohort=5),
    quick_lines=None,
    special=lemmas,
)

PRINTED_RATES = EXPERIMENTS  # before any rates were chosen
EXPERIMENTS = with_chosen("li2025", PRINTED_RATES)
