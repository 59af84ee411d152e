"""The cards at the top of a page: the best private accuracy, its epsilon, and what is proved."""

from typing import Any, NamedTuple

from ..runs import tables
from ..runs.statistics import plus_minus
from .document import Card, Text
from .plots import PROMISE, Setting

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
CONTRADICTED = "An audit shows more than is proved, which is a bug. Trust no ε of this setting."


class Candidate(NamedTuple):
    """A setting with accuracies, and its guarantee with a finite epsilon that the page shows."""

    setting: Setting
    guarantee: dict[str, Any]


def of(settings: list[Setting]) -> tuple[list[Card], list[Text]]:
    """Return the cards at the top of a page, and the texts below them."""
    candidates = [
        Candidate(setting, guarantee)
        for setting in settings
        if setting.final and (guarantee := _shown(setting)) is not None
    ]
    # the most accurate one with a proved guarantee, or else with a conditional one
    rank = lambda c: (c.guarantee["status"] == "proved", _accuracy(c.setting)[0])
    chosen = max(candidates, key=rank, default=None)
    if chosen is not None:
        cards, below = _cards_of(chosen, candidates, settings)
    else:
        note = f"None of {len(settings)} settings has a finite ε, so nothing is guaranteed."
        cards, below = [Card("Best private accuracy", "none", notes=[note])], []
    cards += _unprotected(settings, chosen)
    if any(audit["contradicted"] for setting in settings for audit in setting.audits):
        cards.insert(0, Card("Audit", "contradicts the proof", notes=[CONTRADICTED], alarm=True))
    return cards, [Text(" ".join(below), quiet=True)] if below else []


def _accuracy(setting: Setting) -> tuple[float, float | None]:
    """Return the mean final accuracy and half the width of its confidence interval."""
    return tables.interval(setting.final)


def _shown(setting: Setting) -> dict | None:
    """Return the best proved guarantee, or else a conditional one; None without either.

    Guarantees for the view of the config are preferred, by default those for the server.
    """
    guarantees, view = setting.guarantees, setting.config.get("view")
    proved = tables.proved(guarantees, view)
    if proved["epsilon"] is not None:
        return proved
    known = [g for g in guarantees if g["status"] == "conditional" and g["epsilon"] is not None]
    return min(known, key=lambda g: (g["implied"], g["view"] != (view or "server")), default=None)


def _cards_of(chosen, candidates, settings) -> tuple[list[Card], list[str]]:
    """Return the cards of the best setting, and what has to be said about the choice."""
    setting, guarantee = chosen
    peers = [c for c in candidates if c.guarantee["status"] == guarantee["status"]]
    below = [CHOSEN.format(f"{len(peers)} settings with an ε") if len(peers) > 1 else ONLY]
    if len({tuple(c.guarantee[k] for k in PROMISE) for c in peers}) > 1:
        below.append(INCOMPARABLE)
    if len({c.setting.data for c in peers}) > 1:
        below.append(OTHER_DATA)
    heading, notes = "Best accuracy with a conditional ε", [CONDITIONAL]
    if guarantee["status"] == "proved":
        heading, notes = "Best private accuracy", []
        proved = sum(tables.proved(s.guarantees)["epsilon"] is not None for s in settings)
        notes.append(f"{proved} of {len(settings)} settings have a proved ε.")
    failed = f" (+{setting.failed} failed)" if setting.failed else ""
    mean, half = _accuracy(setting)
    single = ["One seed gives no interval."] if half is None else []
    facts = [("setting", setting.label), ("seeds", f"{len(setting.final)}{failed}")]
    promise = [("δ", f"{guarantee['delta']:.3g}")]
    promise += [(k, guarantee[k]) for k in PROMISE[:2]]
    promise += [("view", guarantee["view"].replace("_", " "))]
    proof = [("method", guarantee["method"])]
    if caveats := len(guarantee.get("caveats") or ()):
        proof.append(("caveats", f"{caveats}, listed below"))
    cards = [
        Card(heading, plus_minus(mean, half), facts, single),
        Card("ε", f"{guarantee['epsilon']:.4g}", promise),
        Card("What is proved", guarantee["status"], proof, [" ".join(notes)]),
    ]
    return cards, below


def _unprotected(settings: list[Setting], chosen: Candidate | None) -> list[Card]:
    """Return a card of the most accurate setting without any epsilon, on the data of `chosen`."""
    plain = [
        s
        for s in settings
        if s.final
        and all(g["epsilon"] is None for g in s.guarantees)
        and (chosen is None or s.data == chosen.setting.data)
    ]
    if not plain:
        return []
    setting = max(plain, key=lambda s: _accuracy(s)[0])
    facts = [("setting", setting.label), ("seeds", str(len(setting.final)))]
    where = "" if chosen is None else ", same data"
    return [Card(f"Without a guarantee{where}", plus_minus(*_accuracy(setting)), facts)]
