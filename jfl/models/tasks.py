"""What is learned: ready-made flax models, or any pure loss of one example."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..core import checks, losses
from ..core.records import Federation, Fn, Metric, Metrics, Task, named
from ..kernels.conv import conv_same, relu_pool
from . import frameworks
from .adapters import flax
from .targets import TARGETS

__all__ = ["logistic", "mlp", "cnn", "lstm", "gpt", "resnet18"]


@named("models.fixed")
def _fixed(key, *, params):
    return params


def task(
    params: Any,
    loss: Callable,
    predict: Callable | None = None,
    *,
    evaluation: Callable | None = None,
    metrics: Mapping[str, Callable | Metric] | None = None,
    target: str = "class",
) -> Task:
    """A user's own problem.

    Args:
        params: the starting point, a pytree of floats; or a pure function key -> params.  An
            equinox module whose leaves are all arrays of floats is such a pytree; of others, and of
            flax.nnx, see `jfl.models`.
        loss: pure (params, x, y) -> scalar, for one example; or (params, x, y, key), which draws.
            The key of a row follows from the seed, the round, the client and the step.
        predict: pure (params, x) -> output of one example; without it no accuracy is computed.
        evaluation: the loss of test rows, where it is another one: without dropout, say.  None:
            `loss`; if that draws, each test row has one key in all evaluations.
        metrics: what else is watched on the test rows, by name: pure (params, x, y) -> a number, or
            a pair, a sum and how many it is of; or a jfl.Metric, which also says what is done to
            the mean.  They are in `out.metrics.custom`.
        target: what y is, which says what is right about an output: "class" (the largest logit),
            "tokens" (each of a sequence, but for negative ones), "labels" (each of several logits
            by its sign) or "numbers" (no accuracy).

    Raises:
        ValueError: for what cannot be trained (modules, leaves that are no floats, statistics of
            BatchNorm).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> t = task(jnp.zeros(3), lambda w, x, y: (x @ w - y) ** 2)
        >>> t.init(jax.random.key(0)).shape
        (3,)
    """
    if not callable(loss):
        checks.fail(
            "task", "loss, a pure function (params, x, y) -> scalar", checks.short_repr(loss)
        )
    forms = dict(predict="(params, x) -> output", evaluation="(params, x, y) -> scalar")
    for name, value in dict(predict=predict, evaluation=evaluation).items():
        if value is not None and not callable(value):
            checks.fail(
                "task", f"{name}, a pure function {forms[name]}, or None", checks.short_repr(value)
            )
        frameworks.function("task", name, value, forms[name])
    frameworks.function("task", "loss", loss, "(params, x, y) -> scalar")
    if evaluation is not None and losses.takes_key(evaluation):
        checks.fail("task", "evaluation, a function (params, x, y)", "one that takes a key")
    checks.require_one_of("task", TARGETS, target=target)
    draws = callable(params) and frameworks.library(params) is None
    init = _fn(params) if draws else Fn(_fixed, dict(params=frameworks.parameters("task", params)))
    return Task(init, _fn(loss), _fn(predict), _fn(evaluation), watched("task", metrics), target)


def _fn(function: Any) -> Any:
    return function if function is None or isinstance(function, Fn) else Fn(function)


def watched(where: str, metrics: Mapping[str, Callable | Metric] | None) -> dict | None:
    """Custom metrics as records, by name."""
    if not metrics:
        return None
    if not isinstance(metrics, Mapping):
        checks.fail(where, "metrics, a dict of names and functions", checks.short_repr(metrics))
    taken = {field.name for field in dataclasses.fields(Metrics)}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name or name in taken:
            checks.fail(
                where,
                "metrics by names of their own",
                repr(name),
                f"jfl measures {', '.join(sorted(taken))} itself.",
            )
        if not callable(metric) and not isinstance(metric, Metric):
            checks.fail(
                where, f"metric {name!r}, a function (params, x, y)", checks.short_repr(metric)
            )
    return {
        name: m if isinstance(m, Metric) else Metric(_fn(m)) for name, m in sorted(metrics.items())
    }


class _Mlp(nn.Module):
    hidden: tuple
    classes: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(-1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(
            self.classes,
            kernel_init=nn.initializers.zeros
            if not self.hidden
            else nn.initializers.lecun_normal(),
        )(x)


class _Conv(nn.Module):
    """A convolution, its bias, ReLU and pooling."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param(
            "kernel", nn.initializers.lecun_normal(), (3, 3, x.shape[-1], self.features)
        )
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        return relu_pool(conv_same(x, kernel), bias)


class _Cnn(nn.Module):
    channels: tuple
    dense: int
    classes: int

    @nn.compact
    def __call__(self, x):
        x = x if x.ndim == 3 else x[..., None]
        for features in self.channels:
            x = _Conv(features)(x)
        x = nn.relu(nn.Dense(self.dense)(x.reshape(-1)))
        return nn.Dense(self.classes)(x)


class _LstmLayer(nn.Module):
    """LSTM cells over time, of x [T, features]: all inputs at once, and the states one by one."""

    width: int

    @nn.compact
    def __call__(self, x):
        four = 4 * self.width
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], four))
        recurrent = self.param("recurrent", nn.initializers.orthogonal(), (self.width, four))
        bias = self.param("bias", nn.initializers.zeros, (four,))

        def turn(state, inputs):
            cell, output = state
            take_in, keep, new, give_out = jnp.split(inputs + output @ recurrent, 4)
            cell = nn.sigmoid(keep) * cell + nn.sigmoid(take_in) * jnp.tanh(new)
            output = nn.sigmoid(give_out) * jnp.tanh(cell)
            return (cell, output), output

        zeros = jnp.zeros(self.width, kernel.dtype)
        return jax.lax.scan(turn, (zeros, zeros), x @ kernel + bias[None])[1]


class _Lstm(nn.Module):
    embedding: int
    hidden: tuple
    classes: int
    every: bool  # logits at every position, or at the last alone

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(self.classes, self.embedding)(x)
        for width in self.hidden:
            x = _LstmLayer(width)(x)
        return nn.Dense(self.classes)(x if self.every else x[-1])


class _Gpt(nn.Module):
    width: int
    layers: int
    heads: int
    dropout: float
    classes: int
    every: bool

    @nn.compact
    def __call__(self, x, train: bool):
        length = x.shape[0]
        positions = self.param("positions", nn.initializers.normal(0.02), (length, self.width))
        drop = lambda x: nn.Dropout(self.dropout, deterministic=not train)(x)
        causal = nn.make_causal_mask(jnp.ones(length))
        x = drop(nn.Embed(self.classes, self.width)(x) + positions)
        for _ in range(self.layers):
            x = x + drop(
                nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=causal)
            )
            wide = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + drop(nn.Dense(self.width)(wide))
        return nn.Dense(self.classes)(nn.LayerNorm()(x if self.every else x[-1]))


def _group_norm(features):
    """GroupNorm of one image [H, W, C]: without axes, flax takes axis 0 for the batch."""
    return nn.GroupNorm(num_groups=min(32, features // 2), reduction_axes=(-3, -2, -1))


class _Residual(nn.Module):
    """Two convolutions beside a way that leaves them out, with GroupNorm."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x):
        strides = (self.stride, self.stride)
        norm = lambda x: _group_norm(self.features)(x)
        conv = lambda size, strides: nn.Conv(
            self.features, (size, size), strides=strides, use_bias=False
        )
        y = norm(conv(3, (1, 1))(nn.relu(norm(conv(3, strides)(x)))))
        if x.shape != y.shape:
            x = norm(conv(1, strides)(x))
        return nn.relu(x + y)


class _ResNet(nn.Module):
    width: int
    blocks: tuple
    classes: int

    @nn.compact
    def __call__(self, x):
        x = x if x.ndim == 3 else x[..., None]
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(_group_norm(self.width)(x))
        for stage, blocks in enumerate(self.blocks):
            for block in range(blocks):
                x = _Residual(self.width * 2**stage, 2 if stage and not block else 1)(x)
        return nn.Dense(self.classes)(x.mean((0, 1)))


def logistic(fed: Federation) -> Task:
    """Softmax regression, started at zero.  For L2 regularisation give l2 to `grad` or
    `private_grad`."""
    checks.require_type("models.logistic", Federation, "jfl.federate", fed=fed)
    return flax(fed, _Mlp((), fed.classes), target="class", batched=False)


def mlp(fed: Federation, hidden: tuple[int, ...] = (64,)) -> Task:
    """Dense layers with ReLU.

    Args:
        fed: gives the shape of a row and the number of classes.
        hidden: widths of the hidden layers.
    """
    checks.require_type("models.mlp", Federation, "jfl.federate", fed=fed)
    hidden = checks.as_tuple("models.mlp", hidden=hidden)
    for width in hidden:
        checks.require_integer("models.mlp", hidden=width)
    return flax(fed, _Mlp(hidden, fed.classes), target="class", batched=False)


def lstm(fed: Federation, embedding: int = 8, cells: tuple[int, ...] = (256, 256)) -> Task:
    """The token that comes next: an embedding, layers of LSTM cells, and a dense layer.

    Of one label a row it is given the last state, of a label for each token (y Int[T]) all of them.
    The defaults are those of the reference, for the plays of `datasets.shakespeare`.

    Args:
        embedding: numbers for a token.
        cells: how many there are in each layer.

    Other Parameters:
        fed: rows of tokens, Int[T], each in [0, classes), and the label that follows them, or one
            for each token.

    References:
        McMahan et al., AISTATS 2017.
    """
    where = "models.lstm"
    every = _of_tokens(where, fed)
    cells = checks.as_tuple(where, cells=cells)
    numbers: dict[str, Any] = {f"cells[{i}]": n for i, n in enumerate(cells)}
    checks.require_integer(where, embedding=embedding, **numbers)
    if not cells:
        checks.fail(where, "a layer at least", "cells=()")
    return flax(fed, _Lstm(embedding, cells, fed.classes, every), batched=False)


def gpt(
    fed: Federation, width: int = 64, layers: int = 2, heads: int = 4, dropout: float = 0.0
) -> Task:
    """A small transformer that looks back: learned positions, LayerNorm before attention and before
    two dense layers with GELU.

    Args:
        width: numbers for a token; a multiple of `heads`.
        layers: of attention and dense layers.
        heads: of attention.
        dropout: in [0, 1), in training; each row of each step has its own.

    Other Parameters:
        fed: as in `lstm`.

    References:
        Radford et al., 2019 (GPT-2), without tied embeddings: a table that is used twice has no
        book-kept gradient.
    """
    where = "models.gpt"
    every = _of_tokens(where, fed)
    checks.require_integer(where, width=width, layers=layers, heads=heads)
    checks.require_nonnegative(where, single=True, dropout=dropout)
    if dropout >= 1:
        checks.fail(where, "dropout in [0, 1)", f"{dropout!r}")
    if width % heads:
        checks.fail(where, f"a width that is a multiple of heads={heads}", f"width={width}")
    return flax(fed, _Gpt(width, layers, heads, float(dropout), fed.classes, every), batched=False)


def _of_tokens(where, fed) -> bool:
    """Whether the labels are of every token; refuses rows that hold none."""
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    if fed.x.ndim != 2 or fed.x.dtype.kind != "i":
        checks.fail(
            where,
            "rows of tokens, Int32[T]",
            f"{fed.x.dtype}{list(fed.x.shape[1:])}",
            "jfl.datasets.shakespeare() has such rows.",
        )
    return fed.y.ndim == 2


def resnet18(fed: Federation, width: int = 64) -> Task:
    """ResNet-18 for small images, with GroupNorm in the place of BatchNorm; images [H, W] or
    [H, W, C].

    Other Parameters:
        fed: gives the shape of an image and the number of classes.
        width: channels of the first stage, even; 64 has 11 million parameters.

    References:
        He et al., CVPR 2016, with the 3 x 3 stem for 32 x 32 pixels; Wu and He, ECCV 2018.
    """
    where = "models.resnet18"
    checks.require_type(where, Federation, "jfl.federate", fed=fed)
    if len(fed.x.shape) not in (3, 4):
        checks.fail(where, "images [H, W] or [H, W, C]", f"rows of shape {tuple(fed.x.shape[1:])}")
    checks.require_integer(where, min_value=2, width=width)
    if width % 2 or (width > 64 and width % 64):
        checks.fail(where, "an even width, or a multiple of 64", f"width={width}")
    return flax(fed, _ResNet(width, (2, 2, 2, 2), fed.classes), target="class", batched=False)


def cnn(fed: Federation, channels: Sequence[int] = (16, 32), dense: int = 128) -> Task:
    """3 x 3 convolutions, each with ReLU and 2 x 2 max pooling, then one dense layer; images [H, W]
    or [H, W, C]."""
    checks.require_type("models.cnn", Federation, "jfl.federate", fed=fed)
    channels = checks.as_tuple("models.cnn", channels=channels)
    if len(fed.x.shape) not in (3, 4):
        checks.fail(
            "models.cnn", "images [H, W] or [H, W, C]", f"rows of shape {tuple(fed.x.shape[1:])}"
        )
    checks.require_integer(
        "models.cnn", dense=dense, **{f"channels[{i}]": c for i, c in enumerate(channels)}
    )
    if min(fed.x.shape[1:3]) < 2 ** len(channels):
        checks.fail(
            "models.cnn",
            f"images of at least {2 ** len(channels)} pixels a side for {len(channels)} poolings",
            f"{tuple(fed.x.shape[1:3])}",
        )
    return flax(fed, _Cnn(channels, dense, fed.classes), target="class", batched=False)
