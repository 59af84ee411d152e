"""Many masked contributions in, one release out: stages, and `chain` that checks their order.

Roles run row -> sum -> noise -> post.  The user gives the noise multiplier z; the chain computes
sigma = z * sensitivity, so that noise for a sum cannot be added to a mean.  Sensitivity of the sum is the bound of
one contribution (add_remove) or twice that (replace_one).

A mechanism works in two halves, so that a cohort can be summed chunk by chunk:
`contribute` (rows and sum) and `finish` (noise and post).  `release` is both at once.
"""
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import check, tree
from ..core import Fn, Mechanism, record, static
from ..kernels.normals import normals

ROLES = ("row", "sum", "noise", "post")
ADJACENCIES = ("add_remove", "replace_one")


@record
class Stage:
    """One step of a chain; which functions it has depends on its role."""
    apply: Fn | None         # row: (state, row) -> row, clipped;  noise: none;  post: (value, size) -> value
    bound: Fn | None = None  # row: (state, bound) -> bound of one contribution
    noise: Any = None        # noise: z or std
    state: Any = None        # row: what it remembers between releases, at the start
    update: Fn | None = None     # row: (state, release) -> state, release
    name: str = static(default="")
    role: str = static(default="row")
    absolute: bool = static(default=False)    # noise is a std, not a multiplier


class Partial(NamedTuple):
    """A sum under way."""
    value: Any           # the masked, weighted sum
    rows: Any            # contributions so far
    clipped: Any         # of them clipped


# --- row stages ---------------------------------------------------------------------------------------------------

def _shrink(bound, row):
    norm = tree.norm(row)
    return tree.scale(jnp.minimum(1.0, bound / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny)), row), norm > bound


def _clip_l2(state, row, *, bound):
    return _shrink(bound, row)


def _its_bound(state, before, *, bound):
    return bound


def clip_l2(bound) -> Stage:
    """Shrink each contribution to Euclidean norm at most `bound`, over all leaves together.

    Units    bound in the units of the contribution, > 0.
    Privacy  one contribution moves the sum by at most `bound` (add_remove) or 2 * bound (replace_one).
    Errors   ValueError unless bound is > 0 and finite (leave the stage out for no clipping).
    Source   Abadi et al., CCS 2016, Algorithm 1.

    >>> m = chain(clip_l2(1.0), total(), adjacency="add_remove")
    >>> release(m, jax.random.key(0), (), jnp.array([[3.0, 4.0]]), jnp.ones(1))[0].tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    check.positive("clip_l2", "Leave the stage out for no clipping.", bound=bound)
    data = dict(bound=check.scalar(bound))
    return Stage(Fn(_clip_l2, data), Fn(_its_bound, data), name="clip_l2")


def _clip_per_layer(state, row, *, bounds):
    leaves, treedef = jax.tree.flatten(row)
    limits = jax.tree.leaves(bounds)
    if len(limits) == 1:
        limits = limits * len(leaves)
    elif len(limits) != len(leaves):
        check.fail("clip_per_layer", f"one bound, or one for each of the {len(leaves)} leaves", f"{len(limits)}")
    pairs = [_shrink(b, x) for b, x in zip(limits, leaves)]
    return treedef.unflatten([x for x, _ in pairs]), jnp.any(jnp.array([c for _, c in pairs]))


def _layers_bound(state, before, *, bounds, layers):
    limits = jnp.stack([jnp.asarray(b, jnp.float32) for b in jax.tree.leaves(bounds)])
    return jnp.sqrt(jnp.sum(jnp.square(limits)) * (layers if limits.size == 1 else 1))


def clip_per_layer(bounds, layers: int | None = None) -> Stage:
    """Shrink each leaf of a contribution on its own.

    Units    bounds: a pytree with one bound > 0 a leaf, or one number for each of `layers` leaves.
    Privacy  the contribution's bound is the root of the sum of the squared bounds.
    Errors   ValueError unless all bounds are > 0, or if one number comes without `layers`.
    Source   McMahan et al., 2018, "A general approach to adding differential privacy".

    >>> m = chain(clip_per_layer((3.0, 4.0)), total(), gaussian(1.0), adjacency="add_remove")
    >>> float(sensitivity(m))
    5.0
    """
    limits = jax.tree.leaves(bounds)
    for b in limits:
        check.positive("clip_per_layer", bound=b)
    if len(limits) == 1:
        if layers is None:
            check.fail("clip_per_layer", "layers=... beside a single bound", f"bounds={bounds!r}",
                       "Say how many leaves the contribution has: each gets that bound.")
        check.whole("clip_per_layer", layers=layers)
    data = dict(bounds=jax.tree.map(check.scalar, bounds))
    return Stage(Fn(_clip_per_layer, data), Fn(_layers_bound, data, dict(layers=layers or len(limits))),
                 name="clip_per_layer")


def _clip_adaptive(state, row, *, indicator, quantile, lr, count):
    clipped, over = _shrink(state, row)
    bit = jnp.where(over, 0.0, 1.0)
    return (clipped, state * indicator * (bit - 0.5)), over


def _adaptive_bound(state, before, *, indicator, quantile, lr, count):
    return state * jnp.sqrt(1 + jnp.square(indicator) / 4)


def _adapt(state, value, *, indicator, quantile, lr, count):
    value, coordinate = value
    below = coordinate / (state * indicator * count) + 0.5
    return state * jnp.exp(-lr * (below - quantile)), value


def clip_adaptive(initial, count, *, quantile=0.5, lr=0.2, indicator=0.1) -> Stage:
    """Clip to a norm that follows a quantile of the contributions' norms, privately, inside the same release.

    Each contribution carries one more coordinate, C * indicator * (bit - 1/2), where the bit says that its norm is
    at most the clip norm C.  One isotropic Gaussian covers both, so the noise multiplier of the chain is exactly the
    joint one: nothing else is to be accounted.  C moves by exp(-lr * (noisy fraction - quantile)).

    Units    initial: C of the first release, > 0; count: the public, expected number of contributions;
             quantile in (0, 1]; indicator: weight of the bit, larger for a less noisy C and a little more noise.
    Privacy  bound C * sqrt(1 + indicator^2 / 4).
    Errors   ValueError outside those ranges; refused inside `private_grad` (a client keeps no clip norm).
    Source   Andrew et al., NeurIPS 2021, with the joint release of one vector.
    """
    check.positive("clip_adaptive", initial=initial, count=count, lr=lr, indicator=indicator)
    check.fraction("clip_adaptive", quantile=quantile)
    data = {k: check.scalar(v) for k, v in dict(indicator=indicator, quantile=quantile, lr=lr, count=count).items()}
    return Stage(Fn(_clip_adaptive, data), Fn(_adaptive_bound, data), state=check.scalar(initial),
                 update=Fn(_adapt, data), name="clip_adaptive")


# --- sum, noise, post ----------------------------------------------------------------------------------------------

def total() -> Stage:
    """Sum the contributions; masked ones add exactly nothing, whatever they hold."""
    return Stage(None, name="total", role="sum")


def gaussian(noise_multiplier=None, *, std=None) -> Stage:
    """Add N(0, sigma^2) to every coordinate, sigma = noise_multiplier * sensitivity of the sum.

    Units    noise_multiplier: dimensionless, > 0; or std: sigma itself, in the units of the sum.
    Errors   ValueError unless exactly one is given and > 0 (leave the stage out for no noise).
    """
    if (noise_multiplier is None) == (std is None):
        check.fail("gaussian", "either noise_multiplier or std", f"noise_multiplier={noise_multiplier!r}, std={std!r}")
    value = std if noise_multiplier is None else noise_multiplier
    check.positive("gaussian", "Leave the stage out for no noise.",
                   **{"std" if noise_multiplier is None else "noise_multiplier": value})
    return Stage(None, noise=check.scalar(value), name="gaussian", role="noise", absolute=std is not None)


def _divide(value, size, *, n):
    return tree.map(lambda x: x / jnp.asarray(n, x.dtype), value)


def _divide_own(value, size):
    return tree.map(lambda x: x / jnp.maximum(jnp.asarray(size, x.dtype), 1), value)


def divide(n) -> Stage:
    """Divide the noisy sum by a public number, or by "size": the client's own number of rows.

    Privacy  post-processing.  A realised count would not be: it is data.  "size" is sound where sizes are public,
             under replace_one of an example, and refused elsewhere.
    Errors   ValueError unless n is > 0 and finite, or "size".
    """
    if isinstance(n, str):
        check.choice("divide", ("size",), n=n)
        return Stage(Fn(_divide_own), name="divide_by_size", role="post")
    check.positive("divide", n=n)
    return Stage(Fn(_divide, dict(n=check.scalar(n))), name="divide", role="post")


# --- chains --------------------------------------------------------------------------------------------------------

def chain(*stages: Stage, adjacency: str | None = None) -> Mechanism:
    """Compose stages left to right into one mechanism.

    `adjacency` may stay open: `plan` binds it from the sampler.  A noisy chain that nobody bound refuses to run.

    Errors   ValueError unless the roles run row -> sum -> noise -> post with exactly one sum, at most one noise, and
             a row stage that bounds what the noise covers.

    >>> chain(gaussian(1.0), clip_l2(1.0), total())
    Traceback (most recent call last):
    ...
    ValueError: chain: need stages in the order row -> sum -> noise -> post with exactly one sum; got \
gaussian[noise] -> clip_l2[row] -> total[sum]. Noise before the sum is added once a row, and a clip after it \
protects nobody.
    """
    for s in stages:
        if not isinstance(s, Stage):
            check.fail("chain", "stages such as clip_l2(1.0), total(), gaussian(1.1), divide(16)", f"{s!r}")
    order = [ROLES.index(s.role) for s in stages]
    got = " -> ".join(f"{s.name}[{s.role}]" for s in stages) or "no stage"
    if order != sorted(order) or order.count(1) != 1:
        check.fail("chain", "stages in the order row -> sum -> noise -> post with exactly one sum", got,
                   "Noise before the sum is added once a row, and a clip after it protects nobody.")
    if order.count(2) > 1:
        check.fail("chain", "at most one noise stage", got, "Two Gaussians are one: add their variances.")
    if 2 in order and order[0] != 0:
        check.fail("chain", "a bound before the noise", got, "Start with clip_l2(...): noise hides only what is bounded.")
    if sum(s.state is not None for s in stages) > 1 or (order.count(0) > 1 and any(s.state is not None for s in stages)):
        check.fail("chain", "an adaptive clip alone among the row stages", got)
    if adjacency is not None:
        check.choice("chain", ADJACENCIES, adjacency=adjacency)
    return Mechanism(tuple(stages), adjacency)


def _of(mechanism, role):
    return [s for s in mechanism.stages if s.role == role]


def noisy(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and bool(_of(mechanism, "noise"))


def clips(mechanism: Mechanism | None) -> bool:
    return mechanism is not None and bool(_of(mechanism, "row"))


def adaptive(mechanism: Mechanism) -> bool:
    """True if the clip norm changes from release to release."""
    return any(s.state is not None for s in mechanism.stages)


def bind(mechanism: Mechanism | None, adjacency: str, where: str, required: bool = False) -> Mechanism | None:
    """The mechanism under `adjacency`; `required` if another one given in the chain would be wrong."""
    if mechanism is None:
        return None
    if mechanism.adjacency is None:
        return Mechanism(mechanism.stages, adjacency)
    if required and mechanism.adjacency != adjacency:
        check.fail(where, f"adjacency {adjacency!r}, which its sampler implies", f"adjacency={mechanism.adjacency!r}",
                   "Leave adjacency out of chain(...), or change the sampler.")
    return mechanism


def initial(mechanism: Mechanism):
    """The state of the first release."""
    states = [s.state for s in mechanism.stages if s.state is not None]
    return jnp.asarray(states[0], jnp.float32) if states else ()


def bound(mechanism: Mechanism, state=None):
    """L2 bound of one contribution of weight 1, in the units of the sum."""
    state = initial(mechanism) if state is None else state
    value = math.inf
    for s in _of(mechanism, "row"):
        value = s.bound(state, value)
    return value


def sensitivity(mechanism: Mechanism, state=None, max_weight=1.0):
    """How far one neighbour moves the sum: bound * max_weight, twice that under replace_one."""
    if mechanism.adjacency is None:
        check.fail("chain", "an adjacency before noise is added", "adjacency=None",
                   "jfl.plan binds it from the samplers; on its own, pass chain(..., adjacency=\"add_remove\").")
    return (2.0 if mechanism.adjacency == "replace_one" else 1.0) * bound(mechanism, state) * max_weight


def multiplier(mechanism: Mechanism | None, max_weight: float = 1.0) -> float | None:
    """The true noise multiplier, std over sensitivity, as the float32 that runs; None without noise."""
    if not noisy(mechanism):
        return None
    stage = _of(mechanism, "noise")[0]
    if not stage.absolute:
        return float(stage.noise)
    if adaptive(mechanism):
        check.fail("gaussian", "noise_multiplier beside an adaptive clip", "std",
                   "The sensitivity changes from round to round, and std does not follow it.")
    return float(stage.noise) / float(sensitivity(mechanism, max_weight=max_weight))


def contribute(mechanism: Mechanism, state, rows, weight) -> Partial:
    """Row stages, weights and the sum.

    Shapes   rows: leaves [n, ...]; weight Float[n], 0 for a slot that holds nothing.
    """
    def one(row):
        clipped = jnp.zeros((), bool)
        for s in _of(mechanism, "row"):
            row, over = s.apply(state, row)
            clipped = clipped | over
        return row, clipped

    rows, clipped = jax.vmap(one)(rows) if clips(mechanism) else (rows, jnp.zeros(weight.shape, bool))
    held = weight != 0

    def weighted(x):
        w = weight.reshape(weight.shape + (1,) * (x.ndim - 1)).astype(x.dtype)
        return jnp.where(w != 0, w * x, jnp.zeros((), x.dtype)).sum(0)

    return Partial(tree.map(weighted, rows), held.sum().astype(jnp.float32), (clipped & held).sum().astype(jnp.float32))


def finish(mechanism: Mechanism, key, state, value, *, max_weight=1.0, size=None):
    """Noise and post-processing of a finished sum -> release, new state."""
    for s in _of(mechanism, "noise"):
        sigma = s.noise if s.absolute else s.noise * sensitivity(mechanism, state, max_weight)
        value = tree.map(lambda x, n: x + (jnp.asarray(sigma, jnp.float32) * n).astype(x.dtype), value,
                         normals(key, value))
    for s in mechanism.stages:
        if s.update is not None:
            state, value = s.update(state, value)
    for s in _of(mechanism, "post"):
        value = s.apply(value, size)
    return value, state


def release(mechanism: Mechanism, key, state, rows, weight, **options):
    """`contribute` and `finish` at once -> release, new state."""
    return finish(mechanism, key, state, contribute(mechanism, state, rows, weight).value, **options)


def denominator(mechanism: Mechanism) -> float | None:
    """The product of the public divisors, or None if there are none or they are not known now."""
    values = [s.apply.data["n"] for s in _of(mechanism, "post") if s.name == "divide"]
    if not values or not check.concrete(values):
        return None
    return float(np.prod([np.asarray(v) for v in values]))
