"""Environments of the experiments; importing this package registers them with Gymnasium."""

from __future__ import annotations

from gymnasium.envs.registration import register

__all__: list[str] = []

register(
    id="clusterenv/CartPoleNoVelocity-v1",
    entry_point="pipelines.envs.cart_pole:CartPoleNoVelocity",
    max_episode_steps=500,
    reward_threshold=475.0,
)
