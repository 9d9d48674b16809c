"""Options of a command, from its dataclass, a preset, a file and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
import shlex
import shutil
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import tyro
import yaml

from clusterenv.errors import ConfigError
from pipelines.experiment.checks import Options, convert, flag
from pipelines.experiment.usage import in_one_line, whole_numbers
from pipelines.experiment.wording import plain

__all__ = ["Origin", "command", "from_file", "options_to_name", "read", "words_of"]

Kind = TypeVar("Kind")
Presets = Mapping[str, Mapping[str, Any]]
"""What suits an environment, by its id."""

HINT = "Options can come from a file too: --options FILE, in YAML, as in 'num_envs: 32'."
ELSEWHERE = {  # names in other libraries
    **dict.fromkeys(("learning_rate", "adam_lr", "step_size"), "lr"),
    **dict.fromkeys(
        ("timesteps", "total_timesteps", "steps", "max_steps", "num_steps"), "total_steps"
    ),
    **dict.fromkeys(("n_envs", "envs", "num_environments", "environments"), "num_envs"),
    **dict.fromkeys(("workers", "num_workers", "n_workers", "num_shards", "actors"), "shards"),
    **dict.fromkeys(("n_steps", "rollout_length", "fragment_length", "unroll_length"), "horizon"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "batch"),
    **dict.fromkeys(("buffer_size", "replay_size", "replay_capacity"), "capacity"),
    **dict.fromkeys(("learning_starts", "warmup"), "min_rows"),
    **dict.fromkeys(("ent_coef", "entropy_coef", "entropy_coeff"), "entropy"),
    **dict.fromkeys(("vf_coef", "value_coeff"), "value_coef"),
    **dict.fromkeys(("gae_lambda", "lambda", "lambda_"), "lam"),
    **dict.fromkeys(("n_epochs", "update_epochs", "num_epochs"), "epochs"),
    **dict.fromkeys(("num_minibatches", "n_minibatches"), "minibatches"),
    **dict.fromkeys(("clip_range", "clip_coef", "clip_param"), "clip"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "grad_norm"),
    **dict.fromkeys(("discount", "discount_factor"), "gamma"),
    **dict.fromkeys(("env_id", "environment", "gym_id", "task"), "env"),
    **dict.fromkeys(("output", "dir", "log_dir", "logdir", "save_path", "run_dir"), "out"),
    **dict.fromkeys(("anneal_lr", "lr_schedule"), "anneal"),
    **dict.fromkeys(("net_arch", "hidden_sizes", "hidden_size", "layers"), "hidden"),
    **dict.fromkeys(("scheduler", "address", "scheduler_address"), "cluster"),
    **dict.fromkeys(("eval_freq", "eval_every", "evaluation_interval"), "evaluate_every"),
    **dict.fromkeys(("eval_episodes", "n_eval_episodes"), "evaluate_episodes"),
    **dict.fromkeys(("save_freq", "save_every", "checkpoint_freq"), "checkpoint_every"),
}


class Origin(NamedTuple):
    """Where the options of a command came from."""

    typed: frozenset[str]
    """Names on the command line, and in the file of ``--options``."""
    presets: Presets
    """What suits an environment, by its id."""


def read(
    kind: type[Kind],
    argv: Sequence[str] | None,
    *,
    presets: Presets | None = None,
    description: str | None = None,
    prog: str | None = None,
) -> Kind:
    """Return the options that a command line gives.

    Parameters
    ----------
    kind
        The dataclass that is the single source of the options.
    argv
        The words after the command; by default those of this process.
    presets
        What suits an environment, by its id.
    description, prog
        For ``--help``.

    Raises
    ------
    ConfigError
        If the options cannot work, or the file of ``--options`` names something else or cannot be
        read.
    """
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    peek.add_argument("--options", type=Path)
    known, words = peek.parse_known_args(argv)
    given = {} if known.options is None else from_file(kind, known.options)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {
        name: tyro.MISSING
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if presets is not None:
        peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        peek.add_argument("--env", default=given.get("env", fields["env"].default))
        env = peek.parse_known_args(words)[0].env
        values |= {**presets.get(env, {}), "env": env}
    _check_names(fields, words, prog)
    _check_order(kind, words)
    preset = {} if presets is None else dict(presets.get(values["env"], {}))
    hints = dict.fromkeys(preset, f"preset of {values.get('env')}")
    hints |= dict.fromkeys(given, str(known.options))

    # Checked when all is known, and not by tyro, which draws a frame through the message.
    class Unchecked(kind):  # type: ignore[valid-type, misc]
        def __post_init__(self) -> None:
            pass

    Unchecked.__annotations__ = _hinted(kind, {**values, **given}, hints)
    default = Unchecked(**{**values, **given})
    text = "\n\n".join([plain(description or "", prog), *_about(presets, values), HINT]).strip()
    words = whole_numbers(words, typing.get_type_hints(kind))
    read = in_one_line(
        lambda: tyro.cli(Unchecked, default=default, args=words, description=text, prog=prog), prog
    )
    found = kind(**{name: getattr(read, name) for name in fields})
    if isinstance(found, Options):
        origin = Origin(frozenset(_named(fields, words)) | given.keys(), presets or {})
        object.__setattr__(found, "origin", origin)
    return found


def _about(presets: Presets | None, values: Mapping[str, Any]) -> list[str]:
    """Return what ``--help`` says of presets."""
    if not presets:
        return []
    env, known = values["env"], ", ".join(presets)
    shown = f"The values of {env} are shown." if env in presets else f"{env} has none."
    return [f"These environments have presets: {known}. {shown}"]


def _hinted(kind: Any, values: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """Return annotations that say where a default is from, and nothing where it is ``None``."""

    def behaviour(name: str) -> Any:
        origin = origins.get(name, "default")
        return lambda shown: "" if shown.strip(" ()") in ("None", "") else f"({origin}: {shown})"

    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: Annotated[
            hints[field.name], tyro.conf.arg(help_behavior_hint=behaviour(field.name))
        ]
        for field in dataclasses.fields(kind)
        if values.get(field.name, field.default) is not tyro.MISSING
    }


def _named(fields: Mapping[str, Any], words: Iterable[str]) -> set[str]:
    """Return the options that a command line names, by the names of the dataclass's fields."""
    said = {word[2:].partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"}
    return {name for name in fields if name in said or f"no_{name}" in said}


def _check_names(fields: Mapping[str, Any], words: Iterable[str], prog: str | None) -> None:
    """Raise if a word is an option that the command does not have.

    Raises
    ------
    ConfigError
        With the nearest one.
    """
    known = {"help", *fields, *(f"no_{name}" for name in fields)}
    for word in words:
        name = word[2:].partition("=")[0].replace("-", "_")
        if word[:2] != "--" or not name or name in known:
            continue
        elsewhere = {each for each, ours in ELSEWHERE.items() if ours in fields}
        close = difflib.get_close_matches(name, fields, n=1, cutoff=0.9)  # a slip of the finger
        if not close and name in elsewhere:
            close = [name]
        close = close or difflib.get_close_matches(name, {*fields, *elsewhere}, n=2, cutoff=0.7)
        near = list(dict.fromkeys(ELSEWHERE[n] if n in elsewhere else n for n in close))
        options = " or ".join(f"--{close.replace('_', '-')}" for close in near)
        hint = f"did you mean {options}?" if near else f"{prog or 'the command'} --help lists them"
        raise ConfigError(f"{word.partition('=')[0]} is no option; {hint}")


def _check_order(kind: type[Any], words: Sequence[str]) -> None:
    """Raise if a command that takes options only begins with something else.

    Raises
    ------
    ConfigError
        With an option that it may be meant for.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    if words and not words[0].startswith("-") and not any(map(_is_positional, hints.values())):
        hint = f"did you mean --env {shlex.quote(words[0])}?" if "env" in hints else "leave it out"
        raise ConfigError(f"{words[0]!r} follows no option; {hint}")


def _is_positional(hint: Any) -> bool:
    return tyro.conf.Positional in getattr(hint, "__metadata__", ())


def options_to_name(begun: Mapping[str, Any], args: Any, differ: Iterable[str]) -> list[str]:
    """Return which of the options that differ a person has chosen, then or now.

    What differs only as the preset of another environment does is left out, unless nothing else
    differs.

    Parameters
    ----------
    begun
        Options of a run.
    args
        Those of this command.
    differ
        Names of options that differ.
    """
    differ = list(differ)
    origin: Origin | None = getattr(args, "origin", None)
    if origin is None:
        return differ
    typed, presets = origin
    before = presets.get(str(begun.get("env")), {})
    tacit = {field.name: field.default for field in dataclasses.fields(args)} | dict(before)

    def chosen(name: str) -> bool:
        return name in ("env", *typed) or _plain(begun.get(name)) != _plain(tacit.get(name))

    return [name for name in differ if chosen(name)] or differ


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def command(prog: str, args: Any, presets: Presets, **changes: Any) -> str:
    """Return the command that gives these options, with ``changes``.

    Parameters
    ----------
    prog
        The command without options.
    args
        A dataclass that :func:`read` has returned; it has ``env``.
    presets
        What suits an environment: it need not be said.
    **changes
        Options that shall be others.
    """
    args = dataclasses.replace(args, **changes)
    program, *rest = prog.split()
    if shutil.which(program) is None:  # in an environment that is not activated
        beside = Path(sys.executable).with_name(program)
        program = os.path.relpath(beside) if beside.exists() else program
    return shlex.join([program, *rest, *words_of(args, presets)])


def words_of(args: Any, presets: Presets) -> list[str]:
    """Return the words that give these options, apart from those that need not be said."""
    fields = dataclasses.fields(args)
    tacit = {field.name: field.default for field in fields}
    tacit |= {**presets.get(args.env, {}), "env": args.env}
    words = ["--env", args.env]
    for field in fields:
        value = getattr(args, field.name)
        if value != tacit[field.name]:
            optional = typing.get_type_hints(type(args))[field.name] == bool | None
            words += _words(field.name, str(value) if optional else value)
    return words


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name, value)]
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [f"--{name.replace('_', '-')}", *map(str, several)]


def from_file(kind: type[Any], path: Path) -> dict[str, Any]:
    """Return the options in a YAML file, by the names of the dataclass's fields.

    Raises
    ------
    ConfigError
        If it cannot be read, or names no option.
    """
    try:
        found = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"--options {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--options {path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--options {path} holds no names and values, such as 'num_envs: 32'")
    names = [field.name for field in dataclasses.fields(kind)]
    options: dict[str, Any] = {}
    for name, value in found.items():
        field = str(name).replace("-", "_")
        if field not in names:
            close = difflib.get_close_matches(field, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(names)}"
            raise ConfigError(f"--options {path}: {name!r} is no option; {hint}")
        options[field] = convert(kind, field, value, f"--options {path}: ")
    return options


class _Loader(yaml.SafeLoader):
    """Reads 1e6 as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)
