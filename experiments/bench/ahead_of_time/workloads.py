"""The plans that are compiled, as shapes: nothing of the size of their data is allocated.

Numbers of W1, W2, W3 and W5 are those of `experiments/bench/peers/workloads.py`, which the clock
times; W6 is that of `experiments/bench/round.py`.  The test set has 10,000 rows.
"""

import dataclasses
import hashlib
import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfl
from jfl.core.records import Federation

PEERS = str(Path(__file__).parents[1] / "peers")
TEST_ROWS = 10_000
CLASSES = 10
W6 = dict(
    level="record",
    features=(40,),
    clients=100,
    rows=4000,
    hidden=(),
    cohort=20,
    steps=50,
    batch=800,
    lr=0.01,
    clip=1.0,
    noise=120.0,
)
ALGORITHMS = tuple(jfl.algorithms.__all__)
MODES = dict(
    private="the workload's noise",
    plain="neither clip nor noise",
    clipped="no noise",
    threefry="noise by the key's own generator",
    vmap="every example's gradient formed",
    bfloat16="losses computed in bfloat16",
    wavelet="noise of Haar bands",
    per_layer="a clip for each leaf",
    adaptive="an adaptive clip of uploads",
    poisson="a Poisson cohort",
    poisson_batch="Poisson batches",
    upload="noise on every upload",
    adam="DP-Adam on clients",
)
CHANGES = {"clients", "rows", "cohort", "steps", "batch", "hidden", "clip", "noise", "lr", "chunk"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A plan as shapes, what it was made of, and a hash of it."""

    name: str
    modes: tuple
    algorithm: str
    numbers: dict
    plan: jfl.Plan

    def about(self) -> dict:
        """What a goal is measured on.

        The slots of a Poisson cohort and the size of a chunk are how a plan is computed, and stay
        out of it.
        """
        plan = self.plan
        params = jax.eval_shape(plan.task.init, jax.eval_shape(lambda: jax.random.key(0)))
        shown = lambda tree: [f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(tree)]
        fed = plan.fed
        return dict(
            workload=self.name,
            modes=sorted(self.modes),
            algorithm=self.algorithm,
            numbers={k: v for k, v in sorted(self.numbers.items()) if k != "chunk"},
            rows=shown((fed.x, fed.y, fed.index, fed.x_test, fed.y_test)),
            model=shown(params),
            sampler=[plan.sampler.scheme, plan.sampler.clients],
            steps=steps_of(plan),
        )

    def hash(self) -> str:
        """Sixteen digits of the sha256 of `about`."""
        text = json.dumps(self.about(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def cohort(self) -> dict:
        """Clients a round: the mean, and the slots that are computed."""
        mean = self.numbers["clients" if self.plan.sampler.scheme == "full" else "cohort"]
        return dict(mean=mean, capacity=self.plan.sampler.capacity)


def _peers():
    """The numbers of the workloads that are timed."""
    if PEERS not in sys.path:
        sys.path.append(PEERS)
    return importlib.import_module("workloads").WORKLOADS | dict(W6=W6)


def names() -> list:
    """Of all workloads."""
    return list(_peers())


def workload(
    name: str,
    modes=("private",),
    algorithm: str = "fedavg",
    fed: Federation | None = None,
    **change,
) -> Workload:
    """A workload by name.

    Args:
        modes: of MODES, one change of the workload each.
        fed: the rows, as of `random_rows`; None: shapes alone.
        change: numbers in place of the workload's own, of CHANGES.

    Raises:
        ValueError: for other names.
    """
    for what, known, given in (
        ("workload", set(names()), {name}),
        ("mode", set(MODES), set(modes)),
        ("algorithm", set(ALGORITHMS), {algorithm}),
        ("number", CHANGES, set(change)),
    ):
        if given - known:
            raise ValueError(f"no {what} {sorted(given - known)}; known: {sorted(known)}")
    numbers = _peers()[name] | change
    if fed is not None:
        return Workload(
            name, tuple(modes), algorithm, numbers, _plan(fed, numbers, modes, algorithm)
        )
    held = []

    def make(*arrays):
        held.append(_plan(Federation(*arrays, classes=CLASSES), numbers, modes, algorithm))
        return held[0]

    shapes, form = jax.tree.flatten(jax.eval_shape(make, *_arrays(numbers)))
    # numbers that are no data keep their values, by which a sweep tells what differs
    leaves = [
        value if isinstance(value, (np.ndarray, np.generic)) else shape
        for value, shape in zip(jax.tree.leaves(held[0]), shapes)
    ]
    return Workload(name, tuple(modes), algorithm, numbers, form.unflatten(leaves))


def random_rows(name: str, **change) -> Federation:
    """Rows of a workload's shapes, normal, each client's next to each other."""
    numbers, rng = _peers()[name] | change, np.random.default_rng(0)
    clients, rows = numbers["clients"], numbers["rows"]
    normal = lambda shape: jnp.asarray(rng.standard_normal(shape.shape, np.float32))
    labels = lambda shape: jnp.asarray(rng.integers(0, CLASSES, shape.shape, np.int32))
    x, y, _, _, x_test, y_test, test_index, test_size = _arrays(numbers)
    return Federation(
        normal(x),
        labels(y),
        jnp.arange(clients * rows, dtype=jnp.int32).reshape(clients, rows),
        jnp.full(clients, rows, jnp.int32),
        normal(x_test),
        labels(y_test),
        *(jnp.zeros(v.shape, v.dtype) for v in (test_index, test_size)),
        classes=CLASSES,
    )


def _plan(fed, numbers, modes, algorithm):
    return _Maker(fed, numbers, modes).plan(algorithm)


def _features(numbers):
    return tuple(numbers.get("image") or numbers.get("features", (784,)))


def _arrays(numbers):
    """The arrays of a federation, as shapes."""
    clients, rows, features = numbers["clients"], numbers["rows"], _features(numbers)
    whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    real = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return (
        real(clients * rows, *features),
        whole(clients * rows),
        whole(clients, rows),
        whole(clients),
        real(TEST_ROWS, *features),
        whole(TEST_ROWS),
        whole(clients, 0),
        whole(clients),
    )


def _conv5():
    return importlib.import_module("jfl_peer").Conv5()


class _Maker:
    """The parts of a plan."""

    def __init__(self, fed, numbers, modes):
        self.fed, self.numbers, self.modes = fed, numbers, set(modes)
        self.is_record = numbers["level"] == "record"
        self.task = self._task()

    def _task(self):
        if "image" not in self.numbers:
            hidden = tuple(self.numbers["hidden"])
            return jfl.models.mlp(self.fed, hidden) if hidden else jfl.models.logistic(self.fed)
        if self.numbers["parameters"] < 1e6:
            return jfl.models.cnn(self.fed)
        return jfl.models.flax(self.fed, _conv5())

    def _clip_and_noise(self):
        """The stages of a private sum."""
        bound, noise = self.numbers["clip"], self.numbers["noise"] / 2  # replace one doubles it
        generator = "key" if "threefry" in self.modes else "philox"
        shape, clip = None, jfl.clip_l2(bound)
        params = jax.eval_shape(self.task.init, jax.eval_shape(lambda: jax.random.key(0)))
        if "wavelet" in self.modes:
            first = _features(self.numbers)
            side = math.isqrt(first[0])
            image = first[:2] if len(first) > 1 else (side, side)
            bands = jfl.bands.pixels(params, image) if self.is_record else jfl.bands.flat(params)
            shape = jfl.wavelet.ellipsoid(bands)
            clip = jfl.wavelet.clip_ellipsoid(bound, shape)
        elif "per_layer" in self.modes:
            clip = jfl.clip_per_layer(bound, layers=len(jax.tree.leaves(params)))
        elif "adaptive" in self.modes:
            clip = jfl.clip_adaptive(bound, self.numbers["cohort"])
        noises = [jfl.gaussian(noise, shape=shape, generator=generator)]
        return clip, jfl.total(), *([] if "clipped" in self.modes else noises)

    def _sampler(self, algorithm):
        clients, cohort = self.numbers["clients"], self.numbers["cohort"]
        if algorithm == "padpfl":
            return jfl.sampling.full(clients)
        if "poisson" in self.modes:
            return jfl.sampling.poisson(clients, cohort / clients)
        return jfl.sampling.without_replacement(clients, cohort)

    def _batch(self):
        if "poisson_batch" in self.modes:
            return jfl.batches.poisson(self.numbers["batch"])
        scheme = jfl.batches.without_replacement if self.is_record else jfl.batches.epochs
        return scheme(self.numbers["batch"])

    def plan(self, algorithm):
        """Noise stands in every local step, in the mechanism of a client, on every upload or on the
        release, as the level, the algorithm and the modes say."""
        stages = self._clip_and_noise()
        private = "plain" not in self.modes
        on_upload = private and ("upload" in self.modes or algorithm == "padpfl")
        in_client = algorithm == "output_perturbation"
        on_release = private and not (self.is_record or on_upload or in_client)
        compute = "bfloat16" if "bfloat16" in self.modes else "float32"
        options: dict[str, Any] = dict(lr=self.numbers["lr"], batch=self._batch())
        if algorithm != "fedsgd":
            options["steps"] = self.numbers["steps"]
        if "adam" in self.modes:
            options["optimizer"] = optax.adam
        if in_client:
            options["mechanism"] = jfl.chain(*stages, jfl.divide(1))
        grad = jfl.grad(self.task.loss, compute=compute)
        if private and self.is_record and not on_upload and not in_client:
            path = "vmap" if "vmap" in self.modes else "auto"
            chain = jfl.chain(*stages, jfl.divide(self.numbers["batch"]))
            grad = jfl.private_grad(self.task.loss, chain, path=path, compute=compute)
        return jfl.plan(
            self.fed,
            self.task,
            getattr(jfl.algorithms, algorithm)(grad, **options),
            self._sampler(algorithm),
            upload=jfl.chain(*stages) if on_upload else None,
            release=jfl.chain(*stages, jfl.divide(self.numbers["cohort"])) if on_release else None,
            chunk=self.numbers.get("chunk"),
        )


def steps_of(plan: jfl.Plan) -> int:
    """Local steps of a plan's clients."""
    is_work = lambda node: hasattr(node, "steps") and hasattr(node, "batches")
    found = jax.tree.leaves(plan.algorithm, is_leaf=is_work)
    return max((node.steps for node in found if is_work(node)), default=1)
