"""`jfl audit`: what it audits, what audit.json and the page say of it, and its exit codes."""

import contextlib
import dataclasses
import json
import shutil
import threading
import types
from typing import ClassVar

import pytest
from helpers import pretended
from helpers.report_pages import Tables, strict_json

from experiments.papers import as_printed
from jfl.auditing import trials
from jfl.auditing.audit import AuditReport
from jfl.cli import audit as command
from jfl.cli import main
from jfl.core.files import digest_of
from jfl.core.records import Guarantee
from jfl.privacy import guarantees
from jfl.runs import (
    build,
    checkpoint,
    config,
    directory,
    guarantee_rows,
    pictures,
    record,
    train,
)

pytestmark = pytest.mark.usefixtures("own_cache")
RUN = dict(clients=6, min_rows=8, model="logistic", noise_multiplier=1.0, rounds=3)
FULL = dict(sampler="full", batch_sampler="full", steps=1)  # noise with a closed form
FEW = ["--trials", 400, "--rounds", 1]


def flags(**values) -> list:
    return [w for k, v in values.items() for w in (f"--{k.replace('_', '-')}", v)]


def jfl(*args) -> int:
    return main.main([str(a) for a in args])


def kept(out) -> list[dict]:
    found = strict_json(out / "audit.json")
    assert set(found) == {"format", "audits"} and found["format"] == record.FORMAT
    return found["audits"]


def rows_of_page(out, capsys) -> list[dict]:
    """The table of audits of a page."""
    assert jfl("report", out) == 0
    capsys.readouterr()
    head, *rows = Tables((out / "report.html").read_text()).tables["Audits: what attacks measured"]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The directory of a run, whose numbers are made up."""
    out = tmp_path_factory.mktemp("audits") / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "simulate", pretended.simulate)
        patched.setattr(pictures, "draw_accuracy", lambda path, *_: path.write_bytes(b"\x89PNG"))
        assert jfl("train", *flags(**RUN, **FULL), "--out", out) == 0
    return out


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("audit.json"))


class Asked(list):
    """The calls, and what their reports say instead."""

    report: ClassVar[dict] = {}


@pytest.fixture
def asked(monkeypatch):
    """What the audit is asked for; nothing runs."""
    calls = Asked()

    def pretend(plan, rounds, trials, delta, *, progress, **more):
        progress(trials, 2 * trials)
        calls.append(types.SimpleNamespace(plan=plan, rounds=rounds, delta=delta, **more))
        usual = dict(unit="example", view="server", adjacency="replace_one")
        told = {name: more[name] or value for name, value in usual.items()}
        told |= dict(confidence=more["confidence"], claimed=more["claimed"])
        told |= dict(estimator="made up", canary="a row", adversary="all")
        told |= dict(proved=None, refuted=False, contradicted=False, mu=float("inf"))
        return AuditReport(epsilon=0.5, delta=delta, trials=trials, **told | calls.report)

    monkeypatch.setattr(command, "run_audit", pretend)
    return calls


# --- real audits


@pytest.mark.slow
def test_of_a_run_directory(copied, capsys):
    """The report, audit.json and the row of the page say the same; then a claim is refuted."""
    before = {p: p.read_bytes() for p in copied.iterdir() if p.is_file()}
    assert jfl("audit", copied, *FEW) == 0
    shown = capsys.readouterr()
    # A progress bar is for terminals.
    assert shown.err == "jfl audit: 400 runs with the canary, as many without\n"
    # a bar that is not ended would draw for ever
    assert not [t for t in threading.enumerate() if type(t).__module__.startswith("rich")]
    (one,) = kept(copied)
    reported = set(AuditReport._fields) - set(command.ONE_RUN)
    assert reported | set(command.SETTINGS) | {"manifest", "method"} <= set(one)
    assert not set(command.ONE_RUN) & set(one)
    (of_run,) = json.loads((copied / "summary.json").read_text())["runs"]
    assert one["config"] == {k: of_run["config"][k] for k in config.FIELDS}
    assert (one["rounds"], one["trials"], one["delta"], one["seed"]) == (1, 400, 1e-2, 0)
    assert one["status"] == "audited"
    assert {"jfl", "source", "jax"} <= set(one["manifest"]["versions"])
    plan, _ = build.build(config.Config(**RUN, **FULL))
    proved = guarantees.guarantee(plan, 1, 1e-2, "example", "server").epsilon
    assert one["proved"]["epsilon"] == proved and 0.2 < one["epsilon"] < proved
    assert shown.out.startswith(f"audited {one['epsilon']:.4g} <= proved {proved:.4g}")
    assert "private" not in (shown.out + (copied / "audit.json").read_text()).lower()
    assert {p: p.read_bytes() for p in before} == before

    assert jfl("audit", copied, *FEW, "--claimed", 0.1) == 1
    printed = capsys.readouterr()
    assert "claimed 0.1: REFUTED" in printed.out and "at most 0.1, which is claimed" in printed.err
    first, second = kept(copied)
    assert first == one and second["refuted"] and not second["contradicted"]
    assert (second["claimed"], second["epsilon"]) == (0.1, one["epsilon"])

    rows = rows_of_page(copied, capsys)
    assert [row["verdict"] for row in rows] == ["nothing is refuted", "the claim is refuted"]
    assert [row["claimed ε"] for row in rows] == ["", "0.1"]
    for row in rows:
        assert row["audited ε"] == f"{one['epsilon']:.4g}" and row["proved ε"] == f"{proved:.4g}"
        assert (row["δ"], row["confidence"], row["trials"]) == ("0.01", "0.95", "400")
        assert (row["rounds"], row["status"], row["canary"]) == ("1", "audited", one["canary"])
    assert "the claim is refuted" in (copied / "report.html").read_text()


def test_above_what_is_proved_exits_1(asked, copied, capsys):
    small = Guarantee(0.1, 1e-2, "example", "replace_one", "server", "too good")
    asked.report = dict(proved=small, contradicted=True)
    assert jfl("audit", copied) == 1
    shown = capsys.readouterr()
    assert "> proved 0.1 (too good)" in shown.out and "CONTRADICTED" in shown.out
    # An older rich prints an empty line after its progress bar.
    first, last = filter(None, shown.err.splitlines())
    assert first == "jfl audit: 100,000 runs with the canary, as many without"
    assert "expected an audited epsilon of at most 0.1" in last
    assert kept(copied)[0]["contradicted"]
    (row,) = rows_of_page(copied, capsys)
    assert row["verdict"] == "the proof is contradicted: a bug"


# --- what is audited


def test_a_config_is_built_as_train_builds_it(asked, tmp_path):
    """Calibrated at the config's delta and rounds; the audit has its own."""
    values = RUN | FULL | dict(noise_multiplier=None, epsilon=4.0, delta=1e-6, seed=3)
    values |= dict(unit="client", view="third_party")
    file, out = tmp_path / "run.toml", tmp_path / "out"
    file.write_text(config.dump(values))
    _, wanted = build.build(config.Config(**values))
    assert jfl("audit", "--config", file, "--rounds", 2, "--seed", 7, "--out", out) == 0
    assert jfl("audit", "--config", file, "--out", out, "--delta", 0.02, "--mesh", "auto") == 0
    of = [(a.rounds, a.delta, a.seed, a.mesh) for a in asked]
    assert of == [(2, 1e-2, 7, None), (3, 0.02, 0, "auto")]
    assert {(a.unit, a.view) for a in asked} == {("client", "third_party")}
    for audit in kept(out):
        assert audit["config"] == record.as_json(dataclasses.asdict(wanted))
    for call in asked:
        (levels,) = guarantee_rows.noise_levels(call.plan, 3)
        assert levels == [pytest.approx(wanted.noise_multiplier)] * 2


def test_flags_alone_describe_the_run_too(asked, tmp_path):
    given = flags(**RUN | FULL | dict(rounds=2), unit="client")
    assert jfl("audit", *given, "--delta", 0.05, "--out", tmp_path) == 0
    (one,), (call,) = kept(tmp_path), asked
    assert (one["config"]["unit"], one["config"]["rounds"]) == ("client", 2)
    assert one["config"]["delta"] == config.Config().delta and one["delta"] == 0.05
    assert (call.unit, call.view, call.rounds) == ("client", "third_party", 2)


def test_another_unit_leaves_the_run_as_it_is(asked, copied):
    assert jfl("audit", copied, "--unit", "client", "--trials", 400) == 0
    assert (asked[0].unit, asked[0].view, asked[0].rounds) == ("client", None, 3)
    assert kept(copied)[0]["config"]["unit"] is None


@pytest.mark.slow
def test_the_paper_that_the_config_names(asked, tmp_path):
    values = RUN | dict(mode="as_printed", paper="chen2024", batch=4, batch_sampler=None)
    values = {k: v for k, v in values.items() if v is not None}
    assert jfl("audit", *flags(**values), "--out", tmp_path) == 0
    wanted = as_printed.claimed(asked[0].plan, 3, 1e-2, "chen2024")
    assert asked[0].claimed == wanted.epsilon > 0
    assert jfl("audit", *flags(**values), "--claimed", 0.3, "--out", tmp_path) == 0
    assert asked[1].claimed == 0.3


def test_a_refuted_claim_ends_with_exit_code_1(asked, tmp_path, capsys):
    """Also if it is the claim of the run's paper."""
    asked.report = dict(refuted=True)
    values = RUN | dict(mode="as_printed", paper="chen2024", batch=4, batch_sampler=None)
    values = {k: v for k, v in values.items() if v is not None}
    assert jfl("audit", *flags(**values), "--out", tmp_path) == 1
    assert f"at most {asked[0].claimed:.9g}, which is claimed" in capsys.readouterr().err
    assert kept(tmp_path)


# --- audit.json


def test_audits_of_other_settings_are_kept_and_the_newest_is_last(asked, copied):
    for seed in (1, 2, 1):
        assert jfl("audit", copied, "--seed", seed) == 0
    assert [audit["seed"] for audit in kept(copied)] == [2, 1]
    assert kept(copied)[0]["mu"] is None  # infinite
    assert jfl("audit", copied, "--seed", 1, "--trials", 500) == 0
    of = [(a["seed"], a["trials"]) for a in kept(copied)]
    assert of == [(2, 100_000), (1, 100_000), (1, 500)]


def test_no_other_run_gets_the_audit(asked, copied, tmp_path, capsys):
    assert jfl("audit", copied, "--lr", 0.9) == 2
    assert "of a run with other lr" in capsys.readouterr().err
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "config.toml").write_text("[sweep]\nlr = [0.1, 0.3]\n")
    assert jfl("audit", *flags(**RUN), "--out", tmp_path / "sweep") == 2
    assert "a sweep" in capsys.readouterr().err
    (tmp_path / "demo").mkdir()
    shutil.copy(copied / "summary.json", tmp_path / "demo")
    assert jfl("audit", *flags(**RUN), "--out", tmp_path / "demo") == 2
    assert not asked and not list(tmp_path.rglob("audit.json"))
    assert jfl("audit", copied, "--lr", 0.9, "--out", tmp_path / "other") == 0
    assert kept(tmp_path / "other")[0]["config"]["lr"] == 0.9
    assert not (copied / "audit.json").exists()


def test_other_data_than_those_of_the_run_are_refused(asked, copied, tmp_path, capsys):
    """Its report would stand beside an epsilon of other rows."""
    journal = checkpoint.Journal(copied).read() | dict(data="0123")
    (copied / "journal.json").write_text(json.dumps(journal | dict(digest=digest_of(journal))))
    assert jfl("audit", copied) == 2 and not asked
    assert "with checksum 0123" in capsys.readouterr().err
    assert jfl("audit", copied, "--out", tmp_path / "other") == 0


@pytest.mark.parametrize("text", ["{", '{"format": 1, "audits": [{"epsilon": 1}]}'])
def test_a_damaged_file_is_refused_before_anything_runs(text, asked, copied, capsys):
    (copied / "audit.json").write_text(text)
    assert jfl("audit", copied) == 2 and jfl("report", copied) == 2
    assert capsys.readouterr().err.count("audit.json") == 2
    assert not asked and (copied / "audit.json").read_text() == text


def test_a_directory_in_use_is_refused(asked, copied, capsys):
    with directory.locked(copied):
        assert jfl("audit", copied) == 2
    assert "no other process" in capsys.readouterr().err and not asked


# --- what is refused


@pytest.mark.parametrize(
    "more, words",
    [
        (["--trials", 333], "trials >= 334"),
        (["--delta", 0], "delta in (0, 1)"),
        (["--confidence", 2], "confidence in (0, 1)"),
        (["--claimed", 50], "which show at most"),
        (["--rounds", 0], "rounds >= 1"),
        (["--unit", "planet"], "unit"),
        (["--view", "nobody"], "view"),
        (["--mesh", "many"], "--mesh: expected a number, or auto"),
        (["--out", ""], "a value for --out"),
        (["nowhere"], "the directory of a run"),
        (["--config", "sweep.toml"], "the config of one run"),
        (["--config", "quiet.toml"], "noise protects"),
        (["--config", "unused.toml"], "for bands"),
    ],
)
def test_bad_words_exit_2_and_write_nothing(more, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    quiet = {k: v for k, v in RUN.items() if k != "noise_multiplier"}
    swept, unused = RUN | dict(sweep=dict(lr=[0.1, 0.3])), RUN | FULL | dict(bands="flat")
    for name, fields in dict(sweep=swept, quiet=quiet, unused=unused).items():
        (tmp_path / f"{name}.toml").write_text(config.dump(fields))
    before = set(tmp_path.iterdir())
    given = [] if more[0] in ("nowhere", "--config") else flags(**RUN | FULL)
    assert jfl("audit", *given, *more) == 2
    assert words in capsys.readouterr().err and set(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_canaries_of_a_training(copied, capsys):
    """Kept beside the audit with the worst case; what cannot be seen is refused."""
    few = [*FEW, "--canary", "mislabelled", "--sees", "final model"]
    assert jfl("audit", copied, *FEW) == jfl("audit", copied, *few) == 0
    worst, other = kept(copied)
    assert "wrong label" in other["canary"] and "wrong label" not in worst["canary"]
    assert other["adversary"].startswith("the model after 1 rounds") and other["epsilon"] < 1
    assert "wrong label" in capsys.readouterr().out
    assert jfl("audit", copied, *FEW, "--sees", "models") == 2
    assert 'sees="releases"' in capsys.readouterr().err
    assert jfl("audit", copied, *FEW, "--canary", "wrong") == 2


@pytest.mark.slow
def test_an_audit_that_was_stopped_goes_on(copied, capsys, monkeypatch):
    """The same audit.json as of one that was not; the bar goes on where it stopped."""
    straight = shutil.copytree(copied, copied.with_name("straight"))
    assert jfl("audit", straight, *FEW) == 0 and not (straight / command.TRIALS).exists()
    monkeypatch.setattr(trials, "MAX_BLOCK", 150)
    done = []

    class Bar(contextlib.nullcontext):
        def add_task(self, *_, **__):
            return 0

        def update(self, task, completed, total, note):
            done.append(completed)
            if len(done) == stop:
                raise RuntimeError("stopped")

    monkeypatch.setattr(command.console, "progress", lambda shown: Bar(Bar()))
    stop = 2
    with pytest.raises(RuntimeError, match="stopped"):
        jfl("audit", copied, *FEW)
    assert (copied / command.TRIALS).exists() and not (copied / "audit.json").exists()
    assert jfl("audit", copied, "--trials", 500, "--rounds", 1) == 2
    assert "trials: 400 there, 500 here" in capsys.readouterr().err
    stop = None
    assert jfl("audit", copied, *FEW) == 0
    assert done[2] == done[1] == 268 and done[-1] == 800  # of the stopped audit, and of both
    assert not (copied / command.TRIALS).exists()
    apart = lambda one: {k: v for k, v in one.items() if k != "manifest"}
    assert [*map(apart, kept(copied))] == [*map(apart, kept(straight))]
