"""UCI Adult, read from its two published files and encoded with a fixed vocabulary."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from .image_files import data_folders, readable
from .rows import Dataset, make_dataset

NUM_ROWS = {"adult.data": 32561, "adult.test": 16281}

# The published attributes in the order of the file. A numeric attribute has the number by which its
# raw values are divided, a round number near the largest value. A categorical attribute has the
# list of its categories, without "?", which marks an unknown value.
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
NUMBERS = {name: scale for name, scale in ATTRIBUTES.items() if not isinstance(scale, str)}
CATEGORIES = {name: kind.split() for name, kind in ATTRIBUTES.items() if isinstance(kind, str)}


def adult(data_dir: str | Path | None = None) -> Dataset:
    """Return UCI Adult: x [32561, 105], 16,281 test rows, 2 classes.

    Label 1 means an income above 50,000 dollars. The columns of x are

    - age / 100, fnlwgt / 1e6, education-num / 16, capital-gain / 1e5, capital-loss / 5000 and
      hours-per-week / 100,
    - then a column of 0 and 1 for each of the 99 categories in the published attribute list. All
      columns of an attribute are 0 if its value is unknown ("?").

    This encoding does not depend on the rows.

    Other Parameters:
        data_dir: the folder with the files adult/adult.data and adult/adult.test. None searches the
            folders of `mnist`.

    Raises:
        DataUnavailable: if there are no files, or a value is not in the attribute list.

    Warns:
        RuntimeWarning: if the files do not have the published 32,561 and 16,281 rows.

    References:
        Becker and Kohavi, UCI repository, 1996.
    """
    where = "datasets.adult"
    folders = [folder / "adult" for folder in data_folders(data_dir)]
    has_files = lambda folder: all((folder / name).is_file() for name in NUM_ROWS)
    folder = next(filter(has_files, folders), None)
    if folder is None:
        checks.fail(
            where,
            "the files adult.data and adult.test of UCI Adult",
            f"nothing in {', '.join(map(str, folders))}",
            "Put the two files of the UCI repository into a folder DIR/adult and set "
            "JFL_DATA_DIR=DIR or pass data_dir=DIR.",
            DataUnavailable,
        )
    rows: list[Any] = []
    for name, num_rows in NUM_ROWS.items():
        with readable(where, f"the published lines in {folder / name}"):
            x, y = _read(folder / name)
        if len(y) != num_rows:
            warnings.warn(
                f"jfl: {folder / name} has {len(y)} rows, but the published file has {num_rows}.",
                RuntimeWarning,
                stacklevel=2,
            )
        rows += [x, y]
    return make_dataset(where, rows[0], rows[1], rows[2], rows[3], 2, "adult")


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return x Float32[n, 105] and y Int32[n] of one of the published files."""
    # adult.test begins with a comment, "|", and ends its labels with a full stop.
    table = np.loadtxt(path, "U40", comments="|", delimiter=",", ndmin=2, encoding="ascii")
    columns = dict(zip([*ATTRIBUTES, "income"], np.char.strip(table.T, " ."), strict=True))

    def positions(name, known):
        """Return the position of each value of a column in the list of its known values."""
        matches = columns[name][:, None] == np.array(known)
        if not matches.any(1).all():
            unknown = str(columns[name][~matches.any(1)][0])
            raise ValueError(f"{unknown!r} is not a published {name}")
        return matches.argmax(1)

    x = []
    for name, scale in NUMBERS.items():
        values = columns[name].astype(np.int64)
        if values.min() < 0:
            raise ValueError(f"{values.min()} is not a published {name}")
        x.append((values / scale)[:, None])
    for name, known in CATEGORIES.items():
        x.append(np.eye(len(known) + 1)[positions(name, [*known, "?"])][:, :-1])
    return np.hstack(x).astype(np.float32), positions("income", INCOMES).astype(np.int32)
