"""Build the plans of the study at equal privacy.

Models are dense networks on images. Noise and clip follow the Haar levels of the pixels.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jfl import algorithms, datasets, models, partition, sampling, transforms, wavelet
from jfl.analysis import public_data
from jfl.data.federation import federate
from jfl.engine.plan import plan
from jfl.gradients.per_example import grad, private_grad
from jfl.privacy.mechanisms import haar_bands as bands_of
from jfl.privacy.mechanisms.chain import chain
from jfl.privacy.mechanisms.stages import divide, gaussian, total
from jfl.sampling import batches

DATASET, PUBLIC, VALIDATION = (
    "mnist",
    1000,
    5000,
)  # rows set aside: for clips and energies, and to choose by
CLIP = 0.5  # of the median norm of public contributions


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of the study, and the noise levels at which it is trained."""

    name: str  # "linear", or the widths of the hidden layers joined by dashes
    unit: str  # example | client
    levels: tuple  # noise multipliers
    grid: tuple  # for each level, learning rate times clip norm
    fields: tuple  # of the plan, pairs
    dataset: str = DATASET
    public: int = PUBLIC
    validation: int = VALIDATION

    def options(self):
        return dict(self.fields)


class Rows(NamedTuple):
    """Images [n, h, w, c] and labels: public, private, to choose by, to report."""

    public: tuple
    private: tuple
    validation: tuple
    test: tuple


@functools.lru_cache(maxsize=2)
def rows(model: Model) -> Rows:
    """Return the parts of its data set, each image of length 1."""
    aside, rest = transforms.public(
        transforms.unit_norm(getattr(datasets, model.dataset)()), model.public
    )
    cut = len(rest.x) - model.validation
    return Rows(
        tuple(aside),
        (rest.x[:cut], rest.y[:cut]),
        (rest.x[cut:], rest.y[cut:]),
        (rest.x_test, rest.y_test),
    )


@functools.lru_cache(maxsize=8)
def owned(model, clients=1):
    """Return the private rows among clients; few test rows, as accuracies are computed apart."""
    parts = rows(model)
    validation = parts.validation[0][:100], parts.validation[1][:100]
    return federate((*parts.private, *validation), partition.iid(clients))


def dense(model):
    """Return the task on pixels."""
    fed = owned(model)
    return (
        models.logistic(fed)
        if model.name == "linear"
        else models.mlp(fed, tuple(map(int, model.name.split("-"))))
    )


def sample_plan(model, clip, noise, post, lr, *, batch, rounds, average=True):
    """Return DP-SGD of one holder of all rows."""
    made = private_grad(dense(model).loss, chain(clip, total(), noise, divide(batch), *post))
    algorithm = algorithms.fedsgd(made, lr=lr, batch=poisson(batch))
    return plan(owned(model), dense(model), averaged(algorithm, rounds, average), sampling.full(1))


def client_plan(
    model, clip, noise, post, lr, *, clients, rate, batch, steps, local_lr, rounds, average=True
):
    """Return DP-FedAvg: clipped model differences, with noise on their sum."""
    algorithm = algorithms.fedavg(
        grad(dense(model).loss),
        lr=local_lr,
        steps=steps,
        server_lr=lr,
        batch=batches.with_replacement(batch),
    )
    return plan(
        owned(model, clients),
        dense(model),
        averaged(algorithm, rounds, average),
        sampling.poisson(clients, rate),
        release=chain(clip, total(), noise, divide(clients * rate), *post),
    )


def averaged(algorithm, rounds, average):
    """Return the plan judged by the mean of the models of the last half."""
    return algorithms.averaged(algorithm, rounds // 2) if average else algorithm


def poisson(batch):
    """Slots for six deviations above the mean: what an overflow would cost is in delta."""
    return batches.poisson(batch, capacity=math.ceil(batch + 6.5 * batch**0.5 + 4))


# --- what the public rows tell


def pixel_bands(model):
    return bands_of.pixels(
        jax.eval_shape(dense(model).init, jax.random.key(0)), owned(model).x.shape[1:]
    )


@functools.lru_cache(maxsize=8)
def contributions(model):
    """Return what public rows, or made-up clients that share them, contribute at a start: stacked
    gradients or updates."""
    task, (x, y) = dense(model), map(jnp.asarray, rows(model).public)
    start, options = task.init(jax.random.key(0)), model.options()
    if model.unit == "example":
        return jax.jit(jax.vmap(jax.grad(task.loss), (None, 0, 0)))(start, x[:200], y[:200])
    clients = 10
    dealt = len(x) // clients * clients
    deal = jax.random.permutation(jax.random.key(1), len(x))[:dealt].reshape(clients, -1)

    def one(mine, key):
        def step(w, key):
            at = jax.random.choice(key, mine, (options["batch"],))
            mean = jax.grad(lambda w: jax.vmap(task.loss, (None, 0, 0))(w, x[at], y[at]).mean())(w)
            return jax.tree.map(lambda w, g: w - options["local_lr"] * g, w, mean), None

        return jax.tree.map(
            jnp.subtract,
            jax.lax.scan(step, start, jax.random.split(key, options["steps"]))[0],
            start,
        )

    return jax.jit(jax.vmap(one))(deal, jax.random.split(jax.random.key(2), clients))


@functools.lru_cache(maxsize=8)
def energies(model):
    """Return the mean energy of contributions in each band of the pixels."""
    pixel = pixel_bands(model)
    if model.unit == "example":
        start = dense(model).init(jax.random.key(0))
        x, y = rows(model).public
        return np.asarray(public_data.band_energies(dense(model), start, x, y, pixel))
    return np.asarray(
        jax.vmap(functools.partial(bands_of.energies, pixel))(contributions(model))
    ).mean(0)


def median(model, shape_of):
    """Return the median length of contributions in the norm of a shape."""
    each = jax.vmap(functools.partial(bands_of.energies, shape_of.bands))(contributions(model))
    return float(jnp.median(jnp.sqrt((each * shape_of.scales[None] ** 2).sum(1))))


# --- variants


def unit_energies(model):
    """Return the prior, for images of length 1: the bias of the pixels' layer is a pixel of value
    1, with as much as all others.

    The library's prior knows nothing of a bias and expects of it what it does of any one pixel.
    """
    found = pixel_bands(model)
    energy = bands_of.prior(found) * bands_of.sizes(found)
    at, pixels = bands_of.blocks(found), bands_of.levels(found) >= 0
    return np.where(
        at == at[pixels][0] - 1, energy[pixels].sum(), energy
    )  # a bias stands before its kernel


def shape_named(model, name):
    """Return [per_layer | flat] iso | prior:E | unit:E | proxy:E | weighted; without a word in
    front over the pixels."""
    kind, _, name = name.rpartition(" ")
    like = jax.eval_shape(dense(model).init, jax.random.key(0))
    found = getattr(bands_of, kind)(like) if kind else pixel_bands(model)
    law, _, exponent = name.partition(":")
    if law == "weighted":
        return wavelet.weighted(found)
    known = dict(proxy=energies, unit=unit_energies)
    return wavelet.ellipsoid(
        found, float(exponent or 0), known[law](model) if law in known else None
    )


def maker(model, variant):
    """Return (multiplier, k) -> a plan of a variant with learning rate k / clip norm, and that
    norm.

    Variants are the names of `shape_named`; product (a clip for each band); james_stein and soft,
    after isotropic noise; any of these names followed by ", last model", without averaging.
    """
    name, _, last = variant.partition(", ")
    options, post, apart = model.options() | dict(average=not last), (), name == "product"
    bands = pixel_bands(model)
    if name in ("james_stein", "soft"):
        shape = shape_named(model, "iso")
        post = (getattr(wavelet, dict(soft="soft_threshold").get(name, name))(bands),)
    else:
        shape = shape_named(model, "proxy:0.25" if apart else name)
    if apart:
        bounds = CLIP * np.sqrt(energies(model))
        # the bound of all bands together, in the norm of the noise
        norm = float(np.linalg.norm(bounds * np.asarray(shape.scales)))
        clip = wavelet.clip_bands(bounds, shape.bands)
    else:
        norm = CLIP * median(model, shape)
        clip = wavelet.clip_ellipsoid(norm, shape)
    build = sample_plan if model.unit == "example" else client_plan

    def make(multiplier, k):
        return build(model, clip, gaussian(multiplier, shape=shape), post, k / norm, **options)

    return make, norm
