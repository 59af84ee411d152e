"""Options of configs and of the command line, read from the signatures of factories.

A factory is a function that a config can name: an algorithm, a sampler, a partition, a dataset or a
model.  A parameter is an option if it has a plain type and a line under `Args:` in the docstring,
which becomes its help:

    def fedprox(grad, *, mu: float = 0.1, **fedavg_options):
        '''FedAvg with a proximal term.

        Args:
            mu: weight of the proximal term.
        '''

`Annotated[float, Setting(name="synthetic_alpha", default=1.0)]` gives an option another name or
another default than its parameter.  `Annotated[float, PYTHON_ONLY]`, or a line under
`Other Parameters:` instead of `Args:`, keeps a parameter out of configs.
"""

import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from . import checks

PLAIN = (bool, int, float, str)
UNSET = inspect.Parameter.empty
Function = TypeVar("Function", bound=Callable[..., Any])


class Setting(NamedTuple):
    """An annotation that says how a parameter appears in configs.

    Attributes:
        name: the name of the option; None means the name of the parameter.
        default: the default in configs; UNSET means the default in the signature.
        offered: whether the parameter is an option.
    """

    name: str | None = None
    default: Any = UNSET
    offered: bool = True


PYTHON_ONLY = Setting(offered=False)


class Option(NamedTuple):
    """A parameter of a factory that a config can set."""

    name: str
    parameter: str  # the name of the parameter, which may differ
    type: Any
    default: Any
    help: str


class Shared(NamedTuple):
    """An option, and all factories that have it."""

    name: str
    type: Any
    default: Any  # None if the defaults of the factories differ; each then applies its own
    help: str
    takers: dict[str, Any]  # kind of factory -> names of the factories that have the option


def extends(
    base: Callable[..., Any], *, without: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Decorate a factory that passes its `**options` to `base`, so that its signature lists them.

    Args:
        base: the factory that takes the other options.
        without: parameters of `base` that this factory sets itself.
    """

    def decorate(factory: Any) -> Any:
        signature = inspect.signature(factory, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        inherited = inspect.signature(base, eval_str=True).parameters.values()
        hidden = {*without, *(p.name for p in own)}
        own += [p.replace(kind=p.KEYWORD_ONLY) for p in inherited if p.name not in hidden]
        factory.__signature__ = signature.replace(parameters=own)
        factory.extends = base
        return factory

    return decorate


def parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a factory, including those of the factory that it extends.

    Raises:
        ArgumentError: if the factory takes `**options` without the decorator `extends`.
    """
    found = inspect.signature(factory, eval_str=True).parameters
    for parameter in found.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            checks.fail(
                factory.__name__,
                f"a function that takes **{parameter.name}",
                "none",
                "Decorate it with jfl.core.options.extends(that function).",
            )
    return found


def takes(factory: Callable[..., Any], parameter: str) -> bool:
    """Return whether a factory has this parameter."""
    return parameter in inspect.signature(factory, eval_str=True).parameters


@functools.cache
def of(factory: Callable[..., Any]) -> tuple[Option, ...]:
    """Return the options of a factory, in the order of its parameters."""
    helps, found = _helps(factory), []
    for parameter in parameters(factory).values():
        kind, setting = parameter.annotation, Setting()
        if typing.get_origin(kind) is typing.Annotated:
            kind, *notes = typing.get_args(kind)
            setting = next((note for note in notes if isinstance(note, Setting)), setting)
        plain, optional = split_optional(kind)
        item = typing.get_args(plain)[0] if typing.get_origin(plain) is tuple else plain
        if parameter.name not in helps or item not in PLAIN or not setting.offered:
            continue
        name = setting.name or parameter.name
        default = parameter.default if setting.default is UNSET else setting.default
        if default is UNSET:
            checks.fail(
                factory.__name__,
                f"a default of its option {name}",
                "none",
                f"Give {parameter.name} one, or annotate it with Setting(default=...).",
            )
        kind = plain | None if optional else plain
        found.append(Option(name, parameter.name, kind, default, helps[parameter.name]))
    return tuple(found)


def _helps(factory: Callable[..., Any]) -> dict[str, str]:
    """Return the first sentence about each parameter under `Args:` of the docstring.

    Parameters of the factory that it extends are included.
    """
    import docstring_parser  # part of the extra "cli"

    if sys.flags.optimize > 1:
        checks.fail("jfl", "docstrings, from which it reads options", "python -OO", "Use -O.")
    base = getattr(factory, "extends", None)
    helps = {} if base is None else _helps(base)
    style = docstring_parser.DocstringStyle.GOOGLE
    for entry in docstring_parser.parse(factory.__doc__ or "", style).params:
        if entry.args[0] == "param":  # and not under "Other Parameters:"
            text = " ".join((entry.description or "").split())
            sentence = text.partition(". ")[0].rstrip(".")
            helps |= dict.fromkeys(entry.arg_name.split(", "), sentence)
    return helps


def split_optional(kind: Any) -> tuple[Any, bool]:
    """Return the plain part of a type, which a config can set, and whether the type includes None.

    For example, it returns float for `float | jax.Array`.
    """
    if not isinstance(kind, types.UnionType) and typing.get_origin(kind) is not typing.Union:
        return kind, False
    every = typing.get_args(kind)
    others = (type(None), jax.Array)
    rest = [k for k in every if k not in others]
    return (rest[0] if len(rest) == 1 else kind), type(None) in every


def shared(kinds: Mapping[str, Mapping[str, Callable[..., Any]]]) -> dict[str, Shared]:
    """Return the options of all factories, by name.

    Args:
        kinds: for each kind of factory, such as "algorithm", the factories by name.

    Raises:
        ArgumentError: if two factories give one name different types.
    """
    offers: dict[str, list[tuple[str, str, Option]]] = {}
    for kind, factories in kinds.items():
        for name, factory in factories.items():
            for option in of(factory):
                offers.setdefault(option.name, []).append((kind, name, option))
    return {name: _shared(name, offer) for name, offer in offers.items()}


def _shared(name: str, offers: list[tuple[str, str, Option]]) -> Shared:
    """Combine options of one name; `offers` has the kind and the name of each factory."""
    plain = {split_optional(option.type)[0] for _, _, option in offers}
    if len(plain) > 1:
        takers = ", ".join(f"{kind} {factory}" for kind, factory, _ in offers)
        checks.fail(
            f"option {name}",
            f"one type in {takers}",
            f"{sorted(map(str, plain))}",
            "Give one of them another name with Setting(name=...).",
        )
    (kind,) = plain
    same_default = len({repr(option.default) for _, _, option in offers}) == 1
    default = offers[0][2].default if same_default else None
    takers, helps = {}, {}
    for family, factory, option in offers:
        takers.setdefault(family, []).append(factory)
        text = option.help
        if not same_default and option.default is not None:
            text += f"; default {option.default}"
        helps.setdefault(text, []).append(factory)
    text = "; ".join(f"{' and '.join(names)}: {text}" for text, names in helps.items())
    return Shared(name, kind | None if default is None else kind, default, text, takers)


def arguments(
    factory: Callable[..., Any], values: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments with which a config calls a factory.

    Args:
        factory: the function to call.
        values: values of options, by the name of the option; None means the factory's default.
        given: values of parameters that are not options, by the name of the parameter.  Those that
            the factory does not have are ignored.
    """
    found = {name: given[name] for name in parameters(factory) if name in given}
    for option in of(factory):
        if option.parameter not in found and values.get(option.name) is not None:
            found[option.parameter] = values[option.name]
    return found


def field(
    default: Any,
    help: str,
    *,
    choices: Callable[..., Any] | None = None,
    check: Callable[..., Any] | None = None,
    needs: Mapping[str, Callable[..., Any]] | None = None,
    repeated: bool = False,
) -> Any:
    """Return a dataclass field of a config, which is an option of the command line.

    Args:
        default: the default value.
        help: the text of `--help`.
        choices: a function without arguments that returns the allowed values.
        check: a function such as `checks.require_positive`, called as check(where, name=value) with
            the name of the option.  It raises an error for an invalid value; `where` is the place
            with which its message begins.
        needs: conditions under which the option has an effect, as a dict from a description to a
            function of the config that returns whether the condition holds.  A value other than the
            default is rejected unless all conditions hold.
        repeated: whether the flag may be given several times, with one value each time.
    """
    notes = dict(help=help, choices=choices, check=check, needs=dict(needs or {}))
    return dataclasses.field(default=default, metadata=notes | dict(repeated=repeated))
