"""Whether a setting is a number at all, before it is compared with one."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["is_number", "is_whole"]


def is_number(value: Any) -> bool:
    """Whether a value is a real number that fits a float, NumPy's included; booleans are none.

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
    """Whether a value is an integer, NumPy's included; booleans are none.

    Examples
    --------
    >>> is_whole(8), is_whole(8.0)
    (True, False)
    """
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
