"""Privacy against utility: every algorithm at equal proved epsilon."""

from ...harness.runner import Claim
from .cells import (
    ALGORITHMS,
    DATA,
    FULL,
    LEVELS,
    NAMES,
    NONE,
    PLAIN,
    QUICK,
    SHORT,
    TITLES,
    Cell,
    Study,
    few,
    line,
)
from .checks import above, within


def frontier(quick):
    sets = ("digits",) if quick else ("mnist", "synthetic", "adult")
    return _frontier("Accuracy of algorithms at equal proved ε", sets, quick)


def fashion(quick):
    return _frontier(
        "Fashion-MNIST: accuracy of algorithms at equal proved ε",
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
