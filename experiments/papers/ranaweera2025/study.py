"""Study at equal proved privacy which wavelet shapes beat isotropic noise, and by how much.

    # one program; one row of JSON per cell
    python -m experiments.papers.ranaweera2025.study linear,pixels
    # table and picture of all that ran
    python -m experiments.papers.ranaweera2025.study --collect

Every variant gets the same effort: a clip of `CLIP` times the median of public gradients in its
norm, and a learning rate from one grid, by the accuracy on rows that are neither trained on nor
reported, with a seed that is not reported.  Differences to isotropic noise are paired by seed,
which gives equal batches.
"""

import dataclasses
import functools
import re
import sys
import time
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.harness import results as results_file
from jfl.core import checks
from jfl.core.files import ResultStore
from jfl.engine.sweep import sweep
from jfl.privacy import guarantees
from jfl.report import plots
from jfl.runs.checkpoint import environment
from jfl.runs.pictures import PALETTE, new_figure
from jfl.runs.statistics import interval

from ...harness import command_line
from ...harness.kept_runs import about, hashed
from ...harness.pictures import headline, save
from .plans import CLIP, Model, maker, rows

DELTA, BLOCK = 1e-5, 12  # runs at once
TUNE, SEEDS = (1000,), tuple(range(5))
SHAPES = (
    "iso",
    "prior:0.1",
    "prior:0.25",
    "prior:0.5",
    "prior:1",
    "proxy:0.1",
    "proxy:0.25",
    "proxy:0.5",
    "weighted",
)
MODELS = dict(
    linear=Model(
        "linear",
        "example",
        (4 / 3, 16 / 3, 16.0),
        ((2, 4, 8, 16, 32), (0.5, 1, 2, 4, 8), (0.25, 0.5, 1, 2, 4)),
        (("batch", 200), ("rounds", 300)),
    ),
    mlp=Model(
        "128",
        "example",
        (2 / 3, 8 / 3),
        ((2, 4, 8, 16), (1, 2, 4, 8)),
        (("batch", 200), ("rounds", 200)),
    ),
    clients=Model(
        "linear",
        "client",
        (1.0, 3.0),
        ((0.5, 1, 2, 4), (0.25, 0.5, 1, 2)),
        (
            ("clients", 100),
            ("rate", 0.2),
            ("batch", 20),
            ("steps", 5),
            ("local_lr", 0.5),
            ("rounds", 60),
        ),
    ),
)
# Programs, whose points differ only in numbers.
GROUPS = {
    "linear,pixels": SHAPES,
    "linear,unit": ("unit:0.25", "unit:0.5"),
    "linear,product": ("product",),
    "linear,james_stein": ("james_stein",),
    "linear,soft": ("soft",),
    "linear,last": ("iso, last model", "proxy:0.25, last model"),
    "linear,per_layer": ("per_layer prior:0.25",),
    "linear,flat": ("flat prior:0.25",),
    "mlp,pixels": ("iso", "prior:0.25", "proxy:0.25", "proxy:0.5"),
    "mlp,james_stein": ("james_stein",),
    "clients,pixels": ("iso", "prior:0.25", "prior:0.5", "weighted"),
    "clients,proxy": ("unit:0.25", "proxy:0.25", "proxy:0.5"),
    "clients,james_stein": ("james_stein",),
    "clients,per_layer": ("per_layer prior:0.25",),
}
# Grids are this many times larger, because the steps of these variants are shorter.
WIDER = {
    "weighted": 4,
    "james_stein": 16,
    "soft": 16,
}
# The levels that run if a step is expensive; all others run at all levels.
ONLY = {"linear,per_layer": (1,), "linear,flat": (1,)}


# --- running


@functools.lru_cache(maxsize=2)
def judged(model):
    """Return validation and test rows on the device."""
    return [(jnp.asarray(x), jnp.asarray(y)) for x, y in (rows(model).validation, rows(model).test)]


@jax.jit
def accuracy(predict, params, x, y):
    return (jax.vmap(predict, (None, 0))(params, x).argmax(-1) == y).mean()


def measure(model, cells, store, tag):
    """Run (variant, level, k, seed) cells in blocks of one program; each a record."""
    makers, made, rounds = {}, {}, model.options()["rounds"]

    def make(variant, level, k):
        if variant not in makers:
            makers[variant] = maker(model, variant)
        if (variant, level, k) not in made:
            made[variant, level, k] = makers[variant][0](model.levels[level], k)
        return made[variant, level, k]

    for at in range(0, len(cells), BLOCK):
        some = cells[at : at + BLOCK]
        padded = some + some[-1:] * (BLOCK - len(some))  # one program for every block
        begun = time.process_time(), time.time()
        result = sweep(
            make,
            rounds=rounds,
            evaluate_every=rounds,
            memory=1e12,
            tolerate=("empty_cohort",),
            points=[dict(zip(("variant", "level", "k", "seed"), c)) for c in padded],
        )
        spent = (time.process_time() - begun[0]) / len(some), (time.time() - begun[1]) / len(some)
        records = []
        for i, (variant, level, k, seed) in enumerate(some):
            plan = result.plans[i]
            validation, test = (
                float(accuracy(plan.task.predict, result.params[i], *part))
                for part in judged(model)
            )
            records.append(
                dict(
                    tag=tag,
                    variant=variant,
                    level=level,
                    multiplier=model.levels[level],
                    k=k,
                    seed=seed,
                    validation=validation,
                    test=test,
                    failed=bool(result.failed[i]),
                    clip_norm=makers[variant][1],
                    clipped=float(result.metrics.clip_fraction[i][-1]),
                    cpu=spent[0],
                    wall=spent[1],
                    made=made_by(model, level),
                )
            )
        store.put(records)


def grid(model, variant, level):
    return tuple(k * WIDER.get(variant, 1) for k in model.grid[level])


@functools.cache
def made_by(model, level) -> str:
    """Return the settings that define the cells of a level, except for variant, rate and seed."""
    one = dataclasses.replace(model, levels=model.levels[level], grid=())
    return hashed(one, *about(model.dataset, measure, maker))


@functools.cache
def proved(model, level, variant="iso"):
    """Return the epsilon of a variant at a level: what every sound variant of that noise multiplier
    has."""
    plan = maker(model, variant)[0](model.levels[level], 1.0)
    view = "server" if model.unit == "example" else "third_party"
    return guarantees.guarantee(plan, model.options()["rounds"], DELTA, model.unit, view).epsilon


def run(name, out, models=MODELS, groups=GROUPS, tune=TUNE, seeds=SEEDS):
    """Choose a learning rate for each variant and level of a group, then run the seeds that are
    reported.

    Cells that are in `out` already are not run again.
    """
    model, store = models[name.split(",")[0]], stored(out)
    place = lambda tag, cell: (f"{name} {tag}", *cell, made_by(model, cell[1]))
    wanted = [
        (v, level) for level in ONLY.get(name, range(len(model.levels))) for v in groups[name]
    ]
    for tag, cells in (
        ("tune", [(v, at, k, s) for v, at in wanted for k in grid(model, v, at) for s in tune]),
        ("report", [(v, at, None, s) for v, at in wanted for s in seeds]),
    ):
        if tag == "report":
            best = chosen(of_these(list(store.records.values()), models), name)
            cells = [(v, at, best[v, at], s) for v, at, _, s in cells]
        measure(
            model, [c for c in cells if place(tag, c) not in store.records], store, f"{name} {tag}"
        )


def stored(out) -> ResultStore:
    """Return the cells in a file, by their tag, variant, level, learning rate and seed, and what
    made them."""
    return ResultStore(
        out, key=lambda r: (r["tag"], r["variant"], r["level"], r["k"], r["seed"], r.get("made"))
    )


def read(out) -> list:
    return list(stored(out).records.values())


def of_these(lines, models=MODELS) -> list:
    """Return the cells of these settings and of this version: a quick study may have left others
    there."""
    made = {
        (name, level): made_by(m, level)
        for name, m in models.items()
        for level in range(len(m.levels))
    }
    return [r for r in lines if r.get("made", 0) == made.get((r["tag"].split(",")[0], r["level"]))]


def chosen(lines, name):
    """Return {(variant, level): k} of the best mean accuracy on validation rows; a run that failed
    has none."""
    scores = {}
    for r in lines:
        if r["tag"] == f"{name} tune":
            scores.setdefault((r["variant"], r["level"]), {}).setdefault(r["k"], []).append(
                -1.0 if r["failed"] else r["validation"]
            )
    return {at: max(by, key=lambda k: np.mean(by[k])) for at, by in scores.items()}


# --- what came of it


def table(lines, models=MODELS, groups=GROUPS):
    """Return a row for each model, level and variant with reported seeds: accuracy, and the paired
    difference to iso."""
    found = {}
    for r in lines:
        group, tag = r["tag"].rsplit(" ", 1)
        if tag == "report":
            found.setdefault((group, r["level"], r["variant"]), {})[r["seed"]] = r
    rows = []
    for (group, level, variant), mine in found.items():
        model = group.split(",")[0]
        iso = found.get((f"{model},pixels", level, "iso"), {})
        both = [s for s in mine if s in iso]
        accuracy, first = (
            interval([100 * r["test"] for r in mine.values()]),
            next(iter(mine.values())),
        )
        gain = (
            interval([100 * (mine[s]["test"] - iso[s]["test"]) for s in both])
            if len(both) > 1
            else (None, None)
        )
        rows.append(
            dict(
                model=model,
                variant=variant,
                level=level,
                multiplier=first["multiplier"],
                epsilon_proved=proved(models[model], level),
                accuracy=accuracy[0],
                accuracy_95=accuracy[1],
                gain=gain[0],
                gain_95=gain[1],
                k=first["k"],
                at_edge=first["k"]
                in grid(models[model], variant, level)[:: len(models[model].grid[level]) - 1],
                clip_norm=first["clip_norm"],
                clipped=float(np.mean([r["clipped"] for r in mine.values()])),
                seeds={str(s): 100 * r["test"] for s, r in sorted(mine.items())},
                failed=sum(r["failed"] for r in mine.values()),
                cpu_seconds=float(np.mean([r["cpu"] for r in mine.values()])),
            )
        )
    order = [v for group in groups.values() for v in group]
    return sorted(
        rows, key=lambda r: (list(models).index(r["model"]), r["level"], order.index(r["variant"]))
    )


def finding(rows):
    """Return one paragraph that says which shapes are significantly better or worse than
    isotropic noise."""
    text = []
    for model in dict.fromkeys(r["model"] for r in rows):
        for level in sorted({r["level"] for r in rows if r["model"] == model}):
            mine = {
                r["variant"]: r
                for r in rows
                if (r["model"], r["level"]) == (model, level) and r["gain"] is not None
            }
            if "iso" not in mine:
                continue
            iso = mine.pop("iso")
            told = lambda some: (
                ", ".join(f"{r['variant']} {r['gain']:+.2f} ± {r['gain_95']:.2f}" for r in some)
                or "none"
            )
            above = sorted(
                (r for r in mine.values() if r["gain"] > r["gain_95"]), key=lambda r: -r["gain"]
            )
            below = sorted(
                (r for r in mine.values() if r["gain"] < -r["gain_95"]), key=lambda r: r["gain"]
            )
            same = [r for r in mine.values() if abs(r["gain"]) <= r["gain_95"]]
            text.append(
                f"{TITLES[model]}, noise multiplier {iso['multiplier']:.3g}, proved epsilon "
                f"{iso['epsilon_proved']:.3g}: "
                f"isotropic {iso['accuracy']:.2f} ± {iso['accuracy_95']:.2f} %; above it "
                f"{told(above)}; below it "
                f"{told(below)}; no significant difference with {len(iso['seeds'])} seeds: "
                f"{told(same)}."
            )
    return " ".join(text)


TITLES = dict(
    linear="softmax regression, DP-SGD",
    mlp="MLP 784-128-10, DP-SGD",
    clients="softmax regression, DP-FedAvg, 100 clients",
)


KINDS = dict(prior="prior", unit="prior with bias", proxy="public")
NAMES = dict(
    weighted="paper, sound clip (R5)",
    product="public, 0.25, clip per band",
    james_stein="isotropic, James-Stein",
    soft="isotropic, soft threshold",
    iso="isotropic",
)
# What a variant transforms, if not the image of the weights of each class: each layer as a
# vector, or all parameters as one.
DOMAINS = dict(per_layer="per layer", flat="flattened")


def shown(variant):
    """Return the name of a variant in the picture."""
    variant, *last = variant.split(", ")
    *domain, noise = variant.split(" ")
    kind, colon, exponent = noise.partition(":")
    name = f"{KINDS[kind]}, {exponent}" if colon else NAMES[noise]
    return ", ".join([name, *(DOMAINS[d] for d in domain), *last])


def picture(rows, out):
    """Draw the difference to isotropic noise in points, with its interval, in a panel for each
    model.

    Args:
        rows: dicts with model, variant, multiplier, epsilon_proved, accuracy, gain and gain_95.
        out: the file.
    """
    models = list(dict.fromkeys(r["model"] for r in rows))
    names = {
        m: [v for v in dict.fromkeys(r["variant"] for r in rows if r["model"] == m) if v != "iso"]
        for m in models
    }
    heights = [1.9 + 0.34 * len(names[m]) for m in models]
    figure, axes = new_figure(
        (7.4, sum(heights) + 0.8), len(models), 1, squeeze=False, height_ratios=heights
    )
    for ax, model in zip(axes[:, 0], models):
        mine = [r for r in rows if r["model"] == model]
        gains = [r for r in mine if r["variant"] != "iso" and r["gain"] is not None]
        levels = sorted({r["multiplier"] for r in gains})
        limit = max([2.0] + [abs(r["gain"]) + r["gain_95"] for r in gains if r["gain"] > 0]) * 1.15
        for i, level in enumerate(levels):
            (iso,) = (r for r in mine if (r["multiplier"], r["variant"]) == (level, "iso"))
            colour = PALETTE[(1, 3, 5)[i]]
            words = (
                f"ε = {iso['epsilon_proved']:.2g}: isotropic noise reaches {iso['accuracy']:.1f} %"
            )
            ax.plot([], [], "o", ms=4, color=colour, label=words)
            for r in (r for r in gains if r["multiplier"] == level):
                y = names[model].index(r["variant"]) + 0.22 * (i - (len(levels) - 1) / 2)
                if r["gain"] >= -limit:
                    look = dict(fmt="o", ms=4, capsize=2, color=colour)
                    ax.errorbar(r["gain"], y, xerr=r["gain_95"], **look)
                else:  # off the panel: say by how much
                    words = f"◂ {r['gain']:.1f} ± {r['gain_95']:.1f}"
                    ax.text(-1.08 * limit, y, words, va="center", fontsize=7, color=colour)
        ax.axvline(0, color="k", lw=0.8)
        ax.set(
            xlabel="accuracy minus that of isotropic noise, in points (bars: 95 % intervals)",
            xlim=(-1.12 * limit, limit),
            yticks=range(len(names[model])),
            yticklabels=list(map(shown, names[model])),
            ylim=(len(names[model]) - 0.4, -0.6),
        )
        plots.style(ax)
        ax.text(
            -0.3, 1.02, TITLES[model].replace(", ", ",\n"), transform=ax.transAxes, weight="bold"
        )
        ax.legend(fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    headline(
        figure,
        "Noise shaped on public rows (power 0.25) ends 0.4 to 7 points above isotropic noise at "
        "equal ε",
    )
    save(out, figure)


def stored_rows(whole) -> list[dict]:
    """Return the rows of the picture from stored results."""
    rows = []
    for name, experiment in whole.experiments.items():
        found = re.fullmatch(r"study, (\w+), noise multiplier ([\d.]+)", name)
        if not found:
            continue
        for variant, line in experiment.lines.items():
            gain = (line.columns.get("points above iso") or "").split(" ± ")
            rows.append(
                dict(
                    model=found[1],
                    variant=variant,
                    multiplier=float(found[2]),
                    epsilon_proved=line.epsilon_proved,
                    accuracy=100 * float(np.mean([a for a in line.accuracy if a is not None])),
                    gain=float(gain[0]) if gain[0] else None,
                    gain_95=float(gain[-1]) if gain[0] else None,
                )
            )
    return rows


def collect(out, results, models=MODELS, groups=GROUPS):
    """Collect all cells in `out` into ranaweera2025.json and ranaweera2025_study.png in
    `results`."""
    lines, others = of_these(every := read(out), models), "of other settings or another version"
    if not lines:
        checks.fail(
            str(out),
            "cells of these settings and this version",
            f"{len(every)} {others}",
            "Run the groups again.",
        )
    if len(lines) < len(every):
        print(
            f"{out}: {len(every) - len(lines)} of {len(every)} cells left out, {others}",
            file=sys.stderr,
        )
    cells = table(lines, models, groups)
    settings = {
        m: dict(model=v.name, unit=v.unit, levels=v.levels, grid=v.grid, **v.options())
        for m, v in models.items()
    }
    kept = Path(results) / "ranaweera2025.json"
    whole = results_file.of(dict(title="Ranaweera et al., arXiv 2503.21154"))
    if kept.exists():
        whole = results_file.read(kept)
    study = dict(
        dataset=[v.dataset for v in models.values()][0],
        delta=DELTA,
        clip=CLIP,
        tuning_seeds=TUNE,
        wider=WIDER,
        settings=settings,
        cpu_seconds=sum(r["cpu"] for r in lines),
        finding=finding(cells),
        experiments=levels(cells),
        versions=environment(),
    )
    found = results_file.of(study)
    whole.notes = [n for n in whole.notes if not n.startswith("Finding: ")] + found.notes
    whole.versions = found.versions
    parts, found.experiments, found.notes = found.experiments, {}, []
    whole.experiments |= dict(study=found) | parts
    results_file.write(kept, whole)
    picture(stored_rows(whole), Path(results) / "ranaweera2025_study.png")
    return study | dict(rows=cells)


def levels(cells) -> dict:
    """Return the cells as an experiment for each model and noise level."""
    found = {}
    special = ("model", "variant", "level", "multiplier", "seeds", "failed", "epsilon_proved")
    special += ("accuracy", "accuracy_95", "gain", "gain_95")
    for r in cells:
        name = f"study, {r['model']}, noise multiplier {r['multiplier']:.3g}"
        title = "Shapes of noise at one proved ε"
        lines = found.setdefault(name, dict(title=title, lines={}))["lines"]
        known = None not in (r["gain"], r["gain_95"])
        lines[r["variant"]] = dict(
            accuracy=[v / 100 for v in r["seeds"].values()],
            seeds=[int(seed) for seed in r["seeds"]],
            failed=r["failed"],
            epsilon_proved=r["epsilon_proved"],
            columns={
                "points above iso": f"{r['gain']:+.2f} ± {r['gain_95']:.2f}" if known else None
            }
            | {k: v for k, v in r.items() if k not in special},
        )
    return found


def special(experiment, out, quick):
    """Run the groups of the study sequentially; a quick study has one level, three shapes and
    few steps."""
    models, groups = MODELS, GROUPS
    if quick:
        fields = (("batch", 200), ("rounds", 40))
        models = dict(
            linear=dataclasses.replace(
                MODELS["linear"], levels=(16 / 3,), grid=((2, 4, 8),), fields=fields
            )
        )
        groups = {"linear,pixels": ("iso", "prior:0.5", "weighted")}
    for group in groups:
        run(group, out / "cells.jsonl", models, groups, seeds=SEEDS[:2] if quick else SEEDS)
    study = collect(out / "cells.jsonl", out, models, groups)
    return {k: v for k, v in study.items() if k != "rows"}


def main(argv=None):
    """Run the study: `--collect` makes the tables of what ran; group names run these groups."""
    tables = collect

    def command(
        groups: tyro.conf.Positional[tuple[typing.Literal[tuple(GROUPS)], ...]] = (),  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        *,
        cells: str = "runs/ranaweera2025/study/cells.jsonl",
        collect: bool = False,
        results: Path = Path(__file__).parents[2] / "results",
    ) -> int:
        """Run groups of cells, and make tables of what ran.

        Args:
            groups: programs to run.
            cells: lines of cells.
            collect: tables and picture of what ran.
            results: their directory.
        """
        Path(cells).parent.mkdir(parents=True, exist_ok=True)
        for group in groups:
            run(group, cells)
        if collect:
            print(tables(cells, results)["finding"])
        return 0

    return command_line.called(command, "python -m experiments.papers.ranaweera2025.study", argv)


if __name__ == "__main__":
    sys.exit(main())
