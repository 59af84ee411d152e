"""Modules of flax that are written for a batch give the outputs that their authors see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from helpers.problems import close

import jfl
from jfl.core.records import Batch
from jfl.gradients.per_example import clipped_sum, gradient_path

KEY, SIDE, CHANNELS = jax.random.key(0), 4, 3


def federation(shape):
    r = np.random.default_rng(0)
    x, y = r.normal(size=(40, *shape)), r.integers(0, 3, 40)
    return jfl.federate((x, y, x[:5], y[:5]), jfl.partition.iid(4))


@pytest.fixture(scope="module")
def fed():
    return federation((SIDE, SIDE, CHANNELS))


@pytest.fixture(scope="module")
def sequences():
    """As many positions as features, so that a mean over the wrong axis keeps all shapes."""
    return federation((4, 4))


def scrambled(params):
    """Scales and biases that are not all alike."""
    r = np.random.default_rng(1)
    return jax.tree.map(lambda w: jnp.asarray(0.5 * r.normal(size=w.shape), w.dtype), params)


def flatten(x):
    return x.reshape(len(x), -1)


def mean(x):
    return x.mean((1, 2))


def mean_of_one(x):
    return x.mean((0, 1))


def linen(norm, ends):
    return nn.Sequential([nn.Conv(4, (3, 3)), norm, nn.relu, ends, nn.Dense(3)])


class Nnx(nnx.Module):
    def __init__(self, norm, ends, rngs):
        self.conv = nnx.Conv(CHANNELS, 4, (3, 3), rngs=rngs)
        self.norm, self.ends = norm(rngs), ends
        self.head = nnx.Linear(4 * SIDE * SIDE if ends is flatten else 4, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.ends(nnx.relu(self.norm(self.conv(x)))))


GROUP = lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs)
INSTANCE = lambda rngs: nnx.InstanceNorm(4, rngs=rngs)


@pytest.mark.by_default("group_flatten", "layer")
@pytest.mark.parametrize(
    "norm, ends",
    [
        (nn.GroupNorm(2), mean),
        (nn.GroupNorm(2), flatten),
        (nn.InstanceNorm(), mean),
        (nn.LayerNorm(), mean),
        (nn.RMSNorm(), flatten),
    ],
    ids=["group", "group_flatten", "instance", "layer", "rms"],
)
def test_linen_norms_as_on_a_batch(fed, norm, ends):
    module = linen(norm, ends)
    task = jfl.models.flax(fed, module)
    params = scrambled(jax.eval_shape(task.init, KEY))
    predict, apply = (jax.jit(lambda *of, f=f: f(*of)) for f in (task.predict, module.apply))
    got = [predict(params, x) for x in fed.x[:3]]
    np.testing.assert_allclose(got, apply({"params": params}, fed.x[:3]), 1e-4, 1e-5)


@pytest.mark.by_default("flat")
@pytest.mark.parametrize("norm, ends", [(GROUP, mean), (INSTANCE, flatten)], ids=["group", "flat"])
def test_nnx_norms_as_on_a_batch(fed, norm, ends):
    model = Nnx(norm, ends, nnx.Rngs(0))
    nnx.update(model, scrambled(nnx.state(model, nnx.Param)))
    task = jfl.models.nnx(fed, model)
    got = [task.predict(task.init(KEY), x) for x in fed.x[:3]]
    np.testing.assert_allclose(got, model(fed.x[:3]), 1e-4, 1e-5)


@pytest.mark.slow
def test_the_norms_of_resnet18_are_over_the_image(fed):
    task = jfl.models.resnet18(fed, width=4)
    params = scrambled(task.init(KEY))

    def by_hand(next_call, args, kwargs, context):
        layer = context.module
        if not isinstance(layer, nn.GroupNorm) or context.method_name != "__call__":
            return next_call(*args, **kwargs)
        next_call(*args, **kwargs)
        x, own = args[0], layer.variables["params"]
        groups = x.reshape(-1, layer.num_groups, x.shape[-1] // layer.num_groups)
        centred = groups - groups.mean((0, 2), keepdims=True)
        normed = centred / jnp.sqrt(groups.var((0, 2), keepdims=True) + layer.epsilon)
        return normed.reshape(x.shape) * own["scale"][None, None] + own["bias"][None, None]

    got = task.predict(params, fed.x[0])
    with nn.intercept_methods(by_hand):
        want = task.predict(params, fed.x[0])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def test_norms_in_a_module_of_one_example(fed):
    """Refused where they would take rows of pixels for examples; right with axes."""
    for bad in (nn.GroupNorm(2), nn.InstanceNorm()):
        with pytest.raises(ValueError, match="a module for batches.*Norm.*reduction_axes"):
            jfl.models.flax(fed, linen(bad, mean_of_one))
    axes = nn.GroupNorm(2, reduction_axes=(-3, -2, -1))
    assert jfl.models.flax(fed, linen(axes, mean_of_one)).predict is not None
    for norm in (GROUP, INSTANCE):
        with pytest.raises(ValueError, match=r"a module for batches.*Norm.*x\.mean\(\(1, 2\)\)"):
            jfl.models.nnx(fed, lambda rngs, norm=norm: Nnx(norm, mean_of_one, rngs))


def test_a_mean_over_the_wrong_axis_that_keeps_all_shapes(sequences):
    module = nn.Sequential([lambda x: x.mean(1), nn.Dense(3)])
    task = jfl.models.flax(sequences, module)
    params = task.init(KEY)
    got = [task.predict(params, x) for x in sequences.x[:5]]
    want = module.apply({"params": params}, sequences.x[:5])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    of_rows = jfl.models.flax(sequences, module, batched=False)
    assert not np.allclose(of_rows.predict(params, sequences.x[0]), want[0], atol=1e-3)


class Positions(nn.Module):
    """A module of one example whose outputs have one axis for positions, as a batch has."""

    @nn.compact
    def __call__(self, x):
        own = self.param("positions", nn.initializers.normal(1.0), (len(x), 4))
        return nn.Dense(5)(jnp.cumsum(nn.Embed(5, 4)(x) + own, 0))


def test_modules_of_one_example_stay_such(sequences):
    """One with an output a position, and one that would mix the rows of a batch."""
    r = np.random.default_rng(0)
    x, y = r.integers(0, 5, (20, 6)), r.integers(0, 5, (20, 6))
    data = jfl.datasets.arrays(x, y, x[:4], y[:4], classes=5)
    tokens = jfl.federate(data, jfl.partition.iid(4))
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    mixing = nn.Sequential([flat, lambda x: jax.nn.softmax(x, 0), nn.Dense(3)])
    for fed, module in ((tokens, Positions()), (sequences, mixing)):
        task = jfl.models.flax(fed, module)
        params, x = task.init(KEY), fed.x[0]
        assert np.array_equal(task.predict(params, x), module.apply({"params": params}, x))


def test_a_batch_of_one_is_book_kept(fed):
    """No layer loses its rule, and either path gives the same clipped sum."""
    task = jfl.models.flax(fed, linen(nn.GroupNorm(2), mean))
    rows = Batch(fed.x[:4], fed.y[:4], jnp.ones(4, bool))

    def clipped(params, path):
        grad = jfl.private_grad(task.loss, jfl.chain(jfl.clip_l2(0.1), jfl.total()), path=path)
        return clipped_sum(grad, params, rows, jnp.ones(4))[0].value

    paths = "bookkeeping", "vmap"
    one, other = jax.jit(lambda w: [clipped(w, path) for path in paths])(task.init(KEY))
    assert max(float(jnp.abs(w).max()) for w in jax.tree.leaves(one)) > 0.01
    close(one, other, rtol=1e-3, atol=1e-5)
    chain = jfl.chain(jfl.clip_l2(0.1), jfl.total(), jfl.gaussian(1.0))
    algorithm = jfl.algorithms.fedsgd(jfl.private_grad(task.loss, chain))
    assert gradient_path(jfl.plan(fed, task, algorithm, jfl.sampling.full(4))) == "bookkeeping"
