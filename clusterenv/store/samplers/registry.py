"""The samplers of the library by name, to create them from a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterenv.errors import StoreDamaged, StoreUnreadable
from clusterenv.store.samplers.nstep import NStep
from clusterenv.store.samplers.prioritized import Prioritized
from clusterenv.store.samplers.recent import Recent
from clusterenv.store.samplers.sampler import Sampler, format_description
from clusterenv.store.samplers.sequences import Sequences
from clusterenv.store.samplers.uniform import Uniform

__all__ = ["create_sampler"]

_SAMPLERS = {kind.__name__: kind for kind in (Uniform, Prioritized, NStep, Sequences, Recent)}


def create_sampler(description: Mapping[str, Any], manifest: Path) -> Sampler:
    """Create the sampler that a manifest describes.

    Raises ``StoreUnreadable`` if it is not one of the library's samplers; ``StoreDamaged`` if its
    settings are invalid.
    """
    kind = _SAMPLERS.get(description["kind"])
    if kind is None:
        raise StoreUnreadable(
            f"{manifest} is of a store with a sampler {description['kind']!r} of your own; pass "
            f"it: ReplayStore.load(directory, sampler={description['kind']}(...))"
        )
    settings = dict(description["settings"])
    if description["base"] is not None:
        settings["base"] = create_sampler(description["base"], manifest)
    try:
        sampler: Sampler = kind(**settings)
    except (TypeError, ValueError) as error:
        raise StoreDamaged(
            f"{manifest} was not written by a store: its sampler is "
            f"{format_description(description)} with {settings}, but {error}"
        ) from error
    return sampler
