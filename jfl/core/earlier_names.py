"""Module paths of the release before: each answers with today's module, warns, and goes with the
next release."""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

# What a package of today was as a module: the names it had are found there.
MEMBERS = {
    "jfl.cli": "jfl.cli.main",
    "jfl.core": "jfl.core.records",
    "jfl.gradients": "jfl.gradients.per_example",
    "jfl.privacy.ledger": "jfl.privacy.ledger.entries",
    "jfl.privacy.taint": "jfl.privacy.taint.checker",
    "jfl.report": "jfl.runs.record",
}

# Where modules are today.
MODULES = {
    "jfl.accountant": "jfl.cli.accounting",
    "jfl.algorithms.averaged": "jfl.algorithms.iterate_averaging",
    "jfl.assemble": "jfl.runs.build",
    "jfl.batches": "jfl.sampling.batches",
    "jfl.check": "jfl.core.checks",
    "jfl.checkpoint": "jfl.runs.checkpoint",
    "jfl.cluster": "jfl.runs.on_ray",
    "jfl.collected": "jfl.report.results",
    "jfl.commands": "jfl.cli.runs",
    "jfl.comparison": "jfl.report.sections",
    "jfl.config": "jfl.runs.config",
    "jfl.console": "jfl.cli.console",
    "jfl.corrupt": "jfl.data.corruption",
    "jfl.data.corrupt": "jfl.data.corruption",
    "jfl.data.deal": "jfl.data.partition",
    "jfl.data.population": "jfl.data.host_rows",
    "jfl.data.prepared": "jfl.data.tfds",
    "jfl.transform": "jfl.data.transforms",
    "jfl.data.transform": "jfl.data.transforms",
    "jfl.demo": "jfl.cli.demo",
    "jfl.figures": "jfl.report.plots",
    "jfl.frameworks": "jfl.models.frameworks",
    "jfl.hashing": "jfl.core.hashing",
    "jfl.heterogeneity": "jfl.analysis.heterogeneity",
    "jfl.identity": "jfl.core.identity",
    "jfl.idle": "jfl.runs.unused_options",
    "jfl.journal": "jfl.runs.journal",
    "jfl.kernels.bookkeeping": "jfl.kernels.ghost_sums",
    "jfl.keys": "jfl.core.random_streams",
    "jfl.lazy": "jfl.core.lazy",
    "jfl.markup": "jfl.report.document",
    "jfl.mesh": "jfl.engine.devices",
    "jfl.metrics": "jfl.engine.metrics",
    "jfl.page": "jfl.report.page",
    "jfl.panels": "jfl.report.plots",
    "jfl.papers.chen2024_theory": "jfl.papers.chen2024.theory",
    "jfl.papers.li2025_theory": "jfl.papers.li2025.theory",
    "jfl.papers.noble2022_gaps": "jfl.papers.noble2022.gaps",
    "jfl.papers.noble2022_theory": "jfl.papers.noble2022.theory",
    "jfl.papers.ranaweera2025_theory": "jfl.papers.ranaweera2025.theory",
    "jfl.papers.talaei2024_theory": "jfl.papers.talaei2024.theory",
    "jfl.plan": "jfl.engine.plan",
    "jfl.points": "jfl.runs.blocks",
    "jfl.printed": "jfl.papers.as_printed",
    "jfl.printing": "jfl.core.printing",
    "jfl.privacy.accounting": "jfl.privacy.guarantees",
    "jfl.privacy.bands": "jfl.privacy.mechanisms.haar_bands",
    "jfl.privacy.bounds": "jfl.privacy.accountants.rdp_events",
    "jfl.privacy.classic": "jfl.privacy.accountants.approximate_dp",
    "jfl.privacy.client_sites": "jfl.privacy.ledger.client_level",
    "jfl.privacy.clients": "jfl.privacy.per_client",
    "jfl.privacy.concentrated": "jfl.privacy.accountants.zcdp",
    "jfl.privacy.copies": "jfl.privacy.taint.constants",
    "jfl.privacy.events": "jfl.privacy.accountants.events",
    "jfl.privacy.floors": "jfl.privacy.mechanisms.float_floors",
    "jfl.privacy.flow": "jfl.privacy.taint.flow",
    "jfl.privacy.many": "jfl.privacy.accountants.rdp_batched",
    "jfl.privacy.marks": "jfl.core.marks",
    "jfl.privacy.mechanism": "jfl.privacy.mechanisms.chain",
    "jfl.privacy.multiplicity": "jfl.privacy.accountants.with_replacement",
    "jfl.privacy.participation": "jfl.privacy.ledger.participation",
    "jfl.privacy.pld": "jfl.privacy.accountants.pld",
    "jfl.privacy.profiles": "jfl.privacy.accountants.pld_step",
    "jfl.privacy.rdp": "jfl.privacy.accountants.rdp",
    "jfl.privacy.rounds": "jfl.privacy.accountants.local_steps",
    "jfl.privacy.segments": "jfl.privacy.ledger.segments",
    "jfl.privacy.sites": "jfl.privacy.ledger.example_level",
    "jfl.privacy.spectra": "jfl.privacy.accountants.pld_compose",
    "jfl.privacy.stages": "jfl.privacy.mechanisms.stages",
    "jfl.privacy.tight": "jfl.privacy.accountants.tightest",
    "jfl.privacy.wavelet": "jfl.privacy.mechanisms.wavelet",
    "jfl.privacy.wbk": "jfl.privacy.accountants.wang2019",
    "jfl.privacy.worth": "jfl.privacy.entry_guarantees",
    "jfl.proxy": "jfl.analysis.public_data",
    "jfl.round": "jfl.engine.round",
    "jfl.rules": "jfl.gradients.ghost_rules",
    "jfl.sections": "jfl.report.sections",
    "jfl.simulate": "jfl.engine.simulate",
    "jfl.sources": "jfl.report.read",
    "jfl.stream": "jfl.engine.host_feed",
    "jfl.sweep": "jfl.engine.sweep",
    "jfl.sweeps": "jfl.runs.sweep",
    "jfl.tables": "jfl.runs.tables",
    "jfl.taps": "jfl.gradients.ghost",
    "jfl.train": "jfl.runs.train",
    "jfl.tree": "jfl.core.pytrees",
}

# functions that moved: where they were, and the module that holds them now
FUNCTIONS = {
    ("jfl.schedules", "impact"): "jfl.sampling.weights",
}


def warn(old: str, new: str, level: int) -> None:
    """Say that a name is old, at the line `level` calls above."""
    warnings.warn(
        f"{old} is now {new}; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=level,
    )


def member(package: str, name: str) -> Any:
    """What `package.name` was when `package` was a module.

    Args:
        package: the package's full name.
        name: the attribute somebody asks for.

    Returns:
        The attribute of the module that took the place of the old one.

    Raises:
        AttributeError: for a package that was no module, or a name that it did not have.
    """
    if package not in MEMBERS or name.startswith("__"):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(MEMBERS[package]), name)
    except AttributeError:
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
    warn(f"{package}.{name}", f"{MEMBERS[package]}.{name}", 4)
    return value


def moved(module: str, name: str) -> Any:
    """What `module.name` was, from the module that holds it now.

    Raises:
        AttributeError: for a name that did not move.
    """
    if (module, name) not in FUNCTIONS:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn(f"{module}.{name}", f"{FUNCTIONS[module, name]}.{name}", 4)
    return getattr(importlib.import_module(FUNCTIONS[module, name]), name)


class _Loader(importlib.abc.Loader):
    """Binds an old path to the module of today, which stays as it is."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(MODULES[spec.name])
        self.spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec  # the import system has put the old path's there


class Finder(importlib.abc.MetaPathFinder):
    """Finds modules of `jfl` by their old paths, once nothing else has found them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        warn(name, MODULES[name], 3)
        return importlib.machinery.ModuleSpec(name, _Loader())


class Package(types.ModuleType):
    """A package whose functions are not hidden by modules that once had their names (`import
    jfl.plan`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) and callable(vars(self).get(name)):
            return
        super().__setattr__(name, value)


def install(package: str) -> None:
    """Lets the old paths of `package` and its subpackages answer.

    It comes after Python's own finders, so that it is asked only where a path leads nowhere.
    """
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
    sys.modules[package].__class__ = Package


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that answers for names it had in the release before.

    Args:
        module: its path.
        names: earlier name -> the path of what it is today.
    """

    def answer(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", names[name], 3)
        path, _, attribute = names[name].rpartition(".")
        return getattr(importlib.import_module(path), attribute)

    return answer
