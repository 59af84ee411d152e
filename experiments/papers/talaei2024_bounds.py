"""The bounds of Talaei, Izadi, 2024, beside runs of PADPFL on a strongly convex problem whose
constants are measured.

The rule, before any run: a claim of the paper is made of every line, with constants as small as the
line's own run allows.  Theorems 2 and 3 take A of Lemma 1, from the largest gradient divergence and
the smallest gradient of the run; our bounds take the largest dissimilarity that was measured.
Losses are convex and smooth, and their gradients diverge by a bounded amount everywhere.  A finite
A everywhere have only clients that are alike: elsewhere grad L is 0 where theirs are not, and A is
of the models that the run met.  E[l_i] = l_i / N holds nowhere: it is a step in the proof of
Theorem 3, and is not counted among the hypotheses.  Clips are left out of the theorems, so where
one acts a claim cannot be checked.  A theorem has no settings but its hypotheses: what speaks
against it contradicts it.  The claims on the length of the noise were added after a first run.
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jfl
from jfl.cli import console
from jfl.papers.talaei2024 import privacy as paper
from jfl.papers.talaei2024 import theory

from ..harness.runner import show_verdicts
from ..harness.verdicts import Claim, Comparison, Evidence, Quantity, exactly
from . import softmax_rows
from .talaei2024_plans import written

NO_NOISE = 1e12  # an epsilon at which the printed noise terms vanish
NOTE = (
    "The printed bound is Theorem 2, or Theorem 3 where factors change. A bound is above if it is "
    "at least the mean over seeds, and says something if it is below the gap at the start. A is "
    "finite everywhere only where clients are alike"
)
COLUMNS = (
    "line",
    "start",
    "gap",
    "printed",
    "pl_gap_bound",
    "mean |∇L|²",
    "stationarity_bound",
    "λ_2 printed",
    "λ_2 ours",
    "γ",
    "β",
    "longest / B",
    "seconds",
)

# without noise unless a line names an epsilon, of which the paper has 5 and 20
TURNED = ((0, 1, 2), (2, 1, 0))  # the factors of scenario 4
LINES = {
    "alike": dict(deal="alike"),
    "alike T=300": dict(deal="alike", rounds=300),
    "alike ε=20": dict(deal="alike", epsilon=20.0),
    "alike ε=5": dict(deal="alike", epsilon=5.0),
    "iid": {},
    "iid T=300": dict(rounds=300),
    "iid ε=20": dict(epsilon=20.0),
    "iid ε=20 T=10": dict(epsilon=20.0, rounds=10),
    "iid ε=5": dict(epsilon=5.0),
    "iid mu=0.1": dict(mu=0.1),
    "iid mu=0.1 ε=20": dict(mu=0.1, epsilon=20.0),
    "skewed": dict(deal="skewed"),
    "skewed ε=20": dict(deal="skewed", epsilon=20.0),
    "iid 0-1-2 to 2-1-0": dict(impact=TURNED),
    "iid 0-1-2 to 2-1-0 ε=20": dict(impact=TURNED, epsilon=20.0),
    "one class a client, to the other class": dict(deal="classes", impact=((1, 0), (0, 1))),
}
QUICK = dict(dataset="digits", clients=6, rows=40, rounds=12, swap=4)
QUICK_LINES = ("alike", "iid", "iid ε=20", "one class a client, to the other class")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line: softmax regression with l2, full batches, noise as printed for `rounds` rounds."""

    dataset: str = "adult"
    deal: str = "iid"  # of softmax_rows.federation
    clients: int = 60
    rows: int = 150
    l2: float = 0.05
    mu: float = 10.0
    steps: int = 5
    rounds: int = 30
    epsilon: float | None = None
    impact: tuple = ((1,),)  # ratios of groups, client c of c mod groups; later ones from `swap` on
    swap: int = 10
    delta: float = theory.DELTA

    def factors(self) -> np.ndarray:
        """The impact factors of each stage, [stages, C]."""
        groups = [np.asarray(r, float)[np.arange(self.clients) % len(r)] for r in self.impact]
        return np.array([g / g.sum() for g in groups])

    def stage(self, round_: int) -> int:
        return int(len(self.impact) > 1 and round_ >= self.swap)


class Problem(NamedTuple):
    """A line's plan, and what is known before it runs."""

    plan: Any
    rows: softmax_rows.Rows
    factors: np.ndarray  # [stages, C]
    smoothness: float
    clip_norm: float
    std: float  # of the noise in a broadcast
    least: float  # of the last objective


class Seen(NamedTuple):
    """What is measured at the server's models, [seeds, rounds + 1]; the objective is that of the
    factors with which the round goes on."""

    loss: np.ndarray
    before: np.ndarray  # the same with the factors of the round before
    gradient: np.ndarray
    dissimilarity: np.ndarray
    divergence: np.ndarray
    added: np.ndarray  # to A by new factors: A' - A of Lemma 3
    inexactness: np.ndarray  # the largest of clients that count
    longest: np.ndarray  # model of such a client, before the clip
    extra_printed: np.ndarray  # Lemma 3, of new factors, and ours
    extra: np.ndarray
    noise: np.ndarray  # length of what was added to the mean of the round's models; 0 at the end


def clip_norm(setting, classes: int) -> float:
    """Of a model: none whose objective is below that of 0, log k, is longer."""
    return float((2 * np.log(classes) / setting.l2) ** 0.5)


@functools.lru_cache(maxsize=4)
def _data(dataset, deal, clients, rows, l2):
    fed = softmax_rows.federation(dataset, deal, clients, rows)
    return fed, float(jfl.heterogeneity.smoothness(fed, l2=l2).max())


def problem(setting: Setting) -> Problem:
    """The plan of a line: local gradient steps of 1 / (L + mu) from the broadcast model."""
    fed, smooth = _data(setting.dataset, setting.deal, setting.clients, setting.rows, setting.l2)
    plain, l2 = jfl.models.logistic(fed).loss, setting.l2

    def loss(w, x, y):  # l2 is part of the loss: a client's inexactness counts it
        return plain(w, x, y) + l2 / 2 * sum(jnp.sum(v**2) for v in w["Dense_0"].values())

    start = dict(
        Dense_0=dict(kernel=jnp.zeros((fed.x.shape[1], fed.classes)), bias=jnp.zeros(fed.classes))
    )
    factors, bound = setting.factors(), clip_norm(setting, fed.classes)
    client, server, total = _stds(setting, factors, bound)
    alg = jfl.algorithms.padpfl(
        jfl.grad(loss), mu=setting.mu, lr=1 / (smooth + setting.mu), steps=setting.steps
    )
    noisy = lambda std: (jfl.gaussian(std=std),) if std else ()
    first, last, swap = factors[0], factors[-1], setting.swap
    plan = jfl.plan(
        fed,
        jfl.task(start, loss),
        alg,
        jfl.sampling.full(setting.clients),
        upload=jfl.chain(jfl.clip_l2(bound), jfl.total(), *noisy(client)),
        release=jfl.chain(
            jfl.bounded(bound, "upload"),
            jfl.total(),
            *noisy(server * setting.clients),
            jfl.divide(setting.clients),
        ),
        weights=first if len(factors) == 1 else lambda t: jnp.where(t < swap, first, last),
    )
    least = softmax_rows.best(fed, l2, last)[1]
    return Problem(plan, softmax_rows.rows_of(fed, l2), factors, smooth, bound, total, least)


def _stds(setting, factors, bound):
    """The printed noise of an upload, of the server, and of what is broadcast."""
    if setting.epsilon is None:
        return 0.0, 0.0, 0.0
    known = setting.rows, setting.epsilon
    c = float(paper.gaussian_factor(setting.delta))
    client = float(paper.client_noise_std_printed(bound, 1, c, *known, strict=False).value)
    server = max(
        float(
            paper.server_noise_std_printed(
                bound, 1, setting.rounds, c, p, *known, strict=False
            ).value
        )
        for p in factors
    )
    return client, server, max(float(np.hypot((p @ p) ** 0.5 * client, server)) for p in factors)


# --- along a run


def measure(made: Problem, setting: Setting, models, round_: int) -> Seen:
    """All of Seen at the model before round `round_`, of the models [rounds + 1, f, k] of a run."""
    w, after = models[round_], models[round_ + 1] if round_ < setting.rounds else None
    rows, mu = made.rows, setting.mu
    p, old = (made.factors[setting.stage(t)] for t in (round_, max(round_ - 1, 0)))
    each, grads = softmax_rows.losses(rows, w), softmax_rows.gradients(rows, w)
    flat = lambda g: g.reshape(len(g), -1)
    norm = lambda g: float(np.linalg.norm(g))
    own, lr = np.repeat(w[None], len(p), 0), 1 / (made.smoothness + mu)
    for _ in range(setting.steps):
        own = own - lr * theory.prox_gradient(own, w, softmax_rows.gradients(rows, own), mu)
    left = theory.prox_gradient(own, w, softmax_rows.gradients(rows, own), mu)
    counts, total = p > 0, np.tensordot(p, grads, 1)
    alpha, before = p - old, np.tensordot(old, grads, 1)
    return Seen(
        p @ each,
        old @ each,
        norm(total),
        float(theory.dissimilarity(flat(grads), p)),
        theory.gradient_divergence(flat(grads)[counts], p[counts]),
        theory.dissimilarity_adaptive(0.0, alpha, flat(grads), before.ravel()),
        theory.inexactness(flat(left), flat(grads))[counts].max(),
        np.linalg.norm(flat(own), axis=1)[counts].max(),
        theory.adaptive_extra_printed(each),
        theory.adaptive_extra_term(alpha, each),
        0.0 if after is None else norm(after - np.tensordot(p, own, 1)),
    )


def against(setting: Setting, seeds: int) -> dict:
    """One line beside its bounds."""
    begun, made = time.perf_counter(), problem(setting)
    fixed, rounds = len(made.factors) == 1, setting.rounds
    models = softmax_rows.along(made.plan, seeds if setting.epsilon else 1, rounds)
    seen = Seen(
        *np.array(
            [[measure(made, setting, run, t) for t in range(rounds + 1)] for run in models], float
        ).transpose(2, 0, 1)
    )
    gaps = seen.loss[:, -1] - made.least
    worst = {n: float(getattr(seen, n)[:, :-1].max()) for n in Seen._fields}
    rest = worst["inexactness"], made.smoothness
    ours = theory.fedprox_lambdas(setting.mu, worst["dissimilarity"], *rest)
    a = float(
        theory.dissimilarity_bound(worst["divergence"], seen.gradient[:, :-1].min())
        + max(worst["added"], 0.0)
    )
    theirs = theory.fedprox_lambdas(setting.mu, a, *rest)
    start = float(seen.loss[0, 0] - made.least)
    known = theory.Constants(
        start,
        worst["gradient"],
        made.clip_norm,
        float(paper.gaussian_factor(setting.delta)),
        float(made.factors.max()),
        setting.rows,
        setting.clients,
    )
    budget: Any = rounds, setting.epsilon or NO_NOISE
    printed = (
        theory.theorem2_printed(theirs, known, *budget, strict=False)
        if fixed
        # of the start as well, where all losses are log k
        else theory.theorem3_printed(
            theirs, known, 2 * worst["extra_printed"], *budget, strict=False
        )
    )
    extra = seen.extra[:, 1:-1].sum(1)
    noise, dim = made.std, models[0, 0].size
    rests = theory.stationarity_bound(
        ours, start, rounds, noise, dim, extra=float(extra.mean()), strict=False
    )
    falls = theory.pl_gap_bound(ours, start, rounds, noise, dim, setting.l2, strict=False)
    return dict(
        gap=gaps,
        start=start,
        squares=(seen.gradient[:, :-1] ** 2).mean(1),
        start_square=float(seen.gradient[0, 0] ** 2),
        printed=float(printed.value),
        stationarity=None if rests.failed else float(rests.value),
        pl_gap=float(falls.value) if fixed and not falls.failed else None,
        change=(seen.loss - seen.before)[:, setting.swap] if not fixed else None,
        extra_printed=seen.extra_printed[:, setting.swap] if not fixed else None,
        extra=seen.extra[:, setting.swap] if not fixed else None,
        lambdas=ours._asdict(),
        lambdas_printed=theirs._asdict(),
        dissimilarity_printed=a,
        noise=seen.noise[:, :-1].mean(1),
        noise_printed=noise * (2 * setting.clients / np.pi) ** 0.5,
        noise_norm=float(theory.noise_norm_mean(dim, noise)),
        std=noise,
        dim=dim,
        smoothness=made.smoothness,
        clip_norm=made.clip_norm,
        least=made.least,
        worst=worst,
        clip_acts=bool(worst["longest"] > made.clip_norm),
        everywhere=setting.deal == "alike",
        seconds=time.perf_counter() - begun,
    )


# --- claims


def claims_of(line: str, c: dict) -> list[Claim]:
    """What is said of one line; fixed before it runs."""
    acts = "no clip acts" if c["clip_acts"] else ""
    rises = "" if c["lambdas"]["square"] < 0 else "lambda_2 < 0"
    why = "; ".join(filter(None, (acts, rises)))
    fixed = c["change"] is None
    theorem = f"Theorem {2 if fixed else 3} as printed is at least the measured gap"
    check, both = softmax_rows.above, []
    both.append(Claim(f"{line}: {theorem}", check(c["printed"], c["gap"], acts), "paper", theorem))
    if not fixed:
        lemma = "Lemma 3: max l / 2 is at least what new factors add"
        both.append(
            Claim(f"{line}: {lemma}", check(c["extra_printed"], c["change"]), "paper", lemma)
        )
        own = "our extra term is at least what new factors add"
        both.append(Claim(f"{line}: {own}", check(c["extra"], c["change"]), "ours", own))
    if c["std"]:
        length = "E|n| of Theorem 2, with N for the dimension, is at least the noise's length"
        printed = check(c["noise_printed"], c["noise"], acts)
        both.append(
            Claim(
                f"{line}: {length}",
                printed,
                "paper",
                "Theorem 2 as printed is at least the measured gap",
            )
        )
        own = "the noise is as long as in our bounds, to 5 %"
        near = Comparison(Quantity.of(c["noise"] / c["noise_norm"]), 0.95, 1.05)
        found = Evidence((near,), f"the run does not meet: {acts}" if acts else "")
        both.append(Claim(f"{line}: {own}", lambda _: found, "ours", own))
    own = "stationarity_bound is at least the mean squared gradient"
    bound = 0.0 if c["stationarity"] is None else c["stationarity"]
    both.append(Claim(f"{line}: {own}", check(bound, c["squares"], why), "ours", own))
    if fixed:
        own = "pl_gap_bound is at least the measured gap"
        no = why or ("" if c["pl_gap"] is not None else "0 <= 1 + 2 pl lambda_2 < 1")
        bound = 0.0 if c["pl_gap"] is None else c["pl_gap"]
        both.append(Claim(f"{line}: {own}", check(bound, c["gap"], no), "ours", own))
    return both


def says_something(cells: dict) -> list[Claim]:
    """Whether a bound is below what it bounds was at the start, line by line."""
    fixed = {n: c for n, c in cells.items() if c["change"] is None}
    changing = {n: c for n, c in cells.items() if c["change"] is not None}
    found = []
    for name, bound, start, among in (
        ("Theorem 2 as printed", "printed", "start", fixed),
        ("Theorem 3 as printed", "printed", "start", changing),
        ("stationarity_bound", "stationarity", "start_square", cells),
        ("pl_gap_bound", "pl_gap", "start", fixed),
    ):
        told = [n for n, c in among.items() if c[bound] is not None and c[bound] < c[start]]
        below = [n for n in told if among[n][bound] < 0]
        seen = f"in {len(told)} of {len(among)} lines"
        seen += f", below 0 in {len(below)}: {'; '.join(below)}" if below else ""
        text = f"{name} says something somewhere: it is below its value at the start"
        if among:
            found.append(Claim(text, exactly(bool(told), seen), "ours"))
    return found


def bounds(name, experiment, out, quick):
    """Theorems 2 and 3, Lemma 3 and our replacements beside measured runs."""
    reduced, cells, claims = QUICK if quick else {}, {}, []
    for line in QUICK_LINES if quick else LINES:
        setting = Setting(**LINES[line] | reduced)
        cells[line] = against(setting, len(experiment.seeds[: 3 if quick else None]))
        claims += claims_of(line, cells[line])
    claims += says_something(cells)
    rows = [
        (
            line,
            f"{c['start']:.4g}",
            softmax_rows.spread(c["gap"]),
            f"{c['printed']:.4g}",
            _number(c["pl_gap"]),
            softmax_rows.spread(c["squares"]),
            _number(c["stationarity"]),
            f"{c['lambdas_printed']['square']:.3g}",
            f"{c['lambdas']['square']:.3g}",
            f"{c['worst']['inexactness']:.2g}",
            f"{c['worst']['gradient']:.3g}",
            f"{c['worst']['longest'] / c['clip_norm']:.2f}",
            f"{c['seconds']:.1f}",
        )
        for line, c in cells.items()
    ]
    console.table(experiment.title, [(h, h != "line") for h in COLUMNS], rows, NOTE)
    verdicts = softmax_rows.judged(claims, experiment.differs)
    show_verdicts(verdicts)
    return written(
        out,
        dict(
            experiment=name,
            title=experiment.title,
            quick=quick,
            columns=list(COLUMNS),
            rows=[list(row) for row in rows],
            settings=dataclasses.asdict(Setting(**reduced)),
            runs={
                n: {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in c.items()}
                for n, c in cells.items()
            },
            note=NOTE,
            verdicts=verdicts,
        ),
    )


def _number(value) -> str:
    return "" if value is None else f"{value:.4g}"
