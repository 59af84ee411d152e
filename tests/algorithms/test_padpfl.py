"""PADPFL: the algorithm against a NumPy loop of its pseudo-code, its noise, its guarantees, and
what the paper prints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.numpy_loops import LEVELS, by_round, clip, example_gradient, falling
from helpers.problems import CLIENTS, SIZES, close, flat, make_federation, squared, start_params
from jfl.kernels.normals import normals

import jfl
from experiments.papers import as_printed as printed
from experiments.papers.talaei2024 import claims as paper
from jfl import schedules
from jfl.core.random_streams import Stream, stream_key
from jfl.engine.round import run_noise_key
from jfl.privacy.mechanisms.stages import Stage
from jfl.sampling.weights import impact

ROUNDS, STEPS, MU, SERVER_LR, DELTA = 3, 3, 0.3, 0.9, 0.01
RATIOS, GROUPS = (0, 1, 2), (2, 3, 2)
IMPACT = impact(RATIOS, GROUPS)


def chains(bound, z=None, z_server=None, clients=CLIENTS):
    """Noise on a clipped upload and on the mean of all, as padpfl's docstring has it."""
    noise = lambda v: (
        ()
        if v is None
        else (
            v
            if isinstance(v, Stage)
            else jfl.gaussian(jnp.array(v) if isinstance(v, tuple) else v),
        )
    )
    upload = jfl.chain(jfl.clip_l2(bound), jfl.total(), *noise(z))
    if z_server is None:
        return dict(upload=upload)
    return dict(
        upload=upload,
        release=jfl.chain(
            jfl.bounded(bound, "upload"), jfl.total(), *noise(z_server), jfl.divide(clients)
        ),
    )


def plan_of(
    weights="uniform",
    sites=None,
    fed=None,
    loss=squared,
    params=None,
    batch=None,
    steps=STEPS,
    mu=MU,
    lr=falling,
    server_lr=SERVER_LR,
    **options,
):
    fed = make_federation() if fed is None else fed
    alg = jfl.algorithms.padpfl(
        jfl.grad(loss),
        mu=mu,
        lr=lr,
        steps=steps,
        batch=batch or jfl.batches.full(),
        server_lr=server_lr,
        **options,
    )
    task = jfl.task(start_params() if params is None else params, loss)
    return jfl.plan(
        fed, task, alg, jfl.sampling.full(fed.index.shape[0]), weights=weights, **sites or {}
    )


# --- the pseudo-code


@dataclasses.dataclass(frozen=True)
class Case:
    weights: object = "uniform"
    upload: str = "model"
    bound: float | None = None
    z: object = None
    z_server: float | None = None
    own: float | None = None  # z of a chain inside the client, for a declared sensitivity of 0.05
    batch: int | None = None


CASES = dict(
    printed=Case(RATIOS, "model", 0.5, 0.8, 0.6),
    difference=Case(RATIOS, "difference", 0.1, 0.8, 0.6),
    levels=Case(by_round, "difference", 0.1, LEVELS, batch=3),
    prox_erm=Case("size", own=0.7),
)


def made(case):
    batch = (
        jfl.batches.full() if case.batch is None else jfl.batches.without_replacement(case.batch)
    )
    own = (
        {}
        if case.own is None
        else dict(
            inexactness=1.0,
            mechanism=jfl.chain(jfl.bounded(0.05, "prox_erm"), jfl.total(), jfl.gaussian(case.own)),
        )
    )
    sites = None if case.bound is None else chains(case.bound, case.z, case.z_server)
    return plan_of(
        IMPACT if case.weights == RATIOS else case.weights,
        sites,
        batch=batch,
        upload=case.upload,
        **own,
    )


@jax.jit
def drawn_and_run(key, plan):
    """What is drawn at the addresses of (round, client), and the run that drew it."""
    batches, slots = plan.algorithm.releases[0].batches, plan.fed.index.shape[1]
    noise = run_noise_key(jfl.init(key, plan))
    normal = lambda k: normals(k, jnp.zeros(4))

    def client(r, i):
        address = lambda base, name: jax.random.fold_in(
            jax.random.fold_in(stream_key(base, name, r), i), 0
        )
        at, mask, _ = jax.vmap(
            lambda s: batches.draw(address(key, Stream.BATCH), s, plan.fed.size[i], slots)
        )(jnp.arange(STEPS))
        return dict(
            slots=at,
            mask=mask,
            own=normal(address(noise, Stream.ROWS)),
            upload=normal(address(noise, Stream.UPLOAD)),
        )

    drawn = jax.vmap(lambda r: jax.vmap(lambda i: client(r, i))(jnp.arange(CLIENTS)))(
        jnp.arange(ROUNDS)
    )
    release = jax.vmap(lambda r: normal(stream_key(noise, Stream.RELEASE, r)))(jnp.arange(ROUNDS))
    return dict(drawn, release=release), jfl.scan(jfl.init(key, plan), plan, [ROUNDS])[0]


@functools.cache
def outcome(name):
    plan = made(CASES[name])
    drawn, run = drawn_and_run(jax.random.key(5), plan)
    return jax.tree.map(np.asarray, drawn), run, plan.fed


def factors(case, r):
    """p of every client, by hand."""
    given = {
        "uniform": np.ones(CLIENTS),
        "size": np.array(SIZES, float),
        RATIOS: np.repeat([0.0, 1.0, 2.0], GROUPS),
    }
    p = np.asarray(by_round(r), float) if callable(case.weights) else given[case.weights]
    return p / p.sum()


def run_numpy(case, drawn, fed, wrong=""):
    """-> params, inexactness of every client in the last round."""
    x, y, index = (
        np.asarray(v, np.float64 if i < 2 else int) for i, v in enumerate((fed.x, fed.y, fed.index))
    )
    gradient = lambda w, rows: np.mean(
        [example_gradient(w, a, b) for a, b in zip(x[rows], y[rows])], 0
    )
    w, inexact = flat(start_params()), np.zeros(CLIENTS)
    for r in range(ROUNDS):
        p, mean = factors(case, r), np.zeros(4)
        if wrong == "equal":
            p = np.full(CLIENTS, 1 / CLIENTS)
        for i in range(CLIENTS):
            v = w
            for s in range(STEPS):
                rows = index[i][drawn["slots"][r, i, s][drawn["mask"][r, i, s]]]
                v = v - falling(r * STEPS + s) * (
                    gradient(v, rows) + (0 if wrong == "no_pull" else MU) * (v - w)
                )
            everything = index[i][: SIZES[i]]
            inexact[i] = np.linalg.norm(gradient(v, everything) + MU * (v - w)) / np.linalg.norm(
                gradient(w, everything)
            )
            sent = v - w if case.upload == "difference" else v
            noise = np.zeros(4)
            if case.z is not None:
                z = case.z[0 if wrong == "shared" else i] if isinstance(case.z, tuple) else case.z
                noise = z * 2 * case.bound * drawn["upload"][r, i]
            if case.bound is not None:
                sent = (
                    clip(sent + noise, case.bound)
                    if wrong == "clip_last"
                    else clip(sent, case.bound) + noise
                )
            if case.own is not None:
                sent = sent + case.own * 2 * 0.05 * drawn["own"][r, i]
            mean = mean + p[i] * sent
        if case.z_server is not None:
            of = 1 / CLIENTS if wrong == "max_p" else p.max()
            mean = mean + case.z_server * 2 * case.bound * of * drawn["release"][r]
        w = w + SERVER_LR * (mean if case.upload == "difference" else mean - w)
    return w, inexact


@pytest.mark.by_default("printed", "prox_erm")  # "difference" and "levels" are like "printed"
@pytest.mark.parametrize("name", CASES)
def test_equals_numpy(name):
    drawn, run, fed = outcome(name)
    params, inexact = run_numpy(CASES[name], drawn, fed)
    close(flat(run.server.params), params, rtol=2e-5, atol=3e-6)
    close(run.client_states, inexact, rtol=1e-4)
    assert not any(int(v) for v in run.health) and np.ptp(inexact) > 0.05


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("levels", "no_pull"),
        ("printed", "clip_last"),
        ("printed", "equal"),
        ("printed", "max_p"),
        ("levels", "shared"),
    ],
)
def test_a_wrong_loop_disagrees(name, wrong):
    drawn, run, fed = outcome(name)
    with pytest.raises(AssertionError):
        close(
            flat(run.server.params),
            run_numpy(CASES[name], drawn, fed, wrong)[0],
            rtol=2e-5,
            atol=3e-6,
        )


def test_equal_clients_and_factors_have_the_noise_of_nbafl():
    fed = make_federation(sizes=(5,) * CLIENTS)
    plan = plan_of(fed=fed, sites=chains(2.0, 1.0, 1.0))
    for rounds in (2, 30):
        std = printed.calibrate(plan, epsilon=20.0, rounds=rounds, delta=DELTA, view="third_party")
        want = paper.nbafl_downlink_std(
            2.0, 1, rounds, paper.gaussian_factor(DELTA), CLIENTS, 5, 20.0
        )
        assert std == pytest.approx(float(want), rel=1e-9) and (std > 0) == (rounds > CLIENTS**0.5)


# --- inexactness


def test_a_solve_that_stops_too_early_stops_the_run():
    poor = plan_of(inexactness=0.5, steps=1, lr=0.01)
    with pytest.raises(jfl.HealthError, match="overflow") as error:
        jfl.simulate(jax.random.key(0), poor, 2)
    assert int(error.value.health["overflow"]) == 2 * CLIENTS  # every client, every round
    assert np.asarray(error.value.run.client_states).min() > 0.5
    good = jfl.simulate(jax.random.key(0), plan_of(inexactness=0.5, steps=40, lr=0.1, mu=2.0), 1)
    assert np.asarray(good.run.client_states).max() <= 0.5


@pytest.mark.slow
def test_l2_beside_the_loss_is_part_of_the_problem_that_is_solved():
    def with_l2(params, x, y):
        return squared(params, x, y) + 0.15 * sum((w**2).sum() for w in jax.tree.leaves(params))

    fed = make_federation()
    task, sampler = jfl.task(start_params(), squared), jfl.sampling.full(CLIENTS)
    reached = [
        jfl.simulate(
            jax.random.key(0), jfl.plan(fed, task, jfl.algorithms.padpfl(g, steps=3), sampler), 2
        ).run.client_states
        for g in (jfl.grad(squared, l2=0.3), jfl.grad(with_l2), jfl.grad(squared))
    ]
    close(reached[0], reached[1], rtol=1e-4)
    assert np.abs(reached[0] - reached[2]).max() > 0.01


# --- what is proved


def closed_form(p, client, server, rounds, bound):
    """The worst client's epsilon for who sees broadcasts alone: p [rounds, C], client std [C],
    server std."""
    total = (p**2 * np.square(client)).sum(1) + np.square(server)
    squares = (np.square(2 * bound * p) / total[:, None]).sum(0)
    return float(paper.gaussian_epsilon(np.sqrt(squares.max()), DELTA))


@pytest.mark.parametrize("z", [0.8, LEVELS], ids=["common", "levels"])
@pytest.mark.parametrize("z_server", [None, 0.6])
@pytest.mark.parametrize("weights", ["fixed", "moving"])
def test_third_party_counts_all_noise(weights, z_server, z):
    rounds, bound = 6, 0.5
    stages = np.stack([IMPACT, impact((2, 1, 0), GROUPS)])
    given = IMPACT if weights == "fixed" else schedules.piecewise([2], stages)
    g = jfl.guarantee(plan_of(given, chains(bound, z, z_server)), rounds, DELTA, view="third_party")
    p = np.repeat(stages, (2, 4) if weights == "moving" else (rounds, 0), axis=0)
    server = 0.0 if z_server is None else z_server * 2 * bound * p.max(1)
    want = closed_form(p, np.array(z) * 2 * bound * np.ones(CLIENTS), server, rounds, bound)
    assert (g.unit, g.adjacency, g.status) == ("client", "replace_one", "proved")
    assert g.epsilon == pytest.approx(want, rel=1e-5)
    server_view = jfl.guarantee(plan_of(given, chains(bound, z, z_server)), rounds, DELTA)
    least = min(z) if isinstance(z, tuple) else z
    assert server_view.epsilon == pytest.approx(
        float(paper.gaussian_epsilon(np.sqrt(rounds) / least, DELTA)), rel=1e-5
    )


@pytest.mark.parametrize("uplinks", [1, 4, 6])
@pytest.mark.parametrize("z_server", [None, 0.6])
@pytest.mark.parametrize("impact", [IMPACT, impact((1, 2, 3), GROUPS)], ids=["0-1-2", "1-2-3"])
def test_uplinks_are_the_joint_epsilon(uplinks, z_server, impact):
    """Seen uploads, then rounds in which all others' are seen and their noise with them, then the
    whole noise."""
    rounds, bound, z = 6, 0.5, 0.8
    plan = plan_of(impact, chains(bound, z, z_server))
    client, server = z * 2 * bound, (z_server or 0) * 2 * bound * impact.max()
    exposed = min(uplinks, rounds - uplinks)

    def squares(i):
        """What joint_epsilon adds up, of three kinds of rounds in place of two."""
        alone, hidden = (
            paper.hidden_std(client, impact, server, known) ** 2
            for known in ((np.arange(CLIENTS) != i) * 1.0, np.zeros(CLIENTS))
        )
        return uplinks / client**2 + impact[i] ** 2 * (
            exposed / alone + (rounds - uplinks - exposed) / hidden
        )

    worst = int(np.argmax(impact))
    want = float(paper.gaussian_epsilon(2 * bound * squares(worst) ** 0.5, DELTA))
    g = jfl.guarantee(plan, rounds, DELTA, view="third_party", uplinks=uplinks)
    assert g.epsilon == pytest.approx(want, rel=1e-5) and any(
        f"at most {uplinks} uploads" in c for c in g.caveats
    )
    if uplinks == rounds:
        joint = paper.joint_epsilon(2 * bound, client, impact[worst], 1.0, rounds, rounds, DELTA)
        assert want == pytest.approx(float(joint))
    alone = jfl.guarantee(plan, rounds, DELTA, view="third_party").epsilon
    assert alone < g.epsilon <= jfl.guarantee(plan, rounds, DELTA).epsilon * (1 + 1e-6)


@pytest.mark.parametrize(
    "options", [dict(view="server"), dict(uplinks=7), dict(uplinks=-1), dict(quantile=0.1)]
)
def test_uplinks_are_refused(options):
    with pytest.raises(ValueError, match="uplinks"):
        jfl.guarantee(
            plan_of(IMPACT, chains(0.5, 0.8)),
            6,
            DELTA,
            **dict(view="third_party", uplinks=2) | options,
        )


def test_convexity_is_a_condition():
    g = jfl.guarantee(made(CASES["prox_erm"]), 4, DELTA)
    assert (g.status, g.unit) == ("conditional", "example")
    # bounded(0.05), which replace_one doubles
    assert any("solution by at most 0.1" in c for c in g.caveats)
    assert g.epsilon == pytest.approx(float(paper.gaussian_epsilon(2 / 0.7, DELTA)), rel=1e-5)
    g = jfl.guarantee(made(CASES["printed"]), 4, DELTA)
    assert (g.status, g.unit) == ("proved", "client")


# --- refusals

CLIP, NOISE, SUM = jfl.clip_l2(0.5), jfl.gaussian(1.0), jfl.total()
DECLARED = jfl.bounded(0.5, "upload")


@pytest.mark.parametrize(
    "upload, release, match",
    [
        ((DECLARED, SUM, NOISE), None, "only in release"),
        ((jfl.bounded(0.5, "prox_erm"), SUM, NOISE), None, r"padpfl\(mechanism"),
        ((CLIP, SUM), (jfl.bounded(0.5, "prox_erm"), SUM, NOISE), r"padpfl\(mechanism"),
        (None, (DECLARED, SUM, NOISE), "an upload with a clip"),
        ((SUM,), (DECLARED, SUM, NOISE), "an upload with a clip"),
        ((CLIP, SUM, NOISE), (jfl.bounded(0.4, "upload"), SUM, NOISE), "at least the upload's"),
        (
            (CLIP, SUM, NOISE),
            (DECLARED, jfl.clip_l2(0.3), SUM, NOISE),
            "as the only row stage",
        ),
        (
            (jfl.clip_l2(schedules.inverse(0.5)), SUM, NOISE),
            (DECLARED, SUM, NOISE),
            "fixed clip norm",
        ),
        ((jfl.clip_adaptive(0.5, 7), SUM, NOISE), None, "fixed clip"),
    ],
)
def test_plans_that_declare_what_does_not_hold(upload, release, match):
    sites = {k: jfl.chain(*v) for k, v in dict(upload=upload, release=release).items() if v}
    with pytest.raises(ValueError, match=match):
        plan_of(sites=sites)


def test_a_bound_by_convexity_is_of_what_was_solved():
    """Not of what a map makes of it."""
    there, back = jfl.linear_maps.linear_map(
        lambda key, tree: jax.tree.map(lambda v: 1000 * v, tree),
        lambda key, tree: jax.tree.map(lambda v: v / 1000, tree),
    )
    chain = jfl.chain(there, jfl.bounded(0.05, "prox_erm"), SUM, NOISE, back)
    algorithm = jfl.algorithms.padpfl(jfl.grad(squared), mechanism=chain, inexactness=0.9)
    with pytest.raises(ValueError, match="as the only row stage"):
        jfl.plan(
            make_federation(),
            jfl.task(start_params(), squared),
            algorithm,
            jfl.sampling.full(CLIENTS),
        )


def test_bad_arguments_are_refused():
    make, g = jfl.algorithms.padpfl, jfl.grad(squared)
    rests = jfl.chain(jfl.bounded(0.5, "prox_erm"), SUM, NOISE)
    for options, match in (
        (dict(mu=-1.0), "mu"),
        (dict(upload="weights"), "upload"),
        (dict(inexactness=0.0), "inexact"),
        (dict(inexactness=1.5), "inexact"),
        (dict(mechanism="noise"), "mechanism"),
        (dict(mechanism=jfl.chain(SUM)), "mechanism"),
        (dict(mechanism=rests), "inexactness, which a prox_erm bound relies on"),
        (dict(mechanism=jfl.chain(jfl.clip_adaptive(0.5, 7), SUM, NOISE)), "mechanism"),
    ):
        with pytest.raises(ValueError, match=match):
            make(g, **options)
    make(g, mechanism=rests, inexactness=0.5)


# --- as printed

PRINTED = [  # ratios, groups, rows of a group, epsilon, sigma_C, sigma_S, for a clip norm of 1
    ((0, 1, 2), (20, 20, 20), (150,) * 3, 5, 0.008287, 0.008171),
    ((0, 1, 2), (20, 20, 20), (150,) * 3, 20, 0.002072, 0.002043),
    ((1, 1, 1), (20, 20, 20), (150,) * 3, 20, 0.002072, 0.001001),
    ((0, 2, 1), (20, 35, 5), (150,) * 3, 20, 0.002072, 0.001624),
    ((1, 3, 5), (20, 20, 20), (50, 120, 271), 20, 0.006215, 0.005098),
]


@functools.cache
def sized(rows):
    return make_federation(sizes=rows)


def as_printed(ratios, groups, rows, epsilon, rounds=30):
    """(std of an upload, std of the mean, the plan with both)."""
    weights, fed = impact(ratios, groups), sized(tuple(np.repeat(rows, groups).tolist()))
    draft = plan_of(weights, chains(1.0, 1.0), fed=fed)
    stds = [
        printed.calibrate(draft, epsilon=epsilon, rounds=rounds, delta=DELTA, view=v)
        for v in printed.views(draft)
    ]
    client, server = (jfl.gaussian(std=s * n) if s else None for s, n in zip(stds, (1, 60)))
    return *stds, plan_of(weights, chains(1.0, client, server, clients=60), fed=fed)


@pytest.mark.parametrize("ratios, groups, rows, epsilon, client, server", PRINTED)
@pytest.mark.usefixtures("endless_noise")  # as computed, so little noise proves nothing
def test_noise_as_printed(ratios, groups, rows, epsilon, client, server):
    got_client, got_server, plan = as_printed(ratios, groups, rows, epsilon)
    assert (got_client, got_server) == pytest.approx((client, server), rel=3e-4)
    claims = printed.claims(plan, 30, DELTA)
    assert [c.view for c in claims] == ["server", "third_party"]
    for g in claims:
        assert g.epsilon == pytest.approx(epsilon, rel=1e-5) and g.status == "claimed" and g.caveats
    # what it is worth: the clip alone bounds a client
    p = impact(ratios, groups)
    proved = [jfl.guarantee(plan, 30, DELTA, view=v).epsilon for v in ("server", "third_party")]
    assert proved[0] == pytest.approx(
        float(paper.gaussian_epsilon(2 * 30**0.5 / got_client, DELTA)), rel=1e-4
    )
    assert proved[1] == pytest.approx(
        closed_form(np.tile(p, (30, 1)), got_client, got_server, 30, 1.0), rel=1e-4
    )


@pytest.mark.usefixtures("endless_noise")
def test_what_the_noise_as_printed_is_worth():
    _, _, plan = as_printed(*PRINTED[0][:4])
    assert jfl.guarantee(plan, 1, DELTA).epsilon == pytest.approx(2.97e4, rel=0.01)
    assert jfl.guarantee(plan, 30, DELTA, view="third_party").epsilon == pytest.approx(
        1.07e3, rel=0.01
    )
    _, _, plan = as_printed(*PRINTED[1][:4])
    assert jfl.guarantee(plan, 1, DELTA).epsilon == pytest.approx(4.68e5, rel=0.01)
    assert jfl.guarantee(plan, 30, DELTA, view="third_party").epsilon == pytest.approx(
        1.59e4, rel=0.01
    )


def test_a_server_with_enough_noise_adds_none():
    """The threshold of 0-1-2 is 5 rounds, of equal factors 7.7."""
    for ratios, rounds, none in (
        ((0, 1, 2), 5, True),
        ((0, 1, 2), 6, False),
        ((1, 1, 1), 7, True),
        ((1, 1, 1), 8, False),
    ):
        _, server, plan = as_printed(ratios, (20, 20, 20), (150,) * 3, 20, rounds)
        assert (server == 0) == none
        claim = printed.claimed(plan, rounds, DELTA, view="third_party").epsilon
        assert claim == pytest.approx(20, rel=1e-5) if not none else claim <= 20 * (1 + 1e-5)
