"""Imports on first use (PEP 562), which keep `import jfl` fast."""

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

# Packages of the extra "cli": what the command line, reports, pictures and `digits` need.
CLI_PACKAGES = (
    "docstring_parser",
    "filelock",
    "jinja2",
    "matplotlib",
    "msgspec",
    "sklearn",
    "tomli_w",
    "tyro",
)


@contextlib.contextmanager
def explain_missing_package() -> Generator[None]:
    """Catch a failed import of a package of the extra "cli", and say how to install the package.

    Raises:
        ModuleNotFoundError: With the command that installs the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in CLI_PACKAGES:
            raise
        raise ModuleNotFoundError(
            f"the package {package} is not installed. Install it with: "
            'pip install "jfl[cli]" (in a checkout: pip install -e ".[cli]")',
            name=package,
        ) from error


def submodules(
    package: str,
    path: Iterable[str],
    offers: str | tuple[str, ...] = (),
    later: dict[str, str] | None = None,
    modules_first: bool = False,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package whose modules are imported on first use.

    Args:
        package: the `__name__` of the package.
        path: the `__path__` of the package.
        offers: modules of the package whose public names are also names of the package.
        later: for further names of the package, the module that defines each of them.
        modules_first: True if no offered name hides a different module.  Importing a module of the
            package then does not import the modules of `offers`, which may import it.

    Returns:
        `(__getattr__, __dir__)`, to be assigned at the top level of the package.  A name that the
        package itself defines takes precedence, so a function hides a module of the same name.

    Raises:
        AttributeError: by the returned `__getattr__`, for a name that nothing defines.

    Example:
        >>> import jfl
        >>> jfl.privacy.calibration.__name__
        'jfl.privacy.calibration'
    """

    names = (offers,) if isinstance(offers, str) else offers

    def offering() -> Iterator[Any]:
        return (importlib.import_module(f"{package}.{name}") for name in names)

    def __getattr__(name: str) -> Any:
        if later and name in later:
            with explain_missing_package():
                return getattr(importlib.import_module(later[name]), name)
        if modules_first and _is_module(package, name):
            return importlib.import_module(f"{package}.{name}")
        if name == "__all__" and len(names) > 1:
            return [offered for module in offering() for offered in module.__all__]
        if not name.startswith("__") or name == "__all__":
            # Try the modules in their order: a later one may import the first, which looks up a
            # module here.
            for module in offering():
                if hasattr(module, name):
                    return getattr(module, name)
                if _is_module(package, name):
                    break
            if _is_module(package, name):
                with explain_missing_package():
                    return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        modules = [module.name for module in pkgutil.iter_modules(path)]
        offered = [
            name for module in offering() for name in getattr(module, "__all__", vars(module))
        ]
        own = vars(importlib.import_module(package))
        return sorted({name for name in (*own, *modules, *offered) if name[0] != "_"})

    return __getattr__, __dir__


def _is_module(package: str, name: str) -> bool:
    return name[0] != "_" and importlib.util.find_spec(f"{package}.{name}") is not None


def later(path: str) -> Callable[..., Any]:
    """Return a function that imports the function `path` when it is called, and calls it.

    A package can thus offer a function of a package that imports it.

    Args:
        path: the function to import, such as "jfl.runs.load.load".

    Returns:
        The function, which is a method if it is an attribute of a class.
    """
    module, _, name = path.rpartition(".")

    def call(*args: Any, **options: Any) -> Any:
        with explain_missing_package():
            function = getattr(importlib.import_module(module), name)
        return function(*args, **options)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"See `{path}`."
    return call
