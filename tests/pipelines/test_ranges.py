"""Numbers that cannot work are refused when arguments are made, with a call that would do."""

from __future__ import annotations

import functools
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import aps_arms
from clusterenv.errors import ConfigError
from pipelines import apex, cli, dqn, ppo, r2d2
from pipelines.experiment import options
from pipelines.tools import collect

OUT = Path("runs/x")
COLLECT = functools.partial(collect.Args, "CartPole-v1", OUT)
LEARNERS: list[Callable[..., Any]] = [ppo.Args, dqn.Args, apex.Args, r2d2.Args]
STORED: list[Callable[..., Any]] = [dqn.Args, apex.Args, r2d2.Args]
ALL: list[Callable[..., Any]] = [*LEARNERS, COLLECT, aps_arms.Args]

NAN = math.nan
BAD: list[tuple[list[Callable[..., Any]], dict[str, tuple[Any, ...]]]] = [
    (ALL, {"num_envs": (0, -1), "horizon": (0,), "shards": (0, 17)}),
    ([*LEARNERS, aps_arms.Args], {"total_steps": (0, NAN), "lr": (0, -1, NAN, math.inf)}),
    ([*LEARNERS, COLLECT], {"seed": (-1,)}),
    (
        LEARNERS,
        {
            "threads": (0,),
            "every": (0,),
            "max_lag": (0,),
            "threshold": (-1, NAN),
            "restarts": (-1,),
            "restart_wait": (-1, NAN),
            "env_faults": (-1,),
            "stop_at": (NAN, math.inf),
            "gamma": (1.5, -0.1, NAN),
            "grad_norm": (0, -1, NAN),
            "hidden": ((64, 0), (-1,)),
            "checkpoint_every": (0,),
        },
    ),
    (
        [ppo.Args],
        {
            "lam": (2, -1, NAN),
            "clip": (0, -1, NAN),
            "epochs": (0,),
            "minibatches": (0, 1025, 4096),
            "max_correction": (0, NAN),
            "entropy": (-1, NAN, math.inf),
            "value_coef": (-1, NAN),
        },
    ),
    (
        STORED,
        {
            "batch": (0,),
            "n_step": (0,),
            "rows_per_update": (0,),
            "target_every": (0,),
            "publish_every": (0,),
            "log_every": (0,),
            "min_rows": (0, 100_001),
            "capacity": (0,),
            "temperature": (0, NAN),
            "tau": (0, 1.5, NAN),
            "alpha": (1.5,),
            "beta": (-1,),
        },
    ),
    ([dqn.Args], {"epsilon_start": (1.5,), "epsilon_end": (-1, NAN), "epsilon_steps": (0,)}),
    (
        [r2d2.Args],
        {
            "burn_in": (-1, 48),
            "sequence": (0,),
            "horizon": (49,),
            "units": (0,),
        },
    ),
    ([apex.Args, r2d2.Args], {"ladder_base": (0, 1), "ladder_power": (-1, math.inf)}),
    ([COLLECT], {"rows": (0,), "epsilon": (2, NAN), "commit_seconds": (0, NAN)}),
    (
        [aps_arms.Args],
        {"thresholds": ((0.1, -1), (NAN,)), "every": ((4, 0),), "seeds": ((-1,), ())},
    ),
]


def name_of(make: Any) -> str:
    return str(getattr(make, "func", make).__module__.removeprefix("pipelines."))


CASES = [
    pytest.param(make, name, value, id=f"{name_of(make)} {name} {value}")
    for kinds, table in BAD
    for make in kinds
    for name, values in table.items()
    for value in values
]


@pytest.mark.parametrize(("make", "name", "value"), CASES)
def test_a_number_that_cannot_work_is_refused_with_one_that_does(
    make: Callable[..., Any], name: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make(**{name: value})
    said = str(refusal.value)
    flag = f"--{name.replace('_', '-')}"
    assert said.startswith(flag)
    assert " ".join(map(str, value if isinstance(value, tuple) else [value])) in said
    # The last flag of the message is a right call.
    right = re.findall(r"--[a-z].*?(?=,? or --|$)", said.rpartition(": ")[2])[0]
    kind = getattr(make, "func", make)
    needed = ["--env", "CartPole-v1", "--out", str(OUT)]
    options.read(kind, [*needed, *shlex.split(right)])


def small_store(**changes: Any) -> dqn.Args:
    return dqn.Args(num_envs=4, horizon=64, min_rows=1, **changes)


def test_a_store_must_have_room_for_what_a_shard_sends_at_once() -> None:
    small_store(capacity=128, shards=2)
    with pytest.raises(ConfigError, match=r"--capacity 127 has no room for the 128 rows.*1280"):
        small_store(capacity=127, shards=2)
    small_store(capacity=64)  # a shard for each environment, if the cluster has as many workers
    with pytest.raises(ConfigError, match=r"--capacity 63 has no room for the 64 rows"):
        small_store(capacity=63)


def test_one_row_is_too_little_for_any_number_of_minibatches() -> None:
    with pytest.raises(ConfigError, match=r"1 environments × 1 steps: --horizon 128"):
        ppo.Args(num_envs=1, horizon=1, minibatches=1)
    ppo.Args(num_envs=1, horizon=2, minibatches=1)


@pytest.mark.parametrize("name", ["clip", "max_correction", "grad_norm", "threshold"])
def test_what_only_limits_may_be_infinite(name: str) -> None:
    assert getattr(ppo.Args(**{name: math.inf}), name) == math.inf


def test_the_command_line_refuses_without_starting_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-steps", "256", "--shards", "1"]
    assert cli.main([*words, "--checkpoint-every", "0"]) == 2
    said = capsys.readouterr().err
    assert "--checkpoint-every must be 1 or more, got 0: --checkpoint-every 50000" in said
    assert not list(tmp_path.iterdir())


def test_what_does_not_go_together_in_a_file_may_do_so_with_the_line(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("shards: 32\nfresh: true\n")
    with pytest.raises(ConfigError, match="--shards 32 leaves shards without an environment"):
        options.read(ppo.Args, ["--options", str(file)])
    words = ["--options", str(file), "--num-envs", "64", "--out", "runs/x"]
    args = options.read(ppo.Args, words)
    assert (args.shards, args.num_envs, args.fresh) == (32, 64, True)
