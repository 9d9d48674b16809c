"""Train a recurrent policy: a GRU that must recall the first observation of the episode.

``initial_state`` makes a policy recurrent. Its state stays on the worker and is reset at every
episode. Each batch has the state at its first row, from which a learner recomputes the same
log-probabilities, even if the episode began in an earlier batch.

    python examples/recurrent_policy.py --updates 150
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution

import clusterenv
from clusterenv.policies import Context, Decision, Policy

Obs = npt.NDArray[np.float32]
HIDDEN = 16


class Recall(gym.Env[Obs, np.int64]):
    """The first observation is 1 or -1, the others 0; the last action must match the first."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, delay: int = 4) -> None:
        self.delay = delay

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(2))
        self.time = 0
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        over = self.time == self.delay
        self.time += 1
        asked = float(self.time == self.delay)
        return np.array([0, asked], np.float32), float(over and action == self.cue), over, False, {}


class Memory(Policy):
    """A GRU cell with a linear layer for logits and value."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, HIDDEN)
        self.top = nn.Linear(HIDDEN, 3)

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"hidden": torch.zeros(n, HIDDEN)}

    def step(self, obs: Tensor, hidden: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        """Return the action distribution, the values and the new state."""
        hidden = self.cell(obs, hidden)
        out = self.top(hidden)
        return Categorical(logits=out[:, :2]), out[:, 2], hidden

    def act(self, obs: Tensor, context: Context) -> Decision:
        policy, _, hidden = self.step(obs, context.state["hidden"])
        action = policy.sample()
        return Decision(action, {"log_prob": policy.log_prob(action)}, {"hidden": hidden})

    def distribution(self, obs: Tensor, context: Context) -> Distribution:
        return self.step(obs, context.state["hidden"])[0]


def again(
    policy: Memory, rollout: clusterenv.Rollout, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Replay rows ``[time, envs]``; return log-probabilities, values and entropies."""
    found = []
    for t in range(len(rollout["step"])):
        begins = rollout["step"][t] == 0
        hidden = hidden.masked_fill(begins[:, None], 0.0)  # as initial_state does on the worker
        actions, value, hidden = policy.step(rollout["obs"][t], hidden)
        found.append((actions.log_prob(rollout["action"][t]), value, actions.entropy()))
    log_prob, value, entropy = (torch.stack(part) for part in zip(*found, strict=True))
    return log_prob, value, entropy


def loss_of(policy: Memory, rollout: clusterenv.Rollout) -> Tensor:
    """Return the actor-critic loss on all rows whose episode ends within the rollout."""
    log_prob, value, entropy = again(policy, rollout, rollout.state["hidden"])
    reward, terminated = rollout["reward"], rollout["terminated"]
    returns, known = torch.zeros_like(reward), torch.zeros_like(terminated)
    following, ends = torch.zeros_like(reward[0]), torch.zeros_like(terminated[0])
    for t in reversed(range(len(reward))):
        ends = ends | terminated[t]
        following = reward[t] + following * ~terminated[t]
        returns[t], known[t] = following, ends
    advantage = returns - value
    each = -log_prob * advantage.detach() + 0.5 * advantage.pow(2) - 0.01 * entropy
    return each[known].mean()


def difference(policy: Memory, batches: Sequence[clusterenv.Batch], stored: bool) -> float:
    """Return the largest difference of recomputed log-probabilities from the workers'."""
    most = 0.0
    for batch in batches:
        rollout = batch.torch()
        hidden = rollout.state["hidden"] if stored else torch.zeros(1)
        with torch.no_grad():
            log_prob, _, _ = again(policy, rollout, hidden.expand(batch.num_envs, HIDDEN))
        most = max(most, float((log_prob - rollout["log_prob"]).abs().max()))
    return most


def main() -> None:
    """Train, and compare log-probabilities before each update."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=150)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--delay", type=int, default=4, help="steps between cue and question")
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)

    policy = Memory()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with clusterenv.Collector(
        Recall,
        policy,
        num_envs=args.num_envs,
        horizon=16,  # not a multiple of the episode length, so episodes span batches
        cluster=args.cluster,
        seed=1,
        delay=args.delay,
    ) as collector:
        print("         right    log-probabilities computed again differ by")
        print("update  answers   from the state stored    from zeros")
        for update in range(1, args.updates + 1):
            batches = collector.rollout()
            if update in (1, 2) or update % max(1, args.updates // 10) == 0:
                answers = np.concatenate([b["reward"][b["terminated"]] for b in batches])
                exact, blank = (difference(policy, batches, stored) for stored in (True, False))
                print(f"{update:>6}{answers.mean():>9.0%}{exact:>24.0e}{blank:>14.0e}")
            loss = torch.stack([loss_of(policy, batch.torch()) for batch in batches]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            collector.publish(policy)
        first = batches[0]
        print(
            f"each batch holds its state: {first.state['hidden'].shape} for {first.num_envs} envs"
        )


if __name__ == "__main__":
    main()
