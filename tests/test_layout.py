"""The shape of the package: who may import whom, what an import does, what is public and said about
itself."""

import ast
import builtins
import doctest
import functools
import graphlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from helpers.paths import ROOT

import jfl
from jfl.core.lazy import CLI_PACKAGES

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
TOP = ("__init__", "names")  # the public names, which stand in no room
FLOOR = {room: i for i, rooms in enumerate(FLOORS) for room in rooms.split()}


def room_of(name):
    """The room of a module: the longest name in `FLOORS` that its name begins with."""
    parts = name.split(".")
    return next((r for k in range(len(parts), 0, -1) if (r := ".".join(parts[:k])) in FLOOR), None)


# packages whose import is slow, optional or loud: only inside the function that needs them
HEAVY = set(
    """PIL array_record datasets.Dataset docstring_parser equinox h5py jinja2 markupsafe matplotlib
    pandas polars pyarrow ray rich safetensors scipy.optimize scipy.stats sklearn tensorboardX
    tensorflow_datasets tyro xarray""".split()
)
# the command line starts fast only if it imports what a command needs when it needs it
LATE = ("__init__", "cli.main", "cli.demo", "runs.record", "runs.config")
PUBLIC = """Algorithm AuditReport Choice Context Diagnostics Federation Fn Guarantee Health HealthError Keys Mechanism MembershipReport Metric Metrics Output Plan
REPOSITORY Release Rows Run Sweep Task algorithm algorithms at_scale audit audit_membership audit_one_run auditing bands batches bounded Budget budget calibrate callbacks ask_tell clip_values james_stein post_process chain
check_privacy choose clip_adaptive clip_automatic clip_l1 clip_l2 clip_per_layer clip_scaled correlated corruption datasets describe distributed divide epsilon epsilons errors
federate gaussian grad guarantee guarantees heterogeneity init keep_compiled_programs laplace ledger linear_maps load loggers mesh models named noise_multiplier optimizers partition
plan population predict private_grad public_data run_round sampling scan schedules simulate strategies sweep task total transforms wavelet""".split()  # noqa: E501


@functools.cache
def tree_of(name):
    return ast.parse(FILES[name].read_text())


@functools.cache
def imports(name):
    """The import statements of a module, wherever they stand."""
    return [n for n in ast.walk(tree_of(name)) if isinstance(n, (ast.Import, ast.ImportFrom))]


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


def absolute(node):
    """What an import statement of other packages names."""
    if isinstance(node, ast.ImportFrom):
        return set() if node.level else {f"{node.module}.{a.name}" for a in node.names}
    return {a.name for a in node.names}


def is_heavy(name):
    return any(name == h or name.startswith(h + ".") for h in HEAVY)


@functools.cache
def edges():
    return [
        (name, target)
        for name in FILES
        for node in imports(name)
        if isinstance(node, ast.ImportFrom) and node.level
        for target in relative(name, node)
    ]


def test_every_module_is_in_a_room():
    stray = [n for n in FILES if n not in TOP and room_of(n) is None]
    assert not stray, f"{stray} stand in no room: move them into one, or draw a new room in FLOORS"
    assert len([p for p in (ROOT / "jfl").glob("*.py") if p.name != "__init__.py"]) <= 8


def test_imports_go_down():
    for name, target in edges():
        mine, theirs = room_of(name), room_of(target)
        if name in TOP or target in ("core.lazy",):  # how packages offer their modules
            continue
        assert theirs is not None, f"{name} imports {target!r}, which stands in no room"
        assert mine == theirs or FLOOR[theirs] < FLOOR[mine], (
            f"{name} imports {target}, from {theirs} up or across to {mine}"
        )
        if mine == "privacy.accountants":  # which know no plan
            assert theirs in ("core", "verify.marks", mine), (name, target)
            assert target.split(".")[-1] != "records", (name, target)


def test_no_cycles():
    packages, below = PACKAGES | {"__init__"}, {}
    for name, target in edges():
        if name != target and not {name, target} & packages:
            below.setdefault(name, set()).add(target)
    graphlib.TopologicalSorter(below).prepare()  # its error names a cycle


def test_own_modules_are_imported_relatively_and_no_experiment_is():
    """The papers' claims are in experiments/papers; `runs.build` looks them up when asked.  Kernels
    take JAX and NumPy only."""
    few = {"jax", "numpy", *sys.stdlib_module_names}
    for name in FILES:
        for found in set().union(*map(absolute, imports(name))):
            root = found.split(".")[0]
            assert root not in ("jfl", "kernels", "experiments"), f"{name}: {found}"
            assert root in few or not name.startswith("kernels"), f"{name}: {found}"


def test_imports_inside_functions_are_for_heavy_packages():
    for name in FILES:
        for node in imports(name):
            names = absolute(node)
            if node.col_offset == 0:
                assert not any(map(is_heavy, names)), f"{name}:{node.lineno} on top"
            elif name not in LATE:
                heavy = names and all(map(is_heavy, names))
                assert heavy, f"{name}:{node.lineno} inside a function"


def test_modules_say_what_they_are():
    for name, path in FILES.items():
        assert ast.get_docstring(tree_of(name)), f"{path} has no docstring"


FRESH = """
import json, os, sys, time, types
import jax
from jax._src import xla_bridge
before, values = dict(os.environ), dict(jax.config.values)
begun = time.process_time()
import jfl.algorithms  # a module, before the public names that import it
jfl.plan  # imports all public names
seconds = time.process_time() - begun
print(json.dumps(dict(seconds=seconds, environment=dict(os.environ) == before, config=dict(jax.config.values) == values,
                      backends=list(xla_bridge._backends), modules=sorted(sys.modules))), flush=True)
for script in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        exec(script)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""  # noqa: E501
NAME = """
found = {}
for name in NAMES:
    value = jfl
    for part in name.split("."):
        value = getattr(value, part)
    found[name] = value.__name__ if isinstance(value, types.ModuleType) else callable(value)
print(json.dumps(found))
"""
COMMAND_LINE = """
import jfl.cli.__main__
print(json.dumps([m for m in ("tyro", "matplotlib", "sklearn", "scipy.stats") if m in sys.modules]))
"""
HELP = """
import sys
sys.argv = ["jfl", "--help"]
import jfl.cli.__main__
assert jfl.cli.__main__.main() == 0
print([m for m in ("jax", "numpy") if m in sys.modules])
"""
WITHOUT_EXTRA = f"""
import contextlib, io, logging
import numpy as np
logging.getLogger("jfl").setLevel(logging.ERROR)  # a busy machine may report a slow start
for name in {CLI_PACKAGES!r}:
    sys.modules[name] = None
r = np.random.default_rng(0)
x, y = r.normal(size=(40, 3)).astype("float32"), r.integers(0, 2, 40)
fed = jfl.federate(jfl.datasets.arrays(x, y, x[:8], y[:8]), jfl.partition.iid(4))
task = jfl.models.logistic(fed)
noise = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(4.0), jfl.divide(10))
grad = jfl.private_grad(task.loss, noise)
algorithm = jfl.algorithms.fedavg(grad, lr=1.0, steps=1, batch=jfl.batches.full())
plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(4))
out = jfl.simulate(jax.random.key(0), plan, rounds=2)
repr([plan, out, jfl.guarantee(plan, rounds=2), jfl.check_privacy(plan)])
said = []
for call in (jfl.datasets.digits, fed.plot, lambda: jfl.load("nothing"), lambda: jfl.runs.config):
    try:
        call()
    except ModuleNotFoundError as error:
        said.append(str(error))
from jfl.cli.__main__ import main
sys.argv = ["jfl", "train"]
with contextlib.redirect_stderr(io.StringIO()) as errors:
    assert main() == 2
print(json.dumps([*said, errors.getvalue()]))
"""
NAMED = [n for n in FILES if n != "__init__" and not n.split(".")[-1].startswith("_")]
# a name that a test before has imported would hide a module that cannot be reached
BACKWARDS = [n for n in NAMED if n.startswith("privacy.")][::-1]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What the import of jfl did in a process of its own; then what scripts print, each of which
    runs where jfl was imported and nothing else."""
    names = [f"NAMES = {part}\n{NAME}" for part in (NAMED, BACKWARDS)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore:os.fork", "-c", FRESH],
        input=json.dumps([*names, COMMAND_LINE, WITHOUT_EXTRA]),
        cwd=tmp_path_factory.mktemp("fresh"),
        env=dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sys.path]))),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_import_has_no_side_effects(fresh):
    first = fresh[0]
    assert first["environment"] and first["config"] and first["backends"] == []
    slow = HEAVY - {"rich", "h5py", "PIL"}  # these may come with jax, flax and optax
    loaded = {h for h in slow for m in first["modules"] if m == h or m.startswith(h + ".")}
    assert not loaded, f"importing jfl loads {sorted(loaded)}"
    assert not [m for m in first["modules"] if m.startswith("experiments")]
    assert first["seconds"] < 4  # of processors: on a busy machine as well, where it is two


def exported():
    """Names that jfl/names.py binds, and those of modules that come when they are named."""
    names = set(jfl.__all__)
    for node in tree_of("names").body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Assign):
            names |= {t.id for target in node.targets for t in getattr(target, "elts", [target])}
    return {n for n in names if not n.startswith("_")}


def test_public_names():
    """Whoever adds or takes away a public name says so here.  A star import hides no builtin."""
    assert exported() == set(jfl.__all__) == set(PUBLIC) and len(jfl.__all__) == len(set(PUBLIC))
    assert not set(jfl.__all__) & set(dir(builtins))
    namespace = {}
    exec("from jfl import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(PUBLIC)


def test_every_module_can_be_named_after_a_bare_import(fresh):
    """In a process that imported nothing else; a function hides the module of its name."""
    for found, part in zip(fresh[1:3], (NAMED, BACKWARDS), strict=True):
        modules = [n for n in part if found[n] == f"jfl.{n}"]
        assert all(found[n] is True for n in part if n not in modules), found
        assert len(modules) > 0.7 * len(part)


def test_the_command_line_loads_nothing_heavy_before_it_knows_the_command(fresh):
    assert fresh[3] == []


def test_help_imports_neither_jax_nor_numpy():
    """With them it would take a second."""
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "jfl COMMAND" in done.stdout and done.stdout.endswith("[]\n")


def test_python_code_runs_without_the_extra_cli_and_other_calls_name_it(fresh):
    assert [said.count('pip install "jfl[cli]"') for said in fresh[4]] == [1] * 5


def test_what_is_no_module_is_no_attribute():
    for package in (jfl, jfl.privacy, jfl.data, jfl.algorithms):
        with pytest.raises(AttributeError, match="nothing"):
            package.nothing  # noqa: B018
    assert set(dir(jfl)) == set(PUBLIC)  # and nothing that is not for users
    assert "without_replacement" in dir(jfl.sampling) and "checks" not in dir(jfl.sampling)
    assert {"pld", "rdp_events"} <= set(dir(jfl.privacy.accountants))


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


def public_methods():
    """Methods and properties that jfl writes into its public classes."""
    for name, cls in public_callables():
        for inner, value in vars(cls).items() if inspect.isclass(cls) else ():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            own = inspect.isfunction(value) and value.__module__.startswith("jfl.")
            if own and not inner.startswith("_"):
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
            own = [n for n, value in vars(module).items() if is_own(module, n, value)]
            found = [(f"jfl.{name}.{n}", getattr(module, n)) for n in own]
            functions += [(n, f) for n, f in found if inspect.isfunction(f)]
    functions += public_methods()
    untyped = {name: m for name, f in functions if (m := without_types(f))}
    assert not untyped, f"without types: {untyped}"
    assert len(functions) > 150


def test_help_shows_all_options():
    """Also of algorithms that take the options of other factories."""
    shown = {n: str(inspect.signature(getattr(jfl.algorithms, n))) for n in jfl.algorithms.__all__}
    assert "**" not in "".join(shown.values())
    assert "mu: float | jax." in shown["fedprox"] and "steps: int = 10" in shown["fedprox"]


def test_the_core_knows_no_algorithm_by_name():
    """What an algorithm is, is said by its properties: another one may share them."""
    names = set(jfl.algorithms.__all__) | {"prox_erm"}
    for name, path in FILES.items():
        room = room_of(name)
        if room in (None, "algorithms") or FLOOR[room] > FLOOR["engine"]:
            continue
        if name == "privacy.mechanisms.stages":  # where a bound is declared, by its reason
            continue
        for node in ast.walk(tree_of(name)):
            if isinstance(node, ast.Compare):
                sides = (node.left, *node.comparators)
                about_names = any(isinstance(s, ast.Attribute) and s.attr == "name" for s in sides)
                inner = [c for side in sides for c in ast.walk(side)]
                words = {c.value for c in inner if isinstance(c, ast.Constant)}
                assert not (about_names and words & names), f"{path}:{node.lineno}"


# seconds each; what they show is tested in the rooms of tests/ that bear their names
LONG_DOCTESTS = """kernels.haar schedules runs.tables auditing.audit
    sampling.clients sampling.rotation sampling.availability data.corruption
    privacy.guarantees privacy.plain_numbers privacy.accountants.choosing privacy.accountants.pld
    privacy.accountants.tightest privacy.mechanisms.linear_maps privacy.mechanisms.stages
    privacy.mechanisms.strategies models.flax_adapters""".split()
MODULES = sorted(n for n, p in FILES.items() if n != "__init__" and ">>>" in p.read_text())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG_DOCTESTS else ())
        for name in MODULES
    ],
)
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(f"jfl.{name}")).failed == 0


def test_an_installation_has_every_package_and_what_pyproject_names():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    inner = project["tool"]["setuptools"]
    moved = inner["package-dir"]
    paths = [
        project["project"]["readme"],
        *project["project"]["license-files"],
        *project["tool"]["pytest"]["ini_options"]["testpaths"],
        *moved.values(),
        *(moved.get(p, p.replace(".", "/")) for p in inner["packages"]),
    ]
    for path in paths:
        assert (ROOT / path).exists(), f"pyproject.toml names {path}"
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


def test_tests_stand_in_rooms():
    """A folder of tests/ is a room of jfl, or says of itself what it tests."""
    beside = {"accelerator", "contracts", "docs", "endurance", "experiments", "helpers", "kernels"}
    rooms = {room.split(".")[0] for room in FLOOR}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        place = path.relative_to(ROOT / "tests").parts
        alone = ("conftest.py", "test_layout.py")
        assert len(place) == 2 or place in {(name,) for name in alone}, f"move {path} into a room"
        assert len(place) == 1 or place[0] in rooms | beside, f"{path}: no room {place[0]}"
