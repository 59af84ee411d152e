"""FedPer and FedRep: one part of the model is shared, and the other stays with each client.

References:
    Arivazhagan et al., "Federated learning with personalization layers", arXiv:1912.00818. Collins
    et al., "Exploiting shared representations for personalized federated learning", ICML 2021.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Annotated

import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import variant
from .fedavg import fedavg


@dataclasses.dataclass(frozen=True)
class Shared:
    """A function of the path of a parameter that returns whether the parameter is shared."""

    which: str | tuple[str, ...] | Callable

    def __call__(self, path: str) -> bool:
        if callable(self.which):
            return bool(self.which(path))
        patterns = (self.which,) if isinstance(self.which, str) else self.which
        return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)


def _split(params, shared):
    """Return the shared and the personal arrays, each as a dict by path."""
    leaves = pytrees.by_path(params)
    shared_leaves = {path: leaf for path, leaf in leaves.items() if shared(path)}
    if not 0 < len(shared_leaves) < len(leaves):
        checks.fail(
            "fedrep",
            "a shared and a personal part",
            f"shared={shared.which!r}, which matches "
            f"{'all' if shared_leaves else 'none'} of {', '.join(list(leaves)[:12])}",
        )
    return shared_leaves, {path: leaf for path, leaf in leaves.items() if path not in shared_leaves}


def _replace(params, leaves):
    """Return `params` with some of its arrays replaced."""
    return pytrees.map_by_path(lambda path, leaf: leaves.get(path, leaf), params)


@named("fedrep.init")
def _init(params, *, step, shared):
    return step.init(params), _split(params, shared)[1]


@named("fedrep.client")
def _client(context, keys, server, client_state, rows, *, work, shared, personal_steps):
    start = _replace(server.params, client_state)

    def mask(gradient, params, step):
        # First only the personal part moves, then only the shared part.
        if personal_steps is None:
            return gradient
        is_personal = step < personal_steps
        keep = lambda path, g: jnp.where(is_personal != shared(path), g, jnp.zeros((), g.dtype))
        return pytrees.map_by_path(keep, gradient)

    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, mask)
    new_shared, new_personal = _split(trained, shared)
    old_shared, _ = _split(start, shared)
    return pytrees.sub(new_shared, old_shared), new_personal, diagnostics


@named("fedrep.server")
def _server(context, server, diff, *, step):
    return step(context, server, _replace(pytrees.zeros_like(server.params), diff))


@named("fedrep.personal")
def _personal(server, client_state):
    return _replace(server.params, client_state)


@extends(fedavg, without=["optimizer"])
def fedper(
    grad: Grad,
    *,
    shared: Annotated[str | Sequence[str] | Callable, PYTHON_ONLY] = "*kernel",
    **fedavg_options,
) -> Algorithm:
    """Return FedPer: FedAvg of one part of the model, while each client keeps the rest.

    The part that a client keeps is its personal part, for example the last layer. The shared part
    together with a client's personal part is evaluated on that client's test rows
    (`metrics.client_accuracy`). `out.run.client_states` contains the personal parts, as a dict
    from the path of each parameter.
    `out.params` contains the shared part and the initial values of the personal part.

    Args:
        grad: gradient of the loss of the whole model, as in `fedavg`.
        shared: shell patterns for the paths of the shared part, such as `"body/*"` or
            `("Dense_0/*", "*/bias")`; or a function from a path to a bool. By default kernels are
            shared, and all other parameters (biases, scales) are personal.

    Privacy:
        Both parts are trained with the same noisy gradients, so the guarantee for examples also
        covers a published personal part.

    References:
        Arivazhagan et al., arXiv:1912.00818.

    Example:
        >>> import jfl
        >>> fedper(jfl.grad(lambda w, x, y: (x @ w["body"] - y) ** 2), shared="body").name
        'fedper'
    """
    return _with_personal_part("fedper", grad, shared, None, fedavg_options)


@extends(fedavg, without=["optimizer"])
def fedrep(
    grad: Grad,
    *,
    shared: Annotated[str | Sequence[str] | Callable, PYTHON_ONLY] = "*kernel",
    personal_steps: Annotated[int | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """Return FedRep, which is `fedper` but trains first the personal and then the shared part.

    Args:
        grad: as in `fedper`.
        shared: as in `fedper`.
        personal_steps: the number of local steps that train the personal part. None means half of
            all local steps.

    Privacy:
        As in `fedper`. The guarantee counts `steps` noisy gradients per participation.

    References:
        Collins et al., ICML 2021, Algorithm 1.

    Example:
        >>> import jfl
        >>> grad = jfl.grad(lambda w, x, y: (x @ w["body"] - y) ** 2)
        >>> fedrep(grad, shared="body", steps=8, personal_steps=6).name
        'fedrep'
    """
    steps = fedavg(grad, **fedavg_options).client.data["work"].steps
    if personal_steps is None:
        personal_steps = (steps + 1) // 2
    checks.require_integer("fedrep", min_value=0, max_value=steps, personal_steps=personal_steps)
    return _with_personal_part("fedrep", grad, shared, personal_steps, fedavg_options)


def _with_personal_part(name, grad, shared, personal_steps, fedavg_options) -> Algorithm:
    """Return `fedper` if `personal_steps` is None, and otherwise `fedrep`."""
    if not (callable(shared) or isinstance(shared, str | list | tuple)):
        checks.fail(name, "shared, patterns of paths or a function", checks.short_repr(shared))
    shared = tuple(shared) if isinstance(shared, list) else shared
    facts = dict(shared=Shared(shared))
    return variant(
        fedavg(grad, **fedavg_options),
        name,
        init=Fn(_init, static=facts),
        client=Fn(_client, static=dict(facts, personal_steps=personal_steps)),
        server=Fn(_server),
        stateful=True,
        personal=Fn(_personal),
        personal_releases=(),  # personal models use the gradients of `releases`
    )
