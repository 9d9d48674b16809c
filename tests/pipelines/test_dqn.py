"""Double DQN: its equations, its schedule, and runs that are killed and go on."""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import wait_until
from distributed import Client
from small_runs import ROOT, check_rows, small
from torch import Tensor

import clusterenv
from clusterenv.errors import ConfigError, Diverged, StoreTooLarge, UnknownEnv
from clusterenv.store import NStep, ReplayStore, Uniform
from pipelines.dqn import DQN, Args, targets
from pipelines.experiment import run
from pipelines.experiment.command import train
from pipelines.experiment.directories import note_of
from pipelines.experiment.run_directory import find_directory
from pipelines.networks.images import is_image, stack_of
from pipelines.networks.q_network import QNetwork

BOX = gym.spaces.Box(-1, 1, (4,), np.float32)
IMAGES = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
TWO = gym.spaces.Discrete(2)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other make small networks slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def progress(out: Path) -> list[dict[str, float]]:
    with (out / "progress.csv").open() as file:
        return [{name: float(row[name]) for name in row} for row in csv.DictReader(file)]


# The equations


def table(values: dict[int, list[float]]) -> object:
    """A Q function that looks observations up."""
    return lambda obs: torch.tensor([values[int(key)] for key in obs[:, 0]])


def sample(**columns: list[float]) -> dict[str, Tensor]:
    given = {name: torch.tensor(values) for name, values in columns.items()}
    for name in ("obs", "next_obs"):
        if name in given:
            given[name] = given[name].unsqueeze(1)
    return given


def test_the_online_network_chooses_and_the_target_network_judges() -> None:
    rows = sample(next_obs=[0, 1], reward=[1.0, -1.0], discount=[0.9, 0.5], terminated=[False] * 2)
    online = table({0: [5.0, 4.0], 1: [0.0, 2.0]})
    target = table({0: [10.0, 30.0], 1: [100.0, 8.0]})  # its own best are the other actions
    found = targets(online, target, rows)
    assert found.tolist() == pytest.approx([1 + 0.9 * 10, -1 + 0.5 * 8])


def test_a_terminated_row_is_worth_its_reward_alone_and_a_truncated_one_more() -> None:
    ends = {"terminated": [True, False], "truncated": [False, True]}
    rows = sample(next_obs=[0, 0], reward=[3.0, 3.0], discount=[0.9, 0.9], **ends)
    q = table({0: [2.0, 1.0]})
    assert targets(q, q, rows).tolist() == pytest.approx([3.0, 3 + 0.9 * 2])


def test_returns_of_several_steps_are_discounted_by_their_length() -> None:
    # One environment: three steps of an episode that is truncated, then two that end it.
    flags = [False] * 5
    columns = {
        "obs": np.arange(5, dtype=np.float32)[:, None],
        "action": np.zeros(5, np.int64),
        "reward": np.array([1, 2, 4, 8, 16], np.float32),
        "terminated": np.array([*flags[:4], True]),
        "truncated": np.array([False, False, True, False, False]),
        "env": np.zeros(5, np.int32),
        "episode": np.array([0, 0, 0, 1, 1], np.int32),
        "step": np.array([0, 1, 2, 0, 1], np.int32),
        "version": np.zeros(5, np.int32),
    }
    batch = clusterenv.Batch(
        columns,
        1,
        tail_rows=np.array([2, 4]),
        tail={"obs": np.array([[9], [9]], np.float32)},
        state={},
        run=0,
        shard=0,
        incarnation=0,
        policy_version=0,
    )
    store = ReplayStore(8, sampler=NStep(2, 0.5, Uniform(replace=False)))
    store.add(batch)
    rows = store.sample(5, tensors=True)
    rows = {name: column[rows["indices"].argsort()] for name, column in rows.items()}
    values = {key: [0.0, 100.0 + key] for key in (1, 2, 3, 4, 9)}
    expected = [
        1 + 0.5 * 2 + 0.25 * 102,  # the value of the observation two steps later
        2 + 0.5 * 4 + 0.25 * 109,  # truncated: the final observation's value counts
        4 + 0.5 * 109,  # one step from the truncation
        8 + 0.5 * 16,  # terminated after two steps
        16.0,
    ]
    assert targets(table(values), table(values), rows).tolist() == pytest.approx(expected)


def learner_of(**options: object) -> DQN:
    torch.manual_seed(2)
    return DQN(Args(hidden=(16,), **options), BOX, TWO)


def some_rows(n: int = 32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "obs": torch.randn(n, 4),
        "next_obs": torch.randn(n, 4),
        "action": torch.randint(2, (n,)),
        "reward": torch.randn(n),
        "discount": torch.full((n,), 0.9),
        "terminated": torch.rand(n) < 0.2,
        "weights": torch.rand(n),
    }


def test_an_update_returns_the_errors_and_weighs_the_loss() -> None:
    learner, rows = learner_of(lr=1e-2), some_rows()
    with torch.no_grad():
        taken = learner.q(rows["obs"])[torch.arange(32), rows["action"]]
        error = targets(learner.q, learner.q, rows) - taken
    huber = torch.where(error.abs() < 1, error**2 / 2, error.abs() - 0.5)
    losses, found = learner.learn(rows, 0.0)
    torch.testing.assert_close(found, error.abs())
    assert losses["loss"].item() == pytest.approx((rows["weights"] * huber).mean().item())


def test_rows_without_weight_teach_nothing() -> None:
    learner = learner_of()
    before = [parameter.clone() for parameter in learner.q.parameters()]
    learner.learn({**some_rows(), "weights": torch.zeros(32)}, 0.0)
    for old, new in zip(before, learner.q.parameters(), strict=True):
        torch.testing.assert_close(old, new)


def test_the_learning_rate_comes_down_with_the_run() -> None:
    learner, rows = learner_of(lr=0.5, anneal=True), some_rows()
    assert [learner.learn(rows, at)[0]["lr"] for at in (0.0, 0.5, 1.0)] == [0.5, 0.25, 0.0]


@pytest.mark.parametrize(("tau", "every"), [(0.25, 1), (1.0, 2)])
def test_the_target_network_follows(tau: float, every: int) -> None:
    learner, rows = learner_of(tau=tau, target_every=every), some_rows()
    old = next(learner.target.parameters()).clone()
    for _ in range(every - 1):
        learner.learn(rows, 0.0)
        torch.testing.assert_close(next(learner.target.parameters()), old)
    learner.learn(rows, 0.0)
    new = next(learner.q.parameters()).detach()
    torch.testing.assert_close(next(learner.target.parameters()), old + tau * (new - old))


def test_a_learner_learns_a_value_and_another_goes_on_from_its_state() -> None:
    rows = some_rows()
    rows |= {"terminated": torch.ones(32, dtype=torch.bool), "weights": torch.ones(32)}
    learner = learner_of(lr=1e-2, target_every=3)
    first = learner.learn(rows, 0.0)[1].mean()
    for _ in range(200):
        last = learner.learn(rows, 0.0)[1].mean()
    assert last < first / 4
    other = learner_of(lr=1e-2, target_every=3)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    assert other.updates == learner.updates == 201
    for _ in range(4):
        torch.testing.assert_close(learner.learn(rows, 0.0)[1], other.learn(rows, 0.0)[1])


def test_epsilon_comes_down_and_stays() -> None:
    learner = learner_of(epsilon_start=1.0, epsilon_end=0.1, epsilon_steps=1000)
    found = [learner.scalars(steps)["epsilon"] for steps in (0, 500, 1000, 5000)]
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])


# The networks


def test_a_duelling_head_adds_advantages_without_their_mean_to_the_state_value() -> None:
    q = QNetwork(BOX, gym.spaces.Discrete(3), (8,), duelling=True)
    obs = torch.randn(5, 4)
    features = q.body(obs)
    assert q.value is not None
    expected = q.value(features) + q.advantage(features)
    expected -= q.advantage(features).mean(-1, keepdim=True)
    torch.testing.assert_close(q(obs), expected)
    torch.testing.assert_close(q(obs).mean(-1, keepdim=True), q.value(features))


def test_images_are_scaled_and_their_frames_stored_once() -> None:
    q = QNetwork(IMAGES, gym.spaces.Discrete(6), (32,))
    dark, bright = torch.zeros(2, 4, 84, 84, dtype=torch.uint8), torch.full((2, 4, 84, 84), 255.0)
    assert q(dark).shape == (2, 6)
    torch.testing.assert_close(q.eyes(bright), q.eyes[1:](torch.ones(2, 4, 84, 84)))
    assert is_image(IMAGES)
    assert stack_of(IMAGES) == 4
    assert stack_of(gym.spaces.Box(0, 255, (3, 84, 84), np.uint8)) is None  # colours
    for shape in ((96, 96, 3), (210, 160, 3), (84, 84, 4)):  # colours, or frames, at the end
        assert stack_of(gym.spaces.Box(0, 255, shape, np.uint8)) is None
    assert stack_of(BOX) is None


@pytest.mark.parametrize(
    ("observations", "actions", "says"),
    [
        (gym.spaces.Discrete(3), TWO, "FlattenObservation"),
        (BOX, gym.spaces.Box(-1, 1, (2,)), "clusterenv train ppo"),
        (BOX, gym.spaces.Discrete(2, start=1), "Discrete"),
        (gym.spaces.Box(0, 255, (84, 84, 4), np.uint8), TWO, "channels first"),
    ],
)
def test_spaces_the_network_cannot_take_are_refused(
    observations: gym.Space, actions: gym.Space, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        QNetwork(observations, actions)


# Runs


def test_a_run_leaves_progress_a_curve_and_a_dataset(tmp_path: Path, cluster: str) -> None:
    out = tmp_path / "run"
    result = run(DQN, small(out, cluster=cluster, prioritized=True, duelling=True, n_step=3))
    assert 1_024 <= result.steps < 1_024 + 2 * 8 * 4
    # A row is good for an eighth of an update, and those before the first update for none.
    assert result.updates == pytest.approx((result.steps - 128) / 8, abs=8)
    rows = progress(out)
    assert {"steps", "loss", "q", "epsilon", "store_rows", "pulls_saved"} <= set(rows[0])
    assert "kl" not in rows[0]
    assert rows[-1]["steps"] == result.steps
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    dataset = clusterenv.open_dataset(result.dataset)
    assert dataset.count_rows() == result.steps
    assert [path.name for path in out.glob("learner-*")] == [note_of(out)["learner"]]

    again = run(DQN, small(out, cluster=cluster, prioritized=True, duelling=True, n_step=3))
    assert (again.steps, again.updates) == (result.steps, result.updates)  # it was finished
    more = small(out, cluster=cluster, prioritized=True, duelling=True, n_step=3, total_steps=1_280)
    assert run(DQN, more).steps >= 1_280
    with pytest.raises(ConfigError, match=r"--lr 0\.002 instead of --lr 0\.5"):
        run(DQN, small(out, prioritized=True, duelling=True, n_step=3, lr=0.5))


def test_a_goal_ends_the_run(tmp_path: Path, cluster: str) -> None:
    result = run(DQN, small(tmp_path, total_steps=50_000, stop_at=8.0, cluster=cluster))
    assert result.reached_at == result.steps < 50_000
    assert result.judged_return >= 8
    again = run(DQN, small(tmp_path, total_steps=50_000, stop_at=8.0, cluster=cluster))
    assert again.reached_at == result.reached_at


@pytest.mark.parametrize("prioritized", [True, False])
def test_a_learner_that_becomes_nan_is_not_committed(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, prioritized: bool
) -> None:
    """Also if no version is published before the next commit."""
    learn = DQN.learn

    def explode(self: DQN, rows: dict[str, Tensor], progress: float) -> Any:
        if self.updates == 60:
            with torch.no_grad():
                next(self.target.parameters()).fill_(math.nan)
        losses, errors = learn(self, rows, progress)
        return dict.fromkeys(losses, 0.0), errors.nan_to_num()

    options = {"prioritized": prioritized, "publish_every": 10_000, "checkpoint_every": 128}
    args = small(tmp_path, cluster=cluster, **options)
    with monkeypatch.context() as patched:
        patched.setattr(DQN, "learn", explode)
        with pytest.raises(Diverged, match="holds NaN and is not saved"):
            run(DQN, args)
    assert 0 < note_of(tmp_path)["steps"] < 1_024
    assert run(DQN, args).steps >= 1_024
    assert check_rows(tmp_path / "replay") >= 1_024


def test_weights_move_when_the_softmax_of_values_has_diverged(tmp_path: Path, cluster: str) -> None:
    never = run(DQN, small(tmp_path / "never", cluster=cluster, sync="never"))
    assert never.pulls == 0
    rule = {"sync": "divergence", "lr": 0.01, "temperature": 0.1, "publish_every": 4}
    often = run(DQN, small(tmp_path / "often", cluster=cluster, **rule, threshold=1e-6))
    rarely = run(DQN, small(tmp_path / "rarely", cluster=cluster, **rule, threshold=0.1))
    assert 0 < rarely.pulls < often.pulls


def test_a_run_killed_in_the_middle_goes_on_with_the_same_command(
    tmp_path: Path,
    cluster: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    args = small(out, cluster=cluster, total_steps=10_000, prioritized=True, rows_per_update=4)
    flags = {
        name: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in vars(args).items()
        if value is not None and not isinstance(value, bool)
    }
    command = [sys.executable, "-m", "pipelines.dqn", "--prioritized"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", *value.split()]

    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            committed = wait_until(lambda: (note_of(out) or {}).get("steps", 0) > 0, 60)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert committed
    assert process.returncode == -signal.SIGKILL
    note = note_of(out)
    assert 0 < note["steps"] < 10_000
    assert not note["finished"]
    assert check_rows(out / "replay") == note["steps"]
    saved = torch.load(out / note["learner"], weights_only=True)
    assert saved["metrics"]["steps"] == note["steps"]
    before = [row["updates"] for row in progress(out) if row["steps"] <= note["steps"]]

    train(DQN, command[3:])
    said = capsys.readouterr().out
    assert f"from {note['steps']:,} steps" in said
    assert str(out / "replay") in said
    steps = check_rows(out / "replay")
    versions = clusterenv.open_dataset(out / "replay").to_table(columns=["version"])["version"]
    acted = versions.to_numpy()
    assert acted[: note["steps"]].max() < acted[note["steps"] :].min()  # numbers go on
    rows = progress(out)
    assert [row["updates"] for row in rows][: len(before)] == before
    assert rows[-1]["steps"] == steps >= 10_000
    for name in ("steps", "seconds", "version", "updates", "episodes", "pulls"):
        values = [row[name] for row in rows]
        assert values == sorted(values), name
    note = note_of(out)
    assert note["finished"]
    runs = clusterenv.open_dataset(out / "replay").to_table(columns=["run"])["run"]
    assert len(runs.unique()) == 2  # one of each collector


def test_the_same_command_without_out_finds_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    monkeypatch.chdir(tmp_path)
    args = small(None, cluster=cluster, total_steps=300)
    first = run(DQN, args)
    assert first.out == Path("runs/dqn-CartPole-v1-seed1")
    name = first.out.name
    assert find_directory(args, "dqn") == Path(f"runs/{name}-2")  # the first has finished
    manifest = first.out / "replay" / "manifest.json"
    envelope = json.loads(manifest.read_text())
    text = envelope["manifest"].replace('"finished": true', '"finished": false')
    crc = zlib.crc32(text.encode())
    manifest.write_text(json.dumps({**envelope, "manifest": text, "crc32": crc}))
    assert find_directory(args, "dqn") == first.out
    assert find_directory(small(None, lr=0.5), "dqn") == Path(f"runs/{name}-2")


def test_a_store_that_does_not_fit_into_memory_leaves_nothing_to_go_on_from(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StoreTooLarge, match=r"capacity=[\d_]+ fits"):
        run(DQN, small(tmp_path, capacity=10**12, cluster=cluster, quiet=False))
    assert "connecting to" in (said := capsys.readouterr().out)
    assert "saved" not in said
    assert "learner" not in (note_of(tmp_path) or {})


def test_an_unknown_environment_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnknownEnv):
        run(DQN, Args(env="Nowhere-v0", out=tmp_path / "run", quiet=True))
    assert not (tmp_path / "run").exists()
