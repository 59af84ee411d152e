"""Haar transforms, and the bands of a contribution that they make."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close, flat, raw, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jfl.kernels import haar
from jfl.kernels.normals import normals
from scipy.stats import chi2, norm

from jfl.privacy.mechanisms import haar_bands, wavelet

pytestmark = pytest.mark.accelerator

GOLDEN = np.array([4, 8, 1, 9, 8, 4, 5, 3], np.float32)
GOLDEN_H = np.array([5.25, -2, -4, 2, 1, 0.5, 1, 0.25])


# one program is compiled much faster than its operations one by one
analysis, analysis2 = jax.jit(haar.analysis, static_argnums=1), jax.jit(haar.analysis2)
analyse, energies = (
    jax.jit(f, static_argnums=0) for f in (haar_bands.analyse, haar_bands.energies)
)


def orthonormal(m):
    """Q from its definition: a row is +1 on the left and -1 on the right half of a node, scaled to
    length 1."""
    rows, size = [np.full(m, m**-0.5)], 2
    while size <= m:
        for begin in range(0, m, size):
            row = np.zeros(m)
            row[begin : begin + size // 2], row[begin + size // 2 : begin + size] = (
                size**-0.5,
                -(size**-0.5),
            )
            rows.append(row)
        size *= 2
    return np.array(rows)


def means_and_details(m):
    """H of the paper: means (a + b) / 2, details (a - b) / 2."""
    low, details = np.eye(m), []
    while len(low) > 1:
        low, high = (low[0::2] + low[1::2]) / 2, (low[0::2] - low[1::2]) / 2
        details.append(high)
    return np.concatenate([low, *details])


def pyramid(x):
    """The square pyramid of x [m, m], a quadruple at a time."""
    levels = []
    while len(x) > 1:
        a, b, c, d = x[0::2, 0::2], x[0::2, 1::2], x[1::2, 0::2], x[1::2, 1::2]
        levels += [(a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2]
        x = (a + b + c + d) / 2
    return np.concatenate([np.ravel(p) for p in (x, *levels)])


def closed_form(m):
    """Covariance of the noise of std 1 / W_j on the paper's coefficients."""
    i, j = np.indices((m, m))
    k = np.array([int(v).bit_length() for v in np.ravel(i ^ j)]).reshape(m, m)
    off = 2 / (3 * m**2) - (2 / 3) * 4.0**-k
    return np.where(i == j, 1 / 3 + 2 / (3 * m**2), off)


def matrix(m):
    """The program's Q, from the transform of the unit vectors."""
    with jax.enable_x64(True):
        return np.asarray(analysis(jnp.eye(m, dtype=jnp.float64))).T


# --- one axis


def test_example_of_the_paper():
    np.testing.assert_allclose(analysis(GOLDEN) / np.sqrt(haar.leaves(8)), GOLDEN_H, rtol=1e-6)
    back = jax.jit(haar.synthesis, static_argnums=1)(GOLDEN_H * np.sqrt(haar.leaves(8)), 8)
    np.testing.assert_allclose(back, GOLDEN, rtol=1e-6)


@pytest.mark.parametrize("m", [1, 2, 8, 64])
def test_matrices(m):
    q, h, s = matrix(m), means_and_details(m), haar.leaves(m)
    np.testing.assert_allclose(q, orthonormal(m), atol=1e-12)
    np.testing.assert_allclose(q @ q.T, np.eye(m), atol=1e-12)
    if m > 1:  # of a single entry, the base, nothing is left to weigh
        np.testing.assert_allclose(np.diag(s) @ h, np.diag(np.sqrt(s)) @ q, atol=1e-12)
        singular = np.linalg.svd(np.diag(s) @ h, compute_uv=False)
        np.testing.assert_allclose(singular, np.sort(np.sqrt(s))[::-1], rtol=1e-12)
    assert isinstance(s, np.ndarray) and s.dtype.kind == haar.levels(m).dtype.kind == "i"


@pytest.mark.parametrize("m", [2, 4, 8, 32, 64])
def test_noise_covariance_has_a_closed_form(m):
    inverse = np.linalg.inv(means_and_details(m))
    theory = inverse @ np.diag(1.0 / haar.leaves(m) ** 2) @ inverse.T
    np.testing.assert_allclose(theory, closed_form(m), atol=1e-13)
    np.testing.assert_allclose(
        matrix(m).T @ np.diag(1.0 / haar.leaves(m)) @ matrix(m), theory, atol=1e-12
    )
    if m == 8:
        np.testing.assert_allclose(
            theory[0], [0.34375, -0.15625, -0.03125, -0.03125, 0, 0, 0, 0], atol=1e-15
        )


TOLERANCE = {"float16": 1e-2, "bfloat16": 8e-2, "float32": 1e-5, "float64": 1e-12}


@settings(max_examples=5)
@given(
    st.integers(1, 70),
    st.sampled_from(sorted(TOLERANCE)),
    st.sampled_from([(), (2,), (3, 1, 2)]),
    st.integers(0, 99),
)
def test_reconstruction_and_energy(d, dtype, leading, seed):
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(seed).normal(size=(*leading, d)), dtype)
        c, back = jax.jit(lambda x: (c := haar.analysis(x), haar.synthesis(c, d)))(x)
    m = 2 ** int(np.ceil(np.log2(d)))
    assert c.shape == (*leading, m) and back.shape == x.shape and c.dtype == back.dtype == x.dtype
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(
        np.asarray(c, np.float64), wide @ orthonormal(m)[:, :d].T, atol=5 * TOLERANCE[dtype]
    )
    np.testing.assert_allclose(np.asarray(back, np.float64), wide, atol=5 * TOLERANCE[dtype])
    np.testing.assert_allclose(
        np.square(np.asarray(c, np.float64)).sum(), np.square(wide).sum(), rtol=TOLERANCE[dtype]
    )


@pytest.mark.by_default("xla-1", "xla-5", "interpret-5")
@pytest.mark.parametrize("d", [1, 5, 16])
@pytest.mark.parametrize("path", ["xla", "interpret"])
def test_gradient_vmap_and_jit(path, d):
    m = 1 << (d - 1).bit_length()
    r = np.random.default_rng(d)
    x, g = (jnp.asarray(r.normal(size=(3, n)), jnp.float32) for n in (d, m))
    q = jnp.asarray(orthonormal(m), jnp.float32)

    @jax.jit
    def run(x, g):
        there, pull_there = jax.vjp(lambda x: haar.analysis(x, path), x)
        back, pull_back = jax.vjp(lambda c: haar.synthesis(c, d, path), g)
        rows = (
            jax.vmap(lambda x: haar.analysis(x, path))(x),
            jax.vmap(lambda c: haar.synthesis(c, d, path))(g),
        )
        return there, back, pull_there(g)[0], pull_back(x)[0], *rows

    forward, backward = x @ q[:, :d].T, g @ q[:, :d]
    close(run(x, g), (forward, backward, backward, forward, forward, backward))


def test_choice_of_a_path():
    """Without an accelerator the Pallas kernel refuses to compile; "auto" is XLA."""
    x = jnp.asarray(GOLDEN)
    assert same_bits(analysis(x), analysis(x, "xla")) and not same_bits(GOLDEN, analysis(x))
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError, match="interpret"):
            haar.analysis(GOLDEN, "pallas")


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: haar.analysis(GOLDEN, "cuda"), "path"),
        (lambda: haar.synthesis(GOLDEN, 4), "expected 4"),
        (lambda: haar.synthesis(GOLDEN, 8, "gpu"), "path"),
        (lambda: haar.levels(6), "power of two"),
        (lambda: haar.leaves(0), "power of two"),
        (lambda: haar.synthesis2(GOLDEN, (2, 3)), "expected 16"),
    ],
)
def test_haar_refuses(call, word):
    with pytest.raises(ValueError, match=rf"^haar\.\w+: expected .*{word}|{word}.*, but got"):
        call()


# --- two axes


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (1, 3), (5, 3), (6, 7)])
def test_pyramid(shape):
    m = 1 << (max(shape) - 1).bit_length()
    x = np.random.default_rng(7).normal(size=(2, *shape)).astype(np.float32)
    c, back = jax.jit(lambda x: (c := haar.analysis2(x), haar.synthesis2(c, shape)))(x)
    padded = np.zeros((2, m, m))
    padded[:, : shape[0], : shape[1]] = x
    np.testing.assert_allclose(c, [pyramid(p) for p in padded], atol=1e-6)
    np.testing.assert_allclose(back, x, atol=1e-6)


def test_details_see_squares_alone():
    """What is constant on squares of 2^l has no detail up to level l."""
    r, m = np.random.default_rng(0), 8
    for level in range(4):
        image = np.kron(r.normal(size=(m >> level,) * 2), np.ones((2**level,) * 2))
        energy = np.bincount(haar.levels2(m), np.square(analysis2(jnp.asarray(image, jnp.float32))))
        assert np.all(energy[1 : level + 1] < 1e-9) and np.all(energy[level + 1 :] > 1e-4)


def test_transform_of_leading_axes():
    """Work on pieces along any axes is the same as on the last ones."""
    x = np.random.default_rng(0).normal(size=(5, 6, 3)).astype(np.float32)
    one, two = jax.jit(lambda x: (haar.split(x, (0,)), haar.split(x, (0, 1))))(x)
    assert [p.shape[0] for p in one] == [1, 3, 2, 1] and [p.shape[:2] for p in two[1:5]] == [
        (3, 3)
    ] * 3 + [(2, 2)]

    @jax.jit
    def again(one, two):
        line, square = haar.join(one, (5,), (0,)), haar.join(two, (5, 6), (0, 1))
        return (
            jnp.moveaxis(line, 0, -1),
            square.T,
            haar.merge(haar.cut(square, (5, 6), 0), (5, 6), (0, 1)),
        )

    close(again(one, two), (analysis(np.moveaxis(x, 0, -1)), analysis2(x.transpose(2, 0, 1)), x))


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
    "signal": (
        haar_bands.pixels(LIKE, [30]),
        [
            (0, -1, 1, 3),
            (1, -1, 1, 1),
            (2, 0, 32, 2),
            *[(2, k, 2**k, 64 >> k) for k in range(1, 6)],
        ],
    ),
    "other leaf": (
        haar_bands.pixels(LIKE, (3,)),
        [(0, 0, 4, 1), (0, 1, 2, 2), (0, 2, 4, 1), (1, -1, 1, 1), (2, -1, 1, 60)],
    ),
}
each_maker = pytest.mark.parametrize("name", ["flat", "per_layer", "plain", "image", "signal"])


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


@pytest.mark.parametrize("length", (1, 2, 3, 31, 32, 33, 1000, 1024, 1025, 40_000))
def test_energies_are_those_of_the_coefficients(length):
    x = np.random.default_rng(length).normal(size=length) + 0.5
    wanted = norms_of_levels(np.pad(x, (0, 2 ** haar.height(length) - length))) ** 2
    # a detail of few coefficients may be small beside the sums that it is the difference of
    rounding = 1e-7 * np.square(x).sum()
    found = jax.jit(haar.energies)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=rounding)


@pytest.mark.parametrize("length", (32, 1024, 32_768))
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


@pytest.mark.by_default("per_layer", "plain", "image")
@each_maker
def test_transforms_of_bands(name):
    b, table = TABLE[name]
    tree, other, n = contribution(), contribution(1), len(table)
    values = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, n), jnp.float32)

    @jax.jit
    def run(tree, other):
        c, half = haar_bands.analyse(b, tree), jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        many = jax.tree.map(lambda *x: jnp.stack(x), tree, other)
        return dict(
            back=haar_bands.synthesise(b, c, tree),
            same=haar_bands.scale(b, jnp.ones(n), tree),
            scaled=haar_bands.scale(b, values, tree),
            times=tuple(x * values[i] for x, i in zip(c, haar_bands.ids(b))),
            c=c,
            slope=jax.grad(lambda t: haar_bands.energies(b, t) @ values / 2)(tree),
            mirrored=haar_bands.scale(b, values, other),
            half=(
                half,
                haar_bands.scale(b, jnp.ones(n), half),
                haar_bands.synthesise(b, haar_bands.analyse(b, half), half),
            ),
            energies=jax.vmap(lambda t: haar_bands.energies(b, t))(many),
        )

    out = run(tree, other)
    close(out["back"], tree, atol=1e-5)
    close(out["same"], tree, atol=1e-5)
    close(
        out["scaled"], jax.jit(lambda c: haar_bands.synthesise(b, c, tree))(out["times"]), atol=1e-5
    )
    # it is symmetric, and half the gradient of the energies that it weighs
    np.testing.assert_allclose(
        flat(out["scaled"]) @ flat(other), flat(tree) @ flat(out["mirrored"]), rtol=1e-4
    )
    close(out["slope"], out["scaled"], atol=1e-5)
    close(out["energies"], jnp.stack([energies(b, tree), energies(b, other)]))
    half, *others = out["half"]
    assert all(same_bits(half, o) for o in others)


def test_pixels_of_each_column():
    tree = contribution()
    w = tree["w"].reshape(3, 5, 2, 2)  # colours come last: they are more columns
    close(
        analyse(TABLE["colours"][0], tree)[2].T.reshape(2, 2, 64),
        analysis2(w.transpose(2, 3, 0, 1)),
    )
    close(analyse(TABLE["image"][0], tree)[2].T, analysis2(tree["w"].T.reshape(2, 5, 6)))
    close(analyse(TABLE["signal"][0], tree)[2].T, analysis(tree["w"].T))
    close(
        analyse(TABLE["flat"][0], tree)[0],
        analysis(jnp.concatenate([x.ravel() for x in raw(tree)])),
    )


def test_bands_are_structure():
    b = haar_bands.pixels(LIKE, (5, 6))
    assert not jax.tree.leaves(b) and b == TABLE["image"][0] and hash(b) == hash(TABLE["image"][0])
    assert b != TABLE["colours"][0] and haar_bands.flat(contribution()) == TABLE["flat"][0]
    compiled = []
    run = jax.jit(lambda b, t: compiled.append(0) or haar_bands.energies(b, t))
    run(b, contribution()), run(haar_bands.pixels(contribution(), (5, 6)), contribution(1))
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "call, where",
    [
        (lambda b, t: haar_bands.analyse(b, [t] * 2), "analyse"),
        (lambda b, t: haar_bands.energies(b, t["w"]), "energies"),
        (lambda b, t: haar_bands.energies(b, t | {"w": t["w"].T}), "energies"),
        (lambda b, t: haar_bands.scale(b, jnp.ones(6), t | {"b": jnp.ones(4)}), "scale"),
        (lambda b, t: haar_bands.scale(b, jnp.ones(5), t), "scale"),
        (lambda b, t: haar_bands.scale(b, 1.0, t), "scale"),
        (lambda b, t: haar_bands.noise(b, jax.random.key(0), jnp.ones(7), t), "noise"),
        (lambda b, t: haar_bands.noise(b, jax.random.key(0), jnp.ones(6), [t] * 2), "noise"),
        (lambda b, t: haar_bands.synthesise(b, analyse(b, t), t["w"]), "synthesise"),
        (lambda b, t: haar_bands.pixels(t, (28, 28)), "pixels"),
        (lambda b, t: haar_bands.pixels(t, ()), "pixels"),
        (lambda b, t: haar_bands.pixels(t, (5, 6.0)), "pixels"),
        (lambda b, t: haar_bands.flat({}), "flat"),
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


@pytest.mark.by_default("padded", "columns")
@pytest.mark.parametrize(
    "name, b, like, sigma, wrong",
    [
        ("paper", haar_bands.flat(jnp.ones(8)), jnp.ones(8), closed_form(8), np.eye(8) / 3),
        (
            "padded",
            haar_bands.flat(jnp.ones(6)),
            jnp.ones(6),
            closed_form(8)[:6, :6],
            closed_form(8)[2:, 2:],
        ),
        (
            "columns",
            haar_bands.pixels(jnp.ones((4, 2)), (4,)),
            jnp.ones((4, 2)),
            np.kron(closed_form(4), np.eye(2)),
            np.kron(np.eye(2), closed_form(4)),
        ),
    ],
    ids=["paper", "padded", "columns"],
)
def test_covariance_of_the_noise(name, b, like, sigma, wrong):
    draws = 20_000
    stds = jnp.asarray(haar_bands.leaves(b) ** -0.5, jnp.float32)
    keys = jax.random.split(jax.random.key(3), draws)
    samples = jax.jit(jax.vmap(lambda k: haar_bands.noise(b, k, stds, like)))(keys).reshape(
        draws, -1
    )
    assert_covariance(samples, sigma)
    for other in (
        wrong,
        1.12 * sigma,
        sigma / 1.12,
    ):  # power: 5 % of a standard deviation too little or too much
        with pytest.raises(AssertionError):
            assert_covariance(samples, other)


@pytest.mark.by_default("plain", "image")
@each_maker
def test_noise_of_bands(name):
    b, table = TABLE[name]
    n, draws, key = len(table), 2000, jax.random.key(5)
    stds = jnp.asarray(np.random.default_rng(2).uniform(0.5, 2, n), jnp.float32)
    units = dict(zip("bsw", np.split(np.eye(64, dtype=np.float32), [3, 4], 1)))
    units = {k: jnp.asarray(v.reshape(64, *LIKE[k].shape)) for k, v in units.items()}

    @jax.jit
    def run(key):
        half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), LIKE)
        samples = jax.vmap(lambda k: haar_bands.noise(b, k, stds, half))(
            jax.random.split(key, draws)
        )
        return samples, jax.vmap(lambda t: haar_bands.scale(b, stds**2, t))(units)

    wide = lambda t: np.concatenate([np.asarray(t[k]).reshape(len(t[k]), -1) for k in "bsw"], 1)
    samples, square = run(key)
    assert {k: (v.shape[1:], v.dtype) for k, v in samples.items()} == {
        k: (v.shape, v.dtype) for k, v in LIKE.items()
    }
    # each entry has a variance of its own: that of Q^T diag(stds^2) Q
    ratio = np.square(wide(samples)).mean(0) / np.diag(wide(square))
    low, high = chi2.ppf([0.5e-6 / 64, 1 - 0.5e-6 / 64], draws) / draws  # false alarm 1e-6
    inside = lambda ratio: bool(np.all((low < ratio) & (ratio < high)))
    assert inside(ratio) and not inside(1.1**2 * ratio) and not inside(0.9**2 * ratio)
    if name == "plain":  # isotropic noise, draw for draw
        same = jax.jit(lambda k: (haar_bands.noise(b, k, jnp.ones(1), LIKE), normals(k, LIKE)))
        assert same_bits(*same(key))


# --- how much noise where


def test_prior():
    image, signal = TABLE["image"][0], TABLE["signal"][0]
    mean = (2 * 64 + 96 * 4 + 24 * 16 + 6 * 64) / 128  # of all coefficients of the pyramid
    assert haar_bands.prior(image).tolist() == [mean, mean, 64, 4, 16, 64]
    assert haar_bands.prior(signal).tolist()[2:] == [32, 2, 4, 8, 16, 32]
    assert haar_bands.prior(image).dtype == np.float32
    assert haar_bands.prior(TABLE["plain"][0]).tolist() == [1.0]


def relative_stds(b, exponent, energies):
    return 1 / np.asarray(wavelet.ellipsoid(b, exponent, energies).scales, np.float64)


@settings(max_examples=16)
@given(st.sampled_from(sorted(TABLE)), st.integers(0, 10**6))
def test_exponent_one_half_is_the_best_allocation(name, seed):
    b, table = TABLE[name]
    r, n = np.random.default_rng(seed), haar_bands.sizes(b)
    c2 = r.uniform(0.1, 10, len(table)) ** 2
    t2 = relative_stds(b, 0.5, c2) ** 2
    # of noise with sum C_b^2 / tau_b^2 = 1 / sigma^2
    cost = lambda t2: (n * t2).sum() * (c2 / t2).sum()
    np.testing.assert_allclose(cost(t2), np.sqrt(c2 * n).sum() ** 2, rtol=1e-5)
    for other in (np.ones(len(table)), *np.exp(r.normal(size=(20, len(table))))):
        assert cost(t2) <= cost(other) * (1 + 1e-5) and cost(t2) <= cost(t2 * other) * (1 + 1e-5)


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
