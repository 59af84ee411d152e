"""Book-keeping gives the same clipped sums as forming, clipping and adding all gradients."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.problems import CLIENTS, close, flat, make_federation, same_bits, squared, start_params
from jfl.kernels.ghost_sums import Formed, Lookup, Product, product, shrink

import jfl
from jfl.core.records import Batch, Context, Fn
from jfl.gradients import ghost, per_example
from jfl.privacy.mechanisms import haar_bands

KEY = jax.random.key(0)
ROWS = 5
WEIGHTS = np.array([[1.0, 0.5, 2.0, 0.0, 1.5], [0.0, 1.0, 1.0, 1.0, 0.25]], np.float32)


def _loss(params, x, y, *, module):
    out = module.apply({"params": params}, x).reshape(-1)
    return jnp.log(jnp.exp(out - out[y % out.size]).sum() + jnp.square(out).sum())


def layers(*parts):
    return nn.Sequential(list(parts))


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.RMSNorm()(nn.LayerNorm()(nn.Embed(7, 6)(x)))
        h = h + nn.MultiHeadDotProductAttention(2)(h, h)
        return nn.Dense(3)(h.mean(0))


class Shared(nn.Module):
    @nn.compact
    def __call__(self, x):
        same = nn.Dense(x.shape[-1], name="same")
        return nn.Dense(3, name="last")(same(jnp.tanh(same(x))))


class Mixed(nn.Module):
    """Two parameters that are combined before they meet the data."""

    @nn.compact
    def __call__(self, x):
        w = self.param("own", nn.initializers.normal(), (x.shape[-1], 4))
        gain = self.param("gain", nn.initializers.ones, (4,))
        return nn.Dense(3, name="last")(x @ (w * gain[None]))


class Standardized(nn.Module):
    """Convolutions whose kernels have mean 0 and norm 1 for each output channel."""

    @nn.compact
    def __call__(self, x):
        for stride in (1, 2):
            x = nn.tanh(jfl.models.tasks._StandardizedConv(6, 3, stride)(x))
        return nn.Dense(3, name="last")(x.mean((0, 1)))


class Tied(nn.Module):
    """A table that is looked up twice and multiplied from both sides."""

    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(7, 7)
        h = jnp.tanh(embed(x) + nn.Dense(7)(embed(x[::-1])))
        table = embed.embedding
        return embed.attend(h) + h @ table + jnp.einsum("td,vd->tv", jnp.sin(h), table)


class Own(nn.Module):
    """A parameter that is used as a layer would use it, and a number that scales the result."""

    @nn.compact
    def __call__(self, x):
        w = self.param("own", nn.initializers.normal(), (2, 3, x.shape[-1]))
        return jnp.tensordot(w, x, ((2,), (1,))) * jnp.exp(
            self.param("scale", nn.initializers.zeros, ())
        )


class Recurrent(nn.Module):
    """Two recurrent layers of flax, one of them reversed, and one of jfl."""

    @nn.compact
    def __call__(self, x):
        h = nn.RNN(nn.GRUCell(4))(nn.Embed(7, 3)(x))
        h = nn.RNN(nn.LSTMCell(3), reverse=True, keep_order=True)(h)
        return nn.Dense(3)(jfl.models.tasks._LstmLayer(4)(h)[-1])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(4)(x)), None


class LoopOverLayers(nn.Module):
    """A loop in which each iteration uses another slice of the weights."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(3, name="last")(layers()(x, None)[0])


class OneWeight(nn.Module):
    """A parameter that enters `use`, and a dense layer."""

    use: Callable
    axes: int = 2

    @nn.compact
    def __call__(self, x):
        w = self.param("own", nn.initializers.normal(), x.shape[-1:] * self.axes)
        return nn.Dense(3, name="last")(self.use(x, w))


def one_weight(use, axes=2):
    return lambda: OneWeight(use, axes)


def transformed_twice(x, w):
    w = jnp.tanh(w)
    return jnp.tanh(x @ w) @ w


def contracted_twice(x, w):
    return jnp.stack([jnp.tanh(jnp.tensordot(w, x, 2)), jnp.tensordot(w, x**2, 2)])


def loop(x, w):
    return jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w), x)


def loop_over_copies(x, w):
    copies = jnp.broadcast_to(w, (3, *w.shape, *w.shape))
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, copies)[0]


def loop_reads_copies(x, w):
    copies = jnp.broadcast_to(w, 2 * w.shape)
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ copies), None), x, length=3)[0]


def loop_changes_it(x, w):
    return x @ jax.lax.fori_loop(0, 2, lambda _, w: jnp.outer(x, jnp.tanh(x @ w)), w)


def branch(x, w):
    for _ in range(2):
        x = jax.lax.cond(x.sum() > 0, lambda h: jnp.tanh(h @ w), lambda h: h, x)
    return x


# module, shape of one example (an int: so many tokens)
COVERED = dict(
    mlp=(lambda: jfl.models._Mlp((4, 5), 3), (6,)),
    dense_at_few_positions=(lambda: layers(nn.Dense(7), nn.relu, nn.Dense(6)), (2, 8)),
    dense_at_many_positions=(lambda: layers(nn.Dense(4), nn.tanh, nn.Dense(2)), (3, 3, 5)),
    conv=(
        lambda: layers(
            nn.Conv(6, (3, 2), strides=(2, 1), padding=((1, 2), (0, 1))),
            nn.relu,
            nn.Conv(
                6,
                (2, 2),
                feature_group_count=3,
                kernel_dilation=(2, 1),
                input_dilation=(1, 2),
                padding=1,
            ),
            nn.GroupNorm(2),
        ),
        (5, 4, 3),
    ),
    attention=(Attention, 5),
    recurrent=(Recurrent, 6),
    loop_of_vectors=(one_weight(loop), (4,)),
    loop_of_matrices=(one_weight(loop), (3, 4)),
    loop_over_layers=(LoopOverLayers, (4,)),
    loop_over_layers_of_matrices=(LoopOverLayers, (2, 4)),
    own_parameter=(Own, (3, 5)),
    not_linear=(one_weight(lambda x, w: x @ jnp.tanh(w)), (4,)),
    masked=(one_weight(lambda x, w: x @ (w * jnp.tri(4))), (4,)),
    standardized=(Standardized, (4, 5, 3)),
    standardized_in_large=(Standardized, (2, 2, 9)),
    tied=(Tied, 5),
)
TWICE, COPIES = "used 2 times", "it is repeated before"
# a module, the shape of one example, and why the leaves without a rule have none
REFUSED = dict(
    shared=(Shared, (4,), {"same/bias": TWICE}),
    mixed=(Mixed, (4,), {"own": "mul before it meets", "gain": "mul before it meets"}),
    transformed_twice=(one_weight(transformed_twice), (4,), {"own": "tanh before it meets"}),
    transformed_table=(
        one_weight(lambda x, w: jnp.tanh(w)[x].mean(0)),
        7,
        {"own": "tanh before it meets"},
    ),
    contracted_twice=(one_weight(contracted_twice), (3, 3), {"own": TWICE}),
    penalised=(one_weight(lambda x, w: x @ w + jnp.square(w).sum()), (4,), {"own": TWICE}),
    loop=(
        one_weight(lambda x, w: jax.lax.fori_loop(0, 2, lambda _, h: jnp.tanh(h @ w) @ w, x)),
        (4,),
        {"own": f"in a loop it is {TWICE}"},
    ),
    loop_reads_copies=(one_weight(loop_reads_copies, 1), (4,), {"own": COPIES}),
    loop_over_copies=(one_weight(loop_over_copies, 1), (4,), {"own": COPIES}),
    loop_changes_it=(one_weight(loop_changes_it), (4,), {"own": "a loop changes it"}),
    branch=(one_weight(branch), (4,), {"own": TWICE}),
)


def problem(make, shape):
    """Return the loss of a module, parameters of two clients, and their rows [2, ROWS, ...]."""
    r = np.random.default_rng(0)
    tokens = isinstance(shape, int)
    size = (2, ROWS, shape) if tokens else (2, ROWS, *shape)
    x = r.integers(0, 7, size, np.int32) if tokens else r.normal(size=size).astype("f4")
    module = make()
    shapes = jax.eval_shape(module.init, KEY, x[0, 0])["params"]
    # biases and scales are not all alike
    params = jax.tree.map(lambda w: (0.5 * r.normal(size=(2, *w.shape))).astype(w.dtype), shapes)
    labels = np.arange(2 * ROWS, dtype=np.int32).reshape(2, ROWS) % 3
    return Fn(_loss, static=dict(module=module)), params, x, labels


def sums(loss, stage, params, x, y, weight, **options):
    """Return the clipped sums and the losses of two clients."""
    grad = jfl.private_grad(loss, jfl.chain(stage, jfl.total()), **options)
    one = lambda p, x, y, w: per_example.clipped_sum(grad, p, Batch(x, y, w != 0), w)
    return jax.vmap(one)(params, x, y, weight)


def example(params, x, y):
    return jax.tree.map(lambda w: w[0], params), x[0, 0], y[0, 0]


def rowwise(factor, g):
    """Return the sum of factor [2, ROWS] times g [2, ROWS, ...] over rows with another factor than
    0."""
    shape = factor.shape + (1,) * (g.ndim - 2)
    return np.where(
        factor.reshape(shape) != 0, factor.reshape(shape) * np.asarray(g, np.float64), 0
    ).sum(1)


def check_sums(loss, params, x, y, weight=WEIGHTS, rtol=2e-4, atol=2e-5, layers=True):
    """Compare clipped sums with gradients that are clipped one by one in float64.

    The bounds clip about half of the rows; with `layers`, the clip per layer is tested too.
    """
    leaves = len(jax.tree.leaves(params))

    @jax.jit
    def program(params, x, y, weight):
        losses, grads = jax.vmap(jax.vmap(jax.value_and_grad(loss), (None, 0, 0)))(params, x, y)
        held = weight.reshape(-1) != 0
        norms = jnp.stack(
            [
                jnp.sqrt(jnp.square(g.astype(jnp.float32)).reshape(2 * ROWS, -1).sum(1))
                for g in jax.tree.leaves(grads)
            ]
        )
        bound = lambda v: jnp.nanmedian(jnp.where(held, v, jnp.nan)) * 1.001 + 1e-3
        bounds = [bound(jnp.linalg.norm(norms, axis=0)), *map(bound, norms)]
        stages = [jfl.clip_l2(bounds[0])]
        if layers:
            stages.append(jfl.clip_per_layer(bounds[1:]))
        return losses, grads, bounds, [sums(loss, stage, params, x, y, weight) for stage in stages]

    losses, grads, bounds, found = program(params, x, y, weight)
    grads = jax.tree.leaves(grads)
    squares = [np.square(np.asarray(g, np.float64)).reshape(2, ROWS, -1).sum(2) for g in grads]
    w, bounds = np.asarray(weight, np.float64), [float(b) for b in bounds]
    norms = [[np.sqrt(sum(squares))] * leaves, [np.sqrt(s) for s in squares]]
    limits = [bounds[:1] * leaves, bounds[1:]]
    for (part, loss_), norm, limit in zip(found, norms, limits):
        factors = [
            np.where(w != 0, w * np.minimum(1, b / np.maximum(n, 1e-30)), 0)
            for n, b in zip(norm, limit)
        ]
        close(
            [np.asarray(v, np.float32) for v in jax.tree.leaves(part.value)],
            [rowwise(f, g) for f, g in zip(factors, grads)],
            rtol=rtol,
            atol=atol,
        )
        over = np.any([n > b for n, b in zip(norm, limit)], 0) & (w != 0)
        close(
            [part.clipped, part.count, part.weight, loss_],
            [over.sum(1), (w != 0).sum(1), w.sum(1), np.where(w != 0, losses, 0).sum(1)],
            rtol=rtol,
        )
    assert 0 < found[0][0].clipped.sum() < (w != 0).sum()
    return found


@pytest.mark.by_default("conv", "own_parameter", "standardized", "tied")
@pytest.mark.parametrize("name", COVERED)
def test_equal_to_vmap(name):
    """Two clients have different parameters and weights, and rows of weight 0 are NaN."""
    loss, params, x, y = problem(*COVERED[name])
    assert not ghost.read(loss, *example(params, x, y)).why_not
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = np.where((WEIGHTS == 0).reshape(WEIGHTS.shape + (1,) * (x.ndim - 2)), np.nan, x)
    check_sums(loss, params, x, y)


@pytest.mark.parametrize("name", ["conv", "tied"])
def test_automatic_clipping(name):
    """With both paths, it scales each gradient of a loop over rows."""
    loss, params, x, y = problem(*COVERED[name])
    stage = jfl.clip_automatic(0.7, 0.3)
    one = jax.jit(jax.vmap(jax.vmap(jax.grad(loss), (None, 0, 0))))
    grads = [np.asarray(g, np.float64) for g in jax.tree.leaves(one(params, x, y))]
    norms = np.sqrt(sum(np.square(g).reshape(2, ROWS, -1).sum(2) for g in grads))
    factors = np.where(WEIGHTS != 0, WEIGHTS * 0.7 / (norms + 0.3), 0)
    for path in ("bookkeeping", "vmap"):
        run = jax.jit(lambda *args, path=path: sums(loss, stage, *args, path=path))
        part, _ = run(params, x, y, WEIGHTS)
        want = [rowwise(factors, g) for g in grads]
        close(jax.tree.leaves(part.value), want, rtol=2e-4, atol=2e-5)


@pytest.mark.by_default(
    "transformed_twice",
    "loop",
    "loop_over_copies",
    "loop_reads_copies",
    "mixed",
    "penalised",
    "shared",
)
@pytest.mark.parametrize("name", REFUSED)
def test_without_a_rule(name):
    """The reason names the leaf, whose gradients are formed, and the result is the same."""
    make, shape, reasons = REFUSED[name]
    loss, params, x, y = problem(make, shape)
    book = ghost.read(loss, *example(params, x, y))
    assert set(book.why_not) == set(reasons) and book.rules
    for leaf, reason in reasons.items():
        assert reason in book.why_not[leaf], book.why_not
    check_sums(loss, params, x, y, layers=name == "shared")
    with pytest.raises(ValueError, match=f"a rule for every parameter.*{next(iter(reasons))}"):
        jax.eval_shape(
            lambda: sums(loss, jfl.clip_l2(1.0), params, x, y, WEIGHTS, path="bookkeeping")
        )


@pytest.mark.parametrize(
    "name, grid, without_rule",
    [
        ("mlp", (2, 3), set()),
        ("dense_at_few_positions", (2, 4), {"layers_0/kernel"}),
        ("dense_at_many_positions", (5,), {"layers_0/kernel"}),
        ("own_parameter", (2,), {"own"}),
        ("loop_of_vectors", (2, 2), {"own"}),
    ],
)
def test_clips_by_bands(name, grid, without_rule):
    """Clip in the norm of a shape, and compare with gradients that are transformed and clipped."""
    loss, params, x, y = problem(*COVERED[name])
    one = example(params, x, y)
    bands = jfl.bands.pixels(one[0], grid)
    shape = jfl.wavelet.shape(bands, np.linspace(0.5, 2.0, jfl.bands.count(bands)))
    book = ghost.read(loss, *one, haar_bands.leaves_by_rows(bands))
    assert set(book.why_not) == without_rule and haar_bands.leaves_by_rows(bands)

    @jax.jit
    def gradients(params, x, y):
        grads = jax.vmap(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, y)
        return grads, jax.vmap(jax.vmap(functools.partial(jfl.bands.analyse, bands)))(grads)

    grads, coefficients = jax.device_get(gradients(params, x, y))
    scaled = [c * np.asarray(shape.scales)[i] for c, i in zip(coefficients, jfl.bands.ids(bands))]
    norms = np.sqrt(sum(np.square(np.float64(c)).reshape(2, ROWS, -1).sum(2) for c in scaled))
    bound = 1.001 * np.median(norms)
    clip = jfl.wavelet.clip_ellipsoid(bound, shape)
    part, _ = jax.jit(functools.partial(sums, loss, clip))(params, x, y, WEIGHTS)
    factors = WEIGHTS * np.minimum(1, bound / norms)
    wanted = [np.float32(rowwise(factors, g)) for g in jax.tree.leaves(grads)]
    close(jax.tree.leaves(part.value), wanted, rtol=2e-4, atol=2e-5)
    over = (norms > bound) & (WEIGHTS != 0)
    assert np.array_equal(part.clipped, over.sum(1)) and 0 < over.sum() < (WEIGHTS != 0).sum()


def test_any_loss_and_no_flax():
    """A loss without flax has an unused leaf, a number that is used twice, and tables whose indices
    wrap, are clipped or exceed the end."""
    normal = lambda *shape: np.random.default_rng(0).normal(size=shape)
    params = dict(
        w=np.arange(12.0).reshape(4, 3) / 9,
        table=normal(5, 4),
        rest=np.ones(2),
        heat=0.3,
        clip=normal(3, 4),
    )

    def loss(p, x, y):
        h = jnp.take(p["table"], x, axis=0, fill_value=0.0).sum(0) + jnp.take(
            p["clip"], x, axis=0, mode="clip"
        ).mean(0)
        return jnp.square(jnp.tanh(p["heat"] * h) @ p["w"] - p["heat"]).sum() * (1 + y)

    x = np.array([[0, 1, 1], [4, 4, 4], [-1, 4, 2], [7, 0, -9], [9, 9, 9]], np.int32)
    two = lambda v, dtype=np.float32: np.stack([v, v]).astype(dtype)
    params, x, y = jax.tree.map(two, params), two(x, np.int32), two(np.arange(5.0))
    loss = Fn(loss)
    assert not ghost.read(loss, *example(params, x, y)).why_not
    flat_clip = check_sums(loss, params, x, y)[0][0]
    assert not np.any(flat_clip.value["rest"]) and np.all(flat_clip.value["heat"] != 0)


def test_leaves_of_the_loss_are_data():
    """A loss may hold hyperparameters, which may be traced."""
    loss = Fn(lambda w, x, y, *, slope: slope * squared(w, x, y), dict(slope=jnp.float32(2)))
    params = start_params()
    x, y, w = jax.random.normal(KEY, (4, 3)), jnp.ones(4), jnp.ones(4)

    def total(slope, path):
        grad = jfl.private_grad(
            Fn(loss.function, dict(slope=slope)),
            jfl.chain(jfl.clip_l2(3.0), jfl.total()),
            path=path,
        )
        return per_example.clipped_sum(grad, params, Batch(x, y, w != 0), w)

    slopes = jnp.array([0.5, 1.0, 4.0])
    fast, plain = jax.jit(
        lambda s: [jax.vmap(functools.partial(total, path=p))(s) for p in ("bookkeeping", "vmap")]
    )(slopes)
    close(fast, plain)
    assert len(set(np.asarray(fast[0].clipped).tolist())) > 1


def test_no_gradient_of_an_example_is_held():
    """No array of the program is as large as all per-example gradients together."""
    loss, params, x, y = problem(lambda: layers(nn.Dense(40), nn.tanh, nn.Dense(30)), (2, 50))

    def largest(path):
        grad = jfl.private_grad(loss, jfl.chain(jfl.clip_l2(1.0), jfl.total()), path=path)
        run = lambda p: per_example.clipped_sum(
            grad, p, Batch(x[0], y[0], WEIGHTS[0] != 0), WEIGHTS[0]
        )
        closed = jax.make_jaxpr(run)(jax.tree.map(lambda w: w[0], params))
        return max(v.aval.size for e in closed.jaxpr.eqns for v in e.outvars)

    assert largest("vmap") >= ROWS * 50 * 40 and largest("auto") <= 50 * 40


@pytest.mark.slow
def test_half_precision():
    """With bfloat16 parameters, norms and sums are in float32, and the release keeps the dtype."""
    loss, params, x, y = problem(lambda: layers(nn.Dense(5), nn.tanh, nn.Dense(4)), (3, 6))
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    for part, _ in check_sums(loss, half, x, y, rtol=0.02, atol=0.02):
        assert all(v.dtype == jnp.float32 for v in jax.tree.leaves(part.value))
        assert set(part.dtypes[1]) == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("path", ["auto", "vmap"])
def test_gradients_of_complex_parameters_are_refused(path):
    """Noise is real, so it would not hide their imaginary parts."""
    stages = jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0)
    noise = jfl.chain(*stages, adjacency="add_remove")
    grad = jfl.private_grad(lambda w, x, y: jnp.imag(x @ w) * y, noise, path=path)
    batch = Batch(jnp.ones((2, 3)), jnp.ones(2), jnp.ones(2, bool))
    zero = jnp.int32(0)
    context = Context(zero, zero, zero, jnp.float32(1), 1, jnp.float32(1))
    with pytest.raises(ValueError, match="contributions of floats, but got complex64"):
        grad(jax.random.key(0), jnp.ones(3, jnp.complex64), batch, context)


# --- what is not finite, and what nearly cancels


@pytest.mark.parametrize(
    "stage, bad",
    [
        (jfl.clip_l2(1.0), np.inf),
        (jfl.clip_per_layer((1.0, 0.5)), np.nan),
        pytest.param(jfl.clip_l2(1.0), 1e25, marks=pytest.mark.slow),
    ],
    ids=["l2-inf", "layers-nan", "l2-1e25"],
)
def test_a_gradient_that_is_not_finite_counts_as_zero(stage, bad):
    """This holds for both paths, and in blocks.  The square of 1e25 is not finite in float32."""
    loss, params, y = Fn(squared), start_params(), jnp.ones(4)
    all_, but_one = jnp.ones(4), jnp.ones(4).at[2].set(0.0)

    @jax.jit
    def parts(x, w):
        grads = [
            jfl.private_grad(loss, jfl.chain(stage, jfl.total()), path=p, microbatch=m)
            for p in ("bookkeeping", "vmap")
            for m in (None, 3)
        ]
        return [per_example.clipped_sum(g, params, Batch(x, y, w != 0), w)[0] for g in grads]

    x = jnp.ones((4, 3))
    for with_it, without in zip(parts(x.at[2, 1].set(bad), all_), parts(x, but_one)):
        assert same_bits(with_it.value, without.value) and np.isfinite(flat(without.value)).all()
        assert int(with_it.nonfinite) == 1 and int(without.nonfinite) == 0
        assert float(with_it.count) == 4 and float(with_it.clipped) == float(without.clipped)


@pytest.mark.parametrize(
    "device, path, lengths",
    [
        ("cpu", "bookkeeping", [3]),  # blocks of 7, of which the last has one empty place
        ("cpu", "vmap", [20]),
        ("gpu", "bookkeeping", []),
        ("gpu", "vmap", []),
    ],
)
def test_only_a_cpu_sums_a_large_batch_in_blocks(device, path, lengths, monkeypatch):
    monkeypatch.setattr(per_example, "MAX_CPU_ACTIVATIONS", 1)
    monkeypatch.setattr(per_example, "MAX_CPU_GRADIENTS", 1)
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    params, rows = start_params(), 20
    x = jax.random.normal(KEY, (rows, 3))
    batch = Batch(x, x[:, 0], jnp.ones(rows, bool))

    def total(**options):
        chain = jfl.chain(jfl.clip_l2(0.1), jfl.total())
        grad = jfl.private_grad(Fn(squared), chain, path=path, **options)
        return lambda: per_example.clipped_sum(grad, params, batch, jnp.ones(rows))

    found = [e for e in jax.make_jaxpr(total())().eqns if e.primitive.name == "scan"]
    assert [e.params["length"] for e in found] == lengths
    for part, whole in zip(*(jax.tree.leaves(total(**o)()) for o in ({}, dict(microbatch=rows)))):
        close(part, whole, rtol=1e-6)


def test_activations_of_a_loop_count_in_each_iteration():
    loop = lambda w, x, y: jax.lax.scan(lambda h, _: (h * w, None), x, length=5)[0].sum()
    book = ghost.read(jax.tree_util.Partial(loop), jnp.ones(3), jnp.ones(3), 0)
    assert 15 <= ghost.num_activations(book) <= 20


def test_a_product_that_overflows_is_left_out():
    """If activations and backprops are finite but their product is not, both are masked."""

    @jax.jit
    def clipped(part):
        norm = jnp.sqrt(part.squares())
        return norm, part.total(shrink(norm, 1.0))

    part = Product(*(np.full((2, 1, 1, 2), v, np.float32) for v in (1e18, 1e21)))
    part.a[1], part.b[1] = 0.5, 0.5
    (norm, both), (_, alone) = clipped(part), clipped(Product(part.a[1:], part.b[1:]))
    assert np.isfinite(norm).tolist() == [False, True] and np.isfinite(alone).all()
    assert same_bits(both, alone)


@jax.jit
def squares_of_product(a, b):
    return product(a, b).squares()


@pytest.mark.parametrize("common", [10.0, 1e5])
def test_norms_that_cancel_are_never_too_small(common):
    """Backprops nearly cancel, and activations have a large common part."""
    r = np.random.default_rng(0)
    a = common + r.normal(size=(20, 1, 4, 40))
    b = r.normal(size=(20, 1, 4, 30))
    b -= b.mean(2, keepdims=True)
    a, b = a.astype("f4"), b.astype("f4")
    assert isinstance(product(a, b), Product)
    found = np.asarray(squares_of_product(a, b))
    true = np.square(np.einsum("nepi,nepo->neio", a.astype("f8"), b.astype("f8"))).sum((1, 2, 3))
    assert (found >= true * (1 - 1e-5)).all()
    if common == 10.0:
        np.testing.assert_allclose(found, true, rtol=0.02)


# --- kernels


@pytest.mark.by_default("shape0", "shape1")
@pytest.mark.parametrize("shape", [(3, 2, 1, 4, 5), (3, 1, 2, 4, 5), (3, 2, 6, 2, 2)])
def test_products_against_formed_gradients(shape):
    n, e, places, i, o = shape
    r = np.random.default_rng(0)
    a, b = (r.normal(size=(n, e, places, last)).astype("f4") for last in (i, o))
    g, factor = np.einsum("nepi,nepo->neio", a, b), np.float32([0.5, 0.0, 2.0])

    @jax.jit
    def run(a, b, g):
        parts = (Product(a, b), product(a, b), Formed(g))
        spoilt = [type(p)(*(v.at[1].set(jnp.nan) for v in p)) for p in parts]
        return [
            (p.squares(), p.total(factor), q.total(factor))
            for p, q in zip(parts, spoilt, strict=True)
        ]

    for squares, whole, spoilt in run(a, b, g):
        np.testing.assert_allclose(squares, np.square(g).sum((1, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(whole, np.einsum("n,neio->eio", factor, g), rtol=1e-4, atol=1e-5)
        close(spoilt, whole)


@pytest.mark.parametrize(
    "backend, rows, outputs, has_product",
    [("gpu", 32, 64, False), ("gpu", 33, 64, True), ("gpu", 31, 65, True), ("cpu", 30, 64, True)],
)
def test_a_gpu_adds_up_few_small_outer_products_itself(
    backend, rows, outputs, has_product, traced_for
):
    """Each shape is traced once: what was traced for one backend stays for the others."""
    traced_for(backend)
    r = np.random.default_rng(0)
    a, b = (r.normal(size=(rows, 1, 1, last)).astype("f4") for last in (128, outputs))
    factor = np.float32(r.uniform(size=rows))
    total = lambda a, b: Product(a, b).total(factor)
    assert ("dot_general" in str(jax.make_jaxpr(total)(a, b))) == has_product
    expected = np.einsum("n,nepi,nepo->eio", factor.astype("f8"), a, b)
    np.testing.assert_allclose(jax.jit(total)(a, b), expected, atol=2e-5)


@pytest.mark.parametrize(
    "places, inputs, outputs, kind",
    [
        pytest.param(128, 512, 512, Product, id="gpt of width 512"),
        pytest.param(1024, 27, 64, Formed, id="first convolution of resnet18"),
        pytest.param(64, 2304, 256, Product, id="third stage of resnet18"),
        pytest.param(3, 6, 3, Formed, id="equal size"),
        pytest.param(1, 1, 1, Product, id="one position"),
    ],
)
def test_gradients_are_formed_if_they_are_smaller_than_gram_matrices(places, inputs, outputs, kind):
    """Two Gram matrices have 2 P^2 numbers for each example, and a gradient has I O."""
    sizes = [jax.ShapeDtypeStruct((2, 1, places, n), jnp.float32) for n in (inputs, outputs)]
    assert type(jax.eval_shape(product, *sizes)) is kind


def test_lookups_against_formed_gradients():
    at = np.array([[0, 2, 0, 5], [1, 1, 1, 1], [5, 5, 3, 3]])  # 5 is no row
    b = np.random.default_rng(0).normal(size=(3, 4, 2)).astype("f4")
    g, factor = np.zeros((3, 6, 2)), np.float32([1.0, -0.5, 2.0])
    np.add.at(g, (np.arange(3)[:, None], at), b)
    g = g[:, :5]
    squares, whole = jax.jit(lambda at, b: ((p := Lookup(at, b, 5)).squares(), p.total(factor)))(
        at, b
    )
    np.testing.assert_allclose(squares, np.square(g).sum((1, 2)), rtol=1e-5)
    np.testing.assert_allclose(whole, np.einsum("n,nvd->vd", factor, g), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size, gamma", [(1e8, None), (1.0, 1e-6), (1e6, 0.01)])
def test_lookups_that_cancel_pass_no_bound(size, gamma):
    """What rounding leaves of them differs between the norm and the sum, and may be long."""
    r, at = np.random.default_rng(0), np.zeros((1, 16), np.int32)
    b = np.float32(r.normal(size=(40, 1, 16, 8)) * size)
    b[:, 0, -1] = 0
    b[:, 0, -1] = -np.cumsum(b[:, 0], 1, dtype=np.float32)[:, -1]  # the sum in this order is 0

    @jax.jit
    def run(b):
        part = Lookup(at, b, 5)
        return part.total(shrink(jnp.sqrt(part.squares()), 1.0, gamma))

    for one in b:
        assert np.linalg.norm(np.asarray(run(one), np.float64)) <= 1 + 1e-5


# --- plans


@pytest.mark.parametrize("backend", ["gpu", pytest.param("tpu", marks=pytest.mark.slow)])
def test_convolutions_of_an_accelerator_have_a_rule(backend, traced_for):
    """On an accelerator, XLA's convolution may be used, also with book-keeping."""
    traced_for(backend)
    loss, params, x, y = problem(*COVERED["conv"])
    book = ghost.read(loss, *example(params, x, y))
    assert not book.why_not and "conv_general_dilated" in str(book.jaxpr)
    check_sums(loss, params, x, y, layers=False)


@pytest.mark.by_default("bookkeeping")
@pytest.mark.parametrize("path", ["bookkeeping", "vmap"])
def test_a_coarse_forward_pass_keeps_the_bound(path):
    """With compute="bfloat16", gradients are coarse, but clipped to the bound in float32."""
    loss, params, x, y = problem(*COVERED["dense_at_few_positions"])
    bound, worst = 0.05, 0.0

    @jax.jit
    def run(params, x, y, weight):
        of = lambda **how: sums(loss, jfl.clip_l2(bound), params, x, y, weight, path=path, **how)
        return of(compute="bfloat16")[0], of()[0].value

    for row in range(3):
        weight = np.zeros((2, ROWS), np.float32)
        weight[:, row] = 1.0
        part, fine = run(params, x, y, weight)
        assert {v.dtype for v in jax.tree.leaves(part.value)} == {jnp.dtype("float32")}
        leaves = [np.float64(v).reshape(2, -1) for v in jax.tree.leaves(part.value)]
        norms = np.linalg.norm(np.concatenate(leaves, 1), axis=1)
        assert (np.asarray(part.clipped) == 1).all() and (norms <= bound * (1 + 1e-6)).all()
        worst = max(worst, abs(norms / bound - 1).max())
        pairs = zip(*map(jax.tree.leaves, (part.value, fine)))
        off = [np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in pairs]
        assert 1e-4 < max(off) < 0.2  # it is coarse, and it is the gradient
    assert worst < 1e-5  # a norm in bfloat16 would be off by about 1e-3


TWO_CLIPS = (jfl.clip_per_layer(1.0), jfl.clip_l2(0.1))


@pytest.mark.parametrize(
    "clips, model, options, path",
    [
        ((jfl.clip_l2(1.5),), {}, {}, "bookkeeping"),
        ((jfl.clip_automatic(),), {}, {}, "bookkeeping"),
        ((jfl.clip_per_layer(1.0),), {}, {}, "bookkeeping"),
        ((jfl.clip_l2(1.5),), {}, dict(compute="bfloat16"), "bookkeeping in bfloat16"),
        ((jfl.clip_l2(1.5),), {}, dict(path="vmap"), "vmap"),
        (TWO_CLIPS, {}, {}, "vmap"),
        (
            (jfl.clip_l2(1.5),),
            dict(module=Shared()),
            {},
            "bookkeeping (vmap for same/bias)",
        ),
        (None, {}, {}, "none"),
    ],
)
def test_the_path_is_known(clips, model, options, path):
    """The record of a run names the path, and the leaves that take another."""
    fed = make_federation(classes=3)
    task = jfl.models.flax(fed, **model) if model else jfl.models.mlp(fed, hidden=(4,))
    grad = jfl.grad(task.loss)
    if clips is not None:
        grad = jfl.private_grad(task.loss, jfl.chain(*clips, jfl.total()), **options)
    algorithm = jfl.algorithms.fedavg(grad, batch=jfl.batches.without_replacement(3))
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))
    assert per_example.gradient_path(plan) == path


@pytest.mark.parametrize(
    "stages, options, match",
    [
        (TWO_CLIPS, dict(path="bookkeeping"), "clip_automatic or clip_per_layer"),
        ((jfl.clip_l2(1.0),), dict(path="ghost"), "path"),
        ((jfl.clip_l2(1.0),), dict(compute="int8"), "compute"),
    ],
)
def test_what_book_keeping_cannot_do_is_refused(stages, options, match):
    with pytest.raises(ValueError, match=match):
        jfl.private_grad(squared, jfl.chain(*stages, jfl.total()), **options)


OTHER_BANDS = jfl.bands.pixels({"w": jnp.zeros((6, 2))}, (2, 3))


@pytest.mark.parametrize(
    "clip, match",
    [
        (jfl.clip_per_layer([1.0] * 5), "clip_per_layer: expected bounds for the 6 leaves"),
        (
            jfl.wavelet.clip_ellipsoid(1.0, jfl.wavelet.ellipsoid(OTHER_BANDS)),
            "Make the bands from this contribution",
        ),
    ],
    ids=["bounds", "bands"],
)
def test_a_clip_for_other_parameters_is_refused(clip, match):
    loss, params, x, y = problem(*COVERED["mlp"])
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda: sums(loss, clip, params, x, y, WEIGHTS))


def test_one_bound_is_divided_over_the_leaves():
    loss, params, x, y = problem(*COVERED["mlp"])
    n = len(jax.tree.leaves(params))
    stages = [jfl.clip_per_layer(bounds) for bounds in (0.3, [0.3 / np.sqrt(n)] * n)]
    found = jax.jit(lambda: [sums(loss, s, params, x, y, WEIGHTS) for s in stages])()
    jax.tree.map(lambda *each: np.testing.assert_allclose(*each, rtol=1e-5), *found)


def test_a_loss_that_fails_says_of_what_rows():
    """If rows have another shape than the loss expects, a note states the shapes."""
    loss = Fn(lambda w, x, y: (jnp.ones(3) @ x @ w).sum())
    with pytest.raises(TypeError, match="dot_general") as error:
        ghost.read(loss, jnp.ones(9), jnp.ones((2, 5)), 0)
    assert any("x and y are float32[2, 5] and" in note for note in error.value.__notes__)
