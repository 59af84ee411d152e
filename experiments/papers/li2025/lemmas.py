"""Compare the lemmas behind Theorems 3 and 4 of Li, Wang, Wu, 2025, with measured values.

One run of Algorithm 1 with all clients, on the strongly convex problem of `bounds`, in float64
NumPy.  Nothing is clipped, so that Lemmas A3 and A6 are checked only where Assumption 4 holds.
Means over batches, noise and cohorts are exact, given the models of the clients at a step, so no
value has seeds.
"""

import numpy as np

from jfl.runs import build as assemble
from jfl.runs.config import Config

from ...harness import theorems
from ...harness.verdicts import CONTRADICTED, Claim, Evidence
from .. import rates, softmax_rows
from . import claims as li2025
from . import theory
from .bounds import constants

SAMPLINGS = dict(
    with_replacement="Lemma A6 (with replacement)",
    without_replacement="Lemma A6 (without replacement)",
)
COLUMNS = ("run", "lemma", "largest value over its bound")


def measure(config, fed, best, smoothness, gap, noisy: bool):
    """Return lemma -> its bounds and values, over the steps or rounds of one run, and the norm of
    the longest gradient.

    Args:
        config: of the run; its cohort is that of Lemma A6.
        fed: clients with equally many rows.
        best: the minimiser, Float64[f, k].
        smoothness: L of the clients' objectives.
        gap: F* - sum p_k F_k*.
        noisy: whether the last step of a round adds the printed noise.
    """
    rows, clients = softmax_rows.rows_of(fed, config.l2), config.clients
    count, shares = rows.x.shape[1], np.full(clients, 1 / clients)
    lr_of = rates.theory(config.l2, smoothness, config.steps)
    rng, square = np.random.default_rng(0), lambda v: (v**2).sum((-2, -1))
    pick = np.arange(clients)[:, None]
    w = np.zeros((clients, *best.shape))
    spreads, noises, longest = [], [], 0.0
    found: dict = {"Lemma A1": [], "Lemma A3": []}
    found |= {lemma: [] for lemma in SAMPLINGS.values()}
    for t in range(config.rounds * config.steps):
        lr, last = float(lr_of(t)), (t + 1) % config.steps == 0
        std = 0.0
        if noisy and last:
            asked = config.batch, count, config.epsilon, config.delta
            std = float(li2025.noise_std_printed(lr, config.steps, config.clip_norm, *asked).value)
        _, slopes, squares = softmax_rows.moments(rows, w)
        mean, slope = w.mean(0), slopes.mean(0)
        spread = squares - square(slopes - config.l2 * w)  # variances of a row's gradient
        left = (count - config.batch) / (count - 1)  # batches have no row twice
        noise = float(theory.gradient_noise_bound(shares, spread * left, config.batch))
        drift = float(square(w - mean).mean())
        after = square(mean - lr * slope - best)
        after += lr**2 * (noise + best.size * std**2 * (shares**2).sum())
        terms = lr, config.l2, smoothness, gap, best.size, std**2
        step = theory.step_bound(square(mean - best), noise, drift, *terms)
        within = theory.drift_bound(config.steps, lr, config.clip_norm, best.size, std**2)
        found["Lemma A1"].append((step.value, after))
        spreads.append(spread)
        noises.append(noise)
        found["Lemma A3"].append((within, drift))
        used = np.argsort(rng.random((clients, count)))[:, : config.batch]
        batch = softmax_rows.Rows(rows.x[pick, used], rows.y[pick, used], config.l2)
        own = softmax_rows.gradients(batch, w)
        longest = max(longest, float(square(own).max()) ** 0.5)
        w = w - lr * (own + std * rng.normal(size=w.shape))
        if last:
            apart = square(w - w.mean(0)).mean() / config.cohort
            for sampling, lemma in SAMPLINGS.items():
                rest = config.steps, lr, config.clip_norm, clients, config.cohort
                bound = theory.sampling_variance_bound(sampling, *rest)
                all_but = (clients - config.cohort) / (clients - 1)
                share = all_but if sampling == "without_replacement" else 1.0
                found[lemma].append((bound, share * apart))
            w = np.broadcast_to(w.mean(0), w.shape)
    # the least constants for which Assumption 3 holds along the run
    bound = theory.gradient_noise_bound(shares, np.max(spreads, axis=0), config.batch)
    found["Lemma A2"] = [(bound, noise) for noise in noises]
    return {lemma: np.array(found[lemma], float).T for lemma in sorted(found)}, longest


def lemma_a5(clients: int):
    """Return the claims on Lemma A5 for clients of unequal size."""
    shares = np.arange(1.0, clients + 1)
    shares /= shares.sum()
    texts = dict(
        with_replacement="drawn with replacement by p_k, as in Assumption 5",
        equal_chances="drawn with replacement and equal chances, as in Appendix D",
        without_replacement="drawn without replacement",
    )

    def check(sampling):
        ratios = theory.mean_weights(shares, sampling) / shares
        words = f"the mean weight of a client is {ratios.min():.3g} to {ratios.max():.3g} times p_k"
        found = Evidence(exact=bool(np.allclose(ratios, 1)), seen=words, against=CONTRADICTED)
        return lambda results: found

    return [Claim(f"Lemma A5 holds, {words}", check(s), "paper") for s, words in texts.items()]


def lemmas(experiment, out, quick):
    """Check Lemmas A1, A2, A3, A5 and A6, and which assumptions the figures meet."""
    config = Config(**{**experiment.base, **(experiment.quick if quick else {})})
    fed = assemble.federation(config)
    known, best = constants(config), softmax_rows.best(fed, config.l2, "uniform")[0]
    claims, rows = [], []
    for run in ("without noise", "with the printed noise"):
        of = known["smoothness"], known["gap"], run != "without noise"
        found, longest = measure(config, fed, best, *of)
        over = f"a gradient of norm {longest:.3g} is longer than G" * (longest > config.clip_norm)
        for lemma, (bound, values) in found.items():
            unmet = "" if lemma in ("Lemma A1", "Lemma A2") else over
            check = theorems.is_above(bound, values, unmet, drawn=False)
            claims.append(Claim(f"{lemma} holds {run}", check, "paper", lemma.partition(" (")[0]))
            rows.append((run, lemma, f"{(values / np.maximum(bound, 1e-300)).max():.3g}"))
    claims += [*lemma_a5(config.clients), *experiment.claims]
    return dict(claims=claims, columns=COLUMNS, rows=rows, seeds=[0])
