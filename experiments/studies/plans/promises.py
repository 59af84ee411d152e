"""Compare plain FedAvg with changes that would make the papers' promises true."""

from ...harness.runner import Claim
from ...papers.talaei2024 import theory as talaei2024
from .cells import FULL, QUICK, Cell, Study, rates
from .checks import above

SUMS = "Noise on uploads (conditional): one client, observer of sums"
UNEQUAL = "Unequal clients: one example, server"
ONCE = "Noise once per round: one example, server"
SHAPES = "Wavelet noise: one example, server"
IMPACT = "Impact factors: one client, third party"


def promises(quick):
    """Define the study.

    Each line chooses at each epsilon from 24 points, on a separate seed and split: 6 learning rates
    (for AdDPNFL those of its server) times 4 clip norms. Lines whose steps contract have no clip
    and 5 rates. Lines that solve their local problems have 4 values of mu times 4 server rates.
    """
    epsilons = (8.0, 32.0) if quick else (2.0, 8.0, 32.0)
    data = dict(dataset="digits", rounds=3) if quick else dict(dataset="mnist", rounds=20)
    base = data | dict(model="logistic", batch=20, steps=5)
    lrs = (0.5,) if quick else (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    clips = (1.0,) if quick else (0.1, 0.3, 1.0, 3.0)
    points = lambda name, several: tuple(
        {name: rate, "clip_norm": clip} for rate in several for clip in clips
    )
    grid = points("lr", lrs)
    third = dict(unit="client", view="third_party")
    server = dict(unit="example", view="server")

    # Noble et al.: noise on uploads, of which only the sum is seen
    few = dict(clients=20, rows_per_client=60) if quick else dict(clients=300, rows_per_client=200)
    labels = base | few | dict(partition="labels", classes_per_client=2)
    lines: dict[str, dict[str, tuple]] = {
        SUMS: {
            "FedAvg": (labels | third | dict(recipe="uploads"), grid),
            "SCAFFOLD": (labels | third | dict(recipe="uploads", algorithm="scaffold"), grid),
        }
    }
    # Chen et al.: noise of each client, known to the server
    unequal = base | dict(partition="iid", clients=40, groups=(20, 20), recipe="of_each") | server
    unequal |= dict(group_rows=(30, 40) if quick else (150, 1350))
    adaptive = dict(algorithm="addpnfl", lr=0.5)
    adapted = points("server_lr", (0.02,) if quick else (0.002, 0.005, 0.01, 0.02, 0.05, 0.1))
    variance, known = dict(recipe="by_variance"), dict(recipe="known_noise")
    lines[UNEQUAL] = {
        "FedAvg": (unequal | dict(weights="size"), grid),  # that knows of no noise
        "FedAvg, weighted by 1 / noise variance": (unequal | variance, grid),
        "AdDPNFL": (unequal | adaptive | dict(weights="size"), adapted),
        "AdDPNFL, weighted by 1 / noise variance": (unequal | adaptive | variance, adapted),
        "AdDPNFL, weighted, noise variance subtracted": (unequal | adaptive | known, adapted),
    }
    # Li et al.: noise on the model, once a round; for steps that contract no step is clipped
    convex = base | server | dict(partition="iid", clients=20, preprocess="unit_norm")
    convex |= dict(batch=10, steps=3) if quick else dict(batch=100, steps=10)
    once = dict(algorithm="output_perturbation")
    solved = dict(recipe="prox_erm", algorithm="padpfl", upload="difference", batch_sampler="full")
    pulls = tuple(
        dict(mu=mu, server_lr=rate)
        for mu in ((3.0,) if quick else (0.1, 0.3, 1.0, 3.0))
        for rate in ((1.0,) if quick else (0.5, 1.0, 2.0, 4.0))
    )
    lines[ONCE] = {
        "FedAvg": (convex, grid),
        "output perturbation": (convex | once, grid),
        "output perturbation, convex losses (conditional)": (
            convex | dict(recipe="contracting"),
            rates(*lrs[:5]),
        ),
        # Talaei and Izadi: problems that are solved, with all rows
        "PADPFL, local problems solved (conditional)": (
            {k: v for k, v in convex.items() if k not in ("batch", "steps")} | solved,
            pulls,
        ),
    }
    # Ranaweera et al.: a shape of the noise, sound for what it clips
    images = base | server | dict(partition="iid", clients=20)
    shaped = dict(noise_shape="ellipsoid", bands="pixels")
    lines[SHAPES] = {
        "FedAvg": (images, grid),
        "FedAvg, noise shaped as natural images": (images | shaped, grid),
        "FedAvg, noise of measured shape": (images | dict(recipe="measured"), grid),
        "FedAvg, measured shape, clip per level": (images | dict(recipe="by_level"), grid),
    }
    # Talaei and Izadi: impact factors, with what they leave of a client's clip norm
    groups = (4, 4, 4) if quick else (20, 20, 20)
    noisy = {k: v for k, v in (base | third).items() if k != "batch"} | dict(
        partition="labels",
        classes_per_client=2,
        clients=sum(groups),
        groups=groups,
        group_rows=(30, 30, 30) if quick else (150, 150, 150),
        group_noise=tuple(talaei2024.DENSITY[q] for q in ("severe", "moderate", "clean")),
        batch_sampler="full",
    )
    padpfl = noisy | dict(algorithm="padpfl", upload="difference")
    factors = dict(impact=(0.0, 1.0, 2.0))
    lines[IMPACT] = {
        "FedAvg": (noisy, grid),
        "PADPFL, equal factors": (padpfl, grid),
        "PADPFL, 0-1-2": (padpfl | factors, grid),
        "PADPFL, 0-1-2, separate clip norms": (
            padpfl | factors | dict(recipe="impact"),
            grid,
        ),
    }
    cells = [
        Cell(panel, name, e, fields | dict(epsilon=e), choices)
        for panel, named in lines.items()
        for name, (fields, choices) in named.items()
        for e in epsilons
    ]
    claims = []
    for panel, named in lines.items():
        for name in [n for n in named if n != "FedAvg"]:
            pairs = [((panel, name, e), (panel, "FedAvg", e)) for e in epsilons]
            claims.append(
                Claim(f"{panel}: {name} ends above FedAvg at every epsilon", above(*pairs))
            )
    return Study(
        "Changes that make the papers' mechanisms valid, at equal ε",
        "ε for the unit and view in the title, δ = 1e-5",
        tuple(cells),
        tuple(claims),
        **(QUICK if quick else FULL),
    )
