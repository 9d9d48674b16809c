"""Checks of arguments; an error names the value and shows a call that is right."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from clusterenv.errors import ArgumentTypeError, ConfigError, shown

__all__ = [
    "check_choice",
    "check_flag",
    "check_instance",
    "check_names",
    "check_number",
    "check_path",
    "check_whole",
    "is_number",
    "is_whole",
    "items_of",
]


def items_of(value: Any) -> list[Any] | None:
    """Return the items of an iterable, or ``None`` if it is a string or cannot be iterated over."""
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        return None
    try:
        return list(value)
    except Exception:  # an array without a dimension, or an iterator that raises
        return None


def check_whole(
    name: str, value: Any, right: str, *, least: int = 0, most: int = 2**63 - 1, why: str = ""
) -> int:
    """Return an integer, or raise ``ConfigError``.

    Both bounds are included. The error shows ``right``, a call that is right, and ``why`` there
    are bounds.

    Examples
    --------
    >>> check_whole("horizon", 8, "horizon=128", least=1)
    8
    """
    if is_whole(value) and least <= value <= most:
        return int(value)
    bound = f" and at most {most:,}" if most < 2**63 - 1 else ""
    reason = f" ({why})" if why else ""
    raise ConfigError(
        f"{name} must be an integer, at least {least:,}{bound}{reason}, got {shown(value)}: {right}"
    )


def check_number(
    name: str,
    value: Any,
    right: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Return a number, or raise ``ConfigError``; of the bounds, only ``above`` is not included.

    Examples
    --------
    >>> check_number("seconds", 600, "Restarts(5, seconds=600)", above=0)
    600.0
    """
    if is_number(value) and value > above and least <= value <= most:
        return float(value)
    bounds = {"above": above, "at least": least, "at most": most}
    said = " and ".join(
        f"{what} {bound:g}" for what, bound in bounds.items() if abs(bound) < math.inf
    )
    raise ConfigError(
        f"{name} must be a number{f', {said}' if said else ''}, got {shown(value)}: {right}"
    )


def check_flag(name: str, value: Any, right: str) -> bool:
    """Return a boolean, or raise ``ConfigError``."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, got {shown(value)}: {right}")


def check_choice(name: str, value: Any, choices: Sequence[str], right: str) -> str:
    """Return a value that is one of ``choices``, or raise ``ConfigError``."""
    if isinstance(value, str) and value in choices:
        return value
    known = ", ".join(map(repr, choices))
    raise ConfigError(f"{name}={shown(value)} is unknown; one of {known}: {right}")


def check_names(name: str, value: Any, right: str) -> tuple[str, ...]:
    """Return a sequence of names as a tuple, or raise ``ConfigError``, also for a single string."""
    names = items_of(value)
    if names is not None and all(isinstance(each, str) for each in names):
        return tuple(names)
    raise ConfigError(f"{name} must be a list of names, got {shown(value)}: {right}")


def check_path(name: str, value: Any, right: str) -> Path:
    """Return a path, which need not exist, or raise ``ConfigError``."""
    fault = "neither a string nor a path"
    if isinstance(value, (str, os.PathLike)):
        try:
            path = Path(value)
            path.lstat()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                fault = "too long"
            else:  # raised again where the path is used, if it matters there
                return path
        except (TypeError, ValueError) as error:
            fault = str(error)
        else:
            if value != "":
                return path
            fault = "empty"
    raise ConfigError(f"{name}={shown(value)} is no path ({fault}): {right}")


def check_instance(name: str, value: Any, kind: type, right: str) -> None:
    """Raise ``ArgumentTypeError`` unless a value is of a type."""
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} must be a {kind.__name__}, got {shown(value)}: {right}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number that fits a float, NumPy's included, and no boolean.

    Examples
    --------
    >>> is_number(0.6), is_number("0.6"), is_number(True), is_number(10**400)
    (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, NumPy's included, and no boolean.

    Examples
    --------
    >>> is_whole(8), is_whole(8.0)
    (True, False)
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
