"""Print the identity and the noise words of plans made of jfl's own parts, as JSON.

test_identity.py compares the output with golden_identity.json, also under another Python.  Every
user's function here has a name, except in the plan "unnamed loss".
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfl
from jfl.core import identity
from jfl.core.random_streams import derive_noise_key, noise_seed_words

ROWS = np.arange(36, dtype=np.float32).reshape(12, 3) / 8
OWNED = (jnp.arange(12).reshape(3, 4), jnp.array([4, 4, 3]))
NO_TEST_ROWS = (jnp.zeros((3, 0), jnp.int32), jnp.zeros(3, jnp.int32))


def loss(params, x, y):
    """The squared error."""
    return (params["w"] @ x + params["b"] - y) ** 2 * len(f"{1 + 1}{'a'!r}")


def federation(x, y, **options):
    return jfl.Federation(x, y, *OWNED, x[:2], y[:2], *NO_TEST_ROWS, **options)


FED = federation(ROWS, jnp.arange(12.0) % 3)
NAMED_LOSS = jfl.named("pins.loss")(lambda *arguments: loss(*arguments))
PARAMS = dict(w=jnp.ones(3), b=jnp.float32(0.5))
TASK = jfl.task(PARAMS, NAMED_LOSS)
CLIP = jfl.clip_l2(1.0)
CHAIN = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.5), jfl.divide(2))


def algorithm(name, objective=NAMED_LOSS, **options):
    grad = jfl.private_grad(objective, CHAIN)
    if name == "output_perturbation":
        grad = jfl.grad(objective)
    needed = dict(
        padpfl=dict(upload="difference"),
        fedper=dict(shared="w"),
        fedrep=dict(shared="w"),
        qfedavg=dict(loss_mechanism=CHAIN),
        output_perturbation=dict(mechanism=released(jfl.gaussian(1.5), jfl.clip_l2(0.5))),
    )
    batch = jfl.batches.without_replacement(2)
    options = dict(batch=batch) | needed.get(name, {}) | options
    return getattr(jfl.algorithms, name)(grad, **options)


def released(noise, clip=CLIP):
    return jfl.chain(clip, jfl.total(), noise)


def variants(name):
    """Yield an algorithm as it is, and with the optimizers and schedules that it takes."""
    yield name, algorithm(name)
    others = dict(
        optimizer=functools.partial(optax.sgd, momentum=0.9),
        server_optimizer=functools.partial(optax.adam, b1=0.8),
        lr=jfl.schedules.exponential(0.1, 0.9, total=50),
        server_lr=0.5,
        batch=jfl.batches.poisson(rate=0.3, capacity=4),
    )
    parameters = jfl.core.options.parameters(getattr(jfl.algorithms, name))
    options = {k: v for k, v in others.items() if k in parameters}
    if options:
        yield f"{name}({', '.join(options)})", algorithm(name, **options)


def mechanisms():
    falling = jfl.schedules.exponential(1.0, 0.9, total=5)
    cosine = jfl.schedules.from_optax(optax.cosine_decay_schedule(2.0, 9))
    adaptive = jfl.clip_adaptive(1.0, count=3, quantile=0.6)
    yield "laplace", released(jfl.laplace(2.0), jfl.clip_l1(1.0))
    yield "automatic", released(jfl.gaussian(1.0), jfl.clip_automatic())
    yield "layers", released(jfl.gaussian(1.0), jfl.clip_per_layer((1.0, 2.0)))
    yield "schedule", released(jfl.gaussian(falling))
    yield "optax schedule", released(jfl.gaussian(cosine))
    yield "adaptive", released(jfl.gaussian(1.0), adaptive)
    strategies = jfl.strategies
    for strategy in (
        strategies.identity(6),
        strategies.square_root(6),
        strategies.tree(6),
        strategies.restarted(strategies.square_root(3), 6),
    ):
        yield repr(strategy), released(jfl.correlated(1.0, strategy))


def samplers():
    sampling = jfl.sampling
    yield sampling.without_replacement(3, 2)
    yield sampling.with_replacement(3, 2)
    yield sampling.poisson(3, 0.4)
    yield sampling.truncated_poisson(3, 0.5, capacity=2)
    yield sampling.first_responders(3, 2, jnp.arange(1.0, 4.0), jitter=0.5)
    yield sampling.min_separation(3, 1, 2)
    yield sampling.cyclic_poisson(3, 0.5, 2)
    yield sampling.random_allocation(3, 2)
    yield sampling.balls_in_bins(3, 2)
    yield sampling.available_poisson(3, 0.5, period=4, awake=0.5)


def models():
    models = jfl.models
    images = np.arange(12 * 64, dtype=np.float32).reshape(12, 8, 8, 1) / 768
    pictures = federation(images, jnp.arange(12) % 3, classes=3)
    rows = np.arange(48, dtype=np.int32).reshape(12, 4)
    texts = federation(rows % 5, np.arange(48).reshape(12, 4) % 5, classes=5)
    for name in ("logistic", "mlp", "cnn", "resnet18"):
        yield name, pictures, getattr(models, name)(pictures)
    for name, options in dict(lstm=dict(cells=(4,)), gpt={}).items():
        yield name, texts, getattr(models, name)(texts, **options)
    small = models.mlp(pictures, hidden=(4,))
    shapes = jax.eval_shape(small.init, jax.random.key(0))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)
    yield "trainable", pictures, models.trainable(small, "Dense_1/*", params=ones)


def plans():
    def plan(algorithm, fed=FED, task=TASK, sampler=None, release=CHAIN, **options):
        sampler = sampler or jfl.sampling.full(3)
        return jfl.plan(fed, task, algorithm, sampler, release=release, **options)

    for name in jfl.algorithms.__all__:
        for title, made in variants(name):
            yield title, plan(made)
    for name, mechanism in mechanisms():
        yield f"release: {name}", plan(algorithm("fedavg"), release=mechanism)
    for sampler in samplers():
        yield f"sampler: {sampler.scheme}", plan(algorithm("fedavg"), sampler=sampler)
    for name, fed, task in models():
        yield f"model: {name}", plan(algorithm("fedavg", task.loss), fed, task)
    uploads = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5))
    yield "upload noise, weights", plan(algorithm("scaffold"), upload=uploads, weights="size")
    unnamed = jfl.task(PARAMS, loss)
    yield "unnamed loss", plan(algorithm("fedavg", loss), task=unnamed)


def describe():
    found = {}
    for name, plan in plans():
        words, history = identity.noise_identity(plan), identity.initial_history(plan)
        noise = jax.random.key_data(
            derive_noise_key(jax.random.key(3), noise_seed_words(words, history, 0))
        )
        assert name not in found, name
        found[name] = [identity.signature(jfl.describe(plan)), np.asarray(noise).tolist()]
    return found


if __name__ == "__main__":
    rows = (f" {json.dumps(name)}: {json.dumps(pin)}" for name, pin in describe().items())
    print("{\n" + ",\n".join(rows) + "\n}")
