"""The verdicts of stored results again, from the values that they store, and a table of those that
the rule changed.

    python -m experiments.harness.rejudge noble2022 chen2024 --into experiments/results
    python -m experiments.harness.rejudge --table

Nothing is run.
"""

import collections
import importlib
import json
import re
import sys
import tomllib
import typing
from pathlib import Path

import tyro

from . import command_line, results
from .runner import judged, not_tuned, ran_at, stored_line
from .verdicts import NOT_REPRODUCED, UNKNOWN

PAPERS = ("noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024")
AGAIN = "it ran anew; "
BY_INTERVALS = "by intervals, corrected within the figure"
ANOTHER = "the earlier verdict was of a measure that the figure does not plot"
SAME: dict[str, str] = dict(zip(results.STUDIED, ("holds", NOT_REPRODUCED, UNKNOWN)))
DATA = {  # in words: in what says that they cannot be read
    "Fashion-MNIST": "fashion_mnist",
    "FEMNIST": "emnist",
    "SVHN": "svhn",
    "CIFAR-10": "cifar10",
}
THEOREMS = re.compile("hypothes|constant")  # in words: why a theorem cannot be checked
DESCRIBED = ("differs", "draws", "devices", "not_tuned", "at_edge", "stale")  # keys of NOTES
FILE, UNCHECKED, AT_FIRST = "verdicts.md", "unchecked.md", "unchecked_at_first.json"
CAUSES = Path(__file__).with_name("causes.toml")


def rejudge(
    stored: results.Experiment, experiment, earlier: dict, again: bool = False
) -> list[results.Verdict]:
    """The verdicts on the lines of a stored figure.

    Args:
        stored: the figure.
        experiment: its claims, as the module of the paper has them.
        earlier: claim -> its Verdict, as the file has it.
        again: its lines, or some, ran anew.
    """
    lines = {n: stored_line(line, tuple(stored.seeds)) for n, line in stored.lines.items()}
    found = []
    for claim, given in zip(
        experiment.claims, judged(experiment, lines, stored.unread), strict=True
    ):
        before = earlier.get(claim.text) or earlier.get(claim.formerly)
        verdict = results.Verdict(**given)
        if before is not None:
            verdict.earlier = before.earlier or (
                before.verdict if before.verdict in results.STUDIED[:2] else ""
            )
            if verdict.earlier and verdict.verdict != SAME[verdict.earlier]:
                verdict.why = ANOTHER if claim.another_measure else BY_INTERVALS
                if verdict.verdict == UNKNOWN:
                    verdict.why = verdict.seen
                if again or before.why.startswith(AGAIN):
                    verdict.why = AGAIN + verdict.why
        found.append(verdict)
    return found


def rejudge_file(module: str, folder: Path) -> Path:
    """Judge the figures in FOLDER/MODULE.json again -> that file."""
    file = folder / f"{module}.json"
    whole = results.read(file)
    known = importlib.import_module(f"experiments.papers.{module}.figures").EXPERIMENTS
    for name, part in whole.experiments.items():
        experiment = known.get(name)
        if experiment is None or experiment.special:
            continue
        if experiment.claims:
            part.verdicts = rejudge(part, experiment, {v.claim: v for v in part.verdicts})
        describe(part, experiment)
    results.write(file, whole)
    return file


def describe(stored: results.Experiment, experiment):
    """Say on the page how a figure's settings differ, how often its data were drawn, on which
    devices its lines ran, which of its baselines were not tuned, where the best of a grid is at an
    end of it, and which lines ran at other rates than those that were chosen since.

    Args:
        stored: the figure, whose notes change.
        experiment: of the module of the paper.
    """
    found = _described(stored, experiment) if stored.lines else {}
    headings = tuple(results.NOTES[key] + ": " for key in DESCRIBED)
    words = [heading + found[key] for key, heading in zip(DESCRIBED, headings) if found.get(key)]
    stored.notes = words + [n for n in stored.notes if not n.startswith(headings)]


def _described(stored: results.Experiment, experiment) -> dict[str, str]:
    """key of DESCRIBED -> its words; "" where there is nothing to say."""
    lines = {n: stored_line(line, tuple(stored.seeds)) for n, line in stored.lines.items()}
    devices = collections.Counter(
        line.device or "what is not stored" for line in stored.lines.values()
    )
    counts = ", ".join(f"{count} lines on {device}" for device, count in devices.most_common())
    stale = [n for n, line in stored.lines.items() if _stale(line, n, experiment)]
    return dict(
        differs=experiment.differs,
        draws=_by_line({n: line.draws or "not stored" for n, line in stored.lines.items()}),
        devices=counts if len(devices) > 1 else "",
        not_tuned=not_tuned(experiment, lines),
        at_edge=", ".join(n for n in stored.lines if n in experiment.at_edge),
        stale=", ".join(stale),
    )


def _by_line(said: dict[str, str]) -> str:
    """What is said of most lines, and of which lines something else."""
    (usual, _), *others = collections.Counter(said.values()).most_common()
    of = {words: ", ".join(n for n, each in said.items() if each == words) for words, _ in others}
    return "; ".join([usual, *(f"{words} of {names}" for words, names in of.items())])


def _stale(line: results.Line, name: str, experiment) -> bool:
    """Whether a stored line ran at other rates, or another clip norm, than its figure has now."""
    known = line.ran_at and name in experiment.lines
    return bool(known) and line.ran_at != ran_at(experiment, name)


def table(folder: Path) -> str:
    """Every verdict that another rule, or another run, changed: old, new and why."""
    words = [
        "# Verdicts that changed",
        "",
        "Generated by `python -m experiments.harness.rejudge --table`. Earlier a claim was "
        '"confirmed" where means differed by more than one standard error. ' + results.RULE,
        "",
    ]
    for module in PAPERS:
        whole, because = results.read(folder / f"{module}.json"), causes()[module]
        rows = [
            (part.name, v.claim, v.earlier, v.verdict, v.whose, _why(v, part.name, because))
            for part in whole.parts()
            for v in part.verdicts
            if v.earlier and v.verdict != SAME[v.earlier]
        ]
        every = [v for part in whole.parts() for v in part.verdicts if v.earlier]
        words += [
            f"## {whole.title}",
            "",
            f"{len(rows)} of {len(every)} verdicts changed beyond their name.",
            "",
            "| experiment | claim | earlier | now | whose | why |",
            "| --- | --- | --- | --- | --- | --- |",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
            "",
        ]
    return "\n".join(words)


def causes() -> dict:
    """paper -> figure, or "all" -> why it ran anew, in words."""
    return tomllib.loads(CAUSES.read_text())


def _why(verdict: results.Verdict, figure: str, because: dict) -> str:
    """Why a verdict changed, with what was changed before its figure ran anew."""
    cause = because.get(figure, because["all"])
    return verdict.why.replace(AGAIN, f"it ran anew ({cause}); ", 1)


def unchecked(folder: Path) -> str:
    """What became of each claim that could not be checked when the results were first reviewed, and
    which statements of the papers cannot be checked now.

    Raises:
        KeyError: of a claim that is no longer in the results: none may be dropped.
    """
    first = json.loads((folder / AT_FIRST).read_text())
    files = {module: results.read(folder / f"{module}.json") for module in PAPERS}
    now = {
        (module, part.name, v.claim): v
        for module, whole in files.items()
        for part in whole.parts()
        for v in part.verdicts
    }
    rows = [
        (module, figure, claim, v.verdict, v.seen)
        for module, figures in first.items()
        for figure, claims in figures.items()
        for claim in claims
        for v in [now[module, figure, claim]]
    ]
    left = {module: _left(now, module) for module in PAPERS}
    return "\n".join(
        [
            "# Claims that could not be checked",
            "",
            "Generated by `python -m experiments.harness.rejudge --table`. "
            f"{len(rows)} claims could not be checked when these results were first reviewed. "
            f"Now: {_counted([row[3] for row in rows])}. "
            f"Of distinct statements of the papers {sum(map(len, left.values()))} cannot be "
            f"checked now ({', '.join(f'{m} {len(of)}' for m, of in left.items() if of)}):",
            "",
            *_reasons(left),
            "",
            "| paper | experiment | claim | now | what was seen, or why not |",
            "| --- | --- | --- | --- | --- |",
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
            "",
        ]
    )


def _counted(verdicts: list[str]) -> str:
    """How many there are of each verdict."""
    found = collections.Counter(verdicts)
    return ", ".join(f"{found[v]} {v}" for v in results.VERDICTS if found[v])


def _left(now: dict, module: str) -> dict:
    """statement -> why not, of the statements of a paper of which no check was made."""
    of = {}
    for (paper, figure, claim), v in now.items():
        if paper == module and v.whose == "paper":
            of.setdefault(v.statement or (figure, claim), []).append(v)
    return {
        statement: checks[0].seen
        for statement, checks in of.items()
        if all(v.verdict == UNKNOWN for v in checks)
    }


def _reasons(left: dict) -> list[str]:
    """How many statements each kind of reason leaves."""
    found = {}
    for of in left.values():
        for why in of.values():
            needs = ", ".join(shown for shown, name in DATA.items() if name in why)
            if needs:
                reason = f"need {needs}: not at hand"
            elif THEOREMS.search(why):
                reason = "are theorems that leave constants open, or whose hypotheses no run meets"
            else:
                reason = "need lines that were not run, or values of seeds that were not stored"
            found[reason] = found.get(reason, 0) + 1
    return [f"- {count} {reason}" for reason, count in sorted(found.items(), key=lambda i: -i[1])]


def main(argv=None) -> int:
    def command(
        modules: tyro.conf.Positional[tuple[typing.Literal[tuple(PAPERS)], ...]] = (),  # pyright: ignore[reportInvalidTypeForm]  # names of a table
        into: Path = Path("experiments/results"),
        table: bool = False,
    ) -> int:
        """Judge stored results again.

        Args:
            modules: papers.
            into: the directory of their files.
            table: write the tables of changed and of missing verdicts there too.
        """
        for module in modules:
            print(rejudge_file(module, into))
        if table:
            for name, made in ((FILE, _table), (UNCHECKED, unchecked)):
                (into / name).write_text(made(into), encoding="utf-8")
                print(into / name)
        return 0

    return command_line.called(command, "python -m experiments.harness.rejudge", argv)


_table = table  # `command` has a flag of that name

if __name__ == "__main__":
    sys.exit(main())
