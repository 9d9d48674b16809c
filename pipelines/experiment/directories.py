"""Contents of a directory, so that no command writes into the directory of another."""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clusterenv.errors import ConfigError
from clusterenv.store import is_store, open_snapshot
from pipelines.experiment.config_file import CONFIG, read_config

__all__ = ["JOURNAL", "RUN", "check_kind", "check_writable", "note_of", "unused"]

RUN = "run.json"
"""File in a run directory: which checkpoint counts, and whether the run has finished."""
JOURNAL = "replay"
"""Directory in a run directory: the rows of learners with a replay store."""


def content(out: Path) -> tuple[str, str | None] | None:
    """Return what a directory holds, and the command that goes on with it.

    A command that was killed before it saved anything has written there too: it may be running.
    """
    if is_store(out):
        snapshot = open_snapshot(out)
        begun = not snapshot.end and not snapshot.note
        dataset = begun or "dataset" in snapshot.note
        return ("a dataset", "collect") if dataset else ("a store", None)
    if _is_run(out):
        kind = str(_read(out)["kind"])
        return f"a run of {kind}", kind
    if is_store(out / JOURNAL) or (out / "progress.csv").is_file():
        return "what no command here has begun", None
    return None


def check_kind(out: Path, kind: str) -> None:
    """Raise unless a directory is free, or was created by the same command.

    Parameters
    ----------
    out
        The directory; it need not exist.
    kind
        The command: ``ppo``, ``collect``, ``aps_sweep``, …

    Raises
    ------
    ConfigError
        With a directory that is free.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no directory; write elsewhere: --out {unused(out)}")
    found = content(out)
    if found is not None and found[1] != kind:
        raise ConfigError(
            f"{out} holds {found[0]}, and {kind} would write into it; write elsewhere: "
            f"--out {unused(out)}"
        )


def check_writable(path: Path, option: str = "--out ", example: str = "runs/mine") -> None:
    """Raise unless a file or directory can be written, or made; nothing is written.

    Parameters
    ----------
    path
        The file or the directory; its parents need not exist.
    option, example
        What comes before it on the command line, and a value that would do: below the home
        directory, or that of temporary files, where the current one cannot be written either.

    Raises
    ------
    ConfigError
        With the reason.
    """
    reason = _unwritable(path)
    if reason is not None:
        places = (Path(), Path.home(), Path(tempfile.gettempdir()))
        right = next((p / example for p in places if not _unwritable(p / example)), example)
        raise ConfigError(
            f"{option}{path} cannot be written: {reason}; write elsewhere: {option}{right}"
        )


def _unwritable(path: Path) -> str | None:
    try:
        nearest = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
        if nearest != path and not nearest.is_dir():
            return f"{nearest} is no directory"
        needed = os.W_OK | os.X_OK if nearest.is_dir() else os.W_OK
        if not os.access(nearest, needed):
            # As root, only of a file system that is mounted read-only.
            return f"{nearest} is read-only for this user"
    except (OSError, ValueError) as error:  # the name is too long, or has a null byte
        return getattr(error, "strerror", None) or str(error)
    return None


def unused(out: Path) -> Path:
    """Return a path beside another at which there is nothing: it with ``-2``, or the next number.

    Numbered as runs are that get no ``--out``.
    """
    stem = re.sub(r"-\d+$", "", str(out))
    stem = stem if os.path.lexists(stem) else str(out)
    paths = (Path(f"{stem}-{number}") for number in itertools.count(2))
    return next(path for path in paths if not os.path.lexists(path))


def note_of(out: Path) -> Mapping[str, Any] | None:
    """Return what a run or a dataset says of itself; ``None`` if no command has begun one.

    Of a run: ``kind`` and ``args``, and if it has a checkpoint ``learner``, ``number``, ``steps``
    and ``finished``. Where there is a replay store, its last commit names the checkpoint, so rows
    and learner are always of one moment.
    """
    if is_store(out):
        return open_snapshot(out).note or None
    if not _is_run(out):
        return None
    journal = out / JOURNAL
    return {**_read(out), **(open_snapshot(journal).note if is_store(journal) else {})}


def _is_run(out: Path) -> bool:
    return (out / CONFIG).is_file() or (out / RUN).is_file()


def _read(out: Path) -> dict[str, Any]:
    """Return learner and options of a run, and what its last checkpoint says."""
    path, right = out / RUN, f"begin another run: --out {unused(out)}"
    try:
        found = dict(json.loads(path.read_text())) if path.is_file() else {}
        if (out / CONFIG).is_file():
            config = read_config(out, right)
            return {**found, "kind": config["learner"], "args": config["options"]}
        # Older runs have no config.yaml.
        if not (isinstance(found["kind"], str) and isinstance(found["args"], dict)):
            raise TypeError
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is damaged; restore it, or {right}") from error
    return found
