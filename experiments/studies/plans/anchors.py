"""Published accuracies of private training: linear models on scattering features.

Settings are those of Tramèr and Boneh (ICLR 2021) and of their published code: 40 epochs, a
momentum of 0.9 and a clip norm of 0.1.  None of them was tuned here.
"""

from ...harness.runner import CONFIRMED, NOT, UNKNOWN, Claim
from .cells import Cell, Study
from .checks import within

EPSILON = 3.0
PRINTED = "Tramèr and Boneh, printed"
ONE = "one client"
# panel -> settings and printed accuracy; an epoch has rows // batch steps, as in the published code
SETTINGS: dict[str, tuple[dict, float | None]] = {
    "Fashion-MNIST": (dict(dataset="fashion_mnist", batch=8192, rounds=280, lr=16.0), 0.897),
    "MNIST": (dict(dataset="mnist", batch=4096, rounds=560, lr=8.0), 0.987),
}
QUICK = {"digits": (dict(dataset="digits", batch=128, rounds=3, lr=1.0), None)}


def anchors(quick):
    many, settings = (10, QUICK) if quick else (100, SETTINGS)
    shares, each = f"{many} clients, shares of the noise", f"{many} clients, full noise each"
    base = dict(
        model="logistic",
        partition="iid",
        algorithm="fedsgd",
        batch_sampler="poisson",
        server_optimizer="momentum",
        clip_norm=0.1,
        unit="example",
        view="server",
        epsilon=EPSILON,
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
    return Study(
        f"Published accuracies at ε = {EPSILON:g}: linear models on scattering features",
        "ε of one example, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        seeds=(0, 1, 2),
        printed=tuple(printed),
    )


def _reaches(ours, printed):
    """Return a check that the interval of a line is not all below a printed number."""

    def check(rows):
        if ours not in rows or rows[ours]["half"] is None:
            return UNKNOWN, "not run"
        gap, half = rows[ours]["mean"] - printed, rows[ours]["half"]
        return CONFIRMED if gap + half >= 0 else NOT, f"{gap:+.4f} ± {half:.4f}"

    return check
