"""A run in several sessions: the same command resumes the same run.

The journal's last commit names the learner's file that belongs to its rows, so rows and learner are
always saved together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from clusterenv.errors import ConfigError
from clusterenv.store import ReplayStore
from pipelines import options
from pipelines.directories import check_kind, content, note_of, taken
from pipelines.run import Run

__all__ = ["Session", "arguments", "check_arguments", "run_directory"]

OF_NO_RUN = ("out", "wandb", "dashboard", "quiet", "evaluate_every", "evaluate_episodes")


class Session:
    """A run's directory, and where its last session ended.

    Parameters
    ----------
    args
        Arguments of the command, with ``out`` and ``wandb``.
    kind
        The command.
    name
        Of the directory under ``runs/``, if there is no ``--out``.
    free
        Arguments that may differ from those that began the run.

    Raises
    ------
    ConfigError
        If the directory is of another run.
    """

    def __init__(self, args: Any, kind: str, name: str, free: Collection[str]) -> None:
        self.out = run_directory(args, kind, name)
        self.journal = self.out / "replay"
        check_kind(self.out, kind)
        note = note_of(self.journal)
        if note is not None:
            check_arguments(self.out, note["args"], args, free)
        self.note: Mapping[str, Any] = note or {"learner": "learner-0.pt", "number": 0}
        self.resumes = note is not None
        self.run = Run(
            self.out,
            resume=self.resumes,
            checkpoint=self.note["learner"],
            wandb=args.wandb,
        )
        self._kept = {"kind": kind, "args": arguments(args)}
        self._number = int(self.note["number"])

    def commit(self, store: ReplayStore, learner: Mapping[str, Any], **note: Any) -> None:
        """Commit the store's rows and a state of the learner together.

        Parameters
        ----------
        store
            Its journal is the run's.
        learner
            Tensors, numbers, and containers of them.
        **note
            Kept with it.
        """
        self._number += 1
        self.run.save(learner, f"learner-{self._number}.pt")
        name = self.run.checkpoint.name
        store.commit(learner=name, number=self._number, **self._kept, **note)
        for other in self.out.glob("learner-*"):
            if other.name != name:
                other.unlink()


def arguments(args: Any) -> dict[str, Any]:
    """Return a dataclass of arguments as JSON values."""
    return dict(json.loads(json.dumps(dataclasses.asdict(args), default=str)))


def run_directory(args: Any, kind: str, name: str) -> Path:
    """Return ``--out``, or under ``runs/`` the first directory that this command may use.

    That is one of the same arguments whose run has not finished, or else a new one.
    """
    if args.out is not None:
        return Path(args.out)
    wanted = _of_run(arguments(args))
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    for out in map(Path("runs").joinpath, candidates):
        found = content(out)
        if found is not None and kind not in found.kinds:
            continue
        note = note_of(out / "replay")
        if note is None or (_of_run(note["args"]) == wanted and not note["finished"]):
            return out
    raise AssertionError("there is always another number")


def check_arguments(out: Path, begun: Mapping[str, Any], args: Any, free: Collection[str]) -> None:
    """Raise if a run was begun with other arguments, apart from those that are ``free``.

    Raises
    ------
    ConfigError
        With the arguments that differ.
    """
    differ = [
        f"{options.flag(name, begun.get(name))} instead of {options.flag(name, value)}"
        for name, value in arguments(args).items()
        if name not in free and begun.get(name) != value
    ]
    if differ:
        raise ConfigError(
            f"the run in {out} was begun with {', '.join(differ)}; go on with the arguments that "
            f"began it, or write elsewhere: --out {taken(out)}-2"
        )


def _of_run(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kept.items() if name not in OF_NO_RUN}
