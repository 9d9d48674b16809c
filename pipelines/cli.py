"""The command ``clusterenv``: train, evaluate, export, collect, inspect, plot, watch and others.

Each command imports what it needs when it runs, so that ``--help`` and usage errors are fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["COMMANDS", "main", "run_module"]

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TRAINING = ("bokeh", "matplotlib", "rich", "tensorboard", "tyro")  # packages of the extra train
DOCTORS = ("--cluster", "--env", "--workers", "--timeout")


class Command(NamedTuple):
    """A subcommand."""

    about: str
    run: Callable[[Sequence[str]], int | None]
    options: str = ""
    """Module whose ``Args`` has the options."""


def _pipeline(name: str) -> Callable[[Sequence[str]], None]:
    def run(words: Sequence[str]) -> None:
        importlib.import_module(f"pipelines.{name}").main(words)

    return run


def _doctor(words: Sequence[str]) -> int:
    from clusterenv import doctor

    return doctor.main(words)


def _inspect(words: Sequence[str]) -> None:
    from pipelines import inspection, options

    words = ["--run", *words] if words and not words[0].startswith("-") else words
    args = options.read(
        inspection.Args, words, description=inspection.__doc__, prog="clusterenv inspect"
    )
    for name, value in inspection.describe(args.run):
        print(f"{name:>13}  {value}")


def _plot(words: Sequence[str]) -> None:
    from pipelines import options, plot

    args = options.read(plot.Args, words, description=plot.__doc__, prog="clusterenv plot")
    print(plot.draw(args.runs, args.out))


def _watch(words: Sequence[str]) -> None:
    from pipelines import options, watch

    watch.watch(options.read(watch.Args, words, description=watch.__doc__, prog="clusterenv watch"))


def _bench(words: Sequence[str]) -> int:
    known = ("step", "collect", "replay")
    if words and words[0] in ("-h", "--help"):
        print(f"usage: clusterenv bench {{{','.join(known)}}} [OPTIONS]; each has its own --help")
        return DONE
    from clusterenv.errors import ConfigError

    if not words or words[0] not in known:
        said = f"{words[0]!r} is unknown" if words else "nothing is named"
        raise ConfigError(f"{said}; one of {', '.join(known)}: clusterenv bench collect")
    script = Path("benchmarks") / f"{words[0]}.py"
    if not script.is_file():
        raise ConfigError(f"{script} is not here: benchmarks run in a clone of the repository")
    return subprocess.run([sys.executable, str(script), *words[1:]]).returncode


COMMANDS = {
    "train ppo": Command("train by PPO, the policy on the workers", _pipeline("ppo"), "ppo"),
    "train dqn": Command("train by double DQN from a replay store", _pipeline("dqn"), "dqn"),
    "train apex": Command("train by Ape-X, an epsilon per environment", _pipeline("apex"), "apex"),
    "evaluate": Command("evaluate the policy of a run", _pipeline("evaluate"), "evaluate"),
    "export": Command("write the policy of a run as .pt2 or .onnx", _pipeline("export"), "export"),
    "collect": Command("collect a dataset without a learner", _pipeline("collect"), "collect"),
    "doctor": Command("check a cluster, and say what to change", _doctor),
    "inspect": Command("summarise a run or a store", _inspect, "inspection"),
    "plot": Command("plot several runs in one figure", _plot, "plot"),
    "watch": Command("follow the versions of a run from anywhere", _watch, "watch"),
    "bench": Command("run a benchmark: step, collect or replay", _bench),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return DONE if words else USAGE
    if words[0] == "train" and words[1:] in ([], ["-h"], ["--help"]):
        print(_help())
        return DONE if words[1:] else USAGE
    if words[0] in ("-V", "--version"):
        from clusterenv import __version__

        print(__version__)
        return DONE
    if words[0] == "completion":
        print(completion())
        return DONE
    name = next((name for name in COMMANDS if name.split() == words[: len(name.split())]), None)
    if name is None:
        print(f"clusterenv: {_unknown(words)}", file=sys.stderr)
        return USAGE
    try:
        return COMMANDS[name].run(words[len(name.split()) :]) or DONE
    except Exception as error:
        said, code = _told(error)
        if not said:
            raise
        print(f"clusterenv {name}: {said}", file=sys.stderr)
        return code
    except SystemExit as end:  # how tyro and argparse end: after --help, or with a complaint
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt as error:
        print(f"clusterenv {name}: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


def run_module(name: str, run: Callable[[], None]) -> None:
    """Run ``python -m pipelines.…``; print errors and interruptions as one line."""
    from clusterenv.errors import ClusterEnvError

    try:
        run()
    except ClusterEnvError as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt as error:
        print(f"{name}: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _told(error: Exception) -> tuple[str, int]:
    """Return the message for an error, and the exit code; no message if it is unexpected."""
    from clusterenv.errors import ClusterEnvError, ConfigError, UnknownEnv

    if isinstance(error, ClusterEnvError):
        return str(error), USAGE if isinstance(error, (ConfigError, UnknownEnv)) else FAILED
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
        return f"{error.name} is not installed: pip install 'clusterenv[train]'", FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"no room left on the disk{where}. Make room and go on; what a run saved last is "
            "whole: clusterenv inspect tells what that is"
        ), FAILED
    return "", FAILED


def completion() -> str:
    """Return a script that completes commands and options in bash: ``source`` it."""
    firsts = sorted({name.split()[0] for name in COMMANDS})
    cases = [f'    train) words="{" ".join(n.split()[1] for n in COMMANDS if " " in n)}" ;;']
    for name, command in COMMANDS.items():
        if command.options:
            fields = dataclasses.fields(
                importlib.import_module(f"pipelines.{command.options}").Args
            )
            named = [field for field in fields if "Positional" not in str(field.type)]
            names = [field.name.replace("_", "-") for field in named]
            flags = " ".join(f"--{name}" for name in (*names, "options"))
            cases.append(f'    "{name}"*) words="{flags}" ;;')
    cases.append(f'    doctor*) words="{" ".join(DOCTORS)}" ;;')
    return "\n".join(
        [
            "_clusterenv() {",
            '  local before="${COMP_WORDS[*]:1:COMP_CWORD-1}" words',
            '  case "$before" in',
            f'    "") words="{" ".join(firsts)}" ;;',
            *cases,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))',
            "}",
            "complete -o default -F _clusterenv clusterenv",
        ]
    )


def _help() -> str:
    lines = ["usage: clusterenv COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<12} {command.about}" for name, command in COMMANDS.items()]
    lines += [
        f"  {'completion':<12} print a script that completes commands in bash",
        "",
        "clusterenv --version tells the version,",
        "clusterenv COMMAND --help tells a command's options;",
        "source <(clusterenv completion) completes them in bash.",
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
    ]
    return "\n".join(lines)


def _unknown(words: Sequence[str]) -> str:
    said = words[0] if words[0] in COMMANDS else " ".join(words[:2])
    close = difflib.get_close_matches(said, COMMANDS, n=1)
    close = close or difflib.get_close_matches(words[0], COMMANDS, n=1)
    hint = f"did you mean 'clusterenv {close[0]}'?" if close else "clusterenv --help lists them"
    return f"{said!r} is no command; {hint}"


if __name__ == "__main__":
    sys.exit(main())
