"""``clusterenv evaluate`` and ``clusterenv export``, on small runs of every learner."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Counter
from distributed import Client
from small_runs import ROOT, small
from torch import nn

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import Categorical, Context, Decision, Gaussian, Policy, Random
from pipelines import cli
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.impala import IMPALA
from pipelines.networks.actor_critic import ActorCritic
from pipelines.ppo import PPO
from pipelines.tools import evaluate
from pipelines.tools.export import export
from pipelines.tools.saved_policies import load_run

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, client: Client) -> Path:
    """A run of PPO, which was evaluated, and one of DQN."""
    root, address = tmp_path_factory.mktemp("runs"), str(client.scheduler.address)
    sizes: dict[str, Any] = {"num_envs": 4, "shards": 2, "quiet": True, "cluster": address}
    evaluated = {"evaluate_every": 128, "evaluate_episodes": 2, "epochs": 1, "horizon": 32}
    run(PPO, PPO.preset("CartPole-v1", total_steps=256, out=root / "ppo", **sizes, **evaluated))
    run(DQN, small(root / "dqn", total_steps=256, cluster=address, duelling=True))
    return root


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_a_run_is_evaluated(
    runs: Path, name: str, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(runs / name), "--episodes", "4", "--seed", "3"]
    shown = []
    for more in ([], [], ["--stochastic"]):
        assert cli.main([*words, *more, "--cluster", client.scheduler.address]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    assert ("best.pt" in shown[0]) == (name == "ppo")
    for label in ("return", "standard deviation", "95 %", "length"):
        assert label in shown[0]


def test_the_last_version_is_there_too(runs: Path) -> None:
    best, last = (load_run(runs / "ppo", version) for version in ("best", "last"))  # type: ignore[arg-type]
    assert best.path.name == "best.pt"
    assert last.path.name.startswith("learner-")
    assert isinstance(last.policy, ActorCritic)
    with pytest.raises(ConfigError, match=r"has no best\.pt.*--version last"):
        load_run(runs / "dqn", "best")


@pytest.mark.parametrize(("name", "best"), [("ppo", False), ("ppo", True), ("dqn", False)])
def test_a_policy_is_loaded_without_its_learner(runs: Path, name: str, best: bool) -> None:
    policy = clusterenv.load_policy(runs / name, best=best)
    wanted = load_run(runs / name, "best" if best else "last")
    obs = torch.randn(32, 4)
    assert torch.equal(best_actions(policy, obs), best_actions(wanted.policy, obs))
    saved = torch.load(runs / name / ("best.pt" if best else "policy.pt"), weights_only=True)
    assert (saved["kind"], saved["steps"]) == (name, wanted.steps)
    assert not policy.training


def test_the_page_about_trained_policies_runs_as_it_stands(
    runs: Path, tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "after-training.md").read_text()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "ppo-CartPole-v1-seed1").symlink_to(runs / "ppo")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        words = [sys.executable, str(script)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    commands = re.findall(r"^(?:\$ )?clusterenv (\w+) (.*)$", page, re.MULTILINE)
    names = [name for name, _ in commands]
    assert {"train", "evaluate", "export"} <= set(names)
    # Each option is one of the command.
    for name, words in commands:
        command = f"train {words.split()[0]}" if name == "train" else name
        kind = cli.commands()[command].options
        assert kind is not None
        known = {field.name.replace("_", "-") for field in dataclasses.fields(kind())}
        assert set(re.findall(r"--([\w-]+)", words)) <= known, words


def test_a_recurrent_policy_is_loaded_for_a_loop_of_ones_own(
    tmp_path: Path, client: Client
) -> None:
    """As the page says: its state and the last reward are passed on by hand."""
    sizes: dict[str, Any] = {"num_envs": 4, "shards": 2, "horizon": 16, "quiet": True}
    address = str(client.scheduler.address)
    args = IMPALA.preset("CartPole-v1", recurrent=8, total_steps=128, cluster=address, **sizes)
    run(IMPALA, dataclasses.replace(args, out=tmp_path))
    policy = clusterenv.load_policy(tmp_path)
    env, state, over, steps = gym.make("CartPole-v1"), policy.initial_state(1), False, 0
    obs, _ = env.reset(seed=0)
    while not over:
        context = Context(torch.arange(1), state=state, deterministic=True)
        with torch.inference_mode():
            decision = policy.act(torch.as_tensor(obs).unsqueeze(0), context)
        obs, reward, terminated, truncated, _ = env.step(decision.action[0].numpy())
        state = {**decision.state, "last_reward": torch.tensor([float(reward)])}
        over, steps = terminated or truncated, steps + 1
    assert steps > 5
    assert state["hidden"].abs().sum() > 0


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_directory_without_a_checkpoint_says_what_to_call(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [str(tmp_path / "out.pt2")] if command == "export" else []
    assert cli.main([command, str(tmp_path / "none"), *more]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'none'} holds no checkpoint" in said
    assert f"clusterenv {command} {tmp_path / 'none'}" in said
    (tmp_path / "learner-1.pt").write_bytes(b"junk")
    assert cli.main([command, str(tmp_path), *more]) == 2
    assert "is no checkpoint of a learner" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("moviepy") is None, reason="moviepy is missing")
def test_a_video_shows_the_first_episode(runs: Path, tmp_path: Path, client: Client) -> None:
    from imageio_ffmpeg import count_frames_and_secs

    video = tmp_path / "videos" / "episode.mp4"
    saved = load_run(runs / "ppo")
    args = evaluate.Args(
        runs / "ppo", episodes=2, video=video, cluster=str(client.scheduler.address)
    )
    played = evaluate.evaluate(args, saved)
    assert [path.name for path in video.parent.iterdir()] == ["episode.mp4"]
    frames, _ = count_frames_and_secs(str(video))
    assert frames == pytest.approx(played.lengths[0] + 1, abs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"video": Path("x.avi")}, r"--video x\.avi is no \.mp4 or \.gif file"),
        ({"env_args": ("score",)}, "--env-args score is no argument .*--env-args reward=score"),
        ({"env_args": ("a=[",)}, r"--env-args a=\[: \[ is no value in YAML"),
        ({"episodes": 0}, "--episodes must be 1 or more, got 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate.Args(Path("runs/x"), **options)


def best_actions(policy: Policy, obs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return policy.act(obs, Context(torch.arange(len(obs)), deterministic=True)).action


OTHER_PROCESS = """
import sys, torch
obs = torch.load("obs.pt")
for name in sys.argv[1:]:
    policy = torch.export.load(f"{name}.pt2").module()
    torch.save([policy(obs), policy(obs[:1])], f"{name}.pt")
exec(open("documented.py").read())
assert action.shape == (1,)
assert not {"clusterenv", "pipelines", "gymnasium"} & set(sys.modules)
"""


def test_an_exported_policy_needs_torch_alone(runs: Path, tmp_path: Path) -> None:
    names = ("ppo", "dqn")
    for name in names:
        assert cli.main(["export", str(runs / name), str(tmp_path / f"{name}.pt2")]) == 0
    obs = torch.randn(33, 4)
    torch.save(obs, tmp_path / "obs.pt")
    page = (ROOT / "docs" / "after-training.md").read_text()
    (documented,) = re.findall(r"```py\n(import torch\n.*?)```", page, re.DOTALL)
    (tmp_path / "documented.py").write_text(documented)
    (tmp_path / "policy.pt2").symlink_to(tmp_path / "ppo.pt2")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OTHER_PROCESS, *names],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        wanted = best_actions(load_run(runs / name).policy, obs)
        several, one = torch.load(tmp_path / f"{name}.pt")
        assert torch.equal(several, wanted)
        assert torch.equal(one, wanted[:1])


class Judged(nn.Module):
    """Logits and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 5)

    def forward(self, obs: torch.Tensor) -> Any:
        return self.net(obs), self.net(obs).sum(-1)


@pytest.mark.parametrize(
    "policy",
    [
        Categorical(Judged()),
        Categorical(nn.Linear(4, 5), nvec=[3, 2]),
        Gaussian(nn.Linear(4, 2), gym.spaces.Box(-0.1, 0.1, (2,), np.float32)),
    ],
)
def test_adapters_are_exported(tmp_path: Path, policy: Policy) -> None:
    export(policy, BOX, tmp_path / "policy.pt2")
    loaded = torch.export.load(tmp_path / "policy.pt2").module()
    for rows in (1, 9):
        obs = torch.randn(rows, 4)
        assert torch.equal(loaded(obs), best_actions(policy, obs))


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="no onnxruntime")
def test_onnx_gives_the_same_actions(tmp_path: Path) -> None:
    import onnxruntime

    made, path = ActorCritic(BOX, gym.spaces.Discrete(3)), tmp_path / "policy.onnx"
    export(made, BOX, path)
    assert [each.name for each in tmp_path.iterdir()] == ["policy.onnx"]
    obs = torch.randn(7, 4)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(["action"], {"obs": obs.numpy()})
    np.testing.assert_array_equal(found, best_actions(made, obs).numpy())


class Branches(Policy):
    def act(self, obs: Any, context: Context) -> Decision:
        return Decision(obs[:, 0].long() if obs.sum() > 0 else obs[:, 1].long())


class Samples(Policy):
    def act(self, obs: Any, context: Context) -> Decision:
        return Decision(torch.rand(obs.shape[0]))


@pytest.mark.parametrize(
    ("policy", "space", "message"),
    [
        (Counter(), BOX, "Counter is recurrent, and cannot be exported"),
        (Branches(), BOX, r"(?s)Branches cannot be exported.*must not branch"),
        (Samples(), BOX, r"Samples cannot be exported: its actions differ"),
        (Random(gym.spaces.Discrete(2)), BOX, "Random cannot be exported"),
        (Categorical(nn.Linear(4, 2)), gym.spaces.Dict(x=BOX), "which is not one array"),
    ],
)
def test_what_cannot_be_exported_says_why(
    tmp_path: Path, policy: Policy, space: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        export(policy, space, tmp_path / "policy.pt2")
    assert not list(tmp_path.iterdir())


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends neither in \.pt2.*clusterenv export"):
        export(Categorical(nn.Linear(4, 2)), BOX, tmp_path / "policy.h5")
