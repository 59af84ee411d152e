"""Personal models: what the server's epsilon leaves out, and the view that counts them."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from helpers.problems import make_algorithm, make_federation, noisy_grad, squared, start_params

import jfl
from jfl.core.records import Fn, code_of
from jfl.privacy.accountants import events, tightest
from jfl.privacy.ledger import entries

CLIENTS, ROWS, BATCH, STEPS = 4, 20, 5, 2


def chain(z):
    return jfl.chain(jfl.clip_l2(1.0), jfl.total(), jfl.gaussian(z), jfl.divide(BATCH))


@pytest.fixture
def fed():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(CLIENTS * ROWS, 2)).astype(np.float32)
    y = x[:, 0]
    return jfl.federate(
        jfl.datasets.arrays(x, y, x[:4], y[:4], classes=0), jfl.partition.iid(CLIENTS)
    )


def plan_of(fed, name, z=2.0, **options):
    task = jfl.task(np.zeros(2, np.float32), lambda w, x, y: (x @ w - y) ** 2)
    grad = jfl.private_grad(task.loss, chain(z)) if z else jfl.grad(task.loss)
    made = getattr(jfl.algorithms, name)(
        grad, steps=STEPS, batch=jfl.batches.without_replacement(BATCH), **options
    )
    return jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS)), task


def ditto(fed, z=2.0, own=3.0):
    _, task = plan_of(fed, "ditto")
    return plan_of(fed, "ditto", z, personal_grad=jfl.private_grad(task.loss, chain(own)))[0]


def codes(guarantee):
    return [code_of(c) for c in guarantee.caveats]


def test_the_view_counts_uploads_and_personal_models(fed, endless_noise):
    plan = ditto(fed)
    both = jfl.guarantee(plan, 10, 1e-5, view="personal")
    # each step draws its own batch of 5 from 20 rows
    drawn = lambda z: events.without_replacement(BATCH, ROWS, events.gaussian(z))
    once = events.compose(*(events.repeat(drawn(z), 10 * STEPS) for z in (2.0, 3.0)))
    assert both.epsilon == pytest.approx(tightest.epsilon(once, 1e-5)[0], rel=1e-6)
    server = jfl.guarantee(plan, 10, 1e-5)
    assert server.view == "server" and server.epsilon < both.epsilon
    assert (both.unit, both.view, both.status) == ("example", "personal", server.status)
    assert "personal" in codes(server) and "personal-too" not in codes(server)
    assert "personal-too" in codes(both) and "personal" not in codes(both)


def _client_of_a_user(context, keys, server, client_state, rows, *, inner):
    return inner(context, keys, server, client_state, rows)


def test_an_algorithm_of_a_user_declares_its_personal_releases(fed):
    """The view is proved if the declaration covers what a client keeps, and refused if not."""
    plan = ditto(fed)
    made = plan.algorithm

    def view_of(personal_releases):
        own = jfl.algorithm(
            made.init,
            Fn(_client_of_a_user, dict(inner=made.client)),
            made.server,
            releases=made.releases,
            stateful=True,
            personal=lambda server, own: own,
            personal_releases=personal_releases,
        )
        user = jfl.plan(fed, plan.task, own, jfl.sampling.full(CLIENTS))
        return jfl.guarantee(user, 10, 1e-5, view="personal")

    declared = view_of(made.personal_releases)
    assert declared.epsilon == jfl.guarantee(plan, 10, 1e-5, view="personal").epsilon
    assert declared.status == "proved"
    with pytest.raises(jfl.errors.NotAnalysable, match="not declared"):
        view_of(())
    with pytest.raises(ValueError, match="personal_releases"):
        view_of([3])
    with pytest.raises(ValueError, match="personal"):
        jfl.algorithm(made.init, made.client, made.server, personal_releases=())


def test_uploads_and_personal_models_show_as_much_as_the_view_counts(endless_noise):
    """One client takes one step on one row: the noise of its upload and that of its personal model,
    measured over many coordinates, are independent and hide an exchanged row as the view counts."""
    z, own, bound, size = 2.0, 1.0, 1.0, 4000
    x, y = np.ones((1, size), np.float32), np.zeros(1, np.float32)
    data = jfl.datasets.arrays(x, y, x, y, classes=0)
    fed = jfl.federate(data, jfl.partition.iid(1))
    task = jfl.task(np.zeros(size, np.float32), lambda w, x, y: x @ w)
    full = lambda noise: jfl.private_grad(
        task.loss,
        jfl.chain(jfl.clip_l2(bound), jfl.total(), jfl.gaussian(noise), adjacency="replace_one"),
    )
    made = jfl.algorithms.ditto(
        full(z), personal_grad=full(own), lr=1.0, steps=1, batch=jfl.batches.full()
    )
    plan = jfl.plan(fed, task, made, jfl.sampling.full(1))
    out = jfl.simulate(jax.random.key(3), plan, 1)
    both = np.array(
        [out.params, out.run.client_states[0]], np.float64
    )  # one upload moves the model by it
    shown = 2 * bound / both.std(1)  # an exchanged row moves each sum by at most 2 * bound
    np.testing.assert_allclose(shown, [1 / z, 1 / own], rtol=0.05)
    assert abs(np.corrcoef(both)[0, 1]) < 0.06
    proved = jfl.guarantee(plan, 1, 1e-5, view="personal")
    joint = events.gaussian(float((1 / z**2 + 1 / own**2) ** -0.5))
    assert proved.epsilon == pytest.approx(tightest.epsilon(joint, 1e-5)[0], rel=1e-6)
    assert proved.epsilon > jfl.guarantee(plan, 1, 1e-5).epsilon


def test_personal_models_without_noise_are_refused_in_their_view(fed):
    plan, _ = plan_of(fed, "ditto")
    server = jfl.guarantee(plan, 10, 1e-5)
    assert entries.PERSONAL_BARE in server.caveats and entries.PERSONAL not in server.caveats
    with pytest.raises(jfl.errors.NotAnalysable, match="noise in the training of personal models"):
        jfl.guarantee(plan, 10, 1e-5, view="personal")


@pytest.mark.parametrize("name, options", [("pfedme", {}), ("fedper", dict(shared="w"))])
def test_personal_models_of_the_same_noisy_gradients_cost_nothing_more(name, options, fed):
    if name == "pfedme":
        plan, _ = plan_of(fed, name)
    else:
        params = dict(w=np.zeros(2, np.float32), b=np.zeros((), np.float32))
        task = jfl.task(params, lambda p, x, y: (x @ p["w"] + p["b"] - y) ** 2)
        made = jfl.algorithms.fedper(
            jfl.private_grad(task.loss, chain(2.0)),
            steps=STEPS,
            batch=jfl.batches.without_replacement(BATCH),
            **options,
        )
        plan = jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS))
    both, server = (jfl.guarantee(plan, 5, 1e-5, view=v) for v in ("personal", "server"))
    assert both.epsilon == pytest.approx(server.epsilon, rel=1e-9)
    assert "personal" in codes(server) and "personal-too" in codes(both)


def test_other_questions_about_personal_models_are_refused(fed):
    plan = ditto(fed)
    for asked, match in (
        (dict(unit="client"), "fits 0 of them"),
        (dict(cap=2), "view='server' with cap"),
        (dict(realised=np.ones(CLIENTS, int)), "view='server' with cap"),
        (dict(uplinks=1), "view='third_party'"),
    ):
        with pytest.raises(ValueError, match=match):
            jfl.guarantee(plan, 10, 1e-5, view="personal", **asked)
    with pytest.raises(jfl.errors.NotAnalysable, match="fedavg, which has none"):
        jfl.guarantee(plan_of(fed, "fedavg")[0], 10, 1e-5, view="personal")


def test_an_algorithm_that_does_not_say_what_personal_models_are_of_is_refused(fed):
    plan = ditto(fed)
    silent = dataclasses.replace(plan.algorithm, personal_releases=None)
    with pytest.raises(jfl.errors.NotAnalysable, match="does not name their releases"):
        jfl.guarantee(dataclasses.replace(plan, algorithm=silent), 10, 1e-5, view="personal")


def test_every_algorithm_with_personal_models_says_what_they_are_of():
    found = set()
    for name in jfl.algorithms.__all__:
        if not inspect.isfunction(getattr(jfl.algorithms, name)) or name == "algorithm":
            continue
        try:
            made = make_algorithm(name, jfl.grad(squared))
        except (ValueError, TypeError, KeyError):
            continue
        if made.personal is not None:
            found.add(name)
            assert made.personal_releases is not None, name
    assert found == {"ditto", "fedper", "fedrep", "pfedme"}


def keeps_rows(context, keys, server, own, rows, *, inner):
    payload, kept, diagnostics = inner(context, keys, server, own, rows)
    return payload, jax.tree.map(lambda v: v + rows.x[0].sum(), kept), diagnostics


@pytest.mark.parametrize("private", [True, False])
def test_what_a_client_keeps_is_followed(private, fed):
    """The server's view does not see it, so only the view "personal" is refused."""
    plan = ditto(fed) if private else plan_of(fed, "ditto")[0]
    algorithm = plan.algorithm
    if private:
        client = Fn(keeps_rows, dict(inner=algorithm.client))
        algorithm = dataclasses.replace(algorithm, client=client)
    else:  # it says that its models follow from the uploads' releases alone
        algorithm = dataclasses.replace(algorithm, personal_releases=())
    plan = dataclasses.replace(plan, algorithm=algorithm)
    report = jfl.check_privacy(plan)
    assert not report.example and "own" in report.personal[0], report
    assert 'against view "personal"' in str(report)
    with pytest.raises(jfl.errors.NotAnalysable, match="keeps without noise: rows"):
        jfl.guarantee(plan, 10, 1e-5, view="personal")


@pytest.mark.parametrize("releases", ["none", "fewer"])
def test_releases_of_personal_models_that_are_not_declared_are_refused(releases, fed):
    plan = ditto(fed)
    (one,) = plan.algorithm.personal_releases
    said = () if releases == "none" else (dataclasses.replace(one, count=1),)
    algorithm = dataclasses.replace(plan.algorithm, personal_releases=said)
    with pytest.raises(jfl.errors.NotAnalysable, match="declared"):
        jfl.guarantee(dataclasses.replace(plan, algorithm=algorithm), 10, view="personal")


def test_epochs_are_refused_beside_private_personal_models(fed):
    """Personal training begins inside an epoch, so a row may be in two of its three batches."""
    task = plan_of(fed, "ditto")[1]
    made = jfl.algorithms.ditto(
        jfl.private_grad(task.loss, chain(10.0)),
        personal_grad=jfl.private_grad(task.loss, chain(1.0)),
        steps=3,
        batch=jfl.batches.epochs(BATCH),
    )
    plan = jfl.plan(fed, task, made, jfl.sampling.full(CLIENTS))
    with pytest.raises(jfl.errors.NotAnalysable, match="inside an epoch"):
        jfl.guarantee(plan, 10, view="personal")


@pytest.mark.parametrize(
    "stages, says",
    [
        ((jfl.bounded(1.0, "upload"), jfl.total(), jfl.gaussian(2.0)), "only in release"),
        (
            (
                jfl.clip_l2(1.0),
                jfl.total(),
                jfl.correlated(2.0, jfl.strategies.square_root(20)),
            ),
            "correlated noise in release or upload only",
        ),
    ],
)
def test_chains_of_personal_models_are_checked_like_other_chains(stages, says, fed):
    _, task = plan_of(fed, "ditto")
    with pytest.raises(ValueError, match=says):
        plan_of(fed, "ditto", personal_grad=jfl.private_grad(task.loss, jfl.chain(*stages)))


def test_clip_norms_of_personal_models_have_the_floor_of_others(fed):
    _, task = plan_of(fed, "ditto")
    falls = jfl.chain(
        jfl.clip_l2(jfl.schedules.exponential(1.0, 1e-3, 1)), jfl.total(), jfl.gaussian(2.0)
    )
    plan, _ = plan_of(fed, "ditto", personal_grad=jfl.private_grad(task.loss, falls))
    with pytest.raises(ValueError, match="in round 6"):
        jfl.guarantee(plan, 10, view="personal")


@pytest.mark.parametrize("name", ["ditto", "fedper", "fedrep", "pfedme"])
def test_every_algorithm_with_personal_models_has_the_caveat(name):
    task = jfl.task(start_params(), squared)
    made = make_algorithm(name, noisy_grad())
    fed = make_federation()
    plan = jfl.plan(fed, task, made, jfl.sampling.full(fed.size.shape[0]))
    for view in ("server", "third_party"):
        assert "personal" in codes(jfl.guarantee(plan, 3, view=view))
    if name == "ditto":  # its personal models have no noise here
        assert jfl.check_privacy(plan).personal
    else:
        assert not jfl.check_privacy(plan).personal
        assert "personal-too" in codes(jfl.guarantee(plan, 3, view="personal"))


def test_another_adjacency_is_refused(fed):
    plan = ditto(fed)
    assert jfl.guarantee(plan, 3, view="personal", adjacency="replace_one").epsilon > 0
    with pytest.raises(ValueError, match="fits 0 of them.*adjacency='replace_one'"):
        jfl.guarantee(plan, 3, view="personal", adjacency="add_remove")


def test_a_release_that_is_declared_too_seldom_is_refused(fed):
    import dataclasses

    plan = ditto(fed)
    (release,) = plan.algorithm.personal_releases
    fewer = dataclasses.replace(
        plan.algorithm, personal_releases=(dataclasses.replace(release, count=release.count - 1),)
    )
    with pytest.raises(jfl.errors.NotAnalysable, match="keeps only what noise protects"):
        jfl.guarantee(dataclasses.replace(plan, algorithm=fewer), 10, 1e-5, view="personal")
