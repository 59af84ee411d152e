"""Cells and studies, and what several studies share: data, grids of rates, names of algorithms.

Within a panel all lines with noise have one unit, adjacency, view and delta; epsilon is the proved
one.  If the unit is an example, all clients have the same number of rows, so that one multiplier is
right for all of them and for every split.  With fixed-size cohorts and batches, neighbours replace
one example or one client.
"""

from typing import Any, NamedTuple

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
    asked: dict = {}  # of an audit: unit, trials; claim: whether to show the paper's claim


class Study(NamedTuple):
    title: str
    xlabel: str
    cells: tuple
    claims: tuple = ()
    seeds: tuple = ()  # of runs and of their splits
    tune: tuple = ()  # seeds and splits of the runs that choose from the grids
    y: str = "accuracy"  # or "epsilon": nothing is trained; or "audit"
    together: bool = False  # choosing and reporting in one program: less to compile, more to run
    trials: int = 0  # of an audit: runs of each side
    printed: tuple = ()  # points that a paper prints, as dicts: shown next to ours, not run


def rates(*values, of="lr"):
    return tuple({of: float(v)} for v in values)


ALIKE, RATES = (
    ("fedavg", "fedprox", "scaffold", "dpnfl"),
    dict(example=(0.1, 0.3, 1, 3), client=(0.03, 0.1, 0.3, 1, 3)),
)
ALGORITHMS = dict(  # the grids
    example=dict.fromkeys(ALIKE, RATES["example"])
    | dict(
        automatic=RATES["example"],
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
    automatic="FedAvg, automatic clipping",
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
PAPERS = dict(
    noble2022="Noble et al. 2022",
    chen2024="Chen et al. 2024",
    li2025="Li et al. 2025",
    ranaweera2025="Ranaweera et al. 2025",
    talaei2024="Talaei and Izadi 2024",
)
TITLES = dict(
    mnist="MNIST, iid",
    synthetic="Synthetic(1,1)",
    adult="Adult, iid",
    fashion="Fashion-MNIST, iid",
    digits="digits, iid",
)
# The algorithms of a quick run, which mostly compiles: each algorithm and level is a program.
SHORT = dict(example=("fedavg", "scaffold"), client=("fedavg",))
few = lambda values, quick: (
    values[-3:-1] if quick else values
)  # quick runs choose between two rates
SEEDS, TUNE = tuple(range(5)), (100,)
QUICK: dict[str, Any] = dict(seeds=SEEDS[:3], tune=TUNE, together=True)
FULL: dict[str, Any] = dict(seeds=SEEDS, tune=TUNE)


def line(algorithm, values, **fields):
    """Return the fields and the grid of an algorithm; AdDPNFL chooses its server's rate.

    "automatic" is FedAvg with automatic clipping.
    """
    if algorithm == "automatic":
        algorithm, fields = "fedavg", fields | dict(clip="automatic")
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
