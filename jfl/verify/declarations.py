"""What a plan declares beside its client, and whether it can be taken at its word."""

import dataclasses
from typing import NamedTuple

import numpy as np

from ..core.records import Batches, Fn, Mechanism, Plan
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms import linear_maps, stages, wavelet
from ..privacy.mechanisms.stages import Stage
from ..sampling import clients
from .ownership import (
    foreign,
    functions_in,
    gradients_in,
    loss_types,
    name_of,
    nodes,
    own,
    records_in,
    same_bits,
)
from .tracing import opaque_parts

# the bound of a row stage of jfl follows from what the stage does, by the same numbers
ROWS = {
    stages._clip_l2: stages._its_bound,
    stages._clip_l1: stages._its_bound,
    stages._clip_per_layer: stages._layers_bound,
    stages._clip_adaptive: stages._adaptive_bound,
    wavelet._clip_ellipsoid: wavelet._ellipsoid_bound,
    wavelet._clip_bands: wavelet._bands_bound,
    wavelet._shares: wavelet._one,
    stages._clip_scaled: stages._scaled_bound,
}
NAMES = {
    "clip_l2": stages._clip_l2,
    "clip_l1": stages._clip_l1,
    "clip_per_layer": stages._clip_per_layer,
    "clip_adaptive": stages._clip_adaptive,
}
# what a row stage of jfl learns of a release
UPDATES = {
    stages._clip_adaptive: stages._adapt,
    stages._clip_scaled: stages._unscale,
}

DRAWS = {
    "_draw_full": "full",
    "_draw_without": "without_replacement",
    "_draw_with": "with_replacement",
    "_draw_poisson": "poisson",
    "_draw_epochs": "epochs",
    "_draw_few": "without_replacement",
    "_draw_poisson_few": "poisson",
    "_draw_responders": "first_responders",
    "_draw_separated": "min_separation",
    "_draw_cyclic": "cyclic_poisson",
    "_draw_available": "available_poisson",
    "_draw_truncated": "truncated_poisson",
    "_draw_allocated": "random_allocation",
    "_draw_bins": "balls_in_bins",
}


STRATEGIES = "jfl.privacy.mechanisms.strategies"


class Against(NamedTuple):
    example: tuple
    client: tuple


def declared_of(plan: Plan) -> tuple:
    """The noisy releases that an algorithm declares, as from its round 0 on."""
    return tuple(
        dataclasses.replace(r, mechanism=_from_start(r.mechanism))
        for r in plan.algorithm.releases
        if mech.noisy(r.mechanism)
    )


def _from_start(mechanism):
    """Without the shift that `chain.later` gives to what an accountant reads."""

    def one(f):
        return one(f.data["of"]) if isinstance(f, Fn) and f.function is mech._shifted else f

    inside = lambda f: f and Fn(f.function, {k: one(v) for k, v in f.data.items()}, f.static)
    return Mechanism(
        tuple(
            dataclasses.replace(s, apply=inside(s.apply), bound=inside(s.bound), noise=one(s.noise))
            for s in mechanism.stages
        ),
        mechanism.adjacency,
    )


def trusted(plan: Plan) -> bool:
    """True if jfl made the client, and what it declares is what the client holds; False for one
    whose releases do not follow from its steps alone."""
    client, declared = plan.algorithm.client, declared_of(plan)
    if any(getattr(f.function, "_always_traced", False) for f in functions_in(client)):
        return False
    if not own(client.function) or foreign(client, skip=(Mechanism, Batches) + loss_types(client)):
        return False
    chains, draws = nodes(client, Mechanism), nodes(client, Batches)
    steps = max(
        (n.steps for n in records_in(client) if isinstance(getattr(n, "steps", None), int)),
        default=1,
    )
    return all(
        any(same_bits(r.mechanism, m) for m in chains)
        and any(same_bits(r.batches, b) for b in draws)
        and (r.steps >= steps and r.count >= 1 if r.steps else r.count >= steps)
        for r in declared
    )


def declarations(plan: Plan) -> Against:
    """Stages, samplers and losses that cannot be taken at their word."""
    algorithm = plan.algorithm
    sampler = (
        ()
        if _sampled(plan.sampler.draw, plan.sampler.scheme) and _says_what_it_draws(plan.sampler)
        else (f"who takes part: {name_of(plan.sampler.draw)}",)
    )
    example = [
        f for m in nodes((algorithm.client, algorithm.releases), Mechanism) for f in _asserted(m)
    ]
    example += [
        f"which rows a batch holds: {name_of(b.draw)}"
        for b in nodes((algorithm.client, algorithm.releases), Batches)
        if not _drawn(b)
    ]
    # what a loss hides may be other clients' rows
    hidden = [f for g in gradients_in(algorithm.client) for f in opaque_parts(g.loss, plan)]
    example += hidden
    client = [f for m in (plan.upload, plan.release) if m is not None for f in _asserted(m)]
    client += hidden
    once = lambda findings: tuple(dict.fromkeys((*findings, *sampler)))
    return Against(once(example), once(client))


def _asserted(mechanism) -> list:
    rows = [s for s in mechanism.stages if s.role == "row"]
    by_length = not rows or rows[-1].apply.function is not stages._clip_l1
    return (
        [f"the bound of the row stage {s.name!r}" for s in rows if not own_stage(s)]
        + [
            "Laplace noise that was changed, or stands behind a clip that is not clip_l1"
            for s in mechanism.stages
            if s.law == "laplace" and (by_length or not mech.plain_laplace(s))
        ]
        + [
            f"the strategy of correlated noise: {s.strategy!r}"
            for s in mechanism.stages
            if s.strategy is not None and not _own_strategy(s.strategy)
        ]
    )


def _own_strategy(strategy) -> bool:
    """True for a strategy of jfl.strategies, restarted or not, as it was made."""
    part = strategy
    while part is not None:
        if type(part).__module__ != STRATEGIES:
            return False
        part = getattr(part, "of", None)
    return strategy.accounting_matches_noise()


def own_stage(stage: Stage) -> bool:
    """True for a row stage whose bound is that of what it does, and for a map, which has none."""
    if stage.apply is None or not own(stage.apply.function):
        return False
    if stage.bound is None:  # `chain` sees to the clip behind it
        return stage.apply.function in linear_maps.OWN and stage.state is stage.update is None
    if stage.apply.function is stages._as_it_is:
        return (
            bool(stage.declared)  # where it may stand is checked in `jfl.plan`
            and stage.bound.function is stages._declared
            and same_bits(stage.apply.data, stage.bound.data)
        )
    if NAMES.get(stage.name, stage.apply.function) is not stage.apply.function:
        return False  # some of what is computed goes by the name
    if (
        ROWS.get(stage.apply.function) is not stage.bound.function
        or stage.apply.static != stage.bound.static
    ):
        return False
    if (
        (stage.update is not None) != (stage.state is not None)
        or stage.update is not None
        and (
            stage.update.function is not UPDATES.get(stage.apply.function)
            or not same_bits(stage.update.data, stage.apply.data)
        )
    ):
        return False
    return same_bits(stage.apply.data, stage.bound.data)


def _sampled(draw, scheme) -> bool:
    return own(draw.function) and DRAWS.get(draw.function.__name__) == scheme


def _says_what_it_draws(sampler) -> bool:
    """True if what a sampler says of itself, from which an epsilon follows, is what it draws by."""
    fixed, data = sampler.draw.static, sampler.draw.data
    if not same_bits(data.get("rate"), sampler.rate):
        return False
    if "steps" in data:
        numbers = sampler.clients, sampler.rate, sampler.capacity
        if not same_bits(data["steps"], clients.binomial_steps(*numbers)):
            return False
    if "available" in data:
        pattern = np.asarray(data["available"])
        if not same_bits(pattern, sampler.available) or sampler.at_once != pattern.sum(1).max():
            return False
    edges = data.get("edges")
    if not same_bits(None if edges is None else clients.shares_of(edges), sampler.share):
        return False
    room = fixed.get("capacity", fixed.get("cohort", sampler.clients))
    said = (
        sampler.clients,
        sampler.capacity,
        sampler.separation,
        sampler.epoch,
        sampler.independent,
    )
    return said == (
        fixed["clients"],
        room,
        fixed.get("separation", 1),
        fixed.get("epoch", 1),
        fixed.get("independent", False),
    )


def _drawn(batches: Batches) -> bool:
    """True if a batch is drawn as its scheme says."""
    if not _sampled(batches.draw, batches.scheme):
        return False
    if batches.scheme == "truncated_poisson":
        same = same_bits(batches.draw.data, dict(expected=batches.expected))
        return same and batches.draw.static.get("batch") == batches.batch
    if batches.scheme in ("without_replacement", "with_replacement", "epochs"):
        return batches.draw.static.get("batch") == batches.batch
    data = batches.draw.data
    return batches.scheme != "poisson" or same_bits(
        (data.get("rate"), data.get("expected")), (batches.rate, batches.expected)
    )


def chain_words(mechanism) -> str:
    return " -> ".join(s.name for s in mechanism.stages)


def batch_words(batches, steps=0):
    size = (
        ""
        if batches.batch is None or batches.scheme in ("full", "poisson")
        else f"({batches.batch})"
    )
    return f"rows of batches.{batches.scheme}{size}" + (f", {steps} steps" if steps else "")
