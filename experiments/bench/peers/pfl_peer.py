"""pfl-research on PyTorch: its federated dataset, FederatedAveraging, simulated backend, central
Gaussian mechanism.

    python pfl_peer.py --workload W1 --data FILE.npz --rounds 20 --repeats 5 --mode vmap

pfl has no record-level DP, so in W1 and W2 its local training step is replaced.  Mode `vmap`:
per-example gradients by torch.func.vmap(grad), clipped, with noise.  Mode `ghost`: Opacus' ghost
clipping in pfl's model.  W3 and W5 (mode `central`) are pfl's own all through, batches in a fixed
order as pfl does it.  pfl samples users with replacement; here the sampler it is given deals
cohorts without.  JFL_PEER_THREADS sets PyTorch's threads, else 2.
"""

import os

import numpy as np
import workloads

try:
    import torch
    import torch_models
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    MISSING = None
except ImportError as error:
    MISSING = error


def vmap_step(spec, model):
    """pfl's train step with clipped per-example gradients, and no change to the optimiser."""

    def loss(params, x, y):
        scores = torch.func.functional_call(model, params, (x[None],))
        return torch.nn.functional.cross_entropy(scores, y[None])

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    @torch.no_grad()
    def step(model, optimiser, batch, train_kwargs, train_step_args):
        params = dict(model.named_parameters())
        each = grads({name: p.detach() for name, p in params.items()}, *batch)
        norms = torch.linalg.vector_norm(
            torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]), dim=0
        )
        scale = (spec.clip / norms).clamp(max=1.0)
        for name, p in params.items():
            total = torch.einsum("i,i...", scale, each[name])
            p.grad = (total + spec.noise * spec.clip * torch.randn_like(p)) / spec.batch
        optimiser.step()

    return step


def ghost(spec, model):
    """(wrapped model, train step, local optimiser) with Opacus' ghost clipping."""
    try:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    except ImportError as error:
        raise workloads.Unsupported(f"{error}; pip install opacus") from error
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=spec.clip)

    def optimiser(params, lr):
        return DPOptimizerFastGradientClipping(
            torch.optim.SGD(params, lr),
            noise_multiplier=spec.noise,
            max_grad_norm=spec.clip,
            expected_batch_size=spec.batch,
        )

    def step(model, optimiser, batch, train_kwargs, train_step_args):
        x, y = batch
        optimiser.zero_grad()
        DPLossFastGradientClipping(model, optimiser, torch.nn.CrossEntropyLoss())(
            model(x), y
        ).backward()
        optimiser.step()

    return wrapped, step, optimiser


def build(spec, data, mode):
    torch.set_num_threads(int(os.environ.get("JFL_PEER_THREADS", 2)))
    torch.manual_seed(0)
    x, y = torch_models.tensors(spec, data)
    network, optimiser, step = torch_models.network(spec), torch.optim.SGD, None
    if mode == "vmap":
        step = vmap_step(spec, network)
    elif mode == "ghost":
        network, step, optimiser = ghost(spec, network)
    network.loss = lambda x, y: torch.nn.functional.cross_entropy(network(x), y)
    network.metrics = lambda x, y: {
        "rows": Weighted(len(y), 1)
    }  # pfl evaluates in the first round; costs nothing
    model = PyTorchModel(network, optimiser, torch.optim.SGD(network.parameters(), 1.0))
    rng = np.random.default_rng(0)

    def users():
        while True:
            yield from rng.choice(spec.clients, spec.cohort, replace=False)

    class Rows(PyTorchTensorDataset):
        def iter(self, batch_size):
            return torch_models.batches(spec, *self.raw_data)

    class Private(FederatedAveraging):
        def train_one_user(self, initial_model_state, model, user_dataset, central_context):
            model.do_multiple_epochs_of(user_dataset, central_context.model_train_params, step)
            return model.get_model_difference(initial_model_state), Metrics()

    kind = Rows if spec.level == "record" else PyTorchTensorDataset
    everyone = users()
    dataset = FederatedDataset(lambda user: kind((x[user], y[user])), lambda: next(everyone))
    mechanism = CentrallyAppliedPrivacyMechanism(GaussianMechanism(spec.clip, spec.noise))
    backend = SimulatedBackend(dataset, dataset, [mechanism] if spec.level == "client" else [])
    epochs = 1 if spec.level == "record" else -(-spec.steps * spec.batch // x.shape[1])
    local = NNTrainHyperParams(
        local_batch_size=spec.batch, local_num_epochs=epochs, local_learning_rate=spec.lr
    )

    def run(rounds, tick):
        class Tick(TrainingProcessCallback):
            def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
                tick()
                return False, Metrics()

        settings = NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=spec.cohort,
            val_cohort_size=0,
        )
        algorithm = Private() if step else FederatedAveraging()
        algorithm.run(
            settings, backend, model, local, callbacks=[Tick()], send_metrics_to_platform=False
        )

    return run, lambda: torch_models.arrays(network.parameters())


if __name__ == "__main__":
    workloads.main(
        "pfl-research",
        build,
        dict(record=("vmap", "ghost"), client=("central",)),
        ("pfl", "torch", "opacus", "numpy"),
        "pip install torch pfl opacus",
        MISSING,
        dict(workloads.NOTES, client="batches in a fixed order; " + workloads.NOTES["client"]),
    )
