"""What the claims of five papers have in common: words, verdicts, and preconditions with names."""

import doctest
import importlib
import math

import numpy as np
import pytest

from experiments.harness.results import PAPERS
from experiments.papers import claim as claims
from experiments.papers.chen2024 import claims as chen
from experiments.papers.chen2024 import theory as chen_theory
from experiments.papers.li2025 import claims as li
from experiments.papers.li2025 import theory as li_theory
from experiments.papers.noble2022 import claims as noble
from experiments.papers.noble2022 import theory as noble_theory
from experiments.papers.ranaweera2025 import claims as ranaweera
from experiments.papers.ranaweera2025 import theory as ranaweera_theory
from experiments.papers.talaei2024 import claims as talaei
from experiments.papers.talaei2024 import theory as talaei_theory

MODULES = [f"{paper}.{kind}" for paper in PAPERS for kind in ("claims", "theory")]
MODULES.append("noble2022.gaps")
LONG = ("chen2024.claims", "ranaweera2025.claims")  # seconds each
SHARED = ["approximate_dp", "local_steps", "rates", "wang2019"]
UNSOUND = dict(noble2022=9, chen2024=6, li2025=4, ranaweera2025=4, talaei2024=11)


def module(name):
    return importlib.import_module(f"experiments.papers.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_every_claim_has_a_place_a_reason_and_words(name):
    found = claims.of(module(name))
    assert len(found) >= 6
    for claim in found:
        assert claim.place and claim.verdict in claims.VERDICTS and claim.function.__doc__
        assert claim.why or claim.verdict in ("unverified", "rigorous", "order"), claim.place


def test_how_many_claims_are_unsound():
    """A verdict that changes is said here."""
    verdicts = {
        paper: [
            c.verdict for kind in ("claims", "theory") for c in claims.of(module(f"{paper}.{kind}"))
        ]
        for paper in PAPERS
    }
    assert {paper: of.count("unsound") for paper, of in verdicts.items()} == UNSOUND


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
        for name in [*MODULES, *SHARED]
    ],
)
def test_examples_of_docstrings(name):
    """Golden values, of which the tests of each paper repeat few."""
    assert doctest.testmod(module(name)).failed == 0


# --- preconditions

ROUNDS = noble_theory.Problem(
    4.0, 0.125, 16, 2, 1600, 9.0, 1.0, distance=2.0, gap=4.0, strong_convexity=0.5
)
STRONG = dict(case="strongly_convex")
STEPS = noble_theory.Steps(2.0, 0.5, 0.25, 8, 4, 1 / 64, 2.0, 16.0)
NO_MOMENTS = noble_theory.Moments(*[0.0] * 7)
CHEN = chen_theory.Constants(100, 10, 50, 1.0, 1.0, 2.0, dissimilarity_2=0.3)
PL = ranaweera_theory.Constants(2.0, 2.0, noise_2=0.3)
EQUAL = np.full(60, 1 / 60)
RISES = talaei_theory.fedprox_lambdas(2, 1.5, 0.1, 1.0)
FALLS = talaei_theory.fedprox_lambdas(10, 1.5, 0.1, 1.0)
KNOWN = talaei_theory.Constants(2.3, 1.0, 10.0, 3.1, 1 / 30, 150, 60)
convex = lambda *args, **more: li.sensitivity_convex_contractive(
    1.0, *args, **dict(convex=True, scheme="wor_round") | more
)


MISSED = {  # the first condition that fails -> calls in which it does
    "epsilon < 1": [lambda: noble.sigma_required(1.5, 0.2, 0.1, 4, 25, 100, 1e-5)],
    "sigma_g >= s sqrt(K / log(2 T l / delta))": [
        lambda: noble.sigma_required(0.9, 0.2, 0.1, 4, 1, 10**6, 1e-5)
    ],
    "T >= max(108 / l, 48 nu / (mu l^(2/3)))": [
        lambda: noble_theory.scaffold_rate(ROUNDS._replace(rounds=1535), **STRONG)
    ],
    "T >= 8 (1 + B^2) nu / mu": [
        lambda: noble_theory.fedavg_rate(ROUNDS._replace(rounds=319, dissimilarity_b=2.0), **STRONG)
    ],
    "mu > 0": [lambda: noble_theory.scaffold_rate(ROUNDS._replace(strong_convexity=0.0), **STRONG)],
    "server_lr >= 1": [lambda: noble_theory.scaffold_rate(ROUNDS, "convex", 0.9)],
    "B >= 1": [lambda: noble_theory.fedavg_rate(ROUNDS._replace(dissimilarity_b=0.5), "convex")],
    "eta_l <= l / (54 mu K eta_g)": [lambda: noble_theory.descent_bound(STEPS, NO_MOMENTS)],
    "batch <= rows": [lambda: chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([20]))],
    "rate <= 0.1": [lambda: chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([499]))],
    "lambda <= L": [
        lambda: chen_theory.theorem1(CHEN._replace(strong_convexity=2.0), 100, 1.0),
        lambda: chen_theory.theorem1_ours(CHEN._replace(strong_convexity=2.0), 100, 1.0),
    ],
    "Upsilon > 0": [
        lambda: chen_theory.theorem2(
            CHEN._replace(clients=99.71, per_round=1), 100, 2.3, 1e-4 * (1 - 1e-9)
        )
    ],
    "lr <= 1 / (8 L tau)": [lambda: chen_theory.drift_nonconvex(CHEN, 1.0, 1.0)],
    "lr <= 1 / (8 tau L)": [lambda: chen_theory.theorem4_order(CHEN, 50, 7.0, 1.0, 0.5, 0.81, 0.1)],
    "epsilon <= 1": [
        lambda: li.sigma(1.0, 1.01, 1e-5),
        lambda: li.amplify_simple(1.01, 1e-5, 0.1),
    ],
    "epsilon / (2 rate) <= 1": [
        lambda: li.budget_split(0.5, 1e-5, 0.249),
        lambda: li.noise_std_printed(0.04, 14, 1.0, 10, 600, 0.5, 1e-5),  # MNIST, from 15 on
        lambda: li.noise_std_printed(0.04, 8, 1.0, 10, 325, 0.5, 1e-5),  # Adult, from 9 on
    ],
    "first <= 2 lr": [lambda: li.sensitivity_paper(5, 1.0, 0.1, first=0.21)],
    "every step clipped": [lambda: li.sensitivity_paper(5, 1.0, 0.1, clipped=False)],
    "convex losses": [lambda: convex([0.1], 10, 4.0, convex=False)],
    "a clip_norm that never acts": [lambda: convex([0.1], 10, 4.0, clip_norm=0.9)],
    "lrs <= 2 / smoothness": [lambda: convex([0.1, 0.51], 10, 4.0)],
    "each example at most once a round": [lambda: convex([0.1], 10, 4.0, scheme="independent")],
    "steps <= 8 smoothness / strong_convexity": [
        lambda: li_theory.bound_gap_printed(10, 1.0, 1.0, 1.0, 1.0, 9)
    ],
    "lambda L lr (C1 + K) / K <= 1": [
        lambda: ranaweera_theory.dp_pl_rate(PL, 5.0, 0.51, 40),
        lambda: ranaweera_theory.dp_pl_step(PL, 5.0, 0.51),
    ],
    "lrs that do not rise": [lambda: ranaweera_theory.theorem3(PL, 2.0, [0.08, 0.09], [5.0, 4.0])],
    "epsilon / R < 1": [lambda: talaei.client_noise_std_printed(1.0, 1, 3.1, 150, 5)],
    "epsilon / T < 1": [lambda: talaei.required_std_printed(1.0, 4, 3.1, EQUAL, 150, 5)],
    "lambda_2 >= 0": [lambda: talaei_theory.theorem3_printed(FALLS, KNOWN, 0.4, 100, 20)],
    "lambda_2 < 0": [lambda: talaei_theory.stationarity_bound(RISES, 1.0, 10, 0.1, 3)],
    "0 <= 1 + 2 pl lambda_2 < 1": [
        lambda: talaei_theory.pl_gap_bound(FALLS, 1.0, 10, 0.1, 3, 20.0),
        lambda: talaei_theory.pl_gap_bound(RISES, 1.0, 10, 0.1, 3, 0.1),
    ],
}


@pytest.mark.parametrize("failed", MISSED)
def test_a_precondition_that_fails_is_named(failed):
    for call in MISSED[failed]:
        found = call()
        assert failed in found.failed and not np.all(found.holds)


def test_preconditions_hold_at_their_borders():
    for found in (
        noble_theory.scaffold_rate(ROUNDS, **STRONG),
        noble_theory.fedavg_rate(ROUNDS._replace(rounds=320, dissimilarity_b=2.0), **STRONG),
        chen.lemma4(0.1, 0.1),
        li.sigma(1.0, 1.0, 1e-5),
        li.budget_split(0.5, 1e-5, 0.25),
        li.noise_std_printed(0.04, 15, 1.0, 10, 600, 0.5, 1e-5),  # MNIST from 15 steps on
        li.noise_std_printed(0.04, 9, 1.0, 10, 325, 0.5, 1e-5),  # Adult from 9 on
        li.sensitivity_paper(5, 1.0, 0.1, first=0.2),
        convex([0.1, 0.5], 10, 4.0, clip_norm=1.0),
        li_theory.bound_gap_printed(10, 1.0, 1.0, 1.0, 1.0, 8),
        ranaweera_theory.dp_pl_rate(PL, 5.0, 0.5, 40),
    ):
        assert found.failed == () and found.holds


def test_a_failed_precondition_of_one_client_leaves_the_others():
    found = chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([732, 499, 20]))
    assert found.holds.tolist() == [True, False, False]
    assert math.isclose(found.value[0], 2.2641, rel_tol=2e-5)


REFUSED = {
    "'P1a'": lambda: noble.proved_rdp(np.array([2.0]), *noble.SYNTHETIC[:-1], bound="P3"),
    "'convex'": lambda: noble_theory.scaffold_rate(ROUNDS, "concave"),
    "adjacency": lambda: chen.minibatch_sensitivity(1.0, 4, "replace"),
    "omega > 1": lambda: chen.lemma2(0.1, 1.0, 1e-5),
    "'quantile'": lambda: chen.participation_bound("mean", 10, 10, 1),
    "delta < rate": lambda: li.budget_split(0.5, 0.2, 0.1),
    "at least 50 rows": lambda: li.round_rates(10, 5, 49),
    "'D', 'min'": lambda: li.total_epsilon(1.0, 0.1, 5, 1e-5, "E"),
    "'printed_sum'": lambda: li_theory.aggregation_weights([1.0], [0], "some"),
    "power of two": lambda: ranaweera.effective_noise_multiplier("R1", 12, 1.0),
    "reading to be one of": lambda: ranaweera.audit_power("R3", 8, 1.0),
    "calibration to be one of": lambda: ranaweera.true_epsilon("R1", 8, 1.0, 1e-5, "lemma1"),
    "bands to be one of": lambda: ranaweera_theory.ratio_weighted(np.ones(4) / 4, 16),
    "'basic'": lambda: talaei.composed_epsilon("advanced", 3, 1.0, 1.0, 1e-5),
    "'prox_erm'": lambda: talaei.client_sensitivity("argmin", 1.0),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_known_is_refused(says):
    with pytest.raises(ValueError, match=says):
        REFUSED[says]()
