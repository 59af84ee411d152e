"""Workloads, data, clock, and checks of arithmetic that all drivers share; needs only numpy.

A driver gives `main` its name and `build(spec, data, mode) -> (run, leaves)`.  `run(rounds, tick)`
plays that many rounds and calls `tick(wait)` after each; `wait` (may be None) blocks until the
round is computed.  `leaves()` is the server's model as a list of float arrays; dense models give
weight [in, out], bias [out], layer by layer.  `data` holds x [clients, rows, ...] float32 and y
[clients, rows] int32, each client's rows next to each other in memory.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from types import SimpleNamespace

import numpy as np

# products: multiplications of one example's forward pass; a gradient takes twice as many again
_MNIST = dict(clients=100, rows=600, lr=0.1, clip=1.0, noise=1.0)
WORKLOADS = dict(
    W1=dict(
        _MNIST,
        level="record",
        hidden=(),
        cohort=10,
        steps=5,
        batch=10,
        parameters=7_850,
        products=7_840,
    ),
    W2=dict(
        _MNIST,
        level="record",
        hidden=(200,),
        cohort=20,
        steps=50,
        batch=20,
        parameters=159_010,
        products=158_800,
    ),
    W3=dict(
        _MNIST,
        level="client",
        image=(28, 28, 1),
        cohort=50,
        steps=12,
        batch=50,
        parameters=206_922,
        products=1_218_048,
    ),
    W5=dict(
        level="client",
        image=(32, 32, 3),
        clients=1000,
        rows=50,
        lr=0.1,
        clip=0.4,
        noise=1.0,
        cohort=50,
        steps=5,
        batch=10,
        parameters=1_626_442,
        products=16_835_200,
    ),
)
NOTES = dict(record="", client="noise multiplier 1; W5 without the dropout of pfl's benchmark")


class Unsupported(Exception):
    """This tool cannot do this workload, and why."""


def load(path) -> SimpleNamespace:
    """Return x and y of the .npz, with the rows of each client next to each other."""
    with np.load(path) as file:
        index = file["index"]
        return SimpleNamespace(x=file["x"][index], y=file["y"][index])


def family() -> list:
    """Return this process and its descendants; only this process if there is no /proc."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
        except OSError:
            continue  # it ended meanwhile
    found = [os.getpid()]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def cpu_seconds() -> float:
    """Return the user and system time of this process and of its descendants, also live ones."""
    total = time.process_time() + sum(os.times()[2:4])
    for process in family()[1:]:
        try:
            fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def forget_peak():
    """Reset the peak memory of this process, so that copies while reading data do not count."""
    gc.collect()
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # not allowed: the peak of the whole life


def peak_mib() -> float:
    """Return the sum of the peaks of resident memory over `family`.

    Shared pages count once per process.
    """
    total = 0.0
    for process in family():
        try:
            status = pathlib.Path(f"/proc/{process}/status").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")
        )
    return total


class Clock:
    """`tick` after each round; the first is the warm-up, then blocks of `rounds`.  Memory counts
    from here on."""

    def __init__(self, rounds):
        forget_peak()
        self.rounds, self.seen, self.peak, self.blocks = rounds, 0, 0.0, []
        self.resumed, self.cpu = time.perf_counter(), cpu_seconds()

    def tick(self, wait=None):
        self.seen += 1
        if (self.seen - 1) % self.rounds:
            return
        if wait:
            wait()
        ended, cpu = time.perf_counter(), cpu_seconds()
        each = self.rounds if self.blocks else 1
        self.blocks.append(((ended - self.resumed) / each, (cpu - self.cpu) / each))
        self.peak = max(self.peak, peak_mib())
        self.cpu = cpu_seconds()
        self.resumed = time.perf_counter()


def version(name):
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def quiet(wait=None):
    """Ignore a tick."""


def sound(spec, before, after):
    """Check that the model has the right size, has changed, and is finite."""
    count = sum(leaf.size for leaf in after)
    assert count == spec.parameters, f"{count} parameters, not {spec.parameters}"
    assert all(np.isfinite(leaf).all() for leaf in after), "parameters are not finite"
    assert any((a != b).any() for a, b in zip(before, after)), "parameters did not change"


def reference(params, data, spec) -> list:
    """Return the model after a round in numpy, without noise and with clipped examples.

    The batch of a client contains all of its rows.
    """
    models = []
    for x, y in zip(data.x, data.y):
        p = [leaf.astype(np.float64) for leaf in params]
        for _ in range(spec.steps):
            inputs = [x]
            for w, b in zip(p[:-2:2], p[1:-2:2]):
                inputs.append(np.maximum(inputs[-1] @ w + b, 0))
            z = inputs[-1] @ p[-2] + p[-1]
            z = np.exp(z - z.max(1, keepdims=True))
            back = [z / z.sum(1, keepdims=True) - np.eye(z.shape[1])[y]]
            for w, a in zip(p[-2:0:-2], inputs[:0:-1]):
                back.append((back[-1] @ w.T) * (a > 0))
            back = back[::-1]
            norms = np.sqrt(sum(((a**2).sum(1) + 1) * (d**2).sum(1) for a, d in zip(inputs, back)))
            scale = np.minimum(1, spec.clip / norms)[:, None] * spec.lr / spec.batch
            for i, (a, d) in enumerate(zip(inputs, back)):
                p[2 * i] -= a.T @ (d * scale)
                p[2 * i + 1] -= (d * scale).sum(0)
        models.append(p)
    return [np.mean(leaf, axis=0) for leaf in zip(*models)]


def check(build, spec, data, mode) -> dict:
    """Three clients with a batch of rows each, so that all is known but the noise: clipping,
    averaging, noise.

    Record level: the model after a round against `reference`, at the workload's clipping norm and
    at a small one.
    Client level: three clients alike, so that the mean of their clipped updates has the clipping
    norm.  Then the standard deviation of the noise.
    """

    def play(x, y, **change):
        tiny = dict(clients=3, rows=spec.batch, cohort=3, steps=2, noise=0.0)
        small = SimpleNamespace(**{**vars(spec), **tiny, **change})
        few = SimpleNamespace(x=np.ascontiguousarray(x), y=np.ascontiguousarray(y))
        run, leaves = build(small, SimpleNamespace(**vars(few)), mode)
        before = [leaf.copy() for leaf in leaves()]
        run(1, quiet)
        after = leaves()
        moved = np.concatenate([(a - b).ravel() for a, b in zip(after, before)]).astype(np.float64)
        return small, few, before, after, moved

    said = {}
    x, y = data.x[:3, : spec.batch], data.y[:3, : spec.batch]
    if spec.level == "client":
        x, y = np.stack([x[0]] * 3), np.stack([y[0]] * 3)
    for clip in (spec.clip, 1e-2):
        small, few, before, after, moved = play(x, y, clip=clip)
        norm = np.linalg.norm(moved)
        bound = clip if spec.level == "client" else small.lr * small.steps * clip
        assert 0 < norm <= bound * 1.001, f"an update of norm {norm}, the bound is {bound}"
        if spec.level == "client":
            assert clip > 1e-2 or norm > 0.99 * bound, (
                f"an update of norm {norm} is not clipped to {bound}"
            )
        else:
            wanted = reference(before, few, small)
            off = max(np.abs(a - w).max() for a, w in zip(after, wanted)) / max(
                np.abs(w - b).max() for w, b in zip(wanted, before)
            )
            allowed = (
                5e-3 if clip == 1e-2 else 2e-4
            )  # small steps suffer more from float32 parameters
            assert off < allowed, f"off the numpy reference by {off:.2%} of its largest step"
            said[f"off_reference_clip_{clip:g}"] = off
        said[f"norm_over_bound_clip_{clip:g}"] = norm / bound
    small, *_, moved = play(x, y, clip=1e-2, noise=100.0)
    wanted = small.noise * small.clip / small.cohort
    if spec.level == "record":  # every step of every client draws separate noise
        wanted = (
            small.noise * small.clip / small.batch * small.lr * (small.steps / small.cohort) ** 0.5
        )
    said["noise_over_wanted"] = moved.std() / wanted
    assert abs(said["noise_over_wanted"] - 1) < 0.04, f"noise of {moved.std()}, wanted {wanted}"
    return {key: float(value) for key, value in said.items()}


def main(tool, build, modes, packages, install, missing=None, notes=None):
    """Parse, load, then check or time.

    `modes` has a tuple for each level, record and client, its first the default; `missing` is the
    ImportError, if any, `install` what to do about it; `notes` says, by level, what a reader of the
    numbers has to know.
    """
    parser = argparse.ArgumentParser(description=f"Rounds of {tool}.")
    parser.add_argument("--workload", required=True, choices=list(WORKLOADS))
    parser.add_argument("--data", help=".npz with x, y, index")
    parser.add_argument("--rounds", type=int, default=1, help="rounds in a timed block")
    parser.add_argument("--repeats", type=int, default=1, help="timed blocks")
    parser.add_argument("--mode", choices=sorted(set(sum(modes.values(), ()))))
    parser.add_argument(
        "--check", action="store_true", help="check clipping, averaging and noise, and stop"
    )
    args = parser.parse_args()
    spec = SimpleNamespace(**WORKLOADS[args.workload], block=args.rounds)
    able = modes.get(spec.level, ())
    mode = args.mode or (able[0] if able else None)
    about = dict(tool=tool, mode=mode, workload=args.workload)
    try:
        if mode not in able:
            known = ", ".join(able) or "none here"
            raise Unsupported(f"{args.workload} is {spec.level} level; modes for that: {known}")
        if missing is not None:
            raise Unsupported(f"{missing}; {install}")
        data = load(args.data)
        if args.check:
            print(json.dumps(dict(about, checked=check(build, spec, data, mode))))
            return
        run, leaves = build(spec, data, mode)
        before = [leaf.copy() for leaf in leaves()]
        clock = Clock(args.rounds)
        run(1 + args.rounds * args.repeats, clock.tick)
    except Unsupported as reason:
        print(json.dumps(dict(about, skipped=str(reason))))
        return
    after = leaves()
    sound(spec, before, after)
    versions = {name: version(name) for name in packages} | dict(python=platform.python_version())
    (first, _), *blocks = clock.blocks
    print(
        json.dumps(
            dict(
                about,
                versions=versions,
                seconds=[wall for wall, _ in blocks],
                cpu_seconds=[cpu for _, cpu in blocks],
                first=first,
                peak_mib=clock.peak,
                parameters=sum(leaf.size for leaf in after),
                notes=(notes or {}).get(spec.level, ""),
            )
        )
    )
