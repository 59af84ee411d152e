"""Run the notebooks, and store them with their outputs and pictures.

    python -m experiments.harness.notebooks                # all, in about five minutes
    python -m experiments.harness.notebooks quickstart     # one of them

A stored notebook has no traces of the machine or the time of its run: paths, warnings and metadata
are left out, and times become dashes.  Its metadata have a hash of the code that ran,
which a test compares with the code.
"""

import base64
import copy
import hashlib
import io
import os
import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

import jfl
from jfl.core import checks

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PUBLISHED = not jfl.REPOSITORY.startswith("OWNER/")
# The first cell of all notebooks.  Before a release it installs a wheel in the working folder.
INSTALL = (
    "%pip install -q jfl"
    if PUBLISHED
    else "!test -e jfl-*.whl && pip install -q jfl-*.whl  # in Colab, upload the wheel of jfl first"
)
BADGE = re.compile(r"\[!\[Open in Colab\]\(.*\)\n\n")
# What no output may have: warnings, and paths of this machine.
NOISE = ("Warning", "WARNING", "Traceback", str(ROOT), str(Path.home()))
TIMES = re.compile(r"\d+\.\d+ s\b")  # they depend on the device
NUM_COLOURS = 96


def badge(name: str) -> str:
    """Return a link that opens a notebook in Colab; "" before the repository has an address."""
    if not PUBLISHED:
        return ""
    path = f"{jfl.REPOSITORY}/blob/main/experiments/notebooks/{name}.ipynb"
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    return f"[![Open in Colab]({image})](https://colab.research.google.com/github/{path})\n\n"


def code_cells(notebook) -> list:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hash(notebook) -> str:
    """Return a hash of the code of a notebook."""
    code = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()


def printed(notebook) -> str:
    """Return what the cells of a notebook have printed, in their order."""
    outputs = [o for cell in code_cells(notebook) for o in cell.outputs]
    return "".join(o.get("text", "") for o in outputs)


def run(notebook):
    """Return a copy of a notebook with the outputs of a fresh run in the root of the repository."""
    notebook = copy.deepcopy(notebook)
    flags = os.environ.pop("XLA_FLAGS", None)  # flags of tests would make the code slow
    try:
        NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": str(ROOT)}},
        ).execute()
    finally:
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags
    return notebook


def clean(notebook) -> None:
    """Remove from a notebook what differs between runs of the same code, and shrink pictures."""
    for noise in NOISE:
        if noise in printed(notebook):
            checks.fail("notebooks", "outputs without warnings and paths", repr(noise))
    for cell in code_cells(notebook):
        cell.metadata = {}
        # on stderr, jfl says how long a program has been compiling
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = TIMES.sub("– s", output.text)
            if "image/png" in output.get("data", {}):
                output.data = {"image/png": shrink(output.data["image/png"])}
    code_cells(notebook)[0].outputs = []  # what pip prints
    notebook.metadata = dict(
        colab=dict(provenance=[]),
        jfl=dict(code=code_hash(notebook)),
        kernelspec=dict(display_name="Python 3", language="python", name="python3"),
        language_info=dict(name="python"),
    )


def shrink(png: str) -> str:
    """Return a picture (PNG in Base64) with few colours, a third of the size."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    out = io.BytesIO()
    few = picture.quantize(NUM_COLOURS, kmeans=3, dither=Image.Dither.NONE)
    few.save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode() + "\n"


def store(path: Path) -> None:
    """Run a notebook and write it with its outputs, its install cell and its badge."""
    notebook = nbformat.read(path, 4)
    notebook.cells[0].source = badge(path.stem) + BADGE.sub("", notebook.cells[0].source)
    code_cells(notebook)[0].source = INSTALL
    notebook = run(notebook)
    clean(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def main(names: list[str]) -> None:
    """Store the notebooks with these names; all, without names."""
    known = {path.stem: path for path in NOTEBOOKS}
    for name in names:
        checks.require_one_of("notebooks", tuple(known), name=name)
    for name in names or known:
        store(known[name])


if __name__ == "__main__":
    main(sys.argv[1:])
