"""The five tasks: their data and their settings, which all programs share.

`torch=True` gives tensors, with channels first and weights as PyTorch keeps them, so that no
program converts anything.  See README.md for what is asked.
"""

import json

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

CLIENTS = 40  # all take part in every round
ROWS = 32  # of a client (but own data: there they differ)
PUBLIC = 150  # rows that nobody owns, for pretraining (LoRA)
ROUNDS = 20
STEPS = 8  # local steps of a client in a round
BATCH = 8  # rows of a local step
EPOCHS = 2  # STEPS, for who counts passes over ROWS
LR = 0.2
TEXT_LR = 2.0
LORA_LR = 0.1
CLIP = 1.0  # L2 norm of what a client uploads
NOISE = 2.0  # standard deviation of the noise in the sum of uploads, over CLIP
DELTA = 1e-5
HOLDOUT = 0.25  # of each owner's rows, for its own test (own data)
ALPHA = 0.3  # weight of the gradient in a local step (own algorithm)
SERVER_LR = 1.5  # of the server's step along the mean difference (own algorithm)
RANK = 4  # of an adapter (LoRA)


def report(**numbers):
    """Print what came out, as the last line."""
    print(json.dumps({name: round(float(value), 4) for name, value in numbers.items()}))


def _digits():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return (x[order] / 16).astype(np.float32), y[order].astype(np.int64)


def _as_tensors(pairs):
    import torch

    return [tuple(map(torch.from_numpy, pair)) for pair in pairs]


def images(torch=False):
    """Digits of 8 x 8 pixels: ([(x, y) of each client], (x, y) for testing).

    x is Float32[n, 8, 8, 1], or a tensor [n, 1, 8, 8]; ROWS rows a client.
    """
    x, y = _digits()
    x = x.reshape(-1, 1, 8, 8) if torch else x.reshape(-1, 8, 8, 1)
    *parts, tested = np.split(np.arange(PUBLIC, len(y)), ROWS * np.arange(1, CLIENTS + 1))
    pairs = [(x[rows], y[rows]) for rows in (*parts, tested)]
    *clients, test = _as_tensors(pairs) if torch else pairs
    return clients, test


def owned(torch=False):
    """Rows as a table has them: x Float32[n, 64], y Int64[n], owner [n], in any order.

    The owners are clinics with 13 to 78 rows, most of which hold three of the ten classes.
    """
    x, y = _digits()
    r = np.random.default_rng(1)
    order = np.lexsort((r.random(len(y)), y // 3))
    sizes = r.integers(12, 70, CLIENTS)
    owner = np.empty(len(y), object)
    ends = np.cumsum(sizes * len(y) / sizes.sum()).astype(int)
    for clinic, rows in enumerate(np.split(order, ends[:-1])):
        owner[rows] = f"clinic {clinic}"
    (rows,) = _as_tensors([(x, y)]) if torch else [(x, y)]
    return *rows, owner.astype(str)


WORDS = dict(
    who="the king|the queen|a soldier|my brother|the old man|a stranger|her sister|the captain",
    does="sees|hears|follows|forgets|remembers|leaves|finds|fears",
    what="the river|the castle|a letter|the storm|a silver ring|the harbour|my horse|the road",
    when="tonight|at dawn|in the winter|once more|before the war|every day|again|alone",
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .\n"
VOCABULARY = 1 + len(CHARACTERS)  # with 0, for padding, which does not occur
WINDOW = 20
TESTED = 5  # windows of a speaker for testing


def speeches(torch=False):
    """Sentences by speaker: ([(x, y) of each speaker], (x, y) for testing).

    x and y are Int64[n, WINDOW], places in CHARACTERS from 1 on; y is the character that follows
    each of x.  Every speaker prefers some words; the last that each says is for testing.
    """
    number = {c: i for i, c in enumerate(CHARACTERS, 1)}
    pairs, tests, windows = [], [], ROWS + TESTED
    for speaker in range(CLIENTS):
        r = np.random.default_rng([2, speaker])
        likes = {kind: r.dirichlet(np.ones(8)) for kind in WORDS}
        say = lambda kind, r=r, likes=likes: r.choice(WORDS[kind].split("|"), p=likes[kind])
        text = ""
        while len(text) <= windows * WINDOW:
            text += " ".join(map(say, WORDS)) + ".\n"
        tokens = np.array([number[c] for c in text])
        x, y = (tokens[k:][: windows * WINDOW].reshape(windows, WINDOW) for k in (0, 1))
        pairs.append((x[:ROWS], y[:ROWS]))
        tests.append((x[ROWS:], y[ROWS:]))
    pairs.append(tuple(map(np.concatenate, zip(*tests))))
    *clients, test = _as_tensors(pairs) if torch else pairs
    return clients, test


def flat_images(torch=False):
    """`images` with x [n, 64]."""
    clients, (x, y) = images(torch)
    return [(c.reshape(len(c), -1), labels) for c, labels in clients], (x.reshape(len(x), -1), y)


def backbone(torch=False):
    """Weights of a pretrained classifier, 64 to 128 to 10 with a ReLU between, by name.

    Kernels Float32[inputs, outputs] and biases by path, layers/0 and layers/2; or a state dict of
    a torch.nn.Sequential of the same layers.  Pretrained on public digits that lie one pixel aside.
    """
    x, y = _digits()
    moved = np.roll(x[:PUBLIC].reshape(-1, 8, 8), 1, axis=2).reshape(-1, 64)
    net = MLPClassifier((128,), max_iter=400, random_state=0).fit(moved, y[:PUBLIC])
    weights = {}
    for layer, kernel, bias in zip((0, 2), net.coefs_, net.intercepts_):
        kernel, bias = kernel.astype(np.float32), bias.astype(np.float32)
        if torch:
            from torch import from_numpy

            weights[f"{layer}.weight"] = from_numpy(kernel.T.copy())
            weights[f"{layer}.bias"] = from_numpy(bias)
        else:
            weights[f"layers/{layer}/kernel"], weights[f"layers/{layer}/bias"] = kernel, bias
    return weights
