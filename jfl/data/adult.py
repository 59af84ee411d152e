"""UCI Adult from its two published files, encoded by a fixed vocabulary."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from .image_files import data_folders

NUM_ROWS = {"adult.data": 32561, "adult.test": 16281}

# The published attributes in the order of the file. A number is what the raw value is divided by, a
# round one near the largest that the attribute can take. Text is the list of categories, without
# "?", which stands for an unknown value.
ATTRIBUTES = {
    "age": 100,
    "workclass": (
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
        "Without-pay Never-worked"
    ),
    "fnlwgt": 1e6,
    "education": (
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool"
    ),
    "education-num": 16,
    "marital-status": (
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse"
    ),
    "occupation": (
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces"
    ),
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "capital-gain": 1e5,
    "capital-loss": 5000,
    "hours-per-week": 100,
    "native-country": (
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands"
    ),
}
INCOMES = ["<=50K", ">50K"]
NUMBERS = [name for name, scale in ATTRIBUTES.items() if not isinstance(scale, str)]
CATEGORIES = {name: kind.split() for name, kind in ATTRIBUTES.items() if isinstance(kind, str)}
COLUMNS = tuple(NUMBERS) + tuple(
    f"{name}={value}" for name, values in CATEGORIES.items() for value in values
)


def read(where: str, data_dir: str | Path | None, download: bool) -> tuple:
    """Return x [32561, 105], y, x_test [16281, 105] and y_test, from the first folder that has both
    files."""
    folders = [folder / "adult" for folder in data_folders(data_dir)]
    has_files = lambda folder: all((folder / name).is_file() for name in NUM_ROWS)
    if download and not any(map(has_files, folders)):
        _download(where, folders[0])
    folder = next(filter(has_files, folders), None)
    if folder is None:
        checks.fail(
            where,
            "the files adult.data and adult.test of UCI Adult",
            f"nothing in {', '.join(map(str, folders))}",
            "Put the two files of the UCI repository into a folder DIR/adult and set "
            "JFL_DATA_DIR=DIR or pass data_dir=DIR. download=True gets OpenML's copy from here.",
            DataUnavailable,
        )
    arrays = []
    for name, num_rows in NUM_ROWS.items():
        try:
            x, y = _parse(folder / name)
        except (OSError, ValueError) as error:
            checks.fail(
                where,
                f"the published lines in {folder / name}",
                checks.describe_error(error),
                "Get the files of the UCI repository.",
                DataUnavailable,
            )
        if len(y) != num_rows:
            warnings.warn(
                f"jfl: {folder / name} has {len(y)} rows, but the published file has {num_rows}.",
                RuntimeWarning,
                stacklevel=3,
            )
        arrays += [x, y]
    return tuple(arrays)


def _parse(path: Path) -> tuple[np.ndarray, np.ndarray]:
    # adult.test begins with a comment and ends its labels with a full stop
    lines = path.read_text(encoding="ascii").splitlines()
    rows = {
        number: [field.strip() for field in line.rstrip(" .").split(",")]
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.startswith("|")
    }
    for number, fields in rows.items():
        if len(fields) != len(ATTRIBUTES) + 1:
            raise ValueError(f"{len(fields)} fields in line {number}")
    if not rows:
        raise ValueError("no rows")
    table = np.array(list(rows.values()))
    columns = dict(zip([*ATTRIBUTES, "income"], table.T))

    def positions(name, known):
        """Return the position of each value in a list that has to hold all of them."""
        matches = columns[name][:, None] == np.array(known)
        if not matches.any(1).all():
            unknown = str(columns[name][~matches.any(1)][0])
            raise ValueError(f"{unknown!r} is not a published {name}")
        return matches.argmax(1)

    x = np.zeros((len(table), len(COLUMNS)), np.float32)
    for i, name in enumerate(NUMBERS):
        values = columns[name].astype(np.int64)
        if values.min() < 0:
            raise ValueError(f"{values.min()} is not a published {name}")
        x[:, i] = values / ATTRIBUTES[name]
    first = len(NUMBERS)
    for name, known in CATEGORIES.items():
        one_hot = np.eye(len(known) + 1, dtype=np.float32)[positions(name, [*known, "?"])]
        x[:, first : first + len(known)] = one_hot[:, :-1]
        first += len(known)
    return x, positions("income", INCOMES).astype(np.int32)


def _download(where: str, folder: Path):
    """Write OpenML's copy as the two published files. It holds the rows of both in their order,
    those of adult.test first."""
    try:
        from sklearn.datasets import fetch_openml

        copy: Any = fetch_openml(
            "adult", version=2, as_frame=False, parser="liac-arff", cache=False
        )
    except Exception as error:  # of the network, the host, the disk or a missing package
        checks.fail(
            where,
            "a download that works",
            checks.describe_error(error),
            "Get the files on a machine with a network and pass data_dir=...",
            DataUnavailable,
        )
    columns = []
    for name in ATTRIBUTES:
        values, known = copy.data[:, copy.feature_names.index(name)], copy.categories.get(name)
        columns.append(
            [("?" if v != v else known[int(v)]) if known else str(int(v)) for v in values]
        )
    lines = [", ".join(fields) for fields in zip(*columns, copy.target, strict=True)]
    num_test = NUM_ROWS["adult.test"]
    # The first persons of the two published files: another order would be another split.
    firsts = [(columns[0][row], columns[2][row]) for row in (0, min(num_test, len(lines) - 1))]
    if len(lines) != sum(NUM_ROWS.values()) or firsts != [("25", "226802"), ("39", "77516")]:
        checks.fail(
            where,
            "the published rows in their order from OpenML",
            f"{len(lines)} rows with the first persons {firsts}",
            "Get the files of the UCI repository.",
            DataUnavailable,
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"adult.test": lines[:num_test], "adult.data": lines[num_test:]}.items():
        (folder / name).write_text("\n".join(part) + "\n", encoding="ascii")
