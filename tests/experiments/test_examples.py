"""The examples of experiments/examples run, and say what they cost."""

import pytest

from experiments.examples import tuning


@pytest.mark.slow
def test_tuning_tells_the_search_from_the_priced_choice(monkeypatch, capsys):
    pytest.importorskip("optuna", reason='needs pip install -e ".[tune]"')
    monkeypatch.setattr("sys.argv", ["tuning", "--rounds", "1", "--trials", "4"])
    tuning.main()
    lines = capsys.readouterr().out.splitlines()
    epsilon = lambda line: float(line.split("epsilon = ")[1].split(";")[0].split(",")[0])
    assert "the search is in no epsilon" in lines[1] and "the choice included" in lines[3]
    assert epsilon(lines[3]) > 1.3 * epsilon(lines[1])  # a choice has its price
