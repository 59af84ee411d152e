"""The check of paths from rows to payloads: what jfl makes passes, and each way of cheating that is
listed here is seen."""

import contextlib
import dataclasses
import functools
import importlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.problems import (
    CLIENTS,
    make_algorithm,
    make_federation,
    noisy_grad,
    noisy_release,
    squared,
    start_params,
)
from jax.experimental import buffer_callback
from jfl.kernels.normals import normals

import jfl
from jfl.core import pytrees
from jfl.core.records import Diagnostics, Fn, Keys, Release, code_of
from jfl.local import training
from jfl.privacy import calibration, guarantees
from jfl.privacy.mechanisms import chain as mech
from jfl.privacy.mechanisms import correlated, stages
from jfl.privacy.mechanisms.stages import Stage
from jfl.sampling import batches
from jfl.verify import check, marks, trust
from jfl.verify import client as client_checks
from jfl.verify import client as traced

STEPS = 2
FULL = jfl.sampling.full(CLIENTS)
NOTHING = Diagnostics(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))


def chained(**options):
    return jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1), jfl.divide(3.0), **options)


def work(loss=squared, batch=None, steps=STEPS, **options):
    return training.work(
        jfl.private_grad(loss, chained(), **options),
        batch or batches.without_replacement(3),
        lr=0.1,
        steps=steps,
    )


def init(params, *, step):
    return step.init(params), ()


def serve(ctx, server, diff, *, step):
    return step(ctx, server, diff)


def build(
    client, times=1, own=None, releases=None, wanted=None, stateful=False, task=None, **options
):
    """A plan of a client of the user's own, around the parts of FedAvg."""
    wanted, step = wanted or work(**options), dict(step=training.server_step(1.0))
    begin = init if own is None else (lambda params, *, step: (step.init(params), own))
    algorithm = jfl.algorithm(
        Fn(begin, step),
        Fn(client, dict(work=wanted)),
        Fn(serve, step),
        stateful=stateful,
        releases=wanted.releases() * times if releases is None else releases,
        name="mine",
    )
    return jfl.plan(make_federation(), task or jfl.task(start_params(), squared), algorithm, FULL)


def private_plan(fed, task, loss=squared, mechanism=None, **options):
    """A plan of FedAvg with private gradients of a loss; options are of the algorithm."""
    grad = jfl.private_grad(loss, mechanism or chained())
    return jfl.plan(fed, task, make_algorithm("fedavg", grad, **options), FULL)


def diff_of(work, ctx, keys, server, rows):
    trained, _, _, seen = training.train(work, ctx, keys, server.params, rows)
    return pytrees.sub(trained, server.params), seen


def verdict(plan):
    """(status, caveats) of the guarantee, and the report, which must agree."""
    found, report = jfl.guarantee(plan, 3), jfl.check_privacy(plan)
    assert (found.status == "proved") == (report.status == "proved"), report
    assert ("could not be followed" in str(report)) is False, report
    assert all(g.status == found.status for g in jfl.guarantees(plan, 3) if g.unit == found.unit)
    return found, report


def caught(plan, pattern):
    found, report = verdict(plan)
    assert found.status == "conditional" and check.DECLARED in found.caveats
    assert re.search(pattern, "\n".join(found.caveats)), report
    assert re.search(pattern, str(report))


# --- what jfl makes


def no_noise(grad):
    return jfl.private_grad(grad.loss, jfl.chain(jfl.clip_l2(0.8), jfl.total()))


@pytest.mark.parametrize("kind", ["noise", "none", "client"])
@pytest.mark.parametrize("name", jfl.algorithms.__all__)
def test_built_in_algorithms(name, kind, fed, task):
    grad = noisy_grad() if kind == "noise" else jfl.grad(squared)
    plan = jfl.plan(
        fed,
        task,
        make_algorithm(name, grad),
        FULL,
        release=noisy_release() if kind == "client" else None,
    )
    report = jfl.check_privacy(plan)
    assert report.status == dict(noise="proved", none="no noise", client="proved")[kind], report
    # of some the releases do not follow from the steps: they are traced like a user's
    many = name in ("mimelite", "pfedme", "fedsam", "qfedavg")
    assert trust.is_trusted(plan) != many and not report.client
    if kind == "noise":
        assert not report.example and sum(r.times for r in report.releases) == sum(
            r.times for r in report.declared
        )
    else:  # without noise rows do reach the payload, and the check says so
        assert any("payload" in f and "rows" in f for f in report.example), report


def test_algorithms_with_options(fed, task):
    """Noise once on top of noise in the steps, a bound that is asserted, means of models, shares of
    energy."""
    few, prox = (
        batches.without_replacement(3),
        jfl.chain(jfl.bounded(0.5, "prox_erm"), jfl.total(), jfl.gaussian(1.0)),
    )
    haar, whole = (
        jfl.bands.flat(start_params()),
        jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0)),
    )
    a = jfl.algorithms
    made = dict(
        clipped=a.output_perturbation(no_noise(noisy_grad()), whole, steps=2, batch=few, mu=0.1),
        epochs=a.output_perturbation(jfl.grad(squared), whole, steps=2, batch=batches.epochs(3)),
        averaged=importlib.import_module("jfl.algorithms.iterate_averaging").averaged(
            make_algorithm("scaffold", noisy_grad())
        ),
        energies=importlib.import_module("jfl.algorithms.band_energies").band_energies(
            squared, haar, noise_multiplier=1.0, batch=few
        ),
        prox=a.padpfl(jfl.grad(squared), batch=few, steps=2, mechanism=prox, inexactness=0.9),
        both=a.padpfl(noisy_grad(), batch=few, steps=2, mechanism=whole),
    )
    for name, algorithm in made.items():
        plan = jfl.plan(fed, task, algorithm, FULL)
        report = jfl.check_privacy(plan)
        assert report.status == "proved" and trust.is_trusted(plan) and report.releases, (
            name,
            str(report),
        )
        assert jfl.guarantee(plan, 3).status == ("conditional" if name == "prox" else "proved")
    last = jfl.check_privacy(
        jfl.plan(
            fed,
            task,
            a.output_perturbation(jfl.grad(squared), whole, batch=few, clip_steps="last"),
            FULL,
        )
    )
    assert last.status == "no noise" and any(
        "no row stage of its chain bounds" in f for f in last.example
    )


BATCHES = dict(
    full=batches.full(),
    with_=batches.with_replacement(2),
    epochs=batches.epochs(3),
    poisson=batches.poisson(3.0),
    rate=batches.poisson(rate=0.6, capacity=9),
    short=batches.without_replacement(5, short="all"),
    many=batches.without_replacement(70, short="all"),
)


OPTIONS = [(name, {}) for name in BATCHES] + [
    ("full", o) for o in (dict(microbatch=2), dict(path="vmap"), dict(compute="bfloat16", l2=0.1))
]


@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_every_batch_sampler_and_gradient_path(name, options):
    """Of a client of the user's own, so that the verdict is the trace's."""
    report = verdict(build(fedavg_client, batch=BATCHES[name], **options))[1]
    assert report.status == "proved" and report.releases[0].times == STEPS, report


def calming(round_):
    return 1.1 * 0.8**round_


@pytest.mark.by_default("schedule", "per_layer", "shape", "key", "std")
@pytest.mark.parametrize("stage", ["schedule", "levels", "per_layer", "shape", "key", "std"])
def test_every_kind_of_noise(stage):
    shape = jfl.wavelet.ellipsoid(jfl.bands.flat(start_params()))
    clip, noise = dict(
        schedule=(jfl.clip_l2(calming), jfl.gaussian(calming)),
        levels=(jfl.clip_l2(1.0), jfl.gaussian(jnp.arange(1.0, 8.0))),
        per_layer=(jfl.clip_per_layer((1.0, 2.0)), jfl.gaussian(1.0)),
        std=(jfl.clip_l2(1.0), jfl.gaussian(std=2.0)),
        shape=(jfl.wavelet.clip_ellipsoid(1.0, shape), jfl.gaussian(1.0, shape=shape)),
        key=(jfl.clip_l2(1.0), jfl.gaussian(1.0, generator="key")),
    )[stage]
    grad = jfl.private_grad(squared, jfl.chain(clip, jfl.total(), noise, jfl.divide(3.0)))
    plan = build(
        fedavg_client,
        wanted=training.work(grad, batches.without_replacement(3), lr=0.1, steps=STEPS),
    )
    assert verdict(plan)[1].status == "proved"
    segments = [(plan, 3, 0), (plan, 3, 3)]
    assert jfl.guarantee(segments).status == "proved"


# --- what users write, and passes


def fedavg_client(ctx, keys, server, own, rows, *, work):
    trained, _, _, seen = training.train(work, ctx, keys, server.params, rows)
    return pytrees.sub(trained, server.params), own, seen


def pulled_client(ctx, keys, server, own, rows, *, work):
    pull = lambda g, w, s: pytrees.axpy(0.1, pytrees.sub(w, server.params), g)
    trained, _, _, seen = training.train(work, ctx, keys, server.params, rows, pull)
    return (
        pytrees.scale(rows.size / 5, pytrees.sub(trained, server.params)),
        own,
        seen,
    )  # sizes are public


def twice_client(ctx, keys, server, own, rows, *, work):
    """Two trainings with keys of their own."""
    apart = lambda i: Keys(jax.random.fold_in(keys.batch, i), jax.random.fold_in(keys.noise, i))
    first, seen = diff_of(work, ctx, apart(0), server, rows)
    second, _ = diff_of(work, ctx, apart(1), server, rows)
    return pytrees.sub(first, second), own, seen


def split_client(ctx, keys, server, own, rows, *, work):
    """The same, by split, one after another in a loop that hands a key on."""

    def one(carry, _):
        batch, noise, w = carry
        batch, drawn = jax.random.split(batch)
        noise, added = jax.random.split(noise)
        w, _, _, seen = training.train(work, ctx, Keys(drawn, added), w, rows)
        return (batch, noise, w), seen

    (_, _, w), seen = jax.lax.scan(one, (keys.batch, keys.noise, server.params), length=3)
    return pytrees.sub(w, server.params), own, jax.tree.map(lambda x: x[0], seen)


def by_hand_client(ctx, keys, server, own, rows, *, work):
    """One private gradient without `local.train`."""
    at, mask, overflow = batches.draw_slots(
        work.batches, keys.batch, 0, rows.size, rows.index.shape[0]
    )
    g, (loss, clipped) = work.grad(keys.noise, server.params, batches.gather(rows, at, mask), ctx)
    return g, own, Diagnostics(loss, clipped, overflow)


def loop_client(ctx, keys, server, own, rows, *, work):
    """Steps of one's own in a fori_loop, in a jit, behind a cond that only reads the round."""

    @jax.jit
    def step(s, w):
        at, mask, _ = batches.draw_slots(
            work.batches, keys.batch, s, rows.size, rows.index.shape[0]
        )
        g, _ = work.grad(
            jax.random.fold_in(keys.noise, 3 + s), w, batches.gather(rows, at, mask), ctx
        )
        return pytrees.axpy(-0.1, g, w)

    w = jax.lax.fori_loop(0, STEPS, step, server.params)
    return (
        jax.lax.cond(
            ctx.round < 3, lambda: pytrees.sub(w, server.params), lambda: pytrees.zeros_like(w)
        ),
        own,
        NOTHING,
    )


def remembering_client(ctx, keys, server, own, rows, *, work):
    """What is kept may be data, as long as it stays."""
    moved, seen = diff_of(work, ctx, keys, server, rows)
    everything = batches.gather(
        rows, jnp.arange(rows.index.shape[0]), jnp.arange(rows.index.shape[0]) < rows.size
    )
    return pytrees.add(moved, own["noisy"]), dict(noisy=moved, kept=everything.y.sum()), seen


def bare_adversary(w, x, y):
    """Uses whatever is in scope, and none of it is data."""
    return squared(w, x, y) + 0.0 * PUBLIC[0]


PUBLIC = np.linspace(0.0, 1.0, 30, dtype=np.float32)


def whole_release():
    return (Release(chained(adjacency="replace_one"), batches.without_replacement(3), 1, STEPS),)


def whole_work():
    grad = jfl.private_grad(squared, chained(adjacency="replace_one"))
    return training.work(grad, batches.without_replacement(3), lr=0.1, steps=STEPS)


def whole(client, **options):
    return build(client, wanted=whole_work(), releases=whole_release(), **options)


FINE = dict(
    fedavg=lambda: build(fedavg_client),
    pulled=lambda: build(pulled_client),
    twice=lambda: build(twice_client, 2),
    in_a_loop=lambda: build(split_client, 3),
    more_declared=lambda: build(fedavg_client, 2),
    by_hand=lambda: build(by_hand_client, steps=1),
    own_loop=lambda: build(loop_client),
    whole=lambda: whole(release_with(1.0)),
    remembers=lambda: build(
        remembering_client,
        own=dict(noisy=pytrees.zeros_like(start_params()), kept=jnp.zeros(())),
        stateful=True,
    ),
    loss=lambda: build(fedavg_client, loss=bare_adversary),
    averaged=lambda: jfl.plan(
        make_federation(),
        jfl.task(start_params(), squared),
        importlib.import_module("jfl.algorithms.iterate_averaging").averaged(
            build(fedavg_client).algorithm
        ),
        FULL,
    ),
)


@pytest.mark.parametrize("name", FINE)
def test_what_users_write_passes(name):
    found, report = verdict(FINE[name]())
    assert found.status == "proved" and check.DECLARED not in found.caveats, report
    assert not trust.is_trusted(FINE[name]())


def test_a_users_flax_module_and_loss():
    from flax import linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.relu(nn.Dense(4)(x)))[0]

    net = Net()
    loss = lambda params, x, y: (net.apply(params, x) - y) ** 2
    task = jfl.task(lambda key: net.init(key, jnp.zeros(3)), loss)
    own = build(fedavg_client, loss=loss, task=task)
    jfls = private_plan(make_federation(), task, loss, batch=batches.without_replacement(3))
    assert trust.is_trusted(jfls)  # an ordinary user pays no trace of the client
    assert all(verdict(plan)[0].status == "proved" for plan in (own, jfls))


# --- what leaks


def _mine(rows):
    every = jnp.arange(rows.index.shape[0])
    return batches.gather(rows, every, every < rows.size)


def sends(leak):
    """A client that trains in private and adds `leak` to what it sends."""

    def client(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(work, ctx, keys, server, rows)
        more = leak(ctx=ctx, keys=keys, own=own, rows=rows, work=work, moved=moved, server=server)
        more = more if isinstance(more, dict) else dict(b=more)
        return {k: v + more[k] if k in more else v for k, v in moved.items()}, own, seen

    return client


def trains(change):
    """A client that trains in private, but with another work, keys, model or rows."""

    def client(ctx, keys, server, own, rows, *, work):
        given = dict(work=work, ctx=ctx, keys=keys, server=server, rows=rows)
        moved, seen = diff_of(**{**given, **change(**given)})
        return moved, own, seen

    return client


def steps_of(noise_key=lambda key, s: jax.random.fold_in(key, s), batch_of=None):
    """A client with private steps written by hand."""

    def client(ctx, keys, server, own, rows, *, work):
        def step(w, s):
            at, mask, _ = batches.draw_slots(
                work.batches, keys.batch, s, rows.size, len(rows.index)
            )
            batch = (batch_of or batches.gather)(rows, at, mask)
            return pytrees.axpy(-0.1, work.grad(noise_key(keys.noise, s), w, batch, ctx)[0], w), ()

        w, _ = jax.lax.scan(step, server.params, jnp.arange(STEPS))
        return pytrees.sub(w, server.params), own, NOTHING

    return client


def twice(keys_of, other=lambda work: work):
    """A client that sends the difference of two trainings with these keys."""

    def client(ctx, keys, server, own, rows, *, work):
        first, seen = diff_of(work, ctx, keys_of(keys, 0), server, rows)
        second, _ = diff_of(other(work), ctx, keys_of(keys, 1), server, rows)
        return pytrees.sub(first, second), own, seen

    return client


def first_gradient(release):
    """A client that sends one release, of the batch of its first step."""

    def client(ctx, keys, server, own, rows, *, work):
        at, mask, _ = batches.draw_slots(
            work.batches, keys.batch, 0, rows.size, rows.index.shape[0]
        )
        return release(work, ctx, keys, server.params, batches.gather(rows, at, mask)), own, NOTHING

    return client


def contributes(release):
    """A client that sends one release of its whole update, trained without noise."""

    def client(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(bare(work), ctx, keys, server, rows)
        alone = pytrees.map(lambda x: x[None], moved)
        return release(work.grad.mechanism, keys.noise, alone), own, seen

    return client


def bare(work):
    return dataclasses.replace(work, grad=jfl.grad(squared))


def split_alike(keys, i):
    """For the usual generator child i of a split is fold_in of i."""
    noise = jax.random.fold_in(keys.noise, 1) if i else jax.random.split(keys.noise, 3)[1]
    return Keys(jax.random.fold_in(keys.batch, i), noise)


def other_chain(work, **_):
    """Declared with one noise, run with less of it."""
    chain = work.grad.mechanism
    less = [
        dataclasses.replace(s, noise=s.noise * 0.1) if s.role == "noise" else s
        for s in chain.stages
    ]
    chain = dataclasses.replace(chain, stages=tuple(less))
    return dict(
        work=dataclasses.replace(work, grad=dataclasses.replace(work.grad, mechanism=chain))
    )


def of_the_whole_batch(work, rows, **_):
    """A loss of one example that knows the mean of all of them."""
    mean = _mine(rows).x.mean(0)
    loss = lambda w, x, y: squared(w, x - mean, y)
    grad = jfl.private_grad(loss, work.grad.mechanism)
    return dict(work=dataclasses.replace(work, grad=grad))


@jax.custom_batching.custom_vmap
def mixed(x):
    return x


@mixed.def_vmap
def _(size, batched, x):
    return jnp.broadcast_to(x.sum(0), x.shape), True


def loss_that_mixes_rows(w, x, y):
    return squared(w, jax.lax.stop_gradient(mixed(x)), y)


def by_a_loss_that_mixes_rows(work, **_):
    """A vmap of this loss adds up the rows and leaves no trace of that in the program."""
    grad = jfl.private_grad(loss_that_mixes_rows, work.grad.mechanism)
    return dict(work=dataclasses.replace(work, grad=grad))


@jax.jit
def _mixed_gradient(chain, key, params, batch, ctx):
    return jfl.private_grad(loss_that_mixes_rows, chain)(key, params, batch, ctx)[0]


def by_a_mixed_loss_within_jit(work, ctx, keys, params, batch):
    return _mixed_gradient(work.grad.mechanism, keys.noise, params, batch, ctx)


def after_the_last_loss(ctx, keys, server, own, rows, *, work):
    """Gradients at a model that holds the loss of the batch before, which has no noise."""

    def step(carry, s):
        w, total = carry
        at, mask, _ = batches.draw_slots(
            work.batches, keys.batch, s, rows.size, rows.index.shape[0]
        )
        batch = batches.gather(rows, at, mask)
        g, (loss, _) = work.grad(jax.random.fold_in(keys.noise, s), w, batch, ctx)
        return (pytrees.map(lambda x: x + loss, w), pytrees.add(total, g)), None

    start = server.params, pytrees.zeros_like(server.params)
    return jax.lax.scan(step, start, jnp.arange(STEPS))[0][1], own, NOTHING


def of_a_bare_start(ctx, keys, server, rows, work):
    """Private gradients at a model that was trained on the rows."""
    trained = training.train(bare(work), ctx, keys, server.params, rows)[0]
    return dict(server=dataclasses.replace(server, params=trained))


def by_carry(rows, **_):
    step = lambda carry, _: ((carry[0] * 0.9, carry[0]), None)
    return jax.lax.scan(step, (_mine(rows).y.sum(), jnp.zeros(())), length=4)[0][1]


def by_while(rows, **_):
    largest = jnp.abs(_mine(rows).y).max()
    more = lambda c: (c[0] + 1, c[1] + 0.1)
    return jax.lax.while_loop(lambda c: c[1] < largest, more, (0, jnp.zeros(())))[0]


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
SOME = np.arange(3, dtype=np.float32)


def by_callback(ctx, **_):
    return jax.pure_callback(lambda r: np.float32(0), NUMBER, ctx.round)


def by_callback_beside_an_array(ctx, **_):
    within = jax.jit(lambda r: jax.pure_callback(lambda _: np.float32(0), NUMBER, r) * SOME.sum())
    return jax.jit(lambda r: within(r) * jnp.asarray(SOME).sum())(ctx.round)


def by_buffer_callback(ctx, **_):
    return buffer_callback.buffer_callback(lambda _, out, *inputs: None, NUMBER)(ctx.round)


def by_callback_in_a_solve(ctx, **_):
    solve = lambda _, right: jax.pure_callback(lambda v: np.float32(v), NUMBER, right)
    right = ctx.round.astype(jnp.float32)
    return jax.lax.custom_linear_solve(lambda v: 2 * v, right, solve, symmetric=True)


def who_was_drawn(work, keys, rows, **_):
    return batches.draw_slots(work.batches, keys.batch, 0, rows.size, rows.index.shape[0])[0].sum()


def after_the_noise(work, ctx, keys, server, rows, moved, **_):
    """payload = release + raw - release."""
    return pytrees.sub(diff_of(bare(work), ctx, keys, server, rows)[0], moved)


def through_memory(ctx, keys, server, own, rows, *, work):
    moved, seen = diff_of(work, ctx, keys, server, rows)
    return dict(moved, w=moved["w"] + own["held"]), dict(held=_mine(rows).x.sum(0)), seen


def equal_keys_by_a_cast(ctx, keys, server, own, rows, *, work):
    """Two gradients with one noise key: XLA converts 3e9 to the largest integer, NumPy does not."""
    largest = jnp.asarray(np.array([3e9, 1.0], np.float32))[0].astype(jnp.int32)
    one, other = (
        work.grad(jax.random.fold_in(keys.noise, number), server.params, batch, ctx)[0]
        for number, batch in zip(
            (largest, jnp.int32(2**31 - 1)), (_batch(work, keys, rows, s) for s in (0, 1))
        )
    )
    return pytrees.sub(one, other), own, NOTHING


def _batch(work, keys, rows, step, key=None):
    at, mask, _ = batches.draw_slots(
        work.batches, keys.batch if key is None else key, step, rows.size, rows.index.shape[0]
    )
    return batches.gather(rows, at, mask)


def step_by_data(ctx, keys, server, own, rows, *, work):
    """The batch with the largest label: its amplification does not hold."""
    best = jnp.argmax(jnp.array([_batch(work, keys, rows, s).y.max() for s in range(4)]))
    batch = _batch(work, keys, rows, best)
    return work.grad(keys.noise, server.params, batch, ctx)[0], own, NOTHING


def key_by_data(ctx, keys, server, own, rows, *, work):
    key = jax.random.fold_in(keys.batch, _mine(rows).y.argmax())
    batch = _batch(work, keys, rows, 0, key)
    return work.grad(keys.noise, server.params, batch, ctx)[0], own, NOTHING


def one_row_in_all_slots(ctx, keys, server, own, rows, *, work):
    at = jnp.zeros(rows.index.shape[0], jnp.int32)
    batch = batches.gather(rows, at, at < rows.size)
    return work.grad(keys.noise, server.params, batch, ctx)[0], own, NOTHING


def a_key_for_later(ctx, keys, server, own, rows, *, work):
    """Takes this round's noise away in the next, when the server has the release."""
    moved, seen = diff_of(work, ctx, keys, server, rows)
    late = jax.random.normal(jax.random.fold_in(own["key"], 0))
    return dict(moved, b=moved["b"] - late), dict(key=keys.noise), seen


def its_own_noise_away(work, ctx, keys, params, batch):
    """Draws the noise once more, with the same key, and takes it away."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    return pytrees.sub(g, pytrees.scale(1.1 * 2 * 0.8 / 3, normals(keys.noise, g)))


def a_chosen_key(work, ctx, keys, params, batch):
    """The same, with a key that is the same in some rounds only."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    key = jnp.where(ctx.round > 3, keys.noise, jax.random.key(0))
    return dict(g, b=g["b"] - jax.random.normal(key))


CORRELATED = jfl.correlated(1.1 * 2 * 0.8 / 3, jfl.strategies.identity(3))


def its_noise_away_as_that_of_a_strategy(work, ctx, keys, params, batch):
    """The same, mixed by the functions of correlated noise."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    fresh = lambda index: normals(keys.noise, g)
    mixed, _ = correlated.mix(CORRELATED.strategy, fresh, jnp.int32(0), ())
    return pytrees.sub(g, pytrees.scale(CORRELATED.noise, mixed))


def its_noise_away_as_a_release(work, ctx, keys, params, batch):
    """The same, as a release of nothing whose correlated noise has the key of the gradient."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), CORRELATED, adjacency="zero_out")
    other_key, nothing = jax.random.fold_in(keys.noise, 9), pytrees.zeros_like(g)
    series = (lambda round_: keys.noise, jnp.int32(0))
    noise, _ = mech.release_sum(chain, other_key, (), nothing, series=series)
    return pytrees.sub(g, noise)


def unclipped(work, ctx, keys, params, batch):
    g = jfl.grad(squared)(None, params, batch, ctx)[0]
    return mech.release_sum(work.grad.mechanism, keys.noise, (), g)[0]


def of_a_tangent(work, ctx, keys, params, batch):
    """The derivative of a release has no noise."""
    release = lambda w: work.grad(keys.noise, w, batch, ctx)[0]
    return jax.jvp(release, (params,), (pytrees.map(jnp.ones_like, params),))[1]


def until_it_fits(ctx, keys, server, own, rows, *, work):
    """Releases until one is small: nobody can count them."""

    def again(carry):
        s, g = carry
        at, mask, _ = batches.draw_slots(
            work.batches, keys.batch, s, rows.size, rows.index.shape[0]
        )
        batch = batches.gather(rows, at, mask)
        return s + 1, work.grad(jax.random.fold_in(keys.noise, s), server.params, batch, ctx)[0]

    is_large = lambda c: (c[0] < 1) | (jnp.abs(c[1]["b"]) > 0.1)
    start = (0, pytrees.zeros_like(server.params))
    return jax.lax.while_loop(is_large, again, start)[1], own, NOTHING


def many_passes(ctx, keys, server, own, rows, *, work):
    again = lambda key, _: (jax.random.fold_in(key, 1), None)
    late = jax.lax.scan(again, keys.noise, length=20_000)[0]
    return *diff_of(work, ctx, Keys(keys.batch, late), server, rows)[:1], own, NOTHING


same_keys = lambda keys, i: keys
fold_noise = lambda keys, i: Keys(keys.batch, jax.random.fold_in(keys.noise, i))
faster = lambda work: dataclasses.replace(work, lr=jnp.float32(0.2))
RAW = r"rows reach what the client sends without noise|may be another client's"
FOREIGN = "may not be the client's own"
MUTANTS = dict(
    raw_rows=(
        sends(lambda rows, **_: dict(w=1e-6 * rows.x[rows.index].mean(0))),
        {},
        r"rows\.x -> gather -> .*payload\['w'\]",
    ),
    raw_labels=(
        sends(lambda rows, **_: _mine(rows).y.sum() / rows.size),
        {},
        r"rows -> .* -> add -> payload\['b'\]",
    ),
    one_key=(twice(same_keys, faster), dict(times=2), "two releases share one noise key"),
    one_draw=(twice(fold_noise), dict(times=2), "share one draw"),
    split_alike=(twice(split_alike), dict(times=2), "two releases share one noise key"),
    twice_declared_once=(twice_client, {}, "4 releases, 2 declared"),
    loop_declared_twice=(split_client, dict(times=2), "6 releases, 4 declared"),
    constant_key=(
        trains(lambda keys, **_: dict(keys=Keys(keys.batch, jax.random.key(0)))),
        {},
        "noise key does not come from keys.noise",
    ),
    same_in_every_step=(
        steps_of(lambda key, s: key),
        {},
        "iterations of a loop share one noise key",
    ),
    unclipped=(
        first_gradient(unclipped),
        dict(steps=1),
        "noise on a sum that no row stage of its chain bounds: rows -> ",
    ),
    memory=(
        through_memory,
        dict(own=dict(held=jnp.zeros(3)), stateful=True),
        r"rows -> .*own\['held'\] -> add -> payload\['w'\]",
    ),
    cond=(
        sends(lambda rows, **_: jax.lax.cond(_mine(rows).y.sum() > 0, lambda: 1.0, lambda: 0.0)),
        {},
        r"-> cond -> .*payload\['b'\]",
    ),
    carry=(sends(by_carry), {}, RAW),
    while_=(sends(by_while), {}, r"-> while -> .*payload\['b'\]"),
    index=(
        sends(lambda rows, **_: dict(w=jnp.eye(3)[jnp.argmax(_mine(rows).x.sum(0))])),
        {},
        "argmax",
    ),
    callback=(sends(by_callback), {}, "what pure_callback does"),
    callback_beside_an_array=(sends(by_callback_beside_an_array), {}, "what pure_callback does"),
    buffer_callback=(sends(by_buffer_callback), {}, "what buffer_callback does"),
    callback_in_a_solve=(sends(by_callback_in_a_solve), {}, "what custom_linear_solve does"),
    after_the_noise=(sends(after_the_noise), {}, RAW),
    noise_away=(
        first_gradient(its_own_noise_away),
        dict(steps=1),
        "reads the noise key of a release",
    ),
    noise_away_as_that_of_a_strategy=(
        first_gradient(its_noise_away_as_that_of_a_strategy),
        dict(steps=1),
        "reads the noise key of a release",
    ),
    noise_away_as_a_release=(
        first_gradient(its_noise_away_as_a_release),
        dict(steps=1),
        "noise on a sum that no row stage of its chain bounds",
    ),
    chosen_key=(first_gradient(a_chosen_key), dict(steps=1), "reads the noise key of a release"),
    whole_batch=(trains(of_the_whole_batch), {}, "rows reach the gradient of another row"),
    mixing_loss=(trains(by_a_loss_that_mixes_rows), {}, "what custom_vmap_call does"),
    mixing_loss_in_jit=(
        first_gradient(by_a_mixed_loss_within_jit),
        dict(steps=1),
        "what custom_vmap_call does",
    ),
    last_loss=(after_the_last_loss, {}, "rows reach the gradient of another row"),
    bare_start=(trains(of_a_bare_start), {}, "rows reach the gradient of another row"),
    other_batches=(
        steps_of(batch_of=lambda rows, at, mask: _mine(rows)),
        {},
        "this adjacency and these batches",
    ),
    one_row_often=(
        steps_of(batch_of=lambda rows, at, mask: batches.gather(rows, 0 * at, mask)),
        {},
        FOREIGN,
    ),
    who_was_drawn=(sends(who_was_drawn), {}, "which rows were drawn"),
    someone_elses=(
        trains(lambda rows, **_: dict(rows=rows._replace(index=rows.index[::-1] + 1))),
        {},
        FOREIGN,
    ),
    until_it_fits=(until_it_fits, dict(steps=1), "what while does"),
    raw_by_reduce=(
        sends(lambda rows, **_: jax.lax.reduce(_mine(rows).y, 0.0, lambda a, b: b, (0,))),
        {},
        RAW,
    ),
    step_by_data=(step_by_data, dict(steps=1), FOREIGN),
    key_by_data=(key_by_data, dict(steps=1), FOREIGN),
    one_row_in_all_slots=(
        one_row_in_all_slots,
        dict(steps=1, batch=batches.full()),
        FOREIGN,
    ),
    equal_keys_by_a_cast=(equal_keys_by_a_cast, dict(times=2, steps=1), r"a number\) and fold_in"),
    tangent=(first_gradient(of_a_tangent), dict(steps=1), RAW),
    other_chain=(trains(other_chain), {}, "no declared release has this chain"),
    key_for_later=(
        a_key_for_later,
        dict(own=dict(key=jax.random.key(0)), stateful=True),
        "a noise key outlives its round",
    ),
)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    client, options, pattern = MUTANTS[name]
    caught(build(client, **options), pattern)


def test_too_many_passes_are_not_followed():
    report = jfl.check_privacy(build(many_passes))
    assert report.status == "conditional"
    assert report.example == (
        "the client could not be followed: ValueError: its loops have more than 10,000 iterations",
    )


# --- the number of rows


def times_size(rows, moved, **_):
    return pytrees.map(lambda x: x * rows.size, moved)


def as_often_as_rows(ctx, moved, **_):
    more = lambda i, x: pytrees.map(lambda leaf: 1.5 * leaf, x)
    return jax.lax.fori_loop(0, ctx.size, more, moved)


def at_params_times_size(work, ctx, keys, params, batch):
    """One more row changes the gradients of all rows."""
    return work.grad(keys.noise, pytrees.map(lambda x: x * ctx.size, params), batch, ctx)[0]


def size_of_the_last_round(ctx, keys, server, own, rows, *, work):
    diff, seen = diff_of(work, ctx, keys, server, rows)
    sent = pytrees.map(lambda x: x * own["size"], diff)
    return sent, dict(size=rows.size * jnp.float32(1)), seen


SIZES = dict(
    times_size=(sends(times_size), {}),
    as_often_as_rows=(sends(as_often_as_rows), {}),
    at_params_times_size=(first_gradient(at_params_times_size), dict(steps=1)),
    size_of_the_last_round=(
        size_of_the_last_round,
        dict(own=dict(size=jnp.zeros(())), stateful=True),
    ),
)


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_rows_is_data_where_a_row_comes_or_goes(name):
    client, options = SIZES[name]
    caught(
        build(client, batch=batches.poisson(3.0), **options),
        r"rows\.size -> .*(payload|clipped sum)",
    )
    found, _ = verdict(build(client, batch=batches.without_replacement(3), **options))
    assert found.status == "proved" and found.adjacency == "replace_one"


@pytest.mark.parametrize("batch", [batches.poisson(3.0), batches.poisson(rate=0.4, capacity=40)])
def test_batches_may_follow_the_number_of_rows(batch):
    found, _ = verdict(build(fedavg_client, batch=batch))
    assert found.status == "proved" and found.adjacency == "add_remove"


# --- constants that a guarantee assumes to be public


def assumed(plan, **options):
    """What guarantees say of constants, which is their last caveat."""
    found = jfl.guarantee(plan, 2, **options)
    said = [i for i, c in enumerate(found.caveats) if code_of(c) == "public-constants"]
    assert said in ([], [len(found.caveats) - 1])
    return found.caveats[-1] if said else ""


SOMEBODYS = np.linspace(0.1, 0.9, 4).astype(np.float32)  # what it was made of nobody can say


ZEROS = jfl.task(jax.tree.map(jnp.zeros_like, start_params()), squared)
DRAWN = jfl.task(
    lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), start_params()), squared
)


def of_parts(task=None, noise=None, lr=0.1, release=None, weights="uniform", loss=None):
    task = task or ZEROS
    grad = jfl.private_grad(loss or task.loss, noise or chained())
    algorithm = jfl.algorithms.fedavg(grad, lr=lr, steps=2, batch=batches.without_replacement(3))
    more = {} if release is None else dict(release=release)
    return jfl.plan(make_federation(), task, algorithm, FULL, weights=weights, **more)


def plus(value):
    return pytrees.map(lambda leaf: leaf + jnp.asarray(SOMEBODYS)[1], value)


def start_of(change):
    return lambda: of_parts(jfl.task(jax.tree.map(change, start_params()), squared))


def chain_of(*more, noise=None):
    return jfl.chain(
        jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1 if noise is None else noise), *more
    )


INIT = r"starting parameters .*float32\["
WEIGHED = lambda w, x, y: squared(w, x, y) * jnp.asarray(SOMEBODYS).sum()
DRAWN_PLUS = lambda key: jax.tree.map(lambda x: x + jnp.asarray(SOMEBODYS)[2], start_params())
LEVELS = jnp.linspace(1.0, 2.0, CLIENTS)
AFTER = jfl.divide(3.0), jfl.post_process(plus)
NAMED = {
    "starting parameters": (start_of(lambda x: x), INIT),
    "scaled": (start_of(lambda x: 3 * x + 1e-3), INIT),
    "init": (lambda: of_parts(jfl.task(DRAWN_PLUS, squared)), INIT + r"4\]"),
    "loss": (lambda: of_parts(jfl.task(start_params(), WEIGHED)), r"loss float32\[4\]"),
    "stage": (lambda: of_parts(noise=chain_of(*AFTER)), r": post_process float32\[4\]\."),
    "release": (
        lambda: of_parts(release=jfl.chain(jfl.total(), *AFTER)),
        r": post_process float32\[4\]\.",
    ),
    "noise": (
        lambda: of_parts(noise=chain_of(jfl.divide(3.0), noise=LEVELS)),
        rf": gaussian float32\[{CLIENTS}\]\.",
    ),
    "schedule": (
        lambda: of_parts(lr=lambda step: jnp.asarray(SOMEBODYS)[step % 4]),
        r"float32\[4\]\.",
    ),
    "weights": (
        lambda: of_parts(weights=np.linspace(1.0, 2.0, CLIENTS)),
        rf": weights float32\[{CLIENTS}\]\.",
    ),
    "client": (
        lambda: build(sends(lambda **_: jnp.asarray(SOMEBODYS)[0])),
        r"client float32\[4\]",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_guarantee_names_the_arrays_that_it_assumes_public(name):
    make, pattern = NAMED[name]
    said = assumed(make())
    assert said.startswith("Assumes that constants are public: ") and said.endswith(".")
    assert re.search(pattern, said), said
    assert assumed(make(), cap=1) == said


def test_a_model_that_was_trained_before_is_a_constant():
    plain = jfl.algorithms.fedavg(jfl.grad(squared), steps=1, batch=batches.full())
    out = jfl.simulate(jax.random.key(0), jfl.plan(make_federation(), ZEROS, plain, FULL), 1)
    warm = jfl.task(out.params, squared)
    assert assumed(of_parts(warm)).startswith(
        "Assumes that constants are public: starting parameters float32["
    )


def test_what_is_drawn_or_jfls_is_not_named():
    for plan in (
        of_parts(),
        of_parts(DRAWN),
        of_parts(weights="size"),
        of_parts(lr=lambda step: 0.1 / (1.0 + step)),
        of_parts(release=jfl.chain(jfl.total(), jfl.divide(7.0))),
        jfl.plan(
            make_federation(),
            DRAWN,
            make_algorithm("fedavg", jfl.grad(squared)),
            FULL,
            release=jfl.chain(
                jfl.clip_l2(1.0),
                jfl.total(),
                jfl.correlated(3.0, jfl.strategies.inverse_banded(4, 2)),
                jfl.divide(4.0),
            ),
        ),
    ):
        assert not assumed(plan)


def test_many_arrays_are_counted():
    held = [(f"stage {i}", [np.arange(2.0 + i + j) for j in range(12)]) for i in range(2)]
    (said,) = check.constants_caveat(held)
    assert "stage 0 float64[2], float64[3]" in said and said.count("4 more arrays") == 2
    same = [np.arange(3.0), np.arange(3.0) + 1]
    assert "(2 times)" in check.constants_caveat([("loss", same), ("client", same)])[0]
    words = np.arange(3, dtype=np.uint32)  # of a random number generator
    assert check.constants_caveat([("", same), ("loss", [np.ones(4), words])]) == ()
    assert "loss int64[3]." in check.constants_caveat([("loss", [np.arange(3)])])[0]


@pytest.mark.slow
def test_every_answer_says_so():
    """Guarantees, segments, what reports write, and bare numbers, which warn."""
    plan, fine = build(MUTANTS["raw_rows"][0]), build(fedavg_client)
    for found in (
        jfl.guarantee(plan, 3, cap=2),
        jfl.guarantee([(fine, 2), (plan, 1)]),
        *jfl.guarantees(plan, 3),
    ):
        assert found.status == "conditional" and any("payload['w']" in c for c in found.caveats)
    written = importlib.import_module("jfl.runs.guarantee_rows").all_rows(plan, 3, 1e-5)
    assert (
        all(g["status"] == "conditional" and check.DECLARED in g["caveats"] for g in written)
        and written
    )
    bare = (
        lambda p: jfl.epsilons(p, np.arange(1, 3)),
        lambda p: jfl.calibrate(p, epsilon=9.0, rounds=2),
        lambda p: guarantees.epsilons_per_client(p, 2),
        lambda p: calibration.calibrate_per_client(p, epsilon=9.0, rounds=2),
    )
    for ask in bare:
        with pytest.warns(UserWarning, match=check.DECLARED):
            ask(plan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ask(fine)


def of_two_sums(chain, key, alone):
    """A sum of two bounded sums is not bounded."""
    part = mech.clip_and_sum(chain, (), alone, jnp.ones(1)).value
    return mech.release_sum(chain, key, (), pytrees.add(part, part))[0]


def release_with(weight, **options):
    weights = lambda: jnp.full(1, weight)
    return contributes(
        lambda chain, key, alone: mech.release(chain, key, (), alone, weights(), **options)[0]
    )


WHOLE = dict(
    twice_as_much=(contributes(of_two_sums), "no row stage of its chain bounds"),
    heavier=(release_with(7.0), "weight may not be 1"),
    quieter=(release_with(1.0, max_weight=1e-3), "a max_weight other than 1"),
    raw=(MUTANTS["raw_rows"][0], "no declared release|rows reach"),
)


@pytest.mark.parametrize("name", WHOLE)
def test_mutants_of_a_whole_contribution_are_caught(name):
    client, pattern = WHOLE[name]
    caught(whole(client), pattern)


# --- what is declared, or held


def _halved(state, row, *, bound):
    return row, jnp.zeros((), bool)


def _too_small(state, shape, *, bound):
    return bound


def false_stage(bound=0.8):
    data = dict(bound=np.float32(bound))
    return Stage(Fn(_halved, data), Fn(_too_small, data), name="clip_l2")


def tampered(stage):
    """jfl's own clip, with another bound than it clips to; and a bound that is only asserted, under
    another name."""
    if stage == "bound":
        return dataclasses.replace(jfl.clip_l2(8.0), bound=jfl.clip_l2(0.1).bound)
    if stage == "renamed":
        return dataclasses.replace(stages.bounded(0.1, "upload"), name="clip_l2")
    return false_stage()


@pytest.mark.parametrize("stage", ["own", "bound", "renamed"])
@pytest.mark.parametrize("site", ["rows", "upload", "release"])
def test_a_stage_with_a_bound_of_its_own_is_declared(site, stage, fed, task):
    chain = jfl.chain(tampered(stage), jfl.total(), jfl.gaussian(1.0))
    grad = jfl.private_grad(squared, chain) if site == "rows" else jfl.grad(squared)
    plan = jfl.plan(
        fed, task, make_algorithm("fedavg", grad), FULL, **({} if site == "rows" else {site: chain})
    )
    view = "third_party" if site == "release" else "server"
    found = jfl.guarantee(plan, 3, view=view)
    assert found.status == "conditional" and check.DECLARED in found.caveats
    assert any("bound of the row stage" in c for c in found.caveats)
    assert jfl.check_privacy(plan).status == "conditional"


def test_every_row_stage_of_jfl_is_known():
    like = start_params()
    haar = jfl.bands.flat(like)
    shape = jfl.wavelet.ellipsoid(haar)
    made = [
        jfl.clip_l2(1.0),
        jfl.clip_l2(calming),
        jfl.clip_l1(1.0),
        jfl.clip_per_layer((1.0, 2.0)),
        jfl.clip_adaptive(1.0, 3),
        jfl.clip_scaled(1.0, 3, like=like),
        jfl.wavelet.clip_ellipsoid(1.0, shape),
        jfl.wavelet.clip_bands(np.ones(jfl.bands.count(haar)), haar),
        jfl.wavelet.shares(haar),
        jfl.bounded(1.0, "upload"),
        jfl.bounded(1.0, "prox_erm"),
    ]
    made += [
        jfl.wavelet.published(r, 1.0, 1.0, haar, unsound=True)[0] for r in jfl.wavelet.READINGS
    ]
    assert all(map(trust.is_own_row_stage, made))
    other_bound = Fn(stages._layers_bound, made[0].bound.data, made[0].bound.static)
    assert not trust.is_own_row_stage(dataclasses.replace(made[0], bound=other_bound))
    assert {s.apply.function for s in made} == {*trust.ROW_STAGES, stages._keep_row}


def test_what_a_user_says_of_samplers_and_releases(fed, task):
    """A draw of one's own, a scheme that is not the draw's, releases that are not the client's."""
    grad, few = noisy_grad(), batches.without_replacement(3)
    lying = dataclasses.replace(few, draw=batches.full().draw)
    cases = [
        (
            jfl.plan(fed, task, make_algorithm("fedavg", grad, batch=lying), FULL),
            "which rows a batch holds",
        )
    ]
    fair = make_algorithm("fedavg", grad, batch=few)
    sampler = dataclasses.replace(
        jfl.sampling.without_replacement(CLIENTS, 2), draw=FULL.draw, capacity=CLIENTS
    )
    cases += [(jfl.plan(fed, task, fair, sampler), "who takes part")]
    (one,) = fair.releases
    for changed, pattern in (
        (dataclasses.replace(one, count=1), "2 releases, 1 declared"),
        (
            dataclasses.replace(one, mechanism=noisy_grad(z=9.0).mechanism),
            "no declared release has this chain",
        ),
        (
            dataclasses.replace(one, batches=batches.without_replacement(1)),
            "this adjacency and these batches",
        ),
    ):
        plan = jfl.plan(fed, task, dataclasses.replace(fair, releases=(changed,)), FULL)
        cases.append((plan, pattern))
    for plan, pattern in cases:
        found = jfl.guarantee(plan, 3)
        assert found.status == "conditional" and re.search(pattern, "\n".join(found.caveats)), found
    assert jfl.guarantee(jfl.plan(fed, task, fair, FULL), 3).status == "proved"


def test_whole_clients(fed, task):
    """Noise that comes later protects a client, as long as its function reads its own rows and says
    what it keeps."""

    def plan(client, own=None, **options):
        bare = training.work(jfl.grad(squared), batches.without_replacement(3), lr=0.1, steps=STEPS)
        algorithm = build(client, own=own, releases=(), wanted=bare, **options).algorithm
        return jfl.plan(
            fed,
            task,
            algorithm,
            jfl.sampling.without_replacement(CLIENTS, 3),
            release=noisy_release(),
        )

    status = lambda p: jfl.guarantee(p, 3, view="third_party")
    leaks = {name: client for name, (client, *_) in MUTANTS.items()}
    # its own labels, under the noise of the release
    assert status(plan(leaks["raw_labels"])).status == "proved"
    for name in ("raw_rows", "someone_elses"):
        found = status(plan(leaks[name]))
        assert found.status == "conditional" and any("another client's" in c for c in found.caveats)
    keeps = dict(held=jnp.zeros(3))
    assert any("stateful=True" in c for c in status(plan(through_memory, keeps)).caveats)
    assert status(plan(through_memory, keeps, stateful=True)).status == "proved"
    assert status(plan(leaks["callback"])).status == "conditional"
    implied = jfl.guarantee(plan(leaks["raw_rows"]), 3, unit="example", view="third_party")
    assert implied.status == "conditional"


# --- rows in closures

HELD = dict(
    x=lambda fed: fed.x,
    numpy=lambda fed: np.asarray(fed.x),
    y=lambda fed: fed.y,
    reshaped=lambda fed: fed.x.reshape(-1),
    double=lambda fed: np.asarray(fed.x, np.float64),
)
SOME_ROWS = dict(
    half=lambda fed: fed.x.astype(jnp.bfloat16),
    one_client=lambda fed: fed.x[fed.index[2, : fed.size[2]]],
    reversed=lambda fed: np.asarray(fed.x)[::-1],
    padded=lambda fed: np.concatenate([np.asarray(fed.x), np.zeros((9, 3), np.float32)]),
    some_labels=lambda fed: np.asarray(fed.y)[7:13],
    integer_labels=lambda fed: np.arange(6, dtype=np.int32) % 3,
    pixels=lambda fed: np.arange(9, dtype=np.uint8),
)


def _weighed(round_, *, by):
    return jnp.ones(CLIENTS) + 0 * by.sum()


@pytest.mark.parametrize("how", HELD)
def test_functions_that_hold_rows_are_refused(how, task):
    fed = make_federation()
    held = HELD[how](fed)
    leaky = lambda w, x, y: squared(w, x, y) + 0.0 * jnp.asarray(held).astype(jnp.float32).sum()
    with pytest.raises(ValueError, match=r"holds fed\.[xy]"):
        private_plan(fed, task, leaky)


def test_a_library_method_of_a_users_object_is_looked_into():
    from flax import linen as nn

    fed = make_federation()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            w = self.param("w", nn.initializers.zeros, (3,))
            return (x @ w - y) ** 2 + 0.0 * fed.x.sum()

    net = Net()
    loss = net.apply  # flax's method, bound to a user's module
    assert trust.user_objects_in(loss) == [net]
    task = jfl.task(lambda key: net.init(key, jnp.zeros(3), 0.0), loss)
    with pytest.raises(ValueError, match=r"holds fed\.x"):
        private_plan(fed, task, loss)


@pytest.mark.parametrize("how", SOME_ROWS)
def test_some_rows_in_a_closure_are_named_as_public_constants(how, task):
    fed = make_federation()
    held = SOME_ROWS[how](fed)
    leaky = lambda w, x, y: squared(w, x, y) + 0.0 * jnp.asarray(held).astype(jnp.float32).sum()
    plan = private_plan(fed, task, leaky)
    (said,) = [c for c in jfl.guarantee(plan, 3).caveats if code_of(c) == "public-constants"]
    assert f"loss {held.dtype}{list(held.shape)}" in said


def test_a_client_that_holds_rows_within_a_jit_is_refused(task):
    held = np.asarray(make_federation().x)

    def leaks(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(work, ctx, keys, server, rows)
        sums = jax.jit(lambda round_: round_ * jnp.asarray(held).sum(0))
        return dict(moved, w=moved["w"] + sums(ctx.round.astype(jnp.float32))), own, seen

    with pytest.raises(ValueError, match="holds fed.x"):
        jfl.guarantee(build(leaks), 3)


def by_gradient(held):
    """A loss whose rule of differentiation alone holds rows."""

    @jax.custom_vjp
    def loss(w, x, y):
        return squared(w, x, y)

    loss.defvjp(
        lambda w, x, y: (squared(w, x, y), (w, x, y)),
        lambda r, g: (dict(b=g, w=jnp.asarray(held)[0] * g), jnp.zeros(3), jnp.zeros(())),
    )
    return loss


def _adds(f, leak):
    """A function whose result has `leak` added to its numbers."""
    is_float = lambda v: getattr(v, "dtype", None) == jnp.float32
    add = lambda tree: jax.tree.map(lambda v: v + leak() if is_float(v) else v, tree)
    return Fn(lambda *args: add(f(*args)))


def _scale_of(rows):
    update = lambda g, s, p=None: (pytrees.map(lambda v: v * rows.sum(), g), s)
    return optax.GradientTransformation(lambda p: (), update)


def _stage_of(rows):
    data = dict(bound=np.float32(1.0))
    change = lambda row: pytrees.map(lambda v: v + 0 * jnp.asarray(rows).sum(), row)
    stage = lambda state, row, *, bound: (change(row), jnp.zeros((), bool))
    stage = Stage(Fn(stage, data), Fn(_too_small, data))
    return jfl.chain(stage, jfl.total(), jfl.gaussian(1.0))


@pytest.mark.parametrize(
    "part",
    "init client server params task weights bound gradient server_optimizer stage".split(),
)
def test_every_function_is_looked_at(part, task):
    fed = make_federation()
    x, y = np.asarray(fed.x), fed.y
    plan = private_plan(fed, task)
    algorithm, options = plan.algorithm, {}
    if part == "task":
        start = lambda key: pytrees.map(lambda v: v + jnp.asarray(x).sum(), start_params())
        task = jfl.task(start, squared)
    elif part in ("weights", "bound"):
        weigh = lambda round_: jnp.ones(CLIENTS) + 0 * y.sum()
        options["weights"] = weigh if part == "weights" else Fn(_weighed, dict(by=fed.y))
    elif part == "stage":
        options["release"] = _stage_of(x)
    elif part == "gradient":
        algorithm = make_algorithm("fedavg", jfl.private_grad(by_gradient(x), chained()))
    elif part == "server_optimizer":
        algorithm = make_algorithm("fedavg", noisy_grad(), server_optimizer=_scale_of(y))
    else:
        leaky = _adds(getattr(algorithm, part), lambda: 0.0 * jnp.asarray(x).sum())
        algorithm = dataclasses.replace(algorithm, **{part: leaky})
    with pytest.raises(ValueError, match="holds"):
        jfl.plan(fed, task, algorithm, FULL, **options)


def test_a_plan_put_together_by_hand_is_refused_by_the_guarantee(task):
    fed = make_federation()
    x = fed.x
    loss = lambda w, a, b: squared(w, a, b) + 0 * x.sum()
    grad = jfl.private_grad(loss, chained(adjacency="replace_one"))
    leaky = make_algorithm("fedavg", grad)
    bad = dataclasses.replace(private_plan(fed, task), algorithm=leaky)
    for ask in (
        lambda: jfl.guarantee(bad, 3),
        lambda: jfl.epsilons(bad, np.arange(3)),
        lambda: jfl.calibrate(bad, epsilon=1.0, rounds=2),
    ):
        with pytest.raises(ValueError, match="fed.x"):
            ask()
    assert (
        jfl.check_privacy(bad).status == "conditional" and "fed.x" in jfl.check_privacy(bad).refused
    )


def test_what_is_not_the_federations_may_be_held(task):
    """Public rows, shapes, rows that no client owns, and the number of classes may be held."""
    fed, other = make_federation(), make_federation(3)
    public, x = np.asarray(other.x), fed.x
    free = np.setdiff1d(
        np.arange(len(x)),
        np.concatenate([np.asarray(fed.index[c, :s]) for c, s in enumerate(fed.size)]),
    )
    unowned, bins = np.asarray(x)[free], np.arange(40)
    for loss in (
        lambda w, a, b: squared(w, a, b) + 0.0 * public.sum() * jnp.asarray(public)[0, 0],
        lambda w, a, b: squared(w, a, b) / x.shape[0] + fed.classes,
        lambda w, a, b: (
            squared(w, a, b) + 0.0 * jnp.asarray(unowned).sum() + 0.0 * jnp.asarray(bins)[3]
        ),
    ):
        assert jfl.guarantee(private_plan(fed, task, loss), 3).status == "proved"


def test_a_loss_that_calls_python_is_declared(fed, task):
    def loss(w, x, y):
        return squared(w, x, y) + jax.lax.stop_gradient(
            jax.pure_callback(
                lambda v: np.float32(0),
                jax.ShapeDtypeStruct((), jnp.float32),
                y,
                vmap_method="sequential",
            )
        )

    found = jfl.guarantee(private_plan(fed, task, loss), 3)
    assert found.status == "conditional" and any(
        "pure_callback in the loss" in c for c in found.caveats
    )

    def printing(w, x, y):
        jax.debug.print("{}", y)
        return squared(w, x, y)

    assert jfl.guarantee(private_plan(fed, task, printing), 3).status == "proved"


def test_a_function_that_was_jitted_and_traced_before_is_looked_into(monkeypatch):
    """The trace that `jax.jit` keeps of an ordinary run does not answer for the check."""
    client = first_gradient(by_a_mixed_loss_within_jit)

    class Ordinary:
        value = False

        def __call__(self, value):
            return contextlib.nullcontext()

    with monkeypatch.context() as patch:
        patch.setattr(marks, "CHECKING", Ordinary())
        plan = build(client, steps=1)
    traced.TRACES.clear()
    caught(plan, "what custom_vmap_call does")


def test_a_server_that_calls_python_is_declared():
    """What a client shows to Python, as a debug callback does, may come back in the server."""
    seen = [np.float32(0)]

    def tells(rows, **_):
        jax.debug.callback(lambda y: seen.append(np.float32(y)), _mine(rows).y[0])
        return {}

    def asks(ctx, server, diff, *, step):
        told = jax.pure_callback(lambda _: seen[-1], NUMBER, ctx.round)
        return step(ctx, server, pytrees.map(lambda x: x + told, diff))

    plan = build(sends(tells))
    assert verdict(plan)[0].status == "proved"
    server = Fn(asks, plan.algorithm.server.data)
    algorithm = dataclasses.replace(plan.algorithm, server=server)
    caught(dataclasses.replace(plan, algorithm=algorithm), "what pure_callback in server does")


# --- whose function


def test_own_functions():
    wrapped = functools.wraps(training.train)(lambda *args: training.train(*args))
    others = (wrapped, squared, optax.sgd, functools.partial(training.train), print)
    assert trust.is_jfl_function(training.train) and not any(map(trust.is_jfl_function, others))


# --- cost


def test_points_of_a_sweep_are_traced_once(monkeypatch):
    client_checks.TRACES.clear()
    count, trace = [], client_checks.trace_client
    monkeypatch.setattr(
        client_checks, "trace_client", lambda *args: count.append(1) or trace(*args)
    )

    def plan(z):
        grad = jfl.private_grad(
            squared, jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(z), jfl.divide(3.0))
        )
        return build(
            fedavg_client,
            wanted=training.work(grad, batches.without_replacement(3), lr=0.01 * z, steps=STEPS),
        )

    for z in np.linspace(1.0, 2.0, 20):
        assert jfl.guarantee(plan(float(z)), 3).status == "proved"
    assert len(count) == 1
    jfl.guarantee(private_plan(make_federation(), jfl.task(start_params(), squared)), 3)
    assert len(count) == 1  # jfl's own is not traced


def compiled(plan):
    text = (
        jax.jit(lambda run, plan: jfl.run_round(run, plan)[0])
        .lower(jfl.init(jax.random.key(0), plan), plan)
        .compile()
        .as_text()
    )
    text = re.sub(
        r", metadata=\{[^}]*\}", "", text[text.index("\n%") :]
    )  # but for the lines of source it names
    assert text.count(" = ") > 300
    names = {}  # instructions are numbered as they were made: here as they come
    return re.sub(
        r"[A-Za-z_][\w\-]*(?:\.[\w\-]+)*",
        lambda m: names.setdefault(m[0], f"{m[0].split('.')[0]}.{len(names)}"),
        text,
    )


def test_marks_lower_to_nothing(monkeypatch):
    """A release and a private gradient, with marks and without: as many operations of each kind."""
    grad = noisy_grad(microbatch=2)
    grad = dataclasses.replace(grad, mechanism=mech.bind(grad.mechanism, "replace_one", "test"))
    batch = jfl.core.records.Batch(jnp.ones((4, 3)), jnp.ones(4), jnp.ones(4, bool))
    context = jfl.core.records.Context(*[jnp.int32(1)] * 3, jnp.float32(1), 1, jnp.float32(1))

    def lowered():
        traced = jax.jit(lambda key, w: grad(key, w, batch, context)).trace(
            jax.random.key(0), start_params()
        )
        text = re.findall(r"stablehlo\.(\w+)", traced.lower().as_text())
        return "jfl_release" in str(traced.jaxpr), {k: text.count(k) for k in set(text)}

    marked, with_marks = lowered()
    monkeypatch.setattr(marks, "_bind", lambda primitive, value, *of, **params: value)
    assert marked and len(with_marks) > 5
    bare, without = lowered()
    changed = {k for k in with_marks if with_marks[k] != without.get(k)}
    assert not bare and changed <= {"constant", "convert", "broadcast_in_dim"}, changed


@pytest.mark.slow  # two programs, and all that was compiled is forgotten; the test above
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "output_perturbation"])
def test_marks_cost_nothing_in_the_compiled_program(name, fed, task, monkeypatch):
    """The very text that XLA compiled, with marks and without."""
    plan = jfl.plan(
        fed,
        task,
        make_algorithm(name, noisy_grad(microbatch=2)),
        jfl.sampling.poisson(CLIENTS, 0.4, capacity=5),
        upload=jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0)),
        release=noisy_release(),
        chunk=2,
    )
    jax.clear_caches()
    with_marks = compiled(plan)
    monkeypatch.setattr(marks, "_bind", lambda primitive, value, *of, **params: value)
    jax.clear_caches()
    assert compiled(plan) == with_marks


def test_marks_under_every_transformation():
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), adjacency="add_remove")

    def out(key, v):
        return mech.release(chain, key, (), v[None], jnp.ones(1))[0]

    keys, v = jax.random.split(jax.random.key(1), 4), jnp.arange(12.0).reshape(4, 3) / 40 + 0.1
    plain = jax.jit(out)
    each = jnp.stack([plain(k, x) for k, x in zip(keys, v)])
    np.testing.assert_allclose(jax.jit(jax.vmap(out))(keys, v), each, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(out, (0, 1)))(keys, v.T), each, rtol=1e-6)
    np.testing.assert_allclose(
        jax.lax.scan(lambda c, kv: (c, out(*kv)), 0, (keys, v))[1], each, rtol=1e-6
    )
    np.testing.assert_allclose(jax.jit(jax.checkpoint(out))(keys[0], v[0]), each[0], rtol=1e-6)
    slope = jax.jit(jax.vmap(jax.grad(lambda v, key: out(key, v).sum()), (0, 0)))(v, keys)
    np.testing.assert_allclose(slope, np.ones((4, 3)), rtol=1e-5)  # the clip does not bite
    mesh = jfl.engine.devices.Mesh(np.array(jax.devices()[:1]), ("clients",))
    spread = jax.jit(
        jax.shard_map(
            jax.vmap(out), mesh=mesh, in_specs=jax.P("clients"), out_specs=jax.P("clients")
        )
    )
    np.testing.assert_allclose(spread(keys, v), each, rtol=1e-6)
