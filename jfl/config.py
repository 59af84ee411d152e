"""One experiment as plain values: what a TOML file holds and what the command line sets."""
import dataclasses
import difflib
import tomllib

from . import check

UNITS = ("example", "client")


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment.  Fields that are None follow from the others."""

    algorithm: str = "fedavg"
    """fedavg | fedsgd | fedprox | scaffold"""
    dataset: str = "digits"
    """digits | mnist | fashion_mnist | emnist | cifar10 | svhn"""
    partition: str = "dirichlet"
    """iid | dirichlet | shards | power_law"""
    alpha: float = 0.3
    """dirichlet: concentration; small is heterogeneous"""
    classes_per_client: int = 2
    """shards: classes each client holds"""
    exponent: float = 1.0
    """power_law: of the sizes"""
    min_rows: int = 16
    """dirichlet and power_law: least rows of a client"""
    clients: int = 50
    """number of clients"""
    holdout: float = 0.0
    """fraction of each client's rows kept for its own test"""
    partition_seed: int = 0
    """who owns which row"""
    model: str = "mlp"
    """logistic | mlp | cnn"""
    hidden: tuple[int, ...] = (64,)
    """mlp: widths of the hidden layers"""
    sampler: str | None = None
    """of clients: full | without_replacement | with_replacement | poisson; default by cohort and rate"""
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
    mu: float = 0.1
    """fedprox: pull to the server's model"""
    l2: float = 0.0
    """L2 regularisation, outside the clip"""
    weights: str = "uniform"
    """of clients: uniform | size"""
    unit: str | None = None
    """what the noise protects: example (noise in every local step) | client (noise on the aggregate)"""
    clip: str = "flat"
    """flat | per_layer | adaptive (client level only)"""
    clip_norm: float = 1.0
    """bound on a contribution (adaptive: the first one)"""
    noise_multiplier: float | None = None
    """standard deviation of the noise over the sensitivity; None: no privacy"""
    epsilon: float | None = None
    """instead of noise_multiplier: calibrate to this epsilon, for the worst client"""
    delta: float = 1e-5
    """of the guarantee"""
    view: str | None = None
    """server | third_party; default the one that has a guarantee: example server, client third_party"""
    adjacency: str | None = None
    """add_remove | replace_one; default what the sampler implies"""
    mode: str = "sound"
    """sound: noise from the proved accountant"""
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
RUN_ONLY = ("rounds", "evaluate_every", "checkpoint_every")       # what a resumed run may change


def load(path) -> dict:
    """The fields set in a TOML file, and under "sweep" a table of lists.

    Errors   ValueError for unreadable files, unknown names and values of the wrong type.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        check.fail("config", "a readable TOML file", f"{path}: {error}")
    axes = values.pop("sweep", {})
    if not isinstance(axes, dict):
        check.fail(f"config {path}", "a table [sweep] of lists", f"sweep = {axes!r}")
    for name, value in axes.items():
        if not isinstance(value, list) or not value:
            check.fail(f"config {path}", f"a list with at least one value for sweep.{name}", f"{value!r}")
    out = {name: coerce(name, value, f"config {path}") for name, value in values.items()}
    if axes:
        out["sweep"] = {name: [coerce(name, v, f"config {path}") for v in value] for name, value in axes.items()}
    return out


def coerce(name: str, value, where: str):
    """A field's value in its type, or a ValueError that names close fields."""
    if name not in FIELDS:
        close = difflib.get_close_matches(name, FIELDS, 3)
        check.fail(where, "known names", f"{name!r}", f"Did you mean {' or '.join(close)}?" if close else
                   f"Known: {', '.join(FIELDS)}.")
    kind = FIELDS[name].type
    text = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
    optional = "None" in str(kind)
    if value is None and optional:
        return None
    if "tuple" in str(kind):
        items = value if isinstance(value, (list, tuple)) else [value]
        if all(isinstance(v, int) and not isinstance(v, bool) for v in items):
            return tuple(items)
    elif "float" in str(kind):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    elif "int" in str(kind):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif "bool" in str(kind):
        if isinstance(value, bool):
            return value
    elif isinstance(value, str):
        return value
    check.fail(where, f"{name} of type {text}", f"{value!r}")


def dump(values: dict, comment: str = "") -> str:
    """TOML of flat values; None is left out."""
    def one(v):
        if isinstance(v, bool):
            return str(v).lower()
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(map(one, v)) + "]"
        return repr(float(v)) if isinstance(v, float) else str(v) if isinstance(v, int) else '"' + str(v) + '"'

    axes = values.get("sweep") or {}
    lines = [f"# {comment}"] if comment else []
    lines += [f"{k} = {one(v)}" for k, v in values.items() if v is not None and k != "sweep"]
    if axes:
        lines += ["", "[sweep]"] + [f"{k} = {one(v)}" for k, v in axes.items()]
    return "\n".join(lines) + "\n"


def the_unit(config: Config) -> str | None:
    """The site that gets the noise; None without privacy."""
    if config.unit is not None:
        check.choice("config", UNITS, unit=config.unit)
    if config.noise_multiplier is None and config.epsilon is None:
        if config.unit is not None:
            check.fail("config", "noise_multiplier or epsilon beside unit", f"unit={config.unit!r} alone",
                       "Give --noise-multiplier or --epsilon, or leave unit out for no privacy.")
        return None
    return config.unit or "example"


def the_view(config: Config) -> str:
    if config.view is not None:
        check.choice("config", ("server", "third_party"), view=config.view)
    return config.view or ("third_party" if the_unit(config) == "client" else "server")
