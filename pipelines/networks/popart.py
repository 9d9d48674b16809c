"""A critic's last layer whose targets are normalised, without changing what it says."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["PopArt"]


class PopArt(nn.Module):
    """Running mean and deviation of value targets (van Hasselt et al., 2016).

    The critic gives normalised values. When the statistics move, its last layer is rescaled so
    that the values in the unit of the returns stay as they were.

    Parameters
    ----------
    layer
        The critic's last layer, of one output.
    step
        How far the statistics move with each update, from 0 to 1.

    Examples
    --------
    >>> popart = PopArt(nn.Linear(2, 1))
    >>> obs = torch.ones(1, 2)
    >>> before = popart.value(popart.layer(obs))
    >>> popart.update(torch.tensor([100.0, 300.0]))
    >>> torch.allclose(popart.value(popart.layer(obs)), before, rtol=1e-3)
    True
    """

    mean: Tensor
    square: Tensor

    def __init__(self, layer: nn.Linear, step: float = 0.01) -> None:
        super().__init__()
        self.layer, self.step = layer, step
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("square", torch.ones(()))

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of the targets, at least 0.0001."""
        return (self.square - self.mean.square()).clamp(min=1e-8).sqrt()

    def value(self, normalized: Tensor) -> Tensor:
        """Return values in the unit of the returns."""
        return normalized * self.deviation + self.mean

    def normalize(self, targets: Tensor) -> Tensor:
        """Return targets as the critic gives them."""
        return (targets - self.mean) / self.deviation

    @torch.no_grad()
    def update(self, targets: Tensor) -> None:
        """Move the statistics towards those of ``targets``, and rescale the layer."""
        mean, deviation = self.mean.clone(), self.deviation
        self.mean.lerp_(targets.mean(), self.step)
        self.square.lerp_(targets.square().mean(), self.step)
        self.layer.weight.mul_(deviation / self.deviation)
        self.layer.bias.mul_(deviation).add_(mean - self.mean).div_(self.deviation)
