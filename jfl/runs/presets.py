"""Named configs with measured accuracies to start from: `--preset NAME`."""

from typing import NamedTuple

from ..core import checks


class Preset(NamedTuple):
    """The fields of a config, and the accuracy that they reached."""

    fields: dict
    # mean and range over seeds 0, 1 and 2, each with its own split
    accuracy: str


_MNIST = dict(dataset="mnist", partition="iid", clients=100, model="logistic")
_DIGITS = dict(dataset="digits", partition="iid", clients=50, model="logistic")
_CLIENT = dict(unit="client", view="third_party")
_EXAMPLE = dict(unit="example", view="server")

PRESETS = {
    "mnist-client-eps8": Preset(
        _MNIST | _CLIENT | dict(epsilon=8.0, rounds=20, steps=30, batch=20, lr=0.1),
        "0.850 (0.849 to 0.851)",
    ),
    "mnist-example-eps8": Preset(
        _MNIST | _EXAMPLE | dict(epsilon=8.0, cohort=20, rounds=30, steps=5, batch=60, lr=1.0),
        "0.860 (0.859 to 0.861)",
    ),
    "digits-client-eps8": Preset(
        _DIGITS | _CLIENT | dict(epsilon=8.0, rounds=20, steps=10, batch=8, lr=0.3),
        "0.856 (0.850 to 0.866)",
    ),
    "digits-example-eps8": Preset(
        _DIGITS
        | _EXAMPLE
        | dict(algorithm="fedsgd", adjacency="add_remove", epsilon=8.0, rounds=20, lr=4.0)
        | dict(batch_sampler="full", sampler="full"),
        "0.871 (0.864 to 0.875)",
    ),
}


def fields(name: str) -> dict:
    """Return the fields of a preset.

    Raises:
        ArgumentError: If there is no such preset.

    Example:
        >>> fields("mnist-client-eps8")["rounds"]
        20
    """
    checks.require_one_of("--preset", PRESETS, preset=name)
    return dict(PRESETS[name].fields)
