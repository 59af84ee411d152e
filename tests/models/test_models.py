"""Ready-made models and users' own losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.problems import (
    CLIENTS,
    FEATURES,
    flat,
    make_federation,
    same_bits,
    squared,
    start_params,
)

import jfl
from jfl.core.records import Batch
from jfl.gradients.per_example import gradient_path
from jfl.models import targets

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def labelled():
    return make_federation(classes=3, held_out=2)


@pytest.fixture(scope="module")
def images():
    """Tiny pictures of two kinds: a bright left half or a bright right half."""
    y = np.arange(28) % 2
    bright = np.where(np.arange(5) < 2, 1.0, -1.0) * np.where(y, 1, -1)[:, None, None]
    x = bright + 0.1 * np.random.default_rng(0).normal(size=(28, 6, 5))
    return jfl.federate((x, y, x[:6], y[:6]), jfl.partition.iid(7))


WAYS = dict(cpu=targets._logit_by_lookup, elsewhere=targets._logit_by_comparison)


def _losses(pick):
    """Values and gradients of a batch: logits, labels -> both."""
    one = lambda z, label: jax.nn.logsumexp(z) - pick(z, label)
    return jax.jit(jax.vmap(jax.value_and_grad(one)))


@pytest.mark.by_default("cpu-10", "elsewhere-101")
@pytest.mark.parametrize("classes", [2, 10, 101])
@pytest.mark.parametrize("way", WAYS)
def test_the_loss_is_the_cross_entropy(way, classes):
    """To the bit on a CPU; elsewhere a gradient may be rounded otherwise, by half a digit of 1."""
    derive = jax.value_and_grad(optax.softmax_cross_entropy_with_integer_labels)
    known = jax.jit(jax.vmap(derive))
    ours = jax.jit(jax.vmap(jax.value_and_grad(targets.cross_entropy)))
    mine = _losses(WAYS[way])
    r = np.random.default_rng(classes)
    labels = r.integers(0, classes, 300).astype(np.int32)
    for scale in (0, 1, 40):
        logits = (scale * r.normal(size=(300, classes))).astype(np.float32)
        want, want_back = known(logits, labels)
        found, back = mine(logits, labels)
        assert np.array_equal(found, want)
        most = 0 if way == "cpu" else 2.0**-24
        assert np.abs(np.asarray(back) - np.asarray(want_back)).max() <= most
        if jax.default_backend() == "cpu":
            assert same_bits(ours(logits, labels), (want, want_back))


def test_a_label_that_is_none_is_alike_everywhere():
    """A negative one counts from the end, as in NumPy; any other is no number."""
    logits = jnp.tile(jnp.arange(4.0), (8, 1))
    labels = jnp.array([-6, -5, -4, -1, 0, 3, 4, 9])
    one, other = (_losses(pick)(logits, labels) for pick in WAYS.values())
    np.testing.assert_allclose(one[0], other[0])
    np.testing.assert_allclose(one[1], other[1], rtol=1e-6, atol=1e-7)
    assert np.isnan(one[0]).tolist() == [True, True, False, False, False, False, True, True]


def test_an_accelerator_looks_no_label_up(labelled, traced_for):
    """A lookup is a launch, and its derivative, a scatter, is another."""
    task = jfl.models.logistic(labelled)
    weights = task.init(KEY)
    for platform, count in (("cpu", 1), ("gpu", 0)):
        traced_for(platform)
        derive = jax.jit(jax.vmap(jax.value_and_grad(lambda *of: task.loss(*of)), (None, 0, 0)))
        text = derive.lower(weights, labelled.x, labelled.y).as_text()
        assert text.count('"stablehlo.scatter"') == count, platform
        assert ("gather" in text) == (count > 0)


def _steps(task, fed, n=30, lr=0.5):
    """Plain gradient descent on all rows -> loss before and after."""
    rows = Batch(fed.x, fed.y, jnp.ones(fed.y.shape[0], bool))
    grad = jfl.grad(task.loss)

    def step(w, _):
        back, (loss, *_) = grad(KEY, w, rows, jnp.int32(0))
        return jax.tree.map(lambda a, b: a - lr * b, w, back), loss

    w, losses = jax.jit(lambda w: jax.lax.scan(step, w, None, n))(task.init(KEY))
    return w, np.asarray(losses)


@pytest.mark.by_default("mlp")
@pytest.mark.parametrize(
    "make",
    [
        jfl.models.logistic,
        lambda f: jfl.models.mlp(f, hidden=(8,)),
        lambda f: jfl.models.cnn(f, channels=(2, 3), dense=4),
    ],
    ids=["logistic", "mlp", "cnn"],
)
def test_models_learn(make, images):
    task = make(images)
    w, losses = _steps(task, images)
    assert losses[-1] < 0.5 * losses[0] and np.isfinite(losses).all()
    logits = jax.vmap(lambda x: task.predict(w, x))(images.x_test)
    assert logits.shape == (6, 2) and (logits.argmax(1) == images.y_test).all()


def test_a_users_own_loss(fed):
    """A loss and a starting point, or a function that draws one."""
    task = jfl.task(start_params(), squared)
    assert task.predict is None and np.array_equal(flat(task.init(KEY)), flat(start_params()))
    drawn = jfl.task(lambda key: {"b": jnp.float32(0), "w": jax.random.normal(key, (3,))}, squared)
    algorithm = jfl.algorithms.fedsgd(jfl.grad(squared), lr=0.2)
    plan = jfl.plan(fed, drawn, algorithm, jfl.sampling.full(CLIENTS))
    a, b = (jfl.init(jax.random.key(s), plan).server.params for s in (0, 1))
    assert not np.allclose(flat(a), flat(b))
    out = jfl.simulate(KEY, plan, 20, evaluate_every=20)
    assert out.metrics.train_loss[0] < 5 and out.metrics.accuracy is None


# --- what is ready-made


def text(every):
    r = np.random.default_rng(0)
    x = r.integers(0, 7, (60, 5))
    y = r.integers(0, 7, (60, 5) if every else 60)
    data = jfl.datasets.arrays(x, y, x[:6], y[:6], classes=7)
    return jfl.federate(data, jfl.partition.iid(CLIENTS))


def pictures():
    r = np.random.default_rng(0)
    x, y = r.normal(size=(60, 8, 8, 3)), r.integers(0, 3, 60)
    return jfl.federate((x, y, x[:6], y[:6]), jfl.partition.iid(CLIENTS))


READY = dict(
    logistic=lambda: jfl.models.logistic(pictures()),
    mlp=lambda: jfl.models.mlp(pictures()),
    cnn=lambda: jfl.models.cnn(pictures(), channels=(4,), dense=8),
    resnet18=lambda: jfl.models.resnet18(pictures(), width=4),
    lstm=lambda: jfl.models.lstm(text(False), cells=(4, 3)),
    lstm_every=lambda: jfl.models.lstm(text(True), cells=(4,)),
    gpt=lambda: jfl.models.gpt(text(False), width=8, layers=2, heads=2, dropout=0.1),
    gpt_every=lambda: jfl.models.gpt(text(True), width=8, layers=1, heads=2),
)


def private_plan(task, fed):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(2))
    grad = jfl.private_grad(task.loss, chain)
    algorithm = jfl.algorithms.fedsgd(grad, batch=jfl.batches.without_replacement(2))
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
def test_every_layer_of_a_ready_made_model_is_book_kept(name):
    """The path by name, with nothing in brackets."""
    fed = text(name.endswith("every")) if name.startswith(("gpt", "lstm")) else pictures()
    plan = private_plan(READY[name](), fed)
    assert gradient_path(plan) == "bookkeeping"
    assert jfl.guarantee(plan, 1, delta=1e-5).status == "proved"


@pytest.mark.slow
def test_a_gpt_looks_back_alone():
    """Tokens that come later change no logit."""
    task = jfl.models.gpt(text(True), width=8, layers=2, heads=2)
    params = task.init(KEY)
    x = jnp.array([1, 2, 3, 4, 5])
    one, other = task.predict(params, x), task.predict(params, x.at[3:].set(0))
    np.testing.assert_allclose(one[:3], other[:3], rtol=1e-5)
    assert np.abs(one[3:] - other[3:]).max() > 1e-3


@pytest.mark.slow
def test_an_lstm_against_a_loop():
    task = jfl.models.lstm(text(True), embedding=3, cells=(4,))
    p = jax.tree.map(lambda v: np.asarray(v, float), task.init(KEY))
    layer, sigmoid = p["_LstmLayer_0"], lambda v: 1 / (1 + np.exp(-v))
    cell = output = np.zeros(4)
    x, wanted = np.array([3, 1, 6, 0, 2]), []
    for token in x:
        inputs = p["Embed_0"]["embedding"][token] @ layer["kernel"] + layer["bias"]
        i, f, g, o = np.split(inputs + output @ layer["recurrent"], 4)
        cell = sigmoid(f) * cell + sigmoid(i) * np.tanh(g)
        output = sigmoid(o) * np.tanh(cell)
        wanted.append(output @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"])
    got = task.predict(task.init(KEY), jnp.asarray(x))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: jfl.models.logistic(make_federation()), "class labels"),
        (lambda: jfl.models.mlp(make_federation()), "class labels"),
        (lambda: jfl.models.cnn(make_federation(classes=3)), "images"),
        (lambda: jfl.models.mlp(pictures(), hidden=(0,)), "hidden"),
        (lambda: jfl.models.mlp(pictures(), hidden=(True,)), "hidden"),
        (lambda: jfl.models.cnn(pictures(), channels=(0,)), "channels"),
        (lambda: jfl.models.gpt(pictures()), "rows of tokens"),
        (lambda: jfl.models.gpt(text(True), width=6, heads=4), "a multiple of heads=4"),
        (lambda: jfl.models.lstm(text(True), cells=()), "models.lstm"),
        (lambda: jfl.models.resnet18(text(False)), "images"),
        (lambda: jfl.models.resnet18(pictures(), width=3), "an even width"),
        (lambda: jfl.task(jnp.zeros(3), "squared"), "loss"),
    ],
)
def test_models_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("x", [np.zeros((4, 5)), np.zeros(FEATURES)])
def test_rows_that_do_not_fit_are_explained(x):
    task = jfl.models.logistic(make_federation(classes=3))
    with pytest.raises(Exception) as caught:
        jfl.predict(task, task.init(KEY), x)
    assert "In jfl.predict, for x of shape" in caught.value.__notes__[-1]


def test_a_task_without_predictions():
    with pytest.raises(ValueError, match="predict: .* jfl.task.params, loss, predict."):
        jfl.predict(jfl.task(start_params(), squared), start_params(), np.zeros((4, FEATURES)))
