"""A level of the sum tree that Numba compiles; only imported if Numba is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from clusterenv.store.samplers.sum_tree import FAN, Floats, Ints, Level

__all__ = ["CompiledLevel"]

_FAN = 16  # repeated here: Numba's cache depends on this file alone
assert _FAN == FAN


class CompiledLevel(Level):
    """Bit-identical to :class:`Level`, in a third of the time."""

    def descend(self, at: Ints, rest: Floats) -> None:
        _descend(at, rest, self.before)

    def add_up(self, at: Ints) -> None:
        _add_up(at, self.children, self.before, self.sums)

    def add_up_range(self, start: int, end: int) -> None:
        _add_up_range(start, end, self.children, self.before, self.sums)


def _compiled(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Compile a loop at import, and cache it on disk if possible."""

    def compiled(loop: Callable[..., None]) -> Any:
        try:
            return numba.njit(signature, cache=True)(loop)
        except Exception:  # the cache is not writable, or damaged
            return numba.njit(signature)(loop)

    return compiled


@_compiled("(i8[::1], f8[::1], f8[:, ::1])")
def _descend(at: Ints, rest: Floats, before: Floats) -> None:
    for i in range(len(at)):
        node = at[i]
        child = 0
        for k in range(1, _FAN):
            child += before[node, k] <= rest[i]
        rest[i] -= before[node, child]
        at[i] = node * _FAN + child


@_compiled("(i8[::1], f8[:, ::1], f8[:, ::1], f8[::1])")
def _add_up(at: Ints, children: Floats, before: Floats, sums: Floats) -> None:
    for node in at:
        running = 0.0
        for k in range(_FAN):
            before[node, k] = running
            running += children[node, k]
        sums[node] = running


@_compiled("(i8, i8, f8[:, ::1], f8[:, ::1], f8[::1])")
def _add_up_range(start: int, end: int, children: Floats, before: Floats, sums: Floats) -> None:
    for node in range(start, end):
        running = 0.0
        for k in range(_FAN):
            before[node, k] = running
            running += children[node, k]
        sums[node] = running
