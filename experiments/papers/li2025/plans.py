"""Build plans of Li, Wang, Wu, 2025, on the paper's clock, and account for their noise.

Learning rates fall with the local steps and the server only averages; the schedules of a config
count rounds and change the server's rate too.  `epsilon` of a config applies to one round here.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax

from jfl import algorithms, models, sampling, schedules
from jfl.core.records import Fn, named
from jfl.engine.plan import plan
from jfl.engine.simulate import simulate
from jfl.gradients.per_example import grad
from jfl.local import training
from jfl.privacy import guarantees
from jfl.privacy.mechanisms.chain import chain
from jfl.privacy.mechanisms.stages import clip_l2, gaussian, total
from jfl.runs import build as assemble
from jfl.runs import guarantee_rows
from jfl.sampling import batches

from ...harness.programs import CURVE, Plans
from .. import as_printed
from . import claims as li2025

FAILURE = 1e-8  # a client may exceed the participations that are counted; paid from delta


# Equation (13) puts the noise into the gradient or the model; line 8 clips the last step or each.
READINGS = ("gradient", "model", "step")


def build(config, clock="step", lr=None, reading="gradient"):
    """Return the plan of a config.

    It differs from `jfl.runs.build.build` in epsilon and learning rates.

    Args:
        config: `epsilon` applies to one round in both modes; algorithm fedavg (nothing is clipped)
            or output_perturbation.
        clock: lr / sqrt(1 + t) for t local steps ("step") or rounds ("round").
        lr: another schedule of steps.
        reading: for a config as printed.  "gradient": the last step is w - lr (g + noise), as in
            the paper's proof, and only its gradient is clipped; "model": it is w - lr g + noise, as
            for the paper's sensitivity; "step": as "gradient", but each step is clipped.
    """
    fed = assemble.federation(config)
    task, batch = models.logistic(fed), getattr(batches, config.batch_sampler)(config.batch)
    falling = schedules.inverse_sqrt(config.lr, every=config.steps if clock == "round" else 1)
    options = dict(lr=falling if lr is None else lr, steps=config.steps, batch=batch)
    gradient = grad(task.loss, l2=config.l2 or None)
    sampler = (
        sampling.full(config.clients)
        if config.cohort in (None, config.clients)
        else getattr(sampling, config.sampler or "without_replacement")(
            config.clients, config.cohort
        )
    )

    def make(*noise, **more):
        clipped = chain(clip_l2(config.clip_norm), total(), *noise)
        return plan(
            fed, task, algorithms.output_perturbation(gradient, clipped, **options, **more), sampler
        )

    if config.algorithm == "fedavg":
        return plan(fed, task, algorithms.fedavg(gradient, **options), sampler)
    if config.epsilon is None:
        return make()
    if config.mode == "as_printed":
        noise: Any = as_printed.calibrate(
            make(gaussian(1.0)), epsilon=config.epsilon, rounds=config.rounds, delta=config.delta
        )
        if reading == "model":
            noise = Fn(_std_in_model, noise.data, noise.static)
        return make(gaussian(std=noise), clip_steps="all" if reading == "step" else "last")
    return make(gaussian(multiplier(config, fed)))


@named("li2025.std_in_model")
def _std_in_model(round_, *, constant, work_lr, steps):
    """Return `as_printed.printed_std` for noise that no learning rate shrinks."""
    last = training.sum_of_rates(work_lr, round_ * steps + steps - 1, 1)
    return as_printed.printed_std(round_, constant=constant, work_lr=work_lr, steps=steps) / last


def rate_of(config, fed):
    return config.steps * config.batch / int(np.asarray(fed.size).min())


def multiplier(config, fed):
    """Return the noise over the sensitivity that makes a round private for the smallest client."""
    return float(li2025.noise_multiplier(config.epsilon, config.delta, rate_of(config, fed)))


def privacy(plan, config):
    """Return the proved guarantee for the server, and the paper's claim for a run as printed."""
    found = _proved(plan, config)
    if config.mode == "as_printed":
        found.append(guarantee_rows.as_row(as_printed.claimed(plan, config.rounds, config.delta)))
    return found


def _proved(plan, config):
    """Return the guarantee for the server; [] if printed noise is too weak for any."""
    try:
        proved = guarantees.guarantee(plan, config.rounds, config.delta, view="server")
    except guarantees.Overflow:
        if config.mode == "sound":
            raise
        return []
    return [guarantee_rows.as_row(proved)]


def privacy_of_reading(plan, config):
    """Return `privacy`; the paper's formula claims the same in all readings."""
    found = _proved(plan, config)
    if config.mode == "as_printed":
        found.append(privacy(build(config), config)[-1])
    return found


def made(config, clock="step", reading="gradient"):
    """Build a plan with a separate split for each seed."""
    own = dataclasses.replace(config, partition_seed=config.seed)
    return build(own, clock, reading=reading), config


@functools.cache
def runs(clock="step", reading="gradient"):
    return Plans(
        functools.partial(made, clock=clock, reading=reading),
        seeded=True,
        privacy=privacy if reading == "gradient" else privacy_of_reading,
        epsilons=None,
        trace=CURVE,
    )


def median_norm(config, seed=0, evaluations=10, batches_of_each=20):
    """Return the median norm of minibatch gradients, by which the paper chooses G.

    It reads the rows of a run without privacy, and no guarantee covers that.

    Args:
        config: config of a line; its noise is ignored.
        seed: seed of the run and of the minibatches.
        evaluations: number of times during the run at which norms are taken.
        batches_of_each: minibatches of each client, each time.
    """
    made = build(dataclasses.replace(config, algorithm="fedavg", epsilon=None))
    fed, loss = made.fed, made.task.loss

    @jax.jit
    def norms(params, key):
        def one(key, index, size):
            slots = jax.random.randint(key, (config.batch,), 0, size)
            mean = lambda w: jax.vmap(loss, (None, 0, 0))(
                w, fed.x[index[slots]], fed.y[index[slots]]
            ).mean()
            return optax.tree.norm(jax.grad(mean)(params))

        keys = jax.random.split(key, (batches_of_each, len(fed.size)))
        return jax.lax.map(lambda k: jax.vmap(one)(k, fed.index, fed.size), keys)

    found, run, key = [], None, jax.random.key(seed)
    for i in range(evaluations):
        out = simulate(key, made, max(1, config.rounds // evaluations), start=run)
        run = out.run
        found.append(norms(out.params, jax.random.fold_in(key, i)))
    return float(np.median(np.stack(found)))


def budgets(config, clock="step", reading="gradient"):
    """Return epsilons of a line's noise, and the claimed one; None if there is none.

    "one round" and "counted" are proved. The second counts a client's participations except for a
    probability of FAILURE. "if clipped" is what the printed noise would give in the first round if
    all steps were clipped. "Theorem 2" is the paper's total with c_0 = 1.
    """
    names = ("ε one round", "ε if clipped", "ε counted", "ε Theorem 2")
    if config.epsilon is None:
        return dict.fromkeys(names)
    fed = assemble.federation(config)
    rate, steps = rate_of(config, fed), np.arange(config.steps)
    share = min(1.0, (config.cohort or config.clients) / config.clients)
    claimed = float(li2025.total_epsilon_heuristic(config.epsilon, rate, share, config.rounds))
    if config.mode == "sound":
        counted = guarantees.guarantee(
            build(config), config.rounds, config.delta, view="server", quantile=FAILURE
        )
        once = float(li2025.round_epsilon(multiplier(config, fed), config.delta, rate))
        return dict(zip(names, (once, once, counted.epsilon, claimed)))
    rates = config.lr / np.sqrt(1 + (steps if clock == "step" else 0 * steps))
    rows = config.steps * config.batch / rate
    std = li2025.noise_std_printed(
        rates[-1], config.steps, config.clip_norm, config.batch, rows, config.epsilon, config.delta
    ).value
    shrunk = 1.0 if reading == "model" else rates[-1]
    level = shrunk * float(std) / float(li2025.sensitivity_sound(rates, config.clip_norm))
    return dict(
        zip(names, (None, float(li2025.round_epsilon(level, config.delta, rate)), None, claimed))
    )
