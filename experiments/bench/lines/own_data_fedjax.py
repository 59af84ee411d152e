"""Own data, in FedJAX."""

import fedjax
import haiku as hk
import jax
import numpy as np
import optax
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from fedjax import tree_util
from fedjax.algorithms import fed_avg
from tasks import BATCH, CLIENTS, CLIP, DELTA, HOLDOUT, LR, NOISE, ROUNDS, STEPS, owned, report

x, y, owner = owned()
rows, held_out = {}, {}
for who in np.unique(owner):
    own = np.flatnonzero(owner == who)
    kept, tested = np.split(own, [int(len(own) * (1 - HOLDOUT))])
    rows[who] = {"x": x[kept], "y": y[kept]}
    held_out[who] = {"x": x[tested], "y": y[tested]}
forward = lambda batch: hk.Linear(10)(batch["x"])
loss = lambda batch, scores: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], scores)
metrics = {"accuracy": fedjax.metrics.Accuracy()}
model = fedjax.create_model_from_haiku(hk.transform(forward), {"x": x}, loss, metrics)
federated = fedjax.InMemoryFederatedData(rows)
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
evaluator = fedjax.ModelEvaluator(model)
found = evaluator.evaluate_global_params(params, [(who, [own]) for who, own in held_out.items()])
each = [metrics["accuracy"] for _, metrics in found]
# privacy
accountant = PLDAccountant().compose(GaussianDpEvent(NOISE), ROUNDS)
report(accuracy=np.mean(each), tenth=np.percentile(each, 10), epsilon=accountant.get_epsilon(DELTA))
