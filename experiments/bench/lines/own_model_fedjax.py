"""Own model, in FedJAX."""

import fedjax
import haiku as hk
import jax
import optax
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from fedjax import tree_util
from fedjax.algorithms import fed_avg
from tasks import BATCH, CLIENTS, CLIP, DELTA, LR, NOISE, ROUNDS, STEPS, images, report


def forward(batch, train=False):
    x = jax.nn.relu(hk.Conv2D(8, 3)(batch["x"]))
    x = hk.Flatten()(hk.max_pool(x, 2, 2, "VALID"))
    x = hk.dropout(hk.next_rng_key(), 0.2, x) if train else x
    return hk.Linear(10)(x)


clients, test = images()
loss = lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores)
metrics = {"accuracy": fedjax.metrics.Accuracy()}
model = fedjax.create_model_from_haiku(
    hk.transform(forward), {"x": clients[0][0]}, loss, metrics, train_kwargs={"train": True}
)
federated = fedjax.InMemoryFederatedData({c: {"x": x, "y": y} for c, (x, y) in enumerate(clients)})
sampler = fedjax.client_samplers.UniformGetClientSampler(federated, CLIENTS, seed=0)
batches = fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=None, num_steps=STEPS)
train = fed_avg.create_train_for_each_client(fedjax.model_grad(model), fedjax.optimizers.sgd(LR))
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
