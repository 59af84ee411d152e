"""PADPFL (Talaei, Izadi, 2024): FedProx solves, clipped models, impact factors; NbAFL (Wei et al.,
2020) with equal ones."""

from typing import Annotated

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY
from ..core.records import Fn, Mechanism, Release, named
from ..gradients import per_example
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import full, gather
from .base import algorithm, traits


@named("padpfl.init")
def _init(params, *, step):
    return step.init(params), jnp.zeros(())


@named("padpfl.client")
def _client(ctx, keys, server, own, rows, *, work, mu, mechanism, most, upload):
    start = server.params
    pull = lambda g, w, s: pytrees.axpy(mu, pytrees.sub(w, start), g)
    trained, _, _, seen = local.train(work, ctx, keys, start, rows, pull)
    inexact = _inexactness(work.grad.loss, ctx, start, trained, rows, mu)
    if most is not None:  # a solve that stops too early voids what rests on it
        # but for one that is not finite: it counts as zero, and nothing rests on it
        short = pytrees.finite(trained) & ~(inexact <= most)
        seen = seen._replace(overflow=seen.overflow + short.astype(jnp.int32))
    payload = trained if upload == "model" else pytrees.sub(trained, start)
    if mechanism is not None:
        form = pytrees.form(payload)
        payload, lost = mech.alone(
            mech.at(mechanism, ctx.round), keys.noise, payload, realised=ctx.size, client=ctx.client
        )
        payload, seen = pytrees.cast(payload, form), seen._replace(nonfinite=seen.nonfinite + lost)
    return payload, jnp.where(jnp.isfinite(inexact), inexact, jnp.finfo(jnp.float32).max), seen


def _inexactness(loss, ctx, start, trained, rows, mu):
    """||gradient of the proximal problem|| where the client stopped, over that where it started;
    over all its rows."""
    slots = jnp.arange(rows.index.shape[0])
    everything = gather(rows, slots, slots < rows.size)
    at = lambda w: per_example.grad(per_example.exact(loss))(None, w, everything, ctx)[0]
    return pytrees.norm(pytrees.axpy(mu, pytrees.sub(trained, start), at(trained))) / jnp.maximum(
        pytrees.norm(at(start)), jnp.finfo(jnp.float32).tiny
    )


@named("padpfl.server")
def _server(ctx, server, release, *, step, upload):
    return step(ctx, server, pytrees.sub(release, server.params) if upload == "model" else release)


@traits(example_noise=None, client_noise="upload")
def padpfl(
    grad,
    *,
    mu: float = 0.1,
    lr=0.02,
    steps=5,
    batch=full(),
    upload: str = "model",
    mechanism=None,
    inexactness: Annotated[float | None, PYTHON_ONLY] = None,
    server_lr=1.0,
    server_optimizer=optax.sgd,
):
    """Clients solve loss + (mu / 2) ||w - w_server||^2 inexactly; the server takes the weighted
    mean of their models.

    The impact factors are `jfl.plan(weights=...)`: fixed, of `jfl.schedules.impact`, or a function
    of the round.  All clients take part (`sampling.full`).  Noise of the paper's kind, on a clipped
    upload and on what is broadcast:

        plan(..., upload=chain(clip_l2(B), total(), gaussian(z)),
             release=chain(bounded(B, "upload"), total(), gaussian(z_server), divide(clients)))

    Args:
        mu: pull to the server's model.
        upload: model | difference, what a client clips and uploads.  "model" is as printed; the
            clip norm of a "difference" may be far smaller: usable noise.
        mechanism: instead of a noisy upload, a chain inside the client, for its examples:
            chain(bounded(s / 2, "prox_erm"), total(), gaussian(z)), s from
            `jfl.papers.talaei2024.privacy.client_sensitivity`, which is of an exchange, and
            replace_one doubles a bound; conditional on convex Lipschitz losses.
        inexactness: what a solve must reach, in (0, 1]; one that does not counts as an overflow in
            Health, which stops the run: give more steps or a larger lr.

    What the solves reached is in `run.own`, [C], of each client's last round: a measurement,
    outside any guarantee. Sensitivity from clipped steps is `output_perturbation(..., mu=mu)`.

    References:
        Talaei, Izadi, 2024, Algorithm 1; the clip on a model bounds a client by 2 B, not by 2 B /
        rows.
    """
    checks.nonnegative("padpfl", single=True, mu=mu)
    checks.choice("padpfl", ("model", "difference"), upload=upload)
    if inexactness is not None:
        checks.fraction("padpfl", single=True, inexactness=inexactness)
    if mechanism is not None:
        if (
            not isinstance(mechanism, Mechanism)
            or not mech.clips(mechanism)
            or mech.adaptive(mechanism)
        ):
            checks.fail(
                "padpfl",
                'mechanism = chain(bounded(..., "prox_erm"), total(), gaussian(z))',
                f"{mechanism!r}",
            )
        if (
            any(s.name == "prox_erm" for s in mechanism.stages)
            and getattr(grad, "l2", None) is not None
        ):
            checks.fail(
                "padpfl", "a grad without l2 beside a prox_erm bound", "l2", "Put it into the loss."
            )
        if inexactness is None and any(s.name == "prox_erm" for s in mechanism.stages):
            checks.fail("padpfl", "inexactness beside a prox_erm bound, which rests on it", "none")
        mechanism = mech.bind(mechanism, "replace_one", "padpfl", required=True)
    work = local.work(grad, batch, lr=lr, steps=steps)
    step = dict(step=local.server_step(server_lr, server_optimizer))
    most = None if inexactness is None else checks.scalar(inexactness)
    client = Fn(
        _client,
        dict(work=work, mu=checks.scalar(mu), mechanism=mechanism, most=most),
        dict(upload=upload),
    )
    released = work.releases() if mechanism is None else (Release(mechanism, batch, 1, steps),)
    return algorithm(
        Fn(_init, step),
        client,
        Fn(_server, step, dict(upload=upload)),
        releases=released,
        name="padpfl",
    )
