"""Whatever the ledger answers, an audit may ask: every algorithm, level, sampler, view and
adjacency."""

import pytest

import jfl
from jfl.runs import build
from jfl.runs.config import Config

SMALL = dict(
    dataset="synthetic",
    partition="natural",
    clients=4,
    rows_per_client=8,
    model="logistic",
    batch=4,
    steps=2,
    rounds=2,
    delta=1e-2,
)
LEVELS = {
    "record": dict(unit="example", view="server", noise_multiplier=1.0),
    "client": dict(unit="client", view="third_party", noise_multiplier=1.0),
}
NAMES = ("fedavg", "fedsgd", "fedprox", "scaffold", "dpnfl", "addpnfl", "dicesgd", "ditto")
NAMES += ("fedbuff", "feddyn", "fednova", "fedsam", "mimelite", "pfedme")
ALGORITHMS = {name: dict(algorithm=name) for name in NAMES}
ALGORITHMS["scaffold, warm"] = dict(algorithm="scaffold", warm_rounds=1)
BATCHES = ("full", "poisson", "without_replacement", "with_replacement", "epochs")
COHORTS = {
    "all": {},
    "fixed": dict(cohort=2),
    "poisson": dict(sampler="poisson", rate=0.5),
    "with replacement": dict(sampler="with_replacement", cohort=2),
}


def cases():
    for level, fields in LEVELS.items():
        for name, algorithm in ALGORITHMS.items():
            yield f"{name}, {level}", fields | algorithm
        for name, cohort in COHORTS.items():
            yield f"fedavg, {level}, cohorts: {name}", fields | cohort
    for name in BATCHES:
        yield f"fedavg, record, batches: {name}", LEVELS["record"] | dict(batch_sampler=name)
    yield "output perturbation", LEVELS["record"] | dict(algorithm="output_perturbation")
    for view in ("server", "third_party"):
        padpfl = dict(algorithm="padpfl", unit="client", view=view, noise_multiplier=1.0)
        yield f"padpfl, {view}", padpfl
    client = LEVELS["client"]
    yield "fedavg, client, adaptive", client | dict(clip="adaptive")
    yield "fedavg, client, ellipsoid", client | dict(noise_shape="ellipsoid")


def plan_of(fields):
    fields = SMALL | fields
    if fields.get("batch_sampler") == "full":
        del fields["batch"]
    if fields.get("algorithm") == "fedsgd":
        del fields["steps"]
    return build.build(Config(**fields))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", dict(cases()))
def test_no_answer_of_the_ledger_is_refuted(name):
    """At a confidence of 1 - 1e-6 each, by 2,000 runs of each side; none of them is a crash."""
    plan = plan_of(dict(cases())[name])
    answers = jfl.guarantees(plan, 2, 1e-2)
    assert answers
    for proved in answers:
        asked = dict(unit=proved.unit, view=proved.view, adjacency=proved.adjacency)
        if proved.implied and proved.adjacency != "replace_one":
            with pytest.raises(jfl.errors.NotAnalysable, match="the unit that the noise is for"):
                jfl.audit(plan, 2, 2_000, 1e-2, **asked)
            continue
        found = jfl.audit(plan, 2, 2_000, 1e-2, confidence=1 - 1e-6, **asked)
        assert found.proved.epsilon == proved.epsilon
        assert found.epsilon <= proved.epsilon, asked
        assert found.mu > 0, asked


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedper", "fedrep", "qfedavg"])
def test_uploads_that_are_no_copies_of_the_parameters(name):
    """There is no canary for their rows.  At client level the unit that the noise is for is
    audited."""
    plan = plan_of(LEVELS["client"] | dict(algorithm=name))
    found = jfl.audit(plan, 2, 400, 1e-2, unit="client", view="third_party")
    assert found.epsilon <= found.proved.epsilon
    # A config of q-FedAvg has noise for clients only.
    for level in LEVELS if name != "qfedavg" else ["client"]:
        plan = plan_of(LEVELS[level] | dict(algorithm=name))
        asked = dict(unit="example", view=LEVELS[level]["view"], adjacency="replace_one")
        instead = "made of copies.*(Audit unit='client'|Use jfl.audit_membership)"
        with pytest.raises(jfl.errors.NotAnalysable, match=instead):
            jfl.audit(plan, 2, 400, 1e-2, **asked)
