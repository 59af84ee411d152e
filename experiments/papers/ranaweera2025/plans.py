"""Plans of the study at equal privacy: dense models on images, whose noise and clip follow the
levels of the pixels.

The gradient of a dense layer's weight is an outer product, so a norm over the Haar levels of its
pixels is plain Euclidean length once the pixels themselves are transformed and scaled: with
features D Q x, D the scales of a shape, DP-SGD with an isotropic clip and noise, and steps of D^-2
lr, is DP-SGD with the ellipsoid in the pixels.  So the clipped sums cost a plain gradient, and no
example's gradient is transformed.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jfl.kernels import haar

from jfl import algorithms, datasets, models, partition, sampling, transforms, wavelet
from jfl.analysis import public_data
from jfl.core.records import Fn, Task
from jfl.data.federation import federate
from jfl.engine.plan import plan
from jfl.gradients.per_example import grad, private_grad
from jfl.privacy.mechanisms import haar_bands as bands_of
from jfl.privacy.mechanisms.chain import chain
from jfl.privacy.mechanisms.stages import clip_l2, clip_per_layer, divide, gaussian, total
from jfl.sampling import batches

DATASET, PUBLIC, VALIDATION = (
    "mnist",
    1000,
    5000,
)  # rows set aside: for clips and energies, and to choose by
CLIP = 0.5  # of the median norm of public contributions


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, at which noise."""

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
    """The parts of its data set, each image of length 1."""
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


def coefficients(x):
    """Images [n, h, w, 1] -> their Haar coefficients [n, m], base first, then level by level;
    padding left out."""
    x = jnp.asarray(x)
    pieces = haar.split(x.reshape(x.shape[:3]), (1, 2))
    return np.concatenate([np.asarray(p).reshape(len(x), -1) for p in pieces], 1)


def of_levels(shape):
    """Int[m]: the level of each of `coefficients`; the base has 0."""
    return np.concatenate(
        [np.full(math.prod(grid), level) for level, grid, _ in haar.layout(*shape)]
    )


@functools.lru_cache(maxsize=8)
def owned(model, clients=1, transformed=False):
    """The private rows among clients; few test rows, as accuracies are computed apart."""
    parts = rows(model)
    x = coefficients if transformed else np.asarray
    return federate(
        (
            x(parts.private[0]),
            parts.private[1],
            x(parts.validation[0][:100]),
            parts.validation[1][:100],
        ),
        partition.iid(clients),
    )


def dense(model):
    """The task on pixels."""
    fed = owned(model)
    return (
        models.logistic(fed)
        if model.name == "linear"
        else models.mlp(fed, tuple(map(int, model.name.split("-"))))
    )


# --- a dense model of scaled coefficients


def _dense(params, x, *, scale):
    """Logits of a dense network whose inputs and biases are scaled; a first kernel may be cut into
    bands."""
    names = sorted(params)
    for name in names:
        kernel, by = params[name]["kernel"], scale[name]["kernel"]
        if isinstance(kernel, tuple):
            ends = np.cumsum([len(k) for k in kernel])[:-1]
            x = sum((part * s) @ k for part, s, k in zip(jnp.split(x, ends), by, kernel))
        else:
            x = (x * by) @ kernel
        x = x + scale[name]["bias"] * params[name]["bias"]
        x = x if name == names[-1] else jax.nn.relu(x)
    return x


def _loss(params, x, y, *, scale):
    return optax.softmax_cross_entropy_with_integer_labels(_dense(params, x, scale=scale), y)


def _start(key, *, init, scale, shape, cut):
    params = init(key)
    first, *_ = sorted(params)
    kernel = params[first]["kernel"]
    pieces = [
        p.reshape(-1, kernel.shape[1]) for p in haar.split(kernel.reshape(*shape, -1), (0, 1))
    ]
    if cut:
        at = [level for level, _, _ in haar.layout(*shape)]
        kernel = tuple(
            jnp.concatenate([p for p, its in zip(pieces, at) if its == level])
            for level in sorted(set(at))
        )
    else:
        kernel = jnp.concatenate(pieces)
    params[first] = params[first] | dict(kernel=kernel)
    return jax.tree.map(lambda w, s: w / _column(s, w), params, scale)


def _column(s, w):
    return s[:, None] if jnp.ndim(s) and jnp.ndim(w) == 2 else s


def _steps(lr, *, scale):
    """Gradient descent by lr D^-2, which is descent by lr in the pixels."""
    down: Any = lambda g, state, params=None: (
        jax.tree.map(lambda g, s: -lr * g / _column(s, g) ** 2, g, scale),
        state,
    )
    return optax.GradientTransformation(lambda params: (), down)


def spread(bands, scales, shape, like, cut):
    """The scales of bands, for each leaf: a number, of the pixels' leaf one for each
    coefficient."""
    out, start = [], 0
    for block in bands.blocks:
        n = 1 if block.grid == (1,) else haar.height(*block.grid) + 1
        mine, start = scales[start : start + n], start + n
        at = of_levels(shape)
        out.append(
            mine[0]
            if n == 1
            else tuple(jnp.repeat(mine[i], (at == i).sum()) for i in range(n))
            if cut
            else mine[at]
        )
    return jax.tree.unflatten(jax.tree.structure(like), out)


def scaled(pixels: Task, shape_of, image, cut=False) -> tuple[Task, dict]:
    """The task of the pixels as one of `coefficients`, and the scales of its leaves.

    Args:
        shape_of: a wavelet.Shape over bands.pixels.  image: (h, w).  cut: a leaf for each band of
            the pixels.
    """
    like = jax.eval_shape(pixels.init, jax.random.key(0))
    scale = spread(shape_of.bands, shape_of.scales, image, like, cut)
    data = dict(scale=scale)
    return Task(
        Fn(_start, dict(init=pixels.init, scale=scale), dict(shape=image, cut=cut)),
        Fn(_loss, data),
        Fn(_dense, data),
    ), scale


def sample_plan(
    model, shape_of, bound, multiplier, lr, *, batch, rounds, average=True, cut=False, post=()
):
    """DP-SGD of one holder of all rows; `bound` in the norm of the shape, or, if cut, one for each
    band."""
    task, scale = scaled(dense(model), shape_of, tuple(owned(model).x.shape[1:3]), cut)
    clip = clip_per_layer(tuple(bound)) if np.ndim(bound) else clip_l2(bound)
    made = private_grad(task.loss, chain(clip, total(), gaussian(multiplier), divide(batch), *post))
    algorithm = algorithms.fedsgd(
        made, lr=lr, batch=poisson(batch), server_optimizer=Fn(_steps, dict(scale=scale))
    )
    return plan(
        owned(model, transformed=True), task, averaged(algorithm, rounds, average), sampling.full(1)
    )


def direct_plan(model, clip, noise, post, lr, *, batch, rounds, average=True):
    """As `sample_plan`, with the stages of jfl.wavelet on the gradients of the pixels' model."""
    made = private_grad(dense(model).loss, chain(clip, total(), noise, divide(batch), *post))
    algorithm = algorithms.fedsgd(made, lr=lr, batch=poisson(batch))
    return plan(owned(model), dense(model), averaged(algorithm, rounds, average), sampling.full(1))


def client_plan(
    model, clip, noise, post, lr, *, clients, rate, batch, steps, local_lr, rounds, average=True
):
    """DP-FedAvg: clipped model differences, noise on their sum."""
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
    """Judged by the mean of the models of the last half."""
    return algorithms.averaged(algorithm, rounds // 2) if average else algorithm


def poisson(batch):
    """Slots for six deviations above the mean: what an overflow would cost is in delta."""
    return batches.poisson(batch, capacity=math.ceil(batch + 6.5 * batch**0.5 + 4))


# --- what the public rows tell


def leaf_bands(model):
    """Each leaf of the coefficients, cut into bands, as a band: without the padding that
    pixel_bands count."""
    iso = wavelet.ellipsoid(pixel_bands(model), 0.0)
    task, _ = scaled(dense(model), iso, tuple(owned(model).x.shape[1:3]), cut=True)
    shapes = [v.shape for v in jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0)))]
    return bands_of.Bands(
        tuple(bands_of.Block((i,), (1,), (math.prod(v),)) for i, v in enumerate(shapes)),
        tuple(shapes),
    )


def pixel_bands(model):
    return bands_of.pixels(
        jax.eval_shape(dense(model).init, jax.random.key(0)), owned(model).x.shape[1:]
    )


@functools.lru_cache(maxsize=8)
def contributions(model, most=200, clients=10):
    """What public rows, or made-up clients that share them, contribute at a start: stacked
    gradients or updates."""
    task, (x, y) = dense(model), map(jnp.asarray, rows(model).public)
    start, options = task.init(jax.random.key(0)), model.options()
    if model.unit == "example":
        return jax.jit(jax.vmap(jax.grad(task.loss), (None, 0, 0)))(start, x[:most], y[:most])
    deal = jax.random.permutation(jax.random.key(1), len(x))[: len(x) // clients * clients].reshape(
        clients, -1
    )

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
    """Their mean energy in each band of the pixels; of gradients, by all public rows."""
    pixel = pixel_bands(model)
    if model.unit == "example":
        start = dense(model).init(jax.random.key(0))
        x, y = rows(model).public
        return np.asarray(public_data.band_energies(dense(model), start, x, y, pixel))
    return np.asarray(
        jax.vmap(functools.partial(bands_of.energies, pixel))(contributions(model))
    ).mean(0)


def median(model, shape_of):
    """Their median length in the norm of a shape."""
    each = jax.vmap(functools.partial(bands_of.energies, shape_of.bands))(contributions(model))
    return float(jnp.median(jnp.sqrt((each * shape_of.scales[None] ** 2).sum(1))))


# --- variants


def unit_energies(model):
    """The prior, for images of length 1: the bias of the pixels' layer is a pixel of value 1, with
    as much as all others.

    The library's prior knows nothing of a bias and expects of it what it does of any one pixel.
    """
    found = pixel_bands(model)
    energy = bands_of.prior(found) * bands_of.sizes(found)
    at, pixels = bands_of.blocks(found), bands_of.levels(found) >= 0
    return np.where(
        at == at[pixels][0] - 1, energy[pixels].sum(), energy
    )  # a bias stands before its kernel


def shape_named(model, name):
    """[per_layer | flat] iso | prior:E | unit:E | proxy:E | weighted; without a word in front over
    the pixels."""
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
    """-> (multiplier, k) -> a plan of the variant with learning rate k / clip norm, and that clip
    norm.

    Variants: the names of `shape_named`; product (a clip for each band); james_stein and soft,
    after isotropic noise; any with ", last model" behind it, without averaging.
    """
    options = model.options()
    name, _, last = variant.partition(", ")
    options, post, cut = options | dict(average=not last), (), name in ("product", "james_stein")
    sample = model.unit == "example" and " " not in name and name != "soft"
    if name in ("james_stein", "soft"):
        shape = shape_named(model, "iso")
        post = (
            wavelet.soft_threshold(pixel_bands(model))
            if name == "soft"
            else wavelet.james_stein(leaf_bands(model) if sample else pixel_bands(model)),
        )
    else:
        shape = shape_named(model, "proxy:0.25" if cut else name)
    apart = name == "product"
    bounds: Any = CLIP * np.sqrt(energies(model)) if apart else None
    # of bands that are clipped apart, the bound of all together, in the norm of the noise
    norm = (
        float(np.linalg.norm(bounds * np.asarray(shape.scales)))
        if apart
        else CLIP * median(model, shape)
    )

    def make(multiplier, k):
        if sample:
            bound = bounds * np.asarray(shape.scales) if apart else norm
            return sample_plan(
                model, shape, bound, multiplier, k / norm, cut=cut, post=post, **options
            )
        clip = (
            wavelet.clip_bands(bounds, shape.bands)
            if apart
            else wavelet.clip_ellipsoid(norm, shape)
        )
        build = direct_plan if model.unit == "example" else client_plan
        return build(model, clip, gaussian(multiplier, shape=shape), post, k / norm, **options)

    return make, norm
