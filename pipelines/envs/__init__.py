"""Environments of the experiments; importing this package registers them with Gymnasium."""

from __future__ import annotations

from gymnasium.envs.registration import EnvSpec, registry

from pipelines.envs.football import TASKS, env_id

__all__: list[str] = []

# Entries, not register(), which warns when the package is imported anew.
for _spec in (
    EnvSpec(
        id="clusterenv/CartPoleNoVelocity-v1",
        entry_point="pipelines.envs.cart_pole:CartPoleNoVelocity",
        max_episode_steps=500,
        reward_threshold=475.0,
    ),
    EnvSpec(
        id="clusterenv/ZipfGridworld-v0",
        entry_point="pipelines.envs.zipf_gridworld:ZipfGridworld",
        vector_entry_point="pipelines.envs.zipf_gridworld:ZipfGridworldVector",
        max_episode_steps=100,
    ),
    EnvSpec(
        id="clusterenv/ZipfGridworldSmall-v0",
        entry_point="pipelines.envs.zipf_gridworld:ZipfGridworld",
        vector_entry_point="pipelines.envs.zipf_gridworld:ZipfGridworldVector",
        max_episode_steps=100,
        kwargs={"maps": 3, "objects": 5},
    ),
    *(
        EnvSpec(
            id=env_id(task),
            entry_point="pipelines.envs.football:Football",
            vector_entry_point="pipelines.envs.football:FootballVector",
            kwargs={"task": task},
        )
        for task in TASKS
    ),
):
    registry[_spec.id] = _spec
