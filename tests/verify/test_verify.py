"""The check of users' code: it proves jfl's own algorithms, and finds each leak in `MUTANTS`."""

import dataclasses
import functools
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
from jfl.privacy.mechanisms import stages
from jfl.privacy.mechanisms.stages import Stage
from jfl.sampling import batches
from jfl.verify import check, marks, trust

STEPS = 2
FULL = jfl.sampling.full(CLIENTS)
NOTHING = Diagnostics(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))


def chained(**options):
    return jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1), jfl.divide(3.0), **options)


def work(loss=squared, batch=None, steps=STEPS, mechanism=None, **options):
    grad = jfl.private_grad(loss, mechanism or chained(), **options)
    return training.work(grad, batch or batches.without_replacement(3), lr=0.1, steps=steps)


def init(params, *, step):
    return step.init(params), ()


def serve(ctx, server, diff, *, step):
    return step(ctx, server, diff)


def build(
    client, times=1, own=None, releases=None, wanted=None, stateful=False, task=None, **options
):
    """Return a plan with a user's client and the other parts of FedAvg."""
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
    """Return a plan of FedAvg with private gradients of a loss; options are passed to FedAvg."""
    grad = jfl.private_grad(loss, mechanism or chained())
    return jfl.plan(fed, task, make_algorithm("fedavg", grad, **options), FULL)


def diff_of(work, ctx, keys, server, rows):
    trained, _, _, seen = training.train(work, ctx, keys, server.params, rows)
    return pytrees.sub(trained, server.params), seen


def batch_of_step(work, keys, rows, step):
    at, mask, _ = batches.draw_slots(work.batches, keys.batch, step, rows.size, rows.index.shape[0])
    return batches.gather(rows, at, mask)


def all_rows(rows):
    every = jnp.arange(rows.index.shape[0])
    return batches.gather(rows, every, every < rows.size)


def verdict(plan):
    """Return the guarantee and the report, which must agree."""
    found, report = jfl.guarantee(plan, 3), jfl.check_privacy(plan)
    assert (found.status == "proved") == (report.status == "proved"), report
    assert "could not be followed" not in str(report), report
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


# Without noise, and with noise for whole clients, three algorithms represent the others.
SOME = ("fedavg", "scaffold", "pfedme")


def test_a_report_tells_what_its_proof_does_not_need(fed, task):
    """Noise for clients is added after the client, which sends rows without noise."""
    head = "\nagainst a guarantee for examples:\n  rows reach"
    report = lambda release: str(jfl.check_privacy(plan_of(release)))
    plan_of = lambda release: jfl.plan(
        fed, task, make_algorithm("fedavg", jfl.grad(squared)), FULL, release=release
    )
    assert head in report(None)
    assert head.replace("against", "outside of this proof, against") in report(noisy_release())


@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=() if name in SOME else pytest.mark.slow)
        for name in jfl.algorithms.__all__
        for kind in ("none", "client")
    ]
    + [(name, "noise") for name in jfl.algorithms.__all__],
)
def test_built_in_algorithms(name, kind, fed, task):
    grad = noisy_grad() if kind == "noise" else jfl.grad(squared)
    release = noisy_release() if kind == "client" else None
    plan = jfl.plan(fed, task, make_algorithm(name, grad), FULL, release=release)
    report = jfl.check_privacy(plan)
    assert report.status == dict(noise="proved", none="no noise", client="proved")[kind], report
    # Some make more releases than steps or have two gradients, and are traced like a user's client.
    many = name in ("mimelite", "pfedme", "fedsam", "qfedavg", "ditto")
    assert trust.is_trusted(plan) != many and not report.client
    if kind == "noise":
        times = lambda releases: sum(r.times for r in releases)
        assert not report.example and times(report.releases) == times(report.declared)
    else:  # without noise, rows reach the payload
        assert any("payload" in f and "rows" in f for f in report.example), report


def test_undeclared_state_of_a_built_in_client(fed, task):
    """Later uploads of SCAFFOLD depend on earlier cohorts, so it has a larger epsilon if few
    clients participate.  Without the declaration of the state, the smaller one is not proved."""
    few, release = jfl.sampling.without_replacement(CLIENTS, 2), noisy_release()
    for name, status in (("scaffold", "conditional"), ("padpfl", "proved")):
        made = make_algorithm(name, jfl.grad(squared))
        parts = made.init, made.client, made.server
        plan = jfl.plan(fed, task, jfl.algorithm(*parts), few, release=release)
        assert trust.is_trusted(plan)
        proved = jfl.guarantee(plan, 3)
        assert proved.unit == "client" and proved.status == status, name
        assert ("stateful=True" in str(proved.caveats)) == (status == "conditional")


def with_fewer_rows_for_personal_models(ditto):
    one = batches.without_replacement(1)
    personal = dataclasses.replace(ditto.client.data["personal"], batches=one)
    client = Fn(ditto.client.function, {**ditto.client.data, "personal": personal})
    releases = tuple(dataclasses.replace(r, batches=one) for r in ditto.personal_releases)
    return dataclasses.replace(ditto, client=client, personal_releases=releases)


def with_work_in_structure(ditto):
    held = dict(ditto.client.data)
    static = dict(ditto.client.static, work=held.pop("work"))
    return dataclasses.replace(ditto, client=Fn(ditto.client.function, held, static))


same = lambda ditto: ditto
TWO_WORKS = dict(
    quieter=(dict(), same),
    bare=(dict(grad=jfl.grad(squared)), same),
    fewer_rows=(dict(personal_grad=noisy_grad()), with_fewer_rows_for_personal_models),
    static=(dict(), with_work_in_structure),
)


@pytest.mark.parametrize("name", TWO_WORKS)
def test_a_client_of_jfl_with_two_works_declares_both(name, fed, task):
    """If Ditto declares only the noise of its personal models, its uploads are not proved."""
    options, change = TWO_WORKS[name]
    few = dict(batch=batches.without_replacement(3), steps=2, lr=0.1)
    of = dict(grad=noisy_grad(), personal_grad=noisy_grad(z=50.0)) | options
    ditto = jfl.algorithms.ditto(of["grad"], personal_grad=of["personal_grad"], **few)
    if not options:
        assert jfl.guarantee(jfl.plan(fed, task, ditto, FULL), 3).status == "proved"
    ditto = change(ditto)
    hidden = dataclasses.replace(ditto, releases=ditto.personal_releases)
    plan = jfl.plan(fed, task, hidden, FULL)
    assert not trust.is_trusted(plan)
    assert jfl.guarantee(plan, 3).status == "conditional"


def test_algorithms_with_options(fed, task):
    """Releases of whole contributions, declared bounds, averaged models and released energies."""
    few, haar = batches.without_replacement(3), jfl.bands.flat(start_params())
    prox = jfl.chain(jfl.bounded(0.5, "prox_erm"), jfl.total(), jfl.gaussian(1.0))
    whole = jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(1.0))
    a = jfl.algorithms
    made = dict(
        clipped=a.output_perturbation(no_noise(noisy_grad()), whole, steps=2, batch=few, mu=0.1),
        epochs=a.output_perturbation(jfl.grad(squared), whole, steps=2, batch=batches.epochs(3)),
        averaged=a.averaged(make_algorithm("scaffold", noisy_grad())),
        energies=a.band_energies(squared, haar, noise_multiplier=1.0, batch=few),
        prox=a.padpfl(jfl.grad(squared), batch=few, steps=2, mechanism=prox, inexactness=0.9),
        both=a.padpfl(noisy_grad(), batch=few, steps=2, mechanism=whole),
    )
    for name, algorithm in made.items():
        plan = jfl.plan(fed, task, algorithm, FULL)
        report = jfl.check_privacy(plan)
        assert report.status == "proved" and report.releases, (name, str(report))
        # the noise in the steps of "both" is not declared, so its client is traced
        assert trust.is_trusted(plan) == (name != "both")
        assert jfl.guarantee(plan, 3).status == ("conditional" if name == "prox" else "proved")
    last = a.output_perturbation(jfl.grad(squared), whole, batch=few, clip_steps="last")
    report = jfl.check_privacy(jfl.plan(fed, task, last, FULL))
    assert report.status == "no noise"
    assert any("no row stage of its chain bounds" in f for f in report.example)


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
    ("full", o)
    for o in (
        dict(microbatch=2),
        dict(path="vmap"),
        dict(path="vmap", microbatch=1),  # a block of one row is not a client's contribution
        dict(compute="bfloat16", l2=0.1),
    )
]


@pytest.mark.by_default(
    "epochs-{}",
    "rate-{}",
    "short-{}",
    "full-{'path': 'vmap'}",
    "full-{'path': 'vmap', 'microbatch': 1}",
    "full-{'microbatch': 2}",
)
@pytest.mark.parametrize("name, options", OPTIONS, ids=str)
def test_every_batch_sampler_and_gradient_path(name, options):
    """The client is a user's, so that it is traced."""
    report = verdict(build(fedavg_client, batch=BATCHES[name], **options))[1]
    assert report.status == "proved" and report.releases[0].times == STEPS, report


def calming(round_):
    return 1.1 * 0.8**round_


@pytest.mark.by_default("schedule", "per_layer", "shape", "key", "std")
@pytest.mark.parametrize(
    "stage", ["schedule", "levels", "automatic", "per_layer", "shape", "key", "std"]
)
def test_every_kind_of_noise(stage):
    shape = jfl.wavelet.ellipsoid(jfl.bands.flat(start_params()))
    clip, noise = dict(
        schedule=(jfl.clip_l2(calming), jfl.gaussian(calming)),
        levels=(jfl.clip_l2(1.0), jfl.gaussian(jnp.arange(1.0, 8.0))),
        automatic=(jfl.clip_automatic(), jfl.gaussian(1.0)),
        per_layer=(jfl.clip_per_layer((1.0, 2.0)), jfl.gaussian(1.0)),
        std=(jfl.clip_l2(1.0), jfl.gaussian(std=2.0)),
        shape=(jfl.wavelet.clip_ellipsoid(1.0, shape), jfl.gaussian(1.0, shape=shape)),
        key=(jfl.clip_l2(1.0), jfl.gaussian(1.0, generator="key")),
    )[stage]
    mechanism = jfl.chain(clip, jfl.total(), noise, jfl.divide(3.0))
    plan = build(fedavg_client, mechanism=mechanism)
    assert verdict(plan)[1].status == "proved"
    assert jfl.guarantee([(plan, 3, 0), (plan, 3, 3)]).status == "proved"


# --- what users write, and passes


def fedavg_client(ctx, keys, server, own, rows, *, work):
    trained, _, _, seen = training.train(work, ctx, keys, server.params, rows)
    return pytrees.sub(trained, server.params), own, seen


def twice_client(ctx, keys, server, own, rows, *, work):
    """Train twice with separate keys."""
    apart = lambda i: Keys(jax.random.fold_in(keys.batch, i), jax.random.fold_in(keys.noise, i))
    first, seen = diff_of(work, ctx, apart(0), server, rows)
    second, _ = diff_of(work, ctx, apart(1), server, rows)
    return pytrees.sub(first, second), own, seen


def split_client(ctx, keys, server, own, rows, *, work):
    """Train three times in a loop that splits the keys in each iteration."""

    def one(carry, _):
        batch, noise, w = carry
        batch, drawn = jax.random.split(batch)
        noise, added = jax.random.split(noise)
        w, _, _, seen = training.train(work, ctx, Keys(drawn, added), w, rows)
        return (batch, noise, w), seen

    (_, _, w), seen = jax.lax.scan(one, (keys.batch, keys.noise, server.params), length=3)
    return pytrees.sub(w, server.params), own, jax.tree.map(lambda x: x[0], seen)


def loop_client(ctx, keys, server, own, rows, *, work):
    """Take steps in a fori_loop with a jit, and choose the result by the number of the round."""

    @jax.jit
    def step(s, w):
        key, batch = jax.random.fold_in(keys.noise, 3 + s), batch_of_step(work, keys, rows, s)
        return pytrees.axpy(-0.1, work.grad(key, w, batch, ctx)[0], w)

    w = jax.lax.fori_loop(0, STEPS, step, server.params)
    moved, nothing = pytrees.sub(w, server.params), pytrees.zeros_like(w)
    return jax.lax.cond(ctx.round < 3, lambda: moved, lambda: nothing), own, NOTHING


def remembering_client(ctx, keys, server, own, rows, *, work):
    """Keep data in the client state, and upload only what is noisy; sizes are public here."""
    moved, seen = diff_of(work, ctx, keys, server, rows)
    kept = dict(noisy=moved, kept=all_rows(rows).y.sum())
    return pytrees.axpy(rows.size / 5, moved, own["noisy"]), kept, seen


def bare_adversary(w, x, y):
    """Use a global array that does not come from the data."""
    return squared(w, x, y) + 0.0 * PUBLIC[0]


PUBLIC = np.linspace(0.0, 1.0, 30, dtype=np.float32)


def whole(client):
    """Return a plan whose client declares one release of its whole update."""
    chain = chained(adjacency="replace_one")
    release = Release(chain, batches.without_replacement(3), 1, STEPS)
    return build(client, releases=(release,), mechanism=chain)


FINE = dict(
    fedavg=lambda: build(fedavg_client),
    twice=lambda: build(twice_client, 2),
    in_a_loop=lambda: build(split_client, 3),
    more_declared=lambda: build(fedavg_client, 2),
    by_hand=lambda: build(gradient_of(lambda *of: batch_of_step(*of, 0)), steps=1),
    stacked_keys=lambda: build(steps_of(lambda key, s: jnp.stack([*jax.random.split(key)])[s])),
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
        jfl.algorithms.averaged(build(fedavg_client).algorithm),
        FULL,
    ),
)


@pytest.mark.parametrize("name", FINE)
def test_what_users_write_passes(name):
    plan = FINE[name]()
    found, report = verdict(plan)
    assert found.status == "proved" and check.DECLARED not in found.caveats, report
    assert not trust.is_trusted(plan)


# --- what leaks


def sends(leak):
    """Return a client that trains in private and adds `leak` to what it sends."""

    def client(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(work, ctx, keys, server, rows)
        more = leak(ctx=ctx, keys=keys, own=own, rows=rows, work=work, moved=moved, server=server)
        more = more if isinstance(more, dict) else dict(b=more)
        return {k: v + more[k] if k in more else v for k, v in moved.items()}, own, seen

    return client


def trains(change):
    """Return a client that trains in private, but with another work, keys, model or rows."""

    def client(ctx, keys, server, own, rows, *, work):
        given = dict(work=work, ctx=ctx, keys=keys, server=server, rows=rows)
        moved, seen = diff_of(**{**given, **change(**given)})
        return moved, own, seen

    return client


def steps_of(noise_key=jax.random.fold_in, batch_of=batches.gather):
    """Return a client with private steps written by hand."""

    def client(ctx, keys, server, own, rows, *, work):
        def step(w, s):
            at, mask, _ = batches.draw_slots(
                work.batches, keys.batch, s, rows.size, len(rows.index)
            )
            gradient = work.grad(noise_key(keys.noise, s), w, batch_of(rows, at, mask), ctx)[0]
            return pytrees.axpy(-0.1, gradient, w), ()

        w, _ = jax.lax.scan(step, server.params, jnp.arange(STEPS))
        return pytrees.sub(w, server.params), own, NOTHING

    return client


def twice(keys_of, other=lambda work: work):
    """Return a client that sends the difference of two trainings with these keys."""

    def client(ctx, keys, server, own, rows, *, work):
        first, seen = diff_of(work, ctx, keys_of(keys, 0), server, rows)
        second, _ = diff_of(other(work), ctx, keys_of(keys, 1), server, rows)
        return pytrees.sub(first, second), own, seen

    return client


def first_gradient(release):
    """Return a client that sends one release, of the batch of its first step."""

    def client(ctx, keys, server, own, rows, *, work):
        batch = batch_of_step(work, keys, rows, 0)
        return release(work, ctx, keys, server.params, batch), own, NOTHING

    return client


def contributes(release):
    """Return a client that sends one release of its whole update, trained without noise."""

    def client(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(bare(work), ctx, keys, server, rows)
        alone = pytrees.map(lambda x: x[None], moved)
        return release(work.grad.mechanism, keys.noise, alone), own, seen

    return client


def bare(work):
    return dataclasses.replace(work, grad=jfl.grad(squared))


def split_alike(keys, i):
    """Return two equal noise keys: child i of a split is fold_in(key, i)."""
    noise = jax.random.fold_in(keys.noise, 1) if i else jax.random.split(keys.noise, 3)[1]
    return Keys(jax.random.fold_in(keys.batch, i), noise)


def other_chain(work, **_):
    """Use less noise than the algorithm declares."""
    quiet = lambda s: dataclasses.replace(s, noise=s.noise * 0.1) if s.role == "noise" else s
    stages = tuple(map(quiet, work.grad.mechanism.stages))
    chain = dataclasses.replace(work.grad.mechanism, stages=stages)
    grad = dataclasses.replace(work.grad, mechanism=chain)
    return dict(work=dataclasses.replace(work, grad=grad))


@jax.custom_batching.custom_vmap
def mixed(x):
    return x


@mixed.def_vmap
def _(size, batched, x):
    return jnp.broadcast_to(x.sum(0), x.shape), True


def loss_that_mixes_rows(w, x, y):
    return squared(w, jax.lax.stop_gradient(mixed(x)), y)


@jax.jit
def mixed_gradient(chain, key, params, batch, ctx):
    return jfl.private_grad(loss_that_mixes_rows, chain)(key, params, batch, ctx)[0]


def by_a_mixed_loss_within_jit(work, ctx, keys, params, batch):
    return mixed_gradient(work.grad.mechanism, keys.noise, params, batch, ctx)


def after_the_last_loss(ctx, keys, server, own, rows, *, work):
    """Compute gradients at a model that contains the loss of the batch before, without noise."""

    def step(carry, s):
        w, total = carry
        batch = batch_of_step(work, keys, rows, s)
        g, (loss, _) = work.grad(jax.random.fold_in(keys.noise, s), w, batch, ctx)
        return (pytrees.map(lambda x: x + loss, w), pytrees.add(total, g)), None

    start = server.params, pytrees.zeros_like(server.params)
    return jax.lax.scan(step, start, jnp.arange(STEPS))[0][1], own, NOTHING


def by_carry(rows, **_):
    step = lambda carry, _: ((carry[0] * 0.9, carry[0]), None)
    return jax.lax.scan(step, (all_rows(rows).y.sum(), jnp.zeros(())), length=4)[0][1]


def by_while(rows, **_):
    largest = jnp.abs(all_rows(rows).y).max()
    more = lambda c: (c[0] + 1, c[1] + 0.1)
    return jax.lax.while_loop(lambda c: c[1] < largest, more, (0, jnp.zeros(())))[0]


def by_cond(rows, **_):
    return jax.lax.cond(all_rows(rows).y.sum() > 0, lambda: 1.0, lambda: 0.0)


def by_reduce(rows, **_):
    return jax.lax.reduce(all_rows(rows).y, 0.0, lambda a, b: b, (0,))


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)
THREE = np.arange(3, dtype=np.float32)


def by_callback(ctx, **_):
    return jax.pure_callback(lambda r: np.float32(0), NUMBER, ctx.round)


def by_callback_beside_an_array(ctx, **_):
    within = jax.jit(lambda r: jax.pure_callback(lambda _: np.float32(0), NUMBER, r) * THREE.sum())
    return jax.jit(lambda r: within(r) * jnp.asarray(THREE).sum())(ctx.round)


def by_buffer_callback(ctx, **_):
    return buffer_callback.buffer_callback(lambda _, out, *inputs: None, NUMBER)(ctx.round)


def by_callback_in_a_solve(ctx, **_):
    solve = lambda _, right: jax.pure_callback(lambda v: np.float32(v), NUMBER, right)
    right = ctx.round.astype(jnp.float32)
    return jax.lax.custom_linear_solve(lambda v: 2 * v, right, solve, symmetric=True)


def who_was_drawn(work, keys, rows, **_):
    return batches.draw_slots(work.batches, keys.batch, 0, rows.size, rows.index.shape[0])[0].sum()


def after_the_noise(work, ctx, keys, server, rows, moved, **_):
    """Turn the payload into release + raw - release."""
    return pytrees.sub(diff_of(bare(work), ctx, keys, server, rows)[0], moved)


def through_memory(ctx, keys, server, own, rows, *, work):
    moved, seen = diff_of(work, ctx, keys, server, rows)
    return dict(moved, w=moved["w"] + own["held"]), dict(held=all_rows(rows).x.sum(0)), seen


def equal_keys_by_a_cast(ctx, keys, server, own, rows, *, work):
    """Two gradients with one noise key: XLA converts 3e9 to the largest integer, NumPy does not."""
    largest = jnp.asarray(np.array([3e9, 1.0], np.float32))[0].astype(jnp.int32)
    one, other = (
        work.grad(
            jax.random.fold_in(keys.noise, number),
            server.params,
            batch_of_step(work, keys, rows, s),
            ctx,
        )[0]
        for s, number in enumerate((largest, jnp.int32(2**31 - 1)))
    )
    return pytrees.sub(one, other), own, NOTHING


def gradient_of(batch_of):
    """Return a client that sends one private gradient, of a batch that it chooses."""

    def client(ctx, keys, server, own, rows, *, work):
        batch = batch_of(work, keys, rows)
        return work.grad(keys.noise, server.params, batch, ctx)[0], own, NOTHING

    return client


def step_by_data(work, keys, rows):
    """Choose the batch with the largest label, which is no random sample."""
    best = jnp.argmax(jnp.array([batch_of_step(work, keys, rows, s).y.max() for s in range(4)]))
    return batch_of_step(work, keys, rows, best)


def key_by_data(work, keys, rows):
    key = jax.random.fold_in(keys.batch, all_rows(rows).y.argmax())
    return batch_of_step(work, Keys(key, keys.noise), rows, 0)


def one_row_in_all_slots(work, keys, rows):
    at = jnp.zeros(rows.index.shape[0], jnp.int32)
    return batches.gather(rows, at, at < rows.size)


def a_key_for_later(ctx, keys, server, own, rows, *, work):
    """Keep the noise key, and subtract this round's noise in the next round."""
    moved, seen = diff_of(work, ctx, keys, server, rows)
    late = jax.random.normal(jax.random.fold_in(own["key"], 0))
    return dict(moved, b=moved["b"] - late), dict(key=keys.noise), seen


def its_own_noise_away(work, ctx, keys, params, batch):
    """Draw the noise again with the same key, and subtract it."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    return pytrees.sub(g, pytrees.scale(1.1 * 2 * 0.8 / 3, normals(keys.noise, g)))


def a_chosen_key(work, ctx, keys, params, batch):
    """Do the same with a key that equals that of the noise only in some rounds."""
    g = work.grad(keys.noise, params, batch, ctx)[0]
    key = jnp.where(ctx.round > 3, keys.noise, jax.random.key(0))
    return dict(g, b=g["b"] - jax.random.normal(key))


def unclipped(work, ctx, keys, params, batch):
    g = jfl.grad(squared)(None, params, batch, ctx)[0]
    return mech.release_sum(work.grad.mechanism, keys.noise, (), g)[0]


def of_a_tangent(work, ctx, keys, params, batch):
    """Return the derivative of a release, which has no noise."""
    release = lambda w: work.grad(keys.noise, w, batch, ctx)[0]
    return jax.jvp(release, (params,), (pytrees.map(jnp.ones_like, params),))[1]


def until_it_fits(ctx, keys, server, own, rows, *, work):
    """Release until the result is small, so that the number of releases is unknown."""

    def again(carry):
        s, _ = carry
        key, batch = jax.random.fold_in(keys.noise, s), batch_of_step(work, keys, rows, s)
        return s + 1, work.grad(key, server.params, batch, ctx)[0]

    is_large = lambda c: (c[0] < 1) | (jnp.abs(c[1]["b"]) > 0.1)
    start = (0, pytrees.zeros_like(server.params))
    return jax.lax.while_loop(is_large, again, start)[1], own, NOTHING


def many_passes(ctx, keys, server, own, rows, *, work):
    again = lambda key, _: (jax.random.fold_in(key, 1), None)
    late = jax.lax.scan(again, keys.noise, length=20_000)[0]
    return *diff_of(work, ctx, Keys(keys.batch, late), server, rows)[:1], own, NOTHING


def leak(client, pattern, **options):
    """Return a case: a client, options of `build`, and a pattern of what is found."""
    return client, options, pattern


fold_noise = lambda keys, i: Keys(keys.batch, jax.random.fold_in(keys.noise, i))
faster = lambda work: dataclasses.replace(work, lr=jnp.float32(0.2))
foreign_rows = lambda rows, **_: dict(rows=rows._replace(index=rows.index[::-1] + 1))
constant_key = lambda keys, **_: dict(keys=Keys(keys.batch, jax.random.key(0)))
mean_row = lambda rows, **_: dict(w=1e-6 * rows.x[rows.index].mean(0))
mean_label = lambda rows, **_: all_rows(rows).y.sum() / rows.size
SHARED = "two releases share one noise key"
READS = "reads the noise key of a release"
RAW = r"rows reach what the client sends without noise|may be another client's"
UNBOUNDED = "noise on a sum that no row stage of its chain bounds"
FOREIGN = "may not be the client's own"
MIXING = "what custom_vmap_call does"
MIXED = "rows reach the gradient of another row"
HELD_ROW, HELD_KEY = dict(held=jnp.zeros(3)), dict(key=jax.random.key(0))


def by_a_mutable_array(rows, **_):
    held = jax.new_ref(jnp.zeros(()))
    held[...] = all_rows(rows).x.sum()
    return held[...]


def by_a_frozen_array(rows, **_):
    held = jax.new_ref(jnp.zeros(()))

    def write(i, carry):
        held[...] = all_rows(rows).x.sum()
        return carry

    jax.lax.fori_loop(0, 2, write, 0)
    return jax.freeze(held)


MUTANTS = dict(
    raw_rows=leak(sends(mean_row), r"rows\.x -> gather -> .*payload\['w'\]"),
    raw_labels=leak(sends(mean_label), r"rows -> .* -> add -> payload\['b'\]"),
    one_key=leak(twice(lambda keys, i: keys, faster), SHARED, times=2),
    one_draw=leak(twice(fold_noise), "share one draw", times=2),
    split_alike=leak(twice(split_alike), SHARED, times=2),
    twice_declared_once=leak(twice_client, "4 releases, 2 declared"),
    loop_declared_twice=leak(split_client, "6 releases, 4 declared", times=2),
    constant_key=leak(trains(constant_key), "noise key does not come from keys.noise"),
    same_in_every_step=leak(
        steps_of(lambda key, s: key), "iterations of a loop share one noise key"
    ),
    unclipped=leak(first_gradient(unclipped), UNBOUNDED + ": rows -> ", steps=1),
    memory=leak(
        through_memory,
        r"rows -> .*own\['held'\] -> add -> payload\['w'\]",
        own=HELD_ROW,
        stateful=True,
    ),
    cond=leak(sends(by_cond), r"-> cond -> .*payload\['b'\]"),
    carry=leak(sends(by_carry), RAW),
    while_=leak(sends(by_while), r"-> while -> .*payload\['b'\]"),
    reduce=leak(sends(by_reduce), RAW),
    callback=leak(sends(by_callback), "what pure_callback does"),
    callback_beside_an_array=leak(sends(by_callback_beside_an_array), "what pure_callback does"),
    buffer_callback=leak(sends(by_buffer_callback), "what buffer_callback does"),
    mutable_array=leak(sends(by_a_mutable_array), "what a mutable array does"),
    frozen_array=leak(sends(by_a_frozen_array), "what a mutable array does"),
    callback_in_a_solve=leak(sends(by_callback_in_a_solve), "what custom_linear_solve does"),
    after_the_noise=leak(sends(after_the_noise), RAW),
    noise_away=leak(first_gradient(its_own_noise_away), READS, steps=1),
    chosen_key=leak(first_gradient(a_chosen_key), READS, steps=1),
    key_for_later=leak(
        a_key_for_later, "a noise key outlives its round", own=HELD_KEY, stateful=True
    ),
    equal_keys_by_a_cast=leak(equal_keys_by_a_cast, r"a number\) and fold_in", times=2, steps=1),
    tangent=leak(first_gradient(of_a_tangent), RAW, steps=1),
    mixing_loss_in_jit=leak(first_gradient(by_a_mixed_loss_within_jit), MIXING, steps=1),
    last_loss=leak(after_the_last_loss, MIXED),
    other_batches=leak(
        steps_of(batch_of=lambda rows, at, mask: all_rows(rows)),
        "this adjacency and these batches",
    ),
    one_row_in_all_slots=leak(
        gradient_of(one_row_in_all_slots), FOREIGN, steps=1, batch=batches.full()
    ),
    step_by_data=leak(gradient_of(step_by_data), FOREIGN, steps=1),
    key_by_data=leak(gradient_of(key_by_data), FOREIGN, steps=1),
    who_was_drawn=leak(sends(who_was_drawn), "which rows were drawn"),
    someone_elses=leak(trains(foreign_rows), FOREIGN),
    until_it_fits=leak(until_it_fits, "what while does", steps=1),
    other_chain=leak(trains(other_chain), "no declared release has this chain"),
)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name):
    client, options, pattern = MUTANTS[name]
    caught(build(client, **options), pattern)


def test_too_many_passes_are_not_followed():
    report = jfl.check_privacy(build(many_passes))
    assert report.status == "conditional"
    assert "could not be followed: ValueError: its loops have more than 10,000" in str(report)


# --- the number of rows


def times_size(rows, moved, **_):
    return pytrees.map(lambda x: x * rows.size, moved)


def as_often_as_rows(ctx, moved, **_):
    more = lambda i, x: pytrees.map(lambda leaf: 1.5 * leaf, x)
    return jax.lax.fori_loop(0, ctx.size, more, moved)


def at_params_times_size(work, ctx, keys, params, batch):
    """Let the number of rows change the gradients of all rows."""
    return work.grad(keys.noise, pytrees.map(lambda x: x * ctx.size, params), batch, ctx)[0]


def size_of_the_last_round(ctx, keys, server, own, rows, *, work):
    diff, seen = diff_of(work, ctx, keys, server, rows)
    sent = pytrees.map(lambda x: x * own["size"], diff)
    return sent, dict(size=rows.size * jnp.float32(1)), seen


SIZES = dict(
    times_size=leak(sends(times_size), ""),
    as_often_as_rows=leak(sends(as_often_as_rows), ""),
    at_params_times_size=leak(first_gradient(at_params_times_size), "", steps=1),
    size_of_the_last_round=leak(
        size_of_the_last_round, "", own=dict(size=jnp.zeros(())), stateful=True
    ),
)


@pytest.mark.parametrize("name", SIZES)
def test_the_number_of_rows_is_data_where_a_row_comes_or_goes(name):
    client, options, _ = SIZES[name]
    pattern = r"rows\.size -> .*(payload|clipped sum)"
    caught(build(client, batch=batches.poisson(3.0), **options), pattern)
    found, _ = verdict(build(client, batch=batches.without_replacement(3), **options))
    assert found.status == "proved" and found.adjacency == "replace_one"


def test_batches_may_follow_the_number_of_rows():
    found, _ = verdict(build(fedavg_client, batch=batches.poisson(rate=0.4, capacity=40)))
    assert found.status == "proved" and found.adjacency == "add_remove"


# --- constants that a guarantee assumes to be public


def assumed(plan, **options):
    """Return the last caveat of a guarantee if it lists constants, otherwise ""."""
    found = jfl.guarantee(plan, 2, **options)
    said = [i for i, c in enumerate(found.caveats) if code_of(c) == "public-constants"]
    assert said in ([], [len(found.caveats) - 1])
    return found.caveats[-1] if said else ""


SOMEBODYS = np.linspace(0.1, 0.9, 4).astype(np.float32)  # nobody can say what it was made of
ZEROS = jfl.task(jax.tree.map(jnp.zeros_like, start_params()), squared)
DRAWN = jfl.task(
    lambda key: jax.tree.map(lambda x: jax.random.normal(key, x.shape), start_params()), squared
)


def of_parts(task=ZEROS, noise=None, **options):
    grad = jfl.private_grad(task.loss, noise or chained())
    algorithm = jfl.algorithms.fedavg(grad, lr=0.1, steps=2, batch=batches.without_replacement(3))
    return jfl.plan(make_federation(), task, algorithm, FULL, **options)


def plus(value):
    return pytrees.map(lambda leaf: leaf + jnp.asarray(SOMEBODYS)[1], value)


INIT = r"starting parameters .*float32\["
WEIGHED = lambda w, x, y: squared(w, x, y) * jnp.asarray(SOMEBODYS).sum()
DRAWN_PLUS = lambda key: jax.tree.map(lambda x: x + jnp.asarray(SOMEBODYS)[2], start_params())
NOISY = jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.1), jfl.divide(3.0)
OF_CLIENTS = jfl.gaussian(jnp.linspace(1.0, 2.0, CLIENTS))
NAMED = {
    "start": (lambda: of_parts(jfl.task(start_params(), squared)), INIT),
    "init": (lambda: of_parts(jfl.task(DRAWN_PLUS, squared)), INIT + r"4\]"),
    "loss": (lambda: of_parts(jfl.task(start_params(), WEIGHED)), r"loss float32\[4\]"),
    "stage": (
        lambda: of_parts(noise=jfl.chain(*NOISY, jfl.post_process(plus))),
        r": post_process float32\[4\]\.",
    ),
    "noise": (
        lambda: of_parts(noise=jfl.chain(*NOISY[:2], OF_CLIENTS, jfl.divide(3.0))),
        rf": gaussian float32\[{CLIENTS}\]\.",
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


def test_what_is_drawn_or_jfls_is_not_named():
    noise = jfl.correlated(3.0, jfl.strategies.inverse_banded(4, 2))
    for plan in (
        of_parts(),
        of_parts(DRAWN),
        of_parts(weights="size"),
        of_parts(release=jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(4.0))),
    ):
        assert not assumed(plan)


@pytest.mark.slow
def test_bare_numbers_warn():
    """Functions that return only an epsilon warn if the guarantee is conditional."""
    plan, fine = build(MUTANTS["raw_rows"][0]), build(fedavg_client)
    assert jfl.guarantee([(fine, 2), (plan, 1)]).status == "conditional"
    for ask in (
        lambda p: jfl.epsilons(p, np.arange(1, 3)),
        lambda p: jfl.calibrate(p, epsilon=9.0, rounds=2),
        lambda p: guarantees.epsilons_per_client(p, 2),
        lambda p: calibration.calibrate_per_client(p, epsilon=9.0, rounds=2),
    ):
        with pytest.warns(UserWarning, match=check.DECLARED):
            ask(plan)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ask(fine)


def of_two_sums(chain, key, alone):
    """Release the sum of two bounded sums, which exceeds the bound."""
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


def remembered(full=False, reads=lambda state: state):
    """Return a plan whose client releases a sum, which it keeps, of all gradients that it drew."""
    chain = chained(adjacency="replace_one")
    batch = batches.full() if full else batches.without_replacement(3)

    def client(ctx, keys, server, own, rows, *, work):
        moved, seen = diff_of(bare(work), ctx, keys, server, rows)
        own = pytrees.add(reads(own), moved)
        alone = pytrees.map(lambda x: x[None], own)
        sent = mech.release(work.grad.mechanism, keys.noise, (), alone, jnp.ones(1))[0]
        return sent, own, seen

    return build(
        client,
        own=pytrees.zeros_like(start_params()),
        stateful=True,
        releases=(Release(chain, batch, 1, STEPS),),
        mechanism=chain,
        batch=batch,
    )


def test_a_contribution_of_earlier_rows_counts_only_with_full_batches():
    """A row that was drawn once is in all later releases, so its batch does not amplify them."""
    caught(remembered(), "client state that depends on earlier rounds needs batches.full")
    assert verdict(remembered(full=True))[0].status == "proved"
    forgets = remembered(reads=pytrees.zeros_like)
    assert verdict(forgets)[0].status == "proved"


@pytest.mark.parametrize("hide", [False, True])
def test_rows_behind_an_earlier_release_are_found(hide):
    """A contribution that depends on a noisy gradient which is not sent depends on its rows."""
    chain = chained(adjacency="replace_one")

    def client(ctx, keys, server, own, rows, *, work):
        batch = batch_of_step(work, keys, rows, 0)
        if hide:  # all rows, by another way than gather, reach the gradient of each row
            batch = batch._replace(x=batch.x + rows.x.mean())
        noisy, *_ = work.grad(jax.random.fold_in(keys.noise, 1), server.params, batch, ctx)
        alone = pytrees.map(lambda x: x[None], noisy)
        key = jax.random.fold_in(keys.noise, 0)
        sent = mech.release(work.grad.mechanism, key, (), alone, jnp.ones(1))[0]
        return sent, own, NOTHING

    release = Release(chain, batches.without_replacement(3), 1, 1)
    plan = build(client, releases=(release,), mechanism=chain)
    if hide:
        caught(plan, "rows are read other than by batches.gather")
    else:
        assert verdict(plan)[0].status == "proved"


@pytest.mark.parametrize("scheme", ["poisson", "truncated_poisson"])
def test_one_contribution_of_a_poisson_batch_is_no_sum(scheme):
    """Without a row, a contribution may lie anywhere in its ball, and not only in the middle.

    A release of one gradient counts half of the distance for a batch without the row, so only a
    release with steps proves such a contribution.
    """
    chain = chained(adjacency="replace_one")
    batch = batches.poisson(1.0) if scheme == "poisson" else batches.truncated_poisson(1.0, 2)
    of = lambda steps: build(
        release_with(1.0),
        releases=(Release(chain, batch, 1, steps),),
        mechanism=chain,
        batch=batch,
        steps=1,
    )
    caught(of(0), r"needs jfl.Release\(steps=their number\)")
    assert verdict(of(1))[0].status == "proved"


@pytest.mark.parametrize("noisy_first", [True, False])
def test_a_release_that_begins_inside_an_epoch_is_not_proved(noisy_first):
    """Two batches of one release may both hold a row if they belong to two epochs.

    Epochs have two batches.  A release that begins with step 1 was counted as one release of the
    row.  With noise multipliers 100 and 0.3, 19.13 was proved at delta = 1e-5, where delta is at
    least 3.7e-3.
    """
    sizes, halves = np.asarray(make_federation().size), batches.epochs(5)
    assert (-(-sizes // 5) == 2).any()
    loud, quiet = (
        jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(z), jfl.divide(3.0))
        for z in (100.0, 0.3)
    )
    once = work(batch=halves, mechanism=loud, steps=1)
    twice = work(batch=halves, mechanism=quiet, steps=2)

    def client(ctx, keys, server, own, rows, *, work):
        first, second = work
        w, _, _, seen = training.train(first, ctx, keys, server.params, rows)
        moved, *_ = training.train(second, ctx, keys, w, rows, first=first.steps)
        return pytrees.sub(moved, w), own, seen

    both = (once, twice) if noisy_first else (twice, once)
    plan = build(client, wanted=both, releases=(*both[0].releases(), *both[1].releases()))
    if noisy_first:
        caught(plan, "does not begin with step 0")
    else:
        assert verdict(plan)[0].status == "proved"


@pytest.mark.parametrize("name", ["mimelite", "qfedavg"])
def test_releases_that_follow_whole_epochs_are_proved(name, fed, task):
    """Their last release reads one batch more, and may reach the payload before the others."""
    algorithm = make_algorithm(name, noisy_grad(), batch=batches.epochs(5))
    assert verdict(jfl.plan(fed, task, algorithm, FULL))[0].status == "proved"


# --- what is declared, or held


def _halved(state, row, *, bound):
    return row, jnp.zeros((), bool)


def _too_small(state, shape, *, bound):
    return bound


def false_stage(bound=0.8):
    data = dict(bound=np.float32(bound))
    return Stage(Fn(_halved, data), Fn(_too_small, data), name="clip_l2")


def tampered(stage):
    """Return jfl's clip with a smaller bound than it clips to, a declared bound under the name of a
    clip, or a user's stage."""
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
    sites = {} if site == "rows" else {site: chain}
    plan = jfl.plan(fed, task, make_algorithm("fedavg", grad), FULL, **sites)
    found = jfl.guarantee(plan, 3, view="third_party" if site == "release" else "server")
    assert found.status == "conditional" and check.DECLARED in found.caveats
    assert any("bound of the row stage" in c for c in found.caveats)
    assert jfl.check_privacy(plan).status == "conditional"


def test_every_row_stage_of_jfl_is_known():
    like = start_params()
    haar = jfl.bands.flat(like)
    made = [
        jfl.clip_l2(calming),
        jfl.clip_automatic(),
        jfl.clip_l1(1.0),
        jfl.clip_per_layer((1.0, 2.0)),
        jfl.clip_adaptive(1.0, 3),
        jfl.clip_scaled(1.0, 3, like=like),
        jfl.wavelet.clip_ellipsoid(1.0, jfl.wavelet.ellipsoid(haar)),
        jfl.wavelet.clip_bands(np.ones(jfl.bands.count(haar)), haar),
        jfl.wavelet.shares(haar),
        jfl.bounded(1.0, "prox_erm"),
    ]
    made += [
        jfl.wavelet.published(r, 1.0, 1.0, haar, unsound=True)[0] for r in jfl.wavelet.READINGS
    ]
    assert all(map(trust.is_own_row_stage, made))
    assert {s.apply.function for s in made} == {*trust.ROW_STAGES, stages._keep_row}
    other_bound = Fn(stages._layers_bound, made[0].bound.data, made[0].bound.static)
    assert not trust.is_own_row_stage(dataclasses.replace(made[0], bound=other_bound))


def test_what_a_user_says_of_samplers_and_releases(fed, task):
    """Samplers that state another scheme than they draw, and releases of another client."""
    few = batches.without_replacement(3)
    of_batch = lambda batch: make_algorithm("fedavg", noisy_grad(), batch=batch)
    lying = of_batch(dataclasses.replace(few, draw=batches.full().draw))
    sampler = jfl.sampling.without_replacement(CLIENTS, 2)
    sampler = dataclasses.replace(sampler, draw=FULL.draw, capacity=CLIENTS)
    fair = of_batch(few)
    (one,) = fair.releases
    released = lambda **change: jfl.plan(
        fed,
        task,
        dataclasses.replace(fair, releases=(dataclasses.replace(one, **change),)),
        FULL,
    )
    for plan, pattern in (
        (jfl.plan(fed, task, lying, FULL), "which rows a batch holds"),
        (jfl.plan(fed, task, fair, sampler), "who takes part"),
        (released(count=1), "2 releases, 1 declared"),
        (released(mechanism=noisy_grad(z=9.0).mechanism), "no declared release has this chain"),
        (released(batches=batches.without_replacement(1)), "this adjacency and these batches"),
    ):
        found = jfl.guarantee(plan, 3)
        assert found.status == "conditional" and re.search(pattern, "\n".join(found.caveats)), found
    assert jfl.guarantee(jfl.plan(fed, task, fair, FULL), 3).status == "proved"


def test_whole_clients(fed, task):
    """Noise on the release protects whole clients if a client reads only its own rows and declares
    its state."""
    cohorts = jfl.sampling.without_replacement(CLIENTS, 3)
    without_noise = bare(work())

    def judged(client, unit="client", **options):
        made = build(client, releases=(), wanted=without_noise, **options).algorithm
        plan = jfl.plan(fed, task, made, cohorts, release=noisy_release())
        return jfl.guarantee(plan, 3, unit=unit, view="third_party")

    leaks = {name: client for name, (client, *_) in MUTANTS.items()}
    # its own labels, under the noise of the release
    assert judged(leaks["raw_labels"]).status == "proved"
    for name in ("raw_rows", "someone_elses"):
        found = judged(leaks[name])
        assert found.status == "conditional" and any("another client's" in c for c in found.caveats)
    assert any("stateful=True" in c for c in judged(through_memory, own=HELD_ROW).caveats)
    assert judged(through_memory, own=HELD_ROW, stateful=True).status == "proved"
    assert judged(leaks["callback"]).status == "conditional"
    assert judged(leaks["raw_rows"], unit="example").status == "conditional"


# --- rows in closures

HELD = dict(
    x=lambda fed: fed.x,
    y=lambda fed: fed.y,
    reshaped=lambda fed: fed.x.reshape(-1),
    double=lambda fed: np.asarray(fed.x, np.float64),
)


def _weighed(round_, *, by):
    return jnp.ones(CLIENTS) + 0 * by.sum()


def holding(held):
    """Return a loss that holds an array."""
    return lambda w, x, y: squared(w, x, y) + 0.0 * jnp.asarray(held).astype(jnp.float32).sum()


@pytest.mark.parametrize("how", HELD)
def test_functions_that_hold_rows_are_refused(how, task):
    fed = make_federation()
    with pytest.raises(ValueError, match=r"holds fed\.[xy]"):
        private_plan(fed, task, holding(HELD[how](fed)))


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


def by_gradient(held):
    """Return a loss whose custom derivative holds rows."""

    @jax.custom_vjp
    def loss(w, x, y):
        return squared(w, x, y)

    loss.defvjp(
        lambda w, x, y: (squared(w, x, y), (w, x, y)),
        lambda r, g: (dict(b=g, w=jnp.asarray(held)[0] * g), jnp.zeros(3), jnp.zeros(())),
    )
    return loss


def _adds(f, leak):
    """Return a function that adds the result of `leak` to all numbers that `f` returns."""
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


def test_a_client_that_holds_rows_within_a_jit_is_refused():
    held = np.asarray(make_federation().x)
    sums = jax.jit(lambda v: v * jnp.asarray(held).sum(0))
    with pytest.raises(ValueError, match="holds fed.x"):
        build(sends(lambda moved, **_: dict(w=sums(moved["w"]))))


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
    elif part == "weights":
        options["weights"] = lambda round_: jnp.ones(CLIENTS) + 0 * y.sum()
    elif part == "bound":
        options["weights"] = Fn(_weighed, dict(by=fed.y))
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
    grad = jfl.private_grad(holding(fed.x), chained(adjacency="replace_one"))
    leaky = make_algorithm("fedavg", grad)
    bad = dataclasses.replace(private_plan(fed, task), algorithm=leaky)
    for ask in (
        lambda: jfl.guarantee(bad, 3),
        lambda: jfl.epsilons(bad, np.arange(3)),
        lambda: jfl.calibrate(bad, epsilon=1.0, rounds=2),
        lambda: jfl.check_privacy(bad),
    ):
        with pytest.raises(ValueError, match="fed.x"):
            ask()


def test_what_is_not_the_federations_may_be_held(task):
    """Public rows, shapes, rows that no client owns, and the number of classes may be held."""
    fed = make_federation()
    owned = np.concatenate([np.asarray(fed.index[c, :s]) for c, s in enumerate(fed.size)])
    unowned = np.delete(np.asarray(fed.x), owned, axis=0)
    sizes = lambda w, a, b: squared(w, a, b) / fed.x.shape[0] + fed.classes
    for loss in (holding(make_federation(3).x), holding(unowned), holding(np.arange(40)), sizes):
        assert jfl.guarantee(private_plan(fed, task, loss), 3).status == "proved"


def test_a_loss_that_calls_python_is_declared(fed, task):
    def calling(w, x, y):
        call = lambda v: np.float32(0)
        told = jax.pure_callback(call, NUMBER, y, vmap_method="sequential")
        return squared(w, x, y) + jax.lax.stop_gradient(told)

    def printing(w, x, y):
        jax.debug.print("{}", y)
        return squared(w, x, y)

    found = jfl.guarantee(private_plan(fed, task, calling), 3)
    assert found.status == "conditional"
    assert any("pure_callback in the loss" in c for c in found.caveats)
    assert jfl.guarantee(private_plan(fed, task, printing), 3).status == "proved"

    # No release depends on what only measures a model.
    measured = jfl.task(start_params(), squared, evaluation=calling)
    plain = make_algorithm("fedavg", jfl.grad(squared))
    plan = jfl.plan(fed, measured, plain, FULL, release=noisy_release())
    assert jfl.guarantee(plan, 3).status == "proved"


def test_a_server_that_calls_python_is_declared():
    """Data that a client passes to Python, as by a debug callback, may return in the server."""
    seen = [np.float32(0)]

    def tells(rows, **_):
        jax.debug.callback(lambda y: seen.append(np.float32(y)), all_rows(rows).y[0])
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


def test_a_users_rule_for_a_function_of_a_library_is_found():
    """A custom derivative or batching rule is run, so it is searched for rows as well."""
    rules = [lambda *args: (args[0], args), lambda residuals, cotangent: residuals]
    derived = jax.custom_vjp(optax.l2_loss)
    derived.defvjp(*rules)
    batched = jax.custom_batching.custom_vmap(optax.l2_loss)
    batched.def_vmap(rules[0])
    found = trust.user_objects_in(derived)
    assert all(rule in found for rule in rules) and len(found) == 2
    assert trust.user_objects_in(batched) == rules[:1]
    assert not trust.user_objects_in([jax.nn.relu, jax.jit(optax.l2_loss)])


# --- cost


def test_marks_lower_to_nothing(monkeypatch):
    """A private gradient compiles to the same operations with marks and without."""
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
