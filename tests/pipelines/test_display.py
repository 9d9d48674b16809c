"""A panel in a terminal, lines in a file, one line in a notebook; and what they say."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from rich.console import Console

from pipelines.experiment import display
from pipelines.experiment.display import Display, facts, line, sparkline, summary
from pipelines.experiment.metrics import Metrics

ROOT = Path(__file__).parents[2]
HALF = Metrics(
    steps=500,
    seconds=5,
    steps_per_second=100,
    episodes=12,
    mean_return=20.5,
    version=4,
    pulls=2,
    pulls_saved=6,
    lag_mean=1.5,
)


def test_a_panel_shows_all_that_a_line_does_and_more() -> None:
    shown = dict(facts(HALF, 1_000))
    assert shown == {
        "steps": "500 of 1,000, 5 s left",
        "steps/s": "100 on average",
        "return": "20.5, 12 episodes",
        "policy": "version 4, shards 1.50 behind on average, 2 pulls, 75% saved",
        "trouble": "none",
    }


def test_one_of_a_thing_is_in_the_singular() -> None:
    one = Metrics(
        steps=2, episodes=1, version=1, pulls=1, restarts=1, lost_rows=1, rebuilt=1, store_rows=1
    )
    said = " ".join(text for _, text in (*facts(one, 10), *summary(one, 1.0, [], "")))
    for noun in ("episode", "version", "pull", "restart", "row", "environment"):
        assert not re.search(rf"\b1 {noun}s", said), said
    assert "1 pull," in said
    assert "1 environment rebuilt" in said


def test_progress_never_shows_100_percent_before_the_end_and_no_more_after_it() -> None:
    assert "  99%" in line(Metrics(steps=998), 1_000)
    assert " 100%" in line(Metrics(steps=1_024), 1_000)
    assert dict(facts(Metrics(steps=1_024, steps_per_second=9), 1_000))["steps"].endswith(", done")
    reached = line(Metrics(steps=400, steps_per_second=9), 1_000, "goal reached")
    assert " 100%" in reached
    assert reached.endswith("goal reached")


def test_the_summary_has_one_clock() -> None:
    """Of a run in two sessions, the rate is that of all steps in all of the time."""
    resumed = Metrics(steps=1_000, seconds=10, steps_per_second=777)
    assert ("steps", "1,000 in 10 s, 100/s") in summary(resumed, 1.0, [], "")


def test_a_flat_curve_is_drawn_flat() -> None:
    heights = [display.BARS.index(bar) for bar in sparkline([500, 499, 500, 498, 500])]
    assert max(heights) - min(heights) <= 1
    assert min(heights) >= 2  # and not on the ground
    assert sparkline([0, 0]) == sparkline([7, 7])
    assert sparkline([-10, 500])[0] == "▁"


def test_the_store_and_troubles_are_shown_where_there_are_some() -> None:
    metrics = Metrics(
        steps=1,
        restarts=2,
        lost_rows=1_000,
        store_rows=50,
        store_capacity=200,
        store_bytes=10_000,
        store_age=7,
    )
    shown = dict(facts(metrics, 10))
    assert shown["store"] == "50 rows, 25% full, 10.0 kB, over 7 versions"
    assert shown["trouble"] == "2 restarts, 1,000 rows lost"
    assert "2 restarts, 1,000 rows lost" in line(metrics, 10)
    assert shown["steps"] == "1 of 10, beginning"


def test_returns_that_decide_on_the_goal_are_shown_if_others() -> None:
    assert "(judged 7.0)" in line(Metrics(mean_return=3.0, judged_return=7.0), 10)
    assert "judged" not in line(Metrics(mean_return=3.0, judged_return=3.0), 10)
    assert "judged" not in line(Metrics(mean_return=3.0, judged_return=math.nan), 10)


def test_the_summary_ends_with_the_command_that_goes_on() -> None:
    said = summary(HALF, 30.0, ["runs/a: files", "runs/a/curve.png"], "clusterenv train ppo")
    assert ("return", "20.5, best 30.0") in said
    assert said[-3:] == [
        ("wrote", "runs/a: files"),
        ("", "runs/a/curve.png"),
        ("go on", "clusterenv train ppo"),
    ]


def test_the_summary_tells_what_was_saved_in_pulls_and_in_bytes() -> None:
    def policy(**sent: int) -> str:
        return dict(summary(dataclasses.replace(HALF, **sent), 30.0, [], "…"))["policy"]

    saved = "4 versions, 2 pulls, 75% saved; 8.0 kB of weights sent, 24.0 kB saved"
    assert policy(weight_bytes=8_000) == saved
    assert policy(weight_bytes=8_000, pulls_saved=0).endswith("0% saved; 8.0 kB of weights sent")
    assert policy(pulls=0).endswith("0 pulls, 100% saved; 0 B of weights sent")


def test_the_end_of_a_run_is_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("PPO", 1_000) as shown:
        shown.show(HALF)
        shown.finish(HALF, "goal reached")
    last = capsys.readouterr().out.splitlines()[-1]
    assert " 100%" in last
    assert last.endswith("goal reached")


def test_a_running_cluster_is_named_before_it_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("PPO", 1_000, cluster="tcp://10.0.0.1:8786"):
        pass
    with Display("PPO", 1_000, cluster="slurm"):
        pass
    first, second = capsys.readouterr().out.splitlines()
    assert first == "PPO: connecting to tcp://10.0.0.1:8786"
    assert second == "PPO: starting the workers"


def test_files_get_a_line_now_and_then_and_the_last_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Display("PPO", 1_000) as shown:
        for steps in range(100, 1_001, 100):
            shown.show(Metrics(steps=steps, steps_per_second=100))
    before, first, last = capsys.readouterr().out.splitlines()
    assert before == "PPO: starting the workers"
    assert "100 steps  10%" in first
    assert "1,000 steps 100%" in last


def test_before_the_first_episode_ends_there_is_no_return() -> None:
    assert "return        –" in line(Metrics(steps=5, mean_return=math.nan), 10)
    assert ("return", "–, best –") in summary(Metrics(mean_return=math.nan), math.nan, [], "")


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with Display("PPO", 1_000, quiet=True) as shown:
        shown.show(HALF)
        shown.say("hello")
    shown.sum_up([("steps", "500")])
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_panel_with_histories() -> None:
    out = io.StringIO()
    panel = display._Panel("PPO on CartPole-v1", 1_000, Console(file=out, force_terminal=True))
    for second, steps in enumerate((100, 200, 400), 1):
        panel.show(Metrics(steps=steps, seconds=second, mean_return=steps, steps_per_second=130))
    panel.say("a warning")
    panel.close()
    last = out.getvalue().split("a warning")[-1]
    assert "PPO on CartPole-v1" in last
    assert "▁█" in last  # 100 and 200 steps in a second
    assert "▁▃█" in last  # the returns
    assert "━" in last


SCRIPT = """
from pipelines.experiment.display import Display
from pipelines.experiment.metrics import Metrics
with Display("PPO on CartPole-v1", 1000) as shown:
    shown.show(Metrics(steps=500, steps_per_second=100, mean_return=20.5))
    print("from elsewhere")
shown.sum_up([("go on", "clusterenv train ppo " + 30 * "--long ")])
"""


def test_in_a_real_terminal_other_lines_stay_above_it() -> None:
    head, tail = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, stdout=tail) as child:
        os.close(tail)
        seen = b""
        while True:
            try:
                chunk = os.read(head, 65_536)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            seen += chunk
        os.close(head)
    text = seen.decode()
    assert child.returncode == 0
    assert text.index("from elsewhere") < text.rindex("PPO on CartPole-v1")
    assert "500 of 1,000, 5 s left" in text
    assert 30 * "--long " in text  # a command to copy is not wrapped


PAST_THE_PANEL = """
import logging, subprocess, sys
import distributed  # whose handlers keep the standard error that they find
from pipelines.experiment.display import Display
from pipelines.experiment.metrics import Metrics
with Display("PPO on CartPole-v1", 1000) as shown:
    for step in range(1, 5):
        shown._shown = 0  # now
        shown.show(Metrics(steps=100 * step, seconds=step, steps_per_second=100, mean_return=20.5))
        subprocess.run(["sh", "-c", f"echo worker {step} >&2; echo printed {step}"])
        logging.getLogger("distributed.nanny").warning("warned %d", step)
    late = subprocess.Popen(["sh", "-c", "read line; echo a worker of the fork server"],
        stdin=subprocess.PIPE, text=True)
    shown.finish(Metrics(steps=400, seconds=5, steps_per_second=100), "goal reached")
shown.sum_up([("steps", "400")])
late.communicate("go")
assert late.returncode == 0  # what outlives the panel can still print
with Display("PPO again", 1000) as shown:
    shown.show(Metrics(steps=1000, seconds=1, steps_per_second=100))
    subprocess.run(["sh", "-c", "echo printed again"], check=True)
shown.sum_up([("steps", "1,000")])
"""


def test_no_half_of_the_panel_is_left_whatever_else_prints(tmp_path: Path) -> None:
    if shutil.which("tmux") is None:
        pytest.skip("tmux, which draws the terminal, is not installed")
    script = tmp_path / "script.py"
    script.write_text(PAST_THE_PANEL)
    tmux = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null"]
    run = shlex.join(["env", f"PYTHONPATH={ROOT}", sys.executable, str(script)])
    command = f"cd {shlex.quote(str(ROOT))} && {run}; sleep 1000"
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "40", command], check=True)

    def screen() -> str:
        shown = [*tmux, "capture-pane", "-p"]
        return subprocess.run(shown, capture_output=True, text=True).stdout

    try:
        assert wait_until(lambda: "    steps  1,000\n" in screen(), 100), screen()
    finally:
        last = screen()
        subprocess.run([*tmux, "kill-server"], check=False)
    assert last.count("PPO on CartPole-v1\n") == 1, last  # the panel, once
    assert last.count("trouble") == 2, last  # and that of the second run
    assert "a worker of the fork server" in last
    assert last.index("printed again") < last.rindex("PPO again")
    lines = last.splitlines()
    panel = next(i for i, text in enumerate(lines) if text.strip() == "PPO on CartPole-v1")
    above = "\n".join(lines[:panel])
    for step in range(1, 5):
        for text in (f"worker {step}", f"printed {step}", f"warned {step}"):
            assert text in above, last
    assert "400 of 1,000, goal reached" in last


def test_a_notebook_has_one_line_that_changes(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    jupyter_client = pytest.importorskip("jupyter_client")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SCRIPT)])
    # Sockets in files: a free port that Jupyter finds may be taken when the kernel binds it.
    manager = jupyter_client.AsyncKernelManager(transport="ipc", ip=str(tmp_path / "kernel"))
    options = {"timeout": 60, "resources": {"metadata": {"path": ROOT}}}
    client = nbclient.NotebookClient(notebook, km=manager, **options)
    client.owns_km = True  # so that it closes the sockets
    client.execute()
    outputs = notebook.cells[0].outputs
    (shown,) = [output for output in outputs if output.output_type == "display_data"]
    assert shown.data["text/plain"].startswith("PPO on CartPole-v1: 500 steps  50%")
