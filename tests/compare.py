"""Equality to the last bit, of values, dtypes and types."""

from __future__ import annotations

from typing import Any

import numpy as np


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Fail, with the place, where two results differ in anything."""
    if isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), f"{path}: {type(ours)} is not an array"
        assert ours.dtype == theirs.dtype, f"{path}: {ours.dtype} is not {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{path}: {ours.shape} is not {theirs.shape}"
        if theirs.dtype == object:
            for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert_same(a, b, f"{path}[{index}]")
        else:
            assert ours.tobytes() == theirs.tobytes(), f"{path}: {ours} is not {theirs}"
    elif isinstance(theirs, dict):
        assert isinstance(ours, dict), f"{path}: {type(ours)} is not a dictionary"
        assert set(ours) == set(theirs), f"{path}: keys {set(ours) ^ set(theirs)}"
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{path}.{key}")
    elif isinstance(theirs, tuple):
        assert isinstance(ours, tuple), f"{path}: {type(ours)} is not a tuple"
        assert len(ours) == len(theirs), path
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert type(ours) is type(theirs), f"{path}: {type(ours)} is not {type(theirs)}"
        assert ours == theirs, f"{path}: {ours} is not {theirs}"
