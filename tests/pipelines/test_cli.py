from __future__ import annotations

import dataclasses
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from distributed import Client

from clusterenv.errors import ConfigError
from clusterenv.store import Journal
from pipelines import cli, learners
from pipelines.dqn import DQN, PRESETS, Args
from pipelines.experiment import options
from pipelines.tools.collect import Args as CollectArgs
from pipelines.tools.curves import short_names


def test_help_lists_every_command_and_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.commands())
    assert cli.main([]) == 2


SLOW = ("torch", "pyarrow", "pandas", "distributed", "matplotlib", "gymnasium")


@pytest.mark.parametrize(
    ("words", "absent"),
    [
        (["--help"], SLOW),
        (["train", "--help"], SLOW),
        (["bench", "--help"], SLOW),
        (["tran", "dqn"], SLOW),
        (["--version"], ("torch", "pyarrow", "distributed")),
        (["doctor", "--help"], ("torch", "pyarrow", "distributed")),
        (["inspect", "--help"], ("matplotlib", "tensorboard")),
        (["plot", "--help"], ("matplotlib", "tensorboard")),
        (["train", "ppo", "--help"], ("matplotlib", "tensorboard")),
        (["collect", "--help"], ("matplotlib", "tensorboard")),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_help_does_not_wait_for_packages_that_it_does_not_need(
    words: list[str], absent: tuple[str, ...]
) -> None:
    script = (
        "import sys; from pipelines import cli; code = cli.main(sys.argv[1:]);"
        "print('imported', *sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True)
    assert done.returncode == (2 if words[0] == "tran" else 0), done.stderr
    assert not set(absent) & set(done.stdout.splitlines()[-1].split())


def test_the_help_of_a_command_tells_what_each_option_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["train", "ppo", "--env", "CartPole-v1", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "id of a Gymnasium environment" in shown
    assert "discount per step" in shown
    assert "(preset of CartPole-v1: 0.98)" in shown
    assert "(default: 5)" in shown  # no preset's
    assert "These environments have presets: CartPole-v1, LunarLander-v3, Pendulum-v1" in shown
    assert "None" not in shown.replace("{None}", "").replace("{None,", "")
    assert "`" not in shown
    assert "python -m" not in shown


def test_the_help_without_a_preset_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "dqn", "--env", "Acrobot-v1", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Acrobot-v1 has none." in shown
    assert "(preset of" not in shown


@pytest.mark.parametrize("name", [name for name in cli.commands() if name != "bench"])
def test_no_help_shows_markup(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "`" not in shown
    assert not re.search(r":\w+:`", shown)


def test_the_help_of_train_lists_the_learners(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in learners.learners())
    assert "evaluate the policy" not in shown


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "ppo", "--learning-rate", "1"],
            "--learning-rate is no option; did you mean --lr?",
        ),
        (["train", "ppo", "--learning_rate=1"], "did you mean --lr?"),
        (["train", "ppo", "--total-timesteps", "9"], "did you mean --total-steps?"),
        (["train", "ppo", "--n-envs", "9"], "did you mean --num-envs?"),
        (["train", "ppo", "--workers", "9"], "did you mean --shards?"),
        (["train", "ppo", "--gae-lambda", "1"], "did you mean --lam?"),
        (["train", "ppo", "--num-env", "9"], "did you mean --num-envs?"),
        (["train", "dqn", "--buffer-size", "9"], "did you mean --capacity?"),
        (["train", "ppo", "--n-steps", "9"], "did you mean --horizon?"),
        (["train", "dqn", "--n-steps", "9"], "did you mean --n-step?"),
        (["train", "dqn", "--zzz"], "clusterenv train dqn --help lists them"),
        (["collect", "--environment", "x"], "did you mean --env?"),
        (["plot", "runs/a", "--output", "x.png"], "did you mean --out?"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_option_that_is_none_gets_the_nearest_one(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "ppo", "--num-envs", "abc"], "--num-envs must be a whole number, got 'abc'"),
        (["train", "ppo", "--total-steps", "1.5"], "--total-steps must be a whole number, got"),
        (["train", "ppo", "--lr", "fast"], "--lr must be a number, got 'fast'"),
        (["train", "ppo", "--lr"], "--lr needs a value"),
        (["train", "ppo", "--hidden", "a", "b"], "--hidden takes other values, got 'a', 'b'"),
        (["train", "ppo", "--sync", "no"], "--sync must be one of 'every-version', 'every', "),
        (["train", "ppo", "-q"], "-q: no such option"),
        (["train", "ppo", "--gamma", "0.9", "0.8"], "0.8 follows no option"),
        (["train", "ppo", "CartPole-v1"], "'CartPole-v1' follows no option; did you mean --env"),
        (["collect"], "--env STR and --out PATH missing"),
        (["inspect"], "PATH missing"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
@pytest.mark.parametrize("colours", [False, True])
def test_a_slip_on_the_command_line_is_one_line_without_a_frame(
    words: list[str],
    said: str,
    colours: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: colours)
    monkeypatch.setenv("COLUMNS", "60" if colours else "100")
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"clusterenv {' '.join(words[: 1 + (words[0] == 'train')])}: {said}")
    assert not set(line) & set("│─╭╰\x1b")


def test_whole_numbers_may_be_written_as_powers_of_ten() -> None:
    args = options.read(Args, ["--total-steps", "2e6", "--capacity=1E5", "--lr", "1e-3"])
    assert (args.total_steps, args.capacity, args.lr) == (2_000_000, 100_000, 0.001)
    assert options.read(Args, ["--hidden", "1e2", "64"]).hidden == (100, 64)
    assert options.read(Args, ["--out", "1e2"]).out == Path("1e2")
    with pytest.raises(ConfigError, match="--total-steps must be a whole number, got '25e-1'"):
        options.read(Args, ["--total-steps", "25e-1"])


def test_a_scheduler_that_does_not_answer_is_named_while_it_is_tried(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # which accepts, and says nothing
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", "watch", "--cluster", address],
            cwd=Path(__file__).parents[2],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stderr is not None
            said = process.stderr.readline()  # while it waits
            assert process.poll() is None
            assert said == f"no answer yet from the scheduler at {address}; trying for 30 s\n"
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tran", "dqn"], "did you mean 'clusterenv train dqn'?"),
        (["train", "dqm"], "did you mean 'clusterenv train dqn'?"),
        (["inspct", "runs/x"], "did you mean 'clusterenv inspect'?"),
        (["zzz"], "clusterenv --help lists them"),
    ],
)
def test_a_typing_error_gets_the_nearest_name(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert hint in capsys.readouterr().err


def test_options_come_from_the_line_the_file_the_environment_and_the_dataclass(
    tmp_path: Path,
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("num-envs: 4\nlr: 1e-2\nhidden: [32]\nout: runs/x\n")
    words = ["--env", "LunarLander-v3", "--options", str(file), "--num-envs", "6"]
    args = options.read(Args, words, presets=PRESETS)
    assert args.num_envs == 6
    assert (args.lr, args.hidden, args.out) == (0.01, (32,), Path("runs/x"))
    assert args.capacity == PRESETS["LunarLander-v3"]["capacity"]
    assert args.gamma == Args().gamma
    file.write_text("env: LunarLander-v3\n")
    args = options.read(Args, ["--options", str(file)], presets=PRESETS)
    assert (args.env, args.total_steps) == ("LunarLander-v3", 1_000_000)
    collect = options.read(CollectArgs, ["--env", "CartPole-v1", "--out", "x"])
    assert (collect.env, collect.policy) == ("CartPole-v1", "random")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_env: 4", "'num_env' is no option; did you mean 'num_envs'?"),
        ("[1, 2]", "holds no names and values"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        options.read(Args, ["--options", str(file)], presets=PRESETS)
    with pytest.raises(ConfigError, match="cannot be read"):
        options.read(Args, ["--options", str(tmp_path / "none")], presets=PRESETS)


def test_a_run_is_inspected_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = ["--env", "CartPole-v1", "--total-steps", "1500", "--log-every", "500", "--shards", "1"]
    assert cli.main(["train", "dqn", *words, "--out", str(out), "--quiet"]) == 0
    assert cli.main(["inspect", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "every file is whole" in shown
    assert "CartPole-v1" in shown
    picture = tmp_path / "picture.svg"
    assert cli.main(["plot", str(out), str(out / "progress.csv"), "--out", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")
    (segment, *_) = (out / "replay").glob("*.arrow")
    segment.write_bytes(segment.read_bytes()[:-9])
    assert cli.main(["inspect", str(out)]) == 0
    assert f"damaged: {segment.name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "nowhere"],
        ["plot", "nowhere"],
        ["plot", "nowhere", "--out", "x.gif"],
        ["bench", "nothing"],
        ["train", "ppo", "--env", "CartPool-v1"],
        ["train", "dqn", "--batch", "0"],
    ],
)
def test_bad_words_are_refused_at_once(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) in (1, 2)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("runs", "names"),
    [
        (["runs/ppo", "runs/dqn/progress.csv"], ["ppo", "dqn"]),
        (["a/divergence-0.05-100", "a/divergence-0.01-100"], None),
        (["curves/CartPole-v1-1.csv", "curves/CartPole-v1-2.csv"], None),
        (["a/ppo", "b/ppo", "b/dqn"], ["a/ppo", "b/ppo", "b/dqn"]),
    ],
)
def test_every_run_of_a_plot_has_a_name_of_its_own(runs: list[str], names: list[str]) -> None:
    found = short_names([Path(run) for run in runs])
    assert found == (names or [Path(run).name.removesuffix(".csv") for run in runs])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr: fast", "--lr must be a number, got fast: --lr 0.001"),
        ("total_steps: 1.5", "--total-steps must be a whole number, got 1.5"),
        ("total_steps: many", "must be a whole number, got many"),
        ("duelling: 3", "must be true or false, got 3"),
        ("sync: sometimes", "must be 'every-version', .*got sometimes: --sync divergence"),
        ("hidden: [64, wide]", "must be a whole number, got 64 wide: --hidden 128 128"),
        ("out: 7", "must be a path, got 7"),
        ("env: 7", "must be text, got 7: --env CartPole-v1"),
    ],
)
def test_a_wrong_value_in_a_file_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(line)
    with pytest.raises(ConfigError, match=said):
        options.read(Args, ["--options", str(file)], presets=PRESETS)


def test_numbers_in_a_file_may_be_written_as_on_the_line(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("total_steps: 1e6\nlr: 1e-3\nshards: null\nhidden: [32, 32]\nstop_at: 475")
    args = options.read(Args, ["--options", str(file)], presets=PRESETS)
    assert (args.total_steps, args.lr, args.shards) == (1_000_000, 0.001, None)
    assert (args.hidden, args.stop_at) == ((32, 32), 475.0)


def test_bash_completes_commands_and_options() -> None:
    script = (
        cli.completion()
        + """
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _clusterenv; echo "${COMPREPLY[*]}"
}
complete_words clusterenv tr
complete_words clusterenv train a
complete_words clusterenv train dqn --env CartPole-v1 --rows-
"""
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["train", "apex", "--rows-per-update"], done.stderr


def test_the_command_that_goes_on_gives_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(beside))
    args = DQN.preset(
        "LunarLander-v3", seed=3, hidden=(32, 16), anneal=False, out=Path("runs/a b"), stop_at=200.0
    )
    said = options.command("clusterenv train dqn", args, PRESETS, total_steps=7)
    assert said == (
        "clusterenv train dqn --env LunarLander-v3 --total-steps 7 --seed 3 --no-anneal "
        "--hidden 32 16 --stop-at 200.0 --out 'runs/a b'"
    )
    words = shlex.split(said)[3:]
    again = options.read(Args, words, presets=PRESETS)
    assert again == dataclasses.replace(args, total_steps=7)
    monkeypatch.setenv("PATH", "")  # the environment is not activated
    monkeypatch.chdir(beside.parent)
    said = options.command("clusterenv train dqn", args, PRESETS)
    assert said.startswith(f"{beside.name}/clusterenv train dqn --env")


def test_a_full_disk_is_told_without_a_traceback(
    tmp_path: Path,
    client: Client,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(path: Path) -> BinaryIO:
        path.symlink_to("/dev/full")
        return path.open("wb")

    monkeypatch.setattr(
        "pipelines.experiment.sinks.create", create
    )  # where the logs of a run begin
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-steps", "512", "--out", str(tmp_path)]
    address = str(client.scheduler.address)
    assert cli.main([*words, "--shards", "1", "--num-envs", "4", "--cluster", address]) == 1
    said = capsys.readouterr().err
    assert "no room left on the disk" in said
    assert "Make room and go on" in said


def test_a_store_without_rows_is_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(tmp_path).close()
    assert cli.main(["inspect", str(tmp_path)]) == 0
    assert "nothing has been committed yet" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["train", "--help"], ["bench", "--help"]])
def test_half_a_command_has_help_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert "usage: clusterenv" in capsys.readouterr().out


def test_a_command_whose_packages_are_missing_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = [name for name in sys.modules if name.startswith("pipelines.")]
    for module in sorted(ours, reverse=True):  # what is in a package before the package
        package, _, name = module.rpartition(".")
        # Imported anew below, which also replaces the package's attribute: both are put back.
        monkeypatch.setattr(sys.modules[package], name, sys.modules[module])
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "tyro", None)  # as if it were not installed
    assert cli.main(["train", "ppo", "--help"]) == 1
    said = capsys.readouterr().err
    assert "tyro is not installed: pip install 'clusterenv[train]'" in said
    assert "Traceback" not in said
