"""Flags: a dataclass whose fields say what they mean becomes a command's arguments.

The commands of `jfl` and the scripts of experiments parse with the one function `parse`.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Sequence
from typing import Any

from ..core import checks
from ..core.options import field as field
from ..runs import config as configs
from ..runs import presets
from ..runs.config import Config

Command = typing.TypeVar("Command")


def parse(
    kind: type[Command],
    arguments: Sequence[str] | None = None,
    program: str = "jfl",
    default: Command | None = None,
) -> Command:
    """Read a command line into a dataclass.

    Args:
        kind: a dataclass with a flag for each field.  `field(default, help)` of this module gives
            the flag its text; the docstring of the class is the text of `--help`.
        arguments: the words behind the program's name; None: those of this process.
        program: how errors and `--help` call the program.
        default: what the flags that are not given fall back to; None: the defaults of the fields.

    Returns:
        An object of `kind`.

    Raises:
        ArgumentError: for a flag with an empty value.
        SystemExit: after `--help`, with code 0; after a message on what is no such command, with 2.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Greeting:
        ...     name: str = field("world", "whom to greet")
        >>> parse(Greeting, ["--name", "you"], "greet")
        Greeting(name='you')
    """
    import tyro

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for before, word in zip((program, *arguments), arguments):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            checks.fail(program, f"a value for {word.rstrip('=') or before}", "an empty one")
    flags = _flags(kind, default)
    parsed = tyro.cli(flags, args=arguments, prog=program)
    made: Any = kind
    return made(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(made)})


def _flags(kind, default):
    """The dataclass as the parser reads it: the help of each field beside its type."""
    import tyro

    hints, flags = typing.get_type_hints(kind, include_extras=True), []
    if not any("help" in f.metadata for f in dataclasses.fields(kind)):
        return kind  # its texts stand below its fields
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        if f.metadata.get("repeated"):
            hint = tyro.conf.UseAppendAction[hint]
        hint = typing.Annotated[hint, tyro.conf.arg(help=f.metadata.get("help"))]
        value = f.default if default is None else getattr(default, f.name)
        flags.append((f.name, hint, dataclasses.field(default=value)))
    return dataclasses.make_dataclass(kind.__name__, flags, namespace=dict(__doc__=kind.__doc__))


# --- commands that a config file may fill


def has_config(arguments: Sequence[str]) -> bool:
    """Whether a config is named: by file or as a preset."""
    return any(word.split("=")[0] in ("--config", "--preset") for word in arguments)


def split_config_files(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """Read the files of `--config FILE`, and the settings of `--preset NAME`.

    Returns:
        Their values, of which later ones replace earlier ones; and the other arguments.
    """
    values, rest, words = {}, [], iter(arguments)
    read = {"--config": ("a TOML file", configs.load), "--preset": ("a name", presets.fields)}
    for word in words:
        flag = word.split("=")[0]
        if flag not in read:
            rest.append(word)
            continue
        need, load = read[flag]
        given = word.partition("=")[2] or next(words, None)
        if given is None:
            checks.fail(flag, need, "nothing")
        values |= load(given)
    return values, rest


def parse_with_config(
    kind: type[Command], arguments: Sequence[str], program: str, own: Sequence[str] = ()
) -> tuple[Command, dict]:
    """Read a command whose flags are the fields of `Config` and a few of its own.

    Flags win over files.

    Args:
        kind: of the command.
        arguments: the words behind the program's name.
        program: how errors and `--help` call the program.
        own: fields of `Config` that mean something else to this command: no file fills them.

    Returns:
        The command, and the axes of a sweep that a file names.
    """
    values, rest = split_config_files(arguments)
    axes = values.pop("sweep", {})
    # noise given as a flag replaces noise given in the file, in either form
    flags = {word.split("=")[0].replace("_", "-") for word in rest}
    for one, other in (("noise-multiplier", "epsilon"), ("epsilon", "noise-multiplier")):
        if f"--{one}" in flags and f"--{other}" not in flags:
            values.pop(other.replace("-", "_"), None)
    filled = {name: value for name, value in values.items() if name not in own}
    return parse(kind, rest, program, kind(**filled)), axes


def config_of(command) -> Config:
    """The config among a command's flags."""
    return Config(**{name: getattr(command, name) for name in configs.FIELDS})
