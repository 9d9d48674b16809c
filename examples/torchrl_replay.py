"""Train with a TorchRL loss from a replay store while the workers collect.

The store's samples become TensorDicts, which TorchRL's losses accept unchanged. ClusterEnv
collects, distributes weights and stores priorities; TorchRL computes loss and target.

    pip install torchrl
    python examples/torchrl_replay.py --updates 6000
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import nn
from torchrl.modules import QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate

import clusterenv
from clusterenv.store import Prioritized, Ratio, ReplayStore

GAMMA = 0.99


def main() -> None:
    """Train double DQN on CartPole."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=6_000)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    # A plain torch network, so that the workers do not need TorchRL.
    hidden = (nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    network = nn.Sequential(*hidden, nn.Linear(64, 2))
    policy = clusterenv.policies.EpsilonGreedy(network)
    actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", double_dqn=True, loss_function="smooth_l1")
    loss.make_value_estimator(gamma=GAMMA)
    target = SoftUpdate(loss, tau=0.01)
    optimizer = torch.optim.Adam(loss.parameters(), lr=5e-4)

    store = ReplayStore(
        50_000,
        sampler=Prioritized(alpha=0.6, beta=0.4),
        ratio=Ratio(8, min_rows=512),  # sample 8 rows for each row added
        seed=args.seed,
    )
    collector = clusterenv.Collector(
        "CartPole-v1",
        policy,
        num_envs=args.num_envs,
        horizon=16,
        cluster=args.cluster,
        seed=args.seed,
    )
    print("updates    rows  episodes  mean return    loss")
    with collector, store:
        collector.publish(policy, epsilon=1.0)
        samples = store.feed(collector, args.batch_size, tensors=True)
        for update in range(1, args.updates + 1):
            sample = next(samples)
            batch = clusterenv.to_tensordict(sample)
            value = loss(batch)["loss"]
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            target.step()
            # DQNLoss writes the squared error into the batch.
            store.update_priorities(sample["indices"], batch["td_error"].squeeze(-1).sqrt())
            if update % 10 == 0:
                epsilon = max(0.02, 1 - 2 * update / args.updates)
                collector.publish(policy, epsilon=epsilon)
            if update % max(1, args.updates // 10) == 0:
                stats = collector.stats()
                print(
                    f"{update:>7,}{stats.rows:>8,}{stats.episodes:>10,}"
                    f"{np.mean(stats.returns):>13.1f}{value.item():>8.3f}"
                )


if __name__ == "__main__":
    main()
