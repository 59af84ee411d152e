"""Own algorithm, in Flower."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import (
    NeighboringRelation,
    PrivacyConfig,
    RdpAccountant,
    SamplingMethod,
    ServerApp,
)
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping as FixedClipping
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
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
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

clients, test = flat_images(torch=True)
net = nn.Linear(64, 10)
client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    momentum = message.content["momentum"].to_torch_state_dict()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    rows = TensorDataset(*clients[context.node_config["partition-id"]])
    sampler = RandomSampler(rows, num_samples=STEPS * BATCH)
    for x, y in DataLoader(rows, BATCH, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        for name, param in net.named_parameters():
            param.grad.mul_(ALPHA).add_(momentum[name], alpha=1 - ALPHA)
        optimizer.step()
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class FedCM(FixedClipping):
    momentum = ArrayRecord({name: torch.zeros_like(w) for name, w in net.state_dict().items()})

    def configure_train(self, server_round, arrays, config, grid):
        messages = list(super().configure_train(server_round, arrays, config, grid))
        for message in messages:
            message.content["momentum"] = self.momentum
        return messages

    def aggregate_train(self, server_round, replies):
        noisy, metrics = super().aggregate_train(server_round, replies)
        old, new = self.current_arrays.to_torch_state_dict(), noisy.to_torch_state_dict()
        diff = {name: new[name] - old[name] for name in old}
        self.momentum = ArrayRecord({name: -d / (LR * STEPS) for name, d in diff.items()})
        return ArrayRecord({name: old[name] + SERVER_LR * diff[name] for name in old}), metrics


@server_app.main()
def main(grid, context):
    # privacy
    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    # privacy
    accountant = RdpAccountant(PrivacyConfig(DELTA, CLIENTS, relation, sampling))
    fedavg = FedAvg(fraction_evaluate=0.0)
    strategy = FedCM(fedavg, NOISE, CLIP, CLIENTS, accountant=accountant)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=ROUNDS)
    net.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = test
    accuracy = (net.eval()(x).argmax(1) == y).float().mean()
    report(accuracy=accuracy, epsilon=strategy.privacy_spent().epsilon)


run_simulation(server_app, client_app, CLIENTS)
