"""Chains of stages: sensitivity on real neighbours, the distribution of the noise, refusals.

Every statistical test has a false-alarm rate of 1e-6 and a half that must fail, so that it is known
to see the error that it looks for.
"""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import close, flat, noisy_grad, same_bits, squared, start_params
from hypothesis import given, settings
from hypothesis import strategies as st
from jfl.kernels.normals import normals
from scipy import stats

import jfl
from jfl import (
    chain,
    clip_adaptive,
    clip_automatic,
    clip_l2,
    clip_per_layer,
    divide,
    gaussian,
    total,
)
from jfl.core.records import Batch
from jfl.privacy.mechanisms import chain as mech

ALARM = 1e-6
ROWS = 5
KEY = jax.random.key(0)


# --- sensitivity


def _chain(kind, bound, adjacency):
    stage = dict(
        l2=lambda: clip_l2(bound),
        automatic=lambda: clip_automatic(bound, 1e-6),
        layers=lambda: clip_per_layer((bound, 2.0 * bound)),
        layers_equal=lambda: clip_per_layer(bound),
        adaptive=lambda: clip_adaptive(bound, 4.0, indicator=0.4),
        both=lambda: clip_l2(bound),
    )[kind]()
    stages = (stage, clip_per_layer((3 * bound, bound))) if kind == "both" else (stage,)
    return chain(*stages, total(), adjacency=adjacency)


@functools.partial(jax.jit, static_argnums=0)
def _sum(kind, bound, rows, weight):
    """Return the sum to which a release adds noise, and the sensitivity that is claimed for it
    under each adjacency."""
    several = {adjacency: _chain(kind, bound, adjacency) for adjacency in mech.ADJACENCIES}
    state = mech.initial_state(m := several["add_remove"])
    claims = {a: mech.sensitivity(m, state, jnp.max(weight)) for a, m in several.items()}
    return mech.clip_and_sum(m, state, rows, weight).value, claims


def _rows(r, magnitude):
    scale = 10.0 ** (magnitude * r.uniform(-1, 1, (ROWS, 1)))
    return {
        "a": (r.normal(size=(ROWS, 4)) * scale).astype("f4"),
        "b": (r.normal(size=(ROWS, 2, 2)) * scale[..., None]).astype("f4"),
    }


def _gap(kind, adjacency, bound, rows, other, weight, at):
    """Return how far a neighbour moves the sum, as a fraction of what is claimed."""
    one, claims = _sum(kind, bound, rows, weight)
    changed, other_weight = {k: v.copy() for k, v in rows.items()}, weight.copy()
    if adjacency == "replace_one":
        for k in changed:
            changed[k][at] = other[k][at]
    else:
        other_weight[at] = 0.0
    two, _ = _sum(kind, bound, changed, other_weight)
    return np.linalg.norm(flat(one) - flat(two)) / float(claims[adjacency])


@pytest.mark.parametrize("adjacency", mech.ADJACENCIES)
@pytest.mark.parametrize("kind", ["l2", "automatic", "layers", "layers_equal", "adaptive", "both"])
@given(
    seed=st.integers(0, 2**31),
    log_bound=st.floats(-3, 2),
    magnitude=st.floats(0, 6),
    at=st.integers(0, ROWS - 1),
)
@settings(max_examples=15)
def test_no_neighbour_moves_the_sum_further_than_claimed(
    kind, adjacency, seed, log_bound, magnitude, at
):
    r = np.random.default_rng(seed)
    bound, weight = np.float32(10**log_bound), r.uniform(0.0, 3.0, ROWS).astype("f4")
    gap = _gap(kind, adjacency, bound, _rows(r, magnitude), _rows(r, magnitude), weight, at)
    assert gap <= 1 + 1e-4


@pytest.mark.parametrize("adjacency", mech.ADJACENCIES)
@pytest.mark.parametrize(
    "kind, lengths",  # of the leaves a and b, in the directions of their bounds
    [
        ("l2", (0.495, 0.495)),
        ("automatic", (0.495, 0.495)),
        ("layers", (0.7, 1.4)),
        ("layers_equal", (0.495, 0.495)),
    ]
    + [("adaptive", (0.495, 0.495))],
)
def test_the_claim_is_attained(kind, lengths, adjacency):
    """Some neighbour comes within one per cent: less noise would be too little."""
    rows, best = _rows(np.random.default_rng(1), 0.0), 0.0
    weight = np.array([0.5, 1.0, 2.0, 1.0, 0.1], "f4")
    for scale in (1e-3, 0.999, 1e3):  # below, at and above the bound
        for k, length in zip(rows, lengths):
            rows[k][2] *= length * scale / np.linalg.norm(rows[k][2])
        other = {k: -v for k, v in rows.items()}
        best = max(best, _gap(kind, adjacency, np.float32(0.7), rows, other, weight, 2))
    # under replace_one the adaptive bit cannot point both ways at full norm; its part of the bound
    # is 4 per cent
    least = 0.97 if kind == "adaptive" and adjacency == "replace_one" else 0.99
    assert least < best <= 1 + 1e-4


def test_multipliers_by_hand():
    assert mech.sensitivity(chain(total(), adjacency="add_remove")) == math.inf
    m = chain(clip_l2(0.5), total(), gaussian(std=3.0), adjacency="replace_one")
    assert mech.multiplier(m, max_weight=2.0) == pytest.approx(1.5)
    assert mech.multiplier(chain(clip_l2(0.5), total(), gaussian(1.1))) == float(np.float32(1.1))


# --- clipping


def test_small_contributions_are_left_alone_and_zero_is_not_divided_by():
    """Clipping is not normalising."""
    contribute = jax.jit(
        lambda m, rows, weight: mech.clip_and_sum(m, mech.initial_state(m), rows, weight)
    )
    rows = jnp.array([[0.3, 0.4], [3.0, 4.0], [0.0, 0.0], [1e-30, 0.0], [1e25, 1e25]])
    for stage in (clip_l2(1.0), clip_per_layer(1.0), clip_adaptive(1.0, 3)):
        m = chain(stage, total())
        for i, want in enumerate(([0.3, 0.4], [0.6, 0.8], [0.0, 0.0], [1e-30, 0.0], None)):
            part = contribute(m, rows, jnp.zeros(5).at[i].set(1.0))
            value = part.value[0] if stage.name == "clip_adaptive" else part.value
            assert float(part.count) == 1 and float(part.clipped) == (i == 1)
            if want is None:  # too long to be measured
                assert not np.asarray(value).any() and float(part.nonfinite) == 1
            else:
                close(value, np.array(want, "f4"), rtol=1e-6)


@pytest.mark.parametrize("bound, gamma", [(1.0, 0.01), (0.5, 2.0)])
def test_automatic_clipping_is_a_loop_over_rows(bound, gamma):
    """Short rows are lengthened.  A row of zeros stays zero, and so does one that is too long to
    measure, which is counted."""
    rows, weight = _rows(np.random.default_rng(0), 3), np.array([1.0, 2.0, 0.0, 1.0, 0.5], "f4")
    rows["a"][3], rows["b"][3] = 0.0, 0.0
    m = chain(clip_automatic(bound, gamma), total(), adjacency="add_remove")
    total_a, total_b, longer = np.zeros(4), np.zeros((2, 2)), 0
    for a, b, w in zip(rows["a"].astype(float), rows["b"].astype(float), weight):
        norm = np.sqrt((a**2).sum() + (b**2).sum())
        total_a += w * a * bound / (norm + gamma)
        total_b += w * b * bound / (norm + gamma)
        longer += w != 0 and norm > bound
    part = jax.jit(lambda x: mech.clip_and_sum(m, (), x, jnp.array(weight)))(rows)
    close(part.value, {"a": total_a.astype("f4"), "b": total_b.astype("f4")}, rtol=1e-5)
    assert float(part.clipped) == longer and float(part.nonfinite) == 0
    assert float(mech.sensitivity(m, (), 2.0)) == 2 * bound
    rows["a"][0] = 1e25
    alone = mech.clip_and_sum(m, (), rows, jnp.eye(ROWS)[0])
    assert float(alone.nonfinite) == 1 and not np.asarray(alone.value["a"]).any()


def test_masked_rows_add_nothing():
    rows = {"a": jnp.ones((4, 3)), "b": jnp.arange(8.0).reshape(4, 2)}
    weight = jnp.array([1.0, 2.0, 0.0, 1.0])
    for stages in (
        (clip_l2(1.0),),
        (clip_automatic(),),
        (clip_per_layer((1.0, 2.0)),),
        (clip_adaptive(1.0, 3),),
        (),
    ):
        m = chain(*stages, total())
        contribute = jax.jit(lambda x, m=m: mech.clip_and_sum(m, mech.initial_state(m), x, weight))
        clean = contribute(rows)
        assert float(clean.count) == 3
        for junk in (np.nan, np.inf):
            dirty = jax.tree.map(lambda x, v=junk: x.at[2].set(v), rows)
            assert same_bits(clean, contribute(dirty))


# --- noise


def assert_std(samples, sigma):
    """Compare the root mean square with sigma, by the chi-square distribution."""
    n = samples.size
    low, high = np.sqrt(stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], n) / n)
    ratio = float(np.sqrt(np.mean(np.square(samples))) / sigma)
    assert low < ratio < high, f"std / sigma = {ratio:.4f} outside [{low:.4f}, {high:.4f}], n = {n}"


LEAVES = {"a": (80_000,), "b": (300, 250), "c": (70_001,)}
STAGES = dict(
    l2=(lambda: clip_l2(0.5), 0.5),
    layers=(lambda: clip_per_layer({"a": 0.3, "b": 0.4, "c": 1.2}), 1.3),
    equal=(lambda: clip_per_layer(0.5), 0.5),
    automatic=(lambda: clip_automatic(0.5), 0.5),
    adaptive=(lambda: clip_adaptive(0.5, 4, indicator=0.6), 0.5 * math.sqrt(1.09)),
)


def noise_of(*stages, adjacency):
    m = chain(*stages, adjacency=adjacency)
    zeros = {k: jnp.zeros((2,) + s) for k, s in LEAVES.items()}
    return mech.release(m, KEY, mech.initial_state(m), zeros, jnp.ones(2), max_weight=1.5)[0]


@pytest.mark.by_default("replace_one-2-layers", "add_remove-1-adaptive")
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("adjacency, twice", [("add_remove", 1), ("replace_one", 2)])
def test_noise_has_the_scale_of_the_sensitivity(kind, adjacency, twice):
    """Each leaf has std z * sensitivity of the sum / divisor.  A noise that is 2 % off fails."""
    stage, bound = STAGES[kind]
    out = noise_of(stage(), total(), gaussian(1.3), divide(5), adjacency=adjacency)
    sigma = 1.3 * twice * bound * 1.5 / 5
    for leaf in jax.tree.leaves(out):
        samples = np.asarray(leaf, np.float64)
        assert_std(samples, sigma)
        for wrong in (0.98, 1.02):
            with pytest.raises(AssertionError):
                assert_std(samples, wrong * sigma)


def test_a_release_is_the_sum_and_its_noise_over_a_public_divisor():
    """Exactly the normals of the key, at any bound; a std that is given ignores the sensitivity."""

    @jax.jit
    def run(bound, rows):
        cut, half = (clip_l2(bound), total()), divide(2)
        of = lambda noise: chain(*cut, noise, half, adjacency="replace_one")
        sum_ = mech.clip_and_sum(of(gaussian(0.9)), (), rows, jnp.ones(4)).value
        both = (gaussian(0.9), gaussian(std=0.2))
        return sum_, [mech.release(of(n), KEY, (), rows, jnp.ones(4))[0] for n in both]

    for bound in (1e-3, 1.0, 50.0):
        sum_, (relative, absolute) = run(bound, jax.random.normal(KEY, (4, 6)))
        drawn = normals(KEY, sum_)
        close(relative, (sum_ + 0.9 * 2 * bound * drawn) / 2, rtol=1e-5)
        close(absolute, (sum_ + 0.2 * drawn) / 2, rtol=1e-5)


def test_the_divisor_does_not_follow_the_number_of_rows_that_came():
    fixed = chain(clip_l2(1.0), total(), divide(4), divide(2), adjacency="add_remove")
    own = chain(clip_l2(1.0), total(), divide("size"))

    @jax.jit
    def released(weight, size):
        of = lambda m: mech.release(m, KEY, (), jnp.ones((4, 1)), weight, realised=size)[0]
        return of(fixed), of(own)

    for n, size in ((0, 0), (1, 8), (4, 8)):
        by_eight, by_size = released(np.float32(np.arange(4) < n), np.int32(size))
        close(by_eight, np.array([n / 8], "f4"))
        close(by_size, np.array([n / max(size, 1)], "f4"))


# --- adaptive clipping


@pytest.mark.parametrize("quantile, initial", [(0.2, 100.0), (0.5, 0.01), (0.9, 0.01)])
def test_an_adaptive_clip_finds_the_quantile(quantile, initial):
    norms = jnp.exp(jax.random.normal(KEY, (200,)))
    m = chain(clip_adaptive(initial, 200, quantile=quantile, lr=0.3), total())

    def once(state, _):
        return mech.release(m, KEY, state, norms[:, None], jnp.ones(200))[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(once, s, None, 400))(mech.initial_state(m))
    assert abs(float(jnp.mean(norms <= state)) - quantile) < 0.03


def test_an_adaptive_clip_moves_by_the_noisy_coordinate_only():
    """Given the release, the clip norm holds nothing more about the rows."""
    options = dict(quantile=0.5, lr=0.2, indicator=0.5)
    m = chain(clip_adaptive(2.0, 10, **options), total(), gaussian(1.5), adjacency="add_remove")
    rows = jnp.concatenate([jnp.ones((3, 4)), 9 * jnp.ones((4, 4))])
    start = mech.initial_state(m)
    value, state = jax.jit(lambda rows: mech.release(m, KEY, start, rows, jnp.ones(7)))(rows)
    clean = jax.jit(lambda rows: mech.clip_and_sum(m, start, rows, jnp.ones(7)))(rows)
    noise = normals(KEY, clean.value)
    sigma = 1.5 * 2.0 * math.sqrt(1 + 0.5**2 / 4)
    close(value, clean.value[0] + sigma * noise[0], rtol=1e-5)
    exact = 2.0 * 0.5 * (3 - 4) / 2
    close(clean.value[1], np.float32(exact))
    moved = lambda coordinate: 2.0 * np.exp(-0.2 * (coordinate / (2.0 * 0.5 * 10) + 0.5 - 0.5))
    close(state, np.float32(moved(exact + sigma * float(noise[1]))), rtol=1e-5)
    assert abs(float(state) - moved(exact)) > 1e-2
    assert float(clean.clipped) == 4


# --- private gradients


def test_an_empty_batch_is_noise():
    g = noisy_grad()
    bound = mech.bind(g.mechanism, "replace_one", "test")
    grad = type(g)(g.loss, bound, g.l2, g.microbatch, g.path)
    none = Batch(jnp.full((5, 3), jnp.nan), jnp.ones(5), jnp.zeros(5, bool))
    client = types.SimpleNamespace(size=jnp.int32(5), client=jnp.int32(0))
    found, (loss, clipped) = jax.jit(lambda p: grad(KEY, p, none, client))(start_params())
    noise = normals(KEY, start_params())
    close(found, jax.tree.map(lambda n: 1.1 * 2 * 0.8 * n / 3.0, noise), rtol=1e-5)
    assert float(loss) == float(clipped) == 0.0


# --- refusals

INFINITE = float("inf")
BAD = [0, 0.0, -1.0, np.nan, INFINITE, -INFINITE, "1", None, True, [1.0, -1.0]]
MAKERS = {
    "clip_l2": clip_l2,
    "automatic": clip_automatic,
    "gamma": lambda v: clip_automatic(1.0, v),
    "per_layer": clip_per_layer,
    "per_layer[1]": lambda v: clip_per_layer((1.0, v)),
    "adaptive": lambda v: clip_adaptive(v, 3),
    "count": lambda v: clip_adaptive(1.0, v),
    "lr": lambda v: clip_adaptive(1.0, 3, lr=v),
    "indicator": lambda v: clip_adaptive(1.0, 3, indicator=v),
    "quantile": lambda v: clip_adaptive(1.0, 3, quantile=v),
    "gaussian": gaussian,
    "std": lambda v: gaussian(std=v),
    "divide": divide,
    "gaussian of clients": lambda v: gaussian(np.array([v])),
}
# Positive and finite as given, but 0 or infinite in float32: a gaussian(1e-60) is no noise at all.
NOT_IN_FLOAT32 = (1e-60, 1e60)
# An array would be spread over coordinates, and no longer be the bound of a contribution.
SEVERAL = np.array([1.0, 2.0])


@pytest.mark.parametrize("make", MAKERS)
def test_bad_numbers_are_refused(make):
    wrong = [*BAD, *NOT_IN_FLOAT32]
    if make not in ("gaussian", "std"):  # which take one for each client
        wrong.append(SEVERAL)
    if make in ("clip_l2", "automatic", "gamma", "per_layer", "per_layer[1]"):
        wrong.append(1e-20)  # whose square vanishes, and with it the length of a row
    for bad in wrong:
        with pytest.raises(ValueError, match="expected"):
            MAKERS[make](bad)


CUT = clip_l2(1.0), total()
PER_LAYER = {"a": jnp.ones((ROWS, 4)), "b": jnp.ones((ROWS, 2, 2))}


def clipped_by(stage):
    return lambda: mech.clip_and_sum(chain(stage, total()), (), PER_LAYER, jnp.ones(ROWS))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: clip_adaptive(1.0, 3, quantile=1.5), "quantile"),
        (lambda: clip_per_layer(()), "one bound"),
        # a claim about fewer leaves than there are would understate the sensitivity
        (clipped_by(clip_per_layer((1.0,))), "clip_per_layer"),
        (clipped_by(clip_per_layer((1.0, 1.0, 1.0))), "clip_per_layer"),
        (gaussian, "either"),
        (lambda: gaussian(1.0, std=1.0), "either"),
        (lambda: gaussian(0.0), "leave the stage out .in a config, noise_multiplier=None"),
        (lambda: divide("sizes"), "divide"),
        (lambda: noisy_grad(microbatch=0), "microbatch"),
        (lambda: noisy_grad(l2=-1.0), "l2"),
        (lambda: noisy_grad(path="fast"), "path"),
        (lambda: jfl.private_grad(squared, clip_l2(1.0)), "chain of stages"),
        (lambda: chain(*CUT, adjacency="neighbours"), "adjacency"),
        (lambda: mech.sensitivity(chain(*CUT)), "adjacency"),
        # a chain that nobody bound to an adjacency adds no noise
        (
            lambda: mech.release(chain(*CUT, gaussian(1.0)), KEY, (), jnp.ones((2, 3)), np.ones(2)),
            "adjacency",
        ),
        (
            lambda: mech.multiplier(
                chain(clip_adaptive(1.0, 3), total(), gaussian(std=1.0), adjacency="add_remove")
            ),
            "adaptive",
        ),
    ],
)
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


BAD_ORDERS = [
    (gaussian(1.0), *CUT),
    (clip_l2(1.0), gaussian(1.0), total()),
    (total(), gaussian(1.0)),
    (total(), gaussian(std=1.0)),
    (*CUT, divide(3), gaussian(1.0)),
    (clip_l2(1.0),),
    (),
    (total(), clip_l2(1.0)),
    (*CUT, total()),
    (*CUT, gaussian(1.0), gaussian(1.0)),
    (clip_l2(1.0), clip_adaptive(1.0, 3), total()),
    (clip_l2, total()),
]


@pytest.mark.parametrize("stages", BAD_ORDERS)
def test_bad_orders_are_refused(stages):
    with pytest.raises(ValueError, match="chain: expected"):
        chain(*stages)
