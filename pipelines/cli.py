"""The command ``clusterenv``: train, evaluate, export, collect, inspect, plot, watch and others.

Each command imports what it needs when it runs, so that ``--help`` and usage errors are fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import learners
from pipelines.messages import TRACEBACK, Wording, without_traceback

__all__ = ["commands", "main"]

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
TRAINING = (
    "bokeh",
    "matplotlib",
    "pydantic",
    "rich",
    "tensorboard",
    "tyro",
)  # packages of the extra train
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
DOCTORS = ("--cluster", "--env", "--workers", "--timeout")


class Command(NamedTuple):
    """A subcommand."""

    about: str
    run: Callable[[Sequence[str]], int | None]
    options: Callable[[], type[Any]] | None = None
    """Returns the dataclass of its options."""


def _tool(about: str, name: str) -> Command:
    def module() -> Any:
        return importlib.import_module(f"pipelines.tools.{name}")

    return Command(about, lambda words: module().main(words), lambda: module().Args)


def _learner(name: str, entry: EntryPoint) -> Command:
    def train(words: Sequence[str]) -> None:
        from pipelines import experiment

        experiment.train(learners.load(name), words)

    about = learners.ABOUT.get(name, f"train by {entry.value}")
    return Command(about, train, lambda: learners.load(name).args_type)


def _doctor(words: Sequence[str]) -> int:
    from clusterenv import doctor

    wording = Wording([option[2:] for option in DOCTORS])
    return doctor.main(words, wording=lambda text: wording.of(without_traceback(text)))


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


TOOLS = {
    "evaluate": _tool("evaluate the policy of a run", "evaluate"),
    "export": _tool("write the policy of a run as .pt2 or .onnx", "export"),
    "collect": _tool("collect a dataset without a learner", "collect"),
    "doctor": Command("check a cluster, and say what to change", _doctor),
    "inspect": _tool("summarise a run or a store", "inspection"),
    "plot": _tool("plot several runs in one figure", "plot"),
    "watch": _tool("follow the versions of a run from anywhere", "watch"),
    "bench": Command("run a benchmark: step, collect or replay", _bench),
}


def commands() -> dict[str, Command]:
    """Return all commands: a ``train`` for each learner, also those of other packages."""
    found = learners.learners().items()
    return {f"train {name}": _learner(name, entry) for name, entry in found} | TOOLS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return DONE if words else USAGE
    if words[0] == "train" and words[1:] in ([], ["-h"], ["--help"]):
        print(_train_help())
        return DONE if words[1:] else USAGE
    if words[0] in ("-V", "--version"):
        from clusterenv import __version__

        print(__version__)
        return DONE
    if words[0] == "completion":
        print(completion())
        return DONE
    known = commands()
    name = next((name for name in known if name.split() == words[: len(name.split())]), None)
    if name is None:
        print(f"clusterenv: {_unknown(words)}", file=sys.stderr)
        return USAGE
    whole = TRACEBACK in words
    words = [word for word in words if word != TRACEBACK]
    speech = _Speech(known[name], whole)
    try:
        with speech.of_log():
            return known[name].run(words[len(name.split()) :]) or DONE
    except Exception as error:
        said, code = _told(error, speech)
        if not said:
            raise
        print(f"clusterenv {name}: {said}", file=sys.stderr)
        return code
    except SystemExit as end:  # how tyro and argparse end: after --help, or with a complaint
        return end.code if isinstance(end.code, int) else FAILED
    except KeyboardInterrupt as error:
        print(f"clusterenv {name}: {str(error) or 'interrupted'}", file=sys.stderr)
        return INTERRUPTED


class _Speech:
    """How a command says what the library does: in its own options, without tracebacks."""

    def __init__(self, command: Command, whole: bool) -> None:
        self._command, self._whole = command, whole

    def __call__(self, text: str, *, translated: bool = True) -> str:
        if self._whole:
            return text
        brief = without_traceback(text)
        if translated:
            brief = Wording(self._options()).of(brief)
        return brief if "On the worker:" not in text else f"{brief}\n{TRACEBACK} shows where"

    def _options(self) -> list[str]:
        if self._command.options is None:
            return []
        try:
            return [field.name for field in dataclasses.fields(self._command.options())]
        except Exception:  # a learner of another package that cannot be imported
            return []

    @contextmanager
    def of_log(self) -> Iterator[None]:
        """Print the library's warnings in the same way."""
        handler = _Stderr(self)
        logger = logging.getLogger("clusterenv")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _Stderr(logging.Handler):
    """Prints warnings to the standard error of the moment, which a panel may have redirected."""

    def __init__(self, speech: _Speech) -> None:
        super().__init__(logging.WARNING)
        self._speech = speech

    def emit(self, record: logging.LogRecord) -> None:
        print(self._speech(record.getMessage(), translated=False), file=sys.stderr)


def _told(error: Exception, speech: _Speech) -> tuple[str, int]:
    """Return the message for an error, and the exit code; no message if it is unexpected."""
    from clusterenv.errors import ClusterEnvError, ConfigError, UnknownEnv

    if isinstance(error, ClusterEnvError):
        return speech(str(error)), USAGE if isinstance(error, (ConfigError, UnknownEnv)) else FAILED
    if isinstance(error, ModuleNotFoundError) and error.name in TRAINING:
        return f"{error.name} is not installed: pip install 'clusterenv[train]'", FAILED
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" for {error.filename}" if error.filename else ""
        return (
            f"no room left on the disk{where}. Make room and go on; what a run saved last is "
            "whole: clusterenv inspect tells what that is"
        ), FAILED
    if isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename:
        return f"{error.filename} cannot be written: {error.strerror}", USAGE
    return "", FAILED


def completion() -> str:
    """Return a script that completes commands and options in bash: ``source`` it."""
    known = commands()
    firsts = sorted({name.split()[0] for name in known})
    cases = [f'    train) words="{" ".join(n.split()[1] for n in known if " " in n)}" ;;']
    for name, command in known.items():
        if command.options is not None:
            fields = dataclasses.fields(command.options())
            named = [field for field in fields if "Positional" not in str(field.type)]
            names = [field.name.replace("_", "-") for field in named]
            flags = " ".join(f"--{name}" for name in (*names, "options", "traceback"))
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
    lines += [f"  {name:<12} {command.about}" for name, command in commands().items()]
    lines += [
        f"  {'completion':<12} print a script that completes commands in bash",
        "",
        "clusterenv --version tells the version,",
        "clusterenv COMMAND --help tells a command's options;",
        f"clusterenv COMMAND {TRACEBACK} shows the traceback of an error on a worker;",
        "source <(clusterenv completion) completes them in bash.",
        "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
    ]
    return "\n".join(lines)


def _train_help() -> str:
    lines = ["usage: clusterenv train LEARNER [OPTIONS]", "", "The learners:", ""]
    for name, command in commands().items():
        if name.startswith("train "):
            lines.append(f"  {name.removeprefix('train '):<12} {command.about}")
    lines += [
        "",
        "clusterenv train LEARNER --help tells a learner's options and its presets:",
        "clusterenv train ppo --env CartPole-v1 --help",
    ]
    return "\n".join(lines)


def _unknown(words: Sequence[str]) -> str:
    known = commands()
    said = words[0] if words[0] in known else " ".join(words[:2])
    close = difflib.get_close_matches(said, known, n=1)
    close = close or difflib.get_close_matches(words[0], known, n=1)
    hint = f"did you mean 'clusterenv {close[0]}'?" if close else "clusterenv --help lists them"
    return f"{said!r} is no command; {hint}"


if __name__ == "__main__":
    sys.exit(main())
