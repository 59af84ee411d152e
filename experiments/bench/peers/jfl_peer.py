"""jfl itself, by the protocol of its peers: a block of rounds is one program.

Modes of record-level workloads: private; threefry (the key's generator instead of Philox);
vmap (every example's gradient is formed); clipped (no noise); plain (neither clip nor noise).  Of
client-level ones: private; plain.
"""

import functools

import numpy as np
import workloads

try:
    import jax
    from flax import linen as nn

    import jfl
    from jfl.core import identity
    from jfl.engine.round import advance, enter_plan, run_noise_key

    missing = None
except ImportError as error:
    missing = error

if missing is None:

    class Conv5(nn.Module):
        """W5: the layers of pfl-research's CNN, by flax's own convolution."""

        @nn.compact
        def __call__(self, x):
            for features in (32, 64):
                x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), (2, 2)).reshape(-1)
            return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def federation(data):
    """Clients own the rows that are next to each other in memory; a row of each is the test set,
    which is not used."""
    clients, rows = data.y.shape
    x, y = data.x.reshape(-1, *data.x.shape[2:]), data.y.reshape(-1)
    owned = lambda labels: np.arange(clients * rows).reshape(clients, rows)
    return jfl.federate((x, y, x[::rows], y[::rows]), owned)


def make(spec, fed, mode, sampler=None, algorithm="fedavg"):
    """The plan of a workload."""
    multiplier = spec.noise / 2  # replace one doubles the sensitivity: all tools add the same noise
    if spec.level == "record":
        task = jfl.models.mlp(fed, spec.hidden) if spec.hidden else jfl.models.logistic(fed)
        generator = "key" if mode == "threefry" else "philox"
        noise = (
            [jfl.gaussian(multiplier, generator=generator)]
            if multiplier and mode != "clipped"
            else []
        )
        chain = jfl.chain(jfl.clip_l2(spec.clip), jfl.total(), *noise, jfl.divide(spec.batch))
        path = "vmap" if mode == "vmap" else "auto"
        grad = (
            jfl.grad(task.loss)
            if mode == "plain"
            else jfl.private_grad(task.loss, chain, path=path)
        )
        batch, release, chunk = jfl.batches.without_replacement(spec.batch), None, None
    else:
        task = jfl.models.cnn(fed) if spec.parameters < 1e6 else jfl.models.flax(fed, Conv5())
        noise = [jfl.gaussian(multiplier)] if multiplier else []
        grad = jfl.grad(task.loss)
        batch = jfl.batches.epochs(spec.batch)
        release = (
            None
            if mode == "plain"
            else jfl.chain(jfl.clip_l2(spec.clip), jfl.total(), *noise, jfl.divide(spec.cohort))
        )
        chunk = 1 if jax.default_backend() == "cpu" else None
    alg = getattr(jfl.algorithms, algorithm)(grad, lr=spec.lr, steps=spec.steps, batch=batch)
    return jfl.plan(
        fed,
        task,
        alg,
        sampler or jfl.sampling.without_replacement(spec.clients, spec.cohort),
        release=release,
        chunk=getattr(spec, "chunk", chunk),
    )


def program(plan):
    """(state, plan, rounds) -> state, compiled for any number of rounds; nothing is evaluated."""
    words = identity.noise_identity(plan)

    def block(run, plan, rounds):
        run = enter_plan(run, words)
        noise = run_noise_key(run)
        return jax.lax.fori_loop(0, rounds, lambda _, run: advance(run, plan, noise)[0], run)

    return jax.jit(block, donate_argnums=0)


def build(spec, data, mode):
    if hasattr(spec, "image"):
        data.x = data.x.reshape(*data.x.shape[:2], *spec.image)
    plan = make(spec, federation(data), mode)
    state = jfl.init(jax.random.key(0), plan)
    play = program(plan)

    def run(rounds, tick):
        nonlocal state
        for count in [1] + [spec.block] * ((rounds - 1) // spec.block):
            state = play(state, plan, count)
            for _ in range(count):
                tick(functools.partial(jax.block_until_ready, state))

    def leaves():
        layers = [layer for _, layer in sorted(state.server.params.items())]
        return [np.asarray(layer[name]) for layer in layers for name in ("kernel", "bias")]

    return run, leaves


if __name__ == "__main__":
    workloads.main(
        "jfl",
        build,
        dict(
            record=("private", "threefry", "vmap", "clipped", "plain"),
            client=("private", "plain"),
        ),
        ("jfl", "jax", "jaxlib", "flax", "optax", "numpy"),
        "pip install jfl",
        missing,
    )
