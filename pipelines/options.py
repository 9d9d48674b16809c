"""Options of a command, from its dataclass, a preset, a file and the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import shlex
import shutil
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
import yaml

from clusterenv.errors import ConfigError

__all__ = ["command", "flag", "from_file", "read"]

Options = TypeVar("Options")

HINT = "Options can come from a file too: --options FILE, in YAML, as in 'num_envs: 32'."


def read(
    kind: type[Options],
    argv: Sequence[str] | None,
    *,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    description: str | None = None,
    prog: str | None = None,
) -> Options:
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


def command(prog: str, args: Any, presets: Mapping[str, Mapping[str, Any]], **changes: Any) -> str:
    """Return the command that gives these options, with ``changes``.

    Parameters
    ----------
    prog
        The command without options.
    args
        A dataclass that :func:`read` has returned; it has ``env``.
    presets
        What suits an environment, by its id: it need not be said.
    **changes
        Options that shall be others.
    """
    args = dataclasses.replace(args, **changes)
    program, *rest = prog.split()
    if shutil.which(program) is None:  # in an environment that is not activated
        beside = Path(sys.executable).with_name(program)
        program = os.path.relpath(beside) if beside.exists() else program
    fields = dataclasses.fields(args)
    tacit = {field.name: field.default for field in fields}
    tacit |= {**presets.get(args.env, {}), "env": args.env}
    words = [program, *rest, "--env", args.env]
    for field in fields:
        value = getattr(args, field.name)
        if value != tacit[field.name]:
            words += _words(field.name, value)
    return shlex.join(words)


def flag(name: str, value: Any) -> str:
    """Return the words that give an option this value.

    Examples
    --------
    >>> flag("hidden", (64, 64)), flag("clip_value", False)
    ('--hidden 64 64', '--no-clip-value')
    """
    return shlex.join(_words(name, value))


def _words(name: str, value: Any) -> list[str]:
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    several = value if isinstance(value, (tuple, list)) else (value,)
    return [f"--{name}", *map(str, several)]


def from_file(kind: type[Any], path: Path) -> dict[str, Any]:
    """Return the options in a YAML file, by the names of the dataclass's fields.

    Raises
    ------
    ConfigError
        If it cannot be read, or names no option.
    """
    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--options {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--options {path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--options {path} holds no names and values, such as 'num_envs: 32'")
    kinds = typing.get_type_hints(kind)
    options: dict[str, Any] = {}
    for name, value in found.items():
        field = str(name).replace("-", "_")
        if field not in kinds:
            close = difflib.get_close_matches(field, kinds, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"one of {', '.join(kinds)}"
            raise ConfigError(f"--options {path}: {name!r} is no option; {hint}")
        try:
            options[field] = _cast(value, kinds[field])
        except (TypeError, ValueError):
            wanted = _written(kinds[field])
            raise ConfigError(
                f"--options {path}: {name}: {value!r} is not {wanted}, which is wanted"
            ) from None
    return options


def _cast(value: Any, kind: Any) -> Any:
    """Convert a value from a file to the type of its option."""
    if typing.get_origin(kind) is types.UnionType:
        return None if value is None else _cast(value, _without_none(kind))
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise ValueError
        return value
    if typing.get_origin(kind) is tuple:
        (each, *_) = typing.get_args(kind)
        return tuple(_cast(item, each) for item in (value if isinstance(value, list) else [value]))
    if kind is Path:
        return Path(_exactly(value, str))
    if kind in (int, float):
        number = float(value) if isinstance(value, str) else value  # YAML takes 1e6 for a string
        if isinstance(number, bool) or kind(number) != number:
            raise ValueError
        return kind(number)
    return _exactly(value, kind) if kind in (bool, str) else value


def _exactly(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _written(kind: Any) -> str:
    """Describe a type for an error message."""
    if typing.get_origin(kind) is types.UnionType:
        return _written(_without_none(kind))
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_written(typing.get_args(kind)[0])}"
    names = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}
    return names.get(kind, "text")


def _without_none(kind: Any) -> Any:
    """Return the type of an optional option without ``None``."""
    (given,) = (each for each in typing.get_args(kind) if each is not type(None))
    return given
