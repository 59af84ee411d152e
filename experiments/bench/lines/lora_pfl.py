"""LoRA, in pfl."""

import torch
from peft import LoraConfig, get_peft_model
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_accountant import PLDPrivacyAccountant
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from tasks import (
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    EPOCHS,
    LORA_LR,
    NOISE,
    RANK,
    ROUNDS,
    backbone,
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


clients, test = flat_images(torch=True)
base = Net(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
base.load_state_dict(backbone(torch=True))
net = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0", "2"]))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
sampler = get_user_sampler("minimize_reuse", range(CLIENTS))
users = FederatedDataset.from_slices(clients, sampler)
# privacy
accountant = PLDPrivacyAccountant(ROUNDS, 1.0, "gaussian", noise_parameter=NOISE, delta=DELTA)
# privacy
mechanism = GaussianMechanism.from_privacy_accountant(accountant, CLIP)
backend = SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism)])
params = NNAlgorithmParams(ROUNDS, ROUNDS, train_cohort_size=CLIENTS, val_cohort_size=0)
local = NNTrainHyperParams(BATCH, local_num_epochs=EPOCHS, local_learning_rate=LORA_LR)
FederatedAveraging().run(params, backend, model, local)
accuracy = model.evaluate(Dataset(test))["accuracy"].overall_value
report(accuracy=accuracy, epsilon=accountant.epsilon)
