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


def run(fed, params, loss, predict=None, noise=0.5):
    """A round, with clipping and noise."""
    task = jfl.task(params, loss, predict)
    grad = jfl.private_grad(
        task.loss, jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(3))
    )
    plan = jfl.plan(
        fed,
        task,
        jfl.algorithms.fedsgd(grad, batch=jfl.batches.full()),
        jfl.sampling.full(CLIENTS),
    )
    return jfl.simulate(KEY, plan, 1, evaluate_every=1)


def entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


def moved(params, out):
    """All leaves were trained, and are numbers."""
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(out.params), strict=True))
    return len(pairs) > 0 and all(
        np.isfinite(b).all() and not np.array_equal(a, b) for a, b in pairs
    )


# --- flax.linen


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


@pytest.mark.parametrize(
    "module, words",
    [
        (Normed(False), [BY]),
        (Normed(True), [BY]),
        (Normed(None), [BY]),
        (Dropped(False), ["Dropout", "deterministic=True"]),
        (Dropped(None), ["Dropout", "deterministic=True"]),
    ],
    ids=["batch", "average", "unset", "random", "open"],
)
def test_linen_modules_that_mix_examples_or_draw(fed, module, words):
    """In a ready-made task, and in a loss of the user's own."""
    params = Dropped(True).init(KEY, fed.x[0])["params"]
    if isinstance(module, Normed):
        params = Normed(True).init(KEY, fed.x[0])["params"]
    for use in (
        lambda: jfl.models.flax(fed, module),
        lambda: run(fed, params, linen_loss(module)),
    ):
        with pytest.raises(ValueError) as error:
            use()
        assert all(w in str(error.value) for w in [*words, "expected", "got"]), error.value
        assert "flax.readthedocs" not in str(error.value)


@pytest.mark.slow
def test_the_remedies_work(fed):
    """Dropout without randomness, GroupNorm, and statistics that stay fixed."""
    module = Dropped(True)
    assert moved(
        module.init(KEY, fed.x[0])["params"],
        run(fed, module.init(KEY, fed.x[0])["params"], linen_loss(module)),
    )
    group = nn.Sequential([nn.Dense(4), nn.GroupNorm(num_groups=2), nn.Dense(3)])
    assert jfl.models.flax(fed, group).predict is not None
    normed = Normed(True)
    variables = normed.init(KEY, fed.x[0])
    fixed = variables["batch_stats"]
    params = variables["params"]
    loss = lambda params, x, y: entropy(
        normed.apply({"params": params, "batch_stats": fixed}, x), y
    )
    assert moved(params, run(fed, params, loss))


def test_statistics_are_no_parameters(fed):
    variables = Normed(True).init(KEY, fed.x[0])
    loss = lambda v, x, y: entropy(Normed(True).apply(v, x), y)
    with pytest.raises(ValueError, match=f"task: expected params without batch_stats.*{BY}"):
        jfl.task(variables, loss)
    drawn = jfl.task(lambda key: Normed(True).init(key, jnp.zeros(3)), loss)
    with pytest.raises(ValueError, match=BY):
        jfl.plan(fed, drawn, jfl.algorithms.fedsgd(jfl.grad(loss)), jfl.sampling.full(CLIENTS))


def test_a_wrong_shape_in_words(fed):
    module = nn.Dense(3)
    with pytest.raises(
        ValueError,
        match=r"the loss: expected .* one example, but got ScopeParamShapeError.*x and "
        r"y are float32\[3\]",
    ):
        run(fed, module.init(KEY, jnp.zeros(5))["params"], linen_loss(module))


def test_dropout_in_predict_alone(fed):
    module, random = Dropped(True), Dropped(False)
    params = module.init(KEY, fed.x[0])["params"]
    with pytest.raises(ValueError, match=r"predict: .*deterministic=True"):
        run(fed, params, linen_loss(module), lambda params, x: random.apply({"params": params}, x))


def test_somebody_elses_error_stays_as_it_is(fed):
    """Only errors of flax are put into other words."""

    def loss(params, x, y):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(fed, jnp.zeros(3), loss)


# --- modules in the place of parameters or functions


def test_linen_modules_are_no_parameters(fed):
    loss = lambda w, x, y: (x @ w - y) ** 2
    for bad in (nn.Dense(3), {"net": nn.Dense(3)}):
        with pytest.raises(ValueError, match=r"params.*flax\.linen module Dense.*module\.init"):
            jfl.task(bad, loss)
    with pytest.raises(
        ValueError, match=r"loss, a pure function.*flax\.linen module Dense.*def loss"
    ):
        jfl.task(jnp.zeros(3), nn.Dense(3))
    with pytest.raises(ValueError, match=r"predict, a pure function.*flax\.linen module Dense"):
        jfl.task(jnp.zeros(3), loss, nn.Dense(3))
    with pytest.raises(ValueError, match=r"expected a flax\.linen module, but got"):
        jfl.models.flax(fed, nnx.Linear(3, 3, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "params",
    [jnp.zeros(3, int), {"w": jnp.zeros(3), "steps": 2}, {"key": KEY}, [True]],
    ids=["int", "some", "key", "bool"],
)
def test_what_has_no_gradient_is_no_parameter(params):
    with pytest.raises(ValueError, match="task: expected params, a pytree of .*number"):
        jfl.task(params, lambda w, x, y: 0.0)


def test_nnx_modules():
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    loss = lambda model, x, y: entropy(model(x), y)
    for bad in (model, {"net": model}):
        with pytest.raises(ValueError, match=r"params.*flax\.nnx module Linear.*nnx\.split"):
            jfl.task(bad, loss)
    with pytest.raises(ValueError, match=r"loss, a pure function.*flax\.nnx module Linear"):
        jfl.task(jnp.zeros(3), model)
    with pytest.raises(ValueError, match=r"loss, a pure function.*flax\.nnx module Linear"):
        jfl.task(jnp.zeros(3), model.__call__)


def test_an_nnx_module_that_an_init_function_makes(fed):
    task = jfl.task(
        lambda key: nnx.Linear(3, 3, rngs=nnx.Rngs(key)), lambda model, x, y: entropy(model(x), y)
    )
    for chunk in (None, 2):
        with pytest.raises(ValueError, match=r"nnx\.split"):
            jfl.plan(
                fed,
                task,
                jfl.algorithms.fedsgd(jfl.grad(task.loss)),
                jfl.sampling.full(CLIENTS),
                chunk=chunk,
            )


@pytest.mark.slow
def test_a_split_nnx_module_is_trained(fed):
    """What the message says to do."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.drop, self.outer = (
                nnx.Linear(3, 4, rngs=rngs),
                nnx.Dropout(0.5, rngs=rngs),
                nnx.Linear(4, 3, rngs=rngs),
            )

        def __call__(self, x):
            return self.outer(self.drop(nnx.relu(self.inner(x))))

    model = Net(nnx.Rngs(0))
    model.eval()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jfl.named("test.predict_of_a_split_module")
    def predict(params, x):
        return nnx.merge(graphdef, params, rest)(x)

    @jfl.named("test.loss_of_a_split_module")
    def loss(params, x, y):
        return entropy(predict(params, x), y)

    out = run(fed, params, loss, predict)
    assert moved(params, out) and np.isfinite(out.metrics.accuracy).all()


@pytest.fixture(scope="module")
def eqx():
    return pytest.importorskip(
        "equinox", reason="equinox is not installed: what jfl says of its modules is not tested"
    )


def test_equinox_modules_with_other_leaves_are_refused(fed, eqx):
    net = lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key)
    loss = lambda model, x, y: entropy(model(x), y)
    for bad in (net(KEY), {"net": net(KEY)}):
        with pytest.raises(ValueError, match=r"equinox module MLP.*eqx\.partition"):
            jfl.task(bad, loss)
    with pytest.raises(ValueError, match=r"equinox module Dropout.*eqx\.partition"):
        jfl.task(eqx.nn.Dropout(0.5), loss)
    with pytest.raises(ValueError, match=r"loss, a pure function.*equinox module MLP.*def loss"):
        jfl.task(jnp.zeros(3), net(KEY))
    drawn = jfl.task(net, loss)
    with pytest.raises(ValueError, match=r"eqx\.partition"):
        jfl.plan(fed, drawn, jfl.algorithms.fedsgd(jfl.grad(loss)), jfl.sampling.full(CLIENTS))


def test_an_equinox_module_of_arrays_is_a_pytree(fed, eqx):
    linear = eqx.nn.Linear(3, 3, key=KEY)
    out = run(fed, linear, lambda model, x, y: entropy(model(x), y), lambda model, x: model(x))
    assert moved(linear, out) and isinstance(out.params, eqx.nn.Linear)


@pytest.mark.slow
def test_a_partitioned_equinox_module_is_trained(fed, eqx):
    """What the message says to do."""
    params, static = eqx.partition(eqx.nn.MLP(3, 3, 4, 1, key=KEY), eqx.is_inexact_array)

    def predict(params, x):
        return eqx.combine(params, static)(x)

    assert moved(
        params, run(fed, params, lambda params, x, y: entropy(predict(params, x), y), predict)
    )


# --- functions that close over modules of Python


def test_a_loss_may_close_over_an_import(fed):
    """An import inside the function that makes the loss."""

    def make():
        import functools as tools

        import jax.numpy as numbers
        import optax as library

        def loss(params, x, y):
            logits = tools.reduce(numbers.matmul, (x, params))
            return library.softmax_cross_entropy_with_integer_labels(logits, y)

        return loss

    start = jnp.zeros((3, 3))
    a, b = run(fed, start, make()), run(fed, start, make())
    assert moved(start, a) and np.array_equal(a.params, b.params)
