"""Tasks from ready-made flax models, or from your own loss of one example."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..core import checks
from ..core.records import Federation, Fn, Metric, Metrics, Task, named
from ..kernels.conv import conv_same, relu_pool
from . import frameworks, losses
from .flax_adapters import flax
from .targets import TARGETS

__all__ = ["logistic", "mlp", "cnn", "lstm", "gpt", "vit", "resnet18", "wideresnet"]


@named("models.fixed")
def _fixed_params(key, *, params):
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
    """Return a task with your own parameters and loss.

    Args:
        params: the initial parameters, a pytree of float arrays; or a pure function key -> params.
            For modules of flax and equinox see `jfl.models`.
        loss: a pure function (params, x, y) -> scalar of one example; or (params, x, y, key), which
            may draw random numbers. The key of a row is derived from the seed, the round, the
            client and the step.
        predict: a pure function (params, x) -> output of one example; without it no accuracy is
            computed.
        evaluation: the loss of test rows, (params, x, y) -> scalar, if it differs from `loss`, for
            example because it leaves out dropout. None uses `loss`. If `loss` takes a key, a test
            row gets the same key in every evaluation.
        metrics: further metrics of the test rows, by name. Each is a pure function (params, x, y)
            that returns a number, whose mean over test rows is reported, or a pair of a sum and its
            number of terms; or a jfl.Metric, which also transforms the mean. Results are in
            the field `custom` of a run's metrics.
        target: the kind of y, which determines when an output is correct: "class" (the largest
            logit), "tokens" (each token of a sequence, except for negative ones), "labels" (the
            sign of each of several logits) or "numbers" (no accuracy).

    Raises:
        ValueError: for parameters that cannot be trained, such as modules, leaves that are not
            floats, and the statistics of BatchNorm.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> t = task(jnp.zeros(3), lambda w, x, y: (x @ w - y) ** 2)
        >>> t.init(jax.random.key(0)).shape
        (3,)
    """
    scalar = "(params, x, y) -> scalar"
    frameworks.function("task", "loss", loss, scalar)
    if predict is not None:
        frameworks.function("task", "predict", predict, "(params, x) -> output")
    if evaluation is not None:
        frameworks.function("task", "evaluation", evaluation, scalar)
    if evaluation is not None and losses.takes_key(evaluation):
        checks.fail("task", "evaluation, a function (params, x, y)", "one that takes a key")
    checks.require_one_of("task", TARGETS, target=target)
    draws = callable(params) and frameworks.library(params) is None
    if draws:
        init = _as_fn(params)
    else:
        init = Fn(_fixed_params, dict(params=frameworks.parameters("task", params)))
    metrics = _as_metrics(metrics or {})
    return Task(init, _as_fn(loss), _as_fn(predict), _as_fn(evaluation), metrics or None, target)


def _as_fn(function: Any) -> Any:
    """Return a function as an Fn; None stays None."""
    return function if function is None or isinstance(function, Fn) else Fn(function)


def _as_metrics(metrics: Mapping[str, Callable | Metric]) -> dict[str, Metric]:
    """Check custom metrics, and return each as a Metric."""
    if not isinstance(metrics, Mapping):
        checks.fail("task", "metrics, a dict of names and functions", checks.short_repr(metrics))
    reserved = {field.name for field in dataclasses.fields(Metrics)}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name or name in reserved:
            checks.fail(
                "task",
                "a metric name that jfl does not use",
                repr(name),
                f"Reserved names: {', '.join(sorted(reserved))}.",
            )
        if not isinstance(metric, Metric):
            frameworks.function("task", f"metric {name!r}", metric, "(params, x, y) -> number")
    return {
        name: m if isinstance(m, Metric) else Metric(_as_fn(m))
        for name, m in sorted(metrics.items())
    }


class _Mlp(nn.Module):
    hidden: tuple
    classes: int

    @nn.compact
    def __call__(self, x):
        x = x.reshape(-1)
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        kernel_init = nn.initializers.lecun_normal() if self.hidden else nn.initializers.zeros
        return nn.Dense(self.classes, kernel_init=kernel_init)(x)


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
    """A layer of LSTM cells, from x [T, features] to outputs [T, width].

    One matrix product computes the inputs of all time steps, and a scan the states.
    """

    width: int

    @nn.compact
    def __call__(self, x):
        four = 4 * self.width
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], four))
        recurrent = self.param("recurrent", nn.initializers.orthogonal(), (self.width, four))
        bias = self.param("bias", nn.initializers.zeros, (four,))

        def step(state, inputs):
            cell, output = state
            input_gate, forget_gate, new, output_gate = jnp.split(inputs + output @ recurrent, 4)
            cell = nn.sigmoid(forget_gate) * cell + nn.sigmoid(input_gate) * jnp.tanh(new)
            output = nn.sigmoid(output_gate) * jnp.tanh(cell)
            return (cell, output), output

        zeros = jnp.zeros(self.width, kernel.dtype)
        return jax.lax.scan(step, (zeros, zeros), x @ kernel + bias[None])[1]


class _Lstm(nn.Module):
    embedding: int
    hidden: tuple
    classes: int
    every: bool  # logits at every position, or only at the last

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(self.classes, self.embedding)(x)
        for width in self.hidden:
            x = _LstmLayer(width)(x)
        return nn.Dense(self.classes)(x if self.every else x[-1])


class _Block(nn.Module):
    """A layer of a transformer, from x [T, width] to the same shape: attention and dense layers."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x, mask, train: bool):
        width = x.shape[-1]
        drop = lambda x: nn.Dropout(self.dropout, deterministic=not train)(x)
        attend = nn.MultiHeadDotProductAttention(self.heads)
        x = x + drop(attend(nn.LayerNorm()(x), mask=mask))
        wide = nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(width)(wide))


def _add_positions(module, x):
    """Add a learned embedding of each position to x [T, width]."""
    return x + module.param("positions", nn.initializers.normal(0.02), x.shape)


class _Gpt(nn.Module):
    width: int
    layers: int
    heads: int
    dropout: float
    classes: int
    every: bool
    tied: bool

    @nn.compact
    def __call__(self, x, train: bool):
        causal = nn.make_causal_mask(jnp.ones(len(x)))
        embed = nn.Embed(self.classes, self.width)
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = drop(_add_positions(self, embed(x)))
        for _ in range(self.layers):
            x = _Block(self.heads, self.dropout)(x, causal, train)
        x = nn.LayerNorm()(x if self.every else x[-1])
        return embed.attend(x) if self.tied else nn.Dense(self.classes)(x)


class _Vit(nn.Module):
    patch: int
    width: int
    layers: int
    heads: int
    dropout: float
    classes: int

    @nn.compact
    def __call__(self, x, train: bool):
        x = x if x.ndim == 3 else x[..., None]
        side, (height, width, channels) = self.patch, x.shape
        x = x.reshape(height // side, side, width // side, side, channels)
        x = x.swapaxes(1, 2).reshape(-1, side * side * channels)
        x = _add_positions(self, nn.Dense(self.width)(x))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        for _ in range(self.layers):
            x = _Block(self.heads, self.dropout)(x, None, train)
        return nn.Dense(self.classes)(nn.LayerNorm()(x).mean(0))


def _group_norm(features):
    """Return GroupNorm for one image [H, W, C]; by default flax would treat axis 0 as the batch."""
    return nn.GroupNorm(num_groups=min(32, features // 2), reduction_axes=(-3, -2, -1))


class _Residual(nn.Module):
    """Two convolutions with GroupNorm, and a skip connection."""

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


class _StandardizedConv(nn.Module):
    """A convolution whose kernel has mean 0 and norm 1 for each output channel.

    A learned gain and a bias per channel follow.
    """

    features: int
    size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x):
        shape = (self.size, self.size, x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        gain = self.param("gain", nn.initializers.ones, (self.features,))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        y = jax.lax.conv_general_dilated(
            x[None],
            _standardize(kernel),
            (self.stride, self.stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )[0]
        return y * gain[None, None] + bias[None, None]


def _standardize(kernel):
    """Return a kernel [kh, kw, C, O] with mean 0 and norm 1 for each output channel."""
    wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    centred = wide - wide.mean((0, 1, 2), keepdims=True)
    squares = jnp.square(centred).sum((0, 1, 2), keepdims=True)
    return (centred * jax.lax.rsqrt(jnp.maximum(squares, 1e-4))).astype(kernel.dtype)


class _WideResNet(nn.Module):
    depth: int
    width: int
    classes: int

    @nn.compact
    def __call__(self, x):
        norm = lambda x: nn.GroupNorm(16, epsilon=1e-5, reduction_axes=(-3, -2, -1))(nn.relu(x))
        x = x if x.ndim == 3 else x[..., None]
        x = _StandardizedConv(16, 3)(x)
        for stage in range(3):
            features = 16 * self.width * 2**stage
            for block in range((self.depth - 4) // 6):
                stride = 2 if stage and not block else 1
                y = _StandardizedConv(features, 3, stride)(norm(x))
                y = _StandardizedConv(features, 3)(norm(y))
                x = y + (x if block else _StandardizedConv(features, 1, stride)(norm(x)))
        return nn.Dense(self.classes)(norm(x).mean((0, 1)))


def logistic(fed: Federation) -> Task:
    """Return softmax regression, with parameters that start at zero.

    For L2 regularisation, pass l2 to `grad` or `private_grad`.

    Args:
        fed: the federation, which determines the shape of a row and the number of classes.
    """
    return flax(fed, _Mlp((), fed.classes), target="class", batched=False)


def mlp(fed: Federation, hidden: tuple[int, ...] = (64,)) -> Task:
    """Return a multilayer perceptron: dense layers with ReLU between them.

    Args:
        fed: the federation, which determines the shape of a row and the number of classes.
        hidden: widths of the hidden layers.
    """
    hidden = _widths("models.mlp", hidden=hidden)
    return flax(fed, _Mlp(hidden, fed.classes), target="class", batched=False)


def lstm(fed: Federation, embedding: int = 8, cells: tuple[int, ...] = (256, 256)) -> Task:
    """Return an LSTM that predicts the next token.

    The model consists of an embedding, layers of LSTM cells, and a dense layer. The dense layer
    gets the last output of the cells if a row has one label, and all outputs if each token has a
    label (y Int[T]). The defaults are those of McMahan et al. for the plays of
    `datasets.shakespeare`.

    Args:
        embedding: size of the embedding of a token.
        cells: number of LSTM cells of each layer.

    Other Parameters:
        fed: a federation whose rows are tokens Int[T] in [0, classes), each with the next token as
            its label, or with one label per token.

    References:
        McMahan et al., AISTATS 2017.
    """
    where = "models.lstm"
    checks.require_integer(where, embedding=embedding)
    cells = _widths(where, cells=cells)
    if not cells:
        checks.fail(where, "at least one layer", "cells=()")
    every = _has_label_per_token(where, fed)
    return flax(fed, _Lstm(embedding, cells, fed.classes, every), batched=False)


def gpt(
    fed: Federation,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
) -> Task:
    """Return a small causal transformer that predicts the next token, like GPT-2.

    Position embeddings are learned, and LayerNorm precedes attention and dense layers.

    Args:
        width: size of the embedding of a token; a multiple of `heads`.
        layers: number of blocks, each with an attention layer and dense layers.
        heads: number of attention heads.
        dropout: dropout rate in training, in [0, 1); each row of each step has a separate mask.
        tied: whether the embedding of tokens is also the output layer, as in GPT-2. False uses a
            separate dense layer.

    Other Parameters:
        fed: as in `lstm`.

    References:
        Radford et al., 2019 (GPT-2).
    """
    where = "models.gpt"
    _check_transformer(where, width, layers, heads, dropout)
    checks.require_one_of(where, (True, False), tied=tied)
    every = _has_label_per_token(where, fed)
    module = _Gpt(width, layers, heads, float(dropout), fed.classes, every, tied)
    return flax(fed, module, batched=False)


def vit(
    fed: Federation,
    patch: int = 4,
    width: int = 192,
    layers: int = 6,
    heads: int = 3,
    dropout: float = 0.0,
) -> Task:
    """Return a small vision transformer for images [H, W] or [H, W, C].

    The blocks are those of `gpt` without the causal mask, position embeddings are learned, and the
    output layer gets the mean over patches.

    Args:
        fed: the federation, which determines the shape of an image and the number of classes.

    Other Parameters:
        patch: side of a square patch in pixels, which divides both sides of the images.
        width: size of the embedding of a patch; a multiple of `heads`.
        layers: number of blocks. With 12, and otherwise the defaults, the model has 5 million
            parameters.
        heads: number of attention heads.
        dropout: as in `gpt`.

    References:
        Dosovitskiy et al., ICLR 2021; Beyer et al., 2022, for the mean instead of a class token.
    """
    where = "models.vit"
    _check_transformer(where, width, layers, heads, dropout)
    checks.require_integer(where, patch=patch)
    _require_images(where, fed)
    if any(side % patch for side in fed.x.shape[1:3]):
        sides = f"sides of {fed.x.shape[1]} and {fed.x.shape[2]} pixels"
        checks.fail(where, "a patch that divides both sides of the images", f"{patch} for {sides}")
    module = _Vit(patch, width, layers, heads, float(dropout), fed.classes)
    return flax(fed, module, target="class", batched=False)


def _check_transformer(where, width, layers, heads, dropout):
    """Check the arguments that `gpt` and `vit` share."""
    checks.require_integer(where, width=width, layers=layers, heads=heads)
    checks.require_nonnegative(where, single=True, dropout=dropout)
    if dropout >= 1 or width % heads:
        checks.fail(
            where,
            f"dropout in [0, 1), and a width that is a multiple of heads={heads}",
            f"dropout={dropout!r}, width={width}",
        )


def _widths(where, **widths) -> tuple:
    """Check the widths of layers, and return them as a tuple."""
    ((name, _),) = widths.items()
    widths = checks.as_tuple(where, **widths)
    checks.require_integer(where, **{f"{name}[{i}]": width for i, width in enumerate(widths)})
    return widths


def _has_label_per_token(where, fed) -> bool:
    """Require rows of tokens, and return whether every token has a label."""
    if fed.x.ndim != 2 or fed.x.dtype.kind != "i":
        checks.fail(
            where,
            "rows of tokens, Int32[T]",
            f"{fed.x.dtype}{list(fed.x.shape[1:])}",
            "jfl.datasets.shakespeare() has such rows.",
        )
    return fed.y.ndim == 2


def resnet18(fed: Federation, width: int = 64) -> Task:
    """Return ResNet-18 for small images [H, W] or [H, W, C], with GroupNorm instead of BatchNorm.

    Other Parameters:
        fed: the federation, which determines the shape of an image and the number of classes.
        width: number of channels of the first stage: an even number up to 64, or a multiple of 64.
            With 64, the model has 11 million parameters.

    References:
        He et al., CVPR 2016, with the 3 x 3 stem for 32 x 32 pixels; Wu and He, ECCV 2018.
    """
    where = "models.resnet18"
    checks.require_integer(where, min_value=2, width=width)
    if width % 2 or (width > 64 and width % 64):
        checks.fail(where, "an even width, or a multiple of 64", f"width={width}")
    _require_images(where, fed)
    return flax(fed, _ResNet(width, (2, 2, 2, 2), fed.classes), target="class", batched=False)


def wideresnet(fed: Federation, depth: int = 16, width: int = 4) -> Task:
    """Return a wide ResNet for small images, with GroupNorm and weight standardisation.

    This is the model with which De et al. train CIFAR-10 privately. GroupNorm has 16 groups and
    follows the ReLU, and each output channel of a kernel is standardised.

    Other Parameters:
        fed: the federation, which determines the shape of an image and the number of classes.
        depth: number of layers, 6 n + 4 for n blocks per stage.
        width: factor by which the stages are wider than 16, 32 and 64 channels. With the defaults,
            the model has 2.7 million parameters.

    References:
        De et al., 2022; Zagoruyko and Komodakis, BMVC 2016; Qiao et al., 2019 (weight
        standardisation).
    """
    where = "models.wideresnet"
    checks.require_integer(where, depth=depth, width=width)
    if depth < 10 or depth % 6 != 4:
        checks.fail(where, "a depth of 10, 16, 22, 28, ...", f"depth={depth}")
    _require_images(where, fed)
    return flax(fed, _WideResNet(depth, width, fed.classes), target="class", batched=False)


def cnn(fed: Federation, channels: Sequence[int] = (16, 32), dense: int = 128) -> Task:
    """Return a CNN for images [H, W] or [H, W, C].

    Each 3 x 3 convolution is followed by ReLU and 2 x 2 max pooling. One hidden dense layer and the
    output layer follow.

    Args:
        fed: the federation, which determines the shape of an image and the number of classes.

    Other Parameters:
        channels: the number of channels of each convolution.
        dense: the width of the hidden dense layer.
    """
    checks.require_integer("models.cnn", dense=dense)
    channels = _widths("models.cnn", channels=channels)
    _require_images("models.cnn", fed, min_side=2 ** len(channels))
    return flax(fed, _Cnn(channels, dense, fed.classes), target="class", batched=False)


def _require_images(where, fed, min_side=1):
    """Require a federation whose rows are images with sides of at least `min_side` pixels."""
    if len(fed.x.shape) not in (3, 4) or min(fed.x.shape[1:3]) < min_side:
        checks.fail(
            where,
            f"images [H, W] or [H, W, C] with sides of at least {min_side} pixels",
            f"rows of shape {tuple(fed.x.shape[1:])}",
        )
