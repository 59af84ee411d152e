"""Every `jfl.…` that a page names exists after a bare `import jfl`."""

import json
import re
import subprocess
import sys

import pytest
from helpers.pages import PAGES
from helpers.paths import ROOT

# a dotted name, and neither a file (`jfl.toml`, `jfl.egg-info/`) nor part of a path or a flag
NAME = re.compile(r"(?<![\w/.-])jfl(?:\.[A-Za-z_]\w*)+(?![\w/-])")
FILES = ("jfl.toml",)
RESOLVE = """
import json, sys
import jfl
missing = {}
for name in json.load(sys.stdin):
    value = jfl
    first = name.split(".")[1]
    try:
        for part in name.split(".")[1:]:
            value = getattr(value, part)
        if callable(getattr(jfl, first)) and first not in jfl.__all__:
            missing[name] = f"jfl.{first} is not public"
    except AttributeError as error:
        missing[name] = str(error)
print(json.dumps(missing))
"""


def names_in(text):
    """Dotted names of jfl in inline code and in blocks of Python."""
    blocks = re.findall(r"```(?:python|pycon)\n(.*?)```", text, re.S)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    code = blocks + re.findall(r"`([^`]+)`", prose)
    return {name for part in code for name in NAME.findall(part)} - set(FILES)


def missing(names):
    """What cannot be reached, by name, in a process that imported jfl and nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE],
        input=json.dumps(sorted(names)),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_every_name_on_a_page_exists():
    by_page = {str(page.relative_to(ROOT)): names_in(page.read_text()) for page in PAGES}
    everything = set().union(*by_page.values())
    assert (
        len(everything) > 30
        and {
            "jfl.plan",
            "jfl.guarantee",
            "jfl.privacy.accountants.pld",
        }
        <= everything
    )
    gone = missing(everything)
    assert not gone, [
        f"{page}: {name}: {gone[name]}"
        for page, names in by_page.items()
        for name in sorted(names & set(gone))
    ]


@pytest.mark.parametrize(
    "text, names",
    [
        ("`jfl.plan` and `jfl.privcy.pld(x)`", {"jfl.plan", "jfl.privcy.pld"}),
        ("```python\nx = jfl.simulat(key)\n```", {"jfl.simulat"}),
        ("```bash\njfl train --config jfl.toml\n```", set()),
        ("jfl.plan outside of code, `tests/jfl.py/x`, `from jfl.runs/`", set()),
        ("`[jfl.mesh.devices(2)]`", {"jfl.mesh.devices"}),
    ],
)
def test_what_counts_as_a_name(text, names):
    assert names_in(text) == names


def test_a_misspelt_or_unknown_name_is_seen():
    gone = missing({"jfl.plan", "jfl.privcy", "jfl.privacy.pdl", "jfl.start"})
    assert set(gone) == {"jfl.privcy", "jfl.privacy.pdl", "jfl.start"}
