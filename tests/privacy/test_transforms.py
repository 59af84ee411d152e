"""Every public accountant function under jit, vmap and scan, and in float64 whatever the
caller's default."""

import inspect

import jax
import numpy as np
import pytest

from jfl.privacy.accountants import events, pld, rdp, rdp_events

ORDERS = np.array([1.5, 2.0, 8.0])
SMALL = 2**10  # points of a loss distribution: as many programs, less time
SIGMAS = np.array(
    [[0.75, 1.0], [1.5, 4.0]]
)  # float32 numbers, so that both precisions see the same

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
        gaussian_delta=(lambda mu: rdp.gaussian_delta(1.0, mu), SIGMAS),
        gaussian_epsilon=(lambda mu: rdp.gaussian_epsilon(mu, 2.0**-17), SIGMAS),
    ),
    pld: dict(
        poisson=(lambda z: pld.poisson(0.25, z, 10, 2.0**-17, SMALL), SIGMAS),
        without_replacement=(
            lambda z: pld.without_replacement(0.25, z, 10, 2.0**-17, SMALL),
            SIGMAS,
        ),
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
    rdp: {"allocation", "float64", "over_libraries"},
    pld: {"epsilon", "deltas"},
    rdp_events: {
        "quick_bounds",
        "epsilon",
        "bounds",
        "check_delta",
        "deltas",
        "deltas_of_curve",
        "gaussian_mu",
        "with_multiplicities",
    },
}
# slow to compile, and beside "poisson", which calls the same
HEAVY = {(pld, "without_replacement")}
CASES = [
    pytest.param(module, name, marks=pytest.mark.slow if (module, name) in HEAVY else ())
    for module in TABLE
    for name in TABLE[module]
]
name_of = lambda value: getattr(value, "__name__", value).split(".")[-1]


def test_no_accountant_is_forgotten():
    """A new public function of these modules belongs into TABLE, or into HOST."""
    for module, cases in TABLE.items():
        public = {
            n
            for n, f in vars(module).items()
            if inspect.isfunction(f) and not n.startswith("_") and f.__module__ == module.__name__
        }
        assert public == set(cases) | HOST[module], module.__name__
        assert not set(cases) & HOST[module]


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
    "rdp_events-curve",
)
@pytest.mark.parametrize("module, name", QUICK, ids=name_of)
def test_jit_vmap_and_scan(module, name):
    """Inside the caller's program, with the caller's default of float32: the same numbers, in
    float64."""
    function, values = TABLE[module][name]
    assert not jax.config.jax_enable_x64
    step = lambda count, row: (count + 1, jax.vmap(function)(row))
    count, got = jax.jit(lambda rows: jax.lax.scan(step, 0, rows))(np.asarray(values, np.float32))
    with jax.enable_x64(True):
        want = np.array([[np.asarray(jax.jit(function)(v)) for v in row] for row in values])
    assert int(count) == 2 and got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.isfinite(want).all() and np.ptp(want) > 0
