"""FedAvg with noise once a round, on the client's model (DP-FedAvg of Li, Wang, Wu, Mathematics
13(3), 2025)."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
import optax

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, readable
from ..core.records import Algorithm, Batches, Fn, Mechanism, Release, named
from ..gradients.per_example import Grad, computed_in
from ..privacy.mechanisms import chain as mech
from ..sampling.batches import without_replacement
from .base import Number, Optimizer, Rate, algorithm, traits


@named("output_perturbation.init")
def _init(params, *, step):
    return step.init(params), ()


@named("output_perturbation.client")
def _client(context, keys, server, client_state, rows, *, work, mechanism, mu, clip_steps):
    chain = mech.at_round(mechanism, context.round)
    limit = mech.bound(chain)

    def clip(g, w, s):
        factor = jnp.minimum(1.0, limit / jnp.maximum(pytrees.norm(g), jnp.finfo(jnp.float32).tiny))
        g = pytrees.scale(
            factor if clip_steps == "all" else jnp.where(s == work.steps - 1, factor, 1.0), g
        )
        return g if mu is None else pytrees.axpy(mu, pytrees.sub(w, server.params), g)

    trained, _, rates, diagnostics = local.train(
        work, context, keys, server.params, rows, clip, drop=True
    )
    # minus the mean of clipped gradients, weighted by learning rates: at most `limit` long,
    # whatever the rows (with a pull of lr * mu > 1 it may be longer, and the chain's clip sees to
    # it)
    mean = pytrees.scale(1 / rates, pytrees.sub(trained, server.params))
    if clip_steps == "all":
        return _released(chain, context, keys, mean, rates, client_state, diagnostics)
    mean, _ = mech.release_sum(
        chain, keys.noise, (), mean, realised=context.size, client=context.client
    )
    return pytrees.scale(rates, mean), client_state, diagnostics


@named("output_perturbation.contracting")
def _contracting(context, keys, server, client_state, rows, *, work, mechanism):
    """No step is clipped, since a step that is clipped does not contract: two means that differ in
    a row are at most twice the declared bound apart."""
    chain = mech.at_round(mechanism, context.round)
    trained, _, rates, diagnostics = local.train(
        work, context, keys, server.params, rows, drop=True
    )
    mean = pytrees.scale(1 / rates, pytrees.sub(trained, server.params))
    return _released(chain, context, keys, mean, rates, client_state, diagnostics)


def _released(chain, context, keys, mean, rates, client_state, diagnostics):
    """The mean with noise, in units of the model."""
    form = pytrees.dtypes_of(mean)
    mean, lost = mech.release_one(
        chain, keys.noise, mean, realised=context.size, client=context.client
    )
    return (
        pytrees.cast(pytrees.scale(rates, mean), form),
        client_state,
        diagnostics._replace(nonfinite=diagnostics.nonfinite + lost),
    )


@named("output_perturbation.server")
def _server(context, server, diff, *, step):
    return step(context, server, diff)


@readable
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
    """FedAvg whose clients clip every minibatch gradient and add noise once, to the model they
    upload.

    Args:
        grad: jfl.grad(loss), or a private_grad without noise for gradients clipped example by
            example.
        mechanism: chain(clip_l2(G), total(), gaussian(z)), for the mean gradient of a round.  Its
            clip norm also clips each step.  A change of one row may change all gradients of the
            round, by 2 G each; so noise of z * 2 G * (sum of learning rates) in the model covers
            every such change.
        clip_steps: "all"; "last" is the algorithm as printed, which clips the last step only and
            proves nothing.
        mu: pull to the server's model, as in FedProx; it reads no row, and with lr * mu <= 1 it
            only shortens.
        smoothness: where the loss of every example is convex, at most this smooth (the largest
            eigenvalue of its Hessian) and at most L steep (the length of its gradient), noise for a
            far smaller change: steps with lr <= 2 / smoothness do not drive models apart, so a row
            that one batch of a round uses moves the model by 2 L lr / batch.  No step is clipped.
            It takes mechanism = chain(bounded(L / (steps * batch), "contraction"), total(),
            gaussian(z)), batch = jfl.batches.epochs(...), a constant lr, a grad without l2, a loss
            and parameters in float32, and in each client steps * batch rows.  jfl cannot see
            whether L and smoothness hold, so the guarantee is "conditional".  None: every step is
            clipped, which holds for any loss.

    Other Parameters:
        lr, steps, batch, server_lr, server_optimizer: as in `fedavg`.

    Privacy:
        one release a participation, of an example under replace_one; a row that no batch of the
        round drew is not in it, which is the only gain from sampling.

    References:
        Li, Wang, Wu, 2025, Algorithm 1, with noise in the model and clipping at every step.
        Wu et al., SIGMOD 2017, Algorithm 1, and Hardt, Recht, Singer, ICML 2016, Lemma 3.7, for
        `smoothness`.
    """
    if (
        not isinstance(mechanism, Mechanism)
        or not mech.has_clip(mechanism)
        or mech.remembers(mechanism)
    ):
        checks.fail(
            "output_perturbation",
            "mechanism = chain(clip_l2(G), total(), gaussian(z))",
            f"{mechanism!r}",
        )
    if getattr(grad, "mechanism", None) is not None and mech.noisy(grad.mechanism):
        checks.fail(
            "output_perturbation",
            "a grad without noise",
            "a noisy private_grad",
            "Noise is added once a round, by `mechanism`.",
        )
    if any(s.declared == "prox_erm" for s in mechanism.stages):
        checks.fail(
            "output_perturbation",
            "a clip",
            'bounded(..., "prox_erm")',
            "Use padpfl(mechanism=...).",
        )
    mechanism = mech.bind(mechanism, "replace_one", "output_perturbation", required=True, also=())
    checks.require_one_of("output_perturbation", ("all", "last"), clip_steps=clip_steps)
    if mu is not None:
        checks.require_nonnegative("output_perturbation", single=True, mu=mu)
    work = local.work(grad, batch, lr=lr, steps=steps)
    contracts = _contracts(grad, mechanism, lr, batch, mu, smoothness)
    if contracts and clip_steps != "all":
        checks.fail("output_perturbation", "no clip_steps beside smoothness", f"{clip_steps!r}")
    step = dict(step=local.server_step(server_lr, server_optimizer))
    if contracts:
        client = Fn(_contracting, dict(work=work, mechanism=mechanism))
    else:
        client = Fn(
            _client,
            dict(work=work, mechanism=mechanism, mu=None if mu is None else checks.as_scalar(mu)),
            dict(clip_steps=clip_steps),
        )
    released = Release(mechanism if clip_steps == "all" else None, batch, 1, steps)
    made = algorithm(
        Fn(_init, step), client, Fn(_server, step), releases=(released,), name="output_perturbation"
    )
    return dataclasses.replace(made, contracts=contracts)


def _contracts(grad, mechanism, lr, batch, mu, smoothness) -> bool:
    """Whether the noise is for steps that contract; if so, they are such as do on convex losses."""
    declared = any(s.declared == "contraction" for s in mechanism.stages)
    if declared != (smoothness is not None):
        checks.fail(
            "output_perturbation",
            'bounded(..., "contraction") and smoothness together, or neither',
            f"{mechanism!r}, smoothness={smoothness!r}",
        )
    if not declared:
        return False
    if callable(lr) or not checks.is_concrete((lr, smoothness)):
        checks.fail(
            "output_perturbation",
            "a learning rate and a smoothness that are numbers, and known now",
            f"lr={checks.short_repr(lr)}, smoothness={checks.short_repr(smoothness)}",
            "Whether steps contract is checked where the algorithm is made.",
        )
    checks.require_positive("output_perturbation", single=True, smoothness=smoothness, lr=lr)
    if not float(lr) <= 2 / float(smoothness):
        checks.fail(
            "output_perturbation",
            f"a learning rate of at most 2 / smoothness, {2 / float(smoothness):g}",
            f"lr={lr!r}",
            "Larger steps drive models apart.",
        )
    if batch.scheme != "epochs":
        checks.fail(
            "output_perturbation",
            "batch = jfl.batches.epochs(...) beside smoothness",
            batch.scheme,
            "A row may be in one batch of a round at most.",
        )
    if (kind := computed_in(grad)) != "float32":
        checks.fail(
            "output_perturbation",
            "a loss that is computed in float32 beside smoothness",
            kind,
            "One that is rounded is not smooth.",
        )
    changed = {"l2": getattr(grad, "l2", None), "mechanism": getattr(grad, "mechanism", None)}
    if given := [name for name, value in (changed | {"mu": mu}).items() if value is not None]:
        checks.fail(
            "output_perturbation",
            "the gradient of the loss alone beside smoothness",
            f"one with {' and '.join(given)}",
            "Put l2 or a pull into the loss, and what it adds into smoothness and the bound.",
        )
    return True
