"""Models of flax.linen, flax.nnx and equinox in `jfl.task`: what works, and what is refused with
which words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers.problems import CLIENTS, make_federation

import jfl

KEY = jax.random.key(0)
BY = "Use GroupNorm or LayerNorm"


@pytest.fixture(scope="module")
def fed():
    return make_federation(classes=3)


@pytest.fixture(scope="module")
def eqx():
    return pytest.importorskip(
        "equinox", reason="equinox is not installed: what jfl says of its modules is not tested"
    )


def run(fed, params, loss, predict=None):
    """A round, with clipping and noise."""
    task = jfl.task(params, loss, predict)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(0.5), jfl.divide(3))
    grad = jfl.private_grad(task.loss, chain)
    algorithm = jfl.algorithms.fedsgd(grad, batch=jfl.batches.full())
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    return jfl.simulate(KEY, plan, 1, evaluate_every=1)


def plan_of(fed, task, **how):
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), **how)


def entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def of_model(model, x, y):
    return entropy(model(x), y)


def moved(params, out):
    """All leaves were trained, and are numbers."""
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(out.params), strict=True))
    return len(pairs) > 0 and all(
        np.isfinite(b).all() and not np.array_equal(a, b) for a, b in pairs
    )


class Normed(nn.Module):
    average: bool | None = False

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=self.average)(nn.Dense(3)(x))


class Dropped(nn.Module):
    deterministic: bool | None = False

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(3)(x))


def linen_loss(module):
    return lambda params, x, y: entropy(module.apply({"params": params}, x), y)


# --- what mixes examples or draws


@pytest.mark.parametrize(
    "module, words",
    [
        (Normed(False), BY),
        (Normed(True), BY),
        (Normed(None), BY),
        (Dropped(False), "Dropout.*deterministic=True"),
        (Dropped(None), "Dropout.*deterministic=True"),
    ],
    ids=["batch", "average", "unset", "random", "open"],
)
def test_linen_modules_that_mix_examples_or_draw(fed, module, words):
    """In a ready-made task, and in a loss of the user's own."""
    fixed = Normed(True) if isinstance(module, Normed) else Dropped(True)
    params = fixed.init(KEY, fed.x[0])["params"]
    with pytest.raises(ValueError, match=words):
        jfl.models.flax(fed, module)
    with pytest.raises(ValueError, match=words):
        run(fed, params, linen_loss(module))


def test_dropout_in_predict_alone(fed):
    module, random = Dropped(True), Dropped(False)
    params = module.init(KEY, fed.x[0])["params"]
    with pytest.raises(ValueError, match=r"predict: .*deterministic=True"):
        run(fed, params, linen_loss(module), lambda params, x: random.apply({"params": params}, x))


def test_statistics_are_no_parameters(fed):
    variables = Normed(True).init(KEY, fed.x[0])
    loss = lambda v, x, y: entropy(Normed(True).apply(v, x), y)
    with pytest.raises(ValueError, match=f"task: expected params without batch_stats.*{BY}"):
        jfl.task(variables, loss)
    drawn = jfl.task(lambda key: Normed(True).init(key, jnp.zeros(3)), loss)
    with pytest.raises(ValueError, match=BY):
        plan_of(fed, drawn)


def test_errors_of_flax_are_put_into_other_words_and_only_those(fed):
    words = r"the loss: expected .* one example, but got ScopeParamShapeError"
    module = nn.Dense(3)
    with pytest.raises(ValueError, match=words):
        run(fed, module.init(KEY, jnp.zeros(5))["params"], linen_loss(module))

    def loss(params, x, y):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fed, jnp.zeros(3), loss)


# --- modules in the place of parameters or functions


NNX = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((nn.Dense(3), of_model), r"params.*flax\.linen module Dense.*module\.init"),
        ((jnp.zeros(3), nn.Dense(3)), r"loss, a pure function.*flax\.linen module Dense"),
        ((jnp.zeros(3), of_model, nn.Dense(3)), r"predict, a pure function.*flax\.linen module"),
        ((NNX, of_model), r"params.*flax\.nnx module Linear.*nnx\.split"),
        ((jnp.zeros(3), NNX.__call__), r"loss, a pure function.*flax\.nnx module Linear"),
        ((jnp.zeros(3, int), of_model), "params, a pytree of .*number"),
        (({"w": jnp.zeros(3), "steps": 2}, of_model), "params, a pytree of .*number"),
    ],
)
def test_what_is_no_parameter_and_no_function(arguments, words):
    with pytest.raises(ValueError, match=f"task: expected {words}"):
        jfl.task(*arguments)


def test_a_module_that_an_init_function_makes(fed):
    task = jfl.task(lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)), of_model)
    for chunk in (None, 2):
        with pytest.raises(ValueError, match=r"nnx\.split"):
            plan_of(fed, task, chunk=chunk)


def test_equinox_modules_with_other_leaves_are_refused(fed, eqx):
    net = lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key)
    for bad in (net(KEY), {"net": net(KEY)}, eqx.nn.Dropout(0.5)):
        with pytest.raises(ValueError, match=r"equinox module (MLP|Dropout).*eqx\.partition"):
            jfl.task(bad, of_model)
    with pytest.raises(ValueError, match=r"loss, a pure function.*equinox module MLP.*def loss"):
        jfl.task(jnp.zeros(3), net(KEY))
    with pytest.raises(ValueError, match=r"eqx\.partition"):
        plan_of(fed, jfl.task(net, of_model))


def test_an_equinox_module_of_arrays_is_a_pytree(fed, eqx):
    linear = eqx.nn.Linear(3, 3, key=KEY)
    out = run(fed, linear, of_model, lambda model, x: model(x))
    assert moved(linear, out) and isinstance(out.params, eqx.nn.Linear)


def test_a_loss_may_close_over_an_import(fed):
    """An import inside the function that makes the loss, which has the same noise again."""

    def make():
        import functools as tools

        import jax.numpy as numbers
        import optax as library

        def loss(params, x, y):
            logits = tools.reduce(numbers.matmul, (x, params))
            return library.softmax_cross_entropy_with_integer_labels(logits, y)

        return loss

    one, other = (plan_of(fed, jfl.task(jnp.zeros((3, 3)), make())) for _ in range(2))
    assert jfl.describe(one) == jfl.describe(other)
