"""Claimed, audited and proved ε of every algorithm, and of the noise that papers print."""

from ...harness.runner import CONFIRMED, NOT, UNKNOWN, Claim
from ...papers.talaei2024 import theory as talaei2024
from .cells import NAMES, PAPERS, Cell, Study

EXAMPLES = "one example, noise in local steps"
CLIENTS = "one client, noise on the aggregate"
UPLOADS = "one client, noise on each upload"
PRINTED = "one example or client, noise as printed"
NOBLE, CHEN, LI, RANAWEERA, TALAEI = PAPERS.values()
# what eq. (20) of Li et al. asks for at epsilon = 2, lr = 0.04 and 8 of 13 rows in one local step,
# where clipping the last step clips all; as a multiple of what covers the step
LI_MULTIPLIER = 0.14506


def audit(quick):
    """Every algorithm at each level with noise that is proved, and the noise that papers print."""
    small = dict(
        dataset="synthetic",
        partition="natural",
        clients=4,
        rows_per_client=16,
        model="logistic",
        batch=8,
        steps=1,
        rounds=2,
        delta=1e-2,
    )
    example = dict(unit="example", view="server", noise_multiplier=1.0)
    client = dict(unit="client", view="third_party", noise_multiplier=1.0)
    upload = dict(algorithm="padpfl", unit="client", noise_multiplier=1.0)
    warm = dict(algorithm="scaffold", warm_rounds=1)
    of = lambda *names: {NAMES[n]: dict(algorithm=n) for n in names}
    kinds = {  # panel: what all of its cells have, and each line
        EXAMPLES: (
            example,
            of("fedavg", "fedsgd", "fedprox", "scaffold")
            | {"SCAFFOLD, warm": warm}
            | of("dpnfl", "addpnfl", "output_perturbation")
            | {
                "FedAvg, Poisson batches": dict(batch_sampler="poisson"),
                "FedAvg, third party, 2 of 4 clients": dict(cohort=2, view="third_party"),
            },
        ),
        CLIENTS: (
            client,
            of("fedavg", "fedsgd", "fedprox", "scaffold")
            | {"SCAFFOLD, warm": warm}
            | of("dpnfl", "addpnfl")
            | {
                "FedAvg, 2 of 4 clients": dict(cohort=2),
                "FedAvg, Poisson cohorts": dict(sampler="poisson", rate=0.5),
                "FedAvg, adaptive clip": dict(clip="adaptive"),
                "FedAvg, wavelet noise clipped soundly": dict(noise_shape="ellipsoid"),
            },
        ),
        UPLOADS: (
            upload,
            {
                "PADPFL, server": dict(view="server"),
                "PADPFL, third party": dict(view="third_party"),
                "PADPFL with differences, server": dict(view="server", upload="difference"),
            },
        ),
    }
    if quick:
        kept = {EXAMPLES: "SCAFFOLD", CLIENTS: "FedAvg", UPLOADS: "PADPFL, server"}
        kinds = {
            panel: (base, {kept[panel]: lines[kept[panel]]})
            for panel, (base, lines) in kinds.items()
        }
    cells = [
        _audited(panel, name, small | base | changes)
        for panel, (base, lines) in kinds.items()
        for name, changes in lines.items()
    ]
    # a row under the noise of its client, and nothing of it but the clip of the upload bounds it
    whole = small | client | dict(batch_sampler="full")
    of_a_row = dict(unit="example")
    cells.append(_audited(CLIENTS, "FedAvg, one example of the client", whole, of_a_row))
    printed = _printed(quick)
    return Study(
        "Claimed, audited and proved ε of every algorithm, and of the noise that papers print",
        "ε at δ = 0.01",
        (*cells, *(_audited(PRINTED, n, small | f, asked) for n, f, asked in printed)),
        (
            Claim("nothing is audited above what is proved", no_contradiction),
            *(
                Claim(f"{paper}: the claimed epsilon is refuted", refuted(paper, True))
                for paper in (RANAWEERA, TALAEI, LI)
            ),
            *(
                Claim(f"{paper}: the claimed epsilon is not refuted", refuted(paper, False))
                for paper in (NOBLE, CHEN)
            ),
        ),
        y="audit",
        trials=2_000 if quick else 50_000,
    )


def _audited(panel, name, fields, asked=None):
    """Return a cell without the fields that have no effect in it."""
    idle = {"batch"} if fields.get("batch_sampler") == "full" else set()
    idle |= {"steps"} if fields.get("algorithm") == "fedsgd" else set()
    fields = {k: v for k, v in fields.items() if k not in idle}
    return Cell(panel, name, None, fields, asked=asked or {})


def _printed(quick):
    """Return (line, fields, what is asked of the audit) of each paper's noise."""
    as_printed_ = lambda paper, epsilon, **fields: (
        dict(mode="as_printed", paper=paper, epsilon=epsilon, rounds=1) | fields
    )
    server = dict(unit="example", view="server")
    wavelet = dict(noise_shape="published", reading="R1", batch_sampler="full")
    # their 30 rounds, sizes, step size, delta and smaller epsilon, with few trials: 60 clients
    padpfl = dict(
        algorithm="padpfl",
        unit="client",
        batch_sampler="full",
        clients=6 if quick else 60,
        rows_per_client=50 if quick else 188,  # a fifth of them is for testing
        rounds=2 if quick else talaei2024.ROUNDS,
        steps=5,
        lr=0.02,
    )
    claim, row = dict(claim=True), dict(claim=True, unit="example")
    few = row | (dict() if quick else dict(trials=3_000))
    cells = [
        (
            f"{RANAWEERA}: wavelet noise, example, server",
            as_printed_("ranaweera2025", 2.0, **server, **wavelet),
            claim,
        ),
        (
            f"{RANAWEERA}: wavelet noise, client, third party",
            as_printed_("ranaweera2025", 2.0, unit="client", view="third_party", **wavelet),
            claim,
        ),
        (
            f"{TALAEI}: one upload, example, server",
            as_printed_("talaei2024", 5.0, **padpfl | dict(view="server", rounds=1)),
            row,
        ),
        (
            f"{TALAEI}: all broadcasts, example, third party",
            as_printed_("talaei2024", 5.0, **padpfl | dict(view="third_party")),
            few,
        ),
        (
            f"{LI}: eq. (20), example, server",
            server
            | dict(
                algorithm="output_perturbation", noise_multiplier=LI_MULTIPLIER, lr=0.04, rounds=1
            ),
            claim,
        ),
        (
            f"{NOBLE}: DP-SCAFFOLD, example, server",
            as_printed_("noble2022", 2.0, algorithm="scaffold", **server, rounds=2),
            claim,
        ),
        (
            f"{NOBLE}: DP-SCAFFOLD, example, third party",
            as_printed_(
                "noble2022",
                4.0,
                algorithm="scaffold",
                **server | dict(view="third_party"),
                cohort=2,
            ),
            claim,
        ),
        (
            f"{NOBLE}: DP-FedAvg, example, server",
            as_printed_("noble2022", 2.0, algorithm="fedavg", **server, rounds=2),
            claim,
        ),
        (
            f"{CHEN}: DPNFL, example, server",
            as_printed_("chen2024", 1.0, algorithm="dpnfl", **server),
            claim,
        ),
        (
            f"{CHEN}: AdDPNFL, example, server",
            as_printed_("chen2024", 1.0, algorithm="addpnfl", **server),
            claim,
        ),
    ]
    left_out = ("client, third party", "DP-FedAvg", "AdDPNFL", "SCAFFOLD, example, third")
    return [c for c in cells if not (quick and any(words in c[0] for words in left_out))]


def no_contradiction(rows):
    """No row with an epsilon that is proved without a condition was audited above it."""
    proved_ = {
        k: r for k, r in rows.items() if r["epsilon"] is not None and r["status"] == "proved"
    }
    above_ = [k[1] for k, r in proved_.items() if r["audited"] > r["epsilon"]]
    nearest = max((r["audited"] / r["epsilon"] for r in proved_.values()), default=0.0)
    if not proved_:
        return UNKNOWN, "not run"
    seen = f"{len(proved_)} rows, the nearest at {nearest:.2f} of what is proved"
    return (NOT, f"above it: {', '.join(above_)}") if above_ else (CONFIRMED, seen)


def refuted(paper, is_so):
    """Every claim of the paper is refuted; or none is."""

    def check(rows):
        mine = [r for (_, line_, _), r in rows.items() if line_.startswith(f"{paper}:")]
        if not mine:
            return UNKNOWN, "not run"
        if any(r["claimed"] is None for r in mine):
            return UNKNOWN, "its formula claims nothing"
        seen = ", ".join(f"claimed {r['claimed']:.3g}, audited {r['audited']:.3g}" for r in mine)
        is_as_told = all(is_so == (r["audited"] > r["claimed"]) for r in mine)
        return (CONFIRMED if is_as_told else NOT), seen

    return check
