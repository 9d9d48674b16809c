"""Valid ranges of options; errors show a valid value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterenv.errors import ConfigError

__all__ = [
    "BOUND",
    "COUNT",
    "FINITE",
    "INSIDE",
    "LIMIT",
    "NOT_NEGATIVE",
    "POSITIVE",
    "SHARE",
    "STEP",
    "Range",
    "check",
    "check_shards",
]


@dataclass(frozen=True)
class Range:
    """Numbers that an option may be; NaN is in none."""

    said: str
    """In words, after "must be"."""
    holds: Callable[[float], bool]
    example: float
    """Shown where an option has no default."""


COUNT = Range("1 or more", lambda number: 1 <= number < math.inf, 4)
NOT_NEGATIVE = Range("0 or more", lambda number: 0 <= number < math.inf, 1)
POSITIVE = Range("above 0", lambda number: 0 < number < math.inf, 1)
# What only limits something may be infinite: then there is no limit.
BOUND = Range("above 0", lambda number: number > 0, 1)
LIMIT = Range("0 or more", lambda number: number >= 0, 1)
SHARE = Range("from 0 to 1", lambda number: 0 <= number <= 1, 0.5)
STEP = Range("above 0, and 1 or less", lambda number: 0 < number <= 1, 0.5)
INSIDE = Range("between 0 and 1", lambda number: 0 < number < 1, 0.5)
FINITE = Range("a finite number", math.isfinite, 100)


def check(args: Any, allowed: Range, *names: str) -> None:
    """Raise unless these options are in a range.

    Parameters
    ----------
    args
        A dataclass of options; its defaults are what a message shows.
    allowed
        The range.
    *names
        Options that are a number, several, or ``None``, which is always allowed.

    Raises
    ------
    ConfigError
        With the flag, its value, and a value that would do.

    Examples
    --------
    >>> @dataclass
    ... class Args:
    ...     lr: float = 0.001
    >>> check(Args(lr=-1), POSITIVE, "lr")
    Traceback (most recent call last):
        ...
    clusterenv.errors.ConfigError: --lr must be above 0, got -1: --lr 0.001
    """
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in names:
        value = getattr(args, name)
        if all(number is None or allowed.holds(number) for number in _several(value)):
            continue
        example = defaults[name]
        if not isinstance(example, (int, float, tuple)):
            example = allowed.example
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} must be {allowed.said}, got {_said(value)}: {flag} {_said(example)}"
        )


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


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _said(value: Any) -> str:
    return " ".join(map(str, _several(value)))
