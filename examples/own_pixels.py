"""Bring an environment whose observations are pixels, with stacked frames.

What a learner needs of it: uint8 pictures, and so many frames in each observation that one can see
what moves. Gymnasium's wrappers make both, on the workers. The learners of ``clusterenv train``
choose convolutions for such observations, and a replay store keeps each frame once: ``stack=4``.

    python examples/own_pixels.py
    PYTHONPATH=examples clusterenv train dqn --env own_pixels:Catch-v0 --total-steps 100000
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation
from torch import Tensor, nn

import clusterenv
from clusterenv.policies import Categorical
from clusterenv.store import ReplayStore

SIZE = 40  # pixels along a side; the learners' convolutions need at least 36
BALL, PADDLE = (255, 0, 0), (0, 255, 0)
FRAMES = 4

Pixels = npt.NDArray[np.uint8]


class Catch(gym.Env[Pixels, np.int64]):
    """Move a paddle to the left or right, and catch the ball that falls at a slant."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - as in Gymnasium

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(3)  # left, stay, right

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Pixels, dict[str, Any]]:
        super().reset(seed=seed)
        self.ball = np.array([1, self.np_random.integers(2, SIZE - 2)])
        self.slant = int(self.np_random.integers(-1, 2))
        self.paddle = SIZE // 2
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[Pixels, float, bool, bool, dict[str, Any]]:
        self.paddle = int(np.clip(self.paddle + 2 * (int(action) - 1), 3, SIZE - 4))
        self.ball += 2, self.slant
        if not 2 <= self.ball[1] < SIZE - 2:
            self.slant = -self.slant
        below = bool(self.ball[0] >= SIZE - 3)
        caught = abs(self.ball[1] - self.paddle) <= 4
        return self._draw(), (1.0 if caught else -1.0) if below else 0.0, below, False, {}

    def render(self) -> Any:
        return self._draw()

    def _draw(self) -> Pixels:
        picture = np.zeros((SIZE, SIZE, 3), np.uint8)  # a new one each time: it is kept
        picture[-2:, self.paddle - 3 : self.paddle + 4] = PADDLE
        row, column = self.ball
        picture[row - 1 : row + 2, column - 1 : column + 2] = BALL
        return picture


def make(**options: Any) -> gym.Env[Any, Any]:
    """Return the game with grey pictures, of which four are stacked along the first axis."""
    return FrameStackObservation(GrayscaleObservation(Catch(**options)), FRAMES)


# The name under which other programs find it: --env own_pixels:Catch-v0.
gym.register("Catch-v0", entry_point="own_pixels:make")


class Follow(nn.Module):
    """Logits that move the paddle below the ball, from the pixels of the newest frame."""

    def forward(self, obs: Tensor) -> Tensor:
        frame = obs[:, -1].float()
        columns = torch.arange(SIZE)
        grey = [np.dot(colour, (0.2125, 0.7154, 0.0721)) for colour in (BALL, PADDLE)]
        ball, paddle = (
            ((frame - level).abs() < 2).float().mul(columns).sum((1, 2))
            / ((frame - level).abs() < 2).sum((1, 2)).clamp(min=1)
            for level in grey
        )
        ahead = ball - paddle
        return 100 * torch.stack([ahead < -1, ahead.abs() <= 1, ahead > 1], -1).float()


class Guess(nn.Module):
    """All actions alike."""

    def forward(self, obs: Tensor) -> Tensor:
        return torch.zeros(len(obs), 3)


def main() -> None:
    """Collect with two policies, and compare stores with and without ``stack``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()

    observations, _ = clusterenv.env_spaces(make)
    print(f"observations: {observations.shape}, {observations.dtype}")
    with clusterenv.connect(args.cluster) as client:
        for name, network in (("guesses", Guess()), ("follows", Follow())):
            # The function is sent to the workers, which call it once for each environment.
            with clusterenv.Collector(
                make,
                Categorical(network),
                num_envs=args.num_envs,
                horizon=64,
                cluster=client,
                seed=1,
            ) as collector:
                batches = collector.collect(args.rows)
            ends = np.concatenate([batch["reward"][batch["terminated"]] for batch in batches])
            print(f"{name}: {len(ends)} episodes, {np.mean(ends > 0):.0%} caught")

    rows = sum(batch.num_rows for batch in batches)
    for store in (ReplayStore(rows), ReplayStore(rows, stack=FRAMES)):
        for batch in batches:
            store.add(batch)
        sample = store.sample(32)
        print(f"{store.nbytes / rows:8,.0f} bytes a row; samples of {sample['obs'].shape}")


if __name__ == "__main__":
    main()
