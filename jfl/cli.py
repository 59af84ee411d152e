"""The command line: `jfl demo | train | sweep | epsilon | calibrate | list`."""
import dataclasses
import importlib.metadata
import os
import sys
import time
from pathlib import Path

import jax

from . import algorithms, assemble, batches, budget, demo, models, report, sampling, terminal, train
from . import config as configs
from .config import Config
from .data import datasets, partition
from .privacy.accounting import epsilons
from .simulate import HealthError
from .terminal import PRIVACY, table

OK, USAGE, UNHEALTHY = 0, 2, 3
COMMANDS = dict(
    demo="real digits, fifty clients, three levels of privacy: a table and a picture in a minute",
    train="one run in a directory, with checkpoints and --resume",
    sweep="many runs as few programs: any field may take several values",
    epsilon="what a run is worth: epsilon of numbers on the command line, or of a config",
    calibrate="the noise multiplier for an epsilon",
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
        print(f"jfl {args[0]}: {error}", file=sys.stderr)
        return USAGE


def _cache():
    """Compiled programs are kept between commands, in the user's cache folder."""
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("JFL_CACHE_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl")
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.expanduser(base), "programs"))


# --- demo ---------------------------------------------------------------------------------------------------------

def _demo(args):
    @dataclasses.dataclass
    class Demo:
        """Three levels of privacy on real handwritten digits held by fifty clients.

        example: jfl demo --out runs/demo
        """
        out: Path = Path("runs/demo")
        """directory for summary.json, metrics.csv and the picture"""
        rounds: int | None = None
        """fewer rounds than the demo's own, to try it"""
        seeds: int = 3
        """runs of each setting"""

    command = terminal.parse(Demo, args, "demo")
    out = train.claim(command.out, resume=True)                 # a second demo replaces the first
    begun = time.perf_counter()
    with terminal.progress() as bar:
        task = bar.add_task("jfl demo", total=3, note="FedAvg")
        split, parts = demo.run(lambda name: bar.update(task, advance=1, note=name), command.rounds, command.seeds)
    total = time.perf_counter() - begun
    entries, rows, groups, lines, shown = [], [], [], [], []
    for part in parts:
        guarantees = report.privacy(part["plan"], part["rounds"], demo.DELTA)
        best = terminal.shown(guarantees)
        private = best["epsilon"] is not None
        title = part["name"] + (f", z = {part['value']:g}" if private else "")
        share = 1 / len(part["points"])                   # seeds run together: a run's share of the program
        seconds = dict(compile=part["compile"] * share, total=part["seconds"] * share,
                       per_round=(part["seconds"] - part["compile"]) * share / part["rounds"])
        for i in part["points"]:
            history = report.lists(part["sweep"].metrics, i)
            seed = part["sweep"].points[i]["seed"]
            config = dict(algorithm="fedavg", dataset="digits", **{part["axis"]: part["value"]}, delta=demo.DELTA)
            entries.append(report.entry(title, config, seed, history, guarantees, seconds))
            eps = None
            if private:
                eps = epsilons(part["plan"], [int(r) for r in history["round"]], demo.DELTA, best["unit"], best["view"])
            rows += report.rows(title, seed, history, eps)
        final = part["accuracy"][:, -1]
        groups.append(dict(label=f"{title}: {report.label([best])}" if private else title, round=history["round"],
                           accuracy=part["accuracy"], epsilon=best["epsilon"]))
        own = [g for g in guarantees if "implied" not in " ".join(g["caveats"])]
        for g in own:
            first = g is own[0]
            lines.append((title if first else "", f"{final.mean():.3f} ± {final.std():.3f}" if first else "", *terminal.privacy(g),
                          f"{part['seconds']:.1f}" if first else ""))
        shown += [g for g in own if g["epsilon"] is not None]
    out.mkdir(parents=True, exist_ok=True)
    report.save(out, entries, rows, report.manifest([parts[0]["plan"]], split, seconds=total,
                                                     seeds=list(range(command.seeds))))
    report.picture(out / "demo.png", groups, "1,797 handwritten digits, 50 clients, Dirichlet(0.3)")
    table(f"jfl demo: {command.seeds} seeds each, {total:.0f} s with compilation",
           [("run", False), ("accuracy", True), *PRIVACY, ("seconds", True)], lines, terminal.caveats(shown))
    print(f"Wrote summary.json, metrics.csv, manifest.json and demo.png into {out}")


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

    command, axes = terminal.command(Train, args, "train")
    if axes:
        raise ValueError("jfl train: need a config without [sweep]; got one. Use jfl sweep --config.")
    config = terminal.config(command)
    if configs.the_unit(config) == "client" and config.view is None:
        print(f"Guarantees are for view {configs.the_view(config)}: the server adds the noise, so it sees uploads without.",
              file=sys.stderr)
    with terminal.progress() as bar:
        task = bar.add_task("jfl train", total=config.rounds, note="compiling")

        def watch(round, accuracy, loss, epsilon):
            note = f"loss {loss:.3f}" + ("" if accuracy is None else f"  accuracy {accuracy:.3f}")
            bar.update(task, completed=round, note=note + ("" if epsilon is None else f"  ε {epsilon:.3g}"))

        entry = train.train(config, command.out, command.resume, watch)
    terminal.results([entry], command.out)


def _sweep(args):
    @dataclasses.dataclass(frozen=True)
    class Sweep(Config):
        """Run every combination of some fields' values; points that share their shapes are one program.

        example: jfl sweep --rounds 40 --sweep lr=0.1,0.3 noise_multiplier=0.5,1,2 seed=0,1,2 --out runs/grid

        --config FILE.toml sets fields, and its table [sweep] lists of values; flags win over it.
        """
        out: Path = Path("runs/sweep")
        """run directory: new or empty"""
        sweep: tuple[str, ...] = ()
        """NAME=VALUE,VALUE,... for each field that varies"""
        strict: bool = False
        """exit with 3 if any point fails, not only if all do"""

    command, axes = terminal.command(Sweep, args, "sweep")
    for text in command.sweep:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        axes[name] = [configs.coerce(name, _value(v), "--sweep") for v in values.split(",") if v]
        if not axes[name]:
            raise ValueError(f"--sweep: need NAME=VALUE,VALUE,...; got {text!r}.")
    if not axes:
        raise ValueError("jfl sweep: need fields that vary; got none. Give --sweep lr=0.1,0.3 or a table [sweep].")
    entries = train.sweep(terminal.config(command), axes, command.out, command.strict)
    terminal.results(entries, command.out)


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# --- list -----------------------------------------------------------------------------------------------------------

def _list(args):
    @dataclasses.dataclass
    class List:
        """Everything that a config can name.

        example: jfl list
        """

    terminal.parse(List, args, "list")
    rows = []
    for kind, module in dict(algorithm=algorithms, dataset=datasets, partition=partition, sampler=sampling,
                             batch_sampler=batches, model=models).items():
        for name in module.__all__:
            if name not in ("arrays", "natural"):
                text = " ".join((getattr(module, name).__doc__ or "").strip().split("\n\n")[0].split())
                rows.append((kind, name, text.split(". ")[0].rstrip(".:")))
    rows += [("optimizer", name, "on clients or server (optax)") for name in assemble.OPTIMIZERS]
    table(None, [("kind", False), ("name", False), ("what it is", False)], rows)


RUN = dict(demo=_demo, train=_train, sweep=_sweep, epsilon=budget.epsilon, calibrate=budget.calibrate, list=_list)

if __name__ == "__main__":
    sys.exit(main())
