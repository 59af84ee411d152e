"""The check for options that were set but have no effect, which would look like a result."""

from ..core import checks, options
from ..data import partition
from .config import FIELDS, OPTIONS, Config, factory, sampler_of


def refuse_unused(*configs: Config) -> None:
    """Reject an option that was set but has no effect in any of these configs.

    Raises:
        ArgumentError: If there is such an option; the message says what it requires.
    """
    unused = [unused_options(config) for config in configs]
    for name, need in unused[0].items():
        if all(name in others for others in unused):
            checks.fail(
                "config",
                f"{need} for {name}",
                f"{name}={getattr(configs[0], name)!r} without it",
                f"Leave {name} out.",
            )


def unused_options(config: Config) -> dict[str, str]:
    """Return the options that differ from their defaults but have no effect, with what each
    requires."""
    changed = [n for n, field in FIELDS.items() if getattr(config, n) != field.default]
    unused = {}
    for name in changed:
        for need, holds in FIELDS[name].metadata["needs"].items():
            if not holds(config):
                unused[name] = need
        if name in OPTIONS and not _taken(config, name):
            unused[name] = _takers(name)
    return unused


def _takers(name) -> str:
    """Describe the functions that take an option."""
    takers = OPTIONS[name].takers
    each = [
        f"{kind}={several[0]!r}"
        if len(several) == 1
        else f"{kind} {', '.join(map(repr, several[:-1]))} or {several[-1]!r}"
        for kind, several in takers.items()
    ]
    return ", or ".join(each) + (", and no group_rows" if "partition" in takers else "")


def _taken(config, name) -> bool:
    """Return whether a function that this config names takes the option."""
    return any(
        name in {option.name for option in options.of(chosen)} for chosen in factories(config)
    )


def factories(config: Config) -> list:
    """Return the functions that a config names, except a partition that group_rows replaces."""
    kinds = {kind: getattr(config, kind) for kind in ("algorithm", "dataset", "model")}
    kinds |= dict(batch_sampler=config.batch_sampler, sampler=sampler_of(config))
    if config.strategy is not None:
        kinds["strategy"] = config.strategy
    if not config.group_rows:
        kinds["partition"] = config.partition
    if config.lr_schedule != "constant":
        kinds["lr_schedule"] = config.lr_schedule
    chosen = [factory(kind, name) for kind, name in kinds.items()]
    if config.group_rows and config.partition == "labels":
        chosen.append(partition.sizes)
    return chosen
