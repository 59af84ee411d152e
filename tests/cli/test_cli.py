"""The command line: exit codes, files, flags over files, and nothing written for bad input."""

import csv
import dataclasses
import errno
import json
import os
import re
import runpy
import signal
import sys
import time
import tomllib
import weakref

import numpy as np
import pytest
from helpers import pretended
from helpers.report_pages import strict_json

from jfl.cli import accounting, console, demo, exits, main, options
from jfl.cli import runs as commands
from jfl.core.options import field
from jfl.privacy import guarantees
from jfl.privacy.plain_numbers import epsilon as privacy_epsilon
from jfl.report import document, read
from jfl.runs import (
    build,
    config,
    guarantee_rows,
    load,
    pictures,
    record,
    statistics,
    sweep,
    tables,
    train,
)

TINY = """--clients 6 --min-rows 8 --model logistic --cohort 3 --batch 4 --steps 2 --rounds 4
    --evaluate-every 2""".split()
# Without sampling, whose noise and epsilon have a closed form: where neither is what is tested
EXACT = """--clients 6 --min-rows 8 --model logistic --sampler full --batch-sampler full --steps
    2 --rounds 4 --evaluate-every 2""".split()
QUICK = ["--rate", 0.1, "--rounds", 20]
ENTRY = "name algorithm dataset rounds seed accuracy loss seconds privacy config".split()
GUARANTEE = "unit adjacency view delta epsilon method status caveats codes implied rounds".split()
pytestmark = pytest.mark.usefixtures("own_cache")
PICTURE, BLANK = pictures.draw_accuracy, b"\x89PNG, and nothing on it"


@pytest.fixture(autouse=True)
def blank(monkeypatch):
    """Drawing takes longer than these runs: `trained` and the sweep over flags have pictures."""
    monkeypatch.setattr(pictures, "draw_accuracy", lambda path, *_: path.write_bytes(BLANK))


@pytest.fixture
def no_programs(monkeypatch):
    """Where the numbers that a run computes are not what is tested.  Plans are still traced."""
    monkeypatch.setattr(train, "simulate", pretended.simulate)
    monkeypatch.setattr(sweep, "compute", pretended.compute)


def jfl(*args) -> int:
    """Run a command; a text that begins with a flag may hold several words."""
    several = lambda a: a.split() if isinstance(a, str) and a.startswith("-") else [str(a)]
    return main.main([word for a in args for word in several(a)])


def summary(out):
    found = strict_json(out / "summary.json")
    assert set(found) == {"format", "runs"} and found["format"] == 1
    for run in found["runs"]:
        assert set(run) - {"failed", "point"} == set(ENTRY)
        assert set(run["accuracy"]) == {"final", "best"}
        assert set(run["seconds"]) == {"compile", "total", "per_round"}
        assert run["privacy"] and all(set(g) == set(GUARANTEE) for g in run["privacy"])
    return found["runs"]


def guarantee_of(run, **of):
    (one,) = (g for g in run["privacy"] if of.items() <= g.items())
    return one


def table(out):
    return list(csv.DictReader((out / "metrics.csv").open()))


def stop_at(monkeypatch, module, name, count):
    """Interrupt a function of a module when it is called for the `count`th time."""
    calls, function = [], getattr(module, name)

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == count:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(module, name, stop)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "new" / "run"
    assert jfl("train", *TINY, "--out", out, "--noise-multiplier", 1.5) == 0
    return out


# --- train


def test_train_writes_a_run(trained):
    (run,) = summary(trained)
    told = run["algorithm"], run["dataset"], run["rounds"], run["seed"]
    assert told == ("fedavg", "digits", 4, 0)
    assert {g["view"] for g in run["privacy"]} == {"server", "third_party"}
    assert {g["unit"] for g in run["privacy"]} == {"example"}
    rows = table(trained)
    assert [int(r["round"]) for r in rows] == [2, 4]
    assert float(rows[-1]["accuracy"]) == run["accuracy"]["final"]
    server = guarantee_of(run, view="server")
    assert server["method"] == "pld" and float(rows[-1]["epsilon"]) == server["epsilon"]
    assert 0 < float(rows[0]["epsilon"]) < float(rows[1]["epsilon"])
    manifest = json.loads((trained / "manifest.json").read_text())
    assert {"versions", "kernels", "data", "seeds"} <= set(manifest)
    assert {"jfl", "jax", "jaxlib", "device"} <= set(manifest["versions"])
    assert manifest["data"]["checksum"]
    picture = (trained / "accuracy.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture != BLANK
    assert not [p for p in trained.iterdir() if p.name.startswith(".") and p.name != ".lock"]


def test_its_config_runs_it_again_also_in_parts(trained, tmp_path, capsys, monkeypatch):
    command = ["train", "--config", trained / "config.toml", "--out", tmp_path]
    assert jfl(*command, "--rounds", 2) == 0
    with monkeypatch.context() as patched:  # refused before anything is traced or accounted
        early = lambda *_, **__: pytest.fail("traced or accounted before the refusal")
        patched.setattr(train, "scan", early)
        patched.setattr(train, "epsilons", early)
        for flags, words in (
            ([], "--resume"),
            (["--resume", "--lr", 0.01], "lr: 0.3 there, 0.01 here"),
            (["--resume", "--rounds", 1], ">= 2, the rounds already released"),
            (["--resume", "--epsilon", 3], "noise_multiplier: 1.5 there"),
        ):
            assert jfl(*command, *flags) == 2
            assert words in capsys.readouterr().err
    assert jfl(*command, "--resume") == 0
    assert "resumed at round 2" in capsys.readouterr().err
    assert (tmp_path / "metrics.csv").read_text() == (trained / "metrics.csv").read_text()


def test_without_noise_there_is_no_guarantee(tmp_path, capsys, no_programs):
    assert jfl("train", *TINY, "--out", tmp_path) == 0
    (run,) = summary(tmp_path)
    (guarantee,) = run["privacy"]
    assert guarantee["epsilon"] is None and guarantee["status"] == "no guarantee"
    assert all(r["epsilon"] == "" for r in table(tmp_path))
    shown = capsys.readouterr().out
    assert "none" in shown and "±" not in shown


def test_client_level_calibrates_for_the_view_it_names(tmp_path, capsys, no_programs):
    assert jfl("train", *EXACT, "--unit", "client", "--epsilon", 4, "--out", tmp_path) == 0
    assert "third_party" in capsys.readouterr().err
    (run,) = summary(tmp_path)
    mine = guarantee_of(run, unit="client")
    assert mine["view"] == "third_party" and 3.99 < mine["epsilon"] <= 4
    assert run["config"]["noise_multiplier"] > 0
    assert tomllib.loads((tmp_path / "config.toml").read_text())["epsilon"] == 4.0


@pytest.mark.slow
def test_what_states_an_epsilon_of_fewer_rounds_goes(tmp_path, no_programs):
    """Before a longer run begins: of pages and pictures those that are jfl's own."""
    out = tmp_path / "run"
    command = ["train", *EXACT, "--noise-multiplier", 1, "--out", out]
    assert jfl(*command) == 0 and jfl("report", out) == 0
    assert record.PAGES == {".html": document.HEAD.encode(), ".md": document.MARKDOWN_HEAD.encode()}
    assert jfl("report", out, "--out", out / "index.html") == 0
    names = lambda: {p.name for p in out.iterdir()}
    pages = {"report.html", "report.md", "report_files", "accuracy.png"}
    (out / "report_files" / "mine.png").write_text("mine")
    assert jfl(*command, "--resume") == 0 and pages < names()  # nothing to add: it stands
    assert jfl(*command, "--resume", "--rounds", 6) == 0 and summary(out)[0]["rounds"] == 6
    assert names() & pages == {"accuracy.png", "report_files"} and not list(out.glob("index*"))
    assert [p.name for p in (out / "report_files").iterdir()] == ["mine.png"]
    (out / "report.md").write_text("my notes")
    (out / "linked.md").write_bytes(record.PAGES[".md"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "picture-1.png").write_text("mine")
    (out / "linked_files").symlink_to(tmp_path / "elsewhere")
    record.void(out)
    assert (out / "report.md").read_text() == "my notes" and not (out / "summary.json").exists()
    assert (tmp_path / "elsewhere" / "picture-1.png").exists() and not (out / "linked.md").exists()


@pytest.mark.slow
def test_an_empty_poisson_cohort_stops_unless_allowed(tmp_path, capsys):
    command = ["train", *TINY, "--cohort", 1, "--sampler", "poisson", "--rounds", 8]
    assert jfl(*command, "--out", tmp_path / "stopped") == 3
    assert "empty_cohort" in capsys.readouterr().err
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert jfl(*command, "--allow-empty", "--out", tmp_path / "run") == 0
    assert min(float(r["cohort"]) for r in table(tmp_path / "run")) < 1


@pytest.mark.filterwarnings("ignore:simulate. the run diverged")
def test_a_run_that_diverges_stops_with_3_and_keeps_its_checkpoint(tmp_path, capsys):
    command = ["train", *TINY, "--lr", 100, "--l2", 1, "--evaluate-every", 1, "--out", tmp_path]
    assert jfl(*command, "--rounds", 40) == 3
    message = capsys.readouterr().err
    assert "nonfinite" in message
    kept = int(message.split("Last good checkpoint: round ")[1].split()[0])
    assert kept == max(int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*"))
    # the round that diverged was released too, so a shorter run would leave it out of epsilon
    assert jfl(*command, "--rounds", kept, "--resume") == 2
    assert "rounds already released" in capsys.readouterr().err


# --- one epsilon, one meaning of ±

# pld proves less than rdp
SAMPLED = "--unit client --sampler poisson --noise-multiplier 2 --allow-empty".split()


def test_a_run_has_one_epsilon(tmp_path, monkeypatch, capsys, no_programs):
    """In the bar, in metrics.csv, in the table, in summary.json and in the rows of a data frame, to
    the digit."""
    seen, train = [], commands.runs.train

    def watched(config, out, resume, watch, *rest):
        both = lambda **what: (seen.append(what["epsilon"]), watch(**what))
        return train(config, out, resume, both, *rest)

    monkeypatch.setattr(commands.runs, "train", watched)
    assert jfl("train", *TINY, *SAMPLED, "--evaluate-every", 1, "--out", tmp_path) == 0
    shown, told = capsys.readouterr()
    assert "warning" not in told  # of noise: it is not so large
    mine = guarantee_of(summary(tmp_path)[0], unit="client")
    rows = [float(r["epsilon"]) for r in table(tmp_path)]
    assert seen == rows and rows[-1] == mine["epsilon"] and mine["method"].startswith("pld")
    assert rows == sorted(rows) and f"{mine['epsilon']:.4g}" in shown
    # the rows between are proved as tightly as the last one
    plan, found = build.build(config.Config(**config.load(tmp_path / "config.toml")))
    of = found.delta, "client", "third_party"
    assert rows[1::2] == [guarantees.guarantee(plan, r, *of).epsilon for r in (2, 4)]
    assert rows[-1] < 0.999 * guarantees.epsilons(plan, [4], *of)[0]


def test_a_sweep_has_one_epsilon_a_setting(tmp_path, no_programs):
    command = ["sweep", *TINY, *SAMPLED, "--sweep", "noise_multiplier=2,4", "--out", tmp_path]
    assert jfl(*command) == 0
    worth = {r["name"]: guarantee_of(r, unit="client")["epsilon"] for r in summary(tmp_path)}
    last = {r["name"]: float(r["epsilon"]) for r in table(tmp_path) if r["round"] == "4"}
    assert last == worth and len(set(worth.values())) == 2
    words = "points with the same seed share samples"
    for g in (g for run in summary(tmp_path) for g in run["privacy"]):
        assert any(words in c for c in g["caveats"])


@pytest.mark.slow
def test_epsilons_of_many_evaluations_never_fall_and_end_in_the_guarantee():
    fields = dict(clients=6, min_rows=8, model="logistic", sampler="poisson", cohort=3)
    plan, _ = build.build(config.Config(**fields, unit="client", noise_multiplier=4.0))
    after, of = np.arange(1, 301), (1e-5, "client", "third_party")
    found = guarantee_rows.epsilons(plan, after, *of)
    quick = guarantees.epsilons(plan, after, *of)
    assert found[-1] == guarantees.guarantee(plan, 300, *of).epsilon < quick[-1]
    assert (np.diff(found) >= 0).all()
    assert (found <= quick[np.minimum(np.arange(300) + 16, 299)]).all()
    assert len(set(found)) >= 28 and found[0] < 0.2 * found[-1]
    assert guarantee_rows.epsilons(plan, [3, 5], *of, last=0.5).tolist()[-1] == 0.5
    none = guarantee_rows.epsilons(plan, after[:3], *of, most=0)
    assert none.tolist() == quick[:3].tolist()


def test_a_terminal_sees_how_much_is_left(tmp_path, monkeypatch, capsys, no_programs):
    """And nothing else does: what a file or a pipe gets has neither that nor colours."""
    swept = ["sweep", *TINY, "--sweep", "lr=0.1,0.2,0.4", "--block", 1]
    go = lambda out, *more: jfl(*swept, "--out", tmp_path / out, *more)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert go("file") == 0
    plain = capsys.readouterr().err
    assert "3/3" in plain and "left" not in plain and "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "160")
    assert go("terminal") == 0
    live = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search("3/3 0:\\d\\d:\\d\\d points, left 0:00:00 .*accuracy 0", live)
    assert go("quiet", "--no-progress") == 0
    assert "3/3" not in capsys.readouterr().err


# --- noise without a signal


@pytest.mark.by_default("flags0")
@pytest.mark.parametrize(
    "flags", [["--epsilon", 1e-12], ["--noise-multiplier", 1e7, "--unit", "client"]]
)
def test_a_run_on_noise_warns_once(tmp_path, capsys, flags, no_programs):
    assert jfl("train", *EXACT, *flags, "--out", tmp_path / "run") in (0, 3)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "trains on noise" in said


@pytest.mark.slow
def test_a_sweep_and_the_accountant_warn_of_noise(tmp_path, capsys, no_programs):
    swept = ["sweep", *TINY, "--sweep noise_multiplier=1,1e7,1e8", "--out", tmp_path / "run"]
    (tmp_path / "c.toml").write_text("epsilon = 1e-12\nclients = 6\nmodel = 'logistic'\n")
    for command, words in (
        (swept, "2 of 3 settings, the first noise_multiplier=10000000.0: this trains on noise"),
        (["epsilon", *QUICK, "--noise-multiplier", 1e30], "epsilon 0 at delta 1e-05"),
        (["calibrate", *QUICK, "--epsilon", 1e-12], "trains on noise"),
        (["epsilon", "--config", tmp_path / "c.toml"], "trains on noise"),
    ):
        assert jfl(*command) == 0
        said = capsys.readouterr().err
        assert said.count("warning: ") == 1 and words in said


@pytest.mark.parametrize(
    "epsilon, delta, num_units, warns",
    [
        (1e-4, 1e-5, 1438, "hides even 1e+04 rows together"),
        (1.0, 1e-5, 1438, ""),
        (0.0, 1e-5, 60_000, "at delta 1.65e-06 hides even 6.1e+04 rows"),
        (25.0, 1e-5, 1438, "protects almost nothing"),
    ],
)
def test_too_few_rows_for_an_epsilon_are_noise(epsilon, delta, num_units, warns):
    text = guarantee_rows.noise_warning(lambda _: epsilon, delta, "example", num_units)
    assert warns in text and bool(text) == bool(warns)


# --- interrupted


@pytest.mark.by_default("2-rounds up to 2")
@pytest.mark.parametrize("at, kept", [(2, "rounds up to 2"), (1, "rounds up to 0")])
def test_an_interrupted_run_says_how_it_goes_on(trained, tmp_path, capsys, monkeypatch, at, kept):
    command = ["train", "--config", trained / "config.toml", "--out", tmp_path / "the run"]
    with monkeypatch.context() as patch:
        stop_at(patch, build, "build", 1)
        assert jfl(*command) == 130
    assert "nothing is kept" in capsys.readouterr().err and not list(tmp_path.iterdir())
    stop_at(monkeypatch, train, "simulate", at)
    assert jfl(*command) == 130
    said = capsys.readouterr().err
    assert "interrupted. Kept in" in said and kept in said and "Traceback" not in said
    assert not (tmp_path / "the run" / "summary.json").exists()
    assert jfl(*command, "--resume") == 0 and table(tmp_path / "the run") == table(trained)


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path, capsys, monkeypatch, no_programs):
    handler, simulate, done = signal.getsignal(signal.SIGTERM), train.simulate, []

    def terminated_after_one(*args, **options):
        if done:
            assert callable(signal.getsignal(signal.SIGTERM))  # else it would end pytest
            signal.raise_signal(signal.SIGTERM)
        done.append(1)
        return simulate(*args, **options)

    monkeypatch.setattr(train, "simulate", terminated_after_one)
    assert jfl("train", *TINY, "--out", tmp_path) == 143
    words = f"terminated. Kept in {tmp_path}: rounds up to 2. Continue with the same command"
    assert words in capsys.readouterr().err and done == [1]
    assert signal.getsignal(signal.SIGTERM) == handler


def test_sigterm_in_a_callback_of_a_weak_reference_ends_a_command(capsys):
    """Python ignores the first exception."""
    hook, waited = sys.unraisablehook, []

    def work():
        thing = type("Thing", (), {})()
        kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
        del thing
        while kept() is None and len(waited) < 300:
            time.sleep(0.01)
            waited.append(1)

    assert exits.run("jfl", work) == 143 and len(waited) < 300
    assert capsys.readouterr().err == "jfl: terminated.\n" and sys.unraisablehook == hook


def test_an_interrupted_sweep_says_how_it_goes_on(tmp_path, capsys, monkeypatch, no_programs):
    """And one over partitions tells whose data its first point has."""
    stop_at(monkeypatch, sweep, "compute", 2)
    command = ["sweep", *TINY, "--sweep", "partition_seed=3,4,5", "--block", 1, "--out", tmp_path]
    assert jfl(*command) == 130
    words = f"Kept in {tmp_path}: 1 of its points. Continue with the same command and --resume."
    assert words in capsys.readouterr().err
    assert jfl(*command, "--resume") == 0
    assert [r["config"]["partition_seed"] for r in summary(tmp_path)] == [3, 4, 5]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["data"]["partition"]["seed"] == 3


def test_commands_in_messages_can_be_copied(tmp_path, capsys, no_programs):
    """Also if the name of the directory has a space."""
    for command, axis in (("train", ()), ("sweep", ("--sweep", "seed=0,1"))):
        out = tmp_path / f"my {command}"
        assert jfl(command, *TINY, *axis, "--out", out) == 0
        assert f"jfl report '{out}'" in capsys.readouterr().out
        assert jfl(command, *TINY, *axis, "--lr", 0.9, "--resume", "--out", out) == 2
        words = f"jfl {command} --config '{out}/config.toml' --resume --out '{out}' has"
        assert words in capsys.readouterr().err


def test_a_disk_that_is_full_before_the_results_are_written_leaves_the_points(
    tmp_path, capsys, monkeypatch, no_programs
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "summary.json")

    command = ["sweep", *TINY, "--sweep", "lr=0.1,0.2", "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(record, "save_summary", full)
        assert jfl(*command) == 2
    words = "No space left on device, for summary.json. The points in points.jsonl are kept. Free"
    assert words in capsys.readouterr().err
    assert jfl(*command, "--resume") == 0


def test_a_sweep_that_died_before_it_wrote_its_config_writes_it_later(
    tmp_path, capsys, monkeypatch, no_programs
):
    """A report and `jfl.load` need it."""
    stop_at(monkeypatch, config, "dump", 1)
    command = ["sweep", *TINY, "--sweep", "lr=0.1,0.2", "--out", tmp_path]
    assert jfl(*command) == 130 and not (tmp_path / "config.toml").exists()
    assert jfl(*command, "--resume") == 0
    assert read.read(tmp_path).kind == "sweep"
    assert [p["lr"] for p in load.load(tmp_path).points] == [0.1, 0.2]


# --- bad input


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--noise-multiplier 0", "noise_multiplier"),
        ("--noise-multiplier 1 --epsilon 4", "either"),
        ("--epsilon 4 --unit client --view server", "third_party"),
        ("--unit client", "noise"),
        ("--rate 0.5", "rate"),
        ("--mode printed --noise-multiplier 1", "as_printed"),
        ("--mode as_printed", "noise_multiplier or epsilon for mode"),
        ("--resume", "journal"),
        # a flag without effect
        ("--algorithm fedsgd", "steps="),
        ("--clip-norm 0.5", "clip_norm="),
        ("--partition iid", "min_rows="),
        ("--allow-empty", "allow_empty="),
    ],
)
def test_bad_flags_exit_2_and_write_nothing(tmp_path, capsys, flags, words):
    (tmp_path / "note").write_text("mine")  # the directory holds something else
    out = tmp_path if flags == "--resume" else tmp_path / "run"
    assert jfl("train", *TINY, flags, "--out", out) == 2
    told = capsys.readouterr().err
    assert words in told and "0/4" not in told  # no progress bar of a run that never began
    assert [p.name for p in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("ending", ["npz", "csv", "parquet"])
def test_rows_of_a_file_are_those_of_their_owners(ending, tmp_path, capsys, no_programs):
    r, file, out = np.random.default_rng(0), tmp_path / f"rows.{ending}", tmp_path / "run"
    x, y, owner = r.normal(size=(60, 2)), r.integers(0, 2, 60), np.repeat(["a", "b", "c"], 20)
    columns = dict(u=x[:, 0], v=x[:, 1], sick=np.where(y, "yes", "no"), owner=owner)
    if ending == "npz":
        np.savez(file, x=x, y=y, owner=owner)
    elif ending == "csv":
        with file.open("w", newline="") as lines:
            csv.writer(lines).writerows([columns, *zip(*columns.values())])
    else:
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        parquet.write_table(sys.modules["pyarrow"].table(columns), file)
    flags = "--model logistic --batch 4 --rounds 1" + " --label sick" * (ending != "npz")
    command = ["train", "--data", file, flags, "--out", out]
    assert jfl(*command) == 0
    assert "Federation: 3 clients, 48 rows" in capsys.readouterr().err
    (run,) = summary(out)
    data = json.loads((out / "manifest.json").read_text())["data"]
    assert run["config"]["clients"] == 3 and (data["rows"], data["test_rows"]) == (48, 12)
    capsys.readouterr()
    assert jfl(*command[:-1], tmp_path / "new", "--clients", 4) == 2
    assert "clients" in capsys.readouterr().err


def test_a_run_finds_its_data_from_another_directory(tmp_path, monkeypatch, no_programs):
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "elsewhere"):  # other rows in a file of the same name
        rows = np.random.default_rng(len(folder.name)).normal(size=(40, 2))
        np.savez(folder / "rows.npz", x=rows, y=np.arange(40) % 2, owner=np.arange(40) // 20)
    flags = "--model logistic --batch 4 --rounds 1 --out", tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    assert jfl("train", "--data rows.npz", *flags) == 0
    axis = commands._axes(("data=rows.npz,",))
    monkeypatch.chdir("elsewhere")
    again = "train", "--config", tmp_path / "run" / "config.toml", "--resume --rounds 2 --out"
    assert jfl(*again, tmp_path / "run") == 0
    assert summary(tmp_path / "run")[0]["config"]["data"] == str(tmp_path / "rows.npz")
    assert axis == dict(data=[str(tmp_path / "rows.npz")])


def test_moved_data_are_known_by_their_rows(tmp_path, capsys, no_programs):
    """A run and a sweep continue with the moved file, and not with other rows."""
    old, new, other = (tmp_path / f"{name}.npz" for name in ("old", "new", "other"))
    rows = np.random.default_rng(0).normal(size=(40, 2))
    for path, x in ((old, rows), (other, rows + 1)):
        np.savez(path, x=x, y=np.arange(40) % 2, owner=np.arange(40) // 20)
    one, many = tmp_path / "train", tmp_path / "sweep"
    flags = "--model logistic --batch 4 --rounds 1 --out"
    assert jfl("train", "--data", old, flags, one) == 0
    assert jfl("sweep", "--data", old, "--sweep lr=0.1,0.2", flags, many) == 0
    before = table(many)
    old.rename(new)
    for command, out in (("train", one), ("sweep", many)):
        again = command, "--config", out / "config.toml", "--resume --out", out, "--data"
        capsys.readouterr()
        assert jfl(*again, other) == 2 and "same data" in capsys.readouterr().err
        assert jfl(*again, new) == 0
        build._dataset.cache_clear()
        build._federation.cache_clear()
        load.load(out)  # finds the file there, too
    assert table(many) == before and len(sweep.points_store(many).records) == 2


def test_help_is_short_and_in_sections(capsys):
    told = {name for text in options.SECTIONS.values() for name in text.split()} - {"|"}
    assert {f.name for f in dataclasses.fields(config.Experiment)} <= told <= {*config.FIELDS}
    for command in ("train", "sweep", "audit"):
        assert jfl(command, "--help") == 0
        short = capsys.readouterr().out
        assert jfl(command, "--help-all") == 0
        whole = capsys.readouterr().out
        assert len(short.splitlines()) <= 80 and "no-no-" not in whole
        for text in (short, whole):
            heads = [line[:-1] for line in text.splitlines() if re.fullmatch(r"\w+:", line)]
            assert heads == list(options.SECTIONS)
        flags = [f"\n  --{name.replace('_', '-')}" for name in config.FIELDS]
        assert all(flag in whole for flag in flags), command


def test_a_reader_that_leaves_early_gets_no_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert jfl("sweep", "--help") == 1
    assert capsys.readouterr().err == ""


def test_bad_files_exit_2_and_write_nothing(tmp_path, capsys):
    """More of them are in endurance/test_fuzz.py, and more flags and words too."""
    sweep = "[sweep]\nlr = [0.1, 0.2]"
    for text, words in (
        ("lrr = 0.1", "Did you mean lr"),
        ("lr = true", "lr"),
        (sweep, "jfl sweep"),
    ):
        (tmp_path / "c.toml").write_text(text)
        assert jfl("train", "--config", tmp_path / "c.toml", "--out", tmp_path / "run") == 2
        assert words in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize(
    "command, words",
    [
        ("nonsense", ""),
        ("train --out=", "expected a value for --out, but got an empty one"),
        ("epsilon --rate 0.1 --plot=", "--plot"),
        ("sweep --sweep rounds=1,2", "rounds"),
        ("sweep --sweep learning_rate=0.1,0.2", "Did you mean lr or server_lr"),
        ("sweep --sweep noise=1,2", "Did you mean noise_multiplier"),
        ("sweep --sweep algorithm=fedavg,fedadam", "with server_optimizer='adam', but got"),
        ("sweep --sweep lr=0.1 --address here:6379", "address"),
        ("sweep --sweep lr=0.1 --sweep lr=0.3", "expected lr once, with all its values"),
        ("sweep --sweep noise-multiplier=1 --sweep noise_multiplier=2", "once"),
        ("sweep --sweep seed=0,4294967296", "seed"),  # is seed 0 in 32 bits
        ("sweep --sweep seed=1,1", "seed"),
        ("epsilon", "jfl epsilon: expected either"),
        ("epsilon --rate 0.1 --cohort 5", "expected"),
        ("epsilon --batch 16 --rows 600 --rate 0.0001", "rate"),
        ("epsilon --sampler full --rate 0.1", "rate"),
        ("calibrate --rate 0.1 --over rounds", "noise_multiplier"),
        ("calibrate --rate 0.1 --noise-multiplier 1", "noise_multiplier"),
        ("calibrate --rate 0.1 --over rate --noise-multiplier 1", "rate"),
        ("calibrate --over rate --noise-multiplier 1 --sampler full", "sampler"),
        ("calibrate --over rate --noise-multiplier 1 --sampler without_replacement", "rows"),
        ("calibrate --over rounds --noise-multiplier 0.1 --sampler full", "epsilon"),
    ],
)
def test_bad_commands_exit_2_and_write_nothing(command, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert jfl(*command.split()) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_debug_shows_where_an_error_comes_from(capsys, monkeypatch):
    wrong = ["epsilon", "--rate", 2]
    assert jfl(*wrong) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "Traceback" not in line
    assert jfl(*wrong, "--debug") == 2
    said = capsys.readouterr().err
    assert "Traceback" in said and "ArgumentError" in said and said.endswith(line)
    for value, shown in (("1", True), ("0", False)):
        monkeypatch.setenv("JFL_DEBUG", value)
        assert jfl(*wrong) == 2 and ("Traceback" in capsys.readouterr().err) == shown


@pytest.mark.parametrize("mistake", [ValueError("shapes differ"), TypeError("none")])
def test_a_mistake_in_jfl_is_no_refusal(monkeypatch, mistake):
    """It is not one line about the user's arguments: it passes, with its traceback."""

    def wrong(*_):
        raise mistake

    monkeypatch.setattr(build, "build", wrong)
    with pytest.raises(type(mistake), match=str(mistake)):
        jfl("train", *TINY)


# --- config


def test_a_dataclass_is_a_command_line(capsys):
    @dataclasses.dataclass(frozen=True)
    class Script:
        """A script."""

        sizes: tuple[int, ...] = field((3,), "how large")
        name: tuple[str, ...] = field((), "several", repeated=True)

    parse = lambda words, *default: options.parse(Script, words.split(), "script", *default)
    assert parse("", Script((9,))).sizes == (9,)
    assert parse("--sizes 1 2 --name a --name b") == Script((1, 2), ("a", "b"))
    with pytest.raises(SystemExit, match="^0$"):
        parse("--help")
    assert "how large (default: 3)" in capsys.readouterr().out


def test_a_config_goes_through_a_file_and_words_are_values(tmp_path):
    one = config.Config(hidden=(8, 4), lr=0.25, epsilon=3.0, unit="client", seed=3, alpha=100.0)
    (tmp_path / "c.toml").write_text(config.dump(dataclasses.asdict(one)))
    assert config.Config(**config.load(tmp_path / "c.toml")) == one
    values = ("allow_empty", "true"), ("view", "none"), ("preprocess", "none"), ("view", "None")
    assert [config.coerce(*value, "") for value in values] == [True, None, "none", None]
    for name, value, words in (
        ("allow_empty", "yes", r"bool \(true or false\), but got 'yes'"),
        ("noise_multiplier", "some", r"None \(or none\), but got 'some'"),
        ("lr", "none", "float, but got 'none'"),
    ):
        with pytest.raises(ValueError, match=f"--sweep: expected {name} of type .*{words}"):
            config.coerce(name, value, "--sweep")


def test_flags_win_over_the_file(tmp_path, no_programs):
    (tmp_path / "c.toml").write_text("epsilon = 4.0\nlr = 0.125\nseed = 5\n")
    flags = ["--config", tmp_path / "c.toml", *TINY, "--noise-multiplier 2 --seed 6"]
    assert jfl("train", *flags, "--out", tmp_path / "run") == 0
    used = summary(tmp_path / "run")[0]["config"]
    wanted = dict(noise_multiplier=2.0, lr=0.125, seed=6, epsilon=None)
    assert wanted.items() <= used.items()


@pytest.mark.parametrize(
    "fields",
    [
        dict(algorithm="scaffold", noise_multiplier=1.1, clip="per_layer", unit="client"),
        dict(algorithm="fedprox", mu=0.3, optimizer="adam"),
        dict(partition="shards", sampler="full", cohort=None),
        dict(partition="power_law", batch_sampler="poisson", noise_multiplier=1.0),
        dict(batch_sampler="epochs", sampler="poisson"),
        dict(sampler="with_replacement", weights="size"),
        dict(model="mlp", server_optimizer="momentum", l2=0.01),
    ],
)
def test_every_name_builds_a_plan(fields):
    usual = dict(clients=6, cohort=3, min_rows=16, model="logistic")
    plan, found = build.build(config.Config(**usual | fields))
    assert plan.algorithm.name == found.algorithm


@pytest.mark.parametrize(
    "clip, stage",
    [("flat", "clip_l2"), ("automatic", "clip_automatic"), ("per_layer", "clip_per_layer")],
)
def test_clip_of_a_config(clip, stage):
    fields = dict(clients=6, cohort=3, model="logistic", noise_multiplier=1.1, clip=clip)
    plan, _ = build.build(config.Config(**fields))
    assert f"{stage}(1" in str(plan)


@pytest.mark.by_default("fields0-add_remove", "fields1-replace_one")
@pytest.mark.parametrize(
    "fields, adjacency",
    [
        (dict(adjacency="add_remove", batch_sampler="full", batch=16), "add_remove"),
        (dict(batch_sampler="full"), "replace_one"),
        (dict(adjacency="add_remove", batch_sampler="poisson"), "add_remove"),
        (dict(adjacency="replace_one", batch_sampler="poisson"), "replace_one"),
        (dict(batch_sampler="truncated_poisson"), "zero_out"),
    ],
)
def test_adjacency_of_examples_is_what_was_asked_for(fields, adjacency):
    usual = dict(clients=6, cohort=3, model="logistic", noise_multiplier=3.0)
    made, _ = build.build(config.Config(**usual, **fields))
    assert guarantees.guarantee(made, 3, 1e-5, unit="example").adjacency == adjacency


@pytest.mark.parametrize("sampler", ["without_replacement", "truncated_poisson"])
def test_an_adjacency_that_the_batches_do_not_have_is_refused(sampler):
    fields = dict(adjacency="add_remove", batch_sampler=sampler, noise_multiplier=3.0)
    with pytest.raises(ValueError, match="adjacency"):
        build.build(config.Config(clients=6, cohort=3, model="logistic", **fields))


# --- sweeps


def test_a_sweep_over_flags_and_a_file(tmp_path, monkeypatch, capsys, no_programs):
    (tmp_path / "c.toml").write_text("lr = 0.3\nnoise_multiplier = 1.0\n[sweep]\nseed = [0, 1]\n")
    out, axes = tmp_path / "run", "--sweep noise-multiplier=1,2"
    monkeypatch.setattr(pictures, "draw_accuracy", PICTURE)
    assert jfl("sweep", "--config", tmp_path / "c.toml", *EXACT, axes, "--out", out) == 0
    assert "resumed" not in capsys.readouterr().err
    runs = summary(out)
    assert len(runs) == 4 and len({r["name"] for r in runs}) == 2
    of = lambda r: (r["config"]["noise_multiplier"], r["config"]["lr"], r["seed"])
    assert {of(r) for r in runs} == {(z, 0.3, s) for z in (1, 2) for s in (0, 1)}
    assert len(table(out)) == 8 and (out / "sweep.png").stat().st_size > 5000
    assert json.loads((out / "manifest.json").read_text())["groups"] == 1
    # what is done is kept: a sweep that lost its last point goes on, if asked to
    monkeypatch.setattr(pictures, "draw_accuracy", lambda *_: None)
    before, points = table(out), out / "points.jsonl"
    kept = points.read_text().splitlines(keepends=True)
    points.write_text("".join(kept[:-1]))
    again = ["sweep", "--config", out / "config.toml", "--out", out]
    assert jfl(*again) == 2 and jfl(*again, "--lr", 0.5, "--resume") == 2
    assert jfl(*again, "--resume") == 0 and table(out) == before
    assert "jfl sweep: resumed with 3 of 4 points" in capsys.readouterr().err
    assert len(points.read_text().splitlines()) == len(kept) == 5


def test_a_setting_is_a_line_and_what_varies_is_a_column(tmp_path, capsys, no_programs):
    """In the terminal, in metrics.csv and, read back, in a data frame."""
    axes = "--sweep algorithm=fedavg,fedprox --sweep noise_multiplier=2,4 --sweep seed=0,1"
    assert jfl("sweep", *EXACT, axes, "--out", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("  fed")]
    assert [row[:2] for row in rows] == [
        [a, z] for a in ("fedavg", "fedprox") for z in ("2.0", "4.0")
    ]
    assert "seeds 2" in lines[0] and "view server" in lines[0] and "algorithm=" not in str(lines)
    final = [r["accuracy"]["final"] for r in summary(tmp_path)[:2]]
    assert statistics.plus_minus(*statistics.interval(final)) in " ".join(rows[0])
    assert statistics.PLUS_MINUS in " ".join(lines)
    swept = load.load(tmp_path)
    framed, written = tables.tidy(swept, delta=1e-5), table(tmp_path)
    assert list(framed[0]) == list(written[0]) and {"algorithm", "status"} <= set(framed[0])
    text = lambda row: {k: "" if v is None else str(v) for k, v in row.items() if k != "name"}
    assert list(map(text, framed)) == [{k: v for k, v in r.items() if k != "name"} for r in written]
    points = tmp_path / "points.jsonl"
    points.write_text("".join(points.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="lacks 1 of 8 points"):
        load.load(tmp_path)


def test_an_axis_may_have_lists_of_values_and_the_name_of_a_metric(tmp_path, capsys, no_programs):
    """Each clip norm is in the column clip_norm.  A resumed sweep without missing points compiles
    nothing."""
    command = ["sweep", *EXACT, "--model mlp --noise-multiplier 2", "--out", tmp_path]
    axes = ["--sweep hidden=4,8", "--sweep clip_norm=0.5,1"]
    assert jfl(*command, *axes) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line[2:3] == "["]
    assert rows == [[hidden, clip] for hidden in ("[4]", "[8]") for clip in ("0.5", "1.0")]
    assert [r["clip_norm"] for r in table(tmp_path)] == 2 * (2 * ["0.5"] + 2 * ["1.0"])
    assert {r["adaptive_clip_norm"] for r in table(tmp_path)} == {""}
    assert jfl(*command, *axes, "--resume") == 0
    assert "compiling" not in capsys.readouterr().err


def test_a_loaded_sweep_has_the_caveats_of_its_files(tmp_path, no_programs):
    """Its points share a seed."""
    flags = "--noise-multiplier 1 --sweep lr=0.1,0.2 --out".split()
    assert jfl("sweep", *TINY, *flags, tmp_path) == 0
    caveats = load.load(tmp_path).caveats
    assert len(caveats) == 2 and set(caveats) < set(summary(tmp_path)[0]["privacy"][0]["caveats"])


def test_a_point_that_tolerates_empty_cohorts_is_no_failed_one(tmp_path, no_programs):
    """Also if another point of the sweep does not tolerate them."""
    axes = "--sampler poisson --sweep allow_empty=false,true".split()
    assert jfl("sweep", *TINY, *axes, "--out", tmp_path) == 0
    assert [bool(run.get("failed")) for run in summary(tmp_path)] == [True, False]
    assert load.load(tmp_path).failed.tolist() == [True, False]


@pytest.mark.slow
def test_none_is_a_point_like_others(tmp_path, no_programs):
    """A baseline without noise."""
    assert jfl("sweep", *EXACT, "--sweep", "noise_multiplier=none,1", "--out", tmp_path / "a") == 0
    runs = {r["config"]["noise_multiplier"]: r for r in summary(tmp_path / "a")}
    assert set(runs) == {None, 1.0} and all(g["epsilon"] is None for g in runs[None]["privacy"])
    assert any(g["epsilon"] and g["status"] == "proved" for g in runs[1.0]["privacy"])
    assert jfl("report", tmp_path / "a", "--out", tmp_path / "a.html") == 0
    file = tmp_path / "a" / "config.toml"
    assert config.load(file)["sweep"] == dict(noise_multiplier=[None, 1.0])
    assert jfl("sweep", "--config", file, "--out", tmp_path / "a", "--resume") == 0


def test_a_sweep_calibrates_each_setting_once_and_says_what_is_not_counted(
    tmp_path, monkeypatch, no_programs
):
    calls, calibrate = [], build.calibrate
    counted = lambda *a, **k: calls.append(k["epsilon"]) or calibrate(*a, **k)
    monkeypatch.setattr(build, "calibrate", counted)
    axes = "--sweep epsilon=5,9 --sweep seed=0,1,2"
    assert jfl("sweep", *EXACT, axes, "--out", tmp_path) == 0
    assert sorted(calls) == [5.0, 9.0]
    for run in summary(tmp_path):
        assert all(any("choosing among" in c for c in g["caveats"]) for g in run["privacy"])


def test_a_sweep_over_delta_proves_each_at_its_own(tmp_path, no_programs):
    axes = "--noise-multiplier 2 --sweep delta=0.001,1e-06"
    assert jfl("sweep", *EXACT, axes, "--out", tmp_path) == 0
    loose, tight = ([(g["delta"], g["epsilon"]) for g in r["privacy"]] for r in summary(tmp_path))
    assert {d for d, _ in loose} == {1e-3} and {d for d, _ in tight} == {1e-6}
    assert all(a < b for (_, a), (_, b) in zip(loose, tight, strict=True))


@pytest.mark.slow
def test_failed_points_are_marked(tmp_path):
    grid = ["sweep", *TINY, "--l2", 1, "--rounds", 40, "--evaluate-every", 10, "--sweep"]
    assert jfl(*grid, "lr=0.1,100", "--out", tmp_path / "a") == 0
    assert ["failed" in r for r in summary(tmp_path / "a")] == [False, True]
    assert jfl(*grid, "lr=0.1,100", "--strict", "--out", tmp_path / "b") == 3
    assert jfl(*grid, "lr=100,110", "--out", tmp_path / "c") == 3


@pytest.mark.slow
def test_algorithms_are_compared_with_what_some_of_them_need(tmp_path):
    go = lambda axis, out: jfl("sweep", *TINY, "--mu 0.5", "--sweep", axis, "--out", tmp_path / out)
    assert go("algorithm=fedavg,fedprox,scaffold,fedsgd", "run") == 0
    assert len({run["loss"] for run in summary(tmp_path / "run")}) == 4
    assert go("algorithm=fedavg,scaffold", "idle") == 2  # none of them takes it


@pytest.mark.slow
def test_a_small_demo(tmp_path, capsys, monkeypatch):
    out, other, legend = tmp_path / "demo", tmp_path / "other", []
    drawn = lambda path, groups, title: legend.extend(groups) or path.write_bytes(BLANK)
    monkeypatch.setattr(pictures, "draw_accuracy", drawn)
    command = ["demo", "--rounds", 2, "--seeds", 2, "--out", out]
    assert jfl(*command) == 0
    runs = summary(out)
    assert len(runs) == 2 * 5 and {r["seed"] for r in runs} == {0, 1}
    kinds = {(g["unit"], g["view"]) for r in runs for g in r["privacy"] if g["epsilon"] is not None}
    assert {("example", "server"), ("client", "third_party")} <= kinds
    worth = {r["name"]: guarantee_rows.best(r["privacy"])["epsilon"] for r in runs}
    last = {r["name"]: r["epsilon"] for r in table(out) if r["round"] == "2"}
    assert {name: float(e) if e else None for name, e in last.items()} == worth
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert len(legend) == 5 and {g["name"] for g in legend} == {*demo.PARTS}
    assert all(f"{g['epsilon']:.3g}" in g["privacy"] for g in legend if g["epsilon"])
    shown = capsys.readouterr().out
    assert all(word in shown for word in "ε unit adjacency view δ seconds ± client".split())
    (out / "report.md").write_bytes(record.PAGES[".md"] + b"of the first")
    (out / "accuracy.png").write_text("mine")
    assert jfl(*command) == 0  # replaces the first
    assert not (out / "report.md").exists() and (out / "accuracy.png").read_text() == "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    assert jfl("demo", "--out", other) == 2


# --- accounting


@pytest.mark.by_default("rows", "full")
@pytest.mark.parametrize(
    "args, unit, view, adjacency",
    [
        ("--batch 16 --rows 600 --steps 5", "example", "server", "add_remove"),
        ("--rate 0.1 --cohort 10 --clients 50", "example", "third_party", "add_remove"),
        (
            "--unit client --cohort 10 --clients 50 --sampler without_replacement",
            "client",
            "third_party",
            "replace_one",
        ),
        ("--sampler full", "example", "server", "replace_one"),
    ],
    ids=["rows", "cohort", "client", "full"],
)
def test_epsilon_and_calibrate_agree(capsys, args, unit, view, adjacency):
    assert jfl("calibrate", "--epsilon 3 --rounds 20", args) == 0
    shown, told = capsys.readouterr()
    assert "warning" not in told
    assert all(word in shown for word in (unit, view, adjacency, "1e-05", "For simulation only"))
    z = next(line.split()[0] for line in shown.splitlines() if re.match(r"\s*\d", line))
    assert jfl("epsilon", "--noise-multiplier", z, "--rounds 20", args) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if unit in line).split()
    assert float(row[1]) == pytest.approx(3, rel=1e-3)


def test_a_claim_that_is_not_proved_exits_1(capsys):
    of = "--noise-multiplier 2 --sampler full --rounds 1 --claimed"
    proved = privacy_epsilon(noise_multiplier=2.0, sampler="full", rounds=1)
    assert jfl("epsilon", of, proved * 1.01) == 0
    held, told = capsys.readouterr()
    assert "The claim holds" in held and not told
    rounded = f"{proved:.4g}"  # the message shows that it is smaller
    assert float(rounded) < proved and jfl("epsilon", of, rounded) == 1
    shown, told = capsys.readouterr()
    assert "do not prove the claim" in shown
    assert f"at most {rounded}, but got {proved:.9g}" in told and f"{proved:.9g}" != rounded


def test_local_steps_cost_a_client_nothing():
    """One release a round, whatever the client did before."""
    few, many = (accounting.Numbers(unit="client", rate=0.2, steps=steps) for steps in (1, 50))
    of = accounting.guarantee_of_numbers
    assert of(few, 2.0).epsilon == of(many, 2.0).epsilon


def curve_of(shown):
    """Return the curve that was printed: rounds -> epsilon."""
    lines = [line.split() for line in shown.splitlines()]
    start = next(i for i, line in enumerate(lines) if line == ["rounds", "ε"])
    rows = (line for line in lines[start + 1 :] if line and line[0].isdigit())
    return {int(rounds): float(value) for rounds, value in rows}


@pytest.mark.slow
def test_epsilon_against_rounds_is_that_of_jfl_epsilon(tmp_path, capsys):
    assert jfl("epsilon", *QUICK, "--plot", tmp_path / "curve.png") == 0
    shown, warnings = capsys.readouterr()
    assert "warning" not in warnings
    proved = lambda rounds: privacy_epsilon(noise_multiplier=1.0, rate=0.1, rounds=rounds)
    assert curve_of(shown) == {n: float(f"{proved(n):.4g}") for n in (1, 2, 5, 10, 20)}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_says_what_it_shows(tmp_path, capsys):
    file = tmp_path / "c.svg"
    assert jfl("calibrate", "--epsilon 3 --sampler full --rounds 20", "--plot", file) == 0
    drawn = file.read_text()
    words = "target ε = 3, rounds, gaussian_exact, example, replace_one, server, δ = 1e-05"
    assert all(word in drawn for word in [*words.split(", "), "full sampling"])


def test_curves_at_extremes_are_drawn(tmp_path, recwarn):
    """Nothing to draw on a logarithmic scale, and lines far apart."""
    guarantee = dict(unit="client", adjacency="replace_one", view="third_party", delta=1e-5)
    for rounds, epsilons in (([1, 2, 3], [0.0, 0.0, 0.0]), ([1, 10], [1e-6, np.inf])):
        curve = np.array(rounds), np.array(epsilons), guarantee | dict(method="pld")
        pictures.draw_epsilon_curve(tmp_path / "c.png", *curve, "a setting")
        assert (tmp_path / "c.png").stat().st_size > 5000
    assert not recwarn.list


@pytest.mark.parametrize(
    "name, words",
    [("curve.jpg", ".svg"), ("none/curve.png", "directory"), ("folder.png", "ends in")],
)
def test_a_picture_that_cannot_be_written_is_refused_first(
    tmp_path, capsys, monkeypatch, name, words
):
    for computes in ("guarantee_of_numbers", "solve", "build"):
        early = lambda *_: pytest.fail("computed before the refusal")
        monkeypatch.setattr(accounting, computes, early)
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "run.toml").write_text("epsilon = 3.0\n")
    for command in (["epsilon", *QUICK], ["calibrate", "--config", tmp_path / "run.toml"]):
        assert jfl(*command, "--plot", tmp_path / name) == 2
        assert words in capsys.readouterr().err


@pytest.mark.by_default("rounds")
@pytest.mark.parametrize(
    "args, name, more",
    [
        ("--over rounds --rate 0.1", "rounds", 1),
        ("--over rate --rounds 20", "rate", 1e-4),
        ("--over rate --rounds 5 --sampler without_replacement --rows 100", "batch", 1),
        (
            "--over rate --rounds 5 --unit client --sampler without_replacement --clients 40",
            "cohort",
            1,
        ),
    ],
    ids=["rounds", "rate", "batch", "cohort"],
)
def test_calibrate_other_unknowns(capsys, args, name, more):
    """What is found reaches epsilon, and a little more does not."""
    command = f"--epsilon 1 --noise-multiplier 1.5 {args}"
    assert jfl("calibrate", command) == 0
    shown = capsys.readouterr().out
    asked = options.parse(accounting.Calibrate, command.split(), "jfl calibrate")
    found, z = accounting.solve(asked)
    assert f"{name} = {getattr(found, name):.9g}" in shown and z == 1.5
    epsilon = lambda numbers: accounting.guarantee_of_numbers(numbers, z).epsilon
    over = dataclasses.replace(found, **{name: getattr(found, name) + more})
    assert epsilon(found) <= 1 < epsilon(over) and max(curve_of(shown).values()) <= 1


def test_what_is_shown_is_for_the_view_that_was_asked_for(tmp_path, capsys, no_programs):
    """A curve of the server's epsilon would end above the target, and a sweep over views would show
    one epsilon for all of them."""
    flags = "--noise-multiplier", 2, "--sweep", "view=server,third_party", "--out", tmp_path / "out"
    assert jfl("sweep", *TINY, *flags) == 0
    shown = capsys.readouterr().out
    for run in summary(tmp_path / "out"):
        mine = guarantee_of(run, unit="example", view=run["config"]["view"])
        assert f" {mine['epsilon']:.4g} " in shown
    (tmp_path / "run.toml").write_text('cohort = 5\nrounds = 4\nview = "third_party"\n')
    assert jfl("calibrate", "--epsilon", 2, "--config", tmp_path / "run.toml") == 0
    shown = capsys.readouterr().out
    assert "(example, replace_one, third_party, " in shown and curve_of(shown)[4] <= 2


@pytest.mark.slow
def test_curve_and_noise_of_a_config(trained, tmp_path, capsys):
    file = ["--config", trained / "config.toml"]
    best = guarantee_of(summary(trained)[0], view="server")["epsilon"]
    # nearly the noise that it has, for nearly the epsilon that it has
    assert jfl("calibrate", *file, "--epsilon", best * 1.01) == 0
    shown = capsys.readouterr().out
    assert 1.45 < float(shown.split("noise_multiplier = ")[1].split()[0]) < 1.5
    assert jfl("epsilon", *file, "--plot", tmp_path / "curve.png") == 0
    assert max(curve_of(capsys.readouterr().out).values()) == float(f"{best:.4g}")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert jfl("calibrate", *file, "--epsilon", 0.7, "--over", "rounds") == 0
    most = int(re.search(r"^rounds = (\d+)", capsys.readouterr().out, re.MULTILINE)[1])
    within = []
    for rounds in (most, most + 1):
        assert jfl("epsilon", *file, "--rounds", rounds) == 0
        within.append(max(curve_of(capsys.readouterr().out).values()) <= 0.7)
    assert within == [True, False]
    assert jfl("calibrate", *file, "--epsilon", 5, "--over", "rate") == 2
    (tmp_path / "plain.toml").write_text("rounds = 3\n")
    assert jfl("epsilon", "--config", tmp_path / "plain.toml", "--plot", tmp_path / "none.png") == 2
    assert "guarantee" in capsys.readouterr().err and not (tmp_path / "none.png").exists()


# --- what is shown


def test_list_names_everything(capsys):
    assert jfl("list") == 0
    shown = capsys.readouterr().out
    names = "fedavg scaffold digits dirichlet poisson logistic cnn adam mnist-client-eps8"
    assert all(name in shown for name in names.split())
    assert "FedAvg: clients train locally" in shown and " Return " not in shown


def test_a_table_shows_brackets_as_they_are(capsys):
    console.table(None, [("a", False)], [("x [n, 28] in [0, 1]",)])
    assert "x [n, 28] in [0, 1]" in capsys.readouterr().out


def test_losses_that_are_not_finite_are_counted(capsys):
    """Their mean is that of the other seeds."""
    history = dict(round=[1], accuracy=[0.5], loss=[2.0])
    entry = record.RunRecord("fedavg", dataclasses.asdict(config.Config()), 0, history, 1.0, 0.0)
    privacy = guarantee_rows.as_row(guarantees.Guarantee(np.inf, 1e-5, *["x"] * 3, "none"))
    runs = [dataclasses.replace(entry, guarantees=[privacy]).entry() for _ in range(3)]
    runs[1] |= dict(loss=None)
    console.results(runs, "runs")
    assert "2.0000 ± 0.0000 (1 not finite)" in capsys.readouterr().out


def test_as_a_program(capsys, monkeypatch):
    """Its exit code is that of `main`.  test_layout.py has what its import loads."""
    monkeypatch.delitem(sys.modules, "jfl.cli.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["jfl", "nonsense"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("jfl.cli", run_name="__main__")
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "nonsense" in said and "Traceback" not in said
