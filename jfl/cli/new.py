"""The command `jfl new KIND NAME`: write an algorithm or a small project, ready to run."""

import dataclasses
import importlib.util
import itertools
import keyword
import sys
from pathlib import Path

from ..core import checks
from ..core.options import field
from .options import parse

TEMPLATES = Path(__file__).parent / "templates"
# What there is to write -> the command that tries it, in the directory of the new files.
KINDS = {"algorithm": "python -m pytest test_NAME.py", "project": "python run.py"}


@dataclasses.dataclass(frozen=True)
class New:
    """Write files that are ready to run and to change.

    KIND algorithm writes NAME.py with an algorithm, its test and its card. KIND project writes a
    directory NAME with data, a model, a plan and a script that trains at several epsilons and
    reports.

    example: jfl new algorithm fedmine --out mine

    example: jfl new project private_digits
    """

    out: Path = field(Path("."), "the directory of the new files, or of the new project")


def new(arguments: list[str]) -> None:
    """Run `jfl new KIND NAME`: write the files, unless one of them exists already."""
    words = [*itertools.takewhile(lambda word: not word.startswith("-"), arguments)]
    command = parse(New, arguments[len(words) :], "jfl new KIND NAME")
    if len(words) != 2 or words[0] not in KINDS:
        checks.fail("jfl new", "algorithm NAME or project NAME", " ".join(words) or "nothing")
    kind, name = words
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        need = "a lower-case identifier that is not a keyword of Python, such as fedmine"
        checks.fail(f"jfl new {kind}", need, repr(name))
    out = command.out / name if kind == "project" else command.out
    files = {
        template.name.removesuffix(".txt").replace("NAME", name): template
        for template in sorted((TEMPLATES / kind).glob("*.txt"))
    }
    existing = [file for file in files if (out / file).exists()]
    if existing:
        checks.fail(
            f"jfl new {kind}",
            "files that do not exist yet",
            ", ".join(str(out / file) for file in existing),
            "Choose another name or --out: nothing is overwritten.",
        )
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if name in sys.modules or (spec is not None and spec.origin):  # else a folder without modules
        checks.fail(
            f"jfl new {kind}",
            "a name that no installed module has",
            repr(name),
            "The new files would hide that module: choose another name.",
        )
    out.mkdir(parents=True, exist_ok=True)
    for file, template in files.items():
        (out / file).write_text(template.read_text("utf-8").replace("NAME", name), "utf-8")
    here = out == Path()
    print(
        f"Wrote {', '.join(files)} in {'this folder' if here else out}. Try: "
        f"{'' if here else f'cd {out} && '}{KINDS[kind].replace('NAME', name)}"
    )
