"""Convolutions and pooling: every way, of whatever backend, is one convolution written in NumPy,
and no client's numbers meet another's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close
from jax import lax
from jax.extend.core import jaxprs_in_params
from jfl.kernels.conv import conv_same, multiplies_patches, relu_pool

from jfl.core.records import Batch, Fn
from jfl.gradients import ghost
from jfl.gradients.per_example import grad

pytestmark = pytest.mark.accelerator

BACKENDS = ("cpu", "gpu", "tpu")
NAMES = ("NHWC", "HWIO", "NHWC")
CLOSE = dict(rtol=1e-5, atol=2e-5)  # sums of up to 100 products of normals, in float32


@pytest.fixture(autouse=True)
def products_in_full():
    """By default a GPU and a TPU multiply numbers of float32 after rounding them to fewer bits."""
    with jax.default_matmul_precision("highest"):
        yield


def derive(x, kernel, cotangent, stride=1, around=1, groups=1):
    """A convolution place by place, in float64 -> its value, its derivatives by x and the kernel.

    Shapes:
        x [H, W, C], kernel [kh, kw, C / groups, O], cotangent like the value.
    """
    x, kernel, cotangent = (np.asarray(v, np.float64) for v in (x, kernel, cotangent))
    kh, kw, each, out = kernel.shape
    padded = np.pad(x, ((around, around), (around, around), (0, 0)))
    value, back = np.zeros(cotangent.shape), (np.zeros(padded.shape), np.zeros(kernel.shape))
    for i, j, o in np.ndindex(value.shape):
        first = o // (out // groups) * each
        at_i, at_j = slice(i * stride, i * stride + kh), slice(j * stride, j * stride + kw)
        here = (at_i, at_j, slice(first, first + each))
        value[i, j, o] = (padded[here] * kernel[..., o]).sum()
        back[0][here] += cotangent[i, j, o] * kernel[..., o]
        back[1][..., o] += cotangent[i, j, o] * padded[here]
    inside = slice(around, -around or None)
    return value, (back[0][inside, inside], back[1])


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("backend", BACKENDS)
def test_conv_same_is_a_convolution(backend, traced_for):
    """Values and both gradients; also mapped over clients' own kernels."""
    traced_for(backend)
    x, k, cotangent = normal(0, 6, 5, 2), normal(1, 3, 3, 2, 4), normal(2, 6, 5, 4)
    want, derivatives = derive(x, k, cotangent)

    @jax.jit
    def program(x, k):
        value, back = jax.vjp(conv_same, x, k)
        kernels = jnp.stack([k, 2 * k, -k])
        return value, back(cotangent), jax.vmap(conv_same, (None, 0))(x, kernels)[1]

    close(program(x, k), (want, derivatives, 2 * want), **CLOSE)
    long = jnp.pad(k, ((1, 1), (0, 0), (0, 0), (0, 0)))  # five high, of which two are zeros
    close(jax.jit(conv_same)(x, long), want, **CLOSE)


# stride, padding, groups, channels, channels that come out, examples
CASES = dict(
    strided=(2, 1, 1, 3, 2, 2),
    groups=(1, 0, 2, 4, 6, 2),
    depth=(1, 1, 3, 3, 6, 2),
    one_channel=(1, 1, 1, 1, 4, 2),
    one_out=(1, 1, 1, 3, 1, 2),
    one_example=(1, 1, 1, 3, 4, 1),
)


def problem(stride, around, groups, channels, out, examples):
    """A user's loss with a convolution of lax, and two clients with weights and rows of their
    own."""

    def loss(kernel, x, y):
        value = lax.conv_general_dilated(
            x[None],
            kernel,
            (stride, stride),
            [(around, around)] * 2,
            dimension_numbers=NAMES,
            feature_group_count=groups,
        )[0]
        return (value * y).sum()

    side = (5 + 2 * around - 3) // stride + 1
    kernels = normal(0, 2, 3, 3, channels // groups, out)
    return (
        Fn(loss),
        kernels,
        normal(1, 2, examples, 5, 5, channels),
        normal(2, 2, examples, side, side, out),
    )


def by_kernel(loss, kernels, x, y):
    """The mean gradient of each client's rows."""
    one = lambda k, x, y: grad(loss)(None, k, Batch(x, y, jnp.ones(y.shape[0], bool)), None)[0]
    return jax.vmap(one)(kernels, x, y)


def by_x(loss, kernels, x, y):
    """Each client's gradients by its rows, of the loss that `grad` derives."""

    def one(k, x, y):
        mine = ghost.with_fast_convolutions(loss, k, x[0], y[0], x.shape[0])
        return jax.vmap(jax.grad(mine, 1), (None, 0, 0))(k, x, y)

    return jax.vmap(one)(kernels, x, y)


@pytest.mark.by_default("groups-cpu", "groups-tpu", "one_channel-tpu", "strided-gpu")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_users_convolution(case, backend, traced_for):
    """Of a model of any library: both derivatives, mapped over clients."""
    traced_for(backend)
    stride, around, groups, _, _, examples = CASES[case]
    loss, kernels, x, y = problem(*CASES[case])
    want = [
        [
            derive(*row, stride, around, groups)[1]
            for row in zip(x[c], [kernels[c]] * examples, y[c])
        ]
        for c in range(2)
    ]
    program = jax.jit(lambda *v: [f(loss, *v) for f in (by_x, by_kernel)])
    rows, means = program(kernels, x, y)
    close(rows, np.array([[row[0] for row in rows] for rows in want]), **CLOSE)
    mean = np.array([np.mean([row[1] for row in rows], 0) for rows in want])
    close(means, mean, **CLOSE)


def convolutions(jaxpr):
    """The equations of a jaxpr and of those in it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from convolutions(inner)


@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("case", CASES)
def test_clients_are_kept_apart(case, backend, traced_for):
    """A TPU's compiler makes a dense convolution of groups with one channel each, with zeros
    between them, and there a client that is not finite would reach every other: 0 * nan is nan."""
    traced_for(backend)
    loss, kernels, x, y = problem(*CASES[case])
    traced = [
        jax.make_jaxpr(lambda *v, f=derived: f(loss, *v))(kernels, x, y)
        for derived in (by_kernel, by_x)
    ]
    found = [equation for each in traced for equation in convolutions(each.jaxpr)]
    kept_apart = case not in ("depth", "one_example") and not multiplies_patches()
    assert bool(found) == kept_apart
    for equation in found:
        names = equation.params["dimension_numbers"]
        channels = equation.invars[1].aval.shape[names.rhs_spec[1]]
        assert channels > 1, equation


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_and_relu_may_come_before_or_after_the_pooling(backend, traced_for):
    """The same to the bit, and the same gradients; an odd last row is dropped."""
    traced_for(backend)
    x, bias = np.asarray(normal(0, 5, 6, 3)), np.array([-3.0, 0.0, 0.5], np.float32)
    cells = np.maximum(x[:4] + bias, 0).reshape(2, 2, 3, 2, 3)
    want = cells.max((1, 3))
    value, back = jax.vjp(relu_pool, x, bias)
    assert np.array_equal(value, want) and (want == 0).any()
    gradient = np.zeros_like(x)
    chosen = (cells == want[:, None, :, None]) & (cells > 0)
    gradient[:4] = chosen.reshape(4, 6, 3)
    close(back(jnp.ones_like(value)), (gradient, chosen.sum((0, 1, 2, 3))))
