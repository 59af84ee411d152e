"""Accuracy against how much clients differ."""

from ...harness.runner import Claim
from .cells import ALGORITHMS, DATA, FULL, LEVELS, NAMES, NONE, PLAIN, QUICK, Cell, Study, few, line
from .checks import above


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
        for what, e in zip(("classes per client: example", "Dirichlet α: client"), epsilons)
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
        "Accuracy against heterogeneity, at equal proved ε, and without noise",
        "classes per client, or α (small: clients differ)",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
