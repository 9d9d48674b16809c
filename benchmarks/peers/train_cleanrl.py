"""Train with PPO in one file, with CleanRL's settings.

CleanRL is a repository of programs, not a package, so the program is ours: its structure and the
default settings are those of CleanRL's ``ppo.py``, which has the same ones for every environment.
As there, an episode's end by its time limit counts as its end, the value loss is clipped and the
learning rate comes down to 0 in 500,000 steps. Gymnasium's ``SyncVectorEnv``.

    python -m benchmarks.peers.train_cleanrl --env CartPole-v1 --goal 475
"""

from __future__ import annotations

from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.peers import training


@dataclass(frozen=True)
class Settings:
    """CleanRL's defaults."""

    num_envs: int = 4
    horizon: int = 128
    minibatches: int = 4
    epochs: int = 4
    total_steps: int = 500_000
    lr: float = 2.5e-4
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value_coef: float = 0.5
    grad_norm: float = 0.5


def layer(inputs: int, outputs: int, gain: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    first, second = training.HIDDEN
    hidden = layer(inputs, first, 2**0.5), nn.Tanh(), layer(first, second, 2**0.5), nn.Tanh()
    return nn.Sequential(*hidden, layer(second, outputs, last_gain))


class Agent(nn.Module):
    """Separate actor and critic."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        self.actor, self.critic = network(inputs, actions, 0.01), network(inputs, 1, 1.0)

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def advantages_of(
    rewards: Tensor, values: Tensor, starts: Tensor, last_value: Tensor, s: Settings
) -> Tensor:
    """Return generalised advantages; ``starts`` has one row more, whether an episode begins."""
    advantages = torch.zeros_like(rewards)
    later, following = torch.zeros_like(last_value), last_value
    for t in reversed(range(len(rewards))):
        alive = 1.0 - starts[t + 1]
        delta = rewards[t] + s.gamma * following * alive - values[t]
        later = delta + s.gamma * s.lam * alive * later
        advantages[t], following = later, values[t]
    return advantages


def update(agent: Agent, optimizer: torch.optim.Optimizer, rows: list[Tensor], s: Settings) -> None:
    """Pass over a rollout several times, in minibatches."""
    for _ in range(s.epochs):
        for part in torch.randperm(len(rows[0])).chunk(s.minibatches):
            obs, action, old_log_prob, advantage, target, old_value = (row[part] for row in rows)
            policy = Categorical(logits=agent.actor(obs))
            ratio = (policy.log_prob(action) - old_log_prob).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1 - s.clip, 1 + s.clip)
            policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
            value = agent.value(obs)
            near = old_value + (value - old_value).clamp(-s.clip, s.clip)
            error = torch.max((value - target).square(), (near - target).square())
            loss = policy_loss + s.value_coef * 0.5 * error.mean()
            loss = loss - s.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), s.grad_norm)
            optimizer.step()


def train(envs: gym.vector.VectorEnv, s: Settings, seed: int, watched: training.Training) -> None:
    """Train until it is over."""
    torch.manual_seed(seed)
    space = envs.single_observation_space
    agent = Agent(int(np.prod(space.shape)), int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=s.lr, eps=1e-5)
    shape = (s.horizon, s.num_envs)
    obs, actions = torch.zeros((*shape, *space.shape)), torch.zeros(shape, dtype=torch.int64)
    log_probs, rewards, values = (torch.zeros(shape) for _ in range(3))
    starts = torch.zeros((s.horizon + 1, s.num_envs))
    running, steps, updates = np.zeros(s.num_envs), 0, s.total_steps // (s.horizon * s.num_envs)
    now = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    watched.begin()
    for number in range(updates):
        optimizer.param_groups[0]["lr"] = s.lr * (1 - number / updates)
        starts[0] = starts[-1].clone()
        for t in range(s.horizon):
            obs[t] = now
            with torch.no_grad():
                policy = Categorical(logits=agent.actor(now))
                actions[t] = policy.sample()
                log_probs[t], values[t] = policy.log_prob(actions[t]), agent.value(now)
            after, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            now, ended = torch.as_tensor(after, dtype=torch.float32), terminated | truncated
            rewards[t], starts[t + 1] = torch.as_tensor(reward), torch.as_tensor(ended)
            running += reward
            steps += s.num_envs
            watched.episodes(running[ended], steps)
            running[ended] = 0.0
            if watched.over:
                return
        with torch.no_grad():
            advantages = advantages_of(rewards, values, starts, agent.value(now), s)
        columns = (obs, actions, log_probs, advantages, advantages + values, values)
        update(agent, optimizer, [column.flatten(0, 1) for column in columns], s)
        watched.updated(steps)


def main() -> None:
    task = training.task_of(__doc__, ("ppo",))
    torch.set_num_threads(1)
    settings = Settings()
    if task.goal is None:
        settings = Settings(
            num_envs=training.ENVS,
            horizon=training.PPO_HORIZON,
            minibatches=training.PPO_MINIBATCHES,
            epochs=training.PPO_EPOCHS,
            total_steps=training.ENDLESS,
        )
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make(task.env)] * settings.num_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    watched = training.Training(task)
    train(envs, settings, task.seed, watched)
    watched.report("gymnasium")
    envs.close()


if __name__ == "__main__":
    main()
