"""Asks the policy for actions, checks its answer, and writes it into columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clusterenv.data.spaces import Column, Layout
from clusterenv.policies.base import Context, Policy
from clusterenv.simulation.actions import ActionCheck
from clusterenv.simulation.blocks import TAKEN, Block, room
from clusterenv.simulation.decisions import ExtrasCheck, ask, check_log_prob
from clusterenv.simulation.engines import EnvDescription
from clusterenv.simulation.masks import InfoMask, opened
from clusterenv.simulation.policy_faults import PolicyFault, StepOf, Where
from clusterenv.simulation.recurrent_state import initial_state

__all__ = ["Acting", "Interrupted", "PolicyRunner"]


class Acting(NamedTuple):
    """With what a policy acts: its version, and the scalars of the newest announcement."""

    version: int
    scalars: Mapping[str, float]


class Interrupted(Exception):
    """The fragment in hand was given up because somebody asked for it."""


class PolicyRunner:
    """A policy with all that it needs to act on: recurrent state, masks, scalars.

    Parameters
    ----------
    policy
        Acts on all environments at once.
    about
        The environments.
    envs
        Their global indices.
    drawing
        The random numbers that it acts with.
    """

    def __init__(
        self,
        policy: Policy,
        about: EnvDescription,
        envs: npt.NDArray[np.int32],
        drawing: AbstractContextManager[None],
    ) -> None:
        self.interrupted = False
        """Set by another thread: the next action is not chosen any more."""
        self.mask = InfoMask(len(envs))
        self.dead = np.zeros(len(envs), np.bool_)
        """Environments whose next step only resets them."""
        self.state = initial_state(policy, len(envs))
        self._policy = policy
        self._drawing = drawing
        self._layout = Layout(about.observation_space)
        self._masks_in_obs = ("action_mask",) in [leaf.path for leaf in self._layout.leaves]
        self._check = ActionCheck(about.action_space, len(envs))
        self._extras = ExtrasCheck(len(envs), TAKEN)
        self._where = Where(envs.tolist())
        self._env_tensor = torch.from_numpy(envs.astype(np.int64))

    @property
    def steps(self) -> int:
        """Steps of all environments so far."""
        return self._where.steps

    @property
    def checks_all(self) -> bool:
        """Whether an action that it returns is in the space for certain."""
        return self._check.is_complete

    @property
    def masked(self) -> bool:
        """Whether environments say which actions are allowed."""
        return self._masks_in_obs or self.mask.value is not None

    @property
    def switches(self) -> bool:
        """Whether the version may change between two steps."""
        return self._between is not None

    @property
    def version(self) -> int:
        """Of the policy that acts."""
        return self._acting.version

    def begin(self, acting: Acting, between: Callable[[], Acting] | None) -> None:
        """Act with this from now on; ``between`` is asked before every step."""
        self._acting, self._between = acting, between
        self._context = Context(self._env_tensor, acting.scalars, self.state)

    def act(
        self, current: list[Tensor], block: Block, t: int, rows: int, step_of: StepOf | None = None
    ) -> Column:
        """Choose an action for every environment.

        Parameters
        ----------
        current
            Observations that are arrays, as nobody has changed them yet; torch must count
            whoever does.
        block
            Columns of ``rows`` time rows; actions and the policy's own go to time row ``t``.
        step_of
            For the message if an action is wrong.

        Raises
        ------
        PolicyFault
            If the policy raises, or returns something that cannot be used.
        """
        if self.interrupted:
            raise Interrupted
        if self._between is not None:
            self._switch(self._between())
        where = self._where
        where.t, where.step_of = t, step_of
        obs: Any = self._layout.nest_arrays(current)
        context, mask, allowed = self._context, None, self.mask.value
        if allowed is not None or self._masks_in_obs:
            mask = self._current_mask(obs, allowed)
            self._check.check_mask(mask, where)
            context = replace(context, mask=mask)
        with self._drawing:
            decision = ask(self._policy, obs, context, where)
        for tensor in current:
            if tensor._version:  # how often it was changed in place
                raise PolicyFault(
                    f"{type(self._policy).__name__}.act() changed its observations of {where}, "
                    "which are the rows of the trajectory: work on a copy, obs.clone(), and "
                    "without inplace=True in the first layer"
                )
        action = self._check(decision.action, mask, where)
        room(block, "action", action, rows)[t] = action
        extras = self._extras(decision.extras, where)
        check_log_prob(extras.get("log_prob"), where.env)
        for name, values in extras.items():
            room(block, name, values, rows)[t] = values
        if allowed is not None:
            room(block, "action_mask", allowed, rows)[t] = allowed
        if decision.state:
            self._keep({name: tensor.clone() for name, tensor in decision.state.items()})
        where.steps += 1
        return action

    def act_again(
        self,
        row: int,
        current: list[Column],
        block: Block,
        t: int,
        rows: int,
        step_of: StepOf,
        *,
        given: tuple[str, ...],
        first: Mapping[str, Column] | None,
    ) -> Any:
        """Choose an action for an environment that begins anew, and write it over the old one.

        Parameters
        ----------
        given
            Columns that the environments write; these are left alone.
        first
            Where the state of the first time row is kept, if this is the first.
        """
        before = self.state
        if before:
            self.state = {name: tensor.clone() for name, tensor in before.items()}
            begins = np.zeros(len(self._env_tensor), np.bool_)
            begins[row] = True
            self.reset_state(begins)
            for name, held in (first or {}).items():
                held[row] = self.state[name][row].numpy()
            self._keep(self.state)
        kept = {name: column[t].copy() for name, column in block.items() if name not in given}
        between, self._between = self._between, None  # one version for all of this step
        with torch.inference_mode(False):  # so that torch counts whoever changes them
            tensors = [torch.from_numpy(column) for column in current]
        action = self.act(tensors, block, t, rows, step_of)
        self._between = between
        for name, column in kept.items():
            column[row] = block[name][t, row]
            block[name][t] = column
        if before:
            for name, tensor in before.items():
                tensor[row] = self.state[name][row]
            self._keep(before)
        return action[row]

    def reset_state(self, which: npt.NDArray[np.bool_]) -> None:
        """Give environments that begin an episode their initial recurrent state."""
        if which.any():
            at = torch.from_numpy(np.flatnonzero(which))
            for name, tensor in initial_state(self._policy, len(at)).items():
                self.state[name][at] = tensor

    def _keep(self, state: dict[str, Tensor]) -> None:
        self.state = state
        self._context = replace(self._context, state=state)

    def _switch(self, acting: Acting) -> None:
        if acting.scalars is not self._acting.scalars:
            self._context = replace(self._context, scalars=acting.scalars)
        self._acting = acting

    def _current_mask(self, obs: Any, allowed: Column | None) -> Tensor:
        if allowed is not None:
            return opened(torch.from_numpy(allowed), self.dead)
        mask: Tensor = obs["action_mask"]
        return opened(mask.to(torch.bool), self.dead)
