"""A policy that acts beside the environments, one step at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.data.pickling import loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.policies.base import Context, Policy
from clusterenv.simulation.actions import ActionCheck
from clusterenv.simulation.decisions import ExtrasCheck, ask, check_log_prob
from clusterenv.simulation.engines import EnvDescription
from clusterenv.simulation.masks import opened
from clusterenv.simulation.policy_faults import Where
from clusterenv.simulation.recurrent_state import initial_state
from clusterenv.sync.weights import Weights, load, manifest_of

__all__ = ["LocalPolicy"]


_TAKEN = {"action", "policy_version", "env_id", "lost", "final_obs", "final_info"}


class LocalPolicy:
    """A shard's side: acts on the observations that its environments gave last."""

    def __init__(self, about: EnvDescription, first: int, n: int) -> None:
        self._envs = torch.arange(first, first + n)
        self._where = Where(range(first, first + n))
        self._layout = Layout(about.observation_space)
        self._check = ActionCheck(about.action_space, n)
        self._extras = ExtrasCheck(n, _TAKEN)
        self._n = n

    def update(self, policy: bytes | None, version: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Take the policy, or newer weights, if the request brings them."""
        if policy is not None:
            self._policy: Policy = loads(policy).eval()
            self._manifest = manifest_of(self._policy)
            self._state = initial_state(self._policy, self._n)
        if buffer.nbytes:
            load(self._policy, self._manifest, Weights(version, buffer))
        self._version = version

    def act(
        self,
        obs: list[Column],
        began: npt.NDArray[np.bool_],
        over: npt.NDArray[np.bool_],
        allowed: Column | None,
    ) -> dict[str, Column]:
        """Return the actions, and everything else that goes into the infos.

        Parameters
        ----------
        obs
            The newest observation of every environment.
        began
            Which of them begin an episode.
        over
            Whose episode is over: the step only resets them, and their action is ignored.
        allowed
            The action masks of the infos, if the environments give them there.
        """
        with torch.inference_mode():
            if self._state and began.any():
                at = torch.from_numpy(np.flatnonzero(began))
                for name, tensor in initial_state(self._policy, len(at)).items():
                    self._state[name][at] = tensor
            arrays = [torch.from_numpy(obs[k]) for k in self._layout.arrays]
            nested = self._layout.nest_arrays(arrays)
            mask = nested.get("action_mask") if isinstance(nested, dict) else None
            if allowed is not None:
                mask = torch.from_numpy(allowed)
            if mask is not None:
                mask = opened(mask.to(torch.bool), over)
                self._check.check_mask(mask, self._where)
            context = Context(self._envs, {}, self._state, mask)
            decision = ask(self._policy, nested, context, self._where)
            if decision.state:
                self._state = {name: tensor.clone() for name, tensor in decision.state.items()}
        action = self._check(decision.action, mask, self._where)
        extras = self._extras(decision.extras, self._where)
        check_log_prob(extras.get("log_prob"), self._where.env)
        self._where.steps += 1
        versions = np.full(self._n, self._version, np.int64)
        return {"action": action, **extras, "policy_version": versions}
