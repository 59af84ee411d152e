"""The privacy boundary: sensitivity on real neighbours, the law and the independence of noise,
refusals.

Every statistical test states its false-alarm rate (1e-6) and has a half that must fail, so that it
is known to see the error it is there for.
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
from jfl import chain, clip_adaptive, clip_l2, clip_per_layer, divide, gaussian, total
from jfl.core.records import Batch
from jfl.privacy.mechanisms import chain as mech

ALARM = 1e-6
ROWS = 5
KEY = jax.random.key(0)


# --- sensitivity


def _chain(kind, bound, adjacency):
    stage = dict(
        l2=lambda: clip_l2(bound),
        layers=lambda: clip_per_layer((bound, 2.0 * bound)),
        layers_equal=lambda: clip_per_layer(bound, layers=2),
        adaptive=lambda: clip_adaptive(bound, 4.0, indicator=0.4),
        both=lambda: clip_l2(bound),
    )[kind]()
    stages = (stage, clip_per_layer((3 * bound, bound))) if kind == "both" else (stage,)
    return chain(*stages, total(), adjacency=adjacency)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _sum(kind, adjacency, bound, rows, weight):
    """The sum a release adds noise to, and what is claimed of it."""
    m = _chain(kind, bound, adjacency)
    state = mech.initial_state(m)
    return mech.clip_and_sum(m, state, rows, weight).value, mech.sensitivity(
        m, state, jnp.max(weight)
    )


def _rows(r, magnitude):
    scale = 10.0 ** (magnitude * r.uniform(-1, 1, (ROWS, 1)))
    return {
        "a": (r.normal(size=(ROWS, 4)) * scale).astype("f4"),
        "b": (r.normal(size=(ROWS, 2, 2)) * scale[..., None]).astype("f4"),
    }


def _gap(kind, adjacency, bound, rows, other, weight, at):
    """How far the neighbour moves the sum, over what is claimed."""
    if adjacency != "replace_one":
        one, claim = _sum(kind, adjacency, bound, rows, weight)
        without = weight.copy()
        without[at] = 0.0
        two, _ = _sum(kind, adjacency, bound, rows, without)
    else:
        changed = {k: v.copy() for k, v in rows.items()}
        for k in changed:
            changed[k][at] = other[k][at]
        one, claim = _sum(kind, adjacency, bound, rows, weight)
        two, _ = _sum(kind, adjacency, bound, changed, weight)
    return np.linalg.norm(flat(one) - flat(two)) / float(claim)


KINDS = ["l2", "layers", "layers_equal", "adaptive", "both"]


@pytest.mark.parametrize("adjacency", mech.ADJACENCIES)
@pytest.mark.parametrize("kind", KINDS)
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
@pytest.mark.parametrize("kind", ["l2", "layers", "layers_equal", "adaptive"])
def test_the_claim_is_attained(kind, adjacency):
    """Some neighbour comes within one per cent: less noise would be too little.  A claim twice as
    large would fail."""
    r = np.random.default_rng(1)
    weight = np.array([0.5, 1.0, 2.0, 1.0, 0.1], "f4")
    rows = _rows(r, 0.0)
    best = 0.0
    for scale in (1e-3, 0.999, 1e3):  # below, at and above the bound
        for k in rows:  # leaves in proportion to their bounds' directions
            unit = rows[k][2] / np.linalg.norm(rows[k][2])
            rows[k][2] = (
                unit
                * {"layers": 0.7 if k == "a" else 1.4, "l2": 0.495, "adaptive": 0.495}.get(
                    kind, 0.7
                )
                * scale
            )
        other = {k: -v for k, v in rows.items()}
        best = max(best, _gap(kind, adjacency, np.float32(0.7), rows, other, weight, 2))
    # under replace_one the adaptive bit cannot point both ways at full norm; its part of the bound
    # is 4 per cent
    least = 0.97 if kind == "adaptive" and adjacency == "replace_one" else 0.99
    assert least < best <= 1 + 1e-4
    assert best / 2 < least


def test_sensitivity_by_hand():
    assert mech.sensitivity(chain(clip_l2(0.5), total(), adjacency="add_remove")) == pytest.approx(
        0.5
    )
    assert mech.sensitivity(
        chain(clip_l2(0.5), total(), adjacency="replace_one"), max_weight=3.0
    ) == pytest.approx(3.0)
    assert mech.sensitivity(
        chain(clip_per_layer(0.5, layers=4), total(), adjacency="add_remove")
    ) == pytest.approx(1.0)
    assert mech.sensitivity(
        chain(clip_adaptive(2.0, 5, indicator=0.2), total(), adjacency="add_remove")
    ) == pytest.approx(2 * math.sqrt(1.01))
    assert mech.sensitivity(chain(total(), adjacency="add_remove")) == math.inf
    with pytest.raises(ValueError, match="adjacency"):
        mech.sensitivity(chain(clip_l2(1.0), total()))
    with pytest.raises(ValueError, match="adjacency"):  # a chain that nobody bound adds no noise
        mech.release(
            chain(clip_l2(1.0), total(), gaussian(1.0)), KEY, (), jnp.ones((2, 3)), jnp.ones(2)
        )


def test_multiplier_is_what_runs():
    m = chain(clip_l2(0.5), total(), gaussian(std=3.0), adjacency="replace_one")
    assert mech.multiplier(m) == pytest.approx(3.0) and mech.multiplier(
        m, max_weight=2.0
    ) == pytest.approx(1.5)
    assert mech.multiplier(chain(clip_l2(0.5), total(), gaussian(1.1))) == float(np.float32(1.1))
    assert mech.multiplier(chain(clip_l2(0.5), total())) is None and mech.multiplier(None) is None
    with pytest.raises(ValueError, match="adaptive"):
        mech.multiplier(
            chain(clip_adaptive(1.0, 3), total(), gaussian(std=1.0), adjacency="add_remove")
        )
    assert (
        mech.denominator(chain(total(), divide(4), divide(3))) == 12.0
        and mech.denominator(chain(total())) is None
    )


def test_layers_must_match_what_is_clipped():
    """A claim about fewer leaves than there are would understate the sensitivity."""
    rows = {"a": jnp.ones((ROWS, 4)), "b": jnp.ones((ROWS, 2, 2))}
    for bad in (
        clip_per_layer(1.0, layers=1),
        clip_per_layer(1.0, layers=3),
        clip_per_layer((1.0, 1.0, 1.0)),
    ):
        with pytest.raises(ValueError, match="clip_per_layer"):
            mech.clip_and_sum(chain(bad, total()), (), rows, jnp.ones(ROWS))


# --- clipping


def test_small_contributions_are_left_alone_and_zero_is_not_divided_by():
    """Clipping is not normalising."""
    contribute = jax.jit(
        lambda m, rows, weight: mech.clip_and_sum(m, mech.initial_state(m), rows, weight)
    )
    rows = jnp.array([[0.3, 0.4], [3.0, 4.0], [0.0, 0.0], [1e-30, 0.0], [1e25, 1e25]])
    for stage in (clip_l2(1.0), clip_per_layer(1.0, layers=1), clip_adaptive(1.0, 3)):
        m = chain(stage, total())
        for i, want in enumerate(([0.3, 0.4], [0.6, 0.8], [0.0, 0.0], [1e-30, 0.0], None)):
            weight = jnp.zeros(5).at[i].set(1.0)
            part = contribute(m, rows, weight)
            value = part.value[0] if stage.name == "clip_adaptive" else part.value
            assert float(part.count) == 1 and float(part.clipped) == (i == 1)
            if want is None:  # too long to be measured
                assert not np.asarray(value).any() and float(part.nonfinite) == 1
            else:
                close(value, np.array(want, "f4"), rtol=1e-6)


def test_the_clip_does_not_depend_on_data():
    """A bound taken from the batch (a median, say) would move with it: nine large rows leave the
    tenth as it is."""
    m = chain(clip_l2(1.0), total())
    small = np.array([[0.1, 0.2]], "f4")
    sum_of = jax.jit(lambda rows, weight: mech.clip_and_sum(m, (), rows, weight).value)
    rows = np.concatenate([small, 100 * np.ones((9, 2), "f4")])
    close(sum_of(rows, np.eye(1, 10, dtype="f4")[0]), sum_of(small, np.ones(1, "f4")))


@pytest.mark.parametrize("junk", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "stage",
    [clip_l2(1.0), clip_per_layer((1.0, 2.0)), clip_adaptive(1.0, 3), None],
    ids=["l2", "layers", "adaptive", "none"],
)
def test_masked_rows_add_nothing(stage, junk):
    m = chain(*([stage] if stage else []), total())
    rows = {"a": jnp.ones((4, 3)), "b": jnp.arange(8.0).reshape(4, 2)}
    dirty = jax.tree.map(lambda x: x.at[2].set(junk), rows)
    weight = jnp.array([1.0, 2.0, 0.0, 1.0])
    contribute = jax.jit(lambda x: mech.clip_and_sum(m, mech.initial_state(m), x, weight))
    part = [contribute(x) for x in (rows, dirty)]
    assert same_bits(*part) and float(part[0].count) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_clipped_row_is_within_its_bound_in_float32(dtype):
    rows = (jax.random.normal(KEY, (300, 40)) * jnp.logspace(-1, 3, 300)[:, None]).astype(dtype)
    clipped = jax.jit(
        jax.vmap(
            lambda row: (
                mech.clip_and_sum(chain(clip_l2(1.0), total()), (), row[None], jnp.ones(1)).value
            )
        )
    )(rows)
    assert clipped.dtype == jnp.float32
    norms = np.linalg.norm(np.asarray(clipped, np.float64), axis=1)
    assert norms.max() <= 1 + 1e-6 and norms.max() > 0.99


def test_leaves_keep_their_dtype():
    rows = {"half": jnp.ones((3, 4), jnp.bfloat16), "full": jnp.ones((3, 2))}
    m = chain(clip_l2(1.0), total(), gaussian(1.0), divide(3), adjacency="add_remove")
    out, _ = mech.release(m, KEY, (), rows, jnp.ones(3))
    assert out["half"].dtype == jnp.bfloat16 and out["full"].dtype == jnp.float32
    assert np.isfinite(flat(out)).all()


# --- noise


def assert_std(samples, sigma):
    """The root mean square against sigma, by the chi-square law; a false alarm in 1e6."""
    n = samples.size
    low, high = np.sqrt(stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], n) / n)
    ratio = float(np.sqrt(np.mean(np.square(samples))) / sigma)
    assert low < ratio < high, f"std / sigma = {ratio:.4f} outside [{low:.4f}, {high:.4f}], n = {n}"


def assert_std_with_power(samples, sigma):
    assert_std(samples, sigma)
    for wrong in (0.98, 1.02):
        with pytest.raises(AssertionError):
            assert_std(samples, wrong * sigma)


LEAVES = {"a": (80_000,), "b": (300, 250), "c": (70_001,)}
STAGES = dict(
    l2=(lambda: clip_l2(0.5), 0.5),
    layers=(lambda: clip_per_layer({"a": 0.3, "b": 0.4, "c": 1.2}), 1.3),
    equal=(lambda: clip_per_layer(0.5, layers=3), 0.5 * math.sqrt(3)),
    adaptive=(lambda: clip_adaptive(0.5, 4, indicator=0.6), 0.5 * math.sqrt(1.09)),
)


def _noise(stages, key=KEY, adjacency="add_remove", **options):
    m = chain(*stages, adjacency=adjacency)
    zeros = {k: jnp.zeros((2,) + s) for k, s in LEAVES.items()}
    return mech.release(m, key, mech.initial_state(m), zeros, jnp.ones(2), **options)[0]


@pytest.mark.by_default("add_remove-1-l2", "replace_one-2-layers", "add_remove-1-adaptive")
@pytest.mark.parametrize("kind", STAGES)
@pytest.mark.parametrize("adjacency, twice", [("add_remove", 1), ("replace_one", 2)])
def test_noise_has_the_scale_of_the_sensitivity(kind, adjacency, twice):
    """For every leaf: z * sensitivity of the sum, over the divisor."""
    stage, bound = STAGES[kind]
    out = _noise((stage(), total(), gaussian(1.3), divide(5)), adjacency=adjacency, max_weight=1.5)
    for leaf in jax.tree.leaves(out):
        assert_std_with_power(np.asarray(leaf, np.float64), 1.3 * twice * bound * 1.5 / 5)


def test_a_given_std_is_the_std():
    stages = clip_l2(0.5), total(), gaussian(std=0.2)
    assert_std_with_power(flat(_noise(stages, adjacency="replace_one", max_weight=9.0)), 0.2)


def test_the_divisor_is_public():
    """It does not move with the number of rows that came."""
    m = chain(clip_l2(1.0), total(), divide(4), adjacency="add_remove")
    for n in (0, 1, 4):
        out, _ = mech.release(m, KEY, (), jnp.ones((4, 1)), (jnp.arange(4) < n).astype(jnp.float32))
        close(out, np.array([n / 4], "f4"))
    own = chain(clip_l2(1.0), total(), divide("size"))
    for size, rows, mean in ((8, jnp.ones(4), 0.5), (0, jnp.zeros(4), 0.0)):
        out, _ = mech.release(own, KEY, (), rows[:, None], rows, realised=jnp.int32(size))
        close(out, np.array([mean], "f4"))


def test_the_bits_say_what_sigma_is():
    """Noise over the sum of real rows is release minus sum: exactly z * sensitivity * normals, at
    any bound."""

    @jax.jit
    def run(bound, rows):
        m = chain(clip_l2(bound), total(), gaussian(0.9), divide(2), adjacency="replace_one")
        out, _ = mech.release(m, KEY, (), rows, jnp.ones(4))
        return out, mech.clip_and_sum(m, (), rows, jnp.ones(4)).value

    for bound in (1e-3, 1.0, 50.0):
        out, total_ = run(bound, jax.random.normal(KEY, (4, 6)))
        close(out, (total_ + 0.9 * 2 * bound * normals(KEY, total_)) / 2, rtol=1e-5)


# --- adaptive clipping


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("initial", [0.01, 100.0])
def test_adaptive_clip_finds_the_quantile(quantile, initial):
    norms = jnp.exp(jax.random.normal(KEY, (200,)))
    m = chain(clip_adaptive(initial, 200, quantile=quantile, lr=0.3), total())

    def once(state, _):
        return mech.release(m, KEY, state, norms[:, None], jnp.ones(200))[1], None

    state, _ = jax.jit(lambda s: jax.lax.scan(once, s, None, 400))(mech.initial_state(m))
    assert abs(float(jnp.mean(norms <= state)) - quantile) < 0.03


def test_adaptive_clip_moves_by_the_noisy_coordinate_only():
    """Given the release, C holds nothing more about the rows."""
    options = dict(quantile=0.5, lr=0.2, indicator=0.5)
    m = chain(clip_adaptive(2.0, 10, **options), total(), gaussian(1.5), adjacency="add_remove")
    rows = jnp.concatenate([jnp.ones((3, 4)), 9 * jnp.ones((4, 4))])
    weight = jnp.ones(7)
    value, state = mech.release(m, KEY, mech.initial_state(m), rows, weight)
    clean = mech.clip_and_sum(m, mech.initial_state(m), rows, weight)
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


def _batch(n=5, seed=0):
    r = np.random.default_rng(seed)
    return Batch(
        jnp.asarray(r.normal(size=(n, 3)), jnp.float32),
        jnp.asarray(r.normal(size=n), jnp.float32),
        jnp.array([True, True, False, True, True])[:n],
    )


def OWN(size):
    """What a gradient asks of its client."""
    return types.SimpleNamespace(size=jnp.int32(size), client=jnp.int32(0))


def _bound_grad(**options):
    g = noisy_grad(**options)
    return type(g)(
        g.loss, mech.bind(g.mechanism, "replace_one", "test"), g.l2, g.microbatch, g.path
    )


@pytest.mark.parametrize("size", [1, 2, 5, 7])
def test_microbatches_equal_the_batch(size):
    batch = _batch()
    batch = batch._replace(x=batch.x.at[2].set(jnp.nan))
    run = lambda g: jax.jit(lambda key: g(key, start_params(), batch, OWN(5)))(KEY)
    close(run(_bound_grad(microbatch=size)), run(_bound_grad()), rtol=1e-5, atol=1e-6)


def test_examples_are_clipped_one_by_one():
    """Two opposite gradients cancel in a batch; clipped apart, the larger loses its lead."""
    loss = lambda w, x, y: w[0] * x[0]
    g = jfl.private_grad(loss, chain(clip_l2(1.0), total()))
    batch = Batch(jnp.array([[100.0], [-0.5]]), jnp.zeros(2), jnp.ones(2, bool))
    out, (_, clipped) = g(KEY, jnp.zeros(1), batch, OWN(2))
    close(out, np.array([0.5], "f4"))
    assert float(clipped) == 0.5


def test_l2_is_outside_the_clip():
    """It depends on no example: it is neither clipped, nor divided, nor counted."""
    params = {"b": jnp.float32(3.0), "w": jnp.array([30.0, 0.0, -40.0])}
    grads = (_bound_grad(l2=0.5), _bound_grad(), jfl.grad(squared, l2=0.5), jfl.grad(squared))
    run = jax.jit(lambda params: [g(KEY, params, _batch(), OWN(5))[0] for g in grads])
    with_l2, without, plain, bare = map(flat, run(params))
    close(with_l2 - without, 0.5 * flat(params), rtol=1e-5, atol=1e-5)
    close(plain - bare, 0.5 * flat(params), rtol=1e-4)


def test_an_empty_batch_is_noise():
    empty = _batch()._replace(mask=jnp.zeros(5, bool))
    g, (loss, clipped) = _bound_grad()(KEY, start_params(), empty, OWN(5))
    close(
        g, jax.tree.map(lambda n: 1.1 * 2 * 0.8 * n / 3.0, normals(KEY, start_params())), rtol=1e-5
    )
    assert float(loss) == float(clipped) == 0.0


# --- refusals

INFINITE = float("inf")
BAD = [0, 0.0, -1.0, np.nan, INFINITE, -INFINITE, "1", None, True, [1.0, -1.0]]
MAKERS = {
    "clip_l2": clip_l2,
    "per_layer": clip_per_layer,
    "per_layer[1]": lambda v: clip_per_layer((1.0, v)),
    "layers": lambda v: clip_per_layer(v, layers=2),
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
    for bad in wrong:
        with pytest.raises(ValueError, match="expected"):
            MAKERS[make](bad)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: clip_adaptive(1.0, 3, quantile=1.5), "quantile"),
        (lambda: clip_per_layer(1.0, layers=0), "layers"),
        (lambda: clip_per_layer(1.0, layers=1.5), "layers"),
        (lambda: clip_per_layer(1.0), "layers"),
        (gaussian, "either"),
        (lambda: gaussian(1.0, std=1.0), "either"),
        (lambda: divide("sizes"), "divide"),
        (lambda: noisy_grad(microbatch=0), "microbatch"),
        (lambda: noisy_grad(microbatch=1.5), "microbatch"),
        (lambda: noisy_grad(l2=-1.0), "l2"),
        (lambda: noisy_grad(path="fast"), "path"),
        (lambda: jfl.private_grad(squared, clip_l2(1.0)), "chain of stages"),
        (lambda: chain(clip_l2(1.0), total(), adjacency="neighbours"), "adjacency"),
    ],
)
def test_bad_arguments_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "stages",
    [
        (gaussian(1.0), clip_l2(1.0), total()),
        (clip_l2(1.0), gaussian(1.0), total()),
        (clip_l2(1.0), gaussian(1.0)),
        (total(), gaussian(1.0)),
        (clip_l2(1.0), total(), divide(3), gaussian(1.0)),
        (clip_l2(1.0),),
        (),
        (total(), clip_l2(1.0)),
        (clip_l2(1.0), total(), total()),
        (divide(3), clip_l2(1.0), total()),
        (clip_l2(1.0), total(), gaussian(1.0), gaussian(1.0)),
        (clip_l2(1.0), clip_adaptive(1.0, 3), total()),
        (clip_adaptive(1.0, 3), clip_adaptive(1.0, 3), total()),
        (clip_l2, total()),
        ("clip", total()),
        (total(), gaussian(std=1.0)),
    ],
    ids=lambda s: "-".join(getattr(x, "name", getattr(x, "__name__", str(x))) for x in s)[:60],
)
def test_bad_orders_are_refused(stages):
    with pytest.raises(ValueError, match="chain: expected"):
        chain(*stages)


def test_traced_numbers_pass():
    """They are judged on the host where they are known, and by Health where they are not."""
    out = jax.jit(
        lambda b, z: mech.release(
            chain(clip_l2(b), total(), gaussian(z), divide(b), adjacency="add_remove"),
            KEY,
            (),
            jnp.ones((2, 3)),
            jnp.ones(2),
        )[0]
    )(1.0, 2.0)
    assert np.isfinite(out).all()
