"""Tiny problems: a federation by hand, a linear model, private gradients, an algorithm by name."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

import jfl
from jfl.core.records import Federation

SIZES = (3, 5, 8, 4, 6, 9, 5)


CLIENTS, FEATURES = len(SIZES), 3


JUNK = 4  # rows that nobody owns, row 0 among them: padding points there


def make_federation(seed=0, sizes=SIZES, classes=0, pad=0, junk=None, held_out=0, tests=6):
    """A federation built by hand: rows in a random order, an index for each client, `pad` more
    columns than needed.

    `junk` fills the rows that nobody owns.
    """
    r = np.random.default_rng(seed)
    n = sum(sizes) + JUNK
    x = r.normal(size=(n, FEATURES)).astype(np.float32)
    y = (
        r.integers(0, classes, n).astype(np.int32)
        if classes
        else r.normal(size=n).astype(np.float32)
    )
    owned = 1 + r.permutation(n - 1)[: sum(sizes)]
    if junk is not None:
        free = np.setdiff1d(np.arange(n), owned)
        x[free] = junk
        if not classes:
            y[free] = junk
    index, begin = np.zeros((len(sizes), max(sizes) + pad), np.int32), 0
    for c, size in enumerate(sizes):
        index[c, :size] = owned[begin : begin + size]
        begin += size
    test = index[:, :held_out]
    x_test = r.normal(size=(tests, FEATURES)).astype(np.float32)
    y_test = (
        r.integers(0, classes, tests).astype(np.int32)
        if classes
        else r.normal(size=tests).astype(np.float32)
    )
    arrays = (
        x,
        y,
        index,
        np.array(sizes, np.int32),
        x_test,
        y_test,
        test,
        np.full(len(sizes), held_out, np.int32),
    )
    return Federation(*map(jnp.asarray, arrays), classes=classes)


def rows_of_client(fed, client):
    """Return the x and y of a client in float64."""
    index = np.asarray(fed.index)[client, : int(fed.size[client])]
    return np.asarray(fed.x, np.float64)[index], np.asarray(fed.y, np.float64)[index]


def design_matrices(fed):
    """Yield each client's rows, with a column for the bias in front, as the leaves {b, w} stand."""
    for client in range(len(fed.size)):
        x, y = rows_of_client(fed, client)
        yield np.concatenate([np.ones((len(x), 1)), x], 1), y


def squared(params, x, y):
    """Linear regression: two leaves, so that noise and clipping over several leaves are seen."""
    return 0.5 * (x @ params["w"] + params["b"] - y) ** 2


def start_params():
    return {"b": jnp.float32(0.2), "w": jnp.array([0.5, -0.3, 0.1], jnp.float32)}


def flat(tree) -> np.ndarray:
    """All leaves of a pytree as one float64 vector, in tree order."""
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def raw(tree):
    """Leaves as NumPy arrays; keys as their data."""
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


def same_bits(a, b):
    a, b = raw(a), raw(b)
    return len(a) == len(b) and all(u.tobytes() == v.tobytes() for u, v in zip(a, b))


def close(a, b, rtol=2e-5, atol=2e-6):
    a, b = raw(a), raw(b)
    assert len(a) == len(b)
    for u, v in zip(a, b):
        np.testing.assert_allclose(u, v, rtol=rtol, atol=atol)


def noisy_grad(divisor=3.0, z=1.1, bound=0.8, **options):
    return jfl.private_grad(
        squared,
        jfl.chain(jfl.clip_l2(bound), jfl.total(), jfl.gaussian(z), jfl.divide(divisor)),
        **options,
    )


def noisy_release(divisor=3.0, z=0.7, bound=0.5, **options):
    return jfl.chain(
        jfl.clip_l2(bound), jfl.total(), jfl.gaussian(z), jfl.divide(divisor), **options
    )


def make_algorithm(name, grad, steps=2, batch=None, **options):
    """An algorithm by name; one without a `steps` argument takes one step."""
    factory = getattr(jfl.algorithms, name)
    if "steps" in inspect.signature(factory).parameters:
        options["steps"] = steps
    if name == "padpfl":  # a mean of models needs all of them
        options["upload"] = "difference"
    if name in ("fedper", "fedrep"):  # of `start_params`
        options.setdefault("shared", ("w", "*kernel"))
    if name == "qfedavg" and getattr(grad, "mechanism", None) is not None:
        options.setdefault("loss_mechanism", grad.mechanism)
    if name == "output_perturbation":  # its noise comes after the steps
        own = getattr(grad, "mechanism", None)
        options["mechanism"] = own or jfl.chain(jfl.clip_l2(0.8), jfl.total())
        grad = grad if own is None else jfl.grad(grad.loss, l2=grad.l2)
    return factory(grad, batch=batch or jfl.batches.without_replacement(3), **options)


def on_host(fed, path=None):
    """The same federation with its rows on the host, memory-mapped if a path is given."""
    x, y, index, size = (np.asarray(v) for v in (fed.x, fed.y, fed.index, fed.size))
    if path is not None:
        np.save(path, x)
        x = np.load(path, mmap_mode="r")
    order = np.concatenate([index[c, :n] for c, n in enumerate(size)])
    return jfl.population(
        (x, y),
        size,
        order=order,
        test=(np.asarray(fed.x_test), np.asarray(fed.y_test)),
        classes=fed.classes,
    )


def noisy_plan(name, fed, task, *, lr=0.1, z=0.7, sampler=None, batch=None, **options):
    """A plan with noise at both ends and Poisson cohorts: everything that could go wrong is in
    it."""
    algorithm = make_algorithm(name, noisy_grad(), lr=lr, batch=batch)
    sampler = sampler or jfl.sampling.poisson(CLIENTS, 0.4, capacity=CLIENTS)
    return jfl.plan(fed, task, algorithm, sampler, release=noisy_release(z=z), **options)
