"""Options are declared once, in the signature of what takes them."""

import dataclasses
import json
import os
import subprocess
import sys
from typing import Annotated

import pytest
from helpers.paths import RESULTS

from jfl import algorithms
from jfl.algorithms import base
from jfl.core import options
from jfl.core.errors import ArgumentError
from jfl.core.options import PYTHON_ONLY, Setting
from jfl.runs import build, config, record


def first(
    data,
    *,
    size: int = 3,
    width: Annotated[float, Setting("first_width", default=2.0)] = 1.0,
    secret: Annotated[int, PYTHON_ONLY] = 1,
    undocumented: int = 1,
    untyped=1,
    shape: tuple[int, ...] | None = None,
):
    """A factory.

    Args:
        data: what it works on.
        size: how many.  More is more.
        width: how
            wide.
        secret: for Python only.
        untyped: of any type.
        shape: of it.

    Returns:
        size: this is no argument.
    """
    return data, size, width


def documented(function, words):
    """The function with a line under Args."""
    function.__doc__ = f"One.\n\n    Args:\n        {words}\n    "
    return function


def test_an_option_has_a_plain_type_and_a_line_under_args():
    assert options.of(first) == (
        options.Option("size", "size", int, 3, "how many"),
        options.Option("first_width", "width", float, 2.0, "how wide"),
        options.Option("shape", "shape", tuple[int, ...] | None, None, "of it"),
    )
    values = dict(size=5, first_width=4.0, shape=None, untyped=7)
    assert options.arguments(first, values, {}) == dict(size=5, width=4.0)
    given = dict(data=1, nothing=2, size=9)  # what is given wins, where it is taken
    assert options.arguments(first, values, given) == dict(data=1, size=9, width=4.0)


def test_a_factory_that_extends_another_shows_its_options():
    @options.extends(first, without=["shape"])
    def second(data, *, size: int = 4, depth: int = 2, **rest):
        """Another.

        Args:
            depth: how deep.
        """
        return first(data, size=size, **rest)

    assert [(o.name, o.default, o.help) for o in options.of(second)] == [
        ("size", 4, "how many"),
        ("depth", 2, "how deep"),
        ("first_width", 2.0, "how wide"),
    ]
    assert second(1, **options.arguments(second, dict(first_width=8.0), {})) == (1, 4, 8.0)


def test_options_that_would_get_lost_are_refused():
    def anything(data, **rest):
        """Where do they go?"""

    with pytest.raises(ArgumentError, match=r"a function that takes \*\*rest"):
        options.parameters(anything)

    def required(size: int): ...

    with pytest.raises(ArgumentError, match="a default of its option size"):
        options.of(documented(required, "size: how many."))


def test_factories_share_names_of_one_type_only():
    def another(size: int = 4): ...

    def third(size: str = "large"): ...

    documented(another, "size: how many."), documented(third, "size: in words.")
    size = options.shared(dict(one=dict(first=first), other=dict(another=another)))["size"]
    assert (size.type, size.default) == (int | None, None)  # each factory's own
    assert size.help == "first: how many; default 3; another: how many; default 4"
    assert size.takers == dict(one=["first"], other=["another"])
    with pytest.raises(ArgumentError, match="option size: expected one type in one first, two"):
        options.shared(dict(one=dict(first=first), two=dict(third=third)))


def test_fields_of_a_recorded_run_keep_their_names_and_defaults():
    """What a config of before did not set means what it meant."""
    kept = json.loads((RESULTS / "study_text.json").read_text())["config"]
    told = "dataset partition clients sampler cohort batch_sampler batch steps rounds".split()
    left = {k: v for k, v in kept.items() if k not in (*told, "window", "stride", "every")}
    now = record.as_json(dataclasses.asdict(config.Config()))
    assert {k: now.get(k, "gone") for k in left} == left and len(left) > 70
    for name, option in config.OPTIONS.items():
        assert config.FIELDS[name].default == option.default, name


@pytest.mark.parametrize("name", sorted(config.OPTIONS))
def test_an_option_of_a_function_that_is_not_chosen_is_refused(name):
    """And of none that is."""
    option = config.OPTIONS[name]
    other = dict(float=0.123, int=5, str="other").get(
        getattr(options.split_optional(option.type)[0], "__name__", ""), (5,)
    )
    plain = dict(sampler="full", model="logistic", partition="iid")
    if "strategy" in option.takers:  # which only noise for clients has
        plain |= dict(unit="client", noise_multiplier=1.0)
    chosen = config.Config(**plain, **{name: other})
    with pytest.raises(ArgumentError, match=f" for {name}, but got {name}="):
        config.refuse_unused(chosen)
    for kind, factories in option.takers.items():
        for factory in factories:
            config.refuse_unused(dataclasses.replace(chosen, **{kind: factory}))


def test_what_the_builder_knows_of_an_algorithm_stands_beside_it():
    traits = {name: base.traits_of(getattr(algorithms, name)) for name in algorithms.__all__}
    unusual = "mimelite output_perturbation padpfl qfedavg scaffold"
    assert {name for name, own in traits.items() if own != base.Traits()} == set(unusual.split())
    assert traits["padpfl"].printed_unit == "client" and traits["scaffold"].payload_models == 2


MINE = '''
import sys
import jfl.algorithms as algorithms
from jfl.core.options import extends

@extends(algorithms.fedavg)
def mine(grad, *, my_option: int = 7, **fedavg_options):
    """An algorithm of mine.

    Args:
        my_option: how often it shouts.
    """
    print("my option is", my_option, "with", sorted(fedavg_options))
    return algorithms.fedavg(grad, **fedavg_options)

algorithms.mine = mine  # the line of jfl/algorithms/__init__.py
algorithms.__all__.append("mine")

from jfl.cli.main import main
from jfl.runs import pictures
pictures.draw_accuracy = lambda *_: None  # they are of test_cli.py
for arguments in sys.argv[1].split(";"):
    print("code", main(arguments.split()))
'''


@pytest.mark.slow
def test_a_new_algorithm_is_one_function_and_one_name(tmp_path):
    """Its option is a flag, a key in files, and in `jfl list`; unused, it is refused."""
    small = "--clients 6 --cohort 3 --model logistic --batch 4 --steps 1 --rounds 1 --min-rows 8"
    lines = [
        "my_option = 4",
        "noise_multiplier = 9.0",
        "sampler = 'full'",
        "batch_sampler = 'full'",
    ]
    (tmp_path / "c.toml").write_text("\n".join(["algorithm = 'mine'", *lines]))
    commands = [
        f"train --algorithm mine --my-option 3 {small} --out {tmp_path}/a",
        f"epsilon --config {tmp_path}/c.toml",
        f"train --my-option 3 {small} --out {tmp_path}/c",
        f"train --algorithm mine --my-option many {small} --out {tmp_path}/c",
        "list",
        "train --help-all",
    ]
    ran = subprocess.run(
        [sys.executable, "-c", MINE, ";".join(commands)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JFL_CACHE_DIR": str(tmp_path / "cache")},
    )
    said = ran.stdout + ran.stderr
    codes = [line.split()[1] for line in ran.stdout.splitlines() if line.startswith("code")]
    assert codes == ["0", "0", "2", "2", "0", "0"], said
    assert "my option is 3 with ['batch', 'lr', 'optimizer', 'server_lr'" in said
    assert "my option is 4" in said and "my_option = 3" in (tmp_path / "a/config.toml").read_text()
    assert "expected algorithm='mine' for my_option, but got my_option=3 without it" in said
    assert "my_option=7" in said and "An algorithm of mine" in said
    assert "mine: how often it shouts" in " ".join(said.replace("│", " ").split())
    assert not (tmp_path / "c").exists()


def test_a_cohort_that_no_group_holds_is_refused():
    """Of 20 clients in 4 groups 5 take part at most; the rate was cut to 1 without a word."""

    settings = config.Config(sampler="cyclic_poisson", separation=4, clients=20, cohort=10)
    with pytest.raises(ValueError, match="cohort <= 5, the clients that"):
        build._sampler(settings)
    fits = dataclasses.replace(settings, cohort=5)
    assert float(build._sampler(fits).rate) == 1.0
