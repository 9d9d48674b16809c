"""Zipf's gridworld: find one of many objects on one of many maps; most are rarely asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from clusterenv.errors import ConfigError
from pipelines.envs.zipf_world import (
    AGENT,
    CELL,
    DIRECTIONS,
    MOST_OBJECTS,
    SIDE,
    VIEW,
    World,
    make_world,
)

__all__ = [
    "Split",
    "ZipfGridworld",
    "ZipfGridworldVector",
    "observation",
    "task_probabilities",
]

Split = Literal["zipf", "uniform", "rare"]

MOST_MAPS = 1_000
PIXELS = VIEW * CELL
MIDDLE = slice(VIEW // 2 * CELL, (VIEW // 2 + 1) * CELL)
RENDER_SCALE = 4
OBSERVATIONS = (PIXELS, PIXELS, 3)
METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}
_ID = "clusterenv/ZipfGridworld-v0"

Pixels = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class ZipfGridworld(gym.Env[Pixels, np.int64]):
    """Walk to the object that the top-left cell of the view shows.

    Each map has 3 × 3 rooms of 3 × 3 cells. The view is a crop of 7 × 7 cells around the agent.
    An episode draws a map and, independently, one of the map's objects as its target. Stepping on
    any object ends the episode, with a reward of 1 for the target and else 0; the registered
    environment truncates it after 100 steps.

    Actions are the eight directions, clockwise from north. A diagonal step fails if its cell is a
    wall, or both cells beside it are. What a map looks like depends on its number alone.

    Parameters
    ----------
    maps
        Maps to draw from; map 0 is the most frequent one.
    objects
        Objects on each map; object 0 is sought most often.
    exponent
        Map and object of rank ``r`` have a probability in proportion to ``1 / r**exponent``.
    split
        ``"zipf"`` draws by that distribution, ``"uniform"`` draws all alike, and ``"rare"`` draws
        uniformly from the last fifth of the maps and of the objects.
    render_mode
        ``"rgb_array"`` draws the whole map, with the target in its top-left cell.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    Notes
    -----
    ``info`` has the numbers of ``map`` and ``target``, which is enough to tell how rare an episode
    is: see :func:`task_probabilities`. Not in the publication, and chosen here: doors beyond the
    first of each room are in random walls that have none; cells touch by their sides; beyond the
    map there is floor; colours and shapes.

    Examples
    --------
    >>> env = ZipfGridworld(maps=5, objects=5)
    >>> obs, info = env.reset(seed=1)
    >>> obs.shape, sorted(info)
    ((63, 63, 3), ['map', 'target'])
    """

    metadata = METADATA

    def __init__(
        self,
        maps: int = 20,
        objects: int = 20,
        exponent: float = 1.0,
        split: Split = "zipf",
        render_mode: str | None = None,
    ) -> None:
        _check(maps, objects, exponent, split, render_mode)
        self.world = make_world(maps, objects)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, OBSERVATIONS, np.uint8)
        self.action_space = spaces.Discrete(len(DIRECTIONS))
        self._draws = _Draws(maps, objects, exponent, split)
        self._map = self._target = self._cell = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Pixels, dict[str, Any]]:
        super().reset(seed=seed)
        self._map, self._target = self._draws(self.np_random)
        self._cell = int(self.world.starts[self._map])
        return self._observe(), self._info()

    def step(self, action: Any) -> tuple[Pixels, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ConfigError(f"action {action!r} is none of 0 to {len(DIRECTIONS) - 1}: step(0)")
        if self._map < 0:
            raise ConfigError("step() comes after reset(): env.reset(seed=1)")
        self._cell = int(self.world.moves[self._map, self._cell, action])
        found = int(self.world.contents[self._map, self._cell])
        reward = float(found == self._target)
        return self._observe(), reward, found >= 0, False, self._info()

    def render(self) -> Any:
        if self.render_mode is None:
            return None
        return _picture(self.world, self._map, self._target, self._cell)

    def _observe(self) -> Pixels:
        return observation(self.world, self._map, self._target, self._cell)

    def _info(self) -> dict[str, Any]:
        return {"map": self._map, "target": self._target}


class ZipfGridworldVector(VectorEnv[Pixels, Ints, npt.NDArray[Any]]):
    """Many environments of :class:`ZipfGridworld` that step together.

    Equal to a ``SyncVectorEnv`` of them, to the last bit: environment ``i`` has a generator of its
    own, seeded with ``seed + i``, so that the streams do not depend on the number of shards.

    Parameters
    ----------
    num_envs
        Environments.
    max_episode_steps
        Steps after which an episode is truncated.
    maps, objects, exponent, split, render_mode
        As for :class:`ZipfGridworld`.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    Examples
    --------
    >>> envs = ZipfGridworldVector(num_envs=3)
    >>> envs.reset(seed=1)[0].shape
    (3, 63, 63, 3)
    """

    def __init__(
        self,
        num_envs: int = 1,
        max_episode_steps: int = 100,
        maps: int = 20,
        objects: int = 20,
        exponent: float = 1.0,
        split: Split = "zipf",
        render_mode: str | None = None,
    ) -> None:
        _check(maps, objects, exponent, split, render_mode)
        _check_whole("num_envs", num_envs, None, f"gymnasium.make_vec({_ID!r}, num_envs=8)")
        _check_whole("max_episode_steps", max_episode_steps, None, "max_episode_steps=100")
        self.metadata = {**METADATA, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.max_episode_steps = max_episode_steps
        self.world = make_world(maps, objects)
        self.render_mode = render_mode
        self.single_observation_space = spaces.Box(0, 255, OBSERVATIONS, np.uint8)
        self.single_action_space = spaces.Discrete(len(DIRECTIONS))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._draws = _Draws(maps, objects, exponent, split)
        self._generators: list[np.random.Generator] = []
        self._map, self._target, self._cell, self._steps = np.zeros((4, num_envs), np.int64)
        self._over = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Pixels, dict[str, Any]]:
        if isinstance(seed, int) or seed is None:
            seeds = [None if seed is None else seed + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ConfigError(
                f"{len(seeds)} seeds for {self.num_envs} environments: reset(seed=1), or a list "
                "with one for each"
            )
        kept = self._generators or [np.random.default_rng() for _ in range(self.num_envs)]
        self._generators = [
            generator if value is None else np.random.default_rng(value)
            for value, generator in zip(seeds, kept, strict=True)
        ]
        self._over[:] = False
        self._begin(np.arange(self.num_envs))
        return self._observe(), self._info()

    def step(self, actions: Ints) -> tuple[Pixels, Any, Bools, Bools, dict[str, Any]]:
        if not self.action_space.contains(actions):
            raise ConfigError(
                f"actions {actions!r} are not {self.num_envs} whole numbers from 0 to "
                f"{len(DIRECTIONS) - 1}: envs.step(envs.action_space.sample())"
            )
        if not self._generators:
            raise ConfigError("step() comes after reset(): envs.reset(seed=1)")
        began = np.flatnonzero(self._over)
        self._cell = self.world.moves[self._map, self._cell, actions]
        self._steps += 1
        found = self.world.contents[self._map, self._cell]
        reward = (found == self._target).astype(np.float64)
        terminated, truncated = found >= 0, self._steps >= self.max_episode_steps
        if len(began):
            self._begin(began)
            reward[began], terminated[began], truncated[began] = 0.0, False, False
        self._over = terminated | truncated
        return self._observe(), reward, terminated, truncated, self._info()

    def render(self) -> tuple[Pixels, ...] | None:
        if self.render_mode is None:
            return None
        at = zip(self._map.tolist(), self._target.tolist(), self._cell.tolist(), strict=True)
        return tuple(_picture(self.world, *each) for each in at)

    def _begin(self, envs: Ints) -> None:
        for env in envs.tolist():
            self._map[env], self._target[env] = self._draws(self._generators[env])
        self._cell[envs] = self.world.starts[self._map[envs]]
        self._steps[envs] = 0

    def _observe(self) -> Pixels:
        obs = np.empty((self.num_envs, *OBSERVATIONS), np.uint8)
        rows, columns = np.divmod(self._cell, SIDE)
        at = zip(self._map.tolist(), rows.tolist(), columns.tolist(), strict=True)
        for row, where in zip(obs, at, strict=True):
            row[...] = _crop(self.world, *where)
        obs[:, MIDDLE, MIDDLE] = AGENT
        obs[:, :CELL, :CELL] = self.world.tiles[self._map, self._target]
        return obs

    def _info(self) -> dict[str, Any]:
        every = np.ones(self.num_envs, np.bool_)
        found = {"map": self._map.copy(), "target": self._target.copy()}
        return {**found, **{f"_{name}": every.copy() for name in found}}


def observation(world: World, number: int, target: int, cell: int) -> Pixels:
    """Return what an agent sees in a cell of a map while it seeks a target."""
    obs = _crop(world, number, *divmod(cell, SIDE)).copy()
    obs[MIDDLE, MIDDLE] = AGENT
    obs[:CELL, :CELL] = world.tiles[number, target]
    return obs


def task_probabilities(count: int, exponent: float, split: Split) -> npt.NDArray[np.float64]:
    """Return how often each of so many maps, or objects of a map, is drawn.

    Examples
    --------
    >>> task_probabilities(4, 1.0, "zipf").round(2).tolist()
    [0.48, 0.24, 0.16, 0.12]
    >>> task_probabilities(5, 1.0, "rare").tolist()
    [0.0, 0.0, 0.0, 0.0, 1.0]
    """
    ranks = np.arange(1, count + 1, dtype=np.float64)
    weights: npt.NDArray[np.float64]
    if split == "zipf":
        weights = ranks**-exponent
    elif split == "uniform":
        weights = np.ones(count)
    else:
        weights = (ranks > count - max(1, count // 5)).astype(np.float64)
    weights /= weights.sum()
    return weights


class _Draws:
    """Draws the map and the target of an episode."""

    def __init__(self, maps: int, objects: int, exponent: float, split: Split) -> None:
        self._ends = [
            task_probabilities(count, exponent, split).cumsum() for count in (maps, objects)
        ]
        for ends in self._ends:
            ends[-1] = 1.0  # sums of fractions may fall short of it

    def __call__(self, rng: np.random.Generator) -> tuple[int, int]:
        at_map, at_object = rng.random(2)
        maps, objects = self._ends
        return (
            int(maps.searchsorted(at_map, side="right")),
            int(objects.searchsorted(at_object, side="right")),
        )


def _crop(world: World, number: int, row: int, column: int) -> Pixels:
    """Return the view from a cell, without the agent, as a view of the map's image."""
    y, x = row * CELL, column * CELL  # the margin is half a view
    return world.images[number, y : y + PIXELS, x : x + PIXELS]


def _picture(world: World, number: int, target: int, cell: int) -> Pixels:
    """Draw a map with its agent, and the target in the wall of the top-left corner."""
    margin = VIEW // 2 * CELL
    image = world.images[number, margin:-margin, margin:-margin].copy()
    y, x = cell // SIDE * CELL, cell % SIDE * CELL
    image[y : y + CELL, x : x + CELL] = AGENT
    image[:CELL, :CELL] = world.tiles[number, target]
    return image.repeat(RENDER_SCALE, 0).repeat(RENDER_SCALE, 1)


def _check(maps: Any, objects: Any, exponent: Any, split: Any, render_mode: Any) -> None:
    _check_whole("maps", maps, MOST_MAPS, f"gymnasium.make({_ID!r}, maps=20)")
    _check_whole("objects", objects, MOST_OBJECTS, f"gymnasium.make({_ID!r}, objects=20)")
    number = isinstance(exponent, (int, float)) and not isinstance(exponent, bool)
    if not (number and 0 <= exponent <= 10):
        raise ConfigError(
            f"exponent={exponent!r} is no number from 0 to 10: "
            f"gymnasium.make({_ID!r}, exponent=1.0)"
        )
    if split not in get_args(Split):
        raise ConfigError(
            f"split={split!r} is none of {', '.join(map(repr, get_args(Split)))}: "
            f"gymnasium.make({_ID!r}, split='rare')"
        )
    if render_mode not in (None, *METADATA["render_modes"]):
        raise ConfigError(
            f"render_mode={render_mode!r} is unknown: "
            f"gymnasium.make({_ID!r}, render_mode='rgb_array')"
        )


def _check_whole(name: str, value: Any, most: int | None, right: str) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < 1 or (most is not None and value > most):
        allowed = "a whole number from 1" + ("" if most is None else f" to {most}")
        raise ConfigError(f"{name}={value!r} is not {allowed}: {right}")
