"""Build plans of Chen et al. (2024) that the fields of a Config cannot express.

rates      of clients fall as 1 / sqrt(round); of the server only for AdDPNFL (Algorithm 1 has none)
sampling   with_replacement draws clients by their rows (the paper's MD), and each draw counts
equally Synthetic  60 features, one mean per client, no label noise, log-normal sizes;
partition="iid" is
           Synthetic-IID
Dirichlet  clients of equal size, class shares ~ Dir(alpha * classes * share of the class)
noise      as_printed reaches epsilon by the paper's tCDP and the expected participations, for every
           algorithm; sound reaches it for each client by the proved accountant, which charges every
           round.  Unit: one record
"""

import dataclasses
import functools
from typing import Any

import numpy as np

import jfl
from jfl import schedules
from jfl.algorithms import addpnfl, dpnfl, fedavg, scaffold
from jfl.privacy.calibration import calibrate_per_client
from jfl.runs import build as assemble
from jfl.runs import guarantee_rows
from jfl.runs.config import Config

from ...harness.programs import CURVE, Plans
from .. import as_printed

MAKE = dict(addpnfl=addpnfl, dpnfl=dpnfl, fedavg=fedavg, scaffold=scaffold)


@functools.lru_cache(maxsize=4)
def _synthetic(config: Config):
    iid = config.partition == "iid"
    data = jfl.datasets.synthetic(
        config.synthetic_alpha,
        config.synthetic_beta,
        config.clients,
        config.rows_per_client,
        features=60,
        label_noise=0.0,
        means="client",
        scale="std",
        iid=iid,
        sizes="lognormal",
        min_rows=config.min_rows,
        seed=config.partition_seed,
    )
    return jfl.federate(data, jfl.partition.natural())


@functools.lru_cache(maxsize=4)
def _dirichlet(config: Config):
    owners = jfl.partition.dirichlet(
        config.clients, config.alpha, balanced=True, seed=config.partition_seed
    )
    return jfl.federate(assemble._dataset(config.dataset, config.preprocess), owners)


def federation(config: Config):
    """Return the rows of a line, with the client that owns each.

    Raises:
        ValueError: if its data are not on this machine.
    """
    data = Config(**{name: getattr(config, name) for name in assemble.DATA})
    if config.dataset == "synthetic":
        return _synthetic(data)
    return _dirichlet(data) if config.partition == "dirichlet" else assemble.federation(data)


def build(config: Config, second_moment_of="diff"):
    """Return the plan of a line, with its noise.

    Args:
        config: of the line.
        second_moment_of: "diff" as in Algorithm 2 of the paper, "momentum" as in its text.
    """
    fed = federation(config)
    task = jfl.models.mlp(fed, config.hidden) if config.model == "mlp" else jfl.models.logistic(fed)
    private, adaptive = config.epsilon is not None, config.algorithm == "addpnfl"
    sampler = (
        jfl.sampling.with_replacement(config.clients, config.cohort, weights=fed.size)
        if config.sampler == "with_replacement"
        else jfl.sampling.without_replacement(config.clients, config.cohort)
    )
    options: dict[str, Any] = dict(
        steps=config.steps,
        lr=schedules.inverse_sqrt(config.lr, every=config.steps),
        batch=jfl.batches.without_replacement(config.batch, "error" if private else "all"),
        server_lr=schedules.inverse_sqrt(config.server_lr) if adaptive else config.server_lr,
    )
    if adaptive:
        options["adaptivity"] = config.adaptivity
        options["second_moment_of"] = second_moment_of

    def plan(noise):
        if noise is None:
            grad = jfl.grad(task.loss, l2=config.l2)
        else:
            chain = jfl.chain(
                jfl.clip_l2(config.clip_norm),
                jfl.total(),
                jfl.gaussian(noise),
                jfl.divide(config.batch),
            )
            grad = jfl.private_grad(task.loss, chain, l2=config.l2)
        return jfl.plan(
            fed, task, MAKE[config.algorithm](grad, **options), sampler, weights=config.weights
        )

    if not private:
        return plan(None)
    draft = plan(1.0)
    target: dict[str, Any] = dict(epsilon=config.epsilon, delta=config.delta, rounds=config.rounds)
    if config.mode == "as_printed":
        return plan(as_printed.calibrate(draft, paper="chen2024", **target))
    return plan(calibrate_per_client(draft, **target))


_proved = {}


def privacy(plan, config: Config) -> list[dict]:
    """Return the proved guarantee of a record for the server, and the paper's claim."""
    if config.epsilon is None:
        return []
    noise = next(
        s.noise for s in plan.algorithm.releases[0].mechanism.stages if s.name == "gaussian"
    )
    key = (
        config.rounds,
        config.steps,
        config.batch,
        config.delta,
        np.asarray(plan.fed.size).tobytes(),
        np.asarray(noise).tobytes(),
    )
    if key not in _proved:  # the algorithms of a figure share their noise
        _proved[key] = (
            _short(plan, config)
            if config.rounds * config.steps <= 100
            else jfl.guarantee(plan, config.rounds, config.delta, "example", "server")
        )
    told = (
        (as_printed.claimed(plan, config.rounds, config.delta, "chen2024"),)
        if config.mode == "as_printed"
        else ()
    )
    return [guarantee_rows.as_row(g) for g in (_proved[key], *told)]


def _short(plan, config):
    """Return the Renyi bound of a run that is too short for a tighter bound to matter."""
    rounds: Any = [config.rounds]
    value = float(jfl.epsilons(plan, rounds, config.delta, "example", "server")[0])
    return jfl.Guarantee(value, config.delta, "example", "replace_one", "server", "rdp")


def made(config, second_moment_of="diff"):
    """Build a plan with a separate split or draw of the data for each seed."""
    return build(dataclasses.replace(config, partition_seed=config.seed), second_moment_of), config


RUNS = Plans(
    made,
    seeded=True,
    privacy=privacy,
    epsilons=None,
    partition=None,
    trace=CURVE,
)
TEXT_RUNS = dataclasses.replace(RUNS, build=functools.partial(made, second_moment_of="momentum"))
