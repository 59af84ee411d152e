"""Options: what the signature of a factory offers to configs, to the command line, to `jfl list`.

A factory is a function that a config can name: an algorithm, a sampler, a partition, a dataset, a
model.  A parameter of it is an option where it has a plain type and a line under `Args:` in the
docstring, which is its help:

    def fedprox(grad, *, mu: float = 0.1, **fedavg_options):
        '''FedAvg with a pull.

        Args:
            mu: pull to the server's model.
        '''

`Annotated[float, Setting(name="synthetic_alpha")]` gives an option another name than its parameter,
or another default; `Annotated[float, PYTHON_ONLY]` offers none.  Parameters that are no options,
though their type is plain, stand under `Other Parameters:`.
"""

import ast
import dataclasses
import functools
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.typing import ArrayLike

from . import checks

PLAIN = (bool, int, float, str)
UNSET = inspect.Parameter.empty
Function = TypeVar("Function", bound=Callable[..., Any])


class Setting(NamedTuple):
    """Beside a parameter's type: how configs speak of it, where that differs from the signature."""

    name: str | None = None
    default: Any = UNSET
    offered: bool = True


PYTHON_ONLY = Setting(offered=False)


class Option(NamedTuple):
    """One parameter of a factory that a config can set."""

    name: str
    parameter: str
    type: Any
    default: Any
    help: str


class Shared(NamedTuple):
    """One name of an option, with all factories that have it."""

    name: str
    type: Any  # with None where the factories' defaults differ: None stands for each one's own
    default: Any
    help: str
    takers: dict[str, Any]  # kind -> names of its factories that take the option


# --- signatures that people read


class Readable(inspect.Signature):
    """A signature that prints as one writes it: short names, functions by theirs, no addresses."""

    def __str__(self) -> str:
        return self.format()

    def format(self, *, max_width: int | None = None, **_: Any) -> str:
        """As `inspect.Signature.format`: one line, or one for each parameter beyond `max_width`."""
        parts, starred = [], False
        for parameter in self.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                starred = True
            elif parameter.kind is parameter.KEYWORD_ONLY and not starred:
                parts.append("*")
                starred = True
            parts.append(_parameter_words(parameter))
        returns = self.return_annotation
        end = "" if returns is self.empty else f" -> {_type_words(returns)}"
        line = f"({', '.join(parts)}){end}"
        if max_width is None or len(line) <= max_width:
            return line
        return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def readable(function: Function) -> Function:
    """Decorate a public function whose defaults are functions: `help` then shows their names.

    Example:
        >>> @readable
        ... def run(step: Callable = max, times: int | jax.Array = 2) -> float: ...
        >>> str(inspect.signature(run))
        '(step: Callable = max, times: int | jax.Array = 2) -> float'
    """
    whole = inspect.signature(function, eval_str=True)
    shown: Any = function
    shown.__signature__ = Readable(
        list(whole.parameters.values()), return_annotation=whole.return_annotation
    )
    return function


def _parameter_words(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    if parameter.annotation is not UNSET:
        text += f": {_type_words(parameter.annotation)}"
    return text if parameter.default is UNSET else f"{text} = {_default_words(parameter.default)}"


def _default_words(value: Any) -> str:
    if not inspect.isroutine(value):
        return repr(value)
    package = value.__module__.partition(".")[0]
    prefix = "" if package in ("builtins", "jfl", "__main__") else f"{package}."
    return prefix + value.__name__


def _type_words(kind: Any) -> str:
    if kind is jax.Array:
        return "jax.Array"
    if kind == ArrayLike:
        return "ArrayLike"
    if typing.get_origin(kind) is typing.Annotated:
        return _type_words(typing.get_args(kind)[0])
    if _is_union(kind):
        rest, inner = [], set(typing.get_args(kind))
        if set(typing.get_args(ArrayLike)) <= inner:
            rest, inner = ["ArrayLike"], inner - set(typing.get_args(ArrayLike))
        rest += [_type_words(k) for k in typing.get_args(kind) if k in inner]
        return " | ".join(rest)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", inspect.formatannotation(kind))


def _is_union(kind: Any) -> bool:
    return isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union


# --- what a factory offers


def extends(
    base: Callable[..., Any], *, without: Iterable[str] = ()
) -> Callable[[Function], Function]:
    """Decorate a factory whose `**options` go to `base`: its signature then shows them all.

    Args:
        base: the factory that takes the other options.
        without: parameters of `base` that this factory sets itself.
    """

    def decorate(factory: Any) -> Any:
        signature = inspect.signature(factory, eval_str=True)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {*without, *(p.name for p in parameters)}
        parameters += [
            p.replace(kind=p.KEYWORD_ONLY)
            for p in inspect.signature(base, eval_str=True).parameters.values()
            if p.name not in names
        ]
        factory.__signature__ = Readable(parameters, return_annotation=signature.return_annotation)
        factory.extends = base
        return factory

    return decorate


def parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a factory, with those of the factory that it extends.

    Raises:
        ArgumentError: for `**options` of which nothing says where they go.
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


@functools.cache
def of(factory: Callable[..., Any]) -> tuple[Option, ...]:
    """The options of a factory, in the order of its parameters."""
    helps, found = documented(factory), []
    for parameter in parameters(factory).values():
        kind, setting = parameter.annotation, Setting()
        if typing.get_origin(kind) is typing.Annotated:
            kind, *notes = typing.get_args(kind)
            setting = next((note for note in notes if isinstance(note, Setting)), setting)
        if parameter.name not in helps or not _plain(kind) or not setting.offered:
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
        plain, optional = split_optional(kind)
        kind = plain | None if optional else plain
        found.append(Option(name, parameter.name, kind, default, helps[parameter.name]))
    return tuple(found)


def documented(factory: Callable[..., Any]) -> dict[str, str]:
    """Parameter -> the first sentence of its line under `Args:`, also of the factory it extends."""
    base = getattr(factory, "extends", None)
    helps = {} if base is None else documented(base)
    lines = _docstring(factory).splitlines()
    if "Args:" not in lines:
        return helps
    names = []
    for line in lines[lines.index("Args:") + 1 :]:
        if line and not line.startswith(" "):
            break
        begun = re.match(r" {4}(\w+(?:, \w+)*): +(.*)", line)
        if begun:
            names = begun[1].split(", ")
            helps |= dict.fromkeys(names, begun[2])
        elif line.strip():
            helps |= {name: f"{helps[name]} {line.strip()}" for name in names}
    return {name: re.split(r"\.\s", text)[0].rstrip(".") for name, text in helps.items()}


def _docstring(factory: Callable[..., Any]) -> str:
    """The docstring, also under `python -OO`, which keeps none: then out of the source."""
    text = factory.__doc__
    if text is None and sys.flags.optimize > 1:
        tree: Any = ast.parse(textwrap.dedent(inspect.getsource(factory))).body[0]
        text = ast.get_docstring(tree)
    return inspect.cleandoc(text or "")


def _plain(kind: Any) -> bool:
    """Whether a config can write a value of this type down."""
    kind, _ = split_optional(kind)
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind in PLAIN


def split_optional(kind: Any) -> tuple[Any, bool]:
    """A type without None, and whether None was part of it.

    Of a number that may also be traced (`float | jax.Array`), or of rows that may also be a list
    (`int | Sequence[int]`), a config writes the plain one.
    """
    if not _is_union(kind):
        return kind, False
    every = typing.get_args(kind)
    rest = [k for k in every if k is not type(None) and k is not jax.Array and not _listed(k)]
    return (rest[0] if len(rest) == 1 else kind), type(None) in every


def _listed(kind: Any) -> bool:
    return typing.get_origin(kind) is Sequence


# --- options of many factories


def shared(kinds: Mapping[str, Mapping[str, Callable[..., Any]]]) -> dict[str, Shared]:
    """The options of all factories by name.

    Factories may share a name.  Where their defaults differ, the option's default is None, and
    stands for the default of the factory that is chosen.

    Args:
        kinds: kind of factory -> name -> factory.

    Raises:
        ArgumentError: where two factories give one name different types.
    """
    offers = {}
    for kind, factories in kinds.items():
        for name, factory in factories.items():
            for option in of(factory):
                offers.setdefault(option.name, []).append((kind, name, option))
    return {name: _shared(name, offer) for name, offer in offers.items()}


def _shared(name: str, offers: list[tuple[str, str, Option]]) -> Shared:
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
    defaults = {repr(option.default) for _, _, option in offers}
    default = offers[0][2].default if len(defaults) == 1 else None
    takers, helps = {}, {}
    for family, factory, option in offers:
        takers.setdefault(family, []).append(factory)
        text = option.help
        if len(defaults) > 1 and option.default is not None:
            text += f"; default {option.default}"
        helps.setdefault(text, []).append(factory)
    return Shared(
        name,
        kind if default is not None else kind | None,
        default,
        "; ".join(f"{' and '.join(names)}: {text}" for text, names in helps.items()),
        takers,
    )


def arguments(
    factory: Callable[..., Any], values: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of a factory.

    Args:
        factory: what is called with them.
        values: of options by name; None stands for the factory's own default.
        given: of other parameters, passed on where the factory takes them.
    """
    found = {name: given[name] for name in parameters(factory) if name in given}
    for option in of(factory):
        if option.parameter not in found and values.get(option.name) is not None:
            found[option.parameter] = values[option.name]
    return found


def takes(factory: Callable[..., Any], parameter: str) -> bool:
    """Whether a factory has this parameter."""
    return parameter in inspect.signature(factory, eval_str=True).parameters


# --- fields of a config


def field(
    default: Any,
    help: str,
    *,
    choices: Callable[..., Any] | None = None,
    check: Callable[..., Any] | None = None,
    needs: Mapping[str, Callable[..., Any]] | None = None,
    repeated: bool = False,
) -> Any:
    """A field of a dataclass that is an option.

    Args:
        default: its value where nobody sets it.
        help: what it means, for `--help`.
        choices: () -> the values that it may have.
        check: (where, **{name: value}), which refuses a value.
        needs: what a value that is not the default needs to have an effect, in words -> whether a
            config has it.
        repeated: whether its flag may be given several times, each time with one value.
    """
    notes = dict(help=help, choices=choices, check=check, needs=dict(needs or {}))
    return dataclasses.field(default=default, metadata=notes | dict(repeated=repeated))
