"""Maps before a clip and back after the noise: what they do, and that no epsilon rests on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_loops import clip
from helpers.problems import (
    CLIENTS,
    design_matrices,
    flat,
    make_algorithm,
    make_federation,
    squared,
    start_params,
)
from jfl.kernels.normals import normals

import jfl
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key
from jfl.privacy.mechanisms import chain as mech
from jfl.privacy.mechanisms import linear_maps

KEY = jax.random.key(3)
NUMBERS = 4  # of the parameters of start_params()
TASK = jfl.task(start_params(), squared)
TREE = jax.tree.structure(start_params())


def as_params(vector):
    return TREE.unflatten([vector[0], vector[1:]])  # b, then w


def signs(key):
    return jax.random.rademacher(key, (NUMBERS,), jnp.float32)


def turned(key, contribution):
    """Give random signs to a contribution, in a tree of another form."""
    vector = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(contribution)])
    return [vector * signs(key)]


def turned_back(key, value):
    return as_params(value[0] * signs(key))


MAPS = dict(
    projection=lambda **o: jfl.linear_maps.projection(TASK, 3, **o),
    rotation=lambda **o: jfl.linear_maps.rotation(TASK, **o),
    sparsification=lambda **o: jfl.linear_maps.sparsification(TASK, 2, **o),
    own=lambda **o: jfl.linear_maps.linear_map(turned, turned_back, **o),
)


def chain_of(pair, *clips, z=1.0, divisor=CLIENTS):
    noise = jfl.total(), jfl.gaussian(z)
    clips = clips or (jfl.clip_l2(0.5),)
    return jfl.chain(pair.there, *clips, *noise, pair.back, jfl.divide(divisor))


def plan_of(release=None, grad=None, name="fedavg", **options):
    grad = jfl.grad(squared) if grad is None else grad
    made = make_algorithm(name, grad, batch=jfl.batches.full(), lr=0.1)
    sampler = jfl.sampling.full(CLIENTS)
    return jfl.plan(make_federation(), TASK, made, sampler, release=release, **options)


def trained(plan, rounds):
    """Return the parameters after some rounds, without an evaluation, which would be compiled."""
    run, step = jfl.init(KEY, plan), jax.jit(lambda run: jfl.run_round(run, plan)[0])
    for _ in range(rounds):
        run = step(run)
    return flat(run.server.params)


@functools.cache
def compiled(pair):
    """Return the program of both matrices of a round: [k, 4] there and [4, k] back."""

    @jax.jit
    def run(round_):
        chain = jfl.chain(pair.there, jfl.clip_l2(1.0), jfl.total(), pair.back)
        there, _, _, back = mech.at_round(chain, round_).stages
        ravel = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])
        forward = lambda vector: there.apply((), as_params(vector))[0]
        value, unravel = jax.flatten_util.ravel_pytree(forward(jnp.zeros(NUMBERS)))
        backward = lambda vector: ravel(back.apply(unravel(vector), mech.After())[0])
        each = lambda function, size: jax.vmap(function)(jnp.eye(size)).T
        return each(lambda v: ravel(forward(v)), NUMBERS), each(backward, value.size)

    return run


def matrices(pair, round_):
    return map(np.asarray, compiled(pair)(jnp.int32(round_)))


def numpy_run(pair, rounds, fixed=False):
    """Run FedAvg with the noise of a release in fewer coordinates, round by round."""
    plan = plan_of(chain_of(pair))
    noise, w = run_noise_key(jfl.init(KEY, plan)), flat(start_params())
    for r in range(rounds):
        there, back = matrices(pair, 0 if fixed else r)
        total = 0
        for x, y in design_matrices(plan.fed):
            v = w
            for _ in range(2):
                v = v - 0.1 * ((x @ v - y)[:, None] * x).mean(0)
            total = total + clip(there @ (v - w), 0.5)
        drawn = np.asarray(normals(stream_key(noise, Stream.RELEASE, r), jnp.zeros(len(there))))
        w = w + back @ (total + 1.0 * drawn) / CLIENTS  # replace_one: twice the clip norm
    return w


@pytest.mark.by_default("projection")
@pytest.mark.parametrize("name", MAPS)
def test_a_run_equals_a_numpy_loop(name):
    pair = MAPS[name]()
    found = trained(plan_of(chain_of(pair)), 3)
    np.testing.assert_allclose(found, numpy_run(pair, 3), atol=2e-5)
    assert np.abs(found - numpy_run(pair, 3, fixed=True)).max() > 1e-3


@pytest.mark.parametrize("name", MAPS)
def test_the_way_back_is_the_adjoint_and_unbiased(name):
    """Means over 500 rounds, within 5 standard errors: a false alarm for 1 of 100,000 seeds.
    Without their scale, maps to fewer coordinates would not pass."""
    pair = MAPS[name]()
    there, back = map(np.asarray, jax.vmap(compiled(pair))(jnp.arange(500)))
    np.testing.assert_allclose(np.swapaxes(there, 1, 2), back, atol=1e-6)
    each = back @ there
    if name in ("rotation", "own"):
        np.testing.assert_allclose(each, np.broadcast_to(np.eye(NUMBERS), each.shape), atol=1e-6)
    else:
        error = each.std(0) / np.sqrt(len(each)) + 1e-6
        kept = dict(projection=3, sparsification=2)[name] / NUMBERS
        assert (np.abs(each.mean(0) - np.eye(NUMBERS)) < 5 * error).all()
        assert (np.abs(kept * each.mean(0) - np.eye(NUMBERS)) > 5 * error).any()


@pytest.mark.by_default("own")
@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_is_the_same_in_each_round(name):
    there, back = jax.vmap(compiled(MAPS[name](each_round=False)))(jnp.arange(2))
    np.testing.assert_array_equal(*there)
    np.testing.assert_array_equal(*back)


def test_a_map_changes_no_epsilon_whatever_it_does():
    loud = lambda key, v: jax.tree.map(lambda x: 1e6 * x, v)
    far = jfl.linear_maps.linear_map(loud, lambda key, v: v)
    plain = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0), jfl.divide(CLIENTS))
    want = jfl.guarantee(plan_of(plain), 5).epsilon
    adaptive = chain_of(MAPS["projection"](), jfl.clip_adaptive(0.5, CLIENTS))
    for release in (chain_of(far), chain_of(MAPS["own"]()), adaptive):
        found = jfl.guarantee(plan_of(release), 5)
        assert (found.epsilon, found.status) == (want, "proved")
    ones = jax.tree.map(lambda x: jnp.ones((1, *x.shape)), start_params())
    part = mech.clip_and_sum(mech.at_round(chain_of(far), jnp.int32(0)), (), ones, jnp.ones(1))
    assert np.linalg.norm(flat(part.value)) <= 0.5 * (1 + 1e-6)
    # maps of examples
    private = jfl.private_grad(squared, chain_of(MAPS["projection"](), divisor=4))
    plan = plan_of(grad=private)
    found = jfl.guarantee(plan, 5, unit="example", view="server")
    whole = jfl.guarantee(plan_of(grad=jfl.private_grad(squared, plain)), 5)
    assert (found.epsilon, found.status) == (whole.epsilon, "proved")
    assert np.isfinite(trained(plan, 2)).all()


# --- functions that hold rows

HELD = np.asarray(make_federation().x)
PLAIN = jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0)


def look(value):
    return jax.tree.map(lambda v: v + 1e-9 * jnp.asarray(HELD).sum(), value)


def loud_by_rows(round_):
    return 1.0 + 1e-9 * jnp.asarray(HELD).sum()


def _plus(rows, value):
    return value + 1e-9 * rows.sum()


def mapped(forward, backward, *post):
    there, back = jfl.linear_maps.linear_map(forward, backward)
    return jfl.chain(there, *PLAIN, *post, back)


LOOKING = functools.partial(jax.tree.map, functools.partial(_plus, jnp.asarray(HELD)))
HOLDERS = {  # chains with a function of a user's that holds rows of the federation
    "there": lambda: mapped(lambda k, v: look(v), lambda k, v: v),
    "before the way back": lambda: mapped(lambda k, v: v, lambda k, v: v, jfl.post_process(look)),
    "back": lambda: mapped(lambda k, v: v, lambda k, v: look(v)),
    "noise": lambda: jfl.chain(*PLAIN[:2], jfl.gaussian(loud_by_rows)),
    "partial": lambda: jfl.chain(*PLAIN, jfl.post_process(LOOKING)),
}


@pytest.mark.parametrize("where", HOLDERS)
def test_functions_that_hold_rows_are_refused(where):
    chain = HOLDERS[where]()
    for options in (dict(release=chain), dict(grad=jfl.private_grad(squared, chain))):
        with pytest.raises(ValueError, match="functions that receive rows as arguments"):
            plan_of(**options)


def test_a_partial_of_rows_is_refused_though_the_function_is_a_librarys():
    add = functools.partial(jnp.add, jnp.asarray(HELD))
    task = jfl.task(jnp.zeros(HELD.shape), lambda w, x, y: (w.mean() * x.sum() - y) ** 2)
    made = jfl.algorithms.fedavg(jfl.grad(task.loss), steps=1, batch=jfl.batches.full())
    release = jfl.chain(*PLAIN, jfl.post_process(add))
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        jfl.plan(make_federation(), task, made, jfl.sampling.full(CLIENTS), release=release)


def test_chains_that_a_client_does_not_declare_are_searched_too():
    chain = jfl.chain(*PLAIN[:2], jfl.divide(4.0), jfl.post_process(look))
    grad, whole = jfl.private_grad(squared, chain), jfl.batches.full()
    made = jfl.algorithms.output_perturbation(grad, jfl.chain(*PLAIN), steps=1, batch=whole)
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        jfl.plan(make_federation(), TASK, made, jfl.sampling.full(CLIENTS))


# --- releases in another shape


def summed(value):
    return jax.tree.map(jnp.sum, value)


def summed_back(key, value):
    return summed(turned_back(key, value))


def second_summed(key, value):
    """Sum the second of two trees that are released: a control variate, or a gradient."""
    return type(value)(value[0], summed(value[1]))


SUMMED = jfl.linear_maps.linear_map(turned, summed_back)
UPLOAD = jfl.chain(*PLAIN, jfl.post_process(summed))
STEP = jfl.private_grad(squared, chain_of(SUMMED))


@pytest.mark.parametrize("stage", ["release", "upload", "step", "feddyn", "padpfl", "scaffold"])
def test_a_release_in_another_shape_does_not_broadcast(stage):
    """One number for many would be added to all of them, also to what a server keeps."""
    if stage in ("release", "upload", "step"):
        plans = dict(release=dict(release=chain_of(SUMMED)), upload=dict(upload=UPLOAD))
        plan = plan_of(**plans.get(stage, dict(grad=STEP)))
    else:
        back = second_summed if stage == "scaffold" else lambda key, value: summed(value)
        pair = jfl.linear_maps.linear_map(lambda key, value: value, back)
        plan = plan_of(chain_of(pair), name=stage)
    with pytest.raises(ValueError, match=r"expected one shape of w, but got \(.*\) and \(.*\)\."):
        jfl.simulate(KEY, plan, 2)


def test_a_public_key_is_of_no_stream():
    data = lambda key: jax.random.key_data(key).tolist()
    streams = [data(stream_key(jax.random.key(0), s, r)) for s in range(7) for r in (0, 1)]
    assert not any(data(linear_maps._key(seed, 1)) in streams for seed in range(7))


def test_what_a_callback_hides_is_not_proved():
    shape = lambda v: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), v)
    ask = lambda key, v: jax.pure_callback(lambda x: x, shape(v), v, vmap_method="sequential")
    chain = chain_of(jfl.linear_maps.linear_map(ask, lambda key, v: v))
    for plan in (plan_of(chain), plan_of(grad=jfl.private_grad(squared, chain))):
        found = jfl.guarantee(plan, 2)
        assert found.status == "conditional"
        assert any("pure_callback in the stage 'linear_map'" in str(c) for c in found.caveats)


# --- refusals

PAIR = MAPS["projection"]()
OTHER = jfl.linear_maps.projection(TASK, 3, seed=1)


def halves(there, *back):
    return lambda: plan_of(jfl.chain(there, *PLAIN, *back))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: jfl.chain(PLAIN[0], PAIR.there, *PLAIN[1:]), "a clip after the last map"),
        (lambda: jfl.chain(PAIR.there, *PLAIN[1:]), "a clip after the last map"),
        (halves(PAIR.there, OTHER.back), "both stages of"),
        (halves(PAIR.there), "both stages of"),
        (
            lambda: plan_of(grad=jfl.private_grad(squared, jfl.chain(PAIR.there, *PLAIN))),
            "both stages of",
        ),
        (halves(PAIR.there, PAIR.back, PAIR.back), "both stages of"),
        (lambda: jfl.linear_maps.projection(TASK, 5), "size <= 4"),
        (lambda: jfl.linear_maps.rotation(()), "like=task"),
        (lambda: jfl.linear_maps.rotation(TASK, seed=-1), "seed"),
        (lambda: jfl.linear_maps.linear_map(3, lambda k, v: v), "forward, a plain function"),
        (
            lambda: jfl.simulate(KEY, plan_of(chain_of(jfl.linear_maps.rotation(jnp.zeros(7)))), 1),
            "contributions like like=",
        ),
        pytest.param(
            lambda: jfl.audit(plan_of(chain_of(PAIR)), 3, trials=400, delta=0.01),
            "copies of the parameters",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
