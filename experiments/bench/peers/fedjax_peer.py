"""FedJAX: its client sampler, batches, for_each_client and federated averaging; DP, which it lacks,
is given to it.

    python fedjax_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode jit

Mode `jit`: FedJAX's default backend; in W1 and W2 its grad_fn is vmap(grad), clipped, with noise
shaped like the leaves.  Mode `control` (W1, W2): the same backend with a hand-written book-keeping
gradient (norms from activations and back-propagated errors, one pass) and one flat vector of noise,
so that a table can tell what the algorithm gains from what the structure gains.  W3 and W5 clip
each client's update and add noise to the sum.  Needs jax 0.5: FedJAX 0.0.17 installs with later
ones, but fails there.
"""

import numpy as np
import workloads

try:
    import fedjax
    import jax
    import jax.numpy as jnp
    from fedjax.algorithms import fed_avg
    from jax.flatten_util import ravel_pytree
    from jax_models import forward, init, losses

    MISSING = None
except ImportError as error:
    MISSING = error


def vmapped(spec):
    """grad_fn(params, batch, key) of DP-SGD: vmap(grad), clip, sum, noise leaf by leaf, mean."""

    def loss(params, x, y):
        return losses(forward(spec, params, x[None]), y[None])[0]

    def grad_fn(params, batch, key):
        grads, tree = jax.tree.flatten(
            jax.vmap(jax.grad(loss), (None, 0, 0))(params, batch["x"], batch["y"])
        )
        norms = jnp.sqrt(sum(jnp.sum(g.reshape(len(g), -1) ** 2, 1) for g in grads))
        scale = jnp.minimum(1, spec.clip / norms)
        noisy = [
            jnp.tensordot(scale, g, 1) + spec.noise * spec.clip * jax.random.normal(k, g.shape[1:])
            for k, g in zip(jax.random.split(key, len(grads)), grads)
        ]
        return jax.tree.unflatten(tree, [g / spec.batch for g in noisy])

    return grad_fn


def bookkept(spec):
    """The same gradient by book-keeping: no per-example gradient is formed; noise is one flat
    draw."""

    def grad_fn(params, batch, key):
        inputs = [batch["x"]]
        for w, b in params[:-1]:
            inputs.append(jax.nn.relu(inputs[-1] @ w + b))
        scores = inputs[-1] @ params[-1][0] + params[-1][1]
        errors = [jax.nn.softmax(scores) - jax.nn.one_hot(batch["y"], 10)]
        for (w, _), a in zip(params[:0:-1], inputs[:0:-1]):
            errors.insert(0, (errors[0] @ w.T) * (a > 0))
        norms = jnp.sqrt(
            sum((jnp.sum(a**2, 1) + 1) * jnp.sum(e**2, 1) for a, e in zip(inputs, errors))
        )
        scale = jnp.minimum(1, spec.clip / norms)[:, None]
        total, back = ravel_pytree(
            [(a.T @ (e * scale), (e * scale).sum(0)) for a, e in zip(inputs, errors)]
        )
        noise = jax.random.normal(key, (-(-total.size // 256) * 256,))[: total.size]
        return back((total + spec.noise * spec.clip * noise) / spec.batch)

    return grad_fn


def client_level(spec, sgd, batches):
    """apply(state, clients): FedJAX's local training, its update clipped in client_final, noise on
    the sum."""

    def grad_fn(params, batch, key):
        return jax.grad(lambda p: losses(forward(spec, p, batch["x"]), batch["y"]).mean())(params)

    def client_final(server, state):
        delta = jax.tree.map(jnp.subtract, state["params"], server)
        return fedjax.tree_util.tree_clip_by_global_norm(delta, spec.clip)

    def client_step(state, batch):
        opt, params = sgd.apply(
            grad_fn(state["params"], batch, None), state["opt"], state["params"]
        )
        return dict(params=params, opt=opt)

    def client_init(server, key):
        return dict(params=server, opt=sgd.init(server))

    each = fedjax.for_each_client(client_init, client_step, client_final)

    @jax.jit
    def finish(params, total, key):
        flat, back = ravel_pytree(total)
        flat = flat + spec.noise * spec.clip * jax.random.normal(key, flat.shape)
        return jax.tree.map(jnp.add, params, back(flat / spec.cohort))

    def apply(state, clients):
        total = fedjax.tree_util.tree_zeros_like(state.params)
        work = [(client, data.shuffle_repeat_batch(batches), key) for client, data, key in clients]
        for _, delta in each(state.params, work):
            total = fedjax.tree_util.tree_add(total, delta)
        params = finish(state.params, total, jax.random.fold_in(clients[0][2], 1))
        return fed_avg.ServerState(params, state.opt_state), {}

    return apply


def build(spec, data, mode):
    fedjax.set_for_each_client_backend("jit")
    x = data.x.reshape(*data.x.shape[:2], *spec.image) if spec.level == "client" else data.x
    federated = fedjax.InMemoryFederatedData(
        {i: dict(x=x[i], y=data.y[i]) for i in range(spec.clients)}
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federated, spec.cohort, seed=0)
    batches = fedjax.ShuffleRepeatBatchHParams(spec.batch, num_epochs=None, num_steps=spec.steps)
    sgd = fedjax.optimizers.sgd(spec.lr)
    grad_fn = bookkept(spec) if mode == "control" else vmapped(spec)
    algorithm = fed_avg.federated_averaging(grad_fn, sgd, fedjax.optimizers.sgd(1.0), batches)
    apply = client_level(spec, sgd, batches) if spec.level == "client" else algorithm.apply
    now = dict(state=algorithm.init(init(jax.random.PRNGKey(0), spec)))

    def run(rounds, tick):
        for _ in range(rounds):
            now["state"], _ = apply(now["state"], sampler.sample())
            tick(lambda: jax.block_until_ready(now["state"].params))

    return run, lambda: [np.asarray(leaf) for leaf in jax.tree.leaves(now["state"].params)]


if __name__ == "__main__":
    workloads.main(
        "FedJAX",
        build,
        dict(record=("jit", "control"), client=("jit",)),
        ("fedjax", "jax", "jaxlib", "numpy"),
        'pip install fedjax==0.0.17 "jax==0.5.3" "jaxlib==0.5.3"',
        MISSING,
        workloads.NOTES,
    )
