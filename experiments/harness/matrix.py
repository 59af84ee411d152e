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

This page lists every combination for which `jfl.guarantee` can prove an ε. [What ε
means](concepts/epsilon.md) explains the words that it uses. In short, the *unit* is what is
protected, the *adjacency* says how neighbouring data sets differ, and the *view* is the observer:
`server` sees every upload, `third_party` sees only models, `aggregate` sees only sums of uploads,
and `personal` sees every upload and all personal models. A release is a noisy sum, and
amplification is the decrease in ε because of random sampling.

To look up a plan, find

1. the table for the place where the plan adds noise;
2. the row for its sampler and adjacency;
3. the column for its kind of noise and the view.

The cell names the rule by which jfl computes ε, and a dash means that `jfl.guarantee` refuses the
combination. For example, a plan whose server adds Gaussian noise to the sum of uploads
(`release=`), with Poisson cohorts and add_remove, has the rule `sampled cohorts` against a third
party: every release counts, amplified by the random cohorts.

## The rules

| rule | what jfl counts |
| --- | --- |
| `every batch`, `every round` | every release, without amplification by sampling |
| `sampled batches`, `sampled cohorts` | every release, amplified by random batches or cohorts |
| `absence` | rounds without the client reveal nothing about it, if nobody sees who participates |
| `touched rows` | one release per round, and only if a batch of the round contains the row |
| `uploads` | the noise of the client's own upload |
| `sum of uploads` | the noise of all clients together |
| `uploads and model` | the noise of all clients together with the noise of the server |
| `sum of a cohort` | the smallest total noise of a cohort, assuming secure aggregation |
| `Renyi bound` | integer noise, by a bound on its Rényi divergence |
| `all rounds at once` | all rounds of correlated noise as one Gaussian release |
| `group` | only the rounds of the client's group, if groups of clients participate in rotation |
| `one bin` | all rounds of the client's bin (`balls_in_bins`), which the observer does not know |
| `sampled group` | the rounds of the client's group, amplified by the sampling in the group |

[Guarantees and bounds](guides/guarantee.md#how-jfl-computes-the-bound) explains the rules in more
detail. "A, B" in a cell means that both rules apply. "A, or B" means that jfl uses A if its
condition holds, and otherwise B. The conditions are:

- `sum of uploads`: the server sums uploads unchanged, and their noise is isotropic;
- `uploads and model`: the condition of `sum of uploads` holds, and the uploads and the release both
  have isotropic Gaussian noise and the same adjacency;
- `absence`: a cohort does not contain all clients, and who participated together can be seen: from
  a state that clients keep, or from uploads that a third party sees (`uplinks`);
- `group`, `one bin`: there are several groups or bins, and the noise multiplier never changes;
- `sampled group`: the strategy matrix of the correlated noise has at most as many bands as there
  are rounds from one turn of a group to the next.

## Words in the tables

The column "drawn by" names the sampler. If the unit is an example, it is
the [sampler](guides/stages_and_samplers.md#samplers) of batches, which draws the rows of a local
step. If the unit is a client, it is the sampler of clients, which draws the cohort of a round.
`other` is a sampler of your own that does not state from which distribution it draws.

`correlated` is noise that is [correlated over rounds](guides/correlated_noise.md), and `integers`
is the integer noise of [distributed noise](guides/distributed_noise.md). The table "noise once
after local training" is for [output perturbation](algorithms/noise.md#output_perturbation).

Two facts hold for all tables:

- A guarantee for clients implies one for their examples. Under replace_one it has the same ε.
  Under add_remove and zero_out, a replaced row can change an upload by twice the clip norm. jfl
  then computes ε for half of the noise multiplier, without amplification except by `absence`.
- With Laplace noise, sampling amplifies privacy only for Poisson samples, and for samples of fixed
  size under replace_one. In all other cases, jfl assumes that the observer knows the sample.

The tables are made from the code by `python -m experiments.harness.matrix`.
"""
PLACES = {
    "local step": "Unit example, noise in every local step",
    "local training": "Unit example, noise once after local training",
    "upload": "Unit client, noise on uploads",
    "release": "Unit client, noise on the release",
}

# What a reader has to know about the columns of a table.
NOTES = {
    "release": """This table has no column for the view `server`: the server sees every upload
before it adds the noise, so nothing is proved for it.

""",
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
        cells = tuple(", or ".join(dict.fromkeys(r.name for r in rules)) or "–" for rules in each)
        found.setdefault((scheme, cells), dict())[adjacency] = None
    heads = ["drawn by", "adjacency", *(f"{noise}, {view}" for noise, view in columns)]
    lines = [heads, ["---"] * len(heads)]
    lines += [[f"`{scheme}`", ", ".join(kinds), *cells] for (scheme, cells), kinds in found.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page() -> str:
    """Return docs/matrix.md."""
    sections = (
        f"\n## {title}\n\n{NOTES.get(place, '')}{table(place)}\n" for place, title in PLACES.items()
    )
    return HEAD + "".join(sections)


def main():
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
