"""What a study shows: its tables and its picture."""

import sys

from experiments.harness import pictures, results
from jfl.cli import console
from jfl.runs import record, statistics


def shown(mean, half, digits=3):
    return (
        "none"
        if mean is None
        else f"{mean:.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")
    )


def show(plan, rows, verdicts, skipped, quick):
    """The tables of a study."""
    _audits(plan, rows, quick) if plan.y == "audit" else _points(plan, rows, quick)
    console.table(
        "claims",
        [("claim", False), ("verdict", False), ("seen", False)],
        [(v["claim"], v["verdict"], v["seen"]) for v in verdicts],
    )
    for data, why in skipped.items():
        for stream in (sys.stdout, sys.stderr):
            print(f"SKIPPED: {data} was not run.  {why}", file=stream)


def number(value):
    return "" if value is None else f"{value:.4g}"


def _audits(plan, rows, quick):
    """What is claimed, audited and proved of each plan."""
    cells, before = [], None
    for r in rows:
        panel, before = "" if r["panel"] == before else r["panel"], r["panel"]
        claimed = r["claimed"]
        verdict = "refuted" if claimed is not None and r["audited"] > claimed else "not refuted"
        cells.append(
            (
                panel,
                r["line"],
                number(claimed),
                number(r["audited"]),
                number(r["ceiling"]),
                number(r["epsilon"]) or "none",
                "" if claimed is None else verdict,
                *(str(r[k] or "") for k in ("unit", "view", "adjacency", "method")),
                str(r["trials"]),
            )
        )
    heads = ("ε claimed", "ε audited", "at most", "ε proved")
    words = ("claim", "unit", "view", "adjacency", "method")
    console.table(
        plan.title + (" (quick)" if quick else ""),
        [
            ("panel", False),
            ("line", False),
            *((h, True) for h in heads),
            *((h, False) for h in words),
            ("runs a side", True),
        ],
        cells,
        "Audited: a lower bound at 95 %, each by itself.  At most: what so many runs could show.",
    )


def _points(plan, rows, quick):
    cells, before = [], None
    for r in rows:
        first = shown(r["mean"], r["half"]) if plan.y == "accuracy" else number(r["claimed"])
        chosen = " ".join(f"{k}={v:g}" for k, v in r.get("chosen", {}).items()) + (
            " (edge)" if r.get("at_edge") else ""
        )
        panel, before = "" if r["panel"] == before else r["panel"], r["panel"]
        cells.append(
            (
                panel,
                r["line"],
                number(r.get("stated", r["x"])),
                first + (f" ({r['failed']} failed)" if r["failed"] else ""),
                number(r["epsilon"]) or "none",
                *(str(r[k] or "") for k in ("delta", "unit", "adjacency", "view")),
                (r["method"] or "").partition(",")[0],
                chosen,
            )
        )
    console.table(
        plan.title + (" (quick)" if quick else ""),
        [
            ("panel", False),
            ("line", False),
            *(
                (h, True)
                for h in (
                    (plan.xlabel, "accuracy") if plan.y == "accuracy" else ("ε stated", "ε claimed")
                )
            ),
            ("ε proved", True),
            ("δ", True),
            ("unit", False),
            ("adjacency", False),
            ("view", False),
            ("method", False),
            ("chosen", False),
        ],
        cells,
        f"{statistics.PLUS_MINUS}  Accuracies lie outside every guarantee, and so does the "
        "choice of rates, made on other seeds."
        if plan.y == "accuracy"
        else "Nothing was trained.",
    )


def picture(path, plan, rows, quick):
    """A panel each: means and bands of 95 %; dashed without noise.  Of epsilons, the diagonal and
    what proves nothing.  Of audits, a row each."""
    points = [results.checked(plan.title, record.as_json(row), results.Point) for row in rows]
    title = plan.title + (" (quick settings)" if quick else "")
    draw = pictures.audits if plan.y == "audit" else pictures.study
    if figure := draw(points, plan.xlabel, title):
        pictures.save(path, figure)
