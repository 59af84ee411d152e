"""The workloads' models in PyTorch, their batches, and a plain local training loop."""

import torch
from torch import nn


def network(spec) -> nn.Module:
    """Dense for W1 and W2, convolutional for W3 and W5: images channels first, W5 without its
    dropout."""
    if spec.level == "record":
        sizes = (784, *spec.hidden, 10)
        layers = [layer for a, b in zip(sizes, sizes[1:]) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1])
    if spec.image[0] == 28:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1568, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12544, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def tensors(spec, data):
    """x [clients, rows, ...], images channels first, y [clients, rows] int64; data gives its arrays
    up."""
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y).long()
    data.x = data.y = None
    if spec.level == "client":
        x = x.reshape(*x.shape[:2], *spec.image).movedim(-1, 2).contiguous()
    return x, y


def arrays(values) -> list:
    """Parameters as numpy arrays, dense weights as [in, out]."""
    return [
        v.detach().numpy().T.copy() if v.ndim == 2 else v.detach().numpy().copy() for v in values
    ]


def batches(spec, x, y):
    """Record level: fresh rows each step, none twice in a batch.  Client level: one epoch in random
    order."""
    order = torch.randperm(len(x)) if spec.level == "client" else None
    for i in range(spec.steps):
        if order is None:
            rows = torch.randperm(len(x))[: spec.batch]
        else:
            rows = order[(i * spec.batch) % len(x) :][: spec.batch]
        yield x[rows], y[rows]


def train(spec, model, x, y):
    """Local SGD without privacy, in place."""
    optimiser = torch.optim.SGD(model.parameters(), spec.lr)
    for bx, by in batches(spec, x, y):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(bx), by).backward()
        optimiser.step()
