"""Stands in on a worker for a policy that acts at the head."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.simulation.engines.base import EnvDescription
from clusterenv.simulation.policy_runner import Acting, PolicyRunner

__all__ = ["Choice", "Choose", "HeadPolicy", "HeadPolicyRunner", "runner_of"]


class Choice(NamedTuple):
    """What the head chose, and the version of the policy that did."""

    version: int
    decision: Decision


class Choose(Protocol):
    """Sends observations to the head, and waits for its choice."""

    def __call__(self, obs: list[Tensor], context: Context) -> Choice: ...


class HeadPolicy(Policy):
    """A policy without weights: the head chooses the actions.

    Parameters
    ----------
    initial
        The recurrent state at the start of an episode, of one environment; empty for a policy that
        has none.

    Examples
    --------
    >>> import torch
    >>> HeadPolicy({"hidden": torch.ones(1, 2)}).initial_state(3)["hidden"].shape
    torch.Size([3, 2])
    """

    choose: Choose

    def __init__(self, initial: dict[str, Tensor]) -> None:
        super().__init__()
        self._initial = initial

    def bind(self, choose: Choose) -> HeadPolicy:
        """Return a copy that asks the head in this way."""
        bound = copy.copy(self)
        bound.choose = choose
        return bound

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {name: row.repeat_interleave(n, 0) for name, row in self._initial.items()}


class HeadPolicyRunner(PolicyRunner):
    """Runs a :class:`HeadPolicy`; the version comes with every choice."""

    policy: HeadPolicy
    follows_choices = True

    def __init__(
        self, policy: HeadPolicy, description: EnvDescription, envs: npt.NDArray[np.int32]
    ) -> None:
        super().__init__(policy, description, envs)

    @property
    def acting(self) -> Acting:
        """The version that chose last."""
        return self._acting

    @acting.setter
    def acting(self, acting: Acting) -> None:
        self._acting = Acting(max(acting.version, self._acting.version), {})

    def _decide(self, obs: list[Tensor], context: Context) -> Decision:
        choice = self.policy.choose(obs, context)
        self._acting = Acting(choice.version, {})
        return choice.decision


def runner_of(
    policy: Policy, description: EnvDescription, envs: Any, **options: Any
) -> PolicyRunner:
    """Return what runs a policy on these environments."""
    if isinstance(policy, HeadPolicy):
        return HeadPolicyRunner(policy, description, envs)
    return PolicyRunner(policy, description, envs, **options)
