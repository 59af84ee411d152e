"""Own model, in Flower."""

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
from tasks import BATCH, CLIENTS, CLIP, DELTA, LR, NOISE, ROUNDS, STEPS, images, report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

clients, test = images(torch=True)
convolution = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
net = nn.Sequential(*convolution, nn.Dropout(0.2), nn.Linear(128, 10))
client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    rows = TensorDataset(*clients[context.node_config["partition-id"]])
    sampler = RandomSampler(rows, num_samples=STEPS * BATCH)
    for x, y in DataLoader(rows, BATCH, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@server_app.main()
def main(grid, context):
    # privacy
    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    # privacy
    accountant = RdpAccountant(PrivacyConfig(DELTA, CLIENTS, relation, sampling))
    fedavg = FedAvg(fraction_evaluate=0.0)
    # privacy
    strategy = FixedClipping(fedavg, NOISE, CLIP, CLIENTS, accountant=accountant)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=ROUNDS)
    net.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = test
    accuracy = (net.eval()(x).argmax(1) == y).float().mean()
    report(accuracy=accuracy, epsilon=strategy.privacy_spent().epsilon)


run_simulation(server_app, client_app, CLIENTS)
