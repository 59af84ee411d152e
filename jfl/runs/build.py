"""Building a plan from the plain values of a config."""

import dataclasses
import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .. import algorithms, schedules
from ..algorithms.base import Traits, traits_of
from ..core import checks, options
from ..core.errors import ArgumentError
from ..core.records import Algorithm, Federation, Mechanism, Plan, Sampler, Task
from ..data import corruption, datasets, partition, transforms
from ..data.federation import federate
from ..data.rows import Dataset
from ..engine.plan import plan
from ..gradients.per_example import grad, private_grad
from ..privacy.calibration import calibrate, calibrate_per_client
from ..privacy.mechanisms import haar_bands, wavelet
from ..privacy.mechanisms.chain import chain
from ..privacy.mechanisms.correlated import correlated
from ..privacy.mechanisms.stages import (
    Stage,
    bounded,
    clip_adaptive,
    clip_automatic,
    clip_l2,
    clip_per_layer,
    divide,
    gaussian,
    total,
)
from ..privacy.mechanisms.strategies import Strategy
from ..sampling import weights as client_weights
from .config import (
    FIELDS,
    OPTIMIZERS,
    OPTIONS,
    VIEWS,
    Config,
    factory,
    sampler_of,
    the_unit,
    the_view,
)

MODULE_OF_FORMULAS = "experiments.papers.as_printed"
REPOSITORY = Path(__file__).resolve().parents[2]
# The fields that determine the rows and which client owns them.
DATA = (
    "dataset",
    "preprocess",
    "clients",
    "holdout",
    "partition",
    "partition_seed",
    "groups",
    "group_rows",
    "group_noise",
    *(name for name, o in OPTIONS.items() if {"dataset", "partition"} & o.takers.keys()),
)


def build(config: Config) -> tuple[Plan, Config]:
    """Build the plan of a config.

    Args:
        config: the config of a run.

    Returns:
        The plan; and the config with the calibrated noise multiplier, if that is a single number.

    Raises:
        ArgumentError: For values, or combinations of values, that describe no valid plan.
    """
    _refuse_bad_values(config)
    if config.dataset == "file" and config.partition == "natural":
        owners = _rows(config).owners
        config = dataclasses.replace(config, clients=50 if owners is None else len({*owners}))
    if config.epsilon is None:
        return _plan(config, config.noise_multiplier), config
    noise: Any = _calibrate_noise(config, _plan(config, 1.0))
    # Noise that differs by client or round is calibrated again when the config is read.
    if np.ndim(noise) == 0 and not callable(noise):
        config = dataclasses.replace(config, noise_multiplier=float(noise), epsilon=None)
    return _plan(config, noise), config


def _refuse_bad_values(config: Config) -> None:
    """Reject values outside their range, and fields that contradict each other."""
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if (choices := field.metadata["choices"]) is not None:
            checks.require_one_of("config", choices(), **{name: value})
        if (check := field.metadata["check"]) is not None:
            check("config", **{name: value})
    traits, unit = _traits(config), the_unit(config)
    given = lambda *names: ", ".join(f"{name}={getattr(config, name)!r}" for name in names)
    shaped = config.noise_shape != "isotropic"
    published = config.noise_shape == "published"
    printed = config.mode == "as_printed"
    constant = config.clip == "flat" and config.clip_decay == config.noise_decay == 1
    if config.average_from is not None:
        last = config.rounds - 1
        checks.require_integer(
            "config", min_value=0, max_value=last, average_from=config.average_from
        )
    # (whether it is wrong, what was expected, what was given, a hint)
    rules = (
        (
            not 0 < config.delta < 1,
            "delta in (0, 1)",
            given("delta"),
            "Below 1 / (number of examples) is usual.",
        ),
        (
            config.noise_multiplier is not None and config.epsilon is not None,
            "either noise_multiplier or epsilon",
            "both",
            "",
        ),
        (
            published and not printed,
            "mode='as_printed' for noise_shape='published'",
            given("mode"),
            "It does not have the privacy that it states: proved and claimed are shown side by "
            "side.",
        ),
        (
            shaped and config.clip != "flat",
            "clip='flat' with noise_shape",
            given("clip"),
            "A shape brings its own clip.",
        ),
        (
            config.clip != "flat" and config.clip_decay != 1,
            "clip='flat' with clip_decay",
            given("clip"),
            "",
        ),
        (
            unit == "example" and traits.example_noise is None,
            f"unit = client for {config.algorithm}",
            "unit='example'",
            f"Its noise is on the clipped {traits.client_noise}.",
        ),
        (
            unit == "client" and traits.client_noise is None,
            f"unit = example for {config.algorithm}",
            "unit='client'",
            "Use fedavg.",
        ),
        (
            printed and not published and unit != traits.printed_unit,
            f"unit = {traits.printed_unit} and noise for mode='as_printed'",
            f"unit={unit!r}",
            "The papers' formulas are for noise in local steps; padpfl's for unit='client'.",
        ),
        (
            # for noise in local steps, the formulas allow all of them
            printed
            and traits.example_noise != "gradient"
            and not (constant and (not shaped or traits.client_noise != "upload")),
            f"a flat clip and noise as printed, both constant, for {config.algorithm} in "
            "mode='as_printed'",
            given("clip", "clip_decay", "noise_decay", "noise_shape"),
            "",
        ),
    )
    for wrong, expected, actual, hint in rules:
        if wrong:
            checks.fail("config", expected, actual, hint)


def _traits(config) -> Traits:
    """Return the traits of the algorithm of a config."""
    return traits_of(factory("algorithm", config.algorithm))


def _calibrate_noise(config, draft: Plan):
    """Return the noise with which the plan reaches the epsilon of the config, in the form for
    `_plan`."""
    target = dict(epsilon=config.epsilon, delta=config.delta, rounds=config.rounds)
    if config.mode == "as_printed" and _traits(config).client_noise == "upload":
        return [
            formulas().calibrate(draft, paper=config.paper, view=view, **target) for view in VIEWS
        ]
    target["view"] = the_view(config)
    if config.mode == "as_printed":
        return formulas().calibrate(draft, paper=config.paper, **target)
    if config.per_client_noise:
        return calibrate_per_client(draft, **target)
    return calibrate(draft, unit=the_unit(config), adjacency=config.adjacency, **target)


def _plan(config: Config, noise) -> Plan:
    """Build the plan with this noise.

    Args:
        config: the config.
        noise: a multiplier; one multiplier for each client; a function of the round; a pair of
            standard deviations, of uploads and of the server's release; or None.
    """
    fed = federation(config)
    task = _call("model", config, config.model, fed)
    unit, sampler = the_unit(config), _sampler(config)
    upload = release = None
    if unit == "client" and _traits(config).client_noise == "upload":
        upload, release = _upload_chains(config, task, noise)
    elif unit == "client":
        release = _chain(config, task, noise, divide(float(sampler.expected)))
    return plan(
        fed,
        task,
        _algorithm(config, fed, task, noise),
        sampler,
        upload=upload,
        release=release,
        weights=_weights(config),
        adjacency=config.adjacency if unit == "client" and upload is None else None,
    )


def _weights(config):
    """Return the weights of clients, as `jfl.plan` takes them."""
    return client_weights.impact(config.impact, config.groups) if config.impact else config.weights


def _call(kind: str, config: Config, name: str, *args, **given):
    """Call the function with this kind and name, with the config's values of its options.

    Args:
        kind: the kind of function, such as "sampler".
        config: the config.
        name: the name of the function.
        args: arguments that come before all others.
        given: further keyword arguments; those that the function does not take are ignored.
    """
    function = factory(kind, name)
    return function(*args, **options.arguments(function, vars(config), given))


def _sampler(config) -> Sampler:
    """Return the sampler of clients; if it takes a rate, a cohort is converted to one."""
    cohort, rate, clients = config.cohort, config.rate, config.clients
    name = sampler_of(config)
    function = factory("sampler", name)
    if cohort is not None:
        checks.require_integer("config", cohort=cohort, max_value=clients)
    if options.takes(function, "rate"):
        expected = f"either cohort or rate for sampler={name!r}"
        fits = (rate is None) != (cohort is None)
    elif options.takes(function, "cohort"):
        expected = f"cohort and no rate for sampler={name!r}"
        fits = rate is None and cohort is not None
    else:
        expected = f"no cohort and no rate with sampler={name!r}"
        fits = rate is None and cohort in (None, clients)
    if not fits:
        checks.fail("config", expected, f"sampler={name!r}, cohort={cohort}, rate={rate}")
    make = lambda rate: _call("sampler", config, name, clients=clients, cohort=cohort, rate=rate)
    if cohort is not None and options.takes(function, "rate"):
        largest = float(make(1.0).expected)
        if cohort > largest:
            checks.fail(
                "config",
                f"cohort <= {largest:g}, the clients that sampler={name!r} can draw in a round",
                f"cohort={cohort}",
            )
        rate = cohort / largest
    return make(rate)


# --- data


@functools.lru_cache(maxsize=8)
def _dataset(name, preprocess, **arguments):
    """Load a dataset and preprocess it."""
    data = getattr(datasets, name)(**arguments)
    for step in () if preprocess == "none" else preprocess.split(","):
        step, _, number = step.partition(":")
        checks.require_one_of("config", ("none", *transforms.__all__), preprocess=step)
        if (step == "pca") != number.isdecimal():
            checks.fail(
                "config",
                "pca:COMPONENTS, and no number for another step",
                f"preprocess={preprocess!r}",
            )
        data = getattr(transforms, step)(data, *([int(number)] if number else []))
    return data


def _rows(config: Config) -> Dataset:
    """Return the dataset of a config."""
    arguments = options.arguments(factory("dataset", config.dataset), vars(config), {})
    return _dataset(config.dataset, config.preprocess, **arguments)


def the_partition(config: Config) -> partition.Partition:
    """Return the partition of a config, which assigns rows to clients."""
    seed = config.partition_seed
    if not config.group_rows:
        return _call("partition", config, config.partition, clients=config.clients, seed=seed)
    checks.require_one_of("config", ("iid", "labels", "dirichlet"), partition=config.partition)
    few = config.classes_per_client if config.partition == "labels" else None
    return partition.sizes(
        _values_of_clients(config, "group_rows"), classes_per_client=few, seed=seed
    )


@functools.lru_cache(maxsize=64)
def _federation(config: Config) -> Federation:
    """Build the federation of a config, without a cache."""
    fed = federate(_rows(config), the_partition(config), holdout=config.holdout)
    if config.group_noise:
        noise = _values_of_clients(config, "group_noise")
        fed = corruption.salt_and_pepper(fed, noise, seed=config.partition_seed)
    return fed


def _values_of_clients(config, name) -> list:
    """Return the value of a field for each client, given one value per group."""
    values, groups = getattr(config, name), config.groups
    if len(values) != len(groups) or sum(groups) != config.clients:
        checks.fail(
            "config",
            f"a value of {name} for each of the groups, whose sizes add up to "
            f"clients={config.clients}",
            f"{name}={values!r}, groups={groups!r}",
        )
    return [v for v, size in zip(values, groups) for _ in range(size)]


def federation(config: Config) -> Federation:
    """Return the federation of a config: the rows, and which client owns each.

    Points of a sweep with the same data share one federation.
    """
    factory("dataset", config.dataset)
    return _federation(Config(**{name: getattr(config, name) for name in DATA}))


# --- the algorithm


def _algorithm(config, fed, task, noise) -> Algorithm:
    """Return the algorithm of a config, with private gradients if the noise is in local steps."""
    function, unit = factory("algorithm", config.algorithm), the_unit(config)
    traits = traits_of(function)
    given: dict[str, Any] = dict(
        batch=_call(
            "batch_sampler",
            config,
            config.batch_sampler,
            batch=config.batch,
            # Without noise, small clients may use all their rows.
            short="all" if unit is None else "error",
        ),
        lr=_rate(config, config.lr, config.steps if options.takes(function, "steps") else 1),
        steps=config.steps,
        optimizer=OPTIMIZERS[config.optimizer],
        server_lr=_rate(config, config.server_lr, 1),
        server_optimizer=OPTIMIZERS[config.server_optimizer],
    )
    gradient: dict[str, Any] = dict(l2=config.l2 or None, compute=config.compute)
    if unit == "example" and traits.example_noise == "gradient":
        noisy = _chain(config, task, noise, divide(_divisor(config, fed)))
        given["grad"] = private_grad(task.loss, noisy, **gradient)
    else:
        given["grad"] = grad(task.loss, **gradient)
    if traits.example_noise == "mechanism":
        if unit == "example":
            given["mechanism"] = _chain(config, task, noise)
        else:
            given["mechanism"] = chain(clip_l2(config.clip_norm), total())
    if unit == "example" and config.mode == "as_printed":
        given |= traits.as_printed
    algorithm = function(**options.arguments(function, vars(config), given))
    if config.average_from is None:
        return algorithm
    return algorithms.averaged(algorithm, config.average_from)


def _divisor(config, fed):
    """Return the public number by which a sum of examples' gradients is divided."""
    if config.batch_sampler != "full":
        return config.batch
    # Under add_remove a client's own size is not public.
    return float(fed.size.sum()) / config.clients if config.adjacency == "add_remove" else "size"


def _rate(config, lr, every):
    """Return a learning rate that is constant within a round."""
    if config.lr_schedule == "constant":
        return lr
    return factory("lr_schedule", config.lr_schedule)(lr, every=every)


# --- clips and noise


def _upload_chains(config, task, noise) -> tuple[Mechanism, Mechanism | None]:
    """Return the chain of uploads and, as printed, the chain of the mean that the server
    broadcasts."""
    if not isinstance(noise, list):
        return _chain(config, task, noise), None
    (client, server), clients = noise, config.clients
    upload = chain(clip_l2(config.clip_norm), total(), gaussian(std=client))
    if not server:
        return upload, None
    return upload, chain(
        bounded(config.clip_norm, "upload"),
        total(),
        gaussian(std=server * clients),
        divide(clients),
    )


def _chain(config, task, noise: Any, *post) -> Mechanism:
    """Return a chain that clips, sums, adds noise and applies the stages `post`."""
    noise = _schedule_noise(config, noise)
    if config.noise_shape != "isotropic":
        clip, stage = _shaped_stages(config, task, noise)
    else:
        clip = _clip(config)
        as_std = callable(noise) and config.mode == "as_printed"
        stage = gaussian(std=noise) if as_std else gaussian(noise)
        if config.strategy is not None:
            multiplier: Any = noise
            stage = correlated(multiplier, _strategy(config))
    adjacency = config.adjacency if the_unit(config) == "example" else None
    return chain(clip, total(), stage, *post, adjacency=adjacency)


def _strategy(config) -> Strategy:
    """Return the strategy of correlated noise, for all rounds and for the separation of the
    sampler."""
    function, separation = factory("strategy", config.strategy), _sampler(config).separation
    given = dict(
        rounds=config.rounds,
        participations=-(-config.rounds // separation),
        separation=separation,
    )
    return _call_cached(function, tuple(options.arguments(function, vars(config), given).items()))


@functools.lru_cache(64)  # points of a sweep share a strategy
def _call_cached(function, arguments):
    """Call a function once for the same arguments."""
    return function(**dict(arguments))


def _schedule_noise(config, noise):
    """Return the noise as a function of the round, if the config makes it decay."""
    if config.noise_decay == 1:
        return noise
    if np.ndim(noise) or callable(noise):
        checks.fail(
            "config",
            "one noise multiplier for all clients with noise_decay",
            "per_client_noise or as_printed",
        )
    return schedules.exponential(noise, config.noise_decay, config.rounds)


def _clip(config) -> Stage:
    """Return the clip of a config."""
    unit = the_unit(config)
    if config.clip == "per_layer":
        return clip_per_layer(config.clip_norm)
    if config.clip == "automatic":
        return clip_automatic(config.clip_norm)
    if config.clip == "adaptive":
        if unit != "client":
            checks.fail("config", "unit = client for an adaptive clip", f"unit={unit!r}")
        return clip_adaptive(config.clip_norm, float(_sampler(config).expected))
    return clip_l2(_bound(config))


def _bound(config):
    """Return the clip norm, as a function of the round if the config makes it decay."""
    if config.clip_decay == 1:
        return config.clip_norm
    return schedules.exponential(config.clip_norm, config.clip_decay, config.rounds)


def _contribution(config, task: Task):
    """Return the shapes of a contribution to the clipped sum: a gradient, or an upload."""
    model = jax.eval_shape(task.init, jax.random.key(0))
    copies = _traits(config).payload_models if the_unit(config) == "client" else 1
    return model if copies == 1 else (model,) * copies


def _shaped_stages(config, task, noise) -> tuple[Stage, Stage]:
    """Return the clip and the noise that follow the bands of a contribution."""
    contribution, fed, bound = _contribution(config, task), federation(config), _bound(config)
    if config.bands == "pixels":
        bands = haar_bands.pixels(contribution, fed.x.shape[1:])
    else:
        bands = getattr(haar_bands, config.bands)(contribution)
    if config.noise_shape == "published":
        return _published_stages(config, fed, bound, noise, bands)
    if config.noise_shape == "weighted":
        shape = wavelet.weighted(bands)
    else:
        shape = wavelet.ellipsoid(bands, config.band_exponent)
    return wavelet.clip_ellipsoid(bound, shape), gaussian(noise, shape=shape)


def _published_stages(config, fed, bound, noise, bands) -> tuple[Stage, Stage]:
    """Return the clip and the noise of the wavelet paper, which do not have the privacy that it
    states."""
    if callable(bound) or np.ndim(noise) or callable(noise):
        checks.fail(
            "config",
            "one clip norm and noise multiplier for noise_shape='published'",
            "some that change",
        )
    heaviest = 1.0
    if the_unit(config) == "client":
        by_size = fed.size if config.weights == "size" else np.ones(1)
        weights = np.asarray(_weights(config) if config.impact else by_size)
        heaviest = float(weights.max() / weights.mean())
    return wavelet.published(
        config.reading,
        bound,
        noise,
        bands,
        calibration="lemma2" if config.lemma2 else "plain",
        max_weight=heaviest,
        unsound=True,
    )


def formulas() -> Any:
    """Import the module with the formulas of papers, which `mode="as_printed"` uses, and return it.

    It is in experiments/papers of the repository, and not in the installed package, because no
    module of jfl relies on these formulas.

    Raises:
        ArgumentError: If the repository's experiments are not importable.
    """
    if (REPOSITORY / "experiments" / "papers").is_dir() and str(REPOSITORY) not in sys.path:
        sys.path.append(str(REPOSITORY))
    try:
        return importlib.import_module(MODULE_OF_FORMULAS)
    except ModuleNotFoundError as error:
        if not MODULE_OF_FORMULAS.startswith(str(error.name)):
            raise
        raise ArgumentError(
            'config: mode="as_printed" needs the papers\' formulas, which are not part of the '
            "installed package. Run jfl from a checkout of its repository "
            "(pip install -e .), which has them in experiments/papers."
        ) from error
