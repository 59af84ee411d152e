"""The program that a JAX user writes in an afternoon: no library, everything mapped and compiled.

    python vmapped_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode private

`vmap` over the clients of a cohort, `vmap(grad)` over the rows of a batch, `scan` over local steps,
noise from JAX's default generator leaf by leaf, and a block of rounds in one jitted program.  Rows
are shuffled once for each pass over a client's data.  Mode `plain` neither clips nor adds noise.
"""

import math

import numpy as np
import workloads

try:
    import jax
    import jax.numpy as jnp
    from jax_models import forward, init, losses

    MISSING = None
except ImportError as error:
    MISSING = error


def mean_loss(spec, params, x, y):
    return losses(forward(spec, params, x), y).mean()


def add_noise(key, tree, std):
    """Add Gaussian noise to every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    noisy = [x + std * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
    return jax.tree.unflatten(treedef, noisy)


def clip_factors(tree, clip):
    """Return min(1, clip / norm) of each entry along the first axis."""
    squares = lambda x: jnp.sum(x.reshape(len(x), -1) ** 2, 1)
    return jnp.minimum(1, clip / jnp.sqrt(sum(map(squares, jax.tree.leaves(tree)))))


def private_gradient(spec, key, params, x, y):
    """Return the gradient of DP-SGD: clipped for each row, summed, with noise, divided."""
    each = jax.vmap(jax.grad(lambda p, x, y: mean_loss(spec, p, x[None], y[None])), (None, 0, 0))
    grads = each(params, x, y)
    factor = clip_factors(grads, spec.clip)
    total = jax.tree.map(lambda g: jnp.tensordot(factor, g, 1), grads)
    noisy = add_noise(key, total, spec.noise * spec.clip)
    return jax.tree.map(lambda g: g / spec.batch, noisy)


def round_of(spec, x, y, private):
    """Return a function (key, params) -> params that plays one round."""
    passes = math.ceil(spec.steps * spec.batch / spec.rows)

    def train(key, params, client):
        order, noise = jax.random.split(key)
        shuffles = jax.vmap(lambda k: jax.random.permutation(k, spec.rows))
        rows = shuffles(jax.random.split(order, passes)).reshape(-1)
        rows = rows[: spec.steps * spec.batch].reshape(spec.steps, spec.batch)

        def step(params, given):
            key, batch = given
            bx, by = x[client, batch], y[client, batch]
            if private and spec.level == "record":
                grad = private_gradient(spec, key, params, bx, by)
            else:
                grad = jax.grad(lambda p: mean_loss(spec, p, bx, by))(params)
            return jax.tree.map(lambda p, g: p - spec.lr * g, params, grad), None

        return jax.lax.scan(step, params, (jax.random.split(noise, spec.steps), rows))[0]

    def play(key, params):
        choose, local, noise = jax.random.split(key, 3)
        cohort = jax.random.permutation(choose, spec.clients)[: spec.cohort]
        keys = jax.random.split(local, spec.cohort)
        models = jax.vmap(train, (0, None, 0))(keys, params, cohort)
        if spec.level == "record" or not private:
            return jax.tree.map(lambda m: m.mean(0), models)
        updates = jax.tree.map(lambda m, p: m - p, models, params)
        factor = clip_factors(updates, spec.clip)
        total = jax.tree.map(lambda u: jnp.tensordot(factor, u, 1), updates)
        noisy = add_noise(noise, total, spec.noise * spec.clip)
        return jax.tree.map(lambda p, u: p + u / spec.cohort, params, noisy)

    return play


def build(spec, data, mode):
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    if spec.level == "client":
        x = x.reshape(*x.shape[:2], *spec.image)
    data.x = data.y = None  # the copy on the device is the only one
    now = dict(key=jax.random.key(0), params=init(jax.random.key(1), spec))

    # The rows are arguments: as constants of the program they would be compiled into it.
    @jax.jit
    def block(key, params, x, y, rounds):
        play = round_of(spec, x, y, mode == "private")

        def one(_, state):
            key, params = state
            key, now = jax.random.split(key)
            return key, play(now, params)

        return jax.lax.fori_loop(0, rounds, one, (key, params))

    def run(rounds, tick):
        for count in [1] + [spec.block] * ((rounds - 1) // spec.block):
            now["key"], now["params"] = block(now["key"], now["params"], x, y, count)
            for _ in range(count):
                tick(lambda: jax.block_until_ready(now["params"]))

    return run, lambda: [np.asarray(leaf) for leaf in jax.tree.leaves(now["params"])]


if __name__ == "__main__":
    workloads.main(
        "vmapped JAX",
        build,
        dict(record=("private", "plain"), client=("private", "plain")),
        ("jax", "jaxlib", "numpy"),
        "pip install jax",
        MISSING,
        workloads.NOTES,
    )
