"""PADPFL (Talaei, Izadi, 2024): FedProx solves, clipped models, impact factors; NbAFL (Wei et al.,
2020) with equal ones."""

from typing import Annotated

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, readable
from ..core.records import Algorithm, Batches, Fn, Mechanism, Release, named
from ..gradients import per_example
from ..gradients.per_example import Grad
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import full, gather
from .base import Number, Optimizer, Rate, algorithm, traits


@named("padpfl.init")
def _init(params, *, step):
    return step.init(params), jnp.zeros(())


@named("padpfl.client")
def _client(context, keys, server, client_state, rows, *, work, mu, mechanism, most, upload):
    start = server.params
    pull = lambda g, w, s: pytrees.axpy(mu, pytrees.sub(w, start), g)
    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, pull)
    inexact = _inexactness(work.grad, context, start, trained, rows, mu)
    if most is not None:  # a solve that stops too early voids what rests on it
        # but for one that is not finite: it counts as zero, and nothing rests on it
        too_short = pytrees.all_finite(trained) & ~(inexact <= most)
        overflow = diagnostics.overflow + too_short.astype(jnp.int32)
        diagnostics = diagnostics._replace(overflow=overflow)
    payload = trained if upload == "model" else pytrees.sub(trained, start)
    if mechanism is not None:
        form = pytrees.dtypes_of(payload)
        payload, lost = mech.release_one(
            mech.at_round(mechanism, context.round),
            keys.noise,
            payload,
            realised=context.size,
            client=context.client,
        )
        payload = pytrees.cast(payload, form)
        diagnostics = diagnostics._replace(nonfinite=diagnostics.nonfinite + lost)
    client_state = jnp.where(jnp.isfinite(inexact), inexact, jnp.finfo(jnp.float32).max)
    return payload, client_state, diagnostics


def _inexactness(grad, context, start, trained, rows, mu):
    """||gradient of the proximal problem|| where the client stopped, over that where it started;
    over all its rows."""
    slots = jnp.arange(rows.index.shape[0])
    everything = gather(rows, slots, slots < rows.size)
    whole = Grad(per_example.exact(grad.loss), None, grad.l2)
    gradient = lambda w: whole(None, w, everything, context)[0]
    left = pytrees.norm(pytrees.axpy(mu, pytrees.sub(trained, start), gradient(trained)))
    return left / jnp.maximum(pytrees.norm(gradient(start)), jnp.finfo(jnp.float32).tiny)


@named("padpfl.server")
def _server(context, server, release, *, step, upload):
    return step(
        context, server, pytrees.sub(release, server.params) if upload == "model" else release
    )


@readable
@traits(example_noise=None, client_noise="upload")
def padpfl(
    grad: Grad,
    *,
    mu: Number = 0.1,
    lr: Rate = 0.02,
    steps: int = 5,
    batch: Batches = full(),
    upload: str = "model",
    mechanism: Mechanism | None = None,
    inexactness: Annotated[Number | None, PYTHON_ONLY] = None,
    server_lr: Rate = 1.0,
    server_optimizer: Optimizer = optax.sgd,
) -> Algorithm:
    """Clients solve loss + (mu / 2) ||w - w_server||^2 inexactly; the server takes the weighted
    mean of their models.

    The impact factors are `jfl.plan(weights=...)`: fixed, of `jfl.sampling.weights.impact`, or a
    function of the round.  All clients take part (`sampling.full`).  Noise of the paper's kind, on
    a clipped upload and on what is broadcast:

        plan(..., upload=chain(clip_l2(B), total(), gaussian(z)),
             release=chain(bounded(B, "upload"), total(), gaussian(z_server), divide(clients)))

    What the solves of each client's last round reached is in `run.client_states`, [C]: a
    measurement, outside any guarantee.  Sensitivity from clipped steps is
    `output_perturbation(..., mu=mu)`.

    Args:
        grad: gradients of the loss, without the pull, as in `fedavg`.
        mu: pull to the server's model.
        upload: model | difference, what a client clips and uploads.  "model" is as printed; the
            clip norm of a "difference" may be far smaller: usable noise.
        mechanism: instead of a noisy upload, a chain inside the client, for its examples:
            chain(bounded(s / 2, "prox_erm"), total(), gaussian(z)), s from
            `experiments.papers.talaei2024.claims.client_sensitivity`, which is of an exchange, and
            replace_one doubles a bound; conditional on convex Lipschitz losses.
        inexactness: what a solve must reach, in (0, 1]; one that does not counts as an overflow in
            Health, which stops the run: give more steps or a larger lr.

    Other Parameters:
        lr, steps, batch, server_lr, server_optimizer: as in `fedavg`.

    References:
        Talaei, Izadi, 2024, Algorithm 1; the clip on a model bounds a client by 2 B, not by 2 B /
        rows.
    """
    checks.require_nonnegative("padpfl", single=True, mu=mu)
    checks.require_one_of("padpfl", ("model", "difference"), upload=upload)
    if inexactness is not None:
        checks.require_fraction("padpfl", single=True, inexactness=inexactness)
    if mechanism is not None:
        if (
            not isinstance(mechanism, Mechanism)
            or not mech.has_clip(mechanism)
            or mech.remembers(mechanism)
        ):
            checks.fail(
                "padpfl",
                'mechanism = chain(bounded(..., "prox_erm"), total(), gaussian(z))',
                f"{mechanism!r}",
            )
        rests_on_solves = any(s.declared == "prox_erm" for s in mechanism.stages)
        if rests_on_solves and getattr(grad, "l2", None) is not None:
            checks.fail(
                "padpfl", "a grad without l2 beside a prox_erm bound", "l2", "Put it into the loss."
            )
        if rests_on_solves and inexactness is None:
            checks.fail("padpfl", "inexactness beside a prox_erm bound, which rests on it", "none")
        mechanism = mech.bind(mechanism, "replace_one", "padpfl", required=True, also=())
    work = local.work(grad, batch, lr=lr, steps=steps)
    step = dict(step=local.server_step(server_lr, server_optimizer))
    most = None if inexactness is None else checks.as_scalar(inexactness)
    client = Fn(
        _client,
        dict(work=work, mu=checks.as_scalar(mu), mechanism=mechanism, most=most),
        dict(upload=upload),
    )
    released = work.releases() if mechanism is None else (Release(mechanism, batch, 1, steps),)
    return algorithm(
        Fn(_init, step),
        client,
        Fn(_server, step, dict(upload=upload)),
        releases=released,
        name="padpfl",
        uploads=upload,
        checks_its_solve=True,
    )
