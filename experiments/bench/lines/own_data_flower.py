"""Own data, in Flower."""

import numpy as np
import torch
from datasets import Dataset
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
from flwr_datasets.partitioner import NaturalIdPartitioner
from tasks import BATCH, CLIENTS, CLIP, DELTA, HOLDOUT, LR, NOISE, ROUNDS, STEPS, owned, report
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

x, y, owner = owned()
partitioner = NaturalIdPartitioner("owner")
partitioner.dataset = Dataset.from_dict({"x": x, "y": y, "owner": owner}).with_format("torch")
net = nn.Linear(64, 10)
client_app = ClientApp()
server_app = ServerApp()


def load(message, context):
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    rows = partitioner.load_partition(context.node_config["partition-id"])
    return rows.train_test_split(HOLDOUT, seed=0)


@client_app.train()
def train(message, context):
    rows = load(message, context)["train"]
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    sampler = RandomSampler(rows, num_samples=STEPS * BATCH)
    for batch in DataLoader(rows, BATCH, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(net(batch["x"]), batch["y"]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 1})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


@client_app.evaluate()
def evaluate(message, context):
    rows = load(message, context)["test"]
    accuracy = (net(rows["x"][:]).argmax(1) == rows["y"][:]).float().mean().item()
    metrics = MetricRecord({"accuracy": accuracy, "num-examples": 1})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def summarize(contents, weighted_by_key):
    each = [content["metrics"]["accuracy"] for content in contents]
    return MetricRecord({"accuracy": np.mean(each).item(), "tenth": np.percentile(each, 10).item()})


@server_app.main()
def main(grid, context):
    # privacy
    relation, sampling = NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION
    # privacy
    accountant = RdpAccountant(PrivacyConfig(DELTA, CLIENTS, relation, sampling))
    fedavg = FedAvg(evaluate_metrics_aggr_fn=summarize)
    # privacy
    strategy = FixedClipping(fedavg, NOISE, CLIP, CLIENTS, accountant=accountant)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), num_rounds=ROUNDS)
    last = result.evaluate_metrics_clientapp[ROUNDS]
    report(**last, epsilon=strategy.privacy_spent().epsilon)


run_simulation(server_app, client_app, CLIENTS)
