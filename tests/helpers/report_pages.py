"""Folders as commands leave them, and pages as a reader of HTML has them, for tests of reports."""

import html.parser
import json

from jfl.runs import record

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>|$\\frac$"
FLOATS = ("accuracy", "loss", "train_loss", "clip_fraction", "update_norm", "cohort")
VERSIONS = dict(jfl="0.1.0", jax="0.10.2", device="cpu")


def guarantee(
    epsilon=2.0,
    status="proved",
    unit="example",
    view="server",
    method="pld",
    caveats=("float32 noise",),
    adjacency="add_remove",
    delta=1e-5,
    implied=False,
    rounds=None,
):
    return dict(
        unit=unit,
        adjacency=adjacency,
        view=view,
        delta=delta,
        epsilon=epsilon,
        method=method,
        status=status if epsilon is not None else "no guarantee",
        caveats=list(caveats),
        codes=[""] * len(caveats),
        implied=implied,
        rounds=rounds,
    )


def made(folder, settings=None, config='algorithm = "fedavg"\n', manifest=None, table=True):
    """A folder as a command leaves it; settings: name -> (accuracies of seeds, guarantees, more of
    the entry)."""
    settings = settings or {"fedavg": ([0.8, 0.9, 1.0], [guarantee()], {})}
    folder.mkdir(parents=True)
    runs, rows = [], []
    for name, (finals, guarantees, more) in settings.items():
        for seed, final in enumerate(finals):
            history = dict(round=[1, 2], **{k: [0.5, 0.25] for k in FLOATS}) | dict(
                accuracy=[final / 2, final]
            )
            values = dict(
                algorithm="fedavg", dataset=more.get("dataset", "digits"), lr=0.1, name=name
            )
            entry = record.RunRecord(
                name, values, seed, history, 0.2, 0.0, guarantees
            ).entry() | dict(seconds=dict(compile=0.0, total=1.0, per_round=0.1))
            runs.append(
                entry
                | {k: v for k, v in more.items() if k != "failed"}
                | (dict(failed=dict(nonfinite=1)) if seed in more.get("failed", ()) else {})
            )
            rows += record.rows(name, seed, history)
    facts = dict(
        clients=5,
        rows=40,
        min_size=4,
        median_size=8.0,
        max_size=12,
        label_spread=0.5,
        checksum="abc",
    )
    record.save(
        folder,
        runs,
        rows,
        manifest
        or dict(versions=VERSIONS, seeds=[0, 1, 2], data=facts, written="2026-01-01T00:00:00Z"),
    )
    if not table:
        (folder / "metrics.csv").unlink()
        (folder / "manifest.json").unlink()
    if config:
        (folder / "config.toml").write_text(config)
    return folder


def strict_json(path):
    """Read a file of JSON, without the constants that JSON does not have."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


class Tables(html.parser.HTMLParser):
    """Tables of a page: caption -> rows of cells, every tag with its attributes, and what is in
    its scripts, which is no part of its words."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self.words, self.scripts, self._in = {}, [], "", [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag in ("caption", "th", "td"):
            self._in, self._text = tag, ""
        if tag == "tr":
            self._row = []
        if tag == "table":
            self._rows = []

    def handle_data(self, data):
        if self.cdata_elem == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = attrs, text + data
            return
        self.words += data
        if self._in:
            self._text += data

    def handle_endtag(self, tag):
        if tag == "caption":
            self._caption = self._text
        if tag in ("th", "td"):
            self._row.append(self._text)
        if tag == "tr":
            self._rows.append(self._row)
        if tag == "table":
            self.tables[self._caption] = self._rows
        if tag == self._in:
            self._in = None
