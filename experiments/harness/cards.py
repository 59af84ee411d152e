"""A card for each algorithm, made from its docstring, its code and docs/site/cards.toml.

    python -m experiments.harness.cards        # writes docs/algorithms

The equation and the advice are written by hand. The description, the releases and the cost are
generated.
"""

import functools
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

import jfl

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "algorithms"
CLIENTS, ROWS, ROUNDS, NOISE, DELTA = 10, 20, 10, 4.0, 1e-5
STEPS = 4
NAMES = {  # how papers write them
    "fedavg": "FedAvg",
    "fedsgd": "FedSGD",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "mimelite": "MimeLite",
    "fednova": "FedNova",
    "fedsam": "FedSAM",
    "dicesgd": "DiceSGD",
    "fedbuff": "FedBuff",
    "qfedavg": "q-FedAvg",
    "addpnfl": "AdDPNFL",
    "ditto": "Ditto",
    "fedper": "FedPer",
    "fedrep": "FedRep",
    "pfedme": "pFedMe",
    "dpnfl": "DPNFL",
    "output_perturbation": "Output perturbation",
    "padpfl": "PADPFL",
}
# References that only cite papers.  A card does not repeat them, because its table has the papers.
CITATIONS = re.compile(r"(?:[A-Z][\w., ]*?(?:\d{4}|arXiv:[\d.]+\d)(?:, Algorithm \d+)?[.;] ?)+")
HEAD = f"""# Algorithms

Start with [FedAvg](local.md#fedavg). If your clients differ and the noise is in their local steps,
try [SCAFFOLD](local.md#scaffold). If each client should have a personal model, try
[Ditto](personal.md#ditto). The other algorithms serve special purposes, which the table lists.

The table also compares the privacy cost of the algorithms in one *example plan*: {CLIENTS} clients
with {ROWS} rows each participate in all {ROUNDS} rounds and take {STEPS} local steps on all of
their rows. Gaussian noise with multiplier {NOISE:g} is added to every local gradient. The column
*releases* has the number of noisy sums that a client computes per round. *ε* protects one row
against the server, for δ = {DELTA:g} and the adjacency add_remove. If jfl proves nothing for
add_remove, the adjacency is in brackets.

The comparison is different if the server adds the noise to the sum of uploads (client-level
privacy). Every algorithm then makes one release per round, however many local steps it takes, and
if all clients participate, every algorithm has the same ε.

"""
INTRO = """Each card gives the equation, the paper and the privacy cost of one algorithm. In the
equations, w is the server's model, wᵢ is the copy that client i trains, Fᵢ is the mean loss of
client i, ∇Fᵢ is its gradient (with noise, if the gradient is private), and η is a learning rate.
The cohort is the set of clients that participate in a round, and a release is a noisy sum.
[Algorithms](index.md) helps you choose, and describes the example plan.
"""
FOOT = """
This table is made from the code by `python -m experiments.harness.cards`.

## Optimizers

You can combine any algorithm with another optimizer. A server optimizer reads only the release, and
a client's optimizer reads only the (noisy) gradients, so neither changes ε.

| you write | what it is |
|---|---|
| `jfl.algorithms.fedavgm(grad, ...)` | FedAvg with momentum on the server (Hsu et al., 2019) |
| `jfl.algorithms.fedadam`, `fedyogi`, `fedadagrad` | adaptive servers (Reddi et al., ICLR 2021) |
| `jfl.algorithms.averaged(algorithm)` | the mean of the models of all rounds so far |
| `server_optimizer=optax.adam` | any optax optimizer on the server |
| `optimizer=optax.adam` | any optax optimizer on the clients (DP-Adam, if gradients are private) |
| `jfl.optimizers.adam_without_noise_bias` | Adam that subtracts the known noise variance |

The tests in `tests/contracts` run every algorithm. They check that it compiles once, that a scan
over rounds equals a loop, that a resumed run equals an uninterrupted one, and that a sweep equals
separate runs. You can add [your own algorithm](../guides/algorithm.md) to these tests by one line.
"""


@functools.cache
def problem():
    """Return a small federation and its task."""
    rows = np.zeros((CLIENTS * ROWS, 2), np.float32)
    labels = np.arange(len(rows)) % 2
    owned = lambda _: np.arange(len(rows)).reshape(CLIENTS, ROWS)
    fed = jfl.federate(jfl.datasets.arrays(rows, labels, rows[:2], labels[:2]), owned)
    return fed, jfl.models.logistic(fed)


def noisy(adjacency="add_remove"):
    """Return the chain that all cards share."""
    stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(NOISE), jfl.divide(ROWS)
    return jfl.chain(*stages, adjacency=adjacency)


def example(name: str, private: bool = True):
    """Return an algorithm with the record-level noise for which its card states an epsilon."""
    _, task = problem()
    make = getattr(jfl.algorithms, name)
    grad = jfl.private_grad(task.loss, noisy()) if private else jfl.grad(task.loss)
    options: dict[str, Any] = dict(batch=jfl.batches.full())
    if name != "fedsgd":
        options["steps"] = STEPS
    if name == "qfedavg" and private:
        options["loss_mechanism"] = noisy()
    if name == "output_perturbation":
        stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(NOISE)
        options["mechanism"] = jfl.chain(*stages, adjacency="replace_one")
        grad = jfl.grad(task.loss)
    return make(grad, **options)


def cost(name: str) -> tuple[int, str]:
    """Return the noisy releases per participation, and the epsilon of the card's plan."""
    fed, task = problem()
    algorithm = example(name)
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    proved = jfl.guarantee(plan, ROUNDS, DELTA, unit="example", view="server")
    note = "" if proved.adjacency == "add_remove" else f" ({proved.adjacency})"
    return sum(site.count for site in algorithm.releases), f"{proved.epsilon:.2f}{note}"


@functools.cache
def written() -> dict:
    """Return the hand-written texts of the cards."""
    return tomllib.loads((ROOT / "docs" / "site" / "cards.toml").read_text())


def sections(docstring: str) -> dict:
    """Split a Google-style docstring by its headings; "" holds the text before the first one."""
    parts = re.split(r"^(\w[\w ]*):\n(?=    )", docstring, flags=re.M)
    found = {"": parts[0].split("\n>>>")[0].strip()}
    for head, text in zip(parts[1::2], parts[2::2]):
        found[head] = inspect.cleandoc(text)
    return found


# How docstrings write symbols -> how the equations of the cards write them.
SYMBOLS = {
    r"\bw(?:_i)? - w_server": "wᵢ − w",
    r"\bw_server": "w",
    r"(?<=\w|\)) - (?=\w|<)": " − ",
    r"\b([a-zA-Z])_i\b": "\\1ᵢ",
    r"\bsum (?=[a-z]ᵢ)": "Σ ",
    r"\bmu\b": "μ",
    r"\brho\b": "ρ",
    r"\bsigma\b": "σ",
    r"\bepsilon\b": "ε",
    r"<([^<>]+), ([^<>]+)>": r"⟨\1, \2⟩",
    r"<=": "≤",
    r" \* ": " · ",
    r"\|\|": "‖",
    r"\^2\b": "²",
}


def flat(text: str) -> str:
    """Join the lines of a paragraph for Markdown, with symbols as in the equations."""
    parts = re.split(r"(`[^`]*`)", re.sub(r"\s*\n\s*", " ", text))
    for i in range(0, len(parts), 2):  # between pieces of code
        for written_as, symbol in SYMBOLS.items():
            parts[i] = re.sub(written_as, symbol, parts[i])
        parts[i] = parts[i].replace("*", r"\*")
    return "".join(parts)


def first_sentence(text: str) -> str:
    """Turn "Return FedAvg: clients train ..." into a sentence about the algorithm."""
    text = text.removeprefix("Return ")
    name, colon, rest = text.partition(": ")
    if colon and rest.startswith(("clients ", "local steps ", "client i ")):
        return rest[0].upper() + rest[1:]
    if colon:
        return f"{name} is {rest}"
    name, which, rest = text.partition(", which ")
    return f"{name} {rest}" if which else f"This is {text}"


def tests_of(name: str) -> list[str]:
    """Return the files of tests/algorithms that name an algorithm."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests" / "algorithms").glob("test_*.py"))
        if re.search(rf"\b{name}\b", path.read_text())
    ]


def card(name: str) -> str:
    """Return the card of one algorithm in Markdown."""
    make, by_hand = getattr(jfl.algorithms, name), written()[name]
    module = sys.modules[make.__module__]
    parts = sections(inspect.getdoc(make) or "")
    references = sections(inspect.cleandoc(module.__doc__ or ""))["References"]
    releases, epsilon = cost(name)
    source = Path(inspect.getsourcefile(make) or "").relative_to(ROOT).as_posix()
    steps = "" if name == "fedsgd" else f", in {STEPS} local steps"
    is_stateful = "yes" if example(name, private=False).stateful else "no"
    rows = [
        ("equation", by_hand["equation"]),
        ("paper", by_hand.get("paper", flat(references))),
        (
            "noisy releases per participation in the [example plan](index.md)",
            by_hand.get("releases", f"{releases}{steps}"),
        ),
        ("ε in this plan", epsilon),
        ("clients keep a state", is_stateful),
        ("source", f"[`{source}`](../../{source})"),
        ("tests", ", ".join(f"[`{t}`](../../{t})" for t in tests_of(name))),
        ("reference", f"[`jfl.algorithms.{name}`](../reference/algorithms.md)"),
    ]
    out = [f"## {NAMES[name]} {{ #{name} }}", "", f"**When.** {by_hand['when']}", ""]
    out += ["| | |", "|---|---|", *(f"| {head} | {text} |" for head, text in rows), ""]
    for number, paragraph in enumerate(re.split(r"\n\s*\n", parts[""])):
        if number == 0:
            paragraph = first_sentence(paragraph)
        if paragraph.lstrip().startswith("- "):
            items = re.split(r"\n(?=- )", paragraph.strip())
            out += [f"- {flat(item[2:])}" for item in items] + [""]
        else:
            out += [flat(paragraph), ""]
    if "Privacy" in parts:
        out += [f"**Privacy:** {flat(parts['Privacy'])}", ""]
    based_on = flat(parts.get("References", ""))
    if based_on and not CITATIONS.fullmatch(based_on):
        out += [f"**Based on:** {based_on}", ""]
    return "\n".join(out)


def pages() -> dict:
    """Return every page of docs/algorithms, by file name."""
    families = written()["families"]
    of = {
        family: [n for n, w in written().items() if w.get("family") == family]
        for family in families
    }
    table = ["| algorithm | releases | ε | when to use it |", "|---|---|---|---|"]
    found = {}
    for family, title in families.items():
        text = [f"# {title}\n", INTRO]
        for name in of[family]:
            releases, epsilon = cost(name)
            link = f"[{NAMES[name]}]({family}.md#{name})"
            table.append(f"| {link} | {releases} | {epsilon} | {written()[name]['when']} |")
            text.append(card(name))
        found[f"{family}.md"] = "\n".join(text).rstrip() + "\n"
    found["index.md"] = HEAD + "\n".join(table) + "\n" + FOOT
    return found


if __name__ == "__main__":
    for file, text in pages().items():
        (FOLDER / file).write_text(text)
