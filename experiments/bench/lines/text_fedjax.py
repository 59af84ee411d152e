"""Text, in FedJAX."""

import fedjax
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
    NOISE,
    ROUNDS,
    STEPS,
    TEXT_LR,
    VOCABULARY,
    report,
    speeches,
)

jnp.NINF = -jnp.inf  # which the model below asks for, and jax no longer has
clients, test = speeches()
model = fedjax.models.shakespeare.create_lstm_model(VOCABULARY - 1, 8, 32, lstm_num_layers=1)
federated = fedjax.InMemoryFederatedData({c: {"x": x, "y": y} for c, (x, y) in enumerate(clients)})
sampler = fedjax.client_samplers.UniformGetClientSampler(federated, CLIENTS, seed=0)
batches = fedjax.ShuffleRepeatBatchHParams(BATCH, num_epochs=None, num_steps=STEPS)
train = fed_avg.create_train_for_each_client(
    fedjax.model_grad(model), fedjax.optimizers.sgd(TEXT_LR)
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
report(accuracy=found["accuracy_in_vocab"], epsilon=accountant.get_epsilon(DELTA))
