"""LoRA, in Flower."""

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
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from tasks import (
    BATCH,
    CLIENTS,
    CLIP,
    DELTA,
    LORA_LR,
    NOISE,
    RANK,
    ROUNDS,
    STEPS,
    backbone,
    flat_images,
    report,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

clients, test = flat_images(torch=True)
base = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
base.load_state_dict(backbone(torch=True))
net = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0", "2"]))
client_app = ClientApp()
server_app = ServerApp()


@client_app.train()
def train(message, context):
    set_peft_model_state_dict(net, message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LORA_LR)
    rows = TensorDataset(*clients[context.node_config["partition-id"]])
    sampler = RandomSampler(rows, num_samples=STEPS * BATCH)
    for x, y in DataLoader(rows, BATCH, sampler=sampler):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    arrays = ArrayRecord(get_peft_model_state_dict(net))
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})})
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
    adapters = ArrayRecord(get_peft_model_state_dict(net))
    result = strategy.start(grid, adapters, num_rounds=ROUNDS)
    set_peft_model_state_dict(net, result.arrays.to_torch_state_dict())
    x, y = test
    accuracy = (net.eval()(x).argmax(1) == y).float().mean()
    report(accuracy=accuracy, epsilon=strategy.privacy_spent().epsilon)


run_simulation(server_app, client_app, CLIENTS)
