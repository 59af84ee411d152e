"""One experiment as plain values: what a TOML file holds and what the command line sets.

`Experiment` declares what belongs to no algorithm, sampler, partition, dataset or model.  The
options of those come from their own signatures (`jfl.core.options`), and both together are
`Config`.
"""

import dataclasses
import difflib
import functools
import math
import tomllib
import typing
from collections.abc import Callable
from typing import Any

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
CLIPS = ("flat", "per_layer", "adaptive")
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


def names(kind: str) -> list[str]:
    """The names that a config can give to a kind of factory: algorithm, dataset, model, ..."""
    module = _MODULES[kind]
    if kind == "dataset":
        return [name for name in module.__all__ if name not in ("arrays", "frame", "hugging_face")]
    if kind == "lr_schedule":  # of one number; others need constants of the problem
        return [name for name in module.__all__ if options.takes(getattr(module, name), "lr")]
    if kind == "strategy":  # the others are what one is, and for what it is made
        return [name for name in module.__all__ if name not in ("Strategy", "momentum")]
    return list(module.__all__)


def factory(kind: str, name: str) -> Callable[..., Any]:
    """The function of that name.

    Raises:
        ArgumentError: for a name that the kind does not have.
    """
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


# --- what the fields of an experiment need for an effect


def _private(config) -> bool:
    return config.noise_multiplier is not None or config.epsilon is not None


def _algorithm(config):
    return factory("algorithm", config.algorithm)


def _takers(kind: str, parameter: str, hint: str = "") -> dict:
    """A need: a function of this kind that takes the parameter."""
    others = [
        repr(n) for n, function in FACTORIES[kind].items() if not options.takes(function, parameter)
    ]
    if not others:
        return {}
    listed = " or ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
    article = "an" if kind[0] in "aeiou" else "a"
    return {
        f"{article} {kind} other than {listed}{hint}": lambda config: options.takes(
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


def _clips(config) -> bool:
    """An algorithm with a mechanism of its own clips without noise, too."""
    return _private(config) or traits_of(_algorithm(config)).example_noise == "mechanism"


def _several(kind: str, *others: str) -> str:
    return " | ".join([*others, *names(kind)])


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One experiment.  Fields that are None follow from the others."""

    algorithm: str = field(
        "fedavg", _several("algorithm"), choices=functools.partial(names, "algorithm")
    )
    dataset: str = field("digits", _several("dataset"), choices=functools.partial(names, "dataset"))
    preprocess: str = field(
        "none",
        "of features: none, or some of flatten, standardise, unit_norm, pca:COMPONENTS and "
        "noble2022_code (as its published code has it), joined by commas",
    )
    partition: str = field(
        "dirichlet",
        f"{_several('partition')} (natural: the rows that synthetic made for a client)",
        choices=functools.partial(names, "partition"),
    )
    clients: int = field(50, "number of clients")
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
    model: str = field("mlp", _several("model"), choices=functools.partial(names, "model"))
    compute: str = field(
        "float32",
        f"type of the local steps' forward and backward passes: {' | '.join(COMPUTE)}; never of "
        "clip norms or noise",
    )
    sampler: str | None = field(
        None,
        f"of clients: {_several('sampler')}; default by cohort and rate",
        choices=lambda: (None, *names("sampler")),
    )
    cohort: int | None = field(None, "clients a round (poisson: expected); default all")
    rate: float | None = field(None, "poisson: probability of a client, instead of cohort")
    batch_sampler: str = field(
        "without_replacement",
        f"of rows: {_several('batch_sampler')}",
        choices=functools.partial(names, "batch_sampler"),
    )
    batch: int = field(
        16,
        "rows of a local step (poisson: expected)",
        needs=_takers("batch_sampler", "batch"),
    )
    steps: int = field(
        10,
        "local steps a round",
        needs=_takers("algorithm", "steps"),
    )
    rounds: int = field(60, "communication rounds", check=checks.require_integer)
    lr: float = field(0.3, "learning rate of the clients (fedsgd: of the server)")
    optimizer: str = field(
        "sgd",
        f"of the clients: {' | '.join(OPTIMIZERS)}",
        choices=lambda: OPTIMIZERS,
        needs=_takers("algorithm", "optimizer"),
    )
    server_lr: float = field(
        1.0,
        "learning rate of the server",
        needs=_takers("algorithm", "server_lr", ", whose lr is the server's,"),
    )
    server_optimizer: str = field(
        "sgd",
        f"of the server: {' | '.join(OPTIMIZERS)}",
        choices=lambda: OPTIMIZERS,
        needs=_takers("algorithm", "server_optimizer"),
    )
    lr_schedule: str = field(
        "constant",
        f"{_several('lr_schedule', 'constant')}: lr over sqrt(t + 1) or t + 1, t the rounds done "
        "(the server's lr too)",
        choices=lambda: ("constant", *names("lr_schedule")),
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
    unit: str | None = field(
        None,
        "what the noise protects: example (noise in every local step) | client (noise on the "
        "aggregate; padpfl: on uploads)",
        choices=lambda: (None, *UNITS),
    )
    clip: str = field(
        "flat",
        "flat | per_layer | adaptive (client level only)",
        choices=lambda: CLIPS,
        needs=NOISE,
    )
    clip_norm: float = field(
        1.0,
        "bound on a contribution (adaptive: the first one)",
        check=checks.require_positive,
        needs={"noise_multiplier or epsilon": _clips},
    )
    noise_multiplier: float | None = field(
        None, "standard deviation of the noise over the sensitivity; None: no privacy"
    )
    strategy: str | None = field(
        None,
        f"of noise on the aggregate that is correlated over rounds: {_several('strategy')}; None: "
        "independent noise",
        choices=lambda: (None, *names("strategy")),
        needs={
            "noise, and unit='client'": lambda config: (
                _private(config) and the_unit(config) == "client"
            )
        },
    )
    noise_shape: str = field(
        "isotropic",
        "isotropic | ellipsoid | weighted (as the wavelet paper weighs) | published (its own "
        "mechanism, mode as_printed)",
        choices=lambda: NOISES,
        needs=NOISE,
    )
    bands: str = field(
        "per_layer",
        "of a noise_shape: flat | per_layer | pixels (the levels of images)",
        choices=lambda: BANDS,
        needs={"a noise_shape": lambda config: config.noise_shape != "isotropic"},
    )
    band_exponent: float = field(
        0.25,
        "ellipsoid: of the expected energies; 0 is isotropic",
        needs={"noise_shape='ellipsoid'": lambda config: config.noise_shape == "ellipsoid"},
    )
    reading: str = field(
        "R1",
        "published: R1 to R6, what it clips",
        choices=lambda: wavelet.READINGS,
        needs=PUBLISHED,
    )
    lemma2: bool = field(False, "published: with the smaller noise of its Lemma 2", needs=PUBLISHED)
    epsilon: float | None = field(
        None,
        "instead of noise_multiplier: calibrate to this epsilon, for the worst client (li2025 as "
        "printed: of one round)",
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
    view: str | None = field(
        None,
        "server | third_party; default the one that has a guarantee: example server, client "
        "third_party",
        choices=lambda: (None, *VIEWS),
        needs=NOISE,
    )
    adjacency: str | None = field(
        None,
        "add_remove | replace_one | zero_out; default what the sampler implies",
        needs=NOISE,
    )
    mode: str = field(
        "sound",
        "sound: epsilon chooses the noise by the proved accountant; as_printed: by the paper's "
        "formula",
        choices=lambda: MODES,
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
        """Counts of Health that do not stop the run."""
        return ("empty_cohort",) if self.allow_empty else ()


# those that only some factories take; of other parameters the experiment's own fields decide
OPTIONS = {
    name: option
    for name, option in options.shared(FACTORIES).items()
    if name not in {f.name for f in dataclasses.fields(Experiment)}
}
if typing.TYPE_CHECKING:

    @dataclasses.dataclass(frozen=True)
    class Config(Experiment):
        """An experiment with the options of all factories, whose names are found when jfl runs."""

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


# --- what a config chooses


def sampler_of(config: Config) -> str:
    """Who draws the cohorts: by name, or by what is given of cohort and rate."""
    if config.sampler is not None:
        return config.sampler
    if config.rate is not None:
        return "poisson"
    return "full" if config.cohort is None else "without_replacement"


def the_unit(config: Config) -> str | None:
    """What the noise protects, "example" or "client"; None without privacy."""
    if config.unit is not None:
        checks.require_one_of("config", UNITS, unit=config.unit)
    if not _private(config):
        if config.unit is not None:
            checks.fail(
                "config",
                "noise_multiplier or epsilon beside unit",
                f"unit={config.unit!r} alone",
                "Give --noise-multiplier or --epsilon, or leave unit out for no privacy.",
            )
        return None
    return config.unit or "example"


def the_view(config: Config) -> str:
    """Whose eyes the guarantee is for: the server's, or those of a third party."""
    if config.view is not None:
        checks.require_one_of("config", VIEWS, view=config.view)
        return config.view
    if the_unit(config) == "client" and traits_of(_algorithm(config)).client_noise != "upload":
        return "third_party"  # the server sees what it aggregates before it adds the noise
    return "server"


# --- options without an effect, which would look like a result


def refuse_unused(*configs: Config) -> None:
    """Reject an option that was set but has no effect in any of these configs.

    Raises:
        ArgumentError: If there is such an option; the message says what it requires.
    """
    unused = [unused_options(config) for config in configs]
    for name, need in unused[0].items():
        if all(name in others for others in unused):
            checks.fail(
                "config",
                f"{need} for {name}",
                f"{name}={getattr(configs[0], name)!r} without it",
                f"Leave {name} out.",
            )


def unused_options(config: Config) -> dict[str, str]:
    """Return the options that differ from their defaults but have no effect, with what each
    requires."""
    changed = [n for n, field in FIELDS.items() if getattr(config, n) != field.default]
    unused = {}
    for name in changed:
        for need, holds in FIELDS[name].metadata["needs"].items():
            if not holds(config):
                unused[name] = need
        if name in OPTIONS and not _taken(config, name):
            unused[name] = _takers(name)
    return unused


def _takers(name) -> str:
    """Describe the functions that take an option."""
    takers = OPTIONS[name].takers
    each = [
        f"{kind}={several[0]!r}"
        if len(several) == 1
        else f"{kind} {', '.join(map(repr, several[:-1]))} or {several[-1]!r}"
        for kind, several in takers.items()
    ]
    return ", or ".join(each) + (", and no group_rows" if "partition" in takers else "")


def _taken(config, name) -> bool:
    """Return whether a function that this config names takes the option."""
    return any(
        name in {option.name for option in options.of(chosen)} for chosen in factories(config)
    )


def factories(config: Config) -> list:
    """Return the functions that a config names, except a partition that group_rows replaces."""
    kinds = {kind: getattr(config, kind) for kind in ("algorithm", "dataset", "model")}
    kinds |= dict(batch_sampler=config.batch_sampler, sampler=sampler_of(config))
    if config.strategy is not None:
        kinds["strategy"] = config.strategy
    if not config.group_rows:
        kinds["partition"] = config.partition
    if config.lr_schedule != "constant":
        kinds["lr_schedule"] = config.lr_schedule
    chosen = [factory(kind, name) for kind, name in kinds.items()]
    if config.group_rows and config.partition == "labels":
        chosen.append(partition.sizes)
    return chosen


# --- files


def load(path) -> dict:
    """The fields set in a TOML file, and under "sweep" a table of lists.

    Raises:
        ArgumentError: for unreadable files, unknown names and values of the wrong type.
    """
    where = f"config {path}"
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    # numbers and nesting beyond Python's limits are no TOML error
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
    """TOML of flat values.

    None is left out, but among the values of a sweep, where it is the word none.
    """
    axes = {
        name: ["none" if value is None else value for value in several]
        for name, several in (values.get("sweep") or {}).items()
    }
    flat = {k: v for k, v in values.items() if v is not None and k != "sweep"}
    text = tomli_w.dumps(flat | (dict(sweep=axes) if axes else {}))
    return f"# {comment}\n{text}" if comment else text


def coerce(name: str, value, where: str):
    """A field's value in its type.

    Raises:
        ArgumentError: for a value of another type, or an unknown name, with names that are close.
    """
    if name not in FIELDS:
        close = difflib.get_close_matches(name, FIELDS, 3)
        checks.fail(
            where,
            "known names",
            f"{name!r}",
            f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(FIELDS)}.",
        )
    kind, optional = options.split_optional(FIELDS[name].type)
    # the word none, where a flag or TOML has no other for it
    if optional and (value is None or value == "none"):
        return None
    try:
        return _of_type(kind, value)
    except TypeError:
        words = " (true or false)" if kind is bool else " (or none)" if optional else ""
        shown = FIELDS[name].type
        shown = shown.__name__ if isinstance(shown, type) and not optional else str(shown)
        checks.fail(where, f"{name} of type {shown}{words}", checks.short_repr(value))


def _of_type(kind, value):
    """`value` as `kind`: no rounding, no numbers from words; TypeError where it is none."""
    if typing.get_origin(kind) is tuple:
        entry = typing.get_args(kind)[0]
        return tuple(
            _of_type(entry, v) for v in (value if isinstance(value, list | tuple) else [value])
        )
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond 1e308
            return math.inf if value > 0 else -math.inf
    if not isinstance(value, kind) or kind is not bool and isinstance(value, bool):
        raise TypeError
    return value
