"""LoRA, in FedJAX."""

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from fedjax import tree_util
from fedjax.algorithms import fed_avg
from tasks import (
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    LORA_LR,
    NOISE,
    RANK,
    ROUNDS,
    STEPS,
    backbone,
    flat_images,
    report,
)


def adapted(x, layer):
    kernel, bias = weights[f"layers/{layer}/kernel"], weights[f"layers/{layer}/bias"]
    down = hk.Linear(RANK, with_bias=False)
    up = hk.Linear(len(bias), with_bias=False, w_init=jnp.zeros)
    return x @ kernel + bias + up(down(x))


def forward(batch):
    return adapted(jax.nn.relu(adapted(batch["x"], 0)), 2)


weights = backbone()
clients, test = flat_images()
loss = lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores)
metrics = {"accuracy": fedjax.metrics.Accuracy()}
model = fedjax.create_model_from_haiku(hk.transform(forward), {"x": clients[0][0]}, loss, metrics)
federated = fedjax.InMemoryFederatedData({c: {"x": x, "y": y} for c, (x, y) in enumerate(clients)})
sampler = fedjax.client_samplers.UniformGetClientSampler(federated, CLIENTS, seed=0)
batches = fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=None, num_steps=STEPS)
train = fed_avg.create_train_for_each_client(
    fedjax.model_grad(model), fedjax.optimizers.sgd(LORA_LR)
)
# privacy
noise = optax.add_noise((NOISE * CLIP / CLIENTS) ** 2, gamma=0.0, key=0)
server = fedjax.optimizers.create_optimizer_from_optax(optax.chain(noise, optax.sgd(1.0)))
params = model.init(jax.random.PRNGKey(0))
state = server.init(params)
for _ in range(ROUNDS):
    cohort = [(c, rows.shuffle_repeat_batch(batches), key) for c, rows, key in sampler.sample()]
    # privacy
    clipped = (tree_util.tree_clip_by_global_norm(d, CLIP) for _, d in train(params, cohort))
    mean = tree_util.tree_mean((diff, 1.0) for diff in clipped)
    state, params = server.apply(mean, state, params)
found = fedjax.evaluate_model(model, params, [{"x": test[0], "y": test[1]}])
# privacy
accountant = PLDAccountant().compose(GaussianDpEvent(NOISE), ROUNDS)
report(accuracy=found["accuracy"], epsilon=accountant.get_epsilon(DELTA))
