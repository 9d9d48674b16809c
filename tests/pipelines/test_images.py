"""Convolutions over images: which there are, and that every learner takes them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from clusterenv.errors import ConfigError
from pipelines import learners
from pipelines.envs.football import EASIEST
from pipelines.networks.images import image_network, pooled_cnn

STACK = gym.spaces.Box(0, 255, (2, 4, 36, 48), np.uint8)
COLOURS = gym.spaces.Box(0, 255, (37, 41, 3), np.uint8)
NAMES = ("residual", "nature", "pooled")


def test_no_point_is_lost_by_halving() -> None:
    planes = pooled_cnn(STACK.shape)[0]
    rng = np.random.default_rng(1)
    for frame, plane, row, column in rng.integers(0, STACK.shape, (50, 4)):
        image = torch.zeros(1, *STACK.shape, dtype=torch.uint8)
        image[0, frame, plane, row, column] = 255
        seen = planes(image)
        assert seen.shape == (1, 8, 18, 24)
        assert seen.sum() == 1
        assert seen[0, frame * 4 + plane, row // 2, column // 2] == 1


def test_an_odd_row_and_column_are_left_out() -> None:
    image = torch.from_numpy(COLOURS.sample())[None]
    seen = pooled_cnn(COLOURS.shape)[0](image)
    assert seen.shape == (1, 3, 18, 20)
    expected = torch.nn.functional.max_pool2d(image.movedim(-1, 1).float() / 255, 2)
    torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_floats_are_seen_alike_and_stay_as_they_are(name: Any) -> None:
    network, features = image_network(name, STACK.shape)
    image = torch.from_numpy(np.stack([STACK.sample(), STACK.sample()]))
    floats = image.float()
    seen = network(floats)
    assert seen.shape == (2, features)
    torch.testing.assert_close(network(image), seen)
    torch.testing.assert_close(floats, image.float(), rtol=0, atol=0)


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(4, 8, 8\) are too small .* at least 16 × 16"):
        pooled_cnn((4, 8, 8))


@pytest.mark.parametrize("name", ["ppo", "impala", "impact", "vmpo", "dqn", "apex", "r2d2"])
def test_every_learner_of_images_takes_the_convolutions_that_are_asked_for(name: str) -> None:
    kind, kernels = learners.load(name), {}
    for cnn in (None, *NAMES):
        learner = kind(kind.args_type(cnn=cnn), STACK, gym.spaces.Discrete(3))
        weights = learner.policy.state_dict()
        (first,) = (tensor for key, tensor in weights.items() if key.endswith("eyes.1.weight"))
        kernels[cnn] = first.shape[-1]
    default = "residual" if name in ("ppo", "impala", "impact", "vmpo") else "nature"
    assert kernels == {None: kernels[default], "residual": 3, "nature": 8, "pooled": 4}


@pytest.mark.parametrize("name", ["ppo", "impala", "impact", "vmpo", "dqn", "apex", "r2d2", "sac"])
def test_convolutions_without_images_are_refused(name: str) -> None:
    kind, box = learners.load(name), gym.spaces.Box(-1, 1, (3,))
    actions = box if name == "sac" else gym.spaces.Discrete(3)
    with pytest.raises(ConfigError, match=r"--cnn pooled is for images.*Box.*: leave --cnn out"):
        kind(kind.args_type(cnn="pooled"), box, actions)


def test_an_lstm_takes_them_too() -> None:
    kind = learners.load("impala")
    args = kind.args_type(recurrent=8, cnn="pooled")
    agent = kind(args, STACK, gym.spaces.Discrete(3)).policy
    assert agent.eyes[1].kernel_size == (4, 4)


@pytest.mark.parametrize("name", ["ppo", "impala", "apex"])
@pytest.mark.parametrize("env", EASIEST)
def test_the_presets_of_football_fit_two_cores(name: str, env: str) -> None:
    args = learners.load(name).preset(env, shards=2)
    assert (args.engine, args.cnn, args.total_steps) == ("native", "pooled", 1_000_000)
    assert args.evaluate_env_args == ("reward=score",)
