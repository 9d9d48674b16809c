"""A panel in a terminal, lines in a file, one line in a notebook."""

from __future__ import annotations

import io
import os
import pty
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import wait_until
from rich.console import Console

from pipelines.experiment import display
from pipelines.experiment.display import Display
from pipelines.experiment.metrics import Metrics

ROOT = Path(__file__).parents[2]
HALF = Metrics(steps=500, seconds=5, steps_per_second=100, mean_return=20.5)


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
