"""The constructor `algorithm`, functions that several algorithms share, and traits for configs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from .. import local
from ..core import checks, pytrees
from ..core.records import Algorithm, Fn, Mechanism, Release, named
from ..privacy.mechanisms import chain as mech

# A hyperparameter. It is traced, so a sweep over it is a vmap.
Number = float | jax.Array
# A learning rate: a number, or a schedule, which is a function of round * steps + step for a client
# and of the round for the server.
Rate = Number | Callable
# An optax factory such as optax.adam, or the transformation that it returns.
Optimizer = Callable | optax.GradientTransformation


class Traits(NamedTuple):
    """Properties of an algorithm that configs need and its signature does not show.

    Attributes:
        example_noise: where a config adds noise for example-level privacy: "gradient" (in each
            local step), "mechanism" (the argument of that name), or None (nowhere).
        client_noise: where a config adds noise for client-level privacy: "release" (to the
            aggregate), "upload" (to each client's upload), or None (nowhere).
        payload_models: the size of an upload, in multiples of the size of the model.
        as_printed: arguments with which the algorithm is exactly that of its paper.
    """

    example_noise: str | None = "gradient"
    client_noise: str | None = "release"
    payload_models: int = 1
    as_printed: Mapping[str, Any] = {}

    @property
    def printed_unit(self) -> str:
        """The privacy unit of the guarantee in the paper, "client" or "example"."""
        return "client" if self.client_noise == "upload" else "example"


def traits(**values) -> Callable:
    """Return a decorator that sets the `Traits` of a function that returns an algorithm."""

    def decorate(factory):
        factory.traits = Traits(**values)
        return factory

    return decorate


def traits_of(factory: Callable) -> Traits:
    """Return the `Traits` that were set for a function, or the defaults if none were."""
    return getattr(factory, "traits", Traits())


@named("algorithm.params")
def _params(server):
    return getattr(server, "params", server)


def algorithm(
    init: Callable,
    client: Callable,
    server: Callable,
    *,
    releases: Sequence[Release] = (),
    params: Callable = _params,
    name: str = "algorithm",
    stateful: bool = False,
    uploads: str = "difference",
    checks_its_solve: bool = False,
    personal: Callable | None = None,
    personal_releases: Sequence[Release] | None = None,
) -> Algorithm:
    """Return an algorithm from three pure functions: `init`, `client` and `server`.

    Write the functions at module level and bind their hyperparameters with jfl.Fn, so that plans
    that differ only in numbers share one compiled program.

    Args:
        init: maps the initial params to (server state, client state).  The client state is that of
            one client, or () if clients keep none.
        client: maps (context, keys, server state, client state, rows) to (payload, new client
            state, Diagnostics).  The payload is the upload before any noise.
        server: maps (context, server state, release) to the new server state.  `release` has the
            structure of the payload.
        releases: the noisy releases from which a client computes its payload, a tuple of
            jfl.Release, such as the result of `releases()` of a `local.Work`.  The accountant
            counts them.  With () the plan has no guarantee for examples.
        params: maps the server state to params.  By default `server.params`, or the server state
            itself.
        name: the name of the algorithm in plans and results.
        stateful: True if clients keep state between rounds, which limits what can be proved.
        uploads: "difference" if clients upload differences of models, or "model".  With "model" all
            clients have to participate, because the weights of a mean must add up to 1.
        checks_its_solve: True if a client reports an overflow, which voids the guarantee of the
            run, if it minimizes its local objective too inaccurately.  A mechanism may declare
            bounded(..., "prox_erm") only in this case.
        personal: maps (server state, client state) to a client's personal params, which are
            evaluated on its test rows.  None evaluates `params` for all clients.
        personal_releases: the noisy releases, in addition to `releases`, from which personal models
            are computed; () if there are none.  `jfl.guarantee(plan, view="personal")` then covers
            uploads and personal models together.  None means unknown: no guarantee covers personal
            models.
    """
    for argument, declared in (
        ("releases", releases),
        ("personal_releases", () if personal_releases is None else personal_releases),
    ):
        if not isinstance(declared, (list, tuple)) or not all(
            isinstance(r, Release) for r in declared
        ):
            checks.fail(
                "algorithm",
                f"{argument}, a tuple of jfl.Release",
                checks.short_repr(declared),
                "() declares no noisy release.",
            )
    if personal_releases is not None and personal is None:
        checks.fail(
            "algorithm",
            "a function personal when personal_releases is given",
            "none",
            "Give personal=, or leave personal_releases out.",
        )
    checks.require_one_of("algorithm", ("difference", "model"), uploads=uploads)
    checks.require_one_of("algorithm", (False, True), checks_its_solve=checks_its_solve)
    as_fn = lambda f: f if isinstance(f, Fn) else Fn(f)
    return Algorithm(
        *map(as_fn, (init, client, server, params)),
        releases=tuple(releases),
        name=name,
        stateful=stateful,
        uploads=uploads,
        checks_its_solve=checks_its_solve,
        personal=personal and as_fn(personal),
        personal_releases=None if personal_releases is None else tuple(personal_releases),
    )


# --- parts that several algorithms share


def train_difference(work, context, keys, start, rows, correct=None):
    """Take local steps from the model `start`, and return the model difference.

    The arguments are those of `local.train`.

    Returns:
        The trained model minus `start`, and Diagnostics.
    """
    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, correct)
    return pytrees.sub(trained, start), diagnostics


def gradient_at(work, context, keys, params, rows, number):
    """Return the gradient of one batch at `params`, and Diagnostics.

    Args:
        work: the local training. The result does not depend on its optimizer and number of steps.
        context, keys, params, rows: as for `local.train`.
        number: the number of the batch within the round. It differs from the numbers of all local
            steps and of other gradients of the round.
    """
    work = dataclasses.replace(work, steps=1)
    _, gradient, _, diagnostics = local.train(
        work, context, keys, params, rows, moving=0.0, first=number
    )
    return gradient, diagnostics


def pull_to(center, weight) -> Callable:
    """Return a function that adds the gradient of (weight / 2) ||w - center||^2 to a gradient.

    Pass the function to `local.train` as `correct`.
    """
    return lambda gradient, params, step: pytrees.axpy(
        weight, pytrees.sub(params, center), gradient
    )


def variant(
    base: Algorithm,
    name: str,
    *,
    init: Fn | None = None,
    client: Fn | None = None,
    server: Fn | None = None,
    **fields,
) -> Algorithm:
    """Return a copy of an algorithm with a new name and some of its functions replaced.

    Args:
        base: an algorithm, such as the result of `fedavg`.
        name: the name of the new algorithm.
        init, client, server: the new functions. Hyperparameters that are bound to a function of
            `base` are bound to its replacement as well. None keeps the function of `base`.
        fields: new values of other fields of `Algorithm`.
    """
    for field, new in (("init", init), ("client", client), ("server", server)):
        if new is not None:
            old = getattr(base, field)
            fields[field] = Fn(new.function, old.data | new.data, old.static | new.static)
    return dataclasses.replace(base, name=name, **fields)


def scalars(check: Callable, where: str, **values: Number) -> dict[str, Any]:
    """Check hyperparameters, and return them as arrays by name.

    Args:
        check: a function of core.checks, such as `require_positive`.
        where: the name of the algorithm, for messages.
        **values: the hyperparameters.
    """
    check(where, single=True, **values)
    return {name: checks.as_scalar(value) for name, value in values.items()}


def bind_model_chain(where: str, mechanism: Any, bound: str) -> Mechanism:
    """Set the adjacency of a chain that a client applies to its trained model to replace_one.

    The chain protects examples: replacing one row may change the whole model.  A chain without a
    clip or a declared bound, or with state between rounds, is rejected.

    Args:
        where: the name of the algorithm, for messages.
        mechanism: the chain.
        bound: the first stage that a chain should have, as text for messages.
    """
    is_chain = isinstance(mechanism, Mechanism)
    if not is_chain or not mech.has_clip(mechanism) or mech.remembers(mechanism):
        expected = f"mechanism = chain({bound}, total(), gaussian(z))"
        checks.fail(where, expected, checks.short_repr(mechanism))
    return mech.bind(mechanism, "replace_one", where, required=True, also=())


@named("algorithm.personal")
def own_model(server, client_state):
    """Return the personal model of a client whose state is that model."""
    return client_state
