"""Renyi epsilons and noise multipliers of many configurations in one call.

One configuration costs a few dozen orders instead of the hundreds that `bounds` looks at, on a
smaller grid of points. Every order proves an epsilon, so a search that stops early, or an order
beyond the reach of the grid (which counts without its sampling), costs tightness and never
soundness.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ...core import checks
from ...core.precision import in_float64
from . import pld_step, rdp

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


def epsilons(rate, z, steps, delta, scheme: str = "poisson"):
    """The proved epsilon of `steps` releases of a Gaussian on a sample, for many configurations.

    Shapes:
        all broadcast to [...] -> Float64[...].

    Units:
        rate, delta in (0, 1]; z: std over sensitivity; scheme "poisson" (add_remove) |
        "without_replacement" (replace_one, rate = sample / population).

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
    _test("many.epsilons", rate, delta, scheme, z=z, steps=steps)
    return _map(_epsilon, scheme, rate, z, steps, delta)


def noise_multipliers(rate, steps, epsilon, delta, scheme: str = "poisson"):
    """The noise multiplier for each target epsilon, and the epsilon that it proves, which is not
    above the target.

    Shapes:
        all broadcast to [...] -> (z Float64[...], a float32 each; epsilon Float64[...]).

    Units:
        as `epsilons`.

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
    _test("many.noise_multipliers", rate, delta, scheme, steps=steps, epsilon=epsilon)
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
def _epsilon(curve_at, rate, z, steps, delta):
    return _at_best(curve_at, rate, z, steps, delta)[0]


@_epsilon.defjvp
def _(curve_at, values, tangents):
    found, order = _at_best(curve_at, *values)

    def proved(rate, z, steps, delta):  # at the best order, its change adds nothing
        curve = rdp.poisson if curve_at is _poisson else rdp.without_replacement
        return jnp.minimum(
            rdp.convert(order, steps * curve(order, rate, z), delta), _unsampled(z, steps, delta)
        )

    return found, jax.jvp(proved, values, tangents)[1]


def _at_best(curve_at, rate, z, steps, delta, *more):
    """The epsilon, and the order that proves it: of a few, one that is sought, and `more`."""
    curve = curve_at(rate, z)
    best, _ = _search(curve, rate, z, steps, delta, GOLDEN + 8)
    orders = jnp.append(
        1 + jnp.exp(jnp.linspace(*_ends(rate, z, steps, delta), COARSE)), jnp.stack([best, *more])
    )
    each = rdp.convert(orders, steps * curve(orders), delta)
    return jnp.minimum(jnp.min(each), _unsampled(z, steps, delta)), pld_step.least(each, orders)


def _unsampled(z, steps, delta):
    return rdp.gaussian_epsilon(jnp.sqrt(steps) / z, delta)


def _ends(rate, z, steps, delta):
    """log(order - 1): the best one without sampling, and the best of a Gaussian of what precision
    the rate leaves."""
    low = 0.5 * jnp.log(-2 * z**2 * jnp.log(delta) / steps)
    high = 0.5 * (jnp.log(-2 * jnp.log(delta) / steps) - 2 * jnp.log(rate) - _log_expm1(z**-2))
    return low - 0.7, jnp.maximum(high, low) + 0.7


def _search(curve, rate, z, steps, delta, golden):
    """The order that proves least, and what it proves: a first look, then a golden section around
    its best."""
    low, high = _ends(rate, z, steps, delta)
    seen = jnp.linspace(low, high, COARSE)
    step = (high - low) / (COARSE - 1)
    best = pld_step.least(_proved(curve, 1 + jnp.exp(seen), steps, delta), seen)
    return _section(curve, best - step, best + step, steps, delta, golden)


def _section(curve, low, high, steps, delta, times):
    at = lambda log_order: _proved(curve, 1 + jnp.exp(log_order)[None], steps, delta)[0]
    part = (5**0.5 - 1) / 2
    left, right = high - part * (high - low), low + part * (high - low)

    def shrink(_, state):
        low, high, left, right, at_left, at_right = state
        down = at_left < at_right
        low, high = jnp.where(down, low, left), jnp.where(down, right, high)
        new = jnp.where(down, high - part * (high - low), low + part * (high - low))
        value = at(new)
        return (
            low,
            high,
            jnp.where(down, new, right),
            jnp.where(down, left, new),
            jnp.where(down, value, at_right),
            jnp.where(down, at_left, value),
        )

    _, _, left, right, at_left, at_right = jax.lax.fori_loop(
        0, times, shrink, (low, high, left, right, at(left), at(right))
    )
    return 1 + jnp.exp(jnp.where(at_left < at_right, left, right)), jnp.minimum(at_left, at_right)


def _noise(curve_at, rate, steps, epsilon, delta):
    """False position on a logarithmic scale, between a multiplier that proves too much and one that
    does not."""

    def excess(proved):
        return jnp.clip(jnp.log(jnp.maximum(proved, 1e-300)) - jnp.log(epsilon), -6.0, 6.0)

    def tighten(search, at, ends):
        low, above, high, below, order, before = ends
        best, proved = search(jnp.exp(at))
        value = excess(proved)
        fits = value <= 0
        # Illinois: an end that stays twice counts half
        above, below = (
            jnp.where(before > 0, above / 2, above),
            jnp.where(before < 0, below / 2, below),
        )
        return (
            jnp.where(fits, low, at),
            jnp.where(fits, above, value),
            jnp.where(fits, at, high),
            jnp.where(fits, value, below),
            jnp.where(fits, best, order),
            jnp.where(fits, 1.0, -1.0),
        )

    def halve(_, ends):
        wide = lambda z: _search(curve_at(rate, z), rate, z, steps, delta, GOLDEN)
        return tighten(wide, (ends[0] + ends[2]) / 2, ends)

    def secant(i, ends):
        low, above, high, below, order, _ = ends
        at, near = high - below * (high - low) / (below - above), jnp.log(order - 1)
        width = jnp.clip(4 * (high - at), *WARM)  # the best order moves faster than the multiplier
        warm = lambda z: _section(
            curve_at(rate, z), near - width, near + width, steps, delta, GOLDEN
        )
        return tighten(warm, at, ends)

    plain = jnp.sqrt(steps) / _gaussian_mu(epsilon, delta)
    # the gain from sampling is at most about the rate
    ends = (jnp.log(plain) + jnp.log(rate) - 1, 6.0, jnp.log(plain), -6.0, 2.0, 0.0)
    ends = jax.lax.fori_loop(0, HALVINGS, halve, tuple(map(jnp.asarray, ends)))
    found = jax.lax.fori_loop(0, SECANTS, secant, ends)
    z, plain = _up(jnp.exp(found[2])), _up(plain)
    reached, _ = _at_best(curve_at, rate, z, steps, delta, found[4])
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


def _gaussian_mu(epsilon, delta):
    """The largest mu with gaussian_delta(epsilon, mu) <= delta, from below."""

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        fits = rdp.gaussian_delta(epsilon, jnp.exp(middle)) <= delta
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

    return jnp.exp(jax.lax.fori_loop(0, 60, halve, (jnp.log(1e-9), jnp.log(1e6)))[0])


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
    log_weight = jnp.log(step / z) - (x / z) ** 2 / 2 - rdp.HALF_LOG_2PI
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
    x, _, ratio, shared = rdp.profile_grid(q, z, 1, NODES)
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
