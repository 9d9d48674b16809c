"""Target networks, which follow the network that learns."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["follow"]


@torch.no_grad()
def follow(target: nn.Module, module: nn.Module, step: float) -> None:
    """Move a target network's parameters by this part of the way to a module's.

    Examples
    --------
    >>> ours, theirs = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> follow(ours, theirs, 1.0)
    >>> torch.equal(ours.weight, theirs.weight)
    True
    """
    for target_parameter, parameter in zip(target.parameters(), module.parameters(), strict=True):
        target_parameter.lerp_(parameter, step)
