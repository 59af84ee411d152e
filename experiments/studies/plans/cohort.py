"""The size of a cohort, at one epsilon and at one noise."""

from ...harness.runner import Claim
from .cells import DATA, FULL, LEVELS, NONE, PLAIN, QUICK, RATES, Cell, Study, few, rates
from .checks import above, proved, within


def cohort(quick):
    sizes = (5, 20) if quick else (5, 10, 25, 50, 100)
    base = (DATA["digits"] if quick else DATA["mnist"]) | dict(
        model="logistic", sampler="without_replacement"
    )
    noise = dict(example=(16.0 if quick else 8.0, 1.0), client=(32.0 if quick else 8.0, 1.0))
    epsilons, multipliers = (
        " and ".join(dict.fromkeys(f"{number:g}" for number in numbers))
        for numbers in zip(*noise.values())
    )
    fixed, free = f"fixed ε = {epsilons}", f"fixed noise multiplier {multipliers}"
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
        f"FedAvg with cohorts of several sizes among {base['clients']} clients",
        "clients per round",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
