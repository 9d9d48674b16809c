"""IMPALA and IMPACT: their losses, their runs, and what they refuse."""

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
from batches import Fleet
from distributed import Client
from small_runs import check_same, killed_and_gone_on, progress, rows_learned
from torch import nn

import clusterenv
from clusterenv import Batch
from clusterenv.errors import ConfigError, Diverged, StaleBatch
from clusterenv.policies import Context
from clusterenv.returns import VTrace
from clusterenv.store import Rollout
from pipelines.experiment import run
from pipelines.experiment.directories import note_of
from pipelines.experiment.episodes import Episodes
from pipelines.experiment.feeds import StreamFeed
from pipelines.impact import IMPACT
from pipelines.impact import ratio as impact_ratio
from pipelines.impala import IMPALA
from pipelines.networks.action_head import ActionHead
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.recurrent import RecurrentActorCritic

BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Discrete(2)
LEARNERS = [IMPALA, IMPACT]


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    """The shared workers' scheduler: no cluster is started for each run."""
    return str(client.scheduler.address)


def short(kind: Any, out: Path | None, steps: int, **changes: Any) -> Any:
    """A few fragments of 4 × 16 rows."""
    sizes = {"num_envs": 8, "horizon": 16, "shards": 2, "log_every": 1, "quiet": True}
    return kind.preset("CartPole-v1", total_steps=steps, out=out, **{**sizes, **changes})


def rows_of(learner: Any, behind: float = 0.0, time: int = 16, envs: int = 4) -> Rollout:
    """Return random rows; every action has become likelier by ``behind`` since it was taken."""
    torch.manual_seed(1)
    obs, action = torch.randn(time, envs, 3), torch.zeros(time, envs, dtype=torch.long)
    ends = torch.zeros(time, envs, dtype=torch.bool)
    last = torch.arange((time - 1) * envs, time * envs)
    columns = {"obs": obs, "action": action, "reward": torch.ones(time, envs), "step": ends + 1}
    columns |= {"terminated": ends, "truncated": ends, "log_prob": torch.zeros(time, envs)}
    rows = Rollout(columns, last, {"obs": torch.randn(envs, 3)}, learner.agent.initial_state(envs))
    with torch.no_grad():
        rows.columns["log_prob"] = learner.agent.unroll(rows).log_prob - behind
    return rows


def learner_of(kind: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    options = {"normalize_obs": False, "anneal": False, "entropy": 0.0, "lr": 0.01, **changes}
    return kind(kind.args_type(**options), BOX, TWO)


# The losses


@pytest.mark.parametrize("kind", LEARNERS)
@pytest.mark.parametrize("actions", [TWO, gym.spaces.Box(-1, 1, (2,), np.float32)])
def test_what_earns_more_becomes_likelier(kind: Any, actions: gym.Space) -> None:
    """A bandit: the reward is 1 for the first action, or for a positive first number."""
    torch.manual_seed(0)
    args = kind.args_type(normalize_obs=False, lr=0.02, anneal=False, gamma=0.0, entropy=0.0)
    learner = kind(args, BOX, actions)
    envs = 64
    obs = torch.zeros(1, envs, 3)
    ends = torch.ones(1, envs, dtype=torch.bool)
    for _ in range(60):
        with torch.no_grad():
            chosen = learner.agent.distribution(obs[0])
            action = chosen.sample()
        good = action[:, 0] > 0 if learner.agent.head.log_std is not None else action == 0
        columns = {"obs": obs, "reward": good.float().unsqueeze(0), "step": 0 * ends}
        columns |= {learner.agent.head.column: action.unsqueeze(0), "terminated": ends}
        columns |= {"truncated": ~ends, "log_prob": chosen.log_prob(action).unsqueeze(0)}
        learner.learn(Rollout(columns, torch.arange(envs), {"obs": obs[0]}), 0.0)
    out = learner.agent.distribution(obs[0, :1])
    likely = out.probs[0, 0] if learner.agent.head.log_std is None else out.mode[0, 0]
    assert likely > 0.9 if learner.agent.head.log_std is None else likely > 0.2


def test_the_weight_of_older_rows_is_bounded() -> None:
    steps = []
    for behind in (0.0, -math.log(2), 3.0):
        learner = learner_of(IMPALA, value_coef=0.0, gamma=0.0)
        before = learner.agent.actor[-1].bias.detach().clone()
        learner.optimizer = Descent(learner.agent, 0.1)
        learner.learn(rows_of(learner, behind), 0.0)
        steps.append(learner.agent.actor[-1].bias.detach() - before)
    torch.testing.assert_close(steps[1], 0.5 * steps[0])  # half as likely as when it was taken
    torch.testing.assert_close(steps[2], steps[0])  # 20 times as likely: clipped at 1


class Descent(torch.optim.SGD):
    """Plain gradient descent, with FlatAdam's method."""

    def __init__(self, module: nn.Module, lr: float) -> None:
        super().__init__(module.parameters(), lr)

    def descend(self, loss: torch.Tensor, max_norm: float) -> torch.Tensor:
        self.zero_grad()
        loss.backward()
        self.step()
        return torch.tensor(0.0)


def test_impacts_ratio_is_the_truncated_one_times_the_policys() -> None:
    torch.manual_seed(0)
    learner, target, behaviour = torch.rand(3, 100, dtype=torch.float64).log()
    expected = (behaviour - target).exp().clamp(max=2) * (learner - behaviour).exp()
    torch.testing.assert_close(impact_ratio(learner, target, behaviour), expected)


@pytest.mark.parametrize("normalized", [True, False])
def test_impacts_advantages_are_normalized_unless_told_otherwise(normalized: bool) -> None:
    learner = learner_of(IMPACT, normalize_advantages=normalized)
    rows = rows_of(learner)
    unrolled = learner.agent.unroll(rows)
    expected = learner.targets(rows, unrolled, unrolled.log_prob).advantages.flatten()
    if normalized:
        expected = (expected - expected.mean()) / expected.std()
    torch.testing.assert_close(learner.prepare(rows)[-2], expected)


def test_impacts_target_follows_every_so_many_updates() -> None:
    learner = learner_of(IMPACT, target_every=3)
    rows = rows_of(learner)
    for update in range(1, 7):
        learner.learn(rows, 0.0)
        pairs = zip(learner.target.parameters(), learner.agent.parameters(), strict=True)
        assert all(map(torch.equal, *zip(*pairs, strict=True))) == (update % 3 == 0)


@pytest.mark.parametrize(("kl", "factor"), [(0.03, 1.5), (0.001, 0.5), (0.01, 1.0)])
def test_impacts_penalty_follows_the_divergence(kl: float, factor: float) -> None:
    learner = learner_of(IMPACT, kl_coef=1.0, kl_target=0.01)
    learner.adapt(kl)
    assert learner.kl_coef == factor


def test_impacts_penalty_can_always_come_back() -> None:
    learner = learner_of(IMPACT, kl_coef=1.0)
    for _ in range(2_000):
        learner.adapt(0.0)
    assert learner.kl_coef > 0
    for _ in range(2_000):
        learner.adapt(1.0)
    assert math.isfinite(learner.kl_coef)
    off = learner_of(IMPACT, kl_coef=0.0)
    off.adapt(0.0)
    assert off.kl_coef == 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Box(-1, 1, (2,), np.float64),
        gym.spaces.Box(-1, 1, (2, 3), np.float32),
        gym.spaces.Box(0, 255, (7, 7, 3), np.uint8),
    ],
)
def test_agents_take_flat_observations_of_any_dtype_and_shape(space: Any, normalize: bool) -> None:
    obs = torch.from_numpy(np.stack([space.sample() for _ in range(4)]))
    for agent in (
        ActorCritic(space, TWO, (8,), normalize),
        RecurrentActorCritic(space, TWO, (8,), 4, normalize),
    ):
        state = agent.initial_state(4)
        assert agent.act(obs, Context(torch.arange(4), state=state)).action.shape == (4,)


def test_nan_losses_are_seen() -> None:
    learner = learner_of(IMPALA)
    rows = rows_of(learner)
    rows.columns["reward"] = torch.full_like(rows["reward"], math.nan)
    assert learner.learn(rows, 0.0)["value_loss"].isnan()


def test_an_action_head_encodes_what_was_taken() -> None:
    discrete = ActionHead(gym.spaces.Discrete(3)).encode(torch.tensor([2, 0]))
    assert discrete.tolist() == [[0, 0, 1], [1, 0, 0]]
    raw = torch.tensor([[0.5, -2.0]])
    assert torch.equal(ActionHead(gym.spaces.Box(-1, 1, (2,))).encode(raw), raw)


# Runs


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_run_learns_from_every_fragment_and_goes_on(
    kind: Any, tmp_path: Path, cluster: str
) -> None:
    first = run(kind, short(kind, tmp_path, 1_024, cluster=cluster))
    assert rows_learned(progress(tmp_path)[-1]) == pytest.approx(64 * first.updates, rel=0.02)
    result = run(kind, short(kind, tmp_path, 2_048, cluster=cluster))
    assert result.steps == 2_048
    rows = progress(tmp_path)
    assert [row["steps"] for row in rows] == sorted({row["steps"] for row in rows})
    assert result.updates >= 2_048 / 64
    if kind is IMPALA:
        assert result.updates == 2_048 / 64  # every fragment once
    else:
        assert result.updates <= 2 * 2_048 / 64
    assert 0 < rows[-1]["learner_share"] <= 1


class Source:
    """Fragments, of which so many are always waiting."""

    def __init__(self, ready: int) -> None:
        self.ready, self.rows, self.fleet = ready, 0, Fleet(seed=1)

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(5):
            batch = self.fleet.next()[0]
            self.rows += batch.num_rows
            yield batch


@pytest.mark.parametrize(
    ("ready", "draws", "samples"), [(0, 1, 5 * 3), (1, 1, 5), (1, 2, 5 * 2), (1, 3, 5 * 3)]
)
def test_impact_uses_a_fragment_again_while_none_arrives_and_as_often_as_wanted(
    ready: int, draws: int, samples: int
) -> None:
    learner = learner_of(IMPACT, uses=3, draws=draws, buffer=8, num_envs=8, horizon=32)
    feed = StreamFeed(learner, Episodes(8), 0)
    found = [rows["obs"] for rows in feed._sampled(Source(ready))]
    assert len(found) == samples
    if not ready:
        assert sorted(sum(torch.equal(a, b) for b in found) for a in found) == [3] * samples


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_learner_goes_on_from_its_state_to_the_last_digit(kind: Any) -> None:
    changes = {"normalize_obs": True} | ({"kl_coef": 1.0} if kind is IMPACT else {})
    first, second = learner_of(kind, **changes), learner_of(kind, **changes)
    rows = rows_of(first)
    for _ in range(5):
        first.learn(rows, 0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, second):
        torch.manual_seed(3)
        learner.learn(rows, 0.2)
    check_same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_killed_run_goes_on_with_the_same_command(
    kind: Any, tmp_path: Path, cluster: str
) -> None:
    sizes = "--num-envs 8 --horizon 16 --shards 2 --log-every 1 --checkpoint-every 256"
    killed_and_gone_on(f"train {kind.name} --env CartPole-v1 {sizes}", tmp_path / "run", cluster)


def test_an_lstm_reproduces_what_the_workers_did(tmp_path: Path, client: Client) -> None:
    """Log-probabilities from the stored state, over episodes that begin within a fragment."""
    torch.manual_seed(0)
    env = gym.make("CartPole-v1")
    agent = RecurrentActorCritic(env.observation_space, env.action_space, (16,), 8)
    with torch.no_grad():
        agent.actor[0].weight.mul_(100)  # so that the state decides
    options = {"num_envs": 4, "horizon": 24, "shards": 2, "seed": 1, "cluster": client}
    seen = []
    with clusterenv.Collector("CartPole-v1", agent, **options) as collector:
        for _ in range(3):
            for batch in collector.rollout():
                rows = batch.torch()
                with torch.no_grad():
                    found = agent.unroll(rows).log_prob
                torch.testing.assert_close(found, rows["log_prob"], atol=1e-4, rtol=1e-4)
                seen.append(rows)
    assert any((rows["step"][1:] == 0).any() for rows in seen)
    later = [rows for rows in seen if (rows["step"][0] > 0).any()]
    assert any(rows.state["last_reward"].any() for rows in later)
    assert any(rows.state["hidden"].any() for rows in later)
    begun = [rows.state["last_reward"][rows["step"][0] == 0] for rows in seen]
    assert not torch.cat(begun).any()  # 0 where an episode begins


def test_the_value_behind_a_truncated_row_goes_on_from_its_state() -> None:
    learner = learner_of(IMPALA, recurrent=8, hidden=(16,))
    rows = rows_of(learner, time=6, envs=2)
    torch.manual_seed(2)
    final = torch.randn(1, 3)
    longer = rows_of(learner, time=6, envs=2)
    longer["obs"][3, 1] = final  # what the row below would show if the episode went on
    rows["truncated"][2, 1] = True
    rows["step"][3:, 1] = torch.arange(3)
    tail = torch.cat([rows.tail["obs"], final])
    cut = Rollout(rows.columns, torch.tensor([10, 11, 5]), {"obs": tail}, rows.state)
    with torch.no_grad():
        found, expected = learner.agent.unroll(cut), learner.agent.unroll(longer)
    torch.testing.assert_close(found.next_value[2, 1], expected.value[3, 1])
    torch.testing.assert_close(found.next_value[:, 0], expected.next_value[:, 0])
    assert not torch.isclose(found.value[3, 1], expected.value[3, 1])


def test_a_recurrent_run_goes_on(tmp_path: Path, cluster: str) -> None:
    changes = {"recurrent": 8, "hidden": (16,), "cluster": cluster}
    run(IMPALA, short(IMPALA, tmp_path, 512, **changes))
    assert run(IMPALA, short(IMPALA, tmp_path, 1_024, **changes)).steps == 1_024


def test_images_have_convolutions(tmp_path: Path) -> None:
    images = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    learner = IMPALA(IMPALA.args_type(horizon=4, lr=0.01), images, TWO)
    obs = torch.randint(0, 255, (4, 2, *images.shape), dtype=torch.uint8)
    ends = torch.zeros(4, 2, dtype=torch.bool)
    columns = {"obs": obs, "action": ends.long(), "reward": torch.ones(4, 2), "step": ends.long()}
    columns |= {"terminated": ends, "truncated": ends, "log_prob": torch.full((4, 2), -0.7)}
    before = [parameter.clone() for parameter in learner.agent.eyes.parameters()]
    rows = Rollout(columns, torch.tensor([6, 7]), {"obs": obs[-1]})
    assert learner.learn(rows, 0.0)["value_loss"].isfinite()
    moved = zip(learner.agent.eyes.parameters(), before, strict=True)
    assert all(not torch.equal(*pair) for pair in moved)


# Bad input


def test_fragments_older_than_allowed_end_the_run_with_what_there_is(
    tmp_path: Path, cluster: str
) -> None:
    args = short(IMPALA, tmp_path, 8_192, cluster=cluster, sync="never", lag_limit=3)
    with pytest.raises(StaleBatch, match=r"4 behind version 4.* goes on with --lag-limit 4"):
        run(IMPALA, args)
    assert note_of(tmp_path)["steps"] == 4 * 64
    assert not note_of(tmp_path)["finished"]
    with pytest.raises(StaleBatch):  # the call that the message names, of the same run
        run(IMPALA, short(IMPALA, tmp_path, 8_192, cluster=cluster, sync="never", lag_limit=8))
    assert note_of(tmp_path)["steps"] > 4 * 64


def test_a_fragment_that_cannot_be_split_as_asked_is_refused() -> None:
    message = "--minibatches 5 cannot split a fragment of 4 environments.*: --minibatches 4"
    with pytest.raises(ConfigError, match=message):
        short(IMPALA, None, 512, minibatches=5, recurrent=8)
    assert short(IMPALA, None, 512, minibatches=4).minibatches == 4


def test_more_shards_than_expected_make_fewer_minibatches() -> None:
    learner = learner_of(IMPALA, minibatches=8, num_envs=16)
    assert len(learner.improve(rows_of(learner, envs=2))) == 2


def test_nan_leaves_the_last_checkpoint(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(IMPALA, short(IMPALA, tmp_path, 256, cluster=cluster))
    (path,) = tmp_path.glob("learner-*.pt")
    before = path.read_bytes()
    monkeypatch.setattr(IMPALA, "targets", lambda *_, **__: _nan_targets())
    with pytest.raises(Diverged, match="holds NaN: the learner has diverged"):
        run(IMPALA, short(IMPALA, tmp_path, 512, cluster=cluster))
    assert path.read_bytes() == before


def _nan_targets() -> Any:
    return VTrace(torch.tensor(math.nan), torch.tensor(math.nan))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (IMPALA, {"minibatches": 0}, "--minibatches must be 1 or more, got 0"),
        (IMPALA, {"queue": 1}, "--queue must be 2 or more, got 1"),
        (IMPALA, {"rho_bar": 0}, "--rho-bar must be above 0, got 0"),
        (IMPALA, {"recurrent": 8, "hidden": ()}, "--recurrent 8 needs a layer .*: --hidden 64"),
        (IMPALA, {"recurrent": -1}, "--recurrent must be 0 or more, got -1"),
        (IMPACT, {"uses": 0}, "--uses must be 1 or more, got 0"),
        (IMPACT, {"buffer": 0}, "--buffer must be 1 or more, got 0"),
        (IMPACT, {"draws": 3}, "--draws 3 of each fragment .* --uses 2: --uses 3"),
        (IMPACT, {"target_every": 0}, "--target-every must be 1 or more, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: Any, changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind.preset("CartPole-v1", **changes)


def test_a_target_network_that_does_not_fit_is_refused(tmp_path: Path, cluster: str) -> None:
    run(IMPACT, short(IMPACT, tmp_path, 256, cluster=cluster))
    (path,) = tmp_path.glob("learner-*.pt")
    saved = torch.load(path, weights_only=True)
    saved["learner"]["target"]["actor.0.weight"] = torch.zeros(3, 3)
    torch.save(saved, path)
    with pytest.raises(ConfigError, match=rf"does not fit the learner.*--out {tmp_path}-2"):
        run(IMPACT, short(IMPACT, tmp_path, 512, cluster=cluster))
