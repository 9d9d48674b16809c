"""A learner of your own: A2C on the experiment runner, which does everything else.

``python examples/own_learner.py --env CartPole-v1 --stop-at 475 --evaluate-every 10000``
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from clusterenv.policies import Categorical
from clusterenv.returns import gae, next_values
from pipelines.experiment import RolloutAlgorithm, RolloutArgs, main


@dataclass(frozen=True)
class Args(RolloutArgs):
    """Options: those of every learner, and A2C's own."""

    sync: str = "every-version"  # when to pull: A2C corrects for no older version
    horizon: int = 8  # steps of each environment between updates
    lr: float = 3e-3  # learning rate of Adam
    anneal: bool = True  # decrease the learning rate linearly to 0
    lam: float = 0.95  # lambda of generalised advantage estimation
    entropy: float = 0.001  # weight of the entropy bonus
    value_coef: float = 0.5  # weight of the value loss
    grad_norm: float = 0.5  # clip gradients to this norm
    hidden: tuple[int, ...] = (64, 64)  # hidden layers


PRESETS = {"CartPole-v1": {"total_steps": 500_000, "gamma": 0.98}}


class ActorCritic(nn.Module):
    """Logits of the actions, and the value of the state."""

    def __init__(self, inputs, hidden, outputs):
        super().__init__()
        sizes = (inputs, *hidden)
        pairs = itertools.pairwise(sizes)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairs))
        self.actor, self.critic = nn.Linear(sizes[-1], outputs), nn.Linear(sizes[-1], 1)

    def forward(self, obs):
        features = self.body(obs)
        return self.actor(features), self.critic(features).squeeze(-1)


class A2C(RolloutAlgorithm):
    """Advantage actor-critic (Mnih et al., 2016), from synchronous rollouts."""

    name, title, args_type, presets = "a2c", "A2C", Args, PRESETS

    def __init__(self, args, observation_space, action_space):
        super().__init__(args, observation_space, action_space)
        self.net = ActorCritic(observation_space.shape[0], args.hidden, int(action_space.n))
        self.optimizer = torch.optim.Adam(self.net.parameters(), args.lr, eps=1e-5)
        self.policy = Categorical(self.net)  # what the workers act with
        self.parts = {"net": self.net, "optimizer": self.optimizer}  # what a checkpoint keeps

    def learn(self, rows, progress):
        args = self.args
        lr = self.anneal(self.optimizer, progress)
        logits, value = self.net(rows["obs"])  # [time, env, …]
        with torch.no_grad():
            following = next_values(value, rows.tail_rows, self.net(rows.tail["obs"])[1])
            ends = rows["terminated"], rows["truncated"]
            advantage = gae(rows["reward"], value, following, *ends, args.gamma, args.lam)
            target = advantage + value
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        chosen = torch.distributions.Categorical(logits=logits)
        policy_loss = -(advantage * chosen.log_prob(rows["action"])).mean()
        value_loss = (value - target).square().mean()
        entropy = chosen.entropy().mean()
        loss = policy_loss + args.value_coef * value_loss - args.entropy * entropy
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), args.grad_norm)
        self.optimizer.step()
        return {"lr": lr, "policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


if __name__ == "__main__":
    main(A2C)
