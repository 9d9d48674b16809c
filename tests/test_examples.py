"""Every example and benchmark runs, in a short form."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import yaml
from distributed import Client

import clusterenv

ROOT = Path(__file__).parents[1]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    # Dask itself may log a heartbeat that met a closing scheduler; nothing of ours complains.
    ours = rf'File "{ROOT}/(clusterenv|pipelines|examples|benchmarks)/'
    assert not re.search(ours, done.stderr), done.stderr
    return done.stdout


def test_quickstart_prints_a_table() -> None:
    output = run("examples/quickstart.py", "--seconds", "1", "--num-envs", "4")
    for env_id in ("CartPole-v1", "LunarLander-v3"):
        steps = re.search(rf"{env_id} +4 +([\d,]+)", output)
        assert steps is not None
        assert int(steps[1].replace(",", "")) > 100


def test_sb3_learns_on_a_cluster(client: Client) -> None:
    pytest.importorskip("stable_baselines3")
    arguments = ("--total-steps", "700", "--num-envs", "3", "--cluster", client.scheduler.address)
    output = run("examples/sb3.py", *arguments)
    rows = re.findall(r"^ +([\d,]+)  (\d+\.\d)$", output, re.MULTILINE)
    assert rows[-1][0] == "768"  # whole rollouts of 3 × 128
    assert all(float(mean) > 5 for _, mean in rows)


def test_torchrl_learns_from_the_replay_store(client: Client) -> None:
    pytest.importorskip("torchrl")
    arguments = ("--updates", "30", "--num-envs", "6", "--cluster", client.scheduler.address)
    output = run("examples/torchrl_replay.py", *arguments)
    rows = re.findall(r"^ +(\d+) +([\d,]+) +(\d+) +(\d+\.\d) +(\d+\.\d+)$", output, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(3, 31, 3))
    assert int(rows[-1][1].replace(",", "")) >= 512


def test_an_environment_of_ones_own_goes_to_the_workers(client: Client) -> None:
    arguments = ("--steps", "100", "--num-envs", "6", "--cluster", client.scheduler.address)
    output = run("examples/own_environment.py", *arguments)
    assert "6 environments in 3 processes" in output
    assert "Box(-1.0, 1.0, (1,), float32)" in output
    arrives = [int(share) for share in re.findall(r"\d+% +[\d,]+ +(\d+)%", output)]
    assert arrives[0] < arrives[1] < arrives[2]
    assert "without wind: 100%" in output


def test_pixels_of_ones_own_are_stacked_and_stored_once(client: Client) -> None:
    arguments = ("--rows", "1500", "--num-envs", "6", "--cluster", client.scheduler.address)
    output = run("examples/own_pixels.py", *arguments)
    assert "observations: (4, 40, 40), uint8" in output
    caught = {who: int(share) for who, share in re.findall(r"(\w+): \d+ .* (\d+)% caught", output)}
    assert caught["guesses"] < 60
    assert caught["follows"] == 100
    plain, stacked = re.findall(r"([\d,]+) bytes a row; samples of \(32, 4, 40, 40\)", output)
    assert int(stacked.replace(",", "")) < 0.4 * int(plain.replace(",", ""))


def test_no_forbidden_action_is_taken(client: Client) -> None:
    arguments = ("--rows", "2000", "--num-envs", "6", "--cluster", client.scheduler.address)
    output = run("examples/action_mask.py", *arguments)
    taken = re.search(r"forbidden actions taken: (\d+) of ([\d,]+)", output)
    assert taken is not None
    assert int(taken[1]) == 0
    assert int(taken[2].replace(",", "")) >= 2000
    difference = re.search(r"differ by at most (\S+)", output)
    assert difference is not None
    assert float(difference[1]) < 1e-5


def test_a_recurrent_policy_is_computed_again_from_the_state_stored(client: Client) -> None:
    arguments = ("--updates", "10", "--num-envs", "12", "--cluster", client.scheduler.address)
    output = run("examples/recurrent_policy.py", *arguments)
    rows = re.findall(r"^ +(\d+) +(\d+)% +(\S+) +(\S+)$", output, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(1, 11))
    assert all(float(exact) < 1e-5 for _, _, exact, _ in rows)
    assert max(float(blank) for _, _, _, blank in rows) > 1e-4
    assert "each batch holds its state: (4, 16) for 4 envs" in output


def test_rows_on_disk_are_asked_with_sql(client: Client, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    arguments = ("--rollouts", "8", "--num-envs", "3", "--cluster", client.scheduler.address)
    output = run("examples/duckdb_analysis.py", *arguments, "--directory", str(tmp_path / "rows"))
    worth = re.findall(r"│ +(\d) │ +(\d+) │ +(\d+\.\d) │ +(\d+) │", output)
    assert [int(row[0]) for row in worth] == [1, 2, 3]
    assert float(worth[0][2]) < 40 < float(worth[2][2])
    assert len(re.findall(r"│ +\d │ +3072 │ +1 │", output)) == 3  # shards
    assert "fell" in output
    assert clusterenv.open_dataset(tmp_path / "rows").count_rows() == 3 * 3072


def test_the_slurm_example_shows_its_job_script_and_runs_anywhere() -> None:
    pytest.importorskip("dask_jobqueue")
    script = run("examples/slurm.py", "--dry-run")
    assert "#SBATCH --cpus-per-task=4" in script
    assert "--nworkers 4" in script
    output = run("examples/slurm.py", "--cluster", "local", "--shards", "2", "--rows", "3000")
    assert re.search(r"^    1 +[\d,]+ +[\d,]+$", output, re.MULTILINE)
    assert "2 workers on 1 machine(s)" in output


def test_the_kubernetes_example_shows_a_manifest_that_is_right() -> None:
    """There is no Kubernetes here: what it does beyond this is not tested."""
    output = run("examples/kubernetes_cluster.py", "--dry-run", "--shards", "7", "--image", "rl:2")
    resource = yaml.safe_load(output)
    assert (resource["apiVersion"], resource["kind"]) == ("kubernetes.dask.org/v1", "DaskCluster")
    assert resource["spec"]["worker"]["replicas"] == 7
    containers = [
        resource["spec"][part]["spec"]["containers"][0] for part in ("worker", "scheduler")
    ]
    assert [container["image"] for container in containers] == ["rl:2", "rl:2"]
    assert containers[0]["args"][:2] == ["dask", "worker"]
    ports = {port["name"] for port in resource["spec"]["scheduler"]["service"]["ports"]}
    assert ports == {"tcp-comm", "http-dashboard"}  # KubeCluster looks for these names

    _, policy = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    label = {"dask.org/cluster-name": resource["metadata"]["name"]}
    assert policy["spec"]["podSelector"]["matchLabels"] == label
    assert policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"] == label


def test_every_example_is_in_the_table() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    for file in (ROOT / "examples").iterdir():
        if file.suffix in (".py", ".yaml"):
            assert f"[{file.name}]({file.name})" in table


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


def test_the_cost_of_evaluation_is_measured() -> None:
    output = run("benchmarks/evaluation.py", "--shards", "1", "--rounds", "1", "--seconds", "0.5")
    ratio = re.search(r"median ratio (\S+) .* (\d+) episodes evaluated", output)
    assert ratio is not None
    assert float(ratio[1]) > 0
    assert int(ratio[2]) >= 10


def test_the_speed_of_environments_is_measured() -> None:
    env_id = "clusterenv/ZipfGridworld-v0"
    arguments = ("--num-envs", "2", "8", "--rounds", "1", "--seconds", "0.1")
    output = run("-m", "benchmarks.environments", env_id, *arguments)
    rows = re.findall(rf"\| {env_id} \| (\d) \| ([\d,]+) \| 11,907 \|", output)
    assert [num_envs for num_envs, _ in rows] == ["2", "8"]
    assert all(int(rate.replace(",", "")) > 0 for _, rate in rows)


def test_weights_benchmark_finds_the_size_from_which_on_the_relay_pays() -> None:
    names = runpy.run_path(str(ROOT / "benchmarks" / "weights.py"))
    pays_from, rate_of, row = (names[name] for name in ("pays_from", "rate_of", "row"))
    taken, received = names["Taken"], names["Received"]
    assert pays_from({0.4: 1.2, 1: 0.7, 4: 1.1, 40: 3.0}) == 4  # not from 0.4 on: 1 lies above
    assert pays_from({4: 1.5, 40: 0.9}) is None
    assert rate_of([received(10**6, 3.0, 5.0), received(10**6, 4.0, 7.0)]) == 4.0
    alone = [taken(8.0, 64_000_000, 0)] * 3
    relay = [taken(seconds, 16_000_000, 48_000_000) for seconds in (2.0, 4.0, 8.0)]
    line = "| 4 | 8.000 | 4.000 | 2.00 (1.00–4.00) | 64.0 | 16.0 | 48.0 |"
    assert row(4.0, alone, relay) == (line, 2.0)


def test_weights_benchmark_prints_ratios() -> None:
    try:
        output = run(
            *("benchmarks/weights.py", "--workers", "2"),
            *("--rounds", "1", "--sizes", "0.4"),
        )
    except AssertionError as error:
        if "root and iproute2 are needed" in str(error):
            pytest.skip(f"no network namespaces here: {error}")
        raise
    assert re.search(r"head to one worker \d+;", output)
    ratio = r"\d+\.\d\d \(\d+\.\d\d–\d+\.\d\d\)"
    assert re.search(
        rf"^\| 0\.4 \| \d\.\d+ \| \d\.\d+ \| {ratio} \| 0\.8 \| ", output, re.MULTILINE
    )


def test_peers_are_measured_beside_ours() -> None:
    output = run(
        *("-m", "benchmarks.peers.run", "gymnasium_async"),
        *("--here", "--rounds", "1", "--seconds", "0.5"),
    )
    assert re.search(r"\| ClusterEnv Collector \| this \| [\d,]+ \| 1\.00 \|", output)
    assert re.search(r"\| bare limit: no communication \|  \| [\d,]+ \| \d+\.\d\d \|", output)
    assert re.search(r"\| Gymnasium AsyncVectorEnv \| gymnasium \S+ \| [\d,]+ \| \d+\.", output)


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


@pytest.mark.timeout(300)  # a page has up to five scripts, each with a cluster of its own
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/getting-started.md",
        "docs/engines.md",
        "docs/environments.md",
        "docs/collecting.md",
        "docs/replay.md",
        "docs/evaluation.md",
        "docs/other-frameworks.md",
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
        if (page, number) == ("README.md", 1):  # it shows a saving, and a policy that learns
            said = re.fullmatch(
                r"50 versions, (\d+) pulls instead of 100; return (\d+)\n", done.stdout
            )
            assert said is not None, done.stdout
            assert 0 < int(said[1]) < 50
            assert int(said[2]) > 35  # one that acts at random has about 20


def test_docstring_examples_run() -> None:
    examples = ("--doctest-modules", "clusterenv", "pipelines")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *examples],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 50
