"""A run in several sessions: the same command goes on with the run that it began."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import clusterenv
from clusterenv.errors import ConfigError, Diverged
from clusterenv.policies import Policy
from clusterenv.store import ReplayStore
from pipelines.experiment import files
from pipelines.experiment.checks import flag
from pipelines.experiment.config_file import write_config
from pipelines.experiment.directories import JOURNAL, RUN, check_kind, content, note_of, unused
from pipelines.experiment.options import options_to_name

__all__ = [
    "POLICY",
    "RunDirectory",
    "arguments",
    "check_arguments",
    "find_directory",
    "has_checkpoint",
]

POLICY = "policy.pt"
"""File in a run directory: the policy of the last checkpoint."""
OF_NO_RUN = (
    "out",
    "fresh",
    "wandb",
    "dashboard",
    "quiet",
    "evaluate_every",
    "evaluate_episodes",
    "lag_limit",
)


class RunDirectory:
    """A run's directory: locked by this process, with the checkpoint that it goes on from.

    Every checkpoint is a new file. Of a learner with a replay store, the journal's commit names
    the file that belongs to its rows; of others, ``run.json`` does. ``config.yaml`` tells what
    runs.

    Parameters
    ----------
    args
        Options of the run, with ``out`` and ``fresh``.
    kind
        The command.
    free
        Options that may differ from those that began the run.

    Raises
    ------
    ConfigError
        If the directory is of another run, or another process is writing to it.
    """

    def __init__(self, args: Any, kind: str, free: Collection[str]) -> None:
        self.path = find_directory(args, kind)
        check_kind(self.path, kind)
        if args.fresh and content(self.path) is not None:
            raise ConfigError(
                f"--fresh begins another run, and {self.path} holds one; write elsewhere: "
                f"--out {unused(self.path)}"
            )
        note = note_of(self.path) or {}
        if "learner" in note:
            other = (
                f"or start another run from its weights: --init-from {self.path} "
                f"--out {unused(self.path)}"
            )
            check_arguments(self.path, note["args"], args, free, other)
        self._lock = _lock(self.path)
        self._note = {"kind": kind, "args": arguments(args)}
        self._number = int(note.get("number", 0))
        self.checkpoint: Path | None = self.path / note["learner"] if "learner" in note else None
        """The last one; ``None`` if there is none."""

    @property
    def resumes(self) -> bool:
        """Whether there is something to go on from."""
        return self.checkpoint is not None

    @property
    def journal(self) -> Path:
        """Where a replay store keeps its rows."""
        return self.path / JOURNAL

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write down what runs here, as :func:`pipelines.experiment.config_file.record` tells."""
        write_config(self.path, config)

    def load(self) -> dict[str, Any]:
        """Return the state of the last checkpoint.

        Raises
        ------
        ConfigError
            If it cannot be read.
        """
        if self.checkpoint is None:
            return {}
        try:
            return dict(torch.load(self.checkpoint, weights_only=True))
        except Exception as error:  # of torch.load there are many kinds
            raise ConfigError(
                f"{self.checkpoint} cannot be read: {' '.join(str(error).split())}; restore it, or "
                f"begin another run: --out {unused(self.path)}"
            ) from error

    def commit(self, state: Mapping[str, Any], store: ReplayStore | None, **note: Any) -> None:
        """Write a checkpoint that counts from now on, with the rows of a store if there is one.

        A reader, or a crash, sees the old checkpoint or the new one, never half of one.

        Parameters
        ----------
        state
            Tensors, numbers, and containers of them.
        store
            Its journal is the run's.
        **note
            Written beside it.

        Raises
        ------
        Diverged
            If a tensor holds NaN; the checkpoint before is left as it is.
        """
        for place, tensor in _tensors(state):
            if tensor.is_floating_point() and tensor.isnan().any():
                last = self.checkpoint or "nothing"
                raise Diverged(f"the learner's {place} holds NaN and is not saved; saved is {last}")
        self._number += 1
        path = self.path / f"learner-{self._number}.pt"
        kept = {**self._note, **note, **state}
        files.replace(path, lambda file: torch.save(kept, file))
        note = {"learner": path.name, "number": self._number, **note}
        if store is None:
            text = f"{json.dumps(note, indent=2)}\n"
            files.replace(self.path / RUN, lambda file: file.write(text.encode()))
        else:
            store.commit(**note)
        self.checkpoint = path
        for other in self.path.glob("learner-*"):
            if other != path:
                other.unlink()

    def keep_policy(self, policy: Policy, steps: int) -> None:
        """Write what acts to a file of its own, for :func:`clusterenv.load_policy`."""
        notes = {**self._note, "steps": steps}
        files.replace(
            self.path / POLICY,
            lambda file: clusterenv.save_policy(policy, file, notes=notes),
            sync=False,  # a checkpoint has its weights too
        )

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def arguments(args: Any) -> dict[str, Any]:
    """Return a dataclass of options as JSON values."""
    return dict(json.loads(json.dumps(dataclasses.asdict(args), default=str)))


def find_directory(args: Any, kind: str) -> Path:
    """Return ``--out``, or under ``runs/`` the first directory that this command may use.

    That is one with the same options whose run has not finished, or else a new one.
    """
    if args.out is not None:
        return Path(args.out)
    name = f"{kind}-{args.env.replace('/', '-')}-seed{args.seed}"
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    for out in map(Path("runs").joinpath, candidates):
        found = content(out)
        if found is None or (found[1] == kind and not args.fresh and _goes_on(out, args)):
            return out
    raise AssertionError("there is always another number")


def _goes_on(out: Path, args: Any) -> bool:
    """Whether a run has these options and has not finished."""
    note = note_of(out) or {}
    if "learner" not in note:
        return True  # it has saved nothing
    return bool(not note["finished"] and _of_run(note["args"]) == _of_run(arguments(args)))


def has_checkpoint(args: Any, kind: str) -> bool:
    """Whether this command goes on with a run instead of beginning one."""
    return "learner" in (note_of(find_directory(args, kind)) or {})


def check_arguments(
    out: Path,
    begun: Mapping[str, Any],
    args: Any,
    free: Collection[str],
    other: str | None = None,
) -> None:
    """Raise if a run was begun with other options, apart from those that are ``free``.

    The message ends with what to do if these options are meant: ``other``.

    Raises
    ------
    ConfigError
        With the options that differ.
    """
    now = arguments(args)
    names = [name for name in now if name not in free and begun.get(name) != now[name]]
    differ = [
        f"{_flag(name, begun.get(name))} instead of {_flag(name, now[name])}"
        for name in options_to_name(begun, args, names)
    ]
    if differ:
        raise ConfigError(
            f"the run in {out} was begun with {', '.join(differ)}; go on with the options that "
            f"began it, {other or f'or write elsewhere: --out {unused(out)}'}"
        )


def _flag(name: str, value: Any) -> str:
    return f"no --{name.replace('_', '-')}" if value is None else flag(name, value)


def _of_run(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name not in OF_NO_RUN}


def _lock(directory: Path) -> int:
    """Create a directory and lock it until this process ends; return the lock's descriptor."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written: {error.strerror}; write elsewhere: --out runs/mine"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"another process is writing to {directory}; wait for it, or begin another run: --fresh"
        ) from error
    return descriptor


def _tensors(value: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors of a state, and where each is."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _tensors(part, f"{place}.{name}" if place else str(name))
