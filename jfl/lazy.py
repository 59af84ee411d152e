"""Modules of a package that are imported when somebody names them (PEP 562), so that `import jfl` stays fast."""
import importlib
import importlib.util
import pkgutil


def submodules(package: str, path):
    """The `__getattr__` and `__dir__` of a package whose modules are imported on first use.

    Args:
        package: the package's `__name__`.
        path: its `__path__`.

    Returns:
        `(__getattr__, __dir__)`, to be bound at the package's top level.  Names that the package binds itself win,
        so a function hides a module of the same name.

    Raises:
        AttributeError: from the returned `__getattr__`, for what is neither bound nor a module.

    Example:
        >>> import jfl
        >>> jfl.privacy.many.__name__
        'jfl.privacy.many'
    """
    def __getattr__(name):
        if not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__():
        modules = {module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_")}
        return sorted({*vars(importlib.import_module(package)), *modules})

    return __getattr__, __dir__
