"""The study of rare tasks: it trains, judges by split, resumes, and says what the pairs show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from benchmarks.studies import rarity
from benchmarks.studies.rare_tasks import Args, Outcome, compare, spearman, study, true_rarity
from pipelines.episodic_memory import MemoryIMPALA
from pipelines.impala import IMPALA

GRID = "clusterenv/ZipfGridworldSmall-v0"


def pair(seed: int, rare: tuple[float, float], zipf: tuple[float, float]) -> list[Outcome]:
    return [
        Outcome(arm, seed, 100, 1.0, zipf[place], 0.5, rare[place], found)
        for place, (arm, found) in enumerate((("impala", None), ("episodic_memory", 0.4)))
    ]


def test_pairs_tell_what_is_certain() -> None:
    text = compare([*pair(1, (0.1, 0.3), (0.8, 0.8)), *pair(2, (0.2, 0.41), (0.9, 0.89))])
    assert "| episodic_memory | 2 | 0.890 | 0.500 | 0.410 | 0.40 |" in text
    assert "| impala | mean, 95 % | 0.850 (0.215 to 1.485) |" in text
    assert "| difference | 2 pairs | -0.005 (-0.069 to +0.059) | +0.000" in text
    assert "+0.205 (+0.141 to +0.269) | |" in text
    assert text.endswith(
        "Rare tasks: higher with the memory. Zipf's distribution: no difference that is certain. "
        "Rarity: 2 of 2 runs at least 0.3."
    )


def test_a_null_result_is_said_as_one() -> None:
    text = compare([*pair(1, (0.1, 0.3), (0.8, 0.5)), *pair(2, (0.3, 0.1), (0.9, 0.6))])
    assert "Rare tasks: no difference that is certain with the memory" in text
    assert "Zipf's distribution: lower" in text
    alone = compare([*pair(1, (0.1, 0.3), (0.8, 0.5)), pair(2, (0.3, 0.1), (0.9, 0.6))[0]])
    assert alone.endswith("Too few pairs for a verdict.")


def test_ranks_of_equal_values_are_shared() -> None:
    first, second = np.array([1.0, 2.0, 2.0, 5.0]), np.array([3.0, 4.0, 1.0, 9.0])
    expected = np.corrcoef([1, 2.5, 2.5, 4], [2, 3, 1, 4])[0, 1]
    assert spearman(first, second) == pytest.approx(expected)


def test_the_true_rarity_of_an_image_is_that_of_its_task() -> None:
    env: Any = gym.make(GRID)
    images, expected = [], []
    mass = sum(1 / rank for rank in range(1, 4)) * sum(1 / rank for rank in range(1, 6))
    for seed in range(30):
        obs, info = env.reset(seed=seed)
        images.append(obs)
        expected.append((info["map"] + 1) * (info["target"] + 1) * mass)
    assert len(set(expected)) > 5
    np.testing.assert_allclose(true_rarity(GRID, np.stack(images)), expected)


def test_equal_images_that_are_told_apart_seem_less_rare_than_they_are() -> None:
    torch.set_num_threads(1)
    args = rarity.Args(updates=100)
    assert rarity.measure(args, seed=1) > rarity.measure(args, seed=1, apart=True) + 0.1


@pytest.mark.timeout(240)  # it starts clusters
def test_a_study_trains_pairs_and_leaves_out_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"num_envs": 8, "horizon": 16, "evaluate_episodes": 2, "log_every": 64}
    for kind in (IMPALA, MemoryIMPALA):
        more = {"familiarity": 32, "contrasted": 16} if kind is MemoryIMPALA else {}
        changed = {**kind.presets[GRID], **sizes, **more}
        monkeypatch.setattr(kind, "presets", {GRID: changed})
    args = Args(seeds=(1,), total_steps=1_024, evaluations=2, episodes=4, shards=1, out=tmp_path)
    found = study(args)
    assert [(each.arm, each.spearman is None) for each in found] == [
        ("impala", True),
        ("episodic_memory", False),
    ]
    assert all(0 <= each.rare <= 1 for each in found)
    lines = (tmp_path / "curves" / "impala-1.csv").read_text().splitlines()
    assert lines[0] == "eval_steps,eval_zipf,eval_uniform,eval_rare"
    assert len(lines) >= 2
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "runs").iterdir())
    capsys.readouterr()
    assert study(args) == found
    assert "run 1" not in capsys.readouterr().out
