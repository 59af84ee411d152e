"""The rules of the ledger, as one table: (unit, place of the noise, noise, view, scheme of the
sampler, adjacency) -> rules, best first.

The first rule whose needs are met answers; what has no row, or no rule whose needs are met, is
refused.  `python -m experiments.harness.matrix` writes the table into docs/matrix.md.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core import checks
from ...core.errors import NotAnalysable
from ...core.records import Caveat
from ..mechanisms.chain import bound, limit
from .caveats import OTHERS, SECURE
from .entry import ABSENT, ONE, Part, WeightedSum
from .facts import EVENTS, FIXED, OTHER, SCHEMES, Facts, Site, binomial_tail, drawn_rate

MANY = 10**6  # rounds, of which no table is made
FIELDS = ("unit", "place", "noise", "view", "scheme", "adjacency")
TABLE: dict[tuple, list["Rule"]] = {}


class Need(NamedTuple):
    """A condition without which a rule proves nothing; its words may name the facts f and s."""

    words: str
    test: Callable[[Facts, Site], bool]
    remedy: str = ""


@dataclass(frozen=True)
class Rule:
    """A way to prove a guarantee: what a unit meets of a release, and what that rests on."""

    name: str  # as docs/matrix.md calls it
    part: Callable[[Facts, Site], Part]
    needs: tuple[Need, ...] = ()
    # whether the part describes a round, whoever participates; otherwise each participating client
    of_round: bool = False
    # caveats, or functions of the facts and the site that give some
    remarks: tuple = ()
    assumes: tuple = ()  # caveats in the same form, with which nothing is proved unconditionally
    method: str = ""  # the name of a mechanism whose rounds are not independent


def find(facts: Facts, site: Site, unit: str, view: str) -> Rule:
    """Return the rule that answers for a noisy place.

    Raises:
        NotAnalysable: with the need that is not met, or with the nearest rows of the table.
    """
    if site.refusal:
        raise NotAnalysable(site.refusal)
    scheme = site.scheme if site.scheme in SCHEMES else "other"
    row = (unit, site.place, site.noise, view, scheme, site.adjacency)
    asked = ", ".join(f"{name}={value!r}" for name, value in zip(FIELDS, row))
    unmet = None
    for rule in TABLE.get(row, ()):
        unmet = next((need for need in rule.needs if not need.test(facts, site)), None)
        if unmet is None:
            return rule
    if unmet is not None:
        words = unmet.words.format(f=facts, s=site)
        checks.fail("jfl.guarantee", words, asked, unmet.remedy, error=NotAnalysable)
    changes = [
        [f"{name}={theirs!r}" for name, ours, theirs in zip(FIELDS, row, known) if ours != theirs]
        for known in TABLE
        if known[0] == unit
    ]
    nearest = dict.fromkeys(" and ".join(c) for c in sorted(changes, key=len))
    checks.fail(
        "jfl.guarantee",
        "a row of docs/matrix.md",
        asked,
        f"The nearest rows have {'; or '.join(list(nearest)[:3])}.",
        error=NotAnalysable,
    )


def add_rows(rule: Rule, place: str, noise, view, scheme, adjacency) -> None:
    """Register a rule for all combinations of these names, each one name or several, after the
    rules that these rows have."""
    unit = "example" if place.startswith("local") else "client"
    names = [(n,) if isinstance(n, str) else n for n in (noise, view, scheme, adjacency)]
    for row in itertools.product((unit,), (place,), *names):
        TABLE.setdefault(row, []).append(rule)


# --- noise in a client's own steps


def _local_step(f: Facts, s: Site) -> Part:
    """Return one noisy step on a batch."""
    rows, batches = np.maximum(f.rows, 1), s.batches
    kind, sample, population, capacity = SCHEMES[s.scheme].kind, ONE[0], ONE[0], 0.0
    if kind == "without_replacement":
        sample, population = np.minimum(batches.batch, rows), rows
    elif kind == "with_replacement":
        sample, population = np.full(rows.shape, batches.batch), rows
    elif kind == "poisson":
        sample = _row_rate(batches, rows)
    elif kind == "truncated_poisson":
        sample, population, capacity = _row_rate(batches, rows) * rows, rows, batches.batch
    count = np.full(rows.shape, s.count)
    if s.scheme == "epochs":  # a row is in one batch of each epoch
        count = np.ceil(s.count / np.ceil(rows / batches.batch))
    sample, population, capacity = (
        np.asarray(v, np.float64) for v in (sample, population, capacity * ONE[0])
    )
    part = Part(s.place, s.multiplier, kind, sample, population, capacity, count)
    return part._replace(law=s.law, seen=f.share_sample)


def _local_training(f: Facts, s: Site) -> Part:
    """Return one noisy release of several steps, whose noise covers all that a row does in them:
    only the absence of the row from all batches is a gain."""
    rows, batch, steps = np.maximum(f.rows, 1), s.batches.batch, s.steps
    if s.scheme == "full":
        missed = np.zeros(rows.shape)
    elif s.scheme in ("poisson", "truncated_poisson"):
        missed = (1 - _row_rate(s.batches, rows)) ** steps
    elif s.scheme == "without_replacement":
        missed = (1 - np.minimum(batch / rows, 1)) ** steps
    elif s.scheme == "with_replacement":
        missed = (1 - 1 / rows) ** (steps * batch)
    else:  # epochs
        missed = np.maximum(0.0, 1 - steps * batch / rows)
    part = Part(s.place, s.multiplier, "touched", 1 - missed, count=np.array([s.count]))
    return part._replace(law=s.law, seen=f.share_sample)


def _row_rate(batches, rows: np.ndarray) -> np.ndarray:
    """Return the probability that a Poisson batch takes a row of a client, given the number of its
    rows."""
    if batches.rate is not None:
        return np.broadcast_to(drawn_rate(batches.rate), rows.shape)
    expected = np.asarray(batches.expected, np.float32)
    return drawn_rate(np.minimum(np.float32(1), expected / rows.astype(np.float32)))


def row_overflow(f: Facts, s: Site) -> np.ndarray:
    """Return the probability that a batch of a participation has more rows than slots, [C]."""
    batches, steps = s.batches, s.count * max(s.steps, 1)
    if batches.scheme != "poisson" or batches.batch is None:
        return np.zeros(f.rows.shape)
    sizes, which = np.unique(np.maximum(f.rows, 1), return_inverse=True)
    lost = steps * binomial_tail(batches.batch, sizes, _row_rate(batches, sizes))
    return np.where(f.rows > 0, lost[which.reshape(-1)], 0.0)


def _convexity(f: Facts, s: Site) -> tuple:
    """Return what noise for the solution of a client, or for steps that contract, assumes of the
    losses."""
    texts = []
    if "prox_erm" in s.declared:
        moves = 2 * float(bound(s.mechanism))  # replace_one doubles the bound
        texts.append(
            "Assumes convex, Lipschitz losses, solved accurately enough that replacing one row "
            f"moves a client's solution by at most {moves:g}."
        )
    if "contraction" in s.declared:
        steepest = float(bound(s.mechanism)) * s.steps * s.batches.batch
        texts.append(
            f"Assumes that losses are convex, (2 / lr)-smooth and {steepest:g}-Lipschitz for every "
            "row and all parameters, and have finite gradients."
        )
    return tuple(Caveat(text, "convex") for text in texts)


def _one_sample(f: Facts, s: Site) -> tuple:
    """Return the caveat of batches that follow from one key."""
    text = (
        "The releases of this algorithm may share a sample, so no privacy amplification by "
        "sampling is counted."
    )
    return (Caveat(text, "one-sample"),) * f.share_sample


FULL_BATCHES = Need(
    "at least batch={s.batches.batch} rows in every client",
    lambda f, s: (
        s.scheme != "without_replacement"
        or s.batches.short == "all"
        or bool(np.all((f.rows >= s.batches.batch) | (f.rows == 0)))
    ),
    'Lower batch, or use batches.without_replacement(batch, short="all").',
)
ROWS_ONCE = Need(
    "at least steps * batch rows in every client, for steps={s.steps} of batch={s.batches.batch} "
    "that use a row at most once",
    lambda f, s: (
        "contraction" not in s.declared
        or bool(np.all((s.steps * s.batches.batch <= f.rows) | (f.rows == 0)))
    ),
    "A row that two steps use moves the model twice: take fewer steps or smaller batches.",
)
SOME_ROWS = Need("a client with rows", lambda f, s: bool(np.any(f.rows > 0)))
BATCHES = (
    "full",
    "epochs",
    "without_replacement",
    "with_replacement",
    "poisson",
    "truncated_poisson",
)
for name, view in itertools.product(BATCHES, ("server", "third_party", "personal")):
    sampled = "every batch" if SCHEMES[name].kind == "none" else "sampled batches"
    absence = ", absence" * (view == "third_party")
    common: dict[str, Any] = dict(remarks=(_one_sample,), assumes=(_convexity,))
    step = Rule(sampled + absence, _local_step, (SOME_ROWS, FULL_BATCHES), **common)
    work = Rule("touched rows" + absence, _local_training, (SOME_ROWS, ROWS_ONCE), **common)
    add_rows(step, "local step", ("gaussian", "laplace"), view, name, SCHEMES[name].adjacencies)
    add_rows(work, "local training", ("gaussian", "laplace"), view, name, "replace_one")


# --- noise on uploads


def _of_others(f: Facts, s: Site) -> tuple:
    """Return the caveat of noise of other clients, if it counts."""
    return (OTHERS,) * f.others


def _bits(f: Facts, s: Site) -> tuple:
    """Return the caveat of uploads that are integers."""
    text = "Uploads are integers of {} bits per coordinate, and noise is drawn from a 63-bit table."
    return (Caveat(text.format(s.encoding.bits), "integers"),)


def _upload(f: Facts, s: Site) -> Part:
    """Return an upload with its own noise."""
    return Part("upload", s.multiplier, law=s.law)


def _sum_of_uploads(f: Facts, s: Site) -> Part:
    """Return the sum of all uploads, with the noise of all."""
    return Part("sum of uploads", s.multiplier, summed=WeightedSum(f.weights, f.others))


def _secure_sum(f: Facts, s: Site) -> Part:
    """Return the sum of a cohort: a client's noise, and that of the others with the least."""
    own, others = np.square(f.weights), f.sampler.capacity - 1
    theirs = np.zeros(own.shape)
    if others:
        least = np.sort(own, axis=1)  # the others with the least noise, without the client
        sums = np.cumsum(least, axis=1)
        is_among = own <= least[:, [others - 1]]
        theirs = np.where(is_among, sums[:, [others]] - own, sums[:, [others - 1]])
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.where(f.weights > 0, np.sqrt(own + theirs) / f.weights, ABSENT)
    return Part("sum of uploads", s.multiplier, factor=np.minimum(gain, ABSENT), joint=True)


def _of_strategy(f: Facts, s: Site) -> np.ndarray:
    """Return factors [rounds, 1] that make correlated noise independent releases, together of the
    same privacy: the precision of each is what its round adds to the squared sensitivity."""
    added = np.diff(s.strategy.squared_sensitivities(f.rounds, f.sampler.separation), prepend=0.0)
    with np.errstate(divide="ignore"):
        return np.where(added > 0, 1 / np.sqrt(np.maximum(added, 0)), np.inf)[:, None]


def _correlated_upload(f: Facts, s: Site) -> Part:
    """Return all uploads of a client as one release: its noise continues through rounds in which it
    does not participate and adds nothing."""
    return Part("upload", s.multiplier, factor=_of_strategy(f, s), joint=True)


def integers(s: Site, clients: int, moves: float = 1.0) -> Part:
    """Return an integer release of the sum of several clients, about a client that moves it by
    `moves` uploads."""
    code = s.encoding
    std = code.share * clients**0.5 * code.scale
    level = std / (code.sensitivity / code.clip_norm * code.longest)
    return Part(
        "upload" if clients == 1 else "sum of uploads",
        np.array([[level]]),
        moves=moves,
        renyi=(*code.bounds(clients, moves), clients),
    )


LONG = Need(
    "a strategy of correlated noise for at least {f.rounds} rounds",
    lambda f, s: f.rounds <= s.strategy.rounds,
)
APART = Need(
    "a sampler whose clients stay away for {s.strategy.separation} rounds, for which the strategy "
    "was made",
    lambda f, s: s.strategy.separation <= f.sampler.separation,
    "Use sampling.min_separation or sampling.cyclic_poisson, or a strategy for separation=1.",
)
SHARES = Need(
    "cohorts of always {s.encoding.cohort} clients, as given to jfl.distributed",
    lambda f, s: f.sampler.capacity == s.encoding.cohort,
    "Each client adds its share of the noise of the cohort.",
)
ASSUMED = Need("jfl.plan(..., secure_aggregation=True)", lambda f, s: f.is_secure)
PLAIN = Need(
    "isotropic noise of uploads that are summed unchanged",
    lambda f, s: f.is_plain_sum and s.is_isotropic,
    "Clip in upload, and divide by a number.",
)
EQUAL = Need("uploads with noise of one level", lambda f, s: s.multiplier.shape[1] == 1)
# cohorts of a fixed size, in which a client participates once
EQUAL_SIZES = ("full", "without_replacement", "first_responders", "min_separation")
COHORTS = [scheme for scheme in SCHEMES if scheme != "epochs"]

summed = Rule("sum of uploads", _sum_of_uploads, (PLAIN,), of_round=True, remarks=(_of_others,))
add_rows(summed, "upload", "gaussian", "third_party", "full", FIXED)
for view, scheme in itertools.product(("server", "third_party"), (*COHORTS, "other")):
    is_gain = view == "third_party" and SCHEMES.get(scheme, OTHER).absence
    own = Rule("uploads" + ", absence" * is_gain, _upload)
    add_rows(own, "upload", ("gaussian", "laplace"), view, scheme, FIXED)
    if scheme != "with_replacement":  # a client drawn several times adds several times as much
        needs, method = (LONG, APART), "matrix_gaussian"
        series = Rule("all rounds at once", _correlated_upload, needs, of_round=True, method=method)
        add_rows(series, "upload", "correlated", view, scheme, FIXED)
for view, clients, needs, remarks, assumes in (
    ("server", lambda f: 1, (), (), ()),
    ("third_party", lambda f: f.sampler.capacity if f.others else 1, (), (_of_others,), ()),
    ("aggregate", lambda f: f.sampler.capacity, (ASSUMED,), (), (SECURE,)),
):
    coded = Rule(
        "Renyi bound",
        lambda f, s, clients=clients: integers(s, clients(f)),
        (SHARES, *needs),
        remarks=(_bits, *remarks),
        assumes=assumes,
    )
    add_rows(coded, "upload", "integers", view, EQUAL_SIZES, FIXED)
hidden = Rule("sum of a cohort", _secure_sum, (ASSUMED, PLAIN, EQUAL), assumes=(SECURE,))
add_rows(hidden, "upload", "gaussian", "aggregate", EQUAL_SIZES, FIXED)


# --- noise of the server, on what it releases


def _model(f: Facts, s: Site, kind: str | None = None) -> Part:
    """Return the release of a round, on its cohort: as a sample of this kind, of the sampler's own
    without one."""
    sampler, share = f.sampler, np.max(f.attendance.share)
    kind = kind or (f.scheme.kind if s.adjacency in EVENTS[f.scheme.kind] else "none")
    kind = "none" if kind == "without_replacement" and _takes_all(f, s) else kind
    numbers = {
        "none": (1.0, 1.0),
        "poisson": (share, 1.0),
        "participation": (share, 1.0),
        "allocation": (1.0, sampler.epoch),
        "without_replacement": (sampler.capacity, sampler.clients),
        "with_replacement": (sampler.capacity, 1 / share),
        "truncated_poisson": (share * sampler.clients, sampler.clients, sampler.capacity),
    }[kind]
    part = Part("model", s.multiplier, kind, law=s.law)
    names = ("sample", "population", "capacity")
    return part._replace(**{n: np.array([float(v)]) for n, v in zip(names, numbers)})


def _takes_all(f: Facts, s: Site) -> bool:
    """Return whether a cohort of a fixed size is everyone."""
    return s.scheme == "without_replacement" and f.sampler.capacity >= f.sampler.clients


def _of_one_group(f: Facts) -> np.ndarray:
    """Return 1 in the rounds of the first group, which comes most often, and inf in others."""
    return np.where(np.arange(f.rounds)[:, None] % f.period == 0, 1.0, np.inf)


def _group(f: Facts, s: Site) -> Part:
    """Return the releases of one group of clients, of those that take turns; or one in every epoch,
    if the round of a client in an epoch is drawn and not seen."""
    return _model(f, s)._replace(factor=_of_one_group(f), joint=True)


def _one_bin(f: Facts, s: Site) -> Part:
    """Return all rounds of a client as one release, in the first round: they are those of one bin,
    and nobody sees of which."""
    if s.adjacency == "replace_one":
        return _group(f, s)
    epochs = math.ceil(f.rounds / f.period)
    factor = np.where(np.arange(f.rounds)[:, None] == 0, epochs**-0.5, np.inf)
    return _model(f, s)._replace(factor=factor, joint=True)


def _correlated_model(f: Facts, s: Site) -> Part:
    """Return all rounds as one release."""
    return _model(f, s, "none")._replace(factor=_of_strategy(f, s), joint=True)


def _banded_model(f: Facts, s: Site) -> Part:
    """Return the releases of one group, whose rounds never meet in the noise of one: so the
    probability of a round counts."""
    factor = _of_one_group(f) / s.strategy.largest_column()
    kind = "none" if s.adjacency == "replace_one" else None
    return _model(f, s, kind)._replace(factor=factor, joint=True)


def _uploads_and_model(f: Facts, s: Site) -> Part:
    """Return the sum of all uploads, with their noise and that of the server."""
    # in units of what a client of weight 1 may change
    unit = float(bound(s.mechanism)) / limit(f.upload.mechanism)
    unit = unit * f.weights.max(1, keepdims=True)
    summed = WeightedSum(f.weights, f.others, f.upload.multiplier, unit)
    return Part("model", s.multiplier, summed=summed)


STEADY = Need(
    "the same noise in every round of clients in rotation",
    lambda f, s: len(s.multiplier) == 1 and f.rounds <= MANY,
)
TURNS = Need("clients in rotation", lambda f, s: f.period > 1)
NARROW = Need(
    "at most as many bands as rounds from one turn to the next",
    lambda f, s: s.strategy.width <= f.sampler.separation,
)
STATEFUL = Need(
    "stateful clients, and a cohort that is drawn",
    lambda f, s: f.is_stateful and not _takes_all(f, s),
)
HIDDEN = Need(
    "stateless clients: client state would show who participated with them",
    lambda f, s: not f.is_stateful or f.scheme.kind in ("none", "poisson") or _takes_all(f, s),
    "Use sampling.without_replacement or sampling.poisson.",
)
NOISY_UPLOADS = Need(
    "uploads with Gaussian noise",
    lambda f, s: f.upload is not None and f.upload.noise == "gaussian" and not f.upload.refusal,
)
ISOTROPIC = Need(
    "isotropic noise, of uploads that are summed unchanged",
    lambda f, s: s.is_isotropic and f.is_plain_sum and f.upload.is_isotropic,
)

both = Rule(
    "uploads and model",
    _uploads_and_model,
    (NOISY_UPLOADS, ISOTROPIC),
    of_round=True,
    remarks=(_of_others,),
)
add_rows(both, "release", "gaussian", "third_party", "full", "replace_one")
for scheme in COHORTS:
    kind, row = SCHEMES[scheme].kind, ("third_party", scheme, SCHEMES[scheme].adjacencies)
    if scheme == "cyclic_poisson":
        needs, method = (LONG, APART, NARROW), "banded_cyclic_poisson"
        banded = Rule("one group, sampled", _banded_model, needs, of_round=True, method=method)
        add_rows(banded, "release", "correlated", *row)
    if scheme != "with_replacement":
        needs, method = (LONG, APART), "matrix_gaussian"
        series = Rule("all rounds at once", _correlated_model, needs, of_round=True, method=method)
        add_rows(series, "release", "correlated", *row)
    if scheme in ("min_separation", "cyclic_poisson", "random_allocation", "balls_in_bins"):
        one = ("one bin", _one_bin) if scheme == "balls_in_bins" else ("group", _group)
        add_rows(Rule(*one, (TURNS, STEADY), of_round=True), "release", "gaussian", *row)
        # as if a client might come in all of them
        kept = "none" if kind == "allocation" else None
        each = Rule("every round", lambda f, s, kept=kept: _model(f, s, kept), of_round=True)
        add_rows(each, "release", "gaussian", *row)
        continue
    if kind in ("without_replacement", "truncated_poisson"):
        # the state of clients shows who participated with them
        seen = lambda f, s: _model(f, s, "participation")
        absent = Rule("absence", seen, (STATEFUL,), of_round=True)
        add_rows(absent, "release", ("gaussian", "laplace"), *row)
    name = "every round" if kind == "none" else "sampled cohorts"
    add_rows(Rule(name, _model, (HIDDEN,), of_round=True), "release", ("gaussian", "laplace"), *row)
