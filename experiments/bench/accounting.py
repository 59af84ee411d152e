"""Accounting beside dp-accounting, Opacus and prv-accountant, in one process; rows go to
experiments/results.

    pip install -e ".[bench]" && python -m experiments.bench.accounting

Every figure is the median of repeats after a first call, whose time (with compilation) is a row's
`first`.  The workload of "one value": Poisson rate 0.01, noise multiplier 1, 1,000 steps, delta
1e-5.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import time

import jax
import numpy as np

from jfl.privacy.accountants import events, pld
from jfl.privacy.accountants.rdp_events import epsilon

RATE, Z, STEPS, DELTA = 0.01, 1.0, 1000, 1e-5
ROOT = pathlib.Path(__file__).parents[2]


def timed(function, repeats):
    """-> median seconds, first seconds, last value."""
    times, value = [], None
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        value = jax.block_until_ready(function())
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:]), times[0], value


def grid(n):
    """Rates, noise multipliers and steps as sweeps have them: log-uniform, fixed seed."""
    rng = np.random.default_rng(0)
    draw = lambda low, high: np.exp(rng.uniform(np.log(low), np.log(high), n))
    return draw(1e-3, 0.1), draw(0.7, 5.0), np.round(draw(100, 10_000))


def ours():
    thousand = [v[:1000] for v in grid(1000)]
    event = events.repeat(events.poisson(RATE, events.gaussian(Z)), STEPS)
    yield "rdp, one value (epsilon of an event)", 20, lambda: epsilon(event, DELTA)[0]
    yield "pld, one value (2^14 points)", 20, lambda: pld.poisson(RATE, Z, STEPS, DELTA)
    yield "pld, one value with its width (refined)", 3, lambda: pld.pld_epsilon(event, 1, DELTA)[0]
    yield "pld, 1,000 values", 2, lambda: pld.poisson(thousand[0], thousand[1], thousand[2], DELTA)
    yield (
        "pld without replacement, one value",
        10,
        lambda: pld.without_replacement(RATE, Z, STEPS, DELTA),
    )


def dp_accounting():
    import dp_accounting as d

    event = d.SelfComposedDpEvent(d.PoissonSampledDpEvent(RATE, d.GaussianDpEvent(Z)), STEPS)
    yield "rdp, one value", 10, lambda: d.rdp.RdpAccountant().compose(event).get_epsilon(DELTA)
    yield (
        "pld, one value (1e-4)",
        3,
        lambda: (
            d.pld.PLDAccountant(value_discretization_interval=1e-4)
            .compose(event)
            .get_epsilon(DELTA)
        ),
    )
    make = lambda z: d.SelfComposedDpEvent(
        d.PoissonSampledDpEvent(RATE, d.GaussianDpEvent(z)), STEPS
    )
    yield (
        "rdp, calibration to epsilon 1",
        3,
        lambda: d.calibrate_dp_mechanism(
            d.rdp.RdpAccountant, make, 1.0, DELTA, d.LowerEndpointAndGuess(0.1, 2.0)
        ),
    )


def opacus():
    from opacus.accountants import RDPAccountant

    def value():
        accountant = RDPAccountant()
        accountant.history = [(Z, RATE, STEPS)]
        return accountant.get_epsilon(DELTA)

    yield "rdp, one value", 10, value


def prv_accountant():
    import prv_accountant as p

    def value():
        prv = p.PoissonSubsampledGaussianMechanism(noise_multiplier=Z, sampling_probability=RATE)
        return p.PRVAccountant(
            prvs=[prv], max_self_compositions=[STEPS], eps_error=0.01, delta_error=DELTA / 1000
        ).compute_epsilon(DELTA, [STEPS])[2]

    yield "prv, one value (eps_error 0.01, upper)", 3, value


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default=str(ROOT / "experiments" / "results" / "accounting.json"))
    out = parser.parse_args().out
    versions = {}
    for name in ("jax", "numpy", "dp-accounting", "opacus", "prv-accountant", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rows = []
    for tool, cases in (
        ("jfl", ours),
        ("dp-accounting", dp_accounting),
        ("opacus", opacus),
        ("prv-accountant", prv_accountant),
    ):
        try:
            for name, repeats, function in cases():
                seconds, first, value = timed(function, repeats)
                shown = float(np.ravel(np.asarray(value))[0])
                rows.append(
                    dict(
                        tool=tool,
                        case=name,
                        median=seconds,
                        first=first,
                        repeats=repeats,
                        value=shown,
                    )
                )
                print(
                    (
                        f"{tool:15} {name:45} {1e3 * seconds:10.2f} ms   first {first:6.2f} s   "
                        f"{shown:.5f}"
                    ),
                    flush=True,
                )
        except ImportError as error:
            print(f"{tool}: left out, {error}")
    about = dict(
        versions=versions,
        commit=commit,
        device=jax.devices()[0].device_kind,
        cpus=os.cpu_count(),
        machine=platform.machine(),
        python=platform.python_version(),
    )
    pathlib.Path(out).write_text(json.dumps(dict(about=about, rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
