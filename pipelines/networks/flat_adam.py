"""Adam on all parameters of a network at once."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["FlatAdam"]


class FlatAdam(torch.optim.Adam):
    """Adam whose only parameter is a vector; the network's parameters become views into it.

    Small networks spend their time on calls, one for each parameter. Here one call clips the
    gradient and one makes the step.

    Parameters
    ----------
    module
        The network. Its parameters must all have one dtype.
    lr
        Learning rate.
    eps
        Added to the denominator.

    Examples
    --------
    >>> net = nn.Linear(2, 1)
    >>> optimizer = FlatAdam(net, lr=0.1)
    >>> optimizer.vector.shape, optimizer.descend(net(torch.ones(1, 2)).sum(), max_norm=1.0)
    (torch.Size([3]), tensor(1.7321))
    """

    def __init__(self, module: nn.Module, lr: float, eps: float = 1e-5) -> None:
        parameters = list(module.parameters())
        self.vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
        self.vector.grad = self.gradient = torch.zeros_like(self.vector)
        start = 0
        for parameter in parameters:
            part = slice(start, start + parameter.numel())
            parameter.data = self.vector.data[part].view_as(parameter)
            parameter.grad = self.gradient[part].view_as(parameter)
            start = part.stop
        super().__init__([self.vector], lr, eps=eps, fused=True)

    def descend(self, loss: Tensor, max_norm: float) -> Tensor:
        """Make a step down a loss, its gradient clipped to a norm; return the norm before."""
        self.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        norm: Tensor = self.gradient.norm()
        if max_norm < math.inf:
            self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.step()
        return norm
