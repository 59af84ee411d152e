"""Published accuracies of private training: linear models and small convolutional networks.

Settings are those of Tramèr and Boneh (ICLR 2021), with a momentum of 0.9, and those of the MNIST
example of Opacus, each with the published code.  None of them was tuned here.  Noise is calibrated
to the published epsilon.
"""

from ...harness.runner import CONFIRMED, NOT, UNKNOWN, Claim
from .cells import Cell, Study
from .checks import within

EPSILON = 3.0
PRINTED = "Tramèr and Boneh, printed"
ONE = "one client"
NETWORK, NETWORK_PRINTED = "CNN, one client", "CNN, printed"
NETWORK_SHARES = "CNN, 10 clients, shares of the noise"
OPACUS = "MNIST, example of Opacus"
# panel -> settings and printed accuracy; an epoch has rows // batch steps, as in the published code
SETTINGS: dict[str, tuple[dict, float | None]] = {
    "Fashion-MNIST": (dict(dataset="fashion_mnist", batch=8192, rounds=280, lr=16.0), 0.897),
    "MNIST": (dict(dataset="mnist", batch=4096, rounds=560, lr=8.0), 0.987),
}
# The same for the networks, each with its recipe and its epsilon.
TANH = dict(recipe="tanh_cnn", server_optimizer="momentum", clip_norm=0.1)
RELU = dict(recipe="relu_cnn", dataset="mnist", batch=240)
NETWORKS: tuple[tuple[str, float, dict, float], ...] = (
    (
        "Fashion-MNIST",
        EPSILON,
        TANH | dict(dataset="fashion_mnist", batch=2048, rounds=1160, lr=4.0),
        0.860,
    ),
    ("MNIST", EPSILON, TANH | dict(dataset="mnist", batch=512, rounds=4680, lr=0.5), 0.981),
    (OPACUS, 1.16, RELU | dict(rounds=3750, lr=0.25, clip_norm=1.5), 0.9463),
    (OPACUS, 2.91, RELU | dict(rounds=15000, lr=0.15, clip_norm=1.0), 0.9678),
    (OPACUS, 6.86, RELU | dict(rounds=11250, lr=0.25, clip_norm=1.5), 0.9709),
)
SHARED = (("Fashion-MNIST", EPSILON), (OPACUS, 1.16))  # networks that 10 clients train, too
COMMON = dict(
    partition="iid",
    algorithm="fedsgd",
    batch_sampler="poisson",
    unit="example",
    view="server",
)
QUICK = {"digits": (dict(dataset="digits", batch=128, rounds=3, lr=1.0), None)}


def anchors(quick):
    many, settings = (10, QUICK) if quick else (100, SETTINGS)
    shares, each = f"{many} clients, shares of the noise", f"{many} clients, full noise each"
    base = COMMON | dict(
        model="logistic", server_optimizer="momentum", clip_norm=0.1, epsilon=EPSILON
    )
    lines = {
        ONE: dict(recipe="scattered", clients=1),
        shares: dict(recipe="shares", clients=many),
        each: dict(recipe="scattered", clients=many),
    }
    cells, printed, claims = [], [], []
    for panel, (fields, accuracy) in settings.items():
        at = lambda line, panel=panel: (panel, line, EPSILON)
        cells += [Cell(panel, line, EPSILON, base | fields | more) for line, more in lines.items()]
        if accuracy is not None:
            point = dict(panel=panel, line=PRINTED, x=None, mean=accuracy, stated=EPSILON)
            printed.append(dict(point, half=None, values={}, failed=0))
            claims += [
                Claim(
                    f"{panel}, {line}: not significantly below the printed accuracy",
                    _reaches(at(line), accuracy),
                )
                for line in (ONE, shares)
            ]
        claims.append(
            Claim(
                f"{panel}: {many} clients with shares of the noise are within 0.005 of one client",
                within(0.005, (at(shares), at(ONE))),
            )
        )
    for panel, epsilon, fields, accuracy in () if quick else NETWORKS:
        more = COMMON | dict(model="cnn", clients=1, epsilon=epsilon)
        cells.append(Cell(panel, NETWORK, epsilon, more | fields))
        point = dict(panel=panel, line=NETWORK_PRINTED, x=epsilon, mean=accuracy, stated=epsilon)
        printed.append(dict(point, half=None, values={}, failed=0))
        claims.append(
            Claim(
                f"{panel}, CNN, ε = {epsilon:g}: not significantly below the printed accuracy",
                _reaches((panel, NETWORK, epsilon), accuracy),
            )
        )
        if (panel, epsilon) in SHARED:
            more |= dict(clients=10, recipe=fields["recipe"] + "_shares")
            cells.append(Cell(panel, NETWORK_SHARES, epsilon, fields | more))
            claims.append(
                Claim(
                    f"{panel}, CNN: 10 clients with shares of the noise are within 0.01 of one "
                    "client",
                    within(0.01, ((panel, NETWORK_SHARES, epsilon), (panel, NETWORK, epsilon))),
                )
            )
    return Study(
        "Published accuracies of private training",
        "ε of one example, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        seeds=(0, 1, 2),
        printed=tuple(printed),
    )


def _reaches(ours, printed):
    """Return a check that the interval of a line is not all below a printed number."""

    def check(rows):
        if ours not in rows:
            return UNKNOWN, "not run"
        if rows[ours]["half"] is None:
            return UNKNOWN, "one seed, which has no interval"
        gap, half = rows[ours]["mean"] - printed, rows[ours]["half"]
        return CONFIRMED if gap + half >= 0 else NOT, f"{gap:+.4f} ± {half:.4f}"

    return check
