"""Tiny environments for the tests, importable on the workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SPACES: dict[str, gym.Space[Any]] = {
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box64": spaces.Box(-1, 1, (2, 2), np.float64),
    "scalar": spaces.Box(-1, 1, (), np.float32),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "discrete": spaces.Discrete(5, start=2),
    "five": spaces.Discrete(5),
    "multidiscrete": spaces.MultiDiscrete([3, 4, 5]),
    "multibinary": spaces.MultiBinary(4),
    "dict": spaces.Dict(camera=spaces.Box(0, 255, (4, 4), np.uint8), lives=spaces.Discrete(3)),
    "tuple": spaces.Tuple([spaces.Box(-1, 1, (2,), np.float32), spaces.MultiBinary(3)]),
    "nested": spaces.Dict(
        a=spaces.Tuple([spaces.Discrete(3), spaces.Dict(b=spaces.Box(0, 1, (2,), np.float64))]),
        c=spaces.MultiDiscrete([2, 2]),
    ),
    "text": spaces.Dict(mission=spaces.Text(8), grid=spaces.Box(0, 9, (2, 2), np.int64)),
}


class World(gym.Env[Any, Any]):
    """Observations, rewards, ends and infos that depend on the seed and on every action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(
        self, obs: str = "box", act: str = "discrete", render_mode: str | None = None
    ) -> None:
        self.observation_space = SPACES[obs]
        self.action_space = SPACES[act]
        self.render_mode = render_mode
        self.steps = 0
        self.colour = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.rng = self.np_random
        self.steps = 0
        info: dict[str, Any] = {"started": True}
        if options is not None:
            info["options"] = sorted(options)
        return self._observe(0), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        weight = _weight(action)
        terminated = bool(self.rng.random() < 0.1)
        truncated = not terminated and self.steps >= 9
        reward = weight + self.rng.random()
        return self._observe(weight), reward, terminated, truncated, self._info(weight)

    def _observe(self, weight: float) -> Any:
        self.observation_space.seed(int(self.rng.integers(1 << 30)) + int(weight))
        return self.observation_space.sample()

    def _info(self, weight: float) -> dict[str, Any]:
        draw = int(self.rng.integers(8))
        info: dict[str, Any] = {"weight": weight, "steps": self.steps}
        if draw < 3:
            info["nested"] = {"draw": draw, "deep": {"vector": self.rng.random(2)}}
        if draw in (2, 5):
            info["word"] = f"w{draw}"
        if draw in (3, 4):
            info["mixed"] = draw if draw == 3 else draw + 0.5
        if draw == 6:
            info["flag"] = np.bool_(True)
            info["scalar"] = np.float32(draw)
            info["nothing"] = None
        return info

    def render(self) -> Any:
        return np.full((2, 2, 3), self.steps + self.colour, np.uint8)

    def double(self, value: int, *, plus: int = 0) -> int:
        return 2 * value + plus

    def pid(self) -> int:
        return os.getpid()


def _weight(action: Any) -> float:
    if isinstance(action, dict):
        return sum(_weight(part) for part in action.values())
    if isinstance(action, tuple):
        return sum(_weight(part) for part in action)
    if isinstance(action, str):
        return float(len(action))
    return float(np.sum(np.asarray(action, np.float64)))


class Faulty(World):
    """Does something bad at a given step; one that hangs leaves a file in ``signs`` first."""

    def close(self) -> None:
        if self.fault == "close":
            raise RuntimeError("the window is gone already")

    def __init__(self, fault: str, at: int = 2, signs: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault = fault
        self.at = at
        self.signs = signs
        if fault == "make":
            raise ValueError("no such level: 99")
        if fault == "import":
            raise ModuleNotFoundError("No module named 'doom'")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        if self.steps < self.at:
            return result
        if self.fault == "raise":
            raise RuntimeError("the simulator diverged")
        if self.fault == "shape":
            return (np.zeros(2, np.float32), *result[1:])
        if self.fault == "exit":
            raise SystemExit(1)
        if self.fault == "die":
            os._exit(3)
        if self.fault == "hang":
            if self.signs is not None:
                Path(self.signs, str(os.getpid())).touch()
            while True:
                time.sleep(0.01)
        return result


class Gated(World):
    """Waits when it is made, in ``step``, ``reset`` or ``wait`` while the file ``gate`` is there.

    Beside it, each environment that waits leaves a file of its own in the same directory.
    """

    def __init__(self, gate: str, index: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gate = Path(gate)
        self.sign = self.gate.with_name(f"waits-{index}")
        self.wait()

    def wait(self) -> int:
        while self.gate.exists():
            self.sign.touch()
            time.sleep(0.005)
        return self.steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.wait()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.wait()
        return super().step(action)


class LevelError(ValueError):
    """An exception that pickle cannot make again: its arguments are not its ``args``."""

    def __init__(self, level: int, name: str) -> None:
        super().__init__(f"no such level: {level}")
        self.level = level
        self.name = name


class Raises(World):
    """Raises an exception in ``make``, ``reset``, ``step`` or ``work``, whichever it is told."""

    def __init__(self, where: str, kind: type[Exception] = Exception, *args: Any) -> None:
        super().__init__()
        self.where, self.kind, self.args = where, kind, args
        self._raise("make")

    def _raise(self, where: str) -> None:
        if where == self.where:
            raise self.kind(*self.args)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._raise("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._raise("step")
        return super().step(action)

    def work(self) -> None:
        self._raise("work")


class CountsSteps(gym.Env[Any, Any]):
    """Observes how many steps were taken; the action is the reward, and a length ends episodes."""

    observation_space = spaces.Discrete(10)
    action_space = spaces.Discrete(5)

    def __init__(self, length: int = 3) -> None:
        self.length = length
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return 0, {"fresh": True}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.steps, float(action), self.steps == self.length, False, {"taken": self.steps}


class Word(gym.Space[str]):
    """A space that Gymnasium does not know."""

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "word"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Word)


class Talker(gym.Env[Any, Any]):
    """Repeats what it is told."""

    observation_space = Word()
    action_space = Word()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "silence", {}

    def step(self, action: Any) -> Any:
        return f"heard {action}", 0.0, False, False, {}


class Masked(gym.Env[Any, Any]):
    """Only one action is allowed, another one each step; said in the way of choice.

    With ``final=False``, nothing is allowed when an episode is over.
    """

    def __init__(self, way: str, final: bool = True) -> None:
        self.way = way
        self.final = final
        self.action_space = gym.spaces.Discrete(4)
        box = gym.spaces.Box(0, 100, (1,), np.float32)
        mask = gym.spaces.MultiBinary(4)
        self.observation_space = box if way == "info" else gym.spaces.Dict(x=box, action_mask=mask)

    def _now(self) -> tuple[Any, dict[str, Any]]:
        mask = np.zeros(4, np.int8)
        mask[self.t % 4] = self.final or not self.over
        x = np.full(1, self.t, np.float32)
        return (
            (x, {"action_mask": mask})
            if self.way == "info"
            else ({"x": x, "action_mask": mask}, {})
        )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = seed or 0
        self.over = False
        return self._now()

    def step(self, action: Any) -> Any:
        assert action == self.t % 4, "a forbidden action"
        self.t += 1
        self.over = self.t % 7 == 0
        obs, info = self._now()
        return obs, 1.0, False, self.over, info


class Slow(gym.Env[Any, Any]):
    """CartPole's spaces; a step takes some milliseconds, and episodes may have a length."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, seconds: float = 0.004, length: int | None = None) -> None:
        self.seconds = seconds
        self.length = length
        self.taken = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.seconds)
        self.taken += 1
        return self.observation_space.sample(), 1.0, self.taken == self.length, False, {}


class Labelled(gym.Env[Any, Any]):
    """Observations say where they are from: first seed, episode and step."""

    observation_space = spaces.Box(0, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 5) -> None:
        self.length = length
        self.episode = -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.first_seed = self.first_seed if seed is None else seed
        self.episode += 1
        self.taken = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        over = self.taken == self.length
        return self._observe(), 1.0, over, False, {}

    def _observe(self) -> Any:
        return np.array([self.first_seed, self.episode, self.taken], np.float32)


class Wide(gym.Env[Any, Any]):
    """Observations of a quarter of a megabyte, made at once."""

    observation_space = spaces.Box(0, 255, (1 << 18,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.obs = np.zeros(1 << 18, np.uint8)
        return self.obs, {}

    def step(self, action: Any) -> Any:
        return self.obs, 0.0, False, False, {}


class Signs(gym.Env[Any, Any]):
    """Eight steps; 1 for the action that a sign in the image, a number and a door ask for."""

    image = gym.spaces.Box(0, 255, (3, 16, 16), np.uint8)

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            car=gym.spaces.Dict(speed=gym.spaces.Box(-1, 1, (2,), np.float64)),
            door=gym.spaces.Discrete(3, start=1),
            camera=self.image,
        )
        self.action_space = gym.spaces.Discrete(2)

    def _see(self) -> dict[str, Any]:
        speed, door = self.np_random.uniform(-1, 1, 2), int(self.np_random.integers(1, 4))
        shown = self.np_random.random()
        self._right = int(speed[0] + (door - 2) + (2 * shown - 1) > 0)
        camera = np.full(self.image.shape, int(255 * shown), np.uint8)
        return {"car": {"speed": speed}, "door": door, "camera": camera}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._left = 8
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = float(int(action) == self._right)
        self._left -= 1
        return self._see(), reward, False, self._left == 0, {}


gym.register(id="Signs-v0", entry_point="worlds:Signs")
