"""Policies as files, which need nothing of the run that wrote them."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import torch
from torch import Tensor, nn

from clusterenv.data.checks import check_flag, check_instance, check_path
from clusterenv.errors import ConfigError, shown
from clusterenv.policies.policy import Policy

__all__ = ["load_policy", "save_policy"]

_LAST, _BEST = "policy.pt", "best.pt"  # in a run directory
_RIGHT = "load_policy('runs/ppo-CartPole-v1-seed1')"


def save_policy(
    policy: Policy,
    file: str | Path | BinaryIO,
    *,
    weights: Mapping[str, Tensor] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> None:
    """Write a policy to a file that :func:`clusterenv.load_policy` reads.

    The file is one of ``torch.save`` and opens with ``weights_only=True``: ``policy`` holds the
    weights, ``structure`` the pickled policy without them. A class of the script that runs is
    pickled as a whole; a class of a module is looked up in that module again.

    Parameters
    ----------
    policy
        To save.
    file
        A path, which is replaced as a whole, or a binary file that is open for writing.
    weights
        Of another version, by the names of ``policy.state_dict()``; default: its own.
    notes
        Numbers, strings, and containers of them that are saved beside the policy.

    Raises
    ------
    ConfigError
        If the policy cannot be pickled.

    Examples
    --------
    >>> import tempfile
    >>> policy = Policy()
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     save_policy(policy, f"{directory}/mine.pt")
    ...     type(load_policy(f"{directory}/mine.pt"))
    <class 'clusterenv.policies.policy.Policy'>
    """
    check_instance("policy", policy, Policy, "save_policy(policy, 'policy.pt')")
    for name, value in (("weights", weights), ("notes", notes)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(
                f"{name}={shown(value)} is no dictionary: "
                "save_policy(policy, 'policy.pt', notes={'steps': 10_000})"
            )
    if not isinstance(file, (str, os.PathLike)) and not callable(getattr(file, "write", None)):
        raise ConfigError(
            f"file={shown(file)} is neither a path nor a file that is open for writing: "
            "save_policy(policy, 'policy.pt')"
        )
    given = policy.state_dict() if weights is None else weights
    kept = {
        **(notes or {}),
        "structure": torch.frombuffer(bytearray(_structure(policy)), dtype=torch.uint8),
        # Copies: a view would be saved with all that it is a view of.
        "policy": {
            name: tensor.detach().cpu().clone()
            for name, tensor in given.items()
            if isinstance(tensor, Tensor)
        },
    }
    if not isinstance(file, (str, os.PathLike)):
        torch.save(kept, file)
        return
    path = check_path("file", file, "save_policy(policy, 'policy.pt')")
    if path.is_dir() or not path.parent.is_dir():
        said = "is a directory" if path.is_dir() else "is in no directory that exists"
        raise ConfigError(f"file={str(path)!r} {said}: save_policy(policy, 'policy.pt')")
    beside = path.with_name(f".{path.name}.tmp")
    try:
        torch.save(kept, beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def load_policy(run: str | Path, *, best: bool = False) -> Policy:
    """Return the policy of a run, or of a file of :func:`clusterenv.save_policy`, ready to act.

    It is on the CPU, in evaluation mode, and needs neither the learner nor the run directory.

    .. warning::
       This unpickles the policy's class, which can run any code, as ``torch.load`` does with
       ``weights_only=False``. Load only what you trust.

    Parameters
    ----------
    run
        A run directory, or a file.
    best
        Of a run that was evaluated: the best version, ``best.pt``, instead of that of the last
        checkpoint, ``policy.pt``.

    Raises
    ------
    ConfigError
        If there is no such policy, or its class cannot be found.

    Examples
    --------
    ::

        policy = clusterenv.load_policy("runs/ppo-CartPole-v1-seed1", best=True)
        with clusterenv.Collector("CartPole-v1", policy, num_envs=8) as collector: ...
    """
    path = check_path("run", run, _RIGHT)
    check_flag("best", best, f"{_RIGHT[:-1]}, best=True)")
    if not path.exists():
        raise ConfigError(f"{path} does not exist; name the directory of a run: {_RIGHT}")
    if path.is_dir():
        path = _file_in(path, best)
    elif best:
        raise ConfigError(
            f"{path} is a file, and best=True names one in a run directory: "
            f"load_policy({str(path)!r})"
        )
    try:
        saved = dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # of torch.load there are many kinds
        raise ConfigError(f"{path} is no policy: {' '.join(str(error).split())}") from error
    if not {"structure", "policy"} <= saved.keys():
        raise ConfigError(
            f"{path} holds no policy that can be loaded without its learner; runs write "
            f"{_LAST} with every checkpoint: {_RIGHT}"
        )
    policy = _rebuilt(path, saved["structure"].numpy().tobytes(), saved["policy"])
    return policy.eval()


def _file_in(run: Path, best: bool) -> Path:
    last = run / _LAST
    if best and not (run / _BEST).is_file():
        raise ConfigError(
            f"{run} has no {_BEST}: a run that is evaluated keeps its best version, clusterenv "
            f"train ppo --evaluate-every 10000; the last one: load_policy({str(run)!r})"
        )
    if not best and not last.is_file():
        raise ConfigError(
            f"{run} has no {_LAST}, which a run writes with every checkpoint; go on with the run, "
            f"or name another: {_RIGHT}"
        )
    return run / _BEST if best else last


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a policy, and the names of its weights instead of them."""

    def __init__(self, file: BinaryIO, policy: nn.Module) -> None:
        super().__init__(file, protocol=5)
        self._names = {
            id(tensor): (name, isinstance(tensor, nn.Parameter), tensor.requires_grad)
            for name, tensor in policy.state_dict(keep_vars=True).items()
            if isinstance(tensor, Tensor)
        }

    def persistent_id(self, value: Any) -> Any:
        return self._names.get(id(value)) if isinstance(value, Tensor) else None


class _Unpickler(pickle.Unpickler):
    """Undoes it; weights that the policy has twice are one tensor again."""

    def __init__(self, file: BinaryIO, weights: Mapping[str, Tensor]) -> None:
        super().__init__(file)
        self._weights = weights
        self._made: dict[str, Tensor] = {}

    def persistent_load(self, named: Any) -> Tensor:
        name, is_parameter, requires_grad = named
        if name not in self._made:
            tensor = self._weights[name]
            self._made[name] = nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._made[name]


def _structure(policy: Policy) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, policy).dump(policy)
    except Exception as error:
        raise ConfigError(
            f"{type(policy).__name__} cannot be saved: {error}. Locks, open files and environments "
            "cannot be pickled; save its weights alone: torch.save(policy.state_dict(), 'w.pt')"
        ) from error
    return file.getvalue()


def _rebuilt(path: Path, structure: bytes, weights: Mapping[str, Tensor]) -> Policy:
    try:
        policy = _Unpickler(io.BytesIO(structure), weights).load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the class of {path} is not found here: {error}. Install the package that defines it, "
            "or put its directory on PYTHONPATH"
        ) from error
    except Exception as error:
        raise ConfigError(f"{path} is no policy: {type(error).__name__}: {error}") from error
    check_instance(str(path), policy, Policy, _RIGHT)
    loaded: Policy = policy
    return loaded
