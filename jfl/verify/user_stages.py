"""What the functions of a user's stages hold: those of row and post stages, in any chain of a
plan."""

import jax
import jax.numpy as jnp

from ..core import checks
from ..core.records import Fn, Mechanism, Plan
from ..privacy.mechanisms import chain as mech
from ..privacy.mechanisms.stages import After, Stage
from .client import traced
from .declarations import Against
from .ownership import foreign, nodes
from .tracing import Trace, abstract, avals, cached, look_into, params_shapes


def held(plan: Plan) -> list[tuple[str, list]]:
    """The arrays that the functions of a user's stages hold, by the name of the stage."""
    return [(stage.name, trace.consts) for _, stage, trace in _traces(plan)]


def opaque(plan: Plan) -> Against:
    """What stands against a proof: stages that hide what they do."""
    example, client = {}, {}
    for unit, stage, trace in _traces(plan):
        words = {f"what {name} in the stage {stage.name!r} does": None for name in trace.opaque}
        client |= words  # what a client's own chain hides may be other clients' rows
        example |= words if unit == "example" else {}
    return Against(tuple(example), tuple(client))


def _traces(plan) -> list:
    """(unit, stage, Trace) of each stage with a function of a user's."""
    found = []
    algorithm = plan.algorithm
    number = lambda: jax.ShapeDtypeStruct((), jnp.float32)
    # of gradients or models, or of one number; a client may hold chains that it does not declare
    for chain in nodes((algorithm.client, algorithm.releases), Mechanism):
        found += _of_chain("example", chain, lambda: params_shapes(plan), number)
    for chain in (plan.upload, plan.release):
        found += _of_chain("client", chain, lambda: traced(plan).shapes[1])
    return found


def _is_foreign(stage: Stage) -> bool:
    return bool(foreign([f for f in (stage.apply, stage.bound, stage.update) if f is not None]))


def _of_chain(unit, chain: Mechanism | None, *candidates) -> list:
    """Of a chain over contributions like what the first of `candidates` gives that it takes.

    Raises:
        ValueError: where it takes none of them: what its functions hold cannot be seen.
    """
    if chain is None or not any(_is_foreign(s) or foreign(s.noise) for s in chain.stages):
        return []
    found = [(unit, stage, _of_the_round(f)) for stage, f in _schedules(chain)]
    chain = mech.at_round(chain, jnp.int32(0))
    if any(map(_is_foreign, chain.stages)):
        found += [(unit, *pair) for pair in _walked(chain, candidates)]
    return found


def _schedules(chain):
    """(stage, function) for clip norms and noise that are a user's function of the round."""
    for stage in chain.stages:
        of_apply = stage.apply.data.values() if stage.apply is not None else ()
        for value in (*of_apply, stage.noise):
            if isinstance(value, Fn) and foreign(value):
                yield stage, value


def _call(function, *operands):
    return function(*operands)


def _of_the_round(function) -> Trace:
    round_ = jax.ShapeDtypeStruct((), jnp.int32)
    return cached(
        ("schedule", avals(function)), lambda: look_into(_call, abstract(function), round_)
    )


def _walked(chain, candidates):
    why = None
    for like in candidates:
        try:
            shapes = like()
            name = ("stages", avals(chain), avals(shapes))
            return cached(name, lambda shapes=shapes: _along(chain, shapes))
        except Exception as error:  # the function is the user's, and so is its error
            why = error if why is None else why
    return checks.fail(
        "jfl.plan",
        "stages that take what is contributed",
        f"{' -> '.join(s.name for s in chain.stages)}, which fails: {checks.describe_error(why)}",
    )


def _along(chain, value) -> list[tuple[Stage, Trace]]:
    """Stage after stage, each on what the one before leaves."""
    state, number = abstract(mech.initial_state(chain)), jax.ShapeDtypeStruct((), jnp.float32)
    shape = next((s.shape for s in chain.stages if s.shape is not None), None)
    found = []
    for stage in chain.stages:
        if stage.role not in ("row", "post") or stage.apply is None:
            continue
        operands = (state, value) if stage.role == "row" else (value, After(number, number, shape))
        if _is_foreign(stage):
            found.append((stage, look_into(_call, abstract(stage.apply), *operands)))
        if stage.is_map or stage.role == "post":  # a clip leaves shapes as they are
            value = jax.eval_shape(_call, stage.apply, *operands)[0]
    return found
