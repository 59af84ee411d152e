"""What griffe, which reads source without running it, has to be told of jfl.

- Names that a package takes from its modules when somebody asks for them (`jfl.models.logistic`).
- `@extends(base)`: a factory's `**options` are the parameters of its base, as `help` shows them.
- `Example:` is a section of code, as `Examples:` is.
"""

import importlib
import re

import griffe


class Jfl(griffe.Extension):
    """Loaded by mkdocstrings, for the pages of the reference."""

    def on_object(self, *, obj: griffe.Object, **_):
        """Examples, also those without a head, as a section that griffe knows."""
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
        if ">>>" in text and "Examples:" not in text:
            before, after = text.split(">>>", 1)
            indented = "\n".join("    " + line for line in (">>>" + after).splitlines())
            text = f"{before.rstrip()}\n\nExamples:\n{indented}"
        obj.docstring.value = text

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_):
        """Once all modules are there: names that come late, and whole signatures."""
        if pkg.name != "jfl":
            return
        late_names(pkg)
        for module in modules(pkg):
            for function in module.functions.values():
                if not function.is_alias:
                    extend(pkg, function)


def modules(package: griffe.Module):
    """A module and all below it."""
    yield package
    for module in package.modules.values():
        if not module.is_alias:
            yield from modules(module)


def late_names(package: griffe.Module):
    """Aliases for what `jfl.core.lazy` offers."""
    for module in list(modules(package)):
        if "_submodules(" not in "\n".join(module.lines):
            continue
        running = importlib.import_module(module.path)
        for name in getattr(running, "__all__", ()):
            value = getattr(running, name)
            if name not in module.members and hasattr(value, "__qualname__"):
                target = f"{value.__module__}.{value.__qualname__}"
                module.set_member(name, griffe.Alias(name, target, parent=module))
        if not module.exports and hasattr(running, "__all__"):
            module.exports = list(running.__all__)


def extend(package: griffe.Module, function: griffe.Function):
    """In place of `**options`, what the base of a factory takes."""
    running = getattr(importlib.import_module(function.module.path), function.name, None)
    base = getattr(running, "extends", None)
    if base is None:
        return
    whole = package[f"{base.__module__}.{base.__qualname__}".removeprefix("jfl.")]
    extend(package, whole)
    wanted = list(running.__signature__.parameters)
    known = {p.name: p for p in [*whole.parameters, *function.parameters]}
    function.parameters = griffe.Parameters(*(known[name] for name in wanted))
