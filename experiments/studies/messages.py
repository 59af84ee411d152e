"""What a reader learns from the picture of each study, and the words in it."""

from ..harness.pictures import Message

NO_PRIVACY = {"FedAvg, no noise": "no privacy"}
MESSAGES = {
    "anchors": Message(
        "Private training with jfl reaches the published accuracies",
        panels={
            "Fashion-MNIST": "Fashion-MNIST, ε = 3",
            "MNIST": "MNIST, ε = 3",
            "MNIST, example of Opacus": "MNIST, example of Opacus",
        },
        lines={
            "one client": "linear, one client",
            "100 clients, shares of the noise": "linear, 100 clients,\nshares of the noise",
            "100 clients, full noise each": "linear, 100 clients,\nfull noise each",
            "Tramèr and Boneh, printed": "linear, printed",
            "CNN, 10 clients, shares of the noise": "CNN, 10 clients,\nshares of the noise",
        },
        height=3.4,
    ),
    "audit": Message(
        "Audits refute five claims of papers, and contradict no proof",
    ),
    "claimed": Message(
        "At a claimed ε of 16, no paper's noise is proved to keep the claim",
        xlabel="ε that the paper's formula claims",
        panels={"claimed against proved": "noise from each paper's own formula"},
        lines={"Ranaweera et al. 2025": "Ranaweera et al. 2025"},
        height=4.0,
    ),
    "cohort": Message(
        "Large cohorts help most if whole clients are protected",
        panels={
            "fixed ε = 8": "with the noise for ε = 8",
            "fixed noise multiplier 1": "with noise multiplier 1 (the proved ε is at each point)",
        },
        lines={"example": "one row protected", "client": "one client protected"} | NO_PRIVACY,
    ),
    "correlated": Message(
        "Correlated noise helps if clients take turns, and hurts if all always participate",
        panels={
            "MNIST": "MNIST, 50 of 1,000 clients per round",
            "Fashion-MNIST": "Fashion-MNIST, 50 of 1,000 clients per round",
        },
        lines={
            "independent, Poisson": "independent, secret cohorts",
            "independent, rotation": "independent",
            "tree, rotation": "tree",
            "20 bands, rotation": "20 bands",
            "BLT, rotation": "BLT",
            "4 bands, cyclic Poisson": "4 bands, secret cohorts",
        }
        | NO_PRIVACY,
        height=3.1,
    ),
    "customers": Message(
        "Protecting a customer at ε = 0.5 costs less than one point of accuracy",
        xlabel="ε of one customer, δ = 1e-5",
        panels={"Ta-Feng: a customer is protected": "next kind of product in a basket (Ta-Feng)"},
        lines={
            "8 rows a round": "8 rows per round",
            "32 rows a round": "32 rows per round",
            "128 rows a round": "128 rows per round",
            "32 rows a round, BLT": "32 rows, BLT noise",
            "32 rows a round, no noise": "no privacy, 32 rows",
        },
        height=3.8,
    ),
    "fashion": Message(
        "SCAFFOLD is as good as FedAvg with noise in local steps, and far worse with client noise",
        panels={
            "Fashion-MNIST, iid: example level": "one row protected, noise in local steps",
            "Fashion-MNIST, iid: client level": "one client protected, noise on the sum",
        },
        lines=NO_PRIVACY,
    ),
    "frontier": Message(
        "Where the noise is decides more than the algorithm",
        panels={
            f"{data}: {unit} level": f"{data.replace(', iid', '')}: one {row} protected"
            for data in ("MNIST, iid", "Synthetic(1,1)", "Adult, iid")
            for unit, row in (("example", "row"), ("client", "client"))
        },
        lines=NO_PRIVACY,
        height=2.6,
    ),
    "heterogeneity": Message(
        "SCAFFOLD resists unequal clients, but not noise at client level",
        xlabel={
            "MNIST by classes per client: example level, ε = 8": "classes per client",
            "MNIST by Dirichlet α: client level, ε = 8": "Dirichlet α (small: clients differ)",
        },
        panels={
            "MNIST by classes per client: example level, ε = 8": "one row protected at ε = 8",
            "MNIST by Dirichlet α: client level, ε = 8": "one client protected at ε = 8",
        },
    ),
    "promises": Message(
        "At equal ε, corrected methods of the papers rarely beat FedAvg",
        xlabel="ε, δ = 1e-5",
        panels={
            "Noise on uploads (conditional): one client, observer of sums": (
                "Noise on uploads: one client, seen by an observer of sums (conditional)"
            ),
            "Unequal clients: one example, server": "Unequal clients: one row, seen by the server",
            "Noise once per round: one example, server": (
                "Noise once per round: one row, seen by the server"
            ),
            "Wavelet noise: one example, server": "Wavelet noise: one row, seen by the server",
            "Impact factors: one client, third party": (
                "Impact factors: one client, seen by a third party"
            ),
        },
        lines={
            "FedAvg, weighted by 1 / noise variance": "FedAvg, weighted",
            "AdDPNFL, weighted by 1 / noise variance": "AdDPNFL, weighted",
            "AdDPNFL, weighted, noise variance subtracted": "AdDPNFL, weighted,\nnoise removed",
            "output perturbation, convex losses (conditional)": (
                "output perturbation,\nconvex (conditional)"
            ),
            "PADPFL, local problems solved (conditional)": "PADPFL, solved\n(conditional)",
            "FedAvg, noise shaped as natural images": "noise shaped as\nnatural images",
            "FedAvg, noise of measured shape": "noise of measured shape",
            "FedAvg, measured shape, clip per level": "measured shape,\nclip per level",
            "PADPFL, 0-1-2, separate clip norms": "PADPFL, 0-1-2,\nseparate clips",
        },
    ),
    "steps": Message(
        "More local steps help where whole clients are protected",
        panels={
            "30 rounds": "always 30 rounds",
            "150 local steps in all": "always 150 local steps in all: fewer rounds",
        },
        lines={
            "example, ε = 2": "one row, ε = 2",
            "example, ε = 8": "one row, ε = 8",
            "client, ε = 8": "one client, ε = 8",
        }
        | NO_PRIVACY,
    ),
    "text": Message(
        "Privacy costs the LSTM more accuracy than the GPT, and it stays ahead",
        xlabel="ε of one role, δ as in the table",
        panels={"Shakespeare by role: client level": "next character, one client per role"},
        lines={"LSTM, no noise": "LSTM, no privacy", "GPT, no noise": "GPT, no privacy"},
        height=3.8,
    ),
}
