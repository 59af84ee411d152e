"""Run what the experiments on Noble et al. 2022 need beyond `harness.runner`."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jfl.analysis import heterogeneity
from jfl.core.errors import HealthError
from jfl.core.pytrees import in_full
from jfl.core.records import Fn, Keys
from jfl.engine import callbacks
from jfl.engine.simulate import rounds_before_evaluations
from jfl.engine.sweep import Trained, train
from jfl.runs import build, directory, record
from jfl.runs.config import Config
from jfl.runs.record import RunRecord, Stopwatch
from jfl.runs.train import privacy

from ...harness import objectives, programs
from ...harness.programs import Plans, drawn
from ...harness.verdicts import (
    NOT_RUN,
    Claim,
    Comparison,
    Evidence,
    Quantity,
    Ratio,
    end,
    exactly,
    known,
    near_printed,
)
from . import claims as noble2022
from . import gaps as noble2022_gaps

GAP = "ln(F - F*)"  # a natural logarithm, as the authors plot
# of the gradients of the clients, uniform weights: what Figures 4 and 8 plot, and the other measure
DIFFERENCE = "mean |∇F_i|² - |∇F|²"
RATIO = "ln(mean |∇F_i|² / |∇F|²)"
ALIKE = 2022  # the key of clients that draw alike, with their seed
PRINTED = "ε and T that the paper prints, and those of its accountant"
MARKS = (100, 200, 300, 400)  # that are evaluated, of those that were read off


# --- runs


@functools.lru_cache(maxsize=8)
def _optimum(config):
    plan, _ = build.build(config)
    return objectives.optimum(plan.task, plan.fed, config.l2, weights="uniform", tolerance=1e-5)


def optimum(config):
    """Return the minimiser of the objective of a config with a convex model."""
    return _optimum(Config(**{n: getattr(config, n) for n in (*build.DATA, "model", "l2")}))


@in_full()
@jax.jit
def objective(task, params, fed, l2):
    """Return F at the server's model: the mean over clients of their mean loss, plus the
    penalty."""

    def client(rows):
        index, size = rows
        losses = jax.vmap(task.loss, (None, 0, 0))(params, fed.x[index], fed.y[index])
        return jnp.where(jnp.arange(len(index)) < size, losses, 0).sum() / size

    penalty = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
    return jax.lax.map(client, (fed.index, fed.size)).mean() + l2 / 2 * penalty


DRAWN = Plans(drawn, seeded=True, trace=programs.CURVE)


def alike(context, keys, server, client_state, rows, *, client, seed):
    """Run a client that draws the same batches and noise as all others of the round."""
    key = jax.random.fold_in(jax.random.key(ALIKE), seed)
    batch, noise = jax.random.split(jax.random.fold_in(key, context.round))
    return client(context, Keys(batch, noise), server, client_state, rows)


def drawn_alike(config):
    """Build a plan like `drawn`, in which all clients of a round draw the same batches and noise.

    The published code gives all clients of a round the same seed. The mean of their models then has
    the noise of one of them, instead of 1 / sqrt(n) of it for n clients. Proofs assume independent
    noise, so the guarantees of these plans are conditional and name this assumption.
    """
    plan, config = drawn(config)
    client = Fn(alike, dict(client=plan.algorithm.client, seed=jnp.int32(config.seed)))
    algorithm = dataclasses.replace(plan.algorithm, client=client)
    return dataclasses.replace(plan, algorithm=algorithm), config


DRAWN_ALIKE = Plans(
    drawn_alike, seeded=True, privacy=programs.guarantees, epsilons=None, trace=programs.CURVE
)


def watched(config, axes, out):
    """Run like `watch`, with independent noise of each client."""
    return watch(config, axes, out, drawn)


def watched_alike(config, axes, out):
    """Run like `watch`, with the same noise for all clients of a round."""
    return watch(config, axes, out, drawn_alike)


def watch(config, axes, out, build_plan):
    """Run like `jfl.runs.sweep.sweep` over seeds, and trace the server's model.

    Each seed has a separate draw of the data.  The trace holds accuracy ("curve"), GAP, DIFFERENCE
    and RATIO at each evaluation.  All seeds run in one program, because the steps of a single seed
    are too small for a GPU.
    """
    out = directory.checked(out, resume=False)
    seeds = axes["seed"]
    plans, configs = zip(*(build_plan(dataclasses.replace(config, seed=s)) for s in seeds))
    best = [optimum(calibrated).value for calibrated in configs]
    guarantees = privacy(plans[0], configs[0], config.rounds)  # sizes are equal
    histories: list[dict] = [{} for _ in seeds]
    traces: list[dict] = [{GAP: [], DIFFERENCE: [], RATIO: []} for _ in seeds]
    stopwatch, states = Stopwatch(), None
    for count in rounds_before_evaluations(config.rounds, config.evaluate_every).tolist():
        trained = train(list(plans), seeds, count, states, keep_states=True)
        for seed, one in zip(seeds, trained):
            _stop_if_unhealthy(seed, one)
        states = [one.state for one in trained]
        with stopwatch.paused():
            for i, one in enumerate(trained):
                for key, values in record.lists(one.metrics).items():
                    histories[i].setdefault(key, []).extend(values)
                watched = _watched(plans[i], one, config.l2, best[i])
                for key, value in watched.items():
                    traces[i][key].append(value)
    seconds, compiled = stopwatch.read()
    records = [
        RunRecord(
            config.algorithm,
            dataclasses.asdict(configs[i]),
            seed,
            histories[i],
            seconds / len(seeds),
            compiled / len(seeds),
            guarantees,
            trace=traces[i] | {name: histories[i][metric] for name, metric in programs.CURVE},
        )
        for i, seed in enumerate(seeds)
    ]
    out.mkdir(parents=True, exist_ok=True)
    entries = [r.entry() for r in records]
    record.save(
        out,
        entries,
        [row for r in records for row in r.rows()],
        record.manifest([plans[-1]], build.the_partition(config), seeds=list(seeds)),
    )
    return entries


def _stop_if_unhealthy(seed: int, trained: Trained):
    """Raise HealthError, which names the seed, if a run is unhealthy."""
    try:
        callbacks.stop_if_unhealthy(trained.state)
    except HealthError as error:
        raise HealthError(f"seed {seed}: {error}", error.run, error.health) from None


def _watched(plan, trained: Trained, l2: float, best: float) -> dict:
    """Return the values that a trace stores for one evaluation of a run."""
    dissimilarity = heterogeneity.gradient_dissimilarity(
        plan.task, trained.params, plan.fed, "uniform", l2=l2
    )
    above = float(objective(plan.task, trained.params, plan.fed, l2)) - best
    return {
        GAP: math.log(max(above, 1e-7)),  # float32 sees no less
        DIFFERENCE: float(dissimilarity.variance),
        RATIO: float(dissimilarity.log_ratio),
    }


# --- checks


def unsteady(rising, level):
    """Return a check of the variance over seeds.

    The claim is that it is larger on the last of the lines `rising` than on the first, and at most
    four times as large on the last of the lines `level`.
    """

    def check(results):
        names = [rising[0], rising[-1], level[0], level[-1]]
        if any(n not in results for n in names):
            return Evidence(missing=NOT_RUN)
        if any(len(results[n].accuracy) < 3 for n in names):
            return Evidence(missing="fewer than 3 seeds")
        up, flat = (
            Ratio.of(results[lines[-1]].accuracy, results[lines[0]].accuracy)
            for lines in (rising, level)
        )
        return Evidence(
            (Comparison(up, low=1.0), Comparison(flat, high=4.0)),
            seen="variance over seeds on the last line over that on the first, of both methods",
        )

    return check


def above_along(pairs):
    """Return a check that the accuracy of the first line of each pair is above at all MARKS."""

    def at(line, mark):
        values = line.trace["curve"][:, line.trace["round"][0] == mark]
        return Quantity.of(values[:, 0], line.paired_by)

    def check(results):
        names = [n for pair in pairs for n in pair]
        if why := known(results, *names, key="curve"):
            return Evidence(missing=why)
        if any(set(MARKS) - set(results[n].trace["round"][0]) for n in names):
            return Evidence(missing="rounds that were not evaluated")
        found = (
            Comparison(at(results[a], mark) - at(results[b], mark), 0.0)
            for a, b in pairs
            for mark in MARKS
        )
        return Evidence(tuple(found))

    return check


def reaches(line, least):
    """Return a check that a line is more accurate than `least`."""

    def check(results):
        if why := known(results, line):
            return Evidence(missing=why)
        return Evidence((Comparison(end(results[line]) + -least, 0.0),), seen=f"minus {least:g}")

    return check


def as_drawn(curves):
    """Return a check that GAP is within 0.15 of the published curves at all MARKS.

    The curves are line -> values at MARKS.
    """

    def at(name, line):
        if GAP not in line.trace:
            return []
        rounds = line.trace["round"][0].tolist()
        return [
            (
                f"{name}, {mark}",
                Quantity.of(line.trace[GAP][:, rounds.index(mark)], line.seeds),
                value,
            )
            for mark, value in zip(MARKS, curves[name], strict=True)
            if mark in rounds
        ]

    def check(results):
        found = near_printed(curves, 0.15, at)(results)
        if not found.missing and len(found.comparisons) < len(MARKS) * len(curves):
            return dataclasses.replace(found, missing="rounds that were not evaluated")
        return found

    return check


# --- tables without lines


def as_config(run: noble2022.Setting, **noise) -> Config:
    """Return a run of the paper as a Config.

    Its privacy does not depend on the rows, so synthetic rows replace those that are not available.
    """
    rows = round(1 / run.users / run.delta)  # that a user trains on: delta is 1 / (M R)
    return Config(
        algorithm="fedavg",
        dataset="synthetic",
        partition="natural",
        model="logistic",
        clients=run.users,
        cohort=round(run.user_ratio * run.users),
        rows_per_client=round(rows / 0.8),  # a fifth are test rows
        batch=round(run.data_ratio * rows),
        steps=run.local_updates,
        rounds=run.rounds,
        lr=0.1,
        clip_norm=1.0,
        delta=run.delta,
        **noise,
    )


def proved_of(run: noble2022.Setting) -> dict:
    """Return view -> the proved epsilon of a run."""
    printed = dict(noise_multiplier=run.sigma_g, mode="as_printed", view="third_party")
    plan, config = build.build(as_config(run, **printed))
    return {
        g["view"]: g["epsilon"]
        for g in privacy(plan, config, config.rounds)
        if g["status"] == "proved"
    }


def enough_for(epsilon: float, run: noble2022.Setting, view: str) -> float:
    """Return the noise multiplier with which a run has this proved epsilon."""
    _, config = build.build(as_config(run, epsilon=epsilon, mode="sound", view=view))
    assert config.noise_multiplier is not None
    return config.noise_multiplier


def printed_accounting() -> list[list]:
    """Return each epsilon and number of rounds that the paper prints, and its accountant's.

    An epsilon agrees if the accountant's, rounded up to the printed digits, is the printed one. A
    number of rounds agrees to within one round, which changes epsilon by less than 0.003.
    """
    rows = []
    for place, (run, stated) in noble2022.STATED.items():
        found = float(noble2022.third_party_epsilon(*run))
        digits = len(f"{stated:g}".partition(".")[2])
        agrees = math.ceil(found * 10**digits) == round(stated * 10**digits)
        rows.append([f"ε, {place}", stated, float(f"{found:.5g}"), agrees])
    run = noble2022.SYNTHETIC
    for sigma, printed in zip(noble2022.TABLE_SIGMAS, noble2022.TABLE1_ROUNDS, strict=True):
        found = noble2022.largest_rounds(
            noble2022.TABLE_EPSILON,
            sigma,
            0.05,
            run.data_ratio,
            np.array(noble2022.TABLE_UPDATES),
            run.users,
            run.delta,
        )
        for steps, one, other in zip(noble2022.TABLE_UPDATES, printed, found, strict=True):
            agrees = bool(abs(one - other) <= 1)
            rows.append([f"T, Table 1, σ = {sigma}, K = {steps}", one, int(other), agrees])
    return rows


def worth(experiment, out, quick):
    """Tabulate the stated epsilon, the proved one, and the noise that the stated one needs."""
    rows = []
    for place, (run, stated) in list(noble2022.STATED.items())[: 1 if quick else None]:
        proved = proved_of(run)
        needed = [enough_for(stated, run, view) for view in ("third_party", "server")]
        rows.append(
            [
                place,
                f"{stated:g}",
                *(
                    f"{v:.3g}"
                    for v in (
                        noble2022.third_party_epsilon(*run),
                        proved["third_party"],
                        proved["server"],
                        run.sigma_g,
                        noble2022.noise_for(stated, *run[1:]),
                        *needed,
                    )
                ),
            ]
        )
    printed = printed_accounting()
    agree = sum(row[-1] for row in printed)
    claim = Claim(
        "the printed ε and T are those of the paper's accountant, T to within one round",
        exactly(agree == len(printed), f"{agree} of {len(printed)} agree"),
        whose="ours",  # printed numbers are not claims
    )
    attained, allowed = noble2022_gaps.round_counterexample(1.0, 20, 800)
    published, _, exact = noble2022_gaps.participation_counterexample(1000, 0.01, 1000, 1.0, 1e-6)
    note = (
        f"Its proof is not sound: one round of two steps reveals a record with total variation "
        f"{attained:.3f}, where it allows {allowed:.3f}; 1000 rounds of one step have epsilon "
        f"{exact:.3g}, where it gives {published:.3g}."
    )
    return dict(
        claims=[claim],
        columns=(
            "where",
            "ε stated",
            "ε again",
            "ε proved",
            "... server",
            "σ_g",
            "σ_g by its bound",
            "σ_g that is enough",
            "... server",
        ),
        rows=rows,
        note=note,
        tables=[
            dict(caption=PRINTED, columns=["where", "printed", "computed", "agrees"], rows=printed)
        ],
    )
