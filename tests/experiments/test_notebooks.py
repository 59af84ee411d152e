"""The notebooks run as they stand, print what is true, and point where the project is."""

import contextlib
import io
import json
import re
import time

import nbformat
import pytest
from helpers.paths import ROOT
from nbclient import NotebookClient

import jfl
from jfl.papers.as_printed import NAMES

NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)

# literals of each notebook that make it long, and what stands in their place when every cell is run
# in seconds
SHORTER = {
    "quickstart": {
        "rounds=40": "rounds=4",
        "[0.4, 0.7, 1.2, 2.5]": "[0.7, 1.2]",
        "range(3)": "range(2)",
        "(len(noise), 3)": "(len(noise), 2)",
    },
    "compare_algorithms": {
        "= 20, 10, 12, 1e-4": "= 20, 10, 2, 1e-4",
        "[2, 8, 32]": "[8]",
        '"FedAvg", "FedProx", "SCAFFOLD", "AdDPNFL", "FedSGD"]': '"FedAvg", "SCAFFOLD"]',
        "range(5), [100, 101]": "range(2), [100]",
        "(0.1, 0.3, 1, 3)": "(0.3, 1)",
    },
    "sweep_on_accelerator": {
        "ROUNDS = 10": "ROUNDS = 2",
        "[0.5, 1.0, 2.0, 4.0]": "[0.5, 1.0]",
        "[0.1, 0.2, 0.5, 1.0]": "[0.2, 0.5]",
        "range(4)": "range(2)",
        "(20, 5, 1)": "(20,)",
        "jfl.models.mlp(fed, hidden=(64,))": "jfl.models.logistic(fed)",
    },
    "your_own_algorithm": {
        "= 20, 1e-4, [2, 8]": "= 3, 1e-4, [8]",
        "[0.1, 0.3, 1.0, 3.0], range(5)": "[0.3, 1.0], range(2)",
    },
    "read_a_paper": {
        ("8.0, 20, [0.03, 0.3, 1.0, 3.0], range(3), [100, 101]"): (
            "8.0, 3, [0.3, 1.0], range(2), [100]"
        ),
        '"noble2022", "chen2024", "li2025", "ranaweera2025", "talaei2024"]': '"li2025"]',
    },
}


def shorten(notebook, name):
    source = "".join(c.source for c in notebook.cells)
    missing = [long for long in SHORTER[name] if long not in source]
    assert not missing, f"{name} no longer holds {missing}"
    for cell in notebook.cells:
        for long, short in SHORTER[name].items():
            cell.source = cell.source.replace(long, short)


def printed(notebook):
    """What its cells print, one after the other; an error in a cell is one here."""
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    return "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", []))


def numbers(pattern, text):
    """The groups of all matches, as floats."""
    return [
        [float(v) for v in (m if isinstance(m, tuple) else (m,))] for m in re.findall(pattern, text)
    ]


# --- what must be true of the words of each notebook; `whole`: of its full size
# ---------------------------------------


def quickstart(text, whole):
    accuracy = numbers(r"test accuracy (\d\.\d+)", text)
    assert len(accuracy) == 2 and f"{12 if whole else 4} runs, 1 program" in text
    assert "epsilon = 8 at" in text  # calibration reached its target
    assert not whole or min(accuracy)[0] > 0.6  # learned, both units


def compare_algorithms(text, whole):
    targets, names = ([2, 8, 32], 5) if whole else ([8], 2)
    assert f"{448 if whole else 18} runs, {names + 1} programs" in text
    promise = r"0\.0001 +example +replace_one +server"
    rows = re.findall(rf"^(\w+) +([\d.]+) +{promise} +([\d.]+) +[\d.]+ +([\d.]+) ±", text, re.M)
    assert len(rows) == names * len(targets)
    for i, (_, epsilon, *_) in enumerate(rows):  # equal privacy, as proved
        assert (
            0.99 * targets[i % len(targets)] < float(epsilon) <= targets[i % len(targets)] + 0.005
        )
    assert len(paid := numbers(r"one run has ε = (\d+); .* have ε = ([\d.]+)", text)) == len(
        targets
    )
    assert all(1.2 * one < many for one, many in paid)  # choosing is not free
    assert len(re.findall(r"less FedAvg [+-]", text)) == (names - 1) * len(targets)
    noise = {name: float(z) for name, _, z, _ in rows}  # at the largest epsilon
    assert noise["FedAvg"] == noise["SCAFFOLD"]
    if whole:
        assert noise["FedSGD"] < noise["FedAvg"]  # it releases once a round
        fedavg = [float(accuracy) for name, *_, accuracy in rows if name == "FedAvg"]
        assert fedavg == sorted(fedavg) and fedavg[-1] > 0.6


def sweep_on_accelerator(text, whole):
    runs = 64 if whole else 8
    assert f"{runs} runs, 1 program:" in text and f"{2 * runs} runs, 2 programs" in text
    assert "device: cpu, platform cpu" in text
    ((apart,),) = numbers(r"largest difference in accuracy ([\d.]+)", text)
    assert apart < 0.02  # a few test rows, by the order of sums
    epsilons = re.findall(r"^b?float\d+ *: .* epsilon = ([\d.]+)", text, re.M)
    assert len(epsilons) == 2 and len(set(epsilons)) == 1
    chunks = numbers(r"clients at once: ([\d.]+) MiB .* accuracy ([\d.]+)", text)
    ((alone,),) = numbers(r"the same run in the sweep: accuracy ([\d.]+)", text)
    assert chunks and all(abs(accuracy - alone) < 0.02 for _, accuracy in chunks)
    ((size, again, first),) = numbers(
        r"([\d.]+) MiB in the cache; .*: ([\d.]+) s, at first ([\d.]+) s", text
    )
    assert size > 0.1
    if whole:
        assert chunks[0][0] > 2 * chunks[-1][0] and again < first


def your_own_algorithm(text, whole):
    ((apart,),) = numbers(r"largest difference to the NumPy loop ([\de.+-]+),", text)
    assert 0 < apart < 1e-5
    assert f"{96 if whole else 12} runs, 2 programs" in text
    worth = re.findall(r"^Fed\w+: epsilon = ([\d.]+) .*view: (\w+)", text, re.M)
    assert [view for _, view in worth] == ["server", "server", "third_party"]
    server, ours, third = (float(epsilon) for epsilon, _ in worth)
    assert server == ours == (2 if whole else 8) > third  # who sees models only may miss a client
    refused = re.findall(r"^(?:noise|a divisor) .*: ValueError: (\w+): need", text, re.M)
    assert refused == ["chain", "chain", "plan"] and "accepted" not in text
    assert len(re.findall(r"^(?:no noise|not declared): no guarantee", text, re.M)) == 2
    accuracy = numbers(r"accuracy ([\d.]+) ±", text)
    assert len(accuracy) == (4 if whole else 2) and (not whole or min(accuracy)[0] > 0.3)


def read_a_paper(text, whole):
    settings = re.findall(
        r"^(\w+2\d+) +(.*?) +example +(?:server|third party) +\S+ +([\d.]+) +(\S+)$", text, re.M
    )
    assert {paper for paper, *_ in settings} == set(NAMES)
    for paper, setting, claimed, proved in settings:
        ratio = float(proved) / float(claimed)
        less_private = paper in ("li2025", "talaei2024") or "R1" in setting
        holds = (
            abs(ratio - 1) < 0.01 if "R5" in setting else ratio > 2 if less_private else ratio < 1
        )
        assert holds, (paper, setting, ratio)
    runs = re.findall(
        r"^(\w+2\d+) +(as_printed|sound) +\w+ +\w+ +([\d.]+)? +(\S+) +[\d.]+  [\d.]+ ±", text, re.M
    )
    trained = NAMES if whole else ("li2025",)
    assert {r[:2] for r in runs} == {(p, mode) for p in trained for mode in ("as_printed", "sound")}
    for paper, mode, claimed, proved in runs:
        if mode == "sound":  # calibration reached its target
            assert claimed == "" and 7.9 < float(proved) <= 8.0001
        else:  # their formula chose the noise, or more
            assert 2 < float(claimed) <= 8.0001
            assert float(proved) < 8 if paper in ("noble2022", "chen2024") else float(proved) > 16
        assert paper != "li2025" or mode == "sound" or proved == "inf"
    assert len(re.findall(r"noise that is worth ε = 8 (?:costs|gains|changes)", text)) == len(
        trained
    )


@pytest.mark.slow
def test_the_quickstart_runs(monkeypatch):
    """In this process, of another model: a kernel, and a larger program, take longer than all the
    rest.  That the cells of every notebook run as they stand is of the slow run."""
    path = next(p for p in NOTEBOOKS if p.stem == "quickstart")
    notebook = nbformat.read(path, 4)
    shorten(notebook, path.stem)
    namespace, out = {}, io.StringIO()
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "backend", "agg")
    with contextlib.redirect_stdout(out):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                source = cell.source.replace("%pip", "raise ImportError #")
                source = source.replace(
                    "jfl.models.mlp(fed, hidden=(32,))", "jfl.models.logistic(fed)"
                )
                exec(compile(source, path.name, "exec"), namespace)
    namespace["plt"].close("all")
    quickstart(out.getvalue(), whole=False)


@pytest.mark.slow  # each takes half a minute even when it is short
@by_name
def test_every_cell_runs(path):
    """All cells and all calls, with fewer rounds and runs."""
    notebook = nbformat.read(path, 4)
    assert not any(c.get("outputs") for c in notebook.cells), "commit notebooks without outputs"
    shorten(notebook, path.stem)
    text = printed(notebook)
    print(text)
    globals()[path.stem](text, whole=False)


@pytest.mark.slow
@by_name
def test_notebook_runs(path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # code that runs fast, as a user has it
    begun = time.monotonic()
    text = printed(nbformat.read(path, 4))
    print(f"{text}\n{path.name}: {time.monotonic() - begun:.0f} s")
    globals()[path.stem](text, whole=True)


# --- where they point


def test_every_notebook_is_known():
    assert {n.stem for n in NOTEBOOKS} == set(SHORTER)


def links(text):
    return re.findall(
        r"colab\.research\.google\.com/github/([\w.-]+/[\w.-]+)/blob/main/([\w./-]+)", text
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_badges_point_into_the_tree(path):
    found = links(path.read_text())
    assert found
    for repository, file in found:
        assert repository == jfl.REPOSITORY
        assert (ROOT / file) == path, file


def test_notebook_installs_from_the_repository():
    for path in NOTEBOOKS:
        source = "".join(
            "".join(c["source"])
            for c in json.loads(path.read_text())["cells"]
            if c["cell_type"] == "code"
        )
        assert f"git+https://github.com/{jfl.REPOSITORY}" in source
