"""From the plain values of a config to the plan that they name."""

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
    clip_l2,
    clip_per_layer,
    divide,
    gaussian,
    total,
)
from ..privacy.mechanisms.strategies import Strategy
from ..sampling import weights as client_weights
from ..sampling.availability import around_the_clock
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
# the fields that rows and their owners follow from
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


def _call(kind: str, config: Config, *args, **given):
    """Call the function that a config names, with the config's values of its options.

    Args:
        kind: the field that names it.
        config: has the values.
        args: before all other arguments.
        given: other arguments, of which it gets those that it takes.
    """
    function = factory(kind, getattr(config, kind))
    return function(*args, **options.arguments(function, vars(config), given))


# --- data


@functools.lru_cache(maxsize=8)
def _dataset(name, preprocess, **arguments):
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


def the_partition(config: Config) -> partition.Partition:
    """Which rows belong to which client."""
    seed = config.partition_seed
    if not config.group_rows:
        return _call("partition", config, clients=config.clients, seed=seed)
    checks.require_one_of("config", ("iid", "labels", "dirichlet"), partition=config.partition)
    few = config.classes_per_client if config.partition == "labels" else None
    return partition.sizes(_of_each_client(config, "group_rows"), classes_per_client=few, seed=seed)


@functools.lru_cache(maxsize=64)
def _federation(config: Config) -> Federation:
    arguments = options.arguments(factory("dataset", config.dataset), vars(config), {})
    data = _dataset(config.dataset, config.preprocess, **arguments)
    fed = federate(data, the_partition(config), holdout=config.holdout)
    if config.group_noise:
        noise = _of_each_client(config, "group_noise")
        fed = corruption.salt_and_pepper(fed, noise, seed=config.partition_seed)
    return fed


def _of_each_client(config, name) -> list:
    """The value of each client, from those of the groups."""
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
    """The rows and their owners; points of a sweep with the same ones share them."""
    factory("dataset", config.dataset)
    return _federation(Config(**{name: getattr(config, name) for name in DATA}))


# --- what is refused before anything is built


def _refuse_bad_values(config):
    """Each field by itself."""
    for name, field in FIELDS.items():
        value = getattr(config, name)
        if (choices := field.metadata["choices"]) is not None:
            checks.require_one_of("config", choices(), **{name: value})
        if (check := field.metadata["check"]) is not None:
            check("config", **{name: value})
    if not 0 < config.delta < 1:
        checks.fail(
            "config",
            "delta in (0, 1)",
            f"delta={config.delta!r}",
            "Below 1 / (number of examples) is usual.",
        )
    if config.average_from is not None:
        checks.require_integer("config", min_value=0, average_from=config.average_from)


def _refuse_contradictions(config):
    """Fields that do not go together."""
    if config.noise_multiplier is not None and config.epsilon is not None:
        checks.fail("config", "either noise_multiplier or epsilon", "both")
    if config.noise_shape == "published" and config.mode != "as_printed":
        checks.fail(
            "config",
            "mode='as_printed' for noise_shape='published'",
            f"mode={config.mode!r}",
            "It does not have the privacy that it states: proved and claimed are shown side by "
            "side.",
        )
    if config.noise_shape != "isotropic" and config.clip != "flat":
        checks.fail(
            "config",
            "clip='flat' beside noise_shape",
            f"clip={config.clip!r}",
            "A shape brings its own clip.",
        )
    if config.clip != "flat" and config.clip_decay != 1:
        checks.fail("config", "clip='flat' beside clip_decay", f"clip={config.clip!r}")
    if config.average_from is not None and config.average_from >= config.rounds:
        checks.fail(
            "config",
            f"average_from < rounds={config.rounds}",
            f"average_from={config.average_from}",
        )
    _refuse_unit(config, _traits(config), the_unit(config))


def _refuse_unit(config, traits: Traits, unit):
    """Noise where the algorithm has no place for it, or its paper another one."""
    name = config.algorithm
    if unit == "example" and traits.example_noise is None:
        checks.fail(
            "config",
            f"unit = client for {name}",
            "unit='example'",
            f"Its noise is on the clipped {traits.client_noise}.",
        )
    if unit == "client" and traits.client_noise is None:
        checks.fail("config", f"unit = example for {name}", "unit='client'", "Use fedavg.")
    if config.mode != "as_printed":
        return
    if config.noise_shape != "published" and unit != traits.printed_unit:
        checks.fail(
            "config",
            f"unit = {traits.printed_unit} and noise for mode='as_printed'",
            f"unit={unit!r}",
            "The papers' formulas are for noise in local steps; padpfl's for unit='client'.",
        )
    plain = dict(clip="flat", clip_decay=1, noise_decay=1)
    if traits.client_noise == "upload":
        plain["noise_shape"] = "isotropic"
    if traits.example_noise == "gradient":  # in local steps the formulas take them all
        return
    noise = "isotropic noise" if "noise_shape" in plain else "noise as printed"
    others = [f"{k}={getattr(config, k)!r}" for k, v in plain.items() if getattr(config, k) != v]
    if others:
        checks.fail(
            "config",
            f"a flat clip and {noise}, both constant, for {name} in mode='as_printed'",
            ", ".join(others),
        )


def _traits(config) -> Traits:
    return traits_of(factory("algorithm", config.algorithm))


# --- the plan


def build(config: Config) -> tuple[Plan, Config]:
    """Build the plan that a config names.

    Returns:
        The plan, and the config with the noise multiplier that its epsilon came to, where that is
        one number.

    Raises:
        ArgumentError: for values and combinations of values that name no plan.
    """
    _refuse_bad_values(config)
    _refuse_contradictions(config)
    if config.epsilon is None:
        return _plan(config, config.noise_multiplier), config
    noise: Any = _calibrated(config, _plan(config, 1.0))
    # one number is written down; noise of each client or round follows from epsilon again
    if np.ndim(noise) == 0 and not callable(noise):
        config = dataclasses.replace(config, noise_multiplier=float(noise), epsilon=None)
    return _plan(config, noise), config


def _calibrated(config, draft: Plan):
    """The noise with which the plan reaches the config's epsilon, as `_plan` takes it."""
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
    """The plan with this noise.

    Args:
        noise: a multiplier; one for each client; a function of the round; a pair of standard
            deviations, of uploads and of the server's; or None.
    """
    fed = federation(config)
    task = _call("model", config, fed)
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
    return client_weights.impact(config.impact, config.groups) if config.impact else config.weights


def _sampler(config) -> Sampler:
    """Who takes part, by name, or by what is given of cohort and rate."""
    cohort, rate, clients = config.cohort, config.rate, config.clients
    name = sampler_of(config)
    got = f"sampler={name!r}, cohort={cohort}, rate={rate}"
    function = factory("sampler", name)
    if cohort is not None:
        checks.require_integer("config", cohort=cohort)
        if cohort > clients:
            checks.fail("config", f"cohort <= clients={clients}", f"cohort={cohort}")
    if options.takes(function, "rate"):
        if (rate is None) == (cohort is None):
            checks.fail("config", f"either cohort or rate for sampler={name!r}", got)
        rate = cohort / clients if rate is None else rate
        if options.takes(function, "separation") and config.rate is None:
            group = -(-clients // config.separation)
            if cohort > group:
                checks.fail(
                    "config",
                    f"cohort <= {group}, the clients of a group for sampler={name!r} and "
                    f"separation={config.separation}",
                    f"cohort={cohort}",
                )
            rate = min(1.0, rate * config.separation)  # in a round of its own group
        if options.takes(function, "awake") and config.rate is None:
            # days have whole rounds, so the part that is awake is a little off
            awake = around_the_clock(clients, config.period, config.awake).mean()
            if not cohort <= clients * awake:
                checks.fail(
                    "config",
                    f"cohort <= {clients * awake:g}, the clients that are awake at once",
                    f"cohort={cohort}",
                )
            rate = min(1.0, rate / awake)  # of those that are awake
    elif options.takes(function, "cohort"):
        if rate is not None or cohort is None:
            checks.fail("config", f"cohort and no rate for sampler={name!r}", got)
    elif rate is not None or cohort not in (None, clients):
        checks.fail("config", f"no cohort and no rate beside sampler={name!r}", got)
    given = dict(clients=clients, cohort=cohort, rate=rate)
    return function(**options.arguments(function, vars(config), given))


# --- the algorithm


def _algorithm(config, fed, task, noise) -> Algorithm:
    function, unit = factory("algorithm", config.algorithm), the_unit(config)
    traits = traits_of(function)
    given: dict[str, Any] = dict(
        batch=_call(  # nothing is claimed without noise: take small clients whole
            "batch_sampler", config, batch=config.batch, short="all" if unit is None else "error"
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
    """By what a sum of examples' gradients is divided: no number that is not public."""
    if config.batch_sampler != "full":
        return config.batch
    # under add_remove a client's own size is no public number
    return float(fed.size.sum()) / config.clients if config.adjacency == "add_remove" else "size"


def _rate(config, lr, every):
    """A learning rate that is constant within a round."""
    if config.lr_schedule == "constant":
        return lr
    return factory("lr_schedule", config.lr_schedule)(lr, every=every)


# --- clips and noise


def _upload_chains(config, task, noise) -> tuple[Mechanism, Mechanism | None]:
    """Noise on what a client uploads, and as printed on the mean that the server broadcasts."""
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
    noise = _decaying(config, noise)
    if config.noise_shape != "isotropic":
        clip, stage = _shaped(config, task, noise)
    else:
        clip = _clip(config, task)
        as_std = callable(noise) and config.mode == "as_printed"
        stage = gaussian(std=noise) if as_std else gaussian(noise)
        if config.strategy is not None:
            multiplier: Any = noise
            stage = correlated(multiplier, _strategy(config))
    adjacency = config.adjacency if the_unit(config) == "example" else None
    return chain(clip, total(), stage, *post, adjacency=adjacency)


def _strategy(config) -> Strategy:
    """Of correlated noise, for all rounds and for clients that come as the sampler lets them."""
    function = factory("strategy", config.strategy)
    separation = _sampler(config).separation
    given = dict(
        rounds=config.rounds,
        participations=-(-config.rounds // separation),
        separation=separation,
    )
    return _made(function, tuple(options.arguments(function, vars(config), given).items()))


@functools.lru_cache(64)  # the points of a sweep ask for the same
def _made(function, given):
    return function(**dict(given))


def _decaying(config, noise):
    if config.noise_decay == 1:
        return noise
    if np.ndim(noise) or callable(noise):
        checks.fail(
            "config",
            "one noise multiplier for all clients beside noise_decay",
            "per_client_noise or as_printed",
        )
    return schedules.exponential(noise, config.noise_decay, config.rounds)


def _clip(config, task) -> Stage:
    unit = the_unit(config)
    if config.clip == "per_layer":
        layers = len(jax.tree.leaves(_contribution(config, task)))
        # clip_norm bounds all layers together
        return clip_per_layer(config.clip_norm / layers**0.5, layers)
    if config.clip == "adaptive":
        if unit != "client":
            checks.fail("config", "unit = client for an adaptive clip", f"unit={unit!r}")
        return clip_adaptive(config.clip_norm, float(_sampler(config).expected))
    return clip_l2(_bound(config))


def _bound(config):
    if config.clip_decay == 1:
        return config.clip_norm
    return schedules.exponential(config.clip_norm, config.clip_decay, config.rounds)


def _contribution(config, task: Task):
    """The shapes of what is clipped: a gradient, or what a client uploads."""
    model = jax.eval_shape(task.init, jax.random.key(0))
    copies = _traits(config).payload_models if the_unit(config) == "client" else 1
    return model if copies == 1 else (model,) * copies


def _shaped(config, task, noise) -> tuple[Stage, Stage]:
    """Clip and noise along the bands of a contribution."""
    contribution, fed, bound = _contribution(config, task), federation(config), _bound(config)
    if config.bands == "pixels":
        bands = haar_bands.pixels(contribution, fed.x.shape[1:])
    else:
        bands = getattr(haar_bands, config.bands)(contribution)
    if config.noise_shape == "published":
        return _published(config, fed, bound, noise, bands)
    if config.noise_shape == "weighted":
        shape = wavelet.weighted(bands)
    else:
        shape = wavelet.ellipsoid(bands, config.band_exponent)
    return wavelet.clip_ellipsoid(bound, shape), gaussian(noise, shape=shape)


def _published(config, fed, bound, noise, bands) -> tuple[Stage, Stage]:
    """The wavelet paper's own mechanism, which does not have the privacy that it states."""
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
    """Import and return the papers' formulas, which `mode="as_printed"` uses.

    They are in the repository, in experiments/papers, and not in the installed package: no module
    of jfl proves anything with them.

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
