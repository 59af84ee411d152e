"""What correlated noise proves: one Gaussian release over the run, read off the sampler."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
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
FED = make_federation(sizes=(3,) * C)
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


def plan(noise, sampler=None, fed=FED, adjacency=None, **options):
    clients = len(fed.size)
    alg = jfl.algorithms.fedavg(
        jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.without_replacement(1)
    )
    release = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise, jfl.divide(4.0))
    return jfl.plan(
        fed,
        jfl.task(start_params(), squared),
        alg,
        sampler or jfl.sampling.full(clients),
        release=release,
        adjacency=adjacency,
        **options,
    )


def gaussian(z):
    return epsilon(events.gaussian(z), DELTA)[0]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("separation", [1, 3])
def test_a_run_is_one_gaussian_release(name, separation):
    n = 10
    made = STRATEGIES[name](n, -(-n // separation), separation)
    sampler = None if separation == 1 else jfl.sampling.min_separation(C, 4, separation)
    for adjacency, sides in (("replace_one", 2), ("zero_out", 1)):
        made_plan = plan(jfl.correlated(3.0, made), sampler, adjacency=adjacency)
        found = jfl.guarantee(made_plan, n, DELTA)
        sens = made.sensitivity(-(-n // separation), separation, epochs=True)
        # the noise multiplier is in units of the sensitivity of a round, which replacing doubles
        assert found.epsilon == pytest.approx(gaussian(3.0 / sens), rel=1e-6)
        assert found.adjacency == adjacency and found.method.startswith("matrix_gaussian")
        assert found.status == "proved" and found.view == "third_party" and found.unit == "client"
        std = jfl.privacy.mechanisms.chain.sensitivity(made_plan.release)
        assert float(std) == sides


@pytest.mark.parametrize("adjacency", ["replace_one", "zero_out", "add_remove"])
def test_what_is_implied_for_examples_counts_all_rounds_too(adjacency):
    """An example moves an upload by up to twice its bound: as replacing the client does."""
    made = square_root(6)
    one = plan(jfl.correlated(4.0, made), adjacency=adjacency)
    found = jfl.guarantee(one, 6, DELTA, unit="example", view="third_party")
    sides = 1 if adjacency == "replace_one" else 2
    assert found.implied
    assert found.epsilon == pytest.approx(gaussian(4.0 / sides / made.sensitivity(6)), rel=1e-6)


def test_epsilon_after_each_round_ends_at_the_guarantee_and_never_falls():
    made = blt(30, 2, participations=6, separation=5)
    one = plan(jfl.correlated(2.0, made), jfl.sampling.min_separation(C, 2, 5))
    path = jfl.epsilons(one, np.arange(31), DELTA)
    assert path[0] == 0 and (np.diff(path) >= 0).all()
    assert path[-1] == pytest.approx(jfl.guarantee(one, 30, DELTA).epsilon, rel=1e-6)
    assert path[1] == pytest.approx(gaussian(2.0), rel=1e-6)
    # a table per number of rounds knows no less
    for rounds in (3, 6, 17):
        own = jfl.guarantee(one, rounds, DELTA).epsilon
        assert own == pytest.approx(path[rounds], rel=1e-6)


@pytest.mark.by_default("min_separation")
@pytest.mark.parametrize("sampler", ["min_separation", "cyclic_poisson"])
def test_calibration_finds_the_multiplier(sampler):
    drawn = (
        jfl.sampling.min_separation(C, 2, 4)
        if sampler == "min_separation"
        else jfl.sampling.cyclic_poisson(C, 0.7, 4, capacity=C)
    )
    made = banded_toeplitz(16, 4, participations=4, separation=4)
    z = jfl.calibrate(plan(jfl.correlated(1.0, made), drawn), epsilon=3.0, rounds=16, delta=DELTA)
    assert 2.99 < jfl.guarantee(plan(jfl.correlated(z, made), drawn), 16, DELTA).epsilon <= 3.0


# computed for N = 10,000, a mean cohort of 100, 1,000 rounds, delta = 1e-5
CYCLIC = {
    (1.0, 1): 1.828244,
    (1.0, 4): 4.185153,
    (1.0, 16): 9.083010,
    (1.0, 32): 12.788545,
    (2.0, 16): 3.082661,
    (4.0, 4): 0.587431,
    (0.6, 4): 14.037368,
}


@pytest.fixture(scope="module")
def many():
    """10,000 clients with one row."""
    x, y = np.zeros((10_000, 3), np.float32), np.zeros(10_000, np.float32)
    fed = make_federation()
    rows = jnp.arange(10_000, dtype=jnp.int32)
    return dataclasses.replace(
        fed,
        x=jnp.asarray(x),
        y=jnp.asarray(y),
        index=rows[:, None],
        size=jnp.ones(10_000, jnp.int32),
        test_index=jnp.zeros((10_000, 0), jnp.int32),
        test_size=jnp.zeros(10_000, jnp.int32),
    )


@pytest.mark.by_default("1.0-4", "2.0-16", "0.6-4")
@pytest.mark.parametrize("z, bands", CYCLIC)
def test_bands_and_cyclic_poisson_are_amplified_as_published(many, z, bands):
    """Fewer steps at a higher rate: the multiplier is over the length of a column of C."""
    rate, n = 0.01 * bands, 1000
    made = identity(n) if bands == 1 else banded_toeplitz(n, bands)
    sampler = (
        jfl.sampling.poisson(10_000, rate)
        if bands == 1
        else jfl.sampling.cyclic_poisson(10_000, rate, bands)
    )
    noise = jfl.correlated(z * made.largest_column(), made)
    if bands == 1:  # without turns correlated noise has no amplification; independent noise has
        noise = jfl.gaussian(z)
    found = jfl.guarantee(plan(noise, sampler, many), n, DELTA)
    assert found.epsilon == pytest.approx(CYCLIC[z, bands], rel=3e-4)
    assert found.epsilon >= CYCLIC[z, bands] * (1 - 1e-6)
    assert found.method.startswith("" if bands == 1 else "banded_cyclic_poisson")


def test_all_of_a_group_is_no_chance(many):
    made = banded_toeplitz(1000, 100)
    sampler = jfl.sampling.cyclic_poisson(10_000, 1.0, 100)
    noise = jfl.correlated(2.0 * made.largest_column(), made)
    found = jfl.guarantee(plan(noise, sampler, many), 1000, DELTA).epsilon
    assert found == pytest.approx(gaussian(2.0 / 10**0.5), rel=1e-4)


def test_more_bands_than_turns_are_not_amplified():
    """What a client adds then meets its own next participation: sensitivity, and no chance."""
    made = banded_toeplitz(12, 6)
    one = plan(jfl.correlated(2.0, made), jfl.sampling.cyclic_poisson(C, 0.5, 4, capacity=C))
    found = jfl.guarantee(one, 12, DELTA)
    assert found.method.startswith("matrix_gaussian")
    assert found.epsilon == pytest.approx(gaussian(2.0 / made.sensitivity(3, 4)), rel=1e-6)
    assert found.adjacency == "add_remove"


def test_samplers_without_turns_count_every_round():
    made = square_root(6)
    want = gaussian(2.0 / made.sensitivity(6, 1))
    for sampler in (
        jfl.sampling.without_replacement(C, 4),
        jfl.sampling.poisson(C, 0.3, capacity=C),
        jfl.sampling.first_responders(C, 4, latency_spread=2.0),
    ):
        found = jfl.guarantee(plan(jfl.correlated(2.0, made), sampler), 6, DELTA)
        assert found.epsilon == pytest.approx(want, rel=1e-6)


def test_a_client_that_is_drawn_twice_would_add_twice_as_much():
    for adjacency in (None, "zero_out"):
        drawn = jfl.sampling.with_replacement(C, 4)
        one = plan(jfl.correlated(2.0, square_root(6)), drawn, adjacency=adjacency)
        with pytest.raises(ValueError, match="a row of docs/matrix.md.*with_replacement"):
            jfl.guarantee(one, 6, DELTA)


def test_turns_alone_help_independent_noise_too():
    """A client of a group takes part in a third of the rounds."""
    one = plan(jfl.gaussian(2.0), jfl.sampling.min_separation(C, 4, 3))
    assert jfl.guarantee(one, 7, DELTA).epsilon == pytest.approx(gaussian(2.0 / 3**0.5), rel=1e-6)
    drawn = plan(jfl.gaussian(2.0), jfl.sampling.cyclic_poisson(C, 0.5, 3, capacity=C))
    wanted = epsilon(events.repeat(events.poisson(0.5, events.gaussian(2.0)), 3), DELTA)[0]
    assert jfl.guarantee(drawn, 7, DELTA).epsilon == pytest.approx(wanted, rel=1e-5)


def test_zero_out_is_half_of_replacing():
    for sampler in (None, jfl.sampling.min_separation(C, 2, 3)):
        one = plan(jfl.gaussian(4.0), sampler, adjacency="zero_out")
        other = plan(jfl.gaussian(4.0), sampler, adjacency="replace_one")
        assert jfl.guarantee(one, 6).epsilon == jfl.guarantee(other, 6).epsilon
        sides = jfl.privacy.mechanisms.chain.sensitivity
        assert float(sides(other.release)) == 2 * float(sides(one.release))


@pytest.mark.slow
def test_zero_out_of_rows():
    """Epochs count every look at a row; who is drawn by chance gains by it."""

    def guaranteed(batch, adjacency=None, rounds=5):
        noise = jfl.chain(
            jfl.clip_l2(1.0),
            jfl.total(),
            jfl.gaussian(3.0),
            jfl.divide(2.0),
            adjacency=adjacency,
        )
        alg = jfl.algorithms.fedavg(jfl.private_grad(squared, noise), lr=0.1, steps=3, batch=batch)
        made = jfl.plan(FED, jfl.task(start_params(), squared), alg, jfl.sampling.full(C))
        return jfl.guarantee(made, rounds, DELTA, unit="example")

    assert guaranteed(jfl.batches.epochs(1), "zero_out").epsilon == pytest.approx(
        gaussian(3.0 / 5**0.5), rel=1e-6
    )
    fixed = guaranteed(jfl.batches.without_replacement(1), "zero_out")
    event = events.repeat(events.zeroed_out(1, 3, events.gaussian(3.0)), 15)
    assert fixed.epsilon == pytest.approx(epsilon(event, DELTA)[0], rel=1e-6)
    assert fixed.adjacency == "zero_out"
    drawn = guaranteed(jfl.batches.poisson(1.0, capacity=3), "zero_out")
    same = guaranteed(jfl.batches.poisson(1.0, capacity=3))
    assert drawn.epsilon == same.epsilon and same.adjacency == "add_remove"
    with pytest.raises(ValueError, match="with_replacement', adjacency='zero_out'"):
        guaranteed(jfl.batches.with_replacement(2), "zero_out")


@pytest.mark.parametrize("draw", ["without_replacement", "poisson"])
def test_absence_hides_no_example_in_correlated_noise(draw):
    """What is implied for examples has no gain from rounds in which its client does not come."""
    sampler = (
        jfl.sampling.without_replacement(C, 2)
        if draw == "without_replacement"
        else jfl.sampling.poisson(C, 0.1, C)
    )
    made = square_root(6)
    one = plan(jfl.correlated(4.0, made), sampler, adjacency="zero_out")
    found = jfl.guarantee(one, 6, DELTA, unit="example", view="third_party")
    twice = 2 * made.sensitivity(6, 1)
    assert found.epsilon == pytest.approx(gaussian(4.0 / twice), rel=1e-6)
    assert "participation" not in found.method


# --- uploads


def upload_plan(noise, sampler=None, **options):
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), noise)
    sampler = sampler or jfl.sampling.full(C)
    return jfl.plan(
        FED, jfl.task(start_params(), squared), algorithm, sampler, upload=chain, **options
    )


@pytest.mark.parametrize("separation", [1, 3])
@pytest.mark.parametrize("name", ["identity", "tree", "restarted", "inverse banded"])
def test_noise_of_an_upload_goes_on_over_rounds(name, separation):
    """Whoever sees a client's uploads sees one Gaussian release; others' noise is no help."""
    made = STRATEGIES[name](12, 12 // separation, separation)
    sampler = None if separation == 1 else jfl.sampling.min_separation(C, 4, separation)
    one = upload_plan(jfl.correlated(4.0, made), sampler)
    sens = made.sensitivity(12 // separation, separation, epochs=True)
    for view in ("server", "third_party"):
        found = jfl.guarantee(one, 12, DELTA, unit="client", view=view)
        assert found.epsilon == pytest.approx(gaussian(4.0 / sens), rel=1e-6)
        assert found.method.startswith("matrix_gaussian") and found.status == "proved"


@pytest.mark.parametrize("name", ["tree", "restarted", "square root", "inverse banded", "dense"])
@pytest.mark.parametrize("separation, rounds", [(1, 12), (3, 12), (3, 8), (4, 12)])
def test_a_cap_counts_the_joint_release(name, separation, rounds):
    """No pattern of `cap` participations moves the release of all rounds further."""
    made = STRATEGIES[name](12, -(-12 // separation), separation)
    sampler = jfl.sampling.without_replacement(C, 4)
    if separation > 1:
        sampler = jfl.sampling.min_separation(C, 2, separation)
    one = upload_plan(jfl.correlated(4.0, made), sampler, adjacency="zero_out")
    asked = dict(unit="client", view="server")
    planned = jfl.guarantee(one, rounds, DELTA, **asked).epsilon
    most, matrix, before = -(-rounds // separation), made.matrix_until(rounds), 0.0
    for cap in range(1, most + 1):
        found = jfl.guarantee(one, rounds, DELTA, cap=cap, **asked)
        groups = [range(first, rounds, separation) for first in range(separation)]
        patterns = [p for g in groups for p in itertools.combinations(g, min(cap, len(g)))]
        moved = max(np.linalg.norm(matrix[:, list(p)].sum(1)) for p in patterns)
        assert found.epsilon >= gaussian(4.0 / moved) * (1 - 1e-6), cap
        assert before <= found.epsilon <= planned * (1 + 1e-9)
        assert found.status == "conditional"
        before = found.epsilon
        seen = np.zeros(C, int)
        seen[5] = cap
        described = jfl.guarantee(one, rounds, DELTA, realised=seen, **asked)
        assert described.epsilon == found.epsilon and described.status == "descriptive"
        each = guarantees.epsilons_per_client(one, rounds, DELTA, view="server", realised=seen)
        assert each[5] == pytest.approx(found.epsilon, rel=1e-9) and np.delete(each, 5).max() == 0
    for cap in (most, rounds):
        found = jfl.guarantee(one, rounds, DELTA, cap=cap, **asked)
        assert found.epsilon == pytest.approx(planned, rel=1e-9)


def test_nobody_takes_part_more_often_than_the_sampler_lets_it():
    one = upload_plan(jfl.correlated(4.0, square_root(12)), jfl.sampling.min_separation(C, 2, 3))
    with pytest.raises(ValueError, match=r"whole numbers in 0\.\.4"):
        jfl.guarantee(one, 12, DELTA, view="server", realised=np.full(C, 5))


def test_what_uploads_cannot_have():
    for made in (banded_toeplitz(12, 3), blt(12, 2)):
        with pytest.raises(ValueError, match="regenerates earlier noise"):
            upload_plan(jfl.correlated(1.0, made))
    noise = jfl.correlated(4.0, tree(12))
    one = upload_plan(noise, jfl.sampling.with_replacement(C, 4))
    with pytest.raises(NotAnalysable, match="a row of docs/matrix.md.*with_replacement"):
        jfl.guarantee(one, 12, DELTA, view="server")
    one = upload_plan(noise)
    with pytest.raises(ValueError, match="at most the 12 rounds"):
        jfl.guarantee(one, 13, DELTA, view="server")
    with pytest.raises(ValueError, match="at most the 12 rounds"):
        jfl.simulate(jax.random.key(0), one, 13)
    with pytest.raises(ValueError, match="from its round 0 on"):
        jfl.guarantee([(one, 4, 4)], delta=DELTA, view="server")
    together = upload_plan(noise, secure_aggregation=True)
    proved = {e.view for e in jfl.ledger(together, 12) if not e.refusal}
    assert proved == {"server", "third_party"}
    apart = STRATEGIES["inverse banded"](12, 4, 3)
    with pytest.raises(NotAnalysable, match="stay away for 3 rounds"):
        jfl.guarantee(upload_plan(jfl.correlated(4.0, apart)), 12, DELTA, view="server")


def test_noise_on_uploads_that_goes_on_is_not_counted_in_a_release():
    """The server's noise beside it stands alone: the uploads' is not new in each round."""
    algorithm = jfl.algorithms.fedavg(jfl.grad(squared), lr=0.1, steps=1, batch=jfl.batches.full())
    upload = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.correlated(4.0, tree(12)))
    server = jfl.chain(jfl.bounded(1.0, "upload"), jfl.total(), jfl.gaussian(3.0))
    task = jfl.task(start_params(), squared)
    one = jfl.plan(FED, task, algorithm, jfl.sampling.full(C), upload=upload, release=server)
    entries = [e for e in jfl.ledger(one, 12) if e.noise_of == "server" and not e.implied]
    assert [e.parts[0].summed for e in entries] == [None]


# --- what proves nothing


def test_a_strategy_for_turns_needs_a_sampler_that_keeps_them():
    made = banded_toeplitz(12, 3, participations=4, separation=3)
    noise = jfl.correlated(2.0, made)
    for sampler in (
        None,
        jfl.sampling.without_replacement(C, 4),
        jfl.sampling.min_separation(C, 4, 2),
    ):
        with pytest.raises(ValueError, match="a sampler whose clients stay away for 3 rounds"):
            jfl.guarantee(plan(noise, sampler), 12)
    assert jfl.guarantee(plan(noise, jfl.sampling.min_separation(C, 3, 4)), 12).status == "proved"


def test_a_sampler_that_claims_turns_is_not_believed():
    honest = jfl.sampling.without_replacement(C, 3)
    forged = dataclasses.replace(
        jfl.sampling.min_separation(C, 3, 3), draw=honest.draw, scheme="min_separation"
    )
    made = banded_toeplitz(12, 3, participations=4, separation=3)
    found = jfl.guarantee(plan(jfl.correlated(2.0, made), forged), 12)
    assert found.status == "conditional"
    longer = dataclasses.replace(jfl.sampling.min_separation(C, 3, 3), separation=6)
    found = jfl.guarantee(plan(jfl.correlated(2.0, made), longer), 12)
    assert found.status == "conditional"


def test_parts_of_a_run_are_not_accounted_apart():
    made = plan(jfl.correlated(2.0, square_root(8)))
    with pytest.raises(ValueError, match="a run with correlated noise from its round 0 on"):
        jfl.guarantee([(made, 4), (made, 4)])
    with pytest.raises(ValueError, match="a part that begins with round 4"):
        jfl.guarantee([(made, 4, 4)])
    short = plan(jfl.gaussian(2.0))
    for parts in ([(short, 3), (made, 4, 4)], [(short, 4), (made, 2), (made, 2)]):
        with pytest.raises(ValueError, match="name those before it"):
            jfl.guarantee(parts)
    # plans with paired noise go on with the normals of the plan before
    one, two = (
        plan(noise, paired_noise=True)
        for noise in (jfl.gaussian(2.0), jfl.correlated(2.0, square_root(8)))
    )
    with pytest.raises(ValueError, match="round 4 and shares its noise"):
        jfl.guarantee([(one, 4), (two, 4)])
    # after another plan, the same one has noise of its own
    jfl.guarantee([(short, 2), (made, 2), (short, 2), (made, 2)])
    with pytest.raises(NotAnalysable, match="rounds 0 to 7 and 0 to 3"):
        jfl.guarantee([(made, 8), (short, 4, 0)])
    whole = jfl.guarantee(made, 8).epsilon
    assert jfl.guarantee([(made, 8)]).epsilon == pytest.approx(whole, rel=1e-6)
    # two runs of other plans on the same clients: both of them
    other = plan(jfl.correlated(2.0, tree(8)))
    both = jfl.guarantee([(made, 8), (other, 8, 0)], seeds="different").epsilon
    sens = np.hypot(square_root(8).sensitivity(8), tree(8).sensitivity(8))
    assert both == pytest.approx(gaussian(2.0 / sens), rel=1e-6)


@pytest.mark.parametrize("name", STRATEGIES)
def test_noise_that_begins_in_a_later_round_is_accounted_from_there(name):
    """Against all contributions of 0, 1 and -1 to the rounds that ran, seen through the noise that
    they had: all rows, or the first ones where buffers begin empty."""
    strategy, first = STRATEGIES[name](12, 1, 1), 7
    quiet = plan(jfl.gaussian(1e7), adjacency="zero_out")
    made = plan(jfl.correlated(6.0, strategy), adjacency="zero_out")
    for rounds in (1, 4):
        rows = slice(0, rounds) if strategy.memory else slice(first, first + rounds)
        noise = strategy.noising()[rows]
        precision = np.linalg.inv(noise @ noise.T)
        worst = max(
            np.array(x) @ precision @ x for x in itertools.product((-1, 0, 1), repeat=rounds)
        )
        least = gaussian(6.0 / np.sqrt(worst))
        found = jfl.guarantee([(quiet, first), (made, rounds)], unit="client")
        columns = strategy.matrix()[:, first : first + rounds]
        most = np.sqrt(np.abs(columns.T @ columns).sum())
        assert least * (1 - 1e-6) <= found.epsilon <= gaussian(6.0 / most) * (1 + 1e-6)
        assert found.status == "proved"


def test_a_strategy_that_was_changed_by_hand_is_taken_at_its_word():
    changes = (
        (blt(12, 2), dict(column=np.r_[1.0, np.zeros(11)])),
        (blt(12, 2), dict(weight=np.zeros(2))),
        (inverse_banded(12, 3), dict(column=np.ones(1))),
        (square_root(12), dict(rounds=14)),
        (dense(12), dict(table=np.eye(12))),
        (tree(12, efficient=True), dict(rounds=6)),
        (restarted(tree(4), 12), dict(normals=2)),
        (restarted(square_root(4), 12), dict(of=dataclasses.replace(square_root(4), column=[1.0]))),
    )
    for strategy, change in changes:
        changed = dataclasses.replace(strategy, **change)
        for one, status in ((strategy, "proved"), (changed, "conditional")):
            made = plan(jfl.correlated(4.0, one), adjacency="zero_out")
            found = jfl.guarantee(made, 6, DELTA, unit="client")
            assert found.status == status, (strategy, change)


def test_neither_the_server_nor_a_cap_is_answered():
    made = plan(jfl.correlated(2.0, square_root(8)))
    with pytest.raises(ValueError, match="The server sees every upload"):
        jfl.guarantee(made, 8, view="server")
    with pytest.raises(ValueError, match="view='server' with cap"):
        jfl.guarantee(made, 8, unit="client", view="third_party", cap=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_audited_is_no_more_than_proved(name):
    """The worst canary in the worst client, which comes every fourth round."""
    made = STRATEGIES[name](8, 2, 4)
    one = plan(
        jfl.correlated(1.5 * made.sensitivity(2, 4), made),
        jfl.sampling.min_separation(C, 3, 4),
        adjacency="zero_out",
    )
    report = jfl.audit(one, 8, trials=4000)
    assert report.epsilon <= report.proved.epsilon and not report.refuted
    assert report.epsilon > 0.1 * report.proved.epsilon


@pytest.mark.slow
def test_less_noise_than_claimed_is_refuted():
    """The same audit, told that a client comes once where it comes in every round."""
    made = square_root(8)
    one = plan(jfl.correlated(2.0, made), adjacency="zero_out")
    honest = jfl.audit(one, 8, trials=4000)
    assert not honest.refuted
    once = epsilon(events.gaussian(2.0 / made.sensitivity(1)), 1e-2)[0]
    assert jfl.audit(one, 8, trials=4000, claimed=once).refuted


def test_rounds_that_do_not_stand_alone_are_not_counted_one_by_one():
    for one in (
        plan(jfl.correlated(20.0, square_root(12)), adjacency="zero_out"),
        plan(jfl.gaussian(2.0), jfl.sampling.min_separation(C, 4, 3)),
    ):
        with pytest.raises(NotAnalysable, match="jfl.epsilons"):
            jfl.calibrate(one, epsilon=2.0, over="rounds")


def test_a_strategy_of_your_own_is_taken_at_its_word():
    class Mine(type(identity(6))):
        pass

    own = identity(6)
    mine = Mine(**{f.name: getattr(own, f.name) for f in dataclasses.fields(own)})
    for strategy, status in ((own, "proved"), (mine, "conditional")):
        one = plan(jfl.correlated(4.0, strategy), adjacency="zero_out")
        assert jfl.guarantee(one, 6, DELTA, unit="client").status == status
