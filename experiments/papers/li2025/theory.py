"""Li, Wang, Wu, Mathematics 13(3):497, 2025: noise in the average, and convergence.

    E F(w_t) - F* <= 2 kappa / (t + a) ((A + B + H) / mu + 2 L ||w_0 - w*||^2),   a = max(8 kappa,
    steps)

for mu-strongly convex, L-smooth losses with gradients of norm at most `clip_norm`, learning rates
`schedules.theory`, t counted in local steps.  A is `gradient_term`, B a `noise_term`, H a
`sampling_term`; the paper's B is for noise in the gradient, ours for noise on the model.  Bounds
are far above what is measured: they show how things scale.

Float64 and traceable.  `shares` [C] are the weights p_k of the clients, with sum 1; `sizes` [C]
their rows.
"""

import jax.numpy as jnp
import numpy as np

from jfl.core import checks
from jfl.core.checks import Checked as Checked
from jfl.core.pytrees import in_float64

from ..claim import claim

SAMPLINGS = ("full", "with_replacement", "with_replacement_independent", "without_replacement")


# --- averages


@claim(
    "Algorithm 1",
    "conditional",
    "printed for models: weights that do not sum to one, and a sum that shrinks them",
)
def aggregation_weights(shares, cohort, sampling: str):
    """The weight of each upload of a cohort, so that the weighted sum of differences is unbiased
    for sum p_k diff_k.

    Args:
        shares: p_k [C], which add up to 1.
        cohort: Int[..., K], the clients of each of some rounds.
        sampling: "full"; "with_replacement", drawn with probabilities p_k;
            "uniform_with_replacement", drawn with probability 1 / C; "without_replacement";
            "printed_sum", p_k for any draw, as Algorithm 1 has it: biased.

    Returns:
        [..., K], the weight of each upload.
    """
    where = "li2025.theory.aggregation_weights"
    options = (
        "full",
        "with_replacement",
        "uniform_with_replacement",
        "without_replacement",
        "printed_sum",
    )
    checks.require_one_of(where, options, sampling=sampling)
    checks.require_nonnegative(where, shares=shares)
    ids = jnp.asarray(cohort)
    with in_float64():
        p, size = _wide(shares)[0], ids.shape[-1]
        if sampling == "with_replacement":
            return jnp.full(ids.shape, 1 / size)
        return p[ids] * (1 if sampling in ("full", "printed_sum") else len(p) / size)


@claim("Theorem 4", "ours", "the paper leaves out that uploads are sampled with their noise")
def square_weights(shares, sampling: str, cohort: int | None = None):
    """E[weight^2] of each client under the unbiased weights: how much of its noise variance reaches
    the model.

    Args:
        shares: p_k [C], which add up to 1.
        sampling: "full"; "without_replacement"; "with_replacement": a client that is drawn twice
            runs once and counts twice; "with_replacement_independent": it runs twice.
        cohort: clients of a round; not needed for "full".

    Returns:
        Float64[C].
    """
    where = "li2025.theory.square_weights"
    checks.require_one_of(where, SAMPLINGS, sampling=sampling)
    checks.require_nonnegative(where, shares=shares)
    if sampling != "full":
        checks.require_integer(where, cohort=cohort)
    with in_float64():
        p, many = _wide(shares, cohort or 1)
        return {
            "full": p**2,
            "with_replacement": p**2 + p * (1 - p) / many,
            "with_replacement_independent": p / many,
            "without_replacement": len(p) / many * p**2,
        }[sampling]


@claim(
    "eq. (20)",
    "rigorous",
    "as algebra, and by Jensen at least the variance of the mean, sum p_k^2 sigma_k^2",
)
def mean_noise_variance(lr, steps: int, clip_norm, batch: int, sizes, epsilon, delta):
    """sum p_k sigma_k^2 = 128 (lr Q^2 b clip_norm / epsilon)^2 / n sum log(1.25 Q b / (n_k delta))
    / n_k, Q steps of b.

    Shapes:
        lr [...], sizes [C] -> [...].
    """
    where = "li2025.theory.mean_noise_variance"
    checks.require_integer(where, steps=steps, batch=batch)
    checks.require_positive(
        where, lr=lr, clip_norm=clip_norm, sizes=sizes, epsilon=epsilon, delta=delta
    )
    with in_float64():
        eta, bound, n, e = _wide(lr, clip_norm, sizes, epsilon)
        scale = 128 * steps**4 * batch**2 * (bound / e) ** 2 / n.sum()
        return scale * eta**2 * _log_sum(steps, batch, sizes, delta)


@claim("eq. (21)", "unsound", "the number of rounds times a sum over the rounds")
def accumulated_noise_printed(lrs, steps: int, clip_norm, batch: int, sizes, epsilon, delta):
    """R times `accumulated_noise`.

    Shapes:
        lrs [R], sizes [C] -> [].
    """
    with in_float64():
        return np.shape(lrs)[0] * accumulated_noise(
            lrs, steps, clip_norm, batch, sizes, epsilon, delta
        )


@claim(
    "eq. (21)",
    "ours",
    "the sum over rounds of eq. (20), at the learning rate of each round's last step",
)
def accumulated_noise(lrs, steps: int, clip_norm, batch: int, sizes, epsilon, delta):
    """`mean_noise_variance` of all rounds together.

    Shapes:
        lrs [R], sizes [C] -> [].
    """
    with in_float64():
        return mean_noise_variance(lrs, steps, clip_norm, batch, sizes, epsilon, delta).sum()


# --- terms of the bound


@claim(
    "Theorem 3, A",
    "conditional",
    "for gradients of norm at most clip_norm, so that clipping changes none",
)
def gradient_term(shares, variances, batch: int, steps: int, clip_norm, smoothness, gap):
    """A = sum p_k^2 variance_k / batch + 8 (steps - 1)^2 clip_norm^2 + 6 L gap.

    Args:
        shares: p_k [C], which add up to 1.
        variances: [C], of the gradient of one example, for each client; or one for all.
        batch: rows of a step.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        smoothness: L of the losses.
        gap: F* - sum p_k F_k*, see `jfl.analysis.heterogeneity`.
    """
    where = "li2025.theory.gradient_term"
    checks.require_integer(where, batch=batch, steps=steps)
    checks.require_nonnegative(where, shares=shares, variances=variances, gap=gap)
    checks.require_positive(where, clip_norm=clip_norm, smoothness=smoothness)
    with in_float64():
        p, v, bound, curve, apart = _wide(shares, variances, clip_norm, smoothness, gap)
        return jnp.sum(p**2 * v) / batch + 8 * (steps - 1) ** 2 * bound**2 + 6 * curve * apart


@claim("Lemma A4", "conditional", "false for many clients with few rows each: use the sum itself")
def log_sum_bound(sizes, steps: int, batch: int, delta, strict: bool = True) -> Checked:
    """log(n) log(1.25^2 steps^2 batch^2 / (n delta^2)) / 2 for sum log(1.25 steps batch / (n_k
    delta)) / n_k.

    Shapes:
        sizes [C] -> [].

    Raises:
        ValueError: with strict, unless it bounds the sum.

    Example:
        >>> log_sum_bound([600] * 100, 5, 10, 1e-5).value.round(6).item()
        111.63877
        >>> log_sum_bound([50] * 1000, 5, 10, 1e-5, strict=False).failed
        ('the sum over clients <= its bound',)
    """
    where = "li2025.theory.log_sum_bound"
    checks.require_integer(where, steps=steps, batch=batch)
    checks.require_positive(where, sizes=sizes, delta=delta)
    with in_float64():
        value = _log_integral(_wide(sizes)[0].sum(), steps, batch, delta)
        fits = _log_sum(steps, batch, sizes, delta) <= value
        return checks.checked(
            where, value, {"the sum over clients <= its bound": fits}, strict, "Use the sum."
        )


@claim(
    "Theorem 3, B",
    "conditional",
    "less drift than its lemmas give, and yet more noise than there is; Lemma A4",
)
def noise_term_printed(
    dim: int,
    steps: int,
    clip_norm,
    batch: int,
    rows,
    smoothness,
    epsilon,
    delta,
    consistent: bool = False,
):
    """B for noise in the gradient: dim times the bound on eq. (20) at lr = 1 / (4 L), times 4
    (steps - 1)^2 + 2.

    Args:
        dim: numbers in the model.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        batch: rows of a step.
        rows: of all clients together.
        smoothness: L of the losses.
        epsilon: of one round.
        delta: in (0, 1).
        consistent: with 8 (steps - 1)^2 + 2, which the paper's lemmas give together.
    """
    where = "li2025.theory.noise_term_printed"
    checks.require_integer(where, dim=dim, steps=steps, batch=batch)
    checks.require_positive(
        where, clip_norm=clip_norm, rows=rows, smoothness=smoothness, epsilon=epsilon, delta=delta
    )
    with in_float64():
        bound, n, curve, e = _wide(clip_norm, rows, smoothness, epsilon)
        drift = (8 if consistent else 4) * (steps - 1) ** 2 + 2
        variance = (
            8
            * steps**4
            * (batch * bound / (curve * e)) ** 2
            / n
            * _log_integral(n, steps, batch, delta)
        )
        return dim * drift * variance


@claim("Theorem 3, B", "ours", "noise on the model after the last step adds no drift")
def noise_term(
    dim: int,
    steps: int,
    clip_norm,
    shares,
    multipliers,
    sampling: str = "full",
    cohort: int | None = None,
):
    """B = 16 dim steps^2 clip_norm^2 sum square_weights multiplier_k^2: learning rates halve at
    most within a round.

    Args:
        dim: numbers in the model.
        steps: local steps of a round.
        clip_norm: bound on a step's gradient.
        shares: p_k [C], which add up to 1.
        multipliers: `li2025.noise_multiplier` of each client [C], or one for all.
        sampling: as in `square_weights`.
        cohort: clients of a round; not needed for "full".
    """
    where = "li2025.theory.noise_term"
    checks.require_integer(where, dim=dim, steps=steps)
    checks.require_positive(where, clip_norm=clip_norm)
    checks.require_nonnegative(where, multipliers=multipliers)
    with in_float64():
        bound, z = _wide(clip_norm, multipliers)
        return (
            16
            * dim
            * (steps * bound) ** 2
            * jnp.sum(square_weights(shares, sampling, cohort) * z**2)
        )


@claim(
    "Theorem 4, H",
    "conditional",
    "without replacement for equal p_k only, which its source assumes",
)
def sampling_term_printed(sampling: str, steps: int, clip_norm, clients: int, cohort: int):
    """H = (2 steps clip_norm)^2 / cohort, times (clients - cohort) / (clients - 1) without
    replacement; 0 if "full"."""
    checks.require_integer("li2025.theory.sampling_term_printed", clients=clients)
    return sampling_term(sampling, steps, clip_norm, np.full(clients, 1 / clients), cohort)


@claim("Theorem 4, H", "ours", "for the weights of `aggregation_weights`, whatever p_k")
def sampling_term(sampling: str, steps: int, clip_norm, shares, cohort: int):
    """As printed, times C sum p_k^2 without replacement."""
    where = "li2025.theory.sampling_term"
    checks.require_one_of(where, SAMPLINGS, sampling=sampling)
    checks.require_integer(where, steps=steps, cohort=cohort)
    checks.require_positive(where, clip_norm=clip_norm)
    checks.require_nonnegative(where, shares=shares)
    clients = np.shape(shares)[0]
    if sampling == "without_replacement" and cohort > clients:
        checks.fail(where, f"cohort <= clients={clients}", f"cohort={cohort}")
    with in_float64():
        bound, p = _wide(clip_norm, shares)
        left = (clients - cohort) / max(clients - 1, 1) * clients * jnp.sum(p**2)
        factor = {"full": 0.0, "without_replacement": left}.get(sampling, 1.0)
        return factor * 4 * (steps * bound) ** 2 / cohort


# --- the bound


@claim("Theorems 3 and 4", "conditional", "false for steps > 8 kappa: its proof takes a = 8 kappa")
def bound_gap_printed(
    step, terms, distance, strong_convexity, smoothness, steps: int, strict: bool = True
) -> Checked:
    """2 kappa / (step + a) (terms / mu + 2 L distance).

    Args:
        step: t, local steps taken in all.
        terms: A + B + H.
        distance: ||w_0 - w*||^2.
        strong_convexity: mu of the losses.
        smoothness: L of the losses; kappa = L / mu.
        steps: local steps of a round.
        strict: raise where a precondition fails.

    Raises:
        ValueError: with strict, for steps > 8 kappa.
    """
    where = "li2025.theory.bound_gap_printed"
    _problem(where, terms, distance, strong_convexity, smoothness, steps)
    with in_float64():
        t, total, far, mu, curve = _wide(step, terms, distance, strong_convexity, smoothness)
        value = (
            2
            * curve
            / mu
            * (total / mu + 2 * curve * far)
            / (t + jnp.maximum(8 * curve / mu, steps))
        )
        conditions = {"steps <= 8 smoothness / strong_convexity": steps <= 8 * curve / mu}
        return checks.checked(where, value, conditions, strict, "Use bound_gap.")


@claim(
    "Theorems 3 and 4",
    "ours",
    "the same proof for any a: equal to what is printed where steps <= 8 kappa",
)
def bound_gap(step, terms, distance, strong_convexity, smoothness, steps: int, sharp: bool = False):
    """(2 kappa terms / mu + L a distance / 2) / (step + a); with `sharp`, the larger of the two in
    place of the sum.

    Args:
        step, terms, distance, strong_convexity, smoothness, steps: as in `bound_gap_printed`.
        sharp: whether the larger of the two terms takes the place of their sum.
    """
    _problem("li2025.theory.bound_gap", terms, distance, strong_convexity, smoothness, steps)
    with in_float64():
        noise, start, offset = _parts(terms, distance, strong_convexity, smoothness, steps)
        return (jnp.maximum(noise, start) if sharp else noise + start) / (_wide(step)[0] + offset)


@claim("Remark 2", "rigorous", "with 4 clip_norm^2 as printed; one clip_norm^2 is enough")
def distance_bound(gradient_norm, strong_convexity):
    """||w_0 - w*||^2 <= (||gradient at w_0|| / mu)^2."""
    checks.require_nonnegative("li2025.theory.distance_bound", gradient_norm=gradient_norm)
    checks.require_positive("li2025.theory.distance_bound", strong_convexity=strong_convexity)
    with in_float64():
        norm, mu = _wide(gradient_norm, strong_convexity)
        return (norm / mu) ** 2


@claim("Remark 3", "ours", "the printed order drops a factor steps^2 of B")
def steps_to_accuracy(accuracy, terms, distance, strong_convexity, smoothness, steps: int):
    """The least whole number of local steps after which `bound_gap` is at most `accuracy`; rounds
    are that / steps."""
    checks.require_positive("li2025.theory.steps_to_accuracy", accuracy=accuracy)
    _problem(
        "li2025.theory.steps_to_accuracy", terms, distance, strong_convexity, smoothness, steps
    )
    with in_float64():
        return jnp.ceil(_needed(accuracy, terms, distance, strong_convexity, smoothness, steps))


@claim(
    "Remark 3",
    "conditional",
    "rounds fall at first only where what steps do not raise is large, as the start is",
)
def optimal_local_steps(
    terms_of_steps, accuracy, distance, strong_convexity, smoothness, most: int = 1000
) -> int:
    """The local steps, at most `most`, with which `bound_gap` is at most `accuracy` after the
    fewest rounds.

    Args:
        terms_of_steps: steps -> A + B + H, called with each of 1, 2, ..., most.
        accuracy: the error that is allowed.
        distance: ||w_0 - w*||^2.
        strong_convexity: mu of the losses.
        smoothness: L of the losses.
        most: the largest number of local steps that is tried.
    """
    where = "li2025.theory.optimal_local_steps"
    checks.require_integer(where, most=most)
    checks.require_positive(where, accuracy=accuracy)
    tried = np.arange(1, most + 1)
    terms = np.array([float(terms_of_steps(int(steps))) for steps in tried])
    _problem(where, terms, distance, strong_convexity, smoothness, 1)
    with in_float64():
        return 1 + int(
            jnp.argmin(
                _needed(accuracy, terms, distance, strong_convexity, smoothness, tried) / tried
            )
        )


@claim(
    "Remark 3",
    "ours",
    "least (spread + 8 (steps - 1)^2 clip_norm^2) / steps: without noise or a far start",
)
def noiseless_local_steps(spread, clip_norm):
    """sqrt(1 + spread / (8 clip_norm^2)), where spread = sum p_k^2 variance_k / batch + 6 L gap."""
    checks.require_nonnegative("li2025.theory.noiseless_local_steps", spread=spread)
    checks.require_positive("li2025.theory.noiseless_local_steps", clip_norm=clip_norm)
    with in_float64():
        apart, bound = _wide(spread, clip_norm)
        return jnp.sqrt(1 + apart / (8 * bound**2))


# --- parts, in float64


def _wide(*values):
    return tuple(jnp.asarray(v, jnp.float64) for v in values)


def _log_sum(steps, batch, sizes, delta):
    n, d = _wide(sizes, delta)
    return jnp.sum(jnp.log(1.25 * steps * batch / (n * d)) / n)


def _log_integral(rows, steps, batch, delta):
    return jnp.log(rows) * (2 * jnp.log(1.25 * steps * batch / _wide(delta)[0]) - jnp.log(rows)) / 2


def _problem(where, terms, distance, strong_convexity, smoothness, steps):
    checks.require_integer(where, steps=steps)
    checks.require_nonnegative(where, terms=terms, distance=distance)
    checks.require_positive(where, strong_convexity=strong_convexity, smoothness=smoothness)


def _parts(terms, distance, strong_convexity, smoothness, steps):
    total, far, mu, curve = _wide(terms, distance, strong_convexity, smoothness)
    offset = jnp.maximum(8 * curve / mu, steps)
    return 2 * curve / mu * total / mu, curve * offset * far / 2, offset


def _needed(accuracy, terms, distance, strong_convexity, smoothness, steps):
    noise, start, offset = _parts(terms, distance, strong_convexity, smoothness, steps)
    return jnp.maximum((noise + start) / _wide(accuracy)[0] - offset, 0.0)
