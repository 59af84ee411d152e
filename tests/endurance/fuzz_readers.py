"""Coverage-guided fuzzing of everything that reads a file: what comes back is a value or a
ValueError of the house form.

    python tests/endurance/fuzz_readers.py SECONDS [target ...]

It needs atheris (pip install atheris; Python 3.11 to 3.13).

Each target gets a process, SECONDS and a corpus of seeds made here.  A finding is printed once for
each place that raised it, with the bytes that did; the fuzz goes on.  Findings that were fixed are
cases of tests/endurance/test_fuzz.py.
"""

import copy
import csv
import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

FORM = re.compile(r"[^:].*?: expected .*, but got ", re.S)  # where: need what; got what. what to do
GUARANTEE = dict(
    unit="example",
    adjacency="add_remove",
    view="server",
    delta=1e-5,
    epsilon=2.0,
    method="pld",
    status="proved",
    caveats=["float32 noise"],
)
ENTRY = dict(
    name="fedavg",
    algorithm="fedavg",
    dataset="digits",
    rounds=2,
    seed=0,
    accuracy=dict(final=0.5, best=0.5),
    loss=1.0,
    seconds=dict(compile=0.1, total=1.0, per_round=0.1),
    privacy=[GUARANTEE],
    config=dict(lr=0.1),
)
SUMMARY = dict(format=1, runs=[ENTRY])
MANIFEST = dict(
    versions=dict(jax="0.10"),
    data=dict(clients=3, rows=9),
    seeds=[0],
    kernels={},
    noise=[[1.0, 1.0]],
)
METRICS = "name,seed,round,accuracy,loss,epsilon\nfedavg,0,1,0.5,1.0,1.0\nfedavg,0,2,0.5,,2.0\n"
LINE = dict(
    accuracy=[0.5, 0.6],
    loss=dict(mean=1.0, half=0.1),
    seeds=[0, 1],
    failed=1,
    epsilon_proved=2.0,
    epsilon_claimed=1.0,
    seconds_per_round=0.1,
    paper=0.9,
    columns=dict(k=3, curve=[2.0, 1.0], gain=dict(mean=0.5)),
)
POINT = dict(panel="a", line="b", x=1.0, mean=0.5, half=0.1, epsilon=1.0, config=dict(lr=0.1))
EXPERIMENT = dict(
    format=2,
    experiment="fig1",
    module="m",
    title="t",
    quick=True,
    only=["a"],
    seeds=[0, 1],
    seconds=1.0,
    lines=dict(a=LINE),
    failed=dict(b="NaN"),
    unread=dict(svhn="not here"),
    verdicts=[dict(claim="it is so", verdict="confirmed", seen="s")],
    tables=[dict(caption="c", columns=["a"], rows=[[1]])],
    notes=["n"],
    settings=dict(x=dict(a=1)),
    versions=dict(jax="1"),
)
RESULTS = [
    EXPERIMENT,
    dict(format=2, title="t", experiments=dict(fig1=EXPERIMENT)),
    dict(format=2, title="t", xlabel="x", points=[POINT]),
]
TOML = """algorithm = "fedavg"
lr = 0.1
hidden = [3, 4]
groups = [1, 2]
group_noise = [0.5, 0.25]
allow_empty = true
unit = "client"
epsilon = 4
[sweep]
seed = [0, 1]
lr = [0.1, 0.2]
"""
PERSON = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, "
    "Male, 2174, 0, 40, United-States, <=50K"
)
JOURNAL = dict(
    format=4,
    until=3,
    since=0,
    program=dict(jax="1"),
    config=dict(lr=0.1),
    data="abc",
)
JOURNAL["digest"] = hashlib.sha256(
    json.dumps(JOURNAL, sort_keys=True).encode()
).hexdigest()  # one that is read
POINTS = [
    dict(config={}, axes=dict(lr=[0.1]), code={}, plan={}, programs=[[["a"]]]),
    dict(
        key="a",
        worker="local",
        device="cpu",
        seconds=0.5,
        compile=0.1,
        health=dict(nonfinite=0),
        history=dict(loss=[0.5]),
    ),
]
ODD = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**64,
    10**400,
    0.5,
    -0.5,
    1e308,
    1e-300,
    "",
    "a",
    "é∞\n\0|$",
    "1",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0, 1],
    ["a", None],
    "nan",
    "../x",
]


def legal(error: BaseException) -> bool:
    return isinstance(error, ValueError) and FORM.match(str(error)) is not None


# --- seeds, and what bytes stand for


def places(value, at=()):
    """The way to every node of a tree of JSON."""
    yield at
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from places(value[key], (*at, key))


def mutated(seed, data: bytes):
    """A tree of JSON with some nodes replaced, removed or doubled, as the bytes say; three of them
    for each change."""
    tree = json.loads(json.dumps(seed))
    for where, what, how in zip(data[::3], data[1::3], data[2::3]):
        ways = [w for w in places(tree) if w]
        if not ways:
            break
        *way, key = ways[where % len(ways)]
        node = tree
        for k in way:
            node = node[k]
        if how % 4 == 0:
            del node[key]
        elif how % 4 == 1 and isinstance(node, dict):
            node[str(ODD[what % len(ODD)])] = node.pop(key)
        elif how % 4 == 2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        else:
            node[key] = copy.deepcopy(ODD[what % len(ODD)])
    return tree


def text_of(data: bytes, seeds) -> bytes:
    """The bytes themselves, or after a first byte that is odd a mutation of one of `seeds`."""
    if len(data) < 2 or data[0] % 2 == 0:
        return data[1:]
    return json.dumps(mutated(seeds[data[1] % len(seeds)], data[2:])).encode(
        "utf-8", "surrogatepass"
    )


# --- targets: (folder, bytes) -> anything; each reads what the bytes say


def config(folder, data):
    """A TOML file -> the fields of a Config, which go through a file again."""
    from jfl.runs import config as configs

    (folder / "c.toml").write_bytes(data)
    values = configs.load(folder / "c.toml")
    (folder / "d.toml").write_text(configs.dump(values), encoding="utf-8")
    again = configs.load(folder / "d.toml")
    # nan is not itself
    assert {k: repr(v) for k, v in again.items()} == {k: repr(v) for k, v in values.items()}, (
        values,
        again,
    )
    configs.Config(**{k: v for k, v in values.items() if k != "sweep"})


def _page(found, module):
    """Everything that a report makes of sources."""
    from jfl.report import document as markup

    document = module.assemble(found)
    markup.page(document), markup.markdown(document, "files")


def _folder(folder, **files):
    from jfl.report import read, sections

    whole = (
        dict(
            summary=json.dumps(SUMMARY).encode(),
            manifest=json.dumps(MANIFEST).encode(),
            metrics=METRICS.encode(),
        )
        | files
    )
    for name, content in whole.items():
        (folder / (name + (".csv" if name == "metrics" else ".json"))).write_bytes(content)
    kept, sections.run_pictures = sections.run_pictures, lambda of: []  # they take the time
    try:
        _page([read.read(folder)], sections)
    finally:
        sections.run_pictures = kept


def summary(folder, data):
    """summary.json of a run's folder -> its page."""
    _folder(folder, summary=text_of(data, [SUMMARY]))


def manifest(folder, data):
    """manifest.json of a run's folder -> its page."""
    _folder(folder, manifest=text_of(data, [MANIFEST]))


def metrics(folder, data):
    """metrics.csv of a run's folder -> its page."""
    _folder(folder, metrics=data)


def results(folder, data):
    """results.json of an experiment, or a collection of a paper's experiments -> its page."""
    from experiments.harness import report

    (folder / "r.json").write_bytes(text_of(data, RESULTS))
    _page([report.read_source(folder / "r.json")], report)


def adult(folder, data):
    """adult.data and adult.test -> rows."""
    import numpy as np

    from jfl.data import datasets

    (folder / "adult").mkdir(exist_ok=True)
    for name in ("adult.data", "adult.test"):
        (folder / "adult" / name).write_bytes(data)
    found = datasets.adult(data_dir=folder)
    assert np.isfinite(found.x).all() and set(found.y) <= {0, 1}


def journal(folder, data):
    """journal.json of a run's folder."""
    from jfl.runs.checkpoint import Journal

    (folder / "journal.json").write_bytes(text_of(data, [JOURNAL]))
    found = Journal(folder).read()
    assert found is None or isinstance(found, dict)


def points(folder, data):
    """points.jsonl of a sweep's folder; a mutation has the digests of what it says."""
    from jfl.core.files import digest_of
    from jfl.runs.sweep import points_store

    lines = text_of(data, [POINTS])
    if len(data) > 1 and data[0] % 2:
        tree = json.loads(lines)
        made = (
            [r | dict(digest=digest_of(r)) if isinstance(r, dict) else r for r in tree]
            if isinstance(tree, list)
            else [tree]
        )
        lines = "".join(json.dumps(r) + "\n" for r in made).encode()
    (folder / "points.jsonl").write_bytes(lines)
    store = points_store(folder)
    assert all(key == r["key"] for key, r in store.records.items())


def arrays(folder, data):
    """Arrays of any type and shape -> a Dataset of finite numbers."""
    import numpy as np

    from jfl.data import datasets

    kinds = ("f4", "f8", "f2", "i4", "i8", "u1", "u8", "b1", "c8", "S3", "U2", "O", "M8[s]")
    if len(data) < 8:
        return
    made = []
    for i in range(4):
        kind, shape = (
            np.dtype(kinds[data[2 * i] % len(kinds)]),
            [data[2 * i + 1] % 4, data[2 * i + 1] // 4 % 3][: 1 + data[2 * i + 1] // 64 % 2],
        )
        count = math.prod(shape)
        body = (
            (data[8 + i :] * (count * 8 + 8))[: count * max(kind.itemsize, 1)]
            if len(data) > 8 + i
            else bytes(count * kind.itemsize)
        )
        try:
            made.append(
                np.full(shape, None) if kind == "O" else np.frombuffer(body, kind).reshape(shape)
            )
        except ValueError:
            made.append(np.zeros(shape))
    classes = (None, 0, 2, 3)[data[0] // 64]
    found = datasets.arrays(*made, classes=classes)
    assert np.isfinite(found.x).all() and np.isfinite(found.y).all()


TARGETS = dict(
    config=config,
    summary=summary,
    manifest=manifest,
    metrics=metrics,
    results=results,
    adult=adult,
    journal=journal,
    points=points,
    arrays=arrays,
)


def seeds(name) -> list:
    """Inputs that are read without an error, and some that are half of one."""
    trees = dict(
        summary=[SUMMARY], manifest=[MANIFEST], results=RESULTS, journal=[JOURNAL], points=[POINTS]
    ).get(name)
    if trees is not None:
        return [b"\0" + json.dumps(t).encode() for t in trees] + [
            bytes([1, i, 9 * i, 5, 3]) for i in range(len(trees))
        ]
    return dict(
        config=[TOML.encode(), b"a = 1", b"[sweep]\nlr = [1]"],
        metrics=[METRICS.encode()],
        adult=[f"{PERSON}\n|comment\n{PERSON.replace('<=50K', '>50K.')}\n".encode()],
        arrays=[
            bytes([0, 2, 3, 2, 0, 2, 3, 2]) + bytes(40),
            bytes([64, 70, 0, 2, 64, 70, 0, 2]) + bytes(range(40)),
        ],
    )[name]


# --- the fuzz


def fuzz(name, seconds):
    import atheris

    with atheris.instrument_imports(include=["jfl", "tomllib", "csv", "json"]):
        import jfl.cli.main  # noqa: F401
    warnings.simplefilter("ignore")
    seen = set()
    with tempfile.TemporaryDirectory() as made:
        folder, corpus = Path(made) / "run", Path(made) / "corpus"
        folder.mkdir(), corpus.mkdir()
        for i, seed in enumerate(seeds(name)):
            (corpus / str(i)).write_bytes(seed)

        def one(data):
            try:
                TARGETS[name](folder, data)
            except Exception as error:
                place = [
                    (f.filename.rsplit("/", 1)[-1], f.lineno)
                    for f in traceback.extract_tb(error.__traceback__)
                    if "fuzz_readers" not in f.filename
                ]
                own = [p for p in place if p[0].endswith(".py")][-4:]
                key = type(error), own[-1] if own else None
                if not legal(error) and key not in seen:
                    seen.add(key)
                    words = [type(error).__name__, str(error)[:200], own, repr(data[:2000])]
                    print(f"FINDING {name} {json.dumps(words)}", flush=True)

        atheris.Setup(
            [
                sys.argv[0],
                str(corpus),
                f"-max_total_time={seconds}",
                "-max_len=4096",
                "-timeout=30",
                "-rss_limit_mb=6000",
                "-print_final_stats=1",
                "-verbosity=0",
            ],
            one,
        )
        atheris.Fuzz()


def main():
    seconds, names = int(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    table = csv.writer(sys.stdout)
    table.writerow(("target", "executions", "seconds", "findings"))
    for name in names:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, str(seconds)], capture_output=True, text=True
        )
        count = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        found = [line for line in done.stdout.splitlines() if line.startswith("FINDING")]
        hung = re.findall(r"ERROR: libFuzzer: .*", done.stderr)
        table.writerow((name, count[1] if count else "none", seconds, len(found) + len(hung)))
        print(
            "\n".join(found + hung + ([] if count or hung else [done.stderr[-2000:]])), flush=True
        )


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        fuzz(sys.argv[2], int(sys.argv[3]))
    else:
        main()
