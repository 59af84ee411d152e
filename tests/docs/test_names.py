"""Every `jfl.…` that a page names exists.  That modules come when they are named after a bare
`import jfl` is shown by test_layout.py."""

import re

from helpers import pages

import jfl

# a dotted name, and neither a file (`jfl.toml`, `jfl.egg-info/`) nor part of a path or a flag
NAME = re.compile(r"(?<![\w/.-])jfl(?:\.[A-Za-z_]\w*)+(?![\w/-])")
FILES = ("jfl.toml",)


def names_in(text):
    """Dotted names of jfl in inline code and in blocks of Python."""
    blocks = re.findall(r"```(?:python|pycon)\n(.*?)```", text, re.S)
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    code = blocks + re.findall(r"`([^`]+)`", prose)
    return {name for part in code for name in NAME.findall(part)} - set(FILES)


def exists(name):
    """Whether it can be reached, and what is called is public."""
    value, parts = jfl, name.split(".")[1:]
    for part in parts:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return parts[0] in jfl.__all__ or not callable(getattr(jfl, parts[0]))


def test_every_name_on_a_page_exists():
    named = {pages.name(page): names_in(page.read_text()) for page in pages.PAGES}
    everything = set().union(*named.values())
    assert len(everything) > 30 and {"jfl.plan", "jfl.privacy.accountants.pld"} <= everything
    gone = {(page, name) for page, names in named.items() for name in names if not exists(name)}
    assert not gone
    assert not any(map(exists, ("jfl.privcy", "jfl.privacy.pdl", "jfl.start")))
