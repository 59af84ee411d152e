"""The command line: `jfl demo | train | sweep | report | epsilon | calibrate | list`."""

import dataclasses
import importlib.metadata
import os
import sys
import time

import jax

from ..core import checks
from ..core.errors import HealthError
from ..report import page
from ..runs import directory, record, train
from ..runs.build import build
from . import accounting, console, demo, runs
from .runs import command_of, config_of, from_file, parse

OK, USAGE, UNHEALTHY, INTERRUPTED = 0, 2, 3, 130
COMMANDS = dict(
    demo="real digits, fifty clients, three levels of privacy: a table and a picture in a minute",
    train="one run in a directory, with checkpoints and --resume",
    sweep="many runs as few programs: any field may take several values",
    report=(
        "one page of runs, sweeps and experiments, in HTML and Markdown: tables, pictures, "
        "guarantees, settings"
    ),
    epsilon="what a run is worth: epsilon of numbers on the command line, or of a config",
    calibrate="the noise multiplier, the rounds or the sampling rate for an epsilon",
    list="algorithms, datasets, partitions, samplers, models, optimizers",
)


def main(argv=None) -> int:
    """Run one command -> exit code: 0 done, 2 bad usage or config, 3 stopped by Health, 130
    interrupted."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(
            "usage: jfl COMMAND [--help] ...\n\nDifferentially private federated learning in JAX.\n"
        )
        print("\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()))
        print(
            "\nexample: jfl train --algorithm scaffold --noise-multiplier 1.1 --rounds 60 --out "
            "runs/first"
        )
        return OK if args else USAGE
    if args[0] == "--version":
        print(importlib.metadata.version("jfl"))
        return OK
    if args[0] not in COMMANDS:
        print(f"jfl: need one of {', '.join(COMMANDS)}; got {args[0]!r}.", file=sys.stderr)
        return USAGE
    _cache()
    try:
        RUN[args[0]](args[1:])
        return OK
    except SystemExit as stop:  # of the argument parser
        return USAGE if stop.code else OK
    except HealthError as error:
        print(f"jfl {args[0]}: stopped. {error}", file=sys.stderr)
        return UNHEALTHY
    except (ValueError, OSError) as error:
        said = str(error).removeprefix("jfl: ").removeprefix(f"jfl {args[0]}: ")
        print(f"jfl {args[0]}: {said}", file=sys.stderr, flush=True)
        if jax.distributed.is_initialized():  # without waiting for processes that are gone
            os._exit(USAGE)
        return USAGE
    except KeyboardInterrupt as stop:  # with words of what is kept, where something may be
        print(f"jfl {args[0]}: interrupted. {stop}".rstrip(), file=sys.stderr, flush=True)
        return INTERRUPTED


def _cache():
    """Compiled programs are kept between commands, in the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("JFL_CACHE_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl"
        )
        jax.config.update(
            "jax_compilation_cache_dir", os.path.join(os.path.expanduser(base), "programs")
        )


# --- demo


def _demo(args):
    command = parse(demo.Demo, args, "demo")
    checks.whole(
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
    took = time.perf_counter() - begun
    console.demo(
        f"jfl demo: {command.seeds} seeds each, {took:.0f} s with compilation", lines, demo.NOTES
    )
    print(f"Results and demo.png are in {out}")


# --- accounting


def _configured(kind, args, name):
    """epsilon and calibrate of a config, with the flags of their own that `kind` adds."""
    command, axes = command_of(kind, args, name)
    if axes:
        raise ValueError(f"jfl {name}: need a config without [sweep]; got one.")
    if command.plot is not None:
        record.picture_file(command.plot)
    return config_of(command), command


def _from_config(args):
    return any(a.split("=")[0] == "--config" for a in args)


def _drawn(curve, plot, words, target=None):
    """The table of a curve, and its picture if one is asked for."""
    if curve is not None:
        console.curve(curve)
    if plot is None:
        return
    if curve is None:
        raise ValueError("--plot: need a guarantee to draw; got none.")
    record.curves(plot, curve.rounds, curve.lines, curve.guarantee, words, target)
    print(f"Picture: {plot}")


def _epsilon(args):
    if _from_config(args):
        config, command = _configured(accounting.ConfigEpsilon, args, "epsilon")
        plan, config = build(config)
        _worth("epsilon", plan, config, command.plot)
        return
    c = parse(accounting.Epsilon, args, "epsilon")
    _numbers("epsilon", c, c.noise_multiplier)


def _worth(name, plan, config, plot, target=None):
    if text := train.noise_warning(plan, config):
        console.warn(name, text)
    guarantees, curve = accounting.worth_of(
        plan, config.rounds, config.delta, train.paper_claims(plan, config, config.rounds)
    )
    console.table(
        f"{config.rounds} rounds",
        console.PRIVACY,
        [console.privacy(g) for g in guarantees],
        console.caveats(guarantees),
    )
    noise = record.noise(plan, config.rounds)
    shown = " to ".join(dict.fromkeys(f"{z:.4g}" for z in noise[0])) if noise else "none"
    _drawn(
        curve,
        plot,
        f"{config.algorithm} on {config.dataset}, noise multiplier {shown}, {config.rounds} rounds",
        target,
    )


def _numbers(name, c, z, target=None):
    if c.plot is not None:
        record.picture_file(c.plot)
    guarantee, rounds = accounting.worth(c, z), c.rounds or accounting.ROUNDS
    if text := accounting.noise_warning(guarantee, z):
        console.warn(name, text)
    console.show(guarantee, z)
    _drawn(
        accounting.curve(accounting.one_round(c, z), rounds, c.delta, guarantee),
        c.plot,
        accounting.words(c, z),
        target,
    )


def _calibrate(args):
    if _from_config(args):
        config, command = _configured(accounting.ConfigCalibrate, args, "calibrate")
        if command.over == "rounds" and config.noise_multiplier is None:  # --epsilon replaced it
            config = dataclasses.replace(
                config, noise_multiplier=from_file(args)[0].get("noise_multiplier")
            )
        found, plan = accounting.solve_config(config, command.over, config.epsilon)
        value = getattr(found, command.over)
        if value is None:  # one for each client or round
            value = record.noise(plan, found.rounds)
            print(
                "noise_multiplier "
                + (f"= {value[0][0]:.6g} to {value[0][1]:.6g}" if value else "of no known privacy")
            )
        else:
            print(f"{command.over} = {value:.6g}")
        _worth("calibrate", plan, found, command.plot, config.epsilon)
        return
    c = parse(accounting.Calibrate, args, "calibrate")
    if c.plot is not None:
        record.picture_file(c.plot)
    found, z = accounting.solve(c)
    for name in accounting.CALIBRATED:
        if getattr(found, name) != getattr(c, name):
            print(f"{name} = {getattr(found, name):.9g}")
    _numbers("calibrate", found, z, c.epsilon)


# --- report


def _report(args):
    c = parse(page.flags(), args, "report")
    print(page.main(c.directories, c.out, c.tensorboard))


# --- list


def _list(args):
    @dataclasses.dataclass
    class List:
        """Everything that a config can name.

        example: jfl list
        """

    parse(List, args, "list")
    console.names()


RUN = dict(
    demo=_demo,
    train=runs.train,
    sweep=runs.sweep,
    report=_report,
    epsilon=_epsilon,
    calibrate=_calibrate,
    list=_list,
)
