"""The arithmetic of ``benchmarks.learners``: what counts as reached, and what its tables say."""

from __future__ import annotations

import pytest

from benchmarks import learners
from benchmarks.peers import training


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def started(goal: float | None, timeout: float = 300.0) -> tuple[training.Training, Clock]:
    task = training.Task("ppo", "CartPole-v1", 1, 10.0, goal, timeout)
    clock = Clock()
    run = training.Training(task, clock)
    run.begin()
    return run, clock


def test_the_goal_needs_a_hundred_episodes() -> None:
    run, clock = started(goal=475.0)
    clock.now += 2
    run.episodes([500.0] * 99, steps=40_000)
    assert not run.over
    clock.now += 1
    run.episodes([500.0], steps=41_000)
    assert run.reached == (3.0, 41_000)
    assert run.over


def test_the_goal_is_the_mean_of_the_last_hundred_and_its_first_time_counts() -> None:
    run, clock = started(goal=200.0)
    run.episodes([0.0] * 100, steps=1_000)
    clock.now += 5
    run.episodes([400.0] * 49, steps=2_000)
    assert run.reached is None
    run.episodes([400.0], steps=3_000)
    clock.now += 5
    run.episodes([400.0] * 50, steps=4_000)
    assert run.reached == (5.0, 3_000)


def test_a_goal_after_the_time_is_over_is_not_reached(capsys: pytest.CaptureFixture[str]) -> None:
    run, clock = started(goal=475.0, timeout=10.0)
    clock.now += 10
    assert run.over
    clock.now += 5  # the processes end
    run.episodes([500.0] * 100, steps=50_000)
    run.report("pytest")
    said = capsys.readouterr().out
    assert '"reached": false' in said
    assert '"seconds": 10.0' in said


def test_a_rate_leaves_the_warm_up_out() -> None:
    run, clock = started(goal=None)
    assert not run.over
    clock.now += training.WARM_UP + 10.0
    assert run.over
    assert training.rate([(1.0, 10), (4.0, 400), (6.0, 1_000)], warm_up=3.0) == 300.0
    with pytest.raises(SystemExit, match="too few"):
        training.rate([(1.0, 10), (4.0, 400)], warm_up=3.0)


def goal_runs(name: str, *seconds: float | None, spent: float = 300.0) -> list[dict[str, object]]:
    shared = {"candidate": name, "measure": "goal", "env": "CartPole-v1"}
    return [
        {**shared, "seed": seed, "reached": True, "seconds": each, "steps": int(1_000 * each)}
        if each is not None
        else {**shared, "seed": seed, "reached": False, "seconds": spent, "steps": 50_000}
        for seed, each in enumerate(seconds)
    ]


def test_times_to_the_goal_are_medians_and_a_time_out_is_shown_as_one() -> None:
    results = learners.Results()
    for record in (
        *goal_runs("ours-ppo", 4.0, 5.0, None),
        *goal_runs("sb3-ppo", 9.0, 10.0, 12.0),
        *goal_runs("rllib-ppo", 20.0, None, None),
        *goal_runs("sb3-dqn", None, None, None, spent=20.0),
    ):
        results.add(record)
    table = learners.goal_table("CartPole-v1", results.of("goal", "CartPole-v1"), timeout=300.0)
    assert table[2:] == [
        "| ClusterEnv PPO | 2 of 3 | 5.0 | 5,000 | 1.00 |",
        "| Stable-Baselines3 PPO | 3 of 3 | 10.0 | 10,000 | 2.00 |",
        "| RLlib PPO | 1 of 3 | not in 300 | – | – |",
        "| Stable-Baselines3 DQN | 0 of 3 | not reached | not in 50,000 | – |",
    ]


def test_throughput_ratios_are_of_the_same_seed() -> None:
    runs = {
        name: [
            {"seed": seed, "steps_per_second": rate, "version": "v"}
            for seed, rate in enumerate(rates)
        ]
        for name, rates in {"ours-ppo": (100.0, 300.0), "sb3-ppo": (50.0, 100.0)}.items()
    }
    table = learners.throughput_table("CartPole-v1", runs)
    assert table[2:] == [
        "| ClusterEnv PPO | v | 200 | 1.00 |",
        "| Stable-Baselines3 PPO | v | 75 | 2.50 |",
    ]
