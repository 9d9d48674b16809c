"""What users of Gymnasium's vector environments rely on, asked of all of them alike.

Every test runs on ``SyncVectorEnv``, ``AsyncVectorEnv`` and ``ClusterEnv``, or on those that have
the method. ``test_vector.py`` compares results to the last bit; here it is behaviour and
exceptions. (``AsyncVectorEnv`` warns of every exception, and warnings are errors in these tests.)
"""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from compare import assert_same
from distributed import Client
from gymnasium import spaces
from gymnasium.error import (
    AlreadyPendingCallError,
    ClosedEnvironmentError,
    NoAsyncCallError,
    ResetNeeded,
)
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces, batch_space
from worlds import SPACES, CountsSteps, Gated, LevelError, Raises, Talker, World

import clusterenv

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Make = Callable[..., Any]
"""Makes a vector environment of factories."""

EVERY = ["sync", "async", "cluster"]
WAITING = ["async", "cluster"]


@pytest.fixture
def make(client: Client, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Return what makes vector environments of the kind that a test is run on."""
    made: list[Any] = []

    def of(factories: Sequence[Callable[[], gym.Env[Any, Any]]], **options: Any) -> Any:
        if request.param == "sync":
            envs: Any = SyncVectorEnv(factories, **options)
        elif request.param == "async":  # forked from a process that has one thread
            envs = AsyncVectorEnv(factories, context="forkserver", **options)
        else:
            shards = min(2, len(factories))
            envs = clusterenv.make_vec(
                factories, len(factories), shards=shards, cluster=client, **options
            )
        made.append(envs)
        return envs

    yield of
    for envs in made:
        envs.close()


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", kinds, indirect=True)


# What there is to see


@on(*EVERY)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_attributes(make: Make, mode: AutoresetMode) -> None:
    world = World()
    for given in (mode, mode.value):
        envs = make([partial(World, render_mode="rgb_array")] * 3, autoreset_mode=given)
        assert isinstance(envs, gym.vector.VectorEnv)
        assert envs.num_envs == 3
        assert envs.autoreset_mode is mode
        assert envs.metadata == {**World.metadata, "autoreset_mode": mode}
        assert envs.render_mode == "rgb_array"
        assert envs.single_observation_space == world.observation_space
        assert envs.observation_space == batch_space(world.observation_space, 3)
        assert envs.single_action_space == world.action_space
        assert envs.action_space == batch_space(world.action_space, 3)
        assert envs.unwrapped is envs
        assert not envs.closed
    assert "autoreset_mode" not in World.metadata


@on(*EVERY)
@pytest.mark.parametrize("space", ["box", "discrete", "dict", "tuple", "nested"])
def test_results_are_of_the_spaces_and_dtypes_that_were_promised(make: Make, space: str) -> None:
    envs = make([partial(World, obs=space, act=space)] * 3)
    obs, info = envs.reset(seed=1)
    assert obs in envs.observation_space
    assert isinstance(info, dict)
    envs.action_space.seed(1)
    obs, reward, terminated, truncated, info = envs.step(envs.action_space.sample())
    assert obs in envs.observation_space
    for array, dtype in ((reward, np.float64), (terminated, np.bool_), (truncated, np.bool_)):
        assert isinstance(array, np.ndarray)
        assert array.shape == (3,)
        assert array.dtype == dtype
    assert isinstance(info, dict)


@on(*EVERY)
def test_actions_may_be_a_list_with_one_of_each_environment(make: Make) -> None:
    envs = make([CountsSteps] * 3)
    envs.reset()
    single = [envs.single_action_space.sample() for _ in range(3)]
    assert envs.step(single)[1].tolist() == [float(action) for action in single]


@on(*EVERY)
def test_action_spaces_that_are_seeded_alike_sample_alike(make: Make) -> None:
    first, second = (make([World] * 2).action_space for _ in range(2))
    first.seed(4)
    second.seed(4)
    for _ in range(10):
        assert_same(first.sample(), second.sample())


@on("sync", "cluster")  # shared memory knows no such spaces
def test_a_space_that_gymnasium_does_not_know(make: Make) -> None:
    envs = make([Talker] * 3)
    assert isinstance(envs.observation_space, spaces.Tuple)
    assert envs.reset()[0] == ("silence",) * 3
    assert envs.step(("a", "b", "c"))[0] == ("heard a", "heard b", "heard c")


# Episodes that end


@on(*EVERY)
def test_autoreset_next_step(make: Make) -> None:
    envs = make(
        [partial(CountsSteps, n) for n in (2, 3, 3)], autoreset_mode=AutoresetMode.NEXT_STEP
    )
    assert envs.reset()[0].tolist() == [0, 0, 0]
    expected = [
        ([1, 1, 1], [1, 2, 3], [False, False, False]),
        ([2, 2, 2], [1, 2, 3], [True, False, False]),
        ([0, 3, 3], [0, 2, 3], [False, True, True]),  # the action is not used
        ([1, 0, 0], [1, 0, 0], [False, False, False]),
    ]
    for obs, reward, ended in expected:
        result = envs.step([1, 2, 3])
        assert [part.tolist() for part in result[:4]] == [obs, reward, ended, [False] * 3]
        assert "final_obs" not in result[4]
    assert result[4]["_fresh"].tolist() == [False, True, True]
    assert result[4]["_taken"].tolist() == [True, False, False]


@on(*EVERY)
def test_autoreset_same_step(make: Make) -> None:
    envs = make(
        [partial(CountsSteps, n) for n in (2, 3, 3)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    assert envs.reset()[0].tolist() == [0, 0, 0]
    expected = [
        ([1, 1, 1], [False, False, False], None),
        ([0, 2, 2], [True, False, False], [2, None, None]),
        ([1, 0, 0], [False, True, True], [None, 3, 3]),
        ([0, 1, 1], [True, False, False], [2, None, None]),
    ]
    for obs, ended, final in expected:
        result = envs.step([1, 2, 3])
        assert [part.tolist() for part in result[:3]] == [obs, [1, 2, 3], ended]
        if final is None:
            assert "final_obs" not in result[4]
        else:
            assert result[4]["final_obs"].tolist() == final
            assert result[4]["_final_obs"].tolist() == result[4]["_final_info"].tolist() == ended
            lengths = [length or 0 for length in final]
            assert result[4]["final_info"]["taken"].tolist() == lengths
            assert result[4]["_fresh"].tolist() == ended


@on(*EVERY)
def test_autoreset_disabled(make: Make) -> None:
    envs = make([partial(CountsSteps, n) for n in (1, 2, 2)], autoreset_mode=AutoresetMode.DISABLED)
    envs.reset()
    expected = [([1, 1, 1], [True, False, False], [0, 1, 1]), ([1, 2, 2], [True] * 3, [0, 0, 0])]
    for obs, ended, following in expected:
        result = envs.step([1, 2, 3])
        assert [part.tolist() for part in result[:3]] == [obs, [1, 2, 3], ended]
        obs, info = envs.reset(options={"reset_mask": result[2]})
        assert obs.tolist() == following
        assert info["_fresh"].tolist() == ended


# Seeds and options


@on(*EVERY)
def test_seeds_are_counted_up_and_stay(make: Make) -> None:
    envs = make([World] * 3)
    assert len(set(envs.np_random_seed)) == 3  # also before any was given
    envs.reset(seed=42)
    assert envs.np_random_seed == (42, 43, 44)
    envs.reset()
    assert envs.np_random_seed == (42, 43, 44)
    envs.reset(seed=[5, None, 7])
    assert envs.np_random_seed == (5, 43, 7)
    assert len({generator.random() for generator in envs.np_random}) == 3


@on(*EVERY)
def test_a_reset_mask_resets_those_environments_alone(make: Make) -> None:
    envs = make([World] * 3, autoreset_mode=AutoresetMode.DISABLED)
    first, _ = envs.reset(seed=[0, 1, 2])
    before, *_ = envs.step([2, 3, 4])
    mask = np.array([True, True, False])
    obs, _ = envs.reset(seed=[0, 1, 0], options={"reset_mask": mask})
    assert_same(obs[:2], first[:2])
    assert_same(obs[2], before[2])


@on(*EVERY)
@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_first_reset_whose_mask_has_all_environments_is_a_reset(
    make: Make, mode: AutoresetMode
) -> None:
    masked, whole = (make([World] * 3, autoreset_mode=mode) for _ in range(2))
    options = {"reset_mask": np.ones(3, np.bool_), "level": 2}
    assert_same(masked.reset(seed=4, options=options), whole.reset(seed=4, options={"level": 2}))
    for _ in range(12):
        actions = whole.action_space.sample()
        if mode is not AutoresetMode.DISABLED:
            assert_same(masked.step(actions), whole.step(actions))


@on(*EVERY)
@pytest.mark.parametrize(
    ("mask", "kind"),
    [
        (np.array([1, 1, 0]), TypeError),
        (np.array([1.0, 1.0, 0.0]), TypeError),
        ([True, True, False], TypeError),
        (np.array([True]), ValueError),
        (np.array([True, True, False, False]), ValueError),
        (np.array([[True, True, False]]), ValueError),
        (np.array([False, False, False]), ValueError),
    ],
    ids=repr,
)
def test_a_wrong_reset_mask(make: Make, mask: Any, kind: type[Exception]) -> None:
    envs = make([World] * 3, autoreset_mode=AutoresetMode.DISABLED)
    envs.reset(seed=1)
    with pytest.raises(kind):
        envs.reset(options={"reset_mask": mask})
    envs.step([2, 2, 2])


@on(*EVERY)
def test_a_wrong_number_of_seeds(make: Make) -> None:
    envs = make([World] * 3)
    with pytest.raises(ValueError, match="3"):
        envs.reset(seed=[1, 2])


# The environments' own attributes


@on(*EVERY)
def test_call_get_attr_set_attr_and_render(make: Make) -> None:
    envs = make([partial(World, render_mode="rgb_array")] * 3)
    envs.reset(seed=1)
    assert envs.call("double", 4, plus=1) == (9, 9, 9)
    assert envs.call("steps") == envs.get_attr("steps") == (0, 0, 0)
    envs.set_attr("colour", [1, 2, 3])
    assert envs.get_attr("colour") == (1, 2, 3)
    envs.set_attr("colour", (4, 5, 6))
    assert envs.get_attr("colour") == (4, 5, 6)
    envs.set_attr("colour", 7)
    assert envs.get_attr("colour") == (7, 7, 7)
    frames = envs.render()
    assert isinstance(frames, tuple)
    assert [frame.shape for frame in frames] == [(2, 2, 3)] * 3
    with pytest.raises(ValueError, match="values"):
        envs.set_attr("colour", [1, 2])


@on("sync", "cluster")
def test_an_attribute_that_is_not_there_is_an_error_and_no_more(make: Make) -> None:
    envs = make([World] * 3)
    envs.reset(seed=1)
    for call in (envs.get_attr, envs.call):
        with pytest.raises(AttributeError, match="nonsense"):
            call("nonsense")
    assert not hasattr(envs, "nonsense")
    envs.step([2, 2, 2])


@on("cluster")
def test_call_is_no_way_around_reset_step_and_close(make: Make) -> None:
    envs = make([World] * 2)
    for name in ("reset", "step", "close"):
        with pytest.raises(ValueError, match=name):
            envs.call(name)


# Exceptions


@on("sync", "cluster")
@pytest.mark.parametrize(
    ("where", "error", "args", "kind"),
    [
        ("make", LevelError, (99, "cave"), ValueError),
        ("reset", LevelError, (99, "cave"), ValueError),
        ("step", LevelError, (99, "cave"), ValueError),
        ("work", LevelError, (99, "cave"), ValueError),
        ("reset", ValueError, ("no such level",), ValueError),
        ("step", KeyError, ("level",), LookupError),
        ("make", FileNotFoundError, (2, "no such level"), OSError),
        ("step", TimeoutError, ("the server is slow",), TimeoutError),
        ("step", AssertionError, ("no such level",), AssertionError),
        ("step", ResetNeeded, ("first",), gym.error.Error),
    ],
)
def test_an_environments_own_exception_is_caught_as_what_it_is(
    make: Make, where: str, error: type[Exception], args: tuple[Any, ...], kind: type[Exception]
) -> None:
    def use() -> None:
        good, bad = partial(Raises, "never"), partial(Raises, where, error, *args)
        envs = make([good, good, bad])
        envs.reset(seed=1)
        envs.step([2, 2, 2])
        envs.call("work")

    with pytest.raises(kind) as caught:
        use()
    if isinstance(caught.value, clusterenv.errors.ClusterEnvError):
        assert isinstance(caught.value, clusterenv.errors.EnvError)
        assert re.search(r"environment.* of shard 1 \(environments 2–2\)", str(caught.value))
        assert 'worlds.py", line' in str(caught.value)
        assert type(caught.value.__cause__) is error
    assert isinstance(caught.value, error)
    if isinstance(caught.value, LevelError):
        assert (caught.value.level, caught.value.name) == (99, "cave")


@on("sync", "cluster")
def test_an_exception_that_only_the_script_knows_is_caught_as_what_it_is(make: Make) -> None:
    class Diverged(Exception):
        def __init__(self, *, speed: float) -> None:
            super().__init__("too fast")
            self.speed = speed

    class Fast(World):
        def step(self, action: Any) -> Any:
            raise Diverged(speed=9.5)

    envs = make([Fast] * 2)
    envs.reset(seed=1)
    with pytest.raises(Diverged) as caught:
        envs.step([2, 2])
    assert caught.value.speed == 9.5


@on("sync", "cluster")
@pytest.mark.parametrize("other", ["image", "five"])
def test_different_spaces_are_a_runtime_error(make: Make, other: str) -> None:
    for which in ({"obs": other}, {"act": other}):
        for factories in (
            [World, partial(World, **which), World],
            [World, partial(World, **which)],
        ):
            with pytest.raises(RuntimeError, match="space"):
                make(factories)


@on("sync", "cluster")
def test_what_is_no_batch_of_actions_is_a_type_error_and_a_wrong_number_a_value_error(
    make: Make,
) -> None:
    envs = make([CountsSteps] * 3)
    envs.reset()
    for single in (0, None):
        with pytest.raises(TypeError):
            envs.step(single)
    with pytest.raises(ValueError, match=r"."):
        envs.step([0, 0])


@on(*EVERY)
def test_closing_twice_is_harmless(make: Make) -> None:
    envs = make([World] * 2)
    envs.close()
    assert envs.closed
    envs.close()


@on(*WAITING)
def test_everything_else_is_refused_after_close(make: Make) -> None:
    envs = make([World] * 2)
    envs.close()
    for call in (
        envs.reset,
        partial(envs.step, [2, 2]),
        envs.reset_async,
        envs.reset_wait,
        partial(envs.step_async, [2, 2]),
        envs.step_wait,
        partial(envs.call_async, "colour"),
        envs.call_wait,
        partial(envs.get_attr, "colour"),
        partial(envs.set_attr, "colour", 1),
        envs.render,
    ):
        with pytest.raises(ClosedEnvironmentError):
            call()


# Calls that do not wait


@on(*WAITING)
def test_asynchronous_calls_return_what_the_others_do(make: Make) -> None:
    envs, theirs = make([World] * 3), SyncVectorEnv([World] * 3)
    envs.reset_async(seed=1)
    assert_same(envs.reset_wait(), theirs.reset(seed=1))
    for actions in ([2, 3, 4], [4, 3, 2]):
        envs.step_async(actions)
        assert_same(envs.step_wait(timeout=60), theirs.step(actions))
    envs.call_async("double", 4, plus=1)
    assert envs.call_wait(timeout=60) == (9, 9, 9)
    envs.reset_async(5, {"level": 3})
    assert_same(envs.reset_wait(timeout=60), theirs.reset(seed=5, options={"level": 3}))


@on(*WAITING)
def test_only_what_was_begun_can_be_waited_for(make: Make) -> None:
    envs = make([World] * 2)
    envs.reset()
    for name in ("reset", "step", "call"):
        with pytest.raises(NoAsyncCallError, match=f"`{name}_wait` without") as caught:
            getattr(envs, f"{name}_wait")()
        assert caught.value.name == name
    envs.step_async([2, 2])
    for name in ("reset", "call"):
        with pytest.raises(NoAsyncCallError, match=f"`{name}_wait` without"):
            getattr(envs, f"{name}_wait")()
    envs.step_wait()


@on(*WAITING)
@pytest.mark.parametrize("pending", ["reset", "step", "call"])
def test_nothing_else_can_begin_meanwhile(make: Make, pending: str) -> None:
    envs = make([World] * 2)
    envs.reset()
    arguments = {"reset": (), "step": ([2, 2],), "call": ("colour",)}
    getattr(envs, f"{pending}_async")(*arguments[pending])
    for call in (
        envs.reset,
        partial(envs.step, [2, 2]),
        partial(envs.call, "colour"),
        envs.reset_async,
        partial(envs.step_async, [2, 2]),
        partial(envs.call_async, "colour"),
        partial(envs.get_attr, "colour"),
        partial(envs.set_attr, "colour", 1),
        envs.render,
    ):
        with pytest.raises(AlreadyPendingCallError, match=f"pending call to `{pending}`") as caught:
            call()
        assert caught.value.name == pending
    getattr(envs, f"{pending}_wait")()
    envs.step([2, 2])


@on(*WAITING)
def test_close_while_a_call_is_under_way_warns(make: Make) -> None:
    envs = make([World] * 2)
    envs.reset()
    envs.step_async([2, 2])
    with pytest.warns(UserWarning, match="`close` while waiting for a pending call to `step`"):
        envs.close()
    assert envs.closed


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file for which :class:`Gated` environments wait until it is gone."""
    gate = tmp_path / "gate"
    yield gate
    gate.unlink(missing_ok=True)


def gated(gate: Path, n: int) -> list[Callable[[], gym.Env[Any, Any]]]:
    return [partial(Gated, str(gate), index) for index in range(n)]


@on(*WAITING)
@pytest.mark.parametrize("pending", ["reset", "step", "call"])
def test_a_timeout_is_an_error_after_which_nothing_is_pending(
    make: Make, gate: Path, pending: str
) -> None:
    envs = make(gated(gate, 2))
    envs.reset()
    gate.touch()
    arguments = {"reset": (), "step": ([2, 2],), "call": ("wait",)}
    getattr(envs, f"{pending}_async")(*arguments[pending])
    for timeout in (0, 0.02):
        with pytest.raises((multiprocessing.TimeoutError, NoAsyncCallError)) as caught:
            getattr(envs, f"{pending}_wait")(timeout=timeout)
        assert isinstance(caught.value, multiprocessing.TimeoutError) is (timeout == 0)
    gate.unlink()
    if isinstance(envs, AsyncVectorEnv):
        envs.close(terminate=True)


# Observation spaces that differ


@on(*EVERY)
def test_observation_mode_different(make: Make) -> None:
    boxes = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2, 3)]
    factories = [partial(_world_of, box) for box in boxes]
    envs = make(factories, observation_mode="different")
    assert envs.single_observation_space == boxes[0]
    assert envs.observation_space == batch_differing_spaces(boxes)
    assert envs.reset(seed=1)[0] in envs.observation_space
    envs.step([2, 2, 2])


@on(*EVERY)
def test_observation_mode_of_ones_own(make: Make) -> None:
    boxes = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2, 3)]
    factories = [partial(_world_of, box) for box in boxes]
    single, batched = spaces.Box(0, 9, (2,), np.float32), spaces.Box(0, 9, (3, 2), np.float32)
    envs = make(factories, observation_mode=(batched, single))
    assert envs.observation_space == batched
    assert envs.single_observation_space == single
    assert envs.reset(seed=1)[0] in envs.observation_space
    with pytest.raises(TypeError):
        make(factories, observation_mode=(3, single))


@on("sync", "cluster")
def test_observation_spaces_must_be_as_the_mode_says(make: Make) -> None:
    bounds = [spaces.Box(0, high, (2,), np.float32) for high in (1, 2, 3)]
    shapes = [spaces.Box(0, 1, (n,), np.float32) for n in (1, 2, 3)]
    dtypes = [spaces.Box(0, 1, (2,), dtype) for dtype in (np.float32, np.float64, np.float32)]
    mixed = [SPACES["box"], SPACES["five"], SPACES["dict"]]
    own = (spaces.Box(0, 4, (3, 2), np.float32), spaces.Box(0, 4, (2,), np.float32))
    for mode, given in (
        ("same", bounds),
        *((mode, given) for mode in ("same", "different", own) for given in (shapes, mixed)),
        ("different", dtypes),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            make([partial(_world_of, space) for space in given], observation_mode=mode)
        if isinstance(caught.value, clusterenv.errors.ClusterEnvError):
            assert isinstance(caught.value, RuntimeError)
    with pytest.raises(ValueError, match="invalid"):
        make([World] * 2, observation_mode="invalid")


def _world_of(space: gym.Space[Any]) -> gym.Env[Any, Any]:
    world = World()
    world.observation_space = space
    return world


# Other libraries


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_torchrl_wraps_a_cluster_env_as_it_does_a_sync_vector_env(
    client: Client, mode: AutoresetMode
) -> None:
    envs = pytest.importorskip("torchrl.envs")
    with clusterenv.make_vec(
        "CartPole-v1", 4, shards=2, cluster=client, autoreset_mode=mode
    ) as ours:
        theirs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4, autoreset_mode=mode)
        rollouts = []
        for vector in (ours, theirs):
            wrapped = envs.GymWrapper(vector)
            wrapped.set_seed(3)
            torch.manual_seed(3)
            rollouts.append(wrapped.rollout(80, break_when_any_done=False))
        mine, expected = rollouts
        assert mine.batch_size == expected.batch_size == (4, 80)
        assert expected["next", "done"].sum() > 4
        assert set(mine.keys(True, True)) == set(expected.keys(True, True))
        for key in expected.keys(True, True):
            assert torch.equal(mine[key], expected[key]), key
