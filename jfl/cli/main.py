"""The command line: `jfl demo | train | sweep | predict | audit | report | ...`."""

import dataclasses
import functools
import importlib
import importlib.metadata
import sys
from typing import NamedTuple


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after `jfl`; None means `sys.argv[1:]`.

    Returns:
        The exit code: 0 for success, 1 for an audit above the proved epsilon or for a claim that is
        refuted or not proved, 2 for wrong usage or a wrong config, 3 for a run stopped by Health,
        130 for an interruption, 143 for SIGTERM.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        _help()
        return 0 if words else 2
    name, *arguments = words
    if name == "--version":
        print(importlib.metadata.version("jfl"))
        return 0
    # Imported late, because these modules import JAX, which takes longer than all of the above.
    from ..engine.compiling import keep_compiled_programs
    from . import exits

    if name not in COMMANDS:
        print(f"jfl: expected one of {', '.join(COMMANDS)}, but got {name!r}.", file=sys.stderr)
        return exits.USAGE
    keep_compiled_programs()
    module, _, function = COMMANDS[name].run.partition(":")
    run = getattr(importlib.import_module(f"jfl.cli.{module}"), function)
    return exits.run(f"jfl {name}", functools.partial(run, arguments), debug)


def _help():
    """Print the commands."""
    print("usage: jfl COMMAND [--help] ...\n\nDifferentially private federated learning in JAX.\n")
    print("\n".join(f"  {name:<10} {command.help}" for name, command in COMMANDS.items()))
    print("\n--debug, or JFL_DEBUG=1 in the environment, shows the traceback of an error.")
    print("\nexample: jfl train --preset digits-client-eps8 --out runs/first")


# --- report, list


def _report(arguments):
    """Run `jfl report`."""
    from ..report import page
    from .options import parse

    command = parse(page.flags(), arguments, "jfl report")
    print(page.main(command.directories, command.out))


@dataclasses.dataclass(frozen=True)
class List:
    """List everything that a config can name.

    example: jfl list
    """


def _list(arguments):
    """Run `jfl list`."""
    from . import console
    from .options import parse

    parse(List, arguments, "jfl list")
    console.names()


class Command(NamedTuple):
    """A command of `jfl`."""

    help: str
    run: str  # MODULE:FUNCTION of jfl.cli; it takes the arguments after the name of the command


COMMANDS = dict(
    demo=Command(
        "train on digits with three kinds of privacy: a table and a picture in a minute",
        "demo:demo",
    ),
    train=Command("train one model in a directory, with checkpoints and --resume", "runs:train"),
    sweep=Command("run many settings as few programs: any field may vary", "runs:sweep"),
    predict=Command("predict rows of a file with the model of a run", "runs:predict"),
    audit=Command(
        "attack a run with a worst-case canary: a lower bound of its epsilon, next to the proved "
        "and claimed ones",
        "audit:audit",
    ),
    report=Command(
        "write a page about runs and sweeps, in HTML and Markdown: tables, pictures, guarantees, "
        "settings",
        "main:_report",
    ),
    epsilon=Command(
        "compute epsilon, from numbers on the command line or from a config", "accounting:epsilon"
    ),
    calibrate=Command(
        "find the noise multiplier, the rounds or the sampling rate for an epsilon",
        "accounting:calibrate",
    ),
    new=Command("write a new algorithm with its test and card, or a project", "new:new"),
    list=Command(
        "list algorithms, datasets, partitions, samplers, models, optimizers and their options",
        "main:_list",
    ),
)
