"""Actors that see Dict observations: flat parts, an image, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate
from small_runs import progress
from worlds import Signs

from clusterenv.errors import ConfigError
from clusterenv.policies import Context
from clusterenv.store import Rollout
from pipelines.experiment import run
from pipelines.impact import IMPACT
from pipelines.impala import IMPALA
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.observations import Observations
from pipelines.networks.recurrent import RecurrentActorCritic
from pipelines.ppo import PPO
from pipelines.tools.saved_policies import load_run
from pipelines.vmpo import VMPO

TWO = spaces.Discrete(2)
SPACE = Signs().observation_space


def nested(space: Any, n: int, seed: int = 1) -> Any:
    """Return ``n`` observations as a policy gets them."""
    batch = batch_space(space, n)
    batch.seed(seed)
    return tensors(batch.sample())


def tensors(obs: Any) -> Any:
    if isinstance(obs, dict):
        return {name: tensors(part) for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(map(tensors, obs))
    return torch.from_numpy(np.asarray(obs))


def columns(obs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the columns of a rollout with such observations."""
    return {
        "obs.camera": obs["camera"],
        "obs.car.speed": obs["car"]["speed"],
        "obs.door": obs["door"],
    }


def test_columns_and_nested_observations_become_the_same_tensor() -> None:
    observations, obs = Observations(SPACE), nested(SPACE, 6)
    gathered = observations.gather(obs)
    assert torch.equal(observations.of_columns(columns(obs)), gathered)
    rows = {name: part.view(3, 2, *part.shape[1:]) for name, part in columns(obs).items()}
    assert torch.equal(observations.of_columns(rows).flatten(0, 1), gathered)
    image, numbers = observations.split(gathered)
    assert image is not None
    assert numbers is not None
    assert torch.equal(image, obs["camera"])
    one_hot = torch.nn.functional.one_hot(obs["door"] - 1, 3)
    expected = torch.cat([obs["car"]["speed"].float(), one_hot], -1)
    assert torch.equal(numbers, expected)
    assert torch.equal(observations.join(observations.split(gathered)), gathered)


def test_an_image_whose_bytes_are_no_multiple_of_four_is_packed_too() -> None:
    space = spaces.Dict(camera=spaces.Box(0, 255, (1, 17, 17), np.uint8), x=spaces.Box(-1, 1, (1,)))
    observations, obs = Observations(space), nested(space, 3)
    image, numbers = observations.split(observations.gather(obs))
    assert torch.equal(image, obs["camera"])  # type: ignore[arg-type]
    assert torch.equal(numbers, obs["x"])  # type: ignore[arg-type]


def test_flat_parts_are_seen_as_by_gymnasiums_wrapper() -> None:
    space = spaces.Dict(
        a=spaces.Tuple([spaces.Box(-1, 1, (2, 2)), spaces.Discrete(3)]), b=spaces.MultiBinary(2)
    )
    obs = nested(space, 5)
    single = iterate(batch_space(space, 5), obs)
    numpy = [
        {"a": tuple(np.asarray(part) for part in each["a"]), "b": np.asarray(each["b"])}
        for each in single
    ]
    expected = np.stack([spaces.flatten(space, each) for each in numpy])
    np.testing.assert_array_equal(Observations(space).gather(obs).numpy(), expected)


@pytest.mark.parametrize("kind", [ActorCritic, RecurrentActorCritic])
@pytest.mark.parametrize("normalize", [True, False])
def test_what_acted_is_judged_alike(kind: Any, normalize: bool) -> None:
    torch.manual_seed(0)
    agent = kind(SPACE, TWO, (16,), normalize_obs=normalize)
    obs = nested(SPACE, 4)
    if normalize:
        agent.stats.update(torch.randn(64, 5))
        assert agent.stats.mean.shape == (5,)
    state = agent.initial_state(4)
    with torch.no_grad():
        action, extras, _ = agent.act(obs, Context(torch.arange(4), state=state))
        ends = torch.zeros(1, 4, dtype=torch.bool)
        rows = {name: part.unsqueeze(0) for name, part in columns(obs).items()}
        rows |= {"action": action.unsqueeze(0), "reward": torch.ones(1, 4), "step": ends.long()}
        rows |= {"terminated": ends, "truncated": ends}
        found = agent.unroll(Rollout(rows, torch.arange(4), columns(obs), state))
    torch.testing.assert_close(found.log_prob[0], extras["log_prob"])
    if kind is ActorCritic:
        torch.testing.assert_close(found.next_value, found.value)  # the tail is the same


def test_the_loss_reaches_image_and_numbers() -> None:
    agent = ActorCritic(SPACE, TWO, (16,))
    obs = agent.normalize(agent.observations.gather(nested(SPACE, 4)))
    out, value = agent(obs)
    (out.square().sum() + value.sum()).backward()
    for name, parameter in agent.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict(x=spaces.Box(-1, 1, (2,)), m=spaces.Text(8)), r"obs\.m .*FilterObs.*\['x'\]"),
        (spaces.Tuple([spaces.Text(8)]), r"obs\.0 in Text.*FlattenObservation"),
        (spaces.Dict(x=spaces.MultiDiscrete([2, 3])), r"obs\.x in MultiDiscrete"),
        (spaces.MultiDiscrete([2, 3]), r"Box, or a Dict of such parts.*FlattenObservation"),
        (spaces.Dict(a=Signs.image, b=Signs.image), r"one image.* obs\.a, obs\.b.*\['a', …\]"),
        (spaces.Dict(x=Signs.image, action_mask=spaces.MultiBinary(2)), "policies.Categorical"),
    ],
)
def test_a_space_that_does_not_fit_says_what_would(space: Any, message: str) -> None:
    for kind in (ActorCritic, RecurrentActorCritic):
        with pytest.raises(ConfigError, match=message):
            kind(space, TWO)


@pytest.mark.parametrize(
    ("kind", "more"),
    [(PPO, {}), (IMPALA, {}), (IMPALA, {"recurrent": 8}), (IMPACT, {}), (VMPO, {})],
)
def test_learners_take_an_image_and_numbers(
    kind: Any, more: dict[str, Any], tmp_path: Path, client: Client, leaves_nothing: None
) -> None:
    sizes = {"num_envs": 4, "horizon": 8, "shards": 2, "log_every": 32, "total_steps": 96}
    args = {**sizes, "minibatches": 2, "hidden": (16,), "quiet": True, **more}
    cluster = str(client.scheduler.address)
    run(kind, kind.preset("worlds:Signs-v0", out=tmp_path, cluster=cluster, **args))
    assert progress(tmp_path)[-1]["steps"] == 96
    policy: Any = load_run(tmp_path).policy
    assert policy.observations.image == (3, 16, 16)
    assert policy.stats.mean.shape == (5,)
    assert policy.stats.count > 0


def test_ppo_learns_from_all_parts() -> None:
    """One rollout after the other of single steps, without a cluster."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a run
    same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
    envs = gym.make_vec("Signs-v0", 64, vectorization_mode="sync", vector_kwargs=same_step)
    args = PPO.args_type(num_envs=64, horizon=8, lr=3e-3, gamma=0.0, hidden=(32,), anneal=False)
    learner = PPO(args, envs.single_observation_space, envs.single_action_space)
    earned = []
    obs, _ = envs.reset(seed=1)
    for _ in range(25):
        kept: list[dict[str, torch.Tensor]] = []
        for _ in range(8):
            seen = tensors(obs)
            with torch.no_grad():
                action, extras, _ = learner.agent.act(seen, Context(torch.arange(64)))
            obs, reward, _, _, _ = envs.step(action.numpy())
            row = {**columns({name: seen[name] for name in SPACE.spaces}), "action": action}
            row |= {"log_prob": extras["log_prob"], "reward": torch.as_tensor(reward).float()}
            kept.append(row)
        rows = {name: torch.stack([row[name] for row in kept]).clone() for name in kept[0]}
        ends = torch.ones(8, 64, dtype=torch.bool)
        rows |= {"terminated": ends, "truncated": ~ends}
        tail = {name: rows[name].flatten(0, 1) for name in rows if name.startswith("obs")}
        learner.learn(Rollout(rows, torch.arange(512), tail), 0.0)
        earned.append(float(rows["reward"].mean()))
    envs.close()
    assert earned[0] < 0.65
    assert np.mean(earned[-3:]) > 0.87  # without the image 0.83 at most
