"""What `jfl.plan` says of functions that do not take one example, and of unfit algorithms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from helpers.problems import CLIENTS, make_federation

import jfl

W = jnp.zeros((3, 3))


@pytest.fixture(scope="module")
def fed():
    return make_federation(classes=3)


def entropy(logits, y):
    return -jax.nn.log_softmax(logits)[y]


def good(w, x, y):
    return entropy(x @ w, y)


def of_batch(w, x, y):
    logits = jnp.einsum("ni,ij->nj", x, w)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def plan(fed, *args, loss=None, **options):
    task = jfl.task(*args, **options)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(task.loss if loss is None else loss))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


ONE = r"The model gets one example of shape \(3,\), without a batch axis.*x\[None\]"


def test_an_algorithm_that_does_not_fit_the_engine(fed):
    def client(context, keys, server, state, rows):
        return server["model"], state, {}

    init, server = lambda params: ({"model": params}, ()), lambda context, server, upload: server
    task, full = jfl.task(W, good), jfl.sampling.full(CLIENTS)
    own = jfl.algorithm(init, client, server, name="own")
    with pytest.raises(ValueError, match="plan: expected the server state of own to hold the para"):
        jfl.plan(fed, task, own, full)
    own = jfl.algorithm(init, client, server, name="own", params=lambda server: server["model"])
    with pytest.raises(
        ValueError, match="client of own: expected diagnostics.*Return jfl.Diagnostics"
    ):
        jfl.plan(fed, task, own, full)

    def two_results(context, keys, server, state, rows):
        return server["model"], state

    def whole(context, keys, server, state, rows):
        return server["model"], state, jfl.Diagnostics(0.0, 0.0, 0)

    for mine, back, words in (
        (two_results, server, "client of own: expected three results"),
        (whole, lambda context, server, upload: upload, "server of own: expected a new server st"),
    ):
        model = lambda server: server["model"]
        own = jfl.algorithm(init, mine, back, name="own", params=model)
        with pytest.raises(ValueError, match=words):
            jfl.plan(fed, task, own, full)


@pytest.mark.parametrize(
    "start, new, accepted",
    [
        # The engine would broadcast a chunk of C numbers to C states of C numbers each.
        (jnp.zeros(CLIENTS), lambda own: own.sum(), False),
        (jnp.zeros(2), lambda own: own[:1], False),
        (jnp.zeros((), int), lambda own: own + 0.5, False),
        ((), lambda own: jnp.zeros(3), False),
        (dict(a=jnp.zeros(2), b=jnp.zeros(())), lambda own: dict(a=own["a"]), False),
        (jax.random.key(0), lambda own: jax.random.key(0, impl="rbg"), False),
        (jnp.zeros(()), lambda own: 1, True),
        (jnp.zeros((), jnp.bfloat16), lambda own: 1.0, True),
        (jnp.zeros(()), lambda own: own.astype(jnp.bfloat16) + 1, True),
        (0.0, lambda own: own + 1, True),
    ],
    ids="mixed broadcast fraction array missing generator number literal exact python".split(),
)
def test_a_new_client_state_has_the_form_of_the_first(fed, start, new, accepted):
    def client(context, keys, server, own, rows):
        return server, new(own), jfl.Diagnostics(0.0, 0.0, 0)

    def init(params):
        return params, start

    def plan():
        parts = dict(params=lambda server: server, stateful=True, name="own")
        own = jfl.algorithm(init, client, lambda context, server, mean: server, **parts)
        return jfl.plan(fed, jfl.task(W, good), own, jfl.sampling.full(CLIENTS))

    if accepted:
        states = jfl.simulate(jax.random.key(0), plan(), 1).run.client_states
        np.testing.assert_array_equal(states, np.ones(CLIENTS))
    else:
        with pytest.raises(ValueError, match="client of own: expected a new client state like the"):
            plan()


@pytest.mark.parametrize(
    "args, options, words",
    [
        ((W, of_batch), {}, f"plan: expected the loss to take one example.*{ONE}"),
        ((W, good), dict(loss=of_batch), f"the loss of gradient 0 to take one.*{ONE}"),
        ((W, good), dict(evaluation=of_batch), f"evaluation to take one example.*{ONE}"),
        ((W, lambda w, x, y: x @ w - y), {}, r"the loss to return one number.*float32\[3\].*mean"),
        ((W, lambda w, x, y: good(w, x, y)[None]), {}, r"one number.*float32\[1\].*mean"),
        ((W, good, lambda w, x: x[:, 0] @ w), {}, f"predict to take one example.*{ONE}"),
        ((W, good, lambda w, x: (x @ w)[:2]), {}, r"predict to return \[3\].*got \[2\].*target="),
        ((W, good), dict(metrics=dict(own=of_batch)), f"metric 'own' to take one.*{ONE}"),
    ],
    ids="batch gradient evaluation vector column predict narrow metric".split(),
)
def test_functions_that_do_not_take_one_example(fed, args, options, words):
    with pytest.raises(ValueError, match=words):
        plan(fed, *args, **options)


@pytest.mark.parametrize("predict", [lambda w, x: x @ w, lambda w, x: (x @ w)[None]])
def test_labels_that_are_numbers_need_a_target(predict):
    numbers, squared = make_federation(), lambda w, x, y: (x @ w - y) ** 2
    with pytest.raises(ValueError, match='plan: .*integer labels.*float32.*target="numbers"'):
        plan(numbers, jnp.zeros(3), squared, predict)
    fine = plan(numbers, jnp.zeros(3), squared, predict, target="numbers")
    assert jfl.simulate(jax.random.key(0), fine, 1).metrics.accuracy is None


def test_a_module_for_a_batch_in_a_loss(fed):
    """The message names the remedy, and the remedy works; more logits than classes are taken."""
    module = nn.Sequential([lambda x: x.reshape(x.shape[0], -1), nn.Dense(7)])
    params = module.init(jax.random.key(0), fed.x[:1])["params"]
    apply = lambda params, x: module.apply({"params": params}, x)
    with pytest.raises(ValueError, match="one example.*x\\[None\\]"):
        plan(fed, params, lambda p, x, y: entropy(apply(p, x), y))
    one = lambda p, x: apply(p, x[None])[0]
    fine = plan(fed, params, lambda p, x, y: entropy(one(p, x), y), one)
    assert np.isfinite(jfl.simulate(jax.random.key(0), fine, 1).metrics.accuracy).all()
