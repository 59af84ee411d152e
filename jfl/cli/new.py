"""The command `jfl new algorithm NAME`: write an algorithm, its test and its card."""

import dataclasses
import keyword
from pathlib import Path

from ..core import checks
from ..core.options import field
from .options import parse

TEMPLATES = Path(__file__).parent / "templates"


@dataclasses.dataclass(frozen=True)
class New:
    """Write NAME.py, test_NAME.py and NAME.md: an algorithm that is ready to run and to change.

    example: jfl new algorithm fedmine --out mine
    """

    out: Path = field(Path("."), "the directory of the new files")


def new(arguments: list[str]) -> None:
    """Run `jfl new algorithm NAME`: write the three files, unless one of them exists already."""
    words = [word for word in arguments[:2] if not word.startswith("-")]
    command = parse(New, arguments[len(words) :], "jfl new algorithm NAME")
    if not words or words[0] != "algorithm" or len(words) < 2:
        checks.fail("jfl new", "algorithm NAME", " ".join(words) or "nothing")
    name = words[1]
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        checks.fail("jfl new algorithm", "a name of Python, such as fedmine", repr(name))
    files = {
        template.name.removesuffix(".txt").replace("NAME", name): template
        for template in sorted(TEMPLATES.glob("*.txt"))
    }
    existing = [file for file in files if (command.out / file).exists()]
    if existing:
        checks.fail(
            "jfl new algorithm",
            "files that do not exist yet",
            ", ".join(str(command.out / file) for file in existing),
            "Choose another name or --out: nothing is overwritten.",
        )
    command.out.mkdir(parents=True, exist_ok=True)
    for file, template in files.items():
        (command.out / file).write_text(template.read_text().replace("NAME", name))
    print(f"{', '.join(files)} in {command.out}. Try: cd {command.out} && pytest test_{name}.py")
