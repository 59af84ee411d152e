"""The exit codes of commands, and one-line messages for errors."""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator

import jax

from ..core.errors import ArgumentError, HealthError

OK, FAILED, USAGE, UNHEALTHY, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143


class Failed(Exception):
    """Raised by a command that ran to its end, but whose check failed; the message says why."""


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, so that a command ends as after Ctrl-C."""


def run(program: str, work: Callable[[], object], debug: bool = False) -> int:
    """Run a command and return its exit code.

    An error of jfl or of the system (`OSError`) becomes one line on stderr.  Any other error is a
    bug in jfl and is raised with its traceback.

    Args:
        program: the name of the program at the start of the line.
        work: the command.
        debug: also print the traceback; JFL_DEBUG in the environment does the same.

    Returns:
        0 for success, 1 for a failed check or if nobody reads the output, 2 for wrong usage or a
        wrong config, 3 for a run stopped by Health, 130 for an interruption, 143 for SIGTERM.
    """
    try:
        try:
            with _raise_at_sigterm():
                work()
        finally:
            sys.stdout.flush()
        return OK
    except SystemExit as stop:  # raised by the argument parser
        return USAGE if stop.code else OK
    except Failed as error:
        _say(f"{program}: {error}", debug)
        return FAILED
    except HealthError as error:
        _say(f"{program}: stopped. {error}", debug)
        return UNHEALTHY
    except BrokenPipeError:  # whoever reads the output has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return FAILED
    except (ArgumentError, OSError) as error:
        words = str(error).removeprefix("jfl: ").removeprefix(f"{program}: ")
        _say(f"{program}: {words}", debug)
        return _leave(USAGE)
    except KeyboardInterrupt as stop:  # its message says what was kept
        ended, code = "interrupted", INTERRUPTED
        if isinstance(stop, Terminated):
            ended, code = "terminated", TERMINATED
        _say(f"{program}: {ended}. {stop}".rstrip(), debug)
        return _leave(code)


@contextlib.contextmanager
def _raise_at_sigterm() -> Generator[None]:
    """Raise `Terminated` at SIGTERM, with which schedulers end a process."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return

    def stop(*_):
        raise Terminated

    def stop_later(ignored):
        # Python ignores what is raised in a callback of a weak reference, of which JAX has many.
        if ignored.exc_type is not Terminated:
            return hook(ignored)
        return threading.Timer(0.01, signal.raise_signal, [signal.SIGTERM]).start()

    before, hook = signal.signal(signal.SIGTERM, stop), sys.unraisablehook
    sys.unraisablehook = stop_later
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _leave(code: int) -> int:
    """Return the exit code, or end one of several processes, which must not wait for lost ones."""
    if jax.distributed.is_initialized():
        os._exit(code)
    return code


def _say(line, debug):
    """Print a line to stderr, and the traceback if debugging is on."""
    if debug or os.environ.get("JFL_DEBUG", "0") != "0":
        traceback.print_exc()
    print(line, file=sys.stderr, flush=True)
