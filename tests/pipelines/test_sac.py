"""SAC: its targets, its networks and its temperature, and its runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from distributed import Client
from small_runs import check_rows, check_same, killed_and_gone_on, progress
from torch import Tensor, nn

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import Context, SquashedGaussian
from clusterenv.store import NStep, ReplayStore, Uniform
from pipelines import cli
from pipelines.experiment import run
from pipelines.networks.continuous import Actor, TwinQ
from pipelines.networks.target import follow
from pipelines.sac import SAC, Args, Temperature, targets
from pipelines.tools.saved_policies import load_run

OBSERVED = gym.spaces.Box(-1, 1, (3,), np.float32)
ACTIONS = gym.spaces.Box(np.float32([-2, 0]), np.float32([2, 1]))


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


def learner_of(actions: gym.Space[Any] = ACTIONS, **options: Any) -> SAC:
    torch.manual_seed(2)
    return SAC(Args(**{"hidden": (16,), **options}), OBSERVED, actions)


def some_rows(n: int = 32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "obs": torch.randn(n, 3),
        "next_obs": torch.randn(n, 3),
        "action": torch.tensor([4.0, 1.0]) * (torch.rand(n, 2) - torch.tensor([0.5, 0.0])),
        "reward": torch.randn(n),
        "discount": torch.full((n,), 0.9),
        "terminated": torch.rand(n) < 0.2,
        "weights": torch.rand(n),
    }


# The targets


def test_the_lower_critic_and_the_entropy_count() -> None:
    rows = {
        "reward": torch.tensor([1.0, -1.0]),
        "discount": torch.tensor([0.9, 0.5]),
        "terminated": torch.tensor([False, False]),
    }
    values, log_prob = torch.tensor([[10.0, 3.0], [8.0, 5.0]]), torch.tensor([-2.0, 1.0])
    found = targets(rows, values, log_prob, 0.5)
    assert found.tolist() == pytest.approx([1 + 0.9 * (8 + 1), -1 + 0.5 * (3 - 0.5)])


def test_a_terminated_row_is_worth_its_reward_alone_and_a_truncated_one_more() -> None:
    rows = {
        "reward": torch.tensor([3.0, 3.0]),
        "discount": torch.tensor([0.9, 0.9]),
        "terminated": torch.tensor([True, False]),
        "truncated": torch.tensor([False, True]),
    }
    found = targets(rows, torch.full((2, 2), 2.0), torch.full((2,), -1.0), torch.tensor(0.1))
    assert found.tolist() == pytest.approx([3.0, 3 + 0.9 * 2.1])


def test_returns_of_several_steps_pay_for_the_last_entropy_alone() -> None:
    # One environment: three steps of an episode that is truncated, then two that end it.
    columns = {
        "obs": np.arange(5, dtype=np.float32)[:, None],
        "action": np.zeros((5, 1), np.float32),
        "reward": np.array([1, 2, 4, 8, 16], np.float32),
        "terminated": np.array([False, False, False, False, True]),
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
    values = 100 + rows["next_obs"].T.expand(2, -1)
    expected = [
        1 + 0.5 * 2 + 0.25 * (102 + 1),  # the value of the observation two steps later
        2 + 0.5 * 4 + 0.25 * (109 + 1),  # truncated: the final observation's value counts
        4 + 0.5 * (109 + 1),  # one step from the truncation
        8 + 0.5 * 16,  # terminated after two steps
        16.0,
    ]
    assert targets(rows, values, torch.full((5,), -2.0), 0.5).tolist() == pytest.approx(expected)


# The networks


def test_the_two_critics_are_two_networks() -> None:
    torch.manual_seed(0)
    q, obs, action = TwinQ(OBSERVED, ACTIONS, (8, 4)), torch.randn(5, 3), torch.randn(5, 2)
    values = q(obs, action)
    for i in range(2):
        features = torch.cat([obs, action], -1)
        for layer, (weight, bias) in enumerate(zip(q.weights, q.biases, strict=True)):
            features = nn.functional.linear(features, weight[i].T, bias[i, 0])
            features = features.relu() if layer < 2 else features
        torch.testing.assert_close(values[i], features[:, 0])
    assert not torch.allclose(values[0], values[1])
    values[0].sum().backward()
    for weight in q.weights:
        assert weight.grad is not None
        assert weight.grad[0].any()
        assert not weight.grad[1].any()


def test_float64_observations_of_any_shape_are_flattened() -> None:
    space = gym.spaces.Box(-1, 1, (2, 3), np.float64)
    obs = torch.randn(4, 2, 3, dtype=torch.float64)
    assert Actor(space, ACTIONS, (8,))(obs).shape == (4, 4)
    assert TwinQ(space, ACTIONS, (8,))(obs, torch.zeros(4, 2)).shape == (2, 4)


def test_a_target_follows_by_a_part_of_the_way() -> None:
    ours, theirs = nn.Linear(2, 2), nn.Linear(2, 2)
    expected = ours.weight + 0.25 * (theirs.weight - ours.weight)
    follow(ours, theirs, 0.25)
    torch.testing.assert_close(ours.weight, expected)


# The learner


def test_an_update_moves_what_it_should() -> None:
    learner, rows = learner_of(tau=0.25, actor_every=2), some_rows()

    def state() -> dict[str, Tensor]:
        return {
            "actor": nn.utils.parameters_to_vector(learner.policy.parameters()).detach().clone(),
            "q": nn.utils.parameters_to_vector(learner.q.parameters()).detach().clone(),
            "target": nn.utils.parameters_to_vector(learner.target.parameters()).clone(),
            "alpha": learner.temperature.alpha.clone(),
        }

    before = state()
    learner.learn(rows, 0.0)
    first = state()
    for name in before:
        assert not torch.equal(first[name], before[name]), name
    expected = before["target"] + 0.25 * (first["q"] - before["target"])
    torch.testing.assert_close(first["target"], expected)
    learner.learn(rows, 0.0)
    second = state()
    assert torch.equal(second["actor"], first["actor"])  # every second update alone
    assert torch.equal(second["alpha"], first["alpha"])
    assert not torch.equal(second["q"], first["q"])
    learner.update_actor(rows["obs"])
    assert torch.equal(state()["q"], second["q"])  # the critics judge, and do not learn from it
    assert all(parameter.requires_grad for parameter in learner.q.parameters())


def test_errors_are_of_both_critics_and_weights_count() -> None:
    learner, rows = learner_of(initial_alpha=0.3), some_rows()
    torch.manual_seed(5)
    with torch.no_grad():
        action, log_prob = learner.sample(rows["next_obs"])
        wanted = targets(rows, learner.target(rows["next_obs"], action), log_prob, 0.3)
        errors = learner.q(rows["obs"], learner.policy.unit(rows["action"])) - wanted
    torch.manual_seed(5)
    losses, found = learner.learn(rows, 0.0)
    torch.testing.assert_close(found, errors.abs().mean(0))
    expected = 0.5 * (rows["weights"] * errors.square()).mean(1).sum()
    torch.testing.assert_close(losses["loss"].detach(), expected)
    before = [parameter.clone() for parameter in learner.q.parameters()]
    learner = learner_of()
    before = [parameter.clone() for parameter in learner.q.parameters()]
    learner.update_critics({**rows, "weights": torch.zeros(32)})
    for old, new in zip(before, learner.q.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(("log_prob", "rises"), [(3.0, True), (-3.0, False)])
def test_the_temperature_rises_while_the_entropy_is_below_its_target(
    log_prob: float, rises: bool
) -> None:
    temperature = Temperature(0.5, target_entropy=-1.0)  # entropy is -log_prob
    assert temperature.alpha.item() == pytest.approx(0.5)
    optimizer = torch.optim.Adam(temperature.parameters(), 0.01)
    temperature.loss(torch.full((8,), log_prob, requires_grad=True)).backward()
    optimizer.step()
    assert (temperature.alpha.item() > 0.5) == rises


def test_the_entropy_comes_to_its_target() -> None:
    """A reward that does not depend on the action leaves the entropy to the temperature."""
    rows = {**some_rows(256), "terminated": torch.ones(256, dtype=torch.bool)}
    rows |= {"reward": torch.zeros(256), "weights": torch.ones(256)}
    learner = learner_of(lr=3e-3, alpha_lr=1e-2, initial_alpha=0.01, target_entropy=0.5)
    assert -learner.sample(rows["obs"])[1].mean().item() > 0.7
    for _ in range(600):
        losses, _ = learner.learn(rows, 0.0)
    assert losses["entropy"].item() == pytest.approx(0.5, abs=0.2)


def test_the_actor_finds_the_best_action() -> None:
    rows = {**some_rows(256), "terminated": torch.ones(256, dtype=torch.bool)}
    best = torch.tensor([1.2, 0.3])
    distance = (rows["action"] - best) / torch.tensor([2.0, 0.5])
    rows |= {"reward": -distance.square().sum(-1), "weights": torch.ones(256)}
    learner = learner_of(lr=3e-3, critic_lr=3e-3, initial_alpha=0.01, alpha_lr=0, hidden=(64,))
    for _ in range(800):
        learner.learn(rows, 0.0)
    context = Context(torch.arange(256), deterministic=True)
    found = learner.policy.act(rows["obs"], context).action
    assert learner.temperature.alpha.item() == pytest.approx(0.01)  # a learning rate of 0
    assert ((found.mean(0) - best).abs() < torch.tensor([0.4, 0.1])).all()


def test_nothing_depends_on_the_unit_of_the_actions() -> None:
    rows, losses = some_rows(), []
    for scale in (1.0, 100.0):
        space = gym.spaces.Box(np.float32(scale * ACTIONS.low), np.float32(scale * ACTIONS.high))
        learner = learner_of(space)
        scaled = {**rows, "action": scale * rows["action"]}
        torch.manual_seed(3)
        losses.append([learner.learn(scaled, 0.0)[0] for _ in range(5)][-1])
    for name in losses[0]:
        first, second = (float(torch.as_tensor(each[name]).detach()) for each in losses)
        assert first == pytest.approx(second, rel=1e-3, abs=1e-4)


def test_both_learning_rates_come_down_with_the_run() -> None:
    learner, rows = learner_of(lr=0.5, critic_lr=0.2, anneal=True), some_rows()
    found = []
    for at in (0.0, 0.5, 1.0):
        lr = learner.learn(rows, at)[0]["lr"]
        found.append((lr, learner.critic_optimizer.param_groups[0]["lr"]))
    assert found == [pytest.approx(pair) for pair in ((0.5, 0.2), (0.25, 0.1), (0.0, 0.0))]


def test_a_learner_goes_on_from_its_state_to_the_last_digit() -> None:
    rows = some_rows()
    first, second = learner_of(actor_every=2), learner_of(actor_every=2)
    for _ in range(3):
        first.learn(rows, 0.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, second):
        torch.manual_seed(3)
        for _ in range(3):
            learner.learn(rows, 0.0)
    check_same(first.state_dict(), second.state_dict())
    assert first.updates == 6


# Runs


def small(out: Path | None, **changes: Any) -> Args:
    sizes = {"total_steps": 1_024, "num_envs": 4, "shards": 2, "min_rows": 128, "batch": 16}
    sizes |= {"hidden": (16,), "log_every": 128, "checkpoint_every": 256, "rows_per_update": 4}
    sizes |= {"random_steps": 128, "publish_every": 8, "quiet": True}
    args: Args = SAC.preset("Pendulum-v1", **{**sizes, "out": out, **changes})
    return args


def test_a_run_begins_at_random_learns_is_evaluated_and_exported(
    tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    result = run(SAC, small(out, cluster=cluster, n_step=3, prioritized=True))
    assert 1_024 <= result.steps < 1_024 + 2 * 8 * 4
    # A row is good for a quarter of an update, and those before the first update for none.
    assert result.updates == pytest.approx((result.steps - 128) / 4, abs=16)
    rows = progress(out)
    wanted = {"alpha", "entropy", "loss", "policy_loss", "q", "epsilon", "store_rows"}
    assert wanted <= rows[0].keys()
    assert all(math.isfinite(row[name]) for row in rows for name in wanted)
    assert rows[-1]["epsilon"] == 0

    assert check_rows(out / "replay") == result.steps
    table = clusterenv.open_dataset(result.dataset).to_table(columns=["version", "log_prob"])
    acted, log_prob = (table[name].to_numpy() for name in ("version", "log_prob"))
    np.testing.assert_allclose(log_prob[:64], -math.log(4.0), rtol=1e-5)  # uniform from -2 to 2
    assert np.std(log_prob[acted == acted.max()]) > 0

    assert cli.main(["evaluate", str(out), "--episodes", "4", "--cluster", cluster]) == 0
    assert "the best action each time" in capsys.readouterr().out
    policy, file = load_run(out).policy, tmp_path / "policy.pt2"
    assert isinstance(policy, SquashedGaussian)
    assert cli.main(["export", str(out), str(file)]) == 0
    obs = torch.randn(7, 3)
    context = Context(torch.arange(7), deterministic=True)
    with torch.no_grad():
        expected = policy.act(obs, context).action
        torch.testing.assert_close(torch.export.load(file).module()(obs), expected)


def test_weights_move_when_the_gaussians_have_diverged(tmp_path: Path, cluster: str) -> None:
    rule = {"sync": "divergence", "cluster": cluster, "lr": 3e-3, "publish_every": 4}
    often = run(SAC, small(tmp_path / "often", **rule, threshold=1e-6))
    rarely = run(SAC, small(tmp_path / "rarely", **rule, threshold=0.1))
    assert 0 < rarely.pulls < often.pulls


def test_a_killed_run_goes_on_with_the_same_command(tmp_path: Path, cluster: str) -> None:
    sizes = "--num-envs 8 --horizon 16 --shards 2 --log-every 128 --checkpoint-every 256"
    learning = "--hidden 16 --batch 16 --rows-per-update 16 --min-rows 128 --random-steps 128"
    killed_and_gone_on(f"train sac {sizes} {learning}", tmp_path / "run", cluster)
    assert check_rows(tmp_path / "run" / "replay") >= 20_000


@pytest.mark.parametrize(
    ("observations", "actions", "says"),
    [
        (
            OBSERVED,
            gym.spaces.Discrete(2),
            r"Pendulum-v1 has Discrete\(2\): clusterenv train dqn .*clusterenv train ppo --env Pen",
        ),
        (OBSERVED, gym.spaces.MultiDiscrete([2, 3]), "clusterenv train ppo"),
        (OBSERVED, gym.spaces.Box(-np.inf, np.inf, (2,)), "tanh squashes actions between bounds"),
        (gym.spaces.Discrete(3), ACTIONS, "FlattenObservation"),
        (gym.spaces.Box(0, 255, (4, 84, 84), np.uint8), ACTIONS, "no convolutions for images"),
    ],
)
def test_spaces_it_cannot_take_are_refused(
    observations: gym.Space[Any], actions: gym.Space[Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        SAC(Args(), observations, actions)


def test_discrete_actions_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", "sac", "--env", "CartPole-v1", "--out", str(out)]) == 2
    assert "clusterenv train dqn --env CartPole-v1" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau": 0}, "--tau must be above 0, got 0"),
        ({"critic_lr": 0}, "--critic-lr must be above 0, got 0"),
        ({"alpha_lr": -1}, "--alpha-lr must be 0 or more, got -1"),
        ({"initial_alpha": 0}, "--initial-alpha must be above 0, got 0"),
        ({"target_entropy": math.nan}, "--target-entropy must be a finite number, got nan"),
        ({"actor_every": 0}, "--actor-every must be 1 or more, got 0"),
        ({"random_steps": -1}, "--random-steps must be 0 or more, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Args(**changes)
