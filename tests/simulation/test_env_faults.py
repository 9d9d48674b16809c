"""An environment that fails is rebuilt while the others go on, and no row is invented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Earner
from batches import as_batch
from distributed import Client
from gymnasium.vector import AutoresetMode
from torch import Tensor

import clusterenv
from clusterenv import EnvFaults, ReplayStore, errors
from clusterenv.data.fragment import Fragment
from clusterenv.data.seeds import rebuilt_seed
from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import EnvRaised, Recipe
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.space_check import SpaceBroken


class Frail(gym.Env[Any, Any]):
    """Observations are the seed's mark and a count of steps; it fails at given steps of its life.

    Steps of a life go on over resets; a rebuilt environment begins a life that never fails, unless
    ``again`` says so.
    """

    observation_space = gym.spaces.Box(-1000, 1000, (2,), np.float32)
    action_space = gym.spaces.Discrete(7)
    born: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, index: int, faults: dict[int, str], length: int, again: int) -> None:
        Frail.born[index] = Frail.born.get(index, 0) + 1
        self.faults = faults if Frail.born[index] <= 1 + again else {}
        self.length, self.life = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.mark = seed % 997
        if self.faults.get(self.life) == "reset" and self.life:
            raise RuntimeError("cannot begin")
        self.now = 0
        return np.array([self.mark, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.life += 1
        self.now += 1
        fault = self.faults.get(self.life)
        if fault == "raise":
            raise RuntimeError("diverged")
        obs = np.array([self.mark, self.now], np.float32)
        reward = float(self.now)
        if fault == "nan":
            obs[1] = np.nan
        if fault == "reward":
            reward = np.inf
        if fault == "bounds":
            obs[1] = 2000
        if fault == "shape":
            obs = obs[:1]
        if fault == "exit":
            raise SystemExit(3)
        return obs, reward, self.now == self.length, False, {}


class Counting(Policy):
    """Actions and a recurrent state that tell how many steps an episode has had."""

    def act(self, obs: Any, context: Context) -> Decision:
        count = context.state["count"]
        action = (count[:, 0] % 7).long()
        extras = {"seen": obs[:, 1].clone(), "log_prob": torch.zeros(len(obs))}
        return Decision(action, extras, {"count": count + 1})

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"count": torch.zeros(n, 1)}


def loop_of(
    faults: dict[int, dict[int, str]],
    *,
    horizon: int = 8,
    length: int = 100,
    again: int = 0,
    rule: EnvFaults | None = None,
    policy: Policy | None = None,
) -> Callable[[], Fragment]:
    Frail.born.clear()
    makers = tuple(
        (lambda i=i: Frail(i, faults.get(i, {}), length, again))  # type: ignore[misc]
        for i in range(3)
    )
    engine = build(Recipe(makers, autoreset_mode=AutoresetMode.SAME_STEP), 0, 3)
    policy = Counting() if policy is None else policy
    loop = EnvLoop(engine, policy, 0, horizon, [10, 20, 30], rule or EnvFaults())
    return lambda: loop.fragment(Acting(0, {}))


def column(fragment: Fragment, name: str, env: int) -> list[Any]:
    values: list[Any] = fragment.columns[name][env :: fragment.num_envs].tolist()
    return values


def final(fragment: Fragment, time: int, env: int) -> list[float]:
    (at,) = np.flatnonzero(fragment.tail_rows == time * fragment.num_envs + env)
    values: list[float] = fragment.tail["obs"][at].tolist()
    return values


@pytest.mark.parametrize("kind", ["raise", "nan", "reward", "shape", "exit"])
def test_the_episode_ends_with_its_last_good_step(kind: str) -> None:
    fragment = loop_of({1: {4: kind}})()
    assert column(fragment, "truncated", 1) == [False, False, True] + [False] * 5
    assert final(fragment, 2, 1) == [20, 3]
    mark = rebuilt_seed(20, 1, 1) % 997  # type: ignore[operator]
    obs = np.array(column(fragment, "obs", 1))
    assert obs[:, 1].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert obs[:, 0].tolist() == [20] * 3 + [mark] * 5
    # What acted saw what the row says, with the state of an episode that begins.
    assert column(fragment, "seen", 1) == obs[:, 1].tolist()
    assert column(fragment, "action", 1) == [0, 1, 2, 0, 1, 2, 3, 4]
    assert column(fragment, "reward", 1) == [1, 2, 3, 1, 2, 3, 4, 5]
    assert column(fragment, "episode", 1) == [0] * 3 + [1] * 5
    assert column(fragment, "step", 1) == [0, 1, 2, 0, 1, 2, 3, 4]
    assert [(cut.env, cut.time) for cut in fragment.cuts] == [(1, 2)]
    assert np.isfinite(fragment.columns["obs"]).all()
    for env in (0, 2):
        assert column(fragment, "step", env) == [*column(fragment, "action", env)[:7], 7]
        assert not any(column(fragment, "truncated", env))


def test_a_fault_in_the_first_step_of_a_fragment_cuts_the_one_before() -> None:
    fragments = loop_of({0: {9: "raise"}})
    first, second = fragments(), fragments()
    assert not any(column(first, "truncated", 0))
    assert final(first, 7, 0) == [10, 8]
    assert column(second, "episode", 0) == [1] * 8
    assert column(second, "step", 0) == list(range(8))
    assert second.state["count"][:, 0].tolist() == [0, 8, 8]
    assert [cut.time for cut in second.cuts] == [-1]
    assert not first.returns
    assert not second.returns  # of a cut episode that no row ends


def test_a_store_joins_nothing_across_a_cut() -> None:
    fragments = loop_of({0: {4: "raise"}, 1: {9: "nan"}})
    store = ReplayStore(100, seed=1)
    for _ in range(3):
        store.add(as_batch(fragments()))
    sample = store.sample(500)
    obs, following = sample["obs"], sample["next_obs"]
    np.testing.assert_array_equal(following[:, 0], obs[:, 0])  # the mark of the same episode
    np.testing.assert_array_equal(following[:, 1], obs[:, 1] + 1)
    assert {10, 20, 30} < set(obs[:, 0].tolist())  # rows of before the cuts and of after


def test_an_environment_that_cannot_begin_again_is_rebuilt_after_its_episode() -> None:
    fragment = loop_of({2: {3: "reset"}}, length=3)()
    assert column(fragment, "terminated", 2) == [False, False, True] * 2 + [False] * 2
    assert not any(column(fragment, "truncated", 2))
    assert final(fragment, 2, 2) == [30, 3]
    assert column(fragment, "step", 2) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert "cannot begin" in fragment.cuts[0].reason


def test_a_last_observation_that_is_not_finite_never_arrives() -> None:
    fragment = loop_of({0: {4: "nan"}}, length=4)()
    assert np.isfinite(fragment.tail["obs"]).all()
    assert column(fragment, "truncated", 0) == [False, False, True] + [False] * 5
    assert column(fragment, "step", 0) == [0, 1, 2, 0, 1, 2, 3, 0]


def test_several_at_once() -> None:
    faults = {0: {3: "nan"}, 1: {3: "raise"}, 2: {3: "reward"}}
    fragment = loop_of(faults)()
    for env in range(3):
        assert column(fragment, "truncated", env) == [False, True] + [False] * 6
        assert column(fragment, "step", env) == [0, 1, 0, 1, 2, 3, 4, 5]
    assert len(fragment.cuts) == 3


def test_bounds_are_kept_if_asked() -> None:
    assert not loop_of({0: {3: "bounds"}})().cuts
    assert loop_of({0: {3: "bounds"}}, rule=EnvFaults(bounds=True))().cuts


def test_a_budget_ends_it_with_all_that_is_needed_to_repeat_it() -> None:
    with pytest.raises(EnvRaised) as caught:
        loop_of({1: {1: "raise"}}, again=9, rule=EnvFaults(3))()
    fault = caught.value
    assert (fault.env, fault.doing) == (1, "step")
    assert "Fault 4 of this environment" in fault.note
    assert f"Its seed was {rebuilt_seed(20, 1, 3)}, its last action 0" in fault.note
    assert isinstance(fault.__cause__, RuntimeError)
    with pytest.raises(EnvRaised):
        loop_of({1: {2: "raise"}}, rule=EnvFaults(0))()


class Indifferent(Policy):
    """Acts on whatever it is given."""

    def act(self, obs: Tensor, context: Context) -> Decision:
        return Decision(torch.ones(len(obs), dtype=torch.int64))


class Strict(Indifferent):
    """Raises on what is not finite."""

    def act(self, obs: Tensor, context: Context) -> Decision:
        if not obs.isfinite().all():
            raise ValueError("the observation is not finite")
        return super().act(obs, context)


class Careless(Strict):
    """Raises by itself."""

    def act(self, obs: Tensor, context: Context) -> Decision:
        raise ValueError("never learned to act")


@pytest.mark.parametrize("bounds", [False, True])
def test_a_policy_that_fails_at_once_is_blamed_itself(bounds: bool) -> None:
    engine = build(Recipe(gym.spec("CartPole-v1"), engine="native"), 0, 4)
    loop = EnvLoop(engine, Careless(), 0, 8, [1, 2, 3, 4], EnvFaults(bounds=bounds))
    with pytest.raises(PolicyFault, match="never learned"):
        loop.fragment(Acting(0, {}))


class Failing:
    """An engine of which environment 2 becomes NaN, then the rewards, then all of it fails."""

    def __init__(self, raises: bool) -> None:
        self.engine = build(Recipe(gym.spec("CartPole-v1"), engine="native"), 0, 4)
        self.num_envs, self.description = 4, self.engine.description
        self.reset, self.skip_action_checks = self.engine.reset, self.engine.skip_action_checks
        self.steps, self.raises = 0, raises

    def step(self, actions: Any, slot: Any, rows: Any) -> Any:
        self.steps += 1
        if self.steps == 3 and self.raises:
            raise EnvRaised(0, "step") from RuntimeError("diverged")
        infos = self.engine.step(actions, slot, rows)
        if self.steps == 2:
            slot.obs[0][2] = np.nan
        if self.steps > 2:
            slot.reward[0] = np.nan
        return infos


@pytest.mark.parametrize("bounds", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_what_broke_first_is_named(raises: bool, bounds: bool) -> None:
    rule = EnvFaults(bounds=bounds)
    loop = EnvLoop(Failing(raises), Indifferent(), 0, 8, [1, 2, 3, 4], rule)  # type: ignore[arg-type]
    with pytest.raises(EnvRaised) as caught:
        loop.fragment(Acting(0, {}))
    assert caught.value.env == 2
    assert "observation" in str(caught.value.__cause__)


@pytest.mark.parametrize("policy", [Indifferent(), Strict()])
def test_engines_that_cannot_rebuild_one_say_which_is_broken(policy: Policy) -> None:
    engine = build(Recipe(gym.spec("CartPole-v1"), engine="native"), 0, 4)
    loop = EnvLoop(engine, policy, 0, 8, [1, 2, 3, 4], EnvFaults())
    loop.fragment(Acting(0, {}))
    engine._env.unwrapped.state[:, 2] = np.nan  # type: ignore[attr-defined]
    with pytest.raises(EnvRaised) as caught:
        loop.fragment(Acting(0, {}))
    assert caught.value.env == 2
    assert isinstance(caught.value.__cause__, SpaceBroken)


class Once(Frail):
    """Fails in its thirtieth step, however often it is rebuilt."""

    def __init__(self) -> None:
        super().__init__(0, {30: "raise"}, 20, again=10**6)


def test_a_collector_goes_on_and_counts(client: Client, leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_envs": 4, "shards": 2, "horizon": 16, "cluster": client}
    with clusterenv.Collector(Once, Counting(), seed=1, **options) as collector:
        batches = [batch for _ in range(3) for batch in collector.rollout()]
        stats = collector.stats()
    assert (stats.rebuilt, stats.restarts) == (4, 0)
    cuts = [cut for batch in batches for cut in batch.cuts]
    assert sorted(cut.env for cut in cuts) == [0, 1, 2, 3]
    assert all("RuntimeError: diverged" in cut.reason for cut in cuts)
    few = EnvFaults(2)
    with clusterenv.Collector(Once, Counting(), seed=1, env_faults=few, **options) as collector:
        message = r"environment \d of shard \d(.|\n)*Fault 3(.|\n)*diverged"
        with pytest.raises(errors.EnvGivenUp, match=message):
            collector.collect(10_000)


@pytest.mark.parametrize("fault", ["raise", "nan", "reset"])
def test_the_reward_of_a_step_before_a_rebuild_is_forgotten(fault: str) -> None:
    """An environment pays the number of the step, so the reward before is the step's own index."""
    take = loop_of({1: {3: fault, 9: fault}, 2: {8: fault}}, length=3, policy=Earner(7), again=1)
    cuts = 0
    for _ in range(4):
        fragment = take()
        cuts += len(fragment.cuts)
        np.testing.assert_array_equal(fragment.columns["earned"], fragment.columns["step"])
        np.testing.assert_array_equal(fragment.state["last_reward"], fragment.columns["step"][:3])
    assert cuts >= 2
