"""UCI Adult from its two published files, without pandas: one line a person, encoded by a fixed
vocabulary.

Imports jfl.core.checks, its neighbour prepared, and NumPy; scikit-learn inside the function that
downloads.
"""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..core import checks
from ..core.errors import DataUnavailable
from ..core.lazy import explain_missing_package
from . import tfds

FILES = {"adult.data": 32561, "adult.test": 16281}  # published rows

# Published attributes in the order of the file.  A number is what the raw value is divided by, a
# round one near the largest that the attribute can take; text is the list of categories, without
# "?", which says that nobody knows.
ATTRIBUTES = {
    "age": 100,
    "workclass": (
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov "
        "Without-pay Never-worked"
    ),
    "fnlwgt": 1e6,
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th "
    "12th Masters 1st-4th "
    "10th Doctorate 5th-6th Preschool",
    "education-num": 16,
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed "
    "Married-spouse-absent "
    "Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
    "Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv "
    "Protective-serv "
    "Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "capital-gain": 1e5,
    "capital-loss": 5000,
    "hours-per-week": 100,
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany "
    "Outlying-US(Guam-USVI-etc) India Japan "
    "Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico "
    "Portugal "
    "Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala "
    "Nicaragua "
    "Scotland Thailand Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
}
INCOMES = ("<=50K", ">50K")
NUMBERS = [name for name, kind in ATTRIBUTES.items() if not isinstance(kind, str)]
CATEGORIES = {name: kind.split() for name, kind in ATTRIBUTES.items() if isinstance(kind, str)}
COLUMNS = tuple(NUMBERS) + tuple(
    f"{name}={value}" for name, values in CATEGORIES.items() for value in values
)


def read(where: str, data_dir: str | Path | None, download: bool) -> tuple:
    """x [32561, 105] and y, x_test [16281, 105] and y_test, from the first place that has both
    files."""
    places = [place / "adult" for place in tfds.places(data_dir)]
    if download and not _found(places):
        _download(where, places[0])
    folder = _found(places)
    if folder is None:
        checks.fail(
            where,
            "the files adult.data and adult.test of UCI Adult",
            f"nothing in {', '.join(map(str, places))}",
            "Put the two files of the UCI repository into a folder DIR/adult and set "
            "JFL_DATA_DIR=DIR or pass "
            "data_dir=DIR.  download=True gets OpenML's copy from here.",
            error=DataUnavailable,
        )
    parts = []
    for name, published in FILES.items():
        x, y = _parse(where, folder / name)
        if len(y) != published:
            warnings.warn(
                f"jfl: {folder / name} has {len(y)} rows, the published file {published}.",
                RuntimeWarning,
                stacklevel=3,
            )
        parts += [x, y]
    return tuple(parts)


def _found(places) -> Path | None:
    return next(
        (place for place in places if all((place / name).is_file() for name in FILES)), None
    )


def _parse(where, path):
    rows, marks, line_numbers = [], [], []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        checks.fail(
            where,
            f"a readable file {path}",
            f"{type(error).__name__}: {error}",
            error=DataUnavailable,
        )
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("|"):  # adult.test begins with a comment
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(ATTRIBUTES) + 1:
            checks.fail(
                where,
                f"{len(ATTRIBUTES) + 1} fields a line",
                f"{len(fields)} in {path}, line {number}",
            )
        rows.append(fields[:-1])
        marks.append(fields[-1].removesuffix("."))  # adult.test ends its labels with a full stop
        line_numbers.append(number)
    if not rows:
        checks.fail(where, "at least one row", f"none in {path}")
    columns = dict(zip(ATTRIBUTES, zip(*rows, strict=True), strict=True))

    def told(name, values, known):
        """Each value's number in `known`; a line that says something else is named."""
        numbers = {value: i for i, value in enumerate(known)}
        try:
            return np.array([numbers[value] for value in values])
        except KeyError as error:
            line = line_numbers[values.index(error.args[0])]
            checks.fail(
                where, f"a published value of {name}", f"{error.args[0]!r} in {path}, line {line}"
            )

    x = np.zeros((len(rows), len(COLUMNS)), np.float32)
    for i, name in enumerate(NUMBERS):
        whole = [value.isdecimal() for value in columns[name]]
        if not all(whole):
            bad = whole.index(False)
            checks.fail(
                where,
                f"an integer {name}",
                f"{columns[name][bad]!r} in {path}, line {line_numbers[bad]}",
            )
        x[:, i] = np.array(columns[name], np.float64) / ATTRIBUTES[name]
    first = len(NUMBERS)
    for name, known in CATEGORIES.items():
        value = told(name, columns[name], [*known, "?"])
        filled = np.flatnonzero(value < len(known))
        x[filled, first + value[filled]] = 1
        first += len(known)
    return x, told("the label", marks, INCOMES).astype(np.int32)


def _download(where, folder):
    """OpenML's copy as the two published files.  It holds the rows of both in their order, those of
    adult.test first."""
    with explain_missing_package():
        from sklearn.datasets import fetch_openml

    try:
        bunch: Any = fetch_openml(
            "adult", version=2, as_frame=False, parser="liac-arff", cache=False
        )
    except Exception as error:  # whatever the network, the host or the disk came up with
        checks.fail(
            where,
            "a download that works",
            f"{type(error).__name__}: {error}",
            "Get the files on a machine with a network and pass data_dir=...",
            error=DataUnavailable,
        )
    columns = [
        _texts(bunch, bunch.data[:, bunch.feature_names.index(name)], name) for name in ATTRIBUTES
    ]
    lines = [", ".join(fields) for fields in zip(*columns, bunch.target, strict=True)]
    train, test = FILES.values()
    if len(lines) != train + test:
        checks.fail(
            where,
            f"{train + test} rows from OpenML",
            len(lines),
            "Get the files of the UCI repository.",
        )
    # The first persons of the two files, as published: another order would be another split.
    for row, age, weight in ((0, "25", "226802"), (test, "39", "77516")):
        if (columns[0][row], columns[2][row]) != (age, weight):
            checks.fail(
                where,
                "OpenML's rows in the order test, train",
                f"another person at row {row}",
                "Get the files of the UCI repository.",
            )
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"adult.test": lines[:test], "adult.data": lines[test:]}.items():
        (folder / name).write_text("\n".join(part) + "\n", encoding="ascii")


def _texts(bunch, values, name):
    """A column of OpenML as the texts of the file: categories come as numbers, an unknown value as
    nan."""
    if name in CATEGORIES:
        known = bunch.categories[name]
        return ["?" if np.isnan(v) else known[int(v)] for v in values.astype(float)]
    return [str(int(v)) for v in values]
