"""Noise: the cipher against its paper, words of keys, and a battery over four million normals.

Every statistical check gives a p-value and alarms below 1e-6; there are about twenty, so a sound
generator alarms for one seed in 50,000 (seeds are fixed), and each check has a generator that it
must refuse.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jfl.kernels import philox
from jfl.kernels.normals import as_one_leaf, leaf, leaf_by_leaf, normals, pair
from scipy import stats

pytestmark = pytest.mark.accelerator

ALARM = 1e-6
# clients, steps, normals: 4.2e6, and 5e5 for what must be refused
SHAPE, SMALL = (32, 32, 4096), (8, 16, 4096)
TOP = 0xFFFFFFFF
KNOWN = [
    ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((TOP, TOP), (TOP,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


# --- the cipher


def numpy_block(key, counter, rounds=10):
    """Philox4x32 as the paper writes it, in uint64."""
    k0, k1, c0, c1, c2, c3 = (np.asarray(x, np.uint64) for x in (*key, *counter))
    low, half = np.uint64(TOP), np.uint64(32)
    for _ in range(rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ k0, b & low, (a >> half) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), -1).astype(np.uint32)


def numpy_draw(data, index, use):
    k0, k1, h0, h1 = (int(w) for w in data)
    return numpy_block((k0, k1), (np.asarray(index, np.uint64) ^ np.uint64(k0), use, h0, h1))


@pytest.mark.parametrize("upper", [philox.by_64_bits, philox.by_16_bits, philox.ON_TPU])
def test_known_answers_by_every_product(upper):
    """Random123's kat_vectors, philox4x32 10, whichever way the platform multiplies; and on other
    words what NumPy finds."""
    keys, counters, out = zip(*KNOWN)
    columns = lambda rows: tuple(np.array(rows, np.uint32).T)
    words = jax.jit(functools.partial(philox.block, upper=upper))(columns(keys), columns(counters))
    as_text = lambda row: " ".join(f"{int(w):08x}" for w in row)
    assert [as_text(row) for row in zip(*words)] == list(out)
    assert [as_text(numpy_block(key, counter)) for key, counter, _ in KNOWN] == list(out)
    words = np.random.default_rng(0).integers(0, 1 << 32, (6, 2000), dtype=np.uint32)
    got = jax.jit(functools.partial(philox.block, upper=upper))(tuple(words[:2]), tuple(words[2:]))
    assert np.array_equal(np.stack(got, -1), numpy_block(words[:2], words[2:]))


# --- words of keys


def data(key):
    return np.asarray(jax.random.key_data(key))


def test_one_draw_in_every_program():
    """Eager, jitted, vmapped and scanned draws are the same, bit for bit."""
    key, shape = jax.random.key(3), jnp.zeros(700)
    address = lambda i: jax.random.fold_in(jax.random.fold_in(key, i), 2 * i + 1)
    plain = [(jax.random.bits(address(i), (33,)), normals(address(i), shape)) for i in range(3)]
    both = lambda i: (jax.random.bits(address(i), (33,)), normals(address(i), shape))
    scanned = lambda: jax.lax.scan(lambda c, i: (c, both(i)), 0, jnp.arange(3))[1]
    runs = [jax.jit(jax.vmap(both))(jnp.arange(3)), jax.jit(scanned)()]
    for bits, noise in runs:
        for i in range(3):
            assert np.array_equal(bits[i], plain[i][0]) and np.array_equal(noise[i], plain[i][1])
    keys = jax.jit(jax.vmap(address))(jnp.arange(3))
    assert keys.dtype == key.dtype
    assert np.array_equal(data(keys), [data(address(i)) for i in range(3)])


def test_a_key_of_another_type_keeps_its_words():
    plain = jax.random.key(9)
    assert philox.words(plain).tolist() == [0, 9, 0x2D6C666A, 0x3279656B]
    four = jax.random.key(9, impl="rbg")
    assert philox.words(four).tolist() == data(four).tolist()
    with pytest.raises(ValueError, match="generator out of"):
        normals(plain, jnp.zeros(3), "threefry")
    for generator in ("philox", "key"):
        with pytest.raises(ValueError, match="fewer than 2.32"):
            normals(plain, jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32), generator)


# --- from words to normals


def exact(words):
    """Box & Muller in float64 from the words, as `pair` reads them."""
    w0, w1, w2, w3 = (np.asarray(w, np.uint32) for w in words)
    u = (w0 >> np.uint32(1)) * 2.0**-31 + ((w2 >> np.uint32(1)) + 0.5) * 2.0**-62
    radius = np.sqrt(-2 * np.log(np.minimum(u, 1.0)))
    angle = np.pi / 4 * (1 + w1.view(np.int32) * 2.0**-31)
    sign = lambda bit: np.where((w3 >> np.uint32(bit)) & np.uint32(1), -1.0, 1.0)
    return sign(31) * radius * np.cos(angle), sign(30) * radius * np.sin(angle)


def test_every_word_gives_a_finite_normal_close_to_the_exact_one():
    extremes = np.array(
        [0, 1, 2, 255, 0x7FFFFFFF, 0x80000000, 0xC0000000, 0x5A827999, 0xFFFFFF00, TOP], np.uint32
    )
    r = np.random.default_rng(2)
    some = r.integers(0, 1 << 32, (4, 300_000), dtype=np.uint32)
    some[0] >>= r.integers(0, 32, some.shape[1]).astype(np.uint32)  # all sizes of radius
    words = np.concatenate(
        [np.array(list(itertools.product(extremes, repeat=4)), np.uint32).T, some], 1
    )
    got, want = np.stack(jax.jit(pair)(*words)).astype(np.float64), np.stack(exact(words))
    assert np.isfinite(got).all()
    radius = np.hypot(*want)  # u has a float's digits, so near 1 the radius is on a coarse grid
    assert (np.abs(got - want).max(0) <= 3e-7 * radius + 6e-8 / np.maximum(radius, 1e-9)).all()
    assert np.abs(got).max() == pytest.approx(np.sqrt(2 * 63 * np.log(2)), rel=1e-6)  # 9.35


def of_pairs(pairs, shapes):
    """Leaves of the numbers of pairs [..., 2], in order; each starts a pair."""
    flat, start = np.reshape(pairs, -1), 0
    for shape in shapes:
        size = int(np.prod(shape))
        yield flat[start : start + size].reshape(shape)
        start += size + size % 2


def test_normals_of_a_key():
    """Where each normal comes from: leaf, pair, half.  Never renumber: these are part of every
    recorded result."""
    key, mine = jax.random.key(11), jax.random.key(11, impl="rbg")
    like = {
        "a": jnp.zeros((31, 17)),  # 527, an odd number
        "b": jnp.zeros(()),
        "c": jnp.zeros((0, 4)),
        "d": jnp.zeros((2, 3, 129), jnp.bfloat16),
    }
    shapes = [x.shape for x in jax.tree.leaves(like)]
    words = numpy_draw(philox.words(key), np.arange(264 + 1 + 387), philox.NORMALS)
    drawn = normals(key, like)
    assert jax.tree.map(jnp.shape, drawn) == jax.tree.map(jnp.shape, like)
    assert {x.dtype for x in jax.tree.leaves(drawn)} == {jnp.dtype(jnp.float32)}
    everything = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])
    wanted = everything(list(of_pairs(np.stack(exact(words.T), -1), shapes)))
    np.testing.assert_allclose(everything(drawn), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(normals(jax.random.key(0), jnp.zeros(3)), GOLDEN, atol=1e-6)
    assert np.array_equal(normals(key, jnp.zeros(40)), drawn["a"].ravel()[:40])  # not length
    for own in (key, mine):  # the words of the key's own generator
        both = np.stack(pair(*jax.random.bits(own, (4, 264 + 1 + 387))), -1)
        found, wanted = normals(own, like, "key"), everything(list(of_pairs(both, shapes)))
        np.testing.assert_allclose(everything(found), wanted, rtol=1e-5, atol=1e-6)
    assert not np.intersect1d(normals(mine, jnp.zeros(500)), everything(drawn)).size


GOLDEN = [1.9241338, 0.47793645, -0.0016903658]


def test_noise_is_drawn_once():
    """Two normals cost one block, and one block only however many read them: XLA would compute a
    plain expression anew for each half of a pair and for each reader, twice or four times the work,
    unseen."""
    if jax.default_backend() != "cpu":
        pytest.skip("reads a CPU's program; elsewhere normals are made where they are read")

    def products(noise, twice):
        def f(k, x):
            z = noise(k, x)
            return (x + z,) + ((3 * x * z).reshape(30, 100),) * twice

        text = jax.jit(f).lower(jax.random.key(0), jnp.ones(3000)).compile().as_text()
        if noise is normals:  # the pairs are in memory, so no reader computes them
            assert re.search(r"c64\[\d+\]\S* conditional\(", text), "the branch is gone"
        return sum(int(n) for n in re.findall(r"= u64\[(\d+)\]\S* multiply\(", text))

    blocks = 1500
    for twice in (0, 1):
        assert 16 * blocks < products(normals, twice) < 21 * blocks
    plain = lambda k, x: pair(*philox.blocks(k, jnp.arange(3000, dtype=jnp.uint32)))[0]
    assert products(plain, 1) >= 2 * products(plain, 0) > 0


@pytest.mark.parametrize(
    "backend, rows, in_memory, in_64_bits",
    [("cpu", 700, True, True), ("gpu", 701, False, True), ("tpu", 702, False, False)],
)
def test_each_backend_draws_in_its_own_way(backend, rows, in_memory, in_64_bits, traced_for):
    """In memory as complex numbers, or each leaf by itself; products by 64 bits, or without.

    Each has a shape of its own: what was traced for one backend stays for the others.
    """
    traced_for(backend)
    leaves = [jax.ShapeDtypeStruct((rows, 3), jnp.float32)]
    program = str(jax.make_jaxpr(lambda key: normals(key, leaves))(jax.random.key(0)))
    assert ("c64[" in program) == in_memory and ("u64[" in program) == in_64_bits


def test_leaves_of_one_shape_share_a_kernel(traced_for):
    """From four of them on: the cipher, ten rounds, is compiled once for all."""
    traced_for("gpu")

    def rounds(count):
        leaves = [jax.ShapeDtypeStruct((703, 3), jnp.float32)] * count
        draw = lambda key: normals(key, leaves)
        return str(jax.make_jaxpr(draw)(jax.random.key(0))).count("name=_round")

    assert [rounds(count) for count in (1, 3, 4, 9)] == [10, 30, 10, 10]


LEAVES = (
    [(512,)],
    [(255, 3), (), (0, 4), (7, 1, 129), (), (2, 3, 5, 7), (1,)],
    [(256,), (256,), (257,), (1024,)],
    [(3, 5)] * 2 + [(8,)] + [(3, 5)] * 3,
)


@pytest.mark.by_default("repeated")
@pytest.mark.parametrize("shapes", LEAVES, ids=["one", "odd", "even", "repeated"])
def test_leaves_by_themselves_are_those_that_are_stored(shapes):
    """What an accelerator draws, run here, is what a CPU draws: bit for bit, in every program."""
    keys = jax.random.split(jax.random.key(5), 3)
    here = lambda key: normals(key, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    there = functools.partial(leaf_by_leaf, tuple(shapes))
    scan = lambda draw: lambda keys: jax.lax.scan(lambda c, key: (c, draw(key)), 0, keys)[1]
    plain = [here(key) for key in keys]
    assert [x.shape for x in plain[0]] == shapes
    joined = lambda key: as_one_leaf(key, [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    runs = (jax.vmap(there), scan(there), scan(here), scan(joined))
    for run in map(jax.jit, runs):
        for i, leaves in enumerate(plain):
            for ours, theirs in zip(leaves, run(keys), strict=True):
                same(ours, theirs[i])


def same(ours, theirs):
    """Bit for bit; a number alone is no vector code, and LLVM may round it in another way."""
    np.testing.assert_array_equal(np.shape(ours), np.shape(theirs))
    if np.size(ours) == 1:
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    else:
        np.testing.assert_array_equal(ours, theirs)


def test_the_last_places_of_a_key():
    """The last pairs of 2^32 values."""
    key, first = jax.random.key(3), 2**31 - 3
    drawn = jax.jit(lambda words: leaf(words, (5,), np.uint32(first)))(philox.words(key))
    words = numpy_draw(philox.words(key), np.arange(first, 2**31), philox.NORMALS)
    (wanted,) = of_pairs(np.stack(exact(words.T), -1), [(5,)])
    np.testing.assert_allclose(drawn, wanted, rtol=1e-5, atol=1e-5)


# --- statistics


def two_sided(z):
    return float(2 * stats.norm.sf(abs(z)))


def moments(x):
    """E x^k up to the sixth."""
    of = stats.norm.moment
    z = [(np.mean(x**k) - of(k)) * np.sqrt(x.size / (of(2 * k) - of(k) ** 2)) for k in range(1, 7)]
    return min(1.0, 6 * two_sided(np.abs(z).max()))


def cells(*columns):
    """Chi-square of numbers in [0, 1) that should be uniform together."""
    count = 1024 if len(columns) == 1 else 64
    place = functools.reduce(
        lambda p, u: p * count + (u * count).astype(int).clip(0, count - 1), columns, 0
    )
    return stats.chisquare(np.bincount(place.ravel(), minlength=count ** len(columns))).pvalue


def bins(x):
    return cells(stats.norm.cdf(x))


def tails(x):
    """Counts beyond 4, 4.5 and 5 on each side."""
    p = []
    for edge, side in itertools.product((4, 4.5, 5), (x, -x)):
        seen, rate = (side > edge).sum(), x.size * stats.norm.sf(edge)
        p += [stats.poisson.cdf(seen, rate), stats.poisson.sf(seen - 1, rate)]
    return min(1.0, 12 * min(p))


def lags(x):
    """Autocorrelation of a stream at every lag, of values and of squares."""
    half = x.shape[2] // 2
    worst = 0
    for v in (x, (x**2 - 1) / np.sqrt(2)):
        v = v.reshape(-1, 2 * half)
        r = np.fft.irfft((np.abs(np.fft.rfft(v, axis=1)) ** 2).sum(0))[1 : half + 1] / np.sqrt(
            v.size
        )
        worst = max(worst, np.abs(r[:-1]).max(), abs(r[-1]) / np.sqrt(2))
    return min(1.0, 2 * half * two_sided(worst))


def streams(x):
    """Correlation of any two streams.  A sum of 4096 products has a heavier tail than a normal: 5 %
    at 7 sigma."""
    rows = x.reshape(-1, x.shape[2])
    corr = rows @ rows.T / np.sqrt(x.shape[2])
    return min(
        1.0,
        len(rows) ** 2 / 2 * two_sided(np.abs(corr[np.triu_indices(len(rows), 1)]).max() / 1.05),
    )


def radius_and_angle(x):
    """Of a pair of Box & Muller."""
    pairs = x.reshape(-1, 2)
    return cells(
        np.exp(-(pairs**2).sum(1) / 2), np.arctan2(pairs[:, 1], pairs[:, 0]) / (2 * np.pi) % 1
    )


BATTERY = (moments, bins, tails, lags, streams, radius_and_angle)


@functools.cache
def drawn():
    """Float64[clients, steps, normals] of addressed keys."""
    clients, steps, length = SHAPE
    like, key = {"a": jnp.zeros(length // 4), "b": jnp.zeros((3, length // 4))}, jax.random.key(20)

    def one(c, s):
        parts = normals(jax.random.fold_in(jax.random.fold_in(key, c), s), like)
        return jnp.concatenate([p.ravel() for p in jax.tree.leaves(parts)])

    out = jax.jit(jax.vmap(lambda c: jax.lax.map(lambda s: one(c, s), jnp.arange(steps))))(
        jnp.arange(clients)
    )
    return np.asarray(out, np.float64)


def by_words(change, rounds=10):
    """Normals from blocks that something is wrong with, in NumPy."""

    def draw(_):
        clients, steps, length = SMALL
        keys = np.random.default_rng(4).integers(0, 1 << 32, (4, clients, steps, 1), np.uint32)
        index = np.arange(length // 2, dtype=np.uint32)
        words = numpy_block(keys[:2], (index ^ keys[0], np.uint32(1), keys[2], keys[3]), rounds)
        return np.stack(exact(change(*np.moveaxis(words, -1, 0))), -1).reshape(SMALL)

    return draw


@pytest.mark.slow
def test_normals_are_independent_and_normal():
    x = drawn()
    assert x.size > 4e6
    found = {check.__name__: check(x) for check in BATTERY}
    assert min(found.values()) > ALARM, found


WRONG = {
    "one stream for two clients": (streams, lambda x: x[np.arange(len(x)) // 2]),
    "one stream for two steps": (streams, lambda x: x[:, np.arange(x.shape[1]) % 15]),
    "two leaves alike": (lags, lambda x: np.concatenate([x[..., :2048]] * 2, -1)),
    "two rounds": (radius_and_angle, by_words(lambda *w: w, rounds=2)),
    "radius from the angle's word": (radius_and_angle, by_words(lambda a, b, c, d: (b, b, c, d))),
    "a sign that is lost": (bins, by_words(lambda a, b, c, d: (a, b, c, d & np.uint32(1 << 31)))),
    "a radius of ten bits": (
        tails,
        by_words(lambda a, b, c, d: (a | np.uint32(0x3FFFFF), b, c, d)),
    ),
    "half a percent too small": (moments, lambda x: 0.995 * x),
    "shifted": (moments, lambda x: 0.01 + x),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_battery_refuses(name):
    """Of a part of the sound stream, spoilt, or of blocks of the cipher, spoilt."""
    check, spoil = WRONG[name]
    clients, steps, _ = SMALL
    sound = drawn()[:clients, :steps]
    assert check(sound) > ALARM and check(by_words(lambda *w: w)(sound)) > ALARM
    assert check(spoil(sound)) < ALARM
