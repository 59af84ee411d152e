"""Renyi epsilons and noise multipliers of many configurations in one call.

One configuration costs a few dozen orders instead of the hundreds that `rdp_events` looks at, on a
smaller grid of points. Every order proves an epsilon, so a search that stops early, or an order
beyond the reach of the grid (which counts without its sampling), costs tightness and never
soundness.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...core import checks
from ...core.precision import in_float64
from . import pld_step, rdp, roots
from . import rdp_formulas as formulas

NODES = 256
TAIL = 8.0
COARSE, GOLDEN = 12, 8  # orders of a first look, steps of a golden section
HALVINGS, SECANTS, WARM = (
    4,
    9,
    (0.01, 1.0),
)  # of an interval of multipliers; log orders around a good one
AT_ONCE = 256  # configurations computed together
SCHEMES = ("poisson", "without_replacement")


def epsilons(
    rate: ArrayLike, z: ArrayLike, steps: ArrayLike, delta: ArrayLike, scheme: str = "poisson"
) -> jax.Array:
    """The proved epsilon of `steps` releases of a Gaussian on a sample, for many configurations.

    Args:
        rate: [...], the probability of an element, in (0, 1]; sample / population.
        z: [...], noise multiplier, std over sensitivity.
        steps: [...], how many releases.
        delta: [...], in (0, 1].
        scheme: "poisson" (for add_remove) or "without_replacement" (for replace_one).

    Returns:
        Float64[...], in the shape to which all arguments broadcast.

    Privacy:
        the smaller of the Renyi bound and the exact one without sampling.  Traceable and
        differentiable.

    Raises:
        ValueError: for concrete values outside those ranges.

    References:
        as `rdp.poisson`, `rdp.without_replacement`, `rdp.convert`.

    Example:
        >>> epsilons(0.01, [1.0, 2.0], 1000, 1e-5).round(3).tolist()
        [2.101, 0.686]
    """
    _test("rdp_batched.epsilons", rate, delta, scheme, z=z, steps=steps)
    return _map(_epsilon, scheme, rate, z, steps, delta)


def noise_multipliers(
    rate: ArrayLike, steps: ArrayLike, epsilon: ArrayLike, delta: ArrayLike, scheme: str = "poisson"
) -> tuple[jax.Array, jax.Array]:
    """The noise multiplier for each target epsilon, and the epsilon that it proves, which is not
    above the target.

    Args:
        rate: [...], as in `epsilons`.
        steps: [...], how many releases.
        epsilon: [...], the targets.
        delta: [...], in (0, 1].
        scheme: as in `epsilons`.

    Returns:
        The multipliers Float64[...], each a float32; and what they prove, Float64[...].

    Privacy:
        each z was tested: where the search fails, the exact multiplier without sampling is
        returned.

    Raises:
        ValueError: for concrete values outside those ranges.

    Example:
        >>> z, reached = noise_multipliers(0.01, 1000, 1.0, 1e-5)
        >>> round(float(z), 4), float(reached) <= 1.0
        (1.5131, True)
    """
    _test("rdp_batched.noise_multipliers", rate, delta, scheme, steps=steps, epsilon=epsilon)
    return _map(_noise, scheme, rate, steps, epsilon, delta)


def _test(where, rate, delta, scheme, **positive):
    checks.fraction(where, rate=rate)
    checks.choice(where, SCHEMES, scheme=scheme)
    checks.positive(where, **positive)
    if checks.concrete(delta) and not np.all((np.asarray(delta) > 0) & (np.asarray(delta) < 1)):
        checks.fail(where, "delta in (0, 1)", f"delta={delta!r}")


def _map(one, scheme, *values):
    with in_float64():
        values = jnp.broadcast_arrays(*(jnp.asarray(v, jnp.float64) for v in values))
        flat = tuple(v.ravel() for v in values)
        out = _compiled(one, scheme, flat)
        return jax.tree.map(lambda x: x.reshape(values[0].shape), out)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(one, scheme, flat):
    return jax.lax.map(
        lambda v: one(_curve_of(scheme), *v), flat, batch_size=min(AT_ONCE, len(flat[0]))
    )


# --- one configuration


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _epsilon(make_curve, rate, z, steps, delta):
    return _best_epsilon(make_curve, rate, z, steps, delta)[0]


@_epsilon.defjvp
def _(make_curve, values, tangents):
    epsilon, order = _best_epsilon(make_curve, *values)

    def epsilon_of_order(rate, z, steps, delta):  # at the best order, its change adds nothing
        curve = rdp.poisson if make_curve is _poisson else rdp.without_replacement
        return jnp.minimum(
            rdp.convert(order, steps * curve(order, rate, z), delta), _unsampled(z, steps, delta)
        )

    return epsilon, jax.jvp(epsilon_of_order, values, tangents)[1]


def _best_epsilon(make_curve, rate, z, steps, delta, *more_orders):
    """The epsilon, and the order that proves it: of a few, the best found, and `more_orders`."""
    curve = make_curve(rate, z)
    best, _ = _search_order(curve, rate, z, steps, delta, GOLDEN + 8)
    orders = jnp.append(
        1 + jnp.exp(jnp.linspace(*_log_orders(rate, z, steps, delta), COARSE)),
        jnp.stack([best, *more_orders]),
    )
    each = rdp.convert(orders, steps * curve(orders), delta)
    return jnp.minimum(jnp.min(each), _unsampled(z, steps, delta)), pld_step.least(each, orders)


def _unsampled(z, steps, delta):
    return rdp.gaussian_epsilon(jnp.sqrt(steps) / z, delta)


def _log_orders(rate, z, steps, delta):
    """Ends of log(order - 1): the best order without sampling, and the best of a Gaussian of the
    precision that the rate leaves."""
    low = 0.5 * jnp.log(-2 * z**2 * jnp.log(delta) / steps)
    high = 0.5 * (jnp.log(-2 * jnp.log(delta) / steps) - 2 * jnp.log(rate) - _log_expm1(z**-2))
    return low - 0.7, jnp.maximum(high, low) + 0.7


def _search_order(curve, rate, z, steps, delta, golden_steps):
    """The order that proves least, and what it proves: a first look, then a golden section around
    its best."""
    low, high = _log_orders(rate, z, steps, delta)
    log_orders = jnp.linspace(low, high, COARSE)
    spacing = (high - low) / (COARSE - 1)
    best = pld_step.least(_proved(curve, 1 + jnp.exp(log_orders), steps, delta), log_orders)
    return _refine_order(curve, best - spacing, best + spacing, steps, delta, golden_steps)


def _refine_order(curve, low, high, steps, delta, golden_steps):
    def proved(log_order):
        return _proved(curve, 1 + jnp.exp(log_order)[None], steps, delta)[0]

    best, epsilon = roots.golden_section(proved, low, high, golden_steps)
    return 1 + jnp.exp(best), epsilon


def _noise(make_curve, rate, steps, epsilon, delta):
    """Illinois steps on a logarithmic scale, between a multiplier that proves too much and one that
    does not."""

    def excess(proved):
        return jnp.clip(jnp.log(jnp.maximum(proved, 1e-300)) - jnp.log(epsilon), -6.0, 6.0)

    def narrow(bracket, log_z, order, searched):
        new_order, proved = searched
        value = excess(proved)
        return bracket.replace_end(log_z, value), jnp.where(value <= 0, new_order, order)

    def halve(_, state):
        bracket, order = state
        log_z = (bracket.low + bracket.high) / 2
        z = jnp.exp(log_z)
        searched = _search_order(make_curve(rate, z), rate, z, steps, delta, GOLDEN)
        return narrow(bracket, log_z, order, searched)

    def secant(_, state):
        bracket, order = state
        log_z, log_order = bracket.secant(), jnp.log(order - 1)
        # the best order moves faster than the multiplier
        width = jnp.clip(4 * (bracket.high - log_z), *WARM)
        curve = make_curve(rate, jnp.exp(log_z))
        ends = log_order - width, log_order + width
        return narrow(bracket, log_z, order, _refine_order(curve, *ends, steps, delta, GOLDEN))

    plain = jnp.sqrt(steps) / rdp.gaussian_mu(epsilon, delta)
    # the gain from sampling is at most about the rate
    bracket = roots.Bracket(jnp.log(plain) + jnp.log(rate) - 1, jnp.log(plain), 6.0, -6.0, 0)
    state = jax.tree.map(jnp.asarray, (bracket, 2.0))
    state = jax.lax.fori_loop(0, HALVINGS, halve, state)
    bracket, order = jax.lax.fori_loop(0, SECANTS, secant, state)
    z, plain = _up(jnp.exp(bracket.high)), _up(plain)
    reached, _ = _best_epsilon(make_curve, rate, z, steps, delta, order)
    return jnp.where(reached <= epsilon, z, plain), jnp.where(
        reached <= epsilon, reached, _unsampled(plain, steps, delta)
    )


def _proved(curve, orders, steps, delta):
    """What each order proves; negative where the order proves more than it can, so that orders
    still compare."""
    return (
        steps * curve(orders)
        + jnp.log1p(-1 / orders)
        - (jnp.log(delta) + jnp.log(orders)) / (orders - 1)
    )


def _up(z):
    """The next float32, and one more: it is what a simulation runs."""
    return jnp.nextafter(z.astype(jnp.float32), jnp.float32(jnp.inf)).astype(jnp.float64)


def _log_expm1(x):
    return x + jnp.log(-jnp.expm1(-x))


# --- curves


def _curve_of(scheme):
    return _poisson if scheme == "poisson" else _without_replacement


def _poisson(rate, z):
    """As rdp.poisson, summed without logarithms: what overflows is inf, and no order that is
    chosen."""
    q = jnp.where(rate < 1, rate, 0.5)
    step = z * jnp.minimum(0.8, 0.5 * z)  # errors exp(-2 (pi / 0.8)^2), exp(-4 pi^2)
    x = -TAIL * z + step * jnp.arange(NODES)
    loss = (2 * x - 1) / (2 * z**2)
    u = q * jnp.expm1(jnp.minimum(loss, 600.0))
    log_weight = jnp.log(step / z) - (x / z) ** 2 / 2 - formulas.HALF_LOG_2PI
    weight = jnp.exp(log_weight)
    ratio = jnp.where(loss < 600, jnp.log1p(u), jnp.log(q) + loss)

    def curve(orders):
        a = orders[:, None]
        near = jnp.abs(a * u) < 0.03
        v, series = jnp.where(near, u, 0.0), 1.0
        for k in range(9, 2, -1):
            series = 1 + (a - k + 1) / k * v * series
        far = jnp.exp(jnp.where(near, 0.0, a * ratio + log_weight)) - weight * (
            1 + a * jnp.where(near, 0.0, u)
        )
        inner = jnp.where(near, weight * a * (a - 1) / 2 * v**2 * series, far)
        sampled = jnp.log1p(jnp.sum(inner, axis=1)) / (orders - 1)
        return _reach(orders + TAIL * z <= x[-1], rate, sampled, orders / (2 * z**2))

    return curve


def _without_replacement(rate, z):
    """As rdp.without_replacement."""
    q = jnp.where(rate < 1, rate, 0.5)
    x, _, ratio, shared = formulas.profile_grid(formulas.COMPILED, q, z, 1, NODES)
    shared = shared + 2 * jnp.log(q)

    def curve(orders):
        a = orders[:, None]
        inner = jnp.exp((a - 2) * ratio + shared) + jnp.exp(-(a + 1) * ratio + shared)
        sampled = jnp.log1p(orders * (orders - 1) * jnp.sum(inner, axis=1)) / (orders - 1)
        return _reach(
            jnp.maximum(orders, 2.0) + TAIL * z <= x[-1], rate, sampled, orders / (2 * z**2)
        )

    return curve


def _reach(reached, rate, sampled, whole):
    good = reached & (rate < 1) & (sampled <= whole)  # nan and inf are not
    return jnp.where(good, sampled, whole)
