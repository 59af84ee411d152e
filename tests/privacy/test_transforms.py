"""Every public accountant function under jit, vmap and scan, and in float64 whatever the caller's
default."""

import inspect

import jax
import numpy as np
import pytest

from jfl.privacy.accountants import events, pld, rdp, rdp_events

ORDERS = np.array([1.5, 2.0, 8.0])
SMALL = 2**10  # points of a loss distribution: as many programs, less time
# float32 numbers, so that both precisions see the same
SIGMAS = np.array([[0.75, 1.0], [1.5, 4.0]])
DELTA = 2.0**-17
LAW = np.array([0.5, 0.375, 0.125])


def nested(z):
    sampled = events.poisson(0.125, events.gaussian(z))
    round_ = events.participation(0.25, events.compose(sampled, events.gaussian(8.0)))
    return events.repeat(round_, 3)


# module -> name -> a function of one number
TABLE = {
    rdp: dict(
        gaussian=lambda z: rdp.gaussian(ORDERS, z),
        laplace=lambda z: rdp.laplace(ORDERS, z),
        pure=lambda epsilon: rdp.pure(ORDERS, epsilon),
        poisson=lambda z: rdp.poisson(ORDERS, 0.125, z),
        without_replacement=lambda z: rdp.without_replacement(ORDERS, 0.125, z),
        with_replacement=lambda z: rdp.with_replacement(ORDERS, LAW, z),
        poisson_group=lambda z: rdp.poisson_group(ORDERS, LAW, z),
        participation=lambda z: rdp.participation(ORDERS, 0.25, rdp.gaussian(ORDERS, z)),
        convert=lambda z: rdp.convert(ORDERS, rdp.gaussian(ORDERS, z), DELTA),
        epsilon=lambda z: rdp.epsilon(ORDERS, rdp.gaussian(ORDERS, z), DELTA),
        gaussian_delta=lambda mu: rdp.gaussian_delta(1.0, mu),
        gaussian_epsilon=lambda mu: rdp.gaussian_epsilon(mu, DELTA),
    ),
    pld: dict(
        poisson=lambda z: pld.poisson(0.25, z, 10, DELTA, SMALL),
        without_replacement=lambda z: pld.without_replacement(0.25, z, 10, DELTA, SMALL),
    ),
    rdp_events: dict(curve=lambda z: rdp_events.curve(nested(z), ORDERS)),
}
# on concrete numbers only, or parts of the others
HOST = {
    rdp: "allocation float64 over_libraries",
    pld: "epsilon deltas",
    rdp_events: "quick_bounds epsilon bounds check_delta deltas deltas_of_curve gaussian_mu "
    "level_curves with_multiplicities",
}
NAMES = [(module, name) for module in TABLE for name in TABLE[module]]


def test_no_accountant_is_forgotten():
    """A new public function of these modules belongs into TABLE, or into HOST."""
    for module, cases in TABLE.items():
        functions = inspect.getmembers(module, inspect.isfunction)
        own = {n for n, f in functions if n[0] != "_" and f.__module__ == module.__name__}
        assert own == set(cases) | set(HOST[module].split()), module.__name__


@pytest.mark.by_default("rdp-poisson", "rdp-convert", "rdp_events-curve")
@pytest.mark.parametrize(
    "module, name", NAMES, ids=lambda value: getattr(value, "__name__", value).split(".")[-1]
)
def test_jit_vmap_and_scan(module, name):
    """Inside a program of the caller's, whose default is float32: the same numbers, in float64."""
    function = TABLE[module][name]
    assert not jax.config.jax_enable_x64
    step = lambda count, row: (count + 1, jax.vmap(function)(row))
    count, got = jax.jit(lambda rows: jax.lax.scan(step, 0, rows))(np.asarray(SIGMAS, np.float32))
    with jax.enable_x64(True):
        want = np.array([[np.asarray(jax.jit(function)(v)) for v in row] for row in SIGMAS])
    assert int(count) == 2 and got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)
    assert np.isfinite(want).all() and np.ptp(want) > 0
