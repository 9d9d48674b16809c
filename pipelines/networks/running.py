"""Running statistics as module buffers, so that they are sent and saved with the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clusterenv.returns import discounted_sums

__all__ = ["RewardScaler", "RunningStats", "explained_variance"]


@torch.no_grad()
def explained_variance(values: Tensor, targets: Tensor) -> Tensor:
    """Return the share of the targets' variance that values explain: ``1 - var(t - v) / var(t)``.

    1 is perfect, 0 no better than a constant; 0 too if all targets are the same.

    Examples
    --------
    >>> targets = torch.tensor([1.0, 2.0, 3.0])
    >>> [explained_variance(values, targets).item() for values in (targets + 5, torch.zeros(3))]
    [1.0, 0.0]
    """
    parts = torch.stack([(targets - values).flatten(), targets.flatten()])
    left, whole = parts.var(1, correction=0)
    return torch.where(whole > 0, 1 - left / whole, 0.0)


class RunningStats(nn.Module):
    """Running mean and variance, as buffers.

    Parameters
    ----------
    shape
        Of one value.

    Examples
    --------
    >>> stats = RunningStats((1,))
    >>> stats.update(torch.tensor([[1.0], [3.0]]))
    >>> stats(torch.tensor([[2.0]])).tolist()
    [[0.0]]
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        """Take in ``values``, ``[n, *shape]``."""
        values = values.to(torch.float64)
        n, seen = len(values), float(self.count)
        var, mean = torch.var_mean(values, dim=0, correction=0)
        share = n / (seen + n)
        shift = mean - self.mean
        # Chan et al.: the variance of a union is the mean variance plus that between the parts.
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * shift**2)
        self.mean.add_(share * shift)
        self.count.add_(n)

    def forward(self, values: Tensor) -> Tensor:
        """Return ``values`` with the mean taken off, in standard deviations, at most 10."""
        return ((values - self.mean) / torch.sqrt(self.var + 1e-8)).clamp(-10, 10)


class RewardScaler(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return.

    Parameters
    ----------
    num_envs
        Environments whose rewards come, by global index.
    gamma
        Discount per step.
    """

    of_envs = ("returns", "following")
    """Buffers of a run's environments, which other runs do not take with the weights."""
    returns: Tensor
    following: Tensor

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.stats = RunningStats(())
        self.register_buffer("returns", torch.zeros(num_envs))
        self.register_buffer("following", torch.zeros(num_envs, dtype=torch.int64))

    @torch.no_grad()
    def forward(self, rewards: Tensor, env: Tensor, step: Tensor) -> Tensor:
        """Take in the rewards of a rollout and return them scaled.

        Parameters
        ----------
        rewards
            ``[time, env]``.
        env
            The global index of every row's environment, ``[time, env]``.
        step
            The step in its episode of every row, ``[time, env]``; 0 begins a new return, and so
            does a first row before which steps are missing.
        """
        envs = env[0].long()
        before = self.returns[envs].where(step[0] == self.following[envs], 0.0)
        # Over the rows backwards, the sum of what came before: R_t = r_t + gamma R_{t-1}.
        gains = torch.cat([before.unsqueeze(0), rewards]).flip(0)
        begins = torch.cat([torch.ones_like(step[:1]), step]).flip(0) == 0
        discounts = torch.full_like(gains, self.gamma).masked_fill(begins, 0.0)
        returns = discounted_sums(gains, discounts).flip(0)[1:]
        self.returns[envs] = returns[-1]
        self.following[envs] = step[-1].long() + 1
        self.stats.update(returns.flatten())
        return rewards / torch.sqrt(self.stats.var + 1e-8)
