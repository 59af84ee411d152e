"""Define the experiments of Noble, Bellet, Dieuleveut, AISTATS 2022 (DP-SCAFFOLD).

These are the figures and tables of the paper, the epsilon that its noise gives, and tuned variants.
Step sizes are the published ones if there are any: eta_l = eta_0 / max(1, K s). The clip norm is 1,
or chosen from a grid, because the paper clips at medians of private norms, which no accountant
covers.  Lines of the figures run the paper's noise and show the epsilon that it claims for a third
party next to the proved one. Accuracy is measured at the end, on the central test rows.
"""

import dataclasses
import itertools
from typing import Any

from jfl.runs import build

from ...harness.baselines import RATES, around, with_chosen
from ...harness.programs import CURVE, Plans
from ...harness.runner import Claim, Experiment, with_seeds
from ...harness.verdicts import (
    about,
    all_of,
    beats,
    close,
    exactly,
    grows,
    inner,
    near_printed,
    no_lower,
    ordered,
)
from . import claims as privacy
from .bounds import bounds
from .lemmas import lemmas
from .runs import (
    DIFFERENCE,
    DRAWN,
    DRAWN_ALIKE,
    GAP,
    MARKS,
    RATIO,
    above_along,
    as_drawn,
    reaches,
    unsteady,
    watched,
    watched_alike,
    worth,
)

METHODS = ("DP-SCAFFOLD-warm", "DP-FedAvg", "DP-FedSGD", "SCAFFOLD-warm", "FedAvg", "FedSGD")
COLD = "DP-SCAFFOLD"  # Figures 9 and 10 on MNIST: the text names no warm start
GAMMAS = (100, 10, 0)  # % of a client's rows that are iid
PAIRS = ((0, 0), (1, 1), (5, 5))  # alpha, beta
RUNS = dict(synthetic=privacy.SYNTHETIC, femnist=privacy.FEMNIST, mnist=privacy.MNIST)
# eta_0 of METHODS: those of FedSGD, and of mnist, are ours
ETA = dict(
    synthetic=(1.0, 1.0, 1.0, 3.0, 10.0, 1.0),
    femnist=(1.0, 1.0, 1.0, 10.0, 30.0, 1.0),
    mnist=(0.1, 0.1, 0.1, 1.0, 1.0, 1.0),
)
DATA = dict(
    synthetic=dict(
        dataset="synthetic",
        preprocess="standardise,unit_norm",
        partition="natural",
        clients=100,
        cohort=20,
        rows_per_client=5000,
        batch=800,
        rounds=400,
        model="logistic",
        l2=5e-3,
    ),
    femnist=dict(
        dataset="emnist",
        preprocess="flatten,standardise,unit_norm",
        partition="similarity",
        clients=40,
        cohort=8,
        rows_per_client=2500,
        holdout=0.2,
        batch=400,
        rounds=400,
        model="logistic",
        l2=5e-3,
    ),
    mnist=dict(
        dataset="mnist",
        preprocess="pca:60,unit_norm",
        partition="similarity",
        clients=60,
        cohort=12,
        rows_per_client=1000,
        holdout=0.2,
        batch=160,
        rounds=100,
        model="mlp",
        hidden=(200,),
        l2=5e-3,
    ),
)
QUICK = dict(
    clients=20, cohort=4, rows_per_client=100, batch=16, steps=5, rounds=64, evaluate_every=32
)
# Fixed before the runs, by how many undecided statements more seeds were expected to settle.  All
# other figures have the default number, and Tables 1 and 4 and the warm start have 30.
NUM_SEEDS = dict(
    fig2a=5,
    fig9_synthetic=20,
    fig9_mnist=40,
    fig9_femnist=10,
    fig9_femnist_tuned=10,
    fig10_synthetic=30,
    fig10_mnist=40,
    fig10_femnist=10,
    fig10_femnist_tuned=10,
)
# Fixed after verdicts with the first number were undecided; judged at half the level.  On MNIST
# all private lines, and in fig9_tuned and fig10_tuned those on Synthetic(5,5), ran again with this
# number, at rates and clip norms chosen where clients differ least.
SECOND_NUM_SEEDS = dict(
    fig1=10,
    fig2a=10,
    fig2b=10,
    fig9_femnist=50,
    fig9_mnist=40,
    fig9_synthetic=80,
    fig9_tuned=20,
    fig10_mnist=40,
    fig10_tuned=20,
    table1=200,
)
# digitised, +- 0.01: GAP at runs.MARKS, K = 50, of the first three METHODS
CURVES = {
    (0, 0): ((-0.27, -0.49, -0.65, -0.71), (-0.12, -0.27, -0.40, -0.48), (0.46, 0.63, 0.64, 0.77)),
    (1, 1): ((-0.06, -0.33, -0.54, -0.67), (0.06, -0.09, -0.23, -0.30), (0.58, 0.63, 0.65, 0.71)),
    (5, 5): ((0.14, -0.09, -0.27, -0.41), (0.26, 0.14, 0.02, -0.07), (0.65, 0.68, 0.69, 0.66)),
}
CLIP_NORMS = (0.25, 0.5, 1.0, 2.0)  # on MNIST, in fig9_tuned and fig10_tuned
# the best of 0.3, 1, 3 and 10 after 10 epochs of seed 1000, which no figure uses
CENTRAL_LR = 3.0
SOUND_ROUNDS = (
    18_527,
    3_616,
    1_756,
    831,
    375,
)  # of each K: the most with a proved epsilon of 3 at sigma_g 10


# --- fields of lines


def noisy(data, **changes):
    """Return the noise of a figure, with delta and view."""
    run = RUNS[data]
    return (
        dict(noise_multiplier=run.sigma_g, delta=run.delta, mode="as_printed", view="third_party")
        | changes
    )


def method(name, data, steps, ratio=0.2, part=0.2):
    """Return the fields of one of METHODS.

    Args:
        name: of METHODS, or COLD.
        data: of DATA.
        steps: K, local steps.
        ratio: fraction of a client's rows in a step.
        part: fraction of the clients in a round.
    """
    steps = round(1 / ratio) if "FedSGD" in name else steps
    kind = dict(algorithm="scaffold") if "SCAFFOLD" in name else {}
    if "warm" in name:
        kind |= dict(warm_rounds=float(round(4 / part)))
    tuned = METHODS[0] if name == COLD else name
    lr = ETA[data][METHODS.index(tuned)] / max(1, round(steps * ratio))
    return dict(steps=steps, lr=lr) | kind | (noisy(data) if name.startswith("DP") else {})


def spread(alpha, beta):
    return dict(synthetic_alpha=float(alpha), synthetic_beta=float(beta))


def grid(data, updates, columns):
    """Return {line: fields} of METHODS, for each K and column; columns: name -> fields."""
    return {
        f"{m}, K={k}, {c}": method(m, data, k) | fields
        for k in updates
        for c, fields in columns.items()
        for m in METHODS
    }


def baselines(lines):
    """Return lines without privacy -> the private ones of the same setting."""
    setting = lambda line: line.split(", ", 1)[1]
    return {
        n: tuple(p for p in lines if p.startswith("DP-") and setting(p) == setting(n))
        for n in lines
        if not n.startswith("DP-")
    }


def against(columns, updates, *others, first=METHODS[0]):
    """Return pairs of lines: `first` against each of the others, in all columns."""
    return [
        (f"{first}, K={k}, {c}", f"{o}, K={k}, {c}")
        for k in updates
        for c in columns
        for o in others
    ]


PAIRED = {f"({a},{b})": spread(a, b) for a, b in PAIRS}
SHARED = {f"{g}%": dict(share=g / 100) for g in GAMMAS}
ALPHAS = {f"alpha={a}": spread(a, 0) for a in (0, 1, 5)}
BETAS = {f"beta={b}": spread(0, b) for b in (0, 1, 5)}
# the authors' code has no l2, and a minimiser needs a little
CODE = dict(preprocess="noble2022_code,unit_norm")  # as in their code, not as in the paper
BARE = {
    f"{m}, K=50, ({a},{b}), no l2": method(m, "synthetic", 50) | spread(a, b) | dict(l2=1e-4)
    for a, b in PAIRS
    for m in METHODS[:3]
}
KS = (50, 100)
LAST = 0.2  # of the rounds: their mean is less noisy than the end
DIFFERS = "the clip norm is 1, while the paper clips at medians of private norms"
DIFFERS_IF_CHOSEN = (
    "the clip norm of a private method is a constant, chosen from one grid, while the paper clips "
    "at medians of private norms"
)
ALPHA_IS_A_SCALE = (
    "proved: the entries of W and b are u + N(0, 1) with one u ~ N(0, alpha) for each, so they are "
    "independent N(0, 1 + alpha), which is sqrt(1 + alpha) times what they are at alpha = 0. All "
    "logits x W + b grow by one factor, which their argmax does not see, and x knows no alpha: the "
    "rows and labels have the same distribution at every alpha"
)


# --- figures


def same_law(lines):
    """Return lines of Figure 1 with the same distribution as those with only alpha or beta.

    Alpha does not change the distribution (ALPHA_IS_A_SCALE).
    """
    beta = {c: round(f["synthetic_beta"]) for c, f in (ALPHAS | BETAS).items()}
    split = {line: line.rpartition(", ") for line in lines}
    return {
        line: ("fig1", f"{method}, ({beta[column]},{beta[column]})")
        for line, (method, _, column) in split.items()
        if column in beta
    }


def watched_figure(title, columns, claims, data="synthetic", more=None):
    lines = grid(data, KS, columns)
    return Experiment(
        title,
        DATA[data],
        lines | (more or {}),
        claims,
        QUICK,
        baselines=baselines(lines),
        same_law=same_law(lines),
        runs=watched,
        differs=DIFFERS,
    )


def first_is_best(columns, key, updates=KS):
    better = beats(against(columns, updates, "DP-FedAvg", "DP-FedSGD"), key)
    return Claim("DP-SCAFFOLD-warm ends better than DP-FedAvg and DP-FedSGD", better)


def without_noise(columns, key=None, updates=KS):
    """Return the claim of Appendix D.3.3 on the methods without noise."""
    pairs = against(columns, updates, "FedAvg", "FedSGD", first="SCAFFOLD-warm")
    text = "without noise, SCAFFOLD ends better than FedAvg and FedSGD where clients differ"
    return Claim(text, beats(pairs, key), statement=text)


def spread_grows(columns, updates):
    """Return the claims on the variance of accuracy over seeds, for each number of local steps."""
    methods = ("DP-FedAvg", "DP-SCAFFOLD-warm")
    text = "runs of DP-FedAvg differ more on heterogeneous rows, of DP-SCAFFOLD-warm not"
    return tuple(
        Claim(
            f"{text}, K={k}",
            unsteady(*([f"{m}, K={k}, {c}" for c in columns] for m in methods)),
            statement=text,
        )
        for k in updates
    )


def at_every_alpha(claim):
    """Extend a claim on lines with alpha = 0 to all others.

    Their rows and labels have one distribution.
    """

    def check(results):
        found = claim.check(results)
        words = "at alpha = 0, which stands for every alpha by the proof that alpha changes nothing"
        return dataclasses.replace(found, seen="; ".join(filter(None, (words, found.seen))))

    return dataclasses.replace(claim, check=check)


def with_heterogeneity(key):
    """Return the claims of a figure with PAIRED columns and both numbers of local steps."""
    return (
        first_is_best(PAIRED, key),
        *(
            Claim(
                f"the gap to DP-FedAvg grows with heterogeneity, K={k}",
                grows(against(PAIRED, (k,), "DP-FedAvg"), key),
            )
            for k in KS
        ),
        *(
            Claim(
                f"the gap to DP-FedAvg grows with K, {c}",
                grows(against((c,), KS, "DP-FedAvg"), key),
            )
            for c in PAIRED
        ),
    )


def by_ratio(claims):
    """Return the same claims by RATIO, which the paper's text uses but no figure plots."""
    return tuple(
        dataclasses.replace(c, text=f"{c.text}; by the log-ratio", whose="ours") for c in claims
    )


def tuned():
    """Define the private methods of Figures 1, 3 and 4 at tuned rates.

    Each method has the rate of one grid that is most accurate at (1,1).
    """
    every = grid("synthetic", KS, PAIRED)
    lines = {n: f for n, f in every.items() if n.startswith("DP-")}
    free = {f"FedAvg, K={k}, (5,5)": every[f"FedAvg, K={k}, (5,5)"] for k in KS}
    measures = {"train loss": GAP, "accuracy": None, "gradient dissimilarity": DIFFERENCE}
    # DP-FedSGD knows no K: its runs are the same at both
    own_steps = lambda line: line.replace("K=100", "K=50") if "FedSGD" in line else line
    return Experiment(
        "Synthetic: train loss, each private method at the best of one grid for accuracy at (1,1)",
        DATA["synthetic"],
        lines | free,
        tuple(
            dataclasses.replace(c, text=f"{c.text}, K={k}, each at the rate of one grid: {of}")
            for of, key in measures.items()
            for k in KS  # one claim of both at first, which hid that they differ
            for c in ours((first_is_best(PAIRED, key, (k,)),))
        )
        + tuple(
            Claim(
                f"DP-SCAFFOLD-warm ends better than FedAvg without privacy at (5,5), K={k}, each "
                "at a rate chosen for accuracy",
                beats(against(("(5,5)",), (k,), "FedAvg"), GAP),
                whose="ours",
            )
            for k in KS
        ),
        QUICK,
        runs=watched,
        differs=DIFFERS,
        # FedAvg takes what Figure 1 chose for the same line
        methods={n: own_steps(f"{n.split(', (')[0]}, (1,1)") for n in lines} | {n: n for n in free},
        # a run at K = 100 takes minutes: there both methods have the five rates that hold half of
        # what each of them chose at K = 50
        grid=lambda line: dict(lr=around(0.02, each_side=2) if "K=100" in line else RATES),
    )


def near_first(lines, clip_norms=None):
    """Return the grid of a line: from a decade below its first rate to one above.

    Args:
        lines: {line: fields}.
        clip_norms: of private lines; None: only rates are chosen.
    """
    clips = dict(clip_norm=clip_norms) if clip_norms else {}
    return lambda line: dict(lr=around(lines[line]["lr"])) | clips


def each_tuned(experiment, split, clip_norms=None):
    """Tune a figure of private methods, for each ratio.

    Each method has the setting of one grid that is most accurate on one split of the data.

    Args:
        experiment: the figure at its published rates.
        split: that chooses, the end of the names of its lines.
        clip_norms: of the grid; None: only rates are chosen.
    """
    words = ", each at the best of one grid"
    claims = (dataclasses.replace(c, text=c.text + words) for c in ours(experiment.claims))
    return dataclasses.replace(
        experiment,
        title=experiment.title + words,
        claims=tuple(claims),
        methods={n: f"{n.rpartition(', ')[0]}, {split}" for n in experiment.lines},
        grid=near_first(experiment.lines, clip_norms),
        differs=DIFFERS_IF_CHOSEN if clip_norms else DIFFERS,
    )


def published_curves():
    """Return our claim that we reproduce the published curves, to 0.15.

    The published code has no l2, prepares features in another way (CODE), and gives all clients of
    a round the same seed.
    """
    drawn = (c for curves in CURVES.values() for c in curves)
    check = as_drawn(dict(zip(BARE, drawn, strict=True)))
    return Claim("the published curves, to 0.15", check, whose="ours")


def as_coded(features, shared_noise):
    """Return in words which parts of the published code an experiment has."""
    words = ["features as its published code has them"] * features
    words += ["noise that all clients of a round share, as its published code draws it"] * (
        shared_noise
    )
    return "".join(f", {each}" for each in words)


def ours(claims):
    """Return claims of the paper at other settings as ours; the paper does not state them."""
    as_ours = dict(whose="ours", statement="")
    return tuple(dataclasses.replace(c, **as_ours) for c in claims)


def on_synthetic(title, claims, more=None):
    return watched_figure(f"Synthetic: {title}", PAIRED, claims, more=more)


def on_classes(title, data, steps, runs: Any = DRAWN):
    """Define a figure of accuracy at three fractions of iid rows and one number of local steps."""
    updates = (steps,)
    (iid,) = against(("100%",), updates, "DP-FedAvg")
    claims = (
        Claim(
            "DP-SCAFFOLD-warm is more accurate than DP-FedAvg and DP-FedSGD where clients differ",
            beats(against(("10%", "0%"), updates, "DP-FedAvg", "DP-FedSGD")),
        ),
        Claim(
            "and than FedAvg without privacy on one class a client",
            beats(against(("0%",), updates, "FedAvg")),
            whose="paper" if data == "mnist" else "ours",  # the paper names the row of MNIST
        ),
        *([without_noise(("10%", "0%"), updates=updates)] if steps == 50 else []),
        # The paper says the first of Figure 10, and the second of Figure 3.
        *ours((Claim(f"no difference on iid rows, K={steps}", close(*iid)),)),
        *ours(spread_grows(SHARED, updates)),
    )
    lines = grid(data, updates, SHARED)
    # The paper tunes where clients differ least.  Methods without privacy keep the rates that were
    # chosen with 10 % iid rows, which favours them where clients differ more.
    split = lambda line: "100%" if line.startswith("DP-") else "10%"
    chosen_for = {n: f"{n.rpartition(', ')[0]}, {split(n)}" for n in lines}
    return Experiment(
        title,
        DATA[data],
        lines,
        claims,
        QUICK,
        baselines=baselines(lines),
        runs=runs,
        differs=DIFFERS_IF_CHOSEN if data == "mnist" else DIFFERS,
        methods=chosen_for if data == "mnist" else {},
        grid=near_first(lines, CLIP_NORMS),
        last=LAST,
    )


def of_ratios(title, table, which):
    """Define Figures 9 and 10: rounds up to the paper's epsilon.

    The fraction of clients (l) or rows (s) varies.
    """
    out = {}
    base: dict[str, Any]
    for data, (stated, runs) in table.items():
        run, base, lines = RUNS[data], DATA[data], {}
        columns = PAIRED if data == "synthetic" else SHARED
        methods = (COLD if data == "mnist" else METHODS[0], METHODS[1])
        for ratio, rounds in runs.items():
            part, s = (ratio, 0.2) if which == "l" else (0.1, ratio)
            batch = round(s * 5 * base["batch"])
            for c, fields in columns.items():
                for m in methods:
                    lines[f"{m}, {which}={ratio}, {c}"] = (
                        method(m, data, 10, s, part)
                        | fields
                        | dict(rounds=rounds, batch=batch, cohort=int(part * run.users + 1e-9))
                    )
        far, near = (list(columns)[i] for i in (-1, 0))
        at: Any = lambda c, ratio, methods=methods: tuple(
            f"{m}, {which}={ratio}, {c}" for m in methods
        )
        ratios = list(runs)
        best = ratios if which == "l" else ratios[::-1]
        claims = (
            Claim(
                f"{methods[0]} is more accurate than DP-FedAvg",
                beats([at(far, r) for r in ratios]),
            ),
            Claim(
                f"the {'smallest l' if which == 'l' else 'largest s'} is best",
                ordered(*(at(far, r)[0] for r in best)),
            ),
        )
        if which == "l":
            middle = 0.1 if data == "mnist" else 0.2
            claims += (
                Claim(
                    f"about {middle * 100:g} points of difference, to 7",
                    about([at(far, r) for r in ratios], middle - 0.07, middle + 0.07),
                ),
            )
        else:
            claims += (
                Claim("the difference grows with s", grows([at(far, r) for r in ratios])),
                *(
                    (Claim("no difference on iid rows", close(*at(near, ratios[-1]))),)
                    if near == "100%"
                    else ()
                ),
            )
        out[data] = Experiment(
            f"{title}: {data}, epsilon {stated:g} by the paper",
            base,
            lines,
            claims,
            QUICK,
            runs=DRAWN,
            differs=DIFFERS_IF_CHOSEN if data == "mnist" else DIFFERS,
            # the paper tunes where clients differ least
            methods={n: f"{n.rpartition(', ')[0]}, 100%" for n in lines} if data == "mnist" else {},
            grid=near_first(lines, CLIP_NORMS),
            last=LAST,
        )
    return out


# --- tables

# 4 / l = 80 warm rounds do not fit into the 72 of K = 40: the tables start cold
TABLE = DATA["synthetic"] | dict(algorithm="scaffold", cohort=5)


def cell(sigma_g, steps, rounds, **changes):
    k = dict(
        steps=steps,
        lr=method("DP-FedAvg", "synthetic", steps)["lr"],
        rounds=rounds,
        evaluate_every=max(1, rounds // 100),  # ten or more in the last tenth
    )
    return noisy("synthetic", noise_multiplier=float(sigma_g)) | k | changes


def table(name, title, alpha, beta, published, alike, **changes):
    """Define Table 1 or 4; `alike`: all clients of a round draw the same noise."""
    lines, paper, accuracy = {}, {}, {}
    for sigma_g, row, rounds in zip(
        privacy.TABLE_SIGMAS, published, privacy.TABLE1_ROUNDS, strict=True
    ):
        for steps, (mean, std), t in zip(privacy.TABLE_UPDATES, row, rounds, strict=True):
            line = f"sigma={sigma_g}, K={steps}"
            lines[line] = cell(sigma_g, steps, t)
            paper[line], accuracy[line] = f"{mean:.2f} ± {std:.2f} %", mean / 100
    rows = {s: [f"sigma={s}, K={k}" for k in privacy.TABLE_UPDATES] for s in privacy.TABLE_SIGMAS}
    claims = (
        *(
            Claim(
                f"some K between 1 and 40 is better than both, sigma {s}",
                inner(*names),
                statement=f"{name}: some K between 1 and 40 is better than both",
            )
            for s, names in rows.items()
        ),
        Claim(
            "sigma 10 and 20 are similar, to 3 points",
            all_of([close(*pair, by=0.03) for pair in zip(rows[10], rows[20], strict=True)]),
            statement=f"{name}: sigma 10 and 20 are similar",
        ),
        Claim(
            "K = 40 allows too few rounds: it is worst but for K = 1",
            beats([(n, rows[10][-1]) for n in rows[10][1:-1]]),
            statement=f"{name}: K = 40 allows too few rounds",
        ),
        Claim(
            "accuracies as printed, to 3 points",
            near_printed(accuracy, 0.03),
            whose="ours",  # printed numbers are not claims
        ),
    )
    by_the_text = not (alike or changes)
    return Experiment(
        title,
        TABLE | spread(alpha, beta) | changes,
        lines,
        claims if by_the_text else ours(claims),
        QUICK,
        seeds=tuple(range(30)) if by_the_text else (0, 1, 2),
        paper=paper,
        runs=DRAWN_ALIKE if alike else DRAWN,
        differs=DIFFERS,
        last=0.1,
    )


def table_sound():
    """Define Table 1 by the proved accountant.

    Either there is less noise for the same number of rounds, or there are more rounds at the
    smallest noise of the table.
    """
    epsilon, lines = privacy.TABLE_EPSILON, {}
    for steps, t, most in zip(
        privacy.TABLE_UPDATES, privacy.TABLE1_ROUNDS[0], SOUND_ROUNDS, strict=True
    ):
        lines[f"K={steps}, its rounds"] = cell(
            1, steps, t, mode="sound", noise_multiplier=None, epsilon=epsilon
        )
        lines[f"K={steps}, sigma=10, all rounds"] = cell(10, steps, most)
    paper = {
        f"K={k}, its rounds": f"{m:.2f} ± {s:.2f} % at sigma 10"
        for k, (m, s) in zip(privacy.TABLE_UPDATES, privacy.TABLE1[0], strict=True)
    }
    claims = (
        Claim(
            "K = 40 is not worse than K = 10 if it gets the rounds that are proved",
            no_lower(("K=40, sigma=10, all rounds", "K=10, its rounds")),
            whose="ours",
        ),
    )
    return Experiment(
        "Table 1 at a proved epsilon of 3",
        TABLE | spread(5, 5),
        lines,
        claims,
        QUICK,
        paper=paper,
        runs=DRAWN,
        differs=DIFFERS,
        last=0.1,
        columns=lambda config: {"sigma_g": build.build(config)[1].noise_multiplier},
    )


def recalibrated(data, stated, fields):
    """Define runs with the noise that a stated epsilon needs, by the paper's bound and by proof."""
    line = method(METHODS[0], data, 50) | fields
    by = lambda **changes: line | dict(noise_multiplier=None, epsilon=stated) | changes
    return Experiment(
        f"{data}: noise at epsilon {stated:g}",
        DATA[data],
        {
            "noise as run": line,
            "noise by its bound": by(),
            "noise by proof": by(mode="sound"),
            "noise by proof, server": by(mode="sound", view="server"),
            "no noise": method("SCAFFOLD-warm", data, 50) | fields,
        },
        (
            Claim(
                "the proved noise is more accurate than the paper's",
                beats([("noise by proof", "noise as run")]),
                whose="ours",
            ),
        ),
        QUICK,
        runs=DRAWN,
        differs=DIFFERS,
        columns=lambda config: {"sigma_g": build.build(config)[1].noise_multiplier or 0.0},
    )


fig9, fig10 = (
    of_ratios(f"Figure {n}", t, w) for n, t, w in ((9, privacy.FIG9, "l"), (10, privacy.FIG10, "s"))
)
ONE = cell(10, 10, 428)
EXPERIMENTS = dict(
    fig1=on_synthetic(
        "train loss",
        (
            *with_heterogeneity(GAP),
            Claim(
                "DP-SCAFFOLD-warm ends better than FedAvg without privacy at (5,5)",
                beats(against(("(5,5)",), KS, "FedAvg"), GAP),
            ),
            without_noise(PAIRED, GAP),
            published_curves(),
        ),
        more=BARE,
    ),
    fig2a=on_classes("FEMNIST, logistic regression", "femnist", 50),
    fig2b=on_classes("MNIST, MLP on 60 components", "mnist", 50),
    fig3=on_synthetic(
        "accuracy",
        (
            # Where the text says that the gap grows, it names the loss of Figure 1.
            first_is_best(PAIRED, None),
            *ours(with_heterogeneity(None)[1:]),
            Claim(
                "about 10 points on average, to 5",
                about(against(PAIRED, KS, "DP-FedAvg"), 0.05, 0.15),
            ),
            *spread_grows(PAIRED, KS),
            Claim(
                "DP-SCAFFOLD-warm is more accurate than DP-FedAvg along the curve, at rounds "
                f"{', '.join(map(str, MARKS))}",
                above_along(against(PAIRED, KS, "DP-FedAvg")),
                whose="ours",  # the paper shows the curves and names no rounds
            ),
        ),
    ),
    fig4=on_synthetic(
        "gradient dissimilarity",
        (
            first_is_best(PAIRED, DIFFERENCE),
            *ours(with_heterogeneity(DIFFERENCE)[1:]),
            *by_ratio(with_heterogeneity(RATIO)),
        ),
    ),
    fig5=watched_figure(
        "Synthetic: train loss, alpha alone",
        ALPHAS,
        (
            at_every_alpha(first_is_best({"alpha=0": ALPHAS["alpha=0"]}, GAP)),
            Claim(
                "alpha changes nothing",
                exactly(True, ALPHA_IS_A_SCALE),
                whose="ours",
            ),
        ),
    ),
    fig6=watched_figure(
        "Synthetic: train loss, beta alone",
        BETAS,
        (
            first_is_best(BETAS, GAP),
            *ours(
                Claim(
                    f"the gap to DP-FedAvg grows with beta, K={k}",
                    grows(against(BETAS, (k,), "DP-FedAvg"), GAP),
                )
                for k in KS
            ),
        ),
    ),
    # Its lines at K = 50 are those of Figure 2a.  The runs are those of Figure 8.
    fig7=on_classes("FEMNIST: accuracy at K = 100", "femnist", 100, watched),
    fig8=watched_figure(
        "FEMNIST: gradient dissimilarity",
        SHARED,
        (first_is_best(SHARED, DIFFERENCE), *by_ratio([first_is_best(SHARED, RATIO)])),
        data="femnist",
    ),
    **{f"fig9_{data}": e for data, e in fig9.items()},
    **{f"fig10_{data}": e for data, e in fig10.items()},
    **{
        f"{name}{'_code' * features}{'_alike' * shared_noise}": table(
            name,
            f"Table {name[-1]}: DP-SCAFFOLD on Synthetic({u},{u}), epsilon 3 by the paper"
            + as_coded(features, shared_noise),
            u,
            u,
            values,
            shared_noise,
            **(CODE if features else {}),
        )
        for features, shared_noise in itertools.product((False, True), repeat=2)
        for name, u, values in (("table1", 5, privacy.TABLE1), ("table4", 0, privacy.TABLE4))
    },
    **{
        f"fig1{'_code' * features}{'_alike' * shared_noise}": Experiment(
            "Synthetic: train loss, no l2" + as_coded(features, shared_noise),
            DATA["synthetic"] | (CODE if features else {}),
            BARE,
            (published_curves(),),
            QUICK,
            seeds=(0, 1, 2),
            runs=watched_alike if shared_noise else watched,
            differs=DIFFERS,
        )
        for features, shared_noise in ((True, False), (False, True), (True, True))
    },
    fig1_tuned=tuned(),
    fig9_tuned=each_tuned(fig9["synthetic"], "(0,0)", CLIP_NORMS),
    fig10_tuned=each_tuned(fig10["synthetic"], "(0,0)", CLIP_NORMS),
    fig9_femnist_tuned=each_tuned(fig9["femnist"], "10%"),
    fig10_femnist_tuned=each_tuned(fig10["femnist"], "10%"),
    table1_sound=table_sound(),
    central=Experiment(
        "MNIST: the network of Figure 2, trained centrally without noise",
        dict(
            dataset="mnist",
            preprocess="pca:60,unit_norm",
            partition="iid",
            clients=1,
            cohort=1,
            model="mlp",
            hidden=(200,),
            batch=500,
            batch_sampler="epochs",
            steps=120,  # an epoch
            rounds=100,
            evaluate_every=10,
        ),
        {"central": dict(algorithm="fedavg", lr=CENTRAL_LR)},
        (
            Claim(
                "batches of 500 and 100 epochs reach a test accuracy of more than 98 %",
                reaches("central", 0.98),
            ),
        ),
        dict(steps=5, rounds=2, evaluate_every=1),
        seeds=(0, 1, 2),
        runs=Plans(trace=CURVE),
        differs="the learning rate and the scaling of the rows to norm 1 are ours",
    ),
    equal_eps=recalibrated("synthetic", 13.0, spread(5, 5)),
    equal_eps_mnist=recalibrated("mnist", 7.2, dict(share=0.0)),
    warm=Experiment(
        "Warm and cold start of DP-SCAFFOLD, Synthetic(5,5)",
        TABLE | spread(5, 5),
        {
            "warm": ONE | dict(warm_rounds=80.0, rounds=508),
            "cold": ONE,
            "FedAvg": ONE | dict(algorithm="fedavg"),
        },
        (Claim("warm and cold start give the same", close("warm", "cold")),),
        QUICK | dict(rounds=96),
        seeds=tuple(range(30)),
        runs=DRAWN,
        differs=DIFFERS,
    ),
    clip=Experiment(
        "Fixed clip norms instead of a median, Synthetic(5,5)",
        TABLE | spread(5, 5),
        {f"C={c}": ONE | dict(clip_norm=c) for c in (0.25, 0.5, 1.0, 2.0)},
        (),
        QUICK,
        runs=DRAWN,
        differs=DIFFERS,
    ),
    batches=Experiment(
        "Batches without replacement, and Poisson batches of the same noise",
        TABLE | spread(5, 5),
        {
            "without replacement": ONE,
            "Poisson": ONE | dict(batch_sampler="poisson", noise_multiplier=20.0, mode="sound"),
        },
        (
            Claim(
                "no difference in accuracy",
                close("without replacement", "Poisson"),
                whose="ours",
            ),
        ),
        QUICK,
        runs=DRAWN,
        differs=DIFFERS,
    ),
    worth=Experiment(
        "Claimed and proved epsilon of the experiments", {}, {}, special=worth, differs=""
    ),
    bounds=Experiment(
        "Theorems C.1 and C.2: Synthetic(1,1), softmax regression with l2 = 0.5 and without, and "
        "squared sigmoids",
        DATA["synthetic"]
        | spread(1, 1)
        | dict(
            clients=20,
            cohort=10,
            rows_per_client=125,
            steps=5,
            batch=20,
            l2=0.5,
            clip_norm=2.0,
            noise_multiplier=2.0,
            rounds=4000,
        ),
        {
            "scaffold": dict(algorithm="scaffold", warm_rounds=16.0),
            "fedavg": dict(algorithm="fedavg"),
        },
        quick=dict(rounds=300),
        special=bounds,
    ),
)

EXPERIMENTS = with_seeds(EXPERIMENTS, NUM_SEEDS, SECOND_NUM_SEEDS)

EXPERIMENTS["lemmas"] = dataclasses.replace(
    EXPERIMENTS["bounds"],
    title="Lemmas C.2, C.3, C.8 and C.9 and Corollary C.1, on the problems of Theorem C.1",
    base=EXPERIMENTS["bounds"].base | dict(rounds=1000),
    special=lemmas,
)

PRINTED_RATES = EXPERIMENTS  # before any rates were chosen
EXPERIMENTS = with_chosen("noble2022", PRINTED_RATES)
