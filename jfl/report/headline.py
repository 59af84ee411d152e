"""The cards at the top of a page: the best private accuracy, its epsilon, and what is proved."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..runs import tables
from ..runs.statistics import plus_minus
from .document import Card, Text
from .read import Group

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
    """A setting with a finite epsilon.

    Attributes:
        kind: a word for settings of this kind.
        seeds: the number of seeds that did not fail.
        failed: the number of seeds that failed.
    """

    label: str
    kind: str
    mean: float
    half: float | None
    seeds: int
    failed: float
    guarantee: dict[str, Any]
    data: object = ""


def of(groups: list[Group], others: Sequence[Candidate] = ()) -> tuple[list[Card], list[Text]]:
    """Return the cards of a page, and the text below them.

    Args:
        groups: the settings of the runs.
        others: further candidates for the best setting.

    Returns:
        Both; empty if there is neither a run nor another candidate.
    """
    cards, beside = _private(groups, list(others))
    audits = [audit for group in groups for audit in group.source.audits]
    if any(audit["contradicted"] for audit in audits):
        cards.insert(0, Card("Audit", "contradicts the proof", notes=[CONTRADICTED], alarm=True))
    return cards, [Text(words, quiet=True) for words in beside]


def best(candidates: list[Candidate]) -> Candidate | None:
    """Return the most accurate proved candidate, or else the most accurate conditional one.

    >>> one = Candidate("a", "settings", 0.9, None, 1, 0, dict(status="conditional"))
    >>> best([one, one._replace(label="b", mean=0.5, guarantee=dict(status="proved"))]).label
    'b'
    """
    for status in ("proved", "conditional"):
        of_status = [c for c in candidates if c.guarantee["status"] == status]
        if of_status:
            return max(of_status, key=lambda c: c.mean)
    return None


# --- accuracy


def _private(groups, others) -> tuple[list[Card], list[str]]:
    candidates = _settings(groups) + others
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
        [CONDITIONAL] if conditional else [_how_many(groups, others)],
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


def _how_many(groups, others) -> str:
    proved = sum(tables.proved(g.guarantees)["epsilon"] is not None for g in groups)
    words = [f"{proved} of {len(groups)} settings have a proved ε."] if groups else []
    words += [f"{len(others)} {others[0].kind} have an ε."] if others else []
    return " ".join(words)


def _settings(groups: list[Group]) -> list[Candidate]:
    """Return the settings with an accuracy and a finite epsilon, with the guarantee in tables."""
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


def _unprotected(groups: list[Group], chosen: Candidate | None) -> list[Card]:
    """Return the most accurate setting without any epsilon, on the data of the chosen one."""
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
