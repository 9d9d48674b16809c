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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from clusterenv.errors import ConfigError
from pipelines.experiment.checks import convert, flag

__all__ = ["command", "from_file", "read", "words_of"]

Kind = TypeVar("Kind")
Presets = Mapping[str, Mapping[str, Any]]
"""What suits an environment, by its id."""

HINT = "Options can come from a file too: --options FILE, in YAML, as in 'num_envs: 32'."


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
    text = f"{(description or '').strip()}\n\n{HINT}"

    # Checked when all is known, and not by tyro, which draws a frame through the message.
    class Unchecked(kind):  # type: ignore[valid-type, misc]
        def __post_init__(self) -> None:
            pass

    default = Unchecked(**{**values, **given})
    read = tyro.cli(Unchecked, default=default, args=words, description=text, prog=prog)
    return kind(**{name: getattr(read, name) for name in fields})


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
