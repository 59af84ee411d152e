"""PADPFL: FedProx with clipped models and a weight ("impact factor") for each client.

With equal weights it is NbAFL.

References:
    Talaei, Izadi, 2024 (PADPFL). Wei et al., "Federated learning with differential privacy:
    algorithms and performance analysis", 2020 (NbAFL).
"""

from typing import Annotated

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY
from ..core.records import Algorithm, Batches, Fn, Mechanism, Release, named
from ..gradients import per_example
from ..gradients.per_example import Grad
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import full, gather
from .base import Number, Optimizer, Rate, algorithm, bind_model_chain, pull_to, scalars, traits


@named("padpfl.init")
def _init(params, *, step):
    return step.init(params), jnp.zeros(())


@named("padpfl.client")
def _client(context, keys, server, client_state, rows, *, work, mu, mechanism, most, upload):
    start = server.params
    pull = pull_to(start, mu)
    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, pull)
    inexact = _inexactness(work.grad, context, start, trained, rows, mu)
    if most is not None:
        # The sensitivity assumes a solve of this accuracy. A model that is not finite counts as
        # zero, so nothing depends on its accuracy.
        too_short = pytrees.all_finite(trained) & ~(inexact <= most)
        overflow = diagnostics.overflow + too_short.astype(jnp.int32)
        diagnostics = diagnostics._replace(overflow=overflow)
    payload = trained if upload == "model" else pytrees.sub(trained, start)
    if mechanism is not None:
        dtypes = pytrees.dtypes_of(payload)
        payload, num_nonfinite = mech.release_one(
            mech.at_round(mechanism, context.round),
            keys.noise,
            payload,
            realised=context.size,
            client=context.client,
        )
        payload = pytrees.cast_to(payload, dtypes)
        diagnostics = diagnostics._replace(nonfinite=diagnostics.nonfinite + num_nonfinite)
    client_state = jnp.where(jnp.isfinite(inexact), inexact, jnp.finfo(jnp.float32).max)
    return payload, client_state, diagnostics


def _inexactness(grad, context, start, trained, rows, mu):
    """Return the inexactness of a solve, Float[].

    It is the norm of the gradient of loss + (mu / 2) ||w - start||^2 at `trained`, divided by that
    at `start`. The loss is the mean over all rows of the client.
    """
    slots = jnp.arange(rows.index.shape[0])
    all_rows = gather(rows, slots, slots < rows.size)
    exact_grad = Grad(per_example.exact(grad.loss), None, grad.l2)
    gradient = lambda params: exact_grad(None, params, all_rows, context)[0]
    at_end = pytrees.norm(pytrees.axpy(mu, pytrees.sub(trained, start), gradient(trained)))
    return at_end / jnp.maximum(pytrees.norm(gradient(start)), jnp.finfo(jnp.float32).tiny)


@named("padpfl.server")
def _server(context, server, release, *, step, upload):
    return step(
        context, server, pytrees.sub(release, server.params) if upload == "model" else release
    )


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
    """Return PADPFL: clients approximately minimize loss + (mu / 2) ||w_i - w_server||^2.

    The new model is the weighted mean of the clients' models. The weights, which the paper calls
    impact factors, are the `weights` of `jfl.plan`: fixed, for example from
    `jfl.sampling.weights.impact`, or a function of the round. All clients participate
    (`sampling.full`). The paper clips models to norm B, and adds noise to the uploads and to the
    broadcast model:

        plan(..., upload=chain(clip_l2(B), total(), gaussian(z)),
             release=chain(bounded(B, "upload"), total(), gaussian(z_server), divide(clients)))

    `bounded(B, "upload")` says that the norm of each upload is at most B, because clients clip it,
    so the server does not clip again.

    `run.client_states` contains one number per client, the inexactness of its last solution: the
    norm of the gradient of its objective at the end of training, divided by that at the start. No
    guarantee covers this number.

    Args:
        grad: gradient of the loss without the proximal term, as in `fedavg`.
        mu: weight of the proximal term.
        upload: "model" or "difference", the quantity that a client clips and uploads. The paper
            uses "model". A "difference" allows a much smaller clip norm, and so less noise.
        mechanism: a chain that a client applies to its trained model, instead of noise in `upload`
            of the plan: chain(bounded(s / 2, "prox_erm"), total(), gaussian(z)). The sensitivity s
            comes from `experiments.papers.talaei2024.claims.client_sensitivity`. The bound is s / 2
            because the sensitivity under replace_one is twice the bound. The guarantee is for
            examples, and conditional on convex Lipschitz losses. `output_perturbation(..., mu=mu)`
            derives the sensitivity from clipped steps instead.
        inexactness: the largest allowed inexactness of a client's solution, in (0, 1]. A less
            accurate solution counts as an overflow in Health, which stops the run. In that case,
            use more steps or a larger lr.

    Other Parameters:
        lr, steps, batch, server_lr, server_optimizer: as in `fedavg`.

    References:
        Talaei, Izadi, 2024, Algorithm 1. With only a clip on the model, replacing a row may move
        the model by up to 2 B, not by 2 B / rows as the paper says.
    """
    pull = scalars(checks.require_nonnegative, "padpfl", mu=mu)
    checks.require_one_of("padpfl", ("model", "difference"), upload=upload)
    if inexactness is not None:
        checks.require_fraction("padpfl", single=True, inexactness=inexactness)
    if mechanism is not None:
        mechanism = bind_model_chain("padpfl", mechanism, 'bounded(..., "prox_erm")')
        assumes_solve = any(s.declared == "prox_erm" for s in mechanism.stages)
        if assumes_solve and getattr(grad, "l2", None) is not None:
            checks.fail(
                "padpfl", "a grad without l2 for a prox_erm bound", "l2", "Add it to the loss."
            )
        if assumes_solve and inexactness is None:
            checks.fail("padpfl", "inexactness, which a prox_erm bound relies on", "none")
    work = local.work(grad, batch, lr=lr, steps=steps)
    step = dict(step=local.server_step(server_lr, server_optimizer))
    max_inexactness = None if inexactness is None else checks.as_scalar(inexactness)
    data = dict(pull, work=work, mechanism=mechanism, most=max_inexactness)
    client = Fn(_client, data, dict(upload=upload))
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
