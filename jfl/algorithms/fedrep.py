"""FedRep (Collins et al., ICML 2021) and FedPer (Arivazhagan et al., 2019): a part of the model is
shared, the rest stays with each client."""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Annotated

import jax.numpy as jnp

from .. import local
from ..core import checks, pytrees
from ..core.options import PYTHON_ONLY, extends
from ..core.records import Algorithm, Fn, named
from ..gradients.per_example import Grad
from .base import algorithm
from .fedavg import fedavg


class Shared:
    """Which paths of a model are shared: patterns as of the shell, or a function."""

    def __init__(self, which):
        self.which = which if callable(which) or isinstance(which, str) else tuple(which)

    def __call__(self, path: str) -> bool:
        if callable(self.which):
            return bool(self.which(path))
        patterns = (self.which,) if isinstance(self.which, str) else self.which
        return any(fnmatch.fnmatch(path, pattern) for pattern in patterns)

    def __eq__(self, other):
        return isinstance(other, Shared) and self.which == other.which

    def __hash__(self):
        return hash(self.which)


def _parts(params, shared):
    """Shared and personal leaves, by path."""
    leaves = pytrees.by_path(params)
    if all(map(shared, leaves)) or not any(map(shared, leaves)):
        checks.fail(
            "fedrep",
            "a shared and a personal part",
            f"shared={shared.which!r}, which fits "
            f"{'all' if any(map(shared, leaves)) else 'none'} of {', '.join(list(leaves)[:12])}",
        )
    pick = lambda own: {path: leaf for path, leaf in leaves.items() if shared(path) != own}
    return pick(False), pick(True)


def _with(params, leaves):
    """`params` with these leaves in their places."""
    return pytrees.map_by_path(lambda path, leaf: leaves.get(path, leaf), params)


@named("fedrep.init")
def _init(params, *, step, shared):
    return step.init(params), _parts(params, shared)[1]


@named("fedrep.client")
def _client(context, keys, server, client_state, rows, *, work, shared, personal_steps):
    start = _with(server.params, client_state)

    def turns(g, w, s):
        """First the personal part alone, then the shared one."""
        if personal_steps is None:
            return g
        of_own = s < personal_steps
        kept = lambda path, x: jnp.where(of_own != shared(path), x, jnp.zeros((), x.dtype))
        return pytrees.map_by_path(kept, g)

    trained, _, _, diagnostics = local.train(work, context, keys, start, rows, turns)
    moved, own = _parts(trained, shared)
    before, _ = _parts(start, shared)
    return pytrees.sub(moved, before), own, diagnostics


@named("fedrep.server")
def _server(context, server, diff, *, step):
    return step(context, server, _with(pytrees.zeros_like(server.params), diff))


@named("fedrep.personal")
def _personal(server, own):
    return _with(server.params, own)


@extends(fedavg, without=["optimizer"])
def fedper(
    grad: Grad,
    *,
    shared: Annotated[str | Sequence[str] | Callable, PYTHON_ONLY] = "*kernel",
    **fedavg_options,
) -> Algorithm:
    """FedAvg of a part of the model: the other part, a head say, stays with each client.

    Clients are judged by the shared part and their own (`metrics.client_accuracy`);
    `run.client_states` has the personal parts, by path.  The model of `out.params` has the personal
    part that every client started from.

    Args:
        grad: gradients of the loss of the whole model, as in `fedavg`.
        shared: patterns of paths to the shared part, such as `"body/*"` or `("Dense_0/*",
            "*/bias")`, as of the shell; or a function path -> bool.  By default kernels are shared,
            and what else there is (biases, scales) is personal.

    Privacy:
        both parts follow the same noisy gradients, so a personal part that is handed on is covered
        by the guarantee for examples.

    References:
        Arivazhagan et al., arXiv:1912.00818.

    Example:
        >>> import jfl
        >>> fedper(jfl.grad(lambda w, x, y: (x @ w["body"] - y) ** 2), shared="body").name
        'fedper'
    """
    return _made("fedper", grad, shared, None, fedavg_options)


@extends(fedavg, without=["optimizer"])
def fedrep(
    grad: Grad,
    *,
    shared: Annotated[str | Sequence[str] | Callable, PYTHON_ONLY] = "*kernel",
    personal_steps: Annotated[int | None, PYTHON_ONLY] = None,
    **fedavg_options,
) -> Algorithm:
    """As `fedper`, but local steps move first the personal part alone, then the shared one.

    Args:
        grad: as in `fedper`.
        shared: as in `fedper`.
        personal_steps: of the `steps`, the first ones, which move the personal part; None: half.

    Privacy:
        as in `fedper`; all `steps` noisy gradients are charged.

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
    return _made("fedrep", grad, shared, personal_steps, fedavg_options)


def _made(name, grad, shared, personal_steps, fedavg_options) -> Algorithm:
    if not (callable(shared) or isinstance(shared, str | list | tuple)):
        checks.fail(name, "shared, patterns of paths or a function", checks.short_repr(shared))
    base = fedavg(grad, **fedavg_options)
    facts = dict(shared=Shared(shared))
    return algorithm(
        Fn(_init, base.server.data, facts),
        Fn(_client, base.client.data, dict(facts, personal_steps=personal_steps)),
        Fn(_server, base.server.data),
        releases=base.releases,
        name=name,
        stateful=True,
        personal=_personal,
        personal_releases=(),  # personal models use the gradients of `releases`
    )
