"""Which rows a learner gets, and in what form.

A sampler is told of every block of rows, draws row numbers, and gathers what a learner needs of
these rows. Anything with the methods of :class:`Sampler` is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterenv.errors import StoreDamaged, StoreUnreadable
from clusterenv.store.samplers.base import Draw, Sampler, check_sampler
from clusterenv.store.samplers.nstep import NStep
from clusterenv.store.samplers.recent import Recent
from clusterenv.store.samplers.rows import Prioritized, Uniform
from clusterenv.store.samplers.sequences import Sequences

__all__ = [
    "Draw",
    "NStep",
    "Prioritized",
    "Recent",
    "Sampler",
    "Sequences",
    "Uniform",
    "alike",
    "check_sampler",
    "described",
    "from_description",
    "shown",
]

_KNOWN = {kind.__name__: kind for kind in (Uniform, Prioritized, NStep, Sequences, Recent)}


def described(sampler: Sampler) -> dict[str, Any]:
    """Return the sampler's kind and arguments, as JSON can hold them."""
    settings = dict(sampler.settings())
    base = getattr(sampler, "base", None)
    return {
        "kind": type(sampler).__name__,
        "settings": settings,
        "base": None if base is None else described(base),
    }


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a sampler can go on from the state of another, by what was :func:`described`."""
    bases = one["base"], other["base"]
    if one["kind"] != other["kind"] or (bases[0] is None) != (bases[1] is None):
        return False
    return bases[0] is None or alike(*bases)


def shown(description: Mapping[str, Any]) -> str:
    """Return a sampler that was :func:`described` as people write it."""
    base = "" if description["base"] is None else f", base={shown(description['base'])}"
    return f"{description['kind']}(...{base})"


def from_description(description: Mapping[str, Any], manifest: Path) -> Sampler:
    """Make the sampler that was :func:`described` in a manifest.

    Raises
    ------
    StoreUnreadable
        If it is not one of ours.
    StoreDamaged
        If it cannot have these settings.
    """
    kind = _KNOWN.get(description["kind"])
    if kind is None:
        raise StoreUnreadable(
            f"{manifest} is of a store with a sampler {description['kind']!r} of your own; pass "
            f"it: ReplayStore.load(directory, sampler={description['kind']}(...))"
        )
    settings = dict(description["settings"])
    if description["base"] is not None:
        settings["base"] = from_description(description["base"], manifest)
    try:
        sampler: Sampler = kind(**settings)
    except (TypeError, ValueError) as error:
        raise StoreDamaged(
            f"{manifest} was not written by a store: its sampler is {shown(description)} with "
            f"{settings}, but {error}"
        ) from error
    return sampler
