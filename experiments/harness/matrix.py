"""What can be proved, as tables made from the rows of the ledger's table.

    python -m experiments.harness.matrix        # writes docs/matrix.md

Each cell names the rule that answers for a combination, or the rules, best first; a dash is a
combination that is refused.
"""

import sys
from pathlib import Path

from jfl.privacy.ledger.rules import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "matrix.md"
HEAD = """# What can be proved

Made from the code by `python -m experiments.harness.matrix`: a row for each way to draw batches or
cohorts and each adjacency, a column for each noise and view. A cell names the rule that gives the
guarantee. Of several rules, the first whose conditions hold is used. A dash is a combination that
`jfl.guarantee` refuses. [What ε means](concepts/epsilon.md) has the words.

| rule | what is counted |
| --- | --- |
| `sampled batches`, `sampled cohorts` | privacy amplification by sampling |
| `every batch`, `every round` | composition without any amplification |
| `absence` | a client's absence from a round, which the third party does not see |
| `touched rows` | one release of several steps; the absence of a row from all of their batches |
| `uploads` | the noise of the client's own upload |
| `sum of uploads`, `uploads and model` | the noise of all clients, with the server's |
| `sum of a cohort` | under secure aggregation, the noise of the cohort with the least noise |
| `Renyi bound` | noise of integers |
| `all rounds at once` | all rounds as one Gaussian release, with the sensitivity of the strategy |
| `group`, `one bin`, `one group, sampled` | the rounds of one group of clients that take turns |

- The server sees every upload before it adds the noise of a release, so that noise proves nothing
  for the view `server`.
- A guarantee for clients implies one for their examples, in the same rows of these tables.  Under
  replace_one it is the same.  Otherwise it counts half the noise multiplier, and no amplification
  except absence.
- The view `personal` sees every upload and all personal models.
"""
PLACES = {
    "local step": "Unit example, noise in every local step",
    "local training": "Unit example, noise once after local training",
    "upload": "Unit client, noise on uploads",
    "release": "Unit client, noise on the release",
}


def table(place: str) -> str:
    """Return the table of a place; adjacencies that have the same rules share a row."""
    rows = {row: rules for row, rules in TABLE.items() if row[1] == place}
    columns = [
        (noise, view)
        for noise in ("gaussian", "laplace", "correlated", "integers")
        for view in ("server", "third_party", "aggregate", "personal")
        if any((noise, view) == row[2:4] for row in rows)
    ]
    found = {}
    for unit, _, _, _, scheme, adjacency in rows:
        each = [rows.get((unit, place, *column, scheme, adjacency), ()) for column in columns]
        cells = tuple(" or ".join(dict.fromkeys(r.name for r in rules)) or "–" for rules in each)
        found.setdefault((scheme, cells), dict())[adjacency] = None
    heads = ["drawn by", "adjacency", *(f"{noise}, {view}" for noise, view in columns)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{scheme}`", ", ".join(kinds), *cells] for (scheme, cells), kinds in found.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    """Return docs/matrix.md."""
    return HEAD + "".join(f"\n## {title}\n\n{table(place)}\n" for place, title in PLACES.items())


def main():
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
