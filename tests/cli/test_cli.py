"""The command line: exit codes, files, flags over files, and nothing written for bad input."""

import csv
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import pretended

from jfl.cli import console, main
from jfl.cli import runs as commands
from jfl.privacy import guarantees
from jfl.privacy.plain_numbers import epsilon as privacy_epsilon
from jfl.report import document
from jfl.runs import build, config, guarantee_rows, pictures, record, statistics, sweep, train

TINY = """--clients 6 --min-rows 8 --model logistic --cohort 3 --batch 4 --steps 2 --rounds 4
    --evaluate-every 2""".split()
# Without sampling, whose noise and epsilon have a closed form: where neither is what is tested
EXACT = """--clients 6 --min-rows 8 --model logistic --sampler full --batch-sampler full --steps
    2 --rounds 4 --evaluate-every 2""".split()
ENTRY = {
    "name",
    "algorithm",
    "dataset",
    "rounds",
    "seed",
    "accuracy",
    "loss",
    "seconds",
    "privacy",
    "config",
}
GUARANTEE = set(
    "unit adjacency view delta epsilon method status caveats codes implied rounds".split()
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What the command line keeps stays out of the user's folder; compiled programs go where all
    tests have theirs."""
    assert jax.config.jax_compilation_cache_dir is not None
    monkeypatch.setenv("JFL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


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
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    found = json.loads((out / "summary.json").read_text(), parse_constant=refuse)
    assert set(found) == {"format", "runs"} and found["format"] == 1
    for run in found["runs"]:
        assert set(run) - {"failed"} == ENTRY
        assert set(run["accuracy"]) == {"final", "best"} and set(run["seconds"]) == {
            "compile",
            "total",
            "per_round",
        }
        assert run["privacy"] and all(set(g) == GUARANTEE for g in run["privacy"])
    return found["runs"]


def table(out):
    return list(csv.DictReader((out / "metrics.csv").open()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "new" / "run"
    assert jfl("train", *TINY, "--out", out, "--noise-multiplier", 1.5) == 0
    return out


# --- train


def test_train_writes_a_run(trained):
    (run,) = summary(trained)
    assert (run["algorithm"], run["dataset"], run["rounds"], run["seed"]) == (
        "fedavg",
        "digits",
        4,
        0,
    )
    assert {(g["unit"], g["view"]) for g in run["privacy"]} == {
        ("example", "server"),
        ("example", "third_party"),
    }
    rows = table(trained)
    assert [int(r["round"]) for r in rows] == [2, 4]
    assert float(rows[-1]["accuracy"]) == run["accuracy"]["final"]
    server = next(g for g in run["privacy"] if g["view"] == "server")
    assert server["method"] == "pld" and float(rows[-1]["epsilon"]) == server["epsilon"]
    assert 0 < float(rows[0]["epsilon"]) < float(rows[1]["epsilon"])
    manifest = json.loads((trained / "manifest.json").read_text())
    assert {"versions", "kernels", "data", "seeds"} <= set(manifest)
    assert {"jfl", "jax", "jaxlib", "device"} <= set(manifest["versions"]) and manifest["data"][
        "checksum"
    ]
    picture = (trained / "accuracy.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and picture != BLANK
    assert not [p for p in trained.iterdir() if p.name.startswith(".") and p.name != ".lock"]


def test_its_config_runs_it_again(trained, tmp_path):
    assert jfl("train", "--config", trained / "config.toml", "--out", tmp_path / "again") == 0
    assert (tmp_path / "again" / "metrics.csv").read_text() == (trained / "metrics.csv").read_text()


def test_resume_goes_on(trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / "run"
    command = ["train", "--config", trained / "config.toml", "--out", out]
    assert jfl(*command, "--rounds", 2) == 0
    with monkeypatch.context() as patched:  # refused before anything is traced or accounted
        patched.setattr(train, "scan", lambda *_: pytest.fail("traced before the refusal"))
        patched.setattr(
            train, "epsilons", lambda *_, **__: pytest.fail("accounted before the refusal")
        )
        for flags, words in (
            ([], "--resume"),
            (["--resume", "--lr", 0.01], "lr: 0.3 there, 0.01 here"),
            (["--resume", "--rounds", 1], ">= 2, the rounds already released"),
            (["--resume", "--epsilon", 3], "noise_multiplier: 1.5 there"),
        ):
            assert jfl(*command, *flags) == 2
            assert words in capsys.readouterr().err
    assert jfl(*command, "--resume") == 0
    assert (out / "metrics.csv").read_text() == (trained / "metrics.csv").read_text()


def test_without_noise_there_is_no_guarantee(tmp_path, capsys, no_programs):
    assert jfl("train", *TINY, "--out", tmp_path / "run") == 0
    (run,) = summary(tmp_path / "run")
    (guarantee,) = run["privacy"]
    assert guarantee["epsilon"] is None and guarantee["status"] == "no guarantee"
    assert all(r["epsilon"] == "" for r in table(tmp_path / "run"))
    assert "none" in capsys.readouterr().out


def test_client_level_calibrates_for_the_view_it_names(tmp_path, capsys, no_programs):
    assert jfl("train", *EXACT, "--unit", "client", "--epsilon", 4, "--out", tmp_path / "run") == 0
    assert "third_party" in capsys.readouterr().err
    (run,) = summary(tmp_path / "run")
    mine = next(g for g in run["privacy"] if g["unit"] == "client")
    assert mine["view"] == "third_party" and 3.99 < mine["epsilon"] <= 4
    assert run["config"]["noise_multiplier"] > 0
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["epsilon"] == 4.0


@pytest.mark.slow
def test_what_states_an_epsilon_of_fewer_rounds_goes(tmp_path, capsys, no_programs):
    """Before a longer run begins: of pages and pictures those that are jfl's own."""
    out = tmp_path / "run"
    command = ["train", *EXACT, "--noise-multiplier", 1, "--out", out]
    assert jfl(*command) == 0 and jfl("report", out) == 0
    assert record.PAGES == {".html": document.HEAD.encode(), ".md": document.MARKDOWN_HEAD.encode()}
    assert jfl("report", out, "--out", out / "index.html") == 0
    pages = {p.name for p in out.iterdir()} & {
        "report.html",
        "report.md",
        "report_files",
        "accuracy.png",
    }
    assert len(pages) == 4
    (out / "report_files" / "mine.png").write_text("mine")
    assert jfl(*command, "--resume") == 0  # nothing to add: it stands
    assert pages < {p.name for p in out.iterdir()}
    assert jfl(*command, "--resume", "--rounds", 6) == 0
    assert {p.name for p in out.iterdir()} & pages == {"accuracy.png", "report_files"} and summary(
        out
    )[0]["rounds"] == 6
    assert [p.name for p in (out / "report_files").iterdir()] == ["mine.png"]
    assert not list(out.glob("index*"))
    (out / "report.md").write_text("my notes")
    (out / "linked.md").write_bytes(record.PAGES[".md"])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "picture-1.png").write_text("mine")
    (out / "linked_files").symlink_to(tmp_path / "elsewhere")
    record.void(out)
    assert (out / "report.md").read_text() == "my notes" and not (out / "summary.json").exists()
    assert (tmp_path / "elsewhere" / "picture-1.png").exists() and not (out / "linked.md").exists()


@pytest.mark.slow
def test_words_for_what_flags_cannot_say(tmp_path, capsys, no_programs):
    """none, true and false among the values of a sweep: a baseline without noise is a point like
    others."""
    assert jfl("sweep", *EXACT, "--sweep", "noise_multiplier=none,1", "--out", tmp_path / "a") == 0
    runs = {r["config"]["noise_multiplier"]: r for r in summary(tmp_path / "a")}
    assert set(runs) == {None, 1.0} and all(g["epsilon"] is None for g in runs[None]["privacy"])
    assert any(g["epsilon"] and g["status"] == "proved" for g in runs[1.0]["privacy"])
    assert jfl("report", tmp_path / "a", "--out", tmp_path / "a.html") == 0
    assert config.load(tmp_path / "a" / "config.toml")["sweep"] == dict(
        noise_multiplier=[None, 1.0]
    )
    assert (
        jfl(
            "sweep", "--config", tmp_path / "a" / "config.toml", "--out", tmp_path / "a", "--resume"
        )
        == 0
    )
    assert [config.coerce("allow_empty", v, "") for v in ("true", "false", True)] == [
        True,
        False,
        True,
    ]
    assert (
        config.coerce("view", "none", "") is None
        and config.coerce("preprocess", "none", "") == "none"
    )
    for name, value, words in (
        ("allow_empty", "yes", r"bool \(true or false\), but got 'yes'"),
        ("noise_multiplier", "some", r"None \(or none\), but got 'some'"),
        ("lr", "none", "float, but got 'none'"),
    ):
        with pytest.raises(ValueError, match=f"--sweep: expected {name} of type .*{words}"):
            config.coerce(name, value, "--sweep")


@pytest.mark.slow
def test_an_empty_poisson_cohort_stops_unless_allowed(tmp_path, capsys):
    command = ["train", *TINY, "--cohort", 1, "--sampler", "poisson", "--rounds", 8]
    assert jfl(*command, "--out", tmp_path / "stopped") == 3
    assert (
        "empty_cohort" in capsys.readouterr().err
        and not (tmp_path / "stopped" / "summary.json").exists()
    )
    assert jfl(*command, "--allow-empty", "--out", tmp_path / "run") == 0
    assert min(float(r["cohort"]) for r in table(tmp_path / "run")) < 1


@pytest.mark.filterwarnings("ignore:simulate. the run diverged")
def test_a_run_that_diverges_stops_with_3_and_keeps_its_checkpoint(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["train", *TINY, "--lr", 100, "--l2", 1, "--evaluate-every", 1, "--out", out]
    assert jfl(*command, "--rounds", 40) == 3
    message = capsys.readouterr().err
    assert "nonfinite" in message and "Last good checkpoint: round" in message
    kept = int(message.split("Last good checkpoint: round ")[1].split()[0])
    assert kept == max(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdigit())
    # the round that diverged was released too, so a shorter run would leave it out of epsilon
    assert jfl(*command, "--rounds", kept, "--resume") == 2
    assert "rounds already released" in capsys.readouterr().err


# --- one epsilon, one meaning of ±

SAMPLED = (
    "--unit client --sampler poisson --noise-multiplier 2 --allow-empty".split()
)  # pld proves less than rdp


def test_a_run_has_one_epsilon(tmp_path, monkeypatch, capsys, no_programs):
    """In the bar, in metrics.csv, in the table, in summary.json and in the rows of a data frame, to
    the digit."""
    seen, train = [], commands.runs.train
    monkeypatch.setattr(
        commands.runs,
        "train",
        lambda config, out, resume, watch, *rest: train(
            config, out, resume, lambda **what: (seen.append(what["epsilon"]), watch(**what)), *rest
        ),
    )
    assert jfl("train", *TINY, *SAMPLED, "--evaluate-every", 1, "--out", tmp_path / "run") == 0
    shown, told = capsys.readouterr()
    assert "warning" not in told  # of noise: it is not so large
    (run,) = summary(tmp_path / "run")
    (mine,) = (g for g in run["privacy"] if g["unit"] == "client")
    rows = [float(r["epsilon"]) for r in table(tmp_path / "run")]
    assert seen == rows and rows[-1] == mine["epsilon"] and mine["method"].startswith("pld")
    assert rows == sorted(rows) and f"{mine['epsilon']:.4g}" in shown
    # the rows between are proved as tightly as the last one
    plan, found = build.build(config.Config(**config.load(tmp_path / "run" / "config.toml")))
    assert rows[1::2] == [
        guarantees.guarantee(plan, r, found.delta, "client", "third_party").epsilon for r in (2, 4)
    ]
    assert (
        rows[-1] < 0.999 * guarantees.epsilons(plan, [4], found.delta, "client", "third_party")[0]
    )


SWEPT = ["--sweep", "lr=0.1,0.2,0.4", "--block", 1]


@pytest.mark.parametrize(
    "command, of, done", [(["train"], "rounds", "4/4"), (["sweep", *SWEPT], "points", "3/3")]
)
def test_a_terminal_sees_how_much_is_left(
    command, of, done, tmp_path, monkeypatch, capsys, no_programs
):
    """And nothing else does: what a file or a pipe gets has neither that nor colours."""
    go = lambda out, *more: jfl(*command, *TINY, "--out", tmp_path / out, *more)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert go("file") == 0
    plain = capsys.readouterr().err
    (line,) = (line for line in plain.splitlines() if done in line)
    words = "loss \\S+  accuracy \\S+" if of == "rounds" else ""
    assert re.fullmatch(
        f"jfl {command[0]} \\S+ {done} 0:\\d\\d:\\d\\d {words}".strip(), line.strip()
    )
    assert "left" not in plain and "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "160")
    assert go("terminal") == 0
    live = re.sub("\x1b\\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert re.search(f"{done} 0:\\d\\d:\\d\\d {of}, left 0:00:00 .*accuracy 0", live)
    assert go("quiet", "--no-progress") == 0
    assert done not in capsys.readouterr().err


def test_a_sweep_has_one_epsilon_a_setting(tmp_path, no_programs):
    assert (
        jfl("sweep", *TINY, *SAMPLED, "--sweep", "noise_multiplier=2,4", "--out", tmp_path / "run")
        == 0
    )
    worth = {
        r["name"]: next(g["epsilon"] for g in r["privacy"] if g["unit"] == "client")
        for r in summary(tmp_path / "run")
    }
    last = {r["name"]: float(r["epsilon"]) for r in table(tmp_path / "run") if r["round"] == "4"}
    assert last == worth and len(set(worth.values())) == 2
    for run in summary(tmp_path / "run"):
        assert all(
            any("points with the same seed share samples" in c for c in g["caveats"])
            for g in run["privacy"]
        )


@pytest.mark.slow
def test_epsilons_of_many_evaluations_never_fall_and_end_in_the_guarantee():
    plan, _ = build.build(
        config.Config(
            clients=6,
            min_rows=8,
            model="logistic",
            sampler="poisson",
            cohort=3,
            unit="client",
            noise_multiplier=4.0,
        )
    )
    after, client = np.arange(1, 301), ("client", "third_party")
    found = guarantee_rows.epsilons(plan, after, 1e-5, *client)
    quick = guarantees.epsilons(plan, after, 1e-5, *client)
    assert found[-1] == guarantees.guarantee(plan, 300, 1e-5, *client).epsilon < quick[-1]
    assert (np.diff(found) >= 0).all() and (
        found <= quick[np.minimum(np.arange(300) + 16, 299)]
    ).all()
    assert len(set(found)) >= 28 and found[0] < 0.2 * found[-1]
    assert guarantee_rows.epsilons(plan, [3, 5], 1e-5, *client, last=0.5).tolist()[-1] == 0.5
    assert (
        guarantee_rows.epsilons(plan, after[:3], 1e-5, *client, most=0).tolist()
        == quick[:3].tolist()
    )
    for count in (1, 2, 31, 32, 33, 1000):
        for most in (0, 1, 2, 3, 32):
            places = guarantee_rows._choose_indices(count, most)
            assert len(places) <= max(most, 0) or count <= most
            assert most == 0 or places[-1] == count - 1 and (np.diff(places) > 0).all()


@pytest.mark.slow
def test_plus_minus_means_one_thing(tmp_path, capsys, no_programs):
    """Half of a 95 % interval: in the table of a sweep as on its page, and it says so; of one seed
    nothing."""
    assert jfl("sweep", *TINY, "--sweep", "seed=0,1,2", "--out", tmp_path / "three") == 0
    shown = capsys.readouterr().out
    words = statistics.plus_minus(
        *statistics.interval([r["accuracy"]["final"] for r in summary(tmp_path / "three")])
    )
    assert words.count("±") == 1 and words in shown and statistics.PLUS_MINUS in shown
    assert jfl("report", tmp_path / "three", "--out", tmp_path / "page.html") == 0
    assert (
        words in (tmp_path / "page.md").read_text()
        and statistics.PLUS_MINUS in (tmp_path / "page.md").read_text()
    )
    capsys.readouterr()
    assert jfl("train", *TINY, "--out", tmp_path / "one") == 0
    assert "±" not in capsys.readouterr().out


# --- noise without a signal


@pytest.mark.by_default("flags0", "flags1")
@pytest.mark.parametrize(
    "flags",
    [
        ["--epsilon", 1e-12],
        ["--noise-multiplier", 1e7],
        ["--noise-multiplier", 1e7, "--unit", "client"],
    ],
)
def test_a_run_on_noise_warns_once(tmp_path, capsys, flags, no_programs):
    assert jfl("train", *EXACT, *flags, "--out", tmp_path / "run") in (0, 3)
    said = capsys.readouterr().err
    assert said.count("warning: ") == 1 and "trains on noise" in said


@pytest.mark.slow
def test_a_sweep_and_the_accountant_warn_of_noise(tmp_path, capsys):
    assert jfl("sweep", *TINY, "--sweep noise_multiplier=1,1e7,1e8", "--out", tmp_path / "run") in (
        0,
        3,
    )
    said = capsys.readouterr().err
    assert (
        said.count("warning: ") == 1
        and "2 of 3 settings, the first noise_multiplier=10000000.0: this trains on noise" in said
    )
    for command in (
        ["epsilon", *QUICK, "--noise-multiplier", 1e30],
        ["calibrate", *QUICK, "--epsilon", 1e-12],
    ):
        assert jfl(*command) == 0
        said = capsys.readouterr().err
        assert (
            said.count("warning: ") == 1
            and "epsilon 0 at delta 1e-05" in said
            and "trains on noise" in said
        )
    (tmp_path / "c.toml").write_text("epsilon = 1e-12\nclients = 6\nmodel = 'logistic'\n")
    assert jfl("epsilon", "--config", tmp_path / "c.toml") == 0
    assert capsys.readouterr().err.count("warning: ") == 1


@pytest.mark.parametrize(
    "epsilon, delta, num_units, warns",
    [
        (1e-4, 1e-5, 1438, "hides even 1e+04 rows together"),
        (1.0, 1e-5, 1438, ""),
        (1e-4, 1e-3, 1438, "at delta 6.88e-05 hides even 1.5e+03 rows"),
        (0.0, 1e-5, 60_000, "at delta 1.65e-06 hides even 6.1e+04 rows"),
        (25.0, 1e-5, 1438, "protects almost nothing"),
    ],
)
def test_too_few_rows_for_an_epsilon_are_noise(epsilon, delta, num_units, warns):
    text = guarantee_rows.noise_warning(lambda _: epsilon, delta, "example", num_units)
    assert warns in text and bool(text) == bool(warns)


# --- interrupted


@pytest.mark.parametrize("at, kept", [(2, "rounds up to 2"), (1, "rounds up to 0")])
def test_an_interrupted_run_says_how_it_goes_on(trained, tmp_path, capsys, monkeypatch, at, kept):
    calls, simulate = [], train.simulate

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return simulate(*args, **options)

    monkeypatch.setattr(train, "simulate", stop)
    out = tmp_path / "the run"
    command = ["train", "--config", trained / "config.toml", "--out", out]
    assert jfl(*command) == 130
    said = capsys.readouterr().err
    assert "interrupted. Kept in" in said and kept in said and "Traceback" not in said
    assert not (out / "summary.json").exists() and not [
        p for p in out.rglob(".*") if p.name != ".lock"
    ]
    assert jfl(*command, "--resume") == 0 and table(out) == table(trained)


def test_an_interrupted_run_before_anything_is_kept(tmp_path, capsys, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", stop)
    assert jfl("train", *TINY, "--out", tmp_path / "run") == 130
    assert "nothing is kept" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_interrupted_sweep_says_how_it_goes_on(tmp_path, capsys, monkeypatch, no_programs):
    calls, compute = [], sweep.compute

    def stop(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return compute(*args, **options)

    monkeypatch.setattr(sweep, "compute", stop)
    out = tmp_path / "run"
    command = ["sweep", *TINY, "--sweep", "seed=0,1,2", "--block", 1, "--out", out]
    assert jfl(*command) == 130
    said = capsys.readouterr().err
    assert f"Kept in {out}: 1 of its points. Continue with the same command and --resume." in said
    assert jfl(*command, "--resume") == 0 and [r["seed"] for r in summary(out)] == [0, 1, 2]


# --- bad input


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--algorithm", "fedavgg"], "fedavg"),
        (["--dataset", "nowhere"], "digits"),
        (["--lr", "nan"], "lr"),
        (["--lr", "-1"], "lr"),
        (["--clip-norm", "0"], "clip_norm"),
        (["--clip-norm", "nan", "--noise-multiplier", "1"], "clip_norm"),
        (["--noise-multiplier", "0"], "noise_multiplier"),
        (["--noise-multiplier", "-1"], "noise_multiplier"),
        (["--noise-multiplier", "1", "--epsilon", "4"], "either"),
        (["--epsilon", "-4"], "epsilon"),
        (["--epsilon", "4", "--unit", "client", "--view", "server"], "third_party"),
        (["--unit", "client"], "noise"),
        (["--unit", "person", "--noise-multiplier", "1"], "client"),
        (["--delta", "2"], "delta"),
        (["--cohort", "7"], "cohort"),
        (["--batch", "900", "--noise-multiplier", "1"], "batch"),
        (["--seed", "-1"], "seed"),
        (["--rate", "0.5"], "rate"),
        (["--holdout", "1.5"], "holdout"),
        (["--alpha", "-1"], "alpha"),
        (["--min-rows", "1000"], "min_rows"),
        (["--rounds", "0"], "rounds"),
        (["--seed", "-1"], "seed"),
        (["--evaluate-every", "0"], "evaluate_every"),
        (["--checkpoint-every", "0"], "checkpoint_every"),
        (["--mode", "printed", "--noise-multiplier", "1"], "as_printed"),
        (["--mode", "as_printed"], "noise_multiplier or epsilon for mode"),
        (["--resume"], None),
        (["--nonsense", "1"], None),
        (["--rounds", "many"], None),
    ],
)
def test_bad_flags_exit_2_and_write_nothing(tmp_path, capsys, flags, words):
    if flags == ["--resume"]:  # of a directory that holds something else
        (tmp_path / "note").write_text("mine")
    out = tmp_path if flags == ["--resume"] else tmp_path / "run"
    before = sorted(tmp_path.rglob("*"))
    assert jfl("train", *TINY, *flags, "--out", out) == 2
    shown = capsys.readouterr()
    assert (words or "") in shown.err and (shown.err or shown.out)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "text, words",
    [
        ("lrr = 0.1", "Did you mean lr"),
        ("lr = [0.1]", "lr"),
        ("lr = true", "lr"),
        ("rounds = 1.5", "rounds"),
        ("lr = ", "TOML"),
        ("[sweep]\nlr = [0.1, 0.2]", "jfl sweep"),
    ],
)
def test_bad_files_exit_2_and_write_nothing(tmp_path, capsys, text, words):
    (tmp_path / "c.toml").write_text(text)
    assert jfl("train", "--config", tmp_path / "c.toml", "--out", tmp_path / "run") == 2
    assert words in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["train", "--config"],
        ["train", "--config", "/no/such/file"],
        ["sweep", "--rounds", "2"],
        ["sweep", "--sweep", "lr="],
        ["sweep", "--sweep", "lrr=1"],
        ["sweep", "--sweep", "rounds=1,2"],
        ["sweep", "--sweep", "lr=0.1,-1"],
        ["sweep", "--sweep", "lr=0.1", "--engine", "dask"],
        ["sweep", "--sweep", "lr=0.1", "--block", "0"],
        ["sweep", "--sweep", "lr=0.1", "--address", "here:6379"],
        ["sweep", "--sweep", "lr=0.1", "--gpus-per-task", "0"],
        ["train", *TINY, "--out", ""],
        ["train", *TINY, "--out="],
        ["sweep", "--sweep", "lr=0.1", "--out", ""],
        ["demo", "--out", ""],
        ["report", ""],
        ["report", "--out", ""],
        ["epsilon", "--rate", "0.1", "--plot", ""],
        ["sweep", "--sweep", "lr=0.1", "--sweep", "lr=0.3"],
        ["sweep", "--sweep", "noise-multiplier=1", "--sweep", "noise_multiplier=2"],
    ],
)
def test_bad_commands_exit_2(args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert jfl(*args) == 2
    assert not list(tmp_path.iterdir())


def test_an_empty_name_and_an_axis_twice_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        jfl("train", "--out", "") == 2
        and "expected a value for --out, but got an empty one" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match="--out: expected the name of a directory"):
        train.train(config.Config(), "")
    assert jfl("sweep", "--sweep", "lr=0.1", "--sweep", "lr=0.3") == 2
    assert (
        "expected lr once, with all its values, but got it again as 'lr=0.3'"
        in capsys.readouterr().err
    )
    assert jfl("epsilon") == 2 and capsys.readouterr().err.startswith(
        "jfl epsilon: expected either"
    )


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


def test_scripts_parse_with_the_same_function(capsys):
    from jfl.cli import options

    @dataclasses.dataclass(frozen=True)
    class Script:
        """A script.

        example: python script.py --sizes 1 2
        """

        sizes: tuple[int, ...] = options.field((3,), "how large")
        out: Path = options.field(Path("runs"), "where to")
        name: tuple[str, ...] = options.field((), "several", repeated=True)

    assert options.parse(Script, [], "script") == Script()
    words = ["--sizes", "1", "2", "--name", "a", "--name", "b"]
    assert options.parse(Script, words, "script") == Script((1, 2), Path("runs"), ("a", "b"))
    assert options.parse(Script, [], "script", Script((9,))).sizes == (9,)
    with pytest.raises(
        ValueError, match="script: expected a value for --out, but got an empty one"
    ):
        options.parse(Script, ["--out="], "script")
    for words, code in ((["--help"], 0), (["--sizes", "x"], 2)):
        with pytest.raises(SystemExit) as stop:
            options.parse(Script, words, "script")
        assert stop.value.code == code
    assert "how large (default: 3)" in capsys.readouterr().out


def test_a_file_is_no_run_directory(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert jfl("train", *TINY, "--out", tmp_path / "file") == 2
    assert "directory" in capsys.readouterr().err


# --- config


def test_a_config_goes_through_a_file(tmp_path):
    one = config.Config(hidden=(8, 4), lr=0.25, epsilon=3.0, unit="client", seed=3, alpha=100.0)
    (tmp_path / "c.toml").write_text(config.dump(dataclasses.asdict(one)))
    assert config.Config(**config.load(tmp_path / "c.toml")) == one


def test_flags_win_over_the_file(tmp_path, no_programs):
    (tmp_path / "c.toml").write_text("epsilon = 4.0\nlr = 0.125\nseed = 5\n")
    assert (
        jfl(
            "train",
            "--config",
            tmp_path / "c.toml",
            *TINY,
            "--noise-multiplier 2 --seed 6",
            "--out",
            tmp_path / "run",
        )
        == 0
    )
    used = summary(tmp_path / "run")[0]["config"]
    assert (used["noise_multiplier"], used["lr"], used["seed"], used["epsilon"]) == (
        2.0,
        0.125,
        6,
        None,
    )


@pytest.mark.parametrize(
    "fields",
    [
        dict(algorithm="scaffold", noise_multiplier=1.1, clip="per_layer"),
        dict(algorithm="scaffold", noise_multiplier=1.1, clip="per_layer", unit="client"),
        dict(algorithm="fedprox", mu=0.3, optimizer="adam"),
        dict(algorithm="fedsgd", batch_sampler="full"),
        dict(partition="iid", sampler="poisson"),
        dict(partition="shards", sampler="full", cohort=None),
        dict(partition="power_law", batch_sampler="poisson", noise_multiplier=1.0),
        dict(batch_sampler="epochs"),
        dict(sampler="with_replacement", weights="size"),
        dict(model="mlp", server_optimizer="momentum", l2=0.01),
    ],
)
def test_every_name_builds_a_plan(fields):
    plan, found = build.build(
        config.Config(**(dict(clients=6, cohort=3, min_rows=16, model="logistic") | fields))
    )
    assert plan.algorithm.name == found.algorithm


# --- sweep, demo, accounting


def test_a_sweep_over_flags_and_a_file(tmp_path, monkeypatch):
    (tmp_path / "c.toml").write_text("lr = 0.3\nnoise_multiplier = 1.0\n[sweep]\nseed = [0, 1]\n")
    out = tmp_path / "run"
    monkeypatch.setattr(pictures, "draw_accuracy", PICTURE)
    assert (
        jfl(
            "sweep",
            "--config",
            tmp_path / "c.toml",
            *EXACT,
            "--sweep lr=0.1,0.2 --sweep noise-multiplier=1,2",
            "--out",
            out,
        )
        == 0
    )
    runs = summary(out)
    assert (
        len(runs) == 8
        and len({r["name"] for r in runs}) == 4
        and {r["seed"] for r in runs} == {0, 1}
    )
    assert {(r["config"]["lr"], r["config"]["noise_multiplier"]) for r in runs} == {
        (0.1, 1),
        (0.1, 2),
        (0.2, 1),
        (0.2, 2),
    }
    assert len(table(out)) == 16
    assert json.loads((out / "manifest.json").read_text())["groups"] == 1
    assert (out / "sweep.png").stat().st_size > 5000
    monkeypatch.setattr(pictures, "draw_accuracy", lambda *_: None)
    assert jfl("sweep", "--config", out / "config.toml", "--out", tmp_path / "again") == 0
    assert table(tmp_path / "again") == table(out)
    # what is done is kept: a sweep that lost its last point goes on, if asked to
    kept = (out / "points.jsonl").read_text().splitlines(keepends=True)
    (out / "points.jsonl").write_text("".join(kept[:-1]))
    assert jfl("sweep", "--config", out / "config.toml", "--out", out) == 2
    assert jfl("sweep", "--config", out / "config.toml", "--lr", 0.5, "--out", out, "--resume") == 2
    assert jfl("sweep", "--config", out / "config.toml", "--out", out, "--resume") == 0
    assert (
        table(tmp_path / "again") == table(out)
        and len((out / "points.jsonl").read_text().splitlines()) == len(kept) == 9
    )


@pytest.mark.slow
def test_failed_points_are_marked(tmp_path):
    grid = ["sweep", *TINY, "--l2", 1, "--rounds", 40, "--evaluate-every", 10, "--sweep"]
    assert jfl(*grid, "lr=0.1,100", "--out", tmp_path / "a") == 0
    assert ["failed" in r for r in summary(tmp_path / "a")] == [False, True]
    assert jfl(*grid, "lr=0.1,100", "--strict", "--out", tmp_path / "b") == 3
    assert jfl(*grid, "lr=100,110", "--out", tmp_path / "c") == 3
    assert all("failed" in r for r in summary(tmp_path / "c"))


@pytest.mark.slow
def test_a_small_demo(tmp_path, capsys):
    out = tmp_path / "demo"
    assert jfl("demo", "--rounds", 2, "--seeds", 2, "--out", out) == 0
    runs = summary(out)
    assert len(runs) == 2 * 5 and {r["seed"] for r in runs} == {0, 1}
    kinds = {(g["unit"], g["view"]) for r in runs for g in r["privacy"] if g["epsilon"] is not None}
    assert {("example", "server"), ("client", "third_party")} <= kinds
    worth = {r["name"]: guarantee_rows.best(r["privacy"])["epsilon"] for r in runs}
    assert {
        r["name"]: float(r["epsilon"]) if r["epsilon"] else None
        for r in table(out)
        if r["round"] == "2"
    } == worth
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(
        word in shown
        for word in ("ε", "unit", "adjacency", "view", "δ", "seconds", "±", "example", "client")
    )
    (out / "report.md").write_bytes(record.PAGES[".md"] + b"of the first")
    (out / "accuracy.png").write_text("mine")
    assert jfl("demo", "--rounds", 2, "--seeds", 2, "--out", out) == 0  # replaces the first
    assert not (out / "report.md").exists() and (out / "accuracy.png").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert jfl("demo", "--out", tmp_path / "other") == 2


@pytest.mark.parametrize(
    "args, unit, view, adjacency",
    [
        (["--batch", 16, "--rows", 600, "--steps", 5], "example", "server", "add_remove"),
        pytest.param(
            ["--rate", 0.1, "--cohort", 10, "--clients", 50],
            "example",
            "third_party",
            "add_remove",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                "--unit",
                "client",
                "--cohort",
                10,
                "--clients",
                50,
                "--sampler",
                "without_replacement",
            ],
            "client",
            "third_party",
            "replace_one",
            marks=pytest.mark.slow,
        ),
        (["--sampler", "full"], "example", "server", "replace_one"),
    ],
)
def test_epsilon_and_calibrate_agree(capsys, args, unit, view, adjacency):
    assert jfl("calibrate", "--epsilon", 3, "--rounds", 20, *args) == 0
    shown, told = capsys.readouterr()
    assert "warning" not in told
    assert all(word in shown for word in (unit, view, adjacency, "1e-05", "For simulation only"))
    z = next(
        float(line.split()[0])
        for line in shown.splitlines()
        if line.split() and line.split()[0][0].isdigit()
    )
    assert jfl("epsilon", "--noise-multiplier", z, "--rounds", 20, *args) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if unit in line).split()
    assert float(row[1]) == pytest.approx(3, rel=1e-3)


def test_local_steps_cost_a_client_nothing(capsys):
    """One release a round, whatever the client did before."""
    from jfl.cli.accounting import Numbers, guarantee_of_numbers

    few, many = (
        guarantee_of_numbers(Numbers(unit="client", rate=0.2, steps=s), 2.0).epsilon
        for s in (1, 50)
    )
    assert few == many


@pytest.mark.parametrize(
    "args",
    [
        ["--rate", 2],
        ["--batch", 16],
        ["--noise-multiplier", 0],
        ["--sampler", "lottery"],
        ["--rate", 0.1, "--cohort", 5],
        ["--rate", 0.1, "--delta", 1],
        ["--rate", 0.1, "--rounds", 0],
        ["--sampler", "full", "--rate", 0.1],
    ],
)
def test_bad_numbers_exit_2(args, capsys):
    assert jfl("epsilon", *args) == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.slow
def test_the_noise_of_a_config(trained, capsys):
    """Nearly the noise that it has, for nearly the epsilon that it has."""
    server = next(g for g in summary(trained)[0]["privacy"] if g["view"] == "server")
    epsilon = server["epsilon"] * 1.01
    assert jfl("calibrate", "--config", trained / "config.toml", "--epsilon", epsilon) == 0
    shown = capsys.readouterr().out
    assert 1.45 < float(shown.split("noise_multiplier = ")[1].split()[0]) < 1.5


def test_list_names_everything(capsys):
    assert jfl("list") == 0
    shown = capsys.readouterr().out
    for name in ("fedavg", "scaffold", "digits", "dirichlet", "poisson", "logistic", "cnn", "adam"):
        assert name in shown


def test_help_shows_examples(capsys):
    assert jfl("--help") == 0 and "example: jfl" in capsys.readouterr().out
    for command in main.COMMANDS:
        assert jfl(command, "--help") == 0
        assert f"example: jfl {command}" in " ".join(
            capsys.readouterr().out.replace("│", " ").split()
        )


PROGRAM = """
import runpy, sys
import jfl.cli
print([h for h in ("tyro", "matplotlib", "sklearn", "scipy.stats") if h in sys.modules])
sys.argv = ["jfl", "train", "--lr", "0", "--out", "run"]
runpy.run_module("jfl.cli", run_name="__main__", alter_sys=True)
"""


def test_as_a_program(tmp_path):
    """Its import loads nothing heavy, and its exit code is that of the command."""
    bad = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert bad.stdout.splitlines()[0] == "[]"
    assert bad.returncode == 2 and "lr" in bad.stderr and "Traceback" not in bad.stderr
    assert [p.name for p in tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--algorithm", "fedsgd", "--server-lr", "0.5"], "server_lr"),
        (["--mu", "2"], "mu"),
        (["--clip-norm", "0.5"], "clip_norm"),
        (["--view", "server"], "view"),
        (["--exponent", "2"], "exponent"),
        (["--partition", "iid", "--min-rows", "8"], "min_rows"),
        (["--hidden", "3"], "hidden"),
        (["--batch-sampler", "full"], "batch"),
        (["--allow-empty"], "allow_empty"),
    ],
)
def test_a_flag_without_effect_is_refused(flags, named, tmp_path, capsys):
    base = "--clients 6 --model logistic --cohort 3 --batch 4 --rounds 4".split()
    assert jfl("train", *base, *flags, "--out", tmp_path / "run") == 2
    assert f"{named}=" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.by_default(
    "fields0-add_remove", "fields1-replace_one", "fields2-add_remove", "fields3-replace_one"
)
@pytest.mark.parametrize(
    "fields, adjacency",
    [
        (dict(adjacency="add_remove", batch_sampler="full", batch=16), "add_remove"),
        (dict(batch_sampler="full"), "replace_one"),
        (dict(adjacency="add_remove", batch_sampler="poisson"), "add_remove"),
        (dict(adjacency="replace_one"), "replace_one"),
        (dict(adjacency="replace_one", batch_sampler="poisson"), "replace_one"),
        (dict(batch_sampler="truncated_poisson"), "zero_out"),
    ],
)
def test_adjacency_of_examples_is_what_was_asked_for(fields, adjacency):
    from jfl.privacy.guarantees import guarantee

    made, _ = build.build(
        config.Config(clients=6, cohort=3, model="logistic", noise_multiplier=3.0, **fields)
    )
    assert guarantee(made, 3, 1e-5, unit="example").adjacency == adjacency


@pytest.mark.parametrize("sampler", ["without_replacement", "truncated_poisson"])
def test_an_adjacency_that_the_batches_do_not_have_is_refused(sampler):
    fields = dict(adjacency="add_remove", batch_sampler=sampler, noise_multiplier=3.0)
    with pytest.raises(ValueError, match="adjacency"):
        build.build(config.Config(clients=6, cohort=3, model="logistic", **fields))


@pytest.mark.parametrize("seeds", ["0,4294967296", "0,99999999999999999999", "0,-1", "1,1"])
def test_seeds_that_are_no_other_seeds_are_refused(seeds, tmp_path, capsys):
    assert jfl("sweep", *TINY, "--sweep", f"seed={seeds}", "--out", tmp_path / "run") == 2
    assert "seed" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_sweep_over_partitions_tells_whose_data(tmp_path, no_programs):
    assert jfl("sweep", *TINY, "--sweep", "partition_seed=3,4", "--out", tmp_path / "run") == 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["data"]["partition"]["seed"] == 3


def test_conflicting_numbers_are_refused(capsys):
    assert jfl("epsilon", "--batch", 16, "--rows", 600, "--rate", 0.0001) == 2
    assert jfl("epsilon", "--sampler", "full", "--rate", 0.1) == 2
    assert "rate" in capsys.readouterr().err


@pytest.mark.slow
def test_algorithms_are_compared_with_what_some_of_them_need(tmp_path):
    assert (
        jfl(
            "sweep",
            *TINY,
            "--mu 0.5 --sweep algorithm=fedavg,fedprox,scaffold,fedsgd",
            "--out",
            tmp_path / "run",
        )
        == 0
    )
    losses = [run["loss"] for run in summary(tmp_path / "run")]
    assert len(set(losses)) == 4
    assert (
        jfl(
            "sweep", *TINY, "--mu 0.5 --sweep algorithm=fedavg,scaffold", "--out", tmp_path / "idle"
        )
        == 2
    )


def test_a_table_shows_brackets_as_they_are(capsys):
    console.table(None, [("a", False)], [("x [n, 28] in [0, 1]",)])
    assert "x [n, 28] in [0, 1]" in capsys.readouterr().out


def test_a_sweep_calibrates_each_setting_once_and_says_what_is_not_counted(
    tmp_path, monkeypatch, no_programs
):
    calls, calibrate = [], build.calibrate
    monkeypatch.setattr(
        build, "calibrate", lambda *a, **k: calls.append(k["epsilon"]) or calibrate(*a, **k)
    )
    assert (
        jfl("sweep", *EXACT, "--sweep epsilon=5,9 --sweep seed=0,1,2", "--out", tmp_path / "run")
        == 0
    )
    assert sorted(calls) == [5.0, 9.0]
    for run in summary(tmp_path / "run"):
        assert all(any("choosing among" in c for c in g["caveats"]) for g in run["privacy"])


def test_a_sweep_over_delta_proves_each_at_its_own(tmp_path, no_programs):
    assert (
        jfl(
            "sweep",
            *EXACT,
            "--noise-multiplier 2 --sweep delta=0.001,1e-06",
            "--out",
            tmp_path / "run",
        )
        == 0
    )
    loose, tight = (
        [(g["delta"], g["epsilon"]) for g in run["privacy"]] for run in summary(tmp_path / "run")
    )
    assert {d for d, _ in loose} == {1e-3} and {d for d, _ in tight} == {1e-6}
    assert all(a < b for (_, a), (_, b) in zip(loose, tight, strict=True))


# --- curves and calibration

QUICK = ["--rate", 0.1, "--rounds", 20]


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
    curve = curve_of(shown)
    assert curve == {n: float(f"{proved(n):.4g}") for n in (1, 2, 5, 10, 20)}
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]


def test_a_picture_says_what_it_shows(tmp_path, capsys):
    assert (
        jfl("calibrate", "--epsilon 3 --sampler full --rounds 20", "--plot", tmp_path / "c.svg")
        == 0
    )
    drawn = (tmp_path / "c.svg").read_text()
    texts = drawn.replace("<!-- ", "\n").replace(" -->", "\n").splitlines()
    for words in (
        "target ε = 3",
        "rounds",
        "gaussian_exact",
        "example",
        "replace_one",
        "server",
        "δ = 1e-05",
        "full sampling",
    ):
        assert any(words in text for text in texts), words
    assert jfl("epsilon", "--sampler", "full", "--plot", tmp_path / "d.pdf") == 0
    assert (tmp_path / "d.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    "name, words",
    [
        ("curve.jpg", ".svg"),
        ("curve", ".png"),
        ("none/curve.png", "directory"),
        ("file/curve.png", "directory"),
        ("folder.png", "ends in"),
    ],
)
@pytest.mark.parametrize("command", ["epsilon", "calibrate"])
def test_a_picture_that_cannot_be_written_is_refused_first(
    tmp_path, capsys, monkeypatch, command, name, words
):
    from jfl.cli import accounting as accountant

    monkeypatch.setattr(
        accountant, "guarantee_of_numbers", lambda *_: pytest.fail("computed before the refusal")
    )
    monkeypatch.setattr(accountant, "solve", lambda *_: pytest.fail("computed before the refusal"))
    monkeypatch.setattr(accountant, "build", lambda *_: pytest.fail("computed before the refusal"))
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "run.toml").write_text("epsilon = 3.0\n")
    assert jfl(command, *QUICK, "--plot", tmp_path / name) == 2
    assert words in capsys.readouterr().err
    assert jfl(command, "--config", tmp_path / "run.toml", "--plot", tmp_path / name) == 2
    assert words in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.png", "run.toml"]


@pytest.mark.by_default("args0-rounds-1")
@pytest.mark.parametrize(
    "args, name, more",
    [
        (["--over", "rounds", "--rate", 0.1], "rounds", 1),
        (["--over", "rate", "--rounds", 20], "rate", 1e-4),
        (
            ["--over", "rate", "--rounds", 5, "--sampler", "without_replacement", "--rows", 100],
            "batch",
            1,
        ),
        (
            [
                "--over",
                "rate",
                "--rounds",
                5,
                "--unit",
                "client",
                "--sampler",
                "without_replacement",
                "--clients",
                40,
            ],
            "cohort",
            1,
        ),
    ],
)
def test_calibrate_other_unknowns(capsys, args, name, more):
    """What is found reaches epsilon, and a little more does not."""
    import tyro

    from jfl.cli import accounting as accountant

    command = ["--epsilon", 1, "--noise-multiplier", 1.5, *args]
    assert jfl("calibrate", *command) == 0
    shown = capsys.readouterr().out
    asked = tyro.cli(accountant.Calibrate, args=[str(a) for a in command])
    found, z = accountant.solve(asked)
    assert f"{name} = {getattr(found, name):.9g}" in shown and z == 1.5
    epsilon = accountant.guarantee_of_numbers(found, z).epsilon
    over = dataclasses.replace(found, **{name: getattr(found, name) + more})
    assert (
        epsilon <= 1 < accountant.guarantee_of_numbers(over, z).epsilon
        and max(curve_of(shown).values()) <= 1
    )


@pytest.mark.parametrize(
    "args, words",
    [
        (["--over", "clients"], "over"),
        (["--over", "rounds"], "noise_multiplier"),
        (["--noise-multiplier", 1], "noise_multiplier"),
        (["--over", "rounds", "--noise-multiplier", 1, "--rounds", 5], "rounds"),
        (["--over", "rate", "--noise-multiplier", 1, "--rate", 0.1], "rate"),
        (["--over", "rate", "--noise-multiplier", 1, "--sampler", "full"], "sampler"),
        (["--over", "rate", "--noise-multiplier", 1, "--sampler", "without_replacement"], "rows"),
        (["--over", "rounds", "--noise-multiplier", 0.1, "--sampler", "full"], "epsilon"),
        (["--epsilon", -1], "epsilon"),
    ],
)
def test_calibrate_refuses(capsys, args, words):
    assert (
        jfl(
            "calibrate",
            *([] if "--rate" in args or "--sampler" in args else ["--rate", 0.1]),
            *args,
        )
        == 2
    )
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_curve_of_a_config(trained, tmp_path, capsys):
    file = trained / "config.toml"
    assert jfl("epsilon", "--config", file, "--plot", tmp_path / "curve.png") == 0
    shown = capsys.readouterr().out
    best = next(g for g in summary(trained)[0]["privacy"] if g["view"] == "server")
    assert max(curve_of(shown).values()) == float(f"{best['epsilon']:.4g}")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert jfl("calibrate", "--config", file, "--epsilon", 0.7, "--over", "rounds") == 0
    most = int(
        next(
            line for line in capsys.readouterr().out.splitlines() if line.startswith("rounds = ")
        ).split()[-1]
    )
    within = []
    for rounds in (most, most + 1):
        assert jfl("epsilon", "--config", file, "--rounds", rounds) == 0
        within.append(max(curve_of(capsys.readouterr().out).values()) <= 0.7)
    assert within == [True, False]
    assert jfl("calibrate", "--config", file, "--epsilon", 5, "--over", "rate") == 2
    assert "rate" in capsys.readouterr().err
    (tmp_path / "plain.toml").write_text("rounds = 3\n")
    assert jfl("epsilon", "--config", tmp_path / "plain.toml", "--plot", tmp_path / "none.png") == 2
    assert "guarantee" in capsys.readouterr().err and not (tmp_path / "none.png").exists()


def test_pictures_of_curves_at_extremes(tmp_path):
    """Nothing to draw on a logarithmic scale, lines far apart, one point."""
    import warnings

    import numpy as np

    promise = dict(unit="client", adjacency="replace_one", view="third_party", delta=1e-5)
    guarantee = promise | dict(method="pld")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i, (rounds, epsilons) in enumerate(
            [([1, 2, 3], [0.0, 0.0, 0.0]), ([1], [0.5]), ([1, 10], [1e-6, np.inf])]
        ):
            values = np.array(epsilons)
            pictures.draw_epsilon_curve(
                tmp_path / f"{i}.png", np.array(rounds), values, guarantee, "a setting"
            )
            assert (tmp_path / f"{i}.png").stat().st_size > 5000
