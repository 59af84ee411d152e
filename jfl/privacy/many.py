"""Renyi epsilons and noise multipliers of many configurations in one call.

One configuration costs a few dozen orders instead of the hundreds that `bounds` looks at, on a smaller grid of points.
Every order proves an epsilon, so a search that stops early, or an order beyond the reach of the grid (which counts
without its sampling), costs tightness and never soundness.
"""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from .. import check
from . import rdp

NODES = 512
COARSE, FINE, ZOOMS = 12, 6, 3           # orders of the first look, of a closer one, closer looks
ROOTS, STEPS = 5, 4                      # best orders tried, Newton steps at each
AT_ONCE = 256                            # configurations computed together
SCHEMES = ("poisson", "without_replacement")


def epsilons(rate, z, steps, delta, scheme: str = "poisson"):
    """The proved epsilon of `steps` releases of a Gaussian on a sample, for many configurations.

    Shapes   all broadcast to [...] -> Float64[...].
    Units    rate, delta in (0, 1]; z: std over sensitivity; scheme "poisson" (add_remove) | "without_replacement"
             (replace_one, rate = sample / population).
    Privacy  the smaller of the Renyi bound and the exact one without sampling.  Traceable; not differentiable.
    Errors   ValueError for concrete values outside those ranges.
    Source   as `rdp.poisson`, `rdp.without_replacement`, `rdp.convert`.

    >>> epsilons(0.01, [1.0, 2.0], 1000, 1e-5).round(3).tolist()
    [2.101, 0.717]
    """
    _test("many.epsilons", rate, delta, scheme, z=z, steps=steps)
    return _map(functools.partial(_epsilon, _curve_of(scheme)), rate, z, steps, delta)


def noise_multipliers(rate, steps, epsilon, delta, scheme: str = "poisson"):
    """The noise multiplier for each target epsilon, and the epsilon that it proves, which is not above the target.

    Shapes   all broadcast to [...] -> (z Float64[...], a float32 each; epsilon Float64[...]).
    Units    as `epsilons`.
    Privacy  each z was tested: where the search fails, the exact multiplier without sampling is returned.
    Errors   ValueError for concrete values outside those ranges.

    >>> z, reached = noise_multipliers(0.01, 1000, 1.0, 1e-5)
    >>> float(round(z, 4)), bool(reached <= 1.0)
    (1.5131, True)
    """
    _test("many.noise_multipliers", rate, delta, scheme, steps=steps, epsilon=epsilon)
    return _map(functools.partial(_noise, _curve_of(scheme)), rate, steps, epsilon, delta)


def _test(where, rate, delta, scheme, **positive):
    check.fraction(where, rate=rate)
    check.choice(where, SCHEMES, scheme=scheme)
    check.positive(where, **positive)
    if check.concrete(delta) and not np.all((np.asarray(delta) > 0) & (np.asarray(delta) < 1)):
        check.fail(where, "delta in (0, 1)", f"delta={delta!r}")


def _map(one, *values):
    with jax.enable_x64(True):
        values = jnp.broadcast_arrays(*(jnp.asarray(v, jnp.float64) for v in values))
        flat = tuple(v.ravel() for v in values)
        out = _compiled(one, flat)
        return jax.tree.map(lambda x: x.reshape(values[0].shape), out)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(one, flat):
    return jax.lax.map(lambda v: one(*v), flat, batch_size=min(AT_ONCE, len(flat[0])))


# --- one configuration ---------------------------------------------------------------------------------------------

def _epsilon(curve, rate, z, steps, delta):
    orders, raw, values = _search(curve, rate, z, steps, delta)
    sampled = jnp.min(rdp.convert(orders, values, delta))
    return jnp.minimum(sampled, rdp.gaussian_epsilon(jnp.sqrt(steps) / z, delta))


def _search(curve, rate, z, steps, delta):
    """Orders, what each proves (negative ones too), and the curve of all steps at them."""
    def look(log_order):
        orders = 1 + jnp.exp(log_order)
        values = steps * curve(orders, rate, z)
        return log_order, _raw(orders, values, delta), values

    budget = -jnp.log(delta)
    # the best order of the Gaussian without sampling, and of one whose precision is what the rate leaves of it
    low = 0.5 * jnp.log(2 * z**2 * budget / steps)
    high = 0.5 * (jnp.log(2 * budget / steps) - 2 * jnp.log(rate) - _log_expm1(z**-2))
    low, high = low - 0.7, jnp.maximum(high, low) + 0.7
    seen = look(jnp.linspace(low, high, COARSE))
    step = (high - low) / (COARSE - 1)
    inside = jnp.linspace(-1, 1, FINE + 2)[1:-1]
    for _ in range(ZOOMS):
        best = seen[0][jnp.argmin(seen[1])]
        seen = tuple(jnp.concatenate(p) for p in zip(seen, look(best + step * inside)))
        step = step * 2 / (FINE + 1)
    return 1 + jnp.exp(seen[0]), seen[1], seen[2]


def _noise(curve, rate, steps, epsilon, delta):
    """From above: at each best order, the multiplier with which that order alone proves epsilon."""
    plain = jnp.sqrt(steps) / _gaussian_mu(epsilon, delta)

    def root(order, log_z):
        room = jnp.log(epsilon - _raw(order, 0.0, delta))
        excess = lambda s: jnp.log(steps * curve(order[None], rate, jnp.exp(s))[0]) - room
        for _ in range(STEPS):
            value, slope = jax.jvp(excess, (log_z,), (1.0,))
            step = jnp.clip(-value / jnp.minimum(slope, -0.5), -1.5, 1.5)
            log_z = jnp.where(jnp.isfinite(step), log_z + step, log_z)
        return log_z

    def improve(_, log_z):
        orders, raw, _ = _search(curve, rate, jnp.exp(log_z), steps, delta)
        order = orders[jnp.argmin(raw)]
        found = root(order, log_z)
        return jnp.where((jnp.min(raw) <= epsilon) & jnp.isfinite(found), jnp.minimum(found, log_z) + 1e-9, log_z)

    z = _up(jnp.exp(jax.lax.fori_loop(0, ROOTS, improve, jnp.log(plain))))
    reached, plain = _epsilon(curve, rate, z, steps, delta), _up(plain)
    return (jnp.where(reached <= epsilon, z, plain),
            jnp.where(reached <= epsilon, reached, _epsilon(curve, rate, plain, steps, delta)))


def _up(z):
    """The next float32, and one more: it is what a simulation runs."""
    return jnp.nextafter(z.astype(jnp.float32), jnp.float32(jnp.inf)).astype(jnp.float64)


def _raw(orders, values, delta):
    return values + jnp.log1p(-1 / orders) - (jnp.log(delta) + jnp.log(orders)) / (orders - 1)


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


# --- curves ----------------------------------------------------------------------------------------------------------

def _curve_of(scheme):
    return _poisson if scheme == "poisson" else _without_replacement


def _poisson(orders, rate, z):
    """As rdp.poisson, summed without logarithms: what overflows is inf, and no order that is chosen."""
    whole = orders / (2 * z**2)
    q = jnp.where(rate < 1, rate, 0.5)
    step = 0.5 * z * jnp.minimum(1.0, z)
    x = -rdp.TAIL * z + step * jnp.arange(NODES)
    loss = (2 * x - 1) / (2 * z**2)
    u = q * jnp.expm1(jnp.minimum(loss, 600.0))
    log_weight = jnp.log(step / z) - (x / z) ** 2 / 2 - rdp.HALF_LOG_2PI
    weight = jnp.exp(log_weight)
    ratio = jnp.where(loss < 30, jnp.log1p(u), jnp.log(q) + loss)         # too small by less than rounding
    a = orders[:, None]
    near = jnp.abs(a * u) < 0.03
    v, series = jnp.where(near, u, 0.0), 1.0
    for k in range(9, 2, -1):
        series = 1 + (a - k + 1) / k * v * series
    far = jnp.exp(jnp.where(near, 0.0, a * ratio + log_weight)) - weight * (1 + a * jnp.where(near, 0.0, u))
    inner = jnp.where(near, weight * a * (a - 1) / 2 * v**2 * series, far)
    sampled = jnp.log1p(jnp.sum(inner, axis=1)) / (orders - 1)
    return _reach(orders + rdp.TAIL * z <= x[-1], rate, sampled, whole)


def _without_replacement(orders, rate, z):
    """As rdp.without_replacement."""
    whole = orders / (2 * z**2)
    q = jnp.where(rate < 1, rate, 0.5)
    x, loss, ratio, shared = rdp.profile_grid(q, z, 1, NODES)
    shared = shared + 2 * jnp.log(q)
    a = orders[:, None]
    inner = jnp.exp((a - 2) * ratio + shared) + jnp.exp(-(a + 1) * ratio + shared)
    sampled = jnp.log1p(orders * (orders - 1) * jnp.sum(inner, axis=1)) / (orders - 1)
    return _reach(jnp.maximum(orders, 2.0) + rdp.TAIL * z <= x[-1], rate, sampled, whole)


def _reach(reached, rate, sampled, whole):
    good = reached & (rate < 1) & (sampled <= whole)      # nan and inf are not
    return jnp.where(good, sampled, whole)
