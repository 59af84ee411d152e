"""Own data, in pfl."""

import numpy as np
import torch
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
from tasks import BATCH, CLIENTS, CLIP, DELTA, EPOCHS, HOLDOUT, LR, NOISE, ROUNDS, owned, report
from torch import nn
from torch.nn import functional as F


class Net(nn.Sequential):
    def loss(self, x, y):
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"accuracy": Weighted((self(x).argmax(1) == y).sum().item(), len(y))}


x, y, owner = owned(torch=True)
rows = {c: Dataset((x[owner == c], y[owner == c])).split(1 - HOLDOUT) for c in np.unique(owner)}
users = FederatedDataset(lambda c: rows[c][0], get_user_sampler("minimize_reuse", list(rows)))
net = Net(nn.Linear(64, 10))
model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
# privacy
accountant = PLDPrivacyAccountant(ROUNDS, 1.0, "gaussian", noise_parameter=NOISE, delta=DELTA)
# privacy
mechanism = GaussianMechanism.from_privacy_accountant(accountant, CLIP)
backend = SimulatedBackend(users, users, [CentrallyAppliedPrivacyMechanism(mechanism)])
params = NNAlgorithmParams(ROUNDS, ROUNDS, train_cohort_size=CLIENTS, val_cohort_size=0)
local = NNTrainHyperParams(BATCH, local_num_epochs=EPOCHS, local_learning_rate=LR)
FederatedAveraging().run(params, backend, model, local)
each = [model.evaluate(own)["accuracy"].overall_value for _, own in rows.values()]
report(accuracy=np.mean(each), tenth=np.percentile(each, 10), epsilon=accountant.epsilon)
