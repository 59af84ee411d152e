"""Models of other libraries, and parts of them, as a user brings them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers.problems import CLIENTS, close, make_federation, same_bits

import jfl
from jfl.engine import simulate
from jfl.gradients.per_example import gradient_path

KEY = jax.random.key(0)
NNX = nnx.Linear(3, 3, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def fed():
    return make_federation(classes=3, held_out=2)


@pytest.fixture(scope="module", name="eqx")
def equinox_or_skip():
    return pytest.importorskip(
        "equinox", reason="equinox is not installed: jfl.models.equinox is not tested"
    )


def plan_of(fed, task, steps=2, noise=0.5):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(noise), jfl.divide(3))
    algorithm = jfl.algorithms.fedavg(
        jfl.private_grad(task.loss, chain),
        lr=0.3,
        steps=steps,
        batch=jfl.batches.without_replacement(3),
    )
    return jfl.plan(fed, task, algorithm, jfl.sampling.full(CLIENTS))


def trained(fed, task, rounds=2, **how):
    return jfl.simulate(KEY, plan_of(fed, task, **how), rounds, evaluate_every=1)


def entropy(logits, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)


class Dropped(nn.Module):
    """Dropout by `train`."""

    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(8)(x))))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.drop(nnx.relu(self.inner(x))))


def drawn(task, params, x, y):
    """How many losses a row has by nine keys."""
    return len({float(task.loss(params, x, y, jax.random.key(s))) for s in range(9)})


# --- training and evaluation


@pytest.mark.slow
def test_linen_dropout_is_the_loss_one_would_write(fed):
    """With train=True and the row's key in training, with train=False in evaluation."""
    module = Dropped()
    task = jfl.models.flax(fed, module)
    params, (x, y) = task.init(KEY), (fed.x[1], fed.y[1])
    for seed in range(3):
        key = jax.random.key(seed)
        rngs = {"params": key, "dropout": jax.random.fold_in(key, 1)}
        loss = entropy(module.apply({"params": params}, x, train=True, rngs=rngs), y)
        assert task.loss(params, x, y, key) == pytest.approx(float(loss))
    assert drawn(task, params, x, y) > 3
    still = lambda params, x, y: entropy(module.apply({"params": params}, x, train=False), y)
    assert task.evaluation(params, x, y) == pytest.approx(float(still(params, x, y)))
    out = trained(fed, task)
    after = [still(out.params, x, y) for x, y in zip(fed.x_test, fed.y_test)]
    assert out.metrics.loss[-1] == pytest.approx(float(np.mean(after)), rel=1e-5)
    assert "bookkeeping" in gradient_path(plan_of(fed, task))


def test_models_without_randomness_take_no_key(fed):
    for task in (
        jfl.models.nnx(fed, lambda rngs: nnx.Linear(3, 3, rngs=rngs)),
        jfl.models.functions(fed, lambda key: jnp.zeros((3, 3)), lambda w, x: x @ w),
    ):
        assert task.evaluation is None and task.loss(task.init(KEY), fed.x[0], fed.y[0]).shape == ()


def test_nnx_from_a_model_and_from_a_function(fed):
    model = Net(nnx.Rngs(7))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    fixed, made = jfl.models.nnx(fed, model), jfl.models.nnx(fed, Net)
    inits = lambda task: [task.init(jax.random.key(s)) for s in (0, 1)]
    assert same_bits(*inits(fixed)) and not same_bits(*inits(made))
    out = trained(fed, fixed)
    assert np.isfinite(out.metrics.loss).all() and out.metrics.loss[0] != out.metrics.loss[1]
    compiled = simulate._scan._cache_size()
    trained(fed, jfl.models.nnx(fed, Net(nnx.Rngs(8))))
    assert simulate._scan._cache_size() == compiled  # a second model of the same shape
    # evaluation draws nothing: the logits are those of the model in eval() mode
    still = nnx.clone(model)
    still.eval()
    nnx.update(still, out.params)
    x, y = fed.x_test[0], fed.y_test[0]
    np.testing.assert_allclose(fixed.predict(out.params, x), still(x), rtol=1e-5)
    assert fixed.evaluation(out.params, x, y) == pytest.approx(float(entropy(still(x), y)))
    assert drawn(fixed, out.params, x, y) > 3
    # the model stays as it is
    assert same_bits(before, nnx.to_pure_dict(nnx.state(model, nnx.Param)))


@pytest.mark.slow
def test_equinox(fed, eqx):
    class Model(eqx.Module):
        layers: list
        drop: eqx.nn.Dropout

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.layers = [eqx.nn.Linear(3, 8, key=a), eqx.nn.Linear(8, 3, key=b)]
            self.drop = eqx.nn.Dropout(0.5)

        def __call__(self, x, *, key=None):
            return self.layers[1](self.drop(jax.nn.relu(self.layers[0](x)), key=key))

    model = Model(jax.random.key(5))
    for task in (jfl.models.equinox(fed, model), jfl.models.equinox(fed, Model)):
        out = trained(fed, task)
        whole = eqx.nn.inference_mode(eqx.combine(out.params, model))
        x, y = fed.x_test[0], fed.y_test[0]
        np.testing.assert_allclose(task.predict(out.params, x), whole(x), rtol=1e-5)
        assert drawn(task, out.params, x, y) > 3 and np.isfinite(out.metrics.loss).all()
    mlp = lambda seed: jfl.models.equinox(fed, eqx.nn.MLP(3, 3, 8, 1, key=jax.random.key(seed)))
    assert jfl.guarantee(plan_of(fed, mlp(0)), 2, delta=1e-5).status == "proved"
    trained(fed, mlp(0))
    compiled = simulate._scan._cache_size()
    trained(fed, mlp(1))
    assert simulate._scan._cache_size() == compiled


def test_plain_functions(fed):
    init = lambda key, x: jax.random.normal(key, (x.size, 3))

    def apply(w, x, rng, train):
        return (jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), 2 * x, 0) if train else x) @ w

    task = jfl.models.functions(fed, init, apply)
    params = task.init(KEY)
    assert params.shape == (3, 3) and drawn(task, params, fed.x[0], fed.y[0]) > 3
    np.testing.assert_allclose(task.predict(params, fed.x[0]), fed.x[0] @ params, rtol=1e-5)


@pytest.mark.slow
def test_an_edit_of_a_model_gives_other_noise(fed):
    """One seed; the class of the module is part of the plan's identity."""

    def run(width):
        class Wide(nn.Module):
            @nn.compact
            def __call__(self, x, train):
                return nn.Dense(3)(x) * (1 + 0 * width)

        return trained(fed, jfl.models.flax(fed, Wide()), rounds=1).params["Dense_0"]["bias"]

    assert np.array_equal(run(1), run(1)) and not np.array_equal(run(1), run(2))


@pytest.mark.slow
@pytest.mark.parametrize("canary", ["worst case", "mislabelled", "direction"])
def test_a_loss_with_a_key_is_audited(fed, canary):
    plan = plan_of(fed, jfl.models.flax(fed, Dropped()), noise=2.0)
    found = jfl.audit(plan, 2, 2000, 1e-2, unit="example", canary=canary, confidence=1 - 1e-6)
    assert found.epsilon <= found.proved.epsilon and found.mu > 0


# --- what is refused


class NnxNormed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(x[None])[0]


class Always(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda fed: jfl.models.flax(fed, nn.Dense(4)), r"to \[3\], for class labels"),
        (lambda fed: jfl.models.flax(fed, NNX), r"expected a flax\.linen module, but got"),
        (lambda fed: jfl.models.nnx(fed, 3), r"models\.nnx: expected a flax\.nnx model"),
        (lambda fed: jfl.models.nnx(fed, lambda rngs: 3), r"expected a flax\.nnx model"),
        (lambda fed: jfl.models.nnx(fed, NnxNormed), "without BatchNorm.*GroupNorm"),
        (lambda fed: jfl.models.flax(fed, Always()), "take `train` or `deterministic`"),
        (lambda fed: jfl.models.flax(fed, nn.Dense(3), target="tokens"), r"tokens Int\[n, T\]"),
        (lambda fed: jfl.models.flax(fed, nn.Dense(3), target="words"), "target"),
        (lambda fed: jfl.models.functions(fed, KEY, lambda w, x: x), "init, a pure function"),
    ],
)
def test_what_does_not_fit(fed, make, words):
    with pytest.raises(ValueError, match=f"(?i){words}"):
        make(fed)


def test_batch_norm_of_equinox_is_refused(fed, eqx):
    model = eqx.nn.Sequential([eqx.nn.BatchNorm(3, "batch", mode="ema")])
    with pytest.raises(ValueError, match=r"models\.equinox: .*BatchNorm.*GroupNorm"):
        jfl.models.equinox(fed, model)


# --- targets


def rows(x, y, classes):
    data = jfl.datasets.arrays(x[:70], y[:70], x[70:], y[70:], classes=classes)
    return jfl.federate(data, jfl.partition.iid(CLIENTS), holdout=0.4)


@pytest.mark.slow
def test_sequences_with_masks_against_numpy():
    r = np.random.default_rng(1)
    y = np.where(r.random((90, 6)) < 0.3, -1, r.integers(0, 5, (90, 6)))
    fed = rows(r.integers(0, 5, (90, 6)), y, 5)
    task = jfl.models.flax(fed, nn.Sequential([nn.Embed(5, 4), nn.Dense(5)]))
    out = trained(fed, task)
    log_p = np.stack([jax.nn.log_softmax(task.predict(out.params, x)) for x in fed.x_test])
    y = np.asarray(fed.y_test)
    counted = y >= 0
    nll = -np.take_along_axis(log_p, np.maximum(y, 0)[..., None], -1)[..., 0] * counted
    metrics = jax.tree.map(lambda v: np.asarray(v)[-1], out.metrics)
    assert metrics.loss == pytest.approx((nll.sum(1) / counted.sum(1)).mean(), rel=1e-5)
    right = ((log_p.argmax(-1) == y) & counted).sum() / counted.sum()
    assert metrics.accuracy == pytest.approx(right)
    perplexity = np.exp(nll.sum() / counted.sum())
    assert metrics.custom["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    of_clients = []
    for index, size in zip(np.asarray(fed.test_index), np.asarray(fed.test_size)):
        guess = np.stack([np.argmax(task.predict(out.params, fed.x[i]), -1) for i in index[:size]])
        labels = np.asarray(fed.y)[index[:size]]
        of_clients.append(((guess == labels) & (labels >= 0)).sum() / (labels >= 0).sum())
    assert metrics.client_accuracy == pytest.approx(np.mean(of_clients), rel=1e-5)
    percentiles = np.percentile(of_clients, (10, 25, 50, 75, 90))
    np.testing.assert_allclose(metrics.client_percentiles, percentiles, rtol=1e-5)
    assert "bookkeeping" == gradient_path(plan_of(fed, task))


@pytest.mark.slow
def test_regression_and_several_labels_against_numpy():
    r = np.random.default_rng(2)
    x = r.normal(size=(90, 4)).astype(np.float32)
    fed = rows(x, r.normal(size=(90, 2)), 0)
    task = jfl.models.flax(fed, nn.Dense(2))
    out = trained(fed, task)
    guess = np.stack([task.predict(out.params, x) for x in fed.x_test])
    error = guess - np.asarray(fed.y_test)
    assert out.metrics.accuracy is None and out.metrics.client_accuracy is None
    assert out.metrics.loss[-1] == pytest.approx(0.5 * (error**2).sum(1).mean(), rel=1e-5)
    assert out.metrics.custom["rmse"][-1] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-5)

    fed = rows(x, (r.random((90, 3)) < 0.5).astype(float), 0)
    task = jfl.models.flax(fed, nn.Dense(3), target="labels")
    out = trained(fed, task)
    logits = np.stack([task.predict(out.params, x) for x in fed.x_test])
    y = np.asarray(fed.y_test)
    assert out.metrics.accuracy[-1] == pytest.approx(((logits > 0) == (y > 0.5)).mean())
    loss = np.logaddexp(0, logits) - y * logits
    assert out.metrics.loss[-1] == pytest.approx(loss.mean(), rel=1e-5)

    # y [n] and an output without an axis
    fed = rows(x, r.normal(size=90), 0)
    task = jfl.models.functions(fed, lambda key: jnp.zeros(4), lambda w, x: x @ w)
    assert np.isfinite(trained(fed, task).metrics.custom["rmse"]).all()


@pytest.mark.slow
def test_custom_metrics(fed):
    """A number a row; a pair; and something done to the mean in the end."""
    confident = lambda w, x, y: jax.nn.softmax(x @ w).max()
    ones = lambda w, x, y: ((jnp.argmax(x @ w) == 1) * (y == 1), y == 1)
    root = jfl.Metric(jfl.Fn(confident), jfl.Fn(jnp.sqrt))
    loss, predict = lambda w, x, y: entropy(x @ w, y), lambda w, x: x @ w
    metrics = dict(confident=confident, recall=ones, root=root)
    task = jfl.task(jnp.zeros((3, 3)), loss, predict, metrics=metrics)
    out = trained(fed, task)
    w, x, y = np.asarray(out.params), np.asarray(fed.x_test), np.asarray(fed.y_test)
    p = np.asarray(jax.nn.softmax(x @ w))
    custom = {k: float(v[-1]) for k, v in out.metrics.custom.items()}
    assert custom["confident"] == pytest.approx(p.max(1).mean(), rel=1e-5)
    assert custom["root"] == pytest.approx(np.sqrt(p.max(1).mean()), rel=1e-5)
    assert custom["recall"] == pytest.approx((p.argmax(1) == 1)[y == 1].mean(), rel=1e-5)
    # what is watched is no part of the noise
    plain = jfl.task(jnp.zeros((3, 3)), task.loss, task.predict)
    assert np.array_equal(trained(fed, plain).params, out.params)
    for bad in (dict(loss=confident), {"": confident}, dict(a=3), [confident]):
        with pytest.raises(ValueError, match="metric"):
            jfl.task(jnp.zeros(3), task.loss, metrics=bad)


# --- parts of a model


class Backbone(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3, name="head")(nn.relu(nn.Dense(self.width, name="body")(x)))


@pytest.mark.slow
def test_a_head_on_a_frozen_body(fed):
    task = jfl.models.flax(fed, Backbone())
    pretrained = task.init(jax.random.key(9))
    part = jfl.models.flax(fed, Backbone(), trainable="head/*", params=pretrained)
    out = trained(fed, part)
    assert sorted(out.params) == ["head/bias", "head/kernel"]
    whole = jfl.models.merged(part, out.params)
    assert np.array_equal(whole["body"]["kernel"], pretrained["body"]["kernel"])
    assert not np.array_equal(whole["head"]["kernel"], pretrained["head"]["kernel"])
    x = fed.x_test[0]
    np.testing.assert_allclose(part.predict(out.params, x), task.predict(whole, x), rtol=1e-5)

    # the same as a loss that closes over the body
    def loss(head, x, y):
        tree = {"head": {"kernel": head["head/kernel"], "bias": head["head/bias"]}}
        return task.loss({**pretrained, **tree}, x, y)

    mine, theirs = (jax.grad(f)(part.init(KEY), fed.x[1], fed.y[1]) for f in (loss, part.loss))
    close(mine, theirs)
    assert gradient_path(plan_of(fed, part)) == "bookkeeping"


class LoRA(nnx.Module):
    """A layer whose own weights stay, beside a product of two small ones."""

    def __init__(self, rngs):
        self.body = nnx.Linear(3, 8, rngs=rngs)
        self.low_rank = nnx.LoRA(3, 2, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.body(x) + self.low_rank(x)))


@pytest.mark.slow
def test_lora_of_nnx(fed):
    """The weights come with the model; only the two small matrices are trained."""
    model = LoRA(nnx.Rngs(0))
    task = jfl.models.nnx(fed, model, trainable="low_rank/*")
    out = trained(fed, task)
    assert sorted(out.params) == ["low_rank/lora_a", "low_rank/lora_b"]
    nnx.update(model, jfl.models.merged(task, out.params))
    np.testing.assert_allclose(task.predict(out.params, fed.x[0]), model(fed.x[0]), rtol=1e-5)
    assert gradient_path(plan_of(fed, task)) == "bookkeeping"


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(512, name="middle")(nn.Dense(512, name="body")(x))
        return nn.Dense(3, name="head")(x)


@pytest.mark.slow
def test_a_frozen_part_is_one_copy_for_all_clients():
    """What the compiled program holds at once does not grow by a copy for each client."""
    copy = 4 * 512 * 512  # bytes of the middle layer

    def bytes_of(which, clients):
        fed = make_federation(classes=3, sizes=(4,) * clients)
        task = jfl.models.flax(fed, Deep())
        part = jfl.models.trainable(task, which, task.init(KEY))
        algorithm = jfl.algorithms.fedsgd(jfl.grad(part.loss))
        plan = jfl.plan(fed, part, algorithm, jfl.sampling.full(clients))
        scan = lambda run, plan: jfl.scan(run, plan, jnp.array([1]))[0]
        compiled = jax.jit(scan).lower(jfl.init(KEY, plan), plan).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    more = lambda which: bytes_of(which, 12) - bytes_of(which, 4)
    assert more("*") > 8 * copy  # each client has its own
    assert more("head/*") < copy


def test_written_weights_of_bfloat16_can_be_read(tmp_path):
    params = {"a": {"b": jnp.array([1.5, -3e38], jnp.bfloat16)}, "c": jnp.ones(2)}
    jfl.models.write_params(tmp_path / "model.npz", params)
    read = jfl.models.read_params(tmp_path / "model.npz")
    assert np.array_equal(read["a/b"], np.asarray(params["a"]["b"], np.float32))


def test_weights_from_a_file(fed, tmp_path):
    from flax.serialization import msgpack_serialize

    task = jfl.models.flax(fed, Backbone())
    params = jax.device_get(task.init(jax.random.key(4)))
    body = {f"body.{name}": value for name, value in params["body"].items()}
    np.savez(tmp_path / "body.npz", **body)
    (tmp_path / "all.msgpack").write_bytes(msgpack_serialize(params))
    read = lambda name: jfl.models.read_params(tmp_path / name)
    some = jfl.models.flax(fed, Backbone(), trainable="head/*", params=read("body.npz"))
    start = jfl.models.merged(some, some.init(KEY))
    assert np.array_equal(start["body"]["kernel"], params["body"]["kernel"])
    drawn = task.init(KEY)["head"]["kernel"]
    assert np.array_equal(start["head"]["kernel"], drawn)  # from the seed of the run
    whole = jfl.models.flax(fed, Backbone(), params=read("all.msgpack"))
    assert same_bits(whole.init(KEY), params)
    with pytest.raises(ValueError, match=r"\.npz, \.safetensors or \.msgpack"):
        read("weights.bin")
    bad = {"body/kernel": np.zeros((2, 2))}
    for which, given, words in (
        ("*lora*", params, "matches none of body/bias"),
        ("head/*", None, "parameters for every frozen layer, but got none for body/bias"),
        ("head/*", bad, r"shapes: body/kernel \[3, 8\], but got \[2, 2\]"),
        ("head/*", {"tail": np.zeros(2)}, "params by the paths.*got tail"),
        (None, {}, "params by the paths.*got none"),
    ):
        with pytest.raises(ValueError, match=words):
            jfl.models.trainable(task, which, given)
    with pytest.raises(ValueError, match="models.merged"):
        jfl.models.merged(task, params)
