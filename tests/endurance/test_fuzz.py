"""Bad input at scale: whatever comes, the answer is a result or a refusal that says where, what was
needed, what came."""

import contextlib
import io
import json
import re
import sys
import warnings
from fractions import Fraction
from unittest import mock

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from endurance import fuzz_readers as readers
from helpers.problems import make_federation, noisy_grad, noisy_release, squared, start_params
from helpers.report_pages import strict_json
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jfl
from jfl import algorithms, partition, sampling, schedules
from jfl.cli import main
from jfl.runs import config, train
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("own_cache")
FEW = settings(
    max_examples=120,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=6000)

# --- the public API

RAGGED, SEED = [[1], [2, 3]], jax.random.key(0)
ODD = [None, float("nan"), float("inf"), 1e-60, 1e300, "é∞", "", True, 1j, object(), RAGGED, (), {}]
ODD += [{"a": 1}, {1}, b"x", SEED, int, print, lambda: 1, lambda x: x, lambda *a: "abc"]
ODD += [Fraction(1, 2), range(3), jnp.float32(2), jnp.ones(1), jnp.zeros((0,)), jnp.bfloat16(1)]
ODD += [np.array([None]), np.array(3), np.zeros((0, 3)), np.uint8(200), np.datetime64("2020")]
ODD += [10**9, 10**12, 2**31, 2**63, 10**400, -(10**400)]
ARRAYS = st.tuples(
    hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)
WILD = st.one_of(
    st.sampled_from(ODD),
    st.sampled_from(ODD),
    st.integers(-3, 9),
    st.floats(),
    st.text(max_size=5),
    hnp.scalar_dtypes().flatmap(hnp.from_dtype),
    ARRAYS.flatmap(lambda of: hnp.arrays(*of)),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers(-2, 2) | st.text(max_size=2),
        lambda s: st.lists(s, max_size=3),
        max_leaves=5,
    ),
)

FED, TASK, PARAMS = make_federation(), jfl.task(start_params(), squared), start_params()
ONCE = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.1))
GRAD, PLAIN, BATCH = noisy_grad(), jfl.grad(squared), batches.without_replacement(2)
BANDS = jfl.bands.per_layer(start_params())
LOCAL = dict(lr=0.1, steps=2, batch=BATCH, server_lr=1.0)
OPTIMIZERS = dict(optimizer=optax.sgd, server_optimizer=optax.sgd)
FEDAVG, FULL = algorithms.fedavg(GRAD, batch=BATCH), sampling.full(7)
PARTS = dict(fed=FED, task=TASK, algorithm=FEDAVG, sampler=FULL)
PLAN = jfl.plan(**PARTS)
# an exact Gaussian, which is cheap to account
UPLOADS = jfl.plan(FED, TASK, algorithms.fedavg(PLAIN, batch=BATCH), FULL, upload=ONCE)
RUN = jfl.init(SEED, PLAN)


class Begun(Exception):
    """A run would begin now: nothing is wrong with what it was asked."""


def begins(function, step):
    """Return `function` up to a step, module:name, which would compute for long."""

    def until(**given):
        module, name = step.split(":")
        begun = mock.patch.object(sys.modules[module], name, side_effect=Begun)
        with begun, contextlib.suppress(Begun):
            return function(**given)

    return until


def at_3(make):
    return lambda **given: make(**given)(jnp.int32(3))


# Where, the function and arguments that it takes: a wild value replaces one or two of them.  The
# words before a space name the place in messages.
API = {
    "sampling.without_replacement": (sampling.without_replacement, dict(clients=3, cohort=2)),
    "sampling.with_replacement": (
        sampling.with_replacement,
        dict(clients=3, cohort=2, weights=[1.0, 2.0, 3.0], independent=False),
    ),
    "sampling.poisson": (sampling.poisson, dict(clients=3, rate=0.5, capacity=2)),
    "sampling.available_poisson": (
        sampling.available_poisson,
        dict(clients=3, rate=0.5, period=4, awake=0.5),
    ),
    "batches.without_replacement": (batches.without_replacement, dict(batch=3, short="error")),
    "batches.poisson rate": (batches.poisson, dict(rate=0.5, capacity=3)),
    "clip_l2": (jfl.clip_l2, dict(bound=1.0)),
    "clip_per_layer": (jfl.clip_per_layer, dict(bounds=1.0)),
    "clip_adaptive": (
        jfl.clip_adaptive,
        dict(initial=1.0, count=3, quantile=0.5, lr=0.2, indicator=0.1),
    ),
    "gaussian": (jfl.gaussian, dict(noise_multiplier=1.0, generator="philox")),
    "bounded": (jfl.bounded, dict(value=1.0, reason="upload")),
    "chain": (
        lambda first, last, adjacency: jfl.chain(first, last, adjacency=adjacency),
        dict(first=jfl.clip_l2(1.0), last=jfl.total(), adjacency=None),
    ),
    "private_grad": (
        lambda **given: jfl.private_grad(squared, **given),
        dict(mechanism=ONCE, l2=0.1, microbatch=2, path="auto", compute="float32"),
    ),
    "fedavg": (algorithms.fedavg, dict(grad=GRAD, **LOCAL, **OPTIMIZERS)),
    "schedules.exponential": (at_3(schedules.exponential), dict(initial=1.0, decay=0.5, total=3)),
    "simulate": (
        begins(jfl.simulate, "jfl.engine.simulate:_scan"),
        dict(key=SEED, plan=PLAN, rounds=2, evaluate_every=1, start=None, tolerate=(), mesh=None),
    ),
    "sweep": (
        begins(jfl.sweep, "jfl.engine.sweep:_Program"),
        dict(make_plan=lambda lr: PLAN, rounds=2, lr=[0.1, 0.2], seed=0, evaluate_every=1)
        | dict(points=None, memory=1e9, tolerate=(), mesh=None, watch=None),
    ),
    "sweep points": (
        begins(jfl.sweep, "jfl.engine.sweep:_Program"),
        dict(make_plan=lambda **given: PLAN, rounds=2, points=[dict(a=1), dict(seed=2)]),
    ),
    "scan": (
        begins(jfl.scan, "jfl.engine.round:derive_noise_key"),
        dict(run=RUN, plan=PLAN, rounds=[1, 1]),
    ),
    "plan": (
        jfl.plan,
        dict(release=noisy_release(), upload=None, weights="uniform", adjacency=None)
        | dict(chunk=2, paired_noise=False, **PARTS),
    ),
    "jfl.guarantee": (
        jfl.guarantee,
        dict(plan=UPLOADS, rounds=3, delta=1e-5, unit="client", view="server", adjacency=None)
        | dict(cap=2, quantile=None, realised=None, uplinks=0),
    ),
    "jfl.epsilons": (
        jfl.epsilons,
        dict(plan=UPLOADS, rounds=[1, 2], delta=1e-5, unit="client", view="server", adjacency=None),
    ),
    "jfl.calibrate": (
        jfl.calibrate,
        dict(plan=UPLOADS, epsilon=2.0, delta=1e-5, rounds=3, unit="client", view="server")
        | dict(adjacency=None, over="noise_multiplier"),
    ),
}
# what a function is made of says its own name
INNER = "algorithm bands clip_l2 divide gaussian jfl.guarantee mesh optimizer private_grad scan"
INNER = tuple(INNER.split()) + ("simulate", "models", "optimum", "client_weights")


def answered(where, function, given):
    """Return the refusal, or None for a result; anything else is a finding."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**given)
    except ValueError as error:
        said = str(error)
        assert readers.FORM.match(said), (where, given, said)
        assert said.startswith((where.split()[0], *INNER)), (where, given, said)
        assert len(said) < 3000, (where, said[:200])
        return said


@st.composite
def calls(draw):
    where = draw(st.sampled_from(sorted(API)))
    function, takes = API[where]
    names = draw(st.lists(st.sampled_from(sorted(takes)), min_size=1, max_size=2, unique=True))
    return where, function, takes | {name: draw(WILD) for name in names}


@FEW
@given(calls())
def test_wild_arguments_are_taken_or_refused(call):
    answered(*call)


@pytest.mark.slow
@MANY
@given(calls())
def test_many_wild_arguments_are_taken_or_refused(call):
    answered(*call)


@pytest.mark.parametrize("where", sorted(API))
def test_arguments_that_no_fuzz_may_miss(where):
    """Each argument as nothing, as a list of unequal lengths, as a key, as an empty array and as
    more than any machine holds."""
    function, takes = API[where]
    assert answered(where, function, takes) is None  # its own arguments are taken
    wild = None, RAGGED, SEED, np.zeros((0, 3)), np.array([1.0, 2.0]), 10**400, 10**12, np.nan
    for name in takes:
        for value in wild:
            answered(where, function, takes | {name: value})


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: sampling.full(10**12), "clients <= 2147483647"),
        (lambda: partition.iid(10**9)([0, 1]), "clients <= 2, the rows"),
        (lambda: partition.similarity(10**9)([0, 1]), "clients <= 2, the rows"),
        (lambda: algorithms.fedavg(GRAD, steps=10**12), "steps <= 2147483647"),
        (lambda: jfl.private_grad(squared, ONCE, l2=10**5000), "cannot be printed"),
        (lambda: jfl.simulate(SEED, PLAN, 10**9, evaluate_every=1), "at most 10000000 evaluations"),
        (lambda: jfl.simulate(jax.random.split(SEED), PLAN, 2), "a key such as"),
        (lambda: jfl.scan(RUN, PLAN, 3), "rounds Int[E]"),
        (lambda: jfl.sweep(lambda lr: PLAN, rounds=2, a=[1]), "to take ['a']"),
        (lambda: jfl.sweep(lambda lr: None, rounds=2, lr=[1]), "plan of make_plan"),
    ],
)
def test_found_by_the_fuzz(call, words):
    with pytest.raises(ValueError, match=re.escape(words)) as caught:
        call()
    assert readers.FORM.match(str(caught.value))


def test_what_the_checks_must_not_refuse():
    """Fixed rates over many rounds; old keys."""
    begin = begins(jfl.simulate, "jfl.engine.simulate:_scan")
    begin(key=jax.random.PRNGKey(0), plan=PLAN, rounds=10**9)


ACCOUNTED = dict(
    delta=(None, "a", np.nan, 0, 1, RAGGED, SEED, [1e-5]),
    rounds=(None, 0, 10**400, 2.5, RAGGED, True),
    unit=("user", RAGGED, np.array(["example"]), 3),
    view=("nobody", "all", SEED),
    adjacency=("none", np.zeros(0)),
    epsilon=(None, "a", np.nan, -1, 0, 10**400, RAGGED, [1.0, np.inf]),
)


@pytest.mark.parametrize("name", ACCOUNTED)
def test_accountants_refuse_alike(name):
    for value in ACCOUNTED[name]:
        given = dict(plan=PLAN, rounds=3, epsilon=1.0) | {name: value}
        assert answered("jfl.", jfl.calibrate, given)
        given.pop("epsilon")
        assert name == "epsilon" or answered("jfl.", jfl.guarantee, given)


# --- the command line

LITERALS = ["abc", "", "é∞", "a\nb\0", -1, 0, 2, 0.5, 1e-60, 1e300, 10**9, 2**32, True, [], [1, 2]]
LITERALS = [json.dumps(value) for value in [*LITERALS, [-1], [10**9], [[1]], [0.5, 0.5]]]
LITERALS += ["nan", "-inf", "1" + "0" * 400, "1" + "0" * 5000, "2020-01-01", "[nan]", "{a = 1}"]
NAMED = dict(
    algorithm=algorithms.__all__,
    partition=partition.__all__,
    sampler=sampling.__all__,
    batch_sampler=batches.__all__,
    clip=("flat", "per_layer", "adaptive"),
    unit=("example", "client"),
    noise_shape=("ellipsoid", "published"),
    mode=("as_printed",),
    view=("server", "third_party"),
    adjacency=("add_remove", "replace_one"),
    paper=("noble2022", "li2025", "ranaweera2025"),
    optimizer=("momentum", "adam"),
    lr_schedule=("inverse", "inverse_sqrt"),
    model=("logistic", "mlp", "cnn"),
)
SMALL = dict(dataset="digits", partition="iid", clients=4, model="logistic", rounds=2, steps=1)
SMALL |= dict(batch=2, noise_multiplier=1.0)
# what would be slow although it is right; the rest is refused or stops before a program is compiled
SLOW = {"epsilon", "delta", "per_client_noise", "clip_decay", "noise_decay", "dataset"}
SLOW |= {"preprocess"}


@contextlib.contextmanager
def not_begun(out):
    raise Begun
    yield


def told(monkeypatch, argv):
    """Return the exit code of a command in this process, None if a run would begin, and what it
    said on stderr."""
    said = io.StringIO()
    with (
        monkeypatch.context() as patch,
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        patch.setattr(train, "locked", not_begun)
        patch.setattr("jfl.runs.sweep.locked", not_begun)
        try:
            code = main.main([str(a) for a in argv])
        except Begun:
            code = None
    return code, said.getvalue()


@st.composite
def configs(draw, slow=False):
    """The text of a config: a small one with one to three fields replaced, by words that exist or
    by anything."""
    lines = {k: json.dumps(v) for k, v in SMALL.items()}
    names = sorted(config.FIELDS if slow else config.FIELDS.keys() - SLOW)
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)):
        exists = [json.dumps(v) for v in NAMED.get(name, ())]
        lines[name] = draw(st.sampled_from(exists * 9 + LITERALS))
    bad_lines = ["[", "lrr = 1", "a = 1\na = 2", "\\"]
    end = draw(st.sampled_from([""] * 9 + bad_lines))
    return "".join(f"{k} = {v}\n" for k, v in lines.items()) + end


def commanded(monkeypatch, folder, command, text):
    (folder / "c.toml").write_text(text, encoding="utf-8")
    out, more = folder / "out", ["--sweep", "seed=0,1"] if command == "sweep" else []
    argv = [command, "--config", folder / "c.toml", "--out", out, *more]
    code, said = told(monkeypatch, argv)
    assert code in (None, 0, 2, 3) and "Traceback" not in said, (argv, text, said)
    if code == 2:
        words = said.replace("\n", " ")
        parser = re.search(r"Parsing error|Unrecognized|Missing|Required|invalid|─", words)
        assert parser or re.search(r"jfl \w+: .*expected .*, but got ", words), (argv, text, said)
    assert not out.exists(), (argv, text, said)


@settings(FEW, max_examples=16)
@given(st.sampled_from(["train", "train", "sweep"]), configs())
def test_wild_configs_are_run_or_refused(monkeypatch, tmp_path_factory, command, text):
    commanded(monkeypatch, tmp_path_factory.mktemp("wild"), command, text)


@pytest.mark.slow
@settings(FEW, max_examples=500)
@given(st.sampled_from(["train", "sweep"]), configs(slow=True))
def test_many_wild_configs_are_run_or_refused(monkeypatch, tmp_path_factory, command, text):
    commanded(monkeypatch, tmp_path_factory.mktemp("wild"), command, text)


OPTIONS = "--rounds --lr --out --config --sweep --epsilon --rate --over --help --resume".split()
WORDS = [*OPTIONS, "-1", "0", "1e400", "", "=", "lr=1,2", "rate=", "é", "--", "/no/such/file"]


COMMANDS = ["train", "sweep", "epsilon", "calibrate", "report", "list", "demo", "nonsense"]


@settings(FEW, max_examples=12)
@given(st.sampled_from(COMMANDS), st.lists(st.sampled_from(WORDS), min_size=1, max_size=4))
def test_wild_words_are_answered(monkeypatch, tmp_path_factory, command, words):
    folder = tmp_path_factory.mktemp("words")
    monkeypatch.chdir(folder)
    quick = command in ("epsilon", "calibrate", "demo")
    code, said = told(monkeypatch, [command, *words, *(["--nonsense"] if quick else [])])
    assert code in (None, 0, 2) and "Traceback" not in said, (command, words, said)
    assert not list(folder.iterdir()), (command, words)


@pytest.mark.filterwarnings("ignore:sweep. the point")
def test_a_run_that_goes_wrong_leaves_no_nan(tmp_path):
    """If the loss of a point of a sweep is no number, it is left empty, the other is whole, and all
    files are JSON."""
    options = {k.replace("_", "-"): v for k, v in SMALL.items() if k != "noise_multiplier"}
    small = [f"--{k}={v}" for k, v in options.items()]
    out = tmp_path / "out"
    assert main.main(["sweep", *small, "--sweep", "lr=0.1,1e38", "--out", str(out)]) == 0
    for path in out.glob("*.json"):
        strict_json(path)
    metrics = (out / "metrics.csv").read_text()
    assert not re.search(r"\b(nan|inf|infinity)\b", metrics, re.IGNORECASE)
    good, bad = json.loads((out / "summary.json").read_text())["runs"]
    assert good["loss"] > 0 and (bad["loss"] is None or bad["failed"])


def wild_bytes(name, folder, examples, most):
    """Read bytes that Hypothesis draws; those behind an odd first byte are mutations of seeds."""
    mutations = st.binary(min_size=1, max_size=most // 6).map(lambda data: b"\1" + data)

    @settings(FEW, max_examples=examples)
    @given(st.binary(max_size=most) | mutations)
    def wild(data):
        read(folder, name, data)

    wild()


# --- readers


def read(folder, name, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            readers.TARGETS[name](folder, data)
        except ValueError as error:
            assert readers.legal(error), (name, data, error)
            return str(error)


@pytest.mark.parametrize("name", readers.TARGETS)
def test_seeds_and_wild_bytes_are_read_or_refused(name, tmp_path):
    for data in readers.seeds(name):
        read(tmp_path, name, data)
    wild_bytes(name, tmp_path, examples=15, most=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", readers.TARGETS)
def test_many_wild_bytes_are_read_or_refused(name, tmp_path):
    wild_bytes(name, tmp_path, examples=1500, most=300)


@pytest.mark.parametrize(
    "name, data",
    [
        ("config", b"lr = 1" + b"0" * 400),  # a float beyond 1e308
        ("config", b"rounds = 1" + b"0" * 5000),  # more digits than Python reads
        ("config", b"a = " + b"[" * 2000),  # deeper than Python's stack
        ("config", b'paper = "a\\"b\\n"'),  # goes through a file again
        ("results", b'\0{"lines": {"a": {"accuracy": [1' + b"0" * 400 + b"]}}}"),
        # too large for a picture
        ("results", b'\0{"lines": {"a": {"accuracy": [1e308, -1e308]}}}'),
        ("metrics", readers.METRICS.replace("0.5", "nan").encode()),
        ("metrics", readers.METRICS.replace("0,1", "0," + "1" * 400).encode()),
    ],
)
def test_bytes_found_by_the_fuzz(name, data, tmp_path):
    read(tmp_path, name, data)


def test_a_journal_as_a_run_writes_it_is_read(tmp_path):
    journal = lambda **change: b"\0" + json.dumps(readers.JOURNAL | change).encode()
    assert read(tmp_path, "journal", journal()) is None
    assert "another digest" in read(tmp_path, "journal", journal(until=4))
