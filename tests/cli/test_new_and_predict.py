"""`jfl new`, `jfl predict`, `jfl.load`."""

import csv
import subprocess
import sys

import jax
import numpy as np
import pytest
from helpers import pretended
from helpers.problems import same_bits

import jfl
from jfl.cli import main
from jfl.runs import build, sweep, train
from jfl.runs.load import read_rows

TINY = (
    "--clients 6 --min-rows 8 --model logistic --sampler full --batch-sampler full --steps 2 "
    "--rounds 4 --evaluate-every 2 --noise-multiplier 1.5"
).split()


def run(*args) -> int:
    return main.main([str(a) for a in args])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("predict") / "run"
    assert run("train", *TINY, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def loaded(trained):
    return jfl.load(trained)


# --- load


def test_a_run_is_read_back(loaded, tmp_path):
    assert loaded.history["round"] == [2, 4] and int(loaded.run.round) == 4
    again = jfl.simulate(jax.random.key(loaded.config.seed), loaded.plan, 4)
    assert same_bits(again.params, loaded.params)
    assert repr(loaded).startswith("LoadedRun, of round 4\nPlan: fedavg")
    fed = loaded.plan.fed
    labels = loaded.predict(fed.x_test).argmax(-1)
    accuracy = (labels == np.asarray(fed.y_test)).mean()
    assert accuracy == pytest.approx(loaded.history["accuracy"][-1])
    for folder, words in ((tmp_path / "none", "which is not there"), (tmp_path, "without them")):
        with pytest.raises(jfl.errors.DataUnavailable, match=words):
            jfl.load(folder)


# --- predict


@pytest.mark.parametrize("text", ['"1","2"\n3,4\n', "infos,b\n1,2\n3,4\n", "1,2\n3,4\n", "nan,b\n"])
def test_the_first_line_of_a_csv_is_a_header_if_it_is_no_number(text, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    like = jax.ShapeDtypeStruct((2,), np.float32)
    if text.startswith("nan"):
        with pytest.raises(ValueError, match="rows of numbers"):
            read_rows(tmp_path / "rows.csv", like)
    else:
        assert read_rows(tmp_path / "rows.csv", like).tolist() == [[1, 2], [3, 4]]


def test_a_header_of_numbers_is_no_row(tmp_path):
    path, like = tmp_path / "rows.csv", jax.ShapeDtypeStruct((2,), np.float32)
    path.write_text("1,0\n5,6\n7,8\n")
    assert read_rows(path, like, ["0", "1"]).tolist() == [[6, 5], [8, 7]]
    assert read_rows(path, like, ["0", "2"]).tolist() == [[1, 0], [5, 6], [7, 8]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,a,b\n1,2,3\n", "rows.csv: several columns named 'a'"),
        ("a,c\n1,2\n", "rows.csv: its header has no b, but a, c. Rename them, or remove"),
    ],
)
def test_a_header_without_each_column_once_is_refused(text, message, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "rows.csv", jax.ShapeDtypeStruct((2,), np.float32), ["a", "b"])


@pytest.mark.parametrize(
    "x, dtype, message",
    [
        (np.full((3, 2), 200, np.uint8), np.float32, "as float.* got uint8. Images: x / 255"),
        (np.array([[1.0, 2.5]]), np.int32, "integers in .*, as in the run, but got float64"),
        (np.array([[1, 2**40]]), np.int32, "int32 integers in .*, but got int64, such as 1099511"),
        (np.array([[1.0, 1e10]]), np.int32, "int32 .*, but got float64, such as 10000000000.0"),
    ],
)
def test_rows_that_training_would_refuse_are_refused(x, dtype, message, tmp_path):
    np.save(tmp_path / "rows.npy", x)
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path / "rows.npy", jax.ShapeDtypeStruct((2,), dtype))
    np.save(tmp_path / "rows.npy", np.array([[1, 2]], np.uint8))
    like = jax.ShapeDtypeStruct((2,), np.int32)
    assert read_rows(tmp_path / "rows.npy", like).tolist() == [[1, 2]]


@pytest.mark.parametrize("kind", ["npy", "npz", "header.csv", "flat.npy"])
def test_predictions_of_a_file(trained, loaded, tmp_path, kind, capsys):
    x = np.asarray(loaded.plan.fed.x_test)[:5]
    path = tmp_path / f"rows.{kind}"
    flat = x.reshape(5, -1)
    if kind == "npz":
        np.savez(path, x=x, other=np.zeros(2))
    elif kind.endswith("npy"):
        np.save(path, flat if kind.startswith("flat") else x)
    else:
        names = ",".join(f"pixel_{i}" for i in range(64)) if kind.startswith("header") else ""
        np.savetxt(path, flat, delimiter=",", header=names, comments="")
    out = tmp_path / "predictions.csv"
    assert run("predict", trained, "--data", path, "--out", out) == 0
    lines = list(csv.DictReader(out.open()))
    logits = loaded.predict(x)
    assert [int(line["label"]) for line in lines] == logits.argmax(-1).tolist()
    shares = np.asarray(jax.nn.softmax(logits, -1))
    mine = [[float(line[f"p_{j}"]) for j in range(10)] for line in lines]
    np.testing.assert_allclose(mine, shares, rtol=1e-4)
    if kind == "npy":
        capsys.readouterr()
        assert run("predict", trained, "--data", path) == 0
        assert capsys.readouterr().out == out.read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["predict"], "the directory of a run first"),
        (["predict", "RUN"], "expected --data FILE"),
        (["predict", "RUN", "--data", "nothing.npy"], "rows of numbers"),
        (["predict", "RUN", "--data", "rows.txt"], "a file .npy, .npz or .csv"),
        (["predict", "RUN", "--data", "wrong.npy"], "rows of shape"),
        (["predict", "RUN", "--data", "several.npz"], "no array named x among a, b"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_words_of_predict(trained, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    np.save("wrong.npy", np.zeros((2, 3)))
    np.savez("several.npz", a=np.zeros(2), b=np.zeros(2))
    assert run(*[str(trained) if w == "RUN" else w for w in words]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


@pytest.fixture(scope="module")
def rows_of_owners(tmp_path_factory):
    """A file of rows with labels and owners, and the words that train on it."""
    path = tmp_path_factory.mktemp("file") / "rows.csv"
    rows = np.random.default_rng(0).normal(size=(120, 2)).round(2).tolist()
    lines = [f"{a},{int(a > 0)},{b},town{i % 3}" for i, (a, b) in enumerate(rows)]
    path.write_text("\n".join(["a,sick,b,town", *lines]))
    flags = "--label sick --owner town --model logistic --batch 4 --rounds 1 --noise-multiplier 1"
    return path, ["train", "--data", path, *flags.split()]


def test_rows_are_predicted_as_they_were_preprocessed(rows_of_owners, tmp_path, capsys):
    path, words = rows_of_owners
    for step in ("unit_norm", "standardise"):
        assert run(*words, "--preprocess", step, "--out", tmp_path / step) == 0
    # the columns of labels and owners are left out
    assert run("predict", tmp_path / "unit_norm", "--data", path, "--out", tmp_path / "p.csv") == 0
    x = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 2), dtype=np.float32)
    outputs = jfl.load(tmp_path / "unit_norm").predict(x / np.linalg.norm(x, axis=1)[:, None])
    lines = list(csv.DictReader((tmp_path / "p.csv").open()))
    shares = np.asarray(jax.nn.softmax(outputs, -1))[:, 1]
    np.testing.assert_allclose([float(line["p_1"]) for line in lines], shares, rtol=1e-4)
    assert run("predict", tmp_path / "standardise", "--data", path) == 2
    error = capsys.readouterr().err
    assert "standardise, which was fitted on its training rows. Preprocess your rows" in error


def test_columns_are_found_by_name_and_labels_keep_their_words(tmp_path, capsys):
    path, rows = tmp_path / "rows.csv", np.random.default_rng(0).normal(size=(60, 2)).round(2)
    lines = [f"{a},{'yes' if a > 0 else 'no'},{b},town{i % 3}" for i, (a, b) in enumerate(rows)]
    path.write_text("\n".join(["a,sick,b,town", *lines, ""]))
    flags = "--label sick --owner town --model logistic --batch 4 --rounds 1 --noise-multiplier 1"
    assert run("train", "--data", path, *flags.split(), "--out", tmp_path / "run") == 0
    capsys.readouterr()
    other = tmp_path / "other.csv"
    other.write_text("\n".join(["id,b,a", *(f"{i},{b},{a}" for i, (a, b) in enumerate(rows))]))
    logits = jfl.load(tmp_path / "run").predict(rows.astype(np.float32))
    for file in (path, other):
        assert run("predict", tmp_path / "run", "--data", file) == 0
        found = list(csv.DictReader(capsys.readouterr().out.splitlines()))
        assert [line["label"] for line in found] == [("no", "yes")[i] for i in logits.argmax(-1)]
        shares = np.asarray(jax.nn.softmax(logits, -1))[:, 1]
        np.testing.assert_allclose([float(line["p_yes"]) for line in found], shares, rtol=1e-4)
    other.write_text("a,c\n1,2\n")
    assert run("predict", tmp_path / "run", "--data", other) == 2
    assert "no b, but a, c. Rename them, or remove the header" in capsys.readouterr().err


@pytest.mark.parametrize("command, axis", [("train", []), ("sweep", ["--sweep", "lr=0.1,0.2"])])
def test_a_run_whose_data_have_changed_is_not_loaded(command, axis, tmp_path, monkeypatch):
    """A frame would show the epsilon of the new rows, and predictions their columns and words."""
    monkeypatch.setattr(train, "simulate", pretended.simulate)
    monkeypatch.setattr(sweep, "compute", pretended.compute)
    path, out = tmp_path / "rows.npz", tmp_path / "run"
    x, owner = np.random.default_rng(0).normal(size=(40, 2)), np.arange(40) // 20
    np.savez(path, x=x, y=np.arange(40) % 2, owner=owner)
    flags = "--model logistic --batch 4 --rounds 1 --noise-multiplier 1 --out".split()
    assert run(command, "--data", path, *axis, *flags, out) == 0
    jfl.load(out)
    np.savez(path, x=np.tile(x, (9, 1)), y=np.arange(360) % 2, owner=np.tile(owner, 9))
    build._dataset.cache_clear()
    build._federation.cache_clear()
    wrong = "the data of .*with checksum .*Put back the data"
    with pytest.raises(jfl.errors.ResumeRefused, match=wrong):
        jfl.load(out)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("rows.csv", "1,2\nnan,4\n5,6\n", "nan or inf in 1 row"),
        ("rows.csv", "1,2\n3,inf\n", "the first is 1"),
        ("rows.csv", "", "no rows"),
        ("rows.csv", "a,b\n", "no rows"),
        ("rows.npz", [["1", "high"]], "could not convert"),
    ],
)
def test_rows_that_are_no_finite_numbers_are_refused(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text) if name.endswith("csv") else np.savez(path, x=np.array(text))
    with pytest.raises(ValueError, match=message):
        read_rows(path, jax.ShapeDtypeStruct((2,), np.float32))


@pytest.mark.parametrize(
    "text, message",
    [
        ("a,sick\n1,no\n2,\n3,yes\n", "none in 1 row.s., the first is 1"),
        ("a,sick\n1,0\n,1\n", "numbers in column 'a', but got '' in row 1"),
        ("a,sick\n1,0\n2\n", "row 1 has 1 cells, but the header has 2"),
        ("a,b,sick\n1,0\n2,1\n", "row 0 has 2 cells, but the header has 3"),
        ("", "column 'label'|column 'sick'"),
        ("a,a,sick\n1,7,0\n2,8,1\n", "several columns named 'a'"),
        (f"a,sick\n1,{'9' * 20}\n2,1\n3,1\n", "y of integers, but got dtype float64"),
        ("a,owner,sick\n1,x,0\n2,,1\n3,x,0\n", "an owner of every row.* the first is 1"),
        ("a;sick\n1;0\n2;1\n", "got a;sick. Separate columns by commas"),
        ("a,ill\n1,0\n2,1\n", "got a, ill. Name the column of labels by label= .--label"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_the_row(text, message, tmp_path):
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        jfl.datasets.file(str(tmp_path / "rows.csv"), "sick")


def test_a_missing_column_of_owners_is_named(rows_of_owners, tmp_path, capsys):
    path, words = rows_of_owners
    assert run(*[{"town": "hospital"}.get(w, w) for w in words], "--out", tmp_path / "run") == 2
    assert "no column 'hospital'; columns: a, sick, b, town. Name" in capsys.readouterr().err


# --- new


@pytest.mark.slow
def test_a_new_algorithm_passes_its_test(tmp_path, capsys):
    assert run("new", "algorithm", "fedmine", "--out", tmp_path / "mine") == 0
    files = sorted(p.name for p in (tmp_path / "mine").iterdir())
    assert files == ["fedmine.md", "fedmine.py", "test_fedmine.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_fedmine.py"],
        cwd=tmp_path / "mine",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    # a change that the pseudo-code does not have is noticed
    source = (tmp_path / "mine" / "fedmine.py").read_text()
    assert "mu * (w - start)" in source
    capsys.readouterr()
    assert run("new", "algorithm", "fedmine", "--out", tmp_path / "mine") == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert (tmp_path / "mine" / "fedmine.py").read_text() == source


@pytest.mark.slow
def test_a_new_project_runs_and_passes_its_test(tmp_path):
    assert run("new", "project", "mine", "--out", tmp_path) == 0
    here = dict(cwd=tmp_path / "mine", text=True, check=True, timeout=300)
    printed = subprocess.run([sys.executable, "run.py"], capture_output=True, **here).stdout
    results = {path.name for path in (tmp_path / "mine" / "results").iterdir()}
    assert results == {"accuracy.csv", "accuracy.png", "report.md"}
    with (tmp_path / "mine" / "results" / "accuracy.csv").open() as file:
        plain, *private = csv.DictReader(file)
    targets = [float(row["target"]) for row in private]
    proved = [float(row["epsilon"]) for row in private]
    assert proved == pytest.approx(targets, rel=0.01) and plain["epsilon"] == "inf"
    accuracy = [float(row["accuracy"]) for row in (*private, plain)]
    assert accuracy == sorted(accuracy) and accuracy[-1] > 0.85
    report = (tmp_path / "mine" / "results" / "report.md").read_text()
    assert "(proved; unit: example" in report and f"{accuracy[-2]:.3f} ± " in report
    assert len(printed.splitlines()) == len(private) + 2
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], **here)


def test_a_new_project_has_all_of_its_parts(tmp_path, capsys):
    """A cheap check: the modules import each other, and the plan is private."""
    assert run("new", "project", "mine", "--out", tmp_path) == 0
    files = sorted(path.name for path in (tmp_path / "mine").iterdir())
    parts = ["README.md", "data.py", "model.py", "plan.py", "run.py", "test_plan.py"]
    assert files == parts and "python run.py" in capsys.readouterr().out
    for name in parts:
        text = (tmp_path / "mine" / name).read_text()
        assert "mine" in text and "NAME" not in text
    program = "import run; plan = run.make_plan(4.0); print(run.jfl.guarantee(plan, 2, 1e-4))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "mine", capture_output=True, text=True
    )
    assert "(proved; unit: example, adjacency: add_remove, view: server" in done.stdout
    assert run("new", "project", "mine", "--out", tmp_path) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "algorithm NAME"),
        (["dataset", "mine"], "algorithm NAME"),
        (["project"], "project NAME"),
        (["project", "my-digits"], "a lower-case identifier"),
        (["algorithm", "class"], "a lower-case identifier"),
        (["algorithm", "fed-mine"], "a lower-case identifier"),
        (["algorithm", "FedMine"], "a lower-case identifier"),
        (["algorithm", "optax"], "hide that module"),
        (["project", "wave"], "hide that module"),  # of the standard library, not imported here
        (["project", "__main__"], "hide that module"),
    ],
)
def test_new_needs_a_kind_and_a_name(words, message, tmp_path, capsys):
    assert run("new", *words, "--out", tmp_path) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
