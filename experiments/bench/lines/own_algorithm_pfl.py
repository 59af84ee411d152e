"""Own algorithm, in pfl."""

from collections import defaultdict

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from tasks import (
    ALPHA,
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    EPOCHS,
    LR,
    NOISE,
    ROUNDS,
    SERVER_LR,
    STEPS,
    flat_images,
    report,
)
from torch import nn
from torch.nn import functional as F


class Net(nn.Sequential):
    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


def step(net, optimizer, batch, train_kwargs, train_step_args, momentum):
    optimizer.zero_grad()
    net.loss(*batch).backward()
    for name, param in net.named_parameters():
        param.grad.mul_(ALPHA).add_(momentum[name], alpha=1 - ALPHA)
    optimizer.step()


class FedCM(FederatedAveraging):
    momentum = defaultdict(float)

    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        settings = central_context.model_train_params
        model.do_multiple_epochs_of(user_dataset, settings, step, momentum=self.momentum)
        return model.get_model_difference(initial_model_state), Metrics()

    def process_aggregated_statistics(self, central_context, metrics, model, statistics):
        statistics.average()
        self.momentum = {name: -diff / (LR * STEPS) for name, diff in statistics.items()}
        return model.apply_model_update(statistics)


clients, test = flat_images(torch=True)
net = Net(nn.Linear(64, 10))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=SERVER_LR))
sampler = get_user_sampler("minimize_reuse", range(CLIENTS))
users = FederatedDataset.from_slices(clients, sampler)
# privacy
accountant = PLDPrivacyAccountant(ROUNDS, 1.0, "gaussian", noise_parameter=NOISE, delta=DELTA)
# privacy
mechanism = GaussianMechanism.from_privacy_accountant(accountant, CLIP)
backend = SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism)])
params = NNAlgorithmParams(ROUNDS, ROUNDS, train_cohort_size=CLIENTS, val_cohort_size=0)
local = NNTrainHyperParams(BATCH, local_num_epochs=EPOCHS, local_learning_rate=LR)
FedCM().run(params, backend, model, local)
accuracy = model.evaluate(Dataset(test))["accuracy"].overall_value
report(accuracy=accuracy, epsilon=accountant.epsilon)
