"""One experiment as plain values: what a TOML file holds and what the command line sets."""

import dataclasses
import difflib
import json
import math
import tomllib

from ..core import checks

UNITS = ("example", "client")


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.  Fields that are None follow from the others."""

    algorithm: str = "fedavg"
    """fedavg | fedsgd | fedprox | scaffold | dpnfl | addpnfl | output_perturbation | padpfl"""
    dataset: str = "digits"
    """digits | mnist | fashion_mnist | emnist | cifar10 | svhn | adult | synthetic"""
    synthetic_alpha: float = 0.0
    """synthetic: variance of the mean of a client's classifier"""
    synthetic_beta: float = 0.0
    """synthetic: variance of the mean of a client's centre; large is heterogeneous"""
    preprocess: str = "none"
    """of features: none, or some of flatten, standardise, unit_norm and pca:COMPONENTS, joined by commas"""
    partition: str = "dirichlet"
    """iid | dirichlet | shards | labels | similarity | power_law | natural (synthetic: the rows made for a client)"""
    alpha: float = 0.3
    """dirichlet: concentration; small is heterogeneous"""
    classes_per_client: int = 2
    """shards and labels: classes each client holds"""
    share: float = 0.0
    """similarity: part of a client's rows that is iid"""
    rows_per_client: int | None = None
    """labels, similarity and synthetic: rows of a client; default all rows (synthetic: 5000, a fifth for the test)"""
    exponent: float | None = None
    """power_law and labels: of the sizes, 0 is equal; default 1 for power_law, 0 for labels"""
    min_rows: int = 16
    """dirichlet, power_law and labels: least rows of a client"""
    clients: int = 50
    """number of clients"""
    groups: tuple[int, ...] = ()
    """sizes of groups of clients, one after another, for group_rows, group_noise and impact"""
    group_rows: tuple[int, ...] = ()
    """rows of a client of each group; of all classes, or with partition='labels' of classes_per_client"""
    group_noise: tuple[float, ...] = ()
    """part of the pixels that salt and pepper spoils in each group's rows"""
    holdout: float = 0.0
    """fraction of each client's rows kept for its own test"""
    partition_seed: int = 0
    """who owns which row"""
    model: str = "mlp"
    """logistic | mlp | cnn"""
    hidden: tuple[int, ...] = (64,)
    """mlp: widths of the hidden layers"""
    compute: str = "float32"
    """type of the local steps' forward and backward passes: float32 | bfloat16 | float16; never of clip norms or noise"""
    sampler: str | None = None
    """of clients: full | without_replacement | with_replacement | poisson | first_responders; default by cohort, rate"""
    latency_spread: float = 3.0
    """first_responders: mean latency of the slowest client over that of the fastest"""
    cohort: int | None = None
    """clients a round (poisson: expected); default all"""
    rate: float | None = None
    """poisson: probability of a client, instead of cohort"""
    batch_sampler: str = "without_replacement"
    """of rows: full | without_replacement | with_replacement | poisson | epochs"""
    batch: int = 16
    """rows of a local step (poisson: expected)"""
    steps: int = 10
    """local steps a round"""
    rounds: int = 60
    """communication rounds"""
    lr: float = 0.3
    """learning rate of the clients (fedsgd: of the server)"""
    optimizer: str = "sgd"
    """of the clients: sgd | momentum | adam | adagrad | yogi"""
    server_lr: float = 1.0
    """learning rate of the server"""
    server_optimizer: str = "sgd"
    """of the server: sgd | momentum | adam | adagrad | yogi"""
    lr_schedule: str = "constant"
    """constant | inverse_sqrt | inverse: lr over sqrt(t + 1) or t + 1, t the rounds done (the server's lr too)"""
    mu: float = 0.1
    """fedprox and padpfl: pull to the server's model"""
    upload: str = "model"
    """padpfl: model | difference: what a client clips and uploads"""
    warm_rounds: float | None = None
    """scaffold: first rounds that only find control variates"""
    adaptivity: float = 1e-3
    """addpnfl: what is added to the root of the second moment"""
    beta1: float = 0.9
    """addpnfl: decay of the first moment"""
    beta2: float = 0.99
    """addpnfl: decay of the second moment"""
    second_moment_of: str = "diff"
    """addpnfl: diff | momentum"""
    l2: float = 0.0
    """L2 regularisation, outside the clip"""
    weights: str = "uniform"
    """of clients: uniform | size"""
    impact: tuple[float, ...] = ()
    """instead of weights: ratios of the groups' impact factors"""
    average_from: int | None = None
    """judge the mean of the models from this round on; None: the last model"""
    unit: str | None = None
    """what the noise protects: example (noise in every local step) | client (noise on the aggregate; padpfl: on uploads)"""
    clip: str = "flat"
    """flat | per_layer | adaptive (client level only)"""
    clip_norm: float = 1.0
    """bound on a contribution (adaptive: the first one)"""
    noise_multiplier: float | None = None
    """standard deviation of the noise over the sensitivity; None: no privacy"""
    noise_shape: str = "isotropic"
    """isotropic | ellipsoid | weighted (as the wavelet paper weighs) | published (its own mechanism, mode as_printed)"""
    bands: str = "per_layer"
    """of a noise_shape: flat | per_layer | pixels (the levels of images)"""
    band_exponent: float = 0.25
    """ellipsoid: of the expected energies; 0 is isotropic"""
    reading: str = "R1"
    """published: R1 to R6, what it clips"""
    lemma2: bool = False
    """published: with the smaller noise of its Lemma 2"""
    epsilon: float | None = None
    """instead of noise_multiplier: calibrate to this epsilon, for the worst client (li2025 as printed: of one round)"""
    per_client_noise: bool = False
    """with epsilon, unit example: calibrate each client's noise by itself"""
    clip_decay: float = 1.0
    """part of the clip norm that is left after all rounds (Dynamic DP-SGD)"""
    noise_decay: float = 1.0
    """part of the noise multiplier that is left after all rounds (Dynamic DP-SGD)"""
    delta: float = 1e-5
    """of the guarantee"""
    view: str | None = None
    """server | third_party; default the one that has a guarantee: example server, client third_party"""
    adjacency: str | None = None
    """add_remove | replace_one; default what the sampler implies"""
    mode: str = "sound"
    """sound: epsilon chooses the noise by the proved accountant; as_printed: by the paper's formula"""
    paper: str | None = None
    """as_printed: noble2022 | chen2024 | li2025 | ranaweera2025 | talaei2024; default that of algorithm or noise"""
    seed: int = 0
    """of the run"""
    allow_empty: bool = False
    """poisson: a round without a client is legal; otherwise it stops the run"""
    evaluate_every: int | None = None
    """rounds between evaluations; default about twenty evaluations"""
    checkpoint_every: int | None = None
    """rounds between checkpoints; default every evaluation"""

    def tolerate(self) -> tuple:
        """Counts of Health that do not stop the run."""
        return ("empty_cohort",) if self.allow_empty else ()


FIELDS = {f.name: f for f in dataclasses.fields(Config)}
RUN_ONLY = ("rounds", "evaluate_every", "checkpoint_every")  # what a resumed run may change


def load(path) -> dict:
    """The fields set in a TOML file, and under "sweep" a table of lists.

    Raises:
        ValueError: for unreadable files, unknown names and values of the wrong type.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (
        OSError,
        ValueError,
        RecursionError,
    ) as error:  # numbers and nesting beyond Python's limits are no TOML error
        checks.fail("config", "a readable TOML file", f"{path}: {error}")
    axes = values.pop("sweep", {})
    if not isinstance(axes, dict):
        checks.fail(f"config {path}", "a table [sweep] of lists", f"sweep = {axes!r}")
    for name, value in axes.items():
        if not isinstance(value, list) or not value:
            checks.fail(
                f"config {path}", f"a list with at least one value for sweep.{name}", f"{value!r}"
            )
    out = {name: coerce(name, value, f"config {path}") for name, value in values.items()}
    if axes:
        out["sweep"] = {
            name: [coerce(name, v, f"config {path}") for v in value] for name, value in axes.items()
        }
    return out


def coerce(name: str, value, where: str):
    """A field's value in its type, or a ValueError that names close fields."""
    if name not in FIELDS:
        close = difflib.get_close_matches(name, FIELDS, 3)
        checks.fail(
            where,
            "known names",
            f"{name!r}",
            f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(FIELDS)}.",
        )
    kind = FIELDS[name].type
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    optional = "None" in str(kind)
    if optional and (
        value is None or value == "none"
    ):  # the word, where a flag or TOML has no other for it
        return None
    if "tuple" in str(kind):
        items = value if isinstance(value, (list, tuple)) else [value]
        wanted = (int, float) if "float" in str(kind) else int
        if all(isinstance(v, wanted) and not isinstance(v, bool) for v in items):
            return tuple(_float(v) for v in items) if wanted is not int else tuple(items)
    elif "float" in str(kind):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _float(value)
    elif "int" in str(kind):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif "bool" in str(kind):
        if isinstance(value, bool) or value in ("true", "false"):
            return value in (True, "true")
    elif isinstance(value, str):
        return value
    words = " (true or false)" if "bool" in str(kind) else " (or none)" if optional else ""
    checks.fail(where, f"{name} of type {text}{words}", checks.shown(value))


def _float(value) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number beyond 1e308
        return math.inf if value > 0 else -math.inf


def dump(values: dict, comment: str = "") -> str:
    """TOML of flat values; None is left out, but among the values of a sweep, where it is the word
    none."""

    def one(v):
        if v is None:
            return '"none"'
        if isinstance(v, bool):
            return str(v).lower()
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(map(one, v)) + "]"
        return (
            repr(float(v))
            if isinstance(v, float)
            else str(v)
            if isinstance(v, int)
            else json.dumps(v, ensure_ascii=False)
        )

    axes = values.get("sweep") or {}
    lines = [f"# {comment}"] if comment else []
    lines += [f"{k} = {one(v)}" for k, v in values.items() if v is not None and k != "sweep"]
    if axes:
        lines += ["", "[sweep]"] + [f"{k} = {one(v)}" for k, v in axes.items()]
    return "\n".join(lines) + "\n"


def the_unit(config: Config) -> str | None:
    """The site that gets the noise; None without privacy."""
    if config.unit is not None:
        checks.choice("config", UNITS, unit=config.unit)
    if config.noise_multiplier is None and config.epsilon is None:
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
    if config.view is not None:
        checks.choice("config", ("server", "third_party"), view=config.view)
    aggregate = the_unit(config) == "client" and config.algorithm != "padpfl"
    return config.view or ("third_party" if aggregate else "server")
