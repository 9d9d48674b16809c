"""Metrics arrive in every file, under the same names, and go on where a run does."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.metrics import Metrics
from pipelines.run import Run
from pipelines.sinks import CsvFile, JsonLines, read_csv

ROOT = Path(__file__).parents[2]


def at(steps: int) -> Metrics:
    return Metrics(steps=steps, mean_return=steps / 8, kl=0.5)


def test_all_files_have_the_same_names_and_numbers(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    for steps in (8, 16):
        run.log(at(steps))
    run.close()
    names = set(at(8).given())
    rows = read_csv(tmp_path / "progress.csv")
    objects = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(rows[0]) == set(objects[0]) == names
    assert set(events.Tags()["scalars"]) == names - {"steps"}
    assert [float(row["mean_return"]) for row in rows] == [1.0, 2.0]
    assert [record["mean_return"] for record in objects] == [1.0, 2.0]
    scalars = events.Scalars("mean_return")
    assert [(point.step, point.value) for point in scalars] == [(8, 1.0), (16, 2.0)]


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", None)
    sink.write(Metrics(steps=1, mean_return=math.nan))
    sink.close()
    (record,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert record["mean_return"] is None


@pytest.mark.parametrize("kind", [CsvFile, JsonLines])
def test_what_lies_beyond_the_checkpoint_is_dropped(
    tmp_path: Path, kind: type[CsvFile] | type[JsonLines]
) -> None:
    path = tmp_path / "log"
    sink = kind(path, None)
    for steps in (8, 16, 24):
        sink.write(at(steps))
    sink.close()
    with path.open("a") as file:
        file.write('{"steps": 3' if kind is JsonLines else "32,")  # killed while it wrote
    sink = kind(path, 16)
    sink.write(at(20))
    sink.close()
    with path.open() as file:
        steps = (
            [json.loads(line)["steps"] for line in file]
            if kind is JsonLines
            else [int(row["steps"]) for row in csv.DictReader(file)]
        )
    assert steps == [8, 16, 20]


def test_a_checkpoint_that_finds_no_room_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save({"steps": 1})

    def create(path: Path) -> BinaryIO:
        path.symlink_to("/dev/full")
        return path.open("wb")

    monkeypatch.setattr("pipelines.checkpoints.create", create)
    with pytest.raises(OSError, match=r"No space left.*checkpoint\.pt"):
        run.save({"weights": torch.zeros(100_000)})
    assert run.load() == {"steps": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_every_metric_is_documented() -> None:
    documented = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert documented == [field.name for field in dataclasses.fields(Metrics)]


def test_weights_and_biases_gets_them_offline(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from pipelines.run import Run; "
        "from pipelines.metrics import Metrics; "
        f"run = Run(Path({str(tmp_path / 'mine')!r}), wandb=True); run.open(); "
        "run.log(Metrics(steps=8, kl=0.5)); run.close()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"WANDB_MODE": "offline", "HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    (log,) = (tmp_path / "mine" / "wandb").glob("offline-run-*/run-mine.wandb")
    assert b"kl" in log.read_bytes()
