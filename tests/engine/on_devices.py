"""What test_scale.py runs on 8 CPU devices of one process.

    python tests/engine/on_devices.py short|long|half

Prints a JSON line for each case: how far its results are from those of one device, and from another
seed's.
"""

import dataclasses
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

DEVICE = make_federation()
FEDS = dict(device=DEVICE, host=on_host(DEVICE))
RANDOM = dict(sampler=jfl.sampling.poisson(7, 0.5, capacity=7), chunk=1)  # some chunks are empty


def make(fed, name="fedavg", lr=0.3, z=1.1, **options):
    grad = noisy_grad(z=z) if "release" not in options else jfl.grad(squared)
    algorithm = getattr(jfl.algorithms, name)(
        grad, lr=lr, steps=2, batch=jfl.batches.without_replacement(3)
    )
    return jfl.plan(
        FEDS[fed],
        jfl.task(start_params(), squared),
        algorithm,
        options.pop("sampler", None) or jfl.sampling.without_replacement(7, 5),
        **options,
    )


def correlated(strategy):
    """A release whose noise is correlated over rounds."""
    noise = jfl.correlated(1.1, strategy)
    return jfl.chain(jfl.clip_l2(0.8), jfl.total(), noise, jfl.divide(3.0))


def remembering(clients, sampler, chunk=None):
    """Clients that remember, with held-out rows of their own and for all."""
    fed = make_federation(
        sizes=[3 + c % 6 for c in range(clients)], classes=3, held_out=2, tests=clients - 2
    )
    task = jfl.models.logistic(fed)
    clipped = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1), jfl.divide(3.0))
    algorithm = jfl.algorithms.scaffold(
        jfl.private_grad(task.loss, clipped),
        lr=0.3,
        steps=2,
        batch=jfl.batches.without_replacement(3),
    )
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
    one, other = (
        seen(jfl.simulate(jax.random.key(seed), plan, 4, evaluate_every=2)) for seed in (0, 1)
    )
    for mesh in meshes:
        found = jfl.simulate(jax.random.key(0), plan, 4, evaluate_every=2, mesh=mesh)
        report(
            dict(what, mesh=str(mesh), held=held(found.run.client_states)), seen(found), one, other
        )


def grids(meshes, name, **options):
    made = {}
    axes = dict(lr=[0.1, 0.3, 0.5], z=[0.5, 2.0])
    go = lambda seed, mesh: flat(
        [
            (r, m)
            for r, m in [
                (s.params, s.metrics.loss)
                for s in [
                    jfl.sweep(
                        lambda lr, z: made.setdefault(
                            (lr, z), make("device", name, lr, z, **options)
                        ),
                        rounds=3,
                        seed=seed,
                        mesh=mesh,
                        **axes,
                    )
                ]
            ]
        ]
    )
    one, other = go(0, None), go(1, None)
    for mesh in meshes:
        report(
            dict(sweep=name, mesh=str(dict(mesh.shape) if hasattr(mesh, "shape") else mesh)),
            go(0, mesh),
            one,
            other,
        )


def sums(dtype, chunk, mesh, seed):
    """What the clients of a round add up to, before the noise."""
    part = importlib.import_module("jfl.engine.round")
    params = jax.tree.map(lambda x: x.astype(dtype), start_params())
    algorithm = jfl.algorithms.fedavg(
        jfl.grad(squared), lr=0.3, steps=2, batch=jfl.batches.without_replacement(3)
    )
    plan = jfl.plan(
        DEVICE,
        jfl.task(params, squared),
        algorithm,
        jfl.sampling.full(7),
        release=noisy_release(),
        chunk=chunk,
    )
    plan, key = dataclasses.replace(plan, mesh=jfl.mesh.devices(mesh)), jax.random.key(seed)
    run, keys = jfl.init(key, plan), part.RoundKeys(key, jax.random.split(key, 2), key, key)
    found = jax.jit(
        lambda run, plan: part._run_cohort(run, plan, keys, plan.sampler.draw(key))[0].uploads.value
    )
    return flat(found(run, plan))


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
    swept = jfl.sweep(
        lambda: plan,
        rounds=4,
        evaluate_every=2,
        mesh=jax.make_mesh((2, 4), ("points", "clients")),
        seed=[1, 0],
    )
    shown = lambda params, metrics: flat((params, metrics.loss, metrics.client_accuracy))
    last = shown(swept.params[1], jax.tree.map(lambda x: x[1], swept.metrics))
    report(dict(sweep=True), last, *(shown(out.params, out.metrics) for out in (alone, other)))


def report(what, found, one, other):
    print(
        json.dumps(
            dict(
                what,
                apart=float(np.abs(found - one).max()),
                other_seed=float(np.abs(other - one).max()),
            )
        )
    )


def main(kind):
    assert len(jax.devices()) == 8
    if kind == "short":
        short()
        return
    if kind == "half":  # chunks and devices are added up in float32
        for dtype, mesh in itertools.product(("bfloat16", "float16"), (2, 8)):
            one, other = (sums(dtype, None, None, seed) for seed in (0, 1))
            report(dict(dtype=dtype, mesh=mesh), sums(dtype, 1, mesh, 0), one, other)
        return
    meshes = [1, 2, 4, 8, "auto"]
    for fed, name, chunk in itertools.product(FEDS, ("fedavg", "scaffold"), (None, 2)):
        runs(make(fed, name, chunk=chunk), meshes, fed=fed, name=name, chunk=chunk)
    for name, more in dict(
        client=dict(release=noisy_release()),
        uploads=dict(upload=noisy_release()),
        poisson=dict(sampler=jfl.sampling.poisson(7, 0.5)),
        truncated=dict(sampler=jfl.sampling.truncated_poisson(7, 0.5, 4)),
        drawn_again=dict(release=correlated(jfl.strategies.inverse_banded(4, 3))),
        bands_held=dict(
            release=correlated(jfl.strategies.banded_toeplitz(4, 2)),
            sampler=jfl.sampling.min_separation(7, 3, 2),
        ),
        sums_held=dict(
            release=correlated(jfl.strategies.blt(4, 2)),
            sampler=jfl.sampling.cyclic_poisson(7, 0.8, 2, capacity=7),
        ),
    ).items():
        runs(make("device", **more), [2, 8], case=name)
    for clients, chunk in itertools.product((16, 7), (None, 2)):
        for sampler in (
            jfl.sampling.full(clients),
            jfl.sampling.without_replacement(clients, 5),
            jfl.sampling.with_replacement(clients, 6),
            jfl.sampling.poisson(clients, 0.5),
            jfl.sampling.truncated_poisson(clients, 0.5, 6),
        ):
            runs(
                remembering(clients, sampler, chunk),
                [2, 8],
                clients=clients,
                sampler=sampler.scheme,
                chunk=chunk,
            )
    for options in (dict(chunk=2), RANDOM):
        grids(
            [
                2,
                4,
                "auto",
                jax.make_mesh((2, 4), ("points", "clients")),
                jax.make_mesh((8,), ("clients",)),
            ],
            "scaffold",
            **options,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
