"""Runs that are watched: progress, early stopping, checkpoints, logs; when programs compile."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation, same_bits

import jfl
from jfl.engine import simulate as sim

KEY = jax.random.key(0)
SAME = dict(evaluate_every=2)


def plan_of(lr=0.3, noise=0.5, **parts):
    fed = make_federation(classes=3, held_out=1)
    task = jfl.models.logistic(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(2))
    algorithm = jfl.algorithms.scaffold(
        jfl.private_grad(task.loss, chain), lr=lr, steps=2, batch=jfl.batches.without_replacement(2)
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), **parts)


@pytest.fixture(scope="module")
def plan():
    return plan_of()


@pytest.fixture(scope="module")
def whole(plan):
    return jfl.simulate(KEY, plan, 7, **SAME)


@pytest.mark.slow
def test_a_watched_run_is_the_run(plan, whole, capfd):
    """Same draws, same program, whatever looks on; each moment is a state of its own."""
    moments, rows = [], []
    before = sim._scan._cache_size()
    out = jfl.simulate(
        KEY,
        plan,
        7,
        progress=True,
        callbacks=[moments.append, jfl.callbacks.log(rows.append)],
        **SAME,
    )
    assert sim._scan._cache_size() == before
    assert same_bits(out.run, whole.run) and same_bits(out.metrics, whole.metrics)
    assert [m.round for m in moments] == [2, 4, 6, 7] and {m.last for m in moments} == {7}
    assert [len(m.history.loss) for m in moments] == [1, 2, 3, 4]
    assert same_bits(moments[-1].run, whole.run)
    for m, loss, row in zip(moments, whole.metrics.loss, rows, strict=True):
        assert float(m.metrics.loss) == float(loss) == row["loss"]
        assert "client_percentiles" not in row  # no number
    again = jfl.simulate(KEY, plan, 5, start=moments[0].run, evaluate_every=5)
    assert same_bits(again.run, whole.run)  # a moment's run may be kept
    assert "rounds" in capfd.readouterr().err


def test_early_stopping(plan, whole):
    """Stops after `patience` evaluations without an improvement, with what was done until then."""
    stop = jfl.callbacks.early_stopping("round", patience=1, larger=False)
    out = jfl.simulate(KEY, plan, 7, callbacks=[stop], **SAME)
    # the first is an improvement on nothing, the second is none
    assert int(out.run.round) == 4 and len(out.metrics.loss) == 2
    assert np.array_equal(out.metrics.loss, whole.metrics.loss[:2])
    assert same_bits(jfl.simulate(KEY, plan, 3, start=out.run, **SAME).run, whole.run)


@pytest.mark.parametrize(
    "metric, values, larger, stops",
    [
        ("loss", [3, 2, 1, 1, 1], None, 4),
        ("accuracy", [0.1, 0.2, 0.1, 0.2], None, 3),
        ("accuracy", [0.3, 0.2, 0.1, 0.1], False, None),
        ("perplexity", [9, 9, 9, 8], None, 2),
    ],
)
def test_what_counts_as_better(metric, values, larger, stops):
    """`stops`: the index of the evaluation at which it says so; None: not at all."""
    stop = jfl.callbacks.early_stopping(metric, patience=2, larger=larger)
    none = dict.fromkeys(jfl.Metrics.__dataclass_fields__)

    def moment(value):
        where = none | ({metric: value} if metric in none else dict(custom={metric: value}))
        return jfl.callbacks.Moment(0, 0, jfl.Metrics(**where), None, None, None)

    told = [stop(moment(v)) for v in values]
    assert (told.index(True) if any(told) else None) == stops


def test_a_checkpoint_goes_on(plan, whole, tmp_path):
    path = tmp_path / "runs" / "state.npz"
    stop = lambda moment: moment.round == 4
    jfl.simulate(KEY, plan, 7, callbacks=[jfl.callbacks.checkpoint(path), stop], **SAME)
    run = jfl.callbacks.restore(path, plan)
    assert same_bits(jfl.simulate(KEY, plan, 3, start=run, **SAME).run, whole.run)
    other = make_federation(classes=4)
    task = jfl.models.logistic(other)
    wider = jfl.plan(
        other, task, jfl.algorithms.fedsgd(jfl.grad(task.loss)), jfl.sampling.full(CLIENTS)
    )
    with pytest.raises(ValueError, match="callbacks.restore: expected a state of this plan"):
        jfl.callbacks.restore(path, wider)


def test_a_population_is_watched(tmp_path):
    """Rows on the host: the same loop, with the same stops."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(60, 3)).astype(np.float32), r.integers(0, 2, 60).astype(np.int32)
    fed = jfl.population((x, y), [10] * 6, test=(x[:9], y[:9]))
    task = jfl.models.logistic(fed)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss))
    plan = jfl.plan(fed, task, algorithm, jfl.sampling.without_replacement(6, 3))
    whole = jfl.simulate(KEY, plan, 4, **SAME)
    seen = []
    out = jfl.simulate(KEY, plan, 6, callbacks=[seen.append, lambda m: m.round == 4], **SAME)
    assert [m.round for m in seen] == [2, 4] and same_bits(out.params, whole.params)


def test_an_unhealthy_run_stops_at_its_evaluation():
    plan, seen = plan_of(lr=1e38, noise=1.0), []
    with pytest.raises(jfl.HealthError, match="by round [1-4] "):
        jfl.simulate(KEY, plan, 400, evaluate_every=2, callbacks=[seen.append])
    assert len(seen) <= 1


def test_another_number_of_rounds_compiles_nothing(plan, whole):
    before = sim._scan._cache_size()
    for rounds, every in ((1, 1), (3, 2), (20, 1), (40, None), (31, 1)):
        out = jfl.simulate(KEY, plan, rounds, evaluate_every=every)
        assert int(out.run.round) == rounds and int(out.metrics.round[-1]) == rounds
        assert len(out.metrics.loss) == len(sim.rounds_before_evaluations(rounds, every))
    assert sim._scan._cache_size() == before
    jfl.simulate(KEY, plan, 33, evaluate_every=1)  # more evaluations than there are places
    assert sim._scan._cache_size() == before + 1


def test_the_log_says_what_is_compiled(caplog):
    wide = make_federation(classes=5)
    task = jfl.models.mlp(wide, hidden=(5,))
    plan = jfl.plan(
        wide, task, jfl.algorithms.fedsgd(jfl.grad(task.loss)), jfl.sampling.full(CLIENTS)
    )
    with caplog.at_level(logging.INFO, "jfl"):
        jfl.simulate(KEY, plan, 2)
        first = caplog.text
        jfl.simulate(KEY, plan, 3)
    assert "compiled" in first and "fedsgd" in first and caplog.text.count("compiled") == 1


def test_bad_callbacks():
    plan = plan_of()
    with pytest.raises(ValueError, match="callbacks, functions of a Moment"):
        jfl.simulate(KEY, plan, 2, callbacks=[3])
    with pytest.raises(ValueError, match="a metric of this run: round, loss, accuracy"):
        stop = jfl.callbacks.early_stopping("f1")
        jfl.simulate(KEY, plan, 2, callbacks=[stop])
    with pytest.raises(ValueError, match="patience"):
        jfl.callbacks.early_stopping(patience=0)
    with pytest.raises(ValueError, match="callbacks.log"):
        jfl.callbacks.log("wandb")


def test_personal_models_are_judged_by_their_clients():
    """A client's own model, and percentiles over clients."""
    fed = make_federation(classes=3, held_out=2)

    def client(context, keys, server, own, rows):
        none = jnp.zeros((), jnp.int32)
        seen = jfl.Diagnostics(jnp.zeros(()), jnp.zeros(()), none, none)
        return jax.tree.map(jnp.zeros_like, server), own + 1.0, seen

    task = jfl.task(
        jnp.zeros((3, 3)), lambda w, x, y: -jax.nn.log_softmax(x @ w)[y], lambda w, x: x @ w
    )
    made = lambda personal: jfl.algorithm(
        lambda params: (params, jnp.zeros(())),
        client,
        lambda context, server, release: server,
        stateful=True,
        personal=personal,
    )
    mine = lambda server, own: server.at[:, 1].add(own)  # as often as it took part
    for personal, of in ((None, jnp.zeros((3, 3))), (mine, jnp.zeros((3, 3)).at[:, 1].add(2.0))):
        plan = jfl.plan(fed, task, made(personal), jfl.sampling.full(CLIENTS))
        out = jfl.simulate(KEY, plan, 2, evaluate_every=2)
        guess = np.argmax(np.asarray(fed.x) @ np.asarray(of), -1)
        each = [(guess[i[:2]] == np.asarray(fed.y)[i[:2]]).mean() for i in fed.test_index]
        assert float(out.metrics.client_accuracy[-1]) == pytest.approx(np.mean(each))
        np.testing.assert_allclose(
            out.metrics.client_percentiles[-1], np.percentile(each, (10, 25, 50, 75, 90)), rtol=1e-6
        )
