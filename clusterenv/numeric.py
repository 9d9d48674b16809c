"""Whether a setting is a number at all, before it is compared with one."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

__all__ = ["is_number", "is_whole"]


def is_number(value: Any) -> bool:
    """Whether a value is a real number, NumPy's included; booleans are none.

    Examples
    --------
    >>> is_number(0.6), is_number("0.6"), is_number(True)
    (True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, NumPy's included; booleans are none.

    Examples
    --------
    >>> is_whole(8), is_whole(8.0)
    (True, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)
