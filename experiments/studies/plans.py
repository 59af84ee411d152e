"""What the studies run, and what is checked on it: cells of a config each, and claims over the rows
that come out.

Within a panel all lines with noise have one unit, adjacency, view and delta; epsilon is the proved
one.  Clients hold equally many rows where the noise is an example's own, so that one multiplier is
right for all of them and for every split.  With fixed-size cohorts and batches, neighbours replace
one example or one client.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jfl.papers import as_printed
from jfl.papers.noble2022 import privacy
from jfl.papers.talaei2024 import theory as talaei2024
from jfl.runs.tables import interval

from ..harness.runner import CONFIRMED, NOT, UNKNOWN, Claim

LEVELS = dict(
    example=dict(unit="example", view="server"), client=dict(unit="client", view="third_party")
)
NONE = ", no noise"  # ends the name of a line without noise


class Cell(NamedTuple):
    """One point of a picture: fields of jfl.runs.config.Config, and the fields to choose from on
    other seeds."""

    panel: str
    line: str
    x: float | None  # None: a level across the panel
    fields: dict
    grid: tuple = ({},)
    asked: dict = {}  # of an audit: unit, trials; claim: whether a paper's claim stands beside it


class Study(NamedTuple):
    title: str
    xlabel: str
    cells: tuple
    claims: tuple = ()
    seeds: tuple = ()  # of runs and of their splits
    tune: tuple = ()  # the same, of the runs that choose from the grids
    logx: bool = True
    y: str = "accuracy"  # or "epsilon": nothing is trained; or "audit"
    together: bool = False  # choosing and reporting in one program: less to compile, more to run
    trials: int = 0  # of an audit: runs of each side


# --- checks: over {(panel, line, x): row}; differences are of equal seeds and splits, intervals of
# 95 % ---------------


def gap(rows, one, other):
    """Mean and half width of the difference in accuracy of two cells over the seeds of both; None
    without two seeds."""
    if one not in rows or other not in rows:
        return None
    a, b = (rows[k]["values"] for k in (one, other))
    both = [s for s in a if s in b]
    return interval([a[s] - b[s] for s in both]) if len(both) > 1 else None


def _all(rows, pairs, holds):
    found = [gap(rows, *pair) for pair in pairs]
    seen = ", ".join("not run" if g is None else f"{g[0]:+.3f} ± {g[1]:.3f}" for g in found)
    if any(g is not None and not holds(*g) for g in found):
        return NOT, seen
    return (UNKNOWN if not found or None in found else CONFIRMED), seen


def above(*pairs):
    """The first of each pair ends above the second: the whole interval of their difference is
    positive."""
    return lambda rows: _all(rows, pairs, lambda mean, half: mean - half > 0)


def within(margin, *pairs):
    """The first of each pair ends at most `margin` from the second: the whole interval of their
    difference does."""
    return lambda rows: _all(rows, pairs, lambda mean, half: abs(mean) + half <= margin)


def _no_worse(margin, *pairs):
    """The first of each pair ends less than `margin` below the second, or above."""
    return lambda rows: _all(rows, pairs, lambda mean, half: mean + half >= -margin)


def proved(holds, told):
    """A check of epsilons alone; `holds` and `told` take all rows, and a KeyError says that one was
    not run."""

    def check(rows):
        try:
            return (CONFIRMED if holds(rows) else NOT), told(rows)
        except KeyError as missing:
            return UNKNOWN, f"not run: {missing}"

    return check


# --- 1: frontier


def rates(*values, of="lr"):
    return tuple({of: float(v)} for v in values)


ALIKE, RATES = (
    ("fedavg", "fedprox", "scaffold", "dpnfl"),
    dict(example=(0.1, 0.3, 1, 3), client=(0.03, 0.1, 0.3, 1, 3)),
)
ALGORITHMS = dict(  # the grids
    example=dict.fromkeys(ALIKE, RATES["example"])
    | dict(
        fedsgd=(0.3, 1, 3, 10),
        addpnfl=(0.003, 0.01, 0.03, 0.1),
        output_perturbation=(0.03, 0.1, 0.3, 1),
    ),
    client=dict.fromkeys((*ALIKE, "padpfl"), RATES["client"])
    | dict(fedsgd=(0.3, 1, 3, 10), addpnfl=(0.003, 0.01, 0.03, 0.1)),
)
PLAIN = (0.03, 0.1, 0.3, 1, 3)  # without noise
NAMES = dict(
    fedavg="FedAvg",
    fedsgd="FedSGD",
    fedprox="FedProx",
    scaffold="SCAFFOLD",
    dpnfl="DPNFL",
    addpnfl="AdDPNFL",
    output_perturbation="output perturbation",
    padpfl="PADPFL",
)
DATA: dict[str, dict[str, Any]] = dict(
    mnist=dict(dataset="mnist", partition="iid", clients=100, batch=60, steps=5, rounds=30),
    synthetic=dict(
        dataset="synthetic",
        synthetic_alpha=1.0,
        synthetic_beta=1.0,
        partition="natural",
        clients=50,
        rows_per_client=1250,
        batch=100,
        steps=5,
        rounds=30,
    ),
    adult=dict(dataset="adult", partition="iid", clients=100, batch=40, steps=5, rounds=30),
    fashion=dict(
        dataset="fashion_mnist", partition="iid", clients=100, batch=60, steps=5, rounds=30
    ),
    digits=dict(
        dataset="digits",
        partition="labels",
        classes_per_client=10,
        rows_per_client=70,
        clients=20,
        batch=14,
        steps=5,
        rounds=12,
    ),
)
TITLES = dict(
    mnist="MNIST, iid",
    synthetic="Synthetic(1,1), natural",
    adult="Adult, iid",
    fashion="Fashion-MNIST, iid",
    digits="digits, iid",
)
# of a quick run: compiling is most of it, and every algorithm at every level is a program
SHORT = dict(example=("fedavg", "scaffold"), client=("fedavg",))
few = lambda values, quick: (
    values[-3:-1] if quick else values
)  # quick runs choose between two rates
SEEDS, TUNE = tuple(range(5)), (100,)
QUICK: dict[str, Any] = dict(seeds=SEEDS[:3], tune=TUNE, together=True)
FULL: dict[str, Any] = dict(seeds=SEEDS, tune=TUNE)


def line(algorithm, values, **fields):
    """Fields and grid of an algorithm; the adaptive one's rate is the server's."""
    of = "server_lr" if algorithm == "addpnfl" else "lr"
    fields = (
        dict(model="logistic", algorithm=algorithm, **({"lr": 0.3} if of == "server_lr" else {}))
        | fields
    )
    if algorithm == "fedsgd":
        fields.pop("steps")
    return fields | (dict(upload="difference") if algorithm == "padpfl" else {}), rates(
        *values, of=of
    )


def frontier(quick):
    sets = ("digits",) if quick else ("mnist", "synthetic", "adult")
    return _frontier(
        "Privacy-utility frontier of the algorithms at equal proved epsilon", sets, quick
    )


def fashion(quick):
    return _frontier(
        "Fashion-MNIST: privacy-utility frontier of the algorithms at equal proved epsilon",
        ("fashion",),
        quick,
        ("fedavg", "fedsgd", "scaffold"),
    )


def _frontier(title, sets, quick, only=None):
    epsilons = dict(
        example=(4.0, 16.0) if quick else (1.0, 2.0, 4.0, 8.0),
        client=(8.0, 32.0) if quick else (2.0, 4.0, 8.0, 16.0),
    )
    cells, claims = [], []
    for data, base in ((k, DATA[k]) for k in sets):
        for level, where in LEVELS.items():
            panel = f"{TITLES[data]}: {level} level"
            shown = only or (SHORT[level] if quick else ALGORITHMS[level])
            names = {n: v for n, v in ALGORITHMS[level].items() if n in shown}
            for name, values in names.items():
                fields, grid = line(name, few(values, quick), **base)
                cells += [
                    Cell(panel, NAMES[name], e, fields | where | dict(epsilon=e), grid)
                    for e in epsilons[level]
                ]
            fields, grid = line("fedavg", few(PLAIN, quick), **base)
            cells.append(Cell(panel, "FedAvg" + NONE, None, fields, grid))
            at = lambda name, e, panel=panel: (panel, NAMES[name], e)
            low, high = epsilons[level][0], epsilons[level][-1]
            claims += [
                Claim(
                    f"{panel}: FedAvg gains with epsilon",
                    above((at("fedavg", high), at("fedavg", low))),
                ),
                Claim(
                    f"{panel}: noise costs FedAvg accuracy at epsilon {high:g}",
                    above(((panel, "FedAvg" + NONE, None), at("fedavg", high))),
                ),
            ]
            pairs = [(at("scaffold", e), at("fedavg", e)) for e in epsilons[level]]
            if "scaffold" in names:
                claims.append(
                    Claim(
                        f"{panel}: SCAFFOLD ends above FedAvg at every epsilon, clients differ",
                        above(*pairs),
                    )
                    if data == "synthetic"
                    else Claim(
                        (
                            f"{panel}: SCAFFOLD is within 0.02 of FedAvg at every epsilon, clients "
                            f"are "
                            f"alike"
                        ),
                        within(0.02, *pairs),
                    )
                )
            if "fedsgd" in names:
                claims.append(
                    Claim(
                        f"{panel}: local steps pay: FedAvg ends above FedSGD at epsilon {high:g}",
                        above((at("fedavg", high), at("fedsgd", high))),
                    )
                )
    return Study(
        title,
        "proved ε",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- text: an LSTM and a transformer, at client level


ROLES = dict(  # every role of every play is a client: 2 to 1,232 rows of 40 characters
    dataset="shakespeare",
    window=40,
    stride=40,
    every=True,
    partition="natural",
    clients=1168,
    sampler="poisson",
    cohort=50,
    batch=4,
    batch_sampler="with_replacement",  # a client may have fewer rows than a batch
    steps=4,
)
MODELS = dict(  # of 24,000 and 19,000 parameters
    LSTM=dict(model="lstm", cells=(64,)), GPT=dict(model="gpt", width=32, layers=1)
)


def text(quick):
    """The rule: each line chooses its rate and its clip norm, at each epsilon, on a seed of its
    own; a line without noise its rate alone."""
    epsilons = (8.0, 32.0) if quick else (2.0, 4.0, 8.0, 16.0)
    base = ROLES | dict(rounds=3 if quick else 100)
    lrs, clips = ((1.0,), (0.3,)) if quick else ((0.3, 1.0, 3.0), (0.1, 0.3))
    plain = lrs if quick else (0.1, 0.3, 1.0, 3.0, 10.0)
    private = tuple(dict(lr=lr, clip_norm=c) for lr in lrs for c in clips)
    panel, cells = "Shakespeare by role: client level", []
    for name, model in MODELS.items():
        cells += [
            Cell(panel, name, e, base | model | LEVELS["client"] | dict(epsilon=e), private)
            for e in epsilons
        ]
        cells.append(Cell(panel, name + NONE, None, base | model, rates(*plain)))
    claims = []
    for name in MODELS:
        at = lambda e, name=name: (panel, name, e)
        claims += [
            Claim(f"{name} gains with epsilon", above((at(epsilons[-1]), at(epsilons[0])))),
            Claim(
                f"noise costs {name} accuracy at epsilon {epsilons[-1]:g}",
                above(((panel, name + NONE, None), at(epsilons[-1]))),
            ),
        ]
    claims.append(
        Claim(
            "at every epsilon the LSTM ends above the GPT",
            above(*(((panel, "LSTM", e), (panel, "GPT", e)) for e in epsilons)),
        )
    )
    return Study(
        "The next character of Shakespeare's roles, at equal proved epsilon of a client",
        "proved ε",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- 2: heterogeneity


def heterogeneity(quick):
    labels, alphas = ((1, 10), (0.1, 10.0)) if quick else ((1, 2, 5, 10), (0.1, 0.3, 1.0, 10.0))
    names = ("fedavg", "scaffold")
    base = (
        DATA["digits"] | dict(rows_per_client=60)
        if quick
        else DATA["mnist"] | dict(rows_per_client=500)
    )
    base = {k: v for k, v in base.items() if k not in ("classes_per_client", "partition")}
    data, epsilons = ("digits", (8.0, 32.0)) if quick else ("MNIST", (8.0, 8.0))
    by_labels, by_alpha = (
        f"{data} by {what} level, ε = {e:g}"
        for what, e in zip(("classes a client: example", "Dirichlet α: client"), epsilons)
    )
    kinds = {
        by_labels: [(c, dict(partition="labels", classes_per_client=c)) for c in labels],
        by_alpha: [
            (a, dict(partition="dirichlet", alpha=a, min_rows=base["batch"], rows_per_client=None))
            for a in alphas
        ],
    }
    cells, claims = [], []
    for (panel, splits), (level, where), epsilon in zip(kinds.items(), LEVELS.items(), epsilons):
        for name in (mine := names[:1] if quick and level == "client" else names):
            noisy, grid = line(name, few(ALGORITHMS[level][name], quick), **base)
            plain, wide = line(name, few(PLAIN, quick), **base)
            for x, split in splits:
                cells.append(
                    Cell(panel, NAMES[name], x, noisy | where | split | dict(epsilon=epsilon), grid)
                )
                if not quick or name == "fedavg":
                    cells.append(Cell(panel, NAMES[name] + NONE, x, plain | split, wide))
        one, last = splits[0][0], splits[-1][0]
        for end, what in (("", "with noise"), (NONE, "without")):
            claims.append(
                Claim(
                    f"{panel}: {what}, heterogeneity costs FedAvg accuracy",
                    above(((panel, "FedAvg" + end, last), (panel, "FedAvg" + end, one))),
                )
            )
            if "scaffold" in mine and not (quick and end):
                claims.append(
                    Claim(
                        f"{panel}: {what}, SCAFFOLD ends above FedAvg where clients differ most",
                        above(((panel, "SCAFFOLD" + end, one), (panel, "FedAvg" + end, one))),
                    )
                )
    return Study(
        "Accuracy against heterogeneity, at one proved epsilon and without noise",
        "classes a client, or α (small: clients differ)",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- 3: local steps


def steps(quick):
    ks = (1, 6) if quick else (1, 2, 5, 10)
    base = DATA["digits"] if quick else DATA["mnist"]
    total = base["rounds"] * ks[-1] // 2
    panels = {
        f"{base['rounds']} rounds": lambda k: base["rounds"],
        f"{total} local steps in all": lambda k: total // k,
    }
    budgets = (
        [("example", 16.0), ("client", 32.0)]
        if quick
        else [("example", 2.0), ("example", 8.0), ("client", 8.0)]
    )
    cells, claims = [], []
    for panel, rounds in panels.items():
        for k in ks:
            shape = base | dict(steps=k, rounds=rounds(k))
            cells += [
                Cell(
                    panel,
                    f"{level}, ε = {e:g}",
                    k,
                    shape | LEVELS[level] | dict(model="logistic", epsilon=e),
                    rates(*few(RATES[level], quick)),
                )
                for level, e in budgets
            ]
            if not quick:
                cells.append(
                    Cell(panel, "FedAvg" + NONE, k, shape | dict(model="logistic"), rates(*PLAIN))
                )
        first, last = ks[0], ks[-1]
        name = lambda level: next(f"{v}, ε = {e:g}" for v, e in reversed(budgets) if v == level)
        own, whole = name("example"), name("client")
        if rounds(first) == rounds(last):
            claims += [
                Claim(
                    (
                        f"{panel}, {whole}: the noise does not know of local steps, and more of "
                        f"them "
                        f"gain"
                    ),
                    above(((panel, whole, last), (panel, whole, first))),
                ),
                Claim(
                    f"{panel}, {own}: more local steps gain, though each takes its noise",
                    above(((panel, own, last), (panel, own, first))),
                ),
                Claim(
                    f"{panel}, {own}: more local steps take more noise",
                    proved(
                        lambda rows, a=(panel, own, first), b=(panel, own, last): (
                            rows[b]["noise_multiplier"] > rows[a]["noise_multiplier"]
                        ),
                        lambda rows, a=(panel, own, first), b=(panel, own, last): (
                            f"{rows[a]['noise_multiplier']:.3g}, {rows[b]['noise_multiplier']:.3g}"
                        ),
                    ),
                ),
            ]
        else:
            claims.append(
                Claim(
                    f"{panel}, {own}: {ks[1]} local steps a round are within 0.03 of one",
                    within(0.03, ((panel, own, ks[1]), (panel, own, first))),
                )
            )
    return Study(
        "Local steps against noise, at one proved epsilon: FedAvg",
        "local steps a round",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- 4: cohort


def cohort(quick):
    sizes = (5, 20) if quick else (5, 10, 25, 50, 100)
    base = (DATA["digits"] if quick else DATA["mnist"]) | dict(
        model="logistic", sampler="without_replacement"
    )
    noise = dict(example=(16.0 if quick else 8.0, 1.0), client=(32.0 if quick else 8.0, 1.0))
    fixed = "fixed ε: " + ", ".join(f"{level} {e:g}" for level, (e, _) in noise.items())
    free = "fixed noise multiplier: " + ", ".join(
        f"{level} {z:g}" for level, (_, z) in noise.items()
    )
    cells = []
    for m in sizes:
        shape = base | dict(cohort=m)
        for level, (epsilon, z) in noise.items():
            grid = rates(*few(RATES[level], quick))
            cells += [
                Cell(fixed, level, m, shape | LEVELS[level] | dict(epsilon=epsilon), grid),
                Cell(free, level, m, shape | LEVELS[level] | dict(noise_multiplier=z), grid),
            ]
        cells += [
            Cell(p, "FedAvg" + NONE, m, shape, rates(*PLAIN)) for p in (fixed, free) if not quick
        ]
    least, many = sizes[0], sizes[-1]
    eps = lambda rows, level, m: rows[free, level, m]["epsilon"]
    shown = lambda level: (
        lambda rows: (
            f"{eps(rows, level, least):.4g} at {least}, {eps(rows, level, many):.4g} at {many}"
        )
    )
    claims = [
        Claim(
            f"fixed ε, {level}: the largest cohort ends above the smallest",
            above(((fixed, level, many), (fixed, level, least))),
        )
        for level in noise
    ]
    claims += [
        Claim(
            "fixed noise, client: a larger cohort is seen more often, and epsilon grows",
            proved(
                lambda rows: eps(rows, "client", many) > 1.05 * eps(rows, "client", least),
                shown("client"),
            ),
        ),
        Claim(
            "fixed noise, example: the server's epsilon does not depend on the cohort",
            proved(
                lambda rows: (
                    abs(eps(rows, "example", many) / eps(rows, "example", least) - 1) < 1e-3
                ),
                shown("example"),
            ),
        ),
    ]
    if not quick:
        claims.append(
            Claim(
                "without noise the largest cohort is within 0.02 of the smallest",
                within(0.02, ((fixed, "FedAvg" + NONE, many), (fixed, "FedAvg" + NONE, least))),
            )
        )
    return Study(
        f"Cohort size of {base['clients']} clients: FedAvg",
        "clients a round",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- 5: correlated noise


TURNS = "in turns"


def correlated(quick):
    """Client-level noise for who sees the models: independent with Poisson cohorts, or correlated.

    The rule, stated before any run: the same clients, mean cohort, rounds, model and local steps;
    every line has the same grid of learning rates and clip norms, chosen on a seed of its own, and
    the same proved epsilon, of a client that is there or contributes nothing.  Where everyone takes
    part in every round no gain is expected.
    """
    epsilons = (8.0,) if quick else (1.0, 2.0, 4.0, 8.0)
    grid = tuple(
        dict(lr=lr, clip_norm=clip)
        for lr in ((0.3,) if quick else (0.1, 0.3, 1.0))
        for clip in ((0.3, 1.0) if quick else (0.1, 0.3, 1.0))
    )
    if quick:
        panels = {"digits": DATA["digits"] | dict(clients=20, rows_per_client=70, steps=3)}
        rounds, cohort, turns = 12, 5, 4
    else:
        shape = dict(partition="iid", clients=1000, batch=12, steps=5)
        panels = {"MNIST": shape | dict(dataset="mnist")}
        panels["Fashion-MNIST"] = shape | dict(dataset="fashion_mnist")
        rounds, cohort, turns = 100, 50, 20
    few = 4  # bands of the amplified line
    lines = {
        "independent, Poisson": dict(sampler="poisson"),
        f"independent, {TURNS}": {},
        f"tree, {TURNS}": dict(strategy="tree"),
        f"{turns} bands, {TURNS}": dict(strategy="banded_toeplitz", noise_bands=turns),
        f"BLT, {TURNS}": dict(strategy="blt", buffers=2 if quick else 3),
        f"{few} bands, cyclic Poisson": dict(
            strategy="banded_toeplitz",
            noise_bands=few,
            sampler="cyclic_poisson",
            separation=few,
        ),
    }
    in_turns = dict(sampler="min_separation", separation=turns, adjacency="zero_out")
    base = dict(model="logistic", rounds=rounds, cohort=cohort, **LEVELS["client"])
    cells = [
        Cell(
            panel,
            name,
            epsilon,
            data
            | base
            | ({} if "sampler" in fields else in_turns)
            | fields
            | dict(epsilon=epsilon),
            grid,
        )
        for panel, data in panels.items()
        for name, fields in lines.items()
        for epsilon in epsilons
    ]
    everyone = "everyone in every round"
    if not quick:
        whole = panels["MNIST"] | base | dict(clients=100, rounds=50, adjacency="zero_out")
        whole.pop("cohort")
        cells += [
            Cell(f"MNIST, {everyone}", name, e, whole | fields | dict(epsilon=e), grid)
            for name, fields in {
                f"independent, {TURNS}": {},
                f"tree, {TURNS}": dict(strategy="tree"),
                "square root": dict(strategy="square_root"),
            }.items()
            for e in epsilons
        ]
    for panel, data in panels.items():
        plain = data | dict(model="logistic", rounds=rounds, cohort=cohort)
        cells.append(Cell(panel, "FedAvg" + NONE, None, plain, rates(*PLAIN[1:])))
    first = next(iter(panels))
    pairs = lambda one, other, at: [
        ((panel, one, e), (panel, other, e)) for panel in panels for e in at
    ]
    bands = f"{turns} bands, {TURNS}"
    claims = [
        Claim(
            "in turns, bands end above independent noise at every epsilon",
            above(*pairs(bands, f"independent, {TURNS}", epsilons)),
        ),
        Claim(
            "in turns, bands end above the tree at every epsilon",
            above(*pairs(bands, f"tree, {TURNS}", epsilons)),
        ),
        Claim(
            "without trusting who was drawn, bands end within 0.02 of independent noise with "
            "Poisson cohorts, or above, at epsilon 8",
            _no_worse(0.02, *pairs(bands, "independent, Poisson", (8.0,))),
        ),
        Claim(
            "BLT ends within 0.02 of bands at every epsilon",
            within(0.02, *pairs(f"BLT, {TURNS}", bands, epsilons)),
        ),
    ]
    if not quick:
        panel = f"{first}, {everyone}"
        claims.append(
            Claim(
                "where everyone takes part in every round, the square root does not end above "
                "independent noise",
                _no_worse(
                    0.0,
                    *(
                        ((panel, f"independent, {TURNS}", e), (panel, "square root", e))
                        for e in epsilons
                    ),
                ),
            )
        )
    return Study(
        "Correlated noise: FedAvg, clients, the same proved ε",
        "ε of a client, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


# --- 6: claimed


def claimed(quick):
    """The papers' formulas choose the noise for the epsilon that is stated; sizes of a paper, or
    small ones."""
    small = dict(
        dataset="digits",
        partition="iid",
        clients=20,
        model="logistic",
        rounds=20,
        steps=5,
        batch=16,
    )
    noble = privacy.SYNTHETIC
    drawn = dict(dataset="synthetic", partition="natural", model="logistic")
    stated = dict.fromkeys(as_printed.NAMES, (4.0, 16.0) if quick else (1.0, 4.0, 16.0))
    stated["noble2022"] = (
        (8.0, 16.0) if quick else (13.0, 16.0, 20.0)
    )  # they state 13; no noise reaches 12.9
    of = {  # paper: unit, view, small settings, settings
        "noble2022": (
            "example",
            "server" if quick else "third_party",
            dict(algorithm="scaffold", cohort=5),
            drawn
            | dict(
                clients=noble.users,
                cohort=int(noble.user_ratio * noble.users),
                rows_per_client=5000,
                batch=800,
                steps=noble.local_updates,
                rounds=noble.rounds,
                delta=noble.delta,
            ),
        ),
        "chen2024": (
            "example",
            "server",
            dict(algorithm="dpnfl", cohort=5),
            drawn
            | dict(
                clients=100,
                cohort=10,
                rows_per_client=750,
                batch=10,
                steps=300,
                rounds=100,
                delta=1e-2,
            ),
        ),
        "li2025": (
            "example",
            "server",
            dict(algorithm="output_perturbation", cohort=5, batch=8),
            drawn
            | dict(
                clients=100,
                cohort=10,
                rows_per_client=750,
                batch=10,
                steps=10,
                rounds=100,
                delta=1e-5,
            ),
        ),
        "ranaweera2025": (
            "example",
            "server",
            dict(noise_shape="published", reading="R1"),
            drawn
            | dict(clients=100, rows_per_client=750, batch=60, steps=1, rounds=100, delta=1e-5),
        ),
        "talaei2024": (
            "client",
            "third_party",
            dict(algorithm="padpfl", batch_sampler="full"),
            drawn
            | dict(
                clients=60,
                rows_per_client=200,
                steps=5,
                rounds=talaei2024.ROUNDS,
                delta=talaei2024.DELTA,
            ),
        ),
    }
    cells = [
        Cell(
            "claimed against proved",
            paper,
            e,
            (small | changes if quick else changes | full)
            | dict(mode="as_printed", unit=unit, view=view, epsilon=e, paper=paper),
        )
        for paper, (unit, view, changes, full) in of.items()
        for e in stated[paper]
    ]
    claims = [
        Claim(
            f"{paper}: the epsilon that it claims covers the proved one, at every setting",
            covers(paper),
        )
        for paper in of
    ]
    return Study(
        "Claimed against proved epsilon of the five papers, noise by their formulas",
        "claimed ε (li2025: of one round)",
        tuple(cells),
        tuple(claims),
        y="epsilon",
    )


def covers(paper):
    """The paper's epsilon is no less than the proved one, wherever it was run; without a proof it
    is not confirmed."""

    def check(rows):
        mine = [r for (_, line_, _), r in rows.items() if line_ == paper]
        seen = ", ".join(
            f"{r['claimed']:.3g}: "
            + ("nothing is proved" if r["epsilon"] is None else f"{r['epsilon']:.4g}")
            for r in mine
        )
        if not mine:
            return UNKNOWN, "not run"
        return (
            CONFIRMED
            if all(r["epsilon"] is not None and r["epsilon"] <= r["claimed"] for r in mine)
            else NOT
        ), seen

    return check


# --- 7: audit

EXAMPLES = "one example, noise in local steps"
CLIENTS = "one client, noise on the aggregate"
UPLOADS = "one client, noise on each upload"
PRINTED = "one example or client, noise as printed"
RANAWEERA, TALAEI = "Ranaweera et al. 2025", "Talaei and Izadi 2024"
LI, NOBLE, CHEN = "Li et al. 2025", "Noble et al. 2022", "Chen et al. 2024"
# what eq. (20) of Li et al. asks for at epsilon = 2, lr = 0.04 and 8 of 13 rows in one local step,
# where clipping the last step clips all; as a multiple of what covers the step
LI_MULTIPLIER = 0.14506


def audit(quick):
    """Every algorithm at each level with noise that is proved, and the noise that papers print."""
    small = dict(
        dataset="synthetic",
        partition="natural",
        clients=4,
        rows_per_client=16,
        model="logistic",
        batch=8,
        steps=1,
        rounds=2,
        delta=1e-2,
    )
    example = dict(unit="example", view="server", noise_multiplier=1.0)
    client = dict(unit="client", view="third_party", noise_multiplier=1.0)
    upload = dict(algorithm="padpfl", unit="client", noise_multiplier=1.0)
    warm = dict(algorithm="scaffold", warm_rounds=1)
    of = lambda *names: {NAMES[n]: dict(algorithm=n) for n in names}
    kinds = {  # panel: what all of its cells have, and each line
        EXAMPLES: (
            example,
            of("fedavg", "fedsgd", "fedprox", "scaffold")
            | {"SCAFFOLD, warm": warm}
            | of("dpnfl", "addpnfl", "output_perturbation")
            | {
                "FedAvg, Poisson batches": dict(batch_sampler="poisson"),
                "FedAvg, third party, 2 of 4 clients": dict(cohort=2, view="third_party"),
            },
        ),
        CLIENTS: (
            client,
            of("fedavg", "fedsgd", "fedprox", "scaffold")
            | {"SCAFFOLD, warm": warm}
            | of("dpnfl", "addpnfl")
            | {
                "FedAvg, 2 of 4 clients": dict(cohort=2),
                "FedAvg, Poisson cohorts": dict(sampler="poisson", rate=0.5),
                "FedAvg, adaptive clip": dict(clip="adaptive"),
                "FedAvg, wavelet noise clipped soundly": dict(noise_shape="ellipsoid"),
            },
        ),
        UPLOADS: (
            upload,
            {
                "PADPFL, server": dict(view="server"),
                "PADPFL, third party": dict(view="third_party"),
                "PADPFL with differences, server": dict(view="server", upload="difference"),
            },
        ),
    }
    if quick:
        kept = {EXAMPLES: "SCAFFOLD", CLIENTS: "FedAvg", UPLOADS: "PADPFL, server"}
        kinds = {
            panel: (base, {kept[panel]: lines[kept[panel]]})
            for panel, (base, lines) in kinds.items()
        }
    cells = [
        _audited(panel, name, small | base | changes)
        for panel, (base, lines) in kinds.items()
        for name, changes in lines.items()
    ]
    # a row under the noise of its client, and nothing of it but the clip of the upload bounds it
    whole = small | client | dict(batch_sampler="full")
    of_a_row = dict(unit="example")
    cells.append(_audited(CLIENTS, "FedAvg, one example of the client", whole, of_a_row))
    printed = _printed(quick)
    return Study(
        "Claimed, audited and proved epsilon of every algorithm, and of noise as papers print it",
        "ε at δ = 0.01",
        (*cells, *(_audited(PRINTED, n, small | f, asked) for n, f, asked in printed)),
        (
            Claim("nothing is audited above what is proved", no_contradiction),
            *(
                Claim(f"{paper}: the claimed epsilon is refuted", refuted(paper, True))
                for paper in (RANAWEERA, TALAEI, LI)
            ),
            *(
                Claim(f"{paper}: the claimed epsilon is not refuted", refuted(paper, False))
                for paper in (NOBLE, CHEN)
            ),
        ),
        y="audit",
        trials=2_000 if quick else 50_000,
    )


def _audited(panel, name, fields, asked=None):
    """A cell without the fields that have no effect in it."""
    idle = {"batch"} if fields.get("batch_sampler") == "full" else set()
    idle |= {"steps"} if fields.get("algorithm") == "fedsgd" else set()
    fields = {k: v for k, v in fields.items() if k not in idle}
    return Cell(panel, name, None, fields, asked=asked or {})


def _printed(quick):
    """(line, fields, what is asked of the audit) of each paper's noise."""
    as_printed_ = lambda paper, epsilon, **fields: (
        dict(mode="as_printed", paper=paper, epsilon=epsilon, rounds=1) | fields
    )
    server = dict(unit="example", view="server")
    wavelet = dict(noise_shape="published", reading="R1", batch_sampler="full")
    # their 30 rounds, sizes, step size, delta and smaller epsilon, with few trials: 60 clients
    padpfl = dict(
        algorithm="padpfl",
        unit="client",
        batch_sampler="full",
        clients=6 if quick else 60,
        rows_per_client=50 if quick else 188,  # a fifth of them is for testing
        rounds=2 if quick else talaei2024.ROUNDS,
        steps=5,
        lr=0.02,
    )
    claim, row = dict(claim=True), dict(claim=True, unit="example")
    few = row | (dict() if quick else dict(trials=3_000))
    cells = [
        (
            f"{RANAWEERA}: wavelet noise, example, server",
            as_printed_("ranaweera2025", 2.0, **server, **wavelet),
            claim,
        ),
        (
            f"{RANAWEERA}: wavelet noise, client, third party",
            as_printed_("ranaweera2025", 2.0, unit="client", view="third_party", **wavelet),
            claim,
        ),
        (
            f"{TALAEI}: one upload, example, server",
            as_printed_("talaei2024", 5.0, **padpfl | dict(view="server", rounds=1)),
            row,
        ),
        (
            f"{TALAEI}: all broadcasts, example, third party",
            as_printed_("talaei2024", 5.0, **padpfl | dict(view="third_party")),
            few,
        ),
        (
            f"{LI}: eq. (20), example, server",
            server
            | dict(
                algorithm="output_perturbation", noise_multiplier=LI_MULTIPLIER, lr=0.04, rounds=1
            ),
            claim,
        ),
        (
            f"{NOBLE}: DP-SCAFFOLD, example, server",
            as_printed_("noble2022", 2.0, algorithm="scaffold", **server, rounds=2),
            claim,
        ),
        (
            f"{NOBLE}: DP-SCAFFOLD, example, third party",
            as_printed_(
                "noble2022",
                4.0,
                algorithm="scaffold",
                **server | dict(view="third_party"),
                cohort=2,
            ),
            claim,
        ),
        (
            f"{NOBLE}: DP-FedAvg, example, server",
            as_printed_("noble2022", 2.0, algorithm="fedavg", **server, rounds=2),
            claim,
        ),
        (
            f"{CHEN}: DPNFL, example, server",
            as_printed_("chen2024", 1.0, algorithm="dpnfl", **server),
            claim,
        ),
        (
            f"{CHEN}: AdDPNFL, example, server",
            as_printed_("chen2024", 1.0, algorithm="addpnfl", **server),
            claim,
        ),
    ]
    left_out = ("client, third party", "DP-FedAvg", "AdDPNFL", "SCAFFOLD, example, third")
    return [c for c in cells if not (quick and any(words in c[0] for words in left_out))]


def no_contradiction(rows):
    """No row with an epsilon that is proved without a condition was audited above it."""
    proved_ = {
        k: r for k, r in rows.items() if r["epsilon"] is not None and r["status"] == "proved"
    }
    above_ = [k[1] for k, r in proved_.items() if r["audited"] > r["epsilon"]]
    nearest = max((r["audited"] / r["epsilon"] for r in proved_.values()), default=0.0)
    if not proved_:
        return UNKNOWN, "not run"
    seen = f"{len(proved_)} rows, the nearest at {nearest:.2f} of what is proved"
    return (NOT, f"above it: {', '.join(above_)}") if above_ else (CONFIRMED, seen)


def refuted(paper, is_so):
    """Every claim of the paper is refuted; or none is."""

    def check(rows):
        mine = [r for (_, line_, _), r in rows.items() if line_.startswith(f"{paper}:")]
        seen = ", ".join(f"claimed {r['claimed']:.3g}, audited {r['audited']:.3g}" for r in mine)
        if not mine:
            return UNKNOWN, "not run"
        return (CONFIRMED if all(is_so == above_claim(r) for r in mine) else NOT), seen

    return check


def above_claim(row):
    """Whether the audited epsilon refutes the claimed one."""
    return row["claimed"] is not None and row["audited"] > row["claimed"]


# --- 8: promises


SUMS = "Noise on uploads (conditional): one client, sums are seen"
UNEQUAL = "Unequal clients: one example, server"
ONCE = "Noise once a round: one example, server"
SHAPES = "Wavelet noise: one example, server"
IMPACT = "Impact factors: one client, third party"


def promises(quick):
    """The rule: each line chooses at each epsilon, on a seed and a split of its own, from 24
    points: 6 learning rates (AdDPNFL: of its server) times 4 clip norms.  What contracts has no
    clip, and 5 rates."""
    epsilons = (8.0, 32.0) if quick else (2.0, 8.0, 32.0)
    data = dict(dataset="digits", rounds=3) if quick else dict(dataset="mnist", rounds=20)
    base = data | dict(model="logistic", batch=20, steps=5)
    lrs = (0.5,) if quick else (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    clips = (1.0,) if quick else (0.1, 0.3, 1.0, 3.0)
    points = lambda name, several: tuple(
        {name: rate, "clip_norm": clip} for rate in several for clip in clips
    )
    grid = points("lr", lrs)
    third = dict(unit="client", view="third_party")
    server = dict(unit="example", view="server")

    # Noble et al.: noise on uploads, of which only the sum is seen
    few = dict(clients=20, rows_per_client=60) if quick else dict(clients=300, rows_per_client=200)
    labels = base | few | dict(partition="labels", classes_per_client=2)
    lines: dict[str, dict[str, tuple]] = {
        SUMS: {
            "FedAvg": (labels | third | dict(recipe="uploads"), grid),
            "SCAFFOLD": (labels | third | dict(recipe="uploads", algorithm="scaffold"), grid),
        }
    }
    # Chen et al.: noise of each client, known to the server
    unequal = base | dict(partition="iid", clients=40, groups=(20, 20), recipe="of_each") | server
    unequal |= dict(group_rows=(30, 40) if quick else (150, 1350))
    adaptive = dict(algorithm="addpnfl", lr=0.5)
    adapted = points("server_lr", (0.02,) if quick else (0.002, 0.005, 0.01, 0.02, 0.05, 0.1))
    variance, known = dict(recipe="by_variance"), dict(recipe="known_noise")
    lines[UNEQUAL] = {
        "FedAvg": (unequal | dict(weights="size"), grid),  # that knows of no noise
        "FedAvg, weighted by variance": (unequal | variance, grid),
        "AdDPNFL": (unequal | adaptive | dict(weights="size"), adapted),
        "AdDPNFL, weighted by variance": (unequal | adaptive | variance, adapted),
        "AdDPNFL, and known noise": (unequal | adaptive | known, adapted),
    }
    # Li et al.: noise on the model, once a round; for steps that contract no step is clipped
    convex = base | server | dict(partition="iid", clients=20, preprocess="unit_norm")
    convex |= dict(batch=10, steps=3) if quick else dict(batch=100, steps=10)
    once = dict(algorithm="output_perturbation")
    lines[ONCE] = {
        "FedAvg": (convex, grid),
        "output perturbation": (convex | once, grid),
        "output perturbation, contracting (conditional)": (
            convex | dict(recipe="contracting"),
            rates(*lrs[:5]),
        ),
    }
    # Ranaweera et al.: a shape of the noise, sound for what it clips
    images = base | server | dict(partition="iid", clients=20)
    shaped = dict(noise_shape="ellipsoid", bands="pixels")
    lines[SHAPES] = {
        "FedAvg": (images, grid),
        "FedAvg, shape of natural images": (images | shaped, grid),
        "FedAvg, measured shape": (images | dict(recipe="measured"), grid),
    }
    # Talaei and Izadi: impact factors, with what they leave of a client's clip norm
    groups = (4, 4, 4) if quick else (20, 20, 20)
    noisy = {k: v for k, v in (base | third).items() if k != "batch"} | dict(
        partition="labels",
        classes_per_client=2,
        clients=sum(groups),
        groups=groups,
        group_rows=(30, 30, 30) if quick else (150, 150, 150),
        group_noise=tuple(talaei2024.DENSITY[q] for q in ("severe", "moderate", "clean")),
        batch_sampler="full",
    )
    padpfl = noisy | dict(algorithm="padpfl", upload="difference")
    factors = dict(impact=(0.0, 1.0, 2.0))
    lines[IMPACT] = {
        "FedAvg": (noisy, grid),
        "PADPFL, equal factors": (padpfl, grid),
        "PADPFL, 0-1-2": (padpfl | factors, grid),
        "PADPFL, 0-1-2, a clip of each client": (
            padpfl | factors | dict(recipe="impact"),
            grid,
        ),
    }
    cells = [
        Cell(panel, name, e, fields | dict(epsilon=e), choices)
        for panel, named in lines.items()
        for name, (fields, choices) in named.items()
        for e in epsilons
    ]
    claims = []
    for panel, named in lines.items():
        for name in [n for n in named if n != "FedAvg"]:
            pairs = [((panel, name, e), (panel, "FedAvg", e)) for e in epsilons]
            claims.append(
                Claim(f"{panel}: {name} ends above FedAvg at every epsilon", above(*pairs))
            )
    return Study(
        "What would make the papers' promises true, at equal epsilon, proved or conditional",
        "ε of what the panel names, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )


PLANS: dict[str, Callable] = dict(
    frontier=frontier,
    fashion=fashion,
    text=text,
    heterogeneity=heterogeneity,
    steps=steps,
    cohort=cohort,
    correlated=correlated,
    claimed=claimed,
    audit=audit,
    promises=promises,
)
