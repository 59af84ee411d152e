"""Kinds of labels, each of which determines a loss, an accuracy and further metrics.

To add a kind of label, write its functions and its entry in `TARGETS`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..core import checks
from ..core.records import Federation, named


class Target(NamedTuple):
    """A kind of label.

    Attributes:
        words: a description of the labels, for messages.
        loss: a function (output, y) -> scalar of one example.
        shape: a function (classes, shape of y) that returns the shape that an output must have.
        hits: a function (output, y) that returns whether an output is correct; for several labels
            per row, how many of them are correct, and their number. None means that there is no
            accuracy.
        metrics: further metrics by name. Each is a pair of functions: one like `hits`, and one that
            maps the mean of its results over test rows to the metric.
    """

    words: str
    loss: Callable
    shape: Callable
    hits: Callable | None = None
    metrics: Mapping = {}


def cross_entropy(logits: jax.Array, label: ArrayLike) -> jax.Array:
    """Return minus the log-probability of a label, for one example.

    Shapes:
        logits: Float[classes]; label: Int[], in range(classes).
    """
    label = jnp.asarray(label)
    logit_of = _logit_by_lookup if jax.default_backend() == "cpu" else _logit_by_comparison
    return jax.nn.logsumexp(logits) - logit_of(logits, label)


def _logit_by_lookup(logits, label):
    """Return logits[label]; NaN if the label is out of range."""
    return jnp.take_along_axis(logits, label[None], 0)[0]


def _logit_by_comparison(logits, label):
    """Return the same as `_logit_by_lookup`, without a gather, which is slow on an accelerator.

    The derivative of a gather, a scatter, is slow as well.
    """
    classes = logits.shape[0]
    is_label = jnp.arange(classes) == jnp.where(label < 0, label + classes, label)
    logit = jnp.where(is_label, logits, 0).sum()
    is_known = (-classes <= label) & (label < classes)
    return jnp.where(is_known, logit, jnp.nan)


def _class_hit(logits, label):
    return jnp.argmax(logits, -1) == label


# --- sequences: y Int[T], a negative one is masked


def _token_losses(logits, tokens):
    """Return the sum of losses over tokens that are not masked, and their number."""
    counted = tokens >= 0
    each = jax.vmap(cross_entropy)(logits, jnp.maximum(tokens, 0))
    return jnp.where(counted, each, 0.0).sum(), counted.sum()


def _mean_token_loss(logits, tokens):
    total, count = _token_losses(logits, tokens)
    return total / jnp.maximum(count, 1)


def _token_hits(logits, tokens):
    counted = tokens >= 0
    return (counted & (jnp.argmax(logits, -1) == tokens)).sum(), counted.sum()


# --- several labels at once: y [labels] of 0 and 1


def _mean_binary_loss(logits, labels):
    return (jax.nn.softplus(logits) - labels * logits).mean()


def _label_hits(logits, labels):
    right = (logits > 0) == (labels > 0.5)
    return right.sum(), right.size


# --- numbers


def _half_square(output, y):
    return 0.5 * jnp.square(output - y).sum()


def _squares(output, y):
    return jnp.square(output - y).mean()


TARGETS = {
    "class": Target("class labels", cross_entropy, lambda classes, y: (classes,), _class_hit),
    "tokens": Target(
        "sequences of tokens, a negative one masked",
        _mean_token_loss,
        lambda classes, y: (*y, classes),
        _token_hits,
        {"perplexity": (_token_losses, jnp.exp)},
    ),
    "labels": Target(
        "several labels, each 0 or 1", _mean_binary_loss, lambda classes, y: y, _label_hits
    ),
    "numbers": Target(
        "numbers",
        _half_square,
        lambda classes, y: y,
        metrics={"rmse": (_squares, jnp.sqrt)},
    ),
}


@named("targets.loss")
def loss_of(output, y, target: str):
    """Return the loss of one example for `target`, a kind of label in `TARGETS`."""
    return TARGETS[target].loss(output, y)


def target_of(where: str, fed: Federation, target: str | None) -> str:
    """Return the kind of labels of a federation: `target`, or the kind that the labels suggest.

    Raises:
        ValueError: if the labels are not of this kind.
    """
    shape, is_integer = tuple(fed.y.shape[1:]), jnp.issubdtype(fed.y.dtype, jnp.integer)
    if target is None:
        target = "numbers" if not fed.classes else ("tokens" if shape else "class")
    checks.require_one_of(where, TARGETS, target=target)
    fits = {
        "class": is_integer and not shape and fed.classes > 1,
        "tokens": is_integer and len(shape) == 1 and fed.classes > 1,
        "labels": len(shape) == 1,
        "numbers": not fed.classes,
    }[target]
    if not fits:
        checks.fail(
            where,
            f"labels for target={target!r}, {TARGETS[target].words}",
            f"y {fed.y.dtype}{list(shape)}, classes={fed.classes}",
            "Class labels are integers [n], tokens Int[n, T] with jfl.datasets.arrays(..., "
            "classes=V), and labels or numbers come with classes=0. For others see target= of "
            "jfl.models.flax, or jfl.task(params, loss).",
        )
    return target
