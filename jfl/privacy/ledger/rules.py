"""The rules of the ledger, as one table: (unit, place of the noise, noise, view, scheme of the
sampler, adjacency) -> rules, best first.

`find` returns the first rule whose conditions (needs) are met, and refuses a combination that has
no such rule.  Everything that is specific to a combination is a field of its rule: what is
released, the conditions of the proof, and the caveats.  `python -m experiments.harness.matrix`
writes the table into docs/matrix.md.
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
from ..accountants.samples import EVENTS, FIXED
from ..accountants.truncation import Integers
from ..mechanisms.chain import bound, limit
from .caveats import EVERY_ROUND, HONEST, INTEGERS, ONE_SAMPLE, OTHERS, SECURE, TURNS
from .entry import ABSENT, Part, WeightedSum
from .facts import OTHER, SCHEMES, Facts, Site

MAX_GROUP_ROUNDS = 10**6  # for which factors of each round are written out
FIELDS = ("unit", "place", "noise", "view", "scheme", "adjacency")
TABLE: dict[tuple, list["Rule"]] = {}


class Need(NamedTuple):
    """A condition of a rule: the rule proves something only if `test` returns True.

    `words` states the condition, for the error message.  It is a format string that may refer to
    the facts f and the site s, as in "{f.rounds} rounds".
    """

    words: str
    test: Callable[[Facts, Site], bool]
    remedy: str = ""


class Remark(NamedTuple):
    """A caveat of a rule.  Its text is a format string like that of `Need`."""

    caveat: Caveat
    applies: Callable[[Facts, Site], bool] = lambda f, s: True
    is_assumption: bool = False  # makes the guarantee "conditional"


@dataclass(frozen=True)
class Rule:
    """A way to prove a guarantee: how to account for a release, the conditions and the caveats."""

    name: str  # in docs/matrix.md
    part: Callable[[Facts, Site], Part]
    needs: tuple[Need, ...]
    remarks: tuple[Remark, ...]
    # whether the part describes one round; otherwise it describes one participation of a client
    of_round: bool = False
    method: str = ""  # the name of a mechanism whose rounds are not independent


def find(facts: Facts, site: Site, unit: str, view: str) -> Rule:
    """Return the first rule of the table that applies to a place where noise is added.

    Args:
        facts: the facts of the plan.
        site: the place.
        unit: "example" or "client".
        view: what the observer sees, as in `jfl.guarantee`.

    Raises:
        NotAnalysable: if no rule applies.  The message gives the need that is not met, or the
            nearest rows of the table.
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
    """Add a rule to several rows of TABLE, after the existing rules of each row.

    Args:
        rule: a way to prove a guarantee for these rows.
        place: where the noise is added, as in `facts.Site`.  It determines the unit.
        noise, view, scheme, adjacency: the other keys of the rows; `scheme` says how cohorts or
            batches are sampled.  Each is one name, or a sequence of several, and the rule is added
            for every combination.
    """
    unit = "example" if place.startswith("local") else "client"
    names = [(n,) if isinstance(n, str) else n for n in (noise, view, scheme, adjacency)]
    for row in itertools.product((unit,), (place,), *names):
        TABLE.setdefault(row, []).append(rule)


# --- what the rows of a view assume of participation

DRAWN = Remark(EVERY_ROUND, lambda f, s: f.sampler.scheme != "full")
UNSEEN = (  # a third party does not see who participates
    Remark(HONEST, lambda f, s: f.scheme.absence),
    Remark(EVERY_ROUND, lambda f, s: f.sampler.scheme != "full" and not f.scheme.absence),
)
PARTICIPATION = dict(server=(DRAWN,), aggregate=(DRAWN,), personal=(DRAWN,), third_party=UNSEEN)
OF_RELEASE = (
    Remark(TURNS, lambda f, s: f.sampler.epoch == 1 and f.sampler.separation > 1),
    Remark(
        HONEST,
        lambda f, s: f.scheme.kind != "none" if f.period > 1 else f.scheme.absence,
    ),
    Remark(
        EVERY_ROUND,
        lambda f, s: f.sampler.scheme != "full" and f.period == 1 and not f.scheme.absence,
    ),
)
OF_OTHERS = Remark(OTHERS, lambda f, s: f.others)


# --- noise in a client's own steps


def _local_step(f: Facts, s: Site) -> Part:
    """Return one noisy step on a batch."""
    rows, batch = np.maximum(f.rows, 1), s.batches.batch or 0
    kind, one = SCHEMES[s.scheme].kind, np.ones(1)
    drawn, population, capacity = {
        "none": (one, one, 0.0),
        "poisson": (s.row_rate, one, 0.0),
        "truncated_poisson": (s.row_rate * rows, rows, batch),
        "without_replacement": (np.minimum(rows, batch), rows, 0.0),
        "with_replacement": (np.full(rows.shape, batch), rows, 0.0),
    }[kind]
    count = np.full(rows.shape, s.count)
    if s.scheme == "epochs":  # a row is in one batch of each epoch
        count = np.ceil(s.count / np.ceil(rows / batch))
    drawn, population = np.asarray(drawn, np.float64), np.asarray(population, np.float64)
    return Part(
        s.place,
        s.multiplier,
        s.noise == "laplace",
        kind,
        drawn,
        population,
        capacity * one,
        count,
        f.share_sample,
    )


def _local_training(f: Facts, s: Site) -> Part:
    """Return one noisy release of several steps, whose noise covers all that a row does in them:
    only the absence of the row from all batches is a gain."""
    rows, batch, steps = np.maximum(f.rows, 1), s.batches.batch, s.steps
    if s.scheme == "full":
        missed = np.zeros(rows.shape)
    elif s.scheme in ("poisson", "truncated_poisson"):
        missed = (1 - s.row_rate) ** steps
    elif s.scheme == "without_replacement":
        missed = (1 - np.minimum(batch / rows, 1)) ** steps
    elif s.scheme == "with_replacement":
        missed = (1 - 1 / rows) ** (steps * batch)
    elif s.count > 1:  # a row that one release of an epoch does not use is in another one
        missed = np.zeros(rows.shape)
    else:  # epochs
        missed = np.maximum(0.0, 1 - steps * batch / rows)
    return Part(
        s.place,
        s.multiplier,
        s.noise == "laplace",
        "touched",
        1 - missed,
        count=np.array([s.count]),
        seen=f.share_sample,
    )


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
    remarks = (*PARTICIPATION[view], Remark(ONE_SAMPLE, lambda f, s: f.share_sample))
    step = Rule(sampled + absence, _local_step, (SOME_ROWS, FULL_BATCHES), remarks)
    work = Rule("touched rows" + absence, _local_training, (SOME_ROWS, ROWS_ONCE), remarks)
    add_rows(step, "local step", ("gaussian", "laplace"), view, name, SCHEMES[name].adjacencies)
    add_rows(work, "local training", ("gaussian", "laplace"), view, name, "replace_one")


# --- noise on uploads


def _upload(f: Facts, s: Site) -> Part:
    """Return an upload with its own noise."""
    return Part("upload", s.multiplier, s.noise == "laplace")


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
    """Return the part for a sum of the noisy integer uploads of several clients.

    Args:
        s: the place of the noise.
        clients: the number of clients in the sum.
        moves: the change of the sum by one client, in sensitivities.
    """
    code = s.encoding
    std = code.share * clients**0.5 * code.scale
    level = std / (code.sensitivity / code.clip_norm * code.longest)
    return Part(
        "upload" if clients == 1 else "sum of uploads",
        np.array([[level]]),
        moves=moves,
        renyi=(*code.bounds(clients, moves), clients),
        finite=Integers(code.lost_mass(clients, moves), code.missing(clients)),
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
    "cohorts of always {s.encoding.cohort} clients, as given to jfl.distributed, instead of "
    "{f.sampler.capacity}",
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
IN_ROTATION = ("min_separation", "cyclic_poisson", "random_allocation", "balls_in_bins")
COHORTS = [scheme for scheme in SCHEMES if scheme != "epochs"]

summed = Rule("sum of uploads", _sum_of_uploads, (PLAIN,), (OF_OTHERS,), of_round=True)
add_rows(summed, "upload", "gaussian", "third_party", "full", FIXED)
for view, scheme in itertools.product(("server", "third_party"), (*COHORTS, "other")):
    is_gain, remarks = SCHEMES.get(scheme, OTHER).absence, PARTICIPATION[view]
    name = "uploads" + ", absence" * (is_gain and view == "third_party")
    own = Rule(name, _upload, (), remarks)
    add_rows(own, "upload", ("gaussian", "laplace"), view, scheme, FIXED)
    if scheme != "with_replacement":  # a client drawn several times adds several times as much
        add_rows(
            Rule(
                "all rounds at once",
                _correlated_upload,
                (LONG, APART),
                remarks,
                of_round=True,
                method="matrix_gaussian",
            ),
            "upload",
            "correlated",
            view,
            scheme,
            FIXED,
        )
for view, clients, needs, remarks in (
    ("server", lambda f: 1, (), ()),
    ("third_party", lambda f: f.sampler.capacity if f.others else 1, (), (OF_OTHERS,)),
    ("aggregate", lambda f: f.sampler.capacity, (ASSUMED,), ()),
):
    assumed = (Remark(SECURE, is_assumption=True),) * (view == "aggregate")
    coded = Rule(
        "Renyi bound",
        lambda f, s, clients=clients: integers(s, clients(f)),
        (SHARES, *needs),
        (*PARTICIPATION[view], *assumed, Remark(INTEGERS), *remarks),
    )
    add_rows(coded, "upload", "integers", view, EQUAL_SIZES, FIXED)
hidden = Rule(
    "sum of a cohort",
    _secure_sum,
    (ASSUMED, PLAIN, EQUAL),
    (DRAWN, Remark(SECURE, is_assumption=True)),
)
add_rows(hidden, "upload", "gaussian", "aggregate", EQUAL_SIZES, FIXED)


# --- noise of the server, on what it releases


def _model(f: Facts, s: Site, kind: str = "", **fields) -> Part:
    """Return the release of a round, on its cohort.

    Args:
        f: the facts of the plan.
        s: the site of the release.
        kind: of the sample; "" for that of the sampler.
        fields: further fields of the part.
    """
    sampler, share = f.sampler, np.max(f.attendance.share)
    kind = kind or (f.scheme.kind if s.adjacency in EVENTS[f.scheme.kind] else "none")
    kind = "none" if kind == "without_replacement" and _takes_all(f, s) else kind
    numbers = {
        "none": (1.0, 1.0, 0.0),
        "poisson": (share, 1.0, 0.0),
        "participation": (share, 1.0, 0.0),
        "allocation": (1.0, sampler.epoch, 0.0),
        "without_replacement": (sampler.capacity, sampler.clients, 0.0),
        "with_replacement": (sampler.capacity, 1 / share, 0.0),
        "truncated_poisson": (share * sampler.clients, sampler.clients, sampler.capacity),
    }[kind]
    drawn: Any = [np.array([float(v)]) for v in numbers]
    return Part("model", s.multiplier, s.noise == "laplace", kind, *drawn, **fields)


def _takes_all(f: Facts, s: Site) -> bool:
    """Return whether a cohort of a fixed size is everyone."""
    return s.scheme == "without_replacement" and f.sampler.capacity >= f.sampler.clients


def _of_one_group(f: Facts) -> np.ndarray:
    """Return 1 in the rounds of the first group, which runs most often, and inf in the others."""
    return np.where(np.arange(f.rounds)[:, None] % f.period == 0, 1.0, np.inf)


def _group(f: Facts, s: Site) -> Part:
    """Return the releases of one group of clients in rotation; or one release in every epoch, if
    the round of a client in an epoch is drawn and hidden."""
    return _model(f, s, factor=_of_one_group(f), joint=True)


def _one_bin(f: Facts, s: Site) -> Part:
    """Return all rounds of a client as one release, in the first round: they are those of one bin,
    and which one is hidden."""
    if s.adjacency == "replace_one":
        return _group(f, s)
    epochs = math.ceil(f.rounds / f.period)
    factor = np.where(np.arange(f.rounds)[:, None] == 0, epochs**-0.5, np.inf)
    return _model(f, s, factor=factor, joint=True)


def _correlated_model(f: Facts, s: Site) -> Part:
    """Return all rounds as one release."""
    return _model(f, s, "none", factor=_of_strategy(f, s), joint=True)


def _banded_model(f: Facts, s: Site) -> Part:
    """Return the releases of one group, of which no two share noise, so that the probability of
    each round counts."""
    factor = _of_one_group(f) / s.strategy.largest_column()
    kind = "none" if s.adjacency == "replace_one" else ""
    return _model(f, s, kind, factor=factor, joint=True)


def _uploads_and_model(f: Facts, s: Site) -> Part:
    """Return the sum of all uploads, with their noise and that of the server."""
    upload: Any = f.upload
    # in units of what a client of weight 1 may change
    unit = float(bound(s.mechanism)) / limit(upload.mechanism)
    unit = unit * f.weights.max(1, keepdims=True)
    summed = WeightedSum(f.weights, f.others, upload.multiplier, unit)
    return Part("model", s.multiplier, summed=summed)


STEADY = Need(
    "the same noise in every round of clients in rotation",
    lambda f, s: len(s.multiplier) == 1 and f.rounds <= MAX_GROUP_ROUNDS,
)
ROTATION = Need("clients in rotation", lambda f, s: f.period > 1)
NARROW = Need(
    "at most as many bands as rounds from one turn to the next",
    lambda f, s: s.strategy.width <= f.sampler.separation,
)
SHOWN = Need(
    "a drawn cohort that client state or uploads show",
    lambda f, s: f.is_shown and not _takes_all(f, s),
)
HIDDEN = Need(
    "stateless clients, and no uploads that are seen: they would show who participated together",
    lambda f, s: not f.is_shown or f.scheme.kind in ("none", "poisson") or _takes_all(f, s),
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
SAME_NEIGHBOURS = Need(
    "uploads with the adjacency of the release",
    lambda f, s: f.upload.adjacency == s.adjacency,
)
both = Rule(
    "uploads and model",
    _uploads_and_model,
    (NOISY_UPLOADS, ISOTROPIC, SAME_NEIGHBOURS),
    (OF_OTHERS,),
    of_round=True,
)
add_rows(both, "release", "gaussian", "third_party", "full", "replace_one")
for scheme in COHORTS:
    kind, row = SCHEMES[scheme].kind, ("third_party", scheme, SCHEMES[scheme].adjacencies)
    if scheme == "cyclic_poisson":
        add_rows(
            Rule(
                "sampled group",
                _banded_model,
                (LONG, APART, NARROW),
                OF_RELEASE,
                of_round=True,
                method="banded_cyclic_poisson",
            ),
            "release",
            "correlated",
            *row,
        )
    if scheme != "with_replacement":
        add_rows(
            Rule(
                "all rounds at once",
                _correlated_model,
                (LONG, APART),
                OF_RELEASE,
                of_round=True,
                method="matrix_gaussian",
            ),
            "release",
            "correlated",
            *row,
        )
    if scheme in IN_ROTATION:
        one = ("one bin", _one_bin) if scheme == "balls_in_bins" else ("group", _group)
        add_rows(
            Rule(*one, (ROTATION, STEADY), OF_RELEASE, of_round=True), "release", "gaussian", *row
        )
        # as if a client might participate in all of them
        kept = "none" if kind == "allocation" else ""
        each = lambda f, s, kept=kept: _model(f, s, kept)
        every = Rule("every round", each, (), OF_RELEASE, of_round=True)
        add_rows(every, "release", "gaussian", *row)
        continue
    if kind in ("without_replacement", "truncated_poisson"):
        # client state, or uploads that are seen, show who participated together
        seen = lambda f, s: _model(f, s, "participation")
        absent = Rule("absence", seen, (SHOWN,), OF_RELEASE, of_round=True)
        add_rows(absent, "release", ("gaussian", "laplace"), *row)
    name = "every round" if kind == "none" else "sampled cohorts"
    add_rows(
        Rule(name, _model, (HIDDEN,), OF_RELEASE, of_round=True),
        "release",
        ("gaussian", "laplace"),
        *row,
    )
