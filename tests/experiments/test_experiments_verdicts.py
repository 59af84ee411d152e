"""The rule of all papers' claims: what holds, what does not, what is left open, and the verdicts of
the committed results."""

import dataclasses
import importlib
import itertools

import numpy as np
import pytest
from helpers.lines import judged, line, near, verdict
from helpers.paths import RESULTS
from scipy import stats

from experiments.harness import collect, runner, stories, verdicts
from experiments.harness import results as results_file
from experiments.harness.programs import Plans
from experiments.harness.results import PAPERS
from experiments.harness.runner import Experiment, stored_line
from experiments.harness.verdicts import (
    CONTRADICTED,
    HOLDS,
    NO_DIFFERENCE,
    NOT_REPRODUCED,
    UNDECIDED,
    UNKNOWN,
    Claim,
    Quantity,
)
from jfl.core.errors import DataUnavailable
from jfl.runs.config import Config

# --- intervals


def test_an_interval_is_students_and_paired():
    a, b = np.array([0.1, 0.5, 0.9, 1.3]), np.array([0.05, 0.06, 0.05, 0.06])
    pair = Quantity.of(a + b) - Quantity.of(a)
    least, most = pair.interval(0.01)
    half = stats.t.ppf(0.995, 3) * b.std(ddof=1) / 2
    assert (least, most) == pytest.approx((b.mean() - half, b.mean() + half))
    assert (2 * pair + 1).mean == pytest.approx(2 * b.mean() + 1)
    assert (-1 * pair).interval(0.01) == pytest.approx((-most, -least))
    # the same with seeds in another order, and of the seeds that both ran
    other = Quantity.of(a[::-1], (3, 2, 1, 0)) - Quantity.of((a + b)[:3], (0, 1, 2))
    assert other.mean == pytest.approx(-b[:3].mean()) and other.freedom == 2


# --- the rule


def test_a_claim_holds_fails_or_is_open():
    better = verdicts.beats([("a", "b")])
    far = dict(a=line(0.50, 0.52, 0.51), b=line(0.40, 0.41, 0.405))
    turned = dict(a=far["b"], b=far["a"])
    assert verdict(better, far) == HOLDS
    assert verdict(better, turned) == NOT_REPRODUCED
    assert verdict(better, turned, differs="") == CONTRADICTED
    assert verdict(better, dict(a=line(0.4, 0.5, 0.6), b=line(0.45, 0.46, 0.47))) == UNDECIDED
    assert verdict(better, dict(a=line(0.9), b=line(0.1))) == UNDECIDED  # one seed: no interval
    assert verdict(better, dict(a=line(0.9))) == UNKNOWN
    assert verdict(verdicts.exactly(True, "by proof"), {}) == HOLDS  # what has no seeds is exact
    assert verdict(verdicts.exactly(False), {}) == NOT_REPRODUCED
    assert verdict(verdicts.exactly(False), {}, differs="") == CONTRADICTED


@pytest.mark.parametrize(
    "mean, shown, points, expected",
    [
        (0.0741, "+0.0741 ± 0.0735", "+7.41 ± 7.35 points", HOLDS),
        (0.0735, "+0.073 ± 0.074", "+7.3 ± 7.4 points", UNDECIDED),
        (0.5, "+0.500 ± 0.074", "+50.0 ± 7.4 points", HOLDS),
    ],
)
def test_a_mean_is_shown_with_the_digits_that_decide(mean, shown, points, expected):
    width = 0.0296 * stats.t.ppf(0.975, 2) / stats.t.ppf(0.95, 2)  # of a one-sided bound
    lines = dict(a=line(mean - width, mean, mean + width), b=line(0.0, 0.0, 0.0))
    found, seen = judged(verdicts.beats([("a", "b")]), lines)
    assert found == expected and seen.startswith(shown)
    page = stories.measured(results_file.Verdict("it is so", found, seen), "points")
    assert page.startswith(points)


def test_claims_of_a_figure_share_the_chance_of_an_error():
    better = verdicts.beats([("a", "b")])
    lines = dict(a=line(0.50, 0.52, 0.51), b=line(0.46, 0.47, 0.475))
    claims = (Claim("one", better), *(Claim(str(i), better, "ours") for i in range(19)))
    found = runner.judged(Experiment("", {}, {}, claims), lines)
    assert [v["verdict"] for v in found] == [HOLDS] + [UNDECIDED] * 19  # each list by itself
    assert "95 % one-sided bounds, 3 seeds" in found[0]["seen"] and "99.74 %" in found[1]["seen"]


def test_claims_that_hold_leave_the_others_a_larger_level():
    """By one formula, which gives all claims 5 % together whichever of them are true."""
    for m, wrong in itertools.product((1, 2, 7), (0.05, 0.025)):
        for true in range(m):
            spent = true * wrong / (2 * m) + (m - true) * verdicts.holding_level(true, m, wrong)
            assert spent == pytest.approx(wrong)
    clear, close = [("a", "b")], [("c", "b")]
    lines = dict(a=line(0.90, 0.91, 0.92), b=line(0.5, 0.5, 0.5), c=line(0.514, 0.536, 0.525))
    p = stats.ttest_1samp(lines["c"].accuracy, 0.5, alternative="greater").pvalue
    assert 0.025 < p < 0.0375  # between the first level and the second
    of = lambda *pairs: [
        v for v, _ in verdicts.judge([Claim("", verdicts.beats(q)) for q in pairs], lines, "ours")
    ]
    assert of(clear, close) == [HOLDS, HOLDS] and of([("b", "a")], close)[1] == UNDECIDED


def test_a_second_number_of_seeds_is_judged_at_half_the_level():
    lines = dict(a=line(0.514, 0.536, 0.525), b=line(0.5, 0.5, 0.5))
    p = stats.ttest_1samp(lines["a"].accuracy, 0.5, alternative="greater").pvalue
    assert 0.025 < p < 0.05
    once = Experiment("", {}, {}, (Claim("", verdicts.beats([("a", "b")])),), differs="ours")
    twice = runner.with_seeds(dict(figure=once, other=once), {}, dict(figure=3))
    found = {name: runner.judged(e, lines)[0]["verdict"] for name, e in twice.items()}
    assert found == dict(figure=UNDECIDED, other=HOLDS)
    assert twice["figure"].seeds == (0, 1, 2)


def false_alarms(claims, effects, linked, runs=2000, seeds=5):
    """The share of simulated figures with a wrong verdict.

    A claim says that its mean is above 0.  The differences of neighbouring claims share a line, as
    those of "a beats b" and "b beats c", if they are linked.
    """
    draw, wrong = np.random.default_rng(5), 0
    for _ in range(runs):
        noise = draw.normal(size=(claims + 1, seeds))
        noise = noise[:-1] - noise[1:] if linked else noise[:-1]
        gaps = [Quantity.of(e + n) for e, n in zip(effects, noise)]
        wrong += any(
            given == (HOLDS if effect <= 0 else NOT_REPRODUCED)
            or (given == NO_DIFFERENCE and abs(effect) >= 1.5)
            for effect, given in zip(effects, by_the_rule(gaps), strict=True)
        )
    return wrong / runs


def by_the_rule(gaps):
    made = [
        Claim("", lambda r, g=g: verdicts.Evidence((verdicts.Comparison(g, 0.0, same=1.5),)))
        for g in gaps
    ]
    return [verdict for verdict, _ in verdicts.judge(made, {}, "ours")]


EDGE = 1e-9  # claims on the edge between true and false are the hardest


@pytest.mark.parametrize(
    "effects, linked",
    [
        ([EDGE] * 6, True),
        ([0.0] * 6, False),
        ([EDGE, 0.0] * 3, True),
        ([9.0] * 5 + [0.0], False),
        ([1.5, -1.5] * 3, True),
    ],
    ids=["true", "false", "mixed", "one left", "as large as none"],
)
def test_at_most_one_figure_in_twenty_has_a_wrong_verdict(effects, linked):
    """Except for what 2,000 figures leave to chance: four standard deviations are 2 %."""
    assert false_alarms(6, effects, linked) < 0.05 + 0.02


def test_a_difference_that_is_shown_to_be_small_is_none():
    better = verdicts.beats([("a", "b")])
    lines = dict(a=line(0.500, 0.504, 0.497), b=line(0.499, 0.501, 0.500))
    found, seen = judged(better, lines)
    assert found == NO_DIFFERENCE and seen.endswith("; no difference larger than 0.02")
    assert stories.measured(results_file.Verdict("it is so", found, seen), "points") == (
        "0.0 ± 0.76 points (3 seeds)"
    )
    assert verdict(verdicts.beats([("a", "b"), ("a", "b")]), lines) == UNDECIDED
    assert verdict(verdicts.within("a", "b", -0.1, 0.0001), lines) == UNDECIDED
    gap = lambda *ends: line(*ends, **{"ln(F - F*)": [[0.0, e] for e in ends]})
    lines = dict(a=gap(0.1, 0.15, 0.2), b=gap(0.1, 0.16, 0.19))
    assert verdict(verdicts.beats([("a", "b")], "ln(F - F*)"), lines) == NO_DIFFERENCE
    assert verdict(verdicts.beats([("a", "b")], "loss"), lines) == UNDECIDED  # at most 0.02


def test_a_range_with_two_ends_needs_a_two_sided_interval():
    lines = dict(a=line(0.4905, 0.5, 0.5095), b=line(0.5, 0.5, 0.5))  # 1.6 points one-sided
    assert verdict(verdicts.close("a", "b"), lines) == UNDECIDED
    assert verdict(verdicts.no_lower(("a", "b")), lines) == HOLDS


def test_the_best_of_several_lines_between_the_ends_has_a_smaller_level():
    some = dict(a=near(0.5), b=line(0.52, 0.54, 0.56), c=near(0.3), d=near(0.3), e=near(0.5))
    assert verdict(verdicts.inner(*"abe"), some) == HOLDS
    assert verdict(verdicts.inner(*"abcde"), some) == UNDECIDED
    # any of them may be the best, also one whose mean is not
    some |= dict(b=near(0.45), c=line(0.2, 0.44, 0.65))
    assert verdict(verdicts.inner(*"abe"), some) == NOT_REPRODUCED
    assert verdict(verdicts.inner(*"abce"), some) == UNDECIDED


def test_lines_at_chance_are_not_ranked():
    fields = {name: dict(dataset="mnist") for name in "abd"} | dict(c=dict(dataset="emnist"))
    claims = [Claim(p, verdicts.beats([tuple(p)])) for p in ("ab", "ba", "ac")]
    claims.append(Claim("several", verdicts.beats([tuple(p) for p in ("ac", "ab", "db")])))
    claims.append(Claim("printed", verdicts.near_printed(dict(a=0.3, b=0.13), 0.03)))
    experiment = Experiment("", {}, fields, tuple(claims))
    # for c, chance is one of 47
    lines = dict(a=near(0.3), b=near(0.13), c=near(0.13), d=near(0.12))
    found = runner.judged(experiment, lines)
    assert [v["verdict"] for v in found] == [UNKNOWN, UNKNOWN, HOLDS, UNKNOWN, HOLDS]
    assert found[0]["seen"] == "0 of 1 pairs compared: at chance: b"
    assert found[3]["seen"].endswith("1 of 3 pairs compared: at chance: b, d")  # each once
    part = results_file.Experiment(verdicts=[results_file.Verdict(**found[0])])
    assert "at chance" in stories.reason(part, part.verdicts[0])
    (above, *_) = runner.judged(experiment, dict(lines, b=near(0.16)))
    assert above["verdict"] == HOLDS


def test_one_comparison_speaks_against_a_claim_of_many():
    """If it does where the chance of an error is divided by their number too."""
    pairs = [("a", "b"), ("c", "d")]
    lines = dict(
        a=line(0.5, 0.5, 0.51), b=line(0.4, 0.4, 0.4), c=line(0.4, 0.41, 0.4), d=line(0.5, 0.5, 0.5)
    )
    assert verdict(verdicts.beats(pairs), lines) == NOT_REPRODUCED
    lines["d"] = line(0.42, 0.44, 0.437)
    assert verdict(verdicts.beats(pairs[1:]), lines) == NOT_REPRODUCED
    assert verdict(verdicts.beats(pairs), lines) == UNDECIDED
    # a pair that was not run leaves it open, unless another speaks against it
    assert verdict(verdicts.beats([("a", "b"), ("a", "x")]), lines) == UNKNOWN
    assert verdict(verdicts.beats([("b", "a"), ("a", "x")]), lines) == NOT_REPRODUCED


def test_seeds_that_failed_are_no_sample():
    lines = dict(a=line(0.9, 0.9), b=dataclasses.replace(line(0.1, 0.1), failed=(2,)))
    claims = (Claim("c", verdicts.beats([("a", "b")])),)
    (found,) = runner.judged(Experiment("", {}, {}, claims), lines)
    assert found["verdict"] == UNKNOWN and found["seen"].endswith("; seeds failed of b")


# --- checks that papers share


@pytest.mark.parametrize(
    "check, good, bad",
    [
        (verdicts.ordered(*"abc"), (0.9, 0.8, 0.7), (0.9, 0.8, 0.85)),
        (verdicts.close("a", "b"), (0.5, 0.51), (0.5, 0.53)),
        (verdicts.no_lower(("a", "b")), (0.49, 0.5), (0.47, 0.5)),
        (verdicts.inner(*"abc"), (0.5, 0.8, 0.6), (0.5, 0.8, 0.9)),
        (verdicts.inner(*"abc"), (0.5, 0.8, 0.6), (0.9, 0.8, 0.6)),
        (verdicts.inner(*"abcd"), (0.3, 0.1, 0.5, 0.2), (0.3, 0.1, 0.2, 0.5)),
        (verdicts.about([("a", "b"), ("c", "b")], 0.1, 0.2), (0.6, 0.5, 0.7), (0.6, 0.5, 0.9)),
        (verdicts.grows([("a", "b"), ("c", "b")]), (0.6, 0.5, 0.7), (0.7, 0.5, 0.6)),
        (verdicts.near_printed(dict(a=0.5, b=0.6), 0.03), (0.52, 0.59), (0.52, 0.65)),
        (verdicts.within("a", "b", 0.1, 0.3), (0.7, 0.5), (0.9, 0.5)),
        (verdicts.within("a", "b", 0.1, 0.3), (0.7, 0.5), (0.55, 0.5)),
        (
            verdicts.all_of([verdicts.ordered("a", "b"), verdicts.ordered("a", "c")]),
            (0.9, 0.5, 0.6),
            (0.9, 0.5, 0.95),
        ),
    ],
)
def test_checks_go_both_ways(check, good, bad):
    of = lambda values: dict(zip("abcd", map(near, values)))
    assert verdict(check, of(good)) == HOLDS
    assert verdict(check, of(bad)) == NOT_REPRODUCED
    assert verdict(check, {}) == UNKNOWN


def test_traces_end_lower_where_they_are_better():
    better = verdicts.beats([("a", "b")], "gap")
    low = line(0.5, 0.5, gap=[[1.0, -0.5], [1.0, -0.52]])
    high = line(0.5, 0.5, gap=[[0.2, -0.1], [0.2, -0.11]])
    assert verdict(better, dict(a=low, b=high)) == HOLDS
    assert verdict(better, dict(a=high, b=low)) == NOT_REPRODUCED
    assert verdict(better, dict(a=line(0.9, 0.9), b=high)) == UNKNOWN  # it was not stored
    losses = verdicts.beats([("a", "b")], "loss")
    assert verdict(losses, dict(a=line(0.1, 0.11), b=line(0.5, 0.52))) == HOLDS


def test_a_symmetric_check_says_which_line_it_subtracts():
    lines = dict(a=near(0.55), b=near(0.5))
    for pair, seen in (("ab", "a minus b: +0.050"), ("ba", "b minus a: -0.050")):
        found, shown = judged(verdicts.close(*pair), lines)
        assert found == NOT_REPRODUCED and shown.startswith(seen)


def test_a_baseline_below_a_private_line_was_not_tuned():
    lines = dict(free=near(0.5), good=near(0.6), poor=near(0.4), noisy=line(0.1, 0.9, 0.6))
    assert verdicts.untuned(dict(free=("poor", "noisy")), lines) == []
    assert verdicts.untuned(dict(free=("poor", "good")), lines) == ["free"]
    assert verdicts.untuned(dict(free=("good", "absent")), dict(free=near(0.5))) == []


# --- stored results

# of a config, what an epsilon at example level does not depend on: models, rows, what is measured
NO_MATTER = ("seed", "lr", "l2", "preprocess", "evaluate_every", "synthetic_alpha")
NO_MATTER += ("synthetic_beta",)
MARKED = {("chen2024", name) for name in ("fig3", "table2", "table2_tuned", "fig6c")}
AT_ENDS = ("sample_mnist", "sample_cifar10", "table3")
HAVE_ENDS = MARKED | {("ranaweera2025", name) for name in AT_ENDS}
NOT_TUNED = MARKED | {("noble2022", "fig2a")}


def read(paper):
    return results_file.read(RESULTS / f"{paper}.json")


def known(paper):
    return importlib.import_module(f"experiments.papers.{paper}.figures").EXPERIMENTS


@pytest.mark.parametrize("paper", PAPERS)
def test_stored_verdicts_and_notes_are_computed_from_stored_values(paper, tmp_path):
    stored = RESULTS / f"{paper}.json"
    (tmp_path / stored.name).write_text(stored.read_text())
    assert collect.collect(paper, [], tmp_path).read_text() == stored.read_text()
    whole = read(paper)
    assert sum(bool(part.verdicts) for part in whole.parts()) > 2
    for key, places in dict(not_tuned=NOT_TUNED, at_edge=HAVE_ENDS).items():
        noted = {
            name
            for name, part in whole.experiments.items()
            if any(note.startswith(results_file.NOTES[key]) for note in part.notes)
        }
        assert noted == {name for module, name in places if module == paper}, key


@pytest.mark.slow
@pytest.mark.parametrize("paper", ["li2025", "ranaweera2025", "talaei2024"])
def test_large_stored_epsilons_are_still_proved(paper):
    """The smaller the noise, the more delta the finite range of computed noise costs."""
    found, checked = {}, 0
    for name, part in read(paper).experiments.items():
        experiment = known(paper).get(name)
        for title, stored in part.lines.items() if experiment else ():
            config = Config(**{**experiment.base, **experiment.lines.get(title, {})})
            if not isinstance(experiment.runs, Plans) or (stored.epsilon_proved or 0) < 15:
                continue
            key = repr(dataclasses.replace(config, lr=1.0))  # accounting does not depend on it
            if key not in found:
                try:
                    plan, made = experiment.runs.build(config)
                except DataUnavailable:
                    found[key] = None
                    continue
                entry = dict(privacy=experiment.runs.privacy(plan, made), config=vars(made))
                found[key] = runner._epsilons(entry)[0]
            elif found[key] is None:
                continue
            assert found[key] == pytest.approx(stored.epsilon_proved, rel=1e-3), (name, title)
            checked += 1
    assert checked >= 5


@pytest.mark.parametrize("paper", PAPERS)
def test_a_named_difference_is_of_the_papers_method_and_of_stored_values(paper):
    """Else the sign on its page would be that of the other method."""
    own = dict(noble2022="SCAFFOLD", chen2024="AdDPNFL").get(paper, "")
    named = 0
    for name, part in read(paper).experiments.items():
        lines = {n: stored_line(line, tuple(part.seeds)) for n, line in part.lines.items()}
        for claim in known(paper)[name].claims if name in known(paper) and lines else ():
            for comparison in claim.check(runner.without_failures(lines)).comparisons:
                first, minus, second = comparison.name.partition(" minus ")
                if not minus:
                    continue
                gap = np.mean(lines[first].accuracy) - np.mean(lines[second].accuracy)
                assert comparison.of.mean == pytest.approx(gap)
                assert (own in first) >= (own in second), f"{name}: {comparison.name}"
                named += 1
    assert (named > 10) == (paper in ("noble2022", "chen2024"))


@pytest.mark.parametrize("paper", PAPERS)
def test_one_run_has_one_proved_epsilon_on_a_page(paper):
    """A view, unit, adjacency and delta are those of the config."""
    figures, seen = known(paper), {}
    for name, part in read(paper).experiments.items():
        for text, found in part.lines.items():
            if name in figures and text in figures[name].lines and found.epsilon_proved is not None:
                config = Config(**{**figures[name].base, **figures[name].lines[text]})
                fields = dataclasses.asdict(config).items()
                key = tuple((k, repr(v)) for k, v in fields if k not in NO_MATTER)
                # Epsilon is the largest over the seeds, each of which may have a split of its own.
                key += (len(found.accuracy),)
                seen.setdefault(key, []).append(found.epsilon_proved)
    assert len(seen) > 10
    for epsilons in seen.values():
        assert max(epsilons) == pytest.approx(min(epsilons), rel=1e-6)


def test_checks_of_one_statement_count_once():
    given = [("it rises", HOLDS), ("it rises", UNDECIDED), ("it falls", UNKNOWN)]
    checks = [dict(claim=f"{s}, {i}", verdict=v, statement=s) for i, (s, v) in enumerate(given)]
    checks.append(dict(claim="ours", verdict=HOLDS, whose="ours"))
    made = results_file.of(dict(experiment="fig", verdicts=checks))
    assert results_file.statements([made]) == {"it rises": UNDECIDED, "it falls": UNKNOWN}
    assert list(results_file.statements([made], "ours")) == ["fig: ours"]


def test_a_line_that_ran_before_its_rates_were_chosen_is_named():
    experiment = Experiment("", dict(clip_norm=1.0), dict(a=dict(lr=0.5), b=dict(lr=0.5)))
    now = runner.ran_at(experiment, "b")
    assert now == dict(lr=0.5, clip_norm=1.0, server_lr=1.0)
    decays = dataclasses.replace(experiment, lines=dict(b=dict(lr=0.5, noise_decay=0.7)))
    assert runner.ran_at(decays, "b") == now | dict(noise_decay=0.7)
    rates = dict(a=now | dict(lr=0.1), b=now, gone=now)
    stored = results_file.Experiment(
        lines={n: results_file.Line(accuracy=[0.5], ran_at=at) for n, at in rates.items()}
    )
    for words in ("a", ""):
        collect.judge_stored(stored, experiment)
        told = [n for n in stored.notes if n.startswith("At other rates")]
        assert told == [f"At other rates than those chosen since: {words}"] * bool(words)
        stored.lines["a"].ran_at = now
