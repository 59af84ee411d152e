"""What correlated noise proves: one Gaussian release over the run, read off the sampler."""

import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest
from helpers.problems import make_federation, squared, start_params

import jfl
from jfl.core.errors import NotAnalysable
from jfl.privacy import guarantees
from jfl.privacy.accountants import events
from jfl.privacy.accountants.tightest import epsilon
from jfl.privacy.mechanisms.strategies import (
    banded_toeplitz,
    blt,
    dense,
    identity,
    inverse_banded,
    restarted,
    square_root,
    tree,
)

pytestmark = pytest.mark.usefixtures("endless_noise")

C, DELTA = 12, 1e-5
FED, TASK = make_federation(sizes=(3,) * C), jfl.task(start_params(), squared)
FEDAVG = jfl.algorithms.fedavg(jfl.grad(squared), steps=1, batch=jfl.batches.full())
MANY = make_federation(sizes=(1,) * 10_000)
STRATEGIES = {
    "identity": lambda n, k, b: identity(n),
    "tree": lambda n, k, b: tree(n),
    "restarted": lambda n, k, b: restarted(tree(4), n),
    "square root": lambda n, k, b: square_root(n),
    "banded": lambda n, k, b: banded_toeplitz(n, min(b, 3), participations=k, separation=b),
    "inverse banded": lambda n, k, b: inverse_banded(n, 3, participations=k, separation=b),
    "blt": lambda n, k, b: blt(n, 2, participations=k, separation=b),
    "dense": lambda n, k, b: dense(n, participations=k, separation=b),
}


@functools.cache
def strategy_of(name, rounds=12, separation=1):
    """Return a strategy for clients that come every `separation` rounds; some are searched for."""
    return STRATEGIES[name](rounds, -(-rounds // separation), separation)


def groups(separation, cohort=4):
    """Clients of which each stays away for some rounds; all of them in every round for 1."""
    if separation == 1:
        return jfl.sampling.full(C)
    return jfl.sampling.min_separation(C, cohort, separation)


def plan(noise, sampler=None, fed=FED, **options):
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(4.0))
    sampler = sampler or jfl.sampling.full(len(fed.size))
    return jfl.plan(fed, TASK, FEDAVG, sampler, release=release, **options)


def upload_plan(noise, sampler=None, **options):
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise)
    return jfl.plan(FED, TASK, FEDAVG, sampler or groups(1), upload=chain, **options)


def gaussian(z):
    return epsilon(events.gaussian(z), DELTA)[0]


def near(value, rel=1e-6):
    return pytest.approx(value, rel=rel)


@pytest.mark.by_default("1-replace_one-2-square root", *(f"3-zero_out-1-{n}" for n in STRATEGIES))
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("adjacency, sides", [("replace_one", 2), ("zero_out", 1)])
@pytest.mark.parametrize("separation", [1, 3])
def test_a_run_is_one_gaussian_release(name, separation, adjacency, sides):
    n, made = 12, strategy_of(name, separation=separation)
    sens = made.sensitivity(-(-n // separation), separation, epochs=True)
    one = plan(jfl.correlated(3.0, made), groups(separation), adjacency=adjacency)
    found = jfl.guarantee(one, n, DELTA)
    # the noise multiplier is in units of the sensitivity of a round, which replacing doubles
    assert found.epsilon == near(gaussian(3.0 / sens))
    assert float(jfl.privacy.mechanisms.chain.sensitivity(one.release)) == sides
    assert found.adjacency == adjacency and found.method.startswith("matrix_gaussian")
    assert (found.status, found.view, found.unit) == ("proved", "third_party", "client")


@pytest.mark.parametrize(
    "sampler, adjacency, sides",
    [
        (jfl.sampling.full(C), "replace_one", 1),
        (jfl.sampling.without_replacement(C, 2), "zero_out", 2),
        (jfl.sampling.poisson(C, 0.1, C), "add_remove", 2),
        (jfl.sampling.first_responders(C, 4, latency_spread=2.0), "replace_one", 1),
    ],
)
def test_samplers_without_turns_count_every_round(sampler, adjacency, sides):
    """Also what is implied for examples, which move an upload by up to twice its bound, as
    replacing the client does: absence hides none of them in noise that is correlated."""
    made = square_root(6)
    one = plan(jfl.correlated(4.0, made), sampler, adjacency=adjacency)
    clients, examples = (
        jfl.guarantee(one, 6, DELTA, unit=unit, view="third_party")
        for unit in ("client", "example")
    )
    assert clients.epsilon == near(gaussian(4.0 / made.sensitivity(6)))
    assert examples.epsilon == near(gaussian(4.0 / sides / made.sensitivity(6)))
    assert examples.implied and "participation" not in examples.method


def test_epsilon_after_each_round_ends_at_the_guarantee_and_never_falls():
    made = strategy_of("blt", separation=3)
    one = plan(jfl.correlated(2.0, made), groups(3, 2))
    path = jfl.epsilons(one, np.arange(13), DELTA)
    assert path[0] == 0 and (np.diff(path) >= 0).all() and path[1] == near(gaussian(2.0))
    for rounds in (5, 12):
        assert jfl.guarantee(one, rounds, DELTA).epsilon == near(path[rounds])


# --- amplification


@pytest.mark.parametrize(
    "z, bands, want",
    [  # computed for N = 10,000, a mean cohort of 100, 1,000 rounds, delta = 1e-5
        (1.0, 4, 4.185153),
        pytest.param(2.0, 16, 3.082661, marks=pytest.mark.slow),
        pytest.param(1.0, 32, 12.788545, marks=pytest.mark.slow),
        (2.0, 100, gaussian(2.0 / 10**0.5)),  # all of a group: no chance
    ],
)
def test_bands_and_cyclic_poisson_are_amplified_as_published(z, bands, want):
    """Fewer steps at a higher rate: the multiplier is over the length of a column of C."""
    made = banded_toeplitz(1000, bands)
    sampler = jfl.sampling.cyclic_poisson(10_000, 0.01 * bands, bands)
    noise = jfl.correlated(z * made.largest_column(), made)
    found = jfl.guarantee(plan(noise, sampler, MANY), 1000, DELTA)
    assert want * (1 - 1e-6) <= found.epsilon <= want * (1 + 3e-4)
    assert found.method.startswith("banded_cyclic_poisson")


def test_more_bands_than_turns_are_not_amplified():
    """What a client adds then meets its own next participation: sensitivity, and no chance."""
    made = banded_toeplitz(12, 6)
    one = plan(jfl.correlated(2.0, made), jfl.sampling.cyclic_poisson(C, 0.5, 4, capacity=C))
    found = jfl.guarantee(one, 12, DELTA)
    assert found.method.startswith("matrix_gaussian") and found.adjacency == "add_remove"
    assert found.epsilon == near(gaussian(2.0 / made.sensitivity(3, 4)))


def test_turns_alone_help_independent_noise_too(plans):
    """A client of a group takes part in a third of the rounds."""
    assert jfl.guarantee(plans.rotating, 7, DELTA).epsilon == near(gaussian(2.0 / 3**0.5))
    drawn = plan(jfl.gaussian(2.0), jfl.sampling.cyclic_poisson(C, 0.5, 3, capacity=C))
    wanted = epsilon(events.repeat(events.poisson(0.5, events.gaussian(2.0)), 3), DELTA)[0]
    assert jfl.guarantee(drawn, 7, DELTA).epsilon == near(wanted, 1e-5)


def test_calibration_finds_the_multiplier():
    made = banded_toeplitz(16, 4, participations=4, separation=4)
    one = lambda z: plan(jfl.correlated(z, made), groups(4, 2))
    z = jfl.calibrate(one(1.0), epsilon=3.0, rounds=16, delta=DELTA)
    assert 2.99 < jfl.guarantee(one(z), 16, DELTA).epsilon <= 3.0


# --- uploads


@pytest.mark.by_default("1-8-square root", "3-12-tree", "3-8-inverse banded", "3-8-dense")
@pytest.mark.parametrize("name", ["tree", "square root", "inverse banded", "dense"])
@pytest.mark.parametrize("separation, rounds", [(1, 8), (3, 12), (3, 8)])
def test_a_cap_counts_the_joint_release(name, separation, rounds):
    """No pattern of `cap` participations moves the release of all rounds further."""
    made = strategy_of(name, separation=separation)
    sampler = groups(separation, 2) if separation > 1 else jfl.sampling.without_replacement(C, 4)
    one = upload_plan(jfl.correlated(4.0, made), sampler)
    asked = dict(unit="client", view="server")
    whole = jfl.guarantee(one, rounds, DELTA, **asked)
    assert whole.method.startswith("matrix_gaussian") and whole.status == "proved"
    planned = whole.epsilon
    # others' noise is no help
    third = jfl.guarantee(one, rounds, DELTA, unit="client", view="third_party")
    assert third.epsilon == near(planned)
    most, matrix, before = -(-rounds // separation), made.matrix_until(rounds), 0.0
    for cap in range(1, most + 1):
        found = jfl.guarantee(one, rounds, DELTA, cap=cap, **asked)
        turns = [range(first, rounds, separation) for first in range(separation)]
        patterns = [p for g in turns for p in itertools.combinations(g, min(cap, len(g)))]
        moved = max(np.linalg.norm(matrix[:, list(p)].sum(1)) for p in patterns)
        assert found.epsilon >= gaussian(4.0 / moved) * (1 - 1e-6), cap
        assert before <= found.epsilon <= planned * (1 + 1e-9) and found.status == "conditional"
        before = found.epsilon
    assert found.epsilon == near(planned, 1e-9)
    if rounds == 12:
        assert planned == near(gaussian(4.0 / made.sensitivity(most, separation, epochs=True)))
    seen = np.zeros(C, int)
    seen[5] = 2
    described = jfl.guarantee(one, rounds, DELTA, realised=seen, **asked)
    twice = jfl.guarantee(one, rounds, DELTA, cap=2, **asked).epsilon
    assert described.epsilon == twice and described.status == "descriptive"
    each = guarantees.epsilons_per_client(one, rounds, DELTA, view="server", realised=seen)
    assert each[5] == near(twice, 1e-9) and np.delete(each, 5).max() == 0


def test_noise_on_uploads_that_goes_on_is_not_counted_in_a_sum():
    """The server's noise beside it stands alone: the uploads' is not new in each round."""
    server = jfl.chain(jfl.bounded(1.0, "upload"), jfl.total(), jfl.gaussian(3.0))
    one = upload_plan(jfl.correlated(4.0, tree(12)), release=server)
    entries = [e for e in jfl.ledger(one, 12) if e.noise_of == "server" and not e.implied]
    assert [e.parts[0].summed for e in entries] == [None]
    together = upload_plan(jfl.correlated(4.0, tree(12)), secure_aggregation=True)
    proved = {e.view for e in jfl.ledger(together, 12) if not e.refusal}
    assert proved == {"server", "third_party"}


# --- what proves nothing, or less


@pytest.fixture(scope="module")
def plans():
    root, twelve = (jfl.correlated(2.0, square_root(n)) for n in (8, 12))
    spread = jfl.correlated(2.0, strategy_of("banded", separation=3))
    return types.SimpleNamespace(
        root=plan(root),
        steady=plan(jfl.gaussian(2.0)),
        rotating=plan(jfl.gaussian(2.0), groups(3)),
        paired=[plan(noise, paired_noise=True) for noise in (jfl.gaussian(2.0), root)],
        spread=lambda sampler: plan(spread, sampler),
        upload=upload_plan(twelve),
        twice=upload_plan(twelve, TWICE),
        turns=upload_plan(twelve, groups(3, 2)),
        apart=upload_plan(jfl.correlated(4.0, strategy_of("inverse banded", separation=3))),
    )


TWICE = jfl.sampling.with_replacement(C, 4)
SERVER = dict(delta=DELTA, view="server")


@pytest.mark.parametrize(
    "call, words",
    [
        # a client that is drawn twice would add twice as much
        (lambda p: jfl.guarantee(p.spread(TWICE), 6), "with_replacement"),
        (lambda p: jfl.guarantee(p.twice, 12, **SERVER), "with_replacement"),
        # a strategy for turns needs a sampler that keeps them
        (lambda p: jfl.guarantee(p.spread(groups(2)), 12), "stay away for 3 rounds"),
        (lambda p: jfl.guarantee(p.apart, 12, **SERVER), "stay away for 3 rounds"),
        # clients cannot keep buffers
        (
            lambda p: upload_plan(jfl.correlated(1.0, strategy_of("blt", separation=12))),
            "regenerates earlier",
        ),
        (lambda p: jfl.guarantee(p.upload, 13, **SERVER), "at most the 12 rounds"),
        (lambda p: jfl.guarantee(p.turns, 12, realised=np.full(C, 5), **SERVER), r"in 0\.\.4"),
        # parts of a run are not accounted apart
        (lambda p: jfl.guarantee([(p.root, 4), (p.root, 4)]), "from its round 0 on"),
        (lambda p: jfl.guarantee([(p.root, 4, 4)]), "a part that begins with round 4"),
        (lambda p: jfl.guarantee([(p.steady, 3), (p.root, 4, 4)]), "name those before it"),
        (
            lambda p: jfl.guarantee([(p.steady, 4), (p.root, 2), (p.root, 2)]),
            "name those before it",
        ),
        # plans with paired noise go on with the normals of the plan before
        (
            lambda p: jfl.guarantee([(p.paired[0], 4), (p.paired[1], 4)]),
            "round 4 and shares its noise",
        ),
        (lambda p: jfl.guarantee([(p.root, 8), (p.steady, 4, 0)]), "rounds 0 to 7 and 0 to 3"),
        (lambda p: jfl.guarantee(p.root, 8, view="server"), "The server sees every upload"),
        # rounds that do not stand alone are not counted one by one
        (lambda p: jfl.calibrate(p.root, epsilon=2.0, over="rounds"), "jfl.epsilons"),
        (lambda p: jfl.calibrate(p.rotating, epsilon=2.0, over="rounds"), "jfl.epsilons"),
    ],
)
def test_refusals(plans, call, words):
    with pytest.raises((ValueError, NotAnalysable), match=words):
        call(plans)


def test_runs_that_may_be_composed(plans):
    root, steady = plans.root, plans.steady
    # after another plan, the same one has noise of its own
    assert jfl.guarantee([(steady, 2), (root, 2), (steady, 2), (root, 2)]).status == "proved"
    assert jfl.guarantee([(root, 8)]).epsilon == near(jfl.guarantee(root, 8).epsilon)
    # two runs of other plans on the same clients: both of them
    other = plan(jfl.correlated(2.0, tree(8)))
    both = jfl.guarantee([(root, 8), (other, 8, 0)], seeds="different").epsilon
    sens = np.hypot(square_root(8).sensitivity(8), tree(8).sensitivity(8))
    assert both == near(gaussian(2.0 / sens))


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_that_begins_in_a_later_round_is_accounted_from_there(name):
    """Against all contributions of 0, 1 and -1 to the rounds that ran, seen through the noise that
    they had: all rows, or the first ones where buffers begin empty."""
    strategy, first = strategy_of(name, separation=12), 7
    quiet = plan(jfl.gaussian(1e7), adjacency="zero_out")
    made = plan(jfl.correlated(6.0, strategy), adjacency="zero_out")
    for rounds in (1, 4):
        rows = slice(0, rounds) if strategy.memory else slice(first, first + rounds)
        noise = strategy.noising()[rows]
        precision = np.linalg.inv(noise @ noise.T)
        patterns = map(np.array, itertools.product((-1, 0, 1), repeat=rounds))
        worst = max(x @ precision @ x for x in patterns)
        found = jfl.guarantee([(quiet, first), (made, rounds)], unit="client")
        columns = strategy.matrix()[:, first : first + rounds]
        most = np.sqrt(np.abs(columns.T @ columns).sum())
        low, high = gaussian(6.0 / np.sqrt(worst)), gaussian(6.0 / most)
        assert low * (1 - 1e-6) <= found.epsilon <= high * (1 + 1e-6)
        assert found.status == "proved"


class Mine(type(identity(6))):
    """A strategy of a user's own."""


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: strategy_of("blt", separation=12), dict(column=np.r_[1.0, np.zeros(11)])),
        (lambda: strategy_of("blt", separation=12), dict(weight=np.zeros(2))),
        (lambda: strategy_of("inverse banded", separation=12), dict(column=np.ones(1))),
        (lambda: square_root(12), dict(rounds=14)),
        (lambda: dense(12), dict(table=np.eye(12))),
        (lambda: tree(12, efficient=True), dict(rounds=6)),
        (lambda: restarted(tree(4), 12), dict(normals=2)),
        (
            lambda: restarted(square_root(4), 12),
            dict(of=dataclasses.replace(square_root(4), column=[1.0])),
        ),
        (lambda: identity(12), None),
    ],
)
def test_a_strategy_that_was_changed_by_hand_is_taken_at_its_word(make, change):
    strategy = make()
    changed = Mine(**vars(strategy)) if change is None else dataclasses.replace(strategy, **change)
    for one, status in ((strategy, "proved"), (changed, "conditional")):
        made = plan(jfl.correlated(4.0, one), adjacency="zero_out")
        assert jfl.guarantee(made, 6, DELTA, unit="client").status == status


def test_a_sampler_that_claims_turns_is_not_believed(plans):
    honest, kept = jfl.sampling.without_replacement(C, 3), groups(3, 3)
    status = lambda s: jfl.guarantee(plans.spread(s), 12).status
    assert status(kept) == "proved"
    assert status(dataclasses.replace(kept, draw=honest.draw)) == "conditional"
    assert status(dataclasses.replace(kept, separation=6)) == "conditional"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "banded", "blt"])
def test_audited_is_no_more_than_proved(name):
    """The worst canary in the worst client, which comes every fourth round."""
    made = strategy_of(name, 8, 4)
    noise = jfl.correlated(1.5 * made.sensitivity(2, 4), made)
    report = jfl.audit(plan(noise, groups(4, 3), adjacency="zero_out"), 8, trials=4000)
    assert report.epsilon <= report.proved.epsilon and not report.refuted
    assert report.epsilon > 0.1 * report.proved.epsilon


@pytest.mark.slow
def test_less_noise_than_claimed_is_refuted():
    """The same audit, told that a client comes once where it comes in every round."""
    made = square_root(8)
    one = plan(jfl.correlated(2.0, made), adjacency="zero_out")
    once = epsilon(events.gaussian(2.0 / made.sensitivity(1)), 1e-2)[0]
    assert jfl.audit(one, 8, trials=4000, claimed=once).refuted
