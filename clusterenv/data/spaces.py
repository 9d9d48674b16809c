"""Converts between values of Gymnasium spaces and flat columns.

A space is a tree whose leaves have a dtype and a shape. A batch of ``n`` values is stored as one
column of ``n`` rows per leaf, so that the code that writes, sends and receives batches does not
depend on the tree. Spaces without an array form (``Text``, ``Graph``, ``Sequence``, …) become
columns of objects.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

__all__ = ["Array", "Column", "Layout", "Leaf"]

Array: TypeAlias = Any
"""A contiguous NumPy array, used as a buffer, for which there is no type before Python 3.12."""
Column = npt.NDArray[Any]
"""The rows of one leaf; dtype ``object`` where the leaf has no array form."""

_ARRAYS = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
# Kinds of dtype that are accepted for a leaf of this kind: never a float for an integer.
_ACCEPTS = {"f": "biuf", "i": "biu", "u": "biu", "b": "b"}


@dataclass(frozen=True)
class Leaf:
    """One array, or one object, of every value of a space."""

    path: tuple[str | int, ...]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_text: bool = False
    """Whether its values are strings: a ``Text`` space, or another whose dtype is ``str``."""

    @property
    def is_array(self) -> bool:
        """Whether the leaf's values are arrays of one dtype and shape."""
        return self.dtype != object

    @property
    def nbytes(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize * math.prod(self.shape)

    def name(self, root: str) -> str:
        """Return the leaf's column name below ``root``, such as ``obs.camera.0``."""
        return ".".join([root, *map(str, self.path)])


class Layout:
    """The columns of a space.

    Examples
    --------
    >>> space = spaces.Dict(pixels=spaces.Box(0, 255, (2, 2), np.uint8), lives=spaces.Discrete(3))
    >>> layout = Layout(space)
    >>> [leaf.name("obs") for leaf in layout.leaves]
    ['obs.pixels', 'obs.lives']
    >>> columns = layout.empty(5)
    >>> layout.write(columns, 0, {"pixels": np.ones((2, 2), np.uint8), "lives": 2})
    >>> layout.nest(columns)["pixels"].shape
    (5, 2, 2)
    """

    def __init__(self, space: Space[Any]) -> None:
        self.space = space
        self._is_array = isinstance(space, _ARRAYS)
        self.leaves: tuple[Leaf, ...] = tuple(_leaves(space, ()))
        self.objects = tuple(k for k, leaf in enumerate(self.leaves) if not leaf.is_array)
        self.arrays = tuple(k for k, leaf in enumerate(self.leaves) if leaf.is_array)
        self.dtypes = [self.leaves[k].dtype for k in self.arrays]
        self.nbytes = sum(self.leaves[k].nbytes for k in self.arrays)
        """Bytes of a row's arrays."""
        self._arrays_only = _arrays_only(space) if self.objects else space
        self.write: Callable[[Sequence[Column], int, Any], None] = _writer(space, self.leaves)

    def empty(self, n: int) -> list[Column]:
        """Allocate columns of ``n`` rows; their content is arbitrary until written."""
        return [np.empty((n, *leaf.shape), leaf.dtype) for leaf in self.leaves]

    def nest(self, columns: Sequence[Any]) -> Any:
        """Nest columns, of arrays or tensors, as Gymnasium batches this space."""
        return columns[0] if self._is_array else _nest(self.space, iter(columns))

    def nest_arrays(self, arrays: Sequence[Any]) -> Any:
        """Nest the columns of the array leaves, and omit all other leaves."""
        return arrays[0] if self._is_array else _nest(self._arrays_only, iter(arrays))

    def rows(self, columns: Sequence[Iterable[Any]]) -> Iterable[Any]:
        """Iterate over the single values that the columns hold."""
        return columns[0] if self._is_array else _rows(self.space, iter(columns))

    def value(self, items: Iterable[Any]) -> Any:
        """Nest one item of each leaf as a single value of the space."""
        (value,) = self.rows([[item] for item in items])
        return value

    def columns(self, batch: Any, n: int, what: str = "actions") -> list[Column]:
        """Split a batch of ``n`` values into contiguous columns.

        The dtype of the batch is kept, as by Gymnasium's own vector environments. Raise
        ``ValueError`` if the number or the shape does not fit, and ``TypeError`` if it is no
        batch, or the kind of dtype does not fit.
        """
        columns = [batch] if self._is_array else list(_flatten(self.space, batch, what))
        return [
            _checked(column, leaf, n, leaf.name(what))
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]


def _leaves(space: Space[Any], path: tuple[str | int, ...]) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from _leaves(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for position, child in enumerate(space.spaces):
            yield from _leaves(child, (*path, position))
    elif isinstance(space, _ARRAYS):
        yield Leaf(path, np.dtype(space.dtype), tuple(space.shape or ()))
    else:
        text = space.dtype is not None and space.dtype.kind == "U"
        yield Leaf(path, np.dtype(object), (), is_text=text)


def _arrays_only(space: Space[Any]) -> Space[Any]:
    """Return a Dict or Tuple space without its leaves that have no array form."""
    nestable = (*_ARRAYS, spaces.Dict, spaces.Tuple)
    if isinstance(space, spaces.Dict):
        children = space.spaces.items()
        return spaces.Dict(
            OrderedDict((k, _arrays_only(c)) for k, c in children if isinstance(c, nestable))
        )
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_arrays_only(c) for c in space.spaces if isinstance(c, nestable)])
    return space


def _writer(
    space: Space[Any], leaves: Sequence[Leaf]
) -> Callable[[Sequence[Column], int, Any], None]:
    if isinstance(space, _ARRAYS):
        (leaf,) = leaves
        dtype, shape = leaf.dtype, leaf.shape

        def write_array(columns: Sequence[Column], row: int, value: Any) -> None:
            if getattr(value, "dtype", None) is not dtype or value.shape != shape:
                _check_value(leaf, value)
            columns[0][row] = value

        return write_array

    def write_tree(columns: Sequence[Column], row: int, value: Any) -> None:
        for leaf, column in zip(leaves, columns, strict=True):
            item = value
            for key in leaf.path:
                item = item[key]
            if leaf.is_array:
                _check_value(leaf, item)
            column[row] = item

    return write_tree


def _check_value(leaf: Leaf, value: Any) -> None:
    """Raise for a value that NumPy would silently broadcast over the row, or cast unsafely."""
    array = np.asarray(value)
    if array.shape != leaf.shape:
        raise ValueError(
            f"{leaf.name('observation')} has shape {array.shape}, "
            f"but the observation space says {leaf.shape}"
        )
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise ValueError(
            f"{leaf.name('observation')} is of dtype {array.dtype}, "
            f"but the observation space says {leaf.dtype}"
        )


def _nest(space: Space[Any], columns: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nest(child, columns) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, columns) for child in space.spaces)
    column = next(columns)
    return column if isinstance(space, _ARRAYS) else tuple(column)


def _rows(space: Space[Any], columns: Iterator[Iterable[Any]]) -> Iterable[Any]:
    if isinstance(space, spaces.Dict):
        keys = tuple(space.spaces)
        parts = [_rows(child, columns) for child in space.spaces.values()]
        return (dict(zip(keys, row, strict=True)) for row in zip(*parts, strict=True))
    if isinstance(space, spaces.Tuple):
        return zip(*[_rows(child, columns) for child in space.spaces], strict=True)
    return next(columns)


def _flatten(space: Space[Any], batch: Any, name: str) -> Iterator[Any]:
    if isinstance(space, spaces.Dict):
        keys = list(space.spaces)
        if not isinstance(batch, Mapping) or set(batch) != set(keys):
            known = isinstance(batch, Mapping)
            got = sorted(map(str, batch)) if known else type(batch).__name__
            raise (ValueError if known else TypeError)(
                f"{name} must be a dictionary with the keys {keys}, got {got}"
            )
        for key, child in space.spaces.items():
            yield from _flatten(child, batch[key], f"{name}.{key}")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(batch, Sequence) or len(batch) != len(space.spaces):
            known = isinstance(batch, Sequence)
            given = len(batch) if known else type(batch).__name__
            raise (ValueError if known else TypeError)(
                f"{name} must be a tuple of {len(space.spaces)} batches, got {given}"
            )
        for position, child in enumerate(space.spaces):
            yield from _flatten(child, batch[position], f"{name}.{position}")
    else:
        yield batch


def _checked(batch: Any, leaf: Leaf, n: int, name: str) -> Column:
    if not leaf.is_array:
        items = list(batch)
        if len(items) != n:
            raise ValueError(f"{name} must hold {n} values, one per environment, got {len(items)}")
        column = np.empty(n, object)
        column[:] = items
        return column
    try:
        array = np.asarray(batch)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged nesting; torch's own dtypes
        raise ValueError(f"{name} is not a regular array: {error}") from error
    expected = (n, *leaf.shape)
    if array.shape != expected:
        kind = ValueError if array.shape else TypeError  # a single number is no batch
        raise kind(
            f"{name} must have shape {expected} (one row per environment), got {array.shape}"
        )
    if array.dtype.kind not in _ACCEPTS[leaf.dtype.kind]:
        raise TypeError(f"{name} must be of dtype {leaf.dtype}, got {array.dtype}")
    return np.ascontiguousarray(array)
