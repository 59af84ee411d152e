"""Everything that reads a file, and seeds of what it reads: what test_fuzz.py mutates.

A target reads what bytes say.  What comes back is a value or a ValueError of the house form.
"""

import copy
import hashlib
import json
import re

FORM = re.compile(r"[^:].*?: expected .*, but got ", re.S)  # where, what was needed, what came
GUARANTEE = dict(unit="example", adjacency="add_remove", view="server", delta=1e-5, epsilon=2.0)
GUARANTEE |= dict(method="pld", status="proved", caveats=["float32 noise"])
ENTRY = dict(name="fedavg", algorithm="fedavg", dataset="digits", rounds=2, seed=0, loss=1.0)
ENTRY |= dict(accuracy=dict(final=0.5, best=0.5), privacy=[GUARANTEE], config=dict(lr=0.1))
ENTRY |= dict(seconds=dict(compile=0.1, total=1.0, per_round=0.1))
SUMMARY = dict(format=1, runs=[ENTRY])
MANIFEST = dict(versions=dict(jax="0.10"), data=dict(clients=3, rows=9), seeds=[0], kernels={})
MANIFEST |= dict(noise=[[1.0, 1.0]])
METRICS = "name,seed,round,accuracy,loss,epsilon\nfedavg,0,1,0.5,1.0,1.0\nfedavg,0,2,0.5,,2.0\n"
LINE = dict(accuracy=[0.5, 0.6], loss=dict(mean=1.0, half=0.1), seeds=[0, 1], failed=1, paper=0.9)
LINE |= dict(epsilon_proved=2.0, epsilon_claimed=1.0, seconds_per_round=0.1)
LINE |= dict(columns=dict(k=3, curve=[2.0, 1.0], gain=dict(mean=0.5)))
POINT = dict(panel="a", line="b", x=1.0, mean=0.5, half=0.1, epsilon=1.0, config=dict(lr=0.1))
VERDICT = dict(claim="it is so", verdict="confirmed", seen="s")
EXPERIMENT = dict(format=2, experiment="fig1", module="m", title="t", quick=True, only=["a"])
EXPERIMENT |= dict(seeds=[0, 1], seconds=1.0, lines=dict(a=LINE), failed=dict(b="NaN"), notes=["n"])
EXPERIMENT |= dict(unread=dict(svhn="not here"), verdicts=[VERDICT], settings=dict(x=dict(a=1)))
EXPERIMENT |= dict(tables=[dict(caption="c", columns=["a"], rows=[[1]])], versions=dict(jax="1"))
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
JOURNAL = dict(format=5, until=3, since=0, program=dict(jax="1"), config=dict(lr=0.1), data="abc")
WRITTEN = json.dumps(JOURNAL, sort_keys=True).encode()
JOURNAL["digest"] = hashlib.sha256(WRITTEN).hexdigest()  # one that is read
RECORD = dict(key="a", worker="local", device="cpu", seconds=0.5, compile=0.1)
POINTS = [
    dict(config={}, axes=dict(lr=[0.1]), code={}, plan={}, programs=[[["a"]]]),
    RECORD | dict(health=dict(nonfinite=0), history=dict(loss=[0.5])),
]
ODD = [None, True, 0, -1, 2**31, 2**64, 10**400, 0.5, -0.5, 1e308, 1e-300, "", "é∞\n\0|$", "1"]
ODD += [[], {}, [[]], [None], {"": None}, [0, 1], ["a", None], "nan", "../x"]


def legal(error: BaseException) -> bool:
    return isinstance(error, ValueError) and FORM.match(str(error)) is not None


# --- seeds, and what bytes stand for


def places(value, at=()):
    """Yield the way to every node of a tree of JSON."""
    yield at
    keys = value if isinstance(value, dict) else ()
    for key in range(len(value)) if isinstance(value, list) else keys:
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
    """Return the bytes themselves, or after a first byte that is odd a mutation of one of
    `seeds`."""
    if len(data) < 2 or data[0] % 2 == 0:
        return data[1:]
    tree = mutated(seeds[data[1] % len(seeds)], data[2:])
    return json.dumps(tree).encode("utf-8", "surrogatepass")


# --- targets: (folder, bytes) -> anything; each reads what the bytes say


def config(folder, data):
    """Read a TOML file as the fields of a Config, which go through a file again."""
    from jfl.runs import config as configs

    (folder / "c.toml").write_bytes(data)
    values = configs.load(folder / "c.toml")
    (folder / "d.toml").write_text(configs.dump(values), encoding="utf-8")
    again = configs.load(folder / "d.toml")
    # nan is not itself
    texts = [{k: repr(v) for k, v in found.items()} for found in (values, again)]
    assert texts[0] == texts[1], (values, again)
    configs.Config(**{k: v for k, v in values.items() if k != "sweep"})


def _folder(folder, **files):
    """Make the page of a run's folder with these files; the others are whole."""
    from jfl.report import document, read, sections

    whole = dict(summary=json.dumps(SUMMARY).encode(), manifest=json.dumps(MANIFEST).encode())
    for name, content in (whole | dict(metrics=METRICS.encode()) | files).items():
        (folder / (name + (".csv" if name == "metrics" else ".json"))).write_bytes(content)
    kept, sections.run_pictures = sections.run_pictures, lambda of: []  # they take the time
    try:
        found = sections.assemble([read.read(folder)])
        document.page(found), document.markdown(found, "files")
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
    """results.json of an experiment, or a collection of a paper's experiments."""
    from experiments.harness import results

    (folder / "r.json").write_bytes(text_of(data, RESULTS))
    results.read(folder / "r.json")


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
        signed = lambda r: r | dict(digest=digest_of(r)) if isinstance(r, dict) else r
        records = list(map(signed, tree)) if isinstance(tree, list) else [tree]
        lines = "".join(json.dumps(r) + "\n" for r in records).encode()
    (folder / "points.jsonl").write_bytes(lines)
    store = points_store(folder)
    assert all(key == r["key"] for key, r in store.records.items())


TARGETS = dict(config=config, summary=summary, manifest=manifest, metrics=metrics)
TARGETS |= dict(results=results, journal=journal, points=points)


def seeds(name) -> list:
    """Return inputs that are read without an error, and some that are half of one."""
    if name == "config":
        return [TOML.encode(), b"a = 1", b"[sweep]\nlr = [1]"]
    if name == "metrics":
        return [METRICS.encode()]
    trees = dict(summary=[SUMMARY], manifest=[MANIFEST], results=RESULTS)
    trees = (trees | dict(journal=[JOURNAL], points=[POINTS]))[name]
    whole = [b"\0" + json.dumps(t).encode() for t in trees]
    return whole + [bytes([1, i, 9 * i, 5, 3]) for i in range(len(trees))]
