"""Every public accountant function under jit, vmap, scan and grad, and in float64 whatever the
caller's default."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfl.privacy.accountants import events, pld, rdp, rdp_events

ORDERS = np.array([1.5, 2.0, 8.0])
SMALL = 2**10  # points of a loss distribution: as many programs, less time
SIGMAS = np.array(
    [[0.75, 1.0], [1.5, 4.0]]
)  # float32 numbers, so that both precisions see the same
SHARES = np.array([[0.125, 0.25], [0.5, 0.75]])
CURVES = np.array([[0.03125, 0.0625], [0.25, 1.0]])


def groups(z):
    return (
        (
            events.WithoutReplacement(
                jnp.full(1, 0.25), jnp.ones(1), events.Gaussian(jnp.reshape(z, 1))
            ),
            jnp.full(1, 10.0),
        ),
    )


# module -> name -> (a function of one number, numbers [2, 2])
TABLE = {
    rdp: dict(
        gaussian=(lambda z: rdp.gaussian(ORDERS, z), SIGMAS),
        laplace=(lambda z: rdp.laplace(ORDERS, z), SIGMAS),
        pure=(lambda epsilon: rdp.pure(ORDERS, epsilon), SIGMAS),
        poisson=(lambda z: rdp.poisson(ORDERS, 0.125, z), SIGMAS),
        without_replacement=(lambda z: rdp.without_replacement(ORDERS, 0.125, z), SIGMAS),
        with_replacement=(
            lambda z: rdp.with_replacement(ORDERS, np.array([0.5, 0.375, 0.125]), z),
            SIGMAS,
        ),
        poisson_group=(
            lambda z: rdp.poisson_group(ORDERS, np.array([0.5, 0.375, 0.125]), z),
            SIGMAS,
        ),
        participation=(lambda z: rdp.participation(ORDERS, 0.25, rdp.gaussian(ORDERS, z)), SIGMAS),
        either=(
            lambda z: rdp.either(
                ORDERS, 0.25, rdp.gaussian(ORDERS, z), rdp.gaussian(ORDERS, 2 * z)
            ),
            SIGMAS,
        ),
        convert=(lambda z: rdp.convert(ORDERS, rdp.gaussian(ORDERS, z), 2.0**-17), SIGMAS),
        epsilon=(lambda z: rdp.epsilon(ORDERS, rdp.gaussian(ORDERS, z), 2.0**-17), SIGMAS),
        delta=(lambda z: rdp.delta(ORDERS, rdp.gaussian(ORDERS, z), 1.0), SIGMAS),
        gaussian_delta=(lambda mu: rdp.gaussian_delta(1.0, mu), SIGMAS),
        gaussian_epsilon=(lambda mu: rdp.gaussian_epsilon(mu, 2.0**-17), SIGMAS),
    ),
    pld: dict(
        poisson=(lambda z: pld.poisson(0.25, z, 10, 2.0**-17, SMALL), SIGMAS),
        without_replacement=(
            lambda z: pld.without_replacement(0.25, z, 10, 2.0**-17, SMALL),
            SIGMAS,
        ),
        **{
            "upper lower": (
                lambda z: jnp.stack(
                    [end(groups(z), "replace", 2.0**-17, SMALL) for end in (pld.upper, pld.lower)]
                ),
                SIGMAS,
            )
        },
    ),
    rdp_events: dict(
        curve=(
            lambda z: rdp_events.curve(
                events.repeat(
                    events.participation(
                        0.25,
                        events.compose(
                            events.poisson(0.125, events.gaussian(z)), events.gaussian(8.0)
                        ),
                    ),
                    3,
                ),
                ORDERS,
            ),
            SIGMAS,
        )
    ),
}
# on concrete numbers alone, or parts of the others
HOST = {
    rdp: {"allocation", "float64", "gaussian_mu", "over_libraries"},
    pld: {"epsilon", "delta", "deltas"},
    rdp_events: {
        "above",
        "epsilon",
        "delta",
        "bounds",
        "check_delta",
        "deltas",
        "deltas_of_curve",
        "gaussian_mu",
        "with_multiplicities",
    },
}
# slow to compile, and beside "poisson", which calls the same
HEAVY = {(pld, "without_replacement"), (pld, "upper lower")}
CASES = [
    pytest.param(module, name, marks=pytest.mark.slow if (module, name) in HEAVY else ())
    for module in TABLE
    for name in TABLE[module]
]
name_of = lambda value: getattr(value, "__name__", value).split(".")[-1]


def case(module, name):
    function, values = TABLE[module][name]
    return function, values, module is pld  # loss distributions have no slopes


def test_no_accountant_is_forgotten():
    """A new public function of these modules belongs into TABLE, or into HOST."""
    for module, cases in TABLE.items():
        public = {
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and not n.startswith("_") and f.__module__ == module.__name__
        }
        covered = {name for names in cases for name in names.split()}
        assert public == covered | HOST[module], module.__name__
        assert not covered & HOST[module]


@functools.cache
def alone(module, name):
    """Values at all numbers, and sum and slope at any number, by one program without vmap and
    scan."""
    function, values, no_slope = case(module, name)
    with jax.enable_x64(True):
        if no_slope:
            program = jax.jit(function)
            both = lambda v: ((None, program(v)), None)
        else:
            both = jax.jit(
                jax.value_and_grad(lambda v: (jnp.sum(function(v)), function(v)), has_aux=True)
            )
        found = [np.asarray(both(v)[0][1]) for v in values.ravel()]
    return np.stack(found).reshape(2, 2, *found[0].shape), both


# A run of `pld` by itself is a program that maps over batches of runs (test_pld.py).
SLOW_TO_VMAP = ((pld, "poisson"),)
QUICK = [
    pytest.param(*c.values, marks=pytest.mark.slow) if c.values in SLOW_TO_VMAP else c
    for c in CASES
]


@pytest.mark.by_default(  # of each kind of function one or two
    "rdp-poisson",
    "rdp-convert",
    "rdp-epsilon",
    "pld-upper lower",
    "rdp_events-curve",
)
@pytest.mark.parametrize("module, name", QUICK, ids=name_of)
def test_jit_vmap_and_scan(module, name):
    """Inside the caller's program, with the caller's default of float32: the same numbers, in
    float64."""
    function, values, _ = case(module, name)
    assert not jax.config.jax_enable_x64
    step = lambda count, row: (count + 1, jax.vmap(function)(row))
    count, got = jax.jit(lambda rows: jax.lax.scan(step, 0, rows))(np.asarray(values, np.float32))
    want = alone(module, name)[0]
    assert int(count) == 2 and got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.isfinite(want).all() and np.ptp(want) > 0


@pytest.mark.by_default(
    "rdp-without_replacement",
    "rdp-delta",
    "rdp-gaussian_epsilon",
    "rdp_events-curve",
)
@pytest.mark.parametrize("module, name", [c for c in CASES if not case(*c.values)[2]], ids=name_of)
def test_gradients(module, name):
    """Compared with differences of five points."""
    _, values, _ = case(module, name)
    _, both = alone(module, name)
    step = 1e-4
    with jax.enable_x64(True):
        for v in values[:, 1]:
            at = lambda factor, v=v: float(both(v * (1 + factor * step))[0][0])
            want = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * step * v)
            np.testing.assert_allclose(both(v)[1], want, rtol=1e-6)
            assert want != 0


@pytest.mark.parametrize(
    "mu, delta", [(1e-5, 1e-8), (0.01, 1e-5), (1.0, 1e-5), (30.0, 1e-12), (1e4, 1e-5)]
)
def test_the_exact_gaussian_has_exact_slopes(mu, delta):
    epsilon, h = rdp.gaussian_epsilon, 1e-5
    with jax.enable_x64(True):
        in_mu, in_delta = map(float, jax.grad(epsilon, (0, 1))(mu, delta))
        differences = (
            epsilon(mu * (1 + h), delta) - epsilon(mu * (1 - h), delta),
            epsilon(mu, delta * (1 + h)) - epsilon(mu, delta * (1 - h)),
        )
    np.testing.assert_allclose(
        [in_mu * mu, in_delta * delta],
        np.array(differences, float) / (2 * h),
        rtol=1e-5,
        atol=1e-9 * float(epsilon(mu, delta)),
    )


def test_what_is_free_stays_free():
    assert jax.grad(rdp.gaussian_epsilon)(1e-3, 1e-3) == 0
