"""R2D2: states, burn-in, targets and priorities, its runs, and what it refuses."""

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
from agents import Counter
from collecting import Counts
from distributed import Client
from small_runs import check_rows, check_same, killed_and_gone_on, progress, rows_learned
from torch import Tensor

import clusterenv
from clusterenv.errors import ConfigError
from clusterenv.policies import Categorical, Context
from clusterenv.returns import inverse_rescale, rescale, sequence_priorities
from clusterenv.store import Prioritized, ReplayStore, Sequences
from pipelines import cli
from pipelines.apex import ladder
from pipelines.experiment import run
from pipelines.experiment.directories import note_of
from pipelines.experiment.episodes import Episodes
from pipelines.experiment.feeds import ReplayFeed
from pipelines.networks.episode_rows import EpisodeRows
from pipelines.networks.recurrent_q import RecurrentEpsilonGreedy, RecurrentQNetwork
from pipelines.r2d2 import R2D2, Args, RecurrentExplorers, td_errors
from pipelines.tools.saved_policies import collecting_policy, load_run

BOX = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Discrete(2)
NO_VELOCITY = "clusterenv/CartPoleNoVelocity-v1"


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


SIZES: dict[str, Any] = {
    "total_steps": 1_024,
    "num_envs": 4,
    "horizon": 8,
    "sequence": 16,
    "burn_in": 4,
    "shards": 2,
    "min_rows": 128,
    "batch": 4,
    "rows_per_update": 16,
    "hidden": (16,),
    "units": 8,
    "log_every": 128,
    "checkpoint_every": 256,
    "publish_every": 4,
    "target_every": 10,
    "quiet": True,
}


def small(out: Path | None, **changes: Any) -> Args:
    """A run of some ten updates."""
    return R2D2.preset(NO_VELOCITY, **{**SIZES, "out": out, **changes})


def learner_of(**changes: Any) -> R2D2:
    torch.manual_seed(0)
    options = {"hidden": (16,), "units": 8, "sequence": 6, "burn_in": 2, "horizon": 3, "n_step": 2}
    return R2D2(Args(**{**options, **changes}), BOX, TWO)


def sample_of(burn_in: int = 2, n: int = 5, time: int = 6) -> dict[str, Tensor]:
    """Random sequences, as a store has them; the first begins an episode, the last one ends it."""
    torch.manual_seed(1)
    obs = torch.randn(n, time + 1, 3)
    found = {
        "obs": obs[:, :-1],
        "next_obs": obs[:, 1:],
        "action": torch.randint(2, (n, time)),
        "reward": torch.randn(n, time),
        "terminated": torch.zeros(n, time, dtype=torch.bool),
        "truncated": torch.zeros(n, time, dtype=torch.bool),
        "mask": torch.ones(n, time, dtype=torch.bool),
        "weights": torch.rand(n) + 0.1,
        "state.hidden": torch.randn(n, 8),
        "state.cell": torch.randn(n, 8),
        "state.last_action": torch.eye(2)[torch.randint(2, (n,))],
        "state.last_reward": torch.randn(n),
    }
    found["terminated"][-1, 3] = True
    found["mask"][-1, 4:] = False
    for name in found:
        if name.startswith("state."):
            found[name][0] = 0
    found["learn"] = found["mask"].clone()
    found["learn"][1:, :burn_in] = False
    return found


# The network


def test_unrolling_gives_the_values_that_acting_step_by_step_does() -> None:
    q, sample = learner_of().q, sample_of()
    rows = EpisodeRows.of(sample)
    found = q.unroll(rows.obs, rows.action, rows.reward, rows.state)
    assert found.shape == (7, 5, 2)
    state = dict(rows.state)
    for time in range(7):
        values, memory = q(rows.obs[time], state)
        torch.testing.assert_close(found[time], values)
        if time < 6:
            last = {"last_action": q.encode(rows.action[time]), "last_reward": rows.reward[time]}
            state = memory | last
    for burn_in in (1, 4):
        torch.testing.assert_close(q.unroll(*_steps(rows), burn_in), found)


def _steps(rows: EpisodeRows) -> tuple[Any, ...]:
    return rows.obs, rows.action, rows.reward, rows.state


def test_no_gradient_comes_from_later_rows_into_the_burn_in() -> None:
    q, rows = learner_of().q, EpisodeRows.of(sample_of())
    obs, hidden = rows.obs.clone().requires_grad_(), rows.state["hidden"].clone().requires_grad_()
    steps = (obs, rows.action, rows.reward, {**rows.state, "hidden": hidden})
    exact = torch.tensor([True, False, False, False, False])
    q.unroll(*steps, 2, exact)[2:].sum().backward()
    assert not obs.grad[:2, 1:].any()
    assert not hidden.grad[1:].any()
    assert obs.grad[2:].abs().sum((0, 2)).all()
    assert obs.grad[:2, 0].any()  # it begins an episode: all its rows are learned from
    obs.grad = None
    q.unroll(*steps, 0)[2:].sum().backward()
    assert obs.grad[:2].abs().sum((0, 2)).all()


def test_a_duelling_head_adds_advantages_without_their_mean_to_the_state_value() -> None:
    q, out = learner_of().q, torch.randn(9, 8)
    torch.testing.assert_close(q._heads(out).mean(-1, keepdim=True), q.value(out))
    advantages = q.advantage(out)
    torch.testing.assert_close(q._heads(out).diff(), advantages.diff())


def test_the_last_action_and_the_last_reward_are_inputs_and_large_rewards_are_clipped() -> None:
    q = learner_of().q
    obs, state = torch.randn(1, 3), q.initial_state(1)
    values = [
        q(obs, {**state, **change})[0]
        for change in (
            {},
            {"last_action": torch.tensor([[0.0, 1.0]])},
            {"last_reward": torch.tensor([1.0])},
            {"last_reward": torch.tensor([7.0])},
        )
    ]
    assert not torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(values[2], values[3])


def test_images_have_convolutions() -> None:
    images = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    learner = R2D2(Args(sequence=4, burn_in=1, horizon=4, units=8), images, TWO)
    assert learner.stack == 4
    sample = sample_of(burn_in=1, time=4)
    obs = torch.randint(0, 255, (5, 5, *images.shape), dtype=torch.uint8)
    sample |= {"obs": obs[:, :-1], "next_obs": obs[:, 1:]}
    before = [parameter.clone() for parameter in learner.q.eyes.parameters()]
    losses, priorities = learner.learn(sample, 0.0)
    assert losses["loss"].isfinite()
    assert priorities.isfinite().all()
    moved = zip(learner.q.eyes.parameters(), before, strict=True)
    assert all(not torch.equal(*pair) for pair in moved)


# The policy


def test_a_policy_explores_by_its_ladder_and_remembers_what_it_did() -> None:
    learner = learner_of(num_envs=400, ladder_base=0.4, capacity=100_000)
    assert learner.policy.epsilon.tolist() == pytest.approx(ladder(400))
    assert list(learner.judged()) == list(range(300, 400))
    obs, state = torch.randn(400, 3), learner.policy.initial_state(400)
    with torch.no_grad():
        best, memory = learner.q(obs, state)
        context = Context(torch.arange(400), state=state)
        decision = learner.policy.act(obs, context)
        greedy = learner.policy.act(obs, Context(context.envs, state=state, deterministic=True))
    assert torch.equal(greedy.action, best.argmax(-1))
    differ = decision.action != best.argmax(-1)
    assert differ[:100].sum() > differ[300:].sum()
    assert torch.equal(decision.state["last_action"].argmax(-1), decision.action)
    assert torch.equal(decision.state["hidden"], memory["hidden"])
    assert torch.equal(decision.state["cell"], memory["cell"])
    assert learner.scalars(5) == {}  # nothing scales the ladder


def test_forbidden_actions_are_not_chosen() -> None:
    learner = learner_of(num_envs=16, ladder_power=0.0)
    obs, state = torch.randn(16, 3), learner.policy.initial_state(16)
    mask = torch.tensor([[True, False]]).expand(16, 2)
    for _ in range(5):
        context = Context(torch.arange(16), state=state, mask=mask)
        assert not learner.policy.act(obs, context).action.any()
    assert learner.policy.distribution(obs, context).probs[:, 0].tolist() == [1.0] * 16


def test_another_epsilon_keeps_network_and_memory() -> None:
    policy = learner_of(temperature=0.5).policy.with_epsilon(0.25)
    assert isinstance(policy, RecurrentEpsilonGreedy)
    assert not isinstance(policy, RecurrentExplorers)
    assert (float(policy.epsilon), policy.temperature) == (0.25, 0.5)
    assert policy.initial_state(2).keys() == {"hidden", "cell", "last_action", "last_reward"}


# States and priorities, from real shards


def test_the_state_of_a_sequence_is_that_of_its_first_row(client: Client) -> None:
    """A policy whose state counts steps, and observations that do; the burn-in is included."""
    store = ReplayStore(4_000, sampler=Sequences(6, burn_in=3, overlap=4), side=0.5, seed=0)
    options = {"num_envs": 4, "horizon": 5, "shards": 2, "seed": 1, "cluster": client}
    with clusterenv.Collector(Counts, Counter(), **options) as collector:
        for batch in collector.collect(2_000):
            store.add(batch)
    sample = store.sample(500)
    first = sample["obs"][:, 0, 0]
    np.testing.assert_array_equal(sample["state.count"][:, 0], first)
    begun = {int(number) for number in first}
    assert 0 in begun
    assert len(begun) > 10
    np.testing.assert_array_equal(sample["learn"][:, 0], first == 0)
    assert not sample["mask"].all()  # some episodes are shorter


def acting(seed: int = 3) -> RecurrentExplorers:
    torch.manual_seed(seed)
    env = gym.make(NO_VELOCITY)
    q = RecurrentQNetwork(env.observation_space, env.action_space, (16,), 8)
    with torch.no_grad():
        for parameter in q.parameters():
            parameter.mul_(3)  # so that state and observations matter
    return RecurrentExplorers(q, ladder(4), n_step=3, gamma=0.9)


def test_sequences_begin_with_what_the_acting_network_had_and_its_priorities(
    client: Client,
) -> None:
    """Unrolled from the stored state, the network says what it said while it acted."""
    policy = acting()
    store = ReplayStore(4_000, sampler=Sequences(12, 4, 8, Prioritized(alpha=1.0)), side=0.5)
    options = {"num_envs": 4, "horizon": 8, "shards": 2, "seed": 1, "cluster": client}
    rows: list[dict[str, Any]] = []
    with clusterenv.Collector(NO_VELOCITY, policy, **options) as collector:
        for batch in collector.collect(1_200):
            store.add(batch)
            rows += judged(policy, batch)
    sample = store.sample(256, columns=["q", "priority", "step"], tensors=True)
    steps = EpisodeRows.of(sample)
    with torch.no_grad():
        found = policy.module.unroll(*_steps(steps))[:-1].max(-1).values
    mask = sample["mask"].T
    torch.testing.assert_close(found[mask], sample["q"].T[mask], rtol=1e-4, atol=1e-5)
    later = sample["step"][:, 0] > 0
    assert sample["state.hidden"][later].abs().sum(-1).all()
    assert not sample["state.hidden"][~later].any()
    assert later.any()
    assert not later.all()

    assert len(rows) == 1_200
    given, errors = (np.array([row[name] for row in rows]) for name in ("priority", "error"))
    np.testing.assert_allclose(given, errors, rtol=1e-3, atol=1e-4)
    powers = store.sampler.state()["powers"]
    drawn = sequence_priorities(sample["priority"].T, sample["learn"].T)
    torch.testing.assert_close(
        torch.from_numpy(powers)[sample["indices"]].float(), drawn + 1e-6, rtol=1e-4, atol=1e-5
    )


def judged(policy: RecurrentExplorers, batch: clusterenv.Batch) -> list[dict[str, Any]]:
    """Return priority and error of every row, by acting again row by row."""
    q, n, time = policy.module, batch.num_envs, batch.horizon
    following = batch.next_obs()["obs"]
    taken, after = np.zeros((time, n)), np.zeros((time, n))
    for env in range(n):
        state = {name: torch.from_numpy(part[env : env + 1]) for name, part in batch.state.items()}
        for t in range(time):
            if batch["step"][t, env] == 0:
                state = q.initial_state(1)
            action = torch.from_numpy(batch["action"][t, env : env + 1])
            reward = torch.from_numpy(batch["reward"][t, env : env + 1])
            with torch.no_grad():
                values, memory = q(torch.from_numpy(batch["obs"][t, env : env + 1]), state)
                state = memory | {"last_action": q.encode(action), "last_reward": reward}
                best = q(torch.from_numpy(following[t, env : env + 1]), state)[0].max(-1).values
            taken[t, env] = values[0, action]
            after[t, env] = inverse_rescale(best)
    found = []
    for t in range(time):
        for env in range(n):
            total, discount, at = 0.0, 1.0, t
            while True:
                total += discount * float(batch["reward"][at, env])
                discount *= policy.gamma
                over = batch["terminated"][at, env] or batch["truncated"][at, env]
                if over or at == time - 1 or at == t + policy.n_step - 1:
                    break
                at += 1
            total += discount * after[at, env] * (not batch["terminated"][at, env])
            wanted = float(rescale(torch.tensor(total)))
            priority = float(batch["priority"][t, env])
            found.append({"priority": priority, "error": abs(wanted - taken[t, env])})
    return found


# The learner


def test_errors_are_those_of_the_equations() -> None:
    """Double Q: the online network chooses, the target network judges; two steps."""
    online = torch.tensor([[[1.1, 0.0]], [[1.1, 9.0]], [[3.1, 4.0]], [[0.0, 5.0]]])
    target = torch.tensor([[[0.0, 0.0]], [[7.0, 1.2]], [[7.0, 0.2]], [[7.0, 2.2]]])
    ends = torch.tensor([[True], [False], [False]])
    rows = EpisodeRows(
        obs=torch.zeros(4, 1, 1),
        action=torch.zeros(3, 1, dtype=torch.long),
        reward=torch.tensor([[-1.3], [-1.3], [2.3]]),
        terminated=ends,
        truncated=torch.zeros_like(ends),
        state={},
    )
    found = td_errors(online, target, rows, 0.87, 2).flatten().tolist()
    last = float(inverse_rescale(torch.tensor(2.2)))
    raw = [-1.3, -1.3 + 0.87 * (2.3 + 0.87 * last), 2.3 + 0.87 * last]
    expected = rescale(torch.tensor(raw)) - torch.tensor([1.1, 1.1, 3.1])
    assert found == pytest.approx(expected.tolist(), abs=1e-5)
    assert found[0] == pytest.approx(-1.61788, abs=1e-5)


def test_both_networks_begin_with_the_stored_state_and_the_loss_is_weighed() -> None:
    learner, sample = learner_of(), sample_of()
    with torch.no_grad():
        for parameter in learner.target.parameters():
            parameter.mul_(1.5)
        rows = EpisodeRows.of(sample)
        online, target = (net.unroll(*_steps(rows)) for net in (learner.q, learner.target))
        expected = td_errors(online, target, rows, learner.args.gamma, 2)
    learn = sample["learn"].T
    expected = expected.where(learn, 0.0)
    losses, priorities = learner.learn(sample, 0.0)
    loss = (sample["weights"] * 0.5 * expected.square().sum(0)).mean()
    assert losses["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(priorities, sequence_priorities(expected, learn))


def test_rows_of_the_burn_in_and_padding_teach_nothing() -> None:
    sample = sample_of()
    changed = {name: column.clone() for name, column in sample.items()}
    changed["reward"][-1, 4:] = 100.0
    changed["next_obs"][-1, 4:] = 100.0
    learner, other = learner_of(), learner_of()
    learner.learn(sample, 0.0)
    other.learn(changed, 0.0)
    check_same(learner.state_dict(), other.state_dict())
    nothing = learner_of()
    before = copy.deepcopy(nothing.q.state_dict())
    _, priorities = nothing.learn({**sample, "learn": torch.zeros_like(sample["learn"])}, 0.0)
    check_same(nothing.q.state_dict(), before)
    assert not priorities.any()


@pytest.mark.parametrize(
    ("changes", "matters"), [({}, True), ({"zero_state": True}, False)], ids=["stored", "zero"]
)
def test_without_the_stored_state_a_sequence_begins_with_zeros(
    changes: dict[str, Any], matters: bool
) -> None:
    learner, sample = learner_of(**changes), sample_of()
    other = {**sample, "state.hidden": -sample["state.hidden"]}
    first, second = (learner.errors(given)[0] for given in (sample, other))
    assert torch.equal(first, second) != matters
    torch.testing.assert_close(first[:, 0], second[:, 0])  # an episode begins with zeros anyway
    last = {**sample, "state.last_action": 1 - sample["state.last_action"]}
    assert not torch.equal(learner.errors(last)[0], first)  # an input like any other


def test_without_burn_in_all_rows_are_learned_from() -> None:
    learner, sample = learner_of(burn_in=0), sample_of(burn_in=0)
    assert learner.sampler().settings() == {"length": 6, "burn_in": 0, "overlap": 3}
    errors, learn = learner.errors(sample)
    assert torch.equal(learn.T, sample["mask"])
    errors[3:].square().sum().backward()
    assert learner.optimizer.gradient.any()
    assert learner_of().sampler().settings() == {"length": 4, "burn_in": 2, "overlap": 3}


@pytest.mark.parametrize(("tau", "every"), [(0.25, 1), (1.0, 2)])
def test_the_target_network_follows(tau: float, every: int) -> None:
    learner, sample = learner_of(tau=tau, target_every=every), sample_of()
    old = next(learner.target.parameters()).clone()
    for _ in range(every - 1):
        learner.learn(sample, 0.0)
        torch.testing.assert_close(next(learner.target.parameters()), old)
    learner.learn(sample, 0.0)
    new = next(learner.q.parameters()).detach()
    torch.testing.assert_close(next(learner.target.parameters()), old + tau * (new - old))


def test_a_learner_learns_a_value_and_another_goes_on_from_its_state() -> None:
    sample = sample_of()
    sample["terminated"][:] = True  # each row is worth its reward
    learner = learner_of(lr=1e-2, target_every=3)
    first = learner.learn(sample, 0.0)[1].mean()
    for _ in range(200):
        last = learner.learn(sample, 0.0)[1].mean()
    assert last < first / 4
    other = learner_of(lr=1e-2, target_every=3)
    other.load_state_dict(copy.deepcopy(learner.state_dict()))
    for each in (learner, other):
        each.learn(sample, 0.1)
    check_same(learner.state_dict(), other.state_dict())


# Runs


@pytest.mark.parametrize(
    "changes", [{}, {"zero_state": True}, {"burn_in": 0}, {"prioritized": False}], ids=str
)
def test_a_run_learns_from_sequences_and_goes_on(
    tmp_path: Path, cluster: str, changes: dict[str, Any]
) -> None:
    result = run(R2D2, small(tmp_path, cluster=cluster, **changes))
    assert 1_024 <= result.steps < 1_024 + 2 * 8 * 4
    rows = progress(tmp_path)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert {"td", "lr", "store_rows"} <= rows[0].keys()
    assert rows_learned(rows[-1]) == pytest.approx(4 * 16 * result.updates, rel=0.02)
    assert check_rows(result.dataset) == result.steps
    names = clusterenv.open_dataset(result.dataset).schema.names
    assert {"priority", "q", "state.hidden", "state.last_reward"} <= set(names)
    more = small(tmp_path, cluster=cluster, **changes, total_steps=1_536)
    assert run(R2D2, more).updates > result.updates


def test_a_killed_run_goes_on_with_the_same_command(tmp_path: Path, cluster: str) -> None:
    given = {name: value for name, value in SIZES.items() if name not in ("total_steps", "quiet")}
    given |= {"hidden": 16, "num_envs": 16, "horizon": 16, "rows_per_update": 512}
    words = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
    out = tmp_path / "run"
    killed_and_gone_on(f"train r2d2 --env {NO_VELOCITY} {' '.join(words)}", out, cluster)
    assert check_rows(out / "replay") >= 20_000


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, client: Client) -> Path:
    out = tmp_path_factory.mktemp("runs") / "r2d2"
    run(R2D2, small(out, total_steps=256, cluster=str(client.scheduler.address)))
    return out


def test_a_run_is_evaluated_and_collected_with_its_memory(
    finished: Path, tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    address = str(client.scheduler.address)
    words = ["evaluate", str(finished), "--episodes", "4", "--cluster", address]
    shown = []
    for _ in range(2):
        assert cli.main(words) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    saved = load_run(finished)
    assert type(saved.policy) is RecurrentEpsilonGreedy
    kept = torch.load(saved.path, weights_only=True)["learner"]["q"]
    check_same(saved.policy.module.state_dict(), kept)
    explores = collecting_policy(str(finished), saved.observation_space, TWO, epsilon=0.5)
    assert float(explores.epsilon) == 0.5
    out = tmp_path / "rows"
    command = ["collect", "--env", NO_VELOCITY, "--policy", str(finished), "--rows", "64"]
    more = ["--num-envs", "2", "--shards", "1", "--horizon", "8", "--out", str(out)]
    assert cli.main([*command, *more, "--cluster", address]) == 0
    assert "priority" not in clusterenv.open_dataset(out).schema.names


def test_a_recurrent_policy_is_not_exported(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(finished), str(tmp_path / "policy.pt2")]) == 2
    assert "is recurrent, and cannot be exported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"burn_in": 48}, "--burn-in 48 leaves no row .*--sequence 48: --burn-in 24"),
        ({"sequence": 8, "burn_in": 9, "horizon": 8}, "--burn-in 9 .*--sequence 8: --burn-in 4"),
        ({"horizon": 49}, "--horizon 49 leaves rows out.*--sequence 48 .*: --horizon 48"),
        (
            {"capacity": 700, "min_rows": 100, "shards": 16},
            "--capacity 700 has no room .* 48 rows of each of 16 environments: --capacity 7680",
        ),
        ({"burn_in": -1}, "--burn-in must be 0 or more, got -1"),
        ({"sequence": 0}, "--sequence must be 1 or more, got 0"),
        ({"units": 0}, "--units must be 1 or more, got 0"),
        ({"target_every": 0}, "--target-every must be 1 or more, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Args(**changes)


def test_a_policy_without_a_state_to_store_is_refused_before_anything_is_collected(
    tmp_path: Path,
) -> None:
    learner = learner_of()
    learner.policy = Categorical(torch.nn.Linear(3, 2))  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"Categorical has none: define its initial_state\(n\)"):
        ReplayFeed(learner, Episodes(16), 0, tmp_path / "replay")
    assert not (tmp_path / "replay").exists()


@pytest.mark.parametrize(
    ("observations", "actions", "says"),
    [
        (gym.spaces.Discrete(3), TWO, "FlattenObservation"),
        (BOX, gym.spaces.Box(-1, 1, (2,)), "clusterenv train ppo"),
    ],
)
def test_spaces_the_network_cannot_take_are_refused(
    observations: gym.Space, actions: gym.Space, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        R2D2(Args(), observations, actions)


def test_a_network_that_does_not_fit_is_refused_and_the_checkpoint_stays(
    tmp_path: Path, cluster: str
) -> None:
    run(R2D2, small(tmp_path, total_steps=256, cluster=cluster))
    (path,) = tmp_path.glob("learner-*.pt")
    saved = torch.load(path, weights_only=True)
    saved["learner"]["q"]["core.weight_hh_l0"] = torch.zeros(3, 3)
    torch.save(saved, path)
    before, note = path.read_bytes(), note_of(tmp_path)
    with pytest.raises(ConfigError, match=rf"does not fit the learner.*--out {tmp_path}-2"):
        run(R2D2, small(tmp_path, total_steps=512, cluster=cluster))
    assert path.read_bytes() == before
    assert note_of(tmp_path) == note
    with pytest.raises(ConfigError, match=r"--units 8 instead of --units 4"):
        run(R2D2, small(tmp_path, total_steps=512, units=4, cluster=cluster))
    assert path.read_bytes() == before
