"""Own algorithm, in FedJAX."""

import fedjax
import haiku as hk
import jax
import optax
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from fedjax import tree_util
from tasks import (
    ALPHA,
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    LR,
    NOISE,
    ROUNDS,
    SERVER_LR,
    STEPS,
    flat_images,
    report,
)

clients, test = flat_images()
forward = lambda batch: hk.Linear(10)(batch["x"])
loss = lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores)
metrics = {"accuracy": fedjax.metrics.Accuracy()}
model = fedjax.create_model_from_haiku(hk.transform(forward), {"x": clients[0][0]}, loss, metrics)
gradient = fedjax.model_grad(model)


def client_init(server, key):
    params, momentum = server
    return params, momentum, key


def client_step(state, batch):
    params, momentum, key = state
    key, now = jax.random.split(key)
    step = lambda w, g, m: w - LR * (ALPHA * g + (1 - ALPHA) * m)
    params = jax.tree.map(step, params, gradient(params, batch, now), momentum)
    return params, momentum, key


def client_final(server, state):
    return tree_util.tree_clip_by_global_norm(optax.tree.sub(state[0], server[0]), CLIP)


train = fedjax.for_each_client(client_init, client_step, client_final)
federated = fedjax.InMemoryFederatedData({c: {"x": x, "y": y} for c, (x, y) in enumerate(clients)})
sampler = fedjax.client_samplers.UniformGetClientSampler(federated, CLIENTS, seed=0)
batches = fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=None, num_steps=STEPS)
# privacy
noise = optax.add_noise((NOISE * CLIP / CLIENTS) ** 2, gamma=0.0, key=0)
params = model.init(jax.random.PRNGKey(0))
momentum = optax.tree.zeros_like(params)
# privacy
state = noise.init(params)
for _ in range(ROUNDS):
    cohort = [(c, rows.shuffle_repeat_batch(batches), key) for c, rows, key in sampler.sample()]
    diffs = train((params, momentum), cohort)
    mean = tree_util.tree_mean((diff, 1.0) for _, diff in diffs)
    # privacy
    noisy, state = noise.update(mean, state)
    momentum = optax.tree.scale(-1 / (LR * STEPS), noisy)
    params = optax.tree.add_scale(params, SERVER_LR, noisy)
found = fedjax.evaluate_model(model, params, [{"x": test[0], "y": test[1]}])
# privacy
accountant = PLDAccountant().compose(GaussianDpEvent(NOISE), ROUNDS)
report(accuracy=found["accuracy"], epsilon=accountant.get_epsilon(DELTA))
