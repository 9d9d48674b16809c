"""Fragments without any cluster: every real step once, and the true next observations."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from agents import Annotating, Bad, BadState, Counter, Cycle, Earner, LearnedState
from compare import assert_same
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from worlds import Masked, World

from clusterenv.errors import ConfigError
from clusterenv.policies import Categorical, Random
from clusterenv.policies.policy import Decision, Policy
from clusterenv.simulation.decisions import ActionCheck, Location, PolicyFault
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import EnvRaised, Recipe
from clusterenv.simulation.fragment_builder import Interrupted
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.policy_spaces import check_spaces

N, HORIZON = 5, 16


def loop_of(
    policy: Policy,
    env: Any = World,
    *,
    engine: str = "gymnasium",
    text: str = "refuse",
    **kwargs: Any,
) -> EnvLoop:
    mode = AutoresetMode.SAME_STEP if engine == "gymnasium" else AutoresetMode.NEXT_STEP
    source = gym.spec(env) if isinstance(env, str) and engine != "envpool" else env
    recipe = Recipe(source, kwargs, engine=engine, autoreset_mode=mode)
    seeds = [13 + i for i in range(N)]
    return EnvLoop(build(recipe, 10, N), policy, 10, HORIZON, seeds, text=text)


@pytest.mark.parametrize("obs", ["box", "image", "dict", "nested", "text"])
def test_rows_are_what_sync_vector_env_gives(obs: str) -> None:
    """Same seeds and actions: observations, rewards, flags and final observations."""
    loop = loop_of(Cycle(5, start=2), obs=obs, text="keep")
    fragments = [loop.fragment(Acting(0, {})) for _ in range(3)]
    reference = SyncVectorEnv([lambda: World(obs=obs)] * N, autoreset_mode=AutoresetMode.SAME_STEP)
    now, _ = reference.reset(seed=13)  # environment 10 of the whole gets seed 3 + 10
    names = [name for name in fragments[0].columns if name.startswith("obs")]
    tails = 0
    for step in range(3 * HORIZON):
        fragment, t = fragments[step // HORIZON], step % HORIZON
        actions = 2 + (np.arange(10, 10 + N) + step) % 5
        at = slice(t * N, (t + 1) * N)
        for name in names:
            column = fragment.columns[name][at]
            assert_same(column, np.asarray(leaf(now, name), column.dtype))  # text is a tuple there
        after, reward, terminated, truncated, info = reference.step(actions)
        assert_same(fragment.columns["action"][at], actions)
        assert_same(fragment.columns["reward"][at], reward.astype(np.float32))
        assert_same(fragment.columns["terminated"][at], terminated)
        assert_same(fragment.columns["truncated"][at], truncated)
        assert_same(fragment.columns["twice"][at], 2 * actions.astype(np.float32))
        for e in range(N):
            ended = terminated[e] or truncated[e]
            found = np.flatnonzero(fragment.tail_rows == t * N + e)
            assert len(found) == (ended or t == HORIZON - 1)
            if len(found):
                tails += 1
                for name in names:
                    true = leaf(info["final_obs"][e], name) if ended else leaf(after, name)[e]
                    column = fragment.tail[name]
                    assert_same(column[found[0] : found[0] + 1], np.asarray([true], column.dtype))
        now = after
    assert tails > 3 * N + 5


@pytest.mark.parametrize("engine", ["gymnasium", "native", "envpool"])
def test_a_policy_can_find_the_reward_of_the_step_before(engine: str) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool")
    env = {"gymnasium": World, "native": "CartPole-v1", "envpool": "CartPole-v1"}[engine]
    policy = Earner(5, start=2) if env is World else Earner()
    loop = loop_of(policy, env, engine=engine)
    before: dict[tuple[int, int, int], float] = {}  # reward by environment, episode and step
    rows = 0
    for fragment in [loop.fragment(Acting(0, {})) for _ in range(4)]:
        columns = fragment.columns
        at = [(int(columns["env"][k]), int(columns["step"][k])) for k in range(N)]
        for row in range(N * HORIZON):
            env_, episode, step = (int(columns[name][row]) for name in ("env", "episode", "step"))
            earned = float(columns["earned"][row])
            assert earned == (before[env_, episode, step - 1] if step else 0.0)
            before[env_, episode, step] = float(columns["reward"][row])
            rows += step > 0
        for k, (_, step) in enumerate(at):
            first = float(fragment.state["last_reward"][k])
            assert first == float(columns["earned"][k])
            assert step or not first
    assert rows > 20


def leaf(tree: Any, name: str) -> Any:
    for key in name.split(".")[1:]:
        tree = tree[int(key) if key.isdigit() else key]
    return tree


@pytest.mark.parametrize("engine", ["gymnasium", "native", "envpool"])
def test_episodes_are_contiguous_and_no_dead_row_is_left(engine: str) -> None:
    """CartPole pays 1 for every real step and 0 for a step that only resets."""
    if engine == "envpool":
        pytest.importorskip("envpool")
    loop = loop_of(Random(gym.spaces.Discrete(2), seed=1), "CartPole-v1", engine=engine)
    fragments = [loop.fragment(Acting(version, {})) for version in range(12)]
    seen: dict[int, list[Any]] = {10 + e: [] for e in range(N)}
    for fragment in fragments:
        columns = fragment.columns
        assert (columns["reward"] == 1).all()
        over = columns["terminated"] | columns["truncated"]
        env = columns["env"].reshape(HORIZON, N)
        assert (env == env[0]).all()  # a column is a track of one environment
        tracks = sorted(
            range(N), key=lambda e: (env[0, e], columns["episode"][e], columns["step"][e])
        )
        for e in tracks:
            for row in range(e, HORIZON * N, N):
                seen[int(columns["env"][row])].append(
                    (
                        int(columns["episode"][row]),
                        int(columns["step"][row]),
                        bool(over[row]),
                        int(columns["version"][row]),
                    )
                )
        # Final observations are those that ended the episode: the pole fell.
        for row, obs in zip(fragment.tail_rows, fragment.tail["obs"], strict=True):
            if columns["terminated"][row]:
                assert abs(obs[0]) > 2.4 or abs(obs[2]) > 0.209
            else:
                assert abs(obs[0]) <= 2.41
                assert abs(obs[2]) <= 0.2096
    assert sum(map(len, seen.values())) == 12 * HORIZON * N
    for history in seen.values():
        episode, step = 0, 0
        for at_episode, at_step, ended, _ in history:
            assert (at_episode, at_step) == (episode, step)
            episode, step = (episode + 1, 0) if ended else (episode, step + 1)
        versions = [version for *_, version in history]
        assert versions == sorted(versions)
    returns = [value for fragment in fragments for value in fragment.returns]
    assert all(
        value == length
        for value, length in zip(returns, [x for f in fragments for x in f.lengths], strict=True)
    )


class SameStep(SyncVectorEnv):
    """A vector environment that resets in the same step, as others write them."""

    def __init__(self, num_envs: int, obs: str, final: str) -> None:
        super().__init__(
            [functools.partial(World, obs)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )
        self.final = final

    def step(self, actions: Any) -> Any:
        *results, info = super().step(actions)
        if "final_obs" in info and self.final == "batch":
            space, first = self.single_observation_space, np.flatnonzero(info["_final_obs"])[0]
            other = info["final_obs"][first]  # for those that have none
            each = [other if value is None else value for value in info["final_obs"]]
            info["final_obs"] = concatenate(space, each, create_empty_array(space, self.num_envs))
            del info["_final_obs"]
        elif self.final == "none":
            info.pop("final_obs", None)
        return *results, info


def same_step(final: str, obs: str) -> EnvLoop:
    spec = EnvSpec("SameStep-v0", entry_point="no:one", vector_entry_point=SameStep)
    kwargs = {"obs": obs, "final": final}
    engine = build(Recipe(spec, kwargs, engine="native", autoreset_mode=None), 10, N)
    seeds = [13 + i for i in range(N)]
    return EnvLoop(engine, Cycle(5, start=2), 10, HORIZON, seeds, text="keep")


@pytest.mark.parametrize("obs", ["box", "dict", "text"])
@pytest.mark.parametrize("final", ["objects", "batch"])
def test_vector_environments_that_reset_in_the_same_step_give_the_rows_of_the_loop(
    final: str, obs: str
) -> None:
    loops = same_step(final, obs), loop_of(Cycle(5, start=2), obs=obs, text="keep")
    for version in range(4):
        found, expected = (loop.fragment(Acting(version, {})) for loop in loops)
        assert found.columns.keys() == expected.columns.keys()
        for name, column in expected.columns.items():
            assert_same(found.columns[name], column)
        assert_same(found.tail_rows, expected.tail_rows)
        for name, column in expected.tail.items():
            assert_same(found.tail[name], column)
        assert (found.returns, found.lengths) == (expected.returns, expected.lengths)


def test_an_end_without_its_last_observation_is_a_fault() -> None:
    loop = same_step("none", "box")
    with pytest.raises(EnvRaised) as caught:
        [loop.fragment(Acting(0, {})) for _ in range(4)]
    assert "info['final_obs'] does not have its last observation" in str(caught.value.__cause__)


def test_atari_resets_in_the_same_step_if_asked() -> None:
    ale_py = pytest.importorskip("ale_py")
    gym.register_envs(ale_py)
    kwargs = {"autoreset_mode": AutoresetMode.SAME_STEP, "max_num_frames_per_episode": 60}
    recipe = Recipe(gym.spec("ALE/Pong-v5"), kwargs, engine="native", autoreset_mode=None)
    loop = EnvLoop(build(recipe, 0, 2), Cycle(2), 0, HORIZON, [3, 4])
    reference = gym.make_vec("ALE/Pong-v5", 2, vectorization_mode="vector_entry_point", **kwargs)
    now, _ = reference.reset(seed=3)
    ends = 0
    for fragment in (loop.fragment(Acting(0, {})) for _ in range(3)):
        for t in range(HORIZON):
            rows = slice(2 * t, 2 * t + 2)
            assert_same(fragment.columns["obs"][rows], now)
            now, _, terminated, truncated, info = reference.step(fragment.columns["action"][rows])
            for e in np.flatnonzero(terminated | truncated):
                (at,) = np.flatnonzero(fragment.tail_rows == 2 * t + e)
                assert_same(fragment.tail["obs"][at], info["final_obs"][e])
                ends += 1
    assert ends >= 4


def test_environments_that_do_not_reset_by_themselves_are_refused() -> None:
    class Disabled(SyncVectorEnv):
        def __init__(self, num_envs: int) -> None:
            super().__init__([World] * num_envs, autoreset_mode=AutoresetMode.DISABLED)

    spec = EnvSpec("Disabled-v0", entry_point="no:one", vector_entry_point=Disabled)
    engine = build(Recipe(spec, engine="native", autoreset_mode=None), 0, N)
    with pytest.raises(ConfigError, match="SAME_STEP or NEXT_STEP"):
        EnvLoop(engine, Cycle(5, start=2), 0, HORIZON, [None] * N)


@pytest.mark.parametrize("engine", ["gymnasium", "native", "envpool"])
def test_fresh_fragments_count_the_steps_that_lie_between_them(engine: str) -> None:
    """What is left out has happened all the same: episodes go on over it."""
    if engine == "envpool":
        pytest.importorskip("envpool")
    loop = loop_of(Random(gym.spaces.Discrete(2), seed=3), "CartPole-v1", engine=engine)
    last = dict.fromkeys(range(10, 10 + N), (-1, -1))
    lengths: list[int] = []
    dropped = 0
    for _ in range(40):
        fragment = loop.fragment(Acting(0, {}), fresh=True)
        columns = fragment.columns
        assert (np.abs(columns["obs"][columns["step"] == 0]) <= 0.05).all()  # as a reset gives it
        assert columns["env"][:N].tolist() == list(range(10, 10 + N))
        for env, *at in zip(
            *(columns[k].tolist() for k in ("env", "episode", "step")), strict=True
        ):
            assert tuple(at) > last[env]
            last[env] = tuple(at)
        assert fragment.returns == fragment.lengths
        lengths += fragment.lengths
        dropped += fragment.dropped
    assert min(lengths) >= 8  # no pole falls sooner
    assert (dropped > 0) == (engine != "gymnasium")


@pytest.mark.parametrize("engine", ["gymnasium", "native", "envpool"])
def test_the_next_observation_is_the_row_below_except_at_the_tail(engine: str) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool")
    loop = loop_of(Random(gym.spaces.Discrete(2), seed=2), "CartPole-v1", engine=engine)
    for _ in range(4):
        fragment = loop.fragment(Acting(0, {}))
        obs = fragment.columns["obs"].reshape(HORIZON, N, 4)
        following = np.concatenate([obs[1:], np.full((1, N, 4), np.nan, np.float32)]).reshape(-1, 4)
        following[fragment.tail_rows] = fragment.tail["obs"]
        assert np.isfinite(following).all()
        # CartPole's positions move by tau times the velocity: Euler, tau = 0.02.
        flat = fragment.columns["obs"]
        assert np.allclose(following[:, 0], flat[:, 0] + 0.02 * flat[:, 1], atol=1e-5)


@pytest.mark.parametrize("engine", ["native", "envpool"])
def test_a_fresh_fragment_is_of_one_version_and_counts_what_it_leaves(engine: str) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool")
    loop = loop_of(Random(gym.spaces.Discrete(2), seed=2), "CartPole-v1", engine=engine)
    rows = 0
    for version in range(6):
        fragment = loop.fragment(Acting(version, {}), fresh=True)
        assert (fragment.columns["version"] == version).all()
        assert sorted(set(fragment.columns["env"].tolist())) == list(range(10, 10 + N))
        rows += HORIZON * N + fragment.dropped
    assert rows > 6 * HORIZON * N
    assert loop.fragment(Acting(9, {})).dropped == 0


def test_recurrent_state_is_reset_with_each_episode_and_travels_with_the_fragment() -> None:
    for engine in ("gymnasium", "native"):
        loop = loop_of(Counter(), "CartPole-v1", engine=engine)
        for _ in range(6):
            fragment = loop.fragment(Acting(0, {}))
            assert_same(fragment.columns["value"].astype(np.int32), fragment.columns["step"])
            assert_same(fragment.state["count"][:, 0], fragment.columns["value"][:N])


@pytest.mark.parametrize("way", ["info", "dict"])
def test_masks_are_never_violated(way: str) -> None:
    class Net(torch.nn.Module):
        def forward(self, obs: Any) -> torch.Tensor:
            return torch.zeros(len(obs["x"] if isinstance(obs, dict) else obs), 4)

    for policy in (Categorical(Net()), Random(gym.spaces.Discrete(4))):
        loop = loop_of(policy, Masked, way=way)
        fragment = loop.fragment(Acting(0, {}))
        name = "action_mask" if way == "info" else "obs.action_mask"
        mask = fragment.columns[name]
        assert mask[np.arange(len(mask)), fragment.columns["action"]].all()
    with pytest.raises(
        PolicyFault, match=r"action 0 for environment \d+ at step .* its mask forbids"
    ):
        loop_of(Bad("none"), Masked, way=way).fragment(Acting(0, {}))


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
@pytest.mark.parametrize("way", ["info", "dict"])
def test_the_end_of_an_episode_may_allow_nothing(way: str, mode: AutoresetMode) -> None:
    recipe = Recipe(Masked, {"way": way, "final": False}, autoreset_mode=mode)
    policy = Random(gym.spaces.Discrete(4))
    loop = EnvLoop(build(recipe, 0, N), policy, 0, HORIZON, list(range(N)))
    name = "action_mask" if way == "info" else "obs.action_mask"
    for _ in range(4):
        columns = loop.fragment(Acting(0, {})).columns
        assert columns[name][np.arange(len(columns[name])), columns["action"]].all()
        assert columns["truncated"].any()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("shape", r"environments 10–14 at step 3 of the shard have shape \(1,\), expected \(5,\)"),
        ("dtype", r"at step 3 of the shard are of dtype float32, but Discrete\(2\) needs integers"),
        ("range", r"chose 7 for environment 14 at step \d+ of its episode, outside Discrete\(2\)"),
        ("nan", r"log_prob is nan for environment 14 at step \d+ of its episode"),
        (
            "raise",
            "raised ValueError on environments 10–14 at step 3 of the shard: matrix is singular",
        ),
        ("column", r"'value' on environments 10–14 at step 3 of the shard has shape \(6,\)"),
        ("list", "must return a tensor of actions, got a list on environments 10–14 at step 3"),
        ("tensor", r"Bad.act\(\) returned a Tensor on environments 10–14.*Decision\(action"),
        ("nothing", r"Bad.act\(\) returned a NoneType"),
        (
            "number",
            "'value' .* at step 3 of the shard is a float; expected a tensor with a row",
        ),
        ("gone", r"'log_prob' was float32 of shape \(5,\) and is now, .* at step 3 .*, missing"),
        ("double", "'log_prob' was float32 .* and is now, .*, float64"),
        ("wide", r"'log_prob' was .* and is now, .*, float32 of shape \(5, 1\)"),
        ("taken", "extra 'reward' has the name of a column that exists already"),
        ("bfloat16", r"'log_prob' on .* is torch.bfloat16 on cpu, which NumPy cannot represent"),
        ("half action", r"'action' on .* is torch.bfloat16 on cpu, which NumPy cannot represent"),
        ("extras", "extras on .* at step 3 of the shard are a list; expected tensors by name"),
        ("exit", "raised SystemExit on environments 10–14"),
        ("in place", r"Bad.act\(\) changed its observations of environments 10–14 at step 3"),
    ],
)
@pytest.mark.parametrize("engine", ["gymnasium", "native"])
def test_a_policy_that_returns_nonsense_is_named_with_env_and_step(
    engine: str, fault: str, message: str
) -> None:
    if engine == "native" and fault in ("range", "nan"):
        message = message.replace("its episode", "the shard")
    with pytest.raises(PolicyFault, match=message):
        loop_of(Bad(fault), "CartPole-v1", engine=engine).fragment(Acting(0, {}))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"raised ValueError in initial_state\(5\): no such size"),
        (
            "lstm",
            r"initial_state\(5\) returned {'h': torch.float32 of shape \(1, 5, 3\)}; .* row for",
        ),
        ("tuple", r"initial_state\(5\) returned a tuple"),
        ("array", r"initial_state\(5\) returned {'h': a ndarray}"),
        (
            "rows",
            r"after act\(\) on environments 10–14.* is {'h': .*\(1, 3\)}; it was {'h': .*\(5, 3\)",
        ),
        ("names", r"state after act\(\) .* is {'c': .*}; it was {'h': "),
        ("list", r"state after act\(\) .* is a list"),
    ],
)
def test_a_recurrent_state_that_is_none_is_shown_beside_a_right_one(
    fault: str, message: str
) -> None:
    with pytest.raises(PolicyFault, match=message):
        loop_of(BadState(fault), "CartPole-v1").fragment(Acting(0, {}))


def test_no_state_may_be_none() -> None:
    class Plain(Policy):
        def act(self, obs: Any, context: Any) -> Decision:
            return Decision(torch.zeros(len(obs), dtype=torch.int64), {}, None)  # type: ignore[arg-type]

    assert not loop_of(Plain(), "CartPole-v1").fragment(Acting(0, {})).state


def test_an_initial_state_that_is_a_parameter_stays_as_it_is() -> None:
    policy = LearnedState()
    columns = loop_of(policy, "CartPole-v1").fragment(Acting(0, {})).columns
    assert policy.first.tolist() == [5.0, 5.0]
    assert columns["value"].tolist() == (6.0 + columns["step"]).tolist()
    assert columns["episode"].max() > 0


@pytest.mark.parametrize(
    ("space", "action", "said"),
    [
        (gym.spaces.MultiBinary(2), [[256, 0]], r"\[256   0\]"),
        (gym.spaces.MultiDiscrete([3, 3], dtype=np.int8), [[257, 0]], r"\[257   0\]"),
        (gym.spaces.Box(0, 200, (1,), np.uint8), [[300]], r"\[300\]"),
        (gym.spaces.Box(0, 200, (1,), np.uint8), [[-200]], r"\[-200\]"),
        (gym.spaces.Discrete(3, dtype=np.int32), [2**32 + 1], "4294967297"),
    ],
)
def test_an_action_outside_the_space_is_not_made_small_enough(
    space: Any, action: list[Any], said: str
) -> None:
    check, where = ActionCheck(space, 1), Location([7])
    with pytest.raises(PolicyFault, match=f"chose {said} for environment 7 at .*, outside"):
        check(torch.tensor(action), None, where)
    inside = torch.zeros_like(torch.tensor(action))
    assert not check(inside, None, where).any()


@pytest.mark.parametrize("fault", ["nan", "range", "column"])
@pytest.mark.parametrize("engine", ["gymnasium", "native"])
def test_a_fault_is_found_in_the_step_that_has_it(engine: str, fault: str) -> None:
    loop = loop_of(Bad(fault, after=3), "CartPole-v1", engine=engine)
    with pytest.raises(PolicyFault):
        loop.fragment(Acting(0, {}))
    assert loop.steps == 3


@pytest.mark.parametrize("start", [0, 50])
def test_small_integers_that_are_negative_are_not_taken_for_large_ones(start: int) -> None:
    """As unsigned numbers of eight bits, -100 is 156."""
    check = ActionCheck(gym.spaces.Discrete(200, start=start), 1)
    inside = check(torch.tensor([100], dtype=torch.int8), None, Location([7]))
    assert (inside.tolist(), inside.dtype) == ([100], np.int64)
    with pytest.raises(PolicyFault, match="chose -100 for environment 7"):
        check(torch.tensor([-100], dtype=torch.int8), None, Location([7]))


def test_actions_are_real_numbers() -> None:
    space = gym.spaces.Box(-1, 1, (1,))
    with pytest.raises(PolicyFault, match=r"dtype complex64, but Box.* needs real numbers"):
        ActionCheck(space, 1)(torch.zeros(1, 1, dtype=torch.complex64), None, Location([0]))


@pytest.mark.parametrize("engine", ["gymnasium", "native"])
def test_a_policy_annotates_whole_fragments(engine: str) -> None:
    loop = loop_of(Annotating(), "CartPole-v1", engine=engine)
    for _ in range(3):
        fragment = loop.fragment(Acting(0, {}))
        # CartPole's positions move by tau times the velocity, at episodes' ends too.
        expected = np.abs(1 + 0.02 * fragment.columns["obs"][:, 1])
        assert np.allclose(fragment.columns["priority"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"raised ValueError in annotate\(\) on environments 10–14: no such column"),
        ("length", r"'priority' of shape \(79,\).*each of the fragment's 80 rows"),
        ("dtype", "'priority' of shape .* and dtype <U4; expected numbers"),
        ("clash", "returned 'reward', which is the name of a column .* the fragment has obs, rew"),
        ("later", "returned 'next_obs', which is the name of a column .* or is added later"),
        ("source", "returned 'run', which is the name of a column .* or is added later"),
    ],
)
def test_annotations_that_do_not_fit_are_named(fault: str, message: str) -> None:
    with pytest.raises(PolicyFault, match=message):
        loop_of(Annotating(fault), "CartPole-v1").fragment(Acting(0, {}))


@pytest.mark.parametrize("engine", ["gymnasium", "native"])
def test_versions_change_between_steps_and_every_row_knows_its_own(engine: str) -> None:
    loop = loop_of(Cycle(), "CartPole-v1", engine=engine)
    steps = iter(range(1000))

    def between() -> Acting:
        return Acting(next(steps) // 7, {})

    seen = []
    for _ in range(4):
        version = loop.fragment(Acting(0, {}), between=between).columns["version"]
        seen += version.reshape(HORIZON, N)[:, 0].tolist()
        assert (np.diff(version.reshape(HORIZON, N), axis=0) >= 0).all()
    if engine == "gymnasium":
        assert seen == [step // 7 for step in range(4 * HORIZON)]
    assert seen[-1] > 5


def test_scalars_change_between_steps() -> None:
    class Shows(Cycle):
        def act(self, obs: Any, context: Any) -> Any:
            decision = super().act(obs, context)
            return decision._replace(extras={"seen": torch.full((N,), context.scalars["x"])})

    scalars: list[dict[str, float]] = [{"x": float(step // 5)} for step in range(HORIZON)]
    steps = iter(scalars)
    loop = loop_of(Shows(), "CartPole-v1")
    fragment = loop.fragment(Acting(0, {}), between=lambda: Acting(0, next(steps)))
    assert fragment.columns["seen"][::N].tolist() == [each["x"] for each in scalars]


def test_spaces_without_a_tensor_form_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"obs.mission is text.* text='keep'.* text='drop'"):
        loop_of(Cycle(), obs="text")
    with pytest.raises(ConfigError, match=r"nothing in Text\(.* has a tensor form"):
        check_spaces(gym.spaces.Text(4), gym.spaces.Discrete(2), text="keep")
    graph = gym.spaces.Dict(net=gym.spaces.Graph(gym.spaces.Discrete(2), None))
    with pytest.raises(ConfigError, match=r"obs.net has no tensor form"):
        check_spaces(graph, gym.spaces.Discrete(2), text="drop")
    with pytest.raises(ConfigError, match="a policy acts in one array"):
        loop_of(Cycle(), act="dict")
    box = gym.spaces.Box(0, 1, (1,))
    twice = gym.spaces.Dict({"a.b": box, "a": gym.spaces.Dict(b=box)})
    with pytest.raises(ConfigError, match=r"two parts .* the column obs\.a\.b"):
        check_spaces(twice, gym.spaces.Discrete(2))
    with pytest.raises(ConfigError, match=r"obs has no numbers, its shape is \(3, 0\)"):
        check_spaces(gym.spaces.Box(0, 1, (3, 0)), gym.spaces.Discrete(2))


def test_a_stop_gives_up_the_fragment_in_hand() -> None:
    loop = loop_of(Cycle(), "CartPole-v1")
    loop.interrupt()
    with pytest.raises(Interrupted):
        loop.fragment(Acting(0, {}))
