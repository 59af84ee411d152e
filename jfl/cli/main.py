"""The command line: `jfl demo | train | sweep | predict | audit | report | ...`."""

import dataclasses
import functools
import importlib.metadata
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from ..core import checks
from ..engine.compiling import keep_compiled_programs
from ..report import page
from ..runs import directory, guarantee_rows, pictures, train
from ..runs.build import build
from . import accounting, audit, console, demo, exits, new, predict, runs
from .exits import INTERRUPTED as INTERRUPTED
from .exits import OK, USAGE
from .exits import UNHEALTHY as UNHEALTHY
from .options import config_of, has_config, parse, parse_with_config, split_config_files


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after `jfl`; None means `sys.argv[1:]`.

    Returns:
        The exit code: 0 for success, 1 for an audit above the proved epsilon, 2 for wrong usage or
        a wrong config, 3 for a run stopped by Health, 130 for an interruption.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        _help()
        return OK if words else USAGE
    name, *arguments = words
    if name == "--version":
        print(importlib.metadata.version("jfl"))
        return OK
    if name not in COMMANDS:
        print(f"jfl: expected one of {', '.join(COMMANDS)}, but got {name!r}.", file=sys.stderr)
        return USAGE
    keep_compiled_programs()
    return exits.run(f"jfl {name}", functools.partial(COMMANDS[name].run, arguments), debug)


def _help():
    print("usage: jfl COMMAND [--help] ...\n\nDifferentially private federated learning in JAX.\n")
    print("\n".join(f"  {name:<10} {command.help}" for name, command in COMMANDS.items()))
    print("\n--debug, or JFL_DEBUG=1 in the environment, shows the traceback of an error.")
    print("\nexample: jfl train --preset digits-client-eps8 --out runs/first")


# --- demo


def _demo(arguments):
    command = parse(demo.Demo, arguments, "jfl demo")
    checks.require_integer(
        "jfl demo", seeds=command.seeds, rounds=1 if command.rounds is None else command.rounds
    )
    out = directory.checked(command.out, resume=(command.out / "demo.png").exists())
    begun = time.perf_counter()
    with console.progress() as bar:
        task = bar.add_task("jfl demo", total=4, completed=-1, note="")
        lines = demo.main(
            out, command.rounds, command.seeds, lambda note: bar.update(task, advance=1, note=note)
        )
        bar.update(task, completed=4, note="done")
    seconds = time.perf_counter() - begun
    console.demo(
        f"jfl demo: {command.seeds} seeds each, {seconds:.0f} s with compilation", lines, demo.NOTES
    )
    print(f"Results and demo.png are in {out}")


# --- accounting


def _command_of_config(kind, arguments, program):
    """Parse a command of type `kind` whose flags include those of a config."""
    command, axes = parse_with_config(kind, arguments, program)
    if axes:
        checks.fail(program, "a config without [sweep]", "one")
    if command.plot is not None:
        pictures.require_picture_path(command.plot)
    return command


def _show_curve(curve, plot, setting, target=None):
    """Print the table of a curve, and draw it if `plot` is a path."""
    if curve is not None:
        console.curve(curve)
    if plot is None:
        return
    if curve is None:
        checks.fail("--plot", "a guarantee to draw", "none")
    pictures.draw_epsilon_curve(
        plot, curve.rounds, curve.epsilons, curve.guarantee, setting, target
    )
    print(f"Picture: {plot}")


def _epsilon(arguments):
    if has_config(arguments):
        command = _command_of_config(accounting.ConfigEpsilon, arguments, "jfl epsilon")
        plan, config = build(config_of(command))
        _show_plan("epsilon", plan, config, command.plot)
    else:
        numbers = parse(accounting.Epsilon, arguments, "jfl epsilon")
        _show_numbers("epsilon", numbers, numbers.noise_multiplier)


def _show_plan(name, plan, config, plot, target=None):
    if text := train.noise_warning(plan, config):
        console.warn(name, text)
    guarantees, curve = accounting.guarantees_of_plan(
        plan, config.rounds, config.delta, train.paper_claims(plan, config, config.rounds)
    )
    console.table(
        f"{config.rounds} rounds",
        console.PRIVACY,
        [console.privacy(g) for g in guarantees],
        console.caveats(guarantees),
    )
    noise = guarantee_rows.noise_levels(plan, config.rounds)
    shown = " to ".join(dict.fromkeys(f"{z:.4g}" for z in noise[0])) if noise else "none"
    _show_curve(
        curve,
        plot,
        f"{config.algorithm} on {config.dataset}, noise multiplier {shown}, {config.rounds} rounds",
        target,
    )


def _show_numbers(name, numbers, noise_multiplier, target=None):
    if numbers.plot is not None:
        pictures.require_picture_path(numbers.plot)
    guarantee = accounting.guarantee_of_numbers(numbers, noise_multiplier)
    if text := accounting.noise_warning(guarantee, noise_multiplier):
        console.warn(name, text)
    console.show(guarantee, noise_multiplier)
    _show_curve(
        accounting.curve_of_numbers(numbers, noise_multiplier, guarantee),
        numbers.plot,
        accounting.describe_numbers(numbers, noise_multiplier),
        target,
    )


def _calibrate(arguments):
    if has_config(arguments):
        _calibrate_config(arguments)
        return
    command = parse(accounting.Calibrate, arguments, "jfl calibrate")
    if command.plot is not None:
        pictures.require_picture_path(command.plot)
    solved, noise_multiplier = accounting.solve(command)
    for name in accounting.FOUND_FIELDS:
        if getattr(solved, name) != getattr(command, name):
            print(f"{name} = {getattr(solved, name):.9g}")
    _show_numbers("calibrate", solved, noise_multiplier, command.epsilon)


def _calibrate_config(arguments):
    command = _command_of_config(accounting.ConfigCalibrate, arguments, "jfl calibrate")
    config = config_of(command)
    if command.over == "rounds" and config.noise_multiplier is None:  # --epsilon replaced it
        in_files = split_config_files(arguments)[0].get("noise_multiplier")
        config = dataclasses.replace(config, noise_multiplier=in_files)
    solved, plan = accounting.solve_config(config, command.over, config.epsilon)
    value = getattr(solved, command.over)
    if value is not None:
        print(f"{command.over} = {value:.6g}")
    elif noise := guarantee_rows.noise_levels(plan, solved.rounds):  # differs by client or round
        print(f"noise_multiplier = {noise[0][0]:.6g} to {noise[0][1]:.6g}")
    else:
        print("noise_multiplier without a known guarantee")
    _show_plan("calibrate", plan, solved, command.plot, config.epsilon)


# --- report, list


def _report(arguments):
    command = parse(page.flags(), arguments, "jfl report")
    print(page.main(command.directories, command.out))


@dataclasses.dataclass(frozen=True)
class List:
    """List everything that a config can name.

    example: jfl list
    """


def _list(arguments):
    parse(List, arguments, "jfl list")
    console.names()


class Command(NamedTuple):
    """A command of `jfl`."""

    help: str
    run: Callable[[list[str]], object]  # takes the arguments after the name of the command


COMMANDS = dict(
    demo=Command(
        "train on digits with three kinds of privacy: a table and a picture in a minute",
        _demo,
    ),
    train=Command("train one model in a directory, with checkpoints and --resume", runs.train),
    sweep=Command("run many settings as few programs: any field may vary", runs.sweep),
    predict=Command("predict rows of a file with the model of a run", predict.predict),
    audit=Command(
        "attack a run with a worst-case canary: a lower bound of its epsilon, next to the proved "
        "and claimed ones",
        audit.audit,
    ),
    report=Command(
        "write a page about runs and sweeps, in HTML and Markdown: tables, pictures, guarantees, "
        "settings",
        _report,
    ),
    epsilon=Command("compute epsilon, from numbers on the command line or from a config", _epsilon),
    calibrate=Command(
        "find the noise multiplier, the rounds or the sampling rate for an epsilon", _calibrate
    ),
    new=Command("write a new algorithm: a file, its test and its card", new.new),
    list=Command(
        "list algorithms, datasets, partitions, samplers, models, optimizers and their options",
        _list,
    ),
)
