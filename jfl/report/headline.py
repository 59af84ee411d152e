"""What a page says first: the best private accuracy, its epsilon, what is proved, which claims
hold."""

from typing import Any, NamedTuple

from ..runs import tables
from ..runs.record import plus_minus
from . import document
from .document import Card, Text
from .read import Group, Source

CHOSEN = (
    "It is the best of {} here, chosen after looking at test accuracy. That choice is in no ε: "
    "jfl.choose draws settings, releases the best run alone and says what that costs."
)
ONLY = (
    "It is the only one here. If it was tuned by looking at runs before, that choice is in no ε: "
    "jfl.choose draws settings, releases the best run alone and says what that costs."
)
INCOMPARABLE = "Their ε are of different units, adjacencies, views or δ, which do not compare."
OTHER_DATA = "Their data differ too, and so does what accuracy is worth."
CONDITIONAL = "Nothing here is proved outright: this ε holds only under its caveats."
PROMISE = ("unit", "adjacency", "view", "delta")
CONTRADICTED = "An audit shows more than is proved: that is a bug. Trust no ε of this setting."


class Candidate(NamedTuple):
    """A setting with a finite epsilon, or a point of a study.

    Attributes:
        kind: what it is called in words.
        seeds: how many did not fail.
        failed: how many did.
    """

    label: str
    kind: str
    mean: float
    half: float | None
    seeds: int
    failed: float
    guarantee: dict[str, Any]
    data: object = ""


def of(sources: list[Source], groups: list[Group]) -> tuple[list[Card], list[Text]]:
    """The cards of a page, and the words beside them.

    Args:
        sources: as in `sections.assemble`.
        groups: the settings of their runs.

    Returns:
        Both; empty where there is neither a run nor a claim.
    """
    cards, beside = _private(sources, groups)
    cards += _claims(sources)
    audits = [audit for group in groups for audit in group.source.audits]
    if any(audit["contradicted"] for audit in audits):
        cards.insert(0, Card("Audit", "contradicts the proof", notes=[CONTRADICTED], alarm=True))
    return cards, [Text(words, quiet=True) for words in beside]


def best(candidates: list[Candidate]) -> Candidate | None:
    """The most accurate of those that are proved; of the conditional ones if none is.

    >>> one = Candidate("a", "settings", 0.9, None, 1, 0, dict(status="conditional"))
    >>> best([one, one._replace(label="b", mean=0.5, guarantee=dict(status="proved"))]).label
    'b'
    """
    for status in ("proved", "conditional"):
        of_status = [c for c in candidates if c.guarantee["status"] == status]
        if of_status:
            return max(of_status, key=lambda c: c.mean)
    return None


def counted(verdicts: list[str]) -> dict[str, int]:
    """How often each verdict was given, in one order on all pages."""
    order = [*document.MARKS, *verdicts]
    return {v: verdicts.count(v) for v in sorted(set(verdicts), key=order.index)}


# --- accuracy


def _private(sources, groups) -> tuple[list[Card], list[str]]:
    settings, points = _settings(groups), _points(sources)
    candidates = settings + points
    chosen = best(candidates)
    if chosen is None:
        if not groups:
            return [], []
        words = f"None of {len(groups)} settings has a finite ε: nothing is promised."
        return [Card("Best private accuracy", "none", notes=[words])] + _unprotected(
            groups, None
        ), []
    peers = [c for c in candidates if c.guarantee["status"] == chosen.guarantee["status"]]
    conditional = chosen.guarantee["status"] == "conditional"
    kinds = " and ".join(dict.fromkeys(c.kind for c in peers))
    beside = [CHOSEN.format(f"{len(peers)} {kinds} with an ε") if len(peers) > 1 else ONLY]
    if len({tuple(c.guarantee[k] for k in PROMISE) for c in peers}) > 1:
        beside.append(INCOMPARABLE)
    if len({c.data for c in peers}) > 1:
        beside.append(OTHER_DATA)
    g = chosen.guarantee
    promise = [("δ", f"{g['delta']:.3g}")]
    promise += [(k, g[k].replace("_", " ")) for k in ("unit", "adjacency", "view")]
    proved = Card(
        "What is proved",
        g["status"],
        [("method", g["method"]), *_caveats(g)],
        [CONDITIONAL] if conditional else [_how_many(groups, points)],
    )
    heading = "Best accuracy with a conditional ε" if conditional else "Best private accuracy"
    accuracy = Card(
        heading,
        plus_minus(chosen.mean, chosen.half),
        [("setting", chosen.label), ("seeds", _seeds(chosen))],
        [] if chosen.half is not None else ["Of one seed there is no interval."],
    )
    cards = [accuracy, Card("ε", f"{g['epsilon']:.4g}", promise), proved]
    return cards + _unprotected(groups, chosen), [" ".join(beside)]


def _caveats(guarantee) -> list[tuple[str, str]]:
    number = len(guarantee.get("caveats") or ())
    return [("caveats", f"{number}, named below")] if number else []


def _seeds(candidate: Candidate) -> str:
    failed = f" (+{candidate.failed} failed)" if candidate.failed else ""
    return f"{candidate.seeds}{failed}"


def _how_many(groups, points) -> str:
    proved = sum(tables.proved(g.guarantees)["epsilon"] is not None for g in groups)
    words = [f"{proved} of {len(groups)} settings have a proved ε."] if groups else []
    words += [f"{len(points)} points of the study have an ε."] if points else []
    return " ".join(words)


def _settings(groups: list[Group]) -> list[Candidate]:
    """The settings that have an accuracy and a finite epsilon, with the one that tables show."""
    found = []
    for group in groups:
        guarantee = tables.proved(group.guarantees)
        if guarantee["epsilon"] is None:
            guarantee = _conditional(group.guarantees)
        if group.setting.final and guarantee is not None:
            mean, half = tables.interval(group.setting.final)
            found.append(
                Candidate(
                    group.setting.label,
                    "settings",
                    mean,
                    half,
                    len(group.setting.final),
                    group.failed,
                    guarantee,
                    group.setting.data,
                )
            )
    return found


def _conditional(guarantees) -> dict | None:
    given = [g for g in guarantees if g["status"] == "conditional" and g["epsilon"] is not None]
    return min(given, key=lambda g: (g["implied"], g["view"] != "server"), default=None)


def _points(sources: list[Source]) -> list[Candidate]:
    """The points of studies that trained with a finite epsilon."""
    found = []
    for source in sources:
        for experiment in source.experiments:
            for p in experiment.points:
                if p.mean is None:
                    continue
                trained = p.claimed is None and p.audited is None
                promised = all(getattr(p, k) is not None for k in (*PROMISE, "epsilon", "method"))
                if trained and promised and p.status in ("proved", "conditional"):
                    at = "" if p.x is None else f", {experiment.xlabel or 'x'} {p.x:.4g}"
                    guarantee = {
                        k: getattr(p, k)
                        for k in (*PROMISE, "epsilon", "status", "method", "caveats")
                    }
                    label = f"{p.panel}: {p.line}{at}"
                    seeds = len(p.values)
                    found.append(
                        Candidate(
                            label, "points", p.mean, p.half, seeds, p.failed, guarantee, p.panel
                        )
                    )
    return found


def _unprotected(groups: list[Group], chosen: Candidate | None) -> list[Card]:
    """The most accurate setting without any epsilon, on the data of the chosen one."""
    others = [
        (*tables.interval(g.setting.final), g)
        for g in groups
        if g.setting.final
        and all(x["epsilon"] is None for x in g.guarantees)
        and (chosen is None or g.setting.data == chosen.data)
    ]
    if not others:
        return []
    mean, half, group = max(others, key=lambda found: found[0])
    facts = [("setting", group.setting.label), ("seeds", str(len(group.setting.final)))]
    where = "" if chosen is None else ", same data"
    return [Card(f"Without a guarantee{where}", plus_minus(mean, half), facts)]


# --- claims


def _claims(sources: list[Source]) -> list[Card]:
    """How many claims were checked and hold, and how many claimed epsilons do."""
    experiments = [e for source in sources for e in source.experiments]
    counts = counted([v.verdict for e in experiments for v in e.verdicts])
    pairs = [
        (line.epsilon_claimed, line.epsilon_proved)
        for e in experiments
        for line in e.lines.values()
    ]
    pairs += [(p.claimed, p.epsilon) for e in experiments for p in e.points]
    pairs = [(claimed, proved) for claimed, proved in pairs if claimed is not None]
    cards = []
    if counts:
        facts = [(verdict, str(count)) for verdict, count in counts.items()]
        parts = list(counts.items())
        cards.append(Card("Claims checked", str(sum(counts.values())), facts, parts=parts))
    if pairs:
        held = sum(proved is not None and proved <= claimed for claimed, proved in pairs)
        cards.append(
            Card(
                "Claimed ε that hold",
                f"{held} of {len(pairs)}",
                notes=["Of the others only a larger ε is proved, or none."],
                parts=[("confirmed", held), ("not confirmed", len(pairs) - held)],
            )
        )
    return cards
