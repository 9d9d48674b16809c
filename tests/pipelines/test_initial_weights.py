"""``--init-from``: another run's weights, and nothing else of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
from distributed import Client
from small_runs import check_same

from clusterenv.errors import ConfigError
from pipelines import cli
from pipelines.apex import Apex
from pipelines.dqn import DQN
from pipelines.experiment import run
from pipelines.experiment.directories import note_of
from pipelines.experiment.initial_weights import take_weights
from pipelines.impact import IMPACT
from pipelines.impala import IMPALA
from pipelines.ppo import PPO
from pipelines.vmpo import VMPO

STORE = {"min_rows": 64, "batch": 16}
SMALL: dict[Any, dict[str, Any]] = {
    PPO: {"epochs": 1, "scale_rewards": True},
    DQN: STORE,
    Apex: STORE,
    IMPALA: {},
    IMPACT: {},
    VMPO: {"epochs": 1, "popart": 0.01},
}


def short(kind: Any, out: Path, cluster: str, **changes: Any) -> Any:
    sizes = {"num_envs": 4, "horizon": 16, "shards": 2, "total_steps": 256, "hidden": (16,)}
    options = {**sizes, "log_every": 64, "quiet": True, "out": out, "cluster": cluster}
    return kind.preset("CartPole-v1", **{**options, **SMALL[kind], **changes})


@pytest.fixture
def cluster(client: Client, leaves_nothing: None) -> str:
    return str(client.scheduler.address)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, client: Client) -> Path:
    """A run of PPO."""
    out = tmp_path_factory.mktemp("runs") / "ppo"
    run(PPO, short(PPO, out, str(client.scheduler.address)))
    return out


def made(kind: Any, args: Any) -> Any:
    env = gym.make(args.env)
    return kind(args, env.observation_space, env.action_space)


@pytest.mark.parametrize("kind", SMALL)
def test_every_learner_starts_from_the_weights_of_its_own(
    kind: Any, tmp_path: Path, cluster: str
) -> None:
    first = short(kind, tmp_path / "first", cluster)
    run(kind, first)
    (checkpoint,) = (tmp_path / "first").glob("learner-*.pt")
    saved = torch.load(checkpoint, weights_only=True)["learner"]
    # Of another size, so that nothing of the run's own environments could be taken.
    args = short(kind, tmp_path / "second", cluster, num_envs=2, lr=1e-5, init_from=first.out)
    learner = made(kind, args)
    before = copy.deepcopy(learner.state_dict())
    take_weights(learner, first.out)
    after = learner.state_dict()
    for name, part in learner.parts.items():
        if isinstance(part, torch.optim.Optimizer) or name == "duals":
            check_same(after[name], before[name])
            continue
        stay = getattr(part, "of_envs", ())
        for key, tensor in after[name].items():
            assert torch.equal(tensor, (before if key in stay else saved)[name][key]), (name, key)
    check_same(
        {key: value for key, value in after.items() if key not in learner.parts},  # counters
        {key: value for key, value in before.items() if key not in learner.parts},
    )
    # What the optimizer will move are the loaded weights.
    agent = getattr(learner, "agent", None) or learner.q
    loaded = torch.nn.utils.parameters_to_vector(agent.parameters())
    assert torch.equal(learner.optimizer.vector, loaded)


def test_a_run_of_its_own_goes_on_by_itself(
    begun: Path, tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = "train ppo --env CartPole-v1 --num-envs 4 --horizon 16 --shards 2 --epochs 1 --lr 1e-9"
    words += f" --hidden 16 --scale-rewards True --log-every 64 --cluster {cluster} --out {out}"
    words += f" --init-from {begun} --entropy 0.05 --total-steps"
    assert cli.main([*words.split(), "128"]) == 0
    said = capsys.readouterr().out
    assert f"starting from the weights of {begun}" in said
    # In the command that goes on.
    assert f"--init-from {begun}" in said
    assert "--scale-rewards True" in said
    note = note_of(out) or {}
    assert (note["steps"], note["finished"]) == (128, True)  # its own counters
    (old,), (new,) = begun.glob("learner-*.pt"), out.glob("learner-*.pt")
    weights = [torch.load(path, weights_only=True)["learner"]["agent"] for path in (old, new)]
    for name, tensor in weights[0].items():
        if not name.startswith("stats"):
            torch.testing.assert_close(tensor, weights[1][name], atol=1e-5, rtol=0)
    assert cli.main([*words.split(), "256"]) == 0
    said = capsys.readouterr().out
    assert f"going on with {out} from 128 steps" in said
    assert "starting from" not in said


@pytest.mark.parametrize(
    ("kind", "env", "changes", "message"),
    [
        (
            DQN,
            "CartPole-v1",
            {},
            r"a run of ppo, and dqn .*train ppo --env CartPole-v1 --init-from .*ppo$",
        ),
        (
            PPO,
            "CartPole-v1",
            {"hidden": (8, 8), "gamma": 0.5},
            r"do not fit: .*other options: --hidden 16$",
        ),
        (
            PPO,
            "CartPole-v1",
            {"hidden": (8,), "normalize_obs": False},
            r"other options: --hidden 16 --normalize-obs$",
        ),
        (PPO, "Acrobot-v1", {}, r"trained on CartPole-v1, .*: --env CartPole-v1$"),
        (PPO, "Pendulum-v1", {"hidden": (8,)}, r": --env CartPole-v1$"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(
    begun: Path, tmp_path: Path, kind: Any, env: str, changes: dict[str, Any], message: str
) -> None:
    out = tmp_path / "run"
    args = kind.preset(env, **{"hidden": (16,), **changes}, out=out, init_from=begun, quiet=True)
    with pytest.raises(ConfigError, match=message):
        run(kind, args)
    assert not out.exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, there: bool) -> None:
    source, out = tmp_path / "nothing", tmp_path / "run"
    if there:
        source.mkdir()
    args = PPO.preset("CartPole-v1", out=out, init_from=source, quiet=True)
    with pytest.raises(ConfigError, match=r"holds no checkpoint of a run; .*--init-from runs/ppo-"):
        run(PPO, args)
    assert not out.exists()


def test_a_checkpoint_that_is_damaged_is_refused(begun: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in begun.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (path,) = source.glob("learner-*.pt")
    path.write_bytes(path.read_bytes()[:-50])
    args = PPO.preset("CartPole-v1", hidden=(16,), out=tmp_path / "run", init_from=source)
    with pytest.raises(ConfigError, match=rf"{path.name} cannot be read: .*--init-from runs/mine"):
        run(PPO, args)


def test_a_refused_resume_says_so(begun: Path, cluster: str) -> None:
    right = f"--init-from {begun} --out {begun}-2"
    for change in ({"lr": 0.5}, {"init_from": Path("elsewhere")}):
        args = short(PPO, begun, cluster, total_steps=512, **change)
        with pytest.raises(ConfigError, match=rf"was begun with .*its weights: {right}$"):
            run(PPO, args)
    with pytest.raises(ConfigError, match=r"begun with no --init-from instead of --init-from else"):
        run(PPO, args)
