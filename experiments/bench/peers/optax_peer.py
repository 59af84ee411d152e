"""A plain Python loop over clients in JAX, one jitted DP-SGD step; optax or jax_privacy clips each
gradient.

    python optax_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode optax

Mode `optax`: jax.vmap(jax.grad) gives the gradients, optax.contrib.differentially_private_aggregate
clips, sums, adds noise and averages.  Mode `jax_privacy`: its clipped_grad, an example at a time,
and its privatizer (of the identity matrix: independent noise) adds noise.  The step takes the rows'
numbers and gathers the batch from device arrays.  Neither library has a federated layer: the
cohort, the loop and the average of the models are written here. W1 and W2 only.
"""

import numpy as np
import workloads

try:
    import jax
    import jax.numpy as jnp
    import optax
    import optax.contrib

    MISSING = None
except ImportError as error:
    MISSING = error


def network(key, hidden):
    """Weights and biases of a dense network 784-...-10."""
    sizes = (784, *hidden, 10)
    return [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b))
        for k, a, b in zip(jax.random.split(key, len(sizes)), sizes, sizes[1:])
    ]


def loss(params, x, y):
    """Mean cross-entropy; works on one example and on a batch."""
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b, y).mean()


def optax_step(spec):
    grads = jax.vmap(jax.grad(loss), (None, 0, 0))
    private = optax.contrib.differentially_private_aggregate(
        spec.clip, spec.noise, key=jax.random.key(1)
    )
    chain = optax.chain(private, optax.sgd(spec.lr))

    def step(params, state, x, y):
        updates, state = chain.update(grads(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return chain.init, step


def jax_privacy_step(spec):
    try:
        from jax_privacy.clipping import clipped_grad
        from jax_privacy.matrix_factorization.streaming_matrix import identity
        from jax_privacy.noise_addition import matrix_factorization_privatizer
    except ImportError as error:
        raise workloads.Unsupported(f"{error}; pip install jax_privacy==2.0.0") from error
    grads = clipped_grad(
        loss,
        l2_clip_norm=spec.clip,
        normalize_by=spec.batch,
        batch_argnums=(1, 2),
        microbatch_size=1,
    )  # one by one: on a CPU far faster than by vmap
    noise = matrix_factorization_privatizer(
        identity(), stddev=spec.noise * spec.clip / spec.batch, prng_key=jax.random.key(1)
    )

    def step(params, state, x, y):
        noisy, state = noise.update(grads(params, x, y), state)
        return jax.tree.map(lambda p, g: p - spec.lr * g, params, noisy), state

    return noise.init, step


def build(spec, data, mode):
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)
    data.x = data.y = None  # the copy on the device is the only one
    init, plain = dict(optax=optax_step, jax_privacy=jax_privacy_step)[mode](spec)
    step = jax.jit(
        lambda p, state, x, y, client, rows: plain(p, state, x[client, rows], y[client, rows])
    )
    average = jax.jit(
        lambda models: jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *models)
    )
    params = network(jax.random.key(0), spec.hidden)
    now = dict(params=params, noise=init(params))
    rng = np.random.default_rng(0)

    def run(rounds, tick):
        for _ in range(rounds):
            models = []
            for client in rng.choice(spec.clients, spec.cohort, replace=False):
                model = now["params"]
                for _ in range(spec.steps):
                    rows = rng.choice(spec.rows, spec.batch, replace=False)
                    model, now["noise"] = step(model, now["noise"], x, y, client, rows)
                models.append(model)
            now["params"] = average(models)
            tick(lambda: jax.block_until_ready(now["params"]))

    return run, lambda: [np.asarray(leaf) for leaf in jax.tree.leaves(now["params"])]


if __name__ == "__main__":
    workloads.main(
        "optax loop",
        build,
        dict(record=("optax", "jax_privacy")),
        ("jax", "jaxlib", "optax", "jax_privacy", "numpy"),
        "pip install jax optax jax_privacy==2.0.0",
        MISSING,
    )
