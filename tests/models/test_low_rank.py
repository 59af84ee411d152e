"""LoRA and FFA-LoRA: equality with merged weights, what is trained, memory, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.problems import make_federation

import jfl
from jfl.gradients.per_example import gradient_path

KEY = jax.random.key(0)


def text():
    tokens = np.random.default_rng(0).integers(0, 20, (12, 9)).astype(np.int32)
    clients = {i: (tokens[3 * i :][:3, :-1], tokens[3 * i :][:3, 1:]) for i in range(4)}
    return jfl.federate(clients, holdout=1 / 3, classes=20)


class Loop(nn.Module):
    """Two equal layers as one loop, with their kernels in one array [2, 3, 3]."""

    @nn.compact
    def __call__(self, x):
        step = lambda layer, x, _: (nn.tanh(layer(inputs=x)), None)
        scan = nn.scan(step, {"params": 0}, split_rngs={"params": True}, length=2)
        return scan(nn.Dense(3, name="layer"), x, None)[0]


PROBLEMS = dict(
    gpt=(text, lambda fed: jfl.models.gpt(fed, 8, 1, 2)),
    dropout=(text, lambda fed: jfl.models.gpt(fed, 8, 1, 2, dropout=0.5)),
    loop=(lambda: make_federation(classes=3), lambda fed: jfl.models.flax(fed, Loop())),
)


def problem(name, **options):
    """Return a federation, a task, its parameters, the task of adapters, and adapters with B."""
    federation, make = PROBLEMS[name]
    fed, r = federation(), np.random.default_rng(1)
    task = make(fed)
    params = task.init(jax.random.key(5))
    low = jfl.models.lora(task, params, 2, **options)
    part = {k: jnp.asarray(r.normal(size=v.shape), v.dtype) for k, v in low.init(KEY).items()}
    return fed, task, params, low, part


def plan_of(fed, task, grad=None):
    steps = dict(lr=0.1, steps=2, batch=jfl.batches.without_replacement(2))
    algorithm = jfl.algorithms.fedavg(grad or jfl.grad(task.loss), **steps)
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(fed.index.shape[0]))


@pytest.mark.parametrize("name", PROBLEMS)
def test_equal_to_a_model_with_the_product_in_its_kernels(name):
    """So are its loss and its gradient: dA = dW B^T and dB = A^T dW, in NumPy."""
    fed, task, params, low, part = problem(name)
    x, y, key = fed.x[0], fed.y[0], (KEY,) if name == "dropout" else ()
    whole = jfl.models.merged(low, part)
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    np.testing.assert_allclose(low.predict(part, x), task.predict(whole, x), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        low.loss(part, x, y, *key), task.loss(whole, x, y, *key), rtol=1e-4, atol=1e-5
    )
    of_kernels = jax.grad(task.loss)(whole, x, y, *key)
    for path, gradient in jax.grad(low.loss)(part, x, y, *key).items():
        layer, _, matrix = path.rpartition("/")
        found = of_kernels
        for part_of_path in layer.split("/"):
            found = found[part_of_path]
        a, b = (np.asarray(part[f"{layer}/lora_{m}"]) for m in "ab")
        d = np.asarray(found["kernel"]).reshape(*a.shape[:-1], b.shape[-1])
        want = d @ b.swapaxes(-1, -2) if matrix == "lora_a" else a.swapaxes(-1, -2) @ d
        np.testing.assert_allclose(gradient, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", PROBLEMS)
def test_training_starts_at_the_pretrained_model(name):
    fed, task, params, low, _ = problem(name)
    start = low.init(KEY)
    assert np.array_equal(low.predict(start, fed.x[0]), task.predict(params, fed.x[0]))
    assert jfl.core.pytrees.by_path(low.init(jax.random.key(3))).keys() == start.keys()
    matrices = [np.asarray(v) for k, v in start.items() if k.endswith("lora_a")]
    size = sum(m.size for m in matrices)
    squares = sum((m**2).sum() * m.shape[-2] for m in matrices) / size
    # The mean of squares of unit normals: 5 standard deviations, a false alarm below 1e-4.
    assert abs(squares - 1) < 5 * (2 / size) ** 0.5


def test_ffa_lora_trains_b_and_keeps_a():
    fed, _, params, low, _ = problem("gpt", trainable="*/lora_b", layers=("*/query", "*/value"))
    out = jfl.simulate(KEY, plan_of(fed, low), 2)
    at = "_Block_0/MultiHeadDotProductAttention_0"
    assert sorted(out.params) == [f"{at}/query/lora_b", f"{at}/value/lora_b"]
    assert all(np.any(leaf) for leaf in out.params.values())
    query = low.loss.data["frozen"][f"{at}/query/lora_a"]
    whole = jfl.models.merged(low, out.params)["_Block_0"]["MultiHeadDotProductAttention_0"]
    before = params["_Block_0"]["MultiHeadDotProductAttention_0"]
    want = before["query"]["kernel"].reshape(8, 8) + query @ out.params[f"{at}/query/lora_b"]
    np.testing.assert_allclose(whole["query"]["kernel"].reshape(8, 8), want, rtol=1e-6)
    assert np.array_equal(whole["key"]["kernel"], before["key"]["kernel"])


@pytest.mark.slow
def test_a_private_gradient_is_book_kept_and_proved():
    fed, _, _, low, _ = problem("gpt")
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
    plan = plan_of(fed, low, jfl.private_grad(low.loss, chain))
    assert gradient_path(plan) == "bookkeeping"
    assert jfl.guarantee(plan, 2, delta=1e-5).status == "proved"


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(512, name="middle")(nn.Dense(512, name="body")(x))
        return nn.Dense(3, name="head")(x)


def test_clients_share_one_copy_of_the_frozen_weights():
    copy = 4 * 512 * 512  # bytes of the middle layer

    def bytes_of(clients, adapted):
        fed = make_federation(classes=3, sizes=(4,) * clients)
        task = jfl.models.flax(fed, Deep())
        if adapted:
            task = jfl.models.lora(task, task.init(KEY), 1)
        algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
        plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(clients))
        compiled = jax.jit(jfl.run_round).lower(jfl.init(KEY, plan), plan).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = lambda adapted: bytes_of(12, adapted) - bytes_of(4, adapted)
    assert more(adapted=False) > 8 * copy  # each client has its own
    assert more(adapted=True) < copy


def test_tasks_that_cannot_have_adapters():
    fed = make_federation(classes=3)
    task = jfl.models.mlp(fed, (4,))
    params = task.init(KEY)
    own = jfl.task(jnp.zeros((3, 3)), lambda w, x, y: (x @ w)[y], lambda w, x: x @ w)
    some = {"Dense_0": params["Dense_0"]}
    for given, weights, options, words in (
        (own, params, {}, "a task of jfl.models.flax"),
        (jfl.models.lora(task, params), params, {}, "a task of jfl.models.flax"),
        (task, None, {}, "the whole model, but got none for Dense_0/bias"),
        (task, some, {}, "the whole model, but got none for Dense_1/bias"),
        (task, params, dict(layers="conv*"), "matches none of Dense_0, Dense_1"),
        (task, params, dict(trainable="*gain"), "matches none of Dense_0/bias"),
        (task, params, dict(rank=0), "rank"),
        (task, params, dict(seed=-1), "seed"),
    ):
        with pytest.raises(ValueError, match=words):
            jfl.models.lora(given, weights, **options)
