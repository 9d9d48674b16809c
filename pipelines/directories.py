"""Contents of a directory, so that no command writes into the directory of another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from clusterenv.errors import ConfigError
from clusterenv.store import is_store, open_snapshot

__all__ = ["Content", "check_kind", "content", "note_of", "taken"]

OF_PPO = ("checkpoint.pt", "progress.csv", "metrics.jsonl")  # those of others lie beside rows


class Content(NamedTuple):
    """Contents of a directory, and the commands that can resume it."""

    said: str
    kinds: tuple[str, ...]


DATASET = Content("a dataset", ("collect",))
STORE = Content("a store", ())


def content(out: Path) -> Content | None:
    """Return what a directory holds; ``None`` if no command has written there.

    A command that was killed before it saved anything has written there too: it may be running.
    """
    if is_store(out):
        snapshot = open_snapshot(out)
        begun = not snapshot.end and not snapshot.note
        return DATASET if begun or "dataset" in snapshot.note else STORE
    if is_store(out / "replay"):
        note = note_of(out / "replay")
        if note is None or ("args" in note and "kind" not in note):
            return Content("a run of dqn or apex", ("dqn", "apex"))
        return Content(f"a run of {note['kind']}", (note["kind"],)) if "kind" in note else STORE
    if any((out / name).exists() for name in OF_PPO):
        return Content("a run of ppo", ("ppo",))
    return None


def check_kind(out: Path, kind: str) -> None:
    """Raise unless a directory is free, or was created by the same command.

    Parameters
    ----------
    out
        The directory; it need not exist.
    kind
        The command: ``ppo``, ``dqn``, ``apex``, ``collect``, ``aps_sweep`` or ``aps_learners``.

    Raises
    ------
    ConfigError
        With a directory that is free.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is no directory; write elsewhere: --out {taken(out)}-2")
    found = content(out)
    if found is not None and kind not in found.kinds:
        raise ConfigError(
            f"{out} holds {found.said}, and {kind} would write into it; write elsewhere: "
            f"--out {taken(out)}-2"
        )


def taken(out: Path) -> Path:
    """Return a path such that the path with ``-2`` appended does not exist."""
    while Path(f"{out}-2").exists():
        out = Path(f"{out}-2")
    return out


def note_of(journal: Path) -> Mapping[str, Any] | None:
    """Return the note of a journal's last commit; ``None`` if there was none."""
    return open_snapshot(journal).note or None if is_store(journal) else None
