"""The shape of the package: who may import whom, what an import does, what is public and said about
itself."""

import ast
import builtins
import doctest
import functools
import importlib
import inspect
import json
import os
import pkgutil
import pydoc
import re
import subprocess
import sys
import tomllib

import pytest
from helpers.paths import ROOT

import jfl

FILES = {
    ".".join(p.relative_to(ROOT / "jfl").with_suffix("").parts): p
    for p in sorted((ROOT / "jfl").rglob("*.py"))
}
FILES |= {
    ".".join(p.relative_to(ROOT).with_suffix("").parts): p
    for p in sorted((ROOT / "kernels").rglob("*.py"))
}
FILES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}
PACKAGES = {name for name, path in FILES.items() if path.name == "__init__.py"}

# The rooms, from the ground up.  A module imports from its own room, or from a room on a lower
# floor.
FLOORS = [
    "kernels",
    "core",
    "verify.flow",
    "verify.marks",
    "data models sampling schedules",
    "privacy.mechanisms privacy.accountants",
    "gradients analysis",
    "verify",
    "privacy.ledger",
    "privacy",
    "local",
    "algorithms",
    "engine",
    "auditing",
    "runs",
    "report",
    "cli",
]
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms.split()}


def room_of(name):
    """The room of a module: the longest name in `FLOORS` that its name begins with."""
    parts = name.split(".")
    return next((r for k in range(len(parts), 0, -1) if (r := ".".join(parts[:k])) in FLOOR), None)


# packages whose import is slow, optional or loud: only inside the function that needs them
HEAVY = {
    "scipy.stats",
    "scipy.optimize",
    "sklearn",
    "tensorflow_datasets",
    "matplotlib",
    "tyro",
    "docstring_parser",
    "rich",
    "equinox",
    "safetensors",
    "pandas",
    "datasets.Dataset",
    "polars",
    "xarray",
    "jinja2",
    "markupsafe",
    "h5py",
    "PIL",
    "array_record",
    "tensorboardX",
    "pyarrow",
    "ray",
}
PUBLIC = """Algorithm AuditReport Choice Context Diagnostics Federation Fn Guarantee Health HealthError Keys Mechanism Metric Metrics Output Plan
REPOSITORY Release Rows Run Sweep Task algorithm algorithms at_scale audit audit_one_run auditing bands batches bounded calibrate callbacks ask_tell clip_values james_stein post_process chain
check_privacy choose clip_adaptive clip_l1 clip_l2 clip_per_layer clip_scaled correlated corruption datasets describe distributed divide epsilon epsilons errors
federate gaussian grad guarantee guarantees heterogeneity init keep_compiled_programs laplace ledger linear_maps load loggers mesh models named noise_multiplier optimizers partition
plan population predict private_grad public_data run_round sampling scan schedules simulate strategies sweep task total transforms wavelet""".split()  # noqa: E501


def relative(name, node):
    """The jfl modules that an import statement of module `name` names."""
    package = name.split(".") if name in PACKAGES else name.split(".")[:-1]
    if name == "__init__":
        package = []
    base = package[: len(package) - (node.level - 1)] if node.level > 1 else package
    base = base + (node.module or "").split(".") if node.module else base
    for alias in node.names:
        full = ".".join(base + [alias.name])
        yield full if full in FILES else ".".join(base)


@functools.cache
def tree_of(name):
    return ast.parse(FILES[name].read_text())


@functools.cache
def edges():
    return list(_edges())


def _edges():
    for name in FILES:
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.ImportFrom) and node.level:
                for target in relative(name, node):
                    yield name, target
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for target in (
                    [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                ):
                    assert target.split(".")[0] not in ("jfl", "kernels"), (
                        f"{name}: import {target} relatively"
                    )


def test_every_module_is_in_a_room():
    stray = [n for n in FILES if n != "__init__" and room_of(n) is None]
    assert not stray, f"{stray} stand in no room: move them into one, or draw a new room in FLOORS"
    assert len([p for p in (ROOT / "jfl").glob("*.py") if p.name != "__init__.py"]) <= 8


def test_imports_go_down():
    for name, target in edges():
        mine, theirs = room_of(name), room_of(target)
        if name == "__init__" or target in ("core.lazy",):  # how packages offer their modules
            continue
        assert theirs is not None, f"{name} imports {target!r}, which stands in no room"
        assert mine == theirs or FLOOR[theirs] < FLOOR[mine], (
            f"{name} imports {target}, from {theirs} up or across to {mine}"
        )


def test_accountants_know_no_plan():
    for name, target in edges():
        if room_of(name) == "privacy.accountants":
            assert target.split(".")[-1] != "records" and room_of(target) in (
                "core",
                "verify.marks",
                "privacy.accountants",
            ), (name, target)


def test_jfl_imports_no_experiment():
    """The papers' claims are in experiments/papers; `runs.build` imports them when asked."""
    for name, target in edges():
        assert not target.startswith("experiments"), (name, target)


def test_no_cycles():
    below = {name: set() for name in FILES}
    for name, target in edges():
        below[name] |= {target} - {name}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join(path[path.index(name) :] + [name])
        if name in done or name in PACKAGES or name == "__init__":
            return
        path.append(name)
        for target in sorted(below.get(name, ())):
            visit(target)
        path.pop()
        done.add(name)

    for name in FILES:
        visit(name)


def test_kernels_import_jax_and_numpy_only():
    for name in FILES:
        if name.startswith("kernels"):
            for node in ast.walk(tree_of(name)):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    own = isinstance(node, ast.ImportFrom) and node.level == 1
                    for target in (
                        [a.name for a in node.names]
                        if isinstance(node, ast.Import)
                        else [node.module]
                    ):
                        assert own or target.split(".")[0] in {"jax", "numpy"} | set(
                            sys.stdlib_module_names
                        ), f"{name}: {target}"


def test_imports_inside_functions_are_for_heavy_packages():
    for name in FILES:
        tree = tree_of(name)
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                continue
            for node in ast.walk(function):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    relative_ = isinstance(node, ast.ImportFrom) and node.level > 0
                    found = (
                        {f"{node.module}.{a.name}" for a in node.names}
                        if isinstance(node, ast.ImportFrom)
                        else {a.name for a in node.names}
                    )
                    fine = all(any(f == h or f.startswith(h + ".") for h in HEAVY) for f in found)
                    # the command line starts fast only if it imports what a command needs when it
                    # needs it
                    assert (fine and not relative_) or name in (
                        "cli.__main__",
                        "cli.main",
                        "cli.demo",
                        "runs.record",
                        "runs.config",
                    ), (
                        f"{name}: {function.name if hasattr(function, 'name') else 'lambda'} "
                        f"imports {sorted(found)}"
                    )
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0):
                found = (
                    {f"{node.module}.{a.name}" for a in node.names}
                    if isinstance(node, ast.ImportFrom)
                    else {a.name for a in node.names}
                )
                assert not any(f == h or f.startswith(h + ".") for f in found for h in HEAVY), (
                    f"{name}: {found} on top"
                )


def test_modules_say_what_they_are():
    for name, path in FILES.items():
        assert ast.get_docstring(tree_of(name)), f"{path} has no docstring"


FRESH = """
import json, os, sys
import jax  # which everything imports, so once for all
for number, script in enumerate(json.load(open(sys.argv[1]))):
    child = os.fork()
    if child == 0:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream)
        exec(script, {})
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    open(f"{number}.code", "w").write(str(code))
"""


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """name of a script -> what it prints, of scripts of which each runs where nothing of jfl has
    been imported."""
    where = tmp_path_factory.mktemp("fresh")
    (where / "scripts.json").write_text(json.dumps(list(SCRIPTS.values())))
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sys.path])))
    subprocess.run(
        [sys.executable, "-W", "ignore:os.fork", "-c", FRESH, "scripts.json"],
        cwd=where,
        env=environment,
        check=True,
    )

    def printed(name):
        number = list(SCRIPTS).index(name)
        out, err, code = ((where / f"{number}.{k}").read_text() for k in ("out", "err", "code"))
        assert (code, err) == ("0", ""), err
        return out

    return printed


IMPORT = """
import json, os, sys, time
import jax
from jax._src import xla_bridge
before, values = dict(os.environ), dict(jax.config.values)
begun = time.process_time()
import jfl
seconds = time.process_time() - begun
print(json.dumps(dict(seconds=seconds, environment=dict(os.environ) == before, config=dict(jax.config.values) == values,
                      backends=list(xla_bridge._backends), modules=sorted(sys.modules))))
"""  # noqa: E501


def test_import_has_no_side_effects(fresh):
    first = json.loads(fresh("import"))
    assert first["environment"] and first["config"], (
        "importing jfl changed the environment or jax's configuration"
    )
    assert first["backends"] == [], "importing jfl started a backend"
    slow = HEAVY - {"rich", "h5py", "PIL"}  # these may come with jax, flax and optax
    loaded = {h for h in slow for m in first["modules"] if m == h or m.startswith(h + ".")}
    assert not loaded, f"importing jfl loads {sorted(loaded)}"
    assert not [m for m in first["modules"] if m.startswith("experiments")]
    assert first["seconds"] < 4  # of processors: on a busy machine as well, where it is two


def exported():
    """Names that jfl/__init__.py binds: its public surface."""
    names = set()
    for node in tree_of("__init__").body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Assign):
            names |= {t.id for target in node.targets for t in getattr(target, "elts", [target])}
    return {n for n in names if not n.startswith("_")} | set(
        jfl.__all__
    )  # some modules come when they are named


def test_public_names():
    """Whoever adds or takes away a public name says so here."""
    assert exported() == set(PUBLIC)
    assert all(hasattr(jfl, n) for n in PUBLIC)


def test_a_star_import_hides_no_builtin():
    assert set(jfl.__all__) == set(PUBLIC) and len(jfl.__all__) == len(set(jfl.__all__))
    assert not set(jfl.__all__) & set(dir(builtins))
    namespace = {}
    exec("from jfl import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(jfl.__all__)


REACH = """
import json, types
import jfl
found = {}
for name in NAMES:
    value = jfl
    for part in name.split("."):
        value = getattr(value, part)
    found[name] = value.__name__ if isinstance(value, types.ModuleType) else callable(value)
print(json.dumps(found))
"""


NAMED = [n for n in FILES if n != "__init__" and not n.split(".")[-1].startswith("_")]
# a name that a test before has imported would hide a module that cannot be reached
BACKWARDS = [n for n in NAMED if n.startswith("privacy.")][::-1]


def test_every_module_can_be_named_after_a_bare_import(fresh):
    """In a process that imported nothing else; a function hides the module of its name."""
    for script, part in (("named", NAMED), ("backwards", BACKWARDS)):
        found = json.loads(fresh(script))
        modules = [n for n in part if found[n] == f"jfl.{n}"]
        assert all(found[n] is True for n in part if n not in modules), found
        assert len(modules) > 0.7 * len(part)


def test_what_is_no_module_is_no_attribute():
    for package in (jfl, jfl.privacy, jfl.data, jfl.algorithms):
        with pytest.raises(AttributeError, match="nothing"):
            package.nothing  # noqa: B018
    assert {"runs", "privacy", "plan"} <= set(dir(jfl)) and {"pld", "rdp_events"} <= set(
        dir(jfl.privacy.accountants)
    )


def public_callables():
    for name in sorted(exported()):
        value = getattr(jfl, name)
        if callable(value):
            yield f"jfl.{name}", value
        if inspect.ismodule(value):
            own = [n for n, v in vars(value).items() if is_own(value, n, v)]
            for inner in getattr(value, "__all__", own):
                yield f"jfl.{name}.{inner}", getattr(value, inner)


def is_own(module, name, value):
    """A public function or class that the module itself defines."""
    written = getattr(value, "__module__", None) == module.__name__
    return written and callable(value) and not name.startswith("_")


def test_public_callables_have_docstrings():
    for name, value in public_callables():
        assert (inspect.getdoc(value) or "").strip(), f"{name} has no docstring"
    assert sum(1 for _ in public_callables()) > 30


def public_methods():
    """Methods and properties that jfl writes into its public classes."""
    for name, cls in public_callables():
        for inner, value in vars(cls).items() if inspect.isclass(cls) else ():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(value) and not inner.startswith("_"):
                if value.__module__.startswith("jfl."):
                    yield f"{name}.{inner}", value


def without_types(function):
    """Names of what a function's signature leaves without a type."""
    signature = inspect.signature(function)
    bound = ("self", "cls")
    missing = [
        n for n, p in signature.parameters.items() if p.annotation is p.empty and n not in bound
    ]
    return missing + ["return"] * (signature.return_annotation is signature.empty)


def test_public_functions_have_types():
    """And those of the accountants, which are used without a plan."""
    functions = [(name, f) for name, f in public_callables() if inspect.isfunction(f)]
    for name in FILES:
        if room_of(name) == "privacy.accountants" and name not in PACKAGES:
            module = importlib.import_module(f"jfl.{name}")
            functions += [
                (f"jfl.{name}.{n}", f)
                for n, f in vars(module).items()
                if inspect.isfunction(f) and f.__module__ == module.__name__ and n[0] != "_"
            ]
    functions += public_methods()
    untyped = {name: m for name, f in functions if (m := without_types(f))}
    assert not untyped, f"without types: {untyped}"
    assert len(functions) > 150


def test_help_shows_types_and_all_options():
    """Of everything public, also of factories that take the options of others."""
    shown = {}
    for name, value in public_callables():
        pydoc.plain(pydoc.render_doc(value))
        if inspect.isfunction(value):
            assert not without_types(value), f"{name}: {without_types(value)} without types"
            shown[name] = str(inspect.signature(value))
    assert "**" not in "".join(v for n, v in shown.items() if n.startswith("jfl.algorithms."))
    assert "mu: float | jax." in shown["jfl.algorithms.fedprox"]  # of two factories
    assert "steps: int = 10" in shown["jfl.algorithms.fedprox"]


def test_the_core_knows_no_algorithm_by_name():
    """What an algorithm is, is said by its properties: another one may share them."""
    names = set(jfl.algorithms.__all__) | {"prox_erm"}
    allowed = {"privacy.mechanisms.stages"}  # where a bound is declared, by its reason
    for name, path in FILES.items():
        room = room_of(name)
        if room is None or FLOOR[room] > FLOOR["engine"] or room == "algorithms":
            continue
        if name in allowed:
            continue
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Compare):
                constants = {
                    c.value
                    for side in (node.left, *node.comparators)
                    for c in ast.walk(side)
                    if isinstance(c, ast.Constant) and isinstance(c.value, str)
                }
                about_names = any(
                    isinstance(side, ast.Attribute) and side.attr == "name"
                    for side in (node.left, *node.comparators)
                )
                assert not (about_names and constants & names), f"{path}:{node.lineno}"


def test_public_modules_list_what_they_offer():
    for name in ("algorithms", "batches", "sampling", "models", "partition", "datasets"):
        module = getattr(jfl, name)
        assert module.__all__ and all(callable(getattr(module, n)) for n in module.__all__), name


# seconds each; what they show is tested in tests/privacy, tests/papers and tests/auditing
LONG_DOCTESTS = [f"jfl.privacy.accountants.{n}" for n in ("pld", "tightest")]
LONG_DOCTESTS += [f"jfl.auditing.{n}" for n in ("audit", "distribution")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG_DOCTESTS else ())
        for name in sorted(
            "jfl" if n == "__init__" else f"jfl.{n}" for n in FILES if not n.endswith("__main__")
        )
    ],
)
def test_doctests(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_there_are_doctests():
    finder, found = doctest.DocTestFinder(), 0
    for info in pkgutil.walk_packages(jfl.__path__, "jfl."):
        if not info.name.endswith("__main__"):
            found += sum(bool(t.examples) for t in finder.find(importlib.import_module(info.name)))
    assert found >= 8


def test_paths_in_pyproject_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inner = project["tool"]["setuptools"]
    paths = [
        project["project"]["readme"],
        *project["project"]["license-files"],
        *inner["package-dir"].values(),
        *project["tool"]["pytest"]["ini_options"]["testpaths"],
    ]
    moved = inner["package-dir"]
    paths += [moved.get(p, p.replace(".", "/")) for p in inner["packages"]]
    for path in paths:
        assert (ROOT / path).exists(), f"pyproject.toml names {path}"
    # no package is forgotten: it would be missing from an installation
    dirs = {"jfl" if n == "__init__" else f"jfl.{n}" for n in PACKAGES | {"__init__"}}
    assert set(inner["packages"]) == dirs
    for entry in project["project"].get("scripts", {}).values():
        module = entry.split(":")[0].removeprefix("jfl.")
        assert module in FILES, f"the script {entry} has no module"


def test_no_leftovers():
    """No marks of unfinished work and no path of somebody's machine."""
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|/(wo" + r"rk|home|root|Users)/")
    for path in [*FILES.values(), *sorted((ROOT / "tests").rglob("*.py"))]:
        found = marks.search(path.read_text())
        assert not found, f"{path}: {found.group()}"


SCRIPTS = {
    "import": IMPORT,
    "named": f"NAMES = {NAMED}\n{REACH}",
    "backwards": f"NAMES = {BACKWARDS}\n{REACH}",
}


def test_tests_stand_in_rooms():
    """A folder of tests/ is a room of jfl, or says of itself what it tests."""
    beside = {"accelerator", "contracts", "docs", "endurance", "experiments", "helpers", "kernels"}
    rooms = {room.split(".")[0] for room in FLOOR}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = path.relative_to(ROOT / "tests").parts
        alone = ("conftest.py", "test_layout.py")
        assert len(place) == 2 or place in {(name,) for name in alone}, f"move {path} into a room"
        assert len(place) == 1 or place[0] in rooms | beside, f"{path}: no room {place[0]}"
