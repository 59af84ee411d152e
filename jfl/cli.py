"""The command line: `jfl demo | train | sweep | epsilon | calibrate | list`."""
import dataclasses
import os
import sys
from pathlib import Path

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
        import importlib.metadata
        print(importlib.metadata.version("jfl"))
        return OK
    if args[0] not in COMMANDS:
        print(f"jfl: need one of {', '.join(COMMANDS)}; got {args[0]!r}.", file=sys.stderr)
        return USAGE
    _cache()
    from .simulate import HealthError
    try:
        return globals()["_" + args[0]](args[1:]) or OK
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
    import jax
    if jax.config.jax_compilation_cache_dir is None:
        base = os.environ.get("JFL_CACHE_DIR") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jfl")
        jax.config.update("jax_compilation_cache_dir", os.path.join(os.path.expanduser(base), "programs"))


def _parse(kind, args, name, default=None):
    import tyro
    return tyro.cli(kind, args=args, prog=f"jfl {name}", **({} if default is None else {"default": default}))


def _from_file(args) -> tuple[dict, list]:
    """The values of --config FILE, and the other arguments: flags win over the file."""
    from . import config as configs
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
    """Parse a command whose flags are the fields of Config and a few of its own."""
    values, rest = _from_file(args)
    axes = values.pop("sweep", {})
    # noise given as a flag replaces noise given in the file, in either form
    for one, other in (("noise-multiplier", "epsilon"), ("epsilon", "noise-multiplier")):
        flags = {a.split("=")[0].replace("_", "-") for a in rest}
        if f"--{one}" in flags and f"--{other}" not in flags:
            values.pop(other.replace("-", "_"), None)
    return _parse(kind, rest, name, kind(**values)), axes


def _config(command):
    from .config import FIELDS, Config
    return Config(**{k: getattr(command, k) for k in FIELDS})


def _progress():
    from rich import progress
    from rich.console import Console
    return progress.Progress(progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
                             progress.TimeElapsedColumn(), progress.TextColumn("{task.fields[note]}"),
                             console=Console(stderr=True))


def _table(title, columns, rows, caption=None):
    from rich import box
    from rich.console import Console
    from rich.table import Table
    table = Table(title=title, box=box.SIMPLE_HEAD, caption=caption, title_justify="left", caption_justify="left")
    for name, right in columns:
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(v) for v in row))
    # a table in a file or a pipe is not cut to some terminal's width
    console = Console() if sys.stdout.isatty() else Console(width=150)
    console.print(table)


PRIVACY = [("ε", True), ("δ", True), ("unit", False), ("adjacency", False), ("view", False), ("method", False)]


def _privacy(g: dict) -> tuple:
    if g["epsilon"] is None:
        return ("none", "", "", "", "", g["method"])
    return f"{g['epsilon']:.4g}", f"{g['delta']:.0e}", g["unit"], g["adjacency"], g["view"], g["method"]


def _caveats(guarantees) -> str:
    seen = dict.fromkeys(c for g in guarantees if g["epsilon"] is not None for c in g["caveats"])
    return "\n".join(["Accuracy and losses lie outside every guarantee."] + [f"{c[0].upper()}{c[1:]}." for c in seen])


# --- demo ---------------------------------------------------------------------------------------------------------

def _demo(args):
    import time

    from . import demo, report
    from .train import claim

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

    command = _parse(Demo, args, "demo")
    out = claim(command.out, resume=True)                 # a second demo replaces the first
    begun = time.perf_counter()
    with _progress() as bar:
        task = bar.add_task("jfl demo", total=3, note="FedAvg")
        split, parts = demo.run(lambda name: bar.update(task, advance=1, note=name), command.rounds, command.seeds)
    total = time.perf_counter() - begun
    entries, table, groups, lines, shown = [], [], [], [], []
    for part in parts:
        guarantees = report.privacy(part["plan"], part["rounds"], demo.DELTA)
        best = _shown(guarantees)
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
                from .privacy.accounting import epsilons
                eps = epsilons(part["plan"], [int(r) for r in history["round"]], demo.DELTA, best["unit"], best["view"])
            table += report.rows(title, seed, history, eps)
        final = part["accuracy"][:, -1]
        groups.append(dict(label=f"{title}: {report.label([best])}" if private else title, round=history["round"],
                           accuracy=part["accuracy"], epsilon=best["epsilon"]))
        own = [g for g in guarantees if "implied" not in " ".join(g["caveats"])]
        for g in own:
            first = g is own[0]
            lines.append((title if first else "", f"{final.mean():.3f} ± {final.std():.3f}" if first else "", *_privacy(g),
                          f"{part['seconds']:.1f}" if first else ""))
        shown += [g for g in own if g["epsilon"] is not None]
    out.mkdir(parents=True, exist_ok=True)
    report.save(out, entries, table, report.manifest([parts[0]["plan"]], split, seconds=total,
                                                     seeds=list(range(command.seeds))))
    report.picture(out / "demo.png", groups, "1,797 handwritten digits, 50 clients, Dirichlet(0.3)")
    _table(f"jfl demo: {command.seeds} seeds each, {total:.0f} s with compilation",
           [("run", False), ("accuracy", True), *PRIVACY, ("seconds", True)], lines, _caveats(shown))
    print(f"Wrote summary.json, metrics.csv, manifest.json and demo.png into {out}")


def _shown(guarantees):
    """The row to plot: the server's view of an example, else the third party's of a client."""
    def rank(g):
        return (g["epsilon"] is None, "implied" in " ".join(g["caveats"]), g["view"] != "server")
    return min(guarantees, key=rank)


# --- train, sweep ---------------------------------------------------------------------------------------------------

def _train(args):
    from .config import Config, the_unit, the_view
    from .train import train

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
    if the_unit(config) == "client" and config.view is None:
        print(f"Guarantees are for view {the_view(config)}: the server adds the noise, so it sees uploads without.",
              file=sys.stderr)
    with _progress() as bar:
        task = bar.add_task("jfl train", total=config.rounds, note="compiling")

        def watch(round, accuracy, loss, epsilon):
            note = f"loss {loss:.3f}" + ("" if accuracy is None else f"  accuracy {accuracy:.3f}")
            bar.update(task, completed=round, note=note + ("" if epsilon is None else f"  ε {epsilon:.3g}"))

        entry = train(config, command.out, command.resume, watch)
    _results([entry], command.out)


def _sweep(args):
    from . import config as configs
    from .config import Config
    from .train import sweep

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

    command, axes = _command(Sweep, args, "sweep")
    for text in command.sweep:
        name, _, values = text.partition("=")
        name = name.replace("-", "_")
        axes[name] = [configs.coerce(name, _value(v), "--sweep") for v in values.split(",") if v]
        if not axes[name]:
            raise ValueError(f"--sweep: need NAME=VALUE,VALUE,...; got {text!r}.")
    if not axes:
        raise ValueError("jfl sweep: need fields that vary; got none. Give --sweep lr=0.1,0.3 or a table [sweep].")
    entries = sweep(_config(command), axes, command.out, command.strict)
    _results(entries, command.out)


def _value(text):
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _results(entries, out):
    """A row for each setting, over its seeds."""
    import numpy as np
    groups, rows = {}, []
    for e in entries:
        groups.setdefault(e["name"], []).append(e)

    def over(values):
        values = [v for v in values if v is not None]
        return "" if not values else f"{np.mean(values):.4f}" + (f" ± {np.std(values):.4f}" if len(values) > 1 else "")

    for name, group in groups.items():
        good = [e for e in group if not e.get("failed")]
        accuracy = over(e["accuracy"]["final"] for e in good)
        failed = len(group) - len(good)
        rows.append((name, len(group), f"{accuracy} ({failed} failed)" if failed else accuracy,
                     over(e["loss"] for e in good), *_privacy(_shown(group[0]["privacy"])),
                     f"{sum(e['seconds']['total'] for e in group):.1f}"))
    _table(None, [("run", False), ("seeds", True), ("accuracy", True), ("loss", True), *PRIVACY, ("seconds", True)], rows,
           _caveats([_shown(e["privacy"]) for e in entries]))
    print(f"Results are in {out}")


# --- accounting ---------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class _Numbers:
    rounds: int = 100
    """communication rounds"""
    steps: int = 1
    """noisy releases of a client in a round"""
    sampler: str = "poisson"
    """of examples (unit example) or clients (unit client): full | without_replacement | poisson"""
    rate: float | None = None
    """sampling rate: of examples in a step, or of clients in a round"""
    batch: int | None = None
    """with rows, instead of rate: batch / rows"""
    rows: int | None = None
    """rows of a client"""
    cohort: int | None = None
    """with clients: unit client instead of rate; unit example for a third party, which sees models only"""
    clients: int | None = None
    """number of clients"""
    unit: str = "example"
    """example | client"""
    delta: float = 1e-5
    """of the guarantee"""


def _event(c: _Numbers, z):
    """The event that numbers on the command line describe, and its adjacency and view."""
    from . import check
    from .privacy import events
    check.choice("jfl", ("example", "client"), unit=c.unit)
    check.choice("jfl", ("full", "without_replacement", "poisson"), sampler=c.sampler)
    check.whole("jfl", rounds=c.rounds, steps=c.steps)
    taken, whole = (c.batch, c.rows) if c.unit == "example" else (c.cohort, c.clients)
    names = "batch and rows" if c.unit == "example" else "cohort and clients"
    event = events.gaussian(z)
    if c.sampler == "without_replacement":
        if taken is None or whole is None:
            check.fail("jfl", f"{names} for sampler without_replacement", "one or none of them")
        event = events.without_replacement(taken, whole, event)
    elif c.sampler == "poisson":
        rate = c.rate
        if rate is None:
            if taken is None or whole is None:
                check.fail("jfl", f"rate, or {names}", "neither", "Or --sampler full.")
            check.whole("jfl", **dict(zip(names.split(" and "), (taken, whole))))
            rate = taken / whole
        event = events.poisson(rate, event)
    event = events.repeat(event, c.steps)
    view = "server" if c.unit == "example" else "third_party"
    if c.unit == "example" and c.cohort is not None:
        check.whole("jfl", cohort=c.cohort, clients=c.clients or 0)
        event, view = events.participation(c.cohort / c.clients, event), "third_party"
    return events.repeat(event, c.rounds), "add_remove" if c.sampler == "poisson" else "replace_one", view


def _show(c, epsilon, method, adjacency, view, z):
    row = dict(epsilon=epsilon, delta=c.delta, unit=c.unit, adjacency=adjacency, view=view, method=method)
    _table(None, [("noise multiplier", True), *PRIVACY], [(f"{z:.6g}", *_privacy(row))],
           "Noise multiplier is standard deviation over sensitivity: the clip norm under add_remove, twice it under "
           "replace_one.")


def _configured(args, name):
    """epsilon and calibrate of a config: the ledger reads the plan."""
    from .config import Config

    @dataclasses.dataclass(frozen=True)
    class Configured(Config):
        """What the run that a config describes is worth.

        example: jfl epsilon --config run.toml --rounds 200
        """

    command, axes = _command(Configured, args, name)
    if axes:
        raise ValueError(f"jfl {name}: need a config without [sweep]; got one.")
    return _config(command)


def _epsilon(args):
    if any(a.split("=")[0] == "--config" for a in args):
        from . import report
        from .config import build
        plan, config = build(_configured(args, "epsilon"))
        guarantees = report.privacy(plan, config.rounds, config.delta)
        _table(f"{config.rounds} rounds", PRIVACY, [_privacy(g) for g in guarantees], _caveats(guarantees))
        return

    @dataclasses.dataclass(frozen=True)
    class Epsilon(_Numbers):
        """What noise is worth.  With --config FILE.toml: of the run that the file describes.

        example: jfl epsilon --noise-multiplier 1.1 --rounds 200 --steps 5 --batch 16 --rows 600
        """
        noise_multiplier: float = 1.0
        """standard deviation of the noise over the sensitivity"""

    from .privacy.accounting import epsilon
    c = _parse(Epsilon, args, "epsilon")
    event, adjacency, view = _event(c, c.noise_multiplier)
    value, method = epsilon(event, c.delta)
    _show(c, value, method, adjacency, view, c.noise_multiplier)


def _calibrate(args):
    if any(a.split("=")[0] == "--config" for a in args):
        from . import config as configs
        config = _configured(args, "calibrate")
        if config.epsilon is None:
            raise ValueError("jfl calibrate: need epsilon in the config or --epsilon; got neither.")
        _, found = configs.build(config)
        print(f"noise_multiplier = {found.noise_multiplier:.6g}")
        return

    @dataclasses.dataclass(frozen=True)
    class Calibrate(_Numbers):
        """The noise multiplier for an epsilon.  With --config FILE.toml: for the run that the file describes.

        example: jfl calibrate --epsilon 4 --rounds 200 --steps 5 --batch 16 --rows 600
        """
        epsilon: float = 1.0
        """to reach"""

    from .privacy.accounting import epsilon, solve_noise
    c = _parse(Calibrate, args, "calibrate")
    z = solve_noise(lambda z: _event(c, z)[0], c.epsilon, c.delta)
    event, adjacency, view = _event(c, z)
    _show(c, *epsilon(event, c.delta), adjacency, view, z)


# --- list -----------------------------------------------------------------------------------------------------------

def _list(args):
    @dataclasses.dataclass
    class List:
        """Everything that a config can name.

        example: jfl list
        """

    _parse(List, args, "list")
    from . import algorithms, batches, models, sampling
    from .config import OPTIMIZERS
    from .data import datasets, partition
    rows = []
    for kind, module in dict(algorithm=algorithms, dataset=datasets, partition=partition, sampler=sampling,
                             batch_sampler=batches, model=models).items():
        for name in module.__all__:
            if name not in ("arrays", "natural"):
                text = " ".join((getattr(module, name).__doc__ or "").strip().split("\n\n")[0].split())
                rows.append((kind, name, text.split(". ")[0].rstrip(".:")))
    rows += [("optimizer", name, "on clients or server (optax)") for name in OPTIMIZERS]
    _table(None, [("kind", False), ("name", False), ("what it is", False)], rows)


if __name__ == "__main__":
    sys.exit(main())
