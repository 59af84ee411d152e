"""Modules of flax that are written for a batch give the outputs that their authors see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jfl
from jfl.gradients.per_example import gradient_path

KEY, SIDE, CHANNELS = jax.random.key(0), 6, 3


@pytest.fixture(scope="module")
def fed():
    r = np.random.default_rng(0)
    x, y = r.normal(size=(40, SIDE, SIDE, CHANNELS)), r.integers(0, 3, 40)
    return jfl.federate((x, y, x[:5], y[:5]), jfl.partition.iid(4))


@pytest.fixture(scope="module")
def sequences():
    """As many positions as features, so that a mean over the wrong axis keeps all shapes."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(40, 4, 4)), r.integers(0, 3, 40)
    return jfl.federate((x, y, x[:5], y[:5]), jfl.partition.iid(4))


def scrambled(params):
    """Scales and biases that are not all alike."""
    r = np.random.default_rng(1)
    return jax.tree.map(lambda w: jnp.asarray(0.5 * r.normal(size=w.shape), w.dtype), params)


LINEN = dict(
    group=lambda: nn.GroupNorm(2),
    instance=nn.InstanceNorm,
    layer=nn.LayerNorm,
    rms=nn.RMSNorm,
)
NNX = dict(
    group=lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs),
    instance=lambda rngs: nnx.InstanceNorm(4, rngs=rngs),
    layer=lambda rngs: nnx.LayerNorm(4, rngs=rngs),
    rms=lambda rngs: nnx.RMSNorm(4, rngs=rngs),
)


def flatten(x):
    return x.reshape(len(x), -1)


class Nnx(nnx.Module):
    def __init__(self, norm, ends, rngs, features=4):
        self.conv = nnx.Conv(CHANNELS, 4, (3, 3), rngs=rngs)
        self.norm, self.ends = norm(rngs), ends
        self.head = nnx.Linear(features, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.ends(nnx.relu(self.norm(self.conv(x)))))


def mean(x):
    return x.mean((1, 2))


def mean_of_one(x):
    return x.mean((0, 1))


@pytest.mark.parametrize("ends", [mean, flatten], ids=["mean", "flatten"])
@pytest.mark.parametrize("name", LINEN)
def test_linen_norms_as_on_a_batch(fed, name, ends):
    module = nn.Sequential([nn.Conv(4, (3, 3)), LINEN[name](), nn.relu, ends, nn.Dense(3)])
    task = jfl.models.flax(fed, module)
    params = scrambled(task.init(KEY))
    want = module.apply({"params": params}, fed.x[:7])
    got = [task.predict(params, x) for x in fed.x[:7]]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ends", [mean, flatten], ids=["mean", "flatten"])
@pytest.mark.parametrize("name", NNX)
def test_nnx_norms_as_on_a_batch(fed, name, ends):
    features = 4 if ends is mean else 4 * SIDE * SIDE
    model = Nnx(NNX[name], ends, nnx.Rngs(0), features)
    nnx.update(model, scrambled(nnx.state(model, nnx.Param)))
    task = jfl.models.nnx(fed, model)
    got = [task.predict(task.init(KEY), x) for x in fed.x[:7]]
    np.testing.assert_allclose(got, model(fed.x[:7]), rtol=1e-4, atol=1e-5)


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

    linen = lambda norm: nn.Sequential([nn.Conv(4, (3, 3)), norm, mean_of_one, nn.Dense(3)])
    for bad in (nn.GroupNorm(2), nn.InstanceNorm()):
        with pytest.raises(ValueError, match="a module for batches.*Norm.*reduction_axes"):
            jfl.models.flax(fed, linen(bad))
    axes = nn.GroupNorm(2, reduction_axes=(-3, -2, -1))
    assert jfl.models.flax(fed, linen(axes)).predict is not None
    for name in ("group", "instance"):
        with pytest.raises(ValueError, match=r"a module for batches.*Norm.*x\.mean\(\(1, 2\)\)"):
            jfl.models.nnx(fed, lambda rngs, name=name: Nnx(NNX[name], mean_of_one, rngs))


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
        x = nn.Embed(5, 4)(x) + own
        mask = nn.make_causal_mask(jnp.ones(len(x)))
        return nn.Dense(5)(nn.MultiHeadDotProductAttention(2)(x, mask=mask))


def test_a_module_of_one_example_stays_one():
    r = np.random.default_rng(0)
    x, y = r.integers(0, 5, (20, 6)), r.integers(0, 5, (20, 6))
    data = jfl.datasets.arrays(x, y, x[:4], y[:4], classes=5)
    fed = jfl.federate(data, jfl.partition.iid(4))
    task = jfl.models.flax(fed, Positions())
    params = task.init(KEY)
    assert params["positions"].shape == (6, 4)
    assert np.array_equal(
        task.predict(params, fed.x[0]), Positions().apply({"params": params}, fed.x[0])
    )


def test_a_module_that_would_mix_a_batch_is_one_of_one_example(sequences):
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    module = nn.Sequential([flat, lambda x: jax.nn.softmax(x, 0), nn.Dense(3)])
    task = jfl.models.flax(sequences, module)
    params, x = task.init(KEY), sequences.x[0]
    assert np.array_equal(task.predict(params, x), module.apply({"params": params}, x))


@pytest.mark.parametrize("name", ["group", "layer"])
def test_a_batch_of_one_is_book_kept(fed, name):
    """No layer loses its rule, and either path gives the same clipped sum."""
    module = nn.Sequential([nn.Conv(4, (3, 3)), LINEN[name](), nn.relu, mean, nn.Dense(3)])
    task = jfl.models.flax(fed, module)
    chain = jfl.chain(jfl.clip_l2(0.1), jfl.total(), jfl.gaussian(1e-3), jfl.divide(2))

    def plan(path):
        grad = jfl.private_grad(task.loss, chain, path=path)
        algorithm = jfl.algorithms.fedsgd(grad, batch=jfl.batches.without_replacement(2))
        return jfl.plan(fed, task, algorithm, jfl.sampling.full(4))

    assert gradient_path(plan("auto")) == "bookkeeping"
    one, other = (jfl.simulate(KEY, plan(path), 1).params for path in ("bookkeeping", "vmap"))
    moved = max(float(jnp.abs(w).max()) for w in jax.tree.leaves(one))
    assert moved > 0.01  # and the noise of either has a standard deviation of 5e-5
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-4), one, other)
