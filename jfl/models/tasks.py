"""What is learned: ready-made flax models, or any pure loss of one example."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from ..core import checks
from ..core.records import Federation, Fn, Task, named
from ..kernels.conv import conv_same, relu_pool
from . import frameworks

__all__ = ["logistic", "mlp", "cnn", "lstm"]


@named("models.fixed")
def _fixed(key, *, params):
    return params


def task(params: Any, loss: Callable | None, predict: Callable | None = None) -> Task:
    """A user's own problem.

    Args:
        params: the starting point, a pytree of floats; or a pure function key -> params.  An
            equinox module whose leaves are all arrays of floats is such a pytree; of others, and of
            flax.nnx, pass the part that is.
        loss: pure (params, x, y) -> scalar, for one example.
        predict: pure (params, x) -> logits of one example; without it no accuracy is computed.

    Raises:
        ValueError: for what cannot be trained (modules, leaves that are no floats, statistics of
            BatchNorm).

    Example:
        >>> t = task(jnp.zeros(3), lambda w, x, y: (x @ w - y) ** 2)
        >>> t.init(jax.random.key(0)).shape
        (3,)
    """
    if not callable(loss):
        checks.fail("task", "loss, a pure function (params, x, y) -> scalar", checks.shown(loss))
    if predict is not None and not callable(predict):
        checks.fail(
            "task", "predict, a pure function (params, x) -> logits, or None", checks.shown(predict)
        )
    frameworks.function("task", "loss", loss, "(params, x, y) -> scalar")
    frameworks.function("task", "predict", predict, "(params, x) -> logits")
    draws = callable(params) and frameworks.library(params) is None
    init = Fn(params) if draws else Fn(_fixed, dict(params=frameworks.parameters("task", params)))
    return Task(
        init, loss if isinstance(loss, Fn) else Fn(loss), None if predict is None else Fn(predict)
    )


@named("models.init")
def _init(key, *, module, shape, dtype="float32"):
    return module.init(key, jnp.zeros(shape, dtype))["params"]


@named("models.predict")
def _predict(params, x, *, module):
    return module.apply({"params": params}, x)


@named("models.cross_entropy")
def _cross_entropy(params, x, y, *, module):
    return cross_entropy(_predict(params, x, module=module), y)


def cross_entropy(logits: jax.Array, label: ArrayLike) -> jax.Array:
    """Minus the log-probability of a label, of one example.

    Shapes:
        logits: Float[classes]; label: Int[], in range(classes).
    """
    label = jnp.asarray(label)
    pick = _looked_up if jax.default_backend() == "cpu" else _compared
    return jax.nn.logsumexp(logits) - pick(logits, label)


def _looked_up(logits, label):
    return jnp.take_along_axis(logits, label[None], 0)[0]


def _compared(logits, label):
    """The same without a lookup, which costs an accelerator a launch, and its derivative another: a
    scatter."""
    classes = logits.shape[0]
    is_label = jnp.arange(classes) == jnp.where(label < 0, label + classes, label)
    found = jnp.where(is_label, logits, 0).sum()
    is_known = (-classes <= label) & (label < classes)
    return jnp.where(is_known, found, jnp.nan)


def classifier(fed: Federation, module: nn.Module) -> Task:
    """Cross-entropy of any flax module that maps one example to `fed.classes` logits."""
    checks.kind("models", Federation, "jfl.federate", fed=fed)
    if fed.classes < 2:
        checks.fail(
            "models",
            "a federation with class labels",
            f"classes={fed.classes}",
            "For other problems use jfl.task(params, loss).",
        )
    if not isinstance(module, nn.Module):
        checks.fail(
            "models",
            "a flax.linen module",
            checks.shown(module),
            "For others use jfl.task(params, loss, predict).",
        )
    shape, dtype = tuple(fed.x.shape[1:]), str(fed.x.dtype)

    def whole(key):
        variables = module.init(key, jnp.zeros(shape, dtype))
        return variables, module.apply(variables, jnp.zeros(shape, dtype))

    try:
        variables, logits = jax.eval_shape(whole, jax.random.key(0))
    except Exception as error:  # of somebody's module
        frameworks.explain("models", error, f"x is {dtype}{list(shape)}")
        raise
    if "batch_stats" in variables:
        checks.fail(
            "models",
            "a module without BatchNorm",
            "variables in batch_stats",
            frameworks.BATCH_NORM,
        )
    if set(variables) != {"params"}:
        checks.fail(
            "models",
            "a module with parameters, and no other variables",
            f"collections {sorted(variables)}",
            "For others use jfl.task(params, loss, predict).",
        )
    if logits.shape != (fed.classes,):
        checks.fail(
            "models",
            f"a module from one example {shape} to logits ({fed.classes},)",
            f"{logits.shape}",
            "It is called on one example, without a batch axis.",
        )
    data = dict(module=module)
    # floats are not named: the identity of a plan does not hang on a default
    tokens = {} if dtype == "float32" else dict(dtype=dtype)
    return Task(
        Fn(_init, static=dict(data, shape=shape, **tokens)),
        Fn(_cross_entropy, static=data),
        Fn(_predict, static=data),
    )


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


class _Lstm(nn.Module):
    embedding: int
    hidden: tuple
    classes: int

    @nn.compact
    def __call__(self, x):
        x = nn.Embed(self.classes, self.embedding)(x)
        for width in self.hidden:
            x = nn.RNN(nn.OptimizedLSTMCell(width))(x)
        return nn.Dense(self.classes)(x[-1])


def logistic(fed: Federation) -> Task:
    """Softmax regression, started at zero.  For L2 regularisation give l2 to `grad` or
    `private_grad`."""
    checks.kind("models.logistic", Federation, "jfl.federate", fed=fed)
    return classifier(fed, _Mlp((), fed.classes))


def mlp(fed: Federation, hidden: tuple[int, ...] = (64,)) -> Task:
    """Dense layers with ReLU.

    Args:
        fed: gives the shape of a row and the number of classes.
        hidden: widths of the hidden layers.
    """
    checks.kind("models.mlp", Federation, "jfl.federate", fed=fed)
    hidden = checks.several("models.mlp", hidden=hidden)
    for width in hidden:
        checks.whole("models.mlp", hidden=width)
    return classifier(fed, _Mlp(hidden, fed.classes))


def lstm(fed: Federation, embedding: int = 8, hidden: tuple[int, ...] = (256, 256)) -> Task:
    """The token that comes next: an embedding, layers of LSTM cells, and one dense layer on the
    last state.

    The defaults are those of the reference, for the plays of `datasets.shakespeare`.

    Other Parameters:
        fed: rows of tokens, Int[T], each in [0, classes), and the label that follows them.
        embedding: numbers for a token.
        hidden: widths of the layers.

    References:
        McMahan et al., AISTATS 2017.
    """
    where = "models.lstm"
    checks.kind(where, Federation, "jfl.federate", fed=fed)
    if fed.x.ndim != 2 or fed.x.dtype.kind != "i":
        checks.fail(
            where,
            "rows of tokens, Int32[T]",
            f"{fed.x.dtype}{list(fed.x.shape[1:])}",
            "jfl.datasets.shakespeare() has such rows.",
        )
    hidden = checks.several(where, hidden=hidden)
    checks.whole(where, embedding=embedding, **{f"hidden[{i}]": h for i, h in enumerate(hidden)})
    if not hidden:
        checks.fail(where, "a layer at least", "hidden=()")
    return classifier(fed, _Lstm(embedding, hidden, fed.classes))


def cnn(fed: Federation, channels: Sequence[int] = (16, 32), dense: int = 128) -> Task:
    """3 x 3 convolutions, each with ReLU and 2 x 2 max pooling, then one dense layer; images [H, W]
    or [H, W, C]."""
    checks.kind("models.cnn", Federation, "jfl.federate", fed=fed)
    channels = checks.several("models.cnn", channels=channels)
    if len(fed.x.shape) not in (3, 4):
        checks.fail(
            "models.cnn", "images [H, W] or [H, W, C]", f"rows of shape {tuple(fed.x.shape[1:])}"
        )
    checks.whole("models.cnn", dense=dense, **{f"channels[{i}]": c for i, c in enumerate(channels)})
    if min(fed.x.shape[1:3]) < 2 ** len(channels):
        checks.fail(
            "models.cnn",
            f"images of at least {2 ** len(channels)} pixels a side for {len(channels)} poolings",
            f"{tuple(fed.x.shape[1:3])}",
        )
    return classifier(fed, _Cnn(channels, dense, fed.classes))
