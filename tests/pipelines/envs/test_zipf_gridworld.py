"""Zipf's gridworld: its maps, what an episode draws, how the agent moves, and what it sees."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from compare import assert_same
from distributed import Client
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import clusterenv
from clusterenv.errors import ClusterEnvError, ConfigError
from pipelines.envs.zipf_gridworld import (
    Split,
    ZipfGridworld,
    ZipfGridworldVector,
    task_probabilities,
)
from pipelines.envs.zipf_world import (
    CELL,
    MOST_OBJECTS,
    SIDE,
    Map,
    _moves,
    make_map,
    make_world,
)

ID = "clusterenv/ZipfGridworld-v0"
NORTH, NORTH_EAST, EAST, SOUTH_EAST, SOUTH, SOUTH_WEST, WEST, NORTH_WEST = range(8)
WORLD = make_world(20, 20)
MIDDLE = 3


def neighbours(cell: int) -> list[int]:
    return [cell - SIDE, cell - 1, cell + 1, cell + SIDE]


def reached_from(world: Any, number: int, start: int) -> set[int]:
    """Return the cells that an agent can come to; objects end its way."""
    seen, waiting = {start}, [start]
    while waiting:
        for cell in set(world.moves[number, waiting.pop()].tolist()) - seen:
            seen.add(cell)
            if world.contents[number, cell] < 0:
                waiting.append(cell)
    return seen


def rooms_of(door: int) -> set[tuple[int, int]]:
    row, column = divmod(door, SIDE)
    beside = [(row, column - 1), (row, column + 1)] if column % 4 == 0 else [(row - 1, column)]
    beside += [] if column % 4 == 0 else [(row + 1, column)]
    return {(r // 4, c // 4) for r, c in beside}


@pytest.mark.parametrize("number", range(20))
def test_every_map_is_connected(number: int) -> None:
    each = WORLD.maps[number]
    reached = reached_from(WORLD, number, each.start)
    assert reached == set(np.flatnonzero(~each.walls).tolist())  # every object on a free way


@pytest.mark.parametrize("number", range(20))
def test_every_room_has_a_door_and_every_wall_at_most_one(number: int) -> None:
    each = WORLD.maps[number]
    opened = [rooms_of(door) for door in each.doors]
    assert all(len(rooms) == 2 for rooms in opened)
    assert len({frozenset(rooms) for rooms in opened}) == len(opened)
    assert set().union(*opened) == {(row, column) for row in range(3) for column in range(3)}
    free = {
        row * SIDE + column
        for row in range(SIDE)
        for column in range(SIDE)
        if row % 4 and column % 4
    }
    assert set(np.flatnonzero(~each.walls).tolist()) == free | set(each.doors)
    assert each.walls.shape == (13, 13)


def test_the_walls_without_a_door_differ_between_maps() -> None:
    assert len({each.doors for each in WORLD.maps}) == 20
    counts = {len(each.doors) for each in WORLD.maps}
    assert min(counts) >= 8  # the fewest that connect nine rooms
    assert len(counts) > 1


@pytest.mark.parametrize("each", WORLD.maps, ids=range(20))
def test_objects_and_start_touch_a_wall_and_no_door(each: Map) -> None:
    walls = each.walls.reshape(-1)
    places = [each.start, *each.objects]
    assert len(set(places)) == 21
    for cell in places:
        assert not walls[cell]
        assert cell not in each.doors
        assert walls[neighbours(cell)].any()
        assert not set(neighbours(cell)) & set(each.doors)
    assert len(set(each.looks)) == 20  # told apart by colour and shape


def test_a_map_depends_on_its_number_alone() -> None:
    small, large = make_world(3, 5), make_world(7, 12)
    for few, many in zip(small.maps, large.maps, strict=False):
        assert few.start == many.start
        assert few.objects == many.objects[:5]
        assert few.looks == many.looks[:5]
        assert np.array_equal(few.walls, many.walls)
    assert np.array_equal(make_map(1234 + 2, 5).walls, small.maps[2].walls)


def test_the_most_objects_fit_on_every_map() -> None:
    for seed in range(300):
        assert len(make_map(seed, MOST_OBJECTS).objects) == MOST_OBJECTS


@pytest.mark.parametrize(
    ("split", "exponent"), [("zipf", 1.0), ("zipf", 2.0), ("uniform", 1.0), ("rare", 1.0)]
)
def test_maps_and_targets_are_drawn_as_the_split_says(split: Split, exponent: float) -> None:
    """Chi-square of both marginals and of their independence, at one in a million."""
    maps, objects, episodes = 10, 5, 20_000
    env = ZipfGridworld(maps, objects, exponent, split)
    env.reset(seed=1)
    counts = np.zeros((maps, objects))
    for _ in range(episodes):
        info = env.reset()[1]
        counts[info["map"], info["target"]] += 1
    ranks = [np.arange(1.0, 11), np.arange(1.0, 6)]
    weights = {
        "zipf": [rank**-exponent for rank in ranks],
        "uniform": [np.ones(10), np.ones(5)],
        "rare": [(ranks[0] > 8).astype(float), (ranks[1] > 4).astype(float)],
    }[split]
    p_maps, p_objects = (each / each.sum() for each in weights)
    assert np.allclose(task_probabilities(maps, exponent, split), p_maps)
    expected = episodes * np.outer(p_maps, p_objects)
    possible = expected > 0
    assert not counts[~possible].any()
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert _chi_square_tail(chi_square, int(possible.sum()) - 1) > 1e-6
    if split != "uniform":  # the same counts refute the uniform distribution
        even = episodes / counts.size
        assert _chi_square_tail(((counts - even) ** 2 / even).sum(), counts.size - 1) < 1e-6


def _chi_square_tail(value: float, freedom: int) -> float:
    half = torch.tensor([freedom / 2, value / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def at(env: ZipfGridworld, row: int, column: int, number: int = 0, target: int = 0) -> None:
    """Place the agent."""
    env.reset(seed=1)
    env._map, env._target, env._cell = number, target, row * SIDE + column


def after(env: ZipfGridworld, action: int) -> tuple[int, int]:
    env.step(action)
    return divmod(env._cell, SIDE)


def test_steps_go_in_eight_directions_and_walls_stop_them() -> None:
    env = ZipfGridworld(1, 1)
    moves = {
        NORTH: (1, 2),
        NORTH_EAST: (1, 3),
        EAST: (2, 3),
        SOUTH_EAST: (3, 3),
        SOUTH: (3, 2),
        SOUTH_WEST: (3, 1),
        WEST: (2, 1),
        NORTH_WEST: (1, 1),
    }
    for action, to in moves.items():
        at(env, 2, 2)
        assert after(env, action) == to
    for action in (NORTH, NORTH_WEST, WEST, NORTH_EAST, SOUTH_WEST):
        at(env, 1, 1)
        assert after(env, action) == (1, 1)


def test_a_diagonal_fails_in_a_wall_and_between_two() -> None:
    """Between two walls there is a diagonal only at a door in a corner of its room."""
    each = WORLD.maps[0]
    env = ZipfGridworld(20, 20)
    passed = blocked = into_walls = 0
    for cell in np.flatnonzero(~each.walls).tolist():
        row, column = divmod(cell, SIDE)
        for action, (down, right) in {
            NORTH_EAST: (-1, 1),
            SOUTH_EAST: (1, 1),
            SOUTH_WEST: (1, -1),
            NORTH_WEST: (-1, -1),
        }.items():
            corners = int(each.walls[row + down, column]) + int(each.walls[row, column + right])
            at(env, row, column)
            to = after(env, action)
            if each.walls[row + down, column + right]:
                assert to == (row, column)
                into_walls += 1
            elif corners == 2:
                assert to == (row, column)
                blocked += 1
            else:
                assert to == (row + down, column + right)
                passed += corners == 1  # past a corner
    assert passed
    assert into_walls
    assert blocked == 0  # never on these maps: a door's cell has open cells before it and behind


def test_a_diagonal_between_two_walls_is_blocked() -> None:
    walls = np.ones((SIDE, SIDE), np.bool_)
    walls[5, 5] = walls[6, 6] = walls[7, 7] = walls[6, 7] = False
    moves = _moves(walls)
    here, there = 5 * SIDE + 5, 6 * SIDE + 6
    assert moves[here, SOUTH_EAST] == here
    assert moves[there, NORTH_WEST] == there
    assert moves[there, SOUTH_EAST] == 7 * SIDE + 7  # one of its corners is open
    assert moves[7 * SIDE + 7, NORTH_WEST] == there


def test_stepping_on_an_object_ends_the_episode_and_only_the_target_pays() -> None:
    env = ZipfGridworld(20, 20)
    for target in range(20):
        for rank, cell in enumerate(WORLD.maps[3].objects):
            beside = next(
                other
                for other in range(SIDE * SIDE)
                if cell in WORLD.moves[3, other] and WORLD.contents[3, other] < 0
            )
            at(env, *divmod(beside, SIDE), 3, target)
            action = WORLD.moves[3, beside].tolist().index(cell)
            _, reward, terminated, truncated, info = env.step(action)
            assert reward == float(rank == target)
            assert terminated
            assert not truncated
            assert info == {"map": 3, "target": target}


def test_a_hundred_steps_without_an_object_are_a_truncation() -> None:
    env = gym.make(ID)
    for make in (lambda: env, lambda: gym.make(ID, max_episode_steps=7)):
        made = make()
        made.reset(seed=1)
        limit = made.spec.max_episode_steps if made.spec else 0
        into_wall = next(
            action
            for action in range(8)
            if WORLD.moves[made.unwrapped._map, made.unwrapped._cell, action]
            == made.unwrapped._cell
        )
        ends = [made.step(into_wall)[1:4] for _ in range(limit or 0)]
        assert ends[-1] == (0.0, False, True)
        assert all(end == (0.0, False, False) for end in ends[:-1])
    assert env.spec is not None
    assert env.spec.max_episode_steps == 100


def cell_of(obs: Any, row: int, column: int) -> Any:
    return obs[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def test_the_view_shows_agent_walls_floor_objects_and_target() -> None:
    env = ZipfGridworld(20, 20)
    seen = set()
    for seed in range(60):
        obs, info = env.reset(seed=seed)
        for step in range(8):
            number, here = info["map"], divmod(env._cell, SIDE)
            each = WORLD.maps[number]
            assert obs.shape == (63, 63, 3)
            assert obs.dtype == np.uint8
            for row in range(7):
                for column in range(7):
                    r, c = here[0] + row - MIDDLE, here[1] + column - MIDDLE
                    inside = 0 <= r < SIDE and 0 <= c < SIDE
                    tile = cell_of(obs, row, column)
                    rank = each.objects.index(r * SIDE + c) if r * SIDE + c in each.objects else -1
                    if (row, column) == (0, 0):
                        kind, wanted = "target", WORLD.tiles[number, info["target"]]
                    elif (row, column) == (MIDDLE, MIDDLE):
                        kind, wanted = "agent", np.full((9, 9, 3), 255)
                    elif inside and each.walls[r, c]:
                        kind, wanted = "wall", np.full((9, 9, 3), 128)
                    elif inside and rank >= 0:
                        kind, wanted = "object", WORLD.tiles[number, rank]
                    else:
                        kind, wanted = "floor", np.zeros((9, 9, 3))
                    assert np.array_equal(tile, wanted), (kind, row, column)
                    seen.add(kind)
            obs, _, terminated, _, info = env.step((seed + step) % 8)
            if terminated:
                break
    assert seen == {"target", "agent", "wall", "object", "floor"}


def test_pictures_of_different_objects_differ() -> None:
    for tiles in WORLD.tiles:
        assert len({tile.tobytes() for tile in tiles}) == 20
        assert all(tile.any() for tile in tiles)


def test_an_observation_that_was_returned_never_changes() -> None:
    env, envs = ZipfGridworld(), ZipfGridworldVector(4)
    single, many = env.reset(seed=1)[0], envs.reset(seed=1)[0]
    kept = single.copy(), many.copy()
    for action in range(8):
        env.step(action)
        envs.step(np.full(4, action))
    assert_same(single, kept[0])
    assert_same(many, kept[1])
    single[:] = 7  # and writing into it changes no other
    assert not (env.reset(seed=1)[0] == 7).any()


def test_gymnasium_accepts_the_environment() -> None:
    check_env(gym.make(ID, render_mode="rgb_array").unwrapped)


def test_it_renders_the_whole_map() -> None:
    env = gym.make(ID, render_mode="rgb_array")
    _, info = env.reset(seed=2)
    picture: Any = env.render()
    assert picture.shape == (13 * 9 * 4, 13 * 9 * 4, 3)
    small = picture[::4, ::4]
    number, start = info["map"], divmod(WORLD.maps[info["map"]].start, SIDE)
    assert (cell_of(small, *start) == 255).all()
    assert np.array_equal(cell_of(small, 0, 0), WORLD.tiles[number, info["target"]])
    for rank, cell in enumerate(WORLD.maps[number].objects):
        assert np.array_equal(cell_of(small, *divmod(cell, SIDE)), WORLD.tiles[number, rank])
    assert gym.make(ID).unwrapped.render() is None
    envs = gym.make_vec(ID, 2, vectorization_mode="vector_entry_point", render_mode="rgb_array")
    envs.reset(seed=2)
    first, _second = envs.render() or ()
    assert np.array_equal(first, picture)


def rollout(envs: Any, steps: int = 250) -> list[Any]:
    rng = np.random.default_rng(5)
    first = envs.reset(seed=11)
    results = [envs.step(rng.integers(0, 8, envs.num_envs)) for _ in range(steps)]
    return [first, *results, envs.reset()]  # whose generators go on


def test_the_vector_environment_equals_single_ones_in_everything() -> None:
    theirs = SyncVectorEnv(
        [lambda: gym.make(ID, split="uniform", max_episode_steps=30)] * 5,
        autoreset_mode=AutoresetMode.NEXT_STEP,
    )
    ours = gym.make_vec(
        ID, 5, vectorization_mode="vector_entry_point", split="uniform", max_episode_steps=30
    )
    expected, found = rollout(theirs), rollout(ours)
    for number, (ours_at, theirs_at) in enumerate(zip(found, expected, strict=True)):
        assert_same(ours_at, theirs_at, f"step {number}")
    ends = [result[2:4] for result in expected if len(result) == 5]
    assert sum(int(terminated.sum()) for terminated, _ in ends) > 10
    assert sum(int(truncated.sum()) for _, truncated in ends) > 3


@pytest.mark.parametrize("engine", ["native", "gymnasium"])
def test_the_streams_do_not_depend_on_the_number_of_shards(client: Client, engine: str) -> None:
    results = []
    for shards in (1, 2):
        with clusterenv.make_vec(
            "pipelines.envs:" + ID, 4, shards=shards, cluster=client, engine=engine, maps=5
        ) as envs:
            results.append(rollout(envs, steps=60))
    for number, (one, two) in enumerate(zip(*results, strict=True)):
        assert_same(two, one, f"step {number}")
    assert len({info["target"].tobytes() for *_, info in results[0]}) > 5


@pytest.mark.parametrize("split", ["zipf", "rare"])
def test_an_evaluator_measures_the_accuracy_on_a_split(client: Client, split: Split) -> None:
    """The returns are those of stepping the same environments here."""
    spaces = clusterenv.env_spaces(ID, engine="native")
    network = Wander(spaces[0].shape or ())
    policy = clusterenv.policies.Categorical(network)
    with clusterenv.Evaluator(
        "pipelines.envs:" + ID,
        policy,
        episodes=16,
        num_envs=16,
        cluster=client,
        seed=3,
        engine="native",
        split=split,
        max_episode_steps=20,
    ) as evaluator:
        evaluator.publish(policy, 1)
        evaluator.wait(timeout=60)
        [evaluation] = evaluator.results()
    found = []
    for env in range(16):
        single = gym.make(ID, split=split, max_episode_steps=20)
        obs, info = single.reset(seed=3 + env)
        assert split == "zipf" or (info["map"] >= 16 and info["target"] >= 16)
        total, steps, over = 0.0, 0, False
        while not over:
            action = network(torch.from_numpy(obs)[None]).argmax().item()
            obs, reward, terminated, truncated, _ = single.step(action)
            total, steps, over = total + float(reward), steps + 1, terminated or truncated
        found.append((total, steps))
    evaluated = zip(evaluation.returns.tolist(), evaluation.lengths.tolist(), strict=True)
    assert sorted(evaluated) == sorted(found)
    assert len(set(found)) > 1


class Wander(torch.nn.Module):
    """Goes in a direction that depends on all that it sees."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        directions = torch.randn(math.prod(shape), 8, generator=generator)
        self.register_buffer("directions", directions.double())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs.double().flatten(1) @ self.directions


def test_a_list_of_seeds_gives_each_environment_its_own() -> None:
    envs = ZipfGridworldVector(3)
    expected = envs.reset(seed=8)
    assert_same(envs.reset(seed=[8, 9, 10]), expected)
    with pytest.raises(ConfigError, match="2 seeds for 3 environments"):
        envs.reset(seed=[8, 9])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"maps": 0}, r"maps=0 is not a whole number from 1 to 1000: .*maps=20"),
        ({"maps": 2.0}, r"maps=2\.0 is not"),
        ({"maps": True}, r"maps=True is not"),
        ({"objects": 48}, r"objects=48 is not a whole number from 1 to 47: .*objects=20"),
        ({"exponent": -1}, r"exponent=-1 is no number from 0 to 10: .*exponent=1\.0"),
        ({"exponent": math.nan}, r"exponent=nan is no number"),
        ({"exponent": "1"}, r"exponent='1' is no number"),
        ({"split": "rarest"}, r"split='rarest' is none of 'zipf', 'uniform', 'rare': .*'rare'"),
    ],
)
def test_wrong_arguments_fail_at_once_and_show_the_right_call(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        gym.make(ID, **arguments)
    with pytest.raises(ConfigError, match=message):
        ZipfGridworldVector(2, **arguments)
    for engine in ("native", "gymnasium"):
        with pytest.raises(ClusterEnvError, match=message):
            clusterenv.env_spaces(ID, engine=engine, **arguments)


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"step\(\) comes after reset\(\)"):
        ZipfGridworld().step(0)
    with pytest.raises(ConfigError, match=r"step\(\) comes after reset\(\)"):
        ZipfGridworldVector(2).step(np.array([0, 1]))
    with pytest.raises(ConfigError, match=r"render_mode='human' is unknown: .*'rgb_array'"):
        ZipfGridworldVector(2, render_mode="human")
    with pytest.raises(ConfigError, match="num_envs=0 is not a whole number"):
        ZipfGridworldVector(0)
    env, envs = ZipfGridworld(), ZipfGridworldVector(2)
    env.reset()
    envs.reset()
    with pytest.raises(ConfigError, match="action 8 is none of 0 to 7"):
        env.step(8)
    with pytest.raises(ConfigError, match="are not 2 whole numbers from 0 to 7"):
        envs.step(np.array([0, 8]))
