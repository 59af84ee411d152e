"""wideresnet, vit and gpt against plain JAX, and their private gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import flat

import jfl
from jfl.core.records import Batch
from jfl.gradients import per_example
from jfl.models import tasks

KEY = jax.random.key(0)
CLASSES = 3


def images():
    r = np.random.default_rng(0)
    x, y = r.normal(size=(24, 8, 8, 3)), r.integers(0, CLASSES, 24)
    return jfl.federate((x, y, x[:4], y[:4]), jfl.partition.iid(4))


def text():
    r = np.random.default_rng(0)
    x, y = r.integers(0, 7, (24, 5)), r.integers(0, 7, (24, 5))
    return jfl.federate(jfl.datasets.arrays(x, y, x[:4], y[:4], classes=7), jfl.partition.iid(4))


def norm(x, p, axes, epsilon=1e-6):
    """Normalise over axes, which keep their dimensions."""
    centred = x - x.mean(axes, keepdims=True)
    normed = centred / jnp.sqrt(jnp.square(centred).mean(axes, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + (-1,)
    return normed.reshape(*x.shape) * p["scale"].reshape(shape) + p["bias"].reshape(shape)


def dense(x, p):
    return jnp.dot(x, p["kernel"]) + p["bias"].reshape((1,) * (x.ndim - 1) + (-1,))


def transformer(x, p, mask):
    """Apply the blocks of a transformer with two heads to x [T, width]."""
    for i in range(sum(name.startswith("_Block") for name in p)):
        block = p[f"_Block_{i}"]
        attention = block["MultiHeadDotProductAttention_0"]
        h = norm(x, block["LayerNorm_0"], 1)
        heads = []
        for head in range(2):
            q, k, v = (
                h @ attention[n]["kernel"][:, head] + attention[n]["bias"][head][None]
                for n in ("query", "key", "value")
            )
            scores = jnp.where(mask, q @ k.T / np.sqrt(q.shape[1]), -jnp.inf)
            heads.append(jax.nn.softmax(scores, axis=1) @ v @ attention["out"]["kernel"][head])
        x = x + sum(heads) + attention["out"]["bias"][None]
        wide = dense(norm(x, block["LayerNorm_1"], 1), block["Dense_0"])
        x = x + dense(jax.nn.gelu(wide), block["Dense_1"])
    return norm(x, p["LayerNorm_0"], 1)


def plain_gpt(p, x):
    h = p["Embed_0"]["embedding"][x] + p["positions"]
    h = transformer(h, p, np.tril(np.ones((len(x), len(x)), bool)))
    return h @ p["Embed_0"]["embedding"].T if "Dense_0" not in p else dense(h, p["Dense_0"])


def plain_vit(p, x):
    patches = [x[i : i + 4, j : j + 4].reshape(-1) for i in (0, 4) for j in (0, 4)]
    h = dense(jnp.stack(patches), p["Dense_0"]) + p["positions"]
    h = transformer(h, p, np.ones((len(h), len(h)), bool))
    return dense(h.mean(0), p["Dense_1"])


def plain_wideresnet(p, x):
    """Depth 10, so one block in each of three stages."""
    layers = iter(range(10)), iter(range(10))

    def conv(x, stride=1):
        layer = p[f"_StandardizedConv_{next(layers[0])}"]
        kernel = np.asarray(layer["kernel"], float).reshape(-1, layer["kernel"].shape[-1])
        kernel = (kernel - kernel.mean(0)) / np.sqrt(len(kernel) * kernel.var(0))
        kernel = jnp.asarray(
            kernel.reshape(layer["kernel"].shape) * np.asarray(layer["gain"]), jnp.float32
        )
        names = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x[None], kernel, (stride, stride), "SAME", dimension_numbers=names
        )
        return y[0] + layer["bias"][None, None]

    def group_norm(x):
        layer = p[f"GroupNorm_{next(layers[1])}"]
        groups = jax.nn.relu(x).reshape(*x.shape[:2], 16, -1)
        centred = groups - groups.mean((0, 1, 3), keepdims=True)
        normed = centred / jnp.sqrt(jnp.square(centred).mean((0, 1, 3), keepdims=True) + 1e-5)
        return normed.reshape(x.shape) * layer["scale"][None, None] + layer["bias"][None, None]

    x = conv(x)
    for stride in (1, 2, 2):
        y = conv(group_norm(conv(group_norm(x), stride)))
        x = y + conv(group_norm(x), stride)
    return dense(group_norm(x).mean((0, 1)), p["Dense_0"])


# name -> the federation, the task, the plain function
MODELS = dict(
    wideresnet=(images, lambda fed: jfl.models.wideresnet(fed, 10, 1), plain_wideresnet),
    vit=(images, lambda fed: jfl.models.vit(fed, 4, 8, 2, 2), plain_vit),
    gpt=(text, lambda fed: jfl.models.gpt(fed, 8, 2, 2), plain_gpt),
    tied_gpt=(text, lambda fed: jfl.models.gpt(fed, 8, 2, 2, tied=True), plain_gpt),
)
every_model = pytest.mark.parametrize("name", MODELS)


def problem(name):
    """Return a federation, its task, and parameters without equal numbers."""
    federation, make, _ = MODELS[name]
    fed = federation()
    task, r = make(fed), np.random.default_rng(1)
    shift = lambda w: w + (0.1 * r.normal(size=w.shape)).astype(w.dtype)
    return fed, task, jax.tree.map(shift, task.init(KEY))


@every_model
def test_equal_to_a_plain_function(name):
    fed, task, params = problem(name)
    for x in fed.x[:2]:
        want = MODELS[name][2](params, x)
        np.testing.assert_allclose(task.predict(params, x), want, rtol=2e-4, atol=2e-5)


@every_model
def test_the_private_gradient_equals_that_of_formed_gradients(name):
    """Every layer is book-kept, and about half of the rows are clipped."""
    fed, task, params = problem(name)
    rows, weight = Batch(fed.x[:6], fed.y[:6], jnp.ones(6, bool)), jnp.ones(6)
    one = jax.jit(jax.vmap(jax.grad(lambda p, x, y: task.loss(p, x, y)), (None, 0, 0)))
    formed = jax.tree.leaves(one(params, rows.x, rows.y))
    bound = float(np.median(np.sqrt(sum(np.square(g).reshape(6, -1).sum(1) for g in formed))))
    chain = jfl.chain(jfl.clip_l2(bound), jfl.total())
    found = {}
    for path in ("bookkeeping", "vmap"):  # bookkeeping rejects a model with a leaf without a rule
        grad = jfl.private_grad(task.loss, chain, path=path)
        found[path] = jax.jit(lambda p, grad=grad: per_example.clipped_sum(grad, p, rows, weight))(
            params
        )
    (book, _), (vmap, _) = found["bookkeeping"], found["vmap"]
    np.testing.assert_allclose(flat(book.value), flat(vmap.value), rtol=1e-3, atol=1e-5 * bound)
    assert book.clipped == vmap.clipped and 0 < book.clipped < 6


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("name", ["wideresnet", "tied_gpt"])
def test_weights_from_a_file(name, suffix, tmp_path):
    """A task starts with weights from a file, also those named "value"."""
    if suffix == "safetensors":
        save = pytest.importorskip("safetensors.numpy").save_file
    else:
        save = lambda weights, path: np.savez(path, **weights)
    _, task, params = problem(name)
    paths = jax.tree_util.tree_leaves_with_path(params)
    by_path = {jax.tree_util.keystr(k, simple=True, separator="."): np.asarray(v) for k, v in paths}
    save(by_path, tmp_path / f"weights.{suffix}")
    read = jfl.models.read_params(tmp_path / f"weights.{suffix}")
    started = jfl.models.trainable(task, params=read)
    assert np.array_equal(flat(started.init(KEY)), flat(params))


@pytest.mark.slow
@every_model
def test_a_few_rounds_in_half_precision(name):
    fed, task, _ = problem(name)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
    algorithm = jfl.algorithms.fedavg(
        jfl.private_grad(task.loss, chain, compute="bfloat16"),
        lr=0.1,
        steps=2,
        batch=jfl.batches.without_replacement(2),
    )
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(4))
    assert per_example.gradient_path(plan) == "bookkeeping in bfloat16"
    assert jfl.guarantee(plan, 2, delta=1e-5).status == "proved"
    assert np.isfinite(flat(jfl.simulate(KEY, plan, 2).params)).all()


def test_a_standardised_kernel_of_equal_numbers_is_finite():
    """Its gradient too, although its norm is 0 before the division."""
    kernel = jnp.ones((3, 3, 2, 4))
    back = jax.grad(lambda k: jnp.square(tasks._standardize(k) - 1).sum())(kernel)
    assert not np.any(tasks._standardize(kernel)) and np.isfinite(back).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jfl.models.wideresnet(images(), depth=15), "a depth of 10, 16"),
        (lambda: jfl.models.wideresnet(images(), depth=4), "a depth of 10, 16"),
        (lambda: jfl.models.wideresnet(text()), "images"),
        (lambda: jfl.models.vit(images(), patch=3), "a patch that divides"),
        (lambda: jfl.models.vit(images(), width=8, heads=3), "a multiple of heads=3"),
        (lambda: jfl.models.vit(text()), "images"),
        (lambda: jfl.models.gpt(text(), tied=2), "tied"),
    ],
)
def test_models_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make()
