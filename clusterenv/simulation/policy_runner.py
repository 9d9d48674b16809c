"""Runs a policy on a group of environments, for ``ClusterEnv.step(policy)`` and the env loop."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clusterenv.data.spaces import Column, Layout
from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.simulation.decisions import (
    LAST_REWARD,
    RESERVED_COLUMNS,
    ActionCheck,
    ExtrasCheck,
    Location,
    PolicyFault,
    check_decision,
    check_log_prob,
    check_state,
    initial_state,
)
from clusterenv.simulation.engines.base import EnvDescription

__all__ = ["Acting", "PolicyRunner"]

Bools = npt.NDArray[np.bool_]


class Acting(NamedTuple):
    """What a policy acts with: its version, and the scalars of the newest announcement."""

    version: int
    scalars: Mapping[str, float]


class PolicyRunner:
    """Asks a policy for actions, checks its answer and keeps its recurrent state.

    Methods run under ``torch.inference_mode()``, which the caller enters. ``rng`` is entered
    around every call of the policy, so that it draws its own random numbers. ``reserved`` are
    names that the policy's extras cannot have. A ``deterministic`` policy does not explore.
    """

    follows_choices = False
    """Whether :attr:`acting` may change with every call of :meth:`act`."""

    def __init__(
        self,
        policy: Policy,
        description: EnvDescription,
        envs: npt.NDArray[np.int32],
        rng: AbstractContextManager[None] | None = None,
        reserved: Collection[str] = RESERVED_COLUMNS,
        deterministic: bool = False,
    ) -> None:
        self.policy = policy
        self.rng = rng or nullcontext()
        self.envs = envs
        """Global indices of the environments."""
        self.location = Location(envs.tolist())
        self._acting = Acting(0, {})
        self._deterministic = deterministic
        self._layout = Layout(description.observation_space)
        self.masks_in_obs = ("action_mask",) in [leaf.path for leaf in self._layout.leaves]
        """Whether observations hold the action masks."""
        self._action_check = ActionCheck(description.action_space, len(envs))
        self.checks_actions = self._action_check.is_complete
        """Whether every action that :meth:`act` returns is in the action space."""
        self._extras_check = ExtrasCheck(len(envs), reserved)
        self._env_tensor = torch.from_numpy(envs.astype(np.int64))
        with self.rng:
            state = initial_state(policy, len(envs))
        self._set_state(state)

    @property
    def steps(self) -> int:
        """How often the policy has acted."""
        return self.location.steps

    @property
    def acting(self) -> Acting:
        """Version and scalars that the policy acts with."""
        return self._acting

    @acting.setter
    def acting(self, acting: Acting) -> None:
        if acting.scalars is not self._acting.scalars:
            self._context = self._make_context(acting.scalars, self.state)
        self._acting = acting

    def act(
        self, obs: list[Tensor], allowed: Column | None = None, finished: Bools | None = None
    ) -> dict[str, Column]:
        """Return the column ``action`` and the policy's extras, or raise ``PolicyFault``.

        ``obs`` are the array columns of the observations, as fresh tensors that were made outside
        of inference mode: a tensor's count of in-place changes must be 0. ``allowed`` are action
        masks from the infos; without them, masks in the observations count. Environments that are
        ``finished`` are only reset by the next step, and their masks may allow nothing.
        """
        location, context = self.location, self._context
        mask: Tensor | None = None
        if allowed is not None or self.masks_in_obs:
            mask = self._mask_in(obs) if allowed is None else torch.from_numpy(allowed)
            mask = mask.to(torch.bool)
            if finished is not None:
                mask = _allow_if_finished(mask, finished)
            self._action_check.check_mask(mask, location)
            context = self._make_context(context.scalars, self.state, mask)
        decision = self._decide(obs, context)
        for tensor in obs:
            if tensor._version:  # how often it was changed in place
                raise PolicyFault(
                    f"{type(self.policy).__name__}.act() changed its observations of {location} in "
                    "place: work on a copy, obs.clone(), and without inplace=True in the first "
                    "layer"
                )
        action = self._action_check(decision.action, mask, location)
        extras = self._extras_check(decision.extras, location)
        log_prob = extras.get("log_prob")
        if log_prob is not None:
            check_log_prob(log_prob, location.env)
        state = decision.state
        if state is not None and (type(state) is not dict or state):
            check_state(state, self.state, location)
            if state:
                self._set_state({name: tensor.clone() for name, tensor in state.items()})
        location.steps += 1
        return {"action": action, **extras}

    def _decide(self, obs: list[Tensor], context: Context) -> Decision:
        """Ask the policy, and check that it answers."""
        policy = self.policy
        try:
            with self.rng:
                decision = policy.act(self._layout.nest_arrays(obs), context)
        except (Exception, SystemExit) as error:
            raise PolicyFault(
                f"the policy raised {type(error).__name__} on {self.location}: {error}"
            ) from error
        check_decision(decision, policy, self.location)
        return decision

    def _mask_in(self, obs: list[Tensor]) -> Tensor:
        mask: Tensor = self._layout.nest_arrays(obs)["action_mask"]
        return mask

    def act_again(
        self,
        row: int,
        obs: list[Tensor],
        allowed: Column | None,
        initial: Mapping[str, Column] | None = None,
    ) -> dict[str, Column]:
        """Choose again, for one environment that was reset after :meth:`act`.

        The recurrent state of the other environments stays as it is. Only ``row`` of the returned
        columns counts. The initial recurrent state is written into ``row`` of ``initial``.
        """
        after = self.state
        if not after:
            return self.act(obs, allowed)
        self._set_state({name: tensor.clone() for name, tensor in after.items()})
        self.reset_state(np.arange(len(self._env_tensor)) == row)
        for name, column in (initial or {}).items():
            column[row] = self.state[name][row].numpy()
        columns = self.act(obs, allowed)
        for name, tensor in after.items():
            tensor[row] = self.state[name][row]
        self._set_state(after)
        return columns

    def take_rewards(self, rewards: Column) -> None:
        """Write the rewards of a step into the recurrent state, if it has an entry for them."""
        if (last := self.state.get(LAST_REWARD)) is not None:
            last.copy_(torch.from_numpy(rewards))

    def reset_state(self, which: Bools) -> None:
        """Give environments that begin an episode their initial recurrent state."""
        if self.state and which.any():
            rows = torch.from_numpy(np.flatnonzero(which))
            with self.rng:
                initial = initial_state(self.policy, len(rows))
            for name, tensor in initial.items():
                self.state[name][rows] = tensor

    def state_at(self, rows: npt.NDArray[np.intp]) -> dict[str, Column]:
        """Return a copy of the recurrent state of some environments."""
        return {name: tensor.numpy()[rows] for name, tensor in self.state.items()}

    def _set_state(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self._context = self._make_context(self._acting.scalars, state)

    def _make_context(
        self,
        scalars: Mapping[str, float],
        state: Mapping[str, Tensor],
        mask: Tensor | None = None,
    ) -> Context:
        return Context(self._env_tensor, scalars, state, mask, self._deterministic)


def _allow_if_finished(mask: Tensor, finished: Bools) -> Tensor:
    """Allow every action to a finished environment whose final observation allows none.

    The next step only resets it and ignores its action, but a policy cannot sample from an empty
    set.

    Examples
    --------
    >>> mask = torch.tensor([[False, False], [False, True]])
    >>> _allow_if_finished(mask, np.array([True, True])).tolist()
    [[True, True], [False, True]]
    """
    if not finished.any():
        return mask
    return mask | (torch.from_numpy(finished)[:, None] & ~mask.any(-1, keepdim=True))
