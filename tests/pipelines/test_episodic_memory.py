"""The episodic memory: what is rare, what is kept and recalled, and runs with it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from small_runs import check_same, killed_and_gone_on, progress
from torch import Tensor, nn

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import Context
from clusterenv.store import Rollout
from clusterenv.sync.weights import manifest_of
from pipelines.episodic_memory import MemoryIMPALA
from pipelines.experiment import run
from pipelines.impala import IMPALA
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.episodic_memory import (
    EpisodicMemory,
    Familiarity,
    MemoryCell,
    nt_xent,
    perturb,
    rarity,
)
from pipelines.networks.images import tile_cnn
from pipelines.tools.export import export

GRID = "clusterenv/ZipfGridworldSmall-v0"
IMAGE = gym.spaces.Box(0, 255, (18, 27, 3), np.uint8)
FOUR = gym.spaces.Discrete(4)
SMALL: dict[str, Any] = {
    "num_envs": 4,
    "horizon": 8,
    "shards": 2,
    "recurrent": 8,
    "cnn": "tiles:9",
    "engine": "native",
    "memory": 16,
    "familiarity": 32,
    "items": 4,
    "contrasted": 8,
    "quiet": True,
    "log_every": 1,
}


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler."""
    return str(client.scheduler.address)


def learner_of(**changes: Any) -> MemoryIMPALA:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # as in a run
    args = MemoryIMPALA.args_type(**{**SMALL, "anneal": False, "lr": 0.01, **changes})
    return MemoryIMPALA(args, IMAGE, FOUR)


def rows_of(learner: MemoryIMPALA, seed: int = 1, time: int = 8, envs: int = 4) -> Rollout:
    """Return random rows of which one begins an episode."""
    torch.manual_seed(seed)
    obs = torch.randint(0, 256, (time + 1, envs, *IMAGE.shape), dtype=torch.uint8)
    ends = torch.zeros(time, envs, dtype=torch.bool)
    ends[2, 1] = True
    step = torch.arange(time).unsqueeze(-1).repeat(1, envs) + 1
    step[3:, 1] = torch.arange(time - 3)
    columns = {"obs": obs[:-1], "action": torch.randint(0, 4, (time, envs)), "step": step}
    columns |= {"reward": torch.rand(time, envs), "terminated": ends, "truncated": ends & ~ends}
    columns |= {"log_prob": torch.full((time, envs), -math.log(4))}
    tails = torch.tensor([2 * envs + 1, *range((time - 1) * envs, time * envs)])
    tail = {"obs": torch.cat([obs[3, 1:2], obs[-1]])}
    return Rollout(columns, tails, tail, learner.agent.initial_state(envs))


# What is rare


def test_nt_xent_is_the_formula_it_is_named_after() -> None:
    torch.manual_seed(0)
    items, copies = torch.randn(2, 5, 3, dtype=torch.float64)
    every = [vector / vector.norm() for vector in (*items, *copies)]
    expected = []
    for i in range(5):
        both = []
        for one, other in ((i, i + 5), (i + 5, i)):
            likes = [math.exp(float(every[one] @ each) / 0.2) for each in every]
            both.append(-math.log(likes[other] / (sum(likes) - likes[one])))
        expected.append(sum(both) / 2)
    found = nt_xent(items, copies, 0.2)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_images_that_are_equal_need_not_be_told_apart() -> None:
    torch.manual_seed(0)
    items, copies = torch.randn(2, 4, 3)
    twice = [torch.cat([part, part[:1]]) for part in (items, copies)]
    codes = torch.tensor([7, 8, 9, 10, 7])
    found, alone = nt_xent(*twice, 0.2, codes), nt_xent(items, copies, 0.2)
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[4], alone[0])
    assert (nt_xent(*twice, 0.2)[0] > alone[0] + 0.1).all()
    assert (found[1:4] > alone[1:4]).all()  # which have two more to be told from


def test_rarity_is_that_of_the_standardised_momentum() -> None:
    momentum = torch.tensor([0.1, 0.4, 0.9, 2.0])
    z = (momentum - momentum.mean()) / momentum.std()
    torch.testing.assert_close(rarity(momentum, momentum), 0.5 + 0.5 * z / z.abs().max())
    assert rarity(torch.ones(2), torch.ones(3)).tolist() == [0.5, 0.5]
    assert rarity(torch.ones(0), torch.ones(0)).tolist() == []


def test_the_momentum_of_a_loss_begins_with_the_first() -> None:
    familiarity = Familiarity(4, (1,), 1, beta=0.75)
    familiarity.add(torch.zeros(3, 1, dtype=torch.uint8), torch.zeros(3, 1))
    familiarity.judge(torch.tensor([0, 2]), torch.tensor([4.0, 1.0]))
    familiarity.judge(torch.tensor([0]), torch.tensor([2.0]))
    assert familiarity.items.momentum.tolist() == [3.5, -1, 1, -1]
    assert set(familiarity.sample(10).tolist()) == {0, 1, 2}


def test_the_oldest_items_leave_a_circular_buffer() -> None:
    familiarity = Familiarity(5, (1,), 1, beta=0.5)

    def add(*numbers: int) -> list[int]:
        image = torch.tensor(numbers, dtype=torch.uint8).unsqueeze(-1)
        return familiarity.add(image, image.float()).value.flatten().int().tolist()

    assert add(1, 2, 3) == []
    assert add(4, 5, 6, 7) == [1, 2]
    assert add(8, 9, 10, 11) == [3, 4, 5, 6]
    assert sorted(familiarity.items.image.flatten().tolist()) == [7, 8, 9, 10, 11]
    familiarity.judge(torch.arange(5), torch.ones(5))
    add(12)
    assert int((familiarity.items.momentum < 0).sum()) == 1  # the new one's


def test_a_copy_has_noise_and_a_black_square() -> None:
    torch.manual_seed(0)
    for shape, channels in (((30, 40, 3), (3,)), ((4, 3, 30, 40), (1, 2))):
        images = torch.full((50, *shape), 128, dtype=torch.uint8)
        cut = perturb(images, noise=0.0, cutout=0.5)
        assert cut.dtype == torch.uint8
        black = (cut == 0).all(channels)
        assert torch.equal(black, (cut == 0).any(channels))
        for side in (1, 2):
            assert (black.any(side).sum(-1) == 15).all()  # of the shorter side's 30
            assert len(black.any(side).unique(dim=0)) > 5  # somewhere else each time
    noisy = perturb(images, noise=0.1, cutout=0.0).float()
    assert noisy.std().item() == pytest.approx(25.5, rel=0.02)
    assert noisy.mean().item() == pytest.approx(128, abs=1)


# What is kept and recalled


def test_the_least_rare_go_first_be_they_old_or_new() -> None:
    memory = EpisodicMemory(3, 1, 1)

    def write(*rarities: float, fading: float = 1.0) -> list[float]:
        values = torch.tensor(rarities).unsqueeze(-1)
        memory.write(torch.ones_like(values), values, values[:, 0], fading)
        return [round(value, 2) for value in memory.values[: int(memory.held)].flatten().tolist()]

    assert write(0.5, 0.1) == [0.5, 0.1]
    assert write(0.9) == [0.9, 0.5, 0.1]
    assert write(0.3, 0.05) == [0.9, 0.5, 0.3]
    assert write(0.6, fading=0.5) == [0.6, 0.9, 0.5]  # which are 0.45 and 0.25 now
    assert memory.rarity.tolist() == pytest.approx([0.6, 0.45, 0.25])
    assert write() == [0.6, 0.9, 0.5]


@pytest.mark.parametrize("nearest", [1, 2, 5])
def test_the_nearest_by_cosine_answer_with_their_mean(nearest: int) -> None:
    memory = EpisodicMemory(4, 2, 1, nearest)
    assert memory.read(torch.ones(3, 2)).tolist() == [[0.0]] * 3  # it is empty
    keys = torch.tensor([[1.0, 0.0], [0.0, 9.0], [0.5, 0.5]])
    memory.write(keys, torch.tensor([[1.0], [2.0], [4.0]]), torch.ones(3))
    found = memory.read(torch.tensor([[100.0, 1.0], [0.1, 0.2]])).flatten().tolist()
    assert found == {1: [1.0, 4.0], 2: [2.5, 3.0], 5: pytest.approx([7 / 3, 7 / 3])}[nearest]


def test_no_gradient_goes_into_keys_values_or_queries() -> None:
    torch.manual_seed(0)
    memory = EpisodicMemory(4, 3, 2)
    keys, values = torch.randn(3, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    query = torch.randn(5, 3, requires_grad=True)
    memory.write(keys * 2, values * 2, torch.rand(3))
    recalled = memory.read(query)
    assert recalled.any()
    assert not recalled.requires_grad
    assert not any(buffer.requires_grad for buffer in memory.buffers())


def test_the_gate_of_a_cell_lets_in_what_was_recalled() -> None:
    torch.manual_seed(0)
    cell, plain = MemoryCell(3, 2), nn.LSTMCell(3, 2)
    with torch.no_grad():
        weight, bias = cell.gates.weight, cell.gates.bias
        new, keep, take, show, recall = weight.split(2)
        biases = dict(zip(("new", "keep", "take", "show", "recall"), bias.split(2), strict=True))
        plain.bias_hh.zero_()
        order = ((take, "take"), (keep, "keep"), (new, "new"), (show, "show"))  # torch's
        plain.weight_ih.copy_(torch.cat([part[:, :3] for part, _ in order]))
        plain.weight_hh.copy_(torch.cat([part[:, 3:] for part, _ in order]))
        plain.bias_ih.copy_(torch.cat([biases[name] for _, name in order]))
        inputs, state = torch.randn(4, 3), (torch.randn(4, 2), torch.randn(4, 2))
        expected = plain(inputs, state)
        found = cell(torch.cat([torch.zeros(4, 2), inputs], -1), state)
        torch.testing.assert_close(found, expected)  # nothing recalled: an LSTM
        recalled = torch.randn(4, 2)
        gate = (torch.cat([inputs, state[0]], -1) @ recall.T + biases["recall"]).sigmoid()
        _, after = cell(torch.cat([recalled, inputs], -1), state)
        torch.testing.assert_close(after, expected[1] + gate * recalled.tanh())


def test_a_memory_has_the_bytes_that_the_page_says() -> None:
    learner = learner_of(memory=50)
    features, units = 128, 8
    expected = 4 * 50 * (features + units + 1) + 8
    assert learner.agent.memory.nbytes == expected
    of_memory = [e for e in manifest_of(learner.agent).entries if e.name.startswith("memory.")]
    assert sum(entry.nbytes for entry in of_memory) == expected  # what travels
    assert learner.learn(rows_of(learner), 0.0)["memory_bytes"] == expected


# The network for grids


@pytest.mark.parametrize("shape", [(18, 27, 3), (2, 18, 27), (2, 3, 18, 27)])
def test_a_convolution_of_cells_is_the_ordinary_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    body = tile_cnn(shape, 9, features=5, channels=4)
    images = torch.randint(0, 256, (150, *shape), dtype=torch.uint8)
    planes = images.movedim(-1, 1) if shape[-1] == 3 else images.flatten(1, -3)
    conv: Any = body[0].conv
    expected = torch.relu(conv(planes.float() / 255))
    torch.testing.assert_close(torch.relu(body[0](images)), expected)
    weights = torch.randn_like(expected)
    slopes = [
        torch.autograd.grad((out * weights).sum(), list(conv.parameters()))
        for out in (torch.relu(body[0](images)), expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("cnn", "space", "message"),
    [
        ("tiles:5", IMAGE, "--cnn tiles:5 does not divide images of 18 × 27 .*: --cnn tiles:9"),
        ("tiles:9", gym.spaces.Box(-1, 1, (3,)), r"--cnn tiles:9 is for images.*: leave --cnn out"),
        ("tiles:0", IMAGE, "--cnn tiles:0 is unknown, one of residual, .*, tiles:9"),
        ("tiles", IMAGE, "--cnn tiles is unknown, one of residual, .*, tiles:9"),
    ],
)
def test_cells_that_do_not_fit_are_refused(cnn: str, space: Any, message: str) -> None:
    for recurrent in (0, 8):
        with pytest.raises(ConfigError, match=message):
            IMPALA(IMPALA.args_type(cnn=cnn, recurrent=recurrent), space, FOUR)


def test_a_network_for_grids_can_be_exported(tmp_path: Path) -> None:
    agent = IMPALA(IMPALA.args_type(cnn="tiles:9"), IMAGE, FOUR).agent
    assert isinstance(agent, ActorCritic)
    export(agent, IMAGE, tmp_path / "policy.pt2")
    images = torch.randint(0, 256, (3, *IMAGE.shape), dtype=torch.uint8)
    found = torch.export.load(tmp_path / "policy.pt2").module()(images)
    assert torch.equal(found, agent.actor(agent.see(images)).argmax(-1))


# The learner


def test_what_leaves_the_familiarity_buffer_is_remembered() -> None:
    learner = learner_of()
    for fragment in range(12):
        said = learner.learn(rows_of(learner, seed=fragment), 0.0)
        held = max(0, 4 * (fragment + 1) - 32)
        assert said["memory_items"] <= min(held, 16)
    assert said["memory_items"] >= 12  # some were never judged
    assert 0 < said["memory_rarity"] <= 1
    memory = learner.agent.memory
    held = int(memory.held)
    assert memory.keys[:held].any(-1).all()
    assert memory.values[:held].any(-1).all()


def test_what_is_recalled_decides_and_the_rows_are_judged_alike() -> None:
    learner = learner_of()
    agent, rows = learner.agent, rows_of(learner)
    with torch.no_grad():
        agent.actor[0].weight.mul_(100)
        empty = agent.unroll(rows)
        agent.memory.write(torch.randn(16, 128), torch.randn(16, 8), torch.rand(16))
        full = agent.unroll(rows)
        assert not torch.isclose(full.out, empty.out).all(-1).any()
        state: Any = rows.state
        for time in range(3):
            obs = rows["obs"][time]
            context = Context(torch.arange(4), state=state)
            torch.testing.assert_close(agent.distribution(obs, context).logits.exp().sum(-1), ONE)
            decision = agent.act(obs, context)
            taken = agent.head.judge(full.out[time], decision.action)[0]
            torch.testing.assert_close(decision.extras["log_prob"], taken)
            last = agent.head.encode(rows["action"][time])
            state = {**decision.state, "last_action": last, "last_reward": rows["reward"][time]}


ONE: Tensor = torch.ones(4)


def test_the_contrastive_loss_reaches_the_eyes_and_falls() -> None:
    learner = learner_of(contrast=1.0, contrasted=16, lr=0.001)
    rows = rows_of(learner)
    losses = torch.tensor(
        [float(learner.learn(rows, 0.0)["contrast"].detach()) for _ in range(60)]  # type: ignore[union-attr]
    )
    assert losses[-8:].mean() < 0.6 * losses[8:16].mean()
    contrast = learner.contrast()
    learner.optimizer.gradient.zero_()
    contrast.backward()  # type: ignore[no-untyped-call]
    slopes = [parameter.grad.abs().sum() for parameter in learner.agent.eyes.parameters()]
    assert all(slopes)
    assert not learner.agent.core.gates.weight.grad.any()


def test_a_learner_goes_on_from_its_state_to_the_last_digit() -> None:
    first, second = learner_of(), learner_of()
    for seed in range(10):
        first.learn(rows_of(first, seed), 0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    rows = rows_of(first, 99)
    for learner in (first, second):
        torch.manual_seed(3)
        learner.learn(rows, 0.2)
    check_same(first.state_dict(), second.state_dict())


def test_a_run_logs_its_memory_its_splits_and_goes_on(tmp_path: Path, cluster: str) -> None:
    splits = ("zipf", "uniform", "rare")
    evaluated = {"evaluate_every": 256, "evaluate_episodes": 3, "evaluate_splits": splits}
    changes = {**SMALL, **evaluated, "cluster": cluster, "out": tmp_path}
    run(MemoryIMPALA, MemoryIMPALA.preset(GRID, total_steps=256, **changes))
    result = run(MemoryIMPALA, MemoryIMPALA.preset(GRID, total_steps=512, **changes))
    assert result.steps == 512
    last = progress(tmp_path)[-1]
    assert last["memory_items"] == 16
    assert last["memory_bytes"] == 4 * 16 * (128 + 8 + 1) + 8
    assert result.weight_bytes > result.pulls * last["memory_bytes"] > 0
    assert last["eval_steps"] == 512
    assert all(0 <= last[f"eval_{split}"] <= 1 for split in splits)
    assert last["eval_zipf"] == last["eval_return"]


def test_a_killed_run_goes_on_with_the_same_command(tmp_path: Path, cluster: str) -> None:
    sizes = "--num-envs 16 --horizon 32 --shards 2 --log-every 512 --checkpoint-every 512"
    sizes += " --memory 16 --familiarity 32 --contrasted 8 --recurrent 8"
    words = f"train episodic_memory --env {GRID} {sizes}"
    killed_and_gone_on(words, tmp_path / "run", cluster)


def test_workers_act_with_the_memory_of_their_version(tmp_path: Path, client: Client) -> None:
    """The head finds the log-probabilities that the workers found with what they had pulled."""
    learner = learner_of()
    made = gym.make(GRID)
    agent = MemoryIMPALA(learner.args, made.observation_space, made.action_space).agent
    with torch.no_grad():
        agent.actor[0].weight.mul_(100)
    options = {"num_envs": 4, "horizon": 8, "shards": 2, "seed": 1, "cluster": client}
    with clusterenv.Collector(GRID, agent, engine="native", **options) as collector:
        for fill in (0, 16):
            agent.memory.write(torch.rand(fill, 128), 3 * torch.randn(fill, 8), torch.rand(fill))
            version = collector.publish(agent)
            for batch in [*collector.rollout(), *collector.rollout()]:
                if batch.policy_version == version:
                    rows = batch.torch()
                    with torch.no_grad():
                        found = agent.unroll(rows).log_prob
                    torch.testing.assert_close(found, rows["log_prob"], atol=1e-4, rtol=1e-4)
                    seen = fill
    assert seen == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": 0}, "--memory must be 1 or more, got 0"),
        ({"nearest": 6}, "--nearest must be 1 to 5, got 6: --nearest 1"),
        ({"fading": 0}, "--fading must be above 0, got 0"),
        ({"contrasted": 64}, "--contrasted 64 items are never in --familiarity 32"),
        ({"contrasted": 1}, "--contrasted 1 leaves nothing to tell apart: --contrasted 64"),
        ({"items": 33}, "--items 33 of an update .* --familiarity 32: --items 32"),
        ({"recurrent": 0}, "--recurrent must be 1 or more, got 0"),
        ({"beta": 1}, "--beta must be below 1, got 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_of(**changes)


def test_observations_without_an_image_are_refused() -> None:
    args = MemoryIMPALA.args_type(**{**SMALL, "cnn": None, "engine": "auto"})
    both = gym.spaces.Dict(camera=IMAGE, speed=gym.spaces.Box(-1, 1, (2,)))
    for space in (gym.spaces.Box(-1, 1, (3,)), both):
        with pytest.raises(ConfigError, match=r"made of images.*train impala --recurrent 64"):
            MemoryIMPALA(args, space, FOUR)


def test_a_familiarity_buffer_of_another_size_does_not_fit() -> None:
    learner = learner_of()
    for seed in range(10):
        learner.learn(rows_of(learner, seed), 0.0)
    with pytest.raises(ValueError, match=r"image is \[32, 18, 27, 3\] of \[16, 18, 27, 3\]"):
        learner_of(familiarity=16, contrasted=8).load_state_dict(learner.state_dict())
