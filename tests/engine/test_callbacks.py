"""Runs that are watched: progress, early stopping, checkpoints, logs; when programs compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.problems import CLIENTS, make_federation, same_bits

import jfl
from jfl.engine import simulate as sim

KEY = jax.random.key(0)
SAME = dict(evaluate_every=2)


def plan_of(lr=0.3, noise=0.5, classes=3, **parts):
    fed = make_federation(classes=classes, held_out=1)
    task = jfl.models.logistic(fed)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(2))
    grad = jfl.private_grad(task.loss, chain)
    algorithm = jfl.algorithms.scaffold(grad, lr=lr, steps=2, batch=jfl.batches.full())
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS), **parts)


@pytest.fixture(scope="module")
def plan():
    return plan_of()


@pytest.fixture(scope="module")
def whole(plan):
    return jfl.simulate(KEY, plan, 7, **SAME)


@pytest.mark.slow
def test_a_watched_run_is_the_run(plan, whole, capfd):
    """The draws and the program are the same; each moment is a separate state."""
    moments, rows = [], []
    before = sim._scan._cache_size()
    watch = [moments.append, jfl.callbacks.log(rows.append)]
    out = jfl.simulate(KEY, plan, 7, progress=True, callbacks=watch, **SAME)
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
    """`stops` is the index of the evaluation at which it says so, or None."""
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
    with pytest.raises(ValueError, match="callbacks.restore: expected a state of this plan"):
        jfl.callbacks.restore(path, plan_of(classes=4))


def test_a_checkpoint_keeps_bfloat16(tmp_path):
    """NumPy does not know this type."""
    fed, path = make_federation(classes=3), tmp_path / "state.npz"
    task = jfl.models.logistic(fed)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), task.init(KEY))
    coarse = jfl.task(params, task.loss)
    of = lambda task: jfl.plan(
        fed, task, jfl.algorithms.fedsgd(jfl.grad(task.loss)), jfl.sampling.full(CLIENTS)
    )
    out = jfl.simulate(KEY, of(coarse), 2, callbacks=[jfl.callbacks.checkpoint(path)])
    assert same_bits(jfl.callbacks.restore(path, of(coarse)), out.run)
    with pytest.raises(ValueError, match="callbacks.restore: expected a state of this plan"):
        jfl.callbacks.restore(path, of(task))


def test_an_unhealthy_run_stops_at_its_evaluation():
    plan, seen = plan_of(lr=1e38, noise=1.0), []
    with pytest.raises(jfl.HealthError, match="by round [1-4] "):
        jfl.simulate(KEY, plan, 400, evaluate_every=2, callbacks=[seen.append])
    assert len(seen) <= 1


def test_another_number_of_rounds_compiles_nothing(plan, whole):
    before = sim._scan._cache_size()
    for rounds, every in ((1, 1), (3, 2), (40, None), (31, 1)):
        out = jfl.simulate(KEY, plan, rounds, evaluate_every=every)
        assert int(out.run.round) == rounds and int(out.metrics.round[-1]) == rounds
        assert len(out.metrics.loss) == len(sim.rounds_before_evaluations(rounds, every))
    assert sim._scan._cache_size() == before


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: 3, "callbacks, functions of a Moment"),
        (lambda: jfl.callbacks.early_stopping("f1"), "a metric of this run: round, loss, accuracy"),
        (lambda: jfl.callbacks.early_stopping(patience=0), "patience"),
        (lambda: jfl.callbacks.log("wandb"), "callbacks.log"),
    ],
)
def test_bad_callbacks(plan, make, words):
    with pytest.raises(ValueError, match=words):
        jfl.simulate(KEY, plan, 2, callbacks=[make()])


def test_personal_models_are_judged_by_their_clients():
    """A client's own model, and percentiles over clients."""
    fed = make_federation(classes=3, held_out=2)

    def client(context, keys, server, own, rows):
        none = jnp.zeros((), jnp.int32)
        seen = jfl.Diagnostics(jnp.zeros(()), jnp.zeros(()), none, none)
        return jax.tree.map(jnp.zeros_like, server), own + 1.0, seen

    loss = lambda w, x, y: -jax.nn.log_softmax(x @ w)[y]
    task = jfl.task(jnp.zeros((3, 3)), loss, lambda w, x: x @ w)
    begin = lambda params: (params, jnp.zeros(()))
    serve = lambda context, server, release: server
    mine = lambda server, own: server.at[:, 1].add(own)  # as often as it took part
    made = jfl.algorithm(begin, client, serve, stateful=True, personal=mine)
    plan = jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS))
    out = jfl.simulate(KEY, plan, 2, evaluate_every=2)
    assert not np.any(out.params)  # the server's model alone would judge all rows alike
    x, y, model = np.asarray(fed.x), np.asarray(fed.y), np.zeros((3, 3))
    model[:, 1] = 2
    guess = np.argmax(x @ model, -1)
    each = [(guess[i[:2]] == y[i[:2]]).mean() for i in np.asarray(fed.test_index)]
    assert float(out.metrics.client_accuracy[-1]) == pytest.approx(np.mean(each))
    np.testing.assert_allclose(
        out.metrics.client_percentiles[-1], np.percentile(each, (10, 25, 50, 75, 90)), rtol=1e-6
    )
