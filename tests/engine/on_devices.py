"""What test_scale.py runs on 8 CPU devices of one process.

    python tests/engine/on_devices.py short|long|half

Prints a JSON line for each case: how far its results are from those of one device, and from another
seed's.
"""

import dataclasses
import functools
import importlib
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np

import jfl
from jfl.engine import sharding

sys.path.insert(0, str(Path(__file__).parents[1]))  # a script of its own: tests/ is not on the path

from helpers.problems import (
    flat,
    make_federation,
    noisy_grad,
    noisy_release,
    on_host,
    squared,
    start_params,
)

DEVICE, FEW = make_federation(), jfl.batches.without_replacement(3)
FEDS = dict(device=DEVICE, host=on_host(DEVICE))
RANDOM = dict(sampler=jfl.sampling.poisson(7, 0.5, capacity=7), chunk=1)  # some chunks are empty


def make(fed, name="fedavg", lr=0.3, z=1.1, sampler=None, **options):
    grad = noisy_grad(z=z) if "release" not in options else jfl.grad(squared)
    algorithm = getattr(jfl.algorithms, name)(grad, lr=lr, steps=2, batch=FEW)
    sampler = sampler or jfl.sampling.without_replacement(7, 5)
    return jfl.plan(FEDS[fed], jfl.task(start_params(), squared), algorithm, sampler, **options)


def correlated(strategy):
    """A release whose noise is correlated over rounds."""
    noise = jfl.correlated(1.1, strategy)
    return jfl.chain(jfl.clip_l2(0.8), jfl.total(), noise, jfl.divide(3.0))


def remembering(clients, sampler, chunk=None):
    """Return a plan with stateful clients, with held-out rows per client and for all."""
    sizes = [3 + c % 6 for c in range(clients)]
    fed = make_federation(sizes=sizes, classes=3, held_out=2, tests=clients - 2)
    task = jfl.models.logistic(fed)
    grad = jfl.private_grad(task.loss, noisy_grad().mechanism)
    algorithm = jfl.algorithms.scaffold(grad, lr=0.3, steps=2, batch=FEW)
    return jfl.plan(fed, task, algorithm, sampler, chunk=chunk)


def held(tree):
    """How many rows of its arrays each device holds."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    return sorted({part.data.shape[0] for x in leaves for part in x.addressable_shards})


def placed(plan, mesh):
    """`held` by devices before a run begins: states, held-out rows of clients and for all."""
    mesh, run = jfl.mesh.devices(mesh), jfl.init(jax.random.key(0), plan)
    own, fed = sharding.place(run, mesh).client_states, sharding.place(plan, mesh).fed
    return [held(x) for x in (own, (fed.test_index, fed.test_size), (fed.x_test, fed.y_test))]


def seen(out, scores=("accuracy", "client_accuracy")):
    metrics = [getattr(out.metrics, name) for name in ("loss", "update_norm", *scores)]
    return flat((out.params, out.run.client_states, metrics))


def runs(plan, meshes, **what):
    run = lambda seed, mesh=None: jfl.simulate(
        jax.random.key(seed), plan, 4, evaluate_every=2, mesh=mesh
    )
    one, other = (seen(run(seed)) for seed in (0, 1))
    for mesh in meshes:
        found = run(0, mesh)
        held_here = held(found.run.client_states)
        report(dict(what, mesh=str(mesh), held=held_here), seen(found), one, other)


def grids(meshes, name, **options):
    plan_of = functools.cache(lambda lr, z: make("device", name, lr, z, **options))

    def go(seed, mesh):
        axes = dict(lr=[0.1, 0.3, 0.5], z=[0.5, 2.0])
        swept = jfl.sweep(plan_of, rounds=3, seed=seed, mesh=mesh, **axes)
        return flat((swept.params, swept.metrics.loss))

    one, other = go(0, None), go(1, None)
    for mesh in meshes:
        shape = str(dict(mesh.shape) if hasattr(mesh, "shape") else mesh)
        report(dict(sweep=name, mesh=shape), go(0, mesh), one, other)


def sums(dtype, chunk, mesh, seed):
    """Return the sum of the uploads of a round, before the noise."""
    rounds = importlib.import_module("jfl.engine.round")
    params = jax.tree.map(lambda x: x.astype(dtype), start_params())
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.3, steps=2, batch=FEW)
    task, options = jfl.task(params, squared), dict(release=noisy_release(), chunk=chunk)
    plan = jfl.plan(DEVICE, task, algorithm, jfl.sampling.full(7), **options)
    plan, key = dataclasses.replace(plan, mesh=jfl.mesh.devices(mesh)), jax.random.key(seed)
    run, keys = jfl.init(key, plan), rounds.RoundKeys(key, jax.random.split(key, 2), key, key)
    cohort = lambda run, plan: rounds._run_cohort(run, plan, keys, plan.sampler.draw(key))
    return flat(jax.jit(lambda run, plan: cohort(run, plan)[0].uploads.value)(run, plan))


def short():
    """Ways to spread one run, which has one result."""
    begin = lambda seed, plan, mesh=None: jfl.simulate(
        jax.random.key(seed), plan, 4, evaluate_every=2, mesh=mesh
    )
    plan = remembering(8, jfl.sampling.poisson(8, 0.5), chunk=1)
    alone, other = begin(0, plan), begin(1, plan)
    found = begin(0, plan, 8)
    what = dict(fed="device", held=held(found.run.client_states), placed=placed(plan, 8))
    report(what, *map(seen, (found, alone, other)))
    found = begin(0, dataclasses.replace(plan, fed=on_host(plan.fed)), 8)
    report(dict(fed="host"), *(seen(out, scores=()) for out in (found, alone, other)))
    mesh = jax.make_mesh((2, 4), ("points", "clients"))
    swept = jfl.sweep(lambda: plan, rounds=4, evaluate_every=2, mesh=mesh, seed=[1, 0])
    shown = lambda params, metrics: flat((params, metrics.loss, metrics.client_accuracy))
    last = shown(swept.params[1], jax.tree.map(lambda x: x[1], swept.metrics))
    report(dict(sweep=True), last, *(shown(out.params, out.metrics) for out in (alone, other)))


def report(what, found, one, other):
    apart, other_seed = (float(np.abs(x - one).max()) for x in (found, other))
    print(json.dumps(dict(what, apart=apart, other_seed=other_seed)))


def half():
    """Chunks and devices are added up in float32."""
    for dtype, mesh in itertools.product(("bfloat16", "float16"), (2, 8)):
        one, other = (sums(dtype, None, None, seed) for seed in (0, 1))
        report(dict(dtype=dtype, mesh=mesh), sums(dtype, 1, mesh, 0), one, other)


def long():
    sampling, strategies = jfl.sampling, jfl.strategies
    for fed, name, chunk in itertools.product(FEDS, ("fedavg", "scaffold"), (None, 2)):
        plan = make(fed, name, chunk=chunk)
        runs(plan, [1, 2, 4, 8, "auto"], fed=fed, name=name, chunk=chunk)
    cyclic = sampling.cyclic_poisson(7, 0.8, 2, capacity=7)
    for name, options in dict(
        client=dict(release=noisy_release()),
        uploads=dict(upload=noisy_release()),
        poisson=dict(sampler=sampling.poisson(7, 0.5)),
        truncated=dict(sampler=sampling.truncated_poisson(7, 0.5, 4)),
        drawn_again=dict(release=correlated(strategies.inverse_banded(4, 3))),
        bands_held=dict(
            release=correlated(strategies.banded_toeplitz(4, 2)),
            sampler=sampling.min_separation(7, 3, 2),
        ),
        sums_held=dict(release=correlated(strategies.blt(4, 2)), sampler=cyclic),
    ).items():
        runs(make("device", **options), [2, 8], case=name)
    for clients, chunk in itertools.product((16, 7), (None, 2)):
        for sampler in (
            sampling.full(clients),
            sampling.without_replacement(clients, 5),
            sampling.with_replacement(clients, 6),
            sampling.poisson(clients, 0.5),
            sampling.truncated_poisson(clients, 0.5, 6),
        ):
            plan = remembering(clients, sampler, chunk)
            runs(plan, [2, 8], clients=clients, sampler=sampler.scheme, chunk=chunk)
    both, one = jax.make_mesh((2, 4), ("points", "clients")), jax.make_mesh((8,), ("clients",))
    for options in (dict(chunk=2), RANDOM):
        grids([2, 4, "auto", both, one], "scaffold", **options)


def main(kind):
    assert len(jax.devices()) == 8
    dict(short=short, half=half, long=long)[kind]()


if __name__ == "__main__":
    main(*sys.argv[1:])
