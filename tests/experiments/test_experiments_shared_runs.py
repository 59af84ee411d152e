"""Lines that one run serves."""

import dataclasses

from experiments.harness import shared_runs
from experiments.harness.programs import Plans
from experiments.harness.results import Experiment as Stored
from experiments.harness.results import Line, Spread
from experiments.harness.runner import Experiment

BASE = dict(dataset="digits", clients=4, rounds=1, steps=1, batch=4)
OF = Experiment("one", BASE, {"a": dict(lr=0.1), "b": dict(lr=0.2)}, runs=Plans())
PRINTED = {"named otherwise": "printed"}
EXPERIMENTS = dict(
    one=OF,
    other=dataclasses.replace(
        OF,
        base=BASE | dict(lr=0.1),
        lines={"named otherwise": {}, "b": dict(lr=0.2), "b, first rates": dict(lr=0.3)},
        paper=PRINTED,
    ),
    elsewhere=dataclasses.replace(OF, runs=Plans(seeded=True)),
    not_stored=OF,
)


def line(*accuracy, **more):
    return Line(accuracy=list(accuracy), loss=list(accuracy), **more)


def test_lines_of_one_config_and_one_way_to_plan_share_a_run():
    shared = shared_runs.alike(EXPERIMENTS)
    assert shared["one", "a"] == [
        ("one", "a"),
        ("other", "named otherwise"),
        ("not_stored", "a"),
    ]
    assert shared["other", "b, first rates"] == [("other", "b, first rates")]
    assert shared["elsewhere", "a"] == [("elsewhere", "a")]


def test_a_line_that_ran_stands_wherever_its_run_is_shown():
    whole = Stored(
        experiments=dict(
            one=Stored(
                seeds=[0, 1],
                lines=dict(a=line(0.5, 0.6), b=line(0.7, 0.8)),
                versions=dict(source="new"),
            ),
            other=Stored(
                seeds=[0],
                only=["b"],
                lines={"named otherwise": line(0.1, paper="printed too"), "b": line(0.2)},
            ),
            elsewhere=Stored(seeds=[0], lines=dict(a=line(0.3))),
        )
    )
    whole.experiments["other"].failed = {"named otherwise": "NaN", "another": "NaN"}
    changed = shared_runs.spread(whole, EXPERIMENTS, [("one", "a"), ("one", "b")])
    other = whole.experiments["other"].lines
    assert changed == {"other"} and "not_stored" not in whole.experiments
    assert whole.experiments["other"].failed == {"another": "NaN"}
    assert other["named otherwise"] == line(0.5, 0.6, seeds=[0, 1], source="new", paper="printed")
    assert other["b"].accuracy == [0.7, 0.8] and other["b, first rates"] == line(0.2)
    assert whole.experiments["other"].only == []  # no line is lacking
    assert whole.experiments["elsewhere"].lines["a"] == line(0.3)
    # what ran under both names stays what it is
    whole.experiments["other"].lines["b"] = line(0.9)
    shared_runs.spread(whole, EXPERIMENTS, [("one", "b"), ("other", "b")])
    assert whole.experiments["other"].lines["b"] == line(0.9)
    assert whole.experiments["other"].lines["b, first rates"] == line(0.2)


def test_a_line_that_other_figures_have_stands_where_it_is_lacking():
    """From the figure whose run had most seeds; what ran just now goes first."""
    three = EXPERIMENTS | dict(third=OF)
    whole = Stored(
        experiments=dict(
            one=Stored(seeds=[0], lines=dict(a=line(0.1), b=line(0.2)), versions=dict(source="x")),
            other=Stored(seeds=[0], only=["b"], lines=dict(b=line(0.2))),
            third=Stored(seeds=[0, 1, 2], lines=dict(a=line(0.3, 0.4))),  # two of its seeds
        )
    )
    assert shared_runs.spread(whole, three, []) == {"other", "third"}
    other, third = whole.experiments["other"], whole.experiments["third"]
    assert other.lines["named otherwise"] == line(0.3, 0.4, seeds=[0, 1], paper="printed")
    assert third.lines["b"] == line(0.2, seeds=[0], source="x")
    assert "b, first rates" not in other.lines  # nothing has it
    assert shared_runs.spread(whole, three, []) == set()
    del other.lines["named otherwise"]
    shared_runs.spread(whole, three, [("one", "a")])
    assert other.lines["named otherwise"].accuracy == [0.1]


def test_what_failed_is_not_filled_by_an_older_number():
    whole = Stored(
        experiments=dict(
            one=Stored(seeds=[0], lines=dict(a=line(0.1), b=line(0.2))),
            other=Stored(seeds=[0], lines=dict(b=line(0.2)), failed={"named otherwise": "NaN"}),
        )
    )
    assert shared_runs.spread(whole, EXPERIMENTS, []) == set()
    assert whole.experiments["other"].failed == {"named otherwise": "NaN"}
    # a run that failed just now is the one of every figure that shows it
    ran = [("other", "named otherwise")]
    assert shared_runs.spread(whole, EXPERIMENTS, ran) == {"one"}
    one = whole.experiments["one"]
    assert one.failed == {"a": "NaN"} and one.lines == dict(b=line(0.2))


def test_a_line_whose_rates_are_still_to_be_chosen_waits_for_them():
    waits = dict(one=OF, other=dataclasses.replace(OF, unchosen=frozenset({"b"})))
    one = Stored(seeds=[0], lines=dict(b=line(0.2)))
    whole = Stored(experiments=dict(one=one, other=Stored(seeds=[0], lines={})))
    for fresh in ([], [("one", "b")]):
        assert shared_runs.spread(whole, waits, fresh) == set()
    shared_runs.spread(whole, waits | dict(other=OF), [("one", "b")])
    assert whole.experiments["other"].lines["b"].accuracy == [0.2]


def test_a_line_from_before_the_choice_fills_nothing():
    """Its figure lacks the first rates beside it."""
    first = "b, first rates"
    of = dataclasses.replace(OF, lines=OF.lines | {first: dict(lr=0.3)})
    known = dict.fromkeys(("one", "two", "three"), of)
    stored = lambda **lines: Stored(seeds=[0], lines=lines)
    whole = Stored(
        experiments=dict(one=stored(b=line(0.1)), two=stored(a=line(0.5)), three=stored())
    )
    shared_runs.spread(whole, known, [])
    assert "b" not in whole.experiments["two"].lines
    whole.experiments["three"].lines |= {"b": line(0.9), first: line(0.1)}
    shared_runs.spread(whole, known, [])
    assert whole.experiments["two"].lines["b"].accuracy == [0.9]
    assert first not in whole.experiments["one"].lines  # or it would look like one of today


def test_a_line_whose_seeds_are_not_stored_keeps_their_number():
    whole = Stored(
        experiments=dict(
            one=Stored(seeds=[0, 1, 2], lines=dict(a=Line(accuracy=Spread(0.5, half=0.1)))),
            other=Stored(seeds=[0, 1, 2, 3, 4], lines={}),
        )
    )
    shared_runs.spread(whole, EXPERIMENTS, [])
    assert whole.experiments["other"].lines["named otherwise"].seeds == [0, 1, 2]


def test_first_rates_are_those_of_the_run_that_had_them():
    """Not what stands under the line's name, which may have run at the rates that were chosen."""
    first = "b, first rates"
    experiments = EXPERIMENTS | dict(
        one=dataclasses.replace(OF, lines=OF.lines | {first: dict(lr=0.3)})
    )
    whole = Stored(
        experiments=dict(
            one=Stored(seeds=[0], lines={"b": line(0.7), first: line(0.1)}),
            other=Stored(seeds=[0], lines=dict(b=line(0.7))),
        )
    )
    assert shared_runs.spread(whole, experiments, [("one", "b")]) == set()  # no value is another
    assert whole.experiments["other"].lines[first].accuracy == [0.1]
