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
from tensorboard.plugins.hparams import plugin_data_pb2

from pipelines.experiment.metrics import GROUPS, Metrics
from pipelines.experiment.run_directory import RunDirectory
from pipelines.experiment.run_log import RunLog
from pipelines.experiment.sinks import CsvFile, JsonLines, read_csv

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class SimpleArgs:
    out: Path
    fresh: bool = False


def at(steps: int) -> Metrics:
    return Metrics(steps=steps, mean_return=steps / 8, learner={"kl": 0.5})


def test_all_files_have_the_same_names_and_numbers(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.open(None)
    for steps in (8, 16):
        log.write(at(steps))
    log.close()
    names = set(at(8).given())
    rows = read_csv(tmp_path / "progress.csv")
    objects = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(rows[0]) == set(objects[0]) == names
    tags = set(events.Tags()["scalars"])
    assert {tag.split("/")[1] for tag in tags} == names - {"steps"}
    assert tags >= {"rollout/mean_return", "losses/kl", "sync/pulls", "throughput/seconds"}
    assert [float(row["mean_return"]) for row in rows] == [1.0, 2.0]
    assert [record["mean_return"] for record in objects] == [1.0, 2.0]
    scalars = events.Scalars("rollout/mean_return")
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
    directory = RunDirectory(SimpleArgs(tmp_path), "ppo", ())
    directory.commit({"weights": torch.ones(3)}, None, steps=1, finished=False)

    def create(path: Path) -> BinaryIO:
        path.symlink_to("/dev/full")
        return path.open("wb")

    monkeypatch.setattr("pipelines.experiment.files.create", create)
    with pytest.raises(OSError, match=r"No space left.*learner-2\.pt"):
        directory.commit({"weights": torch.zeros(100_000)}, None, steps=2, finished=False)
    saved = directory.load()
    assert (saved["steps"], saved["weights"].tolist()) == (1, [1, 1, 1])
    assert {path.name for path in tmp_path.iterdir()} == {"learner-1.pt", "run.json", "run.lock"}


FURTHER = ("learner", "eval_splits")
"""Fields that hold metrics by the names of a learner, or of splits."""


def test_every_metric_is_documented() -> None:
    documented = re.findall(r"^\| `(\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    of_all = [field.name for field in dataclasses.fields(Metrics) if field.name not in FURTHER]
    assert documented[: len(of_all)] == of_all


def test_every_metric_is_in_the_group_that_the_page_names() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", page, re.M))
    of_all = [field.name for field in dataclasses.fields(Metrics) if field.name not in FURTHER]
    assert {name: documented.get(name) for name in of_all if name != "steps"} == {
        name: group for group, names in GROUPS.items() for name in names
    }


def test_tensorboard_has_the_hyperparameters(tmp_path: Path) -> None:
    options = {"learner": "ppo", "lr": 1e-3, "anneal": True, "hidden": (64, 64), "stop_at": None}
    for upto in (None, 8):  # a run in two sessions
        log = RunLog(tmp_path)
        log.open(upto, hyperparameters={**options, "clip": math.inf})
        log.write(at(8 if upto is None else 16))
        log.close()
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]  # one run, not one below
    events = EventAccumulator(str(tmp_path)).Reload()
    found = events.summary_metadata
    content = found["_hparams_/session_start_info"].plugin_data.content
    shown = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert shown["learner"].string_value == "ppo"
    assert shown["lr"].number_value == 1e-3
    assert shown["anneal"].string_value == "on"
    assert shown["hidden"].string_value == "64 64"
    assert (shown["stop_at"].string_value, shown["clip"].string_value) == ("None", "inf")
    content = found["_hparams_/experiment"].plugin_data.content
    experiment = plugin_data_pb2.HParamsPluginData.FromString(content).experiment
    judged = {info.name.tag for info in experiment.metric_infos}
    assert judged == {"rollout/mean_return", "eval/eval_return"}


def test_weights_and_biases_gets_them_offline(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from pipelines.experiment.run_log import RunLog; "
        "from pipelines.experiment.metrics import Metrics; "
        f"log = RunLog(Path({str(tmp_path / 'mine')!r})); log.open(None, wandb=True); "
        "log.write(Metrics(steps=8, learner={'kl': 0.5})); log.close()"
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
