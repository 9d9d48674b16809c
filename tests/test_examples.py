"""Every example and benchmark runs, in a short form."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
from distributed import Client

import clusterenv

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


def test_quickstart_prints_a_table() -> None:
    output = run("examples/quickstart.py", "--seconds", "1", "--num-envs", "4")
    for env_id in ("CartPole-v1", "LunarLander-v3"):
        steps = re.search(rf"{env_id} +4 +([\d,]+)", output)
        assert steps is not None
        assert int(steps[1].replace(",", "")) > 100


def test_step_benchmark_prints_ratios() -> None:
    output = run("benchmarks/step.py", "--rounds", "1", "--seconds", "0.3", "--num-envs", "4")
    assert len(re.findall(r"ClusterEnv\.(step|send/recv) \| [\d,]+ \| \d+\.\d\d", output)) == 4
    assert "Dask actor calls" in output


def test_collect_benchmark_prints_ratios() -> None:
    output = run(
        "benchmarks/collect.py", "cartpole", "publish", "--rounds", "1", "--seconds", "0.5"
    )
    assert re.search(
        r"CartPole-v1, Gymnasium loop, 2 × 16 \| [\d,]+ \| [\d,]+ \| \d+\.\d\d", output
    )
    assert "0 pulls, 0 weight bytes" in output


def test_a_script_for_sync_vector_env_learns_the_same_on_a_cluster(client: Client) -> None:
    """The unchanged training function gives the same result, to the last bit, on both."""
    train = runpy.run_path(str(ROOT / "examples" / "cleanrl_style_ppo.py"))["train"]
    results = []
    for envs in (
        gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 6),
        clusterenv.make_vec([lambda: gym.make("CartPole-v1")] * 6, 6, shards=3, cluster=client),
    ):
        results.append(train(envs, total_steps=6 * 128 * 4, seed=3))
        envs.close()
    assert results[0] == results[1]
    assert results[0] > 20


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/getting-started.md",
        "docs/engines.md",
        "docs/collecting.md",
        "docs/replay.md",
    ],
)
def test_python_blocks_of_the_documentation_run_as_they_stand(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block)
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{page}, block {number}:\n{done.stderr}"


def test_docstring_examples_run() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--doctest-modules",
            "clusterenv",
            "-p",
            "no:cacheprovider",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 5
