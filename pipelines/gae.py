"""Generalised advantage estimation over rollouts ``[time, env]``."""

from __future__ import annotations

import torch

__all__ = ["advantages", "next_values"]


def next_values(
    values: torch.Tensor, tail_rows: torch.Tensor, tail_values: torch.Tensor
) -> torch.Tensor:
    """Return the value of every row's true next observation.

    Parameters
    ----------
    values
        ``V(obs)`` of every row, ``[time, env]``.
    tail_rows
        Flat rows (``t * envs + e``) whose next observation is not the one a time row below.
        All rows of the last time step must be among them.
    tail_values
        ``V`` of the true next observations of these rows, ``[k]``.

    Returns
    -------
    torch.Tensor
        ``[time, env]``. A row of the last time step that ``tail_rows`` leaves out is NaN,
        so that a missing bootstrap shows.

    Examples
    --------
    >>> values = torch.tensor([[1.0], [2.0]])
    >>> next_values(values, torch.tensor([1]), torch.tensor([3.0])).tolist()
    [[2.0], [3.0]]
    """
    following = torch.full_like(values, torch.nan)
    following[:-1] = values[1:]
    following.view(-1)[tail_rows] = tail_values
    return following


def advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    gamma: float,
    lam: float,
) -> torch.Tensor:
    """Return the advantage of every row.

    ``delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t``, where ``V'_t`` is the value of the
    true next observation: a truncated episode would have gone on, so it bootstraps. The
    recursion ``A_t = delta_t + gamma lam A_{t+1}`` is cut where an episode ends either way.

    Parameters
    ----------
    rewards, values, next_values, terminated, truncated
        All ``[time, env]``; the last two boolean.
    gamma
        Discount per step.
    lam
        0 is the one-step temporal difference, 1 the whole return up to the last row.

    Returns
    -------
    torch.Tensor
        ``[time, env]``.

    Examples
    --------
    >>> no = torch.zeros(2, 1, dtype=torch.bool)
    >>> ones = torch.ones(2, 1)
    >>> advantages(ones, ones, ones, no, no, gamma=1.0, lam=1.0).tolist()
    [[2.0], [1.0]]
    """
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    carry = gamma * lam * (~(terminated | truncated)).to(deltas.dtype)
    result = torch.empty_like(deltas)
    last = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        last = deltas[t] + carry[t] * last
        result[t] = last
    return result
