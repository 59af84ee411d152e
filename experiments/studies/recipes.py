"""Build plans that no config describes, for the study of promises.

Each recipe changes a paper's algorithm so that its promise becomes true:

- `uploads`: noise once on each upload (Noble et al., Theorem 4.1: sums of M uploads are protected
  by the noise of all M, sqrt(M) times that of one upload).
- `impact`: the same, but a client scales its upload by its impact factor before the clip, which
  clips each client as 1 over its factor (Talaei and Izadi).
- `of_each`: noise as a client of its size needs; `by_variance`: clients are then weighted by 1 over
  the variance of their noise; `known_noise`: AdDPNFL's server also subtracts the known noise (Chen
  et al.).
- `contracting`: noise on the model, for what one row changes if losses are convex: conditional (Li
  et al., with the sensitivity of Wu et al., 2017).
- `measured`: wavelet noise in the shape of band energies that were measured with separate noise
  (Ranaweera et al.); `by_level`: the same, but each level has a separate clip by its energy.

Six recipes are for the study of anchors (Tramèr and Boneh; Opacus):

- `scattered`: FedSGD of a linear model on scattering features, with noise in every gradient.
- `shares`: the same, but each client adds only a share of the noise.
- `tanh_cnn`: FedSGD of the small convolutional network of Tramèr and Boneh.
- `relu_cnn`: FedSGD of that of the MNIST example of Opacus.
- `tanh_cnn_shares`, `relu_cnn_shares`: the same, but each client adds only a share of the noise.

One recipe is for the study of customers:

- `purchases`: FedAvg of a linear model on what a customer of a grocery bought last.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

import jfl
from jfl.core import pytrees
from jfl.core.hashing import mark_immutable
from jfl.core.records import Fn, named
from jfl.privacy import guarantees
from jfl.privacy.calibration import calibrate_per_client
from jfl.runs import build
from jfl.runs.config import FIELDS, OPTIMIZERS, Config, the_unit, the_view

from ..papers.talaei2024 import claims as talaei2024
from . import scattering

SHARE = 0.1  # fraction of epsilon that measuring the energies spends
# Constants of softmax regression with rows (x, 1), ||x|| <= 1.
STEEPNESS = 2.0  # sqrt(2) for the slopes times sqrt(2) for a row
SMOOTHNESS = 1.0  # 1/2 for the slopes times 2 for a row
TYPICAL_SMOOTHNESS = 0.25  # on real rows, for the rate of a solve; no guarantee rests on it
LEAST_ENERGY = 1e-3  # of the mean: a level without any is clipped to more than nothing
# Networks of Tramèr and Boneh, and of the example of Opacus, which normalises pixels by the mean
# and standard deviation of MNIST.
TANH: dict[str, Any] = dict(activation="tanh", padding=2)
RELU: dict[str, Any] = dict(activation="relu", padding=3, mean=0.1307, std=0.3081)
SUMS_ONLY = (
    "Assumes secure aggregation: the observer sees only the sum of the uploads, no client drops "
    "out, and no client reveals its noise.",
    "Computed for one client that holds all rows: its release has the same distribution as the sum "
    "of these uploads.",
)
INEXACTNESS = 1e-5  # of a proximal problem's solve; a run stops where one leaves more


@dataclasses.dataclass(frozen=True)
class Made(Config):
    """A config whose plan is made by a recipe."""

    recipe: str = ""
    noise: tuple = ()  # multipliers: one, or one for each group of clients


class Recipe(NamedTuple):
    plan: Callable  # config with its noise -> Plan
    view: str | None = None  # of the guarantee; None: that of the config
    each: bool = False  # noise is calibrated for each group of clients
    before: Callable | None = None  # config -> a Plan of one round that is paid for, too
    shared: bool = False  # clients share the noise of one client, whose guarantee theirs is


# fields that no recipe reads; of those whose clients add noise in or after their own steps, more
UNREAD = ("adjacency", "clip", "clip_decay", "noise_decay", "strategy", "mode", "noise_shape")
STEPS = ("l2", "compute", "optimizer", "server_optimizer", "average_from", "lr_schedule")


def _refuse(config: Made, fields) -> None:
    """Fields that a recipe does not read have their defaults."""
    given = [name for name in fields if getattr(config, name) != FIELDS[name].default]
    if given:
        raise ValueError(
            f"{config.recipe}: expected the defaults of fields that this recipe does "
            "not read, but got " + ", ".join(f"{name}={getattr(config, name)!r}" for name in given)
        )


def _without_noise(config: Made, **changes: Any):
    """Return the plan of the config's fields, without noise."""
    _refuse(config, UNREAD)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    quiet: dict[str, Any] = dict(
        epsilon=None, noise_multiplier=None, unit=None, view=None, per_client_noise=False
    )
    return build.build(Config(**fields | quiet | changes))[0]


def _with_uploads(config, plan, algorithm=None, **options):
    upload = jfl.chain(jfl.clip_l2(config.clip_norm), jfl.total(), jfl.gaussian(config.noise[0]))
    return jfl.plan(
        plan.fed, plan.task, algorithm or plan.algorithm, plan.sampler, upload=upload, **options
    )


def uploads(config: Made):
    """Return a plan with noise on each upload, of which only the sum is seen."""
    return _with_uploads(config, _without_noise(config), secure_aggregation=True)


@named("recipes.scaled")
def _scaled(context, keys, server, own, rows, *, client, factors):
    payload, own, diagnostics = client(context, keys, server, own, rows)
    return pytrees.scale(factors[context.client], payload), own, diagnostics


def impact(config: Made):
    """Return a plan whose clients upload their factor times their difference, clipped after that.

    The server takes the mean.
    """
    factors = jfl.sampling.weights.impact(config.impact, config.groups) * config.clients
    plan = _without_noise(config, impact=())
    client = Fn(_scaled, dict(client=plan.algorithm.client, factors=jnp.asarray(factors)))
    return _with_uploads(config, plan, dataclasses.replace(plan.algorithm, client=client))


def multipliers(config: Made) -> np.ndarray:
    """Float64[C], of the noise of each client."""
    return np.repeat(config.noise, config.groups)


def variances(config: Made) -> np.ndarray:
    """Float64[C], of the noise in a coordinate of a client's upload: the sum over its local steps,
    each with a sensitivity of 2 clip_norm under replace_one."""
    step = config.lr * multipliers(config) * 2 * config.clip_norm / config.batch
    return config.steps * step**2


def of_each(config: Made, inverse: bool = False, known: bool = False):
    """Return a plan with noise in local steps, as much as a client of its size needs.

    Args:
        inverse: clients count as 1 over the variance of their noise; else by the config's weights.
        known: whether AdDPNFL knows the noise of their mean.
    """
    plan, noisy, clients = _without_noise(config), variances(config), config.clients
    by_size = np.asarray(plan.fed.size, float) if config.weights == "size" else np.ones(clients)
    weights = 1 / noisy if inverse else by_size
    weights *= clients / weights.sum()
    step = _private(plan, config, jfl.clip_l2(config.clip_norm), jfl.gaussian(multipliers(config)))
    if config.algorithm == "addpnfl":
        std = float((weights**2 * noisy).sum() ** 0.5 / clients) if known else None
        algorithm = jfl.algorithms.addpnfl(
            **step,
            server_lr=config.server_lr,
            noise_std=std,
        )
    else:
        algorithm = jfl.algorithms.fedavg(**step)
    return jfl.plan(plan.fed, plan.task, algorithm, plan.sampler, weights=weights)


def _private(plan, config, clip, noise) -> dict[str, Any]:
    """Return arguments of an algorithm whose local steps clip and add noise."""
    _refuse(config, (*STEPS, "batch_sampler"))
    chain = jfl.chain(clip, jfl.total(), noise, jfl.divide(config.batch))
    return dict(
        grad=jfl.private_grad(plan.task.loss, chain),
        lr=config.lr,
        steps=config.steps,
        batch=jfl.batches.without_replacement(config.batch),
    )


def contracting(config: Made):
    """Output perturbation on softmax regression: its steps contract."""
    _refuse(config, (*STEPS, "batch_sampler", "server_lr", "weights"))
    plan = _convex(config)
    bound = jfl.bounded(STEEPNESS / (config.steps * config.batch), "contraction")
    algorithm = jfl.algorithms.output_perturbation(
        jfl.grad(plan.task.loss),
        jfl.chain(bound, jfl.total(), jfl.gaussian(config.noise[0])),
        lr=config.lr,
        steps=config.steps,
        batch=jfl.batches.epochs(config.batch),
        smoothness=SMOOTHNESS,
    )
    return jfl.plan(plan.fed, plan.task, algorithm, plan.sampler)


def prox_erm(config: Made):
    """PADPFL on softmax regression, whose clients solve their problems almost exactly.

    Where losses are at most TYPICAL_SMOOTHNESS smooth, a step of 1 / (TYPICAL_SMOOTHNESS + mu)
    leaves at most TYPICAL_SMOOTHNESS / (TYPICAL_SMOOTHNESS + mu) of the gradient.  Where they are
    not, solves may fall short, which stops the run.
    """
    if config.algorithm != "padpfl" or config.batch_sampler != "full":
        raise ValueError(
            "prox_erm: expected algorithm='padpfl' with batch_sampler='full', but got "
            f"algorithm={config.algorithm!r}, batch_sampler={config.batch_sampler!r}"
        )
    _refuse(config, (*STEPS, "lr", "steps", "batch", "clip_norm", "weights", "impact"))
    plan, mu = _convex(config), config.mu
    needed: dict[str, Any] = dict(
        rows=int(np.asarray(plan.fed.size).min()), lipschitz=STEEPNESS, mu_bar=mu
    )
    moved = talaei2024.prox_erm_sensitivity(**needed, inexactness=INEXACTNESS)
    bound = jfl.bounded(float(moved) / 2, "prox_erm")  # replace_one doubles it
    algorithm = jfl.algorithms.padpfl(
        jfl.grad(plan.task.loss),
        mu=mu,
        lr=1 / (TYPICAL_SMOOTHNESS + mu),
        steps=math.ceil(math.log(2 / INEXACTNESS) / math.log1p(mu / TYPICAL_SMOOTHNESS)),
        upload=config.upload,
        mechanism=jfl.chain(bound, jfl.total(), jfl.gaussian(config.noise[0])),
        inexactness=INEXACTNESS,
        server_lr=config.server_lr,
    )
    return jfl.plan(plan.fed, plan.task, algorithm, plan.sampler)


def _convex(config: Made):
    """Return the config's plan without noise, of softmax regression on rows of norm 1 at most."""
    if config.model != "logistic" or not config.preprocess.endswith("unit_norm"):
        raise ValueError(
            f"{config.recipe}: expected model='logistic' on rows of unit norm, but got "
            f"model={config.model!r}, preprocess={config.preprocess!r}"
        )
    plan = _without_noise(config)
    rows = np.asarray(plan.fed.x).reshape(len(plan.fed.x), -1)
    longest = float(np.linalg.norm(rows, axis=1).max())
    if longest > 1 + 1e-5:
        raise ValueError(
            f"{config.recipe}: expected rows of norm 1 at most, but got one of {longest:g}"
        )
    return plan


@functools.lru_cache(maxsize=1)  # they take a gigabyte
def _features(dataset: str) -> tuple:
    """Return the scattering features of the training and test rows of a dataset."""
    data = getattr(jfl.datasets, dataset)()
    return tuple(
        mark_immutable(pytrees.on_device(scattering.features(x[..., 0])))
        for x in (data.x, data.x_test)
    )


def scattered(config: Made, share: bool = False):
    """Return FedSGD of a linear model on scattering features, with noise in every gradient.

    Args:
        config: `batch` is the expected number of rows of all clients together.
        share: each client adds noise such that the sum over clients has the config's multiplier;
            else each adds all of it.
    """
    fed = build.federation(config)
    x, x_test = _features(config.dataset)
    fed = dataclasses.replace(fed, x=x, x_test=x_test)
    return _fedsgd(config, fed, jfl.models.logistic(fed), share)


def _fedsgd(config: Made, fed, task, share: bool = False):
    """Return FedSGD with noise in the gradient of every client (see `scattered`)."""
    _refuse(config, (*UNREAD, *(field for field in STEPS if field != "server_optimizer")))
    clients = config.clients
    batch = config.batch / clients
    chain = jfl.chain(
        jfl.clip_l2(config.clip_norm),
        jfl.total(),
        jfl.gaussian(config.noise[0] / (clients**0.5 if share else 1)),
        jfl.divide(batch),
    )
    algorithm = jfl.algorithms.fedsgd(
        jfl.private_grad(task.loss, chain),
        lr=config.lr,
        batch=jfl.batches.poisson(batch),
        server_optimizer=OPTIMIZERS[config.server_optimizer],
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(clients))


class _ConvolutionalNet(nn.Module):
    """A network of two convolutions and two dense layers, with the initial values of PyTorch."""

    activation: str
    padding: int  # of the image
    classes: int

    @nn.compact
    def __call__(self, x):
        activation = getattr(nn, self.activation)
        padding = ((self.padding, self.padding),) * 2
        x = activation(self._affine(nn.Conv, x, 64, 16, (8, 8), (2, 2), padding=padding))
        x = _max_pool(x)
        x = activation(self._affine(nn.Conv, x, 256, 32, (4, 4), (2, 2), padding="VALID"))
        x = _max_pool(x).reshape(-1)
        x = activation(self._affine(nn.Dense, x, len(x), 32))
        return self._affine(nn.Dense, x, 32, self.classes)

    def _affine(self, layer, x, fan_in, *arguments, **options):
        def uniform(key, shape, dtype=jnp.float32):
            return jax.random.uniform(key, shape, dtype, -1, 1) / fan_in**0.5

        return layer(*arguments, **options, kernel_init=uniform, bias_init=uniform)(x)


def _max_pool(x):
    """Return the maxima of windows of 2 x 2 pixels, with stride 1.

    On a CPU, the gradient of flax's pooling takes longer.
    """
    x = jnp.maximum(x[1:], x[:-1])
    return jnp.maximum(x[:, 1:], x[:, :-1])


def convolved(
    config: Made,
    activation: str,
    padding: int,
    mean: float = 0.0,
    std: float = 1.0,
    share: bool = False,
):
    """Return FedSGD of a small convolutional network, with noise in every gradient.

    Args:
        config: `batch` is the expected number of rows of all clients together.
        activation: the name of a function of flax.linen.
        padding: of the images, in pixels.
        mean: is subtracted from the pixels.
        std: the pixels are then divided by it.
        share: each client adds only a share of the noise (see `scattered`).
    """
    fed = build.federation(config)
    fed = dataclasses.replace(fed, x=(fed.x - mean) / std, x_test=(fed.x_test - mean) / std)
    network = _ConvolutionalNet(activation, padding, fed.classes)
    task = jfl.models.flax(fed, network, target="class", batched=False)
    return _fedsgd(config, fed, task, share)


@functools.lru_cache(maxsize=1)
def _recent_purchases() -> tuple:
    """Return training and test rows of Ta-Feng as weights of kinds of products, Float32[n, kinds].

    The weight of a kind is the sum of 1/2 for the last purchase, 1/4 for the one before it, ...
    """

    data = jfl.datasets.ta_feng()

    def weights(x):
        made = np.zeros((len(x), data.classes), np.float32)
        for age, kinds in enumerate(x.T[::-1]):
            np.add.at(made, (np.arange(len(x)), kinds), 0.5 ** (1 + age))
        made[:, 0] = 0  # no purchase
        return made

    return tuple(mark_immutable(pytrees.on_device(weights(x))) for x in (data.x, data.x_test))


def purchases(config: Made):
    """Return FedAvg of a linear model on what a customer bought last.

    The release, its noise and the sampler are those of the config.
    """
    _refuse(config, STEPS)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(Config)}
    noise = config.noise[0] if config.noise else config.noise_multiplier
    plan = build.build(Config(**fields | dict(epsilon=None, noise_multiplier=noise)))[0]
    x, x_test = _recent_purchases()
    fed = dataclasses.replace(plan.fed, x=x, x_test=x_test)
    task = jfl.models.logistic(fed)
    batch = jfl.batches.with_replacement(config.batch)
    algorithm = jfl.algorithms.fedavg(
        jfl.grad(task.loss), lr=config.lr, steps=config.steps, batch=batch
    )
    return dataclasses.replace(plan, fed=fed, task=task, algorithm=algorithm)


def _stated(config: Made) -> float:
    if config.epsilon is None:
        raise ValueError(f"{config.recipe}: expected epsilon, but got none")
    return config.epsilon


def _bands(plan):
    shapes = jax.eval_shape(plan.task.init, jax.random.key(0))
    return jfl.bands.pixels(shapes, plan.fed.x.shape[1:])


def energies(config: Made):
    """Return the plan of one round that measures band energies, on all rows, for SHARE of
    epsilon."""
    plan = _without_noise(config)
    make = lambda z: jfl.plan(
        plan.fed,
        plan.task,
        jfl.algorithms.band_energies(plan.task.loss, _bands(plan), noise_multiplier=z),
        plan.sampler,
    )
    target: dict[str, Any] = dict(epsilon=SHARE * _stated(config), delta=config.delta, rounds=1)
    return make(jfl.calibrate(make(1.0), unit="example", view="server", **target))


@functools.lru_cache(maxsize=64)
def _measured(config: Made) -> tuple:
    """Return the energies that a run of this split and seed measures."""
    key = jax.random.fold_in(jax.random.key(config.seed), 1)  # not the samples of the training
    run = jfl.simulate(key, energies(config), rounds=1).run
    return tuple(np.maximum(np.asarray(run.server.energies, np.float64), 0.0).tolist())


def measured(config: Made, by_level: bool = False):
    """Return noise of an ellipsoid, in the shape of energies that were measured.

    Args:
        config: the config of the plan.
        by_level: each level is clipped on its own, in proportion to the root of its energy; the
            squares of these norms add up to that of the clip norm.  Else all together.
    """
    plan = _without_noise(config)
    blind = dataclasses.replace(
        config, recipe="measured", noise=(), lr=0.1, clip_norm=1.0, band_exponent=0.25
    )
    bands, found = _bands(plan), jnp.array(_measured(blind))
    shape = jfl.wavelet.ellipsoid(bands, config.band_exponent, found)
    if by_level:
        found = found + LEAST_ENERGY * found.mean() + jnp.finfo(jnp.float32).tiny
        clip = jfl.wavelet.clip_bands(config.clip_norm * jnp.sqrt(found / found.sum()), bands)
    else:
        clip = jfl.wavelet.clip_ellipsoid(config.clip_norm, shape)
    step = _private(plan, config, clip, jfl.gaussian(config.noise[0], shape=shape))
    return jfl.plan(plan.fed, plan.task, jfl.algorithms.fedavg(**step), plan.sampler)


RECIPES = dict(
    uploads=Recipe(uploads, view="aggregate"),
    impact=Recipe(impact),
    of_each=Recipe(of_each, each=True),
    by_variance=Recipe(functools.partial(of_each, inverse=True), each=True),
    known_noise=Recipe(functools.partial(of_each, inverse=True, known=True), each=True),
    contracting=Recipe(contracting),
    prox_erm=Recipe(prox_erm),
    scattered=Recipe(scattered),
    shares=Recipe(functools.partial(scattered, share=True), shared=True),
    tanh_cnn=Recipe(functools.partial(convolved, **TANH)),
    relu_cnn=Recipe(functools.partial(convolved, **RELU)),
    tanh_cnn_shares=Recipe(functools.partial(convolved, **TANH, share=True), shared=True),
    relu_cnn_shares=Recipe(functools.partial(convolved, **RELU, share=True), shared=True),
    purchases=Recipe(purchases),
    measured=Recipe(measured, before=energies),
    by_level=Recipe(functools.partial(measured, by_level=True), before=energies),
)


def plan_of(config: Made):
    """Return the plan that a config with its noise names."""
    return RECIPES[config.recipe].plan(config)


def noise_of(config: Made) -> tuple:
    """Return the multipliers with which the plan proves the config's epsilon."""
    recipe = RECIPES[config.recipe]
    target: dict[str, Any] = dict(epsilon=_stated(config), delta=config.delta, rounds=config.rounds)
    one = dict(clients=1) if recipe.shared else {}
    draft = lambda z: recipe.plan(dataclasses.replace(config, noise=z, **one))
    if recipe.each:
        found = calibrate_per_client(draft((1.0,) * len(config.groups)), **target)
        firsts = np.cumsum((0, *config.groups[:-1]))
        return tuple(np.asarray(found, float)[firsts].tolist())
    if recipe.before is None:
        where: dict[str, Any] = dict(unit=the_unit(config), view=recipe.view or the_view(config))
        return (float(jfl.calibrate(draft((1.0,)), **target, **where)),)
    before, low, high = recipe.before(config), 0.1, 100.0
    spent = lambda z: _with(before, draft((z,)), config).epsilon
    if not spent(high) <= target["epsilon"] < spent(low):
        raise ValueError(
            f"{config.recipe}: expected an epsilon that a multiplier of {low:g} to "
            f"{high:g} reaches, but "
            f"got {target['epsilon']:g}"
        )
    for _ in range(24):  # noise of `low` proves too little, that of `high` enough
        middle = (low * high) ** 0.5
        low, high = (low, middle) if spent(middle) <= target["epsilon"] else (middle, high)
    return (high,)


def worth(config: Made):
    """Return the proved guarantee of a run of a config, and of everything that runs before it."""
    recipe = RECIPES[config.recipe]
    if recipe.shared:
        found = _with(None, recipe.plan(dataclasses.replace(config, clients=1)), config)
        caveats = (*found.caveats, *SUMS_ONLY)
        return found._replace(view="aggregate", status="conditional", caveats=caveats)
    plan = plan_of(config)
    return _with(recipe.before(config) if recipe.before else None, plan, config)


def _with(before, plan, config: Made):
    where = the_unit(config), RECIPES[config.recipe].view or the_view(config)
    if before is None:
        return guarantees.guarantee(plan, config.rounds, config.delta, *where)
    segments = [(before, 1), (plan, config.rounds)]
    return guarantees.guarantee(segments, None, config.delta, *where, seeds="different")
