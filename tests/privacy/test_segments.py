"""Several runs together: what they share, what they do not, and what an attacker sees of it."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.ledger_plans import CLIENTS, COHORT, NOISY, best, close, fixed, make, poisson_plan
from helpers.problems import make_federation, on_host, squared, start_params

import jfl
from jfl import sampling
from jfl.core import identity, records
from jfl.privacy import guarantees
from jfl.privacy.accountants import events, tightest
from jfl.privacy.ledger import entries, segments
from jfl.privacy.ledger.participation import drawn
from jfl.privacy.ledger.to_events import events_of
from jfl.sampling import batches

pytestmark = pytest.mark.usefixtures("endless_noise")

ROUNDS = 20


@pytest.fixture
def renyi_alone(monkeypatch):
    """Without loss distributions, where they cost too much: they compile for each event."""
    monkeypatch.setattr(tightest, "takes", lambda *args: False)


def both(*levels):
    """The noise of several releases of one sample."""
    return sum(np.float64(np.float32(z)) ** -2.0 for z in levels) ** -0.5


def plain(*levels):
    """Releases without any gain from sampling: (multiplier, times)."""
    return events.gaussian(sum(n * np.float64(np.float32(z)) ** -2.0 for z, n in levels) ** -0.5)


def found(*given, **options):
    return guarantees.guarantee(
        [g if isinstance(g, tuple) else (g, ROUNDS, 0) for g in given], **options
    )


def third(*given, **options):
    return found(*given, view="third_party", **options)


# --- runs that share their rounds


def test_runs_of_one_seed_are_one_release_a_step():
    plans = [make(NOISY(z)) for z in (1.0, 1.5, 2.0)]
    got = found(*plans)
    close(got.epsilon, best(fixed(0.1, both(1.0, 1.5, 2.0), 3 * ROUNDS, 100)), 1e-9)
    assert (
        segments.CHOSEN in got.caveats
        and "chosen before" in segments.CHOSEN
        and segments.UNLIKE not in got.caveats
    )
    apart = found(*plans, seeds="different")
    close(
        apart.epsilon,
        best(events.compose(*(fixed(0.1, z, 3 * ROUNDS, 100) for z in (1.0, 1.5, 2.0)))),
        1e-9,
    )
    alike = found(plans[0], make(NOISY(2.0), batches.without_replacement(10, short="all")))
    close(alike.epsilon, best(fixed(0.1, both(1.0, 2.0), 3 * ROUNDS, 100)), 1e-9)
    assert apart.epsilon < 0.9 * got.epsilon and segments.CHOSEN not in apart.caveats
    assert apart.status == "conditional" and any(
        "seed" in c for c in apart.caveats if c == segments.SEEDS
    )


def test_poisson_batches_that_runs_share():
    plans = [poisson_plan(rows=NOISY(z, adjacency="add_remove")) for z in (1.0, 2.0)]
    rate = drawn(np.float32(8) / np.float32(100))
    want = events.repeat(events.poisson(rate, events.gaussian(both(1.0, 2.0))), 3 * ROUNDS)
    close(found(*plans).epsilon, best(want), 1e-6)  # the overflow takes 1e-12 or so


def test_rounds_that_overlap_in_part(renyi_alone):
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    got = found((one, 10, 0), (other, 10, 6))
    want = events.compose(
        fixed(0.1, 1.0, 18, 100), fixed(0.1, both(1.0, 2.0), 12, 100), fixed(0.1, 2.0, 18, 100)
    )
    close(got.epsilon, best(want), 1e-9)
    inside = found((one, 10, 0), (other, 3, 5)).epsilon
    close(
        inside,
        best(events.compose(fixed(0.1, 1.0, 21, 100), fixed(0.1, both(1.0, 2.0), 9, 100))),
        1e-9,
    )
    three = found((one, 10, 0), (other, 10, 6), (make(NOISY(3.0)), 2, 7)).epsilon
    want = events.compose(
        fixed(0.1, 1.0, 18, 100),
        fixed(0.1, both(1.0, 2.0), 6, 100),
        fixed(0.1, 2.0, 18, 100),
        fixed(0.1, both(1.0, 2.0, 3.0), 6, 100),
    )
    close(three, best(want), 1e-9)


def test_the_first_steps_are_shared():
    """Five steps and ten of the same batches: the first five are of one sample, the rest belong to
    the longer run."""
    few, many = make(NOISY(1.0), count=5), make(NOISY(2.0), count=10)
    want = events.compose(
        fixed(0.1, both(1.0, 2.0), 5 * ROUNDS, 100), fixed(0.1, 2.0, 5 * ROUNDS, 100)
    )
    close(found(few, many).epsilon, best(want), 1e-9)
    close(found(many, few).epsilon, best(want), 1e-9)


def falling(round_):
    return 2.0 * 0.95**round_


def test_noise_that_changes_over_rounds(renyi_alone):
    moving = make(
        jfl.chain(jfl.clip_l2(0.5), jfl.total(), jfl.gaussian(falling), adjacency="replace_one")
    )
    still = make(NOISY(3.0))
    z = [np.float64(np.float32(2.0) * np.float32(0.95) ** np.float32(r)) for r in range(6)]
    want = [fixed(0.1, both(z[r], 3.0) if r < 4 else z[r], 3, 100) for r in range(6)]
    close(found((moving, 6, 0), (still, 4, 0)).epsilon, best(events.compose(*want)), 1e-5)
    later = [fixed(0.1, both(z[r], 3.0) if r >= 2 else z[r], 3, 100) for r in range(6)]
    close(found((still, 4, 2), (moving, 6, 0)).epsilon, best(events.compose(*later)), 1e-5)


@pytest.mark.slow
def test_noise_of_each_client(renyi_alone):
    levels = np.linspace(1.0, 3.0, CLIENTS).astype(np.float32)
    one, other = make(NOISY(levels)), make(NOISY(levels[::-1].copy()))
    got = found(one, other).epsilon
    worst = (
        max(both(a, b) ** -2 for a, b in zip(levels, levels[::-1])) ** -0.5
    )  # of one and the same client
    close(got, best(fixed(0.1, worst, 3 * ROUNDS, 100)), 1e-9)
    parts = lambda a, b: events.compose(
        fixed(0.1, float(a), 12, 100), fixed(0.1, both(a, b), 3, 100)
    )
    close(  # most of the rounds are those of `one`
        found((one, 5, 0), (other, 1, 2)).epsilon,
        max(best(parts(a, b)) for a, b in zip(levels[:3], levels[:-4:-1])),
        1e-6,
    )


def test_overflow_of_a_shared_draw_is_paid_once():
    plans = [
        poisson_plan(
            rows=NOISY(z, adjacency="add_remove"),
            batch=batches.poisson(8.0, capacity=30),
            sizes=np.full(CLIENTS, 200),
        )
        for z in (1.0, 1.5)
    ]
    (entry,) = [e for e in segments.concatenate([(p, 20, 0) for p in plans]) if e.view == "server"]
    (alone,) = [e for e in segments.concatenate([(plans[0], 20)]) if e.view == "server"]
    assert entry.overflow == pytest.approx(alone.overflow, rel=1e-12) and alone.overflow > 0
    (apart,) = [
        e
        for e in segments.concatenate([(p, 20, 0) for p in plans], "different")
        if e.view == "server"
    ]
    assert apart.overflow == pytest.approx(2 * alone.overflow, rel=1e-12)


# --- draws that are not the same

UNKNOWN = records.Fn(max)


def drawn_by(plan, client):
    return dataclasses.replace(plan, algorithm=dataclasses.replace(plan.algorithm, client=client))


def shuffled(plan):
    return dataclasses.replace(plan, fed=dataclasses.replace(plan.fed, x=plan.fed.x + 1))


@pytest.mark.parametrize(
    "other",
    [
        lambda: make(NOISY(2.0), batches.without_replacement(20)),
        lambda: shuffled(make(NOISY(2.0))),
        lambda: make(NOISY(2.0), sizes=np.full(CLIENTS, 101)),
        lambda: drawn_by(make(NOISY(2.0)), UNKNOWN),
        lambda: make(NOISY(2.0), batches.epochs(100)),
        lambda: make(
            NOISY(2.0),
            count=2,
            more=(records.Release(NOISY(2.0), batches.without_replacement(10), 1),),
        ),
    ],
)
def test_what_is_not_the_same_draw_counts_as_seen(other):
    one, other = make(NOISY(1.0)), other()
    got = found((one, 10, 0), (other, 4, 0))
    seen = plain((1.0, 3 * 4), (2.0, 3 * 4))
    close(got.epsilon, best(events.compose(seen, fixed(0.1, 1.0, 18, 100))), 1e-6)
    assert segments.UNLIKE in got.caveats and segments.CHOSEN not in got.caveats


def test_draws_with_replacement_that_are_seen_count_all_their_copies(renyi_alone):
    one, other = (
        make(NOISY(4.0), batches.with_replacement(5)),
        make(NOISY(6.0), batches.with_replacement(3)),
    )
    close(found((one, 2, 0), (other, 2, 0)).epsilon, best(plain((4.0 / 5, 6), (2.0, 6))), 1e-6)
    equal = found((one, 2, 0), (make(NOISY(6.0), batches.with_replacement(5)), 2, 0)).epsilon
    close(
        equal,
        best(events.repeat(events.with_replacement(5, 100, events.gaussian(both(4.0, 6.0))), 6)),
        1e-6,
    )


def test_what_draws_nothing_shares_nothing():
    """All rows in every batch: such a release says nothing of another run's batches, in whatever
    order they run."""
    whole, sampled = make(NOISY(2.0), batches.full()), make(NOISY(1.0))
    got = found(whole, sampled)
    close(
        got.epsilon,
        best(events.compose(events.repeat(events.gaussian(2.0), 60), fixed(0.1, 1.0, 60, 100))),
        1e-5,  # grids of loss distributions round by the order in which parts are joined
    )
    assert not {segments.CHOSEN, segments.UNLIKE} & set(got.caveats)
    two = found(whole, make(NOISY(3.0), batches.full()))
    close(two.epsilon, best(plain((2.0, 60), (3.0, 60))), 1e-9)
    assert not {segments.CHOSEN, segments.UNLIKE} & set(two.caveats)


def test_more_rows_may_be_worse():
    """A client with 9 rows is wholly in one plan's batches, which leaves the other's sample to
    itself; one with 50 is not."""
    sizes = np.full(CLIENTS, 9)
    one, other = (
        (
            lambda sizes: [
                make(NOISY(z), batches.without_replacement(b, "all"), sizes=sizes)
                for z, b in ((2.0, 10), (2.5, 2))
            ]
        ),
        None,
    )
    small = found(*one(sizes)).epsilon
    other = found(*one(np.where(np.arange(CLIENTS) == 3, 50, 9))).epsilon
    close(
        small,
        best(
            events.compose(
                plain((2.0, 60)),
                events.repeat(events.without_replacement(2, 9, events.gaussian(2.5)), 60),
            )
        ),
        1e-6,
    )
    close(other, best(plain((2.0, 60), (2.5, 60))), 1e-6)
    assert other > small


def test_noise_once_a_round():
    def once(z, steps):
        plan = make(NOISY(z), count=1)
        release = dataclasses.replace(plan.algorithm.releases[0], steps=steps)
        return dataclasses.replace(
            plan, algorithm=dataclasses.replace(plan.algorithm, releases=(release,))
        )

    same = found(once(1.0, 4), once(2.0, 4)).epsilon
    close(
        same,
        best(events.repeat(events.touched(1 - 0.9**4, events.gaussian(both(1.0, 2.0))), ROUNDS)),
        1e-9,
    )
    close(
        found(once(1.0, 4), once(2.0, 5)).epsilon, best(plain((1.0, ROUNDS), (2.0, ROUNDS))), 1e-9
    )


# --- cohorts


def test_a_third_party_and_the_cohorts_that_runs_share():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    inner = fixed(0.1, both(1.0, 2.0), 3, 100)
    close(
        third(one, other).epsilon,
        best(events.repeat(events.participation(0.25, inner), ROUNDS)),
        1e-9,
    )
    # other cohorts: the same batches of a client that is taken to be in both
    apart = third(one, make(NOISY(2.0), sampler=sampling.without_replacement(CLIENTS, 6)))
    close(apart.epsilon, best(events.repeat(inner, ROUNDS)), 1e-9)
    assert {segments.CHOSEN, segments.UNLIKE} <= set(
        apart.caveats
    ) and "participation" not in apart.method
    # other batches of the same cohorts
    seen = third(one, make(NOISY(2.0), batches.without_replacement(20)))
    close(
        seen.epsilon,
        best(events.repeat(events.participation(0.25, plain((1.0, 3), (2.0, 3))), ROUNDS)),
        1e-9,
    )
    # the server sees who takes part, so only batches matter to it
    close(
        found(one, make(NOISY(2.0), sampler=sampling.without_replacement(CLIENTS, 6))).epsilon,
        best(fixed(0.1, both(1.0, 2.0), 3 * ROUNDS, 100)),
        1e-9,
    )


def test_clients_that_run_several_times_a_round():
    sampler = lambda k: sampling.with_replacement(CLIENTS, k, independent=True)
    one, other = (make(NOISY(z), sampler=sampler(4)) for z in (1.0, 2.0))
    close(found(one, other).epsilon, best(fixed(0.1, both(1.0, 2.0), 12 * ROUNDS, 100)), 1e-9)
    close(
        third(one, other).epsilon,
        best(
            events.repeat(
                events.repeat(
                    events.participation(1 / CLIENTS, fixed(0.1, both(1.0, 2.0), 3, 100)), 4
                ),
                ROUNDS,
            )
        ),
        1e-9,
    )
    close(
        found((one, 2, 0), (make(NOISY(2.0), sampler=sampler(3)), 2, 0)).epsilon,
        best(plain((1.0, 3 * 4 * 2), (2.0, 3 * 3 * 2))),
        1e-9,
    )


@pytest.mark.parametrize(
    "sampler, stateful, adjacency, event",
    [
        (COHORT, False, "replace_one", lambda z: events.without_replacement(5, CLIENTS, z)),
        (COHORT, True, "replace_one", lambda z: events.participation(0.25, z)),
        (sampling.poisson(CLIENTS, 0.25), False, "add_remove", lambda z: events.poisson(0.25, z)),
        pytest.param(
            sampling.with_replacement(CLIENTS, 5),
            False,
            "replace_one",
            lambda z: events.with_replacement(5, CLIENTS, z),
            marks=pytest.mark.slow,
        ),
        (sampling.full(CLIENTS), False, "replace_one", lambda z: z),
    ],
)
def test_noise_of_the_release(sampler, stateful, adjacency, event):
    plans = [
        make(release=NOISY(z, adjacency=adjacency), sampler=sampler, stateful=stateful)
        for z in (3.0, 4.0)
    ]
    got = found(*plans)
    assert (got.unit, got.view) == ("client", "third_party")
    close(got.epsilon, best(events.repeat(event(events.gaussian(both(3.0, 4.0))), ROUNDS)), 1e-6)
    other = make(
        release=NOISY(4.0, adjacency=adjacency), sampler=sampling.without_replacement(CLIENTS, 7)
    )
    if sampler.scheme != "full" and adjacency == "replace_one":
        copies = 5 if sampler.scheme == "with_replacement" else 1
        seen = found(plans[0], other)
        close(seen.epsilon, best(plain((3.0 / copies, ROUNDS), (4.0, ROUNDS))), 1e-6)
        assert segments.UNLIKE in seen.caveats


def test_noise_of_uploads():
    plans = [make(upload=NOISY(z)) for z in (3.0, 4.0)]
    server = found(*plans, unit="client")
    close(server.epsilon, best(plain((3.0, ROUNDS), (4.0, ROUNDS))), 1e-9)
    assert not {segments.CHOSEN, segments.UNLIKE} & set(
        server.caveats
    )  # no gain from a sample, none to lose
    close(
        third(*plans, unit="client").epsilon,
        best(events.repeat(events.participation(0.25, events.gaussian(both(3.0, 4.0))), ROUNDS)),
        1e-9,
    )
    mixed = third(
        plans[0], make(release=NOISY(4.0)), unit="client"
    )  # a sample of clients, and an absence
    close(mixed.epsilon, best(plain((3.0, ROUNDS), (4.0, ROUNDS))), 1e-9)
    assert third(*plans, unit="example").epsilon == third(*plans, unit="client").epsilon


def test_uploads_in_a_sum():
    levels = np.linspace(2.0, 4.0, CLIENTS).astype(np.float32)
    plans = [
        make(
            upload=NOISY(z),
            release=jfl.chain(jfl.total(), jfl.divide(1.0)),
            sampler=sampling.full(CLIENTS),
        )
        for z in (levels, levels[::-1].copy())
    ]
    got = third(*plans, unit="client").epsilon
    std = np.sqrt(np.sum(np.square(levels, dtype=np.float64)))
    close(got, best(events.repeat(events.gaussian(std / np.sqrt(2)), ROUNDS)), 1e-6)


def test_examples_of_clients_that_join_on_their_own():
    plans = [
        make(release=NOISY(z, adjacency="add_remove"), sampler=sampling.poisson(CLIENTS, 0.25))
        for z in (3.0, 4.0)
    ]
    got = third(*plans, unit="example").epsilon
    close(
        got,
        best(
            events.repeat(events.participation(0.25, events.gaussian(both(3.0, 4.0) / 2)), ROUNDS)
        ),
        1e-6,
    )


# --- equal plans, branches, seeds


def test_equal_plans_are_one_release():
    one, again = make(NOISY(1.0)), make(NOISY(1.0))
    whole = guarantees.guarantee(one, 15).epsilon
    got = found((one, 10, 0), (again, 10, 5))
    close(got.epsilon, whole, 1e-9)
    assert segments.ONCE in got.caveats
    close(found((one, 10, 5), (again, 10, 0), (one, 3, 9)).epsilon, whole, 1e-9)
    close(found((one, 10, 0), (again, 10, 0)).epsilon, guarantees.guarantee(one, 10).epsilon, 1e-9)
    twice = found((one, 10, 0), (again, 10, 0), seeds="different")
    close(twice.epsilon, guarantees.guarantee(one, 20).epsilon, 1e-9)
    assert segments.ONCE not in twice.caveats


def test_the_same_plan_after_different_ones_is_not_the_same_release():
    """Noise follows from what ran before: two branches have noise of their own."""
    one, other, last = (make(NOISY(z)) for z in (1.0, 2.0, 3.0))
    got = found((one, 5, 0), (other, 5, 0), (last, 5, 5), (last, 5, 5)).epsilon
    twice = events.compose(fixed(0.1, both(1.0, 2.0), 15, 100), fixed(0.1, both(3.0, 3.0), 15, 100))
    close(got, best(twice), 1e-9)
    once = events.compose(fixed(0.1, 1.0, 15, 100), fixed(0.1, 3.0, 15, 100))
    close(found((one, 5, 0), (last, 5, 5), (last, 5, 5)).epsilon, best(once), 1e-9)
    # it may be the run that went on, or the branch: both count
    close(
        found((one, 10, 0), (other, 5, 0), (one, 5, 5)).epsilon,
        best(
            events.compose(fixed(0.1, both(1.0, 2.0), 15, 100), fixed(0.1, both(1.0, 1.0), 15, 100))
        ),
        1e-9,
    )


def test_seeds_of_segments():
    one, other = make(NOISY(1.0)), make(NOISY(2.0))
    pairs = [(p, ROUNDS, 0) for p in (one, other, one, other)]
    got = guarantees.guarantee(pairs, seeds=[0, 0, 1, 1])
    close(got.epsilon, best(fixed(0.1, both(1.0, 2.0), 2 * 3 * ROUNDS, 100)), 1e-9)
    assert (
        segments.SEEDS in got.caveats
        and segments.CHOSEN in got.caveats
        and got.status == "conditional"
    )
    for bad in ("same", [0, 1], [0, 1, 2, -1], 3, [0.5] * 4):
        with pytest.raises(ValueError, match="seeds"):
            guarantees.guarantee(pairs, seeds=bad)
    with pytest.raises(ValueError, match="a list of segments beside seeds"):
        guarantees.guarantee(one, 5, seeds="different")


def test_plans_that_share_noise_are_refused():
    one, other = make(NOISY(1.0), paired=True), make(NOISY(2.0), paired=True)
    with pytest.raises(ValueError, match='paired_noise=True.*seeds="different"'):
        found(one, other)
    with pytest.raises(ValueError, match="paired_noise"):
        found(one, make(NOISY(1.0), paired=True))
    assert (
        found(one, other, seeds="different").epsilon
        == guarantees.guarantee([(one, ROUNDS), (other, ROUNDS)]).epsilon
    )
    close(found(one, one).epsilon, guarantees.guarantee(one, ROUNDS).epsilon, 1e-9)
    assert entries.PAIRED in found((one, 5, 0), (other, 5, 5)).caveats


def test_segments_without_an_overlap_stay_as_they_were():
    """To the digit: entries one after another, as `segments.joined` has them."""
    one, other = make(NOISY(1.0)), make(NOISY(2.0), batches.full())
    for given in (
        [(one, 10), (other, 20)],
        [(other, 20), (one, 10)],
        [(one, 10, 0), (other, 20, 10)],
        [(one, 10, 20), (other, 20, 0)],
        [(one, 5), (one, 7)],
    ):
        parts = [next(e for e in entries.entries(p, n) if e.view == "server") for p, n, *_ in given]
        want = segments.joined(parts, [n for _, n, *_ in given])
        assert guarantees.guarantee(given).epsilon == best(events_of(want)[0])
    assert segments.FOLLOWING in guarantees.guarantee([(one, 10), (one, 20)]).caveats
    assert segments.FOLLOWING not in guarantees.guarantee([(one, 10, 0), (one, 20, 10)]).caveats
    with pytest.raises(ValueError, match="the same clients"):
        found(
            one,
            dataclasses.replace(other, fed=dataclasses.replace(other.fed, size=jnp.ones(3, int))),
        )
    with pytest.raises(ValueError, match="first >= 0"):
        found((one, 3, -1))
    assert found(one, make()).epsilon == math.inf


def test_one_refusal_is_enough():
    with pytest.raises(ValueError, match="at least batch=10 rows"):
        found(make(NOISY()), make(NOISY(2.0), sizes=np.full(CLIENTS, 7)))


# --- real plans


def linear(params, x, y):
    return params @ x


@functools.cache
def learning_rates(present=True, batch=None):
    """Eight plans of one client with 40 rows that differ in the learning rate; only row 0 has a
    gradient."""
    x = np.zeros((40, 1), np.float32)
    x[0] = present
    table = jnp.arange(40, dtype=jnp.int32)[None]
    fed = records.Federation(
        jnp.asarray(x),
        jnp.zeros(40),
        table,
        jnp.array([40]),
        jnp.asarray(x[:1]),
        jnp.zeros(1),
        jnp.zeros((1, 0), jnp.int32),
        jnp.zeros(1, jnp.int32),
    )
    grad = jfl.private_grad(
        linear, jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(1.0), jfl.divide(4.0))
    )
    task = jfl.task(jnp.zeros(1), linear)
    algorithm = lambda lr: jfl.algorithms.fedavg(
        grad, lr=lr, steps=1, batch=batch or batches.poisson(rate=0.1, capacity=40)
    )
    return [
        jfl.plan(fed, task, algorithm(lr), sampling.full(1)) for lr in 0.1 * 1.3 ** np.arange(8)
    ]


def test_algorithms_of_the_library_draw_alike():
    plans = learning_rates()
    assert len({identity.plan_identity(p).tobytes() for p in plans}) == 8
    grad = plans[0].algorithm.client.data["work"].grad
    make_plan = lambda alg: dataclasses.replace(
        plans[0], algorithm=jfl.plan(plans[0].fed, plans[0].task, alg, sampling.full(1)).algorithm
    )
    batch = batches.poisson(rate=0.1, capacity=40)
    others = [
        jfl.algorithms.scaffold(grad, steps=1, batch=batch),
        jfl.algorithms.averaged(jfl.algorithms.fedprox(grad, steps=1, batch=batch)),
    ]
    for other in map(make_plan, others):
        close(
            found(plans[0], other, unit="example").epsilon,
            best(events.repeat(events.poisson(drawn(0.1), events.gaussian(0.5**0.5)), ROUNDS)),
            1e-6,
        )


@jax.jit
def _released(keys, plan):
    """What a step released, as the server reads it off the model."""
    move = jax.vmap(lambda key: jfl.run_round(jfl.init(key, plan), plan)[0].server.params[0])(keys)
    return -4.0 * move / plan.algorithm.client.data["work"].lr


def interval(hits, trials, alarm):
    from scipy import stats

    return (
        stats.beta.ppf(alarm, hits, trials - hits + 1) if hits else 0.0,
        stats.beta.ppf(1 - alarm, hits + 1, trials - hits),
    )


@pytest.mark.slow
def test_an_attack_on_runs_that_share_batches():
    """Eight learning rates, one seed, one round: an attacker who adds them up.

    False alarms: each of four bounds is wrong with probability below 1e-5.  The halves that must
    fail: epsilon as if the batches were independent lies below what is measured, and so does the
    rate of their detection.
    """
    from scipy import stats

    trials, alarm, limit, delta = 20_000, 1e-5, 3.2, 1e-3
    score = {}
    for present in (False, True):
        keys = jax.random.split(jax.random.key(7 + present), trials)
        score[present] = sum(
            np.asarray(_released(keys, p), np.float64) for p in learning_rates(present)
        ) / np.sqrt(8)
    hits = {present: int((s > limit).sum()) for present, s in score.items()}
    least, most = interval(hits[True], trials, alarm)[0], interval(hits[False], trials, alarm)[1]
    audited = math.log((least - delta) / most)
    runs = [(p, 1, 0) for p in learning_rates()]
    proved = jfl.guarantee(runs, delta=delta, unit="example", view="server")
    independent = jfl.guarantee(runs, delta=delta, unit="example", view="server", seeds="different")
    assert independent.epsilon < 1.45 and 7.5 < proved.epsilon < 7.6
    assert independent.epsilon < audited <= proved.epsilon
    # the sum is what one sample makes of it, and not what eight make
    as_one = 0.9 * stats.norm.sf(limit) + 0.1 * stats.norm.sf(limit - np.sqrt(8))
    law = stats.binom.pmf(np.arange(9), 8, 0.1)
    as_eight = law @ stats.norm.sf(limit - np.arange(9) / np.sqrt(8))
    low, high = interval(hits[True], trials, alarm)
    assert low <= as_one <= high and not low <= as_eight <= high


# --- sweeps


@pytest.mark.slow
def test_a_sweep_says_what_its_points_share():
    one, other = learning_rates()[:2]
    found = jfl.sweep(lambda at: (one, other)[at], rounds=1, at=[0, 1])
    assert found.caveats == (segments.SHARED,) and "seed" in segments.SHARED
    apart = jfl.sweep(
        lambda at: (one, other)[at], rounds=1, points=[dict(at=0, seed=0), dict(at=1, seed=1)]
    )
    assert apart.caveats == ()
    assert segments.sharing([one, other], [3, 3]) == (segments.SHARED,)
    assert segments.sharing([one, one], [0, 1]) == segments.sharing([one, one], [0, 0]) == ()
    whole = learning_rates(batch=batches.full())[:2]
    assert segments.sharing(whole, [0, 0]) == ()


# --- the view


def test_the_view_with_an_answer(renyi_alone):
    """Nobody named a view: the only one that answers, or the server's where both do."""
    released, steps = make(release=NOISY(2.0)), make(NOISY())
    for plan, view in (
        (released, "third_party"),
        (steps, "server"),
        (make(upload=NOISY()), "server"),
        (make(), "server"),
    ):
        got = guarantees.guarantee(plan, 5)
        assert got == guarantees.guarantee(plan, 5, view=view) and got.view == view
        np.testing.assert_array_equal(
            guarantees.epsilons(plan, [1, 5]), guarantees.epsilons(plan, [1, 5], view=view)
        )
        if got.epsilon < math.inf:
            for over in (dict(rounds=5), dict(over="rounds")):
                assert jfl.calibrate(plan, epsilon=9.0, **over) == jfl.calibrate(
                    plan, epsilon=9.0, view=view, **over
                )
    both_of = make(NOISY(), release=NOISY(2.0))
    assert (
        guarantees.guarantee(both_of, 5).unit == "example"
        and guarantees.guarantee(both_of, 5).view == "server"
    )
    assert guarantees.guarantee(both_of, 5, unit="client").view == "third_party"
    assert (
        guarantees.epsilons_per_client(released, 5).max()
        == guarantees.guarantee(released, 5, unit="example").epsilon
    )
    assert guarantees.guarantee([(steps, 5), (released, 5)], unit="example").view == "third_party"
    with pytest.raises(
        ValueError,
        match=(
            "fits 0 of them for view='server' and 0 of them for view='third_party'.*Choices: "
            "unit='example'"
        ),
    ):
        guarantees.guarantee(steps, 5, unit="client")
    with pytest.raises(ValueError, match="fits 2 of them for view='server'.*Choices"):
        guarantees.guarantee(make(NOISY(), upload=NOISY()), 5)
    with pytest.raises(ValueError, match="sees every upload before"):
        guarantees.guarantee(released, 5, view="server")
    with pytest.raises(ValueError, match="view='server' beside cap"):
        guarantees.guarantee(released, 5, cap=2)


# --- several releases of one algorithm


def twice(z, scheme):
    """An algorithm of a user's own that trains twice on batches of one key; both releases are
    declared."""
    fed = make_federation(sizes=(40,) * 3)
    chain = jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z))
    one = jfl.algorithms.fedsgd(jfl.private_grad(squared, chain), batch=scheme)
    both = dataclasses.replace(one, releases=one.releases * 2)
    return [
        jfl.plan(fed, jfl.task(start_params(), squared), a, jfl.sampling.full(3))
        for a in (one, both)
    ]


@pytest.mark.parametrize(
    "scheme",
    [jfl.batches.poisson(rate=0.1, capacity=40), jfl.batches.without_replacement(4)],
    ids=["poisson", "without replacement"],
)
def test_releases_of_one_algorithm_are_no_independent_samples(scheme):
    """Two releases on one sample of q = 0.1 tell a row apart with a chance of q: no epsilon of two
    samples covers that."""
    (one, both), delta = twice(2.0, scheme), 1e-5
    single, found = (jfl.guarantee(p, 1, delta, unit="example", view="server") for p in (one, both))
    independent = jfl.guarantee(one, 2, delta, unit="example", view="server").epsilon

    unamplified = tightest.epsilon(events.repeat(events.gaussian(2.0), 2), delta)[0]
    assert (
        found.epsilon == pytest.approx(unamplified, rel=1e-6)
        and found.epsilon > 1.5 * independent > single.epsilon
    )
    assert any("one sample" in c for c in found.caveats) and not any(
        "one sample" in c for c in single.caveats
    )


def test_rows_of_populations_are_compared_too():
    """Where they are not one object."""
    one, same = (on_host(make_federation()) for _ in range(2))
    assert one.host is not same.host and segments._same_rows(one, same)
    assert not segments._same_rows(one, on_host(make_federation(5)))
    assert not segments._same_rows(one, make_federation())
