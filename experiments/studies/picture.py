"""Show a study: a table of its points, and its picture.

python -m experiments.studies.picture NAME ...    # draws experiments/results/study_NAME.png
                                                  # again, from the stored numbers
"""

import sys
from pathlib import Path

from experiments.harness import pictures, results
from experiments.studies.messages import MESSAGES
from jfl.cli import console
from jfl.runs import record

# Field of a point -> its heading in the printed table, of accuracies or of epsilons.
POINT = dict(panel="panel", line="line")
TRAINED = dict(x="x", mean="accuracy", half="±", failed="failed", chosen="chosen")
CLAIMS = dict(stated="ε stated", claimed="ε claimed", audited="ε audited", ceiling="at most")
PROMISE = {"epsilon": "ε proved"} | {k: k for k in ("delta", "unit", "adjacency", "view")}
NOTES = dict(
    accuracy="± is half of a 95 % interval over seeds. Accuracies, and the choice of rates on "
    "other seeds, are in no epsilon.",
    epsilon="Nothing was trained.",
    audit="Audited: a lower bound at 95 %, each by itself. At most: the largest bound that this "
    "number of runs can give.",
)


def show(plan, rows, skipped, quick):
    """Print the points of a study, and the data that were not read."""
    fields = POINT | (TRAINED if plan.y == "accuracy" else CLAIMS) | PROMISE
    console.table(
        plan.title + (" (quick)" if quick else ""),
        [(heading, name not in ("panel", "line")) for name, heading in fields.items()],
        [tuple(_cell(row.get(name)) for name in fields) for row in rows],
        NOTES[plan.y],
    )
    for data, why in skipped.items():
        for stream in (sys.stdout, sys.stderr):
            print(f"SKIPPED: {data} was not run.  {why}", file=stream)


def _cell(value) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={_cell(v)}" for name, v in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def picture(path, plan, rows, quick):
    """Draw the points of a study, or one row for each audited plan."""
    points = [results.checked(plan.title, record.as_json(row), results.Point) for row in rows]
    title = plan.title + (" (quick settings)" if quick else "")
    draw = pictures.audits if plan.y == "audit" else pictures.study
    if figure := draw(points, plan.xlabel, title):
        pictures.save(path, figure)


def main(names):
    """Draw the pictures of stored studies again."""
    for name in names:
        file = Path(__file__).parents[1] / "results" / f"study_{name}.json"
        stored = results.read(file)
        audited = any(p.audited is not None for p in stored.points)
        draw = pictures.audits if audited else pictures.study
        message = MESSAGES.get(name)
        if figure := draw(stored.points, stored.xlabel, stored.title, message):
            pictures.save(file.with_suffix(".png"), figure)


if __name__ == "__main__":
    main(sys.argv[1:])
