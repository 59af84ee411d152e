"""What the claims of five papers have in common: words, verdicts, and preconditions with names."""

import doctest
import importlib
import math
import types

import numpy as np
import pytest

from experiments.harness.results import PAPERS
from experiments.papers import claim as claims
from experiments.papers.chen2024 import claims as chen
from experiments.papers.chen2024 import theory as chen_theory
from experiments.papers.li2025 import claims as li
from experiments.papers.li2025 import theory as li_theory
from experiments.papers.noble2022 import bounds as noble_bounds
from experiments.papers.noble2022 import claims as noble
from experiments.papers.noble2022 import theory as noble_theory
from experiments.papers.ranaweera2025 import claims as ranaweera
from experiments.papers.ranaweera2025 import theory as ranaweera_theory
from experiments.papers.talaei2024 import claims as talaei
from experiments.papers.talaei2024 import theory as talaei_theory

MODULES = [f"{paper}.{kind}" for paper in PAPERS for kind in ("claims", "theory")]
MODULES.append("noble2022.gaps")
LONG = ("chen2024.claims", "ranaweera2025.claims")  # seconds each
SHARED = ["approximate_dp", "rates", "wang2019"]


def module(name):
    return importlib.import_module(f"experiments.papers.{name}")


@pytest.mark.parametrize("name", MODULES)
def test_every_claim_has_a_place_a_reason_and_words(name):
    of_module = (f for f in vars(module(name)).values() if isinstance(f, types.FunctionType))
    found = {f: f.claim for f in of_module if hasattr(f, "claim")}
    assert found
    for function, claim in found.items():
        assert claim.place and claim.verdict in claims.VERDICTS and function.__doc__
        assert claim.why or claim.verdict in ("unverified", "rigorous", "order"), claim.place


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


# --- golden values

EVERY = chen_theory.Constants(100, 10, 5, 3.0, 1.3, 2.0, 0.1, 0.5, 0.2, 0.3, 10)
PROBLEM = noble_theory.Problem(4.0, 0.125, 16, 2, 1600, 9.0, 1.0, 2.0, 4.0, 0.5)
GOLDEN = [
    (lambda: chen_theory.theorem3_constant(EVERY, 0.99, 0.1), 31344.1157),
    (lambda: li.sensitivity_paper(5, 0.7, 0.04), 0.56),
    (lambda: li_theory.step_bound(2.0, 0.3, 0.4, 0.1, 0.5, 2.0, 0.7, 3, 0.2), 2.799),
    (
        lambda: li_theory.optimal_local_steps(
            lambda q: 8.0 + 0.08 * (q - 1) ** 2, 1e-7, 0.0, 0.5, 1.0, most=100
        ),
        10.0,
    ),
    (
        lambda: noble_bounds.proofs_lr(PROBLEM, "scaffold", noble_bounds.STRONG, 10**5),
        0.000149859046,
    ),
    (lambda: noble_bounds.proofs_lr(PROBLEM, "fedavg", noble_bounds.CONVEX, 10**5), 0.00141421356),
    (
        lambda: noble_bounds.proofs_lr(PROBLEM, "scaffold", noble_bounds.NONCONVEX, 10**5),
        0.000707106781,
    ),
    (
        lambda: noble_bounds.proofs_lr(
            PROBLEM._replace(dissimilarity_g=3.0), "fedavg", noble_bounds.STRONG, 10**5
        ),
        0.000136482713,
    ),
    (
        lambda: noble_bounds.proofs_lr(
            PROBLEM._replace(dissimilarity_g=3.0), "fedavg", noble_bounds.NONCONVEX, 10**5
        ),
        0.000440652649,
    ),
    (lambda: ranaweera_theory.dp_pl_step(PL, 5.0, 0.1, 3.0), 3.883),
    (lambda: talaei_theory.stationarity_bound(FALLS, 1.0, 10, 0.1, 3, extra=3.0), 7.56092006),
    (lambda: talaei_theory.pl_gap_bound(FALLS, 2.0, 10, 0.1, 3, 2.0), 0.23027333),
]


def test_golden_values_of_formulas():
    """Each was compared with a loop, an enumeration or simulated runs."""
    for number, (call, want) in enumerate(GOLDEN):
        got = call()
        np.testing.assert_allclose(getattr(got, "value", got), want, 1e-7, err_msg=f"{number}")


# --- preconditions

ROUNDS = noble_theory.Problem(
    4.0, 0.125, 16, 2, 1600, 9.0, 1.0, distance=2.0, gap=4.0, strong_convexity=0.5
)
STRONG = dict(case="strongly_convex")
CHEN = chen_theory.Constants(100, 10, 50, 1.0, 1.0, 2.0, dissimilarity_2=0.3)
PL = ranaweera_theory.Constants(2.0, 2.0, noise_2=0.3)
EQUAL = np.full(60, 1 / 60)
RISES = talaei_theory.fedprox_lambdas(2, 1.5, 0.1, 1.0)
FALLS = talaei_theory.fedprox_lambdas(10, 1.5, 0.1, 1.0)
KNOWN = talaei_theory.Constants(2.3, 1.0, 10.0, 3.1, 1 / 30, 150, 60)

MISSED = {  # the first condition that fails -> calls in which it does
    "T >= max(108 / l, 48 nu / (mu l^(2/3)))": [
        lambda: noble_theory.scaffold_rate(ROUNDS._replace(rounds=1535), **STRONG)
    ],
    "T >= 8 (1 + B^2) nu / mu": [
        lambda: noble_theory.fedavg_rate(ROUNDS._replace(rounds=319, dissimilarity_b=2.0), **STRONG)
    ],
    "mu > 0": [lambda: noble_theory.scaffold_rate(ROUNDS._replace(strong_convexity=0.0), **STRONG)],
    "server_lr >= 1": [lambda: noble_theory.scaffold_rate(ROUNDS, "convex", 0.9)],
    "B >= 1": [lambda: noble_theory.fedavg_rate(ROUNDS._replace(dissimilarity_b=0.5), "convex")],
    "batch <= rows": [lambda: chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([20]))],
    "rate <= 0.1": [lambda: chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([499]))],
    "4 C <= H, with C that of theorem1_ours": [  # few of many clients
        lambda: chen_theory.theorem1(
            chen_theory.Constants(450, 1, 1, 1.0, 1.0, strong_convexity=1.0), 100, 1.0
        )
    ],
    "lambda <= L": [
        lambda: chen_theory.theorem1(CHEN._replace(strong_convexity=2.0), 100, 1.0),
        lambda: chen_theory.theorem1_ours(CHEN._replace(strong_convexity=2.0), 100, 1.0),
    ],
    "Upsilon > 0": [
        lambda: chen_theory.theorem2(
            CHEN._replace(clients=99.71, per_round=1), 100, 2.3, 1e-4 * (1 - 1e-9)
        )
    ],
    "lr <= 1 / (8 tau L)": [lambda: chen_theory.theorem4_order(CHEN, 50, 7.0, 1.0, 0.5, 0.81, 0.1)],
    "epsilon <= 1": [lambda: li.sigma(1.0, 1.01, 1e-5)],
    "epsilon / (2 rate) <= 1": [
        lambda: li.noise_std_printed(0.04, 14, 1.0, 10, 600, 0.5, 1e-5),  # MNIST, from 15 on
        lambda: li.noise_std_printed(0.04, 8, 1.0, 10, 325, 0.5, 1e-5),  # Adult, from 9 on
    ],
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
        li.noise_std_printed(0.04, 15, 1.0, 10, 600, 0.5, 1e-5),  # MNIST from 15 steps on
        li.noise_std_printed(0.04, 9, 1.0, 10, 325, 0.5, 1e-5),  # Adult from 9 on
        li_theory.bound_gap_printed(10, 1.0, 1.0, 1.0, 1.0, 8),
        ranaweera_theory.dp_pl_rate(PL, 5.0, 0.5, 40),
    ):
        assert found.failed == () and found.holds


def test_a_failed_precondition_of_one_client_leaves_the_others():
    found = chen.calibrate_sigma(0.3, 1e-2, 10, 50, 1.0, 50, np.array([732, 499, 20]))
    assert found.holds.tolist() == [True, False, False]
    assert math.isclose(found.value[0], 2.2641, rel_tol=2e-5)


REFUSED = {
    "'server'": lambda: noble.proved_rdp(np.array([2.0]), *noble.SYNTHETIC[:-1], bound="P3"),
    "'convex'": lambda: noble_theory.scaffold_rate(ROUNDS, "concave"),
    "omega > 1": lambda: chen.lemma2(0.1, 1.0, 1e-5),
    "at least 50 rows": lambda: li.noise_std_printed(0.04, 5, 1.0, 10, 49, 0.5, 1e-5),
    "power of two": lambda: ranaweera.effective_noise_multiplier("R1", 12, 1.0),
    "reading to be one of": lambda: ranaweera.audit_power("R3", 8, 1.0),
    "calibration to be one of": lambda: ranaweera.true_epsilon("R1", 8, 1.0, 1e-5, "lemma1"),
}


@pytest.mark.parametrize("says", REFUSED)
def test_what_is_not_known_is_refused(says):
    with pytest.raises(ValueError, match=says):
        REFUSED[says]()
