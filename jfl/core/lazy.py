"""Modules of a package that are imported when somebody names them (PEP 562), so that `import jfl`
stays fast."""

import importlib
import importlib.util
import pkgutil

from . import earlier_names


def submodules(package: str, path, offers: str | None = None):
    """The `__getattr__` and `__dir__` of a package whose modules are imported on first use.

    Args:
        package: the package's `__name__`.
        path: its `__path__`.
        offers: a module of the package whose names the package offers as its own.

    Returns:
        `(__getattr__, __dir__)`, to be bound at the package's top level.  Names that the package
        binds itself win, so a function hides a module of the same name.

    Raises:
        AttributeError: from the returned `__getattr__`, for what is neither bound nor a module.

    Example:
        >>> import jfl
        >>> jfl.privacy.calibration.__name__
        'jfl.privacy.calibration'
    """

    def __getattr__(name):
        if not name.startswith("__") or name == "__all__":
            if offers is not None and hasattr(importlib.import_module(f"{package}.{offers}"), name):
                return getattr(importlib.import_module(f"{package}.{offers}"), name)
            if (
                not name.startswith("_")
                and importlib.util.find_spec(f"{package}.{name}") is not None
            ):
                return importlib.import_module(f"{package}.{name}")
        return earlier_names.member(package, name)

    def __dir__():
        modules = {
            module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")
        }
        offered = dir(importlib.import_module(f"{package}.{offers}")) if offers is not None else []
        return sorted(
            {
                *vars(importlib.import_module(package)),
                *modules,
                *(n for n in offered if n[0] != "_"),
            }
        )

    return __getattr__, __dir__
