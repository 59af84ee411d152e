"""Output perturbation: FedAvg with noise once per round, added to the client's model.

References:
    Li, Wang, Wu, Mathematics 13(3), 2025 (their DP-FedAvg). Wu et al., "Bolt-on differential
    privacy for scalable stochastic gradient descent-based analytics", SIGMOD 2017.
"""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY
from ..core.records import Algorithm, Batches, Fn, Mechanism, Release, named
from ..gradients.per_example import Grad, computed_in
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import without_replacement
from .base import Number, Optimizer, Rate, algorithm, bind_model_chain, pull_to, scalars, traits

WHERE = "output_perturbation"


@named("output_perturbation.init")
def _init(params, *, step):
    return step.init(params), ()


@named("output_perturbation.client")
def _client(context, keys, server, client_state, rows, *, work, mechanism, mu, clip_steps):
    chain = mech.at_round(mechanism, context.round)
    clip_norm = mech.bound(chain)

    def clip(gradient, params, step):
        norm = jnp.maximum(pytrees.norm(gradient), jnp.finfo(jnp.float32).tiny)
        factor = jnp.minimum(1.0, clip_norm / norm)
        if clip_steps == "last":
            factor = jnp.where(step == work.steps - 1, factor, 1.0)
        gradient = pytrees.scale(factor, gradient)
        return gradient if mu is None else pull_to(server.params, mu)(gradient, params, step)

    return _train_and_release(
        context, keys, server, client_state, rows, work, chain, clip, clip_steps == "all"
    )


@named("output_perturbation.contracting")
def _contracting(context, keys, server, client_state, rows, *, work, mechanism):
    """Train without clipping, since a clipped step does not contract.

    Mean gradients of two neighbouring datasets differ by at most twice the declared bound.
    """
    chain = mech.at_round(mechanism, context.round)
    return _train_and_release(context, keys, server, client_state, rows, work, chain, None, True)


def _train_and_release(context, keys, server, client_state, rows, work, chain, correct, clips):
    """Take local steps, add noise to their mean gradient, and return it as a model difference.

    Args:
        context, keys, server, client_state, rows: as for a client of `algorithm`.
        work: the local training.
        chain: the chain at this round.
        correct: as in `local.train`.
        clips: whether the chain clips the mean gradient before the noise.
    """
    trained, _, rate_sum, diagnostics = local.train(
        work, context, keys, server.params, rows, correct, drop=True
    )
    # This is minus the mean of clipped gradients, weighted by learning rates. Its norm is at most
    # the clip norm, whatever the rows are. (With lr * mu > 1 it may be larger; then the clip of
    # the chain takes effect.)
    mean = pytrees.scale(1 / rate_sum, pytrees.sub(trained, server.params))
    of_client = dict(realised=context.size, client=context.client)
    if not clips:
        mean, _ = mech.release_sum(chain, keys.noise, (), mean, **of_client)
        return pytrees.scale(rate_sum, mean), client_state, diagnostics
    dtypes = pytrees.dtypes_of(mean)
    mean, num_nonfinite = mech.release_one(chain, keys.noise, mean, **of_client)
    return (
        pytrees.cast_to(pytrees.scale(rate_sum, mean), dtypes),
        client_state,
        diagnostics._replace(nonfinite=diagnostics.nonfinite + num_nonfinite),
    )


@named("output_perturbation.server")
def _server(context, server, diff, *, step):
    return step(context, server, diff)


@traits(example_noise="mechanism", client_noise=None, as_printed={"clip_steps": "last"})
def output_perturbation(
    grad: Grad,
    mechanism: Mechanism,
    *,
    lr: Rate = 0.1,
    steps: int = 10,
    batch: Batches = without_replacement(8),
    server_lr: Rate = 1.0,
    server_optimizer: Optimizer = optax.sgd,
    clip_steps: Annotated[str, PYTHON_ONLY] = "all",
    mu: Annotated[Number | None, PYTHON_ONLY] = None,
    smoothness: Annotated[float | None, PYTHON_ONLY] = None,
) -> Algorithm:
    """Return FedAvg whose clients add noise once per round, to their trained model.

    By default the gradient of every local step is clipped, so the guarantee holds for any loss.
    Replacing one row may change all gradients of a round, each by up to 2 G for the clip norm G.
    With noise multiplier z, the noise in the model therefore has standard deviation
    z * 2 G * (sum of learning rates).

    For convex and smooth losses, `smoothness` allows much less noise, without clipping. Local steps
    with learning rate lr <= 2 / smoothness then do not increase the distance between two models.
    Let L bound the norm of the gradient of each example. If only one batch of a round contains a
    row, replacing the row changes the model by at most 2 L lr / batch.

    Args:
        grad: jfl.grad(loss), or a private_grad without noise, which clips the gradient of each
            example.
        mechanism: chain(clip_l2(G), total(), gaussian(z)), which releases the mean gradient of a
            round. G is also the clip norm of each step.
        clip_steps: "all", or "last" for the algorithm as printed, which clips only the last step
            and has no guarantee.
        mu: weight of a proximal term, as in FedProx; None means no such term. The term does not
            read rows, and for lr * mu <= 1 it does not increase the effect of a row.
        smoothness: an upper bound on the largest eigenvalue of the Hessian of every example's loss.
            All these losses must be convex, with gradients of norm at most L. A value requires
            mechanism = chain(bounded(L / (steps * batch), "contraction"), total(), gaussian(z)),
            batch = jfl.batches.epochs(...), a constant lr, a grad without l2, loss and parameters
            in float32, and at least steps * batch rows per client. jfl cannot verify L and
            smoothness, so the guarantee is "conditional". None clips every step.

    Other Parameters:
        lr, steps, batch, server_lr, server_optimizer: as in `fedavg`.

    Privacy:
        The guarantee is for examples under replace_one, and counts one release per participation.
        Sampling of rows lowers epsilon only because a row may be in no batch of a round: the
        release of this round then does not depend on it.

    References:
        Li, Wang, Wu, 2025, Algorithm 1, with noise in the model and clipping at every step. For
        `smoothness`: Wu et al., SIGMOD 2017, Algorithm 1, and Hardt, Recht, Singer, ICML 2016,
        Lemma 3.7.
    """
    mechanism = bind_model_chain(WHERE, mechanism, "clip_l2(G)")
    if getattr(grad, "mechanism", None) is not None and mech.noisy(grad.mechanism):
        checks.fail(
            WHERE,
            "a grad without noise",
            "a noisy private_grad",
            "Noise is added once per round, by `mechanism`.",
        )
    if any(s.declared == "prox_erm" for s in mechanism.stages):
        checks.fail(
            WHERE,
            "a clip",
            'bounded(..., "prox_erm")',
            "Use padpfl(mechanism=...).",
        )
    checks.require_one_of(WHERE, ("all", "last"), clip_steps=clip_steps)
    pull = dict(mu=None) if mu is None else scalars(checks.require_nonnegative, WHERE, mu=mu)
    work = local.work(grad, batch, lr=lr, steps=steps)
    contracts = _contracts(grad, mechanism, lr, batch, mu, smoothness)
    if contracts and clip_steps != "all":
        checks.fail(WHERE, "clip_steps='all' when smoothness is given", f"{clip_steps!r}")
    step = dict(step=local.server_step(server_lr, server_optimizer))
    if contracts:
        client = Fn(_contracting, dict(work=work, mechanism=mechanism))
    else:
        data = dict(pull, work=work, mechanism=mechanism)
        client = Fn(_client, data, dict(clip_steps=clip_steps))
    released = Release(mechanism if clip_steps == "all" else None, batch, 1, steps)
    base = algorithm(
        Fn(_init, step), client, Fn(_server, step), releases=(released,), name="output_perturbation"
    )
    return dataclasses.replace(base, contracts=contracts)


def _contracts(grad, mechanism, lr, batch, mu, smoothness) -> bool:
    """Return whether the noise relies on steps that contract, after checking their conditions."""
    declared = any(s.declared == "contraction" for s in mechanism.stages)
    if declared != (smoothness is not None):
        checks.fail(
            WHERE,
            'bounded(..., "contraction") and smoothness together, or neither',
            f"{mechanism!r}, smoothness={smoothness!r}",
        )
    if not declared:
        return False
    if callable(lr) or not checks.is_concrete((lr, smoothness)):
        checks.fail(
            WHERE,
            "lr and smoothness to be concrete numbers",
            f"lr={checks.short_repr(lr)}, smoothness={checks.short_repr(smoothness)}",
            "Build the algorithm outside jit and vmap: contraction is checked at that point.",
        )
    checks.require_positive(WHERE, single=True, smoothness=smoothness, lr=lr)
    if not float(lr) <= 2 / float(smoothness):
        checks.fail(
            WHERE,
            f"lr <= 2 / smoothness = {2 / float(smoothness):g}",
            f"lr={lr!r}",
            "Lower lr: larger steps do not contract.",
        )
    if batch.scheme != "epochs":
        checks.fail(
            WHERE,
            "batch = jfl.batches.epochs(...) when smoothness is given",
            batch.scheme,
            "A row may be in at most one batch of a round.",
        )
    if (kind := computed_in(grad)) != "float32":
        checks.fail(
            WHERE,
            "a loss computed in float32 when smoothness is given",
            kind,
            f"Rounding to {kind} makes the loss non-smooth.",
        )
    terms = dict(l2=getattr(grad, "l2", None), mechanism=getattr(grad, "mechanism", None), mu=mu)
    if present := [name for name, value in terms.items() if value is not None]:
        checks.fail(
            WHERE,
            "a plain gradient when smoothness is given",
            f"one with {' and '.join(present)}",
            "Add these terms to the loss, and include them in smoothness and the bound.",
        )
    return True
