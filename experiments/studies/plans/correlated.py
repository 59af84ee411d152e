"""Compare correlated with independent noise, at equal proved epsilon of a client."""

from ...harness.runner import Claim
from .cells import DATA, FULL, LEVELS, NONE, PLAIN, QUICK, Cell, Study, rates
from .checks import above, no_worse, within

TURNS = "rotation"


def correlated(quick):
    """Define the study: client-level noise against a third party, correlated or independent.

    The independent noise has Poisson cohorts. The rule was stated before any run. All lines have
    the same clients, mean cohort, rounds, model and local steps, the same proved epsilon for
    zero_out of a client, and the same grid of learning rates and clip norms, from which they choose
    on a separate seed. If all clients participate in every round, no gain is expected.
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
    everyone = "all clients in every round"
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
            "rotation, bands end above independent noise at every epsilon",
            above(*pairs(bands, f"independent, {TURNS}", epsilons)),
        ),
        Claim(
            "rotation, bands end above the tree at every epsilon",
            above(*pairs(bands, f"tree, {TURNS}", epsilons)),
        ),
        Claim(
            "without trusting who was drawn, bands end within 0.02 of independent noise with "
            "Poisson cohorts, or above, at epsilon 8",
            no_worse(0.02, *pairs(bands, "independent, Poisson", (8.0,))),
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
                no_worse(
                    0.0,
                    *(
                        ((panel, f"independent, {TURNS}", e), (panel, "square root", e))
                        for e in epsilons
                    ),
                ),
            )
        )
    return Study(
        "Correlated and independent noise in client-level FedAvg, at equal proved ε",
        "ε of a client, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
