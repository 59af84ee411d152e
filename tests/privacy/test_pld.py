"""Privacy loss distributions: golden brackets, exact small cases, lower bounds by data sets, and
what must hold."""

import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.paths import DATA
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats

from experiments.papers import local_steps as rounds
from jfl.core.pytrees import in_float64
from jfl.privacy.accountants import events, pld, pld_compose, pld_step, rdp, rdp_events

GOLDEN = DATA / "golden_accounting.json"
RELATIVE, ABSOLUTE = 1e-3, 1e-4  # the golden file's allowance above a bracket
COARSE = 2**14
ORDERS = 1 + np.geomspace(1e-2, 1e5, 120)


def sampled(rate, z, times=1):
    return events.repeat(events.poisson(rate, events.gaussian(z)), times)


def fixed(rate, z, times=1):
    return events.repeat(
        events.without_replacement(round(rate * 10**9), 10**9, events.gaussian(z)), times
    )


def nested(clients, share, z, steps, rounds):
    return events.repeat(events.participation(clients, fixed(share, z, steps)), rounds)


def inside(got, low, high):
    assert low - 1e-9 <= got <= high * (1 + RELATIVE) + ABSOLUTE


def by_fives(call, *runs):
    """Runs by fives: one shape is one compilation."""
    flat = [np.ravel(r) for r in np.broadcast_arrays(*runs)]
    rows = zip(*(np.pad(r, (0, -r.size % 5), mode="edge").reshape(-1, 5) for r in flat))
    return np.concatenate([np.asarray(call(*row, COARSE)) for row in rows])[: flat[0].size]


def alone(call, *run):
    """A single run, by the program that serves five."""
    return float(by_fives(call, *run)[0])


def on_the_middle_grid(rate, z, times, delta):
    """By the programs that serve any event."""
    return pld.epsilon(sampled(rate, z), delta, times, (2**17,))[0]


def highest(groups, grid, size):
    return pld._upper_epsilon(pld_compose.compose_upper(groups, "remove", grid, size), 1e-5)


def lowest(groups, grid, size):
    composed, reach = pld_compose.compose_lower(groups, "remove", grid, size, 1e-11)
    return pld._lower_epsilon(composed, reach, grid.tilt, 1e-5)


# --- golden values

POISSON = [  # rate, z, times, delta, bracket
    (0.1, 2.0, 1, 1e-6, 0.4908698659, 0.4909198696),
    (0.5, 1.0, 1, 1e-5, 3.5339479892, 3.5339979860),
    (0.02, 1.1, 3000, 1e-5, 5.8663108567, 5.8766398039),
    (0.1, 0.7, 1000, 1e-5, 54.0191846191, 54.0241858598),
    (0.01, 0.5, 10, 1e-7, 6.6042443771, 6.6047482504),
    (0.01, 2.0, 1000, 1e-6, 0.7159161538, 0.7209364929),
    (0.2, 50.0, 1000, 1e-9, 0.6797513300, 0.6847882224),
    (0.5, 0.5, 1, 1e-6, 10.0135004803, 10.0135504861),
    (0.0001, 10.0, 10, 1e-9, 0.0, 0.0004465149),
    (0.0001, 4.0, 100, 1e-3, 0.0, 0.0),
]
FIXED = [
    (0.01, 1.0, 1000, 1e-5, 1.8232366970, 2.1989140071),
    (0.01, 1.0, 1, 1e-5, 0.1994004392, 0.1994504725),
    (0.1, 2.0, 100, 1e-5, 2.3323998481, 2.5408625804),
    (0.5, 10.0, 1000, 1e-5, 7.5401707457, 7.6919420823),
    (1 / 60, 1.71, 300, 1e-2, 0.2395485315, 0.3011572597),
]


@pytest.mark.parametrize("call, cases", [(pld.poisson, POISSON), (pld.without_replacement, FIXED)])
def test_golden_brackets(call, cases):
    rate, z, times, delta, low, high = np.array(cases).T
    for got, *bracket in zip(by_fives(call, rate, z, times, delta), low, high):
        inside(got, *bracket)


@pytest.mark.slow
def test_full_batches_beside_samples():
    mixed = events.compose(events.repeat(events.gaussian(5.0), 10), sampled(0.1, 2.0, 100))
    inside(pld.epsilon(mixed, 1e-6)[0], 4.0553279271, 4.0558334453)


@pytest.mark.by_default("args1-1.25e-05-1.676", "args4-2.5e-06-1.313")
@pytest.mark.parametrize(
    "args, delta, want",
    [  # participation seen, each client's own noise alone
        ((0.2, 0.2, 60.0, 50, 400), 2.5e-6, 0.860),
        ((0.2, 0.2, 30.0, 50, 400), 1.25e-5, 1.676),
        ((0.2, 0.2, 30.0, 50, 100), 1 / 48000, 0.777),
        ((0.05, 0.2, 60.0, 50, 400), 2.5e-6, 0.428),
        ((0.05, 0.2, 10.0, 40, 72), 2.5e-6, 1.313),
        ((0.05, 0.2, 160.0, 20, 362), 2.5e-6, 0.085),
    ],
)
def test_record_level_mixture_over_client_participation(args, delta, want):
    assert abs(pld.epsilon(nested(*args), delta)[0] - want) < 1.1e-3


def golden_event(entry):
    p = entry["params"]
    if entry["kind"] == "gaussian":
        return events.repeat(events.gaussian(p["sigma"]), p["T"])
    if entry["kind"] == "poisson_gaussian":
        return sampled(p["q"], p["sigma"], p["T"])
    if entry["kind"] == "wor_gaussian_replace_one":
        return fixed(p["q"], p["z"], p["T"])
    if entry["kind"] == "heterogeneous":
        return events.compose(*(sampled(*term) for term in p["terms_q_sigma_count"]))
    if entry["kind"] == "two_level_client_over_local":
        return nested(p["l"], p["s"], p["sigma_effective"], p["K"], p["T"])
    if entry["kind"] == "noble2022_client_amplification_counterexample":
        return nested(p["l"], p["s"], p["sigma_a"], 1, p["T"])
    return None


def golden_bracket(values):
    if "eps_pld_record_level_mixture_sym_pess" in values:
        want = values["eps_pld_record_level_mixture_sym_pess"]
        return want * (1 - 2e-3) - ABSOLUTE, want
    if "eps_upper_bound_record_level" in values:
        return values["eps_lower_bound_actual"], values["eps_upper_bound_record_level"]
    return values.get("eps_bracket") or (values["eps_exact"], values["eps_exact"])


@pytest.mark.slow
@pytest.mark.skipif(
    not GOLDEN.exists(), reason=f"NOT CHECKED: {GOLDEN} is missing; set JFL_DATA_DIR"
)
def test_every_golden_entry():
    for entry in json.loads(GOLDEN.read_text())["entries"]:
        if (event := golden_event(entry)) is not None:
            got, _ = pld.epsilon(event, entry["params"]["delta"])
            inside(got, *golden_bracket(entry["values"]))


# --- exact cases


def gaussian_profile(e, mu):
    return stats.norm.cdf(mu / 2 - e / mu) - np.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)


def removed_profile(e, rate, z):
    ratio = (np.exp(e) - 1 + rate) / rate
    return rate * gaussian_profile(np.log(ratio), 1 / z) if ratio > 0 else -np.expm1(e)


@pytest.mark.parametrize(
    "z, times, delta",
    [
        (0.1, 1, 1e-5),
        (1.0, 1, 1e-12),
        (0.5, 100, 1e-5),
        (1.0, 1000, 1e-9),
        (50.0, 10000, 1e-6),
        (1000.0, 1, 1e-5),
        (20.0, 1, 1e-2),
    ],
)
def test_rate_one_is_the_exact_gaussian(z, times, delta):
    want = float(rdp.gaussian_epsilon(math.sqrt(times) / z, delta))
    for call in (pld.poisson, pld.without_replacement):
        got = alone(call, 1.0, z, times, delta)
        assert want * (1 - 1e-6) - 1e-9 <= got <= want * (1 + 1e-3) + 1e-6


@pytest.mark.parametrize(
    "rate, z, delta",
    [(0.1, 1.0, 1e-5), (0.01, 0.5, 1e-6), (0.5, 3.0, 1e-9), (1e-3, 0.7, 1e-5), (0.01, 0.1, 1e-9)],
)
def test_one_step_is_its_profile(rate, z, delta):
    want = optimize.brentq(lambda e: removed_profile(e, rate, z) - delta, 0, 200, xtol=1e-13)
    for call in (pld.poisson, pld.without_replacement):  # one step of either has this profile
        got = alone(call, rate, z, 1, delta)
        assert want * (1 - 1e-6) <= got <= want * (1 + 1e-4) + 1e-6


def test_an_fft_has_one_row():
    """With several, XLA of jax 0.11 waits for ever on a CPU of two cores."""
    runs = np.full(5, 0.01), np.linspace(1, 2, 5), np.full(5, 10.0), np.full(5, 1e-5)
    of_five = jax.vmap(lambda *run: pld.poisson(*run, COARSE))
    found = re.findall(
        r"stablehlo.fft .*: \(tensor<(\S*)>\) ->", jax.jit(of_five).lower(*runs).as_text()
    )
    assert found and all(re.fullmatch(r"\d+x(f|complex<f)\d+>?", shape) for shape in found), found


@functools.cache
def grid_of(direction):
    def run(rate, z, times, delta, epsilon):
        groups = ((events.Poisson(rate[None], events.Gaussian(z[None])), times[None]),)
        grid = pld_compose.plan(groups, direction, COARSE, delta)
        up = pld_compose.compose_upper(groups, direction, grid, COARSE)
        low, reach = pld_compose.compose_lower(groups, direction, grid, COARSE, 1e-9)
        return pld_step.hockey_stick(up, epsilon), pld_step.hockey_stick(
            low, epsilon + jnp.maximum(reach, 0)
        ) - 1e-9

    return rdp.float64(run)


@pytest.mark.parametrize("rate, z, epsilon", [(0.1, 1.0, 1.5), (0.3, 2.0, 0.4), (0.01, 0.6, 2.0)])
def test_two_steps_by_direct_integration(rate, z, epsilon):
    """delta of two steps = E[profile(epsilon - loss of the first)]: nothing in common with the
    grid."""
    loss = lambda x: np.log1p(rate * np.expm1((2 * x - 1) / (2 * z**2)))
    normal = lambda x: stats.norm.pdf(x, scale=z)
    added = lambda e: 1 - np.exp(e) + np.exp(e) * removed_profile(-e, rate, z)
    first = lambda x: normal(x) * np.exp(loss(x)) * removed_profile(epsilon - loss(x), rate, z)
    second = lambda x: normal(x) * added(epsilon + loss(x))
    for direction, integrand in (("remove", first), ("add", second)):
        want = integrate.quad(
            integrand, -12 * z, 12 * z + 2, limit=500, epsabs=1e-15, points=[0, 0.5, 1]
        )[0]
        high, low = map(float, grid_of(direction)(rate, z, 2.0, max(want, 1e-9), epsilon))
        assert (
            low <= want * (1 + 1e-6) + 1e-12
            and want * (1 - 1e-6) - 1e-12 <= high <= want * 1.002 + 1e-9
        )


@functools.partial(jax.jit, static_argnums=(0, 5))
def both_ends(*args):
    return *pld_step.pessimistic(*args), *pld_step.optimistic(*args)


@pytest.mark.slow
def test_masses_keep_both_probabilities_and_the_profile():
    """Pessimistic masses touch the profile at every grid point and are above between; optimistic
    ones are below."""
    rate, z, interval, start, size = 0.2, 0.8, 0.05, -40, 200
    with in_float64():
        for direction in ("remove", "add", "replace"):
            mass, lost, low, offset = map(
                np.asarray, both_ends(direction, rate, z, interval, start, size)
            )
            at = interval * (start + np.arange(size))
            assert abs(mass.sum() + lost - 1) < 1e-13
            for e in np.arange(0.0, 3.0, 0.025):
                removed = removed_profile(e, rate, z)
                want = (
                    removed
                    if direction != "add"
                    else 1 - np.exp(e) + np.exp(e) * removed_profile(-e, rate, z)
                )
                high = lost + np.sum(mass * -np.expm1(np.minimum(e - at, 0)))
                assert want - 1e-13 <= high <= want + 3e-3
                assert (
                    want - 3e-3
                    <= np.sum(low * -np.expm1(np.minimum(e - at - offset, 0)))
                    <= want + 1e-13
                )
                if abs(e / interval - round(e / interval)) < 1e-9:
                    assert abs(high - want) < 1e-11


@pytest.mark.slow
def test_nothing_vanishes_at_the_ends_of_a_grid():
    with in_float64():
        for direction, rate in (
            ("remove", 1.0),
            ("add", 1.0),
            ("replace", 1.0),
            ("remove", 0.3),
            ("replace", 0.3),
        ):
            for start in (-30, -10, 3):
                mass, lost, *_ = both_ends(direction, rate, 0.8, 0.05, start, 40)
                assert abs(float(mass.sum() + lost) - 1) < 1e-12 and lost > 1e-4


def test_tails_and_lost_mass_compose():
    with in_float64():
        part = pld_compose.Part(
            jnp.array([2.0, 0.5]), jnp.ones(1, complex), jnp.asarray(1e-3), jnp.zeros(2)
        )
        some, many = pld_compose._mix_with_nothing(part, 0.25), pld_compose._power(part, 7.0)
        np.testing.assert_allclose(
            some.moments, np.log(0.75 + 0.25 * np.exp([2.0, 0.5])), rtol=1e-14
        )
        np.testing.assert_allclose([some.lost, many.lost], [0.25e-3, 1 - 0.999**7], rtol=1e-12)
        np.testing.assert_allclose(many.moments, [14.0, 3.5])


@pytest.mark.slow
def test_the_lower_end_counts_how_far_steps_lie_beside_the_grid():
    """Offsets that add up: many steps whose losses all lie in a few cells."""
    with in_float64():
        groups = (
            (
                events.Poisson(jnp.full(1, 0.01), events.Gaussian(jnp.full(1, 1.0))),
                jnp.full(1, 1000.0),
            ),
        )
        for size in (2**9, 2**10, 2**11):
            grid = pld_compose.plan(groups, "remove", size, 1e-5)
            far, reach = pld_compose.compose_lower(groups, "remove", grid, size, 1e-11)
            low = float(lowest(groups, grid, size))
            assert low <= 1.8283 and abs(float(reach)) > 1e-4
            # before the shift by the reach, these losses have just delta
            assert low == 0 or 0.99e-5 <= float(pld_step.hockey_stick(far, low + reach)) <= 1.01e-5


# --- beside other accountants


@pytest.mark.by_default("0.3-1.0-5-0.001")
@pytest.mark.parametrize(
    "rate, z, times, delta",
    [(0.01, 1.0, 1000, 1e-5), (0.1, 3.0, 200, 1e-7), (0.3, 1.0, 5, 1e-3)],
)
def test_agrees_with_dp_accounting(rate, z, times, delta):
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as reference

    del accounting
    one = reference.from_gaussian_mechanism(
        z, sampling_prob=rate, value_discretization_interval=1e-4
    )
    want = one.self_compose(times).get_epsilon_for_delta(delta)
    assert abs(alone(pld.poisson, rate, z, times, delta) - want) <= 2e-4 * want + 1e-5


@pytest.mark.parametrize(
    "rate, z, times, delta, low",
    [  # one shifted record: rounded-down epsilon of that pair
        (0.01, 0.5, 100, 1e-5, 6.4711663),
        (0.1, 1.0, 100, 1e-5, 7.0416026),
        (0.2, 4.0, 200, 1e-5, 3.0688428),
        (0.1, 10.0, 1000, 1e-9, 1.8017937),
    ],
)
def test_without_replacement_is_above_a_data_set(rate, z, times, delta, low):
    assert low <= alone(pld.without_replacement, rate, z, times, delta) <= 1.2 * low


def test_monte_carlo_of_data_sets():
    """A record of 1 among zeros; `participation`: the client is also seen, so nothing but its
    absence helps.

    False alarms: each of 4 comparisons is at 5 standard errors, below 3e-7.
    """
    rng, runs, delta = np.random.default_rng(5), 200_000, 0.02
    for rate, z, times, p in ((0.2, 1.0, 10, 1.0), (0.1, 0.7, 10, 0.5)):
        total = np.zeros(runs)
        for _ in range(times):
            x = z * rng.normal(size=runs) + (rng.random(runs) < rate)
            total += np.log1p(rate * np.expm1((2 * x - 1) / (2 * z**2))) * (rng.random(runs) < p)
        for one in (sampled(rate, z), fixed(rate, z)):
            epsilon = pld.epsilon(events.repeat(events.participation(p, one), times), delta)[0]
            worth = -np.expm1(np.minimum(epsilon - total, 0))
            error = worth.std() / math.sqrt(runs)
            assert worth.mean() <= delta + 5 * error
            if isinstance(one, events.Repeat) and one.event.__class__ is events.Poisson:
                assert worth.mean() >= delta * 0.99 - 5 * error  # it is that pair, and no worse


def divergence(shifts, law, std, orders):
    """Exact Renyi divergences of the mixture over shifts from the Gaussian without one, and the
    other way round."""
    x = np.linspace(-14 * std, 14 * std + 2 * shifts[-1] * max(orders), 60001)
    base = -(x**2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    ratio = special.logsumexp((2 * x[:, None] * shifts - shifts**2) / (2 * std**2), axis=1, b=law)
    there = [np.log(np.trapezoid(np.exp(base + a * ratio), x)) / (a - 1) for a in orders]
    back = [np.log(np.trapezoid(np.exp(base + (1 - a) * ratio), x)) / (a - 1) for a in orders]
    return np.maximum(there, back)


def test_bounds_of_a_round_are_above_clients_that_attack():
    """A row in a batch of a client in a cohort, several steps a round: what three kinds of clients
    give away of it.

    One sums its noisy gradients, so that a third party sees all noise of the cohort added up; one
    writes all but the last into its upload, one all of them, far apart.  Every bound holds for the
    clients that it is made for, and the
    smaller ones fail for the others: their conditions are no formality.
    """
    orders, share, steps, rate, z, cohort = np.array([1.5, 2.0, 4.0]), 0.25, 4, 0.2, 1.0, 50
    seen = lambda curve: np.asarray(rdp.participation(orders, share, curve))
    one = lambda z: divergence(np.arange(2), np.array([1 - rate, rate]), z, orders)
    times = np.arange(steps + 1)
    sums = lambda rate: seen(
        divergence(
            times, stats.binom.pmf(times, steps, rate), math.sqrt(cohort * steps) * z, orders
        )
    )
    summed = sums(rate)
    all_but_last = seen((steps - 1) * one(z) + one(math.sqrt(cohort) * z))
    all_of_them = seen(steps * one(z))
    own, shared = (rdp.without_replacement(orders, rate, n * z) for n in (1, math.sqrt(cohort)))
    p2 = np.asarray(rounds.nonexpansive(orders, share, steps, rate, z, cohort))
    p1a = np.asarray(rounds.last_step_shared(orders, share, steps, own, shared))
    p1 = np.asarray(rounds.participates(orders, share, steps, own))
    holds = lambda bound, attack: (bound >= attack * (1 - 1e-7)).all()
    assert holds(np.asarray(rounds.nonexpansive(orders, share, steps, 0.95, z, cohort)), sums(0.95))
    assert holds(p2, summed) and holds(p1a, summed) and holds(p1, summed)
    assert holds(p1a, all_but_last) and holds(p1, all_but_last) and not holds(p2, all_but_last)
    assert holds(p1, all_of_them) and not holds(p1a, all_of_them)
    event = events.participation(share, fixed(rate, z, steps))
    assert holds(np.asarray(rdp_events.curve(event, orders)), all_of_them)


# --- what must hold


@settings(max_examples=8)
@given(
    st.floats(-4, 0), st.floats(-0.5, 2), st.integers(1, 3000), st.floats(-10, -1.5), st.booleans()
)
def test_monotone_in_everything(log_rate, log_z, times, log_delta, fixed_size):
    call = pld.without_replacement if fixed_size else pld.poisson
    rate, z, delta = 10**log_rate, 10**log_z, 10**log_delta
    more = np.array(
        [
            (rate, z, times, delta),
            (rate, z / 1.3, times, delta),
            (min(1, rate * 1.3), z, times, delta),
            (rate, z, math.ceil(times * 1.3), delta),
            (rate, z, times, delta / 5),
        ]
    )
    got = by_fives(call, *more.T)
    assert np.all(np.isfinite(got)) and np.all(got >= 0)
    assert np.all(got[1:] >= got[0] * (1 - 2e-3) - 1e-4)


@pytest.mark.slow
def test_wrap_around_adds_no_loss():
    """Rounding noise far out, composed 1e5 times, once gave 3.98 for 0.18 and 1.8346 for 1.8282."""
    rare, usual = (
        on_the_middle_grid(*run) for run in ((1e-4, 1.0, 1e5, 1e-7), (0.01, 1.0, 1e3, 1e-5))
    )
    inside(rare, 0.1691620868, 0.1882691425)
    assert 1.8277 < usual < 1.8284


def test_any_window_is_an_upper_bound():
    """A bad grid may be loose, never wrong: windows and steps off by much, tilts off by factors."""
    with in_float64():
        groups = (
            (
                events.Poisson(jnp.full(1, 0.1), events.Gaussian(jnp.full(1, 2.0))),
                jnp.full(1, 100.0),
            ),
        )
        exact = 2.33740  # of "remove" on 2^17 points
        grid = jax.jit(lambda: pld_compose.plan(groups, "remove", 2**13, 1e-5))()
        ends = jax.jit(lambda grid: (highest(groups, grid, 2**13), lowest(groups, grid, 2**13)))
        for change in (
            {"window": grid.window + 3000},
            {"window": grid.window - 4000},
            {"tilt": grid.tilt * 2},
            {"tilt": grid.tilt / 4},
            {"interval": grid.interval / 3},
            {"start": grid.start + 500},
            {"above": grid.above * 0.5},
        ):
            other = grid._replace(**change)
            high, low = map(float, ends(other))
            assert low <= exact * 1.0001 and exact * 0.9999 <= high


def test_width_holds_the_value():
    for *run, delta in ((0.02, 1.3, 300, 1e-6), (0.1, 2.0, 100, 1e-5)):
        finer = on_the_middle_grid(*run, delta)
        value, width = pld.epsilon(sampled(*run), delta)
        assert 0 < width <= 1e-3 * value + 1e-4
        assert value - width - 1e-9 <= finer <= value + 1e-9


def test_extremes_are_finite_or_refused():
    q, z, t, d = (
        a.ravel()
        for a in np.meshgrid([1e-6, 1e-2, 1.0], [0.1, 1.0, 1000.0], [1, 1e6], [1e-12, 0.5])
    )
    for call in (pld.poisson, pld.without_replacement):
        got = by_fives(call, q, z, t, d)
        assert not np.isnan(got).any() and np.all(got >= 0) and np.all(np.isfinite(got))
        whole = np.asarray(rdp.gaussian_epsilon(np.sqrt(t) / z, d))
        full = q == 1
        assert np.all(got[full] >= whole[full] * (1 - 1e-6) - 1e-9)
        assert np.all(got[full] <= whole[full] * 1.01 + 1e-3)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.floats(-6, 0), st.floats(-1, 3), st.floats(0, 6), st.floats(-12, -2), st.booleans())
def test_between_bounds_at_all_sizes(log_rate, log_z, log_times, log_delta, fixed_size):
    """Above what one step gives away for certain, below no sampling, and hardly above Renyi bounds.

    Above 1e5 times the coarsest grid may be looser than those, and `tight` takes the smaller.
    """
    rate, z, times, delta = 10**log_rate, 10**log_z, math.floor(10**log_times), 10**log_delta
    call, curve = ((pld.poisson, rdp.poisson), (pld.without_replacement, rdp.without_replacement))[
        fixed_size
    ]
    got = alone(call, rate, z, times, delta)
    assert math.isfinite(got)
    whole = lambda times, delta: float(rdp.gaussian_epsilon(math.sqrt(times) / z, delta))
    one = whole(1, delta / rate) if delta < rate else 0.0
    least = math.log1p(rate * math.expm1(one)) if one < 600 else one + math.log(rate)
    assert least * (1 - 1e-6) - 1e-9 <= got <= whole(times, delta) * (1 + 1e-9)
    if times <= 1e5:
        renyi = float(rdp.epsilon(ORDERS, times * np.asarray(curve(ORDERS, rate, z)), delta))
        assert got <= renyi * (1 + 1e-2) + 2e-4


def test_coarse_grids_prove_a_little_more():
    event = sampled(0.05, 1.2)
    got = np.array([pld.epsilon(event, 1e-6, t, pld.SIZES[:-1])[0] for t in (1, 10, 200)])
    want = np.array([pld.epsilon(event, 1e-6, t)[0] for t in (1, 10, 200)])
    assert (np.diff(got) > 0).all() and (got >= want * (1 - 1e-12)).all()
    assert (got <= want * (1 + 2e-3) + 1e-4).all()
    for times, delta, word in ((0, 1e-6, "times > 0"), (1, 1.0, "delta")):
        with pytest.raises(ValueError, match=word):
            pld.epsilon(event, delta, times)


def test_delta_inverts_epsilon():
    event = sampled(0.05, 1.2, 200)
    epsilon, _ = pld.epsilon(event, 1e-6)
    assert 0.98e-6 < pld.deltas(event, np.array([epsilon]))[0] <= 1.005e-6
    epsilons = np.array([0.5, 2.0, 5.0])
    want = [gaussian_profile(e, 1.0) for e in epsilons]
    np.testing.assert_allclose(pld.deltas(events.gaussian(1.0), epsilons), want, rtol=1e-3)


@pytest.mark.slow
def test_the_order_of_parts_is_nothing():
    a, b = sampled(0.1, 2.0, 3), sampled(0.2, 3.0, 5)
    values = [pld.epsilon(events.compose(a, b), 1e-5, times)[0] for times in (1, 10)]
    assert values[0] < values[1]
    np.testing.assert_allclose(
        pld.epsilon(events.compose(b, events.compose(a)), 1e-5)[0], values[0], rtol=1e-9
    )
    inner = events.repeat(events.gaussian(4.0), 4)  # one Gaussian of half the noise
    np.testing.assert_allclose(
        pld.epsilon(events.poisson(0.2, inner), 1e-5), pld.epsilon(sampled(0.2, 2.0), 1e-5)
    )


@pytest.mark.parametrize(
    "event, word",
    [
        (events.poisson(0.1, events.poisson(0.1, events.gaussian(1))), "Poisson"),
        (
            events.without_replacement(1, 9, events.participation(0.1, events.gaussian(1))),
            "Participation",
        ),
        (events.with_replacement(1, 9, events.poisson(0.1, events.gaussian(1))), "WithReplacement"),
        (events.compose(sampled(0.1, 1.0), fixed(0.1, 1.0)), "adjacency"),
        (events.gaussian(1e-3), "noise multiplier"),
        (sampled(1e-12, 1.0), "rate"),
    ],
)
def test_refuses_what_it_cannot_analyse(event, word):
    with pytest.raises(ValueError, match=word):
        pld.epsilon(event, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_refuses_bad_delta(delta):
    with pytest.raises(ValueError, match="delta"):
        pld.epsilon(events.gaussian(1.0), delta)
