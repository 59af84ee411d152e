"""Local steps against noise, at one proved epsilon."""

from ...harness.runner import Claim
from .cells import DATA, FULL, LEVELS, NONE, PLAIN, QUICK, RATES, Cell, Study, few, rates
from .checks import above, proved, within


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
                    f"{panel}, {own}: {ks[1]} local steps per round are within 0.03 of one",
                    within(0.03, ((panel, own, ks[1]), (panel, own, first))),
                )
            )
    return Study(
        "FedAvg with several numbers of local steps, at equal proved ε",
        "local steps per round",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
