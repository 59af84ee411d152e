"""How a command ends: its exit code, and one line for what went wrong."""

import os
import sys
import traceback
from collections.abc import Callable

import jax

from ..core.errors import ArgumentError, HealthError

OK, FAILED, USAGE, UNHEALTHY, INTERRUPTED = 0, 1, 2, 3, 130


class Failed(Exception):
    """A command did its work, and what it checked does not hold; the message says what."""


def run(program: str, work: Callable[[], object], debug: bool = False) -> int:
    """Do the work of a command.

    What jfl refuses, and what the system refuses (`OSError`), is one line on stderr.  Any other
    error is a mistake in jfl, and passes with its traceback.

    Args:
        program: who speaks in the line.
        work: what to do.
        debug: also show the traceback of what was refused; so does a JFL_DEBUG in the environment.

    Returns:
        0 done, 1 a check that failed, 2 bad usage or config, 3 stopped by Health, 130 interrupted.
    """
    try:
        work()
        return OK
    except SystemExit as stop:  # of the argument parser
        return USAGE if stop.code else OK
    except Failed as error:
        _say(f"{program}: {error}", debug)
        return FAILED
    except HealthError as error:
        _say(f"{program}: stopped. {error}", debug)
        return UNHEALTHY
    except (ArgumentError, OSError) as error:
        words = str(error).removeprefix("jfl: ").removeprefix(f"{program}: ")
        _say(f"{program}: {words}", debug)
        if jax.distributed.is_initialized():  # without waiting for processes that are gone
            os._exit(USAGE)
        return USAGE
    except KeyboardInterrupt as stop:  # with words of what is kept, where something may be
        _say(f"{program}: interrupted. {stop}".rstrip(), debug)
        return INTERRUPTED


def _say(line, debug):
    if debug or os.environ.get("JFL_DEBUG", "0") != "0":
        traceback.print_exc()
    print(line, file=sys.stderr, flush=True)
