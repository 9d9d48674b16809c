"""The policy runner, for the env loop and for ``step(policy)``, without a cluster."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Bad, BadState, Counter, LearnedState, cartpole_policy
from compare import assert_same
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.policies import Categorical
from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import EnvDescription, Recipe, Slot
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_rng import PolicyRNG
from clusterenv.simulation.policy_runner import Acting, PolicyRunner
from clusterenv.sync.weights import manifest_of, pack
from clusterenv.transport.framing import Header
from clusterenv.transport.messages import ActRequest, ResetRequest
from clusterenv.worker.step_server import StepServer

N = 4
BOX = spaces.Box(-1, 1, (3,), np.float32)


def description(observation_space: gym.Space[Any], actions: int) -> EnvDescription:
    return EnvDescription(
        observation_space=observation_space,
        action_space=spaces.Discrete(actions),
        metadata={},
        render_mode=None,
        spec=None,
        autoreset_mode=AutoresetMode.SAME_STEP,
        partial=True,
        maskable=True,
        observation_mode="same",
        observation_spaces=(observation_space,) * N,
    )


def runner_of(
    policy: Policy, space: gym.Space[Any] = BOX, actions: int = 3, **kwargs: Any
) -> PolicyRunner:
    envs = np.arange(10, 10 + N, dtype=np.int32)
    return PolicyRunner(policy, description(space, actions), envs, **kwargs)


def zeros() -> list[Tensor]:
    return [torch.zeros(N, 3)]


def act(runner: PolicyRunner, obs: list[Tensor] | None = None, **kwargs: Any) -> dict[str, Column]:
    obs = zeros() if obs is None else obs
    with torch.inference_mode():
        return runner.act(obs, **kwargs)


class First(Policy):
    """Takes the first allowed action, and remembers what it saw."""

    def act(self, obs: Any, context: Context) -> Decision:
        self.context = context
        if context.mask is None:
            return Decision(torch.zeros(len(context.envs), dtype=torch.int64))
        return Decision(context.mask.to(torch.uint8).argmax(1))


def test_the_policy_sees_indices_scalars_and_no_mask() -> None:
    policy = First()
    runner = runner_of(policy)
    runner.acting = Acting(3, {"epsilon": 0.5})
    act(runner)
    assert policy.context.envs.tolist() == [10, 11, 12, 13]
    assert policy.context.scalars == {"epsilon": 0.5}
    assert policy.context.mask is None
    assert runner.steps == 1


MASKS = np.array([[0, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 1]], np.bool_)


@pytest.mark.parametrize("way", ["info", "obs"])
def test_masks_come_from_infos_or_observations(way: str) -> None:
    space = spaces.Dict(x=BOX, action_mask=spaces.MultiBinary(3))
    if way == "info":
        columns = act(runner_of(First()), allowed=MASKS)
    else:
        by_name = {"x": zeros()[0], "action_mask": torch.from_numpy(MASKS.astype(np.int8))}
        obs = [by_name[str(leaf.path[0])] for leaf in Layout(space).leaves]
        columns = act(runner_of(First(), space), obs)
    assert columns["action"].tolist() == [1, 0, 2, 1]


def test_a_mask_may_be_empty_only_where_the_episode_is_over() -> None:
    masks = MASKS.copy()
    masks[2] = False
    finished = np.array([False, False, True, False])
    assert act(runner_of(First()), allowed=masks, finished=finished)["action"][2] == 0
    with pytest.raises(PolicyFault, match="allows no action to environment 12 at step 0"):
        act(runner_of(First()), allowed=masks, finished=~finished)
    with pytest.raises(PolicyFault, match="allows no action to environment 12"):
        act(runner_of(First()), allowed=masks)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("nan", "log_prob is nan for environment 13 at step 2 of the shard"),
        ("range", r"chose 7 for environment 13 at step 2 of the shard, outside Discrete\(3\)"),
        ("shape", r"environments 10–13 at step 2 of the shard have shape \(1,\), expected \(4,\)"),
        ("dtype", "are of dtype float32"),
        ("gone", r"'log_prob' was float32 of shape \(4,\) and is now, .* at step 2 .*, missing"),
        ("double", "'log_prob' was float32 .* and is now, .*, float64"),
        ("column", r"'value' on environments 10–13 at step 2 of the shard has shape \(5,\)"),
        ("in place", r"Bad.act\(\) changed its observations of environments 10–13 at step 2"),
        ("raise", "raised ValueError on environments 10–13 at step 2 of the shard: matrix is"),
        ("tensor", r"Bad.act\(\) returned a Tensor on environments 10–13"),
    ],
)
def test_an_unusable_answer_is_named_with_its_step_and_counts_no_step(
    fault: str, message: str
) -> None:
    runner = runner_of(Bad(fault, after=2))
    for _ in range(2):
        act(runner)
    with pytest.raises(PolicyFault, match=message):
        act(runner)
    assert runner.steps == 2


def test_a_caller_that_knows_episodes_has_their_steps_in_the_message() -> None:
    runner = runner_of(Bad("range", after=0))
    runner.location.episode_step = lambda row: 40 + row
    with pytest.raises(PolicyFault, match="environment 13 at step 43 of its episode"):
        act(runner)


@pytest.mark.parametrize("reserved", [None, {"log_prob"}])
def test_extras_cannot_have_the_names_that_the_caller_uses(reserved: Any) -> None:
    kwargs = {} if reserved is None else {"reserved": reserved}
    policy = Bad("taken", after=0) if reserved is None else Bad("none")
    name = "reward" if reserved is None else "log_prob"
    with pytest.raises(PolicyFault, match=f"extra '{name}' has the name of a column"):
        act(runner_of(policy, **kwargs))


def test_recurrent_state_is_kept_and_reset_where_an_episode_begins() -> None:
    runner = runner_of(Counter())
    seen = []
    for step in range(4):
        seen.append(act(runner)["value"].tolist())
        with torch.inference_mode():
            runner.reset_state(np.array([step == 0, False, step == 1, False]))
    assert seen == [[0, 0, 0, 0], [0, 1, 1, 1], [1, 2, 0, 2], [2, 3, 1, 3]]
    assert runner.state_at(np.array([1, 2]))["count"].tolist() == [[4], [2]]


def test_acting_again_for_one_environment_leaves_the_state_of_the_others() -> None:
    runner = runner_of(Counter())
    for _ in range(3):
        act(runner)
    initial = {"count": np.full((N, 1), 9.0, np.float32)}
    obs = zeros()
    with torch.inference_mode():
        columns = runner.act_again(1, obs, None, initial)
    assert columns["value"][1] == 0
    assert initial["count"][:, 0].tolist() == [9, 0, 9, 9]
    assert act(runner)["value"].tolist() == [3, 1, 3, 3]


def test_a_state_that_changes_its_shape_is_refused() -> None:
    with pytest.raises(PolicyFault, match=r"state after act\(\) on environments 10–13 at step 0"):
        act(runner_of(BadState("rows")))


def test_random_numbers_are_those_of_the_seed_whatever_the_process_draws() -> None:
    policy = Categorical(nn.Linear(3, 3))
    drawn = []
    for noise in (0, 5):
        runner = runner_of(policy, rng=PolicyRNG(3))
        actions = []
        for _ in range(20):
            torch.rand(noise)
            actions.append(act(runner)["action"])
        drawn.append(np.stack(actions))
    assert_same(drawn[0], drawn[1])


class Requests:
    """A connection that holds requests for a :class:`StepServer` and keeps its answers."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def send(self, kind: int, blob: bytes = b"", body: Any = ()) -> None:
        self.results.append(loads(blob) if blob else None)

    def recv_body(self, header: Header, arrays: Any) -> None:
        raise AssertionError("no request has a body")


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_env_loop_and_the_step_server_choose_the_same_actions(recurrent: bool) -> None:
    """One seed, one policy: the rows of fragments are the infos of steps."""
    policy = Sampling() if recurrent else cartpole_policy()
    recipe = Recipe(gym.spec("CartPole-v1"), autoreset_mode=AutoresetMode.SAME_STEP)
    seeds = [5 + i for i in range(N)]
    rng = PolicyRNG(seeds[0])
    loop = EnvLoop(build(recipe, 10, N), loads(dumps(policy)), 10, 16, seeds, rng=rng)
    connection = Requests()
    server: Any = StepServer(build(recipe, 10, N), connection, 10)  # type: ignore[arg-type]
    server._reset(ResetRequest(list(seeds), None, None))
    no_weights = np.empty(0, np.uint8)
    server._act(ActRequest(dumps(policy), 0), no_weights)
    for _ in range(159):
        server._act(ActRequest(None, 0), no_weights)
    chosen = [result[2] for result in connection.results if result and result[2]]
    fragments = [loop.fragment(Acting(0, {})) for _ in range(10)]
    for name in ("action", "log_prob"):
        rows = np.concatenate([fragment.columns[name] for fragment in fragments])
        assert_same(np.concatenate([each[name] for each in chosen]), rows)
    assert len({*rows.tolist()}) > 1
    assert fragments[-1].columns["episode"].max() > 0


class Sampling(Policy):
    """Recurrent and random: sums its observations, and draws its initial state too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read = nn.Linear(4, 2)

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"sum": torch.rand(n, 4)}

    def act(self, obs: Any, context: Context) -> Decision:
        memory = context.state["sum"] + obs
        policy = torch.distributions.Categorical(logits=self.read(memory))
        action = policy.sample()
        return Decision(action, {"log_prob": policy.log_prob(action)}, {"sum": memory})


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_the_step_server_sends_the_states_that_act_next(mode: AutoresetMode) -> None:
    recipe = Recipe(gym.spec("CartPole-v1"), autoreset_mode=mode)
    connection = Requests()
    engine = build(recipe, 10, N)
    server: Any = StepServer(engine, connection, 10)  # type: ignore[arg-type]
    server._reset(ResetRequest([1, 2, 3, 4], None, None))
    policy: bytes | None = dumps(Counter())
    expected: list[tuple[int, float]] = []
    for _ in range(60):
        server._act(ActRequest(policy, 0, state_rows=2), np.empty(0, np.uint8))
        policy = None
        *_, chosen, (rows, state) = connection.results[-1]
        for row, count in expected:
            assert chosen["value"][row] == count
        slot: Slot = server._slot
        assert not (slot.terminated | slot.truncated)[rows].any()
        assert len(rows) <= 2
        expected = list(zip(rows.tolist(), state["count"][:, 0].tolist(), strict=True))


def test_the_step_server_sends_no_states_unless_asked() -> None:
    connection = Requests()
    engine = build(Recipe(gym.spec("CartPole-v1")), 10, N)
    server: Any = StepServer(engine, connection, 10)  # type: ignore[arg-type]
    server._reset(ResetRequest([1, 2, 3, 4], None, None))
    server._act(ActRequest(dumps(Counter()), 0), np.empty(0, np.uint8))
    assert connection.results[-1][3] is None


def test_a_shard_that_starts_with_newer_weights_has_their_initial_state() -> None:
    policy = LearnedState()
    connection = Requests()
    engine = build(Recipe(gym.spec("CartPole-v1")), 10, N)
    server: Any = StepServer(engine, connection, 10)  # type: ignore[arg-type]
    server._reset(ResetRequest([1, 2, 3, 4], None, None))
    pickled = dumps(policy)
    with torch.no_grad():
        policy.first.fill_(7.0)
    weights = pack(policy, manifest_of(policy), 3, BufferPool())
    server._act(ActRequest(pickled, 3), weights.buffer)
    chosen = connection.results[-1][2]
    assert chosen["value"].tolist() == [8.0] * N  # it adds one before it shows the state
    assert chosen["policy_version"].tolist() == [3] * N


@pytest.mark.parametrize("wrong", [torch.zeros(N, 1), torch.zeros(N, dtype=torch.int64)])
def test_an_entry_for_rewards_that_cannot_hold_them_is_refused(wrong: Tensor) -> None:
    class Wrong(Counter):
        def initial_state(self, n: int) -> dict[str, Tensor]:
            return {"last_reward": wrong}

    with pytest.raises(PolicyFault, match=r"\{'last_reward': torch.zeros\(4\)\}"):
        runner_of(Wrong())
