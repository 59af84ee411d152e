"""Records of runs: what a store keeps through kills, what it refuses, and what a record says."""

import json

import numpy as np
import pytest

from jfl.core import files
from jfl.core.errors import ArgumentError
from jfl.core.files import ResultStore
from jfl.core.records import Health
from jfl.runs import directory, pictures, record
from jfl.runs.config import Config
from jfl.runs.record import RunRecord, Stopwatch

MARKS = {marker for marker, _ in pictures.MARKERS}
HISTORY = dict(round=[1, 4], accuracy=[0.5, 0.25], loss=[2.0, 1.0])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs.jsonl"


def test_every_line_has_a_digest_and_one_that_was_edited_is_refused(path):
    ResultStore(path).put([dict(key="a", x=1.5), dict(key="b", x={"2": "ε"})])
    first, second = path.read_text().splitlines()
    assert json.loads(first)["digest"] == files.digest_of(dict(key="a", x=1.5))
    path.write_text(first.replace("1.5", "1.6") + "\n" + second + "\n")
    with pytest.raises(ArgumentError, match="runs.jsonl, line 1: .*another digest"):
        ResultStore(path)
    path.write_text('{"key": "a", "x": 1}\n')
    assert ResultStore(path)["a"] == dict(key="a", x=1)
    with pytest.raises(ArgumentError, match="line 1: .*no digest"):
        ResultStore(path, signed=True)


def test_what_another_process_added_is_kept_and_a_cut_line_is_not(path):
    one, other = ResultStore(path), ResultStore(path)
    one.put([dict(key=1, x="one")])
    with open(path, "a") as file:
        file.write('{"key": 3, "x": "hal')  # a third was killed here
    other.put([dict(key=2, x="other")])
    assert other[1]["x"] == "one" and list(ResultStore(path).records) == [1, 2]
    one.put([dict(key=1, x="later")])
    assert ResultStore(path)[1]["x"] == "later"  # of two records with one key the later counts
    ResultStore(path).put([dict(key="a", x={10: 1, 9: 2})])  # sorted as numbers, then as words
    assert ResultStore(path)["a"]["x"] == {"10": 1, "9": 2}


def test_a_head_is_the_first_line_and_holds_its_fields(path):
    opened = lambda head=("what",): ResultStore(path, head=head, fields=("key", "x"))
    store = opened()
    store.begin(dict(what="a sweep"))
    store.put([dict(key="a", x=1, more=2)])
    for s in (store, opened()):
        assert s.head == dict(what="a sweep") and s.records == {"a": dict(key="a", x=1)}
    with pytest.raises(ArgumentError, match="line 1.*KeyError: 'other'"):
        opened(("other",))


def test_an_entry_has_its_seconds_a_round_without_compilation():
    one = RunRecord("fedavg", dict(algorithm="fedavg", dataset="digits"), 3, HISTORY, 5.0, 1.0)
    entry = one.entry()
    assert entry["seconds"] == dict(compile=1.0, total=5.0, per_round=1.0)
    assert entry["accuracy"] == dict(final=0.25, best=0.5) and entry["rounds"] == 4
    assert [(r["round"], r["epsilon"]) for r in one.rows([0.1, 0.2])] == [(1, 0.1), (4, 0.2)]
    assert "failed" not in entry


def test_counts_that_are_tolerated_do_not_make_a_failed_run():
    counts = {name: i for i, name in enumerate(Health._fields)}
    line = dict(history=HISTORY, seconds=1.0, compile=0.0, health=counts)
    assert RunRecord.of_config(Config(seed=2), line).entry()["failed"] == counts
    quiet = line | dict(health=dict.fromkeys(counts, 0) | dict(empty_cohort=2))
    assert RunRecord.of_config(Config(), quiet).failed
    assert not RunRecord.of_config(Config(allow_empty=True), quiet).failed


def test_a_stopwatch_leaves_out_its_pauses(monkeypatch):
    clock = iter(np.arange(100.0))
    monkeypatch.setattr(record.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(record, "stage_seconds", dict)
    watch = Stopwatch()  # at 0
    with watch.paused():  # from 1 to 2
        pass
    assert watch.read() == (2.0, 0.0)  # at 3


def test_the_source_that_is_recorded_is_all_of_jfl(monkeypatch):
    """What a resumed run compares: also the engine, and not only the room of this module."""
    read, seen = files.Path.read_bytes, []
    monkeypatch.setattr(files.Path, "read_bytes", lambda path: seen.append(path) or read(path))
    files.source.__wrapped__()
    names = {path.as_posix().rsplit("/jfl/", 1)[-1] for path in seen}
    assert {"engine/round.py", "__init__.py", "runs/train.py"} <= names
    assert any(path.name == "philox.py" for path in seen)


def test_a_lock_goes_with_its_block(tmp_path):
    for _ in range(2):
        with directory.locked(tmp_path / "run"):
            assert [p.name for p in (tmp_path / "run").iterdir()] == [directory.LOCK]


def test_a_picture_of_many_settings_is_divided_and_has_its_legend_beside_it(monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "_save", lambda figure, path: figures.append(figure))

    def drawn(*points):
        seen = dict(privacy="ε = 1", promise="", round=[1, 2], accuracy=[[0.2, 0.3]], epsilon=1.0)
        pictures.draw_accuracy(None, [seen | dict(name="", point=p) for p in points], "")
        (legend,) = figures[-1].legends
        looks = {(h.get_color(), h.get_linestyle()) for h in legend.get_lines()}
        assert len(looks) == len(legend.get_texts())  # no two lines look alike
        marks = [m for m in figures[-1].axes[-1].lines if m.get_marker() in MARKS]
        finals = {(m.get_color(), m.get_marker(), m.get_fillstyle()) for m in marks}
        assert len(finals) == len(points)  # nor do two points
        return [ax.get_title() for ax in figures[-1].axes], len(looks)

    titles, lines = drawn(*(dict(z=z, lr=lr) for z in (1, 2, 3) for lr in range(5)))
    assert [t.split(",")[0][2:] for t in titles[:3]] == ["z=1", "z=2", "z=3"] and lines == 5
    titles, lines = drawn(*(dict(lr=lr) for lr in range(32)))
    assert len(titles) == 2 and lines == 32
