"""The API reference is complete: what is public stands on a page of docs/reference, documented."""

import functools
import importlib
import inspect
import pkgutil
import re
import types

import pytest
from helpers.paths import ROOT

import jfl

# packages whose every module is public, beside what `jfl.__all__` offers
OPEN = ("jfl.privacy.accountants", "jfl.auditing.estimators")
STANZA = re.compile(r"^::: (\S+)$", re.M)


def stanzas() -> dict:
    """What mkdocstrings is asked for -> the page that asks."""
    return {
        name: page.name
        for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
        for name in STANZA.findall(page.read_text())
    }


def resolve(path):
    """A module, or what lies in one; a function may hide a module of its name."""
    value = jfl
    try:
        for part in path.split(".")[1:]:
            value = getattr(value, part)
    except AttributeError:
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
    return value


def members(module):
    """Names that a page of a module shows: those it lists, else those it defines."""
    if listed := getattr(module, "__all__", None):
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if name[0] != "_" and getattr(value, "__module__", None) == module.__name__
    ]


def shown() -> dict:
    """Each public object that the reference shows, by id -> where."""
    found = {}
    for path in stanzas():
        value = resolve(path)
        if isinstance(value, types.ModuleType):
            found |= {id(getattr(value, name)): f"{path}.{name}" for name in members(value)}
        found[id(value)] = path
    return found


def missing(names, of=jfl):
    """Of public names, those that no page shows."""
    have = shown()
    return [
        name
        for name in names
        if id(value := getattr(of, name)) not in have
        and not (
            isinstance(value, types.ModuleType)
            and all(id(getattr(value, n)) in have for n in members(value))
        )
        and f"jfl.{name}" not in stanzas()
    ]


def test_every_public_name_is_in_the_reference():
    assert not missing(jfl.__all__)
    assert missing(["__version__"]) == ["__version__"]  # no page shows it
    for name in jfl.__all__:
        module = getattr(jfl, name)
        if isinstance(module, types.ModuleType):
            assert not missing(members(module), of=module), name


def test_every_public_module_is_in_the_reference():
    asked = stanzas()
    for package in OPEN:
        for info in pkgutil.walk_packages(
            importlib.import_module(package).__path__, f"{package}.", onerror=None
        ):
            assert info.ispkg or info.name in asked, f"no page of docs/reference shows {info.name}"
    assert len(asked) > 120


def undocumented(value, name):
    """Public functions, classes, methods and properties without a docstring of their own."""
    if isinstance(value, types.ModuleType):
        inner = [(f"{name}.{n}", getattr(value, n)) for n in members(value)]
        return [name] * (not value.__doc__) + [u for n, v in inner for u in undocumented(v, n)]
    if inspect.isclass(value):
        inner = [
            (f"{name}.{n}", getattr(v, "fget", None) or getattr(v, "func", v))
            for n, v in vars(value).items()
            if n[0] != "_"
            and (inspect.isfunction(v) or isinstance(v, (property, functools.cached_property)))
        ]
        own = [name] * (not (value.__doc__ or "").strip() or is_generated(value))
        return own + [u for n, v in inner for u in undocumented(v, n)]
    if inspect.isfunction(value):
        return [name] * (not (inspect.getdoc(value) or "").strip())
    return []


def is_generated(cls):
    """True of the docstring that Python writes for a dataclass or a named tuple."""
    return cls.__doc__.startswith((f"{cls.__name__}(",))


@pytest.mark.parametrize("page", sorted(set(stanzas().values())))
def test_all_of_the_reference_has_docstrings(page):
    """Where one is missing, the page would leave the name out."""
    bare = [
        u for path, at in stanzas().items() if at == page for u in undocumented(resolve(path), path)
    ]
    assert not bare


def test_what_has_no_docstring_is_seen():
    class Bare:
        """Documented, but for a method."""

        def method(self):
            pass

    assert undocumented(Bare, "Bare") == ["Bare.method"]
