"""Maps before a clip and back after the noise: what they do, and that no epsilon rests on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_loops import clip
from helpers.problems import CLIENTS, flat, make_federation, squared, start_params
from jfl.kernels.normals import normals

import jfl
from jfl.core.errors import NotAnalysable
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key
from jfl.privacy.mechanisms import chain as mech
from jfl.privacy.mechanisms import linear_maps

KEY = jax.random.key(3)
NUMBERS = 4  # of the parameters of start_params()
TASK = jfl.task(start_params(), squared)
MAPS = dict(
    projection=lambda **o: jfl.linear_maps.projection(TASK, 3, **o),
    rotation=lambda **o: jfl.linear_maps.rotation(TASK, **o),
    sparsification=lambda **o: jfl.linear_maps.sparsification(TASK, 2, **o),
    own=lambda **o: jfl.linear_maps.linear_map(turned, turned_back, **o),
)


def turned(key, contribution):
    """Signs by chance, in a tree of another form."""
    vector = jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(contribution)])
    return [vector * jax.random.rademacher(key, (NUMBERS,), jnp.float32)]


def turned_back(key, value):
    (vector,) = value
    signed = vector * jax.random.rademacher(key, (NUMBERS,), jnp.float32)
    leaves, treedef = jax.tree.flatten(start_params())
    parts = jnp.split(signed, np.cumsum([x.size for x in leaves])[:-1])
    return treedef.unflatten([p.reshape(x.shape) for p, x in zip(parts, leaves)])


def chain_of(pair, *clips, z=1.0, divisor=CLIENTS):
    clips = clips or (jfl.clip_l2(0.5),)
    return jfl.chain(
        pair.there, *clips, jfl.total(), jfl.gaussian(z), pair.back, jfl.divide(divisor)
    )


def plan_of(release=None, grad=None, sampler=None, **options):
    grad = jfl.grad(squared) if grad is None else grad
    fedavg = jfl.algorithms.fedavg(grad, lr=0.1, steps=2, batch=jfl.batches.full())
    sampler = jfl.sampling.full(CLIENTS) if sampler is None else sampler
    return jfl.plan(make_federation(), TASK, fedavg, sampler, release=release, **options)


def matrices(pair, round_):
    """Float[k, 4] of the way there and Float[4, k] of the way back, in a round."""
    there, _, _, back = mech.at_round(
        jfl.chain(pair.there, jfl.clip_l2(1.0), jfl.total(), pair.back), jnp.int32(round_)
    ).stages
    leaves, treedef = jax.tree.flatten(start_params())
    unit = lambda i: treedef.unflatten(
        [
            p.reshape(x.shape)
            for p, x in zip(
                np.split(np.eye(NUMBERS, dtype=np.float32)[i], [leaves[0].size]), leaves
            )
        ]
    )
    form = jax.tree.map(jnp.zeros_like, there.apply((), start_params())[0])
    size = sum(x.size for x in jax.tree.leaves(form))
    shaped = lambda v: jax.tree.map(lambda x: jnp.asarray(v).reshape(x.shape), form)
    columns = [flat(there.apply((), unit(i))[0]) for i in range(NUMBERS)]
    rows = [flat(back.apply(shaped(e), mech.After())[0]) for e in np.eye(size, dtype=np.float32)]
    return np.array(columns).T, np.array(rows).T


def numpy_run(pair, rounds, wrong=False):
    """FedAvg with the noise of a release in fewer coordinates, round by round."""
    plan = plan_of(chain_of(pair))
    fed, noise = plan.fed, run_noise_key(jfl.init(KEY, plan))
    w = flat(start_params())
    for r in range(rounds):
        there, back = matrices(pair, 0 if wrong else r)
        total = 0
        for c in range(CLIENTS):
            rows = np.asarray(fed.index[c][: fed.size[c]])
            x, y = np.asarray(fed.x)[rows], np.asarray(fed.y)[rows]
            v = w
            for _ in range(2):
                gap = v[0] + x @ v[1:] - y
                v = v - 0.1 * np.concatenate([[gap.mean()], (gap[:, None] * x).mean(0)])
            total = total + clip(there @ (v - w), 0.5)
        drawn = normals(stream_key(noise, Stream.RELEASE, r), jnp.zeros(len(there)))
        # replace_one: twice the clip norm
        w = w + back @ (total + 1.0 * np.asarray(drawn)) / CLIENTS
    return w


@pytest.mark.by_default("projection", "rotation", "own")
@pytest.mark.parametrize("name", MAPS)
def test_equals_a_numpy_loop(name):
    pair = MAPS[name]()
    out = jfl.simulate(KEY, plan_of(chain_of(pair)), 3)
    np.testing.assert_allclose(flat(out.params), numpy_run(pair, 3), atol=2e-5)
    assert np.abs(flat(out.params) - numpy_run(pair, 3, wrong=True)).max() > 1e-3
    fixed = MAPS[name](each_round=False)
    np.testing.assert_array_equal(matrices(fixed, 0)[0], matrices(fixed, 5)[0])


@pytest.mark.parametrize("name", MAPS)
def test_the_way_back_is_the_adjoint(name):
    for r in range(5):
        there, back = matrices(MAPS[name](), r)
        np.testing.assert_allclose(there.T, back, atol=1e-6)
        if name in ("rotation", "own"):
            np.testing.assert_allclose(back @ there, np.eye(NUMBERS), atol=1e-6)


@pytest.mark.parametrize("name", ["projection", "sparsification"])
def test_there_and_back_is_unbiased(name):
    """Means over 2,000 rounds, within 5 standard deviations (a false alarm in 1 of 100,000 seeds);
    without the scale they would not be."""
    chain = jfl.chain(MAPS[name]().there, jfl.clip_l2(1.0), jfl.total(), MAPS[name]().back)
    vector = jax.tree.map(jnp.ones_like, start_params())

    @jax.jit
    @jax.vmap
    def both(round_):
        there, _, _, back = mech.at_round(chain, round_).stages
        value = back.apply(there.apply((), vector)[0], mech.After())[0]
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(value)])

    each = np.asarray(both(jnp.arange(2000)))
    error = each.std(0) / np.sqrt(len(each))
    assert (np.abs(each.mean(0) - 1) < 5 * error).all()
    kept = dict(projection=3, sparsification=2)[name] / NUMBERS
    assert (np.abs(kept * each.mean(0) - 1) > 5 * error).all()


def test_a_map_changes_no_epsilon_whatever_it_does():
    far = jfl.linear_maps.linear_map(
        lambda key, v: jax.tree.map(lambda x: 1e6 * x, v), lambda key, v: v
    )
    plain = jfl.guarantee(
        plan_of(
            jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0), jfl.divide(CLIENTS)),
        ),
        5,
    )
    for pair in (far, *(make() for make in MAPS.values())):
        found = jfl.guarantee(plan_of(chain_of(pair)), 5)
        assert (found.epsilon, found.status) == (plain.epsilon, "proved")
    rows = jnp.ones((1, 4))
    ones = jax.tree.map(lambda x: jnp.ones((1, *x.shape)), start_params())
    part = mech.clip_and_sum(mech.at_round(chain_of(far), jnp.int32(0)), (), ones, rows[0, :1])
    assert np.linalg.norm(flat(part.value)) <= 0.5 * (1 + 1e-6)


def test_of_examples_too():
    chain = chain_of(MAPS["projection"](), divisor=4)
    private = plan_of(grad=jfl.private_grad(squared, chain))
    plain = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0), jfl.divide(4))
    found, other = (
        jfl.guarantee(p, 5) for p in (private, plan_of(grad=jfl.private_grad(squared, plain)))
    )
    assert (found.epsilon, found.status, found.unit) == (other.epsilon, "proved", "example")
    assert jfl.check_privacy(private).status == "proved"
    assert np.isfinite(flat(jfl.simulate(KEY, private, 2).params)).all()


HELD = np.asarray(make_federation().x)
PLAIN = (jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0))


def look(value):
    return jax.tree.map(lambda v: v + 1e-9 * jnp.asarray(HELD).sum(), value)


def loud(round_):
    return 1.0 + 1e-9 * jnp.asarray(HELD).sum()


def _plus(rows, value):
    return value + 1e-9 * rows.sum()


def mapped(forward, backward):
    there, back = jfl.linear_maps.linear_map(forward, backward)
    return jfl.chain(there, *PLAIN, back)


# chains with a function of a user's that holds rows of the federation
HOLDERS = {
    "there": lambda: mapped(lambda k, v: look(v), lambda k, v: v),
    "back": lambda: mapped(lambda k, v: v, lambda k, v: look(v)),
    "behind a projection": lambda: jfl.chain(
        MAPS["projection"]().there, *PLAIN, jfl.post_process(look), MAPS["projection"]().back
    ),
    "post_process": lambda: jfl.chain(*PLAIN, jfl.post_process(look)),
    "clip norm": lambda: jfl.chain(jfl.clip_l2(loud), *PLAIN[1:]),
    "noise": lambda: jfl.chain(*PLAIN[:2], jfl.gaussian(loud)),
    "partial": lambda: jfl.chain(
        *PLAIN,
        jfl.post_process(
            functools.partial(jax.tree.map, functools.partial(_plus, jnp.asarray(HELD)))
        ),
    ),
}


@pytest.mark.parametrize("where", HOLDERS)
@pytest.mark.parametrize("level", ["client", "example"])
def test_functions_that_hold_rows_are_refused(where, level):
    chain = HOLDERS[where]()
    of_level = dict(release=chain) if level == "client" else {}
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        plan_of(**of_level or dict(grad=jfl.private_grad(squared, chain)))


def test_a_partial_of_rows_is_refused_though_the_function_is_a_librarys():
    direct = jfl.post_process(functools.partial(jnp.add, jnp.asarray(HELD)))
    task = jfl.task(jnp.zeros(HELD.shape), lambda w, x, y: (w.mean() * x.sum() - y) ** 2)
    fedavg = jfl.algorithms.fedavg(jfl.grad(task.loss), lr=0.1, steps=1, batch=jfl.batches.full())
    release = jfl.chain(*PLAIN, direct)
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        jfl.plan(make_federation(), task, fedavg, jfl.sampling.full(CLIENTS), release=release)


def test_chains_that_a_client_does_not_declare_are_looked_at():
    chain = jfl.chain(*PLAIN[:2], jfl.divide(4.0), jfl.post_process(look))
    algorithm = jfl.algorithms.output_perturbation(
        jfl.private_grad(squared, chain),
        jfl.chain(*PLAIN),
        lr=0.1,
        steps=1,
        batch=jfl.batches.full(),
    )
    with pytest.raises(ValueError, match="functions that receive rows as arguments"):
        jfl.plan(make_federation(), TASK, algorithm, jfl.sampling.full(CLIENTS))


def summed(value):
    return jax.tree.map(jnp.sum, value)


def back_to_sums(key, value):
    return summed(turned_back(key, value))


OTHER_SHAPES = dict(
    release=lambda: plan_of(chain_of(jfl.linear_maps.linear_map(turned, back_to_sums))),
    upload=lambda: plan_of(
        upload=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.post_process(summed))
    ),
    step=lambda: plan_of(
        grad=jfl.private_grad(squared, chain_of(jfl.linear_maps.linear_map(turned, back_to_sums)))
    ),
)


def back_to_one(key, value):
    """The second of two trees that are released as sums: a control variate, or a gradient."""
    first, second = value
    return type(value)(first, summed(second))


@pytest.mark.parametrize("stage", OTHER_SHAPES)
def test_a_release_in_other_shapes_does_not_broadcast(stage):
    """One number for many would be added to all of them."""
    with pytest.raises(ValueError, match=r"expected one shape of w, but got \(.*\) and \(.*\)\."):
        jfl.simulate(KEY, OTHER_SHAPES[stage](), 2)


@pytest.mark.parametrize("name", ["feddyn", "padpfl", "scaffold", "mimelite"])
def test_of_what_servers_add_to_their_own_states_too(name):
    back = back_to_one if name in ("scaffold", "mimelite") else lambda key, value: summed(value)
    pair = jfl.linear_maps.linear_map(lambda key, value: value, back)
    algorithm = getattr(jfl.algorithms, name)(
        jfl.grad(squared), lr=0.1, steps=2, batch=jfl.batches.full()
    )
    plan = jfl.plan(
        make_federation(),
        TASK,
        algorithm,
        jfl.sampling.full(CLIENTS),
        release=chain_of(pair),
    )
    with pytest.raises(ValueError, match=r"expected one shape of w, but got \(.*\) and \(.*\)\."):
        jfl.simulate(KEY, plan, 2)


def test_a_public_key_is_of_no_stream():
    data = lambda key: jax.random.key_data(key).tolist()
    for seed in range(7):
        mine = data(linear_maps._key(seed, 1))
        assert mine not in [
            data(stream_key(jax.random.key(0), s, r)) for s in range(7) for r in (0, 1)
        ]


def test_what_a_stage_hides_is_not_proved():
    """A callback may answer with anything."""
    shape = lambda v: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), v)
    ask = lambda key, v: jax.pure_callback(lambda x: x, shape(v), v, vmap_method="sequential")
    pair = jfl.linear_maps.linear_map(ask, lambda key, v: v)
    for plan in (
        plan_of(chain_of(pair)),
        plan_of(grad=jfl.private_grad(squared, chain_of(pair, divisor=4))),
    ):
        found = jfl.guarantee(plan, 2)
        assert found.status == "conditional"
        assert any("pure_callback in the stage 'linear_map'" in str(c) for c in found.caveats)


@pytest.mark.slow
def test_in_chunks_resumed_and_swept():
    release = chain_of(MAPS["projection"]())
    whole = jfl.simulate(KEY, plan_of(release), 4).params
    chunks = jfl.simulate(KEY, plan_of(release, chunk=2), 4).params
    np.testing.assert_allclose(flat(chunks), flat(whole), atol=1e-6)
    begun = jfl.simulate(KEY, plan_of(release), 2)
    rest = jfl.simulate(KEY, plan_of(release), 2, start=begun.run).params
    np.testing.assert_array_equal(flat(rest), flat(whole))
    make = lambda z: plan_of(chain_of(MAPS["projection"](), z=z))
    swept = jfl.sweep(make, z=[1.0, 2.0], seed=[3], rounds=4)
    np.testing.assert_allclose(flat(swept.params[0]), flat(whole), atol=1e-6)


def test_an_adaptive_clip_follows_a_map():
    pair = MAPS["projection"]()
    release = chain_of(pair, jfl.clip_adaptive(0.5, CLIENTS))
    plan = plan_of(release)
    out = jfl.simulate(KEY, plan, 3)
    assert np.isfinite(flat(out.params)).all()
    assert jfl.guarantee(plan, 3).status == "proved"


def test_audits_say_that_they_take_no_maps():
    with pytest.raises(NotAnalysable, match="copies of the parameters"):
        jfl.audit(plan_of(chain_of(MAPS["projection"]())), 3, trials=400, delta=0.01)


def test_bad_arguments():
    pair = MAPS["projection"]()
    for stages in (
        (jfl.clip_l2(1.0), pair.there, jfl.total(), jfl.gaussian(1.0)),
        (pair.there, jfl.total(), jfl.gaussian(1.0)),
        (jfl.clip_l2(1.0), pair.there, jfl.total()),
    ):
        with pytest.raises(ValueError, match="a clip after the last map"):
            jfl.chain(*stages)
    other = jfl.linear_maps.projection(TASK, 3, seed=1)
    for stages in ((pair.there, other.back), (pair.there,), (pair.there, pair.back, pair.back)):
        halves = stages[:1], stages[1:]
        chain = jfl.chain(*halves[0], jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), *halves[1])
        with pytest.raises(ValueError, match="both stages of"):
            plan_of(chain)
        with pytest.raises(ValueError, match="both stages of"):
            plan_of(grad=jfl.private_grad(squared, chain))
    for make, words in (
        (lambda: jfl.linear_maps.projection(TASK, 5), "size <= 4"),
        (lambda: jfl.linear_maps.projection(TASK, 0), "size"),
        (lambda: jfl.linear_maps.rotation(()), "like=task"),
        (lambda: jfl.linear_maps.rotation(TASK, seed=-1), "seed"),
        (lambda: jfl.linear_maps.linear_map(3, lambda k, v: v), "forward, a plain function"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    other = jfl.linear_maps.rotation(jnp.zeros(7))
    with pytest.raises(ValueError, match="contributions like like="):
        jfl.simulate(KEY, plan_of(chain_of(other)), 1)
