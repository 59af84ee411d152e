"""What 27,705 customers of a grocery buy next: client-level noise, and how much a customer adds."""

from ...harness.runner import Claim
from .cells import LEVELS, NONE, Cell, Study, rates
from .checks import above, no_worse

CUSTOMERS = dict(  # of 2 to 996 rows; half of them have at most 13
    dataset="ta_feng",
    recipe="purchases",
    partition="natural",
    clients=27705,
    cohort=200,
    batch=8,
    batch_sampler="with_replacement",  # a customer may have fewer rows than a batch
    model="logistic",
    rounds=200,
)
PANEL = "Ta-Feng: a customer is protected"
SEPARATION = 100  # rounds between two turns of a customer


def customers(quick):
    """Return the rule: each line chooses its rate and its clip norm at each epsilon, on a seed of
    its own; a line without noise its rate alone."""
    epsilons = (0.5, 2.0) if quick else (0.125, 0.5, 2.0)
    base = CUSTOMERS | (dict(rounds=6) if quick else {})
    lrs, clips = ((0.3,), (0.3,)) if quick else ((0.3, 1.0), (0.1, 0.3, 1.0))
    grid = tuple(dict(lr=lr, clip_norm=clip) for lr in lrs for clip in clips)
    rotation = dict(
        sampler="min_separation",
        separation=3 if quick else SEPARATION,
        adjacency="zero_out",
        strategy="blt",
        buffers=2,
    )
    poisson = dict(sampler="poisson")
    lines = {f"{8 * steps} rows a round": poisson | dict(steps=steps) for steps in (1, 4, 16)}
    lines["32 rows a round, BLT"] = rotation | dict(steps=4)
    cells = [
        Cell(PANEL, line, e, base | LEVELS["client"] | fields | dict(epsilon=e), grid)
        for line, fields in lines.items()
        for e in epsilons
    ]
    plain = "32 rows a round" + NONE
    cells.append(Cell(PANEL, plain, None, base | poisson | dict(steps=4), rates(0.3, 1.0)))
    at = lambda line, e: (PANEL, line, e)
    most, least = epsilons[-1], epsilons[0]
    claims = (
        Claim(
            f"32 rows a round: at epsilon {most:g}, at most 0.005 below training without noise",
            no_worse(0.005, (at("32 rows a round", most), at(plain, None))),
        ),
        Claim(
            f"32 rows a round gain from epsilon {least:g} to {most:g}",
            above((at("32 rows a round", most), at("32 rows a round", least))),
        ),
        Claim(
            f"at epsilon {least:g}, 32 rows a round end above 8 rows",
            above((at("32 rows a round", least), at("8 rows a round", least))),
        ),
        Claim(
            "without secret cohorts, BLT ends at most 0.005 below independent noise at epsilon "
            f"{most:g}",
            no_worse(0.005, (at("32 rows a round, BLT", most), at("32 rows a round", most))),
        ),
    )
    return Study(
        "The next kind of product of a grocery's customers, at equal proved ε",
        "ε of one customer, δ = 1e-5",
        tuple(cells),
        claims,
        seeds=(0, 1, 2),
        tune=(100,),
        together=quick,
    )
