"""Value targets of learners: pure functions on tensors ``[time, env]``.

Termination and truncation are kept apart. An episode that terminated is over, and nothing comes
after it; one that was truncated would have gone on, so its last step bootstraps from the value of
the true final observation. Nothing here has a gradient: targets are constants to a loss.

Examples
--------
With a rollout of a :class:`clusterenv.RolloutStore`, and a critic ``value(obs)``::

    values = value(rollout["obs"])
    following = next_values(values, rollout.tail_rows, value(rollout.tail["obs"]))
    ends = rollout["terminated"], rollout["truncated"]
    advantages = gae(rollout["reward"], values, following, *ends, gamma=0.99, lam=0.95)
    targets = advantages + values
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "VTrace",
    "discounted_sums",
    "gae",
    "inverse_rescale",
    "n_step_returns",
    "next_values",
    "rescale",
    "sequence_priorities",
    "vtrace",
]


@torch.no_grad()
def next_values(values: Tensor, tail_rows: Tensor, tail_values: Tensor) -> Tensor:
    """Return the value of every row's true next observation.

    That is the value one time row below, except for the rows that have a tail: where an episode
    ended, the row below is of the next one, and below the last time row there is none.

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
    Tensor
        ``[time, env]``. A row of the last time step that ``tail_rows`` leaves out is NaN,
        so that a missing bootstrap shows.

    Raises
    ------
    ValueError
        If the shapes do not fit.

    Examples
    --------
    >>> values = torch.tensor([[1.0], [2.0]])
    >>> next_values(values, torch.tensor([1]), torch.tensor([3.0])).tolist()
    [[2.0], [3.0]]
    """
    if values.ndim != 2:
        raise ValueError(
            f"values must be [time, env], got {_shape(values)}: critic(obs).squeeze(-1)"
        )
    if tail_values.shape != tail_rows.shape or tail_rows.ndim != 1:
        raise ValueError(
            f"tail_values must be [k], one for each of tail_rows, which are {_shape(tail_rows)}; "
            f"got {_shape(tail_values)}: critic(tail_obs).squeeze(-1)"
        )
    following = torch.full_like(values, torch.nan, memory_format=torch.contiguous_format)
    following[:-1] = values[1:]
    following.view(-1)[tail_rows] = tail_values
    return following


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return the advantage of every row by generalised advantage estimation.

    With ``V'_t``, the value of the true next observation::

        delta_t = r_t + gamma (1 - terminated_t) V'_t - V_t
        A_t     = delta_t + gamma lam (1 - terminated_t) (1 - truncated_t) A_{t+1}

    A truncated episode bootstraps and a terminated one does not, and no advantage reaches over an
    end of either kind. The critic's targets are ``A_t + V_t``.

    Parameters
    ----------
    rewards, values
        Of every row, ``[time, env]``.
    next_values
        Of every row's true next observation, ``[time, env]``: :func:`next_values`. Those of
        terminated rows are not used.
    terminated, truncated
        How an episode ended with a row, if it did, ``[time, env]``, boolean.
    gamma
        Discount per step.
    lam
        0 is the one-step temporal difference, 1 the whole return up to the last row.

    Returns
    -------
    Tensor
        ``[time, env]``.

    Raises
    ------
    ValueError
        If not all are ``[time, env]``, or the flags are not boolean.

    Examples
    --------
    >>> no = torch.zeros(2, 1, dtype=torch.bool)
    >>> ones = torch.ones(2, 1)
    >>> gae(ones, ones, ones, no, no, gamma=1.0, lam=1.0).tolist()
    [[2.0], [1.0]]

    The last step of an episode that was truncated there, and of one that terminated:

    >>> yes = torch.ones(1, 1, dtype=torch.bool)
    >>> reward, value, final = torch.tensor([[[1.0]], [[4.0]], [[8.0]]])
    >>> gae(reward, value, final, ~yes, yes, gamma=0.5, lam=1.0).item()
    1.0
    >>> gae(reward, value, final, yes, ~yes, gamma=0.5, lam=1.0).item()
    -3.0
    """
    floats = {"rewards": rewards, "values": values, "next_values": next_values}
    _check_alike(floats, {"terminated": terminated, "truncated": truncated})
    deltas = rewards + gamma * next_values.masked_fill(terminated, 0.0) - values
    carry = gamma * lam * (~(terminated | truncated)).to(deltas.dtype)
    return discounted_sums(deltas, carry)


class VTrace(NamedTuple):
    """What :func:`vtrace` returns, ``[time, env]`` each."""

    targets: Tensor
    """``vs``, what the critic should say of every row's observation."""
    advantages: Tensor
    """Of the policy gradient; the importance weight of the row's own action is in it."""


@torch.no_grad()
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    lam: float = 1.0,
    rho_bar: float | None = 1.0,
    rho_pg: float | None = 1.0,
    mask: Tensor | None = None,
) -> VTrace:
    """Return value targets and advantages of rows that another policy acted (IMPALA).

    With ``w_t = exp(log_ratio_t)``, ``g_t = gamma (1 - terminated_t)`` and ``V'_t``, the value of
    the true next observation::

        rho_t   = min(rho_bar, w_t),  c_t = lam min(1, w_t)
        delta_t = rho_t (r_t + g_t V'_t - V_t)
        vs_t    = V_t + delta_t + g_t c_t (1 - truncated_t) (vs_{t+1} - V_{t+1})
        A_t     = min(rho_pg, w_t) (r_t + g_t q_{t+1} - V_t)

    ``q_{t+1}`` is ``lam vs_{t+1} + (1 - lam) V_{t+1}``, and ``V'_t`` at the end of an episode and
    in the last row. On rows that the policy acted itself, ``vs`` with ``lam=1`` is the n-step
    return.

    Parameters
    ----------
    log_ratios
        Log-probability of every action by the policy that is judged, minus that by the policy
        that acted, ``[time, env]``.
    rewards, values, next_values, terminated, truncated
        As for :func:`gae`.
    gamma
        Discount per step; or of every row, ``[time, env]``.
    lam
        How far later rows count.
    rho_bar, rho_pg
        Upper bounds of the importance weights, of the targets and of the advantages; ``None`` is
        no bound.
    mask
        Which rows count, ``[time, env]``, boolean. The others keep their value as their target,
        have no advantage, and no target reaches over them. The next value of a row before a masked
        one counts.

    Raises
    ------
    ValueError
        If not all are ``[time, env]``, the flags are not boolean, or a bound is not positive.

    Examples
    --------
    >>> no, ones = torch.zeros(2, 1, dtype=torch.bool), torch.ones(2, 1)
    >>> same = torch.zeros(2, 1)
    >>> vtrace(same, ones, ones, ones, no, no, gamma=1.0).targets.tolist()
    [[3.0], [2.0]]
    """
    floats = {"rewards": rewards, "log_ratios": log_ratios, "values": values}
    flags = {"terminated": terminated, "truncated": truncated}
    if isinstance(gamma, Tensor):
        floats["gamma"] = gamma
    if mask is not None:
        flags["mask"] = mask
    _check_alike({**floats, "next_values": next_values}, flags)
    for name, bound in (("rho_bar", rho_bar), ("rho_pg", rho_pg)):
        if bound is not None and not bound > 0:
            raise ValueError(f"{name} must be above 0, or None for no bound, got {bound}")
    weights = log_ratios.exp()
    if mask is not None:
        weights = weights.where(mask, 0.0)
    bootstrap = (gamma * next_values).masked_fill(terminated, 0.0)
    deltas = _clipped(weights, rho_bar) * (rewards + bootstrap - values)
    if mask is not None:  # what a masked row holds may be NaN
        deltas = deltas.where(mask, 0.0)
    goes_on = ~(terminated | truncated)
    carry = gamma * goes_on * lam * weights.clamp(max=1.0)
    excess = discounted_sums(deltas, carry)  # vs - V
    beyond = torch.zeros_like(excess)
    beyond[:-1] = lam * excess[1:] * goes_on[:-1]
    q = (gamma * (next_values + beyond)).masked_fill(terminated, 0.0)
    advantages = _clipped(weights, rho_pg) * (rewards + q - values)
    if mask is not None:
        advantages = advantages.where(mask, 0.0)
    return VTrace(values + excess, advantages)


@torch.no_grad()
def n_step_returns(
    rewards: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    gamma: float | Tensor,
    n: int,
) -> Tensor:
    """Return the discounted sum of up to ``n`` rewards of every row, and what follows them.

    With ``m <= n`` rows from row ``t`` on, and ``V'``, the value of the true next observation::

        R_t = r_t + gamma r_{t+1} + … + gamma^m (1 - terminated_{t+m-1}) V'_{t+m-1}

    ``m`` is less than ``n`` where an episode ends, in either way, and in the last ``n - 1`` rows.

    Parameters
    ----------
    rewards, next_values, terminated, truncated
        As for :func:`gae`.
    gamma
        Discount per step; or of every row, ``[time, env]``.
    n
        Maximum number of steps.

    Returns
    -------
    Tensor
        ``[time, env]``.

    Raises
    ------
    ValueError
        If not all are ``[time, env]``, the flags are not boolean, or ``n`` is not positive.

    Examples
    --------
    >>> no, ones = torch.zeros(3, 1, dtype=torch.bool), torch.ones(3, 1)
    >>> n_step_returns(ones, 8 * ones, no, no, gamma=0.5, n=2).flatten().tolist()
    [3.5, 3.5, 5.0]
    """
    floats = {"rewards": rewards, "next_values": next_values}
    if isinstance(gamma, Tensor):
        floats["gamma"] = gamma
    _check_alike(floats, {"terminated": terminated, "truncated": truncated})
    if n < 1:
        raise ValueError(f"n must be 1 or more, got {n}")
    one_step = rewards + gamma * next_values.masked_fill(terminated, 0.0)
    goes_on = ~(terminated | truncated)[:-1]
    returns = one_step
    for _ in range(n - 1):  # of one step, of up to two, …
        longer = rewards[:-1] + (gamma[:-1] if isinstance(gamma, Tensor) else gamma) * returns[1:]
        returns = torch.cat([longer.where(goes_on, one_step[:-1]), one_step[-1:]])
    return returns


@torch.no_grad()
def rescale(values: Tensor, eps: float = 1e-3) -> Tensor:
    """Return values on the scale on which R2D2's network learns them (Pohlen et al., 2018).

    ``h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x``: rewards need not be clipped, as large values
    differ less.

    Examples
    --------
    >>> [round(h, 4) for h in rescale(torch.tensor([-3.0, 0.0, 100.0])).tolist()]
    [-1.003, 0.0, 9.1499]
    """
    return values.sign() * ((values.abs() + 1).sqrt() - 1) + eps * values


@torch.no_grad()
def inverse_rescale(values: Tensor, eps: float = 1e-3) -> Tensor:
    """Return what :func:`rescale` was given.

    ``h^-1(x) = sign(x) (u^2 - 1)`` with ``u = (sqrt(1 + 4 eps (|x| + 1 + eps)) - 1) / (2 eps)``.

    Examples
    --------
    >>> [round(x, 3) for x in inverse_rescale(torch.tensor([-1.003, 0.0, 9.1499])).tolist()]
    [-3.0, 0.0, 100.001]
    """
    above = values.abs() + 1 + eps
    u = 2 * above / ((1 + 4 * eps * above).sqrt() + 1)  # as above, without a difference
    return values.sign() * (u.square() - 1)


@torch.no_grad()
def sequence_priorities(errors: Tensor, mask: Tensor, eta: float = 0.9) -> Tensor:
    """Return the priority of every sequence: ``eta max |error| + (1 - eta) mean |error|``.

    Parameters
    ----------
    errors
        TD errors, ``[time, sequence]``.
    mask
        Which rows count, ``[time, sequence]``, boolean: those that are learned from. A sequence
        of which none counts has the priority 0.
    eta
        Share of the largest error.

    Returns
    -------
    Tensor
        ``[sequence]``.

    Raises
    ------
    ValueError
        If the shapes differ, or the mask is not boolean.

    Examples
    --------
    >>> errors = torch.tensor([[9.0], [-2.0], [1.0]])
    >>> mask = torch.tensor([[False], [True], [True]])
    >>> round(sequence_priorities(errors, mask).item(), 4)
    1.95
    """
    _check_alike({"errors": errors}, {"mask": mask})
    size = errors.abs().where(mask, 0.0)
    mean = size.sum(0) / mask.sum(0).clamp(min=1)
    return eta * size.amax(0) + (1 - eta) * mean


@torch.no_grad()
def discounted_sums(values: Tensor, discounts: Tensor) -> Tensor:
    """Return ``S_t = x_t + d_t S_{t+1}`` for every time row, with nothing after the last one.

    The sums reach over 1, 2, 4, … rows in turn, so a rollout of 128 rows takes 7 rounds, not 128.

    Parameters
    ----------
    values
        ``x``, ``[time, …]``.
    discounts
        ``d``, of the same shape: 0 where an episode ends.

    Returns
    -------
    Tensor
        Of the same shape.

    Raises
    ------
    ValueError
        If the shapes differ.

    Examples
    --------
    >>> discounted_sums(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0.5, 0.5, 0.5])).tolist()
    [3.0, 4.0, 4.0]
    """
    if values.shape != discounts.shape or not values.ndim:
        raise ValueError(
            f"values and discounts must be [time, …] alike, got {_shape(values)} and "
            f"{_shape(discounts)}: discounted_sums(rewards, torch.full_like(rewards, 0.99))"
        )
    sums, reach = values.clone(), 1
    while reach < len(sums):
        sums[:-reach] += discounts[: len(sums) - reach] * sums[reach:]
        discounts = discounts[:-reach] * discounts[reach:]
        reach *= 2
    return sums


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)


def _clipped(weights: Tensor, bound: float | None) -> Tensor:
    return weights if bound is None else weights.clamp(max=bound)


def _check_alike(floats: Mapping[str, Tensor], flags: Mapping[str, Tensor]) -> None:
    """Raise unless all are ``[time, env]`` alike, and the flags are boolean."""
    given = {**floats, **flags}
    first = next(iter(given.values()))
    for name, tensor in given.items():
        if tensor.ndim != 2 or tensor.shape != first.shape:
            shapes = ", ".join(f"{each} {_shape(given[each])}" for each in given)
            raise ValueError(f"all must be [time, env] alike, and {name} is not: {shapes}")
    for name, tensor in flags.items():
        if tensor.dtype != torch.bool:
            raise ValueError(f"{name} must be boolean, got {tensor.dtype}: {name}.bool()")
