"""Text in the observations of a ``Collector``: kept as strings up to the disk, or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Cycle
from compare import assert_same
from distributed import Client
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch.distributions import Categorical, Distribution
from worlds import World

import clusterenv
from clusterenv import Batch, Divergence, EnvFaults
from clusterenv.data.fragment import Fragment
from clusterenv.errors import ConfigError, SchemaMismatch
from clusterenv.policies import Context, Decision, Policy
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Recipe
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.space_check import SpaceBroken, SpaceCheck
from clusterenv.store import Journal, ReplayStore, RolloutStore, open_snapshot
from pipelines.tools import collect

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Grid(Policy):
    """Acts on World's observations with a mission, of which it must get the grid alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 5)

    def distribution(self, obs: Any, context: Context) -> Distribution:
        (name,) = obs
        assert name == "grid"
        return Categorical(logits=self.net(obs["grid"].flatten(1) / 10))

    def act(self, obs: Any, context: Context) -> Decision:
        action = self.distribution(obs, context).sample()
        return Decision(2 + action)


class Remembering(Cycle):
    """Says for each row whether its text is that of the row below."""

    def annotate(self, fragment: Fragment) -> dict[str, np.ndarray]:
        text, n = fragment.columns["obs.mission"], fragment.num_envs
        same = np.zeros(len(text), np.bool_)
        same[:-n] = text[:-n] == text[n:]
        return {"same": same}


class Words(spaces.Space[str]):
    """A space of strings that is no ``Text``, such as MiniGrid's missions."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class Errand(gym.Env[Any, Any]):
    """Its text is the same during an episode and any string at all; it fails at given steps."""

    observation_space = spaces.Dict(mission=Words(), at=spaces.Box(0, 1000, (1,), np.float32))
    action_space = spaces.Discrete(2)
    words = ("go to the red door", "", "öffne die Tür", "fetch 🗝", "a\0b\0")

    def __init__(self, faults: dict[int, Any] | None = None) -> None:
        self.faults = faults or {}
        self.life = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.now = 0
        self.mission = self.words[int(self.np_random.integers(len(self.words)))]
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.life += 1
        self.now += 1
        fault = self.faults.get(self.life, "")
        if isinstance(fault, Exception):
            raise fault
        obs = self._observe()
        if not isinstance(fault, str) or fault:
            obs["mission"] = fault
        return obs, 1.0, self.now == 7, False, {}

    def _observe(self) -> Any:
        return {"mission": self.mission, "at": np.array([self.now], np.float32)}


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    return list(zip(*(batch.flat(k).tolist() for k in ("env", "episode", "step")), strict=True))


def test_kept_text_is_that_of_the_environments_to_the_disk_and_back(
    client: Client, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"num_envs": 5, "horizon": 6, "shards": 2, "seed": 4}
    reference = SyncVectorEnv(
        [lambda: World(obs="text")] * 5, autoreset_mode=AutoresetMode.SAME_STEP
    )
    now, _ = reference.reset(seed=4)
    journal = Journal(tmp_path)
    batches: list[Batch] = []
    with clusterenv.Collector(
        World, Cycle(5, start=2), text="keep", obs="text", cluster=client, **options
    ) as collector:
        for step in range(18):
            if step % 6 == 0:
                rollout = collector.rollout()
                batches += rollout
            t = step % 6
            missions = np.concatenate([batch["obs.mission"][t] for batch in rollout])
            assert missions.tolist() == list(now["mission"])
            assert_same(np.concatenate([batch["obs.grid"][t] for batch in rollout]), now["grid"])
            now, _, terminated, truncated, info = reference.step(2 + (np.arange(5) + step) % 5)
            for env in range(5):
                batch, e = rollout[env >= 3], env - 3 * (env >= 3)
                after = {name: column[env] for name, column in now.items()}
                if terminated[env] or truncated[env]:
                    after = info["final_obs"][env]
                found = np.flatnonzero(batch.tail_rows == t * batch.num_envs + e)
                assert len(found) == (t == 5 or terminated[env] or truncated[env])
                for at in found:
                    assert batch.tail["obs.mission"][at] == after["mission"]
                    assert_same(batch.tail["obs.grid"][at], after["grid"])
    for batch in batches:
        field = batch.record_batch.schema.field("obs.mission")
        assert str(field.type) == "string"
        assert batch.record_batch["obs.mission"].to_pylist() == batch.flat("obs.mission").tolist()
        journal.append(batch)
    journal.commit()
    journal.close()

    table = clusterenv.open_dataset(tmp_path).to_table().to_pylist()
    written = iter(table)
    for batch in batches:
        tails = dict(zip(batch.tail_rows.tolist(), batch.tail["obs.mission"], strict=True))
        for row, mission in enumerate(batch.flat("obs.mission")):
            record = next(written)
            assert (record["obs.mission"], record["next_obs.mission"]) == (mission, tails.get(row))
    for batch, read in zip(batches, open_snapshot(tmp_path).batches(), strict=True):
        assert rows_of(read) == rows_of(batch)
        assert_same(read.flat("obs.mission"), batch.flat("obs.mission"))
        order = np.argsort(batch.tail_rows)
        assert_same(read.tail["obs.mission"], batch.tail["obs.mission"][order])

    # Stores hold numbers.
    with pytest.raises(SchemaMismatch, match=r"'obs\.mission' is text.*text='drop'"):
        ReplayStore(100).add(batches[0])
    with pytest.raises(SchemaMismatch, match=r"'obs\.mission' is text.*text='drop'"):
        ReplayStore(100, schema=batches[0].record_batch.schema)
    with pytest.raises(ConfigError, match=r"'obs\.mission' is text.*text='drop'"):
        RolloutStore().add(batches[0], newest_version=0)


def test_dropped_text_is_in_no_part_of_a_batch_and_versions_are_compared_without_it(
    client: Client,
) -> None:
    policy, store = Grid(), ReplayStore(1_000)
    options: dict[str, Any] = {"num_envs": 4, "horizon": 8, "shards": 2, "seed": 4}
    for text in ("drop", "keep"):
        with clusterenv.Collector(
            World,
            policy,
            sync=Divergence(1e-6),
            text=text,  # type: ignore[arg-type]
            obs="text",
            cluster=client,
            **options,
        ) as collector:
            for _ in range(2):
                batches = collector.rollout()
                with torch.no_grad():
                    policy.net.weight[0].add_(0.5)
                collector.publish(policy)
            assert collector.stats().pulls == 2
        for batch in batches:
            assert ("obs.mission" in batch.names) == (text == "keep")
            assert ("obs.mission" in batch.tail) == (text == "keep")
    with clusterenv.Collector(
        World, Grid(), text="drop", obs="text", cluster=client, **options
    ) as collector:
        for sample in store.feed(collector, 8):
            assert sample["next_obs.grid"].shape == (8, 2, 2)
            break


def test_a_collector_refuses_text_and_shows_both_choices(client: Client) -> None:
    def refused(text: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            clusterenv.Collector(
                World, Cycle(), num_envs=2, horizon=4, cluster=client, text=text, obs="text"
            )
        return str(caught.value)

    for text in ("refuse", "ignore"):
        assert "text='keep'" in refused(text)
        assert "text='drop'" in refused(text)


def test_step_with_a_policy_returns_text_that_the_policy_does_not_get(client: Client) -> None:
    envs = clusterenv.make_vec(World, 3, shards=2, cluster=client, obs="text")
    envs.sync = Divergence(0.1)
    envs.reset(seed=1)
    policy = Grid()
    for _ in range(3):
        obs, *_ = envs.step(policy)
    assert all(isinstance(mission, str) for mission in obs["mission"])
    envs.close()


def test_collect_writes_text_that_datasets_show(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym.envs.registration, "registry", dict(gym.registry))
    gym.register("Missions-v0", entry_point="worlds:World", kwargs={"obs": "text"})
    args = collect.Args(
        "Missions-v0",
        tmp_path / "data",
        rows=50,
        num_envs=4,
        horizon=8,
        shards=2,
        cluster=client.scheduler.address,
        text="keep",
        quiet=True,
    )
    assert collect.collect(args).rows == 50
    rows = clusterenv.open_dataset(args.out)
    assert (str(rows.schema.field("obs.mission").type), rows.count_rows()) == ("string", 50)
    assert len(set(rows.to_table()["obs.mission"].to_pylist())) > 20


# Without a cluster


def loop_of(faults: dict[int, Any], mode: AutoresetMode) -> EnvLoop:
    recipe = Recipe(lambda: Errand(faults), autoreset_mode=mode)
    return EnvLoop(build(recipe, 0, 3), Remembering(), 0, 10, [1, 2, 3], EnvFaults(), text="keep")


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_any_string_stays_as_it_is_and_a_policy_annotates_it(mode: AutoresetMode) -> None:
    loop = loop_of({}, mode)
    seen = set()
    for _ in range(20):
        fragment = loop.fragment(Acting(0, {}))
        text = fragment.columns["obs.mission"].reshape(10, 3)
        step = fragment.columns["step"].reshape(10, 3)
        same = fragment.columns["same"].reshape(10, 3)
        for t in range(9):
            for e in range(3):
                if step[t, e] < 6:
                    assert text[t, e] == text[t + 1, e]
                    assert same[t, e]
        for row, after in zip(fragment.tail_rows, fragment.tail["obs.mission"], strict=True):
            assert after == text[row // 3, row % 3]
        seen |= set(text.flat)
    assert seen == set(Errand.words)


@pytest.mark.parametrize("fault", [None, 3, b"bytes", "\ud800", RuntimeError("diverged")])
def test_an_environment_whose_text_is_none_is_rebuilt_alone(fault: Any) -> None:
    loop = loop_of({5: fault}, AutoresetMode.SAME_STEP)
    fragment = loop.fragment(Acting(0, {}))
    assert sorted(cut.env for cut in fragment.cuts) == [0, 0, 1, 1, 2, 2]
    if not isinstance(fault, Exception):
        assert "the observation obs.mission is not text" in fragment.cuts[0].reason
    text, at = fragment.columns["obs.mission"], fragment.columns["obs.at"][:, 0]
    for env in range(3):
        assert at[env::3].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
        for end in (3, 7):
            (tail,) = np.flatnonzero(fragment.tail_rows == end * 3 + env)
            assert fragment.tail["obs.mission"][tail] == text[end * 3 + env]
            assert fragment.tail["obs.at"][tail, 0] == 4


def test_text_that_is_dropped_may_be_anything() -> None:
    recipe = Recipe(lambda: Errand({5: None}), autoreset_mode=AutoresetMode.SAME_STEP)
    engine = build(recipe, 0, 3)
    loop = EnvLoop(engine, Cycle(), 0, 10, [1, 2, 3], EnvFaults(), text="drop")
    fragment = loop.fragment(Acting(0, {}))
    assert not fragment.cuts
    assert list(fragment.tail) == ["obs.at"]


def test_a_final_observation_whose_text_is_none_is_a_fault() -> None:
    guard = SpaceCheck(Errand.observation_space, bounds=True)
    value = [np.array([7], object), np.zeros((1, 1), np.float32)]
    with pytest.raises(SpaceBroken, match=r"obs\.mission is not text: 7"):
        guard.check_value(value)
