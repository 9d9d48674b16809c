"""The arguments of a ``Collector`` that only the head needs, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from clusterenv import config
from clusterenv.data.checks import check_choice, check_whole
from clusterenv.errors import ConfigError, shown
from clusterenv.head.fleet.launch import check_shards
from clusterenv.head.fleet.restarts import Restarts
from clusterenv.sync.rules import SyncRule

__all__ = ["CollectorOptions", "InferenceOptions"]

_MOST_CREDITS = 1024


@dataclass(frozen=True)
class CollectorOptions:
    """The arguments of a ``Collector`` that only the head needs."""

    shards: int | None
    """At the start; ``None`` for one on each worker."""
    max_shards: int | None
    """If workers join; ``None`` for as many as at the start."""
    credits: int
    """Fragments that each shard may be ahead of the reader."""
    restarts: Restarts

    def __post_init__(self) -> None:
        why = "with one a shard waits for the head; each is a fragment in the head's memory"
        check_whole("credits", self.credits, "credits=2", least=2, most=_MOST_CREDITS, why=why)
        if self.max_shards is None:
            return
        least = self.shards or 1
        check_shards("max_shards", self.max_shards, f"max_shards={2 * least}")
        if self.max_shards < least:
            raise ConfigError(
                f"max_shards must be at least shards={least}, got {self.max_shards}: "
                f"max_shards={2 * least}"
            )


@dataclass(frozen=True)
class InferenceOptions:
    """How a policy is evaluated at the head; raises ``ConfigError`` if it cannot be."""

    device: torch.device
    rows: int
    """Of a batch, at most."""
    wait: float
    """Seconds that a request waits for others, at most."""

    @classmethod
    def of(
        cls, inference: str, device: Any, sync: SyncRule | None, overlap: bool
    ) -> InferenceOptions | None:
        """Return the options of ``Collector(inference=…)``; ``None`` for inference by workers."""
        right = "inference='head' evaluates the policy at the head, inference='worker' on workers"
        check_choice("inference", inference, ("worker", "head"), right)
        if inference == "worker":
            if device is not None:
                raise ConfigError(
                    f"device={shown(device)} is where the head evaluates the policy; workers use "
                    f"their CPU: Collector(…, inference='head', device={shown(device)})"
                )
            return None
        if sync is not None:
            raise ConfigError(
                f"sync={shown(sync)} decides when workers pull weights; with inference='head' they "
                "have none, and the newest version acts in every step: leave sync out"
            )
        if overlap:
            raise ConfigError(
                "overlap=True promises rollouts exactly one version old; with inference='head' the "
                "newest version acts in every step. Use one of the two: "
                "Collector(…, inference='head') and iterate, or Collector(…, overlap=True)"
            )
        return cls(
            _device(device), config.count("inference.rows"), config.positive("inference.wait")
        )


def _device(given: Any) -> torch.device:
    try:
        device = torch.device("cpu" if given is None else given)
        torch.zeros(1, device=device)
    except Exception as error:
        raise ConfigError(
            f"device={shown(given)} is not there: {str(error).splitlines()[0]}. "
            "Collector(…, inference='head', device='cpu')"
        ) from error
    return device
