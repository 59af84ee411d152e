"""Compare equal and unequal impact factors at the same proved epsilon.

Softmax regression on MNIST runs on the clients of scenarios 1 and 3, two classes per client.
Uploads are differences of models with a small clip norm; noise is calibrated to the view of the
server, or of a third party that sees only the models.  Clip norm and learning rate are chosen by
loss on other splits.  For comparison, there are runs without noise, and runs as printed (clipped
models, noise for the false sensitivity) with the epsilon that is proved for them.
"""

import time
from typing import Any

import numpy as np

from jfl.cli import console
from jfl.core.files import ResultStore
from jfl.engine.sweep import sweep as run_points
from jfl.report import plots
from jfl.runs import record as report
from jfl.runs import tables
from jfl.runs.config import Config
from jfl.runs.pictures import PALETTE, new_figure

from ...harness.kept_runs import key as made_by
from ...harness.pictures import headline, save
from ...harness.runner import Experiment, judged
from ...harness.verdicts import Claim, Comparison, Evidence, Quantity
from . import theory
from .plans import COMMON, SPLITS, VIEWS, build, impact, privacy, scenario

EPSILONS = (5.0, 20.0, 100.0)
PRINTED_CLIP = 2.0  # the weights start at 0, and grow to a norm of about 1 at the paper's rate
SETTINGS = {
    "no noise, lr 0.02": dict(),
    "no noise": dict(),
    **{
        f"printed ε={e:g}": dict(
            mode="as_printed", unit="client", epsilon=e, clip_norm=PRINTED_CLIP
        )
        for e in EPSILONS[:2]
    },
    **{
        f"{v} ε={e:g}": dict(upload="difference", unit="client", epsilon=e, view=v)
        for v in VIEWS
        for e in EPSILONS
    },
}
SOFTMAX = "softmax regression instead of a network; splits, clip norms and densities are ours"
IMPACT = {1: "0-1-2", 3: "1-3-5"}  # compared with "equal" in all settings of a scenario
# factors between the two where noise matters most, and in scenario 3 only what the first one leaves
# open
CELLS = {
    1: [(a, s) for s in SETTINGS for a in ("equal", "0-1-2") + ("0-1-1",) * s.startswith("third")],
    3: [
        (a, s)
        for s in SETTINGS
        for a in ("equal", "1-3-5")
        if s not in ("server ε=5", "server ε=100", "third_party ε=100")
    ],
}
CLIPS, RATES = (0.05, 0.2, 0.35, 0.6), {1: (0.05, 0.2), 3: (0.2,)}
SEEDS, OTHERS = (
    tuple(range(5)),
    (100,),
)  # OTHERS: of the splits on which clip norm and rate are chosen
QUICK = dict(dataset="digits", rounds=3)


def settings(number, assignment, setting, quick=False):
    """Return the config of a cell, without what the grid varies."""
    fields = {
        **COMMON,
        **SPLITS["labels"],
        "model": "logistic",
        **scenario(number),
        **impact(number, assignment),
        **SETTINGS[setting],
    }
    if quick:  # a fifth of the clients of each group
        rows = tuple(max(r // 5, 10) for r in fields["group_rows"])
        fields |= QUICK | dict(groups=(4, 4, 4), clients=12, group_rows=rows)
    return fields


def block(number, seed, choices, every, quick=False):
    """Run one split: all assignments and settings of `choices`, in one program per kind of plan.

    Args:
        number: of the scenario.
        seed: of the split.
        choices: (assignment, setting, {clip_norm, lr}) of each run.
        every: rounds between evaluations.
        quick: whether to use few clients.

    Returns:
        a dict for each run.
    """
    begun = time.perf_counter()
    configs = [
        Config(**settings(number, a, s, quick) | more | dict(partition_seed=seed))
        for a, s, more in choices
    ]
    plans = [build(c) for c in configs]
    result = run_points(
        lambda run: plans[run],
        points=[dict(run=i, seed=seed) for i in range(len(plans))],
        rounds=configs[0].rounds,
        evaluate_every=every,
    )
    seconds, found = (time.perf_counter() - begun) / len(plans), []
    for i, (assignment, setting, more) in enumerate(choices):
        metrics = report.lists(result.metrics, i)
        found.append(
            report.plain(
                dict(
                    scenario=number,
                    assignment=assignment,
                    setting=setting,
                    seed=seed,
                    **more,
                    rounds=metrics["round"],
                    loss=metrics["loss"],
                    accuracy=metrics["accuracy"],
                    seconds=seconds,
                    privacy=[
                        {k: g[k] for k in ("view", "epsilon", "status")}
                        for g in privacy([(plans[i], configs[i].rounds)], configs[i])
                    ],
                )
            )
        )
    return found


def study(experiment, out, quick):
    """Choose on OTHERS, then run SEEDS; each run is a row of out/cells.jsonl.

    A study that was stopped resumes.
    """
    store, mine = stored(out / "cells.jsonl"), {}  # mine: of what is kept, what this study asks for

    def asked(number, seed, assignment, setting, more):
        config = Config(**settings(number, assignment, setting, quick) | dict(partition_seed=seed))
        return (
            number,
            seed,
            assignment,
            setting,
            more.get("clip_norm"),
            more.get("lr"),
            made_by(config, (block, build)),
        )

    def compute(number, seed, choices, every):
        keys = {asked(number, seed, *choice): choice for choice in choices}
        left = {k: choice for k, choice in keys.items() if k not in store.records}
        if left:
            found = block(number, seed, list(left.values()), every, quick)
            store.put([record | dict(made=k[-1]) for k, record in zip(left, found, strict=True)])
            seconds = found[0]["seconds"]
            print(
                f"scenario {number}, seed {seed}, {len(left)} runs of {seconds:.2f} s", flush=True
            )
        mine.update((k, store.records[k]) for k in keys)

    rounds = settings(1, "equal", "no noise", quick)["rounds"]
    for number, pairs in CELLS.items():
        for seed in OTHERS:
            compute(
                number,
                seed,
                [(a, s, m) for a, s in pairs for m in grid(number, s) if len(grid(number, s)) > 1],
                rounds,
            )
        for seed in SEEDS[:2] if quick else SEEDS:
            compute(
                number,
                seed,
                [(a, s, chosen(mine.values(), number, a, s)) for a, s in pairs],
                max(1, rounds // 6),
            )
    return collect(out, list(mine.values()))


def stored(path) -> ResultStore:
    """Return the runs in a file, by scenario, split, assignment, setting, grid point and source."""
    return ResultStore(
        path,
        key=lambda r: (
            r["scenario"],
            r["seed"],
            r["assignment"],
            r["setting"],
            r.get("clip_norm"),
            r.get("lr"),
            r.get("made"),
        ),
    )


def grid(number, setting) -> list:
    """Return clip norms and learning rates to choose from.

    The wider clips are tried only at the highest rate.
    """
    rates = [dict(lr=r) for r in RATES[number]]
    if setting == "no noise":
        return rates
    if "upload" not in SETTINGS[setting]:
        return [{}]
    return [dict(clip_norm=c) | r for c in CLIPS for r in (rates if c in CLIPS[:2] else rates[-1:])]


def chosen(cells, number, assignment, setting) -> dict:
    """Return the point of the grid with the smallest mean loss on the splits of OTHERS."""
    points = grid(number, setting)
    loss = [
        np.mean(
            [
                c["loss"][-1]
                for c in cells
                if c["seed"] in OTHERS
                and all(
                    c[k] == v
                    for k, v in dict(
                        scenario=number, assignment=assignment, setting=setting, **point
                    ).items()
                )
            ]
            or [np.inf]
        )
        for point in points
    ]
    return points[int(np.argmin(loss))]


# --- what came of it


def interval(values):
    """Return the mean and half of its 95 % t-interval; None for one value."""
    return dict(zip(("mean", "half"), tables.interval(values)))


def summary(cells) -> list:
    """Return a dict for each scenario, setting and assignment that ran on SEEDS.

    It has the difference to equal factors.
    """
    groups = {}
    for c in cells:
        choice = chosen(cells, c["scenario"], c["assignment"], c["setting"])
        if c["seed"] not in OTHERS and all(c[k] == v for k, v in choice.items()):
            groups.setdefault((c["scenario"], c["setting"], c["assignment"]), {})[c["seed"]] = c
    found = []
    for (number, setting, assignment), runs in groups.items():
        first = next(iter(runs.values()))
        worth = {
            f"epsilon_{'claimed' if g['status'] == 'claimed' else 'proved'}_{g['view']}": g[
                "epsilon"
            ]
            for g in first["privacy"]
        }
        row: dict[str, Any] = dict(
            scenario=number,
            setting=setting,
            assignment=assignment,
            seeds=sorted(runs),
            clip_norm=first.get("clip_norm", SETTINGS[setting].get("clip_norm")),
            lr=first.get("lr", COMMON["lr"]),
            **worth,
        )
        equal = groups.get((number, setting, "equal"), {})
        both = sorted(set(runs) & set(equal)) if assignment != "equal" else []
        for key in ("loss", "accuracy"):
            row[key] = interval([runs[s][key][-1] for s in sorted(runs)])
            if both:
                row[f"{key}_less_equal"] = interval(
                    [runs[s][key][-1] - equal[s][key][-1] for s in both]
                )
        found.append(row)
    return found


def claims(cells) -> list:
    """Return the verdicts on the paper's statements about these cells, by their losses.

    They are ours, because the figures judge these statements, with the network of the paper.
    """
    ends = {}
    for c in cells:
        if c["seed"] not in OTHERS:
            ends.setdefault((c["scenario"], c["setting"], c["assignment"]), {})[c["seed"]] = c[
                "loss"
            ][-1]
    name = lambda run: "no noise, lr 0.02" if run.epsilon is None else f"printed ε={run.epsilon:g}"
    found = []
    for figure, (number, _) in theory.FIGURES.items():
        statements: Any = theory.STATEMENTS[figure]
        for one, other in statements:
            a, b = (ends.get((number, name(run), run.assignment), {}) for run in (one, other))
            if len(set(a) & set(b)) > 1:
                found.append(
                    Claim(
                        f"{figure}: {one.assignment}, {name(one)}, ends below "
                        f"{other.assignment}, {name(other)}",
                        compared(a, b),
                        whose="ours",
                    )
                )
    experiment = Experiment("", {}, {}, tuple(found), differs=SOFTMAX)
    return judged(experiment, {})


def label(run, mode=None) -> str:
    """Return the name of a run's line, without its split."""
    return run.assignment if run.epsilon is None else f"{mode} {run.assignment} ε={run.epsilon:g}"


def compared(one: dict, other: dict):
    """Return a check that losses by seed are smaller than others."""
    pairs = (Quantity.of(list(v.values()), tuple(v)) for v in (other, one))
    more, less = pairs
    return lambda results: Evidence((Comparison(more - less, low=0.0),))


def collect(out, cells):
    """Draw study.png in `out`, and return the findings of the existing cells."""
    rows = summary(cells)
    shown = lambda v: f"{v['mean']:.3f}" + ("" if v["half"] is None else f" ± {v['half']:.3f}")
    console.table(
        "loss and accuracy at the end, 95 % t-intervals over splits",
        [
            (h, h not in ("setting", "assignment"))
            for h in (
                "scenario",
                "setting",
                "assignment",
                "clip",
                "lr",
                "loss",
                "less equal",
                "accuracy",
                "less equal ",
                "ε server",
                "ε third party",
            )
        ],
        [
            (
                str(r["scenario"]),
                r["setting"],
                r["assignment"],
                str(r["clip_norm"] or ""),
                str(r["lr"]),
                shown(r["loss"]),
                shown(r["loss_less_equal"]) if "loss_less_equal" in r else "",
                shown(r["accuracy"]),
                shown(r["accuracy_less_equal"]) if "accuracy_less_equal" in r else "",
                *(
                    f"{r[k]:.4g}" if r.get(k) else ""
                    for k in ("epsilon_proved_server", "epsilon_proved_third_party")
                ),
            )
            for r in rows
        ],
        "Losses and accuracies lie outside every guarantee.",
    )
    picture(out / "study.png", rows)
    chosen_on = [
        {k: c.get(k) for k in ("scenario", "setting", "assignment", "seed", "clip_norm", "lr")}
        | dict(loss=c["loss"][-1], accuracy=c["accuracy"][-1])
        for c in cells
        if c["seed"] in OTHERS
    ]
    settings = dict(
        COMMON,
        **SPLITS["labels"],
        model="logistic",
        printed_clip_norm=PRINTED_CLIP,
        scenarios={n: scenario(n) for n in IMPACT},
        chosen_on=list(OTHERS),
    )
    return dict(
        verdicts=claims(cells),
        seeds=SEEDS,
        settings=settings,
        experiments=scenarios(rows),
        grid=chosen_on,
        seconds=sum(c["seconds"] for c in cells),
    )


def scenarios(rows) -> dict:
    """Return the rows of `summary` as an experiment for each scenario."""
    found = {}
    for row in rows:
        name = f"study, scenario {row['scenario']}"
        lines = found.setdefault(name, dict(title="Impact factors at one noise", lines={}))["lines"]
        # the view that the noise is for
        view = "server" if row["setting"].startswith("server") else "third_party"
        special = ("scenario", "setting", "assignment", "seeds", "accuracy", "loss")
        lines[f"{row['setting']}: {row['assignment']}"] = dict(
            accuracy=row["accuracy"],
            loss=row["loss"],
            seeds=row["seeds"],
            epsilon_claimed=row.get(f"epsilon_claimed_{view}"),
            epsilon_proved=row.get(f"epsilon_proved_{view}"),
            columns={
                k.replace("_", " ").replace("epsilon", "ε"): v
                for k, v in row.items()
                if k not in special and v is not None
            },
        )
    return found


SETTING = dict(third_party="seen by a third party", server="seen by the server")


def named(setting: str) -> str:
    """Return the name of a setting in the picture."""
    kind, _, epsilon = setting.partition(" ε=")
    if kind == "printed":
        return f"the paper's noise for ε = {epsilon}"
    return f"{SETTING[kind]}, ε = {epsilon}" if epsilon else kind.replace("lr", "rate")


def stored_rows(whole) -> list[dict]:
    """Return the rows of the picture from stored results."""
    rows = []
    for number in IMPACT:
        for name, line in whole.experiments[f"study, scenario {number}"].lines.items():
            setting, _, assignment = name.rpartition(": ")
            row: dict = dict(scenario=number, setting=setting, assignment=assignment)
            if less := line.columns.get("loss less equal"):
                row["loss_less_equal"] = dict(mean=less.mean, half=less.half)
            rows.append(row)
    return rows


def picture(path, rows):
    """Draw the loss minus that of equal factors, with a row for each setting.

    Args:
        path: the file.
        rows: dicts with scenario, setting, assignment and perhaps loss_less_equal (mean, half).
    """
    order = ["no noise, lr 0.02", "no noise", "printed ε=20", "printed ε=5"]
    order += [f"{v} ε={e:g}" for v in reversed(VIEWS) for e in reversed(EPSILONS)]
    titles = {
        1: "clients with severe, moderate and no damage of their rows",
        3: "clients with 50, 120 and 271 rows",
    }
    figure, axes = new_figure((7.4, 7.4), 2, 1, squeeze=False, sharex=True, height_ratios=(10, 7))
    for ax, number in zip(axes[:, 0], IMPACT):
        mine = [r for r in rows if r["scenario"] == number and "loss_less_equal" in r]
        settings = [s for s in order if any(r["setting"] == s for r in mine)]
        names = list(dict.fromkeys(r["assignment"] for r in mine))
        for i, name in enumerate(names):
            colour = PALETTE[(1, 3)[i]]
            ax.plot([], [], "o", color=colour, label=f"factors {name}")
            for r in (r for r in mine if r["assignment"] == name):
                y = settings.index(r["setting"]) + 0.24 * (i - (len(names) - 1) / 2)
                less = r["loss_less_equal"]
                ax.errorbar(less["mean"], y, xerr=less["half"], fmt="o", capsize=3, color=colour)
        plots.style(ax)
        ax.axvline(0, color="k", lw=0.8)
        ax.set_title(titles[number], loc="left")
        ax.set_yticks(range(len(settings)), list(map(named, settings)))
        ax.set_ylim(len(settings) - 0.4, -0.6)
        if names:
            ax.legend(frameon=False, loc="upper right")
    axes[-1, 0].set_xlabel("loss minus that of equal factors (right of 0: worse; 95 % intervals)")
    headline(
        figure,
        "Unequal impact factors lower the loss only without noise, at the paper's learning rate",
    )
    save(path, figure)
