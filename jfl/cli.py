"""The command line: `jfl demo | train | sweep | report | epsilon | calibrate | list`."""
import contextlib
import dataclasses
import importlib.metadata
import os
import sys
import time
from pathlib import Path

import jax

from . import accountant, check, console, demo, page, report, sweeps, train
from . import config as configs
from .assemble import build
from .config import Config
from .simulate import HealthError

OK, USAGE, UNHEALTHY = 0, 2, 3
COMMANDS = dict(
    demo="real digits, fifty clients, three levels of privacy: a table and a picture in a minute",
    train="one run in a directory, with checkpoints and --resume",
    sweep="many runs as few programs: any field may take several values",
    report="one page of runs, sweeps and experiments, in HTML and Markdown: tables, pictures, guarantees, settings",
    epsilon="what a run is worth: epsilon of numbers on the command line, or of a config",
    calibrate="the noise multiplier, the rounds or the sampling rate for an epsilon",
    list="algorithms, datasets, partitions, samplers, models, optimizers")


def main(argv=None) -> int:
    """Run one command -> exit code: 0 done, 2 bad usage or config, 3 stopped by Health."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print("usage: jfl COMMAND [--help] ...\n\nDifferentially private federated learning in JAX.\n")
        print("\n".join(f"  {name:<10} {text}" for name, text in COMMANDS.items()))
        print("\nexample: jfl train --algorithm scaffold --noise-multiplier 1.1 --rounds 60 --out runs/first")
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
    except SystemExit as stop:                            # of the argument parser
        return USAGE if stop.code else OK
    except HealthError as error:
        print(f"jfl {args[0]}: stopped. {error}", file=sys.stderr)
        return UNHEALTHY
    except (ValueError, OSError) as error:
        print(f"jfl {args[0]}: {str(error).removeprefix(f'jfl {args[0]}: ')}", file=sys.stderr)
        return USAGE


def _cache():
    """Compiled programs are kept between commands, in the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("JFL_CACHE_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl")
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.expanduser(base), "programs"))


def _parse(kind, args, name, default=None):
    import tyro
    return tyro.cli(kind, args=args, prog=f"jfl {name}", **({} if default is None else {"default": default}))


def _from_file(args) -> tuple[dict, list]:
    """The values of --config FILE, and the other arguments: flags win over the file."""
    rest, values, i = [], {}, 0
    while i < len(args):
        if args[i] == "--config" or args[i].startswith("--config="):
            inline = args[i].partition("=")[2]
            if not inline and i + 1 == len(args):
                raise ValueError("--config: need a TOML file; got nothing.")
            values |= configs.load(inline or args[i + 1])
            i += 1 if inline else 2
        else:
            rest.append(args[i])
            i += 1
    return values, rest


def _command(kind, args, name):
    """Parse a command whose flags are the fields of Config and a few of its own -> it, and the axes of a sweep."""
    values, rest = _from_file(args)
    axes = values.pop("sweep", {})
    # noise given as a flag replaces noise given in the file, in either form
    for one, other in (("noise-multiplier", "epsilon"), ("epsilon", "noise-multiplier")):
        flags = {a.split("=")[0].replace("_", "-") for a in rest}
        if f"--{one}" in flags and f"--{other}" not in flags:
            values.pop(other.replace("-", "_"), None)
    return _parse(kind, rest, name, kind(**values)), axes


def _config(command):
    return Config(**{k: getattr(command, k) for k in configs.FIELDS})


# --- demo ---------------------------------------------------------------------------------------------------------

def _demo(args):
    command = _parse(demo.Demo, args, "demo")
    check.whole("jfl demo", seeds=command.seeds, rounds=1 if command.rounds is None else command.rounds)
    out = train.claim(command.out, resume=(command.out / "demo.png").exists())
    begun = time.perf_counter()
    with console.progress() as bar:
        task = bar.add_task("jfl demo", total=4, completed=-1, note="")
        lines = demo.main(out, command.rounds, command.seeds, lambda note: bar.update(task, advance=1, note=note))
        bar.update(task, completed=4, note="done")
    took = time.perf_counter() - begun
    console.demo(f"jfl demo: {command.seeds} seeds each, {took:.0f} s with compilation", lines, demo.NOTES)
    print(f"Results and demo.png are in {out}")


# --- train, sweep ---------------------------------------------------------------------------------------------------

def _train(args):
    @dataclasses.dataclass(frozen=True)
    class Train(Config):
        """Train one model and keep it in a directory.

        example: jfl train --algorithm scaffold --dataset digits --clients 50 --cohort 10 --rounds 60 --steps 20
        --batch 16 --lr 0.5 --clip-norm 1 --noise-multiplier 1.1 --out runs/scaffold

        --config FILE.toml sets fields; flags win over it.
        """
        out: Path = Path("runs/train")
        """run directory: new or empty, unless --resume"""
        resume: bool = False
        """go on from the last checkpoint in --out"""

    command, axes = _command(Train, args, "train")
    if axes:
        raise ValueError("jfl train: need a config without [sweep]; got one. Use jfl sweep --config.")
    config = _config(command)
    if configs.the_unit(config) == "client" and config.view is None:
        print(f"Guarantees are for view {configs.the_view(config)}: the server adds the noise, so it sees uploads without.",
              file=sys.stderr)
    with console.progress() as bar:
        task = bar.add_task("jfl train", total=config.rounds, note="compiling")

        def watch(round, accuracy, loss, epsilon):
            seen = (("loss", loss), ("accuracy", accuracy), ("ε", epsilon))
            bar.update(task, completed=round, note="  ".join(f"{k} {v:.3g}" for k, v in seen if v is not None))

        entry = train.train(config, command.out, command.resume, watch)
    console.results([entry], command.out)


def _sweep(args):
    import tyro

    @dataclasses.dataclass(frozen=True)
    class Sweep(Config):
        """Run every combination of some fields' values; points that share their shapes are one program.

        example: jfl sweep --rounds 40 --sweep lr=0.1,0.3 --sweep noise-multiplier=0.5,1 --sweep seed=0,1,2

        --config FILE.toml sets fields, and its table [sweep] lists of values; flags win over it.
        """
        out: Path = Path("runs/sweep")
        """run directory: new or empty"""
        sweep: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
        """NAME=VALUE,VALUE,...; once for each field that varies"""
        strict: bool = False
        """exit with 3 if any point fails, not only if all do"""

    command, axes = _command(Sweep, args, "sweep")
    for text in command.sweep:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        axes[name] = [configs.coerce(name, _value(v), "--sweep") for v in values.split(",") if v]
        if not axes[name]:
            raise ValueError(f"--sweep: need NAME=VALUE,VALUE,...; got {text!r}.")
    if not axes:
        raise ValueError("jfl sweep: need fields that vary; got none. Give --sweep lr=0.1,0.3 or a table [sweep].")
    entries = sweeps.sweep(_config(command), axes, command.out, command.strict)
    console.results(entries, command.out)


def _value(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# --- accounting ---------------------------------------------------------------------------------------------------------

def _configured(kind, args, name):
    """epsilon and calibrate of a config, with the flags of their own that `kind` adds."""
    command, axes = _command(kind, args, name)
    if axes:
        raise ValueError(f"jfl {name}: need a config without [sweep]; got one.")
    if command.plot is not None:
        report.picture_file(command.plot)
    return _config(command), command


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
    report.curves(plot, curve.rounds, curve.lines, curve.guarantee, words, target)
    print(f"Picture: {plot}")


def _epsilon(args):
    if _from_config(args):
        config, command = _configured(accountant.ConfigEpsilon, args, "epsilon")
        plan, config = build(config)
        _worth(plan, config, command.plot)
        return
    c = _parse(accountant.Epsilon, args, "epsilon")
    _numbers(c, c.noise_multiplier)


def _worth(plan, config, plot, target=None):
    guarantees, curve = accountant.worth_of(plan, config.rounds, config.delta, train.claims(plan, config, config.rounds))
    console.table(f"{config.rounds} rounds", console.PRIVACY, [console.privacy(g) for g in guarantees],
                  console.caveats(guarantees))
    noise = report.noise(plan, config.rounds)
    shown = " to ".join(dict.fromkeys(f"{z:.4g}" for z in noise[0])) if noise else "none"
    _drawn(curve, plot, f"{config.algorithm} on {config.dataset}, noise multiplier {shown}, {config.rounds} rounds", target)


def _numbers(c, z, target=None):
    if c.plot is not None:
        report.picture_file(c.plot)
    guarantee, rounds = accountant.worth(c, z), c.rounds or accountant.ROUNDS
    console.show(guarantee, z)
    _drawn(accountant.curve(accountant.one_round(c, z), rounds, c.delta, guarantee), c.plot,
           accountant.words(c, z), target)


def _calibrate(args):
    if _from_config(args):
        config, command = _configured(accountant.ConfigCalibrate, args, "calibrate")
        if command.over == "rounds" and config.noise_multiplier is None:      # --epsilon replaced it
            config = dataclasses.replace(config, noise_multiplier=_from_file(args)[0].get("noise_multiplier"))
        found, plan = accountant.solve_config(config, command.over, config.epsilon)
        value = getattr(found, command.over)
        if value is None:                                 # one for each client or round
            value = report.noise(plan, found.rounds)
            print("noise_multiplier " + (f"= {value[0][0]:.6g} to {value[0][1]:.6g}" if value else "of no known privacy"))
        else:
            print(f"{command.over} = {value:.6g}")
        _worth(plan, found, command.plot, config.epsilon)
        return
    c = _parse(accountant.Calibrate, args, "calibrate")
    if c.plot is not None:
        report.picture_file(c.plot)
    found, z = accountant.solve(c)
    for name in accountant.CALIBRATED:
        if getattr(found, name) != getattr(c, name):
            print(f"{name} = {getattr(found, name):.9g}")
    _numbers(found, z, c.epsilon)


# --- report ---------------------------------------------------------------------------------------------------------

def _report(args):
    c = _parse(page.flags(), args, "report")
    print(page.main(c.directories, c.out, c.tensorboard))


# --- list -----------------------------------------------------------------------------------------------------------

def _list(args):
    @dataclasses.dataclass
    class List:
        """Everything that a config can name.

        example: jfl list
        """

    _parse(List, args, "list")
    console.names()


RUN = dict(demo=_demo, train=_train, sweep=_sweep, report=_report, epsilon=_epsilon, calibrate=_calibrate, list=_list)

if __name__ == "__main__":
    sys.exit(main())
