"""``config.yaml`` of a run directory: what runs there, so that it can be read and repeated."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import clusterenv
from clusterenv.errors import ConfigError
from pipelines.experiment import files

__all__ = ["CONFIG", "read_config", "record", "write_config"]

CONFIG = "config.yaml"
"""File in a run directory: learner, command, options, versions of packages, commits."""
PACKAGES = (
    *("clusterenv", "torch", "gymnasium", "numpy", "pyarrow", "dask", "distributed"),
    *("ale-py", "box2d", "envpool", "mujoco"),  # of environments, if they are there
)
HEADER = "# What ran here, as of its newest session. Written by the run; changes have no effect.\n"


def record(kind: type[Any], command: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ``config.yaml`` holds.

    Parameters
    ----------
    kind
        The learner's class.
    command
        That gives these options.
    options
        Every option as it is used.
    """
    return {
        "learner": kind.name,
        "command": command,
        "options": dict(options),
        "versions": {"python": platform.python_version(), **dict(_versions())},
        "commits": dict(_commits(kind)),
    }


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Replace the file as a whole."""
    text = HEADER + yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
    files.replace(directory / CONFIG, lambda file: file.write(text.encode()))


def read_config(directory: Path, right: str) -> dict[str, Any]:
    """Return what the file holds.

    Raises
    ------
    ConfigError
        If it is damaged; the message ends with what would be ``right``.
    """
    path = directory / CONFIG
    try:
        found = yaml.safe_load(path.read_text())
        if not (isinstance(found["learner"], str) and isinstance(found["options"], dict)):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is damaged; restore it, or {right}") from error
    return dict(found)


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            if name == "clusterenv":
                yield name, clusterenv.__version__


def _commits(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Yield package and commit where the code is in a checkout: of clusterenv, of the learner."""
    for name in dict.fromkeys(("clusterenv", kind.__module__.partition(".")[0])):
        module = sys.modules.get(name)
        source = getattr(module, "__file__", None) or inspect.getsourcefile(kind)
        if source and (commit := _commit(Path(source))):
            yield name, commit


def _commit(source: Path) -> str | None:
    """Return the commit of a file's checkout, ``-dirty`` if files differ from it."""
    if not _git(source, "ls-files", "--error-unmatch", "--", source.name):
        return None  # in no checkout, or only beneath one, as a virtual environment may be
    return _git(source, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(source: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=source.parent,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
