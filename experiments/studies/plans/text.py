"""The next character of a play: an LSTM and a transformer, at client level."""

from ...harness.runner import Claim
from .cells import FULL, LEVELS, NONE, QUICK, Cell, Study, rates
from .checks import above

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
    """Return the rule: each line chooses its rate and its clip norm, at each epsilon, on a seed of
    its own; a line without noise its rate alone."""
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
        "Next character of Shakespeare's plays, one client per role, at equal proved ε",
        "proved ε",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
