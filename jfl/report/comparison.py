"""What experiments claimed, what holds, and how far their lines lie apart: blocks of a report."""

import json

from ..runs import tables
from ..runs.record import PLUS_MINUS, plus_minus
from . import panels, plots
from .collected import NUMBERS, VERDICTS, Experiment
from .document import Fold, Items, Picture, Table, Text

QUICK = "A quick run, at small settings: it shows that the experiment works, not what it finds."
HEADS = dict(
    experiment="experiment",
    claim="claim",
    paper="paper's figure",
    ours="ours",
    seeds="seeds",
    epsilon_claimed="claimed ε",
    epsilon_proved="proved ε",
    verdict="verdict",
    seen="why: what was seen",
    why="why",
)
PROMISE = ("delta", "unit", "adjacency", "view", "method", "status")


def cell(value) -> str:
    """What a table shows of a value."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def accuracy(values) -> str:
    """Mean and half of its 95 % interval."""
    return plus_minus(*tables.interval(values)) if values else ""


# --- all of them together


def overview(sources: list) -> list:
    """Blocks: of each source how many claims hold, and of each experiment how far its lines are
    apart."""
    counted, apart = [], []
    for source in sources:
        given = [str(c["verdict"]) for e in source.experiments for c in e.verdicts]
        counted.append(
            (
                _label(source),
                source.experiments[0].title,
                len(given),
                *(given.count(v) for v in VERDICTS),
            )
        )
        for e in source.experiments:
            if row := _apart(e):
                apart.append(
                    (
                        f"{source.label}: {e.name}"
                        if len(source.experiments) > 1
                        else _label(source),
                        *row,
                        _minutes(e),
                    )
                )
    columns = [("results", False), ("of", False), ("claims", True), *((v, True) for v in VERDICTS)]
    blocks = (
        [_filled("Claims that were checked", columns, counted)]
        if any(c[2] for c in counted)
        else []
    )
    if apart:
        blocks += [
            Table(
                "How far lines are apart: final test accuracy",
                [
                    ("experiment", False),
                    ("lines", True),
                    ("least accurate", False),
                    ("most accurate", False),
                    ("points apart", True),
                    ("claimed ε holds", True),
                    ("minutes", True),
                ],
                apart,
            ),
            Text(
                "Claimed ε holds: of the lines with a claimed ε, those whose proved ε is no "
                "larger; of the others "
                "only a larger ε is proved, or none. Lines without noise are among those compared. "
                "Minutes: of all its "
                "runs, on the machine that they ran on.",
                quiet=True,
            ),
            Text(
                f"Below, {PLUS_MINUS} Where a file holds too little for one, the standard "
                f"deviation over seeds stands in a "
                "column of its own. In a paper's own figures ± is what the paper means by it.",
                quiet=True,
            ),
        ]
    return blocks


def _apart(e: Experiment):
    """Least and most accurate line of an experiment, as cells; None for fewer than two."""
    found = [(line.name, line.mean) for line in e.lines if line.mean is not None]
    found += [
        (_point(p), p["mean"])
        for p in e.points
        if p["mean"] is not None and p.get("claimed") is None
    ]
    claimed = [(line.claimed, line.proved) for line in e.lines if line.claimed is not None]
    claimed += [(p["claimed"], p.get("epsilon")) for p in e.points if p.get("claimed") is not None]
    covered = (
        f"{sum(b is not None and b <= a for a, b in claimed)} of {len(claimed)}" if claimed else ""
    )
    if len(found) < 2:
        return (len(e.points), "", "", "", covered) if e.points and covered else None
    low, high = (choose(found, key=lambda pair: pair[1]) for choose in (min, max))
    return (
        len(found),
        *(f"{mean:.3f}: {name}" for name, mean in (low, high)),
        f"{100 * (high[1] - low[1]):.1f}",
        covered,
    )


def _label(source) -> str:
    return source.label + " (quick)" * any(e.quick for e in source.experiments)


def _point(p) -> str:
    return f"{p['panel']}: {p['line']}" + ("" if p["x"] is None else f" at {p['x']:.4g}")


# --- one source


def blocks(source) -> list:
    """The blocks of a source's experiments; those of a collection are folded, but for its verdicts
    and pictures."""
    several = len(source.experiments) > 1
    first = source.experiments[0]
    out = [Text(first.title)] if first.title else []
    if any(e.quick for e in source.experiments):
        out.append(Text(QUICK))
    if several:
        out += _said(first) + _verdicts(source.experiments)
    for e in source.experiments:
        out += _picture(e)
        if not several:
            out += [*_numbers(e), *_said(e), *_verdicts([e])]
        elif inner := [*(_said(e) if e is not first else ()), *_numbers(e)]:
            words = f"Numbers of {_named(e)}" if e is not first else "Facts of the collection"
            ran = [_seeds(e)] * bool(e.seeds) + [f"{_minutes(e)} minutes"] * bool(_minutes(e))
            out.append(Fold(words + (f" ({'; '.join(ran)})" if ran else ""), inner))
    return out


def _named(e):
    return ": ".join(filter(None, (e.name, e.title)))


def _seeds(e):
    return f"seed {e.seeds[0]}" if len(e.seeds) == 1 else f"seeds {', '.join(map(str, e.seeds))}"


def _minutes(e):
    return "" if e.seconds is None else f"{e.seconds / 60:.3g}"


def _said(e):
    return [Items(e.notes)] if len(e.notes) > 1 else [Text(n) for n in e.notes]


def _verdicts(experiments):
    found = [
        ({"experiment": e.name} if len(experiments) > 1 and e.name else {}) | c
        for e in experiments
        for c in e.verdicts
    ]
    if not found:
        return []
    given = dict.fromkeys(k for c in found for k in c)
    keys = [k for k in HEADS if k in given] + [k for k in given if k not in HEADS]
    whose = "study" if any(e.points for e in experiments) else "paper"
    return [
        Table(
            f"The {whose}'s claims, checked on these results",
            [(HEADS.get(k, k), False) for k in keys],
            [[cell(c.get(k)) for k in keys] for c in found],
        )
    ]


def _picture(e: Experiment):
    if e.points:
        figure = panels.study(e.points, e.xlabel)
        bare = ", ".join(dict.fromkeys(p["line"] for p in e.points if p["mean"] is None))
        words = (
            (
                "Proved against claimed ε: on the dotted line they are the same, above it the "
                "claim is "
                "too small."
            )
            + (f" Nothing is proved, and no point drawn, of {bare}." if bare else "")
            if any(p.get("claimed") is not None for p in e.points)
            else (
                "Means over seeds with 95 % intervals as bands; dashed lines have no noise, level "
                "ones do not depend on the axis."
            )
        )
    else:
        figure = panels.lines(e.lines)
        words = (
            f"Final test accuracy of its lines, {_bars(e.lines)}; filled where the file gives "
            f"a proved ε."
        )
        if len(e.lines) > panels.TALL:
            words += f" The first {panels.TALL} of {len(e.lines)} lines."
    if figure is None:
        return []
    words = f"{_named(e)}. {words}"
    return [
        Picture(
            f"{words} The numbers are in the tables.", words, plots.png(figure), plots.svg(figure)
        )
    ]


def _bars(lines):
    if any(line.half is not None for line in lines):
        return "bars are 95 % intervals"
    return (
        "bars are standard deviations over seeds"
        if any(line.std for line in lines)
        else "of one seed"
    )


def _numbers(e: Experiment):
    """Tables of lines, points and whatever else an experiment left, then its settings."""
    out = []
    if e.lines:
        more = list(dict.fromkeys(k for line in e.lines for k in line.more))
        columns = [
            ("line", False),
            *(
                (h, True)
                for h in (
                    "paper's figure",
                    "ours",
                    "std over seeds",
                    "seeds",
                    "claimed ε",
                    "proved ε",
                    *more,
                )
            ),
        ]
        rows = [
            (
                line.name,
                cell(line.paper),
                plus_minus(line.mean, line.half),
                cell(line.std),
                cell(line.seeds),
                cell(line.claimed),
                cell(line.proved),
                *(cell(line.more.get(k)) for k in more),
            )
            for line in e.lines
        ]
        # a claim without a proof beside it is news: that column stays
        stays = ("proved ε",) if any(line.claimed is not None for line in e.lines) else ()
        out.append(
            _filled(
                "Lines of the experiment, ε of the view that it speaks of", columns, rows, stays
            )
        )
    if e.points:
        out += _points(e)
    for caption, names, rows in e.tables:
        numbers = [
            all(isinstance(r[i], (int, float, type(None))) for r in rows if i < len(r))
            for i in range(len(names))
        ]
        single = caption == NUMBERS
        columns = [
            (n, i > 0 if single else right) for i, (n, right) in enumerate(zip(names, numbers))
        ]
        out.append(Table(caption, columns, [[cell(v) for v in r] for r in rows]))
    if e.settings:
        out.append(
            Fold(
                "Settings and facts",
                [
                    Table(
                        "As the file gives them",
                        [("what", False), ("value", False)],
                        [(k, cell(v)) for k, v in e.settings.items()],
                    )
                ],
            )
        )
    return out


def _filled(caption, columns, rows, stays=()):
    """A table without columns that are empty in all rows, but for those that stay."""
    keep = [
        i
        for i, (name, _) in enumerate(columns)
        if i == 0 or name in stays or any(r[i] != "" for r in rows)
    ]
    return Table(caption, [columns[i] for i in keep], [[r[i] for i in keep] for r in rows])


def _points(e: Experiment):
    claims = any(p.get("claimed") is not None for p in e.points)
    columns = [
        ("panel", False),
        ("line", False),
        (e.xlabel or "x", True),
        ("accuracy", True),
        ("seeds", True),
        ("failed", True),
        ("chosen", False),
        ("stated ε", True),
        ("claimed ε", True),
        ("proved ε", True),
        *((k.replace("delta", "δ"), k == "delta") for k in PROMISE),
        ("caveats", False),
    ]
    caveats: dict = {}
    rows = []
    for p in e.points:
        at = [caveats.setdefault(str(c), len(caveats) + 1) for c in p.get("caveats") or ()]
        rows.append(
            (
                p["panel"],
                p["line"],
                "" if claims else cell(p["x"]),
                "" if claims else plus_minus(p["mean"], p["half"]),
                "" if claims else str(len(p.get("values") or ())),
                cell(p.get("failed") or None),
                ", ".join(f"{k} = {cell(v)}" for k, v in (p.get("chosen") or {}).items()),
                cell(p.get("stated")),
                cell(p.get("claimed")),
                cell(p.get("epsilon")) or "none",
                *(cell(p.get(k)).replace("_", " ") for k in PROMISE),
                ", ".join(map(str, sorted(at))),
            )
        )
    out = [_filled("Points of the study, each with the guarantee of its runs", columns, rows)]
    if caveats:
        out.append(
            Fold(
                "Caveats, by the numbers in the last column", [Items(list(caveats), numbered=True)]
            )
        )
    configs = [p["config"] for p in e.points if isinstance(p.get("config"), dict)]
    if configs:
        out.append(
            _configs([_point(p) for p in e.points if isinstance(p.get("config"), dict)], configs)
        )
    return out


def _configs(names, configs):
    """Settings of points: what is the same, and what differs."""
    keys = list(dict.fromkeys(k for c in configs for k in c))
    differ = [k for k in keys if len({json.dumps(c.get(k)) for c in configs}) > 1]
    same = [
        (k, cell(configs[0][k])) for k in keys if k not in differ and configs[0].get(k) is not None
    ]
    tables_ = (
        [Table("The same for all points", [("field", False), ("value", False)], same)]
        if same
        else []
    )
    if differ:
        tables_.append(
            Table(
                "Fields that differ between points",
                [("point", False), *((k, True) for k in differ)],
                [(n, *(cell(c.get(k)) for k in differ)) for n, c in zip(names, configs)],
            )
        )
    return Fold("Settings of the points", tables_)
