"""From the plain values of a config to the plan that they name."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from .. import algorithms, schedules
from ..core import checks
from ..models import tasks
from ..papers import as_printed
from ..sampling import batches, clients as sampling
from ..sampling import weights as client_weights
from .config import Config, the_unit, the_view
from ..core.records import Plan
from ..data import corruption, datasets, partition, transforms
from ..data.federation import federate
from ..gradients.per_example import grad, private_grad
from ..engine.plan import plan
from ..privacy.mechanisms import haar_bands, wavelet
from ..privacy.calibration import calibrate, calibrate_per_client
from ..privacy.mechanisms.chain import chain
from ..privacy.mechanisms.stages import (
    bounded,
    clip_adaptive,
    clip_l2,
    clip_per_layer,
    divide,
    gaussian,
    total,
)

OPTIMIZERS = dict(
    sgd=optax.sgd,
    momentum=functools.partial(optax.sgd, momentum=0.9),
    adam=optax.adam,
    adagrad=optax.adagrad,
    yogi=optax.yogi,
)
CLIPS = ("flat", "per_layer", "adaptive")
NOISES = ("isotropic", "ellipsoid", "weighted", "published")
BANDS = ("flat", "per_layer", "pixels")
DATA = """dataset synthetic_alpha synthetic_beta preprocess clients holdout partition alpha classes_per_client share
rows_per_client exponent min_rows partition_seed groups group_rows group_noise""".split()


@functools.lru_cache(maxsize=8)
def _dataset(name, preprocess, **options):
    data = getattr(datasets, name)(**options)
    for step in () if preprocess == "none" else preprocess.split(","):
        step, _, number = step.partition(":")
        checks.choice("config", ("none", *transforms.__all__), preprocess=step)
        if (step == "pca") != number.isdecimal():
            checks.fail(
                "config",
                "pca:COMPONENTS, and no number for another step",
                f"preprocess={preprocess!r}",
            )
        data = getattr(transforms, step)(data, *([int(number)] if number else []))
    return data


def the_partition(config: Config):
    seed = config.partition_seed
    checks.choice("config", partition.__all__, partition=config.partition)
    if config.group_rows:
        checks.choice("config", ("iid", "labels", "dirichlet"), partition=config.partition)
        few = config.classes_per_client if config.partition == "labels" else None
        return partition.sizes(_by_group(config, "group_rows"), classes_per_client=few, seed=seed)
    if config.partition == "natural":
        return partition.natural(seed=seed)
    if config.partition == "similarity":
        return partition.similarity(config.clients, config.share, config.rows_per_client, seed=seed)
    if config.partition == "labels":
        return partition.labels(
            config.clients,
            config.classes_per_client,
            config.rows_per_client,
            config.exponent or 0.0,
            config.min_rows,
            seed=seed,
        )
    if config.partition == "dirichlet":
        return partition.dirichlet(
            config.clients, config.alpha, min_rows=config.min_rows, seed=seed
        )
    if config.partition == "shards":
        return partition.shards(config.clients, config.classes_per_client, seed=seed)
    if config.partition == "power_law":
        exponent = 1.0 if config.exponent is None else config.exponent
        return partition.power_law(config.clients, exponent, min_rows=config.min_rows, seed=seed)
    return partition.iid(config.clients, seed=seed)


@functools.lru_cache(maxsize=64)
def _federation(config: Config):
    options = dict(
        alpha=config.synthetic_alpha,
        beta=config.synthetic_beta,
        clients=config.clients,
        rows=config.rows_per_client or 5000,
        seed=config.partition_seed,
    )
    data = _dataset(
        config.dataset, config.preprocess, **options if config.dataset == "synthetic" else {}
    )
    fed = federate(data, the_partition(config), holdout=config.holdout)
    if config.group_noise:
        fed = corruption.salt_and_pepper(
            fed, _by_group(config, "group_noise"), seed=config.partition_seed
        )
    return fed


def _by_group(config, name):
    """The value of each client, from those of the groups."""
    values, groups = getattr(config, name), config.groups
    if len(values) != len(groups) or sum(groups) != config.clients:
        checks.fail(
            "config",
            (
                f"a value of {name} for each of the groups, whose sizes add up to "
                f"clients={config.clients}"
            ),
            f"{name}={values!r}, groups={groups!r}",
        )
    return [v for v, size in zip(values, groups) for _ in range(size)]


def federation(config: Config):
    """The rows and their owners; points of a sweep with the same ones share them."""
    checks.choice("config", [n for n in datasets.__all__ if n != "arrays"], dataset=config.dataset)
    return _federation(Config(**{n: getattr(config, n) for n in DATA}))


def build(config: Config) -> tuple[Plan, Config]:
    """-> the plan, and the config with the noise multiplier it came to."""
    checks.seed("config", seed=config.seed, partition_seed=config.partition_seed)
    checks.choice("config", ("sound", "as_printed"), mode=config.mode)
    checks.choice("config", ("constant", "inverse_sqrt", "inverse"), lr_schedule=config.lr_schedule)
    checks.choice("config", algorithms.__all__, algorithm=config.algorithm)
    checks.choice("config", tasks.__all__, model=config.model)
    checks.choice("config", (None, *sampling.__all__), sampler=config.sampler)
    checks.choice("config", batches.__all__, batch_sampler=config.batch_sampler)
    checks.choice("config", CLIPS, clip=config.clip)
    checks.choice(
        "config", OPTIMIZERS, optimizer=config.optimizer, server_optimizer=config.server_optimizer
    )
    if not 0 < config.delta < 1:
        checks.fail(
            "config",
            "delta in (0, 1)",
            f"delta={config.delta!r}",
            "Below 1 / (number of examples) is usual.",
        )
    if config.noise_multiplier is not None and config.epsilon is not None:
        checks.fail("config", "either noise_multiplier or epsilon", "both")
    the_view(config)  # refuses what is no view
    checks.whole("config", rounds=config.rounds)
    checks.positive("config", clip_norm=config.clip_norm)
    checks.positive("config", clip_decay=config.clip_decay, noise_decay=config.noise_decay)
    checks.choice("config", NOISES, noise_shape=config.noise_shape)
    checks.choice("config", BANDS, bands=config.bands)
    checks.choice("config", wavelet.READINGS, reading=config.reading)
    published, unit = config.noise_shape == "published", the_unit(config)
    if published and config.mode != "as_printed":
        checks.fail(
            "config",
            "mode='as_printed' for noise_shape='published'",
            f"mode={config.mode!r}",
            (
                "It does not have the privacy that it states: proved and claimed are shown side by "
                "side."
            ),
        )
    if config.noise_shape != "isotropic" and config.clip != "flat":
        checks.fail(
            "config",
            "clip='flat' beside noise_shape",
            f"clip={config.clip!r}",
            "A shape brings its own clip.",
        )
    if config.algorithm == "padpfl" and unit == "example":
        checks.fail(
            "config",
            "unit = client for padpfl",
            "unit='example'",
            "Its noise is on the clipped upload.",
        )
    plain = (config.clip, config.noise_shape, config.clip_decay, config.noise_decay) == (
        "flat",
        "isotropic",
        1,
        1,
    )
    if config.algorithm == "padpfl" and config.mode == "as_printed" and not plain:
        checks.fail(
            "config",
            "a flat clip and isotropic noise, both constant, for padpfl in mode='as_printed'",
            "others",
        )
    if config.average_from is not None and config.average_from >= config.rounds:
        checks.fail(
            "config",
            f"average_from < rounds={config.rounds}",
            f"average_from={config.average_from}",
        )
    if (
        config.mode == "as_printed"
        and not published
        and unit != ("client" if config.algorithm == "padpfl" else "example")
    ):
        checks.fail(
            "config",
            "unit = example and noise for mode='as_printed'",
            f"unit={unit!r}",
            "The papers' formulas are for noise in local steps; padpfl's for unit='client'.",
        )
    if config.algorithm == "output_perturbation":
        if the_unit(config) == "client":
            checks.fail(
                "config", "unit = example for output_perturbation", "unit='client'", "Use fedavg."
            )
        if config.mode == "as_printed" and (config.clip, config.clip_decay, config.noise_decay) != (
            "flat",
            1,
            1,
        ):
            checks.fail(
                "config",
                "a flat clip and noise as printed for output_perturbation in mode='as_printed'",
                (
                    f"clip={config.clip!r}, clip_decay={config.clip_decay}, "
                    f"noise_decay={config.noise_decay}"
                ),
            )
    if config.epsilon is None:
        return _plan(config, config.noise_multiplier), config
    draft = _plan(config, 1.0)
    target = dict(
        epsilon=config.epsilon, delta=config.delta, rounds=config.rounds, view=the_view(config)
    )
    if config.mode == "as_printed" and config.algorithm == "padpfl":
        stds = [
            as_printed.calibrate(draft, paper=config.paper, **target | dict(view=v))
            for v in ("server", "third_party")
        ]
        return _plan(config, stds), config
    if config.mode == "as_printed":
        z = as_printed.calibrate(draft, paper=config.paper, **target)
    elif config.per_client_noise:
        z = calibrate_per_client(draft, **target)
    else:
        z = calibrate(draft, unit=the_unit(config), adjacency=config.adjacency, **target)
    # one number is written down; noise of each client or round follows from epsilon again
    found = (
        dataclasses.replace(config, noise_multiplier=float(z), epsilon=None)
        if np.ndim(z) == 0 and not callable(z)
        else config
    )
    return _plan(found, z), found


def _plan(config: Config, noise) -> Plan:
    """The plan, with this noise: a multiplier, one for each client, a function of the round, or
    None."""
    fed = federation(config)
    task = (
        tasks.mlp(fed, config.hidden)
        if config.model == "mlp"
        else getattr(tasks, config.model)(fed)
    )
    unit, sampler = the_unit(config), _sampler(config)
    expected = float(sampler.expected)
    if (
        config.batch_sampler == "without_replacement"
    ):  # nothing is claimed without noise: take small clients whole
        batch = batches.without_replacement(config.batch, short="all" if unit is None else "error")
    else:
        batch = getattr(batches, config.batch_sampler)(
            *(() if config.batch_sampler == "full" else (config.batch,))
        )
    upload = release = None
    if config.algorithm == "padpfl" and unit == "client":
        upload, release = _padpfl_chains(config, task, noise)
    elif unit == "client":
        release = _chain(config, task, noise, divide(expected))
    weights = client_weights.impact(config.impact, config.groups) if config.impact else config.weights
    return plan(
        fed,
        task,
        _algorithm(config, fed, task, batch, noise),
        sampler,
        upload=upload,
        release=release,
        weights=weights,
        adjacency=config.adjacency if unit == "client" and upload is None else None,
    )


def _padpfl_chains(config, task, noise):
    """Noise on what a client uploads; as printed a pair of stds, of which the second is the
    server's, of the mean."""
    if not isinstance(noise, list):
        return _chain(config, task, noise), None
    client, server = noise
    clip, clients = clip_l2(config.clip_norm), config.clients
    upload = chain(clip, total(), gaussian(std=client))
    if not server:
        return upload, None
    return upload, chain(
        bounded(config.clip_norm, "upload"),
        total(),
        gaussian(std=server * clients),
        divide(clients),
    )


def _algorithm(config, fed, task, batch, noise):
    made = _made(config, fed, task, batch, noise)
    if config.average_from is None:
        return made
    checks.whole("config", least=0, average_from=config.average_from)
    return algorithms.averaged(made, config.average_from)


def _made(config, fed, task, batch, noise):
    example, how = the_unit(config) == "example", dict(l2=config.l2 or None, compute=config.compute)
    make = getattr(algorithms, config.algorithm)
    per_step = config.algorithm == "fedsgd"
    options = dict(batch=batch, lr=_rate(config, config.lr, 1 if per_step else config.steps))
    if not per_step:
        options |= dict(steps=config.steps, server_lr=_rate(config, config.server_lr, 1))
    if config.algorithm == "addpnfl":
        options |= {
            f: getattr(config, f) for f in ("adaptivity", "beta1", "beta2", "second_moment_of")
        }
    else:
        options["server_optimizer"] = OPTIMIZERS[config.server_optimizer]
    if config.algorithm == "output_perturbation":
        chain_ = (
            _chain(config, task, noise) if example else chain(clip_l2(config.clip_norm), total())
        )
        printed_ = example and config.mode == "as_printed"
        return make(
            grad(task.loss, **how), chain_, clip_steps="last" if printed_ else "all", **options
        )
    if not per_step and config.algorithm != "padpfl":
        options["optimizer"] = OPTIMIZERS[config.optimizer]
    options |= {
        f: getattr(config, f)
        for f, used in (
            ("mu", ("fedprox", "padpfl")),
            ("warm_rounds", ("scaffold",)),
            ("upload", ("padpfl",)),
        )
        if config.algorithm in used
    }
    if not example:
        return make(grad(task.loss, **how), **options)
    if config.batch_sampler != "full":
        divisor = config.batch
    else:  # under add_remove a client's own size is no public number
        divisor = (
            float(fed.size.sum()) / config.clients if config.adjacency == "add_remove" else "size"
        )
    return make(
        private_grad(task.loss, _chain(config, task, noise, divide(divisor)), **how), **options
    )


def _rate(config, lr, every):
    """A learning rate that is constant within a round."""
    if config.lr_schedule == "constant":
        return lr
    return getattr(schedules, config.lr_schedule)(lr, every=every)


def _sampler(config):
    """Who takes part: by name, or by what is given of cohort and rate."""
    cohort, rate, clients = config.cohort, config.rate, config.clients
    name = config.sampler or (
        "poisson" if rate is not None else "full" if cohort is None else "without_replacement"
    )
    got = f"sampler={name!r}, cohort={cohort}, rate={rate}"
    if cohort is not None:
        checks.whole("config", cohort=cohort)
        if cohort > clients:
            checks.fail("config", f"cohort <= clients={clients}", f"cohort={cohort}")
    if name == "full":
        if rate is not None or cohort not in (None, clients):
            checks.fail("config", "no cohort and no rate beside sampler='full'", got)
        return sampling.full(clients)
    if name == "poisson":
        if (rate is None) == (cohort is None):
            checks.fail("config", "either cohort or rate for sampler='poisson'", got)
        return sampling.poisson(clients, cohort / clients if rate is None else rate)
    if rate is not None or cohort is None:
        checks.fail("config", f"cohort and no rate for sampler={name!r}", got)
    if name == "first_responders":
        checks.positive("config", latency_spread=config.latency_spread)
        return sampling.first_responders(
            clients, cohort, np.geomspace(1, config.latency_spread, clients)
        )
    return getattr(sampling, name)(clients, cohort)


def _chain(config, task, noise, *post):
    bound = (
        config.clip_norm
        if config.clip_decay == 1
        else schedules.exponential(config.clip_norm, config.clip_decay, config.rounds)
    )
    if config.clip == "per_layer":
        layers = len(jax.tree.leaves(jax.eval_shape(task.init, jax.random.key(0))))
        if config.algorithm == "scaffold" and the_unit(config) == "client":
            layers *= 2  # a difference and a change of control variate
        first = clip_per_layer(
            config.clip_norm / layers**0.5, layers
        )  # clip_norm bounds all layers together
    elif config.clip == "adaptive":
        if the_unit(config) != "client":
            checks.fail(
                "config", "unit = client for an adaptive clip", f"unit={the_unit(config)!r}"
            )
        first = clip_adaptive(config.clip_norm, float(_sampler(config).expected))
    else:
        first = clip_l2(bound)
    if config.clip != "flat" and config.clip_decay != 1:
        checks.fail("config", "clip='flat' beside clip_decay", f"clip={config.clip!r}")
    if np.ndim(noise) == 0 and not callable(noise) and config.noise_decay != 1:
        noise = schedules.exponential(noise, config.noise_decay, config.rounds)
    elif config.noise_decay != 1:
        checks.fail(
            "config",
            "one noise multiplier for all clients beside noise_decay",
            "per_client_noise or as_printed",
        )
    adjacency = config.adjacency if the_unit(config) == "example" else None
    if config.noise_shape != "isotropic":
        first, stage = _shaped(config, task, bound, noise)
    else:
        stage = (
            gaussian(std=noise)
            if callable(noise) and config.mode == "as_printed"
            else gaussian(noise)
        )
    return chain(first, total(), stage, *post, adjacency=adjacency)


def _shaped(config, task, bound, noise):
    """clip and noise along the bands of a contribution."""
    like = jax.eval_shape(task.init, jax.random.key(0))
    if config.algorithm == "scaffold" and the_unit(config) == "client":
        like = (like, like)  # a difference and a change of control variate
    fed = federation(config)
    found = (
        haar_bands.pixels(like, fed.x.shape[1:])
        if config.bands == "pixels"
        else getattr(haar_bands, config.bands)(like)
    )
    if config.noise_shape == "published":
        if callable(bound) or np.ndim(noise) or callable(noise):
            checks.fail(
                "config",
                "one clip norm and noise multiplier for noise_shape='published'",
                "some that change",
            )
        weights = np.asarray(
            client_weights.impact(config.impact, config.groups)
            if config.impact
            else fed.size
            if config.weights == "size"
            else np.ones(1)
        )
        heaviest = weights.max() / weights.mean() if the_unit(config) == "client" else 1.0
        return wavelet.published(
            config.reading,
            bound,
            noise,
            found,
            calibration="lemma2" if config.lemma2 else "plain",
            max_weight=float(heaviest),
            unsound=True,
        )
    shape = (
        wavelet.weighted(found)
        if config.noise_shape == "weighted"
        else wavelet.ellipsoid(found, config.band_exponent)
    )
    return wavelet.clip_ellipsoid(bound, shape), gaussian(noise, shape=shape)
