"""``ClusterEnv.step(policy)``: the policy acts beside the environments, one step at a time.

The head knows which version each shard has and how far it has diverged, so it sends weights
along with the step to those shards whose rule asks for them, and to no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.arguments import check_rule, pickled
from clusterenv.channel import Array, dumps, loads
from clusterenv.env_loop.actions import ActionCheck
from clusterenv.env_loop.decisions import ExtrasCheck, ask, check_log_prob
from clusterenv.env_loop.faults import Where
from clusterenv.env_loop.masks import InfoMask, opened
from clusterenv.env_loop.states import initial_state
from clusterenv.envs import EnvDescription
from clusterenv.errors import ConfigError
from clusterenv.policies.base import Context, Policy
from clusterenv.schema import Column, Layout
from clusterenv.sync.publisher import Publisher
from clusterenv.sync.rules import SyncRule
from clusterenv.sync.weights import Weights, load, manifest_of

__all__ = ["ActRequest", "LocalPolicy", "RemotePolicy"]


_TAKEN = {"action", "policy_version", "env_id", "lost", "final_obs", "final_info"}


class ActRequest(NamedTuple):
    """Blob of an ``ACT`` frame; its body is the weights of ``version``, or nothing."""

    policy: bytes | None
    """The pickled policy, the first time."""
    version: int


class RemotePolicy:
    """The head's side: knows what each shard acts with."""

    def __init__(
        self, policy: Policy, rule: SyncRule, observations: Layout, shards: int, envs: int
    ) -> None:
        check_rule(rule, policy)
        self._pickled = pickled(policy)
        self._kind = type(policy)
        self._rule = rule
        self._publisher = Publisher(policy, rule, observations, shards)
        self._arrays = observations.arrays
        self._has: dict[int, int] = {}  # which incarnation of a shard has the policy
        self._divergences: dict[int, float] = {}
        self._mask = InfoMask(envs)
        self._columns: dict[str, Column] = {}
        self.pulls = 0
        self.weight_bytes = 0

    def refresh(self, policy: Policy) -> None:
        """Make a new version if the policy's numbers were changed since the last step."""
        if type(policy) is not self._kind:
            raise ConfigError(
                f"step() got a {type(policy).__name__}, and a {self._kind.__name__} before; the "
                "shards go on with the one policy: make another ClusterEnv for another"
            )
        if not self._publisher.is_newest(policy):
            self._divergences = dict(self._publisher.publish(policy, {}).divergences)

    def request(self, shard: int, incarnation: int) -> tuple[bytes, list[Array]]:
        """Return blob and body of the frame that makes a shard act."""
        publisher = self._publisher
        new = self._has.get(shard) != incarnation  # begins with the newest version
        self._has[shard] = incarnation
        first = self._pickled if new else None
        held = 0 if new else publisher.in_use[shard]
        lag = publisher.version - held
        if lag and (new or self._rule.should_pull(lag, self._divergences.get(held))):
            publisher.in_use[shard] = publisher.version
            buffer = publisher.newest.buffer
            self.pulls += 1
            self.weight_bytes += buffer.nbytes
            return dumps(tuple(ActRequest(first, publisher.version))), [buffer]
        return dumps(tuple(ActRequest(first, held))), []

    def complete(self, chosen: dict[str, Column], envs: int) -> dict[str, Column]:
        """Return what was chosen, with zeros if a lost shard had nobody to choose."""
        self._columns |= {name: values[:1] for name, values in chosen.items()}
        for name, like in self._columns.items():
            if name not in chosen:
                chosen[name] = np.zeros((envs, *like.shape[1:]), like.dtype)
        return chosen

    def observe(
        self, obs: list[Column], over: npt.NDArray[np.bool_], info: Mapping[str, Any]
    ) -> None:
        """Keep some observations and their action masks, to compare versions on.

        Not where an episode is over: the last observation may allow no action.
        """
        if not self._rule.needs_divergence:
            return
        self._mask.note(info)
        obs = [obs[k] for k in self._arrays]
        live, mask = np.flatnonzero(~over), self._mask.value
        if len(live) < len(over):
            obs = [column[live] for column in obs]
            mask = None if mask is None else mask[live]
        if len(live):
            self._publisher.observe(obs, live, mask, take=8)


class LocalPolicy:
    """A shard's side: acts on the observations that its environments gave last."""

    def __init__(self, about: EnvDescription, first: int, n: int) -> None:
        self._envs = torch.arange(first, first + n)
        self._where = Where(range(first, first + n))
        self._layout = Layout(about.observation_space)
        self._check = ActionCheck(about.action_space, n)
        self._extras = ExtrasCheck(n, _TAKEN)
        self._n = n

    def update(self, request: ActRequest, buffer: npt.NDArray[np.uint8]) -> None:
        """Take the policy, or newer weights, if the request brings them."""
        if request.policy is not None:
            torch.set_num_threads(1)
            self._policy: Policy = loads(request.policy).eval()
            self._manifest = manifest_of(self._policy)
            self._state = initial_state(self._policy, self._n)
        if buffer.nbytes:
            load(self._policy, self._manifest, Weights(request.version, buffer))
        self._version = request.version

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
