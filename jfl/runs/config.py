"""One experiment as plain values, as in a TOML file or on the command line.

`Experiment` declares the fields that belong to no particular algorithm, sampler, partition, dataset
or model.  The options of each algorithm, sampler, ... are read from its signature
(`jfl.core.options`).  `Config` has all of these fields.
"""

import dataclasses
import difflib
import functools
import os
import tomllib
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import optax
import tomli_w

from .. import algorithms, sampling, schedules
from ..algorithms.base import traits_of
from ..core import checks, options
from ..core.options import field
from ..data import datasets, partition
from ..models import tasks
from ..privacy.mechanisms import strategies, wavelet
from ..sampling import batches

UNITS = ("example", "client")
VIEWS = ("server", "third_party")
MODES = ("sound", "as_printed")
CLIPS = ("flat", "automatic", "per_layer", "adaptive")
NOISES = ("isotropic", "ellipsoid", "weighted", "published")
BANDS = ("flat", "per_layer", "pixels")
PAPERS = ("noble2022", "chen2024", "li2025", "talaei2024", "ranaweera2025")
COMPUTE = ("float32", "bfloat16", "float16")
OPTIMIZERS = dict(
    sgd=optax.sgd,
    momentum=functools.partial(optax.sgd, momentum=0.9),
    adam=optax.adam,
    adagrad=optax.adagrad,
    yogi=optax.yogi,
)
RUN_ONLY = ("rounds", "evaluate_every", "checkpoint_every")  # what a resumed run may change


# --- factories: what a config can name

# Functions of jfl.algorithms that a config expresses as fedavg with an optimizer on the server.
SERVER_OPTIMIZER_OF = dict(fedavgm="momentum", fedadam="adam", fedyogi="yogi", fedadagrad="adagrad")


def names(kind: str) -> list[str]:
    """Return the names that a config can give to a kind of factory, such as "algorithm"."""
    module = _MODULES[kind]
    if kind == "dataset":
        return [name for name in module.__all__ if name not in ("arrays", "frame", "hugging_face")]
    if kind == "lr_schedule":  # the others need constants of the problem
        return [name for name in module.__all__ if options.takes(getattr(module, name), "lr")]
    if kind == "strategy":
        return [name for name in module.__all__ if name not in ("Strategy", "momentum")]
    return list(module.__all__)


def factory(kind: str, name: str) -> Callable[..., Any]:
    """Return the factory with this name, such as the algorithm "fedavg".

    Raises:
        ArgumentError: If the kind has no such name.
    """
    if kind == "algorithm" and name in SERVER_OPTIMIZER_OF:
        checks.fail(
            "config",
            f"algorithm='fedavg' with server_optimizer={SERVER_OPTIMIZER_OF[name]!r}",
            f"algorithm={name!r}",
            f"Set server_lr, too. In Python, jfl.algorithms.{name} has the constants of its paper.",
        )
    checks.require_one_of("config", names(kind), **{kind: name})
    return getattr(_MODULES[kind], name)


_MODULES: dict[str, Any] = dict(
    algorithm=algorithms,
    dataset=datasets,
    partition=partition,
    model=tasks,
    sampler=sampling,
    strategy=strategies,
    batch_sampler=batches,
    lr_schedule=schedules,
)
FACTORIES = {kind: {name: factory(kind, name) for name in names(kind)} for kind in _MODULES}


# --- conditions under which the fields of an experiment have an effect


def _private(config) -> bool:
    """Return whether a config asks for noise."""
    return config.noise_multiplier is not None or config.epsilon is not None


def _algorithm(config):
    """Return the function of the config's algorithm."""
    return factory("algorithm", config.algorithm)


def _takes(kind: str, parameter: str) -> dict:
    """Return the condition that the function of this kind takes the parameter."""
    article = "an" if kind[0] in "aeiou" else "a"
    return {
        f"{article} {kind} that takes {parameter}": lambda config: options.takes(
            factory(kind, getattr(config, kind)), parameter
        )
    }


NOISE = {"noise_multiplier or epsilon": _private}
GROUPED = {
    "group_rows, group_noise or impact": lambda config: bool(
        config.group_rows + config.group_noise + config.impact
    )
}
PUBLISHED = {"noise_shape='published'": lambda config: config.noise_shape == "published"}


def _has_owners(config) -> bool:
    """Return whether the clients of a config are the owners that a file names."""
    return config.dataset == "file" and config.partition == "natural"


def _clips(config) -> bool:
    """Return whether a run clips contributions.

    An algorithm with its own mechanism clips without noise, too.
    """
    return _private(config) or traits_of(_algorithm(config)).example_noise == "mechanism"


def _one_of(default: str | None, choices, help: str = "{}", needs: dict | None = None):
    """Return a field with a fixed set of choices, which its help lists; None is valid if it is the
    default."""
    several = (None, *choices) if default is None else tuple(choices)
    text = help.format(" | ".join(choices))
    return field(default, text, choices=lambda: several, needs=needs)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.  If a field is None, its value is derived from other fields."""

    algorithm: str = _one_of("fedavg", names("algorithm"))
    dataset: str = _one_of("digits", names("dataset"))
    preprocess: str = field(
        "none",
        "of features: flatten, standardise, unit_norm, pca:COMPONENTS, noble2022_code (as its "
        "published code has it), or several of them joined by commas",
    )
    partition: str = _one_of(
        "dirichlet",
        names("partition"),
        "{} (natural: the rows that synthetic made for a client)",
    )
    clients: int = field(
        50,
        "number of clients; with --data and owners, that of the owners",
        needs={"a partition other than 'natural'": lambda config: not _has_owners(config)},
    )
    groups: tuple[int, ...] = field(
        (),
        "sizes of groups of clients, one after another, for group_rows, group_noise and impact",
        needs=GROUPED,
    )
    group_rows: tuple[int, ...] = field(
        (),
        "rows of a client of each group; of all classes, or with partition='labels' of "
        "classes_per_client",
    )
    group_noise: tuple[float, ...] = field(
        (), "part of the pixels that salt and pepper spoils in each group's rows"
    )
    holdout: float = field(0.0, "fraction of each client's rows kept for its own test")
    partition_seed: int = field(0, "who owns which row", check=checks.require_seed)
    model: str = _one_of("mlp", names("model"))
    compute: str = field(
        "float32",
        f"type of the local steps' forward and backward passes: {' | '.join(COMPUTE)}; never of "
        "clip norms or noise",
    )
    sampler: str | None = _one_of(
        None, names("sampler"), "of clients: {}; default by cohort and rate"
    )
    cohort: int | None = field(None, "clients a round (poisson: expected); default all")
    rate: float | None = field(None, "poisson: probability of a client, instead of cohort")
    batch_sampler: str = _one_of("without_replacement", names("batch_sampler"), "of rows: {}")
    batch: int = field(
        16,
        "rows of a local step (poisson: expected)",
        needs=_takes("batch_sampler", "batch"),
    )
    steps: int = field(10, "local steps per round", needs=_takes("algorithm", "steps"))
    rounds: int = field(60, "communication rounds", check=checks.require_integer)
    lr: float = field(0.3, "learning rate of the clients (fedsgd: of the server)")
    optimizer: str = _one_of(
        "sgd", OPTIMIZERS, "of the clients: {}", needs=_takes("algorithm", "optimizer")
    )
    server_lr: float = field(
        1.0,
        "learning rate of the server; that of fedsgd is lr",
        needs=_takes("algorithm", "server_lr"),
    )
    server_optimizer: str = _one_of(
        "sgd", OPTIMIZERS, "of the server: {}", needs=_takes("algorithm", "server_optimizer")
    )
    lr_schedule: str = _one_of(
        "constant",
        ["constant", *names("lr_schedule")],
        "{}: lr over sqrt(t + 1) or t + 1, t the rounds done (the server's lr too)",
    )
    l2: float = field(0.0, "L2 regularisation, outside the clip")
    weights: str = field(
        "uniform",
        "of clients: uniform | size",
        needs={"no impact": lambda config: not config.impact},
    )
    impact: tuple[float, ...] = field(
        (), "instead of weights: ratios of the groups' impact factors"
    )
    average_from: int | None = field(
        None, "judge the mean of the models from this round on; None: the last model"
    )
    unit: str | None = _one_of(
        None,
        UNITS,
        "what the noise protects, {}; noise in every local step, or on the aggregate (padpfl: on "
        "uploads)",
    )
    clip: str = _one_of("flat", CLIPS, "{} (adaptive: client level only)", needs=NOISE)
    clip_norm: float = field(
        1.0,
        "bound on a contribution (adaptive: the first one)",
        check=checks.require_positive,
        needs={"noise_multiplier or epsilon": _clips},
    )
    noise_multiplier: float | None = field(
        None, "standard deviation of the noise over the sensitivity; None: no privacy"
    )
    strategy: str | None = _one_of(
        None,
        names("strategy"),
        "of noise on the aggregate that is correlated over rounds: {}; None: independent noise",
        needs={
            "noise, and unit='client'": lambda config: (
                _private(config) and the_unit(config) == "client"
            )
        },
    )
    noise_shape: str = _one_of(
        "isotropic",
        NOISES,
        "{}; weighted: as the wavelet paper weighs; published: its own mechanism, mode as_printed",
        needs=NOISE,
    )
    bands: str = _one_of(
        "per_layer",
        BANDS,
        "of a noise_shape: {} (pixels: the levels of images)",
        needs={"a noise_shape": lambda config: config.noise_shape != "isotropic"},
    )
    band_exponent: float = field(
        0.25,
        "ellipsoid: of the expected energies; 0 is isotropic",
        needs={"noise_shape='ellipsoid'": lambda config: config.noise_shape == "ellipsoid"},
    )
    reading: str = _one_of("R1", wavelet.READINGS, "published: {}, what it clips", needs=PUBLISHED)
    lemma2: bool = field(False, "published: with the smaller noise of its Lemma 2", needs=PUBLISHED)
    epsilon: float | None = field(
        None,
        "calibrate the noise to this epsilon, instead of noise_multiplier, for the worst client "
        "(li2025 as printed: of one round)",
    )
    per_client_noise: bool = field(
        False,
        "with epsilon, unit example: calibrate each client's noise by itself",
        needs={
            "epsilon, unit='example' and mode='sound'": lambda config: (
                config.epsilon is not None
                and config.mode == "sound"
                and config.unit in (None, "example")
            )
        },
    )
    clip_decay: float = field(
        1.0,
        "part of the clip norm that is left after all rounds (Dynamic DP-SGD)",
        check=checks.require_positive,
        needs=NOISE,
    )
    noise_decay: float = field(
        1.0,
        "part of the noise multiplier that is left after all rounds (Dynamic DP-SGD)",
        check=checks.require_positive,
        needs=NOISE,
    )
    delta: float = field(1e-5, "delta of the guarantee, in (0, 1)", needs=NOISE)
    view: str | None = _one_of(
        None,
        VIEWS,
        "{}; default the one that has a guarantee: example server, client third_party",
        needs=NOISE,
    )
    adjacency: str | None = field(
        None,
        "add_remove | replace_one | zero_out; default what the sampler implies",
        needs=NOISE,
    )
    mode: str = _one_of(
        "sound",
        MODES,
        "{}: epsilon chooses the noise by the proved accountant, or by the paper's formula",
        needs=NOISE,
    )
    paper: str | None = field(
        None,
        f"as_printed: {' | '.join(PAPERS)}; default that of algorithm or noise",
        needs={"mode='as_printed'": lambda config: config.mode == "as_printed"},
    )
    seed: int = field(0, "seed of the run: cohorts, batches, noise", check=checks.require_seed)
    allow_empty: bool = field(
        False,
        "poisson: a round without a client is legal; otherwise it stops the run",
        needs={
            "sampler='poisson'": lambda config: (
                config.rate is not None
                or config.sampler is not None
                and options.takes(factory("sampler", config.sampler), "rate")
            )
        },
    )
    evaluate_every: int | None = field(
        None, "rounds between evaluations; default about twenty evaluations"
    )
    checkpoint_every: int | None = field(
        None, "rounds between checkpoints; default every evaluation"
    )

    def tolerate(self) -> tuple[str, ...]:
        """Return the names of the counts in `Health` that do not stop the run."""
        return ("empty_cohort",) if self.allow_empty else ()


# The options that only some factories take, and that are not fields of an experiment.
OPTIONS = {
    name: option
    for name, option in options.shared(FACTORIES).items()
    if name not in {f.name for f in dataclasses.fields(Experiment)}
}
if typing.TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True)
    class Config(Experiment):
        """An experiment with the options of all factories, whose names are determined at run
        time."""

        def __init__(self, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
else:
    Config = dataclasses.make_dataclass(
        "Config",
        [
            (option.name, option.type, field(option.default, option.help))
            for option in OPTIONS.values()
        ],
        bases=(Experiment,),
        namespace=dict(__module__=__name__, __doc__=Experiment.__doc__),
        frozen=True,
    )
FIELDS = {f.name: f for f in dataclasses.fields(Config)}


# --- choices that follow from several fields


def sampler_of(config: Config) -> str:
    """Return the name of the sampler; if the config has none, derive it from cohort and rate."""
    if config.sampler is not None:
        return config.sampler
    if config.rate is not None:
        return "poisson"
    return "full" if config.cohort is None else "without_replacement"


def the_unit(config: Config) -> str | None:
    """Return the unit that the noise protects, "example" or "client"; None without noise."""
    if config.unit is not None:
        checks.require_one_of("config", UNITS, unit=config.unit)
    if not _private(config):
        if config.unit is not None:
            checks.fail(
                "config",
                "noise_multiplier or epsilon with unit",
                f"unit={config.unit!r} alone",
                "Give --noise-multiplier or --epsilon, or leave unit out for no privacy.",
            )
        return None
    return config.unit or "example"


def the_view(config: Config) -> str:
    """Return the observer of the guarantee: "server" or "third_party"."""
    if config.view is not None:
        checks.require_one_of("config", VIEWS, view=config.view)
        return config.view
    if the_unit(config) == "client" and traits_of(_algorithm(config)).client_noise != "upload":
        return "third_party"  # the server sees what it aggregates before it adds the noise
    return "server"


# --- options without an effect, which would mislead readers of the results


def refuse_unused(*configs: Config) -> None:
    """Reject an option that was set but has no effect in any of these configs.

    Raises:
        ArgumentError: If there is such an option; the message says what it requires.
    """
    unused = [_unused(config) for config in configs]
    for name, need in unused[0].items():
        if all(name in others for others in unused):
            checks.fail(
                "config",
                f"{need} for {name}",
                f"{name}={getattr(configs[0], name)!r} without it",
                f"Leave {name} out.",
            )


def _unused(config: Config) -> dict[str, str]:
    """Return the options that were changed but have no effect, with the conditions that they
    require."""
    taken = {option.name for chosen in _factories(config) for option in options.of(chosen)}
    unused = {}
    for name, declared in FIELDS.items():
        if getattr(config, name) == declared.default:
            continue
        for need, holds in declared.metadata["needs"].items():
            if not holds(config):
                unused[name] = need
        if name in OPTIONS and name not in taken:
            takers = OPTIONS[name].takers
            unused[name] = ", or ".join(
                f"{kind}={' or '.join(map(repr, several))}" for kind, several in takers.items()
            ) + (", and no group_rows" if "partition" in takers else "")
    return unused


def _factories(config: Config) -> list:
    """Return the functions that a config uses, except a partition that group_rows replaces."""
    chosen = {kind: getattr(config, kind) for kind in _MODULES} | dict(sampler=sampler_of(config))
    if config.group_rows:
        chosen["partition"] = None
    found = [factory(kind, name) for kind, name in chosen.items() if name not in (None, "constant")]
    if config.group_rows and config.partition == "labels":
        found.append(partition.sizes)
    return found


# --- files


def load(path) -> dict:
    """Return the fields of a Config that a TOML file sets.

    The key "sweep" of the result maps each field of the file's [sweep] table to its values.

    Raises:
        ArgumentError: for unreadable files, unknown names and values of the wrong type.
    """
    where = f"config {path}"
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    # Numbers and nesting beyond Python's limits raise other errors than TOML errors.
    except (OSError, ValueError, RecursionError) as error:
        checks.fail("config", "a readable TOML file", f"{path}: {error}")
    axes = values.pop("sweep", {})
    if not isinstance(axes, dict):
        checks.fail(where, "a table [sweep] of lists", f"sweep = {axes!r}")
    for name, several in axes.items():
        if not isinstance(several, list) or not several:
            checks.fail(where, f"a list with at least one value for sweep.{name}", f"{several!r}")
    loaded = {name: coerce(name, value, where) for name, value in values.items()}
    if axes:
        loaded["sweep"] = {
            name: [coerce(name, value, where) for value in several]
            for name, several in axes.items()
        }
    return loaded


def dump(values: dict, comment: str = "") -> str:
    """Return flat values as TOML.

    Fields that are None are left out.  Among the values of a sweep, None is written as "none".
    """
    axes = {
        name: ["none" if value is None else value for value in several]
        for name, several in (values.get("sweep") or {}).items()
    }
    flat = {k: v for k, v in values.items() if v is not None and k != "sweep"}
    text = tomli_w.dumps(flat | (dict(sweep=axes) if axes else {}))
    return f"# {comment}\n{text}" if comment else text


def coerce(name: str, value, where: str):
    """Convert a value to the type of a field, without rounding; make the path `data` absolute.

    Args:
        name: the name of the field.
        value: the value from a file or the command line.
        where: the source of the value, for messages.

    Raises:
        ArgumentError: For a value of another type, or an unknown name; the message suggests similar
            names.
    """
    if name not in FIELDS:
        words = name.replace("_", " ")
        described = [n for n, f in FIELDS.items() if f.metadata["help"].startswith(words)]
        longer = [n for n in FIELDS if n.startswith(name)]
        similar = difflib.get_close_matches(name, FIELDS, 3)
        close = [*dict.fromkeys(described + longer + similar)][:3]
        checks.fail(
            where,
            "known names",
            f"{name!r}",
            f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(FIELDS)}.",
        )
    kind, optional = options.split_optional(FIELDS[name].type)
    # Flags and TOML have no other word for it; help shows the default as None.
    if optional and (value is None or value in ("none", "None")):
        return None
    plain = value.item() if isinstance(value, np.generic) else value
    if kind is bool and plain in ("true", "false"):
        plain = plain == "true"
    if typing.get_origin(kind) is tuple and not isinstance(plain, list | tuple):
        plain = [plain]
    try:
        converted = msgspec.convert(plain, kind)
        # Absolute, because a run may be resumed or loaded in another working directory.
        return os.path.abspath(str(converted)) if name == "data" and converted else converted
    except msgspec.ValidationError:
        words = " (true or false)" if kind is bool else " (or none)" if optional else ""
        shown = FIELDS[name].type
        shown = shown.__name__ if isinstance(shown, type) and not optional else str(shown)
        checks.fail(where, f"{name} of type {shown}{words}", checks.short_repr(value))


# --- presets


class Preset(NamedTuple):
    """The fields of a tested config, and the accuracy that it reached."""

    fields: dict
    # mean and range over seeds 0, 1 and 2, each with a separate split
    accuracy: str


_MNIST = dict(dataset="mnist", partition="iid", clients=100, model="logistic")
_DIGITS = dict(dataset="digits", partition="iid", clients=50, model="logistic")
_CLIENT = dict(unit="client", view="third_party")
_EXAMPLE = dict(unit="example", view="server")

PRESETS = {
    "mnist-client-eps8": Preset(
        _MNIST | _CLIENT | dict(epsilon=8.0, rounds=20, steps=30, batch=20, lr=0.1),
        "0.848 (0.846 to 0.850)",
    ),
    "mnist-example-eps8": Preset(
        _MNIST | _EXAMPLE | dict(epsilon=8.0, cohort=20, rounds=30, steps=5, batch=60, lr=1.0),
        "0.859 (0.857 to 0.861)",
    ),
    "digits-client-eps8": Preset(
        _DIGITS | _CLIENT | dict(epsilon=8.0, rounds=20, steps=10, batch=8, lr=0.3),
        "0.866 (0.847 to 0.880)",
    ),
    "digits-example-eps8": Preset(
        _DIGITS
        | _EXAMPLE
        | dict(algorithm="fedsgd", adjacency="add_remove", epsilon=8.0, rounds=20, lr=4.0)
        | dict(batch_sampler="full", sampler="full"),
        "0.847 (0.836 to 0.864)",
    ),
}


def preset_fields(name: str) -> dict:
    """Return the fields of a preset.

    Raises:
        ArgumentError: If there is no such preset.

    Example:
        >>> preset_fields("mnist-client-eps8")["rounds"]
        20
    """
    checks.require_one_of("--preset", PRESETS, preset=name)
    return dict(PRESETS[name].fields)
