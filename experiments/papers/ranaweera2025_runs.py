"""What the experiments on Ranaweera et al., 2025, need beyond `harness.runner`: runs whose epsilon
is huge, checks, tables."""

from pathlib import Path

import numpy as np

from jfl.cli import console
from jfl.core.records import Guarantee
from jfl.privacy.entry_guarantees import Overflow, overflowing
from jfl.privacy.ledger import entries
from jfl.runs import record, train
from jfl.runs.config import the_unit, the_view

from ..harness.programs import Plans, drawn, proved
from ..harness.runner import show_verdicts
from ..harness.verdicts import NOT_RUN, Comparison, Evidence, difference, known
from .li2025_plans import written


def privacy(plan, config):
    """As of `jfl sweep`, but also where the true epsilon is so large that a draw without a slot
    takes all of delta.

    What is proved is then conditional: as if no draw overflowed, which has a probability below
    1e-12 in a run.
    """
    try:
        return proved(plan, config)
    except Overflow:
        unit, view = the_unit(config), the_view(config)
    entry = next(
        e for e in entries.entries(plan, config.rounds) if (e.unit, e.view) == (unit, view)
    )
    value = overflowing(entry._replace(overflow=0.0), np.array([config.rounds]), config.delta)[0][0]
    worth = Guarantee(
        float(value),
        config.delta,
        unit,
        entry.adjacency,
        view,
        "bounds of the engine",
        "conditional",
        ("as if no draw overflowed",),
    )
    return [record.row(g) for g in (worth, *train.paper_claims(plan, config, config.rounds))]


def epsilons(plan, config, rounds):
    """None, as where nothing is proved, if all of delta is taken."""
    try:
        return train.epsilons(plan, config, rounds)
    except Overflow:
        return None


RUNS = Plans(
    drawn,
    seeded=True,
    privacy=privacy,
    epsilons=epsilons,
    trace=(("curve", "accuracy"), ("round", "round")),
)


# --- claims


def reproduces(triples, share=0.5):
    """A check that of each (published, matched, vanilla) the second has more than `share` of the
    first's gain."""

    def check(results):
        run = [t for t in triples if not known(results, *t)]
        gains = [
            tuple(difference(results, n, vanilla) for n in (first, matched))
            for first, matched, vanilla in run
        ]
        words = ", ".join(f"{b.mean:+.3f} of {a.mean:+.3f}" for a, b in gains)
        missing = "" if len(run) == len(triples) else f"{len(run)} of {len(triples)} run"
        if any(a.mean <= 0 for a, _ in gains):
            missing = "a line without gain, of which nothing can be a share"
        return Evidence(
            tuple(Comparison(b - share * a, low=0.0) for a, b in gains if a.mean > 0),
            missing,
            seen=f"{words}; more than {share:g} of it by",
        )

    return check


def understated(names):
    """A check that what is proved of each line is above what is claimed, or nothing is proved at
    all."""

    def check(results):
        run = [results[n] for n in names if n in results and results[n].claimed is not None]
        shown = lambda e: "nothing" if e is None else f"{e:.3g}"
        seen = ", ".join(f"claimed {r.claimed:.3g}, proved {shown(r.proved)}" for r in run)
        if any(r.proved is not None and r.proved <= r.claimed for r in run):
            return Evidence(exact=False, seen=seen)
        if len(run) < len(names):
            return Evidence(seen=seen, missing=NOT_RUN)
        return Evidence(exact=True, seen=seen)

    return check


def told(out, name, title, columns, rows, verdicts, caption="", **found):
    """Tables of rows and claims; what was found, also as results.json."""
    console.table(title, [(c, i > 0) for i, c in enumerate(columns)], rows, caption)
    show_verdicts(verdicts)
    found = dict(
        experiment=name, title=title, columns=list(columns), rows=[list(r) for r in rows], **found
    )
    return written(Path(out), found | dict(verdicts=verdicts))
