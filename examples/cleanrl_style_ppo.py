"""PPO on CartPole in one file, written for ``gymnasium.vector.SyncVectorEnv``.

One marked line moves its environments to a Dask cluster. Everything else is an ordinary
single-file learner: ``python examples/cleanrl_style_ppo.py --help``.
"""

from __future__ import annotations

import argparse
import time
from collections import deque

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv


class Agent(nn.Module):
    """Separate actor and critic, two hidden layers each."""

    def __init__(self, obs_size: int, actions: int) -> None:
        super().__init__()
        self.critic = network(obs_size, 1, 1.0)
        self.actor = network(obs_size, actions, 0.01)

    def get_action_and_value(
        self, obs: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample actions, or evaluate given ones."""
        policy = Categorical(logits=self.actor(obs))
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(obs).squeeze(-1)


def network(inputs: int, outputs: int, scale: float) -> nn.Sequential:
    """Return a 64-64 tanh network; a small ``scale`` makes the initial output near zero."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, scale), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def train(envs: gym.vector.VectorEnv, total_steps: int, seed: int) -> float:
    """Train until ``total_steps``; return the mean of the last 100 episodes' returns."""
    torch.manual_seed(seed)
    num_envs, horizon = envs.num_envs, 128
    agent = Agent(envs.single_observation_space.shape[0], int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    shape = (horizon, num_envs)
    obs = torch.zeros((*shape, *envs.single_observation_space.shape))
    actions = torch.zeros(shape, dtype=torch.int64)
    log_probs, rewards, values, ends, bootstraps, dead = (torch.zeros(shape) for _ in range(6))

    finished: deque[float] = deque(maxlen=100)
    running = np.zeros(num_envs)
    now = torch.as_tensor(envs.reset(seed=seed)[0])
    over = torch.zeros(num_envs)  # environments that the next step resets
    updates = max(1, total_steps // (horizon * num_envs))
    began = time.monotonic()
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / updates)
        for t in range(horizon):
            obs[t], dead[t] = now, over
            with torch.no_grad():
                actions[t], log_probs[t], _, values[t] = agent.get_action_and_value(now)
            after, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            now = torch.as_tensor(after)
            rewards[t] = torch.as_tensor(reward)
            over = torch.as_tensor(terminated | truncated).float()
            ends[t] = over
            with torch.no_grad():  # bootstrap after truncation, not after termination
                bootstraps[t] = agent.critic(now).squeeze(-1) * (
                    1 - torch.as_tensor(terminated).float()
                )
            running += reward
            for env in np.flatnonzero(terminated | truncated):
                finished.append(running[env])
                running[env] = 0

        advantages = torch.zeros(shape)
        last = torch.zeros(num_envs)
        for t in reversed(range(horizon)):
            delta = rewards[t] + 0.99 * bootstraps[t] - values[t]
            last = delta + 0.99 * 0.95 * (1 - ends[t]) * last
            advantages[t] = last
        returns = advantages + values

        alive = dead.reshape(-1) == 0
        batch = [
            part.reshape(-1, *part.shape[2:])[alive]
            for part in (obs, actions, log_probs, advantages, returns)
        ]
        for _ in range(6):
            for rows in torch.randperm(len(batch[0])).chunk(4):
                b_obs, b_actions, b_log_probs, b_advantages, b_returns = (p[rows] for p in batch)
                _, log_prob, entropy, value = agent.get_action_and_value(b_obs, b_actions)
                ratio = (log_prob - b_log_probs).exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                gain = torch.min(ratio * b_advantages, ratio.clamp(0.8, 1.2) * b_advantages).mean()
                loss = -gain + 0.5 * (value - b_returns).pow(2).mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        steps = (update + 1) * horizon * num_envs
        rate = steps / (time.monotonic() - began)
        mean = np.mean(finished) if finished else float("nan")
        print(f"\r{steps:>8,} steps  {rate:>7,.0f}/s  return {mean:6.1f}", end="", flush=True)
    print()
    return float(np.mean(finished))


def main() -> None:
    """Make the environments and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--total-steps", type=int, default=150_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)

    def make() -> gym.Env:
        return gym.make("CartPole-v1")

    # Before: envs = gym.vector.SyncVectorEnv([make] * args.num_envs)
    envs = clusterenv.make_vec([make] * args.num_envs, args.num_envs)
    train(envs, args.total_steps, args.seed)
    envs.close()


if __name__ == "__main__":
    main()
