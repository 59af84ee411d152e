"""The cards at the top of a page: the best private accuracy, its epsilon, and what is proved."""

from typing import Any, NamedTuple

from ..runs import tables
from ..runs.statistics import plus_minus
from .document import Card, Text
from .read import Group

CHOSEN = (
    "It is the best of {} here, chosen after looking at test accuracy. No ε covers that choice; "
    "jfl.choose draws settings, releases only the best run and accounts for the choice."
)
ONLY = (
    "It is the only setting here. If it was tuned on earlier runs, no ε covers that choice; "
    "jfl.choose draws settings, releases only the best run and accounts for the choice."
)
INCOMPARABLE = "Their ε are for different units, adjacencies, views or δ and are not comparable."
OTHER_DATA = "Their data differ too, so their accuracies are not comparable."
CONDITIONAL = "Nothing here is proved unconditionally: this ε holds only under its caveats."
PROMISE = ("unit", "adjacency", "view", "delta")
CONTRADICTED = "An audit shows more than is proved, which is a bug. Trust no ε of this setting."


class Candidate(NamedTuple):
    """A setting with a finite epsilon.

    Attributes:
        label: the name of the setting.
        mean, half: the mean accuracy and half of its confidence interval.
        seeds: the number of seeds that did not fail.
        failed: the number of seeds that failed.
        guarantee: the guarantee with this epsilon, as in summary.json.
        data: a value that is equal for settings with the same data.
    """

    label: str
    mean: float
    half: float | None
    seeds: int
    failed: float
    guarantee: dict[str, Any]
    data: object = ""


def of(groups: list[Group]) -> tuple[list[Card], list[Text]]:
    """Return the cards of a page, and the text below them.

    Args:
        groups: the settings of the runs.

    Returns:
        The cards, and the texts below them; two empty lists if there is no run.
    """
    candidates = _candidates(groups)
    chosen = best(candidates)
    cards, below = [], ""
    if chosen is not None:
        cards, below = _cards_of(chosen, candidates, groups)
    elif groups:
        note = f"None of {len(groups)} settings has a finite ε, so nothing is guaranteed."
        cards = [Card("Best private accuracy", "none", notes=[note])]
    cards += _unprotected(groups, chosen)
    audits = [audit for group in groups for audit in group.source.audits]
    if any(audit["contradicted"] for audit in audits):
        cards.insert(0, Card("Audit", "contradicts the proof", notes=[CONTRADICTED], alarm=True))
    return cards, [Text(below, quiet=True)] if below else []


def best(candidates: list[Candidate]) -> Candidate | None:
    """Return the most accurate candidate with a proved guarantee, or else a conditional one.

    Example:
        >>> one = Candidate("a", 0.9, None, 1, 0, dict(status="conditional"))
        >>> best([one, one._replace(label="b", mean=0.5, guarantee=dict(status="proved"))]).label
        'b'
    """
    rank = lambda c: (c.guarantee["status"] == "proved", c.mean)
    known = [c for c in candidates if c.guarantee["status"] in ("proved", "conditional")]
    return max(known, key=rank, default=None)


def _cards_of(chosen, candidates, groups) -> tuple[list[Card], str]:
    """Return the cards of the best setting, and what has to be said about the choice."""
    guarantee = chosen.guarantee
    peers = [c for c in candidates if c.guarantee["status"] == guarantee["status"]]
    below = [CHOSEN.format(f"{len(peers)} settings with an ε") if len(peers) > 1 else ONLY]
    if len({tuple(c.guarantee[k] for k in PROMISE) for c in peers}) > 1:
        below.append(INCOMPARABLE)
    if len({c.data for c in peers}) > 1:
        below.append(OTHER_DATA)
    heading, notes = "Best accuracy with a conditional ε", [CONDITIONAL]
    if guarantee["status"] == "proved":
        heading, notes = "Best private accuracy", []
        proved = sum(tables.proved(g.guarantees)["epsilon"] is not None for g in groups)
        notes.append(f"{proved} of {len(groups)} settings have a proved ε.")
    seeds = f"{chosen.seeds}" + (f" (+{chosen.failed} failed)" if chosen.failed else "")
    single = ["One seed gives no interval."] if chosen.half is None else []
    facts = [("setting", chosen.label), ("seeds", seeds)]
    promise = [("δ", f"{guarantee['delta']:.3g}")]
    promise += [(k, guarantee[k]) for k in PROMISE[:2]]
    promise += [("view", guarantee["view"].replace("_", " "))]
    proof = [("method", guarantee["method"])]
    if caveats := len(guarantee.get("caveats") or ()):
        proof.append(("caveats", f"{caveats}, listed below"))
    cards = [
        Card(heading, plus_minus(chosen.mean, chosen.half), facts, single),
        Card("ε", f"{guarantee['epsilon']:.4g}", promise),
        Card("What is proved", guarantee["status"], proof, [" ".join(notes)]),
    ]
    return cards, " ".join(below)


def _candidates(groups: list[Group]) -> list[Candidate]:
    """Return the settings with an accuracy and a finite epsilon, with the guarantee in tables."""
    found = []
    for group in groups:
        guarantee = tables.proved(group.guarantees)
        if guarantee["epsilon"] is None:
            known = [
                g
                for g in group.guarantees
                if g["status"] == "conditional" and g["epsilon"] is not None
            ]
            key = lambda g: (g["implied"], g["view"] != "server")
            guarantee = min(known, key=key, default=None)
        final = group.setting.final
        if final and guarantee is not None:
            whose = (group.setting.label, *tables.interval(final))
            counts = (len(final), group.failed)
            found.append(Candidate(*whose, *counts, guarantee, group.setting.data))
    return found


def _unprotected(groups: list[Group], chosen: Candidate | None) -> list[Card]:
    """Return a card of the most accurate setting without any epsilon, on the data of `chosen`."""
    settings = [
        g.setting
        for g in groups
        if g.setting.final
        and all(x["epsilon"] is None for x in g.guarantees)
        and (chosen is None or g.setting.data == chosen.data)
    ]
    if not settings:
        return []
    setting = max(settings, key=lambda s: tables.interval(s.final)[0])
    facts = [("setting", setting.label), ("seeds", str(len(setting.final)))]
    where = "" if chosen is None else ", same data"
    accuracy = plus_minus(*tables.interval(setting.final))
    return [Card(f"Without a guarantee{where}", accuracy, facts)]
