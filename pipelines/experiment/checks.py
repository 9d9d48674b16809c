"""Options that are checked: a dataclass whose annotations say what each may be.

Pydantic checks and converts; a message names the flag and shows a value that would do.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from clusterenv.errors import ConfigError

__all__ = [
    "Bound",
    "Count",
    "Finite",
    "Fraction",
    "Inside",
    "Limit",
    "Natural",
    "NotNegative",
    "Options",
    "Positive",
    "Queue",
    "Share",
    "check_shards",
    "convert",
    "flag",
]

Count = Annotated[int, Field(ge=1, examples=[4])]
Queue = Annotated[int, Field(ge=2, le=1024, examples=[2])]
Natural = Annotated[int, Field(ge=0, examples=[1])]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, examples=[1])]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, examples=[1])]
Finite = Annotated[float, Field(allow_inf_nan=False, examples=[100])]
# What only limits something may be infinite: then there is no limit.
Bound = Annotated[float, Field(gt=0, examples=[1])]
Limit = Annotated[float, Field(ge=0, examples=[1])]
Share = Annotated[float, Field(ge=0, le=1, examples=[0.5])]
Fraction = Annotated[float, Field(gt=0, le=1, examples=[0.5])]
Inside = Annotated[float, Field(gt=0, lt=1, examples=[0.5])]

BOUNDS = {
    "greater_than": "above {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "below {lt:g}",
    "less_than_equal": "{le:g} or less",
    "literal_error": "{expected}",
}
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "tuple": "a list",
    "path": "a path",
    "string": "text",
}


@dataclass(frozen=True)
class Options:
    """Base of a dataclass of options: each field is converted to its annotation, or refused.

    Raises
    ------
    ConfigError
        With the flag, its value, and a value that would do.

    Examples
    --------
    >>> @dataclass(frozen=True)
    ... class Args(Options):
    ...     lr: Positive = 0.001
    >>> Args(lr=-1)
    Traceback (most recent call last):
        ...
    clusterenv.errors.ConfigError: --lr must be above 0, got -1: --lr 0.001
    """

    origin: ClassVar[Any] = None
    """Of options from a command line: :class:`pipelines.experiment.options.Origin`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = convert(type(self), field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, value)


def convert(kind: Any, name: str, value: Any, where: str = "") -> Any:
    """Return a value converted to the annotation of a dataclass's field.

    Parameters
    ----------
    kind
        The dataclass.
    name
        Of the field.
    value
        From a caller, a file or a command line.
    where
        It comes from, for the message.

    Raises
    ------
    ConfigError
        With the flag, its value, and a value that would do.
    """
    if value is dataclasses.MISSING:
        return value
    try:
        return _adapters(kind)[name].validate_python(value)
    except ValidationError as error:
        wanted = _wanted(error.errors()[0])
    said = f"{where}--{_dashed(name)} must be {wanted}, got {_shown(value)}"
    example = _example(kind, name)
    raise ConfigError(said if example is None else f"{said}: {flag(name, example)}")


def flag(name: str, value: Any) -> str:
    """Return the words that give an option this value.

    Examples
    --------
    >>> flag("hidden", (64, 64)), flag("clip_value", False)
    ('--hidden 64 64', '--no-clip-value')
    """
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{_dashed(name)}"
    return f"--{_dashed(name)} {_shown(value)}"


def check_shards(num_envs: int, shards: int | None) -> None:
    """Raise unless every shard gets an environment.

    Raises
    ------
    ConfigError
        With numbers that would do.
    """
    if shards is not None and shards > num_envs:
        raise ConfigError(
            f"--shards {shards} leaves shards without an environment, of --num-envs {num_envs}: "
            f"--shards {num_envs}, or --num-envs {shards}"
        )


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _adapters(kind: Any) -> Mapping[str, TypeAdapter[Any]]:
    hints = _hints(kind)
    return {field.name: TypeAdapter(hints[field.name]) for field in dataclasses.fields(kind)}


def _wanted(error: ErrorDetails) -> str:
    if error["type"] in BOUNDS:
        return BOUNDS[error["type"]].format(**error["ctx"])
    return KINDS.get(error["type"].partition("_")[0], error["msg"])


def _example(kind: Any, name: str) -> Any:
    """Return a value that would do: the default, or one that the annotation names."""
    (field,) = (field for field in dataclasses.fields(kind) if field.name == name)
    if field.default is not dataclasses.MISSING and field.default not in (None, ()):
        return field.default
    return _named_example(_hints(kind)[name])


def _named_example(hint: Any) -> Any:
    for part in typing.get_args(hint):
        if isinstance(part, FieldInfo) and part.examples:
            return part.examples[0]
        if (found := _named_example(part)) is not None:
            return found
    return None


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _shown(value: Any) -> str:
    return " ".join(map(str, value if isinstance(value, (tuple, list)) else (value,)))
