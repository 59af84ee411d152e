"""Command lines from dataclasses: each field becomes a flag, with its help text."""

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Sequence
from typing import Any

from ..core import checks, options
from ..runs import config as configs
from ..runs.config import Config

Command = typing.TypeVar("Command")
# The sections of the help of a command that takes a config: the fields that `--help` shows, and
# after the bar those that only `--help-all` shows.
SECTIONS = dict(
    data="data label owner dataset partition clients alpha min_rows classes_per_client"
    " preprocess | groups group_rows group_noise holdout partition_seed",
    model="model hidden | compute",
    algorithm="algorithm cohort rate batch steps lr optimizer server_lr mu | sampler"
    " batch_sampler server_optimizer lr_schedule l2 weights impact average_from",
    privacy="unit epsilon noise_multiplier delta clip clip_norm adjacency view | strategy"
    " noise_shape bands band_exponent reading lemma2 per_client_noise clip_decay noise_decay mode"
    " paper",
    run="rounds seed evaluate_every | allow_empty checkpoint_every",
)
# The section of an option of a kind of factory; others are in the section of the algorithm.
KINDS = dict(dataset="data", partition="data", model="model", strategy="privacy")
HELP_WIDTH = 79


def parse(
    kind: type[Command],
    arguments: Sequence[str],
    program: str,
    default: Command | None = None,
) -> Command:
    """Read a command line into a dataclass.

    Args:
        kind: a dataclass with a flag for each field.  `options.field(default, help)` sets the help
            of a flag; the docstring of the class is the text of `--help`.
        arguments: command-line arguments.
        program: the name of the program in errors and in `--help`.
        default: an object with the values of missing flags; None means the defaults of the fields.

    Returns:
        An object of `kind`.

    Raises:
        ArgumentError: For a flag with an empty value.
        SystemExit: With code 0 after `--help`, and with code 2 after a message about a wrong flag.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Greeting:
        ...     name: str = options.field("world", "whom to greet")
        >>> parse(Greeting, ["--name", "you"], "greet")
        Greeting(name='you')
    """
    import tyro

    for before, word in zip((program, *arguments), arguments):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            checks.fail(program, f"a value for {word.rstrip('=') or before}", "an empty one")
    flags = _flags(kind, default)
    if issubclass(kind, Config) and {"-h", "--help", "--help-all"} & {*arguments}:
        print(_help_text(kind, default, program, "--help-all" in arguments))
        raise SystemExit(0)
    parsed = tyro.cli(flags, args=arguments, prog=program)
    made: Any = kind
    return made(**{f.name: getattr(parsed, f.name) for f in dataclasses.fields(made)})


def _flags(kind, default):
    """Return the dataclass with the help of each field next to its type, as the parser needs it."""
    import tyro

    hints, flags = typing.get_type_hints(kind, include_extras=True), []
    if not any("help" in f.metadata for f in dataclasses.fields(kind)):
        return kind  # the docstrings of the fields are their help
    for f in dataclasses.fields(kind):
        hint = hints[f.name]
        if f.metadata.get("repeated"):
            hint = tyro.conf.UseAppendAction[hint]
        hint = typing.Annotated[hint, tyro.conf.arg(help=f.metadata.get("help"))]
        value = f.default if default is None else getattr(default, f.name)
        flags.append((f.name, hint, dataclasses.field(default=value)))
    return dataclasses.make_dataclass(kind.__name__, flags, namespace=dict(__doc__=kind.__doc__))


def _help_text(kind, default, program: str, everything: bool) -> str:
    """Return the help of a command that takes a config, with its flags in sections.

    Without `everything` it has the common flags only.
    """
    fields = {f.name: f for f in dataclasses.fields(kind)}
    listed = {section: names.split(" | ") for section, names in SECTIONS.items()}
    common = {section: names.split() for section, (names, _) in listed.items()}
    more = {section: names.split() for section, (_, names) in listed.items()}
    known = {name for names in (*common.values(), *more.values()) for name in names}
    for name in fields.keys() - known & fields.keys():
        if name in configs.OPTIONS:
            more[KINDS.get(next(iter(configs.OPTIONS[name].takers)), "algorithm")].append(name)
    common["run"] += [name for name in fields if name not in known | configs.FIELDS.keys()]
    lines = [f"usage: {program} [options]", "", inspect.cleandoc(kind.__doc__ or "")]
    for section in SECTIONS:
        names = common[section] + (more[section] if everything else [])
        lines += ["", f"{section}:"]
        for name in names:
            value = fields[name].default if default is None else getattr(default, name)
            lines += _help_lines(fields[name], value, everything)
    return "\n".join([*lines, "", f"--help-all explains all {len(fields)} options."])


def _help_lines(f, value, everything: bool) -> list[str]:
    """Return the lines about a flag; without `everything` its text is shortened."""
    kind, _ = options.split_optional(f.type)
    is_many = typing.get_origin(kind) is tuple
    item = typing.get_args(kind)[0] if is_many else kind
    flag = f"--{'no-' * (value is True)}{f.name.replace('_', '-')}"
    if item is not bool:
        flag += f" {item.__name__.upper()}{' ...' * is_many}"
    shown = "" if value is None or isinstance(value, bool) or value in ("", ()) else f" [{value}]"
    text, room = f.metadata["help"], HELP_WIDTH - 27
    if not everything:  # as many clauses as fit on a line, but at least one
        ends = [m.start() for m in re.finditer(r"[;,.] | \(|$", text)]
        text = text[: max([n for n in ends if n + len(shown) <= room], default=ends[0])]
    wrapped = textwrap.wrap(text + shown, room)
    return [f"  {left:<24} {line}" for left, line in zip([flag, *[""] * len(wrapped)], wrapped)]


def parse_devices(flag: str, words: str) -> str | int | None:
    """Return the argument `mesh` (of `jfl.simulate`) for the value of a flag.

    Args:
        flag: the name of the flag, for messages.
        words: the value of the flag, a number or "auto".

    Returns:
        A number of devices, "auto", or None for one device.
    """
    if words == "auto":
        return words
    if not words.isdecimal():
        checks.fail(flag, "a number, or auto", checks.short_repr(words))
    return None if words == "1" else int(words)


# --- commands that a config file may fill


def has_config(arguments: Sequence[str]) -> bool:
    """Return whether the arguments name a config file or a preset."""
    return any(word.split("=")[0] in ("--config", "--preset") for word in arguments)


def split_config_files(arguments: Sequence[str]) -> tuple[dict, list[str]]:
    """Read the files of `--config FILE` and the presets of `--preset NAME`.

    Returns:
        Their values, where later ones replace earlier ones; and the other arguments.
    """
    values, rest, words = {}, [], iter(arguments)
    read = {
        "--config": ("a TOML file", configs.load),
        "--preset": ("a name", configs.preset_fields),
    }
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
    kind: type[Command],
    arguments: Sequence[str],
    program: str,
    own: Sequence[str] = (),
    of_sweep: bool = False,
) -> tuple[Command, dict]:
    """Read a command whose flags are the fields of `Config` and a few more.

    Flags take precedence over files.

    Args:
        kind: the dataclass of the command.
        arguments: command-line arguments.
        program: the name of the program in errors and in `--help`.
        own: fields of `Config` that mean something else for this command, so files do not set them.
        of_sweep: whether files may have axes, in a table [sweep].

    Returns:
        The command, and the axes of a sweep from a file.
    """
    values, rest = split_config_files(arguments)
    axes = values.pop("sweep", {})
    if axes and not of_sweep:
        checks.fail(
            program,
            "the config of one run",
            "one with [sweep]",
            "Leave [sweep] out, or use jfl sweep.",
        )
    # Noise that is given by a flag replaces noise in the file, in either form.
    flags = {word.split("=")[0].replace("_", "-") for word in rest}
    for one, other in (("noise-multiplier", "epsilon"), ("epsilon", "noise-multiplier")):
        if f"--{one}" in flags and f"--{other}" not in flags:
            values.pop(other.replace("-", "_"), None)
    if "--data" in flags or "data" in values:
        values = dict(dataset="file", partition="natural") | values
    filled = {name: value for name, value in values.items() if name not in own}
    return parse(kind, rest, program, kind(**filled)), axes


def config_of(command) -> Config:
    """Return the `Config` that consists of a command's flags."""
    values = {name: getattr(command, name) for name in configs.FIELDS}
    return Config(**values | dict(data=configs.coerce("data", command.data, "--data")))
