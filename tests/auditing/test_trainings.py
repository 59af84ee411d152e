"""Audits of trainings: canaries among rows that train, how they are seen, and many in one run."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import audit_plans
from helpers.problems import squared, start_params
from scipy import stats

import jfl
from jfl.algorithms.base import train_difference
from jfl.auditing import scores, trainings, trials
from jfl.core import pytrees
from jfl.engine.simulate import scan
from jfl.privacy.guarantees import choose
from jfl.privacy.ledger.entries import entries

ROWS, CLIENTS = 12, 6
TASK = jfl.task(start_params(), squared)


def classes():
    """Rows of three classes, as labels a linear model learns."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, ROWS * CLIENTS)
    x = (np.eye(3)[y] * 2 + rng.normal(size=(len(y), 3))).astype(np.float32)
    own = lambda labels: np.split(np.arange(len(labels)), CLIENTS)
    return jfl.federate(jfl.datasets.arrays(x, y, x, y), own)


FED = classes()
MODEL = jfl.models.logistic(FED)


def of_clients(z, sampler=None, name="fedavg", fed=FED, lr=0.1, **options):
    algorithm = getattr(jfl.algorithms, name)(
        jfl.grad(MODEL.loss), steps=2, lr=lr, batch=jfl.batches.full()
    )
    options.setdefault("release", audit_plans.chain(z, divide=float(CLIENTS)))
    return jfl.plan(fed, MODEL, algorithm, sampler or jfl.sampling.full(CLIENTS), **options)


def of_records(z, batch=None, name="fedavg", clients=None):
    grad = jfl.private_grad(MODEL.loss, audit_plans.chain(z, divide=4.0))
    algorithm = getattr(jfl.algorithms, name)(
        grad, steps=1, lr=0.5, batch=batch or jfl.batches.full()
    )
    return jfl.plan(FED, MODEL, algorithm, clients or jfl.sampling.full(CLIENTS))


def training(plan, rounds, kind, sees="releases", count=1, **asked):
    asked = dict(unit=None, view=None, adjacency=None) | asked
    entry = choose("test", plan, entries(plan, rounds), **asked)
    return trainings.training(plan, entry, rounds, kind, sees, count)


def without_noise(plan):
    """The plan with noise too small to see, so that two identities give one run."""
    quiet = lambda s: s if s.noise is None else dataclasses.replace(s, noise=jnp.float32(1e-9))
    stages = lambda m: dataclasses.replace(m, stages=tuple(map(quiet, m.stages)))
    is_chain = lambda node: isinstance(node, jfl.Mechanism)
    return jax.tree.map(lambda n: stages(n) if is_chain(n) else n, plan, is_leaf=is_chain)


def params_after(plan, rounds=3):
    run, _ = scan(jfl.init(jax.random.key(0), plan), plan, jnp.array([rounds]))
    return plan.algorithm.params(run.server)


def close(one, other, equal=True):
    distance = max(
        float(jnp.abs(a - b).max())
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )
    assert (distance < 1e-5) == equal, distance


# --- what is put in is what it says


def _own_gradient(context, keys, server, client_state, rows, *, loss):
    """A client that reads its rows by itself."""
    mean = lambda p: jax.vmap(loss, (None, 0, 0))(p, rows.x[rows.index], rows.y[rows.index]).mean()
    sent = pytrees.scale(-1.0, jax.grad(mean)(server.params))
    zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
    return sent, client_state, jfl.Diagnostics(zero, zero, none, none)


def of_own_clients(z):
    client, plan = jfl.Fn(_own_gradient, dict(loss=MODEL.loss)), of_clients(z)
    return dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, client=client))


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [of_records, lambda z: of_clients(z, name="scaffold"), of_own_clients],
    ids=["record", "client", "a user's client"],
)
@pytest.mark.parametrize("kind", ["mislabelled", "blank"])
def test_a_canary_is_a_federation_with_other_rows(kind, make):
    """That is what the plan with lookups trains on if the canary is in; if it is out, on what the
    plan itself has."""
    plan = without_noise(make(1.0))
    made = training(plan, 3, kind, "models", adjacency="replace_one")
    x, y = np.array(FED.x), np.array(FED.y)
    if kind == "mislabelled":
        y[made.rows[0]] = (y[made.rows[0]] + 1) % 3
    else:
        x[made.rows[0]] = 0
    other = dataclasses.replace(plan, fed=dataclasses.replace(FED, x=x, y=y))
    is_in, is_out = (params_after(trainings.with_coins(made, 3, [coin])) for coin in (True, False))
    close(is_in, params_after(other))
    close(is_out, params_after(plan))
    close(is_in, is_out, equal=False)


@pytest.mark.slow
def test_a_row_that_is_absent_is_no_row():
    """Under Poisson batches at a fixed rate: the federation without it gives the same model."""
    batch = jfl.batches.poisson(rate=1.0, capacity=ROWS)
    plan = of_records(1.0, batch)
    made = training(without_noise(plan), 3, "blank", "models", adjacency="add_remove")
    (client,), row = made.clients, made.rows[0, 0]
    index = np.asarray(FED.index).copy()
    left = index[client][index[client] != row]
    index[client] = np.append(left, 0)
    size = np.asarray(FED.size).copy()
    size[client] -= 1
    smaller = dataclasses.replace(FED, index=jnp.asarray(index), size=jnp.asarray(size))
    want = without_noise(dataclasses.replace(plan, fed=smaller))
    close(params_after(trainings.with_coins(made, 3, [False])), params_after(want))
    close(params_after(trainings.with_coins(made, 3, [True])), params_after(want), equal=False)


@pytest.mark.slow
def test_a_client_that_is_absent_sends_nothing():
    plan = of_clients(1.0, jfl.sampling.poisson(CLIENTS, 1.0))
    made = training(without_noise(plan), 1, "mislabelled", "models", adjacency="add_remove")
    got = params_after(trainings.with_coins(made, 1, [False]), 1)
    alone = np.ones(CLIENTS, np.float32)
    alone[made.clients] = 0.0
    want = dataclasses.replace(without_noise(plan), weights=jnp.asarray(alone))
    close(got, params_after(want, 1))


# --- what is seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, sees, rounds, mu",
    [
        # noise covers two uploads that are opposite, and the other one is small
        (lambda: of_clients(1.0, lr=1e-4), "releases", 4, 1.0),
        (lambda: of_clients(1.0, lr=1e-4), "final model", 4, 1.0),
        (lambda: of_records(0.5), "final model", 1, 6**-0.5),
    ],
    ids=["client releases", "client final", "record final"],
)
def test_a_random_direction_is_as_far_as_it_must_be(make, sees, rounds, mu):
    """In deviations, at five errors of 1,400 runs; and no bound above what is proved.

    A record's own gradient is not small, so that it may lie nearer or further by its projection.
    The final model has the noise of six clients.
    """
    found = jfl.audit(make(), rounds, 2000, canary="direction", sees=sees)
    off = 5 * math.sqrt(2 / 1400) + (0.35 * mu if found.unit == "example" else 0.0)
    assert abs(found.mu - mu) < off
    assert found.epsilon <= found.proved.epsilon and not found.contradicted
    assert "all others train" in found.adversary or "trains alone" in found.adversary


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, kind, sees",
    [
        (lambda: of_clients(0.2, jfl.sampling.poisson(CLIENTS, 0.5)), "direction", "models"),
        (lambda: of_records(0.2, jfl.batches.poisson(4), "scaffold"), "mislabelled", "models"),
        (
            lambda: of_clients(0.2, jfl.sampling.without_replacement(CLIENTS, 3)),
            "blank",
            "final model",
        ),
        (
            lambda: of_clients(
                1.0,
                upload=jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(0.2)),
                release=jfl.chain(jfl.total(), jfl.divide(CLIENTS)),
            ),
            "direction",
            "releases",
        ),
    ],
    ids=["poisson", "rows scaffold", "fixed", "upload"],
)
def test_nothing_is_audited_above_what_is_proved(make, kind, sees):
    found = jfl.audit(make(), 3, 2000, canary=kind, sees=sees, confidence=1 - 1e-6)
    assert found.epsilon <= found.proved.epsilon


@pytest.mark.slow
def test_a_wrong_label_is_remembered():
    """Found with little noise, and not with much; without a change there is nothing to find."""
    found = jfl.audit(of_clients(0.05, lr=1.0), 4, 1000, canary="mislabelled", sees="final model")
    assert found.epsilon > 1 and found.mu > 2
    assert "a client whose labels are all wrong, against its own rows" in str(found)
    hidden = jfl.audit(of_clients(20.0, lr=1.0), 4, 1000, canary="mislabelled", sees="final model")
    assert hidden.epsilon < found.epsilon and abs(hidden.mu) < 0.3


def _clipped_gradient(x, y, bound):
    """Of the softmax regression at zeros, flat: the row's gradient in NumPy."""
    error = np.full(3, 1 / 3) - np.eye(3)[y]
    flat = np.concatenate([np.outer(x, error).ravel(), error])
    return flat * min(1.0, bound / np.linalg.norm(flat))


@pytest.mark.by_default("add_remove-mislabelled")
@pytest.mark.parametrize(
    "adjacency, kind", [("add_remove", "mislabelled"), ("replace_one", "blank")]
)
def test_a_release_is_read_along_what_the_canary_changes(adjacency, kind):
    """Without noise both sides lie the squared length of that change apart, as a loop finds it."""
    batch = jfl.batches.poisson(rate=1.0, capacity=ROWS) if adjacency == "add_remove" else None
    made = training(without_noise(of_records(1.0, batch)), 1, kind, adjacency=adjacency)
    zeros = dict(init=jfl.Fn(lambda key: jax.tree.map(jnp.zeros_like, MODEL.init(key))))
    still = dataclasses.replace(made.plan.task, **zeros)
    made = made._replace(plan=dataclasses.replace(made.plan, task=still))
    watch = jax.jit(lambda plan: trials.watch(jax.random.key(0), plan, 1)[0][0, 0, 0])
    seen = [float(watch(trainings.with_coins(made, 1, [coin]))) for coin in (True, False)]
    row = int(made.rows[0, 0])
    x, y = np.array(FED.x[row], float), int(FED.y[row])
    changed = (x, (y + 1) % 3) if kind == "mislabelled" else (0 * x, y)
    change = _clipped_gradient(*changed, 0.8)
    if adjacency == "replace_one":
        change = change - _clipped_gradient(x, y, 0.8)
    # an upload is minus the learning rate times the gradient, of which four rows are the divisor
    assert seen[0] - seen[1] == pytest.approx(-0.5 * change @ change / 4, rel=1e-4)


# --- many canaries in one run


def test_one_run_shows_what_perfect_scores_would_and_no_more_than_is_proved():
    """Directions of 60 clients that are seen with hardly any noise: every coin is guessed."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 120)
    x = rng.normal(size=(120, 40)).astype(np.float32)
    own = lambda labels: np.split(np.arange(len(labels)), 60)
    fed = jfl.federate(jfl.datasets.arrays(x, y, x, y), own)
    model = jfl.models.logistic(fed)
    sgd = jfl.algorithms.fedavg(jfl.grad(model.loss), steps=1, lr=1e-4, batch=jfl.batches.full())
    make = lambda z: jfl.plan(
        fed, model, sgd, jfl.sampling.full(60), release=audit_plans.chain(z, divide=60.0)
    )
    clear = jfl.audit_one_run(make(1e-3), 2, 60, 1e-5, claimed=0.5)
    assert clear.correct > 0.95 * clear.guesses and clear.guesses == 60
    assert 1.5 < clear.epsilon < clear.gaussian and clear.auroc > 0.98
    assert clear.proved is None  # computed noise of 0.001 sensitivities ends too early
    noisy = jfl.audit_one_run(make(10.0), 2, 60, 1e-5, confidence=0.99)
    assert noisy.epsilon <= noisy.proved.epsilon < 2 and noisy.auroc < 0.75
    assert clear.refuted and "claimed 0.5: REFUTED" in str(clear)


@pytest.mark.slow
def test_coins_are_their_own_in_every_run():
    plan = of_records(1e-3)
    made = training(plan, 2, "direction", count=10)
    assert len(np.unique(made.rows)) == 10 and set(made.clients) == {made.clients[0]}
    key = jax.random.key(1)
    one, other = np.arange(10) < 5, np.arange(10) % 2 == 0
    seen = [
        np.asarray(trials.watch(key, trainings.with_coins(made, 2, coins), 2)[0])[..., 0].sum(0)
        for coins in (one, other)
    ]
    moved = seen[0] - seen[1]
    np.testing.assert_array_equal(np.abs(moved) > np.abs(moved).max() / 2, one != other)
    everyone = training(plan, 2, "blank", "models", count=20)
    assert set(everyone.clients) == set(range(CLIENTS)) and len(np.unique(everyone.rows)) == 20


def test_what_cannot_be_done_says_so():
    plan, rows = of_clients(1.0), of_records(1.0)
    voted = of_clients(1.0, jfl.sampling.poisson(CLIENTS, 0.5), release=audit_plans.adaptive())
    one_run = lambda plan, count, **how: jfl.audit_one_run(plan, 1, count, 1e-5, **how)
    for words, call in {
        'expected sees="releases" for canary="worst case"': lambda: jfl.audit(
            plan, 1, 1000, sees="models"
        ),
        "expected labels of classes": lambda: jfl.audit(
            audit_plans.of_clients(1.0), 1, 1000, canary="mislabelled"
        ),
        "at most as many canaries as clients with rows, 6": lambda: one_run(plan, 10),
        "rows of the client whose uploads are seen, 12": lambda: one_run(rows, 20),
        "canaries": lambda: one_run(rows, 3),
        "expected learning_runs=1, or an even": lambda: one_run(rows, 12, learning_runs=2),
        "a clip norm that no client votes on": lambda: one_run(voted, 10),
        "guesses": lambda: one_run(rows, 12, confidence=1 - 1e-9),
        "can refute claimed=100": lambda: one_run(rows, 12, claimed=100.0),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
    data = (np.zeros((20, 3), np.float32), np.zeros(20, np.float32))
    fed = jfl.population(data, sizes=(5,) * 4, test=data, classes=0)
    fedavg = jfl.algorithms.fedavg(jfl.grad(squared), batch=jfl.batches.full())
    far = jfl.plan(fed, TASK, fedavg, jfl.sampling.full(4), release=audit_plans.chain(1.0))
    with pytest.raises(ValueError, match="expected rows on the device"):
        jfl.audit(far, 1, 1000, canary="blank")


def _reporting_client(context, keys, server, client_state, rows, *, work, loss):
    """A client that takes private steps, and reports the loss of all of its rows."""
    sent, diagnostics = train_difference(work, context, keys, server.params, rows)
    losses = jax.vmap(loss, (None, 0, 0))(server.params, rows.x[rows.index], rows.y[rows.index])
    return sent, client_state, diagnostics._replace(loss=losses.mean())


@pytest.mark.parametrize("canary", ["worst case", "direction"])
def test_a_client_that_calls_a_loss_itself_gets_no_canary_in_place_of_its_rows(canary):
    plan = of_records(1.0)
    data = dict(plan.algorithm.client.data, loss=MODEL.loss)
    algorithm = dataclasses.replace(plan.algorithm, client=jfl.Fn(_reporting_client, data))
    plan = dataclasses.replace(plan, algorithm=algorithm)
    with pytest.raises(jfl.errors.NotAnalysable, match="Let the client report the loss"):
        jfl.audit(plan, 1, 1000, canary=canary)


def test_what_a_canary_cannot_be_put_in_is_refused():
    declared = jfl.chain(jfl.bounded(1.0, "prox_erm"), jfl.total(), jfl.gaussian(1.0))
    padpfl = jfl.algorithms.padpfl(
        jfl.grad(MODEL.loss), mechanism=declared, mu=1.0, inexactness=0.1
    )
    plan = jfl.plan(FED, MODEL, padpfl, jfl.sampling.full(CLIENTS))
    with pytest.raises(jfl.errors.NotAnalysable, match="expected a chain that clips"):
        jfl.audit(plan, 1, 1000, canary="direction")
    index = np.array(FED.index)
    index[0, 1] = index[0, 0]
    twice = dataclasses.replace(FED, index=jnp.asarray(index))
    with pytest.raises(jfl.errors.NotAnalysable, match="one owner each"):
        jfl.audit(of_clients(1.0, fed=twice), 1, 1000, canary="blank")
    upload = jfl.chain(jfl.clip_l2(0.8), jfl.total(), jfl.gaussian(1.0))
    sent = of_clients(1.0, upload=upload, release=jfl.chain(jfl.total(), jfl.divide(CLIENTS)))
    with pytest.raises(jfl.errors.NotAnalysable, match="seen together"):
        jfl.audit_one_run(sent, 1, 12, 1e-5, view="server")


def test_guesses_are_chosen_on_a_run_that_judges_nothing():
    """Without a signal nothing is found, but for one audit in twenty: 200 of them, with a false
    alarm of 1e-4; choosing on the scores that are judged breaks this."""
    rng, alarms, the_same, audits = np.random.default_rng(0), 0, 0, 200
    for _ in range(audits):
        values, coins = rng.normal(size=(2, 60)), rng.random((2, 60)) < 0.5
        _, center, number = scores._choose_guesses(values[:1], coins[:1], 1e-5, 0.95)
        found = [
            scores.one_run_bounds(s, c, number, center, 1e-5, 0.95)[0].epsilon > 0
            for s, c in zip(values, coins)
        ]
        the_same, alarms = the_same + found[0], alarms + found[1]
    assert alarms <= stats.binom.isf(1e-4, audits, 0.05) < the_same
    strong = coins[0] + rng.normal(size=60) * 0.1
    assert scores._choose_guesses(strong[None], coins[:1], 1e-5, 0.95)[2] == 60
    exact = scores.distance(np.array([3.0, 5.0]), np.array([1.0, 3.0]))
    assert exact == pytest.approx(2 / math.sqrt(2))


def test_what_others_do_is_taken_away():
    """A canary's release has a part of the others', ten times what the coin moves, and another for
    each canary: learned from four runs with coins of their own, it hides nothing."""
    rng = np.random.default_rng(0)
    coins = scores.learning_coins(rng, 4, 80)
    assert (coins.sum(1) == 40).all() and (coins.reshape(2, 2, 80).sum(1) == 1).all()
    judged = rng.random(80) < 0.5
    by_others = 10 * rng.normal(size=(80, 3, 1))
    see = lambda inside: by_others + inside[:, None, None] + 0.3 * rng.normal(size=(80, 3, 1))
    learn, judge = np.stack([see(inside) for inside in coins]), see(judged)
    several = scores.choose_score(learn, coins, 1e-5, 0.95)
    one = scores.choose_score(learn[:1], coins[:1], 1e-5, 0.95)
    distance = lambda made: scores.distance(made.score(judge)[judged], made.score(judge)[~judged])
    # three rounds at 0.3 are 5.8 deviations, by the mean of four runs 5.2
    assert 4 < distance(several) < 6.5 and abs(distance(one)) < 1
    # where nothing is there to take away, it is left as it is: the mean of runs adds noise
    plain = learn - by_others
    assert scores.choose_score(plain, coins, 1e-5, 0.95).value[0] > 2
