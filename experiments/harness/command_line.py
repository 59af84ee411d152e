"""The command line of experiments: a function's signature is its flags."""

from collections.abc import Callable, Sequence
from typing import Any

import tyro


def called(command: Callable, program: str, arguments: Sequence[str] | None = None) -> Any:
    """Call a function with what a command line says.

    Args:
        command: its arguments are flags, its docstring their help.
        program: what is typed, for the help.
        arguments: in place of those of this process.
    """
    return tyro.cli(command, prog=program, args=arguments, config=(tyro.conf.FlagCreatePairsOff,))
