"""The parts of an algorithm, and the traits that the builder of a run reads."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax

from .. import local
from ..core import checks, pytrees
from ..core.records import Algorithm, Fn, Mechanism, Release, named
from ..privacy.mechanisms import chain as mech

# A hyperparameter. It is traced data, so a sweep over it is a vmap.
Number = float | jax.Array
# A learning rate, or a schedule: of round * steps + step for a client, of the round for a server.
Rate = Number | Callable
Optimizer = Callable | optax.GradientTransformation  # an optax factory, or what it returns


class Traits(NamedTuple):
    """Properties of an algorithm that its signature does not show, for the builder of a run.

    Attributes:
        example_noise: where noise for example-level privacy goes: "gradient" (each local step),
            "mechanism" (the argument of that name), or None (nowhere).
        client_noise: where noise for client-level privacy goes: "release" (the aggregate), "upload"
            (each client's upload), or None (nowhere).
        payload_models: size of an upload, in models.
        as_printed: arguments that make it the algorithm as printed in its paper.
    """

    example_noise: str | None = "gradient"
    client_noise: str | None = "release"
    payload_models: int = 1
    as_printed: Mapping[str, Any] = {}

    @property
    def printed_unit(self) -> str:
        """The privacy unit of the formula in the paper."""
        return "client" if self.client_noise == "upload" else "example"


def traits(**values) -> Callable:
    """Set the `Traits` of an algorithm's factory, if they are not the usual ones."""

    def decorate(factory):
        factory.traits = Traits(**values)
        return factory

    return decorate


def traits_of(factory: Callable) -> Traits:
    """Return the traits of a factory."""
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
    """Make an algorithm of three pure functions.

    Write the functions at module level and bind their hyperparameters with jfl.Fn, so that plans
    that differ only in numbers share one compiled program.

    Args:
        init: maps params to (server state, client state).  The client state is that of one client,
            () for stateless clients.
        client: maps (context, keys, server, client_state, rows) to (payload, client_state,
            Diagnostics).
        server: maps (context, server, release) to the new server state.  `release` has the shape of
            the payload.
        releases: the noisy releases from which the client computes its payload, for the accountant:
            `work.releases()`, or a tuple of jfl.Release.  () claims nothing about examples.
        params: maps the server state to params.  By default `server.params`, or the server state
            itself.
        name: what plans and results call the algorithm.
        stateful: True if clients keep state between rounds, which limits what can be proved.
        uploads: "difference" of models, or "model".  With "model" all clients have to participate,
            because a mean of models needs weights that add up to 1.
        checks_its_solve: True if a client that stops its solve too early counts as an overflow,
            which voids the run.  Only then may its mechanism declare bounded(..., "prox_erm").
        personal: maps (server, client_state) to a client's own params, with which its test rows are
            evaluated.  None evaluates all clients with `params`.
        personal_releases: the noisy releases, beyond `releases`, from which personal models are
            computed; () if there are none.  With them `jfl.guarantee(plan, view="personal")` covers
            uploads and personal models together.  None declares nothing: a guarantee then covers no
            personal model that a client hands on.
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
    """Take local steps from a model, and return how far they led, and Diagnostics."""
    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, correct)
    return pytrees.sub(trained, start), diagnostics


def pull_to(center, weight) -> Callable:
    """Return the correction of local steps by the proximal term (weight / 2) ||w - center||^2."""
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
    """Return an algorithm with some functions of another one replaced.

    Args:
        base: an algorithm, such as `fedavg`.
        name: the name of the new one.
        init, client, server: new functions. They get the values that are bound to those of `base`,
            and their own.
        fields: other fields of `Algorithm` that change.
    """
    for field, new in (("init", init), ("client", client), ("server", server)):
        if new is not None:
            old = getattr(base, field)
            fields[field] = Fn(new.function, old.data | new.data, old.static | new.static)
    return dataclasses.replace(base, name=name, **fields)


def scalars(check: Callable, where: str, **values: Number) -> dict[str, Any]:
    """Check hyperparameters, such as by `checks.require_positive`, and return them as leaves."""
    check(where, single=True, **values)
    return {name: checks.as_scalar(value) for name, value in values.items()}


def bind_model_chain(where: str, mechanism: Any, bound: str) -> Mechanism:
    """Bind the chain that a client applies once per round, to its trained model.

    Replacing one row may change the whole model, so the chain protects examples under replace_one.

    Args:
        where: the algorithm, for messages.
        mechanism: the chain.
        bound: its first stage, for messages.
    """
    chains = isinstance(mechanism, Mechanism)
    if not chains or not mech.has_clip(mechanism) or mech.remembers(mechanism):
        expected = f"mechanism = chain({bound}, total(), gaussian(z))"
        checks.fail(where, expected, f"{mechanism!r}")
    return mech.bind(mechanism, "replace_one", where, required=True, also=())


@named("algorithm.personal")
def own_model(server, client_state):
    """Return the personal model of a client whose state is that model."""
    return client_state
