"""Command lines of experiments: the signature of a function defines its flags."""

from collections.abc import Callable, Sequence
from typing import Any

import tyro


def called(command: Callable, program: str, arguments: Sequence[str] | None = None) -> Any:
    """Call a function with the arguments of a command line.

    Args:
        command: its arguments are flags, its docstring their help.
        program: the command as typed, for the help.
        arguments: instead of those of this process.
    """
    return tyro.cli(command, prog=program, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
