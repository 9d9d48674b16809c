"""Policies as files: what is in them, and what comes back."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Counter
from distributed import Client
from torch import nn

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import (
    Categorical,
    Context,
    Decision,
    EpsilonGreedy,
    Gaussian,
    Policy,
    Random,
    load_policy,
    save_policy,
)

BOX = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)


class Tied(Policy):
    """One tensor under two names, a buffer that is not saved, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.requires_grad_(False)
        self.register_buffer("mean", torch.arange(3.0))
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.sharpness = 4.5

    def act(self, obs: Any, context: Context) -> Decision:
        out = self.second(self.first(obs - self.mean)) * self.scale
        return Decision((self.sharpness * out).argmax(-1))


@pytest.mark.parametrize(
    "policy",
    [
        Categorical(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))),
        Categorical(nn.Linear(3, 5), nvec=[3, 2]),
        Gaussian(nn.Linear(3, 2), BOX, log_std=-1.0),
        EpsilonGreedy(nn.Linear(3, 4), epsilon=[0.25, 0.5]),
        Tied(),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_comes_back_as_it_was(policy: Policy, tmp_path: Path) -> None:
    save_policy(policy, tmp_path / "mine.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.pt"]
    loaded = load_policy(tmp_path / "mine.pt")
    assert type(loaded) is type(policy)
    assert policy.training
    assert not any(module.training for module in loaded.modules())
    assert loaded.state_dict().keys() == policy.state_dict().keys()
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    wanted = [(name, p.requires_grad) for name, p in policy.named_parameters()]
    assert [(name, p.requires_grad) for name, p in loaded.named_parameters()] == wanted
    policy.eval()
    obs, context = torch.randn(6, 3), Context(torch.arange(6), deterministic=True)
    assert torch.equal(policy.act(obs, context).action, loaded.act(obs, context).action)
    policy.train()


def test_what_is_one_tensor_stays_one(tmp_path: Path) -> None:
    save_policy(Tied(), tmp_path / "mine.pt")
    loaded: Any = load_policy(tmp_path / "mine.pt")
    assert loaded.first.weight is loaded.second.weight
    assert loaded.scale.tolist() == [2.0, 2.0, 2.0]
    assert loaded.sharpness == 4.5


def test_the_weights_are_in_the_file_once_and_open_without_unpickling(tmp_path: Path) -> None:
    whole = torch.randn(1_000_000)
    net = nn.Linear(500, 500)
    net.weight.data = whole[:250_000].view(500, 500)  # a view, as of FlatAdam
    save_policy(Categorical(net), tmp_path / "mine.pt", notes={"steps": 7})
    assert (tmp_path / "mine.pt").stat().st_size < 1.1 * 4 * 251_000
    saved = torch.load(tmp_path / "mine.pt", weights_only=True)
    assert saved["steps"] == 7
    assert torch.equal(saved["policy"]["module.weight"], net.weight)


def test_another_versions_weights_can_be_saved(tmp_path: Path) -> None:
    policy = Categorical(nn.Linear(3, 2))
    older = {name: torch.zeros_like(tensor) for name, tensor in policy.state_dict().items()}
    with (tmp_path / "mine.pt").open("wb") as file:
        save_policy(policy, file, weights=older)
    assert not any(p.any() for p in load_policy(tmp_path / "mine.pt").parameters())
    assert any(p.any() for p in policy.parameters())


SCRIPT = """
import clusterenv, torch
from clusterenv.policies import Context, Decision, Policy

class Mine(Policy):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def act(self, obs, context):
        return Decision(self.net(obs).argmax(-1))

clusterenv.save_policy(Mine(), "mine.pt")
"""


def test_a_class_of_a_script_comes_with_the_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    policy = load_policy(tmp_path / "mine.pt")
    assert type(policy).__name__ == "Mine"
    assert policy.act(torch.zeros(4, 3), Context(torch.arange(4))).action.shape == (4,)


def test_a_loaded_policy_acts_on_a_cluster(
    client: Client, leaves_nothing: None, tmp_path: Path
) -> None:
    policy = EpsilonGreedy(nn.Linear(4, 2), epsilon=0.0)
    save_policy(policy, tmp_path / "mine.pt")
    loaded = load_policy(tmp_path / "mine.pt")
    options: dict[str, Any] = {"num_envs": 4, "shards": 2, "cluster": client}
    with clusterenv.Collector("CartPole-v1", loaded, horizon=16, seed=1, **options) as collector:
        for batch in collector.rollout():
            best = policy.module(torch.from_numpy(batch.flat("obs"))).argmax(-1)
            assert torch.equal(torch.from_numpy(batch.flat("action")), best)
        collector.publish(loaded)  # its weights can be learned further
    with clusterenv.make_vec("CartPole-v1", **options) as envs:
        obs, _ = envs.reset(seed=1)
        _, _, _, _, infos = envs.step(loaded)
        best = policy.module(torch.from_numpy(obs)).argmax(-1)
        np.testing.assert_array_equal(infos["action"], best)


class Locked(Policy):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_saved_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Locked cannot be saved: .*torch\.save"):
        save_policy(Locked(), tmp_path / "mine.pt")
    with pytest.raises(ConfigError, match=r"save_policy\(policy, 'policy\.pt'\)"):
        save_policy(nn.Linear(1, 1), tmp_path / "mine.pt")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"run does not exist; .*load_policy\('runs/ppo-"):
        load_policy(run)
    run.mkdir()
    with pytest.raises(ConfigError, match=r"has no policy\.pt"):
        load_policy(run)
    with pytest.raises(ConfigError, match=r"has no best\.pt: .*--evaluate-every"):
        load_policy(run, best=True)
    (run / "policy.pt").write_bytes(b"junk")
    with pytest.raises(ConfigError, match=r"policy\.pt is no policy"):
        load_policy(run)
    torch.save({"policy": {}}, run / "policy.pt")
    with pytest.raises(ConfigError, match="holds no policy that can be loaded without"):
        load_policy(run)
    save_policy(Random(gym.spaces.Discrete(2)), run / "policy.pt")
    assert isinstance(load_policy(run), Random)
    with pytest.raises(ConfigError, match=r"is a file, and best=True.*load_policy\('.*pt'\)"):
        load_policy(run / "policy.pt", best=True)
    with pytest.raises(ConfigError, match=r"best must be True or False"):
        load_policy(run, best="yes")  # type: ignore[arg-type]


def test_a_class_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "elsewhere.py"
    module.write_text("from clusterenv.policies import Policy\nclass Theirs(Policy): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import elsewhere  # type: ignore[import-not-found]

    save_policy(elsewhere.Theirs(), tmp_path / "mine.pt")
    assert type(load_policy(tmp_path / "mine.pt")) is elsewhere.Theirs
    monkeypatch.delitem(sys.modules, "elsewhere")
    module.unlink()
    with pytest.raises(ConfigError, match=r"not found here: .*'elsewhere'.*PYTHONPATH"):
        load_policy(tmp_path / "mine.pt")


def test_a_recurrent_policy_keeps_its_initial_state(tmp_path: Path) -> None:
    save_policy(Counter(), tmp_path / "mine.pt")
    found, wanted = load_policy(tmp_path / "mine.pt").initial_state(2), Counter().initial_state(2)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
