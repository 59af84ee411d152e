"""Haar transforms, and the bands of a contribution that they make."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close, flat, raw, same_bits
from jfl.kernels import haar
from jfl.kernels.normals import normals
from scipy.stats import chi2, norm

from jfl.privacy.mechanisms import haar_bands, wavelet

pytestmark = pytest.mark.accelerator

GOLDEN = np.array([4, 8, 1, 9, 8, 4, 5, 3], np.float32)
GOLDEN_H = np.array([5.25, -2, -4, 2, 1, 0.5, 1, 0.25])


# one program is compiled much faster than its operations one by one
analysis = jax.jit(haar.analysis)
analyse = jax.jit(haar_bands.analyse, static_argnums=0)
energies = jax.jit(haar_bands.energies, static_argnums=0)


def orthonormal(m):
    """Q from its definition: a row is +1 on the left and -1 on the right half of a node, scaled to
    length 1."""
    rows, size = [np.full(m, m**-0.5)], 2
    while size <= m:
        node = np.repeat([size**-0.5, -(size**-0.5)], size // 2)
        rows += [np.pad(node, (begin, m - size - begin)) for begin in range(0, m, size)]
        size *= 2
    return np.array(rows)


def pyramid(x):
    """The square pyramid of x [m, m], a quadruple at a time."""
    levels = []
    while len(x) > 1:
        a, b, c, d = x[0::2, 0::2], x[0::2, 1::2], x[1::2, 0::2], x[1::2, 1::2]
        levels += [(a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2]
        x = (a + b + c + d) / 2
    return np.concatenate([np.ravel(p) for p in (x, *levels)])


def covariance_of_noise(m):
    """Covariance of the noise of std leaves ** -0.5 on the coefficients."""
    q = orthonormal(m)
    return q.T @ np.diag(1.0 / haar.leaves(m)) @ q


# --- one axis


def test_example_of_the_paper():
    np.testing.assert_allclose(analysis(GOLDEN) / np.sqrt(haar.leaves(8)), GOLDEN_H, rtol=1e-6)
    back = jax.jit(haar.synthesis, static_argnums=1)(GOLDEN_H * np.sqrt(haar.leaves(8)), 8)
    np.testing.assert_allclose(back, GOLDEN, rtol=1e-6)
    covariance = covariance_of_noise(8)[0]
    np.testing.assert_allclose(covariance[:4], [0.34375, -0.15625, -0.03125, -0.03125], atol=1e-15)


@pytest.mark.parametrize("m", [2, 8, 64])
def test_the_matrix_of_the_transform(m):
    with jax.enable_x64(True):
        transform = np.asarray(analysis(jnp.eye(m, dtype=jnp.float64))).T
    np.testing.assert_allclose(transform, orthonormal(m), atol=1e-12)


@pytest.mark.parametrize(
    "d, dtype, tolerance",
    [(1, "float32", 1e-5), (37, "bfloat16", 8e-2), (64, "float16", 1e-2), (70, "float64", 1e-12)],
)
def test_reconstruction_and_energy(d, dtype, tolerance):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(d).normal(size=(3, 1, d)), dtype)
        c, back = jax.jit(lambda x: (c := haar.analysis(x), haar.synthesis(c, d)))(x)
    m = 2 ** int(np.ceil(np.log2(d)))
    assert c.shape == (3, 1, m) and back.shape == x.shape and c.dtype == back.dtype == x.dtype
    wide, coefficients = np.asarray(x, np.float64), np.asarray(c, np.float64)
    want = wide @ orthonormal(m)[:, :d].T
    np.testing.assert_allclose(coefficients, want, atol=5 * tolerance)
    np.testing.assert_allclose(np.asarray(back, np.float64), wide, atol=5 * tolerance)


def test_gradients_and_rows_under_vmap():
    """The map is linear and orthonormal: its transpose is its inverse."""
    r, d, m = np.random.default_rng(5), 5, 8
    x, g = (jnp.asarray(r.normal(size=(3, n)), jnp.float32) for n in (d, m))
    q = jnp.asarray(orthonormal(m), jnp.float32)

    @jax.jit
    def run(x, g):
        pull_there = jax.vjp(haar.analysis, x)[1]
        pull_back = jax.vjp(lambda c: haar.synthesis(c, d), g)[1]
        rows = jax.vmap(haar.analysis)(x), jax.vmap(lambda c: haar.synthesis(c, d))(g)
        return pull_there(g)[0], pull_back(x)[0], *rows

    forward, backward = x @ q[:, :d].T, g @ q[:, :d]
    close(run(x, g), (backward, forward, forward, backward))


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected 4"):
        haar.synthesis(GOLDEN, 4)
    with pytest.raises(ValueError, match="power of two"):
        haar.levels(6)


# --- two axes


@jax.jit
def analysis2(x):
    """The coefficients of the pyramid of x [..., h, w], in one axis."""
    return haar.join(haar.split(x, (-2, -1)), x.shape[-2:], (-2, -1))


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (1, 3), (5, 3)])
def test_pyramid(shape):
    m = 1 << (max(shape) - 1).bit_length()
    x = np.random.default_rng(7).normal(size=(2, *shape)).astype(np.float32)
    back = lambda c: haar.merge(haar.cut(c, shape), shape, (-2, -1))
    c, x_again = jax.jit(lambda x: (c := analysis2(x), back(c)))(x)
    padded = np.zeros((2, m, m))
    padded[:, : shape[0], : shape[1]] = x
    np.testing.assert_allclose(c, [pyramid(p) for p in padded], atol=1e-6)
    np.testing.assert_allclose(x_again, x, atol=1e-6)


def merged(pieces, length):
    """The vector, or the columns, of pieces [d, ...], a level at a time in float64."""
    x, *details = [np.asarray(p, np.float64) for p in pieces]
    for level, high in reversed([*enumerate(details)]):
        pairs = np.stack([x + high, x - high], 1) / np.sqrt(2)
        x = pairs.reshape(-1, *x.shape[1:])[: -(-length // 2**level)]
    return x


@pytest.mark.parametrize("backend", ["cpu", "tpu"])
@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("length", [1, 3, 32, 33, 1025, 40_000])
def test_merge_is_a_loop_over_levels(length, columns, backend, traced_for):
    """By products along a last axis, by a loop over all levels along another axis."""
    traced_for(backend)
    r = np.random.default_rng(length)
    shapes = [piece + columns for _, piece, _ in haar.layout(length)]
    pieces = [r.normal(size=shape).astype(np.float32) for shape in shapes]
    found = jax.jit(lambda pieces: haar.merge(pieces, (length,), (0,)))(pieces)
    np.testing.assert_allclose(found, merged(pieces, length), atol=3e-6)


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (1, 3), (5, 3), (32, 33)])
def test_a_tpu_merges_a_small_pyramid_by_one_product(shape, traced_for):
    """The result is that of the loop over levels, which a TPU uses for larger arrays."""
    r = np.random.default_rng(8)
    pieces = [r.normal(size=(*g, 3)).astype(np.float32) for _, g, _ in haar.layout(*shape)]
    by_levels = jax.jit(lambda pieces: haar.merge(pieces, shape, (0, 1)))(pieces)
    traced_for("tpu")
    merge = jax.jit(lambda pieces: haar.merge(pieces, shape, (0, 1)))
    products = str(jax.make_jaxpr(merge)(pieces)).count("dot_general")
    assert products == (1 < math.prod(shape) <= 1024)
    np.testing.assert_allclose(merge(pieces), by_levels, atol=2e-6)


# --- bands

LIKE = {
    "b": jax.ShapeDtypeStruct((3,), jnp.float32),
    "s": jax.ShapeDtypeStruct((), jnp.float32),
    "w": jax.ShapeDtypeStruct((30, 2), jnp.float32),
}
# name -> bands, (block, level, leaves, size) of each band
TABLE = {
    "flat": (haar_bands.flat(LIKE), [(0, 0, 64, 1), *[(0, k, 2**k, 64 >> k) for k in range(1, 7)]]),
    "per_layer": (
        haar_bands.per_layer(LIKE),
        [
            (0, 0, 4, 1),
            (0, 1, 2, 2),
            (0, 2, 4, 1),
            (1, -1, 1, 1),
            (2, 0, 64, 1),
            *[(2, k, 2**k, 64 >> k) for k in range(1, 7)],
        ],
    ),
    "plain": (haar_bands.plain(LIKE), [(0, -1, 1, 64)]),
    "image": (
        haar_bands.pixels(LIKE, (5, 6)),
        [(0, -1, 1, 3), (1, -1, 1, 1), (2, 0, 64, 2), (2, 1, 4, 96), (2, 2, 16, 24), (2, 3, 64, 6)],
    ),
    "colours": (
        haar_bands.pixels(LIKE, (3, 5, 2)),
        [
            (0, -1, 1, 3),
            (1, -1, 1, 1),
            (2, 0, 64, 4),
            (2, 1, 4, 192),
            (2, 2, 16, 48),
            (2, 3, 64, 12),
        ],
    ),
}


def contribution(seed=0, dtype=np.float32):
    r = np.random.default_rng(seed)
    return {k: jnp.asarray(r.normal(size=v.shape), dtype) for k, v in LIKE.items()}


def norms_of_levels(x):
    """Float64, of the base and of each level of x [2**L], a level at a time."""
    means, details = np.asarray(x, np.float64), []
    while len(means) > 1:
        low, high = means[0::2], means[1::2]
        details.append(np.linalg.norm(low - high) / np.sqrt(2))
        means = (low + high) / np.sqrt(2)
    return np.array([abs(means[0]), *details])


@pytest.mark.parametrize("length", (1, 3, 32, 33, 1025, 40_000))
def test_energies_are_those_of_the_coefficients(length):
    x = np.random.default_rng(length).normal(size=length) + 0.5
    wanted = norms_of_levels(np.pad(x, (0, 2 ** haar.height(length) - length))) ** 2
    # a detail of few coefficients may be small beside the sums that it is the difference of
    rounding = 1e-7 * np.square(x).sum()
    found = jax.jit(haar.energies)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("length", (32, 32_768))
def test_a_band_of_a_row_that_is_much_longer_keeps_its_bound(length):
    r = np.random.default_rng(length)
    offset = r.uniform(1e5, 2e5, (6, 1)).astype(np.float32)  # 1e7 times the bound
    some = r.integers(-1, 2, (6, length)) * (r.random((6, length)) < 0.2)
    rows = (offset + np.spacing(offset) * some).astype(np.float32)
    b = haar_bands.flat(rows[0])
    bounds = jnp.full(haar_bands.count(b), 0.01)
    shrunk, norms = jax.jit(jax.vmap(lambda row: haar_bands.shrink(b, bounds, row)))(rows)
    for before, after, longest in zip(rows, shrunk, norms):
        assert longest[0] == pytest.approx(norms_of_levels(before)[0], rel=1e-5)
        assert norms_of_levels(after).max() <= 0.01 * (1 + 1e-5)


@pytest.mark.parametrize("name", TABLE)
def test_bands_are_where_they_are_said_to_be(name):
    b, table = TABLE[name]
    assert haar_bands.count(b) == len(table)
    columns = [
        f(b).tolist()
        for f in (haar_bands.blocks, haar_bands.levels, haar_bands.leaves, haar_bands.sizes)
    ]
    assert list(zip(*columns)) == table
    tree = contribution()
    coefficients = analyse(b, tree)
    wide = [np.broadcast_to(i, c.shape) for i, c in zip(haar_bands.ids(b), coefficients)]
    energy = sum(
        np.bincount(np.ravel(i), np.ravel(c) ** 2, len(table)) for i, c in zip(wide, coefficients)
    )
    assert (
        sum(np.bincount(np.ravel(i), minlength=len(table)) for i in wide).tolist()
        == haar_bands.sizes(b).tolist()
    )
    np.testing.assert_allclose(energies(b, tree), energy, rtol=1e-5)
    np.testing.assert_allclose(energy.sum(), np.square(flat(tree)).sum(), rtol=1e-5)


@pytest.mark.parametrize("name", ["per_layer", "plain", "image"])
def test_transforms_of_bands(name):
    b, table = TABLE[name]
    tree, n = contribution(), len(table)
    values = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, n), jnp.float32)

    @jax.jit
    def run(tree):
        c, half = haar_bands.analyse(b, tree), jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        by_band = [x * values[i] for x, i in zip(c, haar_bands.ids(b))]
        return dict(
            back=haar_bands.synthesise(b, c, tree),
            scaled=haar_bands.scale(b, values, tree),
            by_band=haar_bands.synthesise(b, by_band, tree),
            slope=jax.grad(lambda t: haar_bands.energies(b, t) @ values / 2)(tree),
            half=(half, haar_bands.scale(b, jnp.ones(n), half)),
        )

    out = run(tree)
    close(out["back"], tree, atol=1e-5)
    close(out["scaled"], out["by_band"], atol=1e-5)
    # half the gradient of the energies that it weighs
    close(out["slope"], out["scaled"], atol=1e-5)
    assert same_bits(*out["half"])


def test_pixels_of_each_column():
    tree = contribution()
    w = tree["w"].reshape(3, 5, 2, 2)  # colours come last: they are more columns
    close(
        analyse(TABLE["colours"][0], tree)[2].T.reshape(2, 2, 64),
        analysis2(w.transpose(2, 3, 0, 1)),
    )
    close(analyse(TABLE["image"][0], tree)[2].T, analysis2(tree["w"].T.reshape(2, 5, 6)))
    close(analyse(haar_bands.pixels(LIKE, (30,)), tree)[2].T, analysis(tree["w"].T))
    whole = jnp.concatenate([x.ravel() for x in raw(tree)])
    close(analyse(TABLE["flat"][0], tree)[0], analysis(whole))


def test_bands_are_structure():
    """Static in a program: equal if they are made of the same shapes."""
    b = haar_bands.pixels(contribution(), (5, 6))
    assert not jax.tree.leaves(b) and b == TABLE["image"][0] and hash(b) == hash(TABLE["image"][0])
    assert b != TABLE["colours"][0]


@pytest.mark.parametrize(
    "call, where",
    [
        (lambda b, t: haar_bands.analyse(b, [t] * 2), "analyse"),
        (lambda b, t: haar_bands.energies(b, t | {"w": t["w"].T}), "energies"),
        (lambda b, t: haar_bands.scale(b, jnp.ones(5), t), "scale"),
        (lambda b, t: haar_bands.scale(b, 1.0, t), "scale"),
        (lambda b, t: haar_bands.noise(b, jax.random.key(0), jnp.ones(7), t), "noise"),
        (lambda b, t: haar_bands.synthesise(b, analyse(b, t), t["w"]), "synthesise"),
        (lambda b, t: haar_bands.pixels(t, (28, 28)), "pixels"),
        (lambda b, t: haar_bands.pixels(t, ()), "pixels"),
        (lambda b, t: haar_bands.plain(jnp.ones((0, 3))), "plain"),
    ],
)
def test_bands_refuse(call, where):
    with pytest.raises(ValueError, match=rf"^bands\.{where}: expected .*, but got "):
        call(TABLE["image"][0], contribution())


# --- noise


def assert_covariance(samples, sigma, alarm=1e-6):
    """Whitened samples [n, d] have the covariance of independent N(0, 1); a false alarm has
    probability `alarm`."""
    white = np.linalg.solve(np.linalg.cholesky(sigma), np.asarray(samples, np.float64).T)
    d, n = white.shape
    product, each = white @ white.T, alarm / (d * (d + 1) / 2)
    low, high = chi2.ppf([each / 2, 1 - each / 2], n)
    assert np.all((low < np.diag(product)) & (np.diag(product) < high))
    # a sum of n products of normals, by the central limit theorem
    assert np.all(np.abs(product[np.triu_indices(d, 1)]) < norm.isf(each / 2) * np.sqrt(n))


@pytest.mark.parametrize(
    "make, like, sigma, wrong",
    [
        (
            haar_bands.flat,
            jnp.ones(6),
            covariance_of_noise(8)[:6, :6],
            covariance_of_noise(8)[2:, 2:],
        ),
        (
            lambda like: haar_bands.pixels(like, (4,)),
            jnp.ones((4, 2)),
            np.kron(covariance_of_noise(4), np.eye(2)),
            np.kron(np.eye(2), covariance_of_noise(4)),
        ),
        (lambda like: haar_bands.pixels(like, (2, 3)), jnp.ones((6, 1)), None, np.eye(6) / 4),
    ],
    ids=["padded", "columns", "image"],
)
def test_covariance_of_the_noise(make, like, sigma, wrong):
    """The half that must fail: noise in another order, and 5 % of a standard deviation too little
    or too much."""
    b, draws = make(like), 20_000
    stds = jnp.asarray(haar_bands.leaves(b) ** -0.5, jnp.float32)
    if sigma is None:  # by the transform of the unit vectors
        units = jnp.eye(like.size).reshape(-1, *like.shape)
        square = jax.jit(jax.vmap(lambda t: haar_bands.scale(b, stds**2, t)))(units)
        sigma = np.asarray(square, np.float64).reshape(like.size, like.size)
    keys = jax.random.split(jax.random.key(3), draws)
    drawn = jax.jit(jax.vmap(lambda k: haar_bands.noise(b, k, stds, like)))(keys)
    samples = drawn.reshape(draws, -1)
    assert_covariance(samples, sigma)
    for other in (wrong, 1.12 * sigma, sigma / 1.12):
        with pytest.raises(AssertionError):
            assert_covariance(samples, other)


def test_noise_of_one_band_is_isotropic():
    """Draw for draw that of one leaf."""
    b = TABLE["plain"][0]
    both = jax.jit(lambda k: (haar_bands.noise(b, k, jnp.ones(1), LIKE), normals(k, jnp.ones(64))))
    noise, drawn = both(jax.random.key(5))
    assert np.array_equal(flat(noise), drawn)


# --- how much noise where


def test_prior():
    image = TABLE["image"][0]
    mean = (2 * 64 + 96 * 4 + 24 * 16 + 6 * 64) / 128  # of all coefficients of the pyramid
    assert haar_bands.prior(image).tolist() == [mean, mean, 64, 4, 16, 64]
    line = haar_bands.pixels(LIKE, (30,))
    assert haar_bands.prior(line).tolist()[2:] == [32, 2, 4, 8, 16, 32]
    assert haar_bands.prior(TABLE["plain"][0]).tolist() == [1.0]


def relative_stds(b, exponent, energies):
    return 1 / np.asarray(wavelet.ellipsoid(b, exponent, energies).scales, np.float64)


def test_stds_follow_energies_down_to_a_floor():
    b, n = TABLE["image"][0], haar_bands.sizes(TABLE["image"][0])
    energies = n * np.array([1, 4, 9, 16, 0, 1e-12])
    each = np.array([1, 4, 9, 16, 16e-6, 16e-6]) / 16  # two bands stand on the floor
    for exponent in (0.25, 0.5, 1.0):
        stds = relative_stds(b, exponent, energies)
        np.testing.assert_allclose(stds / stds[3], each ** (exponent / 2), rtol=1e-5)
    for stds in (relative_stds(b, 0.0, energies), relative_stds(b, 0.5, 0 * energies)):
        np.testing.assert_allclose(stds, 1.0, rtol=1e-6)
    prior = haar_bands.prior(b)  # and from no data
    stds = relative_stds(b, 0.25, None)
    np.testing.assert_allclose(stds / stds.max(), (prior / prior.max()) ** 0.125, rtol=1e-5)


@pytest.mark.parametrize("make", [haar_bands.flat, haar_bands.per_layer])
def test_energies_of_many_rows_are_summed_as_exactly_as_those_of_one(make):
    """One large entry before many small ones, which a sum in one order would drop: a row would then
    be longer than its clip norm."""
    n = 2**18
    row = np.full(n, 0.7, np.float32)
    row[1::2] *= -1
    row[:2] = (2896.0, -2896.0)  # its square takes all but half a digit of each other one
    found = jax.jit(jax.vmap(lambda x: haar_bands.energies(make(row), x)))(jnp.stack([row, row]))
    true = np.square(row.astype(np.float64)).sum()
    np.testing.assert_allclose(np.asarray(found, np.float64).sum(1), true, rtol=1e-5)
