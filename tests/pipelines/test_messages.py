"""What the library's errors look like at the command line: options, extras, no tracebacks."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import pytest
import torch
from distributed import Client

import clusterenv
from clusterenv.cluster.connect import wait_for_workers
from clusterenv.errors import ClusterEnvError, ConfigError
from pipelines import cli
from pipelines.experiment import options
from pipelines.messages import Wording, without_traceback
from pipelines.ppo import PPO, Args
from pipelines.tools.collect import Args as CollectArgs

CLI = [sys.executable, "-m", "pipelines.cli"]
NAMES = [field.name for field in dataclasses.fields(Args)]
COLLECT_NAMES = [field.name for field in dataclasses.fields(CollectArgs)]


class Sure(clusterenv.policies.Policy):
    """A policy without a distribution."""

    def act(self, obs: torch.Tensor, context: Any) -> Any:
        raise NotImplementedError


def collector(policy: Any = None, **given: Any) -> None:
    policy = policy or clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    options = {"num_envs": 4, "horizon": 8, **given}
    clusterenv.Collector("CartPole-v1", policy, **options).close()


def too_few_workers(client: Client) -> None:
    wait_for_workers(client, 4, 0.05)


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "too many shards": (
        lambda: collector(num_envs=2, shards=4),
        "--num-envs 2 is less than --shards 4: every shard needs an environment; "
        "--num-envs 4 --shards 4 or --shards 2",
    ),
    "no environments": (lambda: collector(num_envs=0), "--num-envs must be .* got 0: --num-envs 8"),
    "no shards": (lambda: collector(shards=0), "--shards must be .* got 0: --shards 2"),
    "engine": (lambda: collector(engine="fast"), "--engine fast is unknown; .*: --engine auto"),
    "jobs without a number": (
        lambda: collector(cluster="slurm"),
        "--cluster slurm has no workers yet, so say how many: --cluster slurm --shards 4",
    ),
    "no such cluster": (
        lambda: collector(cluster="lokal"),
        "--cluster lokal is no address, .* did you mean 'local'?",
    ),
    "restarts": (lambda: collector(restarts=3), "--restarts 3 is no rule: --restarts 5"),
    "env faults": (lambda: collector(env_faults=3), "--env-faults 3 is no rule: --env-faults 5"),
    "a rule without a distribution": (
        lambda: collector(Sure(), sync=clusterenv.Divergence(0.1)),
        "--sync divergence --threshold 0.1 compares distributions, .*: --sync every --every 4",
    ),
    "a device that is not there": (
        lambda: collector(inference="head", device="nowhere"),
        "--device nowhere is not there: .* --inference head --device cpu",
    ),
    "a device of workers": (
        lambda: collector(device="cpu"),
        ".*--inference head --device cpu$",
    ),
    "certificates": (
        lambda: collector(cluster="tls://127.0.0.1:9", shards=2),
        "tls://127.0.0.1:9 speaks TLS, .*: name them in Dask's configuration",
    ),
}
"""A call that fails, and what the command line says of it."""


@pytest.mark.parametrize("name", ERRORS)
def test_the_commonest_errors_of_the_library_name_options(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in [name for name in os.environ if name.startswith("DASK_DISTRIBUTED__COMM")]:
        monkeypatch.delenv(variable)
    call, wanted = ERRORS[name]
    with (
        dask.config.set({"distributed.comm.tls.client.cert": None}),
        pytest.raises(ClusterEnvError) as refusal,
    ):
        call()
    said = Wording(NAMES).of(str(refusal.value))
    assert re.match(wanted.replace("?", r"\?"), said), said
    assert not re.search(r"(make_vec|Collector|connect|Evaluator)\(", said)
    assert not re.search(r"\b(num_envs|shards|cluster|engine|sync|device)=", said)
    # The options of a correction are options.
    _, colon, last = said.rpartition(": ")
    right = re.findall(r"^--[a-z].*?(?=,? or --|$)", last) if colon else []
    if right:
        options.read(Args, ["--num-envs", "8", *shlex.split(right[0])])


def test_a_wait_for_workers_names_options_and_a_variable_of_the_environment(
    client: Client,
) -> None:
    with pytest.raises(ClusterEnvError) as refusal:
        wait_for_workers(client, 99, 0.05)
    said = Wording(NAMES).of(str(refusal.value))
    assert "ask for fewer shards (--shards 3)" in said
    assert "DASK_CLUSTERENV__TIMEOUT__WORKERS='10 m'" in said
    assert "--workers 3" in Wording(["cluster", "workers"]).of(str(refusal.value))  # the doctor


def test_only_options_of_the_command_are_translated() -> None:
    text = "text='keep' needs it: Collector(…, text='drop', credits=4), as in runs/shards=2"
    assert Wording(COLLECT_NAMES).of(text) == (
        "--text keep needs it: --text drop, as in runs/shards=2"
    )
    assert Wording(NAMES).of(text) == text
    assert Wording(NAMES).of("overlap=True, and overlap=False") == "--overlap, and --no-overlap"


TRACE = """an error. The errors:

1. environment 3 of shard 0 raised in step.

On the worker:
Traceback (most recent call last):
  File "a.py", line 7, in step
    raise ValueError("no")
ValueError: no

2. shard 0 is gone."""


def test_each_of_several_tracebacks_becomes_its_last_line() -> None:
    assert without_traceback(TRACE) == (
        "an error. The errors:\n\n1. environment 3 of shard 0 raised in step: ValueError: no\n\n"
        "2. shard 0 is gone."
    )


def test_notes_stay_below_what_failed_and_nothing_is_said_twice() -> None:
    missing = "an environment of shard 0 raised in make.\nIs the package installed?"
    trace = "Traceback:\n  File 'a.py', line 1\nModuleNotFoundError: No module named 'a'\n"
    assert without_traceback(f"{missing}\n\nOn the worker:\n{trace}") == (
        "an environment of shard 0 raised in make: ModuleNotFoundError: No module named 'a'\n"
        "Is the package installed?"
    )
    policy = "RuntimeError: shapes differ (shard 0)"
    trace = "Traceback:\n  File 'a.py', line 1\nRuntimeError: shapes differ\n"
    assert without_traceback(f"{policy}\n\nOn the worker:\n{trace}") == policy


@pytest.fixture
def crashing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, client: Client) -> str:
    """An environment that raises on the workers after some steps, by its id."""
    (tmp_path / "crashing.py").write_text(
        "import gymnasium as gym\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Crashing(CartPoleEnv):\n"
        "    steps = 0\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        if self.steps > 9:\n"
        "            raise ValueError('the pole is made of glass')\n"
        "        return super().step(action)\n"
        "gym.register('Crashing-v0', 'crashing:Crashing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    client.run(lambda path: sys.path.insert(0, path), str(tmp_path))
    return "crashing:Crashing-v0"


def test_a_worker_s_traceback_is_shown_if_it_is_wanted(
    crashing: str, tmp_path: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "--shards 1 --num-envs 1 --horizon 32 --minibatches 1 --env-faults 0 --restarts 0"
    words = [*few.split(), "--env", crashing, "--cluster", str(client.scheduler.address)]

    def train(*more: str) -> str:
        assert cli.main(["train", "ppo", *words, "--out", str(tmp_path / "run"), *more]) == 1
        return capsys.readouterr().err

    brief = train()
    assert "raised in step: ValueError: the pole is made of glass" in brief
    assert "--env-faults 0 allows no more" in brief
    assert "Traceback" not in brief
    assert brief.endswith("--traceback shows where\n")
    assert 'crashing.py", line 8, in step' in train("--traceback")


def test_extras_are_named_where_a_package_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for package in ("ale_py", "Box2D", "mujoco", "envpool"):
        monkeypatch.setitem(sys.modules, package, None)
    for module in list(sys.modules):
        if module.startswith(("gymnasium.envs.box2d", "gymnasium.envs.mujoco")):
            monkeypatch.delitem(sys.modules, module)
    wanted = {
        "ale_py:ALE/Pong-v5": "atari",
        "BipedalWalker-v3": "box2d",
        "Ant-v5": "mujoco",
        "Pong-v5 --engine envpool": "envpool",
    }
    for words, extra in wanted.items():
        assert cli.main(["train", "ppo", "--env", *words.split()]) == 2
        assert f"pip install 'clusterenv[{extra}]'" in capsys.readouterr().err


def test_an_id_of_ale_without_its_module_gets_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ale_py")
    monkeypatch.chdir(tmp_path)
    import gymnasium as gym

    monkeypatch.setattr(  # as if no test had imported ale_py
        gym.envs.registration,
        "registry",
        {k: v for k, v in gym.registry.items() if not k.startswith("ALE/")},
    )
    assert cli.main(["train", "ppo", "--env", "ALE/Pong-v5"]) == 2
    assert capsys.readouterr().err.endswith("--env ale_py:ALE/Pong-v5\n")


def test_a_batch_system_without_the_size_of_a_job_gets_a_cluster_file(tmp_path: Path) -> None:
    pytest.importorskip("dask_jobqueue")
    # Of its own process: dask-jobqueue must be imported in the main thread.
    done = subprocess.run(
        [*CLI, "train", "ppo", "--cluster", "slurm", "--shards", "2", "--out", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    said = done.stderr
    assert "--cluster slurm does not say the cores and the memory of a job" in said
    assert "--cluster cluster.yaml. For example\n\n    cluster: slurm\n    cores: 8" in said
    assert "SLURMCluster" not in said


def test_the_refusal_of_a_resume_lists_what_was_typed(tmp_path: Path) -> None:
    from pipelines.experiment.run_directory import arguments, check_arguments

    begun = arguments(PPO.preset("CartPole-v1", seed=3))

    def refused(*words: str) -> str:
        args = options.read(Args, [*words, "--out", str(tmp_path)], presets=PPO.presets)
        with pytest.raises(ConfigError) as refusal:
            check_arguments(tmp_path, begun, args, ("out",))
        return str(refusal.value).partition("; ")[0]

    # Not the nine options that LunarLander's preset sets otherwise.
    assert refused().endswith(
        "--env CartPole-v1 instead of --env LunarLander-v3, --seed 3 instead of --seed 1"
    )
    assert refused("--env", "CartPole-v1").endswith("with --seed 3 instead of --seed 1")
    said = refused("--env", "CartPole-v1", "--seed", "3", "--lr", "0.5")
    assert said.endswith("with --lr 0.001 instead of --lr 0.5")
