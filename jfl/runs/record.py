"""What a run leaves behind: summary.json, metrics.csv, manifest.json and pictures."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
import tempfile
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import stdtrit

from ..core import checks, identity
from ..core.errors import NotAnalysable
from ..core.files import write
from ..core.records import Caveat, Fn, Guarantee, Health, Metrics, Plan, code_of
from ..core.result_store import as_json as as_json
from ..core.result_store import plain
from ..data.federation import describe
from ..gradients.per_example import gradient_path
from ..kernels.conv import multiplies_patches
from ..privacy import guarantees as accounting
from ..privacy.ledger import entries
from ..privacy.mechanisms import chain as mechanism
from .checkpoint import environment
from .config import Config

FORMAT = 1  # of summary.json and results.json: who reads them refuses another
COLUMNS = (
    "name",
    "seed",
    "round",
    "accuracy",
    "client_accuracy",
    "loss",
    "train_loss",
    "clip_fraction",
    "clip_norm",
    "update_norm",
    "cohort",
    "epsilon",
)
SERIES = [c for c in COLUMNS if c in Metrics.__dataclass_fields__ and c != "round"]
# colours that colour-blind readers can tell apart (Okabe and Ito, 2008)
PALETTE = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#F0E442")
VIEWS = dict(
    server="server",
    third_party="third party",
    aggregate="secure aggregation",
    personal="personal models",
)
PICTURES = (".png", ".svg", ".pdf")
# how the pages of `jfl report` begin, as jfl.report.document says, which stands above this module
PAGES = {
    ".md": b"<!-- jfl report -->\n",
    ".html": b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    b'<meta name="generator" content="jfl report">\n',
}
TIGHT, MANY = (
    32,
    128,
)  # evaluations whose epsilon is proved as tightly as that of the whole run; by Renyi bounds
WEAK = 20  # epsilon above which a guarantee protects almost nothing
GAIN = 1e-3  # of an epsilon, for which a privacy-loss distribution is worth its time
PLUS_MINUS = "± is half of a 95 % interval of the mean over seeds (Student's t)."
_compiling = []  # seconds of every compilation since the first call of `compile_seconds`


def compile_seconds() -> float:
    """Seconds this process has spent tracing and compiling since the first call: differences
    count."""
    if not _compiling:
        import jax

        _compiling.append(0.0)

        def heard(event: str, seconds: float, **_: Any) -> None:
            if "/compile/" in event:
                _compiling.append(seconds)

        monitoring: Any = jax.monitoring  # whose type asks for one more form of a listener
        monitoring.register_event_duration_secs_listener(heard)
    return sum(_compiling)


class Stopwatch:
    """Seconds since it was made, and how many of them went into compilation."""

    def __init__(self):
        self._begun, self._compiled = time.perf_counter(), compile_seconds()

    def read(self) -> tuple[float, float]:
        """Seconds, and of those the seconds of compilation."""
        return time.perf_counter() - self._begun, compile_seconds() - self._compiled

    @contextlib.contextmanager
    def paused(self):
        """Leave out what is done meanwhile."""
        pause = Stopwatch()
        try:
            yield
        finally:
            seconds, compiled = pause.read()
            self._begun += seconds
            self._compiled += compiled


def privacy(plan: Plan, rounds: int, delta: float, claims: tuple = ()) -> list[dict]:
    """All guarantees of a plan, as dicts; where there is none, one entry that says so with epsilon
    null; and claims."""
    found = accounting.guarantees(plan, rounds, delta)
    if not found:
        try:
            found = (accounting.guarantee(plan, rounds, delta),)
        except NotAnalysable as error:
            found = (
                Guarantee(
                    math.inf,
                    delta,
                    "example",
                    "replace_one",
                    "server",
                    "none",
                    caveats=(Caveat(str(error), "not-analysable"),),
                ),
            )
    return [row(g) for g in (*found, *claims)]


def row(g: Guarantee) -> dict:
    """A guarantee as JSON holds it: an infinite epsilon is null, and the status says why."""
    return dict(
        unit=g.unit,
        adjacency=g.adjacency,
        view=g.view,
        delta=g.delta,
        epsilon=plain(g.epsilon),
        method=g.method,
        status=g.status if math.isfinite(g.epsilon) else "no guarantee",
        caveats=list(g.caveats),
        codes=[code_of(c) for c in g.caveats],
        implied=g.implied,
        rounds=g.rounds,
    )


def with_caveats(row: dict, caveats) -> dict:
    """A guarantee as JSON holds it, with more caveats."""
    return row | dict(
        caveats=[*row["caveats"], *caveats], codes=[*row["codes"], *map(code_of, caveats)]
    )


def epsilons(
    plan: Plan,
    rounds,
    delta: float,
    unit: str | None = None,
    view: str = "server",
    adjacency: str | None = None,
    *,
    last: float | None = None,
    most: int = TIGHT,
) -> np.ndarray:
    """Epsilon after each of some numbers of rounds, as `jfl.guarantee` proves it: the last one is
    that of the whole run.

    A privacy-loss distribution takes about a tenth of a second for each number of rounds, a Renyi
    bound a hundredth.  So beyond `most` numbers of rounds some get the Renyi bound alone, and
    beyond MANY some get none of their own: what is proved of the next number that has one holds of
    fewer rounds too.

    Args:
        plan: what runs.
        rounds: Int[m], ascending numbers of rounds.
        delta: in (0, 1).
        unit: as in `jfl.guarantee`.
        view: as in `jfl.guarantee`.
        adjacency: as in `jfl.guarantee`.
        last: the epsilon after the last of them, where it is known.
        most: how many are computed as `guarantee` does, the last among them; 0: none, and `last` is
            left aside.

    Returns:
        Float64[m], which does not fall as rounds grow.

    Raises:
        ValueError: as `jfl.guarantee`.

    Privacy:
        What the first rounds release is part of what all rounds release, so what is proved of more
        rounds holds of fewer.
    """
    rounds = np.asarray(rounds)
    count = len(rounds)

    def proved(i):
        if rounds[i] == 0:
            return 0.0
        return accounting.guarantee(plan, int(rounds[i]), delta, unit, view, adjacency).epsilon

    values, bounded = np.full(count, np.inf), _spread(count, MANY)
    values[bounded] = accounting.epsilons(plan, rounds[bounded], delta, unit, view, adjacency)
    if most and count:
        quick, values[-1] = values[-1], proved(-1) if last is None else last
        if values[-1] < (1 - GAIN) * quick:  # else Renyi bounds and exact Gaussians do as well
            for i in _spread(count, most)[:-1]:
                values[i] = proved(i)
    return np.minimum.accumulate(values[::-1])[::-1]


def _spread(count: int, most: int) -> np.ndarray:
    """At most so many of the places 0, ... count - 1, the last among them: dense at the beginning,
    where epsilon grows fast."""
    if count <= most:
        return np.arange(count)
    if most < 2:
        return np.arange(count)[count - most :]
    early, late = (
        np.geomspace(1, count, most // 2),
        np.linspace(count, 1, most - most // 2 + 1)[:-1],
    )
    return np.unique(np.append(early, late).round().astype(int)) - 1


def signal_to_noise(plan: Plan, rounds: int) -> float | None:
    """The largest sum that the contributions of a run can reach in one direction, over the noise's
    standard deviation there.

    It takes for granted that all clipped contributions of all rounds point the same way.  Training
    sees far less, so below 1 nothing is learned.

    Returns:
        The ratio at the site with the smallest one; None without noise.
    """
    cohort, rows = float(plan.sampler.expected), float(np.max(np.asarray(plan.fed.size)))
    heaviest = lambda round_: float(
        np.max(np.asarray(plan.weights(round_) if isinstance(plan.weights, Fn) else plan.weights))
    )
    # how many contributions one release sums up, and how many releases of the run add their noise
    # to one another
    sites = [
        (plan.release, cohort, rounds, heaviest),
        (plan.upload, 1.0, rounds * cohort, lambda round_: 1.0),
    ]
    for release in plan.algorithm.releases:
        batch = release.batches
        rate = None if batch.rate is None else float(np.max(np.asarray(batch.rate)))
        drawn = (
            batch.expected
            if batch.expected is not None
            else rows * rate
            if rate is not None
            else batch.batch
        )
        held = rows if release.steps or drawn is None else float(drawn)
        sites.append((release.mechanism, held, rounds * cohort * release.count, lambda round_: 1.0))
    found = [
        float(
            summed
            * math.sqrt(times)
            / np.min(np.asarray(mechanism.multipliers(chain, rounds, heaviest)))
        )
        for chain, summed, times, heaviest in sites
        if mechanism.noisy(chain)
    ]
    return min(found, default=None)


def noise_warning(plan: Plan, rounds: int, unit: str, epsilon: float | None, delta: float) -> str:
    """A sentence for a run whose model is noise, whatever its data; "" for others.

    It says so only where that can be shown: where all contributions of the run together stay below
    the noise, or where all rows (of unit "client": all clients) change the odds of any result by
    less than a factor of e (group privacy).
    """
    ratio = signal_to_noise(plan, rounds)
    levels = noise(plan, rounds)
    multiplier = f"noise multiplier {min(low for low, _ in levels):.3g}" if levels else "this noise"
    if ratio is not None and ratio < 1:
        return (
            f"this trains on noise: at {multiplier} all contributions of all {rounds} rounds, if "
            f"they pointed the same way, "
            f"would add up to at most {ratio:.2g} standard deviations of the noise in that one "
            f"direction. Lower the noise, or raise "
            "epsilon."
        )
    units, what = (
        (int(np.sum(np.asarray(plan.fed.size))), "rows")
        if unit == "example"
        else (int(np.size(plan.fed.size)), "clients")
    )
    if epsilon is not None and units * epsilon < 1:
        factor = math.exp(units * epsilon)
        return (
            f"this trains on noise: at epsilon {epsilon:.3g} all {units} {what} together change "
            f"the odds of any result by a "
            f"factor of at most {factor:.4g}, apart from a probability of "
            f"{min(1, units * factor * delta):.2g}. Raise epsilon, "
            "or lower the noise."
        )
    return "" if epsilon is None else weak_guarantee(epsilon, delta)


def weak_guarantee(epsilon: float, delta: float) -> str:
    """Return a sentence for an epsilon that protects next to nothing; "" for others.

    >>> weak_guarantee(8.0, 1e-5)
    ''
    """
    if not WEAK < epsilon < math.inf:
        return ""
    return (
        f"epsilon is {epsilon:.3g} at delta {delta:.3g}: above {WEAK}, it protects almost nothing. "
        f"Raise the noise multiplier, or choose an epsilon (--epsilon 8 --unit client)."
    )


def interval(values) -> tuple[float, float | None]:
    """Mean and half the width of its 95 % interval (Student's t); None with fewer than two values.

    >>> [round(v, 4) for v in interval([0.8, 0.9, 1.0])]
    [0.9, 0.2484]
    """
    values = np.asarray(values, float)
    if values.size < 2:
        return float(values.mean()), None
    return float(values.mean()), float(
        stdtrit(values.size - 1, 0.975) * values.std(ddof=1) / math.sqrt(values.size)
    )


def plus_minus(mean: float | None, half: float | None, digits: int = 4) -> str:
    """A mean with half of its 95 % interval, as all tables show it; of one seed the mean alone.

    >>> plus_minus(*interval([0.8, 0.9, 1.0])), plus_minus(0.9, None, 2)
    ('0.9000 ± 0.2484', '0.90')
    """
    if mean is None:
        return ""
    return _fixed(mean, digits) + ("" if half is None else f" ± {_fixed(half, digits)}")


def _fixed(value, digits) -> str:
    """With so many digits behind the point, unless it is huge: losses of a run that diverges
    are."""
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.{digits}g}"


def best(guarantees: list[dict]) -> dict:
    """The one to show if there is room for one: proved on its own, of the strongest view."""
    return min(
        guarantees,
        key=lambda g: (
            g["status"] == "claimed",
            g["epsilon"] is None,
            g.get("implied", False),
            g["view"] != "server",
        ),
    )


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """One run: what was asked for, what came of it, what it cost, and what it is worth.

    Attributes:
        name: what tables and pictures call it.
        config: the values of its config, with the noise multiplier that was found.
        seed: of its randomness.
        history: its metrics, as lists over evaluations (`lists`).
        seconds: it took, compilation included; of a sweep, its share.
        compile_seconds: of those, the seconds of compilation.
        guarantees: what is proved and claimed of it, as `row` makes them.
        health: counts of what should not happen, by the names of `Health`.
        tolerated: the names of counts that do not make it a failed run.
        trace: more lists over evaluations, which a figure shows.
    """

    name: str
    config: dict
    seed: int
    history: dict
    seconds: float
    compile_seconds: float
    guarantees: Sequence[dict] = ()
    health: dict = dataclasses.field(default_factory=dict)
    tolerated: tuple = ()
    trace: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of_config(cls, config: Config, measured: dict, name: str | None = None, **facts):
        """The record of a run of `config`, from what `measurement` keeps of it."""
        return cls(
            name=config.algorithm if name is None else name,
            config=dataclasses.asdict(config),
            seed=config.seed,
            history=measured["history"],
            seconds=measured["seconds"],
            compile_seconds=measured["compile"],
            health=measured.get("health", {}),
            tolerated=config.tolerate(),
            **facts,
        )

    @property
    def failed(self) -> dict:
        """All counts, if one that is not tolerated is above zero; else nothing."""
        bad = any(count for name, count in self.health.items() if name not in self.tolerated)
        return self.health if bad else {}

    def timing(self) -> dict:
        """Seconds of compilation, of the whole run, and of a round without compilation."""
        rounds = self.history["round"][-1]
        return dict(
            compile=self.compile_seconds,
            total=self.seconds,
            per_round=max(0.0, self.seconds - self.compile_seconds) / rounds,
        )

    def entry(self) -> dict:
        """The run as summary.json holds it."""
        accuracy = [a for a in self.history.get("accuracy") or [] if a is not None]
        return plain(
            dict(
                name=self.name,
                algorithm=self.config["algorithm"],
                dataset=self.config["dataset"],
                rounds=self.history["round"][-1],
                seed=self.seed,
                accuracy=dict(
                    final=accuracy[-1] if accuracy else None,
                    best=max(accuracy) if accuracy else None,
                ),
                loss=self.history["loss"][-1],
                seconds=self.timing(),
                privacy=list(self.guarantees),
                config=self.config,
                **(dict(trace=self.trace) if self.trace else {}),
                **(dict(failed=self.failed) if self.failed else {}),
            )
        )

    def rows(self, epsilon=None) -> list[dict]:
        """The run as metrics.csv holds it: one row an evaluation, with its epsilon if given."""
        return rows(self.name, self.seed, self.history, epsilon)


def measurement(
    metrics: Metrics, health: Health, seconds: float, compile_seconds: float, point=None
) -> dict:
    """What is kept of a run that is done, as a line of a store holds it.

    Args:
        metrics: of `jfl.simulate`, or with `point` of `jfl.sweep`.
        health: as `metrics`.
        seconds: the run took, compilation included.
        compile_seconds: of those, the seconds of compilation.
        point: which point of the sweep; None: `metrics` is of one run.
    """
    count = lambda value: int(value if point is None else value[point])
    return dict(
        seconds=seconds,
        compile=compile_seconds,
        health={name: count(value) for name, value in health._asdict().items()},
        history=lists(metrics, point),
    )


def rows(name: str, seed: int | str, metrics: dict, epsilon=None) -> list[dict]:
    """Rows of metrics.csv, one an evaluation."""
    return [
        dict(name=name, seed=seed, round=r, epsilon=None if epsilon is None else plain(epsilon[i]))
        | {k: None if metrics.get(k) is None else plain(metrics[k][i]) for k in SERIES}
        for i, r in enumerate(metrics["round"])
    ]


def lists(metrics: Metrics, point: int | None = None) -> dict:
    """Metrics as plain lists over evaluations, custom ones too; of one point of a sweep if
    given."""
    values = {k: getattr(metrics, k) for k in Metrics.__dataclass_fields__ if k != "custom"}
    values |= metrics.custom or {}
    return {
        k: plain(np.asarray(v if point is None else v[point]).tolist())
        for k, v in values.items()
        if v is not None
    }


def save(directory, runs: list[dict], table: list[dict], manifest: dict):
    """Write summary.json, metrics.csv and manifest.json."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write(directory / "metrics.csv", text.getvalue())
    write(directory / "manifest.json", json.dumps(plain(manifest), indent=1))
    save_summary(directory, runs)


def save_summary(directory, entries: list[dict]):
    """Write summary.json alone, of runs without a table."""
    write(
        directory / "summary.json",
        json.dumps(dict(format=FORMAT, runs=plain(entries)), indent=1, allow_nan=False),
    )


def void(directory):
    """Remove what states an epsilon of other rounds: summary.json, and pages that `jfl report`
    wrote beside it."""
    (directory / "summary.json").unlink(missing_ok=True)
    is_page = lambda path: (
        path.suffix in PAGES and path.is_file() and path.read_bytes().startswith(PAGES[path.suffix])
    )
    for page in filter(is_page, list(directory.iterdir())):
        page.unlink()
        folder = page.with_name(f"{page.stem}_files")
        if folder.is_dir() and not folder.is_symlink():
            for path in [p for p in folder.iterdir() if re.fullmatch(r"picture-\d+\.png", p.name)]:
                path.unlink()
            with contextlib.suppress(OSError):  # other files in it
                folder.rmdir()


def noise(plan: Plan, rounds: int) -> list:
    """Least and largest noise multiplier of the rounds and clients of each noisy chain, as the
    ledger reads it."""
    listed = [e for e in entries.entries(plan, rounds) if not (e.implied or e.refusal)]
    levels = [(e.unit, p.multiplier) for e in listed for p in e.parts]
    found = {(unit, z.tobytes()): z for unit, z in levels}.values()
    return [[float(z.min()), float(z.max())] for z in found]


def _generators(plan: Plan) -> str:
    """Where the noise comes from: of each noisy chain, once."""
    words = dict(philox="philox4x32-10, fused", key="the key's own")
    chains = [r.mechanism for r in plan.algorithm.releases] + [plan.upload, plan.release]
    used = [
        words[s.generator] for m in chains if m is not None for s in m.stages if s.role == "noise"
    ]
    return " and ".join(dict.fromkeys(used)) or "none"


def manifest(plans: list[Plan], partition=None, rounds: int = 1, **more) -> dict:
    """What it takes to get the same numbers again; the noise that ran, of the first plan."""
    import flax
    import optax

    return dict(
        versions=environment() | dict(optax=optax.__version__, flax=flax.__version__),
        kernels=dict(
            gradients=gradient_path(plans[0]),
            normals=_generators(plans[0]),
            convolutions="patches" if multiplies_patches() else "XLA's own; patches of a lone row",
        ),
        noise=noise(plans[0], rounds),
        data=describe(plans[0].fed, partition),
        plan=identity.describe(plans[0]),
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **more,
    )


def label(guarantees: list[dict], unit: str | None = None) -> str:
    """A legend's words for the first guarantee (of a unit), smallest epsilon first."""
    fit = [g for g in guarantees if g["epsilon"] is not None and unit in (None, g["unit"])]
    if not fit:
        return "no privacy"
    g = fit[0]
    return f"ε = {g['epsilon']:.3g} ({g['unit']}, {VIEWS[g['view']]})"


def milestones(rounds: int) -> np.ndarray:
    """The numbers of rounds that a table shows."""
    return np.unique(
        np.maximum(np.array([1, rounds // 100, rounds // 10, rounds // 4, rounds // 2, rounds]), 1)
    )


def picture_file(path):
    """Refuse, before anything is computed, what no picture can be written to."""
    need = f"a file that ends in {', '.join(PICTURES)}"
    if path.suffix.lower() not in PICTURES or path.is_dir():
        checks.fail("--plot", need, str(path))
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        checks.fail(
            "--plot",
            f"a directory that can be written to, for {path.name}",
            f"{str(path.parent)!r} ({error.strerror})",
            "Make it first, or choose another.",
        )


def epsilon_curve(
    path, rounds, epsilons, guarantee: Guarantee, title: str, target: float | None = None
) -> None:
    """Draw epsilon against rounds.

    Args:
        path: the file to write.
        rounds: Int[n], ascending numbers of rounds.
        epsilons: Float[n].
        guarantee: the guarantee after the last of the rounds.
        title: a description of the setting.
        target: an epsilon to mark; None marks none.
    """
    figure, ax = _figure((7.2, 4.6))
    drawn = np.where(np.isfinite(epsilons) & (epsilons > 0), epsilons, np.nan)
    ax.plot(rounds, drawn, color=PALETTE[1], lw=2, marker="o" if len(rounds) == 1 else None)
    ax.set_xscale("log")
    ax.set_yscale("log")
    known = [*drawn[np.isfinite(drawn)], *([target] if target else [])] or [0.1, 1.0]
    low, high = min(known) / 1.3, max(known) * 1.3
    ax.set_ylim(low, high)
    _plain_ticks(ax.yaxis, low, high)
    _plain_ticks(ax.xaxis, *ax.get_xlim())
    if np.isfinite(drawn[-1]):
        ax.annotate(
            f"{drawn[-1]:.4g}",
            (rounds[-1], drawn[-1]),
            xytext=(-4, 6),
            textcoords="offset points",
            ha="right",
        )
    if target is not None:
        ax.axhline(target, color="0.35", ls=":", lw=1.4)
        ax.annotate(
            f"target ε = {target:g}",
            (0.01, target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
        )
    ax.set(
        xlabel="rounds",
        ylabel=f"ε  ({guarantee.unit}, {guarantee.adjacency}, {VIEWS[guarantee.view]}, "
        f"δ = {guarantee.delta:g})",
        title=textwrap.fill(f"{title}\n{guarantee.method}", 84, replace_whitespace=False),
    )
    ax.title.set_fontsize(10)
    ax.grid(alpha=0.25, which="major")
    ax.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _plain_ticks(axis, low, high, first=()):
    """1, 2, 5 of each decade, or the decades alone, as plain numbers; some others first."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1, 2, 5) if len(decades) < 6 else (1,)
    ticks = [m * 10.0**d for d in decades for m in parts if low <= m * 10.0**d <= high]
    ticks = [*first, *ticks[:: max(1, len(ticks) // 8)]]
    axis.set_ticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_ticks([], minor=True)


def epsilon_axis(ax, epsilons):
    """A logarithmic axis with a place for each of some epsilons: 0, which has no logarithm, stands
    left of the others."""
    known = [e for e in epsilons if e > 0] or [1e-3]
    low, high = max(min(known) / 1.8, 1e-300), min(max(known) * 1.8, 1e300)
    zero = [0.0] * (0 in epsilons)
    ax.set_xscale("symlog", linthresh=low, linscale=0.4)  # logarithmic from low on
    ax.set_xlim(-low / 3 if zero else low, high)
    _plain_ticks(ax.xaxis, low, high, zero)


def _figure(size, *shape, **options):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(*shape, **options)


def _save(figure, path):
    out = io.BytesIO()
    figure.savefig(out, dpi=140, format=path.suffix[1:].lower())
    write(path, [out.getvalue()])


def picture(path, groups: list[dict], title: str):
    """Accuracy against round with bands from the least to the largest seed, and against epsilon
    with 95 % intervals.

    Args:
        path: of the picture.
        groups: dicts of label, round [E], accuracy [seeds, E], epsilon (None: no guarantee).
        title: above the picture.
    """
    figure, (left, right) = _figure((10.5, 4.2), 1, 2, width_ratios=(1.35, 1))
    for colour, g in zip(PALETTE * len(groups), groups):
        accuracy = np.asarray(g["accuracy"], float)
        mean, (_, half) = accuracy.mean(0), interval(accuracy[:, -1])
        left.plot(g["round"], mean, color=colour, label=g["label"], lw=1.8)
        if len(accuracy) > 1:  # of one seed there is no band
            left.fill_between(
                g["round"], accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, lw=0
            )
        if g["epsilon"] is None:
            right.axhline(mean[-1], color=colour, ls="--", lw=1.2)
            right.annotate(
                "no privacy",
                (0.02, mean[-1]),
                xycoords=("axes fraction", "data"),
                va="bottom",
                fontsize=8,
                color=colour,
            )
        else:
            right.errorbar(g["epsilon"], mean[-1], half, fmt="o", color=colour, capsize=4, ms=6)
            right.annotate(
                f"{g['epsilon']:.3g}",
                (g["epsilon"], mean[-1]),
                xytext=(6, 5),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    left.set(
        xlabel="round",
        ylabel="test accuracy",
        title="accuracy against round (mean and range of seeds)",
    )
    left.legend(fontsize=8, loc="lower right", frameon=False)
    if known := [g["epsilon"] for g in groups if g["epsilon"] is not None]:
        epsilon_axis(right, known)
    else:
        right.set_xticks([])
    right.set(
        xlabel="ε (see the legend for its unit and view)",
        ylabel="final test accuracy",
        title="privacy against utility (bars: 95 % intervals)",
    )
    for ax in (left, right):
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.title.set_fontsize(10)
    low, high = zip(left.get_ylim(), right.get_ylim())
    left.set_ylim(max(0, min(low)), min(1, max(high)))
    right.set_ylim(left.get_ylim())
    figure.suptitle(title, fontsize=11)
    _save(figure, path)
