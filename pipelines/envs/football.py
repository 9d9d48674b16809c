"""Google Research Football's academy tasks, with the checkpoint reward and stacked frames.

EnvPool simulates them and steps a whole batch in C++, so what a wrapper would add to each
environment is computed here for all of them at once.
"""

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

__all__ = [
    "CHECKPOINTS",
    "CHECKPOINT_REWARD",
    "EASIEST",
    "TASKS",
    "Checkpoints",
    "Football",
    "FootballVector",
    "Reward",
    "ball_distance",
    "env_id",
]

TASKS = (
    "academy_3_vs_1_with_keeper",
    "academy_corner",
    "academy_counterattack_easy",
    "academy_counterattack_hard",
    "academy_empty_goal",
    "academy_empty_goal_close",
    "academy_pass_and_shoot_with_keeper",
    "academy_run_pass_and_shoot_with_keeper",
    "academy_run_to_score",
    "academy_run_to_score_with_keeper",
    "academy_single_goal_versus_lazy",
)
"""EnvPool's names, without ``gfootball/`` and version."""

Reward = Literal["checkpoint", "score"]

CHECKPOINTS = 10
CHECKPOINT_REWARD = 0.1
_DISTANCES = 0.99 - 0.8 / (CHECKPOINTS - 1) * np.arange(CHECKPOINTS)  # from the goal, descending

PLANES, HEIGHT, WIDTH = 4, 72, 96  # planes: our team, theirs, ball, active player
BALL = 2
ACTIONS = 19
MOST_FRAMES = 16
RENDER_SCALE = 6, 10  # rows and columns: the pitch is 2.25 times as wide as high
METADATA: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}
PITCH = (38, 105, 46)
PLANE_COLOURS = ((90, 150, 255), (230, 70, 70), (255, 255, 255), (255, 225, 60))
DRAWN = (0, 1, 3, BALL)  # the ball last, on top of the player who has it
INFOS = ("score", "ball_owned_team", "steps_left")

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def env_id(task: str) -> str:
    """Return the id under which a task is registered.

    Examples
    --------
    >>> env_id("academy_empty_goal_close")
    'clusterenv/FootballEmptyGoalClose-v0'
    """
    words = task.removeprefix("academy_").split("_")
    return f"clusterenv/Football{''.join(word.capitalize() for word in words)}-v0"


EASIEST = tuple(
    env_id(task)
    for task in ("academy_empty_goal_close", "academy_empty_goal", "academy_run_to_score")
)
"""Ids of the tasks that learners have presets for."""


class Checkpoints:
    """The CHECKPOINT reward of Kurach et al. (2020), for many environments at once.

    Ten checkpoints lie at the distances 0.99, 0.90, …, 0.19 from the opponent's goal. Each pays
    0.1 the first time in an episode that our team has the ball at most so far from the goal. A
    goal pays 1 and the checkpoints that are left, so an episode with one goal pays 2.

    Examples
    --------
    >>> checkpoints = Checkpoints(2)
    >>> ours = np.array([True, False])
    >>> checkpoints(np.zeros(2), np.array([0.85, 0.85]), ours).round(1).tolist()
    [0.2, 0.0]
    >>> checkpoints(np.array([1.0, 0.0]), np.array([1.0, 0.5]), ours).round(1).tolist()
    [1.8, 0.0]
    """

    def __init__(self, num_envs: int) -> None:
        self.passed = np.zeros(num_envs, np.int64)
        """How many each environment has passed in its episode."""

    def begin(self, envs: Bools) -> None:
        """Forget the checkpoints of environments whose episode begins."""
        self.passed[envs] = 0

    def __call__(self, scored: Floats, distance: Floats, owned: Bools) -> Floats:
        """Return the rewards of a step.

        Parameters
        ----------
        scored
            Change of the score: 1 for a goal of ours, -1 for one of theirs.
        distance
            From the ball to the opponent's goal.
        owned
            Whether our team has the ball.
        """
        reached = (distance[:, None] <= _DISTANCES).sum(1)
        passed = np.where(owned, np.maximum(self.passed, reached), self.passed)
        passed[scored == 1] = CHECKPOINTS
        reward: Floats = scored + CHECKPOINT_REWARD * (passed - self.passed)
        self.passed = passed
        return reward


def ball_distance(ball: Pixels) -> Floats:
    """Return the ball's distance from the opponent's goal at (1, 0), from its plane.

    The pitch is 2 wide and 2 / 2.25 high. A pixel is 0.021 × 0.012, and the middle of the ball's
    pixel is meant: at most 0.012 is wrong while the ball is on the pitch.

    Parameters
    ----------
    ball
        ``[n, 72, 96]``, not 0 where the ball is.

    Examples
    --------
    >>> plane = np.zeros((1, 72, 96), np.uint8)
    >>> plane[0, 36, 48] = 255  # the middle of the pitch
    >>> ball_distance(plane).round(2).tolist()
    [0.99]
    """
    row, column = np.divmod(ball.reshape(len(ball), -1).argmax(1), WIDTH)
    x = (column + 0.5) / WIDTH * 2 - 1
    y = ((row + 0.5) / HEIGHT * 2 - 1) / 2.25
    distance: Floats = np.hypot(x - 1, y)
    return distance


class FootballVector(VectorEnv[Pixels, Ints, npt.NDArray[Any]]):
    """A batch of one of EnvPool's academy tasks.

    An observation is a stack of frames, newest last, ``[frames, planes, 72, 96]``: uint8, 255
    where a player of ours, one of theirs, the ball, or the active player is. The first frame of an
    episode fills its stack.

    Parameters
    ----------
    num_envs
        Environments.
    task
        One of :data:`TASKS`.
    reward
        ``"checkpoint"`` for the change of the score and :class:`Checkpoints`, ``"score"`` for the
        change alone.
    stack
        Frames of an observation.
    num_threads
        Threads that simulate.
    max_episode_steps
        EnvPool truncates an episode after one step more; by default, 400, and 3,000 of
        ``academy_single_goal_versus_lazy``.
    render_mode
        ``"rgb_array"`` draws the newest frame.

    Raises
    ------
    ConfigError
        If an argument is invalid.
    ImportError
        If EnvPool is not installed.

    Notes
    -----
    ``info`` has ``score``, ``ball_owned_team`` (0 is ours, -1 is neither side), ``steps_left`` and
    ``checkpoints``, the number passed. Seeds are those of EnvPool: environment ``i`` gets
    ``seed + i``, and ``reset(seed=…)`` makes a new pool. The original reward also asks that the
    active player is the one with the ball; EnvPool's info does not number the active player, so
    any player of ours counts.
    """

    def __init__(
        self,
        num_envs: int = 1,
        task: str = "academy_empty_goal_close",
        reward: Reward = "checkpoint",
        stack: int = 4,
        num_threads: int = 1,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        _check(task, reward, render_mode)
        _check_whole("num_envs", num_envs, 2**20, task, 8)
        _check_whole("stack", stack, MOST_FRAMES, task, 4)
        _check_whole("num_threads", num_threads, 2**10, task, 1)
        self._options: dict[str, Any] = {"num_envs": num_envs, "num_threads": num_threads}
        if max_episode_steps is not None:
            _check_whole("max_episode_steps", max_episode_steps, 2**20, task, 400)
            self._options["max_episode_steps"] = max_episode_steps
        self._envpool = _import()
        self.metadata = {**METADATA, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.render_mode = render_mode
        self.single_observation_space = spaces.Box(0, 255, (stack, PLANES, HEIGHT, WIDTH), np.uint8)
        self.single_action_space = spaces.Discrete(ACTIONS)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._task, self._reward = task, reward
        self._checkpoints = Checkpoints(num_envs)
        self._pool: Any = None  # made by the first reset, which has the seeds: it takes a second
        self._obs = np.zeros(self.observation_space.shape or (), np.uint8)
        self._over = np.zeros(num_envs, np.bool_)

    def reset(
        self,
        *,
        seed: int | Sequence[int] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Pixels, dict[str, Any]]:
        if seed is not None or self._pool is None:
            self.close_extras()
            self._pool = self._envpool.make(
                f"gfootball/{self._task}-v1",
                env_type="gymnasium",
                **self._options,
                seed=self._seeds(seed),
            )
        frames, info = self._pool.reset()
        self._over[:] = False
        everyone = np.ones(self.num_envs, np.bool_)
        self._checkpoints.begin(everyone)
        self._push(frames, everyone)
        return self._obs.copy(), self._info(info)

    def step(self, actions: Ints) -> tuple[Pixels, Floats, Bools, Bools, dict[str, Any]]:
        if not self.action_space.contains(actions):
            raise ConfigError(
                f"actions {actions!r} are not {self.num_envs} whole numbers from 0 to "
                f"{ACTIONS - 1}: envs.step(envs.action_space.sample())"
            )
        if self._pool is None:
            raise ConfigError("step() comes after reset(): envs.reset(seed=1)")
        began = self._over
        frames, scored, terminated, truncated, info = self._pool.step(actions.astype(np.int32))
        self._push(frames, began)
        self._checkpoints.begin(began)
        reward = scored.astype(np.float64)
        if self._reward == "checkpoint":
            owned = (info["ball_owned_team"] == 0) & ~began
            reward = self._checkpoints(reward, ball_distance(self._obs[:, -1, BALL]), owned)
        self._over = terminated | truncated
        return self._obs.copy(), reward, terminated, truncated, self._info(info)

    def render(self) -> tuple[Pixels, ...] | None:
        if self.render_mode is None:
            return None
        return tuple(_picture(frame) for frame in self._obs[:, -1])

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _seeds(self, seed: int | Sequence[int] | None) -> list[int]:
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        if isinstance(seed, (int, np.integer)):
            seed = [int(seed) + env for env in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise ConfigError(
                f"{len(seed)} seeds for {self.num_envs} environments: reset(seed=1), or a list "
                "with one for each"
            )
        return [value % 2**31 for value in seed]  # EnvPool's are int32

    def _push(self, frames: Pixels, began: Bools) -> None:
        """Append frames ``[n, 72, 96, 4]`` to the stacks, and fill those that begin."""
        newest = np.moveaxis(frames, -1, 1)
        self._obs[:, :-1] = self._obs[:, 1:]
        self._obs[:, -1] = newest
        if began.any():
            self._obs[began] = newest[began][:, None]

    def _info(self, info: dict[str, Any]) -> dict[str, Any]:
        kept = {name: np.asarray(info[name]).copy() for name in INFOS}
        return {**kept, "checkpoints": self._checkpoints.passed.copy()}


class Football(gym.Env[Pixels, np.int64]):
    """One environment of :class:`FootballVector`, for ``gymnasium.make`` and the engine ``auto``.

    Parameters
    ----------
    task, reward, stack, render_mode
        As for :class:`FootballVector`.
    """

    metadata = METADATA

    def __init__(
        self,
        task: str = "academy_empty_goal_close",
        reward: Reward = "checkpoint",
        stack: int = 4,
        render_mode: str | None = None,
    ) -> None:
        self._envs = FootballVector(1, task, reward, stack, render_mode=render_mode)
        self.render_mode = render_mode
        self.observation_space = self._envs.single_observation_space
        self.action_space = self._envs.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Pixels, dict[str, Any]]:
        super().reset(seed=seed)
        obs, info = self._envs.reset(seed=seed)
        return obs[0], _first(info)

    def step(self, action: Any) -> tuple[Pixels, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._envs.step(np.array([action]))
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), _first(info)

    def render(self) -> Any:
        pictures = self._envs.render()
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        self._envs.close()


def _first(info: dict[str, Any]) -> dict[str, Any]:
    return {
        name: int(values[0]) if values.ndim == 1 else values[0] for name, values in info.items()
    }


def _picture(frame: Pixels) -> Pixels:
    """Draw a frame ``[planes, 72, 96]``."""
    image = np.full((HEIGHT, WIDTH, 3), PITCH, np.uint8)
    for plane in DRAWN:
        image[frame[plane] > 0] = PLANE_COLOURS[plane]
    high, wide = RENDER_SCALE
    return image.repeat(high, 0).repeat(wide, 1)


def _import() -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ImportError("football needs EnvPool: pip install 'clusterenv[envpool]'") from error
    return envpool


def _check(task: Any, reward: Any, render_mode: Any) -> None:
    if task not in TASKS:
        raise ConfigError(
            f"task={task!r} is none of {', '.join(TASKS)}: gymnasium.make({env_id(TASKS[5])!r})"
        )
    if reward not in get_args(Reward):
        raise ConfigError(
            f"reward={reward!r} is neither 'checkpoint' nor 'score': "
            f"gymnasium.make({env_id(task)!r}, reward='score')"
        )
    if render_mode not in (None, *METADATA["render_modes"]):
        raise ConfigError(
            f"render_mode={render_mode!r} is unknown: "
            f"gymnasium.make({env_id(task)!r}, render_mode='rgb_array')"
        )


def _check_whole(name: str, value: Any, most: int, task: str, right: int) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most:
        raise ConfigError(
            f"{name}={value!r} is not a whole number from 1 to {most}: "
            f"gymnasium.make_vec({env_id(task)!r}, {name}={right})"
        )
