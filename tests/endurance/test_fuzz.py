"""Bad input at scale: whatever comes, the answer is a result or a refusal that says where, what was
needed, what came.

Hypothesis here; what reads files is also fuzzed by coverage, by
`python tests/endurance/fuzz_readers.py SECONDS`.
"""

import contextlib
import io
import json
import re
import sys
import warnings
from decimal import Decimal
from fractions import Fraction
from unittest import mock

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from endurance import fuzz_readers as readers
from helpers.problems import make_federation, squared, start_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jfl
from experiments.papers import as_printed
from jfl import (
    algorithms,
    corruption,
    datasets,
    partition,
    sampling,
    schedules,
    transforms,
    wavelet,
)
from jfl.analysis import heterogeneity, public_data
from jfl.cli import main
from jfl.core.errors import ArgumentError
from jfl.runs import config, train
from jfl.sampling import batches
from jfl.sampling.weights import impact

FEW = settings(
    max_examples=120,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=6000)
RAGGED, KEY = [[1], [2, 3]], jax.random.key(0)

# --- the public API

HUGE = [10**9, 10**12, 2**31, 2**63, 10**400, -(10**400)]
ODD = [
    None,
    float("nan"),
    float("inf"),
    1e-60,
    1e300,
    "é∞",
    "",
    True,
    1j,
    object(),
    RAGGED,
    [],
    (),
    {},
    {"a": 1},
    {1},
    b"x",
    KEY,
    int,
    print,
    lambda: 1,
    lambda x: x,
    lambda *a: "abc",
    Decimal(1),
    Fraction(1, 2),
    range(3),
    jnp.float32(2),
    jnp.ones(1),
    jnp.zeros((0,)),
    jnp.bfloat16(1),
    np.array([None]),
    np.array(3),
    np.array(0.5),
    np.zeros((0, 3)),
    np.float16(1),
    np.uint8(200),
    np.datetime64("2020"),
    *HUGE,
]
WILD = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(ODD),
    st.integers(-3, 9),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.complex_numbers(),
    hnp.scalar_dtypes().flatmap(hnp.from_dtype),
    st.tuples(
        hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
    ).flatmap(lambda p: hnp.arrays(*p)),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers(-2, 2) | st.text(max_size=2),
        lambda s: st.lists(s, max_size=3),
        max_leaves=5,
    ),
)

X, Y = np.ones((40, 2), np.float32), np.arange(40) % 4
ROWS = datasets.arrays(X, Y, X, Y)
FED, REAL = make_federation(classes=3), make_federation()
IMAGES = jfl.federate(
    (
        np.ones((12, 8, 8, 1), np.float32),
        np.arange(12) % 3,
        np.ones((3, 8, 8, 1), np.float32),
        np.arange(3),
    ),
    partition.iid(3),
)
CHAIN = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.1), jfl.divide(3.0))
ONCE = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.1))
GRAD, PLAIN, BATCH = (
    jfl.private_grad(squared, CHAIN),
    jfl.grad(squared),
    batches.without_replacement(2),
)
BANDS = jfl.bands.per_layer(start_params())
LOCAL = dict(lr=0.1, steps=2, batch=BATCH, server_lr=1.0)
SYNTHETIC = dict(
    alpha=0.0,
    beta=0.0,
    clients=3,
    rows=60,
    features=4,
    classes=3,
    label_noise=0.05,
    means="entry",
    scale="variance",
    iid=False,
    sizes="equal",
    skew=2.0,
    min_rows=5,
    test_fraction=0.2,
    seed=0,
)


TASK, PARAMS, SEED = jfl.task(start_params(), squared), start_params(), jax.random.key(0)
XP, YP = (
    np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    np.arange(8, dtype=np.float32),
)
PLAN = jfl.plan(REAL, TASK, algorithms.fedavg(GRAD, steps=2, batch=BATCH), sampling.full(7))


def claimable(algorithm, upload=None, release=None, of=None):
    return jfl.plan(REAL, TASK, algorithm, of or sampling.full(7), upload=upload, release=release)


UPLOADS = claimable(
    algorithms.fedavg(PLAIN, batch=BATCH), upload=ONCE
)  # an exact Gaussian, which costs little
# a plan for each paper
CLAIMED = dict(
    noble2022=PLAN,
    chen2024=claimable(algorithms.dpnfl(GRAD, batch=BATCH)),
    li2025=claimable(algorithms.output_perturbation(PLAIN, mechanism=ONCE, steps=1, batch=BATCH)),
    ranaweera2025=claimable(
        algorithms.fedavg(PLAIN, batch=BATCH),
        release=jfl.chain(
            *(
                (pair := wavelet.published("R5", 1.0, 1.0, BANDS))[0],
                jfl.total(),
                pair[1],
                jfl.divide(3.0),
            )
        ),
        of=sampling.without_replacement(7, 3),
    ),
    talaei2024=claimable(
        algorithms.padpfl(PLAIN, mu=0.1, batch=BATCH),
        upload=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0)),
    ),
)


class Begun(Exception):
    """A run would begin now: nothing is wrong with what it was asked."""


def begins(function, *steps):
    """`function` up to the first of `steps`, module:name, which would compute for long."""

    def until(**given):
        with contextlib.ExitStack() as stack, contextlib.suppress(Begun):
            for step in steps:
                module, name = step.split(":")
                stack.enter_context(mock.patch.object(sys.modules[module], name, side_effect=Begun))
            return function(**given)

    return until


def dealt(make):
    return lambda **given: make(**given)(Y)


def at_3(make):
    return lambda **given: make(**given)(jnp.int32(3))


FEW_CLIENTS = make_federation(sizes=(3, 4))
PROXY = dict(task=squared, params=PARAMS, x=XP, y=YP)

# where -> (function, arguments that it takes): a wild value replaces one or two of them
API = {
    "datasets.arrays": (datasets.arrays, dict(x=X, y=Y, x_test=X, y_test=Y, classes=4, name="n")),
    "datasets.digits": (datasets.digits, dict(test_fraction=0.2, seed=0)),
    "datasets.emnist": (datasets.emnist, dict(split="letters", data_dir="/nowhere")),
    "datasets.synthetic": (datasets.synthetic, SYNTHETIC),
    "datasets.synthetic ": (datasets.synthetic, SYNTHETIC | dict(sizes="lognormal")),
    "datasets.synthetic  ": (datasets.synthetic, SYNTHETIC | dict(sizes="power_law")),
    "partition.iid": (dealt(partition.iid), dict(clients=3, seed=0)),
    "partition.dirichlet": (
        dealt(partition.dirichlet),
        dict(clients=3, alpha=0.5, min_rows=1, balanced=False, seed=0),
    ),
    "partition.shards": (dealt(partition.shards), dict(clients=3, classes_per_client=2, seed=0)),
    "partition.labels": (
        dealt(partition.labels),
        dict(clients=3, classes_per_client=2, rows=6, exponent=0.5, min_rows=2, seed=0),
    ),
    "partition.power_law": (
        dealt(partition.power_law),
        dict(clients=3, exponent=1.0, min_rows=1, seed=0),
    ),
    "partition.similarity": (
        dealt(partition.similarity),
        dict(clients=3, share=0.5, rows=4, by="class", seed=0),
    ),
    "partition.sizes": (dealt(partition.sizes), dict(rows=[2, 3], classes_per_client=2, seed=0)),
    "partition.natural": (dealt(partition.natural), dict(owners=Y, seed=0)),
    "partition.iid ": (partition.iid(3).assign, dict(labels=Y)),
    "partition.dirichlet ": (partition.dirichlet(3, 0.3).assign, dict(labels=Y)),
    "sampling.full": (sampling.full, dict(clients=3)),
    "sampling.without_replacement": (sampling.without_replacement, dict(clients=3, cohort=2)),
    "batches.without_replacement": (batches.without_replacement, dict(batch=3, short="error")),
    "batches.with_replacement": (batches.with_replacement, dict(batch=3)),
    "batches.epochs": (batches.epochs, dict(batch=3)),
    "clip_l2": (jfl.clip_l2, dict(bound=1.0)),
    "clip_l1": (jfl.clip_l1, dict(bound=1.0)),
    "laplace": (jfl.laplace, dict(noise_multiplier=1.0)),
    "linear_maps.rotation": (
        jfl.linear_maps.rotation,
        dict(like=start_params(), seed=1, each_round=True),
    ),
    "linear_maps.projection": (
        jfl.linear_maps.projection,
        dict(like=start_params(), size=2, seed=1, each_round=True),
    ),
    "linear_maps.sparsification": (
        jfl.linear_maps.sparsification,
        dict(like=start_params(), size=2, seed=1, each_round=False),
    ),
    "clip_per_layer": (jfl.clip_per_layer, dict(bounds=1.0, layers=2)),
    "clip_adaptive": (
        jfl.clip_adaptive,
        dict(initial=1.0, count=3, quantile=0.5, lr=0.2, indicator=0.1),
    ),
    "clip_scaled": (
        jfl.clip_scaled,
        dict(bound=1.0, count=3, like=start_params(), decay=0.9, least=0.1),
    ),
    "gaussian": (jfl.gaussian, dict(noise_multiplier=1.0, generator="philox")),
    "divide": (jfl.divide, dict(n=1)),
    "bounded": (jfl.bounded, dict(value=1.0, reason="upload")),
    "chain": (
        lambda first, last, adjacency: jfl.chain(first, last, adjacency=adjacency),
        dict(first=jfl.clip_l2(1.0), last=jfl.total(), adjacency=None),
    ),
    "grad": (lambda **given: jfl.grad(squared, **given), dict(l2=0.1, compute="float32")),
    "private_grad": (
        lambda **given: jfl.private_grad(squared, **given),
        dict(mechanism=CHAIN, l2=0.1, microbatch=2, path="auto", compute="float32"),
    ),
    "task": (jfl.task, dict(params=start_params(), loss=squared, predict=squared)),
    "models": (jfl.models.logistic, dict(fed=FED)),
    "models.mlp": (jfl.models.mlp, dict(fed=FED, hidden=(3,))),
    "models.cnn": (jfl.models.cnn, dict(fed=IMAGES, channels=(2,), dense=3)),
    "fedavg": (
        algorithms.fedavg,
        dict(grad=GRAD, **LOCAL, optimizer=optax.sgd, server_optimizer=optax.sgd),
    ),
    "fedprox": (algorithms.fedprox, dict(grad=GRAD, mu=0.1, **LOCAL)),
    "fedsgd": (algorithms.fedsgd, dict(grad=GRAD, lr=0.1, batch=BATCH)),
    "scaffold": (algorithms.scaffold, dict(grad=GRAD, warm_rounds=1, **LOCAL)),
    "addpnfl": (
        algorithms.addpnfl,
        dict(
            grad=GRAD,
            **LOCAL,
            beta1=0.9,
            beta2=0.9,
            adaptivity=1e-3,
            second_moment_of="diff",
            initial=1e-6,
        ),
    ),
    "output_perturbation": (
        algorithms.output_perturbation,
        dict(grad=PLAIN, mechanism=ONCE, clip_steps="all", mu=0.1, **LOCAL),
    ),
    "padpfl": (
        algorithms.padpfl,
        dict(grad=PLAIN, mu=0.1, upload="model", mechanism=None, inexactness=0.5, **LOCAL),
    ),
    "averaged": (algorithms.averaged, dict(algorithm=algorithms.fedavg(GRAD), first=0)),
    "band_energies": (
        lambda **given: algorithms.band_energies(squared, **given),
        dict(bands=BANDS, noise_multiplier=1.0, divisor=3),
    ),
    "algorithm": (
        lambda releases: jfl.algorithm(lambda p: (p, ()), squared, squared, releases=releases),
        dict(releases=()),
    ),
    "schedules.inverse_sqrt": (at_3(schedules.inverse_sqrt), dict(lr=0.1, every=2, offset=1.0)),
    "schedules.inverse": (at_3(schedules.inverse), dict(lr=0.1, every=2, offset=1.0)),
    "schedules.exponential": (at_3(schedules.exponential), dict(initial=1.0, decay=0.5, total=3)),
    "schedules.piecewise": (schedules.piecewise, dict(breakpoints=[2], values=[1.0, 2.0])),
    "weights.impact": (impact, dict(ratios=[1.0, 2.0], groups=[1, 2])),
    "transforms.flatten": (transforms.flatten, dict(dataset=ROWS)),
    "transforms.standardise": (transforms.standardise, dict(dataset=ROWS, public=X)),
    "transforms.pca": (transforms.pca, dict(dataset=ROWS, components=1, public=X)),
    "transforms.public": (transforms.public, dict(dataset=ROWS, rows=2, seed=0)),
    "corruption.salt_and_pepper": (
        corruption.salt_and_pepper,
        dict(fed=REAL, density=0.1, seed=0, low=0, high=1, held_out=False),
    ),
    "corruption.label_noise": (
        corruption.label_noise,
        dict(fed=FED, share=0.1, seed=0, held_out=False),
    ),
    "bands.pixels": (
        lambda **given: jfl.bands.pixels({"k": jnp.zeros((64, 3))}, **given),
        dict(shape=(8, 8, 1)),
    ),
    "wavelet.ellipsoid": (wavelet.ellipsoid, dict(bands=BANDS, exponent=0.25, energies=None)),
    "wavelet.clip_ellipsoid": (
        lambda bound: wavelet.clip_ellipsoid(bound, wavelet.weighted(BANDS)),
        dict(bound=1.0),
    ),
    "wavelet.clip_bands": (wavelet.clip_bands, dict(bounds=np.ones(4), bands=BANDS)),
    "wavelet.published": (
        wavelet.published,
        dict(
            reading="R1",
            bound=1.0,
            noise_multiplier=1.0,
            bands=BANDS,
            calibration="plain",
            max_weight=1.0,
            unsound=True,
        ),
    ),
    "sampling.with_replacement": (
        sampling.with_replacement,
        dict(clients=3, cohort=2, weights=[1.0, 2.0, 3.0], independent=False),
    ),
    "sampling.poisson": (sampling.poisson, dict(clients=3, rate=0.5, capacity=2)),
    "sampling.poisson ": (sampling.poisson, dict(clients=3, rate=0.5)),
    "sampling.available_poisson": (
        sampling.available_poisson,
        dict(clients=3, rate=0.5, available=[[1, 1, 1], [0, 1, 0]], capacity=3),
    ),
    "sampling.available_poisson ": (
        sampling.available_poisson,
        dict(clients=3, rate=0.5, period=4, awake=0.5),
    ),
    "sampling.first_responders": (
        sampling.first_responders,
        dict(clients=3, cohort=2, latency=[1.0, 2.0, 3.0], jitter=0.5),
    ),
    "batches.poisson": (batches.poisson, dict(batch=3.0)),
    "batches.poisson ": (batches.poisson, dict(rate=0.5, capacity=3)),
    "transforms.unit_norm": (transforms.unit_norm, dict(dataset=ROWS)),
    "dpnfl": (algorithms.dpnfl, dict(grad=GRAD, **LOCAL)),
    "client_weights": (heterogeneity.client_weights, dict(fed=FEW_CLIENTS, weights="size")),
    "client_gradients": (
        heterogeneity.client_gradients,
        dict(task=TASK, params=PARAMS, fed=FEW_CLIENTS, l2=0.1, chunk=2),
    ),
    "gradient_dissimilarity": (
        heterogeneity.gradient_dissimilarity,
        dict(task=squared, params=PARAMS, fed=FEW_CLIENTS, weights="size", l2=0.1, chunk=None),
    ),
    "public_data.gradient_norms": (public_data.gradient_norms, PROXY | dict(microbatch=2)),
    "public_data.median_norm": (public_data.median_norm, PROXY | dict(quantile=0.5, microbatch=2)),
    "public_data.update_norms": (
        begins(public_data.update_norms, "jfl.analysis.public_data:_updates"),
        PROXY | dict(clients=2, steps=2, batch=BATCH, lr=0.1, key=SEED),
    ),
    "public_data.band_energies": (
        public_data.band_energies,
        PROXY | dict(bands=BANDS, microbatch=2),
    ),
    **{
        f"as_printed claimed {p}": (
            as_printed.claimed,
            dict(plan=plan, rounds=2, delta=1e-5, paper=p, view=as_printed.views(plan)[0]),
        )
        for p, plan in CLAIMED.items()
    },
    **{
        f"as_printed calibrate {p}": (
            as_printed.calibrate,
            dict(
                plan=plan,
                epsilon=50.0,
                rounds=2,
                delta=1e-5,
                paper=p,
                view=as_printed.views(plan)[0],
            ),
        )
        for p, plan in CLAIMED.items()
        if p in ("noble2022", "li2025", "talaei2024")
    },  # those that are a formula
    "as_printed claims": (
        as_printed.claims,
        dict(plan=PLAN, rounds=2, delta=1e-5, paper=None),
    ),
    "as_printed views": (as_printed.views, dict(plan=PLAN, paper=None)),
    "simulate": (
        begins(jfl.simulate, "jfl.engine.simulate:_scan"),
        dict(key=SEED, plan=PLAN, rounds=2, evaluate_every=1, start=None, tolerate=(), mesh=None),
    ),
    "sweep": (
        begins(jfl.sweep, "jfl.engine.sweep:_Program"),
        dict(
            make_plan=lambda lr: PLAN,
            rounds=2,
            points=None,
            lr=[0.1, 0.2],
            seed=0,
            evaluate_every=1,
            memory=1e9,
            strict=False,
            tolerate=(),
            mesh=None,
            watch=None,
        ),
    ),
    "sweep ": (
        begins(jfl.sweep, "jfl.engine.sweep:_Program"),
        dict(make_plan=lambda **given: PLAN, rounds=2, points=[dict(a=1), dict(seed=2)]),
    ),
    "scan": (
        begins(jfl.scan, "jfl.engine.round:derive_noise_key"),
        dict(run=jfl.init(SEED, PLAN), plan=PLAN, rounds=[1, 1]),
    ),
    "run_round": (
        begins(jfl.run_round, "jfl.engine.round:run_noise_key"),
        dict(run=jfl.init(SEED, PLAN), plan=PLAN),
    ),
    "init": (jfl.init, dict(key=SEED, plan=PLAN)),
    "describe": (jfl.describe, dict(plan=PLAN)),
    "mesh": (jfl.mesh.devices, dict(mesh="auto", points=2)),
    "plan ": (
        jfl.plan,
        dict(
            fed=REAL,
            task=TASK,
            algorithm=algorithms.fedavg(GRAD, batch=BATCH),
            sampler=sampling.full(7),
        ),
    ),
    "plan": (
        jfl.plan,
        dict(
            fed=REAL,
            task=TASK,
            algorithm=algorithms.fedavg(GRAD, batch=BATCH),
            sampler=sampling.full(7),
            upload=None,
            release=CHAIN,
            weights="uniform",
            adjacency=None,
            chunk=2,
            paired_noise=False,
        ),
    ),
    "federate": (
        jfl.federate,
        dict(dataset=(X, Y), partition=partition.iid(3), holdout=0.2, test=(X, Y)),
    ),
    "population": (
        jfl.population,
        dict(
            rows=(X, Y),
            sizes=[10, 30],
            test=(X, Y),
            order=None,
            classes=4,
            fields=("a", "b"),
            prepare=None,
            caveats=(),
        ),
    ),
    "jfl.guarantee": (
        jfl.guarantee,
        dict(
            plan=UPLOADS,
            rounds=3,
            delta=1e-5,
            unit="client",
            view="server",
            adjacency=None,
            cap=2,
            quantile=None,
            realised=None,
            uplinks=0,
        ),
    ),
    "jfl.guarantees": (jfl.guarantees, dict(plan=UPLOADS, rounds=3, delta=1e-5)),
    "jfl.epsilons": (
        jfl.epsilons,
        dict(plan=UPLOADS, rounds=[1, 2], delta=1e-5, unit="client", view="server", adjacency=None),
    ),
    "jfl.calibrate": (
        jfl.calibrate,
        dict(
            plan=UPLOADS,
            epsilon=2.0,
            delta=1e-5,
            rounds=3,
            unit="client",
            view="server",
            adjacency=None,
            over="noise_multiplier",
        ),
    ),
}
# what a function is made of says its own name
PARTS = (
    "algorithm",
    "optimizer",
    "gaussian",
    "divide",
    "bands",
    "datasets",
    "models",
    "clip_l2",
    "private_grad",
    "client_weights",
    "client_gradients",
    "optimum",
    "jfl.guarantee",
    "simulate",
    "noble2022",
    "chen2024",
    "li2025",
    "talaei2024",
    "mesh",
    "scan",
)


OF_ROWS = ("corruption", "datasets", "federate", "partition", "population", "transforms")


def answered(where, function, given):
    """The refusal, or None for a result; anything else is a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**given)
    except Exception as error:
        said = str(error)
        if where.startswith(OF_ROWS) and not isinstance(error, ArgumentError):
            return said  # NumPy and Python name what is wrong with a value
        if not isinstance(error, ValueError):
            raise
        assert readers.FORM.match(said), (where, given, said)
        assert said.startswith(where.split()[0]) or said.startswith(PARTS), (where, given, said)
        assert len(said) < 3000, (where, said[:200])
        return said


@st.composite
def calls(draw):
    where = draw(st.sampled_from(sorted(API)))
    function, takes = API[where]
    names = draw(st.lists(st.sampled_from(sorted(takes)), min_size=1, max_size=2, unique=True))
    return where, function, takes | {name: draw(WILD) for name in names}


@FEW
@given(calls())
def test_wild_arguments_are_taken_or_refused(call):
    answered(*call)


@pytest.mark.slow
@MANY
@given(calls())
def test_many_wild_arguments_are_taken_or_refused(call):
    answered(*call)


@pytest.mark.parametrize("where", sorted(API))
def test_arguments_that_no_fuzz_may_miss(where):
    """Each argument as nothing, as a list of unequal lengths, as a key, as an empty array and as
    more than any machine holds."""
    function, takes = API[where]
    assert (
        where == "datasets.emnist" or answered(where, function, takes) is None
    )  # its own arguments are taken
    for name in takes:
        for value in (
            None,
            RAGGED,
            KEY,
            np.zeros((0, 3)),
            np.array([1.0, 2.0]),
            10**400,
            10**12,
            float("nan"),
        ):
            answered(where, function, takes | {name: value})


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: datasets.synthetic(clients=10**9), "clients <= 53687091"),
        (lambda: datasets.synthetic(clients=3, rows=10**9), "sum of rows <= 53687091"),
        (lambda: datasets.synthetic(clients=3, features=10**9), "clients <= 2"),
        (lambda: datasets.synthetic(clients=3, rows=60, alpha=[1.0, 2.0]), "a single number alpha"),
        (
            lambda: datasets.synthetic(clients=3, rows=60, means=np.array(["entry", "client"])),
            "means to be one of",
        ),
        (lambda: sampling.full(10**12), "clients <= 2147483647"),
        (lambda: algorithms.fedavg(GRAD, server_lr=-1.0), "server_lr > 0"),
        (lambda: algorithms.fedavg(GRAD, steps=10**12), "steps <= 2147483647"),
        (
            lambda: corruption.label_noise(FED, 0.1, seed=np.timedelta64("NaT", "s")),
            "an integer seed",
        ),
        (lambda: jfl.models.mlp(None), "fed of jfl.federate"),
        (lambda: jfl.models.mlp(FED, 64), "hidden, a list"),
        (lambda: jfl.task("params", squared), "pytree of numbers"),
        (lambda: schedules.inverse_sqrt(0.1, every=2**31), "every <= 2147483647"),
        (lambda: schedules.piecewise([1], jnp.float32(2)), "2 values"),
        (lambda: partition.iid(3).assign(RAGGED), "labels as an array"),
        (lambda: corruption.label_noise(FED, "many"), "share >= 0"),
        (lambda: jfl.guarantee(None, 3), "a Plan and rounds"),
        (lambda: jfl.epsilons(None, [1]), "plan of jfl.plan"),
        (lambda: jfl.private_grad(squared, CHAIN, l2=10**5000), "cannot be printed"),
        (
            lambda: algorithms.band_energies(squared, None, noise_multiplier=1.0),
            "bands of jfl.bands",
        ),
        (lambda: sampling.with_replacement(3, 2, independent=[1]), "independent to be one of"),
        (lambda: jfl.simulate(SEED, PLAN, 10**9, evaluate_every=1), "at most 10000000 evaluations"),
        (lambda: jfl.describe(None), "plan of jfl.plan"),
        (lambda: jfl.simulate(jax.random.split(SEED), PLAN, 2), "a key such as"),
        (
            lambda: public_data.update_norms(
                **PROXY, clients=2, steps=2, batch=BATCH, lr=0.1, key=3
            ),
            "a key such as",
        ),
        (lambda: jfl.scan(None, PLAN, [1]), "run of jfl.init"),
        (lambda: jfl.scan(jfl.init(SEED, PLAN), None, [1]), "plan of jfl.plan"),
        (lambda: jfl.scan(jfl.init(SEED, PLAN), PLAN, 3), "rounds Int[E]"),
        (lambda: jfl.sweep(lambda lr: PLAN, rounds=2, a=[1]), "to take ['a']"),
        (lambda: jfl.sweep(lambda lr: None, rounds=2, lr=[1]), "plan of make_plan"),
        (
            lambda: jfl.sweep(lambda **given: PLAN, rounds=2, points=[{1: 2}]),
            "each a dict of arguments",
        ),
        (
            lambda: jfl.sweep(lambda **given: PLAN, rounds=2, points=["ab"]),
            "each a dict of arguments",
        ),
        (lambda: jfl.sweep(lambda lr: PLAN, rounds=2, lr=[1], memory=0), "memory > 0"),
        (lambda: jfl.sweep(lambda lr: PLAN, rounds=2, lr=[1], strict="no"), "strict to be one of"),
        (lambda: jfl.sweep(lambda lr: PLAN, rounds=2, lr=[1], tolerate=None), "tolerate, a list"),
        (lambda: heterogeneity.client_weights(FED, ["1"] * 7), "weights >= 0 of shape [7]"),
        (
            lambda: heterogeneity.client_gradients(lambda w, x, y: y, {}, FEW_CLIENTS),
            "a pytree of floats",
        ),
    ],
)
def test_found_by_the_fuzz(call, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        call()
    assert readers.FORM.match(str(caught.value))


def test_what_the_checks_must_not_refuse():
    """Params of plain numbers; fixed rates over many rounds; old keys."""
    plain = {"b": 0.2, "w": np.array([0.5, -0.3, 0.1])}
    assert public_data.median_norm(squared, plain, XP, YP) == public_data.median_norm(
        squared, PARAMS, XP, YP
    )
    assert (
        as_printed.claimed(CLAIMED["li2025"], 10**9).epsilon
        == as_printed.claimed(CLAIMED["li2025"], 1).epsilon
    )
    begins(jfl.simulate, "jfl.engine.simulate:_scan")(
        key=jax.random.PRNGKey(0), plan=PLAN, rounds=10**9
    )


ACCOUNTED = dict(
    delta=(None, "a", np.nan, 0, 1, 10**400, RAGGED, KEY, [1e-5]),
    rounds=(None, 0, -1, 10**400, 2.5, RAGGED, True),
    unit=("user", RAGGED, np.array(["example"]), 3),
    view=("nobody", "all", KEY),
    adjacency=("none", np.zeros(0)),
)


@pytest.fixture(scope="module")
def plan():
    return jfl.plan(
        REAL,
        jfl.task(start_params(), squared),
        algorithms.fedavg(GRAD, batch=BATCH),
        sampling.full(7),
    )


@pytest.mark.parametrize("name", ACCOUNTED)
def test_accountants_refuse_alike(plan, name):
    for value in ACCOUNTED[name]:
        for function in (jfl.guarantee, jfl.calibrate):
            given = (
                dict(plan=plan, rounds=3)
                | (dict(epsilon=1.0) if function is jfl.calibrate else {})
                | {name: value}
            )
            assert answered("jfl.", function, given)
    for value in (None, "a", np.nan, -1, 0, 10**400, RAGGED, [1.0, np.inf]):
        assert answered("jfl.calibrate", jfl.calibrate, dict(plan=plan, rounds=3, epsilon=value))


# --- the command line

LITERALS = [
    '"abc"',
    '""',
    '"é∞"',
    '"a\\nb\\u0000"',
    "nan",
    "-inf",
    "inf",
    "-1",
    "0",
    "1",
    "2",
    "3",
    "0.5",
    "1.0",
    "1e-60",
    "1e-5",
    "1e300",
    "1000000000",
    "2147483648",
    "4294967296",
    "1" + "0" * 400,
    "1" + "0" * 5000,
    "true",
    "false",
    "2020-01-01",
    "[]",
    "[1, 2]",
    "[nan]",
    "[-1]",
    "[1000000000]",
    "[[1]]",
    "[0.5, 0.5]",
    "{a = 1}",
]
NAMED = dict(
    algorithm=algorithms.__all__,
    partition=partition.__all__,
    sampler=sampling.__all__,
    batch_sampler=batches.__all__,
    clip=("flat", "per_layer", "adaptive"),
    unit=("example", "client"),
    noise_shape=("ellipsoid", "published"),
    mode=("as_printed",),
    view=("server", "third_party"),
    adjacency=("add_remove", "replace_one"),
    paper=("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024"),
    optimizer=("momentum", "adam"),
    lr_schedule=("inverse", "inverse_sqrt"),
    weights=("size",),
    model=("logistic", "mlp", "cnn"),
)
SMALL = dict(
    dataset="digits",
    partition="iid",
    clients=4,
    model="logistic",
    rounds=2,
    steps=1,
    batch=2,
    noise_multiplier=1.0,
)
# what would be slow although it is right; the rest is refused or stops before a program is compiled
SLOW = {
    "epsilon",
    "delta",
    "per_client_noise",
    "clip_decay",
    "noise_decay",
    "dataset",
    "preprocess",
}


@contextlib.contextmanager
def not_begun(out):
    raise Begun
    yield


def told(monkeypatch, argv):
    """A command in this process -> its exit code, None where a run would begin, and what it said on
    stderr."""
    said = io.StringIO()
    with (
        monkeypatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(train, "locked", not_begun)
        patch.setattr("jfl.runs.sweep.locked", not_begun)
        try:
            code = main.main([str(a) for a in argv])
        except Begun:
            code = None
    return code, said.getvalue()


def judged(code, said, argv, out):
    assert code in (None, 0, 2, 3), (code, argv)
    assert "Traceback" not in said, (argv, said)
    if code == 2:
        words = said.replace("\n", " ")
        parser = re.search(
            r"Parsing error|Unrecognized|Missing|Required|invalid|─", words
        )  # tyro says what it takes
        assert parser or re.search(r"jfl \w+: .*expected .*, but got ", words), (argv, said)
    assert not out.exists(), (argv, said)


@st.composite
def configs(draw, slow=False):
    """The text of a config: a small one with one to three fields replaced, by words that exist or
    by anything."""
    lines = {k: json.dumps(v) for k, v in SMALL.items()}
    names = sorted(config.FIELDS if slow else config.FIELDS.keys() - SLOW)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        exists = [json.dumps(v) for v in NAMED.get(name, ())]
        lines[name] = draw(st.sampled_from(exists * 9 + LITERALS))
    return "".join(f"{k} = {v}\n" for k, v in lines.items()) + draw(
        st.sampled_from([""] * 9 + ["[", "lrr = 1", "a = 1\na = 2", "\\"])
    )


def commanded(monkeypatch, folder, command, text):
    (folder / "c.toml").write_text(text, encoding="utf-8")
    out = folder / "out"
    argv = [command, "--config", folder / "c.toml", "--out", out] + (
        ["--sweep", "seed=0,1"] if command == "sweep" else []
    )
    judged(*told(monkeypatch, argv), (argv, text), out)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    assert jax.config.jax_compilation_cache_dir is not None  # where all tests have their programs


@settings(FEW, max_examples=16)
@given(st.sampled_from(["train", "train", "sweep"]), configs())
def test_wild_configs_are_run_or_refused(monkeypatch, tmp_path_factory, command, text):
    commanded(monkeypatch, tmp_path_factory.mktemp("wild"), command, text)


@pytest.mark.slow
@settings(FEW, max_examples=500)
@given(st.sampled_from(["train", "sweep"]), configs(slow=True))
def test_many_wild_configs_are_run_or_refused(monkeypatch, tmp_path_factory, command, text):
    commanded(monkeypatch, tmp_path_factory.mktemp("wild"), command, text)


WORDS = st.sampled_from(
    [
        "--rounds",
        "--lr",
        "--delta",
        "--out",
        "--config",
        "--seed",
        "--sweep",
        "--epsilon",
        "--noise-multiplier",
        "--plot",
        "--rate",
        "--unit",
        "--over",
        "--help",
        "--resume",
        "--rows",
        "--batch",
        "-1",
        "0",
        "1e400",
        "nan",
        "x",
        "",
        "=",
        "lr=1,2",
        "rate=",
        "é",
        "--",
        "-",
        "9" * 400,
        "client",
        "x.png",
        "/no/such/file",
        "--strict",
        "--nonsense",
    ]
)


@settings(FEW, max_examples=25)
@given(
    st.sampled_from(
        ["train", "sweep", "epsilon", "calibrate", "report", "list", "demo", "nonsense"]
    ),
    st.lists(WORDS, min_size=1, max_size=4),
)
def test_wild_words_are_answered(monkeypatch, tmp_path_factory, command, words):
    folder = tmp_path_factory.mktemp("words")
    monkeypatch.chdir(folder)
    code, said = told(
        monkeypatch,
        [command, *words, "--nonsense"]
        if command in ("epsilon", "calibrate", "demo")
        else [command, *words],
    )
    assert code in (None, 0, 2) and "Traceback" not in said, (command, words, said)
    assert not list(folder.iterdir()), (command, words)


def numbers_of(folder):
    """Every file of a run, read as strictly as JSON and CSV allow."""

    def refuse(text):
        raise AssertionError(text)

    for path in folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    assert not re.search(
        r"\b(nan|inf|infinity)\b", (folder / "metrics.csv").read_text(), re.IGNORECASE
    )


@pytest.mark.filterwarnings("ignore:sweep. the point")
def test_a_run_that_goes_wrong_leaves_no_nan(tmp_path):
    """A point of a sweep goes where its loss is no number: it is left empty, the other is whole,
    all files are JSON."""
    out, small = (
        tmp_path / "out",
        [f"--{k.replace('_', '-')}={v}" for k, v in SMALL.items() if k != "noise_multiplier"],
    )
    assert main.main(["sweep", *small, "--sweep", "lr=0.1,1e38", "--out", str(out)]) == 0
    numbers_of(out)
    good, bad = json.loads((out / "summary.json").read_text())["runs"]
    assert good["loss"] > 0 and (bad["loss"] is None or bad["failed"])


# --- readers


def read(folder, name, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            readers.TARGETS[name](folder, data)
        except ValueError as error:
            assert readers.legal(error), (name, data, error)
            return str(error)


@pytest.mark.parametrize("name", readers.TARGETS)
def test_seeds_and_wild_bytes_are_read_or_refused(name, tmp_path):
    for data in readers.seeds(name):
        read(tmp_path, name, data)

    @settings(FEW, max_examples=40)
    @given(
        st.binary(max_size=60)
        | st.tuples(st.just(b"\1"), st.binary(min_size=1, max_size=10)).map(b"".join)
    )
    def wild(data):
        read(tmp_path, name, data)

    wild()


@pytest.mark.slow
@pytest.mark.parametrize("name", readers.TARGETS)
def test_many_wild_bytes_are_read_or_refused(name, tmp_path):
    @settings(FEW, max_examples=1500)
    @given(
        st.binary(max_size=300)
        | st.tuples(st.just(b"\1"), st.binary(min_size=1, max_size=30)).map(b"".join)
    )
    def wild(data):
        read(tmp_path, name, data)

    wild()


@pytest.mark.parametrize(
    "name, data",
    [
        ("config", b"lr = 1" + b"0" * 400),  # a float beyond 1e308
        ("config", b"rounds = 1" + b"0" * 5000),  # more digits than Python reads
        ("config", b"a = " + b"[" * 2000),  # deeper than Python's stack
        ("config", b'paper = "a\\"b\\n"'),  # goes through a file again
        ("results", b'\0{"lines": {"a": {"accuracy": [1' + b"0" * 400 + b"]}}}"),
        (
            "results",
            b'\0{"lines": {"a": {"accuracy": [1e308, -1e308]}}}',
        ),  # too large for a picture
        ("metrics", readers.METRICS.replace("0.5", "nan").encode()),
        ("metrics", readers.METRICS.replace("0,1", "0," + "1" * 400).encode()),
    ],
)
def test_bytes_found_by_the_fuzz(name, data, tmp_path):
    read(tmp_path, name, data)


def test_a_journal_as_a_run_writes_it_is_read(tmp_path):
    assert read(tmp_path, "journal", b"\0" + json.dumps(readers.JOURNAL).encode()) is None
    assert "another digest" in read(
        tmp_path, "journal", b"\0" + json.dumps(readers.JOURNAL | dict(until=4)).encode()
    )
